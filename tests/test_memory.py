"""Bytes by region, and arenas."""

import threading

import numpy as np
import pytest

from rlnumba.runtime import device, memory


def test_arrays_of_open_scopes_do_not_overlap_and_bytes_are_counted():
    arena = memory.Arena("test arrays")
    for _ in range(2):
        with arena.scope():
            a = arena.empty((1000,), np.float32)
            a.fill(1.0)
            with arena.scope():
                b = arena.empty((30, 7), np.int32)
                b.fill(2)
                assert device.to_host(a).sum() == 1000
            c = arena.empty(5, np.float32)
            c.fill(3.0)
            assert device.to_host(a).sum() == 1000
    # 4,000 and 840 bytes, each rounded up to 256; the last 20 bytes reuse the memory of the 840.
    assert memory.report()["test arrays"] == 4096 + 1024


def test_an_array_needs_a_scope():
    with pytest.raises(ValueError, match="outside of a scope"):
        memory.Arena("test").empty(3, np.float32)


@pytest.mark.gpu
def test_chunks_merge_to_the_peak():
    arena = memory.Arena("test chunks")
    for _ in range(3):
        with arena.scope():
            arrays = [arena.empty(5 << 20, np.float32) for _ in range(4)]
            for i, array in enumerate(arrays):
                array.fill(i)
            assert [int(array[0]) for array in arrays] == [0, 1, 2, 3]
    assert len(arena.chunks) == 1 and arena.chunks[0].nbytes == arena.peak == 4 * (20 << 20)


def test_threads_count_in_one_region():
    def count():
        for _ in range(10_000):
            memory.track("test threads", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.report()["test threads"] == 40_000
    memory.track("test threads", -40_000)


class Lent:
    """Memory that is lent, of a device with `free` bytes."""

    def __init__(self, free, nbytes):
        self.free, self.nbytes = free, nbytes
        memory.lend(self)

    def reclaim(self):
        self.free[0] += self.nbytes


def small_device(free):
    """(Allocator of a device with the list [bytes] `free`, how often it was asked what is free)."""
    asked, pool = [], [0]

    def allocate(nbytes):
        if nbytes > free[0]:
            raise MemoryError
        free[0] -= nbytes
        pool[0] += nbytes
        return nbytes

    def free_bytes():
        asked.append(free[0])
        return free[0]

    return memory.Allocator(allocate, lambda: pool[0], free_bytes), asked


def test_an_allocation_that_fails_takes_what_is_lent():
    margin = memory.MARGIN_BYTES
    free = [3 * margin]
    allocate, asked = small_device(free)
    lent = Lent(free, 4 * margin)
    assert allocate(margin) == margin and free == [2 * margin] and asked == [2 * margin]
    assert allocate(3 * margin) == 3 * margin and free == [3 * margin]
    # Lent no more: the next one fails, and is not asked for twice.
    with pytest.raises(MemoryError):
        allocate(4 * margin)
    memory.lend(lent)
    memory.take_back(lent)
    with pytest.raises(MemoryError):
        allocate(4 * margin)
    assert not memory.reclaim()


def test_an_allocation_that_leaves_the_driver_too_little_takes_what_is_lent():
    margin = memory.MARGIN_BYTES
    free = [2 * margin]
    allocate, asked = small_device(free)
    lent = Lent(free, 4 * margin)
    assert allocate(0) == 0 and asked == []
    assert allocate(margin + 1) == margin + 1
    assert asked == [margin - 1] and free == [5 * margin - 1]
    # Nothing is asked where nothing is lent.
    assert allocate(margin) == margin and len(asked) == 1
    del lent


def test_what_is_not_referenced_any_more_is_not_reclaimed():
    free = [0]
    Lent(free, 1)
    assert not memory.reclaim() and free == [0]
