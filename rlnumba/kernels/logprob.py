"""Log-probability of a chosen token under softmax(z / T), its entropy, and their backward, without an (N, V) array.

    s = z / T                     z float32 logits, never rounded; the division comes before everything else
    lse = log sum exp(s)          logp = s[id] - lse
    p = exp(s - lse)              entropy = lse - sum p s
    dz = dlogp (onehot(id) - p) / T

`logp` takes the logits. `linear_logp` takes the hidden states and the output matrix, z = hidden weight^T + bias,
and makes the logits of CHUNK_LOGITS at a time; its backward makes them again, then dhidden = dz weight and
dweight += dz^T hidden. A row whose id is IGNORED gives logp, lse and entropy 0, top1 -1 and no gradient.

Whoever draws a token (kernels/sampling.py) and whoever scores it must get the same bits, so all kernels add up a
row of logits in one order, made of the functions here (on the numpy device: `row_terms` of kernels/cpu.py). A sum
is a pair: the largest logit m of a set, and the sum of 2^((z - m) factor) over it, factor = log2(e) / T. It is the
order in which a tensor core leaves 256 columns of a product in the registers of four threads, a quad:

    sixteen   lane i of a quad takes columns 8 b + 2 i and 8 b + 2 i + 1, eight b at a time; four sums: even and odd
              b, first and second column, b ascending; then (even + even) + (odd + odd)
    tile      of 256 columns: a lane joins its four sixteens in ascending order, the quad its lanes by a butterfly
    class     tiles c, c + CLASSES, c + 2 CLASSES, ... are joined in ascending order
    row       eight neighbouring classes by a butterfly, then these groups in ascending order

`join` is symmetric in its bits, so a butterfly gives all lanes the same. Nothing depends on how many threads work.
"""

import math

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels import cpu
from rlnumba.kernels.check import F32, FLOATS, I32, check
from rlnumba.kernels.gemm import bias_backward, linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.instructions import block_max, device_function, exp2, narrow, shuffle_xor, widen
from rlnumba.kernels.launch import DEBUG, launch

i32 = np.int32

IGNORED = -100
# Float32 logits that exist at one time: 64 MiB.
CHUNK_LOGITS = 1 << 24
# Columns of a tile, and classes of tiles. Part of the arithmetic: they fix the order of the sum over V.
TILE_COLUMNS = 256
CLASSES = 16 if device.name() == "sim" else 128
# Threads that share a row of logits: a quad a class.
ROW_THREADS = 4 * CLASSES
# Eight classes lie in a warp of them.
GROUPS = CLASSES // 8
# Below every logit: the largest of none.
NONE = np.float32(-1e30)
LOG2_E = np.float32(math.log2(math.e))
LOG_2 = np.float32(math.log(2.0))
# 2^-150 is 0 in float32, and 150 times 0 is no NaN.
FAR = np.float32(150.0)


@device_function
def fold_sixteen(values, first, stride, factor, weigh):
    """(largest, total, weighted) of a lane's sixteen logits, which become e = 2^x, x = (z - largest) factor.

    The logits are values[first + stride b + c], b < 8, c < 2. weighted: the sum of e x, 0 unless `weigh`.
    """
    largest = NONE
    for b in range(8):
        for c in range(2):
            largest = max(largest, values[first + stride * b + c])
    sums = cuda.local.array(4, np.float32)
    weighted_sums = cuda.local.array(4, np.float32)
    for b in range(8):
        for c in range(2):
            x = (values[first + stride * b + c] - largest) * factor
            if weigh:
                x = max(x, -FAR)
            e = exp2(x)
            values[first + stride * b + c] = e
            i = b % 2 * 2 + c
            if b < 2:
                sums[i], weighted_sums[i] = e, np.float32(0.0)
            else:
                sums[i] += e
            if weigh:
                weighted_sums[i] = cuda.fma(e, x, weighted_sums[i])
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    weighted = (weighted_sums[0] + weighted_sums[1]) + (weighted_sums[2] + weighted_sums[3])
    return largest, total, weighted


@device_function
def join(largest, total, weighted, other_largest, other_total, other_weighted, factor):
    """(largest, total, weighted) of two sets of logits, from those of each."""
    gap = min(abs(other_largest - largest) * factor, FAR)
    shrink = exp2(-gap)
    if other_largest > largest:
        weighted = cuda.fma(cuda.fma(-gap, total, weighted), shrink, other_weighted)
        total = cuda.fma(total, shrink, other_total)
    else:
        weighted = cuda.fma(cuda.fma(-gap, other_total, other_weighted), shrink, weighted)
        total = cuda.fma(other_total, shrink, total)
    return max(largest, other_largest), total, weighted


@device_function
def join_lanes(largest, total, weighted, distance, factor):
    """The join of this lane's sums and those of the lane at a distance, the same in both."""
    other = shuffle_xor(largest, distance), shuffle_xor(total, distance), shuffle_xor(weighted, distance)
    return join(largest, total, weighted, other[0], other[1], other[2], factor)


@device_function
def join_classes(largest, total, weighted, step, factor, groups):
    """The sums of a row from those of its classes, the same in every thread of the block.

    Class c's are held by the lanes c step .. c step + step - 1, step 1 or 4. groups: shared float32 (GROUPS, 3).
    """
    for doubling in range(3):
        largest, total, weighted = join_lanes(largest, total, weighted, step << doubling, factor)
    if cuda.threadIdx.x % (8 * step) == 0:
        group = cuda.threadIdx.x // (8 * step)
        groups[group, 0], groups[group, 1], groups[group, 2] = largest, total, weighted
    cuda.syncthreads()
    largest, total, weighted = groups[0, 0], groups[0, 1], groups[0, 2]
    for group in range(1, GROUPS):
        largest, total, weighted = join(
            largest, total, weighted, groups[group, 0], groups[group, 1], groups[group, 2], factor
        )
    return largest, total, weighted


@device_function
def lowest_of_best(value, index, scratch):
    """(largest value, lowest index that has it) over a one-dimensional block; indices are below 2^24."""
    best = block_max(value, scratch)
    # Such indices are exact as float32.
    return best, i32(-block_max(-np.float32(index) if value == best else NONE, scratch))


@device_function
def row_terms(logits, row, temperature, scratch, groups):
    """(lse, entropy, top) of softmax(logits[row] / temperature), the same in every thread of the block.

    For one-dimensional blocks of ROW_THREADS threads; scratch: shared float32 array of 32; groups as in
    join_classes. top is the lowest index of the largest logit, as int32. The row is read once.
    """
    columns = logits.shape[1]
    factor = LOG2_E / temperature
    lane = i32(cuda.threadIdx.x) % i32(32)
    values = cuda.local.array(16, np.float32)
    best, top = NONE, i32(0)
    largest, total, weighted = NONE, np.float32(0.0), np.float32(0.0)
    first_of_warp = (i32(cuda.threadIdx.x) - lane) // i32(4) * i32(TILE_COLUMNS)
    for base in range(first_of_warp, columns, CLASSES * TILE_COLUMNS):
        tile = NONE, np.float32(0.0), np.float32(0.0)
        for part in range(4):
            first = i32(base) + lane // i32(4) * i32(TILE_COLUMNS) + i32(64 * part) + lane % i32(4) * i32(2)
            for b in range(8):
                for c in range(2):
                    column = first + i32(8 * b + c)
                    values[2 * b + c] = widen(logits[row, column]) if column < columns else np.float32(-math.inf)
            for b in range(8):
                for c in range(2):
                    # A lane's columns ascend: the first of equals stays.
                    if values[2 * b + c] > best:
                        best, top = values[2 * b + c], first + i32(8 * b + c)
            sums = fold_sixteen(values, 0, 2, factor, True)
            tile = join(tile[0], tile[1], tile[2], sums[0], sums[1], sums[2], factor)
        tile = join_lanes(tile[0], tile[1], tile[2], 1, factor)
        tile = join_lanes(tile[0], tile[1], tile[2], 2, factor)
        largest, total, weighted = join(largest, total, weighted, tile[0], tile[1], tile[2], factor)
    _, top = lowest_of_best(best, top, scratch)
    largest, total, weighted = join_classes(largest, total, weighted, 4, factor, groups)
    log_total = np.float32(math.log(total))
    return largest / temperature + log_total, log_total - LOG_2 * weighted / total, top


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


@cuda.jit
def logp_backward_kernel(logits, ids, temperature, lse, dlogp, dlogits):
    """A block owns a row: reads its logits, writes dlogits, which may be the same array."""
    row = cuda.blockIdx.x
    token = ids[row]
    row_lse = lse[row]
    factor = dlogp[row] / temperature if token != IGNORED else np.float32(0.0)
    for column in range(cuda.threadIdx.x, logits.shape[1], cuda.blockDim.x):
        gradient = np.float32(0.0)
        if token != IGNORED:
            gradient = -np.float32(math.exp(widen(logits[row, column]) / temperature - row_lse))
            if column == token:
                gradient += np.float32(1.0)
            gradient *= factor
        dlogits[row, column] = narrow(gradient, dlogits)


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
    if device.name() == "numpy":
        kept = np.flatnonzero(ids != IGNORED)
        results = (logp, lse, entropy, top1)
        if kept.size < rows:
            for array in results:
                if array is not None:
                    array[...] = -1 if array is top1 else 0
            compact = [None if array is None else np.empty(kept.size, array.dtype) for array in results]
            hidden, ids = hidden[kept], ids[kept]
        else:
            compact = results
        _linear_logp_chunks(hidden, weight, ids, temperature, bias, *compact)
        if kept.size < rows:
            for array, part in zip(results, compact, strict=True):
                if array is not None:
                    array[kept] = part
        return
    _linear_logp_chunks(hidden, weight, ids, temperature, bias, logp, lse, entropy, top1)


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
    if device.name() == "numpy":
        kept = np.flatnonzero((ids != IGNORED) & (dlogp != 0))
        if kept.size < rows:
            dhidden[...] = 0
            compact = np.empty((kept.size, hidden.shape[1]), hidden.dtype)
            gathered = (hidden[kept], weight, ids[kept], temperature, lse[kept], dlogp[kept])
            _linear_logp_backward_chunks(*gathered, compact, dweight, bias, dbias)
            dhidden[kept] = compact
            return
    _linear_logp_backward_chunks(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, bias, dbias)


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


def _chunks(rows, vocabulary):
    """Slices of the rows whose logits exist at one time."""
    step = max(1, min(rows, CHUNK_LOGITS // max(vocabulary, 1)))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _part(array, chunk):
    return None if array is None else array[chunk]


def _linear_logp_chunks(hidden, weight, ids, temperature, bias, logp, lse, entropy, top1):
    chunks = _chunks(hidden.shape[0], weight.shape[0])
    if not chunks:
        return
    logits = device.xp().empty((chunks[0].stop, weight.shape[0]), np.float32)
    for chunk in chunks:
        part = logits[: chunk.stop - chunk.start]
        linear(hidden[chunk], weight, part, bias=bias)
        outputs = logp[chunk], lse[chunk], _part(entropy, chunk), _part(top1, chunk)
        _logp_of_rows(part, None, ids[chunk], temperature, *outputs)


def _linear_logp_backward_chunks(hidden, weight, ids, temperature, lse, dlogp, dhidden, dweight, bias, dbias):
    chunks = _chunks(hidden.shape[0], weight.shape[0])
    if not chunks:
        return
    logits = device.xp().empty((chunks[0].stop, weight.shape[0]), np.float32)
    dlogits = logits if hidden.dtype == np.float32 else device.xp().empty(logits.shape, hidden.dtype)
    for chunk in chunks:
        part, dpart = (array[: chunk.stop - chunk.start] for array in (logits, dlogits))
        linear(hidden[chunk], weight, part, bias=bias)
        _logp_backward_of_rows(part, ids[chunk], temperature, lse[chunk], dlogp[chunk], dpart)
        linear_backward_input(dpart, weight, dhidden[chunk])
        linear_backward_weight(dpart, hidden[chunk], dweight)
        if dbias is not None:
            bias_backward(dpart, dbias)


def _logp_of_rows(logits, row_idx, ids, temperature, out, lse, entropy, top1):
    count = ids.shape[0]
    if device.name() != "numpy":
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


def _logp_backward_of_rows(logits, ids, temperature, lse, dlogp, dlogits):
    if device.name() != "numpy":
        launch(logp_backward_kernel, ids.shape[0], ROW_THREADS, logits, ids, float(temperature), lse, dlogp, dlogits)
        return
    ignored = ids == IGNORED
    cpu.logp_backward_rows(logits, np.where(ignored, 0, ids), np.float32(temperature), lse, dlogp, dlogits)
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
