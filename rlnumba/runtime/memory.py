"""Device memory: bytes of long-lived allocations counted by region, and memory that its owner lends.

Memory kept for later use may be lent: an allocation that would fail, or leave less than MARGIN_BYTES to the driver,
takes as much of it as it lacks. So an engine keeps its KV cache's memory while a trainer does without it, and a trainer
that of its activations while the engine generates; where there is enough for both, nothing moves.
"""

import gc
import math
import threading
import weakref
from contextlib import contextmanager, suppress

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device

# Every array starts at a multiple of this: enough for 16-byte loads and for whole 128-byte sectors.
ALIGNMENT = 256
# Left to the driver: machine code, CUDA graphs, local memory of kernels.
MARGIN_BYTES = 256 << 20
# Before a larger allocation the driver is asked what is free; after a smaller one it still has most of its margin.
LARGE_BYTES = MARGIN_BYTES // 8
# cudaMalloc puts smaller allocations together into blocks of this size, and a handle for other processes is of a block.
BLOCK_BYTES = 2 << 20

# The region of pinned memory of the host, where the device has memory of its own.
HOST = "host"
# {region: [bytes allocated now, peak]} of the process: engines and trainers share one GPU's memory; and of all regions
# of the device together. The lock is reentrant because the garbage collector may run a finalizer that calls `track`
# wherever a container is made.
_regions, _together = {}, [0, 0]
# {region: bytes that it will have}, beside which an engine sizes its cache.
_expected = {}
_lock = threading.RLock()


def track(region, nbytes):
    """Count nbytes more (or fewer, if negative) as allocated by a region such as "weights" or "kv"."""
    with _lock:
        for counts in (_regions.setdefault(region, [0, 0]), *([] if region == HOST else [_together])):
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


def peak():
    """The most bytes of the device that all regions had at one time, which may be fewer than their peaks together."""
    with _lock:
        return _together[1]


def reset_peaks():
    """Start counting peaks again from what is allocated now."""
    with _lock:
        for counts in (*_regions.values(), _together):
            counts[1] = counts[0]


def expect(region, nbytes):
    """Let caches of engines that are sized from now on leave room for the nbytes that a region will have."""
    _expected[region] = nbytes


def expected_bytes():
    """Bytes that regions will have beyond what they have now: see `expect`."""
    return sum(max(nbytes - allocated(region), 0) for region, nbytes in _expected.items())


@contextmanager
def separate_report():
    """Inside, `track` counts into a dict of its own, {region: [bytes now, peak]}, which is yielded."""
    global _regions, _together
    # Present garbage leaves the report that it is in, and garbage made inside the separate one.
    gc.collect()
    before = _regions, _together
    _regions, _together = {}, [0, 0]
    try:
        yield _regions
        gc.collect()
    finally:
        _regions, _together = before


# Owners of memory that is lent, that which was lent first at first, and whether having it again takes long.
_lent = weakref.WeakKeyDictionary()
_allocator = None


def lend(owner, is_costly=False):
    """Until `take_back` others may take memory of an owner by owner.reclaim(nbytes), which returns a list of Pieces of
    its memory, that are the caller's then (mapped_memory.py), and frees what else it has.

    is_costly: whether having it again takes long; it is then taken last.
    """
    global _allocator
    if device.name() == "cuda" and _allocator is None:
        cupy = device.xp()
        pool = cupy.get_default_memory_pool()
        of_pool = pool.total_bytes, pool.free_bytes
        _allocator = Allocator(cupy.cuda.get_allocator(), *of_pool, lambda: device.memory_info()[0])
        cupy.cuda.set_allocator(_allocator)
    take_back(owner)
    _lent[owner] = is_costly


def take_back(owner):
    """End `lend`; nothing happens if its memory has been reclaimed, or was not lent."""
    _lent.pop(owner, None)


def take_lent(nbytes, costly=False):
    """Pieces of lent memory, together at least nbytes if there are as many: a list. costly: of costly owners, too."""
    pieces = []
    for owner, is_costly in sorted(_lent.items(), key=lambda item: item[1]):
        missing = nbytes - sum(piece.nbytes for piece in pieces)
        if missing <= 0 or is_costly and not costly:
            break
        found = owner.reclaim(missing)
        pieces += found
        if sum(piece.nbytes for piece in found) < missing:
            # It has nothing left.
            take_back(owner)
    return pieces


def reclaim(nbytes=math.inf):
    """Free lent memory, at least nbytes if there are as many: whether any was lent."""
    was_lent = bool(_lent)
    for piece in take_lent(nbytes, costly=True):
        piece.release()
    return was_lent


def make_room(nbytes, costly=False):
    """Let the driver have nbytes beside its margin, as far as what is lent and what CuPy's pool keeps suffice.

    For memory that is not allocated by Allocator; it synchronizes with the device where memory is short. costly:
    whether to take that of costly owners, too.
    """
    missing = nbytes + MARGIN_BYTES - device.memory_info()[0]
    if missing <= 0:
        return
    for piece in take_lent(missing, costly):
        piece.release()
    if device.memory_info()[0] < nbytes + MARGIN_BYTES:
        device.xp().get_default_memory_pool().free_all_blocks()


class Allocator:
    """An allocator of CuPy's that reclaims what is lent where memory is short.

    allocate(nbytes): the allocator used otherwise. pool_bytes(), unused_bytes(): bytes that its pool has of the
    device's memory, and how many of them are in no use; free_bytes(): bytes that the device has left.
    """

    def __init__(self, allocate, pool_bytes, unused_bytes, free_bytes):
        self.allocate, self.pool_bytes, self.unused_bytes = allocate, pool_bytes, unused_bytes
        self.free_bytes, self.seen_bytes = free_bytes, 0

    def __call__(self, nbytes):
        if _lent and nbytes >= LARGE_BYTES and self.unused_bytes() < nbytes:
            missing = nbytes + MARGIN_BYTES - self.free_bytes()
            if missing > 0:
                reclaim(missing)
        try:
            found = self.allocate(nbytes)
        except MemoryError:
            return self._allocate_lent(nbytes)
        # Asking the driver takes longer than most allocations, which are served by the pool.
        if _lent and (pool_bytes := self.pool_bytes()) != self.seen_bytes:
            self.seen_bytes = pool_bytes
            if self.free_bytes() < MARGIN_BYTES:
                reclaim(MARGIN_BYTES)
        return found

    def _allocate_lent(self, nbytes):
        """Take what is missing, and where that is not enough, all that is lent."""
        for wanted in (nbytes + MARGIN_BYTES - self.free_bytes(), math.inf):
            if not reclaim(wanted):
                break
            with suppress(MemoryError):
                return self.allocate(nbytes)
        return self.allocate(nbytes)


class OutOfMemory(DeviceError):
    """An allocation that failed: of which region, how much was asked for, and how much is free; what would help."""

    def __init__(self, region, nbytes, remedy=None):
        free, total = device.memory_info()
        if device.name() == "cuda":
            free += device.xp().get_default_memory_pool().free_bytes()
        super().__init__(
            f"out of memory: {region} needed {nbytes / 2**30:.2f} GiB more, and {free / 2**30:.2f} of "
            f"{total / 2**30:.1f} GiB are free" + (f"; {remedy}" if remedy else "")
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

    Data that a kernel wrote may be read once an event recorded after it has happened. On cpu and sim both are one
    array.
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
