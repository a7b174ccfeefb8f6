"""Trees of packed sequences that begin alike, whose nodes are computed once each.

    sequences        prompt a b c | prompt a d | prompt e
    nodes            prompt        -> a -> b c
                                        -> d
                                   -> e

A node is a run of tokens that several sequences have at the same positions, after the same tokens, or the rest of one
sequence. Runs of several end at multiples of PrefixRule.multiple. A row of a node predicts one target at most, so a
run that has targets of one sequence is shared with others that have none there, as an earlier turn is with the
conversations that go on from it.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# More levels than a tree has.
ANY_LEVELS = 1 << 30


class PrefixRule(NamedTuple):
    """The prefixes that a model's blocks take, which end at multiples of `multiple` tokens.

    levels: the most nodes from a root to a leaf, at least 2; with 2 no parent has a parent.
    """

    multiple: int
    levels: int = ANY_LEVELS

    def limits(self, lengths):
        """Tokens of which sequences of these lengths (B,) can share the first ones: (B,), each less than its length."""
        return (lengths - 1) // self.multiple * self.multiple


@dataclass
class PrefixNode:
    """Tokens [start, end) of each of the sequences `members`, their numbers; its children follow in the packed rows."""

    members: list
    start: int
    end: int
    children: list

    @property
    def num_tokens(self):
        """Tokens of this node and all below it: int."""
        return self.end - self.start + sum(child.num_tokens for child in self.children)

    @property
    def levels(self):
        """Nodes from this one to a leaf, at most: int."""
        return 1 + max((child.levels for child in self.children), default=0)

    @property
    def leaves(self):
        """The nodes without children at or below this one: list."""
        return [leaf for child in self.children for leaf in child.leaves] if self.children else [self]


class PrefixTree:
    """The tree of B packed sequences.

    token_ids (N,), cu_seqlens (B + 1,) int; rows (T,): those that predict targets; sharing: PrefixRule. roots: list
    of PrefixNode. Sequences and nodes are in the order of their first members.
    """

    def __init__(self, token_ids, cu_seqlens, rows, sharing):
        rows, lengths = np.sort(rows), np.diff(cu_seqlens).astype(np.int64)
        # Numbers of Python, of which a tree takes a few thousand, one by one.
        ends, self.multiple = cu_seqlens.tolist(), sharing.multiple
        self.starts, self.lengths, self.limits = ends[:-1], lengths.tolist(), sharing.limits(lengths).tolist()
        self.sequences, self.targets = _parts(token_ids, ends), _parts(rows, np.searchsorted(rows, cu_seqlens).tolist())
        self.roots = self._grow(range(len(self.sequences)), 0)
        if max((root.levels for root in self.roots), default=0) > sharing.levels:
            self.roots = [each for root in self.roots for each in self._flattened(root, 0, sharing.levels)]

    @property
    def shares(self):
        """Whether some node has several sequences: bool."""
        return any(root.children for root in self.roots)

    def packed(self):
        """(nodes in the order of their rows, the number of each one's parent or -1): lists."""
        nodes, parents = [], []

        def add(node, parent):
            number = len(nodes)
            nodes.append(node)
            parents.append(parent)
            for child in node.children:
                add(child, number)

        for root in self.roots:
            add(root, -1)
        return nodes, parents

    def places(self):
        """(rows of the sequences that the nodes have, in their order (M,); which of these each row is (N,)): int64."""
        kept, places = [], np.empty(sum(self.lengths), np.int64)
        first = 0
        for node in self.packed()[0]:
            numbers = np.arange(first, first + node.end - node.start)
            start = self.starts[node.members[0]]
            kept.append(np.arange(start + node.start, start + node.end))
            for member in node.members:
                start = self.starts[member]
                places[start + node.start : start + node.end] = numbers
            first += len(numbers)
        return np.concatenate(kept), places

    def _grow(self, members, start):
        """The nodes of sequences that are alike before `start`, where they begin: list of PrefixNode."""
        groups = {}
        for i in members:
            # The last token of a sequence is its own.
            is_open = self.limits[i] > start
            key = self.sequences[i][start : start + self.multiple].tobytes() if is_open else i
            groups.setdefault(key, []).append(i)
        nodes = []
        for group in groups.values():
            first_targets = {i: self._next_target(i, start) for i in group}
            late = [i for i in group if first_targets[i] >= start + self.multiple]
            early = [i for i in group if first_targets[i] < start + self.multiple]
            shared, alone = sorted(late + early[:1]), early[1:]
            if len(shared) == 1:
                shared, alone = [], group
            nodes += [PrefixNode([i], start, self.lengths[i], []) for i in alone]
            if shared:
                end = self._common_end(shared, start, sorted(first_targets[i] for i in shared)[1])
                nodes.append(PrefixNode(shared, start, end, self._grow(shared, end)))
        return sorted(nodes, key=lambda node: node.members[0])

    def _next_target(self, sequence, start):
        """The first row at `start` or later of a sequence that predicts a target, else its length."""
        targets, begin = self.targets[sequence], self.starts[sequence]
        index = targets.searchsorted(begin + start)
        return int(targets[index]) - begin if index < len(targets) else self.lengths[sequence]

    def _common_end(self, members, start, limit):
        """The end of what these sequences have in common from `start` on, at most `limit`: int."""
        limit = min(limit, *(self.limits[i] for i in members))
        first = self.sequences[members[0]]
        for i in members[1:]:
            differs = self.sequences[i][start:limit] != first[start:limit]
            limit = start + int(differs.argmax()) if differs.any() else limit
        return limit // self.multiple * self.multiple

    def _flattened(self, node, start, levels):
        """The nodes of least tokens, from `start` on and of so many levels at most, instead of a node: list."""
        if not node.children:
            return [PrefixNode(node.members, start, node.end, [])]
        if levels == 1:
            leaves = sorted(node.leaves, key=lambda leaf: leaf.members[0])
            return [PrefixNode(leaf.members, start, leaf.end, []) for leaf in leaves]
        below = [each for child in node.children for each in self._flattened(child, node.end, levels - 1)]
        shared = PrefixNode(node.members, start, node.end, sorted(below, key=lambda each: each.members[0]))
        apart = [each for child in node.children for each in self._flattened(child, start, levels)]
        return [shared] if shared.num_tokens <= sum(each.num_tokens for each in apart) else apart


def _parts(array, bounds):
    """The parts of an array between neighbouring bounds: list."""
    return [array[start:end] for start, end in itertools.pairwise(bounds)]
