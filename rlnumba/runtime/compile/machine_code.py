"""Machine code of a kernel for given argument types: from the cache on disk, else compiled.

    machine_code(kernel, type_names, capability)      compiles for any GPU; none need be here
    load(kernel, type_names)                          the kernel on this process's GPU

Other processes may compile ahead of time what this one is going to launch: see runtime/compile/ahead_of_time.py.
"""

import contextlib
import functools
from unittest import mock

from rlnumba.errors import DeviceError
from rlnumba.runtime import device
from rlnumba.runtime.arguments import parse_type
from rlnumba.runtime.compile import ahead_of_time, cache, mlir
from rlnumba.runtime.compile.equal_functions import share_equal_functions
from rlnumba.runtime.compile.operator_types import remember_operators


def check_compiler():
    """Raise DeviceError where NVIDIA's compiler is not installed, which only the extras of the package install."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for library in ("nvvm", "nvrtc"):
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError:
            remedy = "pip install 'rlnumba[cuda12]' or 'rlnumba[cuda13]'"
            raise DeviceError(f"kernels cannot be compiled: lib{library} is not installed; {remedy}") from None


def machine_code(kernel, type_names, capability):
    """A kernel compiled for GPUs of a compute capability such as (9, 0): (entry point's name, cubin), str and bytes."""
    # Numba's own launch asks for the features of just this architecture, wgmma among them, in the same way.
    target = (*capability, "a" if capability >= (9, 0) else "")
    if device.compiler() == "mlir":
        entry, _, cubin = mlir.compile_kernel(kernel, tuple(type_names), target)
        return entry, cubin
    library = lower(kernel, tuple(type_names), capability)
    # Link-time optimization is cuda.jit's default where nvJitLink is installed.
    library._lto = kernel.targetoptions.get("lto", False)
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
        # In the lock, because they change Numba's registries, as compilations in other threads do.
        remember_operators()
        share_equal_functions()
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
    path = cache.cache_path(kernel, type_names, capability)
    found = cache.read(path)
    if found is None and ahead_of_time.wait_for(path):
        found = cache.read(path)
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


def compile_to_cache(kernel, type_names, capability):
    """machine_code, written to the cache: (entry point's name, cubin), bytes both.

    Where another process compiles the same kernel at the moment, as the ranks of a run do, its result.
    """
    path = cache.cache_path(kernel, type_names, capability)
    with cache.compiled_by_one(path):
        if found := cache.read(path):
            return found
        entry, code = machine_code(kernel, type_names, capability)
        cache.write(path, entry.encode() + b"\0" + code)
    return entry.encode(), code
