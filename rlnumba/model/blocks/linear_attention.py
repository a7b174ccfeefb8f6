"""Linear attention with the gated delta rule: its block of a layer, forward with its backward under it.

    out = x + out_proj(gated_norm(delta_rule(q, k, v, beta, decay), z)),
    q | k | v | z | b | a = in_proj(rmsnorm(x)),  q, k, v, beta, decay by a convolution, norms and gates

The rule and its state: kernels/delta_rule. A backward overwrites the gradient of the block's output with that of its
input: `dx` is that of out on entry. Source: transformers' Qwen3_5GatedDeltaNet; Yang et al. 2024, Gated Delta Networks.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, operand_dtype, planes_of
from rlnumba.kernels.delta_rule.decode.kernel import DecodeOutputs
from rlnumba.kernels.delta_rule.gated_norm import gated_norm, gated_norm_backward
from rlnumba.kernels.delta_rule.input_rows import TAPS, DeltaRuleHeads
from rlnumba.kernels.delta_rule.inputs import (
    CONV_ROWS,
    InputWeights,
    delta_rule_inputs,
    delta_rule_inputs_backward,
    empty_tokens,
)
from rlnumba.kernels.delta_rule.ops import delta_rule_backward, prefix_multiple
from rlnumba.kernels.nn.elementwise import cast, fill
from rlnumba.model.blocks.block import F32, Block, CacheArray, norm_backward, normed_rows, scope_of
from rlnumba.model.blocks.projection import project, project_backward, project_to_residual, reduce
from rlnumba.model.shard import Shard


class LinearAttentionWeights(NamedTuple):
    """The views of the block's parameters, or their gradients; None where there is none."""

    input_norm: object = None
    in_proj: object = None
    in_proj_bias: object = None
    conv: object = None
    a_log: object = None
    dt_bias: object = None
    gated_norm: object = None
    out_proj: object = None
    out_proj_bias: object = None

    def inputs(self):
        """The InputWeights, or None where they are not trained."""
        return None if self.conv is None else InputWeights(self.conv.reshape(-1, TAPS), self.a_log, self.dt_bias)


class SavedLinearAttention(NamedTuple):
    """The block's input and the outputs of its operators, None where the backward computes them again.

    x, normed (N, D); rstd (N,) f32; projected (N, columns of DeltaRuleHeads); o (N, HV, V) operands; gated (N, HV V);
    head_rstd (N, HV) f32. xas: what `reduce` returned for in_proj and out_proj.
    """

    x: object
    normed: object
    rstd: object
    projected: object
    o: object
    gated: object
    head_rstd: object
    xas: tuple | None


def heads_of(config):
    """The DeltaRuleHeads of a ModelConfig."""
    return DeltaRuleHeads(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


def inputs_gradients(grads, ctx):
    """The InputWeights of float32 that a backward adds to, None where they are not trained.

    Where the gradients of layers' matrices are written instead, those of two of them begin with zeros.
    """
    found = grads.inputs()
    if found is None or ctx.adds_gradients:
        return found
    conv, a_log = ctx.memory.empty(found.conv.shape, F32), ctx.memory.empty(found.a_log.shape, F32)
    fill(0.0, conv)
    fill(0.0, a_log)
    return found._replace(conv=conv, a_log=a_log)


class LinearAttention(Block):
    """Gated DeltaNet."""

    NORM = "input_norm", "input_layernorm"
    Weights, Saved = LinearAttentionWeights, SavedLinearAttention
    PROJECTIONS, RECOMPUTED = ("in_proj", "out_proj"), ("norm",)
    CUT = ("linear_num_key_heads", "linear_num_value_heads")
    OPERATORS = {  # noqa: RUF012
        "normed": "input rmsnorm",
        "projected": "in_proj",
        "o": "delta rule",
    }
    OUTPUT = "out_proj"
    # The norm, the projection, the rule with its convolution and the gated norm, the projection to the stream.
    LAUNCHES = 4

    def matrices(self, config):
        """in_proj (q | k | v, z, b and a), the convolution's taps, A_log and out_proj, cut by whole heads."""
        D, heads = config.hidden_size, heads_of(config)
        # A rank has whole key heads with their value heads, and so its own part of each of q, k and v.
        keys = heads.key_heads * heads.key_dim
        channels = keys, keys, heads.values
        rows = (
            ("in_proj_qkv", channels),
            ("in_proj_z", heads.values),
            ("in_proj_b", heads.value_heads),
            ("in_proj_a", heads.value_heads),
        )
        conv = (("linear_attn.conv1d", channels),)
        a_log = (("linear_attn.A_log", heads.value_heads),)
        return [
            *self.matrix("in_proj", D, tuple((f"linear_attn.{name}", count) for name, count in rows), Shard.own_rows),
            self.parameter("conv", (1, TAPS), True, ".weight", conv, Shard.own_rows),
            self.parameter("a_log", (), True, "", a_log, Shard.own_rows),
            *self.matrix("out_proj", heads.values, (("linear_attn.out_proj", D),), Shard.own_rows),
        ]

    def vectors(self, config):
        heads = heads_of(config)
        return [
            self.parameter("dt_bias", (), False, "", (("linear_attn.dt_bias", heads.value_heads),), Shard.own_rows),
            self.vector("gated_norm", "linear_attn.norm", heads.value_dim),
        ]

    def forward(self, x, w, ctx, out, recomputed=()):
        """out = x + out_proj(gated norm(delta rule(convolution(in_proj(norm(x)))))), as Block.forward.

        Returns a SavedLinearAttention. What the rule reads, made from `projected`, is not kept: the backward makes it
        again. A decode step of a backend that fuses the rule is one kernel with its convolution and gated norm.
        recomputed: "norm" keeps neither the norm's output nor what adapters reduce.
        """
        layer, empty, N, heads = self.layer, ctx.memory.empty, x.shape[0], heads_of(ctx.config)
        rstd, projected = empty((N,), F32), empty((N, heads.columns), x.dtype)
        o = empty((N, heads.value_heads, heads.value_dim), operand_dtype(x.dtype))
        with scope_of(ctx, "norm", recomputed):
            normed = normed_rows(x, w.input_norm, rstd, ctx)
            in_xa = project(layer, "in_proj", normed, w, ctx, projected)
        gated, head_rstd = empty((N, heads.values), x.dtype), empty(o.shape[:2], F32)
        outputs, norm = DecodeOutputs(o, gated.reshape(o.shape), head_rstd), (w.gated_norm, ctx.config.rms_norm_eps)
        if ctx.attention.fuses_delta_rule:
            ctx.attention.delta_rule_decode(layer, projected, w.inputs(), norm, heads, outputs)
        else:
            with ctx.memory.scope():
                ctx.attention.delta_rule(layer, projected, w.inputs(), heads, ctx.memory, o)
            gated_norm(o, projected, heads, *norm, outputs.gated, head_rstd)
        out_xa = project_to_residual(layer, "out_proj", gated, w, ctx, out, x)
        normed = None if "norm" in recomputed else normed
        xas = None if recomputed else (in_xa, out_xa)
        return SavedLinearAttention(x, normed, rstd, projected, o, gated, head_rstd, xas)

    def backward(self, dx, w, grads, ctx, saved):
        """The steps of forward in reverse, as Block.backward; what the rule reads is made again from `projected`.

        Gradients of the convolution and of A_log are added up in float32 before they are written.
        """
        layer, x, projected, o, heads = self.layer, saved.x, saved.projected, saved.o, heads_of(ctx.config)
        empty, N, gated = ctx.memory.empty, len(x), saved.gated
        cu_seqlens, prefixes = ctx.attention.sequences.cu_seqlens, ctx.attention.sequences.prefixes
        out_xa = reduce(layer, "out_proj", gated, ctx) if saved.xas is None else saved.xas[1]
        dgated = project_backward(layer, "out_proj", dx, gated, out_xa, w, grads, ctx).reshape(o.shape)
        do, dprojected = empty(o.shape, x.dtype), empty(projected.shape, x.dtype)
        gradients = do, dprojected
        gated_norm_backward(dgated, (o, projected), heads, w.gated_norm, saved.head_rstd, gradients, grads.gated_norm)
        tokens = empty_tokens(N, heads, x.dtype, empty, operand_dtype(x.dtype))
        delta_rule_inputs(projected, w.inputs(), heads, cu_seqlens, tokens, prefixes=prefixes)
        dtokens = empty_tokens(N, heads, x.dtype, empty, x.dtype)
        delta_rule_backward(do, tokens, cu_seqlens, dtokens, prefixes)
        dweights = inputs_gradients(grads, ctx)
        of_inputs = projected, w.inputs(), heads, cu_seqlens
        delta_rule_inputs_backward(dtokens, *of_inputs, dprojected, dweights, prefixes)
        if dweights is not None and not ctx.adds_gradients:
            cast(dweights.conv, grads.inputs().conv)
            cast(dweights.a_log, grads.a_log)
        normed = normed_rows(x, w.input_norm, saved.rstd, ctx) if saved.normed is None else saved.normed
        in_xa = reduce(layer, "in_proj", normed, ctx) if saved.xas is None else saved.xas[0]
        dnormed = project_backward(layer, "in_proj", dprojected, normed, in_xa, w, grads, ctx)
        norm_backward(dnormed, x, w.input_norm, saved.rstd, dx, grads.input_norm, ctx)

    def page_entry(self, config, dtype):
        heads, operand = heads_of(config), operand_dtype(dtype)
        state = heads.value_heads, planes_of(operand), heads.key_dim, heads.value_dim
        rows = CacheArray("page_rows", (TAPS - 1, heads.channels), dtype)
        return CacheArray("states", state, operand), rows

    def slot_entry(self, config, dtype, verified):
        heads, operand = heads_of(config), operand_dtype(dtype)
        return (
            CacheArray("key_rows", (BLOCK, heads.key_heads, heads.key_dim), operand),
            CacheArray("value_rows", (BLOCK, heads.value_heads, heads.value_dim), operand),
            CacheArray("decay_sums", (BLOCK, heads.value_heads), F32),
            CacheArray("conv_rows", (CONV_ROWS + verified - 1, heads.channels), dtype),
        )

    def gpu_columns(self, config):
        heads = heads_of(config)
        keys = {"linear_num_key_heads x linear_key_head_dim": heads.key_heads * heads.key_dim}
        return keys | {"linear_num_value_heads x linear_value_head_dim": heads.values}

    def prefix_multiple(self, config, dtype):
        heads = heads_of(config)
        return prefix_multiple(np.dtype(dtype).name, heads.key_dim, heads.value_dim)

    def products(self, config):
        heads = heads_of(config)
        return config.hidden_size * (heads.columns + heads.values)

    def cost(self, lengths, config):
        heads, tokens = heads_of(config), lengths.sum()
        # Reading the state twice, adding to it once; products of a block's tokens, half of them.
        state = 3 * heads.values * heads.key_dim
        in_block = BLOCK // 2 * (2 * heads.value_heads * heads.key_dim + 2 * heads.values)
        return super().cost(lengths, config) + tokens * (state + in_block)

    def row_elements(self, config):
        heads = heads_of(config)
        return 2 * config.hidden_size + heads.columns + heads.channels + 3 * heads.values

    def operator_bytes(self, config, dtype, tokens, sequences, has_prefixes=False):
        heads = heads_of(config)
        blocks = tokens // BLOCK + sequences
        # The states at the begin of each block and their gradients; errors, rows and dv; dq and dk by value head. With
        # prefixes, the states behind sequences with children, and the gradients ahead of these.
        states = 2 * (blocks + (sequences if has_prefixes else 0)) * heads.values * heads.key_dim
        rows = tokens * (3 * heads.values + 2 * heads.value_heads * heads.key_dim + heads.channels)
        return np.dtype(np.float32).itemsize * (states + rows)
