"""A rank's rows of the weights that all ranks train: deploy.tensor_parallel_size without inference GPUs.

    training     every rank has all weights, or with deploy.zero_stage 3 its part of each layer (layer_shards.py)
    rollout      `refresh`: a rank copies its rows (model/shard.py); the ranks' engines draw as one (tensor_parallel.py)
    after it     the copies' memory is lent to training, or given back

What lies in one piece is read where training writes it: what is not cut, and a rank's rows of o, down and the head.
Those of qkv and gate_up are several pieces, of q, k and v, and are copied side by side. A layer that training has in
parts is gathered from all ranks and then copied, one at a time; all layers there never are.
"""

import copy
import itertools

from rlnumba.model.lora import Adapter
from rlnumba.model.parameter import MATRIX_ALIGNMENT
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.weights import ROLLOUT_REGION, RolloutWeights, parameters
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.runtime.memory import ALIGNMENT


class CutWeights(RolloutWeights):
    """The views of a shard of a Weights or LayerShards, `source`.

    adapter: the Adapter of the whole model that is trained, or None; own_adapter: the shard's.
    """

    quantization = None

    def __init__(self, source, shard, adapter=None):
        super().__init__(source)
        self.shard = shard
        own = parameters(self.config, shard)
        # (of the whole model, of the shard, Ranges) of each Parameter that is copied, and views of the others.
        self.copied, self.views = [], {}
        for whole, part in zip(source.parameters, own, strict=True):
            ranges = whole.ranges_of(shard)
            if self._is_in_place(whole, ranges):
                (_, at, count), flat = ranges[0], source[whole.name].reshape(-1)
                self.views[whole.name] = flat[at : at + count].reshape(part.shape)
            else:
                self.copied.append((whole, part, ranges))
        # Layer after layer, which LayerShards gather one at a time.
        self.copied.sort(key=lambda each: each[0].layer)
        self.nbytes = sum(part.size for part in own) * self.dtype.itemsize
        tied = self.embed_tokens[shard.tokens(self.config.vocab_size)]
        self.lm_head = self.views.get("lm_head", tied if "lm" in self.config.heads else None)
        self.adapter, self.own_adapter = adapter, None
        if adapter is not None:
            options = adapter.dtype.name, adapter.base, ROLLOUT_REGION, shard
            self.own_adapter = Adapter(adapter.config, adapter.lora, *options)

    def _is_in_place(self, parameter, ranges):
        """Whether the shard's rows of a Parameter are one aligned piece of memory that stays."""
        if isinstance(self.source, LayerShards) and parameter.decays and parameter.layer is not None:
            return False
        return len(ranges) == 1 and (ranges[0].source % MATRIX_ALIGNMENT == 0 or parameter.layer is None)

    @property
    def own_bytes(self):
        """Bytes of the copies, those of the adapter among them."""
        sizes = [-(-part.size * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT for _, part, _ in self.copied]
        return sum(sizes) + (0 if self.own_adapter is None else self.own_adapter.nbytes)

    def _allocate(self):
        for whole, part, _ in self.copied:
            self.views[whole.name] = self.arena.empty(part.shape, self.dtype)
        return self.views

    def _write(self):
        for index, copied in itertools.groupby(self.copied, lambda each: each[0].layer):
            self.source.layer(index)
            for whole, _, ranges in copied:
                _copy(self.source[whole.name].reshape(-1), self.views[whole.name].reshape(-1), ranges)
        if self.adapter is not None:
            _copy(self.adapter.flat, self.own_adapter.flat, self.own_adapter.places.ranges())


def _copy(source, target, ranges):
    """Copy Ranges of a flat array to another one."""
    for first, at, count in ranges:
        as_bytes(target[first : first + count])[...] = as_bytes(source[at : at + count])


def with_own_rows(model):
    """The Transformer of this rank's shard, which reads CutWeights, of a model with `ranks` and all weights; another
    model itself."""
    if model.ranks is None or model.weights.shard != WHOLE:
        return model
    shard, result = Shard(model.ranks.rank, model.ranks.count), copy.copy(model)
    result.weights = CutWeights(model.weights, shard, model.adapter)
    result.config, result.lm_head = shard.config_of(model.config), result.weights.lm_head
    result.adapter = result.weights.own_adapter
    return result
