"""Bytes by region, and arenas."""

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.runtime import device, memory
from rlnumba.runtime.arena import Arena


def test_arrays_of_open_scopes_do_not_overlap_and_bytes_are_counted():
    arena = Arena("test arrays")
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
        Arena("test").empty(3, np.float32)


def test_garbage_leaves_the_report_that_it_is_in():
    class Owner:
        def __init__(self):
            self.itself = self
            memory.track("test garbage", 100)
            weakref.finalize(self, memory.track, "test garbage", -100)

    gc.disable()
    try:
        Owner()
        with memory.separate_report() as regions:
            Owner()
        assert memory.allocated("test garbage") == 0
        assert regions["test garbage"] == [0, 100]
    finally:
        gc.enable()


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
    """Memory that is lent, of a device with `free` bytes, in pieces of a margin's size."""

    def __init__(self, free, nbytes, is_costly=False):
        self.free, self.nbytes = free, nbytes
        memory.lend(self, is_costly)

    def reclaim(self, nbytes):
        count = -(-min(nbytes, self.nbytes) // memory.MARGIN_BYTES)
        self.nbytes -= count * memory.MARGIN_BYTES
        return [LentPiece(self.free) for _ in range(count)]


class LentPiece:
    nbytes = memory.MARGIN_BYTES

    def __init__(self, free):
        self.free = free

    def release(self):
        self.free[0] += self.nbytes


def small_device(free, unused=0):
    """(Allocator of a device with the list [bytes] `free`, how often it was asked what is free).

    unused: bytes of its pool that are in no use.
    """
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

    return memory.Allocator(allocate, lambda: pool[0], lambda: unused, free_bytes), asked


def test_an_allocation_that_fails_takes_what_is_lent():
    margin = memory.MARGIN_BYTES
    free = [3 * margin]
    allocate, asked = small_device(free)
    lent = Lent(free, 5 * margin)
    assert allocate(margin) == margin and free == [2 * margin] and asked == [3 * margin, 2 * margin]
    # What it asks for, and what the driver is left: the rest stays where it is.
    assert allocate(3 * margin) == 3 * margin and free == [margin] and lent.nbytes == 3 * margin
    with pytest.raises(MemoryError):
        allocate(5 * margin)
    assert lent.nbytes == 0 and free == [4 * margin] and not memory.reclaim()
    lent.nbytes = 4 * margin
    memory.lend(lent)
    memory.take_back(lent)
    with pytest.raises(MemoryError):
        allocate(5 * margin)
    assert not memory.reclaim()
    # Nothing is asked before a small one, or one that the pool of the allocator may have memory for.
    for nbytes, unused in ((memory.LARGE_BYTES - 1, 0), (2 * margin, 2 * margin)):
        free[0] = nbytes - 1
        allocate, asked = small_device(free, unused)
        lent = Lent(free, 5 * margin)
        assert allocate(nbytes) == nbytes and asked == [nbytes - 1] and margin <= free[0] < 2 * margin
        memory.take_back(lent)


def test_an_allocation_that_leaves_the_driver_too_little_takes_what_is_lent():
    margin = memory.MARGIN_BYTES
    free = [2 * margin]
    allocate, asked = small_device(free)
    lent = Lent(free, 4 * margin)
    assert allocate(0) == 0 and asked == []
    # Before a large one is made.
    assert allocate(margin + 1) == margin + 1
    assert asked == [2 * margin, 2 * margin - 1] and free == [2 * margin - 1] and lent.nbytes == 3 * margin
    # After a small one.
    free[0], small = margin, memory.LARGE_BYTES - 1
    assert allocate(small) == small and asked[2:] == [margin - small]
    assert free == [2 * margin - small] and lent.nbytes == 2 * margin
    # Nothing is asked where nothing is lent.
    memory.take_back(lent)
    assert allocate(margin) == margin and len(asked) == 3


def test_room_for_memory_that_no_allocator_is_asked_for(monkeypatch):
    """The driver has it beside its margin: of what is lent as much as is missing, then what CuPy's pool keeps."""
    margin, free, cached = memory.MARGIN_BYTES, [2 * memory.MARGIN_BYTES], [3 * memory.MARGIN_BYTES]

    def free_all_blocks():
        free[0], cached[0] = free[0] + cached[0], 0

    pool = SimpleNamespace(free_all_blocks=free_all_blocks)
    monkeypatch.setattr(device, "xp", lambda: SimpleNamespace(get_default_memory_pool=lambda: pool))
    monkeypatch.setattr(device, "memory_info", lambda: (free[0], 80 * margin))
    costly, lent = Lent(free, 2 * margin, is_costly=True), Lent(free, 3 * margin)
    memory.make_room(margin)
    assert free == [2 * margin] and lent.nbytes == 3 * margin
    memory.make_room(margin + 1)
    assert free == [3 * margin] and lent.nbytes == 2 * margin and cached == [3 * margin]
    memory.make_room(5 * margin)
    assert free == [8 * margin] and lent.nbytes == cached[0] == 0 and costly.nbytes == 2 * margin
    memory.make_room(9 * margin)
    assert free == [8 * margin]
    memory.make_room(9 * margin, costly=True)
    assert free == [10 * margin] and costly.nbytes == 0


def test_what_is_expected_counts_until_it_is_there():
    memory.expect("test graphs", 100)
    assert memory.expected_bytes() == 100
    memory.track("test graphs", 70)
    assert memory.expected_bytes() == 30
    memory.track("test graphs", 70)
    assert memory.expected_bytes() == 0
    memory.track("test graphs", -140)
    memory.expect("test graphs", 0)
    assert memory.expected_bytes() == 0


def test_what_was_lent_first_is_taken_first_and_what_is_costly_last():
    margin, free = memory.MARGIN_BYTES, [0]
    costly, first, second = Lent(free, 2 * margin, is_costly=True), Lent(free, 2 * margin), Lent(free, 2 * margin)

    def left():
        return [each.nbytes // margin for each in (costly, first, second)]

    assert memory.reclaim(margin) and left() == [2, 1, 2]
    # Lent anew, it is the last of its kind.
    memory.lend(first)
    assert memory.reclaim(2 * margin) and left() == [2, 1, 0]
    assert memory.reclaim(margin + 1) and left() == [1, 0, 0]
    assert memory.take_lent(margin) == [] and left() == [1, 0, 0] and free == [5 * margin]
    assert memory.reclaim() and left() == [0, 0, 0] and not memory.reclaim()


def test_what_is_not_referenced_any_more_is_not_reclaimed():
    free = [0]
    Lent(free, 1)
    assert not memory.reclaim() and free == [0]
