"""Generation that runs ahead of training: groups are drawn for coming generations while the policy is trained.

    version       optimizer steps done; every token carries the version of the weights that sampled it
    admission     the groups of the generation that step b trains on are given out once version + max_staleness >= b
    Pipeline      admitted groups: engine -> rewards -> buffer -> `take`, in the order of the generations
    engines       processes of their own (RemoteEngines), or one in the trainer's that decodes between micro-batches
                  (InterleavedEngine)

With max_staleness 0 the groups of a step are given out when the weights that they are trained with are complete, with
the seeds of the synchronous run, whose text and weights this one then has.

With dynamic sampling a group whose rewards turn out equal gives its place to a further prompt, which the newest weights
begin. Without staleness these are the prompts of dynamic_sampling.py: one is drawn only where one more group that
differs is wanted, so as many are drawn, and the last one differs.

A checkpoint has the groups that were admitted and are not trained on: the completions of those that are complete. The
others are drawn again, so no prompt is lost or comes twice. Rewards are computed again, too.

Sources: AReaL (arXiv 2505.24298) for the cap; PipelineRL (arXiv 2509.19128) for in-flight updates.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.errors import SharedError, UserError
from rlnumba.parallel import ray_cluster
from rlnumba.parallel.placement import gpus_of_ranks, most_ranks_per_gpu
from rlnumba.rewards import RewardError, TrainerState
from rlnumba.rewards.calling import Pending
from rlnumba.runs.run_folder import KERNEL_LIST, kernel_request
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time
from rlnumba.sampling.inference import Engines, Limits
from rlnumba.sampling.inference_group import HeldModel
from rlnumba.sampling.inference_worker import Alive, Setup
from rlnumba.sampling.ray_engines import ObjectSender, RayEngines
from rlnumba.sampling.samples import as_generation, derived_seed, distinct_params, is_uniform, submit_group
from rlnumba.sampling.weights.push import WeightPusher, can_share
from rlnumba.sampling.weights.shards import is_in_parts, whole_bytes
from rlnumba.sampling.weights.sync import Again, PartSender, WeightSender
from rlnumba.trainers.engine_elsewhere import GroupsApart
from rlnumba.trainers.group_buffer import Group, GroupBuffer

# Seconds between two looks at what engines report while the trainer waits for groups.
POLL_S = 0.1


@dataclass(frozen=True)
class Drawn:
    """A group's content in the buffer: one that changes is replaced by another, whole, so that any thread may read it.

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

    run: GRPORun; generations: iterator over (step, index) of those to come; trainer_state_of(step): TrainerState;
    params_of(step, index): SamplingParams; prompts: PromptData; order: PromptOrder; version: of the weights as they
    are. `start` gives it its engines.
    """

    def __init__(self, run, generations, trainer_state_of, params_of, prompts, rewards, order, version):
        self.run, self.options, self.train = run, run.asynchronous, run.train
        self.trainer_state_of, self.params_of = trainer_state_of, params_of
        self.prompts, self.rewards, self.order, self.version = prompts, rewards, order, version
        self.coming, self.engines = deque(generations), None
        self.buffer = GroupBuffer(self.options.queue_maxsize // self.train.num_generations, self.options.order)
        self.apart = GroupsApart(self.options)
        self.next_number, self.num_dropped, self.num_rejected, self.sync_s = 0, 0, 0, 0.0
        # Prompts drawn so far, and of each generation that is not trained on yet, by (step, index), their token ids.
        self.num_drawn, self.prompt_ids = 0, {}
        self.last_stats, self.last_time, self.metrics = Alive(0, 0.0, 0.0), time.monotonic(), {}

    def start(self, engines):
        """Give out what may begin. engines: RemoteEngines or InterleavedEngine, with the weights of `version`."""
        self.engines = engines
        for group, is_complete in self.buffer.snapshot():
            if not is_complete:
                self._give_out(group)
        self.admit()

    def update_weights(self, version):
        """The policy's weights are of another version now: send them to the engines, and admit what may follow."""
        # Kernels launched before are training, and no part of the push.
        device.synchronize()
        began = time.perf_counter()
        self.engines.push(version)
        self.version, self.sync_s = version, time.perf_counter() - began
        self.admit()

    def admit(self):
        """Give out the groups of the generations that may begin."""
        size = self.train.prompts_per_rollout
        while self.coming and len(self.buffer) + size <= self.buffer.capacity:
            step, index = self.coming[0]
            if "cap" in self.options.staleness and step > self.version + self.options.max_staleness:
                break
            self.coming.popleft()
            chosen = self._draw_prompts(size)
            columns = list(self.prompts.columns(chosen))
            for prompt, params in zip(chosen, self._params_of(step, index, chosen), strict=True):
                drawn = Drawn(prompt, step, index, self.version, params, columns, draw=self._number_draw())
                group = Group(self.next_number, drawn)
                self.next_number += 1
                self.buffer.reserve(group)
                self._give_out(group)

    def _draw_prompts(self, count):
        """The next prompts of the order: list of indices."""
        if not self.train.generation.dynamic:
            return self.order.take(count)
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
        """The groups of the next generation: list of Drawn. step: that trains on them first.

        With dynamic sampling those of equal rewards whose places others have are among them, in the order of the draws.
        """
        began, size = time.perf_counter(), self.train.prompts_per_rollout
        while (groups := self._next(size)) is None:
            self.engines.advance()
            status(f"{self.buffer.num_complete} groups wait, {self.buffer.num_in_flight} are being generated")
        waited_s = time.perf_counter() - began
        found = [each for group in groups for each in (*group.content.unused, group.content) if each.completions]
        if self.train.generation.dynamic:
            found.sort(key=lambda each: each.draw)
        self.metrics = self._metrics(step, groups, waited_s)
        self.buffer.take(groups)
        kept = {(group.content.step, group.content.index) for group, _ in self.buffer.snapshot()}
        self.prompt_ids = {key: ids for key, ids in self.prompt_ids.items() if key in kept}
        self.admit()
        return found

    def _next(self, size):
        """The next groups, or None while some of them are not complete."""
        self.engines.check()
        for group in self.buffer.dropped():
            self._replace(group)
        if self.train.generation.dynamic:
            groups = self._next_that_differ(size)
        else:
            groups = self.buffer.next(size, self.engines.wait_s)
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
            complete = unknown(group for group, is_complete in self.buffer.snapshot() if is_complete)
            ready = self.rewards.ready([group.content.pending for group in complete])
            return [group for group, is_ready in zip(complete, ready, strict=True) if is_ready]

        groups = self.buffer.next(size, self.engines.wait_s, scored)
        # If all are complete, this waits for their rewards.
        for group in {group.number: group for group in [*scored(), *unknown(groups or ())]}.values():
            self._replace_uniform(group)
        groups = self.buffer.next(size)
        return None if groups is None or unknown(groups) else groups

    def _replace_uniform(self, group):
        """Let a further prompt take the place of a complete group if its rewards are equal."""
        drawn, train = group.content, self.train
        try:
            scores = self.rewards.collect([drawn.pending])
        except RewardError:  # raised again for all ranks, by `Ahead.take`
            group.content = replace(drawn, differs=True)
            return
        found = as_generation([None], [drawn.completions], scores, self.rewards.weights, None)
        differs = not is_uniform(found.groups[0], train.multi_objective_aggregation)
        group.content = drawn = replace(drawn, differs=differs)
        num_drawn = len(self.prompt_ids[drawn.step, drawn.index])
        if not differs and num_drawn < train.generation.dynamic.most_prompts:
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
        """An engine has completed a group; called in any thread."""
        if self.apart.has(request):
            self.apart.finished(request)
            return
        group = self._in_flight(request)
        group.content = self._scored(replace(group.content, completions=tuple(request.completions), differs=None))
        self.buffer.put(group)

    def expired(self, request):
        """An engine has given a group back; called in any thread."""
        if self.apart.has(request):
            self.apart.expired(self.engines, request)
            return
        if not self.options.partial_rollouts:
            request = replace(request, done={}, begun=[])
        self._again(self._in_flight(request), request)

    def submit_apart(self, name, prompt, params):
        """Give out a group that is not trained on, of the newest weights; see GroupsApart.submit."""
        self.apart.submit(self.engines, name, prompt, params, self.version)

    def take_apart(self):
        """Those that are complete, after wait_s at the latest; see GroupsApart.take."""
        self.engines.check()
        return self.apart.take(self.engines.wait_s)

    def _in_flight(self, request):
        return next(group for group, _ in self.buffer.snapshot() if group.number == request.number)

    def _scored(self, drawn):
        """The Drawn of a complete group whose rewards have begun to be computed."""
        columns = dict.fromkeys(drawn.columns, [None] * drawn.params.n)
        of_group = self.prompts, drawn.prompt, drawn.completions, columns, self.trainer_state_of(drawn.step)
        return replace(drawn, pending=submit_group(self.rewards, *of_group))

    def _request(self, group):
        drawn = group.content
        prompt = self.prompts.prompts[drawn.prompt].prompt_token_ids
        return GroupRequest(group.number, prompt, drawn.params, drawn.version)

    def _give_out(self, group):
        self.engines.submit(self._request(group))

    def _again(self, group, request):
        """Give a group out once more, or drop it."""
        drawn = group.content
        if drawn.attempts < self.options.max_attempts:
            group.content = replace(drawn, attempts=drawn.attempts + 1)
            self.engines.submit(request)
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
        versions = [c.array("policy_versions") for c in completions]
        oldest = np.array([step - each.min() for each in versions])
        of_tokens = step - np.concatenate(versions)
        now, stats = time.monotonic(), self.engines.stats
        seconds, since = max(now - self.last_time, 1e-9), [a - b for a, b in zip(stats, self.last_stats, strict=True)]
        self.last_time, self.last_stats, (num_tokens, busy_s, idle_s) = now, stats, since
        pauses = self.engines.take_pauses()
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
            "buffer_qsize": waiting * self.train.num_generations,
            "queue_wait_time_s": float(np.mean([now - group.complete_at for group in groups])),
            "weight_sync_time_s": self.sync_s,
            "weight_pause_time_s": max(pauses, default=0.0),
            "wait_for_batch_s": waited_s,
            "generation_tok_per_s": num_tokens / seconds,
            "infer_utilization": min(busy_s / seconds / self.engines.count, 1.0),
            "infer_idle": min(idle_s / seconds / self.engines.count, 1.0),
            "train_utilization": max(1.0 - waited_s / seconds, 0.0),
        }

    def state(self):
        """The groups that are admitted and not trained on: [(number, Drawn, its completions or ())]."""
        return [
            (group.number, group.content, group.content.completions if is_complete else ())
            for group, is_complete in self.buffer.snapshot()
        ]

    def load_state(self, groups):
        """Restore what `encoded` made of a state; before `start`."""
        size, n = self.train.prompts_per_rollout, self.train.num_generations
        if len(groups) % size:
            raise UserError(
                f"the checkpoint has {len(groups)} groups that are not trained on yet, which the {size} of a "
                "generation do not divide: resume the run with its own batch sizes"
            )
        for _ in range(len(groups) // size):
            self.coming.popleft()
        for saved in groups:
            params = replace(self.params_of(saved["step"], saved["index"]), **saved["noise"])
            place = saved["step"], saved["index"], self.version, params, saved["columns"]
            # Checkpoints of before there was dynamic sampling have neither.
            draw, unused = saved.get("draw", saved["number"]), saved.get("unused", [])
            unused = tuple(Drawn(prompt, *place, draw=number) for prompt, number in unused)
            drawn = Drawn(saved["prompt"], *place, saved["attempts"], saved["replaced"], draw, unused=unused)
            group = Group(saved["number"], drawn)
            self.buffer.reserve(group)
            self.next_number = group.number + 1
            if saved["completions"] is not None and len(saved["completions"]["lengths"]) == n:
                completions = tuple(decoded_completions(saved["completions"]))
                group.content = self._scored(replace(drawn, completions=completions))
                self.buffer.put(group)
        self._restore_draws()

    def _restore_draws(self):
        """Note what was drawn for the groups that a checkpoint had."""
        places = [group.content for group, _ in self.buffer.snapshot()]
        draws = sorted((each for drawn in places for each in (*drawn.unused, drawn)), key=lambda each: each.draw)
        for each in draws:
            ids = self.prompts.prompts[each.prompt].prompt_token_ids
            self.prompt_ids.setdefault((each.step, each.index), []).append(ids)
            self.num_drawn = each.draw + 1


def encoded(groups):
    """The groups that Pipeline.state returned, as a checkpoint keeps them: list of dict."""
    return [
        {
            "number": number, "prompt": drawn.prompt, "step": drawn.step, "index": drawn.index,
            "noise": {"seed": drawn.params.seed, "first_index": drawn.params.first_index},
            "columns": drawn.columns, "attempts": drawn.attempts, "replaced": drawn.replaced, "draw": drawn.draw,
            "unused": [[each.prompt, each.draw] for each in drawn.unused],
            "completions": encoded_completions(completions) if completions else None,
        }
        for number, drawn, completions in groups
    ]  # fmt: skip


# Attributes of a Completion that have a value for each token.
OF_TOKENS = ("token_ids", "logprobs", "policy_versions")


def encoded_completions(completions):
    """Completions as arrays of all of them: dict."""
    found = {name: np.concatenate([each.array(name) for each in completions]) for name in OF_TOKENS}
    found["lengths"] = np.array([each.num_tokens for each in completions], np.int32)
    return found | {name: [getattr(each, name) for each in completions] for name in ("finish_reason", "text")}


def decoded_completions(saved):
    """The inverse of encoded_completions: list."""
    cuts = np.cumsum(saved["lengths"])[:-1]
    columns = [np.split(saved[name], cuts) for name in OF_TOKENS]
    return [
        Completion(ids, logprobs, reason, text, versions)
        for ids, logprobs, versions, reason, text in zip(*columns, saved["finish_reason"], saved["text"], strict=True)
    ]


class RemoteEngines:
    """Inference processes as a Pipeline's engines; see Engines. They are of this host, or of a Ray cluster.

    wait_s: how long the trainer waits for groups at a time. is_own: whether the trainer's LLM has the same engine.
    pusher: the WeightPusher of this rank, or None where weights go through the host's memory. waiting: the
    WaitingProcesses that processes of this host are taken from.
    """

    wait_s, is_own = POLL_S, False

    def __init__(self, run, policy, tokenizer, pipeline, pusher, waiting):
        options, deploy, model = run.asynchronous, run.deploy, policy.model
        self.count, size = deploy.num_engines, deploy.tensor_parallel_size
        on_gpus, is_on_ray = device.name() == "cuda", deploy.launcher == "ray"
        limits = Limits(
            options.rollout_timeout_s, options.heartbeat_stale_after_s, deploy.weight_sync_timeout, deploy.max_restarts
        )
        gpus = [None] * (deploy.num_train_gpus + deploy.num_infer_gpus)
        if on_gpus and (not is_on_ray or ray_cluster.is_of_this_process()):
            gpus = gpus_of_ranks(len(gpus), "deploy.num_train_gpus + deploy.num_infer_gpus")
        self._nodes, start, sender_class, kernels = None, waiting.start, WeightSender, None
        if is_on_ray:
            self._nodes = RayEngines(deploy, on_gpus, limits)
            start, sender_class = self._nodes.start, ObjectSender
            kernels = KERNEL_LIST, kernel_request(run)
        elif on_gpus:
            # Once for all processes, which share the cache.
            ahead_of_time.finish()
        sender = pusher
        if sender is None:
            # Without in-flight updates a group may ask for any of these versions.
            slots = 2 if options.in_flight_weight_updates else options.max_staleness + 2
            sender = sender_class(model.trained, slots, deploy.update_weights_bucket_megabytes << 20)
        staging = None
        if not sender.needs_offers:
            staging = sender.staging.nbytes, sender.staging.slots, sender.staging.descriptor
        common = {
            "held": HeldModel.of(model, tokenizer, run.model, not is_on_ray), "dtype": model.dtype.name,
            # Its values are sent, also where it began with those of another folder.
            "lora": None if model.adapter is None else replace(model.adapter.lora, init=None),
            "seed": run.seed, "gemm": run.gemm,
            "engine": run.engine, "device": device.name(), "bucket_bytes": sender.bucket_bytes,
            "staging": staging,
            "in_flight": options.in_flight_weight_updates,
            "keep_cache": not options.recompute_kv_cache_after_weight_updates,
            "timeout_s": deploy.dist_timeout_seconds,
            "kernels": kernels,
        }  # fmt: skip

        def setup_of(index):
            first = deploy.num_train_gpus + index * size
            # None: of the cpu device, or chosen by Ray on another host.
            (gpu, num_sharing), *followers = (
                (gpu, most_ranks_per_gpu() if gpu is None else gpus.count(gpu)) for gpu in gpus[first : first + size]
            )
            return Setup(**common, gpu=gpu, num_sharing=num_sharing, followers=tuple(followers))

        self._engines = Engines(setup_of, sender, self.count, pipeline.finished, pipeline.expired, limits, start)
        try:
            self._engines.start(pipeline.version)
        except BaseException:  # a signal, too
            self.close()
            raise

    @property
    def stats(self):
        """Alive: tokens sampled, seconds busy, and idle, since the start."""
        return self._engines.stats

    def submit(self, request):
        """Give a GroupRequest out."""
        self._engines.submit(request)

    def push(self, version):
        """Send the policy's weights as this version."""
        self._engines.push(version)

    def advance(self):
        """Nothing: the processes go on by themselves."""

    def settle(self):
        """Nothing: evaluation has an engine of its own, or is drawn beside the groups that are trained on."""

    def take_pauses(self):
        """Seconds for which an engine paused for new weights, for each time since the last call: list."""
        return self._engines.take_pauses()

    def check(self):
        """Raise InferenceError if there are no engines any more, and send weights to those that have not the newest.

        The weights must be those of the last `push`.
        """
        self._engines.check()

    def close(self):
        self._engines.close()
        if self._nodes is not None:
            self._nodes.close()


def pusher_of(run, policy):
    """This rank's WeightPusher, where weights are pushed into memory of the inference processes, else None.

    If ranks have the weights in parts, other ranks than 0 have a PartSender instead of None. All ranks call this
    together.
    """
    if not run.deploy.num_infer_gpus:
        return None
    trained, bucket_bytes = policy.model.trained, run.deploy.update_weights_bucket_megabytes << 20
    if _transport_of(run, policy) == "peer":
        return WeightPusher(trained, policy.communicator, bucket_bytes)
    return PartSender(trained, bucket_bytes) if is_in_parts(trained) and policy.communicator.rank else None


def _transport_of(run, policy):
    """The way of new weights, "peer" or "shm"; on a Ray cluster they go through the host, too."""
    if run.deploy.launcher == "ray":
        return "shm"
    gpu_bytes = 0
    if device.name() == "cuda" and can_share(device.xp().cuda.Device().id):
        gpu_bytes = device.memory_info()[1]
    if policy.communicator is not None:
        # GPUs may differ, and all must take the same way.
        gpu_bytes = min(policy.communicator.objects(gpu_bytes))
    return run.weights_transport(whole_bytes(policy.model.trained), gpu_bytes)


class InterleavedEngine:
    """The trainer's own engine, which decodes before micro-batches and reads the policy's weights."""

    wait_s, is_own, count = 0.0, True, 1

    def __init__(self, run, policy, pipeline, engine):
        self.options, self.finished = run.asynchronous, pipeline.finished
        self.groups, self.busy_s = Episodes(engine), 0.0
        engine.update_weights(pipeline.version)
        policy.before_micro_batch.append(self.before_micro_batch)
        policy.before_update.append(self.before_update)

    @property
    def stats(self):
        """Alive: tokens sampled and seconds busy since the start."""
        return Alive(self.groups.num_tokens, self.busy_s, 0.0)

    def submit(self, request):
        """Queue a GroupRequest."""
        self.groups.submit(request)

    def before_micro_batch(self):
        """Decode some steps of what is in flight."""
        for _ in range(self.options.decode_steps_per_micro_batch):
            if self.groups.is_idle:
                return
            self.advance()

    def before_update(self):
        """The weights are about to be written."""
        if not self.options.in_flight_weight_updates:
            self.settle()
        self.groups.engine.synchronize()

    def push(self, version):
        """The weights are of this version now."""
        self.groups.update_weights(version, not self.options.recompute_kv_cache_after_weight_updates)

    def take_pauses(self):
        """None: the weights are read where they are written."""
        return []

    def advance(self):
        """One decode step."""
        began = time.perf_counter()
        for request in self.groups.step():
            self.finished(request)
        self.busy_s += time.perf_counter() - began

    def settle(self):
        """Complete all groups that have begun: evaluation has the same engine."""
        while not self.groups.is_idle:
            self.advance()

    def check(self):
        """Nothing: errors are raised by `advance`."""

    def close(self):
        self.groups.engine.reset()


@dataclass
class Ahead:
    """The view that a trainer's loop has of a Pipeline, on every rank. Only rank 0 has one; on others pipeline is None.

    rewards: their names and weights are known on all ranks; make_engines(pipeline): called by `start`. pusher: this
    rank's, as far as it takes part where weights are sent: see pusher_of.
    """

    pipeline: Pipeline | None
    communicator: object
    llm: object
    prompts: object
    rewards: object
    make_engines: Callable
    pusher: WeightPusher | PartSender | None = None
    metrics: dict = field(default_factory=dict)

    @property
    def is_alone(self):
        return self.communicator is None or self.communicator.world_size == 1

    def start(self):
        """Start the engines, with the weights as they are, and give out prompts."""
        if self.pipeline is not None:
            self.pipeline.start(self.make_engines(self.pipeline))
        elif self.pusher is not None and not self.pusher.needs_offers:
            # Engines that have no memory of their own for weights find them at their start.
            self.pusher.take_part()

    def take(self, trainer_state, clock, status):
        """The next generation, whose trainer_state this is: (indices of its prompts, Generation)."""
        drawn, shared = [], None
        if self.pipeline is not None:
            try:
                drawn = self.pipeline.take(trainer_state.global_step, status)
            except UserError as error:  # engines that have ended
                if self.is_alone:
                    raise
                shared = SharedError(str(error))
            else:
                self.metrics = self.pipeline.metrics
                shared = [each.prompt for each in drawn], [each.completions for each in drawn]
        shared = self._of_first_rank(shared)
        if isinstance(shared, SharedError):
            raise shared
        indices, completions = shared
        with clock.phase("reward"):
            scores = self.rewards.collect([each.pending for each in drawn])
        chosen = [self.prompts.prompts[i] for i in indices]
        return indices, as_generation(chosen, completions, scores, self.rewards.weights, self.llm.tokenizer)

    def _of_first_rank(self, value):
        """The value of rank 0, on all ranks. For each Again before it, they send their parts of the weights again."""
        if self.is_alone:
            return value
        while isinstance(found := self.communicator.objects(value)[0], Again):
            self.pusher.take_part()
        return found

    def submit_apart(self, name, prompt, params):
        """Let the engines draw a group that is not trained on; see Pipeline. All ranks call this."""
        if self.pipeline is not None:
            self.pipeline.submit_apart(name, prompt, params)

    def take_apart(self):
        """Those that are complete by now, on all ranks: [(name, list of Completion)]."""
        return self._of_first_rank(None if self.pipeline is None else self.pipeline.take_apart())

    def forget_apart(self):
        """They are not asked for any more."""
        if self.pipeline is not None:
            self.pipeline.apart.forget()

    def update_weights(self, version):
        """The weights are of this version now; to be called instead of the LLM's."""
        if self.pipeline is not None:
            self.pipeline.update_weights(version)
        elif self.pusher is not None:
            self.pusher.take_part()
        if self.pipeline is None or not self.pipeline.engines.is_own:
            self.llm.update_weights(version)

    def settle(self):
        """Before evaluation."""
        if self.pipeline is not None:
            self.pipeline.engines.settle()

    def state(self):
        return [] if self.pipeline is None else self.pipeline.state()

    def close(self):
        if self.pipeline is not None and self.pipeline.engines is not None:
            self.pipeline.engines.close()
        if self.pusher is not None:
            self.pusher.close()


def generations_from(schedule, step, begun):
    """Yields (step, index) of the generations from optimizer step `step` on, as their first micro-steps have them.

    begun: whether the generation of that step's first micro-batches is there already.
    """
    for at in range(step, schedule.total_steps):
        for micro in schedule.micro_steps(at):
            if micro.begins_generation or not begun:
                yield at, micro.index
            begun = True


def start_ahead(run, policy, llm, prompts, rewards, state, schedule, step, groups, params_of, waiting):
    """The Ahead of a run with [async]; the engines start with `start`.

    rewards: Rewards or RewardsOnRanks. state: DataState, whose order it advances. step: optimizer steps done. groups:
    of a checkpoint. params_of(step, index): SamplingParams of a generation. waiting: WaitingProcesses.
    """
    communicator, pipeline = policy.communicator, None
    if communicator is None or communicator.rank == 0:
        own_rewards = rewards if communicator is None else rewards.rewards
        generations = generations_from(schedule, step, state.rollouts is not None)

        def trainer_state_of(at):
            return TrainerState(at, schedule.total_steps, schedule.epochs_done(at))

        order = state.order
        pipeline = Pipeline(run, generations, trainer_state_of, params_of, prompts, own_rewards, order, step)
        pipeline.load_state(groups)

    pusher = pusher_of(run, policy)

    def make_engines(pipeline):
        if run.deploy.num_infer_gpus:
            return RemoteEngines(run, policy, llm.tokenizer, pipeline, pusher, waiting)
        return InterleavedEngine(run, policy, pipeline, llm.engine)

    return Ahead(pipeline, communicator, llm, prompts, rewards, make_engines, pusher)
