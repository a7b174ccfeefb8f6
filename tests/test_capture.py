"""Graphs for which the driver has no memory, and launches on other streams than that of the capture."""

import numpy as np
import pytest

from rlnumba.runtime import device
from rlnumba.runtime.capture import captured

pytestmark = pytest.mark.gpu


def fill_gpu():
    """All of the device's memory, which no one else gets while the list is there."""
    from cupy.cuda import memory, runtime

    taken, size = [], 1 << 30
    while size >= 1 << 12:
        try:
            taken.append(memory.Memory(size))
        except runtime.CUDARuntimeError:
            size //= 2
    return taken


@pytest.mark.fills_gpu
def test_a_graph_without_memory_for_it_is_a_memory_error():
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    numbers, stream = cupy.zeros(64), cupy.cuda.Stream(non_blocking=True)

    def add_many():
        for _ in range(40_000):
            cupy.add(numbers, 1, out=numbers)

    with stream:
        add_many()
        stream.synchronize()
        filled = fill_gpu()
        with pytest.raises(MemoryError):
            captured(stream, add_many)
        assert not stream.is_capturing()
        filled.clear()
        numbers[...] = 0
        captured(stream, add_many).launch(stream)
        stream.synchronize()
    assert device.to_host(numbers).tolist() == [40_000] * 64


def test_a_graph_is_launched_on_another_stream_while_that_of_its_capture_was_busy():
    import cupy

    numbers, large = cupy.zeros(64), cupy.zeros(1 << 28, np.float32)
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

    def add():
        cupy.add(numbers, 1, out=numbers)

    with stream:
        add()
        stream.synchronize()
        for _ in range(400):
            cupy.add(large, 1, out=large)
        assert not stream.done
        graph = captured(stream, add)
        assert stream.done
    for _ in range(9):
        graph.launch(other)
    other.synchronize()
    assert device.to_host(numbers).tolist() == [10] * 64
