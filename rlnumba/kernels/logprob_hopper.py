"""linear_logp and its gradient on Hopper: the logits stay in the registers of the products that make them.

Forward. A block makes a tile of 128 rows x 256 logits as kernels/gemm_hopper.py does; then, instead of writing it,
each quad of threads folds its rows of the tile to four numbers in the order of kernels/row_sum.py (largest, sum of
exponentials, the entropy's sum, first column of the largest), and `merge_kernel` joins a row's tiles. What a sampler
makes of the float32 logits of gemm_hopper has the same bits, because both the sums of the product and those over the
row have one order.

Backward. The vocabulary goes by in chunks. One product makes the logits of a chunk again and leaves
dz = dlogp / T (onehot - p) in 16 bits, N x chunk; two more take it to dweight[chunk] += dz^T hidden and
dhidden += dz weight[chunk]. Four products with the forward's.

One pass. A loss that knows dlogp before it knows the log-probs (supervised training, the first step on a rollout)
needs only three. Rows go by in blocks whose exponentials, 16 bits each, exist at one time for the whole vocabulary:
the forward leaves 2^((z - m) factor), m the largest logit of the row's tile; `finish_kernel` makes dz of them in
place, now that lse is known. dweight then gets its sum in several parts, one a block of rows, each of which reads
and writes all of dweight: blocks are as tall as memory allows. dhidden's product is cut along the vocabulary, for
else it had too few tiles for the GPU; the parts are added in their order.

H200, 16,384 x 1024 x 151,936: each product is 5.1 TFLOP, 6.8 ms at 750 TFLOP/s. Extra memory: EXTRA_BYTES at most.

While the epilogue of one consumer of a block takes exponentials, the tensor cores serve the other: the second
consumer starts each tile `lead` rounds late, so their epilogues do not meet.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import gemm_hopper
from rlnumba.kernels.check import in_chunks
from rlnumba.kernels.elementwise import cast
from rlnumba.kernels.gemm_hopper import ROWS, WARPGROUP, place, processors
from rlnumba.kernels.hopper import (
    BOX_BYTES,
    LINE,
    STEPS,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    fence_shared_to_bulk,
    fewer_registers,
    more_registers,
    operand,
    pack,
    shared_address,
    store_matrices,
    store_pair,
    sync_group,
    tensor_map,
    tensor_map_address,
    warp_uniform,
    warpgroup_product,
)
from rlnumba.kernels.instructions import device_function, exp2, narrow, shuffle_xor, vector_access
from rlnumba.kernels.launch import kernel_factory, launch
from rlnumba.kernels.row_sum import (
    CLASSES,
    GROUPS,
    LOG2_E,
    NONE,
    TILE_COLUMNS,
    fold_sixteen,
    join,
    join_classes,
    lowest_of_best,
    row_results,
)

i32 = np.int32

ARCHITECTURES = [(9, 0, "a")]

# Bytes that the gradient and the one-pass form may use beside their arguments. The gradient of the hidden states in
# float32 gets a quarter of them; so do the forward's tile results.
EXTRA_BYTES = 256 << 20
QUARTER = EXTRA_BYTES // 4
# Bytes an element of the hidden states: where rows are left out, the others are copied, and so is their gradient.
COPIES = 4
# Largest, sum, entropy's sum, first column of the largest.
RESULTS = 4
# A class has one thread of merge_kernel, or several if a warp has more threads than there are classes.
MERGE_STEP = max(1, 32 // CLASSES)
MERGE_THREADS = CLASSES * MERGE_STEP
FINISH_THREADS = 32 if device.name() == "sim" else 256
# Elements that a thread of finish_kernel loads at once, 16 bytes, and has at a time.
EIGHT, SIXTEEN = 8, 16


class HeadTile(NamedTuple):
    """One kernel of this module. element: "float16" or "bfloat16"; groups: consumer warpgroups, 64 rows each.

    mode: "terms" (the forward), "gradient" (dz of a chunk), "exponentials" (the one-pass form's forward) or "slabs"
    (dhidden in parts). lead: rounds by which the second consumer is late. entropy, top1: whether they are wanted.
    """

    element: str
    mode: str
    groups: int = 2
    stages: int = 4
    lead: int = 2
    entropy: bool = False
    top1: bool = False

    @property
    def rows(self):
        return ROWS * self.groups

    @property
    def box_columns(self):
        """Columns of the output in a 128-byte line."""
        return 32 if self.mode == "slabs" else 64

    @property
    def staged_bytes(self):
        return 0 if self.mode == "terms" else 2 * BOX_BYTES

    @property
    def stage_bytes(self):
        return (self.rows + TILE_COLUMNS) * LINE

    @property
    def shared_bytes(self):
        return self.stages * (self.stage_bytes + 16) + self.groups * self.staged_bytes + 8 + 1024


def may_lead(tile, rounds):
    """Whether the second consumer may start tiles of so many rounds late.

    The barrier between the two has one phase a tile, so the first must not pass it twice while the second waits: the
    stages, which both must empty, have to stop it before.
    """
    return tile.groups == 2 and rounds + min(tile.lead, rounds - 1) + 1 > tile.stages


@functools.cache
def main_loop(tile, b_mn):
    """(produce, multiply): what the copying warp and a consumer do for one tile; both return (stage, parity)."""
    stages, lead = tile.stages, tile.lead
    rows, stage_bytes = tile.rows, tile.stage_bytes
    a_bytes = rows * LINE
    start, wait_all_but_latest, wait_all = warpgroup_product(TILE_COLUMNS, tile.element, False, b_mn)

    @device_function
    def produce(a, b, base, full, empty, arriving, row_at, column_at, step, rounds, stage, parity):
        """Ask for the boxes of `rounds` rounds, from reduction step `step` on, as stages become empty."""
        for done in range(rounds):
            barrier_wait(empty + stage * 8, parity)
            arrived = full + stage * 8
            target = base + stage * stage_bytes
            barrier_expect(arrived, arriving)
            at = step + i32(done) * i32(STEPS)
            bulk_load(target, a, at, row_at, arrived)
            if b_mn:
                for box in range(TILE_COLUMNS // 64):
                    bulk_load(target + a_bytes + box * BOX_BYTES, b, column_at + box * 64, at, arrived)
            else:
                bulk_load(target + a_bytes, b, at, column_at, arrived)
            stage += i32(1)
            if stage == stages:
                stage = i32(0)
                parity ^= i32(1)
        return stage, parity

    @device_function
    def multiply(acc, consumer, leader, base, full, empty, ahead, turn, rounds, stage, parity):
        """acc = A B over `rounds` rounds. leader: whether this thread speaks for its warpgroup.

        ahead: the barrier that the first consumer passes `lead` rounds into a tile, and the second waits for; turn: its
        phase.
        """
        previous = i32(0)
        if lead > 0 and consumer == 1:
            barrier_wait(ahead, turn)
        for done in range(rounds):
            barrier_wait(full + stage * 8, parity)
            target = base + stage * stage_bytes
            start(acc, operand(target + consumer * BOX_BYTES), operand(target + a_bytes), i32(done != 0))
            wait_all_but_latest(acc)
            if done != 0 and leader:
                barrier_arrive(empty + previous * 8)
            if lead > 0 and consumer == 0 and leader and done == min(lead, rounds - 1):
                barrier_arrive(ahead)
            previous = stage
            stage += i32(1)
            if stage == stages:
                stage = i32(0)
                parity ^= i32(1)
        wait_all(acc)
        if leader:
            barrier_arrive(empty + previous * 8)
        return stage, parity

    return produce, multiply


# What follows works on a thread's accumulators of one row, sixteen at a time (a part): acc[begin + 4 b + c], b < 8,
# c < 2, are the columns 8 b + c of the part for this lane. Loops over parts are written out, for an index that the
# compiler does not know would put the accumulators into memory.


@device_function
def fill_part(acc, begin, column, n):
    """-inf for the columns from n on; column: that of acc[begin]."""
    for b in range(8):
        for c in range(2):
            if column + i32(8 * b + c) >= n:
                acc[begin + 4 * b + c] = np.float32(-math.inf)


@device_function
def fill_beyond(acc, column, n):
    """-inf for the columns of a tile from n on; column: that of acc[0]."""
    for half in range(0, 4, 2):
        fill_part(acc, half, column, n)
        fill_part(acc, half + 32, column + 64, n)
        fill_part(acc, half + 64, column + 128, n)
        fill_part(acc, half + 96, column + 192, n)


@device_function
def differentiate_part(acc, begin, target, factor, shift, scale):
    """acc = scale (onehot(target) - 2^(acc factor + shift)); target: this lane's column of the part, if it has it."""
    for b in range(8):
        for c in range(2):
            acc[begin + 4 * b + c] = -scale * exp2(cuda.fma(acc[begin + 4 * b + c], factor, shift))
    if i32(0) <= target < i32(64):
        for b in range(8):
            for c in range(2):
                if target == 8 * b + c:
                    acc[begin + 4 * b + c] += scale


@device_function
def differentiate_half(acc, begin, target, factor, shift, scale):
    """differentiate_part for the columns of a tile."""
    differentiate_part(acc, begin, target, factor, shift, scale)
    differentiate_part(acc, begin + 32, i32(target - 64), factor, shift, scale)
    differentiate_part(acc, begin + 64, i32(target - 128), factor, shift, scale)
    differentiate_part(acc, begin + 96, i32(target - 192), factor, shift, scale)


@device_function
def scale_part(acc, begin, factor):
    for b in range(8):
        for c in range(2):
            acc[begin + 4 * b + c] *= factor


@functools.cache
def half_folder(entropy, top1, exponentials):
    """fold_half: what the forward does with a thread's accumulators of one row."""

    @device_function
    def fold_part(acc, begin, part, target, factor, sums, chosen, line):
        """The sums (largest, total, weighted, top) of the parts before and this one; acc become exponentials."""
        if i32(0) <= target < i32(64):
            for b in range(8):
                for c in range(2):
                    if target == 8 * b + c:
                        chosen[line] = acc[begin + 4 * b + c]
        top = sums[3]
        if top1:
            largest, part_top = NONE, i32(0)
            for b in range(8):
                for c in range(2):
                    largest = max(largest, acc[begin + 4 * b + c])
            for b in range(7, -1, -1):
                for c in range(1, -1, -1):
                    if acc[begin + 4 * b + c] == largest:
                        part_top = i32(64 * part + 8 * b + c)
            # A lane's columns ascend: the first of equals stays.
            if largest > sums[0]:
                top = part_top
        one = fold_sixteen(acc, begin, 4, factor, entropy)
        largest, total, weighted = join(sums[0], sums[1], sums[2], one[0], one[1], one[2], factor)
        return (largest, total, weighted, top), one[0]

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
    def fold_half(acc, begin, target, start_column, quad_lane, factor, results, at, chosen, line):
        """Fold a row of a tile to results[at] (this lane's of the four; none if at < 0), its target to chosen[line].

        acc become 2^((z - largest of the row in this tile) factor), if "exponentials".
        """
        target -= quad_lane * 2
        sums = NONE, np.float32(0.0), np.float32(0.0), i32(0)
        sums, largest0 = fold_part(acc, begin, 0, target, factor, sums, chosen, line)
        sums, largest1 = fold_part(acc, begin + 32, 1, i32(target - 64), factor, sums, chosen, line)
        sums, largest2 = fold_part(acc, begin + 64, 2, i32(target - 128), factor, sums, chosen, line)
        sums, largest3 = fold_part(acc, begin + 96, 3, i32(target - 192), factor, sums, chosen, line)
        sums = sums[0], sums[1], sums[2], i32(sums[3] + start_column + quad_lane * 2)
        sums = fold_lanes(sums, 1, factor)
        sums = fold_lanes(sums, 2, factor)
        if at >= 0:
            # Each lane of the quad writes one of the four.
            low = sums[1] if quad_lane == 1 else sums[0]
            high = np.float32(sums[3]) if quad_lane == 3 else sums[2]
            results[at] = high if quad_lane >= 2 else low
        if exponentials:
            scale_part(acc, begin, exp2((largest0 - sums[0]) * factor))
            scale_part(acc, begin + 32, exp2((largest1 - sums[0]) * factor))
            scale_part(acc, begin + 64, exp2((largest2 - sums[0]) * factor))
            scale_part(acc, begin + 96, exp2((largest3 - sums[0]) * factor))

    return fold_half


@kernel_factory
def head_kernel(tile):
    """The kernel of a HeadTile."""
    mode, groups, stages = tile.mode, tile.groups, tile.stages
    entropy, top1 = tile.entropy, tile.top1
    rows, stage_bytes, staged_bytes, box_columns = tile.rows, tile.stage_bytes, tile.staged_bytes, tile.box_columns
    slabs, terms, writes = mode == "slabs", mode in ("terms", "exponentials"), mode != "terms"
    gradient, exponentials = mode == "gradient", mode == "exponentials"
    produce, multiply = main_loop(tile, slabs)
    pack_two = pack(tile.element)
    fold_half = half_folder(entropy, top1, exponentials)
    accumulators = TILE_COLUMNS // 2
    staged_columns = 2 * box_columns
    count = RESULTS

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, 1))
    def head_kernel(
        a_map, b_map, out_map, ids, lse, dlogp, temperature, results, chosen, m, n, k, first_id, slab_rounds, arriving
    ):
        """Tiles of 64 rows a consumer x 256 columns of the product of A (m, k) and B (n, k), or B (k, n) for slabs.

        A: hidden rows; B: rows of the output matrix from first_id on. ids, lse, dlogp (m,); results (m, tiles, 4) and
        chosen (m,), the logits of ids, are written by "terms" and "exponentials"; the matrix of out_map by all but
        "terms": dz, the exponentials, or with "slabs" the parts of A B, slab_rounds rounds each, one below the other,
        m rounded up to whole tiles apart. What a mode does not use is one element long. arriving: bytes of a stage's
        boxes. Shared memory: stages of [A | B], staged output, barriers: full and empty for every stage, ahead.
        """
        thread = i32(cuda.threadIdx.x)
        group = warp_uniform(thread >> i32(7))
        base = (shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024
        staged = base + stages * stage_bytes
        full = staged + groups * staged_bytes
        empty = full + stages * 8
        ahead = empty + stages * 8
        if thread == 0:
            for stage in range(stages):
                barrier_init(full + stage * 8, 1)
                barrier_init(empty + stage * 8, groups)
            barrier_init(ahead, 1)
            barrier_init_fence()
        cuda.syncthreads()
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + TILE_COLUMNS - 1) // TILE_COLUMNS)
        rounds = i32((k + STEPS - 1) // STEPS)
        slab_tiles = tiles_down * tiles_across
        tiles = slab_tiles
        if slabs:
            tiles *= i32((rounds + slab_rounds - 1) // slab_rounds)
        stage, slab, step, slab_rows = i32(0), i32(0), i32(0), i32(0)
        if group == 0:
            fewer_registers()
            if thread == 0:
                a, b = tensor_map_address(a_map), tensor_map_address(b_map)
                # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
                parity = i32(1)
                for index in range(i32(cuda.blockIdx.x), tiles, i32(cuda.gridDim.x)):
                    here = rounds
                    if slabs:
                        slab = i32(index) // slab_tiles
                        step = i32(slab * slab_rounds) * i32(STEPS)
                        here = min(i32(slab_rounds), i32(rounds - slab * slab_rounds))
                    row, column = place(i32(index) - slab * slab_tiles, tiles_down, tiles_across)
                    stage, parity = produce(
                        a, b, base, full, empty, arriving, row * rows, column * TILE_COLUMNS, step, here, stage, parity
                    )
        else:
            more_registers()
            consumer = group - i32(1)
            lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
            quad_lane = lane & i32(3)
            leader = (thread & i32(127)) == 0
            staged += consumer * staged_bytes
            factor = LOG2_E / temperature
            acc = cuda.local.array(accumulators, np.float32)
            for i in range(accumulators):
                acc[i] = np.float32(0.0)
            # What a thread knows of its two rows: the target, and for the gradient the logarithm and the factor.
            targets = cuda.local.array(2, np.int32)
            shift, scale = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
            at = cuda.local.array(2, np.int64)
            parity, turn = i32(0), i32(0)
            for index in range(i32(cuda.blockIdx.x), tiles, i32(cuda.gridDim.x)):
                here = rounds
                if slabs:
                    slab = i32(index) // slab_tiles
                    slab_rows = slab * tiles_down * i32(rows)
                    here = min(i32(slab_rounds), i32(rounds - slab * slab_rounds))
                row, column = place(i32(index) - slab * slab_tiles, tiles_down, tiles_across)
                # This thread's accumulators: rows `line` and line + 8, columns 8 b + 2 (lane % 4) and the next.
                line = i32(row * rows + consumer * ROWS + warp * i32(16) + (lane >> i32(2)))
                start_column = i32(column * TILE_COLUMNS)
                for half in range(2):
                    targets[half], shift[half], scale[half] = i32(-1), np.float32(0.0), np.float32(0.0)
                    if not slabs and line + half * 8 < m:
                        targets[half] = ids[line + half * 8] - i32(first_id) - start_column
                        if gradient:
                            shift[half] = -lse[line + half * 8] * LOG2_E
                            scale[half] = dlogp[line + half * 8] / temperature
                stage, parity = multiply(acc, consumer, leader, base, full, empty, ahead, turn, here, stage, parity)
                turn ^= i32(1)
                # Columns beyond the vocabulary, in the last tile.
                if (terms or gradient) and start_column + i32(TILE_COLUMNS) > n:
                    fill_beyond(acc, start_column + quad_lane * 2, n)
                if terms:
                    for half in range(2):
                        if line + half * 8 < m:
                            at[half] = (np.int64(line + half * 8) * tiles_across + column) * count + quad_lane
                        else:
                            at[half] = -1
                    fold_half(acc, 0, targets[0], start_column, quad_lane, factor, results, at[0], chosen, line)
                    fold_half(acc, 2, targets[1], start_column, quad_lane, factor, results, at[1], chosen, line + 8)
                if gradient:
                    for half in range(2):
                        targets[half] -= quad_lane * 2
                    differentiate_half(acc, 0, targets[0], factor, shift[0], scale[0])
                    differentiate_half(acc, 2, targets[1], factor, shift[1], scale[1])
                if writes:
                    out = tensor_map_address(out_map)
                    for part in range(TILE_COLUMNS // staged_columns):
                        # The copy engine must have read the last part before this one overwrites it.
                        if leader:
                            bulk_wait_read()
                        sync_group(group, WARPGROUP)
                        if slabs:
                            staged_line = warp * i32(16) + (lane >> i32(2))
                            for block in range(staged_columns // 8):
                                i = (part * staged_columns // 8 + block) * 4
                                chunk = i32(block % 4 * 2) + (quad_lane >> i32(1))
                                target = staged + block // 4 * BOX_BYTES + staged_line * i32(LINE)
                                target += ((chunk ^ (staged_line & i32(7))) << i32(4)) + ((lane & i32(1)) << i32(3))
                                store_pair(target, acc[i], acc[i + 1])
                                store_pair(target + 8 * LINE, acc[i + 2], acc[i + 3])
                        else:
                            staged_line = warp * i32(16) + (lane & i32(15))
                            for block in range(staged_columns // 16):
                                i = (part * staged_columns // 16 + block) * 8
                                chunk = i32(block % 4 * 2) + (lane >> i32(4))
                                target = staged + block // 4 * BOX_BYTES + staged_line * i32(LINE)
                                store_matrices(
                                    target + ((chunk ^ (staged_line & i32(7))) << i32(4)),
                                    pack_two(acc[i], acc[i + 1]),
                                    pack_two(acc[i + 2], acc[i + 3]),
                                    pack_two(acc[i + 4], acc[i + 5]),
                                    pack_two(acc[i + 6], acc[i + 7]),
                                )
                        fence_shared_to_bulk()
                        sync_group(group, WARPGROUP)
                        if leader:
                            for box in range(2):
                                at_column = start_column + part * staged_columns + box * box_columns
                                at_row = slab_rows + row * rows + consumer * ROWS
                                bulk_store(out, at_column, at_row, staged + box * BOX_BYTES)
                            bulk_commit()
            if writes and leader:
                bulk_wait()

    return head_kernel


@cuda.jit
def merge_kernel(results, chosen, ids, temperature, logp, lse, entropy, top1):
    """A block owns a row, MERGE_STEP threads a class of its tiles: the last two steps of row_sum.py's order.

    results (N, tiles, 4), flat. entropy and top1 without elements are left out. An id outside the vocabulary gives NaN.
    """
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    row = cuda.blockIdx.x
    tiles = results.shape[0] // (RESULTS * chosen.shape[0])
    factor = LOG2_E / temperature
    values = cuda.local.array(RESULTS, np.float32)
    largest, total, weighted, top = NONE, np.float32(0.0), np.float32(0.0), i32(0)
    for tile in range(cuda.threadIdx.x // MERGE_STEP, tiles, CLASSES):
        load_results(results, (np.int64(row) * tiles + tile) * RESULTS, values, 0)
        if values[0] > largest:
            top = i32(values[3])
        largest, total, weighted = join(largest, total, weighted, values[0], values[1], values[2], factor)
    _, top = lowest_of_best(largest, top, scratch)
    largest, total, weighted = join_classes(largest, total, weighted, MERGE_STEP, factor, groups)
    if cuda.threadIdx.x == 0:
        row_lse, row_entropy = row_results(largest, total, weighted, temperature)
        logp[row] = chosen[row] / temperature - row_lse
        lse[row] = row_lse
        if entropy.shape[0] > 0:
            entropy[row] = row_entropy
        if top1.shape[0] > 0:
            top1[row] = top


load_results, _ = vector_access(RESULTS, RESULTS)


@device_function
def finish_eight(values, at, first, p, target, target_gradient):
    """values[at + i], exponentials of columns first + i, become -p times them; the target's, if it is one, its own."""
    for i in range(EIGHT):
        values[at + i] *= -p
        if first + i == target:
            values[at + i] = target_gradient


@cuda.jit
def finish_kernel(exponentials, results, chosen, ids, temperature, lse, dlogp, dz):
    """dz = dlogp / T (onehot(ids) - p) from e = 2^((z - m) factor) of "exponentials", m the largest of a tile.

    p = e 2^(m factor - lse log2(e)); the target's comes from its own float32 logit, so that a probability near 1
    leaves an exact gradient. exponentials, dz (rows, pitch), may be one array; columns from the vocabulary's end on
    are 0 in both. A block owns a row, a thread twice EIGHT neighbouring elements at a time, both loads under way.
    """
    row = cuda.blockIdx.x
    pitch = exponentials.shape[1]
    tiles = results.shape[0] // (RESULTS * chosen.shape[0])
    factor = LOG2_E / temperature
    shift = -lse[row] * LOG2_E
    scale = dlogp[row] / temperature
    target = ids[row]
    target_gradient = scale * (np.float32(1.0) - exp2(cuda.fma(chosen[row], factor, shift)))
    values = cuda.local.array(SIXTEEN, np.float32)
    source, out, first_result = exponentials[row], dz[row], np.int64(row) * tiles * RESULTS
    apart = EIGHT * FINISH_THREADS
    for first in range(EIGHT * cuda.threadIdx.x, pitch, 2 * apart):
        second = first + apart
        there = second if second < pitch else first
        load_eight(source, first, values, 0)
        load_eight(source, there, values, EIGHT)
        largest = results[first_result + first // TILE_COLUMNS * RESULTS]
        other_largest = results[first_result + there // TILE_COLUMNS * RESULTS]
        p, other_p = exp2(cuda.fma(largest, factor, shift)), exp2(cuda.fma(other_largest, factor, shift))
        finish_eight(values, 0, first, scale * p, target, target_gradient)
        finish_eight(values, EIGHT, there, scale * other_p, target, target_gradient)
        store_eight(out, first, values, 0)
        if second < pitch:
            store_eight(out, second, values, EIGHT)


load_eight, store_eight = vector_access(EIGHT, EIGHT)


@cuda.jit
def add_slabs_kernel(parts, rows, out):
    """out[row] = the sum of parts[row + slab * rows], slabs ascending; a block owns a row of out."""
    row = cuda.blockIdx.x
    for column in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        total = np.float32(0.0)
        for at in range(row, parts.shape[0], rows):
            total += parts[at, column]
        out[row, column] = narrow(total, out)


def takes(hidden, weight):
    """Whether this module computes linear_logp of these arrays: 16-bit, not empty, rows of whole 16-byte pieces."""
    return hidden.dtype != np.float32 and hidden.size > 0 and in_chunks(hidden, weight)


@functools.cache
def _one(kind, dimensions):
    """An array of one element that stands for an argument left out."""
    return device.xp().zeros((1,) * dimensions, kind)


def _launch_head(tile, a, b, out, ids, lse, dlogp, temperature, results, chosen, first_id=0, slab_rounds=0):
    """Launch head_kernel; None for what the mode does not use."""
    m, k = a.shape
    slabs = tile.mode == "slabs"
    n = b.shape[1] if slabs else b.shape[0]
    a_rows = min(tile.rows, -(-m // 8) * 8)
    b_map = tensor_map(b, 64, 64) if slabs else tensor_map(b, TILE_COLUMNS, 64)
    tiles = -(-m // tile.rows) * -(-n // TILE_COLUMNS)
    shortest = rounds = -(-k // STEPS)
    if slabs:
        parts = -(-rounds // slab_rounds)
        tiles *= parts
        shortest = rounds - (parts - 1) * slab_rounds
    if not may_lead(tile, shortest):
        tile = tile._replace(lead=0)
    none = _one(np.float32, 1)
    launch(
        head_kernel(tile),
        min(tiles, processors()),
        (tile.groups + 1) * WARPGROUP,
        tensor_map(a, a_rows, 64),
        b_map,
        _one(np.int32, 1) if out is None else tensor_map(out, ROWS, tile.box_columns),
        _one(np.int32, 1) if ids is None else ids,
        none if lse is None else lse,
        none if dlogp is None else dlogp,
        float(temperature),
        none if results is None else results,
        none if chosen is None else chosen,
        m,
        n,
        k,
        first_id,
        slab_rounds,
        (a_rows + TILE_COLUMNS) * LINE,
        shared=tile.shared_bytes,
    )


def _merge(results, chosen, ids, temperature, logp, lse, entropy, top1):
    entropy = logp[:0] if entropy is None else entropy
    top1 = ids[:0] if top1 is None else top1
    arguments = (results, chosen, ids, float(temperature), logp, lse, entropy, top1)
    launch(merge_kernel, chosen.shape[0], MERGE_THREADS, *arguments)


def _part(array, rows):
    return None if array is None else array[rows]


def linear_logp(hidden, weight, ids, temperature, logp, lse, entropy=None, top1=None, tile=None):
    """logprob.linear_logp without a bias and without ignored rows, for arrays that takes() accepts.

    tile: a HeadTile of mode "terms" instead of the best.
    """
    tile = tile or HeadTile(hidden.dtype.name, "terms", entropy=entropy is not None, top1=top1 is not None)
    xp = device.xp()
    tiles = -(-weight.shape[0] // TILE_COLUMNS)
    step = forward_rows(weight.shape[0], tile.rows)
    memory = xp.empty(min(step, hidden.shape[0]) * tiles * RESULTS, np.float32)
    for first in range(0, hidden.shape[0], step):
        rows = slice(first, min(first + step, hidden.shape[0]))
        count = rows.stop - first
        results = memory[: count * tiles * RESULTS]
        chosen = xp.full(count, math.nan, np.float32)
        _launch_head(tile, hidden[rows], weight, None, ids[rows], None, None, temperature, results, chosen)
        outputs = logp[rows], lse[rows], _part(entropy, rows), _part(top1, rows)
        _merge(results, chosen, ids[rows], temperature, *outputs)


def forward_rows(vocabulary, rows_of_tile=128):
    """Rows of which the forward keeps tile results at one time."""
    tiles = -(-vocabulary // TILE_COLUMNS)
    return max(1, QUARTER // (4 * RESULTS * tiles) // rows_of_tile) * rows_of_tile


def backward_rows(width, rows_of_tile=128):
    """Rows whose gradient the backward adds up in float32 at one time."""
    return max(1, QUARTER // (4 * width) // rows_of_tile) * rows_of_tile


def chunk_columns(rows, width, vocabulary, rows_of_tile=128, columns_of_tile=256):
    """Columns of a chunk of dz: what fits into EXTRA_BYTES, and fills the SMs best in dweight's product.

    Beside dz are the float32 gradient of the rows, and copies of the rows and of their gradient where the caller leaves
    rows out.
    """
    most = max(1, (EXTRA_BYTES - (4 + COPIES) * rows * width) // (2 * rows * TILE_COLUMNS)) * TILE_COLUMNS
    if most >= vocabulary:
        return vocabulary
    best = None
    for columns in range(TILE_COLUMNS * -(-most // (2 * TILE_COLUMNS)), most + 1, TILE_COLUMNS):
        tiles = -(-columns // rows_of_tile) * -(-width // columns_of_tile)
        filled = tiles / (-(-tiles // processors()) * processors())
        if best is None or filled >= best[0]:
            best = filled, columns
    return best[1]


def linear_logp_backward(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, tile=None, columns=None):
    """logprob.linear_logp_backward without a bias and without ignored rows, for arrays that takes() accepts.

    Whoever knows lse without a forward, a trainer whose rollout kept it, has the whole gradient for three products.
    tile: a HeadTile of mode "gradient", columns: of a chunk, instead of the best.
    """
    tile = tile or HeadTile(hidden.dtype.name, "gradient")
    xp = device.xp()
    vocabulary, width = weight.shape
    step = min(backward_rows(width, tile.rows), hidden.shape[0])
    columns = columns or chunk_columns(step, width, vocabulary)
    memory = xp.empty(step * (columns + -columns % 8), hidden.dtype)
    sums = xp.empty((step, width), np.float32)
    for first_row in range(0, hidden.shape[0], step):
        rows = slice(first_row, min(first_row + step, hidden.shape[0]))
        count = rows.stop - first_row
        h, terms, wide = hidden[rows], (ids[rows], lse[rows], dlogp[rows]), sums[:count]
        for first in range(0, vocabulary, columns):
            chunk = slice(first, min(first + columns, vocabulary))
            part = weight[chunk]
            pitch = part.shape[0] + -part.shape[0] % 8
            dz = memory[: count * pitch].reshape(count, pitch)
            _launch_head(tile, h, part, dz, *terms, temperature, None, None, first)
            gemm_hopper.product(dz, part, wide, b_mn=True, add=first > 0)
            gemm_hopper.product(dz, h, dweight[chunk], a_mn=True, b_mn=True, add=True)
        cast(wide, dhidden[rows])


def block_rows(width, vocabulary, rows_of_tile=128):
    """(rows, slabs) of the one-pass form's blocks: as many rows as EXTRA_BYTES allow, slabs that fill the SMs.

    A row has its exponentials, its tile results, a part of the gradient in each slab, and the copies.
    """
    pitch = vocabulary + -vocabulary % 8
    a_row = 2 * pitch + 4 * RESULTS * -(-vocabulary // TILE_COLUMNS) + COPIES * width
    best = None
    for slabs in range(1, 17):
        rows = EXTRA_BYTES // (a_row + 4 * slabs * width) // rows_of_tile * rows_of_tile
        rows = max(rows, rows_of_tile)
        tiles = rows // rows_of_tile * -(-width // TILE_COLUMNS) * slabs
        filled = tiles / (-(-tiles // processors()) * processors())
        # dweight's traffic grows with the number of blocks, dhidden's time with the share of idle SMs.
        cost = 1.0 / filled + 0.5 * 768 / rows
        if best is None or cost < best[0]:
            best = cost, rows, slabs
    return best[1:]


def linear_logp_with_gradient(
    hidden, weight, ids, temperature, dlogp, logp, lse, dhidden, dweight, entropy=None, top1=None, tile=None, shape=None
):
    """logprob.linear_logp_with_gradient without ignored rows, in three products, for arrays that takes() accepts.

    tile: a HeadTile of mode "exponentials", shape: (rows, slabs) of a block, instead of the best.
    """
    tile = tile or HeadTile(hidden.dtype.name, "exponentials", entropy=entropy is not None, top1=top1 is not None)
    parts_tile = HeadTile(tile.element, "slabs", tile.groups, tile.stages, tile.lead)
    xp = device.xp()
    vocabulary, width = weight.shape
    step, slabs = shape or block_rows(width, vocabulary)
    step = min(step, -(-hidden.shape[0] // tile.rows) * tile.rows)
    tiles, pitch = -(-vocabulary // TILE_COLUMNS), vocabulary + -vocabulary % 8
    rounds = -(-pitch // STEPS)
    slab_rounds = -(-rounds // slabs)
    slabs = -(-rounds // slab_rounds)
    results_memory = xp.empty(step * tiles * RESULTS, np.float32)
    memory = xp.empty(step * pitch, hidden.dtype)
    parts_memory = xp.empty(slabs * step * width, np.float32)
    for first in range(0, hidden.shape[0], step):
        rows = slice(first, min(first + step, hidden.shape[0]))
        count = rows.stop - first
        h, targets = hidden[rows], ids[rows]
        results = results_memory[: count * tiles * RESULTS]
        chosen = xp.full(count, math.nan, np.float32)
        dz = memory[: count * pitch].reshape(count, pitch)
        _launch_head(tile, h, weight, dz, targets, None, None, temperature, results, chosen)
        _merge(results, chosen, targets, temperature, logp[rows], lse[rows], _part(entropy, rows), _part(top1, rows))
        arguments = (results, chosen, targets, float(temperature), lse[rows], dlogp[rows])
        launch(finish_kernel, count, FINISH_THREADS, dz, *arguments, dz)
        apart = -(-count // tile.rows) * tile.rows
        parts = parts_memory[: slabs * apart * width].reshape(slabs * apart, width)
        _launch_head(parts_tile, dz, weight, parts, None, None, None, 1.0, None, None, slab_rounds=slab_rounds)
        launch(add_slabs_kernel, count, FINISH_THREADS, parts, apart, dhidden[rows])
        gemm_hopper.product(dz, h, dweight, a_mn=True, b_mn=True, add=True)
