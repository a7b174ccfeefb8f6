"""Changes of logits that a request asks for: biases, the tokens that are allowed, words that may not be completed.

    z(v) += bias(v)                                                          add_bias
    z(v)  = -inf for v without a bit                                         keep_allowed
    z(v)  = -inf for the last token v of a word whose others, in its order,
            are the last tokens of the completion                            ban_words

Source: vLLM's sampler (logit_bias, allowed_token_ids, bad_words).
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, I32, check
from rlnumba.kernels.ptx.warp import griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, supports_pdl

THREADS = 128


@supports_pdl
@cuda.jit
def add_bias_kernel(logits, ids, bias):
    """A thread owns an entry of `ids`, by rows. The ids of a row differ, so that no two threads add to one logit."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    index = cuda.grid(1)
    row, entry = index // ids.shape[1], index % ids.shape[1]
    if row < ids.shape[0]:
        token = ids[row, entry]
        if 0 <= token < logits.shape[1]:
            logits[row, token] += bias[row, entry]


@supports_pdl
@cuda.jit
def keep_allowed_kernel(logits, allowed, first_word):
    """A thread owns a logit, a warp those of one word, which is -1 where all are allowed."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    words = (logits.shape[1] + 31) // 32
    index = cuda.grid(1)
    row, column = index // (32 * words), index % (32 * words)
    if row < allowed.shape[0] and column < logits.shape[1]:
        if (allowed[row, first_word + column // 32] >> np.int32(column % 32)) & 1 == 0:
            logits[row, column] = np.float32(-math.inf)


@supports_pdl
@cuda.jit
def ban_words_kernel(logits, history, starts, position, words):
    """A thread owns a word of a row."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    index = cuda.grid(1)
    row, word = index // words.shape[1], index % words.shape[1]
    if row < words.shape[0]:
        last = words.shape[2] - 1
        token = words[row, word, last]
        completes = 0 <= token < logits.shape[1]
        for i in range(last):
            wanted = words[row, word, i]
            before = position[row] - last + i
            if wanted >= 0:
                if before < starts[row] or before >= history.shape[1]:
                    completes = False
                elif history[row, before] != wanted:
                    completes = False
        if completes:
            logits[row, token] = np.float32(-math.inf)


def add_bias(logits, ids, bias):
    """Add to logits (B, V) float32 of the ids (B, K) int32, padded with -1, their bias (B, K) float32, in place.

    The ids of a row differ; those beyond V are of no token, as -1. Raises ValueError for other arrays.
    """
    rows, _ = check("add_bias", "logits", logits, (None, None), F32)
    _, count = check("add_bias", "ids", ids, (rows, None), I32)
    check("add_bias", "bias", bias, (rows, count), F32)
    if device.name() == "cpu":
        logits[...] = add_bias_ref(logits, ids, bias)
    elif rows * count:
        launch(add_bias_kernel, -(-rows * count // THREADS), THREADS, logits, ids, bias)


def keep_allowed(logits, allowed, first=0):
    """Set logits (B, C) float32 to -inf where the bit is 0: bit v % 32 of word v / 32 of allowed (B, W) int32 is token
    v's, and the columns are the tokens from `first` on, a multiple of 32.

    Raises ValueError for other arrays.
    """
    rows, columns = check("keep_allowed", "logits", logits, (None, None), F32)
    words = -(-columns // 32)
    _, given = check("keep_allowed", "allowed", allowed, (rows, None), I32)
    if first % 32 or given < first // 32 + words:
        raise ValueError(f"keep_allowed: allowed must be of tokens up to {first + columns}, got {given} words")
    if device.name() == "cpu":
        logits[...] = keep_allowed_ref(logits, allowed[:, first // 32 :])
    elif rows * words:
        grid = -(-rows * words * 32 // THREADS)
        launch(keep_allowed_kernel, grid, THREADS, logits, allowed, np.int32(first // 32))


def ban_words(logits, history, starts, position, words):
    """Set logits (B, V) float32 to -inf of tokens that would complete a word, in place.

    words (B, S, L) int32: each word's token ids end in the last column, with -1 before them; one of -1 alone is none.
    history (B, T) int32: ids of prompt and completion; starts (B,) int32: where the completion begins there; position
    (B,) int32: where it ends. Raises ValueError for other arrays.
    """
    rows, _ = check("ban_words", "logits", logits, (None, None), F32)
    check("ban_words", "history", history, (rows, None), I32)
    check("ban_words", "starts", starts, (rows,), I32)
    check("ban_words", "position", position, (rows,), I32)
    _, count, length = check("ban_words", "words", words, (rows, None, None), I32)
    arguments = logits, history, starts, position, words
    if device.name() == "cpu":
        logits[...] = ban_words_ref(*arguments)
    elif rows * count * length:
        launch(ban_words_kernel, -(-rows * count // THREADS), THREADS, *arguments)


def add_bias_ref(logits, ids, bias):
    """The copy of logits with the biases added."""
    out = logits.copy()
    rows, entries = np.nonzero((ids >= 0) & (ids < logits.shape[1]))
    out[rows, ids[rows, entries]] += bias[rows, entries]
    return out


def keep_allowed_ref(logits, allowed):
    """The copy of logits in which those that are not allowed are -inf."""
    bits = np.unpackbits(np.ascontiguousarray(allowed).view(np.uint8), axis=1, bitorder="little")
    return np.where(bits[:, : logits.shape[1]] != 0, logits, np.float32(-np.inf))


def ban_words_ref(logits, history, starts, position, words):
    """The copy of logits in which those of tokens that would complete a word are -inf."""
    out = logits.copy()
    for row, ids, start, end, of_row in zip(out, history, starts, position, words, strict=True):
        completion = ids[start:end].tolist()
        for word in of_row:
            *before, last = word[word >= 0].tolist() or [-1]
            fits = len(before) <= len(completion) and completion[len(completion) - len(before) :] == before
            if fits and 0 <= last < len(row):
                row[last] = -np.inf
    return out
