"""Copies in 8 bits of a model's linear layers, which rollout reads in their place: engine.quantization.

    engine's forward     embedding, norms, biases, head, routers: the weights    linear layers: the copies' values
    training             the weights

The copies are made anew after each update of the weights, by the kernel that quantises a base when it is loaded, in the
formats of rlnumba/kernels/quantized/formats.py. So the log-probs of rollout are those of a model with rounded matrices,
and training has to compute its own.
"""

import copy
import itertools
import math

from rlnumba.errors import ConfigError
from rlnumba.kernels.quantized.formats import FORMATS, VECTOR, packed_shape, scales_shape
from rlnumba.kernels.quantized.ops import QuantizedWeight, quantize
from rlnumba.model.quantized.weights import quantized_names
from rlnumba.model.shard import WHOLE
from rlnumba.model.weights import RolloutWeights, Weights, parameters
from rlnumba.runtime.memory import ALIGNMENT


def copied_parameters(config, shard=WHOLE):
    """The Parameters of a model, or of its shard, that are copied: list."""
    names = quantized_names(config)
    return [p for p in parameters(config, shard) if p.name in names]


def group_size_of(config, form):
    """The weights of a row that share a scale: a Format's, or the largest divisor of it that divides all rows.

    Raises ConfigError where that is no multiple of VECTOR.
    """
    columns = {p.shape[-1]: p.rows[0][0] for p in reversed(copied_parameters(config))}
    found = math.gcd(form.group_size, *columns)
    if found % VECTOR:
        size = next(each for each in columns if each % VECTOR)
        raise ConfigError(f"engine.quantization needs rows of a multiple of {VECTOR}, got {size} in {columns[size]}")
    return found


def check_copies(config, name):
    """Raise ConfigError for a model whose rows have no groups for copies in the format of this name."""
    group_size_of(config, FORMATS[name])


def copies_bytes(config, name, shard=WHOLE):
    """Bytes of the copies of a model, or of its shard, in the format of this name. Raises as group_size_of."""
    form = FORMATS[name]
    group_size = group_size_of(config, form)
    return sum(copy_bytes(p.shape, form, group_size) for p in copied_parameters(config, shard))


def copy_bytes(shape, form, group_size):
    """Bytes of an arena that a copy of a matrix, or of a stack of matrices, takes."""
    return sum(-(-4 * math.prod(each) // ALIGNMENT) * ALIGNMENT for each in _shapes(shape, form, group_size))


def empty_copy(arena, shape, form, group_size, dtype):
    """A QuantizedWeight with undefined codes and scales, in an Arena. The arguments are QuantizedWeight.empty's."""
    shapes = _shapes(shape, form, group_size)
    packed, scales = (arena.empty(*each) for each in zip(shapes, ("int32", "float32"), strict=True))
    return QuantizedWeight(form, packed, scales, shape, dtype)


def _shapes(shape, form, group_size):
    """The shapes of `packed` and `scales` of a matrix, or of a stack of matrices."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return packed_shape(rows, columns, form), scales_shape(rows, columns // group_size)


class QuantizedCopies(RolloutWeights):
    """The views of a Weights, `source`, with copies in place of its linear layers.

    name: of a Format. quantized: {name: QuantizedWeight} of the copies. Raises ConfigError where no group of weights
    divides all rows.
    """

    def __init__(self, source, name):
        super().__init__(source)
        self.form, self.quantized = FORMATS[name], {}
        self.group_size = group_size_of(source.config, self.form)
        self.copied = copied_parameters(source.config, source.shard)

    @property
    def nbytes(self):
        """Bytes that a forward reads: those of the copies and of what is not copied."""
        copied = sum(p.size for p in self.copied)
        return (self.source.size - copied) * self.dtype.itemsize + self.own_bytes

    @property
    def own_bytes(self):
        """Bytes of the copies."""
        return copies_bytes(self.config, self.form.name, self.source.shard)

    def _allocate(self):
        for p in self.copied:
            self.quantized[p.name] = empty_copy(self.arena, p.shape, self.form, self.group_size, self.dtype)
        return self.source.views | self.quantized

    def _write(self):
        for index, copied in itertools.groupby(self.copied, lambda p: p.layer):
            self.source.layer(index)
            for p in copied:
                weight, matrix = self.quantized[p.name], self.source[p.name]
                # Memory that was given back comes with any content; codes and scales beyond a matrix are 0.
                weight.packed.fill(0)
                weight.scales.fill(0)
                quantize(matrix.reshape(-1, matrix.shape[-1]), 0, weight)


def with_copies(model, name):
    """A Transformer that reads QuantizedCopies of the weights in the format of this name; the model itself for None.

    Raises ConfigError for a model that is quantised already.
    """
    if name is None:
        return model
    if not isinstance(model.weights, Weights) or model.weights.quantization is not None:
        raise ConfigError("engine.quantization makes copies of 16-bit weights, and the model's are quantised already")
    result = copy.copy(model)
    result.weights = QuantizedCopies(model.weights, name)
    return result
