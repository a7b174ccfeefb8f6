"""The sum that a shared expert's gate ends (Qwen3.5-MoE), forward and backward.

    out = x + (y + s(g) z)          s(g) = 1 / (1 + exp(-g))

    dz = dout * s(g)                dg = s(g) (1 - s(g)) sum_d dout[d] z[d]

x, y, z, out (N, D), g (N, 1): the residual stream, what the chosen experts gave, what the shared expert gave, and its
gate before the sigmoid. float32, float16 or bfloat16, arithmetic float32; the sigmoid, the product and each sum are
rounded. The gradients of x and y are dout. Source: transformers' Qwen3_5MoeSparseMoeBlock.
"""

import numpy as np

from rlnumba.kernels.checks import FLOATS, check, check_all
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.warp import (
    access_length,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    narrow,
    vector_access,
    warp_sum,
    widen,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

# Threads of a block of the forward, and warps of a block of the backward.
THREADS, LINES = 256, 8


@specialize
def gated_sum_kernel(columns, vector, access):
    """The kernel for rows of `columns` columns, which a thread takes `vector` at a time."""
    load, store = vector_access(vector, access)
    row_vectors = columns // vector

    @supports_pdl
    @cuda.jit
    def gated_sum_kernel(x, y, z, gate, out):
        """A thread owns a vector of a row."""
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        index = cuda.grid(1)
        if index >= x.shape[0] * row_vectors:
            return
        row, d = index // row_vectors, index % row_vectors * vector
        xs, ys = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        zs = cuda.local.array(vector, np.float32)
        load(x[row], d, xs, 0)
        load(y[row], d, ys, 0)
        load(z[row], d, zs, 0)
        s = widen(narrow(sigmoid(widen(gate[row, 0])), out))
        for i in range(vector):
            product = widen(narrow(s * zs[i], out))
            xs[i] += widen(narrow(ys[i] + product, out))
        store(out[row], d, xs, 0)

    return gated_sum_kernel


@specialize
def gated_sum_backward_kernel(vector, access, bounded):
    """The kernel for rows read in vectors of `vector` columns, moved `access` at a time.

    bounded: the last vectors of a row have columns beyond its end.
    """
    load, store = vector_access(vector, access, bounded)
    one = np.float32(1.0)

    @cuda.jit
    def gated_sum_backward_kernel(dout, z, gate, dz, dgate):
        """A warp owns a row; a block has LINES warps.

        Lane l adds the products of columns l * vector .. (l + 1) * vector - 1 of every 32 * vector, ascending; then the
        lanes are added by a butterfly.
        """
        upstream, zs = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        row = cuda.blockIdx.x * LINES + cuda.threadIdx.y
        if row >= z.shape[0]:
            return
        s, total = sigmoid(widen(gate[row, 0])), np.float32(0.0)
        rounded = widen(narrow(s, dz))
        for first in range(cuda.threadIdx.x * vector, z.shape[1], 32 * vector):
            load(dout[row], first, upstream, 0)
            load(z[row], first, zs, 0)
            for i in range(vector):
                total = cuda.fma(upstream[i], zs[i], total)
                upstream[i] *= rounded
            store(dz[row], first, upstream, 0)
        total = warp_sum(total)
        if cuda.threadIdx.x == 0:
            dgate[row, 0] = narrow(total * s * (one - s), dgate)

    return gated_sum_backward_kernel


def gated_sum(x, y, z, gate, out):
    """out = x + (y + sigmoid(gate) z).

    x, y, z, out (N, D), gate (N, 1) of one floating dtype; out is written and may be x, y or z. Raises ValueError for
    other arrays.
    """
    rows, columns = check("gated_sum", "x", x, (None, None), FLOATS)
    check_all("gated_sum", (rows, columns), (x.dtype,), y=y, z=z, out=out)
    check("gated_sum", "gate", gate, (rows, 1), (x.dtype,))
    if device.name() == "cpu":
        out[...] = gated_sum_ref(x, y, z, gate)
        return
    access, vector = access_length(columns, x, y, z, out), 16 // x.itemsize
    vector, access = (vector, access) if columns % vector == 0 else (1, 1)
    grid = -(-rows * (columns // vector) // THREADS)
    launch(gated_sum_kernel(columns, vector, access), grid, THREADS, x, y, z, gate, out)


def gated_sum_backward(dout, z, gate, dz, dgate):
    """The gradient of gated_sum by z and gate: dz, which may be z, and dgate are written.

    dout, z, dz (N, D), gate, dgate (N, 1) of one floating dtype. Raises ValueError for other arrays.
    """
    rows, columns = check("gated_sum_backward", "dout", dout, (None, None), FLOATS)
    check_all("gated_sum_backward", (rows, columns), (dout.dtype,), z=z, dz=dz)
    check_all("gated_sum_backward", (rows, 1), (dout.dtype,), gate=gate, dgate=dgate)
    if device.name() == "cpu":
        dz[...], dgate[...] = gated_sum_backward_ref(dout, z, gate)
        return
    vector = 16 // dout.itemsize
    kernel = gated_sum_backward_kernel(vector, access_length(columns, dout, z, dz), columns % (32 * vector) != 0)
    launch(kernel, -(-rows // LINES), (32, LINES), dout, z, gate, dz, dgate)


def _sigmoid_ref(gate):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-gate))


def gated_sum_ref(x, y, z, gate):
    """out of gated_sum, in the precision of its arguments."""
    return x + (y + _sigmoid_ref(gate) * z)


def gated_sum_backward_ref(dout, z, gate):
    """(dz, dgate) of gated_sum_backward, in the precision of its arguments; a row's sum depends on that row alone."""
    s = _sigmoid_ref(gate)
    return dout * s, np.sum(dout * z, axis=1, keepdims=True) * s * (1 - s)
