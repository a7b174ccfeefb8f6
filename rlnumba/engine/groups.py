"""Which sequences of a decode step begin with the same blocks, so that attention reads those once for all of them.

The completions of a prompt share its full blocks, and so does whoever found a prefix in the cache. Sequences that
share become neighbours in the step, a group each. What counts is whole pieces of a context, of as many keys as
attention says (kernels/attention/paged.py:sharing). A sequence is in one group, of those with which it shares most.
"""

from dataclasses import dataclass

import numpy as np

# Groups are declared where they save at least this share of what a step reads. Below, the wider tiles that they take
# might cost more than is saved.
WORTHWHILE = 1 / 8


@dataclass
class Groups:
    """order (B,): the step's sequences, group_sizes of a group next to each other. The rest is in this order.

    shared_prefix_lens, group_sizes (B,) int32 and max_group_size: as paged_attention takes them.
    """

    order: np.ndarray
    shared_prefix_lens: np.ndarray
    group_sizes: np.ndarray
    max_group_size: int


def shared_pieces(block_tables, pieces, blocks):
    """Who shares how much: [(sequences, ids)], of which entry d is about the first d + 1 pieces.

    block_tables (B, W) int32; pieces (B,): whole ones that a sequence has; blocks: of a piece. Those with equal ids
    have the same blocks there. Sequences that share their pieces with nobody are not listed.
    """
    levels = []
    sequences = np.arange(len(pieces))
    ids = np.zeros(len(pieces), np.int64)
    while True:
        depth = len(levels)
        longer = pieces[sequences] > depth
        sequences, ids = sequences[longer], ids[longer]
        if len(sequences) < 2:
            return levels
        # What is compared: the id so far, then the blocks of the next piece.
        keys = np.empty((len(sequences), 1 + blocks), np.int32)
        keys[:, 0] = ids
        keys[:, 1:] = block_tables[sequences, depth * blocks : (depth + 1) * blocks]
        keys = keys.view(np.dtype((np.void, keys.itemsize * (1 + blocks))))[:, 0]
        _, ids, counts = np.unique(keys, return_inverse=True, return_counts=True)
        shared = counts[ids] > 1
        sequences, ids = sequences[shared], ids[shared]
        if not len(sequences):
            return levels
        levels.append((sequences, ids))


def find_groups(block_tables, contexts, block_size, sharing):
    """The Groups of a decode step, or None where they would save too little.

    block_tables (B, W) int32 and contexts (B,), the keys with the new one, whose block nobody shares; sharing: a
    PrefixSharing with sizes. Those that share most of their pieces are joined first.
    """
    total, most, blocks = len(contexts), sharing.sizes[-1], sharing.keys // block_size
    levels = shared_pieces(block_tables, (contexts - 1) // sharing.keys, blocks)
    # Those without a group come last.
    nobody = np.iinfo(np.int64).max
    group = np.full(total, nobody)
    common = np.zeros(total, np.int64)
    found = 0
    for depth in range(len(levels), 0, -1):
        sequences, ids = levels[depth - 1]
        alone = group[sequences] == nobody
        sequences, ids = sequences[alone], ids[alone]
        order = np.argsort(ids, kind="stable")
        sequences, ids = sequences[order], ids[order]
        rank = np.arange(len(ids)) - np.searchsorted(ids, ids)
        _, parts, counts = np.unique(ids * total + rank // most, return_inverse=True, return_counts=True)
        joined = counts[parts] > 1
        group[sequences[joined]] = found + parts[joined]
        common[sequences[joined]] = depth
        found += len(counts)
    order = np.argsort(group, kind="stable")
    group, common = group[order], common[order]
    leads = np.ones(total, bool)
    leads[1:] = (group[1:] != group[:-1]) | (group[1:] == nobody)
    saved = common[~leads].sum()
    if saved < WORTHWHILE * (-(-contexts // sharing.keys)).sum() or not saved:
        return None
    group_sizes = np.zeros(total, np.int32)
    group_sizes[leads] = np.diff(np.append(np.flatnonzero(leads), total))
    largest = group_sizes.max()
    size = next(size for size in sharing.sizes if size >= largest)
    return Groups(order, (common * sharing.keys).astype(np.int32), group_sizes, size)
