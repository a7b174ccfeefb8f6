"""The KV cache's memory, which training may use between rollouts.

Mapping it anew takes tens of milliseconds, so it is kept where there is enough for both, and lent (runtime/memory.py):
an allocation of the trainer's that would fail takes it. On the GPU a range of addresses is reserved once and physical
memory is mapped into it on demand (the driver's virtual memory management), so that captured graphs, which contain
addresses, stay valid when the memory is mapped again.
"""

import weakref

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device, memory


class KVCache:
    """k and v: (layers, num_blocks, block_size, HK, E) of `dtype`; None until `take`.

    was_reclaimed: whether its memory was once needed while it was lent. Raises DeviceError from `take` when the GPU has
    not enough memory left.
    """

    def __init__(self, config, num_blocks, block_size, dtype):
        heads = config.num_key_value_heads, config.head_dim
        self.shape = (config.num_hidden_layers, num_blocks, block_size, *heads)
        self.dtype = np.dtype(dtype)
        self.k = self.v = None
        self.was_reclaimed = False
        self.mapping = MappedMemory(self.nbytes) if device.name() == "cuda" else None

    @property
    def num_blocks(self):
        return self.shape[1]

    @property
    def nbytes(self):
        return 2 * int(np.prod(self.shape)) * self.dtype.itemsize

    def take(self):
        """Allocate the memory, or end `lend`; its content is undefined."""
        memory.take_back(self)
        if self.k is not None:
            return
        if self.mapping is None:
            # Pages of zeros take no physical memory until they are written.
            self.k, self.v = np.zeros(self.shape, self.dtype), np.zeros(self.shape, self.dtype)
        else:
            self.mapping.take()
            self.k = self.mapping.array(self.shape, self.dtype, 0)
            self.v = self.mapping.array(self.shape, self.dtype, self.nbytes // 2)
        memory.track("kv", self.nbytes)
        self.untrack = weakref.finalize(self, memory.track, "kv", -self.nbytes)

    def lend(self):
        """Keep the memory until an allocation elsewhere needs it; its content is not needed any more."""
        if self.k is not None:
            memory.lend(self)

    def reclaim(self):
        """Free memory that is lent, for an allocation that needs it."""
        self.was_reclaimed = True
        self.give_back()

    def give_back(self):
        """Free the memory; the addresses stay reserved."""
        memory.take_back(self)
        if self.k is None:
            return
        self.k = self.v = None
        if self.mapping is not None:
            self.mapping.give_back()
        self.untrack()

    def grow(self, num_blocks):
        """Have num_blocks blocks, with the content of those there are. Not on the GPU, where addresses are fixed."""
        k, v, old_blocks = self.k, self.v, self.num_blocks
        self.give_back()
        self.shape = (self.shape[0], num_blocks, *self.shape[2:])
        if k is not None:
            self.take()
            self.k[:, :old_blocks], self.v[:, :old_blocks] = k, v


class MappedMemory:
    """A reserved range of GPU addresses of at least nbytes, with memory behind it between take and give_back."""

    def __init__(self, nbytes):
        from cuda.bindings import driver

        self.driver, self.requested_bytes = driver, nbytes
        location = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.properties = driver.CUmemAllocationProp()
        self.properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location.type = location
        self.properties.location.id = int(self._call(driver.cuCtxGetDevice))
        self.access = driver.CUmemAccessDesc()
        self.access.location.type = location
        self.access.location.id = self.properties.location.id
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = self._call(driver.cuMemGetAllocationGranularity, self.properties, recommended)
        self.nbytes = -(-nbytes // granularity) * granularity
        self.address = int(self._call(driver.cuMemAddressReserve, self.nbytes, 0, 0, 0))
        # Not at exit: the driver cleans up itself, and may be gone by then.
        weakref.finalize(self, driver.cuMemAddressFree, self.address, self.nbytes).atexit = False

    def _call(self, function, *arguments):
        error, *results = function(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            wanted = self.requested_bytes / 2**30
            free, total = (count / 2**30 for count in device.memory_info())
            raise DeviceError(
                f"engine: {function.__name__} for {wanted:.1f} GiB of KV cache failed ({error.name}); "
                f"{free:.1f} of {total:.1f} GiB of GPU memory are free; lower gpu_memory_utilization"
            )
        return results[0] if results else None

    def take(self):
        """Map memory into the range."""
        driver = self.driver
        # The driver cannot use what CuPy keeps in its pool.
        device.xp().get_default_memory_pool().free_all_blocks()
        error, handle = driver.cuMemCreate(self.nbytes, self.properties, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            # Another engine may have lent its cache.
            memory.reclaim()
            handle = self._call(driver.cuMemCreate, self.nbytes, self.properties, 0)
        self._call(driver.cuMemMap, self.address, self.nbytes, 0, handle, 0)
        # The mapping keeps the memory alive.
        self._call(driver.cuMemRelease, handle)
        self._call(driver.cuMemSetAccess, self.address, self.nbytes, [self.access], 1)
        self.unmap = weakref.finalize(self, driver.cuMemUnmap, self.address, self.nbytes)
        self.unmap.atexit = False

    def give_back(self):
        """Unmap the memory, once everything that reads it is done."""
        device.xp().cuda.Device().synchronize()
        self.unmap()

    def array(self, shape, dtype, offset):
        """An array of the device over the range, `offset` bytes in."""
        cupy = device.xp()
        nbytes = int(np.prod(shape)) * dtype.itemsize
        unowned = cupy.cuda.UnownedMemory(self.address + offset, nbytes, self, self.properties.location.id)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0))
