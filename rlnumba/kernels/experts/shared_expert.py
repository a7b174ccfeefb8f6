"""The shared expert of Qwen3.5: every token has it, times the sigmoid of a gate, forward and backward.

    z = x . weight        out = y + s(z) shared        s(z) = 1 / (1 + exp(-z))

    dshared = dout s      dz = (dout . shared) s (1 - s)      dx += dz weight      dweight += sum over rows of dz x

x, y, shared, out and the gradients (N, D), weight (1, D) in float32, float16 or bfloat16; z (N,) and dweight float32.
With 16 bits z, s, the product and the sum are each rounded, as transformers does. Dot products have one order
whatever N is. Source: transformers' Qwen3_5MoeSparseMoeBlock.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all
from rlnumba.kernels.experts.reference import shared_expert_backward_ref, shared_expert_ref
from rlnumba.kernels.experts.rows import add_scaled_function
from rlnumba.kernels.nn.rmsnorm import add_partials
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

# Warps of a block, each with a row of its own; threads of a block of columns.
LINES, THREADS = 4, 128
# Rows that a thread adds to dweight at least, and blocks of rows at most; both fix the order of its sum.
CHUNK_ROWS, MAX_CHUNKS = 64, 66


@specialize
def shared_expert_kernel(element, access, bounded):
    """The kernel of rows of dtype `element`, moved `access` at a time.

    bounded: the last vectors of a row have columns beyond its end.
    """
    vector = 4 if element == "float32" else 8
    load, store = vector_access(vector, access, bounded)
    add_scaled = add_scaled_function(element)

    @supports_pdl
    @cuda.jit
    def shared_expert_kernel(x, weight, y, shared, z, out):
        """A warp owns a row, a lane every 32nd vector of it; out may be y.

        The dot product: a lane over its columns, ascending; then the lanes by a butterfly.
        """
        values, others = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        row = cuda.blockIdx.x * LINES + cuda.threadIdx.y
        if row >= x.shape[0]:
            return
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        total, x_row, weight_row = np.float32(0.0), x[row], weight[0]
        y_row, shared_row, out_row = y[row], shared[row], out[row]
        for first in range(cuda.threadIdx.x * vector, x.shape[1], 32 * vector):
            load(x_row, first, values, 0)
            load(weight_row, first, others, 0)
            for i in range(vector):
                total = cuda.fma(values[i], others[i], total)
        total = widen(narrow(warp_sum(total), out))
        gate = widen(narrow(sigmoid(total), out))
        if cuda.threadIdx.x == 0:
            z[row] = total
        for first in range(cuda.threadIdx.x * vector, x.shape[1], 32 * vector):
            load(shared_row, first, values, 0)
            load(y_row, first, others, 0)
            add_scaled(gate, values, 0, others)
            store(out_row, first, others, 0)

    return shared_expert_kernel


@specialize
def shared_expert_backward_kernel(vector, access, bounded):
    """shared_expert_kernel's backward, laid out the same: all but the gradient of the weight."""
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def shared_expert_backward_kernel(dout, weight, shared, z, dshared, dx, dz):
        """dshared may be shared; dx +=."""
        values, upstream = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        row, one = cuda.blockIdx.x * LINES + cuda.threadIdx.y, np.float32(1.0)
        if row >= dout.shape[0]:
            return
        total, gate = np.float32(0.0), widen(narrow(sigmoid(z[row]), dshared))
        dout_row, weight_row, dx_row = dout[row], weight[0], dx[row]
        shared_row, dshared_row = shared[row], dshared[row]
        for first in range(cuda.threadIdx.x * vector, dout.shape[1], 32 * vector):
            load(dout_row, first, upstream, 0)
            load(shared_row, first, values, 0)
            for i in range(vector):
                total = cuda.fma(upstream[i], values[i], total)
                upstream[i] *= gate
            store(dshared_row, first, upstream, 0)
        slope = warp_sum(total) * gate * (one - gate)
        if cuda.threadIdx.x == 0:
            dz[row] = slope
        for first in range(cuda.threadIdx.x * vector, dout.shape[1], 32 * vector):
            load(weight_row, first, values, 0)
            load(dx_row, first, upstream, 0)
            for i in range(vector):
                upstream[i] = cuda.fma(slope, values[i], upstream[i])
            store(dx_row, first, upstream, 0)

    return shared_expert_backward_kernel


@cuda.jit
def gate_weight_gradient_kernel(x, dz, chunk_rows, partials):
    """partials[chunk] = the sums of chunk_rows rows of dz x; a thread owns a column, whose rows it adds ascending."""
    column, chunk = cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.blockIdx.y
    if column < x.shape[1]:
        total = np.float32(0.0)
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, x.shape[0])):
            total = cuda.fma(dz[row], widen(x[row, column]), total)
        partials[chunk, column] = total


def _check(op, x, weight, z, **arrays):
    """(N, D) of x; arrays: those of the same shape and dtype."""
    rows, columns = check(op, "x", x, (None, None), FLOATS)
    check(op, "weight", weight, (1, columns), (x.dtype,))
    check(op, "z", z, (rows,), F32)
    check_all(op, (rows, columns), (x.dtype,), **arrays)
    return rows, columns


def add_shared_expert(x, weight, y, shared, z, out):
    """out = y + sigmoid(z) shared with z = x . weight, row by row.

    x, y, shared (N, D) and weight (1, D) of one floating dtype; z (N,) float32 and out (N, D), which may be y, are
    written. Raises ValueError for other arrays.
    """
    rows, columns = _check("add_shared_expert", x, weight, z, y=y, shared=shared, out=out)
    if device.name() == "cpu":
        z[...], out[...] = shared_expert_ref(x, weight, y, shared)
        return
    access = access_length(columns, x, weight, y, shared, out)
    kernel = shared_expert_kernel(x.dtype.name, access, columns % (16 // x.itemsize) != 0)
    launch(kernel, -(-rows // LINES), (32, LINES), x, weight, y, shared, z, out)


def add_shared_expert_backward(dout, x, weight, shared, z, gradients, dweight):
    """The gradient of add_shared_expert; that of y is dout.

    gradients: (dshared, dx), dshared =, which may be shared, and dx +=; dweight (1, D) float32 +=, or None. dout and
    both gradients (N, D) of x's dtype; z as the forward wrote it. Raises ValueError for other arrays.
    """
    op, (dshared, dx) = "add_shared_expert_backward", gradients
    rows, columns = _check(op, x, weight, z, dout=dout, shared=shared, dshared=dshared, dx=dx)
    if dweight is not None:
        check(op, "dweight", dweight, (1, columns), F32)
    if device.name() == "cpu":
        dshared[...], of_x, of_weight = shared_expert_backward_ref(dout, x, weight, shared, z)
        dx += of_x
        if dweight is not None:
            dweight += of_weight
        return
    if not rows:
        return
    dz, vector = device.xp().empty(rows, np.float32), 16 // x.itemsize
    access = access_length(columns, dout, weight, shared, dshared, dx)
    kernel = shared_expert_backward_kernel(vector, access, columns % vector != 0)
    launch(kernel, -(-rows // LINES), (32, LINES), dout, weight, shared, z, dshared, dx, dz)
    if dweight is not None:
        chunk_rows = max(-(-rows // MAX_CHUNKS), CHUNK_ROWS)
        partials = device.xp().empty((-(-rows // chunk_rows), columns), np.float32)
        grid = -(-columns // THREADS), len(partials)
        launch(gate_weight_gradient_kernel, grid, THREADS, x, dz, chunk_rows, partials)
        add_partials(partials, dweight.reshape(-1))
