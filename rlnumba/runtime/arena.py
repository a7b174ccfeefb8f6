"""Arrays of one step, allocated from an arena.

An arena allocates by advancing an offset within its memory, and resets the offset when the scope ends. A training step
asks for the same arrays each time, so after the first step nothing is allocated any more, arrays are where they were,
and the peak is a number that can be read and tested. On the GPU the arena grows at the end (mapped_memory.py), so that
its arrays never move, and its memory may be lent while no array of it is in use.
"""

import math
from contextlib import contextmanager, nullcontext

import numpy as np

from rlnumba.runtime import device, memory
from rlnumba.runtime.mapped_memory import AHEAD_BYTES, PIECE_BYTES, MappedMemory
from rlnumba.runtime.memory import ALIGNMENT, allocating, track


class Arena:
    """Short-lived arrays of one region, for one stream. An array is valid until the scope it was made in ends.

    lends: whether its memory is lent where no scope is open, and taken by the next scope; else only after `lend`, until
    `take`. peak: the most bytes that its arrays had at one time.
    """

    def __init__(self, region, lends=False):
        self.region, self.lends = region, lends
        self.used = self.peak = self.depth = 0
        # On the GPU, once there is an array.
        self._memory = self._first_byte = None

    @property
    def address(self):
        """The address of its memory on the GPU, which never changes, or None before its first array."""
        return self._memory and self._memory.address

    @property
    def nbytes(self):
        """Bytes that it has on the GPU."""
        return self._memory.mapped_bytes if self._memory else 0

    def empty(self, shape, dtype):
        """An array of the device with undefined content, to be used inside the innermost open scope."""
        if not self.depth:
            raise ValueError(f"arena {self.region}: empty() outside of a scope")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        start, end = self.used, self.used + nbytes
        if end > self.peak:
            self._grow(end)
        self.used = end
        if self._memory is None:
            with allocating(self.region, nbytes):
                return device.xp().empty(shape, dtype)
        return device.xp().ndarray(shape, dtype, memptr=self._first_byte + start)

    def _grow(self, nbytes):
        """Have room for nbytes."""
        if device.name() == "cuda":
            if self._memory is None:
                self._memory = MappedMemory(self.region, device.memory_info()[1])
                self._first_byte = self._memory.pointer()
            self._memory.take(nbytes, ahead=min(max(AHEAD_BYTES, nbytes // 32), PIECE_BYTES))
        else:
            track(self.region, nbytes - self.peak)
        self.peak = nbytes

    @contextmanager
    def scope(self):
        """Memory of arrays made inside is reused after the end; scopes nest."""
        if not self.depth:
            self.take()
        start = self.used
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1
            self.used = start
            if not self.depth and self.lends:
                self.lend()

    def take(self):
        """End `lend`: have the memory of all arrays that it has had at one time."""
        memory.take_back(self)
        if self._memory is not None:
            self._memory.take(self.peak)

    def lend(self):
        """Keep the memory until an allocation elsewhere needs it; no array of it is in use."""
        if self._memory is not None:
            memory.lend(self)

    def reclaim(self, nbytes):
        """Pieces of its memory for an allocation that needs them: see memory.lend."""
        return self._memory.reclaim(nbytes)

    def give_back(self):
        """Free the memory; its addresses stay."""
        memory.take_back(self)
        if self._memory is not None:
            self._memory.give_back()


class HeapAllocator:
    """The allocator where no arena is given: plain arrays, freed with their last reference."""

    def empty(self, shape, dtype):
        return device.xp().empty(shape, dtype)

    def scope(self):
        return nullcontext()
