"""The first warpgroup of the gated delta rule on tensor cores: tiles, log decays, M and P; its constants, work items.

tensor_forward.py has the kernel. What is made here does not need the state, so it is ready before the other warpgroup
reads it: on Hopper it is made while that one computes the block before, and tiles are copied a block earlier still.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LOG2_E, SUB_BLOCK
from rlnumba.kernels.delta_rule.simt import decay_between
from rlnumba.kernels.delta_rule.tensor_products import DIAGONAL_STRIDE, pack_operands, products_of
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import (
    BOX_BYTES,
    LINE,
    Address,
    fence_proxy_async,
    load_four,
    load_pair,
    store_four,
    store_pair,
    store_word,
    store_words,
)
from rlnumba.kernels.ptx.sm80 import cp_async_4, cp_async_16, cp_async_commit_group, cp_async_wait_group
from rlnumba.kernels.ptx.sm90 import named_barrier_sync
from rlnumba.kernels.ptx.warp import device_function, exp2, udiv
from rlnumba.kernels.tile.pipeline import shared_layout
from rlnumba.runtime.device import cuda

i32, i64, f32 = np.int32, np.int64, np.float32

# Columns of V of a grid's block; threads of a warpgroup.
COLUMNS, WARPGROUP = 64, 128
# Named barriers: of both warpgroups, and of the one that prepares.
HANDOVER, PREPARING = 1, 2
DIAGONAL_BYTES = BLOCK * DIAGONAL_STRIDE * 4


class TensorConfig(NamedTuple):
    """Constants of the kernel: family of products, dimension of keys, dtype name of v; whether the state is in the
    cache; whether tensor_deferred.py has the second warpgroup; whether packed sequences have prefixes."""

    family: str
    key_dim: int
    element: str
    is_paged: bool
    is_deferred: bool = False
    has_prefixes: bool = False

    @property
    def is_sm90(self):
        return self.family == "sm90"

    @property
    def tiles(self):
        """Stages of tiles: other GPUs than Hopper may have 99 KB of shared memory, for one, and no overlap."""
        return 3 if self.is_sm90 else 1

    @property
    def prepared(self):
        """Stages of what is prepared."""
        return 2 if self.is_sm90 else 1

    @property
    def output_weights(self):
        """Stages of P: tensor_deferred.py reads a block's while the block after the next one is prepared."""
        return 3 if self.is_deferred else self.prepared

    @property
    def layout(self):
        """Shared memory: tiles and vectors of each stage of tiles, then what is prepared."""
        keys, vector, tiles, prepared = self.key_dim // 64 * BOX_BYTES, BLOCK * 4, self.tiles, self.prepared
        return shared_layout(
            k=tiles * keys, q=tiles * keys, v=tiles * BOX_BYTES,
            m=prepared * BOX_BYTES, p=self.output_weights * BOX_BYTES, out=BOX_BYTES if self.is_sm90 else 0,
            diagonal=prepared * DIAGONAL_BYTES, kept=prepared * vector, later=prepared * vector,
            decays=tiles * vector, beta=tiles * vector, sums=vector,
        )  # fmt: skip


class DeltaItem(NamedTuple):
    """The columns, tokens and state of a grid's block.

    A row of a block of tokens is a row of q, k, v and out if it is not before `begin`, and in the slot if it is;
    `first` is the row that the first block's first token has, or would have.
    """

    begin: object
    end: object
    first: object
    block: object
    blocks: object
    filled: object
    slot: object
    page: object
    sequence: object
    head: object
    key_head: object
    column: object


@functools.cache
def load_function(config):
    """The device function that starts the copies of a block's tiles."""
    layout, key_dim, is_paged = config.layout, config.key_dim, config.is_paged
    chunks, tile_bytes, vector = key_dim // 8, key_dim // 64 * BOX_BYTES, BLOCK * 4
    key_copies, value_copies = BLOCK * chunks // WARPGROUP, BLOCK * 8 // WARPGROUP

    @device_function
    def load_tiles(tokens, cache, base, item, index, stage, thread):
        """Those of the item's block number `index`; rows behind the sequence's last are zeros."""
        first = i32(item.first + index * i32(BLOCK))
        key_heads, heads, value_dim = i64(tokens.k.shape[1]), i64(tokens.v.shape[1]), i64(tokens.v.shape[2])
        k, q, v = address_of(tokens.k), address_of(tokens.q), address_of(tokens.v)
        for i in range(key_copies):
            number = i32(thread + i32(i * WARPGROUP))
            line, chunk = i32(number // i32(chunks)), i32(number % i32(chunks))
            row = i32(first + line)
            offset = (i64(row) * key_heads + item.key_head) * (2 * key_dim) + chunk * 16
            valid, source = i32(16) if row < item.end else i32(0), k + offset
            valid_query = valid
            if is_paged and row < item.begin:
                slot_row = i64(item.slot) * BLOCK + line
                source = address_of(cache.key_rows)
                source += (slot_row * key_heads + item.key_head) * (2 * key_dim) + chunk * 16
                valid_query = i32(0)
            place = i32(stage * i32(tile_bytes) + (chunk >> i32(3)) * i32(BOX_BYTES) + line * i32(LINE))
            place = i32(place + ((chunk ^ line) & i32(7)) * i32(16))
            cp_async_16(Address(base + layout.k + place), source, valid)
            cp_async_16(Address(base + layout.q + place), q + offset, valid_query)
        for i in range(value_copies):
            number = i32(thread + i32(i * WARPGROUP))
            line, chunk = i32(number >> i32(3)), i32(number & i32(7))
            row = i32(first + line)
            offset = (i64(row) * heads + item.head) * value_dim + item.column + chunk * 8
            valid, source = i32(16) if row < item.end else i32(0), v + offset * 2
            if is_paged and row < item.begin:
                slot_row = i64(item.slot) * BLOCK + line
                offset = (slot_row * heads + item.head) * value_dim + item.column + chunk * 8
                source = address_of(cache.value_rows) + offset * 2
            place = i32(stage * i32(BOX_BYTES) + line * i32(LINE) + ((chunk ^ line) & i32(7)) * i32(16))
            cp_async_16(Address(base + layout.v + place), source, valid)
        line = i32(thread & i32(BLOCK - 1))
        row = i32(first + line)
        valid = i32(4) if row < item.end else i32(0)
        offset = (i64(row) * heads + item.head) * 4
        place = i32(stage * i32(vector) + line * i32(4))
        if thread < BLOCK:
            source = address_of(tokens.log_decay) + offset
            if is_paged and row < item.begin:
                slot_row = i64(item.slot) * BLOCK + line
                source = address_of(cache.decay_sums) + (slot_row * heads + item.head) * 4
            cp_async_4(Address(base + layout.decays + place), source, valid)
        else:
            if is_paged and row < item.begin:
                valid = i32(0)
            cp_async_4(Address(base + layout.beta + place), address_of(tokens.beta) + offset, valid)

    return load_tiles


@functools.cache
def packed_load_function(config):
    """load_function for packed sequences, in fewer instructions: a thread's copies lie one constant apart."""
    layout, key_dim = config.layout, config.key_dim
    chunks, tile_bytes, vector = key_dim // 8, key_dim // 64 * BOX_BYTES, BLOCK * 4
    shift = chunks.bit_length() - 1
    # Lines between two copies of a thread: multiples of 8, so that all have one place in their swizzled lines.
    key_lines, value_lines = WARPGROUP // chunks, WARPGROUP // 8

    @device_function
    def load_tiles(tokens, cache, base, item, index, stage, thread):
        """Tiles and vectors of the item's block number `index`; rows behind the sequence's last are zeros."""
        first = i32(item.first + index * i32(BLOCK))
        key_heads, heads, value_dim = i64(tokens.k.shape[1]), i64(tokens.v.shape[1]), i64(tokens.v.shape[2])
        line, chunk = i32(thread >> i32(shift)), i32(thread & i32(chunks - 1))
        row, step = i32(first + line), key_heads * i64(2 * key_dim * key_lines)
        offset = (i64(row) * key_heads + item.key_head) * (2 * key_dim) + chunk * 16
        k, q = address_of(tokens.k) + offset, address_of(tokens.q) + offset
        place = i32(stage * i32(tile_bytes) + (chunk >> i32(3)) * i32(BOX_BYTES) + line * i32(LINE))
        place = i32(place + ((chunk ^ line) & i32(7)) * i32(16))
        to_k, to_q = Address(base + layout.k + place), Address(base + layout.q + place)
        for i in range(BLOCK // key_lines):
            valid = i32(16) if i32(row + i32(i * key_lines)) < item.end else i32(0)
            cp_async_16(Address(to_k + i * key_lines * LINE), k, valid)
            cp_async_16(Address(to_q + i * key_lines * LINE), q, valid)
            k, q = k + step, q + step
        line, chunk = i32(thread >> i32(3)), i32(thread & i32(7))
        row, step = i32(first + line), heads * value_dim * (2 * value_lines)
        v = address_of(tokens.v) + ((i64(row) * heads + item.head) * value_dim + item.column + chunk * 8) * 2
        place = i32(stage * i32(BOX_BYTES) + line * i32(LINE) + ((chunk ^ line) & i32(7)) * i32(16))
        to_v = Address(base + layout.v + place)
        for i in range(BLOCK // value_lines):
            valid = i32(16) if i32(row + i32(i * value_lines)) < item.end else i32(0)
            cp_async_16(Address(to_v + i * value_lines * LINE), v, valid)
            v = v + step
        line = i32(thread & i32(BLOCK - 1))
        row = i32(first + line)
        valid, offset = i32(4) if row < item.end else i32(0), (i64(row) * heads + item.head) * 4
        place = i32(stage * i32(vector) + line * i32(4))
        if thread < BLOCK:
            cp_async_4(Address(base + layout.decays + place), address_of(tokens.log_decay) + offset, valid)
        else:
            cp_async_4(Address(base + layout.beta + place), address_of(tokens.beta) + offset, valid)

    return load_tiles


@device_function
def place_of(row, block, pair):
    """The place in a tile of two numbers of a row."""
    return i32(row * i32(LINE) + ((i32(block) ^ row) & i32(7)) * i32(16) + pair * i32(4))


@functools.cache
def triangle_function():
    """The device function that stores what store_weights of prepare_function does, but for blocks of zeros."""

    @device_function
    def load_sum(sums, line):
        """The sum of a line's token."""
        even, odd = load_pair(Address(sums + (line & i32(-2)) * i32(4)))
        return odd if line & i32(1) else even

    @device_function
    def store_weights(of_keys, of_queries, sums, m_tile, p_tile, diagonal, warp, lane):
        """A warp has the tokens of a sub-block: blocks behind it stay zeros, and only its own needs a mask."""
        line, pair = i32(warp * i32(16) + (lane >> i32(2))), i32(lane & i32(3))
        first, second = load_sum(sums, line), load_sum(sums, i32(line + i32(8)))
        for sub_block in range(BLOCK // SUB_BLOCK):
            if i32(sub_block) < warp:
                for block in range(2 * sub_block, 2 * sub_block + 2):
                    even, odd = load_pair(Address(sums + (i32(block * 8) + pair * i32(2)) * i32(4)))
                    for half in range(2):
                        index, of_row = block * 4 + half * 2, second if half else first
                        place = place_of(i32(line + half * 8), block, pair)
                        decay, next_decay = exp2((of_row - even) * LOG2_E), exp2((of_row - odd) * LOG2_E)
                        m, next_m = -(of_keys[index] * decay), -(of_keys[index + 1] * next_decay)
                        p, next_p = of_queries[index] * decay, of_queries[index + 1] * next_decay
                        store_word(Address(m_tile + place), pack_operands(m, next_m))
                        store_word(Address(p_tile + place), pack_operands(p, next_p))
            elif i32(sub_block) == warp:
                for block in range(2 * sub_block, 2 * sub_block + 2):
                    even, odd = load_pair(Address(sums + (i32(block * 8) + pair * i32(2)) * i32(4)))
                    for half in range(2):
                        row, index, of_row = i32(line + half * 8), block * 4 + half * 2, second if half else first
                        for i in range(2):
                            column = i32(i32(block * 8 + i) + pair * i32(2))
                            # The difference to a later token is positive, and its exponential may be inf: no product.
                            difference = of_row - (odd if i else even) if column <= row else f32(0.0)
                            decay = exp2(difference * LOG2_E)
                            m, p = of_keys[index + i] * decay, of_queries[index + i] * decay
                            of_keys[index + i] = -m if column < row else f32(0.0)
                            of_queries[index + i] = p if column <= row else f32(0.0)
                        place = place_of(row, block, pair)
                        store_word(Address(m_tile + place), pack_operands(of_keys[index], of_keys[index + 1]))
                        store_word(Address(p_tile + place), pack_operands(of_queries[index], of_queries[index + 1]))
                        place = i32((row * i32(DIAGONAL_STRIDE) + i32(block % 2 * 8) + pair * i32(2)) * i32(4))
                        store_pair(Address(diagonal + place), of_keys[index], of_keys[index + 1])

    return store_weights


@device_function
def stage_of(index, stages):
    """The stage of a block: remainders of what is not negative need no 64 bits."""
    return i32(index - udiv(index, i32(stages)) * i32(stages))


@functools.cache
def prepare_function(config):
    """The device function of the first warpgroup."""
    layout, is_paged, is_sm90, tiles, prepared = (
        config.layout, config.is_paged, config.is_sm90, config.tiles, config.prepared,
    )  # fmt: skip
    tile_bytes, vector, output_weights = config.key_dim // 64 * BOX_BYTES, BLOCK * 4, config.output_weights
    is_deferred = config.is_deferred
    load_tiles = packed_load_function(config) if is_deferred else load_function(config)
    products = products_of(config.family, config.key_dim)
    # The tiles of the block after this one may still be under way.
    wait_copies = cp_async_wait_group(1 if is_sm90 else 0)
    scores, wait_scores = products.scores, products.wait_scores

    @device_function
    def add_decays(decays, sums, filled):
        """One thread: the sums of a block's log decays, of which the first `filled` are sums already."""
        values, total = cuda.local.array(BLOCK, np.float32), f32(0.0)
        for i in range(BLOCK // 4):
            values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3] = load_four(Address(decays + 16 * i))
        for j in range(BLOCK):
            total = values[j] if is_paged and j < filled else total + values[j]
            values[j] = total
        for i in range(BLOCK // 4):
            store_four(Address(sums + 16 * i), values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3])

    @device_function
    def store_weights(of_keys, of_queries, sums, m_tile, p_tile, diagonal, warp, lane):
        """-M and P of products, as operands, and -M of the sub-blocks on the diagonal in float32."""
        line, pair = i32(warp * i32(16) + (lane >> i32(2))), i32(lane & i32(3))
        even, odd = load_pair(Address(sums + (line & i32(-2)) * i32(4)))
        first = odd if line & i32(1) else even
        even, odd = load_pair(Address(sums + ((line & i32(-2)) + i32(8)) * i32(4)))
        second = odd if line & i32(1) else even
        for block in range(BLOCK // 8):
            even, odd = load_pair(Address(sums + (i32(block * 8) + pair * i32(2)) * i32(4)))
            for half in range(2):
                row = i32(line + half * 8)
                of_row = second if half else first
                for i in range(2):
                    column, index = i32(i32(block * 8 + i) + pair * i32(2)), block * 4 + half * 2 + i
                    # The difference to a later token is positive, and its exponential may be inf: no product.
                    difference = of_row - (odd if i else even) if column <= row else f32(0.0)
                    decay = exp2(difference * LOG2_E)
                    m, p = of_keys[index] * decay, of_queries[index] * decay
                    of_keys[index] = -m if column < row else f32(0.0)
                    of_queries[index] = p if column <= row else f32(0.0)
                index = block * 4 + half * 2
                place = place_of(row, block, pair)
                store_word(Address(m_tile + place), pack_operands(of_keys[index], of_keys[index + 1]))
                store_word(Address(p_tile + place), pack_operands(of_queries[index], of_queries[index + 1]))
                if i32(block // 2) == warp:
                    place = i32((row * i32(DIAGONAL_STRIDE) + i32(block % 2 * 8) + pair * i32(2)) * i32(4))
                    store_pair(Address(diagonal + place), of_keys[index], of_keys[index + 1])

    if is_deferred:
        store_weights = triangle_function()

    @device_function
    def clear_weights(base, thread):
        """Zeros in all stages of M and P, of which store_weights does not write those behind a warp's tokens."""
        for i in range((prepared + output_weights) * BOX_BYTES // (16 * WARPGROUP)):
            place = Address(base + layout.m + i * 16 * WARPGROUP + thread * i32(16))
            store_words(place, i32(0), i32(0), i32(0), i32(0))

    @device_function
    def prepare_block(base, item, index, thread):
        """M, P and decays of the item's block number `index`, whose copies have been started."""
        warp, lane = i32(thread >> i32(5)), i32(thread & i32(31))
        if is_deferred:
            stage, to = stage_of(index, tiles), stage_of(index, prepared)
        else:
            stage, to = i32(index % i32(tiles)), i32(index % i32(prepared))
        k_tile = Address(base + layout.k + stage * i32(tile_bytes))
        of_keys, of_queries = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
        wait_copies()
        if is_sm90:
            fence_proxy_async()
        named_barrier_sync(PREPARING, WARPGROUP)
        scores(of_keys, k_tile, k_tile, warp, lane)
        scores(of_queries, Address(base + layout.q + stage * i32(tile_bytes)), k_tile, warp, lane)
        sums = Address(base + layout.sums)
        if thread == 0:
            filled = item.filled if index == 0 else i32(0)
            add_decays(Address(base + layout.decays + stage * i32(vector)), sums, filled)
        named_barrier_sync(PREPARING, WARPGROUP)
        if thread < BLOCK // 4:
            place = i32(thread * i32(16))
            _, _, _, last = load_four(Address(sums + i32(vector - 16)))
            a, b, c, d = load_four(Address(sums + place))
            kept, later = Address(base + layout.kept + to * i32(vector)), base + layout.later + to * i32(vector)
            zero = f32(0.0)
            store_four(
                Address(kept + place),
                decay_between(a, zero), decay_between(b, zero), decay_between(c, zero), decay_between(d, zero),
            )  # fmt: skip
            store_four(
                Address(later + place),
                decay_between(last, a), decay_between(last, b), decay_between(last, c), decay_between(last, d),
            )  # fmt: skip
        wait_scores(of_keys)
        wait_scores(of_queries)
        p_stage = to
        if output_weights != prepared:
            p_stage = stage_of(index, output_weights)
        m_tile, p_tile = base + layout.m + to * i32(BOX_BYTES), base + layout.p + p_stage * i32(BOX_BYTES)
        diagonal = Address(base + layout.diagonal + to * i32(DIAGONAL_BYTES))
        store_weights(of_keys, of_queries, sums, Address(m_tile), Address(p_tile), diagonal, warp, lane)
        if is_sm90:
            fence_proxy_async()

    @device_function
    def prepare_between(tokens, cache, base, item, thread):
        """All blocks of an item, each after the other warpgroup has read the one before it."""
        index = i32(0)
        while index < item.blocks:
            load_tiles(tokens, cache, base, item, index, i32(0), thread)
            cp_async_commit_group()
            prepare_block(base, item, index, thread)
            named_barrier_sync(HANDOVER, 2 * WARPGROUP)
            named_barrier_sync(HANDOVER, 2 * WARPGROUP)
            index = i32(index + i32(1))

    @device_function
    def prepare_ahead(tokens, cache, base, item, thread):
        """All blocks of an item, while the other warpgroup computes the one before."""
        if is_deferred:
            clear_weights(base, thread)
        for index in range(2):
            if index < item.blocks:
                load_tiles(tokens, cache, base, item, i32(index), i32(index), thread)
            cp_async_commit_group()
        prepare_block(base, item, i32(0), thread)
        index = i32(0)
        while index < item.blocks:
            named_barrier_sync(HANDOVER, 2 * WARPGROUP)
            index = i32(index + i32(1))
            if index < item.blocks:
                # The other warpgroup has read the block before the last: its stages are free.
                following = i32(index + i32(1))
                if following < item.blocks:
                    if is_deferred:
                        load_tiles(tokens, cache, base, item, following, stage_of(following, tiles), thread)
                    else:
                        load_tiles(tokens, cache, base, item, following, i32(following % i32(tiles)), thread)
                cp_async_commit_group()
                prepare_block(base, item, index, thread)

    return prepare_ahead if is_sm90 else prepare_between
