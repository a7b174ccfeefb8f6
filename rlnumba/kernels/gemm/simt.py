"""GEMM kernels without tensor cores: any GPU, dtype and shape; also the column sums of a bias's gradient.

Sums are float32, in ascending order of the reduction index: a row's bits depend on that row alone.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import add_gradient, device_function, narrow, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Side of the square of outputs that a block owns, one output a thread.
TILE = 16
# Row length of a shared tile: one more, so that the elements of a column lie in different banks.
PADDED = TILE + 1
# bias_backward: columns of a block, one a lane so that a warp reads consecutive addresses, and rows at a time.
COLUMNS = 32
ROW_LANES = 16


class Operand(NamedTuple):
    """A matrix: element [i, s], s along the reduction, is flat[i row + s step]."""

    flat: object
    row: int
    step: int


@device_function
def sum_of_tile(a, a_base, b, b_base, steps, rows, columns, first_row, first_column):
    """The sum over s < steps of A[i, s] B[j, s] for this thread's output of a tile, from (first_row, first_column) on.

    a, b: Operands, from the elements a_base and b_base of `flat` on; rows, columns: how many rows they have. The sum
    runs in ascending s, TILE steps at a time: the block copies a square of a and one of b to shared memory, each along
    the direction in which it is contiguous, then every thread multiplies its row by its column. All threads of a block
    call this.
    """
    a_tile = cuda.shared.array((TILE, PADDED), np.float32)
    b_tile = cuda.shared.array((TILE, PADDED), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = np.float32(0.0)
    for first in range(0, steps, TILE):
        # The element that a thread loads: consecutive x take consecutive addresses.
        i, s = (y, x) if a.step == 1 else (x, y)
        a_tile[i, s] = np.float32(0.0)
        if first_row + i < rows and first + s < steps:
            a_tile[i, s] = widen(a.flat[a_base + (first_row + i) * a.row + (first + s) * a.step])
        j, s = (y, x) if b.step == 1 else (x, y)
        b_tile[j, s] = np.float32(0.0)
        if first_column + j < columns and first + s < steps:
            b_tile[j, s] = widen(b.flat[b_base + (first_column + j) * b.row + (first + s) * b.step])
        cuda.syncthreads()
        for step in range(TILE):
            total += a_tile[y, step] * b_tile[x, step]
        cuda.syncthreads()
    return total


@cuda.jit
def gemm_simt_kernel(a, b, steps, bias, addend, adds, out):
    """out[i, j] = bias[j] + addend[i, j] + sum over s of A[i, s] B[j, s].

    a, b: Operands. A bias or addend without elements is left out;
    addend may be out itself, and is if the product is added to it (adds). A block owns TILE x TILE outputs, a
    thread one. Blocks lie along x alone, which may be longer than y, row by row.
    """
    rows, columns = out.shape
    tiles_across = (columns + TILE - 1) // TILE
    first_row, first_column = cuda.blockIdx.x // tiles_across * TILE, cuda.blockIdx.x % tiles_across * TILE
    total = sum_of_tile(a, 0, b, 0, steps, rows, columns, first_row, first_column)
    row, column = first_row + cuda.threadIdx.y, first_column + cuda.threadIdx.x
    if row < rows and column < columns:
        if bias.shape[0] > 0:
            total += widen(bias[column])
        if adds:
            total = add_gradient(widen(addend[row, column]), total)
        elif addend.shape[0] > 0:
            total += widen(addend[row, column])
        out[row, column] = narrow(total, out)


@cuda.jit
def bias_backward_kernel(dout, dbias):
    """A block owns COLUMNS columns; of each, thread row y adds rows y, y + ROW_LANES, ..., then y = 0 adds those."""
    partials = cuda.shared.array((ROW_LANES, COLUMNS), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    rows, columns = dout.shape
    column = cuda.blockIdx.x * COLUMNS + x
    total = np.float32(0.0)
    if column < columns:
        for row in range(y, rows, ROW_LANES):
            total += widen(dout[row, column])
    partials[y, x] = total
    cuda.syncthreads()
    if y == 0 and column < columns:
        total = partials[0, x]
        for lane in range(1, ROW_LANES):
            total += partials[lane, x]
        dbias[column] = add_gradient(dbias[column], total)


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS by the simt kernel."""
    rows, columns = out.shape
    steps = a.shape[0] if a_mn else a.shape[1]
    a_operand = Operand(a.reshape(-1), *((1, rows) if a_mn else (steps, 1)))
    b_operand = Operand(b.reshape(-1), *((1, columns) if b_mn else (steps, 1)))
    bias = a_operand.flat[:0] if bias is None else bias
    addend = out if add else out[:0] if residual is None else residual
    grid = -(-columns // TILE) * -(-rows // TILE)
    launch(gemm_simt_kernel, grid, (TILE, TILE), a_operand, b_operand, steps, bias, addend, int(add), out)


def bias_backward(dout, dbias):
    """The operator ops.bias_backward by the simt kernel."""
    launch(bias_backward_kernel, -(-dout.shape[1] // COLUMNS), (COLUMNS, ROW_LANES), dout, dbias)
