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
"""

import math

import numba
import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import cpu
from rlnumba.kernels.check import F32, I32, check
from rlnumba.kernels.instructions import block_max, block_sum, device_function, float_as_int, int_as_float, warp_sum
from rlnumba.kernels.launch import launch
from rlnumba.kernels.logprob import LOWEST, ROW_THREADS, block_terms
from rlnumba.kernels.philox import philox, philox_cpu, philox_ref, uniform, uniform_cpu

U32 = (np.dtype(np.uint32),)
# Numbers at which one pass over a row cuts the interval of a threshold: eight parts, 11 passes at most for 32
# bits. Instructions per pass times passes: 416, 374 and 400 a token for 3, 7 and 15 cuts.
CUTS = 7
WARPS = ROW_THREADS // 32
PENALTY_THREADS = 128
# On the CPU: tokens whose noise is made at a time; buckets of a threshold search, and how many a unit of s has.
BLOCK = 256
BUCKETS, BUCKETS_PER_UNIT = 1024, np.float32(16.0)
_LOG_2 = np.float32(math.log(2.0))


@device_function
def sortable(value):
    """A float32 as an int32 in the same order; its own inverse, by way of the bits."""
    bits = float_as_int(value)
    return bits if bits >= np.int32(0) else bits ^ np.int32(0x7FFFFFFF)


@device_function
def from_sortable(key):
    """The float32 of a key of sortable()."""
    return int_as_float(key if key >= np.int32(0) else key ^ np.int32(0x7FFFFFFF))


@device_function
def kept_mass(logits, row, temperature, threshold, largest, scratch):
    """The sum of exp(s - largest) over s >= threshold, in every thread."""
    total = np.float32(0.0)
    for column in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
        scaled = logits[row, column] / temperature
        if scaled >= threshold:
            total += np.float32(math.exp(scaled - largest))
    return block_sum(total, scratch)


@device_function
def tail_threshold(logits, row, temperature, floor, largest, by_mass, target, partials):
    """The largest s >= floor of which the tail {s' >= s} weighs at least target; floor if there is none.

    A token weighs exp(s - largest) if by_mass, else 1. The weight of a tail falls as s rises, so an interval
    of float32, in their order as integers, is narrowed to one number; each pass over the row weighs the tails
    of CUTS numbers in it. partials: shared float32 (CUTS, WARPS).
    """
    bounds = cuda.local.array(CUTS, np.float32)
    sums = cuda.local.array(CUTS, np.float32)
    warp = cuda.threadIdx.x // 32
    low = np.int64(sortable(floor))
    high = np.int64(sortable(largest))
    while low < high:
        step = (high - low + CUTS + 1) // (CUTS + 1)
        for i in range(CUTS):
            key = min(low + (i + 1) * step, np.int64(0x7FFFFFFF))
            bounds[i] = from_sortable(np.int32(key))
            sums[i] = np.float32(0.0)
        for column in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
            scaled = logits[row, column] / temperature
            if scaled >= bounds[0]:
                weight = np.float32(1.0)
                if by_mass:
                    weight = np.float32(math.exp(scaled - largest))
                for i in range(CUTS):
                    if scaled >= bounds[i]:
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
    return from_sortable(np.int32(low))


# 1024 threads of more registers do not fit an SM's 65,536.
@cuda.jit(max_registers=64)
def sample_kernel(logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs):
    """A block owns a row. Two passes without filters: log-sum-exp, then noise and argmax, four tokens a Philox.

    Each of top-k and top-p adds a search of up to 11 passes; all sums have logprob.py's fixed order of
    threads.
    """
    scratch = cuda.shared.array(32, np.float32)
    partials = cuda.shared.array((CUTS, WARPS), np.float32)
    row = cuda.blockIdx.x
    columns = logits.shape[1]
    zero = np.float32(0.0)
    one = np.float32(1.0)
    greedy = temperature[row] == zero
    divisor = one if greedy else temperature[row]
    lse, _, top = block_terms(logits, row, divisor, scratch)
    token = top
    if not greedy:
        largest = logits[row, top] / divisor
        threshold = LOWEST
        if min_p[row] > zero:
            threshold = max(threshold, largest + np.float32(math.log(min_p[row])))
        if 0 < top_k[row] < columns:
            target = np.float32(top_k[row])
            threshold = tail_threshold(logits, row, divisor, threshold, largest, False, target, partials)
        if top_p[row] < one:
            target = top_p[row] * kept_mass(logits, row, divisor, threshold, largest, scratch)
            threshold = tail_threshold(logits, row, divisor, threshold, largest, True, target, partials)
        if threshold > LOWEST:
            mass = kept_mass(logits, row, divisor, threshold, largest, scratch)
            lse = largest + np.float32(math.log(mass))

        best, token = LOWEST, np.int32(0)
        key0, key1 = keys[row, 0], keys[row, 1]
        place, sample = np.uint32(position[row]), np.uint32(sample_index[row])
        words = cuda.local.array(4, np.uint32)
        for first in range(4 * cuda.threadIdx.x, columns, 4 * cuda.blockDim.x):
            live = False
            for i in range(4):
                if first + i < columns:
                    live = live or logits[row, first + i] / divisor >= threshold
            if live:
                words[0], words[1], words[2], words[3] = philox(
                    np.uint32(first // 4), place, sample, np.uint32(0), key0, key1
                )
                for i in range(4):
                    if first + i < columns:
                        scaled = logits[row, first + i] / divisor
                        if scaled >= threshold:
                            value = scaled - np.float32(math.log(-np.float32(math.log1p(-uniform(words[i])))))
                            # A thread's columns ascend: the first of equals stays.
                            if value > best:
                                best, token = value, np.int32(first + i)
        winner = block_max(best, scratch)
        # Indices below 2^24 are exact as float32.
        token = np.int32(-block_max(-np.float32(token) if best == winner else LOWEST, scratch))
    if cuda.threadIdx.x == 0:
        token_ids[row] = token
        logprobs[row] = logits[row, token] / divisor - lse


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
    (B,) int32 and logprobs (B,) float32 are written. A row with a NaN gives a NaN log-prob. Raises ValueError
    for other shapes or dtypes.
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
    launch(sample_kernel, rows, ROW_THREADS, *arguments)


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
            if min_p[b] > 0 or 0 < top_k[b] < row.shape[0] or top_p[b] < 1:
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
