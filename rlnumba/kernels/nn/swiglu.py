"""SwiGLU (Shazeer 2020, eq. 5): the gate of a transformer's feed-forward block, forward and backward.

    out = silu(gate) * up                   silu(z) = z * s(z),  s(z) = 1 / (1 + exp(-z))

    dgate = dout * up * s * (1 + gate * (1 - s))        dup = dout * gate * s

gate_up (N, 2F) holds [gate | up] in a row, as one GEMM leaves them; out and dout (N, F). float32, float16 or bfloat16,
arithmetic float32, one pass over memory. Kernels take s from two approximate instructions, good to some units in the
last place: the exact forms would need as long as the memory does.
"""

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
# Elements of out that NumPy computes at a time, so that its intermediate arrays stay in the cache: 1024 rows of
# 768 took 14.5 ms at once in the backward, and 1.9 ms in parts.
CHUNK = 32768


@device_function
def sigmoid(value):
    """1 / (1 + exp(-value)); exp is infinite and the result 0 far below zero."""
    return reciprocal(np.float32(1.0) + exp2(value * -LOG2_E))


@specialize
def swiglu_kernel(vector, access, bounded):
    """The kernel for rows whose columns a thread takes `vector` at a time, and memory `access` at a time.

    bounded: the last block of a row has columns beyond the end.
    """
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
                up[j] = gate[j] * sigmoid(gate[j]) * up[j]
            store(out_row, first + i * stride, up, i * vector)

    return swiglu_kernel


@specialize
def swiglu_backward_kernel(vector, access, bounded, out_over_dout):
    """swiglu_kernel's backward, laid out the same. out_over_dout: whether the forward's out is written over dout."""
    load, store = vector_access(vector, access, bounded)
    count, stride = UNROLL * vector, THREADS * vector

    @cuda.jit
    def swiglu_backward_kernel(dout, gate_up, dgate_up):
        """gate_up, dgate_up (N, 2, F), which may be one array; otherwise as swiglu_kernel."""
        row, first = cuda.blockIdx.x, (cuda.blockIdx.y * UNROLL * THREADS + cuda.threadIdx.x) * vector
        gate_row, up_row, dout_row = gate_up[row, 0], gate_up[row, 1], dout[row]
        dgate_row, dup_row = dgate_up[row, 0], dgate_up[row, 1]
        gate, up = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        upstream, one = cuda.local.array(count, np.float32), np.float32(1.0)
        for i in range(UNROLL):
            load(gate_row, first + i * stride, gate, i * vector)
            load(up_row, first + i * stride, up, i * vector)
            load(dout_row, first + i * stride, upstream, i * vector)
        for i in range(UNROLL):
            for j in range(i * vector, (i + 1) * vector):
                s = sigmoid(gate[j])
                activated = gate[j] * s * up[j]
                dgate = upstream[j] * up[j] * s * (one + gate[j] * (one - s))
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


def swiglu(gate_up, out):
    """out = silu(gate) * up, where gate and up are the halves of a row of gate_up.

    gate_up (N, 2F) of a floating dtype; out (N, F) of the same is written. Raises ValueError for other arrays.
    """
    rows, columns = check("swiglu", "out", out, (None, None), FLOATS)
    check("swiglu", "gate_up", gate_up, (rows, 2 * columns), (out.dtype,))
    if device.name() == "cpu":
        for part in _row_chunks(out):
            out[part] = swiglu_ref(gate_up[part])
        return
    _launch(swiglu_kernel, (gate_up, out))


def swiglu_backward(dout, gate_up, dgate_up, out_over_dout=False):
    """The gradient of swiglu: dgate_up, whose halves are dgate and dup.

    dout (N, F), gate_up, dgate_up (N, 2F) of one floating dtype; dgate_up may be gate_up. out_over_dout: dout
    becomes what swiglu wrote to out, the same bits. ValueError for other arrays.
    """
    rows, columns = check("swiglu_backward", "dout", dout, (None, None), FLOATS)
    check_all("swiglu_backward", (rows, 2 * columns), (dout.dtype,), gate_up=gate_up, dgate_up=dgate_up)
    if device.name() == "cpu":
        for part in _row_chunks(dout):
            gradient = swiglu_backward_ref(dout[part], gate_up[part])
            if out_over_dout:
                dout[part] = swiglu_ref(gate_up[part])
            dgate_up[part] = gradient
        return
    _launch(swiglu_backward_kernel, (dout, gate_up, dgate_up), out_over_dout)


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
