"""Places of blocks in the cache of layers with a sliding window, which are given back once no query sees their keys.

Layers with full attention keep a block as long as its sequence runs; layers with a window only while a query to come
may read one of its keys. So the arrays of the second kind have fewer places than there are blocks. `place` says where a
block's keys and values are in them; it turns the block table of a sequence into that of its layers with a window, and
block_manager.py, which numbers the blocks, need not know of it.

The queries after `computed` tokens read from `first_block(computed)` on: whole tiles of the last window - 1 keys
(kernels/attention/sequences.py). A sequence holds the places of these blocks and of those that it is going to write.
A block that no sequence holds keeps its place, so that a prefix can be found there, until the place is wanted for
another: that of the block that was dropped first. A prefix can be resumed where the blocks that its next query reads
have one. A block that is allocated anew may have the place that it had before, but no hash before its own content.
"""

from collections import OrderedDict

import numpy as np

from rlnumba.kernels.attention.sequences import KEPT_MULTIPLE, first_kept_key

NOWHERE = -1
# Tokens that a sequence may have places for beside those of a step: the ones to come, of steps in flight, and drafts.
AHEAD = 80


def places_for(window, block_size, tokens):
    """The most places that a sequence holds which computes up to `tokens` tokens a step: int."""
    # Wherever in a tile and in a block the first query's window begins.
    computed = np.arange(window, window + max(KEPT_MULTIPLE, block_size))
    first = first_kept_key(computed, window) // block_size
    return int((-(-(computed + tokens) // block_size) - first).max())


def window_for(config):
    """The longest window of a model whose layers with windows give blocks back; 0 where none do."""
    if config.has_linear_attention:
        return 0
    return max(map(config.window_of, range(config.num_hidden_layers)))


def most_places_of(config, block_size, num_rows, tokens):
    """The most places that num_rows sequences hold whose steps have up to `tokens` tokens, and AHEAD more each.

    0 for a model without windows.
    """
    window = window_for(config)
    return num_rows * places_for(window, block_size, AHEAD) + -(-tokens // block_size) if window else 0


class WindowBlocks:
    """num_places places for the num_blocks blocks of block_size tokens of a BlockManager.

    place (num_blocks,) int32: where a block is, NOWHERE for one that is not. num_held: places of blocks that a sequence
    holds; most_held: the largest num_held so far.
    """

    def __init__(self, num_places, num_blocks, block_size, window):
        self.num_places, self.block_size, self.window = num_places, block_size, window
        self.place = np.full(num_blocks, NOWHERE, np.int32)
        # How many sequences hold a block's place; blocks with a place that none holds, the first dropped first.
        self.ref_count = np.zeros(num_blocks, np.int64)
        self.dropped = OrderedDict()
        self.unused = list(range(num_places))[::-1]
        self.num_held = self.most_held = 0

    def grow(self, num_blocks, num_places=None):
        """Have num_blocks blocks, and num_places if given; those that exist keep their places."""
        if num_places is not None:
            self.unused[:0] = range(self.num_places, num_places)[::-1]
            self.num_places = num_places
        added = num_blocks - len(self.place)
        self.place = np.append(self.place, np.full(added, NOWHERE, np.int32))
        self.ref_count = np.append(self.ref_count, np.zeros(added, np.int64))

    @property
    def num_free(self):
        """Places that blocks can be given."""
        return self.num_places - self.num_held

    def first_block(self, computed):
        """The first of a sequence's blocks that queries after `computed` tokens read: int or array."""
        return first_kept_key(computed, self.window) // self.block_size

    def resumable(self, blocks):
        """The number of a cached prefix's blocks that a sequence can take over, which computes what follows them."""
        is_there = self.place[blocks] != NOWHERE
        # The length of the run of places that ends with each block.
        ends = np.arange(1, len(blocks) + 1)
        run = ends - np.maximum.accumulate(np.where(is_there, 0, ends)) if len(blocks) else ends
        fits = ends - self.first_block(ends * self.block_size) <= run
        return int(ends[fits][-1]) if fits.any() else 0

    def missing(self, blocks):
        """The number of free places that `hold` of these blocks takes."""
        return int((self.ref_count[blocks] == 0).sum())

    def hold(self, blocks):
        """Add a reference to each block's place, which it gets if it has none; ValueError without enough free ones."""
        if self.missing(blocks) > self.num_free:
            raise ValueError(f"hold: {self.missing(blocks)} places asked for, {self.num_free} are free")
        # First those that are there, so that none of them is taken for another.
        for block in blocks:
            if self.ref_count[block] == 0:
                self.dropped.pop(block, None)
                self.num_held += 1
            self.ref_count[block] += 1
        for block in blocks:
            if self.place[block] == NOWHERE:
                self.place[block] = self.unused.pop() if self.unused else self._take()
        self.most_held = max(self.most_held, self.num_held)

    def drop(self, blocks):
        """Remove a reference from each block's place; without any, it stays where it is until the place is taken."""
        for block in blocks:
            if self.ref_count[block] == 0:
                raise ValueError(f"drop: no sequence holds the place of block {block}")
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.dropped[block] = None
                self.num_held -= 1

    def slide(self, blocks, before, computed):
        """Drop those of a sequence's blocks that it held after `before` tokens and does not read after `computed`."""
        self.drop(blocks[int(self.first_block(before)) : int(self.first_block(computed))])

    def end(self, blocks, computed):
        """Drop what a sequence with these blocks holds after `computed` tokens, the last first."""
        self.drop(blocks[int(self.first_block(computed)) :][::-1])

    def _take(self):
        """The place of the block that was dropped first, which has none any more."""
        block, _ = self.dropped.popitem(last=False)
        place, self.place[block] = int(self.place[block]), NOWHERE
        return place
