"""Memory at addresses that stay: KV cache and activations hand each other pieces of it; on a GPU, and on a small one
that is made up of a driver's rules."""

import contextlib
import gc
import math
import sys
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import SFTConfig
from rlnumba.engine.cache import KVCache
from rlnumba.model.blocks.attention import Attention
from rlnumba.parallel.shared_gradients import _allocate_alone
from rlnumba.runs import graphs
from rlnumba.runtime import device, mapped_memory, memory
from rlnumba.runtime.arena import Arena
from rlnumba.runtime.capture import pool_bytes_of
from rlnumba.runtime.growing_array import GrowingArray
from rlnumba.runtime.mapped_memory import PIECE_BYTES, MappedMemory
from rlnumba.runtime.memory import BLOCK_BYTES

MIB = 1 << 20
GRANULARITY = 2 * MIB


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


SUCCESS = Result.CUDA_SUCCESS


class Options:
    """A structure, or an enumeration, of the driver's."""

    def __getattr__(self, name):
        value = Options()
        setattr(self, name, value)
        return value


class SmallGpu:
    """A GPU of so many bytes, with the driver's functions, which accept what the real ones do.

    cached: bytes that CuPy's pool keeps. calls: the names of the driver's functions, in order.
    """

    def __init__(self, total):
        self.total, self.cached, self.calls, self.num_waits = total, 0, [], 0
        # Bytes by handle; (first, end) of reserved ranges; {first: (end, handle)} of mappings; accessible addresses.
        self.handles, self.reserved, self.mapped, self.accessible = {}, {}, {}, set()
        self.next_handle, self.next_address = 1, 1 << 32
        for name in "CUmemLocationType CUmemAllocationType CUmemAccess_flags CUmemAllocationGranularity_flags".split():
            setattr(self, name, Options())
        self.CUmemAllocationProp = self.CUmemAccessDesc = Options

    @property
    def free(self):
        return self.total - self.cached - sum(self.handles.values())

    def cuCtxGetDevice(self):
        return SUCCESS, 0

    def cuMemGetAllocationGranularity(self, properties, option):
        return SUCCESS, GRANULARITY

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):
        assert nbytes % GRANULARITY == 0
        first, self.next_address = self.next_address, self.next_address + nbytes
        self.reserved[first] = first + nbytes
        return SUCCESS, first

    def cuMemAddressFree(self, address, nbytes):
        assert self.reserved.pop(address) == address + nbytes
        assert not any(address <= first < address + nbytes for first in self.mapped)
        return (SUCCESS,)

    def cuMemCreate(self, nbytes, properties, flags):
        assert nbytes > 0 and nbytes % GRANULARITY == 0
        self.calls.append("create")
        if nbytes > self.free:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        self.handles[self.next_handle] = nbytes
        self.next_handle += 1
        return SUCCESS, self.next_handle - 1

    def cuMemRelease(self, handle):
        self.calls.append("release")
        assert not any(handle == each for _, each in self.mapped.values())
        del self.handles[handle]
        return (SUCCESS,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        self.calls.append("map")
        assert address % GRANULARITY == 0 and nbytes == self.handles[handle] and offset == flags == 0
        assert any(first <= address and address + nbytes <= end for first, end in self.reserved.items())
        assert all(end <= address or address + nbytes <= first for first, (end, _) in self.mapped.items())
        assert not any(handle == each for _, each in self.mapped.values())
        self.mapped[address] = address + nbytes, handle
        return (SUCCESS,)

    def cuMemSetAccess(self, address, nbytes, access, count):
        assert len(access) == count == 1
        end = address + nbytes
        while address < end:
            self.accessible.add(address)
            address, _ = self.mapped[address]
        assert address == end
        return (SUCCESS,)

    def cuMemUnmap(self, address, nbytes):
        self.calls.append("unmap")
        assert self.mapped.pop(address)[0] == address + nbytes
        self.accessible.discard(address)
        return (SUCCESS,)

    def synchronize(self):
        self.num_waits += 1

    def free_all_blocks(self):
        self.cached = 0

    def can_access(self, array):
        """Whether all bytes of an array may be read and written."""
        address, end = array.address, array.address + array.nbytes
        first = max((first for first in self.accessible if first <= address), default=None)
        while first in self.accessible and first < end:
            first, _ = self.mapped[first]
        return first is not None and first >= end


class Pointer:
    def __init__(self, memory, offset):
        self.address, self.memory = memory.address + offset, memory

    def __add__(self, offset):
        return Pointer(SimpleNamespace(address=self.address, keeps=self.memory), offset)


def unowned(address, nbytes, owner, gpu):
    return SimpleNamespace(address=address, owner=owner)


class DeviceArray:
    """filled: bytes that `fill` has written, as (address, count)."""

    filled = ()

    def __init__(self, shape, dtype, memptr):
        self.shape, self.dtype, self.memptr, self.address = shape, np.dtype(dtype), memptr, memptr.address
        self.nbytes = math.prod(shape) * self.dtype.itemsize

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, part):
        if isinstance(part, int):
            return DeviceArray(self.shape[1:], self.dtype, self.memptr + part * self.nbytes // len(self))
        start, stop, _ = part.indices(len(self))
        return DeviceArray((stop - start,), self.dtype, self.memptr + start * self.dtype.itemsize)

    def fill(self, value):
        DeviceArray.filled += ((self.address, self.nbytes),)


@pytest.fixture
def gpu(monkeypatch):
    """A SmallGpu of 4 GiB, which the process runs on."""
    small = SmallGpu(4096 * MIB)
    cuda = SimpleNamespace(
        Device=lambda *number: small,
        UnownedMemory=unowned,
        MemoryPointer=Pointer,
        get_allocator=lambda: None,
        set_allocator=lambda allocator: None,
    )
    pool = SimpleNamespace(free_all_blocks=small.free_all_blocks, free_bytes=lambda: small.cached, total_bytes=None)
    cupy = SimpleNamespace(cuda=cuda, ndarray=DeviceArray, get_default_memory_pool=lambda: pool)
    monkeypatch.setattr(mapped_memory, "_driver", lambda: small)
    monkeypatch.setattr(memory, "_allocator", None)
    monkeypatch.setattr(device, "name", lambda: "cuda")
    monkeypatch.setattr(device, "xp", lambda: cupy)
    monkeypatch.setattr(device, "memory_info", lambda: (small.free, small.total))
    with memory.separate_report() as regions:
        small.regions = regions
        yield small
        # What a test has made belongs to its driver.
        gc.collect()


CONFIG = SimpleNamespace(
    num_key_value_heads=2, head_dim=64, blocks=[[Attention(layer)] for layer in range(4)], window_of=lambda layer: 0
)


def cache_of(nbytes):
    """A KVCache of so many bytes."""
    return KVCache(CONFIG, nbytes // (2 * 4 * 16 * 2 * 64 * 2), 16, np.float16)


def use(gpu, arena, *sizes):
    """Allocate arrays of so many bytes in a scope: their addresses, which can be accessed there."""
    with arena.scope():
        arrays = [arena.empty((nbytes,), np.uint8) for nbytes in sizes]
        assert all(map(gpu.can_access, arrays))
        return [each.address for each in arrays]


def taken(gpu, region):
    return gpu.regions.get(region, [0])[0]


def test_an_arena_grows_where_it_is(gpu):
    arena = Arena("activations", lends=True)
    assert arena.address is None and use(gpu, arena) == []
    first = use(gpu, arena, 100 * MIB, 30 * MIB)
    assert first == [arena.address, arena.address + 100 * MIB] and arena.peak == 130 * MIB
    assert 130 * MIB <= arena.nbytes <= (130 + 16) * MIB and taken(gpu, "activations") == 130 * MIB
    gpu.calls.clear()
    assert use(gpu, arena, 100 * MIB, 30 * MIB) == first and gpu.calls == []
    larger = use(gpu, arena, 100 * MIB, 30 * MIB, 700 * MIB)
    assert larger[:2] == first and "unmap" not in gpu.calls
    assert 830 * MIB <= arena.nbytes <= (830 * 33 / 32 + 2) * MIB and taken(gpu, "activations") == 830 * MIB
    del arena
    gc.collect()
    assert gpu.free == gpu.total and not gpu.reserved and taken(gpu, "activations") == 0


def test_generation_and_training_hand_each_other_what_is_missing(gpu):
    """2 GiB of cache and 2.5 of activations on a GPU of 4, of which a quarter is left to the driver."""
    arena, cache = Arena("activations", lends=True), cache_of(2048 * MIB)
    cache.take()
    k = cache.arrays[0].address
    cache.lend()
    addresses = use(gpu, arena, *[500 * MIB] * 5)
    assert cache.arrays is None and taken(gpu, "kv") < cache.nbytes and taken(gpu, "activations") == 2500 * MIB
    for _ in range(3):
        gpu.calls.clear()
        cache.take()
        assert cache.arrays[0].address == k and gpu.can_access(cache.arrays[0]) and gpu.can_access(cache.arrays[1])
        assert taken(gpu, "kv") == cache.nbytes and taken(gpu, "activations") < 2500 * MIB
        cache.lend()
        assert use(gpu, arena, *[500 * MIB] * 5) == addresses
        # 4.5 GiB of 3.75: three pieces, and one more for what is no whole one, in each direction.
        assert gpu.calls.count("unmap") == gpu.calls.count("map") <= 2 * 5 and "release" not in gpu.calls
        assert gpu.calls.count("create") <= 2
    assert gpu.free >= 0 and memory.peak() <= gpu.total


class GraphPool:
    """A pool of CuPy's on a SmallGpu: each array that it has no room for is a block."""

    def __init__(self, gpu):
        self.gpu, self.used, self.left, self.least = gpu, 0, 0, math.inf

    def set_limit(self, size):
        pass

    def total_bytes(self):
        return self.left + self.used

    def free_bytes(self):
        return self.left

    def malloc(self, nbytes):
        missing = max(nbytes - self.left, 0)
        if missing > self.gpu.free:
            raise MemoryError
        self.used, self.left = self.used + nbytes, self.left + missing - nbytes
        self.gpu.handles["pool of graphs"] = self.total_bytes()
        self.least = min(self.least, self.gpu.free)

    def free(self, nbytes):
        self.used, self.left = self.used - nbytes, self.left + nbytes


def test_graphs_leave_the_driver_its_margin(gpu, monkeypatch):
    """Operators' arrays of 160 MiB, then of 200, in graphs of a run whose cache and activations fill the GPU."""
    pool, sizes = GraphPool(gpu), [160 * MIB, 200 * MIB, 200 * MIB]
    cuda = SimpleNamespace(
        Stream=lambda non_blocking: contextlib.nullcontext(),
        MemoryPool=lambda: pool,
        using_allocator=lambda allocator: contextlib.nullcontext(),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(graphs, "captured", lambda stream, compute: compute() or "a graph")
    monkeypatch.setattr(graphs, "reserve_tensor_maps", lambda count: None)
    monkeypatch.setattr(graphs, "keep_tensor_maps", lambda: contextlib.nullcontext(()))
    arena, cache, of_run = Arena("activations", lends=True), cache_of(3072 * MIB), graphs.MicroBatchGraphs
    cache.take()
    cache.lend()
    of_run = of_run(SFTConfig(), False, 1)
    with arena.scope():
        arena.empty((2048 * MIB,), np.uint8)
        assert memory.MARGIN_BYTES <= gpu.free < memory.MARGIN_BYTES + 32 * MIB
        for size in sizes:
            bucket = SimpleNamespace(operator_bytes=size, lacked_bytes=None)
            of_run._capture(None, bucket, lambda size=size: (pool.malloc(size), pool.free(size)) and None)
            assert bucket.graph == "a graph"
    assert pool.least >= memory.MARGIN_BYTES and pool.total_bytes() == 200 * MIB
    # What an engine takes back: first the memory that training lends, and graphs last.
    cache.take()
    assert gpu.handles["pool of graphs"] == 200 * MIB and cache.memory.mapped_bytes >= cache.nbytes


class Graphs:
    """Graphs of so many bytes of a SmallGpu, which others may take."""

    def __init__(self, gpu, nbytes):
        self.gpu = gpu
        gpu.handles["graphs"] = nbytes

    def reclaim(self, nbytes):
        del self.gpu.handles["graphs"]
        return []


def test_gradients_that_other_ranks_map_leave_the_driver_its_margin(gpu, monkeypatch):
    """They are allocations of the driver: of what CuPy's pool keeps, then of a sleeping engine's cache, then of graphs,
    as much as is missing is theirs."""

    def allocate(nbytes):
        assert nbytes % BLOCK_BYTES == 0 and nbytes <= gpu.free
        handle = gpu.cuMemCreate(nbytes, None, 0)[1]
        return SimpleNamespace(address=handle, size=nbytes)

    monkeypatch.setattr(device.xp().cuda, "Memory", allocate, raising=False)
    cache, of_run = cache_of(3072 * MIB), Graphs(gpu, 300 * MIB)
    cache.take()
    cache.lend()
    memory.lend(of_run, is_costly=True)
    gpu.cached = 400 * MIB
    # 724 MiB are free, once the pool has given its own back, and 256 of them the driver's.
    assert _allocate_alone(468 * MIB).memory.size == 468 * MIB
    assert cache.arrays is not None and gpu.free == memory.MARGIN_BYTES
    _allocate_alone(100 * MIB - 1)
    assert cache.arrays is None and memory.MARGIN_BYTES <= gpu.free < memory.MARGIN_BYTES + PIECE_BYTES
    assert "graphs" in gpu.handles and taken(gpu, "kv") >= 2048 * MIB
    _allocate_alone(3000 * MIB)
    assert "graphs" not in gpu.handles and taken(gpu, "kv") == 0 and gpu.free >= memory.MARGIN_BYTES
    with pytest.raises(memory.OutOfMemory, match=r"out of memory: grads needed 0\.68 GiB more, and 0\.\d+ of 4\.0 GiB"):
        _allocate_alone(700 * MIB)


class Hook:
    """CuPy's base of functions that are called where its pools give and take memory."""

    current = None

    def __enter__(self):
        Hook.current = self

    def __exit__(self, *error):
        Hook.current = None


def test_the_most_bytes_that_arrays_have_at_one_time(gpu, monkeypatch):
    """Of those that are made: older ones may be freed, and an allocation may fail."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(MemoryHook=Hook))

    def compute():
        def make(number, nbytes):
            Hook.current.malloc_postprocess(device_id=0, size=nbytes - 9, mem_size=nbytes, mem_ptr=1, pmem_id=number)

        def free(number, nbytes):
            Hook.current.free_preprocess(device_id=0, mem_size=nbytes, mem_ptr=1, pmem_id=number)

        make(7, 1024)
        free(3, 1 << 20)
        make(8, 512)
        make(0, 1 << 30)
        free(7, 1024)
        make(9, 1024)
        free(9, 1024)
        free(8, 512)
        make(9, 1280)

    assert pool_bytes_of(compute) == 1536 and Hook.current is None


def test_nothing_moves_where_there_is_enough_for_both(gpu):
    arena, cache = Arena("activations", lends=True), cache_of(1024 * MIB)
    cache.take()
    k = cache.arrays[0]
    cache.lend()
    use(gpu, arena, 1024 * MIB)
    gpu.calls.clear()
    gpu.cached = 512 * MIB
    for _ in range(2):
        cache.take()
        assert cache.arrays[0] is k
        cache.lend()
        use(gpu, arena, 1024 * MIB)
    assert gpu.calls == [] and gpu.num_waits == 0 and gpu.cached == 512 * MIB


def test_the_pool_of_cupy_gives_what_it_keeps(gpu):
    """After what is lent, which is had again sooner, and before what takes long to have again."""

    class Graphs:
        def reclaim(self, nbytes):
            raise AssertionError("not needed")

    arena, cache, graphs = Arena("activations", lends=True), cache_of(2048 * MIB), Graphs()
    memory.lend(graphs, is_costly=True)
    use(gpu, arena, 1024 * MIB)
    gpu.cached = 2048 * MIB
    cache.take()
    assert gpu.cached == 0 and gpu.can_access(cache.arrays[1])


def test_what_both_need_at_once_is_not_taken(gpu):
    """As where an engine generates between micro-batches."""
    arena, cache = Arena("activations", lends=True), cache_of(2048 * MIB)
    cache.take()
    use(gpu, arena, 1024 * MIB)
    assert cache.arrays is not None
    with pytest.raises(memory.OutOfMemory, match="activations needed 0.5"):
        use(gpu, arena, 1024 * MIB, 1024 * MIB, 512 * MIB)
    assert cache.arrays is not None and gpu.can_access(cache.arrays[0]) and not arena.used and not arena.depth
    # In a scope the arena is not lent, and what the cache lacks is missing.
    cache.lend()
    with arena.scope():
        arena.empty(3000 * MIB, np.uint8)
        with pytest.raises(memory.OutOfMemory, match="kv needed .* lower engine.gpu_memory_utilization"):
            cache.take()
    cache.take()
    assert gpu.can_access(cache.arrays[0])


def test_a_failed_allocation_leaves_what_was_there(gpu):
    arena, cache = Arena("activations", lends=True), cache_of(1024 * MIB)
    use(gpu, arena, 512 * MIB)
    gpu.total = 1000 * MIB
    with pytest.raises(memory.OutOfMemory):
        cache.take()
    assert not cache.memory.mapped_bytes and cache.arrays is None and taken(gpu, "kv") == 0
    gpu.total = 4096 * MIB
    cache.take()
    assert gpu.can_access(cache.arrays[0]) and use(gpu, arena, 512 * MIB) == [arena.address]


def test_other_allocations_get_as_much_as_they_lack(gpu):
    cache = cache_of(2048 * MIB)
    cache.take()
    cache.lend()
    assert memory.reclaim(300 * MIB) and cache.memory.mapped_bytes == 2048 * MIB - 2 * PIECE_BYTES
    assert gpu.free == gpu.total - cache.memory.mapped_bytes and gpu.num_waits == 1 and cache.arrays is None
    assert memory.reclaim() and gpu.free == gpu.total and not memory.reclaim()
    cache.take()
    cache.give_back()
    assert gpu.free == gpu.total and not memory.reclaim() and taken(gpu, "kv") == 0


def test_more_than_the_addresses(gpu):
    few = MappedMemory("few", 10 * MIB)
    few.take(10 * MIB)
    with pytest.raises(memory.OutOfMemory, match="few needed"):
        few.take(11 * MIB)
    assert few.mapped_bytes == 10 * MIB


def test_a_growing_array_stays_where_it_is(gpu, monkeypatch):
    monkeypatch.setattr(DeviceArray, "filled", ())
    growing = GrowingArray("attention", np.float32)
    assert growing.nbytes == 0
    small = growing.first(3)
    assert small.shape == (3,) and gpu.can_access(small) and growing.nbytes == GRANULARITY
    for thousands in range(1, 2001):
        assert growing.first(1000 * thousands).address == small.address
    assert gpu.can_access(growing.first(2_000_000)) and 8_000_000 <= growing.nbytes < 8_000_000 + GRANULARITY
    assert growing.first(5).shape == (5,) and 0 < taken(gpu, "attention") <= growing.nbytes
    # Each element was made zero once.
    starts, sizes = zip(*DeviceArray.filled, strict=True)
    assert list(starts) == [small.address + sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == growing.nbytes


def test_elsewhere_a_growing_array_keeps_one_array():
    growing = GrowingArray("attention", np.float32)
    most = 0
    for thousands in range(1, 2001):
        array = growing.first(1000 * thousands)
        assert array.shape == (1000 * thousands,) and not array[-1]
        array[0], most = 1.0, max(most, growing.nbytes)
    assert most <= 2 * 8_000_000 and growing.first(1)[0] == 1.0


@pytest.mark.gpu
def test_a_captured_graph_reads_a_growing_array_that_has_grown():
    import cupy

    growing, out = GrowingArray("test", np.int32), cupy.zeros(4, np.int32)
    before, stream = growing.first(4), cupy.cuda.Stream(non_blocking=True)
    cupy.add(before, 1, out=before)
    cupy.add(before, 0, out=out)
    with stream:
        stream.begin_capture()
        cupy.add(before, 1, out=before)
        cupy.add(before, 0, out=out)
        graph = stream.end_capture()
    grown = growing.first(50 << 20)
    assert grown.data.ptr == before.data.ptr and not int(grown[4:].any())
    graph.launch()
    cupy.cuda.Device().synchronize()
    assert out.get().tolist() == [2, 2, 2, 2] == grown[:4].get().tolist()


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_a_captured_graph_finds_its_memory_after_another_had_it():
    """Both have more than half of the GPU's memory."""
    import cupy

    gc.collect()
    device.xp().get_default_memory_pool().free_all_blocks()
    size = int(0.6 * device.memory_info()[0]) // (64 * MIB) * 64 * MIB
    arena, cache, count = Arena("test activations", lends=True), cache_of(size), 1 << 20
    source, out = cupy.arange(count, dtype=np.float32), cupy.zeros(count, np.float32)

    def compute():
        with arena.scope():
            first, _, last = arena.empty(count, np.float32), arena.empty(size, np.uint8), arena.empty(count, np.float32)
            cupy.add(source, 1, out=first)
            cupy.multiply(first, 3, out=last)
            cupy.subtract(last, first, out=out)

    compute()
    expected, address = out.get(), arena.address
    assert expected[5] == 12.0
    stream = cupy.cuda.Stream(non_blocking=True)
    with arena.scope(), stream:
        stream.begin_capture()
        compute()
        graph = stream.end_capture()
    for _ in range(3):
        cache.take()
        assert cache.memory.mapped_bytes >= cache.nbytes and arena.nbytes < arena.peak
        cache.arrays[0].fill(7)
        cache.arrays[1].fill(7)
        cache.lend()
        out.fill(0)
        cupy.cuda.Device().synchronize()
        with arena.scope():
            assert arena.nbytes >= arena.peak and 0 < cache.memory.mapped_bytes < cache.nbytes
            graph.launch()
            cupy.cuda.Device().synchronize()
        assert (out.get() == expected).all() and arena.address == address
    assert arena.nbytes + cache.memory.mapped_bytes <= device.memory_info()[1]
