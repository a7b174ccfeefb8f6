"""Rounding to bfloat16 up or down at random, so that the expected result is the number itself.

    bits = float32 bits of x + r,  r uniform in [0, 2^16)       result: bits with the lower 16 cleared

So the bfloat16 further from zero is chosen with a probability of the remainder's share of the spacing, in steps of
2^-16, and what is a bfloat16 already stays. Small changes that rounding to nearest would lose arrive on average.
Nothing is added to a NaN: a GPU's, 0x7FFFFFFF, would overflow to -0.

r is a function of where and when the number is rounded, not of a state: Philox's counter is (n / 4, step, stream) for
element n, whose word is n % 4, of which one half is used; the key stands for the seed. A resumed run rounds alike.
"""

import numba
import numpy as np

from rlnumba.kernels.philox import noise_key, philox, philox_cpu
from rlnumba.kernels.ptx.warp import device_function, float_as_int, int_as_float

# Elements that share one counter.
GROUP = 4
# The last word of a counter: what is rounded. The lower halves of MOMENTS' words serve m, the upper ones v.
MOMENTS, WEIGHTS = 0, 1


def rounding_noise(seed, step):
    """The argument `noise` of operators that round: (3,) uint32 on the host, the key of a seed and the step."""
    return np.append(noise_key(seed, ()), np.uint32(step))


@device_function
def random_words(group, stream, noise):
    """Four uint32 for the elements of a group, an int64."""
    low, high = np.uint32(group & np.int64(0xFFFFFFFF)), np.uint32(group >> np.int64(32))
    return philox(low, high, noise[2], np.uint32(stream), noise[0], noise[1])


@device_function
def stochastic_bfloat16(value, word, shift):
    """A float32 rounded to one that is a bfloat16, by the 16 bits of a uint32 from bit `shift` on; a NaN stays one."""
    noise = np.int32(np.uint32(word >> np.uint32(shift)) & np.uint32(0xFFFF))
    if value != value:
        return value
    return int_as_float(np.int32(np.int32(float_as_int(value) + noise) & np.int32(-65536)))


@numba.njit(cache=True, parallel=True)
def _round_cpu(bits, out, noise, first, stream, shift):
    for index in numba.prange((bits.shape[0] + GROUP - 1) // GROUP):
        group = first // GROUP + index
        low, high = np.uint32(group & 0xFFFFFFFF), np.uint32(group >> 32)
        words = philox_cpu(low, high, noise[2], np.uint32(stream), noise[0], noise[1])
        for i in range(min(GROUP, bits.shape[0] - GROUP * index)):
            random = (np.uint64(words[i]) >> np.uint64(shift)) & np.uint64(0xFFFF)
            rounded = np.uint16((np.uint64(bits[GROUP * index + i]) + random) >> np.uint64(16))
            is_nan = np.uint32(bits[GROUP * index + i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[GROUP * index + i] = np.uint16(0x7FFF) if is_nan else rounded


def round_on_cpu(values, out, noise, first, stream, shift):
    """out = values, rounded: values (n,) float32, out (n,) bfloat16, of NumPy; first: the number of element 0."""
    _round_cpu(values.view(np.uint32), out.view(np.uint16), noise, first, stream, shift)


def stochastic_bfloat16_ref(values, random):
    """float32 values rounded to bfloat16 by random integers in [0, 2^16), in float64 as the definition says it."""
    values = np.asarray(values, np.float64)
    _, exponent = np.frexp(values)
    # bfloat16 has 8 significant bits; below 2^-126 its spacing stays.
    spacing = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    lower = np.floor(np.abs(values) / spacing)
    remainder = np.floor((np.abs(values) / spacing - lower) * 65536)
    return np.copysign((lower + (remainder + random >= 65536)) * spacing, values)
