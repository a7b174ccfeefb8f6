"""What a cached kernel is recognised by."""

import importlib.util

import pytest

from rlnumba import device
from rlnumba.kernels.launch import _cache_key
from rlnumba.kernels.reduce import group_mean_std_kernel

if device.name() == "sim":
    pytest.skip("nothing is compiled, so nothing is cached", allow_module_level=True)

TYPES = ["float32[::1]"]
KERNEL = """
from rlnumba.device import cuda

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
