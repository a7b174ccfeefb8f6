"""Device memory: bytes of long-lived allocations counted by region, arrays of one step allocated from an arena.

Memory that is kept for later use may be lent: an allocation that would fail, or leave less than MARGIN_BYTES to the
driver, first takes all that is lent. So an engine keeps its KV cache's memory while a trainer does without it.

An arena allocates by advancing an offset within a chunk of memory, and resets the offset when the scope ends. A
training step asks for the same arrays each time, so after the first step (which may need several chunks) nothing is
allocated any more, and the peak is a number that can be read and tested.
"""

import math
import threading
import weakref
from contextlib import contextmanager

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device

# Every array starts at a multiple of this: enough for 16-byte loads and for whole 128-byte sectors.
ALIGNMENT = 256
MIN_CHUNK_BYTES = 16 << 20
# Left to the driver: machine code, CUDA graphs, local memory of kernels.
MARGIN_BYTES = 256 << 20
# cudaMalloc puts smaller allocations together into blocks of this size, and a handle for other processes is of a block.
BLOCK_BYTES = 2 << 20

# {region: [bytes allocated now, peak]} of the process: engines and trainers share one GPU's memory. The lock is
# reentrant because the garbage collector may run a finalizer that calls `track` wherever a container is made.
_regions = {}
_lock = threading.RLock()


def track(region, nbytes):
    """Count nbytes more (or fewer, if negative) as allocated by a region such as "weights" or "kv"."""
    with _lock:
        counts = _regions.setdefault(region, [0, 0])
        counts[0] += nbytes
        counts[1] = max(counts)


def allocated(region):
    """Bytes that a region has now."""
    with _lock:
        return _regions.get(region, (0,))[0]


def report():
    """{region: peak bytes allocated at one time}, in the order in which the regions were first used."""
    with _lock:
        return {region: peak for region, (_, peak) in _regions.items()}


def reset_peaks():
    """Start counting peaks again from what is allocated now."""
    with _lock:
        for counts in _regions.values():
            counts[1] = counts[0]


@contextmanager
def separate_report():
    """Inside, `track` counts into a dict of its own, {region: [bytes now, peak]}, which is yielded."""
    global _regions
    before, _regions = _regions, {}
    try:
        yield _regions
    finally:
        _regions = before


# Owners of memory that is lent, objects with a method `reclaim` that frees it.
_lent = weakref.WeakSet()
_allocator = None


def lend(owner):
    """From now on until `take_back`, or until memory is short, owner.reclaim() may be called to free its memory."""
    global _allocator
    if device.name() == "cuda" and _allocator is None:
        cupy = device.xp()
        pool = cupy.get_default_memory_pool()
        _allocator = Allocator(cupy.cuda.get_allocator(), pool.total_bytes, lambda: device.memory_info()[0])
        cupy.cuda.set_allocator(_allocator)
    _lent.add(owner)


def take_back(owner):
    """End `lend`; nothing happens if its memory has been reclaimed, or was not lent."""
    _lent.discard(owner)


def reclaim():
    """Free all memory that is lent: whether there was any."""
    owners = list(_lent)
    _lent.clear()
    for owner in owners:
        owner.reclaim()
    return bool(owners)


class Allocator:
    """An allocator of CuPy's that reclaims what is lent where memory is short.

    allocate(nbytes): the allocator used otherwise. pool_bytes(): bytes that its pool has of the device's memory;
    free_bytes(): bytes that the device has left.
    """

    def __init__(self, allocate, pool_bytes, free_bytes):
        self.allocate, self.pool_bytes, self.free_bytes = allocate, pool_bytes, free_bytes
        self.seen_bytes = 0

    def __call__(self, nbytes):
        try:
            found = self.allocate(nbytes)
        except MemoryError:
            if not reclaim():
                raise
            return self.allocate(nbytes)
        # Asking the driver takes longer than most allocations, which are served by the pool.
        if _lent and (pool_bytes := self.pool_bytes()) != self.seen_bytes:
            self.seen_bytes = pool_bytes
            if self.free_bytes() < MARGIN_BYTES:
                reclaim()
        return found


class OutOfMemory(DeviceError):
    """An allocation that failed: of which region, how much was asked for, and how much is free."""

    def __init__(self, region, nbytes):
        free, total = device.memory_info()
        if device.name() == "cuda":
            free += device.xp().get_default_memory_pool().free_bytes()
        super().__init__(
            f"out of memory: {region} needed {nbytes / 2**30:.2f} GiB more, and {free / 2**30:.2f} of "
            f"{total / 2**30:.1f} GiB are free"
        )


@contextmanager
def allocating(region, nbytes):
    """An allocation of a region inside that fails raises OutOfMemory."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(region, nbytes) from error


def array_at(address, count, dtype, owner):
    """(count,) of the memory of the GPU at an address, which `owner`, kept by the array, has allocated or mapped."""
    cupy, dtype = device.xp(), np.dtype(dtype)
    found = cupy.cuda.UnownedMemory(address, count * dtype.itemsize, owner)
    return cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(found, 0))


def shared_with_host(shape, dtype):
    """(array of the host, array of the device): the same pinned memory, which kernels access without a copy.

    What a kernel wrote may be read once an event recorded after it has happened. On cpu and sim both are one array.
    """
    if device.name() != "cuda":
        array = device.xp().empty(shape, dtype)
        return array, array
    import cupy
    import cupyx

    host = cupyx.empty_pinned(shape, dtype)
    # Under unified addressing the address of pinned memory is the same on the device.
    unowned = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, cupy.cuda.runtime.getDevice())
    return host, cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0))


class Arena:
    """Short-lived arrays of one region, for one stream. An array is valid until the scope it was made in ends."""

    def __init__(self, region):
        self.region, self.chunks = region, []
        # The next array's chunk, and its offset there.
        self.chunk = self.offset = 0
        self.used = self.peak = self.depth = 0

    @property
    def addresses(self):
        """Where its memory is: as long as these stay the same, the same steps get the same arrays."""
        return [chunk.data.ptr for chunk in self.chunks]

    @property
    def nbytes(self):
        """Bytes that it has on the GPU."""
        return sum(chunk.nbytes for chunk in self.chunks)

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
            with allocating(self.region, nbytes):
                return device.xp().empty(shape, dtype)
        import cupy

        while self.chunk < len(self.chunks) and self.offset + nbytes > self.chunks[self.chunk].nbytes:
            self.chunk, self.offset = self.chunk + 1, 0
        if self.chunk == len(self.chunks):
            with allocating(self.region, nbytes):
                self.chunks.append(cupy.empty(max(nbytes, MIN_CHUNK_BYTES), np.uint8))
        array = cupy.ndarray(shape, dtype, memptr=self.chunks[self.chunk].data + self.offset)
        self.offset += nbytes
        return array

    @contextmanager
    def scope(self):
        """Memory of arrays made inside is reused after the end; scopes nest."""
        start = self.chunk, self.offset, self.used
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1
            self.chunk, self.offset, self.used = start
            if not self.depth and len(self.chunks) > 1:
                # One of the peak size replaces them.
                self.chunks.clear()
                device.xp().get_default_memory_pool().free_all_blocks()
                with allocating(self.region, self.peak):
                    self.chunks.append(device.xp().empty(self.peak, np.uint8))
