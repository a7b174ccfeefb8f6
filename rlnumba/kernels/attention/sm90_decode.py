"""Attention of new tokens to a cache in blocks, on Hopper: decode here, longer chunks by attention_sm90's kernel.

The arithmetic is defined at the top of kernels/attention/sm90_forward.py, and a row's bits are the same in all three.

Decode has one or a few query tokens a sequence: with the query heads of a key head, a handful of rows, where the
tensor cores want 64. So keys and queries change places: S^T = K Q^T has 64 keys for rows and the queries, `rows`
of them with padding, for columns, and O^T = V^T P^T the columns of v for rows. A row of scores lies across the
warps: its maximum goes through shared memory, and so does P^T on its way to be an operand.

A unit of work is a sequence, a key head and a segment of SEGMENT_KEYS keys; a sequence's first unit may have several, a run.
A small kernel lists them, once for all layers of a step: a Plan. Blocks stay on their SM. In each, a warpgroup
computes, and three warps serve it. Two bring keys and values: they draw lines of the list from a common counter, and
look up the next unit while the copy engine still brings the tiles of this. Where a sequence has more than one unit,
each writes (m, l, acc) to a workspace, and the third warp of whichever block is last merges them, in the order of the
segments; a run is added up in registers, in the same order. All of it follows arrays on the device, so a captured graph
stays valid.

Sequences with a common beginning, such as the completions of one prompt, may be declared a group: the segments that
lie wholly in the common beginning are read once for all group_sizes, whose queries then share the columns of a unit.
These
units are drawn first.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.sm90_forward import (
    MAX_DECODE_ROWS,
    SHARED_LIMIT,
    WARPGROUP,
    attention_config,
    launch_attention,
    no_array,
    page_lookup,
    zero_function,
)
from rlnumba.kernels.attention.softmax import (
    LOG2_E,
    MINUS_INFINITY,
    SEGMENT_KEYS,
    TILE_KEYS,
    log_sum_exp,
    merge_weights,
    next_row_max,
)
from rlnumba.kernels.gemm.sm90 import processors, udiv
from rlnumba.kernels.ptx.sm90 import (
    BOX_BYTES,
    LINE,
    Address,
    cvt_pack,
    fence_proxy_async,
    load_pair,
    load_word,
    load_words,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    shared_address,
    smem_descriptor,
    stmatrix_x2_trans,
    store_pair,
    tensor_map,
    tensor_map_address,
    tma_load_3d,
    tma_load_3d_evict_first,
    warp_uniform,
    wgmma,
)
from rlnumba.kernels.ptx.sm90_async import atomic_add_acq_rel, load_acquire, prefetch_tensor_map, setmaxnreg
from rlnumba.kernels.ptx.warp import (
    ballot,
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    int_as_float,
    shuffle,
    shuffle_up,
    shuffle_xor,
    sync_warp,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Where the kernels of this module compile.
ARCHITECTURES = [(9, 0, "a")]

# Units whose queries may be in shared memory: the one that is worked on, and the next.
SLOTS = 2
# Tickets that may have been drawn before the producer of values reads the first of them: see there.
TICKETS = 4
# Two warpgroups: the first computes; of the second, two warps bring keys and values, one merges, one is idle.
THREADS = 2 * WARPGROUP
# Units with partial results that wait for the merging warp.
LETTERS = 2
# Query tokens of the longest chunks whose consumers take neighbouring tokens.
SHORT_CHUNK = 512
# Of a thread of the warps that serve, and of one that computes, where 128 for each are not enough.
FEW_REGISTERS, MANY_REGISTERS = 88, 168
# Threads of the block that lists units, at most.
PLANNERS = 256
PLANNING_WARPS = PLANNERS // 32
# What the list says of a unit: tiles, sequence, which of its units, first key, first token, tokens, context, sequences
# that share it (0: not a group's), units of the sequence.
TILES, SEQUENCE, PART, FIRST_KEY, START, LENGTH, CONTEXT, SHARING, PARTS = range(9)
FIELDS = 9
# What a producer adds for the consumers: the key head, and whether the unit goes on from its group's part.
KEY_HEAD, GOES_ON = FIELDS, FIELDS + 1
TOLD = FIELDS + 2
# The four warps that compute meet at two named barriers in turn: at 1 before they read each other's maxima (or sums),
# at 2 before the tensor cores read the probabilities of all. What is read behind a meeting is written again only after
# the next.


class Tile(NamedTuple):
    """One kernel. rows: columns of S^T, a multiple of 8; box: keys of one copy, a cache block's tokens or 64.

    stages: tiles of keys and values under way; blocks: of an SM; grouped: groups read common segments once.
    """

    head_dim: int
    element: str
    rows: int = 8
    box: int = 16
    stages: int = 3
    blocks: int = 2
    grouped: bool = False
    segment: int = SEGMENT_KEYS

    @property
    def most_run(self):
        """Segments that a unit may have: several where a thread has registers for their total."""
        return {8: 4, 16: 2}.get(self.rows, 1)

    @property
    def carries(self):
        """Whether a sequence's own unit may go on from its group's part, which takes the registers of a run."""
        return self.grouped and self.most_run > 1

    @property
    def moves_registers(self):
        """Whether the warps that serve give registers to those that compute: 128 for each are enough for 8 rows."""
        return self.blocks > 1 and self.rows > 8

    @property
    def boxes(self):
        """128-byte lines that a row of q, k or v takes."""
        return -(-self.head_dim // 64)

    @property
    def tile_bytes(self):
        """Of 64 rows of k or v in shared memory."""
        return self.boxes * BOX_BYTES

    @property
    def shared_bytes(self):
        """Dynamic shared memory: tiles, queries, probabilities, maxima, sums, barriers, alignment."""
        tiles = 2 * self.stages * self.tile_bytes
        rows = (SLOTS * self.boxes + 1) * self.rows * LINE
        exchanged = (2 * 4 + 4 * 8) * self.rows * 4
        return tiles + rows + exchanged + 16 * (self.stages + SLOTS + LETTERS) + 8 * TICKETS + 1024


@functools.cache
def division_functions(segment, grouped):
    """(common_of, run_of, parts_of): the device functions that tell how a sequence is cut into units."""

    @device_function
    def common_of(sequence, common):
        """Whole segments that a sequence has in common with its group."""
        return i32(common[sequence] // segment) if grouped else i32(0)

    @device_function
    def run_of(sequence, contexts, common, run):
        """Segments of the first unit: at most `run`, and all of the group's or of the sequence's own."""
        several = common_of(sequence, common)
        if several == 0:
            several = max(i32((contexts[sequence] + (segment - 1)) // segment), i32(1))
        return min(i32(run), several)

    @device_function
    def parts_of(sequence, contexts, common, run):
        """How many units compute a sequence and key head: the run, and one for each segment behind it."""
        segments = i32((contexts[sequence] + (segment - 1)) // segment)
        return max(i32(segments - run_of(sequence, contexts, common, run) + 1), i32(1))

    return common_of, run_of, parts_of


@functools.cache
def unit_functions(rows, segment, grouped):
    """(shared_of, units_of): the device functions that count units of a sequence, for a key head."""
    common_of, run_of, parts_of = division_functions(segment, grouped)

    @device_function
    def shared_of(sequence, contexts, common, run):
        """Units that a sequence has in common with its group."""
        several = common_of(sequence, common)
        return i32(several - run_of(sequence, contexts, common, run) + 1) if several > 0 else i32(0)

    @device_function
    def units_of(sequence, sequences, cu_seqlens, contexts, common, group_sizes, group, run, shared):
        """Units of a group, which its first sequence stands for, if `shared`, else a sequence's own.

        Beyond the last sequence none. Sequences with more than `rows` queries are the other kernel's, except that
        those without keys get their zeros here.
        """
        units = i32(0)
        if sequence < sequences:
            tokens = i32(cu_seqlens[sequence + 1] - cu_seqlens[sequence])
            if tokens > 0 and contexts[sequence] == 0:
                units = i32(0) if shared else i32(1)
            elif tokens > 0 and i32(tokens * group) <= rows:
                in_common = shared_of(sequence, contexts, common, run)
                if not shared:
                    units = i32(parts_of(sequence, contexts, common, run) - in_common)
                elif group_sizes[sequence] > 0:
                    units = in_common
        return units

    return shared_of, units_of


@device_function
def summed_before(value, lane):
    """The sum of a value over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = shuffle_up(value, distance)
        if lane >= distance:
            value = i32(value + other)
    return value


@specialize
def plan_units_kernel(rows, segment, grouped):
    """The kernel that lists the units of decode, for a Tile of so many rows."""
    _, run_of, parts_of = division_functions(segment, grouped)
    shared_of, units_of = unit_functions(rows, segment, grouped)

    @cuda.jit(launch_bounds=(PLANNERS, 1))
    def plan_units_kernel(cu_seqlens, contexts, common, group_sizes, group, run, units):
        """One block, a thread for each sequence in turn. units (1 + all units, FIELDS): how many, then each.

        What groups share comes first: it takes longer than what their group_sizes have alone. Then the order is that of
        the sequences, and of a sequence's keys. common, group_sizes: empty if not grouped.
        """
        sums = cuda.shared.array(PLANNING_WARPS, np.int32)
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        thread, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp = thread & i32(31), thread >> i32(5)
        sequences, listed = i32(cu_seqlens.shape[0] - 1), i32(0)
        for turn in range(0 if grouped else 1, 2):
            shared = turn == 0
            for first in range(0, sequences, threads):
                sequence = i32(first + thread)
                mine = units_of(sequence, sequences, cu_seqlens, contexts, common, group_sizes, group, run, shared)
                up_to = summed_before(mine, lane)
                if lane == 31:
                    sums[warp] = up_to
                cuda.syncthreads()
                row = i32(1 + listed + up_to - mine)
                for other in range(threads // 32):
                    listed = i32(listed + sums[other])
                    if other < warp:
                        row = i32(row + sums[other])
                cuda.syncthreads()
                for i in range(mine):
                    start, context = cu_seqlens[sequence], contexts[sequence]
                    own_run, number, sharing = run_of(sequence, contexts, common, run), i32(i), i32(0)
                    if grouped and shared:
                        sharing = group_sizes[sequence]
                    elif grouped:
                        number = i32(number + shared_of(sequence, contexts, common, run))
                    first_key, keys = i32(0), i32(own_run * segment)
                    if number > 0:
                        first_key, keys = i32((number - 1 + own_run) * segment), i32(segment)
                    keys = min(i32(context - first_key), keys)
                    units[row + i, TILES] = i32((keys + (TILE_KEYS - 1)) // TILE_KEYS)
                    units[row + i, SEQUENCE] = sequence
                    units[row + i, PART] = number
                    units[row + i, FIRST_KEY] = first_key
                    units[row + i, START] = start
                    units[row + i, LENGTH] = i32(cu_seqlens[sequence + 1] - start)
                    units[row + i, CONTEXT] = context
                    units[row + i, SHARING] = sharing
                    units[row + i, PARTS] = parts_of(sequence, contexts, common, run)
        if thread == 0:
            units[0, 0] = listed

    return plan_units_kernel


@device_function
def token_of(row, per_token):
    """row // group for few rows, without a division; per_token: 65,536 / group, rounded up."""
    return i32((np.uint32(row) * np.uint32(per_token)) >> np.uint32(16))


@functools.cache
def look_up_function(box, looked_up):
    """The device function by which a warp looks up where the boxes of a segment's keys lie."""
    paged_row = page_lookup(box)

    @device_function
    def look_up(known, block_tables, block_size, sequence, first_key, context, lane):
        """known[i]: the cache's row of the box at place 32 i + lane from first_key on."""
        for i in range(looked_up):
            key = i32(first_key + (i * 32 + lane) * box)
            known[i] = paged_row(block_tables, block_size, sequence, key, context)

    return look_up


@functools.cache
def fold_function(acc_count, columns):
    """The device function that adds a segment to the ones before it in the same unit."""

    @device_function
    def fold(acc, reference, running, total, total_reference, total_sum, first):
        """The total, in place, of what it was (no_array if `first`) and of a segment."""
        for i in range(columns):
            j = i // 2 * 4 + i % 2
            if first:
                total_reference[i], total_sum[i] = reference[i], running[i]
                for k in range(j, acc_count, 2 * columns):
                    total[k], total[k + 2] = acc[k], acc[k + 2]
            else:
                largest, a, b = merge_weights(total_reference[i], reference[i])
                total_reference[i] = largest
                total_sum[i] = cuda.fma(running[i], b, total_sum[i] * a)
                for k in range(j, acc_count, 2 * columns):
                    total[k] = cuda.fma(acc[k], b, total[k] * a)
                    total[k + 2] = cuda.fma(acc[k + 2], b, total[k + 2] * a)

    return fold


@functools.cache
def column_sum_function(rows):
    """The device function that adds up a unit's sums, of which a thread has those of its keys for each column."""

    @device_function
    def column_sums(running, place, warp, group_lane, pair):
        """running becomes the sums over all keys, in the order that row_sum of attention/sm90_forward.py follows.

        place: 128 rows bytes of shared memory. The columns of a thread are pair, pair + 1, pair + 8, pair + 9 ...
        """
        exchange = Address(place + (group_lane * rows + pair) * 4)
        for i in range(0, rows // 4, 2):
            store_pair(exchange + (warp * 8 * rows + i * 4) * 4, running[i], running[i + 1])
        named_barrier_sync(1, WARPGROUP)
        for i in range(0, rows // 4, 2):
            a0, a1 = load_pair(exchange + i * 16)
            b0, b1 = load_pair(exchange + (8 * rows + i * 4) * 4)
            c0, c1 = load_pair(exchange + (16 * rows + i * 4) * 4)
            d0, d1 = load_pair(exchange + (24 * rows + i * 4) * 4)
            running[i], running[i + 1] = (a0 + b0) + (c0 + d0), (a1 + b1) + (c1 + d1)
        for i in range(rows // 4):
            running[i] += shuffle_xor(running[i], 4)
            running[i] += shuffle_xor(running[i], 8)
            running[i] += shuffle_xor(running[i], 16)

    return column_sums


@functools.cache
def box_functions(box, head_dim, element, rows):
    """(stage_out, write_part, read_part): device functions for 64 columns of v of what a thread holds of a unit."""
    pack_two = cvt_pack(element)
    columns, first = rows // 4, box * rows // 2

    @device_function
    def stage_out(acc, inverse, target):
        """acc inverse to shared memory, a line of 64 columns for each row; target: as weight_target of the kernel."""
        for i in range(columns // 2):
            j = first + 4 * i
            low = pack_two(acc[j] * inverse[2 * i], acc[j + 1] * inverse[2 * i + 1])
            high = pack_two(acc[j + 2] * inverse[2 * i], acc[j + 3] * inverse[2 * i + 1])
            stmatrix_x2_trans(Address(target + (box * rows + i * 8) * LINE), low, high)

    @device_function
    def write_part(acc, row_of, parts, e):
        """The row_of-th row of parts (rows, E): acc from e on, where row_of is not -1."""
        for i in range(columns):
            at = np.int64(np.int64(row_of[i]) * head_dim + e)
            for half in range(2):
                column = box * 64 + half * 8
                if row_of[i] >= 0 and (head_dim % 64 == 0 or e + column < head_dim):
                    parts[at + column] = acc[first + i // 2 * 4 + half * 2 + i % 2]

    @device_function
    def read_part(acc, row_of, parts, e):
        """What write_part wrote, zeros where row_of is -1."""
        for i in range(columns):
            at = np.int64(np.int64(row_of[i]) * head_dim + e)
            for half in range(2):
                column, j = box * 64 + half * 8, first + i // 2 * 4 + half * 2 + i % 2
                acc[j] = f32(0.0)
                if row_of[i] >= 0 and (head_dim % 64 == 0 or e + column < head_dim):
                    acc[j] = parts[at + column]

    return stage_out, write_part, read_part


@functools.cache
def part_functions(boxes, head_dim, element, rows):
    """box_functions for all columns of v: a loop over boxes would be too long for NVVM to unroll."""
    # Functions of boxes that do not exist are not called.
    out_0, write_0, read_0 = box_functions(0, head_dim, element, rows)
    out_1, write_1, read_1 = box_functions(min(1, boxes - 1), head_dim, element, rows)
    out_2, write_2, read_2 = box_functions(min(2, boxes - 1), head_dim, element, rows)
    out_3, write_3, read_3 = box_functions(min(3, boxes - 1), head_dim, element, rows)

    @device_function
    def stage_out(acc, inverse, target):
        out_0(acc, inverse, target)
        if boxes > 1:
            out_1(acc, inverse, target)
        if boxes > 2:
            out_2(acc, inverse, target)
        if boxes > 3:
            out_3(acc, inverse, target)

    @device_function
    def write_part(acc, row_of, parts, e):
        write_0(acc, row_of, parts, e)
        if boxes > 1:
            write_1(acc, row_of, parts, e)
        if boxes > 2:
            write_2(acc, row_of, parts, e)
        if boxes > 3:
            write_3(acc, row_of, parts, e)

    @device_function
    def read_part(acc, row_of, parts, e):
        read_0(acc, row_of, parts, e)
        if boxes > 1:
            read_1(acc, row_of, parts, e)
        if boxes > 2:
            read_2(acc, row_of, parts, e)
        if boxes > 3:
            read_3(acc, row_of, parts, e)

    return stage_out, write_part, read_part


@functools.cache
def merge_function(head_dim, element, ahead):
    """The device function that merges the parts of a sequence and key head, `ahead` of which are loaded at once."""
    pack_two = cvt_pack(element)
    load_four, _ = vector_access(4, 4)
    loaded = 4 * ahead

    @device_function
    def merge(parts, references, sums, first, count, stride, rows, group, out, heads, lse, token, head, lane):
        """`rows` rows, of `group` of all heads from `head` on and tokens from `token` on, of which a warp's lanes
        compute four columns each at a time. first: the place of the first of `count` parts; stride: rows of a place."""
        some = cuda.local.array(loaded, np.float32)
        reference, total = cuda.local.array(ahead, np.float32), cuda.local.array(ahead, np.float32)
        kept = cuda.local.array(4, np.float32)
        for index in range(lane, rows * (head_dim // 4), 32):
            row = udiv(index, head_dim // 4)
            column = i32((index - row * (head_dim // 4)) * 4)
            kept_reference, kept_sum = MINUS_INFINITY, f32(0.0)
            for j in range(4):
                kept[j] = f32(0.0)
            for start in range(0, count, ahead):
                for i in range(ahead):
                    place = np.int64(first + min(start + i, count - 1)) * stride + row
                    load_four(parts, place * head_dim + column, some, 4 * i)
                    reference[i], total[i] = references[place], sums[place]
                for i in range(ahead):
                    if start + i == 0:
                        kept_reference, kept_sum = reference[i], total[i]
                        for j in range(4):
                            kept[j] = some[4 * i + j]
                    elif start + i < count:
                        largest, a, b = merge_weights(kept_reference, reference[i])
                        kept_reference = largest
                        kept_sum = cuda.fma(total[i], b, kept_sum * a)
                        for j in range(4):
                            kept[j] = cuda.fma(some[4 * i + j], b, kept[j] * a)
            token_of_row = udiv(row, group)
            head_of_row = i32(head + row - token_of_row * group)
            token_of_row = i32(token + token_of_row)
            inverse, place = f32(1.0) / kept_sum, i32(token_of_row * heads + head_of_row)
            for j in range(0, 4, 2):
                out[place, (column + j) // 2] = pack_two(kept[j] * inverse, kept[j + 1] * inverse)
            if column == 0 and lse.shape[0] > 0:
                lse[head_of_row, token_of_row] = log_sum_exp(kept_reference, kept_sum)

    return merge


@functools.cache
def producer_function(tile):
    """The device function of the two warps that bring keys and values."""
    boxes, tile_bytes, stages, box = tile.boxes, tile.tile_bytes, tile.stages, tile.box
    rows, runs, carries = tile.rows, tile.most_run > 1, tile.carries
    query_bytes = boxes * rows * LINE
    copies, segment, segment_tiles = TILE_KEYS // box, tile.segment, tile.segment // TILE_KEYS
    # Rows of the cache that a lane looks up for a segment, and tiles that 32 lanes know the rows of.
    looked_up, tiles_known = -(-segment // (box * 32)), 32 // copies
    look_up = look_up_function(box, looked_up)

    @device_function
    def bring_units(
        brings_k, q_source, source, units, block_tables, block_size, kv_heads, group, tokens, counters, info, tickets,
        addresses, lane,
    ):  # fmt: skip
        """Work of one of them until no units are left: it asks for the tiles of a unit, and finds the next meanwhile.

        Both find the same units in the same order. That of keys draws tickets, and tells the consumers. source: the
        map of k or v; addresses: of the ring and the queries, then of the barriers full, empty, q_full, q_empty and
        told; the rest as in the kernel.
        """
        ring, queries, full, empty, q_full, q_empty, told = addresses
        known, upcoming = cuda.local.array(looked_up, np.int32), cuda.local.array(looked_up, np.int32)
        known_next = cuda.local.array(looked_up, np.int32)
        part, column_box = lane % i32(copies), lane // i32(copies) % i32(boxes)
        mine = Address(ring + (i32(0) if brings_k else i32(tile_bytes)))
        place = Address(mine + column_box * BOX_BYTES + part * (box * LINE))
        field, last_row, listed = min(lane, i32(FIELDS - 1)), i32(units.shape[0] - 1), units[0, 0]
        drawn_before, ticket, goes_on = i32(0), i32(cuda.blockIdx.x), i32(0)
        index = udiv(ticket, kv_heads)
        record, working = units[min(i32(1 + index), last_row), field], index < listed
        tiles, sequence = shuffle(record, TILES), shuffle(record, SEQUENCE)
        first_key, context = shuffle(record, FIRST_KEY), shuffle(record, CONTEXT)
        if working and tiles > 0:
            look_up(known, block_tables, block_size, sequence, first_key, context, lane)
        griddepcontrol_wait()
        # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
        stage, slot, parity, q_parity = i32(0), i32(0), i32(1), i32(1)
        while working:
            arrived = Address(q_full + slot * 8)
            mbarrier_wait(Address(q_empty + slot * 8), q_parity)
            kv_head, drawn = i32(ticket - index * kv_heads), i32(0)
            if brings_k:
                start = shuffle(record, START)
                if lane < FIELDS:
                    info[slot, lane] = record
                # Every lane that wrote arrives, the first one below.
                if 0 < lane < FIELDS:
                    mbarrier_arrive(arrived)
                if lane == 0:
                    drawn = i32(cuda.atomic.add(counters, 0, i32(1)))
                    info[slot, KEY_HEAD], info[slot, GOES_ON] = kv_head, goes_on
                    if tiles > 0:
                        mbarrier_expect_tx(arrived, boxes * tokens * group * LINE)
                        for b in range(boxes):
                            target = Address(queries + slot * query_bytes + b * (rows * LINE))
                            tma_load_3d(target, q_source, b * 64, kv_head * group, start, arrived)
                    else:
                        mbarrier_arrive(arrived)
            else:
                # This unit's ticket is read.
                mbarrier_arrive(Address(q_empty + slot * 8))
            begins = True
            while begins or tiles > 0:
                # The rows of the next segment, if the unit has one, are looked up before they are needed.
                if runs and tiles > segment_tiles:
                    first_key = i32(first_key + segment)
                    look_up(upcoming, block_tables, block_size, sequence, first_key, context, lane)
                for i in range(looked_up):
                    for t in range(tiles_known):
                        if i * tiles_known + t < min(tiles, i32(segment_tiles)):
                            row = shuffle(known[i], t * copies + part)
                            mbarrier_wait(Address(empty + stage * 8), parity)
                            arrived = Address(full + stage * 8)
                            if lane == 0:
                                mbarrier_expect_tx(arrived, tile_bytes)
                            sync_warp()
                            if lane < boxes * copies:
                                target = Address(place + stage * (2 * tile_bytes))
                                # What the other kernels of a step reuse stays in the second-level cache.
                                tma_load_3d_evict_first(target, source, column_box * i32(64), kv_head, row, arrived)
                            stage = i32(stage + 1)
                            if stage == stages:
                                stage = i32(0)
                                parity ^= i32(1)
                        # The next unit is found while tiles of this one are on their way, but not before
                        # most places for tiles are taken: first which it is, then where its keys are.
                        if begins and i == 0 and t == stages - 2:
                            at = i32(drawn_before & (TICKETS - 1))
                            if brings_k:
                                ticket = i32(shuffle(drawn, 0) + cuda.gridDim.x)
                                if lane == 0:
                                    tickets[at] = ticket
                                    mbarrier_arrive(Address(told + at * 8))
                            else:
                                mbarrier_wait(Address(told + at * 8), i32(drawn_before // TICKETS & 1))
                                ticket = tickets[at]
                            drawn_before = i32(drawn_before + 1)
                            index = udiv(ticket, kv_heads)
                            record, working = units[min(i32(1 + index), last_row), field], index < listed
                        if begins and i == 0 and t == stages - 1 and working:
                            if shuffle(record, TILES) > 0:
                                look_up(
                                    known_next, block_tables, block_size, shuffle(record, SEQUENCE),
                                    shuffle(record, FIRST_KEY), shuffle(record, CONTEXT), lane,
                                )  # fmt: skip
                            if carries and brings_k:
                                goes_on = i32(0)
                                alone, parts_of_it = shuffle(record, SHARING) == 0, shuffle(record, PARTS)
                                if alone and shuffle(record, PART) == 1 and parts_of_it == 2:
                                    head_of_it = i32(ticket - index * kv_heads)
                                    counter = i32(2 + shuffle(record, SEQUENCE) * kv_heads + head_of_it)
                                    if lane == 0:
                                        goes_on = i32(load_acquire(counters, counter))
                begins, tiles = False, i32(tiles - segment_tiles)
                for i in range(looked_up):
                    known[i] = upcoming[i]
            tiles, sequence = shuffle(record, TILES), shuffle(record, SEQUENCE)
            first_key, context = shuffle(record, FIRST_KEY), shuffle(record, CONTEXT)
            for i in range(looked_up):
                known[i] = known_next[i]
            slot = i32(slot + 1)
            if slot == SLOTS:
                slot = i32(0)
                q_parity ^= i32(1)
        if brings_k:
            mbarrier_wait(Address(q_empty + slot * 8), q_parity)
            if lane == 0:
                info[slot, TILES] = i32(-1)
            if lane < FIELDS:
                mbarrier_arrive(Address(q_full + slot * 8))
        # Whoever is the last block to draw no_array makes the counters ready for the next launch.
        if brings_k and lane == 0 and cuda.atomic.add(counters, 1, i32(1)) == cuda.gridDim.x - 1:
            counters[0] = i32(0)
            counters[1] = i32(0)

    return bring_units


@specialize
def paged_attention_sm90_kernel(tile):
    """The kernel of a Tile."""
    head_dim, element, rows, box, stages, blocks, grouped, segment = tile
    boxes, tile_bytes, moves_registers = tile.boxes, tile.tile_bytes, tile.moves_registers
    runs, carries = tile.most_run > 1, tile.carries
    segment_tiles = segment // TILE_KEYS
    query_bytes = boxes * rows * LINE
    columns, score_count, acc_count, word_count = rows // 4, rows // 2, boxes * rows // 2, rows // 4
    depth = -(-head_dim // 16) * 16
    start_scores, _, wait_scores = wgmma(rows, element, depth=depth)
    start_values, _, wait_values = wgmma(rows, element, a_mn_major=True, blocks=boxes)
    column_sums, fold = column_sum_function(rows), fold_function(acc_count, columns)
    bring_units, merge = producer_function(tile), merge_function(head_dim, element, 8 if rows == 8 else 4)
    _, _, parts_of = division_functions(segment, grouped)
    setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(FEW_REGISTERS, False), setmaxnreg(MANY_REGISTERS, True)
    stage_out, write_part, read_part = part_functions(boxes, head_dim, element, rows)
    chunks, (_, store_chunk) = head_dim // 8, vector_access(4, 4)
    zero_rows, pack_two = zero_function(boxes), cvt_pack(element)

    @cuda.jit(launch_bounds=(THREADS, blocks))
    def paged_attention_sm90_kernel(
        q_map, k_map, v_map, out, lse, contexts, common, units, block_tables, block_size, heads, group, tokens,
        max_parts, stride, run, parts, references, sums, counters, c,
    ):  # fmt: skip
        """A block works on units until none are left.

        out (N H, E / 2): pairs of elements; lse (H, N), or empty if not wanted; common (B,), empty if not grouped;
        units: of plan_units_kernel. heads: H; group: H / HK; tokens: query tokens of a box of q; run: most segments of
        a sequence's first unit, up to tile.most_run. parts (B HK max_parts R, E), flat, references, sums (B HK
        max_parts R,): the workspace, R = `stride` rows a part. counters: units drawn, blocks that are done, then the
        units done for each sequence and key head; all zero, before and after. Shared memory: a ring of tiles of k and
        v, queries, probabilities, what warps exchange, then the barriers.
        """
        # Of a unit; -1 tiles: there are no more.
        info = cuda.shared.array((SLOTS, TOLD), np.int32)
        tickets = cuda.shared.array(TICKETS, np.int32)
        # To the merging warp: sequence (-1: there is no_array more), key head, first token, sequences, rows of each.
        letters = cuda.shared.array((LETTERS, 5), np.int32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & i32(31), warp_uniform(thread >> i32(5))
        ring = Address((shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024)
        queries = Address(ring + stages * (2 * tile_bytes))
        weights = Address(queries + SLOTS * query_bytes)
        largest_place = Address(weights + rows * LINE)
        # The second of the two places for exchange: it is written to again in a unit's second tile at the earliest.
        total_place = Address(largest_place + 4 * rows * 4)
        sum_place = Address(largest_place + 2 * 4 * rows * 4)
        full = Address(sum_place + 4 * 8 * rows * 4)
        empty, q_full = Address(full + stages * 8), Address(full + stages * 16)
        q_empty, told = Address(q_full + SLOTS * 8), Address(q_full + SLOTS * 16)
        posted = Address(told + TICKETS * 8)
        merged = Address(posted + LETTERS * 8)
        kv_heads = i32(heads // group)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(full + stage * 8, 2)
                mbarrier_init(empty + stage * 8, 1)
            for slot in range(SLOTS):
                mbarrier_init(q_full + slot * 8, FIELDS)
                mbarrier_init(q_empty + slot * 8, WARPGROUP + 32)
            for place in range(TICKETS):
                mbarrier_init(told + place * 8, 1)
            for letter in range(LETTERS):
                mbarrier_init(posted + letter * 8, WARPGROUP)
                mbarrier_init(merged + letter * 8, 32)
            mbarrier_init_fence()
        if thread == WARPGROUP:
            prefetch_tensor_map(tensor_map_address(k_map))
            prefetch_tensor_map(tensor_map_address(v_map))
            prefetch_tensor_map(tensor_map_address(q_map))
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        stage, slot, parity, working = i32(0), i32(0), i32(0), True
        # The producers find their first unit before they wait: what tells them was there before the kernels ahead were.
        if warp < 4 or warp > 5:
            griddepcontrol_wait()
        if warp >= 4:
            if moves_registers:
                setmaxnreg_dec()
            if warp < 6:
                brings_k = warp == 4
                bring_units(
                    brings_k, tensor_map_address(q_map),
                    tensor_map_address(k_map) if brings_k else tensor_map_address(v_map), units, block_tables,
                    block_size, kv_heads, group, tokens, counters, info, tickets,
                    (ring, queries, full, empty, q_full, q_empty, told), lane,
                )  # fmt: skip
            elif warp == 6:
                # Merges the parts of a sequence and key head when the last is there.
                while working:
                    mbarrier_wait(Address(posted + slot * 8), parity)
                    sequence, kv_head, start = letters[slot, 0], letters[slot, 1], letters[slot, 2]
                    owners, owned = letters[slot, 3], letters[slot, 4]
                    working = sequence >= 0
                    if working:
                        last = False
                        if lane < owners:
                            counter = i32(2 + (sequence + lane) * kv_heads + kv_head)
                            parts_there = i32(atomic_add_acq_rel(counters, counter) + 1)
                            last = parts_there == parts_of(i32(sequence + lane), contexts, common, run)
                            if last:
                                counters[counter] = i32(0)
                        complete = ballot(last)
                        sync_warp()
                        for owner in range(owners):
                            if (complete >> owner) & 1 != 0:
                                merge(
                                    parts, references, sums, ((sequence + owner) * kv_heads + kv_head) * max_parts,
                                    parts_of(i32(sequence + owner), contexts, common, run), stride, owned, group, out,
                                    heads, lse, start + owner, kv_head * group, lane,
                                )  # fmt: skip
                        mbarrier_arrive(Address(merged + slot * 8))
                    slot = i32(slot + 1)
                    if slot == LETTERS:
                        slot = i32(0)
                        parity ^= i32(1)
        else:
            if moves_registers:
                setmaxnreg_inc()
            group_lane, pair = lane >> i32(2), i32(2) * (lane & i32(3))
            scores = cuda.local.array(score_count, np.float32)
            acc = cuda.local.array(acc_count, np.float32)
            total = cuda.local.array(acc_count if runs else 1, np.float32)
            reference, running = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            total_reference, total_sum = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            largest, shrink = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            position = cuda.local.array(columns, np.int32)
            row_of, words = cuda.local.array(columns, np.int32), cuda.local.array(word_count, np.int32)
            chunk_words = cuda.local.array(4, np.int32)
            for i in range(score_count):
                scores[i] = f32(0.0)
            for i in range(acc_count):
                acc[i] = f32(0.0)
            # Where this lane's column of a matrix of probabilities goes, see stmatrix_x2_trans.
            line, half_of_keys = lane & i32(7), (lane >> i32(3)) & i32(1)
            per_token = udiv(i32(65535) + group, group)
            within = Address(line * LINE + (((warp * i32(2) + half_of_keys) ^ line) << i32(4)))
            weight_target = Address(weights + within)
            q_parity, letter, letter_parity = i32(0), i32(0), i32(1)
            while working:
                mbarrier_wait(Address(q_full + slot * 8), q_parity)
                tiles, sequence, own_part = info[slot, TILES], info[slot, SEQUENCE], info[slot, PART]
                first_key, start, length = info[slot, FIRST_KEY], info[slot, START], info[slot, LENGTH]
                context, sharing, unit_parts = info[slot, CONTEXT], info[slot, SHARING], info[slot, PARTS]
                kv_head, goes_on = info[slot, KEY_HEAD], info[slot, GOES_ON]
                working = tiles >= 0
                if tiles > 0:
                    if carries and goes_on > 0:
                        # Of one query token; the loads are under way while the tiles are worked on.
                        first_row = i32((sequence * kv_heads + kv_head) * max_parts * stride)
                        for i in range(columns):
                            column = i32(i // 2 * 8 + pair + i % 2)
                            row_of[i] = i32(first_row + column) if column < group else i32(-1)
                            total_reference[i] = references[max(row_of[i], i32(0))]
                            total_sum[i] = sums[max(row_of[i], i32(0))]
                        read_part(total, row_of, parts, i32(warp * 16 + group_lane))
                    for i in range(columns):
                        reference[i], running[i] = MINUS_INFINITY, f32(0.0)
                        position[i] = i32(context - length + token_of(i32(i // 2 * 8 + pair + i % 2), per_token))
                        if grouped and sharing > 0:
                            position[i] = i32(first_key + tiles * TILE_KEYS)
                    place = Address(queries + slot * query_bytes)
                    lowest = i32(context - length)
                    if grouped and sharing > 0:
                        lowest = i32(first_key + tiles * TILE_KEYS)
                    for index in range(tiles):
                        tile_key = i32(first_key + index * TILE_KEYS)
                        k_place = Address(ring + stage * (2 * tile_bytes))
                        begins = (index & i32(segment_tiles - 1)) == 0
                        if runs and begins and index > 0:
                            column_sums(running, sum_place, warp, group_lane, pair)
                            fold(acc, reference, running, total, total_reference, total_sum, index == segment_tiles)
                            for i in range(columns):
                                reference[i], running[i] = MINUS_INFINITY, f32(0.0)
                        mbarrier_wait(Address(full + stage * 8), parity)
                        start_scores(scores, smem_descriptor(k_place), smem_descriptor(place), i32(0))
                        wait_scores(scores)
                        if i32(tile_key + (TILE_KEYS - 1)) > lowest:
                            key = i32(tile_key + warp * 16 + group_lane)
                            for i in range(columns):
                                j = i // 2 * 4 + i % 2
                                if key > position[i]:
                                    scores[j] = MINUS_INFINITY
                                if key + 8 > position[i]:
                                    scores[j + 2] = MINUS_INFINITY
                        exchange = Address(largest_place + (index & 1) * (4 * rows * 4) + pair * 4)
                        for i in range(columns):
                            j = i // 2 * 4 + i % 2
                            value = max(scores[j], scores[j + 2])
                            value = max(value, shuffle_xor(value, 4))
                            value = max(value, shuffle_xor(value, 8))
                            largest[i] = max(value, shuffle_xor(value, 16))
                        if lane < 4:
                            for i in range(0, columns, 2):
                                store_pair(exchange + (warp * rows + i * 4) * 4, largest[i], largest[i + 1])
                        named_barrier_sync(1, WARPGROUP)
                        for i in range(0, columns, 2):
                            for w in range(4):
                                first, second = load_pair(exchange + (w * rows + i * 4) * 4)
                                largest[i], largest[i + 1] = max(largest[i], first), max(largest[i + 1], second)
                        for i in range(columns):
                            j = i // 2 * 4 + i % 2
                            new = next_row_max(reference[i], largest[i], c)
                            # A row that has seen no key yet has no_array to subtract; -inf - -inf would be NaN.
                            subtracted = new if new > MINUS_INFINITY else f32(0.0)
                            shrink[i] = exp2(reference[i] - subtracted)
                            reference[i] = new
                            scores[j] = exp2(cuda.fma(scores[j], c, -subtracted))
                            scores[j + 2] = exp2(cuda.fma(scores[j + 2], c, -subtracted))
                            running[i] = cuda.fma(running[i], shrink[i], scores[j] + scores[j + 2])
                        for i in range(word_count):
                            words[i] = pack_two(scores[2 * i], scores[2 * i + 1])
                        for i in range(word_count // 2):
                            stmatrix_x2_trans(weight_target + i * (8 * LINE), words[2 * i], words[2 * i + 1])
                        if i32(context - tile_key) < TILE_KEYS:
                            zero_rows(Address(k_place + tile_bytes), i32(context - tile_key), thread)
                        fence_proxy_async()
                        for b in range(boxes):
                            for i in range(columns):
                                j = b * score_count + i // 2 * 4 + i % 2
                                acc[j] *= shrink[i]
                                acc[j + 2] *= shrink[i]
                        named_barrier_sync(2, WARPGROUP)
                        start_values(
                            acc,
                            smem_descriptor(Address(k_place + tile_bytes)),
                            smem_descriptor(weights),
                            i32(not begins),
                        )
                        wait_values(acc)
                        if thread == 0:
                            mbarrier_arrive(Address(empty + stage * 8))
                        stage = i32(stage + 1)
                        if stage == stages:
                            stage = i32(0)
                            parity ^= i32(1)
                    column_sums(running, sum_place, warp, group_lane, pair)
                    if runs and (tiles > segment_tiles or goes_on > 0):
                        fold(acc, reference, running, total, total_reference, total_sum, False)
                        for i in range(columns):
                            reference[i], running[i] = total_reference[i], total_sum[i]
                        for i in range(acc_count):
                            acc[i] = total[i]
                    alive = i32(length * group)
                    if grouped and sharing > 0:
                        alive = i32(sharing * group)
                    # What a column sums to, for a thread of its own; loops over all columns of this thread must be
                    # short, or NVVM would not unroll them and registers would become memory.
                    whole = unit_parts == 1 or goes_on > 0
                    if (not whole or lse.shape[0] > 0) and warp == 0 and group_lane == 0:
                        for i in range(0, columns, 2):
                            store_pair(total_place + (i * 4 + pair) * 4, reference[i], reference[i + 1])
                            store_pair(total_place + (rows + i * 4 + pair) * 4, running[i], running[i + 1])
                    if carries and goes_on > 0 and thread == 0:
                        counters[2 + sequence * kv_heads + kv_head] = i32(0)
                    if whole:
                        # By way of the queries' place, so that 16 bytes leave at once.
                        for i in range(columns):
                            shrink[i] = f32(1.0) / running[i]
                        stage_out(acc, shrink, Address(place + within))
                        fence_proxy_async()
                        named_barrier_sync(1, WARPGROUP)
                        if thread < alive and lse.shape[0] > 0:
                            total_here = Address(total_place + thread * 4)
                            token = token_of(thread, per_token)
                            lse[kv_head * group + thread - token * group, start + token] = log_sum_exp(
                                int_as_float(load_word(total_here)), int_as_float(load_word(total_here + rows * 4))
                            )
                        index = thread
                        while index < alive * chunks:
                            row = udiv(index, chunks)
                            chunk = i32(index - row * chunks)
                            index = i32(index + WARPGROUP)
                            source = Address(place + ((chunk >> i32(3)) * rows + row) * LINE)
                            source = Address(source + (((chunk ^ row) & i32(7)) << i32(4)))
                            chunk_words[0], chunk_words[1], chunk_words[2], chunk_words[3] = load_words(source)
                            token = token_of(row, per_token)
                            row = i32((start + token) * heads + kv_head * group + row - token * group)
                            store_chunk(out[np.uint32(row)], chunk * 4, chunk_words, 0)
                        mbarrier_arrive(Address(q_empty + slot * 8))
                    else:
                        mbarrier_arrive(Address(q_empty + slot * 8))
                        named_barrier_sync(1, WARPGROUP)
                        # Where this unit's part of a sequence begins, and that of the next sequence.
                        first_row = i32(((sequence * kv_heads + kv_head) * max_parts + own_part) * stride)
                        next_row = i32(kv_heads * max_parts * stride)
                        if thread < alive:
                            total_here, row = Address(total_place + thread * 4), i32(first_row + thread)
                            if grouped and sharing > 0:
                                token = token_of(thread, per_token)
                                row = i32(row + token * (next_row - group))
                            references[row], sums[row] = (
                                int_as_float(load_word(total_here)),
                                int_as_float(load_word(total_here + rows * 4)),
                            )
                        for i in range(columns):
                            column = i32(i // 2 * 8 + pair + i % 2)
                            row_of[i] = i32(first_row + column)
                            if grouped and sharing > 0:
                                token = token_of(column, per_token)
                                row_of[i] = i32(row_of[i] + token * (next_row - group))
                            if column >= alive:
                                row_of[i] = i32(-1)
                        write_part(acc, row_of, parts, i32(warp * 16 + group_lane))
                        # All threads wait here: after a loop for one of them alone, ptxas would not trust the warp to
                        # be together again, and give up its uniform registers in the loop over tiles.
                        mbarrier_wait(Address(merged + letter * 8), letter_parity)
                        if thread == 0:
                            owners = max(sharing, i32(1))
                            letters[letter, 0] = sequence
                            letters[letter, 1] = kv_head
                            letters[letter, 2] = start
                            letters[letter, 3] = owners
                            letters[letter, 4] = i32(alive // owners)
                        # What each thread wrote of the part is there before the letter is.
                        mbarrier_arrive(Address(posted + letter * 8))
                        letter = i32(letter + 1)
                        if letter == LETTERS:
                            letter = i32(0)
                            letter_parity ^= i32(1)
                elif tiles == 0:
                    # A sequence without keys, such as a slot of a graph that is not in use.
                    index = thread
                    while index < length * group * (head_dim // 2):
                        row = udiv(index, head_dim // 2)
                        token, word = udiv(row, group), i32(index - row * (head_dim // 2))
                        out[(start + token) * heads + kv_head * group + row - token * group, word] = i32(0)
                        index = i32(index + WARPGROUP)
                    named_barrier_sync(2, WARPGROUP)
                    mbarrier_arrive(Address(q_empty + slot * 8))
                slot = i32(slot + 1)
                if slot == SLOTS:
                    slot = i32(0)
                    q_parity ^= i32(1)
            mbarrier_wait(Address(merged + letter * 8), letter_parity)
            if thread == 0:
                letters[letter, 0] = i32(-1)
            mbarrier_arrive(Address(posted + letter * 8))

    return paged_attention_sm90_kernel


def best_tile(head_dim, element, group, box, group_sizes=1):
    """The decode Tile for heads of this size; group: query heads of a key head; group_sizes: of the largest group."""
    rows = -(-group * group_sizes // 8) * 8
    tile = Tile(head_dim, element, rows, box, 2, grouped=group_sizes > 1)
    for blocks in (2, 1):
        room = SHARED_LIMIT // blocks - 1536
        stages = (room - tile.shared_bytes) // (2 * tile.tile_bytes + 16) + tile.stages
        if stages >= 2:
            break
    return tile._replace(stages=min(stages, 4), blocks=blocks)


def best_chunk_tile(head_dim, element, group, box, max_seqlen_q):
    """The Tile of attention_sm90 for chunks of up to so many query tokens."""
    tile = attention_config(head_dim, element, group, True, box)
    # H200, 16 and 8 heads of 128, 128 or 256 tokens at the end of 640 or 1,024: 1.06 and 1.09 of the speed of paired
    # consumers; 0.97 for chunks of 1,024 and 2,048 tokens.
    return tile._replace(paired=False) if tile.consumers > 1 and max_seqlen_q <= SHORT_CHUNK else tile


def best_run(sequence_heads, blocks):
    """Segments of a sequence's first unit, for so many sequences times key heads on so many blocks.

    They need no merging by way of memory; but a unit must not be too large a part of a block's work.
    """
    return max(sequence_heads // blocks, 1)


def supported_group_sizes(group):
    """What max_group_size may be with no_array wasted, ascending: tiles of 8, 16, 32 rows full of group_sizes' queries.

    The last one is the limit. group: query heads of a key head. Empty where a tile has no room for two group_sizes.
    """
    return tuple(rows // group for rows in (8, 16, MAX_DECODE_ROWS) if rows // group > 1)


class Workspace:
    """Partial results of segments, counters, lists of units. Grows with what is asked of it; what graphs know stays."""

    def __init__(self):
        self.floats, self.counters, self.units = {}, {}, {}

    def _at_least(self, kept, count, dtype):
        largest = max(kept, default=0)
        if largest < count:
            kept[count] = device.xp().zeros(count, dtype)
            largest = count
        return kept[largest]

    def arrays(self, places, rows, head_dim, counters):
        """(parts (places rows head_dim,), references, sums (places rows,), counters)."""
        count = places * rows
        floats = self._at_least(self.floats, count * (head_dim + 2), np.float32)
        parts = floats[: count * head_dim]
        references = floats[count * head_dim : count * (head_dim + 1)]
        sums = floats[count * (head_dim + 1) : count * (head_dim + 2)]
        return parts, references, sums, self._at_least(self.counters, counters, np.int32)

    def list_of(self, units):
        """(1 + units, FIELDS), for the list of at most so many."""
        words = (1 + units) * FIELDS
        return self._at_least(self.units, words, np.int32)[:words].reshape(-1, FIELDS)

    def reserve(self, floats, counters, units):
        """Hold arrays of at least these lengths; returns the bytes of all that is held."""
        self._at_least(self.floats, floats, np.float32)
        self._at_least(self.counters, counters, np.int32)
        self.list_of(units)
        return sum(array.nbytes for kept in (self.floats, self.counters, self.units) for array in kept.values())


_workspace = Workspace()


def places_and_rows(tile, sequences, kv_heads, group, max_seqlen_q, max_context_len, run=1):
    """(units of a sequence and key head, places of the workspace, rows of a place) that a call takes."""
    parts = max(-(-max_context_len // tile.segment) - run + 1, 1)
    places = sequences * kv_heads * parts if parts > 1 else 1
    return parts, places, min(max_seqlen_q, tile.rows // group) * group


def reserve(element, kv_heads, group, head_dim, box, calls):
    """Have a workspace from which all `calls` are served, and return its bytes.

    box: tokens of a cache block, at most 64; calls: of each (sequences, max_seqlen_q, max_context_len), as bounds.
    Declared groups need no more. What was there before stays, in case a graph knows it.
    """
    tile, floats, counters, units = best_tile(head_dim, element, group, box), 0, 0, 0
    for sequences, max_seqlen_q, max_context_len in calls:
        parts, places, rows = places_and_rows(tile, sequences, kv_heads, group, max_seqlen_q, max_context_len)
        floats = max(floats, places * rows * (head_dim + 2))
        counters = max(counters, 2 + sequences * kv_heads)
        units = max(units, sequences * parts)
    return _workspace.reserve(floats, counters, units)


class Plan(NamedTuple):
    """The units of decode, found once for all layers of a step.

    made_for: element, heads, bounds and the arrays' lengths, which a call that uses it shares; tile; blocks: of the
    grid; run: segments of a sequence's first unit; parts, places, rows: of places_and_rows; units: the list.
    """

    made_for: tuple
    tile: Tile
    blocks: int
    run: int
    parts: int
    places: int
    rows: int
    units: object


def plan_units(
    element, heads, kv_heads, head_dim, block_size, cu_seqlens, context_lens, max_seqlen_q, max_context_len,
    shared_prefix_lens=None, group_sizes=None, max_group_size=1, tile=None, blocks=None, run=None,
):  # fmt: skip
    """A Plan, whose list is made on the device from what the arrays hold then. Arguments as paged_attention_sm90's.

    The list stays until the next plan is made.
    """
    sequences, group = len(context_lens), heads // kv_heads
    if block_size % TILE_KEYS and block_size not in (16, 32):
        raise ValueError(f"paged_attention: block_size must be 16, 32 or a multiple of 64, got {block_size}")
    if max_group_size > 1 and (max_group_size * group > MAX_DECODE_ROWS or max_seqlen_q > 1):
        raise ValueError(
            f"paged_attention: a group has at most {MAX_DECODE_ROWS // group} sequences of one query token each, "
            f"got {max_group_size} sequences of up to {max_seqlen_q}"
        )
    made_for = (
        element,
        heads,
        kv_heads,
        head_dim,
        block_size,
        sequences,
        max_seqlen_q,
        max_context_len,
        max_group_size,
    )
    tile = tile or best_tile(head_dim, element, group, min(block_size, TILE_KEYS), max_group_size)
    filled = blocks or processors() * tile.blocks
    run = min(run or best_run(sequences * kv_heads, filled), tile.most_run)
    # What a group has in common may be one segment, and then its run is no longer.
    parts, places, rows = places_and_rows(
        tile, sequences, kv_heads, group, max_seqlen_q, max_context_len, 1 if tile.grouped else run
    )
    units = _workspace.list_of(sequences * parts)
    launch(
        plan_units_kernel(tile.rows, tile.segment, tile.grouped), 1, min(-(-max(sequences, 1) // 32) * 32, PLANNERS),
        cu_seqlens, context_lens, *((shared_prefix_lens, group_sizes) if tile.grouped else (no_array(1), no_array(1))),
        np.int32(group), np.int32(run), units, serialize_next=True,
    )  # fmt: skip
    return Plan(made_for, tile, min(filled, sequences * kv_heads * parts), run, parts, places, rows, units)


def paged_attention_sm90(
    q, k_cache, v_cache, block_tables, cu_seqlens, context_lens, max_seqlen_q, max_context_len, scale, out,
    shared_prefix_lens=None, group_sizes=None, max_group_size=1, plan=None, lse=None, tile=None, prefill_tile=None,
    blocks=None,
    run=None,
):  # fmt: skip
    """As the operator paged_attention, for arrays that attention_sm90.takes accepts and scale > 0.

    Groups of neighbouring sequences with a common beginning, one query token each, may be declared:
    shared_prefix_lens (B,)
    int32, how many tokens, fewer than its context has, a sequence shares with its group, in the same blocks;
    group_sizes
    (B,) int32, at a group's first sequence how many there are, at the others 0; max_group_size: at least any of them.
    plan: of plan_units for these arrays; made here if not given.
    lse (H, N) float32 is written if given, but not where context_lens is 0.
    tile, prefill_tile, blocks, run: other Tiles than best_tile's, another grid than fills the GPU and another run than
    best_run's; of no effect with a plan but for prefill_tile. Raises ValueError for a block size that is neither a
    multiple of 64 nor 16 or 32, for groups that are too large, and for a plan of another call.
    """
    tokens, heads, head_dim = q.shape
    cache_blocks, block_size, kv_heads, _ = k_cache.shape
    sequences, group, element = len(context_lens), heads // kv_heads, q.dtype.name
    if not tokens:
        return
    if plan is None:
        plan = plan_units(
            element, heads, kv_heads, head_dim, block_size, cu_seqlens, context_lens, max_seqlen_q, max_context_len,
            shared_prefix_lens, group_sizes, max_group_size, tile, blocks, run,
        )  # fmt: skip
    made_for = (
        element,
        heads,
        kv_heads,
        head_dim,
        block_size,
        sequences,
        max_seqlen_q,
        max_context_len,
        max_group_size,
    )
    if plan.made_for != made_for:
        raise ValueError(f"paged_attention: the plan is for {plan.made_for}, not for {made_for}")
    lse = no_array(2, np.float32) if lse is None else lse
    box = min(block_size, TILE_KEYS)
    k, v = (cache.reshape(cache_blocks * block_size, kv_heads, head_dim) for cache in (k_cache, v_cache))
    k_map, v_map = (tensor_map(x, box, 1, 64) for x in (k, v))
    c = float(scale * LOG2_E)
    tile = plan.tile
    # Query tokens of a unit; a sequence with more is the other kernel's.
    at_once = min(tile.rows // group, max(max_seqlen_q, max_group_size))
    counted_heads = 2 + sequences * kv_heads
    parts, references, sums, counters = _workspace.arrays(plan.places, plan.rows, head_dim, counted_heads)
    launch(
        paged_attention_sm90_kernel(tile), plan.blocks, THREADS,
        tensor_map(q, at_once, group, 64), k_map, v_map, out.reshape(tokens * heads, -1).view(np.int32), lse,
        context_lens, shared_prefix_lens if tile.grouped else no_array(1), plan.units, block_tables,
        np.int32(block_size),
        np.int32(heads), np.int32(group), np.int32(at_once), np.int32(plan.parts), np.int32(plan.rows),
        np.int32(plan.run), parts, references, sums, counters, c, shared=tile.shared_bytes,
    )  # fmt: skip
    if max_seqlen_q * group <= tile.rows:
        return
    prefill_config = prefill_tile or best_chunk_tile(head_dim, element, group, box, max_seqlen_q)
    launch_attention(
        prefill_config, q, k_map, v_map, cu_seqlens, context_lens, block_tables, block_size, group, max_seqlen_q,
        tile.rows, c, out, lse,
    )  # fmt: skip
