"""The logits that a request changes: logit_bias, allowed_token_ids and bad_words, as arrays for the sampler.

A word of bad_words is the token ids of its text, once at the beginning of a text and once after a space. Its last token
is not drawn where the tokens of the completion before it are its others. Source: vLLM's SamplingParams.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.errors import ConfigError

# The reason of a PromptError for logits that rules leave no token of: all are -inf, and a log-prob is no number.
NO_TOKEN = "allowed_token_ids and bad_words leave no token to draw after those so far, or the logits are no numbers"


class TokenRules(NamedTuple):
    """Arrays of the logits that a request changes.

    bias_ids (K,) int32 and bias (K,) float32. allowed: bit i % 32 of word i / 32 (W,) int32 is token i's, (0,) where
    all are allowed. bad_words (S, L) int32: token ids of each word, which end in the last column; -1 before them.
    """

    bias_ids: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray
    bad_words: np.ndarray


def token_rules(params, tokenizer, vocab_size):
    """The TokenRules of a SamplingParams, or None. Raises ConfigError for ids that are none of the model's."""
    if not params.has_token_rules:
        return None
    bias_ids = np.array([i for i, _ in params.logit_bias], np.int32)
    bias = np.array([value for _, value in params.logit_bias], np.float32)
    allowed = np.zeros(0, np.int32)
    check_ids("logit_bias", bias_ids, vocab_size)
    if params.allowed_token_ids is not None:
        allowed = bits_of(params.allowed_token_ids, vocab_size)
    words = bad_word_ids(params.bad_words, tokenizer)
    for ids in words:
        check_ids("bad_words", ids, vocab_size)
    bad_words = np.full((len(words), max(map(len, words), default=0)), -1, np.int32)
    for row, ids in zip(bad_words, words, strict=True):
        row[len(row) - len(ids) :] = ids
    return TokenRules(bias_ids, bias, allowed, bad_words)


def check_drawable(params, rules, stop_ids, vocab_size):
    """Raise ConfigError where no token may be drawn at first: all are forbidden, or end a completion too early.

    rules: token_rules of the SamplingParams; stop_ids: those that end the completion.
    """
    forbidden = {}
    if rules is not None and rules.bad_words.size:
        alone = (rules.bad_words[:, :-1] < 0).all(axis=1)
        forbidden["bad_words"] = rules.bad_words[alone, -1].tolist()
    if params.min_tokens:
        forbidden[f"min_tokens {params.min_tokens}"] = stop_ids
    ids = {token for of_rule in forbidden.values() for token in of_rule}
    if params.allowed_token_ids is None:
        is_drawable, what = len(ids) < vocab_size, "all tokens"
    else:
        is_drawable, what = bool({*params.allowed_token_ids} - ids), "all of allowed_token_ids"
    if not is_drawable:
        reason = " and ".join(name for name, of_rule in forbidden.items() if len(of_rule))
        raise ConfigError(f"sampling: {reason} forbid {what}, so that no token can be drawn")


def check_ids(name, ids, vocab_size):
    """Raise ConfigError for an id outside of the model's vocabulary."""
    for token in ids:
        if token >= vocab_size:
            raise ConfigError(f"sampling: {name} {token} is outside of the model's vocabulary of {vocab_size}")


def bits_of(token_ids, vocab_size):
    """Words of 32 bits (W,) int32 in which those of token_ids are set."""
    check_ids("allowed_token_ids", token_ids, vocab_size)
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view(np.int32)


def bad_word_ids(words, tokenizer):
    """The lists of token ids that bad words have, alone and after a space: list."""
    if words and tokenizer is None:
        raise ConfigError("sampling: bad_words need a tokenizer, and the model folder has none")
    found = []
    for word in words:
        alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        found.append(alone)
        # Else the space is a token of its own, and the word after it that of `alone`.
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            found.append(spaced)
    return found


def place_of(shape, whole):
    """The slices of an array of shape `whole` that a row's value has: the first along all axes, along a second one the
    last, where words end."""
    return tuple(
        slice(size - count, size) if axis else slice(count)
        for axis, (count, size) in enumerate(zip(shape, whole, strict=True))
    )


def widened(column, shape):
    """A column of the sequence table, or a copy that has room for values of this shape, -1 where it was longer."""
    size = tuple(map(max, column.shape[1:], shape))
    if size == column.shape[1:]:
        return column
    wide = np.full((len(column), *size), 0 if column.dtype == np.float32 else -1, column.dtype)
    wide[(slice(None), *place_of(column.shape[1:], size))] = column
    return wide
