"""The arithmetic of low-rank adapters in a forward and its backward: y += s dropout(x) A^T B^T (model/lora.py)."""

from dataclasses import dataclass
from typing import NamedTuple

from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.nn.dropout import dropout
from rlnumba.kernels.nn.lora import scale_adapters


class Pair(NamedTuple):
    """A (C, D) and B (M, C) of a fused projection of one layer, or their gradients."""

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
            linear(self._dropped(layer, name, x, memory), pair.a, xa)
        scale_adapters(xa, self.scales, self.adapter_ids, xa)
        return xa

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
