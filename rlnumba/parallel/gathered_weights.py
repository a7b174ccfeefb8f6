"""All layers of weights in parts, gathered while an engine draws completions: deploy.zero_stage 3 on GPUs that do both.

    training     each rank has a part of every layer, and one layer at a time (layer_shards.py)
    rollout      `refresh`: every layer is gathered from all ranks, once; the engine reads them as those of one GPU
    after it     the memory is lent to training, or given back

Embedding, heads, norms and biases are on every rank anyway, and are read where training writes them.
"""

import copy

from rlnumba.model.parameter import layer_spans
from rlnumba.model.weights import RolloutWeights
from rlnumba.parallel.layer_shards import LayerShards


class GatheredWeights(RolloutWeights):
    """The views of LayerShards, `source`, with all layers at once."""

    quantization = None

    def __init__(self, source):
        super().__init__(source)
        self.shard, self.flat = source.shard, None
        spans = layer_spans(source.parameters)
        self._begin = spans[0][0]
        # A gather writes a little more than a layer, which the next one writes again.
        self.size = max(first - self._begin + source.gathered_size(index) for index, (first, _) in enumerate(spans))
        self._places = [first - self._begin for first, _ in spans]

    @property
    def nbytes(self):
        """Bytes that a forward reads."""
        return self.source.size * self.dtype.itemsize

    @property
    def own_bytes(self):
        """Bytes of the layers."""
        return self.size * self.dtype.itemsize

    def _allocate(self):
        self.flat, views = self.arena.empty(self.size, self.dtype), dict(self.source.views)
        for p in self.source.parameters:
            if p.decays and p.layer is not None:
                first = p.offset - self._begin
                views[p.name] = self.flat[first : first + p.size].reshape(p.shape)
        return views

    def _write(self):
        for index, first in enumerate(self._places):
            self.source.gather_layer(index, self.flat[first : first + self.source.gathered_size(index)])


def with_gathered(model):
    """A Transformer that reads GatheredWeights of a model with LayerShards; another model itself."""
    if not isinstance(model.weights, LayerShards):
        return model
    result = copy.copy(model)
    result.weights = GatheredWeights(model.weights)
    return result
