"""A parameter of a model: one view of the flat buffer, its names in a checkpoint, and how ranks cut it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlnumba.model.shard import Shard

# Elements, of vectors and of matrices: blocks of 8-bit moments then belong to one matrix, and so to one layer. The
# padding between parameters stays zero in weights, gradients and moments.
ALIGNMENT, MATRIX_ALIGNMENT = 128, 256


@dataclass(frozen=True)
class Parameter:
    """One view of the flat buffer: its offset, and which tensors of a checkpoint, in order, are its rows.

    layer: that of the decoder, None outside of it. cut: (Shard, rows of a tensor) -> the slice of them that it has.
    """

    name: str
    shape: tuple[int, ...]
    decays: bool
    rows: tuple[tuple[str, int], ...]
    layer: int | None = None
    cut: Callable = Shard.all_rows
    offset: int = 0

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def padded_size(self):
        """Elements up to the next parameter."""
        alignment = MATRIX_ALIGNMENT if self.decays else ALIGNMENT
        return -(-self.size // alignment) * alignment

    def part_of(self, shard, count):
        """The rows that a shard has, of the `count` rows of one of the tensors: a slice."""
        return self.cut(shard, count)

    def of(self, shard):
        """The Parameter of a shard of the model that this one is of."""
        if shard.count == 1:
            return self
        parts = ((source, self.part_of(shard, count)) for source, count in self.rows)
        rows = tuple((source, part.stop - part.start) for source, part in parts)
        return replace(self, shape=(sum(count for _, count in rows), *self.shape[1:]), rows=rows)


def placed(parameters):
    """Parameters in the order of the flat buffer, what decays first, with their offsets: list."""
    found, offset = [], 0
    for parameter in sorted(parameters, key=lambda p: not p.decays):
        found.append(replace(parameter, offset=offset))
        offset += parameter.padded_size
    return found


def layer_spans(parameters):
    """[(first element, end)] of the matrices of each layer in the flat buffer, which follow one another."""
    spans = {}
    for p in parameters:
        if p.decays and p.layer is not None:
            first, _ = spans.get(p.layer, (p.offset, None))
            spans[p.layer] = first, p.offset + p.padded_size
    return [spans[layer] for layer in sorted(spans)]
