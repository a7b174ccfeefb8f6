"""The warp of decode attention that makes q, k and v of the new tokens from the rows of their projection.

Where a sequence has one query token, warp 3 of warpgroup 1 reads the rows of qkv, for an item while the warps beside it
compute and load others:

    its query heads      normalised, rotated and rounded: to shared memory, where TMA would have put them
    the new token's key  likewise, and its value as it is, where the item ends with the sequence's last key: to their
                         slot in the cache and to shared memory

In the tile of K and V that holds the new token's row, the computing warps replace that row: TMA reads the tile while
the row is being written.
"""

import functools

import numpy as np

from rlnumba.kernels.attention import scheduler
from rlnumba.kernels.attention.sm90_decode.config import KEY_HEAD, NEW_TOKEN, Q_SLOTS
from rlnumba.kernels.attention.sm90_decode.consumer import token_of_row
from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.nn.qkv import head_norm
from rlnumba.kernels.nn.rope import head_access, rotate
from rlnumba.kernels.ptx.shared_memory import LINE, Address, fence_proxy_async, store_function, store_words
from rlnumba.kernels.ptx.sm90 import mbarrier_arrive, mbarrier_wait
from rlnumba.kernels.ptx.warp import compiler_barrier, cvt_pack, device_function, griddepcontrol_wait, udiv
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring, swizzled_chunk
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# Heads that a group of lanes has under way, where registers allow. An item of four query heads of 128 has six heads, a
# warp four groups: one at a time, they would wait for memory twice.
HEADS_AT_ONCE = 2


@functools.cache
def line_store(shape, element):
    """The device function that writes a lane's part of a head to lines of 64 columns in shared memory."""
    width, vector, half, bounded = shape.width, shape.vector, shape.half, shape.bounded
    # Columns stored at once: as many as each half of a head begins at a multiple of.
    at_once = 8 if half % 8 == 0 else 4
    pack_two, store_two = cvt_pack(element), store_function("rr")

    @device_function
    def address_of(column, target, stride, line):
        line_address = Address(target + (column >> i32(6)) * stride + line * LINE)
        return Address(swizzled_chunk(line_address, line, (column >> i32(3)) & i32(7)) + (column & i32(7)) * 2)

    @device_function
    def store_lines(values, at, e, target, stride, line):
        """Round values[at : at + 2 * vector], of the lane of element e, to the line-th line of each box.

        target, stride: of the first box of so many lines, and bytes from one to the next.
        """
        for part in range(2):
            for offset in range(0, vector, at_once):
                i = at + part * vector + offset
                if not bounded or e + offset < half:
                    address = address_of(i32(part * half + offset + e), target, stride, line)
                    first, second = pack_two(values[i], values[i + 1]), pack_two(values[i + 2], values[i + 3])
                    if at_once == 8:
                        third = pack_two(values[i + 4], values[i + 5])
                        store_words(address, first, second, third, pack_two(values[i + 6], values[i + 7]))
                    else:
                        store_two(address, first, second)
        if width % 16 > 0 and e == 0:
            # The scores' last step reads 16 columns.
            store_words(address_of(i32(width), target, stride, line), i32(0), i32(0), i32(0), i32(0))

    return store_lines


@functools.cache
def item_preparation(config, shape, normed):
    """The device function by which a warp makes the queries of an item, and the new token's key and value.

    config: a DecodeConfig with fused_qkv; shape: the HeadShape of all arrays of heads; normed: whether there are norm
    weights. A group of lanes owns a head at a time, in the arithmetic of qkv_split.
    """
    rows, boxes, grouped = config.rows, config.boxes, config.grouped
    vector, lanes, groups = shape.vector, shape.lanes, shape.groups
    of_head, at_once = 2 * vector, HEADS_AT_ONCE if rows == 8 and not grouped else 1
    count = at_once * of_head
    (load_head, store_head, load_angles), (head_scale, scale_head) = head_access(shape), head_norm(shape)
    store_lines = line_store(shape, config.element)

    @device_function
    def place_of(index, queries, start, kv_head, batch, reciprocal):
        """(token, head in its row of qkv) of an item's head `index`: queries, then the new key and value."""
        token, head = start, i32(batch.heads + kv_head)
        if index > queries:
            head = i32(head + batch.kv_heads)
        elif index < queries:
            member = token_of_row(index, reciprocal) if grouped else i32(0)
            token, head = i32(start + member), i32((kv_head - member) * batch.gqa_ratio + index)
        return token, head

    @device_function
    def store_prepared(source, index, queries, cache_head, values, at, e, target):
        """A head to its line of the queries; the new key and value to their own lines and to the cache."""
        if index < queries:
            store_lines(values, at, e, target, i32(rows * LINE), index)
        else:
            lines = i32(boxes * rows)
            if index == queries:
                store_head(source.k_cache, cache_head, e, values, at)
            else:
                store_head(source.v_cache, cache_head, e, values, at)
                lines = i32(lines + boxes)
            store_lines(values, at, e, Address(target + lines * LINE), i32(LINE), i32(0))

    @device_function
    def prepare_item(source, batch, start, kv_head, queries, cache_row, reciprocal, target, lane):
        """Write `queries` query heads of a key head, those of the sequences from `start` on, to shared memory.

        source: a Projection. target: of the item in shared memory, where lines lie as TMA would write them. cache_row:
        if not negative, the new token's row in the cache: its key and value are written there, and to shared memory
        behind the queries (NEW_TOKEN_BYTES). reciprocal: of token_of_row. All but qkv is read before the first item's
        griddepcontrol.wait, which has no effect later.
        """
        e, group = lane % i32(lanes) * i32(vector), lane // i32(lanes)
        values, weights = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        c, s = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        heads = i32(queries + 2) if cache_row >= 0 else queries
        all_heads, cache_head = i32(batch.heads + 2 * batch.kv_heads), i32(cache_row * batch.kv_heads + kv_head)
        if not grouped:
            load_angles(source.cos, source.sin, source.position_ids[np.uint64(start)], e, c, s)
        for first in range(0, heads, groups * at_once):
            for i in range(at_once):
                # A group without a head computes the last one again and discards it.
                index = i32(min(i32(first + i * groups + group), i32(heads - 1)))
                if grouped:
                    token, _ = place_of(index, queries, start, kv_head, batch, reciprocal)
                    load_angles(source.cos, source.sin, source.position_ids[np.uint64(token)], e, c, s)
                if normed and index == queries:
                    load_head(source.k_weight, 0, e, weights, i * of_head)
                elif normed:
                    load_head(source.q_weight, 0, e, weights, i * of_head)
            compiler_barrier()
            griddepcontrol_wait()
            for i in range(at_once):
                index = i32(min(i32(first + i * groups + group), i32(heads - 1)))
                token, head = place_of(index, queries, start, kv_head, batch, reciprocal)
                load_head(source.qkv, i32(token * all_heads + head), e, values, i * of_head)
            for i in range(at_once):
                if i32(first + i * groups) < heads:
                    index = i32(first + i * groups + group)
                    scale = head_scale(values, i * of_head, source.eps) if normed else f32(1.0)
                    if index <= queries:
                        if normed:
                            scale_head(values, i * of_head, scale, weights, i * of_head)
                        rotate(values, i * of_head, vector, c, s)
                    if index < heads:
                        store_prepared(source, index, queries, cache_head, values, i * of_head, e, target)

    return prepare_item


@functools.cache
def preparer_function(config, shape, normed):
    """The device function of the warp that prepares items for the computing warps."""
    layout, q_bytes, (_, next_slot) = config.layout, config.q_bytes, ring(Q_SLOTS)
    prepare_item = item_preparation(config, shape, normed)

    @device_function
    def prepare(source, batch, items, base, lane):
        """Prepare items as warp 0 publishes them, until there are none, and pass them on."""
        item_full, q_full = Address(base + layout.item_full), Address(base + layout.q_full)
        reciprocal = udiv(i32(65535) + batch.gqa_ratio, batch.gqa_ratio)
        slot, parity, working = i32(0), i32(0), True
        while working:
            mbarrier_wait(Address(item_full + slot * MBARRIER_BYTES), parity)
            tiles, first_key = items[slot, scheduler.TILES], items[slot, scheduler.FIRST_KEY]
            start, group_size = items[slot, scheduler.START], items[slot, scheduler.GROUP_SIZE]
            working, cache_row = tiles >= 0, i32(-1)
            if tiles > 0:
                # A group's item never ends with the last key: its prefix is shorter than each context.
                if i32(first_key + tiles * TILE_KEYS) >= items[slot, scheduler.CONTEXT_LEN]:
                    cache_row = source.slot_mapping[np.uint64(start)]
                queries = i32(max(group_size, i32(1)) * batch.gqa_ratio)
                target = Address(base + layout.q + slot * q_bytes)
                prepare_item(
                    source, batch, start, items[slot, KEY_HEAD], queries, cache_row, reciprocal, target, lane
                )  # fmt: skip
                if lane == 0:
                    items[slot, NEW_TOKEN] = i32(cache_row >= 0)
            fence_proxy_async()
            mbarrier_arrive(Address(q_full + slot * MBARRIER_BYTES))
            slot, parity = next_slot(slot, parity)

    return prepare
