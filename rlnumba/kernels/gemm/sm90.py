"""GEMM on sm_90: C = A B^T, C = A B and C += A^T B, warp-specialised, persistent, one order over K.

With a low rank, as of an adapter, C = A B^T + A' B'^T or A B + A' B': in the ring the stages of A' and B' follow those
of A and B, into the same accumulators. In decode A' may be a product of the same kernel (reduction.py).

Inputs float16 or bfloat16, accumulators float32, output in the inputs' type or float32. For linear A and B lie K-major,
for linear_backward_input B lies MN-major, for linear_backward_weight both do.

A block computes one tile of C at a time, 64 rows for each of its consumer warpgroups by `columns`, and loops over
tiles. Two producer warps load the next steps of A and of B by TMA, `stages` ahead. Consumers multiply (main loop) and
add what is to be added; their accumulators go through shared memory to TMA, which stores them during the next tile's
main loop (gemm/epilogue.py).

For SwiGLU a tile has the same columns of gate and up, from two boxes of W: a thread has both in its accumulators.

Every element of C adds its products in the order of the reduction index, 16 at a time, in one accumulator,
whatever the tile's shape: a row's bits do not depend on M or on the config.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.gemm.epilogue import addends, store_by_threads_function, store_by_tma_function
from rlnumba.kernels.gemm.reduction import (
    is_one_kernel,
    leave_reduced,
    own_rank_function,
    reduced_tiles,
    reducing_operands,
    store_reduced_function,
    wait_for_reduced,
)
from rlnumba.kernels.gemm.scheduler import problem_of, tile_coordinates
from rlnumba.kernels.gemm.sm90_config import best_config, with_own_rank
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE
from rlnumba.kernels.ptx.warp import (
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    sync_warp,
    udiv,
)
from rlnumba.kernels.ptx.wgmma import (
    ROWS,
    STEPS,
    WARPGROUP,
    WgmmaLayout,
    smem_descriptor,
    wgmma_async,
    wgmma_wait_group,
)
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring, shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32 = np.int32

# Architectures that the kernels of this module compile for.
ARCHITECTURES = [(9, 0, "a")]

# A GEMM of more than ROWS rows by a weight of as many elements is too long to gain from programmatic dependent launch,
# and loses: 256 rows by 4096 x 12,288 take 46 us instead of 40.
LARGE_WEIGHT = 1 << 23


# Tensor maps of A' and B', and the steps of their reduction.
LowRank = namedtuple("LowRank", "a_map b_map rank")
# The tiles of A' that a kernel computes before those of C, so many side by side, with so many stages each; the arrivals
# when all are written, and the ReducingLowRank.
ReducedTiles = namedtuple("ReducedTiles", "tiles across rounds arrivals low_rank")


@functools.cache
def load_functions(config):
    """(load_a, load_b): the device functions that load the boxes of a tile and a stage to `target`."""
    columns, panels, rows, tile_columns = config.product_columns, config.panels, config.rows, config.tile_columns
    a_mn, b_mn, swiglu = config.a_mn, config.b_mn, config.swiglu
    consumers, eight_rows = config.consumers, config.eight_rows
    # All panels in one box, which takes whole panels: those of a low rank are not.
    one_box = panels > 1 and not config.low_rank
    a_panel_bytes = 8 * LINE if eight_rows else BOX_BYTES
    load_b_2d, load_b_3d = sm90.tma_load_2d, sm90.tma_load_3d
    if config.streams_b:
        load_b_2d, load_b_3d = sm90.tma_load_2d_evict_first, sm90.tma_load_3d_evict_first

    @device_function
    def load_a(target, a, tile_row, tile_column, step, full, n):
        if a_mn:
            for box in range(consumers):
                sm90.tma_load_2d(target + box * BOX_BYTES, a, tile_row * rows + box * ROWS, step, full)
        elif eight_rows and one_box:
            sm90.tma_load_3d(target, a, 0, tile_row * rows, udiv(step, i32(STEPS)), full)
        else:
            # One box for all panels would put them too close together where A has fewer than 64 rows.
            for panel in range(panels):
                sm90.tma_load_2d(target + panel * a_panel_bytes, a, step + panel * STEPS, tile_row * rows, full)

    @device_function
    def load_b(target, b, tile_row, tile_column, step, full, n):
        """Load a stage of B by TMA: the boxes of a tile from `step` of K on."""
        first_column = tile_column * tile_columns
        if b_mn:
            for box in range(tile_columns // 64):
                load_b_2d(target + box * BOX_BYTES, b, first_column + box * 64, step, full)
        elif swiglu:
            for panel in range(panels):
                box, first_step = target + panel * columns * LINE, step + panel * STEPS
                load_b_2d(box, b, first_step, first_column, full)
                load_b_2d(box + tile_columns * LINE, b, first_step, n + first_column, full)
        elif one_box:
            load_b_3d(target, b, 0, first_column, udiv(step, i32(STEPS)), full)
        else:
            for panel in range(panels):
                load_b_2d(target + panel * columns * LINE, b, step + panel * STEPS, first_column, full)

    return load_a, load_b


def producer(config, load, before_wait):
    """The device function of the warp that loads all of an operand.

    before_wait: the operand is older than the kernels ahead, as a weight is: load it before griddepcontrol_wait.
    """
    stage_bytes, steps, low_rank, reduces = config.stage_bytes, config.steps, config.low_rank, config.reduces
    panels, columns, is_weight = config.panels, config.columns, before_wait
    waits_for_reduced, panel_bytes = reduces and not is_weight, config.product_columns * LINE
    # Stages of a weight end with the adapter's A, but those of the low rank; there consumers have A' in registers.
    loads_adapter, has_no_rank = config.own_rank > 0 and is_weight, config.own_rank > 0 and not is_weight
    adapter_bytes = panels * config.own_rank * LINE if loads_adapter else 0
    _, advance = ring(config.stages)

    @device_function
    def load_reducing(target, reducing_map, tile_column, step, full):
        """Load a stage of the adapter's A for a tile of A'."""
        for panel in range(panels):
            at, first_step = target + panel * panel_bytes, step + panel * STEPS
            sm90.tma_load_2d(at, reducing_map, first_step, tile_column * columns, full)

    @device_function
    def produce(operand_map, low_rank_map, low_rank_step, nbytes, target, full, empty, shape, reduced):
        """nbytes: of the boxes of a stage; target: where those of the first stage belong.

        low_rank_step: the step of the reduction with which low_rank_map begins. reduced: a ReducedTiles if the config
        reduces, the low rank's operands if it has own_rank, else of no use.
        """
        tiles, tiles_down, tiles_across, rounds, n = shape
        lane = i32(cuda.threadIdx.x) & i32(31)
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        tile_row, tile_column = tile_coordinates(index, tiles_down, tiles_across)
        last_step = i32(rounds * steps)
        if not before_wait:
            if lane == 0:
                sm90.prefetch_tensor_map(operand_map)
                if low_rank:
                    sm90.prefetch_tensor_map(low_rank_map)
            griddepcontrol_wait()
        if loads_adapter:
            adapter_map = sm90.tensor_map_address(reduced.reducing_map)
        if reduces:
            reducing_map, waits = sm90.tensor_map_address(reduced.low_rank.reducing_map), i32(1)
            while index < reduced.tiles:
                reduced_row = udiv(index, reduced.across)
                step = i32(0)
                while step < low_rank_step:
                    sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                    if lane == 0:
                        sm90.mbarrier_expect_tx(full + stage * MBARRIER_BYTES, nbytes)
                        stage_full, boxes = full + stage * MBARRIER_BYTES, target + stage * stage_bytes
                        if is_weight:
                            reduced_column = i32(index - reduced_row * reduced.across)
                            load_reducing(boxes, reducing_map, reduced_column, step, stage_full)
                        else:
                            load(boxes, operand_map, reduced_row, i32(0), step, stage_full, n)
                    step = i32(step + steps)
                    stage, parity = advance(stage, parity)
                index = i32(index + i32(cuda.gridDim.x))
            # Of the tiles of C.
            index = i32(index - reduced.tiles)
            tile_row, tile_column = tile_coordinates(index, tiles_down, tiles_across)
        while index < tiles:
            # Not a range: the number of its rounds would be computed behind the wait, for 0.1 us.
            step = i32(0)
            while step < last_step:
                sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                if waits_for_reduced:
                    # By all lanes: others than one that waits alone would go on without it, and come to wait for a
                    # phase of `empty` that is past. Together: the last one to leave makes the count 0.
                    if waits != 0 and step >= low_rank_step:
                        wait_for_reduced(reduced.low_rank, reduced.arrivals)
                        sync_warp()
                        waits = i32(0)
                if lane == 0:
                    stage_full = full + stage * MBARRIER_BYTES
                    boxes = target + stage * stage_bytes
                    if low_rank and step >= low_rank_step:
                        of_rank = i32(step - low_rank_step)
                        if has_no_rank:
                            sm90.mbarrier_arrive(stage_full)
                        else:
                            sm90.mbarrier_expect_tx(stage_full, i32(nbytes - adapter_bytes))
                            load(boxes, low_rank_map, tile_row, tile_column, of_rank, stage_full, n)
                    else:
                        sm90.mbarrier_expect_tx(stage_full, nbytes)
                        load(boxes, operand_map, tile_row, tile_column, step, stage_full, n)
                        if loads_adapter:
                            load_reducing(boxes + columns * LINE, adapter_map, i32(0), step, stage_full)
                step = i32(step + steps)
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))
            tile_row, tile_column = tile_coordinates(index, tiles_down, tiles_across)
        if waits_for_reduced:
            if lane == 0:
                leave_reduced(reduced.low_rank)

    return produce


def main_loop_function(columns, stages, stage_bytes, start, each_round, resident_a_bytes=0):
    """The device function that multiplies a tile: acc = A B over `rounds` stages; returns the ring's next stage.

    start: of wgmma_async. each_round(done, rounds, leader, arguments): a device function called while wgmma runs.
    resident_a_bytes: 0 where A is in the ring beside B; else all of A stays in shared memory, so many bytes a stage.
    """
    wait_all_but_latest, wait_all = wgmma_wait_group(columns // 2, 1), wgmma_wait_group(columns // 2, 0)
    _, advance = ring(stages)

    @device_function
    def main_loop(acc, a, b, full, empty, rounds, stage, parity, leader, arguments):
        """a, b: where this consumer's operands lie in the first stage; leader: arrives for its warpgroup."""
        previous = i32(0)
        for done in range(rounds):
            sm90.mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
            offset = stage * stage_bytes
            a_offset = i32(done * resident_a_bytes) if resident_a_bytes else offset
            start(acc, smem_descriptor(a + a_offset), smem_descriptor(b + offset), i32(done != 0))
            wait_all_but_latest(acc)
            each_round(done, rounds, leader, arguments)
            if done != 0 and leader:
                sm90.mbarrier_arrive(empty + previous * MBARRIER_BYTES)
            previous = stage
            stage, parity = advance(stage, parity)
        wait_all(acc)
        if leader:
            sm90.mbarrier_arrive(empty + previous * MBARRIER_BYTES)
        return stage, parity

    return main_loop


@functools.cache
def consumer_function(config):
    """The device function of a consumer warpgroup: all of its tiles, from the main loop to the stores."""
    columns, rows = config.columns, config.rows
    tile_columns, staged_columns = config.tile_columns, config.staged_columns
    a_bytes, staged_bytes, prefetched_columns = config.a_bytes, config.staged_bytes, config.prefetched_columns
    prefetches, layout = config.prefetches, config.layout
    product_columns = config.product_columns
    accumulators, residual_words = product_columns // 2, columns // 4 if config.residual and not prefetches else 1
    load_residual, prefetch, add_addends = addends(config)
    if staged_columns:
        store_by_tma = store_by_tma_function(config)
    else:
        store_by_threads = store_by_threads_function(config)

    a_kind, b_kind = "mn" if config.a_mn else "k", "mn" if config.b_mn else "k"
    operands = a_kind, b_kind, None, WgmmaLayout(broadcast=config.eight_rows)
    start = wgmma_async(product_columns, config.element, config.steps // 16, *operands)
    add_low_rank = wgmma_async(columns, config.element, STEPS // 16, "registers", "k", True)
    wait_low_rank, (_, advance) = wgmma_wait_group(columns // 2, 0, STEPS // 4), ring(config.stages)
    has_own_rank, own_rank = config.own_rank > 0, own_rank_function(config)
    rank_word_count = STEPS // 4 if has_own_rank else 1

    @device_function
    def each_round(done, rounds, leader, part):
        # Not at once: TMA still reads the staged output of the tile before.
        if prefetches and done == min(rounds - i32(1), i32(2)) and leader:
            prefetch(*part)

    @device_function
    def nothing_more(done, rounds, leader, part):
        pass

    main_loop = main_loop_function(product_columns, config.stages, config.stage_bytes, start, each_round)
    reduce = main_loop_function(columns, config.stages, config.stage_bytes, start, nothing_more)
    store_reduced, reduces, stage_bytes = store_reduced_function(config), config.reduces, config.stage_bytes

    @device_function
    def consume(base, consumer, thread, c, residual, bias, m, shape, reduced):
        """Compute and store this block's tiles; shape: (tiles, tiles down, across, stages of a tile, n).

        c, residual: addresses of tensor maps if the output is staged, else arrays. reduced: as a producer's.
        """
        tiles, tiles_down, tiles_across, rounds, n = shape
        lane, warp, leader = thread & i32(31), (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
        staged = base + layout.staged + consumer * staged_bytes
        prefetched = base + layout.prefetched + consumer * MBARRIER_BYTES
        a, b = base + consumer * BOX_BYTES, base + a_bytes
        acc = cuda.local.array(accumulators, np.float32)
        words = cuda.local.array(residual_words, np.int32)
        rank_words = cuda.local.array(rank_word_count, np.int32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        stage, parity = FIRST_FULL
        prefetched_parity = i32(0)
        index = i32(cuda.blockIdx.x)
        if reduces:
            while index < reduced.tiles:
                full, empty = base + layout.full, base + layout.empty
                stage, parity = reduce(acc, a, b, full, empty, reduced.rounds, stage, parity, leader, i32(0))
                reduced_row = udiv(index, reduced.across)
                reduced_column = i32(index - reduced_row * reduced.across)
                row = i32(reduced_row * rows + consumer * ROWS + warp * i32(16) + (lane >> i32(2)))
                group = consumer + i32(1)
                store_reduced(acc, reduced.low_rank, reduced_column, row, m, lane, leader, group)
                index = i32(index + i32(cuda.gridDim.x))
            index = i32(index - reduced.tiles)
        while index < tiles:
            tile_row, tile_column = tile_coordinates(index, tiles_down, tiles_across)
            index = i32(index + i32(cuda.gridDim.x))
            first_row = tile_row * rows + consumer * ROWS
            # This thread's accumulators: rows `row` and row + 8, columns 8 b + 2 (lane % 4) and the next.
            row = i32(first_row + warp * i32(16) + (lane >> i32(2)))
            pair = i32((tile_column * tile_columns >> i32(1)) + (lane & i32(3)))
            load_residual(words, residual, row, pair, m, n)
            part = c if prefetched_columns else residual, first_row, tile_column, staged, prefetched
            full, empty = base + layout.full, base + layout.empty
            if has_own_rank:
                # The last stage has B' alone, whose A' these rows have then.
                stage, parity = main_loop(acc, a, b, full, empty, rounds - i32(1), stage, parity, leader, part)
                own_rank(rank_words, acc, reduced, row, m, lane, tile_column == 0)
                sm90.mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
                add_low_rank(acc, rank_words, smem_descriptor(b + stage * stage_bytes))
                wait_low_rank(acc, rank_words)
                if leader:
                    sm90.mbarrier_arrive(empty + stage * MBARRIER_BYTES)
                stage, parity = advance(stage, parity)
            else:
                stage, parity = main_loop(acc, a, b, full, empty, rounds, stage, parity, leader, part)
            if prefetches:
                sm90.mbarrier_wait(prefetched, prefetched_parity)
                prefetched_parity ^= i32(1)
            add_addends(acc, bias, words, staged, pair, n, warp, lane)
            if staged_columns:
                group = consumer + i32(1)
                store_by_tma(acc, c, residual, first_row, tile_column, n, staged, group, warp, lane, leader)
            else:
                store_by_threads(acc, c, residual, row, pair, m, n)
        if leader:
            sm90.bulk_wait_group()

    return consume


@specialize
def gemm_sm90_kernel(config):
    """The kernel of a config. N is a multiple of 8, or of 4 for a float32 C.

    TMA leaves out what a tile has beyond C. With SwiGLU a tile's gate columns beyond F are up's first, since [gate; up]
    is one matrix: their sums are those that up's own tile stores there, the same bits.
    """
    rows, tile_columns, steps, consumers = config.rows, config.tile_columns, config.steps, config.consumers
    layout, a_bytes, b_bytes, low_rank = config.layout, config.a_bytes, config.b_bytes, config.low_rank
    staged, residual_by_tma = config.staged_columns > 0, config.residual or config.swiglu
    columns, reduces, own_rank = config.columns, config.reduces, config.own_rank
    # The producer's registers go to consumers whose accumulators need them.
    reallocates_registers = config.product_columns > 128
    init_ring, _ = ring(config.stages)
    load_a, load_b = load_functions(config)
    # A K-major B is a weight; the gradient of one has no operand that is older than the kernels ahead.
    produce_a, produce_b = producer(config, load_a, False), producer(config, load_b, not config.b_mn)
    consume = consumer_function(config)

    @supports_pdl
    @cuda.jit(launch_bounds=((consumers + 1) * WARPGROUP, config.blocks_per_sm))
    def gemm_sm90_kernel(a_map, b_map, rank_operands, c, residual, bias, m, n, k, a_stage_bytes):
        """C (m, n) from A and B with k steps of reduction; with SwiGLU, C (m, 2 n), and `residual` (m, n) is written.

        rank_operands: a LowRank if config.low_rank, a ReducingLowRank if the kernel computes its A', else of no use. c,
        residual: tensor maps if the config stages the output, else arrays (m, n / 2) of pairs of 16 bits. bias (n / 2):
        pairs, too. Arrays that the config does not use have no elements. a_stage_bytes: of A's boxes of one stage.
        Shared memory: Sm90GemmConfig.layout.
        """
        thread = i32(cuda.threadIdx.x)
        warpgroup = sm90.warp_uniform(thread >> i32(7))
        base = shared_base()
        full, empty = base + layout.full, base + layout.empty
        if thread == 0:
            init_ring(full, empty, 2, consumers)
            for consumer in range(consumers):
                sm90.mbarrier_init(base + layout.prefetched + consumer * MBARRIER_BYTES, 1)
            sm90.mbarrier_init_fence()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + tile_columns - 1) // tile_columns)
        rounds = i32((k + steps - 1) // steps)
        rank_step = i32(rounds * steps)
        if low_rank:
            rank_a_map, rank_b_map = rank_operands.a_map, rank_operands.b_map
            rounds = i32(rounds + i32((rank_operands.rank + steps - 1) // steps))
        else:
            rank_a_map, rank_b_map = a_map, b_map
        if reduces:
            across = reduced_tiles(i32(rank_operands.rank), i32(columns))
            first_tiles = i32(tiles_down * across)
            arrivals = i32(first_tiles * consumers)
            reduced = ReducedTiles(first_tiles, across, i32((k + steps - 1) // steps), arrivals, rank_operands)
        elif own_rank:
            reduced = rank_operands
        else:
            reduced = i32(0)
        shape = i32(tiles_down * tiles_across), tiles_down, tiles_across, rounds, i32(n)
        if warpgroup == 0:
            if reallocates_registers:
                sm90.setmaxnreg_dec()
            # Two warps, so that the many boxes of B do not delay those of A.
            warp = sm90.warp_uniform(thread >> i32(5))
            if warp == 0:
                maps = sm90.tensor_map_address(a_map), sm90.tensor_map_address(rank_a_map)
                produce_a(*maps, rank_step, i32(a_stage_bytes), base, full, empty, shape, reduced)
            elif warp == 1:
                maps = sm90.tensor_map_address(b_map), sm90.tensor_map_address(rank_b_map)
                produce_b(*maps, rank_step, i32(b_bytes), base + a_bytes, full, empty, shape, reduced)
        else:
            if reallocates_registers:
                sm90.setmaxnreg_inc()
            if staged:
                target, addend = sm90.tensor_map_address(c), sm90.tensor_map_address(residual)
                if thread == WARPGROUP:
                    sm90.prefetch_tensor_map(target)
                    if residual_by_tma:
                        sm90.prefetch_tensor_map(addend)
            else:
                target, addend = c, residual
            griddepcontrol_wait()
            consume(base, warpgroup - i32(1), thread, target, addend, bias, i32(m), shape, reduced)

    return gemm_sm90_kernel


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS by the sm90 kernel of best_config."""
    config = best_config(problem_of(a, out, a_mn, b_mn, add, bias, residual), device.sm_count())
    gemm_with_config(config, a, b, out, bias, residual)


def gemm_low_rank(a, b, out, low_rank, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS with A' B' added, in one kernel. low_rank: (A', B'), laid out as A and B are."""
    problem = problem_of(a, out, False, b_mn, add, bias, residual)
    config = best_config(problem, device.sm_count(), low_rank=True)
    gemm_with_config(config, a, b, out, bias, residual, low_rank)


def tiles_of(config, m, n, columns):
    """Tiles of a matrix (m, n), of which one has so many columns."""
    return -(-m // config.rows) * -(-n // columns)


def waves_of(config, tiles):
    """Waves of blocks that take so many tiles, one each."""
    return -(-tiles // (device.sm_count() * config.blocks_per_sm))


def reducing_config(most_rows, x, out, low_rank, reduction, bias=None, residual=None, swiglu=False):
    """The config of the kernel that computes the A' of low_rank, too, for up to most_rows rows; None: there is none.

    Each block of one wave does it for its own rows, of one adapter. In several waves, where the tensor cores have no
    time to spare, A' has tiles, if they need no further wave: Qwen3-4B's gate and up, 256 rows: 50.1 instead of 59.0
    us, 47.9 without an adapter.
    """
    if not is_one_kernel(x, out, low_rank, reduction, most_rows):
        return None
    problem = problem_of(x, out, False, False, False, bias, residual)
    config = best_config(problem, device.sm_count(), swiglu, low_rank=True)
    own = with_own_rank(config, len(reduction.a)) if reduction.adapter_ids is None else None
    tiles = tiles_of(config, *out.shape, config.tile_columns)
    with_first = tiles + tiles_of(config, len(x), len(reduction.a), config.columns)
    waves, waves_with_first = waves_of(config, tiles), waves_of(config, with_first)
    if own is not None and (waves_of(own, tiles) == 1 or waves_with_first > waves):
        return own
    return config._replace(reduces=True) if len(x) <= ROWS or waves_with_first == waves else None


def gemm_swiglu(x, weight, gate_up, out, low_rank=None, activation="silu"):
    """gate_up = X W^T (+ A' B'^T) and out = activation(gate) * up: the bits of gemm and swiglu.

    x (M, K), weight (2 F, K), gate_up (M, 2 F), out (M, F) and low_rank as gemm_with_config takes them.
    """
    problem = problem_of(x, out, False, False, False, None, None)
    config = best_config(problem, device.sm_count(), True, low_rank is not None)._replace(activation=activation)
    gemm_with_config(config, x, weight, gate_up, residual=out, low_rank=low_rank)


def gemm_with_config(config, a, b, out, bias=None, residual=None, low_rank=None, reduction=None):
    """gemm by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long.

    M, N and K > 0; M <= 8 if config.eight_rows. If config.swiglu: b (2 N, K), out (M, 2 N), and residual (M, N) is
    written. low_rank: (A', B') if config.low_rank; reduction: a Reduction, of which A' is written, if config.reduces or
    own_rank, for K-major operands.
    """
    m, n = residual.shape if config.swiglu else out.shape
    k = a.shape[0] if config.a_mn else a.shape[1]
    a_rows = ROWS if config.a_mn else min(config.rows, -(-m // 8) * 8)
    panels = (config.panels,) if config.panels > 1 and not config.low_rank else ()
    a_box = *(panels if config.eight_rows else ()), a_rows, 64
    b_box = *(() if config.swiglu else panels), 64 if config.b_mn else config.tile_columns, 64
    rank_operands = 0
    tiles = tiles_of(config, m, n, config.tile_columns)
    if config.reduces:
        rank_operands = reducing_operands(low_rank, reduction, a_box, b_box, config.columns)
        tiles += tiles_of(config, m, len(reduction.a), config.columns)
    elif config.own_rank:
        rank_operands = reducing_operands(low_rank, reduction, a_box, b_box, config.own_rank)
    elif config.low_rank:
        rank_a, rank_b = low_rank
        rank_operands = LowRank(tensor_map(rank_a, *a_box), tensor_map(rank_b, *b_box), rank_a.shape[1])
    # TMA loads the residual, or stores SwiGLU's output.
    if config.staged_columns > 0:
        c = tensor_map(out, ROWS, config.box_columns)
        addend = tensor_map(residual, ROWS, config.box_columns) if config.residual or config.swiglu else unused()
    else:
        c, addend = out.view(np.int32), unused(2) if residual is None else residual.view(np.int32)
    bias = unused() if bias is None else bias.view(np.int32)
    a_stage_bytes = config.panels * LINE * (config.rows if config.a_mn else a_rows)
    grid, block = min(tiles, device.sm_count() * config.blocks_per_sm), (config.consumers + 1) * WARPGROUP
    # Only a weight is loaded before griddepcontrol_wait.
    pdl = ALWAYS if config.b_mn else m <= ROWS or b.size < LARGE_WEIGHT
    launch(
        gemm_sm90_kernel(config), grid, block, tensor_map(a, *a_box), tensor_map(b, *b_box), rank_operands, c, addend,
        bias, m, n, k, a_stage_bytes, shared=config.layout.nbytes, pdl=pdl,
    )  # fmt: skip
