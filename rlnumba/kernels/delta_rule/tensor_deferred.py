"""The second warpgroup of tensor_forward.py on Hopper, for long packed sequences: less on the chain of a sequence.

The same sums as there, in another order of instructions, so that a block's S follows sooner from that of the block
before. Only the high plane of S is an operand of x: the low one is rounded, S multiplied by E_last and y by E while
shuffles of the substitution are under way. The fold begins before P w, and rows of o are stored while the next block's
x is computed. M w of earlier sub-blocks is added by mma.sync, all but the last 16 tokens of it ahead of the
substitution before.
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LOW_SCALE, SUB_BLOCK
from rlnumba.kernels.delta_rule.tensor_prepare import HANDOVER, WARPGROUP
from rlnumba.kernels.delta_rule.tensor_products import (
    ELEMENT,
    line_address,
    load_own_weights,
    pack_operands,
    pair_steps,
    products_of,
    scale_outputs,
    scale_rows,
    start_rows_function,
    unpack,
)
from rlnumba.kernels.ptx.shared_memory import Address, load_pair
from rlnumba.kernels.ptx.sm80 import ldmatrix_fragment, mma
from rlnumba.kernels.ptx.sm90 import named_barrier_sync
from rlnumba.kernels.ptx.warp import device_function, lower_halves, shuffle, upper_halves
from rlnumba.kernels.ptx.wgmma import wgmma_wait_group
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32
SUB_BLOCKS = BLOCK // SUB_BLOCK


@functools.cache
def step_function(key_dim, n):
    """The device function of what is computed beside pair n of a block's tokens, and does not wait for the pair."""
    low_scale = f32(1.0) / LOW_SCALE
    first_word, end = n * key_dim // 128, (n + 1) * key_dim // 128
    # y is there behind the first sub-block, and rows w of a sub-block when the next one begins.
    has_outputs, has_rows = 8 <= n < 16, n >= 8 and n % 8 < 2
    output, row = n - 8, n // 8 * 2 - 2 + n % 8

    @device_function
    def compute_step(registers, places, last, lane):
        """The low plane of a word of S, and S times E_last; E y and F w of eight tokens."""
        state = registers.state
        for i in range(first_word, end):
            a, b = state[2 * i], state[2 * i + 1]
            high, next_high = unpack(pack_operands(a, b))
            low, next_low = unpack(pack_operands((a - high) * LOW_SCALE, (b - next_high) * LOW_SCALE))
            state[2 * i] = cuda.fma(last, cuda.fma(low, low_scale, high), f32(0.0))
            state[2 * i + 1] = cuda.fma(last, cuda.fma(next_low, low_scale, next_high), f32(0.0))
        if has_outputs:
            scale_outputs(registers.y, places.kept, output, lane)
        if has_rows:
            scale_rows(registers.w, registers.later_w, places.later, row, lane)

    return compute_step


@functools.cache
def pair_function(key_dim, b, p):
    """The device function of the substitution for tokens 2 p and 2 p + 1 of sub-block b."""
    half = p // 4
    compute_step, (load_weights, add_pair) = step_function(key_dim, b * (SUB_BLOCK // 2) + p), pair_steps(p)

    @device_function
    def solve_pair(registers, r, places, rows, weights, beta, beside, last, lane):
        """solve_pair computes what that of tensor_forward.py does, and has compute_step behind the shuffles."""
        own, pair = registers.own, i32(lane & i32(3))
        load_weights(weights, rows)
        even = pack_operands(beta[half * 2] * r[half * 4], beta[half * 2] * r[half * 4 + 2])
        source = i32((lane & i32(28)) | i32(p % 4))
        of_even = shuffle(even, source)
        left, right = unpack(even)
        second_left = cuda.fma(beside[half], left, r[half * 4 + 1])
        second_right = cuda.fma(beside[half], right, r[half * 4 + 3])
        odd = pack_operands(beta[half * 2 + 1] * second_left, beta[half * 2 + 1] * second_right)
        of_odd = shuffle(odd, source)
        compute_step(registers, places, last, lane)
        if pair == i32(p % 4):
            own[half * 2], own[half * 2 + 1] = even, odd
        left, right = unpack(of_even)
        next_left, next_right = unpack(of_odd)
        add_pair(r, weights, left, right, next_left, next_right)

    return solve_pair


@functools.cache
def rows_functions(config, b):
    """(start_rows, load_weights, add_rows): r of sub-block b, from v, x and the rows w of earlier ones."""
    start, multiply, first = start_rows_function(config.element, b), mma(ELEMENT), b * SUB_BLOCK

    @device_function
    def load_weights(fragment, places, step, lane):
        """-M of the sub-block's tokens with those of sub-block `step`."""
        line = i32(first) + (lane & i32(7)) + ((lane >> i32(4)) << i32(3))
        ldmatrix_fragment(fragment, 0, line_address(places.m, step, line, (lane >> i32(3)) & i32(1)))

    @device_function
    def add_rows(r, w, fragment, step):
        multiply(r, 0, w, 4 * step, fragment, 0)

    @device_function
    def start_rows(r, x, w, places, warp, lane):
        """r = v - E x, and - M w over the sub-blocks but the one before."""
        fragment, values = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        start(r, x, values, places, warp, lane)
        for step in range(b - 1):
            load_weights(fragment, places, step, lane)
            add_rows(r, w, fragment, step)

    return start_rows, load_weights, add_rows


@functools.cache
def solve_function(config, b):
    """The device function that computes the rows w of sub-block b."""
    start_next, load_next, add_next = rows_functions(config, min(b + 1, SUB_BLOCKS - 1))
    pair_0, pair_1, pair_2, pair_3, pair_4, pair_5, pair_6, pair_7 = (
        pair_function(config.key_dim, b, p) for p in range(SUB_BLOCK // 2)
    )
    first, has_next = b * SUB_BLOCK, b + 1 < SUB_BLOCKS

    @device_function
    def solve(registers, r, next_r, places, last, warp, lane):
        """r: of this sub-block, all earlier rows taken from it; next_r: that of the next one, which is made."""
        w, own, pair, fragment = registers.w, registers.own, i32(lane & i32(3)), cuda.local.array(4, np.int32)
        weights, beta, beside = (
            cuda.local.array(16, np.float32), cuda.local.array(4, np.float32), cuda.local.array(2, np.float32),
        )  # fmt: skip
        token = i32(i32(first) + pair * i32(2))
        rows = load_own_weights(beta, beside, places, token, pair)
        if has_next:
            start_next(next_r, registers.x, w, places, warp, lane)
            load_next(fragment, places, b, lane)
        pair_0(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_1(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_2(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_3(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_4(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_5(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_6(registers, r, places, rows, weights, beta, beside, last, lane)
        pair_7(registers, r, places, rows, weights, beta, beside, last, lane)
        for half in range(2):
            w[4 * b + half * 2] = lower_halves(own[half * 2], own[half * 2 + 1])
            w[4 * b + half * 2 + 1] = upper_halves(own[half * 2], own[half * 2 + 1])
        if has_next:
            add_next(next_r, w, fragment, b)

    return solve


@functools.cache
def item_function(config, places_of, store_outputs):
    """The device function of the second warpgroup for all blocks of an item."""
    key_dim = config.key_dim
    count, vector = key_dim // 2, BLOCK * 4
    products = products_of(config.family, key_dim)
    read_state, outputs, fold = products.read_state, products.outputs, products.fold
    wait_state, wait_outputs, wait_outputs_but_one = (
        products.wait_state, products.wait_outputs, products.wait_outputs_but_one,
    )  # fmt: skip
    wait_fold_but_one = wgmma_wait_group(count, 1, words=16)
    solve_0, solve_1, solve_2, solve_3 = (solve_function(config, b) for b in range(SUB_BLOCKS))
    start_rows, _, _ = rows_functions(config, 0)

    @device_function
    def compute_item(registers, out, base, item, warp, lane):
        state, x, y, w, words = registers.state, registers.x, registers.y, registers.w, registers.words
        r, next_r, index = registers.r, cuda.local.array(8, np.float32), i32(0)
        places = places_of(base, index)
        named_barrier_sync(HANDOVER, 2 * WARPGROUP)
        read_state(x, words, places.k, warp, lane)
        wait_state(x, words)
        while index < item.blocks:
            first = i32(item.first + index * i32(BLOCK))
            read_state(y, words, places.q, warp, lane)
            _, last = load_pair(Address(places.kept + i32(vector - 8)))
            start_rows(r, x, w, places, warp, lane)
            solve_0(registers, r, next_r, places, last, warp, lane)
            wait_state(y, words)
            solve_1(registers, next_r, r, places, last, warp, lane)
            solve_2(registers, r, next_r, places, last, warp, lane)
            solve_3(registers, next_r, r, places, last, warp, lane)
            index = i32(index + i32(1))
            if index < item.blocks:
                for block in range(BLOCK // 8 - 2, BLOCK // 8):
                    scale_rows(w, registers.later_w, places.later, block, lane)
                fold(state, registers.later_w, places.k, warp, lane)
                outputs(y, w, places.p, warp, lane)
                wait_fold_but_one(state, registers.later_w)
                for i in range(count // 2):
                    words[i] = pack_operands(state[2 * i], state[2 * i + 1])
                places = places_of(base, index)
                named_barrier_sync(HANDOVER, 2 * WARPGROUP)
                read_state(x, words, places.k, warp, lane)
                wait_outputs_but_one(y, w)
                store_outputs(y, out, base, item, first, warp, lane)
                wait_state(x, words)
            else:
                outputs(y, w, places.p, warp, lane)
                wait_outputs(y, w)
                store_outputs(y, out, base, item, first, warp, lane)

    return compute_item
