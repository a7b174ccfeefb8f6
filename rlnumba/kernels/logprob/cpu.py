"""Log-probs of rows of logits, and their gradient, on the cpu device."""

import numba

from rlnumba.kernels.nn.row_sum_cpu import row_softmax, row_terms


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_rows(logits, ids, temperature, logp, lse, entropy, top1):
    """For each row: row_terms, and logp[row] = logits[row, ids[row]] / temperature - lse[row].

    logits (N, V) float32; ids (N,) int32 in range; logp, lse, entropy (N,) float32, top1 (N,) int32 written.
    """
    for row in numba.prange(logits.shape[0]):
        lse[row], entropy[row], top1[row] = row_terms(logits[row], temperature)
        logp[row] = logits[row, ids[row]] / temperature - lse[row]


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_backward_rows(logits, ids, temperature, lse, dlogp, dlogits):
    """dlogits = dlogp / temperature * (onehot(ids) - softmax(logits / temperature)), row by row.

    logits, dlogits (N, V) float32, may be one array; ids (N,) int32, of no column if not in [0, V); lse, dlogp (N,)
    float32.
    """
    for i in numba.prange(logits.shape[0]):
        factor = dlogp[i] / temperature
        row_softmax(logits[i], temperature, lse[i], -factor, dlogits[i])
        if 0 <= ids[i] < logits.shape[1]:
            dlogits[i, ids[i]] += factor
