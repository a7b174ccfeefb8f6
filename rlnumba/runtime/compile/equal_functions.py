"""Device functions that are equal are compiled once in a process, though factories make them anew for each kernel.

Kernels of one family differ in a constant or two, which few of their device functions read: a fifth of the time of
compiling them would go to functions that an earlier kernel has. Equal are functions of the same code, options and
argument types that close over equal values and use the same global ones. A function with a shared array of its own
equals no other, as each has its memory.
"""

import functools
import types
import warnings
from importlib import metadata

import numpy as np

# Values of these types are equal if their texts are.
PLAIN = (bool, int, float, str, bytes, type(None), np.generic)


@functools.cache
def share_equal_functions():
    """Have Numba compile one of several equal device functions, from now on.

    The machine code is the same: tests/test_ahead_of_time.py compares it. If Numba's dispatchers are not those known
    here, each function is compiled by itself, which takes longer, and a warning says so.
    """
    from numba.cuda.dispatcher import CUDADispatcher

    compile_now, first = CUDADispatcher.compile_device, {}
    if not is_known(compile_now):
        warnings.warn(
            f"numba-cuda {metadata.version('numba-cuda')} compiles device functions in a way that rlnumba does not "
            "know, so that equal ones are compiled several times. A version that it knows: 0.30",
            RuntimeWarning,
            stacklevel=2,
        )
        return

    @functools.wraps(compile_now)
    def compile_device(dispatcher, args, return_type=None):
        if args not in dispatcher.overloads:
            equal = first.setdefault((function_key(dispatcher), args, return_type), dispatcher)
            if args in equal.overloads:
                dispatcher.overloads[args] = equal.overloads[args]
        return compile_now(dispatcher, args, return_type)

    CUDADispatcher.compile_device = compile_device


def is_known(compile_device):
    """Whether a CUDADispatcher.compile_device takes (args, return_type) and keeps results by args in `overloads`."""
    code = compile_device.__code__
    arguments = code.co_varnames[: code.co_argcount]
    return arguments == ("self", "args", "return_type") and "overloads" in code.co_names


class Same:
    """A key that equals that of the same object alone."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def function_key(value):
    """A hashable key of all that a function's machine code follows from; of other values, value_key."""
    # Numba keeps the function behind a device function in py_func, the one behind an intrinsic in _defn.
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if not isinstance(function, types.FunctionType):
        return value_key(value)
    options = [(name, repr(option)) for name, option in getattr(value, "targetoptions", {}).items()]
    names = names_of(function.__code__)
    if "shared" in names:
        return Same(value)
    return (
        type(value),
        tuple(sorted(options)),
        function.__code__,
        function_key(function.__defaults__),
        tuple(cell_key(cell) for cell in function.__closure__ or ()),
        tuple((name, value_key(function.__globals__[name])) for name in names if name in function.__globals__),
    )


def value_key(value):
    """function_key of a value whose functions are those of a module, which has each of them once."""
    if isinstance(value, tuple):
        return type(value), tuple(function_key(each) for each in value)
    return (type(value), repr(value)) if isinstance(value, PLAIN) else Same(value)


def cell_key(cell):
    """The key of the value in a closure's cell; of the cell itself, if its name was never assigned."""
    try:
        return function_key(cell.cell_contents)
    except ValueError:
        return Same(cell)


def names_of(code):
    """The global names and attributes that a code object uses, those of functions inside of it too."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in names_of(constant)]
    return [*code.co_names, *inner]
