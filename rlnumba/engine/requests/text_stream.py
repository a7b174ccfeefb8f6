"""The text of a completion while it grows.

What was handed out is never taken back: the last bytes of a character that is not complete, and the end of the text
that a stop string may begin with, are held until they are decided.
"""

from dataclasses import dataclass

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TextOptions:
    """The form of a completion's text. stop: strings that end it."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True


class TextStream:
    """The text of one completion, piece by piece. The pieces together are the text of the Completion."""

    def __init__(self, tokenizer, options):
        self.tokenizer, self.options = tokenizer, options
        self.ids, self.text, self.num_sent = [], "", 0
        # The text of ids[:read] is decided; ids from `first` on are decoded again, for what joins them to the next.
        self.first = self.read = 0

    def feed(self, token_ids):
        """The text that is decided once these tokens have been drawn, after what was returned before."""
        if self.tokenizer is None or not self.tokenizer.decodes_piecewise:
            return ""
        self.ids += token_ids
        skip = self.options.skip_special_tokens
        before = self.tokenizer.decode(self.ids[self.first : self.read], skip)
        after = self.tokenizer.decode(self.ids[self.first :], skip)
        if after.endswith(REPLACEMENT):
            return ""
        if new := after[len(before) :]:
            self.first, self.read = self.read, len(self.ids)
            self.text += new
        return self._send(len(self.text) - self._num_held())

    def piece(self, delta):
        """The text that a Delta adds, all of the rest with its last one."""
        return self.feed(delta.token_ids) if delta.completion is None else self.end(delta.completion)

    def end(self, completion):
        """The rest of the text of the whole Completion."""
        self.text = completion.text
        return self._send(len(self.text))

    def _send(self, end):
        piece = self.text[self.num_sent : end]
        self.num_sent = max(self.num_sent, end)
        return piece

    def _num_held(self):
        """Characters at the end of the text with which a stop string may begin."""
        held = 0
        for stop in self.options.stop:
            for length in range(min(len(stop), len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return held
