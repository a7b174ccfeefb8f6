"""Reductions with a fixed order of the sum: no float atomics, the same bits on every run.

    sum_of_squares  sum x^2                                     the gradient's norm before clipping
    segment_sums_of_squares, sum_in_order                       the same in two parts, the first by segments
    masked_whiten   (x - mean) / sqrt(var + 1e-8), var over n - 1        PPO's advantages
    group_mean_std  mean and standard deviation of every group of completions, NaN left out
    column_sums     total += the sum of the rows of a matrix       the mean logit of a position

Sums are float32. The sum of squares is taken by segments of SEGMENT elements, whose sums depend on nothing else, so
that they may be computed on several GPUs. A segment is PIECES blocks' partial sums, of 256 terms a thread, added in
order.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all
from rlnumba.kernels.nn.rmsnorm import add_partials
from rlnumba.kernels.ptx.warp import access_length, block_sum, vector_access, warp_max, warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

THREADS = 256
# Elements of a segment, a multiple of the blocks of 8-bit moments, and the blocks that share one, of which each has a
# multiple of BLOCK_ELEMENTS: even a model of 10 million parameters has some for each of 132 SMs. These and the next two
# fix the order of the sum.
SEGMENT, PIECES = 1 << 20, 16
# Elements of a vector of the squares, 16 bytes, and vectors that a thread loads before it adds the first.
VECTOR, UNROLL = 4, 4
BLOCK_ELEMENTS = THREADS * UNROLL * VECTOR
# Rows that a thread of column_sums adds at least, and blocks of rows at most; both fix the order of the sum.
CHUNK_ROWS, MAX_CHUNKS = 64, 264
# Added to the variance in masked_whiten, as in TRL.
EPSILON = 1e-8
MASKS = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8))
# Elements that NumPy squares at a time: 64 KiB, so that the squares stay in the CPU's cache.
CHUNK = 16384


@specialize
def piece_squares_kernel(access, bounded, piece):
    """The kernel of pieces of `piece` elements whose loads move `access`; bounded: the last has some beyond the end."""
    load, _ = vector_access(VECTOR, access, bounded)
    count = UNROLL * VECTOR

    @cuda.jit
    def piece_squares_kernel(x, partials):
        """partials[block] = the sum of squares of the block's piece, THREADS * UNROLL vectors at a time.

        A thread adds every THREADS-th of these vectors, in ascending order.
        """
        scratch = cuda.shared.array(32, np.float32)
        values = cuda.local.array(count, np.float32)
        total = np.float32(0.0)
        top = cuda.blockIdx.x * piece
        for start in range(top, min(top + piece, x.shape[0]), BLOCK_ELEMENTS):
            first = start + cuda.threadIdx.x * VECTOR
            for i in range(UNROLL):
                load(x, first + i * THREADS * VECTOR, values, i * VECTOR)
            for i in range(count):
                total += values[i] * values[i]
        total = block_sum(total, scratch)
        if cuda.threadIdx.x == 0:
            partials[cuda.blockIdx.x] = total

    return piece_squares_kernel


@cuda.jit
def segment_sums_kernel(partials, sums):
    """sums[segment] = its PIECES partials, of the last one those there are, ascending. A thread owns a segment."""
    segment = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if segment < sums.shape[0]:
        total = np.float32(0.0)
        for i in range(segment * PIECES, min((segment + 1) * PIECES, partials.shape[0])):
            total += partials[i]
        sums[segment] = total


@cuda.jit
def sum_kernel(x, accumulate, out):
    """out[0] = (or += if accumulate) the sum of x, by one block."""
    scratch = cuda.shared.array(32, np.float32)
    total = np.float32(0.0)
    for i in range(cuda.threadIdx.x, x.shape[0], cuda.blockDim.x):
        total += x[i]
    total = block_sum(total, scratch)
    if cuda.threadIdx.x == 0:
        if accumulate:
            total += out[0]
        out[0] = total


@cuda.jit
def masked_whiten_kernel(x, mask, shift_mean, out):
    """One block, three passes: mean, variance about it, output."""
    scratch = cuda.shared.array(32, np.float32)
    zero, one = np.float32(0.0), np.float32(1.0)
    total = count = zero
    for i in range(cuda.threadIdx.x, x.shape[0], cuda.blockDim.x):
        if np.float32(mask[i]) != zero:
            total += x[i]
            count += one
    count = block_sum(count, scratch)
    mean = block_sum(total, scratch) / max(count, one)
    squares = zero
    for i in range(cuda.threadIdx.x, x.shape[0], cuda.blockDim.x):
        if np.float32(mask[i]) != zero:
            squares += (x[i] - mean) * (x[i] - mean)
    variance = block_sum(squares, scratch) / max(count - one, one)
    scale = one / math.sqrt(variance + np.float32(EPSILON))
    for i in range(cuda.threadIdx.x, x.shape[0], cuda.blockDim.x):
        value = zero
        if np.float32(mask[i]) != zero:
            value = (x[i] - mean) * scale
            if not shift_mean:
                value += mean
        out[i] = value


@cuda.jit
def group_mean_std_kernel(x, mean, std):
    """A warp owns a group, a lane every 32nd member of it; three passes.

    The mean is taken of the differences from the lowest member: a group of equal members then has exactly their value
    as mean and exactly 0 as std, which a rounded sum does not give.
    """
    group, size = cuda.blockIdx.x, x.shape[1]
    zero, one = np.float32(0.0), np.float32(1.0)
    lowest = np.float32(math.inf)
    for i in range(cuda.threadIdx.x, size, 32):
        if not math.isnan(x[group, i]):
            lowest = min(lowest, x[group, i])
    lowest = -warp_max(-lowest)
    total = count = squares = zero
    for i in range(cuda.threadIdx.x, size, 32):
        if not math.isnan(x[group, i]):
            total += x[group, i] - lowest
            count += one
    count, average = warp_sum(count), warp_sum(total)
    if count > zero:
        average = lowest + average / count
    for i in range(cuda.threadIdx.x, size, 32):
        if not math.isnan(x[group, i]):
            squares += (x[group, i] - average) * (x[group, i] - average)
    squares = warp_sum(squares)
    if cuda.threadIdx.x == 0:
        mean[group] = average
        std[group] = math.sqrt(squares / max(count - one, one))


@cuda.jit
def column_sums_kernel(x, chunk_rows, partials):
    """partials[chunk] = the sums of chunk_rows rows.

    A block owns THREADS columns of a chunk, a thread one of them, whose rows it adds in ascending order.
    """
    column, chunk = cuda.blockIdx.x * THREADS + cuda.threadIdx.x, cuda.blockIdx.y
    if column < x.shape[1]:
        total = np.float32(0.0)
        for row in range(chunk * chunk_rows, min((chunk + 1) * chunk_rows, x.shape[0])):
            total += widen(x[row, column])
        partials[chunk, column] = total


def num_segments(size):
    """Segments of an array of `size` elements; the last one may be shorter."""
    return -(-size // SEGMENT)


def segment_sums_of_squares(x, out):
    """out[s] = the sum of x^2 over elements s * SEGMENT, ... (s + 1) * SEGMENT - 1.

    x (n,) of a floating dtype; out (num_segments(n),) float32, infinity if a sum is beyond it. An element of out
    depends on its segment alone. Raises ValueError for other arrays.
    """
    (size,) = check("segment_sums_of_squares", "x", x, (None,), FLOATS)
    check("segment_sums_of_squares", "out", out, (num_segments(size),), F32)
    if device.name() == "cpu":
        # Infinity is a result: the caller checks for it.
        with np.errstate(over="ignore", invalid="ignore"):
            for segment in range(len(out)):
                ends = range(segment * SEGMENT, min((segment + 1) * SEGMENT, size), CHUNK)
                # A chunk does not reach into the next segment.
                chunks = (x[i : i + CHUNK][: (segment + 1) * SEGMENT - i] for i in ends)
                out[segment] = sum(float(sum_of_squares_ref(c.astype(np.float32, copy=False))) for c in chunks)
        return
    if not size:
        return
    piece = SEGMENT // PIECES
    partials = device.xp().empty(-(-size // piece), np.float32)
    kernel = piece_squares_kernel(min(access_length(size, x), VECTOR), size % BLOCK_ELEMENTS != 0, piece)
    launch(kernel, len(partials), THREADS, x, partials)
    launch(segment_sums_kernel, -(-len(out) // THREADS), THREADS, partials, out)


def sum_in_order(x, out, accumulate=False):
    """out[0] = (or += if accumulate) the sum of x, in an order that its length fixes.

    x (n,), out (1,) float32. Raises ValueError for other arrays.
    """
    check("sum_in_order", "x", x, (None,), F32)
    check("sum_in_order", "out", out, (1,), F32)
    if device.name() == "cpu":
        with np.errstate(over="ignore", invalid="ignore"):
            total = sum(map(float, x))
            out[0] = total + float(out[0]) if accumulate else total
        return
    launch(sum_kernel, 1, THREADS, x, int(accumulate), out)


def sum_of_squares(x, out, accumulate=False):
    """out[0] = (or += if accumulate) the sum of x^2: sum_in_order of segment_sums_of_squares.

    x (n,) of a floating dtype, out (1,) float32, infinity if the sum is beyond it. ValueError for other arrays.
    """
    (size,) = check("sum_of_squares", "x", x, (None,), FLOATS)
    check("sum_of_squares", "out", out, (1,), F32)
    sums = device.xp().empty(num_segments(size), np.float32)
    segment_sums_of_squares(x, sums)
    sum_in_order(sums, out, accumulate)


def masked_whiten(x, mask, out, shift_mean=True):
    """out = (x - mean) / sqrt(var + 1e-8) over the set elements, plus mean unless shift_mean; 0 elsewhere.

    var is divided by n - 1. x (N,) float32; mask (N,) float32, int32 or uint8; out (N,) float32 is written
    and may be x. Raises ValueError for other arrays. Source: masked_whiten of TRL.
    """
    (size,) = check("masked_whiten", "x", x, (None,), F32)
    check("masked_whiten", "mask", mask, (size,), MASKS)
    check("masked_whiten", "out", out, (size,), F32)
    if device.name() == "cpu":
        out[...] = masked_whiten_ref(x, mask, shift_mean)
        return
    launch(masked_whiten_kernel, 1, THREADS, x, mask, int(shift_mean), out)


def group_mean_std(x, mean, std):
    """mean[g] and std[g] of the members of group g that are not NaN; 0 where too few are left.

    x (G, members), mean and std (G,) float32; mean and std are written. std divides by max(members - 1, 1). Raises
    ValueError for other arrays. Source: TRL's GRPO advantages.
    """
    groups, _ = check("group_mean_std", "x", x, (None, None), F32)
    check_all("group_mean_std", (groups,), F32, mean=mean, std=std)
    if device.name() == "cpu":
        mean[...], std[...] = group_mean_std_ref(x)
        return
    launch(group_mean_std_kernel, groups, 32, x, mean, std)


def column_sums(x, total):
    """total += the sum of the rows of x.

    x (N, D) floating, total (D,) float32. The order of the sum depends on N alone. Raises ValueError for other arrays.
    """
    rows, columns = check("column_sums", "x", x, (None, None), FLOATS)
    check("column_sums", "total", total, (columns,), F32)
    if device.name() == "cpu":
        total += np.sum(x, axis=0, dtype=np.float32)
        return
    if not rows:
        return
    chunk_rows = max(-(-rows // MAX_CHUNKS), CHUNK_ROWS)
    partials = device.xp().empty((-(-rows // chunk_rows), columns), np.float32)
    launch(column_sums_kernel, (-(-columns // THREADS), len(partials)), THREADS, x, chunk_rows, partials)
    add_partials(partials, total)


def sum_of_squares_ref(x):
    """The sum of x^2, in x's precision."""
    return np.sum(x * x)


def masked_whiten_ref(x, mask, shift_mean=True):
    """out of masked_whiten, in x's precision."""
    chosen = x[mask != 0]
    out = np.zeros_like(x)
    mean = np.sum(chosen) / max(chosen.size, 1)
    variance = np.sum((chosen - mean) ** 2) / max(chosen.size - 1, 1)
    out[mask != 0] = (chosen - mean) / np.sqrt(variance + x.dtype.type(EPSILON)) + (0 if shift_mean else mean)
    return out


def group_mean_std_ref(x):
    """(mean, std) of group_mean_std, in x's precision."""
    valid = ~np.isnan(x)
    count = np.sum(valid, axis=1).astype(x.dtype)
    # Differences from the lowest member, so that equal members have a std of exactly 0.
    lowest = np.where(count > 0, np.min(x, axis=1, initial=np.inf, where=valid), 0).astype(x.dtype)
    mean = lowest + np.nansum(x - lowest[:, None], axis=1) / np.maximum(count, 1)
    squares = np.nansum((x - mean[:, None]) ** 2, axis=1)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))
