"""The sm_90 kernel of the log-prob: a GEMM whose epilogue takes what is needed of a tile of logits from registers.

A block computes tiles of 64 rows for each consumer warpgroup x 256 columns, as kernels/gemm/sm90.py does. The config's
mode is what the consumers then do with their accumulators:

    forward        each quad of threads folds its rows of the tile to four numbers in the order of kernels/nn/row_sum.py
                   (largest, sum of exponentials, the entropy's sum, first column of the largest)
    exponentials   the same as forward, and the exponentials themselves are stored in 16 bits
    dlogits        with lse known, dz = dlogp / T (onehot - p), less dentropy / T p (log p + entropy) where the
                   config has entropy, is stored in 16 bits
    split_k        the accumulators are stored in float32, a partial sum of A B for each split of the reduction

While the epilogue of one consumer takes exponentials, the tensor cores serve the other: the second consumer starts each
tile `stagger` rounds late, so their epilogues do not coincide.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.gemm.scheduler import tile_coordinates
from rlnumba.kernels.gemm.sm90 import main_loop_function
from rlnumba.kernels.logprob.terms import VANISHED, entropy_terms
from rlnumba.kernels.nn.row_sum import LOG2_E, NONE, TILE_COLUMNS, exponentials_of_sixteen, join, largest_of_sixteen
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, fence_proxy_async
from rlnumba.kernels.ptx.warp import (
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shuffle_xor,
    udiv,
)
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS, WARPGROUP, wgmma_async
from rlnumba.kernels.tile.pipeline import (
    FIRST_EMPTY,
    FIRST_FULL,
    MBARRIER_BYTES,
    ring,
    shared_base,
    shared_layout,
    stage_function,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32 = np.int32

ARCHITECTURES = [(9, 0, "a")]

# Numbers that a row of a tile is folded to: largest, sum, entropy's sum, first column of the largest.
RESULTS = 4
# Powers of two by which an exponential may exceed 1: far below what bfloat16 holds, times what a row adds up. None in
# float16, whose exponentials are all relative to their tile's largest logit.
MAX_EXPONENT = {"bfloat16": 64.0, "float16": -1e30}


class TileRows(NamedTuple):
    """Arrays (m,) that the consumers read; those that a mode does not use have no elements.

    ids: of all modes but "split_k"; lse, dlogp, and with entropy also entropy and dentropy: of "dlogits";
    reference_logits: of "exponentials"; thresholds: where logits are masked.
    """

    ids: object
    lse: object
    dlogp: object
    entropy: object
    dentropy: object
    reference_logits: object
    thresholds: object


class TileResults(NamedTuple):
    """results (m tiles RESULTS,): of each row and tile; target_logits (m,): the logits of ids."""

    results: object
    target_logits: object


class TileShape(NamedTuple):
    """Sizes of a GEMM; first_id: of B's first row; split_rounds: of "split_k"; stage_nbytes: of a stage's boxes."""

    m: int
    n: int
    k: int
    first_id: int
    split_rounds: int
    stage_nbytes: int


class LogprobConfig(NamedTuple):
    """One kernel of this module. element: "float16" or "bfloat16"; consumers: warpgroups, 64 rows each.

    mode: "forward", "dlogits", "exponentials" or "split_k" (A B with B MN-major). stagger: rounds by which the second
    consumer starts later. boxes: of 8 KiB through which a consumer stores its output, 2 or 4. entropy, top1: whether
    they are wanted; with "dlogits", entropy: whether the loss has a derivative by it. masked: whether logits below
    their row's threshold count as -inf; not with "exponentials", whose registers would spill.
    """

    element: str
    mode: str
    consumers: int = 2
    stages: int = 4
    stagger: int = 2
    boxes: int = 2
    entropy: bool = False
    top1: bool = False
    masked: bool = False

    @property
    def rows(self):
        return ROWS * self.consumers

    @property
    def box_columns(self):
        """Columns of the output in a 128-byte line."""
        return 32 if self.mode == "split_k" else 64

    @property
    def staged_bytes(self):
        return 0 if self.mode == "forward" else self.boxes * BOX_BYTES

    @property
    def a_bytes(self):
        return self.rows * LINE

    @property
    def stage_bytes(self):
        return self.a_bytes + TILE_COLUMNS * LINE

    @property
    def layout(self):
        """Shared memory: stages of [A | B], staged output, barriers of the stages, and the one between consumers."""
        stages, barriers = self.stages * self.stage_bytes, self.stages * MBARRIER_BYTES
        staged = self.consumers * self.staged_bytes
        return shared_layout(stages=stages, staged=staged, full=barriers, empty=barriers, stagger=MBARRIER_BYTES)


def can_stagger(config, rounds):
    """Whether the second consumer may start tiles of so many rounds late.

    The barrier between the two has one phase a tile, so the first must not complete it twice while the second waits:
    the stages, which both must release, have to stop it before.
    """
    return config.consumers == 2 and rounds + min(config.stagger, rounds - 1) + 1 > config.stages


@functools.cache
def scheduler(config):
    """(schedule, work): the tiles of a block."""
    rows, split_k = config.rows, config.mode == "split_k"

    @device_function
    def schedule(m, n, k, split_rounds):
        """(tiles, stride, split_tiles, tiles_down, tiles_across, rounds, split_rounds), what `work` takes.

        Block b computes tiles b, b + stride, ...
        """
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + TILE_COLUMNS - 1) // TILE_COLUMNS)
        rounds = i32((k + STEPS - 1) // STEPS)
        split_tiles = tiles_down * tiles_across
        tiles = split_tiles
        if split_k:
            tiles *= i32((rounds + split_rounds - 1) // split_rounds)
        stride = i32(cuda.gridDim.x)
        if split_k and tiles - split_tiles < stride:
            # Tiles of the last split, which may be shorter, are left to the blocks without one of the others.
            stride = i32(stride - (tiles - split_tiles)) if cuda.blockIdx.x >= tiles - split_tiles else tiles
        return tiles, stride, split_tiles, tiles_down, tiles_across, rounds, split_rounds

    @device_function
    def work(index, schedule):
        """(tile_row, tile_column, split, rounds) of the index-th tile."""
        _, _, split_tiles, tiles_down, tiles_across, rounds, split_rounds = schedule
        split = i32(0)
        if split_k:
            split = udiv(i32(index), split_tiles)
            rounds = min(i32(split_rounds), i32(rounds - split * split_rounds))
        tile_row, tile_column = tile_coordinates(i32(index) - split * split_tiles, tiles_down, tiles_across)
        return tile_row, tile_column, split, rounds

    return schedule, work


@functools.cache
def producer_function(config):
    """The device function of the thread that loads A and B of all tiles of a block."""
    layout, split_k, rows = config.layout, config.mode == "split_k", config.rows
    a_bytes, stage_bytes = config.a_bytes, config.stage_bytes
    _, advance = ring(config.stages)
    _, work = scheduler(config)

    @device_function
    def produce(a, b, base, nbytes, schedule):
        """nbytes: of a stage's boxes."""
        tiles, stride, _, _, _, _, split_rounds = schedule
        full, empty = base + layout.full, base + layout.empty
        stage, parity = FIRST_EMPTY
        for index in range(i32(cuda.blockIdx.x), tiles, stride):
            tile_row, tile_column, split, rounds = work(index, schedule)
            first_row, first_column = tile_row * rows, tile_column * TILE_COLUMNS
            first_step = i32(split * split_rounds) * i32(STEPS) if split_k else i32(0)
            for done in range(rounds):
                sm90.mbarrier_wait(empty + stage * MBARRIER_BYTES, parity)
                stage_full, target = full + stage * MBARRIER_BYTES, base + stage * stage_bytes
                sm90.mbarrier_expect_tx(stage_full, nbytes)
                step = first_step + i32(done) * i32(STEPS)
                sm90.tma_load_2d(target, a, step, first_row, stage_full)
                if split_k:
                    for box in range(TILE_COLUMNS // 64):
                        sm90.tma_load_2d(
                            target + a_bytes + box * BOX_BYTES, b, first_column + box * 64, step, stage_full
                        )
                else:
                    sm90.tma_load_2d(target + a_bytes, b, step, first_column, stage_full)
                stage, parity = advance(stage, parity)

    return produce


# The functions below work on a thread's accumulators of one row of a tile, acc[begin + 4 b + c], b < 32, c < 2: columns
# 8 b + c from this lane's first; or on sixteen of them, b < 8 (a part). Loops over parts are written out, for an index
# that the compiler does not know would put the accumulators into memory.


@device_function
def mask_columns(acc, column, n):
    """-inf for the columns of a tile from n on, of both rows of a thread; column: that of acc[0]."""
    for i in range(0, TILE_COLUMNS // 2, 2):
        for c in range(2):
            if column + i32(i // 4 * 8 + c) >= n:
                acc[i + c] = np.float32(-math.inf)


@device_function
def mask_below(acc, thresholds, row, m):
    """-inf for the logits of a tile that are below the threshold of their row, of rows `row` and row + 8 below m."""
    for half in range(2):
        threshold = thresholds[row + 8 * half] if row + 8 * half < m else np.float32(-math.inf)
        for i in range(0, TILE_COLUMNS // 2, 4):
            for c in range(2):
                if acc[i + 2 * half + c] < threshold:
                    acc[i + 2 * half + c] = np.float32(-math.inf)


@device_function
def logit_of_column(acc, begin, target):
    """The logit of column `target`, counted from this lane's first, of a row of a tile; 0 if it is another lane's."""
    logit = np.float32(0.0)
    for b in range(TILE_COLUMNS // 8):
        for c in range(2):
            if target == 8 * b + c:
                logit = acc[begin + 4 * b + c]
    return logit


@device_function
def exponent_base(largest, reference, factor, max_exponent):
    """The logit whose exponential is 1 in a tile with this largest one: the row's reference, if that is near enough."""
    return reference if (largest - reference) * factor <= max_exponent else largest


@functools.cache
def store_function(config):
    """The device function with which a consumer stores its accumulators, box_columns at a time, by TMA.

    It uses its boxes of shared memory in turn. One thread, of another warp for each box, issues the box's store and
    waits for it. The boxes divide the pieces of a tile, so the first one is free when a tile begins.
    """
    boxes, box_columns = config.boxes, config.box_columns
    stage = stage_function(config.element, box_columns, config.mode == "split_k")

    @device_function
    def store_columns(acc, piece, output):
        """Store the accumulators of the piece-th box_columns columns of a tile, and wait until the next box is free.

        output: (tensor map, first column and row of the tile, address of the boxes, warpgroup, warp, lane).
        """
        out_map, column, row, staged, group, warp, lane = output
        box = staged + piece % boxes * BOX_BYTES
        stage(acc, piece * box_columns // 2, box, warp, lane)
        fence_proxy_async()
        if warp == (piece + 1) % boxes and lane == 0:
            sm90.bulk_wait_group_read()
        sm90.named_barrier_sync(group, WARPGROUP)
        if warp == piece % boxes and lane == 0:
            sm90.tma_store_2d(sm90.tensor_map_address(out_map), column + piece * box_columns, row, box)
            sm90.bulk_commit_group()

    return store_columns


@functools.cache
def forward_epilogue(config):
    """The device function that folds a tile's logits to results, and stores their exponentials if they are wanted."""
    exponentials, max_exponent = config.mode == "exponentials", np.float32(MAX_EXPONENT[config.element])
    entropy, top1, store_columns = config.entropy, config.top1, store_function(config)

    @device_function
    def fold_part(acc, begin, part, largest, base, factor, sums):
        """The sums (largest, total, weighted, top) of the parts before and this one.

        acc become exponentials, relative to `base` if they are wanted.
        """
        top = sums[3]
        if top1:
            part_top = i32(0)
            for b in range(7, -1, -1):
                for c in range(1, -1, -1):
                    if acc[begin + 4 * b + c] == largest:
                        part_top = i32(64 * part + 8 * b + c)
            # A lane's columns ascend: the first of equals stays.
            if largest > sums[0]:
                top = part_top
        total, weighted = exponentials_of_sixteen(acc, begin, 4, largest, factor, entropy)
        if exponentials:
            scale = exp2((largest - base) * factor)
            for b in range(8):
                for c in range(2):
                    acc[begin + 4 * b + c] *= scale
        largest, total, weighted = join(sums[0], sums[1], sums[2], largest, total, weighted, factor)
        return largest, total, weighted, top

    @device_function
    def fold_lanes(sums, distance, factor):
        """The sums of this lane and the one at a distance."""
        largest, total, weighted, top = sums
        other, other_total = shuffle_xor(largest, distance), shuffle_xor(total, distance)
        other_weighted = np.float32(0.0)
        if entropy:
            other_weighted = shuffle_xor(weighted, distance)
        if top1:
            other_top = i32(shuffle_xor(top, distance))
            if other > largest or (other == largest and other_top < top):
                top = other_top
        largest, total, weighted = join(largest, total, weighted, other, other_total, other_weighted, factor)
        return largest, total, weighted, top

    @device_function
    def store_result(sums, start_column, quad_lane, factor, results, at):
        """Join the sums of a quad's lanes to results[at] (this lane's of the four; none if at < 0)."""
        sums = sums[0], sums[1], sums[2], i32(sums[3] + start_column + quad_lane * 2)
        sums = fold_lanes(sums, 1, factor)
        sums = fold_lanes(sums, 2, factor)
        if at >= 0:
            # Each lane of the quad writes one of the four.
            low = sums[1] if quad_lane == 1 else sums[0]
            high = np.float32(sums[3]) if quad_lane == 3 else sums[2]
            results[at] = high if quad_lane >= 2 else low

    @device_function
    def fold_rows(acc, part, largest, base, factor, sums, output):
        """A part of both rows of a thread."""
        begin = 32 * part
        first = fold_part(acc, begin, part, largest[part], base[0], factor, sums[0])
        second = fold_part(acc, begin + 2, part, largest[part + 4], base[1], factor, sums[1])
        if exponentials:
            store_columns(acc, part, output)
        return first, second

    @device_function
    def epilogue(acc, tile, quad_lane, factor, targets, references, results, target_logits, output):
        """tile: (this thread's first row, m, column of the tile, tiles across); targets, references: its two rows'."""
        largest, bases = cuda.local.array(8, np.float32), cuda.local.array(2, np.float32)
        at = cuda.local.array(2, np.int64)
        row, m, tile_column, tiles_across = tile
        start_column = i32(tile_column * TILE_COLUMNS)
        for half in range(2):
            at[half] = -1
            if row + half * 8 < m:
                at[half] = (np.int64(row + half * 8) * tiles_across + tile_column) * RESULTS + quad_lane
            # A lane has the columns 0, 1, 8, 9, 16, ... from its first.
            if i32(0) <= targets[half] < i32(TILE_COLUMNS) and targets[half] & i32(6) == 0:
                target_logits[row + half * 8] = logit_of_column(acc, half * 2, targets[half])
            at_half = half * 4
            for part in range(4):
                largest[at_half + part] = largest_of_sixteen(acc, half * 2 + 32 * part, 4)
            if exponentials:
                upper = max(largest[at_half + 2], largest[at_half + 3])
                bases[half] = max(max(largest[at_half], largest[at_half + 1]), upper)
                bases[half] = max(bases[half], shuffle_xor(bases[half], 1))
                bases[half] = max(bases[half], shuffle_xor(bases[half], 2))
                bases[half] = exponent_base(bases[half], references[half], factor, max_exponent)
        none = NONE, np.float32(0.0), np.float32(0.0), i32(0)
        sums = fold_rows(acc, 0, largest, bases, factor, (none, none), output)
        sums = fold_rows(acc, 1, largest, bases, factor, sums, output)
        sums = fold_rows(acc, 2, largest, bases, factor, sums, output)
        sums = fold_rows(acc, 3, largest, bases, factor, sums, output)
        store_result(sums[0], start_column, quad_lane, factor, results, at[0])
        store_result(sums[1], start_column, quad_lane, factor, results, at[1])

    return epilogue


@functools.cache
def differentiate_function(config):
    """The device function that turns a part of a tile's logits into their gradient, and stores it."""
    store_columns, with_entropy = store_function(config), config.entropy

    @device_function
    def differentiate(acc, part, targets, factor, shift, scale, offset, slope, output):
        """acc = scale (onehot(target) - p), p = 2^(acc factor + shift), of both rows of a thread's part, and store it.

        With entropy: acc = scale onehot(target) - p (offset + slope log2 p).
        """
        for half in range(2):
            begin, target = 32 * part + 2 * half, i32(targets[half] - 64 * part)
            for b in range(8):
                for c in range(2):
                    at = begin + 4 * b + c
                    if with_entropy:
                        distance = max(cuda.fma(acc[at], factor, shift[half]), VANISHED)
                        acc[at] = -cuda.fma(distance, slope[half], offset[half]) * exp2(distance)
                    else:
                        acc[at] = -scale[half] * exp2(cuda.fma(acc[at], factor, shift[half]))
            if i32(0) <= target < i32(64):
                for b in range(8):
                    for c in range(2):
                        if target == 8 * b + c:
                            acc[begin + 4 * b + c] += scale[half]
        store_columns(acc, part, output)

    return differentiate


@functools.cache
def consumer_function(config):
    """The device function of a consumer warpgroup: all of its tiles, from the main loop to the stores."""
    mode, rows, boxes, layout, staged_bytes = config.mode, config.rows, config.boxes, config.layout, config.staged_bytes
    folds, stores, split_k = mode in ("forward", "exponentials"), mode != "forward", mode == "split_k"
    exponentials, dlogits = mode == "exponentials", mode == "dlogits"
    with_entropy, masked = dlogits and config.entropy, config.masked
    _, work = scheduler(config)
    fold_tile, differentiate = forward_epilogue(config), differentiate_function(config)
    store_columns = store_function(config)
    accumulators, a_bytes, stagger = TILE_COLUMNS // 2, config.a_bytes, config.stagger

    start = wgmma_async(TILE_COLUMNS, config.element, STEPS // 16, "k", "mn" if split_k else "k")

    @device_function
    def each_round(done, rounds, leader, arguments):
        """The first consumer completes the stagger barrier's phase `stagger` rounds into a tile."""
        consumer, staggered = arguments
        if stagger > 0 and consumer == 0 and leader and done == min(stagger, rounds - 1):
            sm90.mbarrier_arrive(staggered)

    main_loop = main_loop_function(TILE_COLUMNS, config.stages, config.stage_bytes, start, each_round)

    @device_function
    def consume(base, group, thread, out_map, arrays, temperature, results, shape, schedule):
        """Compute this block's tiles and reduce or store them; arrays: TileRows."""
        m, n = shape.m, shape.n
        tiles, stride, _, tiles_down, tiles_across, _, _ = schedule
        consumer = group - i32(1)
        lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
        quad_lane = lane & i32(3)
        leader = (thread & i32(127)) == 0
        staged, staggered = base + layout.staged + consumer * staged_bytes, base + layout.stagger
        factor = LOG2_E / temperature
        acc = cuda.local.array(accumulators, np.float32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        # For each of a thread's two rows: its target, and for dlogits the log-sum-exp and the factor, or the reference
        # logit.
        targets = cuda.local.array(2, np.int32)
        shift, scale = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        offset, slope = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
        stage, parity = FIRST_FULL
        stagger_parity = i32(0)
        for index in range(i32(cuda.blockIdx.x), tiles, stride):
            tile_row, tile_column, split, rounds = work(index, schedule)
            first_row = i32(split * tiles_down * i32(rows) + tile_row * rows + consumer * ROWS)
            # This thread's accumulators: rows `row` and row + 8, columns 8 b + 2 (lane % 4) and the next.
            row = i32(tile_row * rows + consumer * ROWS + warp * i32(16) + (lane >> i32(2)))
            start_column = i32(tile_column * TILE_COLUMNS)
            for half in range(2):
                targets[half], shift[half], scale[half] = i32(-1), np.float32(0.0), np.float32(0.0)
                if with_entropy:
                    offset[half], slope[half] = np.float32(0.0), np.float32(0.0)
                if not split_k and row + half * 8 < m:
                    targets[half] = i32(arrays.ids[row + half * 8] - i32(shape.first_id) - start_column - quad_lane * 2)
                    if dlogits:
                        shift[half] = -arrays.lse[row + half * 8] * LOG2_E
                        scale[half] = arrays.dlogp[row + half * 8] / temperature
                    if with_entropy:
                        row_entropy, dentropy = arrays.entropy[row + half * 8], arrays.dentropy[row + half * 8]
                        offset[half], slope[half] = entropy_terms(scale[half], row_entropy, dentropy / temperature)
                    if exponentials:
                        shift[half] = arrays.reference_logits[row + half * 8]
            if stagger > 0 and consumer == 1:
                sm90.mbarrier_wait(staggered, stagger_parity)
            stage, parity = main_loop(
                acc, base + consumer * BOX_BYTES, base + a_bytes, base + layout.full, base + layout.empty, rounds,
                stage, parity, leader, (consumer, staggered),
            )  # fmt: skip
            stagger_parity ^= i32(1)
            # Columns beyond the vocabulary, in the last tile.
            if not split_k and start_column + i32(TILE_COLUMNS) > n:
                mask_columns(acc, start_column + quad_lane * 2, n)
            if masked:
                mask_below(acc, arrays.thresholds, row, m)
            output = out_map, start_column, first_row, staged, group, warp, lane
            if folds:
                tile = row, m, tile_column, tiles_across
                fold_tile(acc, tile, quad_lane, factor, targets, shift, results.results, results.target_logits, output)
            if dlogits:
                differentiate(acc, 0, targets, factor, shift, scale, offset, slope, output)
                differentiate(acc, 1, targets, factor, shift, scale, offset, slope, output)
                differentiate(acc, 2, targets, factor, shift, scale, offset, slope, output)
                differentiate(acc, 3, targets, factor, shift, scale, offset, slope, output)
            if split_k:
                for piece in range(TILE_COLUMNS // 32):
                    store_columns(acc, piece, output)
        if stores and warp < boxes and lane == 0:
            sm90.bulk_wait_group()

    return consume


@specialize
def logprob_kernel(config):
    """The kernel of a LogprobConfig."""
    consumers, layout = config.consumers, config.layout
    init_ring, _ = ring(config.stages)
    schedule_tiles, _ = scheduler(config)
    produce, consume = producer_function(config), consumer_function(config)

    @supports_pdl
    @cuda.jit(launch_bounds=((consumers + 1) * WARPGROUP, 1))
    def logprob_kernel(a_map, b_map, out_map, rows, temperature, results, shape):
        """Tiles of 64 rows a consumer x 256 columns of a GEMM with k steps of reduction.

        A (m, k): hidden rows or dz; B (n, k), or (k, n) for "split_k": rows of the output matrix from first_id on.
        rows: TileRows; results: TileResults, written by "forward" and "exponentials"; shape: a TileShape. All but
        "forward" write the matrix of out_map: dz, the exponentials, or with "split_k" the partial sums of A B,
        split_rounds rounds each, one below the other, m rounded up to whole tiles apart. Arrays that a mode does not
        use have no elements. Shared memory: LogprobConfig.layout.
        """
        thread = i32(cuda.threadIdx.x)
        group = sm90.warp_uniform(thread >> i32(7))
        base = shared_base()
        if thread == 0:
            init_ring(base + layout.full, base + layout.empty, 1, consumers)
            sm90.mbarrier_init(base + layout.stagger, 1)
            sm90.mbarrier_init_fence()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        schedule = schedule_tiles(shape.m, shape.n, shape.k, shape.split_rounds)
        if group == 0:
            sm90.setmaxnreg_dec()
            if thread == 0:
                a, b = sm90.tensor_map_address(a_map), sm90.tensor_map_address(b_map)
                produce(a, b, base, shape.stage_nbytes, schedule)
        else:
            sm90.setmaxnreg_inc()
            consume(base, group, thread, out_map, rows, temperature, results, shape, schedule)

    return logprob_kernel
