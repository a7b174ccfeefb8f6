"""The key of a cached kernel, the layout of its parameters, contexts and programmatic dependent launch."""

import contextlib
import ctypes
import importlib.util
import re
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from rlnumba.errors import DeviceError
from rlnumba.kernels.nn.reduce import group_mean_std_kernel
from rlnumba.kernels.ptx.warp import griddepcontrol_wait
from rlnumba.runtime import device, launch
from rlnumba.runtime.arguments import leaves, parse_type, type_name
from rlnumba.runtime.compile import cache
from rlnumba.runtime.compile.cache import PACKAGE, cache_key, imported_files, sources_digest
from rlnumba.runtime.compile.machine_code import lower
from rlnumba.runtime.context import Context, current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import Parameters
from tests.graph_edges import edges_of
from tests.kernels.sources import kernels_of
from tests.offline import troubles_of

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
    assert cache_key(first, TYPES, (9, 0)) == cache_key(again, TYPES, (9, 0)) != cache_key(other, TYPES, (9, 0))


def test_a_kernel_that_was_typed_in_is_compiled_again():
    keys = []
    for value in (1, 1, 2):
        names = {"__name__": "typed"}
        exec(KERNEL.format(value=value), names)
        keys.append(cache_key(names["kernel"], TYPES, (9, 0)))
    assert keys[0] == keys[1] != keys[2]


def test_types_and_architecture_are_part_of_the_key():
    keys = [(TYPES, (9, 0)), (["uint16[::1]"], (9, 0)), (TYPES, (8, 0))]
    assert len({cache_key(group_mean_std_kernel, *key) for key in keys}) == 3


def test_the_sources_of_a_kernel_are_its_imports():
    names = {"/".join(file.parts[-2:]) for file in imported_files(PACKAGE / "kernels" / "gemm" / "sm90.py")}
    assert {"gemm/epilogue.py", "ptx/warp.py", "runtime/launch.py", "ptx/wgmma.py"} <= names
    assert "sampling/ops.py" not in names and "gemm/ops.py" not in names


TREE = {
    "kernels/softmax/ops.py": "from rlnumba.kernels.nn import rows\nfrom elsewhere import other",
    "kernels/nn/rows.py": "def f():\n    import rlnumba.ptx.warp.shuffle as shuffle",
    "ptx/warp/shuffle.py": "from rlnumba.constants import WARP",
    "ptx/warp/unrelated.py": "",
    "constants/__init__.py": "WARP = 32",
}


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        ("kernels/softmax/ops.py", True),
        ("kernels/nn/rows.py", True),
        ("ptx/warp/shuffle.py", True),
        ("constants/__init__.py", True),
        ("ptx/warp/unrelated.py", False),
    ],
)
def test_a_helper_of_helpers_is_part_of_the_key(tmp_path, monkeypatch, edited, changes):
    """The kernel's file imports rows, which imports shuffle two packages away, which imports a package."""
    digests = []
    for version in ("first", "second"):
        package = tmp_path / version / "rlnumba"
        for name, text in TREE.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text + ("\n# edited" if (version, name) == ("second", edited) else ""))
        monkeypatch.setattr(cache, "PACKAGE", package)
        digests.append(sources_digest(str(package / "kernels" / "softmax" / "ops.py")))
    assert (digests[0] != digests[1]) == changes


def test_a_context_owns_one_object_of_each_kind():
    first, second = Context(), Context()
    with first.use():
        mine = current().own(dict)
        with second.use():
            assert current() is second and second.own(dict) is not mine
        assert current() is first and current().own(dict) is mine and first.own(list, (1,)) == [1]
    assert current() not in (first, second)


def test_a_thread_has_contexts_of_its_own():
    found = []
    with Context().use():
        thread = threading.Thread(target=lambda: found.extend((current(), current())))
        thread.start()
        thread.join()
        assert found[0] is found[1] is not current()


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


class Pair(NamedTuple):
    x: object
    y: object


class Nested(NamedTuple):
    """Arrays and scalars, some in a NamedTuple."""

    scale: object
    pair: object
    n: object


@cuda.jit
def nested_kernel(arguments, out):
    i = cuda.threadIdx.x
    if i < arguments.n:
        out[i] = arguments.scale * arguments.pair.x[i] + arguments.pair.y[i, 0]


@cuda.jit
def flat_kernel(scale, x, y, n, out):
    i = cuda.threadIdx.x
    if i < n:
        out[i] = scale * x[i] + y[i, 0]


def nested_arguments(xp):
    x, y = xp.arange(4, dtype=np.float32), xp.full((4, 2), 5, np.int32)
    return Nested(2.0, Pair(x, y), np.int32(3)), xp.zeros(4, np.float32)


def test_the_type_of_a_named_tuple_has_its_class_and_the_types_of_its_fields():
    arguments, out = nested_arguments(np)
    name = type_name(arguments)
    assert name == f"{__name__}:Nested(float32;{__name__}:Pair(float32[::1];int32[:,::1]);int32)"
    typed = parse_type(name)
    assert typed.instance_class is Nested and typed.types[1].instance_class is Pair
    assert [str(part) for part in typed.types[1].types] == [
        str(parse_type(n)) for n in ("float32[::1]", "int32[:,::1]")
    ]
    alike = parse_type(type_name(Pair(np.int32(1), np.int32(2))))
    assert alike.instance_class is Pair and alike.count == 2
    assert [id(leaf) for leaf in leaves([arguments, out])] == list(
        map(id, (arguments.scale, *arguments.pair, arguments.n, out))
    )


def test_fields_of_a_named_tuple_are_the_parameters_of_the_machine_code():
    """The PTX is that of the kernel with an argument for each field."""
    arguments, out = nested_arguments(np)
    texts = []
    for kernel, given in ((nested_kernel, [arguments, out]), (flat_kernel, [*leaves([arguments, out])])):
        text = lower(kernel, tuple(map(type_name, given)), (9, 0)).get_asm_str(cc=(9, 0))
        # Mangled names have the kernel's name and its types.
        texts.append(re.sub(r"_Z\w+?(?=_param|\W)", "name", text))
    assert texts[0] == texts[1] and "name_param_24" in texts[0]


@pytest.mark.gpu
def test_a_kernel_reads_the_fields_of_a_named_tuple():
    arguments, out = nested_arguments(device.xp())
    for n in (3, 2):
        out[...] = 0
        launch.launch(nested_kernel, 1, 4, arguments._replace(n=np.int32(n)), out)
        assert out.tolist() == [5.0, 7.0, 9.0 * (n > 2), 0.0]
    with pytest.raises(ValueError, match="nested_kernel: arrays must be C-contiguous"):
        launch.launch(nested_kernel, 1, 4, arguments._replace(pair=Pair(out, arguments.pair.y.T)), out)
    with pytest.raises(TypeError, match="nested_kernel: neither an array of CuPy"):
        launch.launch(nested_kernel, 1, 4, arguments, np.zeros(4, np.float32))


# Arguments of a kernel at most: more are groups that have a name.
MOST_ARGUMENTS = 10


def test_no_kernel_has_many_arguments():
    kernels = [kernel for path in (PACKAGE / "kernels").rglob("*.py") for kernel in kernels_of(path)]
    assert len(kernels) > 60
    counts = {kernel.name: len(kernel.args.args) for kernel in kernels}
    assert {name: count for name, count in counts.items() if count > MOST_ARGUMENTS} == {}


@launch.supports_pdl
@cuda.jit
def count_kernel(x):
    griddepcontrol_wait()
    x[0] += np.int32(1)


@cuda.jit
def undeclared_kernel(x):
    x[0] += np.int32(1)


@cuda.jit
def copy_first_kernel(out, x):
    out[0, 0] = x[0, 0]


def test_a_kernel_declares_its_wait(compile_offline):
    """The PTX is compared with @supports_pdl, both ways; the wait of `hidden` is in a device function's closure."""

    @cuda.jit(device=True)
    def wait():
        griddepcontrol_wait()

    @cuda.jit
    def hidden(x):
        wait()
        x[0] += np.int32(1)

    @launch.supports_pdl
    @cuda.jit
    def wrong(x):
        x[0] += np.int32(1)

    def troubles(kernel):
        return troubles_of(kernel, ["int32[::1]"], (9, 0))

    assert not troubles(count_kernel) and not troubles(undeclared_kernel)
    (missing,), (too_much,) = troubles(hidden), troubles(wrong)
    assert "waits, but lacks @supports_pdl" in missing and "does not wait, but has" in too_much
    assert not troubles(launch.supports_pdl(hidden))


@pytest.mark.skipif(device.name() != "cpu", reason="other devices run kernels")
def test_the_cpu_device_refuses_kernels():
    with pytest.raises(DeviceError, match="count_kernel: .*; set NUMBA_ENABLE_CUDASIM=1 or RLNUMBA_DEVICE=sim before"):
        launch.launch(count_kernel, 1, 1, np.zeros(1, np.int32))


@pytest.mark.gpu
def test_an_array_that_is_not_contiguous_is_refused():
    """Of a shape that was launched before, too: its strides would be those of the first array."""
    x = device.xp().zeros((4, 4), np.int32)
    launch.launch(copy_first_kernel, 1, 1, x, x)
    with pytest.raises(ValueError, match=r"copy_first_kernel: arrays must be C-contiguous, got shape \(4, 4\)"):
        launch.launch(copy_first_kernel, 1, 1, x, x.T)


@pytest.mark.gpu
@pytest.mark.sm90
def test_serialize_next_launches_the_next_kernel_of_its_stream_without_pdl():
    xp = device.xp()
    x, context = xp.zeros(1, np.int32), Context(xp.cuda.Stream(non_blocking=True))
    other = xp.cuda.Stream(non_blocking=True)
    device.synchronize()
    with context.use():
        launch.launch(count_kernel, 1, 1, x)
        with other:
            # Another stream's next kernel.
            launch.launch(count_kernel, 1, 1, xp.zeros(1, np.int32), serialize_next=True)
        device.synchronize()
        context.stream.begin_capture()
        with launch.pdl_scope():
            for serialize_next in (False, True, False, False):
                launch.launch(count_kernel, 1, 1, x, serialize_next=serialize_next)
            launch.launch(undeclared_kernel, 1, 1, x)
        graph = context.stream.end_capture()
        graph.launch()
        device.synchronize()
    edges = edges_of(graph)
    assert sorted(edge.is_programmatic for edge in edges) == [False, False, True, True]
    assert [edge.is_programmatic for edge in edges if "undeclared_kernel" in edge.target] == [False]
    assert int(x[0]) == 6


@launch.supports_pdl
@cuda.jit
def add_kernel(x, value):
    griddepcontrol_wait()
    x[cuda.threadIdx.x] += value


@pytest.mark.gpu
@pytest.mark.parametrize("scope", [contextlib.nullcontext, launch.pdl_scope], ids=["stream order", "pdl"])
def test_threads_launch_in_contexts_of_their_own(scope):
    """The same kernel and shapes from two threads: each launch has the arguments of its thread."""
    xp = device.xp()
    arrays = [xp.zeros(256, np.float32) for _ in range(2)]
    device.synchronize()

    def add(thread):
        with Context(xp.cuda.Stream(non_blocking=True)).use(), scope():
            for _ in range(2000):
                launch.launch(add_kernel, 1, 256, arrays[thread], float(thread + 1))
            device.synchronize()

    threads = [threading.Thread(target=add, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(array.min()) for array in arrays] == [float(array.max()) for array in arrays] == [2000.0, 4000.0]


@cuda.jit
def slow_kernel(x):
    for _ in range(100_000):
        x[0] += np.int32(1)
        cuda.threadfence()


@pytest.mark.gpu
def test_a_context_waits_for_another():
    xp = device.xp()
    writer, reader = (Context(xp.cuda.Stream(non_blocking=True)) for _ in range(2))
    x, copy = xp.zeros(1, np.int32), xp.zeros(1, np.int32)
    device.synchronize()
    with writer.use():
        launch.launch(slow_kernel, 1, 1, x)
    reader.wait_for(writer)
    with reader.use():
        xp.copyto(copy, x)
        device.synchronize()
    assert int(copy[0]) == 100_000
