"""The two blocks of a decoder layer, each forward with its backward under it, and the attention of training.

    h = x + o_proj(attention(rope(norm?(q, k)), v)),  q | k | v = qkv_proj(rmsnorm(x))
    y = h + down_proj(silu(gate) * up),               gate | up = gate_up_proj(rmsnorm(h))

The residual stream x -> h -> y stays in the compute dtype and is added in the epilogue of the GEMM before it. Each of
several ranks has its columns of it, and norms gather the rows.
A block's forward returns what its backward reads, as a tuple that only the backward below it unpacks. Outputs of the
modules `recomputed` are None there, and the backward computes them again: no GEMM but an adapter's.
A backward overwrites the gradient of a block's output with that of its input: `dx` is dy on entry.
Source: the modelling code of transformers for Qwen3, Qwen2 and Llama.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from rlnumba.config.schema import RECOMPUTE_MODULES
from rlnumba.kernels.attention.ops import attention, attention_backward
from rlnumba.kernels.gemm.ops import bias_backward, linear, linear_backward_input, linear_backward_weight, linear_swiglu
from rlnumba.kernels.nn.qkv import qkv_split, qkv_split_backward
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_backward
from rlnumba.model.lora import LoraContext
from rlnumba.runtime import device

F32 = np.dtype(np.float32)
# Parts of a layer that the backward may compute again: its two norms, the norms and rotations of q and k, SwiGLU.
MODULES = frozenset(RECOMPUTE_MODULES)


class HeapAllocator:
    """The allocator where no arena is given: plain arrays, freed with their last reference."""

    def empty(self, shape, dtype):
        return device.xp().empty(shape, dtype)

    def scope(self):
        return nullcontext()


@dataclass(frozen=True)
class ForwardContext:
    """Arguments that all layers of one forward share: `ctx` below.

    rope: (cos, sin) tables; attention: the attention backend; memory: an Arena or HeapAllocator; lora: the LoraContext
    of the model's adapter, or None. adds_gradients: whether the gradients of layers' matrices are added to what is
    there, or written. ranks: see Transformer; config is then that of this rank's shard.
    """

    config: object
    position_ids: object
    rope: tuple
    attention: object
    memory: object
    lora: LoraContext | None = None
    adds_gradients: bool = True
    ranks: object = None


class PackedAttention:
    """Causal attention within each packed sequence: the attention backend of training and scoring.

    cu_seqlens: (B + 1,) int32; scale: 1 / sqrt(head_dim); memory: an Arena (inside its scope) or None, for the
    log-sum-exps that the backward reads.
    """

    def __init__(self, cu_seqlens, max_seqlen, scale, memory=None):
        self.cu_seqlens, self.max_seqlen, self.scale = cu_seqlens, max_seqlen, scale
        self.memory = memory or HeapAllocator()
        self.lse, self.reserved = {}, {}

    def reserve(self, layer, heads, tokens):
        """Allocate now what this layer's next `forward` leaves for the backward, in the scope that is open now."""
        self.reserved[layer] = self.memory.empty((heads, tokens), F32)

    def qkv_norm_rope(self, layer, qkv, w, ctx, q):
        """Write q (N, H, E) from qkv (N, (H + 2 HK) E); return (k, v, rstd) for the forward and the backward.

        k, v (N, HK, E), k normalised and rotated as q is; rstd (N, H + HK) float32 of the heads' norms, if any.
        """
        N, H, E = q.shape
        HK, empty = ctx.config.num_key_value_heads, ctx.memory.empty
        k, v, rstd = empty((N, HK, E), q.dtype), empty((N, HK, E), q.dtype), empty((N, H + HK), F32)
        qkv_split(qkv, w.q_norm, w.k_norm, ctx.config.rms_norm_eps, *ctx.rope, ctx.position_ids, q, k, v, rstd)
        return k, v, rstd

    def forward(self, layer, qkv, w, ctx, out):
        """qkv (N, (H + 2 HK) E) -> out (N, H, E), written in place; returns (q, k, v, rstd), of qkv_norm_rope."""
        q = ctx.memory.empty(out.shape, out.dtype)
        k, v, rstd = self.qkv_norm_rope(layer, qkv, w, ctx, q)
        lse = self.reserved.pop(layer, None)
        self.lse[layer] = lse = self.memory.empty((q.shape[1], q.shape[0]), F32) if lse is None else lse
        attention(q, k, v, self.cu_seqlens, self.max_seqlen, self.scale, out, lse)
        return q, k, v, rstd

    def backward(self, layer, dout, q, k, v, out, dq, dk, dv):
        """Gradients of q, k, v, written in place, after this layer's forward (the latest one, if repeated)."""
        lse, lengths = self.lse.pop(layer), (self.cu_seqlens, self.max_seqlen)
        attention_backward(dout, q, k, v, out, lse, *lengths, self.scale, dq, dk, dv)


def _linear(layer, name, x, w, ctx, y, residual=None):
    """y = x w^T + bias + residual of the projection `name`, plus its adapter's update; returns `reduce`'s result."""
    xa, low_rank = reduced(layer, name, x, ctx)
    linear(x, getattr(w, name), y, bias=getattr(w, f"{name}_bias"), residual=residual, low_rank=low_rank)
    return xa


def _linear_to_residual(layer, name, x, w, ctx, y, residual):
    """_linear of o or down. Each of several ranks has some columns of x, and its own of the residual stream, y."""
    if ctx.ranks is not None:
        x = ctx.ranks.gather_columns(x, ctx.memory.empty((x.shape[0], x.shape[1] * ctx.ranks.count), x.dtype))
    return _linear(layer, name, x, w, ctx, y, residual)


def _reduce(layer, name, x, ctx):
    """s x A^T of the projection's adapter, None where there is none."""
    return ctx.lora and ctx.lora.reduce(layer, name, x, ctx.memory)


def reduced(layer, name, x, ctx):
    """`_reduce`'s result, and with the adapter's B what `linear` takes as a low rank; (None, None) without one."""
    xa = _reduce(layer, name, x, ctx)
    return xa, None if xa is None else (xa, ctx.lora.pair(layer, name).b)


def _linear_backward(layer, name, dy, x, xa, w, grads, ctx):
    """dx (N, K), from dy (N, M), of _linear, which returned xa; the gradients of what is trained are written."""
    _weight_backward(name, dy, x, grads, ctx)
    dx = ctx.memory.empty(x.shape, x.dtype)
    if xa is None:
        linear_backward_input(dy, getattr(w, name), dx)
    else:
        ctx.lora.backward(layer, name, dy, x, xa, getattr(w, name), dx, ctx.memory)
    return dx


def _weight_backward(name, dy, x, grads, ctx):
    """The gradients of the weight and the bias of the projection `name`, where they are trained."""
    if (dw := getattr(grads, name)) is not None:
        linear_backward_weight(dy, x, dw, accumulate=ctx.adds_gradients)
    if (dbias := getattr(grads, f"{name}_bias")) is not None:
        bias_backward(dy, dbias)


def norm_rows(x, weight, ctx, out, rstd):
    """out (N, D) = rmsnorm(x), whole rows on every rank; rstd (N,) is written, but not of several ranks."""
    if ctx.ranks is None:
        rmsnorm(x, weight, ctx.config.rms_norm_eps, out, rstd)
    else:
        ctx.ranks.rmsnorm(x, weight, ctx.config.rms_norm_eps, out, ctx.memory)


def _normed(x, weight, rstd, ctx):
    """The result of norm_rows."""
    normed = ctx.memory.empty((x.shape[0], len(weight)), x.dtype)
    norm_rows(x, weight, ctx, normed, rstd)
    return normed


def _scope(ctx, name, recomputed):
    """A scope of memory where what the module makes is computed again, else none."""
    return ctx.memory.scope() if name in recomputed else nullcontext()


def attention_block(layer, x, w, ctx, h, recomputed=()):
    """h = x + o_proj(attention(...rmsnorm(x)...)).

    layer: its index; x, h: (N, D), or this rank's columns if there are several; w: LayerWeights; recomputed: some of
    MODULES. Writes h; returns what the backward reads.
    """
    config, empty, N = ctx.config, ctx.memory.empty, x.shape[0]
    H, HK, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rstd, qkv, attended = empty((N,), F32), empty((N, (H + 2 * HK) * E), x.dtype), empty((N, H, E), x.dtype)
    if "rope" in recomputed:
        ctx.attention.reserve(layer, H, N)
    with _scope(ctx, "norm", recomputed):
        normed = _normed(x, w.input_norm, rstd, ctx)
        qkv_xa = _linear(layer, "qkv", normed, w, ctx, qkv)
    with _scope(ctx, "rope", recomputed):
        rotated = ctx.attention.forward(layer, qkv, w, ctx, attended)
        o_xa = _linear_to_residual(layer, "o", attended.reshape(N, H * E), w, ctx, h, x)
    normed = None if "norm" in recomputed else normed
    rotated = [None] * len(rotated) if "rope" in recomputed else rotated
    return x, normed, rstd, qkv, *rotated, attended, None if recomputed else (qkv_xa, o_xa)


def attention_block_backward(layer, dx, w, grads, ctx, saved):
    """dx: (N, D), the gradient of h on entry and of x on return.

    grads: the layer's LayerWeights, None where a weight is not trained; they, and the adapter's gradients, are written.
    """
    x, normed, rstd, qkv, q, k, v, head_rstd, attended, xas = saved
    empty, flat = ctx.memory.empty, attended.reshape(x.shape[0], -1)
    if q is None:
        q = empty(attended.shape, x.dtype)
        k, v, head_rstd = ctx.attention.qkv_norm_rope(layer, qkv, w, ctx, q)
    o_xa = _reduce(layer, "o", flat, ctx) if xas is None else xas[1]
    dflat = _linear_backward(layer, "o", dx, flat, o_xa, w, grads, ctx)
    dq, dk, dv = (empty(array.shape, x.dtype) for array in (q, k, v))
    ctx.attention.backward(layer, dflat.reshape(attended.shape), q, k, v, attended, dq, dk, dv)
    dqkv = empty(qkv.shape, x.dtype)
    rope = *ctx.rope, ctx.position_ids
    qkv_split_backward(dq, dk, dv, qkv, w.q_norm, w.k_norm, *rope, head_rstd, dqkv, grads.q_norm, grads.k_norm)
    normed = _normed(x, w.input_norm, rstd, ctx) if normed is None else normed
    qkv_xa = _reduce(layer, "qkv", normed, ctx) if xas is None else xas[0]
    dnormed = _linear_backward(layer, "qkv", dqkv, normed, qkv_xa, w, grads, ctx)
    rmsnorm_backward(dnormed, x, w.input_norm, rstd, dx, grads.input_norm, accumulate=True)


def mlp_block(layer, h, w, ctx, y, recomputed=()):
    """y = h + down_proj(silu(gate) * up).

    h, y: (N, D), or this rank's columns if there are several. Writes y unless it is None (recomputation for the
    backward, which does not read y); recomputed: some of MODULES; returns what the backward reads.
    """
    config, empty = ctx.config, ctx.memory.empty
    N, F = h.shape[0], config.intermediate_size
    rstd, gate_up = empty((N,), F32), empty((N, 2 * F), h.dtype)
    kept = None if "swiglu" in recomputed else empty((N, F), h.dtype)
    with _scope(ctx, "norm", recomputed):
        normed = _normed(h, w.post_norm, rstd, ctx)
        with _scope(ctx, "swiglu", recomputed):
            activated = empty((N, F), h.dtype) if kept is None else kept
            if w.gate_up_bias is None:
                gate_up_xa, low_rank = reduced(layer, "gate_up", normed, ctx)
                linear_swiglu(normed, w.gate_up, gate_up, activated, low_rank)
            else:
                gate_up_xa = _linear(layer, "gate_up", normed, w, ctx, gate_up)
                swiglu(gate_up, activated)
            if y is not None:
                down_xa = _linear_to_residual(layer, "down", activated, w, ctx, y, h)
            else:
                down_xa = _reduce(layer, "down", activated, ctx)
    normed = None if "norm" in recomputed else normed
    return h, normed, rstd, gate_up, kept, None if recomputed else (gate_up_xa, down_xa)


def mlp_block_backward(layer, dx, w, grads, ctx, saved):
    """dx: (N, D), the gradient of y on entry and of h on return. grads: as attention_block_backward's."""
    h, normed, rstd, gate_up, activated, xas = saved
    # The gradient of gate | up takes their place.
    dgate_up = gate_up
    if activated is None and ctx.lora is None:
        # The pass that reads gate | up computes SwiGLU again, over its own gradient.
        activated = ctx.memory.empty((h.shape[0], w.down.shape[1]), h.dtype)
        linear_backward_input(dx, w.down, activated)
        swiglu_backward(activated, gate_up, dgate_up, out_over_dout=True)
        _weight_backward("down", dx, activated, grads, ctx)
    else:
        if activated is None:
            activated = ctx.memory.empty((h.shape[0], w.down.shape[1]), h.dtype)
            swiglu(gate_up, activated)
        down_xa = _reduce(layer, "down", activated, ctx) if xas is None else xas[1]
        dactivated = _linear_backward(layer, "down", dx, activated, down_xa, w, grads, ctx)
        swiglu_backward(dactivated, gate_up, dgate_up)
    normed = _normed(h, w.post_norm, rstd, ctx) if normed is None else normed
    gate_up_xa = _reduce(layer, "gate_up", normed, ctx) if xas is None else xas[0]
    dnormed = _linear_backward(layer, "gate_up", dgate_up, normed, gate_up_xa, w, grads, ctx)
    rmsnorm_backward(dnormed, h, w.post_norm, rstd, dx, grads.post_norm, accumulate=True)
