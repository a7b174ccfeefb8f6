"""The row reductions of row_sum.py on the cpu device: log-sum-exp, entropy and softmax of a row of logits.

A sum is 16 partial sums in float64, over columns l, l + 16, ..., then 16 -> 8 -> 4 -> 2 -> 1. kernels/sampling and
kernels/logprob both use these functions, for the same bits.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from rlnumba.kernels.cpu import simd
from rlnumba.kernels.cpu.simd import F32, F64, I32, I64, LANES


@intrinsic
def _row_maximum(typingctx, row):
    """(largest value of a float32 row, its lowest index as int32). A NaN is passed over."""
    result = types.Tuple((types.float32, types.int32))

    def codegen(context, builder, signature, args):
        row = simd.array_argument(context, builder, signature, args, 0)
        size = builder.extract_value(row.shape, 0)
        lanes = ir.Constant(simd.INTEGERS, list(range(LANES)))
        loop = simd.Loop(builder, I64(0), size, [simd.splat(F32, -math.inf), simd.splat(I32, 0)])
        best, where = loop.carried
        mask = simd.lanes_below(builder, builder.sub(size, loop.index))
        values = simd.load(builder, row.data, loop.index, mask, -math.inf)
        columns = builder.add(simd.broadcast(builder, builder.trunc(loop.index, I32)), lanes)
        larger = builder.fcmp_ordered(">", values, best)
        loop.next([builder.select(larger, values, best), builder.select(larger, columns, where)])
        best, where = loop.carried
        largest, index = (builder.extract_element(vector, I32(0)) for vector in (best, where))
        for lane in range(1, LANES):
            value, column = (builder.extract_element(vector, I32(lane)) for vector in (best, where))
            tie = builder.and_(builder.fcmp_ordered("==", value, largest), builder.icmp_signed("<", column, index))
            better = builder.or_(builder.fcmp_ordered(">", value, largest), tie)
            largest, index = builder.select(better, value, largest), builder.select(better, column, index)
        return context.make_tuple(builder, signature.return_type, [largest, index])

    return result(row), codegen


@intrinsic
def _row_sums(typingctx, row, temperature, maximum):
    """(sum of e, sum of e d) as float64, with d = row / temperature - maximum and e = exp(d) in float32."""
    result = types.UniTuple(types.float64, 2)

    def codegen(context, builder, signature, args):
        row = simd.array_argument(context, builder, signature, args, 0)
        temperature, maximum = (simd.broadcast(builder, scalar) for scalar in args[1:])
        size = builder.extract_value(row.shape, 0)
        loop = simd.Loop(builder, I64(0), size, [simd.splat(F64, 0.0)] * 2)
        total, weighted = loop.carried
        mask = simd.lanes_below(builder, builder.sub(size, loop.index))
        values = simd.load(builder, row.data, loop.index, mask, -math.inf)
        distance = builder.fsub(builder.fdiv(values, temperature), maximum)
        exponential = simd.exp(builder, distance)
        # 0 * -inf is no number; a logit of -inf and the padding contribute 0.
        vanished = builder.fcmp_ordered("==", exponential, simd.splat(F32, 0.0))
        finite = builder.select(vanished, simd.splat(F32, 0.0), distance)
        wide = builder.fpext(exponential, simd.DOUBLES)
        loop.next([builder.fadd(total, wide), simd.fma(builder, wide, builder.fpext(finite, simd.DOUBLES), weighted)])
        return context.make_tuple(builder, signature.return_type, [simd.fold(builder, sums) for sums in loop.carried])

    return result(row, temperature, maximum), codegen


@intrinsic
def row_softmax(typingctx, row, temperature, lse, factor, out):
    """out = factor * exp(row / temperature - lse), all float32; out may be row."""

    def codegen(context, builder, signature, args):
        row = simd.array_argument(context, builder, signature, args, 0)
        out = simd.array_argument(context, builder, signature, args, 4)
        temperature, lse, factor = (simd.broadcast(builder, scalar) for scalar in args[1:4])
        size = builder.extract_value(row.shape, 0)
        loop = simd.Loop(builder, I64(0), size, [])
        mask = simd.lanes_below(builder, builder.sub(size, loop.index))
        values = simd.load(builder, row.data, loop.index, mask)
        exponential = simd.exp(builder, builder.fsub(builder.fdiv(values, temperature), lse))
        simd.store(builder, builder.fmul(factor, exponential), out.data, loop.index, mask)
        loop.next([])
        return context.get_dummy_value()

    return types.void(row, temperature, lse, factor, out), codegen


@numba.njit(cache=True, error_model="numpy")
def row_terms(row, temperature):
    """(lse, entropy, top): log-sum-exp and entropy of softmax(row / temperature), lowest index of the largest logit.

    row (V,) and temperature float32, V > 0. entropy = log s - sum(e d) / s, s = sum(e), with d and e of _row_sums.
    """
    largest, top = _row_maximum(row)
    maximum = largest / temperature
    total, weighted = _row_sums(row, temperature, maximum)
    log_total = math.log(total)
    return np.float32(maximum + log_total), np.float32(log_total - weighted / total), top


@numba.njit(cache=True, error_model="numpy")
def masked_row(row, threshold):
    """A copy of a row (V,) float32 in which what is below the threshold is -inf."""
    out = np.empty_like(row)
    for i in range(row.shape[0]):
        out[i] = np.float32(-np.inf) if row[i] < threshold else row[i]
    return out
