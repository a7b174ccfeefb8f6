"""RMSNorm (Zhang and Sennrich, 2019, eq. 4), forward and backward, alone or after a residual addition.

    rstd = 1 / sqrt(mean(x^2) + eps)        out = x * rstd * weight

    with g = dout * weight and x^ = x * rstd:
    dx = rstd * (g - x^ * mean(g * x^))     dweight = sum over rows of dout * x^

x, out, dout, dx (N, D) in float32, float16 or bfloat16; weight (D,) in the same; rstd (N,) and dweight (D,)
float32. All arithmetic is float32. A row's sum of squares is taken by the same threads in the same order
whatever N is, so a row's result does not depend on the other rows.
"""

import math

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import F32, FLOATS, check
from rlnumba.kernels.instructions import block_sum, narrow, widen
from rlnumba.kernels.launch import launch

# Threads that share a row. Part of the arithmetic: it fixes the order of the sum over D.
THREADS = 128
# Rows whose contributions to dweight one block adds up before they leave the chip.
ROWS_PER_BLOCK = 16


@cuda.jit
def rmsnorm_kernel(x, weight, eps, out, rstd):
    """A block owns a row, a thread every THREADS-th column. Two passes: sum of squares, then the output."""
    scratch = cuda.shared.array(32, np.float32)
    row = cuda.blockIdx.x
    columns = x.shape[1]
    squares = np.float32(0.0)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        value = widen(x[row, column])
        squares += value * value
    mean = block_sum(squares, scratch) / np.float32(columns)
    scale = np.float32(1.0) / math.sqrt(mean + eps)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        out[row, column] = narrow(widen(x[row, column]) * scale * widen(weight[column]), out)
    if cuda.threadIdx.x == 0:
        rstd[row] = scale


@cuda.jit
def rmsnorm_residual_kernel(x, residual, weight, eps, out, rstd):
    """As rmsnorm_kernel, of residual + x, which is stored back rounded and normalised as stored."""
    scratch = cuda.shared.array(32, np.float32)
    row = cuda.blockIdx.x
    columns = x.shape[1]
    squares = np.float32(0.0)
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        stored = narrow(widen(residual[row, column]) + widen(x[row, column]), residual)
        residual[row, column] = stored
        value = widen(stored)
        squares += value * value
    mean = block_sum(squares, scratch) / np.float32(columns)
    scale = np.float32(1.0) / math.sqrt(mean + eps)
    # Each thread reads back only what it wrote itself.
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        out[row, column] = narrow(widen(residual[row, column]) * scale * widen(weight[column]), out)
    if cuda.threadIdx.x == 0:
        rstd[row] = scale


@cuda.jit
def rmsnorm_backward_kernel(dout, x, weight, rstd, accumulate, dx, partials):
    """A block owns ROWS_PER_BLOCK rows, one after the other, and their sum in partials (blocks, D).

    Per row two passes: mean(g x^), then dx. A thread owns the same columns in every row, so it adds its
    columns of dout * x^ over the rows in their order, without a float atomic.
    """
    scratch = cuda.shared.array(32, np.float32)
    rows, columns = x.shape
    first = cuda.blockIdx.x * ROWS_PER_BLOCK
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        partials[cuda.blockIdx.x, column] = np.float32(0.0)
    for row in range(first, min(first + ROWS_PER_BLOCK, rows)):
        scale = rstd[row]
        projection = np.float32(0.0)
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            gradient = widen(dout[row, column]) * widen(weight[column])
            projection += gradient * widen(x[row, column]) * scale
        projection = block_sum(projection, scratch) / np.float32(columns)
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            upstream = widen(dout[row, column])
            normalised = widen(x[row, column]) * scale
            value = scale * (upstream * widen(weight[column]) - normalised * projection)
            if accumulate:
                value += widen(dx[row, column])
            dx[row, column] = narrow(value, dx)
            partials[cuda.blockIdx.x, column] += upstream * normalised


@cuda.jit
def add_partials_kernel(partials, total):
    """total += the sum of the rows of partials, in their order; a thread owns a column."""
    column = cuda.grid(1)
    if column < total.shape[0]:
        value = total[column]
        for block in range(partials.shape[0]):
            value += partials[block, column]
        total[column] = value


def rmsnorm(x, weight, eps, out, rstd):
    """out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), row by row.

    x (N, D), weight (D,) of one floating dtype; out (N, D) of x's dtype and rstd (N,) float32 are written.
    Raises ValueError for other shapes, dtypes or layouts. Source: Zhang and Sennrich 2019, eq. 4.
    """
    rows, columns = check("rmsnorm", "x", x, (None, None), FLOATS)
    check("rmsnorm", "weight", weight, (columns,), (x.dtype,))
    check("rmsnorm", "out", out, (rows, columns), (x.dtype,))
    check("rmsnorm", "rstd", rstd, (rows,), F32)
    if device.name() == "numpy":
        out[...], rstd[...] = rmsnorm_ref(x, weight, eps)
        return
    launch(rmsnorm_kernel, rows, THREADS, x, weight, float(eps), out, rstd)


def rmsnorm_residual(x, residual, weight, eps, out, rstd):
    """residual += x, then rmsnorm of residual: the step between two blocks of a transformer.

    x, residual, out (N, D) and weight (D,) of one floating dtype, rstd (N,) float32. residual, out and
    rstd are written. The norm sees the sum as it is stored, rounded to its dtype. Raises as rmsnorm.
    """
    rows, columns = check("rmsnorm_residual", "x", x, (None, None), FLOATS)
    check("rmsnorm_residual", "residual", residual, (rows, columns), (x.dtype,))
    check("rmsnorm_residual", "weight", weight, (columns,), (x.dtype,))
    check("rmsnorm_residual", "out", out, (rows, columns), (x.dtype,))
    check("rmsnorm_residual", "rstd", rstd, (rows,), F32)
    if device.name() == "numpy":
        residual += x
        out[...], rstd[...] = rmsnorm_ref(residual, weight, eps)
        return
    launch(rmsnorm_residual_kernel, rows, THREADS, x, residual, weight, float(eps), out, rstd)


def rmsnorm_backward(dout, x, weight, rstd, dx, dweight, accumulate=False):
    """The gradient of rmsnorm: dx = (or += if accumulate), dweight +=.

    dout, x, dx (N, D) and weight (D,) of one floating dtype; rstd (N,) as the forward wrote it; dweight (D,)
    float32. For rmsnorm_residual, x is the residual after the addition, and dx the gradient of both terms.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    rows, columns = check("rmsnorm_backward", "x", x, (None, None), FLOATS)
    check("rmsnorm_backward", "dout", dout, (rows, columns), (x.dtype,))
    check("rmsnorm_backward", "weight", weight, (columns,), (x.dtype,))
    check("rmsnorm_backward", "rstd", rstd, (rows,), F32)
    check("rmsnorm_backward", "dx", dx, (rows, columns), (x.dtype,))
    check("rmsnorm_backward", "dweight", dweight, (columns,), F32)
    if device.name() == "numpy":
        row_gradient, weight_gradient = rmsnorm_backward_ref(dout, x, weight, rstd)
        dx[...] = dx + row_gradient if accumulate else row_gradient
        dweight += weight_gradient
        return
    blocks = -(-rows // ROWS_PER_BLOCK)
    partials = device.xp().empty((blocks, columns), np.float32)
    launch(rmsnorm_backward_kernel, blocks, THREADS, dout, x, weight, rstd, int(accumulate), dx, partials)
    if blocks:
        launch(add_partials_kernel, -(-columns // THREADS), THREADS, partials, dweight)


def rmsnorm_ref(x, weight, eps):
    """(out, rstd) of rmsnorm, in x's precision."""
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1) + x.dtype.type(eps))
    return x * rstd[:, None] * weight, rstd


def rmsnorm_backward_ref(dout, x, weight, rstd):
    """(dx, dweight) of rmsnorm, in x's precision."""
    normalised = x * rstd[:, None]
    g = dout * weight
    dx = rstd[:, None] * (g - normalised * np.mean(g * normalised, axis=-1, keepdims=True))
    return dx, np.sum(dout * normalised, axis=0)
