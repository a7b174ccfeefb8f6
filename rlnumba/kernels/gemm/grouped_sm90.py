"""Grouped GEMMs on sm_90: the warp-specialised GEMM of sm90.py over the tiles of all experts.

A persistent block loops over the tiles of all experts, which it finds by grouped_tiles.py. Tiles, ring, main loop and
the order of sums are those of sm90.py, so that the bits are, too.

An expert's rows begin anywhere, so that a tile may reach into the next expert's rows. TMA loads them as they are:
each row of C depends on its own row of A. A consumer whose 64 rows are all of its expert stores them by TMA, else its
threads store the expert's rows; a consumer without rows skips its tile. Of few rows, TMA loads as many eights of rows
as there are; the other lines of the stage are those of some former tile. For the gradient of a weight the rows are the
reduction: consumers clear the lines of a stage that are beyond the expert's rows (grouped_gemm_dw_sm90_kernel).

Weights are seen as arrays with three dimensions, beyond whose N or K TMA loads zeros.
"""

import functools

import numpy as np

from rlnumba.kernels.gemm.epilogue import store_by_threads_function, store_by_tma_function
from rlnumba.kernels.gemm.grouped_config import ROWS_IN_EIGHTS, best_sm90_config, best_sm90_dw_config, is_across_first
from rlnumba.kernels.gemm.grouped_tiles import WORD, most_row_tiles, row_tile_functions
from rlnumba.kernels.gemm.scheduler import tokens_of_choice
from rlnumba.kernels.gemm.sm90 import main_loop_function
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, fence_proxy_async, load_word, store_words
from rlnumba.kernels.ptx.warp import device_function, griddepcontrol_launch_dependents, griddepcontrol_wait, udiv
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS, WARPGROUP, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import (
    FIRST_EMPTY,
    FIRST_FULL,
    MBARRIER_BYTES,
    SWIZZLE_ALIGNMENT,
    ring,
    shared_base,
    stage_function,
)
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32, u32 = np.int32, np.uint32

# Architectures that the kernels of this module compile for.
ARCHITECTURES = [(9, 0, "a")]
# The named barrier of all consumers; their own are 1 and 2.
ALL_CONSUMERS = 3


@functools.cache
def producers(config):
    """(produce_rows, produce_weights): the device functions of the warps that load A and B of all tiles."""
    rows, columns, panels, steps = config.rows, config.columns, config.panels, config.steps
    stage_bytes, b_bytes, b_mn, swiglu = config.stage_bytes, config.b_bytes, config.b_mn, config.swiglu
    tile_columns = config.tile_columns
    _, advance = ring(config.stages)
    _, find_tile = row_tile_functions(rows, is_across_first(config))
    load_b = sm90.tma_load_3d_evict_first if config.streams_b else sm90.tma_load_3d

    @device_function
    def produce_rows(x_map, eights_map, starts, table, boxes, full, empty, shape):
        """boxes: where A's boxes of the first stage belong; shape: (tiles, tiles across, stages of a tile, n)."""
        tiles, tiles_across, rounds, n = shape
        lane = i32(cuda.threadIdx.x) & i32(31)
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        while index < tiles:
            _, first_row, end, _ = find_tile(index, table, starts, tiles_across)
            eights = i32(end - first_row + i32(7)) >> i32(3)
            few = eights <= i32(ROWS_IN_EIGHTS // 8)
            nbytes = i32(eights * i32(8 * LINE * panels)) if few else i32(rows * LINE * panels)
            for done in range(rounds):
                sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                if lane == 0:
                    stage_full = full + stage * MBARRIER_BYTES
                    sm90.mbarrier_expect_tx(stage_full, nbytes)
                    for panel in range(panels):
                        target = boxes + stage * stage_bytes + panel * BOX_BYTES
                        step = i32(done * steps + panel * STEPS)
                        if few:
                            for eight in range(eights):
                                line = i32(eight * 8)
                                sm90.tma_load_2d(
                                    target + line * LINE, eights_map, step, i32(first_row + line), stage_full
                                )
                        else:
                            sm90.tma_load_2d(target, x_map, step, first_row, stage_full)
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))

    @device_function
    def produce_weights(weights_map, starts, table, boxes, full, empty, shape):
        """Load the boxes of B, for the same arguments as produce_rows."""
        tiles, tiles_across, rounds, n = shape
        lane = i32(cuda.threadIdx.x) & i32(31)
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        while index < tiles:
            expert, _, _, tile_column = find_tile(index, table, starts, tiles_across)
            first_column = i32(tile_column * tile_columns)
            for done in range(rounds):
                sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                if lane == 0:
                    stage_full = full + stage * MBARRIER_BYTES
                    sm90.mbarrier_expect_tx(stage_full, i32(b_bytes))
                    target, step = boxes + stage * stage_bytes, i32(done * steps)
                    if b_mn:
                        for box in range(columns // 64):
                            column = i32(first_column + box * 64)
                            load_b(target + box * BOX_BYTES, weights_map, column, step, expert, stage_full)
                    else:
                        for panel in range(panels):
                            box, panel_step = target + panel * columns * LINE, i32(step + panel * STEPS)
                            load_b(box, weights_map, panel_step, first_column, expert, stage_full)
                            if swiglu:
                                up, up_column = box + tile_columns * LINE, i32(n + first_column)
                                load_b(up, weights_map, panel_step, up_column, expert, stage_full)
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))

    return produce_rows, produce_weights


@device_function
def no_operation(done, rounds, leader, arguments):
    """The each_round of main_loop_function where nothing is to be done while wgmma runs."""


@functools.cache
def consumer_function(config):
    """The device function of a consumer warpgroup: all of its tiles, from the main loop to the stores."""
    columns, rows, a_bytes, layout = config.columns, config.rows, config.a_bytes, config.layout
    tile_columns = config.tile_columns
    staged_columns, staged_bytes, accumulators = config.staged_columns, config.staged_bytes, config.columns // 2
    b_kind = "mn" if config.b_mn else "k"
    start = wgmma_async(columns, config.element, config.steps // 16, "k", b_kind)
    main_loop = main_loop_function(columns, config.stages, config.stage_bytes, start, no_operation)
    _, advance = ring(config.stages)
    _, find_tile = row_tile_functions(rows, is_across_first(config))
    store_by_tma = store_by_tma_function(config) if staged_columns else None
    store_by_threads = store_by_threads_function(config)

    @device_function
    def skip(full, empty, rounds, stage, parity, leader, group):
        """Give the stages of a tile back without a product; the leader alone follows their phases."""
        for _ in range(rounds):
            if leader:
                sm90.mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
                sm90.mbarrier_arrive(empty + stage * MBARRIER_BYTES)
            stage, parity = advance(stage, parity)
        sm90.named_barrier_sync(group, WARPGROUP)
        return stage, parity

    @device_function
    def consume(base, consumer, thread, maps, c, activated, starts, table, shape):
        """Compute and store this block's tiles; shape as in produce_rows.

        maps: of C and, with SwiGLU, of its output; c, activated: the same two as pairs of 16 bits.
        """
        tiles, tiles_across, rounds, n = shape
        c_map, activated_map = maps
        lane, warp, leader = thread & i32(31), (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
        group = consumer + i32(1)
        staged = base + layout.staged + consumer * staged_bytes
        a, b = base + consumer * BOX_BYTES, base + a_bytes
        full, empty = base + layout.full, base + layout.empty
        acc = cuda.local.array(accumulators, np.float32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        stage, parity = FIRST_FULL
        index = i32(cuda.blockIdx.x)
        while index < tiles:
            _, first_row, end, tile_column = find_tile(index, table, starts, tiles_across)
            index = i32(index + i32(cuda.gridDim.x))
            first_row = i32(first_row + consumer * i32(ROWS))
            if first_row < end:
                stage, parity = main_loop(acc, a, b, full, empty, rounds, stage, parity, leader, i32(0))
                by_threads = True
                if staged_columns:
                    if i32(first_row + i32(ROWS)) <= end:
                        store_by_tma(
                            acc, c_map, activated_map, first_row, tile_column, n, staged, group, warp, lane, leader
                        )
                        by_threads = False
                if by_threads:
                    row = i32(first_row + warp * i32(16) + (lane >> i32(2)))
                    pair = i32((tile_column * tile_columns >> i32(1)) + (lane & i32(3)))
                    store_by_threads(acc, c, activated, row, pair, end, n)
            else:
                stage, parity = skip(full, empty, rounds, stage, parity, leader, group)
        if leader:
            sm90.bulk_wait_group()

    return consume


@specialize
def grouped_gemm_sm90_kernel(config):
    """The kernel of a config for the forward, with or without SwiGLU, and, if config.b_mn, the input's gradient."""
    consumers, steps, a_bytes, layout = config.consumers, config.steps, config.a_bytes, config.layout
    tile_columns, staged, reallocates_registers = config.tile_columns, config.staged_columns > 0, config.columns > 128
    table_offset = layout.nbytes - SWIZZLE_ALIGNMENT
    init_ring, _ = ring(config.stages)
    fill_table, _ = row_tile_functions(config.rows, is_across_first(config))
    produce_rows, produce_weights = producers(config)
    consume = consumer_function(config)

    @supports_pdl
    @cuda.jit(launch_bounds=((consumers + 1) * WARPGROUP, config.blocks_per_sm))
    def grouped_gemm_sm90_kernel(x_map, eights_map, weights_map, starts, c_map, c, activated_map, activated, n, k):
        """C (R, n) from rows of k steps; with SwiGLU, C (R, 2 n), and `activated` (R, n) is written.

        x_map, eights_map: of boxes of a tile's rows, and of eight. c, activated are seen as pairs of 16 bits; the
        latter two arguments are C's without SwiGLU. Shared memory: Sm90GemmConfig.layout, then the table of row tiles.
        """
        thread = i32(cuda.threadIdx.x)
        warpgroup, warp = sm90.warp_uniform(thread >> i32(7)), sm90.warp_uniform(thread >> i32(5))
        base = shared_base()
        full, empty, table = base + layout.full, base + layout.empty, base + table_offset
        if thread == 0:
            init_ring(full, empty, 2, consumers)
            sm90.mbarrier_init_fence()
            sm90.prefetch_tensor_map(sm90.tensor_map_address(x_map))
            sm90.prefetch_tensor_map(sm90.tensor_map_address(eights_map))
            sm90.prefetch_tensor_map(sm90.tensor_map_address(weights_map))
            if staged:
                sm90.prefetch_tensor_map(sm90.tensor_map_address(c_map))
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        if warp == 0:
            fill_table(table, starts, thread)
        cuda.syncthreads()
        tiles_across = i32((n + tile_columns - 1) // tile_columns)
        row_tiles = sm90.warp_uniform(load_word(table + i32(starts.shape[0] - 1) * i32(WORD)))
        shape = i32(row_tiles * tiles_across), tiles_across, i32((k + steps - 1) // steps), i32(n)
        if warpgroup == 0:
            if reallocates_registers:
                sm90.setmaxnreg_dec()
            if warp == 0:
                maps = sm90.tensor_map_address(x_map), sm90.tensor_map_address(eights_map)
                produce_rows(*maps, starts, table, base, full, empty, shape)
            elif warp == 1:
                weights = sm90.tensor_map_address(weights_map)
                produce_weights(weights, starts, table, base + a_bytes, full, empty, shape)
        else:
            if reallocates_registers:
                sm90.setmaxnreg_inc()
            maps = sm90.tensor_map_address(c_map), sm90.tensor_map_address(activated_map)
            consume(base, warpgroup - i32(1), thread, maps, c, activated, starts, table, shape)

    return grouped_gemm_sm90_kernel


@functools.cache
def dw_producer(config, boxes):
    """The device function of a warp that loads an operand of all tiles, `boxes` boxes of 64 rows by 64 columns each."""
    stage_bytes = config.stage_bytes
    nbytes = boxes * BOX_BYTES
    _, advance = ring(config.stages)

    @device_function
    def produce(operand_map, of_rows, starts, target, full, empty, shape):
        """of_rows: whether a tile's row, else its column, chooses the boxes; shape: (tiles of all, of an expert, down).

        target: where the boxes of the first stage belong.
        """
        tiles, tiles_each, tiles_down = shape
        lane = i32(cuda.threadIdx.x) & i32(31)
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        while index < tiles:
            expert = udiv(index, tiles_each)
            tile = i32(index - expert * tiles_each)
            tile_column = udiv(tile, tiles_down)
            which = i32(tile - tile_column * tiles_down) if of_rows else tile_column
            first, row, end = which * i32(boxes * 64), starts[u32(expert)], starts[u32(expert + 1)]
            while row < end:
                sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                if lane == 0:
                    stage_full = full + stage * MBARRIER_BYTES
                    sm90.mbarrier_expect_tx(stage_full, nbytes)
                    for box in range(boxes):
                        place = target + stage * stage_bytes + box * BOX_BYTES
                        sm90.tma_load_2d(place, operand_map, i32(first + box * 64), row, stage_full)
                row = i32(row + i32(STEPS))
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))

    return produce


@functools.cache
def dw_store_function(config):
    """The device function that stores or adds a consumer's accumulators to an expert's gradient by TMA."""
    columns, staged_columns, box_columns = config.columns, config.staged_columns, config.box_columns
    adds, boxes = config.output == "add", config.staged_columns // config.box_columns
    stage = stage_function(config.element, staged_columns, config.output != "same")

    @device_function
    def store(acc, c_map, expert, row, column, staged, group, warp, lane, leader):
        for part in range(columns // staged_columns):
            # TMA must have read the last part before this one overwrites it.
            if leader:
                sm90.bulk_wait_group_read()
            sm90.named_barrier_sync(group, WARPGROUP)
            stage(acc, part * staged_columns // 2, staged, warp, lane)
            fence_proxy_async()
            sm90.named_barrier_sync(group, WARPGROUP)
            if leader:
                for box in range(boxes):
                    first, source = i32(column + part * staged_columns + box * box_columns), staged + box * BOX_BYTES
                    if adds:
                        sm90.tma_reduce_add_3d(c_map, first, row, expert, source)
                    else:
                        sm90.tma_store_3d(c_map, first, row, expert, source)
                sm90.bulk_commit_group()

    return store


@functools.cache
def dw_consumer_function(config):
    """The device function of a consumer warpgroup: all of its tiles of the experts' gradients."""
    columns, rows, layout, consumers = config.columns, config.rows, config.layout, config.consumers
    stage_bytes, a_bytes, staged_bytes = config.stage_bytes, config.a_bytes, config.staged_bytes
    accumulators, adds = columns // 2, config.output == "add"
    start = wgmma_async(columns, config.element, STEPS // 16, "mn", "mn")
    wait_all = wgmma_wait_group(accumulators, 0)
    main_loop = main_loop_function(columns, config.stages, stage_bytes, start, no_operation)
    _, advance = ring(config.stages)
    store = dw_store_function(config)

    @device_function
    def clear_lines(boxes, count, first, member, members):
        """Threads clear the lines from `first` on of `count` boxes; this is the member-th of so many threads."""
        for box in range(count):
            chunk = i32(first * i32(LINE // 16) + member)
            while chunk < BOX_BYTES // 16:
                store_words(boxes + box * BOX_BYTES + chunk * i32(16), i32(0), i32(0), i32(0), i32(0))
                chunk = i32(chunk + i32(members))

    @device_function
    def multiply_last(acc, base, consumer, valid, accumulate, thread, stage_full, offset, parity):
        """Add the product of a stage of which `valid` rows are the expert's; the others must not be multiplied.

        They are another expert's, and may be infinite: both operands' lines become 0.
        """
        sm90.mbarrier_wait(stage_full, parity)
        a, b = base + offset + consumer * BOX_BYTES, base + offset + a_bytes
        clear_lines(a, 1, valid, thread & i32(WARPGROUP - 1), WARPGROUP)
        clear_lines(b, columns // 64, valid, i32(thread - WARPGROUP), consumers * WARPGROUP)
        fence_proxy_async()
        sm90.named_barrier_sync(ALL_CONSUMERS, consumers * WARPGROUP)
        start(acc, smem_descriptor(a), smem_descriptor(b), accumulate)
        wait_all(acc)

    @device_function
    def consume(base, consumer, thread, c_map, starts, shape):
        """Compute and store this block's tiles; shape as in dw_producer."""
        tiles, tiles_each, tiles_down = shape
        lane, warp, leader = thread & i32(31), (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
        staged = base + layout.staged + consumer * staged_bytes
        full, empty = base + layout.full, base + layout.empty
        acc = cuda.local.array(accumulators, np.float32)
        stage, parity = FIRST_FULL
        index = i32(cuda.blockIdx.x)
        while index < tiles:
            expert = udiv(index, tiles_each)
            tile = i32(index - expert * tiles_each)
            tile_column = udiv(tile, tiles_down)
            tile_row = i32(tile - tile_column * tiles_down)
            index = i32(index + i32(cuda.gridDim.x))
            count = sm90.warp_uniform(i32(starts[u32(expert + 1)] - starts[u32(expert)]))
            rounds, last = count >> i32(6), count & i32(STEPS - 1)
            for i in range(accumulators):
                acc[i] = np.float32(0.0)
            if rounds > 0:
                a, b = base + consumer * BOX_BYTES, base + a_bytes
                stage, parity = main_loop(acc, a, b, full, empty, rounds, stage, parity, leader, i32(0))
            if last > 0:
                offset, stage_full = stage * stage_bytes, full + stage * MBARRIER_BYTES
                multiply_last(acc, base, consumer, last, i32(rounds > 0), thread, stage_full, offset, parity)
                if leader:
                    sm90.mbarrier_arrive(empty + stage * MBARRIER_BYTES)
                stage, parity = advance(stage, parity)
            # An expert without rows has a gradient of 0, which is written, but not added.
            if count > 0 or not adds:
                row, column = i32(tile_row * rows + consumer * ROWS), i32(tile_column * columns)
                store(acc, c_map, expert, row, column, staged, consumer + i32(1), warp, lane, leader)
        if leader:
            sm90.bulk_wait_group()

    return consume


@specialize
def grouped_gemm_dw_sm90_kernel(config):
    """The kernel of a config for the weights' gradient."""
    consumers, rows, columns, a_bytes, layout = (
        config.consumers, config.rows, config.columns, config.a_bytes, config.layout,
    )  # fmt: skip
    reallocates_registers = columns > 128
    init_ring, _ = ring(config.stages)
    produce_a, produce_b = dw_producer(config, consumers), dw_producer(config, columns // 64)
    consume = dw_consumer_function(config)

    @supports_pdl
    @cuda.jit(launch_bounds=((consumers + 1) * WARPGROUP, config.blocks_per_sm))
    def grouped_gemm_dw_sm90_kernel(dy_map, x_map, starts, c_map, n, k):
        """C (E, n, k) = or += dY_e^T X_e over the rows of each expert; tiles go down an expert's columns first.

        Both operands lie MN-major: a line of shared memory is 64 columns of one row. The last stage of an expert has
        rows of the next one, whose lines all consumers together clear before they multiply it.
        """
        thread = i32(cuda.threadIdx.x)
        warpgroup, warp = sm90.warp_uniform(thread >> i32(7)), sm90.warp_uniform(thread >> i32(5))
        base = shared_base()
        full, empty = base + layout.full, base + layout.empty
        if thread == 0:
            init_ring(full, empty, 2, consumers)
            sm90.mbarrier_init_fence()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        tiles_down, tiles_across = i32((n + rows - 1) // rows), i32((k + columns - 1) // columns)
        tiles_each = i32(tiles_down * tiles_across)
        shape = i32(tiles_each * i32(starts.shape[0] - 1)), tiles_each, tiles_down
        if warpgroup == 0:
            if reallocates_registers:
                sm90.setmaxnreg_dec()
            if warp == 0:
                produce_a(sm90.tensor_map_address(dy_map), True, starts, base, full, empty, shape)
            elif warp == 1:
                produce_b(sm90.tensor_map_address(x_map), False, starts, base + a_bytes, full, empty, shape)
        else:
            if reallocates_registers:
                sm90.setmaxnreg_inc()
            consume(base, warpgroup - i32(1), thread, sm90.tensor_map_address(c_map), starts, shape)

    return grouped_gemm_dw_sm90_kernel


def gemm_rows(x, weights, starts, out, b_mn=False):
    """Each row of out = a row of x times its expert's weight: W_e^T (experts, columns, steps), or W_e if b_mn."""
    (rows, steps), columns, experts = x.shape, out.shape[1], len(weights)
    config = best_sm90_config(tokens_of_choice(rows), experts, columns, steps, x.dtype.name, b_mn, device.sm_count())
    gemm_rows_with_config(config, x, weights, starts, out)


def gemm_swiglu(x, weights, starts, gate_up, out):
    """gate_up = the rows of x times their experts' weights (E, 2 F, K), out = silu(gate) * up: the bits of swiglu."""
    (rows, steps), columns, experts = x.shape, gate_up.shape[1], len(weights)
    shape = tokens_of_choice(rows), experts, columns, steps, x.dtype.name
    gemm_rows_with_config(best_sm90_config(*shape, False, device.sm_count(), True), x, weights, starts, gate_up, out)


def gemm_rows_with_config(config, x, weights, starts, out, activated=None):
    """gemm_rows by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long; all lengths > 0.

    activated: the output of SwiGLU if config.swiglu.
    """
    activated = activated if config.swiglu else out
    (rows, steps), columns, experts = x.shape, activated.shape[1], len(weights)
    tiles = most_row_tiles(rows, experts, config.rows) * -(-columns // config.tile_columns)
    grid, block = min(tiles, device.sm_count() * config.blocks_per_sm), (config.consumers + 1) * WARPGROUP
    x_map, eights_map = tensor_map(x, config.rows, STEPS), tensor_map(x, 8, STEPS)
    weights_map = tensor_map(weights, 1, 64 if config.b_mn else config.tile_columns, 64)
    c_map, activated_map = (tensor_map(array, ROWS, config.box_columns) for array in (out, activated))
    launch(
        grouped_gemm_sm90_kernel(config), grid, block, x_map, eights_map, weights_map, starts, c_map,
        out.view(np.int32), activated_map, activated.view(np.int32), columns, steps,
        shared=config.layout.nbytes + (experts + 1) * WORD, pdl=ALWAYS,
    )  # fmt: skip


def gemm_weights(dy, x, starts, out, add):
    """out[e] = or += dy^T x of the rows of expert e."""
    output = "add" if add else "same" if out.dtype == x.dtype else "float32"
    gemm_weights_with_config(best_sm90_dw_config(*out.shape[1:], x.dtype.name, output), dy, x, starts, out)


def gemm_weights_with_config(config, dy, x, starts, out):
    """gemm_weights by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long; all lengths > 0."""
    experts, n, k = out.shape
    tiles = experts * -(-n // config.rows) * -(-k // config.columns)
    grid, block = min(tiles, device.sm_count() * config.blocks_per_sm), (config.consumers + 1) * WARPGROUP
    maps = tensor_map(dy, STEPS, 64), tensor_map(x, STEPS, 64)
    c_map = tensor_map(out, 1, ROWS, config.box_columns)
    kernel = grouped_gemm_dw_sm90_kernel(config)
    launch(kernel, grid, block, *maps, starts, c_map, n, k, shared=config.layout.nbytes, pdl=ALWAYS)
