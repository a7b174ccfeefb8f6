"""Rows of a QuantizedWeight, which its tiles of ROWS rows have: those of a rank, in place or copied.

Rows of a matrix never share a scale, so that the words and scales of some of them are those of a matrix of these rows.
Where a rank's rows are whole tiles, as they are on GPUs but for a few narrow projections, they are read where they lie.
"""

import math

from rlnumba.kernels.quantized.formats import ROWS
from rlnumba.kernels.quantized.ops import QuantizedWeight
from rlnumba.model.shard import Range


def row_ranges(ranges, columns):
    """Ranges of the elements of a matrix with so many columns, which are whole rows, as Ranges of its rows: list."""
    return [Range(*(number // columns for number in each)) for each in ranges]


def is_whole_tiles(ranges):
    """Whether Ranges of rows are one of whole tiles."""
    return len(ranges) == 1 and ranges[0].source % ROWS == ranges[0].count % ROWS == 0


def view_of(weight, ranges, shape):
    """The QuantizedWeight of this shape of Ranges of another one's rows, which are whole tiles, where they lie."""
    ((_, first, count),) = ranges
    tiles = slice(first // ROWS, (first + count) // ROWS)
    return QuantizedWeight(weight.form, weight.packed[tiles], weight.scales[tiles], shape, weight.dtype)


def copy_rows(source, target, ranges):
    """Copy Ranges of the rows of a QuantizedWeight to another one; rows beyond its matrix get codes and scales 0."""
    if math.prod(target.shape[:-1]) % ROWS:
        for array in (target.packed, target.scales):
            array[-1].fill(0)
    for each in ranges:
        for to, at, count in _within_tiles(*each):
            if to % ROWS == at % ROWS == count % ROWS == 0:
                own, others = (slice(row // ROWS, (row + count) // ROWS) for row in (to, at))
                target.packed[own], target.scales[own] = source.packed[others], source.scales[others]
            else:
                own, others = (slice(row % ROWS, row % ROWS + count) for row in (to, at))
                target.packed[to // ROWS, :, own] = source.packed[at // ROWS, :, others]
                target.scales[to // ROWS, :, own] = source.scales[at // ROWS, :, others]


def _within_tiles(to, at, count):
    """Yields (first row, first row of the source, rows) of pieces of a range that are whole tiles of both, or within
    one tile of each."""
    while count:
        whole = 0 if to % ROWS or at % ROWS else count // ROWS * ROWS
        rows = whole or min(count, ROWS - to % ROWS, ROWS - at % ROWS)
        yield to, at, rows
        to, at, count = to + rows, at + rows, count - rows
