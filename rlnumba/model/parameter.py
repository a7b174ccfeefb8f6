"""A parameter of a model: one view of the flat buffer, its names in a checkpoint, and how ranks cut it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlnumba.model.shard import Range, Shard

# Elements, of vectors and of matrices: blocks of 8-bit moments then belong to one matrix, and so to one layer. The
# padding between parameters stays zero in weights, gradients and moments.
ALIGNMENT, MATRIX_ALIGNMENT = 128, 256


@dataclass(frozen=True)
class Parameter:
    """One view of the flat buffer: its offset, and which tensors of a checkpoint, in order, are its rows.

    layer: that of the decoder, None outside of it. cut: (Shard, rows) -> the slice of them that it has, of the rows of
    a tensor, or of each of its sections; sections: the numbers of rows of these, for each tensor, () if each is one.
    cut_rows: of a stack of matrices, (matrices, rows, columns), the rows that are cut together, such as those of gate
    or of up, 0 of one matrix; stacked: whether `rows` are of the stack's matrices, one after the other, and not
    matrices. other_form: ((tensor, shape), ...) that has the same elements in other checkpoints, or ().
    """

    name: str
    shape: tuple[int, ...]
    decays: bool
    rows: tuple[tuple[str, int], ...]
    layer: int | None = None
    cut: Callable = Shard.all_rows
    offset: int = 0
    sections: tuple[tuple[int, ...], ...] = ()
    cut_rows: int = 0
    stacked: bool = False
    other_form: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def tensors(self):
        """((name in a checkpoint, shape), ...) of the tensors that are saved, one after the other."""
        row = self.shape[2:] if self.stacked else self.shape[1:]
        return tuple((source, (count, *row)) for source, count in self.rows)

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def padded_size(self):
        """Elements up to the next parameter."""
        alignment = MATRIX_ALIGNMENT if self.decays else ALIGNMENT
        return -(-self.size // alignment) * alignment

    def parts_of(self, shard, index, shape=None):
        """The rows that a shard has of the tensor rows[index]: a list of slices, in order.

        shape: of a tensor of a stack, in either form; its rows are those of all its matrices.
        """
        found, first = [], 0
        if self.cut_rows:
            count = math.prod(shape[:-1])
            sizes = (count,) if shard.count == 1 else (self.cut_rows,) * (count // self.cut_rows)
        else:
            sizes = self.sections[index] if self.sections else (self.rows[index][1],)
        for size in sizes:
            part = self.cut(shard, size)
            found.append(slice(first + part.start, first + part.stop))
            first += size
        return found

    def ranges_of(self, shard):
        """The Ranges of this parameter of a whole model that make up a shard's, counted from the first element of each:
        list."""
        found, first, source = [], 0, 0
        columns = self.shape[-1] if self.cut_rows else self.size // self.shape[0]
        for index, (_, shape) in enumerate(self.tensors):
            for part in self.parts_of(shard, index, shape):
                count = (part.stop - part.start) * columns
                found.append(Range(first, source + part.start * columns, count))
                first += count
            source += math.prod(shape)
        return found

    def of(self, shard):
        """The Parameter of a shard of the model that this one is of."""
        if shard.count == 1:
            return self
        if self.cut_rows:
            part = self.cut(shard, self.cut_rows)
            own, (matrices, count, columns) = part.stop - part.start, self.shape
            rows = tuple((source, rows // self.cut_rows * own if self.stacked else rows) for source, rows in self.rows)
            return replace(self, shape=(matrices, count // self.cut_rows * own, columns), rows=rows, cut_rows=own)
        parts = [self.parts_of(shard, index) for index in range(len(self.rows))]
        sections = tuple(tuple(part.stop - part.start for part in each) for each in parts)
        rows = tuple((source, sum(sizes)) for (source, _), sizes in zip(self.rows, sections, strict=True))
        return replace(self, shape=(sum(count for _, count in rows), *self.shape[1:]), rows=rows, sections=sections)


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
