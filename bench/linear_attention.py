"""The gated delta rule of a layer over packed sequences, forward, by the kernels that training and prefill take.

    python bench/linear_attention.py              16 and 32 value heads of 128 columns, 16 key heads, 16,384 tokens
    python bench/linear_attention.py --heads 48   other value heads

Times are medians of events, without convolution, gates and norm (linear_attention_decode.py). Beside them stand two
floors, and the share of the time that the larger one is: the bytes of q, k, v, gates and out at a copy's bandwidth, and
the products at 500 TFLOP/s, which their widths let a Hopper GPU reach. One long sequence is bound by neither: its
blocks follow one another. The first 130 tokens of each run are checked against the recurrence in float64; a wrong
result is marked, and the exit code is then 1.
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cupy
from harness import copy_gbs, random_array, time_us

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, SUB_BLOCK, Tokens
from rlnumba.kernels.delta_rule.ops import delta_rule, delta_rule_family
from rlnumba.kernels.delta_rule.reference import delta_rule_ref
from rlnumba.runtime import device

DIM, KEY_HEADS = 128, 16
SHAPES = [256] * 64, [2048] * 8, [16384]
CHECKED = 130
# Relative error, root of mean squares, that rounding to float16 explains.
ERROR = 8e-4
TFLOPS = 500
# Operations of a block and value head: x, y, the fold; q . k, k . k, P w up to a token's sub-block; M w before it.
BLOCK_FLOPS = 2 * BLOCK * DIM * (3 * DIM + 3 * (BLOCK + SUB_BLOCK) // 2 + (BLOCK - SUB_BLOCK) // 2)


def random_tokens(tokens, heads):
    """Tokens with keys of length 1 and decays of all sizes."""
    keys = tokens, KEY_HEADS, DIM
    q, k = (random_array(*keys, dtype="float32") for _ in range(2))
    q, k = ((x / cupy.sqrt((x * x).sum(-1, keepdims=True))).astype(np.float16) for x in (q, k))
    gates = random_array(2, tokens, heads, dtype="float32")
    beta, log_decay = 1 / (1 + cupy.exp(-gates[0])), -0.5 * cupy.log1p(cupy.exp(gates[1] - 3))
    v = random_array(tokens, heads, DIM)
    return Tokens(q * np.float16(DIM**-0.5), k, v, cupy.ascontiguousarray(beta), cupy.ascontiguousarray(log_decay))


def error_of(tokens, out, count):
    """The relative error of the first `count` rows of the first sequence."""
    inputs = tokens._make(cupy.asnumpy(x[:count].astype(np.float32)).astype(np.float64) for x in tokens)
    expected, _ = delta_rule_ref(inputs, np.array([0, count]))
    difference = cupy.asnumpy(out[:count]).astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2)))


def forward(heads, lengths, rate):
    """Time one shape and print it; whether its result is right."""
    count = sum(lengths)
    tokens, out = random_tokens(count, heads), cupy.empty((count, heads, DIM), np.float16)
    cu_seqlens = cupy.asarray(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    time = time_us(lambda: delta_rule(tokens, cu_seqlens, out), 10)
    nbytes = out.nbytes + sum(x.nbytes for x in tokens)
    blocks = sum(-(-length // BLOCK) for length in lengths)
    of_bytes, of_products = nbytes / rate / 1e3, blocks * heads * BLOCK_FLOPS / TFLOPS / 1e6
    error = error_of(tokens, out, min(CHECKED, lengths[0]))
    print(
        f"{heads} heads, {len(lengths):2} x {lengths[0]:5} tokens: {time:7.1f} us; floors {of_bytes:5.1f} of bytes, "
        f"{of_products:5.1f} of products, {max(of_bytes, of_products) / time:4.0%}; error {error:.1e}"
        f"{'' if error < ERROR else '  WRONG'}"
    )
    return error < ERROR


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32])
    options, bandwidth = parser.parse_args(), copy_gbs()
    print(f"{device.describe()}, {delta_rule_family('bfloat16', DIM, DIM)}, copy {bandwidth:.0f} GB/s")
    right = [forward(heads, lengths, bandwidth) for heads in options.heads for lengths in SHAPES]
    sys.exit(not all(right))
