"""Online softmax over scores in mma.sync accumulators: a row's scores lie in four neighbouring lanes.

m is a row's maximum, in powers of two, updated lazily: only when a tile exceeds it by RESCALE_THRESHOLD, so that sums
are rarely rescaled by anything but 1.
"""

import functools

import numpy as np

from rlnumba.kernels.attention.sm80_tiles import KEYS
from rlnumba.kernels.ptx.warp import device_function, exp2, shuffle_xor
from rlnumba.runtime.device import cuda

f32 = np.float32

# How far, in powers of two, a probability may exceed 1 before the row max is updated. Part of the arithmetic.
RESCALE_THRESHOLD = f32(8.0)
MINUS_INFINITY = f32(-np.inf)


@device_function
def next_row_max(row_max, tile_max, scale):
    """The row max after a tile with this largest score, times scale: the old one up to RESCALE_THRESHOLD below."""
    candidate = tile_max * scale
    return candidate if candidate > row_max + RESCALE_THRESHOLD else row_max


@device_function
def finite_max(row_max):
    """What scores have subtracted: 0 for a row that has seen no key yet, since -inf - -inf would be NaN."""
    return row_max if row_max > MINUS_INFINITY else f32(0.0)


@device_function
def merge_weights(first_max, second_max):
    """(m, a, b) of two parts of a row's keys: the common maximum, and the weights of the first and the second."""
    row_max = max(first_max, second_max)
    subtracted = finite_max(row_max)
    return row_max, exp2(first_max - subtracted), exp2(second_max - subtracted)


@device_function
def quad_max(value):
    """The largest of four neighbouring lanes."""
    value = max(value, shuffle_xor(value, 1))
    return max(value, shuffle_xor(value, 2))


@device_function
def quad_sum(value):
    """The sum over four neighbouring lanes, the same bits in each."""
    value += shuffle_xor(value, 1)
    return value + shuffle_xor(value, 2)


@device_function
def lane_sum(p, first):
    """A lane's share of the sum of a row's probabilities over 16 keys; first: index of the row's first element."""
    return (p[first] + p[first + 1]) + (p[first + 4] + p[first + 5])


@functools.cache
def softmax_functions(blocks):
    """(apply_causal_mask, online_softmax_step) of a tile of KEYS keys and `blocks` times 16 rows of a warp."""

    @device_function
    def apply_causal_mask(scores, mask_offset):
        """Scores beyond their rows become -inf. mask_offset[row]: its position less the lane's first key."""
        for i in range(blocks):
            for block in range(KEYS // 8):
                for j in range(4):
                    if block * 8 + j % 2 > mask_offset[2 * i + j // 2]:
                        scores[(i * (KEYS // 8) + block) * 4 + j] = MINUS_INFINITY

    @device_function
    def online_softmax_step(scores, row_max, sums, rescale, scale):
        """scores become probabilities relative to row_max, which may move; rescale: the factor of earlier sums."""
        for i in range(blocks):
            for half in range(2):
                row = 2 * i + half
                at = i * (KEYS // 2) + 2 * half
                tile_max = scores[at]
                for block in range(KEYS // 8):
                    tile_max = max(tile_max, max(scores[at + 4 * block], scores[at + 4 * block + 1]))
                new_max = next_row_max(row_max[row], quad_max(tile_max), scale)
                subtracted = finite_max(new_max)
                rescale[row] = exp2(row_max[row] - subtracted)
                row_max[row] = new_max
                for block in range(KEYS // 8):
                    for j in range(2):
                        scores[at + 4 * block + j] = exp2(cuda.fma(scores[at + 4 * block + j], scale, -subtracted))
                first = lane_sum(scores, at) + lane_sum(scores, at + 8)
                second = lane_sum(scores, at + 16) + lane_sum(scores, at + 24)
                sums[row] = cuda.fma(sums[row], rescale[row], first + second)

    return apply_causal_mask, online_softmax_step
