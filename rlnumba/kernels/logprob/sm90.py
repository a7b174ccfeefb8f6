"""linear_logp and its gradient on Hopper: the logits stay in the registers of the products that make them.

Forward. A block makes a tile of 128 rows x 256 logits as kernels/gemm/sm90.py does; then, instead of writing it,
each quad of threads folds its rows of the tile to four numbers in the order of kernels/nn/row_sum.py (largest, sum of
exponentials, the entropy's sum, first column of the largest), and `merge_kernel` joins a row's tiles. What a sampler
makes of the float32 logits of gemm_sm90 has the same bits, because both the sums of the product and those over the
row have one order.

Backward. The vocabulary goes by in chunks. One product makes the logits of a chunk again and leaves
dz = dlogp / T (onehot - p) in 16 bits, N x chunk; two more take it to dweight[chunk] += dz^T hidden and
dhidden += dz weight[chunk]. Four products with the forward's.

One pass. A loss that knows dlogp before it knows the log-probs (supervised training, the first step on a rollout)
needs only three. Rows go by in blocks whose exponentials, 16 bits each, exist at one time for the whole vocabulary:
e = 2^((z - r) factor) with a reference r of the row, its token's logit. When lse is known, `finish_kernel` finds what
is left between e and dz, a factor of the row, which goes to the other operand of dweight's product and to the result
of dhidden's. dweight then gets its sum in several parts, one a block of rows, each of which reads and writes all of
dweight: blocks are as tall as memory allows. Rows left over come first: where dweight need not be added to, theirs is
only written, which pays most where a product is short. dhidden's product is cut along the vocabulary, for else it had
too few tiles for the GPU; the parts are added in their order.

H200, 16,384 x 1024 x 151,936: each product is 5.1 TFLOP, 6.8 ms at 750 TFLOP/s. Times: docs/log-prob.md. Extra memory:
EXTRA_BYTES at most.

While the epilogue of one consumer of a block takes exponentials, the tensor cores serve the other: the second
consumer starts each tile `lead` rounds late, so their epilogues do not meet.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import CHUNK, is_16_byte_aligned
from rlnumba.kernels.gemm import sm90 as gemm_sm90
from rlnumba.kernels.gemm.sm90 import ROWS, WARPGROUP, place, processors, udiv
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.nn.row_sum import (
    CLASSES,
    GROUPS,
    LOG2_E,
    NONE,
    TILE_COLUMNS,
    exponentials_of_sixteen,
    join,
    join_classes,
    largest_of_sixteen,
    lowest_of_best,
    row_results,
)
from rlnumba.kernels.ptx.sm90 import (
    BOX_BYTES,
    LINE,
    STEPS,
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    cvt_pack,
    fence_proxy_async,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    smem_descriptor,
    stmatrix_x4,
    store_pair,
    tensor_map,
    tensor_map_address,
    tma_load_2d,
    tma_store_2d,
    warp_uniform,
    wgmma,
)
from rlnumba.kernels.ptx.warp import (
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    narrow,
    shuffle_xor,
    vector_access,
    warp_sum,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize

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
SLAB_THREADS = 32 if device.simulated() else 256
# Elements that a thread of finish_kernel loads at once, 16 bytes, and has at a time.
EIGHT, SIXTEEN = 8, 16
# Powers of two by which an exponential may exceed 1: far below what bfloat16 holds, times what a row adds up. None in
# float16, whose exponentials all are relative to their tile's largest logit.
REACH = {"bfloat16": 64.0, "float16": -1e30}
REFERENCE_ROWS = 4


class HeadTile(NamedTuple):
    """One kernel of this module. element: "float16" or "bfloat16"; groups: consumer warpgroups, 64 rows each.

    mode: "terms" (the forward), "gradient" (dz of a chunk), "exponentials" (the one-pass form's forward) or "slabs"
    (dhidden in parts, A B with B MN-major). lead: rounds by which the second consumer is late. boxes: of 8 KiB through
    which a consumer writes its output, at most 4. entropy, top1: whether they are wanted.
    """

    element: str
    mode: str
    groups: int = 2
    stages: int = 4
    lead: int = 2
    boxes: int = 2
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
        return 0 if self.mode == "terms" else self.boxes * BOX_BYTES

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
def main_loop(tile):
    """(produce, multiply): what the copying warp and a consumer do for one tile; both return (stage, parity)."""
    stages, lead, b_mn = tile.stages, tile.lead, tile.mode == "slabs"
    rows, stage_bytes = tile.rows, tile.stage_bytes
    a_bytes = rows * LINE
    start, wait_all_but_latest, wait_all = wgmma(TILE_COLUMNS, tile.element, False, b_mn)

    @device_function
    def after(stage, parity):
        """The next stage, and the parity of its turn."""
        last = stage == i32(stages - 1)
        return i32(0) if last else i32(stage + i32(1)), i32(parity ^ i32(last))

    @device_function
    def produce(a, b, base, full, empty, arriving, row_at, column_at, step, rounds, stage, parity):
        """Ask for the boxes of `rounds` rounds, from reduction step `step` on, as stages become empty."""
        for done in range(rounds):
            mbarrier_wait(empty + stage * 8, parity)
            arrived = full + stage * 8
            target = base + stage * stage_bytes
            mbarrier_expect_tx(arrived, arriving)
            at = step + i32(done) * i32(STEPS)
            tma_load_2d(target, a, at, row_at, arrived)
            if b_mn:
                for box in range(TILE_COLUMNS // 64):
                    tma_load_2d(target + a_bytes + box * BOX_BYTES, b, column_at + box * 64, at, arrived)
            else:
                tma_load_2d(target + a_bytes, b, at, column_at, arrived)
            stage, parity = after(stage, parity)
        return stage, parity

    @device_function
    def multiply(acc, consumer, leader, base, full, empty, ahead, turn, rounds, stage, parity):
        """acc = A B over `rounds` rounds. leader: whether this thread speaks for its warpgroup.

        ahead: the barrier that the first consumer passes `lead` rounds into a tile, and the second waits for; turn: its
        phase.
        """
        previous = i32(0)
        if lead > 0 and consumer == 1:
            mbarrier_wait(ahead, turn)
        for done in range(rounds):
            mbarrier_wait(full + stage * 8, parity)
            target = base + stage * stage_bytes
            start(
                acc, smem_descriptor(target + consumer * BOX_BYTES), smem_descriptor(target + a_bytes), i32(done != 0)
            )
            wait_all_but_latest(acc)
            if done != 0 and leader:
                mbarrier_arrive(empty + previous * 8)
            if lead > 0 and consumer == 0 and leader and done == min(lead, rounds - 1):
                mbarrier_arrive(ahead)
            previous = stage
            stage, parity = after(stage, parity)
        wait_all(acc)
        if leader:
            mbarrier_arrive(empty + previous * 8)
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
def find_part(acc, begin, target, found):
    """The logit of column `target` of a part, if that is a column of this lane; else `found`."""
    for b in range(8):
        for c in range(2):
            if target == 8 * b + c:
                found = acc[begin + 4 * b + c]
    return found


@device_function
def find(acc, begin, target):
    """The logit of column `target`, counted from this lane's first, of a row of a tile; 0 if it is another lane's."""
    found = find_part(acc, begin, target, np.float32(0.0))
    found = find_part(acc, begin + 32, i32(target - 64), found)
    found = find_part(acc, begin + 64, i32(target - 128), found)
    return find_part(acc, begin + 96, i32(target - 192), found)


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
def scale_part(acc, begin, factor):
    for b in range(8):
        for c in range(2):
            acc[begin + 4 * b + c] *= factor


@device_function
def largest_of_row(acc, begin, largest, at):
    """largest[at : at + 4]: of the four parts of a row of a tile, this lane's columns. Returns their largest."""
    largest[at] = largest_of_sixteen(acc, begin, 4)
    largest[at + 1] = largest_of_sixteen(acc, begin + 32, 4)
    largest[at + 2] = largest_of_sixteen(acc, begin + 64, 4)
    largest[at + 3] = largest_of_sixteen(acc, begin + 96, 4)
    return max(max(largest[at], largest[at + 1]), max(largest[at + 2], largest[at + 3]))


@device_function
def base_of(largest, reference, factor, reach):
    """The logit whose exponential is 1 in a tile with this largest one: the row's reference, if that is near enough."""
    return reference if (largest - reference) * factor <= reach else largest


@functools.cache
def folders(entropy, top1, exponentials):
    """(fold_part, finish_row): what the forward does with a thread's accumulators of one row."""

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
            scale_part(acc, begin, exp2((largest - base) * factor))
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
    def finish_row(sums, start_column, quad_lane, factor, results, at):
        """Join the sums of a quad's lanes to results[at] (this lane's of the four; none if at < 0)."""
        sums = sums[0], sums[1], sums[2], i32(sums[3] + start_column + quad_lane * 2)
        sums = fold_lanes(sums, 1, factor)
        sums = fold_lanes(sums, 2, factor)
        if at >= 0:
            # Each lane of the quad writes one of the four.
            low = sums[1] if quad_lane == 1 else sums[0]
            high = np.float32(sums[3]) if quad_lane == 3 else sums[2]
            results[at] = high if quad_lane >= 2 else low

    return fold_part, finish_row


@functools.cache
def sender(tile):
    """(ready, send): how a consumer's accumulators leave, box by box, through shared memory.

    The boxes go round; of each, a thread of another warp speaks to the copy engine and waits for it.
    """
    boxes, box_columns, wide = tile.boxes, tile.box_columns, tile.mode == "slabs"
    pack_two = cvt_pack(tile.element)

    @device_function
    def ready(group, warp, lane):
        """Begin a tile: its first box is free."""
        if warp == 0 and lane == 0:
            bulk_wait_group_read()
        named_barrier_sync(group, WARPGROUP)

    @device_function
    def send(acc, piece, out_map, column, row, staged, group, warp, lane):
        """Write the accumulators of the piece-th box_columns columns to (row, column) of the output, and free a box."""
        here = staged + piece % boxes * BOX_BYTES
        if wide:
            line = warp * i32(16) + (lane >> i32(2))
            for block in range(4):
                i = (piece * 4 + block) * 4
                chunk = i32(block * 2) + ((lane & i32(3)) >> i32(1))
                target = here + line * i32(LINE)
                target += ((chunk ^ (line & i32(7))) << i32(4)) + ((lane & i32(1)) << i32(3))
                store_pair(target, acc[i], acc[i + 1])
                store_pair(target + 8 * LINE, acc[i + 2], acc[i + 3])
        else:
            line = warp * i32(16) + (lane & i32(15))
            for block in range(4):
                i = (piece * 4 + block) * 8
                chunk = i32(block * 2) + (lane >> i32(4))
                stmatrix_x4(
                    here + line * i32(LINE) + ((chunk ^ (line & i32(7))) << i32(4)),
                    pack_two(acc[i], acc[i + 1]),
                    pack_two(acc[i + 2], acc[i + 3]),
                    pack_two(acc[i + 4], acc[i + 5]),
                    pack_two(acc[i + 6], acc[i + 7]),
                )
        fence_proxy_async()
        if warp == (piece + 1) % boxes and lane == 0:
            bulk_wait_group_read()
        named_barrier_sync(group, WARPGROUP)
        if warp == piece % boxes and lane == 0:
            tma_store_2d(tensor_map_address(out_map), column + piece * box_columns, row, here)
            bulk_commit_group()

    return ready, send


@specialize
def head_kernel(tile):
    """The kernel of a HeadTile."""
    mode, groups, stages = tile.mode, tile.groups, tile.stages
    rows, stage_bytes, staged_bytes = tile.rows, tile.stage_bytes, tile.staged_bytes
    slabs, gradient, exponentials = mode == "slabs", mode == "gradient", mode == "exponentials"
    terms, writes, boxes = mode in ("terms", "exponentials"), mode != "terms", tile.boxes
    produce, multiply = main_loop(tile)
    fold_part, finish_row = folders(tile.entropy, tile.top1, exponentials)
    ready, send = sender(tile)
    accumulators = TILE_COLUMNS // 2
    count, reach = RESULTS, np.float32(REACH[tile.element])

    @device_function
    def fold_parts(acc, part, largest, base, factor, sums):
        """A part of both rows of a thread."""
        begin = 32 * part
        return (
            fold_part(acc, begin, part, largest[part], base[0], factor, sums[0]),
            fold_part(acc, begin + 2, part, largest[part + 4], base[1], factor, sums[1]),
        )

    @device_function
    def differentiate_parts(acc, part, targets, factor, shift, scale):
        """A part of both rows of a thread."""
        begin = 32 * part
        differentiate_part(acc, begin, i32(targets[0] - 64 * part), factor, shift[0], scale[0])
        differentiate_part(acc, begin + 2, i32(targets[1] - 64 * part), factor, shift[1], scale[1])

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, 1))
    def head_kernel(
        a_map, b_map, out_map, ids, lse, dlogp, temperature, results, chosen, m, n, k, first_id, slab_rounds, arriving
    ):
        """Tiles of 64 rows a consumer x 256 columns of a product with k steps of reduction.

        A (m, k): hidden rows or dz; B (n, k), or (k, n) for "slabs": rows of the output matrix from first_id on. ids,
        dlogp (m,); lse (m,), for "exponentials" the rows' references; results (m, tiles, 4) and chosen (m,), the logits
        of ids, are written by "terms" and "exponentials"; the matrix of out_map by all but "terms": dz, the
        exponentials, or with "slabs" the parts of A B, slab_rounds rounds each, one below the other, m rounded up to
        whole tiles apart. What a mode does not use is one element long. arriving: bytes of a stage's boxes. Shared
        memory: stages of [A | B], staged output, barriers: full and empty for every stage, ahead.
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
                mbarrier_init(full + stage * 8, 1)
                mbarrier_init(empty + stage * 8, groups)
            mbarrier_init(ahead, 1)
            mbarrier_init_fence()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + TILE_COLUMNS - 1) // TILE_COLUMNS)
        rounds = i32((k + STEPS - 1) // STEPS)
        slab_tiles = tiles_down * tiles_across
        tiles = slab_tiles
        if slabs:
            tiles *= i32((rounds + slab_rounds - 1) // slab_rounds)
        apart = i32(cuda.gridDim.x)
        if slabs and tiles - slab_tiles < apart:
            # Tiles of the last slab, which may be shorter, are left to the blocks without one of the others.
            apart = i32(apart - (tiles - slab_tiles)) if cuda.blockIdx.x >= tiles - slab_tiles else tiles
        stage, slab, step, slab_rows = i32(0), i32(0), i32(0), i32(0)
        if group == 0:
            setmaxnreg_dec()
            if thread == 0:
                a, b = tensor_map_address(a_map), tensor_map_address(b_map)
                # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
                parity = i32(1)
                for index in range(i32(cuda.blockIdx.x), tiles, apart):
                    here = rounds
                    if slabs:
                        slab = udiv(i32(index), slab_tiles)
                        step = i32(slab * slab_rounds) * i32(STEPS)
                        here = min(i32(slab_rounds), i32(rounds - slab * slab_rounds))
                    row, column = place(i32(index) - slab * slab_tiles, tiles_down, tiles_across)
                    stage, parity = produce(
                        a, b, base, full, empty, arriving, row * rows, column * TILE_COLUMNS, step, here, stage, parity
                    )
        else:
            setmaxnreg_inc()
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
            largest, bases = cuda.local.array(8, np.float32), cuda.local.array(2, np.float32)
            at = cuda.local.array(2, np.int64)
            parity, turn = i32(0), i32(0)
            for index in range(i32(cuda.blockIdx.x), tiles, apart):
                here = rounds
                if slabs:
                    slab = udiv(i32(index), slab_tiles)
                    slab_rows = slab * tiles_down * i32(rows)
                    here = min(i32(slab_rounds), i32(rounds - slab * slab_rounds))
                row, column = place(i32(index) - slab * slab_tiles, tiles_down, tiles_across)
                first_row = i32(slab_rows + row * rows + consumer * ROWS)
                # This thread's accumulators: rows `line` and line + 8, columns 8 b + 2 (lane % 4) and the next.
                line = i32(row * rows + consumer * ROWS + warp * i32(16) + (lane >> i32(2)))
                start_column = i32(column * TILE_COLUMNS)
                for half in range(2):
                    targets[half], shift[half], scale[half] = i32(-1), np.float32(0.0), np.float32(0.0)
                    if not slabs and line + half * 8 < m:
                        targets[half] = i32(ids[line + half * 8] - i32(first_id) - start_column - quad_lane * 2)
                        if gradient:
                            shift[half] = -lse[line + half * 8] * LOG2_E
                            scale[half] = dlogp[line + half * 8] / temperature
                        if exponentials:
                            shift[half] = lse[line + half * 8]
                stage, parity = multiply(acc, consumer, leader, base, full, empty, ahead, turn, here, stage, parity)
                turn ^= i32(1)
                # Columns beyond the vocabulary, in the last tile.
                if not slabs and start_column + i32(TILE_COLUMNS) > n:
                    fill_beyond(acc, start_column + quad_lane * 2, n)
                if writes:
                    ready(group, warp, lane)
                if terms:
                    for half in range(2):
                        at[half] = -1
                        if line + half * 8 < m:
                            at[half] = (np.int64(line + half * 8) * tiles_across + column) * count + quad_lane
                    # A lane has the columns 0, 1, 8, 9, 16, ... from its first.
                    if i32(0) <= targets[0] < i32(TILE_COLUMNS) and targets[0] & i32(6) == 0:
                        chosen[line] = find(acc, 0, targets[0])
                    if i32(0) <= targets[1] < i32(TILE_COLUMNS) and targets[1] & i32(6) == 0:
                        chosen[line + 8] = find(acc, 2, targets[1])
                    bases[0] = largest_of_row(acc, 0, largest, 0)
                    bases[1] = largest_of_row(acc, 2, largest, 4)
                    if exponentials:
                        for half in range(2):
                            bases[half] = max(bases[half], shuffle_xor(bases[half], 1))
                            bases[half] = max(bases[half], shuffle_xor(bases[half], 2))
                            bases[half] = base_of(bases[half], shift[half], factor, reach)
                    none = NONE, np.float32(0.0), np.float32(0.0), i32(0)
                    sums = fold_parts(acc, 0, largest, bases, factor, (none, none))
                    if exponentials:
                        send(acc, 0, out_map, start_column, first_row, staged, group, warp, lane)
                    sums = fold_parts(acc, 1, largest, bases, factor, sums)
                    if exponentials:
                        send(acc, 1, out_map, start_column, first_row, staged, group, warp, lane)
                    sums = fold_parts(acc, 2, largest, bases, factor, sums)
                    if exponentials:
                        send(acc, 2, out_map, start_column, first_row, staged, group, warp, lane)
                    sums = fold_parts(acc, 3, largest, bases, factor, sums)
                    if exponentials:
                        send(acc, 3, out_map, start_column, first_row, staged, group, warp, lane)
                    finish_row(sums[0], start_column, quad_lane, factor, results, at[0])
                    finish_row(sums[1], start_column, quad_lane, factor, results, at[1])
                if gradient:
                    differentiate_parts(acc, 0, targets, factor, shift, scale)
                    send(acc, 0, out_map, start_column, first_row, staged, group, warp, lane)
                    differentiate_parts(acc, 1, targets, factor, shift, scale)
                    send(acc, 1, out_map, start_column, first_row, staged, group, warp, lane)
                    differentiate_parts(acc, 2, targets, factor, shift, scale)
                    send(acc, 2, out_map, start_column, first_row, staged, group, warp, lane)
                    differentiate_parts(acc, 3, targets, factor, shift, scale)
                    send(acc, 3, out_map, start_column, first_row, staged, group, warp, lane)
                if slabs:
                    for piece in range(TILE_COLUMNS // 32):
                        send(acc, piece, out_map, start_column, first_row, staged, group, warp, lane)
            if writes and warp < boxes and lane == 0:
                bulk_wait_group()

    return head_kernel


@device_function
def merge(results, tiles, row, factor, scratch, groups):
    """(largest, total, weighted, top) of a row, the same in all MERGE_THREADS threads: the last steps of row_sum.py.

    results (N, tiles, 4), flat. MERGE_STEP threads own a class of tiles.
    """
    values = cuda.local.array(RESULTS, np.float32)
    largest, total, weighted, top = NONE, np.float32(0.0), np.float32(0.0), i32(0)
    for tile in range(cuda.threadIdx.x // MERGE_STEP, tiles, CLASSES):
        load_four(results, (np.int64(row) * tiles + tile) * RESULTS, values, 0)
        if values[0] > largest:
            top = i32(values[3])
        largest, total, weighted = join(largest, total, weighted, values[0], values[1], values[2], factor)
    _, top = lowest_of_best(largest, top, scratch)
    largest, total, weighted = join_classes(largest, total, weighted, MERGE_STEP, factor, groups)
    return largest, total, weighted, top


@cuda.jit
def merge_kernel(results, chosen, temperature, logp, lse, entropy, top1):
    """A block owns a row. entropy and top1 without elements are left out. An id outside the vocabulary gives NaN."""
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    row = cuda.blockIdx.x
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    tiles = results.shape[0] // (RESULTS * chosen.shape[0])
    largest, total, weighted, top = merge(results, tiles, row, LOG2_E / temperature, scratch, groups)
    if cuda.threadIdx.x == 0:
        row_lse, row_entropy = row_results(largest, total, weighted, temperature)
        logp[row] = chosen[row] / temperature - row_lse
        lse[row] = row_lse
        if entropy.shape[0] > 0:
            entropy[row] = row_entropy
        if top1.shape[0] > 0:
            top1[row] = top


load_four, store_four = vector_access(4, 4)
load_eight, store_eight = vector_access(EIGHT, EIGHT)


@device_function
def finish_eight(values, at, first, p, target, target_gradient):
    """values[at + i], exponentials of columns first + i, become -p times them; the target's, if it is one, its own."""
    for i in range(EIGHT):
        values[at + i] *= -p
        if first + i == target:
            values[at + i] = target_gradient


@cuda.jit
def reference_kernel(hidden, weight, ids, reference):
    """reference[row] = hidden[row] . weight[ids[row]], about the logit of the row's id; NaN without such an id.

    A warp owns a row, a lane EIGHT neighbouring elements at a time.
    """
    row = cuda.blockIdx.x * REFERENCE_ROWS + cuda.threadIdx.x // 32
    if row < hidden.shape[0]:
        token, total = ids[row], np.float32(math.nan)
        values = cuda.local.array(SIXTEEN, np.float32)
        if 0 <= token < weight.shape[0]:
            total = np.float32(0.0)
            for column in range(cuda.threadIdx.x % 32 * EIGHT, hidden.shape[1], 32 * EIGHT):
                load_eight(hidden[row], column, values, 0)
                load_eight(weight[token], column, values, EIGHT)
                for i in range(EIGHT):
                    total += values[i] * values[EIGHT + i]
        total = warp_sum(total)
        if cuda.threadIdx.x % 32 == 0:
            reference[row] = total


@cuda.jit
def finish_kernel(
    exponentials, results, chosen, reference, ids, temperature, reach, dlogp, hidden,
    logp, lse, entropy, top1, scaled, factors,
):  # fmt: skip
    """merge_kernel, and what is left to do for dz = dlogp / T (onehot(ids) - p) when "exponentials" has run.

    exponentials (rows, pitch) are e = 2^((z - base) factor), base the row's reference or, by base_of, the largest
    logit of a tile. A row in which all have the reference keeps them: dz = c e with c = -dlogp / T 2^(reference
    factor - lse log2(e)), and the factor c goes to factors[row] and to scaled[row] = c hidden[row]; only the target's
    element becomes e - 1 / p. In any other row they become dz, scaled[row] = hidden[row] and factors[row] = 1. The
    target's comes from its own float32 logit, so that a probability near 1 leaves an exact gradient. Columns from the
    vocabulary's end on stay 0. A block owns a row, a thread twice EIGHT neighbouring elements at a time, both loads
    under way.
    """
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    row = cuda.blockIdx.x
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    pitch, width = exponentials.shape[1], hidden.shape[1]
    tiles = results.shape[0] // (RESULTS * chosen.shape[0])
    factor = LOG2_E / temperature
    largest, total, weighted, top = merge(results, tiles, row, factor, scratch, groups)
    row_lse, row_entropy = row_results(largest, total, weighted, temperature)
    shift = -row_lse * LOG2_E
    scale = dlogp[row] / temperature
    target = ids[row]
    rest = np.float32(1.0) - exp2(cuda.fma(chosen[row], factor, shift))
    row_reference = reference[row]
    above = -cuda.fma(row_reference, factor, shift)
    own = np.float32(1.0)
    # No logit of the row is above its lse: by less than 1 after rounding.
    plain = above <= reach - np.float32(1.0)
    if plain:
        own = -scale * exp2(-above)
    else:
        values = cuda.local.array(SIXTEEN, np.float32)
        line, first_result = exponentials[row], np.int64(row) * tiles * RESULTS
        apart = EIGHT * MERGE_THREADS
        for first in range(EIGHT * cuda.threadIdx.x, pitch, 2 * apart):
            second = first + apart
            there = second if second < pitch else first
            load_eight(line, first, values, 0)
            load_eight(line, there, values, EIGHT)
            base = base_of(results[first_result + first // TILE_COLUMNS * RESULTS], row_reference, factor, reach)
            other = base_of(results[first_result + there // TILE_COLUMNS * RESULTS], row_reference, factor, reach)
            p, other_p = exp2(cuda.fma(base, factor, shift)), exp2(cuda.fma(other, factor, shift))
            finish_eight(values, 0, first, scale * p, target, scale * rest)
            finish_eight(values, EIGHT, there, scale * other_p, target, scale * rest)
            store_eight(line, first, values, 0)
            if second < pitch:
                store_eight(line, second, values, EIGHT)
    if cuda.threadIdx.x == 0:
        if plain and 0 <= target < pitch:
            exponentials[row, target] = narrow(-exp2(above) * rest, exponentials)
        factors[row] = own
        logp[row] = chosen[row] / temperature - row_lse
        lse[row] = row_lse
        if entropy.shape[0] > 0:
            entropy[row] = row_entropy
        if top1.shape[0] > 0:
            top1[row] = top
    for column in range(EIGHT * cuda.threadIdx.x, width, EIGHT * MERGE_THREADS):
        eight = cuda.local.array(EIGHT, np.float32)
        load_eight(hidden[row], column, eight, 0)
        for i in range(EIGHT):
            eight[i] *= own
        store_eight(scaled[row], column, eight, 0)


@cuda.jit
def add_slabs_kernel(parts, rows, factors, out):
    """out[row] = factors[row] times the sum of parts[row + slab * rows], slabs ascending.

    A block owns a row of out, a thread four neighbouring elements at a time.
    """
    row = cuda.blockIdx.x
    values, total = cuda.local.array(4, np.float32), cuda.local.array(4, np.float32)
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    for column in range(4 * cuda.threadIdx.x, out.shape[1], 4 * cuda.blockDim.x):
        for i in range(4):
            total[i] = np.float32(0.0)
        for at in range(row, parts.shape[0], rows):
            load_four(parts[at], column, values, 0)
            for i in range(4):
                total[i] += values[i]
        for i in range(4):
            total[i] *= factors[row]
        store_four(out[row], column, total, 0)


def is_supported(hidden, weight):
    """Whether the kernels of this module serve these arrays: where gemm/sm90.py makes the float32 logits of them.

    What is sampled from those must be scored with the same bits, so the rows of (N, V) logits count, too.
    """
    whole_rows = weight.shape[0] * 4 % CHUNK == 0
    return hidden.dtype != np.float32 and hidden.size > 0 and whole_rows and is_16_byte_aligned(hidden, weight)


@functools.cache
def _one(kind, dimensions):
    """An array of one element that stands for an argument left out."""
    return device.xp().zeros((1,) * dimensions, kind)


def _head(tile, a, b, out, ids, lse, dlogp, temperature, results, chosen, first_id=0, slab_rounds=0):
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
        pdl=ALWAYS,
    )


def _optional(logp, ids, entropy, top1):
    """entropy and top1 as kernels take them: arrays without elements for what is left out."""
    return logp[:0] if entropy is None else entropy, ids[:0] if top1 is None else top1


def _part(array, rows):
    return None if array is None else array[rows]


def linear_logp(hidden, weight, ids, temperature, logp, lse, entropy=None, top1=None, tile=None):
    """logprob.linear_logp without a bias and without ignored rows, for arrays that is_supported() accepts.

    tile: a HeadTile of mode "terms" instead of the best.
    """
    tile = tile or HeadTile(hidden.dtype.name, "terms", entropy=entropy is not None, top1=top1 is not None)
    xp = device.xp()
    tiles = -(-weight.shape[0] // TILE_COLUMNS)
    step = forward_rows(weight.shape[0], tile.rows)
    memory = xp.empty(min(step, hidden.shape[0]) * tiles * RESULTS, np.float32)
    all_chosen = xp.full(ids.shape, math.nan, np.float32)
    for first in range(0, hidden.shape[0], step):
        rows = slice(first, min(first + step, hidden.shape[0]))
        count = rows.stop - first
        results, chosen = memory[: count * tiles * RESULTS], all_chosen[rows]
        _head(tile, hidden[rows], weight, None, ids[rows], None, None, temperature, results, chosen)
        outputs = logp[rows], lse[rows], *_optional(logp, ids, _part(entropy, rows), _part(top1, rows))
        launch(merge_kernel, count, MERGE_THREADS, results, chosen, float(temperature), *outputs, pdl=ALWAYS)


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
    """logprob.linear_logp_backward without a bias and without ignored rows, for arrays that is_supported() accepts.

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
            _head(tile, h, part, dz, *terms, temperature, None, None, first)
            gemm_sm90.product(dz, part, wide, b_mn=True, add=first > 0)
            gemm_sm90.product(dz, h, dweight[chunk], a_mn=True, b_mn=True, add=True)
        cast(wide, dhidden[rows])


def one_pass_shape(width, vocabulary, rows_of_tile=128):
    """(rows, slabs) of the one-pass form's blocks: as many rows as EXTRA_BYTES allow, slabs that fill the SMs.

    A row has its exponentials, its tile results, its scaled hidden state, a part of the gradient in each slab, and the
    copies.
    """
    pitch = vocabulary + -vocabulary % 8
    a_row = 2 * pitch + 4 * RESULTS * -(-vocabulary // TILE_COLUMNS) + (2 + COPIES) * width
    best = None
    for slabs in range(1, 17):
        rows = EXTRA_BYTES // (a_row + 4 * slabs * width) // rows_of_tile * rows_of_tile
        rows = max(rows, rows_of_tile)
        rounds, tiles = -(-pitch // STEPS), rows // rows_of_tile * -(-width // TILE_COLUMNS)
        _, longest = slab_division(rounds, tiles, slabs)
        # dweight's traffic grows with the number of blocks, dhidden's time with the share of idle SMs.
        cost = longest * processors() / (tiles * rounds) + 0.5 * 768 / rows
        if best is None or cost < best[0]:
            best = cost, rows, slabs
    return best[1:]


def slab_division(rounds, tiles, slabs):
    """(rounds of a slab, rounds of the SM that has most) for `tiles` tiles, cut into at most so many slabs.

    Either all slabs have the same length, or the last one is shorter, and the SMs that have no tile of the others do
    several of its: 24 tiles on 132 SMs are 120 tiles of five slabs, and for 12 SMs two tiles each of half a slab.
    """
    candidates = []
    for count in range(1, slabs + 1):
        length = -(-rounds // count)
        candidates.append((-(-tiles * count // processors()) * length, length))
        idle = processors() - tiles * (count - 1)
        if 0 < idle < tiles:
            turns = -(-tiles // idle)
            length = -(-rounds * turns // ((count - 1) * turns + 1))
            candidates.append((max(length, turns * (rounds - (count - 1) * length)), length))
    longest, length = min(candidates)
    return length, longest


def linear_logp_with_gradient(
    hidden, weight, ids, temperature, dlogp, logp, lse, dhidden, dweight, entropy=None, top1=None, accumulate=True,
    tile=None, shape=None, slab_tile=None,
):  # fmt: skip
    """logprob.linear_logp_with_gradient without ignored rows, in three products, for arrays that is_supported() accepts.

    tile: a HeadTile of mode "exponentials", slab_tile: of "slabs", shape: (rows, slabs) of a block, instead of the
    best.
    """
    tile = tile or HeadTile(hidden.dtype.name, "exponentials", entropy=entropy is not None, top1=top1 is not None)
    parts_tile = slab_tile or HeadTile(tile.element, "slabs", tile.groups, tile.stages, tile.lead, tile.boxes)
    xp = device.xp()
    vocabulary, width = weight.shape
    step, slabs = shape or one_pass_shape(width, vocabulary)
    most_parts = slabs * step
    step = min(step, -(-hidden.shape[0] // tile.rows) * tile.rows)
    tiles, pitch = -(-vocabulary // TILE_COLUMNS), vocabulary + -vocabulary % 8
    rounds = -(-pitch // STEPS)
    results_memory = xp.empty(step * tiles * RESULTS, np.float32)
    memory = xp.empty(step * pitch, hidden.dtype)
    parts_memory = xp.empty(most_parts * width, np.float32)
    scaled_memory = xp.empty((step, width), hidden.dtype)
    factors, reference = xp.empty(step, np.float32), xp.empty(ids.shape, np.float32)
    all_chosen = xp.full(ids.shape, math.nan, np.float32)
    launch(reference_kernel, -(-len(ids) // REFERENCE_ROWS), 32 * REFERENCE_ROWS, hidden, weight, ids, reference)
    end = 0
    while end < hidden.shape[0]:
        count = (hidden.shape[0] - end) % step or step
        rows, end = slice(end, end + count), end + count
        h, targets, near, scaled = hidden[rows], ids[rows], reference[rows], scaled_memory[:count]
        results, chosen = results_memory[: count * tiles * RESULTS], all_chosen[rows]
        dz = memory[: count * pitch].reshape(count, pitch)
        _head(tile, h, weight, dz, targets, near, None, temperature, results, chosen)
        outputs = logp[rows], lse[rows], *_optional(logp, ids, _part(entropy, rows), _part(top1, rows))
        inputs = dz, results, chosen, near, targets, float(temperature), REACH[tile.element], dlogp[rows], h
        launch(finish_kernel, count, MERGE_THREADS, *inputs, *outputs, scaled, factors[:count], pdl=ALWAYS)
        apart = -(-count // tile.rows) * tile.rows
        # A block that is shorter than others has as many tiles, in more slabs.
        slab_rounds, _ = slab_division(rounds, apart // tile.rows * -(-width // TILE_COLUMNS), most_parts // apart)
        height = -(-rounds // slab_rounds) * apart
        parts = parts_memory[: height * width].reshape(height, width)
        _head(parts_tile, dz, weight, parts, None, None, None, 1.0, None, None, slab_rounds=slab_rounds)
        launch(add_slabs_kernel, count, SLAB_THREADS, parts, apart, factors[:count], dhidden[rows], pdl=ALWAYS)
        gemm_sm90.product(dz, scaled, dweight, a_mn=True, b_mn=True, add=accumulate or rows.start > 0)
