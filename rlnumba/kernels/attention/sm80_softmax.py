"""The online softmax over scores in mma.sync accumulators, where a row lies in four neighbouring lanes."""

import functools

from rlnumba.kernels.attention.softmax import MINUS_INFINITY, TILE_KEYS, finite_row_max, next_row_max, quad_max
from rlnumba.kernels.ptx.warp import device_function, exp2
from rlnumba.runtime.device import cuda


@device_function
def lane_sum(p, first):
    """A lane's share of the sum of a row's probabilities over 16 keys; first: index of the row's first element."""
    return (p[first] + p[first + 1]) + (p[first + 4] + p[first + 5])


@functools.cache
def softmax_functions(blocks):
    """(apply_causal_mask, online_softmax_step) of a tile of TILE_KEYS keys and `blocks` times 16 rows of a warp."""

    @device_function
    def apply_causal_mask(scores, mask_offset):
        """Set scores beyond the diagonal to -inf. mask_offset[row]: its position less the lane's first key."""
        for i in range(blocks):
            for block in range(TILE_KEYS // 8):
                for j in range(4):
                    if block * 8 + j % 2 > mask_offset[2 * i + j // 2]:
                        scores[(i * (TILE_KEYS // 8) + block) * 4 + j] = MINUS_INFINITY

    @device_function
    def online_softmax_step(scores, row_max, sums, rescale, c):
        """Turn a tile's scores into probabilities, in place; update row_max, sums and rescale of a thread's rows."""
        for i in range(blocks):
            for half in range(2):
                row = 2 * i + half
                at = i * (TILE_KEYS // 2) + 2 * half
                tile_max = scores[at]
                for block in range(TILE_KEYS // 8):
                    tile_max = max(tile_max, max(scores[at + 4 * block], scores[at + 4 * block + 1]))
                updated = next_row_max(row_max[row], quad_max(tile_max), c)
                subtracted = finite_row_max(updated)
                rescale[row] = exp2(row_max[row] - subtracted)
                row_max[row] = updated
                for block in range(TILE_KEYS // 8):
                    for j in range(2):
                        scores[at + 4 * block + j] = exp2(cuda.fma(scores[at + 4 * block + j], c, -subtracted))
                first = lane_sum(scores, at) + lane_sum(scores, at + 8)
                second = lane_sum(scores, at + 16) + lane_sum(scores, at + 24)
                sums[row] = cuda.fma(sums[row], rescale[row], first + second)

    return apply_causal_mask, online_softmax_step
