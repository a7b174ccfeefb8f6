"""The gated delta rule on tensor cores, many tokens of a sequence at a time: training and prefill, sm90 and sm80.

arithmetic.py has the equations. A grid's block computes COLUMNS columns of V of one value head of one sequence, one
block of 64 tokens after the other, and consists of two warpgroups. What does not need the state is prepared by the
first one, a block ahead: it copies tiles of q, k and v two blocks ahead, adds up the log decays, and makes M and P. The
second one has S^T in registers, columns times K, and goes along the chain that a sequence is:

    x, y = S^T k, S^T q         all 64 tokens at once
    for each 16 tokens: r = v - E x - M w over the sub-blocks before, then the substitution, whose rows w are operands
    o = E y + P w               begins with the fold, and ends while that runs
    S = E_last S + (F w) k      rounded to two planes, of which the high one is the next block's operand

In the substitution a thread has the rows of two columns at four tokens. Two neighbouring tokens belong to one of four
lanes; it computes both, and the others get them by a shuffle, a word with both columns for each token.

A sequence that begins within a block, over the cache, has the rows of the earlier tokens in the tiles: k from the slot,
and w where v would be. One with a prefix begins with its parent's state: a parent folds its last block, too, and
writes the state as a page.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    LOW_SCALE,
    SUB_BLOCK,
    VALUE_SCALE,
    has_children,
    level_of,
)
from rlnumba.kernels.delta_rule.simt import state_blocks
from rlnumba.kernels.delta_rule.tensor_deferred import item_function
from rlnumba.kernels.delta_rule.tensor_prepare import (
    COLUMNS,
    DIAGONAL_BYTES,
    HANDOVER,
    WARPGROUP,
    DeltaItem,
    prepare_function,
    stage_of,
)
from rlnumba.kernels.delta_rule.tensor_products import (
    load_own_weights,
    opaque,
    pack_operands,
    pair_steps,
    products_of,
    scale_outputs,
    scale_rows,
    start_rows_function,
    unpack,
)
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import (
    BOX_BYTES,
    LINE,
    Address,
    load_pair,
    stmatrix_x2_trans,
)
from rlnumba.kernels.ptx.sm80 import copy_to_global
from rlnumba.kernels.ptx.sm90 import named_barrier_sync, warp_uniform
from rlnumba.kernels.ptx.warp import device_function, narrow, shuffle, sync_warp, widen
from rlnumba.kernels.tile.pipeline import shared_base, swizzled_chunk
from rlnumba.runtime.device import cuda

i32, i64, f32 = np.int32, np.int64, np.float32


@device_function
def low_halves(a, b):
    """The lower halves of two words as one."""
    return i32((a & i32(0xFFFF)) | (b << i32(16)))


@device_function
def high_halves(a, b):
    """The upper halves of two words as one."""
    return i32(((a >> i32(16)) & i32(0xFFFF)) | (b & i32(-65536)))


class BlockPlaces(NamedTuple):
    """Addresses of a block's tiles and vectors in shared memory."""

    k: object
    q: object
    v: object
    m: object
    p: object
    diagonal: object
    kept: object
    later: object
    beta: object


class Registers(NamedTuple):
    """A thread's local arrays: S^T, its words, x, y, r of a sub-block, the words of w and of F w, w of a sub-block by
    token."""

    state: object
    words: object
    x: object
    y: object
    r: object
    w: object
    later_w: object
    own: object


@functools.cache
def pair_function(is_paged, p):
    """The device function of the substitution for tokens 2 p and 2 p + 1 of a sub-block."""
    half, (load_weights, add_pair) = p // 4, pair_steps(p)

    @device_function
    def solve_pair(registers, rows, values, weights, beta, beside, cached, lane):
        """rows: the address of -M in the row of the lane's first token; weights: of the lane's tokens and four others.

        cached: tokens from the lane's first on that have their rows in `values`.
        """
        r, own, pair = registers.r, registers.own, i32(lane & i32(3))
        load_weights(weights, rows)
        even = pack_operands(beta[half * 2] * r[half * 4], beta[half * 2] * r[half * 4 + 2])
        if is_paged:
            even = low_halves(values[half * 2], values[half * 2 + 1]) if cached > half * 8 else even
        left, right = unpack(even)
        second_left = cuda.fma(beside[half], left, r[half * 4 + 1])
        second_right = cuda.fma(beside[half], right, r[half * 4 + 3])
        odd = pack_operands(beta[half * 2 + 1] * second_left, beta[half * 2 + 1] * second_right)
        if is_paged:
            odd = high_halves(values[half * 2], values[half * 2 + 1]) if cached > half * 8 + 1 else odd
        if pair == i32(p % 4):
            own[half * 2], own[half * 2 + 1] = even, odd
        source = i32((lane & i32(28)) | i32(p % 4))
        left, right = unpack(shuffle(even, source))
        next_left, next_right = unpack(shuffle(odd, source))
        add_pair(r, weights, left, right, next_left, next_right)

    return solve_pair


@functools.cache
def solve_function(config, b):
    """The device function that computes the rows w of sub-block b."""
    products, start_rows = products_of(config.family, config.key_dim), start_rows_function(config.element, b)
    earlier_rows, wait_rows, first = products.earlier_rows[b], products.wait_rows, b * SUB_BLOCK
    pair_0, pair_1, pair_2, pair_3, pair_4, pair_5, pair_6, pair_7 = (
        pair_function(config.is_paged, p) for p in range(SUB_BLOCK // 2)
    )

    @device_function
    def solve(registers, places, filled, warp, lane):
        """filled: tokens of the block whose rows w lie where v would."""
        r, w, own, pair = registers.r, registers.w, registers.own, i32(lane & i32(3))
        values, weights = cuda.local.array(4, np.int32), cuda.local.array(16, np.float32)
        beta, beside = cuda.local.array(4, np.float32), cuda.local.array(2, np.float32)
        start_rows(r, registers.x, values, places, warp, lane)
        if b:
            earlier_rows(r, w, places.m, warp, lane)
        token = i32(i32(first) + pair * i32(2))
        rows = load_own_weights(beta, beside, places, token, pair)
        if b:
            wait_rows(r, w)
        cached = i32(filled - token)
        pair_0(registers, rows, values, weights, beta, beside, cached, lane)
        pair_1(registers, rows, values, weights, beta, beside, cached, lane)
        pair_2(registers, rows, values, weights, beta, beside, cached, lane)
        pair_3(registers, rows, values, weights, beta, beside, cached, lane)
        pair_4(registers, rows, values, weights, beta, beside, cached, lane)
        pair_5(registers, rows, values, weights, beta, beside, cached, lane)
        pair_6(registers, rows, values, weights, beta, beside, cached, lane)
        pair_7(registers, rows, values, weights, beta, beside, cached, lane)
        for half in range(2):
            w[4 * b + half * 2] = low_halves(own[half * 2], own[half * 2 + 1])
            w[4 * b + half * 2 + 1] = high_halves(own[half * 2], own[half * 2 + 1])

    return solve


@functools.cache
def state_functions(config):
    """(load_state, round_state, store_state): of a thread's part of S^T, and its words."""
    count, low_scale = config.key_dim // 2, f32(1.0) / LOW_SCALE

    @device_function
    def element(block, i, lane):
        """(place on the key's axis, column less the thread's first) of accumulator 4 block + i."""
        return i32(i32(block * 8 + i % 2) + (lane & i32(3)) * i32(2)), i32(i // 2 * 8)

    @device_function
    def round_state(state, words):
        """Round S to two planes; words: the high one, an operand."""
        for i in range(count // 2):
            a, b = state[2 * i], state[2 * i + 1]
            word = pack_operands(a, b)
            high, next_high = unpack(word)
            low, next_low = unpack(pack_operands((a - high) * LOW_SCALE, (b - next_high) * LOW_SCALE))
            words[i] = word
            state[2 * i] = cuda.fma(low, low_scale, high)
            state[2 * i + 1] = cuda.fma(next_low, low_scale, next_high)

    @device_function
    def load_state(states, page, head, column, state, words, lane):
        """S of a page, or zeros; column: the thread's first."""
        for i in range(count // 2):
            words[i] = i32(0)
        for i in range(count):
            state[i] = f32(0.0)
        if page >= 0:
            for block in range(count // 4):
                for i in range(4):
                    e, further = element(block, i, lane)
                    low = widen(states[page, head, 1, e, column + further])
                    state[4 * block + i] = cuda.fma(low, low_scale, widen(states[page, head, 0, e, column + further]))
            for block in range(count // 4):
                for side in range(2):
                    e, further = element(block, 2 * side, lane)
                    first = widen(states[page, head, 0, e, column + further])
                    second = widen(states[page, head, 0, e + 1, column + further])
                    words[2 * block + side] = pack_operands(first, second)

    @device_function
    def store_state(states, page, head, column, state, words, lane):
        """The planes of S, which is rounded, into a page."""
        for block in range(count // 4):
            for side in range(2):
                first, second = unpack(words[2 * block + side])
                for i in range(2):
                    e, further = element(block, 2 * side + i, lane)
                    high = second if i else first
                    low = (state[4 * block + 2 * side + i] - high) * LOW_SCALE
                    states[page, head, 0, e, column + further] = narrow(high, states)
                    states[page, head, 1, e, column + further] = narrow(low, states)

    return load_state, round_state, store_state


@functools.cache
def output_functions(config):
    """(store_outputs, store_rows): of a block of tokens to global memory."""
    layout, is_sm90, is_deferred = config.layout, config.is_sm90, config.is_deferred
    unscaled = f32(1.0) / VALUE_SCALE

    @device_function
    def store_outputs(y, out, base, item, first, warp, lane):
        """o (columns, tokens) of accumulators; first: the row of the block's first token."""
        if is_sm90:
            for block in range(BLOCK // 8):
                token, chunk = i32(i32(block * 8) + (lane & i32(7))), i32(warp * i32(2) + ((lane >> i32(3)) & i32(1)))
                line = Address(base + layout.out + token * i32(LINE))
                i = 4 * block
                left = pack_operands(y[i] * unscaled, y[i + 1] * unscaled)
                right = pack_operands(y[i + 2] * unscaled, y[i + 3] * unscaled)
                stmatrix_x2_trans(Address(swizzled_chunk(line, token, chunk)), left, right)
            sync_warp()
            if is_deferred:
                # Rows 16 apart have one place in their swizzled lines; no row of packed sequences is before `begin`.
                token, chunk = i32(lane >> i32(1)), i32(warp * i32(2) + (lane & i32(1)))
                row, step = i32(first + token), i64(out.shape[1]) * out.shape[2] * 32
                to = (i64(row) * out.shape[1] + item.head) * out.shape[2] + item.column + chunk * 8
                to = address_of(out) + to * 2
                line = Address(base + layout.out + token * i32(LINE))
                line = Address(swizzled_chunk(line, token, chunk))
                for i in range(BLOCK // 16):
                    if i32(row + i32(i * 16)) < item.end:
                        copy_to_global(to, Address(line + i * 16 * LINE))
                    to = to + step
            else:
                for i in range(BLOCK // 16):
                    token, chunk = i32(i32(i * 16) + (lane >> i32(1))), i32(warp * i32(2) + (lane & i32(1)))
                    row = i32(first + token)
                    if item.begin <= row and row < item.end:
                        to = (i64(row) * out.shape[1] + item.head) * out.shape[2] + item.column + chunk * 8
                        line = Address(base + layout.out + token * i32(LINE))
                        copy_to_global(address_of(out) + to * 2, Address(swizzled_chunk(line, token, chunk)))
            sync_warp()
        else:
            column = i32(item.column + warp * i32(16) + (lane >> i32(2)))
            for block in range(BLOCK // 8):
                for side in range(2):
                    i = 4 * block + 2 * side
                    pair = unpack(pack_operands(y[i] * unscaled, y[i + 1] * unscaled))
                    for e in range(2):
                        row = i32(first + i32(block * 8 + e) + (lane & i32(3)) * i32(2))
                        if item.begin <= row and row < item.end:
                            out[row, item.head, column + side * 8] = narrow(pair[e], out)

    @device_function
    def store_rows(w, array, row, begin, end, offset, head, column, lane):
        """Rows w of a block into array (rows, HV, V) from row + offset on, those from begin to end."""
        for b in range(BLOCK // SUB_BLOCK):
            for half in range(2):
                for side in range(2):
                    pair = unpack(w[4 * b + 2 * half + side])
                    for e in range(2):
                        token = i32(i32(b * SUB_BLOCK + half * 8 + e) + (lane & i32(3)) * i32(2))
                        to = i32(row + token)
                        if begin <= to and to < end:
                            array[to + offset, head, column + side * 8] = narrow(pair[e], array)

    return store_outputs, store_rows


@functools.cache
def places_function(config):
    """The device function that returns the BlockPlaces of an item's block."""
    layout, tiles, prepared, output_weights = config.layout, config.tiles, config.prepared, config.output_weights
    tile_bytes, vector, is_deferred = config.key_dim // 64 * BOX_BYTES, BLOCK * 4, config.is_deferred

    @device_function
    def places_of(base, index):
        if is_deferred:
            stage, at, p_at = stage_of(index, tiles), stage_of(index, prepared), stage_of(index, output_weights)
        else:
            stage, at = i32(index % i32(tiles)), i32(index % i32(prepared))
            p_at = at
        return BlockPlaces(
            Address(base + layout.k + stage * i32(tile_bytes)), Address(base + layout.q + stage * i32(tile_bytes)),
            Address(base + layout.v + stage * i32(BOX_BYTES)), Address(base + layout.m + at * i32(BOX_BYTES)),
            Address(base + layout.p + p_at * i32(BOX_BYTES)),
            Address(base + layout.diagonal + at * i32(DIAGONAL_BYTES)),
            Address(base + layout.kept + at * i32(vector)), Address(base + layout.later + at * i32(vector)),
            Address(base + layout.beta + stage * i32(vector)),
        )  # fmt: skip

    return places_of


@functools.cache
def block_function(config):
    """The device function of the second warpgroup for a block of tokens."""
    key_dim, is_paged, is_early = config.key_dim, config.is_paged, config.is_sm90
    count, vector, places_of = key_dim // 2, BLOCK * 4, places_function(config)
    products = products_of(config.family, key_dim)
    read_state, outputs, fold = products.read_state, products.outputs, products.fold
    wait_state_but_one, wait_state = products.wait_state_but_one, products.wait_state
    wait_outputs_but_one, wait_outputs, wait_fold = (
        products.wait_outputs_but_one, products.wait_outputs, products.wait_fold,
    )  # fmt: skip
    solve_0, solve_1, solve_2, solve_3 = (solve_function(config, b) for b in range(BLOCK // SUB_BLOCK))
    _, round_state, store_state = state_functions(config)
    store_outputs, store_rows = output_functions(config)

    @device_function
    def compute_block(registers, tokens, sequences, cache, out, base, item, index, warp, lane):
        places, state, y = places_of(base, index), registers.state, registers.y
        first, column = i32(item.first + index * i32(BLOCK)), i32(item.column + warp * i32(16) + (lane >> i32(2)))
        filled = item.filled if index == 0 else i32(0)
        read_state(registers.x, registers.words, places.k, warp, lane)
        if is_early:
            read_state(y, registers.words, places.q, warp, lane)
            wait_state_but_one(registers.x, registers.words)
        else:
            wait_state(registers.x, registers.words)
        solve_0(registers, places, filled, warp, lane)
        if is_early:
            wait_state(y, registers.words)
        solve_1(registers, places, filled, warp, lane)
        solve_2(registers, places, filled, warp, lane)
        solve_3(registers, places, filled, warp, lane)
        if not is_early:
            read_state(y, registers.words, places.q, warp, lane)
            wait_state(y, registers.words)
        for eight in range(BLOCK // 8):
            scale_outputs(y, places.kept, eight, lane)
        outputs(y, registers.w, places.p, warp, lane)
        # All that waits for a product stands in the branch that starts it: else ptxas lets each product end at once.
        if i32(index + i32(1)) < item.blocks:
            for eight in range(BLOCK // 8):
                scale_rows(registers.w, registers.later_w, places.later, eight, lane)
            _, kept = load_pair(Address(places.kept + i32(vector - 8)))
            for i in range(count):
                state[i] = cuda.fma(kept, state[i], f32(0.0))
            fold(state, registers.later_w, places.k, warp, lane)
            wait_outputs_but_one(y, registers.w)
            store_outputs(y, out, base, item, first, warp, lane)
            wait_fold(state, registers.later_w)
            round_state(state, registers.words)
            if is_paged:
                page = sequences.state_tables[item.sequence, item.block + index]
                if page >= 0:
                    store_state(cache.states, page, item.head, column, state, registers.words, lane)
        else:
            wait_outputs(y, registers.w)
            store_outputs(y, out, base, item, first, warp, lane)
            if is_paged:
                # A row of the slots is a token of a block, and the block's first token is at a multiple of BLOCK.
                offset, rows = i32(item.slot * i32(BLOCK) - first), cache.value_rows
                store_rows(registers.w, rows, first, item.begin, item.end, offset, item.head, column, lane)

    return compute_block


@functools.cache
def last_state_function(config):
    """The device function that writes the state behind a sequence's last block, which is whole, for its children."""
    count, vector, places_of, is_deferred = config.key_dim // 2, BLOCK * 4, places_function(config), config.is_deferred
    products, first_unscaled = products_of(config.family, config.key_dim), BLOCK // 8 - 2 if config.is_deferred else 0
    fold, wait_fold = products.fold, products.wait_fold
    _, round_state, store_state = state_functions(config)

    @device_function
    def store_last_state(registers, states, base, item, warp, lane):
        """The rows w are in registers, and the block's tiles in shared memory; states: a page for each sequence."""
        state, places = registers.state, places_of(base, i32(item.blocks - i32(1)))
        for eight in range(first_unscaled, BLOCK // 8):
            scale_rows(registers.w, registers.later_w, places.later, eight, lane)
        if not is_deferred:
            _, kept = load_pair(Address(places.kept + i32(vector - 8)))
            for i in range(count):
                state[i] = cuda.fma(kept, state[i], f32(0.0))
        fold(state, registers.later_w, places.k, warp, lane)
        wait_fold(state, registers.later_w)
        round_state(state, registers.words)
        column = i32(item.column + warp * i32(16) + (lane >> i32(2)))
        store_state(states, item.sequence, item.head, column, state, registers.words, lane)

    return store_last_state


@functools.cache
def forward_function(config):
    """The device function that is the kernel of a TensorConfig."""
    is_paged, is_sm90, is_deferred, count = config.is_paged, config.is_sm90, config.is_deferred, config.key_dim // 2
    word_count, has_prefixes, store_last_state = count // 2, config.has_prefixes, last_state_function(config)
    prepare, compute_block, compute_item = prepare_function(config), block_function(config), None
    if is_deferred:
        store_outputs, _ = output_functions(config)
        compute_item = item_function(config, places_function(config), store_outputs)
    load_state, *_ = state_functions(config)

    @device_function
    def item_of(sequences, b, begin, end, heads, key_heads, columns):
        """The DeltaItem of this grid's block, of sequence b."""
        head = i32(cuda.blockIdx.x // (columns // COLUMNS))
        column = i32(cuda.blockIdx.x % (columns // COLUMNS) * COLUMNS)
        start, block, slot, page = i32(0), i32(0), i32(0), i32(-1)
        if is_paged:
            start, slot = i32(sequences.context_lens[b] - (end - begin)), sequences.slots[b]
            block = i32(state_blocks(start, sequences.resumed_at[b]))
            if block > 0:
                page = sequences.state_tables[b, block - 1]
        if has_prefixes:
            page = sequences.parents[b]
        filled, first = i32(start - block * i32(BLOCK)), i32(begin - start + block * i32(BLOCK))
        blocks = i32((start + (end - begin) - i32(1)) // i32(BLOCK) - block + i32(1))
        key_head = i32(head // (heads // key_heads))
        return DeltaItem(begin, end, first, block, blocks, filled, slot, page, i32(b), head, key_head, column)

    @device_function
    def compute_forward(tokens, sequences, cache, out):
        thread, b = i32(cuda.threadIdx.x), i32(cuda.blockIdx.y)
        begin, end = sequences.cu_seqlens[b], sequences.cu_seqlens[b + 1]
        if begin == end:
            return
        if has_prefixes:
            if level_of(sequences.parents, b) != sequences.level:
                return
        item = item_of(sequences, b, begin, end, out.shape[1], tokens.k.shape[1], out.shape[2])
        if is_paged and sequences.context_lens[b] == 0:
            for i in range(thread, (end - begin) * COLUMNS, 2 * WARPGROUP):
                out[begin + i // COLUMNS, item.head, item.column + i % COLUMNS] = narrow(f32(0.0), out)
            return
        base, warpgroup = shared_base(), warp_uniform(thread >> i32(7))
        if warpgroup == 0:
            prepare(tokens, cache, base, item, thread)
        else:
            warp, lane = i32((thread >> i32(5)) & i32(3)), i32(thread & i32(31))
            registers = Registers(
                cuda.local.array(count, np.float32), cuda.local.array(word_count, np.int32),
                cuda.local.array(32, np.float32), cuda.local.array(32, np.float32), cuda.local.array(8, np.float32),
                cuda.local.array(16, np.int32), cuda.local.array(16, np.int32), cuda.local.array(4, np.int32),
            )  # fmt: skip
            column = i32(item.column + warp * i32(16) + (lane >> i32(2)))
            load_state(cache.states, item.page, item.head, column, registers.state, registers.words, lane)
            for i in range(16):
                registers.w[i] = i32(0)
            if is_deferred:
                compute_item(registers, out, base, item, warp, lane)
                if has_prefixes:
                    if has_children(sequences.parents, b):
                        store_last_state(registers, cache.states, base, item, warp, lane)
                return
            index = i32(0)
            while index < item.blocks:
                named_barrier_sync(HANDOVER, 2 * WARPGROUP)
                # With one stage all addresses are the same for each block: they would be kept, in too many registers.
                start, own_lane = base, lane
                if not is_sm90:
                    start, own_lane = Address(opaque(base)), opaque(lane)
                compute_block(registers, tokens, sequences, cache, out, start, item, index, warp, own_lane)
                index = i32(index + i32(1))
                if not is_sm90:
                    named_barrier_sync(HANDOVER, 2 * WARPGROUP)
            if has_prefixes:
                if has_children(sequences.parents, b):
                    store_last_state(registers, cache.states, base, item, warp, lane)

    return compute_forward
