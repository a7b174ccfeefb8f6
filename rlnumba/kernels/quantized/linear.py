"""Operators of a linear layer whose weight is packed, for few rows: the bits of gemm/ops.py on the weight's values.

    packed_linear          out = x W^T + bias + residual + A B^T
    packed_linear_swiglu   gate_up = x W^T + A B^T, out = activation(gate) * up

They have one kernel, few_rows.py, which reads the packed words and never writes the values to memory, and writes A of
the low rank, too, where it gets the Reduction of x. Where it does not take the arrays, `dequantize` and the operators
of gemm/ops.py compute the same bits, so that the choice may depend on the number of rows.
"""

from rlnumba.kernels.checks import FLOATS, address, check, is_16_byte_aligned
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.reduction import check_reduction, is_one_kernel
from rlnumba.kernels.nn.swiglu import check_activation
from rlnumba.kernels.quantized import few_rows
from rlnumba.kernels.quantized.few_rows_config import LEAST_STEPS, MOST_ROWS
from rlnumba.kernels.quantized.formats import COLUMNS, ROWS
from rlnumba.runtime import dispatch


def is_packed_gemm(x, weight, *matrices, bias=None, swiglu=False):
    """Whether the operators here take x (M, K), a QuantizedWeight and further matrices of x's rows or of a low rank.

    On Hopper up to MOST_ROWS rows of 16 bits, if gemm/sm90.py computes more rows: with the same bits.
    """
    if gemm.backend() != "native" or dispatch.family("gemm") != "sm90" or len(weight.shape) != 2:
        return False
    (m, k), (n, _), tiles = x.shape, weight.shape, weight.group_size // COLUMNS
    fits = 0 < m <= MOST_ROWS and k % LEAST_STEPS == 0 and n % (ROWS if swiglu else 8) == 0
    grouped = weight.group_size % COLUMNS == 0 and tiles & tiles - 1 == 0
    typed = x.itemsize == 2 and all(each.dtype == weight.dtype for each in (x, *matrices))
    return fits and grouped and typed and (bias is None or address(bias) % 4 == 0) and is_16_byte_aligned(x, *matrices)


def packed_linear(x, weight, out, bias=None, residual=None, low_rank=None, reduction=None):
    """out = x W^T + bias + residual + A B^T of low_rank, for arrays that is_packed_gemm takes; reduction: as linear's.

    x (M, K), weight a QuantizedWeight (N, K); out (M, N) is written; the others as linear's. Raises ValueError.
    """
    check("packed_linear", "x", x, (None, weight.shape[1]), (weight.dtype,))
    m, n = len(x), len(weight)
    check("packed_linear", "out", out, (m, n), (x.dtype,))
    if bias is not None:
        check("packed_linear", "bias", bias, (n,), (x.dtype,))
    if residual is not None:
        check("packed_linear", "residual", residual, (m, n), (x.dtype,))
    _check_low_rank("packed_linear", low_rank, m, n)
    reduction = _reduction_of_kernel("packed_linear", x, out, low_rank, reduction)
    few_rows.gemm(x, weight, out, bias, residual, low_rank, reduction)


def packed_linear_swiglu(x, weight, gate_up, out, low_rank=None, activation="silu", reduction=None):
    """gate_up = x W^T + A B^T of low_rank, out = activation(gate) * up, for arrays that is_packed_gemm takes.

    x (M, K), weight a QuantizedWeight (2F, K); gate_up (M, 2F) and out (M, F) are written; reduction: as linear's.
    Raises ValueError.
    """
    check("packed_linear_swiglu", "x", x, (None, weight.shape[1]), (weight.dtype,))
    m, n = len(x), len(weight)
    check("packed_linear_swiglu", "gate_up", gate_up, (m, n), (x.dtype,))
    check("packed_linear_swiglu", "out", out, (m, n // 2), (x.dtype,))
    check_activation("packed_linear_swiglu", activation)
    _check_low_rank("packed_linear_swiglu", low_rank, m, n)
    reduction = _reduction_of_kernel("packed_linear_swiglu", x, out, low_rank, reduction)
    few_rows.gemm_swiglu(x, weight, gate_up, out, low_rank, activation, reduction)


def _reduction_of_kernel(op, x, out, low_rank, reduction):
    """The Reduction that is left to the kernel, or None: there is none, or the low rank's first matrix is written."""
    if reduction is None:
        return None
    check_reduction(op, reduction, low_rank, x.shape[1])
    if is_one_kernel(x, out, low_rank, reduction):
        return reduction
    gemm.reduce_rank(x, reduction, low_rank[0])
    return None


def _check_low_rank(op, low_rank, m, n):
    if low_rank is not None:
        a, b = low_rank
        _, rank = check(op, "low_rank[0]", a, (m, None), FLOATS)
        check(op, "low_rank[1]", b, (n, rank), (a.dtype,))
