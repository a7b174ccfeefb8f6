"""Trees of sequences that begin alike: every row is there once, in its place, with the tokens before it."""

import numpy as np
import pytest

from rlnumba.data.prefix_tree import PrefixRule, PrefixTree

SYSTEM, PROMPTS = [1] * 32, ([2] * 18, [3] * 40)
# Two prompts that begin alike, two completions of each, and a sequence of its own.
SEQUENCES = [[*SYSTEM, *prompt, *[end] * 5] for prompt in PROMPTS for end in (4, 5)] + [[9] * 20]
FIRST_ROWS = [len(SYSTEM) + len(prompt) - 1 for prompt in PROMPTS for _ in range(2)] + [3]


def tree_of(sequences, rows_of, sharing):
    """The tree of token lists, the rows of each with targets given, and their cu_seqlens."""
    bounds = np.cumsum([0, *map(len, sequences)])
    rows = np.concatenate([start + np.array(rows, int) for start, rows in zip(bounds, rows_of, strict=False)])
    return PrefixTree(
        np.array([token for each in sequences for token in each], np.int32), bounds, rows, sharing
    ), bounds


def after_prompts(sequences, firsts):
    return [range(first, len(each) - 1) for each, first in zip(sequences, firsts, strict=True)]


def nodes_of(tree):
    nodes, parents = tree.packed()
    return [(node.members, node.start, node.end, parent) for node, parent in zip(nodes, parents, strict=True)]


def test_a_tree_of_depth_3():
    tree, _ = tree_of(SEQUENCES, after_prompts(SEQUENCES, FIRST_ROWS), PrefixRule(16))
    assert nodes_of(tree) == [
        *[([0, 1, 2, 3], 0, 32, -1), ([0, 1], 32, 48, 0), ([0], 48, 55, 1), ([1], 48, 55, 1)],
        *[([2, 3], 32, 64, 0), ([2], 64, 77, 4), ([3], 64, 77, 4), ([4], 0, 20, -1)],
    ]
    # A multiple of 64 has none of it but the first token lists' 64 tokens, of which 2 and 3 have 64.
    tree, _ = tree_of(SEQUENCES, after_prompts(SEQUENCES, FIRST_ROWS), PrefixRule(64))
    assert [members for members, *_ in nodes_of(tree)] == [[0], [1], [2, 3], [2], [3], [4]]


def test_parents_without_parents_save_what_they_can():
    """Either all have the first 32 tokens once, or each prompt is there once: whatever is less."""
    tree, _ = tree_of(SEQUENCES, after_prompts(SEQUENCES, FIRST_ROWS), PrefixRule(16, levels=2))
    assert nodes_of(tree)[:2] == [([0, 1], 0, 48, -1), ([0], 48, 55, 0)]
    assert sum(node.num_tokens for node in tree.roots) == 48 + 2 * 7 + 64 + 2 * 13 + 20
    four = [[*SYSTEM, *[prompt] * 20, 6] for prompt in (2, 2, 3, 4, 5)]
    tree, _ = tree_of(four, after_prompts(four, [51] * 5), PrefixRule(16, levels=2))
    assert nodes_of(tree) == [([0, 1, 2, 3, 4], 0, 32, -1), *[([i], 32, 53, 0) for i in range(5)]]


def test_three_levels_save_what_they_can():
    """Of four nodes above one another, as the histories of an episode are, three are left: those of least tokens."""
    ends = 32, 32 + 16, 32 + 16 + 48
    sequences = [[1] * ends[0] + [2] * 20, [1] * ends[1] + [3] * 20, [1] * ends[2] + [4] * 5, [1] * ends[2] + [5] * 5]
    rows = after_prompts(sequences, [len(each) - 3 for each in sequences])
    tree, _ = tree_of(sequences, rows, PrefixRule(16))
    assert [end for _, _, end, parent in nodes_of(tree) if parent >= 0] == [52, 48, 68, 96, 101, 101]
    tree, _ = tree_of(sequences, rows, PrefixRule(16, levels=3))
    # Without the node of 16 tokens these are there twice, without that of 48 they are there three times.
    assert nodes_of(tree) == [
        *[([0, 1, 2, 3], 0, 32, -1), ([0], 32, 52, 0), ([1], 32, 68, 0)],
        *[([2, 3], 32, 96, 0), ([2], 96, 101, 3), ([3], 96, 101, 3)],
    ]


def test_an_earlier_turn_is_shared_with_what_follows_it():
    """A row that predicts a target of one conversation is a row of the other's history."""
    first = [*[1] * 20, *[2] * 40]
    second = [*first, 3, 4, 5]
    rows = [range(19, 59), range(60, 62)]
    tree, _ = tree_of([first, second], rows, PrefixRule(16))
    assert nodes_of(tree) == [([0, 1], 0, 48, -1), ([0], 48, 60, 0), ([1], 48, 63, 0)]
    # Where both have targets, neither has the other's rows.
    tree, _ = tree_of([first, second], [rows[0], range(40, 62)], PrefixRule(16))
    assert nodes_of(tree)[0] == ([0, 1], 0, 32, -1)


@pytest.mark.parametrize("sharing", [PrefixRule(4), PrefixRule(4, levels=2), PrefixRule(4, levels=3), PrefixRule(8)])
def test_random_sequences(rng, sharing):
    for _ in range(200):
        sequences, count = [], rng.integers(1, 9)
        for _ in range(count):
            before = sequences[rng.integers(len(sequences))] if sequences and rng.random() < 0.8 else []
            sequences.append([*before[: rng.integers(len(before) + 1)], *rng.integers(0, 2, rng.integers(1, 12))])
        rows_of = [np.sort(rng.choice(len(each), rng.integers(len(each) + 1), replace=False)) for each in sequences]
        tree, bounds = tree_of(sequences, rows_of, sharing)
        kept, places = tree.places()
        (nodes, parents), ids = tree.packed(), np.concatenate(sequences)
        lengths = np.array([node.end - node.start for node in nodes])
        starts = np.cumsum(lengths) - lengths
        assert len(kept) == sum(lengths) == sum(node.num_tokens for node in tree.roots) <= len(ids)
        assert (len(kept) < len(ids)) == tree.shares and (lengths > 0).all()
        for i in range(count):
            # The node of a sequence alone, and what it has before it, are the sequence.
            path = [next(n for n, node in enumerate(nodes) if node.members == [i] and not node.children)]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
                assert nodes[path[0]].end % sharing.multiple == 0
            assert len(path) <= sharing.levels
            own = np.concatenate([starts[n] + np.arange(lengths[n]) for n in path])
            np.testing.assert_array_equal(ids[kept[own]], sequences[i])
            np.testing.assert_array_equal(places[bounds[i] : bounds[i + 1]], own)
        targets = np.concatenate([places[start + rows] for start, rows in zip(bounds, rows_of, strict=False)])
        assert len(set(targets.tolist())) == len(targets)
