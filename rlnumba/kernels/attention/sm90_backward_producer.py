"""The first warpgroup of attention's gradient on sm90: loads of tiles, zeros behind a sequence's end, sums of dq.

See kernels/attention/sm90_backward.py for the design, and sm90_backward_mainloop.py for the layout of shared memory.
"""

import functools

import numpy as np

from rlnumba.kernels.attention.sm90_backward_mainloop import QUERIES, QUERY_BOX, ROW_BYTES
from rlnumba.kernels.attention.softmax import zero_function
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.semaphore import semaphore_release, semaphore_wait
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.warp import device_function, sync_warp
from rlnumba.kernels.tile.pipeline import FIRST_EMPTY, FIRST_FULL, MBARRIER_BYTES, ring

i32, i64 = np.int32, np.int64


@functools.cache
def producer_function(config):
    """The device function of the thread that loads tiles by TMA."""
    boxes, shared = config.boxes, config.layout
    key_box = config.keys * LINE
    key_bytes, query_bytes = boxes * key_box, boxes * QUERY_BOX
    row_size, has_positions = config.row_words * QUERIES, config.has_positions
    position, of_query = (shared.position, 2 * ROW_BYTES) if has_positions else (0, ROW_BYTES)
    (_, advance_q), (_, advance_dout) = ring(config.q_stages), ring(config.dout_stages)

    @device_function
    def load_boxes(target, tensor, boxes_bytes, head, row, full):
        for box in range(boxes):
            sm90.tma_load_3d(target + box * boxes_bytes, tensor, box * 64, head, row, full)

    @device_function
    def producer(
        base, q, k, v, dout, rows, kv_head, gqa_ratio, heads, first_row, query_tiles, tile, trims_keys, trimmed_steps
    ):
        """Load K and V; then q, dout and their rows of the tiles from the last to the first, which is `tile` in `rows`.

        A load with rows beyond the end (K and V if trims_keys, and the first trimmed_steps steps) completes a `landed`
        barrier, and trim_function's warp the `full` one.
        """
        full = base + (shared.k_landed if trims_keys else shared.k_full)
        sm90.mbarrier_expect_tx(full, key_bytes)
        load_boxes(base + shared.k, k, key_box, kv_head, first_row, full)
        full = base + (shared.v_landed if trims_keys else shared.v_full)
        sm90.mbarrier_expect_tx(full, key_bytes)
        load_boxes(base + shared.v, v, key_box, kv_head, first_row, full)
        q_stage, q_parity = FIRST_EMPTY
        dout_stage, dout_parity = FIRST_EMPTY
        head, row = i32(0), first_row + (query_tiles - i32(1)) * i32(QUERIES)
        for step in range(query_tiles * gqa_ratio):
            q_full, dout_full = i32(shared.q_full), i32(shared.dout_full)
            if step < trimmed_steps:
                q_full, dout_full = i32(shared.q_landed), i32(shared.dout_landed)
            q_head, row_index = kv_head * gqa_ratio + head, (tile + head) * row_size
            sm90.mbarrier_wait(base + shared.q_empty + q_stage * MBARRIER_BYTES, q_parity)
            full = base + q_full + q_stage * MBARRIER_BYTES
            sm90.mbarrier_expect_tx(full, query_bytes + of_query)
            load_boxes(base + shared.q + q_stage * query_bytes, q, QUERY_BOX, q_head, row, full)
            sm90.bulk_copy_load(base + shared.lse + q_stage * ROW_BYTES, rows, row_index, QUERIES, full)
            if has_positions:
                target = base + position + q_stage * ROW_BYTES
                sm90.bulk_copy_load(target, rows, row_index + 2 * QUERIES, QUERIES, full)
            sm90.mbarrier_wait(base + shared.dout_empty + dout_stage * MBARRIER_BYTES, dout_parity)
            full = base + dout_full + dout_stage * MBARRIER_BYTES
            sm90.mbarrier_expect_tx(full, query_bytes + ROW_BYTES)
            load_boxes(base + shared.dout + dout_stage * query_bytes, dout, QUERY_BOX, q_head, row, full)
            sm90.bulk_copy_load(base + shared.delta + dout_stage * ROW_BYTES, rows, row_index + QUERIES, QUERIES, full)
            q_stage, q_parity = advance_q(q_stage, q_parity)
            dout_stage, dout_parity = advance_dout(dout_stage, dout_parity)
            head += i32(1)
            if head == gqa_ratio:
                head = i32(0)
                row -= i32(QUERIES)
                tile -= heads

    return producer


@functools.cache
def trim_function(config):
    """The device function of the warp that zeroes the rows of tiles that are beyond the sequence's end."""
    keys, shared, query_bytes = config.keys, config.layout, config.boxes * QUERY_BOX
    zero_keys, zero_queries = zero_function(config.boxes, keys, 32), zero_function(config.boxes, QUERIES, 32)
    (_, advance_q), (_, advance_dout) = ring(config.q_stages), ring(config.dout_stages)

    @device_function
    def complete(full, lane):
        """After all lanes' zeros; each lane has made its own visible to the tensor cores."""
        sync_warp()
        if lane == 0:
            sm90.mbarrier_arrive(full)

    @device_function
    def trim(base, valid_keys, valid_queries, trimmed_steps, lane):
        """valid_keys: rows of K and V in the sequence; valid_queries: of the tile of the first trimmed_steps steps."""
        if valid_keys < keys:
            sm90.mbarrier_wait(base + shared.k_landed, 0)
            zero_keys(base + shared.k, valid_keys, lane)
            complete(base + shared.k_full, lane)
            sm90.mbarrier_wait(base + shared.v_landed, 0)
            zero_keys(base + shared.v, valid_keys, lane)
            complete(base + shared.v_full, lane)
        q_stage, q_parity = FIRST_FULL
        dout_stage, dout_parity = FIRST_FULL
        for _ in range(trimmed_steps):
            sm90.mbarrier_wait(base + shared.q_landed + q_stage * MBARRIER_BYTES, q_parity)
            zero_queries(base + shared.q + q_stage * query_bytes, valid_queries, lane)
            complete(base + shared.q_full + q_stage * MBARRIER_BYTES, lane)
            sm90.mbarrier_wait(base + shared.dout_landed + dout_stage * MBARRIER_BYTES, dout_parity)
            zero_queries(base + shared.dout + dout_stage * query_bytes, valid_queries, lane)
            complete(base + shared.dout_full + dout_stage * MBARRIER_BYTES, lane)
            q_stage, q_parity = advance_q(q_stage, q_parity)
            dout_stage, dout_parity = advance_dout(dout_stage, dout_parity)

    return trim


@functools.cache
def reduce_dq_function(config):
    """The device function of the two threads that add dq to its sums in global memory, in KV order."""
    parts, row_size, shared, window = config.dq_parts, config.dq_row_size, config.layout, config.window

    @device_function
    def reduce_dq(
        base, parity_of_parts, dq_sums, semaphores, gqa_ratio, heads, first_head, key_tile, query_tiles, tile, row,
        rows, follows_all,
    ):  # fmt: skip
        """Add every second part of dq, those with this parity (0, 1), after the blocks of the earlier key tiles.

        row: of the sums, at which the last query tile begins; rows: how many it has. follows_all: with a window,
        whether the block of the keys before visits all query tiles.
        """
        # The last tile's first query less the block's first key. From `window` on, it does not see the keys before.
        distance, adds = i32((query_tiles - 1) * QUERIES), key_tile > 0
        # While one thread still waits for its part to be written, the other may wait for its semaphore.
        head, parity = i32(0), i32(0)
        for part in range(query_tiles * gqa_ratio * parts):
            if part & 1 == parity_of_parts:
                index = (tile + head) * parts + (part & (parts - 1))
                before = ((first_head + head) * parts + (part & (parts - 1))) * rows
                offset, size = (i64(row) * (heads * parts) + before) * row_size, rows * i32(row_size)
                if window > 0:
                    adds = key_tile > 0 and (follows_all or distance < i32(window - 1))
                if adds:
                    semaphore_wait(semaphores, index, key_tile)
                sm90.mbarrier_wait(base + shared.dq_full + parity_of_parts * MBARRIER_BYTES, parity)
                parity ^= i32(1)
                if adds:
                    sm90.bulk_reduce_add(dq_sums, offset, size, base + shared.dq)
                else:
                    sm90.bulk_copy_store(dq_sums, offset, size, base + shared.dq)
                sm90.bulk_commit_group()
                sm90.bulk_wait_group_read()
                sm90.mbarrier_arrive(base + shared.dq_empty)
                sm90.bulk_wait_group()
                semaphore_release(semaphores, index, key_tile + 1)
            if part & (parts - 1) == parts - 1:
                head += i32(1)
                if head == gqa_ratio:
                    head = i32(0)
                    tile -= heads
                    row -= i32(QUERIES)
                    rows = i32(QUERIES)
                    if window > 0:
                        distance -= i32(QUERIES)

    return reduce_dq
