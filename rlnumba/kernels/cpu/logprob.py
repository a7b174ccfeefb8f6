"""Log-probs of rows of logits, and their gradient, on the cpu device."""

import math

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


@numba.njit(cache=True, parallel=True, error_model="numpy")
def divergence_rows(student, teacher, temperature, beta, dloss, loss, dlogits):
    """divergence.divergence_of_logits of float32 logits; sums are float64, over columns in ascending order."""
    log_share, log_beta = math.log(max(1.0 - beta, 1e-300)), math.log(max(beta, 1e-300))
    for row in numba.prange(student.shape[0]):
        lse, teacher_lse = row_terms(student[row], temperature)[0], row_terms(teacher[row], temperature)[0]
        own = other = 0.0
        for column in range(student.shape[1]):
            log_p = np.float64(student[row, column] / temperature - lse)
            log_q = np.float64(teacher[row, column] / temperature - teacher_lse)
            if beta == 0:
                other += math.exp(log_q) * (log_q - log_p)
            elif beta == 1:
                own += math.exp(log_p) * (log_p - log_q)
            else:
                log_m = log_mixture(log_p + log_share, log_q + log_beta)
                own += math.exp(log_p) * (log_p - log_m)
                other += math.exp(log_q) * (log_q - log_m)
        mixes = 0 < beta < 1
        loss[row] = beta * other + (1 - beta) * own if mixes else own + other
        scale = np.float64(dloss[row]) / temperature
        for column in range(student.shape[1]):
            log_p = np.float64(student[row, column] / temperature - lse)
            log_q = np.float64(teacher[row, column] / temperature - teacher_lse)
            if beta == 0:
                gradient = math.exp(log_p) - math.exp(log_q)
            elif beta == 1:
                gradient = math.exp(log_p) * (log_p - log_q - own)
            else:
                log_m = log_mixture(log_p + log_share, log_q + log_beta)
                gradient = (1 - beta) * math.exp(log_p) * (log_p - log_m - own)
            dlogits[row, column] = scale * gradient


@numba.njit(cache=True, error_model="numpy")
def log_mixture(own, other):
    """log(exp(own) + exp(other))."""
    return max(own, other) + math.log1p(math.exp(-abs(own - other)))


@numba.njit(cache=True, error_model="numpy")
def divergence_term(log_a, log_b, beta):
    """(term of the divergence, its derivative by log_a) of one token of two distributions, log_a's and log_b's."""
    a, b = math.exp(log_a), math.exp(log_b)
    if beta == 0:
        return b * (log_b - log_a), -b
    if beta == 1:
        return a * (log_a - log_b), a * (log_a - log_b + 1)
    log_m = log_mixture(log_a + math.log1p(-beta), log_b + math.log(beta))
    own = (1 - beta) * a * (log_a - log_m)
    return own + beta * b * (log_b - log_m), own


@numba.njit(cache=True, parallel=True, error_model="numpy")
def top_k_divergence_rows(student, teacher, temperature, beta, top_k, add_tail, of_teacher, dloss, loss, dlogits):
    """top_k_divergence.top_k_divergence_of_logits of float32 logits; sums are float64, in the order of the columns."""
    smallest = -math.expm1(-1e-7)
    for row in numba.prange(student.shape[0]):
        lse, teacher_lse = row_terms(student[row], temperature)[0], row_terms(teacher[row], temperature)[0]
        columns = student.shape[1]
        chosen = teacher[row].copy() if of_teacher else student[row].copy()
        within = chosen >= np.partition(chosen, columns - top_k)[columns - top_k]
        log_p = (student[row] / temperature - lse).astype(np.float64)
        log_q = (teacher[row] / temperature - teacher_lse).astype(np.float64)
        inside_p = inside_q = outside_p = outside_q = 0.0
        for column in range(columns):
            if within[column]:
                inside_p += math.exp(log_p[column])
                inside_q += math.exp(log_q[column])
            else:
                outside_p += math.exp(log_p[column])
                outside_q += math.exp(log_q[column])
        if not add_tail:
            log_p -= math.log(inside_p)
            log_q -= math.log(inside_q)
        total = slope = tail_slope = 0.0
        for column in range(columns):
            if within[column]:
                term, own = divergence_term(log_p[column], log_q[column], beta)
                total += term
                slope += own
        if add_tail:
            log_tails = math.log(max(outside_p, smallest)), math.log(max(outside_q, smallest))
            term, own = divergence_term(log_tails[0], log_tails[1], beta)
            total += term
            tail_slope = own if outside_p >= smallest else 0.0
        loss[row] = total
        ratio = inside_p / max(outside_p, smallest)
        for column in range(columns):
            gradient, a = 0.0, math.exp(log_p[column])
            if within[column]:
                gradient = divergence_term(log_p[column], log_q[column], beta)[1] - a * (slope + tail_slope)
            elif add_tail:
                gradient = a * (tail_slope * ratio - slope)
            dlogits[row, column] = dloss[row] * gradient / temperature
