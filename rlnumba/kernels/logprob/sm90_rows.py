"""Kernels of the sm_90 log-prob that work on rows: they join tile results and finish the one-pass form's gradient."""

import math
from collections import namedtuple

import numpy as np

from rlnumba.kernels.logprob.sm90_kernel import ARCHITECTURES as ARCHITECTURES
from rlnumba.kernels.logprob.sm90_kernel import RESULTS, exponent_base
from rlnumba.kernels.logprob.terms import store_terms
from rlnumba.kernels.nn.row_sum import (
    CLASSES,
    GROUPS,
    LOG2_E,
    NONE,
    TILE_COLUMNS,
    join,
    join_classes,
    lowest_of_best,
    row_results,
)
from rlnumba.kernels.ptx.warp import (
    device_function,
    exp2,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    narrow,
    vector_access,
    warp_sum,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import supports_pdl

i32 = np.int32

# A class has one thread of a row's block, or several if a warp has more threads than there are classes.
CLASS_THREADS = max(1, 32 // CLASSES)
ROW_THREADS = CLASSES * CLASS_THREADS
SUM_THREADS = 32 if device.simulated() else 256
# Elements of a 16-byte load, and elements that a thread has at a time in two of them.
EIGHT, SIXTEEN = 8, 16
# Warps of a block of reference_kernel, a row each.
REFERENCE_ROWS = 4

load_four, store_four = vector_access(4, 4)
load_eight, store_eight = vector_access(EIGHT, EIGHT)


@device_function
def joined_terms(results, tiles, row, temperature):
    """(lse, entropy, top) of a row, the same in all ROW_THREADS threads: the last steps of row_sum.py.

    results (N, tiles, 4), flat. CLASS_THREADS threads own a class of tiles.
    """
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    values = cuda.local.array(RESULTS, np.float32)
    factor = LOG2_E / temperature
    largest, total, weighted, top = NONE, np.float32(0.0), np.float32(0.0), i32(0)
    for tile in range(cuda.threadIdx.x // CLASS_THREADS, tiles, CLASSES):
        load_four(results, (np.int64(row) * tiles + tile) * RESULTS, values, 0)
        if values[0] > largest:
            top = i32(values[3])
        largest, total, weighted = join(largest, total, weighted, values[0], values[1], values[2], factor)
    top = lowest_of_best(largest, top, scratch)
    largest, total, weighted = join_classes(largest, total, weighted, CLASS_THREADS, factor, groups)
    lse, entropy = row_results(largest, total, weighted, temperature)
    return lse, entropy, top


@device_function
def tiles_of_row(tiles):
    """The number of tiles of a row, from TileResults."""
    return tiles.results.shape[0] // (RESULTS * tiles.target_logits.shape[0])


@supports_pdl
@cuda.jit
def join_tiles_kernel(tiles, temperature, terms):
    """A block owns a row. tiles: TileResults; terms: Terms, written, NaN for an id outside the vocabulary."""
    row = cuda.blockIdx.x
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    count = tiles_of_row(tiles)
    row_lse, row_entropy, top = joined_terms(tiles.results, count, row, temperature)
    if cuda.threadIdx.x == 0:
        row_logp = tiles.target_logits[row] / temperature - row_lse
        store_terms(row, row_logp, row_lse, row_entropy, top, terms)


@cuda.jit
def reference_kernel(hidden, weight, ids, reference_logits):
    """reference_logits[row] = hidden[row] . weight[ids[row]], about the logit of the row's id; NaN without such an id.

    A warp owns a row, a lane EIGHT neighbouring elements at a time.
    """
    row = cuda.blockIdx.x * REFERENCE_ROWS + cuda.threadIdx.x // 32
    if row < hidden.shape[0]:
        token, total = ids[row], np.float32(math.nan)
        values = cuda.local.array(SIXTEEN, np.float32)
        if 0 <= token < weight.shape[0]:
            total = np.float32(0.0)
            for column in range(cuda.threadIdx.x % 32 * EIGHT, hidden.shape[1], 32 * EIGHT):
                load_eight(hidden[row], column, values, 0)
                load_eight(weight[token], column, values, EIGHT)
                for i in range(EIGHT):
                    total += values[i] * values[EIGHT + i]
        total = warp_sum(total)
        if cuda.threadIdx.x % 32 == 0:
            reference_logits[row] = total


@device_function
def gradient_of_row(line, results, start, reference, factor, shift, scale, max_exponent, target, rest):
    """line, the exponentials of a row whose tiles have different bases, becomes dz; rest: 1 - p of the target.

    The row's tile results begin at results[start]. A thread has two loads in flight.
    """
    pitch = line.shape[0]
    values = cuda.local.array(SIXTEEN, np.float32)
    stride = EIGHT * ROW_THREADS
    for first in range(EIGHT * cuda.threadIdx.x, pitch, 2 * stride):
        second = first + stride
        # Beyond the row the first part is loaded again, and not stored.
        clamped = second if second < pitch else first
        load_eight(line, first, values, 0)
        load_eight(line, clamped, values, EIGHT)
        largest = results[start + first // TILE_COLUMNS * RESULTS]
        other_largest = results[start + clamped // TILE_COLUMNS * RESULTS]
        p = exp2(cuda.fma(exponent_base(largest, reference, factor, max_exponent), factor, shift))
        other_p = exp2(cuda.fma(exponent_base(other_largest, reference, factor, max_exponent), factor, shift))
        for i in range(EIGHT):
            values[i] *= -(scale * p)
            values[EIGHT + i] *= -(scale * other_p)
            if first + i == target:
                values[i] = scale * rest
            if clamped + i == target:
                values[EIGHT + i] = scale * rest
        store_eight(line, first, values, 0)
        if second < pitch:
            store_eight(line, second, values, EIGHT)


# What dweight's GEMM takes for the rows' hidden states, and the factors of dhidden's rows.
ScaledRows = namedtuple("ScaledRows", "hidden factors")


@supports_pdl
@cuda.jit
def finish_exponentials_kernel(
    exponentials, tiles, reference_logits, ids, temperature, max_exponent, dlogp, hidden, terms, scaled
):
    """join_tiles_kernel, and what exponentials lack of dz = dlogp / T (onehot(ids) - p).

    exponentials (rows, pitch) are e = 2^((z - base) factor), base the row's reference logit or, by exponent_base, the
    largest logit of a tile. A row in which all have the reference keeps them: dz = c e with c = -dlogp / T 2^(reference
    factor - lse log2(e)), and the factor c goes to scaled.factors[row] and to scaled.hidden[row] = c hidden[row]; only
    the target's element becomes e - 1 / p. In any other row they become dz, scaled.hidden[row] = hidden[row] and
    scaled.factors[row] = 1. The target's comes from its own float32 logit, so that a probability near 1 leaves an exact
    gradient. Columns beyond the vocabulary stay 0. A block owns a row, a thread EIGHT neighbouring elements at a time.
    """
    row = cuda.blockIdx.x
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    pitch, width = exponentials.shape[1], hidden.shape[1]
    count = tiles_of_row(tiles)
    row_lse, row_entropy, top = joined_terms(tiles.results, count, row, temperature)
    factor, shift = LOG2_E / temperature, -row_lse * LOG2_E
    scale = dlogp[row] / temperature
    target = ids[row]
    rest = np.float32(1.0) - exp2(cuda.fma(tiles.target_logits[row], factor, shift))
    reference = reference_logits[row]
    above = -cuda.fma(reference, factor, shift)
    row_factor = np.float32(1.0)
    # No logit of the row is above its lse: by less than 1 after rounding.
    one_base = above <= max_exponent - np.float32(1.0)
    if one_base:
        row_factor = -scale * exp2(-above)
    else:
        start, line = np.int64(row) * count * RESULTS, exponentials[row]
        gradient_of_row(line, tiles.results, start, reference, factor, shift, scale, max_exponent, target, rest)
    if cuda.threadIdx.x == 0:
        if one_base and 0 <= target < pitch:
            exponentials[row, target] = narrow(-exp2(above) * rest, exponentials)
        scaled.factors[row] = row_factor
        row_logp = tiles.target_logits[row] / temperature - row_lse
        store_terms(row, row_logp, row_lse, row_entropy, top, terms)
    for column in range(EIGHT * cuda.threadIdx.x, width, EIGHT * ROW_THREADS):
        values = cuda.local.array(EIGHT, np.float32)
        load_eight(hidden[row], column, values, 0)
        for i in range(EIGHT):
            values[i] *= row_factor
        store_eight(scaled.hidden[row], column, values, 0)


@supports_pdl
@cuda.jit
def sum_splits_kernel(partials, rows, row_factors, out):
    """out[row] = row_factors[row] times the sum of partials[row + split * rows], splits ascending.

    A block owns a row of out, a thread four neighbouring elements at a time.
    """
    row = cuda.blockIdx.x
    values, total = cuda.local.array(4, np.float32), cuda.local.array(4, np.float32)
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    for column in range(4 * cuda.threadIdx.x, out.shape[1], 4 * cuda.blockDim.x):
        for i in range(4):
            total[i] = np.float32(0.0)
        for at in range(row, partials.shape[0], rows):
            load_four(partials[at], column, values, 0)
            for i in range(4):
                total[i] += values[i]
        for i in range(4):
            total[i] *= row_factors[row]
        store_four(out[row], column, total, 0)
