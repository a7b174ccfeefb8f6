"""The two blocks of a decoder layer, each forward with its backward under it, and the attention of training.

    h = x + o_proj(attention(rope(norm?(q, k)), v)),  q | k | v = qkv_proj(rmsnorm(x))
    y = h + down_proj(silu(gate) * up),               gate | up = gate_up_proj(rmsnorm(h))

The residual stream x -> h -> y stays in the compute dtype and is added in the epilogue of the GEMM before it.
A block's forward returns what its backward reads, as a tuple that only the backward below it unpacks. With `selective`
it returns what is dear, and `*_recomputed` makes that tuple of it: norms, rotations and SwiGLU again, no GEMM but an
adapter's.
A backward overwrites the gradient of a block's output with that of its input: `dx` is dy on entry.
Source: the modelling code of transformers for Qwen3, Qwen2 and Llama.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.attention.ops import attention, attention_backward
from rlnumba.kernels.gemm.ops import bias_backward, linear, linear_backward_input, linear_backward_weight, linear_swiglu
from rlnumba.kernels.nn.qkv import qkv_split, qkv_split_backward
from rlnumba.kernels.nn.rmsnorm import rmsnorm, rmsnorm_backward
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_backward
from rlnumba.model.lora import LoraContext
from rlnumba.runtime import device

F32 = np.dtype(np.float32)


class HeapAllocator:
    """The allocator where no arena is given: plain arrays, freed with their last reference."""

    def empty(self, shape, dtype):
        return device.xp().empty(shape, dtype)

    def scope(self):
        return nullcontext()


@dataclass(frozen=True)
class ForwardContext:
    """What the layers of one forward share: `ctx` below.

    rope: (cos, sin) tables; attention: the attention backend; memory: an Arena or HeapAllocator; lora: the LoraContext
    of the model's adapter, or None.
    """

    config: object
    position_ids: object
    rope: tuple
    attention: object
    memory: object
    lora: LoraContext | None = None


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
        """Write q (N, H, E) from qkv (N, (H + 2 HK) E); return (k, v, rstd) for `forward` and the backward.

        k, v (N, HK, E), k normalised and rotated as q is; rstd (N, H + HK) float32 of the heads' norms, if any.
        """
        N, H, E = q.shape
        HK, empty = ctx.config.num_key_value_heads, ctx.memory.empty
        k, v, rstd = empty((N, HK, E), q.dtype), empty((N, HK, E), q.dtype), empty((N, H + HK), F32)
        qkv_split(qkv, w.q_norm, w.k_norm, ctx.config.rms_norm_eps, *ctx.rope, ctx.position_ids, q, k, v, rstd)
        return k, v, rstd

    def forward(self, layer, q, k, v, out):
        """q (N, H, E), k and v (N, HK, E) -> out (N, H, E), written in place."""
        lse = self.reserved.pop(layer, None)
        self.lse[layer] = lse = self.memory.empty((q.shape[1], q.shape[0]), F32) if lse is None else lse
        attention(q, k, v, self.cu_seqlens, self.max_seqlen, self.scale, out, lse)

    def backward(self, layer, dout, q, k, v, out, dq, dk, dv):
        """Gradients of q, k, v, written in place, after this layer's forward (the latest one, if repeated)."""
        lse, lengths = self.lse.pop(layer), (self.cu_seqlens, self.max_seqlen)
        attention_backward(dout, q, k, v, out, lse, *lengths, self.scale, dq, dk, dv)


def _linear(layer, name, x, w, ctx, y, residual=None):
    """y = x w^T + bias + residual of the projection `name`, plus its adapter's update; returns `reduce`'s result."""
    xa, low_rank = reduced(layer, name, x, ctx)
    linear(x, getattr(w, name), y, bias=getattr(w, f"{name}_bias"), residual=residual, low_rank=low_rank)
    return xa


def reduced(layer, name, x, ctx):
    """s x A^T of the projection's adapter, and with its B what `linear` takes as a low rank; (None, None) without."""
    xa = ctx.lora and ctx.lora.reduce(layer, name, x, ctx.memory)
    return xa, None if xa is None else (xa, ctx.lora.pair(layer, name).b)


def _linear_backward(layer, name, dy, x, xa, w, grads, ctx):
    """dx (N, K), from dy (N, M), of _linear, which returned xa; adds to the gradients of what is trained."""
    if (dw := getattr(grads, name)) is not None:
        linear_backward_weight(dy, x, dw)
    if (dbias := getattr(grads, f"{name}_bias")) is not None:
        bias_backward(dy, dbias)
    dx = ctx.memory.empty(x.shape, x.dtype)
    if xa is None:
        linear_backward_input(dy, getattr(w, name), dx)
    else:
        ctx.lora.backward(layer, name, dy, x, xa, getattr(w, name), dx, ctx.memory)
    return dx


def attention_block(layer, x, w, ctx, h, selective=False):
    """h = x + o_proj(attention(...rmsnorm(x)...)).

    layer: its index; x, h: (N, D); w: LayerWeights. Writes h; returns what the backward reads, or with `selective` what
    attention_recomputed reads.
    """
    config, empty = ctx.config, ctx.memory.empty
    N, D = x.shape
    H, HK, E = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rstd, qkv, attended = empty((N,), F32), empty((N, (H + 2 * HK) * E), x.dtype), empty((N, H, E), x.dtype)
    if selective:
        ctx.attention.reserve(layer, H, N)
    with ctx.memory.scope() if selective else nullcontext():
        normed = empty((N, D), x.dtype)
        rmsnorm(x, w.input_norm, config.rms_norm_eps, normed, rstd)
        qkv_xa = _linear(layer, "qkv", normed, w, ctx, qkv)
        q = empty((N, H, E), x.dtype)
        k, v, head_rstd = ctx.attention.qkv_norm_rope(layer, qkv, w, ctx, q)
        ctx.attention.forward(layer, q, k, v, attended)
        o_xa = _linear(layer, "o", attended.reshape(N, H * E), w, ctx, h, residual=x)
    if selective:
        return x, rstd, qkv, attended
    return x, normed, rstd, qkv, q, k, v, head_rstd, attended, (qkv_xa, o_xa)


def attention_recomputed(layer, w, ctx, kept):
    """What attention_block_backward reads, the same bits, of what attention_block kept with `selective`."""
    x, rstd, qkv, attended = kept
    normed, q = ctx.memory.empty(x.shape, x.dtype), ctx.memory.empty(attended.shape, x.dtype)
    rmsnorm(x, w.input_norm, ctx.config.rms_norm_eps, normed, rstd)
    k, v, head_rstd = ctx.attention.qkv_norm_rope(layer, qkv, w, ctx, q)
    reduced = _reduced(layer, ctx, qkv=normed, o=attended.reshape(x.shape[0], -1))
    return x, normed, rstd, qkv, q, k, v, head_rstd, attended, reduced


def _reduced(layer, ctx, **inputs):
    """x A^T of the adapters of projections, by name, None where there is none: tuple."""
    return tuple(ctx.lora and ctx.lora.reduce(layer, name, x, ctx.memory) for name, x in inputs.items())


def attention_block_backward(layer, dx, w, grads, ctx, saved):
    """dx: (N, D), the gradient of h on entry and of x on return.

    Adds to grads, the layer's LayerWeights, None where a weight is not trained, and to the adapter's gradients.
    """
    x, normed, rstd, qkv, q, k, v, head_rstd, attended, (qkv_xa, o_xa) = saved
    empty = ctx.memory.empty
    dflat = _linear_backward(layer, "o", dx, attended.reshape(x.shape[0], -1), o_xa, w, grads, ctx)
    dq, dk, dv = (empty(array.shape, x.dtype) for array in (q, k, v))
    ctx.attention.backward(layer, dflat.reshape(attended.shape), q, k, v, attended, dq, dk, dv)
    dqkv = empty(qkv.shape, x.dtype)
    rope = *ctx.rope, ctx.position_ids
    qkv_split_backward(dq, dk, dv, qkv, w.q_norm, w.k_norm, *rope, head_rstd, dqkv, grads.q_norm, grads.k_norm)
    dnormed = _linear_backward(layer, "qkv", dqkv, normed, qkv_xa, w, grads, ctx)
    rmsnorm_backward(dnormed, x, w.input_norm, rstd, dx, grads.input_norm, accumulate=True)


def mlp_block(layer, h, w, ctx, y, selective=False):
    """y = h + down_proj(silu(gate) * up). h, y: (N, D). Writes y unless it is None (recomputation for the backward,
    which does not read y); returns what the backward reads, or with `selective` what mlp_recomputed reads."""
    config, empty = ctx.config, ctx.memory.empty
    N, D = h.shape
    F = config.intermediate_size
    rstd, gate_up = empty((N,), F32), empty((N, 2 * F), h.dtype)
    with ctx.memory.scope() if selective else nullcontext():
        normed, activated = empty((N, D), h.dtype), empty((N, F), h.dtype)
        rmsnorm(h, w.post_norm, config.rms_norm_eps, normed, rstd)
        if w.gate_up_bias is None:
            gate_up_xa, low_rank = reduced(layer, "gate_up", normed, ctx)
            linear_swiglu(normed, w.gate_up, gate_up, activated, low_rank)
        else:
            gate_up_xa = _linear(layer, "gate_up", normed, w, ctx, gate_up)
            swiglu(gate_up, activated)
        if y is not None:
            down_xa = _linear(layer, "down", activated, w, ctx, y, residual=h)
        else:
            (down_xa,) = _reduced(layer, ctx, down=activated)
    if selective:
        return h, rstd, gate_up
    return h, normed, rstd, gate_up, activated, (gate_up_xa, down_xa)


def mlp_recomputed(layer, w, ctx, kept):
    """What mlp_block_backward reads, the same bits, of what mlp_block kept with `selective`."""
    h, rstd, gate_up = kept
    normed = ctx.memory.empty(h.shape, h.dtype)
    activated = ctx.memory.empty((h.shape[0], gate_up.shape[1] // 2), h.dtype)
    rmsnorm(h, w.post_norm, ctx.config.rms_norm_eps, normed, rstd)
    swiglu(gate_up, activated)
    return h, normed, rstd, gate_up, activated, _reduced(layer, ctx, gate_up=normed, down=activated)


def mlp_block_backward(layer, dx, w, grads, ctx, saved):
    """dx: (N, D), the gradient of y on entry and of h on return. grads: as attention_block_backward's."""
    h, normed, rstd, gate_up, activated, (gate_up_xa, down_xa) = saved
    empty = ctx.memory.empty
    dactivated = _linear_backward(layer, "down", dx, activated, down_xa, w, grads, ctx)
    dgate_up = empty(gate_up.shape, h.dtype)
    swiglu_backward(dactivated, gate_up, dgate_up)
    dnormed = _linear_backward(layer, "gate_up", dgate_up, normed, gate_up_xa, w, grads, ctx)
    rmsnorm_backward(dnormed, h, w.post_norm, rstd, dx, grads.post_norm, accumulate=True)
