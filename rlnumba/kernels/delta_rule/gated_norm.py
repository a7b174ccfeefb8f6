"""RMSNorm of a head's output times the SiLU of its gate: the last operator before linear attention's projection.

    out = o rstd weight silu(z)      rstd = 1 / sqrt(mean(o^2) + eps)      silu(z) = z s(z), s(z) = 1 / (1 + exp(-z))

    with g = dout silu(z) weight and o^ = o rstd:      do = rstd (g - o^ mean(g o^))
    dz = dout o^ weight s(z) (1 + z (1 - s(z)))        dweight = sum over tokens and heads of dout silu(z) o^

o (N, HV, V): operands (arithmetic.py); z: columns of the projection (inputs.py); weight (V,) of the model's dtype. A
head's sum of squares has one order. The result is rounded once, where transformers rounds o, its norm and the product:
it is nearer to exact arithmetic than theirs. Source: transformers' Qwen3_5RMSNormGated; Yang et al. 2024, section 3.4.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check
from rlnumba.kernels.delta_rule.arithmetic import operand_dtype
from rlnumba.kernels.nn.rmsnorm import add_partials
from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.warp import inverse_sqrt, narrow, warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Warps of a block, each with a head of a token at a time; blocks of the backward, which fix the order of dweight's sum.
LINES = 4
BACKWARD_BLOCKS = 528


@specialize
def gated_norm_kernel(dim):
    """The kernel for heads of `dim` columns."""
    count = -(-dim // 32)

    @cuda.jit
    def gated_norm_kernel(o, projected, column, weight, eps, out, rstd):
        """A warp owns a head of a token; a lane every 32nd column. column: of the first z in a row of projected."""
        values, index, lane = (
            cuda.local.array(count, np.float32),
            cuda.blockIdx.x * LINES + cuda.threadIdx.y,
            cuda.threadIdx.x,
        )
        t, head = index // o.shape[1], index % o.shape[1]
        if t >= o.shape[0]:
            return
        squares = np.float32(0.0)
        for i in range(count):
            values[i] = widen(o[t, head, i * 32 + lane]) if i * 32 + lane < dim else np.float32(0.0)
            squares = cuda.fma(values[i], values[i], squares)
        scale = inverse_sqrt(warp_sum(squares) / np.float32(dim) + eps)
        for i in range(count):
            e = i * 32 + lane
            if e < dim:
                z = widen(projected[t, column + head * dim + e])
                out[t, head, e] = narrow(values[i] * scale * widen(weight[e]) * (z * sigmoid(z)), out)
        if lane == 0:
            rstd[t, head] = scale

    return gated_norm_kernel


@specialize
def gated_norm_backward_kernel(dim):
    """The kernel for heads of `dim` columns."""
    count, size = -(-dim // 32), LINES * dim

    @cuda.jit
    def gated_norm_backward_kernel(dout, o, projected, column, weight, rstd, do, dprojected, partials):
        """A warp has every (LINES * blocks)-th head of a token; partials (blocks, dim) of dweight."""
        sums = cuda.shared.array(size, np.float32)
        gradients, values, gates, totals = (
            cuda.local.array(count, np.float32),
            cuda.local.array(count, np.float32),
            cuda.local.array(count, np.float32),
            cuda.local.array(count, np.float32),
        )
        lane, line, one, heads = cuda.threadIdx.x, cuda.threadIdx.y, np.float32(1.0), o.shape[1]
        for i in range(count):
            totals[i] = np.float32(0.0)
        for index in range(cuda.blockIdx.x * LINES + line, o.shape[0] * heads, cuda.gridDim.x * LINES):
            t, head, product = index // heads, index % heads, np.float32(0.0)
            scale = rstd[t, head]
            for i in range(count):
                e = i * 32 + lane
                gradients[i], values[i], gates[i] = np.float32(0.0), np.float32(0.0), np.float32(0.0)
                if e < dim:
                    gates[i] = widen(projected[t, column + head * dim + e])
                    gradients[i], values[i] = widen(dout[t, head, e]), widen(o[t, head, e]) * scale
                    activated = gradients[i] * (gates[i] * sigmoid(gates[i]))
                    product = cuda.fma(activated * widen(weight[e]), values[i], product)
                    totals[i] = cuda.fma(activated, values[i], totals[i])
            mean = warp_sum(product) / np.float32(dim)
            for i in range(count):
                e = i * 32 + lane
                if e < dim:
                    s = sigmoid(gates[i])
                    upstream = gradients[i] * widen(weight[e])
                    do[t, head, e] = narrow(scale * (upstream * (gates[i] * s) - values[i] * mean), do)
                    dz = upstream * values[i] * s * (one + gates[i] * (one - s))
                    dprojected[t, column + head * dim + e] = narrow(dz, dprojected)
        for i in range(count):
            if i * 32 + lane < dim:
                sums[line * dim + i * 32 + lane] = totals[i]
        cuda.syncthreads()
        for e in range(line * 32 + lane, dim, LINES * 32):
            total = sums[e]
            for other in range(1, LINES):
                total += sums[other * dim + e]
            partials[cuda.blockIdx.x, e] = total

    return gated_norm_backward_kernel


def _check(op, o, projected, heads, weight, rstd):
    """(N, HV, V), the shape of o."""
    shape = check(op, "o", o, (None, heads.value_heads, heads.value_dim), (operand_dtype(projected.dtype),))
    check(op, "projected", projected, (shape[0], heads.columns), FLOATS)
    check(op, "weight", weight, (heads.value_dim,), (projected.dtype,))
    check(op, "rstd", rstd, shape[:2], F32)
    return shape


def gated_norm(o, projected, heads, weight, eps, out, rstd):
    """out = o rstd weight silu(z), a head at a time.

    o (N, HV, V) operands; projected (N, columns) of a floating dtype, of which DeltaRuleHeads `heads` say where z is;
    weight (V,), out (N, HV, V) of projected's dtype and rstd (N, HV) float32 are written. Raises ValueError for
    other shapes, dtypes or layouts.
    """
    shape = _check("gated_norm", o, projected, heads, weight, rstd)
    check("gated_norm", "out", out, shape, (projected.dtype,))
    if device.name() == "cpu":
        out[...], rstd[...] = gated_norm_ref(o, _z(projected, heads), weight, eps)
        return
    arguments = o, projected, heads.channels, weight, float(eps), out, rstd
    launch(gated_norm_kernel(shape[2]), -(-shape[0] * shape[1] // LINES), (32, LINES), *arguments)


def gated_norm_backward(dout, inputs, heads, weight, rstd, gradients, dweight):
    """The gradient of gated_norm.

    inputs: (o, projected); gradients: (do, dprojected), do (N, HV, V) of projected's dtype, and of dprojected the
    columns of z, which are written; dweight (V,) float32 +=, or None; rstd as the forward wrote it. Raises ValueError
    for other shapes, dtypes or layouts.
    """
    op, (o, projected), (do, dprojected) = "gated_norm_backward", inputs, gradients
    shape = _check(op, o, projected, heads, weight, rstd)
    for name, array in (("dout", dout), ("do", do)):
        check(op, name, array, shape, (projected.dtype,))
    check(op, "dprojected", dprojected, projected.shape, (projected.dtype,))
    if dweight is not None:
        check(op, "dweight", dweight, weight.shape, F32)
    if device.name() == "cpu":
        do[...], dz, of_weight = gated_norm_backward_ref(dout, o, _z(projected, heads), weight, rstd)
        _z(dprojected, heads)[...] = dz
        if dweight is not None:
            dweight += of_weight
        return
    blocks = max(min(-(-shape[0] * shape[1] // LINES), BACKWARD_BLOCKS), 1)
    partials = device.xp().empty((blocks, shape[2]), np.float32)
    arguments = dout, o, projected, heads.channels, weight, rstd, do, dprojected, partials
    launch(gated_norm_backward_kernel(shape[2]), blocks, (32, LINES), *arguments)
    if dweight is not None:
        add_partials(partials, dweight)


def _z(projected, heads):
    """The view (N, HV, V) of z."""
    columns = projected[:, heads.channels : heads.gates]
    return columns.reshape(len(projected), heads.value_heads, heads.value_dim)


def gated_norm_ref(o, z, weight, eps):
    """(out, rstd) of gated_norm, in the precision of its arguments."""
    rstd = 1 / np.sqrt(np.mean(o * o, axis=-1) + o.dtype.type(eps))
    with np.errstate(over="ignore"):
        return o * rstd[..., None] * weight * (z / (1 + np.exp(-z))), rstd


def gated_norm_backward_ref(dout, o, z, weight, rstd):
    """(do, dz, dweight) of gated_norm_backward, in the precision of its arguments."""
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-z))
    normalised, activated = o * rstd[..., None], dout * z * s
    g = activated * weight
    do = rstd[..., None] * (g - normalised * np.mean(g * normalised, axis=-1, keepdims=True))
    dz = dout * normalised * weight * s * (1 + z * (1 - s))
    return do, dz, np.sum(activated * normalised, axis=(0, 1))
