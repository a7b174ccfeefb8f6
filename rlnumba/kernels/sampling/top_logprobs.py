"""The log-prob and the rank of a row's token, and its likeliest tokens with theirs.

    s = z / temperature over the tokens with z >= threshold      logprob(v) = s(v) - log sum exp s, -inf for the others
    rank of v = 1 + the number of larger logits, and of equal ones with a lower id

The sum is in the order of linear_logp, whose bits a log-prob without threshold has. A block owns a row. Every thread
has the best of its columns that are not yet listed; the best of the block is listed, and the warp of its thread looks
for the next one of that thread's columns, a part of these in each lane.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, unused
from rlnumba.kernels.cpu import sampling as cpu
from rlnumba.kernels.nn.row_sum import GROUPS, ROW_THREADS, row_terms_function
from rlnumba.kernels.ptx.warp import (
    block_max,
    block_sum,
    device_function,
    float_as_int,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    warp_max,
)
from rlnumba.kernels.sampling.thresholds import ordered_int
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

i32, i64 = np.int32, np.int64

# Bits of a key below the logit: 2^24 - 1 - id, so that of equal logits the lower id has the larger key.
ID_BITS = 24
LAST_ID = (1 << ID_BITS) - 1
# Below every key.
NO_KEY = i64(-(1 << 62))

row_terms = row_terms_function(True)


@device_function
def key_of(logit, column):
    """An int64 that is larger for a larger logit, and of equal ones for a lower column."""
    return (i64(ordered_int(logit)) << i64(ID_BITS)) + i64(LAST_ID - column)


@device_function
def logprob_of(logit, divisor, threshold, lse):
    """The log-prob of a logit."""
    return logit / divisor - lse if logit >= threshold else np.float32(-math.inf)


@supports_pdl
@cuda.jit(launch_bounds=(ROW_THREADS, 1))
def top_logprobs_kernel(logits, temperature, thresholds, token_ids, counts, first_row, num_steps, out):
    """A block owns a row. temperature, thresholds and num_steps may have no elements: 1, -inf and 0."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    counted = cuda.shared.array(32, np.int32)
    keys = cuda.shared.array(32, np.int64)
    row, thread, width = cuda.blockIdx.x, i32(cuda.threadIdx.x), i32(logits.shape[1])
    lane, threads, count = i32(thread & 31), i32(cuda.blockDim.x), i32(counts[row])
    if count >= 0:
        line, slot = logits[row], i32(0)
        if num_steps.shape[0] > 0:
            slot = i32(num_steps[0] % out.shape[0])
        divisor, threshold = np.float32(1.0), np.float32(-math.inf)
        if temperature.shape[0] > 0 and temperature[row] != np.float32(0.0):
            divisor = temperature[row]
        if thresholds.shape[0] > 0:
            threshold = thresholds[row]
        lse, _, _ = row_terms(logits, i64(row), divisor, threshold, scratch, groups)
        token = i32(token_ids[row])
        own, best, larger = key_of(line[token], token), NO_KEY, i32(0)
        for column in range(thread, width, threads):
            key = key_of(line[column], i32(column))
            best = max(best, key)
            if key > own:
                larger = i32(larger + 1)
        larger = i32(block_sum(larger, counted))
        target = out[slot, first_row + row]
        listed = i32((target.shape[0] - 2) // 2)
        if thread == 0:
            target[0] = i32(larger + 1)
            target[1] = float_as_int(logprob_of(line[token], divisor, threshold, lse))
        for entry in range(min(count, min(listed, width))):
            highest = block_max(best, keys)
            column = i32(LAST_ID - (highest & i64(LAST_ID)))
            if thread == 0:
                target[2 + entry] = column
                target[2 + listed + entry] = float_as_int(logprob_of(line[column], divisor, threshold, lse))
            owner = i32(column % threads)
            if thread >> 5 == owner >> 5:
                following = NO_KEY
                for other in range(owner + threads * lane, width, threads * 32):
                    key = key_of(line[other], i32(other))
                    if key < highest:
                        following = max(following, key)
                following = warp_max(following)
                if thread == owner:
                    best = following


def top_logprobs(logits, token_ids, counts, out, first_row=0, temperature=None, thresholds=None, num_steps=None):
    """Write rank and log-prob of each row's token, and the counts[row] likeliest tokens with theirs, to out.

    logits (B, V) float32, V < 2^24; token_ids (B,) int32; counts (B,) int32: -1 for a row of which nothing is written,
    at most K are listed. out (R, rows, 2 + 2 K) int32: row b's are out[num_steps % R, first_row + b], its rank, the
    bits of its log-prob, K ids and the bits of K log-probs. temperature (B,) float32, 0 as 1; thresholds (B,) float32,
    the smallest logits that are no -inf; num_steps (1,) int32; None: 1, -inf, 0. Raises ValueError for other arrays.
    """
    op = "top_logprobs"
    rows, columns = check(op, "logits", logits, (None, None), F32)
    check(op, "token_ids", token_ids, (rows,), I32)
    check(op, "counts", counts, (rows,), I32)
    _, total, width = check(op, "out", out, (None, None, None), I32)
    if not 0 < columns < 2**ID_BITS:
        raise ValueError(f"{op}: logits must have 1 to {2**ID_BITS - 1} columns, got {columns}")
    if first_row + rows > total or width < 2 or width % 2:
        raise ValueError(f"{op}: out must be for {first_row + rows} rows of 2 + 2 K, got {total} of {width}")
    if temperature is not None:
        check(op, "temperature", temperature, (rows,), F32)
    if thresholds is not None:
        check(op, "thresholds", thresholds, (rows,), F32)
    if num_steps is not None:
        check(op, "num_steps", num_steps, (1,), I32)
    floats = (unused(1, np.float32) if array is None else array for array in (temperature, thresholds))
    steps = unused() if num_steps is None else num_steps
    if device.name() == "cpu":
        slot = int(steps[0]) % len(out) if len(steps) else 0
        cpu.top_logprobs(logits, *floats, token_ids, counts, out[slot, first_row : first_row + rows])
    elif rows:
        arguments = logits, *floats, token_ids, counts, i32(first_row), steps, out
        launch(top_logprobs_kernel, rows, ROW_THREADS, *arguments)


def top_logprobs_ref(logits, token_ids, count, temperature=None, thresholds=None):
    """(ranks (B,), logprobs (B,), ids (B, count), their logprobs (B, count)) in float64."""
    z = logits.astype(np.float64)
    order = np.argsort(-z, axis=1, kind="stable")
    ranks = 1 + np.argmax(order == token_ids[:, None], axis=1)
    s = z if temperature is None else z / np.where(temperature == 0, 1, temperature)[:, None]
    if thresholds is not None:
        s = np.where(logits >= thresholds[:, None], s, -np.inf)
    logprobs = s - s.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    ids = order[:, :count]
    of_tokens = np.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    return ranks, of_tokens, ids, np.take_along_axis(logprobs, ids, axis=1)
