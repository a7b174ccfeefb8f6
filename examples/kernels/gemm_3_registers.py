"""A thread computes 8 x 8 elements of C in registers: 16 loads from shared memory serve 64 multiplications.

Before, each multiplication took two loads from shared memory, which serves one warp a cycle, while an SM multiplies
for four. Now a block of 16 x 16 threads owns a tile of 128 x 128, and a thread eight rows and eight columns of it.
For each k it loads eight values of A and eight of B to registers, and multiplies every one of the former by every one
of the latter.

The accumulators are a local array that only constants index, once the compiler has unrolled the loops over it: so it
becomes 64 registers. The rows of a thread are 16 apart, as are its columns, so that neighbouring threads read
neighbouring banks. A tile of 128 x 128 also needs a quarter of the loads from global memory that 16 tiles of 32 x 32
do.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# A block has SIDE x SIDE threads, each with OWN x OWN elements of a tile of C of TILE x TILE.
SIDE, OWN = 16, 8
TILE = SIDE * OWN
# Steps of k that the tiles in shared memory hold, and the length of their rows there.
STEPS = 16
PADDED = STEPS + 1


@cuda.jit(launch_bounds=(SIDE * SIDE, 2))
def gemm_registers_kernel(a, b, c):
    """A thread owns rows y, y + SIDE, ... and columns x, x + SIDE, ... of its block's tile."""
    a_tile = cuda.shared.array((TILE, PADDED), np.float32)
    b_tile = cuda.shared.array((TILE, PADDED), np.float32)
    x, y = np.uint32(cuda.threadIdx.x), np.uint32(cuda.threadIdx.y)
    first_row, first_column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    acc = cuda.local.array((OWN, OWN), np.float32)
    a_values = cuda.local.array(OWN, np.float32)
    b_values = cuda.local.array(OWN, np.float32)
    for i in range(OWN):
        for j in range(OWN):
            acc[i, j] = np.float32(0.0)
    for first in range(0, a.shape[1], STEPS):
        # A row of threads loads STEPS elements of a row of A, as many as it has threads, and of B.
        for i in range(OWN):
            a_tile[y + i * SIDE, x] = widen(a[first_row + y + i * SIDE, first + x])
            b_tile[y + i * SIDE, x] = widen(b[first_column + y + i * SIDE, first + x])
        cuda.syncthreads()
        for k in range(STEPS):
            for i in range(OWN):
                a_values[i] = a_tile[y + i * SIDE, k]
                b_values[i] = b_tile[x + i * SIDE, k]
            for i in range(OWN):
                for j in range(OWN):
                    acc[i, j] += a_values[i] * b_values[j]
        cuda.syncthreads()
    for i in range(OWN):
        for j in range(OWN):
            c[first_row + y + i * SIDE, first_column + x + j * SIDE] = narrow(acc[i, j], c)


def gemm(a, b, c):
    """C = A B^T; m and n are multiples of TILE, k of STEPS."""
    m, n, _ = gemm_sizes(a, b, c, TILE, TILE, STEPS)
    launch(gemm_registers_kernel, (n // TILE, m // TILE), (SIDE, SIDE), a, b, c)
