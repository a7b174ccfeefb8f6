"""Places that the running sequences hold in the cache of the layers with a window (window_blocks.py).

    columns of a row's block table      0 ... first ... end ... num_blocks
                                        dropped   held      none yet

A row holds the blocks that its next query reads, and those that its next step writes; one that decodes also those for
tokens to come, whose places its table on the device has. There are places for all rows at once
(window_blocks.py:most_places_of), so that no sequence ever waits for one.
"""

import numpy as np

from rlnumba.engine.blocks.window_blocks import NOWHERE, WindowBlocks, window_for


def row_windows_for(config, table, num_blocks, num_places):
    """The RowWindows of a model's rows of a table, or None for a model whose layers all keep all blocks."""
    window = window_for(config)
    return RowWindows(WindowBlocks(num_places or 0, num_blocks, table.block_size, window), table) if window else None


class RowWindows:
    """The places of the blocks of a SequenceTable's rows, in WindowBlocks.

    first, end (R,): the columns of the block tables that each row holds the places of.
    """

    def __init__(self, blocks, table):
        self.blocks, self.table = blocks, table
        self.first, self.end = (np.zeros(table.num_rows, np.int64) for _ in range(2))

    def has(self, block):
        """Whether a block, or None, has a place."""
        return block is not None and self.blocks.place[block] != NOWHERE

    def cut(self, matched):
        """The blocks of a cached prefix that a sequence can take over: list."""
        return matched[: self.blocks.resumable(matched)] if matched else matched

    def begin(self, row, cached):
        """Hold what a new row reads, whose first `cached` blocks are."""
        self.first[row] = self.end[row] = self.blocks.first_block(cached * self.table.block_size)
        self._hold(row, cached)

    def prepare(self, rows, counts):
        """Hold what a step of so many tokens of each row, (B,), writes; for the last ones, also for those to come."""
        table = self.table
        computed = table.num_computed[rows] + counts
        ends = -(-computed // table.block_size)
        ends = np.where(computed >= table.length[rows], table.num_blocks[rows], ends)
        for i in np.flatnonzero(self.end[rows] < ends).tolist():
            self._hold(rows[i], ends[i])

    def slide(self, rows, computed):
        """Drop what queries after so many tokens of each row, (B,), do not read."""
        first = self.blocks.first_block(computed)
        for i in np.flatnonzero(self.first[rows] < first).tolist():
            row = rows[i]
            self.blocks.drop(self.table.block_tables[row, self.first[row] : first[i]].tolist())
            self.first[row] = first[i]

    def give_back(self, row, kept):
        """Drop the blocks of a row behind its first `kept`."""
        if self.end[row] > kept:
            self.blocks.drop(self.table.block_tables[row, kept : self.end[row]].tolist()[::-1])
            self.end[row] = kept

    def leave(self, row):
        """Drop all that a row holds, the last first: the first are the likeliest to match."""
        self.give_back(row, self.first[row])
        self.first[row] = self.end[row] = 0

    def places(self, blocks):
        """The places of an array of blocks, int32; any place for a block that has none, which no query reads."""
        return np.maximum(self.blocks.place[blocks], 0)

    def _hold(self, row, end):
        self.blocks.hold(self.table.block_tables[row, self.end[row] : end].tolist())
        self.end[row] = end
