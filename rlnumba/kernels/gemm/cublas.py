"""GEMM by cuBLAS through ctypes, with a handle and a workspace for each context.

CuPy refuses its cuBLAS calls while a stream captures a graph; cuBLAS itself does not. The library is the one
installed with CuPy or the CUDA wheels, the stream is CuPy's current one, and nothing is allocated in a call.
cuBLAS picks a kernel by the shape, so the bits of a row may depend on how many rows there are.
"""

import ctypes

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# NVIDIA's advice for Hopper. Passed explicitly: cuBLAS's own pool may allocate during a capture.
WORKSPACE_BYTES = 32 << 20
ADDENDS_THREADS = 256

# library_types.h and cublas_api.h
CUDA_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, device.DTYPES["bfloat16"]: 14}
COMPUTE_32F = 68
ALGORITHM_DEFAULT = -1
DISALLOW_REDUCED_PRECISION_REDUCTION = 16

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_SIGNATURES = {
    "cublasCreate_v2": [ctypes.POINTER(_pointer)],
    "cublasSetMathMode": [_pointer, _int],
    "cublasSetStream_v2": [_pointer, _pointer],
    "cublasSetWorkspace_v2": [_pointer, _pointer, ctypes.c_size_t],
    "cublasGemmEx": [_pointer, _int, _int, _int, _int, _int]
    + [_pointer, _pointer, _int, _int, _pointer, _int, _int]
    + [_pointer, _pointer, _int, _int, _int, _int],
}


class Cublas:
    """A context's cuBLAS handle on the current GPU."""

    def __init__(self):
        import cupy
        from cuda.pathfinder import load_nvidia_dynamic_lib

        self.library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        for name, arguments in _SIGNATURES.items():
            getattr(self.library, name).argtypes = arguments
        self.current_stream = cupy.cuda.get_current_stream
        self.workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self.stream = None
        self.alpha = ctypes.c_float(1.0)
        self.beta = {False: ctypes.c_float(0.0), True: ctypes.c_float(1.0)}
        self.handle = _pointer()
        self._call("cublasCreate_v2", ctypes.byref(self.handle))
        # No 16-bit partial sums where cuBLAS splits K. GEMMs of float32 stay float32: tf32 is opt-in.
        self._call("cublasSetMathMode", self.handle, DISALLOW_REDUCED_PRECISION_REDUCTION)

    def gemm(self, a, a_transposed, b, b_transposed, out, accumulate):
        """out = (or += if accumulate) op(a) op(b), with op(a) = a^T if a_transposed else a, likewise b; no side zero.

        Sums are float32. Raises DeviceError with the name of the call that failed.
        """
        m, n = out.shape
        k = a.shape[0] if a_transposed else a.shape[1]
        self._follow_stream()
        # A C-contiguous matrix is its transpose in cuBLAS's column order: out^T = op(b)^T op(a)^T.
        self._call(
            "cublasGemmEx",
            *(self.handle, int(b_transposed), int(a_transposed), n, m, k, ctypes.byref(self.alpha)),
            *(b.data.ptr, CUDA_TYPES[b.dtype], b.shape[1], a.data.ptr, CUDA_TYPES[a.dtype], a.shape[1]),
            *(ctypes.byref(self.beta[accumulate]), out.data.ptr, CUDA_TYPES[out.dtype], n),
            *(COMPUTE_32F, ALGORITHM_DEFAULT),
        )

    def _follow_stream(self):
        stream = self.current_stream().ptr
        if stream != self.stream:
            self._call("cublasSetStream_v2", self.handle, stream)
            # Setting the stream takes the workspace back to cuBLAS's own pool.
            self._call("cublasSetWorkspace_v2", self.handle, self.workspace.data.ptr, WORKSPACE_BYTES)
            self.stream = stream

    def _call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status:
            self.library.cublasGetStatusName.restype = ctypes.c_char_p
            raise DeviceError(f"{name} failed: {self.library.cublasGetStatusName(status).decode()} ({status})")


@cuda.jit
def addends_kernel(bias, residual, out):
    """out = bias + residual, to which cuBLAS then adds; either may have no elements. A block owns a row."""
    row = cuda.blockIdx.x
    for column in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        value = np.float32(0.0)
        if bias.shape[0] > 0:
            value += widen(bias[column])
        if residual.shape[0] > 0:
            value += widen(residual[row, column])
        out[row, column] = narrow(value, out)


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS by cuBLAS; bias + residual is rounded to out's dtype first.

    The first call in a context makes its handle: before a capture begins.
    """
    if bias is not None or residual is not None:
        add = True
        if bias is not None or residual.data.ptr != out.data.ptr:
            bias, residual = a[0, :0] if bias is None else bias, out[:0] if residual is None else residual
            launch(addends_kernel, out.shape[0], ADDENDS_THREADS, bias, residual, out)
    if a.shape[0 if a_mn else 1]:
        current().own(Cublas).gemm(a, a_mn, b, not b_mn, out, add)
    elif not add:
        out.fill(0)
