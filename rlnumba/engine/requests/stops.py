"""Ids and strings that end a completion, and the text that it has then."""

from rlnumba.errors import ConfigError

# Tokens looked at for a stop string, beside one for each of its bytes: special tokens have no text.
SPECIAL_TOKENS = 16


def check_stops(params, tokenizer, vocab_size):
    """Raise ConfigError for what cannot end a completion: an id that is none of the model's, a string in which a
    special token stands beside others, and strings without a tokenizer."""
    outside = [i for i in params.stop_token_ids if i >= vocab_size]
    if outside:
        raise ConfigError(f"sampling: stop_token_ids {outside[0]} is outside of the model's vocabulary of {vocab_size}")
    if params.stop and tokenizer is None:
        raise ConfigError("sampling: stop strings need a tokenizer, and the model folder has none")
    for text in params.stop:
        held = [special for special in tokenizer.special_ids if special in text]
        if params.skip_special_tokens and held and text not in held:
            raise ConfigError(
                f"sampling: stop {text!r} cannot occur, for completions' texts are without the special token "
                f"{held[0]}; stop at {held[0]!r} alone"
            )


def special_stop_ids(tokenizer, params):
    """The ids of stop strings that are special tokens, which end a completion by their ids: tuple of int."""
    return tuple(tokenizer.special_ids[text] for text in params.stop if text in tokenizer.special_ids)


def completion_texts(tokenizer, sequences):
    """(text, stop string or None) of finished sequences: list.

    The text is without the token or the string that stopped the sequence, unless that is to be included, and ""
    without a tokenizer.
    """
    if tokenizer is None:
        return [("", None)] * len(sequences)
    token_ids = [sequence.completion_ids.tolist() for sequence in sequences]
    for sequence, ids in zip(sequences, token_ids, strict=True):
        is_included = sequence.params.include_stop_str_in_output
        if sequence.finish_reason == "stop" and ids[-1] in sequence.stop_ids and not is_included:
            ids.pop()
    texts = tokenizer.decode_batch(token_ids)
    for i, (sequence, ids) in enumerate(zip(sequences, token_ids, strict=True)):
        if not sequence.params.skip_special_tokens:
            texts[i] = tokenizer.decode(ids, skip_special_tokens=False)
        ends = stop_string_positions(tokenizer, sequence.params, ids, texts[i])
        found = [(end, stop) for end, stop in zip(ends, sequence.params.stop, strict=True) if end >= 0]
        # The one of several that begins first counts, and of these the one that is named first.
        end, stop = min(found, key=lambda each: each[0], default=(None, None))
        if stop is not None and sequence.params.include_stop_str_in_output:
            end += len(stop)
        texts[i] = texts[i][:end], stop
    return texts


def stop_reason(tokenizer, sequence, stop, eos_token_ids):
    """Why a sequence has stopped: the stop string or the id of stop_token_ids; None for EOS, and if it has not.

    stop: the stop string that its text has, or None.
    """
    if sequence.finish_reason != "stop":
        return None
    params, last = sequence.params, int(sequence.completion_ids[-1])
    if last not in sequence.stop_ids:
        return stop
    if last in eos_token_ids and not params.ignore_eos:
        return None
    if last in params.stop_token_ids:
        return last
    # None of these: an EOS of weights before.
    return next((text for text in params.stop if tokenizer.special_ids.get(text) == last), None)


def stop_string_positions(tokenizer, params, token_ids, text):
    """The place where each stop string begins in the text of token_ids, -1 if it does not occur: list of int.

    One that ends within the text of the first min_tokens tokens does not count.
    """
    checked = 0
    if params.stop and params.min_tokens:
        checked = len(tokenizer.decode(list(token_ids[: params.min_tokens]), params.skip_special_tokens))
    return [text.find(stop, max(checked - len(stop) + 1, 0)) for stop in params.stop]


def has_stop_string(tokenizer, sequence, token_ids):
    """Whether the text of token_ids (an array) contains a stop string. The end is decoded first: it is short."""
    stop = sequence.params.stop
    if len(token_ids) <= sequence.params.min_tokens:
        return False
    # A token that is not special has at least a byte.
    tail = token_ids[-(max(len(text.encode()) for text in stop) + SPECIAL_TOKENS) :]
    text = tokenizer.decode(tail.tolist(), sequence.params.skip_special_tokens)
    if not any(string in text for string in stop):
        return False
    token_ids = token_ids.tolist()
    text = tokenizer.decode(token_ids, sequence.params.skip_special_tokens)
    return max(stop_string_positions(tokenizer, sequence.params, token_ids, text)) >= 0
