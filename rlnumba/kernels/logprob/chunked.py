"""linear_logp and its gradient by chunks of float32 logits in memory: GEMMs of kernels/gemm and one kernel a chunk.

Serves every device, GPU and dtype. The forward makes the logits of CHUNK_LOGITS / V rows at a time. The backward, which
knows lse, makes them again, some columns for as many rows as CHUNK_SUMS allows: then dweight = dz^T hidden writes
each row of dweight once, and dhidden += dz weight adds up in float32.
"""

import math

import numpy as np

from rlnumba.kernels.cpu import logprob as cpu
from rlnumba.kernels.gemm.ops import linear, linear_backward_input, linear_backward_weight
from rlnumba.kernels.logprob import IGNORED, slices
from rlnumba.kernels.logprob.terms import NO_OPTIONS, VANISHED, RowOptions, entropy_terms, kernel_outputs, store_terms
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.nn.row_sum import GROUPS, LOG2_E, ROW_THREADS, row_terms_function
from rlnumba.kernels.ptx.warp import device_function, exp2, vector_access, widen
from rlnumba.kernels.sampling.token_rules import keep_allowed
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Float32 logits that exist at one time in the forward, 256 MiB. In the backward half of them do, with their gradient in
# 16 bits, 64 MiB, and the float32 gradient of the hidden states of CHUNK_SUMS elements, 32 MiB.
CHUNK_LOGITS = 1 << 26
CHUNK_SUMS = 1 << 23
# Chunks of more are rounded down to a multiple of this, as GEMMs have tiles.
CHUNK_TILE = 128


@specialize
def logp_kernel(masked):
    """masked: whether logits below their row's threshold count as -inf."""
    row_terms = row_terms_function(masked)

    @cuda.jit
    def logp_kernel(logits, ids, temperature, thresholds, terms):
        """A block owns a row of logits and reads it once; terms (Terms) are written, NaN for an id outside of V."""
        scratch = cuda.shared.array(32, np.float32)
        groups = cuda.shared.array((GROUPS, 3), np.float32)
        row = cuda.blockIdx.x
        token = ids[row]
        value, row_lse, row_entropy, top = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.int32(-1)
        if token != IGNORED:
            threshold = thresholds[row] if masked else np.float32(-math.inf)
            row_lse, row_entropy, top = row_terms(logits, np.int64(row), temperature, threshold, scratch, groups)
            value = np.float32(math.nan)
            if 0 <= token < logits.shape[1]:
                value = widen(logits[row, token]) / temperature - row_lse
                if masked and widen(logits[row, token]) < threshold:
                    value = np.float32(-math.inf)
        if cuda.threadIdx.x == 0:
            store_terms(row, value, row_lse, row_entropy, top, terms)

    return logp_kernel


@specialize
def logp_backward_kernel(access, with_entropy=False, masked=False):
    """access: neighbouring elements of one load, 4 where the alignment of rows allows it, else 1.

    with_entropy: whether there is a dentropy; masked: whether logits below their row's threshold count as -inf.
    """
    load, store = vector_access(access, access)
    count = 2 * access

    @device_function
    def differentiate(values, at, first, target, factor, shift, scale, offset, slope, threshold):
        """values[at + i], logits of columns first + i, become their gradient."""
        for i in range(access):
            gradient = np.float32(0.0)
            if masked and values[at + i] < threshold:
                values[at + i] = np.float32(-math.inf)
            if with_entropy:
                distance = max(cuda.fma(values[at + i], factor, shift), VANISHED)
                gradient = -(cuda.fma(distance, slope, offset) * exp2(distance))
                if first + i == target:
                    gradient += scale
                values[at + i] = gradient
            else:
                if scale != 0:
                    gradient = -exp2(cuda.fma(values[at + i], factor, shift))
                    if first + i == target:
                        gradient += np.float32(1.0)
                values[at + i] = scale * gradient

    @cuda.jit
    def logp_backward_kernel(logits, ids, first_id, temperature, lse, dlogp, thresholds, entropy, dentropy, dlogits):
        """A block owns a row: reads its logits, of ids from first_id on, writes dlogits, which may be the same array.

        A thread has two loads in flight. Rows that are IGNORED, or whose dlogp (and dentropy) is 0, give 0.
        """
        row = cuda.blockIdx.x
        columns = logits.shape[1]
        factor, shift = LOG2_E / temperature, -lse[row] * LOG2_E
        scale = dlogp[row] / temperature if ids[row] != IGNORED else np.float32(0.0)
        offset, slope = scale, np.float32(0.0)
        if with_entropy and ids[row] != IGNORED:
            offset, slope = entropy_terms(scale, entropy[row], dentropy[row] / temperature)
        target = ids[row] - first_id
        threshold = thresholds[row] if masked else np.float32(-math.inf)
        values = cuda.local.array(count, np.float32)
        stride = access * cuda.blockDim.x
        logits_row, dlogits_row = logits[row], dlogits[row]
        for first in range(access * cuda.threadIdx.x, columns, 2 * stride):
            second = first + stride
            # Beyond the row the first part is loaded again, and not stored.
            clamped = second if second < columns else first
            load(logits_row, first, values, 0)
            load(logits_row, clamped, values, access)
            differentiate(values, 0, first, target, factor, shift, scale, offset, slope, threshold)
            differentiate(values, access, clamped, target, factor, shift, scale, offset, slope, threshold)
            store(dlogits_row, first, values, 0)
            if second < columns:
                store(dlogits_row, second, values, access)

    return logp_backward_kernel


def logp_of_logits(logits, ids, temperature, logp, lse, entropy=None, top1=None, thresholds=None):
    """logp, lse, entropy, top1 of linear_logp for logits (N, V) of a floating dtype; entropy and top1 may be None."""
    masked = thresholds is not None
    thresholds = thresholds if masked else lse[:0]
    if device.name() == "cpu":
        entropy = np.empty(ids.shape, np.float32) if entropy is None else entropy
        top1 = np.empty(ids.shape, np.int32) if top1 is None else top1
        cpu.logp_rows(logits, ids, np.float32(temperature), thresholds, logp, lse, entropy, top1)
        return
    outputs = kernel_outputs(logp, lse, entropy, top1, ids)
    launch(logp_kernel(masked), ids.shape[0], ROW_THREADS, logits, ids, float(temperature), thresholds, outputs)


def logp_of_logits_backward(logits, ids, temperature, lse, dlogp, dlogits, first_id=0, options=NO_OPTIONS):
    """dlogits of logp_backward_ref, of the columns of logits, whose ids begin at first_id.

    logits, dlogits (N, columns), which may be one array; ids, lse, dlogp (N,). options: RowOptions.
    """
    entropy, dentropy, thresholds = options
    masked = thresholds is not None
    thresholds = thresholds if masked else lse[:0]
    if device.name() == "cpu":
        rows = logits, ids, first_id, np.float32(temperature), lse, dlogp, thresholds
        if dentropy is None:
            cpu.logp_backward_rows(*rows, dlogits)
        else:
            cpu.logp_entropy_backward_rows(*rows, entropy, dentropy, dlogits)
        return
    kernel = logp_backward_kernel(4 if logits.shape[1] % 4 == 0 else 1, dentropy is not None, masked)
    if dentropy is None:
        entropy = dentropy = lse[:0]
    rows = logits, ids, first_id, float(temperature), lse, dlogp, thresholds, entropy, dentropy
    launch(kernel, ids.shape[0], ROW_THREADS, *rows, dlogits)


def _whole_tiles(count):
    """The largest multiple of CHUNK_TILE that is not more than count; below one tile count, or 1."""
    return count - count % CHUNK_TILE if count > CHUNK_TILE else max(count, 1)


def forward_rows(vocabulary):
    """Rows whose logits the forward makes at one time."""
    return _whole_tiles(CHUNK_LOGITS // max(vocabulary, 1))


def backward_rows(width):
    """Rows whose gradient the backward adds up at one time."""
    return _whole_tiles(CHUNK_SUMS // max(width, 1))


def operator_bytes(rows, width, vocabulary, itemsize):
    """Bytes of the arrays that a forward, or a backward, of so many rows makes beside its arguments, at most: int.

    itemsize: bytes of an element of the hidden states.
    """
    count = min(backward_rows(width), rows)
    backward = 4 * min(CHUNK_LOGITS // 2, count * vocabulary)
    if itemsize < 4:
        backward += backward // 4 * itemsize + 4 * count * width
    return max(backward, 4 * min(forward_rows(vocabulary), rows) * vocabulary)


def linear_logp(hidden, weight, ids, temperature, outputs, kept):
    """ops.linear_logp of checked arrays, by chunks of rows."""
    step = forward_rows(weight.shape[0])
    memory = device.xp().empty((min(step, hidden.shape[0]), weight.shape[0]), np.float32)
    for rows, count in slices(hidden.shape[0], step):
        linear(hidden[rows], weight, memory[:count])
        if kept.allowed is not None:
            keep_allowed(memory[:count], kept.allowed[rows])
        of_rows = (None if array is None else array[rows] for array in (*outputs, kept.thresholds))
        logp_of_logits(memory[:count], ids[rows], temperature, *of_rows)


def linear_logp_backward(hidden, weight, ids, temperature, lse, gradients, kept):
    """ops.linear_logp_backward of checked arrays, by chunks of rows, and of the vocabulary for each."""
    dlogp, dhidden, dweight, entropy, dentropy, accumulate = gradients
    thresholds, allowed = kept
    (rows, width), vocabulary, xp = hidden.shape, weight.shape[0], device.xp()
    row_step = min(rows, backward_rows(width))
    step = min(vocabulary, _whole_tiles(CHUNK_LOGITS // 2 // max(row_step, 1)))
    if allowed is not None:
        step = min(vocabulary, -(-step // 32) * 32)
    is_float32 = hidden.dtype == np.float32
    memory = xp.empty(row_step * step, np.float32)
    narrow_memory = memory if is_float32 else xp.empty(memory.shape, hidden.dtype)
    all_sums = None if is_float32 else xp.empty((row_step, width), np.float32)
    for batch, count in slices(rows, row_step):
        h, sums = hidden[batch], dhidden[batch] if is_float32 else all_sums[:count]
        sums.fill(0)
        for chunk, columns in slices(vocabulary, step):
            logits, dlogits = (array[: count * columns].reshape(count, columns) for array in (memory, narrow_memory))
            linear(h, weight[chunk], logits)
            if allowed is not None:
                keep_allowed(logits, allowed[batch], chunk.start)
            options = RowOptions(*(None if each is None else each[batch] for each in (entropy, dentropy, thresholds)))
            of_rows = ids[batch], temperature, lse[batch], dlogp[batch]
            logp_of_logits_backward(logits, *of_rows, dlogits, chunk.start, options)
            linear_backward_input(dlogits, weight[chunk], sums, accumulate=True)
            if dweight is not None:
                linear_backward_weight(dlogits, h, dweight[chunk], accumulate=accumulate or batch.start > 0)
        if not is_float32:
            cast(sums, dhidden[batch])
