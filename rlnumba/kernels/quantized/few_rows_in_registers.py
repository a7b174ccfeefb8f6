"""The form of few_rows.py without warps that only widen: the weight comes to wgmma from registers, C^T = W A^T.

A fragment of wgmma's first operand (kernels/ptx/wgmma.py) has, for each 16 steps of the reduction, of rows g and g + 8
the values 2 t, 2 t + 1 and 2 t + 8, 2 t + 9, for lane 4 g + t. So the four lanes of a row load the same packed words,
and each widens its pair of every eight values (widen.py). No widened value goes through shared memory. Of 64 rows by 64
steps in int4 their words are 2 KiB, which lanes read four times; widened they would be 8 KiB to write and to read.

Each of a block's warpgroups multiplies its rows of the weight by the stage of A that all share:

    a tile of C's columns      [warpgroup 0 | warpgroup 1 | ...], for SwiGLU [gate of each ... | up of each ...]
    the packed ring, scales    as in few_rows.py, of all columns; a stage is empty when each warp has widened its words
    a stage of the other ring  [a panel of B', a warpgroup's rows after another's | A, rows x panels]

A warpgroup widens `wgmma_steps` times 16 steps, starts their wgmma, and widens the next while that runs. A word of the
next panel is loaded to the register of each packed word that has been widened, and arrives while others are widened.
The order of the reduction is that of all forms: 16 steps at a time, ascending, in one accumulator. The panels of the
low rank follow, one a stage, both operands in shared memory. The first warpgroup computes tiles of A' from such stages.

A warpgroup has 64 rows of the weight, or 32 where a matrix has few: eight of each warp's 16, so that all warps widen.
The other half of a fragment is zeros, and of B' whatever is there: rows of C^T that no thread reads.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.gemm.epilogue import addends, store_by_threads_function
from rlnumba.kernels.gemm.reduction import leave_reduced, store_reduced_function, wait_once_for_reduced
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import LINE, Address, load_function, load_words
from rlnumba.kernels.ptx.warp import device_function, sync_warp
from rlnumba.kernels.ptx.wgmma import (
    ROWS,
    STEPS,
    WARPGROUP,
    WgmmaLayout,
    smem_descriptor,
    wgmma_async,
    wgmma_wait_group,
)
from rlnumba.kernels.quantized.few_rows_config import PART_BYTES
from rlnumba.kernels.quantized.few_rows_main_loop import shared_operands_function, transpose_function
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.widen import lane_pair_functions, scale_function
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring
from rlnumba.runtime.device import cuda

i32 = np.int32
load_float = load_function("f")


class ConsumerLane(NamedTuple):
    """A consumer's thread. packed, scales: its bytes in a stage of these; pair: the LanePair of widen.py; warp: its
    number in the warpgroup; leader: whether it arrives for the warpgroup."""

    packed: int
    scales: int
    pair: object
    lane: int
    warp: int
    warpgroup: int
    leader: bool


class State(NamedTuple):
    """A consumer's stage and parity in the ring of A, and in that of packed words."""

    stage: int
    parity: int
    packed_stage: int
    packed_parity: int


def functions(config, find_tile):
    """(load_a, consume): the device functions of the thread that loads all but the weight, and of the warpgroups.

    find_tile: of few_rows.py:tile_function.
    """
    return loader_function(config, find_tile), consumer_function(config, find_tile)


@functools.cache
def loader_function(config, find_tile):
    """The device function of the thread that loads A, of a low rank A' and B', and the adapter's A of a tile of A'."""
    panels, rows, warpgroups, reducing_panels = config.panels, config.rows, config.warpgroups, config.reducing_panels
    a_bytes, a_at, stage_bytes = config.a_bytes, config.a_at, config.stage_bytes
    low_rank, reduces, tile_columns = config.low_rank, config.reduces, config.tile_columns
    part_columns, part_tile, a_panel = config.part.columns, config.part.tile_columns, rows * LINE
    # Bytes of a stage of a tile of A', and of one of the low rank.
    reducing_bytes = reducing_panels * (a_panel + part_columns * LINE)
    rank_stage_bytes = a_panel + config.columns * LINE
    rank_rows, reducing_rows, rows_apart = config.rank_box_rows, config.reducing_box_rows, ROWS // part_columns
    _, advance = ring(config.stages)

    @device_function
    def acquire_stage(rings, stage, parity, nbytes):
        """Wait until a stage is empty, and let its mbarrier expect so many bytes: (mbarrier, the stage's address)."""
        sm90.mbarrier_wait(rings.empty + stage * MBARRIER_BYTES, parity)
        full, boxes = rings.full + stage * MBARRIER_BYTES, rings.stages + stage * stage_bytes
        sm90.mbarrier_expect_tx(full, i32(nbytes))
        return full, boxes

    @device_function
    def load_panels(boxes, a_map, count, step, full):
        for panel in range(count):
            sm90.tma_load_2d(boxes + a_at + panel * a_panel, a_map, i32(step + i32(panel * STEPS)), i32(0), full)

    @device_function
    def load_reducing(boxes, reducing_map, step, tile, full):
        for panel in range(reducing_panels):
            for row in range(0, part_columns, reducing_rows):
                box, first_row = boxes + panel * PART_BYTES + row * rows_apart * LINE, i32(tile * i32(part_columns))
                sm90.tma_load_2d(box, reducing_map, i32(step + i32(panel * STEPS)), i32(first_row + i32(row)), full)

    @device_function
    def load_rank_b(boxes, rank_b_map, step, tile_column, n, full):
        for i in range(warpgroups):
            column = i32(tile_column * i32(tile_columns) + i32(i * part_tile))
            for row in range(0, part_columns, rank_rows):
                first_row = i32(i32(column + i32(row % part_tile)) + i32(row // part_tile) * n)
                box = boxes + i * PART_BYTES + row * rows_apart * LINE
                sm90.tma_load_2d(box, rank_b_map, step, first_row, full)

    @device_function
    def load(a_map, rank_a_map, rank_b_map, rings, shape, lane):
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        if reduces:
            reducing_map = sm90.tensor_map_address(shape.rows.low_rank.reducing_map)
            while index < shape.rows.tiles:
                for done in range(i32(shape.rounds * i32(panels // reducing_panels))):
                    full, boxes = acquire_stage(rings, stage, parity, reducing_bytes)
                    step = i32(i32(done) * i32(reducing_panels * STEPS))
                    load_panels(boxes, a_map, reducing_panels, step, full)
                    load_reducing(boxes, reducing_map, step, index, full)
                    stage, parity = advance(stage, parity)
                index = i32(index + i32(cuda.gridDim.x))
            waits = i32(1)
        while index < shape.tiles:
            _, _, _, tile_column = find_tile(index, shape.rows)
            for done in range(shape.rounds):
                full, boxes = acquire_stage(rings, stage, parity, a_bytes)
                load_panels(boxes, a_map, panels, i32(i32(done) * i32(panels * STEPS)), full)
                stage, parity = advance(stage, parity)
            if low_rank:
                if reduces:
                    waits = wait_once_for_reduced(waits, shape.rows.low_rank, shape.rows.tiles)
                for done_of_rank in range(shape.rank_rounds):
                    full, boxes = acquire_stage(rings, stage, parity, rank_stage_bytes)
                    step = i32(i32(done_of_rank) * i32(STEPS))
                    load_panels(boxes, rank_a_map, 1, step, full)
                    load_rank_b(boxes, rank_b_map, step, tile_column, shape.n, full)
                    stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))
        if reduces:
            leave_reduced(shape.rows.low_rank)

    return load


@functools.cache
def load_functions(config):
    """(load_chunks, load_scales): the device functions that load a lane's packed words, and its rows' scales."""
    halves = config.warp_rows // 8
    line_bytes, row_words, scale_of = (
        config.line_bytes, FORMATS[config.form].words, scale_function(FORMATS[config.form], config.element),
    )  # fmt: skip

    @device_function
    def load_chunks(raw, packed, first, last):
        """From the first-th 16 bytes of a panel's row to before the last-th, of its one row or both."""
        for chunk in range(first, last):
            for row in range(halves):
                found = load_words(packed + row * 8 * line_bytes + chunk * 16)
                for i in range(4):
                    raw[row * row_words + chunk * 4 + i] = found[i]

    @device_function
    def load_scales(scales):
        first = scale_of(load_float(scales))
        return first, scale_of(load_float(scales + 32)) if halves == 2 else first

    return load_chunks, load_scales


@functools.cache
def fragment_function(config, first, may_be_last):
    """The device function that widens and multiplies a fragment, `wgmma_steps` times 16 steps of a panel, from the
    first-th on.

    may_be_last: whether the panel may be a tile's last one, after which no words are loaded.
    """
    form, rows, steps = FORMATS[config.form], config.rows, config.wgmma_steps
    row_words, step_words, half_words = form.words, form.bits // 2, form.bits // 4
    halves = config.warp_rows // 8
    # 16 steps of which a lane loads the words at once; what is loaded when these here are widened.
    load_steps = 8 // form.bits
    first_chunk, last_chunk = first // load_steps, (first + steps) // load_steps
    load_chunks, _ = load_functions(config)
    _, widen_pair = lane_pair_functions(form, config.element)
    start = wgmma_async(rows, config.element, steps, "registers", "k", None, WgmmaLayout(b_first=first))
    # next_fragment is written next: wgmma must have read it, and may still read the others.
    wait = wgmma_wait_group(rows // 2, fragments_of(config) - 1, 4 * steps)

    @device_function
    def widen_fragment(fragment, raw, scales, this):
        for step in range(steps):
            for half in range(2):
                at = (first + step) * step_words + half * half_words
                for row in range(halves):
                    word, next_word = raw[row * row_words + at], raw[row * row_words + at + half_words - 1]
                    fragment[step * 4 + half * 2 + row] = widen_pair(word, next_word, scales[row], this.pair)

    @device_function
    def multiply_fragment(acc, fragment, next_fragment, raw, scales, a_panel, packed, more, this, accumulates):
        """raw: the panel's words, which those of the next, at `packed`, replace if `more` is not 0."""
        widen_fragment(fragment, raw, scales, this)
        if not may_be_last or more != 0:
            load_chunks(raw, packed, first_chunk, last_chunk)
        start(acc, fragment, a_panel, accumulates)
        wait(acc, next_fragment)

    return multiply_fragment


def fragments_of(config):
    """Fragments of a thread: as many as a panel has, and two at least, so that wgmma reads one as another is written"""
    return max(2, 4 // config.wgmma_steps)


@functools.cache
def panel_function(config, panel):
    """The device function that multiplies a panel of a stage, and loads the words and scales of the next panel."""
    steps, rows, segment_rows = config.wgmma_steps, config.rows, config.segment_rows
    panel_fragments = 4 // steps
    is_last, following = panel == config.panels - 1, (panel + 1) % config.panels
    has_new_scales = following % config.group_tiles == 0
    packed_at, scales_at = following * segment_rows * config.line_bytes, following // config.group_tiles
    scales_at, a_at = scales_at * segment_rows * 4, config.a_at + panel * rows * LINE
    multiply_first, multiply_second, multiply_third, multiply_fourth = (
        fragment_function(config, i * steps % 4, is_last) for i in range(4)
    )
    # Panels of one fragment each alternate between the registers of two.
    start = panel * panel_fragments % fragments_of(config)
    second, third = (start + 1) % fragments_of(config), 2 % fragments_of(config)
    _, load_scales = load_functions(config)

    @device_function
    def multiply_panel(acc, fragments, raw, scales, boxes, packed, stage_scales, more, this, accumulates):
        """acc += W A^T; boxes: the stage of A; packed, stage_scales: addresses of this lane's in the next panel's
        stage; more: whether there is one. Returns the scales of the next panel."""
        next_scales = scales
        if has_new_scales:
            if not is_last or more != 0:
                next_scales = load_scales(stage_scales + scales_at)
        a_panel, packed = smem_descriptor(boxes + a_at), packed + packed_at
        multiply_first(acc, fragments[start], fragments[second], raw, scales, a_panel, packed, more, this, accumulates)
        if panel_fragments > 1:
            multiply_second(acc, fragments[1], fragments[third], raw, scales, a_panel, packed, more, this, i32(1))
        if panel_fragments > 2:
            multiply_third(acc, fragments[2], fragments[3], raw, scales, a_panel, packed, more, this, i32(1))
            multiply_fourth(acc, fragments[3], fragments[0], raw, scales, a_panel, packed, more, this, i32(1))
        return next_scales

    return multiply_panel


@functools.cache
def main_loop_function(config):
    """The device function of a tile's sum: acc = W A^T (+ B' A'^T) of a warpgroup's rows; returns the next State."""
    rows, stage_bytes = config.rows, config.stage_bytes
    packed_bytes, scales_bytes = config.packed_bytes, config.scales_bytes
    row_chunks, has_four = FORMATS[config.form].words // 4, config.panels == 4
    one = i32(1)
    start_rank = wgmma_async(rows, config.element, STEPS // 16, "k", "k", True, WgmmaLayout(b_box=rows * LINE))
    add_low_rank = shared_operands_function(config, start_rank, False)
    first_panel, second_panel, third_panel, last_panel = (
        panel_function(config, i) for i in (0, 1, 2 % config.panels, config.panels - 1)
    )
    load_chunks, load_scales = load_functions(config)
    (_, advance), (_, advance_packed) = ring(config.stages), ring(config.packed_stages)

    @device_function
    def addresses(rings, packed_stage, this):
        """The addresses of this lane's words and scales in a stage."""
        packed = Address(rings.packed + packed_stage * packed_bytes + this.packed)
        return packed, Address(rings.scales + packed_stage * scales_bytes + this.scales)

    @device_function
    def multiply(acc, fragments, raw, rings, rounds, rank_rounds, state, this):
        stage, parity, packed_stage, packed_parity = state
        sm90.mbarrier_wait(rings.packed_full + packed_stage * MBARRIER_BYTES, packed_parity)
        packed, stage_scales = addresses(rings, packed_stage, this)
        load_chunks(raw, packed, 0, row_chunks)
        scales = load_scales(stage_scales)
        previous, done = rings.empty, i32(0)
        while done < rounds:
            sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
            boxes = Address(rings.stages + stage * stage_bytes)
            # The last panel loads words of the next stage, when those of this one are in registers.
            next_stage, next_parity = advance_packed(packed_stage, packed_parity)
            next_packed, next_scales = addresses(rings, next_stage, this)
            more, next_full = i32(done != i32(rounds - i32(1))), rings.packed_full + next_stage * MBARRIER_BYTES
            scales = first_panel(acc, fragments, raw, scales, boxes, packed, stage_scales, one, this, i32(done != 0))
            if has_four:
                scales = second_panel(acc, fragments, raw, scales, boxes, packed, stage_scales, one, this, one)
                # Before the last fragment of two panels was written, wgmma of the stage before had ended.
                if done != 0 and this.leader:
                    sm90.mbarrier_arrive(previous)
                scales = third_panel(acc, fragments, raw, scales, boxes, packed, stage_scales, one, this, one)
            if more != 0:
                sm90.mbarrier_wait(next_full, next_parity)
            scales = last_panel(acc, fragments, raw, scales, boxes, next_packed, next_scales, more, this, one)
            if not has_four and done != 0 and this.leader:
                sm90.mbarrier_arrive(previous)
            sync_warp()
            if this.lane == 0:
                sm90.mbarrier_arrive(rings.packed_empty + packed_stage * MBARRIER_BYTES)
            previous = rings.empty + stage * MBARRIER_BYTES
            stage, parity = advance(stage, parity)
            packed_stage, packed_parity, packed, stage_scales = next_stage, next_parity, next_packed, next_scales
            done = i32(done + one)
        # Without a low rank only the wait for the last stage is left of this.
        warpgroup, leader = this.warpgroup, this.leader
        stage, parity = add_low_rank(acc, rings, warpgroup, rank_rounds, previous, stage, parity, leader)
        return State(stage, parity, packed_stage, packed_parity)

    return multiply


@functools.cache
def reducing_functions(config):
    """(reduce, pass_over): the device functions of a tile of A', for the first warpgroup, which computes it, and for
    the others. Both return the next State.

    The others wait for every stage as well: a thread that skipped a phase of an mbarrier could not distinguish the
    phases after it from those before, which have the same parities.
    """
    panels, rows = config.reducing_panels, config.rows
    layout = WgmmaLayout(PART_BYTES, rows * LINE)
    start = wgmma_async(rows, config.element, STEPS // 16 * panels, "k", "k", None, layout)
    stage_rounds, multiply_stages = config.panels // panels, shared_operands_function(config, start, True)
    _, advance = ring(config.stages)

    @device_function
    def reduce(acc, rings, rounds, state, this):
        stage, parity, packed_stage, packed_parity = state
        rounds = i32(rounds * i32(stage_rounds))
        stage, parity = multiply_stages(acc, rings, i32(0), rounds, rings.empty, stage, parity, this.leader)
        return State(stage, parity, packed_stage, packed_parity)

    @device_function
    def pass_over(rings, rounds, state, this):
        stage, parity, packed_stage, packed_parity = state
        for _ in range(i32(rounds * i32(stage_rounds))):
            sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
            sm90.named_barrier_sync(i32(this.warpgroup + i32(1)), i32(WARPGROUP))
            if this.leader:
                sm90.mbarrier_arrive(rings.empty + stage * MBARRIER_BYTES)
            stage, parity = advance(stage, parity)
        return State(stage, parity, packed_stage, packed_parity)

    return reduce, pass_over


@functools.cache
def lane_function(config):
    """The device function that finds a thread's ConsumerLane."""
    form, part, panels, groups = FORMATS[config.form], config.part, config.panels, config.stage_groups
    tile_columns, part_tile, warp_rows = config.tile_columns, part.tile_columns, config.warp_rows
    segment_rows, line_bytes = config.segment_rows, config.line_bytes
    lane_pair, _ = lane_pair_functions(form, config.element)

    @device_function
    def lane_of(rings, rounds, thread):
        lane, warpgroup = thread & i32(31), sm90.warp_uniform(thread >> i32(7))
        warp = sm90.warp_uniform(i32(thread >> i32(5)) & i32(3))
        # The warp's first row of the weight: its warpgroup's rows of the gate, then those of up.
        first = i32(warp * i32(warp_rows))
        half, first = i32(first // i32(part_tile)), i32(first % i32(part_tile))
        row = i32(i32(half * i32(tile_columns) + warpgroup * i32(part_tile)) + i32(first + (lane >> i32(2))))
        segment, row = i32(row // i32(segment_rows)), i32(row % i32(segment_rows))
        packed = i32(i32(segment * i32(panels * segment_rows) + row) * i32(line_bytes))
        scales = i32(i32(segment * i32(groups * segment_rows) + row) * i32(4))
        pair = lane_pair(lane, rings.levels, i32(rounds >> i32(31)))
        return ConsumerLane(packed, scales, pair, lane, warp, warpgroup, (thread & i32(127)) == 0)

    return lane_of


@functools.cache
def consumer_function(config, find_tile):
    """The device function of the warpgroups that widen, multiply and write C."""
    part, rows, warpgroups, tile_columns = config.part, config.rows, config.warpgroups, config.part.tile_columns
    accumulators, transposed_values, fragment_words = part.columns // 2, rows // 2, 4 * config.wgmma_steps
    raw_words, residual_words = (
        config.warp_rows // 8 * FORMATS[config.form].words,
        part.columns // 4 if config.residual else 1,
    )
    exchange_at, exchange_bytes, reduces = config.exchange_at, config.exchange_bytes, config.reduces
    load_residual, _, add_addends = addends(part.epilogue)
    store_by_threads, transpose = (
        store_by_threads_function(part.epilogue),
        transpose_function(part.columns, rows, config.warp_rows),
    )
    store_reduced, (reduce, pass_over) = store_reduced_function(part), reducing_functions(config)
    multiply = main_loop_function(config)
    lane_of = lane_function(config)

    @device_function
    def consume(rings, thread, c, residual, bias, shape):
        this = lane_of(rings, shape.rounds, thread)
        lane, warp, warpgroup = this.lane, this.warp, this.warpgroup
        acc = cuda.local.array(accumulators, np.float32)
        transposed = cuda.local.array(transposed_values, np.float32)
        f0 = cuda.local.array(fragment_words, np.int32)
        f1 = cuda.local.array(fragment_words, np.int32)
        f2 = cuda.local.array(fragment_words, np.int32)
        f3 = cuda.local.array(fragment_words, np.int32)
        raw = cuda.local.array(raw_words, np.int32)
        words = cuda.local.array(residual_words, np.int32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        for i in range(transposed_values):
            transposed[i] = np.float32(0.0)
        for i in range(fragment_words):
            f0[i] = f1[i] = f2[i] = f3[i] = i32(0)
        for i in range(raw_words):
            raw[i] = i32(0)
        state = State(FIRST_FULL[0], FIRST_FULL[1], FIRST_FULL[0], FIRST_FULL[1])
        exchange, barrier = rings.levels + exchange_at + warpgroup * i32(exchange_bytes), i32(warpgroup + i32(1))
        index = i32(cuda.blockIdx.x)
        if reduces:
            while index < shape.rows.tiles:
                if warpgroup != 0:
                    state = pass_over(rings, shape.rounds, state, this)
                else:
                    state = reduce(transposed, rings, shape.rounds, state, this)
                    transpose(acc, transposed, exchange, barrier, warp, lane)
                    row = i32(warp * i32(16) + (lane >> i32(2)))
                    store_reduced(acc, shape.rows.low_rank, index, row, shape.rows.count, lane, this.leader)
                index = i32(index + i32(cuda.gridDim.x))
        while index < shape.tiles:
            # This thread's accumulators of C: rows `row` and row + 8, columns 8 b + 2 (lane % 4) and the next.
            _, _, end, tile_column = find_tile(index, shape.rows)
            row = i32(warp * i32(16) + (lane >> i32(2)))
            column = i32(i32(tile_column * i32(warpgroups) + warpgroup) * i32(tile_columns))
            pair = i32((column >> i32(1)) + (lane & i32(3)))
            index = i32(index + i32(cuda.gridDim.x))
            load_residual(words, residual, row, pair, end, shape.n)
            state = multiply(transposed, (f0, f1, f2, f3), raw, rings, shape.rounds, shape.rank_rounds, state, this)
            transpose(acc, transposed, exchange, barrier, warp, lane)
            add_addends(acc, bias, words, rings.stages, pair, shape.n, warp, lane)
            store_by_threads(acc, c, residual, row, pair, end, shape.n)

    return consume
