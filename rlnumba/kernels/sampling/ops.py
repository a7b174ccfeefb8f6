"""Draw the next token of each row of logits, with its log-prob under the distribution drawn from.

    s = z / temperature                                    z float32 logits
    min-p   keep s >= max s + log min_p                    p >= min_p * max p
    top-k   keep s >= the k-th largest kept s
    top-p   keep s >= the largest kept s whose tail, all kept tokens that are as probable or more, has at least
            top_p of the kept mass
    token = argmax over the kept of s + g,    g = -log(-log1p(-u))
    logprob = s[token] - log sum over the kept of exp s

Each filter works on what the one before left, renormalised. All are thresholds, so tokens that tie at a boundary
are all kept, and the largest always is. Temperature 0 takes the lowest index of the largest logit, without
filters, and gives the log-prob of the untempered model.

g is Gumbel noise, so the argmax is a draw from softmax(s) over the kept (Gumbel 1954; Maddison et al. 2014). And the
largest s + g of a set of tokens is distributed as log sum exp(s) over the set plus one g. So a row without filters
draws twice: first one of its segments, SEGMENT neighbouring tokens, by their log-sum-exps with a noise each, then a
token of the winner by the tokens' noise. That needs V / SEGMENT + SEGMENT noises instead of V, and is as exact.

The uniform u of token i is word i % 4 of Philox with counter (i // 4, position, sample_index, 0) and a key of seed and
prompt (philox.noise_key); a segment's counter ends with 1 instead. It depends on nothing else, not on the row, the
filters or what else runs. What has probability p wins by a u of about p, so the small u count; their step of 2^-32 is
fine enough down to p of 1e-9.

The log-prob of an unfiltered draw has the bits of logprob.linear_logp. Sources: vLLM's sampler (order of filters);
Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (repetition penalty).

On a GPU `sample_kernel` reads each row once, a few blocks a row. It writes the sums of the row's tiles, which are its
segments, and lists the tokens of a row with filters that reach a bound guessed from a sample. `finish_kernel`, a block
a row, draws. What a row keeps is found in the list, which is exact, as the list itself shows; if it shows that tokens
are missing, or too many reached the bound, the row is read again, several times.
"""

import math

import numba
import numpy as np

from rlnumba.kernels.checks import F32, I32, check
from rlnumba.kernels.gemm import cpu
from rlnumba.kernels.gemm.sm90 import processors
from rlnumba.kernels.nn.row_sum import (
    CLASSES,
    GROUPS,
    LOG2_E,
    NONE,
    TILE_COLUMNS,
    fold_sixteen,
    join,
    join_classes,
    join_lanes,
    lowest_of_best,
    row_results,
)
from rlnumba.kernels.philox import philox, philox_cpu, philox_ref, uniform, uniform_cpu
from rlnumba.kernels.ptx.warp import (
    access_length,
    ballot,
    block_sum,
    compiler_barrier,
    device_function,
    exp2,
    float_as_int,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    int_as_float,
    shuffle,
    shuffle_down,
    shuffle_up,
    sync_warp,
    vector_access,
    warp_max,
    warp_sum,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32 = np.int32
u32 = np.uint32

U32 = (np.dtype(np.uint32),)
PENALTY_THREADS = 128
# Tokens that are drawn from together once it is known which of a row's segments the token comes from, and the last
# words of the counters of segments' and of tokens' noise.
SEGMENT = TILE_COLUMNS
OF_TOKENS, OF_SEGMENTS = u32(0), u32(1)
LOWEST = np.float32(np.finfo(np.float32).min)
# Above every id, and exact as a float32.
NOWHERE = i32(1 << 24)
# Threads that read a row, and how many such blocks an SM has: 32 warps with 2 KB under way each are 64 KB, and more
# are no faster. H200, 256 x 151,936: 41.9 us; 10 blocks 43.9, 12 blocks 44.3, 4 of 256 threads 42.4, 2 of 512 42.1.
READ_THREADS, READ_BLOCKS = 128, 8
READ_WARPS = READ_THREADS // 32
# A warp reads a part of two tiles at a time, a quad of its threads 64 columns. H200: a kernel that only reads takes
# 39.3 us so; 45.2 with a quad a tile, which has a warp read at eight places 1 KB apart.
PART_COLUMNS = 2 * TILE_COLUMNS
QUAD_COLUMNS = 64
# Lanes' sums of a part in shared memory, and what keeps the banks of four parts apart.
PADDED_LANES = 36
LANES_OF_PARTS = READ_WARPS * 4 * PADDED_LANES
# Tokens of a row with filters that its list has room for, and how many are meant to be there: few where a top-k of at
# most FEW or a min-p is on.
LIST = 8192
LISTED, LISTED_IF_FEW, FEW = 4096, 1024, 128
# Maxima of sixteen logits each, from which a row's bound is guessed, and how often an interval is halved for it.
MAXIMA, HALVINGS = 128, 12
LANE_MAXIMA = MAXIMA // 32
# Bins of a search in a list, and in a row.
BINS_BITS, ROW_BINS_BITS = 8, 5
BINS, ROW_BINS = 1 << BINS_BITS, 1 << ROW_BINS_BITS
# Threads that finish a row: one for each token of a segment.
FINISH_THREADS = SEGMENT
WEIGHT_UNITS = np.float32(2.0**34)
# Floats of shared memory for the list, or for the bins of a search in a row.
ROOM = max(LIST, ROW_BINS * FINISH_THREADS)
# Loads under way in each thread where a row is read again, and where a list is.
BATCH, AT_ONCE = 16, 8
# On the CPU: buckets of a threshold search, and how many a unit of s has.
BUCKETS, BUCKETS_PER_UNIT = 1024, np.float32(16.0)
_LOG_2 = np.float32(math.log(2.0))


@device_function
def sortable(value):
    """A float32 as an int32 in the same order. Zeros of both signs are one."""
    bits = float_as_int(value + np.float32(0.0))
    return bits if bits >= i32(0) else bits ^ i32(0x7FFFFFFF)


@device_function
def from_sortable(key):
    """The float32 of a key of sortable()."""
    return int_as_float(key if key >= i32(0) else key ^ i32(0x7FFFFFFF))


@device_function
def distance(low, key):
    """How far a key lies above another as uint32; huge if it lies below."""
    return u32(np.int64(key) - np.int64(low))


@device_function
def gumbel(word):
    """The noise g of a random word."""
    return -np.float32(math.log(-np.float32(math.log1p(-uniform(word)))))


@device_function
def word_of(i, kind, noise):
    """The random word of token or segment i. kind: the counter's last word; noise: (position, completion, two keys)."""
    w0, w1, w2, w3 = philox(u32(i >> 2), noise[0], noise[1], kind, noise[2], noise[3])
    low, high = (w1, w3) if i & 1 else (w0, w2)
    return high if i & 2 else low


@device_function
def is_filtered(temperature, top_k, top_p, min_p, columns):
    """Whether a row has filters."""
    on = min_p > np.float32(0.0) or 0 < top_k < columns or top_p < np.float32(1.0)
    return on and temperature != np.float32(0.0)


load_one, _ = vector_access(1, 1)
load_pair, _ = vector_access(2, 2)


@device_function
def load_guarded(line, first, values):
    """A lane's sixteen logits one by one, -inf for those outside the row."""
    for b in range(8):
        for c in range(2):
            values[2 * b + c] = np.float32(-math.inf)
            if i32(first + 8 * b + c) < i32(line.shape[0]):
                load_one(line, first + (8 * b + c), values, 2 * b + c)


@device_function
def likely_bound(line, temperature, rank, maxima):
    """A logit that a certain number of the row's tokens reach, in every thread: the guess from a sample.

    MAXIMA threads take the largest of 16 logits each, two runs of neighbours; about `rank` of these reach the bound,
    which lies at most 64 units of s below the largest. LOWEST if the list holds the whole row. maxima: shared float32
    (MAXIMA,).
    """
    width = i32(line.shape[0])
    if width <= LIST:
        return LOWEST
    thread = i32(cuda.threadIdx.x)
    if thread < MAXIMA:
        largest = NONE
        for run in range(2):
            start = i32(np.int64(width) * (thread + run * MAXIMA) // (2 * MAXIMA))
            for i in range(8):
                largest = max(largest, line[min(i32(start + i), i32(width - 1))])
        maxima[thread] = largest
    cuda.syncthreads()
    own = cuda.local.array(LANE_MAXIMA, np.float32)
    low, high = np.float32(math.inf), NONE
    for i in range(LANE_MAXIMA):
        own[i] = maxima[32 * i + (thread & 31)]
        low, high = min(low, own[i]), max(high, own[i])
    high = warp_max(high)
    low = max(-warp_max(-low), high - np.float32(64.0) * temperature)
    for _ in range(HALVINGS):
        middle = np.float32(0.5) * low + np.float32(0.5) * high
        reached = i32(0)
        for i in range(LANE_MAXIMA):
            reached = i32(reached + cuda.popc(ballot(own[i] >= middle)))
        if reached > rank:
            low = middle
        else:
            high = middle
    return low


@device_function
def weight_of(logit, largest, factor):
    """2^((z - largest) factor) in units of 2^-34, (high, low) of 17 bits each: their sums have no order."""
    scaled = exp2((logit - largest) * factor) * np.float32(2.0**17)
    high = i32(scaled)
    return high, i32((scaled - np.float32(high)) * np.float32(2.0**17))


@device_function
def whole_weight(high, low):
    """The int64 of a weight, or of a sum of weights, from its halves."""
    return (np.int64(high) << 17) + np.int64(low)


@device_function
def list_weight(listed, count, threshold, largest, factor, by_mass, partials):
    """The weight of a list's entries >= threshold, int64, in every thread: units of 2^-34 if by_mass, else entries."""
    total = np.int64(0)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        logit = listed[i]
        if logit >= threshold:
            if by_mass:
                high, low = weight_of(logit, largest, factor)
                total += whole_weight(high, low)
            else:
                total += np.int64(1)
    return block_sum(total, partials)


@device_function
def list_threshold(listed, count, floor, largest, factor, by_mass, target, bins, partials):
    """(z, weight) in every thread: the largest z of a list whose tail {z' >= z} weighs at least target > 0, int64.

    All entries >= floor weigh at least that; weights as in list_weight. An interval of float32, in their order as
    integers, is cut in BINS; integers are added, so the order in which the entries came does not matter.
    bins: shared int32 (2, BINS).
    """
    thread, lane = i32(cuda.threadIdx.x), i32(cuda.threadIdx.x & 31)
    low = sortable(floor)
    span = distance(low, sortable(largest))
    above = np.int64(0)
    shift = i32(0)
    while span >> u32(shift) >= u32(BINS):
        shift += i32(1)
    while True:
        for i in range(thread, BINS, cuda.blockDim.x):
            bins[0, i] = bins[1, i] = i32(0)
        cuda.syncthreads()
        for i in range(thread, count, cuda.blockDim.x):
            logit = listed[i]
            far = distance(low, sortable(logit))
            if far <= span:
                at = i32(far >> u32(shift))
                if by_mass:
                    halves = weight_of(logit, largest, factor)
                    if halves[0] != 0:
                        cuda.atomic.add(bins, (0, at), halves[0])
                    if halves[1] != 0:
                        cuda.atomic.add(bins, (1, at), halves[1])
                else:
                    cuda.atomic.add(bins, (1, at), i32(1))
        cuda.syncthreads()
        if thread < 32:
            # A lane has BINS / 32 bins, the highest lane the highest.
            own = np.int64(0)
            for i in range(BINS // 32):
                at = lane * (BINS // 32) + i
                own += whole_weight(bins[0, at], bins[1, at])
            tail = own
            for doubling in range(5):
                higher = shuffle_down(tail, 1 << doubling)
                if lane + (1 << doubling) < 32:
                    tail += higher
            before = above + tail - own
            if before < target and target <= above + tail:
                i = BINS // 32 - 1
                while True:
                    at = lane * (BINS // 32) + i
                    weight = whole_weight(bins[0, at], bins[1, at])
                    if i == 0 or before + weight >= target:
                        break
                    before += weight
                    i -= 1
                partials[0], partials[1], partials[2] = before, np.int64(at), before + weight
        cuda.syncthreads()
        above, weight = partials[0], partials[2]
        low = i32(low + (partials[1] << shift))
        span = (u32(1) << u32(shift)) - u32(1)
        cuda.syncthreads()
        if shift == 0:
            break
        shift = max(i32(shift - BINS_BITS), i32(0))
    return from_sortable(low), weight


@device_function
def load_batch(line, base, values):
    """BATCH logits a thread, a block's threads apart from base + thread on; -inf for those outside the row."""
    columns, threads = i32(line.shape[0]), i32(cuda.blockDim.x)
    first = i32(base + cuda.threadIdx.x)
    if i32(base + threads * BATCH) <= columns:
        for i in range(BATCH):
            load_one(line, np.int64(first) + i * threads, values, i)
    else:
        for i in range(BATCH):
            values[i] = np.float32(-math.inf)
            if i32(first + i * threads) < columns:
                load_one(line, np.int64(first) + i * threads, values, i)


@device_function
def row_weight(line, threshold, largest, factor, values, scratch):
    """The sum of 2^((z - largest) factor) over a row's z >= threshold, in every thread. values: local, for BATCH."""
    total = np.float32(0.0)
    for base in range(0, line.shape[0], BATCH * cuda.blockDim.x):
        load_batch(line, i32(base), values)
        for i in range(BATCH):
            if values[i] >= threshold:
                total += exp2((values[i] - largest) * factor)
    return block_sum(total, scratch)


@device_function
def row_threshold(line, floor, largest, factor, by_mass, target, values, bins, tails):
    """The largest z >= floor of a row of which the tail {z' >= z} weighs at least target; floor if there is none.

    A token weighs 2^((z - largest) factor) if by_mass, else 1. An interval of float32, in their order as integers, is
    cut in ROW_BINS again and again, at most seven times, with a pass over the row each. Every thread adds to bins of
    its own, so the sums have one order. bins: shared float32, ROW_BINS a thread; tails: shared float32 (ROW_BINS,).
    """
    thread, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    low = sortable(floor)
    span = distance(low, sortable(largest))
    above = np.float32(0.0)
    shift = i32(0)
    while span >> u32(shift) >= u32(ROW_BINS):
        shift += i32(1)
    while True:
        for i in range(ROW_BINS):
            bins[i * threads + thread] = np.float32(0.0)
        for base in range(0, line.shape[0], BATCH * threads):
            load_batch(line, i32(base), values)
            for i in range(BATCH):
                far = distance(low, sortable(values[i]))
                if far <= span:
                    weight = np.float32(1.0)
                    if by_mass:
                        weight = exp2((values[i] - largest) * factor)
                    bins[i32(i32(far >> u32(shift)) * threads + thread)] += weight
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
        span = (u32(1) << u32(shift)) - u32(1)
        # The next pass writes tails.
        cuda.syncthreads()
        if shift == 0:
            break
        shift = max(i32(shift - ROW_BINS_BITS), i32(0))
    return from_sortable(low)


@device_function
def head_start(key):
    """From the best end so far, as a key: b, such that a token of logit z and word w can only win if
    w <= 2^(z factor + b).

    It ends at s + g <= s - log u = s - log w + 32 log 2. A margin covers the rounding.
    """
    so_far = from_sortable(key)
    margin = abs(so_far) * np.float32(2.0**-20) + np.float32(1e-3)
    return np.float32(32.0) - (so_far - margin) * LOG2_E


@device_function
def race_of_list(listed, listed_ids, count, threshold, divisor, factor, noise, record):
    """(end, token) of a thread's best among a list's entries >= threshold.

    record: shared int32, the best end so far as a key; what cannot pass it needs no logarithms.
    """
    ids = cuda.local.array(AT_ONCE, np.int32)
    best, token = LOWEST, NOWHERE
    for base in range(cuda.threadIdx.x, count, AT_ONCE * FINISH_THREADS):
        for i in range(AT_ONCE):
            ids[i] = listed_ids[min(i32(base + i * FINISH_THREADS), i32(count - 1))]
        compiler_barrier()
        for i in range(AT_ONCE):
            at = i32(base + i * FINISH_THREADS)
            if at < count and listed[at] >= threshold:
                word = word_of(ids[i], OF_TOKENS, noise)
                if np.float32(word) <= exp2(cuda.fma(listed[at], factor, head_start(record[0]))):
                    end = listed[at] / divisor + gumbel(word)
                    if end > best or (end == best and ids[i] < token):
                        best, token = end, ids[i]
                        cuda.atomic.max(record, 0, sortable(best))
    return best, token


@device_function
def race_of_row(line, threshold, divisor, factor, noise, record):
    """race_of_list of a row's tokens."""
    width, threads = i32(line.shape[0]), i32(cuda.blockDim.x)
    words = cuda.local.array(4, np.uint32)
    best, token = LOWEST, NOWHERE
    for first in range(i32(4 * cuda.threadIdx.x), width, i32(4 * threads)):
        first = i32(first)
        block = u32(first >> 2)
        words[0], words[1], words[2], words[3] = philox(block, noise[0], noise[1], OF_TOKENS, noise[2], noise[3])
        reach = head_start(record[0])
        for i in range(4):
            column = i32(first + i)
            if column < width and line[column] >= threshold:
                if np.float32(words[i]) <= exp2(cuda.fma(line[column], factor, reach)):
                    end = line[column] / divisor + gumbel(words[i])
                    # A thread's columns ascend: the first of equals stays.
                    if end > best:
                        best, token = end, column
                        cuda.atomic.max(record, 0, sortable(best))
    return best, token


@specialize
def sample_kernel(access):
    """The kernel for logits that can be read `access` (1 or 2) at a time."""
    load_two, _ = vector_access(2, access)

    @device_function
    def load_part(flat, where, line, at, lane_column, values):
        """A lane's sixteen logits of the warp's part that begins at column `at`; flat[where] is the first."""
        if i32((at | (PART_COLUMNS - 1)) + 1) <= i32(line.shape[0]):
            for b in range(8):
                load_two(flat, where + 8 * b, values, 2 * b)
        else:
            load_guarded(line, i32(at + lane_column), values)

    # One at a time, sixteen loads keep more registers in use than those of eight blocks.
    @cuda.jit(launch_bounds=(READ_THREADS, READ_BLOCKS if access == 2 else READ_BLOCKS - 2))
    def sample_kernel(
        logits, flat, temperature, top_k, top_p, min_p,
        blocks, rank, rank_if_few, sums, bounds, entries, listed, listed_ids,
    ):  # fmt: skip
        """`blocks` blocks share a row and read it once, a warp a part of 512 columns at a time, a lane sixteen of them.

        The next part is under way while one is added up, in row_sum.py's order. After four parts their lanes' sums
        change lanes through shared memory: of each two tiles, which are joined and written.

        Written: sums (rows, 2 tiles), of each tile the largest and the sum of 2^((z - largest) factor); of rows with
        filters bounds (rows,), the bound, entries (rows,), how many tokens reach it, and LIST of these at most in
        listed and listed_ids (rows, LIST), in any order. flat: the logits with one axis. rank, rank_if_few: of
        likely_bound.
        """
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        maxima = cuda.shared.array(MAXIMA, np.float32)
        largests = cuda.shared.array(LANES_OF_PARTS, np.float32)
        totals = cuda.shared.array(LANES_OF_PARTS, np.float32)
        row = i32(cuda.blockIdx.x // blocks)
        part = i32(cuda.blockIdx.x - row * blocks)
        line = logits[row]
        width = i32(logits.shape[1])
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        values = cuda.local.array(16, np.float32)
        at = i32((part * READ_WARPS + warp) * PART_COLUMNS)
        stride = i32(blocks * (READ_WARPS * PART_COLUMNS))
        lane_column = i32((lane >> 2) * QUAD_COLUMNS + (lane & 3) * 2)
        where = np.int64(row) * width + (at + lane_column)
        load_part(flat, where, line, at, lane_column, values)
        own_temperature, top, share, least = temperature[row], top_k[row], top_p[row], min_p[row]
        compiler_barrier()
        filtered = is_filtered(own_temperature, top, share, least, width)
        factor = LOG2_E / (np.float32(1.0) if own_temperature == np.float32(0.0) else own_temperature)
        nothing = np.float32(0.0)
        tiles = i32((width + (TILE_COLUMNS - 1)) // TILE_COLUMNS)
        bound = LOWEST
        if filtered:
            bound = likely_bound(
                line, own_temperature, rank_if_few if 0 < top <= FEW or least > np.float32(0.0) else rank, maxima
            )
            if part == 0 and thread == 0:
                bounds[row] = bound
        mine = i32(warp * (4 * PADDED_LANES))
        taken = i32(0)
        while at < width:
            hopeful = i32(0)
            if filtered:
                for i in range(16):
                    if values[i] >= bound:
                        hopeful = i32(hopeful | (1 << i))
            part_largest, part_total, _ = fold_sixteen(values, 0, 2, factor, False)
            largests[mine + taken * PADDED_LANES + lane] = part_largest
            totals[mine + taken * PADDED_LANES + lane] = part_total
            next_at = i32(at + stride)
            where += stride
            load_part(flat, where, line, next_at, lane_column, values)
            compiler_barrier()
            if filtered and ballot(hopeful) != 0:
                # Each lane's entries follow those of the lanes below it.
                number = i32(cuda.popc(hopeful))
                below = number
                for doubling in range(5):
                    lower = shuffle_up(below, 1 << doubling)
                    if lane >= 1 << doubling:
                        below = i32(below + lower)
                entry = i32(0)
                if lane == 31:
                    entry = i32(cuda.atomic.add(entries, row, below))
                entry = i32(shuffle(entry, 31) + below - number)
                while hopeful != 0:
                    i = i32(cuda.ffs(hopeful) - 1)
                    hopeful = i32(hopeful & (hopeful - 1))
                    column = i32(at + lane_column + (i >> 1) * 8 + (i & 1))
                    if entry < LIST:
                        listed[row, entry], listed_ids[row, entry] = line[column], column
                    entry = i32(entry + 1)
            if taken == 3 or next_at >= width:
                # Of each of four parts, two tiles: lane (t, k, i) joins four lanes' sums of tile t of the k-th part.
                sync_warp()
                largest, total = NONE, nothing
                spot = i32(mine + ((lane >> 2) & 3) * PADDED_LANES + (lane & 16) + (lane & 3))
                for quad in range(4):
                    other = i32(spot + 4 * quad)
                    largest, total, _ = join(largest, total, nothing, largests[other], totals[other], nothing, factor)
                largest, total, _ = join_lanes(largest, total, nothing, 1, factor)
                largest, total, _ = join_lanes(largest, total, nothing, 2, factor)
                later = i32(((lane >> 2) & 3) - taken)
                tile = i32((at + later * stride) // TILE_COLUMNS + (lane >> 4))
                if (lane & 3) == 0 and later <= 0 and tile < tiles:
                    sums[row, 2 * tile], sums[row, 2 * tile + 1] = largest, total
                sync_warp()
                taken = i32(-1)
            taken = i32(taken + 1)
            at = next_at

    return sample_kernel


@device_function
def load_tiles(sums, first, tiles, values):
    """(largest, total) of up to eight tiles of a class, from tile `first` on; of nothing beyond the row."""
    for i in range(8):
        values[2 * i], values[2 * i + 1] = NONE, np.float32(0.0)
        tile = i32(first + i * CLASSES)
        if tile < tiles:
            load_pair(sums, 2 * np.int64(tile), values, 2 * i)


@device_function
def copy_list(listed, count, room):
    """A list to shared memory."""
    some = cuda.local.array(AT_ONCE, np.float32)
    for base in range(cuda.threadIdx.x, count, AT_ONCE * FINISH_THREADS):
        for i in range(AT_ONCE):
            some[i] = listed[min(i32(base + i * FINISH_THREADS), i32(count - 1))]
        compiler_barrier()
        for i in range(AT_ONCE):
            if i32(base + i * FINISH_THREADS) < count:
                room[base + i * FINISH_THREADS] = some[i]


@cuda.jit(launch_bounds=(FINISH_THREADS, 2))
def finish_kernel(
    logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs,
    sums, bounds, entries, listed, listed_ids,
):  # fmt: skip
    """A block finishes a row: joins the sums of its tiles, applies the filters, draws.

    Without filters its segments, which are the tiles, race, two threads a class of tiles, then the tokens of the
    winner, one a thread. A greedy race has no noise.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    scratch = cuda.shared.array(32, np.float32)
    partials = cuda.shared.array(32, np.int64)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    record = cuda.shared.array(1, np.int32)
    bins = cuda.shared.array((2, BINS), np.int32)
    tails = cuda.shared.array(ROW_BINS, np.float32)
    room = cuda.shared.array(ROOM, np.float32)
    row = cuda.blockIdx.x
    thread = i32(cuda.threadIdx.x)
    width = i32(logits.shape[1])
    tiles = i32((width + (TILE_COLUMNS - 1)) // TILE_COLUMNS)
    line, own_sums, kept = logits[row], sums[row], listed[row]
    values = cuda.local.array(16, np.float32)
    # What a row needs comes at once: one after the other would take as long as all else here.
    own_temperature, top, share, least = temperature[row], top_k[row], top_p[row], min_p[row]
    noise = u32(position[row]), u32(sample_index[row]), keys[row, 0], keys[row, 1]
    bound, count = bounds[row], i32(entries[row])
    load_tiles(own_sums, i32(thread >> 1), tiles, values)
    compiler_barrier()
    greedy = own_temperature == np.float32(0.0)
    divisor = np.float32(1.0) if greedy else own_temperature
    factor = LOG2_E / divisor
    filtered = is_filtered(own_temperature, top, share, least, width)
    nothing = np.float32(0.0)
    best, token = LOWEST, NOWHERE
    logit, column = np.float32(-math.inf), NOWHERE
    if filtered:
        copy_list(kept, min(count, i32(LIST)), room)
        if thread == 0:
            record[0] = sortable(NONE)
    else:
        segment, odd = i32(tiles - 1), i32(thread & 1)
        for base in range(thread >> 1, tiles, 8 * CLASSES):
            if base >= 8 * CLASSES:
                load_tiles(own_sums, i32(base), tiles, values)
            for i in range(0, 8, 2):
                # Of the class's tiles, two neighbouring threads take every other one.
                tile = i32(base + (i + odd) * CLASSES)
                end, weight = (values[2 * i + 2], values[2 * i + 3]) if odd else (values[2 * i], values[2 * i + 1])
                if tile < tiles:
                    if not greedy and weight > nothing:
                        noise_of_segment = gumbel(word_of(tile, OF_SEGMENTS, noise))
                        end = end / divisor + (np.float32(math.log(weight)) + noise_of_segment)
                    # A thread's segments ascend: the first of equals stays.
                    if end > best:
                        best, segment = end, tile
        _, segment = lowest_of_best(best, segment, scratch)
        column = i32(segment * SEGMENT + thread)
        if column < width:
            logit = line[column]
        compiler_barrier()
    largest, total = NONE, nothing
    for base in range(thread >> 1, tiles, 8 * CLASSES):
        if tiles > 8 * CLASSES:
            load_tiles(own_sums, i32(base), tiles, values)
        for i in range(8):
            if i32(base + i * CLASSES) < tiles:
                largest, total, _ = join(largest, total, nothing, values[2 * i], values[2 * i + 1], nothing, factor)
    largest, total, _ = join_classes(largest, total, nothing, FINISH_THREADS // CLASSES, factor, groups)
    lse, _ = row_results(largest, total, nothing, divisor)
    if not filtered:
        best = LOWEST
        if logit > LOWEST:
            best, token = logit, column
            if not greedy:
                best = logit / divisor + gumbel(word_of(column, OF_TOKENS, noise))
    elif total > nothing:
        floor = LOWEST
        if least > nothing:
            floor = largest + divisor * np.float32(math.log(least))
        limited, fits = 0 < top < width, count <= LIST
        # Whether the list holds all tokens that are kept so far.
        complete = floor >= bound
        threshold = max(floor, bound)
        mass = np.int64(0)
        if fits and limited:
            number = np.int64(count)
            if floor > bound:
                number = list_weight(room, count, threshold, largest, factor, False, partials)
            if number >= top:
                complete = True
                threshold, _ = list_threshold(
                    room, count, threshold, largest, factor, False, np.int64(top), bins, partials
                )
        if fits and (complete or not (limited or least > nothing)):
            mass = list_weight(room, count, threshold, largest, factor, True, partials)
            if share < np.float32(1.0):
                # Of the mass of what is kept so far: of the whole row if no other filter is on.
                whole = np.float32(mass) if complete else total * WEIGHT_UNITS
                target = max(np.int64(share * whole), np.int64(1))
                if complete or target <= mass:
                    complete = True
                    threshold, mass = list_threshold(
                        room, count, threshold, largest, factor, True, min(target, mass), bins, partials
                    )
        if fits and complete:
            total = np.float32(mass) / WEIGHT_UNITS
            best, token = race_of_list(room, listed_ids[row], count, threshold, divisor, factor, noise, record)
        else:
            threshold = floor
            if limited:
                target = np.float32(top)
                threshold = row_threshold(line, threshold, largest, factor, False, target, values, room, tails)
            if share < np.float32(1.0):
                target = share * total
                if limited or least > nothing:
                    target = share * row_weight(line, threshold, largest, factor, values, scratch)
                threshold = row_threshold(line, threshold, largest, factor, True, target, values, room, tails)
            total = row_weight(line, threshold, largest, factor, values, scratch)
            best, token = race_of_row(line, threshold, divisor, factor, noise, record)
        lse = largest / divisor + np.float32(math.log(total))
    _, token = lowest_of_best(best, token, scratch)
    if thread == 0:
        # Nothing has won if no logit is a number.
        token = min(token, i32(width - 1))
        token_ids[row] = token
        logprobs[row] = line[token] / divisor - lse
        # For the next launch.
        entries[row] = i32(0)


@cuda.jit
def repetition_penalty_kernel(logits, penalty, history):
    """A block owns a row, a thread every PENALTY_THREADS-th entry of its history.

    A bit a token in shared memory says whose turn has passed: the one thread that sets it applies the penalty.
    Which thread that is makes no difference.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    seen = cuda.shared.array(0, np.int32)
    row = cuda.blockIdx.x
    columns = logits.shape[1]
    for word in range(cuda.threadIdx.x, (columns + 31) // 32, cuda.blockDim.x):
        seen[word] = np.int32(0)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, history.shape[1], cuda.blockDim.x):
        token = history[row, i]
        if 0 <= token < columns:
            bit = np.int32(np.int32(1) << np.int32(token % 32))
            if cuda.atomic.or_(seen, token // 32, bit) & bit == 0:
                logit = logits[row, token]
                logits[row, token] = logit / penalty[row] if logit > np.float32(0.0) else logit * penalty[row]


class Workspace:
    """What sample_kernel leaves for finish_kernel. Grows with what is asked of it; what graphs know stays."""

    def __init__(self):
        self.kept = {}

    def arrays(self, rows, tiles):
        """sums, bounds, entries, listed and listed_ids of at least so many rows."""
        kept = self.kept.setdefault(tiles, [])
        if not kept or len(kept[-1][0]) < rows:
            xp, rows = device.xp(), 1 << (rows - 1).bit_length()
            kept.append((
                xp.zeros((rows, 2 * tiles), np.float32), xp.zeros(rows, np.float32), xp.zeros(rows, np.int32),
                xp.zeros((rows, LIST), np.float32), xp.zeros((rows, LIST), np.int32),
            ))  # fmt: skip
        return kept[-1]


_workspace = Workspace()


def blocks_of_row(rows, columns):
    """How many blocks share a row: what keeps the GPU busy at one time, and no more than shorten that time."""
    parts = -(-columns // PART_COLUMNS)
    most = max(READ_BLOCKS * processors() // rows, 1)
    turns = -(-parts // (READ_WARPS * most))
    return -(-parts // (READ_WARPS * turns))


def sample_rank(columns, listed):
    """How many of MAXIMA groups of sixteen hold one of a row's `listed` largest tokens, as an int32."""
    return np.int32(min(round(MAXIMA * (1 - (1 - min(listed / columns, 1)) ** 16)), MAXIMA - 1))


def sample(logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs):
    """Draw a token of each row, as the module's docstring says.

    logits (B, V) float32, V < 2^24; temperature (B,) float32, 0 for greedy; top_k (B,) int32, 0 for off; top_p
    (B,) float32 in (0, 1], 1 for off; min_p (B,) float32 in [0, 1], 0 for off; keys (B, 2) uint32 from noise_key;
    sample_index (B,) int32, which completion of the prompt; position (B,) int32, of the token to draw. token_ids
    (B,) int32 and logprobs (B,) float32 are written. A row with a NaN or +inf, or of -inf alone, gives some token
    with a NaN log-prob. Raises ValueError for other shapes or dtypes.
    """
    rows, columns = check("sample", "logits", logits, (None, None), F32)
    for name, array, dtypes in (
        ("temperature", temperature, F32),
        ("top_k", top_k, I32),
        ("top_p", top_p, F32),
        ("min_p", min_p, F32),
        ("sample_index", sample_index, I32),
        ("position", position, I32),
        ("token_ids", token_ids, I32),
        ("logprobs", logprobs, F32),
    ):
        check("sample", name, array, (rows,), dtypes)
    check("sample", "keys", keys, (rows, 2), U32)
    if not 0 < columns < 2**24:
        raise ValueError(f"sample: logits must have 1 to {2**24 - 1} columns, got {columns}")
    arguments = (logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs)
    if device.name() == "cpu":
        sample_rows(*arguments)
        return
    if not rows:
        return
    blocks = int(blocks_of_row(rows, columns))
    workspace = _workspace.arrays(rows, -(-columns // TILE_COLUMNS))
    launch(
        sample_kernel(min(2, access_length(columns, logits))), rows * blocks, READ_THREADS, logits, logits.reshape(-1),
        temperature, top_k, top_p, min_p, np.int32(blocks), sample_rank(columns, LISTED),
        sample_rank(columns, LISTED_IF_FEW), *workspace,
    )  # fmt: skip
    launch(finish_kernel, rows, FINISH_THREADS, *arguments, *workspace)


def apply_repetition_penalty(logits, penalty, history):
    """Divide the positive and multiply the negative logits of tokens that occurred by the row's penalty, in place.

    logits (B, V) float32; penalty (B,) float32, 1 for off; history (B, L) int32, the ids of prompt and completion
    so far in any order, padded with -1; a token that occurs twice is penalised once. Raises ValueError for other
    shapes or dtypes. Source: Keskar et al. 2019, as in transformers' RepetitionPenaltyLogitsProcessor.
    """
    rows, columns = check("apply_repetition_penalty", "logits", logits, (None, None), F32)
    check("apply_repetition_penalty", "penalty", penalty, (rows,), F32)
    check("apply_repetition_penalty", "history", history, (rows, None), I32)
    if device.name() == "cpu":
        logits[...] = apply_repetition_penalty_ref(logits, penalty, history)
        return
    shared_bytes = 4 * -(-columns // 32)
    launch(repetition_penalty_kernel, rows, PENALTY_THREADS, logits, penalty, history, shared=shared_bytes)


@numba.njit(cache=True, fastmath={"contract"})
def _noise_words(words, first, kind, position, sample_index, key0, key1):
    """The random words (n,) of tokens or segments first, first + 1, ...: first and n multiples of 4."""
    for i in range(words.shape[0] // 4):
        counter = np.uint32(first // 4 + i)
        a, b, c, d = philox_cpu(counter, position, sample_index, kind, key0, key1)
        words[4 * i] = a
        words[4 * i + 1] = b
        words[4 * i + 2] = c
        words[4 * i + 3] = d


@numba.njit(cache=True, fastmath={"contract"})
def _noise_ceiling(word):
    """A bound of a word's Gumbel noise, close and cheap: -log(-log1p(-u)) <= -log(u).

    The bits of a float32, exponent and mantissa, are a piecewise linear lower bound of its log2. 0.001 covers
    the rounding.
    """
    bits = np.float32(np.float32(word) + np.float32(0.5)).view(np.int32)
    return np.float32(159.0) * _LOG_2 + np.float32(1e-3) - np.float32(bits) * (_LOG_2 * np.float32(2.0**-23))


@numba.njit(cache=True, fastmath={"contract"})
def _gumbel_cpu(word):
    return -np.float32(math.log(-np.float32(math.log1p(-uniform_cpu(word)))))


@numba.njit(cache=True, fastmath={"contract"})
def _race(row, temperature, threshold, begin, key0, key1, sample_index, position):
    """argmax of s + g over s >= threshold. Most tokens lose by _noise_ceiling, so few logarithms are taken.

    row[0] is token `begin`, a multiple of 4.
    """
    words = np.empty(SEGMENT, np.uint32)
    best, token = np.float32(-np.inf), 0
    for first in range(0, row.shape[0], SEGMENT):
        part = row[first : first + SEGMENT]
        kept = 0
        for i in range(part.shape[0]):
            kept += part[i] / temperature >= threshold
        if kept == 0:
            continue
        _noise_words(words, begin + first, OF_TOKENS, position, sample_index, key0, key1)
        hopeful = 0
        for i in range(part.shape[0]):
            hopeful += part[i] / temperature + _noise_ceiling(words[i]) > best
        if hopeful == 0:
            continue
        for i in range(part.shape[0]):
            scaled = part[i] / temperature
            if scaled >= threshold and scaled + _noise_ceiling(words[i]) > best:
                value = scaled + _gumbel_cpu(words[i])
                if value > best:
                    best, token = value, first + i
    return token


@numba.njit(cache=True)
def _race_of_segments(row, temperature, largest, weights, key0, key1, sample_index, position):
    """The token of a row without filters: a race of segments, then one in the winner. weights: room (V,) float32."""
    cpu.row_softmax(row, temperature, largest, np.float32(1.0), weights)
    segments = -(-row.shape[0] // SEGMENT)
    words = np.empty(-(-segments // 4) * 4, np.uint32)
    _noise_words(words, 0, OF_SEGMENTS, position, sample_index, key0, key1)
    best, segment = np.float32(-np.inf), 0
    for i in range(segments):
        total = np.float32(0.0)
        for weight in weights[i * SEGMENT : (i + 1) * SEGMENT]:
            total += weight
        if total > 0:
            end = largest + (np.float32(math.log(total)) + _gumbel_cpu(words[i]))
            if end > best:
                best, segment = end, i
    first = segment * SEGMENT
    return first + _race(row[first : first + SEGMENT], temperature, LOWEST, first, key0, key1, sample_index, position)


@numba.njit(cache=True)
def _tail_threshold_cpu(scaled, weights, floor, largest, target):
    """As tail_threshold; weights (V,) float32. Buckets by distance from the largest, then sorts one bucket."""
    sums = np.zeros(BUCKETS)
    buckets = np.full(scaled.shape[0], -1, np.int16)
    for i in range(scaled.shape[0]):
        if scaled[i] >= floor:
            bucket = int(min((largest - scaled[i]) * BUCKETS_PER_UNIT, np.float32(BUCKETS - 1)))
            buckets[i] = bucket
            sums[bucket] += weights[i]
    total = 0.0
    bucket = 0
    while bucket < BUCKETS - 1 and total + sums[bucket] < target:
        total += sums[bucket]
        bucket += 1
    group_sizes = np.flatnonzero(buckets == bucket)
    for i in group_sizes[np.argsort(-scaled[group_sizes])]:
        total += weights[i]
        if total >= target:
            return scaled[i]
    return floor


@numba.njit(cache=True)
def _kept_mass_cpu(scaled, weights, threshold):
    total = 0.0
    for i in range(scaled.shape[0]):
        if scaled[i] >= threshold:
            total += weights[i]
    return total


@numba.njit(cache=True)
def _filter(row, temperature, top_k, top_p, min_p, largest):
    """(threshold of s, log-sum-exp of the kept s) of a row with at least one filter on."""
    scaled, weights = np.empty_like(row), np.empty_like(row)
    for i in range(row.shape[0]):
        scaled[i] = row[i] / temperature
    cpu.row_softmax(row, temperature, largest, np.float32(1.0), weights)
    threshold = LOWEST
    if min_p > 0:
        threshold = max(threshold, largest + np.float32(math.log(min_p)))
    if 0 < top_k < row.shape[0]:
        threshold = _tail_threshold_cpu(scaled, np.ones_like(row), threshold, largest, float(top_k))
    if top_p < 1:
        target = float(top_p) * _kept_mass_cpu(scaled, weights, threshold)
        threshold = _tail_threshold_cpu(scaled, weights, threshold, largest, target)
    return threshold, largest + np.float32(math.log(_kept_mass_cpu(scaled, weights, threshold)))


@numba.njit(cache=True, parallel=True)
def sample_rows(logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs):
    """The numpy device's sample; arguments as there."""
    for b in numba.prange(logits.shape[0]):
        row = logits[b]
        greedy = temperature[b] == 0
        divisor = np.float32(1.0) if greedy else temperature[b]
        lse, _, top = cpu.row_terms(row, divisor)
        token = int(top)
        if not greedy:
            noise = keys[b, 0], keys[b, 1], np.uint32(sample_index[b]), np.uint32(position[b])
            largest = row[top] / divisor
            filtered = min_p[b] > 0 or 0 < top_k[b] < row.shape[0] or top_p[b] < 1
            # A row with a NaN or an infinity has no buckets.
            if filtered and not math.isnan(lse):
                threshold, lse = _filter(row, divisor, top_k[b], top_p[b], min_p[b], largest)
                token = _race(row, divisor, threshold, 0, *noise)
            else:
                token = _race_of_segments(row, divisor, largest, np.empty_like(row), *noise)
        token_ids[b] = token
        logprobs[b] = row[token] / divisor - lse


def kept_ref(logits, temperature, top_k, top_p, min_p):
    """Which tokens of one row (V,) the filters keep, by their definition on probabilities; temperature > 0."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    kept = p >= min_p
    if 0 < top_k < np.sum(kept):
        kept &= p >= np.sort(p[kept])[-top_k]
    if top_p < 1:
        values, inverse = np.unique(np.where(kept, p, 0.0), return_inverse=True)
        mass = np.bincount(inverse, weights=np.where(kept, p, 0.0))
        mass_above = np.cumsum(mass[::-1])[::-1] - mass
        kept &= (mass_above < top_p * mass.sum())[inverse]
    return kept


def sample_ref(logits, temperature, top_k, top_p, min_p, keys, sample_index, position):
    """(token_ids, logprobs) of sample, in float64, row by row."""
    token_ids, logprobs = np.empty(len(logits), np.int32), np.empty(len(logits))
    for b, row in enumerate(logits.astype(np.float64)):
        name = keys[b], sample_index[b], position[b]
        scaled = row / (temperature[b] or 1.0)
        if not temperature[b]:
            token_ids[b] = np.argmax(row)
        elif min_p[b] > 0 or 0 < top_k[b] < len(row) or top_p[b] < 1:
            scaled = np.where(kept_ref(row, temperature[b], top_k[b], top_p[b], min_p[b]), scaled, -np.inf)
            token_ids[b] = np.argmax(scaled + noise_ref(len(row), *name))
        else:
            weights = np.exp(scaled - scaled.max())
            with np.errstate(divide="ignore"):
                of_segments = np.log(np.add.reduceat(weights, np.arange(0, len(row), SEGMENT)))
            segment = np.argmax(of_segments + noise_ref(len(of_segments), *name, OF_SEGMENTS))
            own = slice(segment * SEGMENT, (segment + 1) * SEGMENT)
            token_ids[b] = own.start + np.argmax(scaled[own] + noise_ref(len(row), *name)[own])
        logprobs[b] = scaled[token_ids[b]] - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))
    return token_ids, logprobs


def noise_ref(count, key, sample_index, position, kind=OF_TOKENS):
    """The Gumbel noise (count,) of the tokens or segments of one row."""
    u = np.minimum((noise_words_ref(count, key, sample_index, position, kind) + 0.5) / 2**32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def noise_words_ref(count, key, sample_index, position, kind=OF_TOKENS):
    """The random words (count,) uint32 of the tokens or segments of one row."""
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1], counters[:, 2], counters[:, 3] = position, sample_index, kind
    return philox_ref(counters, key).reshape(-1)[:count]


def apply_repetition_penalty_ref(logits, penalty, history):
    """The penalised copy of logits."""
    out = logits.copy()
    for row, factor, tokens in zip(out, penalty, history, strict=True):
        tokens = np.unique(tokens[tokens >= 0])
        row[tokens] = np.where(row[tokens] > 0, row[tokens] / factor, row[tokens] * factor)
    return out
