"""Attention in three passes over memory: all scores, their softmax, and the values weighted by it.

out = softmax(Q K^T / sqrt(d)) V for each head, causal: a token sees the keys up to its own. All arrays (heads,
tokens, d) are bfloat16. The first and the third pass are GEMMs with one thread an element, as in gemm_1_threads.py.

The scores, float32 of tokens x tokens for each head, are written once, read three times and written twice more: of 16
heads and 8,192 tokens they are 4 GB, 32 times as much as Q, K, V and the output together. So this is slow however
fast the GEMMs were, and a long text does not even fit into memory.
"""

import math

import numpy as np

from examples.kernels.operands import attention_sizes
from rlnumba.kernels.ptx.warp import exp2, narrow, warp_max, warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

HEAD_DIM = 128
# A block is 8 rows of 32 threads.
ROWS, COLUMNS = 8, 32
# GPUs have an instruction for 2^x, so exp(x) is 2^(x log2 e).
LOG2_E = np.float32(math.log2(math.e))


@cuda.jit
def scores_kernel(q, k, scores, scale):
    """A thread owns scores[head, row, key]; keys after the row stay unwritten, and unread."""
    head, row = cuda.blockIdx.z, cuda.blockIdx.y * ROWS + cuda.threadIdx.y
    key = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x
    if row < q.shape[1] and key <= row:
        total = np.float32(0.0)
        for e in range(HEAD_DIM):
            total += widen(q[head, row, e]) * widen(k[head, key, e])
        scores[head, row, key] = total * scale


@cuda.jit
def softmax_kernel(scores):
    """A warp owns a row: its maximum, so that no exponential overflows, then the exponentials and their sum."""
    row, head, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    largest, total = np.float32(-np.inf), np.float32(0.0)
    for key in range(lane, row + 1, COLUMNS):
        largest = max(largest, scores[head, row, key])
    largest = warp_max(largest)
    for key in range(lane, row + 1, COLUMNS):
        weight = exp2((scores[head, row, key] - largest) * LOG2_E)
        scores[head, row, key] = weight
        total += weight
    total = warp_sum(total)
    for key in range(lane, row + 1, COLUMNS):
        scores[head, row, key] /= total


@cuda.jit
def output_kernel(weights, v, out):
    """A thread owns out[head, row, column]."""
    head, row = cuda.blockIdx.z, cuda.blockIdx.y * ROWS + cuda.threadIdx.y
    column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x
    if row < v.shape[1]:
        total = np.float32(0.0)
        for key in range(row + 1):
            total += weights[head, row, key] * widen(v[head, key, column])
        out[head, row, column] = narrow(total, out)


def attention(q, k, v, out):
    """out = causal attention, of any number of tokens."""
    heads, tokens = attention_sizes(q, k, v, out, HEAD_DIM)
    scores = device.xp().empty((heads, tokens, tokens), np.float32)
    down, block = -(-tokens // ROWS), (COLUMNS, ROWS)
    launch(scores_kernel, (-(-tokens // COLUMNS), down, heads), block, q, k, scores, HEAD_DIM**-0.5)
    launch(softmax_kernel, (tokens, heads), COLUMNS, scores)
    launch(output_kernel, (HEAD_DIM // COLUMNS, down, heads), block, scores, v, out)
