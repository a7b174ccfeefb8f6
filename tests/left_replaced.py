"""Which functions and classes of the package a test module has left replaced, for tests that come after it."""

import functools
import sys
from types import BuiltinFunctionType, FunctionType, ModuleType

from numba.core.dispatcher import Dispatcher

CACHED = type(functools.cache(len))
KINDS = FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod, CACHED, Dispatcher, ModuleType


def attributes():
    """{module or module.Class: its attributes} of the package as it is now."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("rlnumba"):
            found[name] = values = dict(vars(module))
            for value in values.values():
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{value.__qualname__}"] = dict(vars(value))
    return found


def names(before):
    """Names of the functions, classes and submodules that are not as in `before`, of attributes(), any more."""
    now, found = attributes(), []
    for owner, values in before.items():
        others = now.get(owner, {})
        for name, value in values.items():
            # Which module of arrays is used (NumPy, CuPy) is a state of the device.
            if others.get(name) is not value and isinstance(value, KINDS):
                if type(value) is not ModuleType or value.__name__.startswith("rlnumba"):
                    found.append(f"{owner}.{name}")
    return found
