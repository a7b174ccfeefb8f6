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

    def part(self, start, stop):
        return TokenSequence(self.input_ids[start:stop], self.loss_mask[start:stop])

    @property
    def num_trained(self):
        """Tokens that are trained on: the first has nothing before it that could predict it."""
        return int(self.loss_mask[1:].sum())


def best_fit_decreasing(lengths, size):
    """Which sequences share a bin of `size` tokens: list of lists of indices into `lengths` (all at most `size`).

    Longest first (equal lengths in order), each into the bin with the least space that still holds it; of bins with
    equal space, the one that came to it first. Source: arXiv 2404.10830, TRL's packing strategy bfd.
    """
    bins = []
    spaces = []  # the distinct free spaces of open bins, ascending
    waiting = {}  # free space -> its bins, the oldest first
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces[at]
            chosen = waiting[space].popleft()
            if not waiting[space]:
                spaces.pop(at)
        else:
            space, chosen = size, []
            bins.append(chosen)
        chosen.append(index)
        left = space - length
        if left > 0:
            if not waiting.setdefault(left, deque()):
                bisect.insort(spaces, left)
            waiting[left].append(chosen)
    return bins


def pack(sequences, size, strategy="bfd", limit=None):
    """Sequences in rows of at most `size` tokens: list of lists of TokenSequence.

    "bfd": sequences are cut to `size`. "bfd_split": what is beyond it becomes further sequences. "wrapped": all tokens
    in one stream, cut into sequences every `size` tokens. limit: the longest sequence, if below `size`.
    """
    limit = min(limit or size, size)
    if strategy == "wrapped":
        ids = np.concatenate([s.input_ids for s in sequences])
        mask = np.concatenate([s.loss_mask for s in sequences])
        stream = TokenSequence(ids, mask)
        return [[stream.part(i, i + limit)] for i in range(0, len(stream), limit)]
    if strategy == "bfd":
        pieces = [s.part(0, limit) for s in sequences]
    else:
        pieces = [s.part(i, i + limit) for s in sequences for i in range(0, len(s), limit)]
    pieces = [piece for piece in pieces if len(piece)]
    return [[pieces[i] for i in row] for row in best_fit_decreasing([len(piece) for piece in pieces], size)]
