"""A fold of gradients that each rank reads from the memory of the others, beside the work that comes next.

Every rank copies its part of all gradients of a round, in pieces, to staging of its own, and adds from there. A rank
has a stream for each source k, so that it reads from all at once:

    current stream         signal all ranks: this gradient is complete
    stream of source k     wait until that of k is; copy pieces to free slots of the staging; signal k when all are read
                           -- begun; now a forward may run, which writes no gradient --
    current stream         for each piece: wait for its copies, add from the slots in the order of k
                           (slots that are then free take the pieces that found no room before)
                           wait until all ranks have read this gradient, which may then be overwritten

The copies are those of DMA engines. Nothing is added beside the forward: a kernel that adds would take SMs from its
persistent GEMMs, whose tiles are dealt out to all SMs before they start.

The host calls for all of it before any of it has happened; the order is that of signals between ranks
(cuStreamWriteValue32, cuStreamWaitValue32: see peer.py) and of events of this process.
"""

import numpy as np

from rlnumba.parallel.communicator import add_in_order


class PulledFold:
    """One fold, begun by the constructor.

    memory: the rank's PeerArena. number: that of this fold, in 32 bits. places: results of SharedGradients.place_of
    for the gradients of ranks that have one. gradient, accumulated, start, is_first: arguments of Communicator.fold.
    """

    def __init__(self, memory, number, places, gradient, accumulated, start, is_first):
        self._memory, self._pulls, self._number = memory, memory.gradients, number
        self._places, self._gradient, self._accumulated = places, gradient, accumulated
        self._start, self._is_first = start, is_first
        rank, world_size = memory.rank, memory.world_size
        # In a circle, so that not all read from the same rank first.
        self._others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._sources = [k for k in self._others if k < len(places)]
        length = self._pulls.piece_bytes // 4
        self._pieces = [accumulated[first : first + length] for first in range(0, accumulated.size, length)]
        self._begin()

    def _begin(self):
        for other in self._others:
            self._memory.signal_complete(other, self._number)
        self._pulls.begin()
        for k in self._sources:
            self._memory.wait_complete(k, self._number)
        for piece in range(min(self._pulls.num_slots, len(self._pieces))):
            self._pull(piece)
        if not self._pieces:
            self._signal_read()

    def _pull(self, piece):
        """Call for the copies of a piece of all sources."""
        offset = 4 * (self._start + piece * (self._pulls.piece_bytes // 4))
        for k in self._sources:
            self._pulls.copy(k, piece % self._pulls.num_slots, self._places[k], offset, 4 * self._pieces[piece].size)
        if piece + 1 == len(self._pieces):
            self._signal_read()

    def _signal_read(self):
        for k in self._sources:
            self._memory.signal_read(k, self._number)

    def finish(self):
        """Add what the ranks have; from here on this rank's gradient may be overwritten."""
        for piece in range(len(self._pieces)):
            self._add(piece)
            if piece + self._pulls.num_slots < len(self._pieces):
                self._pull(piece + self._pulls.num_slots)
        if self._gradient is not None:
            for other in self._others:
                self._memory.wait_read(other, self._number)

    def _add(self, piece):
        target, slot = self._pieces[piece], piece % self._pulls.num_slots
        begin = self._start + piece * (self._pulls.piece_bytes // 4)
        own = None if self._gradient is None else self._gradient[begin : begin + target.size]
        parts = [
            own if k == self._memory.rank else self._pulls.copied(k, slot, 4 * target.size).view(np.float32)
            for k in range(len(self._places))
        ]
        add_in_order(target, parts, self._is_first)
        for k in self._sources:
            self._pulls.added(k, slot)
