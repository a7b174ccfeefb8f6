"""Compile a kernel, keep the machine code, launch it.

`launch(kernel, grid, block, *arguments)` is the only way an operator starts a kernel. On the GPU it
bypasses Numba's own launch, which costs 75-120 us of host time with CuPy arrays: the arguments are
packed into a reused buffer and handed to the driver directly (about 6 us). Kernels run on CuPy's current
stream and may be captured in a graph; inside `pdl_scope` one may begin before the one ahead has ended. In the
simulator `launch` hands them to simulator.run. A process works on one GPU.

Machine code is cached on disk (RLNUMBA_CACHE_DIR, default ~/.cache/rlnumba) under a hash of the sources
of the kernel's file and of every module of this package that it imports, its name and the values it closes over, the
argument
types, the architecture and the versions of the compilers. A file appears under its final name only when complete, so
processes that start together do not disturb each other.

RLNUMBA_DEBUG=1 waits for each kernel and reports an error where it happened; 2 prints each kernel's
time, the bytes of its arguments, and the share of a plain copy's bandwidth that this makes.
"""

import ast
import contextlib
import ctypes
import functools
import hashlib
import json
import marshal
import os
import pathlib
import struct
import sys
import tempfile
from importlib.metadata import version

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import device
from rlnumba.runtime.context import current

DEBUG = int(os.environ.get("RLNUMBA_DEBUG") or 0)
# A block gets more dynamic shared memory than this only after asking the driver once.
DEFAULT_SHARED_LIMIT = 48 * 1024

_SCALARS = frozenset((int, bool, float, np.int32, np.uint32, np.int64, np.float32))

_compiled = {}
# Called with (kernel, type names) for each launch in the simulator; tests use it to learn every signature
# that the operators use, and compile each for real GPUs without one.
observers = []

# A kernel that calls this function by name may begin before the one before it has ended.
WAIT = "griddepcontrol_wait"
# For launch(pdl=): outside of `pdl_scope`, too.
ALWAYS = "always"


@contextlib.contextmanager
def pdl_scope():
    """Launches inside may begin while the kernel before them still runs, if they call griddepcontrol_wait.

    Those kernels may read arrays ahead of that wait, such as weights, which nothing launched inside may write, unless
    it is launched with serialize_next. Meant for the capture of graphs of many short kernels. GPUs before Hopper run
    one
    kernel after the other, as outside.
    """
    context = current()
    before, context.pdl = context.pdl, True
    try:
        yield
    finally:
        context.pdl = before


def specialize(make):
    """Decorator for a function that makes a kernel for given constants: made once for each, and told apart.

    The constants are hashable and can be pickled. kernel.py_func.made_with keeps them.
    """

    @functools.cache
    def cached(*constants):
        kernel = make(*constants)
        kernel.py_func.made_with = constants
        return kernel

    return functools.wraps(make)(cached)


def type_name(argument):
    """The Numba type of a kernel argument, as text: "float32[:,::1]", "uint16[::1]", "int64", ..."""
    if isinstance(argument, (int, np.int64)):
        return "int64"
    if isinstance(argument, float):
        return "float32"
    if isinstance(argument, (np.float32, np.int32, np.uint32)):
        return argument.dtype.name
    element = "uint16" if argument.dtype.name == "bfloat16" else argument.dtype.name
    return f"{element}[{':,' * (argument.ndim - 1)}::1]"


def parse_type(name):
    """The Numba type that a text of type_name() stands for."""
    from numba.cuda import types

    element, _, layout = name.partition("[")
    numba_type = getattr(types, element)
    return numba_type if not layout else types.Array(numba_type, layout.count(":") - 1, "C")


class Compiled:
    """A kernel for one tuple of argument types, loaded and ready to launch."""

    def __init__(self, kernel, type_names):
        self.name = kernel.py_func.__name__
        self.handle = _load(kernel, type_names)
        self.address = int(self.handle)
        self.waits = WAIT in kernel.py_func.__code__.co_names + kernel.py_func.__code__.co_freevars
        self.shared_limit = DEFAULT_SHARED_LIMIT

    def allow_shared(self, nbytes):
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuFuncSetAttribute(self.handle, attribute, nbytes)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"kernel {self.name}: {nbytes} bytes of shared memory refused ({error.name})")
        self.shared_limit = nbytes


class Parameters:
    """The memory from which the driver takes a kernel's parameters, for arguments of given types and shapes.

    Numba passes an array as meminfo, parent, size, itemsize, data, shape..., strides...; a scalar as itself. Each of
    these has a slot of eight bytes, and the driver takes an array of the slots' addresses. What follows from types
    and shapes is written once; what a launch changes stands in front, so that write(slots, 0, *addresses of the arrays,
    *scalars) is all that it has to do.
    """

    FORMATS = {"float32": "f4x", "int32": "i4x", "uint32": "I4x", "int64": "q"}

    def __init__(self, arguments):
        scalars = [argument for argument in arguments if type(argument) in _SCALARS]
        arrays = len(arguments) - len(scalars)
        formats = [self.FORMATS[type_name(scalar)] for scalar in scalars]
        self.write = struct.Struct("".join([f"{arrays}Q", *formats])).pack_into
        # The slots, and for each of the driver's parameters the place of its slot.
        words, places, next_array, next_scalar = [0] * len(arguments), [], 0, arrays
        for argument in arguments:
            if type(argument) in _SCALARS:
                places.append(next_scalar)
                next_scalar += 1
            else:
                before, after = (0, 0, argument.size, argument.itemsize), (*argument.shape, *argument.strides)
                end = len(words) + len(before)
                places += [*range(len(words), end), next_array, *range(end, end + len(after))]
                words += before + after
                next_array += 1
        self.slots = (ctypes.c_int64 * max(len(words), 1))(*words)
        base = ctypes.addressof(self.slots)
        self.pointers = (ctypes.c_void_p * max(len(places), 1))(*(base + 8 * place for place in places))
        self.address = ctypes.addressof(self.pointers)


# (kernel, shapes and types) -> (Compiled, Parameters). Emptied when it has grown to MOST_PARAMETERS.
_prepared = {}
MOST_PARAMETERS = 1 << 14


def _prepare(kernel, key, arguments):
    types = (kernel, *map(type_name, arguments))
    compiled = _compiled.get(types)
    if compiled is None:
        compiled = _compiled[types] = Compiled(kernel, types[1:])
    if len(_prepared) == MOST_PARAMETERS:
        _prepared.clear()
    prepared = _prepared[key] = compiled, Parameters(arguments)
    return prepared


def launch(kernel, grid, block, *arguments, shared=0, pdl=True, serialize_next=False):
    """Run `kernel`, a @cuda.jit function, on a grid of blocks; returns at once on the GPU.

    grid, block: an int or a tuple of up to three. arguments: C-contiguous arrays of the device, Python int
    (int64 in the kernel), Python float (float32), np.int32, np.uint32, np.float32. shared: bytes of dynamic
    shared memory. pdl: whether the kernel may be launched with programmatic dependent launch inside `pdl_scope`;
    ALWAYS:
    outside of it, too, because the kernel touches no memory before griddepcontrol_wait. serialize_next: launch the next
    kernel without PDL, so that later kernels may read this output before their griddepcontrol_wait. An empty grid
    launches nothing. Raises DeviceError with the kernel's name.
    """
    grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    block = (block, 1, 1) if isinstance(block, int) else (*block, 1, 1)[:3]
    if 0 in grid:
        return
    if device.name() == "sim":
        _simulate(kernel, grid, block, arguments, shared)
        return
    # One flat key and one call that packs: each tuple or view less is a tenth of a microsecond.
    key, addresses, scalars = [kernel], [], []
    for argument in arguments:
        kind = type(argument)
        if kind in _SCALARS:
            key.append(kind)
            scalars.append(argument)
        else:
            key.append(argument.shape)
            key.append(argument.dtype)
            addresses.append(argument.data.ptr)
    key = tuple(key)
    prepared = _prepared.get(key)
    compiled, parameters = _prepare(kernel, key, arguments) if prepared is None else prepared
    parameters.write(parameters.slots, 0, *addresses, *scalars)
    if shared > compiled.shared_limit:
        compiled.allow_shared(shared)
    current_stream, launch_kernel, errors = _driver()
    stream, context = current_stream(), current()
    try:
        if DEBUG and not stream.is_capturing():
            begin = _now(stream)
        if pdl and compiled.waits and (context.pdl or pdl is ALWAYS) and not context.serialize_next:
            _launch_with_pdl(compiled, parameters, grid, block, shared, stream)
        else:
            launch_kernel(compiled.address, *grid, *block, shared, stream.ptr, parameters.address, 0)
        context.serialize_next = serialize_next
        # A stream that captures a graph does no work to wait for.
        if DEBUG and not stream.is_capturing():
            end = _now(stream)
            stream.synchronize()
            if DEBUG > 1:
                _report(compiled.name, begin, end, arguments)
    except errors as error:
        what = f"kernel {compiled.name}, grid {grid}, block {block}, {shared} bytes shared"
        raise DeviceError(f"{what}: {error}") from error


@functools.cache
def _driver():
    """(CuPy's current stream, its launch, and what it raises): looked up once, not each time.

    The launch of cuda.bindings takes half a microsecond more.
    """
    import cupy
    from cupy.cuda import driver, runtime

    return cupy.cuda.get_current_stream, driver.launchKernel, (driver.CUDADriverError, runtime.CUDARuntimeError)


def _now(stream):
    """An event at this place of a stream."""
    import cupy

    event = cupy.cuda.Event()
    event.record(stream)
    return event


def _report(name, begin, end, arguments):
    """Print a kernel's time between two events, its arguments' bytes, and their share of a copy's bandwidth."""
    import cupy

    time_us = cupy.cuda.get_elapsed_time(begin, end) * 1e3
    nbytes = sum(a.nbytes for a in arguments if type(a) not in _SCALARS)
    share = nbytes / time_us / 1e3 / _copy_gbs()
    print(f"{name:36} {time_us:10.1f} us  {nbytes / 1e6:10.3f} MB  {share:6.1%} of a copy", flush=True)


@functools.cache
def _pdl_config():
    """A CUlaunchConfig for kernels that may begin before the one ahead has ended, but for the sizes and the stream."""
    from cuda.bindings import driver

    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _launch_with_pdl(compiled, parameters, grid, block, shared, stream):
    """Launch a kernel that may begin before the one before it has ended."""
    from cuda.bindings import driver

    config = _pdl_config()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = shared, stream.ptr
    (error,) = driver.cuLaunchKernelEx(config, compiled.handle, parameters.address, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        _, _, (refused, _) = _driver()
        raise refused(int(error))


@functools.cache
def _copy_gbs():
    """Bytes read and written a nanosecond by a copy on this device: what a kernel's arguments are held against.

    A kernel that reads some of its arguments only in part, or the cache's content, may exceed it.
    """
    import cupy

    source = cupy.zeros(1 << 28, np.uint8)
    target = cupy.empty_like(source)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    cupy.copyto(target, source)
    begin.record()
    cupy.copyto(target, source)
    end.record()
    end.synchronize()
    return 2 * source.nbytes / (cupy.cuda.get_elapsed_time(begin, end) * 1e6)


def _simulate(kernel, grid, block, arguments, shared):
    for observer in observers:
        observer(kernel, tuple(type_name(a) for a in arguments))
    from rlnumba.runtime import simulator

    visible = []
    for a in arguments:
        if isinstance(a, np.ndarray) and a.dtype.name == "bfloat16":
            a = a.view(np.uint16)
        elif isinstance(a, float):
            a = np.float32(a)
        visible.append(a)
    simulator.run(kernel.py_func, grid, block, shared, visible)


def _load(kernel, type_names):
    """The driver's handle of a kernel's machine code, from the disk cache or freshly compiled."""
    from cuda.bindings import driver
    from numba.cuda.api import get_current_device

    capability = get_current_device().compute_capability
    path = _cache_folder() / f"{_cache_key(kernel, type_names, capability)}.cubin"
    try:
        entry, code = path.read_bytes().split(b"\0", 1)
    except FileNotFoundError:
        entry, code = _compile(kernel, type_names)
        _write_once(path, entry + b"\0" + code)
    error, library = driver.cuLibraryLoadData(code, [], [], 0, [], [], 0)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, handle = driver.cuLibraryGetKernel(library, entry)
    if error == driver.CUresult.CUDA_SUCCESS:
        # A launch of the CUkernel itself takes half a microsecond more.
        error, handle = driver.cuKernelGetFunction(handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"kernel {kernel.py_func.__name__}: its machine code does not load ({error.name})")
    return handle


def _compile(kernel, type_names):
    compiled = kernel.compile(tuple(parse_type(name) for name in type_names))
    return compiled.entry_name.encode(), bytes(compiled.library.get_cubin().code)


def _cache_folder():
    folder = os.environ.get("RLNUMBA_CACHE_DIR")
    return pathlib.Path(folder) if folder else pathlib.Path.home() / ".cache" / "rlnumba"


def _write_once(path, content):
    """Write a cache file under a temporary name and rename it; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        return


@functools.cache
def _imported(source):
    """The modules of this package that a Python file imports, as files."""
    package, _, _ = __name__.partition(".")
    root = pathlib.Path(sys.modules[package].__file__).resolve().parent.parent
    names = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    modules = [root.joinpath(*name.split(".")) for name in names if name.split(".")[0] == package]
    files = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
    return {file for file in files if file.exists()}


@functools.cache
def _sources_digest(file_name):
    """Digest of a kernel's file and of every module of this package that it reaches through imports."""
    sources, new = set(), {pathlib.Path(file_name).resolve()}
    while new:
        sources |= new
        new = {file for source in new for file in _imported(source)} - sources
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cache_key(kernel, type_names, capability):
    code = kernel.py_func.__code__
    typed_in = not os.path.isfile(code.co_filename)
    parts = [
        marshal.dumps(code).hex() if typed_in else None,
        _sources_digest(__file__ if typed_in else code.co_filename),
        _identity(kernel),
        list(type_names),
        list(capability),
        sorted((key, repr(value)) for key, value in kernel.targetoptions.items()),
        [version(package) for package in ("numba", "numba-cuda", "llvmlite")],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _identity(value):
    """What tells a kernel from others made by the same source lines: the values it closes over."""
    # Numba keeps the function behind a kernel in py_func, the one behind an intrinsic in _defn.
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if callable(function) and hasattr(function, "__qualname__"):
        cells = getattr(function, "__closure__", None) or ()
        return [function.__module__, function.__qualname__, [_identity(cell.cell_contents) for cell in cells]]
    return repr(value)
