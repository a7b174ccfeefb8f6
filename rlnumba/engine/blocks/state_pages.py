"""Pages of linear attention's state: one that each running sequence writes, and those that others begin at.

A page has the state after a multiple of STATE_BLOCK tokens of a sequence, in every layer with linear attention
(kernels/delta_rule/arithmetic.py). A running sequence has a page of its own, in which each of its states takes the
place of the one before. The state at the last boundary within a prompt goes to another page, where there is one, and so
does a finished turn's last state: a later sequence that begins with the same tokens resumes there, with the keys and
values up to there, and computes what follows. Such a page has the hash of the KV block that ends with it
(block_manager.py), and keeps it after its last reference, until it is taken for another state, the one that was used
least recently first.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK


class PendingPage(NamedTuple):
    """A page that a sequence is going to write, to be found by `hash` once more than `length` tokens are computed."""

    length: int
    page: int
    hash: int


def num_pages_for(num_rows):
    """The number of pages beside those of so many running sequences: for prompts of groups, and for turns to come."""
    return num_rows + max(num_rows // 4, 4)


def pages_for(config, table):
    """The StatePages of a model with linear attention for the sequences of a table, else None."""
    return StatePages(table, num_pages_for(table.num_rows)) if config.has_linear_attention else None


class StatePages:
    """The pages of num_rows running sequences and those kept, num_pages in all.

    table: the SequenceTable, whose state_tables and resumed_at of a row are written here. block_size: of the KV cache.
    """

    def __init__(self, table, num_pages):
        self.table, self.ratio = table, STATE_BLOCK // table.block_size
        self.own = np.arange(table.num_rows)
        # Pages without a reference, least recently used first.
        self.free = OrderedDict.fromkeys(range(table.num_rows, num_pages))
        self.ref_count, self.held = Counter(), {}
        self.page_of_hash, self.hash_of_page = {}, {}
        self.pending = {}

    def match(self, hashes, num_blocks):
        """The longest state at which a sequence may resume: its number of STATE_BLOCKs, 0 for none.

        hashes: those of its KV blocks, the first num_blocks of which are in the cache.
        """
        most = num_blocks // self.ratio
        return next((n for n in range(most, 0, -1) if hashes[n * self.ratio - 1] in self.page_of_hash), 0)

    def begin(self, row, hashes, matched, prompt_length):
        """Set up a row for a sequence that resumes after `matched` STATE_BLOCKs, 0 for none.

        hashes: those of all its full KV blocks. Returns whether others may resume at the end of its prompt, later.
        """
        table = self.table
        table.state_tables[row] = self.own[row]
        table.resumed_at[row] = matched * STATE_BLOCK if matched else -1
        self.held[row] = []
        if matched:
            page = self.page_of_hash[hashes[matched * self.ratio - 1]]
            table.state_tables[row, matched - 1] = page
            self._hold(row, page)
        last = (prompt_length - 1) // STATE_BLOCK
        if last <= matched or last * self.ratio > len(hashes) or not self.free:
            return False
        page = self._take()
        table.state_tables[row, last - 1] = page
        self._hold(row, page)
        self.pending[row] = PendingPage(last * STATE_BLOCK, page, hashes[last * self.ratio - 1])
        return True

    def note(self, rows, computed):
        """Let pages be found whose states have been computed; computed (B,): tokens of each of the rows."""
        if self.pending:
            for row, count in zip(rows.tolist(), computed.tolist(), strict=True):
                if row in self.pending and count > self.pending[row].length:
                    _, page, page_hash = self.pending.pop(row)
                    self._register(page, page_hash)

    def keep_last(self, row, length, page_hash):
        """Let a row's last state be found, that after `length` STATE_BLOCKs.

        Where it is in the row's own page, another page must be there to take its place.
        """
        if page_hash in self.page_of_hash:
            return
        page = int(self.table.state_tables[row, length - 1])
        if page != self.own[row]:
            # The row holds this page, at which it began or which it wrote after another with the same state.
            self._register(page, page_hash)
        elif self.free:
            self.own[row] = self._take()
            self._register(page, page_hash)
            self.free[page] = None

    def end(self, row):
        """Take a sequence off its row; what it holds can be found until it is taken."""
        self.pending.pop(row, None)
        for page in self.held.pop(row):
            self.ref_count[page] -= 1
            if not self.ref_count[page]:
                self.free[page] = None
                if page not in self.hash_of_page:
                    self.free.move_to_end(page, last=False)

    def forget(self):
        """Let no page be found any more; those of running sequences stay with them."""
        self.page_of_hash.clear()
        self.hash_of_page.clear()
        self.pending.clear()

    def _hold(self, row, page):
        self.free.pop(page, None)
        self.ref_count[page] += 1
        self.held[row].append(page)

    def _take(self):
        """A page without a reference, whose state is lost."""
        page, _ = self.free.popitem(last=False)
        if page in self.hash_of_page:
            del self.page_of_hash[self.hash_of_page.pop(page)]
        return page

    def _register(self, page, page_hash):
        """Let a page be found; the first of several with one hash."""
        if page_hash not in self.page_of_hash:
            self.page_of_hash[page_hash], self.hash_of_page[page] = page, page_hash
