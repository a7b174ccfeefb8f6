"""The arithmetic of low-rank adapters in a forward and its backward: y += s dropout(x) A^T B^T (model/lora.py)."""

from dataclasses import dataclass
from typing import NamedTuple

from rlnumba.kernels.gemm.grouped import grouped_gemm, grouped_gemm_dw, grouped_gemm_dx
from rlnumba.kernels.gemm.ops import linear_backward_input, linear_backward_weight, reduce_rank
from rlnumba.kernels.gemm.reduction import Reduction
from rlnumba.kernels.nn.dropout import dropout
from rlnumba.kernels.nn.elementwise import add
from rlnumba.kernels.nn.lora import scale_adapters


class Pair(NamedTuple):
    """A (C, D) and B (M, C) of a fused projection of one layer, or their gradients; of a stack each expert's.

    Experts' A is (E, C, D) and their B (E, M, C).
    """

    a: object
    b: object


class Dropout(NamedTuple):
    """The dropout of the adapters' inputs in a forward: the probability p, and three numbers that decide the masks.

    seed: the run's; step: the optimizer step's number; micro_batch: its number in the step.
    """

    p: float
    seed: int
    step: int
    micro_batch: int

    def apply(self, place, x, out):
        """out = dropout of x; place: number of the projection in the model. Its own gradient."""
        key = self.seed % 2**32, self.seed // 2**32 % 2**32
        dropout(x, self.p, key, (place, self.micro_batch, self.step), out)


@dataclass(frozen=True)
class LoraContext:
    """The adapters of one forward.

    layers: of each layer {projection: Pair}, without those that have no adapter; scales, adapter_ids: arguments of
    scale_adapters, the latter None with one adapter; dropout: a Dropout or None; numbers: those of projection_numbers;
    grads: in the backward, the Adapter that gradients are added to.
    """

    layers: list
    scales: object
    adapter_ids: object = None
    dropout: Dropout | None = None
    numbers: dict | None = None
    grads: object = None

    def pair(self, layer, name):
        """The Pair of a projection or None."""
        return self.layers[layer].get(name)

    def reduce(self, layer, name, x, memory):
        """s dropout(x) A^T (N, C) of a projection's input x (N, D); None without an adapter there."""
        pair = self.pair(layer, name)
        if pair is None:
            return None
        xa = memory.empty((x.shape[0], pair.a.shape[0]), x.dtype)
        with memory.scope():
            reduce_rank(self._dropped(layer, name, x, memory), self._reduction(pair), xa)
        return xa

    def low_rank(self, layer, name, x, memory):
        """(low rank, reduction) of `linear` for a projection's input x (N, D); (None, None) without an adapter there.

        The low rank's first matrix is what `reduce` returns. Without dropout `linear` writes it.
        """
        pair = self.pair(layer, name)
        if pair is None:
            return None, None
        if self.dropout is not None:
            return (self.reduce(layer, name, x, memory), pair.b), None
        return (memory.empty((x.shape[0], pair.a.shape[0]), x.dtype), pair.b), self._reduction(pair)

    def _reduction(self, pair):
        return Reduction(pair.a, self.scales, self.adapter_ids)

    def backward(self, layer, name, dy, x, xa, weight, dx, memory):
        """The gradients of x weight^T + xa B^T by A and B, which are added, and by x: dx (N, D) is written.

        xa (N, C): what `reduce` returned.
        """
        pair, grads = self.pair(layer, name), self.grads.layers[layer][name]
        linear_backward_weight(dy, xa, grads.b)
        with memory.scope():
            dxa = memory.empty(xa.shape, xa.dtype)
            linear_backward_input(dy, pair.b, dxa)
            scale_adapters(dxa, self.scales, self.adapter_ids, dxa)
            linear_backward_weight(dxa, self._dropped(layer, name, x, memory), grads.a)
            if self.dropout is None:
                linear_backward_input(dy, weight, dx, low_rank=(dxa, pair.a))
                return
            linear_backward_input(dxa, pair.a, dx)
        self.dropout.apply(self.numbers[layer, name], dx, dx)
        linear_backward_input(dy, weight, dx, accumulate=True)

    def add_to_experts(self, layer, name, x, starts, y, memory):
        """y += s x A_e^T B_e^T, for rows x (R, D) sorted by expert and y (R, M): what grouped_gemm takes and writes."""
        with memory.scope():
            update = memory.empty(y.shape, y.dtype)
            grouped_gemm(
                self._reduced_by_experts(layer, name, x, starts, memory), self.pair(layer, name).b, starts, update
            )
            add(y, update, y)

    def reduced_gradient(self, layer, name, dy, starts, memory):
        """s dy B_e (R, C), the gradient of x A_e^T in the update of add_to_experts, from that of y."""
        pair = self.pair(layer, name)
        dxa = memory.empty((len(dy), pair.a.shape[1]), dy.dtype)
        grouped_gemm_dx(dy, pair.b, starts, dxa)
        scale_adapters(dxa, self.scales, self.adapter_ids, dxa)
        return dxa

    def add_input_gradient(self, layer, name, dxa, starts, dx, memory):
        """dx (R, D) += dxa A_e, dxa of reduced_gradient."""
        with memory.scope():
            update = memory.empty(dx.shape, dx.dtype)
            grouped_gemm_dx(dxa, self.pair(layer, name).a, starts, update)
            add(dx, update, dx)

    def add_expert_gradients(self, layer, name, dy, x, dxa, starts, memory):
        """Add the gradients of the experts' A and B: of dy (R, M), the rows x (R, D), and dxa of reduced_gradient.

        The outputs of A are computed again. Rows may have weights, which then are in x alone.
        """
        grads = self.grads.layers[layer][name]
        with memory.scope():
            grouped_gemm_dw(dy, self._reduced_by_experts(layer, name, x, starts, memory), starts, grads.b)
        grouped_gemm_dw(dxa, x, starts, grads.a)

    def _reduced_by_experts(self, layer, name, x, starts, memory):
        """s x A_e^T (R, C)."""
        a = self.pair(layer, name).a
        xa = memory.empty((len(x), a.shape[1]), x.dtype)
        grouped_gemm(x, a, starts, xa)
        scale_adapters(xa, self.scales, self.adapter_ids, xa)
        return xa

    def _dropped(self, layer, name, x, memory):
        if self.dropout is None:
            return x
        out = memory.empty(x.shape, x.dtype)
        self.dropout.apply(self.numbers[layer, name], x, out)
        return out


def projection_numbers(layers):
    """{(layer, projection): its number in the model}, by which masks of dropout differ. layers: the blocks of each."""
    blocks = [block for blocks in layers for block in blocks]
    names = [(block.layer, name) for block in blocks for name in block.PROJECTIONS]
    return {name: number for number, name in enumerate(names)}
