"""A thread moves 16 bytes at a time: eight bfloat16 from global memory, four float32 from shared memory.

Before, every load moved one element, and the instructions that load, and compute addresses, took their share of the
time that multiplications need. One instruction may move 16 bytes, if they lie side by side and start at a multiple of
16.

In global memory neighbours are consecutive k of a row. In shared memory they should be what a thread needs at one k,
its rows or columns. So the tiles are transposed on the way: they lie there as [k][row]. A thread now owns four
neighbouring rows in each half of the tile, and four neighbouring columns, and loads eight values by two instructions
instead of eight.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.shared_memory import load_four, shared_address
from rlnumba.kernels.ptx.warp import device_function, vector_access
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32 = np.int32
# A block has SIDE x SIDE threads, each with OWN x OWN elements of a tile of C of TILE x TILE.
SIDE, OWN = 16, 8
THREADS, TILE, HALF, ACCUMULATORS = SIDE * SIDE, SIDE * OWN, SIDE * OWN // 2, OWN * OWN
STEPS = 16
# The array in shared memory holds the tile of A, then that of B.
B_TILE, TILES = STEPS * TILE, 2 * STEPS * TILE
load_eight, _ = vector_access(8, 8)
_, store_four_narrowed = vector_access(4, 4)


@device_function
def load_tile(tile, target, source, first_element, k, thread):
    """tile[target :] = STEPS steps of TILE rows of a flat matrix, transposed; a thread loads 8 steps of one row."""
    values = cuda.local.array(8, np.float32)
    # Neighbouring threads have neighbouring rows: where they store, these lie in different banks.
    row, step = thread % TILE, thread // TILE * 8
    load_eight(source, first_element + row * k + step, values, 0)
    for i in range(8):
        tile[target + (step + i) * TILE + row] = values[i]


@device_function
def load_values(values, address):
    """values[:] = four neighbours at an address in shared memory, and four HALF elements further on."""
    values[0], values[1], values[2], values[3] = load_four(address)
    values[4], values[5], values[6], values[7] = load_four(address + 4 * HALF)


@cuda.jit(launch_bounds=(THREADS, 2))
def gemm_vectors_kernel(a, b, c, n, k):
    """a, b and c are flat. A thread owns rows 4 y .. 4 y + 3 of each half of its block's tile, and such columns."""
    tiles = cuda.shared.array(TILES, np.float32)
    base, thread = shared_address(tiles), i32(cuda.threadIdx.x)
    x, y = thread % SIDE * 4, thread // SIDE * 4
    first_row, first_column = cuda.blockIdx.y * np.int64(TILE), cuda.blockIdx.x * np.int64(TILE)
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    a_values = cuda.local.array(OWN, np.float32)
    b_values = cuda.local.array(OWN, np.float32)
    for i in range(ACCUMULATORS):
        acc[i] = np.float32(0.0)
    for first in range(0, k, STEPS):
        load_tile(tiles, 0, a, first_row * k + first, k, thread)
        load_tile(tiles, B_TILE, b, first_column * k + first, k, thread)
        cuda.syncthreads()
        for step in range(STEPS):
            load_values(a_values, base + 4 * (step * TILE + y))
            load_values(b_values, base + 4 * (B_TILE + step * TILE + x))
            for i in range(OWN):
                for j in range(OWN):
                    acc[i * OWN + j] += a_values[i] * b_values[j]
        cuda.syncthreads()
    for i in range(OWN):
        row = first_row + y + i % 4 + i // 4 * HALF
        for half in range(2):
            store_four_narrowed(c, row * n + first_column + x + half * HALF, acc, i * OWN + half * 4)


def gemm(a, b, c):
    """C = A B^T; m and n are multiples of TILE, k of STEPS."""
    m, n, k = gemm_sizes(a, b, c, TILE, TILE, STEPS)
    arrays = a.reshape(-1), b.reshape(-1), c.reshape(-1)
    launch(gemm_vectors_kernel, (n // TILE, m // TILE), THREADS, *arrays, n, k)
