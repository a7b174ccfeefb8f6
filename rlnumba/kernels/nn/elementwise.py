"""Plain arithmetic on arrays, element by element, and the packed copies of rows.

Arrays of any shape in float32, float16 or bfloat16; arithmetic float32, one rounding; one pass over memory.
gather_rows and scatter_rows move rows bit for bit.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check, check_all
from rlnumba.kernels.nn.embedding import check_rows, copy_rows, gather
from rlnumba.kernels.ptx.warp import access_length, add_gradient, vector_access
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# H200, sum of 2 x 16.8 million bfloat16: 25.1 us with one vector a thread, 25.3 with two, 25.6 with four. More threads
# keep as many bytes in flight, and blocks then go through memory in order.
THREADS = 256


@specialize
def elementwise_kernel(op, vector, access, bounded):
    """The kernel of add, accumulate, "fold", "first fold" (fold_two), scale, cast or fill.

    For vectors of `vector` elements, moved `access` at a time.

    bounded: the last block has elements beyond the end.
    """
    load, store = vector_access(vector, access, bounded)
    adds, accumulates, scales, fills = op == "add", op == "accumulate", op == "scale", op == "fill"
    folds, is_first = op in ("fold", "first fold"), op == "first fold"

    @cuda.jit
    def elementwise_kernel(x, y, value, out):
        """out = x + y, x * value, x, value or (out + x) + y, all arrays with one axis; a thread owns a vector.

        To accumulate, y is out.
        """
        first = (cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * vector
        values, others = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        if folds:
            sums = cuda.local.array(vector, np.float32)
        if not fills:
            load(x, first, values, 0)
        if adds or accumulates or folds:
            load(y, first, others, 0)
        if folds and not is_first:
            load(out, first, sums, 0)
        for i in range(vector):
            if adds:
                values[i] += others[i]
            if accumulates:
                values[i] = add_gradient(others[i], values[i])
            if folds and not is_first:
                values[i] = add_gradient(sums[i], values[i])
            if folds:
                values[i] = add_gradient(values[i], others[i])
            if scales:
                values[i] *= value
            if fills:
                values[i] = value
        store(out, first, values, 0)

    return elementwise_kernel


def _launch(op, x, y, value, out):
    """Launch the kernel of `op` on whole vectors, then on the remainder; x and y are `out` where it reads none."""
    arrays = [array.reshape(-1) for array in (x, y, out)]
    vector = 16 // max(x.itemsize, out.itemsize)
    block_elements = THREADS * vector
    whole = out.size - out.size % vector
    for size, part in ((whole, slice(whole)), (out.size - whole, slice(whole, None))):
        if size:
            x, y, out = (array[part] for array in arrays)
            kernel = elementwise_kernel(op, vector, access_length(size, x, y, out), size % block_elements != 0)
            launch(kernel, -(-size // block_elements), THREADS, x, y, float(value), out)


def add(x, y, out):
    """out = x + y.

    x, y, out of one shape and one floating dtype; out is written and may be x or y. Raises ValueError for other arrays.
    """
    check("add", "x", x, x.shape, FLOATS)
    check_all("add", x.shape, (x.dtype,), y=y, out=out)
    if device.name() == "cpu":
        np.add(x, y, out=out)
        return
    _launch("add", x, y, 0.0, out)


def accumulate(x, out):
    """out += x: the gradient of a micro-batch to the sum of those before, one addition an element (add_gradient).

    x, out of one shape, float32; out is written. Raises ValueError for other arrays.
    """
    check_all("accumulate", x.shape, F32, x=x, out=out)
    if device.name() == "cpu":
        np.add(out, x, out=out)
        return
    _launch("accumulate", x, out, 0.0, out)


def fold_two(x, y, out, is_first):
    """out = (out + x) + y, or x + y if is_first: as `accumulate` of x, which is copied if is_first, then of y.

    x, y, out of one shape, float32; out is written. Raises ValueError for other arrays.
    """
    check_all("fold_two", x.shape, F32, x=x, y=y, out=out)
    if device.name() == "cpu":
        np.add(x if is_first else np.add(out, x, out=out), y, out=out)
        return
    _launch("first fold" if is_first else "fold", x, y, 0.0, out)


def scale(x, factor, out):
    """out = x * factor.

    x, out of one shape and floating dtype; out is written and may be x. Raises ValueError for other arrays.
    """
    check("scale", "x", x, x.shape, FLOATS)
    check("scale", "out", out, x.shape, (x.dtype,))
    if device.name() == "cpu":
        np.multiply(x, np.float32(factor), out=out)
        return
    _launch("scale", x, out, factor, out)


def cast(x, out):
    """out = x, rounded to nearest even into out's dtype.

    x, out of one shape, each of a floating dtype; out is written. Raises ValueError for other arrays.
    """
    check_all("cast", x.shape, FLOATS, x=x, out=out)
    if device.name() == "cpu":
        np.copyto(out, x, casting="same_kind")
        return
    _launch("cast", x, out, 0.0, out)


def fill(value, out):
    """out = value everywhere.

    value: a float, rounded to out's dtype; out of any shape and a floating dtype. Raises ValueError for other arrays.
    """
    check("fill", "out", out, out.shape, FLOATS)
    if device.name() == "cpu":
        out.fill(np.float32(value))
        return
    _launch("fill", out, out, value, out)


def gather_rows(x, rows, out):
    """out[m] = x[rows[m]], bit for bit.

    x (N, D) of a floating dtype; rows (M,) int32 in [0, N); out (M, D) of x's dtype is written. A row number outside
    [0, N) raises ValueError on the cpu device and gives a row of NaN elsewhere. Raises ValueError for other arrays.
    """
    gather("gather_rows", "x", x, "rows", rows, out)


def scatter_rows(x, rows, out):
    """out[rows[m]] = x[m], bit for bit; other rows of out keep their values.

    x (M, D) of a floating dtype; rows (M,) int32 in [0, N), no row twice; out (N, D) of x's dtype is written. A row
    number outside [0, N) raises ValueError on the cpu device and is skipped elsewhere. ValueError for other arrays.
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
