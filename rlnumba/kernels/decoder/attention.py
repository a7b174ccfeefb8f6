"""Attention in the persistent decoder kernel: a work item is a row of the batch and a key head.

One warp loads tiles of 64 keys and values of this block's items by TMA, as far ahead as the ring goes: what the cache
held before this step depends on nothing in it. The four computing warps take the item's queries and the new token's key
and value from the exchange, normalise and rotate them as qkv_split_kernel does, put the new token into the last tile
and into the cache, and attend to all keys in one pass. The arithmetic is that of sm90_decode/.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention import softmax
from rlnumba.kernels.attention.scheduler import page_lookup
from rlnumba.kernels.attention.sm90_decode.consumer import (
    EXCHANGED,
    STORED,
    Lane,
    column_sum_function,
    softmax_functions,
)
from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.attention.split_kv import accumulator_access
from rlnumba.kernels.decoder.config import PANEL_BYTES, STAGE_BYTES
from rlnumba.kernels.decoder.exchange import exchange_store, load_2
from rlnumba.kernels.nn.qkv import head_norm
from rlnumba.kernels.nn.rope import HeadShape, head_access, rotate
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import (
    BOX_BYTES,
    LINE,
    Address,
    fence_proxy_async,
    load_words,
    stmatrix_x2_trans,
    store_words,
)
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function, sync_warp, udiv, vector_access
from rlnumba.kernels.ptx.wgmma import WARPGROUP, WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# Columns of S^T: the query heads of a key head, padded.
COLUMNS = 8
# Arrays of a batch that attention reads; kv_slots: rows of the cache of one layer.
Rows = namedtuple("Rows", "position_ids context_lens slot_mapping block_tables block_size kv_slots")
# The new token's head that a thread has a part of: 16 elements in eight words.
HEAD_WORDS = 8


@functools.cache
def produce_kv_function(config):
    """The device function by which one warp loads the tiles of K and V of this block's items of a layer.

    A tile of K takes a stage of the ring, that of V the next one.
    """
    boxes, tile_bytes, box = config.kv_boxes, config.kv_tile_bytes, config.box
    kv_heads, items = config.kv_heads, config.rows * config.kv_heads
    boxes_per_tile = TILE_KEYS // box
    loads, page_row, (_, advance) = boxes * boxes_per_tile, page_lookup(box), ring(config.stages)

    @device_function
    def load_tile(source, page, kv_head, part, column_box, at, stage, parity):
        sm90.mbarrier_wait(at.empty + stage * MBARRIER_BYTES, parity)
        barrier = at.full + stage * MBARRIER_BYTES
        if at.lane == 0:
            sm90.mbarrier_expect_tx(barrier, i32(tile_bytes))
        sync_warp()
        if at.lane < loads:
            target = at.ring + stage * STAGE_BYTES + column_box * BOX_BYTES + part * (box * LINE)
            sm90.tma_load_3d_evict_first(target, source, column_box * i32(64), kv_head, page, barrier)

    @device_function
    def produce_kv(k_map, v_map, layer, rows, at, stage, parity):
        """Returns the ring's next stage."""
        load = min(at.lane, i32(loads - 1))
        part, column_box = load % i32(boxes_per_tile), load // i32(boxes_per_tile)
        item = i32(cuda.blockIdx.x)
        while item < items:
            row = udiv(item, kv_heads)
            kv_head, context_len = i32(item - row * kv_heads), i32(rows.context_lens[row])
            first_key = i32(0)
            while first_key < context_len:
                key = i32(first_key + part * box)
                page = page_row(rows, row, key, context_len)
                page = i32(layer * rows.kv_slots + page)
                load_tile(k_map, page, kv_head, part, column_box, at, stage, parity)
                stage, parity = advance(stage, parity)
                load_tile(v_map, page, kv_head, part, column_box, at, stage, parity)
                stage, parity = advance(stage, parity)
                first_key = i32(first_key + TILE_KEYS)
            item = i32(item + cuda.gridDim.x)
        return stage, parity

    return produce_kv


@functools.cache
def tile_functions(head_dim, element):
    """(start_scores, take_scores, softmax_tile, add_values): the steps of a tile of keys for COLUMNS query rows."""
    boxes = head_dim // 64
    columns, score_count, acc_count, word_count = COLUMNS // 4, COLUMNS // 2, boxes * COLUMNS // 2, COLUMNS // 4
    multiply_keys, wait_scores = wgmma_async(COLUMNS, element, head_dim // 16), wgmma_wait_group(score_count, 0)
    multiply_values = wgmma_async(COLUMNS, element, TILE_KEYS // 16, "mn", layout=WgmmaLayout(blocks=boxes))
    wait_values = wgmma_wait_group(acc_count, 0)
    apply_mask, column_max, softmax_step = softmax_functions(COLUMNS)
    zero_rows, cvt_pair = softmax.zero_function(boxes), cvt_pack(element)

    @device_function
    def start_scores(state, k_tile, q_tile):
        """Begin S^T of a tile, in next_scores."""
        multiply_keys(state.next_scores, smem_descriptor(k_tile), smem_descriptor(q_tile), i32(0))

    @device_function
    def take_scores(state):
        """Wait for all products; the scores of the tile that was begun last become `scores`."""
        wait_scores(state.next_scores)
        for i in range(score_count):
            state.scores[i] = state.next_scores[i]

    @device_function
    def softmax_tile(state, p, row_max_memory, tile_key, context_len, c, at):
        """Scores become probabilities, P^T in shared memory; the accumulators follow the new row maximum."""
        scores, words = state.scores, state.words
        if i32(tile_key + (TILE_KEYS - 1)) > i32(context_len - 1):
            apply_mask(scores, i32(tile_key + at.warp * 16 + at.group_lane), state.position)
        column_max(state.tile_max, scores, row_max_memory, at)
        softmax_step(scores, state.row_max, state.row_sum, state.tile_max, state.rescale, c)
        for i in range(word_count):
            words[i] = cvt_pair(scores[2 * i], scores[2 * i + 1])
        for i in range(word_count // 2):
            stmatrix_x2_trans(Address(p + at.offset + i * (8 * LINE)), words[2 * i], words[2 * i + 1])
        for b in range(boxes):
            for i in range(columns):
                j = b * score_count + i // 2 * 4 + i % 2
                state.acc[j] *= state.rescale[i]
                state.acc[j + 2] *= state.rescale[i]

    @device_function
    def add_values(state, v_tile, p, tile_key, context_len, at):
        """acc += V^T P^T, once P^T, and what was written to the tile of V, is visible to wgmma."""
        if i32(context_len - tile_key) < TILE_KEYS:
            zero_rows(v_tile, i32(context_len - tile_key), at.thread)
        fence_proxy_async()
        sm90.named_barrier_sync(STORED, WARPGROUP)
        multiply_values(state.acc, smem_descriptor(v_tile), smem_descriptor(p), i32(tile_key > 0))
        wait_values(state.acc)

    return start_scores, take_scores, softmax_tile, add_values


TileState = namedtuple("TileState", "scores next_scores acc words row_max row_sum tile_max rescale position")


@functools.cache
def heads_function(config):
    """The device function that makes an item's queries, and the new token's key and value, from the exchange."""
    gqa_ratio, heads, kv_heads, head_dim = config.gqa_ratio, config.heads, config.kv_heads, config.head_dim
    qkv_words, normed = config.qkv_columns // 2, config.normed
    shape = HeadShape(head_dim, 8, 8, 4)
    vector, lanes = shape.vector, shape.lanes
    head_scale, scale_head = head_norm(shape)
    _, _, load_angles = head_access(shape)
    load_four, _ = vector_access(4, 4)
    pack_two, unpack_two = cvt_pack(config.element), cvt_unpack(config.element)
    of_head = 2 * vector

    @device_function
    def load_heads(kept, arrays, rows, qkv_at, norm_at, row, kv_head, eps, q_tile, thread):
        """kept: this thread's words of a head, rounded; returns (group, e): which head it is, and its first element.

        The first groups of lanes have the item's query heads, which go to shared memory, then come those of
        the key and of the value; the others have copies of the value.
        """
        values, weights = cuda.local.array(of_head, np.float32), cuda.local.array(of_head, np.float32)
        c, s = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        loaded = cuda.local.array(HEAD_WORDS, np.int32)
        group = udiv(thread, lanes)
        e = i32((thread - group * lanes) * vector)
        head = i32(heads + kv_heads + kv_head)
        if group < gqa_ratio:
            head = i32(kv_head * gqa_ratio + group)
        elif group == gqa_ratio:
            head = i32(heads + kv_head)
        weight_offset = i32(norm_at + (arrays.q_norm if group < gqa_ratio else arrays.k_norm))
        load_angles(arrays.cos, arrays.sin, rows.position_ids[row], e, c, s)
        if normed:
            load_four(arrays.norms, weight_offset + (e >> i32(1)), loaded, 0)
            load_four(arrays.norms, weight_offset + ((e + head_dim // 2) >> i32(1)), loaded, 4)
            for j in range(HEAD_WORDS):
                weights[2 * j], weights[2 * j + 1] = unpack_two(loaded[j])
        first = i32(qkv_at + row * qkv_words + ((head * head_dim + e) >> i32(1)))
        found = load_2(arrays.exchange, first, arrays.exchange, i32(first + head_dim // 4))
        for j in range(HEAD_WORDS):
            kept[j] = found[j]
            values[2 * j], values[2 * j + 1] = unpack_two(found[j])
        if normed:
            scale = head_scale(values, 0, eps)
            if group <= gqa_ratio:
                scale_head(values, 0, scale, weights, 0)
        if group <= gqa_ratio:
            rotate(values, 0, vector, c, s)
            for j in range(HEAD_WORDS):
                kept[j] = pack_two(values[2 * j], values[2 * j + 1])
        if group < gqa_ratio:
            store_head_line(kept, q_tile, PANEL_BYTES, group, e)
        return group, e

    @device_function
    def store_head_line(kept, boxes, box_bytes, line, e):
        """Write this thread's part of a head to its line of boxes of 64 columns each, box_bytes apart."""
        for half in range(2):
            column = i32(e + half * (head_dim // 2))
            chunk = ((column >> i32(3)) & i32(7)) ^ (line & i32(7))
            target = Address(boxes + (column >> i32(6)) * box_bytes + line * LINE + (chunk << i32(4)))
            store_words(target, kept[4 * half], kept[4 * half + 1], kept[4 * half + 2], kept[4 * half + 3])

    return load_heads, store_head_line


@functools.cache
def attend_function(config):
    """The device function by which the computing warps do this block's items of a layer."""
    gqa_ratio, kv_heads, head_dim, layout = config.gqa_ratio, config.kv_heads, config.head_dim, config.layout
    items, boxes = config.rows * kv_heads, config.kv_boxes
    columns, score_count, acc_count = COLUMNS // 4, COLUMNS // 2, boxes * COLUMNS // 2
    out_words, chunks = config.heads * head_dim // 2, head_dim // 8
    load_heads, store_head_line = heads_function(config)
    start_scores, take_scores, softmax_tile, add_values = tile_functions(head_dim, config.element)
    column_sums = column_sum_function(COLUMNS)
    stage_out, _, _ = accumulator_access(boxes, head_dim, config.element, COLUMNS)
    _, store_four = vector_access(4, 4)
    _, advance = ring(config.stages)

    @device_function
    def write_cache(kept, cache, layer, row, kv_head, rows, e):
        """The new token's key or value to its slot, unless it has none."""
        slot = i32(rows.slot_mapping[row])
        if slot >= 0:
            index = np.int64(layer * rows.kv_slots + slot) * (kv_heads * head_dim // 2)
            index += (kv_head * head_dim + e) >> i32(1)
            store_four(cache, index, kept, 0)
            store_four(cache, index + head_dim // 4, kept, 4)

    @device_function
    def write_attended(exchange, offset, row, kv_head, q_tile, context_len, thread):
        """The item's rows from shared memory to the exchange; zeros without keys."""
        index = thread
        while index < gqa_ratio * chunks:
            line = udiv(index, chunks)
            chunk = i32(index - line * chunks)
            source = Address(q_tile + (chunk >> i32(3)) * PANEL_BYTES + line * LINE)
            words = load_words(Address(source + (((chunk ^ line) & i32(7)) << i32(4))))
            target = i32(offset + row * out_words + (kv_head * gqa_ratio + line) * (head_dim // 2) + chunk * 4)
            for i in range(4):
                exchange_store(exchange, i32(target + i), words[i] if context_len > 0 else i32(0))
            index = i32(index + WARPGROUP)

    @device_function
    def begin_tile(state, kept, group, e, tile_key, context_len, q_tile, ring_at, stage, parity):
        """Begin the scores of a tile, with the new token's key in it if it is the last one."""
        k_tile = ring_at.ring + stage * STAGE_BYTES
        sm90.mbarrier_wait(ring_at.full + stage * MBARRIER_BYTES, parity)
        if i32(context_len - tile_key) <= TILE_KEYS:
            # TMA loaded what the cache held of this row before the token was there.
            if group == gqa_ratio:
                store_head_line(kept, k_tile, BOX_BYTES, i32(context_len - 1 - tile_key), e)
            fence_proxy_async()
            sm90.named_barrier_sync(STORED, WARPGROUP)
        start_scores(state, k_tile, q_tile)

    @device_function
    def attend(
        layer, arrays, rows, qkv_at, attended_at, norm_at, eps, c, base, ring_at, stage, parity
    ):  # fmt: skip
        """Returns the ring's next stage. arrays: kernel.Arrays; the words of the layer's norms begin at norm_at."""
        thread, warp, lane = ring_at.thread, ring_at.warp, ring_at.lane
        line, half_of_keys = lane & i32(7), (lane >> i32(3)) & i32(1)
        offset = Address(line * LINE + (((warp * i32(2) + half_of_keys) ^ line) << i32(4)))
        at = Lane(thread, warp, lane, i32(lane >> i32(2)), i32(i32(2) * i32(lane & i32(3))), offset)
        state = TileState(
            cuda.local.array(score_count, np.float32), cuda.local.array(score_count, np.float32),
            cuda.local.array(acc_count, np.float32), cuda.local.array(columns, np.int32),
            cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32),
            cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32),
            cuda.local.array(columns, np.int32),
        )  # fmt: skip
        kept = cuda.local.array(HEAD_WORDS, np.int32)
        q_tile, p = Address(base + layout.q), Address(base + layout.p)
        item = i32(cuda.blockIdx.x)
        while item < items:
            row = udiv(item, kv_heads)
            kv_head, context_len = i32(item - row * kv_heads), i32(rows.context_lens[row])
            group, e = load_heads(kept, arrays, rows, qkv_at, norm_at, row, kv_head, eps, q_tile, thread)
            fence_proxy_async()
            sm90.named_barrier_sync(EXCHANGED, WARPGROUP)
            for i in range(columns):
                state.row_max[i], state.row_sum[i] = softmax.MINUS_INFINITY, f32(0.0)
                state.position[i] = i32(context_len - 1)
            for i in range(score_count):
                state.next_scores[i] = f32(0.0)
            for i in range(acc_count):
                state.acc[i] = f32(0.0)
            if context_len > 0:
                begin_tile(state, kept, group, e, i32(0), context_len, q_tile, ring_at, stage, parity)
            tile_key = i32(0)
            while tile_key < context_len:
                take_scores(state)
                if thread == 0:
                    sm90.mbarrier_arrive(ring_at.empty + stage * MBARRIER_BYTES)
                v_stage, v_parity = advance(stage, parity)
                stage, parity = advance(v_stage, v_parity)
                next_key = i32(tile_key + TILE_KEYS)
                if next_key < context_len:
                    # These scores are computed while this tile's become probabilities.
                    begin_tile(state, kept, group, e, next_key, context_len, q_tile, ring_at, stage, parity)
                row_max_memory = Address(base + layout.row_max + ((tile_key >> i32(6)) & i32(1)) * (4 * COLUMNS * 4))
                softmax_tile(state, p, row_max_memory, tile_key, context_len, c, at)
                v_tile = ring_at.ring + v_stage * STAGE_BYTES
                sm90.mbarrier_wait(ring_at.full + v_stage * MBARRIER_BYTES, v_parity)
                if next_key >= context_len and group == gqa_ratio + 1:
                    store_head_line(kept, v_tile, BOX_BYTES, i32(context_len - 1 - tile_key), e)
                add_values(state, v_tile, p, tile_key, context_len, at)
                if thread == 0:
                    sm90.mbarrier_arrive(ring_at.empty + v_stage * MBARRIER_BYTES)
                tile_key = next_key
            column_sums(state.row_sum, Address(base + layout.row_sum), warp, at.group_lane, at.pair)
            for i in range(columns):
                state.rescale[i] = f32(1.0) / state.row_sum[i] if context_len > 0 else f32(0.0)
            stage_out(state.acc, state.rescale, q_tile, offset)
            sm90.named_barrier_sync(EXCHANGED, WARPGROUP)
            write_attended(arrays.exchange, attended_at, row, kv_head, q_tile, context_len, thread)
            # Nothing in this step reads the new token from the cache.
            if group == gqa_ratio and context_len > 0:
                write_cache(kept, arrays.k_cache, layer, row, kv_head, rows, e)
            elif group == gqa_ratio + 1 and context_len > 0:
                write_cache(kept, arrays.v_cache, layer, row, kv_head, rows, e)
            item = i32(item + cuda.gridDim.x)
            # The next item's queries take the place of this one's output.
            sm90.named_barrier_sync(STORED, WARPGROUP)
        return stage, parity

    return attend
