"""The KV cache's memory: lent to training between rollouts, at the same addresses whenever it is there.

On the GPU a range of addresses is reserved once and physical memory is mapped into it on demand (the
driver's virtual memory management), so that captured graphs, which hold addresses, survive a sleep.
"""

import weakref

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device, memory


class KVCache:
    """k and v: (layers, num_blocks, block_size, HK, E) of `dtype`, without memory until `take`.

    Raises DeviceError from `take` when the GPU has not enough memory left.
    """

    def __init__(self, config, num_blocks, block_size, dtype):
        self.num_blocks = num_blocks
        self.shape = (
            config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.dtype = np.dtype(dtype)
        self.nbytes = 2 * int(np.prod(self.shape)) * self.dtype.itemsize
        self.k = self.v = None
        self.mapped = Mapped(self.nbytes) if device.name() == "cuda" else None
        self.taken = None

    def take(self):
        """Have the memory; its content is undefined."""
        if self.taken is not None:
            return
        if self.mapped is None:
            # Pages of zeros that nobody has touched take no memory.
            self.k, self.v = np.zeros(self.shape, self.dtype), np.zeros(self.shape, self.dtype)
        else:
            self.mapped.take()
            self.k = self.mapped.array(self.shape, self.dtype, 0)
            self.v = self.mapped.array(self.shape, self.dtype, self.nbytes // 2)
        memory.track("kv", self.nbytes)
        self.taken = weakref.finalize(self, memory.track, "kv", -self.nbytes)

    def give_back(self):
        """Return the memory; the addresses stay reserved."""
        if self.taken is None:
            return
        self.k = self.v = None
        if self.mapped is not None:
            self.mapped.give_back()
        self.taken()
        self.taken = None


class Mapped:
    """A reserved range of GPU addresses of at least nbytes, with memory behind it between take and give_back."""

    def __init__(self, nbytes):
        from cuda.bindings import driver

        self.driver, self.wanted = driver, nbytes
        kind = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.properties = driver.CUmemAllocationProp()
        self.properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location.type = kind
        self.properties.location.id = int(self._call(driver.cuCtxGetDevice))
        self.access = driver.CUmemAccessDesc()
        self.access.location.type = kind
        self.access.location.id = self.properties.location.id
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        granularity = self._call(
            driver.cuMemGetAllocationGranularity,
            self.properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self.nbytes = -(-nbytes // granularity) * granularity
        self.address = int(self._call(driver.cuMemAddressReserve, self.nbytes, 0, 0, 0))
        self.unmap = None
        # Not at exit: the driver cleans up itself, and may be gone by then.
        weakref.finalize(self, driver.cuMemAddressFree, self.address, self.nbytes).atexit = False

    def _call(self, function, *arguments):
        error, *results = function(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            free, total = (count / 2**30 for count in device.memory_info())
            raise DeviceError(
                f"engine: {function.__name__} for {self.wanted / 2**30:.1f} GiB of KV cache failed ({error.name}); "
                f"{free:.1f} of {total:.1f} GiB of GPU memory are free; lower gpu_memory_utilization"
            )
        return results[0] if results else None

    def take(self):
        """Map memory into the range."""
        driver = self.driver
        # What CuPy keeps for later is not there for the driver.
        device.xp().get_default_memory_pool().free_all_blocks()
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
