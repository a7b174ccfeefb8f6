"""Grouped GEMMs without tensor cores: any GPU, dtype and shape, and any number of experts.

Sums are those of simt.py: float32, in ascending order of the reduction index. A block finds its expert by walking
through `starts`; the grid has as many blocks as any `starts` can need, and those without a tile return.
"""

import numpy as np

from rlnumba.kernels.gemm.grouped_tiles import most_row_tiles
from rlnumba.kernels.gemm.simt import TILE, Operand, sum_of_tile
from rlnumba.kernels.ptx.warp import add_gradient, device_function, narrow, widen
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch


@device_function
def find_tile(starts, index, tile_rows):
    """(expert, tile of its rows) of the index-th tile of all experts; the expert is their number if there is none."""
    experts = starts.shape[0] - 1
    expert, tile = 0, index
    while expert < experts:
        tiles = (starts[expert + 1] - starts[expert] + tile_rows - 1) // tile_rows
        if tile < tiles:
            break
        tile -= tiles
        expert += 1
    return expert, tile


@cuda.jit
def grouped_gemm_simt_kernel(x, weights, starts, steps, out):
    """out[i, j] = the sum over s of X[i, s] W_e[j, s], e the expert of row i.

    x, weights: Operands; an expert's part of `weights` has out's columns times `steps` elements. A block owns
    TILE x TILE outputs of one expert, a thread one.
    """
    columns = out.shape[1]
    tiles_across = (columns + TILE - 1) // TILE
    expert, tile = find_tile(starts, cuda.blockIdx.x // tiles_across, TILE)
    if expert < starts.shape[0] - 1:
        first_row, end = starts[expert] + tile * TILE, starts[expert + 1]
        first_column = cuda.blockIdx.x % tiles_across * TILE
        weight = np.int64(expert) * columns * steps
        total = sum_of_tile(x, 0, weights, weight, steps, end, columns, first_row, first_column)
        row, column = first_row + cuda.threadIdx.y, first_column + cuda.threadIdx.x
        if row < end and column < columns:
            out[row, column] = narrow(total, out)


@cuda.jit
def grouped_gemm_dw_simt_kernel(dy, x, starts, adds, out):
    """out[e] = or, if adds, += dY_e^T X_e, the sum over the rows of expert e.

    dy, x: Operands whose reduction goes along rows. A block owns TILE x TILE outputs of one expert, a thread one.
    """
    _, rows, columns = out.shape
    tiles_across = (columns + TILE - 1) // TILE
    tiles = (rows + TILE - 1) // TILE * tiles_across
    expert, tile = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles
    first_row, first_column = tile // tiles_across * TILE, tile % tiles_across * TILE
    start, end = np.int64(starts[expert]), starts[expert + 1]
    total = sum_of_tile(dy, start * rows, x, start * columns, end - start, rows, columns, first_row, first_column)
    row, column = first_row + cuda.threadIdx.y, first_column + cuda.threadIdx.x
    if row < rows and column < columns:
        if adds:
            total = add_gradient(widen(out[expert, row, column]), total)
        out[expert, row, column] = narrow(total, out)


def gemm_rows(x, weights, starts, out, b_mn=False):
    """Each row of out = a row of x times its expert's weight: W_e^T (experts, columns, steps), or W_e if b_mn."""
    (rows, steps), columns, experts = x.shape, out.shape[1], len(weights)
    operands = Operand(x.reshape(-1), steps, 1), Operand(weights.reshape(-1), *((1, columns) if b_mn else (steps, 1)))
    grid = most_row_tiles(rows, experts, TILE) * -(-columns // TILE)
    launch(grouped_gemm_simt_kernel, grid, (TILE, TILE), *operands, starts, steps, out)


def gemm_weights(dy, x, starts, out, add):
    """out[e] = or += dy^T x of the rows of expert e."""
    experts, rows, columns = out.shape
    operands = Operand(dy.reshape(-1), 1, rows), Operand(x.reshape(-1), 1, columns)
    grid = experts * -(-rows // TILE) * -(-columns // TILE)
    launch(grouped_gemm_dw_simt_kernel, grid, (TILE, TILE), *operands, starts, int(add), out)
