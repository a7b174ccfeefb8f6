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
