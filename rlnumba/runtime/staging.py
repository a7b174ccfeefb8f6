"""Arrays between host and device in one copy for all of them, which the host does not wait for.

    staged = Staged({"ids": ((1024,), np.dtype(np.int32)), ...})       one piece of device memory
    staged.send({"ids": ...})                                          host -> device
    read = staged.read()                                               device -> host
    ...
    read()["ids"]                                                      waits for that copy alone

The host's side of a copy is page-locked memory that is kept until the copy is done. Elements have four bytes.
"""

import math
from collections import deque

import numpy as np

from rlnumba.runtime import device
from rlnumba.runtime.context import current

# Words to which an array's first one is aligned: 16 bytes, for vector loads.
ALIGNMENT = 4


class Staged:
    """Device arrays at addresses that stay as they are. layout: {name: (shape, dtype)}, dtypes of four bytes."""

    def __init__(self, layout):
        self.layout, self.words = layout, 0
        self.offsets = {}
        for name, (shape, _) in layout.items():
            self.offsets[name] = self.words
            self.words += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        self.flat = device.xp().empty(self.words, np.int32)
        # {name: array of the device}
        self.arrays = self._views(self.flat)

    def _views(self, flat):
        return {
            name: flat[self.offsets[name] : self.offsets[name] + math.prod(shape)].view(dtype).reshape(shape)
            for name, (shape, dtype) in self.layout.items()
        }

    def send(self, arrays):
        """Copy {name: NumPy array}, all of the layout's, to the device, in the order of the current stream."""
        if device.name() != "cuda":
            for name, array in arrays.items():
                self.arrays[name][...] = array
            return
        host = _pinned(self.words)
        views = self._views(host)
        for name, array in arrays.items():
            views[name][...] = array
        _copy(host.ctypes.data, self.flat.data.ptr, host)

    def read(self):
        """Begin to copy all arrays to the host; returns a function that waits for it: {name: NumPy array}."""
        if device.name() != "cuda":
            arrays = {name: np.array(array) for name, array in self.arrays.items()}
            return lambda: arrays
        host = _pinned(self.words)
        done = _copy(self.flat.data.ptr, host.ctypes.data, host)

        def arrays():
            done.synchronize()
            return self._views(host)

        return arrays


def _pinned(words):
    import cupyx

    return cupyx.empty_pinned(words, np.int32)


def _copy(source, target, host):
    """Copy as many bytes as `host`, page-locked memory at one of the addresses, has; returns the event after it."""
    import cupy

    # CuPy's pool would give the memory to the next one who asks while the copy still reads or writes it.
    copies = current().own(_Copies).pending
    while copies and copies[0][0].done:
        copies.popleft()
    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memcpyAsync(target, source, host.nbytes, cupy.cuda.runtime.memcpyDefault, stream.ptr)
    done = cupy.cuda.Event(disable_timing=True)
    done.record(stream)
    copies.append((done, host))
    return done


class _Copies:
    """Copies of one context: (event after it, host memory) of each that may still be under way."""

    def __init__(self):
        self.pending = deque()
