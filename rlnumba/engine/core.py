"""The engine: one object that owns scheduler, KV cache and runner for as long as it lives, advanced a step at a time.

    engine = Engine(model, tokenizer)
    engine.add_request("a", [1, 2, 3], SamplingParams(n=4))
    while engine.has_unfinished:
        output = engine.step()      # output.new_tokens to stream, output.finished

Requests are added and aborted at any time between steps. A sampled token depends on (seed, prompt token ids, completion
index, position) and the weights alone: not on other requests, their order, the step's composition, preemption or the
content of the prefix cache.

Weights are read in place: after writing them, call `update_weights` with the new policy version before the next step.

All device work runs in the engine's own Context, on its own stream. While sequences decode, the device is one or two
steps ahead of what `step` has returned (run_ahead.py). Once has_unfinished is False after a step, and after
`synchronize`, `sleep`, `update_weights` and `reset`, all work on that stream has ended, so the weights may be written
on any stream; while requests are unfinished, call `synchronize` first. The next steps return what it found computed.
In the other direction, `update_weights` and `wake` make the engine's stream wait for the caller's current
context: call them in the one that wrote the weights.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Hashable
from functools import partial

import numpy as np

from rlnumba.config import EngineConfig
from rlnumba.engine.adapters import AdapterSlots
from rlnumba.engine.blocks.block_manager import BlockManager, blocks_needed
from rlnumba.engine.blocks.cache_size import BLOCK_SIZE, CacheSize
from rlnumba.engine.blocks.row_windows import row_windows_for
from rlnumba.engine.blocks.state_pages import pages_for
from rlnumba.engine.requests.grammars import DamagedGrammars, Grammars, NoTokenLeft
from rlnumba.engine.requests.logprobs import entries, record_listed
from rlnumba.engine.requests.stops import (
    check_stops,
    completion_texts,
    has_stop_string,
    special_stop_ids,
    stop_reason,
)
from rlnumba.engine.requests.token_rules import NO_TOKEN, check_drawable, token_rules
from rlnumba.engine.run_ahead import RunAhead
from rlnumba.engine.runner import Runner
from rlnumba.engine.scheduler import Scheduler
from rlnumba.engine.sequence import (
    Completion,
    FinishedCompletion,
    SamplingParams,
    Sequence,
    SequenceTable,
    StepOutput,
)
from rlnumba.engine.speculation import Speculator, longest_verified
from rlnumba.engine.steps.shapes import row_bucket_of
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.attention.paged import sharing
from rlnumba.kernels.philox import noise_key
from rlnumba.model.lora import Adapter
from rlnumba.model.quantized.copies import with_copies
from rlnumba.model.transformer import NOT_FINITE
from rlnumba.parallel.cut_weights import with_own_rows
from rlnumba.parallel.gathered_weights import with_gathered
from rlnumba.runtime import device
from rlnumba.runtime.context import Context, current


class PromptError(UserError):
    """A prompt that cannot be run, or whose log-probs are no numbers: the id of its request and the reason.

    request_ids: those of all prompts of a step with that reason, the first among them. where: the prompt's file and
    line, where it is of one.
    """

    def __init__(self, request_id, reason, request_ids=(), where=""):
        super().__init__(f"{where or f'prompt {request_id}'}: {reason}")
        self.request_id, self.reason, self.where = request_id, reason, where
        self.request_ids = request_ids or (request_id,)

    def __reduce__(self):
        return type(self), (self.request_id, self.reason, self.request_ids, self.where)


class GrammarError(PromptError):
    """A grammar that a completion cannot be drawn with any more, too complex a one say: no fault of the prompt."""


def longest_sequence(model_config, engine_config):
    """The most tokens of a sequence: max_model_len, or without it the model's num_positions.

    Raises ConfigError if max_model_len is more than the model has positions.
    """
    positions = model_config.num_positions
    longest = engine_config.max_model_len or positions
    if longest > positions:
        raise ConfigError(f"max_model_len {longest} is more than the model's {positions} positions")
    return longest


class Engine:
    """Continuous batching of requests over one model.

    model: a Transformer; with `ranks` and all weights, the engine reads this rank's rows of them. tokenizer: None
    leaves the texts empty, and prompts are token ids. config: EngineConfig.
    Raises ConfigError if max_model_len is more than the model has positions.
    """

    # Whether it is given episodes, as the engine of several ranks is, and not their turns.
    plays_episodes = False

    def __init__(self, model, tokenizer=None, config=None):
        self.model, self.tokenizer = model, tokenizer
        self.config = config or EngineConfig()
        self.max_model_len = longest_sequence(model.config, self.config)
        self.grammars = Grammars(tokenizer, model.config.vocab_size, ())
        self.take_ends(model.config)
        self.max_num_batched_tokens = self.config.max_num_batched_tokens
        # A step has room for one token of every running sequence.
        self.max_num_seqs = min(self.config.max_num_seqs, self.max_num_batched_tokens)
        self.context = Context(device.xp().cuda.Stream() if device.name() == "cuda" else None)
        sizes = self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len
        with self.context.use():
            self.runner = Runner(
                with_gathered(with_copies(with_own_rows(model), self.config.quantization)),
                self.context,
                BLOCK_SIZE,
                *sizes,
                self.config.enforce_eager,
                longest_verified(self.config),
            )
        self.cache_size = CacheSize(model, self.runner, self.config, self.max_num_seqs, self.max_model_len)
        if self.config.enable_return_routed_experts:
            self.runner.record_experts()
        self.runner.raw_logprobs = self.config.logprobs_mode == "raw_logprobs"
        # Texts of single tokens that were listed, by id.
        self.token_texts = {}
        self.speculator, self.adapters = Speculator(self.config), AdapterSlots(model)
        self.is_asleep = True
        # Whether the runner's copies of the weights, if it reads such, are to be made before the next step.
        self.copies_are_old = self.runner.copies is not None
        self._start(BlockManager(0, BLOCK_SIZE), policy_version=0)

    def _start(self, blocks, policy_version):
        """Begin with no requests."""
        self.blocks = blocks
        # The unfinished sequences of each request, by their index.
        self.requests: dict[Hashable, dict[int, Sequence]] = {}
        self.cache_size.clear()
        options = self.max_num_batched_tokens, self.config.enable_prefix_caching, policy_version
        table = SequenceTable(self.max_num_seqs, BLOCK_SIZE)
        places = self.runner.sizes.places_of(blocks.num_blocks)
        table.windows = row_windows_for(self.model.config, table, blocks.num_blocks, places)
        self.scheduler = Scheduler(
            table,
            blocks,
            *options,
            # Not a bound method, which would make a cycle and keep the cache's memory until a garbage collection.
            partial(has_stop_string, self.tokenizer),
            sharing(*self.runner.heads),
            pages_for(self.model.config, table),
        )
        self.scheduler.row_blocks.routed_experts = self.runner.routed_experts
        self.run_ahead = RunAhead(self.scheduler, self.runner, self.grammars, self.config.async_scheduling)
        # Computed, and recorded, but not yet returned by `step`.
        self.outputs: deque[StepOutput] = deque()
        self.speculator.reset()
        # (whether the last step was to have drafts, its size), and when it was recorded.
        self.last_step = None, 0.0

    def take_ends(self, config):
        """Let the tokens that end a sequence, of requests that are added from now on, be those of a ModelConfig."""
        ids = config.ending_at(self.tokenizer and self.tokenizer.eos_token_id).eos_token_ids
        # Others are written in some models' files, and cannot be drawn.
        self.eos_token_ids = tuple(i for i in ids if 0 <= i < config.vocab_size)
        self.grammars.end_with(self.eos_token_ids)

    @property
    def policy_version(self):
        """The version of the weights that tokens are sampled from."""
        return self.scheduler.policy_version

    @property
    def num_preemptions(self):
        """The number of times that a running sequence gave its blocks up because there were too few, since the start or
        `reset`."""
        return self.scheduler.num_preemptions

    @property
    def has_unfinished(self):
        """Whether `step` has anything to compute or to return."""
        return bool(self.requests or self.outputs)

    @property
    def num_unfinished(self):
        """Sequences that wait or run: int."""
        return sum(map(len, self.requests.values()))

    def add_request(
        self, request_id, prompt, params=None, adapter_id=-1, indices=None, first_context=None, cache_salt=""
    ):
        """Queue the params.n completions of a prompt, and return its token ids: (P,) int32.

        request_id: hashable, of no unfinished request (ValueError). prompt: token ids or, with a tokenizer, a text.
        adapter_id: of one that engine/adapters.py has added, -1 for none. indices: of the completions, by default all.
        first_context: the prompt is the context of a turn, and this one (a list of ids) that of its episode's first
        turn, which the noise depends on; the blocks of a finished turn are retained until `release_retained`.
        cache_salt: requests with different ones share no blocks of the cache.
        Raises PromptError (empty, too long, an id outside of the vocabulary) and ConfigError; nothing is queued then.
        """
        params = (params or SamplingParams()).seeded()
        if request_id in self.requests:
            raise ValueError(f"add_request: {request_id!r} is unfinished")
        self.adapters.slot(adapter_id)
        prompt, limit = self.check_request(request_id, prompt, params)
        stop_ids = self._stop_ids(params)
        philox_key = noise_key(params.seed, prompt if first_context is None else first_context)
        of_all = philox_key, limit, stop_ids, (adapter_id, cache_salt)
        sequences = [
            Sequence(request_id, index, prompt, params.of_completion(index), *of_all)
            for index in (range(params.n) if indices is None else indices)
        ]
        rules = token_rules(params, self.tokenizer, self.model.config.vocab_size)
        is_turn = first_context is not None
        for sequence in sequences:
            sequence.rules, sequence.retains_blocks = rules, is_turn
            sequence.grammar = self.grammars.state(params)
            sequence.continues = is_turn and len(prompt) > len(first_context)
        self.move_in(sequences)
        return prompt

    def check_request(self, request_id, prompt, params):
        """(token ids (P,) int32, the most tokens that a completion ends at) of what add_request takes; raises as it."""
        check_stops(params, self.tokenizer, self.model.config.vocab_size)
        rules = token_rules(params, self.tokenizer, self.model.config.vocab_size)
        check_drawable(params, rules, self._stop_ids(params), self.model.config.vocab_size)
        self.grammars.check(params)
        self._check_logprobs(params)
        prompt = self._prompt_ids(request_id, prompt, params)
        # A prompt as long as the limit still gets the token that its last position predicts.
        limit = max(min(len(prompt) + params.max_tokens, self.max_model_len), len(prompt) + 1)
        num_blocks = blocks_needed(limit, BLOCK_SIZE)
        if num_blocks > (capacity := self._capacity()):
            raise PromptError(
                request_id,
                f"prompt and completion need {limit} tokens of KV cache, which holds {capacity * BLOCK_SIZE}; "
                "lower max_tokens or raise gpu_memory_utilization",
            )
        return prompt, limit

    def _stop_ids(self, params):
        """The ids that end a completion: tuple of int."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys(eos + params.stop_token_ids + special_stop_ids(self.tokenizer, params)))

    def move_in(self, sequences):
        """Queue Sequences, new ones or such as another engine's move_out returned; they go on with their tokens.

        That engine has the same weights and EngineConfig.
        """
        for sequence in sequences:
            sequence.adapter_slot = self.adapters.slot(sequence.adapter_id)
            self.grammars.resume(sequence)
            self.requests.setdefault(sequence.request_id, {})[sequence.index] = sequence
            self.scheduler.add(sequence)
            self.cache_size.add(sequence)

    def move_out(self, count, least_left=1):
        """Drop up to `count` unfinished sequences, those with the fewest tokens, and return them for `move_in`: list.

        least_left: tokens that each may still get, at least. Raises as `step` does.
        """
        self.synchronize()
        lengths = self.scheduler.table.length

        def length_of(sequence):
            return len(sequence.token_ids) if sequence.row is None else int(lengths[sequence.row])

        unfinished = [sequence for of_request in self.requests.values() for sequence in of_request.values()]
        movable = [each for each in reversed(unfinished) if each.length_limit - length_of(each) >= least_left]
        # The last that were added go first among those with as many.
        return self._remove(sorted(movable, key=lambda each: length_of(each) - len(each.prompt))[:count])

    def interrupt(self, request_id):
        """Take a request back: (its unfinished sequences for `move_in`, its StepOutputs that no step has returned).

        Nothing is left of it here, so that its id may be given out again. Raises as `step` does.
        """
        self.synchronize()
        begun = self._remove(list(self.requests.get(request_id, {}).values()))
        of_request = [output.only(request_id) for output in self.outputs]
        self._drop_outputs(request_id)
        return begun, of_request

    def _drop_outputs(self, request_id):
        """Forget what was computed of a request and not yet returned."""
        left = (output.without(request_id) for output in self.outputs)
        self.outputs = deque(output for output in left if output.num_tokens)

    def _remove(self, sequences):
        """Drop unfinished sequences, and return them."""
        for sequence in sequences:
            self.scheduler.remove(sequence)
            self._forget(sequence)
        return sequences

    def step(self):
        """Return the StepOutput of the next step, empty without unfinished requests; wakes if need be.

        Raises PromptError for a prompt where the model gives no number for a log-prob, and GrammarError. After an
        exception, `reset`.
        """
        if self.outputs:
            return self.outputs.popleft()
        if not self.requests:
            nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
            return StepOutput([], np.full(0, None), *nothing, self.policy_version)
        if self.is_asleep or self.blocks.num_blocks < self._blocks_to_have():
            self._take_cache()
        run_ahead, speculator = self.run_ahead, self.speculator
        if self._waits:
            run_ahead.end()
        # Steps that decode had ahead when speculation began are of neither kind.
        is_timed = not (speculator.is_on and run_ahead.in_flight)
        with self._failing():
            run_ahead.launch()
            computed = run_ahead.next() or self._compute_next()
        step, num_seqs = computed[0], len(computed[0].rows)
        kind = (speculator.is_on, row_bucket_of(num_seqs)) if is_timed and (step.is_decode or step.has_drafts) else None
        with self._failing():
            output = self._record(*computed)
        self._time(kind)
        if not self.requests:
            run_ahead.discard()
        return output

    def _compute_next(self):
        """Compute the scheduler's next step; returns what RunAhead.next does."""
        scheduler, speculator, run_ahead = self.scheduler, self.speculator, self.run_ahead
        step = run_ahead.schedule()
        if step.is_decode and speculator.verifies(len(step.rows)):
            step = scheduler.add_drafts(step, speculator.drafts(scheduler.table, step.rows))
        step.allowed = self.grammars.allowed(step, scheduler.table)
        if not step.is_decode:
            return step, *self.runner.run(step, scheduler.table)
        run_ahead.begin(step)
        if not self._waits:
            run_ahead.launch()
        return run_ahead.next()

    @property
    def _waits(self):
        """Whether the next step is made from the tokens of the last one by the host: it has drafts."""
        return self.speculator.is_on

    def synchronize(self):
        """Return once the device has done all work that it was given; the next steps return the results.

        To be called before the weights are written while requests are unfinished. Raises as `step` does.
        """
        with self._failing():
            while (computed := self.run_ahead.next()) is not None:
                self.outputs.append(self._record(*computed))
        self.run_ahead.discard()

    def release_retained(self, request_id):
        """Free the blocks that are retained for the next turn of a request, which has none, or is begun elsewhere."""
        self.scheduler.row_blocks.retained.release(request_id)

    def abort(self, request_id):
        """Drop what is unfinished of a request; nothing happens if that is nothing, as when it has just finished."""
        self.release_retained(request_id)
        self._remove(list(self.requests.get(request_id, {}).values()))
        self._drop_outputs(request_id)
        if not self.requests:
            self.run_ahead.discard()

    def cut_short(self, request_id):
        """End a request with the tokens that its completions have: list of FinishedCompletion of the unfinished ones.

        Their finish_reason is "abort". To be called after `synchronize`, once `step` has returned what that found.
        """
        self.release_retained(request_id)
        sequences = list(self.requests.get(request_id, {}).values())
        for sequence in sequences:
            self.scheduler.remove(sequence)
            sequence.finish_reason = "abort"
        return self._finish(sequences)

    def reset_prefix_cache(self):
        """Let no request share the cached blocks of an earlier one any more. Raises as `step` does."""
        self.synchronize()
        self.scheduler.row_blocks.forget_cached()

    def reset(self):
        """Drop all requests and the content of the cache: after an exception in `step`, wherever it was raised."""
        self.runner.synchronize()
        self._start(BlockManager(self.blocks.num_blocks, BLOCK_SIZE), self.policy_version)

    def update_weights(self, version, keep_cache=False):
        """The weights have been changed in place: tokens sampled next are of policy version `version`.

        K and V of the old weights are dropped. Running sequences keep their tokens and compute them again, so that the
        next ones are those of an engine that never had other weights; with keep_cache they keep K and V, too, and
        nothing is computed again, but their log-probs are those of no single version. Raises as `step` does, and
        ValueError for a version that does not grow with keep_cache: the blocks that these sequences fill next are
        cached under the version that they began with, where requests of that version would find them.
        """
        if keep_cache and version <= self.policy_version:
            raise ValueError(f"update_weights with keep_cache: version {version} must be above {self.policy_version}")
        self.synchronize()
        self.context.wait_for(current())
        # The base of an adapter that is trained stays as it is, and a copy of the adapter does not.
        has_own_adapter = self.runner.model.adapter is not self.model.adapter
        if self.runner.copies is not None and (has_own_adapter or not isinstance(self.model.adapter, Adapter)):
            self.copies_are_old = True
        if not self.is_asleep:
            self._refresh_copies()
        if not keep_cache:
            self.scheduler.preempt_all()
        self.scheduler.change_version(version)

    def sleep(self):
        """Let others use the memory of the KV cache, as enable_sleep_mode says, and forget its content.

        Unfinished requests stay and are computed again. Raises as `step` does.
        """
        self.synchronize()
        self.scheduler.preempt_all()
        self.scheduler.row_blocks.forget_cached()
        self.runner.release(self.config.enable_sleep_mode)
        self.copies_are_old |= self.runner.copies is not None and self.config.enable_sleep_mode is not False
        self.is_asleep = True

    def wake(self):
        """Take the KV cache's memory, as `step` does; only on the GPU: elsewhere its size follows the requests.

        Copies of the weights are made anew; ranks that have them in parts all call this together.
        """
        if device.name() == "cuda" and self.is_asleep:
            self._take_cache()
        elif self.copies_are_old:
            self.context.wait_for(current())
            self._refresh_copies()

    def _record(self, step, token_ids, logprobs, thresholds, listed):
        """The StepOutput of a computed step, once its results are in the scheduler's table."""
        scheduler = self.scheduler
        if step.has_drafts:
            step, kept = scheduler.accept(step, token_ids)
            token_ids, logprobs = token_ids[kept], logprobs[kept]
            thresholds, listed = None if thresholds is None else thresholds[kept], listed.part(kept)
        sequences, is_finite = scheduler.table.sequences[step.sampled_rows], np.isfinite(logprobs)
        if not is_finite.all():
            # Those of one reason; the others have theirs when they are drawn again.
            reasons = [
                (each.request_id, NOT_FINITE if each.rules is None else NO_TOKEN) for each in sequences[~is_finite]
            ]
            damaged = tuple(dict.fromkeys(request_id for request_id, reason in reasons if reason == reasons[0][1]))
            raise PromptError(damaged[0], reasons[0][1], damaged)
        if listed.sampled is not None and not self.runner.raw_logprobs:
            listed.sampled[:, 1] = logprobs.view(np.int32)
        record_listed(listed, step, scheduler.table, sequences)
        has_grammars = scheduler.has_grammars
        ended = scheduler.update(step, token_ids, logprobs, thresholds)
        if has_grammars:
            self.grammars.advance(sequences, token_ids)
        finished = self._finish(ended) if ended else []
        return StepOutput(finished, sequences, token_ids, logprobs, self.policy_version, listed.sampled)

    @contextlib.contextmanager
    def _failing(self):
        """PromptError for the NoTokenLeft of a block, GrammarError for other DamagedGrammars."""
        try:
            yield
        except DamagedGrammars as error:
            ids = tuple(dict.fromkeys(sequence.request_id for sequence in error.sequences))
            failure = PromptError if isinstance(error, NoTokenLeft) else GrammarError
            raise failure(ids[0], error.reason, ids) from error

    def _time(self, kind):
        """Let the speculator know of a recorded step, and of the seconds since the last one if that was of its kind.

        kind: (whether it was to have drafts, its size), None for steps that are not compared.
        """
        (last_kind, last), now = self.last_step, time.perf_counter()
        self.last_step = kind, now
        running = self.scheduler.running
        seconds = now - last if kind is not None and kind == last_kind else None
        self.speculator.record(self.scheduler.table, running, row_bucket_of(len(running)), kind, seconds)

    def _check_logprobs(self, params):
        """Raise ConfigError if more tokens are to be listed than the engine lists."""
        most = self.config.max_logprobs
        for name, count in (("logprobs", params.num_logprobs), ("prompt_logprobs", params.num_prompt_logprobs)):
            if count > most >= 0:
                raise ConfigError(f"sampling: {name} {getattr(params, name)} is more than max_logprobs ({most})")

    def _prompt_ids(self, request_id, prompt, params):
        """The prompt as int32 array; PromptError if it is empty, too long or not of known ids."""
        if isinstance(prompt, str) and self.tokenizer is None:
            raise PromptError(request_id, "text needs a tokenizer")
        ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if len(ids) == 0:
            raise PromptError(request_id, "empty prompt")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise PromptError(request_id, "token ids must be a flat list of integers")
        vocab_size = self.model.config.vocab_size
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise PromptError(request_id, f"token id {outside[0]} is outside of the vocabulary of {vocab_size}")
        if (kept := params.truncate_prompt_tokens) is not None:
            ids = ids[-(kept if kept > 0 else max(self.max_model_len - params.max_tokens, 1)) :]
        if len(ids) > self.max_model_len:
            raise PromptError(request_id, f"{len(ids)} tokens are more than the limit of {self.max_model_len}")
        return ids.astype(np.int32)

    def _finish(self, sequences):
        """The FinishedCompletions of sequences that the scheduler has finished: list."""
        finished = []
        for sequence, (text, stop) in zip(sequences, completion_texts(self.tokenizer, sequences), strict=True):
            self.speculator.finish(sequence)
            self._forget(sequence)
            wanted, is_listed = sequence.params.logprobs, sequence.params.num_logprobs >= 0
            logprobs = sequence.completion_logprobs if wanted or is_listed else None if wanted is None else []
            thresholds = sequence.completion_thresholds if sequence.params.logit_thresholds else None
            values = logprobs, sequence.finish_reason, text, sequence.policy_versions, thresholds
            reason = stop_reason(self.tokenizer, sequence, stop, self.eos_token_ids)
            values = *values, sequence.index, reason, sequence.num_cached_tokens or 0
            completion = Completion(sequence.completion_ids, *values)
            completion.routed_experts = sequence.routed_experts
            if is_listed:
                pairs = zip(sequence.listings, sequence.completion_ids, strict=True)
                completion.top_logprobs = [entries(listing, token, self.token_text) for listing, token in pairs]
            if sequence.params.num_prompt_logprobs >= 0 and sequence.index == 0 and not sequence.num_to_score:
                pairs = zip(sequence.prompt_listings, sequence.prompt[1:], strict=True)
                scored = [entries(listing, token, self.token_text) for listing, token in pairs]
                completion.prompt_logprobs = [None, *scored]
            finished.append(FinishedCompletion(sequence.request_id, sequence.index, completion))
        return finished

    def token_text(self, token_id):
        """The text of a token alone, special ones included; None without a tokenizer."""
        if self.tokenizer is not None and token_id not in self.token_texts:
            self.token_texts[token_id] = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return self.token_texts.get(token_id)

    def _forget(self, sequence):
        unfinished = self.requests[sequence.request_id]
        del unfinished[sequence.index]
        if not unfinished:
            del self.requests[sequence.request_id]
            self.speculator.forget(sequence.request_id)
        self.cache_size.remove(sequence)

    def _capacity(self):
        """The most blocks that the cache can have: inf where it grows with the requests."""
        if self.config.num_gpu_blocks_override is not None:
            return self.config.num_gpu_blocks_override
        if device.name() != "cuda":
            return math.inf
        if self.runner.cache is None:
            self._take_cache()
        return self.blocks.num_blocks

    def _blocks_to_have(self):
        """The number of blocks that the cache must have for the next step."""
        if (capacity := self._capacity()) < math.inf:
            return capacity
        return self.cache_size.for_requests()

    def _refresh_copies(self):
        """Make the copies of the weights that steps read anew, if these are not those of the weights."""
        if self.copies_are_old:
            self.runner.refresh()
            self.copies_are_old = False

    def _take_cache(self):
        """Take the memory of the cache, and on the GPU decide once how many blocks it has."""
        # The weights may have been written, or loaded, on another stream.
        self.context.wait_for(current())
        self._refresh_copies()
        if device.name() == "cuda" and self.runner.cache is None:
            num_blocks = self.cache_size.of_gpu()
        else:
            num_blocks = max(self._blocks_to_have(), self.blocks.num_blocks)
        with self.context.use():
            self.runner.allocate(num_blocks)
        self.blocks.grow(num_blocks)
        if (windows := self.scheduler.table.windows) is not None:
            windows.blocks.grow(num_blocks, self.runner.sizes.places_of(num_blocks))
        self.is_asleep = False
