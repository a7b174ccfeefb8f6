"""The threads of a block share what they load: each element passes through shared memory, and is read there 32 times.

Before, every thread loaded its own row of A and of B, though 32 threads need the same row. Now a block of 32 x 32
threads computes a tile of C. For each 32 steps of k every thread loads one element of A and one of B to shared
memory, an on-chip memory of the block; after a barrier each thread multiplies its row of the one by its row of the
other.

Loads from global memory fall to a thirty-second, and neighbouring threads load neighbouring k: a warp reads 64 bytes
in one piece. What limits the kernel now is shared memory itself: two loads from it for each multiplication.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

TILE = 32
# Shared memory has 32 banks of four bytes. Threads of a warp read a column of b_tile: with rows of 32 floats all would
# read the same bank, one after the other; with rows of 33 each reads its own.
PADDED = TILE + 1


@cuda.jit
def gemm_shared_kernel(a, b, c):
    """A block owns a tile of C, a thread one element of it."""
    a_tile = cuda.shared.array((TILE, PADDED), np.float32)
    b_tile = cuda.shared.array((TILE, PADDED), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    first_row, first_column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    total = np.float32(0.0)
    for first in range(0, a.shape[1], TILE):
        a_tile[y, x] = widen(a[first_row + y, first + x])
        b_tile[y, x] = widen(b[first_column + y, first + x])
        # All threads have written before any of them reads.
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[y, k] * b_tile[x, k]
        # All threads have read before any of them writes the next tiles.
        cuda.syncthreads()
    c[first_row + y, first_column + x] = narrow(total, c)


def gemm(a, b, c):
    """C = A B^T; m, n and k are multiples of TILE."""
    m, n, _ = gemm_sizes(a, b, c, TILE, TILE, TILE)
    launch(gemm_shared_kernel, (n // TILE, m // TILE), (TILE, TILE), a, b, c)
