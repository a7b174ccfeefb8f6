"""A rank's rows of the weights that all ranks train: deploy.tensor_parallel_size without inference GPUs.

    training     every rank has all weights, or with deploy.zero_stage 3 its part of each layer (layer_shards.py)
    rollout      `refresh`: a rank copies its rows (model/shard.py); the ranks' engines draw as one (tensor_parallel.py)
    after it     the copies' memory is lent to training, or given back

What lies in one piece is read where training writes it: what is not cut, and a rank's rows of o, down and the head.
Those of qkv and gate_up are several pieces, of q, k and v, and are copied side by side. A layer that training has in
parts is gathered from all ranks and then copied, one at a time; all layers there never are. Of a base in few bits
([quantization]) packed words and scales are cut, and copied packed.
"""

import copy
import itertools
import math

from rlnumba.model.lora import Adapter
from rlnumba.model.parameter import MATRIX_ALIGNMENT
from rlnumba.model.quantized.copies import copy_bytes, empty_copy
from rlnumba.model.quantized.rows import copy_rows, is_whole_tiles, row_ranges, view_of
from rlnumba.model.quantized.weights import packed_bytes
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.weights import ROLLOUT_REGION, RolloutWeights, parameters
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.layer_shards import SlicedLayers
from rlnumba.runtime.memory import ALIGNMENT


class CutWeights(RolloutWeights):
    """The views of a shard of a Weights or SlicedLayers, `source`.

    adapter: the Adapter of the whole model that is trained, or None; own_adapter: the shard's.
    """

    def __init__(self, source, shard, adapter=None):
        super().__init__(source)
        self.shard, self.quantization = shard, source.quantization
        # What source has in few bits, {name: Parameter}.
        self.quantized = {} if source.quantization is None else source.quantized
        own = {part.name: part for part in parameters(self.config, shard)}
        # (of the whole model, of the shard, Ranges) of each Parameter that is copied, and views of the others. The
        # Ranges of what is quantised are of rows.
        self.copied, self.views = [], {}
        for whole in (*source.parameters, *self.quantized.values()):
            part, ranges = own[whole.name], whole.ranges_of(shard)
            if whole.name in self.quantized:
                ranges = row_ranges(ranges, whole.shape[-1])
            if self._is_in_place(whole, ranges):
                self.views[whole.name] = self._view(whole, part, ranges)
            else:
                self.copied.append((whole, part, ranges))
        # Layer after layer, which SlicedLayers gather one at a time.
        self.copied.sort(key=lambda each: each[0].layer)
        self.nbytes = sum(self._bytes_of(part) for part in own.values())
        tied = self.embed_tokens[shard.tokens(self.config.vocab_size)]
        self.lm_head = self.views.get("lm_head", tied if "lm" in self.config.heads else None)
        self.adapter, self.own_adapter = adapter, None
        if adapter is not None:
            options = adapter.dtype.name, adapter.base, ROLLOUT_REGION, shard
            self.own_adapter = Adapter(adapter.config, adapter.lora, *options)

    def _is_in_place(self, parameter, ranges):
        """Whether the shard's rows of a Parameter are one aligned piece of memory that stays."""
        if isinstance(self.source, SlicedLayers) and self.source.is_sliced(parameter):
            return False
        if parameter.name in self.quantized:
            return is_whole_tiles(ranges)
        return len(ranges) == 1 and (ranges[0].source % MATRIX_ALIGNMENT == 0 or parameter.layer is None)

    def _view(self, whole, part, ranges):
        """A shard's rows of a Parameter where they lie."""
        if whole.name in self.quantized:
            return view_of(self.source[whole.name], ranges, part.shape)
        (_, at, count), flat = ranges[0], self.source[whole.name].reshape(-1)
        return flat[at : at + count].reshape(part.shape)

    def _bytes_of(self, part):
        """Bytes of a Parameter of the shard."""
        if part.name in self.quantized:
            sizes = self.source.form, self.source.group_size
            return packed_bytes(math.prod(part.shape[:-1]), part.shape[-1], *sizes)
        return part.size * self.dtype.itemsize

    @property
    def own_bytes(self):
        """Bytes of the copies, those of the adapter among them."""
        total = 0 if self.own_adapter is None else self.own_adapter.nbytes
        for _, part, _ in self.copied:
            if part.name in self.quantized:
                total += copy_bytes(part.shape, self.source.form, self.source.group_size)
            else:
                total += -(-part.size * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return total

    def _allocate(self):
        for whole, part, _ in self.copied:
            if whole.name in self.quantized:
                options = self.source.form, self.source.group_size, self.dtype
                self.views[whole.name] = empty_copy(self.arena, part.shape, *options)
            else:
                self.views[whole.name] = self.arena.empty(part.shape, self.dtype)
        return self.views

    def _write(self):
        for index, copied in itertools.groupby(self.copied, lambda each: each[0].layer):
            self.source.layer(index)
            for whole, _, ranges in copied:
                source, target = self.source[whole.name], self.views[whole.name]
                if whole.name in self.quantized:
                    copy_rows(source, target, ranges)
                else:
                    _copy(source.reshape(-1), target.reshape(-1), ranges)
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
