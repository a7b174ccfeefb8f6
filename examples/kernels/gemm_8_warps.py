"""Warps specialise: one thread only copies, eight warps only multiply, and no barrier stops them all.

Before, both warpgroups waited in every round for their products and for each other, and only then asked for a new
stage: the tensor cores were idle meanwhile. Now a block has a producer, one thread of its first warpgroup, and two
consumers, the other warpgroups. Stages have mbarriers `full`, which copies complete, and `empty`, at which consumers
arrive when they have read it. A consumer starts a product before it waits for the last one.

The grid is persistent: a block for each SM computes tile after tile, in bands that L2 holds, and loads the next while
it stores one. Tile, stages and stores are those of gemm_7_wgmma.py. The package's rlnumba/kernels/gemm/sm90.py has
this form, and adds stores by TMA, other layouts, addends and a choice of tiles.
"""

import numpy as np

from examples.kernels.gemm_7_wgmma import A_BYTES, ACCUMULATORS, COLUMNS, ROWS, STAGE_BYTES, STAGES, STEPS, store_part
from examples.kernels.operands import gemm_sizes
from rlnumba.kernels.gemm.scheduler import tile_coordinates
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring, shared_base, shared_layout
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

ARCHITECTURES = [(9, 0, "a")]
i32 = np.int32
THREADS, CONSUMERS = 384, 2
LAYOUT = shared_layout(stages=STAGES * STAGE_BYTES, full=STAGES * MBARRIER_BYTES, empty=STAGES * MBARRIER_BYTES)
init_ring, advance = ring(STAGES)
start_product = wgmma_async(COLUMNS, "bfloat16", STEPS // 16)
wait_for_last_but_one, wait_for_product = wgmma_wait_group(ACCUMULATORS, 1), wgmma_wait_group(ACCUMULATORS)


@device_function
def produce(base, full, empty, a_map, b_map, tiles_down, tiles_across, rounds):
    """One thread loads the stages of this block's tiles, each as soon as its place in the ring is empty."""
    stage, parity = FIRST_EMPTY
    for tile in range(i32(cuda.blockIdx.x), tiles_down * tiles_across, i32(cuda.gridDim.x)):
        row, column = tile_coordinates(tile, tiles_down, tiles_across)
        for index in range(rounds):
            target, stage_full = base + stage * STAGE_BYTES, full + stage * MBARRIER_BYTES
            sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
            sm90.mbarrier_expect_tx(stage_full, STAGE_BYTES)
            sm90.tma_load_2d(target, a_map, index * STEPS, row * ROWS, stage_full)
            sm90.tma_load_2d(target + A_BYTES, b_map, index * STEPS, column * COLUMNS, stage_full)
            stage, parity = advance(stage, parity)


@device_function
def consume(base, full, empty, c, consumer, thread, tiles_down, tiles_across, rounds):
    """A warpgroup multiplies its 64 rows of this block's tiles, and stores them; one of its threads arrives for all."""
    acc, leader = cuda.local.array(ACCUMULATORS, np.float32), thread % 128 == 0
    stage, parity = FIRST_FULL
    for tile in range(i32(cuda.blockIdx.x), tiles_down * tiles_across, i32(cuda.gridDim.x)):
        row, column = tile_coordinates(tile, tiles_down, tiles_across)
        last = stage
        for index in range(rounds):
            sm90.mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
            tiles = base + stage * STAGE_BYTES
            a_rows = smem_descriptor(tiles + consumer * (A_BYTES // CONSUMERS))
            start_product(acc, a_rows, smem_descriptor(tiles + A_BYTES), i32(index > 0))  # 0: overwrite acc
            wait_for_last_but_one(acc)
            if leader and index > 0:
                sm90.mbarrier_arrive(empty + last * MBARRIER_BYTES)
            last = stage
            stage, parity = advance(stage, parity)
        wait_for_product(acc)
        if leader:
            sm90.mbarrier_arrive(empty + last * MBARRIER_BYTES)
        store_part(acc, c, row * ROWS + consumer * 64, column * COLUMNS, thread)


@cuda.jit(launch_bounds=(THREADS, 1))
def gemm_warps_kernel(a_map, b_map, c, k):
    """c is seen as int32, pairs of bfloat16. Shared memory: LAYOUT."""
    base, thread = shared_base(), i32(cuda.threadIdx.x)
    full, empty, warpgroup = base + LAYOUT.full, base + LAYOUT.empty, sm90.warp_uniform(thread // 128)
    sizes = i32(c.shape[0] // ROWS), i32(c.shape[1] * 2 // COLUMNS), i32(k // STEPS)
    if thread == 0:
        init_ring(full, empty, 1, CONSUMERS)
        sm90.mbarrier_init_fence()
    cuda.syncthreads()
    if warpgroup == 0:
        # Registers that the producer does not need go to the consumers.
        sm90.setmaxnreg_dec()
        if thread == 0:
            produce(base, full, empty, sm90.tensor_map_address(a_map), sm90.tensor_map_address(b_map), *sizes)
    else:
        sm90.setmaxnreg_inc()
        consume(base, full, empty, c, warpgroup - i32(1), thread, *sizes)


def gemm(a, b, c):
    """C = A B^T; m is a multiple of ROWS, n of COLUMNS, k of STEPS."""
    m, n, k = gemm_sizes(a, b, c, ROWS, COLUMNS, STEPS)
    operands = tensor_map(a, ROWS, STEPS), tensor_map(b, COLUMNS, STEPS), c.view(np.int32), k
    grid = min(m // ROWS * (n // COLUMNS), device.sm_count())
    launch(gemm_warps_kernel, grid, THREADS, *operands, shared=LAYOUT.nbytes)
