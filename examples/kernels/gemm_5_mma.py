"""Tensor cores multiply: by one instruction, mma.sync, the 32 lanes of a warp multiply matrices of 16 x 16 and 16 x 8.

Before, a thread multiplied two numbers at a time, in float32. Tensor cores take bfloat16 as it is, add up in float32,
and do some fifteen times as much in the same time. What a lane holds of their operands, a fragment, is fixed:
docs/tensor-cores.md has the picture. `ldmatrix` loads fragments from rows in shared memory, for which each lane gives
the address of 16 bytes.

So the tiles stay bfloat16 and go to shared memory as they lie, without being transposed or widened. A block of eight
warps still owns a tile of 128 x 128: a warp has 64 x 32 of it, four fragments of A times two of B. A product of
fragments uses each loaded value sixteen times, as a thread's 8 x 8 elements did before.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_function, shared_address, store_words
from rlnumba.kernels.ptx.sm80 import ldmatrix_fragment, mma
from rlnumba.kernels.ptx.warp import cvt_pack, device_function
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32 = np.int32
# Rows and columns of a block's tile of C, and steps of k that shared memory holds.
TILE, STEPS, THREADS = 128, 32, 256
# A warp's part of the tile, and how many fragments of 16 rows or columns this is.
WARP_ROWS, WARP_COLUMNS, DOWN, ACROSS = 64, 32, 4, 2
A_WORDS, B_WORDS, ACCUMULATORS = 4 * DOWN, 4 * ACROSS, 8 * DOWN * ACROSS
# Bytes from a row to the next in shared memory. ldmatrix reads 16 bytes of eight rows at once: 80 bytes apart they lie
# in different banks, 64 bytes apart four of them would wait for the others.
LINE = 2 * STEPS + 16
TILE_BYTES, BOTH_TILES = TILE * LINE, 2 * TILE * LINE
load_global_words = load_function("rrrr", "global", "l")
multiply_add, pack_two = mma("bfloat16"), cvt_pack("bfloat16")


@device_function
def load_tile(target, source, pitch, thread):
    """Copy TILE rows of STEPS elements to shared memory; source: their address, pitch: bytes from a row to the next."""
    for i in range(2):
        row, offset = i * 64 + thread // 4, thread % 4 * 16
        words = load_global_words(source + row * pitch + offset)
        store_words(target + row * LINE + offset, words[0], words[1], words[2], words[3])


@device_function
def multiply_tile(acc, a_rows, b_rows, lane):
    """acc += A B^T over STEPS of k; a_rows, b_rows: where this warp's rows of A and of B begin in shared memory."""
    a = cuda.local.array(A_WORDS, np.int32)
    b = cuda.local.array(B_WORDS, np.int32)
    for step in range(0, STEPS, 16):
        for i in range(DOWN):
            ldmatrix_fragment(a, 4 * i, a_rows + (16 * i + lane % 16) * LINE + 2 * step + lane // 16 * 16)
        for j in range(ACROSS):
            row = 16 * j + lane % 8 + lane // 16 * 8
            ldmatrix_fragment(b, 4 * j, b_rows + row * LINE + 2 * step + lane // 8 % 2 * 16)
        for i in range(DOWN):
            for j in range(ACROSS):
                multiply_add(acc, 8 * (i * ACROSS + j), a, 4 * i, b, 4 * j)


@device_function
def store_part(acc, c, row, column, lane):
    """Write a warp's part at (row, column) of C, seen as pairs; lane 4 g + t has of each 8 x 8 columns 2 t, 2 t + 1."""
    for i in range(DOWN):
        for j in range(ACROSS):
            for e in range(0, 8, 2):
                index, below, right = 8 * (i * ACROSS + j) + e, e // 2 % 2 * 8, e // 4 * 8
                # Numba emits code for negative indices, but not for unsigned ones.
                c_row = c[np.uint32(row + 16 * i + below + lane // 4)]
                c_row[np.uint32((column + 16 * j + right) // 2 + lane % 4)] = pack_two(acc[index], acc[index + 1])


@cuda.jit(launch_bounds=(THREADS, 2))
def gemm_mma_kernel(a, b, c, k):
    """c is seen as int32, pairs of bfloat16. Two warps lie one below the other, four side by side."""
    base, thread = shared_address(cuda.shared.array(BOTH_TILES, np.uint8)), i32(cuda.threadIdx.x)
    lane, warp_row, warp_column = thread % 32, thread // 128 * WARP_ROWS, thread // 32 % 4 * WARP_COLUMNS
    first_row, first_column = cuda.blockIdx.y * np.int64(TILE), cuda.blockIdx.x * np.int64(TILE)
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    for i in range(ACCUMULATORS):
        acc[i] = np.float32(0.0)
    for first in range(0, k, STEPS):
        load_tile(base, address_of(a) + 2 * (first_row * k + first), 2 * k, thread)
        load_tile(base + TILE_BYTES, address_of(b) + 2 * (first_column * k + first), 2 * k, thread)
        cuda.syncthreads()
        multiply_tile(acc, base + warp_row * LINE, base + TILE_BYTES + warp_column * LINE, lane)
        cuda.syncthreads()
    store_part(acc, c, first_row + warp_row, first_column + warp_column, lane)


def gemm(a, b, c):
    """C = A B^T; m and n are multiples of TILE, k of STEPS."""
    m, n, k = gemm_sizes(a, b, c, TILE, TILE, STEPS)
    launch(gemm_mma_kernel, (n // TILE, m // TILE), THREADS, a, b, c.view(np.int32), k)
