"""Operators of a linear layer y = x w^T + bias (+ residual), forward and backward.

    linear                   out = x w^T + bias + residual     sum over K (NT: both rows contiguous)
    linear_swiglu            gate_up = x w^T, out = activation(gate) * up
    linear_backward_input    dx = dout w                       sum over N (NN)
    linear_backward_weight   dweight += or = dout^T x          sum over M (TN)
    bias_backward            dbias += sum over M of dout

linear, linear_swiglu and linear_backward_input take a low rank, two matrices (A, B) of an adapter: x w^T + A B^T, or
dout w + A B. On Hopper it is a part of the same sum; elsewhere a second product is added to the first, which has been
rounded. A is itself a product of x, which the first two write where they get its Reduction: on Hopper, with few rows,
in the same kernel.

x (M, K), weight (N, K), out (M, N). Sums are float32 whatever the arrays hold; gradients of weights and
biases are float32 arrays that accumulate. GEMM backends:

    cpu      on the cpu device: kernels/cpu/gemm.py, one fixed order a row
    cublas   on a GPU: a row's bits may depend on the number of rows
    native   our kernels, on a GPU and in the simulator: K in one ascending order a row. 16-bit GEMMs run in sm90.py or
             sm80.py, as runtime/dispatch.py says for the GPU, if all rows are whole 16-byte pieces (N and K multiples
             of 8, or N of 4 for a float32 out) and a residual has the inputs' type; others in simt.py, which is slow
"""

import numpy as np

from rlnumba.errors import ConfigError
from rlnumba.kernels.checks import F32, FLOATS, address, check, is_16_byte_aligned
from rlnumba.kernels.cpu import gemm as cpu
from rlnumba.kernels.gemm import cublas, simt
from rlnumba.kernels.gemm import sm80 as gemm_sm80
from rlnumba.kernels.gemm import sm90 as gemm_sm90
from rlnumba.kernels.gemm.reduction import check_reduction
from rlnumba.kernels.nn.lora import scale_adapters
from rlnumba.kernels.nn.swiglu import check_activation, swiglu, swiglu_ref
from rlnumba.runtime import device, dispatch

# By device; the first is the default.
OFFERED = {"cpu": ("cpu",), "sim": ("native",), "shapes": ("native",), "cuda": ("native", "cublas")}
# gemm(a, b, out, a_mn, b_mn, add, bias, residual) of each: out = A B (+ bias + residual), or out += A B if `add`.
# a: (M, K), or (K, M) if a_mn; b: (N, K), or (K, N) if b_mn; out (M, N); bias (N,); residual (M, N), or out itself.
BACKENDS = {"cpu": cpu.gemm, "cublas": cublas.gemm}
FAMILIES = {"sm90": gemm_sm90.gemm, "sm80": gemm_sm80.gemm}
# Rows of x up to which the first product of a low rank may be part of the kernel that adds the second, on Hopper.
MOST_REDUCED_ROWS = 512
# Former names that stay accepted.
ALIASES = {"numba": "native"}

_backend = "auto"


def set_backend(name):
    """Choose the GEMM backend: "native" (our kernels) or "cublas" on a GPU, or "auto", which is native.

    With cuBLAS rollout and training log-probs differ. Raises ConfigError for a name that the device does not offer.
    """
    global _backend
    name = ALIASES.get(name, name)
    offered = OFFERED[device.name()]
    if name not in ("auto", *offered):
        raise ConfigError(f"gemm must be auto or {' or '.join(offered)} on device {device.name()}, got {name!r}")
    _backend = name


def backend():
    """The GEMM backend now: "cpu", "cublas" or "native"."""
    return OFFERED[device.name()][0] if _backend == "auto" else _backend


def describe(dtype=None):
    """One line for people: the GEMM backend for arrays of this dtype (None: one of 16 bits), and its kernels."""
    name = backend()
    if name != "native":
        return name
    return f"native; {'simt' if dtype == np.float32 else dispatch.describe('gemm')}"


def _gemm(a, b, out, steps, bias=None, residual=None, low_rank=None):
    """The GEMM function for these matrices, a choice that does not depend on the number of rows.

    steps: of the reduction; residual: or a second output; low_rank: (A, B), or None.
    """
    name = backend()
    if name != "native":
        return BACKENDS[name]
    gemm = FAMILIES.get(dispatch.family("gemm"))
    if gemm is None or a.dtype == np.float32 or not steps or (residual is not None and out.dtype != a.dtype):
        return simt.gemm
    pairs = bias is None or address(bias) % 4 == 0
    matrices = (a, b, out, *(() if residual is None else (residual,)), *(low_rank or ()))
    return gemm if pairs and is_16_byte_aligned(*matrices) else simt.gemm


def _add_low_rank(gemm, low_rank, out, b_mn=False):
    """out += A B^T, or A B if b_mn."""
    a, b = low_rank
    if out.dtype == np.float32:
        gemm(a, b, out, b_mn=b_mn, add=True)
    else:
        gemm(a, b, out, b_mn=b_mn, residual=out)


def _check_low_rank(op, low_rank, m, n, dtype, b_mn=False):
    a, b = low_rank
    _, rank = check(op, "low_rank[0]", a, (m, None), (dtype,))
    check(op, "low_rank[1]", b, (rank, n) if b_mn else (n, rank), (dtype,))


def reduce_rank(x, reduction, out):
    """out (M, R) = scale_adapters(x A^T) of a Reduction: the first matrix of a low rank. Raises as linear."""
    linear(x, reduction.a, out)
    scale_adapters(out, reduction.scales, reduction.adapter_ids, out)


def linear(x, weight, out, bias=None, residual=None, low_rank=None, reduction=None):
    """out = x weight^T + bias + residual + A B^T of low_rank (A (M, R), B (N, R)).

    reduction: a Reduction, of which A is written first, as reduce_rank does; None: A is there.

    x (M, K) and weight (N, K) of one floating dtype; out (M, N) of that dtype or float32 is written; bias (N,) of x's
    dtype; residual (M, N) of out's dtype, may be out itself. Any of M, N, K may be 0. On cuBLAS, bias + residual is
    rounded to out's dtype before the product is added. Raises ValueError for other shapes, dtypes or layouts.
    """
    m, k = check("linear", "x", x, (None, None), FLOATS)
    n, _ = check("linear", "weight", weight, (None, k), (x.dtype,))
    check("linear", "out", out, (m, n), (x.dtype, *F32))
    if bias is not None:
        check("linear", "bias", bias, (n,), (x.dtype,))
    if residual is not None:
        check("linear", "residual", residual, (m, n), (out.dtype,))
    if low_rank is not None:
        _check_low_rank("linear", low_rank, m, n, x.dtype)
    if reduction is not None:
        check_reduction("linear", reduction, low_rank, k)
    if not (m and n):
        return
    gemm = _gemm(x, weight, out, k, bias, residual, low_rank)
    if reduction is not None:
        if gemm is gemm_sm90.gemm:
            config = gemm_sm90.reducing_config(MOST_REDUCED_ROWS, x, out, low_rank, reduction, bias, residual)
            if config is not None:
                gemm_sm90.gemm_with_config(config, x, weight, out, bias, residual, low_rank, reduction)
                return
        reduce_rank(x, reduction, low_rank[0])
    if low_rank is not None and gemm is gemm_sm90.gemm:
        gemm_sm90.gemm_low_rank(x, weight, out, low_rank, bias=bias, residual=residual)
        return
    gemm(x, weight, out, bias=bias, residual=residual)
    if low_rank is not None:
        _add_low_rank(gemm, low_rank, out)


def linear_swiglu(x, weight, gate_up, out, low_rank=None, activation="silu", reduction=None):
    """gate_up = x weight^T and out = activation(gate) * up: the bits of linear and swiglu, in one kernel on Hopper.

    low_rank, reduction: as linear's; activation: as swiglu's.

    x (M, K) and weight (2F, K), the gate's rows first, of one floating dtype; gate_up (M, 2F) and out (M, F) of that
    dtype are written. Raises ValueError for other shapes, dtypes or layouts.
    """
    m, k = check("linear_swiglu", "x", x, (None, None), FLOATS)
    n, _ = check("linear_swiglu", "weight", weight, (None, k), (x.dtype,))
    check("linear_swiglu", "gate_up", gate_up, (m, n), (x.dtype,))
    if n % 2:
        raise ValueError(f"linear_swiglu: weight must have an even number of rows, got {n}")
    check("linear_swiglu", "out", out, (m, n // 2), (x.dtype,))
    check_activation("linear_swiglu", activation)
    if low_rank is not None:
        _check_low_rank("linear_swiglu", low_rank, m, n, x.dtype)
    if reduction is not None:
        check_reduction("linear_swiglu", reduction, low_rank, k)
    if m and n and _gemm(x, weight, out, k, residual=gate_up, low_rank=low_rank) is gemm_sm90.gemm:
        if reduction is not None:
            config = gemm_sm90.reducing_config(MOST_REDUCED_ROWS, x, out, low_rank, reduction, swiglu=True)
            if config is not None:
                config = config._replace(activation=activation)
                gemm_sm90.gemm_with_config(config, x, weight, gate_up, None, out, low_rank, reduction)
                return
            reduce_rank(x, reduction, low_rank[0])
        gemm_sm90.gemm_swiglu(x, weight, gate_up, out, low_rank, activation)
    else:
        linear(x, weight, gate_up, low_rank=low_rank, reduction=reduction)
        swiglu(gate_up, out, activation)


def linear_backward_input(dout, weight, dx, accumulate=False, low_rank=None):
    """dx = (or += if accumulate) dout weight + A B of low_rank (A (M, R), B (R, K)): the gradient of linear's x.

    dout (M, N) and weight (N, K) of one floating dtype; dx (M, K) of that dtype or float32, else ValueError.
    """
    m, n = check("linear_backward_input", "dout", dout, (None, None), FLOATS)
    _, k = check("linear_backward_input", "weight", weight, (n, None), (dout.dtype,))
    check("linear_backward_input", "dx", dx, (m, k), (dout.dtype, *F32))
    if low_rank is not None:
        _check_low_rank("linear_backward_input", low_rank, m, k, dout.dtype, b_mn=True)
    if m == 0 or k == 0:
        return
    gemm = _gemm(dout, weight, dx, n, low_rank=low_rank)
    rounds = accumulate and dx.dtype != np.float32
    addend = {"residual": dx} if rounds else {"add": accumulate}
    if low_rank is not None and gemm is gemm_sm90.gemm:
        gemm_sm90.gemm_low_rank(dout, weight, dx, low_rank, b_mn=True, **addend)
        return
    gemm(dout, weight, dx, b_mn=True, **addend)
    if low_rank is not None:
        _add_low_rank(gemm, low_rank, dx, b_mn=True)


def linear_backward_weight(dout, x, dweight, accumulate=True):
    """dweight += dout^T x, or = unless accumulate: the gradient of linear's weight.

    dout (M, N) and x (M, K) of one floating dtype, dweight (N, K) float32, or of that dtype where it is overwritten.
    Raises ValueError for others.
    """
    m, n = check("linear_backward_weight", "dout", dout, (None, None), FLOATS)
    _, k = check("linear_backward_weight", "x", x, (m, None), (dout.dtype,))
    check("linear_backward_weight", "dweight", dweight, (n, k), F32 if accumulate else (*F32, dout.dtype))
    if n and k and (m or not accumulate):
        _gemm(dout, x, dweight, m)(dout, x, dweight, a_mn=True, b_mn=True, add=accumulate)


def bias_backward(dout, dbias):
    """dbias += the column sums of dout: the gradient of linear's bias.

    dout (M, N) floating, dbias (N,) float32. The order of the sum depends on M alone. Raises ValueError.
    """
    _, n = check("bias_backward", "dout", dout, (None, None), FLOATS)
    check("bias_backward", "dbias", dbias, (n,), F32)
    if device.name() == "cpu":
        dbias += np.sum(dout, axis=0)
    else:
        simt.bias_backward(dout, dbias)


def linear_ref(x, weight, bias=None, residual=None):
    """x weight^T + bias + residual, in x's precision."""
    out = x @ weight.T
    out = out if bias is None else out + bias
    return out if residual is None else out + residual


def linear_swiglu_ref(x, weight, activation="silu"):
    """(gate_up, out) of linear_swiglu, in x's precision."""
    gate_up = linear_ref(x, weight)
    return gate_up, swiglu_ref(gate_up, activation)


def linear_backward_ref(dout, x, weight):
    """(dx, dweight, dbias) of linear, in x's precision."""
    return dout @ weight, dout.T @ x, np.sum(dout, axis=0)
