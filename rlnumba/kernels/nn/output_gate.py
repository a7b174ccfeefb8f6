"""The gate of attention's output (Qwen3.5): each element times the sigmoid of its gate, forward and backward.

    out = attended * s(gate)        s(z) = 1 / (1 + exp(-z))

    dattended = dout * s            dgate = dout * attended * s * (1 - s)

attended, out, dout (N, H, E); query head h's gate is head 2 h + 1 of qkv (N, (2 H + 2 HK) E), as the projection leaves
them. float32, float16 or bfloat16, arithmetic float32, one rounding. Source: transformers' Qwen3_5Attention.
"""

import numpy as np

from rlnumba.kernels.checks import FLOATS, check
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.warp import (
    access_length,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

THREADS = 256


@specialize
def output_gate_kernel(heads, width, vector, access):
    """The kernel for `heads` heads of `width` elements, which a thread takes `vector` at a time."""
    load, store = vector_access(vector, access)
    head_vectors = width // vector

    @supports_pdl
    @cuda.jit
    def output_gate_kernel(attended, qkv, out):
        """attended, out (N * H, E), qkv (N, heads of a row, E). A thread owns a vector of a head."""
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        index = cuda.grid(1)
        if index >= attended.shape[0] * head_vectors:
            return
        row, e = index // head_vectors, index % head_vectors * vector
        values, gates = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        load(attended[row], e, values, 0)
        load(qkv[row // heads, row % heads * 2 + 1], e, gates, 0)
        for i in range(vector):
            values[i] *= sigmoid(gates[i])
        store(out[row], e, values, 0)

    return output_gate_kernel


@specialize
def output_gate_backward_kernel(heads, width, vector, access):
    """output_gate_kernel's backward, laid out the same."""
    load, store = vector_access(vector, access)
    head_vectors, one = width // vector, np.float32(1.0)

    @cuda.jit
    def output_gate_backward_kernel(dout, attended, qkv, dattended, dqkv):
        """dattended may be dout."""
        index = cuda.grid(1)
        if index >= attended.shape[0] * head_vectors:
            return
        row, e = index // head_vectors, index % head_vectors * vector
        token, place = row // heads, row % heads * 2 + 1
        values, gates, upstream = (
            cuda.local.array(vector, np.float32),
            cuda.local.array(vector, np.float32),
            cuda.local.array(vector, np.float32),
        )
        load(attended[row], e, values, 0)
        load(qkv[token, place], e, gates, 0)
        load(dout[row], e, upstream, 0)
        for i in range(vector):
            s = sigmoid(gates[i])
            gates[i] = upstream[i] * values[i] * s * (one - s)
            upstream[i] *= s
        store(dattended[row], e, upstream, 0)
        store(dqkv[token, place], e, gates, 0)

    return output_gate_backward_kernel


def _check(op, attended, qkv):
    """(N, H, E) of attended, whose gates are in qkv."""
    rows, heads, width = check(op, "attended", attended, (None, None, None), FLOATS)
    _, columns = check(op, "qkv", qkv, (rows, None), (attended.dtype,))
    if columns % width or columns // width <= 2 * heads:
        raise ValueError(f"{op}: qkv must have the {2 * heads} heads and gates of {width} columns, then k and v")
    return rows, heads, width


def _launch(kernel_of, heads_of, rows_of, order):
    """Launch a kernel of arrays (N, H, E) and (N, columns), in the order of their names."""
    (rows, heads, width), arrays = next(iter(heads_of.values())).shape, {}
    for name, array in heads_of.items():
        arrays[name] = array.reshape(rows * heads, width)
    for name, array in rows_of.items():
        arrays[name] = array.reshape(rows, -1, width)
    access = access_length(width, *arrays.values())
    vector = 16 // arrays[order[0]].itemsize
    vector, access = (vector, access) if width % vector == 0 else (1, 1)
    grid = -(-rows * heads * width // vector // THREADS)
    launch(kernel_of(heads, width, vector, access), grid, THREADS, *(arrays[name] for name in order))


def output_gate(attended, qkv, out):
    """out = attended * sigmoid(gate).

    attended, out (N, H, E) and qkv (N, (2 H + 2 HK) E) of one floating dtype; out is written and may be attended.
    Raises ValueError for other arrays.
    """
    rows, heads, width = _check("output_gate", attended, qkv)
    check("output_gate", "out", out, attended.shape, (attended.dtype,))
    if device.name() == "cpu":
        out[...] = output_gate_ref(attended, qkv)
    elif rows:
        _launch(output_gate_kernel, {"attended": attended, "out": out}, {"qkv": qkv}, ("attended", "qkv", "out"))


def output_gate_backward(dout, attended, qkv, dattended, dqkv):
    """The gradient of output_gate: dattended, which may be dout, and in dqkv the columns of the gates.

    dout, attended, dattended (N, H, E) and qkv, dqkv (N, (2 H + 2 HK) E) of one floating dtype. Raises ValueError for
    other arrays.
    """
    op = "output_gate_backward"
    rows, heads, width = _check(op, attended, qkv)
    for name, array in (("dout", dout), ("dattended", dattended)):
        check(op, name, array, attended.shape, (attended.dtype,))
    check(op, "dqkv", dqkv, qkv.shape, (attended.dtype,))
    if device.name() == "cpu":
        dattended[...], _gates(dqkv, heads, width)[...] = output_gate_backward_ref(dout, attended, qkv)
    elif rows:
        of_heads = {"dout": dout, "attended": attended, "dattended": dattended}
        order = "dout", "attended", "qkv", "dattended", "dqkv"
        _launch(output_gate_backward_kernel, of_heads, {"qkv": qkv, "dqkv": dqkv}, order)


def _gates(qkv, heads, width):
    """The view (N, H, E) of the gates."""
    return qkv.reshape(len(qkv), qkv.shape[1] // width, width)[:, 1 : 2 * heads : 2]


def output_gate_ref(attended, qkv):
    """out of output_gate, in the precision of its arguments."""
    with np.errstate(over="ignore"):
        return attended / (1 + np.exp(-_gates(qkv, *attended.shape[1:])))


def output_gate_backward_ref(dout, attended, qkv):
    """(dattended, dgate (N, H, E)) of output_gate_backward, in the precision of its arguments."""
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-_gates(qkv, *attended.shape[1:])))
    return dout * s, dout * attended * s * (1 - s)
