"""A rank's rows of the weights that all ranks train: deploy.tensor_parallel_size without inference GPUs.

    training     every rank has all weights, or with deploy.zero_stage 3 its part of each layer (layer_shards.py)
    rollout      `refresh`: a rank copies its rows (model/shard.py); the ranks' engines draw as one (tensor_parallel.py)
    after it     the copies' memory is lent to training, or given back

What lies in one piece is read where training writes it: what is not cut, and a rank's rows of o, down and the head.
Those of qkv and gate_up are several pieces, of q, k and v, and are copied side by side. A layer that training has in
parts is gathered from all ranks and then copied, one at a time; all layers there never are. On a GPU the addresses stay
while the memory comes and goes (runtime/arena.py): captured graphs read them.
"""

import copy
import itertools

from rlnumba.model.lora import Adapter
from rlnumba.model.parameter import MATRIX_ALIGNMENT
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.weights import parameters
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.runtime.arena import Arena
from rlnumba.runtime.memory import ALIGNMENT

REGION = "rollout weights"


class CutWeights:
    """The views of a shard of a Weights or LayerShards, `source`; those of layers are there after the first `refresh`.

    adapter: the Adapter of the whole model that is trained, or None; own_adapter: the shard's. quantization, layers,
    embed_tokens, norm, lm_head, score: as those of Weights.
    """

    quantization = None

    def __init__(self, source, shard, adapter=None):
        self.source, self.shard, self.config, self.dtype = source, shard, source.config, source.dtype
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
        self.embed_tokens, self.norm = source.embed_tokens, source.norm
        tied = self.embed_tokens[shard.tokens(self.config.vocab_size)]
        self.lm_head = self.views.get("lm_head", tied if "lm" in self.config.heads else None)
        self.score = source.score
        self.adapter, self.own_adapter = adapter, None
        if adapter is not None:
            options = adapter.dtype.name, adapter.base, REGION, shard
            self.own_adapter = Adapter(adapter.config, adapter.lora, *options)
        self.arena, self.layers = Arena(REGION), None

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

    def layer(self, index):
        """The views of a layer that is computed next, a tuple of each block's Weights."""
        return self.layers[index]

    def refresh(self):
        """Take memory for the copies if they have none, and make them of the weights as they are now.

        Ranks that have the weights in parts all call this together: each gathers one layer at a time.
        """
        if self.layers is None:
            self._allocate()
        else:
            self.arena.take()
        for index, copied in itertools.groupby(self.copied, lambda each: each[0].layer):
            self.source.layer(index)
            for whole, _, ranges in copied:
                _copy(self.source[whole.name].reshape(-1), self.views[whole.name].reshape(-1), ranges)
        if self.adapter is not None:
            _copy(self.adapter.flat, self.own_adapter.flat, self.own_adapter.places.ranges())

    def _allocate(self):
        with self.arena.scope():
            for whole, part, _ in self.copied:
                self.views[whole.name] = self.arena.empty(part.shape, self.dtype)
        self.layers = [tuple(block.views(self.views) for block in blocks) for blocks in self.config.blocks]

    def lend(self):
        """Let others take the memory until `refresh`."""
        self.arena.lend()

    def give_back(self):
        """Free the memory until `refresh`."""
        self.arena.give_back()


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
