"""Arrays that operators keep between launches, as large as the largest that was asked for."""

import numpy as np

from rlnumba.runtime import device
from rlnumba.runtime.mapped_memory import MappedMemory


class GrowingArray:
    """Elements of one dtype, zeros until a kernel writes them, counted by a region on the GPU.

    On the GPU they stay where they are when there are more of them (mapped_memory.py), so that captured graphs, which
    contain addresses, need no array but this one. Elsewhere an array of zeros, of twice the size or more, takes the
    place of one that is too small.
    """

    def __init__(self, region, dtype):
        self.region, self.dtype = region, np.dtype(dtype)
        # All elements that there are; on the GPU the memory that they are in.
        self.array = self._memory = None

    @property
    def nbytes(self):
        return 0 if self.array is None else self.array.nbytes

    def first(self, count):
        """The first `count` elements: (count,)."""
        if self.array is None or len(self.array) < count:
            self._grow(count)
        return self.array[:count]

    def _grow(self, count):
        if device.name() != "cuda":
            self.array = device.xp().zeros(1 << max(count - 1, 0).bit_length(), self.dtype)
            return
        if self._memory is None:
            self._memory = MappedMemory(self.region, device.memory_info()[1])
        before = self._memory.mapped_bytes // self.dtype.itemsize
        # Not none: there is an address then.
        self._memory.take(max(count, 1) * self.dtype.itemsize)
        self.array = self._memory.array((self._memory.mapped_bytes // self.dtype.itemsize,), self.dtype)
        self.array[before:].fill(0)
