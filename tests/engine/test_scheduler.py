"""The scheduler with a fake model whose next token is a function of the tokens before it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.engine import scheduler as scheduler_module
from rlnumba.engine.blocks.block_manager import BlockManager, blocks_needed
from rlnumba.engine.blocks.state_pages import StatePages
from rlnumba.engine.scheduler import Scheduler
from rlnumba.engine.sequence import SamplingParams, Sequence, SequenceTable
from rlnumba.kernels.attention.paged import PrefixSharing
from rlnumba.kernels.delta_rule.arithmetic import BLOCK as STATE_BLOCK

BLOCK = 4


def fingerprint(token_ids):
    value = 17
    for token in token_ids:
        value = (value * 1000003 + int(token) + 1) % (2**61 - 1)
    return value


def next_token(token_ids, index):
    return fingerprint([*token_ids, 1000 + index]) % 50


class FakeModel:
    """Keeps, in every slot of the cache, the fingerprint of the tokens up to there, and checks what it reads."""

    def __init__(self, num_blocks):
        self.cache = [None] * (num_blocks * BLOCK)
        self.num_tokens = 0
        # Size of each step's largest prefix group; 1 without groups.
        self.largest = []

    def run(self, step, table):
        assert len(set(step.rows.tolist())) == len(step.rows)
        self.largest.append(1)
        if step.prefix_groups is not None:
            self.check_groups(step, table)
        sampled = []
        for row, start, count, samples in zip(step.rows, step.starts, step.counts, step.samples, strict=True):
            ids, tables = table.token_ids[row], table.block_tables[row]
            slots = [int(tables[p // BLOCK]) * BLOCK + p % BLOCK for p in range(start + count)]
            for position in range(start, start + count):
                self.cache[slots[position]] = fingerprint(ids[: position + 1])
            assert [self.cache[slot] for slot in slots] == [fingerprint(ids[: p + 1]) for p in range(start + count)]
            first = start + 1 if step.has_drafts else start + count
            for length in range(first, start + count + 1) if samples else ():
                sampled.append(next_token(ids[:length], table.sample_index[row]))
        self.num_tokens += step.num_tokens
        sampled = np.array(sampled, np.int32)
        return sampled, (-0.5 * sampled).astype(np.float32)

    def check_groups(self, step, table):
        """The prefix of a group is in the same blocks for all of its sequences, and ends before the step's tokens."""
        groups = step.prefix_groups
        prefix_lens, group_sizes = groups.shared_prefix_lens.tolist(), groups.group_sizes.tolist()
        assert (step.counts == 1).all() and sum(group_sizes) == len(group_sizes) == len(step.rows)
        for first, size in [(i, size) for i, size in enumerate(group_sizes) if size]:
            rows = step.rows[first : first + size]
            assert set(prefix_lens[first : first + size]) == {prefix_lens[first]}
            assert prefix_lens[first] <= step.starts[first : first + size].min()
            assert (table.block_tables[rows] == table.block_tables[rows[:1]])[:, : prefix_lens[first] // BLOCK].all()
        self.largest[-1] = max(group_sizes)
        assert self.largest[-1] <= step.prefix_groups.max_group_size


def sequences_of(requests, eos=()):
    sequences = []
    for number, (prompt, n, max_tokens) in enumerate(requests):
        prompt = np.array(prompt, np.int32)
        for index in range(n):
            params = SamplingParams(max_tokens=max_tokens, n=n)
            sequences.append(Sequence(number, index, prompt, params, (0, 0), len(prompt) + max_tokens, eos))
    return sequences


def run(sequences, rows=8, budget=16, num_blocks=64, **options):
    """Run to the end; returns ({(request, index): (ids, reason)}, scheduler, model)."""
    table = SequenceTable(rows, BLOCK)
    blocks = options.pop("blocks", None) or BlockManager(num_blocks, BLOCK)
    model = options.pop("model", None) or FakeModel(num_blocks)
    drafts = options.pop("drafts", None)
    scheduler = Scheduler(table, blocks, budget, **options)
    for sequence in sequences:
        scheduler.add(sequence)
    results, steps = {}, 0
    while (step := scheduler.schedule()) is not None:
        if drafts is not None and step.is_decode:
            step = scheduler.add_drafts(step, [drafts(table.sequences[row], table.length[row]) for row in step.rows])
        assert 0 < step.num_tokens <= budget
        sampled, logprobs = model.run(step, table)
        if step.has_drafts:
            step, kept = scheduler.accept(step, sampled)
            sampled, logprobs = sampled[kept], logprobs[kept]
        for s in scheduler.update(step, sampled, logprobs):
            results[s.request_id, s.index] = (s.completion_ids.tolist(), s.finish_reason)
            assert s.completion_logprobs.tolist() == [-0.5 * t for t in s.completion_ids]
        steps += 1
        assert steps < 5000
    assert not scheduler.waiting and not len(scheduler.running) and len(results) == len(sequences)
    assert blocks.num_free == blocks.num_blocks and not any(blocks.ref_count)
    assert sorted(scheduler.free_rows) == list(range(rows)) and not scheduler.waiting_on_prefix
    return results, scheduler, model


def expected(sequences):
    results = {}
    for s in sequences:
        ids, reason = s.prompt.tolist(), "length"
        while len(ids) < s.length_limit:
            ids.append(next_token(ids, s.index))
            if ids[-1] in s.stop_ids:
                reason = "stop"
                break
        results[s.request_id, s.index] = (ids[len(s.prompt) :], reason)
    return results


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 3), st.integers(1, 12)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 6), st.integers(1, 20), st.integers(0, 12), st.booleans(), st.integers(0, 2**32 - 1))
def test_drafts_change_no_text_and_keep_no_block(requests, rows, extra_budget, spare_blocks, caching, seed):
    """Right drafts, wrong ones after right ones, more than a sequence may have; a wrong one's cache is never read."""
    rng = np.random.default_rng(seed)
    make = lambda: sequences_of(requests, eos=(1, 7, 23))  # noqa: E731
    wanted = expected(make())
    num_blocks = max(blocks_needed(s.length_limit, BLOCK) for s in make()) + spare_blocks

    def drafts(sequence, length):
        ids, _ = wanted[sequence.request_id, sequence.index]
        right = ids[length - len(sequence.prompt) :][: rng.integers(0, 9)]
        return right + rng.integers(0, 50, rng.integers(0, 4)).tolist()

    budget = rows + extra_budget - 1
    results, _, _ = run(make(), rows, budget, num_blocks, prefix_caching=caching, drafts=drafts)
    assert results == wanted


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 6), st.integers(1, 20), st.integers(0, 12), st.booleans(), st.booleans())
def test_any_schedule_gives_the_same_text_and_returns_all_blocks(
    requests, rows, extra_budget, spare_blocks, caching, eos
):
    make = lambda: sequences_of(requests, eos=(1, 7, 23) if eos else ())  # noqa: E731
    num_blocks = max(blocks_needed(s.length_limit, BLOCK) for s in make()) + spare_blocks
    sharing = PrefixSharing((2, 3), BLOCK)
    results, _, _ = run(make(), rows, rows + extra_budget - 1, num_blocks, prefix_caching=caching, sharing=sharing)
    assert results == expected(make())


def test_too_few_blocks_preempt_the_newest():
    prompts = [([i], 1, 20) for i in range(4)]
    results, scheduler, _ = run(sequences_of(prompts), rows=4, budget=8, num_blocks=9)
    assert scheduler.num_preemptions > 0
    assert results == expected(sequences_of(prompts))


def test_as_many_blocks_as_are_wanted_preempt_no_sequence():
    """Two sequences of two blocks in a cache of four, whose last is taken by the second's last token."""
    results, scheduler, _ = run(sequences_of([([i], 1, 8) for i in range(2)]), rows=2, budget=8, num_blocks=4)
    assert scheduler.num_preemptions == 0
    _, scheduler, _ = run(sequences_of([([i], 1, 8) for i in range(2)]), rows=2, budget=8, num_blocks=3)
    assert scheduler.num_preemptions == 1


def test_a_budget_that_decode_leaves_nothing_of_is_kept_to():
    """Two that lack a token, and two prompts of which the first takes what is left of the step."""
    sequences = sequences_of([([1, 2], 1, 9), ([3], 1, 9), (list(range(9)), 1, 1), (list(range(10, 19)), 1, 1)])
    table = SequenceTable(4, BLOCK)
    scheduler, model = Scheduler(table, BlockManager(32, BLOCK), 6), FakeModel(32)
    counts = []
    for sequence in sequences:
        scheduler.add(sequence)
    while (step := scheduler.schedule()) is not None:
        counts.append(step.counts.tolist())
        scheduler.update(step, *model.run(step, table))
    # 3 of the third prompt, 4 more, then its last 2 and 2 of the fourth, which is done after 4 and 3 more.
    assert counts[:5] == [[2, 1, 3], [1, 1, 4], [1, 1, 2, 2], [1, 1, 4], [1, 1, 3]]
    assert counts[5:] == [[1, 1]] * 4


def test_chunks_of_running_prompts_wait_for_a_step_with_room():
    table = SequenceTable(2, BLOCK)
    scheduler = Scheduler(table, BlockManager(32, BLOCK), 4)
    for sequence in sequences_of([(list(range(10)), 1, 1), (list(range(20, 30)), 1, 1)]):
        scheduler.add(sequence)
    model, taken = FakeModel(32), []
    while (step := scheduler.schedule()) is not None:
        taken.append(list(zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)))
        scheduler.update(step, *model.run(step, table))
    assert taken == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2), (1, 0, 2)], [(1, 2, 4)], [(1, 6, 4)]]


def test_the_preempted_comes_back_before_those_that_never_ran():
    sequences = sequences_of([([i], 1, 8) for i in range(3)])
    table = SequenceTable(2, BLOCK)
    scheduler, model = Scheduler(table, BlockManager(3, BLOCK), 8), FakeModel(3)
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.num_preemptions:
        step = scheduler.schedule()
        scheduler.update(step, *model.run(step, table))
    assert list(scheduler.waiting) == sequences[1:] and len(sequences[1].token_ids) == 5


def test_a_further_turn_comes_after_the_preempted_and_before_those_that_never_ran():
    preempted, fresh, turn, later = sequences_of([([i], 1, 8) for i in range(4)])
    preempted.token_ids = np.int32([0, 5])
    turn.continues = later.continues = True
    scheduler = Scheduler(SequenceTable(2, BLOCK), BlockManager(3, BLOCK), 8)
    for sequence in (preempted, fresh, turn, later):
        scheduler.add(sequence)
    assert list(scheduler.waiting) == [preempted, turn, later, fresh]


def decoding(num_blocks, lengths):
    """A scheduler in which sequences of these lengths decode, with max_tokens to come."""
    sequences = sequences_of([([i] * length, 1, 16) for i, length in enumerate(lengths)])
    scheduler, model = Scheduler(SequenceTable(4, BLOCK), BlockManager(num_blocks, BLOCK), 64), FakeModel(num_blocks)
    for sequence in sequences:
        scheduler.add(sequence)
    step = scheduler.schedule()
    scheduler.update(step, *model.run(step, scheduler.table))
    return scheduler, model


def test_all_that_are_preempted_come_back_in_the_order_of_their_admission():
    scheduler, _ = decoding(20, [3, 6, 2])
    scheduler.add(sequences_of([([9], 1, 8)])[0])
    admitted = scheduler.table.sequences[scheduler.running].tolist()
    scheduler.preempt_all()
    assert list(scheduler.waiting)[:3] == admitted and len(scheduler.waiting) == 4
    assert [len(each.prompt) for each in admitted] == [3, 6, 2]


def test_blocks_are_reserved_for_tokens_to_come():
    scheduler, _ = decoding(20, [3, 6])
    rows, table = scheduler.running, scheduler.table
    reserved = scheduler.row_blocks.reserve(rows, np.array([5, 8]), np.array([17, 12]))
    indices, columns, blocks = (values.tolist() for values in reserved)
    # Blocks for 17 and 12 tokens are 5 and 3, of which one and two are there.
    assert indices == [0, 0, 0, 0, 1] and columns == [1, 2, 3, 4, 2] and table.num_blocks[rows].tolist() == [5, 3]
    assert table.block_tables[rows[0], 1:5].tolist() + table.block_tables[rows[1], 2:3].tolist() == blocks
    assert scheduler.blocks.num_free == 12
    # Half of the free blocks are not enough for 41 tokens, so there are blocks for 21; then for none.
    indices, _, _ = scheduler.row_blocks.reserve(rows, np.array([21, 12]), np.array([21, 41]))
    assert indices.tolist() == [0] and scheduler.blocks.num_free == 11
    assert scheduler.row_blocks.reserve(rows, np.array([80, 12]), np.array([80, 12])) is None
    assert scheduler.blocks.num_free == 11 and table.num_blocks[rows].tolist() == [6, 3]


def test_reserved_blocks_are_given_back_before_one_is_preempted():
    scheduler, model = decoding(6, [3, 7])
    rows = scheduler.running
    scheduler.row_blocks.reserve(rows, np.array([15, 8]), np.array([15, 8]))
    assert scheduler.blocks.num_free == 0
    step = scheduler.schedule()
    scheduler.update(step, *model.run(step, scheduler.table))
    # The second one begins a block.
    step = scheduler.schedule()
    assert scheduler.num_preemptions == 0 and step.starts.tolist() == [4, 8]
    assert scheduler.table.num_blocks[rows].tolist() == [2, 3] and scheduler.blocks.num_free == 1


def test_whether_a_sequence_can_be_admitted_counts_reserved_blocks_as_free():
    scheduler, _ = decoding(8, [3])
    rows = scheduler.running
    scheduler.add(sequences_of([([9] * 14, 1, 4)])[0])
    # Four blocks, and one for the sequence that runs.
    assert scheduler.can_admit(1)
    scheduler.row_blocks.reserve(rows, np.array([18]), np.array([18]))
    assert scheduler.blocks.num_free == 3 and scheduler.can_admit(1)
    # With nine tokens more, 13, it needs four of its five blocks itself.
    assert scheduler.can_admit(8) and not scheduler.can_admit(9)
    scheduler.free_rows.clear()
    assert not scheduler.can_admit(1)
    # A sequence that ends before has no blocks for those tokens, and takes none of what another has reserved.
    scheduler, _ = decoding(9, [3, 3])
    scheduler.row_blocks.reserve(scheduler.running[:1], np.array([18]), np.array([18]))
    scheduler.add(sequences_of([([9] * 10, 1, 4)])[0])
    assert scheduler.blocks.num_free == 3 and scheduler.can_admit(5) and not scheduler.can_admit(9)


def test_drafts_end_with_the_block_of_states():
    """With linear attention; a token at its end has none, for the next one begins another state."""
    for length, count in ((STATE_BLOCK - 3, 2), (STATE_BLOCK - 1, 0)):
        scheduler, _ = decoding(40, [length])
        step, drafts = scheduler.schedule(), [[1, 2, 3]]
        assert scheduler.add_drafts(step, drafts).counts.tolist() == [4]
        scheduler.row_blocks.pages = object()
        assert scheduler.add_drafts(step, drafts).counts.tolist() == [1 + count]


def test_a_state_is_found_once_the_token_after_it_is_computed():
    table = SequenceTable(1, BLOCK, 2 * STATE_BLOCK)
    pages, hashes = StatePages(table, 3), list(range(100, 132))
    assert pages.begin(0, hashes, 0, STATE_BLOCK + 1)
    pages.note(np.array([0]), np.array([STATE_BLOCK]))
    assert pages.match(hashes, len(hashes)) == 0
    pages.note(np.array([0]), np.array([STATE_BLOCK + 1]))
    assert pages.match(hashes, len(hashes)) == 1


def test_a_state_that_older_weights_have_begun_is_not_found():
    table = SequenceTable(1, BLOCK, 2 * STATE_BLOCK)
    pages, hashes = StatePages(table, 3), list(range(100, 132))
    assert pages.begin(0, hashes, 0, STATE_BLOCK + 1)
    pages.forget()
    pages.note(np.array([0]), np.array([STATE_BLOCK + 1]))
    assert pages.match(hashes, len(hashes)) == 0


def test_a_state_that_is_kept_takes_no_second_page():
    pages = StatePages(SequenceTable(2, BLOCK, 2 * STATE_BLOCK), 4)
    for row in range(2):
        pages.begin(row, [], 0, 1)
    pages.keep_last(0, 1, 7)
    own, free = pages.own.tolist(), list(pages.free)
    pages.keep_last(1, 1, 7)
    assert (pages.own.tolist(), list(pages.free), pages.page_of_hash) == (own, free, {7: 0}) and own == [2, 1]


def test_a_sequence_that_is_taken_off_before_its_state_is_computed_leaves_none():
    table = SequenceTable(1, BLOCK, 3 * STATE_BLOCK)
    pages, hashes = StatePages(table, 3), list(range(100, 132))
    assert pages.begin(0, hashes, 0, STATE_BLOCK + 1)
    pages.end(0)
    # Another one has its row, and no such prompt.
    assert not pages.begin(0, list(range(200, 210)), 0, 5)
    pages.note(np.array([0]), np.array([STATE_BLOCK + 1]))
    assert pages.match(hashes, len(hashes)) == 0


def test_admission_leaves_a_block_for_each_that_runs():
    scheduler = Scheduler(SequenceTable(4, BLOCK), BlockManager(4, BLOCK), 8)
    for sequence in sequences_of([([i], 1, 8) for i in range(4)]):
        scheduler.add(sequence)
    assert len(scheduler.schedule().rows) == 2 and len(scheduler.waiting) == 2


def test_decode_goes_on_while_a_long_prompt_is_computed_in_chunks():
    sequences = sequences_of([([1, 2], 1, 12), (list(range(30)), 1, 1)])
    table = SequenceTable(2, BLOCK)
    scheduler, model = Scheduler(table, BlockManager(32, BLOCK), 8), FakeModel(32)
    for sequence in sequences:
        scheduler.add(sequence)
    steps = []
    while (step := scheduler.schedule()) is not None:
        steps.append((step.counts.tolist(), step.samples.tolist()))
        scheduler.update(step, *model.run(step, table))
    assert steps[:5] == [([2, 6], [True, False])] + [([1, 7], [True, False])] * 3 + [([1, 3], [True, True])]
    assert steps[5:] == [([1], [True])] * 7


def test_completions_of_one_prompt_compute_it_once():
    prompt = list(range(4 * BLOCK + 2))
    results, _, model = run(sequences_of([(prompt, 4, 1)]), rows=8, budget=64)
    assert model.num_tokens == len(prompt) + 3 * 2
    assert results == expected(sequences_of([(prompt, 4, 1)]))
    # A prompt that ends with a block: that block is computed by each, for the row the first token is sampled from.
    _, _, model = run(sequences_of([(prompt[:-2], 4, 1)]), rows=8, budget=64)
    assert model.num_tokens == 4 * BLOCK + 3 * BLOCK


def test_completions_of_one_prompt_begin_with_it_where_a_step_has_room_for_it():
    prompt = list(range(4 * BLOCK + 2))
    for budget, steps in [(64, [[18, 2, 2]]), (20, [[18, 2], [1, 1, 2]]), (16, [[16], [2], [1, 2, 2]])]:
        scheduler, model = Scheduler(SequenceTable(8, BLOCK), BlockManager(32, BLOCK), budget), FakeModel(32)
        for sequence in sequences_of([(prompt, 3, 4)]):
            scheduler.add(sequence)
        for counts in steps:
            step = scheduler.schedule()
            assert step.counts.tolist() == counts
            scheduler.update(step, *model.run(step, scheduler.table))


def test_completions_of_one_prompt_are_a_prefix_group():
    requests = [(list(range(9)), 3, 6), ([*range(50, 59)], 2, 4), ([3], 1, 8)]
    results, _, model = run(sequences_of(requests), budget=64, sharing=PrefixSharing((2, 4), 2 * BLOCK))
    assert results == expected(sequences_of(requests))
    # Prefill, of all at once; then all lack one token, until the groups end.
    assert model.largest == [1, 3, 3, 3, 3, 3, 1, 1]
    _, _, model = run(sequences_of(requests), budget=64, sharing=PrefixSharing((), 0))
    assert set(model.largest) == {1}


def test_prefix_groups_are_searched_again_only_when_others_run(monkeypatch):
    calls = []
    found = scheduler_module.find_prefix_groups
    monkeypatch.setattr(scheduler_module, "find_prefix_groups", lambda *a: calls.append(len(a[1])) or found(*a))
    run(
        sequences_of([(list(range(9)), 3, 30), ([*range(50, 59)], 2, 20)]),
        budget=64,
        sharing=PrefixSharing((4,), BLOCK),
    )
    assert calls == [5, 3]


def test_prefixes_are_found_by_a_later_run_and_not_under_another_policy():
    blocks, model = BlockManager(32, BLOCK), FakeModel(32)
    prompt = list(range(3 * BLOCK + 1))
    for policy, tokens in [(0, 13), (0, 1), (1, 13), (1, 1)]:
        before = model.num_tokens
        run(sequences_of([(prompt, 1, 1)]), blocks=blocks, model=model, num_blocks=32, policy_version=policy)
        assert model.num_tokens - before == tokens


def test_prefixes_are_found_by_requests_of_their_adapter_and_salt_alone():
    blocks, model = BlockManager(64, BLOCK), FakeModel(64)
    prompt = np.arange(3 * BLOCK + 1, dtype=np.int32)
    for adapter in ((-1, ""), (-1, "a"), (0, ""), (1, ""), (0, "a"), (1, "a"), (1, "b")):
        for tokens in (13, 1):
            before = model.num_tokens
            sequence = Sequence(0, 0, prompt, SamplingParams(max_tokens=1), (0, 0), 14, (), adapter)
            run([sequence], blocks=blocks, model=model, num_blocks=64)
            assert model.num_tokens - before == tokens, adapter


def test_generated_blocks_are_found_too():
    blocks, model = BlockManager(32, BLOCK), FakeModel(32)
    results, _, _ = run(sequences_of([([5, 6, 7], 1, 10)]), blocks=blocks, model=model, num_blocks=32)
    longer = [5, 6, 7, *results[0, 0][0]]
    before = model.num_tokens
    run(sequences_of([(longer, 1, 1)]), blocks=blocks, model=model, num_blocks=32)
    assert model.num_tokens - before == 1


def test_stop_strings_are_checked_and_reasons_recorded():
    sequences = sequences_of([([1], 1, 6), ([2], 1, 6)])
    object.__setattr__(sequences[1].params, "stop", ("x",))
    results, _, _ = run(sequences, has_stop_string=lambda sequence, ids: len(ids) == 3)
    assert [(len(ids), reason) for ids, reason in results.values()] == [(3, "stop"), (6, "length")]


def test_a_sequence_that_cannot_fit_is_refused():
    scheduler = Scheduler(SequenceTable(2, BLOCK), BlockManager(3, BLOCK), 8)
    scheduler.add(sequences_of([([1], 1, 12)])[0])
    scheduler.add(sequences_of([([1, 2], 1, 12)])[0])
    with pytest.raises(ValueError, match="4 blocks in a cache of 3"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="2 tokens a step for 3 sequences"):
        Scheduler(SequenceTable(3, BLOCK), BlockManager(3, BLOCK), 2)
