"""RMSNorm (Zhang and Sennrich, 2019, eq. 4), forward and backward, alone or after a residual addition.

    rstd = 1 / sqrt(mean(x^2) + eps)        out = x * rstd * weight

    with g = dout * weight and x^ = x * rstd:
    dx = rstd * (g - x^ * mean(g * x^))     dweight = sum over rows of dout * x^

x, out, dout, dx (N, D) in float32, float16 or bfloat16; weight (D,) in the same; rstd (N,) and dweight (D,)
float32. All arithmetic is float32. A row's sum of squares is taken by the same threads in the same order
whatever N is, so a row's result does not depend on the other rows.

Every array is read or written once: a row stays in the registers of its threads between the sum and the output.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.check import F32, FLOATS, check
from rlnumba.kernels.instructions import (
    access_length,
    device_function,
    inverse_sqrt,
    let_next_kernel_start,
    vector_access,
    wait_for_kernels_before,
    warp_sum,
)
from rlnumba.kernels.launch import kernel_factory, launch

# Columns that a thread owns, and threads that a row may have at most; the widest rows give a thread more columns.
# Part of the arithmetic: it fixes who adds up which columns. The backward keeps five values a column.
FORWARD = 16, 1024
BACKWARD = 8, 1024
# Forward that is 32 columns a thread; backward 16, twice what fits into registers.
MAX_COLUMNS = 16_384
# Threads of a block where a row needs fewer: it has several rows then. Forward only beyond FEW_ROWS, so that few
# rows spread over many SMs.
FORWARD_BLOCK = 128
FORWARD_RESIDENT = 1024
BACKWARD_BLOCK = 256
FEW_ROWS = 512
# Blocks of the backward, each with a partial sum of dweight: four for each of 132 SMs; and threads of an SM for which
# registers are kept. With 1024, ptxas spills. Part of the arithmetic.
BACKWARD_BLOCKS = 528
BACKWARD_RESIDENT = 768
# Warps that share the rows of partial sums, and rows that each loads before it adds the first.
PARTIAL_WARPS = 32
PARTIAL_LOADS = 8


class Row(NamedTuple):
    """How threads share a row: thread t owns the columns t * vector .. (t + 1) * vector - 1 of each chunk.

    A chunk is threads * vector columns. access: columns that one access to memory moves.
    """

    columns: int
    vector: int
    access: int
    threads: int

    @property
    def chunks(self):
        return -(-self.columns // (self.vector * self.threads))

    @property
    def full(self):
        return self.columns == self.chunks * self.vector * self.threads

    @property
    def values(self):
        """Columns that a thread owns."""
        return self.chunks * self.vector


@functools.cache
def share_row(columns, itemsize, access, per_thread, max_threads):
    """The Row of the fewest threads, a multiple of 32, that leave each no more than per_thread columns.

    Up to twice as many where these own the same number of columns each.
    """
    vector = 16 // itemsize
    fewest = min(-(-columns // (32 * per_thread)) * 32, max_threads)
    even = (t for t in range(fewest, min(2 * fewest, max_threads) + 1, 32) if columns % (t * vector) == 0)
    return Row(columns, vector, access, next(even, fewest))


@kernel_factory
def rmsnorm_kernel(row_shape, residual_too=False):
    """The kernel for rows of this shape; with residual_too it first adds x to the residual.

    Both versions have the same arguments; without residual_too the residual is not touched.
    """
    columns, vector, access, threads = row_shape
    chunks, values_count, warps = row_shape.chunks, row_shape.values, threads // 32
    load, store = vector_access(vector, access, not row_shape.full)
    # Narrow accesses need more registers for addresses, and are slow anyway.
    resident = max(FORWARD_RESIDENT // max(threads, FORWARD_BLOCK), 1) if access == vector else 1

    @cuda.jit(launch_bounds=(max(threads, FORWARD_BLOCK), resident))
    def rmsnorm_kernel(x, residual, weight, eps, out, rstd):
        """`threads` threads own a row, which they read once. A block owns blockDim.y rows.

        Sum of squares: a thread over its columns, those of a chunk ascending, then the chunks; then a butterfly of
        each warp; then the warps in their order.
        """
        sums = cuda.shared.array(32, np.float32)
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if row >= x.shape[0]:
            return
        first = cuda.threadIdx.x * vector
        x_row, residual_row, out_row = x[row], residual[row], out[row]
        values = cuda.local.array(values_count, np.float32)
        others = cuda.local.array(values_count, np.float32)
        weights = cuda.local.array(values_count, np.float32)
        of_chunks = cuda.local.array(chunks, np.float32)
        for chunk in range(chunks):
            load(weight, first + chunk * threads * vector, weights, chunk * vector)
        # The weight is older than all kernels that may still run.
        wait_for_kernels_before()
        let_next_kernel_start()
        for chunk in range(chunks):
            load(x_row, first + chunk * threads * vector, values, chunk * vector)
        if residual_too:
            for chunk in range(chunks):
                load(residual_row, first + chunk * threads * vector, others, chunk * vector)
            for chunk in range(chunks):
                for i in range(chunk * vector, (chunk + 1) * vector):
                    values[i] = others[i] + values[i]
                store(residual_row, first + chunk * threads * vector, values, chunk * vector)
        for chunk in range(chunks):
            of_chunks[chunk] = np.float32(0.0)
            for i in range(chunk * vector, (chunk + 1) * vector):
                of_chunks[chunk] += values[i] * values[i]
        squares = of_chunks[0]
        for chunk in range(1, chunks):
            squares += of_chunks[chunk]
        squares = warp_sum(squares)
        if warps > 1:
            if cuda.threadIdx.x % 32 == 0:
                sums[cuda.threadIdx.x // 32] = squares
            cuda.syncthreads()
            squares = sums[0]
            for warp in range(1, warps):
                squares += sums[warp]
        scale = inverse_sqrt(squares / np.float32(columns) + eps)
        for chunk in range(chunks):
            for i in range(chunk * vector, (chunk + 1) * vector):
                values[i] = values[i] * scale * weights[i]
            store(out_row, first + chunk * threads * vector, values, chunk * vector)
        if cuda.threadIdx.x == 0:
            rstd[row] = scale

    return rmsnorm_kernel


@kernel_factory
def rmsnorm_backward_kernel(row_shape, lines):
    """The kernel for rows of this shape, of which a block has `lines` at a time."""
    columns, vector, access, threads = row_shape
    chunks, values_count, warps = row_shape.chunks, row_shape.values, threads // 32
    exchanging = max((lines - 1) * threads, 1)
    load, store = vector_access(vector, access, not row_shape.full)
    # Narrow accesses need more registers for addresses, and are slow anyway.
    blocks_per_sm = max(BACKWARD_RESIDENT // (threads * lines), 1) if access == vector else 1

    @cuda.jit(launch_bounds=(threads * lines, blocks_per_sm))
    def rmsnorm_backward_kernel(dout, x, weight, rstd, accumulate, dx, partials):
        """`threads` threads own a row, which they read once; the block owns every gridDim-th group of `lines` rows.

        mean(g x^): a thread over its columns, ascending; then a butterfly of each warp; then the warps in their
        order. A thread adds its columns of dout * x^ over its rows in registers, without a float atomic; then
        the lines are added in their order, and the block writes its row of partials (blocks, D).
        """
        sums = cuda.shared.array((2, 32), np.float32)
        exchange = cuda.shared.array((values_count, exchanging), np.float32)
        thread, line = cuda.threadIdx.x, cuda.threadIdx.y
        first = thread * vector
        weights = cuda.local.array(values_count, np.float32)
        dweight = cuda.local.array(values_count, np.float32)
        upstream = cuda.local.array(values_count, np.float32)
        values = cuda.local.array(values_count, np.float32)
        before = cuda.local.array(values_count, np.float32)
        for i in range(values_count):
            dweight[i] = np.float32(0.0)
        for chunk in range(chunks):
            load(weight, first + chunk * threads * vector, weights, chunk * vector)
        parity = 0
        for top in range(cuda.blockIdx.x * lines, x.shape[0], cuda.gridDim.x * lines):
            # All lines of a block meet; one without a row left works on the last one and keeps nothing.
            row = min(top + line, x.shape[0] - 1)
            dout_row, x_row, dx_row = dout[row], x[row], dx[row]
            for chunk in range(chunks):
                load(dout_row, first + chunk * threads * vector, upstream, chunk * vector)
                load(x_row, first + chunk * threads * vector, values, chunk * vector)
            for i in range(values_count):
                before[i] = np.float32(0.0)
            if accumulate:
                for chunk in range(chunks):
                    load(dx_row, first + chunk * threads * vector, before, chunk * vector)
            scale = rstd[row]
            projection = np.float32(0.0)
            for i in range(values_count):
                values[i] *= scale
                projection += upstream[i] * weights[i] * values[i]
            projection = warp_sum(projection)
            if warps > 1:
                if thread % 32 == 0:
                    sums[parity, line * warps + thread // 32] = projection
                cuda.syncthreads()
                projection = sums[parity, line * warps]
                for warp in range(1, warps):
                    projection += sums[parity, line * warps + warp]
                # Whoever writes these sums again has passed the barrier of the other ones.
                parity = 1 - parity
            projection /= np.float32(columns)
            if row == top + line:
                for chunk in range(chunks):
                    for i in range(chunk * vector, (chunk + 1) * vector):
                        dweight[i] += upstream[i] * values[i]
                        values[i] = before[i] + scale * (upstream[i] * weights[i] - values[i] * projection)
                    store(dx_row, first + chunk * threads * vector, values, chunk * vector)
        if lines > 1:
            if line > 0:
                for i in range(values_count):
                    exchange[i, (line - 1) * threads + thread] = dweight[i]
            cuda.syncthreads()
            if line > 0:
                return
            for other in range(lines - 1):
                for i in range(values_count):
                    dweight[i] += exchange[i, other * threads + thread]
        for chunk in range(chunks):
            store(partials[cuda.blockIdx.x], first + chunk * threads * vector, dweight, chunk * vector)

    return rmsnorm_backward_kernel


@device_function
def sum_of_rows(partials, column, sums):
    """The sum of column `column` of partials, in the first of the PARTIAL_WARPS warps of a block.

    Warp w adds rows w, w + PARTIAL_WARPS, ...; then the warps are added in their order.
    sums: shared (PARTIAL_WARPS, 32) float32.
    """
    total = np.float32(0.0)
    found = cuda.local.array(PARTIAL_LOADS, np.float32)
    rows, columns = partials.shape
    for top in range(cuda.threadIdx.y, rows, PARTIAL_WARPS * PARTIAL_LOADS):
        for i in range(PARTIAL_LOADS):
            found[i] = partials[min(top + i * PARTIAL_WARPS, rows - 1), min(column, columns - 1)]
        for i in range(PARTIAL_LOADS):
            if top + i * PARTIAL_WARPS < rows:
                total += found[i]
    sums[cuda.threadIdx.y, cuda.threadIdx.x] = total
    cuda.syncthreads()
    if cuda.threadIdx.y == 0:
        for warp in range(1, PARTIAL_WARPS):
            total += sums[warp, cuda.threadIdx.x]
    return total


@cuda.jit
def add_partials_kernel(partials, total):
    """total += the sum of the rows of partials; a block owns 32 columns, its warps share the rows."""
    sums = cuda.shared.array((PARTIAL_WARPS, 32), np.float32)
    column = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    value = sum_of_rows(partials, column, sums)
    if cuda.threadIdx.y == 0 and column < total.shape[0]:
        total[column] += value


def add_partials(partials, total):
    """total += the sum of the rows of partials (blocks, D), float32, in a fixed order."""
    launch(add_partials_kernel, -(-total.size // 32), (32, PARTIAL_WARPS), partials, total)


def _check_columns(op, columns):
    if not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"{op}: rows must have 1 to {MAX_COLUMNS} columns, got {columns}")


def _row_shape(budget, *arrays):
    columns = arrays[0].shape[-1]
    return share_row(columns, arrays[0].itemsize, access_length(columns, *arrays), *budget)


def _launch_forward(row_shape, rows, residual_too, *arguments):
    # Only rows of one warp share a block: those of several meet in block_sum, which sums whole blocks.
    lines = FORWARD_BLOCK // 32 if rows > FEW_ROWS and row_shape.threads == 32 else 1
    launch(rmsnorm_kernel(row_shape, residual_too), -(-rows // lines), (row_shape.threads, lines), *arguments)


def rmsnorm(x, weight, eps, out, rstd):
    """out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), row by row.

    x (N, D), weight (D,) of one floating dtype; out (N, D) of x's dtype and rstd (N,) float32 are written.
    Raises ValueError for other shapes, dtypes or layouts, or more than MAX_COLUMNS columns. Source: Zhang and
    Sennrich 2019, eq. 4.
    """
    rows, columns = check("rmsnorm", "x", x, (None, None), FLOATS)
    _check_columns("rmsnorm", columns)
    check("rmsnorm", "weight", weight, (columns,), (x.dtype,))
    check("rmsnorm", "out", out, (rows, columns), (x.dtype,))
    check("rmsnorm", "rstd", rstd, (rows,), F32)
    if device.name() == "numpy":
        out[...], rstd[...] = rmsnorm_ref(x, weight, eps)
        return
    row_shape = _row_shape(FORWARD, x, weight, out)
    _launch_forward(row_shape, rows, False, x, x, weight, float(eps), out, rstd)


def rmsnorm_residual(x, residual, weight, eps, out, rstd):
    """residual += x, then rmsnorm of residual: the step between two blocks of a transformer.

    x, residual, out (N, D) and weight (D,) of one floating dtype, rstd (N,) float32. residual, out and
    rstd are written. The norm sees the sum as it is stored, rounded to its dtype. Raises as rmsnorm.
    """
    rows, columns = check("rmsnorm_residual", "x", x, (None, None), FLOATS)
    _check_columns("rmsnorm_residual", columns)
    check("rmsnorm_residual", "residual", residual, (rows, columns), (x.dtype,))
    check("rmsnorm_residual", "weight", weight, (columns,), (x.dtype,))
    check("rmsnorm_residual", "out", out, (rows, columns), (x.dtype,))
    check("rmsnorm_residual", "rstd", rstd, (rows,), F32)
    if device.name() == "numpy":
        residual += x
        out[...], rstd[...] = rmsnorm_ref(residual, weight, eps)
        return
    row_shape = _row_shape(FORWARD, x, residual, weight, out)
    _launch_forward(row_shape, rows, True, x, residual, weight, float(eps), out, rstd)


def rmsnorm_backward(dout, x, weight, rstd, dx, dweight, accumulate=False):
    """The gradient of rmsnorm: dx = (or += if accumulate), dweight +=.

    dout, x, dx (N, D) and weight (D,) of one floating dtype; rstd (N,) as the forward wrote it; dweight (D,)
    float32. For rmsnorm_residual, x is the residual after the addition, and dx the gradient of both terms.
    Raises as rmsnorm.
    """
    rows, columns = check("rmsnorm_backward", "x", x, (None, None), FLOATS)
    _check_columns("rmsnorm_backward", columns)
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
    row_shape = _row_shape(BACKWARD, dout, x, weight, dx)
    lines = max(BACKWARD_BLOCK // row_shape.threads, 1)
    blocks = min(-(-rows // lines), BACKWARD_BLOCKS)
    partials = device.xp().empty((blocks, columns), np.float32)
    arguments = (dout, x, weight, rstd, int(accumulate), dx, partials)
    launch(rmsnorm_backward_kernel(row_shape, lines), blocks, (row_shape.threads, lines), *arguments)
    if blocks:
        add_partials(partials, dweight)


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
