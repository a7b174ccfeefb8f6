"""Weights in parts: each of R ranks has a part of every layer, and all of one layer at a time.

ZeRO, stage 3 (Rajbhandari et al. 2020), for models whose weights are too large for each GPU.

    slices of a layer      rank r has elements [r s, (r + 1) s) of the layer's n matrix elements, s = n / R rounded up
    the layer              gathered into one buffer before its forward, and before its backward
    the layer's gradient   float32, of one layer at a time; folded as soon as it is complete (zero.py)
    rest                   embedding, heads, norms and biases: on every rank
    the optimizer's part   contiguous, as in stage 2: what a rank updates and writes into checkpoints

The computation, and the order in which gradients are added, are those of stage 2, so the bits are its bits.
Where an adapter is trained, its frozen base is in parts without the optimizer's; the adapter is as in stage 2. A base
in few bits ([quantization]) has slices of the packed words and scales of each layer, and is gathered packed.

All ranks gather and fold together. A rank without a micro-batch in a round takes part in both without computing
(gradient_fold.py:GradientFold.begin). Outside of training ranks compute as many forward passes each
(runs/policy.py:Policy.own).
"""

import math

import numpy as np

from rlnumba.kernels.quantized.formats import packed_shape, scales_shape
from rlnumba.kernels.quantized.ops import QuantizedWeight
from rlnumba.model.parameter import MATRIX_ALIGNMENT, layer_spans
from rlnumba.model.quantized.weights import QuantizedWeights
from rlnumba.model.weights import Weights
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.zero import Part, ShardedOptimizer
from rlnumba.runtime import device, memory

# Elements that go from a rank to the first one at a time.
PIECE = 16 << 20


class SlicedLayers:
    """A kind of Weights of which each rank has a slice of every layer's matrices, and all of one layer at a time.

    layer_sizes: elements of each layer, in whatever format, a list. A subclass calls `_cut` while it allocates.
    """

    def _cut(self, region, layer_sizes, dtype):
        """Take zeros for this rank's slices of layers of so many elements, and for a whole one: bytes of both."""
        world_size, xp = self.communicator.world_size, device.xp()
        slices = [-(-size // (world_size * MATRIX_ALIGNMENT)) * MATRIX_ALIGNMENT for size in layer_sizes]
        sizes = sum(slices), max(slices) * world_size
        nbytes = sum(sizes) * np.dtype(dtype).itemsize
        with memory.allocating(region, nbytes):
            own, self._buffer = (xp.zeros(size, dtype) for size in sizes)
        self.layer_sizes, self._slices = layer_sizes, np.split(own, np.cumsum(slices)[:-1])
        return nbytes

    def layer(self, index):
        """The views of a layer, gathered from all ranks, which call this together."""
        self.gather_layer(index, self._buffer[: self.gathered_size(index)])
        return self.layers[index]

    def is_sliced(self, parameter):
        """Whether this rank has a slice alone of a Parameter: of a matrix of a layer."""
        raise NotImplementedError

    def gathered_size(self, index):
        """Elements of a layer's matrices, and of the padding that makes all ranks' slices as long: int."""
        return self.communicator.world_size * len(self._slices[index])

    def gather_layer(self, index, out):
        """Write a layer's matrices of all ranks, which call this together, to out (gathered_size(index),)."""
        self.communicator.gather(self._slices[index], out.reshape(self.communicator.world_size, -1))

    @property
    def element(self):
        """The dtype of a layer's elements."""
        return self._buffer.dtype

    @property
    def whole_bytes(self):
        """Bytes of the whole model."""
        raise NotImplementedError

    def views_in(self, array, firsts):
        """{name: view} of the layers' matrices in an array of `element`s. firsts: where each layer begins there."""
        raise NotImplementedError


class LayerShards(SlicedLayers, Weights):
    """The Weights of one rank. flat: the optimizer's part of this rank, elements [first, first + n) of the model.

    communicator: that of the ranks, which all make theirs at the same time. layers: all use the same memory, which
    holds the layer that `layer` was called for last. is_trained: whether there is such a part; flat is empty otherwise.
    """

    def __init__(self, config, dtype="float32", region="weights", shard=None, communicator=None, is_trained=True):
        self.communicator, self.is_trained = communicator, is_trained
        super().__init__(config, dtype, region)

    def _allocate(self, region):
        """The views of all parameters by name, the memory of which is allocated."""
        rank, world_size = self.communicator.rank, self.communicator.world_size
        self.parts_of_ranks = [Part.of(self.size, each, world_size) for each in range(world_size)]
        part = self.parts_of_ranks[rank] if self.is_trained else Part(0, 0)
        self._layers = layer_spans(self.parameters)
        (begin, _), (_, matrices_end) = self._layers[0], self._layers[-1]
        sizes = part.size, begin, self.size - matrices_end
        nbytes = sum(sizes) * self.dtype.itemsize
        with memory.allocating(region, nbytes):
            self.flat, *rest = (device.xp().zeros(size, self.dtype) for size in sizes)
        self.first, self._rest = part.start, list(zip((0, matrices_end), rest, strict=True))
        self._nbytes = nbytes + self._cut(region, [end - first for first, end in self._layers], self.dtype)
        views = self.views_in(self._buffer, [0] * len(self._layers))
        return views | {p.name: self._view(p) for p in self.parameters if p.name not in views}, self.nbytes

    @property
    def nbytes(self):
        """Bytes of all that this rank has."""
        return self._nbytes

    @property
    def whole_bytes(self):
        return self.size * self.dtype.itemsize

    def is_sliced(self, parameter):
        return parameter.decays and parameter.layer is not None

    def views_in(self, array, firsts):
        views = {}
        for p in self.parameters:
            if self.is_sliced(p):
                at = p.offset - self._layers[p.layer][0] + firsts[p.layer]
                views[p.name] = array[at : at + p.size].reshape(p.shape)
        return views

    def _view(self, p):
        """A Parameter of the rest."""
        after_layers = self._rest[1][0]
        first, array = self._rest[0 if p.offset < after_layers else 1]
        return array[p.offset - first : p.offset - first + p.size].reshape(p.shape)

    def spans(self):
        """[(number of the first element, array)] of all that this rank has; the same elements may be in two of them."""
        found = [(self.first, self.flat), *self._rest]
        for (first, end), own in zip(self._layers, self._slices, strict=True):
            start = first + self.communicator.rank * len(own)
            found.append((start, own[: max(min(len(own), end - start), 0)]))
        return found

    def init_score(self, head_init, seed):
        """The same as Weights.init_score; the values go to the optimizer's part, too."""
        super().init_score(head_init, seed)
        self._copy(*self._rest[1], [self.spans()[0]])

    def store(self, first, values):
        """Set elements first, first + 1, ... where this rank has them, but for the optimizer's part."""
        self._copy(first, values, self.spans()[1:])

    def host_part(self, first, count):
        """Elements first, first + 1, ... on the host of rank 0, (count,) of the weights' dtype; None on other ranks.

        All ranks call this together: they come from the optimizer's parts.
        """
        rank, xp = self.communicator.rank, device.xp()
        whole = np.empty(count, self.dtype) if rank == 0 else None
        for owner, part in enumerate(self.parts_of_ranks):
            stop = min(first + count, part.stop)
            for lower in range(max(first, part.start), stop, PIECE):
                upper = min(lower + PIECE, stop)
                own = self.flat[lower - self.first : upper - self.first] if rank == owner else None
                if rank == owner and rank:
                    self.communicator.put(own, 0)
                if rank:
                    continue
                if owner:
                    own = xp.empty(upper - lower, self.dtype)
                    self.communicator.get(own, owner)
                as_bytes(whole[lower - first : upper - first])[...] = as_bytes(device.to_host(own))
        return whole

    def _copy(self, first, values, spans):
        for start, array in spans:
            lower, upper = max(first, start), min(first + len(values), start + len(array))
            if lower < upper:
                array[lower - start : upper - start] = values[lower - first : upper - first]


class QuantizedLayerShards(SlicedLayers, QuantizedWeights):
    """The QuantizedWeights of one rank, frozen; an element of a layer is a word of 32 bits.

    flat: all that is not quantised, on every rank. communicator, layers: as those of LayerShards.
    """

    def __init__(self, config, dtype="float32", region="weights", shard=None, quantization=None, communicator=None):
        self.communicator = communicator
        super().__init__(config, dtype, region, quantization=quantization)

    def _allocate_quantized(self, region):
        # (first word in its layer, shape) of `packed` and of `scales` of each matrix.
        self._places, sizes = {}, [0] * len(self.config.blocks)
        for p in self.quantized.values():
            rows, columns, self._places[p.name] = math.prod(p.shape[:-1]), p.shape[-1], []
            for shape in (packed_shape(rows, columns, self.form), scales_shape(rows, columns // self.group_size)):
                self._places[p.name].append((sizes[p.layer], shape))
                sizes[p.layer] += -(-math.prod(shape) // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
        self._sliced_bytes = self._cut(region, sizes, np.int32)
        return self.views_in(self._buffer, [0] * len(sizes)), self._sliced_bytes

    @property
    def nbytes(self):
        """Bytes of all that this rank has."""
        return self.flat.nbytes + self._sliced_bytes

    def is_sliced(self, parameter):
        return parameter.name in self.quantized

    @property
    def whole_bytes(self):
        return self.flat.nbytes + sum(self.layer_sizes) * self.element.itemsize

    def views_in(self, array, firsts):
        views = {}
        for name, p in self.quantized.items():
            places = [(firsts[p.layer] + at, shape) for at, shape in self._places[name]]
            packed, scales = (array[at : at + math.prod(shape)].reshape(shape) for at, shape in places)
            views[name] = QuantizedWeight(self.form, packed, scales.view(np.float32), p.shape, self.dtype)
        return views

    def fill_quantized(self, stored, contents):
        """Read what is quantised of a checkpoint's tensors: each rank quantises every layer, and keeps its slice."""
        self.check_stored(stored)
        for index, own in enumerate(self._slices):
            self._buffer.fill(0)
            for p in self.quantized.values():
                if p.layer == index:
                    self._fill_matrix(p, stored, contents)
            first = self.communicator.rank * len(own)
            own[...] = self._buffer[first : first + len(own)]


class LayerOptimizer(ShardedOptimizer):
    """The ShardedOptimizer of a model with LayerShards."""

    def _size(self):
        return self.model_weights.size

    def _own_weights(self):
        return self.model_weights.flat

    def _arrived(self, rank, first, values):
        self.model_weights.store(first, values)
