"""Plain arithmetic on arrays, element by element, and the packed copies of rows.

Arrays of any shape in float32, float16 or bfloat16; arithmetic float32, one rounding; one pass over memory.
gather_rows and scatter_rows move whole rows bit for bit.
"""

import numpy as np

from rlnumba.kernels.checks import FLOATS, I32, check
from rlnumba.kernels.nn.embedding import check_rows, copy_rows
from rlnumba.kernels.ptx.warp import access_length, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# H200, sum of 2 x 16.8 million bfloat16: 25.1 us with one vector a thread, 25.3 with two, 25.6 with four. More threads
# keep as many bytes in flight, and blocks then go through memory in order.
THREADS = 256


# The kernels see every array as one-dimensional. A thread owns a vector. bounded: the last block has elements beyond
# the end.


@specialize
def add_kernel(vector, access, bounded):
    """The kernel for vectors of `vector` elements, moved `access` at a time."""
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def add_kernel(x, y, out):
        """out = x + y."""
        first = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * vector
        values = cuda.local.array(vector, np.float32)
        others = cuda.local.array(vector, np.float32)
        load(x, first, values, 0)
        load(y, first, others, 0)
        for i in range(vector):
            values[i] += others[i]
        store(out, first, values, 0)

    return add_kernel


@specialize
def scale_kernel(vector, access, bounded):
    """As add_kernel."""
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def scale_kernel(x, factor, out):
        """out = x * factor."""
        first = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * vector
        values = cuda.local.array(vector, np.float32)
        load(x, first, values, 0)
        for i in range(vector):
            values[i] *= factor
        store(out, first, values, 0)

    return scale_kernel


@specialize
def cast_kernel(vector, access, bounded):
    """As add_kernel."""
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def cast_kernel(x, out):
        """out = x."""
        first = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * vector
        values = cuda.local.array(vector, np.float32)
        load(x, first, values, 0)
        store(out, first, values, 0)

    return cast_kernel


@specialize
def fill_kernel(vector, access, bounded):
    """As add_kernel."""
    _, store = vector_access(vector, access, bounded)

    @cuda.jit
    def fill_kernel(value, out):
        """out = value."""
        first = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * vector
        values = cuda.local.array(vector, np.float32)
        for i in range(vector):
            values[i] = value
        store(out, first, values, 0)

    return fill_kernel


def _launch_flat(factory, arguments, size):
    """Launch the kernels of `factory` over `size` elements: whole vectors, then the remainder."""
    flat = [a if isinstance(a, float) else a.reshape(-1) for a in arguments]
    vector = 16 // max(a.itemsize for a in flat if not isinstance(a, float))
    whole = size - size % vector
    for first, last in ((0, whole), (whole, size)):
        parts = [a if isinstance(a, float) else a[first:last] for a in flat]
        if first < last:
            access = access_length(last - first, *[a for a in parts if not isinstance(a, float)])
            block_elements = THREADS * vector
            kernel = factory(vector, access, (last - first) % block_elements != 0)
            launch(kernel, -(-(last - first) // block_elements), THREADS, *parts)


def add(x, y, out):
    """out = x + y.

    x, y, out of one shape and one floating dtype; out is written and may be x or y. Raises ValueError for
    other shapes, dtypes or layouts.
    """
    check("add", "x", x, x.shape, FLOATS)
    check("add", "y", y, x.shape, (x.dtype,))
    check("add", "out", out, x.shape, (x.dtype,))
    if device.name() == "cpu":
        np.add(x, y, out=out)
        return
    _launch_flat(add_kernel, (x, y, out), x.size)


def scale(x, factor, out):
    """out = x * factor.

    x, out of one shape and one floating dtype; factor a Python float; out is written and may be x. Raises
    ValueError for other shapes, dtypes or layouts.
    """
    check("scale", "x", x, x.shape, FLOATS)
    check("scale", "out", out, x.shape, (x.dtype,))
    if device.name() == "cpu":
        np.multiply(x, np.float32(factor), out=out)
        return
    _launch_flat(scale_kernel, (x, float(factor), out), x.size)


def cast(x, out):
    """out = x, rounded to nearest even into out's dtype.

    x, out of one shape, each of a floating dtype; out is written. Raises ValueError for other shapes,
    dtypes or layouts.
    """
    check("cast", "x", x, x.shape, FLOATS)
    check("cast", "out", out, x.shape, FLOATS)
    if device.name() == "cpu":
        np.copyto(out, x, casting="same_kind")
        return
    _launch_flat(cast_kernel, (x, out), x.size)


def fill(value, out):
    """out = value everywhere.

    value: a Python float, rounded into out's dtype; out of any shape and a floating dtype is written.
    Raises ValueError for other dtypes or layouts.
    """
    check("fill", "out", out, out.shape, FLOATS)
    if device.name() == "cpu":
        out.fill(np.float32(value))
        return
    _launch_flat(fill_kernel, (float(value), out), out.size)


def gather_rows(x, rows, out):
    """out[m] = x[rows[m]], bit for bit.

    x (N, D) of a floating dtype; rows (M,) int32 in [0, N); out (M, D) of x's dtype is written. A row
    number outside [0, N) raises ValueError on the cpu device and gives a row of NaN elsewhere. Raises
    ValueError for other shapes, dtypes or layouts.
    """
    limit, columns = check("gather_rows", "x", x, (None, None), FLOATS)
    (count,) = check("gather_rows", "rows", rows, (None,), I32)
    check("gather_rows", "out", out, (count, columns), (x.dtype,))
    if device.name() == "cpu":
        check_rows("gather_rows", "rows", rows, limit)
        np.take(x, rows, axis=0, out=out, mode="clip")
        return
    copy_rows(x, rows, out, scatter=False)


def scatter_rows(x, rows, out):
    """out[rows[m]] = x[m], bit for bit; other rows of out keep their values.

    x (M, D) of a floating dtype; rows (M,) int32 in [0, N), no row twice; out (N, D) of x's dtype is
    written. A row number outside [0, N) raises ValueError on the cpu device and is skipped elsewhere.
    Raises ValueError for other shapes, dtypes or layouts.
    """
    count, columns = check("scatter_rows", "x", x, (None, None), FLOATS)
    check("scatter_rows", "rows", rows, (count,), I32)
    limit, _ = check("scatter_rows", "out", out, (None, columns), (x.dtype,))
    if device.name() == "cpu":
        check_rows("scatter_rows", "rows", rows, limit)
        out[rows] = x
        return
    copy_rows(x, rows, out, scatter=True)


def gather_rows_ref(x, rows):
    """out of gather_rows."""
    return x[rows]


def scatter_rows_ref(x, rows, out):
    """out of scatter_rows, as a new array."""
    result = out.copy()
    result[rows] = x
    return result
