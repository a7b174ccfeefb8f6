"""A head of one output, as reward models and critics have: a float32 number for chosen rows of hidden states.

    out[i] = sum_d hidden[rows[i], d] weight[d]
    dhidden[rows[i], d] += dout[i] weight[d]        dweight[d] += sum_i dout[i] hidden[rows[i], d]

hidden, dhidden (N, D) and weight (1, D) in float32, float16 or bfloat16; rows (T,) int32; out, dout (T,) and dweight
(1, D) float32, as is all arithmetic. An output's sum over D has one order whatever T is, so it does not depend on the
other rows. Every row is read once; the gradient of the weight is added up in two stages, a partial sum a block and then
the blocks in a fixed order (rmsnorm.py). Source: the `score` layer of transformers' ...ForSequenceClassification, a
linear layer without bias.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check
from rlnumba.kernels.nn.embedding import check_rows
from rlnumba.kernels.nn.rmsnorm import add_partials
from rlnumba.kernels.ptx.warp import access_length, vector_access, warp_sum
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, u32 = np.int32, np.uint32

# Warps of a block, each with a row of its own at a time.
LINES = 8
# Blocks of the backward, over columns and rows together: eight for each of an H200's 132 SMs, as many as have room
# there at 256 threads. Fixes the order of dweight's sum.
BACKWARD_BLOCKS = 1056


@specialize
def scalar_head_kernel(vector, access, bounded):
    """The kernel for rows read in vectors of `vector` columns, moved `access` at a time.

    bounded: the last vectors of a row have columns beyond its end.
    """
    load, _ = vector_access(vector, access, bounded)

    @cuda.jit
    def scalar_head_kernel(hidden, rows, weight, out):
        """A warp owns an output; a block has LINES warps.

        Lane l adds the products of columns l * vector .. (l + 1) * vector - 1 of every 32 * vector, ascending; then the
        lanes are added by a butterfly. An output whose row number is outside [0, N) is NaN.
        """
        values, weights = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        index = cuda.blockIdx.x * LINES + cuda.threadIdx.y
        if index >= rows.shape[0]:
            return
        row = rows[index]
        total = np.float32(math.nan)
        if row >= 0 and row < hidden.shape[0]:
            total = np.float32(0.0)
            hidden_row, weight_row = hidden[u32(row)], weight[0]
            for first in range(cuda.threadIdx.x * vector, hidden.shape[1], 32 * vector):
                load(hidden_row, first, values, 0)
                load(weight_row, first, weights, 0)
                for i in range(vector):
                    total = cuda.fma(values[i], weights[i], total)
        total = warp_sum(total)
        if cuda.threadIdx.x == 0:
            out[index] = total

    return scalar_head_kernel


@specialize
def scalar_head_backward_kernel(vector, access, bounded):
    """The kernel for rows read and written in vectors of `vector` columns, moved `access` at a time.

    bounded: the last vectors of a row have columns beyond its end.
    """
    load, store = vector_access(vector, access, bounded)
    block_columns, other_lines = 32 * vector, LINES - 1

    @cuda.jit
    def scalar_head_backward_kernel(hidden, rows, weight, dout, dhidden, partials):
        """A block owns 32 * vector columns, a thread `vector` of them, of every gridDim.y-th batch of LINES rows.

        A thread adds its columns of dout * hidden over its rows in registers, ascending; then the lines are added in
        order, and the block writes its columns of its row of partials (blocks, D). A row outside [0, N) is skipped.
        """
        exchange = cuda.shared.array((other_lines, block_columns), np.float32)
        first = cuda.blockIdx.x * block_columns + cuda.threadIdx.x * vector
        line, lane = i32(cuda.threadIdx.y), i32(cuda.threadIdx.x)
        weights, dweight = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        values, before = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        load(weight[0], first, weights, 0)
        for i in range(vector):
            dweight[i] = np.float32(0.0)
        for index in range(cuda.blockIdx.y * LINES + line, rows.shape[0], cuda.gridDim.y * LINES):
            row, upstream = rows[index], dout[index]
            if row >= 0 and row < hidden.shape[0]:
                load(hidden[u32(row)], first, values, 0)
                load(dhidden[u32(row)], first, before, 0)
                for i in range(vector):
                    dweight[i] = cuda.fma(upstream, values[i], dweight[i])
                    before[i] = cuda.fma(upstream, weights[i], before[i])
                store(dhidden[u32(row)], first, before, 0)
        if line > 0:
            for i in range(vector):
                exchange[line - 1, lane + 32 * i] = dweight[i]
        cuda.syncthreads()
        if line == 0:
            for other in range(other_lines):
                for i in range(vector):
                    dweight[i] += exchange[other, lane + 32 * i]
            store(partials[cuda.blockIdx.y], first, dweight, 0)

    return scalar_head_backward_kernel


def _check(op, hidden, rows, weight):
    """(N, D, T) of hidden (N, D) and rows (T,)."""
    count, columns = check(op, "hidden", hidden, (None, None), FLOATS)
    (chosen,) = check(op, "rows", rows, (None,), I32)
    check(op, "weight", weight, (1, columns), (hidden.dtype,))
    if columns < 1:
        raise ValueError(f"{op}: hidden must have at least 1 column, got {columns}")
    return count, columns, chosen


def scalar_head(hidden, rows, weight, out):
    """out[i] = hidden[rows[i]] . weight[0].

    hidden (N, D) and weight (1, D) of one floating dtype; rows (T,) int32 in [0, N); out (T,) float32 is written. A row
    number outside [0, N) raises ValueError on the cpu device and gives NaN elsewhere. ValueError for other arrays.
    """
    count, columns, chosen = _check("scalar_head", hidden, rows, weight)
    check("scalar_head", "out", out, (chosen,), F32)
    if device.name() == "cpu":
        check_rows("scalar_head", "rows", rows, count)
        out[...] = scalar_head_ref(hidden, rows, weight)
        return
    vector = 16 // hidden.itemsize
    kernel = scalar_head_kernel(vector, access_length(columns, hidden, weight), columns % vector != 0)
    launch(kernel, -(-chosen // LINES), (32, LINES), hidden, rows, weight, out)


def scalar_head_backward(hidden, rows, weight, dout, dhidden, dweight):
    """The gradient of scalar_head: dhidden[rows[i]] +=, dweight +=; other rows of dhidden keep their values.

    hidden, dhidden (N, D) and weight (1, D) of one floating dtype; rows (T,) int32 in [0, N), no row twice; dout (T,),
    dweight (1, D) float32. A row number outside [0, N) raises ValueError on the cpu device and is skipped elsewhere.
    ValueError for other arrays.
    """
    op = "scalar_head_backward"
    count, columns, chosen = _check(op, hidden, rows, weight)
    check(op, "dout", dout, (chosen,), F32)
    check(op, "dhidden", dhidden, (count, columns), (hidden.dtype,))
    check(op, "dweight", dweight, (1, columns), F32)
    if device.name() == "cpu":
        check_rows(op, "rows", rows, count)
        row_gradient, weight_gradient = scalar_head_backward_ref(hidden, rows, weight, dout)
        dhidden[rows] += row_gradient
        dweight += weight_gradient
        return
    if not chosen:
        return
    vector = 16 // hidden.itemsize
    block_columns = 32 * vector
    column_blocks = -(-columns // block_columns)
    row_blocks = min(-(-chosen // LINES), max(BACKWARD_BLOCKS // column_blocks, 1))
    partials = device.xp().empty((row_blocks, columns), np.float32)
    access = access_length(columns, hidden, weight, dhidden)
    kernel = scalar_head_backward_kernel(vector, access, columns % block_columns != 0)
    launch(kernel, (column_blocks, row_blocks), (32, LINES), hidden, rows, weight, dout, dhidden, partials)
    add_partials(partials, dweight.reshape(-1))


def scalar_head_ref(hidden, rows, weight):
    """out of scalar_head, in hidden's precision; a row's sum depends on that row alone."""
    return np.sum(hidden[rows] * weight, axis=1)


def scalar_head_backward_ref(hidden, rows, weight, dout):
    """(gradient of hidden[rows], gradient of weight) of scalar_head, in hidden's precision."""
    return dout[:, None] * weight, np.sum(dout[:, None] * hidden[rows], axis=0, keepdims=True)
