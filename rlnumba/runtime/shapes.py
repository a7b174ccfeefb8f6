"""Arrays without memory, and operators that compute nothing: what a model allocates is measured by running it.

    with shapes_only() as peaks:
        model = Transformer(config, Weights(config, "bfloat16"))       an 8B model, on any machine, in milliseconds
        ...                                                            forward, backward
    peaks                                                              {region: bytes}, as of memory.report()

Inside the block device.xp() makes ShapeOnly arrays, and every function of rlnumba.kernels that a module outside of that
package calls by its own name does nothing and returns None, which is what operators return. So the code of layers,
models, trainers and engine runs as it is, and a new layer is measured without a line here. What operators allocate
beside their arguments is not seen.
"""

import gc
import sys
import types
from contextlib import contextmanager

import numpy as np

from rlnumba.runtime import device, memory

# Functions of rlnumba.kernels that compute on the host something that models and optimizers read.
HOST_FUNCTIONS = {"rope_table", "adamw_scalars", "rounding_noise"}


class ShapeOnly(np.ndarray):
    """An array whose elements share one address; shape, dtype and nbytes are a real one's. Writes are ignored."""

    def fill(self, value):
        pass

    def __setitem__(self, index, value):
        pass


def empty(shape, dtype=np.float64):
    """A ShapeOnly array."""
    element = np.zeros(1, dtype)
    shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    return np.lib.stride_tricks.as_strided(element, shape, (0,) * len(shape)).view(ShapeOnly)


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
    """In place of an operator."""


@contextmanager
def shapes_only():
    """Inside, nothing is allocated or computed; yields a dict that has the peaks of memory.track's regions after it.

    No reference to what is made inside may outlive the block.
    """
    peaks, replaced = {}, list(_operators())
    before = device.name()
    device.replace("shapes", _Namespace())
    for module, name, _ in replaced:
        setattr(module, name, _no_operator)
    try:
        with memory.separate_report() as regions:
            yield peaks
            peaks.update({region: peak for region, (_, peak) in regions.items()})
            # What has been made inside is to leave the separate report, not that of the process.
            gc.collect()
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
        device.replace(before)
