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

g is Gumbel noise, so the argmax is a draw from softmax(s) over the kept (Gumbel 1954; Maddison et al. 2014). The
uniform u of token i is word i % 4 of Philox with counter (i // 4, position, sample_index, 0) and a key of seed and
prompt (philox.noise_key): it depends on nothing else, not on the row, the filters or what else runs. A token of
probability p wins by a u of about p, so the small u count; their step of 2^-32 is fine enough down to p of 1e-9.

The log-prob of an unfiltered draw has the bits of logprob.linear_logp. Sources: vLLM's sampler (order of filters);
Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (repetition penalty).

On a GPU two kernels share the rows. `sample_kernel` reads a row without filters once. `filtered_kernel` reads a
filtered row twice: first a histogram, which says above which logit the threshold must lie, then the few tokens above
that go to a list, which is sorted, and everything else is done there. A row that keeps more tokens than the list
holds is read more often.
"""

import math

import numba
import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import cpu
from rlnumba.kernels.check import F32, I32, check
from rlnumba.kernels.instructions import (
    access_length,
    ballot,
    block_max,
    block_sum,
    device_function,
    exp2,
    float_as_int,
    int_as_float,
    shuffle,
    shuffle_up,
    shuffle_xor,
    sync_warp,
    vector_access,
    warp_max,
    warp_sum,
)
from rlnumba.kernels.launch import kernel_factory, launch
from rlnumba.kernels.philox import philox, philox_cpu, philox_ref, uniform, uniform_cpu
from rlnumba.kernels.row_sum import (
    CLASSES,
    GROUPS,
    LOG2_E,
    NONE,
    ROW_THREADS,
    TILE_COLUMNS,
    fold_sixteen,
    join,
    join_classes,
    join_lanes,
    lowest_of_best,
    row_results,
)

i32 = np.int32
u32 = np.uint32

U32 = (np.dtype(np.uint32),)
WARPS = ROW_THREADS // 32
PENALTY_THREADS = 128
LOWEST = np.float32(np.finfo(np.float32).min)
# Above every id, and exact as a float32; and above every number in the order of sortable().
NOWHERE = i32(1 << 24)
LAST_KEY = i32(0x7FFFFFFF)
# The first pass of filtered_kernel: each thread has BINS float32 of its own in shared memory, 64 KiB in all. Half
# as many tokens fit there as a list of (logit, id).
BINS = 32
LIST = BINS * ROW_THREADS // 2
# Loads under way in each thread.
BATCH = 16
# Numbers at which one pass over a row cuts the interval of a threshold that keeps many tokens.
CUTS = 7
# On the CPU: tokens whose noise is made at a time; buckets of a threshold search, and how many a unit of s has.
BLOCK = 256
BUCKETS, BUCKETS_PER_UNIT = 1024, np.float32(16.0)
_LOG_2 = np.float32(math.log(2.0))


@device_function
def sortable(value):
    """A float32 as an int32 in the same order; its own inverse, by way of the bits."""
    bits = float_as_int(value)
    return bits if bits >= i32(0) else bits ^ i32(0x7FFFFFFF)


@device_function
def from_sortable(key):
    """The float32 of a key of sortable()."""
    return int_as_float(key if key >= i32(0) else key ^ i32(0x7FFFFFFF))


@device_function
def finish(scaled, column, place, completion, key0, key1):
    """s + g of a token: where it ends in the race."""
    w0, w1, w2, w3 = philox(u32(column >> 2), place, completion, u32(0), key0, key1)
    low, high = (w1, w3) if column & 1 else (w0, w2)
    word = high if column & 2 else low
    return scaled - np.float32(math.log(-np.float32(math.log1p(-uniform(word)))))


@device_function
def is_filtered(temperature, top_k, top_p, min_p, columns):
    """Whether a row takes filtered_kernel."""
    on = min_p > np.float32(0.0) or 0 < top_k < columns or top_p < np.float32(1.0)
    return on and temperature != np.float32(0.0)


@kernel_factory
def sample_kernel(access):
    """The kernel for logits that can be read `access` (1 or 2) at a time."""
    load_two, _ = vector_access(2, access)

    @cuda.jit(launch_bounds=(ROW_THREADS, 2))
    def sample_kernel(logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs):
        """A block owns a row without filters and reads it once: log-sum-exp, noise and argmax together.

        A quad owns a class of tiles, a lane sixteen logits at a time, in row_sum.py's order. Lanes 2 j and 2 j + 1
        make the noise of one block of eight columns each, and give each other half of it. Most tokens lose the race
        at once: -log1p(-u) >= u, so s + g can only exceed the best so far, `record`, if exp(s - record) >= u. Only
        where that holds, with a margin for rounding, are the logarithms taken. record is the whole block's; how
        soon a warp sees it changes which losers are looked at, not who wins.
        """
        scratch = cuda.shared.array(32, np.float32)
        groups = cuda.shared.array((GROUPS, 3), np.float32)
        record = cuda.shared.array(1, np.int32)
        row = cuda.blockIdx.x
        line = logits[row]
        width = i32(logits.shape[1])
        if is_filtered(temperature[row], top_k[row], top_p[row], min_p[row], width):
            return
        greedy = temperature[row] == np.float32(0.0)
        divisor = np.float32(1.0) if greedy else temperature[row]
        factor = LOG2_E / divisor
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread & 31)
        odd, upper = i32(lane & 1), i32((lane >> 1) & 1)
        key0, key1 = keys[row, 0], keys[row, 1]
        place, completion = u32(position[row]), u32(sample_index[row])
        values = cuda.local.array(16, np.float32)
        logit = cuda.local.array(1, np.float32)
        words = cuda.local.array(4, np.uint32)
        best, token = LOWEST, NOWHERE
        largest, total = NONE, np.float32(0.0)
        nothing = np.float32(0.0)
        if not greedy:
            # A record to begin with, of a token a thread.
            if thread < width:
                load_one(line, thread, logit, 0)
                end = finish(logit[0] / divisor, thread, place, completion, key0, key1)
                if end > best:
                    best, token = end, thread
            reached = block_max(best, scratch)
            if thread == 0:
                record[0] = sortable(reached)
            cuda.syncthreads()
        for base in range(i32((thread - lane) * (TILE_COLUMNS // 4)), width, i32(CLASSES * TILE_COLUMNS)):
            tile_largest, tile_total = NONE, np.float32(0.0)
            tile_start = i32(base + (lane >> 2) * TILE_COLUMNS)
            for start in range(tile_start, i32(tile_start + TILE_COLUMNS), i32(64)):
                start = i32(start)
                # Of each pair of blocks of eight columns, this lane's own stands first: the odd one for odd lanes.
                own = i32(start + odd * 8 + (lane & 3) * 2)
                other = i32(start + 8 - odd * 8 + (lane & 3) * 2)
                if i32(start + 64) <= width:
                    for pair in range(4):
                        load_two(line, own + 16 * pair, values, 4 * pair)
                        load_two(line, other + 16 * pair, values, 4 * pair + 2)
                else:
                    for pair in range(4):
                        for c in range(2):
                            values[4 * pair + c] = values[4 * pair + 2 + c] = np.float32(-math.inf)
                            if i32(own + 16 * pair + c) < width:
                                load_one(line, own + (16 * pair + c), values, 4 * pair + c)
                            if i32(other + 16 * pair + c) < width:
                                load_one(line, other + (16 * pair + c), values, 4 * pair + 2 + c)
                part_largest, part_total, _ = fold_sixteen(values, 0, 2, factor, False)
                tile_largest, tile_total, _ = join(
                    tile_largest, tile_total, nothing, part_largest, part_total, nothing, factor
                )
                if greedy:
                    # A lane's parts ascend: the first of equals stays.
                    if part_largest > best:
                        best, token = part_largest, start
                else:
                    sync_warp()
                    so_far = from_sortable(record[0])
                    margin = abs(so_far) * np.float32(2.0**-20) + np.float32(1e-3)
                    reach = exp2((so_far - margin) * LOG2_E - part_largest * factor - np.float32(32.0))
                    # The largest noise, of u = 2^-33, does not help a logit so far below; reach is in units of 2^-32.
                    if ballot(reach <= np.float32(2.0)) != 0:
                        signs = i32(-1)
                        for pair in range(4):
                            counter = u32((start >> 2) + 4 * pair + odd * 2 + upper)
                            w0, w1, w2, w3 = philox(counter, place, completion, u32(0), key0, key1)
                            words[0], words[1] = (w2, w3) if odd else (w0, w1)
                            sent0, sent1 = (w0, w1) if odd else (w2, w3)
                            words[2], words[3] = u32(shuffle_xor(i32(sent0), 1)), u32(shuffle_xor(i32(sent1), 1))
                            for i in range(4):
                                values[4 * pair + i] = cuda.fma(-np.float32(words[i]), reach, values[4 * pair + i])
                                signs &= float_as_int(values[4 * pair + i])
                        if ballot(signs >= 0) != 0:
                            hopeful = i32(0)
                            for i in range(16):
                                if float_as_int(values[i]) >= 0:
                                    hopeful |= i32(1 << i)
                            while hopeful != 0:
                                i = i32(cuda.ffs(hopeful) - 1)
                                hopeful = i32(hopeful & (hopeful - 1))
                                # Of pair i // 4 the block that slot i belongs to, own or other.
                                block = (i >> 2) * 2 + (odd ^ ((i >> 1) & 1))
                                column = i32(start + block * 8 + (lane & 3) * 2 + (i & 1))
                                if column < width:
                                    load_one(line, column, logit, 0)
                                    end = finish(logit[0] / temperature[row], column, place, completion, key0, key1)
                                    if end > best or (end == best and column < token):
                                        best, token = end, column
                            reached = warp_max(best)
                            if lane == 0:
                                cuda.atomic.max(record, 0, sortable(reached))
            tile_largest, tile_total, _ = join_lanes(tile_largest, tile_total, nothing, 1, factor)
            tile_largest, tile_total, _ = join_lanes(tile_largest, tile_total, nothing, 2, factor)
            largest, total, _ = join(largest, total, nothing, tile_largest, tile_total, nothing, factor)
        largest, total, _ = join_classes(largest, total, nothing, 4, factor, groups)
        if greedy and best == largest:
            # token is where the part begins in which this lane met it.
            start, token = i32(token + (lane & 3) * 2), NOWHERE
            for i in range(15, -1, -1):
                column = i32(start + i // 2 * 8 + i % 2)
                if column < width and line[column] == largest:
                    token = column
        _, token = lowest_of_best(best, token, scratch)
        if cuda.threadIdx.x == 0:
            # Nothing has won if no logit is a number.
            token = min(token, i32(width - 1))
            divisor = np.float32(1.0) if greedy else temperature[row]
            lse, _ = row_results(largest, total, nothing, divisor)
            token_ids[row] = token
            logprobs[row] = line[token] / divisor - lse

    return sample_kernel


@device_function
def first_interval(line, temperature, scratch):
    """(low, scale) of a histogram: bin 0 lies below low + 1 / scale, all but the last below a sample's largest.

    The sample is eight neighbouring logits a thread. low is the least of the threads' largest, so that some masked
    logits (-inf) do not matter, but at most 40 units of s below the largest.
    """
    columns = i32(line.shape[0])
    start = i32(np.int64(columns) * cuda.threadIdx.x // ROW_THREADS)
    largest = NONE
    for i in range(8):
        largest = max(largest, line[min(i32(start + i), i32(columns - 1))])
    high = block_max(largest, scratch)
    low = -block_max(-largest, scratch)
    low = min(max(low, high - np.float32(40.0) * temperature), high - np.float32(1e-6) * max(abs(high), temperature))
    return low, np.float32(BINS - 2) / (high - low)


load_one, _ = vector_access(1, 1)


@device_function
def load_batch(line, base, values):
    """BATCH logits a thread, ROW_THREADS apart from base + thread on; -inf for those outside the row."""
    columns = i32(line.shape[0])
    first = i32(base + cuda.threadIdx.x)
    if base + ROW_THREADS * BATCH <= columns:
        for i in range(BATCH):
            load_one(line, np.int64(first) + i * ROW_THREADS, values, i)
    else:
        for i in range(BATCH):
            values[i] = np.float32(-math.inf)
            if i32(first + i * ROW_THREADS) < columns:
                load_one(line, np.int64(first) + i * ROW_THREADS, values, i)


@device_function
def kept_mass(line, threshold, largest, factor, scratch):
    """The sum of 2^((z - largest) factor) over z >= threshold, in every thread."""
    total = np.float32(0.0)
    for column in range(cuda.threadIdx.x, line.shape[0], ROW_THREADS):
        if line[column] >= threshold:
            total += exp2((line[column] - largest) * factor)
    return block_sum(total, scratch)


@device_function
def tail_threshold(line, floor, largest, factor, by_mass, target, partials):
    """The largest z >= floor of which the tail {z' >= z} weighs at least target; floor if there is none.

    A token weighs 2^((z - largest) factor) if by_mass, else 1. The weight of a tail falls as z rises, so an
    interval of float32, in their order as integers, is narrowed to one number; each of up to 11 passes over the
    row weighs the tails of CUTS numbers in it. partials: shared float32 (CUTS, WARPS).
    """
    bounds = cuda.local.array(CUTS, np.float32)
    sums = cuda.local.array(CUTS, np.float32)
    warp = cuda.threadIdx.x // 32
    low = np.int64(sortable(floor))
    high = np.int64(sortable(largest))
    while low < high:
        step = (high - low + CUTS + 1) // (CUTS + 1)
        for i in range(CUTS):
            key = min(low + (i + 1) * step, np.int64(LAST_KEY))
            bounds[i] = from_sortable(i32(key))
            sums[i] = np.float32(0.0)
        for column in range(cuda.threadIdx.x, line.shape[0], ROW_THREADS):
            logit = line[column]
            weight = np.float32(1.0)
            if by_mass:
                weight = exp2((logit - largest) * factor)
            for i in range(CUTS):
                if logit >= bounds[i]:
                    sums[i] += weight
        for i in range(CUTS):
            total = warp_sum(sums[i])
            if cuda.threadIdx.x % 32 == 0:
                partials[i, warp] = total
        cuda.syncthreads()
        reached = np.int64(0)
        for i in range(CUTS):
            total = partials[i, 0]
            for other in range(1, WARPS):
                total += partials[i, other]
            if total >= target:
                reached += np.int64(1)
        # The next pass may write partials while a slow thread still reads them.
        cuda.syncthreads()
        low += reached * step
        high = min(high, low + step - np.int64(1))
    return from_sortable(i32(low))


@device_function
def sort_list(logits, ids, offset, count):
    """Sort `count` entries, descending by logit, then ascending by id: a bitonic sort by the whole block.

    An entry is (logits[i], ids[offset + i]), in shared memory; those up to the next power of two are filled up.
    """
    size = i32(2)
    while size < count:
        size *= i32(2)
    for i in range(count + i32(cuda.threadIdx.x), size, ROW_THREADS):
        logits[i], ids[offset + i] = np.float32(-math.inf), NOWHERE
    run = i32(2)
    while run <= size:
        distance = run >> 1
        while distance > 0:
            cuda.syncthreads()
            for i in range(cuda.threadIdx.x, size >> 1, ROW_THREADS):
                a = ((i & ~(distance - 1)) << 1) | (i & (distance - 1))
                b = a + distance
                falls = logits[a] > logits[b] or (logits[a] == logits[b] and ids[offset + a] < ids[offset + b])
                if falls != ((a & run) == 0):
                    logits[a], logits[b] = logits[b], logits[a]
                    ids[offset + a], ids[offset + b] = ids[offset + b], ids[offset + a]
            distance >>= 1
        run *= i32(2)
    cuda.syncthreads()


@device_function
def entries_from(logits, count, lowest, found, slot):
    """How many of `count` descending logits are >= lowest, at least one, in every thread.

    found: shared int32, of which found[slot] is for this call alone.
    """
    for i in range(cuda.threadIdx.x, count, ROW_THREADS):
        if logits[i] >= lowest and (i + 1 == count or logits[i + 1] < lowest):
            found[slot] = i32(i + 1)
    cuda.syncthreads()
    return found[slot]


@device_function
def list_mass(logits, count, largest, factor, scratch):
    """The sum of 2^((z - largest) factor) over a list, in every thread."""
    total = np.float32(0.0)
    for i in range(cuda.threadIdx.x, count, ROW_THREADS):
        total += exp2((logits[i] - largest) * factor)
    return block_sum(total, scratch)


@device_function
def first_to_reach(logits, count, largest, factor, target, scratch, found, slot):
    """The first entry up to which a list's weights add up to target, else the last; in every thread.

    found, slot as in entries_from. Sums: over lanes by doubling distance, over warps in their order, over rounds of
    ROW_THREADS entries in theirs.
    """
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    if cuda.threadIdx.x == 0:
        found[slot] = count - i32(1)
    before = np.float32(0.0)
    for base in range(0, count, ROW_THREADS):
        i = i32(base + cuda.threadIdx.x)
        weight = np.float32(0.0)
        if i < count:
            weight = exp2((logits[i] - largest) * factor)
        for doubling in range(5):
            lower = shuffle_up(weight, 1 << doubling)
            if lane >= 1 << doubling:
                weight += lower
        if lane == 31:
            scratch[warp] = weight
        cuda.syncthreads()
        below = before
        for other in range(WARPS):
            if other == warp:
                below = before
            before += scratch[other]
        if i < count and below + weight >= target:
            cuda.atomic.min(found, slot, i)
        cuda.syncthreads()
    return found[slot]


@cuda.jit(launch_bounds=(ROW_THREADS, 2))
def filtered_kernel(logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs):
    """A block owns a row with filters and reads it twice, or more often if it keeps more than LIST tokens.

    First pass: the largest logit, and a histogram over BINS intervals of the logit: of how many, if there is a
    top-k or min-p, else of their mass. Every thread adds to bins of its own, so sums have a fixed order. Second
    pass: all tokens of the lowest bin that can hold the threshold, and of those above, go to a list. The order in
    which they arrive depends on timing; sorting makes it one.

    Shared memory: (BINS, ROW_THREADS) float32, later the list: LIST logits, LIST ids.
    """
    scratch = cuda.shared.array(32, np.float32)
    partials = cuda.shared.array((CUTS, WARPS), np.float32)
    tails = cuda.shared.array(BINS, np.float32)
    found = cuda.shared.array(5, np.int32)
    floats = cuda.shared.array(0, np.float32)
    ids = cuda.shared.array(0, np.int32)
    row = cuda.blockIdx.x
    line = logits[row]
    columns = i32(logits.shape[1])
    divisor = temperature[row]
    top, share, least = top_k[row], top_p[row], min_p[row]
    if not is_filtered(divisor, top, share, least, columns):
        return
    thread = i32(cuda.threadIdx.x)
    lane, warp = i32(thread & 31), i32(thread >> 5)
    factor = LOG2_E / divisor
    by_count = 0 < top < columns or least > np.float32(0.0)
    values = cuda.local.array(BATCH, np.float32)
    low, scale = first_interval(line, divisor, scratch)
    high = low + np.float32(BINS - 2) / scale
    for bin in range(BINS):
        floats[bin * ROW_THREADS + thread] = np.float32(0.0)
    if thread == 0:
        found[0] = found[1] = i32(0)
    largest, broken = NONE, False
    for base in range(0, columns, ROW_THREADS * BATCH):
        load_batch(line, i32(base), values)
        for i in range(BATCH):
            largest = max(largest, values[i])
            broken = broken or values[i] != values[i]
            bin = i32(min(max((values[i] - low) * scale, np.float32(0.0)), np.float32(BINS - 1)))
            if by_count:
                weight = np.float32(1.0) if values[i] >= LOWEST else np.float32(0.0)
            else:
                # The sample may have missed the largest by far; 2^100 outweighs other bins, and sums stay finite.
                weight = exp2(min((values[i] - high) * factor, np.float32(100.0)))
            floats[np.uint32(bin * ROW_THREADS + thread)] += weight
    largest = block_max(largest, scratch)
    if broken:
        found[1] = i32(1)
    for bin in range(warp, BINS, WARPS):
        total = np.float32(0.0)
        for i in range(lane, ROW_THREADS, 32):
            total += floats[bin * ROW_THREADS + i]
        total = warp_sum(total)
        if lane == 0:
            tails[bin] = total
    cuda.syncthreads()
    if thread == 0:
        for bin in range(BINS - 2, -1, -1):
            tails[bin] += tails[bin + 1]
    cuda.syncthreads()

    floor = LOWEST
    if least > np.float32(0.0):
        floor = largest + divisor * np.float32(math.log(least))
    lowest_bin = BINS - 1
    target = share * tails[0]
    if by_count:
        target = np.float32(top) if 0 < top < columns else np.float32(columns)
    while lowest_bin > 0 and tails[lowest_bin] < target:
        lowest_bin -= 1
    # The mass below what is listed; with a top-k or min-p that is dropped before top-p looks.
    below = np.float32(0.0)
    if not by_count:
        for bin in range(lowest_bin):
            below += tails[bin] - tails[bin + 1]
        below *= exp2((high - largest) * factor)
    bound = np.float32(lowest_bin) if lowest_bin > 0 else LOWEST
    for base in range(0, columns, ROW_THREADS * BATCH):
        load_batch(line, i32(base), values)
        hopeful = i32(0)
        for i in range(BATCH):
            if (values[i] - low) * scale >= bound and values[i] >= floor:
                hopeful |= i32(1 << i)
        if ballot(hopeful) != 0:
            for i in range(BATCH):
                listed = (hopeful >> i) & 1
                votes = i32(ballot(listed))
                if votes != 0:
                    place = i32(0)
                    if lane == 0:
                        place = i32(cuda.atomic.add(found, 0, i32(cuda.popc(votes))))
                    place = i32(shuffle(place, 0) + cuda.popc(votes & ~(i32(-1) << lane)))
                    if listed != 0 and place < LIST:
                        floats[np.uint32(place)] = values[i]
                        ids[np.uint32(LIST + place)] = i32(base + i * ROW_THREADS + thread)
    cuda.syncthreads()

    count = found[0]
    key0, key1 = keys[row, 0], keys[row, 1]
    place, completion = u32(position[row]), u32(sample_index[row])
    best, token = LOWEST, NOWHERE
    if count <= LIST:
        sort_list(floats, ids, LIST, count)
        if 0 < top < count:
            count = entries_from(floats, count, floats[top - 1], found, 2)
        # Without a finite logit the list is empty, its mass 0, the log-prob NaN.
        if share < np.float32(1.0) and count > 0:
            target = share * (below + list_mass(floats, count, largest, factor, scratch))
            last = first_to_reach(floats, count, largest, factor, target, scratch, found, 3)
            count = entries_from(floats, count, floats[last], found, 4)
        mass = list_mass(floats, count, largest, factor, scratch)
        for i in range(thread, count, ROW_THREADS):
            end = finish(floats[i] / divisor, ids[LIST + i], place, completion, key0, key1)
            if end > best or (end == best and ids[LIST + i] < token):
                best, token = end, ids[LIST + i]
    else:
        if 0 < top < columns:
            floor = tail_threshold(line, floor, largest, factor, False, np.float32(top), partials)
        if share < np.float32(1.0):
            target = share * kept_mass(line, floor, largest, factor, scratch)
            floor = tail_threshold(line, floor, largest, factor, True, target, partials)
        mass = kept_mass(line, floor, largest, factor, scratch)
        for column in range(thread, columns, i32(ROW_THREADS)):
            if line[column] >= floor:
                end = finish(line[column] / divisor, column, place, completion, key0, key1)
                # A thread's columns ascend: the first of equals stays.
                if end > best:
                    best, token = end, i32(column)
    _, token = lowest_of_best(best, token, scratch)
    if thread == 0:
        token = min(token, i32(columns - 1))
        lse = largest / divisor + np.float32(math.log(mass))
        token_ids[row] = token
        logprobs[row] = np.float32(math.nan) if found[1] != 0 else line[token] / divisor - lse


@cuda.jit
def repetition_penalty_kernel(logits, penalty, history):
    """A block owns a row, a thread every PENALTY_THREADS-th entry of its history.

    A bit a token in shared memory says whose turn has passed: the one thread that sets it applies the penalty.
    Which thread that is makes no difference.
    """
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
    if device.name() == "numpy":
        sample_rows(*arguments)
        return
    access = min(2, access_length(columns, logits))
    launch(sample_kernel(access), rows, ROW_THREADS, *arguments)
    launch(filtered_kernel, rows, ROW_THREADS, *arguments, shared=4 * BINS * ROW_THREADS)


def apply_repetition_penalty(logits, penalty, history):
    """Divide the positive and multiply the negative logits of tokens that occurred by the row's penalty, in place.

    logits (B, V) float32; penalty (B,) float32, 1 for off; history (B, L) int32, the ids of prompt and completion
    so far in any order, padded with -1; a token that occurs twice is penalised once. Raises ValueError for other
    shapes or dtypes. Source: Keskar et al. 2019, as in transformers' RepetitionPenaltyLogitsProcessor.
    """
    rows, columns = check("apply_repetition_penalty", "logits", logits, (None, None), F32)
    check("apply_repetition_penalty", "penalty", penalty, (rows,), F32)
    check("apply_repetition_penalty", "history", history, (rows, None), I32)
    if device.name() == "numpy":
        logits[...] = apply_repetition_penalty_ref(logits, penalty, history)
        return
    shared_bytes = 4 * -(-columns // 32)
    launch(repetition_penalty_kernel, rows, PENALTY_THREADS, logits, penalty, history, shared=shared_bytes)


@numba.njit(cache=True, fastmath={"contract"})
def _noise_words(words, first, position, sample_index, key0, key1):
    """The random words of tokens first, first + 1, ...: first a multiple of 4, words of BLOCK."""
    for i in range(BLOCK // 4):
        counter = np.uint32(first // 4 + i)
        a, b, c, d = philox_cpu(counter, position, sample_index, np.uint32(0), key0, key1)
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
def _race(row, temperature, threshold, key0, key1, sample_index, position):
    """argmax of s + g over s >= threshold. Most tokens lose by _noise_ceiling, so few logarithms are taken."""
    words = np.empty(BLOCK, np.uint32)
    best, token = np.float32(-np.inf), 0
    for first in range(0, row.shape[0], BLOCK):
        part = row[first : first + BLOCK]
        kept = 0
        for i in range(part.shape[0]):
            kept += part[i] / temperature >= threshold
        if kept == 0:
            continue
        _noise_words(words, first, position, sample_index, key0, key1)
        hopeful = 0
        for i in range(part.shape[0]):
            hopeful += part[i] / temperature + _noise_ceiling(words[i]) > best
        if hopeful == 0:
            continue
        for i in range(part.shape[0]):
            scaled = part[i] / temperature
            if scaled >= threshold and scaled + _noise_ceiling(words[i]) > best:
                value = scaled - np.float32(math.log(-np.float32(math.log1p(-uniform_cpu(words[i])))))
                if value > best:
                    best, token = value, first + i
    return token


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
    members = np.flatnonzero(buckets == bucket)
    for i in members[np.argsort(-scaled[members])]:
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
            threshold = LOWEST
            filtered = min_p[b] > 0 or 0 < top_k[b] < row.shape[0] or top_p[b] < 1
            # A row with a NaN or an infinity has no buckets.
            if filtered and not math.isnan(lse):
                threshold, lse = _filter(row, divisor, top_k[b], top_p[b], min_p[b], row[top] / divisor)
            noise = keys[b, 0], keys[b, 1], np.uint32(sample_index[b]), np.uint32(position[b])
            token = _race(row, divisor, threshold, *noise)
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
        greedy = temperature[b] == 0
        scaled = row if greedy else row / temperature[b]
        if not greedy:
            scaled = np.where(kept_ref(row, temperature[b], top_k[b], top_p[b], min_p[b]), scaled, -np.inf)
        words = noise_words_ref(len(row), keys[b], sample_index[b], position[b])
        u = np.minimum((words + 0.5) / 2**32, 1 - 2.0**-24)
        noise = 0.0 if greedy else -np.log(-np.log1p(-u))
        token_ids[b] = np.argmax(scaled + noise)
        logprobs[b] = scaled[token_ids[b]] - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))
    return token_ids, logprobs


def noise_words_ref(columns, key, sample_index, position):
    """The random words (columns,) uint32 of the tokens of one row."""
    counters = np.zeros((-(-columns // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1], counters[:, 2] = position, sample_index
    return philox_ref(counters, key).reshape(-1)[:columns]


def apply_repetition_penalty_ref(logits, penalty, history):
    """The penalised copy of logits."""
    out = logits.copy()
    for row, factor, tokens in zip(out, penalty, history, strict=True):
        tokens = np.unique(tokens[tokens >= 0])
        row[tokens] = np.where(row[tokens] > 0, row[tokens] / factor, row[tokens] * factor)
    return out
