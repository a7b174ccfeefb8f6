"""AdamW (Loshchilov and Hutter, 2019) over one flat buffer, with float32 master weights.

    g = grad_scale * grads
    m = beta1 m + (1 - beta1) g             m^ = m / (1 - beta1^t)
    v = beta2 v + (1 - beta2) g^2           v^ = v / (1 - beta2^t)
    p = p - lr (m^ / (sqrt(v^) + eps) + weight_decay p)

p is the master copy (n,) float32; weights (n,) float32, float16 or bfloat16 are p rounded; grads (n,) of any of them;
m, v (n,) float32, or bfloat16, rounded stochastically (nn/stochastic_rounding.py). bfloat16 weights may do without a
master: then p is the weight itself, and rounded likewise. One pass over memory: 30 bytes an element with a 16-bit copy,
28 without, 22 with a copy and 16-bit moments, 16 with these and no master; 2 less with 16-bit gradients. Values that
change from step to step are read from the device, so that a captured graph stays valid.
"""

import math

import numba
import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, unused
from rlnumba.kernels.optim.stochastic_rounding import MOMENTS, WEIGHTS, random_words, round_on_cpu, stochastic_bfloat16
from rlnumba.kernels.ptx.warp import access_length, compiler_barrier, device_function, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Threads of a block, and elements of each: 16 bytes of float32.
THREADS, VECTOR = 256, 4
# Added to the norm that the gradient is divided by, as in torch.
CLIP_EPSILON = np.float32(1e-6)


BF16 = (device.DTYPES["bfloat16"],)


@device_function
def adamw_update(gradient, first, second, value, decays, factors):
    """(m, v, p) of one element after the step; gradient is scaled already. factors: of adamw_factors."""
    one = np.float32(1.0)
    learning_rate, complement1, complement2, epsilon, weight_decay, inverse1, inverse2 = factors
    first = (one - complement1) * first + complement1 * gradient
    second = (one - complement2) * second + complement2 * gradient * gradient
    step = first * inverse1 / (math.sqrt(second * inverse2) + epsilon)
    if decays:
        step += weight_decay * value
    return first, second, value - learning_rate * step


@device_function
def adamw_factors(scalars):
    """The factors that adamw_update reads, from adamw_scalars: two divisions a thread, not two an element."""
    one = np.float32(1.0)
    inverse1, inverse2 = one / scalars[5], one / scalars[6]
    return scalars[0], scalars[1], scalars[2], scalars[3], scalars[4], inverse1, inverse2


@specialize
def adamw_kernel(access, bounded, has_master, rounds_moments=False, rounds_weights=False):
    """The kernel that moves `access` elements at a time; without a master copy, weights and master are one array.

    bounded: the last block has elements beyond the end. rounds_moments, rounds_weights: m and v, or weights and master,
    are bfloat16 and rounded stochastically.
    """
    load, store = vector_access(VECTOR, access, bounded)

    @cuda.jit
    def adamw_kernel(weights, master, grads, m, v, scalars, decay_end, noise, first_element):
        """A thread owns VECTOR elements, and loads all it needs of them before it computes."""
        start = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * VECTOR
        gradient, value = cuda.local.array(VECTOR, np.float32), cuda.local.array(VECTOR, np.float32)
        first, second = cuda.local.array(VECTOR, np.float32), cuda.local.array(VECTOR, np.float32)
        load(grads, start, gradient, 0)
        load(m, start, first, 0)
        load(v, start, second, 0)
        load(master, start, value, 0)
        compiler_barrier()
        if not scalars[8] < np.float32(math.inf):
            return
        factors, grad_scale = adamw_factors(scalars), scalars[7]
        for i in range(VECTOR):
            first[i], second[i], value[i] = adamw_update(
                gradient[i] * grad_scale, first[i], second[i], value[i], start + i < decay_end, factors
            )
        group = np.int64(first_element + start) // np.int64(VECTOR)
        if rounds_moments:
            words = random_words(group, MOMENTS, noise)
            for i in range(VECTOR):
                first[i] = stochastic_bfloat16(first[i], words[i], 0)
                second[i] = stochastic_bfloat16(second[i], words[i], 16)
        if rounds_weights:
            words = random_words(group, WEIGHTS, noise)
            for i in range(VECTOR):
                value[i] = stochastic_bfloat16(value[i], words[i], 0)
        store(m, start, first, 0)
        store(v, start, second, 0)
        store(master, start, value, 0)
        if has_master:
            store(weights, start, value, 0)

    return adamw_kernel


@numba.njit
def update_on_cpu(gradient, first, second, value, decays, scalars):
    """adamw_update for loops that Numba compiles for the CPU; `gradient` as it is in memory.

    No fastmath: every operation rounds by itself, so the bits do not depend on the number of threads.
    """
    one = np.float32(1.0)
    gradient = gradient * scalars[7]
    first = (one - scalars[1]) * first + scalars[1] * gradient
    second = (one - scalars[2]) * second + scalars[2] * gradient * gradient
    step = first / scalars[5] / (np.sqrt(second / scalars[6]) + scalars[3])
    decay = scalars[4] if decays else np.float32(0.0)
    return first, second, value - scalars[0] * (step + decay * value)


@numba.njit(cache=True, parallel=True, error_model="numpy")
def _adamw_cpu(master, grads, m, v, scalars, decay_end):
    """adamw_kernel on the cpu device, where NumPy would take fifteen passes over memory."""
    for i in numba.prange(master.shape[0]):
        m[i], v[i], master[i] = update_on_cpu(grads[i], m[i], v[i], master[i], i < decay_end, scalars)


@cuda.jit
def clip_kernel(total, max_norm, scalars):
    """One thread."""
    scale = np.float32(1.0)
    if max_norm > np.float32(0.0):
        scale = min(scale, max_norm / (math.sqrt(total[0]) + CLIP_EPSILON))
    scalars[7] = scale
    scalars[8] = total[0]


def clip(total, max_norm, scalars):
    """Let the AdamW step that reads `scalars` clip the gradient, or write nothing if it is not finite.

    total (1,) float32: the gradient's sum of squares; scalars (9,) float32 of adamw_scalars, of which the last two are
    written: min(1, max_norm / (norm + 1e-6)), as torch's clip_grad_norm_, and total. max_norm 0: no clipping. Raises
    ValueError for other arrays.
    """
    check("clip", "total", total, (1,), F32)
    check("clip", "scalars", scalars, (9,), F32)
    if device.name() == "cpu":
        norm = math.sqrt(float(total[0]))
        scalars[7:] = min(1.0, max_norm / (norm + float(CLIP_EPSILON))) if max_norm else 1.0, total[0]
        return
    launch(clip_kernel, 1, 1, total, float(max_norm), scalars)


def adamw_scalars(learning_rate, beta1, beta2, epsilon, weight_decay, step, grad_scale=1.0):
    """The nine float32 that adamw reads, a NumPy array: step is t, 1 for the first.

    [lr, 1 - beta1, 1 - beta2, eps, weight_decay, 1 - beta1^t, 1 - beta2^t, grad_scale, 0]. If the last one is not
    finite when it is read, such as the gradient's sum of squares, nothing is written. The complements are taken in
    double precision: 1 - float32(0.999) is wrong by 1.3e-5 of itself.
    """
    corrections = 1 - beta1**step, 1 - beta2**step
    values = (learning_rate, 1 - beta1, 1 - beta2, epsilon, weight_decay, *corrections, grad_scale, 0.0)
    return np.array(values, np.float32)


def check_weights(op, weights, master, noise):
    """(size, what the step updates, whether it is rounded stochastically): of arrays as adamw takes them."""
    dtypes = FLOATS if master is not None else F32 if noise is None else (*F32, *BF16)
    (size,) = check(op, "weights", weights, (None,), dtypes)
    if master is not None:
        check(op, "master", master, (size,), F32)
    if noise is not None:
        check(op, "noise", noise, (3,), (np.dtype(np.uint32),))
    updated = weights if master is None else master
    return size, updated, updated.dtype != np.float32


def check_step(op, size, scalars, decay_end, first_element, multiple):
    """Raise ValueError unless these arguments of an AdamW step are valid."""
    check(op, "scalars", scalars, (9,), F32)
    if not 0 <= decay_end <= size:
        raise ValueError(f"{op}: decay_end must be in [0, {size}], got {decay_end}")
    if first_element < 0 or first_element % multiple:
        raise ValueError(f"{op}: first_element must be a multiple of {multiple}, got {first_element}")


def as_float32(array):
    """The array itself, or a float32 copy of a bfloat16 one, on the cpu device."""
    return array if array.dtype == np.float32 else array.astype(np.float32)


def adamw(weights, master, grads, moments, scalars, decay_end, noise=None, first_element=0):
    """One AdamW step in place.

    weights (n,) of a floating dtype; master (n,) float32, or None if weights are their own master: float32, or
    bfloat16; grads (n,) float32 or of weights' dtype; moments: m, v (n,) float32 or bfloat16; scalars (9,) float32 as
    adamw_scalars makes them; noise (3,) uint32, rounding_noise on the device, which bfloat16 moments or masters need;
    first_element: the number of element 0 for that noise, a multiple of 4. weights, master, m and v are written.
    Elements [0, decay_end) decay, the rest (biases, norms) do not. Raises ValueError for other shapes, dtypes or
    layouts. Source: Loshchilov and Hutter 2019, algorithm 2; as torch.optim.AdamW.
    """
    m, v = moments
    size, master, rounds_weights = check_weights("adamw", weights, master, noise)
    check("adamw", "grads", grads, (size,), (*F32, weights.dtype))
    check("adamw", "m", m, (size,), F32 if noise is None else (*F32, *BF16))
    check("adamw", "v", v, (size,), (m.dtype,))
    check_step("adamw", size, scalars, decay_end, first_element, VECTOR)
    rounds_moments = m.dtype != np.float32
    if device.name() == "cpu":
        if not scalars[8] < np.inf:
            return
        p, g, m32, v32 = map(as_float32, (master, grads, m, v))
        _adamw_cpu(p, g, m32, v32, scalars, decay_end)
        if rounds_moments:
            round_on_cpu(m32, m, noise, first_element, MOMENTS, 0)
            round_on_cpu(v32, v, noise, first_element, MOMENTS, 16)
        if rounds_weights:
            round_on_cpu(p, weights, noise, first_element, WEIGHTS, 0)
        elif weights is not master:
            weights[...] = master
        return
    arrays, block_elements = (weights, master, grads, m, v), THREADS * VECTOR
    access, bounded = min(access_length(size, *arrays), VECTOR), size % block_elements != 0
    kernel = adamw_kernel(access, bounded, weights is not master, rounds_moments, rounds_weights)
    noise = unused(1, np.uint32) if noise is None else noise
    blocks = -(-size // block_elements)
    launch(kernel, blocks, THREADS, *arrays, scalars, int(decay_end), noise, int(first_element))


def adamw_ref(p, grads, m, v, scalars, decays):
    """(p, m, v) after one step, in the arrays' precision; decays: a bool, or one for each element."""
    lr, complement1, complement2, eps, weight_decay, correction1, correction2, grad_scale, _ = scalars
    g = grads * grad_scale
    m = (1 - complement1) * m + complement1 * g
    v = (1 - complement2) * v + complement2 * g * g
    step = m / correction1 / (np.sqrt(v / correction2) + eps)
    return p - lr * (step + weight_decay * decays * p), m, v
