"""One thread computes one element of C: it reads a row of A and a row of B, and adds up their products.

C (m, n) = A (m, k) B^T with B (n, k), which is how a linear layer multiplies its inputs by its weight. All three are
bfloat16; sums are float32, because a bfloat16 has eight bits and would soon be too coarse to add to.

For each multiplication a thread loads two elements, so the kernel is as slow as these loads are. Neighbouring threads
of a warp own neighbouring columns of C: their elements of B are k elements apart, each load of a warp touches 32
lines of memory, and the caches must find them all again for the next k.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# A block is 8 rows of 32 threads; a row of threads is a warp.
ROWS, COLUMNS = 8, 32


@cuda.jit
def gemm_threads_kernel(a, b, c):
    """A thread owns c[row, column]."""
    row = cuda.blockIdx.y * ROWS + cuda.threadIdx.y
    column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x
    # The last blocks may reach beyond C.
    if row < c.shape[0] and column < c.shape[1]:
        total = np.float32(0.0)
        for k in range(a.shape[1]):
            # `widen` makes a float32 of a bfloat16, which Numba has no type for; `narrow` rounds it back.
            total += widen(a[row, k]) * widen(b[column, k])
        c[row, column] = narrow(total, c)


def gemm(a, b, c):
    """C = A B^T, of any size."""
    m, n, _ = gemm_sizes(a, b, c)
    grid = -(-n // COLUMNS), -(-m // ROWS)
    launch(gemm_threads_kernel, grid, (COLUMNS, ROWS), a, b, c)
