"""Drafts by n-gram lookup: the index against a search through all texts, and what it is good for."""

import numpy as np
import pytest

from rlnumba.engine.ngram import NgramIndex


def index_of(prompt, shortest, longest):
    index = NgramIndex(prompt, shortest, longest)
    assert index.enter_prompt(len(prompt) + 1) == len(prompt)
    return index


def test_what_followed_the_last_tokens_is_proposed():
    index = index_of([1, 2, 3, 4, 5], 2, 3)
    index.extend(0, [9, 2, 3])
    assert index.propose(0, 2) == [4, 5]
    # The prompt ends there: no draft beyond what followed.
    assert index.propose(0, 9) == [4, 5]
    index.extend(0, [7])
    assert index.propose(0, 2) == []


def test_the_longest_ngram_counts_then_the_latest():
    index = index_of([1, 2, 3, 10, 8, 2, 3, 11], 2, 3)
    index.extend(0, [1, 2, 3])
    assert index.propose(0, 1) == [10]
    index.extend(0, [12, 2, 3])
    # Not after 12 2 3, which is new.
    assert index.propose(0, 1) == [12]


def test_other_completions_of_the_request_are_looked_up():
    index = index_of([1, 2], 2, 4)
    index.extend(0, [5, 6, 7, 8])
    index.extend(1, [])
    assert index.propose(1, 3) == [5, 6, 7]
    index.extend(1, [5, 9, 6, 7])
    assert index.propose(1, 3) == [8]
    assert index.propose(0, 3) == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_text_with_a_period_goes_on_with_it(period):
    text = (list(range(period)) * 12)[:14]
    index = index_of(text[:3], 2, 4)
    index.extend(0, text[3:])
    assert index.propose(0, 9) == [i % period for i in range(14, 23)]


def test_a_prompt_shorter_than_an_ngram():
    index = index_of([1], 2, 4)
    index.extend(0, [])
    assert index.propose(0, 4) == []
    index.extend(0, [1, 1])
    assert index.propose(0, 2) == [1, 1]


def test_a_prompt_is_entered_in_parts():
    prompt = list(range(10)) * 2
    index = NgramIndex(prompt, 2, 4)
    assert [index.enter_prompt(count) for count in (1, 3, 0, 9, 20, 20)] == [1, 3, 0, 9, 7, 0]
    assert index.followers == index_of(prompt, 2, 4).followers


def searched(texts, own, shortest, longest):
    """Where (text, index) the drafts of texts[own] may come from: what follows its longest n-gram that occurs."""
    for length in range(longest, shortest - 1, -1):
        end = texts[own][-length:]
        found = [
            (number, position)
            for number, text in enumerate(texts)
            for position in range(length, len(text))
            if len(end) == length and text[position - length : position] == end
        ]
        if found:
            return found
    return []


def test_drafts_are_those_of_a_search_through_all_texts():
    rng = np.random.default_rng(0)
    num_matches = 0
    for _ in range(30):
        prompt = rng.integers(0, 5, rng.integers(1, 12)).tolist()
        shortest = int(rng.integers(1, 3))
        longest = shortest + int(rng.integers(0, 3))
        index, texts = index_of(list(prompt), shortest, longest), [list(prompt) for _ in range(3)]
        for completion in range(3):
            index.extend(completion, [])
        for _ in range(20):
            completion = int(rng.integers(3))
            added = rng.integers(0, 5, rng.integers(0, 4)).tolist()
            index.extend(completion, added)
            texts[completion] += added
            for own in range(3):
                drafts = index.propose(own, 4)
                found = searched(texts, own, shortest, longest)
                assert bool(drafts) == bool(found)
                num_matches += bool(found)
                continuations = [
                    (texts[number][position:] + (drafts if number == own else []))[: len(drafts)]
                    for number, position in found
                ]
                assert not found or drafts in continuations
    assert num_matches > 300
