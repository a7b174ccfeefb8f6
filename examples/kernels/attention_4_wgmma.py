"""All together: TMA copies, wgmma multiplies, and of two warpgroups one multiplies during the other's softmax.

Before, a block waited for its tiles, and the tensor cores for the softmax. Now it has the form of gemm_8_warps.py:
one thread loads Q, and tiles of K and V into a ring, and two consumers own 64 rows each. K is K-major, since the sum
runs along its lines, and V is MN-major, since it runs across them; weights are an operand in registers. The package's
rlnumba/kernels/attention/sm90_forward.py has this form; it also starts a product before each softmax.
"""

import numpy as np

from examples.kernels.attention_1_passes import HEAD_DIM
from examples.kernels.operands import attention_sizes
from examples.kernels.softmax import ACCUMULATORS, KEYS, SCORES, online_softmax, pack_weights, start, store_rows
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.kernels.ptx.wgmma import WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring, shared_base, shared_layout
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

ARCHITECTURES = [(9, 0, "a")]
i32, f32 = np.int32, np.float32
ROWS, CONSUMERS, THREADS, STAGES, WORDS, BARRIERS = 128, 2, 384, 3, KEYS // 4, 3 * MBARRIER_BYTES
# A stage holds a tile of K and one of V, each KEYS rows of a head in two boxes of 64 columns.
TILE_BYTES, STAGE_BYTES, Q_BYTES = 2 * KEYS * HEAD_DIM, 4 * KEYS * HEAD_DIM, 2 * ROWS * HEAD_DIM
LAYOUT = shared_layout(q=Q_BYTES, stages=STAGES * STAGE_BYTES, full=BARRIERS, empty=BARRIERS)
init_ring, advance = ring(STAGES)
start_scores = wgmma_async(KEYS, "bfloat16", HEAD_DIM // 16, accumulate=False, layout=WgmmaLayout(ROWS * LINE))
start_output = wgmma_async(HEAD_DIM, "bfloat16", KEYS // 16, a="registers", b="mn", accumulate=True)
wait_for_scores, wait_for_output = wgmma_wait_group(SCORES), wgmma_wait_group(ACCUMULATORS, 0, WORDS)


@device_function
def produce(base, full, empty, q_map, k_map, v_map, head, first_row, tiles):
    """One thread loads the tiles of K and V, as soon as their place in the ring is empty, and Q with the first."""
    stage, parity = FIRST_EMPTY
    for tile in range(tiles):
        target, stage_full = base + LAYOUT.stages + stage * STAGE_BYTES, full + stage * MBARRIER_BYTES
        sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
        sm90.mbarrier_expect_tx(stage_full, STAGE_BYTES + (Q_BYTES if tile == 0 else 0))
        if tile == 0:
            sm90.tma_load_3d(base, sm90.tensor_map_address(q_map), 0, head + first_row, 0, stage_full)
        sm90.tma_load_3d(target, sm90.tensor_map_address(k_map), 0, head + tile * KEYS, 0, stage_full)
        sm90.tma_load_3d(target + TILE_BYTES, sm90.tensor_map_address(v_map), 0, head + tile * KEYS, 0, stage_full)
        stage, parity = advance(stage, parity)


@device_function
def consume(base, full, empty, out, consumer, thread, head, first_row, tiles, scale):
    """A warpgroup computes 64 rows of the output; a thread has parts of `row` and row + 8."""
    acc, scores = cuda.local.array(ACCUMULATORS, f32), cuda.local.array(SCORES, f32)
    row_max, row_sum, words = cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(WORDS, i32)
    row = first_row + consumer * 64 + thread // 32 % 4 * 16 + thread % 32 // 4
    start(acc, row_max, row_sum)
    stage, parity = FIRST_FULL
    for tile in range(tiles):
        k_tile = base + LAYOUT.stages + stage * STAGE_BYTES
        sm90.mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
        start_scores(scores, smem_descriptor(base + consumer * 64 * LINE), smem_descriptor(k_tile))
        wait_for_scores(scores)
        online_softmax(scores, i32(row - tile * KEYS - thread % 4 * 2), acc, row_max, row_sum, scale)
        pack_weights(words, scores, 0)
        start_output(acc, words, smem_descriptor(k_tile + TILE_BYTES))
        wait_for_output(acc, words)
        if thread % 128 == 0:
            sm90.mbarrier_arrive(empty + stage * MBARRIER_BYTES)
        stage, parity = advance(stage, parity)
    store_rows(acc, row_sum, out, head + row, thread)


@cuda.jit(launch_bounds=(THREADS, 1))
def attention_wgmma_kernel(q_map, k_map, v_map, out, tokens, scale):
    """out: (heads tokens, HEAD_DIM / 2) int32, pairs of bfloat16. A block owns ROWS rows of a head."""
    base, thread, head = shared_base(), i32(cuda.threadIdx.x), i32(cuda.blockIdx.y * tokens)
    full, empty, warpgroup = base + LAYOUT.full, base + LAYOUT.empty, sm90.warp_uniform(thread // 128)
    # Blocks with most keys begin first. Both consumers visit all tiles up to the block's last row.
    first_row = i32((cuda.gridDim.x - 1 - cuda.blockIdx.x) * ROWS)
    part = head, first_row, i32((first_row + ROWS) // KEYS)
    if thread == 0:
        init_ring(full, empty, 1, CONSUMERS)
        sm90.mbarrier_init_fence()
    cuda.syncthreads()
    if warpgroup == 0:
        sm90.setmaxnreg_dec()
        if thread == 0:
            produce(base, full, empty, q_map, k_map, v_map, *part)
    else:
        sm90.setmaxnreg_inc()
        consume(base, full, empty, out, warpgroup - i32(1), thread, *part, scale)


def attention(q, k, v, out):
    """out = causal attention; the number of tokens is a multiple of ROWS."""
    heads, tokens = attention_sizes(q, k, v, out, HEAD_DIM, ROWS)
    q, k, v, out = (array.reshape(heads * tokens, HEAD_DIM) for array in (q, k, v, out))
    maps = (tensor_map(array, HEAD_DIM // 64, rows, 64) for array, rows in ((q, ROWS), (k, KEYS), (v, KEYS)))
    arguments = *maps, out.view(np.int32), tokens, HEAD_DIM**-0.5
    launch(attention_wgmma_kernel, (tokens // ROWS, heads), THREADS, *arguments, shared=LAYOUT.nbytes)
