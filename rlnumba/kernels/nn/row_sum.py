"""One order in which kernels add up a row of logits: largest, log-sum-exp, entropy, the same bits everywhere.

The kernels that draw a token (kernels/sampling) and those that score it (kernels/logprob) must get the same bits. So
all kernels reduce a row by the functions here; on the cpu device cpu/row_sum.py does. A sum is a triple: the largest
logit m of a set, the sum of e = 2^x over it, x = (z - m) factor with factor = log2(e) / T, and for the entropy the sum
of e x. Its order is that in which wgmma leaves 256 columns of a tile in the registers of four threads, a quad:

    sixteen   lane i of a quad takes columns 8 b + 2 i and 8 b + 2 i + 1, eight b at a time; four sums: even and odd
              b, first and second column, b ascending; then (even + even) + (odd + odd)
    tile      of 256 columns: a lane joins its four sixteens in ascending order, the quad its lanes by a butterfly
    class     tiles c, c + CLASSES, c + 2 CLASSES, ... are joined in ascending order
    row       eight neighbouring classes by a butterfly, then these groups in ascending order

`join` is symmetric in its bits, so a butterfly gives all lanes the same. Nothing depends on how many threads work.
"""

import functools
import math

import numpy as np

from rlnumba.kernels.ptx.warp import block_max, device_function, exp2, shuffle_xor, widen
from rlnumba.runtime.device import cuda

i32 = np.int32

# Columns of a tile, and classes of tiles: they fix the order of the sum over V.
TILE_COLUMNS = 256
CLASSES = 128
# Threads that share a row of logits: a quad a class.
ROW_THREADS = 4 * CLASSES
# Eight classes lie in a warp of them.
GROUPS = CLASSES // 8
# Below every logit: the largest of none.
NONE = np.float32(-1e30)
LOG2_E = np.float32(math.log2(math.e))
LOG_2 = np.float32(math.log(2.0))
# 2^-150 is 0 in float32, and 150 times 0 is no NaN.
FAR = np.float32(150.0)


@device_function
def largest_of_sixteen(values, first, stride):
    """The largest of a lane's sixteen logits, values[first + stride b + c], b < 8, c < 2."""
    largest = NONE
    for b in range(8):
        for c in range(2):
            largest = max(largest, values[first + stride * b + c])
    return largest


@device_function
def exponentials_of_sixteen(values, first, stride, largest, factor, weigh):
    """(total, weighted) of a lane's sixteen logits, which become e = 2^x, x = (z - largest) factor.

    weighted: the sum of e x, 0 unless `weigh`.
    """
    sums = cuda.local.array(4, np.float32)
    weighted_sums = cuda.local.array(4, np.float32)
    for b in range(8):
        for c in range(2):
            x = (values[first + stride * b + c] - largest) * factor
            e = exp2(x)
            if weigh:
                # Not before: max would take the limit for a NaN, and e would be a 0.
                x = max(x, -FAR)
            values[first + stride * b + c] = e
            i = b % 2 * 2 + c
            if b < 2:
                sums[i], weighted_sums[i] = e, np.float32(0.0)
            else:
                sums[i] += e
            if weigh:
                weighted_sums[i] = cuda.fma(e, x, weighted_sums[i])
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    weighted = (weighted_sums[0] + weighted_sums[1]) + (weighted_sums[2] + weighted_sums[3])
    return total, weighted


@device_function
def fold_sixteen(values, factor, weigh):
    """(largest, total, weighted) of a lane's sixteen logits, which become exponentials."""
    largest = largest_of_sixteen(values, 0, 2)
    total, weighted = exponentials_of_sixteen(values, 0, 2, largest, factor, weigh)
    return largest, total, weighted


@device_function
def join(largest, total, weighted, other_largest, other_total, other_weighted, factor):
    """(largest, total, weighted) of two sets of logits, from those of each."""
    gap = min(abs(other_largest - largest) * factor, FAR)
    rescale = exp2(-gap)
    if other_largest > largest:
        weighted = cuda.fma(cuda.fma(-gap, total, weighted), rescale, other_weighted)
        total = cuda.fma(total, rescale, other_total)
    else:
        weighted = cuda.fma(cuda.fma(-gap, other_total, other_weighted), rescale, weighted)
        total = cuda.fma(other_total, rescale, total)
    return max(largest, other_largest), total, weighted


@device_function
def join_lanes(largest, total, weighted, distance, factor):
    """The join of this lane's sums and those of the lane at a distance, the same in both."""
    other = shuffle_xor(largest, distance), shuffle_xor(total, distance), shuffle_xor(weighted, distance)
    return join(largest, total, weighted, other[0], other[1], other[2], factor)


@device_function
def join_classes(largest, total, weighted, step, factor, groups):
    """The sums of a row from those of its classes, the same in every thread of the block.

    The sums of class c are in lanes c step .. c step + step - 1, step 1 or 4. groups: shared float32 (GROUPS, 3).
    """
    for doubling in range(3):
        largest, total, weighted = join_lanes(largest, total, weighted, step << doubling, factor)
    if cuda.threadIdx.x % (8 * step) == 0:
        group = cuda.threadIdx.x // (8 * step)
        groups[group, 0], groups[group, 1], groups[group, 2] = largest, total, weighted
    cuda.syncthreads()
    largest, total, weighted = groups[0, 0], groups[0, 1], groups[0, 2]
    for group in range(1, GROUPS):
        largest, total, weighted = join(
            largest, total, weighted, groups[group, 0], groups[group, 1], groups[group, 2], factor
        )
    return largest, total, weighted


@device_function
def row_results(largest, total, weighted, temperature):
    """(lse, entropy) of a row from its sums."""
    log_total = np.float32(math.log(total))
    return largest / temperature + log_total, log_total - LOG_2 * weighted / total


@device_function
def lowest_of_best(value, index, scratch):
    """The lowest index of the largest value over a one-dimensional block; indices are below 2^24."""
    best = block_max(value, scratch)
    # Such indices are exact as float32.
    return i32(-block_max(-np.float32(index) if value == best else NONE, scratch))


@functools.cache
def row_terms_function(masked=False):
    """The device function row_terms; masked: whether a threshold leaves logits out."""

    @device_function
    def row_terms(logits, row, temperature, threshold, scratch, groups):
        """(lse, entropy, top) of softmax(logits[row] / temperature), the same in every thread of the block.

        The block has ROW_THREADS threads. If masked, logits below the threshold count as -inf. scratch: shared float32
        (32,); groups as in join_classes. top is the lowest index of the largest logit, as int32.
        """
        columns = logits.shape[1]
        factor = LOG2_E / temperature
        lane = i32(cuda.threadIdx.x) % i32(32)
        values = cuda.local.array(16, np.float32)
        best, top = NONE, i32(0)
        largest, total, weighted = NONE, np.float32(0.0), np.float32(0.0)
        first_of_warp = (i32(cuda.threadIdx.x) - lane) // i32(4) * i32(TILE_COLUMNS)
        for base in range(first_of_warp, columns, CLASSES * TILE_COLUMNS):
            tile = NONE, np.float32(0.0), np.float32(0.0)
            for part in range(4):
                first = i32(base) + lane // i32(4) * i32(TILE_COLUMNS) + i32(64 * part) + lane % i32(4) * i32(2)
                for b in range(8):
                    for c in range(2):
                        column = first + i32(8 * b + c)
                        values[2 * b + c] = widen(logits[row, column]) if column < columns else np.float32(-math.inf)
                        if masked and values[2 * b + c] < threshold:
                            values[2 * b + c] = np.float32(-math.inf)
                for b in range(8):
                    for c in range(2):
                        # A lane's columns ascend: the first of equals stays.
                        if values[2 * b + c] > best:
                            best, top = values[2 * b + c], first + i32(8 * b + c)
                sums = fold_sixteen(values, factor, True)
                tile = join(tile[0], tile[1], tile[2], sums[0], sums[1], sums[2], factor)
            tile = join_lanes(tile[0], tile[1], tile[2], 1, factor)
            tile = join_lanes(tile[0], tile[1], tile[2], 2, factor)
            largest, total, weighted = join(largest, total, weighted, tile[0], tile[1], tile[2], factor)
        top = lowest_of_best(best, top, scratch)
        largest, total, weighted = join_classes(largest, total, weighted, 4, factor, groups)
        lse, entropy = row_results(largest, total, weighted, temperature)
        return lse, entropy, top

    return row_terms
