"""Attention of new tokens to a cache in blocks, on Hopper: decode here, longer chunks by attention_hopper's kernel.

The arithmetic is defined at the top of kernels/attention_hopper.py, and a row's bits are the same in all three.

Decode has one or a few query tokens a sequence: with the query heads of a key head, a handful of rows, where the
tensor cores want 64. So keys and queries change places: S^T = K Q^T has 64 keys for rows and the queries, `rows`
of them with padding, for columns, and O^T = V^T P^T the columns of v for rows. A row of scores lies across the
warps: its maximum goes through shared memory, and so does P^T on its way to be an operand.

A unit of work is a sequence, a key head and a segment of SEGMENT keys. Blocks stay on their SM and draw units from
a common counter; a producer warp draws the next while the copy engine still brings the last tiles of this one.
Where a sequence has more than one segment, each writes (m, l, acc) to a workspace, and whoever finishes last
merges them, in the order of the segments. All of it follows arrays on the device, so a captured graph stays
valid.

Sequences with a common beginning, such as the completions of one prompt, may be declared a group: the segments that
lie wholly in the common beginning are read once for all members, whose queries then share the columns of a unit.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.attention_hopper import (
    KEYS,
    LOG2_E,
    MINUS_INFINITY,
    ROWS,
    ROWS_OF_UNIT,
    SEGMENT,
    SHARED_LIMIT,
    WARPGROUP,
    attention_hopper_kernel,
    log_sum,
    merge_weights,
    moved,
    nothing,
    paged_row_function,
    processors,
    zero_function,
)
from rlnumba.kernels.attention_hopper import best_tile as best_prefill_tile
from rlnumba.kernels.hopper import (
    BOX_BYTES,
    LINE,
    Address,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_load_heads,
    fence_shared_to_bulk,
    load_pair,
    load_word,
    operand,
    pack,
    shared_address,
    store_pair,
    store_transposed,
    sync_group,
    tensor_map,
    tensor_map_address,
    warp_uniform,
    warpgroup_product,
)
from rlnumba.kernels.hopper_registers import count_up, prefetch_tensor_map
from rlnumba.kernels.instructions import (
    ballot,
    device_function,
    exp2,
    int_as_float,
    let_next_kernel_start,
    shuffle,
    shuffle_up,
    shuffle_xor,
    sync_warp,
    wait_for_kernels_before,
)
from rlnumba.kernels.launch import kernel_factory, launch

i32, f32 = np.int32, np.float32

# Where the kernels of this module compile.
ARCHITECTURES = [(9, 0, "a")]

# Units whose queries may be in shared memory: the one that is worked on, and the next.
SLOTS = 2
# Partial results that a merging thread loads before it uses the first.
AHEAD = 8
# Tickets that the first producer may be ahead of the second: see there.
TICKETS = 4
# The four warps that compute meet at two named barriers in turn: at 1 before they read each other's maxima (or sums, or
# the news who merges), at 2 before the tensor cores read the probabilities of all (or a counter vouches for the partial
# results of all). What is read behind a meeting is written again only after the next.


class Tile(NamedTuple):
    """One kernel. rows: columns of S^T, a multiple of 8; box: keys of one copy, a cache block's tokens or 64.

    stages: tiles of keys and values under way; blocks: of an SM; grouped: groups read common segments once. ahead: the
    scores of the next tile are begun with the values of this one. producers: warps that ask for tiles, 2: one for keys
    and one for values.
    """

    head_dim: int
    element: str
    rows: int = 8
    box: int = 16
    stages: int = 3
    blocks: int = 2
    grouped: bool = False
    segment: int = SEGMENT
    ahead: bool = True
    producers: int = 2

    @property
    def runs(self):
        """Whether a unit may have several segments: where a thread has registers for their total."""
        return not self.grouped and self.rows <= 16

    @property
    def threads(self):
        """Of a block: a warpgroup that computes, then the producers."""
        return WARPGROUP + 32 * self.producers

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
        return tiles + rows + exchanged + 16 * (self.stages + SLOTS) + 8 * TICKETS + 1024


@device_function
def parts_of(context, run, segment):
    """How many units, and so partial results, the keys of a sequence have without groups, for a key head."""
    return max(i32((context + (segment - 1)) // segment - run + 1), i32(1))


@device_function
def units_of(sequence, sequences, cu_seqlens, contexts, common, members, group, run, rows, segment, grouped):
    """How many units a sequence has for a key head; beyond the last sequence none.

    Sequences with more than `rows` queries are the other kernel's, except that those without keys get their
    zeros here. A group's common segments count for its first sequence.
    """
    units = i32(0)
    if sequence < sequences:
        tokens = i32(cu_seqlens[sequence + 1] - cu_seqlens[sequence])
        context = contexts[sequence]
        if tokens > 0 and context == 0:
            units = i32(1)
        elif tokens > 0 and i32(tokens * group) <= rows:
            units = parts_of(context, run, segment)
            if grouped and members[sequence] == 0:
                units = i32(units - common[sequence] // segment)
    return units


@device_function
def summed_before(value, lane):
    """The sum of a value over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = shuffle_up(value, distance)
        if lane >= distance:
            value = i32(value + other)
    return value


@device_function
def upper(word):
    """The 16-bit element in the upper half of a packed pair."""
    return np.uint16((word >> i32(16)) & i32(0xFFFF))


@device_function
def lower(word):
    """The 16-bit element in the lower half of a packed pair."""
    return np.uint16(word & i32(0xFFFF))


@functools.cache
def look_up_function(box, looked_up):
    """The device function by which a warp looks up where the boxes of a segment's keys lie."""
    paged_row = paged_row_function(box)

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
        """The total, in place, of what it was (nothing if `first`) and of a segment."""
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
        """running becomes the sums over all keys, in the order that row_sum of attention_hopper.py follows.

        place: 128 rows bytes of shared memory. The columns of a thread are pair, pair + 1, pair + 8, pair + 9 ...
        """
        exchange = Address(place + (group_lane * rows + pair) * 4)
        for i in range(0, rows // 4, 2):
            store_pair(exchange + (warp * 8 * rows + i * 4) * 4, running[i], running[i + 1])
        sync_group(1, WARPGROUP)
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
def write_functions(box, head_dim, element, rows):
    """(write_out, write_part): the device functions that write 64 columns of v of what a thread holds of a unit."""
    pack_two = pack(element)
    columns, first = rows // 4, box * rows // 2

    @device_function
    def write_out(acc, inverse, token_of, head_of, out, e):
        """out[token, head, e + ...] = acc inverse, where token is not -1."""
        for half in range(2):
            column = i32(e + box * 64 + half * 8)
            if column < head_dim:
                for i in range(columns):
                    if token_of[i] >= 0:
                        value = acc[first + i // 2 * 4 + half * 2 + i % 2] * inverse[i]
                        out[token_of[i], head_of[i], column] = lower(pack_two(value, value))

    @device_function
    def write_part(acc, part_of, row_of, parts, e):
        """parts[part, row, e + ...] = acc, where row is not -1."""
        for half in range(2):
            column = i32(e + box * 64 + half * 8)
            if column < head_dim:
                for i in range(columns):
                    if row_of[i] >= 0:
                        parts[part_of[i], row_of[i], column] = acc[first + i // 2 * 4 + half * 2 + i % 2]

    return write_out, write_part


@functools.cache
def merge_function(head_dim, element):
    """The device function that merges the segments of one sequence and key head and writes out."""
    pack_two = pack(element)

    @device_function
    def merge(parts, references, sums, first, segments, rows, group, out, lse, token, head, thread):
        """`rows` rows, of `group` heads from `head` on and tokens from `token` on, of which the warpgroup's threads
        compute two columns each at a time. first: the first segment's place."""
        low, high = cuda.local.array(AHEAD, np.float32), cuda.local.array(AHEAD, np.float32)
        reference, total = cuda.local.array(AHEAD, np.float32), cuda.local.array(AHEAD, np.float32)
        for index in range(thread, rows * (head_dim // 2), WARPGROUP):
            row, column = i32(index // (head_dim // 2)), i32(index % (head_dim // 2) * 2)
            kept_low, kept_high = f32(0.0), f32(0.0)
            kept_reference, kept_sum = MINUS_INFINITY, f32(0.0)
            for start in range(0, segments, AHEAD):
                for i in range(AHEAD):
                    place = first + min(start + i, segments - 1)
                    low[i], high[i] = parts[place, row, column], parts[place, row, column + 1]
                    reference[i], total[i] = references[place, row], sums[place, row]
                for i in range(AHEAD):
                    if start + i == 0:
                        kept_low, kept_high, kept_reference, kept_sum = low[i], high[i], reference[i], total[i]
                    elif start + i < segments:
                        largest, a, b = merge_weights(kept_reference, reference[i])
                        kept_reference = largest
                        kept_sum = cuda.fma(total[i], b, kept_sum * a)
                        kept_low = cuda.fma(low[i], b, kept_low * a)
                        kept_high = cuda.fma(high[i], b, kept_high * a)
            inverse = f32(1.0) / kept_sum
            word = pack_two(kept_low * inverse, kept_high * inverse)
            out[token + row // group, head + row % group, column] = lower(word)
            out[token + row // group, head + row % group, column + 1] = upper(word)
            if column == 0 and lse.shape[0] > 0:
                lse[head + row % group, token + row // group] = log_sum(kept_reference, kept_sum)

    return merge


@kernel_factory
def paged_attention_hopper_kernel(tile):
    """The kernel of a Tile."""
    head_dim, element, rows, box, stages, blocks, grouped, segment, ahead, producers = tile
    boxes, tile_bytes, runs = tile.boxes, tile.tile_bytes, tile.runs
    copies, segment_tiles = KEYS // box, segment // KEYS
    # Rows of the cache that a lane of a producer looks up for a segment, and tiles that 32 lanes know the rows of.
    looked_up = -(-segment // (box * 32))
    tiles_known = 32 // copies
    # Lanes that bring the boxes of a tile's keys, and as many, here or in the other producer, for its values.
    lanes = boxes * copies
    query_bytes = boxes * rows * LINE
    columns, score_count, acc_count, word_count = rows // 4, rows // 2, boxes * rows // 2, rows // 4
    depth = -(-head_dim // 16) * 16
    start_scores, _, wait_scores = warpgroup_product(rows, element, depth=depth)
    start_values, wait_values_first, wait_values = warpgroup_product(rows, element, a_mn_major=True, blocks=boxes)
    column_sums, merge = column_sum_function(rows), merge_function(head_dim, element)
    look_up, fold = look_up_function(box, looked_up), fold_function(acc_count, columns)
    # Functions of boxes that do not exist are not called.
    write_out_0, write_part_0 = write_functions(0, head_dim, element, rows)
    write_out_1, write_part_1 = write_functions(min(1, boxes - 1), head_dim, element, rows)
    write_out_2, write_part_2 = write_functions(min(2, boxes - 1), head_dim, element, rows)
    write_out_3, write_part_3 = write_functions(min(3, boxes - 1), head_dim, element, rows)
    zero_rows, pack_two = zero_function(boxes), pack(element)

    @cuda.jit(launch_bounds=(tile.threads, blocks))
    def paged_attention_hopper_kernel(
        q_map, k_map, v_map, out, lse, cu_seqlens, contexts, common, members, block_tables, block_size, group, tokens,
        max_parts, run, parts, references, sums, counters, c,
    ):  # fmt: skip
        """A block works on units until none are left.

        out (N, H, E) as 16-bit words; lse (H, N), or empty if not wanted; common, members (B,), empty if not
        grouped. group: H / HK; tokens: query tokens of a box of q; run: segments of a sequence's first unit, 1 unless
        tile.runs. parts (B HK max_parts, R, E), references, sums (.., R): the workspace, R rows a sequence and key
        head. counters: units drawn, blocks that are done, then the units done for each sequence and key head; all
        zero, before and after. Shared memory: a ring of tiles of k and v, queries, probabilities, what warps exchange,
        then the barriers.
        """
        info = cuda.shared.array((SLOTS, 8), np.int32)
        tickets = cuda.shared.array(TICKETS, np.int32)
        last_of = cuda.shared.array(ROWS_OF_UNIT, np.int32)
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
        q_empty = Address(q_full + SLOTS * 8)
        told = Address(q_empty + SLOTS * 8)
        kv_heads = i32(out.shape[1] // group)
        if thread == 0:
            for stage in range(stages):
                barrier_init(full + stage * 8, producers)
                barrier_init(empty + stage * 8, 1)
            for slot in range(SLOTS):
                barrier_init(q_full + slot * 8, 1)
                barrier_init(q_empty + slot * 8, producers)
            for place in range(TICKETS):
                barrier_init(told + place * 8, 1)
            barrier_init_fence()
        if thread == WARPGROUP:
            prefetch_tensor_map(tensor_map_address(k_map))
            prefetch_tensor_map(tensor_map_address(v_map))
            prefetch_tensor_map(tensor_map_address(q_map))
        cuda.syncthreads()
        let_next_kernel_start()
        wait_for_kernels_before()
        stage, slot = i32(0), i32(0)
        if warp >= 4:
            # Both producers, if there are two, find the same units in the same order; the first one draws the tickets.
            first_producer = warp == 4
            q_source, k_source, v_source = (
                tensor_map_address(q_map),
                tensor_map_address(k_map),
                tensor_map_address(v_map),
            )
            known, upcoming = cuda.local.array(looked_up, np.int32), cuda.local.array(looked_up, np.int32)
            sequences = i32(cu_seqlens.shape[0] - 1)
            is_value = lane // i32(lanes) if producers == 1 else warp - i32(4)
            part, column_box = lane % i32(copies), lane // i32(copies) % i32(boxes)
            place = Address(ring + is_value * tile_bytes + column_box * BOX_BYTES + part * (box * LINE))
            chunk, passed, drawn_before = i32(0), i32(0), i32(0)
            mine = units_of(lane, sequences, cu_seqlens, contexts, common, members, group, run, rows, segment, grouped)
            up_to = summed_before(mine, lane)
            ticket = i32(cuda.blockIdx.x)
            parity, q_parity = i32(1), i32(1)
            while chunk < sequences:
                index = i32(ticket // kv_heads)
                while chunk < sequences and index >= i32(passed + shuffle(up_to, 31)):
                    passed = i32(passed + shuffle(up_to, 31))
                    chunk = i32(chunk + 32)
                    mine = units_of(
                        i32(chunk + lane), sequences, cu_seqlens, contexts, common, members, group, run, rows,
                        segment, grouped,
                    )  # fmt: skip
                    up_to = summed_before(mine, lane)
                arrived = Address(q_full + slot * 8)
                barrier_wait(Address(q_empty + slot * 8), q_parity)
                if not first_producer:
                    # This slot's ticket is read.
                    sync_warp()
                    if lane == 0:
                        barrier_arrive(Address(q_empty + slot * 8))
                if chunk >= sequences:
                    if first_producer and lane == 0:
                        info[slot, 0] = i32(-1)
                        barrier_arrive(arrived)
                else:
                    rank = i32(index - passed)
                    owner = i32(cuda.ffs(ballot(up_to > rank)) - 1)
                    sequence = i32(chunk + owner)
                    number = i32(rank - shuffle(i32(up_to - mine), owner))
                    kv_head = i32(ticket % kv_heads)
                    drawn = i32(0)
                    if first_producer and lane == 0:
                        drawn = i32(cuda.atomic.add(counters, 0, i32(1)))
                    start = cu_seqlens[sequence]
                    length = i32(cu_seqlens[sequence + 1] - start)
                    context = contexts[sequence]
                    sharing = i32(0)
                    if grouped and context > 0:
                        if members[sequence] == 0:
                            number = i32(number + common[sequence] // segment)
                        elif number < common[sequence] // segment:
                            sharing = members[sequence]
                    keys = i32(run * segment)
                    if number > 0:
                        number, keys = i32(number + run - 1), i32(segment)
                    first_key = i32(number * segment)
                    keys = min(i32(context - first_key), keys)
                    tiles = i32((keys + (KEYS - 1)) // KEYS)
                    if tiles > 0:
                        look_up(known, block_tables, block_size, sequence, first_key, context, lane)
                    if first_producer and lane == 0:
                        info[slot, 0] = tiles
                        info[slot, 1] = sequence
                        info[slot, 2] = number
                        info[slot, 3] = kv_head
                        info[slot, 4] = start
                        info[slot, 5] = length
                        info[slot, 6] = context
                        info[slot, 7] = sharing
                        if tiles > 0:
                            barrier_expect(arrived, boxes * tokens * group * LINE)
                            for b in range(boxes):
                                bulk_load_heads(
                                    queries + slot * query_bytes + b * (rows * LINE),
                                    q_source,
                                    b * 64,
                                    kv_head * group,
                                    start,
                                    arrived,
                                )
                        else:
                            barrier_arrive(arrived)
                    while tiles > 0:
                        # The rows of the next segment, if the unit has one, are looked up before they are needed.
                        if tiles > segment_tiles:
                            first_key = i32(first_key + segment)
                            look_up(upcoming, block_tables, block_size, sequence, first_key, context, lane)
                        for i in range(looked_up):
                            for t in range(tiles_known):
                                if i * tiles_known + t < tiles and i * tiles_known + t < segment_tiles:
                                    row = shuffle(known[i], t * copies + part)
                                    barrier_wait(Address(empty + stage * 8), parity)
                                    arrived = Address(full + stage * 8)
                                    if lane == 0:
                                        barrier_expect(arrived, 2 // producers * tile_bytes)
                                    sync_warp()
                                    target = Address(place + stage * (2 * tile_bytes))
                                    if producers == 1:
                                        if lane < lanes:
                                            bulk_load_heads(
                                                target, k_source, column_box * i32(64), kv_head, row, arrived
                                            )
                                        elif lane < 2 * lanes:
                                            bulk_load_heads(
                                                target, v_source, column_box * i32(64), kv_head, row, arrived
                                            )
                                    elif lane < lanes:
                                        source = k_source if first_producer else v_source
                                        bulk_load_heads(target, source, column_box * i32(64), kv_head, row, arrived)
                                    stage = i32(stage + 1)
                                    if stage == stages:
                                        stage = i32(0)
                                        parity ^= i32(1)
                        tiles = i32(tiles - segment_tiles)
                        for i in range(looked_up):
                            known[i] = upcoming[i]
                    if first_producer:
                        ticket = i32(shuffle(drawn, 0) + cuda.gridDim.x)
                        if producers > 1 and lane == 0:
                            tickets[drawn_before % TICKETS] = ticket
                            barrier_arrive(Address(told + drawn_before % TICKETS * 8))
                    else:
                        barrier_wait(Address(told + drawn_before % TICKETS * 8), i32(drawn_before // TICKETS & 1))
                        ticket = tickets[drawn_before % TICKETS]
                    drawn_before = i32(drawn_before + 1)
                    slot = i32(slot + 1)
                    if slot == SLOTS:
                        slot = i32(0)
                        q_parity ^= i32(1)
            # Whoever is the last block to draw nothing makes the counters ready for the next launch.
            if first_producer and lane == 0 and cuda.atomic.add(counters, 1, i32(1)) == cuda.gridDim.x - 1:
                counters[0] = i32(0)
                counters[1] = i32(0)
        else:
            group_lane, pair = lane >> i32(2), i32(2) * (lane & i32(3))
            scores = cuda.local.array(score_count, np.float32)
            acc = cuda.local.array(acc_count, np.float32)
            total = cuda.local.array(acc_count if runs else 1, np.float32)
            reference, running = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            total_reference, total_sum = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            largest, shrink = cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32)
            position = cuda.local.array(columns, np.int32)
            token_of, head_of = cuda.local.array(columns, np.int32), cuda.local.array(columns, np.int32)
            words = cuda.local.array(word_count, np.int32)
            for i in range(score_count):
                scores[i] = f32(0.0)
            for i in range(acc_count):
                acc[i] = f32(0.0)
            # Where this lane's column of a matrix of probabilities goes, see store_transposed.
            line, half_of_keys = lane & i32(7), (lane >> i32(3)) & i32(1)
            weight_target = Address(weights + line * LINE + (((warp * i32(2) + half_of_keys) ^ line) << i32(4)))
            parity, q_parity = i32(0), i32(0)
            working = True
            while working:
                barrier_wait(Address(q_full + slot * 8), q_parity)
                tiles, sequence, number, kv_head = info[slot, 0], info[slot, 1], info[slot, 2], info[slot, 3]
                start, length, context, sharing = info[slot, 4], info[slot, 5], info[slot, 6], info[slot, 7]
                working = tiles >= 0
                if tiles > 0:
                    first_key = i32(number * segment)
                    for i in range(columns):
                        reference[i], running[i] = MINUS_INFINITY, f32(0.0)
                        position[i] = i32(context - length + (i // 2 * 8 + pair + i % 2) // group)
                        if grouped and sharing > 0:
                            position[i] = i32(first_key + segment)
                    place = Address(queries + slot * query_bytes)
                    lowest = i32(context - length)
                    if grouped and sharing > 0:
                        lowest = i32(first_key + segment)
                    if ahead:
                        barrier_wait(Address(full + stage * 8), parity)
                        start_scores(scores, operand(ring + stage * (2 * tile_bytes)), operand(place), i32(0))
                        wait_scores(scores)
                    for index in range(tiles):
                        tile_key = i32(first_key + index * KEYS)
                        k_place = Address(ring + stage * (2 * tile_bytes))
                        begins = (index & i32(segment_tiles - 1)) == 0
                        if runs and begins and index > 0:
                            column_sums(running, sum_place, warp, group_lane, pair)
                            fold(acc, reference, running, total, total_reference, total_sum, index == segment_tiles)
                            for i in range(columns):
                                reference[i], running[i] = MINUS_INFINITY, f32(0.0)
                        if not ahead:
                            barrier_wait(Address(full + stage * 8), parity)
                            start_scores(scores, operand(k_place), operand(place), i32(0))
                            wait_scores(scores)
                        if i32(tile_key + (KEYS - 1)) > lowest:
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
                        sync_group(1, WARPGROUP)
                        for i in range(0, columns, 2):
                            for w in range(4):
                                first, second = load_pair(exchange + (w * rows + i * 4) * 4)
                                largest[i], largest[i + 1] = max(largest[i], first), max(largest[i + 1], second)
                        for i in range(columns):
                            j = i // 2 * 4 + i % 2
                            new = moved(reference[i], largest[i], c)
                            # A row that has seen no key yet has nothing to subtract; -inf - -inf would be NaN.
                            subtracted = new if new > MINUS_INFINITY else f32(0.0)
                            shrink[i] = exp2(reference[i] - subtracted)
                            reference[i] = new
                            scores[j] = exp2(cuda.fma(scores[j], c, -subtracted))
                            scores[j + 2] = exp2(cuda.fma(scores[j + 2], c, -subtracted))
                            running[i] = cuda.fma(running[i], shrink[i], scores[j] + scores[j + 2])
                        for i in range(word_count):
                            words[i] = pack_two(scores[2 * i], scores[2 * i + 1])
                        for i in range(word_count // 2):
                            store_transposed(weight_target + i * (8 * LINE), words[2 * i], words[2 * i + 1])
                        if i32(context - tile_key) < KEYS:
                            zero_rows(Address(k_place + tile_bytes), i32(context - tile_key), thread)
                        fence_shared_to_bulk()
                        for b in range(boxes):
                            for i in range(columns):
                                j = b * score_count + i // 2 * 4 + i % 2
                                acc[j] *= shrink[i]
                                acc[j + 2] *= shrink[i]
                        sync_group(2, WARPGROUP)
                        start_values(acc, operand(Address(k_place + tile_bytes)), operand(weights), i32(not begins))
                        read = Address(empty + stage * 8)
                        stage = i32(stage + 1)
                        if stage == stages:
                            stage = i32(0)
                            parity ^= i32(1)
                        if ahead:
                            # After the last tile its keys are multiplied again, for nothing.
                            if index + 1 < tiles:
                                barrier_wait(Address(full + stage * 8), parity)
                                k_place = Address(ring + stage * (2 * tile_bytes))
                            start_scores(scores, operand(k_place), operand(place), i32(0))
                            wait_values_first(acc)
                            wait_scores(scores)
                        else:
                            wait_values(acc)
                        if thread == 0:
                            barrier_arrive(read)
                    column_sums(running, sum_place, warp, group_lane, pair)
                    if runs and tiles > segment_tiles:
                        fold(acc, reference, running, total, total_reference, total_sum, False)
                        for i in range(columns):
                            reference[i], running[i] = total_reference[i], total_sum[i]
                        for i in range(acc_count):
                            acc[i] = total[i]
                    if thread == 0:
                        barrier_arrive(Address(q_empty + slot * 8))
                    unit_parts = parts_of(context, run, segment)
                    alive = i32(length * group)
                    if grouped and sharing > 0:
                        alive = i32(sharing * group)
                    # Who owns a column and what it sums to, for a thread of its own; loops over all columns of this
                    # thread must be short, or NVVM would not unroll them and registers would become memory.
                    if warp == 0 and group_lane == 0:
                        for i in range(0, columns, 2):
                            store_pair(total_place + (i * 4 + pair) * 4, reference[i], reference[i + 1])
                            store_pair(total_place + (rows + i * 4 + pair) * 4, running[i], running[i + 1])
                    for i in range(columns):
                        column = i32(i // 2 * 8 + pair + i % 2)
                        token_of[i] = i32(column // group) if column < alive else i32(-1)
                        head_of[i] = i32(column - column // group * group)
                    sync_group(1, WARPGROUP)
                    shared_segment = grouped and sharing > 0
                    first_part, own_part = i32(sequence * kv_heads + kv_head), max(i32(number - run + 1), i32(0))
                    e = i32(warp * 16 + group_lane)
                    if unit_parts == 1:
                        if thread < alive and lse.shape[0] > 0:
                            place = Address(total_place + thread * 4)
                            lse[kv_head * group + thread % group, start + thread // group] = log_sum(
                                int_as_float(load_word(place)), int_as_float(load_word(place + rows * 4))
                            )
                        for i in range(columns):
                            shrink[i] = f32(1.0) / running[i]
                            token_of[i] = i32(start + token_of[i]) if token_of[i] >= 0 else i32(-1)
                            head_of[i] = i32(head_of[i] + kv_head * group)
                        write_out_0(acc, shrink, token_of, head_of, out, e)
                        if boxes > 1:
                            write_out_1(acc, shrink, token_of, head_of, out, e)
                        if boxes > 2:
                            write_out_2(acc, shrink, token_of, head_of, out, e)
                        if boxes > 3:
                            write_out_3(acc, shrink, token_of, head_of, out, e)
                    else:
                        if thread < alive:
                            place = Address(total_place + thread * 4)
                            row, owner = thread, i32(0)
                            if shared_segment:
                                row, owner = i32(thread % group), i32(thread // group)
                            part = i32((first_part + owner * kv_heads) * max_parts + own_part)
                            references[part, row], sums[part, row] = (
                                int_as_float(load_word(place)),
                                int_as_float(load_word(place + rows * 4)),
                            )
                        for i in range(columns):
                            row, owner = i32(head_of[i] + token_of[i] * group), i32(0)
                            if shared_segment:
                                row, owner = head_of[i], token_of[i]
                            head_of[i] = row if token_of[i] >= 0 else i32(-1)
                            token_of[i] = i32((first_part + owner * kv_heads) * max_parts + own_part)
                        write_part_0(acc, token_of, head_of, parts, e)
                        if boxes > 1:
                            write_part_1(acc, token_of, head_of, parts, e)
                        if boxes > 2:
                            write_part_2(acc, token_of, head_of, parts, e)
                        if boxes > 3:
                            write_part_3(acc, token_of, head_of, parts, e)
                        # Everything of this unit is written before it counts as done.
                        sync_group(2, WARPGROUP)
                        owners = i32(1)
                        if grouped and sharing > 0:
                            owners = sharing
                        if thread < owners:
                            counter = i32(2 + (sequence + thread) * kv_heads + kv_head)
                            mine_is_last = (
                                count_up(counters, counter) == parts_of(contexts[sequence + thread], run, segment) - 1
                            )
                            last_of[thread] = i32(mine_is_last)
                            if mine_is_last:
                                counters[counter] = i32(0)
                        sync_group(1, WARPGROUP)
                        for owner in range(owners):
                            if last_of[owner] != 0:
                                first = ((sequence + owner) * kv_heads + kv_head) * max_parts
                                merge(
                                    parts,
                                    references,
                                    sums,
                                    first,
                                    parts_of(contexts[sequence + owner], run, segment),
                                    i32(alive // owners),
                                    group,
                                    out,
                                    lse,
                                    start + owner,
                                    kv_head * group,
                                    thread,
                                )
                        sync_group(2, WARPGROUP)
                elif tiles == 0:
                    # A sequence without keys, such as a slot of a graph that is not in use.
                    for i in range(thread, length * group * head_dim, WARPGROUP):
                        row = i // head_dim
                        out[start + row // group, kv_head * group + row % group, i % head_dim] = np.uint16(0)
                    sync_group(1, WARPGROUP)
                    if thread == 0:
                        barrier_arrive(Address(q_empty + slot * 8))
                slot = i32(slot + 1)
                if slot == SLOTS:
                    slot = i32(0)
                    q_parity ^= i32(1)

    return paged_attention_hopper_kernel


def best_tile(head_dim, element, group, box, members=1):
    """The decode Tile for heads of this size; group: query heads of a key head; members: of the largest group."""
    rows = -(-group * members // 8) * 8
    tile = Tile(head_dim, element, rows, box, 2, grouped=members > 1)
    for blocks in (2, 1):
        stages = (SHARED_LIMIT // blocks - 2048 - tile.shared_bytes) // (2 * tile.tile_bytes + 16) + tile.stages
        if stages >= 2:
            break
    return tile._replace(stages=min(stages, 4), blocks=blocks)


def best_run(sequence_heads, blocks):
    """Segments of a sequence's first unit, for so many sequences times key heads on so many blocks.

    They need no merging by way of memory; but a unit must not be too large a part of a block's work.
    """
    return min(max(sequence_heads // blocks, 1), 4)


def group_sizes(group):
    """What max_members may be with nothing wasted, ascending: tiles of 8, 16, 32 rows full of members' queries.

    The last one is the limit. group: query heads of a key head. Empty where a tile has no room for two members.
    """
    return tuple(rows // group for rows in (8, 16, ROWS_OF_UNIT) if rows // group > 1)


class Workspace:
    """Partial results of segments, and counters. Grows with what is asked of it; what graphs know stays alive."""

    def __init__(self):
        self.floats, self.counters = {}, {}

    def _at_least(self, kept, count, dtype):
        largest = max(kept, default=0)
        if largest < count:
            kept[count] = device.xp().zeros(count, dtype)
            largest = count
        return kept[largest]

    def arrays(self, places, rows, head_dim, counters):
        """(parts (places, rows, head_dim), references, sums (places, rows), counters)."""
        count = places * rows
        floats = self._at_least(self.floats, count * (head_dim + 2), np.float32)
        parts = floats[: count * head_dim].reshape(places, rows, head_dim)
        references = floats[count * head_dim : count * (head_dim + 1)].reshape(places, rows)
        sums = floats[count * (head_dim + 1) : count * (head_dim + 2)].reshape(places, rows)
        return parts, references, sums, self._at_least(self.counters, counters, np.int32)

    def reserve(self, floats, counters):
        """Hold arrays of at least these lengths; returns the bytes of all that is held."""
        self._at_least(self.floats, floats, np.float32)
        self._at_least(self.counters, counters, np.int32)
        return sum(array.nbytes for kept in (self.floats, self.counters) for array in kept.values())


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
    tile, floats, counters = best_tile(head_dim, element, group, box), 0, 0
    for sequences, max_seqlen_q, max_context_len in calls:
        _, places, rows = places_and_rows(tile, sequences, kv_heads, group, max_seqlen_q, max_context_len)
        floats = max(floats, places * rows * (head_dim + 2))
        counters = max(counters, 2 + sequences * kv_heads)
    return _workspace.reserve(floats, counters)


def paged_attention_hopper(
    q, k_cache, v_cache, block_tables, cu_seqlens, context_lens, max_seqlen_q, max_context_len, scale, out,
    common_lens=None, members=None, max_members=1, lse=None, tile=None, prefill_tile=None, blocks=None, run=None,
):  # fmt: skip
    """As the operator paged_attention, for arrays that attention_hopper.takes accepts and scale > 0.

    Groups of neighbouring sequences with a common beginning, one query token each, may be declared: common_lens (B,)
    int32, how many tokens, fewer than its context has, a sequence shares with its group, in the same blocks; members
    (B,) int32, at a group's first sequence how many there are, at the others 0; max_members: at least any of them.
    lse (H, N) float32 is written if given, but not where context_lens is 0.
    tile, prefill_tile, blocks, run: other Tiles than best_tile's, another grid than fills the GPU and another run than
    best_run's. Raises ValueError for a block size that is neither a multiple of 64 nor 16 or 32, and for groups that
    are too large.
    """
    tokens, heads, head_dim = q.shape
    cache_blocks, block_size, kv_heads, _ = k_cache.shape
    sequences, group = len(context_lens), heads // kv_heads
    if block_size % KEYS and block_size not in (16, 32):
        raise ValueError(f"paged_attention: block_size must be 16, 32 or a multiple of 64, got {block_size}")
    if max_members > 1 and (max_members * group > ROWS_OF_UNIT or max_seqlen_q > 1):
        raise ValueError(
            f"paged_attention: a group has at most {ROWS_OF_UNIT // group} sequences of one query token each, "
            f"got {max_members} sequences of up to {max_seqlen_q}"
        )
    if not tokens:
        return
    lse = nothing(2, np.float32) if lse is None else lse
    box = min(block_size, KEYS)
    element = q.dtype.name
    k, v = (cache.reshape(cache_blocks * block_size, kv_heads, head_dim) for cache in (k_cache, v_cache))
    k_map, v_map = (tensor_map(x, box, 1, 64) for x in (k, v))
    c = float(scale * LOG2_E)
    tile = tile or best_tile(head_dim, element, group, box, max_members)
    # Query tokens of a unit; a sequence with more is the other kernel's.
    at_once = min(tile.rows // group, max(max_seqlen_q, max_members))
    filled = blocks or processors() * tile.blocks
    run = (run or best_run(sequences * kv_heads, filled)) if tile.runs else 1
    units, places, rows = places_and_rows(tile, sequences, kv_heads, group, max_seqlen_q, max_context_len, run)
    parts, references, sums, counters = _workspace.arrays(places, rows, head_dim, 2 + sequences * kv_heads)
    launch(
        paged_attention_hopper_kernel(tile), min(filled, sequences * kv_heads * units), tile.threads,
        tensor_map(q, at_once, group, 64), k_map, v_map, out.view(np.uint16), lse, cu_seqlens, context_lens,
        common_lens if tile.grouped else nothing(1), members if tile.grouped else nothing(1), block_tables,
        np.int32(block_size), np.int32(group), np.int32(at_once), np.int32(units), np.int32(run), parts, references,
        sums, counters, c,
        shared=tile.shared_bytes,
    )  # fmt: skip
    if max_seqlen_q * group <= tile.rows:
        return
    tile, few = prefill_tile or best_prefill_tile(head_dim, element, group, True, box), tile.rows
    levels = -(-max_seqlen_q // tile.rows)
    items = levels * sequences * (heads // tile.groups if tile.paired else heads)
    launch(
        attention_hopper_kernel(tile), min(items, processors()), (tile.groups + 1) * WARPGROUP,
        tensor_map(q, ROWS, 1, 64), k_map, v_map, tensor_map(out, ROWS, 1, 64),
        out.reshape(tokens, -1).view(np.int32), lse, cu_seqlens, context_lens, block_tables,
        np.int32(block_size), np.int32(group), np.int32(levels), np.int32(few), c,
        shared=tile.shared_bytes,
    )  # fmt: skip
