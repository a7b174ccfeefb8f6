"""Kernels of low-rank adapters besides GEMMs (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models").

    y = x W^T + s (x A^T) B^T             W (M, D) frozen, A (C, D), B (M, C)

`scale_adapters` multiplies x A^T by s. If a batch has rows of several adapters, A and B hold them side by side, C
columns of x A^T each, and a row keeps those of its own adapter: the others become 0 and add nothing to the sum.

W may be several matrices with one input, such as those of q, k and v. Each has a low-rank update of its own, so B is
block-diagonal: `keep_blocks` sets the gradient outside of the blocks to zero, and these entries of B stay zero.

Arrays in float32, float16 or bfloat16, arithmetic float32.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check, unused
from rlnumba.kernels.ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait, narrow, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

# Columns and rows of a block: a warp reads neighbouring columns of one row.
COLUMNS, ROWS = 32, 8


@supports_pdl
@cuda.jit
def scale_adapters_kernel(x, scales, adapter_ids, columns, out):
    """out = x times its adapter's scale, 0 in the columns of other adapters. A warp owns a row.

    adapter_ids without elements: all rows have adapter 0.
    """
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    if row >= x.shape[0]:
        return
    adapter = adapter_ids[row] if adapter_ids.shape[0] > 0 else np.int32(0)
    first = adapter * columns
    factor = scales[adapter] if adapter >= 0 else np.float32(0.0)
    for column in range(cuda.threadIdx.x, x.shape[1], COLUMNS):
        value = np.float32(0.0)
        if adapter >= 0 and first <= column < first + columns:
            value = widen(x[row, column]) * factor
        out[row, column] = narrow(value, out)


@cuda.jit
def keep_blocks_kernel(first_columns, width, matrix):
    """Zeros outside of columns [first, first + width) of each row; a warp owns a row.

    first_columns: of a row; the rows repeat with their number.
    """
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    if row >= matrix.shape[0]:
        return
    first = first_columns[row % first_columns.shape[0]]
    for column in range(cuda.threadIdx.x, matrix.shape[1], COLUMNS):
        if column < first or column >= first + width:
            matrix[row, column] = np.float32(0.0)


def scale_adapters(x, scales, adapter_ids, out):
    """out[n] = scales[a] x[n] in the columns of its adapter a = adapter_ids[n], 0 in those of others.

    x (N, C) of a floating dtype, C a multiple of the number of adapters; scales (adapters,) float32; adapter_ids (N,)
    int32, -1 for rows without an adapter, or None: all rows have adapter 0. out (N, C) of x's dtype is written and may
    be x. Raises ValueError for other arrays.
    """
    rows, columns = check("scale_adapters", "x", x, (None, None), FLOATS)
    (adapters,) = check("scale_adapters", "scales", scales, (None,), F32)
    if not adapters or columns % adapters:
        raise ValueError(f"scale_adapters: x must have columns for each of {adapters} adapters, got {columns}")
    check("scale_adapters", "out", out, (rows, columns), (x.dtype,))
    if adapter_ids is not None:
        check("scale_adapters", "adapter_ids", adapter_ids, (rows,), I32)
    if device.name() == "cpu":
        out[...] = scale_adapters_ref(x, scales, adapter_ids)
        return
    ids = unused() if adapter_ids is None else adapter_ids
    launch(scale_adapters_kernel, -(-rows // ROWS), (COLUMNS, ROWS), x, scales, ids, columns // adapters, out)


def keep_blocks(first_columns, width, matrix):
    """Set matrix (M, C) float32 to zero outside of columns [first, first + width) of each row.

    first_columns (R,) int32: of row m that at m modulo R, C or more where the row has no column to keep. Raises
    ValueError for other arrays.
    """
    rows, _ = check("keep_blocks", "matrix", matrix, (None, None), F32)
    (period,) = check("keep_blocks", "first_columns", first_columns, (None,), I32)
    if rows and (not period or rows % period):
        raise ValueError(f"keep_blocks: matrix must have a multiple of {period} rows, got {rows}")
    if device.name() == "cpu":
        matrix[...] = keep_blocks_ref(first_columns, width, matrix)
        return
    launch(keep_blocks_kernel, -(-rows // ROWS), (COLUMNS, ROWS), first_columns, width, matrix)


def scale_adapters_ref(x, scales, adapter_ids):
    """out of scale_adapters, in x's precision."""
    ids = np.zeros(len(x), np.int32) if adapter_ids is None else adapter_ids
    owners = np.repeat(np.arange(len(scales)), x.shape[1] // len(scales))
    return np.where(owners == ids[:, None], x * scales[ids][:, None].astype(x.dtype), x.dtype.type(0))


def keep_blocks_ref(first_columns, width, matrix):
    """A copy of matrix as keep_blocks leaves it."""
    first = np.resize(first_columns, len(matrix))[:, None]
    columns = np.arange(matrix.shape[1])
    return np.where((columns >= first) & (columns < first + width), matrix, matrix.dtype.type(0))
