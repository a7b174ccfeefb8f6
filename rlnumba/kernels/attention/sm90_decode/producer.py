"""The two warps that load K and Q, and V: they walk the work items ahead of the computing warps."""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention import scheduler
from rlnumba.kernels.attention.sm90_decode.config import KEY_HEAD, Q_SLOTS, RESUMES_PARTIAL, WORK_INDICES
from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.ptx.semaphore import load_acquire
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address
from rlnumba.kernels.ptx.sm90 import (
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_wait,
    prefetch_tensor_map,
    tensor_map_address,
    tma_load_3d,
    tma_load_3d_evict_first,
)
from rlnumba.kernels.ptx.warp import device_function, griddepcontrol_wait, shuffle, sync_warp, udiv
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring
from rlnumba.runtime.device import cuda

i32 = np.int32

# A work item as a producer finds it: lane i has column i of its row of the list. working: whether there is one.
Found = namedtuple("Found", "record kv_head working")


@functools.cache
def prefetch_function(fused):
    """The device function that prefetches the tensor map of q, unless queries are made from qkv."""

    @device_function
    def prefetch_queries(queries):
        if fused:
            return
        else:
            prefetch_tensor_map(tensor_map_address(queries))

    return prefetch_queries


@functools.cache
def publish_function(config):
    """(publish, publish_end): the device functions by which warp 0 hands items to the other warps."""
    boxes, rows, layout, q_bytes, fused = config.boxes, config.rows, config.layout, config.q_bytes, config.fused_qkv
    item_full = layout.item_full if fused else layout.q_full

    @device_function
    def load_queries(queries, batch, kv_head, tiles, start, slot, base, full):
        """Load an item's queries, if it has keys, and arrive. queries: the tensor map of q."""
        if tiles > 0:
            mbarrier_expect_tx(full, boxes * batch.tokens * batch.gqa_ratio * LINE)
            for b in range(boxes):
                target = Address(base + layout.q + slot * q_bytes + b * (rows * LINE))
                tma_load_3d(target, tensor_map_address(queries), b * 64, kv_head * batch.gqa_ratio, start, full)
        else:
            mbarrier_arrive(full)

    @device_function
    def publish(item, resumes, draws, queries, batch, items, base, slot, lane):
        """Write a Found to items[slot], and load its queries, unless they are made from qkv.

        Returns the next work index in lane 0, if `draws`.
        """
        draw, tiles, start = i32(0), shuffle(item.record, scheduler.TILES), shuffle(item.record, scheduler.START)
        full = Address(base + item_full + slot * MBARRIER_BYTES)
        if lane < scheduler.ITEM_COLUMNS:
            items[slot, lane] = item.record
        # Every lane that wrote arrives, the first one below.
        if 0 < lane < scheduler.ITEM_COLUMNS:
            mbarrier_arrive(full)
        if lane == 0:
            if draws:
                draw = i32(cuda.atomic.add(batch.counters, 0, i32(1)))
            items[slot, KEY_HEAD], items[slot, RESUMES_PARTIAL] = item.kv_head, resumes
            if fused:
                mbarrier_arrive(full)
            else:
                load_queries(queries, batch, item.kv_head, tiles, start, slot, base, full)
        return draw

    @device_function
    def publish_end(items, base, slot, lane):
        """There are no more items."""
        if lane == 0:
            items[slot, scheduler.TILES] = i32(-1)
        if lane < scheduler.ITEM_COLUMNS:
            mbarrier_arrive(Address(base + item_full + slot * MBARRIER_BYTES))

    return publish, publish_end


@functools.cache
def find_functions(config):
    """(find_item, find_next): the device functions by which both producers find the same items in the same order."""
    layout, fused = config.layout, config.fused_qkv

    @device_function
    def find_item(work_index, listed, batch, lane):
        """The Found of a work index; listed: items of the list."""
        index = udiv(work_index, batch.kv_heads)
        row = min(i32(1 + index), i32(batch.items.shape[0] - 1))
        record = batch.items[row, min(lane, i32(scheduler.ITEM_COLUMNS - 1))]
        return Found(record, i32(work_index - index * batch.kv_heads), index < listed)

    @device_function
    def next_work_index(loads_k, draw, drawn, work_indices, base, lane):
        """The work index that warp 0 drew, for both producers; drawn: how many both have read before."""
        # Warp 0 is at most WORK_INDICES items ahead: an item's slot is free only when warp 1 has arrived for it, too.
        slot = i32(drawn & (WORK_INDICES - 1))
        ready = Address(base + layout.work_ready + slot * MBARRIER_BYTES)
        if loads_k:
            work_index = i32(shuffle(draw, 0) + cuda.gridDim.x)
            if lane == 0:
                work_indices[slot] = work_index
                mbarrier_arrive(ready)
        else:
            mbarrier_wait(ready, i32(drawn // WORK_INDICES & 1))
            work_index = work_indices[slot]
        return work_index

    @device_function
    def find_next(loads_k, draw, drawn, listed, batch, work_indices, base, lane):
        """The Found behind the present item, whose number is `drawn`; draw: what publish returned."""
        if fused and loads_k and drawn == 0:
            # The first item is published before the wait, when an earlier layer's kernel may still draw.
            griddepcontrol_wait()
            if lane == 0:
                draw = i32(cuda.atomic.add(batch.counters, 0, i32(1)))
        return find_item(next_work_index(loads_k, draw, drawn, work_indices, base, lane), listed, batch, lane)

    return find_item, find_next


@functools.cache
def page_functions(config):
    """(look_up_pages, look_up_item): the device functions that find the rows of the cache which hold an item's keys."""
    # Cache rows that a lane looks up for a segment.
    box, lookups = config.box, config.lookups
    page_row = scheduler.page_lookup(box)

    @device_function
    def look_up_pages(page_rows, pages, sequence, first_key, context_len, lane):
        """page_rows[i]: the cache's row of box 32 i + lane from first_key on; pages: scheduler.Pages."""
        for i in range(lookups):
            key = i32(first_key + (i * 32 + lane) * box)
            page_rows[i] = page_row(pages, sequence, key, context_len)

    @device_function
    def look_up_item(page_rows, pages, record, lane):
        """look_up_pages of an item's first segment, if it has keys."""
        if shuffle(record, scheduler.TILES) > 0:
            sequence, first_key = shuffle(record, scheduler.SEQUENCE), shuffle(record, scheduler.FIRST_KEY)
            look_up_pages(page_rows, pages, sequence, first_key, shuffle(record, scheduler.CONTEXT_LEN), lane)

    return look_up_pages, look_up_item


@device_function
def resumes_partial(record, kv_head, batch, lane):
    """Whether a sequence's only own item may resume its group's partial, in lane 0: it is there already."""
    resumes, own, splits = i32(0), shuffle(record, scheduler.GROUP_SIZE) == 0, shuffle(record, scheduler.SPLITS)
    if own and shuffle(record, scheduler.SPLIT) == 1 and splits == 2:
        counter = i32(2 + shuffle(record, scheduler.SEQUENCE) * batch.kv_heads + kv_head)
        if lane == 0:
            resumes = i32(load_acquire(batch.counters, counter))
    return resumes


@functools.cache
def producer_function(config):
    """The device function of the two producer warps."""
    boxes, tile_bytes, stages, box, layout = config.boxes, config.tile_bytes, config.stages, config.box, config.layout
    several, resumes, segment, fused = config.several, config.resumes, config.segment, config.fused_qkv
    boxes_per_tile, segment_tiles, lookups = TILE_KEYS // box, segment // TILE_KEYS, config.lookups
    # Tiles whose boxes 32 lanes look up at once.
    tiles_per_lookup = 32 // boxes_per_tile
    (publish, publish_end), (find_item, find_next) = publish_function(config), find_functions(config)
    look_up_pages, look_up_item = page_functions(config)
    (_, advance), (_, next_slot) = ring(stages), ring(Q_SLOTS)

    @device_function
    def load_tile(target, source, row, column_box, kv_head, full, empty, stage, parity, lane):
        mbarrier_wait(Address(empty + stage * MBARRIER_BYTES), parity)
        barrier = Address(full + stage * MBARRIER_BYTES)
        if lane == 0:
            mbarrier_expect_tx(barrier, tile_bytes)
        sync_warp()
        if lane < boxes * boxes_per_tile:
            # Evict-first: what the other kernels of a step reuse stays in L2.
            tma_load_3d_evict_first(
                Address(target + stage * (2 * tile_bytes)), source, column_box * i32(64), kv_head, row, barrier
            )

    @device_function
    def produce(loads_k, queries, source, batch, pages, queues, base, lane):
        """Load the tiles of work items, and find the next item meanwhile, until there are none.

        queries: of publish; source: the tensor map of K or V.
        """
        page_rows, next_page_rows = cuda.local.array(lookups, np.int32), cuda.local.array(lookups, np.int32)
        next_item_rows = cuda.local.array(lookups, np.int32)
        full, empty = Address(base + layout.full), Address(base + layout.empty)
        q_empty = Address(base + layout.q_empty)
        # Lane i loads box i % boxes_per_tile of the tile, columns 64 (i // boxes_per_tile) on.
        part, column_box = lane % i32(boxes_per_tile), lane // i32(boxes_per_tile) % i32(boxes)
        target = Address(base + layout.kv + (i32(0) if loads_k else i32(tile_bytes)))
        target = Address(target + column_box * BOX_BYTES + part * (box * LINE))
        drawn, resuming, listed = i32(0), i32(0), batch.items[0, 0]
        item = find_item(i32(cuda.blockIdx.x), listed, batch, lane)
        if item.working:
            look_up_item(page_rows, pages, item.record, lane)
        # The tile after which the next item is found: when most stages are taken.
        find_after = i32(stages - 2)
        if fused:
            # Keys and values are loaded before the wait: those of the tokens before this step were written by earlier
            # steps, which have ended, and the row of the new token is replaced in shared memory (write_new_token).
            # Counters are not drawn from: an earlier layer's kernel may still do so. Hence all stages are filled first.
            find_after = i32(stages - 1)
        else:
            griddepcontrol_wait()
        # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
        stage, slot, parity, q_parity = i32(0), i32(0), i32(1), i32(1)
        while item.working:
            mbarrier_wait(Address(q_empty + slot * MBARRIER_BYTES), q_parity)
            draw, following = i32(0), item
            if loads_k:
                draws = not fused or drawn > 0
                draw = publish(item, resuming, draws, queries, batch, queues.items, base, slot, lane)
            else:
                # This item's work index is read.
                mbarrier_arrive(Address(q_empty + slot * MBARRIER_BYTES))
            tiles, sequence = shuffle(item.record, scheduler.TILES), shuffle(item.record, scheduler.SEQUENCE)
            first_key = shuffle(item.record, scheduler.FIRST_KEY)
            context_len = shuffle(item.record, scheduler.CONTEXT_LEN)
            first_segment = True
            while first_segment or tiles > 0:
                # The rows of the next segment, if the item has one, are looked up before they are needed.
                if several and tiles > segment_tiles:
                    first_key = i32(first_key + segment)
                    look_up_pages(next_page_rows, pages, sequence, first_key, context_len, lane)
                for i in range(lookups):
                    for t in range(tiles_per_lookup):
                        if i * tiles_per_lookup + t < min(tiles, i32(segment_tiles)):
                            row = shuffle(page_rows[i], t * boxes_per_tile + part)
                            load_tile(target, source, row, column_box, item.kv_head, full, empty, stage, parity, lane)
                            stage, parity = advance(stage, parity)
                        # While tiles of this item are in flight: which item is next, then where its keys are.
                        if first_segment and i == 0 and t == find_after:
                            following = find_next(loads_k, draw, drawn, listed, batch, queues.work_indices, base, lane)
                        if first_segment and i == 0 and t == find_after + 1 and following.working:
                            look_up_item(next_item_rows, pages, following.record, lane)
                            if resumes and loads_k:
                                resuming = resumes_partial(following.record, following.kv_head, batch, lane)
                first_segment, tiles = False, i32(tiles - segment_tiles)
                for i in range(lookups):
                    page_rows[i] = next_page_rows[i]
            for i in range(lookups):
                page_rows[i] = next_item_rows[i]
            item, drawn, find_after = following, i32(drawn + 1), i32(stages - 2)
            slot, q_parity = next_slot(slot, q_parity)
        if loads_k:
            mbarrier_wait(Address(q_empty + slot * MBARRIER_BYTES), q_parity)
            publish_end(queues.items, base, slot, lane)
        if fused and loads_k:
            # A block without an item has not waited.
            griddepcontrol_wait()
        # The last block to draw nothing resets the counters for the next launch.
        if loads_k and lane == 0 and cuda.atomic.add(batch.counters, 1, i32(1)) == cuda.gridDim.x - 1:
            batch.counters[0] = i32(0)
            batch.counters[1] = i32(0)

    return produce
