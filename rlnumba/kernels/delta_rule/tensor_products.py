"""Products of the gated delta rule on tensor cores, for 64 columns of V and 64 tokens, of both tensor-core families.

A warpgroup has S^T: 64 columns of V times K. Warp w has columns 16 w to 16 w + 15. Accumulators of columns times
tokens, or of columns times K, and the words of an operand A lie as kernels/ptx/wgmma.py says, in both families; in
pairs the accumulators of one product are the words of the next. Tiles of 64 lines of 16-bit numbers, of tokens or of
rows of M and P, are in swizzled boxes (kernels/ptx/shared_memory.py), 64 numbers of a line in each.

The order of each sum is that of k, 16 at a time, in one accumulator. tests/kernels/test_delta_rule_products.py tests
what equal bits need: neither the instruction, its width, nor the place of an operand changes them.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LARGEST_OPERAND, SUB_BLOCK
from rlnumba.kernels.ptx.instruction import SIMULATED, instruction
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address
from rlnumba.kernels.ptx.sm80 import ldmatrix_fragment, ldmatrix_fragment_trans, mma
from rlnumba.kernels.ptx.warp import cvt_pack, device_function
from rlnumba.kernels.ptx.wgmma import smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import swizzled_chunk
from rlnumba.runtime.device import cuda

i32 = np.int32
ELEMENT = "float16"

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
