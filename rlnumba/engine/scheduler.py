"""Which tokens of which sequences the next step computes: continuous batching under a token budget.

A step takes, in this order, as far as budget, rows and blocks go:
1. every running sequence that lacks one token (decode);
2. the running ones that lack more, in the order of admission, a chunk each (chunked prefill);
3. waiting sequences, first come first served, with whatever prefix of theirs the cache holds.

When decode needs a block and none is free, the newest running sequence gives up its blocks and goes to
the front of the queue; it is computed again later, from the cached prefix if that is still there. The
oldest always moves on, so everything ends. None of this shows in the text: a token's value depends on
the tokens before it alone.

Sequences of one prompt (the n completions) wait for the first of them to compute the prompt; then they
find its full blocks in the cache and compute only the tail. A step in which all running sequences lack one token is
ordered by who shares blocks with whom, if attention can make use of that (groups.py).
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from rlnumba.engine.block_manager import BlockManager, block_hash
from rlnumba.engine.groups import Groups, find_groups
from rlnumba.engine.sequence import Sequence, SequenceTable
from rlnumba.kernels.attention.paged import PrefixSharing


@dataclass
class Step:
    """The work of one step, a row of each array a sequence: tokens [start, start + count) of table row `row`.

    draws: whether a token is drawn after the last of them. groups: of the sequences, which are in its order; None
    where they share little, and where a sequence has more tokens than one.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    draws: np.ndarray
    groups: Groups | None = None

    @property
    def num_tokens(self):
        return int(self.counts.sum())


def blocks_of(sequence, block_size):
    """The most blocks that a sequence needs: its last token ends it and is never computed."""
    return -(-(sequence.length_limit - 1) // block_size)


class Scheduler:
    """Moves sequences from waiting to running to finished.

    table, blocks: the running sequences and the cache. max_num_batched_tokens: tokens a step at most; not
    smaller than the table has rows. prefix_caching: whether blocks are named and found again; policy_version
    salts their names. has_stop_string(sequence, completion ids so far): asked after each token of a sequence
    with stop strings. sharing: the PrefixSharing of attention, if it reads a shared prefix once for several sequences.
    Every sequence must fit into the cache alone: `add` raises ValueError where it does not.
    """

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        policy_version: int = 0,
        has_stop_string=None,
        sharing: PrefixSharing | None = None,
    ):
        if max_num_batched_tokens < table.rows:
            raise ValueError(f"scheduler: {max_num_batched_tokens} tokens a step for {table.rows} sequences")
        self.table, self.blocks = table, blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching, self.policy_version = prefix_caching, policy_version
        self.has_stop_string = has_stop_string
        self.sharing = sharing if sharing and sharing.sizes else None
        self.waiting: deque[Sequence] = deque()
        # Sequences whose prompt another one is computing, by that prompt.
        self.held: dict[bytes, list[Sequence]] = {}
        # Rows of the table in the order of admission.
        self.running = np.zeros(0, np.int64)
        # The array `running` that groups were last looked for in, and what was found.
        self.grouped, self.groups = None, None
        self.free_rows = list(range(table.rows))[::-1]
        self.num_preemptions = 0

    def add(self, sequence):
        """Queue a sequence; ValueError if the cache could not hold it even alone."""
        needed = blocks_of(sequence, self.blocks.block_size)
        if needed > self.blocks.num_blocks:
            raise ValueError(f"scheduler: a sequence of {needed} blocks in a cache of {self.blocks.num_blocks}")
        self.waiting.append(sequence)

    @property
    def unfinished(self):
        return len(self.waiting) + len(self.running) + sum(map(len, self.held.values()))

    def schedule(self):
        """The next Step; None when nothing is left to do."""
        preempted = self._grow()
        budget = self.max_num_batched_tokens
        lacking = self.table.length[self.running] - self.table.num_computed[self.running]
        decode = self.running[lacking == 1]
        # What the step takes besides.
        rows, counts = [], []
        budget -= len(decode)
        if len(decode) < len(self.running):
            for row, missing in zip(self.running[lacking > 1].tolist(), lacking[lacking > 1].tolist(), strict=True):
                if budget == 0:
                    break
                rows.append(row)
                counts.append(min(missing, budget))
                budget -= counts[-1]
        # A sequence that just made room would only take it back.
        while budget and self.waiting and self.free_rows and not preempted:
            row = self._admit()
            if row is None:
                break
            if row < 0:
                continue
            rows.append(row)
            counts.append(min(int(self.table.length[row] - self.table.num_computed[row]), budget))
            budget -= counts[-1]
        tokens = self.max_num_batched_tokens - budget
        if not tokens:
            return None
        ones = np.ones_like(decode)
        rows, counts = (np.append(decode, rows), np.append(ones, counts)) if rows else (decode, ones)
        groups = None
        if self.sharing and tokens == len(rows) == len(self.running):
            groups = self._groups()
            rows = rows if groups is None else self.running[groups.order]
        starts = self.table.num_computed[rows]
        return Step(rows, starts, counts, starts + counts == self.table.length[rows], groups)

    def update(self, step, token_ids, logprobs):
        """Book a computed step: tokens (D,) int32 and log-probs (D,) float32 of the D rows that draw.

        Returns the sequences that end with it.
        """
        table = self.table
        computed = step.starts + step.counts
        table.num_computed[step.rows] = computed
        if self.prefix_caching:
            size = self.blocks.block_size
            for row in step.rows[computed // size > step.starts // size].tolist():
                self._register(row)

        rows = step.rows[step.draws]
        position = table.length[rows]
        table.token_ids[rows, position] = token_ids
        table.logprobs[rows, position] = logprobs
        table.length[rows] = position + 1
        for row in rows[position == table.prompt_length[rows]].tolist():
            self._let_go(table.sequences[row])

        stops = (table.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        for i in np.flatnonzero(table.has_stop_strings[rows] & ~stops).tolist():
            row = rows[i]
            drawn = table.token_ids[row, table.prompt_length[row] : table.length[row]]
            stops[i] = self.has_stop_string(table.sequences[row], drawn)
        ends = stops | (position + 1 >= table.length_limit[rows])
        finished = []
        for i in np.flatnonzero(ends).tolist():
            sequence = self._leave(int(rows[i]))
            sequence.finish_reason = "stop" if stops[i] else "length"
            finished.append(sequence)
        if finished:
            self.running = self.running[~np.isin(self.running, rows[ends])]
        return finished

    def _groups(self):
        """The Groups of all running sequences.

        They are found once for as long as the same sequences run: blocks that come later are each one's own.
        """
        if self.grouped is not self.running:
            contexts = self.table.num_computed[self.running] + 1
            tables = self.table.block_tables[self.running]
            self.groups = find_groups(tables, contexts, self.blocks.block_size, self.sharing)
            self.grouped = self.running
        return self.groups

    def _grow(self):
        """Give each running sequence whose next token opens a block that block; True if that took a preemption."""
        table, preempted = self.table, False
        while True:
            held = table.num_blocks[self.running]
            rows = self.running[table.length[self.running] > held * self.blocks.block_size]
            if len(rows) <= self.blocks.num_free:
                break
            self._preempt()
            preempted = True
        if len(rows):
            table.block_tables[rows, table.num_blocks[rows]] = self.blocks.allocate(len(rows))
            table.num_blocks[rows] += 1
        return preempted

    def _preempt(self):
        """Send the newest running sequence back to the front of the queue."""
        self.waiting.appendleft(self._leave(int(self.running[-1])))
        self.running = self.running[:-1]
        self.num_preemptions += 1

    def _admit(self):
        """Let the first waiting sequence run. Returns its row, -1 if it waits for its prompt, None without room."""
        sequence, table, blocks = self.waiting[0], self.table, self.blocks
        size, length = blocks.block_size, len(sequence.token_ids)
        # At least one token is computed, for the hidden row that the next is drawn from.
        num_full = (length - 1) // size if self.prefix_caching else 0
        shares_prompt = num_full and length == len(sequence.prompt) and not sequence.leads
        if shares_prompt and sequence.prompt_key in self.held:
            self.held[sequence.prompt_key].append(self.waiting.popleft())
            return -1
        names = self._names(sequence.token_ids, num_full)
        found = blocks.match(names, sequence.token_ids)
        needed = -(-length // size) - len(found)
        # A free block for each that runs, which will want one soon, keeps admission from causing preemption.
        reserve = len(self.running)
        if needed + blocks.num_unused(found) + reserve > blocks.num_free:
            return None
        self.waiting.popleft()
        blocks.take(found)
        found += blocks.allocate(needed)
        row = self.free_rows.pop()
        table.put(row, sequence)
        table.block_tables[row, : len(found)] = found
        table.num_blocks[row] = len(found)
        table.hashes[row, :num_full] = names
        table.num_hashed[row] = num_full
        table.num_computed[row] = (len(found) - needed) * size
        self.running = np.append(self.running, row)
        # Once the whole prompt is in the cache there is nothing to wait for.
        if shares_prompt and len(found) - needed < num_full:
            sequence.leads = True
            self.held[sequence.prompt_key] = []
        return row

    def _names(self, token_ids, count):
        """The hashes of the first `count` full blocks of token_ids."""
        size, names, parent = self.blocks.block_size, [], self.policy_version
        words = token_ids[: count * size].astype(np.int64).reshape(count, size)
        for block in words:
            parent = block_hash(parent, block)
            names.append(parent)
        return names

    def _register(self, row):
        """Name the blocks of a row that are full and computed."""
        table, size = self.table, self.blocks.block_size
        full = int(table.num_computed[row]) // size
        token_ids = table.token_ids[row, : full * size].reshape(full, size)
        for i in range(int(table.num_hashed[row]), full):
            parent = table.hashes[row, i - 1] if i else self.policy_version
            table.hashes[row, i] = block_hash(parent, token_ids[i])
            table.num_hashed[row] = i + 1
        for i in range(int(table.num_registered[row]), full):
            self.blocks.register(int(table.block_tables[row, i]), int(table.hashes[row, i]), token_ids[i])
        table.num_registered[row] = full

    def _let_go(self, sequence):
        """The prompt of `sequence` is computed: those that waited for it come next."""
        if sequence.leads:
            self.waiting.extendleft(reversed(self.held.pop(sequence.prompt_key)))
            sequence.leads = False

    def _leave(self, row):
        """Take a sequence off its row and give its blocks back, the last first: a prefix is worth most."""
        table = self.table
        self.blocks.release(table.block_tables[row, : table.num_blocks[row]].tolist()[::-1])
        self.free_rows.append(row)
        return table.take(row)
