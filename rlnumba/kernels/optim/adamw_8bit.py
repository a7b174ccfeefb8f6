"""AdamW with moments of 8 bits an element (Dettmers et al. 2021, arXiv 2110.02861, "8-bit optimizers via block-wise
quantization").

The moments of BLOCK neighbouring elements share one float32, the largest magnitude among them; each element is the
nearest of 256 fractions of it:

    m = m_absmax code_m[q]                                          q = the nearest code of m / m_absmax
    dynamic code: 10^-e f,  e = 0 .. 6,  f = centres of 2^(6 - e) equal parts of [0.1, 1], with both signs; 0 and 1
    of v, never negative: 2^(7 - e) parts

so that small numbers have a relative error of a few percent over seven decades, and large ones one below a percent. The
step itself (kernels/optim/adamw.py) is float32, from the decoded moments; only what is kept is rounded. A positive v is
never kept as 0: the smallest code is 0.55e-6 of the largest v, and 0 would let m / (sqrt(v) + eps) explode. A moment of
which no element reaches 2^-126 is kept as 0.

The kernel finds a code by two reads of shared memory: the fraction's exponent and first bits of its mantissa, an
interval of numbers, say how many limits between neighbouring codes lie below the interval, and at most one lies in it.

One pass over memory: 18 bytes an element with a master copy and 16-bit weights, 16 with float32 weights, 12 with 16-bit
weights and no master; 2 less with 16-bit gradients.
"""

import functools
import math
from typing import NamedTuple

import numba
import numpy as np

from rlnumba.kernels.checks import F32, check, check_all, unused
from rlnumba.kernels.optim.adamw import (
    adamw_factors,
    adamw_ref,
    adamw_update,
    as_float32,
    check_step,
    check_weights,
    update_on_cpu,
)
from rlnumba.kernels.optim.stochastic_rounding import WEIGHTS, random_words, round_on_cpu, stochastic_bfloat16
from rlnumba.kernels.ptx.warp import (
    access_length,
    compiler_barrier,
    device_function,
    float_as_int,
    vector_access,
    warp_max,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Elements that share one float32 of each moment; bitsandbytes' choice, too.
BLOCK = 256
# A warp owns a block: its lanes own VECTOR elements of each of PARTS parts, so that accesses are contiguous.
THREADS, VECTOR, PARTS = 256, 4, 2
WARPS, PART = THREADS // 32, BLOCK // PARTS
# Thread blocks of an SM: each loads the tables once. A fourth would leave a thread fewer registers than it needs.
RESIDENT = 3
# A smaller largest magnitude counts as 0: its inverse could overflow.
TINY = np.float32(2.0**-126)
U8 = (np.dtype(np.uint8),)


def dynamic_code(signed):
    """The fractions of the largest magnitude that 8 bits stand for: (256,) float32, ascending."""
    found = [0.0, 1.0]
    for exponent in range(7):
        parts = 2 ** (6 - exponent if signed else 7 - exponent)
        centres = 10.0**-exponent * (0.1 + 0.9 * (np.arange(parts) + 0.5) / parts)
        found += [*centres, *-centres] if signed else [*centres]
    return np.sort(np.array(found)).astype(np.float32)


def midpoints(code):
    """The numbers at which the nearest code changes: (256,) float32, the last of them infinity."""
    between = (code[1:].astype(np.float64) + code[:-1]) / 2
    return np.append(between, np.inf).astype(np.float32)


# The codes of moments that are 0, by name.
ZERO_CODES = {name: int(np.searchsorted(dynamic_code(signed), 0.0)) for name, signed in (("m", True), ("v", False))}


def limits_of(signed):
    """Limits between neighbouring codes: a fraction's code is the number of limits below it: (256,) float32."""
    limits = midpoints(dynamic_code(signed))
    if not signed:
        # A positive fraction has a positive code.
        limits[0] = 0
    return limits


class Intervals(NamedTuple):
    """Intervals of magnitudes in [0, 1]: those of one exponent and the same first `bits` bits of the mantissa.

    The first one is [0, 2^lowest). count: how many there are, the last of them with 1 as its lower end.
    """

    bits: int
    lowest: int

    @property
    def shift(self):
        """Bits by which a float32 is shifted to the right: the bits that are left number the intervals."""
        return 23 - self.bits

    @property
    def first(self):
        """The largest number of the first interval, its bits shifted to the right by `shift`."""
        return ((127 + self.lowest) << self.bits) - 1

    @property
    def count(self):
        return ((127 << self.bits) - self.first) + 1

    def limits_below(self, signed):
        """Number of limits below all numbers of each interval, then, if signed, of each negative one: uint8."""
        starts = (np.arange(self.count + 1, dtype=np.int64) + self.first) << self.shift
        starts[0] = 0
        low, high = (ends.astype(np.int32).view(np.float32) for ends in (starts[:-1], starts[1:] - 1))
        limits = limits_of(signed)
        if signed:
            low, high = np.concatenate([low, -high]), np.concatenate([high, -low])
        below = np.searchsorted(limits, low)
        if (np.searchsorted(limits, high) - below).max() > 1:
            raise ValueError(f"adamw_8bit: {self} has two limits in an interval")
        return below.astype(np.uint8)


# Fewer bits, or a higher first exponent, and an interval has two limits. 2,692 and 2,690 bytes.
INTERVALS_M, INTERVALS_V = Intervals(6, -21), Intervals(7, -21)
COUNT_M = 2 * INTERVALS_M.count
COUNTS = COUNT_M + INTERVALS_V.count


@functools.cache
def _tables():
    """Arrays of the device: (4, 256) float32, codes and limits of m, of v; (COUNTS,) uint8, limits_below of both."""
    tables = device.asarray(np.stack([row for s in (True, False) for row in (dynamic_code(s), limits_of(s))]))
    below = device.asarray(np.concatenate([INTERVALS_M.limits_below(True), INTERVALS_V.limits_below(False)]))
    # Later launches may be on other streams.
    device.synchronize()
    return Codes(tables, below)


@numba.njit
def nearest_cpu(limits, value):
    """The number of limits, ascending, below a value: that of its nearest code, int32; of 0 for NaN."""
    if value != value:
        value = np.float32(0.0)
    found, step = 0, 128
    for _ in range(8):
        if limits[found + step - 1] < value:
            found += step
        step >>= 1
    return found


@functools.cache
def nearest_function(intervals, signed):
    """The device function that finds the nearest code of a fraction by its Intervals."""
    shift, first, count = np.int32(intervals.shift), np.int32(intervals.first), np.int32(intervals.count)

    @device_function
    def nearest(below, start, limits, value):
        """The number of limits below a value, int32; below[start:]: limits_below. NaN has the code of 0."""
        bits = float_as_int(value)
        interval = np.int32(max(np.int32(np.int32(bits & np.int32(0x7FFFFFFF)) >> shift), first) - first)
        # The bits of a NaN are beyond all intervals.
        if interval >= count:
            interval = np.int32(0)
        if signed and bits < np.int32(0):
            interval = np.int32(interval + count)
        found = np.int32(below[np.uint32(start + interval)])
        if limits[np.uint32(found)] < value:
            found = np.int32(found + np.int32(1))
        return found

    return nearest


class Moments(NamedTuple):
    """Quantized moments: m, v, the codes, and the largest magnitude of each block of BLOCK elements.

    Codes are uint8 (n,), ZERO_CODES before the first step; a kernel has them as int32 words of four. m_absmax, v_absmax
    (ceil(n / BLOCK),) float32, 0 before it.
    """

    m: object
    v: object
    m_absmax: object
    v_absmax: object


class Codes(NamedTuple):
    """The values of codes, and a table by which the nearest is found: the arrays of _tables."""

    tables: object
    below: object


@specialize
def adamw_8bit_kernel(access, bounded, has_master, rounds_weights):
    """The kernel that moves `access` elements of weights, master and gradients at a time.

    bounded: the last block has elements beyond the end. rounds_weights: weights are bfloat16 without a master, and
    rounded stochastically.
    """
    load, store = vector_access(VECTOR, access, bounded)
    count = PARTS * VECTOR
    nearest_m, nearest_v = nearest_function(INTERVALS_M, True), nearest_function(INTERVALS_V, False)

    # Bounded accesses need more registers.
    @cuda.jit(launch_bounds=(THREADS, RESIDENT - 1 if bounded else RESIDENT))
    def adamw_8bit_kernel(weights, master, grads, moments, codes, scalars, decay_end, noise, first_element):
        """A warp owns a block of BLOCK elements at a time. moments: Moments; codes: Codes.

        A lane loads all its elements before it computes. Nothing depends on the order of blocks.
        """
        shared = cuda.shared.array((4, 256), np.float32)
        shared_below = cuda.shared.array(COUNTS, np.uint8)
        thread = cuda.threadIdx.x
        for row in range(4):
            shared[row, thread] = codes.tables[row, thread]
        for i in range(thread, COUNTS, THREADS):
            shared_below[i] = codes.below[i]
        cuda.syncthreads()
        if not scalars[8] < np.float32(math.inf):
            return
        gradient, value = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        first, second = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        first_codes, second_codes = cuda.local.array(PARTS, np.int32), cuda.local.array(PARTS, np.int32)
        zero, one = np.float32(0.0), np.float32(1.0)
        factors, grad_scale = adamw_factors(scalars), scalars[7]
        lane, size, blocks = thread % 32, grads.shape[0], moments.m_absmax.shape[0]
        for number in range(cuda.blockIdx.x * WARPS + thread // 32, blocks, cuda.gridDim.x * WARPS):
            block = np.uint64(number)
            start = number * BLOCK + lane * VECTOR
            for part in range(PARTS):
                at = start + part * PART
                load(grads, at, gradient, part * VECTOR)
                load(master, at, value, part * VECTOR)
                first_codes[part] = second_codes[part] = np.int32(0)
                if not bounded or at < size:
                    word = np.uint64(at) // np.uint64(VECTOR)
                    first_codes[part], second_codes[part] = moments.m[word], moments.v[word]
            scale_m, scale_v = moments.m_absmax[block], moments.v_absmax[block]
            compiler_barrier()
            largest_m = largest_v = zero
            for part in range(PARTS):
                at = start + part * PART
                decaying = np.int32(max(min(decay_end - at, VECTOR), 0))
                for i in range(VECTOR):
                    j = part * VECTOR + i
                    code = np.uint32(first_codes[part] >> np.int32(8 * i)) & np.uint32(255)
                    moment = scale_m * shared[0, code]
                    code = np.uint32(second_codes[part] >> np.int32(8 * i)) & np.uint32(255)
                    variance = scale_v * shared[2, code]
                    if bounded and at >= size:
                        moment = variance = zero
                    first[j], second[j], value[j] = adamw_update(
                        gradient[j] * grad_scale, moment, variance, value[j], np.int32(i) < decaying, factors
                    )
                    largest_m, largest_v = max(largest_m, abs(first[j])), max(largest_v, second[j])
            largest_m, largest_v = warp_max(largest_m), warp_max(largest_v)
            inverse_m = inverse_v = zero
            if largest_m >= TINY:
                inverse_m = one / largest_m
            if largest_v >= TINY:
                inverse_v = one / largest_v
            if lane == 0:
                moments.m_absmax[block] = largest_m if largest_m >= TINY else zero
                moments.v_absmax[block] = largest_v if largest_v >= TINY else zero
            for part in range(PARTS):
                at = start + part * PART
                packed_m = packed_v = np.int32(0)
                for i in range(VECTOR):
                    j = part * VECTOR + i
                    code_of_m = nearest_m(shared_below, np.int32(0), shared[1], first[j] * inverse_m)
                    code_of_v = nearest_v(shared_below, np.int32(COUNT_M), shared[3], second[j] * inverse_v)
                    packed_m = np.int32(packed_m | np.int32(code_of_m << np.int32(8 * i)))
                    packed_v = np.int32(packed_v | np.int32(code_of_v << np.int32(8 * i)))
                if rounds_weights:
                    words = random_words(np.int64(first_element + at) // np.int64(VECTOR), WEIGHTS, noise)
                    for i in range(VECTOR):
                        value[part * VECTOR + i] = stochastic_bfloat16(value[part * VECTOR + i], words[i], 0)
                if not bounded or at < size:
                    word = np.uint64(at) // np.uint64(VECTOR)
                    moments.m[word], moments.v[word] = packed_m, packed_v
                store(master, at, value, part * VECTOR)
                if has_master:
                    store(weights, at, value, part * VECTOR)

    return adamw_8bit_kernel


@numba.njit(cache=True, parallel=True, error_model="numpy")
def _adamw_8bit_cpu(master, grads, m, v, m_absmax, v_absmax, tables, scalars, decay_end):
    """adamw_8bit_kernel on the cpu device."""
    for block in numba.prange(m_absmax.shape[0]):
        start, end = block * BLOCK, min((block + 1) * BLOCK, master.shape[0])
        first, second = np.empty(end - start, np.float32), np.empty(end - start, np.float32)
        largest_m = largest_v = np.float32(0.0)
        for i in range(end - start):
            at = start + i
            moment, variance = m_absmax[block] * tables[0, m[at]], v_absmax[block] * tables[2, v[at]]
            first[i], second[i], master[at] = update_on_cpu(
                grads[at], moment, variance, master[at], at < decay_end, scalars
            )
            largest_m, largest_v = max(largest_m, abs(first[i])), max(largest_v, second[i])
        inverse_m = np.float32(1.0) / largest_m if largest_m >= TINY else np.float32(0.0)
        inverse_v = np.float32(1.0) / largest_v if largest_v >= TINY else np.float32(0.0)
        m_absmax[block] = largest_m if largest_m >= TINY else np.float32(0.0)
        v_absmax[block] = largest_v if largest_v >= TINY else np.float32(0.0)
        for i in range(end - start):
            m[start + i] = nearest_cpu(tables[1], first[i] * inverse_m)
            v[start + i] = nearest_cpu(tables[3], second[i] * inverse_v)


def adamw_8bit(weights, master, grads, moments, scalars, decay_end, noise=None, first_element=0):
    """One AdamW step in place, with quantized moments.

    weights, master, grads, scalars, decay_end, noise and first_element as of adamw, n a multiple of 4 and first_element
    of BLOCK; moments: Moments. weights, master and moments are written. Raises ValueError for other shapes, dtypes or
    layouts. Source: Dettmers et al. 2021.
    """
    m, v, m_absmax, v_absmax = moments
    size, master, rounds_weights = check_weights("adamw_8bit", weights, master, noise)
    check("adamw_8bit", "grads", grads, (size,), (*F32, weights.dtype))
    check_all("adamw_8bit", (size,), U8, m=m, v=v)
    check_all("adamw_8bit", (-(-size // BLOCK),), F32, m_absmax=m_absmax, v_absmax=v_absmax)
    check_step("adamw_8bit", size, scalars, decay_end, first_element, BLOCK)
    if size % VECTOR:
        raise ValueError(f"adamw_8bit: the number of elements must be a multiple of {VECTOR}, got {size}")
    if device.name() == "cpu":
        if not scalars[8] < np.inf:
            return
        p = as_float32(master)
        _adamw_8bit_cpu(p, as_float32(grads), m, v, m_absmax, v_absmax, _tables().tables, scalars, decay_end)
        if rounds_weights:
            round_on_cpu(p, weights, noise, first_element, WEIGHTS, 0)
        elif weights is not master:
            weights[...] = master
        return
    access, bounded = min(access_length(size, weights, master, grads), VECTOR), size % BLOCK != 0
    kernel = adamw_8bit_kernel(access, bounded, weights is not master, rounds_weights)
    noise = unused(1, np.uint32) if noise is None else noise
    words = moments._replace(m=m.view(np.int32), v=v.view(np.int32))
    blocks = min(-(-len(m_absmax) // WARPS), RESIDENT * device.sm_count())
    launch(
        kernel, blocks, THREADS, weights, master, grads, words, _tables(), scalars, int(decay_end), noise,
        int(first_element),
    )  # fmt: skip


def quantize_ref(values, signed):
    """(codes (n,) uint8, absmax (blocks,)) of values (n,), in their precision."""
    code, padded = dynamic_code(signed), np.zeros(-(-len(values) // BLOCK) * BLOCK, values.dtype)
    padded[: len(values)] = values
    absmax = np.max(np.abs(padded.reshape(-1, BLOCK)), axis=1)
    absmax[absmax < TINY] = 0
    inverse = np.divide(1, absmax, where=absmax > 0, out=np.zeros_like(absmax)).astype(values.dtype)
    fractions = values * np.repeat(inverse, BLOCK)[: len(values)]
    codes = np.searchsorted(midpoints(code)[:-1], fractions)
    return (codes if signed else np.maximum(codes, fractions > 0)).astype(np.uint8), absmax


def dequantize_ref(codes, absmax, signed):
    """values (n,) of codes (n,) and absmax (blocks,), in the precision of absmax."""
    return dynamic_code(signed).astype(absmax.dtype)[codes] * np.repeat(absmax, BLOCK)[: len(codes)]


def adamw_8bit_ref(p, grads, m, v, m_absmax, v_absmax, scalars, decays):
    """(p, m, v, m_absmax, v_absmax) after one step, in the arrays' precision; m, v: codes."""
    moments = dequantize_ref(m, m_absmax, True), dequantize_ref(v, v_absmax, False)
    p, first, second = adamw_ref(p, grads, *moments, scalars, decays)
    (m, m_absmax), (v, v_absmax) = quantize_ref(first, True), quantize_ref(second, False)
    return p, m, v, m_absmax, v_absmax
