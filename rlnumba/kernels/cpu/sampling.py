"""sample on the cpu device: the filters and the draw of ops.py, a row at a time."""

import math

import numba
import numpy as np

from rlnumba.kernels.cpu.row_sum import masked_row, row_softmax, row_terms
from rlnumba.kernels.nn.row_sum import LOG_2
from rlnumba.kernels.philox import philox_cpu, uniform_cpu
from rlnumba.kernels.sampling.draw import SEGMENT, SEGMENT_NOISE, TOKEN_NOISE
from rlnumba.kernels.sampling.scan import LOWEST

# Buckets of a threshold search, and how many a unit of s has.
BUCKETS, BUCKETS_PER_UNIT = 1024, np.float32(16.0)


@numba.njit(cache=True, fastmath={"contract"})
def _noise_words(words, first, kind, noise):
    """The random words (n,) of tokens or segments first, first + 1, ...: first and n multiples of 4."""
    key0, key1, sample_index, position = noise
    for i in range(0, words.shape[0], 4):
        counter = np.uint32((first + i) // 4)
        words[i : i + 4] = philox_cpu(counter, position, sample_index, kind, key0, key1)


@numba.njit(cache=True, fastmath={"contract"})
def _noise_ceiling(word):
    """A bound of a word's Gumbel noise, close and cheap: -log(-log1p(-u)) <= -log(u).

    The bits of a float32 are a piecewise linear lower bound of its log2. 0.001 covers the rounding.
    """
    bits = np.float32(np.float32(word) + np.float32(0.5)).view(np.int32)
    return np.float32(159.0) * LOG_2 + np.float32(1e-3) - np.float32(bits) * (LOG_2 * np.float32(2.0**-23))


@numba.njit(cache=True, fastmath={"contract"})
def _gumbel(word):
    return -np.float32(math.log(-np.float32(math.log1p(-uniform_cpu(word)))))


@numba.njit(cache=True, fastmath={"contract"})
def _gumbel_argmax(row, temperature, threshold, begin, noise):
    """argmax of s + g over s >= threshold, with few logarithms. row[0] is token `begin`, a multiple of 4."""
    words = np.empty(SEGMENT, np.uint32)
    best, token = np.float32(-np.inf), 0
    for first in range(0, row.shape[0], SEGMENT):
        part = row[first : first + SEGMENT]
        kept = 0
        for i in range(part.shape[0]):
            kept += part[i] / temperature >= threshold
        if kept == 0:
            continue
        _noise_words(words, begin + first, TOKEN_NOISE, noise)
        candidates = 0
        for i in range(part.shape[0]):
            candidates += part[i] / temperature + _noise_ceiling(words[i]) > best
        if candidates == 0:
            continue
        for i in range(part.shape[0]):
            scaled = part[i] / temperature
            if scaled >= threshold and scaled + _noise_ceiling(words[i]) > best:
                score = scaled + _gumbel(words[i])
                if score > best:
                    best, token = score, first + i
    return token


@numba.njit(cache=True)
def _segment_gumbel_argmax(row, temperature, largest, noise):
    """The token of a row without filters: argmax of the segments, then of its tokens."""
    weights = np.empty_like(row)
    row_softmax(row, temperature, largest, np.float32(1.0), weights)
    segments = -(-row.shape[0] // SEGMENT)
    words = np.empty(segments + -segments % 4, np.uint32)
    _noise_words(words, 0, SEGMENT_NOISE, noise)
    best, segment = np.float32(-np.inf), 0
    for i in range(segments):
        total = np.float32(0.0)
        for weight in weights[i * SEGMENT : (i + 1) * SEGMENT]:
            total += weight
        if total > 0:
            score = largest + (np.float32(math.log(total)) + _gumbel(words[i]))
            if score > best:
                best, segment = score, i
    first = segment * SEGMENT
    return first + _gumbel_argmax(row[first : first + SEGMENT], temperature, LOWEST, first, noise)


@numba.njit(cache=True)
def _tail_threshold(scaled, weights, floor, largest, target):
    """The largest s >= floor whose tail weighs at least target, or floor: buckets by s, of which one is sorted."""
    sums = np.zeros(BUCKETS)
    buckets = np.full(scaled.shape[0], -1, np.int16)
    for i in range(scaled.shape[0]):
        if scaled[i] >= floor:
            bucket = int(min((largest - scaled[i]) * BUCKETS_PER_UNIT, np.float32(BUCKETS - 1)))
            buckets[i] = bucket
            sums[bucket] += weights[i]
    total, bucket = 0.0, 0
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
def _kept_mass(scaled, weights, threshold):
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
    row_softmax(row, temperature, largest, np.float32(1.0), weights)
    threshold = LOWEST
    if min_p > 0:
        threshold = max(threshold, largest + np.float32(math.log(min_p)))
    if 0 < top_k < row.shape[0]:
        threshold = _tail_threshold(scaled, np.ones_like(row), threshold, largest, float(top_k))
    if top_p < 1:
        target = float(top_p) * _kept_mass(scaled, weights, threshold)
        threshold = _tail_threshold(scaled, weights, threshold, largest, target)
    return threshold, largest + np.float32(math.log(_kept_mass(scaled, weights, threshold)))


@numba.njit(cache=True)
def _smallest_kept(row, temperature, threshold):
    """The smallest logit z of a row with z / temperature >= threshold: a threshold of logits that keeps the same."""
    smallest = np.float32(np.inf)
    for i in range(row.shape[0]):
        if row[i] / temperature >= threshold:
            smallest = min(smallest, row[i])
    return smallest


@numba.njit(cache=True, parallel=True)
def sample_rows(
    logits, temperature, top_k, top_p, min_p, keys, sample_index, position, token_ids, logprobs, thresholds, replay
):  # fmt: skip
    """sample on the cpu device; arguments as there, thresholds and replay of length 0 if they are not wanted."""
    for b in numba.prange(logits.shape[0]):
        row = logits[b]
        greedy = temperature[b] == 0
        divisor = np.float32(1.0) if greedy else temperature[b]
        lse, _, top = row_terms(row, divisor)
        token, kept_from = int(top), np.float32(-np.inf)
        if not greedy:
            noise = keys[b, 0], keys[b, 1], np.uint32(sample_index[b]), np.uint32(position[b])
            largest = row[top] / divisor
            filtered = min_p[b] > 0 or 0 < top_k[b] < row.shape[0] or top_p[b] < 1
            # A row with a NaN or an infinity has no buckets.
            if filtered and not math.isnan(lse):
                threshold, lse = _filter(row, divisor, top_k[b], top_p[b], min_p[b], largest)
                token = _gumbel_argmax(row, divisor, threshold, 0, noise)
                kept_from = _smallest_kept(row, divisor, threshold)
            else:
                token = _segment_gumbel_argmax(row, divisor, largest, noise)
        token_ids[b] = token
        if thresholds.shape[0] > 0:
            thresholds[b] = kept_from
            if replay[b] != 0 and kept_from > -np.inf:
                lse, _, _ = row_terms(masked_row(row, kept_from), divisor)
        logprobs[b] = row[token] / divisor - lse


@numba.njit(cache=True)
def _kept_lse(row, temperature, threshold):
    """The log-sum-exp of row / temperature over what reaches the threshold."""
    return row_terms(masked_row(row, threshold), temperature)[0]


def top_logprobs(logits, temperature, thresholds, token_ids, counts, out):
    """top_logprobs on the cpu device; out (B, 2 + 2 K), the others as its kernel takes them."""
    listed = (out.shape[1] - 2) // 2
    for b in np.flatnonzero(counts >= 0):
        row, token, floats = logits[b], token_ids[b], out[b].view(np.float32)
        divisor = np.float32(temperature[b] if len(temperature) and temperature[b] != 0 else 1)
        threshold = np.float32(thresholds[b] if len(thresholds) else -np.inf)
        lse, count = _kept_lse(row, divisor, threshold), min(counts[b], listed, len(row))
        out[b, 0] = 1 + (row > row[token]).sum() + (row[:token] == row[token]).sum()
        # Sorted are those alone that may be among the likeliest; NaN, of a damaged prompt, compares as neither.
        members = np.flatnonzero(~(row < (np.partition(row, -count)[-count] if count else np.inf)))
        ids = members[np.argsort(-row[members], kind="stable")][:count]
        out[b, 2 : 2 + count] = ids
        places = [1, *range(2 + listed, 2 + listed + count)]
        chosen = row[[token, *ids]]
        floats[places] = np.where(chosen >= threshold, chosen / divisor - lse, np.float32(-np.inf))
