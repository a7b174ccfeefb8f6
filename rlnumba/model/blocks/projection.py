"""A block's projections, y = x w^T + bias, with the low-rank update of an adapter; each backward under its forward."""

from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.gemm.grouped import grouped_gemm, grouped_gemm_swiglu
from rlnumba.kernels.gemm.ops import (
    bias_backward,
    linear,
    linear_backward_input,
    linear_backward_weight,
    linear_swiglu,
)
from rlnumba.kernels.nn.elementwise import add
from rlnumba.kernels.nn.norm_to_residual import norm_to_residual
from rlnumba.kernels.nn.rmsnorm import rmsnorm_backward
from rlnumba.kernels.quantized.grouped import (
    is_packed_grouped_gemm,
    packed_grouped_gemm,
    packed_grouped_gemm_swiglu,
)
from rlnumba.kernels.quantized.linear import is_packed_gemm, packed_linear, packed_linear_swiglu
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize


class BlockOutput(NamedTuple):
    """A block's output (N, D) before its norm, and the norm's rstd (N,) float32."""

    rows: object
    rstd: object


def empty_output(x, ctx):
    """The BlockOutput that output_to_residual writes; None where outputs have no norm."""
    if not ctx.config.has_output_norms:
        return None
    return BlockOutput(ctx.memory.empty(x.shape, x.dtype), ctx.memory.empty(x.shape[:1], np.float32))


def dense(weight, memory):
    """A context with the matrix of a weight as GEMMs read it: of a QuantizedWeight its values, in memory of a scope."""
    return _dequantized(weight, memory) if isinstance(weight, QuantizedWeight) else nullcontext(weight)


@contextmanager
def _dequantized(weight, memory):
    with memory.scope():
        values = memory.empty(weight.shape, weight.dtype)
        dequantize(weight, values)
        yield values


def multiply(x, weight, y, memory, bias=None, residual=None, low_rank=None, reduction=None):
    """`linear` of a weight, or of a QuantizedWeight: with few rows from its packed words, with the same bits."""
    matrices = [each for each in (y, residual, *(low_rank or ())) if each is not None]
    if isinstance(weight, QuantizedWeight) and is_packed_gemm(x, weight, *matrices, bias=bias):
        packed_linear(x, weight, y, bias, residual, low_rank, reduction)
        return
    with dense(weight, memory) as values:
        linear(x, values, y, bias=bias, residual=residual, low_rank=low_rank, reduction=reduction)


def multiply_swiglu(x, weight, gate_up, y, memory, low_rank=None, activation="silu", reduction=None):
    """`linear_swiglu` of a weight, or of a QuantizedWeight, as `multiply`."""
    if isinstance(weight, QuantizedWeight) and is_packed_gemm(x, weight, gate_up, y, *(low_rank or ()), swiglu=True):
        packed_linear_swiglu(x, weight, gate_up, y, low_rank, activation, reduction)
        return
    with dense(weight, memory) as values:
        linear_swiglu(x, values, gate_up, y, low_rank, activation, reduction)


def multiply_experts(x, weights, starts, y, memory):
    """`grouped_gemm` of weights, or of a QuantizedWeight: with few rows from its packed words, with the same bits."""
    if isinstance(weights, QuantizedWeight) and is_packed_grouped_gemm(x, weights, y):
        packed_grouped_gemm(x, weights, starts, y)
        return
    with dense(weights, memory) as values:
        grouped_gemm(x, values, starts, y)


def multiply_experts_swiglu(x, weights, starts, gate_up, y, memory):
    """`grouped_gemm_swiglu` of experts' weights, or of a QuantizedWeight, as `multiply_experts`."""
    if isinstance(weights, QuantizedWeight) and is_packed_grouped_gemm(x, weights, gate_up, y):
        packed_grouped_gemm_swiglu(x, weights, starts, gate_up, y)
        return
    with dense(weights, memory) as values:
        grouped_gemm_swiglu(x, values, starts, gate_up, y)


def project(layer, name, x, w, ctx, y, residual=None):
    """y = x w^T + bias + residual of the projection `name`, plus its adapter's update; returns `reduce`'s result."""
    low_rank, reduction = low_rank_of(layer, name, x, ctx)
    multiply(x, getattr(w, name), y, ctx.memory, getattr(w, f"{name}_bias"), residual, low_rank, reduction)
    return low_rank and low_rank[0]


def project_to_residual(layer, name, x, w, ctx, y, residual):
    """`project` into the residual stream y. Each of several ranks has some columns of x, and its own of y."""
    if ctx.ranks is not None:
        x = ctx.ranks.gather_columns(x, ctx.memory.empty((x.shape[0], x.shape[1] * ctx.ranks.count), x.dtype))
    return project(layer, name, x, w, ctx, y, residual)


def output_to_residual(layer, name, x, w, ctx, y, residual, output):
    """The last projection of a block into the residual stream y, through the norm of the block's output if it has one.

    output: of empty_output. y: None where it need not be computed, but for what the backward reads. Returns `reduce`'s
    result.
    """
    if output is None:
        return reduce(layer, name, x, ctx) if y is None else project_to_residual(layer, name, x, w, ctx, y, residual)
    xa = project_to_residual(layer, name, x, w, ctx, output.rows, None)
    weight, config, memory = getattr(w, f"{name}_norm"), ctx.config, ctx.memory
    with memory.scope():
        if ctx.ranks is None:
            out = memory.empty(output.rows.shape, output.rows.dtype) if y is None else y
            arguments = output.rows, weight, config.rms_norm_eps, residual, out, output.rstd, config.norm_offset
            norm_to_residual(*arguments)
        else:
            whole = memory.empty((len(x), len(weight)), x.dtype)
            ctx.ranks.rmsnorm(output.rows, weight, config.rms_norm_eps, whole, memory, config.norm_offset)
            add(residual, ctx.ranks.own_columns(whole, memory), y)
    return xa


def output_backward(name, dy, w, grads, ctx, output):
    """The gradient of the last projection's result, from that of y of output_to_residual."""
    if output is None:
        return dy
    doutput = ctx.memory.empty(dy.shape, dy.dtype)
    weight, dweight = getattr(w, f"{name}_norm"), getattr(grads, f"{name}_norm")
    rmsnorm_backward(dy, output.rows, weight, output.rstd, doutput, dweight, unit_offset=ctx.config.norm_offset)
    return doutput


def reduce(layer, name, x, ctx):
    """s x A^T of the projection's adapter, None where there is none."""
    return ctx.lora and ctx.lora.reduce(layer, name, x, ctx.memory)


def low_rank_of(layer, name, x, ctx):
    """(low rank, reduction) that `linear` takes, (None, None) without an adapter.

    low rank: `reduce`'s result, which `linear` writes where there is a reduction, and the adapter's B.
    """
    return ctx.lora.low_rank(layer, name, x, ctx.memory) if ctx.lora else (None, None)


def project_backward(layer, name, dy, x, xa, w, grads, ctx):
    """dx (N, K), from dy (N, M), of `project`, which returned xa; the gradients of what is trained are written."""
    weight_backward(name, dy, x, grads, ctx)
    dx = ctx.memory.empty(x.shape, x.dtype)
    with dense(getattr(w, name), ctx.memory) as weight:
        if xa is None:
            linear_backward_input(dy, weight, dx)
        else:
            ctx.lora.backward(layer, name, dy, x, xa, weight, dx, ctx.memory)
    return dx


def weight_backward(name, dy, x, grads, ctx):
    """The gradients of the weight and the bias of the projection `name`, where they are trained."""
    if (dw := getattr(grads, name)) is not None:
        linear_backward_weight(dy, x, dw, accumulate=ctx.adds_gradients)
    if (dbias := getattr(grads, f"{name}_bias")) is not None:
        bias_backward(dy, dbias)
