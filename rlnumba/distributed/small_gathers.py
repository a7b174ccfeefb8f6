"""Gathers that are one kernel each (kernels/peer_gather.py, kernels/peer_rmsnorm.py), which CUDA graphs may capture.

Every rank calls the same methods in the same order, for arrays of the same shapes; each has an inbox in its memory that
the others write. Where a method does not take an array, on any rank, the transport copies it in another way.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.checks import address
from rlnumba.kernels.peer_gather import Layout, peer_exchange, peer_gather
from rlnumba.kernels.peer_rmsnorm import peer_rmsnorm, supports_peer_rmsnorm


@dataclass(frozen=True)
class SmallGathers:
    """What a rank's kernels need: inboxes, state, error, most_words and limit_cycles are arguments of peer_gather."""

    rank: int
    world_size: int
    inboxes: object
    state: object
    error: object
    most_words: int
    limit_cycles: int

    def gather(self, array, out):
        """Gather an array of whole words, of at most most_words: whether it did."""
        if array.nbytes > 4 * self.most_words or not _has_whole_words(array.nbytes, array, out):
            return False
        self._gather_words(array, out, Layout.of_arrays(array.nbytes // 4, self.world_size))
        return True

    def gather_columns(self, array, out, columns):
        """Gather columns, a model.shard.Columns, by several launches if they are many: whether they are whole words."""
        layout = _layout_of(array, out, columns)
        if layout is not None:
            self._gather_words(array, out, layout)
        return layout is not None

    def takes_rmsnorm(self, part, weight, out):
        """Whether gather_rmsnorm takes these arrays."""
        return supports_peer_rmsnorm(part[None], weight, out[None], self.most_words)

    def gather_rmsnorm(self, part, weight, eps, out):
        """Gather columns and write the rmsnorm of the rows, by one kernel."""
        peer_rmsnorm(part[None], weight, eps, out[None], *self._inbox())

    def exchange_rows(self, array, out, columns, row_width):
        """Exchange rows, if their columns are whole words: whether they are."""
        layout = _layout_of(array, out, columns)
        if layout is not None:
            peer_exchange(*_words(array, out), layout, row_width, *self._inbox())
        return layout is not None

    def _gather_words(self, array, out, layout):
        peer_gather(*_words(array, out), layout, *self._inbox())

    def _inbox(self):
        return self.inboxes, self.state, self.error, self.rank, self.most_words, self.limit_cycles


def _layout_of(array, out, columns):
    """The Layout of the rows that all ranks have together, of which `array` has some columns; None if not in words."""
    sizes = np.array(columns) * array.itemsize
    sizes[1] = 0
    if any(sizes % 4) or not _has_whole_words(0, array, out):
        return None
    width, _, extra, total = (int(size) // 4 for size in sizes)
    return Layout(len(array), width, columns.longer, extra, total)


def _words(*arrays):
    return [array.reshape(1, array.size).view(np.int32) for array in arrays]


def _has_whole_words(nbytes, *arrays):
    """Whether a number of bytes, and the addresses of arrays, are multiples of 4."""
    return nbytes % 4 == 0 and all(address(array) % 4 == 0 for array in arrays)
