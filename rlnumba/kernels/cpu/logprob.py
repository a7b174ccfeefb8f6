"""Log-probs of rows of logits, and their gradient, on the cpu device."""

import numba
import numpy as np

from rlnumba.kernels.cpu.row_sum import masked_row, row_softmax, row_terms
from rlnumba.kernels.logprob import IGNORED


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_rows(logits, ids, temperature, thresholds, logp, lse, entropy, top1):
    """Write row_terms of each row, and logp[row] = logits[row, ids[row]] / temperature - lse[row].

    logits (N, V) float32; ids (N,) int32 in range or IGNORED; thresholds (N,) float32, lower logits of the row count as
    -inf, or of length 0; logp, lse, entropy (N,) float32, top1 (N,) int32 written.
    """
    for row in numba.prange(logits.shape[0]):
        if ids[row] == IGNORED:
            logp[row], lse[row], entropy[row], top1[row] = 0, 0, 0, -1
        else:
            values = logits[row]
            if thresholds.shape[0] > 0:
                values = masked_row(values, thresholds[row])
            lse[row], entropy[row], top1[row] = row_terms(values, temperature)
            logp[row] = values[ids[row]] / temperature - lse[row]


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_backward_rows(logits, ids, first_id, temperature, lse, dlogp, thresholds, dlogits):
    """chunked.logp_of_logits_backward of float32 logits."""
    for i in numba.prange(logits.shape[0]):
        if ids[i] == IGNORED:
            dlogits[i] = 0
        else:
            factor, row = dlogp[i] / temperature, logits[i]
            if thresholds.shape[0] > 0:
                row = masked_row(row, thresholds[i])
            row_softmax(row, temperature, lse[i], -factor, dlogits[i])
            if 0 <= ids[i] - first_id < logits.shape[1]:
                dlogits[i, ids[i] - first_id] += factor


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_entropy_backward_rows(
    logits, ids, first_id, temperature, lse, dlogp, thresholds, entropy, dentropy, dlogits
):  # fmt: skip
    """chunked.logp_of_logits_backward of float32 logits with the entropy's derivative."""
    for i in numba.prange(logits.shape[0]):
        if ids[i] == IGNORED:
            dlogits[i] = 0
        else:
            factor, slope = dlogp[i] / temperature, dentropy[i] / temperature
            offset = factor + slope * entropy[i]
            row = logits[i]
            if thresholds.shape[0] > 0:
                row = masked_row(row, thresholds[i])
            # dlogits may be logits. A p of 0 times its logarithm is 0.
            logs = np.maximum(row / temperature - lse[i], np.float32(-1000.0))
            row_softmax(row, temperature, lse[i], np.float32(-1.0), dlogits[i])
            for j in range(logits.shape[1]):
                dlogits[i, j] *= offset + slope * logs[j]
            if 0 <= ids[i] - first_id < logits.shape[1]:
                dlogits[i, ids[i] - first_id] += factor
