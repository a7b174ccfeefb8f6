"""Machine code of a kernel for given argument types: from the cache on disk, else compiled.

    machine_code(kernel, type_names, capability)      compiles for any GPU; none need be here
    load(kernel, type_names)                          the kernel on this process's GPU

Other processes may compile ahead of time what this one is going to launch: see runtime/ahead_of_time.py.

The cache (RLNUMBA_CACHE_DIR, default ~/.cache/rlnumba) names a file by a hash of the kernel's source file and of every
module of this package that it imports, directly or through others; of the kernel's name, the values it closes over and
its argument types; of the architecture and the versions of the compilers. Processes may fill it at the same time.
"""

import ast
import contextlib
import functools
import hashlib
import json
import marshal
import os
import pathlib
import tempfile
import time
from importlib.metadata import version
from unittest import mock

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime import ahead_of_time, device

# A file's time is that of its last use, to a day; one that was not used for so many days is removed.
DAY_S, UNUSED_DAYS = 24 * 3600, 60
# The folder of this package, the sources of which are followed.
PACKAGE = pathlib.Path(__file__).resolve().parent.parent


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


def machine_code(kernel, type_names, capability):
    """A kernel compiled for GPUs of a compute capability such as (9, 0): (entry point's name, cubin), str and bytes."""
    library = lower(kernel, tuple(type_names), capability)
    # Link-time optimization is cuda.jit's default where nvJitLink is installed.
    library._lto = kernel.targetoptions.get("lto", False)
    # Numba's own launch asks for the features of just this architecture, wgmma among them, in the same way.
    target = (*capability, "a" if capability >= (9, 0) else "")
    return library._entry_name, bytes(library.get_cubin(cc=target).code)


@contextlib.contextmanager
def targeting(capability):
    """Inside, Numba finds a GPU of this compute capability where one device function calls another."""
    import numba.cuda.dispatcher

    gpu = type("Device", (), {"compute_capability": capability})
    with mock.patch.object(numba.cuda.dispatcher, "get_current_device", gpu):
        yield


@functools.lru_cache(maxsize=8)
def lower(kernel, type_names, capability):
    """Numba's code library of a kernel: its LLVM IR, from which NVVM writes PTX for any architecture.

    Type inference and lowering take four fifths of the time of a compilation.
    """
    from numba.cuda.compiler import _compile_pyfunc_with_fixup
    from numba.cuda.core.compiler_lock import global_compiler_lock

    options = kernel.targetoptions
    with global_compiler_lock, targeting(capability):
        library, _ = _compile_pyfunc_with_fixup(
            kernel.py_func,
            tuple(parse_type(name) for name in type_names),
            device=False,
            abi="numba",
            fastmath=options.get("fastmath", False),
            cc=capability,
            launch_bounds=options.get("launch_bounds"),
        )
    return library


def load(kernel, type_names):
    """The driver's CUfunction of a kernel for a tuple of type names. Raises DeviceError."""
    import cupy
    from cuda.bindings import driver

    # CuPy creates the primary context, which Numba then shares.
    cupy.cuda.Device().use()
    capability = device.properties().capability
    path = cache_path(kernel, type_names, capability)
    found = read_cache(path)
    if found is None and ahead_of_time.started_for(path):
        found = read_cache(path)
    entry, code = found or compile_to_cache(kernel, type_names, capability)
    error, library = driver.cuLibraryLoadData(code, [], [], 0, [], [], 0)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, handle = driver.cuLibraryGetKernel(library, entry)
    if error == driver.CUresult.CUDA_SUCCESS:
        # A launch of the CUkernel itself takes half a microsecond more.
        error, handle = driver.cuKernelGetFunction(handle)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"kernel {kernel.py_func.__name__}: its machine code does not load ({error.name})")
    return handle


def cache_path(kernel, type_names, capability):
    """The file of the cache for a kernel, whether it is there or not."""
    return cache_folder() / f"{cache_key(kernel, type_names, capability)}.cubin"


def cache_folder():
    """The folder of the cache: Path."""
    return pathlib.Path(os.environ.get("RLNUMBA_CACHE_DIR") or pathlib.Path.home() / ".cache" / "rlnumba")


def read_cache(path):
    """(entry point's name, cubin) of a file of the cache, bytes both, or None where there is none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY_S:
            os.utime(path)
    return content.split(b"\0", 1)


def prune_cache():
    """Remove the files of the cache that no process has read for UNUSED_DAYS, as after a change of the sources."""
    with contextlib.suppress(OSError):
        for path in cache_folder().iterdir():
            if time.time() - path.stat().st_mtime > UNUSED_DAYS * DAY_S:
                path.unlink(missing_ok=True)


def compile_to_cache(kernel, type_names, capability):
    """machine_code, written to the cache: (entry point's name, cubin), bytes both."""
    entry, code = machine_code(kernel, type_names, capability)
    _write_once(cache_path(kernel, type_names, capability), entry.encode() + b"\0" + code)
    return entry.encode(), code


def _write_once(path, content):
    """Write a cache file under a temporary name and rename it; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)


def cache_key(kernel, type_names, capability):
    """Hash of all that a kernel's machine code follows from: str."""
    code = kernel.py_func.__code__
    has_file = os.path.isfile(code.co_filename)
    options = sorted((key, repr(value)) for key, value in kernel.targetoptions.items())
    versions = [version(package) for package in ("numba", "numba-cuda", "llvmlite")]
    sources = sources_digest(code.co_filename if has_file else __file__)
    parts = [None if has_file else marshal.dumps(code).hex(), sources, _identity(kernel)]
    parts += [list(type_names), list(capability), options, versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def sources_digest(file_name):
    """Digest of a kernel's file and of every module of this package that it reaches through imports: str."""
    sources, new = set(), {pathlib.Path(file_name).resolve()}
    while new:
        sources |= new
        new = {file for source in new for file in imported_files(source)} - sources
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(sources))).hexdigest()


@functools.cache
def imported_files(source):
    """The files of the modules of this package that a Python file imports anywhere in it: set of Path."""
    names = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    modules = [PACKAGE.parent.joinpath(*name.split(".")) for name in names if name.split(".")[0] == PACKAGE.name]
    files = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
    return {file for file in files if file.exists()}


def _identity(value):
    """What distinguishes kernels made by the same source lines: the values they close over."""
    # Numba keeps the function behind a kernel in py_func, the one behind an intrinsic in _defn.
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if callable(function) and hasattr(function, "__qualname__"):
        cells = getattr(function, "__closure__", None) or ()
        return [function.__module__, function.__qualname__, [_identity(_content(cell)) for cell in cells]]
    return repr(value)


def _content(cell):
    """What a closure's cell holds; None where its name was never assigned, in a branch that a factory did not take."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
