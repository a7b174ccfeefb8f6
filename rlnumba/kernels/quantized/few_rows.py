"""GEMM of up to 64 rows by a packed weight on sm_90: C = A W^T, with the bits of gemm/sm90.py on the weight's values.

A block computes tiles of C, all rows by `columns` rows of the weight. One warp starts bulk copies of packed words and
scales into a ring of their own, several stages ahead. Other warps widen them (widen.py) and write the values to a stage
of a second ring, where a warpgroup multiplies them by wgmma: 16 steps of the reduction at a time, in ascending order,
in one accumulator, as gemm/sm90.py does. One warp loads A by TMA. wgmma takes A from registers: of its 64 rows the
warps load those that A has, where wgmma would read all 64 from shared memory in each step. Or the weight is the first
operand, and A's rows the second: C^T = W A^T, which goes through shared memory to the threads that write C. wgmma reads
the weight from shared memory. Where the warps that multiply also widen it (few_rows_in_registers.py), wgmma takes it
from registers, and there are no warps that only widen.

    packed ring, one stage   [segment of rows, panel of 64 steps, words of the segment's rows]
    scales, one stage        [segment of rows, group, scales of the segment's rows]

With a low rank, C = A W^T + A' B'^T: stages of A' and B', both loaded by TMA, follow. A' may be a product of the same
kernel (gemm/reduction.py), whose tiles come first: of these TMA loads both operands. For SwiGLU a tile has the same
columns of gate and up. No kernel of a decode step writes a weight, which is copied without griddepcontrol_wait.

The device functions of the warps take the tiles of C from a function of the config, tile_function: here all rows of A
by one weight, or in grouped.py the rows of an expert by its weight.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.gemm.epilogue import addends, store_by_threads_function
from rlnumba.kernels.gemm.grouped_tiles import row_tile_functions
from rlnumba.kernels.gemm.reduction import (
    leave_reduced,
    reduced_tiles,
    reducing_operands,
    store_reduced_function,
    wait_once_for_reduced,
)
from rlnumba.kernels.gemm.sm90 import LowRank
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import (
    LINE,
    fence_proxy_async,
    load_function,
    load_words,
    store_function,
    store_words,
)
from rlnumba.kernels.ptx.warp import (
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    sync_warp,
)
from rlnumba.kernels.ptx.wgmma import STEPS
from rlnumba.kernels.quantized import few_rows_in_registers as in_registers
from rlnumba.kernels.quantized.few_rows_config import LEVELS_BYTES, packed_config
from rlnumba.kernels.quantized.few_rows_main_loop import multiply_function
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.kernels.quantized.formats import ROWS as TILE_ROWS
from rlnumba.kernels.quantized.ops import levels_by_lane
from rlnumba.kernels.quantized.widen import scale_function, widen_function
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring, shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

i32 = np.int32
load_float, store_float = load_function("f"), store_function("f")

# Architectures that the kernels of this module compile for.
ARCHITECTURES = [(9, 0, "a")]
# Indices of the warp that loads A, the one that loads the weight, and the first that widens, behind four that multiply.
A_LOADER, WEIGHT_LOADER, FIRST_WIDENER = 4, 5, 6


class PackedWeight(NamedTuple):
    """The arrays of a QuantizedWeight, flat; levels: those of nf4, each for 32 lanes.

    down, across: packed tiles; groups: of a row.
    """

    packed: object
    scales: object
    levels: object
    down: int
    across: int
    groups: int


class Rings(NamedTuple):
    """Addresses in shared memory: of both rings' first stages, of scales and nf4's levels, and of the mbarriers."""

    stages: int
    packed: int
    scales: int
    levels: int
    full: int
    empty: int
    packed_full: int
    packed_empty: int


class Shape(NamedTuple):
    """tiles of C; rounds: stages of the weight, and rank_rounds: of the low rank, for each tile; n: columns of C.

    rows: those of C; of a grouped config an ExpertRows; of one that reduces a ReducedRows, whose tiles count as well.
    """

    tiles: int
    rounds: int
    rank_rounds: int
    n: int
    rows: object


class ExpertRows(NamedTuple):
    """starts (E + 1,) int32 of the experts' rows; table: of their row tiles (gemm/grouped_tiles.py); tiles_across: of
    one row tile."""

    starts: object
    table: int
    tiles_across: int


class ReducedRows(NamedTuple):
    """count: rows of C; tiles: of A', which come first, of the ReducingLowRank low_rank."""

    count: int
    tiles: int
    low_rank: object


@functools.cache
def tile_function(config):
    """The device function find(index, rows) of the index-th tile of C, for Shape.rows: (expert, its first row, the end
    of its rows, its column among tiles, below 0 for a tile of A'). All lanes of a warp call that of a grouped config.
    """
    tile_rows = i32(config.rows)
    _, find_tile = row_tile_functions(config.rows)

    @device_function
    def find_of_expert(index, rows):
        expert, first_row, end, tile_column = find_tile(index, rows.table, rows.starts, rows.tiles_across)
        return expert, first_row, min(end, i32(first_row + tile_rows)), tile_column

    @device_function
    def find_behind_reduced(index, rows):
        return i32(0), i32(0), i32(rows.count), i32(index - rows.tiles)

    @device_function
    def find(index, rows):
        return i32(0), i32(0), i32(rows), index

    return find_of_expert if config.grouped else find_behind_reduced if config.reduces else find


@functools.cache
def a_loader_function(config):
    """The device function of the warp that loads A, and of a low rank A' and B', by TMA."""
    panels, rows, columns, tile_columns = config.panels, config.rows, config.columns, config.tile_columns
    a_bytes, b_bytes, stage_bytes, swiglu = config.a_bytes, config.b_bytes, config.stage_bytes, config.swiglu
    low_rank, reduces, a_at, b_at = config.low_rank, config.reduces, config.a_at, config.b_at
    _, advance = ring(config.stages)
    find_tile = tile_function(config)

    @device_function
    def load(a_map, rank_a_map, rank_b_map, rings, shape, lane):
        """Lane 0 starts the copies; no other lane need call this, unless the config is grouped."""
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        last_round = i32(shape.rounds + shape.rank_rounds)
        if reduces:
            waits = i32(1)
        while index < shape.tiles:
            _, first_row, _, tile_column = find_tile(index, shape.rows)
            done = i32(0)
            if reduces:
                last_round = i32(shape.rounds + shape.rank_rounds) if tile_column >= 0 else shape.rounds
            while done < last_round:
                sm90.mbarrier_wait(rings.empty + stage * MBARRIER_BYTES, parity)
                stage_full, boxes = rings.full + stage * MBARRIER_BYTES, rings.stages + stage * stage_bytes
                if low_rank and done >= shape.rounds:
                    sm90.mbarrier_expect_tx(stage_full, i32(a_bytes + b_bytes))
                    if reduces:
                        waits = wait_once_for_reduced(waits, shape.rows.low_rank, shape.rows.tiles)
                    for panel in range(panels):
                        step = i32((done - shape.rounds) * i32(panels * STEPS) + i32(panel * STEPS))
                        sm90.tma_load_2d(boxes + a_at + panel * rows * LINE, rank_a_map, step, i32(0), stage_full)
                        b_box = boxes + b_at + panel * columns * LINE
                        column = i32(tile_column * i32(tile_columns))
                        sm90.tma_load_2d(b_box, rank_b_map, step, column, stage_full)
                        if swiglu:
                            column = i32(column + shape.n)
                            sm90.tma_load_2d(b_box + tile_columns * LINE, rank_b_map, step, column, stage_full)
                elif lane == 0:
                    sm90.mbarrier_expect_tx(stage_full, i32(a_bytes))
                    for panel in range(panels):
                        step = i32(done * i32(panels * STEPS) + i32(panel * STEPS))
                        sm90.tma_load_2d(boxes + a_at + panel * rows * LINE, a_map, step, first_row, stage_full)
                done = i32(done + i32(1))
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))
        if reduces:
            leave_reduced(shape.rows.low_rank)

    return load


@functools.cache
def weight_loader_function(config):
    """The device function of the warp that copies packed words and scales: each lane a segment, or a part of one."""
    panels, tile_columns, swiglu, whole = config.panels, config.tile_columns, config.swiglu, config.whole_tiles
    packed_bytes, scales_bytes, groups, rows = (
        config.packed_bytes, config.scales_bytes, config.stage_groups, config.segment_rows,
    )  # fmt: skip
    segments, row_words, group_tiles = config.columns // rows, config.line_bytes // 4, config.group_tiles
    tile_words = TILE_ROWS * row_words
    # Panels, and groups, of a copy: those of whole tiles follow each other.
    copy_panels, copy_groups = (panels, groups) if whole else (1, 1)
    parts, scale_parts = panels // copy_panels, groups // copy_groups
    copy_words, copy_scales = copy_panels * rows * row_words, copy_groups * rows
    _, advance = ring(config.packed_stages)
    find_tile, grouped, halves = tile_function(config), config.grouped, 2 if swiglu else 1
    reduces = config.reduces

    @device_function
    def first_row(segment, expert, tile_column, weight, n):
        """The first row of a segment of a tile of C."""
        row = i32(segment * i32(rows))
        if swiglu and row >= tile_columns:
            row = i32(row + n - i32(tile_columns))
        if grouped:
            row = i32(row + expert * i32(n * i32(halves)))
        # Rows beyond the packed tiles have columns beyond C: any other rows do.
        return min(i32(tile_column * i32(tile_columns) + row), i32(weight.down * TILE_ROWS - rows))

    @device_function
    def load(weight, rings, shape, lane):
        stage, parity = FIRST_EMPTY
        index = i32(cuda.blockIdx.x)
        if reduces:
            while index < shape.rows.tiles:
                index = i32(index + i32(cuda.gridDim.x))
        while index < shape.tiles:
            expert, _, _, tile_column = find_tile(index, shape.rows)
            row = first_row(lane // i32(parts), expert, tile_column, weight, shape.n)
            # A weight may have more than 2^31 words.
            source = np.int64(row // i32(TILE_ROWS)) * (weight.across * tile_words)
            source += np.int64(i32(row % i32(TILE_ROWS)) * i32(row_words) + lane % i32(parts) * i32(tile_words))
            row = first_row(lane // i32(scale_parts), expert, tile_column, weight, shape.n)
            row_scales = np.int64(row // i32(TILE_ROWS)) * (weight.groups * TILE_ROWS)
            row_scales += np.int64(i32(row % i32(TILE_ROWS)) + lane % i32(scale_parts) * i32(TILE_ROWS))
            done = i32(0)
            while done < shape.rounds:
                sm90.mbarrier_wait(rings.packed_empty + stage * MBARRIER_BYTES, parity)
                stage_full = rings.packed_full + stage * MBARRIER_BYTES
                if lane == 0:
                    sm90.mbarrier_expect_tx(stage_full, i32(packed_bytes + scales_bytes))
                sync_warp()
                if lane < segments * parts:
                    target = rings.packed + stage * packed_bytes + lane * i32(copy_words * 4)
                    sm90.bulk_copy_load(target, weight.packed, source, i32(copy_words), stage_full)
                if lane < segments * scale_parts:
                    target = rings.scales + stage * scales_bytes + lane * i32(copy_scales * 4)
                    group = np.int64(i32(done * i32(panels) // i32(group_tiles)) * i32(TILE_ROWS))
                    sm90.bulk_copy_load(target, weight.scales, row_scales + group, i32(copy_scales), stage_full)
                source += panels * tile_words
                done = i32(done + i32(1))
                stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))

    return load


@functools.cache
def widener_function(config):
    """The device function of a warp that widens: of each stage the same rows, in `loads` of its panels."""
    form, loads, panels, columns = FORMATS[config.form], config.loads, config.panels, config.columns
    load_rows, loads_down, line_bytes = config.load_rows, config.loads_down, config.line_bytes
    stage_bytes, b_at, packed_bytes, scales_bytes = (
        config.stage_bytes, config.b_at, config.packed_bytes, config.scales_bytes,
    )  # fmt: skip
    rows, groups, group_tiles, low_rank = config.segment_rows, config.stage_groups, config.group_tiles, config.low_rank
    b_bytes, reduces = config.b_bytes, config.reduces
    # Lanes of a row, vectors of eight values of a lane, and words of one.
    row_lanes, vectors, vector_words = line_bytes // 16, 32 // form.bits // 2, form.bits // 4
    panels_apart, panel_bytes, local_words = config.warps // loads_down, columns * LINE, loads * 4
    widen, scale_of = widen_function(form, config.element), scale_function(form, config.element)
    warps, teams = config.warps, config.teams
    (_, advance), (_, advance_packed) = ring(config.stages), ring(config.packed_stages)

    @device_function
    def load_lane(words, scales, packed, stage_scales, warp, lane):
        """This lane's words, and the scales of its row."""
        row, panel = i32(i32(warp % i32(loads_down)) * i32(load_rows)), i32(warp // i32(loads_down))
        segment, row = i32(row // i32(rows)), i32(row % i32(rows))
        packed += i32(i32(segment * i32(panels) + panel) * i32(rows * line_bytes) + row * i32(line_bytes))
        packed += lane * i32(16)
        stage_scales += i32(i32(segment * i32(groups * rows) + row + lane // i32(row_lanes)) * i32(4))
        for i in range(loads):
            found = load_words(packed + i * panels_apart * rows * line_bytes)
            for j in range(4):
                words[i * 4 + j] = found[j]
            group = i32(i32(panel + i32(i * panels_apart)) // i32(group_tiles))
            scales[i] = load_float(stage_scales + group * i32(rows * 4))

    @device_function
    def widen_words(words, scales, stage_b, warp, lane, table):
        """Write the values of this lane's words to a stage."""
        row = i32(i32(warp % i32(loads_down)) * i32(load_rows) + lane // i32(row_lanes))
        chunk = i32(i32(lane % i32(row_lanes)) * i32(vectors)) ^ (row & i32(7))
        line = stage_b + i32(warp // i32(loads_down)) * i32(panel_bytes) + row * i32(LINE)
        for i in range(loads):
            scale = scale_of(scales[i])
            for j in range(vectors):
                first = i * 4 + j * vector_words
                w0, w1, w2, w3 = widen(words[first], words[first + vector_words - 1], scale, table)
                target = line + i * panels_apart * panel_bytes + ((chunk ^ i32(j)) << i32(4))
                store_words(target, w0, w1, w2, w3)

    @device_function
    def pass_stage(rings, stage, parity, lane):
        """Leave a stage to the low rank, which TMA loads."""
        sm90.mbarrier_wait(rings.empty + stage * MBARRIER_BYTES, parity)
        sync_warp()
        if lane == 0:
            sm90.mbarrier_arrive(rings.full + stage * MBARRIER_BYTES)

    @device_function
    def load_reducing(rings, reducing_map, done, tile, stage, parity, warp, lane):
        """Load a stage of the adapter's A, a weight, by TMA, to where a tile of C has widened words."""
        sm90.mbarrier_wait(rings.empty + stage * MBARRIER_BYTES, parity)
        sync_warp()
        if lane == 0:
            full = rings.full + stage * MBARRIER_BYTES
            if warp == 0:
                sm90.mbarrier_expect_tx(full, i32(b_bytes))
                box = rings.stages + stage * stage_bytes + b_at
                for panel in range(panels):
                    at, step = box + panel * panel_bytes, i32(done * i32(panels * STEPS) + i32(panel * STEPS))
                    sm90.tma_load_2d(at, reducing_map, step, i32(tile * columns), full)
            else:
                sm90.mbarrier_arrive(full)

    @device_function
    def widen_stage(words, scales, rings, stage, parity, packed_stage, packed_parity, warp, lane):
        sm90.mbarrier_wait(rings.packed_full + packed_stage * MBARRIER_BYTES, packed_parity)
        packed, stage_scales = packed_stage * packed_bytes, packed_stage * scales_bytes
        load_lane(words, scales, rings.packed + packed, rings.scales + stage_scales, warp, lane)
        sm90.mbarrier_wait(rings.empty + stage * MBARRIER_BYTES, parity)
        table = rings.levels + lane * i32(4)
        widen_words(words, scales, rings.stages + stage * stage_bytes + b_at, warp, lane, table)
        fence_proxy_async()
        sync_warp()
        if lane == 0:
            sm90.mbarrier_arrive(rings.full + stage * MBARRIER_BYTES)
            sm90.mbarrier_arrive(rings.packed_empty + packed_stage * MBARRIER_BYTES)

    @device_function
    def widen_all(rings, shape, warp, lane):
        """warp: of all that widen. Each team takes the rounds whose number within a tile is its own modulo teams, so
        that a stage of the packed ring is always the same team's (few_rows_config.py:has_turns)."""
        words = cuda.local.array(local_words, np.int32)
        scales = cuda.local.array(loads, np.float32)
        team, warp = i32(warp // i32(warps)), i32(warp % i32(warps))
        stage, parity = FIRST_EMPTY
        packed_stage, packed_parity = FIRST_FULL
        index = i32(cuda.blockIdx.x)
        if reduces:
            reducing_map = sm90.tensor_map_address(shape.rows.low_rank.reducing_map)
            while index < shape.rows.tiles:
                for done in range(shape.rounds):
                    if i32(done) % i32(teams) == team:
                        load_reducing(rings, reducing_map, i32(done), index, stage, parity, warp, lane)
                    stage, parity = advance(stage, parity)
                index = i32(index + i32(cuda.gridDim.x))
        while index < shape.tiles:
            done = i32(0)
            while done < shape.rounds:
                if done % i32(teams) == team:
                    widen_stage(words, scales, rings, stage, parity, packed_stage, packed_parity, warp, lane)
                stage, parity = advance(stage, parity)
                packed_stage, packed_parity = advance_packed(packed_stage, packed_parity)
                done = i32(done + i32(1))
            if low_rank:
                for done_of_rank in range(shape.rank_rounds):
                    if i32(done_of_rank) % i32(teams) == team:
                        pass_stage(rings, stage, parity, lane)
                    stage, parity = advance(stage, parity)
            index = i32(index + i32(cuda.gridDim.x))

    return widen_all


@functools.cache
def consumer_function(config):
    """The device function of the warpgroup that multiplies and writes C."""
    tile_columns, accumulators, a_words = config.tile_columns, config.columns // 2, STEPS // 4
    residual_words = config.columns // 4 if config.residual else 1
    load_residual, _, add_addends = addends(config.epilogue)
    store_by_threads, multiply = store_by_threads_function(config.epilogue), multiply_function(config)
    find_tile, reduces, store_reduced = tile_function(config), config.reduces, store_reduced_function(config)

    @device_function
    def consume(rings, thread, c, residual, bias, shape):
        lane, warp, leader = thread & i32(31), sm90.warp_uniform(thread >> i32(5)), thread == 0
        acc = cuda.local.array(accumulators, np.float32)
        w0 = cuda.local.array(a_words, np.int32)
        w1 = cuda.local.array(a_words, np.int32)
        w2 = cuda.local.array(a_words, np.int32)
        w3 = cuda.local.array(a_words, np.int32)
        words = cuda.local.array(residual_words, np.int32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        for i in range(a_words):
            w0[i] = w1[i] = w2[i] = w3[i] = i32(0)
        stage, parity = FIRST_FULL
        rounds = i32(shape.rounds + shape.rank_rounds)
        index = i32(cuda.blockIdx.x)
        if reduces:
            operands = w0, w1, w2, w3
            while index < shape.rows.tiles:
                stage, parity = multiply(acc, operands, rings, shape.rounds, stage, parity, leader, warp, lane)
                row = i32(warp * i32(16) + (lane >> i32(2)))
                store_reduced(acc, shape.rows.low_rank, index, row, shape.rows.count, lane, leader)
                index = i32(index + i32(cuda.gridDim.x))
        while index < shape.tiles:
            # This thread's accumulators: rows `row` and row + 8, columns 8 b + 2 (lane % 4) and the next.
            _, first_row, end, tile_column = find_tile(index, shape.rows)
            row = i32(first_row + warp * i32(16) + (lane >> i32(2)))
            pair = i32((tile_column * i32(tile_columns) >> i32(1)) + (lane & i32(3)))
            index = i32(index + i32(cuda.gridDim.x))
            load_residual(words, residual, row, pair, end, shape.n)
            operands = w0, w1, w2, w3
            stage, parity = multiply(acc, operands, rings, rounds, stage, parity, leader, warp, lane)
            add_addends(acc, bias, words, rings.stages, pair, shape.n, warp, lane)
            store_by_threads(acc, c, residual, row, pair, end, shape.n)

    return consume


@functools.cache
def init_rings_function(config):
    """The device function of all threads that returns the Rings, whose mbarriers and levels it has begun to write."""
    has_levels, threads, layout = config.form == "nf4", config.threads, config.layout
    # Arrivals at a stage's mbarriers: of its writers, besides TMA, and its readers; of the readers of packed words.
    writers, readers, packed_readers = config.warps, max(config.warpgroups, 1), config.packed_readers
    (init_ring, _), (init_packed_ring, _) = ring(config.stages), ring(config.packed_stages)

    @device_function
    def init_rings(base, weight, thread):
        rings = Rings(
            base, base + layout.packed, base + layout.scales, base + layout.levels, base + layout.full,
            base + layout.empty, base + layout.packed_full, base + layout.packed_empty,
        )  # fmt: skip
        if thread == 0:
            init_ring(rings.full, rings.empty, writers + 1, readers)
            init_packed_ring(rings.packed_full, rings.packed_empty, 1, packed_readers)
            sm90.mbarrier_init_fence()
        if has_levels:
            for i in range(thread, LEVELS_BYTES // 4, threads):
                store_float(rings.levels + i32(4 * i), weight.levels[i])
        return rings

    return init_rings


@specialize
def packed_gemm_kernel(config):
    """The kernel of a config. N is a multiple of 8, with SwiGLU of 16; K of the steps of a stage."""
    panels, tile_columns, low_rank, reduces = config.panels, config.tile_columns, config.low_rank, config.reduces
    init_rings, load_weight, columns = init_rings_function(config), weight_loader_function(config), config.part.columns
    rank_steps, has_wideners, first_loader = config.rank_panels * STEPS, not config.warpgroups, 4 * config.warpgroups
    if has_wideners:
        load_a, widen_all, consume = a_loader_function(config), widener_function(config), consumer_function(config)
    else:
        (load_a, consume), widen_all = in_registers.functions(config, tile_function(config)), None
    # Each of 512 threads has 128 registers, or four of them 3 x 152 + 56.
    reallocates_registers = config.reallocates_registers
    keep_few, take_more = sm90.setmaxnreg(56, False), sm90.setmaxnreg(152, True)

    @device_function
    def load_by_tma(a_map, rank_a_map, rank_b_map, rings, shape):
        maps = sm90.tensor_map_address(a_map), sm90.tensor_map_address(rank_a_map)
        rank_b_address = sm90.tensor_map_address(rank_b_map)
        sm90.prefetch_tensor_map(maps[0])
        griddepcontrol_wait()
        load_a(maps[0], maps[1], rank_b_address, rings, shape, i32(0))

    @supports_pdl
    @cuda.jit(launch_bounds=(config.threads, 1))
    def packed_gemm_kernel(a_map, weight, rank_operands, c, residual, bias, m, n, k):
        """C (m, n) from A (m, k) and a PackedWeight (n, k); with SwiGLU (2 n, k), C (m, 2 n), and `residual` (m, n) is
        written.

        rank_operands: a LowRank if config.low_rank, a ReducingLowRank if config.reduces. c, residual, bias: pairs of 16
        bits; those that the config does not use have no elements. Shared memory: PackedGemmConfig.layout.
        """
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & i32(31), sm90.warp_uniform(thread >> i32(5))
        rings = init_rings(shared_base(), weight, thread)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        tiles = i32((n + tile_columns - 1) // tile_columns)
        rank_rounds = i32(0)
        if low_rank:
            rank_a_map, rank_b_map = rank_operands.a_map, rank_operands.b_map
            rank_rounds = i32((rank_operands.rank + rank_steps - 1) // rank_steps)
        else:
            rank_a_map, rank_b_map = a_map, a_map
        if reduces:
            first_tiles = reduced_tiles(i32(rank_operands.rank), i32(columns))
            rows, tiles = ReducedRows(i32(m), first_tiles, rank_operands), i32(tiles + first_tiles)
        else:
            rows = m
        shape = Shape(tiles, i32(k // (panels * STEPS)), rank_rounds, i32(n), rows)
        if has_wideners:
            if warp >= FIRST_WIDENER:
                widen_all(rings, shape, i32(warp - i32(FIRST_WIDENER)), lane)
            elif warp == WEIGHT_LOADER:
                load_weight(weight, rings, shape, lane)
            elif warp == A_LOADER:
                if lane == 0:
                    load_by_tma(a_map, rank_a_map, rank_b_map, rings, shape)
            else:
                griddepcontrol_wait()
                consume(rings, thread, c, residual, bias, shape)
        elif warp >= first_loader:
            if reallocates_registers:
                keep_few()
            if warp == first_loader:
                load_weight(weight, rings, shape, lane)
            elif warp == first_loader + 1 and lane == 0:
                load_by_tma(a_map, rank_a_map, rank_b_map, rings, shape)
        else:
            if reallocates_registers:
                take_more()
            griddepcontrol_wait()
            consume(rings, thread, c, residual, bias, shape)

    return packed_gemm_kernel


def gemm(x, weight, out, bias=None, residual=None, low_rank=None, reduction=None):
    """out = X W^T + bias + residual + A' B'^T of a QuantizedWeight W, with low_rank (A', B').

    reduction: the Reduction of which A' is written first, or None.
    """
    fields = x.dtype.name, bias is not None, residual is not None, False, low_rank is not None
    config = config_for(x, weight, out.shape[1], fields)._replace(reduces=reduction is not None)
    gemm_with_config(config, x, weight, out, bias, residual, low_rank, reduction)


def gemm_swiglu(x, weight, gate_up, out, low_rank=None, activation="silu", reduction=None):
    """gate_up = X W^T (+ A' B'^T) and out = activation(gate) * up, for W (2 F, K); reduction: as gemm's."""
    fields = x.dtype.name, False, False, True, low_rank is not None, activation
    config = config_for(x, weight, out.shape[1], fields)._replace(reduces=reduction is not None)
    gemm_with_config(config, x, weight, gate_up, None, out, low_rank, reduction)


def config_for(x, weight, n, fields):
    """The config for these arrays; fields: of PackedGemmConfig from `element` on."""
    return packed_config(len(x), n, x.shape[1], weight.form.name, weight.group_size, device.sm_count(), fields)


def packed_operand(weight):
    """The PackedWeight of a QuantizedWeight."""
    arrays = weight.packed.reshape(-1), weight.scales.reshape(-1), levels_by_lane()
    return PackedWeight(*arrays, *weight.packed.shape[:2], weight.scales.shape[1])


def gemm_with_config(config, x, weight, out, bias=None, residual=None, low_rank=None, reduction=None):
    """gemm, or gemm_swiglu, of which `residual` is the output, by the kernel of `config`."""
    m, n = residual.shape if config.swiglu else out.shape
    a_box, b_box, part = (config.rows, STEPS), (config.rank_box_rows, STEPS), config.part
    rank_operands, tiles = 0, -(-n // config.tile_columns)
    if config.reduces:
        rank_operands = reducing_operands(low_rank, reduction, a_box, b_box, config.reducing_box_rows)
        tiles += -(-len(reduction.a) // part.columns)
    elif config.low_rank:
        rank_operands = LowRank(tensor_map(low_rank[0], *a_box), tensor_map(low_rank[1], *b_box), low_rank[0].shape[1])
    addend = unused(2) if residual is None else residual.view(np.int32)
    bias = unused() if bias is None else bias.view(np.int32)
    grid = min(tiles, device.sm_count())
    launch(
        packed_gemm_kernel(config), grid, config.threads, tensor_map(x, *a_box), packed_operand(weight), rank_operands,
        out.view(np.int32), addend, bias, m, n, x.shape[1], shared=config.layout.nbytes,
    )  # fmt: skip
