"""Memory of the GPU at addresses that stay while the memory behind them comes and goes.

A range of addresses is reserved once, and pieces of physical memory are mapped into it on demand (the driver's virtual
memory management), so that captured graphs, which contain addresses, stay valid when the memory is mapped again.

Ranges hand each other pieces: one that needs memory takes what is free, then the last pieces of ranges that are lent
(memory.lend). A KV cache and activations are never needed at once: only as much of them moves in each direction as the
GPU is too small for both. A piece that moves costs the driver an unmapping and a mapping, and no allocation.
"""

import math
import weakref
from functools import cache

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device, memory

# Physical memory is mapped and handed over in pieces of at most this size: 88 for a KV cache of 22 GiB.
PIECE_BYTES = 256 << 20
# Memory that grows array by array has at least this much mapped ahead, and a 32nd of what there is.
AHEAD_BYTES = 16 << 20


@cache
def _driver():
    from cuda.bindings import driver

    return driver


def _call(function, *arguments):
    """The results of a function of the driver after CUDA_SUCCESS, which is 0; DeviceError for another status."""
    error, *results = function(*arguments)
    if int(error):
        raise DeviceError(f"{function.__name__} failed: {error.name}")
    return results[0] if results else None


class Piece:
    """Physical memory: a handle of the driver, which is mapped at one place or at none."""

    def __init__(self, driver, handle, nbytes):
        self.driver, self.handle, self.nbytes = driver, handle, nbytes

    def release(self):
        """Give the memory, which is mapped nowhere, back to the driver."""
        _call(self.driver.cuMemRelease, self.handle)


def bytes_of(pieces):
    return sum(piece.nbytes for piece in pieces)


class _Range:
    """Reserved addresses of one GPU; `pieces` are mapped to the first of them, one after the other."""

    def __init__(self, region, nbytes):
        driver = self.driver = _driver()
        self.region, self.gpu = region, int(_call(driver.cuCtxGetDevice))
        location = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.properties = driver.CUmemAllocationProp()
        self.properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location.type = location
        self.properties.location.id = self.gpu
        self.access = driver.CUmemAccessDesc()
        self.access.location.type = location
        self.access.location.id = self.gpu
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(_call(driver.cuMemGetAllocationGranularity, self.properties, recommended))
        # The last piece may be a whole one, where less is missing.
        self.nbytes = self.rounded(nbytes) + self.rounded(PIECE_BYTES)
        self.address = int(_call(driver.cuMemAddressReserve, self.nbytes, 0, 0, 0))
        self.pieces, self.mapped_bytes, self.counted_bytes = [], 0, 0

    def rounded(self, nbytes):
        """Bytes of as many whole units as the driver maps."""
        return -(-nbytes // self.granularity) * self.granularity

    def create(self, nbytes):
        """Pieces of at least nbytes; what there is of them where the GPU has not enough memory left."""
        pieces = []
        while nbytes > 0:
            size = self.rounded(min(nbytes, PIECE_BYTES))
            error, handle = self.driver.cuMemCreate(size, self.properties, 0)
            if int(error):
                break
            pieces.append(Piece(self.driver, handle, size))
            nbytes -= size
        return pieces

    def map(self, pieces):
        """Map pieces behind those that are mapped."""
        first = self.address + self.mapped_bytes
        for piece in pieces:
            _call(self.driver.cuMemMap, self.address + self.mapped_bytes, piece.nbytes, 0, piece.handle, 0)
            self.pieces.append(piece)
            self.mapped_bytes += piece.nbytes
        if pieces:
            _call(self.driver.cuMemSetAccess, first, bytes_of(pieces), [self.access], 1)

    def unmap(self, nbytes):
        """Unmap the last pieces, together at least nbytes if there are as many, and return them."""
        if self.pieces:
            # Work that the device was given may read or write them.
            device.xp().cuda.Device(self.gpu).synchronize()
        pieces = []
        while self.pieces and nbytes > 0:
            piece = self.pieces.pop()
            self.mapped_bytes -= piece.nbytes
            _call(self.driver.cuMemUnmap, self.address + self.mapped_bytes, piece.nbytes)
            nbytes -= piece.nbytes
            pieces.append(piece)
        return pieces

    def count(self, needed_bytes):
        """Let the region count what is mapped of the bytes that are needed."""
        counted = min(needed_bytes, self.mapped_bytes)
        if counted != self.counted_bytes:
            memory.track(self.region, counted - self.counted_bytes)
            self.counted_bytes = counted

    def close(self):
        """Free memory and addresses."""
        for piece in self.unmap(math.inf):
            piece.release()
        self.count(0)
        _call(self.driver.cuMemAddressFree, self.address, self.nbytes)


class MappedMemory:
    """Up to most_bytes of the GPU's memory, counted by a region, at addresses that stay.

    needed_bytes: the most that was asked for. The mapped part has its first byte at `address`.
    """

    def __init__(self, region, most_bytes):
        self.region, self.most_bytes, self.needed_bytes = region, most_bytes, 0
        self._range = _Range(region, most_bytes)
        # Not at exit: the driver cleans up itself, and may be gone by then.
        weakref.finalize(self, self._range.close).atexit = False

    @property
    def address(self):
        return self._range.address

    @property
    def mapped_bytes(self):
        return self._range.mapped_bytes

    def take(self, nbytes, ahead=0, remedy=None):
        """Have nbytes, and as much as was ever needed: what is mapped stays, and what is mapped now is undefined.

        ahead: bytes beyond, if they are free. remedy: what OutOfMemory says. Its owner must not have lent it.
        """
        if nbytes > self.most_bytes:
            raise memory.OutOfMemory(self.region, nbytes - self.mapped_bytes, remedy)
        self.needed_bytes = max(self.needed_bytes, nbytes)
        missing = self.needed_bytes - self.mapped_bytes
        if missing > 0:
            ahead = min(ahead, self.most_bytes - self.needed_bytes)
            pieces = self._pieces(missing, ahead)
            if bytes_of(pieces) < missing:
                self.needed_bytes = self.mapped_bytes
                for piece in pieces:
                    piece.release()
                raise memory.OutOfMemory(self.region, missing, remedy)
            self._range.map(pieces)
            self._range.count(self.needed_bytes)

    def _pieces(self, missing, ahead):
        """Pieces of `missing` bytes, if there are as many: what is free, what is lent, and what CuPy's pool keeps."""
        pool = device.xp().get_default_memory_pool()
        free = _free_bytes()
        if missing + ahead <= free:
            return self._range.create(missing + ahead)
        found = memory.take_lent(missing - free)
        if missing - bytes_of(found) > free:
            pool.free_all_blocks()
            free = _free_bytes()
        short = missing - bytes_of(found) - free
        if short > 0:
            found += memory.take_lent(short, costly=True)
            pool.free_all_blocks()
        return found + self._range.create(missing - bytes_of(found))

    def reclaim(self, nbytes):
        """Pieces of at least nbytes, if there are as many, which the caller has now: the last ones; a list."""
        pieces = self._range.unmap(nbytes)
        self._range.count(self.needed_bytes)
        return pieces

    def give_back(self):
        """Give all memory back to the driver; the addresses stay reserved."""
        for piece in self.reclaim(math.inf):
            piece.release()

    def pointer(self):
        """CuPy's pointer to the first byte, which keeps this object."""
        cupy = device.xp()
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(self.address, self._range.nbytes, self, self.gpu), 0)

    def array(self, shape, dtype, offset=0):
        """An array of the device over the range, `offset` bytes in."""
        return device.xp().ndarray(shape, np.dtype(dtype), memptr=self.pointer() + offset)

    @property
    def gpu(self):
        """The number of the GPU whose memory it is."""
        return self._range.gpu


def _free_bytes():
    """Bytes that the driver has left beside its margin."""
    return max(device.memory_info()[0] - memory.MARGIN_BYTES, 0)
