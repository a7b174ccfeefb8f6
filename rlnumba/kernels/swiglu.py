"""SwiGLU (Shazeer, 2020): the gate of a transformer's feed-forward block, forward and backward.

    out = silu(gate) * up                   silu(z) = z * s(z),  s(z) = 1 / (1 + exp(-z))

    dgate = dout * up * s * (1 + gate * (1 - s))        dup = dout * gate * s

gate_up (N, 2F) holds [gate | up] in a row, as one matrix product leaves them; out and dout (N, F). float32,
float16 or bfloat16, arithmetic float32, one pass over memory.
"""

import math

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import FLOATS, check
from rlnumba.kernels.instructions import device_function, narrow, widen
from rlnumba.kernels.launch import launch

THREADS = 256
# Elements of out that NumPy computes at a time, so that its intermediate arrays stay in the cache: 1024 rows of
# 768 took 14.5 ms at once in the backward, and 1.9 ms in parts.
CHUNK = 32768


@device_function
def sigmoid(value):
    """1 / (1 + exp(-value)), written so that exp never overflows."""
    small = np.float32(math.exp(-abs(value)))
    if value >= np.float32(0.0):
        return np.float32(1.0) / (np.float32(1.0) + small)
    return small / (np.float32(1.0) + small)


@cuda.jit
def swiglu_kernel(gate_up, out):
    """A block owns a row, a thread every THREADS-th column."""
    row = cuda.blockIdx.x
    columns = out.shape[1]
    for column in range(cuda.threadIdx.x, columns, THREADS):
        gate = widen(gate_up[row, column])
        up = widen(gate_up[row, columns + column])
        out[row, column] = narrow(gate * sigmoid(gate) * up, out)


@cuda.jit
def swiglu_backward_kernel(dout, gate_up, dgate_up):
    """A block owns a row, a thread every THREADS-th column of gate and the same of up."""
    row = cuda.blockIdx.x
    columns = dout.shape[1]
    one = np.float32(1.0)
    for column in range(cuda.threadIdx.x, columns, THREADS):
        upstream = widen(dout[row, column])
        gate = widen(gate_up[row, column])
        up = widen(gate_up[row, columns + column])
        s = sigmoid(gate)
        dgate_up[row, column] = narrow(upstream * up * s * (one + gate * (one - s)), dgate_up)
        dgate_up[row, columns + column] = narrow(upstream * gate * s, dgate_up)


def swiglu(gate_up, out):
    """out = silu(gate) * up, where gate and up are the halves of a row of gate_up.

    gate_up (N, 2F) of a floating dtype; out (N, F) of the same is written. Raises ValueError for other
    shapes, dtypes or layouts. Source: Shazeer 2020, eq. 5.
    """
    rows, columns = check("swiglu", "out", out, (None, None), FLOATS)
    check("swiglu", "gate_up", gate_up, (rows, 2 * columns), (out.dtype,))
    if device.name() == "numpy":
        for part in _row_chunks(out):
            out[part] = swiglu_ref(gate_up[part])
        return
    launch(swiglu_kernel, rows, THREADS, gate_up, out)


def swiglu_backward(dout, gate_up, dgate_up):
    """The gradient of swiglu: dgate_up, whose halves are dgate and dup.

    dout (N, F), gate_up (N, 2F) of one floating dtype; dgate_up (N, 2F) is written and may be gate_up.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    rows, columns = check("swiglu_backward", "dout", dout, (None, None), FLOATS)
    check("swiglu_backward", "gate_up", gate_up, (rows, 2 * columns), (dout.dtype,))
    check("swiglu_backward", "dgate_up", dgate_up, (rows, 2 * columns), (dout.dtype,))
    if device.name() == "numpy":
        for part in _row_chunks(dout):
            dgate_up[part] = swiglu_backward_ref(dout[part], gate_up[part])
        return
    launch(swiglu_backward_kernel, rows, THREADS, dout, gate_up, dgate_up)


def _row_chunks(array):
    """Slices of rows with about CHUNK elements each."""
    rows, columns = array.shape
    step = max(1, CHUNK // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def swiglu_ref(gate_up):
    """out of swiglu, in gate_up's precision."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


def swiglu_backward_ref(dout, gate_up):
    """dgate_up of swiglu_backward, in gate_up's precision."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dout * up * s * (1 + gate * (1 - s)), dout * gate * s], axis=-1)
