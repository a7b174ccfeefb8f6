"""Products of the gated delta rule on tensor cores, for 64 columns of V and 64 tokens, of both tensor-core families.

A warpgroup has S^T: 64 columns of V times K. Warp w has columns 16 w to 16 w + 15. Accumulators of columns times
tokens, or of columns times K, and the words of an operand A lie as kernels/ptx/wgmma.py says, in both families; in
pairs the accumulators of one product are the words of the next. Tiles of 64 lines of 16-bit numbers, of tokens or of
rows of M and P, are in swizzled boxes (kernels/ptx/shared_memory.py), 64 numbers of a line in each.

The order of each sum is that of k, 16 at a time, in one accumulator. tests/kernels/test_delta_rule_products.py tests
what equal bits need: neither the instruction, its width, nor the place of an operand changes them.

Behind the products are the steps between them, which tensor_forward.py and tensor_deferred.py take in different orders.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LARGEST_OPERAND, SUB_BLOCK, VALUE_SCALE
from rlnumba.kernels.ptx.instruction import SIMULATED, instruction
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address, ldmatrix_x4_trans, load_four, load_pair
from rlnumba.kernels.ptx.sm80 import ldmatrix_fragment, ldmatrix_fragment_trans, mma
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import swizzled_chunk
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32
ELEMENT = "float16"
# Floats from one row of a diagonal block of M to the next: four rows, two apart, lie in different banks.
DIAGONAL_STRIDE = 20
unpack = cvt_unpack(ELEMENT)

if SIMULATED:
    _pack = cvt_pack(ELEMENT)

    def _saturated(value):
        return np.float32(np.clip(value, -LARGEST_OPERAND, LARGEST_OPERAND))


@instruction("cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "ff", "r", effects=False)
def pack_operands(low, high):
    """Two float32 rounded to float16, low in the lower half of an int32; they saturate, but for NaN."""
    return _pack(_saturated(low), _saturated(high))


@instruction("mov.b32 $0, $1;", "r", "r")
def opaque(value):
    """An int32, of which the compiler does not see that it is the same each time: what follows from it is not kept."""
    return value


class Products(NamedTuple):
    """Device functions of a family; each takes the lane's warp and lane last.

    read_state(acc, words, tile): acc (32,) = A B for A the words of S^T (K / 4,) and B the tokens of a tile of q or k.
    scores(acc, tile_a, tile_b): acc (32,) = tokens of one tile times those of another one.
    earlier_rows(acc, words, tile): acc (8,) += A B, A the words of w of the sub-blocks before `b` (4 b,), B the rows of
    M of sub-block b: a tuple, by b; its first is None.
    outputs(acc, words, tile): acc (32,) += A B, A all words of w (16,), B the rows of P.
    fold(acc, words, tile): acc (K / 2,) += A B, A the words of F w (16,), B the keys of the block, tokens being k.
    Waits until products have ended, of their accumulators and words: wait_state_but_one and wait_state of read_state,
    wait_scores, which has no words, wait_rows, wait_outputs and wait_outputs_but_one, wait_fold; "but_one": all
    products but the one that was started last.
    """

    read_state: object
    scores: object
    earlier_rows: object
    outputs: object
    fold: object
    wait_state_but_one: object
    wait_state: object
    wait_scores: object
    wait_rows: object
    wait_outputs_but_one: object
    wait_outputs: object
    wait_fold: object


@functools.cache
def products_of(family, key_dim):
    """The Products of a family, "sm90" or "sm80"."""
    return _wgmma_products(key_dim) if family == "sm90" else _mma_products(key_dim)


def _wgmma_products(key_dim):
    steps = key_dim // 16
    start_read = wgmma_async(BLOCK, ELEMENT, steps, "registers", accumulate=False)
    start_scores = wgmma_async(BLOCK, ELEMENT, steps, accumulate=False)
    start_outputs = wgmma_async(BLOCK, ELEMENT, 4, "registers", accumulate=True)
    start_fold = wgmma_async(key_dim, ELEMENT, 4, "registers", "mn", accumulate=True)

    @device_function
    def read_state(acc, words, tile, warp, lane):
        start_read(acc, words, smem_descriptor(tile))

    @device_function
    def scores(acc, tile_a, tile_b, warp, lane):
        start_scores(acc, smem_descriptor(tile_a), smem_descriptor(tile_b))

    @device_function
    def outputs(acc, words, tile, warp, lane):
        start_outputs(acc, words, smem_descriptor(tile))

    @device_function
    def fold(acc, words, tile, warp, lane):
        start_fold(acc, words, smem_descriptor(tile))

    def earlier_rows_of(b):
        start = wgmma_async(SUB_BLOCK, ELEMENT, b, "registers", accumulate=True)
        offset = b * SUB_BLOCK * LINE

        @device_function
        def earlier_rows(acc, words, tile, warp, lane):
            start(acc, words, smem_descriptor(Address(tile + offset)))

        return earlier_rows

    rows = (None, *map(earlier_rows_of, range(1, BLOCK // SUB_BLOCK)))
    waits = (
        wgmma_wait_group(32, 1, words=4 * steps),
        wgmma_wait_group(32, words=4 * steps),
        wgmma_wait_group(32),
        wgmma_wait_group(8, words=16),
        wgmma_wait_group(32, 1, words=16),
        wgmma_wait_group(32, words=16),
        wgmma_wait_group(key_dim // 2, words=16),
    )
    return Products(read_state, scores, rows, outputs, fold, *waits)


@device_function
def line_address(tile, step, line, half):
    """The address of the half of 8, of 16 k from 16 step on, of a line of a tile."""
    boxes = Address(tile + i32(step // 4) * i32(BOX_BYTES) + line * i32(LINE))
    return Address(swizzled_chunk(boxes, line, i32(step % 4 * 2) + half))


def _mma_products(key_dim):
    multiply, steps = mma(ELEMENT), key_dim // 16
    tiles = BLOCK // 16

    @device_function
    def load_b(b, tile, n, step, lane):
        """The fragment of columns 16 n .. of B, whose lines are its columns."""
        line = i32(n * 16) + (lane & i32(7)) + ((lane >> i32(4)) << i32(3))
        ldmatrix_fragment(b, 0, line_address(tile, step, line, (lane >> i32(3)) & i32(1)))

    @device_function
    def read_state(acc, words, tile, warp, lane):
        b = cuda.local.array(4, np.int32)
        for i in range(32):
            acc[i] = np.float32(0.0)
        for n in range(tiles):
            for step in range(steps):
                load_b(b, tile, n, step, lane)
                multiply(acc, 8 * n, words, 4 * step, b, 0)

    @device_function
    def scores(acc, tile_a, tile_b, warp, lane):
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for i in range(32):
            acc[i] = np.float32(0.0)
        line = i32(warp * i32(16)) + (lane & i32(15))
        for step in range(steps):
            ldmatrix_fragment(a, 0, line_address(tile_a, step, line, lane >> i32(4)))
            for n in range(tiles):
                load_b(b, tile_b, n, step, lane)
                multiply(acc, 8 * n, a, 0, b, 0)

    @device_function
    def outputs(acc, words, tile, warp, lane):
        b = cuda.local.array(4, np.int32)
        for n in range(tiles):
            for step in range(4):
                load_b(b, tile, n, step, lane)
                multiply(acc, 8 * n, words, 4 * step, b, 0)

    @device_function
    def fold(acc, words, tile, warp, lane):
        b = cuda.local.array(4, np.int32)
        for step in range(4):
            line = i32(step * 16) + (lane & i32(15))
            for n in range(steps):
                ldmatrix_fragment_trans(b, 0, line_address(tile, n, line, lane >> i32(4)))
                multiply(acc, 8 * n, words, 4 * step, b, 0)

    def earlier_rows_of(block):
        @device_function
        def earlier_rows(acc, words, tile, warp, lane):
            b = cuda.local.array(4, np.int32)
            for step in range(block):
                load_b(b, tile, block, step, lane)
                multiply(acc, 0, words, 4 * step, b, 0)

        return earlier_rows

    @device_function
    def wait(acc, words):
        """mma.sync has ended when it returns."""

    @device_function
    def wait_scores(acc):
        """The same."""

    rows = (None, *map(earlier_rows_of, range(1, BLOCK // SUB_BLOCK)))
    return Products(read_state, scores, rows, outputs, fold, wait, wait, wait_scores, *[wait] * 4)


@device_function
def scale_outputs(y, kept, block, lane):
    """E y of eight tokens."""
    even, odd = load_pair(Address(kept + (i32(block * 8) + (lane & i32(3)) * i32(2)) * i32(4)))
    for side in range(2):
        i = 4 * block + 2 * side
        y[i] = cuda.fma(even, y[i], f32(0.0))
        y[i + 1] = cuda.fma(odd, y[i + 1], f32(0.0))


@device_function
def scale_rows(w, later_w, later, block, lane):
    """The words of F w of eight tokens."""
    even, odd = load_pair(Address(later + (i32(block * 8) + (lane & i32(3)) * i32(2)) * i32(4)))
    for side in range(2):
        first, second = unpack(w[2 * block + side])
        later_w[2 * block + side] = pack_operands(even * first, odd * second)


@functools.cache
def start_rows_function(element, b):
    """The device function of r = v - E x of sub-block b, where a thread has two columns of four tokens."""
    unpack_value, first = cvt_unpack(element), b * SUB_BLOCK

    @device_function
    def start_rows(r, x, values, places, warp, lane):
        """values (4,): the words of v, which are written; element: of v."""
        pair = i32(lane & i32(3))
        matrix, line = i32(lane >> i32(3)), i32(lane & i32(7))
        token, chunk = i32(i32(first) + (matrix >> i32(1)) * i32(8) + line), i32(warp * i32(2) + (matrix & i32(1)))
        found = ldmatrix_x4_trans(Address(swizzled_chunk(Address(places.v + token * i32(LINE)), token, chunk)))
        for half in range(2):
            even, odd = load_pair(Address(places.kept + (i32(first + half * 8) + pair * i32(2)) * i32(4)))
            for side in range(2):
                i, word = half * 4 + side * 2, found[half * 2 + side]
                values[half * 2 + side] = word
                of_even, of_odd = unpack_value(word)
                r[i] = cuda.fma(-even, x[8 * b + i], of_even * VALUE_SCALE) + f32(0.0)
                r[i + 1] = cuda.fma(-odd, x[8 * b + i + 1], of_odd * VALUE_SCALE) + f32(0.0)

    return start_rows


@device_function
def load_own_weights(beta, beside, places, token, pair):
    """beta of the lane's four tokens, two of which begin at `token`, and in `beside` -M of the second and first of both
    pairs; returns the address of -M in the row of the first."""
    rows = Address(places.diagonal + token * i32(DIAGONAL_STRIDE * 4))
    for half in range(2):
        beta[half * 2], beta[half * 2 + 1] = load_pair(Address(places.beta + (token + i32(half * 8)) * i32(4)))
        place = i32(i32((half * 8 + 1) * DIAGONAL_STRIDE + half * 8) + pair * i32(2))
        beside[half], _ = load_pair(Address(rows + place * i32(4)))
    return rows


@functools.cache
def pair_steps(p):
    """(load_weights, add_pair): the device functions of r -= M w for tokens 2 p and 2 p + 1 of a sub-block."""
    half = p // 4

    @device_function
    def load_weights(weights, rows):
        """-M of the lane's tokens with these two and the next two; rows: of load_own_weights."""
        if p % 2 == 0:
            # The first eight tokens need none once they have their rows.
            for other in range(half, 2):
                for i in range(2):
                    k, offset = 4 * (other * 2 + i), 4 * ((other * 8 + i) * DIAGONAL_STRIDE + p * 2)
                    four = load_four(Address(rows + offset))
                    weights[k], weights[k + 1], weights[k + 2], weights[k + 3] = four

    @device_function
    def add_pair(r, weights, left, right, next_left, next_right):
        """left, right: w of the first token in the thread's two columns; next_left, next_right: of the second."""
        for other in range(half, 2):
            for i in range(2):
                k, n = 4 * (other * 2 + i) + p % 2 * 2, other * 4 + i
                r[n] = cuda.fma(weights[k + 1], next_left, cuda.fma(weights[k], left, r[n]))
                r[n + 2] = cuda.fma(weights[k + 1], next_right, cuda.fma(weights[k], right, r[n + 2]))

    return load_weights, add_pair
