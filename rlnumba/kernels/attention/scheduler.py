"""Tile schedulers of attention on sm_90: which work item a block computes next.

Prefill: a work item is a query tile of one sequence, and one query head, or one for each consumer. Work indices count
the query tiles that end the longest sequences first, since these have the most keys; blocks take them in turn.

Decode: a work item is a span of a sequence's keys, for one key head: item 0 has its leading_segments segments of
`segment` keys, each further item one (split-KV). A short last segment behind item 0 belongs to it, which takes less
time than an item whose result is to be merged. The segments that lie wholly in the common prefix of a group of
sequences are listed once for all. With a window a sequence has one item, from the first tile that a query sees. A
kernel lists the items of a step, so that a captured graph stays valid.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention.softmax import ONE_SEGMENT, TILE_KEYS
from rlnumba.kernels.ptx.warp import (
    ballot,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shuffle_up,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32 = np.int32

# Architectures that the kernel of this module compiles for.
ARCHITECTURES = [(9, 0, "a")]
# Threads of the block that lists work items of decode, at most.
LISTING_THREADS = 256
LISTING_WARPS = LISTING_THREADS // 32
# The part of a segment up to which a last one is short.
SHORT_PART = 4
# Columns of the list of work items: tiles of keys, sequence, which of its items, first key, first query token, query
# tokens, keys of the sequence, sequences that share the item (0: not a group's), items of the sequence.
TILES, SEQUENCE, SPLIT, FIRST_KEY, START, LENGTH, CONTEXT_LEN, GROUP_SIZE, SPLITS = range(9)
ITEM_COLUMNS = 9


# The sequences of a prefill kernel: (B + 1,) bounds of queries, (B,) keys, and query heads of a key head. Sequences
# with at most decode_rows query rows a key head are the decode kernel's.
PrefillBatch = namedtuple("PrefillBatch", "cu_seqlens context_lens gqa_ratio decode_rows")
# Where the keys of sequences lie in the cache: (B, blocks) and the tokens of a block.
Pages = namedtuple("Pages", "block_tables block_size")
# Sequences of a step of decode; shared_prefix_lens and group_sizes are empty if not grouped.
DecodeStep = namedtuple("DecodeStep", "cu_seqlens context_lens shared_prefix_lens group_sizes gqa_ratio max_leading")


def prefill_batch(cu_seqlens, context_lens, gqa_ratio, decode_rows):
    """The PrefillBatch of these arrays, as a kernel takes it."""
    return PrefillBatch(cu_seqlens, context_lens, np.int32(gqa_ratio), np.int32(decode_rows))


@functools.cache
def prefill_scheduler(paged, tile_tokens):
    """(first_query_tile, next_query_tile, find_sequence): the device functions of the prefill scheduler, for a warp."""

    @device_function
    def query_tokens(sequence, batch):
        """Number of query tokens of a sequence that are not decode's; 0 beyond the last sequence."""
        tokens = i32(0)
        if sequence < i32(batch.cu_seqlens.shape[0] - 1):
            tokens = i32(batch.cu_seqlens[sequence + 1] - batch.cu_seqlens[sequence])
            if paged and (i32(tokens * batch.gqa_ratio) <= batch.decode_rows or batch.context_lens[sequence] == 0):
                tokens = i32(0)
        return tokens

    @device_function
    def count_longer(tokens, batch, lane):
        """Number of sequences that have more than `tokens` query tokens."""
        count, first = i32(0), i32(0)
        while first < i32(batch.cu_seqlens.shape[0] - 1):
            count = i32(count + cuda.popc(ballot(query_tokens(i32(first + lane), batch) > tokens)))
            first = i32(first + 32)
        return count

    @device_function
    def first_query_tile(query_tiles, batch, lane):
        """(query tile, work items of tiles before it, sequences that have it), for the longest sequence's last tile."""
        query_tile = i32(query_tiles - 1)
        return query_tile, i32(0), count_longer(i32(query_tile * tile_tokens), batch, lane)

    @device_function
    def next_query_tile(work_index, query_tile, items_before, longer, heads, batch, lane):
        """first_query_tile's results for a work index; query tile -1: no more work. heads: items of a query tile."""
        while query_tile >= 0 and work_index >= i32(items_before + longer * heads):
            items_before = i32(items_before + longer * heads)
            query_tile = i32(query_tile - 1)
            if query_tile >= 0:
                longer = count_longer(i32(query_tile * tile_tokens), batch, lane)
        return query_tile, items_before, longer

    @device_function
    def find_sequence(rank, tokens, batch, lane):
        """The index of the sequence with more than `tokens` query tokens before which there are `rank` others."""
        found, first = i32(0), i32(0)
        while first < i32(batch.cu_seqlens.shape[0] - 1):
            longer = query_tokens(i32(first + lane), batch) > tokens
            mask = ballot(longer)
            before = i32(cuda.popc(np.int64(mask) & ~(np.int64(-1) << np.int64(lane))))
            match = ballot(longer and before == rank)
            if match != 0:
                found = i32(first + cuda.ffs(match) - 1)
            rank = i32(rank - cuda.popc(mask))
            first = i32(first + 32)
        return found

    return first_query_tile, next_query_tile, find_sequence


@functools.cache
def page_lookup(box):
    """The device function that looks up where a box of keys lies in the cache. A block is one box, or many of 64."""
    shift = box.bit_length() - 1

    @device_function
    def page_row(pages, sequence, key, context_len):
        """The cache's row of a key that begins a box; beyond the last key, of the sequence's last box, for no use."""
        index = i32(min(key, i32(context_len - 1)) >> i32(shift))
        if box < TILE_KEYS:
            return i32(pages.block_tables[sequence, index] << i32(shift))
        boxes = pages.block_size >> i32(shift)
        return i32(((pages.block_tables[sequence, index // boxes] * boxes) + index % boxes) << i32(shift))

    return page_row


def most_leading_segments(rows):
    """Most segments of a sequence's first item, for a DecodeConfig of so many rows: several where a thread has
    registers for their total."""
    return {8: 4, 16: 2}.get(rows, 1)


@functools.cache
def split_functions(rows, segment, grouped):
    """(leading_segments, count_splits, count_shared_items): the device functions by which a sequence is split."""
    most_leading = most_leading_segments(rows)

    @device_function
    def shared_segments(sequence, batch):
        """Whole segments of the prefix that a sequence shares with its group."""
        return i32(batch.shared_prefix_lens[sequence] // segment) if grouped else i32(0)

    @device_function
    def leading_segments(sequence, batch):
        """Segments of a sequence's first item: at most max_leading, and all of the group's or of its own; one more of
        its own if that is the last one, and short."""
        max_leading, segments = i32(batch.max_leading), shared_segments(sequence, batch)
        if segments == 0:
            context_len = i32(batch.context_lens[sequence])
            segments = max(i32((context_len + (segment - 1)) // segment), i32(1))
            is_short = i32(context_len - max_leading * segment) <= segment // SHORT_PART
            if is_short and segments == max_leading + 1 and segments <= most_leading:
                max_leading = segments
        return min(max_leading, segments)

    @device_function
    def count_splits(sequence, batch):
        """Number of items that compute a sequence and key head: the leading one, and one for each segment behind it."""
        segments = i32((batch.context_lens[sequence] + (segment - 1)) // segment)
        return max(i32(segments - leading_segments(sequence, batch) + 1), i32(1))

    @device_function
    def count_shared_items(sequence, batch):
        segments = shared_segments(sequence, batch)
        return i32(0) if segments == 0 else i32(segments - leading_segments(sequence, batch) + 1)

    return leading_segments, count_splits, count_shared_items


@device_function
def inclusive_sum(value, lane):
    """The sum of a value over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = shuffle_up(value, distance)
        if lane >= distance:
            value = i32(value + other)
    return value


@specialize
def list_work_items_kernel(rows, segment, grouped, window):
    """The kernel that lists the work items of decode, for a DecodeConfig of so many rows."""
    segment = ONE_SEGMENT if window else segment
    leading_segments, count_splits, count_shared_items = split_functions(rows, segment, grouped)

    @device_function
    def count_items(sequence, sequences, batch, shared):
        """Items of a group, at its first sequence, if `shared`, else a sequence's own; 0 beyond the last one."""
        # Sequences with more than `rows` query rows are the prefill kernel's; those without keys have an item here,
        # which writes zeros.
        items = i32(0)
        if sequence < sequences:
            tokens = i32(batch.cu_seqlens[sequence + 1] - batch.cu_seqlens[sequence])
            if tokens > 0 and batch.context_lens[sequence] == 0:
                items = i32(0) if shared else i32(1)
            elif tokens > 0 and i32(tokens * batch.gqa_ratio) <= rows:
                shared_items = count_shared_items(sequence, batch)
                if not shared:
                    items = i32(count_splits(sequence, batch) - shared_items)
                elif batch.group_sizes[sequence] > 0:
                    items = shared_items
        return items

    @supports_pdl
    @cuda.jit(launch_bounds=(LISTING_THREADS, 1))
    def list_work_items_kernel(
        cu_seqlens, context_lens, shared_prefix_lens, group_sizes, gqa_ratio, max_leading, items
    ):
        """One block, a thread for each sequence in turn. items (1 + all items, ITEM_COLUMNS): how many, then each.

        Items of groups, which take longer, come first; then in the order of the sequences, and of a sequence's keys. If
        contexts are longer than those that the list was made for, items that it cannot hold are left out.
        """
        warp_sums = cuda.shared.array(LISTING_WARPS, np.int32)
        batch = DecodeStep(cu_seqlens, context_lens, shared_prefix_lens, group_sizes, gqa_ratio, max_leading)
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        thread, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
        lane, warp = thread & i32(31), thread >> i32(5)
        sequences, listed = i32(cu_seqlens.shape[0] - 1), i32(0)
        for phase in range(0 if grouped else 1, 2):
            shared = phase == 0
            for first in range(0, sequences, threads):
                sequence = i32(first + thread)
                count = count_items(sequence, sequences, batch, shared)
                up_to = inclusive_sum(count, lane)
                if lane == 31:
                    warp_sums[warp] = up_to
                cuda.syncthreads()
                row = i32(1 + listed + up_to - count)
                for other in range(threads // 32):
                    listed = i32(listed + warp_sums[other])
                    if other < warp:
                        row = i32(row + warp_sums[other])
                cuda.syncthreads()
                for i in range(min(count, i32(items.shape[0] - row))):
                    start, context_len = cu_seqlens[sequence], context_lens[sequence]
                    leading = leading_segments(sequence, batch)
                    split, group_size = i32(i), i32(0)
                    if grouped and shared:
                        group_size = group_sizes[sequence]
                    elif grouped:
                        split = i32(split + count_shared_items(sequence, batch))
                    first_key, keys = i32(0), i32(leading * segment)
                    if split > 0:
                        first_key, keys = i32((split - 1 + leading) * segment), i32(segment)
                    if window > 0:
                        tokens = i32(cu_seqlens[sequence + 1] - start)
                        first_key = max(i32(context_len - tokens - (window - 1)), i32(0)) // TILE_KEYS * TILE_KEYS
                    keys = min(i32(context_len - first_key), keys)
                    items[row + i, TILES] = i32((keys + (TILE_KEYS - 1)) // TILE_KEYS)
                    items[row + i, SEQUENCE] = sequence
                    items[row + i, SPLIT] = split
                    items[row + i, FIRST_KEY] = first_key
                    items[row + i, START] = start
                    items[row + i, LENGTH] = i32(cu_seqlens[sequence + 1] - start)
                    items[row + i, CONTEXT_LEN] = context_len
                    items[row + i, GROUP_SIZE] = group_size
                    items[row + i, SPLITS] = count_splits(sequence, batch)
        if thread == 0:
            items[0, 0] = min(listed, i32(items.shape[0] - 1))

    return list_work_items_kernel
