"""The copy of a step's arrays from the host to the device."""

import numpy as np

from rlnumba.runtime import device

# Layouts of steps that are kept: those of graphs recur, those of prefill steps hardly ever.
MAX_LAYOUTS = 512


class Upload:
    """Sends arrays of four-byte elements to the device in one copy; on the CPU they are passed through.

    Arrays of the same shapes, sent in the same order, get the same addresses: a captured graph reads the new values.
    The memory grows on demand, which moves the addresses and increments `generation`.
    """

    def __init__(self):
        self.words = self.generation = 0
        if device.name() == "cuda":
            self._grow(1 << 16)

    def _grow(self, words):
        import cupyx

        self.words = words
        self.host = cupyx.empty_pinned(words, np.int32)
        self.device = device.xp().empty(words, np.int32)
        self.generation += 1
        # (words, views of the host's memory, views of the device's) by names and shapes.
        self.layouts = {}

    def send(self, arrays):
        """{name: NumPy array} -> {name: array of the device}. Overwrites the arrays of the last call."""
        if device.name() != "cuda":
            return arrays
        key = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        if key not in self.layouts:
            layout = self._layout(arrays)
            if len(self.layouts) == MAX_LAYOUTS:
                self.layouts.clear()
            self.layouts[key] = layout
        words, host_views, device_views = self.layouts[key]
        for view, array in zip(host_views, arrays.values(), strict=True):
            view[...] = array
        self.device[:words].set(self.host[:words], device.xp().cuda.get_current_stream())
        return device_views

    def _layout(self, arrays):
        # 16-byte alignment for vector loads.
        sizes = {name: -(-array.size // 4) * 4 for name, array in arrays.items()}
        words = sum(sizes.values())
        if words > self.words:
            self._grow(2 * words)
        host_views, device_views, offset = [], {}, 0
        for name, array in arrays.items():
            flat = slice(offset, offset + array.size)
            host_views.append(self.host[flat].view(array.dtype).reshape(array.shape))
            device_views[name] = self.device[flat].view(array.dtype).reshape(array.shape)
            offset += sizes[name]
        return words, host_views, device_views
