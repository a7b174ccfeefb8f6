"""A layer's decode step of linear attention, in CUDA graphs of as many layers as a model has; its inputs and gradient.

    python bench/linear_attention_decode.py              the decode kernel, inputs of training, the gradient
    python bench/linear_attention_decode.py --heads 32   value heads, of 16 key heads

Each layer has a cache of its own, and sequences are at random places of their blocks: one in 64 folds a block. A layer
is one launch, from the projection to the gated output, launched by programmatic dependent launch. "floor" is the time
of its bytes at a copy's bandwidth.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cupy
from harness import copy_gbs, graph_time_us, random_array, time_us

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, StateCache, StateSequences, Tokens
from rlnumba.kernels.delta_rule.decode.kernel import DecodeOutputs, delta_rule_decode
from rlnumba.kernels.delta_rule.input_rows import DeltaRuleHeads
from rlnumba.kernels.delta_rule.inputs import ConvCache, InputWeights, delta_rule_inputs, empty_tokens
from rlnumba.kernels.delta_rule.ops import delta_rule_backward
from rlnumba.runtime import device
from rlnumba.runtime.launch import pdl_scope

DIM, LAYERS, KEY_HEADS = 128, 18, 16


def weights_of(heads):
    return InputWeights(
        random_array(heads.channels, 4, scale=0.5),
        random_array(heads.value_heads),
        random_array(heads.value_heads),
    )


def step_of(heads, sequences, rng):
    """(a call of a decode step of one layer, its bytes)."""
    dtype, half = device.dtype("bfloat16"), np.float16
    start = rng.integers(BLOCK, 2 * BLOCK, sequences) + 1
    tables = np.arange(2 * sequences, dtype=np.int32).reshape(sequences, 2)
    tables[:, 1] = tables[:, 0] = np.arange(sequences)
    arrays = np.arange(sequences + 1), start + 1, np.repeat(tables[:, :1], 4, 1), np.arange(sequences)
    arrays = [*arrays, np.full(sequences, -1)]
    places = StateSequences(*(cupy.asarray(np.ascontiguousarray(x, np.int32)) for x in arrays))
    cache = StateCache(
        random_array(sequences, heads.value_heads, 2, DIM, DIM, dtype="float16", scale=0.01),
        random_array(sequences, BLOCK, KEY_HEADS, DIM, dtype="float16", scale=0.1),
        random_array(sequences, BLOCK, heads.value_heads, DIM, dtype="float16", scale=0.1),
        -cupy.abs(random_array(sequences, BLOCK, heads.value_heads, dtype="float32", scale=0.1)),
    )
    conv = ConvCache(random_array(sequences, 4, heads.channels), random_array(sequences, 3, heads.channels))
    projected, weights, norm = random_array(sequences, heads.columns), weights_of(heads), random_array(DIM)
    shape = sequences, heads.value_heads, DIM
    outputs = DecodeOutputs(cupy.empty(shape, half), cupy.empty(shape, dtype), cupy.empty(shape[:2], np.float32))
    filled = (start - 1) % BLOCK + 1
    rows = 2 * DIM * int(filled.sum()) * (heads.value_heads + KEY_HEADS)
    folds = int((filled == BLOCK).sum()) * heads.value_heads * 6 * DIM * DIM
    nbytes = sequences * (heads.value_heads * 2 * DIM * DIM + 2 * heads.columns + 10 * heads.channels) + rows + folds
    return lambda: delta_rule_decode(projected, weights, (norm, 1e-6), heads, places, cache, conv, outputs), nbytes


def decode(heads, rate):
    rng = np.random.default_rng(0)
    for sequences in (1, 8, 64, 256):
        steps = [step_of(heads, sequences, rng) for _ in range(LAYERS if sequences < 256 else 6)]
        calls, nbytes = [call for call, _ in steps], sum(n for _, n in steps) / len(steps)
        with pdl_scope():
            overlapped = graph_time_us(calls)
        print(
            f"decode {heads.value_heads} heads, {sequences:3} sequences: {overlapped:6.2f} us a layer with PDL, "
            f"{graph_time_us(calls):6.2f} without; floor {nbytes / rate / 1e3:6.2f}"
        )


def inputs(heads, rate, tokens=16384, sequences=64):
    cu_seqlens = cupy.arange(0, tokens + 1, tokens // sequences, dtype=np.int32)
    projected, weights = random_array(tokens, heads.columns), weights_of(heads)
    outputs = empty_tokens(tokens, heads, projected.dtype, cupy.empty, np.float16)
    time = graph_time_us([lambda: delta_rule_inputs(projected, weights, heads, cu_seqlens, outputs)] * 4)
    nbytes = tokens * 4 * heads.channels
    print(f"inputs {heads.value_heads} heads, {tokens} tokens: {time:6.1f} us; floor {nbytes / rate / 1e3:6.1f}")


def backward(heads, lengths):
    tokens, dtype, half = sum(lengths), device.dtype("bfloat16"), "float16"
    shape, keys = (tokens, heads.value_heads, DIM), (tokens, KEY_HEADS, DIM)
    q, k = (random_array(*keys, dtype=half, scale=DIM**-0.5) for _ in range(2))
    beta = cupy.full(shape[:2], 0.5, np.float32)
    inputs = Tokens(q * np.float16(DIM**-0.5), k, random_array(*shape), beta, beta * np.float32(-0.1))
    bounds = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    kinds = (dtype,) * 3 + (np.float32,) * 2
    gradients = Tokens(*(cupy.empty(x.shape, kind) for x, kind in zip(inputs, kinds, strict=True)))
    dout, name = random_array(*shape), f"{len(lengths)} x {lengths[0]}"
    time = time_us(lambda: delta_rule_backward(dout, inputs, bounds, gradients), 5)
    print(f"backward {heads.value_heads} heads, {name:>9} tokens: {time:7.1f} us, with the states")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, default=16)
    options = parser.parse_args()
    layer_heads, bandwidth = DeltaRuleHeads(KEY_HEADS, options.heads, DIM, DIM), copy_gbs()
    print(f"{device.describe()}, copy {bandwidth:.0f} GB/s")
    for sequence_lengths in ([256] * 64, [2048] * 8, [16384]):
        backward(layer_heads, sequence_lengths)
    inputs(layer_heads, bandwidth)
    decode(layer_heads, bandwidth)
