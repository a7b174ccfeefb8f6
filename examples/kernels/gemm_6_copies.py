"""Copies run while the tensor cores multiply: cp.async fills a ring of four stages, three of them ahead.

Before, all threads loaded, waited, multiplied, waited: the tensor cores were idle while memory answered, and memory
while they multiplied. `cp.async` copies 16 bytes from global to shared memory, past the registers, and the thread
goes on. It closes groups of its copies, and waits until all but its latest groups have arrived.

Shared memory now holds STAGES pairs of tiles, a ring. In each round a thread waits for the oldest stage, meets the
others at a barrier, starts the copies of a stage that lies three rounds ahead, and multiplies. One barrier a round is
enough: behind it all threads have multiplied the round before, so the stage of that round is free for the next
copies.

The fragments, the multiplications and the stores to C are those of gemm_5_mma.py.
"""

import numpy as np

from examples.kernels.gemm_5_mma import (
    ACCUMULATORS,
    LINE,
    STEPS,
    THREADS,
    TILE,
    TILE_BYTES,
    WARP_COLUMNS,
    WARP_ROWS,
    multiply_tile,
    store_part,
)
from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import shared_address
from rlnumba.kernels.ptx.sm80 import cp_async_16, cp_async_commit_group, cp_async_wait_group
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32 = np.int32
STAGES, STAGE_BYTES = 4, 2 * TILE_BYTES
# All groups but the STAGES - 2 latest have arrived: the oldest stage is complete.
wait_for_oldest_stage = cp_async_wait_group(STAGES - 2)


@device_function
def copy_tile(target, source, pitch, thread):
    """Start to copy TILE rows of STEPS elements to shared memory."""
    for i in range(2):
        row, offset = i * 64 + thread // 4, thread % 4 * 16
        cp_async_16(target + row * LINE + offset, source + row * pitch + offset, 16)


@device_function
def copy_stage(base, a_rows, b_rows, stage, stages, pitch, thread):
    """Start the copies of the stage-th STEPS of k, if there are so many, and close their group.

    a_rows, b_rows: addresses of the block's first rows of A and B. An empty group counts, too.
    """
    if stage < stages:
        target, offset = base + stage % STAGES * STAGE_BYTES, stage * (2 * STEPS)
        copy_tile(target, a_rows + offset, pitch, thread)
        copy_tile(target + TILE_BYTES, b_rows + offset, pitch, thread)
    cp_async_commit_group()


@cuda.jit(launch_bounds=(THREADS, 2))
def gemm_copies_kernel(a, b, c, k):
    """c is seen as int32, pairs of bfloat16. Shared memory: STAGES times the tile of A and that of B."""
    base, thread = shared_address(cuda.shared.array(0, np.uint8)), i32(cuda.threadIdx.x)
    lane, warp_row, warp_column = thread % 32, thread // 128 * WARP_ROWS, thread // 32 % 4 * WARP_COLUMNS
    first_row, first_column = cuda.blockIdx.y * np.int64(TILE), cuda.blockIdx.x * np.int64(TILE)
    a_rows, b_rows = address_of(a) + 2 * first_row * k, address_of(b) + 2 * first_column * k
    stages, pitch = k // STEPS, 2 * k
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    for i in range(ACCUMULATORS):
        acc[i] = np.float32(0.0)
    for stage in range(STAGES - 1):
        copy_stage(base, a_rows, b_rows, stage, stages, pitch, thread)
    for stage in range(stages):
        wait_for_oldest_stage()
        # This thread's copies have arrived: after the barrier those of all threads have.
        cuda.syncthreads()
        copy_stage(base, a_rows, b_rows, stage + (STAGES - 1), stages, pitch, thread)
        tiles = base + stage % STAGES * STAGE_BYTES
        multiply_tile(acc, tiles + warp_row * LINE, tiles + TILE_BYTES + warp_column * LINE, lane)
    store_part(acc, c, first_row + warp_row, first_column + warp_column, lane)


def gemm(a, b, c):
    """C = A B^T; m and n are multiples of TILE, k of STEPS."""
    m, n, k = gemm_sizes(a, b, c, TILE, TILE, STEPS)
    grid, shared = (n // TILE, m // TILE), STAGES * STAGE_BYTES
    launch(gemm_copies_kernel, grid, THREADS, a, b, c.view(np.int32), k, shared=shared)
