"""Device memory by plan: what lives long is counted by region, what lives for a step comes from an arena.

An arena hands out arrays from one allocation by moving a mark, and takes them back when their scope
ends. A training step asks for the same arrays each time, so after the first step (which may need several
slabs) nothing is allocated any more, and the peak is a number that can be read and tested.
"""

import math
from contextlib import contextmanager

import numpy as np

from rlnumba.runtime import device

# Every array starts at a multiple of this: enough for 16-byte loads and for whole 128-byte sectors.
ALIGNMENT = 256
SMALLEST_SLAB = 16 << 20

_regions = {}


def track(region, nbytes):
    """Count nbytes more (or fewer, if negative) as allocated by a region such as "weights" or "kv"."""
    now, peak = _regions.get(region, (0, 0))
    now += nbytes
    _regions[region] = (now, max(peak, now))


def report():
    """{region: peak bytes held at one time}, in the order in which the regions were first used."""
    return {region: peak for region, (_, peak) in _regions.items()}


def reset_peaks():
    """Start counting peaks again from what is held now."""
    for region, (now, _) in _regions.items():
        _regions[region] = (now, now)


class Arena:
    """Short-lived arrays of one region. Arrays are valid until the scope in which they were made ends."""

    def __init__(self, region):
        self.region = region
        self.slabs = []
        self.slab = 0
        self.offset = 0
        self.used = 0
        self.peak = 0
        self.depth = 0

    def empty(self, shape, dtype):
        """An array of the device with undefined content, to be used inside the innermost open scope."""
        if not self.depth:
            raise ValueError(f"arena {self.region}: empty() outside of a scope")
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.used += nbytes
        if self.used > self.peak:
            track(self.region, self.used - self.peak)
            self.peak = self.used
        if device.name() != "cuda":
            return np.empty(shape, dtype)
        import cupy

        while self.slab < len(self.slabs) and self.offset + nbytes > self.slabs[self.slab].nbytes:
            self.slab, self.offset = self.slab + 1, 0
        if self.slab == len(self.slabs):
            self.slabs.append(cupy.empty(max(nbytes, SMALLEST_SLAB), np.uint8))
        array = cupy.ndarray(shape, dtype, memptr=self.slabs[self.slab].data + self.offset)
        self.offset += nbytes
        return array

    @contextmanager
    def scope(self):
        """Arrays made inside are taken back at the end; scopes nest."""
        mark = self.slab, self.offset, self.used
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1
            self.slab, self.offset, self.used = mark
            if not self.depth and len(self.slabs) > 1:
                self._merge()

    def _merge(self):
        """One slab of the peak size instead of several; nothing is in use now."""
        import cupy

        self.slabs.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        self.slabs.append(cupy.empty(self.peak, np.uint8))

    def release(self):
        """Give all memory back; only outside of scopes."""
        if self.depth:
            raise ValueError(f"arena {self.region}: release() inside a scope")
        self.slabs.clear()
        track(self.region, -self.peak)
        self.peak = 0
