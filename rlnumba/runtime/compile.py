"""Machine code of a kernel for given argument types: from the cache on disk, else compiled.

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
from importlib.metadata import version

import numpy as np

from rlnumba.errors import DeviceError

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


def load(kernel, type_names):
    """The driver's CUfunction of a kernel for a tuple of type names. Raises DeviceError."""
    import cupy
    from cuda.bindings import driver

    # CuPy creates the primary context, which Numba then shares.
    cupy.cuda.Device().use()
    from numba.cuda.api import get_current_device

    folder = pathlib.Path(os.environ.get("RLNUMBA_CACHE_DIR") or pathlib.Path.home() / ".cache" / "rlnumba")
    path = folder / f"{cache_key(kernel, type_names, get_current_device().compute_capability)}.cubin"
    try:
        entry, code = path.read_bytes().split(b"\0", 1)
    except FileNotFoundError:
        compiled = kernel.compile(tuple(parse_type(name) for name in type_names))
        entry, code = compiled.entry_name.encode(), bytes(compiled.library.get_cubin().code)
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
