"""SwiGLU and GeGLU (Shazeer 2020, eq. 5): the gate of a transformer's feed-forward block, forward and backward.

    out = gate * s * up                     s = 1 / (1 + exp(-z))

    silu                z = gate
    gelu_pytorch_tanh   z = 2 sqrt(2 / pi) (gate + 0.044715 gate^3), because (1 + tanh(z / 2)) / 2 = s

    dgate = dout * up * s * (1 + gate * (1 - s) * dz)   dup = dout * gate * s       dz: the derivative of z by gate

gate_up (N, 2F) holds [gate | up] in a row, as one GEMM leaves them; out and dout (N, F). float32, float16 or bfloat16,
arithmetic float32, one pass over memory. Kernels take s from two approximate instructions, good to some units in the
last place: the exact forms would need as long as the memory does.
"""

import functools

import numpy as np

from rlnumba.kernels.checks import FLOATS, check, check_all
from rlnumba.kernels.ptx.warp import (
    access_length,
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    reciprocal,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

# Threads of a block, and vectors of each half that a thread owns, and loads before it uses them: 384 a block, which is
# a row of Qwen3-0.6B (3,072 columns of 16 bits) or a quarter of one of Qwen3-8B.
THREADS, UNROLL = 128, 3
LOG2_E = np.float32(1.4426950408889634)
# By config.json's names of the activation of the gate.
SILU, GELU_TANH = ACTIVATIONS = "silu", "gelu_pytorch_tanh"
# z of GELU_TANH is gate (LINEAR + CUBIC gate^2).
LINEAR, CUBIC = np.float32(2 * (2 / np.pi) ** 0.5), np.float32(2 * (2 / np.pi) ** 0.5 * 0.044715)
# gate^2 from where on s is 0 or 1. z and dz are computed with at most this: infinite ones times 0 would be NaN.
LARGE_SQUARE = np.float32(1e4)
# Elements of out that NumPy computes at a time, so that its intermediate arrays stay in the cache: 1024 rows of
# 768 took 14.5 ms at once in the backward, and 1.9 ms in parts.
CHUNK = 32768


@device_function
def sigmoid(value):
    """1 / (1 + exp(-value)); exp is infinite and the result 0 far below zero."""
    return reciprocal(np.float32(1.0) + exp2(value * -LOG2_E))


@functools.cache
def activation_functions(activation):
    """(gate_sigmoid, slope): device functions (gate) -> s, and (gate, s) -> 1 + gate (1 - s) dz."""
    one, cubic = np.float32(1.0), np.float32(3.0) * CUBIC

    @device_function
    def gelu_sigmoid(gate):
        # One fused multiplication and addition: no compiler has a choice, and GEMMs with this have the same bits.
        return sigmoid(gate * cuda.fma(CUBIC, min(gate * gate, LARGE_SQUARE), LINEAR))

    @device_function
    def silu_slope(gate, s):
        return one + gate * (one - s)

    @device_function
    def gelu_slope(gate, s):
        return one + gate * (one - s) * cuda.fma(cubic, min(gate * gate, LARGE_SQUARE), LINEAR)

    return (sigmoid, silu_slope) if activation == SILU else (gelu_sigmoid, gelu_slope)


@specialize
def swiglu_kernel(vector, access, bounded, activation=SILU):
    """The kernel for rows whose columns a thread takes `vector` at a time, and memory `access` at a time.

    bounded: the last block of a row has columns beyond the end. activation: one of ACTIVATIONS.
    """
    gate_sigmoid, _ = activation_functions(activation)
    load, store = vector_access(vector, access, bounded)
    count, stride = UNROLL * vector, THREADS * vector

    # With these launch bounds ptxas starts all loads at once: 3.2 us instead of 3.9 for 256 rows on an H200.
    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, 1))
    def swiglu_kernel(gate_up, out):
        """gate_up (N, 2, F). A block owns THREADS * UNROLL vectors of a row, a thread every THREADS-th of them."""
        row, first = cuda.blockIdx.x, (cuda.blockIdx.y * UNROLL * THREADS + cuda.threadIdx.x) * vector
        gate_row, up_row, out_row = gate_up[row, 0], gate_up[row, 1], out[row]
        gate, up = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        for i in range(UNROLL):
            load(gate_row, first + i * stride, gate, i * vector)
            load(up_row, first + i * stride, up, i * vector)
        for i in range(UNROLL):
            for j in range(i * vector, (i + 1) * vector):
                up[j] = gate[j] * gate_sigmoid(gate[j]) * up[j]
            store(out_row, first + i * stride, up, i * vector)

    return swiglu_kernel


@specialize
def swiglu_backward_kernel(vector, access, bounded, out_over_dout, activation=SILU):
    """swiglu_kernel's backward, laid out the same. out_over_dout: whether the forward's out is written over dout."""
    gate_sigmoid, slope = activation_functions(activation)
    load, store = vector_access(vector, access, bounded)
    count, stride = UNROLL * vector, THREADS * vector

    @cuda.jit
    def swiglu_backward_kernel(dout, gate_up, dgate_up):
        """gate_up, dgate_up (N, 2, F), which may be one array; otherwise as swiglu_kernel."""
        row, first = cuda.blockIdx.x, (cuda.blockIdx.y * UNROLL * THREADS + cuda.threadIdx.x) * vector
        gate_row, up_row, dout_row = gate_up[row, 0], gate_up[row, 1], dout[row]
        dgate_row, dup_row = dgate_up[row, 0], dgate_up[row, 1]
        gate, up = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        upstream = cuda.local.array(count, np.float32)
        for i in range(UNROLL):
            load(gate_row, first + i * stride, gate, i * vector)
            load(up_row, first + i * stride, up, i * vector)
            load(dout_row, first + i * stride, upstream, i * vector)
        for i in range(UNROLL):
            for j in range(i * vector, (i + 1) * vector):
                s = gate_sigmoid(gate[j])
                activated = gate[j] * s * up[j]
                dgate = upstream[j] * up[j] * s * slope(gate[j], s)
                up[j] = upstream[j] * gate[j] * s
                gate[j] = dgate
                upstream[j] = activated
            store(dgate_row, first + i * stride, gate, i * vector)
            store(dup_row, first + i * stride, up, i * vector)
            if out_over_dout:
                store(dout_row, first + i * stride, upstream, i * vector)

    return swiglu_backward_kernel


def _launch(kernel_of, arrays, *options):
    """Launch a kernel of dout or out (N, F) and arrays [gate | up] (N, 2F), in any order."""
    columns = min(array.shape[1] for array in arrays)
    vector = 16 // arrays[0].itemsize
    block_columns = THREADS * UNROLL * vector
    kernel = kernel_of(vector, access_length(columns, *arrays), columns % block_columns != 0, *options)
    rows = [x if x.shape[1] == columns else x.reshape(len(x), 2, columns) for x in arrays]
    launch(kernel, (len(rows[0]), -(-columns // block_columns)), THREADS, *rows)


def check_activation(op, activation):
    """Raise ValueError unless it is one of ACTIVATIONS."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def swiglu(gate_up, out, activation=SILU):
    """out = activation(gate) * up, where gate and up are the halves of a row of gate_up.

    gate_up (N, 2F) of a floating dtype; out (N, F) of the same is written. activation: one of ACTIVATIONS. Raises
    ValueError for other arrays.
    """
    check_activation("swiglu", activation)
    rows, columns = check("swiglu", "out", out, (None, None), FLOATS)
    check("swiglu", "gate_up", gate_up, (rows, 2 * columns), (out.dtype,))
    if device.name() == "cpu":
        for part in _row_chunks(out):
            out[part] = swiglu_ref(gate_up[part], activation)
        return
    _launch(swiglu_kernel, (gate_up, out), activation)


def swiglu_backward(dout, gate_up, dgate_up, out_over_dout=False, activation=SILU):
    """The gradient of swiglu: dgate_up, whose halves are dgate and dup.

    dout (N, F), gate_up, dgate_up (N, 2F) of one floating dtype; dgate_up may be gate_up. out_over_dout: dout
    becomes what swiglu wrote to out, the same bits. activation: swiglu's. ValueError for other arrays.
    """
    check_activation("swiglu_backward", activation)
    rows, columns = check("swiglu_backward", "dout", dout, (None, None), FLOATS)
    check_all("swiglu_backward", (rows, 2 * columns), (dout.dtype,), gate_up=gate_up, dgate_up=dgate_up)
    if device.name() == "cpu":
        for part in _row_chunks(dout):
            gradient = swiglu_backward_ref(dout[part], gate_up[part], activation)
            if out_over_dout:
                dout[part] = swiglu_ref(gate_up[part], activation)
            dgate_up[part] = gradient
        return
    _launch(swiglu_backward_kernel, (dout, gate_up, dgate_up), out_over_dout, activation)


def _row_chunks(array):
    """Slices of rows with about CHUNK elements each."""
    rows, columns = array.shape
    step = max(1, CHUNK // max(columns, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def gate_ref(gate, activation):
    """(s, dz) of the gate, in its precision."""
    z, dz = gate, 1
    if activation == GELU_TANH:
        linear, cubic = gate.dtype.type(LINEAR), gate.dtype.type(CUBIC)
        square = np.minimum(gate**2, LARGE_SQUARE)
        z, dz = gate * (linear + cubic * square), linear + 3 * cubic * square
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z)), dz


def swiglu_ref(gate_up, activation=SILU):
    """out of swiglu, in gate_up's precision."""
    gate, up = np.split(gate_up, 2, axis=-1)
    if activation == SILU:
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up
    return gate * gate_ref(gate, activation)[0] * up


def swiglu_backward_ref(dout, gate_up, activation=SILU):
    """dgate_up of swiglu_backward, in gate_up's precision."""
    gate, up = np.split(gate_up, 2, axis=-1)
    s, dz = gate_ref(gate, activation)
    return np.concatenate([dout * up * s * (1 + gate * (1 - s) * dz), dout * gate * s], axis=-1)
