"""The threshold of top-k or top-p: the largest logit of a list, or of a row, whose tail weighs enough.

A tail {z' >= z} weighs its number of tokens (top-k) or its mass (top-p). An interval of float32, in their order as
integers, is cut into bins again and again. In a list, weights are integers, whose sums do not depend on the order in
which the entries came; a whole row is summed in float32, in a fixed order.
"""

import math

import numpy as np

from rlnumba.kernels.ptx.warp import (
    block_sum,
    device_function,
    exp2,
    float_as_int,
    int_as_float,
    shuffle_down,
    vector_access,
    warp_sum,
)
from rlnumba.runtime.device import cuda

i32, u32 = np.int32, np.uint32

# Bins of a search in a list, and in a row.
BINS_BITS, ROW_BINS_BITS = 8, 5
BINS, ROW_BINS = 1 << BINS_BITS, 1 << ROW_BINS_BITS
# The integer weight of a probability of 1 relative to the largest, as a float32.
WEIGHT_UNITS = np.float32(2.0**34)
# Logits of a row that a thread loads before it uses the first.
ROW_LOADS = 16

load_one, _ = vector_access(1, 1)


@device_function
def ordered_int(value):
    """A float32 as an int32 in the same order. Zeros of both signs are one."""
    bits = float_as_int(value + np.float32(0.0))
    return bits if bits >= i32(0) else bits ^ i32(0x7FFFFFFF)


@device_function
def ordered_float(key):
    """The float32 of a key of ordered_int()."""
    return int_as_float(key if key >= i32(0) else key ^ i32(0x7FFFFFFF))


@device_function
def ordered_distance(low, key):
    """The distance of a key of ordered_int() above `low`, as uint32; huge if it lies below."""
    return u32(np.int64(key) - np.int64(low))


@device_function
def token_weight(logit, largest, factor, by_mass):
    """(high, low), 17 bits each, of 2^((z - largest) factor) in units of 2^-34 if by_mass; else of the integer 1."""
    if not by_mass:
        return i32(0), i32(1)
    scaled = exp2((logit - largest) * factor) * np.float32(2.0**17)
    high = i32(scaled)
    return high, i32((scaled - np.float32(high)) * np.float32(2.0**17))


@device_function
def join_halves(high, low):
    """The int64 of a weight, or of a sum of weights."""
    return (np.int64(high) << 17) + np.int64(low)


@device_function
def list_weight(candidates, count, threshold, largest, factor, by_mass, partials):
    """The weight of a list's entries >= threshold, int64, in every thread: units of 2^-34 if by_mass, else entries."""
    total = np.int64(0)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        if candidates[i] >= threshold:
            high, low = token_weight(candidates[i], largest, factor, by_mass)
            total += join_halves(high, low)
    return block_sum(total, partials)


@device_function
def list_threshold(candidates, count, floor, largest, factor, by_mass, target, bins, partials):
    """(z, weight) in every thread: the largest z of a list whose tail {z' >= z} weighs at least target > 0, int64.

    All entries >= floor weigh at least that; weights as in list_weight. bins: shared int32 (2, BINS).
    """
    thread, lane = i32(cuda.threadIdx.x), i32(cuda.threadIdx.x & 31)
    low, above = ordered_int(floor), np.int64(0)
    span = ordered_distance(low, ordered_int(largest))
    # log2 of the width of a bin.
    shift = max(i32(32 - BINS_BITS - cuda.clz(span)), i32(0))
    while True:
        for i in range(thread, BINS, cuda.blockDim.x):
            bins[0, i] = bins[1, i] = i32(0)
        cuda.syncthreads()
        for i in range(thread, count, cuda.blockDim.x):
            offset = ordered_distance(low, ordered_int(candidates[i]))
            if offset <= span:
                at = i32(offset >> u32(shift))
                high, rest = token_weight(candidates[i], largest, factor, by_mass)
                if high != 0:
                    cuda.atomic.add(bins, (0, at), high)
                if rest != 0:
                    cuda.atomic.add(bins, (1, at), rest)
        cuda.syncthreads()
        if thread < 32:
            # A lane has BINS / 32 bins, the highest lane the highest.
            lane_weight = np.int64(0)
            for i in range(BINS // 32):
                at = lane * (BINS // 32) + i
                lane_weight += join_halves(bins[0, at], bins[1, at])
            tail = lane_weight
            for doubling in range(5):
                higher = shuffle_down(tail, 1 << doubling)
                if lane + (1 << doubling) < 32:
                    tail += higher
            before = above + tail - lane_weight
            if before < target and target <= above + tail:
                i = BINS // 32 - 1
                while True:
                    at = lane * (BINS // 32) + i
                    weight = join_halves(bins[0, at], bins[1, at])
                    if i == 0 or before + weight >= target:
                        break
                    before += weight
                    i -= 1
                partials[0], partials[1], partials[2] = before, np.int64(at), before + weight
        cuda.syncthreads()
        above, weight = partials[0], partials[2]
        low = i32(low + (partials[1] << shift))
        cuda.syncthreads()
        if shift == 0:
            return ordered_float(low), weight
        span = (u32(1) << u32(shift)) - u32(1)
        shift = max(i32(shift - BINS_BITS), i32(0))


@device_function
def load_batch(line, base, values):
    """ROW_LOADS logits of a thread, every blockDim.x-th from base + threadIdx.x on; -inf for those outside the row."""
    columns, threads = i32(line.shape[0]), i32(cuda.blockDim.x)
    first = i32(base + cuda.threadIdx.x)
    if i32(base + threads * ROW_LOADS) <= columns:
        for i in range(ROW_LOADS):
            load_one(line, np.int64(first) + i * threads, values, i)
    else:
        for i in range(ROW_LOADS):
            values[i] = np.float32(-math.inf)
            if i32(first + i * threads) < columns:
                load_one(line, np.int64(first) + i * threads, values, i)


@device_function
def row_weight(line, threshold, largest, factor, values, scratch):
    """The sum of 2^((z - largest) factor) over a row's z >= threshold, in every thread. values: local (ROW_LOADS,)."""
    total = np.float32(0.0)
    for base in range(0, line.shape[0], ROW_LOADS * cuda.blockDim.x):
        load_batch(line, i32(base), values)
        for i in range(ROW_LOADS):
            if values[i] >= threshold:
                total += exp2((values[i] - largest) * factor)
    return block_sum(total, scratch)


@device_function
def row_threshold(line, floor, largest, factor, by_mass, target, values, bins, tails):
    """The largest z >= floor of a row of which the tail {z' >= z} weighs at least target; floor if there is none.

    A token weighs 2^((z - largest) factor) if by_mass, else 1. The interval is cut at most seven times, with a pass
    over the row each. Every thread adds to bins of its own, ROW_BINS of shared float32, so the sums have one order.
    """
    thread, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    low, above = ordered_int(floor), np.float32(0.0)
    span = ordered_distance(low, ordered_int(largest))
    # log2 of the width of a bin.
    shift = max(i32(32 - ROW_BINS_BITS - cuda.clz(span)), i32(0))
    while True:
        for i in range(ROW_BINS):
            bins[i * threads + thread] = np.float32(0.0)
        for base in range(0, line.shape[0], ROW_LOADS * threads):
            load_batch(line, i32(base), values)
            for i in range(ROW_LOADS):
                offset = ordered_distance(low, ordered_int(values[i]))
                if offset <= span:
                    weight = np.float32(1.0)
                    if by_mass:
                        weight = exp2((values[i] - largest) * factor)
                    bins[i32(i32(offset >> u32(shift)) * threads + thread)] += weight
        cuda.syncthreads()
        for i in range(thread // 32, ROW_BINS, threads // 32):
            total = np.float32(0.0)
            for other in range(thread % 32, threads, 32):
                total += bins[i * threads + other]
            total = warp_sum(total)
            if thread % 32 == 0:
                tails[i] = total
        cuda.syncthreads()
        chosen = i32(ROW_BINS - 1)
        while chosen > 0 and above + tails[chosen] < target:
            above += tails[chosen]
            chosen -= i32(1)
        low = i32(low + (np.int64(chosen) << shift))
        # The next pass writes tails.
        cuda.syncthreads()
        if shift == 0:
            return ordered_float(low)
        span = (u32(1) << u32(shift)) - u32(1)
        shift = max(i32(shift - ROW_BINS_BITS), i32(0))


@device_function
def filter_list(candidates, count, bound, floor, limits, width, largest, total, factor, bins, partials):
    """(complete, threshold, mass) of the filters of a row, found in its list of candidates.

    complete: whether the list holds every token that the filters keep, which are those >= threshold; mass: theirs, by
    list_weight(). floor: the threshold of min-p; limits: (top_k, top_p, min_p).
    """
    top_k, top_p, min_p = limits
    limited, complete = 0 < top_k < width, floor >= bound
    threshold, mass, target = max(floor, bound), np.int64(0), np.int64(top_k)
    if limited:
        number = np.int64(count)
        if floor > bound:
            number = list_weight(candidates, count, threshold, largest, factor, False, partials)
        if number >= target:
            complete = True
            threshold, _ = list_threshold(candidates, count, threshold, largest, factor, False, target, bins, partials)
    if complete or not (limited or min_p > np.float32(0.0)):
        mass = list_weight(candidates, count, threshold, largest, factor, True, partials)
        if top_p < np.float32(1.0):
            # top_p is a share of the mass that is kept so far: of the whole row if no other filter is on.
            whole = np.float32(mass) if complete else total * WEIGHT_UNITS
            target = max(np.int64(top_p * whole), np.int64(1))
            if complete or target <= mass:
                complete, target = True, min(target, mass)
                threshold, mass = list_threshold(
                    candidates, count, threshold, largest, factor, True, target, bins, partials
                )
    return complete, threshold, mass


@device_function
def filter_row(line, floor, limits, largest, total, factor, values, scratch, tails, sums):
    """(threshold, mass) of the filters of a row, found by reading it again; arguments as of filter_list."""
    top_k, top_p, min_p = limits
    limited = 0 < top_k < i32(line.shape[0])
    threshold = floor
    if limited:
        target = np.float32(top_k)
        threshold = row_threshold(line, threshold, largest, factor, False, target, values, scratch, tails)
    if top_p < np.float32(1.0):
        target = top_p * total
        if limited or min_p > np.float32(0.0):
            target = top_p * row_weight(line, threshold, largest, factor, values, sums)
        threshold = row_threshold(line, threshold, largest, factor, True, target, values, scratch, tails)
    return threshold, row_weight(line, threshold, largest, factor, values, sums)
