"""The episodes of an engine: the one driver over its add_request, step and abort.

    episodes.submit(request)              queued until the weights are of request.version or newer
    episodes.step() -> finished requests  one step of the engine
    episodes.update_weights(version)      the weights have been written, between two steps

A GroupRequest asks for the completions of one prompt. Without an `episode` each is one turn of the policy; with one,
each is a coroutine over an EpisodeRollout:

    async def episode(rollout):
        context = list(rollout.prompt_token_ids)
        turn = await rollout.complete(context)                    a Completion: one more turn of the policy
        result = await rollout.wait(executor.submit(tool, ...))   the result of a concurrent.futures.Future
        context += [*turn.token_ids, *suffix]
        if rollout.room(len(suffix)):
            await rollout.complete(context)
        return messages                                           in the Completion of the whole episode

What an episode returns is the value in the Completion of its turns; or it is the Completion, of several conversations
(`EpisodeRollout.fork`).

`step` advances the coroutines in its own thread. One that waits for a Future occupies nothing but the blocks of the
cache that its next turn begins with; where all wait, `step` sleeps until a Future is done.

An interrupted group of single turns goes on elsewhere from the tokens that it has: its text stays the same, as long as
the weights do. Given out without them, here or elsewhere, it is drawn afresh. A coroutine cannot be moved: the
unfinished episodes of an interrupted group begin again, with the same draws.
"""

import contextlib
import copy
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rlnumba.engine.core import PromptError
from rlnumba.engine.sequence import Completion, EpisodeRecord, SamplingParams, Sequence

# Seconds that a step waits for a Future, where there is nothing to compute: its caller has other things to look at.
WAIT_S = 0.1


@dataclass(frozen=True)
class GroupRequest:
    """The params.n completions of a prompt. number: the group's; version: the oldest weights that may begin it.

    done, begun: what an earlier attempt has finished, {index: Completion}, and the Sequences that it has begun.
    adapter_id, cache_salt: as Engine.add_request has them. indices: of the completions that are wanted here, None for
    all. episode: None, or the coroutine function of a completion; it
    can be pickled where inference processes draw. Its values at the same results of its Futures are always the same.
    params.max_tokens then bounds all tokens after an episode's first context, the environment's among them. where: the
    prompt's file and line, which errors name, "" without one.
    """

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    version: int = 0
    done: dict[int, Completion] = field(default_factory=dict)
    begun: list[Sequence] = field(default_factory=list)
    adapter_id: int = -1
    episode: Callable | None = None
    cache_salt: str = ""
    indices: list[int] | None = None
    where: str = ""

    @property
    def completions(self):
        """All completions in their order, once they are done: list."""
        return [self.done[index] for index in range(self.params.n)]

    @property
    def is_complete(self):
        return len(self.done) == len(self.wanted)

    @property
    def wanted(self):
        """Indices of the completions that are wanted here: list or range."""
        return range(self.params.n) if self.indices is None else self.indices


class TurnId(NamedTuple):
    """The request_id of a turn in the engine: that of rollout `index` of group `number`."""

    number: int
    index: int


class Turn(NamedTuple):
    """One more turn that an episode asks for. first_context: that of its conversation's first turn."""

    context: list[int]
    params: SamplingParams
    first_context: list[int]


class Row(NamedTuple):
    """A conversation as it is trained on: its first context, all token ids up to the last drawn one, and the turns'
    Completions with the number of tokens before each. Those of an EpisodeRollout are a Row."""

    first_context: list[int]
    token_ids: list[int]
    turns: list[tuple[int, Completion]]


@types.coroutine
def _suspend(wish):
    """Hand a Turn or a Future to the driver: the Completion of the turn, or None once the Future is done."""
    return (yield wish)


class EpisodeRollout:
    """One rollout of a group, for its episode's coroutine.

    prompt_token_ids, params: the GroupRequest's; number, index: of the group, and of the rollout in it. max_model_len:
    the engine's. turns: the Completions so far, with the number of tokens before each.
    """

    def __init__(self, request, index, max_model_len):
        self.number, self.index, self.max_model_len = request.number, index, max_model_len
        # One seed for all turns.
        self.prompt_token_ids, self.params = request.prompt_token_ids, request.params.seeded()
        # All tokens up to the last drawn one, and those of the first context.
        self.token_ids, self.first_context, self.turns = [], None, []

    def room(self, num_added=0):
        """The most tokens that the next turn may draw after num_added tokens of the environment: int, at least 0."""
        length, bound = len(self.token_ids) + num_added, self.max_model_len
        if self.first_context is not None:
            bound = min(bound, len(self.first_context) + self.params.max_tokens)
        return min(max(bound - length, 0), self.params.max_tokens)

    async def complete(self, context_ids, max_tokens=None):
        """The Completion of one more turn.

        context_ids: all tokens so far, the drawn ones as they were drawn, and behind them what the environment adds; at
        first the prompt, whole. max_tokens: drawn at most, as far as there is `room`. Raises ValueError for a context
        that does not begin with the tokens so far or leaves no room, PromptError for a first one that is too long.
        """
        context, length = [int(token) for token in context_ids], len(self.token_ids)
        if context[:length] != self.token_ids:
            raise ValueError("complete: the context does not begin with the tokens of the rollout so far")
        room = self.room(len(context) - length)
        if self.first_context is None:
            # A prompt as long as the limit gets a token; the engine refuses longer ones.
            self.first_context, room = context, max(room, 1)
        most = room if max_tokens is None else min(room, max_tokens)
        if most < 1:
            raise ValueError(f"complete: a context of {len(context)} tokens leaves no room for a turn")
        params = replace(self.params, max_tokens=most, min_tokens=min(self.params.min_tokens, most))
        if self.turns:
            # Those of the first context are the prompt's.
            params = replace(params, prompt_logprobs=None)
        completion = await _suspend(Turn(context, params, self.first_context))
        self.turns.append((len(context), completion))
        self.token_ids = context + completion.token_ids
        return completion

    async def wait(self, future):
        """The result of a concurrent.futures.Future, or its exception, while other rollouts go on."""
        if not future.done():
            await _suspend(future)
        return future.result()

    def fork(self, number=0):
        """Another conversation of the rollout, with no tokens yet: an EpisodeRollout.

        number: how many of the rollout's begin with the same tokens, so that each has draws of its own. One turn of all
        conversations is drawn at a time, and the episode returns `completion_of` those that are trained on.
        """
        other = copy.copy(self)
        other.token_ids, other.first_context, other.turns = [], None, []
        if number:
            seed = np.random.SeedSequence((self.params.seed, number)).generate_state(1, np.uint64)[0]
            other.params = replace(self.params, seed=int(seed))
        return other

    def completion(self, value):
        """The Completion of the whole episode. value: what its coroutine returned. Raises ValueError without a turn."""
        if not self.turns:
            raise ValueError(f"episode: rollout {self.index} of group {self.number} has ended without a turn")
        return self.completion_of([self], value)

    def completion_of(self, rows, value):
        """The Completion of an episode whose Rows these are, at least one, with a turn each.

        Its tokens are those after the first row's first context, and then all of the other rows', each of which is a
        sequence of its own in training; the first contexts of these count as the environment's.
        """
        lengths = [len(row.token_ids) for row in rows]
        first, params = len(rows[0].first_context), self.params
        total, offset = sum(lengths) - first, -first
        mask, has_logprobs = np.zeros(total, bool), params.logprobs is True or params.num_logprobs >= 0
        logprobs = None if params.logprobs is None else np.zeros(total if has_logprobs else 0, np.float32)
        versions, thresholds = np.zeros(total, np.int32), None
        top_logprobs = [None] * total if params.num_logprobs >= 0 else None
        if params.logit_thresholds:
            thresholds = np.full(total, -np.inf, np.float32)
        for row, row_length in zip(rows, lengths, strict=True):
            for length, turn in row.turns:
                begin, end = offset + length, offset + length + turn.num_tokens
                mask[begin:end] = True
                versions[begin:end] = turn.array("policy_versions")
                versions[end:] = versions[end - 1]
                if has_logprobs:
                    logprobs[begin:end] = turn.array("logprobs")
                if thresholds is not None:
                    thresholds[begin:end] = turn.thresholds
                if top_logprobs is not None:
                    top_logprobs[begin:end] = turn.top_logprobs
            offset += row_length
        turns = [each for row in rows for each in row.turns]
        last, contexts = turns[-1][1], sum(length for length, _ in turns)
        record = EpisodeRecord(rows[0].first_context, len(turns), contexts, value, lengths if len(rows) > 1 else ())
        return Completion(
            token_ids=np.concatenate([np.array(row.token_ids, np.int32) for row in rows])[first:],
            logprobs=logprobs,
            finish_reason=last.finish_reason,
            text="".join(turn.text for _, turn in turns),
            policy_versions=versions,
            thresholds=thresholds,
            index=self.index,
            stop_reason=last.stop_reason,
            num_cached_tokens=sum(turn.num_cached_tokens for _, turn in turns),
            mask=None if mask.all() else mask,
            episode=record,
            top_logprobs=top_logprobs,
            prompt_logprobs=turns[0][1].prompt_logprobs,
            routed_experts=_experts_of(rows),
        )


def _experts_of(rows):
    """Completion.routed_experts of an episode of these Rows; None where the engine has returned none.

    A later turn has its context's as well, perhaps computed again by newer weights: each token keeps its first ones.
    """
    known = [turn.routed_experts for row in rows for _, turn in row.turns]
    if any(each is None for each in known):
        return None
    parts = []
    for row in rows:
        joined, begin = np.full((len(row.token_ids), *known[0].shape[1:]), -1, np.int16), 0
        for _, turn in row.turns:
            end = len(turn.routed_experts)
            joined[begin:end] = turn.routed_experts[begin:]
            begin = end
        parts.append(joined)
    return np.concatenate(parts)[:-1]


class RunningEpisode:
    """An episode whose coroutine has not ended. waits_for: the Turn or the Future that it waits for, or None."""

    def __init__(self, request, index, max_model_len):
        self.turn_id = TurnId(request.number, index)
        self.adapter_id, self.cache_salt = request.adapter_id, request.cache_salt
        self.rollout = EpisodeRollout(request, index, max_model_len)
        self.coroutine, self.waits_for = request.episode(self.rollout), None

    def close(self):
        """End it where it is: its `finally` clauses run."""
        if isinstance(self.waits_for, Future):
            self.waits_for.cancel()
        self.coroutine.close()


class Ready:
    """The RunningEpisodes that can be advanced. `add` is called in any thread, the rest in the driver's."""

    def __init__(self):
        self.condition, self.episodes = threading.Condition(), deque()

    def add(self, episode):
        with self.condition:
            self.episodes.append(episode)
            self.condition.notify()

    def take(self):
        """The one that was added first, or None."""
        with self.condition:
            return self.episodes.popleft() if self.episodes else None

    def wait(self, seconds):
        """Return as soon as there is one, or after so many seconds."""
        with self.condition:
            self.condition.wait_for(lambda: self.episodes, seconds)


class Episodes:
    """The GroupRequests of an Engine.

    num_tokens, num_finished: tokens and completions drawn so far; waited_s: seconds without anything to compute, while
    all episodes waited for Futures.
    output: the StepOutput of the last step, whose request_ids are the groups' numbers, or TurnIds; None without one.
    """

    def __init__(self, engine):
        self.engine = engine
        # GroupRequests that wait for weights, and those in the engine, by number.
        self.waiting, self.running = deque(), {}
        # The episodes of those in the engine, by TurnId, and those of them that can be advanced.
        self._episodes, self._ready = {}, Ready()
        # Numbers of those in the engine that it has computed nothing of yet: a dict without values, for the order.
        self._queued = {}
        # Complete, and not yet returned by `step`.
        self._complete = []
        self.num_tokens, self.num_finished, self.waited_s = 0, 0, 0.0
        self.output = None

    @property
    def policy_version(self):
        return self.engine.policy_version

    @property
    def is_idle(self):
        """Whether `step` has nothing to do."""
        return not self.running and not self._complete

    @property
    def num_unfinished(self):
        """Completions that are to be drawn: int."""
        return sum(len(each.wanted) - len(each.done) for each in (*self.waiting, *self.running.values()))

    @property
    def waits_for_futures(self):
        """Whether an episode waits for a Future: bool."""
        return any(isinstance(each.waits_for, Future) for each in self._episodes.values())

    @property
    def may_change_weights(self):
        """Whether all groups that the present weights may begin are complete."""
        return self.is_idle and not self._can_begin

    @property
    def _can_begin(self):
        return bool(self.waiting) and self.waiting[0].version <= self.policy_version

    def submit(self, request):
        """Queue a GroupRequest that is not complete; groups begin in the order of the calls."""
        self.waiting.append(request)
        self._begin()

    def update_weights(self, version, keep_cache=False):
        """The same as Engine.update_weights, after which the groups begin that have waited for this version."""
        with self._naming():
            self.engine.update_weights(version, keep_cache)
        self._begin()

    def synchronize(self):
        """The same as Engine.synchronize. Raises as `step` does."""
        with self._naming():
            self.engine.synchronize()

    def step(self, wait_s=WAIT_S):
        """One step of the engine: list of the GroupRequests that it completes.

        wait_s: how long to wait for a Future, where all episodes do and the engine has nothing to compute. Raises as
        Engine.step, with the numbers of groups, and what an episode raises.
        """
        self.output = None
        with self._naming():
            self._resume()
            if not self.engine.has_unfinished and self._episodes and not self._complete:
                began = time.perf_counter()
                self._ready.wait(wait_s)
                self.waited_s += time.perf_counter() - began
                self._resume()
            if self.engine.has_unfinished or not self._complete:
                # Without anything to compute, for the ranks of a LedEngine, which wait for its messages.
                self._take(self.engine.step())
        complete, self._complete = self._complete, []
        return complete

    @contextlib.contextmanager
    def _naming(self):
        """Let a PromptError of the engine name groups, and the file and line of the first one's prompt."""
        try:
            yield
        except PromptError as error:
            numbers = tuple(dict.fromkeys(map(_number_of, error.request_ids)))
            where = self.running[numbers[0]].where if numbers[0] in self.running else ""
            raise type(error)(numbers[0], error.reason, numbers, where) from error

    def _take(self, output):
        """Take in a StepOutput."""
        self.output = output
        self.num_tokens += output.num_tokens
        for request_id, index, completion in output.finished:
            if isinstance(request_id, TurnId):
                self._advance(self._episodes[request_id], completion)
            else:
                self._finish(request_id, index, completion)

    def _finish(self, number, index, completion):
        """Completion `index` of a group has been drawn."""
        self.num_finished += 1
        request = self.running[number]
        request.done[index] = completion
        if request.is_complete:
            self._complete.append(self._leave(number))

    def _resume(self):
        """Advance all episodes that can be."""
        while (episode := self._ready.take()) is not None:
            # It may have been dropped while its Future was pending.
            if self._episodes.get(episode.turn_id) is episode:
                self._advance(episode, None)

    def _advance(self, episode, value):
        """Let an episode go on until it waits for something else, or has ended. value: what it has waited for."""
        try:
            wish = episode.coroutine.send(value)
        except StopIteration as end:
            del self._episodes[episode.turn_id]
            self.engine.release_retained(episode.turn_id)
            value = end.value
            completion = value if isinstance(value, Completion) else episode.rollout.completion(value)
            self._finish(*episode.turn_id, completion)
            return
        if not isinstance(wish, Turn | Future):
            raise TypeError(f"an episode awaits complete and wait of its rollout alone, got {type(wish).__qualname__}")
        episode.waits_for = wish
        if isinstance(wish, Future):
            wish.add_done_callback(lambda _: self._ready.add(episode))
        else:
            self._add_turn(episode)

    def _add_turn(self, episode):
        """Add the turn that an episode waits for to the engine."""
        (context, params, first_context), index = episode.waits_for, episode.turn_id.index
        self.engine.add_request(
            episode.turn_id, context, params, episode.adapter_id, [index], first_context, episode.cache_salt
        )

    def take_begun(self):
        """Numbers of the groups that the engine has begun to compute since the last call: list.

        Until then they wait for weights, or for their turn in the engine.
        """
        if not self._queued:
            return []
        scheduler = self.engine.scheduler
        running = {_number_of(sequence.request_id) for sequence in scheduler.table.sequences[scheduler.running]}
        running |= {each.number for each, episode in self._episodes.items() if episode.rollout.turns}
        begun = [number for number in self._queued if number in running]
        for number in begun:
            del self._queued[number]
        return begun

    def begin_again(self, damaged):
        """After a PromptError of `step`, whose request_ids `damaged` are: drop these, and let all others go on.

        Their tokens are drawn again, with the same result: they depend on prompt, index and position alone. Of an
        episode it is those of its present turn.
        """
        self.engine.reset()
        for number in damaged:
            self._leave(number)
        for request in self.running.values():
            if request.episode is None:
                self._enter(request)
        for episode in self._episodes.values():
            if isinstance(episode.waits_for, Turn):
                self._add_turn(episode)

    def abort(self, number):
        """Drop a group; nothing happens if it is not here, as when it has just finished."""
        self.waiting = deque(request for request in self.waiting if request.number != number)
        if number in self.running:
            self.engine.abort(number)
            self._leave(number)

    def reset(self):
        """Drop all groups and the content of the cache: after any exception."""
        self.engine.reset()
        self.waiting.clear()
        for number in list(self.running):
            self._leave(number)
        self._complete.clear()

    def end_episodes(self):
        """End the coroutines of all groups where they are; for an engine that is not used any more."""
        for episode in self._episodes.values():
            episode.close()
        self._episodes.clear()

    def interrupt(self, number):
        """Take a group back: its GroupRequest with what is done and begun, or None if this engine does not have it.

        It may be complete by now. Unfinished episodes are dropped, and begin again where it is given out next.
        """
        for request in self.waiting:
            if request.number == number:
                self.waiting.remove(request)
                return request
        if number not in self.running:
            return None
        with self._naming():
            begun, outputs = self.engine.interrupt(number)
        request = self._leave(number)
        for output in outputs:
            # Computed, and not yet returned by a step.
            self.num_tokens += output.num_tokens
            request.done.update({index: completion for _, index, completion in output.finished})
        return replace(request, begun=begun)

    def _leave(self, number):
        """The GroupRequest of a group that is in the engine no more; its episodes end where they are."""
        self._queued.pop(number, None)
        request = self.running.pop(number)
        if request.episode is not None:
            for index in range(request.params.n):
                if (episode := self._episodes.pop(TurnId(number, index), None)) is not None:
                    self.engine.abort(episode.turn_id)
                    episode.close()
        return request

    def _begin(self):
        while self._can_begin:
            request = self.waiting.popleft()
            self._enter(request)
            self.engine.move_in(request.begun)
            # Its own dict: the sender keeps the request, to give it out again.
            self.running[request.number] = replace(request, done=dict(request.done), begun=[])
            self._queued[request.number] = None

    def _enter(self, request):
        """Add what is neither done nor begun of a request to the engine."""
        there = {*request.done, *(sequence.index for sequence in request.begun)}
        missing = [index for index in request.wanted if index not in there]
        if request.episode is None:
            prompt, params = request.prompt_token_ids, request.params
            adapter_id, salt = request.adapter_id, request.cache_salt
            self.engine.add_request(request.number, prompt, params, adapter_id, missing, cache_salt=salt)
            return
        if self.engine.plays_episodes:
            self.engine.add_episodes(request, missing)
            return
        for index in missing:
            episode = RunningEpisode(request, index, self.engine.max_model_len)
            self._episodes[episode.turn_id] = episode
            self._ready.add(episode)


def _number_of(request_id):
    """The number of the group whose request_id in the engine this is."""
    return request_id.number if isinstance(request_id, TurnId) else request_id


def run_for(engine, seconds):
    """Steps of an Engine for so many seconds, at least one while it has something to do: (finished, tokens sampled).

    finished: list of FinishedCompletion. For an engine that has a part of the completions of its requests.
    """
    until, finished, num_tokens = time.monotonic() + seconds, [], 0
    while engine.has_unfinished:
        output = engine.step()
        finished += output.finished
        num_tokens += output.num_tokens
        if time.monotonic() >= until:
            break
    return finished, num_tokens
