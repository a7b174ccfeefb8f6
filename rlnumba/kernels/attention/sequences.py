"""The sequences of a call of attention, packed or in the paged cache: made once, and shared by all layers.

Arrays are int32, of B sequences with N query tokens together; sequence b owns the rows cu_seqlens[b] ..
cu_seqlens[b + 1]. Bounds are numbers of the host and are not checked, which would synchronize with the device.
"""

from typing import NamedTuple

import numpy as np

# First keys of the tiles that kernels load are multiples of this: of the tile of simt, sm80 and sm90, and of the cpu's.
KEPT_MULTIPLE = 64


# Tokens of a shared prefix of packed sequences are a multiple of this: on the GPU, rows of the smallest TMA box.
PREFIX_MULTIPLE = 16


class PackedPrefixes(NamedTuple):
    """Prefixes that packed sequences have in the rows of others, so that each is computed once.

    parents (B,): the sequence whose prefix and own rows come before a sequence's own, an earlier one; -1 for none.
    lengths (B,): tokens of a sequence's prefix, the parent's prefix and own rows together, a multiple of
    PREFIX_MULTIPLE; 0 without a parent. The position of a sequence's first own row is the length of its prefix.
    query_bounds (B + 1,): of the rows whose queries see a sequence's own keys, from 0 on; they are its own rows and
    those of its descendants, which are the next sequences. order (B,): the sequences, those with the most such queries
    first. levels: at least how many sequences a row's keys are of, its own and all before it, 2 where no parent has a
    parent.
    """

    parents: object
    lengths: object
    query_bounds: object
    order: object
    levels: int = 2

    @staticmethod
    def of(lengths, parents):
        """On the host, of sequences with so many own rows (B,) and these parents (B,)."""
        prefix_lens, queries = np.zeros(len(lengths), np.int32), np.array(lengths, np.int32)
        levels = np.ones(len(lengths), np.int32)
        for sequence, parent in enumerate(parents):
            if parent >= 0:
                prefix_lens[sequence] = prefix_lens[parent] + lengths[parent]
                levels[sequence] = levels[parent] + 1
        for sequence in reversed(range(len(lengths))):
            if parents[sequence] >= 0:
                queries[parents[sequence]] += queries[sequence]
        query_bounds = np.append(0, np.cumsum(queries)).astype(np.int32)
        order = np.argsort(-queries, kind="stable").astype(np.int32)
        return PackedPrefixes(np.array(parents, np.int32), prefix_lens, query_bounds, order, int(levels.max(initial=2)))


class PackedSequences(NamedTuple):
    """Packed sequences: cu_seqlens (B + 1,) of their own rows, and max_seqlen, at least the most of one.

    window: a query sees this many keys, the last of which is its own; 0: all up to its own. prefixes: PackedPrefixes,
    or None where each sequence has all of its rows.
    """

    cu_seqlens: object
    max_seqlen: int
    window: int = 0
    prefixes: PackedPrefixes | None = None


class SharedPrefixes(NamedTuple):
    """Groups of neighbouring sequences whose block tables begin with the same blocks, one query token each.

    shared_prefix_lens (B,): how many tokens, fewer than its context has, a sequence shares with all of its group, the
    same number for each. group_sizes (B,): at a group's first sequence how many there are, at the others 0; 1 for a
    sequence on its own. max_group_size: at least the largest of group_sizes, at most the last of `sharing`'s sizes
    (paged.py) where there are any; with 1, groups are ignored.
    """

    shared_prefix_lens: object
    group_sizes: object
    max_group_size: int


class PagedSequences(NamedTuple):
    """Sequences whose keys and values are in the paged cache.

    cu_seqlens (B + 1,) of the queries; context_lens (B,): keys, the new tokens' included, 0 for a row without a
    sequence; block_tables (B, max_blocks). max_seqlen_q, max_context_len: upper bounds. groups: SharedPrefixes or None.
    slot_mapping (N,): the row of the cache for each new token, block * block_size + offset, or -1; for operators that
    write the cache. plan: of plan_paged_attention for these sequences; None: each call makes its own. window: as in
    PackedSequences; blocks that only hold keys before those of `first_kept_key` are not read.
    """

    cu_seqlens: object
    context_lens: object
    block_tables: object
    max_seqlen_q: int
    max_context_len: int
    groups: SharedPrefixes | None = None
    slot_mapping: object = None
    plan: object = None
    window: int = 0

    @property
    def max_group_size(self):
        """The bound of the groups' sizes, 1 without groups, and with a window, which is seldom in a shared prefix."""
        return 1 if self.groups is None or self.window else self.groups.max_group_size


def first_kept_key(position, window):
    """The first key that kernels may load for a query at `position` or later, of a window > 0: ints or arrays.

    Kernels load whole tiles, at multiples of KEPT_MULTIPLE; a masked key is multiplied by zero, so that it must be
    finite: one of the sequence's own.
    """
    first = position - window + 1
    return (first * (first > 0)) // KEPT_MULTIPLE * KEPT_MULTIPLE
