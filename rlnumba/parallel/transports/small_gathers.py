"""Gathers that are one kernel each (kernels/peer/gather.py, kernels/peer/rmsnorm.py), which CUDA graphs may capture.

Every rank calls the same methods in the same order, for arrays of the same shapes; each has an inbox in its memory that
the others write. An array that a method does not take, on any rank, is copied by the transport in another way.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.kernels.checks import FLOATS, address
from rlnumba.kernels.peer.gather import GatherLayout, peer_gather
from rlnumba.kernels.peer.inbox import WITH_EPOCHS, Inboxes
from rlnumba.kernels.peer.rmsnorm import peer_rmsnorm, supports_peer_rmsnorm


def capacity_of(nbytes):
    """Packets with epochs in which an array of so many bytes, whole words, travels: int."""
    return -(-nbytes // (4 * WITH_EPOCHS))


@dataclass(frozen=True)
class SmallGathers:
    """The gathers of a rank, with inboxes of packets for arrays of `most_bytes`."""

    inboxes: Inboxes
    most_bytes: int

    def gather(self, array, out):
        """Gather an array of whole words, of at most most_bytes: whether it did."""
        if array.nbytes > self.most_bytes or not _has_whole_words(array.nbytes, array, out):
            return False
        layout = GatherLayout.of_arrays(array.nbytes // 4, self.inboxes.world_size)
        peer_gather(*_words(array, out), layout, self.inboxes)
        return True

    def gather_columns(self, array, out, columns, row_width=None):
        """Gather columns, a model.shard.Columns, by several launches if they are many: whether they are whole words.

        row_width: that of an exchange of rows, see peer_gather.
        """
        layout = _layout_of(array, out, columns)
        if layout is not None:
            peer_gather(*_words(array, out), layout, self.inboxes, array.dtype in FLOATS, row_width)
        return layout is not None

    def takes_rmsnorm(self, part, weight, out):
        """Whether gather_rmsnorm takes these arrays."""
        return supports_peer_rmsnorm(part[None], weight, out[None], self.inboxes.capacity)

    def gather_rmsnorm(self, part, weight, eps, out, unit_offset):
        """Gather columns and write the rmsnorm of the rows, by one kernel."""
        peer_rmsnorm(part[None], weight, eps, out[None], self.inboxes, unit_offset)


def _layout_of(array, out, columns):
    """The GatherLayout of the rows of all ranks together, of which `array` has some columns; None if not in words."""
    sizes = np.array(columns) * array.itemsize
    sizes[1] = 0
    if any(sizes % 4) or not _has_whole_words(0, array, out):
        return None
    width, _, extra, total = (int(size) // 4 for size in sizes)
    return GatherLayout(len(array), width, columns.longer, extra, total)


def _words(*arrays):
    return [array.reshape(1, array.size).view(np.int32) for array in arrays]


def _has_whole_words(nbytes, *arrays):
    """Whether a number of bytes, and the addresses of arrays, are multiples of 4."""
    return nbytes % 4 == 0 and all(address(array) % 4 == 0 for array in arrays)
