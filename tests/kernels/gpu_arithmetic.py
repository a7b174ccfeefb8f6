"""What Python's arithmetic does otherwise than a GPU's, for tests of kernels in the simulator whose inputs are odd."""

import math
import types

import numpy as np

from rlnumba.runtime import device

# Of these, Python's raise an error where a GPU has an infinity.
FUNCTIONS = ("exp", "expm1", "log", "log1p", "sqrt")


def use_gpu_arithmetic(monkeypatch, *modules):
    """Let the modules' kernels compute as on a GPU: max and min of a number and a NaN are the number, log 0 is -inf."""
    if device.name() != "sim":
        return
    functions = types.SimpleNamespace(**vars(math) | {name: getattr(np, name) for name in FUNCTIONS})
    for module in modules:
        monkeypatch.setattr(module, "math", functions)
        monkeypatch.setattr(module, "max", np.fmax, raising=False)
        monkeypatch.setattr(module, "min", np.fmin, raising=False)


def fill_shared_memory(monkeypatch, byte):
    """Let memory that nothing was written to hold this byte, in the simulator, instead of NaN and -1."""
    if device.name() != "sim":
        return
    from rlnumba.runtime import simulator

    def filled(shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = byte
        return array

    monkeypatch.setattr(simulator, "poisoned", filled)
