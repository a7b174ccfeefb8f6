"""Ranks that move nothing: for a plan of memory, and for a list of the kernels that real ones launch."""

import numpy as np

from rlnumba.kernels.peer.inbox import Inboxes
from rlnumba.parallel.communicator import Communicator
from rlnumba.parallel.transports.peer import SMALL_BYTES
from rlnumba.parallel.transports.small_gathers import SmallGathers, capacity_of
from rlnumba.runtime import device


class PlannedRank(Communicator):
    """A rank whose operations move nothing; the others have no micro-batch."""

    def _fold(self, *arguments):
        pass

    def _gather(self, *arguments):
        pass

    def _gather_columns(self, *arguments):
        pass

    def _exchange_rows(self, *arguments):
        pass

    def _objects(self, operation, value):
        return [value, *([[]] * (self.world_size - 1))]


class ListedRank(PlannedRank):
    """A rank among GPUs of one host, inside shapes.launches_only: its gathers launch what those of peer.py do."""

    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        empty = device.xp().empty
        arrays = empty(world_size, np.int64), empty(2, np.uint32), empty(1, np.int32)
        self._gathers = SmallGathers(Inboxes(*arrays, rank, capacity_of(SMALL_BYTES), 0), SMALL_BYTES)

    def _gather_columns(self, operation, array, out, columns):
        self._gathers.gather_columns(array, out, columns)

    def _exchange_rows(self, operation, array, out, columns, row_width):
        self._gathers.gather_columns(array, out, columns, row_width)

    def gather_rmsnorm(self, part, weight, eps, out, unit_offset=False):
        if not self._gathers.takes_rmsnorm(part, weight, out):
            return False
        self._gathers.gather_rmsnorm(part, weight, eps, out, unit_offset)
        return True
