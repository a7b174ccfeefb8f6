"""Which kernels an engine is going to launch: its steps of all sizes, run without memory (runtime/shapes.py).

    python -m rlnumba.engine.kernel_list        the process that compiles them (runtime/ahead_of_time.py)

Prefill is listed in steps as large as the engine's, decode in every bucket of rows, since the GEMM's configuration
follows from the number of rows. Penalties and batches of several adapters are not listed: their kernels are compiled
when they are first launched.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.config import EngineConfig, LoraConfig
from rlnumba.engine.core import BLOCK_SIZE, longest_sequence
from rlnumba.engine.runner import BUCKET_STEP, SMALL_BUCKETS, Runner, bucket_of, context_bucket_of, decode_state
from rlnumba.engine.scheduler import blocks_needed
from rlnumba.kernels.attention.paged import sharing
from rlnumba.kernels.decode_state import edit_decode_state
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import compile_pool
from rlnumba.runtime.context import Context
from rlnumba.runtime.shapes import launches_only


class Request(NamedTuple):
    """An engine and what it is given at once.

    model, dtype: of the weights, with an adapter of the settings lora, or None. prompt_lengths: tokens of each prompt;
    n: completions of each; max_tokens: of a completion; replay: whether the smallest logits that filters kept are
    wanted.
    """

    model: ModelConfig
    dtype: str
    lora: LoraConfig | None
    engine: EngineConfig
    prompt_lengths: tuple
    n: int
    max_tokens: int
    replay: bool = False


def list_signatures(request, properties):
    """The signatures of the kernels that a Request needs on a GPU of these device.Properties: list."""
    request = Request(*request)
    with launches_only(properties) as signatures:
        model = Transformer(request.model, Weights(request.model, request.dtype))
        if request.lora is not None:
            model.adapter = Adapter(request.model, request.lora, request.dtype)
        launch_steps(model, request)
    return signatures


def launch_steps(model, request):
    """Run the steps of all sizes that a Request leads to, inside launches_only."""
    engine = request.engine
    limit = longest_sequence(model.config, engine)
    lengths = [min(length, limit) for length in request.prompt_lengths]
    longest = min(max(lengths) + request.max_tokens, limit)
    most_rows = min(len(lengths) * request.n, engine.max_num_seqs, engine.max_num_batched_tokens)
    seqs = min(engine.max_num_seqs, engine.max_num_batched_tokens)
    runner = Runner(model, Context(), BLOCK_SIZE, engine.max_num_batched_tokens, seqs, limit, eager=True)
    runner.reserve_activations()
    runner.allocate(most_rows * (blocks_needed(longest, BLOCK_SIZE) + 1))
    for rows, count in prefill_sizes(lengths, engine.max_num_batched_tokens, most_rows):
        runner.compute(step_arrays_of(rows, count, longest, request.replay), rows, count, longest, 1)
    group_sizes = [1, *(size for size in sharing(*runner.heads).sizes if size <= max(request.n, 2))]
    for rows in decode_buckets(most_rows):
        for max_group_size in group_sizes:
            arrays = step_arrays_of(rows, 1, longest, request.replay, max_group_size)
            runner.compute(arrays, rows, 1, context_bucket_of(longest), max_group_size)
    edit_decode_state(runner.edits[1][0], 1, decode_state(arrays))


def prefill_sizes(lengths, max_tokens, most_rows):
    """(sequences, tokens of each) of the steps that compute prompts of these lengths: the first step and the last."""
    length, found = int(np.median(lengths)), []
    at_once = max(min(len(lengths), max_tokens // length, most_rows), 1)
    found.append((at_once, min(length, max_tokens)))
    if rest := len(lengths) % at_once:
        found.append((rest, length))
    # The members of a group compute what is left of the prompt after its last full block.
    if most_rows > len(lengths):
        found.append((most_rows - len(lengths), length % BLOCK_SIZE or BLOCK_SIZE))
    return found


def decode_buckets(most_rows):
    """The numbers of rows that decode steps of up to most_rows sequences are padded to: list."""
    found = [bucket for bucket in SMALL_BUCKETS if bucket <= bucket_of(most_rows)]
    return found + list(range(BUCKET_STEP, bucket_of(most_rows) + 1, BUCKET_STEP))


def step_arrays_of(sequences, count, context, replay, max_group_size=1):
    """The arrays of a step, as the runner's, zeros: `count` tokens of each of the sequences, of them the last sampled.

    With a count of 1 they are those of decode.
    """

    def zeros(*shape):
        return np.zeros(shape, np.int32)

    arrays = {name: zeros(sequences * count) for name in ("input_ids", "position_ids", "slot_mapping")}
    arrays["block_tables"] = zeros(sequences, -(-context_bucket_of(context) // BLOCK_SIZE))
    arrays |= {"cu_seqlens": zeros(sequences + 1), "context_lens": zeros(sequences)}
    arrays |= {name: np.ones(sequences, np.float32) for name in ("temperature", "top_p", "min_p")}
    arrays |= {name: zeros(sequences) for name in ("top_k", "position", "sample_index")}
    arrays["philox_key"] = np.zeros((sequences, 2), np.uint32)
    if count > 1:
        arrays["rows"] = zeros(sequences)
    else:
        arrays |= {name: zeros(sequences) for name in ("live", "length_limit", "banned_until")}
        arrays |= {"stop_ids": zeros(sequences, 1), "num_steps": zeros(1)}
    if replay:
        arrays["replay"] = zeros(sequences)
    if max_group_size > 1:
        arrays |= {"shared_prefix_lens": zeros(sequences), "group_sizes": zeros(sequences)}
    return arrays


if __name__ == "__main__":
    compile_pool.compile_listed(list_signatures)
