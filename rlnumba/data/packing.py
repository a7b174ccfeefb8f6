"""Training sequences, and several of them in rows of a fixed number of tokens."""

import bisect
from collections import deque
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenSequence:
    """One training sequence. input_ids: (S,) int32. loss_mask: (S,) bool, True at the tokens that are trained on."""

    input_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self):
        return len(self.input_ids)

    def slice(self, start, stop):
        return TokenSequence(self.input_ids[start:stop], self.loss_mask[start:stop])

    @property
    def num_trained(self):
        """Tokens that are trained on; the first token of a sequence is never predicted."""
        return int(self.loss_mask[1:].sum())


def best_fit_decreasing(lengths, size):
    """Bins of `size` tokens: a list of lists of indices into `lengths` (all at most `size`), one list a bin.

    The longest goes first (equal lengths in order), each into the bin with the least free space that is enough; among
    bins with equal free space, into the one that has had it longest. Source: arXiv 2404.10830, TRL's packing strategy
    bfd.
    """
    bins = []
    spaces = []  # the distinct free spaces of open bins, ascending
    bins_of = {}  # free space -> its bins, the oldest first
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        position = bisect.bisect_left(spaces, length)
        if position < len(spaces):
            space = spaces[position]
            chosen = bins_of[space].popleft()
            if not bins_of[space]:
                spaces.pop(position)
        else:
            space, chosen = size, []
            bins.append(chosen)
        chosen.append(index)
        left = space - length
        if left > 0:
            if not bins_of.setdefault(left, deque()):
                bisect.insort(spaces, left)
            bins_of[left].append(chosen)
    return bins


def pack_sequences(sequences, size, strategy="bfd", limit=None):
    """Sequences in rows of at most `size` tokens: list of lists of TokenSequence.

    "bfd": sequences are truncated to `size`. "bfd_split": the rest becomes further sequences. "wrapped": all tokens in
    one stream, split every `size` tokens. limit: tokens of the longest sequence, if below `size`.
    """
    limit = min(limit or size, size)
    if strategy == "wrapped":
        ids = np.concatenate([s.input_ids for s in sequences])
        mask = np.concatenate([s.loss_mask for s in sequences])
        stream = TokenSequence(ids, mask)
        return [[stream.slice(i, i + limit)] for i in range(0, len(stream), limit)]
    if strategy == "bfd":
        pieces = [s.slice(0, limit) for s in sequences]
    else:
        pieces = [s.slice(i, i + limit) for s in sequences for i in range(0, len(s), limit)]
    pieces = [piece for piece in pieces if len(piece)]
    return [[pieces[i] for i in row] for row in best_fit_decreasing([len(piece) for piece in pieces], size)]
