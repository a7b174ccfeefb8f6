"""The blocks of running sequences: those of each row of the table, and what is found and kept of them by hash.

A row takes the blocks of the longest cached prefix of its sequence over, and allocates others for the rest. A full,
computed block is registered, so that others match it. A row may have blocks for tokens to come (run_ahead.py), which
are given back where they are wanted; when too few are free, blocks that are retained for the next turns of episodes are
released, the oldest first. Windows and states of linear attention (row_windows.py, state_pages.py) follow the blocks.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.engine.blocks.block_manager import RetainedBlocks, block_hash, blocks_needed
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK

# Steps that may compute a token of a sequence which has ended, before the device knows.
MOST_IN_FLIGHT = 3


class FoundBlocks(NamedTuple):
    """The cached blocks that a sequence begins with, the hashes of all its blocks, the number of new ones it needs."""

    matched: list
    hashes: list
    needed: int


class RowBlocks:
    """The blocks that the rows of a table have.

    table: SequenceTable; blocks: BlockManager. prefix_caching: whether blocks are hashed and matched; policy_version:
    that of the weights, which salts the hashes. pages: the StatePages of a model with linear attention, or None.
    """

    def __init__(self, table, blocks, prefix_caching, policy_version, pages):
        self.table, self.blocks, self.pages = table, blocks, pages
        self.prefix_caching, self.policy_version = prefix_caching, policy_version
        self.retained = RetainedBlocks(blocks)
        # RoutedExperts of the blocks, where an engine returns them.
        self.routed_experts = None
        # (token ids, salt, hashes) of the sequence that was last hashed: others of its request have the same array.
        self.hashed = None, None, []
        # While sequences are admitted: the list of hashes whose blocks were acquired last, and these.
        self.matched = None, []

    # --- free blocks --------------------------------------------------------------------------------------------------

    def has_free(self, count):
        """Whether `count` blocks are free, once as many as that takes are retained no more."""
        while count > self.blocks.num_free and self.retained:
            self.retained.release_oldest()
        return count <= self.blocks.num_free

    def spare(self, rows, more):
        """The number of blocks of rows that neither their tokens nor `more` of each have a place in."""
        return int(np.maximum(self.table.num_blocks[rows] - self._of_length(rows, more), 0).sum())

    def give_back_reserved(self, rows):
        """Free the blocks of rows that none of their tokens has a place in."""
        table = self.table
        kept = self._of_length(rows)
        for index in np.flatnonzero(table.num_blocks[rows] > kept).tolist():
            row, first = rows[index], int(kept[index])
            if table.windows is not None:
                table.windows.give_back(row, first)
            self.blocks.give_back(table.block_tables[row, first : table.num_blocks[row]].tolist()[::-1])
            table.num_blocks[row] = first

    def _of_length(self, rows, more=0):
        """(B,) blocks that the tokens of rows, and `more` of each, take."""
        return -(-(self.table.length[rows] + more) // self.blocks.block_size)

    # --- blocks of running rows ---------------------------------------------------------------------------------------

    def full(self, rows):
        """Those of rows whose next token begins a block that they do not have."""
        return rows[self.table.length[rows] > self.table.num_blocks[rows] * self.blocks.block_size]

    def extend(self, rows):
        """Allocate one more block for each of rows; so many are free."""
        table = self.table
        if len(rows):
            table.block_tables[rows, table.num_blocks[rows]] = self.blocks.allocate(len(rows))
            table.num_blocks[rows] += 1

    def extend_by_drafts(self, row, count):
        """Allocate blocks for `count` drafts after the tokens of a row; so many are free."""
        table, num_blocks = self.table, int(self.table.num_blocks[row])
        more = max(-(-(int(table.length[row]) + count) // self.blocks.block_size) - num_blocks, 0)
        table.block_tables[row, num_blocks : num_blocks + more] = self.blocks.allocate(more)
        table.num_blocks[row] += more
        self.prepare(np.array([row]), 1)

    def reserve(self, rows, needed, wanted):
        """Allocate blocks for tokens to come of running rows: (indices into rows, columns of their tables, blocks).

        needed, wanted (B,): tokens that each row is to have blocks for; `wanted` if half of the free blocks are enough,
        else `needed`, within its length_limit. None, and nothing is allocated, where too few blocks are free.
        """
        table, size, free = self.table, self.blocks.block_size, self.blocks.num_free
        have = table.num_blocks[rows]
        more = np.maximum(-(-wanted // size) - have, 0)
        if more.sum() > free // 2:
            more = np.maximum(-(-needed // size) - have, 0)
        total = int(more.sum())
        if not self.has_free(total):
            return None
        indices = np.repeat(np.arange(len(rows)), more)
        columns = np.arange(total) - np.repeat(np.cumsum(more) - more, more) + have[indices]
        blocks = np.array(self.blocks.allocate(total), np.int64)
        table.block_tables[rows[indices], columns] = blocks
        table.num_blocks[rows] += more
        self.prepare(rows, 1)
        return indices, columns, blocks

    def prepare(self, rows, counts):
        """Let the windows of rows hold the blocks that a step of so many tokens of each, (B,), writes."""
        if self.table.windows is not None:
            self.table.windows.prepare(rows, counts)

    def note_computed(self, rows, starts, computed):
        """Register, slide and remember what a step completes: it had `starts` tokens of each row, now `computed`."""
        size = self.blocks.block_size
        if self.prefix_caching:
            completes_block = computed // size > starts // size
            if completes_block.any():
                self.register(rows[completes_block], computed[completes_block])
        if self.table.windows is not None:
            self.table.windows.slide(rows, computed)
        if self.pages is not None:
            self.pages.note(rows, computed)

    # --- a row begins and ends ----------------------------------------------------------------------------------------

    def find(self, sequence, num_others, spare=0):
        """The FoundBlocks of a waiting sequence, or None without enough free blocks.

        num_others: sequences that run, or have just been admitted; spare: blocks that are going to be free beside those
        that are.
        """
        blocks, size, length = self.blocks, self.blocks.block_size, len(sequence.token_ids)
        hashes, salt = [], self._salt(sequence)
        if self.prefix_caching:
            if self.hashed[0] is not sequence.token_ids or self.hashed[1] != salt:
                found = self._hashes(sequence.token_ids, (length - 1) // size, salt)
                self.hashed = sequence.token_ids, salt, found
            hashes = self.hashed[2]
            if sequence.num_to_score:
                # What the cache holds is not computed, and so not scored.
                hashes = hashes[: len(sequence.prompt_listings) // size]
        # The blocks that were acquired are matched again: others of a request need not be compared.
        matched = self.matched[1] if self.matched[0] is hashes else blocks.match(hashes, sequence.token_ids)
        if self.pages is not None:
            # A sequence resumes where its state is.
            matched = matched[: self.pages.match(hashes, len(matched)) * self.pages.ratio]
        if self.table.windows is not None:
            matched = self.table.windows.cut(matched)
        needed = -(-length // size) - len(matched)
        # A free block for each running sequence, which will need one soon, keeps admission from causing preemption.
        if needed + blocks.count_free(matched) + num_others > blocks.num_free + spare:
            return None
        return FoundBlocks(matched, hashes, needed)

    def find_room(self, sequence, num_others):
        """The FoundBlocks that `find` returns; without others, what is retained is released until there is room.

        Raises ValueError if it does not fit into the cache even alone.
        """
        most = blocks_needed(sequence.length_limit, self.blocks.block_size)
        if most > self.blocks.num_blocks:
            raise ValueError(f"scheduler: a sequence of {most} blocks in a cache of {self.blocks.num_blocks}")
        found = self.find(sequence, num_others)
        # Nothing else will free any.
        while found is None and self.retained and not num_others:
            self.retained.release_oldest()
            found = self.find(sequence, num_others)
        return found

    def begin(self, row, sequence, found):
        """Put a sequence into a free row, with its FoundBlocks; True if others of its prompt are to wait for it."""
        table, blocks, size, matched = self.table, self.blocks, self.blocks.block_size, found.matched
        blocks.acquire(matched)
        self.matched = found.hashes, matched
        owned = matched + blocks.allocate(found.needed)
        self.retained.release(sequence.request_id)
        table.put(row, sequence)
        table.block_tables[row, : len(owned)] = owned
        table.num_blocks[row] = len(owned)
        table.num_registered[row] = len(matched)
        table.last_hash[row] = found.hashes[len(matched) - 1] if matched else self._salt(sequence)
        table.num_computed[row] = len(matched) * size
        if table.windows is not None:
            table.windows.begin(row, len(matched))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = len(matched) * size
        if self.pages is None:
            # Each sequence computes a token of its prompt at least, for the logits of the first completion token.
            return self.prefix_caching and len(matched) < (len(sequence.prompt) - 1) // size
        return self.pages.begin(row, found.hashes, len(matched) // self.pages.ratio, len(sequence.prompt))

    def end(self, row):
        """Take a sequence off its row and release its blocks, the last first: the first are the likeliest to match."""
        table = self.table
        if self.routed_experts is not None:
            self.routed_experts.keep(table.sequences[row], table.block_tables[row], int(table.num_computed[row]))
        self.blocks.release(table.block_tables[row, : table.num_blocks[row]].tolist()[::-1])
        if table.windows is not None:
            table.windows.leave(row)
        if self.pages is not None:
            self.pages.end(row)
        return table.take(row, self.policy_version)

    def retain(self, row):
        """Retain the blocks that the next turn of a row's sequence, which has ended, is going to match.

        Not the row's own, of which other sequences may have registered copies. The last token is not computed.
        """
        if not self.prefix_caching:
            return
        table, sequence = self.table, self.table.sequences[row]
        token_ids = table.token_ids[row, : table.length[row]]
        hashes = self._hashes(token_ids, (len(token_ids) - 1) // self.blocks.block_size, self._salt(sequence))
        self.retained.retain(sequence.request_id, self.blocks.match(hashes, token_ids))
        # Blocks and states that were begun with other weights are found by no hash of these.
        if self.pages is None or not hashes or hashes[-1] != int(table.last_hash[row]):
            return
        # The last computed token is the one before the last; steps in flight must not have begun another state.
        computed = len(token_ids) - 1
        states = (computed - 1) // STATE_BLOCK
        if states and (computed - 1 + MOST_IN_FLIGHT) // STATE_BLOCK == states:
            self.pages.keep_last(row, states, hashes[states * self.pages.ratio - 1])

    # --- hashes -------------------------------------------------------------------------------------------------------

    def register(self, rows, computed):
        """Record the hashes of the rows' blocks that are full once so many tokens of each, (B,), are computed."""
        table, size = self.table, self.blocks.block_size
        first, full = table.num_registered[rows], computed // size
        new = full - first
        owners = np.repeat(rows, new)
        indices = np.arange(len(owners)) - np.repeat(np.cumsum(new) - new - first, new)
        token_ids = table.token_ids[owners[:, None], indices[:, None] * size + np.arange(size)]
        parents, hashes = dict(zip(rows.tolist(), table.last_hash[rows].tolist(), strict=True)), []
        for row, block in zip(owners.tolist(), token_ids.astype(np.int64), strict=True):
            parents[row] = block_hash(parents[row], block)
            hashes.append(parents[row])
        if (windows := table.windows) is not None:
            # A sequence can resume at these where it could not at others with their hashes.
            self.blocks.forget([each for each in hashes if not windows.has(self.blocks.block_of_hash.get(each))])
        self.blocks.register(table.block_tables[owners, indices].tolist(), hashes, token_ids)
        table.num_registered[rows] = full
        table.last_hash[rows] = np.array(list(parents.values()), np.uint64)

    def forget_match(self):
        """Compare the next sequence with the cache, even if it has the prompt of the last one."""
        self.matched = None, []

    def forget_cached(self):
        """Make no cached block match any more; those of running sequences stay with them."""
        self.retained.release_all()
        self.blocks.forget_hashes()
        if self.pages is not None:
            self.pages.forget()

    def _salt(self, sequence):
        """The salt of a first block's hash: the policy version, with adapter and cache_salt if there are any."""
        salt = self.policy_version
        if sequence.adapter_id >= 0:
            salt = block_hash(salt, np.array([-1 - sequence.adapter_id]))
        if sequence.cache_salt:
            # A negative number begins it, as it does an adapter's: no block of token ids has the hash.
            salt = block_hash(salt, np.array([-1, *sequence.cache_salt.encode()]))
        return salt

    def _hashes(self, token_ids, count, parent):
        """The hashes of the first `count` full blocks of token_ids; parent: what the first one follows."""
        size, hashes = self.blocks.block_size, []
        for block in token_ids[: count * size].astype(np.int64).reshape(count, size):
            parent = block_hash(parent, block)
            hashes.append(parent)
        return hashes
