"""The online softmax of attention_2_online.py where scores lie in a warp's accumulators, as attention's last steps have
it.

Lane 4 g + t holds, of rows g and g + 8 of the warp, columns 2 t and 2 t + 1 of each eight: scores[4 i + 2 h + j] is
that of row g + 8 h and column 8 i + 2 t + j, and so is acc of the output. Four lanes share a row.
"""

import numpy as np

from examples.kernels.attention_1_passes import HEAD_DIM, LOG2_E
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, exp2, shuffle_xor
from rlnumba.runtime.device import cuda

# Keys of a tile; accumulators of scores, and of the output, that a lane holds of 16 rows.
KEYS = 64
SCORES, ACCUMULATORS = KEYS // 2, HEAD_DIM // 2
pack_two = cvt_pack("bfloat16")


@device_function
def start(acc, row_max, row_sum):
    """What a lane holds before the first tile of keys."""
    for i in range(ACCUMULATORS):
        acc[i] = np.float32(0.0)
    for h in range(2):
        row_max[h], row_sum[h] = np.float32(-np.inf), np.float32(0.0)


@device_function
def online_softmax(scores, visible, acc, row_max, row_sum, scale):
    """Scores of a tile become weights, 0 for keys after a row's own; acc and row_sum follow the new maximum.

    visible: how many keys beyond that of scores[0] the row of scores[0] sees. row_sum: of this lane's keys alone.
    """
    factor = scale * LOG2_E
    for h in range(2):
        largest = row_max[h]
        for i in range(KEYS // 8):
            for j in range(2):
                if 8 * i + j - 8 * h > visible:
                    scores[4 * i + 2 * h + j] = np.float32(-np.inf)
                largest = max(largest, scores[4 * i + 2 * h + j])
        largest = max(largest, shuffle_xor(largest, 1))
        largest = max(largest, shuffle_xor(largest, 2))
        rescale, subtracted = exp2((row_max[h] - largest) * factor), largest * factor
        row_max[h] = largest
        row_sum[h] *= rescale
        for i in range(KEYS // 8):
            for j in range(2):
                scores[4 * i + 2 * h + j] = exp2(cuda.fma(scores[4 * i + 2 * h + j], factor, -subtracted))
                row_sum[h] += scores[4 * i + 2 * h + j]
        for i in range(HEAD_DIM // 8):
            acc[4 * i + 2 * h] *= rescale
            acc[4 * i + 2 * h + 1] *= rescale


@device_function
def pack_weights(words, weights, first):
    """words = weights[first :], rounded, in pairs: a fragment of A, or several, as the second product takes them."""
    for i in range(len(words)):
        words[i] = pack_two(weights[first + 2 * i], weights[first + 2 * i + 1])


@device_function
def store_rows(acc, row_sum, out, row, lane):
    """Write rows `row` and row + 8 of the output, seen as pairs of bfloat16, divided by their sums over four lanes."""
    for h in range(2):
        total = row_sum[h] + shuffle_xor(row_sum[h], 1)
        total += shuffle_xor(total, 2)
        out_row = out[np.uint32(row + 8 * h)]
        for i in range(HEAD_DIM // 8):
            pair = pack_two(acc[4 * i + 2 * h] / total, acc[4 * i + 2 * h + 1] / total)
            out_row[np.uint32(4 * i + lane % 4)] = pair
