"""Log-probability of a chosen token under softmax(z / T), its entropy, and their backward, without an (N, V) array.

    s = z / T                     z float32 logits, never rounded; the division comes before everything else
    lse = log sum exp(s)          logp = s[id] - lse
    p = exp(s - lse)              entropy = lse - sum p s
    dz = dlogp (onehot(id) - p) / T

`logp` takes the logits. `linear_logp` takes the hidden states and the output matrix, z = hidden weight^T + bias,
and makes CHUNK_LOGITS of the logits at a time, those of some rows. Its backward, which knows lse, makes them again,
those of some columns for as many rows as CHUNK_SUMS allows: then dweight += dz^T hidden reads and writes each row of
dweight once, and dhidden += dz weight adds up in float32. A row whose id is IGNORED gives logp, lse and entropy 0,
top1 -1 and no gradient.

Whoever draws a token (kernels/sampling/ops.py) and whoever scores it must get the same bits: row_sum.py has the order.
16-bit arrays on Hopper may go through logprob/sm90.py, whose logits never leave the registers, if runtime/dispatch.py
says so and if it says the same of matrix products: then it does not change a bit of the log-prob.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check
from rlnumba.kernels.gemm import cpu
from rlnumba.kernels.gemm.ops import backend, bias_backward, linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.nn.elementwise import cast, fill, gather_rows, scatter_rows
from rlnumba.kernels.nn.row_sum import GROUPS, LOG2_E, ROW_THREADS, row_terms
from rlnumba.kernels.ptx.warp import device_function, exp2, vector_access, widen
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import DEBUG, launch, specialize

IGNORED = -100
# Float32 logits that exist at one time in the forward, 256 MiB. In the backward half of them do, with their gradient in
# 16 bits, 64 MiB, and the float32 gradient of the hidden states of CHUNK_SUMS elements, 32 MiB.
CHUNK_LOGITS = 1 << 26
CHUNK_SUMS = 1 << 23
# Chunks are multiples of it, where they can be: products have tiles.
CHUNK_TILE = 128


@cuda.jit
def logp_kernel(logits, rows, ids, temperature, out, lse, entropy, top1):
    """A block owns one output i and the row rows[i] of logits (row i if rows has no elements), read once.

    entropy and top1 without elements are left out. An id outside the vocabulary gives NaN.
    """
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    i = cuda.blockIdx.x
    token = ids[i]
    row = np.int64(rows[i]) if rows.shape[0] > 0 else np.int64(i)
    value, row_lse, row_entropy, top = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.int32(-1)
    if token != IGNORED:
        row_lse, row_entropy, top = row_terms(logits, row, temperature, scratch, groups)
        value = np.float32(math.nan)
        if 0 <= token < logits.shape[1]:
            value = widen(logits[row, token]) / temperature - row_lse
    if cuda.threadIdx.x == 0:
        out[i] = value
        lse[i] = row_lse
        if entropy.shape[0] > 0:
            entropy[i] = row_entropy
        if top1.shape[0] > 0:
            top1[i] = top


@specialize
def logp_backward_kernel(access):
    """access: neighbouring elements that are moved at once, 4 where the rows' starts allow it, else 1."""
    load, store = vector_access(access, access)
    held = 2 * access

    @device_function
    def differentiate(values, at, first, target, factor, shift, scale):
        """values[at + i], logits of columns first + i, become their gradient."""
        for i in range(access):
            gradient = np.float32(0.0)
            if scale != 0:
                gradient = -exp2(cuda.fma(values[at + i], factor, shift))
                if first + i == target:
                    gradient += np.float32(1.0)
            values[at + i] = scale * gradient

    @cuda.jit
    def logp_backward_kernel(logits, ids, first_id, temperature, lse, dlogp, dlogits):
        """A block owns a row: reads its logits, of ids from first_id on, writes dlogits, which may be the same array.

        A thread has two pieces of `access` elements under way. Rows that are IGNORED, or whose dlogp is 0, give 0.
        """
        row = cuda.blockIdx.x
        columns = logits.shape[1]
        factor, shift = LOG2_E / temperature, -lse[row] * LOG2_E
        scale = dlogp[row] / temperature if ids[row] != IGNORED else np.float32(0.0)
        target = ids[row] - first_id
        values = cuda.local.array(held, np.float32)
        apart = access * cuda.blockDim.x
        line, out = logits[row], dlogits[row]
        for first in range(access * cuda.threadIdx.x, columns, 2 * apart):
            second = first + apart
            there = second if second < columns else first
            load(line, first, values, 0)
            load(line, there, values, access)
            differentiate(values, 0, first, target, factor, shift, scale)
            differentiate(values, access, there, target, factor, shift, scale)
            store(out, first, values, 0)
            if second < columns:
                store(out, second, values, access)

    return logp_backward_kernel


def logp(logits, ids, out, lse):
    """out = log softmax(logits)[ids], row by row.

    logits (N, V) floating; ids (N,) int32, IGNORED or in [0, V); out and lse (N,) float32 are written.
    Raises ValueError for other shapes or dtypes, and for another id (on a GPU only with RLNUMBA_DEBUG set:
    else NaN).
    """
    rows, columns = check("logp", "logits", logits, (None, None), FLOATS)
    check("logp", "ids", ids, (rows,), I32)
    check("logp", "out", out, (rows,), F32)
    check("logp", "lse", lse, (rows,), F32)
    check_ids("logp", "ids", ids, columns)
    _logp_of_rows(logits, None, ids, 1.0, out, lse, None, None)


def logp_indexed(logits, row_idx, ids, out, lse):
    """out = log softmax(logits[row_idx])[ids], without a copy of the rows: the bits of logp's rows.

    logits (N, V) floating; row_idx (M,) int32 in [0, N), in any order and number; ids, out, lse (M,) and
    errors as for logp.
    """
    rows, columns = check("logp_indexed", "logits", logits, (None, None), FLOATS)
    (count,) = check("logp_indexed", "row_idx", row_idx, (None,), I32)
    check("logp_indexed", "ids", ids, (count,), I32)
    check("logp_indexed", "out", out, (count,), F32)
    check("logp_indexed", "lse", lse, (count,), F32)
    check_ids("logp_indexed", "ids", ids, columns)
    check_ids("logp_indexed", "row_idx", row_idx, rows, ignored=None)
    _logp_of_rows(logits, row_idx, ids, 1.0, out, lse, None, None)


def logp_backward(logits, ids, lse, dlogp, dlogits):
    """dlogits = dlogp (onehot(ids) - softmax(logits)): the gradient of logp.

    logits and dlogits (N, V) of one floating dtype, may be one array; ids, lse as in logp; dlogp (N,)
    float32. Raises ValueError as logp.
    """
    rows, columns = check("logp_backward", "logits", logits, (None, None), FLOATS)
    check("logp_backward", "ids", ids, (rows,), I32)
    check("logp_backward", "lse", lse, (rows,), F32)
    check("logp_backward", "dlogp", dlogp, (rows,), F32)
    check("logp_backward", "dlogits", dlogits, (rows, columns), (logits.dtype,))
    check_ids("logp_backward", "ids", ids, columns)
    _logp_backward_of_rows(logits, ids, 1.0, lse, dlogp, dlogits)


def linear_logp(hidden, weight, ids, temperature, logp, lse, entropy=None, top1=None, bias=None):
    """Log-probability of ids under softmax((hidden weight^T + bias) / temperature), without an (N, V) array.

    hidden (N, D), weight (V, D) and bias (V,) of one floating dtype; ids (N,) int32, IGNORED or in [0, V);
    temperature > 0. Written: logp, lse, entropy (N,) float32 (entropy in nats), top1 (N,) int32, the
    lowest index of the largest logit. Logits are float32. Raises ValueError as logp.
    """
    rows, vocabulary = _check_linear("linear_logp", hidden, weight, ids, temperature, bias)
    for name, array, dtypes in (("logp", logp, F32), ("lse", lse, F32), ("entropy", entropy, F32), ("top1", top1, I32)):
        if array is not None:
            check("linear_logp", name, array, (rows,), dtypes)
    outputs = (logp, lse, entropy, top1)
    if _fused(hidden, weight, bias):

        def operate(hidden, ids, _, outputs, __):
            logprob_sm90.linear_logp(hidden, weight, ids, temperature, *outputs)

        at_once = logprob_sm90.forward_rows(vocabulary)
    else:

        def operate(hidden, ids, _, outputs, __):
            _linear_logp_chunks(hidden, weight, ids, temperature, bias, *outputs)

        if device.name() != "cpu":
            operate(hidden, ids, (), outputs, None)
            return
        at_once = rows
    _on_live_rows(operate, ids != IGNORED, hidden, ids, (), outputs, None, at_once)


def linear_logp_backward(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, bias=None, dbias=None):
    """The gradient of linear_logp: dhidden =, dweight +=, dbias +=. The logits are computed again, by chunks.

    hidden, weight, ids, temperature, bias as in linear_logp, lse as it wrote it; dlogp (N,) float32;
    dhidden (N, D) of hidden's dtype; dweight (V, D) and dbias (V,) float32. The gradient of the logits is
    rounded to hidden's dtype. Rows with dlogp 0 give 0. Raises ValueError as logp.
    """
    rows, vocabulary = _check_linear("linear_logp_backward", hidden, weight, ids, temperature, bias)
    check("linear_logp_backward", "lse", lse, (rows,), F32)
    check("linear_logp_backward", "dlogp", dlogp, (rows,), F32)
    check("linear_logp_backward", "dhidden", dhidden, hidden.shape, (hidden.dtype,))
    check("linear_logp_backward", "dweight", dweight, weight.shape, F32)
    if dbias is not None:
        check("linear_logp_backward", "dbias", dbias, (vocabulary,), F32)
    if dbias is None and _fused(hidden, weight, bias):

        def operate(hidden, ids, inputs, _, dhidden):
            logprob_sm90.linear_logp_backward(hidden, weight, ids, temperature, *inputs, dhidden, dweight)

        at_once = logprob_sm90.backward_rows(hidden.shape[1])
    else:

        def operate(hidden, ids, inputs, _, dhidden):
            _linear_logp_backward_chunks(hidden, weight, ids, temperature, *inputs, dhidden, dweight, bias, dbias)

        if device.name() != "cpu":
            operate(hidden, ids, (lse, dlogp), (), dhidden)
            return
        at_once = rows
    _on_live_rows(operate, (ids != IGNORED) & (dlogp != 0), hidden, ids, (lse, dlogp), (), dhidden, at_once)


def linear_logp_with_gradient(
    hidden, weight, ids, temperature, dlogp, logp, lse, dhidden, dweight, entropy=None, top1=None, accumulate=True
):
    """linear_logp and linear_logp_backward at once, for a loss whose dlogp (N,) float32 is known beforehand.

    Arguments and errors as theirs, without a bias. logp, lse, entropy and top1 have linear_logp's bits. accumulate:
    whether dweight is added to; else it is written, which is faster.

    Where logprob/sm90.py serves the arrays, a row takes three products instead of four, or one if its dlogp is 0, and
    probabilities are rounded to hidden's dtype once more. Beside the arguments it needs at most EXTRA_BYTES there, 256
    MiB (252 where D is 1,024 and V 151,936), and some numbers a row. Elsewhere this is linear_logp, then
    linear_logp_backward, with their bits and their memory.
    """
    rows, vocabulary = _check_linear("linear_logp_with_gradient", hidden, weight, ids, temperature, None)
    outputs = (logp, lse, entropy, top1)
    names = (("logp", F32), ("lse", F32), ("entropy", F32), ("top1", I32))
    for (name, dtypes), array in zip(names, outputs, strict=True):
        if array is not None:
            check("linear_logp_with_gradient", name, array, (rows,), dtypes)
    check("linear_logp_with_gradient", "dlogp", dlogp, (rows,), F32)
    check("linear_logp_with_gradient", "dhidden", dhidden, hidden.shape, (hidden.dtype,))
    check("linear_logp_with_gradient", "dweight", dweight, weight.shape, F32)
    if not _fused(hidden, weight, None):
        linear_logp(hidden, weight, ids, temperature, *outputs)
        if not accumulate:
            fill(0.0, dweight)
        linear_logp_backward(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight)
        return

    def forward(hidden, ids, _, outputs, __):
        logprob_sm90.linear_logp(hidden, weight, ids, temperature, *outputs)

    def one_pass(hidden, ids, inputs, outputs, dhidden):
        nonlocal accumulate
        logp, lse, entropy, top1 = outputs
        logprob_sm90.linear_logp_with_gradient(
            hidden, weight, ids, temperature, *inputs, logp, lse, dhidden, dweight, entropy, top1, accumulate
        )
        accumulate = True

    counts, learns = ids != IGNORED, dlogp != 0
    # First what needs more memory: the pool cuts what the other needs from it.
    at_once, _ = logprob_sm90.block_rows(hidden.shape[1], vocabulary)
    _on_live_rows(one_pass, counts & learns, hidden, ids, (dlogp,), outputs, dhidden, at_once)
    if not accumulate:
        fill(0.0, dweight)
    at_once = logprob_sm90.forward_rows(vocabulary)
    _on_live_rows(forward, counts & ~learns, hidden, ids, (), outputs, None, at_once, keep_others=True)


def _fused(hidden, weight, bias):
    """Whether logprob/sm90.py serves these arrays."""
    if device.name() == "cpu" or bias is not None or dispatch.family("logprob") != "sm90":
        return False
    like_products = backend() == "native" and dispatch.family("gemm") == "sm90"
    return like_products and logprob_sm90.takes(hidden, weight)


def _on_live_rows(operate, live, hidden, ids, inputs, outputs, dhidden, at_once, keep_others=False):
    """operate(hidden, ids, inputs, outputs, dhidden) on the rows that are `live`; others get 0, in int32 arrays -1.

    live: (N,) bool; inputs and outputs: (N,) arrays, an output also None; dhidden (N, D) or None. at_once: rows that
    operate takes at a time where not all are live, since these are copied. keep_others: outputs (not dhidden) of the
    other rows stay as they are. On a GPU it waits for the device, once.
    """
    kept = device.xp().flatnonzero(live).astype(np.int32)
    if kept.shape[0] == ids.shape[0]:
        operate(hidden, ids, inputs, outputs, dhidden)
        return
    for array in () if keep_others else outputs:
        if array is not None:
            array.fill(-1 if array.dtype == np.int32 else 0)
    if dhidden is not None:
        dhidden.fill(0)
    for first in range(0, kept.shape[0], at_once):
        _on_rows(operate, kept[first : first + at_once], hidden, ids, inputs, outputs, dhidden)


def _on_rows(operate, rows, hidden, ids, inputs, outputs, dhidden):
    """_on_live_rows of the given `rows` (M,) int32, all at once, without a value for the others."""
    xp = device.xp()
    some = xp.empty((rows.shape[0], hidden.shape[1]), hidden.dtype)
    gather_rows(hidden, rows, some)
    parts = [None if array is None else xp.empty(rows.shape, array.dtype) for array in outputs]
    gradient = None if dhidden is None else xp.empty(some.shape, dhidden.dtype)
    operate(some, ids[rows], [array[rows] for array in inputs], parts, gradient)
    for array, part in zip(outputs, parts, strict=True):
        if array is not None:
            array[rows] = part
    if dhidden is not None:
        scatter_rows(gradient, rows, dhidden)


def check_ids(op, name, ids, limit, ignored=IGNORED):
    """Raise ValueError naming the first id that is neither `ignored` nor in [0, limit).

    On a GPU only if RLNUMBA_DEBUG is set: looking means waiting for the device.
    """
    if device.name() == "cuda" and not DEBUG:
        return
    ids = device.to_host(ids)
    bad = (ids < 0) | (ids >= limit)
    if ignored is not None:
        bad &= ids != ignored
    if bad.any():
        first = int(np.argmax(bad))
        also = "" if ignored is None else f" or {ignored}"
        raise ValueError(f"{op}: {name}[{first}] must be in [0, {limit}){also}, got {int(ids[first])}")


def _check_linear(op, hidden, weight, ids, temperature, bias):
    rows, width = check(op, "hidden", hidden, (None, None), FLOATS)
    vocabulary, _ = check(op, "weight", weight, (None, width), (hidden.dtype,))
    check(op, "ids", ids, (rows,), I32)
    if bias is not None:
        check(op, "bias", bias, (vocabulary,), (hidden.dtype,))
    if not temperature > 0:
        raise ValueError(f"{op}: temperature must be > 0, got {temperature}")
    check_ids(op, "ids", ids, vocabulary)
    return rows, vocabulary


def _whole(count, tile):
    """count, or the largest multiple of `tile` that is not more."""
    return count - count % tile if count > tile else count


def _slices(count, step):
    return [slice(first, min(first + step, count)) for first in range(0, count, step)]


def _part(array, chunk):
    return None if array is None else array[chunk]


def _linear_logp_chunks(hidden, weight, ids, temperature, bias, logp, lse, entropy, top1):
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    step = min(rows, _whole(max(1, CHUNK_LOGITS // max(vocabulary, 1)), CHUNK_TILE))
    logits = device.xp().empty((step, vocabulary), np.float32)
    for chunk in _slices(rows, max(step, 1)):
        part = logits[: chunk.stop - chunk.start]
        linear(hidden[chunk], weight, part, bias=bias)
        outputs = logp[chunk], lse[chunk], _part(entropy, chunk), _part(top1, chunk)
        _logp_of_rows(part, None, ids[chunk], temperature, *outputs)


def _linear_logp_backward_chunks(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, bias, dbias):
    (rows, width), vocabulary, xp = hidden.shape, weight.shape[0], device.xp()
    row_step = min(rows, _whole(max(1, CHUNK_SUMS // max(width, 1)), CHUNK_TILE))
    step = min(vocabulary, _whole(max(1, CHUNK_LOGITS // 2 // max(row_step, 1)), CHUNK_TILE))
    is_wide = hidden.dtype == np.float32
    memory = xp.empty(row_step * step, np.float32)
    narrow_memory = memory if is_wide else xp.empty(memory.shape, hidden.dtype)
    sums_memory = None if is_wide else xp.empty((row_step, width), np.float32)
    for some in _slices(rows, max(row_step, 1)):
        h, count = hidden[some], some.stop - some.start
        sums = dhidden[some] if is_wide else sums_memory[:count]
        sums.fill(0)
        for chunk in _slices(vocabulary, max(step, 1)):
            columns = chunk.stop - chunk.start
            logits, dlogits = (array[: count * columns].reshape(count, columns) for array in (memory, narrow_memory))
            linear(h, weight[chunk], logits, bias=_part(bias, chunk))
            _logp_backward_of_rows(logits, ids[some], temperature, lse[some], dlogp[some], dlogits, chunk.start)
            linear_backward_input(dlogits, weight[chunk], sums, accumulate=True)
            linear_backward_weight(dlogits, h, dweight[chunk])
            if dbias is not None:
                bias_backward(dlogits, dbias[chunk])
        if not is_wide:
            cast(sums, dhidden[some])


def _logp_of_rows(logits, row_idx, ids, temperature, out, lse, entropy, top1):
    count = ids.shape[0]
    if device.name() != "cpu":
        row_idx, top1 = (ids[:0] if array is None else array for array in (row_idx, top1))
        entropy = out[:0] if entropy is None else entropy
        arguments = (row_idx, ids, float(temperature), out, lse, entropy, top1)
        launch(logp_kernel, count, ROW_THREADS, logits, *arguments)
        return
    row_idx = np.arange(count, dtype=np.int32) if row_idx is None else row_idx
    entropy = np.empty(count, np.float32) if entropy is None else entropy
    top1 = np.empty(count, np.int32) if top1 is None else top1
    ignored = ids == IGNORED
    # Ignored rows are computed for token 0 and overwritten; linear_logp leaves them out beforehand.
    cpu.logp_rows(logits, row_idx, np.where(ignored, 0, ids), np.float32(temperature), out, lse, entropy, top1)
    for array, value in ((out, 0), (lse, 0), (entropy, 0), (top1, -1)):
        array[ignored] = value


def _logp_backward_of_rows(logits, ids, temperature, lse, dlogp, dlogits, first_id=0):
    """first_id: the id of the first column."""
    if device.name() != "cpu":
        arguments = ids, first_id, float(temperature), lse, dlogp, dlogits
        access = 4 if logits.shape[1] % 4 == 0 else 1
        launch(logp_backward_kernel(access), ids.shape[0], ROW_THREADS, logits, *arguments)
        return
    ignored = ids == IGNORED
    cpu.logp_backward_rows(logits, ids - np.int32(first_id), np.float32(temperature), lse, dlogp, dlogits)
    dlogits[ignored] = 0


def logp_ref(logits, ids, temperature=1.0):
    """(logp, lse, entropy, top1) of logits (N, V), in their precision; ids in [0, V) or IGNORED."""
    scaled = logits / logits.dtype.type(temperature)
    shifted = scaled - scaled.max(axis=1, keepdims=True)
    lse = scaled.max(axis=1) + np.log(np.exp(shifted).sum(axis=1))
    chosen = scaled[np.arange(len(ids)), np.where(ids == IGNORED, 0, ids)]
    entropy = lse - np.sum(np.exp(scaled - lse[:, None]) * scaled, axis=1)
    live = ids != IGNORED
    top1 = np.where(live, logits.argmax(axis=1), -1).astype(np.int32)
    return (chosen - lse) * live, lse * live, entropy * live, top1


def logp_backward_ref(logits, ids, dlogp, temperature=1.0):
    """dlogits of logp_ref's first result."""
    scaled = logits / logits.dtype.type(temperature)
    p = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    onehot = np.arange(logits.shape[1]) == ids[:, None]
    return (dlogp * (ids != IGNORED) / temperature)[:, None] * (onehot - p)


def linear_logp_ref(hidden, weight, ids, temperature=1.0, bias=None):
    """(logp, lse, entropy, top1) of linear_logp, in hidden's precision."""
    logits = hidden @ weight.T
    return logp_ref(logits if bias is None else logits + bias, ids, temperature)


def linear_logp_backward_ref(hidden, weight, ids, dlogp, temperature=1.0, bias=None):
    """(dhidden, dweight, dbias) of linear_logp."""
    logits = hidden @ weight.T
    dlogits = logp_backward_ref(logits if bias is None else logits + bias, ids, dlogp, temperature)
    return dlogits @ weight, dlogits.T @ hidden, dlogits.sum(axis=0)
