"""Copies from the host's memory, or from mapped files, to arrays of the device, a piece at a time in several threads.

At no time is more on its way than a few pieces: what is read from a mapped file needs no other memory of the host.
"""

import functools
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rlnumba.runtime import device

# A thread copies 5 to 10 GB/s, and page-locked memory, of which a thread has two pieces, takes long to allocate.
THREADS = 4
PIECE_BYTES = 8 << 20


def copy_to_device(copies):
    """array[...] = values, converted to its dtype, for each (array of the device, NumPy array of as many elements).

    Both are C-contiguous.
    """
    device.synchronize()  # the arrays may be written by what was launched before
    pieces = deque()
    for array, values in copies:
        array, values, size = array.reshape(-1), values.reshape(-1), PIECE_BYTES // array.dtype.itemsize
        pieces += [(array[i : i + size], values[i : i + size]) for i in range(0, len(values), size)]
    if device.name() == "cuda":
        pinned = device.xp().get_default_pinned_memory_pool()
        copy_pieces = functools.partial(_copy_pieces_to_gpu, device.xp().cuda.Device().id)
    else:
        copy_pieces = _copy_pieces
    with ThreadPoolExecutor(min(THREADS, max(len(pieces), 1)), "copy") as pool:
        try:
            for thread in [pool.submit(copy_pieces, pieces) for _ in range(THREADS)]:
                thread.result()
        finally:
            pieces.clear()  # those of an interrupted call
    if device.name() == "cuda":
        pinned.free_all_blocks()


def _copy_pieces(pieces):
    for array, values in _taken(pieces):
        array[...] = values


def _copy_pieces_to_gpu(device_id, pieces):
    """While one piece is copied to the GPU, on a stream of this thread's own, the next one is read."""
    import cupyx

    with device.xp().cuda.Device(device_id):
        stream, event = device.xp().cuda.Stream(non_blocking=True), device.xp().cuda.Event
        staged = [(cupyx.empty_pinned(PIECE_BYTES, np.uint8), event(disable_timing=True)) for _ in range(2)]
        for i, (array, values) in enumerate(_taken(pieces)):
            buffer, copied = staged[i % 2]
            copied.synchronize()
            host = buffer[: array.nbytes].view(array.dtype)
            host[...] = values
            array.set(host, stream)
            copied.record(stream)
        stream.synchronize()


def _taken(pieces):
    """Yields the pieces that no other thread has taken."""
    while True:
        try:
            yield pieces.popleft()
        except IndexError:
            return
