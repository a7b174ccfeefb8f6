"""LLM.generate: lists of token ids in, completions with their log-probs out.

A drawn token depends on (seed, prompt token ids, completion index, position) and the weights alone: not on
the other prompts, their order, the step's composition, preemption or what the prefix cache holds.
"""

from pathlib import Path

import numpy as np

from rlnumba.config import EngineConfig
from rlnumba.engine.block_manager import BlockManager
from rlnumba.engine.runner import Runner
from rlnumba.engine.scheduler import Scheduler, blocks_of
from rlnumba.engine.sequence import Completion, RequestOutput, SamplingParams, Sequence, SequenceTable
from rlnumba.errors import ConfigError, DeviceError, UserError
from rlnumba.kernels.philox import noise_key
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import check_finite, find_model, load_model
from rlnumba.runtime import device

# vLLM's default; small blocks waste little and a prompt's tail, computed again by each of its completions, is short.
BLOCK_SIZE = 16
# The CPU's cache is as large as the requests need, but not larger than this unless one sequence needs it.
CPU_CACHE_BYTES = 1 << 30
# Left to the driver and to what allocates outside of the plan.
GPU_MARGIN_BYTES = 512 << 20


class PromptError(UserError):
    """A prompt that cannot be run: its index in the list and the reason."""

    def __init__(self, index, reason):
        super().__init__(f"prompt {index}: {reason}")
        self.index, self.reason = index, reason


def longest_sequence(model_config, engine_config):
    """How many tokens a sequence may have: max_model_len, or without it the model's max_position_embeddings.

    Raises ConfigError if max_model_len is more than the model has positions.
    """
    positions = model_config.max_position_embeddings
    longest = engine_config.max_model_len or positions
    if longest > positions:
        raise ConfigError(f"max_model_len {longest} is more than the model's {positions} positions")
    return longest


class LLM:
    """A model that generates. Its weights are read in place: after training, call `reset_prefix_cache`.

    model: a Transformer, or a Hugging Face folder or hub id, whose tokenizer is then the default. tokenizer: None
    leaves the texts empty, and prompts are token ids. config: max_num_seqs sequences and
    max_num_batched_tokens tokens a step, max_model_len (None: the model's max_position_embeddings), the
    share of the GPU's memory that weights, activations and KV cache may fill.
    Raises ConfigError if max_model_len is more than the model has positions.
    """

    def __init__(self, model, tokenizer=None, config=None):
        if isinstance(model, str | Path):
            folder = find_model(model)
            model, tokenizer = load_model(folder), tokenizer or Tokenizer.from_folder(folder)
        self.model, self.tokenizer = model, tokenizer
        self.config = config or EngineConfig()
        self.max_model_len = longest_sequence(model.config, self.config)
        self.max_num_batched_tokens = self.config.max_num_batched_tokens
        # A step has room for one token of every running sequence.
        self.max_num_seqs = min(self.config.max_num_seqs, self.max_num_batched_tokens)
        self.runner = Runner(
            model,
            BLOCK_SIZE,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.max_model_len,
            self.config.enforce_eager,
        )
        self.blocks = None
        self.policy_version = 0
        self.num_preemptions = 0

    def generate(self, prompts, params=None, progress=None):
        """The completions of each prompt, in the order of the prompts.

        prompts: lists of token ids or, with a tokenizer, texts. params: a SamplingParams for all, or one for
        each. progress: called after every step with (completions finished, completions asked for, tokens drawn so far).
        Raises PromptError (empty, too long, an id outside of the vocabulary) and ConfigError before any
        work is done, and UserError where the model gives no number for a log-prob.
        """
        params = self._params(prompts, params)
        prompts = self.validate(prompts)
        outputs = [
            RequestOutput(prompt.tolist(), [None] * p.n, self.policy_version)
            for prompt, p in zip(prompts, params, strict=True)
        ]
        sequences = self._sequences(prompts, params)
        if not sequences:
            return outputs
        self._take_cache(sequences)
        rows = min(self.max_num_seqs, len(sequences))
        table = SequenceTable(
            rows,
            max(s.length_limit for s in sequences),
            BLOCK_SIZE,
            max(len(s.stop_ids) for s in sequences),
        )
        scheduler = Scheduler(
            table,
            self.blocks,
            self.max_num_batched_tokens,
            self.config.enable_prefix_caching,
            self.policy_version,
            self._has_stop_string,
            self.runner.sharing,
        )
        for sequence in sequences:
            scheduler.add(sequence)
        try:
            self._loop(scheduler, outputs, len(sequences), progress)
        finally:
            self.num_preemptions += scheduler.num_preemptions
            if scheduler.unfinished:
                # Interrupted: the blocks of what was running have no owner any more.
                self.blocks = BlockManager(self.blocks.num_blocks, BLOCK_SIZE)
        return outputs

    def validate(self, prompts):
        """The prompts as int32 arrays; PromptError for the first that is empty, too long or not of known ids."""
        arrays = []
        vocabulary = self.model.config.vocab_size
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str) and self.tokenizer is None:
                raise PromptError(index, "text needs a tokenizer")
            ids = np.asarray(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
            if len(ids) == 0:
                raise PromptError(index, "empty prompt")
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise PromptError(index, "token ids must be a flat list of integers")
            outside = ids[(ids < 0) | (ids >= vocabulary)]
            if len(outside):
                raise PromptError(index, f"token id {outside[0]} is outside of the vocabulary of {vocabulary}")
            if len(ids) > self.max_model_len:
                raise PromptError(index, f"{len(ids)} tokens are more than the limit of {self.max_model_len}")
            arrays.append(ids.astype(np.int32))
        return arrays

    def reset_prefix_cache(self):
        """Forget the cached prefixes: needed after every change of the weights."""
        if self.blocks is not None:
            self.blocks.reset()

    def sleep(self):
        """Give the bytes of the KV cache back; `wake` or the next `generate` takes them again."""
        self.runner.release()
        self.blocks = None

    def wake(self):
        """Take the KV cache's bytes; only on the GPU, since elsewhere its size follows the requests."""
        if device.name() == "cuda" and self.blocks is None:
            cache = self.runner.cache
            self._allocate(self._gpu_blocks() if cache is None else cache.num_blocks)

    def _params(self, prompts, params):
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"generate: {len(prompts)} prompts with {len(params)} SamplingParams")
        if self.tokenizer is None and any(p.stop for p in params):
            raise ConfigError("sampling: stop strings need a tokenizer, and the model folder has none")
        return params

    def _sequences(self, prompts, params):
        """A Sequence for each completion, those of one prompt next to each other."""
        sequences = []
        eos = tuple(self.model.config.eos_token_ids)
        for request, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            key = noise_key(p.seed, prompt)
            # A prompt as long as the limit still gets the token that its last position predicts.
            limit = max(min(len(prompt) + p.max_tokens, self.max_model_len), len(prompt) + 1)
            stop_ids = p.stop_token_ids if p.ignore_eos else eos + p.stop_token_ids
            prompt_key = prompt.tobytes()
            for index in range(p.n):
                sequences.append(Sequence(request, index, prompt, p, key, limit, stop_ids, prompt_key))
        return sequences

    def _loop(self, scheduler, outputs, total, progress):
        finished = drawn = 0
        while (step := scheduler.schedule()) is not None:
            token_ids, logprobs = self.runner.run(step, scheduler.table)
            check_finite(logprobs)
            for sequence in scheduler.update(step, token_ids, logprobs):
                outputs[sequence.request].completions[sequence.index] = self._completion(sequence)
                finished += 1
            drawn += len(token_ids)
            if progress is not None:
                progress(finished, total, drawn)

    def _completion(self, sequence):
        token_ids = sequence.completion_ids.tolist()
        logprobs = sequence.completion_logprobs.tolist() if sequence.params.logprobs else []
        return Completion(token_ids, logprobs, sequence.finish_reason, self._text(sequence, token_ids))

    def _text(self, sequence, token_ids):
        if self.tokenizer is None:
            return ""
        if sequence.finish_reason == "stop" and token_ids[-1] in sequence.stop_ids:
            token_ids = token_ids[:-1]
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [text.find(stop) for stop in sequence.params.stop]
        return text[: min((end for end in ends if end >= 0), default=len(text))]

    def _has_stop_string(self, sequence, token_ids):
        """Whether the last token completed a stop string. The tail is looked at first: it is short."""
        stop = sequence.params.stop
        # A token adds at least a byte, save special ones, for which there is some room.
        tail = token_ids[-(max(len(text.encode()) for text in stop) + 16) :]
        decoded = (self.tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in (tail, token_ids))
        return all(any(text in whole for text in stop) for whole in decoded)

    def _take_cache(self, sequences):
        """Have a cache that holds each of the sequences, and on the CPU as many of them as may run together."""
        sizes = sorted((blocks_of(s, BLOCK_SIZE) for s in sequences), reverse=True)
        if device.name() == "cuda":
            self.wake()
        else:
            wanted = self.config.num_gpu_blocks_override
            if wanted is None:
                # One block more for each, so that admission finds its reserve.
                wanted = sum(sizes[: self.max_num_seqs]) + min(len(sizes), self.max_num_seqs)
                wanted = max(sizes[0], min(wanted, CPU_CACHE_BYTES // self.runner.block_bytes))
            if self.blocks is None or self.blocks.num_blocks < wanted:
                self.sleep()
                self._allocate(wanted)
        if sizes[0] > self.blocks.num_blocks:
            request = max(sequences, key=lambda s: s.length_limit)
            raise PromptError(
                request.request,
                f"prompt and completion need {request.length_limit} tokens of KV cache, which holds "
                f"{self.blocks.num_blocks * BLOCK_SIZE}; lower max_tokens or raise gpu_memory_utilization",
            )

    def _allocate(self, num_blocks):
        self.runner.allocate(num_blocks)
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE)

    def _gpu_blocks(self):
        """How many blocks the engine's share of the GPU's memory holds beside all else that is the engine's.

        What attention keeps for itself grows with the longest sequence that the cache can hold, so it is taken first.
        """
        num_blocks = self.config.num_gpu_blocks_override
        if num_blocks is None:
            self.runner.reserve_activations()
            num_blocks = self._blocks_beside(0)
        workspace = self.runner.reserve_workspace(num_blocks * BLOCK_SIZE)
        if self.config.num_gpu_blocks_override is not None:
            return num_blocks
        most = self.max_num_seqs * (-(-self.max_model_len // BLOCK_SIZE) + 1)
        return min(self._blocks_beside(workspace), most)

    def _blocks_beside(self, workspace):
        """How many blocks fit beside weights, activations and `workspace` bytes; DeviceError if none do."""
        device.xp().get_default_memory_pool().free_all_blocks()
        free, total = device.memory_info()
        own = self.model.weights.flat.nbytes + self.runner.arena.peak + workspace
        share = int(total * self.config.gpu_memory_utilization)
        room = min(share - own, free - GPU_MARGIN_BYTES)
        num_blocks = room // self.runner.block_bytes
        if num_blocks <= 0:
            raise DeviceError(
                f"engine: gpu_memory_utilization {self.config.gpu_memory_utilization} of {total / 2**30:.1f} GiB has "
                f"no room for a KV cache beside {own / 2**30:.1f} GiB of weights, activations and attention's partial "
                f"results ({free / 2**30:.1f} GiB are free)"
            )
        return num_blocks
