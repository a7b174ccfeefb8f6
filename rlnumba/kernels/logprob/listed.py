"""Predictions of a teacher that lists its k likeliest tokens alone, as rows of logits that have the same divergences.

    listed tokens    t_j = max(log q_j - c, LEAST)        c = log(max(1 - sum q, SMALLEST) / (V - k))
    others           t_j = 0

so that softmax(t) has the listed probabilities, and what is left is the others', alike. No term of a divergence over
the listed tokens and a tail (top_k_divergence.py) reads how that is shared. t is above 0 for the listed ones, also
where rounding makes the k-th no likelier than the mean of the others.

Source: TRL 1.16's ServerDistillationTrainer, whose server lists so much and no more.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check
from rlnumba.kernels.logprob.chunked import forward_rows
from rlnumba.kernels.nn.elementwise import fill, scatter_rows

# The others' probability at least, TRL's; the smallest logit of a listed token.
SMALLEST, LEAST = 1e-7, 1e-6
# The place of a listed token that is none: it is left out.
NOWHERE = -1


class ListedLogits(NamedTuple):
    """values (N, k) float32 and places (N, k) int32: of N rows, the logits of the listed tokens, and where they are in
    the logits of as many rows as there are at one time."""

    places: object
    values: object

    @staticmethod
    def of(token_ids, logprobs, vocabulary):
        """ListedLogits, on the host, of token_ids (N, k) int32 and their logprobs (N, k) float32, of a vocabulary of V.

        Raises ValueError for a token outside of it, or one that is listed twice in a row.
        """
        rows, count = token_ids.shape
        ordered = np.sort(token_ids, axis=1)
        if ordered.size and (ordered[:, 0].min() < 0 or ordered[:, -1].max() >= vocabulary):
            raise ValueError(f"ListedLogits: a token outside of [0, {vocabulary})")
        if (np.diff(ordered, axis=1) == 0).any():
            raise ValueError("ListedLogits: a token is listed twice in a row")
        logs = logprobs.astype(np.float64)
        left = np.maximum(1 - np.exp(logs).sum(axis=1, keepdims=True), SMALLEST) / max(vocabulary - count, 1)
        first = np.arange(rows, dtype=np.int64)[:, None] % forward_rows(vocabulary) * vocabulary
        return ListedLogits(
            (first + token_ids).astype(np.int32), np.maximum(logs - np.log(left), LEAST).astype(np.float32)
        )


def check_listed(op, listed, rows):
    """Raise ValueError unless ListedLogits are of so many rows."""
    _, count = check(op, "places", listed.places, (rows, None), I32)
    check(op, "values", listed.values, (rows, count), F32)


def write_listed(listed, part, out):
    """Write the logits out (rows of part, V) float32 of the rows `part`, a slice, of ListedLogits."""
    fill(0.0, out)
    scatter_rows(listed.values[part].reshape(-1, 1), listed.places[part].reshape(-1), out.reshape(-1, 1))
