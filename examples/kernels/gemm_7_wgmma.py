"""Hopper's tensor cores read shared memory themselves (wgmma), and one thread copies whole tiles there (TMA).

Before, every multiplication waited for fragments, which `ldmatrix` loaded to registers, and 256 threads computed
addresses for copies of 16 bytes. On GPUs of compute capability 9.0 four warps together, a warpgroup, start one
`wgmma`: 64 rows of A by up to 256 columns, both operands in shared memory; only the accumulators are registers. And
one thread starts one copy of a box of a matrix, which the tensor memory accelerator (TMA) moves.

A tensor map, made on the host, describes matrix and box to the TMA. An mbarrier counts the bytes that have arrived;
threads wait for the parity of its phase. Boxes have lines of 128 bytes, whose 16-byte pieces the TMA permutes against
bank conflicts, and `wgmma` knows that order: no padding any more.

The ring of four stages is that of gemm_6_copies.py. Tiles are 128 x 256: each of two warpgroups multiplies half of
the rows.
"""

import numpy as np

from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE
from rlnumba.kernels.ptx.warp import cvt_pack, device_function
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, shared_base, shared_layout
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

ARCHITECTURES = [(9, 0, "a")]

i32, u32 = np.int32, np.uint32
# A block's tile of C, and the steps of k that a stage of the ring holds: a line of a box.
ROWS, COLUMNS, STEPS, STAGES, THREADS = 128, 256, 64, 4, 256
A_BYTES, STAGE_BYTES = ROWS * LINE, (ROWS + COLUMNS) * LINE
# Accumulators of a thread: 64 x 256 by 128 threads.
ACCUMULATORS = COLUMNS // 2
LAYOUT = shared_layout(stages=STAGES * STAGE_BYTES, full=STAGES * MBARRIER_BYTES)
start_multiplying = wgmma_async(COLUMNS, "bfloat16", STEPS // 16, accumulate=True)
wait_for_products, pack_two = wgmma_wait_group(ACCUMULATORS), cvt_pack("bfloat16")


@device_function
def load_stage(base, a_map, b_map, first_row, first_column, index):
    """One thread starts to copy the index-th STEPS of k of A and B, whose bytes complete a phase of an mbarrier."""
    stage, full = base + index % STAGES * STAGE_BYTES, base + LAYOUT.full + index % STAGES * MBARRIER_BYTES
    sm90.mbarrier_expect_tx(full, STAGE_BYTES)
    sm90.tma_load_2d(stage, a_map, index * STEPS, first_row, full)
    sm90.tma_load_2d(stage + A_BYTES, b_map, index * STEPS, first_column, full)


@device_function
def store_part(acc, c, row, column, thread):
    """Write a warpgroup's 64 rows at (row, column) of C, seen as pairs; lane 4 g + t has columns 2 t of each eight."""
    for block in range(COLUMNS // 8):
        for half in range(2):
            c_row = c[u32(row + thread // 32 % 4 * 16 + half * 8 + thread % 32 // 4)]
            i = 4 * block + 2 * half
            c_row[u32(column // 2 + 4 * block + thread % 4)] = pack_two(acc[i], acc[i + 1])


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm_wgmma_kernel(a_map, b_map, c, k):
    """c is seen as int32, pairs of bfloat16. Shared memory: LAYOUT."""
    base, thread = shared_base(), i32(cuda.threadIdx.x)
    warpgroup = sm90.warp_uniform(thread // 128)
    a_map, b_map = sm90.tensor_map_address(a_map), sm90.tensor_map_address(b_map)
    first_row, first_column, stages = i32(cuda.blockIdx.y * ROWS), i32(cuda.blockIdx.x * COLUMNS), i32(k // STEPS)
    if thread == 0:
        for stage in range(STAGES):
            # A phase needs one arrival, that of mbarrier_expect_tx, and the bytes which that expects.
            sm90.mbarrier_init(base + LAYOUT.full + stage * MBARRIER_BYTES, 1)
        sm90.mbarrier_init_fence()
        for index in range(min(STAGES, stages)):
            load_stage(base, a_map, b_map, first_row, first_column, index)
    cuda.syncthreads()
    acc = cuda.local.array(ACCUMULATORS, np.float32)
    for i in range(ACCUMULATORS):
        acc[i] = np.float32(0.0)
    for index in range(stages):
        stage = base + index % STAGES * STAGE_BYTES
        sm90.mbarrier_wait(base + LAYOUT.full + index % STAGES * MBARRIER_BYTES, index // STAGES % 2)
        # Descriptors say where operands lie: this warpgroup's 64 rows of A, and all columns of B.
        start_multiplying(acc, smem_descriptor(stage + warpgroup * BOX_BYTES), smem_descriptor(stage + A_BYTES))
        wait_for_products(acc)
        # Both warpgroups have read the stage: it may be overwritten.
        cuda.syncthreads()
        if thread == 0 and index + STAGES < stages:
            load_stage(base, a_map, b_map, first_row, first_column, index + STAGES)
    store_part(acc, c, first_row + warpgroup * 64, first_column, thread)


def gemm(a, b, c):
    """C = A B^T; m is a multiple of ROWS, n of COLUMNS, k of STEPS."""
    m, n, k = gemm_sizes(a, b, c, ROWS, COLUMNS, STEPS)
    maps, grid = (tensor_map(a, ROWS, STEPS), tensor_map(b, COLUMNS, STEPS)), (n // COLUMNS, m // ROWS)
    launch(gemm_wgmma_kernel, grid, THREADS, *maps, c.view(np.int32), k, shared=LAYOUT.nbytes)
