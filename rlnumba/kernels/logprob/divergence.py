"""Divergence of a student's next-token distributions from a teacher's, and its gradient, without (N, V) arrays.

    s = z / T        z = hidden weight^T             p = softmax(s), the student's
    t = u / T        u = teacher_hidden teacher_weight^T         q = softmax(t)

    beta 0        L = sum q (log q - log p)                              dL/ds = p - q
    beta 1        L = sum p (log p - log q)                              dL/ds = p (log p - log q - L)
    between       m = (1 - beta) p + beta q
                  L = beta sum q (log q - log m) + (1 - beta) sum p (log p - log m)
                  dL/ds = (1 - beta) p (log p - log m - sum p (log p - log m))

the generalised Jensen-Shannon divergence; beta 0 is the forward KL, KL(q | p), and beta 1 the reverse one, KL(p | q).
The logits of both heads, float32, exist for as many rows at a time as one forward of linear_logp takes, and the loss's
derivative by each row's divergence is known beforehand: so a row takes four GEMMs, two of logits and two of gradients,
and one kernel, of which a block owns a row and passes over it three times: log-sum-exps (in the order of
nn/row_sum.py), sums, gradient. A row's results depend on that row alone. Teachers of another width and with more rows
in their head are fine: the head's first V rows are read. Of a teacher that lists its likeliest tokens alone, the logits
are written instead of computed (listed.py).

Sources: Agarwal et al. 2024 (GKD, arXiv 2306.13649); TRL's generalized_jsd_loss, whose beta this is.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check
from rlnumba.kernels.cpu import logprob as cpu
from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.logprob import slices
from rlnumba.kernels.logprob.chunked import forward_rows
from rlnumba.kernels.logprob.listed import ListedLogits, check_listed, write_listed
from rlnumba.kernels.logprob.top_k_divergence import top_k_divergence_of_logits
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.kernels.nn.row_sum import GROUPS, LOG2_E, ROW_THREADS, row_terms_function
from rlnumba.kernels.ptx.warp import block_sum, device_function, exp2, narrow, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

FORWARD, REVERSE, MIXTURE = "forward", "reverse", "mixture"


def kind_of(beta):
    """The form of the divergence for a beta: one of three names."""
    return {0.0: FORWARD, 1.0: REVERSE}.get(float(beta), MIXTURE)


@specialize
def divergence_kernel(kind):
    """kind: of kind_of."""
    row_terms = row_terms_function()

    @device_function
    def log_mixture(log_p, log_q, log_share, log_beta):
        """log((1 - beta) p + beta q), log_share being log(1 - beta)."""
        own, other = log_p + log_share, log_q + log_beta
        smaller = exp2(-abs(own - other) * LOG2_E)
        return max(own, other) + np.float32(math.log(np.float32(1.0) + smaller))

    @cuda.jit
    def divergence_kernel(student, teacher, temperature, beta, log_share, log_beta, dloss, loss, dlogits):
        """A block owns a row of student and teacher (N, V), logits; loss (N,) and dlogits (N, V) are written.

        dlogits may be student: a thread writes the columns that it alone reads after the log-sum-exps.
        """
        scratch = cuda.shared.array(32, np.float32)
        groups = cuda.shared.array((GROUPS, 3), np.float32)
        row, columns = cuda.blockIdx.x, student.shape[1]
        threshold = np.float32(-math.inf)
        lse, _, _ = row_terms(student, np.int64(row), temperature, threshold, scratch, groups)
        teacher_lse, _, _ = row_terms(teacher, np.int64(row), temperature, threshold, scratch, groups)
        own, other, one = np.float32(0.0), np.float32(0.0), np.float32(1.0)
        student_row, teacher_row, dlogits_row = student[row], teacher[row], dlogits[row]
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            log_p = widen(student_row[column]) / temperature - lse
            log_q = widen(teacher_row[column]) / temperature - teacher_lse
            if kind == FORWARD:
                other += exp2(log_q * LOG2_E) * (log_q - log_p)
            elif kind == REVERSE:
                own += exp2(log_p * LOG2_E) * (log_p - log_q)
            else:
                log_m = log_mixture(log_p, log_q, log_share, log_beta)
                own += exp2(log_p * LOG2_E) * (log_p - log_m)
                other += exp2(log_q * LOG2_E) * (log_q - log_m)
        own = block_sum(own, scratch)
        other = block_sum(other, scratch)
        if cuda.threadIdx.x == 0:
            if kind == MIXTURE:
                loss[row] = beta * other + (one - beta) * own
            else:
                loss[row] = own + other
        scale = dloss[row] / temperature
        for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
            log_p = widen(student_row[column]) / temperature - lse
            log_q = widen(teacher_row[column]) / temperature - teacher_lse
            p = exp2(log_p * LOG2_E)
            if kind == FORWARD:
                gradient = p - exp2(log_q * LOG2_E)
            elif kind == REVERSE:
                gradient = p * (log_p - log_q - own)
            else:
                gradient = (one - beta) * p * (log_p - log_mixture(log_p, log_q, log_share, log_beta) - own)
            dlogits_row[column] = narrow(scale * gradient, dlogits_row)

    return divergence_kernel


def divergence_of_logits(student, teacher, form, dloss, loss, dlogits):
    """The divergence of rows of logits (N, V) float32: loss (N,) f32 and dlogits (N, V), which may be student, are
    written. form: DivergenceForm; dloss (N,) f32."""
    temperature, beta, top_k, *_ = form
    if top_k:
        top_k_divergence_of_logits(student, teacher, form, kind_of(beta), dloss, loss, dlogits)
        return
    if device.name() == "cpu":
        cpu.divergence_rows(student, teacher, np.float32(temperature), float(beta), dloss, loss, dlogits)
        return
    # Of beta 0 and 1 these are not read.
    logs = [math.log(share) if 0 < share else 0.0 for share in (1 - beta, beta)]
    constants = float(temperature), float(beta), *logs
    arguments = student, teacher, *constants, dloss, loss, dlogits
    launch(divergence_kernel(kind_of(beta)), loss.shape[0], ROW_THREADS, *arguments)


class HeadInput(NamedTuple):
    """Hidden states (N, D) and the weight (V, D) of a head."""

    hidden: object
    weight: object


class DivergenceForm(NamedTuple):
    """The divergence that is taken: temperature > 0, beta in [0, 1]; top_k: over so many of the likeliest tokens, and
    with add_tail one more that stands for the others (top_k_divergence.py), 0: over all tokens; of_teacher: whether
    these are the teacher's likeliest, else the student's."""

    temperature: float = 1.0
    beta: float = 1.0
    top_k: int = 0
    add_tail: bool = True
    of_teacher: bool = False


def linear_divergence(student, teacher, form, dloss, loss, dhidden, dweight):
    """The divergence of a student's rows from a teacher's, and the gradient of sum(dloss loss).

    student, teacher: HeadInputs, each of one floating dtype and a width of its own, the teacher's with at least as many
    rows in its weight, or ListedLogits as the teacher, for a form over its likeliest tokens; form: DivergenceForm;
    dloss (N,) float32. Written: loss (N,) float32, in nats,
    dhidden (N, D) of the student's dtype, dweight (V, D) float32, or None where the weight is not trained. The gradient
    of the logits is rounded to that dtype. Raises ValueError for other shapes, dtypes or values.
    """
    op = "linear_divergence"
    hidden, weight = student
    rows, width = check(op, "hidden", hidden, (None, None), FLOATS)
    vocabulary, _ = check(op, "weight", weight, (None, width), (hidden.dtype,))
    _check_teacher(op, teacher, form, rows, vocabulary)
    if not form.temperature > 0 or not 0 <= form.beta <= 1:
        raise ValueError(f"{op}: temperature must be > 0 and beta in [0, 1], got {form.temperature} and {form.beta}")
    if not 0 <= form.top_k <= vocabulary:
        raise ValueError(f"{op}: top_k must be in [0, V], which is {vocabulary}, got {form.top_k}")
    for name, array in (("dloss", dloss), ("loss", loss)):
        check(op, name, array, (rows,), F32)
    check(op, "dhidden", dhidden, hidden.shape, (hidden.dtype,))
    if dweight is not None:
        check(op, "dweight", dweight, weight.shape, F32)
        if not rows:
            fill(0.0, dweight)
    step, xp = forward_rows(vocabulary), device.xp()
    shape = min(step, rows), vocabulary
    memory, teacher_memory = xp.empty(shape, np.float32), xp.empty(shape, np.float32)
    narrow_memory = memory if hidden.dtype == np.float32 else xp.empty(shape, hidden.dtype)
    for part, count in slices(rows, step):
        logits, teacher_logits, dlogits = (array[:count] for array in (memory, teacher_memory, narrow_memory))
        linear(hidden[part], weight, logits)
        if isinstance(teacher, ListedLogits):
            write_listed(teacher, part, teacher_logits)
        else:
            linear(teacher.hidden[part], teacher.weight[:vocabulary], teacher_logits)
        divergence_of_logits(logits, teacher_logits, form, dloss[part], loss[part], dlogits)
        linear_backward_input(dlogits, weight, dhidden[part])
        if dweight is not None:
            linear_backward_weight(dlogits, hidden[part], dweight, accumulate=part.start > 0)


def _check_teacher(op, teacher, form, rows, vocabulary):
    """Raise ValueError for a teacher of other shapes than linear_divergence takes."""
    if isinstance(teacher, ListedLogits):
        check_listed(op, teacher, rows)
        if not form.top_k or not form.of_teacher:
            raise ValueError(f"{op}: a teacher's listed tokens are for a form over them, got {form}")
        return
    _, width = check(op, "teacher_hidden", teacher.hidden, (rows, None), FLOATS)
    heads, _ = check(op, "teacher_weight", teacher.weight, (None, width), (teacher.hidden.dtype,))
    if heads < vocabulary:
        raise ValueError(f"{op}: teacher_weight must have at least the {vocabulary} rows of weight, got {heads}")


def operator_bytes(tokens, vocabulary, itemsize):
    """Bytes of the logits of both heads and of their gradient that exist at one time, for so many tokens."""
    logits = min(forward_rows(vocabulary), tokens) * vocabulary
    return logits * (8 + (itemsize if itemsize < 4 else 0))


def divergence_ref(student, teacher, temperature, beta):
    """(divergence (N,), its derivative by the student's logits (N, V)) of logits, in their precision."""

    def log_softmax(logits):
        scaled = logits / temperature
        shifted = scaled - scaled.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    log_p, log_q = log_softmax(student), log_softmax(teacher)
    p, q = np.exp(log_p), np.exp(log_q)
    if beta == 0:
        return (q * (log_q - log_p)).sum(axis=1), (p - q) / temperature
    log_m = log_q if beta == 1 else np.logaddexp(log_p + np.log1p(-beta), log_q + np.log(beta))
    share = 1 if beta == 1 else 1 - beta
    own = (p * (log_p - log_m)).sum(axis=1, keepdims=True)
    loss = share * own[:, 0] + beta * (q * (log_q - log_m)).sum(axis=1)
    return loss, share * p * (log_p - log_m - own) / temperature


def linear_divergence_ref(hidden, weight, teacher_hidden, teacher_weight, temperature, beta, dloss):
    """(loss, dhidden, dweight) of linear_divergence."""
    student, teacher = hidden @ weight.T, teacher_hidden @ teacher_weight[: len(weight)].T
    loss, dlogits = divergence_ref(student, teacher, temperature, beta)
    dlogits = dlogits * dloss[:, None]
    return loss, dlogits @ weight, dlogits.T @ hidden
