"""find_prefix_groups against a plain program."""

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.engine.blocks.prefix_groups import MIN_SAVED_SHARE, find_prefix_groups
from rlnumba.kernels.attention.paged import PrefixSharing

BLOCK = 4
SHARING = PrefixSharing((2, 4), 2 * BLOCK)


def expected_groups(tables, contexts, sharing):
    """{frozenset of sequences: segments in common}, those that share most first, in the order of the step."""
    per_segment, most = sharing.keys // BLOCK, sharing.sizes[-1]
    groups, left = {}, set(range(len(contexts)))
    for depth in range(max(contexts) // sharing.keys, 0, -1):
        alike = defaultdict(list)
        for i in sorted(left):
            if contexts[i] - 1 >= depth * sharing.keys:
                alike[tuple(tables[i][: depth * per_segment])].append(i)
        for sequences in alike.values():
            for start in range(0, len(sequences), most):
                part = sequences[start : start + most]
                if len(part) > 1:
                    groups[frozenset(part)] = depth
                    left -= set(part)
    return groups


@st.composite
def steps(draw):
    """(block tables, contexts) of sequences that took over some blocks of an earlier one, maybe not from the start."""
    width = 6 * SHARING.keys // BLOCK
    count = draw(st.integers(1, 14))
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    for i in range(1, count):
        first = draw(st.sampled_from([0, 0, 0, 0, 1]))
        taken = draw(st.sampled_from([0, 1, 2, 3, 4, 4, 5, 6, 12]))
        tables[i, first:taken] = tables[draw(st.integers(0, i - 1)), first:taken]
    contexts = draw(st.lists(st.integers(1, width * BLOCK), min_size=count, max_size=count))
    return tables, np.array(contexts)


@settings(max_examples=300, deadline=None)
@given(steps())
def test_groups_are_those_of_a_plain_program(step):
    tables, contexts = step
    expected = expected_groups(tables.tolist(), contexts.tolist(), SHARING)
    saved = sum((len(group) - 1) * depth for group, depth in expected.items())
    segments = sum(-(-context // SHARING.keys) for context in contexts.tolist())
    found = find_prefix_groups(tables, contexts, BLOCK, SHARING)
    if not saved or saved < MIN_SAVED_SHARE * segments:
        assert found is None
        return
    assert sorted(found.order.tolist()) == list(range(len(contexts)))
    order, common, group_sizes = (x.tolist() for x in (found.order, found.shared_prefix_lens, found.group_sizes))
    assert found.shared_prefix_lens.dtype == found.group_sizes.dtype == np.int32
    actual, first = {}, 0
    while first < len(order):
        size = group_sizes[first]
        assert size > 0 and not any(group_sizes[first + 1 : first + size])
        assert len(set(common[first : first + size])) == 1
        if size > 1:
            actual[frozenset(order[first : first + size])] = common[first] // SHARING.keys
            assert common[first] % SHARING.keys == 0
        else:
            assert common[first] == 0
        first += size
    assert actual == expected
    largest = max(map(len, expected))
    assert found.max_group_size == min(size for size in SHARING.sizes if size >= largest)


def test_completions_of_two_prompts_and_another_sequence():
    tables = np.arange(50, dtype=np.int32).reshape(5, 10)
    tables[3, :4], tables[4, :5] = tables[1, :4], tables[0, :5]
    found = find_prefix_groups(tables, np.array([30, 17, 12, 40, 21]), BLOCK, SHARING)
    assert found.order.tolist() == [0, 4, 1, 3, 2] and found.group_sizes.tolist() == [2, 0, 2, 0, 1]
    assert found.shared_prefix_lens.tolist() == [16, 16, 16, 16, 0] and found.max_group_size == 2


def test_the_block_of_the_new_token_is_not_shared():
    """A context that ends with a segment has its newest key in it."""
    tables = np.zeros((2, 2), np.int32)
    assert find_prefix_groups(tables, np.array([8, 9]), BLOCK, SHARING) is None
    assert find_prefix_groups(tables, np.array([9, 9]), BLOCK, SHARING).shared_prefix_lens.tolist() == [8, 8]


def test_little_in_common_is_not_worth_a_group():
    tables = np.arange(20 * 2, dtype=np.int32).reshape(20, 2)
    tables[7] = tables[3]
    contexts = np.full(20, 8)
    contexts[[3, 7]] = 9
    assert find_prefix_groups(tables, contexts, BLOCK, SHARING) is None
    # Exactly an eighth of what is read is enough.
    for others, sizes in ((5, None), (4, [2, 0, 1, 1, 1, 1])):
        chosen = [3, 7, *range(8, 8 + others)]
        found = find_prefix_groups(tables[chosen], contexts[chosen], BLOCK, SHARING)
        assert (found if found is None else found.group_sizes.tolist()) == sizes
    assert find_prefix_groups(tables[[3, 7, 0]], contexts[[3, 7, 0]], BLOCK, SHARING).group_sizes.tolist() == [2, 0, 1]
