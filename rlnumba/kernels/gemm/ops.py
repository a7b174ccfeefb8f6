"""Matrix products of a linear layer y = x w^T + bias (+ residual), forward and backward.

    linear                   out = x w^T + bias + residual     sum over K (NT: both rows contiguous)
    linear_swiglu            gate_up = x w^T, out = silu(gate) * up
    linear_backward_input    dx = dout w                       sum over N (NN)
    linear_backward_weight   dweight += dout^T x               sum over M (TN)
    bias_backward            dbias += sum over M of dout

x (M, K), weight (N, K), out (M, N). Sums are float32 whatever the arrays hold; gradients of weights and
biases are float32 arrays that accumulate. Who multiplies:

    numpy    on the numpy device: kernels/gemm/cpu.py, one fixed order a row
    cublas   on a GPU: a row's bits may depend on the number of rows
    numba    our kernels, on a GPU and in the simulator: K in one ascending order a row. 16-bit products run in
             kernels/gemm/sm90.py or kernels/gemm/sm80.py, as runtime/dispatch.py says for the GPU, if all
             rows are whole 16-byte pieces (N and K multiples of 8, or N of 4 for a float32 out) and a residual has
             the inputs' type; all others, and those of float32, run in the kernel below, which is slow
"""

import numpy as np

from rlnumba.errors import ConfigError
from rlnumba.kernels.checks import F32, FLOATS, check, is_16_byte_aligned
from rlnumba.kernels.gemm import cpu
from rlnumba.kernels.gemm import sm80 as gemm_sm80
from rlnumba.kernels.gemm import sm90 as gemm_sm90
from rlnumba.kernels.gemm.cublas import cublas
from rlnumba.kernels.nn.swiglu import swiglu, swiglu_ref
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

# Side of the square of outputs that a block owns, one output a thread.
TILE = 16
# bias_backward: columns of a block, one a lane so that a warp reads consecutive addresses, and rows at a time.
COLUMNS = 32
ROW_LANES = 16
# Row length of a shared tile: one more, so that the elements of a column lie in different banks.
PADDED = TILE + 1
START_THREADS = 256

# By device; the first is the default.
BACKENDS = {"cpu": ("cpu",), "sim": ("native",), "cuda": ("native", "cublas")}
FAMILIES = {"sm90": gemm_sm90.product, "sm80": gemm_sm80.product}


# Former names that stay accepted.
ALIASES = {"numba": "native"}

_backend = "auto"


def set_backend(name):
    """Choose the GEMM backend: "native" (our kernels) or "cublas" on a GPU, or "auto", which is native.

    With cuBLAS, a row's bits depend on the number of rows, so rollout and training log-probs differ. "numba" is the
    former name of "native". Raises ConfigError for a name that the device does not offer.
    """
    global _backend
    name = ALIASES.get(name, name)
    offered = BACKENDS[device.name()]
    if name not in ("auto", *offered):
        raise ConfigError(f"gemm must be auto or {' or '.join(offered)} on device {device.name()}, got {name!r}")
    _backend = name


def backend():
    """The GEMM backend now: "cpu", "cublas" or "native"."""
    return BACKENDS[device.name()][0] if _backend == "auto" else _backend


def describe(dtype=None):
    """One line for people: the GEMM backend for arrays of this dtype (None: one of 16 bits), and its kernels."""
    name = backend()
    if name != "native":
        return name
    return f"native; {'simt' if dtype == np.float32 else dispatch.describe('gemm')}"


def _fast_product(a, b, out, steps, residual=None):
    """The product function for these matrices, of the family that is chosen; None where it does not take them.

    steps: of the reduction.
    """
    function = FAMILIES.get(dispatch.family("gemm"))
    if function is None or a.dtype == np.float32 or not steps:
        return None
    if residual is None:
        return function if is_16_byte_aligned(a, b, out) else None
    return function if out.dtype == a.dtype and is_16_byte_aligned(a, b, out, residual) else None


@cuda.jit
def product_kernel(a, a_row, a_step, b, b_column, b_step, steps, bias, addend, out):
    """out[i, j] = bias[j] + addend[i, j] + sum over s of a[i a_row + s a_step] b[j b_column + s b_step].

    a and b are flat; the strides say which way a matrix lies. A bias or addend without elements is left
    out; addend may be out itself. A block owns TILE x TILE outputs, a thread one. The sum runs in
    ascending s, TILE steps at a time: the block copies a square of a and one of b to shared memory, each
    along the direction in which it is contiguous, then every thread multiplies its row by its column.
    """
    a_tile = cuda.shared.array((TILE, PADDED), np.float32)
    b_tile = cuda.shared.array((TILE, PADDED), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    rows, columns = out.shape
    first_row, first_column = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    total = np.float32(0.0)
    for first in range(0, steps, TILE):
        # Which thread fetches which element: consecutive x take consecutive addresses.
        i, s = (y, x) if a_step == 1 else (x, y)
        a_tile[i, s] = np.float32(0.0)
        if first_row + i < rows and first + s < steps:
            a_tile[i, s] = widen(a[(first_row + i) * a_row + (first + s) * a_step])
        j, s = (y, x) if b_step == 1 else (x, y)
        b_tile[j, s] = np.float32(0.0)
        if first_column + j < columns and first + s < steps:
            b_tile[j, s] = widen(b[(first_column + j) * b_column + (first + s) * b_step])
        cuda.syncthreads()
        for step in range(TILE):
            total += a_tile[y, step] * b_tile[x, step]
        cuda.syncthreads()
    row, column = first_row + y, first_column + x
    if row < rows and column < columns:
        if bias.shape[0] > 0:
            total += widen(bias[column])
        if addend.shape[0] > 0:
            total += widen(addend[row, column])
        out[row, column] = narrow(total, out)


@cuda.jit
def start_kernel(bias, addend, out):
    """out = bias + addend, to which cuBLAS then adds a product; either may be left out. A block owns a row."""
    row = cuda.blockIdx.x
    for column in range(cuda.threadIdx.x, out.shape[1], cuda.blockDim.x):
        value = np.float32(0.0)
        if bias.shape[0] > 0:
            value += widen(bias[column])
        if addend.shape[0] > 0:
            value += widen(addend[row, column])
        out[row, column] = narrow(value, out)


@cuda.jit
def bias_backward_kernel(dout, dbias):
    """A block owns COLUMNS columns; of each, thread row y adds rows y, y + ROW_LANES, ..., then y = 0 adds those."""
    partials = cuda.shared.array((ROW_LANES, COLUMNS), np.float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    rows, columns = dout.shape
    column = cuda.blockIdx.x * COLUMNS + x
    total = np.float32(0.0)
    if column < columns:
        for row in range(y, rows, ROW_LANES):
            total += widen(dout[row, column])
    partials[y, x] = total
    cuda.syncthreads()
    if y == 0 and column < columns:
        total = dbias[column]
        for lane in range(ROW_LANES):
            total += partials[lane, x]
        dbias[column] = total


def _launch_product(a, a_strides, b, b_strides, steps, bias, addend, out):
    rows, columns = out.shape
    grid = (-(-columns // TILE), -(-rows // TILE))
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    launch(product_kernel, grid, (TILE, TILE), flat_a, *a_strides, flat_b, *b_strides, steps, bias, addend, out)


def linear(x, weight, out, bias=None, residual=None):
    """out = x weight^T + bias + residual.

    x (M, K) and weight (N, K) of one floating dtype; out (M, N) of that dtype or float32 is written; bias
    (N,) of x's dtype; residual (M, N) of out's dtype, may be out itself. Any of M, N, K may be 0. Sums are
    float32; on cuBLAS, bias + residual is rounded to out's dtype before the product is added.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    m, k = check("linear", "x", x, (None, None), FLOATS)
    n, _ = check("linear", "weight", weight, (None, k), (x.dtype,))
    check("linear", "out", out, (m, n), (x.dtype, *F32))
    if bias is not None:
        check("linear", "bias", bias, (n,), (x.dtype,))
    if residual is not None:
        check("linear", "residual", residual, (m, n), (out.dtype,))
    if m == 0 or n == 0:
        return
    who = backend()
    if who == "cpu":
        overlap = residual is not None and np.may_share_memory(residual, out)
        target = np.empty_like(out) if overlap else out
        cpu.product(x, weight, target)
        if bias is not None:
            target += bias
        if overlap:
            np.add(target, residual, out=out)
        elif residual is not None:
            out += residual
    elif who == "cublas":
        accumulate = bias is not None or residual is not None
        in_place = bias is None and accumulate and residual.data.ptr == out.data.ptr
        if accumulate and not in_place:
            launch(start_kernel, m, START_THREADS, *_optional(x, out, bias, residual), out)
        _cublas_product(x, False, weight, True, out, accumulate)
    elif product := _fast_product(x, weight, out, k, residual):
        product(x, weight, out, bias=bias, residual=residual)
    else:
        _launch_product(x, (k, 1), weight, (k, 1), k, *_optional(x, out, bias, residual), out)


def _optional(x, out, bias, residual):
    """bias and residual as kernels take them: an array without elements for one that is absent."""
    return x[0, :0] if bias is None else bias, out[:0] if residual is None else residual


def linear_swiglu(x, weight, gate_up, out):
    """gate_up = x weight^T and out = silu(gate) * up: the bits of linear and swiglu, in one kernel on Hopper.

    x (M, K) and weight (2F, K), the gate's rows first, of one floating dtype; gate_up (M, 2F) and out (M, F) of that
    dtype are written. Raises ValueError for other shapes, dtypes or layouts.
    """
    m, k = check("linear_swiglu", "x", x, (None, None), FLOATS)
    n, _ = check("linear_swiglu", "weight", weight, (None, k), (x.dtype,))
    check("linear_swiglu", "gate_up", gate_up, (m, n), (x.dtype,))
    if n % 2:
        raise ValueError(f"linear_swiglu: weight must have an even number of rows, got {n}")
    check("linear_swiglu", "out", out, (m, n // 2), (x.dtype,))
    if m and n and backend() == "native" and dispatch.family("gemm") == "sm90":
        if _fast_product(x, weight, out, k):
            gemm_sm90.swiglu_product(x, weight, gate_up, out)
            return
    linear(x, weight, gate_up)
    swiglu(gate_up, out)


def linear_backward_input(dout, weight, dx, accumulate=False):
    """dx = (or += if accumulate) dout weight: the gradient of linear's x.

    dout (M, N) and weight (N, K) of one floating dtype; dx (M, K) of that dtype or float32. Raises ValueError for
    others.
    """
    m, n = check("linear_backward_input", "dout", dout, (None, None), FLOATS)
    _, k = check("linear_backward_input", "weight", weight, (n, None), (dout.dtype,))
    check("linear_backward_input", "dx", dx, (m, k), (dout.dtype, *F32))
    if m == 0 or k == 0:
        return
    who = backend()
    if who == "cpu":
        if n:
            cpu.outer_product(dout.reshape(-1), n, 1, n, weight, dx, accumulate)
        elif not accumulate:
            dx[...] = 0
    elif who == "cublas":
        _cublas_product(dout, False, weight, False, dx, accumulate)
    elif product := _fast_product(dout, weight, dx, n):
        if accumulate and dx.dtype == np.float32:
            product(dout, weight, dx, b_mn=True, add=True)
        else:
            product(dout, weight, dx, b_mn=True, residual=dx if accumulate else None)
    else:
        addend = dx if accumulate else dx[:0]
        _launch_product(dout, (n, 1), weight, (1, k), n, dx[0, :0], addend, dx)


def linear_backward_weight(dout, x, dweight):
    """dweight += dout^T x: the gradient of linear's weight.

    dout (M, N) and x (M, K) of one floating dtype, dweight (N, K) float32. Raises ValueError for others.
    """
    m, n = check("linear_backward_weight", "dout", dout, (None, None), FLOATS)
    _, k = check("linear_backward_weight", "x", x, (m, None), (dout.dtype,))
    check("linear_backward_weight", "dweight", dweight, (n, k), F32)
    if m == 0 or n == 0 or k == 0:
        return
    who = backend()
    if who == "cpu":
        cpu.outer_product(dout.reshape(-1), 1, n, m, x, dweight, True)
    elif who == "cublas":
        _cublas_product(dout, True, x, False, dweight, True)
    elif product := _fast_product(dout, x, dweight, m):
        product(dout, x, dweight, a_mn=True, b_mn=True, add=True)
    else:
        _launch_product(dout, (1, n), x, (1, k), m, dweight[0, :0], dweight, dweight)


def bias_backward(dout, dbias):
    """dbias += the column sums of dout: the gradient of linear's bias.

    dout (M, N) floating, dbias (N,) float32. The order of the sum depends on M alone. Raises ValueError.
    """
    _, n = check("bias_backward", "dout", dout, (None, None), FLOATS)
    check("bias_backward", "dbias", dbias, (n,), F32)
    if device.name() == "cpu":
        dbias += np.sum(dout, axis=0)
        return
    launch(bias_backward_kernel, -(-n // COLUMNS), (COLUMNS, ROW_LANES), dout, dbias)


def _cublas_product(a, a_transposed, b, b_transposed, out, accumulate):
    if a.shape[0 if a_transposed else 1]:
        cublas().product(a, a_transposed, b, b_transposed, out, accumulate)
    elif not accumulate:
        out.fill(0)


def linear_ref(x, weight, bias=None, residual=None):
    """x weight^T + bias + residual, in x's precision."""
    out = x @ weight.T
    out = out if bias is None else out + bias
    return out if residual is None else out + residual


def linear_swiglu_ref(x, weight):
    """(gate_up, out) of linear_swiglu, in x's precision."""
    gate_up = linear_ref(x, weight)
    return gate_up, swiglu_ref(gate_up)


def linear_backward_ref(dout, x, weight):
    """(dx, dweight, dbias) of linear, in x's precision."""
    return dout @ weight, dout.T @ x, np.sum(dout, axis=0)
