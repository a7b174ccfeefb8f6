"""The dense MLP with SwiGLU: its block of a layer, forward with its backward under it.

    out = x + norm?(down_proj(silu(gate) * up)),  gate | up = gate_up_proj(rmsnorm(x))

or with the GELU in place of silu (Gemma 3).
A backward overwrites the gradient of the block's output with that of its input: `dx` is that of out on entry.
Source: the modelling code of transformers for Qwen3, Qwen2, Llama and Gemma 3.
"""

from typing import NamedTuple

from rlnumba.kernels.gemm.ops import linear_backward_input
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_backward
from rlnumba.model.blocks.block import F32, Block, norm_backward, normed_rows, scope_of
from rlnumba.model.blocks.projection import (
    empty_output,
    low_rank_of,
    multiply_swiglu,
    output_backward,
    output_to_residual,
    project,
    project_backward,
    reduce,
    weight_backward,
)
from rlnumba.model.shard import Shard


class MlpWeights(NamedTuple):
    """The views of the block's parameters, or their gradients; None where there is none."""

    post_norm: object = None
    gate_up: object = None
    gate_up_bias: object = None
    down: object = None
    down_bias: object = None
    down_norm: object = None


class SavedMlp(NamedTuple):
    """The block's input and the outputs of its operators, None where the backward computes them again.

    x, normed (N, D); rstd (N,) f32; gate_up (N, 2 F), which the backward overwrites; activated (N, F). xas: what
    `reduce` returned for gate_up and down. output: the BlockOutput, if outputs have norms.
    """

    x: object
    normed: object
    rstd: object
    gate_up: object
    activated: object
    xas: tuple | None
    output: object


class Mlp(Block):
    """The MLP of a dense layer."""

    NORM = "post_norm", "post_attention_layernorm"
    Weights, Saved = MlpWeights, SavedMlp
    PROJECTIONS, RECOMPUTED, CUT = ("gate_up", "down"), ("norm", "swiglu"), ("intermediate_size",)
    OPERATORS = {"normed": "post rmsnorm", "gate_up": "gate_up_proj", "activated": "swiglu"}  # noqa: RUF012
    OUTPUT = "down_proj"
    # The norm, gate and up with SwiGLU, down.
    LAUNCHES = 3

    def matrices(self, config):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        return [
            *self.matrix("gate_up", D, (("mlp.gate_proj", F), ("mlp.up_proj", F)), Shard.own_rows, bias),
            *self.matrix("down", F, (("mlp.down_proj", D),), Shard.own_rows, bias),
        ]

    def norm(self, config):
        if config.has_output_norms:
            return self.vector("post_norm", "pre_feedforward_layernorm", config.hidden_size)
        return super().norm(config)

    def vectors(self, config):
        down_norm = self.vector("down_norm", "post_feedforward_layernorm", config.hidden_size)
        return [down_norm] if config.has_output_norms else []

    def forward(self, x, w, ctx, out, recomputed=()):
        """out = x + down(act(gate) * up), gate | up = gate_up(norm(x)), as Block.forward; returns a SavedMlp.

        Without a bias, SwiGLU is the epilogue of gate_up's GEMM. recomputed: "norm" and "swiglu" keep neither their
        outputs nor what adapters reduce.
        """
        layer, empty, (N, _), F = self.layer, ctx.memory.empty, x.shape, ctx.config.intermediate_size
        rstd, gate_up = empty((N,), F32), empty((N, 2 * F), x.dtype)
        kept = None if "swiglu" in recomputed else empty((N, F), x.dtype)
        output, activation = empty_output(x, ctx), ctx.config.hidden_act
        with scope_of(ctx, "norm", recomputed):
            normed = normed_rows(x, w.post_norm, rstd, ctx)
            with scope_of(ctx, "swiglu", recomputed):
                activated = empty((N, F), x.dtype) if kept is None else kept
                if w.gate_up_bias is None:
                    low_rank, reduction = low_rank_of(layer, "gate_up", normed, ctx)
                    of_adapter = low_rank, activation, reduction
                    multiply_swiglu(normed, w.gate_up, gate_up, activated, ctx.memory, *of_adapter)
                    gate_up_xa = low_rank and low_rank[0]
                else:
                    gate_up_xa = project(layer, "gate_up", normed, w, ctx, gate_up)
                    swiglu(gate_up, activated, activation)
                down_xa = output_to_residual(layer, "down", activated, w, ctx, out, x, output)
        normed = None if "norm" in recomputed else normed
        return SavedMlp(x, normed, rstd, gate_up, kept, None if recomputed else (gate_up_xa, down_xa), output)

    def backward(self, dx, w, grads, ctx, saved):
        """The steps of forward in reverse, as Block.backward. The gradient of gate | up overwrites saved.gate_up.

        SwiGLU's and the norm's outputs are computed again where `saved` has None for them.
        """
        layer, x, gate_up, activated = self.layer, saved.x, saved.gate_up, saved.activated
        # The gradient of gate | up takes their place.
        dgate_up, activation = gate_up, ctx.config.hidden_act
        dy = output_backward("down", dx, w, grads, ctx, saved.output)
        if activated is None and ctx.lora is None:
            # The pass that reads gate | up computes SwiGLU again, over its own gradient.
            activated = ctx.memory.empty((x.shape[0], w.down.shape[1]), x.dtype)
            linear_backward_input(dy, w.down, activated)
            swiglu_backward(activated, gate_up, dgate_up, out_over_dout=True, activation=activation)
            weight_backward("down", dy, activated, grads, ctx)
        else:
            if activated is None:
                activated = ctx.memory.empty((x.shape[0], w.down.shape[1]), x.dtype)
                swiglu(gate_up, activated, activation)
            down_xa = reduce(layer, "down", activated, ctx) if saved.xas is None else saved.xas[1]
            dactivated = project_backward(layer, "down", dy, activated, down_xa, w, grads, ctx)
            swiglu_backward(dactivated, gate_up, dgate_up, activation=activation)
        normed = normed_rows(x, w.post_norm, saved.rstd, ctx) if saved.normed is None else saved.normed
        gate_up_xa = reduce(layer, "gate_up", normed, ctx) if saved.xas is None else saved.xas[0]
        dnormed = project_backward(layer, "gate_up", dgate_up, normed, gate_up_xa, w, grads, ctx)
        norm_backward(dnormed, x, w.post_norm, saved.rstd, dx, grads.post_norm, ctx)

    def prefix_multiple(self, config, dtype):
        return 1

    def products(self, config):
        return 3 * config.hidden_size * config.intermediate_size

    def row_elements(self, config):
        outputs = 2 if config.has_output_norms else 1
        return (1 + outputs) * config.hidden_size + 3 * config.intermediate_size
