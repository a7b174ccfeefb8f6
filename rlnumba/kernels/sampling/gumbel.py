"""Gumbel noise by Philox, and the argmax of s + g over the kept tokens of a row, with few logarithms.

The uniform u of token i is word i % 4 of Philox with counter (i // 4, position, sample_index, 0) and a key of seed and
prompt (philox.noise_key); a segment's counter ends with 1 instead. g = -log(-log1p(-u)).
"""

import math

import numpy as np

from rlnumba.kernels.nn.row_sum import LOG2_E, TILE_COLUMNS
from rlnumba.kernels.philox import philox, uniform
from rlnumba.kernels.ptx.warp import compiler_barrier, device_function, exp2, float_as_int, int_as_float
from rlnumba.runtime.device import cuda

i32, u32 = np.int32, np.uint32

# Neighbouring tokens that a row without filters draws from once it has drawn their segment, each by a thread.
SEGMENT = DRAW_THREADS = TILE_COLUMNS
# The last word of the counters of tokens' and of segments' noise.
TOKEN_NOISE, SEGMENT_NOISE = u32(0), u32(1)
# Below every score; above every token id, and exact as a float32.
LOWEST = np.float32(np.finfo(np.float32).min)
NO_TOKEN = i32(1 << 24)
# Entries of a list that a thread loads before it uses the first.
LIST_LOADS = 8


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
def gumbel(word):
    """The Gumbel noise g of a random word."""
    return -np.float32(math.log(-np.float32(math.log1p(-uniform(word)))))


@device_function
def noise_word(i, kind, noise):
    """The random word of token or segment i.

    kind: the counter's last word; noise: (position, sample_index, two words of the key).
    """
    w0, w1, w2, w3 = philox(u32(i >> 2), noise[0], noise[1], kind, noise[2], noise[3])
    low, high = (w1, w3) if i & 1 else (w0, w2)
    return high if i & 2 else low


@device_function
def prune_bound(key):
    """b such that a token of logit z and word w can reach the best score so far only if w <= 2^(z factor + b).

    key: the best score, by ordered_int(). A token scores s + g <= s - log u = s - log w + 32 log 2, plus rounding.
    """
    best = ordered_float(key)
    margin = abs(best) * np.float32(2.0**-20) + np.float32(1e-3)
    return np.float32(32.0) - (best - margin) * LOG2_E


@device_function
def list_gumbel_argmax(candidates, candidate_ids, count, threshold, divisor, factor, noise, block_best):
    """(score, token) of a thread's best among a list's entries >= threshold.

    block_best: shared int32, the block's best score so far by ordered_int(); prune_bound() of it saves logarithms.
    """
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
