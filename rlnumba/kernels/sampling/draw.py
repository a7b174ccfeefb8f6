"""The kernel that draws a token of each row, from the sums and candidates that scan_kernel left."""

import math

import numpy as np

from rlnumba.kernels.nn import row_sum
from rlnumba.kernels.nn.row_sum import CLASSES, GROUPS, NONE, TILE_COLUMNS, join, lowest_of_best
from rlnumba.kernels.ptx.warp import (
    compiler_barrier,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    vector_access,
)
from rlnumba.kernels.sampling import gumbel, thresholds
from rlnumba.kernels.sampling.gumbel import DRAW_THREADS, LIST_LOADS, LOWEST, NO_TOKEN, noise_word
from rlnumba.kernels.sampling.scan import LIST, is_filtered
from rlnumba.kernels.sampling.thresholds import BINS, ROW_BINS, WEIGHT_UNITS, list_threshold, list_weight
from rlnumba.runtime.device import cuda

i32, u32 = np.int32, np.uint32

# Floats of shared memory for the list, or for the bins of a search in a row.
SCRATCH = max(LIST, ROW_BINS * DRAW_THREADS)

load_pair, _ = vector_access(2, 2)


@device_function
def load_tiles(sums, first, tiles, values):
    """(largest, total) of up to eight tiles of a class, from tile `first` on; of nothing beyond the row."""
    for i in range(8):
        values[2 * i], values[2 * i + 1] = NONE, np.float32(0.0)
        tile = i32(first + i * CLASSES)
        if tile < tiles:
            load_pair(sums, 2 * np.int64(tile), values, 2 * i)


@device_function
def copy_list(candidates, count, scratch):
    """A list to shared memory."""
    loaded = cuda.local.array(LIST_LOADS, np.float32)
    for base in range(cuda.threadIdx.x, count, LIST_LOADS * DRAW_THREADS):
        for i in range(LIST_LOADS):
            loaded[i] = candidates[min(i32(base + i * DRAW_THREADS), i32(count - 1))]
        compiler_barrier()
        for i in range(LIST_LOADS):
            if i32(base + i * DRAW_THREADS) < count:
                scratch[base + i * DRAW_THREADS] = loaded[i]


@device_function
def draw_segment(sums, tiles, values, greedy, divisor, noise, scratch):
    """The segment of a row without filters, in every thread: the argmax of their log-sum-exps with a noise each.

    values: load_tiles() of the thread's class, of which two neighbouring threads take every other tile; greedy: no
    noise.
    """
    best, thread = LOWEST, i32(cuda.threadIdx.x)
    segment, odd = i32(tiles - 1), i32(thread & 1)
    for base in range(thread >> 1, tiles, 8 * CLASSES):
        if base >= 8 * CLASSES:
            load_tiles(sums, i32(base), tiles, values)
        for i in range(0, 8, 2):
            tile = i32(base + (i + odd) * CLASSES)
            score, weight = (values[2 * i + 2], values[2 * i + 3]) if odd else (values[2 * i], values[2 * i + 1])
            if tile < tiles:
                if not greedy and weight > np.float32(0.0):
                    segment_noise = gumbel.gumbel(noise_word(tile, gumbel.SEGMENT_NOISE, noise))
                    score = score / divisor + (np.float32(math.log(weight)) + segment_noise)
                # A thread's segments ascend: the first of equals stays.
                if score > best:
                    best, segment = score, tile
    segment = lowest_of_best(best, segment, scratch)
    return segment


@device_function
def row_sums(sums, tiles, values, factor, groups):
    """(largest, total) of a row from those of its tiles, in every thread; values: as draw_segment leaves them."""
    nothing = np.float32(0.0)
    largest, total = NONE, nothing
    for base in range(i32(cuda.threadIdx.x) >> 1, tiles, 8 * CLASSES):
        if tiles > 8 * CLASSES:
            load_tiles(sums, i32(base), tiles, values)
        for i in range(8):
            if i32(base + i * CLASSES) < tiles:
                largest, total, _ = join(largest, total, nothing, values[2 * i], values[2 * i + 1], nothing, factor)
    largest, total, _ = row_sum.join_classes(largest, total, nothing, DRAW_THREADS // CLASSES, factor, groups)
    return largest, total


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
            # Of the mass of what is kept so far: of the whole row if no other filter is on.
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
        threshold = thresholds.row_threshold(line, threshold, largest, factor, False, target, values, scratch, tails)
    if top_p < np.float32(1.0):
        target = top_p * total
        if limited or min_p > np.float32(0.0):
            target = top_p * thresholds.row_weight(line, threshold, largest, factor, values, sums)
        threshold = thresholds.row_threshold(line, threshold, largest, factor, True, target, values, scratch, tails)
    return threshold, thresholds.row_weight(line, threshold, largest, factor, values, sums)


@cuda.jit(launch_bounds=(DRAW_THREADS, 2))
def draw_kernel(
    logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs,
    sums, bounds, counts, candidates, candidate_ids,
):  # fmt: skip
    """A block draws the token of a row: joins the sums of its tiles, applies the filters, takes the Gumbel argmax.

    Without filters first of the segments, which are the tiles, two threads a class, then of the segment's tokens.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    warp_sums = cuda.shared.array(32, np.float32)
    partials = cuda.shared.array(32, np.int64)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    block_best = cuda.shared.array(1, np.int32)
    bins = cuda.shared.array((2, BINS), np.int32)
    tails = cuda.shared.array(ROW_BINS, np.float32)
    scratch = cuda.shared.array(SCRATCH, np.float32)
    row, thread, width = cuda.blockIdx.x, i32(cuda.threadIdx.x), i32(logits.shape[1])
    tiles = i32((width + (TILE_COLUMNS - 1)) // TILE_COLUMNS)
    line, tile_sums, row_candidates = logits[row], sums[row], candidates[row]
    values = cuda.local.array(16, np.float32)
    # All loads of a row's arguments are in flight together: one after the other would take as long as the rest.
    row_temperature, limits = temperature[row], (top_k[row], top_p[row], min_p[row])
    noise = u32(position[row]), u32(sample_index[row]), keys[row, 0], keys[row, 1]
    bound, count = bounds[row], i32(counts[row])
    load_tiles(tile_sums, i32(thread >> 1), tiles, values)
    compiler_barrier()
    greedy = row_temperature == np.float32(0.0)
    divisor = np.float32(1.0) if greedy else row_temperature
    factor = row_sum.LOG2_E / divisor
    filtered = is_filtered(row_temperature, limits[0], limits[1], limits[2], width)
    best, token = LOWEST, NO_TOKEN
    logit, column = np.float32(-math.inf), NO_TOKEN
    if filtered:
        copy_list(row_candidates, min(count, i32(LIST)), scratch)
        if thread == 0:
            block_best[0] = gumbel.ordered_int(NONE)
    else:
        segment = draw_segment(tile_sums, tiles, values, greedy, divisor, noise, warp_sums)
        column = i32(segment * gumbel.SEGMENT + thread)
        if column < width:
            logit = line[column]
        compiler_barrier()
    largest, total = row_sums(tile_sums, tiles, values, factor, groups)
    lse, _ = row_sum.row_results(largest, total, np.float32(0.0), divisor)
    if not filtered:
        if logit > LOWEST:
            best, token = logit, column
            if not greedy:
                best = logit / divisor + gumbel.gumbel(noise_word(column, gumbel.TOKEN_NOISE, noise))
    elif total > np.float32(0.0):
        floor = LOWEST
        if limits[2] > np.float32(0.0):
            floor = largest + divisor * np.float32(math.log(limits[2]))
        complete, threshold, mass = False, floor, np.int64(0)
        if count <= LIST:
            complete, threshold, mass = filter_list(
                scratch, count, bound, floor, limits, width, largest, total, factor, bins, partials
            )
        if complete:
            total = np.float32(mass) / WEIGHT_UNITS
            best, token = gumbel.list_gumbel_argmax(
                scratch, candidate_ids[row], count, threshold, divisor, factor, noise, block_best
            )
        else:
            threshold, total = filter_row(
                line, floor, limits, largest, total, factor, values, scratch, tails, warp_sums
            )
            best, token = gumbel.row_gumbel_argmax(line, threshold, divisor, factor, noise, block_best)
        lse = largest / divisor + np.float32(math.log(total))
    token = lowest_of_best(best, token, warp_sums)
    if thread == 0:
        # NO_TOKEN remains if no logit is a number.
        token = min(token, i32(width - 1))
        token_ids[row] = token
        logprobs[row] = line[token] / divisor - lse
        # For the next launch.
        counts[row] = i32(0)
