"""Attention: its block of a layer, forward with its backward under it, and the attention of training.

    out = x + norm?(o_proj(attention(rope(norm?(q, k)), v))),  q | k | v = qkv_proj(rmsnorm(x))

With attn_output_gate (Qwen3.5) a gate follows each query head in q, and o_proj reads attention(...) sigmoid(gate).
A backward overwrites the gradient of the block's output with that of its input: `dx` is that of out on entry.
Source: the modelling code of transformers for Qwen3, Qwen2, Llama and Gemma 3.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.ops import attention, attention_backward, attention_backward_nbytes
from rlnumba.kernels.attention.sequences import PREFIX_MULTIPLE, PackedSequences
from rlnumba.kernels.delta_rule.inputs import delta_rule_inputs, empty_tokens
from rlnumba.kernels.delta_rule.ops import delta_rule
from rlnumba.kernels.nn.output_gate import output_gate, output_gate_backward
from rlnumba.kernels.nn.qkv import HeadNorm, qkv_split, qkv_split_backward
from rlnumba.model.blocks.block import F32, Block, CacheArray, norm_backward, normed_rows, scope_of
from rlnumba.model.blocks.projection import (
    empty_output,
    output_backward,
    output_to_residual,
    project,
    project_backward,
    reduce,
)
from rlnumba.model.shard import Shard
from rlnumba.runtime.arena import HeapAllocator


class AttentionWeights(NamedTuple):
    """The views of the block's parameters, or their gradients; None where there is none."""

    input_norm: object = None
    qkv: object = None
    qkv_bias: object = None
    q_norm: object = None
    k_norm: object = None
    o: object = None
    o_bias: object = None
    o_norm: object = None

    def head_norm(self, config):
        """The HeadNorm of queries and keys, or None."""
        return (
            None if self.q_norm is None else HeadNorm(self.q_norm, self.k_norm, config.rms_norm_eps, config.norm_offset)
        )


class SavedAttention(NamedTuple):
    """The block's input and the outputs of its operators, None where the backward computes them again.

    x, normed (N, D); rstd (N,) f32; qkv (N, (H + 2 HK) E), with gates (N, (2 H + 2 HK) E); q, attended (N, H, E);
    k, v (N, HK, E); head_rstd (N, H + HK) f32; gated (N, H, E), attended without gates. xas: what `reduce` returned for
    qkv and o. output: the BlockOutput, if outputs have norms.
    """

    x: object
    normed: object
    rstd: object
    qkv: object
    q: object
    k: object
    v: object
    head_rstd: object
    attended: object
    gated: object
    xas: tuple | None
    output: object


class PackedAttention:
    """Causal attention within each packed sequence: the attention backend of training and scoring.

    cu_seqlens: (B + 1,) int32; scale: 1 / sqrt(head_dim); memory: an Arena (inside its scope) or None, for the
    log-sum-exps that the backward reads. prefixes: PackedPrefixes, or None; for blocks that take them
    (Block.prefix_multiple).
    """

    # Linear attention is several operators.
    fuses_delta_rule = False

    def __init__(self, cu_seqlens, max_seqlen, scale, memory=None, prefixes=None):
        self.sequences, self.scale = PackedSequences(cu_seqlens, max_seqlen, prefixes=prefixes), scale
        self.memory = memory or HeapAllocator()
        self.saved, self.reserved = {}, {}

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
        qkv_split(qkv, w.head_norm(ctx.config), ctx.rotations[layer], q, k, v, rstd)
        return k, v, rstd

    def delta_rule(self, layer, projected, weights, heads, memory, out):
        """projected (N, columns) -> out (N, HV, V), written in place; weights: InputWeights; heads: DeltaRuleHeads."""
        tokens = empty_tokens(len(out), heads, projected.dtype, memory.empty, out.dtype)
        cu_seqlens, prefixes = self.sequences.cu_seqlens, self.sequences.prefixes
        delta_rule_inputs(projected, weights, heads, cu_seqlens, tokens, prefixes=prefixes)
        delta_rule(tokens, cu_seqlens, out, prefixes)

    def forward(self, layer, qkv, w, ctx, out):
        """qkv (N, (H + 2 HK) E) -> out (N, H, E), written in place; returns (q, k, v, rstd), of qkv_norm_rope."""
        q = ctx.memory.empty(out.shape, out.dtype)
        k, v, rstd = self.qkv_norm_rope(layer, qkv, w, ctx, q)
        sequences, lse = self.sequences._replace(window=ctx.config.window_of(layer)), self.reserved.pop(layer, None)
        lse = self.memory.empty((q.shape[1], q.shape[0]), F32) if lse is None else lse
        self.saved[layer] = sequences, lse
        attention(q, k, v, sequences, self.scale, out, lse)
        return q, k, v, rstd

    def backward(self, layer, dout, inputs, out, gradients):
        """The gradients of inputs (q, k, v), written in place, after this layer's latest forward, which wrote out."""
        sequences, lse = self.saved.pop(layer)
        attention_backward(dout, inputs, out, lse, sequences, self.scale, gradients)


class Attention(Block):
    """Causal attention of grouped query heads, with the norms and rotations that the config asks for."""

    NORM = "input_norm", "input_layernorm"
    Weights, Saved = AttentionWeights, SavedAttention
    PROJECTIONS, RECOMPUTED, CACHED = ("qkv", "o"), ("norm", "rope"), ("k", "v")
    CUT = ("num_key_value_heads", "num_attention_heads")
    OPERATORS = {  # noqa: RUF012
        "normed": "input rmsnorm",
        "qkv": "qkv_proj",
        "q": "qkv_split of q (head norm, rope)",
        "k": "qkv_split of k (head norm, rope)",
        "v": "qkv_split of v",
        "attended": "attention",
    }
    OUTPUT = "o_proj"
    # The norm, qkv, attention, o.
    LAUNCHES = 4

    def matrices(self, config):
        D, q, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        rows = (("q_proj", q * (2 if config.attn_output_gate else 1)), ("k_proj", kv), ("v_proj", kv))
        qkv = tuple((f"self_attn.{name}", heads * config.head_dim) for name, heads in rows)
        return [
            *self.matrix("qkv", D, qkv, Shard.own_rows, config.attention_bias),
            *self.matrix("o", q * config.head_dim, (("self_attn.o_proj", D),), Shard.own_rows, config.o_bias),
        ]

    def vectors(self, config):
        names = ("q_norm", "k_norm") if config.qk_norm else ()
        found = [self.vector(name, f"self_attn.{name}", config.head_dim) for name in names]
        if config.has_output_norms:
            found.append(self.vector("o_norm", "post_attention_layernorm", config.hidden_size))
        return found

    def forward(self, x, w, ctx, out, recomputed=()):
        """out = x + o(gate(attention(rope(head norms(qkv(norm(x))))))), as Block.forward; returns a SavedAttention.

        Gates, head norms and a norm of the output are those of the config. recomputed: "norm" keeps neither the norm's
        output nor what adapters reduce, "rope" neither q, k and v nor the latter.
        """
        config, empty, N = ctx.config, ctx.memory.empty, x.shape[0]
        H, E = config.num_attention_heads, config.head_dim
        rstd, qkv, attended = empty((N,), F32), empty((N, len(w.qkv)), x.dtype), empty((N, H, E), x.dtype)
        gated = empty((N, H, E), x.dtype) if config.attn_output_gate else attended
        output = empty_output(x, ctx)
        if "rope" in recomputed:
            ctx.attention.reserve(self.layer, H, N)
        with scope_of(ctx, "norm", recomputed):
            normed = normed_rows(x, w.input_norm, rstd, ctx)
            qkv_xa = project(self.layer, "qkv", normed, w, ctx, qkv)
        with scope_of(ctx, "rope", recomputed):
            rotated = ctx.attention.forward(self.layer, qkv, w, ctx, attended)
            if config.attn_output_gate:
                output_gate(attended, qkv, gated)
            o_xa = output_to_residual(self.layer, "o", gated.reshape(N, H * E), w, ctx, out, x, output)
        normed = None if "norm" in recomputed else normed
        rotated = [None] * len(rotated) if "rope" in recomputed else rotated
        xas = None if recomputed else (qkv_xa, o_xa)
        return SavedAttention(x, normed, rstd, qkv, *rotated, attended, gated, xas, output)

    def backward(self, dx, w, grads, ctx, saved):
        """The steps of forward in reverse, as Block.backward: o, gate, attention, rotation and head norms, qkv, norm.

        q, k and v, and the norm's output, are computed again where `saved` has None for them.
        """
        layer, x, qkv, attended = self.layer, saved.x, saved.qkv, saved.attended
        empty, flat = ctx.memory.empty, saved.gated.reshape(x.shape[0], -1)
        q, k, v, head_rstd = saved.q, saved.k, saved.v, saved.head_rstd
        if q is None:
            q = empty(attended.shape, x.dtype)
            k, v, head_rstd = ctx.attention.qkv_norm_rope(layer, qkv, w, ctx, q)
        o_xa = reduce(layer, "o", flat, ctx) if saved.xas is None else saved.xas[1]
        dy = output_backward("o", dx, w, grads, ctx, saved.output)
        dattended = project_backward(layer, "o", dy, flat, o_xa, w, grads, ctx).reshape(attended.shape)
        gradients = tuple(empty(array.shape, x.dtype) for array in (q, k, v))
        dqkv, norm = empty(qkv.shape, x.dtype), w.head_norm(ctx.config)
        if ctx.config.attn_output_gate:
            output_gate_backward(dattended, attended, qkv, dattended, dqkv)
        ctx.attention.backward(layer, dattended, (q, k, v), attended, gradients)
        rotation = ctx.rotations[layer]
        qkv_split_backward(gradients, qkv, norm, rotation, head_rstd, dqkv, grads.q_norm, grads.k_norm)
        normed = normed_rows(x, w.input_norm, saved.rstd, ctx) if saved.normed is None else saved.normed
        qkv_xa = reduce(layer, "qkv", normed, ctx) if saved.xas is None else saved.xas[0]
        dnormed = project_backward(layer, "qkv", dqkv, normed, qkv_xa, w, grads, ctx)
        norm_backward(dnormed, x, w.input_norm, saved.rstd, dx, grads.input_norm, ctx)

    def prefix_multiple(self, config, dtype):
        return PREFIX_MULTIPLE

    def products(self, config):
        return config.hidden_size * self._head_columns(config)

    def cost(self, lengths, config):
        # Causal: half of the products of queries and keys, and of probabilities and values.
        pairs = lengths**2
        if window := config.window_of(self.layer):
            pairs = pairs - np.maximum(lengths - window, 0) ** 2
        return super().cost(lengths, config) + config.num_attention_heads * config.head_dim * pairs.sum()

    def row_elements(self, config):
        outputs = 2 if config.has_output_norms else 1
        return (1 + outputs) * config.hidden_size + self._head_columns(config)

    def _head_columns(self, config):
        """Columns of q with its gates, k, v and the attended heads, with and without gates, together."""
        query_heads = config.num_attention_heads * (4 if config.attn_output_gate else 2)
        return (query_heads + 2 * config.num_key_value_heads) * config.head_dim

    def operator_bytes(self, config, dtype, tokens, sequences, has_prefixes=False):
        heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        has_window = config.window_of(self.layer) > 0
        return attention_backward_nbytes(dtype, tokens, sequences, *heads, has_prefixes, has_window)

    def gpu_columns(self, config):
        return {"num_key_value_heads x head_dim": config.num_key_value_heads * config.head_dim}

    def cache_entry(self, config, block_size, dtype):
        shape = block_size, config.num_key_value_heads, config.head_dim
        return CacheArray("k", shape, dtype), CacheArray("v", shape, dtype)
