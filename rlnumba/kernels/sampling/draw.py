"""The kernel that draws a token of each row, from the sums and candidates that scan_kernel left.

The uniform u of token i is word i % 4 of Philox with counter (i // 4, position, sample_index, 0) and a key of seed and
prompt (philox.noise_key); a segment's counter ends with 1 instead. g = -log(-log1p(-u)).
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.nn import row_sum
from rlnumba.kernels.nn.row_sum import CLASSES, GROUPS, LOG2_E, NONE, TILE_COLUMNS, join, lowest_of_best
from rlnumba.kernels.philox import philox, uniform
from rlnumba.kernels.ptx.warp import (
    compiler_barrier,
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    vector_access,
)
from rlnumba.kernels.sampling.scan import LIST, LOWEST, is_filtered
from rlnumba.kernels.sampling.thresholds import (
    BINS,
    ROW_BINS,
    WEIGHT_UNITS,
    filter_list,
    filter_row,
    ordered_float,
    ordered_int,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import supports_pdl

i32, u32 = np.int32, np.uint32

# Neighbouring tokens that a row without filters draws from once it has drawn their segment, each by a thread.
SEGMENT = DRAW_THREADS = TILE_COLUMNS
# The last word of the counters of tokens' and of segments' noise.
TOKEN_NOISE, SEGMENT_NOISE = u32(0), u32(1)
# Above every token id, and exact as a float32.
NO_TOKEN = i32(1 << 24)
# Entries of a list that a thread loads before it uses the first.
LIST_LOADS = 8
# Floats of shared memory for the list, or for the bins of a search in a row.
SCRATCH = max(LIST, ROW_BINS * DRAW_THREADS)

load_pair, _ = vector_access(2, 2)


class Counters(NamedTuple):
    """The words that a row's noise is a function of.

    keys (rows, 2) uint32; sample_index (rows,) int32, which completion of the prompt; position (rows,) int32, of the
    token to draw.
    """

    keys: object
    sample_index: object
    position: object


@device_function
def gumbel(word):
    """The Gumbel noise g of a random word."""
    return -np.float32(math.log(-np.float32(math.log1p(-uniform(word)))))


@device_function
def noise_word(i, kind, noise):
    """The random word of token or segment i; noise: (position, sample_index, two words of the key)."""
    w0, w1, w2, w3 = philox(u32(i >> 2), noise[0], noise[1], kind, noise[2], noise[3])
    low, high = (w1, w3) if i & 1 else (w0, w2)
    return high if i & 2 else low


@device_function
def prune_bound(key):
    """b such that a token of logit z and word w can reach the block's best score only if w <= 2^(z factor + b).

    key: that score, by ordered_int(). A token scores s + g <= s - log u = s - log w + 32 log 2, plus rounding.
    """
    best = ordered_float(key)
    margin = abs(best) * np.float32(2.0**-20) + np.float32(1e-3)
    return np.float32(32.0) - (best - margin) * LOG2_E


@device_function
def list_gumbel_argmax(candidates, candidate_ids, count, threshold, divisor, factor, noise, block_best):
    """(score, token) of a thread's best among a list's entries >= threshold; block_best: shared, as in prune_bound."""
    ids = cuda.local.array(LIST_LOADS, np.int32)
    best, token = LOWEST, NO_TOKEN
    for base in range(cuda.threadIdx.x, count, LIST_LOADS * DRAW_THREADS):
        for i in range(LIST_LOADS):
            ids[i] = candidate_ids[min(i32(base + i * DRAW_THREADS), i32(count - 1))]
        compiler_barrier()
        for i in range(LIST_LOADS):
            at = i32(base + i * DRAW_THREADS)
            if at < count and candidates[at] >= threshold:
                word = noise_word(ids[i], TOKEN_NOISE, noise)
                if np.float32(word) <= exp2(cuda.fma(candidates[at], factor, prune_bound(block_best[0]))):
                    score = candidates[at] / divisor + gumbel(word)
                    if score > best or (score == best and ids[i] < token):
                        best, token = score, ids[i]
                        cuda.atomic.max(block_best, 0, ordered_int(best))
    return best, token


@device_function
def row_gumbel_argmax(line, threshold, divisor, factor, noise, block_best):
    """list_gumbel_argmax of a whole row of logits."""
    width, threads = i32(line.shape[0]), i32(cuda.blockDim.x)
    words = cuda.local.array(4, np.uint32)
    best, token = LOWEST, NO_TOKEN
    for first in range(i32(4 * cuda.threadIdx.x), width, i32(4 * threads)):
        block = u32(i32(first) >> 2)
        words[0], words[1], words[2], words[3] = philox(block, noise[0], noise[1], TOKEN_NOISE, noise[2], noise[3])
        bound = prune_bound(block_best[0])
        for i in range(4):
            column = i32(first + i)
            if column < width and line[column] >= threshold:
                if np.float32(words[i]) <= exp2(cuda.fma(line[column], factor, bound)):
                    score = line[column] / divisor + gumbel(words[i])
                    # A thread's columns ascend: the first of equals stays.
                    if score > best:
                        best, token = score, column
                        cuda.atomic.max(block_best, 0, ordered_int(best))
    return best, token


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
    """The segment of a row without filters, in every thread: the argmax of log-sum-exp and, unless greedy, noise.

    values: load_tiles() of the thread's class, of which two neighbouring threads take every other tile.
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
                    segment_noise = gumbel(noise_word(tile, SEGMENT_NOISE, noise))
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


@supports_pdl
@cuda.jit(launch_bounds=(DRAW_THREADS, 2))
def draw_kernel(logits, row_limits, counters, token_ids, logprobs, thresholds, scanned):
    """A block draws the token of a row: joins the sums of its tiles, applies the filters, takes the Gumbel argmax.

    row_limits: SamplingLimits; counters: Counters; scanned: as scan_kernel has written it. thresholds may have no
    elements: the smallest logit that the filters keep, -inf without filters.
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
    line, tile_sums, row_candidates = logits[row], scanned.sums[row], scanned.candidates[row]
    values = cuda.local.array(16, np.float32)
    # All loads of a row's arguments are in flight together: one after the other would take as long as the rest.
    row_temperature = row_limits.temperature[row]
    limits = row_limits.top_k[row], row_limits.top_p[row], row_limits.min_p[row]
    keys = counters.keys
    noise = u32(counters.position[row]), u32(counters.sample_index[row]), keys[row, 0], keys[row, 1]
    bound, count = scanned.bounds[row], i32(scanned.counts[row])
    load_tiles(tile_sums, i32(thread >> 1), tiles, values)
    compiler_barrier()
    greedy = row_temperature == np.float32(0.0)
    divisor = np.float32(1.0) if greedy else row_temperature
    factor = LOG2_E / divisor
    filtered = is_filtered(row_temperature, limits[0], limits[1], limits[2], width)
    best, token = LOWEST, NO_TOKEN
    kept_from = np.float32(-math.inf)
    logit, column = np.float32(-math.inf), NO_TOKEN
    if filtered:
        copy_list(row_candidates, min(count, i32(LIST)), scratch)
        if thread == 0:
            block_best[0] = ordered_int(NONE)
    else:
        segment = draw_segment(tile_sums, tiles, values, greedy, divisor, noise, warp_sums)
        column = i32(segment * SEGMENT + thread)
        if column < width:
            logit = line[column]
        compiler_barrier()
    largest, total = row_sums(tile_sums, tiles, values, factor, groups)
    lse, _ = row_sum.row_results(largest, total, np.float32(0.0), divisor)
    if not filtered:
        if logit > LOWEST:
            best, token = logit, column
            if not greedy:
                best = logit / divisor + gumbel(noise_word(column, TOKEN_NOISE, noise))
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
            best, token = list_gumbel_argmax(
                scratch, scanned.candidate_ids[row], count, threshold, divisor, factor, noise, block_best
            )
        else:
            threshold, total = filter_row(
                line, floor, limits, largest, total, factor, values, scratch, tails, warp_sums
            )
            best, token = row_gumbel_argmax(line, threshold, divisor, factor, noise, block_best)
        kept_from = threshold
        lse = largest / divisor + np.float32(math.log(total))
    token = lowest_of_best(best, token, warp_sums)
    if thread == 0:
        # NO_TOKEN remains if no logit is a number.
        token = min(token, i32(width - 1))
        token_ids[row] = token
        logprobs[row] = line[token] / divisor - lse
        if thresholds.shape[0] > 0:
            thresholds[row] = kept_from
        # For the next launch.
        scanned.counts[row] = i32(0)
