"""Log-probs of the likeliest tokens beside those that were drawn, and of the tokens of prompts.

A listing is what kernels/sampling/top_logprobs.py writes of a token: (2 + 2 K,) int32, its rank, the bits of its
log-prob, the ids of the K likeliest and the bits of their log-probs.
"""

from typing import NamedTuple

import numpy as np

# The number of tokens that logprobs = -1 lists: more than any vocabulary has.
ALL = 2**24


class Logprob(NamedTuple):
    """The log-prob of a token, its rank among all, 1 for the likeliest, and its text, None without a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class Listed(NamedTuple):
    """Listings of a step: of its D sampled tokens (D, 2 + 2 K), and of tokens of prompts (M, 2 + 2 K); None without."""

    sampled: np.ndarray | None = None
    scored: np.ndarray | None = None

    def part(self, kept):
        """Those of some of the sampled tokens."""
        return self if self.sampled is None else self._replace(sampled=self.sampled[kept])


def scored_spans(step, table):
    """(index in a step, first position, number of positions) of its sequences whose prompt is scored there: list."""
    counts = np.minimum(step.starts + step.counts, table.num_to_score[step.rows]) - step.starts
    return [(i, int(step.starts[i]), int(counts[i])) for i in np.flatnonzero(counts > 0).tolist()]


def record_listed(listed, step, table, sequences):
    """Give the sequences of a computed step their listings, before it is recorded in the table."""
    if listed.sampled is not None:
        for sequence, row in zip(sequences, listed.sampled, strict=True):
            if sequence.params.num_logprobs >= 0:
                sequence.listings.append(cut(row, sequence.params.num_logprobs))
    if listed.scored is not None:
        first = 0
        for i, start, count in scored_spans(step, table):
            sequence = table.sequences[step.rows[i]]
            rows = listed.scored[first : first + count]
            # Those that are computed again take the place of the first ones.
            del sequence.prompt_listings[start:]
            sequence.prompt_listings += [cut(row, sequence.params.num_prompt_logprobs) for row in rows]
            first += count


def cut(listing, count):
    """A listing with `count` tokens at most: a copy."""
    listed = (len(listing) - 2) // 2
    count = min(count, listed)
    return np.concatenate([listing[: 2 + count], listing[2 + listed : 2 + listed + count]])


def entries(listing, token_id, text_of):
    """{id: Logprob} of a listing of token_id, which comes first, then the likeliest. text_of: an id's text."""
    count, logprobs = (len(listing) - 2) // 2, listing.view(np.float32).tolist()
    listing = listing.tolist()
    found = {int(token_id): Logprob(logprobs[1], listing[0], text_of(int(token_id)))}
    for i, token in enumerate(listing[2 : 2 + count]):
        # Fewer than asked for are listed where the vocabulary has no more.
        if token >= 0 and token not in found:
            found[token] = Logprob(logprobs[2 + count + i], i + 1, text_of(token))
    return found
