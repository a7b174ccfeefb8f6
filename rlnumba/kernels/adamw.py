"""AdamW (Loshchilov and Hutter, 2019) over one flat buffer, with float32 master weights.

    g = grad_scale * grads
    m = beta1 m + (1 - beta1) g             m^ = m / (1 - beta1^t)
    v = beta2 v + (1 - beta2) g^2           v^ = v / (1 - beta2^t)
    p = p - lr (m^ / (sqrt(v^) + eps) + weight_decay p)

p is the master copy (n,) float32; weights (n,) float32, float16 or bfloat16 are p rounded; grads, m, v (n,) float32.
One pass over memory: 30 bytes an element with a 16-bit copy, 28 without. What changes from step to step is
read from the device, so that a captured graph stays valid.
"""

import math

import numba
import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all
from rlnumba.kernels.ptx.warp import access_length, compiler_barrier, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Threads of a block, and elements of each: 16 bytes of float32.
THREADS, VECTOR = 256, 4


@specialize
def adamw_kernel(access, bounded, has_master):
    """The kernel that moves `access` elements at a time; without a master copy, weights and master are one array.

    bounded: the last block has elements beyond the end.
    """
    load, store = vector_access(VECTOR, access, bounded)

    @cuda.jit
    def adamw_kernel(weights, master, grads, m, v, scalars, decay_end):
        """A thread owns VECTOR elements, and loads all it needs of them before it computes."""
        start = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * VECTOR
        gradient, value = cuda.local.array(VECTOR, np.float32), cuda.local.array(VECTOR, np.float32)
        first, second = cuda.local.array(VECTOR, np.float32), cuda.local.array(VECTOR, np.float32)
        load(grads, start, gradient, 0)
        load(m, start, first, 0)
        load(v, start, second, 0)
        load(master, start, value, 0)
        compiler_barrier()
        one = np.float32(1.0)
        learning_rate, complement1, complement2, epsilon = scalars[0], scalars[1], scalars[2], scalars[3]
        weight_decay, grad_scale = scalars[4], scalars[7]
        # Two divisions a thread, not two an element.
        inverse1, inverse2 = one / scalars[5], one / scalars[6]
        for i in range(VECTOR):
            gradient[i] *= grad_scale
            first[i] = (one - complement1) * first[i] + complement1 * gradient[i]
            second[i] = (one - complement2) * second[i] + complement2 * gradient[i] * gradient[i]
            step = first[i] * inverse1 / (math.sqrt(second[i] * inverse2) + epsilon)
            if start + i < decay_end:
                step += weight_decay * value[i]
            value[i] -= learning_rate * step
        store(m, start, first, 0)
        store(v, start, second, 0)
        store(master, start, value, 0)
        if has_master:
            store(weights, start, value, 0)

    return adamw_kernel


@numba.njit(cache=True, parallel=True, error_model="numpy")
def _adamw_cpu(master, grads, m, v, scalars, decay_end):
    """adamw_kernel on the cpu device, where NumPy would take fifteen passes over memory.

    No fastmath: every operation rounds by itself, so the bits do not depend on the number of threads.
    """
    one = np.float32(1.0)
    for i in numba.prange(master.shape[0]):
        gradient = grads[i] * scalars[7]
        m[i] = (one - scalars[1]) * m[i] + scalars[1] * gradient
        v[i] = (one - scalars[2]) * v[i] + scalars[2] * gradient * gradient
        step = m[i] / scalars[5] / (np.sqrt(v[i] / scalars[6]) + scalars[3])
        decay = scalars[4] if i < decay_end else np.float32(0.0)
        master[i] -= scalars[0] * (step + decay * master[i])


def adamw_scalars(learning_rate, beta1, beta2, epsilon, weight_decay, step, grad_scale=1.0):
    """The eight float32 that adamw reads, a NumPy array: step is t, 1 for the first.

    [lr, 1 - beta1, 1 - beta2, eps, weight_decay, 1 - beta1^t, 1 - beta2^t, grad_scale]. The complements are
    taken in double precision: 1 - float32(0.999) is wrong by 1.3e-5 of itself.
    """
    corrections = 1 - beta1**step, 1 - beta2**step
    values = (learning_rate, 1 - beta1, 1 - beta2, epsilon, weight_decay, *corrections, grad_scale)
    return np.array(values, np.float32)


def adamw(weights, master, grads, m, v, scalars, decay_end):
    """One AdamW step in place.

    weights (n,) of a floating dtype; master (n,) float32, or None if weights are float32 and their own master;
    grads, m, v (n,) float32; scalars (8,) float32 as adamw_scalars makes them. weights, master, m and v are
    written. Elements [0, decay_end) decay, the rest (biases, norms) do not. Raises ValueError for other shapes,
    dtypes or layouts. Source: Loshchilov and Hutter 2019, algorithm 2; as torch.optim.AdamW.
    """
    (size,) = check("adamw", "weights", weights, (None,), F32 if master is None else FLOATS)
    master = weights if master is None else master
    check_all("adamw", (size,), F32, master=master, grads=grads, m=m, v=v)
    check("adamw", "scalars", scalars, (8,), F32)
    if not 0 <= decay_end <= size:
        raise ValueError(f"adamw: decay_end must be in [0, {size}], got {decay_end}")
    if device.name() == "cpu":
        _adamw_cpu(master, grads, m, v, scalars, decay_end)
        if weights is not master:
            weights[...] = master
        return
    arrays, block_elements = (weights, master, grads, m, v), THREADS * VECTOR
    kernel = adamw_kernel(access_length(size, *arrays), size % block_elements != 0, weights is not master)
    launch(kernel, -(-size // block_elements), THREADS, *arrays, scalars, int(decay_end))


def adamw_ref(p, grads, m, v, scalars, decays):
    """(p, m, v) after one step, in the arrays' precision; decays: a bool, or one for each element."""
    lr, complement1, complement2, eps, weight_decay, correction1, correction2, grad_scale = scalars
    g = grads * grad_scale
    m = (1 - complement1) * m + complement1 * g
    v = (1 - complement2) * v + complement2 * g * g
    step = m / correction1 / (np.sqrt(v / correction2) + eps)
    return p - lr * (step + weight_decay * decays * p), m, v
