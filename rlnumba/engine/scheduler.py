"""Continuous batching: which tokens of which sequences the next step computes, under a token budget.

A step takes, in this order, as far as budget, rows and blocks go:
1. every running sequence that lacks one token (decode);
2. the running ones that lack more, in the order of admission, a chunk each (chunked prefill);
3. waiting sequences, first come first served, with whatever prefix of theirs the cache holds; those that were
   preempted, and further turns of episodes, come first.

A sequence that decodes may have blocks for tokens to come (run_ahead.py), which are given back where they are wanted.
A turn of an episode retains its full blocks when it has ended, for the next turn, which computes what follows them.
When decode needs a block and none is free, retained ones are released, those of the oldest request first. Without any,
the newest running sequence is preempted: it releases its blocks and goes to the front of the queue, with the tokens it
has, and is computed again later, from the cached prefix if that is still there. The oldest always advances, so
every sequence ends. None of this changes a text: a token's value depends on the tokens before it alone.

The first sequence of a prompt (of its n completions) to be admitted is the prefix leader: the others match its full
blocks in the cache and compute only the tail, in the same step if that has room for the leader's whole prompt (in every
layer keys and values are written before attention reads any), else once the prompt is computed. A step in which
all running sequences lack one token is ordered by prefix groups, if attention can make use of them
(blocks/prefix_groups.py).
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from rlnumba.engine.blocks.prefix_groups import PrefixGroups, find_prefix_groups
from rlnumba.engine.blocks.row_blocks import RowBlocks
from rlnumba.engine.sequence import Sequence
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK


class EndConditions(NamedTuple):
    """Conditions that end D sequences: stop_ids (D, S), length_limit (D,), indices of those that have stop strings."""

    stop_ids: np.ndarray
    length_limit: np.ndarray
    with_stop_strings: list

    @classmethod
    def of(cls, table, rows):
        """The EndConditions of rows of the table."""
        with_stop_strings = np.flatnonzero(table.has_stop_strings[rows]).tolist()
        return cls(table.stop_ids[rows], table.length_limit[rows], with_stop_strings)


@dataclass
class SchedulerOutput:
    """The work of one step, an entry of each array a sequence: tokens [start, start + count) of table row `row`.

    samples: whether a token is sampled after the last of them; sampled_rows: the rows where it is. prefix_groups:
    those of the sequences, which are in its order; None where they share little, and where a sequence has more tokens
    than one. end_conditions: those of the sampled rows, where several steps of the same rows have them in common.
    has_drafts: all tokens of a sequence but the first are drafts, and a token is sampled after each of its tokens:
    sampled_rows has its row once for each. allowed: words of the tokens that grammars allow, as Grammars.allowed.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    prefix_groups: PrefixGroups | None = None
    end_conditions: EndConditions | None = None
    has_drafts: bool = False
    allowed: np.ndarray | None = None

    @cached_property
    def num_tokens(self):
        return int(self.counts.sum())

    @cached_property
    def sampled_rows(self):
        """Table rows of the sequences that a token is sampled for."""
        return np.repeat(self.rows, self.counts) if self.has_drafts else self.rows[self.samples]

    @property
    def is_decode(self):
        """Whether every sequence has one token, after which one is sampled."""
        return len(self.rows) == self.num_tokens == len(self.sampled_rows)


def steps_of_group(prompt_length, n, block_size, prefix_caching, has_states=False):
    """Tokens of each of the steps that begin a prompt's n completions: tuple.

    One step: the whole prompt for the first one, for each other what is left of it after its last full block, or all of
    it without prefix caching. With states of linear attention the others resume at one that a step has computed: a step
    for the prompt, and one for what is left of it after the state, beside a token of the first one.
    """
    size = STATE_BLOCK if has_states else block_size
    tail = (prompt_length - 1) % size + 1 if prefix_caching else prompt_length
    if has_states and tail < prompt_length and n > 1:
        return prompt_length, 1 + (n - 1) * tail
    return (prompt_length + (n - 1) * tail,)


class Scheduler:
    """Moves sequences from waiting to running to finished.

    table: SequenceTable of the running sequences; blocks: BlockManager of the cache. budget: most tokens of a
    step; not smaller than the table has rows. prefix_caching: whether blocks are hashed and matched;
    policy_version: that of the weights that tokens are sampled from, which salts the hashes. has_stop_string(sequence,
    completion ids so far): called after each token of a sequence with stop strings. sharing: attention's PrefixSharing.
    pages: the StatePages of a model with linear attention, or None.
    """

    def __init__(
        self,
        table,
        blocks,
        budget,
        prefix_caching=True,
        policy_version=0,
        has_stop_string=None,
        sharing=None,
        pages=None,
    ):
        if budget < table.num_rows:
            raise ValueError(f"scheduler: {budget} tokens a step for {table.num_rows} sequences")
        self.table, self.blocks = table, blocks
        self.row_blocks = RowBlocks(table, blocks, prefix_caching, policy_version, pages)
        self.max_num_batched_tokens = budget
        self.has_stop_string = has_stop_string
        self.sharing = sharing if sharing and sharing.sizes else None
        self.waiting: deque[Sequence] = deque()
        # The sequences that wait for a prefix leader to compute their prompt, by prompt.
        self.waiting_on_prefix: dict[bytes, list[Sequence]] = {}
        # Rows of the table in the order of admission.
        self.running = np.zeros(0, np.int64)
        # The array `running` that prefix groups were last searched for, and what was found.
        self.grouped_running, self.prefix_groups = None, None
        self.free_rows = list(range(table.num_rows))[::-1]
        self.num_preemptions = 0

    @property
    def policy_version(self):
        """The version of the weights that tokens are sampled from."""
        return self.row_blocks.policy_version

    @property
    def has_grammars(self):
        """Whether a running sequence has a grammar."""
        return bool(self.table.has_grammar[self.running].any())

    def add(self, sequence):
        """Queue a sequence. The cache must be able to hold it alone by the time it is admitted.

        A further turn of an episode comes before sequences without any token: its blocks are retained until then.
        """
        if not sequence.continues:
            self.waiting.append(sequence)
            return
        begun = takewhile(lambda each: each.continues or len(each.token_ids) > len(each.prompt), self.waiting)
        self.waiting.insert(sum(1 for _ in begun), sequence)

    def schedule(self, admits=True):
        """The next SchedulerOutput; None when nothing is left to do. admits: whether waiting sequences may be admitted.

        Raises ValueError if the next sequence to be admitted does not fit into the cache even alone.
        """
        if self.waiting:
            self.row_blocks.give_back_reserved(self.running)
        table, preempted = self.table, self._allocate_decode_blocks()
        # Only the sequence admitted last may lack more than one token: the next one is admitted after its last chunk.
        counts = table.length[self.running] - table.num_computed[self.running]
        counts = np.minimum(counts, self.max_num_batched_tokens - len(counts) + 1)
        budget = self.max_num_batched_tokens - int(counts.sum())
        self.row_blocks.prepare(self.running, counts)
        rows, added = [], []
        # After a preemption nothing is admitted: it would be the sequence that was just preempted.
        while admits and budget and self.waiting and self.free_rows and not preempted:
            sequence = self.waiting[0]
            if sequence.prompt_key in self.waiting_on_prefix and not sequence.is_prefix_leader:
                self.waiting_on_prefix[sequence.prompt_key].append(self.waiting.popleft())
                continue
            row = self._admit(len(rows))
            if row is None:
                break
            rows.append(row)
            missing = int(table.length[row] - table.num_computed[row])
            added.append(min(missing, budget))
            budget -= added[-1]
            self.row_blocks.prepare(np.array([row]), added[-1])
            # A state is not there before the step has ended.
            if sequence.is_prefix_leader and added[-1] == missing and self.row_blocks.pages is None:
                self._share_prompt(sequence)
        self.row_blocks.forget_match()
        if rows:
            self.running, counts = np.append(self.running, rows), np.append(counts, added)
        if not len(counts):
            return None
        rows, groups = self.running, None
        if self.sharing and counts.max() == 1:
            groups = self._running_prefix_groups()
            rows = rows if groups is None else rows[groups.order]
        starts = table.num_computed[rows]
        return SchedulerOutput(rows, starts, counts, starts + counts == table.length[rows], groups)

    def add_drafts(self, step, drafts):
        """A decode step that also computes drafts, a list of token ids for each of its sequences; else the step itself.

        They are cut to the free blocks, the token budget, and one token less than the sequence may still get; with
        linear attention to the end of the last token's block of states, which the token after it folds. Keys, values
        and rows of a draft that is not accepted are overwritten: the next tokens have its positions.
        """
        table, size = self.table, self.blocks.block_size
        counts = step.counts.copy()
        budget = self.max_num_batched_tokens - step.num_tokens
        for i, (row, ids) in enumerate(zip(step.rows.tolist(), drafts, strict=True)):
            length = int(table.length[row])
            has_room = (int(table.num_blocks[row]) + self.blocks.num_free) * size
            count = min(len(ids), budget, int(table.length_limit[row]) - length - 1, has_room - length)
            if self.row_blocks.pages is not None:
                count = min(count, -length % STATE_BLOCK)
            if count <= 0:
                continue
            self.row_blocks.extend_by_drafts(row, count)
            table.token_ids[row, length : length + count] = ids[:count]
            counts[i] += count
            budget -= count
        if counts.max() == 1:
            return step
        return SchedulerOutput(step.rows, step.starts, counts, step.samples, has_drafts=True)

    def accept(self, step, token_ids):
        """(A computed step with its accepted drafts alone, the indices of its samples among those of the whole one).

        token_ids (D,) int32: what was sampled. A draft is accepted if it is the token sampled before it, all drafts
        before it are accepted, and the sequence has not ended by then.
        """
        table, rows, counts = self.table, step.rows, step.counts
        first = np.cumsum(counts) - counts
        offsets = np.arange(counts.max())
        sampled = token_ids[first[:, None] + np.minimum(offsets, counts[:, None] - 1)]
        # Columns beyond a row's drafts may lie beyond the table, and are not read.
        columns = np.minimum(step.starts[:, None] + 1 + offsets, table.token_ids.shape[1] - 1)
        accepted = (sampled == table.token_ids[rows[:, None], columns]) & (offsets < counts[:, None] - 1)
        accepted &= ~(table.stop_ids[rows][:, None, :] == sampled[:, :, None]).any(axis=2)
        counts = 1 + np.cumprod(accepted, axis=1).sum(axis=1)
        for i in np.flatnonzero(table.has_stop_strings[rows] & (counts > 1)).tolist():
            row = rows[i]
            # A token that was sampled before an accepted draft is in the table, as that draft.
            ids = table.token_ids[row, table.prompt_length[row] : table.length[row] + counts[i] - 1]
            for end in range(len(ids) - counts[i] + 2, len(ids) + 1):
                if self.has_stop_string(table.sequences[row], ids[:end]):
                    counts[i] -= len(ids) + 1 - end
                    break
        kept = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return SchedulerOutput(rows, step.starts, counts, step.samples, has_drafts=True), kept

    def update(self, step, token_ids, logprobs, thresholds=None):
        """Record a computed step: tokens (D,) int32 and log-probs (D,) float32 of the D tokens that it samples.

        thresholds (D,) float32: the smallest logits that filters kept, where a sequence wants them. A step with drafts
        gives what `accept` left. Returns the sequences that end with it.
        """
        table = self.table
        computed = step.starts + step.counts
        table.num_computed[step.rows] = computed
        self.row_blocks.note_computed(step.rows, step.starts, computed)
        if self.waiting_on_prefix:
            prompt_length = table.prompt_length[step.rows]
            for row in step.rows[(step.starts < prompt_length) & (computed >= prompt_length)].tolist():
                self.release_waiters(table.sequences[row])

        # All tokens of these are computed, so this is the position of the next one.
        rows, position = step.sampled_rows, computed[step.samples]
        if step.has_drafts:
            last = np.cumsum(step.counts) - 1
            position = np.repeat(computed - last, step.counts) + np.arange(len(rows))
        table.token_ids[rows, position] = token_ids
        table.logprobs[rows, position] = logprobs
        if thresholds is not None:
            table.thresholds[rows, position] = thresholds
        if step.has_drafts:
            rows, position, token_ids = step.rows, position[last], token_ids[last]
        table.length[rows] = position + 1

        stop_ids, length_limit, with_stop_strings = step.end_conditions or EndConditions.of(table, rows)
        stops = (stop_ids == token_ids[:, None]).any(axis=1)
        for i in with_stop_strings:
            if not stops[i]:
                row = rows[i]
                completion_ids = table.token_ids[row, table.prompt_length[row] : table.length[row]]
                stops[i] = self.has_stop_string(table.sequences[row], completion_ids)
        ends = stops | (position + 1 >= length_limit)
        finished = []
        for i in np.flatnonzero(ends).tolist():
            if table.sequences[rows[i]].retains_blocks:
                self.row_blocks.retain(int(rows[i]))
            sequence = self._vacate(int(rows[i]))
            sequence.finish_reason = "stop" if stops[i] else "length"
            finished.append(sequence)
        if finished:
            self.running = self.running[~np.isin(self.running, rows[ends])]
        return finished

    def remove(self, sequence):
        """Drop an unfinished sequence. If others wait for its prompt, the first of them will compute it instead."""
        waiters = self.waiting_on_prefix.get(sequence.prompt_key, ())
        if sequence.row is not None:
            self.running = self.running[self.running != sequence.row]
            self._vacate(sequence.row)
        elif sequence in waiters:
            waiters.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.release_waiters(sequence)

    def change_version(self, policy_version):
        """From now on tokens have this policy version; cached blocks are matched by no other sequence any more.

        Running sequences keep theirs.
        """
        for row in self.running.tolist():
            self.table.note_version(row, self.policy_version)
        self.row_blocks.forget_cached()
        self.row_blocks.policy_version = policy_version

    def preempt_all(self):
        """Send all running sequences back to the front of the queue, the oldest first."""
        self.waiting.extendleft([self._vacate(row) for row in self.running[::-1].tolist()])
        self.running = np.zeros(0, np.int64)

    def release_waiters(self, sequence):
        """If `sequence` is a prefix leader, it is none any more, and those that waited for it come next."""
        if sequence.is_prefix_leader:
            self.waiting.extendleft(reversed(self.waiting_on_prefix.pop(sequence.prompt_key)))
            sequence.is_prefix_leader = False

    def _running_prefix_groups(self):
        """The PrefixGroups of all running sequences, kept while these run: later blocks are never shared."""
        if self.grouped_running is not self.running:
            context_lens = self.table.num_computed[self.running] + 1
            tables = self.table.block_tables[self.running]
            self.prefix_groups = find_prefix_groups(tables, context_lens, self.blocks.block_size, self.sharing)
            self.grouped_running = self.running
        return self.prefix_groups

    def _allocate_decode_blocks(self):
        """Allocate a block for each running sequence whose next token begins one; True if that took a preemption."""
        row_blocks, preempted = self.row_blocks, False
        while True:
            rows = row_blocks.full(self.running)
            if len(rows) > self.blocks.num_free:
                row_blocks.give_back_reserved(self.running)
            if row_blocks.has_free(len(rows)):
                break
            self.waiting.appendleft(self._vacate(int(self.running[-1])))
            self.running = self.running[:-1]
            self.num_preemptions += 1
            preempted = True
        row_blocks.extend(rows)
        return preempted

    def can_admit(self, in_flight):
        """Whether a waiting sequence could be admitted, once `in_flight` more tokens of the running ones are computed.

        Blocks that were reserved for later tokens count as free. To be asked while all running ones decode.
        """
        if not (self.waiting and self.free_rows):
            return False
        sequence = self.waiting[0]
        if sequence.prompt_key in self.waiting_on_prefix and not sequence.is_prefix_leader:
            return True
        spare = self.row_blocks.spare(self.running, in_flight)
        return self.row_blocks.find(sequence, len(self.running), spare) is not None

    def _admit(self, num_admitted):
        """Give the first waiting sequence a row, and return that, or None without enough free blocks.

        num_admitted: sequences that have got a row before it, and are not yet in `running`.
        """
        sequence = self.waiting[0]
        found = self.row_blocks.find_room(sequence, len(self.running) + num_admitted)
        if found is None:
            return None
        self.waiting.popleft()
        row = self.free_rows.pop()
        if not self.row_blocks.begin(row, sequence, found):
            self.release_waiters(sequence)
        elif not sequence.is_prefix_leader:
            sequence.is_prefix_leader = True
            self.waiting_on_prefix[sequence.prompt_key] = []
        return row

    def _share_prompt(self, sequence):
        """Let others match the blocks of a prefix leader, all of whose tokens the step that is scheduled computes."""
        self.row_blocks.register(np.array([sequence.row]), self.table.length[[sequence.row]])
        # Their match is longer than that of their leader.
        self.row_blocks.forget_match()
        self.release_waiters(sequence)

    def _vacate(self, row):
        """Take a sequence off its row."""
        self.free_rows.append(row)
        return self.row_blocks.end(row)
