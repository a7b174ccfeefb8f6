"""Do rollout and training agree? The engine's log-probs are compared with the training forward's, bit by bit.

If they differ, one sequence is run again through both, and the first operator, in the order of a forward pass, whose
output differs is named.
"""

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from rlnumba.engine.blocks.cache_size import BLOCK_SIZE
from rlnumba.engine.cache import KVCache
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.engine.steps.attention import PagedAttention
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK
from rlnumba.kernels.nn.elementwise import gather_rows
from rlnumba.model.blocks.attention import PackedAttention
from rlnumba.model.transformer import Tape, pack, score
from rlnumba.runtime import device

PROMPT_LENGTHS = (1, 5, 17, 48, 5, 130)  # below, at and above a block of the cache and a tile of attention


@dataclass(frozen=True)
class Agreement:
    """tokens compared, of which `equal` have the same bits; largest: difference of log-probs, in nats; operator: the
    first operator that differs and where, or None."""

    tokens: int
    equal: int
    largest: float
    operator: str | None


class Rollout(NamedTuple):
    """A prompt with its completion, token_ids (list), of which the first prompt_length are the prompt's.

    logprobs: those of the completion, (C,) float32.
    """

    token_ids: list[int]
    prompt_length: int
    logprobs: np.ndarray


def check_agreement(model, config=None, max_tokens=48, temperature=1.0, seed=0, progress=None):
    """Generate from random prompts and compare the log-probs with the training forward's: Agreement.

    config: EngineConfig; max_tokens: the most of a completion, fewer where max_model_len is short; progress: as in
    LLM.generate.
    """
    llm = LLM(model, None, config)
    rollouts = draw_rollouts(llm, max_tokens, temperature, seed, progress)
    tokens, equal, largest, worst = compare(model, rollouts, temperature)
    operator = None
    if worst is not None:
        llm.sleep()
        operator = first_difference(model, worst.token_ids, worst.prompt_length, len(rollouts))
    return Agreement(tokens, equal, largest, operator)


def requests(config, limit, max_tokens, temperature, seed):
    """(prompts, the SamplingParams of all) of check_agreement, for a ModelConfig and sequences of `limit` tokens."""
    rng = np.random.default_rng(seed)
    lengths = [max(1, min(length, limit - max_tokens)) for length in PROMPT_LENGTHS]
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    return prompts, SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed, n=2)


def draw_rollouts(llm, max_tokens, temperature, seed, progress):
    """The Rollouts of check_agreement: a list."""
    prompts, params = requests(llm.model.config, llm.max_model_len, max_tokens, temperature, seed)
    lengths = [len(prompt) for prompt in prompts]
    llm.compile_ahead(lengths, [params], [length + max_tokens for length in lengths for _ in range(params.n)])
    return [
        Rollout(output.prompt_token_ids + c.token_ids, len(output.prompt_token_ids), np.array(c.logprobs, np.float32))
        for output in llm.generate(prompts, params, progress)
        for c in output.completions
    ]


def compare(model, rollouts, temperature):
    """Rollouts' log-probs against the training forward's: (tokens, equal, largest) of Agreement, and the worst Rollout.

    The last is None if all are equal.
    """
    batch = pack([each.token_ids for each in rollouts])
    scored = np.split(device.to_host(score(model, batch, temperature).logprobs), np.cumsum(batch.lengths)[:-1])
    differences = [
        np.abs(each.logprobs.astype(np.float64) - logprobs[each.prompt_length :])
        for each, logprobs in zip(rollouts, scored, strict=True)
    ]
    flat = np.concatenate(differences)
    worst = rollouts[int(np.argmax([d.max() for d in differences]))] if flat.any() else None
    return len(flat), int((flat == 0).sum()), float(flat.max()), worst


def first_difference(model, token_ids, prompt_length, copies):
    """The first operator whose output differs between training and rollout of one sequence: a sentence.

    The sequence runs `copies` times side by side, because a GEMM may depend on the number of rows.
    """
    training = _training_outputs(model, token_ids, copies)
    rollout = _rollout_outputs(model, token_ids, prompt_length, copies)
    for (name, expected), (_, actual) in zip(training, rollout, strict=True):
        unequal = (expected[:, : actual.shape[1]] != actual).any(axis=(0, 2))
        if unequal.any():
            position = int(np.argmax(unequal))
            part = "prefill" if position < prompt_length else "decode"
            return f"{name}, at position {position} ({part})"
    return "log-prob of the sampled token, or what depends on the rest of the batch: alone, all hidden states agree"


def _outputs(model, tape, hidden, slots=None):
    """(name, array of the device) of every operator's output in the order of a forward, from its tape.

    slots: those of this forward's keys and values, if it wrote them to a cache. q is None where attention made it from
    qkv.
    """
    outputs = []
    source = "embedding"
    for block, saved in zip(chain(*model.blocks), chain(*tape.layers), strict=True):
        outputs.append((source, saved.x))
        for field, name in block.OPERATORS.items():
            array = getattr(saved, field)
            if slots is not None and field in block.CACHED:
                array = _cached_rows(array, slots)
            outputs.append((f"layer {block.layer} {name}", array))
        source = f"layer {block.layer} {block.OUTPUT}"
    return [*outputs, (source, tape.last[0]), ("final rmsnorm", hidden)]


def _cached_rows(cache, slots):
    """(M, HK * E): the rows of a layer's k or v cache in the slots (M,) int32."""
    rows = cache.reshape(cache.shape[0] * cache.shape[1], -1)
    gathered = device.xp().empty((slots.shape[0], rows.shape[1]), rows.dtype)
    gather_rows(rows, slots, gathered)
    return gathered


def _to_host(outputs, copies):
    """(name, (copies, rows, columns) float32) of each output, or None of one that there is not."""
    arrays = ((name, None if x is None else device.to_host(x).astype(np.float32)) for name, x in outputs)
    return [(name, None if x is None else x.reshape(copies, x.shape[0] // copies, -1)) for name, x in arrays]


def _training_outputs(model, token_ids, copies):
    batch = pack([token_ids] * copies)
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen, model.config.scale)
    tape = Tape()
    hidden = model.forward(batch.input_ids, batch.position_ids, attention, tape)
    return _to_host(_outputs(model, tape, hidden), copies)


def _rollout_outputs(model, token_ids, prompt_length, copies):
    """The operators' outputs as the engine computes them: the prompt in one step, then token by token, over a paged
    cache."""
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(model.config, blocks * copies, BLOCK_SIZE, model.dtype, copies, copies)
    cache.take()
    tables = np.arange(blocks * copies, dtype=np.int32).reshape(copies, blocks)
    steps, start = [], 0
    for end in [prompt_length, *range(prompt_length + 1, len(token_ids) + 1)]:
        positions = np.arange(start, end, dtype=np.int32)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        arrays = {
            "input_ids": np.tile(np.array(token_ids[start:end], np.int32), copies),
            "position_ids": np.tile(positions, copies),
            "slot_mapping": slots.reshape(-1).astype(np.int32),
            "block_tables": tables,
            "cu_seqlens": np.arange(copies + 1, dtype=np.int32) * np.int32(end - start),
            "context_lens": np.full(copies, end, np.int32),
        }
        if model.config.has_linear_attention:
            rows = np.arange(copies, dtype=np.int32)
            pages = np.repeat(rows[:, None], -(-end // STATE_BLOCK), axis=1)
            arrays |= {"state_tables": pages, "state_slots": rows, "resumed_at": np.full(copies, -1, np.int32)}
        arrays = {name: device.asarray(np.ascontiguousarray(array)) for name, array in arrays.items()}
        attention = PagedAttention(cache, model.config, arrays, end - start, end)
        tape = Tape()
        hidden = model.forward(arrays["input_ids"], arrays["position_ids"], attention, tape)
        steps.append(_to_host(_outputs(model, tape, hidden, arrays["slot_mapping"]), copies))
        start = end
    cache.give_back()
    # The first step, the prompt's, has all of them.
    return [
        (parts[0][0], np.concatenate([array for _, array in parts if array is not None], axis=1))
        for parts in zip(*steps, strict=True)
    ]
