"""One pass with an online softmax: scores live for one tile of keys only, and no array of them exists (FlashAttention).

Before, a row's maximum had to be known before its first exponential. But a sum that was taken with a smaller maximum
m is put right by a factor: sum exp(s - m') = exp(m - m') sum exp(s - m). So a row keeps its maximum so far, its sum
and its output, and for each tile of keys

    m' = max(m, scores)    p = exp(scores - m')    sum = sum exp(m - m') + sum of p    out = out exp(m - m') + p V

and divides by the sum at the end. Memory now holds Q, K, V and the output alone.

A block owns eight rows, a warp one of them. All pass over tiles of 32 keys in shared memory: a lane computes the
score of one key, and then sums four columns of the output over all keys. Sources: Milakov and Gimelshein 2018; Dao et
al. 2022.
"""

import numpy as np

from examples.kernels.attention_1_passes import HEAD_DIM, LOG2_E
from examples.kernels.operands import attention_sizes
from rlnumba.kernels.ptx.warp import exp2, narrow, shuffle, warp_max, warp_sum, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Keys of a tile, one a lane; rows of a block, one a warp; columns of the output of a lane.
KEYS, ROWS, THREADS, OWN = 32, 8, 256, HEAD_DIM // 32
TILE_ELEMENTS = KEYS * HEAD_DIM
# The lanes of a warp read a column of keys: rows of 129 floats put its elements into different banks.
PADDED = HEAD_DIM + 1


@cuda.jit(launch_bounds=(THREADS, 3))
def attention_online_kernel(q, k, v, out, scale):
    """A warp owns out[head, row]."""
    q_rows = cuda.shared.array((ROWS, HEAD_DIM), np.float32)
    k_tile = cuda.shared.array((KEYS, PADDED), np.float32)
    v_tile = cuda.shared.array((KEYS, HEAD_DIM), np.float32)
    thread = np.uint32(cuda.threadIdx.x)
    lane, warp, head, first_row = thread % 32, thread // 32, cuda.blockIdx.y, cuda.blockIdx.x * ROWS
    row = first_row + warp
    for column in range(lane, HEAD_DIM, 32):
        q_rows[warp, column] = widen(q[head, row, column]) * (scale * LOG2_E)
    row_max, row_sum = np.float32(-np.inf), np.float32(0.0)
    acc = cuda.local.array(OWN, np.float32)
    for i in range(OWN):
        acc[i] = np.float32(0.0)
    # Tiles up to the one with the rows' own keys.
    for first in range(0, first_row + ROWS, KEYS):
        for i in range(thread, TILE_ELEMENTS, THREADS):
            key, column = i // HEAD_DIM, i % HEAD_DIM
            k_tile[key, column] = widen(k[head, first + key, column])
            v_tile[key, column] = widen(v[head, first + key, column])
        cuda.syncthreads()
        score = np.float32(0.0)
        for column in range(HEAD_DIM):
            score += q_rows[warp, column] * k_tile[lane, column]
        if first + lane > row:
            score = np.float32(-np.inf)
        next_max = max(row_max, warp_max(score))
        rescale, weight = exp2(row_max - next_max), exp2(score - next_max)
        row_max, row_sum = next_max, row_sum * rescale + warp_sum(weight)
        for i in range(OWN):
            acc[i] *= rescale
        for key in range(KEYS):
            weight_of_key = shuffle(weight, key)
            for i in range(OWN):
                acc[i] += weight_of_key * v_tile[key, lane + 32 * i]
        cuda.syncthreads()
    for i in range(OWN):
        out[head, row, lane + 32 * i] = narrow(acc[i] / row_sum, out)


def attention(q, k, v, out):
    """out = causal attention; the number of tokens is a multiple of KEYS."""
    heads, tokens = attention_sizes(q, k, v, out, HEAD_DIM, KEYS)
    launch(attention_online_kernel, (tokens // ROWS, heads), THREADS, q, k, v, out, HEAD_DIM**-0.5)
