"""Draw the next token of each row of logits, with its log-prob under the distribution drawn from.

    s = z / temperature                                    z float32 logits
    min-p   keep s >= max s + log min_p                    p >= min_p * max p
    top-k   keep s >= the k-th largest kept s
    top-p   keep s >= the largest kept s whose tail, all kept tokens that are as probable or more, has at least
            top_p of the kept mass
    token = argmax over the kept of s + g,    g = -log(-log1p(-u))
    logprob = s[token] - log sum over the kept of exp s

Each filter works on what the one before left, renormalised. All are thresholds: tokens that tie at a boundary are kept,
the largest always is. Temperature 0 takes the lowest index of the largest logit, with its untempered log-prob.

g is Gumbel noise, so the argmax is a draw from softmax(s) over the kept (Gumbel 1954; Maddison et al. 2014). And the
largest s + g of a set of tokens is distributed as log sum exp(s) over the set plus one g. So a row without filters
draws twice: first one of its segments, SEGMENT neighbouring tokens, by their log-sum-exps with a noise each, then a
token of that segment by the tokens' noise. This needs V / SEGMENT + SEGMENT noises instead of V, and is as exact.

The noise of a token or segment is a function of seed, prompt, sample and position (draw.py), not of the row, the
filters or the batch. A token of probability p is drawn for a u of about p; the step of 2^-32 suffices down to 1e-9.

The log-prob of an unfiltered draw has the bits of logprob.linear_logp. Sources: vLLM's sampler (order of filters);
Holtzman et al. 2020 (top-p), Nguyen et al. 2024 (min-p), Keskar et al. 2019 (repetition penalty).

On a GPU scan.py's kernel reads each row once, a few blocks a row. It writes the sums of the row's tiles, which are its
segments, and lists the candidates of a row with filters: tokens that reach a bound guessed from a sample. draw.py's
kernel, a block a row, draws. The threshold of the filters is found in the list; if the list lacks tokens that they
keep, or too many reached the bound, the row is read again, several times.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all
from rlnumba.kernels.cpu import sampling as cpu
from rlnumba.kernels.nn.row_sum import GROUPS, ROW_THREADS, TILE_COLUMNS, row_terms_function
from rlnumba.kernels.philox import philox_ref
from rlnumba.kernels.ptx.warp import access_length, griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.kernels.sampling import scan
from rlnumba.kernels.sampling.draw import DRAW_THREADS, SEGMENT, SEGMENT_NOISE, TOKEN_NOISE, draw_kernel
from rlnumba.kernels.sampling.scan import (
    SCAN_THREADS,
    ScanWorkspace,
    blocks_per_row,
    sample_rank,
    scan_kernel,
)
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

PENALTY_THREADS = 128


@supports_pdl
@cuda.jit
def repetition_penalty_kernel(logits, penalty, history):
    """A block owns a row, a thread every PENALTY_THREADS-th entry of its history.

    A bit a token in shared memory: the one thread that sets it applies the penalty, whichever thread that is.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    seen = cuda.shared.array(0, np.int32)
    row, columns = cuda.blockIdx.x, logits.shape[1]
    for word in range(cuda.threadIdx.x, (columns + 31) // 32, cuda.blockDim.x):
        seen[word] = np.int32(0)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, history.shape[1], cuda.blockDim.x):
        token = history[row, i]
        if 0 <= token < columns:
            bit = np.int32(np.int32(1) << np.int32(token % 32))
            if cuda.atomic.or_(seen, token // 32, bit) & bit == 0:
                logit = logits[row, token]
                logits[row, token] = logit / penalty[row] if logit > np.float32(0.0) else logit * penalty[row]


row_terms = row_terms_function(True)


@supports_pdl
@cuda.jit
def kept_logprobs_kernel(logits, temperature, thresholds, replay, token_ids, logprobs):
    """A block owns a row: the log-prob of its token among the logits >= threshold, if it has filters and a replay."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    scratch = cuda.shared.array(32, np.float32)
    groups = cuda.shared.array((GROUPS, 3), np.float32)
    row = cuda.blockIdx.x
    threshold = thresholds[row]
    if replay[row] != 0 and threshold > np.float32(-math.inf):
        lse, _, _ = row_terms(logits, np.int64(row), temperature[row], threshold, scratch, groups)
        if cuda.threadIdx.x == 0:
            logprobs[row] = logits[row, token_ids[row]] / temperature[row] - lse


def sample(logits, limits, counters, token_ids, logprobs, thresholds=None, replay=None):
    """Draw a token of each row, as the module's docstring says.

    logits (B, V) float32, V < 2^24; limits: SamplingLimits; counters: Counters, keys from noise_key. token_ids (B,)
    int32 and logprobs (B,) float32 are written, and thresholds (B,) float32, unless None: the smallest logit that the
    filters keep, -inf without filters. replay (B,) int32, given with thresholds: the log-probs of rows where it is not
    0 are summed in the order of linear_logp, whose bits they have with these thresholds. A row with a NaN or +inf, or
    of -inf alone, gives some token with a NaN log-prob. Raises ValueError for other shapes or dtypes.
    """
    temperature, top_k, top_p, min_p = limits
    keys, sample_index, position = counters
    rows, columns = check("sample", "logits", logits, (None, None), F32)
    check_all("sample", (rows,), F32, temperature=temperature, top_p=top_p, min_p=min_p, logprobs=logprobs)
    check_all("sample", (rows,), I32, top_k=top_k, sample_index=sample_index, position=position, token_ids=token_ids)
    check("sample", "keys", keys, (rows, 2), (np.dtype(np.uint32),))
    if not 0 < columns < 2**24:
        raise ValueError(f"sample: logits must have 1 to {2**24 - 1} columns, got {columns}")
    if thresholds is None:
        thresholds, replay = logprobs[:0], token_ids[:0]
    else:
        check("sample", "thresholds", thresholds, (rows,), F32)
        check("sample", "replay", replay, (rows,), I32)
    if device.name() == "cpu":
        cpu.sample_rows(logits, *limits, *counters, token_ids, logprobs, thresholds, replay)
        return
    if not rows:
        return
    row_blocks = int(blocks_per_row(rows, columns))
    scanned = current().own(ScanWorkspace).arrays(rows, -(-columns // TILE_COLUMNS))
    ranks = sample_rank(columns, scan.EXPECTED), sample_rank(columns, scan.EXPECTED_IF_FEW)
    kernel = scan_kernel(min(2, access_length(columns, logits)))
    inputs = logits, logits.reshape(-1), limits, np.int32(row_blocks), *ranks
    launch(kernel, rows * row_blocks, SCAN_THREADS, *inputs, scanned)
    launch(draw_kernel, rows, DRAW_THREADS, logits, limits, counters, token_ids, logprobs, thresholds, scanned)
    if thresholds.shape[0] > 0:
        launch(kept_logprobs_kernel, rows, ROW_THREADS, logits, temperature, thresholds, replay, token_ids, logprobs)


def apply_repetition_penalty(logits, penalty, history):
    """Divide the positive and multiply the negative logits of tokens that occurred by the row's penalty, in place.

    logits (B, V) float32; penalty (B,) float32, 1 for off; history (B, L) int32, the ids of prompt and completion
    so far in any order, padded with -1; a token that occurs twice is penalised once. Raises ValueError for other
    shapes or dtypes. Source: Keskar et al. 2019, as in transformers' RepetitionPenaltyLogitsProcessor.
    """
    rows, columns = check("apply_repetition_penalty", "logits", logits, (None, None), F32)
    check("apply_repetition_penalty", "penalty", penalty, (rows,), F32)
    check("apply_repetition_penalty", "history", history, (rows, None), I32)
    if device.name() == "cpu":
        logits[...] = apply_repetition_penalty_ref(logits, penalty, history)
        return
    arguments, shared_bytes = (logits, penalty, history), 4 * -(-columns // 32)
    launch(repetition_penalty_kernel, rows, PENALTY_THREADS, *arguments, shared=shared_bytes)


def kept_ref(logits, temperature, top_k, top_p, min_p):
    """A mask of one row's tokens (V,) that the filters keep, by their definition on probabilities; temperature > 0."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    kept = p >= min_p
    if 0 < top_k < np.sum(kept):
        kept &= p >= np.sort(p[kept])[-top_k]
    if top_p < 1:
        values, inverse = np.unique(np.where(kept, p, 0.0), return_inverse=True)
        mass = np.bincount(inverse, weights=np.where(kept, p, 0.0))
        mass_above = np.cumsum(mass[::-1])[::-1] - mass
        kept &= (mass_above < top_p * mass.sum())[inverse]
    return kept


def sample_ref(logits, temperature, top_k, top_p, min_p, keys, sample_index, position):
    """(token_ids, logprobs) of sample, in float64, row by row."""
    token_ids, logprobs = np.empty(len(logits), np.int32), np.empty(len(logits))
    for b, row in enumerate(logits.astype(np.float64)):
        counter = keys[b], sample_index[b], position[b]
        scaled = row / (temperature[b] or 1.0)
        if not temperature[b]:
            token_ids[b] = np.argmax(row)
        elif min_p[b] > 0 or 0 < top_k[b] < len(row) or top_p[b] < 1:
            scaled = np.where(kept_ref(row, temperature[b], top_k[b], top_p[b], min_p[b]), scaled, -np.inf)
            token_ids[b] = np.argmax(scaled + noise_ref(len(row), *counter))
        else:
            weights = np.exp(scaled - scaled.max())
            with np.errstate(divide="ignore"):
                segment_scores = np.log(np.add.reduceat(weights, np.arange(0, len(row), SEGMENT)))
            segment = np.argmax(segment_scores + noise_ref(len(segment_scores), *counter, SEGMENT_NOISE))
            tokens = slice(segment * SEGMENT, (segment + 1) * SEGMENT)
            token_ids[b] = tokens.start + np.argmax(scaled[tokens] + noise_ref(len(row), *counter)[tokens])
        logprobs[b] = scaled[token_ids[b]] - scaled.max() - np.log(np.sum(np.exp(scaled - scaled.max())))
    return token_ids, logprobs


def noise_ref(count, key, sample_index, position, kind=TOKEN_NOISE):
    """The Gumbel noise (count,) of the tokens or segments of one row."""
    u = np.minimum((noise_words_ref(count, key, sample_index, position, kind) + 0.5) / 2**32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def noise_words_ref(count, key, sample_index, position, kind=TOKEN_NOISE):
    """The random words (count,) uint32 of the tokens or segments of one row."""
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1], counters[:, 2], counters[:, 3] = position, sample_index, kind
    return philox_ref(counters, key).reshape(-1)[:count]


def apply_repetition_penalty_ref(logits, penalty, history):
    """The penalised copy of logits."""
    out = logits.copy()
    for row, factor, tokens in zip(out, penalty, history, strict=True):
        tokens = np.unique(tokens[tokens >= 0])
        row[tokens] = np.where(row[tokens] > 0, row[tokens] / factor, row[tokens] * factor)
    return out
