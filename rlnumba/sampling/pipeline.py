"""The pipeline of a run's groups between prompts and training: what is drawn, when, and what is trained on next.

    version       optimizer steps done; every token carries the version of the weights that sampled it
    admission     the groups of the generation that step b trains on are given out once version + max_staleness >= b
    Pipeline      admitted groups: sampler -> rewards -> buffer -> `take`, in the order of the generations

Without [async] a generation is given out when it is asked for, and is all that there is. With max_staleness 0 the
groups of a step are given out when the weights that they are trained with are complete: both have the same seeds, so
the same text and weights.

With dynamic sampling a group whose rewards turn out equal makes room for a further prompt, which the newest weights
begin, as long as more groups that differ are wanted. Without [async] a generation then has the first groups that
differ, in the order of the prompts, and all before the last of them: it depends on prompts, weights and seed alone, for
a group that is long, or whose rewards are slow, is waited for, not replaced. Up to over_sampling_batch_size groups are
unfinished, not scored yet, or known to differ, and those after the last that is needed are dropped: their prompts come
again. With [async] each group that is begun gives its place to another one until it differs, so that without staleness
as many are drawn.

Sources: AReaL (arXiv 2505.24298) for the cap; PipelineRL (arXiv 2509.19128) for in-flight updates; DAPO (arXiv
2503.14476) for dynamic sampling, and slime for over_sampling_batch_size.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rlnumba.config import AsyncConfig
from rlnumba.data import PromptData
from rlnumba.engine.episodes import GroupRequest
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.environments.episode import RewardInputs
from rlnumba.rewards import RewardError, Rewards
from rlnumba.rewards.calling import Pending
from rlnumba.runtime import device
from rlnumba.sampling.group_buffer import Group, GroupBuffer
from rlnumba.sampling.sampler import Alive
from rlnumba.sampling.samples import (
    as_generation,
    derived_seed,
    distinct_params,
    given_completion_of,
    is_uniform,
    submit_group,
)

# The options of a run without [async], as far as they apply.
SYNCHRONOUS = AsyncConfig(max_staleness=0, staleness=["cap"], recompute_kv_cache_after_weight_updates=True)


class Course(NamedTuple):
    """The generations of a run that are to come: (step, index) of each, the optimizer step and the micro-step of it
    that train on it first. trainer_state_of(step): TrainingProgress; params_of(step, index): SamplingParams."""

    generations: Iterable
    trainer_state_of: Callable
    params_of: Callable


class PromptSource(NamedTuple):
    """The prompts of a run and their rewards. order: a PromptOrder; rewards: None on other ranks than 0."""

    prompts: PromptData
    order: object
    rewards: Rewards | None


@dataclass(frozen=True)
class Drawn:
    """The content of a group in the buffer; one that changes is replaced by another, so that any thread may read it.

    prompt: its index. step, index: of the generation that it was admitted for. version: of the weights that may begin
    it. columns: names of what rewards get in its generation. attempts: how often it was given out; replaced: how often
    another prompt has taken its place because its engines failed. draw: the number of its prompt among all that were
    drawn. completions, pending: once it is complete. differs: whether its rewards do, once that was looked at; unused:
    those that had its place before, with equal rewards, each a Drawn.

    The thread of the engines replaces that of a group in flight, the trainer's that of a complete or dropped one.
    """

    prompt: int
    step: int
    index: int
    version: int
    params: SamplingParams
    columns: list[str]
    attempts: int = 1
    replaced: int = 0
    draw: int = 0
    completions: tuple[Completion, ...] = ()
    pending: Pending | None = None
    differs: bool | None = None
    unused: tuple = ()

    @property
    def oldest_version(self):
        return min(int(completion.array("policy_versions").min()) for completion in self.completions)


class Pipeline:
    """The groups of a run between prompts and training, on its first rank.

    run: of a trainer on prompts. course: Course; source: PromptSource; version: of the weights as they are. `start`
    gives it its sampler.
    """

    def __init__(self, run, course, source, version):
        self.run, self.plan, self.is_ahead = run, run.train.generation, run.generates_beside
        self.options = run.asynchronous if self.is_ahead else SYNCHRONOUS
        self.trainer_state_of, self.params_of = course.trainer_state_of, course.params_of
        self.prompts, self.order, self.rewards = source
        self.version, self.coming, self.sampler = version, deque(course.generations), None
        # Groups of a generation that are given out at once.
        self.window = self.plan.dynamic.window if self.plan.dynamic else self.plan.num_prompts
        capacity = self.options.queue_maxsize // self.plan.num_completions_each if self.is_ahead else self.window
        self.buffer = GroupBuffer(capacity, self.options.order)
        self.next_number, self.num_dropped, self.num_rejected, self.sync_s = 0, 0, 0, 0.0
        # Prompts drawn so far, and of each generation that is not trained on yet, by (step, index), their token ids.
        self.num_drawn, self.prompt_ids = 0, {}
        # Without [async], with dynamic sampling: prompts that the generation may still draw.
        self.supply = deque()
        self.last_stats, self.last_time, self.metrics = Alive(0, 0.0, 0.0), time.monotonic(), {}

    def start(self, sampler):
        """Give out what may begin. sampler: a Sampler with the weights of `version`."""
        self.sampler = sampler
        for group, is_complete in self.buffer.snapshot():
            if not is_complete:
                self._give_out(group)
        if self.is_ahead:
            self.admit()

    def update_weights(self, version):
        """The policy's weights are of another version now: give them to the sampler, and admit what may follow."""
        # Kernels launched before are training, and no part of the push.
        device.synchronize()
        began = time.perf_counter()
        self.sampler.update_weights(version)
        self.version, self.sync_s = version, time.perf_counter() - began
        if self.is_ahead:
            self.admit()

    def admit(self):
        """Give out the groups of the generations that may begin."""
        while self.coming and len(self.buffer) + self.window <= self.buffer.capacity:
            step, index = self.coming[0]
            if "cap" in self.options.staleness and step > self.version + self.options.max_staleness:
                break
            self.coming.popleft()
            self._begin(step, index)

    def _begin(self, step, index):
        """Give out the groups of a generation."""
        if self.plan.dynamic and not self.is_ahead:
            self.supply = deque(self.order.upcoming(self.plan.num_prompts, self.plan.dynamic.most_prompts))
        columns = self.prompts.columns(list(self.supply)) if self.supply else None
        chosen = self._draw_prompts(self.window)
        columns = list(self.prompts.columns(chosen) if columns is None else columns)
        params, are_drawn = self._params_of(step, index, chosen), self._are_drawn(step, index, len(chosen))
        for prompt, own_params, is_drawn in zip(chosen, params, are_drawn, strict=True):
            drawn = Drawn(prompt, step, index, self.version, own_params, columns, draw=self._number_draw())
            group = Group(self.next_number, drawn)
            self.next_number += 1
            self.buffer.reserve(group)
            if is_drawn:
                self._give_out(group)
            else:
                given = given_completion_of(self.prompts.prompts[prompt], step)
                self.complete(group, (given,) * self.plan.num_drawn_each)

    def _are_drawn(self, step, index, count):
        """Whether the model draws the completions of each prompt of a generation: (count,) bool."""
        if self.plan.drawn_share == 1:
            return [True] * count
        noise = np.random.default_rng(derived_seed(self.run.seed, step, index, 3)).random(count)
        return noise < self.plan.drawn_share

    def _draw_prompts(self, count):
        """The next prompts of the order: list of indices, of the supply if there is one, as far as it goes."""
        if not self.plan.dynamic:
            return self.order.take(count)
        if not self.is_ahead:
            return [self.supply.popleft() for _ in range(min(count, len(self.supply)))]
        # Epochs follow one another, as in the synchronous run.
        chosen = self.order.upcoming(count, count)
        self.order.advance(count)
        return chosen

    def _number_draw(self):
        self.num_drawn += 1
        return self.num_drawn - 1

    def _params_of(self, step, index, chosen):
        """SamplingParams of prompts that are drawn for a generation, beside those that were drawn for it before."""
        ids = self.prompt_ids.setdefault((step, index), [])
        ids += [self.prompts.prompts[i].prompt_token_ids for i in chosen]
        return distinct_params(ids, self.params_of(step, index))[-len(chosen) :]

    def take(self, step, status):
        """The groups of the next generation: (list of Drawn, tokens that were sampled in vain).

        step: that trains on them first. With dynamic sampling those of equal rewards whose places others have are among
        them, in the order of the draws.
        """
        began, before = time.perf_counter(), 0 if self.is_ahead else self.sampler.stats.num_tokens
        if not self.is_ahead:
            self.admit()
        progress = self._progress()
        while (groups := self._next(self.plan.num_prompts)) is None:
            has_news = False
            while not has_news:
                has_news = self.sampler.poll()
                if self.plan.dynamic:
                    has_news = True  # rewards may be known at any time
                elif not self.is_ahead:
                    has_news = self.sampler.is_idle
                status(progress())
        waited_s, num_unused = time.perf_counter() - began, 0
        if self.plan.dynamic:
            found = sorted((each for group in groups for each in _all_drawn(group)), key=lambda each: each.draw)
        else:
            found = [group.content for group in groups]
        if self.is_ahead:
            self.metrics = self._metrics(step, groups, waited_s)
        elif self.plan.dynamic:
            found = self._needed(found)
            self.order.advance(len(found))
            tokens = sum(completion.num_drawn for each in found for completion in each.completions)
            num_unused = self.sampler.stats.num_tokens - before - tokens
        found = [each for each in found if each.completions]
        self.buffer.take(groups)
        kept = {(group.content.step, group.content.index) for group, _ in self.buffer.snapshot()}
        self.prompt_ids = {key: ids for key, ids in self.prompt_ids.items() if key in kept}
        if self.is_ahead:
            self.admit()
        return found, num_unused

    def _progress(self):
        """A function that describes what `take` waits for: str."""
        if self.is_ahead:
            buffer = self.buffer
            return lambda: f"{buffer.num_complete} groups wait, {buffer.num_in_flight} are being generated"
        sampler, tokens, finished = self.sampler, self.sampler.stats.num_tokens, self.sampler.num_finished
        total, wanted = self.plan.num_drawn_each * len(self.buffer), self.plan.num_prompts

        def text():
            num_tokens = sampler.stats.num_tokens - tokens
            if not self.plan.dynamic:
                return f"{sampler.num_finished - finished} of {total} completions, {num_tokens} tokens"
            count = self._num_differing()
            return f"{count} of {wanted} groups with rewards that differ, {num_tokens} tokens"

        return text

    def _next(self, size):
        """The next groups, or None while some of them are not complete."""
        self.sampler.check()
        for group in self.buffer.dropped():
            self._replace(group)
        if not self.plan.dynamic:
            groups = self.buffer.next(size, self.sampler.wait_s)
        elif self.is_ahead:
            groups = self._next_that_differ(size)
        else:
            groups = self._next_needed()
        if groups is None or "reject" not in self.options.staleness:
            return groups
        old = [each for each in groups if self.version - each.content.oldest_version > self.options.max_staleness]
        for group in old:
            self.num_rejected += 1
            group.content = replace(group.content, version=self.version)
            self.buffer.begin_again(group)
            self._again(group, self._request(group))
        return groups if not old else None

    def _next_that_differ(self, size):
        """The next groups, or None until all are known to have rewards that differ or no more may be drawn."""

        def unknown(groups):
            return [group for group in groups if group.content.differs is None]

        def scored():
            """The complete groups whose rewards are known by now."""
            complete = unknown(self._complete())
            ready = self.rewards.ready([group.content.pending for group in complete])
            return [group for group, is_ready in zip(complete, ready, strict=True) if is_ready]

        groups = self.buffer.next(size, self.sampler.wait_s, scored)
        # If all are complete, this waits for their rewards.
        for group in {group.number: group for group in [*scored(), *unknown(groups or ())]}.values():
            self._replace_uniform(group)
        groups = self.buffer.next(size)
        return None if groups is None or unknown(groups) else groups

    def _next_needed(self):
        """All groups of the generation, or None until it is known of those that are needed whether they differ.

        Then the others leave the sampler.
        """
        for group in self._scored_by_now():
            self._replace_uniform(group)
        if any(drawn.differs is None for drawn in self._needed(self._all_draws())):
            return None
        groups = [group for group, _ in self.buffer.snapshot()]
        for group in groups:
            if group.state == "in_flight":
                self.sampler.abort(group.number)
        return groups

    def _scored_by_now(self):
        """The complete groups that are needed and whose rewards are known; waits for some where the sampler is idle.

        Functions of this process are called when as many groups wait as are still wanted, so that a model scores a
        batch.
        """
        last = self._needed(self._all_draws())[-1].draw
        waiting = [each for each in self._complete() if each.content.differs is None and each.content.draw <= last]
        waiting.sort(key=lambda group: group.content.draw)
        pending, is_idle = [group.content.pending for group in waiting], not self.buffer.num_in_flight
        if self.rewards.all_in_workers:
            known = self.rewards.ready(pending)
            return [group for group, is_known in zip(waiting, known, strict=True) if is_known] or waiting[
                : int(is_idle)
            ]
        if not is_idle and len(waiting) < self.plan.num_prompts - self._num_differing():
            return []
        with suppress(RewardError):  # it is raised for its group
            self.rewards.collect(pending)
        return waiting

    def _complete(self):
        return [group for group, is_complete in self.buffer.snapshot() if is_complete]

    def _all_draws(self):
        """All that was drawn for the groups in the buffer, in the order of the draws: list of Drawn."""
        draws = (drawn for group, _ in self.buffer.snapshot() for drawn in _all_drawn(group))
        return sorted(draws, key=lambda drawn: drawn.draw)

    def _needed(self, draws):
        """Those of a generation's draws up to the last that differs and is wanted, as far as that is known: list."""
        differing = [i for i, drawn in enumerate(draws) if drawn.differs]
        wanted = self.plan.num_prompts
        return draws[: differing[wanted - 1] + 1] if len(differing) >= wanted else draws

    def _num_differing(self):
        """Groups in the buffer that are known to differ: int."""
        return sum(group.content.differs is True for group, _ in self.buffer.snapshot())

    def _may_draw(self, drawn):
        """Whether a generation may have one more prompt in the place of a group of equal rewards."""
        if not self.is_ahead:
            return bool(self.supply) and self._num_differing() < self.plan.num_prompts
        return len(self.prompt_ids[drawn.step, drawn.index]) < self.plan.dynamic.most_prompts

    def _replace_uniform(self, group):
        """Let a further prompt take the place of a complete group if its rewards are equal."""
        drawn = group.content
        try:
            scores = self.rewards.collect([drawn.pending])
        except RewardError:  # raised again where the generation's rewards are collected, if it is needed
            group.content = replace(drawn, differs=True)
            return
        prompts = [self.prompts.prompts[drawn.prompt]]
        found = as_generation(prompts, [drawn.completions], scores, self.rewards.weights, None)
        differs = not is_uniform(found.groups[0], self.run.train)
        group.content = drawn = replace(drawn, differs=differs)
        if not differs and self._may_draw(drawn):
            group.content = replace(drawn, unused=(*drawn.unused, replace(drawn, unused=())))
            (prompt,) = self._draw_prompts(1)
            (params,) = self._params_of(drawn.step, drawn.index, [prompt])
            self._begin_with(group, prompt, params)

    def _begin_with(self, group, prompt, params):
        """Give out another prompt in the place of a group that is dropped or complete."""
        begun = {"prompt": prompt, "params": params, "draw": self._number_draw(), "attempts": 1}
        drawn = replace(group.content, **begun, version=self.version)
        group.content = replace(drawn, completions=(), pending=None, differs=None)
        self.buffer.begin_again(group)
        self._give_out(group)

    def finished(self, request):
        """The sampler has completed a group; called in any thread."""
        group = self._in_flight(request)
        self.complete(group, tuple(request.completions))

    def expired(self, request):
        """The sampler has given a group back; called in any thread."""
        if not self.options.partial_rollouts:
            request = replace(request, done={}, begun=[])
        self._again(self._in_flight(request), request)

    def complete(self, group, completions):
        """A Group in flight has these completions, whose rewards begin to be computed."""
        drawn = replace(group.content, completions=completions, differs=None)
        columns = dict.fromkeys(drawn.columns, [None] * drawn.params.n)
        of_group = self.prompts, drawn.prompt, completions, columns, self.trainer_state_of(drawn.step)
        group.content = replace(drawn, pending=submit_group(self.rewards, *of_group))
        self.buffer.put(group)

    def drawn_of(self, request):
        """The Drawn of a group that the sampler has."""
        return self._in_flight(request).content

    def _in_flight(self, request):
        return next(group for group, _ in self.buffer.snapshot() if group.number == request.number)

    def _request(self, group):
        drawn = group.content
        prompt = self.prompts.prompts[drawn.prompt]
        of_group = group.number, prompt.prompt_token_ids, drawn.params, drawn.version
        request = GroupRequest(*of_group, where=prompt.where)
        if self.prompts.agents is None:
            return request
        inputs = RewardInputs(dict.fromkeys(drawn.columns), self.trainer_state_of(drawn.step))
        return replace(request, episode=self.prompts.agents.episode(prompt, drawn.prompt, drawn.params, inputs))

    def _give_out(self, group):
        self.sampler.submit(self._request(group), self)

    def _again(self, group, request):
        """Give a group out once more, or drop it."""
        drawn = group.content
        if drawn.attempts < self.options.max_attempts:
            group.content = replace(drawn, attempts=drawn.attempts + 1)
            self.sampler.submit(request, self)
        else:
            self.buffer.drop(group)

    def _replace(self, group):
        """Let another prompt take the place of a dropped group."""
        self.num_dropped += 1
        group.content = drawn = replace(group.content, replaced=group.content.replaced + 1)
        seed = derived_seed(self.run.seed, drawn.step, drawn.index, 2, group.number, drawn.replaced)
        (prompt,) = self._draw_prompts(1)
        self._begin_with(group, prompt, replace(drawn.params, seed=seed, first_index=0))

    def _metrics(self, step, groups, waited_s):
        """Metrics of groups that are about to be trained on: dict."""
        completions = [c for group in groups for c in group.content.completions]
        versions = [c.drawn("policy_versions") for c in completions]
        oldest = np.array([step - each.min() for each in versions])
        of_tokens = step - np.concatenate(versions)
        now, stats = time.monotonic(), self.sampler.stats
        seconds, since = max(now - self.last_time, 1e-9), [a - b for a, b in zip(stats, self.last_stats, strict=True)]
        self.last_time, self.last_stats, (num_tokens, busy_s, idle_s) = now, stats, since
        pauses = self.sampler.take_pauses()
        waiting = self.buffer.num_complete - len(groups)
        return {
            "off_policy/mean": float(oldest.mean()),
            "off_policy/max": int(oldest.max()),
            "off_policy/dropped": self.num_dropped,
            "off_policy/rejected": self.num_rejected,
            "off_policy/in_flight": self.buffer.num_in_flight,
            "off_policy/in_queue": waiting,
            "token_staleness/mean": float(of_tokens.mean()),
            "cross_version_response_fraction": float(np.mean([each.min() < each.max() for each in versions])),
            "buffer_qsize": waiting * self.plan.num_completions_each,
            "queue_wait_time_s": float(np.mean([now - group.complete_at for group in groups])),
            "weight_sync_time_s": self.sync_s,
            "weight_pause_time_s": max(pauses, default=0.0),
            "wait_for_batch_s": waited_s,
            "generation_tok_per_s": num_tokens / seconds,
            "infer_utilization": min(busy_s / seconds / self.sampler.count, 1.0),
            "infer_idle": min(idle_s / seconds / self.sampler.count, 1.0),
            "train_utilization": max(1.0 - waited_s / seconds, 0.0),
        }


def _all_drawn(group):
    """All draws for a group, in their order: tuple of Drawn."""
    return *group.content.unused, group.content
