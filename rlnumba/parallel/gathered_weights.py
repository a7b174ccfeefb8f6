"""All layers of weights in parts, gathered while an engine draws completions: deploy.zero_stage 3 on GPUs that do both.

    training     each rank has a part of every layer, and one layer at a time (layer_shards.py)
    rollout      `refresh`: every layer is gathered from all ranks, once; the engine reads them as those of one GPU
    after it     the memory is lent to training, or given back

Embedding, heads, norms and biases are on every rank anyway, and are read where training writes them.
"""

import copy
from itertools import accumulate

from rlnumba.model.weights import RolloutWeights
from rlnumba.parallel.layer_shards import SlicedLayers


class GatheredWeights(RolloutWeights):
    """The views of weights with SlicedLayers, `source`, with all layers at once."""

    def __init__(self, source):
        super().__init__(source)
        self.shard, self.flat, self.quantization = source.shard, None, source.quantization
        self._firsts = [0, *accumulate(source.layer_sizes[:-1])]
        # A gather writes a little more than a layer, which the next one writes again.
        self.size = max(first + source.gathered_size(index) for index, first in enumerate(self._firsts))

    @property
    def nbytes(self):
        """Bytes that a forward reads."""
        return self.source.whole_bytes

    @property
    def own_bytes(self):
        """Bytes of the layers."""
        return self.size * self.source.element.itemsize

    def _allocate(self):
        self.flat = self.arena.empty(self.size, self.source.element)
        return self.source.views | self.source.views_in(self.flat, self._firsts)

    def _write(self):
        for index, first in enumerate(self._firsts):
            self.source.gather_layer(index, self.flat[first : first + self.source.gathered_size(index)])


def with_gathered(model):
    """A Transformer that reads GatheredWeights of a model with SlicedLayers; another model itself."""
    if not isinstance(model.weights, SlicedLayers):
        return model
    result = copy.copy(model)
    result.weights = GatheredWeights(model.weights)
    return result
