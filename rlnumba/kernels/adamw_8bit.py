"""AdamW with moments of 8 bits an element (Dettmers et al. 2021, arXiv 2110.02861, "8-bit optimizers via block-wise
quantization").

The moments of BLOCK neighbouring elements share one float32, the largest magnitude among them; each element is the
nearest of 256 fractions of it:

    m = m_absmax code_m[q]                                          q = the nearest code of m / m_absmax
    dynamic code: 10^-e f,  e = 0 .. 6,  f = centres of 2^(6 - e) equal parts of [0.1, 1], with both signs; 0 and 1
    of v, never negative: 2^(7 - e) parts

so that small numbers have a relative error of a few percent over seven decades, and large ones one below a percent. The
step itself (kernels/adamw.py) is float32, from the decoded moments; only what is kept is rounded. A positive v is never
kept as 0: the smallest code is 0.55e-6 of the largest v, and 0 would let m / (sqrt(v) + eps) explode. A moment of which
no element reaches 2^-126 is kept as 0.

One pass over memory: 20 bytes an element with a master copy and 16-bit weights, 16 without.
"""

import functools

import numba
import numpy as np

from rlnumba.kernels.adamw import (
    adamw_factors,
    adamw_ref,
    adamw_update,
    as_float32,
    check_step,
    check_weights,
    update_on_cpu,
)
from rlnumba.kernels.checks import F32, check, check_all, unused
from rlnumba.kernels.nn.stochastic_rounding import WEIGHTS, random_words, round_on_cpu, stochastic_bfloat16
from rlnumba.kernels.ptx.warp import access_length, compiler_barrier, device_function, vector_access, warp_max
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Elements that share one float32 of each moment; bitsandbytes' choice, too.
BLOCK = 256
# A warp owns a block: its lanes own VECTOR elements of each of PARTS parts, so that accesses are contiguous.
THREADS, VECTOR, PARTS = 256, 4, 2
WARPS, PART = THREADS // 32, BLOCK // PARTS
# Thread blocks for each SM: each loads the tables once.
BLOCKS_PER_SM = 8
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
    """Where the nearest code changes: (256,) float32, the last of them infinity."""
    between = (code[1:].astype(np.float64) + code[:-1]) / 2
    return np.append(between, np.inf).astype(np.float32)


# The codes of moments that are 0, by name.
ZERO_CODES = {name: int(np.searchsorted(dynamic_code(signed), 0.0)) for name, signed in (("m", True), ("v", False))}


@functools.cache
def _tables():
    """(4, 256) float32 on the device: code and midpoints of m, code and midpoints of v."""
    codes = dynamic_code(True), dynamic_code(False)
    tables = device.asarray(np.stack([row for code in codes for row in (code, midpoints(code))]))
    # Later launches may be on other streams.
    device.synchronize()
    return tables


def _make_nearest():
    def nearest(limits, value):
        """How many of the limits, ascending, are below a value: the number of its nearest code, int32."""
        found, step = np.int32(0), np.int32(128)
        for _ in range(8):
            if limits[np.uint32(found + step - np.int32(1))] < value:
                found = np.int32(found + step)
            step = np.int32(step >> np.int32(1))
        return found

    return nearest


nearest, nearest_cpu = device_function(_make_nearest()), numba.njit(_make_nearest())


@specialize
def adamw_8bit_kernel(access, has_master, rounds_weights):
    """The kernel that moves `access` elements of weights, master and gradients at a time.

    rounds_weights: weights are bfloat16 without a master, and rounded stochastically.
    """
    load, store = vector_access(VECTOR, access, True)
    count = PARTS * VECTOR

    @cuda.jit
    def adamw_8bit_kernel(
        weights, master, grads, m, v, m_absmax, v_absmax, tables, scalars, decay_end, noise, first_element
    ):
        """A warp owns a block of BLOCK elements at a time; m, v: int32 words of four codes.

        A lane loads all its elements before it computes. Nothing depends on the order of blocks.
        """
        shared = cuda.shared.array((4, 256), np.float32)
        thread = cuda.threadIdx.x
        for row in range(4):
            shared[row, thread] = tables[row, thread]
        cuda.syncthreads()
        gradient, value = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        first, second = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        first_codes, second_codes = cuda.local.array(PARTS, np.int32), cuda.local.array(PARTS, np.int32)
        zero, one = np.float32(0.0), np.float32(1.0)
        factors, grad_scale = adamw_factors(scalars), scalars[7]
        lane, size, blocks = thread % 32, grads.shape[0], m_absmax.shape[0]
        for block in range(cuda.blockIdx.x * WARPS + thread // 32, blocks, cuda.gridDim.x * WARPS):
            start = block * BLOCK + lane * VECTOR
            for part in range(PARTS):
                at = start + part * PART
                load(grads, at, gradient, part * VECTOR)
                load(master, at, value, part * VECTOR)
                first_codes[part] = second_codes[part] = np.int32(0)
                if at < size:
                    first_codes[part], second_codes[part] = m[at // VECTOR], v[at // VECTOR]
            scale_m, scale_v = m_absmax[block], v_absmax[block]
            compiler_barrier()
            largest_m = largest_v = zero
            for part in range(PARTS):
                at = start + part * PART
                for i in range(VECTOR):
                    j = part * VECTOR + i
                    code = np.uint32(first_codes[part] >> np.int32(8 * i)) & np.uint32(255)
                    moment = scale_m * shared[0, code]
                    code = np.uint32(second_codes[part] >> np.int32(8 * i)) & np.uint32(255)
                    variance = scale_v * shared[2, code]
                    if at >= size:
                        moment = variance = zero
                    first[j], second[j], value[j] = adamw_update(
                        gradient[j] * grad_scale, moment, variance, value[j], at + i < decay_end, factors
                    )
                    largest_m, largest_v = max(largest_m, abs(first[j])), max(largest_v, second[j])
            largest_m, largest_v = warp_max(largest_m), warp_max(largest_v)
            inverse_m = inverse_v = zero
            if largest_m >= TINY:
                inverse_m = one / largest_m
            if largest_v >= TINY:
                inverse_v = one / largest_v
            if lane == 0:
                m_absmax[block] = largest_m if largest_m >= TINY else zero
                v_absmax[block] = largest_v if largest_v >= TINY else zero
            for part in range(PARTS):
                at = start + part * PART
                packed_m = packed_v = np.int32(0)
                for i in range(VECTOR):
                    j = part * VECTOR + i
                    code_of_m = nearest(shared[1], first[j] * inverse_m)
                    fraction = second[j] * inverse_v
                    code_of_v = nearest(shared[3], fraction)
                    if fraction > zero and code_of_v == np.int32(0):
                        code_of_v = np.int32(1)
                    packed_m = np.int32(packed_m | np.int32(code_of_m << np.int32(8 * i)))
                    packed_v = np.int32(packed_v | np.int32(code_of_v << np.int32(8 * i)))
                if rounds_weights:
                    words = random_words(np.int64(first_element + at) // np.int64(VECTOR), WEIGHTS, noise)
                    for i in range(VECTOR):
                        value[part * VECTOR + i] = stochastic_bfloat16(value[part * VECTOR + i], words[i], 0)
                if at < size:
                    m[at // VECTOR], v[at // VECTOR] = packed_m, packed_v
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
            fraction = second[i] * inverse_v
            v[start + i] = max(nearest_cpu(tables[3], fraction), 1 if fraction > 0 else 0)


def adamw_8bit(
    weights, master, grads, m, v, m_absmax, v_absmax, scalars, decay_end, noise=None, first_element=0
):  # fmt: skip
    """One AdamW step in place, with quantized moments.

    weights, master, grads, scalars, decay_end, noise and first_element as of adamw, n a multiple of 4 and first_element
    of BLOCK; m, v (n,) uint8 codes, ZERO_CODES before the first step; m_absmax, v_absmax (ceil(n / BLOCK),) float32,
    0 before it. weights, master and the last four but scalars are written. Raises ValueError for other shapes, dtypes
    or layouts. Source: Dettmers et al. 2021.
    """
    size, master, rounds_weights = check_weights("adamw_8bit", weights, master, noise)
    check("adamw_8bit", "grads", grads, (size,), F32)
    check_all("adamw_8bit", (size,), U8, m=m, v=v)
    check_all("adamw_8bit", (-(-size // BLOCK),), F32, m_absmax=m_absmax, v_absmax=v_absmax)
    check_step("adamw_8bit", size, scalars, decay_end, first_element, BLOCK)
    if size % VECTOR:
        raise ValueError(f"adamw_8bit: the number of elements must be a multiple of {VECTOR}, got {size}")
    if device.name() == "cpu":
        p = as_float32(master)
        _adamw_8bit_cpu(p, grads, m, v, m_absmax, v_absmax, _tables(), scalars, decay_end)
        if rounds_weights:
            round_on_cpu(p, weights, noise, first_element, WEIGHTS, 0)
        elif weights is not master:
            weights[...] = master
        return
    access = access_length(size, weights, master, grads)
    kernel = adamw_8bit_kernel(access, weights is not master, rounds_weights)
    noise = unused(1, np.uint32) if noise is None else noise
    words = m.view(np.int32), v.view(np.int32)
    blocks = min(-(-len(m_absmax) // WARPS), BLOCKS_PER_SM * device.sm_count())
    state = *words, m_absmax, v_absmax, _tables()
    launch(kernel, blocks, THREADS, weights, master, grads, *state, scalars, int(decay_end), noise, int(first_element))


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
