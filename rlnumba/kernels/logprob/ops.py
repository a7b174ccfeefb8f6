"""Log-probability of a chosen token under softmax(z / T), its entropy, and their backward, without an (N, V) array.

    s = z / T                     z = hidden weight^T, float32 logits, never rounded
    lse = log sum exp(s)          logp = s[id] - lse
    p = exp(s - lse)              entropy = lse - sum p s
    dz = (dlogp (onehot(id) - p) - dentropy p (log p + entropy)) / T

With thresholds, logits below their row's count as -inf: the distribution of a sampler that keeps s >= a threshold, as
top-k, top-p and min-p do. An id below it has log-prob -inf. With allowed, so do logits of tokens without a bit there:
the distribution of a sampler that follows a grammar.

A row whose id is IGNORED gives logp, lse and entropy 0, top1 -1 and no gradient. Finding the rows that have one, and
a gradient, waits for the device, unless the caller wants every row computed: then no id may be IGNORED.

A log-prob has the same bits where a token is drawn (kernels/sampling) and where it is scored: both add up a row in the
order of nn/row_sum.py. Two implementations: sm90.py, whose logits never leave the registers, and chunked.py, for all
else. runtime/dispatch.py chooses; sm90.py also needs the GEMM family sm90, whose float32 logits give these bits.
"""

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check
from rlnumba.kernels.gemm.ops import backend
from rlnumba.kernels.logprob import IGNORED, chunked, slices
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.logprob.terms import ALL_TOKENS, KeptTokens, LogprobOutputs, LossGradients
from rlnumba.kernels.nn.elementwise import fill, gather_rows, scatter_rows
from rlnumba.kernels.nn.embedding import MANY_ROWS
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.launch import DEBUG

# Kernels keep the column of the largest logit as a float32.
MOST_COLUMNS = 2**24


def linear_logp(hidden, weight, ids, temperature, outputs, kept=ALL_TOKENS, every_row=False):
    """Log-probability of ids under softmax(hidden weight^T / temperature), without an (N, V) array.

    hidden (N, D), weight (V, D) of one floating dtype; ids (N,) int32, IGNORED or in [0, V); temperature > 0; kept:
    KeptTokens. outputs: LogprobOutputs, written; top1 is the lowest index of the largest logit. Logits are float32.
    every_row: compute all rows, without a look at the ids. Raises ValueError for other shapes or dtypes, and for
    another id (on a GPU only with RLNUMBA_DEBUG set: else NaN).
    """
    rows, vocabulary = _check_linear("linear_logp", hidden, weight, ids, temperature)
    _check_outputs("linear_logp", rows, vocabulary, *outputs)
    _check_kept("linear_logp", rows, vocabulary, *kept)
    implementation = _implementation(hidden, weight, kept.allowed)

    def run(hidden, ids, thresholds, allowed, *outputs):
        kept = KeptTokens(thresholds, allowed)
        implementation.linear_logp(hidden, weight, ids, temperature, LogprobOutputs(*outputs), kept)

    selected = ids != IGNORED if not every_row and _selects_rows(implementation) else None
    _run_on_rows(run, selected, (hidden, ids, *kept), outputs, implementation.forward_rows(vocabulary))


def linear_logp_backward(hidden, weight, ids, temperature, lse, gradients, kept=ALL_TOKENS, every_row=False):
    """The gradient of linear_logp: dhidden =, dweight =, or += to accumulate. The logits are computed again.

    hidden, weight, ids, temperature, kept as in linear_logp, lse as it wrote it; gradients: LossGradients. The gradient
    of the logits is rounded to hidden's dtype. Rows with dlogp and dentropy 0 give 0; unless every_row they are left
    out, which changes the last bits of dweight. Raises ValueError as linear_logp.
    """
    rows, vocabulary = _check_linear("linear_logp_backward", hidden, weight, ids, temperature)
    check("linear_logp_backward", "lse", lse, (rows,), F32)
    dlogp, dhidden, dweight, entropy, dentropy, is_written = gradients
    _check_gradients("linear_logp_backward", hidden, weight, dlogp, dhidden, dweight)
    # With both, registers of the sm_90 kernel would spill.
    both = dentropy is not None and kept.thresholds is not None
    implementation = chunked if both else _implementation(hidden, weight, kept.allowed)
    _check_kept("linear_logp_backward", rows, vocabulary, *kept)
    if dentropy is not None:
        for name, array in (("entropy", entropy), ("dentropy", dentropy)):
            check("linear_logp_backward", name, array, (rows,), F32)

    def run(hidden, *arrays):
        nonlocal is_written
        ids, lse, dlogp, entropy, dentropy, *kept, dhidden = arrays
        of_rows = LossGradients(dlogp, dhidden, dweight, entropy, dentropy, is_written)
        implementation.linear_logp_backward(hidden, weight, ids, temperature, lse, of_rows, KeptTokens(*kept))
        is_written = is_written or len(ids) > 0

    selected = None
    if not every_row and _selects_rows(implementation):
        has_gradient = dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)
        selected = (ids != IGNORED) & has_gradient
    inputs = hidden, ids, lse, dlogp, entropy, dentropy, *kept
    rows_at_once = implementation.backward_rows(hidden.shape[1])
    _run_on_rows(run, selected, inputs, (dhidden,), rows_at_once)
    if dweight is not None and not is_written:
        fill(0.0, dweight)


def linear_logp_with_gradient(
    hidden, weight, ids, temperature, outputs, gradients, kept=ALL_TOKENS, every_row=False
):  # fmt: skip
    """linear_logp and linear_logp_backward at once, for a loss whose dlogp is known beforehand, without dentropy.

    Arguments and errors as theirs. The outputs have linear_logp's bits.

    On sm90 a row takes three GEMMs instead of four, or one if its dlogp is 0 and not every_row, and probabilities are
    rounded to hidden's dtype once more. Beside the arguments it needs at most EXTRA_BYTES, 256 MiB (252 where D is
    1,024 and V 151,936), and some numbers a row. Elsewhere, and with thresholds or allowed, this is linear_logp, then
    linear_logp_backward, with their bits and their memory.
    """
    op = "linear_logp_with_gradient"
    rows, vocabulary = _check_linear(op, hidden, weight, ids, temperature)
    _check_outputs(op, rows, vocabulary, *outputs)
    dlogp, dhidden, dweight, _, _, is_written = gradients
    _check_gradients(op, hidden, weight, dlogp, dhidden, dweight)
    _check_kept(op, rows, vocabulary, *kept)
    if _implementation(hidden, weight, kept.allowed) is chunked or kept.thresholds is not None:
        linear_logp(hidden, weight, ids, temperature, outputs, kept, every_row)
        linear_logp_backward(hidden, weight, ids, temperature, outputs.lse, gradients, kept, every_row)
        return

    def forward(hidden, ids, *outputs):
        logprob_sm90.linear_logp(hidden, weight, ids, temperature, LogprobOutputs(*outputs))

    def one_pass(hidden, ids, dlogp, *arrays):
        nonlocal is_written
        *outputs, dhidden = arrays
        of_rows = LossGradients(dlogp, dhidden, dweight, accumulate=is_written)
        logprob_sm90.linear_logp_with_gradient(hidden, weight, ids, temperature, LogprobOutputs(*outputs), of_rows)
        is_written = True

    if every_row and rows:
        one_pass(hidden, ids, dlogp, *outputs, dhidden)
        return
    has_id, has_gradient = ids != IGNORED, dlogp != 0
    # The form that allocates more runs first, so that the pool can reuse its memory for the other.
    rows_at_once, _ = logprob_sm90.one_pass_shape(hidden.shape[1], vocabulary)
    _run_on_rows(one_pass, has_id & has_gradient, (hidden, ids, dlogp), (*outputs, dhidden), rows_at_once)
    if dweight is not None and not is_written:
        fill(0.0, dweight)
    rows_at_once = logprob_sm90.forward_rows(vocabulary)
    _run_on_rows(forward, has_id & ~has_gradient, (hidden, ids), outputs, rows_at_once, clear=False)


def operator_bytes(rows, at_once, width, vocabulary, dtype, is_filtered=False):
    """Bytes of the arrays that the operators make beside their arguments, at most, for hidden states of D = width: int.

    rows: of linear_logp, and of its backward; at_once: of linear_logp_with_gradient. dtype: of the hidden states.
    is_filtered: whether there may be thresholds, or allowed tokens.
    """
    if not (_has_sm90() and logprob_sm90.has_shape(vocabulary, width, dtype)):
        return chunked.operator_bytes(max(rows, at_once), width, vocabulary, dtype.itemsize)
    if not is_filtered:
        return logprob_sm90.operator_bytes(rows, at_once, width, vocabulary)
    # No gradient is computed at once then, and some of it by chunks.
    rows = max(rows, at_once)
    by_chunks = chunked.operator_bytes(rows, width, vocabulary, dtype.itemsize)
    return max(by_chunks, logprob_sm90.operator_bytes(rows, 0, width, vocabulary))


def _has_sm90():
    """Whether log-probs, and the GEMM of the logits, are those of sm90.py where it serves the arrays."""
    if device.name() == "cpu" or dispatch.family("logprob") != "sm90":
        return False
    return backend() == "native" and dispatch.family("gemm") == "sm90"


def _implementation(hidden, weight, allowed=None):
    """The module that computes the log-probs of these arrays."""
    return logprob_sm90 if allowed is None and _has_sm90() and logprob_sm90.is_supported(hidden, weight) else chunked


def _selects_rows(implementation):
    """Whether rows without a result are left out, which on a GPU waits for the device, once."""
    return implementation is logprob_sm90 or device.name() == "cpu"


def _run_on_rows(run, selected, inputs, outputs, rows_at_once, clear=True):
    """run(*inputs, *outputs) on the rows that are `selected`, (N,) bool or None for all of them.

    inputs and outputs: arrays of N rows, also None. rows_at_once: rows that run takes at a time where not all
    are selected, since these are copied. clear: whether outputs of the other rows become 0, int32 ones -1.
    """
    kept = None if selected is None else device.xp().flatnonzero(selected).astype(np.int32)
    if kept is None or kept.shape == selected.shape:
        run(*inputs, *outputs)
        return
    for array in outputs if clear else ():
        if array is not None:
            array.fill(-1 if array.dtype == np.int32 else 0)
    for part, _ in slices(kept.shape[0], rows_at_once):
        _run_on_copies(run, kept[part], inputs, outputs)


def _run_on_copies(run, rows, inputs, outputs):
    """run on copies of the given `rows` (M,) int32."""

    def empty(array):
        return None if array is None else device.xp().empty((len(rows), *array.shape[1:]), array.dtype)

    gathered, results = [empty(array) for array in inputs], [empty(array) for array in outputs]
    for array, copy in zip(inputs, gathered, strict=True):
        if array is not None:
            gather_rows(_as_floats(array), rows, _as_floats(copy))
    run(*gathered, *results)
    for array, result in zip(outputs, results, strict=True):
        if array is not None:
            scatter_rows(_as_floats(result), rows, _as_floats(array))


def launch_copies():
    """Launch the kernels that copy numbers of rows, of few rows and of many, for a list of what a run launches."""
    for count in (1, MANY_ROWS):
        numbers, rows = device.xp().empty((count, 1), np.float32), device.xp().empty(count, np.int32)
        gather_rows(numbers, rows, numbers)
        scatter_rows(numbers, rows, numbers)


def _as_floats(array):
    """An array of rows that operators copy bit for bit: matrices of floats as they are, others as float32."""
    return array if array.ndim == 2 and array.dtype.kind != "i" else array.reshape(len(array), -1).view(np.float32)


def _check_linear(op, hidden, weight, ids, temperature):
    """(rows, vocabulary) of right arguments.

    On a GPU the ids are checked only if RLNUMBA_DEBUG is set: that waits for the device.
    """
    rows, width = check(op, "hidden", hidden, (None, None), FLOATS)
    vocabulary, _ = check(op, "weight", weight, (None, width), (hidden.dtype,))
    check(op, "ids", ids, (rows,), I32)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be > 0, got {temperature}")
    if device.name() != "cuda" or DEBUG:
        ids = device.to_host(ids)
        bad = ((ids < 0) | (ids >= vocabulary)) & (ids != IGNORED)
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(f"{op}: ids[{first}] must be in [0, {vocabulary}) or {IGNORED}, got {int(ids[first])}")
    return rows, vocabulary


def _check_outputs(op, rows, vocabulary, logp, lse, entropy, top1):
    if top1 is not None and vocabulary > MOST_COLUMNS:
        raise ValueError(f"{op}: top1 is exact for up to {MOST_COLUMNS} rows of weight, got {vocabulary}")
    for name, array, dtypes in (("logp", logp, F32), ("lse", lse, F32), ("entropy", entropy, F32), ("top1", top1, I32)):
        if array is not None:
            check(op, name, array, (rows,), dtypes)


def _check_kept(op, rows, vocabulary, thresholds, allowed):
    if thresholds is not None:
        check(op, "thresholds", thresholds, (rows,), F32)
    if allowed is not None:
        check(op, "allowed", allowed, (rows, -(-vocabulary // 32)), I32)


def _check_gradients(op, hidden, weight, dlogp, dhidden, dweight):
    check(op, "dlogp", dlogp, (hidden.shape[0],), F32)
    check(op, "dhidden", dhidden, hidden.shape, (hidden.dtype,))
    if dweight is not None:
        check(op, "dweight", dweight, weight.shape, F32)


def masked_logits_ref(logits, thresholds):
    """logits (N, V), those below their row's threshold -inf; thresholds (N,) or None."""
    return logits if thresholds is None else np.where(logits < thresholds[:, None], -np.inf, logits)


def logp_ref(logits, ids, temperature=1.0, thresholds=None):
    """(logp, lse, entropy, top1) of logits (N, V), in their precision; ids in [0, V) or IGNORED."""
    logits = masked_logits_ref(logits, thresholds)
    scaled = logits / logits.dtype.type(temperature)
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    lse = scaled.max(axis=1) + np.log(np.exp(shifted).sum(axis=1))
    chosen = scaled[np.arange(len(ids)), np.where(ids == IGNORED, 0, ids)]
    finite = np.where(np.isinf(scaled), 0.0, scaled)
    entropy = lse - np.sum(np.exp(scaled - lse[:, None]) * finite, axis=1)
    has_id = ids != IGNORED
    top1 = np.where(has_id, logits.argmax(axis=1), -1).astype(np.int32)
    return (chosen - lse) * has_id, lse * has_id, entropy * has_id, top1


def logp_backward_ref(logits, ids, dlogp, temperature=1.0, dentropy=None, thresholds=None):
    """dlogits of logp_ref's first result and, with dentropy, of its third."""
    logits = masked_logits_ref(logits, thresholds)
    scaled = logits / logits.dtype.type(temperature)
    p = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    onehot = np.arange(logits.shape[1]) == ids[:, None]
    dlogits = (dlogp * (ids != IGNORED) / temperature)[:, None] * (onehot - p)
    if dentropy is not None:
        p_log_p = p * np.log(np.where(p > 0, p, 1.0))
        by_entropy = p_log_p - p * p_log_p.sum(axis=1, keepdims=True)
        dlogits = dlogits - (dentropy * (ids != IGNORED) / temperature)[:, None] * by_entropy
    return dlogits


def linear_logp_ref(hidden, weight, ids, temperature=1.0, thresholds=None):
    """(logp, lse, entropy, top1) of linear_logp, in hidden's precision."""
    return logp_ref(hidden @ weight.T, ids, temperature, thresholds)


def linear_logp_backward_ref(hidden, weight, ids, dlogp, temperature=1.0, dentropy=None, thresholds=None):
    """(dhidden, dweight) of linear_logp."""
    dlogits = logp_backward_ref(hidden @ weight.T, ids, dlogp, temperature, dentropy, thresholds)
    return dlogits @ weight, dlogits.T @ hidden
