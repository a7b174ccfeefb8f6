"""Prefix groups of a decode step: sequences whose block tables begin alike, so that attention reads those blocks once.

The completions of a prompt share its full blocks, and so does every sequence that matched a prefix in the cache. The
sequences of a group become neighbours in the step. A prefix is shared in whole segments, of as many tokens as attention
says (kernels/attention/paged.py:sharing). A sequence is in one group, of those with which it shares most.
"""

from dataclasses import dataclass

import numpy as np

# Groups are declared where they save at least this share of what a step reads. Below, the wider tiles that they take
# might cost more than is saved.
MIN_SAVED_SHARE = 1 / 8


@dataclass
class PrefixGroups:
    """order (B,): the step's sequences, those of a group next to each other. The arrays below are in this order.

    shared_prefix_lens, group_sizes (B,) int32 and max_group_size: arguments of paged_attention.
    """

    order: np.ndarray
    shared_prefix_lens: np.ndarray
    group_sizes: np.ndarray
    max_group_size: int


def shared_segments(block_tables, num_segments, blocks_per_segment):
    """The sequences that share their first segments: [(sequences, ids)]; entry d is about the first d + 1 segments.

    block_tables (B, W) int32; num_segments (B,): whole segments of each sequence. Sequences with equal ids have the
    same blocks there; sequences that share them with no other are not listed.
    """
    depths = []
    sequences = np.arange(len(num_segments))
    ids = np.zeros(len(num_segments), np.int32)
    while True:
        depth = len(depths)
        longer = num_segments[sequences] > depth
        sequences, ids = sequences[longer], ids[longer]
        if len(sequences) < 2:
            return depths
        # Compared as bytes: the id so far, then the blocks of the next segment.
        blocks = block_tables[sequences, depth * blocks_per_segment : (depth + 1) * blocks_per_segment]
        prefixes = np.ascontiguousarray(np.column_stack([ids.astype(np.int32), blocks]))
        prefixes = prefixes.view(np.dtype((np.void, prefixes.strides[0])))[:, 0]
        _, ids, counts = np.unique(prefixes, return_inverse=True, return_counts=True)
        shared = counts[ids] > 1
        sequences, ids = sequences[shared], ids[shared]
        if not len(sequences):
            return depths
        depths.append((sequences, ids))


def find_prefix_groups(block_tables, context_lens, block_size, sharing):
    """The PrefixGroups of a decode step, or None where they would save too little.

    block_tables (B, W) int32; context_lens (B,), the new token included, whose block is never shared; sharing: what
    attention can share, with at least one group size. Sequences that share most of their segments are grouped first.
    """
    total, largest_size = len(context_lens), sharing.sizes[-1]
    depths = shared_segments(block_tables, (context_lens - 1) // sharing.keys, sharing.keys // block_size)
    # Sequences without a group are sorted to the end.
    ungrouped = np.iinfo(np.int64).max
    group = np.full(total, ungrouped)
    segments = np.zeros(total, np.int64)
    num_groups = 0
    for depth in range(len(depths), 0, -1):
        sequences, ids = depths[depth - 1]
        remaining = group[sequences] == ungrouped
        sequences, ids = sequences[remaining], ids[remaining]
        order = np.argsort(ids, kind="stable")
        sequences, ids = sequences[order], ids[order]
        rank = np.arange(len(ids)) - np.searchsorted(ids, ids)
        _, candidates, counts = np.unique(ids * total + rank // largest_size, return_inverse=True, return_counts=True)
        grouped = counts[candidates] > 1
        group[sequences[grouped]] = num_groups + candidates[grouped]
        segments[sequences[grouped]] = depth
        num_groups += len(counts)
    order = np.argsort(group, kind="stable")
    group, segments = group[order], segments[order]
    is_first = np.ones(total, bool)
    is_first[1:] = (group[1:] != group[:-1]) | (group[1:] == ungrouped)
    saved = segments[~is_first].sum()
    if saved < MIN_SAVED_SHARE * (-(-context_lens // sharing.keys)).sum() or not saved:
        return None
    group_sizes = np.zeros(total, np.int32)
    group_sizes[is_first] = np.diff(np.append(np.flatnonzero(is_first), total))
    largest = group_sizes.max()
    max_group_size = next(size for size in sharing.sizes if size >= largest)
    return PrefixGroups(order, (segments * sharing.keys).astype(np.int32), group_sizes, max_group_size)
