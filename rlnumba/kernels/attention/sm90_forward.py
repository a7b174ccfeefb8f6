"""Causal attention on sm_90: forward over packed sequences, and over the paged cache for prefill.

The equations are those of kernels/attention/ops.py, in float16 or bfloat16 with float32 accumulators. A row (a query
head of a token) is computed so, whatever its batch, here and in sm90_decode/, with the steps of softmax.py:

    for each segment of SEGMENT_KEYS keys, the segments fixed by the keys' absolute positions:
        m = -inf, l = 0 (32 of them), acc = 0
        for each tile of TILE_KEYS keys of the segment, in ascending order:
            s_j = sum over e of q_e k_je by wgmma, 16 columns at a time in ascending order; -inf beyond the diagonal
            m' = c max_j s_j if that is above m + RESCALE_THRESHOLD, else m
            rescale = 2^(m - m')    p_j = 2^fma(s_j, c, -m')    m = m'
            l_wg = fma(l_wg, rescale, p_(16 w + g) + p_(16 w + 8 + g))       w = 0 .. 3, g = 0 .. 7
            acc_e = acc_e rescale + sum over j of p_j v_je by wgmma, p rounded to the inputs' type, 16 keys at a time
        t_g = (l_0g + l_1g) + (l_2g + l_3g)       l = ((t_0 + t_1) + (t_2 + t_3)) + ((t_4 + t_5) + (t_6 + t_7))
    segments merge in ascending order, each with all before it (M, L, A):
        M' = max(M, m)    a = 2^(M - M')    b = 2^(m - M')    L = fma(l, b, L a)    A_e = fma(acc_e, b, A_e a)
    out_e = A_e (1 / L)     lse = fma(M, ln 2, log L)

A wgmma gives an element the same bits whatever its width and whichever operand is A, so decode may exchange keys and
queries; both layouts of a tile's scores can add l in this order. A tile beyond a row's diagonal changes nothing
(m' = m, rescale = 1, p = 0), nor does a segment (b = 0, a = 1), so blocks may visit more tiles than a row needs. With a
window a row is one segment, which begins with the tile of its first key; tiles ahead of it change nothing either (m =
-inf, l = acc = 0).

The grid is persistent; scheduler.py orders the work items. An item is 64 query tokens for each of one or two consumer
warpgroups, which take two query heads of one key head where their number is even, else neighbouring tokens. In the
producer warpgroup, warp 0 publishes the item and loads Q and K, warp 1 loads V, by TMA, `stages` tiles ahead. While a
consumer's softmax runs, the tensor cores compute its next S = Q K^T and its last O += P V, and the other consumer's.
Sources: Dao et al. 2022; Shah et al. 2024 (FlashAttention-3).
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention import softmax
from rlnumba.kernels.attention.scheduler import Pages, page_lookup, prefill_batch, prefill_scheduler
from rlnumba.kernels.attention.sm90_config import TILE_ROWS, attention_config
from rlnumba.kernels.checks import unused
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import (
    BOX_BYTES,
    LINE,
    Address,
    fence_proxy_async,
    ldmatrix_x4,
    stmatrix_x4,
)
from rlnumba.kernels.ptx.warp import ballot, cvt_pack, device_function, shuffle, sync_warp
from rlnumba.kernels.ptx.wgmma import WARPGROUP, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, matrix_address, ring, shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Architectures that the kernel of this module compiles for.
ARCHITECTURES = [(9, 0, "a")]

# Registers of a thread of the producer warpgroup, and of a consumer, where there are two consumers.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224
# Fields that warp 0 publishes of a work item: tiles of keys (0: no more work), query head, first row of q, its
# position, rows from there to the sequence's end, keys of the last tile; with a window the first tile. Tiles are
# counted from the sequence's start.
ITEM_FIELDS = 6
# More keys than a sequence has.
NO_END = (1 << 31) - 1


@functools.cache
def load_functions(config):
    """(load_q, load_kv): the device functions by which a producer warp loads a work item's tiles."""
    _, _, consumers, stages, paired, paged, box, _, window, prefixes, nested = config
    boxes, tile_bytes = config.boxes, config.tile_bytes
    boxes_per_tile = softmax.TILE_KEYS // box
    # 32 lanes look up the rows of so many tiles' boxes at once. A box of 64 keys is looked up when it is due: a
    # producer has no registers left for more.
    tiles_per_lookup, several = 32 // boxes_per_tile, boxes_per_tile > 1
    page_row, (_, advance) = page_lookup(box), ring(stages)

    @device_function
    def load_q(q_source, target, head, row, q_full):
        sm90.mbarrier_expect_tx(q_full, consumers * tile_bytes)
        for consumer in range(consumers):
            q_head, q_row = (head + consumer, row) if paired else (head, row + consumer * TILE_ROWS)
            for b in range(boxes):
                box_target = target + consumer * tile_bytes + b * BOX_BYTES
                sm90.tma_load_3d(box_target, q_source, b * 64, q_head, q_row, q_full)

    @device_function
    def find_owner(batch, parents, sequence, key):
        """(row of key 0, were it the owner's, the first key of the next one): of the sequence or ancestor that has a
        key in its own rows."""
        end = i32(NO_END)
        while key < batch.context_lens[sequence]:
            end = batch.context_lens[sequence]
            sequence = parents[sequence, 0]
        return i32(batch.cu_seqlens[sequence] - batch.context_lens[sequence]), end

    @device_function
    def load_kv(
        source, target, full, empty, stage, parity, tiles, first_tile, kv_head, row, prefix, batch, sequence,
        context_len, pages, lane,
    ):  # fmt: skip
        """Load a work item's tiles of K or V from first_tile on; pages: Pages.

        row: of the first key, if packed; prefix: (its first row, its keys), and row is what that of key 0 would be,
        were the sequence's own rows behind others of its own. Of nested prefixes, batch and pages have all of these.
        """
        # Lane i loads box i % boxes_per_tile of the tile, columns 64 (i // boxes_per_tile) on.
        part, column_box = lane % i32(boxes_per_tile), lane // i32(boxes_per_tile)
        target = Address(target + column_box * BOX_BYTES + part * (box * LINE))
        row, page, next_page, index = i32(row + part * box), i32(0), i32(0), i32(part)
        key = i32(lane * box) if several else i32(0)
        if window > 0:
            row, key = i32(row + first_tile * softmax.TILE_KEYS), i32(key + first_tile * softmax.TILE_KEYS)
            tiles = i32(tiles - first_tile)
        if paged and several:
            next_page = page_row(pages, sequence, key, context_len)
        own_row, owner_row, owner_end = row, i32(0), i32(0)
        if prefixes:
            key = i32(part * box + first_tile * softmax.TILE_KEYS)
        while tiles > 0:
            if nested:
                # The boxes of a lane ascend, so that their owners are looked for once each.
                if key >= owner_end:
                    owner_row, owner_end = find_owner(batch, pages.block_tables, sequence, key)
                row = i32(owner_row + key)
                key = i32(key + softmax.TILE_KEYS)
            elif prefixes:
                # A box is of one sequence: its keys begin at a multiple of its size, and so do a sequence's own.
                row = i32(prefix[0] + key) if key < prefix[1] else own_row
                own_row = i32(own_row + softmax.TILE_KEYS)
                key = i32(key + softmax.TILE_KEYS)
            if paged and several:
                if index == part:
                    # The rows of the next tiles are looked up before they are needed.
                    page = next_page
                    if tiles > tiles_per_lookup:
                        key = i32(key + 32 * box)
                        next_page = page_row(pages, sequence, key, context_len)
                row = i32(shuffle(page, index))
                index = i32((index + boxes_per_tile) & i32(31))
            elif paged:
                row = page_row(pages, sequence, key, context_len)
                key = i32(key + softmax.TILE_KEYS)
            sm90.mbarrier_wait(Address(empty + stage * MBARRIER_BYTES), parity)
            barrier = Address(full + stage * MBARRIER_BYTES)
            if lane == 0:
                sm90.mbarrier_expect_tx(barrier, tile_bytes)
            sync_warp()
            if lane < boxes * boxes_per_tile:
                sm90.tma_load_3d(
                    Address(target + stage * tile_bytes), source, column_box * i32(64), kv_head, row, barrier
                )
            stage, parity = advance(stage, parity)
            row = i32(row + softmax.TILE_KEYS)
            tiles = i32(tiles - 1)
        return stage, parity

    return load_q, load_kv


@functools.cache
def producer_function(config):
    """The device function of the two producer warps."""
    head_dim, _, consumers, stages, paired, paged, _, _, window, prefixes, _ = config
    item_tokens, layout = config.item_tokens, config.layout
    first_query_tile, next_query_tile, find_sequence = prefill_scheduler(paged, item_tokens)
    load_q, load_kv = load_functions(config)

    @device_function
    def produce(q_source, k_source, v_source, batch, query_heads, query_tiles, pages, item, base, thread):
        """Warp 0 publishes work items and loads Q and K, warp 1 loads V, until no work is left."""
        loads_k, is_v, lane = thread < 32, i32(thread >> i32(5)), i32(thread & i32(31))
        source = k_source if loads_k else v_source
        target = Address(base + layout.k + is_v * (layout.v - layout.k))
        full = Address(base + layout.k_full + is_v * (layout.v_full - layout.k_full))
        empty = Address(full + stages * MBARRIER_BYTES)
        q_full, q_empty = Address(base + layout.q_full), Address(base + layout.q_empty)
        heads = query_heads // i32(consumers) if paired else query_heads
        query_tile, items_before, longer = first_query_tile(query_tiles, batch, lane)
        # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
        stage, parity, q_parity = i32(0), i32(1), i32(1)
        round_start, offset = i32(0), i32(cuda.blockIdx.x)
        while query_tile >= 0:
            # Every other round goes through the blocks backwards, so that no block gets all the longest items.
            work_index = i32(round_start + offset)
            round_start = i32(round_start + cuda.gridDim.x)
            offset = i32(cuda.gridDim.x - 1 - offset)
            query_tile, items_before, longer = next_query_tile(
                work_index, query_tile, items_before, longer, heads, batch, lane
            )
            if loads_k:
                sm90.mbarrier_wait(q_empty, q_parity)
            q_parity ^= i32(1)
            if query_tile >= 0:
                rank = i32(i32(work_index - items_before) // heads)
                head = i32(i32(work_index - items_before) % heads)
                if paired:
                    head = i32(head * consumers)
                first = i32(query_tile * item_tokens)
                sequence = find_sequence(rank, first, batch, lane)
                start = batch.cu_seqlens[sequence]
                length = i32(batch.cu_seqlens[sequence + 1] - start)
                context_len = batch.context_lens[sequence] if paged else length
                key_row, prefix = start, (i32(0), i32(0))
                if prefixes:
                    # context_lens are those of prefixes, and pages has the parents.
                    prefix_len, parent = batch.context_lens[sequence], max(pages.block_tables[sequence, 0], i32(0))
                    prefix = batch.cu_seqlens[parent], prefix_len
                    context_len, key_row = i32(length + prefix_len), i32(start - prefix_len)
                last = i32(context_len - length + min(i32(first + item_tokens), length) - 1)
                tiles = i32(last // i32(softmax.TILE_KEYS) + 1)
                first_tile = i32(0)
                if window > 0:
                    seen = max(i32(context_len - length + first - (window - 1)), i32(0))
                    first_tile = seen // i32(softmax.TILE_KEYS)
                if loads_k and lane == 0:
                    item[0] = tiles
                    item[1] = head
                    item[2] = start + first
                    item[3] = context_len - length + first
                    item[4] = length - first
                    item[5] = context_len - (tiles - 1) * softmax.TILE_KEYS
                    if window > 0:
                        item[6] = first_tile
                    load_q(q_source, Address(base + layout.q), head, start + first, q_full)
                stage, parity = load_kv(
                    source, target, full, empty, stage, parity, tiles, first_tile, i32(head // batch.gqa_ratio),
                    key_row, prefix, batch, sequence, context_len, pages, lane,
                )  # fmt: skip
            elif loads_k and lane == 0:
                item[0] = i32(0)
                sm90.mbarrier_arrive(q_full)

    return produce


# A consumer's part of a work item, see ITEM_FIELDS.
WorkItem = namedtuple("WorkItem", "tiles head row position valid_rows valid_keys first_tile")
# A consumer thread's local arrays; those from row_max on hold values of its two rows.
ForwardRegisters = namedtuple(
    "ForwardRegisters", "q scores p acc sums row_max rescale segment_max segment_sum merged_max merged_sum"
)


@functools.cache
def mainloop_function(config):
    """The device function of a consumer's loop over the tiles of K and V of a work item."""
    head_dim, element, _, stages, _, _, _, segment, window, _, _ = config
    tile_bytes, segment_tiles, in_registers = config.tile_bytes, segment // softmax.TILE_KEYS, config.q_in_registers
    q_steps, layout, merged_bytes = -(-head_dim // 16), config.layout, config.merged_bytes
    start_scores = wgmma_async(softmax.TILE_KEYS, element, q_steps, "registers" if in_registers else "k")
    wait_all_but_latest, wait_all = (
        wgmma_wait_group(softmax.TILE_KEYS // 2, pending, 4 * q_steps * in_registers) for pending in (1, 0)
    )
    start_values = wgmma_async(head_dim, element, softmax.TILE_KEYS // 16, "registers", "mn")
    wait_values = wgmma_wait_group(head_dim // 2, 0, softmax.TILE_KEYS // 4)
    scale, keep, merge = softmax.accumulator_functions(head_dim)
    zero_rows, cvt_pair, (_, advance) = softmax.zero_function(config.boxes), cvt_pack(element), ring(stages)

    @device_function
    def load_q(q, q_tile, warp, lane):
        if in_registers:
            for step in range(q_steps):
                words = ldmatrix_x4(Address(matrix_address(q_tile, step, warp, lane)))
                for i in range(4):
                    q[4 * step + i] = words[i]
            return q
        else:
            return smem_descriptor(q_tile)

    @device_function
    def wait_scores(wait, scores, q):
        """Wait for S; its operand stays in place until then if it is in registers."""
        if in_registers:
            wait(scores, q)
        else:
            wait(scores)

    @device_function
    def round_probabilities(p, scores):
        for i in range(softmax.TILE_KEYS // 4):
            p[i] = cvt_pair(scores[2 * i], scores[2 * i + 1])

    @device_function
    def reset(row_max, sums):
        for half in range(2):
            row_max[half] = softmax.MINUS_INFINITY
        for i in range(16):
            sums[i] = f32(0.0)

    @device_function
    def release(empty, stage, parity, thread):
        """Give a stage back, when all of the consumer's warps have waited for the wgmma that read it: the next one."""
        if thread == 0:
            sm90.mbarrier_arrive(Address(empty + stage * MBARRIER_BYTES))
        return advance(stage, parity)

    @device_function
    def mask_window(scores, item, mask_offset, tile_key):
        """Mask the scores of the tile that begins with this key, on both sides of the rows' windows."""
        if i32(tile_key + (softmax.TILE_KEYS - 1)) > item.position:
            softmax.apply_causal_mask(scores, i32(mask_offset - tile_key))
        if tile_key <= i32(item.position + (TILE_ROWS - 1 - window)):
            softmax.apply_window_mask(scores, i32(mask_offset - tile_key - window))

    @device_function
    def mainloop(registers, base, item, mask_offset, ring_state, c, consumer, thread):
        """(M, L, A) to merged_max, merged_sum, acc. mask_offset: position of the thread's first row less its column."""
        _, scores, p, acc, sums, row_max, rescale, segment_max, segment_sum, merged_max, merged_sum = registers
        k_stage, k_parity, v_stage, v_parity = ring_state
        merged = Address(base + layout.merged + consumer * merged_bytes + thread * 16)
        q_tile = Address(base + layout.q + consumer * tile_bytes)
        q = load_q(registers.q, q_tile, i32(thread >> i32(5)), i32(thread & i32(31)))
        if in_registers:
            sm90.mbarrier_arrive(Address(base + layout.q_empty))
        reset(row_max, sums)

        # The first tile's probabilities.
        sm90.mbarrier_wait(Address(base + layout.k_full + k_stage * MBARRIER_BYTES), k_parity)
        start_scores(scores, q, smem_descriptor(Address(base + layout.k + k_stage * tile_bytes)), i32(0))
        wait_scores(wait_all, scores, q)
        k_stage, k_parity = release(base + layout.k_empty, k_stage, k_parity, thread)
        if window > 0:
            mask_window(scores, item, mask_offset, i32(item.first_tile * softmax.TILE_KEYS))
        elif item.position < softmax.TILE_KEYS - 1:
            softmax.apply_causal_mask(scores, mask_offset)
        softmax.online_softmax_step(scores, row_max, sums, rescale, c)
        round_probabilities(p, scores)
        # 0: the next O += P V overwrites acc.
        accumulate, index = i32(0), i32(item.first_tile + 1)
        if index < item.tiles:
            sm90.mbarrier_wait(Address(base + layout.k_full + k_stage * MBARRIER_BYTES), k_parity)
        while index < item.tiles:
            # S = Q K^T of this tile and O += P V of the one before run on the tensor cores together.
            start_scores(scores, q, smem_descriptor(Address(base + layout.k + k_stage * tile_bytes)), i32(0))
            sm90.mbarrier_wait(Address(base + layout.v_full + v_stage * MBARRIER_BYTES), v_parity)
            start_values(acc, p, smem_descriptor(Address(base + layout.v + v_stage * tile_bytes)), accumulate)
            wait_scores(wait_all_but_latest, scores, q)
            k_stage, k_parity = release(base + layout.k_empty, k_stage, k_parity, thread)
            new_segment = window == 0 and (index & i32(segment_tiles - 1)) == 0
            if new_segment:
                for half in range(2):
                    segment_max[half], segment_sum[half] = row_max[half], softmax.row_sum(sums, half)
                reset(row_max, sums)
            if window > 0:
                mask_window(scores, item, mask_offset, i32(index * softmax.TILE_KEYS))
            elif i32(index * softmax.TILE_KEYS + (softmax.TILE_KEYS - 1)) > item.position:
                softmax.apply_causal_mask(scores, i32(mask_offset - index * softmax.TILE_KEYS))
            softmax.online_softmax_step(scores, row_max, sums, rescale, c)
            index = i32(index + 1)
            # The wait for the next K stands here because ptxas moves nothing across it: else it would move the wait
            # for O += P V above the exponentials, which are to overlap with it.
            if index < item.tiles:
                sm90.mbarrier_wait(Address(base + layout.k_full + k_stage * MBARRIER_BYTES), k_parity)
            wait_values(acc, p)
            v_stage, v_parity = release(base + layout.v_empty, v_stage, v_parity, thread)
            accumulate = i32(1)
            if new_segment:
                accumulate = i32(0)
                if index == segment_tiles + 1:
                    # TMA must have read the last item's out from this memory.
                    if thread == 0:
                        sm90.bulk_wait_group_read()
                    sm90.named_barrier_sync(1 + consumer, WARPGROUP)
                    keep(merged, acc, merged_max, merged_sum, segment_max, segment_sum)
                else:
                    merge(merged, acc, merged_max, merged_sum, segment_max, segment_sum, False)
            if ballot(rescale[0] != f32(1.0) or rescale[1] != f32(1.0)) != 0:
                scale(acc, rescale)
            round_probabilities(p, scores)

        # The last tile's O += P V.
        if not in_registers:
            sm90.mbarrier_arrive(Address(base + layout.q_empty))
        sm90.mbarrier_wait(Address(base + layout.v_full + v_stage * MBARRIER_BYTES), v_parity)
        if item.valid_keys < softmax.TILE_KEYS:
            zero_rows(Address(base + layout.v + v_stage * tile_bytes), item.valid_keys, thread)
            sm90.named_barrier_sync(1 + consumer, WARPGROUP)
        start_values(acc, p, smem_descriptor(Address(base + layout.v + v_stage * tile_bytes)), accumulate)
        for half in range(2):
            segment_sum[half] = softmax.row_sum(sums, half)
        wait_values(acc, p)
        v_stage, v_parity = release(base + layout.v_empty, v_stage, v_parity, thread)
        if window == 0 and item.tiles > segment_tiles:
            merge(merged, acc, merged_max, merged_sum, row_max, segment_sum, True)
        else:
            for half in range(2):
                merged_max[half], merged_sum[half] = row_max[half], segment_sum[half]
        return k_stage, k_parity, v_stage, v_parity

    return mainloop


@functools.cache
def epilogue_function(config):
    """The device function that writes a consumer's rows of out and lse."""
    head_dim, boxes, cvt_pair = config.head_dim, config.boxes, cvt_pack(config.element)
    layout, merged_bytes, window = config.layout, config.merged_bytes, config.window
    scale, _, _ = softmax.accumulator_functions(head_dim)
    # stmatrix stores 16 columns at a time.
    staged = head_dim % 16 == 0

    @device_function
    def epilogue(registers, base, item, out_map, out, lse, line, consumer, thread):
        """line: this thread's first row is row `line` of the consumer's tile, the other one line + 8."""
        acc, inverse = registers.acc, registers.rescale
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        tile = Address(base + layout.merged + consumer * merged_bytes)
        for half in range(2):
            if window > 0 and registers.merged_sum[half] == f32(0.0):
                # A row behind the sequence's end, which is not stored, may see no key.
                registers.merged_sum[half] = f32(1.0)
            inverse[half] = f32(1.0) / registers.merged_sum[half]
            if lse.shape[0] > 0 and (lane & i32(3)) == 0 and line + half * 8 < item.valid_rows:
                lse[item.head, item.row + line + half * 8] = softmax.log_sum_exp(
                    registers.merged_max[half], registers.merged_sum[half]
                )
        scale(acc, inverse)
        if staged and item.valid_rows >= TILE_ROWS:
            # TMA must have read the last item's out, and all threads their merged accumulators, from this memory.
            if thread == 0:
                sm90.bulk_wait_group_read()
            sm90.named_barrier_sync(1 + consumer, WARPGROUP)
            for block in range(head_dim // 16):
                stmatrix_x4(
                    matrix_address(tile, block, warp, lane),
                    cvt_pair(acc[block * 8], acc[block * 8 + 1]),
                    cvt_pair(acc[block * 8 + 2], acc[block * 8 + 3]),
                    cvt_pair(acc[block * 8 + 4], acc[block * 8 + 5]),
                    cvt_pair(acc[block * 8 + 6], acc[block * 8 + 7]),
                )
            fence_proxy_async()
            sm90.named_barrier_sync(1 + consumer, WARPGROUP)
            if thread == 0:
                for b in range(boxes):
                    source = tile + b * BOX_BYTES
                    sm90.tma_store_3d(sm90.tensor_map_address(out_map), b * 64, item.head, item.row, source)
                sm90.bulk_commit_group()
        else:
            # The rows behind the sequence's last are another sequence's.
            for half in range(2):
                if line + half * 8 < item.valid_rows:
                    for block in range(head_dim // 8):
                        i, column = block * 4 + half * 2, item.head * (head_dim // 2) + block * 4 + (lane & i32(3))
                        out[item.row + line + half * 8, column] = cvt_pair(acc[i], acc[i + 1])

    return epilogue


@functools.cache
def consumer_function(config):
    """The device function of a consumer warpgroup."""
    head_dim, layout, paired, window = config.head_dim, config.layout, config.paired, config.window
    # Lengths of local arrays are constants in a kernel, which these are there, and expressions are not.
    q_words = -(-head_dim // 16) * 4 if config.q_in_registers else 1
    score_count, word_count, acc_count = softmax.TILE_KEYS // 2, softmax.TILE_KEYS // 4, head_dim // 2
    mainloop, epilogue = mainloop_function(config), epilogue_function(config)

    @device_function
    def read_item(fields, consumer):
        tiles, head, row, position, valid_rows = fields[0], fields[1], fields[2], fields[3], fields[4]
        if paired:
            head = i32(head + consumer)
        else:
            row = i32(row + consumer * TILE_ROWS)
            position = i32(position + consumer * TILE_ROWS)
            valid_rows = i32(valid_rows - consumer * TILE_ROWS)
        return WorkItem(tiles, head, row, position, valid_rows, fields[5], fields[6] if window > 0 else i32(0))

    @device_function
    def consume(out_map, out, lse, c, fields, base, consumer, thread):
        """Compute work items until there are none; fields: of the item; thread: of the consumer."""
        q_parity, working = i32(0), True
        registers = ForwardRegisters(
            cuda.local.array(q_words, np.int32), cuda.local.array(score_count, np.float32),
            cuda.local.array(word_count, np.int32), cuda.local.array(acc_count, np.float32),
            cuda.local.array(16, np.float32), cuda.local.array(2, np.float32), cuda.local.array(2, np.float32),
            cuda.local.array(2, np.float32), cuda.local.array(2, np.float32),
            cuda.local.array(2, np.float32), cuda.local.array(2, np.float32),
        )  # fmt: skip
        for i in range(acc_count):
            registers.acc[i] = f32(0.0)
        for i in range(score_count):
            registers.scores[i] = f32(0.0)
        line = i32((thread >> i32(5)) * 16 + (i32(thread & i32(31)) >> i32(2)))
        ring_state = i32(0), i32(0), i32(0), i32(0)
        while working:
            sm90.mbarrier_wait(Address(base + layout.q_full), q_parity)
            q_parity ^= i32(1)
            item = read_item(fields, consumer)
            working = item.tiles > 0
            if working:
                mask_offset = i32(item.position + line - 2 * i32(thread & i32(3)))
                ring_state = mainloop(registers, base, item, mask_offset, ring_state, c, consumer, thread)
                epilogue(registers, base, item, out_map, out, lse, line, consumer, thread)
        if thread == 0:
            sm90.bulk_wait_group()

    return consume


@specialize
def attention_sm90_kernel(config):
    """The kernel of an AttentionConfig."""
    head_dim, consumers, stages, layout = config.head_dim, config.consumers, config.stages, config.layout
    setmaxnreg_dec, setmaxnreg_inc = (
        sm90.setmaxnreg(PRODUCER_REGISTERS, False),
        sm90.setmaxnreg(CONSUMER_REGISTERS, True),
    )
    item_fields = ITEM_FIELDS + (1 if config.window else 0)
    produce, consume, (init_ring, _) = producer_function(config), consumer_function(config), ring(stages)

    @cuda.jit(launch_bounds=((consumers + 1) * WARPGROUP, 1))
    def attention_sm90_kernel(q_map, k_map, v_map, out_map, out, lse, batch, pages, query_tiles, c):
        """A block computes work items until there are none: warpgroup 0 loads, the others are consumers.

        out (N, H E / 2), pairs of elements; lse (H, N), or empty if not wanted; batch: a PrefillBatch, whose
        context_lens, like pages, are empty if not paged; with prefixes they are the lengths of these, and
        pages.block_tables (B, 1) has the parents. query_tiles: of the longest sequence.
        """
        item = cuda.shared.array(item_fields, np.int32)
        thread = i32(cuda.threadIdx.x)
        warpgroup, base = sm90.warp_uniform(thread >> i32(7)), shared_base()
        if thread == 0:
            sm90.mbarrier_init(Address(base + layout.q_full), 1)
            sm90.mbarrier_init(Address(base + layout.q_empty), consumers * WARPGROUP)
            init_ring(Address(base + layout.k_full), Address(base + layout.k_empty), 1, consumers)
            init_ring(Address(base + layout.v_full), Address(base + layout.v_empty), 1, consumers)
            sm90.mbarrier_init_fence()
        cuda.syncthreads()
        if warpgroup == 0:
            if consumers > 1:
                setmaxnreg_dec()
            if thread < 64:
                produce(
                    sm90.tensor_map_address(q_map), sm90.tensor_map_address(k_map), sm90.tensor_map_address(v_map),
                    batch, i32(out.shape[1] * 2 // head_dim), query_tiles, pages, item, base, thread,
                )  # fmt: skip
        else:
            if consumers > 1:
                setmaxnreg_inc()
            consume(out_map, out, lse, c, item, base, i32(warpgroup - 1), i32(thread & i32(127)))

    return attention_sm90_kernel


def attention_sm90(q, k, v, sequences, scale, out, lse, config=None):
    """The operator attention by the sm90 kernel, for supported heads and scale > 0; config: not attention_config's."""
    head_dim, gqa_ratio, (cu_seqlens, max_seqlen, window, prefixes) = q.shape[2], q.shape[1] // k.shape[1], sequences
    if not len(q) or max_seqlen < 1:
        return
    config = config or attention_config(head_dim, q.dtype.name, gqa_ratio)
    config = config.with_window(window).with_prefixes(prefixes)
    maps = [tensor_map(q, TILE_ROWS, 1, 64), *(tensor_map(x, config.box, 1, 64) for x in (k, v))]
    lengths, parents = (unused(1), unused(2)) if prefixes is None else (prefixes.lengths, prefixes.parents[:, None])
    batch = prefill_batch(cu_seqlens, lengths, gqa_ratio, 0)
    pages = Pages(parents, np.int32(1))
    launch_attention(config, maps, batch, pages, max_seqlen, float(scale * softmax.LOG2_E), out, lse)


def launch_attention(config, maps, batch, pages, max_seqlen, c, out, lse):
    """Launch the kernel of `config` on the grid that sequences of up to max_seqlen query tokens fill.

    maps: tensor maps of Q, K and V; batch: a PrefillBatch.
    """
    tokens, heads, _ = out.shape
    query_tiles = -(-max_seqlen // config.item_tokens)
    items = query_tiles * (batch.cu_seqlens.shape[0] - 1) * (heads // config.consumers if config.paired else heads)
    launch(
        attention_sm90_kernel(config), min(items, device.sm_count()), (config.consumers + 1) * WARPGROUP,
        *maps, tensor_map(out, TILE_ROWS, 1, 64),
        out.reshape(tokens, -1).view(np.int32), lse, batch, pages, np.int32(query_tiles), c,
        shared=config.layout.nbytes,
    )  # fmt: skip
