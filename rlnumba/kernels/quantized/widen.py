"""Packed codes to pairs of 16-bit values in registers, with the bits of `dequantize`.

int8, int4 and fp8 have scales of the model's dtype, and levels that this dtype has exactly: their product in that dtype
is rounded once, as the float32 product, which is exact, is. So arithmetic on pairs has the same bits:

    int4             bits | 2^7, a bfloat16 of 128 + code, - 136         (float16: 2^10, - 1032)
    int8, float16    bits | 2^10, - 1152
    int8, bfloat16   128 + the lower seven bits, - 256 without the eighth and - 128 with it: bfloat16 has eight bits
    fp8              exponent and mantissa at their places, times 2^120  (float16: 2^8)

nf4 has float32 levels, from a table in shared memory, and scales; its products are float32, and rounded.
"""

import functools
import operator
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.instruction import instruction
from rlnumba.kernels.ptx.shared_memory import load_function
from rlnumba.kernels.ptx.warp import PTX_TYPES, cvt_pack, cvt_unpack, device_function

i32 = np.int32

load_level = load_function("f")
# Bytes of a level in the table: one float32 for each lane.
LEVEL_SHIFT = 7


def _on_pairs(name, element, compute):
    """The instruction `name` on pairs of 16 bits in int32 words, from its float32 twin."""
    pack, unpack = cvt_pack(element), cvt_unpack(element)

    @instruction(f"{name}.rn.{PTX_TYPES[element]}x2 $0, $1, $2;", "rr", "r", effects=False)
    def on_pairs(x, y):
        (x_low, x_high), (y_low, y_high) = unpack(x), unpack(y)
        return pack(compute(x_low, y_low), compute(x_high, y_high))

    return on_pairs


@functools.cache
def mul_pair(element):
    """mul_pair(element)(x, y): the products of two pairs, int32 words."""
    return _on_pairs("mul", element, operator.mul)


@functools.cache
def sub_pair(element):
    """sub_pair(element)(x, y): the differences of two pairs, int32 words."""
    return _on_pairs("sub", element, operator.sub)


def _twice(bits):
    return i32(bits << 16 | bits)


@functools.cache
def pair_function(name, element, doubled=False):
    """(levels, constants): levels(word, shift, constants) -> int32, a device function, the levels of the pair of codes
    from a bit of a word on. doubled: both bytes of a half have its code.
    """
    subtract, multiply, is_bfloat16 = sub_pair(element), mul_pair(element), element == "bfloat16"
    one, four_bits, eight_bits = _twice(0x4300 if is_bfloat16 else 0x6400), _twice(0xF), _twice(0xFF)
    seven_bits, eighth_bit, larger = _twice(0x7F), _twice(0x80), _twice(0x4380)
    zero_of_int4, zero_of_int8 = _twice(0x4308 if is_bfloat16 else 0x6408), _twice(0x6480)
    mantissa, float8_scale = (4, _twice(0x7B80)) if is_bfloat16 else (7, _twice(0x5C00))
    magnitudes, signs = _twice(0x7F << mantissa), i32(~_twice(0x7FFF))

    @device_function
    def levels_of_int4(word, shift, constants):
        return subtract(i32(((word >> i32(shift)) & four_bits) | constants[0]), zero_of_int4)

    @device_function
    def levels_of_int8(word, shift, constants):
        code = i32(word >> i32(shift))
        if is_bfloat16:
            return subtract(i32((code & seven_bits) | constants[0]), i32((code & eighth_bit) ^ constants[1]))
        else:
            return subtract(i32((code & eight_bits) | constants[0]), zero_of_int8)

    @device_function
    def levels_of_fp8(word, shift, constants):
        code = i32(word >> i32(shift))
        if doubled:
            magnitude, sign = (code << i32(mantissa)) & magnitudes, code & signs
        else:
            magnitude, sign = (code & seven_bits) << i32(mantissa), (code & eighth_bit) << i32(8)
        return multiply(i32(magnitude | sign), float8_scale)

    levels = {"int4": levels_of_int4, "int8": levels_of_int8, "fp8": levels_of_fp8}[name]
    return levels, (one, larger)


@functools.cache
def value_function(form, element, of_lane=False):
    """(values, constants): values(word, shift, scale, table, constants) -> int32, a device function, a pair of values,
    whose codes begin at a bit.

    scale: of scale_function; table: this lane's address in that of nf4's levels; of_lane: for lane_pair_functions.
    """
    is_nf4, pack_two, multiply = form.name == "nf4", cvt_pack(element), mul_pair(element)

    if is_nf4:
        constants = i32(0), i32(0)

        @device_function
        def level(word, shift, table):
            if shift > LEVEL_SHIFT:
                code = word >> i32(shift - LEVEL_SHIFT)
            else:
                code = word << i32(LEVEL_SHIFT - shift)
            if of_lane:
                return load_level(table[0] + i32((code & i32(15 << LEVEL_SHIFT)) | table[1]))
            else:
                return load_level(table + i32(code & i32(15 << LEVEL_SHIFT)))

        @device_function
        def pair(word, shift, scale, table, constants):
            return pack_two(level(word, shift, table) * scale, level(word, shift + 16, table) * scale)

    else:
        levels, constants = pair_function(form.name, element, of_lane)

        @device_function
        def pair(word, shift, scale, table, constants):
            return multiply(levels(word, shift, constants), scale)

    return pair, constants


@functools.cache
def widen_function(form, element):
    """The device function widen(word, next_word, scale, table) -> four int32 words, eight values of a row.

    word: their codes, of eight bits the first four, and next_word the others. scale, table: as value_function's.
    """
    bits, (values, constants) = form.bits, value_function(form, element)

    @device_function
    def pair(word, shift, scale, table):
        return values(word, shift, scale, table, constants)

    @device_function
    def widen(word, next_word, scale, table):
        if bits == 4:
            first, second = pair(word, 0, scale, table), pair(word, 4, scale, table)
            return first, second, pair(word, 8, scale, table), pair(word, 12, scale, table)
        else:
            first, second = pair(word, 0, scale, table), pair(word, 8, scale, table)
            return first, second, pair(next_word, 0, scale, table), pair(next_word, 8, scale, table)

    return widen


@instruction("prmt.b32 $0, $1, $2, $3;", "rrr", "r", effects=False)
def select_bytes(a, b, selector):
    """The bytes of a, 0 to 3, and of b, 4 to 7, whose numbers are the four lowest hexadecimal digits of a selector."""
    content = np.array([a, b]).astype(np.int32).view(np.uint8)
    return content[[int(selector) >> shift & 7 for shift in (0, 4, 8, 12)]].view(np.int32)[0]


@instruction("shr.b32 $0, $1, $2;", "rr", "r", effects=False)
def shift_right(word, count):
    """A word shifted by up to 31 bits, zeros before it, in 32 bits: of an int32 Numba makes 64 first."""
    return (np.array([word]).astype(np.int32).view(np.uint32) >> np.uint32(count)).view(np.int32)[0]


class LanePair(NamedTuple):
    """A lane's part of eight values: the selector of its pair, the address of nf4's levels and its bytes there, and
    constants in registers."""

    selector: int
    table: tuple
    constants: tuple


@functools.cache
def lane_pair_functions(form, element):
    """(lane_pair, widen_pair): device functions by which each of four lanes widens one pair of eight values.

    lane_pair(lane, levels, zero) -> LanePair. levels: the address of nf4's; zero: an int32 0 that ptxas cannot know.
    widen_pair(word, next_word, scale, LanePair) -> int32; word, next_word and scale are those of widen_function.
    The pair: values 2 (lane % 4) and the next, as a fragment of wgmma has them.
    """
    bits, (values, (one, larger)) = form.bits, value_function(form, element, True)

    @device_function
    def lane_pair(lane, levels, zero):
        quarter = lane & i32(3)
        if bits == 4:
            selector = i32(quarter * i32(4))
        else:
            first = i32(i32(quarter >> i32(1)) * i32(4) + (quarter & i32(1)))
            selector = i32(first * i32(0x1111) + i32(0x2200))
        # LOP3 has room for one constant. ptxas would move another, or the lane's bits, to a register for every pair; it
        # computes sums once.
        return LanePair(selector, (levels, i32(lane * i32(4) + zero)), (i32(one + zero), i32(larger + zero)))

    @device_function
    def widen_pair(word, next_word, scale, this):
        if bits == 4:
            codes = shift_right(word, this.selector)
        else:
            codes = select_bytes(word, next_word, this.selector)
        return values(codes, 0, scale, this.table, this.constants)

    return lane_pair, widen_pair


@functools.cache
def scale_function(form, element):
    """The device function that makes of a float32 scale what `widen` takes."""
    is_nf4, pack_two = form.name == "nf4", cvt_pack(element)

    @device_function
    def scale_of(scale):
        if is_nf4:
            return scale
        else:
            return pack_two(scale, scale)

    return scale_of
