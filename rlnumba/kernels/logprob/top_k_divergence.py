"""The divergence of divergence.py over the likeliest tokens alone, and its gradient by the student's logits.

    p, q     softmax of the student's and the teacher's logits at temperature T, over all tokens
    S        the top_k tokens of the teacher or of the student (of_teacher); ties at the boundary are kept
    P, Q     sums of p and of q over S

    add_tail          a = (p of S, 1 - P), b = (q of S, 1 - Q): one more token that stands for all others
    without           a = p of S / P, b = q of S / Q
    L                 the divergence of a from b, divergence.py's

With g_c = dL/d(log a_c) (-b_c; a_c (log a_c - log b_c + 1); (1 - beta) a_c (log a_c - log m_c)) and G its sum over S:

    add_tail          dL/ds_j = g_j - p_j (G + g_tail) in S,    p_j (g_tail P / (1 - P) - G) elsewhere
    without           dL/ds_j = g_j - a_j G in S,               0 elsewhere

S has no gradient. A tail is at least 1e-7, and one that is set to that has none either, as in TRL.

Sources: TRL 1.16's ServerDistillationTrainer, whose loss_top_k and loss_add_tail these are and whose forward KL is over
the teacher's tokens; its SDPOTrainer (compute_topk_self_distillation_loss) for the student's; Huebotter et al. 2026
(SDPO, arXiv 2601.20802). Neither has the teacher's tokens for another beta than 0, which is the same formula.
"""

import math

import numpy as np

from rlnumba.kernels.cpu import logprob as cpu
from rlnumba.kernels.nn.row_select import BINS, kth_largest
from rlnumba.kernels.nn.row_sum import GROUPS, LOG2_E, ROW_THREADS, row_terms_function
from rlnumba.kernels.ptx.warp import block_sum, device_function, exp2, narrow
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# TRL clamps log P at -1e-7.
SMALLEST_TAIL = -math.expm1(-1e-7)


@specialize
def top_k_divergence_kernel(kind, add_tail, of_teacher):
    """kind: of divergence.kind_of; add_tail: bool; of_teacher: whether S is the teacher's tokens."""
    row_terms = row_terms_function()
    smallest, threshold_of_all = np.float32(SMALLEST_TAIL), np.float32(-math.inf)

    @device_function
    def log(value):
        return np.float32(math.log(value))

    @device_function
    def category(log_a, log_b, beta, log_share, log_beta):
        """(term of L, g) of one token of a and b."""
        a, b = exp2(log_a * LOG2_E), exp2(log_b * LOG2_E)
        if kind == "forward":
            return b * (log_b - log_a), -b
        if kind == "reverse":
            return a * (log_a - log_b), a * (log_a - log_b + np.float32(1.0))
        own, other = log_a + log_share, log_b + log_beta
        smaller = exp2(-abs(own - other) * LOG2_E)
        log_m = max(own, other) + log(np.float32(1.0) + smaller)
        share = (np.float32(1.0) - beta) * a * (log_a - log_m)
        return share + beta * b * (log_b - log_m), share

    @cuda.jit
    def top_k_divergence_kernel(student, teacher, temperature, beta, log_share, log_beta, top_k, dloss, loss, dlogits):
        """A block owns a row of student and teacher (N, V), logits; loss (N,) and dlogits (N, V) are written.

        It passes over the row for the log-sum-exps, four times for the boundary of S, for the masses, the terms and the
        gradient. dlogits may be student: a thread writes the columns that it alone reads after the boundary is known.
        """
        scratch = cuda.shared.array(32, np.float32)
        groups = cuda.shared.array((GROUPS, 3), np.float32)
        bins = cuda.shared.array(BINS, np.int32)
        row, columns, zero = cuda.blockIdx.x, student.shape[1], np.float32(0.0)
        lse, _, _ = row_terms(student, np.int64(row), temperature, threshold_of_all, scratch, groups)
        teacher_lse, _, _ = row_terms(teacher, np.int64(row), temperature, threshold_of_all, scratch, groups)
        student_row, teacher_row, dlogits_row = student[row], teacher[row], dlogits[row]
        chosen = teacher_row if of_teacher else student_row
        boundary = kth_largest(chosen, top_k, bins)
        inside_p, inside_q, outside_p, outside_q = zero, zero, zero, zero
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            p = exp2((student_row[column] / temperature - lse) * LOG2_E)
            q = exp2((teacher_row[column] / temperature - teacher_lse) * LOG2_E)
            if chosen[column] >= boundary:
                inside_p += p
                inside_q += q
            else:
                outside_p += p
                outside_q += q
        inside_p, inside_q = block_sum(inside_p, scratch), block_sum(inside_q, scratch)
        outside_p, outside_q = block_sum(outside_p, scratch), block_sum(outside_q, scratch)
        shift, teacher_shift = lse, teacher_lse
        if not add_tail:
            shift += log(inside_p)
            teacher_shift += log(inside_q)
        total, slope = zero, zero
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            if chosen[column] >= boundary:
                log_a = student_row[column] / temperature - shift
                log_b = teacher_row[column] / temperature - teacher_shift
                term, own = category(log_a, log_b, beta, log_share, log_beta)
                total += term
                slope += own
        total, slope, tail_slope = block_sum(total, scratch), block_sum(slope, scratch), zero
        if add_tail:
            log_a, log_b = log(max(outside_p, smallest)), log(max(outside_q, smallest))
            term, tail_slope = category(log_a, log_b, beta, log_share, log_beta)
            total += term
            if outside_p < smallest:
                tail_slope = zero
        if cuda.threadIdx.x == 0:
            loss[row] = total
        scale, ratio = dloss[row] / temperature, inside_p / max(outside_p, smallest)
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            log_a = student_row[column] / temperature - shift
            a, gradient = exp2(log_a * LOG2_E), zero
            if chosen[column] >= boundary:
                log_b = teacher_row[column] / temperature - teacher_shift
                _, own = category(log_a, log_b, beta, log_share, log_beta)
                gradient = own - a * (slope + tail_slope)
            elif add_tail:
                gradient = a * (tail_slope * ratio - slope)
            dlogits_row[column] = narrow(scale * gradient, dlogits_row)

    return top_k_divergence_kernel


def top_k_divergence_of_logits(student, teacher, form, kind, dloss, loss, dlogits):
    """divergence.divergence_of_logits over top_k tokens. form: a DivergenceForm, 1 <= top_k <= V; kind: kind_of it."""
    temperature, beta, top_k, add_tail, of_teacher = form
    if device.name() == "cpu":
        numbers = np.float32(temperature), float(beta), top_k, add_tail, of_teacher
        cpu.top_k_divergence_rows(student, teacher, *numbers, dloss, loss, dlogits)
        return
    # Of beta 0 and 1 these are not read.
    logs = [math.log(share) if 0 < share else 0.0 for share in (1 - beta, beta)]
    arguments = student, teacher, float(temperature), float(beta), *logs, top_k, dloss, loss, dlogits
    launch(top_k_divergence_kernel(kind, add_tail, of_teacher), loss.shape[0], ROW_THREADS, *arguments)


def top_k_divergence_ref(student, teacher, temperature, beta, top_k, add_tail, of_teacher):
    """(divergence (N,), its derivative by the student's logits (N, V)) of logits, in their precision."""
    log_p, log_q = (
        logits / temperature - np.logaddexp.reduce(logits / temperature, axis=1, keepdims=True)
        for logits in (student, teacher)
    )
    chosen = log_q if of_teacher else log_p
    within = chosen >= np.sort(chosen, axis=1)[:, -top_k, None]

    def categories(log_all):
        """(logs of the categories, the tail's last; whether the tail is its own) of log-probs of all tokens."""
        inside = np.where(within, log_all, -np.inf)
        mass = np.logaddexp.reduce(inside, axis=1, keepdims=True)
        if not add_tail:
            return inside - mass, None
        return np.append(inside, np.log(-np.expm1(np.minimum(mass, -1e-7))), axis=1), mass < -1e-7

    (log_a, is_free), (log_b, _) = categories(log_p), categories(log_q)
    a, b = np.exp(log_a), np.exp(log_b)
    counted = a + b > 0
    log_a, log_b = np.where(counted, log_a, 0), np.where(counted, log_b, 0)
    if beta == 0:
        loss, slopes = b * (log_b - log_a), -b
    elif beta == 1:
        loss, slopes = a * (log_a - log_b), a * (log_a - log_b + 1)
    else:
        log_m = np.log(np.where(counted, (1 - beta) * a + beta * b, 1))
        loss = beta * b * (log_b - log_m) + (1 - beta) * a * (log_a - log_m)
        slopes = (1 - beta) * a * (log_a - log_m)
    # Back through these steps: from the categories to the log-probs of all tokens, and through these to the logits.
    p = np.exp(log_p)
    share = np.where(within, p, 0)
    mass = share.sum(axis=1, keepdims=True)
    share /= mass
    if add_tail:
        of_mass = np.where(is_free, -slopes[:, -1:] * mass / np.exp(log_a[:, -1:]), 0)
    else:
        of_mass = -slopes.sum(axis=1, keepdims=True)
    of_log_p = slopes[:, : student.shape[1]] + of_mass * share
    return loss.sum(axis=1), (of_log_p - p * of_log_p.sum(axis=1, keepdims=True)) / temperature
