"""Tensor maps: how TMA sees an array, and the box that one copy moves.

On a GPU a map is 128 bytes that the driver encodes, in global memory; each context (runtime/context.py) keeps its own.
In the simulator it is an object with the array and the box.
Source: CUDA driver API, cuTensorMapEncodeTiled.
"""

import contextlib
import ctypes
from collections import Counter

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.sm90 import acquire_tensor_map, tensor_map_address
from rlnumba.kernels.ptx.warp import flushed
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Architectures that the kernel compiles for: older GPUs have no tensor maps.
ARCHITECTURES = [(9, 0, "a")]


class HostTensorMap:
    """The simulator's tensor map: an array and the box that one TMA copy moves."""

    # The dtype and dimensions of the 128 bytes that stand for it on a GPU.
    dtype, ndim = np.dtype(np.uint8), 1

    def __init__(self, array, box):
        if len(box) > array.ndim:
            array = array.reshape(len(array), -1, box[-1]).transpose(1, 0, 2)
        self.array = array
        self.box = box
        self.lines = int(np.prod(box[:-1]))

    def _inside(self, start):
        return tuple(slice(first, first + length) for first, length in zip(start, self.box, strict=True))

    def read(self, start):
        """The box at `start`, zeros outside the array."""
        box = np.zeros(self.box, self.array.dtype)
        part = self.array[self._inside(start)]
        box[tuple(slice(length) for length in part.shape)] = part
        return box

    def write(self, start, box, add):
        """Write what of a box at `start` lies in the array, or add it, as L2 does: subnormal numbers are 0."""
        part = self.array[self._inside(start)]
        new = box[tuple(slice(length) for length in part.shape)]
        part[...] = flushed(flushed(part) + flushed(new)) if add else new


@cuda.jit
def acquire_tensor_maps_kernel(maps, slots):
    """Every block lets its SM read the maps (S, 128) of these slots (N,) anew; the grid has blocks for every SM."""
    for i in range(cuda.threadIdx.x, slots.shape[0], cuda.blockDim.x):
        acquire_tensor_map(tensor_map_address(maps) + slots[i] * LINE)


class DeviceTensorMaps:
    """A context's tensor maps in slots of device arrays, made once for each array and box, found again by address.

    When the slots of one array are all taken, the maps are made anew in the other one, but for those that captured
    graphs read (keep_tensor_maps). So a map stays as it was while further ones for the same launch are made, and until
    as many again were made as there are slots.
    """

    SLOTS = 1 << 16
    TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
    SWIZZLE_128, PROMOTE_L2_256 = 3, 3

    def __init__(self):
        # {(address, shape, strides, dtype, box): the view of the map's slot}, the keys of maps that stay and how often
        # each is kept, and those that are kept inside the present keep_tensor_maps.
        self.found, self.kept, self.keeping = {}, Counter(), None
        # Both arrays, each (SLOTS, 128), None until it is needed; which one is in use; its free slots.
        self.arrays, self.current, self.free = [None, None], 0, []

    def get(self, array, box):
        """The map of an array and a box, 128 bytes on the device."""
        key = array.data.ptr, array.shape, array.strides, array.dtype, box
        view = self.found.get(key)
        if view is None:
            view = self._make(key)
        if self.keeping is not None and key not in self.keeping:
            self.keeping[key] = None
            self.kept[key] += 1
        return view

    def _first_array(self):
        """Allocate what the first map needs."""
        import cupy
        import cupyx

        self.cupy = cupy
        self.encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        self.upload_stream = cupy.cuda.Stream(non_blocking=True)
        self.host = cupyx.empty_pinned(LINE, np.uint8)
        self.arrays[0] = self._new_array()
        self.free = list(range(self.SLOTS))

    def _new_array(self):
        raw = self.cupy.empty((self.SLOTS + 1) * LINE, np.uint8)
        start = -raw.data.ptr % LINE
        return raw[start : start + self.SLOTS * LINE].reshape(self.SLOTS, LINE)

    def reserve(self, count):
        """Have `count` free slots, so that so many maps can be made while a graph is captured."""
        if self.arrays[0] is not None and len(self.free) < count:
            self._change_arrays()

    def release(self, keys):
        """End one keep_tensor_maps for maps of these keys: no captured graph reads them any more."""
        self.kept -= Counter(list(keys))

    def _change_arrays(self):
        """Go on in the other array, in the slots of it that no captured graph reads."""
        if self.cupy.cuda.get_current_stream().is_capturing():
            raise DeviceError(f"more than {self.SLOTS} tensor maps, while a graph is captured")
        self.found = {key: self.found[key] for key in self.kept}
        self.current = 1 - self.current
        array = self.arrays[self.current]
        if array is None:
            array = self.arrays[self.current] = self._new_array()
            self.free = list(range(self.SLOTS))
            return
        offsets = [view.data.ptr - array.data.ptr for view in self.found.values()]
        kept = {offset // LINE for offset in offsets if 0 <= offset < array.nbytes}
        self.free = [slot for slot in range(self.SLOTS) if slot not in kept]
        if not self.free:
            raise DeviceError(f"captured graphs hold all of {self.SLOTS} tensor maps")
        # Kernels of this context that read these slots were launched earlier on the current stream.
        self.cupy.cuda.get_current_stream().synchronize()
        slots = self.cupy.asarray(np.array(self.free, np.int32))
        launch(acquire_tensor_maps_kernel, 2 * device.sm_count(), 1024, array, slots, pdl=False)

    def _make(self, key):
        if self.arrays[0] is None:
            self._first_array()
        pointer, shape, strides, dtype, box = key
        if not self.free:
            self._change_arrays()
        slot = self.free.pop()
        strides = list(strides[-2::-1])
        if len(box) > len(shape):
            rows, columns = shape
            shape, strides = (columns // box[-1], rows, box[-1]), [*strides, dtype.itemsize * box[-1]]
        # The driver wants the innermost dimension first.
        dimensions = len(shape)
        lengths, sizes = ctypes.c_uint32 * dimensions, ctypes.c_uint64 * dimensions
        status = self.encode(
            ctypes.c_void_p(self.host.ctypes.data), self.TYPES[dtype.name], dimensions, ctypes.c_void_p(pointer),
            sizes(*shape[::-1]), (ctypes.c_uint64 * (dimensions - 1))(*strides), lengths(*box[::-1]),
            lengths(*[1] * dimensions), 0, self.SWIZZLE_128, self.PROMOTE_L2_256, 0,
        )  # fmt: skip
        if status:
            self.free.append(slot)
            raise DeviceError(f"tensor map of a {shape} {dtype} array, box {box}: driver error {status}")
        view = self.arrays[self.current][slot]
        # At once, even if the current stream captures a graph: this one does not.
        view.data.copy_from_host_async(ctypes.c_void_p(self.host.ctypes.data), LINE, self.upload_stream)
        # Kernels on any stream may read the map from here on.
        self.upload_stream.synchronize()
        self.found[key] = view
        return view


def tensor_map(array, *box):
    """The tensor map to copy boxes of a matrix or three-dimensional array, whose rows are contiguous, by TMA.

    box: lengths in the order of the array's dimensions, at most 256 each. A line of a box is at most 128 bytes; the
    array and its rows start at multiples of 16 bytes. Three lengths for a matrix: it is seen as (panels, rows, columns
    of a panel), a panel being as wide as the box. Raises DeviceError if the driver refuses.
    """
    if device.name() != "cuda":
        return HostTensorMap(array, box)
    return current().own(DeviceTensorMaps).get(array, box)


@contextlib.contextmanager
def keep_tensor_maps():
    """The current context's maps that are asked for inside stay as they are, as a captured graph demands.

    Yields what release_tensor_maps takes, complete at the end; without it they stay for good.
    """
    if device.name() != "cuda":
        yield {}
        return
    maps = current().own(DeviceTensorMaps)
    maps.keeping = {}
    try:
        yield maps.keeping
    finally:
        maps.keeping = None


def release_tensor_maps(kept):
    """End one keep_tensor_maps, whose graph is not replayed any more."""
    if kept:
        current().own(DeviceTensorMaps).release(kept)


def reserve_tensor_maps(count):
    """Let the current context have slots for `count` more maps, before a graph is captured that may ask for them."""
    current().own(DeviceTensorMaps).reserve(count)
