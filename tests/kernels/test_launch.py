"""What a cached kernel is recognised by, and how the driver gets its arguments."""

import ctypes
import importlib.util
import pathlib
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.kernels.nn.reduce import group_mean_std_kernel
from rlnumba.kernels.ptx.warp import griddepcontrol_wait
from rlnumba.runtime import device, launch
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import Parameters, _cache_key, _imported

if device.name() == "sim":
    pytest.skip("nothing is compiled, so nothing is cached", allow_module_level=True)

TYPES = ["float32[::1]"]
KERNEL = """
from rlnumba.runtime.device import cuda

@cuda.jit
def kernel(x):
    x[0] = {value}
"""


def kernel_of(file, value):
    """The kernel of a script that stores `value`."""
    file.write_text(KERNEL.format(value=value))
    spec = importlib.util.spec_from_file_location("script", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def test_an_edited_script_is_compiled_again(tmp_path):
    first, again, other = (kernel_of(tmp_path / f"{name}.py", value) for name, value in (("a", 1), ("b", 1), ("c", 2)))
    assert _cache_key(first, TYPES, (9, 0)) == _cache_key(again, TYPES, (9, 0)) != _cache_key(other, TYPES, (9, 0))


def test_a_kernel_that_was_typed_in_is_compiled_again():
    keys = []
    for value in (1, 1, 2):
        names = {"__name__": "typed"}
        exec(KERNEL.format(value=value), names)
        keys.append(_cache_key(names["kernel"], TYPES, (9, 0)))
    assert keys[0] == keys[1] != keys[2]


def test_types_and_architecture_are_part_of_the_key():
    keys = [(TYPES, (9, 0)), (["uint16[::1]"], (9, 0)), (TYPES, (8, 0))]
    assert len({_cache_key(group_mean_std_kernel, *key) for key in keys}) == 3


def test_what_a_kernel_imports_is_part_of_its_key():
    """An edit of another kernel's module leaves the compiled code of this one alone."""
    kernels = pathlib.Path(launch.__file__).parent.parent / "kernels"
    names = {"/".join(file.parts[-2:]) for file in _imported(kernels / "gemm" / "ops.py")}
    assert {"gemm/sm90.py", "ptx/warp.py", "runtime/launch.py", "nn/swiglu.py"} <= names
    assert "sampling/ops.py" not in names and "gemm/ops.py" not in names


def test_parameters_lie_where_the_driver_looks():
    """As Numba lays arguments out: seven or nine words an array, a scalar in the first bytes of a word."""

    def array(shape, dtype, address):
        # What launch reads of an array of CuPy, whose address a NumPy array does not have.
        host = np.empty(shape, dtype)
        names = ("shape", "strides", "size", "itemsize", "dtype", "ndim")
        return SimpleNamespace(**{name: getattr(host, name) for name in names}, data=SimpleNamespace(ptr=address))

    def found(parameters, kinds):
        pointers = (ctypes.c_void_p * len(kinds)).from_address(parameters.address)
        return [kind.from_address(pointer).value for kind, pointer in zip(kinds, pointers, strict=True)]

    word = ctypes.c_int64
    kinds = [*[word] * 7, ctypes.c_float, *[word] * 9, ctypes.c_int32, ctypes.c_uint32, word]
    for address, scalars in ((4096, (0.5, 3, 2**32 - 1, -7)), (2**40, (-1.5, -3, 1, 2**50))):
        arguments = [array((5,), np.float32, address), np.float32(scalars[0]), array((2, 3), np.uint16, address + 64)]
        arguments += [np.int32(scalars[1]), np.uint32(scalars[2]), scalars[3]]
        if address == 4096:
            parameters = Parameters(arguments)
        ordered = sorted(arguments, key=lambda argument: isinstance(argument, (int, np.number)))
        values = [argument.data.ptr if isinstance(argument, SimpleNamespace) else argument for argument in ordered]
        parameters.write(parameters.slots, 0, *values)
        first, second = [0, 0, 5, 4, address, 5, 4], [0, 0, 6, 2, address + 64, 2, 3, 6, 2]
        assert found(parameters, kinds) == [*first, scalars[0], *second, *scalars[1:]]


@cuda.jit
def count_kernel(x):
    griddepcontrol_wait()
    x[0] += np.int32(1)


@pytest.mark.gpu
@pytest.mark.sm90
def test_what_a_kernel_holds_begins_in_its_turn(monkeypatch):
    early, launch_early = [], launch._launch_early
    monkeypatch.setattr(launch, "_launch_early", lambda *a: early.append(True) or launch_early(*a))
    x, begun_early = device.xp().zeros(1, np.int32), []
    with launch.pdl_scope():
        for holds in (False, True, False, False):
            launch.launch(count_kernel, 1, 1, x, serialize_next=holds)
            begun_early.append(len(early))
    assert begun_early == [1, 2, 2, 3]
    assert int(x[0]) == 4
