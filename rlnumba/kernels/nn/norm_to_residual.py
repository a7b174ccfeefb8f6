"""RMSNorm of a block's output, and its addition to the residual stream (Gemma 3), in one pass over memory.

    out = residual + rmsnorm(x)                 rmsnorm(x) is rounded to out's dtype, and so is the sum

The bits are those of rmsnorm (rmsnorm.py) and add (elementwise.py), which is also the layout of a row over threads.
Its backward is rmsnorm_backward: the residual's gradient is that of out.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all
from rlnumba.kernels.nn import rmsnorm as rmsnorm_module
from rlnumba.kernels.nn.rmsnorm import (
    FORWARD,
    FORWARD_BLOCK,
    MAX_COLUMNS,
    RESIDENT_THREADS,
    add_one_function,
    normalise_function,
    rmsnorm_ref,
    share_row,
)
from rlnumba.kernels.ptx.warp import (
    access_length,
    add_rounded,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    narrow,
    vector_access,
    widen,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl


@specialize
def norm_to_residual_kernel(layout, few_rows, unit_offset):
    """The kernel for rows of a RowLayout; few_rows, unit_offset: as rmsnorm_kernel's."""
    _, vector, access, threads = layout
    chunks, values_count = layout.chunks, layout.chunks * vector
    load, store = vector_access(vector, access, not layout.full)
    normalise, add_one = normalise_function(layout), add_one_function(values_count)
    # Narrow accesses need more registers for addresses, and are slow anyway.
    resident = max(RESIDENT_THREADS // max(threads, FORWARD_BLOCK), 1) if access == vector else 1

    @cuda.jit(launch_bounds=(max(threads, FORWARD_BLOCK), resident))
    def norm_to_residual_kernel(x, weight, eps, residual, out, rstd):
        """`threads` threads own a row, which they read once. A block owns blockDim.y rows."""
        sums = cuda.shared.array(32, np.float32)
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if row >= x.shape[0]:
            return
        first = cuda.threadIdx.x * vector
        x_row, residual_row, out_row = x[row], residual[row], out[row]
        values, weights = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        if few_rows:
            # No kernel that may still run writes the weight.
            for chunk in range(chunks):
                load(weight, first + chunk * threads * vector, weights, chunk * vector)
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()
        for chunk in range(chunks):
            load(x_row, first + chunk * threads * vector, values, chunk * vector)
        if not few_rows:
            for chunk in range(chunks):
                load(weight, first + chunk * threads * vector, weights, chunk * vector)
        if unit_offset:
            add_one(weights)
        scale = normalise(values, weights, eps, sums)
        # The residual takes the weight's registers.
        for chunk in range(chunks):
            load(residual_row, first + chunk * threads * vector, weights, chunk * vector)
        for i in range(values_count):
            values[i] = add_rounded(weights[i], widen(narrow(values[i], out_row)))
        for chunk in range(chunks):
            store(out_row, first + chunk * threads * vector, values, chunk * vector)
        if cuda.threadIdx.x == 0:
            rstd[row] = scale

    return supports_pdl(norm_to_residual_kernel) if few_rows else norm_to_residual_kernel


def norm_to_residual(x, weight, eps, residual, out, rstd, unit_offset=False):
    """out = residual + rmsnorm(x), row by row; with unit_offset 1 + weight takes the weight's place.

    x, residual (N, D), weight (D,) of one floating dtype; out (N, D) of that dtype and rstd (N,) float32, of x, are
    written; out may be residual. Raises ValueError for other arrays, or more than rmsnorm.py:MAX_COLUMNS columns.
    """
    op = "norm_to_residual"
    rows, columns = check(op, "x", x, (None, None), FLOATS)
    if not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"{op}: rows must have 1 to {MAX_COLUMNS} columns, got {columns}")
    check(op, "weight", weight, (columns,), (x.dtype,))
    check(op, "rstd", rstd, (rows,), F32)
    check_all(op, (rows, columns), (x.dtype,), residual=residual, out=out)
    if device.name() == "cpu":
        normed, rstd[...] = rmsnorm_ref(x, weight + 1 if unit_offset else weight, eps)
        np.add(residual, normed, out=out)
        return
    layout = share_row(columns, x.itemsize, access_length(columns, x, weight, residual, out), *FORWARD)
    few_rows = rows <= rmsnorm_module.FEW_ROWS
    # Only rows of one warp share a block: those of several use the block's barrier.
    lines = 1 if few_rows or layout.threads > 32 else FORWARD_BLOCK // 32
    kernel = norm_to_residual_kernel(layout, few_rows, unit_offset)
    launch(kernel, -(-rows // lines), (layout.threads, lines), x, weight, float(eps), residual, out, rstd)
