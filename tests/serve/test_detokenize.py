"""The pieces of a text are the text, however its tokens come."""

from pathlib import Path

import pytest

from rlnumba.engine.requests.text_stream import TextOptions, TextStream
from rlnumba.engine.sequence import Completion
from rlnumba.model.tokenizer import Tokenizer

FOLDER = Path(__file__).parent.parent / "golden" / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(FOLDER)


@pytest.mark.parametrize("stop", [(), ("lo", "world",), ("日x", "語。"), ("zz",)], ids=str)  # fmt: skip
@pytest.mark.parametrize("step", [1, 2, 5])
def test_pieces_are_the_text(tokenizer, rng, stop, step):
    texts = ["hello world, hel", "日本語 é\N{GRINNING FACE} 語", "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}"]
    lists = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    lists += [rng.integers(0, tokenizer.backend.get_vocab_size(), 60).tolist() for _ in range(8)]
    for ids in lists:
        whole = tokenizer.decode(ids)
        found = [end for end in (whole.find(each) for each in stop) if end >= 0]
        # As the engine does, draw until the text has a stop string.
        if found:
            count = next(n for n in range(1, len(ids) + 1) if any(each in tokenizer.decode(ids[:n]) for each in stop))
            ids = ids[:count]
            whole = tokenizer.decode(ids)
            whole = whole[: min(end for end in (whole.find(each) for each in stop) if end >= 0)]
        stream, text = TextStream(tokenizer, TextOptions(stop)), ""
        for start in range(0, len(ids) - 1, step):
            text += stream.feed(ids[start : min(start + step, len(ids) - 1)])
            assert whole.startswith(text)
        text += stream.end(Completion(ids, [], "stop", whole))
        assert text == whole


def test_pieces_of_words_that_lose_a_space_at_the_beginning():
    """As SentencePiece's: a token's text depends on whether there is one before it."""

    class Words:
        decodes_piecewise = True

        def decode(self, ids, skip_special_tokens=True):
            return "".join(f" {'abc'[i]}" for i in ids)[1:]

    stream = TextStream(Words(), TextOptions())
    assert [stream.feed([0]), stream.feed([1]), stream.feed([2, 0]), stream.feed([1])] == ["a", " b", " c a", " b"]
