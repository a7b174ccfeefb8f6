"""Log-probs of tokens as the API writes them."""

from tokenizers import decoders

# JSON has no infinity.
FLOOR = -9999.0


def finite(logprob):
    """A log-prob that JSON can have: float."""
    return max(logprob, FLOOR)


class TokenTexts:
    """The text and the bytes of single tokens. as_ids: texts are "token_id:N"."""

    def __init__(self, tokenizer, as_ids=False):
        self.tokenizer, self.as_ids = tokenizer, as_ids
        self.byte_of = _byte_of() if tokenizer is not None and _is_byte_level(tokenizer.backend.decoder) else None

    def text(self, token_id):
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def bytes(self, token_id):
        """The token's own bytes, also where they are part of a character: list of int."""
        if self.tokenizer is None:
            return None
        raw = self.tokenizer.backend.id_to_token(token_id)
        if self.byte_of and raw is not None and all(character in self.byte_of for character in raw):
            return [self.byte_of[character] for character in raw]
        return list(self.tokenizer.decode([token_id], skip_special_tokens=False).encode())


def _is_byte_level(decoder):
    return isinstance(decoder, decoders.ByteLevel)


def _byte_of():
    """{character that stands for a byte in a byte-level vocabulary: the byte} (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class CompletionLogprobs:
    """The `logprobs` of a choice of /v1/completions. text_offset: characters before the first token."""

    def __init__(self, texts, text_offset=0):
        self.texts, self.offset = texts, text_offset

    def of(self, token_ids, logprobs):
        """The object for tokens that follow those of the last call."""
        tokens, offsets = [self.texts.text(i) for i in token_ids], []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token)
        values = [finite(value) for value in logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def chat_logprobs(texts, token_ids, logprobs):
    """The `content` of a chat choice's log-probs: list."""
    return [
        {"token": texts.text(i), "logprob": finite(value), "bytes": texts.bytes(i), "top_logprobs": []}
        for i, value in zip(token_ids, logprobs, strict=True)
    ]
