"""Arrays without memory: what a model allocates, or which kernels it launches, is found by running it on them.

    with shapes_only() as peaks:
        model = Transformer(config, Weights(config, "bfloat16"))       an 8B model, on any machine, in milliseconds
        ...                                                            forward, backward
    peaks                                                              {region: bytes}, as of memory.report()

    with launches_only(properties) as signatures:
        ...
    signatures                                                         [(module, name, constants, types)], each once

Inside the blocks device.xp() makes ShapeOnly arrays. In the first one every function of rlnumba.kernels that a module
outside of that package calls by its own name does nothing and returns None, which is what operators return. In the
second one operators choose and launch their kernels as on the GPU of those properties, and a launch only notes its
kernel and argument types. So the code of layers, models, trainers and engine runs as it is, and a new layer is covered
without a line here. The first does not see what operators allocate beside their arguments.
"""

import functools
import math
import mmap
import sys
import types
from contextlib import contextmanager

import numpy as np

from rlnumba.runtime import device, launch, memory

# Functions of rlnumba.kernels that compute on the host, or allocate, what models, engine and optimizers read.
HOST_FUNCTIONS = {"rope_table", "adamw_scalars", "rounding_noise", "workspace_sizes", "policy_loss_scale"}
HOST_FUNCTIONS |= {"ppo_loss_blocks", "attention_backward_nbytes", "operand_dtype", "planes_of", "empty_tokens"}
HOST_FUNCTIONS |= {"first_kept_key", "packed_shape", "scales_shape", "supports_prefixes", "prefix_levels"}
HOST_FUNCTIONS |= {"prefix_multiple"}
# The range of addresses that arrays without memory share: more than the largest of them.
ADDRESSES = 1 << 42
# Linux's flag, which the module has since Python 3.12.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class ShapeOnly(np.ndarray):
    """An array without memory of its own; shape, dtype, strides and nbytes are a real one's. Writes are ignored.

    Every comparison of its elements holds, so that no row of a batch is left out.
    """

    def fill(self, value):
        pass

    def __setitem__(self, index, value):
        pass

    def __eq__(self, other):
        return np.ones(self.shape, bool)

    __ne__ = __eq__


@functools.cache
def _addresses():
    """Addresses without memory behind them, as an array of bytes: Linux maps a zero page where one is read."""
    return np.frombuffer(mmap.mmap(-1, ADDRESSES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), np.uint8)


def empty(shape, dtype=np.float64):
    """A ShapeOnly array."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = math.prod(map(int, shape)) * dtype.itemsize
    return _addresses()[:nbytes].view(dtype).reshape(shape).view(ShapeOnly)


class _Namespace:
    """NumPy, but for the functions that allocate."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=np.float64):
        return empty(shape, dtype)

    zeros = ones = empty

    def full(self, shape, value, dtype=np.float64):
        return empty(shape, dtype)


def _operators():
    """(module, name) of every operator that a module of this package has imported from rlnumba.kernels."""
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("rlnumba.") or module_name.startswith("rlnumba.kernels"):
            continue
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and name not in HOST_FUNCTIONS:
                if value.__module__.startswith("rlnumba.kernels."):
                    yield module, name, value


def _no_operator(*arguments, **options):
    """The function that replaces an operator: it does nothing."""


@contextmanager
def shapes_only(properties=None):
    """Inside, nothing is allocated or computed; yields a dict that has the peaks of memory.track's regions after it.

    properties: device.Properties of a GPU that would compute, where there is one. No reference to what is made inside
    may outlive the block.
    """
    peaks, replaced = {}, list(_operators())
    before = device.name()
    device.replace("shapes", _Namespace(), properties)
    for module, name, _ in replaced:
        setattr(module, name, _no_operator)
    try:
        with memory.separate_report() as regions:
            yield peaks
            peaks.update({region: peak for region, (_, peak) in regions.items()})
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
        device.replace(before)


@contextmanager
def launches_only(properties):
    """Inside, nothing is allocated or computed; yields a list of the signatures of the kernels that are launched.

    properties: device.Properties of the GPU on which the kernels would be launched. A signature is (module, name,
    constants, types): of the kernel, or of the factory that makes it with these constants (else None), and the names of
    the argument types. This process must not use a device after it: what was cached inside follows from properties.
    """
    found = {}

    def note(kernel, type_names):
        found.setdefault(launch.signature(kernel, type_names))

    signatures = []
    device.replace("shapes", _Namespace(), properties)
    launch.observers.append(note)
    try:
        yield signatures
    finally:
        launch.observers.remove(note)
        signatures[:] = found
