"""Changes of logits by the tokens of the completion so far, and by tokens that may not be drawn yet.

    c(v) = occurrences of token v in the completion, without the prompt
    z(v) -= frequency_penalty c(v) + presence_penalty [c(v) > 0]        apply_output_penalties
    z(v)  = -inf for the banned v                                       ban_tokens

Negative penalties make repetition likelier. Source: vLLM's sampler, which applies the repetition penalty first.
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, check_all
from rlnumba.kernels.ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

THREADS = 128


@supports_pdl
@cuda.jit
def output_penalties_kernel(logits, presence, frequency, history, starts):
    """A block owns a row, a thread every THREADS-th entry of its history.

    First each occurrence subtracts the frequency penalty. These are float atomics, whose order cannot matter: all add
    the same number to a logit. Then the thread that sets a token's bit in shared memory subtracts the presence penalty.
    """
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    seen = cuda.shared.array(0, np.int32)
    row, columns, start = cuda.blockIdx.x, logits.shape[1], starts[cuda.blockIdx.x]
    for word in range(cuda.threadIdx.x, (columns + 31) // 32, cuda.blockDim.x):
        seen[word] = np.int32(0)
    for i in range(start + cuda.threadIdx.x, history.shape[1], cuda.blockDim.x):
        token = history[row, i]
        if 0 <= token < columns:
            cuda.atomic.add(logits, (row, token), -frequency[row])
    cuda.syncthreads()
    for i in range(start + cuda.threadIdx.x, history.shape[1], cuda.blockDim.x):
        token = history[row, i]
        if 0 <= token < columns:
            bit = np.int32(np.int32(1) << np.int32(token % 32))
            if cuda.atomic.or_(seen, token // 32, bit) & bit == 0:
                cuda.atomic.add(logits, (row, token), -presence[row])


@supports_pdl
@cuda.jit
def ban_tokens_kernel(logits, banned):
    """A thread owns an entry of `banned`, by rows."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    index = cuda.grid(1)
    row, column = index // banned.shape[1], index % banned.shape[1]
    if row < banned.shape[0]:
        token = banned[row, column]
        if 0 <= token < logits.shape[1]:
            logits[row, token] = np.float32(-math.inf)


def apply_output_penalties(logits, presence, frequency, history, starts):
    """Subtract the penalties of the tokens of the completions so far, in place.

    logits (B, V) float32; presence, frequency (B,) float32, 0 for off; history (B, L) int32, ids of prompt and
    completion, padded with -1; starts (B,) int32: where the completion begins there. Raises ValueError for others.
    """
    rows, _ = check("apply_output_penalties", "logits", logits, (None, None), F32)
    check_all("apply_output_penalties", (rows,), F32, presence=presence, frequency=frequency)
    check("apply_output_penalties", "history", history, (rows, None), I32)
    check("apply_output_penalties", "starts", starts, (rows,), I32)
    arguments = logits, presence, frequency, history, starts
    if device.name() == "cpu":
        logits[...] = apply_output_penalties_ref(*arguments)
        return
    launch(output_penalties_kernel, rows, THREADS, *arguments, shared=4 * -(-logits.shape[1] // 32))


def ban_tokens(logits, banned):
    """Set logits (B, V) float32 of the ids in banned (B, S) int32, padded with -1, to -inf; ids beyond V are of no
    token, as -1. Raises ValueError for other arrays."""
    rows, columns = check("ban_tokens", "logits", logits, (None, None), F32)
    _, count = check("ban_tokens", "banned", banned, (rows, None), I32)
    if device.name() == "cpu":
        logits[...] = ban_tokens_ref(logits, banned)
    elif rows * count:
        launch(ban_tokens_kernel, -(-rows * count // THREADS), THREADS, logits, banned)


def apply_output_penalties_ref(logits, presence, frequency, history, starts):
    """The penalised copy of logits."""
    out = logits.copy()
    for row, once, each, ids, start in zip(out, presence, frequency, history, starts, strict=True):
        tokens, counts = np.unique(ids[start:][ids[start:] >= 0], return_counts=True)
        # One after the other, as the kernel's rounding is.
        for occurrence in range(counts.max(initial=0)):
            row[tokens[counts > occurrence]] -= each
        row[tokens] -= once
    return out


def ban_tokens_ref(logits, banned):
    """The copy of logits in which those of banned ids are -inf."""
    out = logits.copy()
    rows, columns = np.nonzero((banned >= 0) & (banned < logits.shape[1]))
    out[rows, banned[rows, columns]] = -np.inf
    return out
