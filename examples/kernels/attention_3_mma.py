"""Tensor cores compute both products, and the weights go from the first to the second without leaving registers.

Before, each multiplication was an instruction of its own, with loads from shared memory. Now a warp owns 16 rows, and
multiplies them by tiles of 64 keys, and their weights by the values, by mma.sync as in gemm_5_mma.py. A lane holds
the scores of 16 keys for each of two rows, so that four lanes together see a tile of a row: softmax.py does with them
what attention_2_online.py did with a warp.

The layout of scores, as the first product leaves them, is that of an operand of the second: rounded to bfloat16 and
packed in pairs they are a fragment. V lies with a key as a line, and `ldmatrix` transposes it. Q stays in registers.
"""

import numpy as np

from examples.kernels.attention_1_passes import HEAD_DIM
from examples.kernels.gemm_5_mma import load_global_words, multiply_add
from examples.kernels.operands import attention_sizes
from examples.kernels.softmax import ACCUMULATORS, KEYS, SCORES, online_softmax, pack_weights, start, store_rows
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import shared_address, store_words
from rlnumba.kernels.ptx.sm80 import ldmatrix_fragment, ldmatrix_fragment_trans
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32 = np.int32
# Rows of a block, 16 a warp, as many as keys of a tile. Fragments of 16 columns of a row, and words of those of Q.
ROWS, THREADS, DEPTH, Q_WORDS = KEYS, 128, HEAD_DIM // 16, HEAD_DIM // 4
# Bytes of a row in global memory, and in shared memory, where 16 more put eight rows into different banks.
PITCH, LINE = 2 * HEAD_DIM, 2 * HEAD_DIM + 16
V_TILE, BOTH_TILES = KEYS * LINE, 2 * KEYS * LINE


@device_function
def load_tile(target, source, thread):
    """Copy KEYS rows to shared memory."""
    for i in range(KEYS * HEAD_DIM // (8 * THREADS)):
        row, offset = (thread + i * THREADS) // 16, thread % 16 * 16
        words = load_global_words(source + row * PITCH + offset)
        store_words(target + row * LINE + offset, words[0], words[1], words[2], words[3])


@device_function
def multiply_keys(scores, q_words, k_tile, lane):
    """scores = Q K^T of a warp's rows and a tile's keys."""
    b = cuda.local.array(4, np.int32)
    for i in range(SCORES):
        scores[i] = np.float32(0.0)
    for step in range(DEPTH):
        for block in range(KEYS // 16):
            row = 16 * block + lane % 8 + lane // 16 * 8
            ldmatrix_fragment(b, 0, k_tile + row * LINE + 32 * step + lane // 8 % 2 * 16)
            multiply_add(scores, 8 * block, q_words, 4 * step, b, 0)


@device_function
def multiply_values(acc, weights, v_tile, lane):
    """acc += weights V."""
    a = cuda.local.array(4, np.int32)
    b = cuda.local.array(4, np.int32)
    for block in range(KEYS // 16):
        pack_weights(a, weights, 8 * block)
        for column in range(DEPTH):
            address = v_tile + (16 * block + lane % 16) * LINE + 32 * column + lane // 16 * 16
            ldmatrix_fragment_trans(b, 0, address)
            multiply_add(acc, 8 * column, a, 0, b, 0)


@cuda.jit(launch_bounds=(THREADS, 2))
def attention_mma_kernel(q, k, v, out, tokens, scale):
    """out: (heads tokens, HEAD_DIM / 2) int32, pairs of bfloat16. A block owns 64 rows of a head, a warp 16."""
    base, thread = shared_address(cuda.shared.array(BOTH_TILES, np.uint8)), i32(cuda.threadIdx.x)
    lane, warp_row, head = thread % 32, thread // 32 * 16, cuda.blockIdx.y * tokens
    # Blocks with most keys begin first, so that none of them is left alone at the end.
    first_row = i32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * ROWS)
    q_words, scores = cuda.local.array(Q_WORDS, np.int32), cuda.local.array(SCORES, np.float32)
    acc, row_max = cuda.local.array(ACCUMULATORS, np.float32), cuda.local.array(2, np.float32)
    row_sum = cuda.local.array(2, np.float32)
    start(acc, row_max, row_sum)
    load_tile(base, address_of(q) + (head + first_row) * PITCH, thread)
    cuda.syncthreads()
    for step in range(DEPTH):
        address = base + (warp_row + lane % 16) * LINE + 32 * step + lane // 16 * 16
        ldmatrix_fragment(q_words, 4 * step, address)
    for first_key in range(0, first_row + ROWS, KEYS):
        cuda.syncthreads()
        load_tile(base, address_of(k) + (head + first_key) * PITCH, thread)
        load_tile(base + V_TILE, address_of(v) + (head + first_key) * PITCH, thread)
        cuda.syncthreads()
        multiply_keys(scores, q_words, base, lane)
        visible = i32(first_row + warp_row + lane // 4 - first_key - lane % 4 * 2)
        online_softmax(scores, visible, acc, row_max, row_sum, scale)
        multiply_values(acc, scores, base + V_TILE, lane)
    store_rows(acc, row_sum, out, head + first_row + warp_row + lane // 4, lane)


def attention(q, k, v, out):
    """out = causal attention; the number of tokens is a multiple of ROWS."""
    heads, tokens = attention_sizes(q, k, v, out, HEAD_DIM, ROWS)
    pairs = out.reshape(heads * tokens, HEAD_DIM).view(np.int32)
    launch(attention_mma_kernel, (tokens // ROWS, heads), THREADS, q, k, v, pairs, tokens, HEAD_DIM**-0.5)
