"""Decode attention on sm_90: one or a few query tokens a sequence against the paged cache, split over the keys.

The arithmetic is defined in sm90_forward.py; a row's bits are the same in prefill, decode and training.

The query rows of a key head (its query heads, for each token) are a handful where wgmma wants 64, so keys and queries
change places: S^T = K Q^T has 64 keys for rows and the query rows, padded to `rows`, for columns; O^T = V^T P^T has the
columns of V for rows. A query row's scores lie across the four warps: their maximum goes through shared memory, and so
does P^T on its way to be an operand.

The grid is persistent. A block draws work items (scheduler.py), spans of a sequence's keys for one key head, from a
counter. Warpgroup 0 computes. In warpgroup 1, warp 0 loads Q and K and publishes the item, warp 1 loads V, both by TMA,
and look up the next item and its pages meanwhile; warp 2 merges: where a sequence has several items, each writes its
partial to global memory, and the block that finishes last merges them (split_kv.py). Warp 3 is idle; in
sm90_decode_qkv.py, which shares these functions, it makes q, k and v of the new tokens from their projection.
"""

import functools

import numpy as np

from rlnumba.kernels.attention import scheduler
from rlnumba.kernels.attention.sm90_decode_consumer import (
    CONSUMER_REGISTERS,
    ITEM_FIELDS,
    KEY_HEAD,
    MERGE_FIELDS,
    MERGE_SLOTS,
    PRODUCER_REGISTERS,
    Q_SLOTS,
    RESUMES_PARTIAL,
    THREADS,
    WORK_INDICES,
    Batch,
    Queues,
    consumer_function,
)
from rlnumba.kernels.attention.sm90_forward import WARPGROUP
from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.attention.split_kv import Partials, partial_merge
from rlnumba.kernels.ptx.pipeline import MBARRIER_BYTES, ring, shared_base
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel, load_acquire
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address
from rlnumba.kernels.ptx.sm90 import (
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    prefetch_tensor_map,
    setmaxnreg,
    tensor_map_address,
    tma_load_3d,
    tma_load_3d_evict_first,
    warp_uniform,
)
from rlnumba.kernels.ptx.warp import (
    ballot,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shuffle,
    sync_warp,
    udiv,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32 = np.int32

# Architectures that the kernel of this module compiles for.
ARCHITECTURES = [(9, 0, "a")]


@functools.cache
def producer_functions(config):
    """(publish_item, next_work_index, look_up_pages, resumes_partial): the steps of the producer warps."""
    boxes, rows, box, layout, q_bytes = config.boxes, config.rows, config.box, config.layout, config.q_bytes
    fused, item_full = config.fused_qkv, config.layout.item_full if config.fused_qkv else config.layout.q_full
    # Cache rows that a lane looks up for a segment.
    lookups, page_row = -(-config.segment // (box * 32)), scheduler.page_lookup(box)

    @device_function
    def publish_item(record, kv_head, resumes, draws, q_source, batch, items, base, slot, lane):
        """Write an item, of which lane i holds column i, and load its queries, unless they are made from qkv.

        Returns the next work index in lane 0, if `draws`.
        """
        draw, tiles, start = i32(0), shuffle(record, scheduler.TILES), shuffle(record, scheduler.START)
        full = Address(base + item_full + slot * MBARRIER_BYTES)
        if lane < scheduler.ITEM_COLUMNS:
            items[slot, lane] = record
        # Every lane that wrote arrives, the first one below.
        if 0 < lane < scheduler.ITEM_COLUMNS:
            mbarrier_arrive(full)
        if lane == 0:
            if draws:
                draw = i32(cuda.atomic.add(batch.counters, 0, i32(1)))
            items[slot, KEY_HEAD], items[slot, RESUMES_PARTIAL] = kv_head, resumes
            if not fused and tiles > 0:
                mbarrier_expect_tx(full, boxes * batch.tokens * batch.gqa_ratio * LINE)
                for b in range(boxes):
                    target = Address(base + layout.q + slot * q_bytes + b * (rows * LINE))
                    tma_load_3d(target, q_source, b * 64, kv_head * batch.gqa_ratio, start, full)
            else:
                mbarrier_arrive(full)
        return draw

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
    def look_up_pages(page_rows, pages, sequence, first_key, context_len, lane):
        """page_rows[i]: the cache's row of box 32 i + lane from first_key on; pages: (block_tables, block_size)."""
        block_tables, block_size = pages
        for i in range(lookups):
            key = i32(first_key + (i * 32 + lane) * box)
            page_rows[i] = page_row(block_tables, block_size, sequence, key, context_len)

    @device_function
    def resumes_partial(record, kv_head, batch, lane):
        """Whether a sequence's only own item may resume its group's partial, in lane 0: it is there already."""
        resumes, own, splits = i32(0), shuffle(record, scheduler.GROUP_SIZE) == 0, shuffle(record, scheduler.SPLITS)
        if own and shuffle(record, scheduler.SPLIT) == 1 and splits == 2:
            counter = i32(2 + shuffle(record, scheduler.SEQUENCE) * batch.kv_heads + kv_head)
            if lane == 0:
                resumes = i32(load_acquire(batch.counters, counter))
        return resumes

    return publish_item, next_work_index, look_up_pages, resumes_partial


@functools.cache
def producer_function(config):
    """The device function of the two producer warps."""
    boxes, tile_bytes, stages, box, layout = config.boxes, config.tile_bytes, config.stages, config.box, config.layout
    several, resumes, segment, fused = config.max_leading > 1, config.resumes, config.segment, config.fused_qkv
    item_full = layout.item_full if fused else layout.q_full
    boxes_per_tile, segment_tiles = TILE_KEYS // box, segment // TILE_KEYS
    # Cache rows that a lane looks up for a segment, and tiles whose boxes 32 lanes look up at once.
    lookups, tiles_per_lookup = -(-segment // (box * 32)), 32 // boxes_per_tile
    publish_item, next_work_index, look_up_pages, resumes_partial = producer_functions(config)
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
    def produce(loads_k, q_source, source, batch, pages, queues, base, lane):
        """Load the tiles of work items, and find the next item meanwhile, until there are none; source: of K or V."""
        page_rows, next_page_rows = cuda.local.array(lookups, np.int32), cuda.local.array(lookups, np.int32)
        next_item_rows = cuda.local.array(lookups, np.int32)
        full, empty = Address(base + layout.full), Address(base + layout.empty)
        published, q_empty = Address(base + item_full), Address(base + layout.q_empty)
        # Lane i loads box i % boxes_per_tile of the tile, columns 64 (i // boxes_per_tile) on.
        part, column_box = lane % i32(boxes_per_tile), lane // i32(boxes_per_tile) % i32(boxes)
        target = Address(base + layout.kv + (i32(0) if loads_k else i32(tile_bytes)))
        target = Address(target + column_box * BOX_BYTES + part * (box * LINE))
        field, last_row, listed = (
            min(lane, i32(scheduler.ITEM_COLUMNS - 1)),
            i32(batch.items.shape[0] - 1),
            batch.items[0, 0],
        )
        drawn, work_index, resuming = i32(0), i32(cuda.blockIdx.x), i32(0)
        index = udiv(work_index, batch.kv_heads)
        record, working = batch.items[min(i32(1 + index), last_row), field], index < listed
        tiles, sequence = shuffle(record, scheduler.TILES), shuffle(record, scheduler.SEQUENCE)
        first_key, context_len = shuffle(record, scheduler.FIRST_KEY), shuffle(record, scheduler.CONTEXT_LEN)
        if working and tiles > 0:
            look_up_pages(page_rows, pages, sequence, first_key, context_len, lane)
        # The tile after which the next item is found: when most stages are taken.
        last_tile = i32(stages - 2)
        if fused:
            # Keys and values are loaded before the wait: those of the tokens before this step were written by earlier
            # steps, which have ended, and the row of the new token is replaced in shared memory (write_new_token).
            # Counters are not drawn from: an earlier layer's kernel may still do so. Hence all stages are filled first.
            last_tile = i32(stages - 1)
        else:
            griddepcontrol_wait()
        # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
        stage, slot, parity, q_parity = i32(0), i32(0), i32(1), i32(1)
        while working:
            mbarrier_wait(Address(q_empty + slot * MBARRIER_BYTES), q_parity)
            kv_head, draw = i32(work_index - index * batch.kv_heads), i32(0)
            if loads_k:
                draws = not fused or drawn > 0
                draw = publish_item(record, kv_head, resuming, draws, q_source, batch, queues.items, base, slot, lane)
            else:
                # This item's work index is read.
                mbarrier_arrive(Address(q_empty + slot * MBARRIER_BYTES))
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
                            load_tile(target, source, row, column_box, kv_head, full, empty, stage, parity, lane)
                            stage, parity = advance(stage, parity)
                        # The next item is found while tiles of this one are in flight: first which it is, then where
                        # its keys are.
                        if first_segment and i == 0 and t == last_tile:
                            if fused and loads_k and drawn == 0:
                                griddepcontrol_wait()
                                if lane == 0:
                                    draw = i32(cuda.atomic.add(batch.counters, 0, i32(1)))
                            work_index = next_work_index(loads_k, draw, drawn, queues.work_indices, base, lane)
                            drawn = i32(drawn + 1)
                            index = udiv(work_index, batch.kv_heads)
                            record, working = batch.items[min(i32(1 + index), last_row), field], index < listed
                        if first_segment and i == 0 and t == last_tile + 1 and working:
                            if shuffle(record, scheduler.TILES) > 0:
                                next_sequence = shuffle(record, scheduler.SEQUENCE)
                                span = shuffle(record, scheduler.FIRST_KEY), shuffle(record, scheduler.CONTEXT_LEN)
                                look_up_pages(next_item_rows, pages, next_sequence, span[0], span[1], lane)
                            if resumes and loads_k:
                                next_kv_head = i32(work_index - index * batch.kv_heads)
                                resuming = resumes_partial(record, next_kv_head, batch, lane)
                first_segment, tiles = False, i32(tiles - segment_tiles)
                for i in range(lookups):
                    page_rows[i] = next_page_rows[i]
            tiles, sequence = shuffle(record, scheduler.TILES), shuffle(record, scheduler.SEQUENCE)
            first_key, context_len = shuffle(record, scheduler.FIRST_KEY), shuffle(record, scheduler.CONTEXT_LEN)
            for i in range(lookups):
                page_rows[i] = next_item_rows[i]
            slot, q_parity = next_slot(slot, q_parity)
            last_tile = i32(stages - 2)
        if loads_k:
            mbarrier_wait(Address(q_empty + slot * MBARRIER_BYTES), q_parity)
            if lane == 0:
                queues.items[slot, scheduler.TILES] = i32(-1)
            if lane < scheduler.ITEM_COLUMNS:
                mbarrier_arrive(Address(published + slot * MBARRIER_BYTES))
        if fused and loads_k:
            # A block without an item has not waited.
            griddepcontrol_wait()
        # The last block to draw nothing resets the counters for the next launch.
        if loads_k and lane == 0 and cuda.atomic.add(batch.counters, 1, i32(1)) == cuda.gridDim.x - 1:
            batch.counters[0] = i32(0)
            batch.counters[1] = i32(0)

    return produce


@functools.cache
def merger_function(config):
    """The device function of the merging warp."""
    layout, (_, next_slot) = config.layout, ring(MERGE_SLOTS)
    _, count_splits, _ = scheduler.split_functions(config.rows, config.segment, config.grouped)
    merge_partials = partial_merge(config.head_dim, config.element, 8 if config.rows == 8 else 4)

    @device_function
    def merge_queue(batch, partials, out, lse, merges, base, lane):
        """Merge the partials of a sequence and key head when the last of them is written, until the queue ends."""
        full, empty = Address(base + layout.merge_full), Address(base + layout.merge_empty)
        slot, parity, working = i32(0), i32(0), True
        while working:
            mbarrier_wait(Address(full + slot * MBARRIER_BYTES), parity)
            sequence, kv_head, start = merges[slot, 0], merges[slot, 1], merges[slot, 2]
            sequences, rows = merges[slot, 3], merges[slot, 4]
            working = sequence >= 0
            if working:
                last = False
                if lane < sequences:
                    counter = i32(2 + (sequence + lane) * batch.kv_heads + kv_head)
                    written = i32(atomic_add_acq_rel(batch.counters, counter) + 1)
                    last = written == count_splits(i32(sequence + lane), batch)
                    if last:
                        batch.counters[counter] = i32(0)
                complete = ballot(last)
                sync_warp()
                for i in range(sequences):
                    if (complete >> i) & 1 != 0:
                        splits = count_splits(i32(sequence + i), batch)
                        merge_partials(
                            partials, ((sequence + i) * batch.kv_heads + kv_head) * partials.max_splits, splits, rows,
                            batch.gqa_ratio, out, batch.heads, lse, start + i, kv_head * batch.gqa_ratio, lane,
                        )  # fmt: skip
                mbarrier_arrive(Address(empty + slot * MBARRIER_BYTES))
            slot, parity = next_slot(slot, parity)

    return merge_queue


@functools.cache
def barrier_init(config):
    """The device function by which one thread initialises all mbarriers of a block."""
    layout = config.layout
    (init_ring, _), (init_q, _), (init_merges, _) = ring(config.stages), ring(Q_SLOTS), ring(MERGE_SLOTS)
    # A warp arrives for queries that it makes from qkv, else all lanes that publish the item.
    q_arrivals = 32 if config.fused_qkv else scheduler.ITEM_COLUMNS

    @device_function
    def init_barriers(base):
        init_ring(Address(base + layout.full), Address(base + layout.empty), 2, 1)
        init_q(Address(base + layout.q_full), Address(base + layout.q_empty), q_arrivals, WARPGROUP + 32)
        for slot in range(Q_SLOTS):
            mbarrier_init(Address(base + layout.item_full + slot * MBARRIER_BYTES), scheduler.ITEM_COLUMNS)
        for slot in range(WORK_INDICES):
            mbarrier_init(Address(base + layout.work_ready + slot * MBARRIER_BYTES), 1)
        init_merges(Address(base + layout.merge_full), Address(base + layout.merge_empty), WARPGROUP, 32)
        mbarrier_init_fence()

    return init_barriers


@specialize
def paged_attention_sm90_kernel(config):
    """The kernel of a DecodeConfig."""
    blocks = config.blocks
    # 128 registers a thread are enough for 8 rows.
    moves_registers = blocks > 1 and config.rows > 8
    setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(PRODUCER_REGISTERS, False), setmaxnreg(CONSUMER_REGISTERS, True)
    produce, consume, merge_queue = producer_function(config), consumer_function(config), merger_function(config)
    init_barriers = barrier_init(config)

    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, blocks))
    def paged_attention_sm90_kernel(
        q_map, k_map, v_map, out, lse, context_lens, shared_prefix_lens, items, block_tables, block_size, heads,
        gqa_ratio, tokens, max_splits, partial_rows, max_leading, acc, row_max, row_sum, counters, c,
    ):  # fmt: skip
        """A block computes work items until there are none; see the top for what each warp does.

        out (N H, E / 2): pairs of elements; lse (H, N), or empty if not wanted; shared_prefix_lens (B,), empty if not
        grouped; items: of list_work_items_kernel; tokens: query tokens of a box of q; max_leading: most segments of a
        sequence's first item; max_splits, partial_rows, acc, row_max, row_sum: see Partials. counters: work indices
        drawn, blocks that are done, then the items done for each sequence and key head; all zero before and after.
        """
        queues = Queues(
            cuda.shared.array((Q_SLOTS, ITEM_FIELDS), np.int32),
            cuda.shared.array(WORK_INDICES, np.int32),
            cuda.shared.array((MERGE_SLOTS, MERGE_FIELDS), np.int32),
        )
        thread = i32(cuda.threadIdx.x)
        lane, warp, base = i32(thread & i32(31)), warp_uniform(thread >> i32(5)), shared_base()
        if thread == 0:
            init_barriers(base)
        if thread == WARPGROUP:
            prefetch_tensor_map(tensor_map_address(k_map))
            prefetch_tensor_map(tensor_map_address(v_map))
            prefetch_tensor_map(tensor_map_address(q_map))
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        kv_heads = i32(heads // gqa_ratio)
        batch = Batch(
            context_lens, shared_prefix_lens, items, heads, kv_heads, gqa_ratio, tokens, max_leading, counters
        )
        partials = Partials(acc, row_max, row_sum, max_splits, partial_rows)
        # The producers look up their first item before they wait: no kernel of the step writes the list or the tables.
        if warp < 4 or warp > 5:
            griddepcontrol_wait()
        if warp >= 4:
            if moves_registers:
                setmaxnreg_dec()
            if warp < 6:
                loads_k = warp == 4
                source = tensor_map_address(k_map) if loads_k else tensor_map_address(v_map)
                pages = block_tables, block_size
                produce(loads_k, tensor_map_address(q_map), source, batch, pages, queues, base, lane)
            elif warp == 6:
                merge_queue(batch, partials, out, lse, queues.merges, base, lane)
        else:
            if moves_registers:
                setmaxnreg_inc()
            consume(batch, partials, out, lse, c, queues, base, thread)

    return paged_attention_sm90_kernel
