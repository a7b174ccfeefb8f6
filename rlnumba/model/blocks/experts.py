"""Mixtures of experts: the block of a layer, forward with its backward under it.

    out = x + sum over the chosen e of w_e down_e(silu(gate_e) * up_e),  gate_e | up_e = gate_up_e(rmsnorm(x))
    w = the largest of softmax(router(rmsnorm(x))), divided by their sum where the config says so

Qwen3.5-MoE adds sigmoid(shared_gate(rmsnorm(x))) shared(rmsnorm(x)), an MLP that all tokens go through. Rows of tokens
are sorted by expert, go through grouped GEMMs, and each token's are added in the order of its choice: what a token gets
does not depend on the others. No token is left out. A backward overwrites the gradient of the block's output with that
of its input: `dx` is that of out on entry. Source: transformers' Qwen3MoeSparseMoeBlock, Qwen3_5MoeSparseMoeBlock.
"""

from typing import NamedTuple

from rlnumba.kernels.experts.ops import (
    Dispatch,
    Routing,
    add_router_load,
    combine,
    dispatch,
    gather_rows,
    gather_rows_backward,
    record_experts,
    route,
    route_backward,
    weigh_rows_backward,
)
from rlnumba.kernels.gemm.grouped import grouped_gemm_dw, grouped_gemm_dx
from rlnumba.kernels.nn.elementwise import add
from rlnumba.kernels.nn.gated_sum import gated_sum, gated_sum_backward
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_backward
from rlnumba.model.blocks.block import F32, Block, norm_backward, normed_rows
from rlnumba.model.blocks.projection import (
    dense,
    low_rank_of,
    multiply_experts,
    multiply_experts_swiglu,
    multiply_swiglu,
    project,
    project_backward,
    project_to_residual,
)
from rlnumba.model.parameter import Parameter
from rlnumba.model.shard import Shard


class ExpertsWeights(NamedTuple):
    """The views of the block's parameters, or their gradients; None where there is none.

    gate_up (E, 2 F, D), down (E, D, F): the matrices of all experts; shared_...: those of the shared expert.
    """

    post_norm: object = None
    router: object = None
    router_bias: object = None
    gate_up: object = None
    down: object = None
    shared_gate_up: object = None
    shared_gate_up_bias: object = None
    shared_down: object = None
    shared_down_bias: object = None
    shared_gate: object = None
    shared_gate_bias: object = None


class SavedExperts(NamedTuple):
    """The block's input and the outputs of its operators, None where the backward computes them again.

    x, normed (N, D); rstd (N,) f32; scores (N, E); experts, weights (N, k): a Routing's; sorted: the Dispatch; gate_up
    (N k, 2 F) and activated (N k, F), which the backward overwrites. shared: a SavedShared, or None.
    """

    x: object
    normed: object
    rstd: object
    scores: object
    experts: object
    weights: object
    sorted: object
    gate_up: object
    activated: object
    shared: object


class SavedShared(NamedTuple):
    """The outputs of the shared expert's operators: gate_up (N, 2 S), activated (N, S), y (N, D), gate (N, 1).

    xas: what `reduce` returned for its gate_up, down and gate.
    """

    gate_up: object
    activated: object
    y: object
    gate: object
    xas: tuple


class Experts(Block):
    """The mixture of a sparse layer."""

    NORM = "post_norm", "post_attention_layernorm"
    Weights, Saved = ExpertsWeights, SavedExperts
    RECOMPUTED, CUT, QUANTIZED = ("swiglu",), ("moe_intermediate_size",), ("gate_up", "down")
    STACKS = {"gate_up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"}  # noqa: RUF012
    OPERATORS = {"normed": "post rmsnorm", "scores": "router", "experts": "choice of experts"}  # noqa: RUF012
    OUTPUT = "experts"
    # The norm, the router, the choice, the sort, rows in its order, two GEMMs with SwiGLU between them, the sum.
    LAUNCHES = 9

    def matrices(self, config):
        D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
        return [
            *self.matrix("router", D, (("mlp.gate", E),), Shard.all_rows),
            self._stack(config, "gate_up", (E, 2 * F, D), ("gate", "up")),
            self._stack(config, "down", (E, D, F), ("down",)),
        ]

    def _stack(self, config, name, shape, kinds):
        """The Parameter of a matrix of all experts, fused or not as in published checkpoints of the family."""
        at, (count, rows, columns) = f"model.layers.{self.layer}", shape
        fused, rows = f"{at}.mlp.experts.{name}_proj", rows // len(kinds)
        split = [f"{at}.mlp.experts.{e}.{kind}_proj.weight" for e in range(count) for kind in kinds]
        is_split = config.model_type == "qwen3_moe"
        saved = tuple((tensor, rows) for tensor in split) if is_split else ((fused, count),)
        other = ((fused, shape),) if is_split else tuple((tensor, (rows, columns)) for tensor in split)
        of_stack = {"cut_rows": rows, "stacked": is_split, "other_form": other}
        return Parameter(f"{at}.{name}", shape, True, saved, self.layer, Shard.own_rows, **of_stack)

    def forward(self, x, w, ctx, out, recomputed=()):
        """out = x + the weighted sum of k experts' MLPs of norm(x) + the shared expert, as Block.forward.

        Returns a SavedExperts. Rows are gathered in the order of experts for the grouped GEMMs, and a token's results
        are added up in the order of its own choice. recomputed: "swiglu" does not keep the activations.
        """
        config, empty, N, D = ctx.config, ctx.memory.empty, x.shape[0], len(w.post_norm)
        E, k, F = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        rstd, scores = empty((N,), F32), empty((N, E), x.dtype)
        normed = normed_rows(x, w.post_norm, rstd, ctx)
        project(self.layer, "router", normed, w, ctx, scores)
        routing, dispatched = Routing.empty(N, k, x.dtype, empty), Dispatch.empty(N, k, E, empty)
        replayed = None if ctx.replayed_experts is None else ctx.replayed_experts[self.layer]
        route(scores, config.norm_topk_prob, routing, replayed)
        if ctx.expert_records is not None:
            record_experts(routing.experts, ctx.expert_records.slots, ctx.expert_records.of_layers[self.layer])
        dispatch(routing.experts, dispatched)
        if ctx.router_load is not None:
            add_router_load(scores, dispatched, ctx.router_load)
        gate_up, shared = empty((N * k, 2 * F), x.dtype), self.shared_forward(normed, w, ctx)
        kept = None if "swiglu" in recomputed else empty((N * k, F), x.dtype)
        with ctx.memory.scope():
            rows = y = empty((N * k, D), x.dtype)
            gather_rows(normed, dispatched, rows)
            activated = empty((N * k, F), x.dtype) if kept is None else kept
            if self.has_adapter("gate_up", ctx):
                multiply_experts(rows, w.gate_up, dispatched.starts, gate_up, ctx.memory)
                ctx.lora.add_to_experts(self.layer, "gate_up", rows, dispatched.starts, gate_up, ctx.memory)
                swiglu(gate_up, activated)
            else:
                multiply_experts_swiglu(rows, w.gate_up, dispatched.starts, gate_up, activated, ctx.memory)
            if ctx.ranks is not None:
                # All columns, of which each rank has computed some, for this rank's columns of the results.
                y = empty((N * k, x.shape[1]), x.dtype)
                activated = ctx.ranks.gather_columns(activated, empty((N * k, w.down.shape[2]), x.dtype))
            if out is not None:
                multiply_experts(activated, w.down, dispatched.starts, y, ctx.memory)
                if self.has_adapter("down", ctx):
                    ctx.lora.add_to_experts(self.layer, "down", activated, dispatched.starts, y, ctx.memory)
                self.add(x, y, routing.weights, dispatched, shared, ctx, out)
        return SavedExperts(x, normed, rstd, scores, *routing, dispatched, gate_up, kept, shared)

    def has_adapter(self, name, ctx):
        """Whether the experts' matrices of this name have an adapter."""
        return ctx.lora is not None and ctx.lora.pair(self.layer, name) is not None

    def shared_forward(self, normed, w, ctx):
        """The SavedShared of a shared expert, None without one."""

    def add(self, x, y, weights, dispatched, shared, ctx, out):
        """out = x + the weighted sum of each token's y + what the shared expert gives."""
        combine(y, weights, dispatched, out, residual=x)

    def shared_backward(self, dout, saved, w, grads, ctx):
        """The gradient of normed (N, D) by the shared expert; None without one."""

    def backward(self, dx, w, grads, ctx, saved):
        """The steps of forward in reverse, as Block.backward; the router's gradient has that of its loss (ctx).

        Overwrites saved.gate_up with its gradient. Routing weights are applied behind the gradient of the down
        projection, so that the experts' outputs need not be saved.
        """
        layer, x, normed, starts = self.layer, saved.x, saved.normed, saved.sorted.starts
        empty, gate_up, activated = ctx.memory.empty, saved.gate_up, saved.activated
        if activated is None:
            activated = empty((len(gate_up), w.down.shape[2]), x.dtype)
            swiglu(gate_up, activated)
        by_shared = self.shared_backward(dx, saved, w, grads, ctx)
        rows, dactivated = empty((len(gate_up), x.shape[1]), x.dtype), empty(activated.shape, x.dtype)
        dweights, trains_down = empty(saved.weights.shape, F32), grads.down is not None
        adapts_down = self.has_adapter("down", ctx)
        # Weights are applied behind the down projection's gradient, so that its outputs need not be there.
        gather_rows(dx, saved.sorted, rows)
        with dense(w.down, ctx.memory) as weights:
            grouped_gemm_dx(rows, weights, starts, dactivated)
        if adapts_down:
            dxa = ctx.lora.reduced_gradient(layer, "down", rows, starts, ctx.memory)
            ctx.lora.add_input_gradient(layer, "down", dxa, starts, dactivated, ctx.memory)
        weigh_rows_backward(dactivated, activated, saved.weights, saved.sorted, dweights, trains_down or adapts_down)
        if adapts_down:
            ctx.lora.add_expert_gradients(layer, "down", rows, activated, dxa, starts, ctx.memory)
        if trains_down:
            grouped_gemm_dw(rows, activated, starts, grads.down, accumulate=ctx.adds_gradients)
        # The gradient of gate | up takes their place, and that of the experts' rows the place of these.
        swiglu_backward(dactivated, gate_up, gate_up)
        drows, adapts_gate_up = rows, self.has_adapter("gate_up", ctx)
        if grads.gate_up is not None or adapts_gate_up:
            gather_rows(normed, saved.sorted, rows)
        if grads.gate_up is not None:
            grouped_gemm_dw(gate_up, rows, starts, grads.gate_up, accumulate=ctx.adds_gradients)
        if adapts_gate_up:
            dxa = ctx.lora.reduced_gradient(layer, "gate_up", gate_up, starts, ctx.memory)
            ctx.lora.add_expert_gradients(layer, "gate_up", gate_up, rows, dxa, starts, ctx.memory)
        with dense(w.gate_up, ctx.memory) as weights:
            grouped_gemm_dx(gate_up, weights, starts, drows)
        if adapts_gate_up:
            ctx.lora.add_input_gradient(layer, "gate_up", dxa, starts, drows, ctx.memory)
        dscores = empty(saved.scores.shape, x.dtype)
        term = ctx.router_gradient
        of_loss = (None, None) if term is None else (term.slopes, term.load.num_tokens)
        route_backward(dweights, saved.scores, saved.experts, ctx.config.norm_topk_prob, dscores, *of_loss)
        dnormed = project_backward(layer, "router", dscores, normed, None, w, grads, ctx)
        gather_rows_backward(drows, saved.sorted, dnormed, accumulate=True)
        if by_shared is not None:
            add(dnormed, by_shared, dnormed)
        norm_backward(dnormed, x, w.post_norm, saved.rstd, dx, grads.post_norm, ctx)

    def prefix_multiple(self, config, dtype):
        return 1

    def products(self, config):
        of_expert = 3 * config.hidden_size * config.moe_intermediate_size
        return config.hidden_size * config.num_experts + config.num_experts_per_tok * of_expert

    def row_elements(self, config):
        D, F = config.hidden_size, config.moe_intermediate_size
        return 3 * D + config.num_experts + config.num_experts_per_tok * (2 * D + 3 * F)


class SharedExperts(Experts):
    """A mixture with an expert that all tokens share, behind a gate of its own."""

    PROJECTIONS = ("shared_gate_up", "shared_down", "shared_gate")
    CUT = ("moe_intermediate_size", "shared_expert_intermediate_size")
    QUANTIZED = ("gate_up", "down", "shared_gate_up", "shared_down")
    OUTPUT = "experts and shared expert"
    # Those of the mixture; gate and up with SwiGLU, down, the gate, the sum.
    LAUNCHES = 13

    def matrices(self, config):
        D, S, at = config.hidden_size, config.shared_expert_intermediate_size, "mlp.shared_expert"
        return [
            *super().matrices(config),
            *self.matrix("shared_gate_up", D, ((f"{at}.gate_proj", S), (f"{at}.up_proj", S)), Shard.own_rows),
            *self.matrix("shared_down", S, ((f"{at}.down_proj", D),), Shard.own_rows),
            *self.matrix("shared_gate", D, ((f"{at}_gate", 1),), Shard.all_rows),
        ]

    def shared_forward(self, normed, w, ctx):
        layer, empty, N, (D, _) = self.layer, ctx.memory.empty, normed.shape[0], w.shared_down.shape
        S = ctx.config.shared_expert_intermediate_size
        gate_up, activated = empty((N, 2 * S), normed.dtype), empty((N, S), normed.dtype)
        y, gate = empty((N, D), normed.dtype), empty((N, 1), normed.dtype)
        low_rank, reduction = low_rank_of(layer, "shared_gate_up", normed, ctx)
        multiply_swiglu(normed, w.shared_gate_up, gate_up, activated, ctx.memory, low_rank, reduction=reduction)
        gate_up_xa = low_rank and low_rank[0]
        down_xa = project_to_residual(layer, "shared_down", activated, w, ctx, y, None)
        gate_xa = project(layer, "shared_gate", normed, w, ctx, gate)
        return SavedShared(gate_up, activated, y, gate, (gate_up_xa, down_xa, gate_xa))

    def add(self, x, y, weights, dispatched, shared, ctx, out):
        combined = ctx.memory.empty(x.shape, x.dtype)
        combine(y, weights, dispatched, combined)
        gated_sum(x, combined, shared.y, shared.gate, out)

    def shared_backward(self, dout, saved, w, grads, ctx):
        layer, empty, normed, shared = self.layer, ctx.memory.empty, saved.normed, saved.shared
        gate_up_xa, down_xa, gate_xa = shared.xas
        dy, dgate = empty(dout.shape, dout.dtype), empty(shared.gate.shape, dout.dtype)
        gated_sum_backward(dout, shared.y, shared.gate, dy, dgate)
        dactivated = project_backward(layer, "shared_down", dy, shared.activated, down_xa, w, grads, ctx)
        swiglu_backward(dactivated, shared.gate_up, shared.gate_up)
        dnormed = project_backward(layer, "shared_gate_up", shared.gate_up, normed, gate_up_xa, w, grads, ctx)
        by_gate = project_backward(layer, "shared_gate", dgate, normed, gate_xa, w, grads, ctx)
        add(dnormed, by_gate, dnormed)
        return dnormed

    def products(self, config):
        D, S = config.hidden_size, config.shared_expert_intermediate_size
        return super().products(config) + D * (3 * S + 1)

    def row_elements(self, config):
        return super().row_elements(config) + config.hidden_size + 3 * config.shared_expert_intermediate_size
