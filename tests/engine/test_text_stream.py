"""Incremental detokenization, stop strings that are held back, and fields that are lists and arrays; no model."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.engine.requests.lazy_list import LazyList, LogprobList
from rlnumba.engine.requests.text_stream import TextOptions, TextStream


class LetterTokenizer:
    """28 token ids: 0 to 25 are letters, 26 is half of a two-byte UTF-8 character, 27 a special token."""

    decodes_piecewise = True

    def decode(self, ids, skip):
        text = "".join("-" if n == 27 else "#" if n == 26 else chr(97 + n) for n in ids if n != 27 or not skip)
        return text.replace("##", "ä").replace("#", "\N{REPLACEMENT CHARACTER}")


def pieces(stop, *fed, skip=True, tokenizer=None):
    stream = TextStream(tokenizer or LetterTokenizer(), TextOptions(stop, skip))
    return [stream.feed(list(ids)) for ids in fed] + [stream.end(SimpleNamespace(text="abcde"))]


def test_the_end_of_a_text_that_a_stop_string_may_begin_with_is_held():
    assert pieces((), [0], [1, 2], [3]) == ["a", "bc", "d", "e"]
    assert pieces(("bcd",), [0], [1], [2], [4]) == ["a", "", "", "bce", "e"]
    # The longest that may be one, of any of the stop strings; the whole text may be.
    assert pieces(("cx", "bcx"), [0, 1, 2]) == ["a", "bcde"]
    assert pieces(("bcx", "cx"), [0, 1, 2]) == ["a", "bcde"]
    assert pieces(("abcx",), [0, 1, 2]) == ["", "abcde"] and pieces(("abc",), [0, 1, 2]) == ["", "abcde"]
    assert pieces(("xa", "x"), [0]) == ["a", "bcde"]


def test_parts_of_characters_are_held_and_special_tokens_are_not_shown():
    assert pieces((), [0, 26], [26], [1]) == ["", "aä", "b", "de"]
    assert pieces((), [0, 27], [1]) == ["a", "b", "cde"] and pieces((), [0, 27], skip=False)[0] == "a-"
    assert pieces((), [27], [0]) == ["", "a", "bcde"]


def test_texts_that_cannot_be_taken_apart_come_at_once():
    whole = SimpleNamespace(decodes_piecewise=False)
    assert pieces((), [0], [1], tokenizer=whole) == ["", "", "abcde"]
    stream = TextStream(None, TextOptions())
    assert stream.feed([1]) == ""
    delta = SimpleNamespace(token_ids=[2], completion=None)
    assert stream.piece(delta) == "" and TextStream(LetterTokenizer(), TextOptions()).piece(delta) == "c"
    assert stream.piece(SimpleNamespace(token_ids=[2], completion=SimpleNamespace(text="cd"))) == "cd"


@dataclass
class Fields:
    logprobs: list = LogprobList(np.float32)
    ids: list = LazyList(np.int32, ())
    top_logprobs: list | None = None


def test_lists_and_arrays_of_a_field():
    array = np.array([1, 2], np.int32)
    found = Fields([0.5], array)
    assert Fields.ids == () and Fields(None).ids == []
    assert Fields.__dict__["ids"].array_of(found) is array and found.ids == [1, 2] and found.ids is found.ids
    found.ids = (3, 4)
    assert found.ids == [3, 4] and Fields.__dict__["ids"].array_of(found).tolist() == [3, 4]
    assert Fields.__dict__["ids"].array_of(found).dtype == np.int32
    found.ids = np.array([5], np.int64)
    assert Fields.__dict__["ids"].array_of(found).dtype == np.int32 and found.ids == [5] and type(found.ids[0]) is int


def test_log_probs_may_be_none_or_listed():
    field = Fields.__dict__["logprobs"]
    found = Fields(None)
    assert found.logprobs is None and field.is_none(found) and field.array_of(found).shape == (0,)
    assert field.array_of(found).dtype == np.float32
    found.logprobs = [0.5]
    assert found.logprobs == [0.5] and not field.is_none(found) and field.array_of(found).tolist() == [0.5]
    found.top_logprobs = [{3: 0.5}]
    assert found.logprobs == [{3: 0.5}] and field.array_of(found).tolist() == [0.5]
    with pytest.raises(TypeError):
        Fields(ids=[1])
