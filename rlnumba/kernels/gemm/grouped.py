"""Grouped GEMMs of mixtures of experts: each row is multiplied by the weight of its expert, forward and backward.

    grouped_gemm          out[i] = x[i] W_e^T                  sum over K     starts[e] <= i < starts[e + 1]
    grouped_gemm_swiglu   gate_up[i] = x[i] W_e^T, out = silu(gate) * up
    grouped_gemm_dx       out[i] = dy[i] W_e                   sum over N
    grouped_gemm_dw       out[e] += or = dY_e^T X_e            sum over the rows of expert e

x (R, K), dy (R, N), weights (E, N, K); rows are sorted by expert, and starts (E + 1,) int32 on the device ascends from
0 to R. The host never reads it: grids follow from shapes alone, so that the calls can be captured in a CUDA graph and
replayed with other starts. Experts without rows are not read; their weight's gradient is 0. Sums are float32.

The sums are those of gemm/ops.py, in the same order, one family each: a row has the bits that `linear` of it with its
expert's weight alone has, whatever rows and experts are around it; the gradient of a weight has those of
linear_backward_weight of its expert's rows. cuBLAS has no part in this: gemm = "cublas" leaves these operators native.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check, is_16_byte_aligned
from rlnumba.kernels.cpu import gemm as cpu
from rlnumba.kernels.gemm import grouped_simt, grouped_sm80, grouped_sm90
from rlnumba.kernels.nn.swiglu import swiglu
from rlnumba.runtime import device, dispatch

FAMILIES = {"sm90": grouped_sm90, "sm80": grouped_sm80}


def _check_starts(op, starts, weights):
    check(op, "starts", starts, (len(weights) + 1,), I32)


def _family(matrices, steps):
    """The module that computes a GEMM of these matrices: the choice of gemm/ops.py for them."""
    module = FAMILIES.get(dispatch.family("gemm"))
    if module is None or matrices[0].dtype == np.float32 or not steps or not is_16_byte_aligned(*matrices):
        return grouped_simt
    return module


def _on_cpu(starts):
    """(expert, its rows as a slice) for each expert, on the cpu device."""
    return [(expert, slice(*starts[expert : expert + 2])) for expert in range(len(starts) - 1)]


def grouped_gemm(x, weights, starts, out):
    """out[i] = x[i] weights[e]^T, e the expert of row i.

    x (R, K) and weights (E, N, K) of one floating dtype, out (R, N) of that dtype is written, rows outside of `starts`
    aside. Raises ValueError for other shapes, dtypes or layouts.
    """
    rows, k = check("grouped_gemm", "x", x, (None, None), FLOATS)
    _, n, _ = check("grouped_gemm", "weights", weights, (None, None, k), (x.dtype,))
    check("grouped_gemm", "out", out, (rows, n), (x.dtype,))
    _check_starts("grouped_gemm", starts, weights)
    if not (rows and n):
        return
    if device.name() == "cpu":
        for expert, own in _on_cpu(starts):
            if len(x[own]):
                cpu.gemm(x[own], weights[expert], out[own])
    else:
        _family((x, weights, out), k).gemm_rows(x, weights, starts, out)


def grouped_gemm_swiglu(x, weights, starts, gate_up, out):
    """gate_up[i] = x[i] weights[e]^T and out = silu(gate) * up: the bits of grouped_gemm and swiglu.

    One kernel on Hopper. x (R, K) and weights (E, 2F, K), the gate's rows first, of one floating dtype; gate_up (R, 2F)
    and out (R, F) of that dtype are written; rows outside of `starts` are undefined. Raises ValueError for others.
    """
    rows, k = check("grouped_gemm_swiglu", "x", x, (None, None), FLOATS)
    _, n, _ = check("grouped_gemm_swiglu", "weights", weights, (None, None, k), (x.dtype,))
    if n % 2:
        raise ValueError(f"grouped_gemm_swiglu: weights must have an even number of rows each, got {n}")
    check("grouped_gemm_swiglu", "gate_up", gate_up, (rows, n), (x.dtype,))
    check("grouped_gemm_swiglu", "out", out, (rows, n // 2), (x.dtype,))
    _check_starts("grouped_gemm_swiglu", starts, weights)
    if rows and n and device.name() != "cpu" and _family((x, weights, gate_up, out), k) is grouped_sm90:
        grouped_sm90.gemm_swiglu(x, weights, starts, gate_up, out)
    else:
        grouped_gemm(x, weights, starts, gate_up)
        swiglu(gate_up, out)


def grouped_gemm_dx(dy, weights, starts, out):
    """out[i] = dy[i] weights[e], e the expert of row i: the gradient of grouped_gemm's x.

    dy (R, N) and weights (E, N, K) of one floating dtype, out (R, K) of that dtype is written, rows outside of `starts`
    aside. Raises ValueError for other shapes, dtypes or layouts.
    """
    rows, n = check("grouped_gemm_dx", "dy", dy, (None, None), FLOATS)
    _, _, k = check("grouped_gemm_dx", "weights", weights, (None, n, None), (dy.dtype,))
    check("grouped_gemm_dx", "out", out, (rows, k), (dy.dtype,))
    _check_starts("grouped_gemm_dx", starts, weights)
    if not (rows and k):
        return
    if device.name() == "cpu":
        for expert, own in _on_cpu(starts):
            if len(dy[own]):
                cpu.gemm(dy[own], weights[expert], out[own], b_mn=True)
    else:
        _family((dy, weights, out), n).gemm_rows(dy, weights, starts, out, b_mn=True)


def grouped_gemm_dw(dy, x, starts, out, accumulate=True):
    """out[e] += dY_e^T X_e, or = unless accumulate, over the rows of expert e: the gradient of grouped_gemm's weights.

    dy (R, N) and x (R, K) of one floating dtype; out (E, N, K) float32, or of that dtype where it is overwritten.
    Raises ValueError for others.
    """
    rows, n = check("grouped_gemm_dw", "dy", dy, (None, None), FLOATS)
    _, k = check("grouped_gemm_dw", "x", x, (rows, None), (dy.dtype,))
    check("grouped_gemm_dw", "out", out, (None, n, k), F32 if accumulate else (*F32, dy.dtype))
    _check_starts("grouped_gemm_dw", starts, out)
    if not out.size:
        return
    if device.name() == "cpu":
        for expert, own in _on_cpu(starts):
            cpu.gemm(dy[own], x[own], out[expert], a_mn=True, b_mn=True, add=accumulate)
    else:
        _family((dy, x, out), rows).gemm_weights(dy, x, starts, out, accumulate)


def grouped_gemm_ref(x, weights, starts):
    """The out of grouped_gemm, in x's precision; rows outside of `starts` are 0."""
    out = np.zeros((len(x), weights.shape[1]), x.dtype)
    for e in range(len(weights)):
        out[starts[e] : starts[e + 1]] = x[starts[e] : starts[e + 1]] @ weights[e].T
    return out


def grouped_gemm_backward_ref(dy, x, weights, starts):
    """(dx, dweights) of grouped_gemm, in x's precision."""
    dx, dweights = np.zeros_like(x), np.zeros_like(weights)
    for e in range(len(weights)):
        own = slice(starts[e], starts[e + 1])
        dx[own] = dy[own] @ weights[e]
        dweights[e] = dy[own].T @ x[own]
    return dx, dweights
