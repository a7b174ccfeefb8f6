"""Rows of preferences, paired and not, against hand-made rows and a tokenizer of words."""

import json
import types

import pytest

from rlnumba.config import DataConfig
from rlnumba.data import unpaired
from rlnumba.data.pairs import LongPairs, load_pairs, truncated
from rlnumba.data.unpaired import load_unpaired
from rlnumba.errors import UserError
from tests.test_data import WordTokenizer, write

USER, BLUE, GREEN = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "b"), ("assistant", "g")))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def load(path, rows, tokenizer=None, limit=1000, data_config=None, eos_token_ids=(), **keys):
    config = data_config or DataConfig(train=str(path))
    long = LongPairs(**{"max_length": 1024, "truncation_mode": "keep_start"} | keys)
    return load_pairs(write(path, rows), config, long, tokenizer or WordTokenizer(), limit, 1000, eos_token_ids)


def texts(path, row, **settings):
    """The words of the prompt, of chosen and of rejected of a file's one row."""
    tokenizer = settings.setdefault("tokenizer", WordTokenizer())
    (pair,) = load(path, [row], **settings).rows
    return [tokenizer.text(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)]


def test_strings_are_tokenised_with_their_prompt_and_end_with_eos(path):
    row = {"prompt": "a b ", "chosen": "c", "rejected": "d </s>"}
    assert texts(path, row) == ["<s> a b", "c </s>", "d </s>"]
    assert texts(path, row | {"chosen": ""}) == ["<s> a b", "</s>", "d </s>"]


def test_a_token_that_the_model_ends_with_is_eos_too(path):
    tokenizer = WordTokenizer()
    ends = tokenizer.encode("c")[1]
    row = {"prompt": "a b ", "chosen": "c", "rejected": "d"}
    assert texts(path, row, tokenizer=tokenizer, eos_token_ids=(ends,)) == ["<s> a b", "c", "d </s>"]
    tokenizer.eos_token_id = None
    assert texts(path, row, tokenizer=tokenizer, eos_token_ids=(ends,)) == ["<s> a b", "c", "d c"]
    assert texts(path, row, tokenizer=tokenizer) == ["<s> a b", "c", "d"]


def test_both_sides_begin_where_the_shorter_agreement_with_the_prompt_ends(path):
    # "ab" and "cd" are one token, so chosen takes a token of the prompt, and rejected begins there too.
    row = {"prompt": "a ab", "chosen": "cd e", "rejected": " f"}
    assert texts(path, row) == ["<s> a", "abcd e </s>", "ab f </s>"]


def test_messages_end_as_the_template_ends_them(path):
    row = {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}
    assert texts(path, row) == ["[u q ] [a", "b ]", "g ]"]
    assert texts(path, row | {"chosen": "b", "rejected": "g"}) == ["[u q ] [a", "b ]", "g ]"]
    config = DataConfig(train="", system_prompt="be", chat_template_kwargs={"k": 1})
    assert texts(path, row, data_config=config) == ["k=1 [s be ] [u q ] [a", "b ]", "g ]"]


@pytest.mark.parametrize("given", [[{"name": "f"}], json.dumps([{"name": "f"}])])
def test_tools_reach_the_template(path, given):
    class Tools(WordTokenizer):
        def apply_chat_template(self, messages, add_generation_prompt, tools=None, **variables):
            assert tools == [{"name": "f"}]
            return super().apply_chat_template(messages, add_generation_prompt, **variables)

    row = {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN], "tools": given}
    assert texts(path, row, tokenizer=Tools()) == ["[u q ] [a", "b ]", "g ]"]


def test_common_beginning_of_messages_is_the_prompt(path):
    assert texts(path, {"chosen": [USER, BLUE], "rejected": [USER, GREEN]}) == ["[u q ] [a", "b ]", "g ]"]
    # A message is left to each side, whether they are equal or one goes on.
    assert texts(path, {"chosen": [USER, BLUE], "rejected": [USER, BLUE]}) == ["[u q ] [a", "b ]", "b ]"]
    longer = {"chosen": [USER, BLUE], "rejected": [USER, BLUE, USER, GREEN]}
    assert texts(path, longer) == ["[u q ] [a", "b ]", "b ] [u q ] [a g ]"]


def test_a_prompt_that_both_sides_repeat_as_a_message_is_not_taken_twice(path):
    row = {"prompt": "q", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}
    assert texts(path, row) == ["[u q ] [a", "b ]", "g ]"]
    longer = {"prompt": [USER, BLUE, USER], "chosen": [USER, BLUE, USER, GREEN], "rejected": [USER, BLUE, USER, BLUE]}
    assert texts(path, longer) == ["[u q ] [a b ] [u q ] [a", "g ]", "b ]"]
    # One that a single side repeats is taken as it is.
    single = {"prompt": [USER], "chosen": [USER, GREEN], "rejected": [BLUE]}
    assert texts(path, single)[:2] == ["[u q ]", "[u q ] [a g ]"]
    # Nothing else makes a message of a string, unless it is asked for.
    alone, asked = row | {"chosen": [BLUE], "rejected": [BLUE]}, DataConfig(train="", apply_chat_template=True)
    assert texts(path, alone, data_config=asked) == ["[u q ] [a", "b ]", "b ]"]
    with pytest.raises(UserError) as caught:
        load(path, [row, alone])
    assert str(caught.value) == (
        f"{path}:2: 'prompt' is a string, and 'chosen' a list of messages; "
        "data.apply_chat_template = true makes a message of it"
    )


def test_common_beginning_of_strings_is_cut_at_whole_tokens(path):
    # "xabc" and "xabd" share three characters and no token.
    assert texts(path, {"chosen": "q xabc", "rejected": "q xabd"}) == ["<s> q", "xabc </s>", "xabd </s>"]
    assert texts(path, {"chosen": "q a", "rejected": "q a b"}) == ["<s> q a", "</s>", "b </s>"]
    assert texts(path, {"chosen": "q a", "rejected": "q a"}) == ["<s> q a", "</s>", "</s>"]


def test_equal_sides_are_kept(path):
    assert texts(path, {"prompt": "a", "chosen": " b", "rejected": " b"}) == ["<s> a", "b </s>", "b </s>"]


def test_margins(path):
    row = {"prompt": "a", "chosen": " b", "rejected": " c"}
    loaded = load(path, [row | {"margin": 2}, row | {"margin": -0.5}, row | {"margin": 0}, row, row | {"margin": None}])
    assert [pair.margin for pair in loaded.rows] == [2.0, -0.5, 0.0, None, None]


def test_pairs_whose_prompt_fills_max_length_are_left_out_and_counted(path):
    rows = [
        {"prompt": "a b c", "chosen": " d", "rejected": " e"},
        {"prompt": "a b", "chosen": " d e f", "rejected": " e"},
        {"prompt": "a", "chosen": " d", "rejected": " e"},
    ]
    loaded = load(path, rows, max_length=4)
    assert loaded.counts == {"rows": 3, "truncated_rows": 1, "dropped_rows": 1}
    assert [pair.where for pair in loaded.rows] == [f"{path}:2", f"{path}:3"]
    assert loaded.rows[0].num_tokens == 3 * 2 + 4 + 2
    # As many as fit: the model's own limit counts, too.
    assert load(path, rows, limit=4).counts == loaded.counts
    assert load(path, rows, max_length=5).counts == {"rows": 3, "truncated_rows": 2, "dropped_rows": 0}
    assert load(path, rows, max_length=4, truncation_mode="keep_end").counts["dropped_rows"] == 0
    assert load(path, rows, max_length=5, truncation_mode=None).counts == {
        "rows": 3,
        "truncated_rows": 0,
        "dropped_rows": 2,
    }
    # One of 6 tokens fits 6.
    assert load(path, rows, max_length=6, truncation_mode=None).counts["dropped_rows"] == 1
    assert load(path, rows, max_length=6).counts["truncated_rows"] == 1
    # Either side may be the longer one.
    longer = [{"prompt": "a b", "chosen": " e", "rejected": " d e f"}]
    assert load(path, longer, max_length=5).counts["truncated_rows"] == 1
    with pytest.raises(UserError, match="rows.jsonl: all 3 pairs are too long for train.max_length 2"):
        load(path, rows, max_length=2)
    with pytest.raises(UserError, match="rows.jsonl:1: 6 tokens are more than the model's 5; set train.max_length"):
        load(path, rows, max_length=None, limit=5)
    assert load(path, rows[:1], max_length=None, limit=6).counts == {"rows": 1, "truncated_rows": 0, "dropped_rows": 0}


def test_truncation():
    whole = truncated([1, 2], [3, 4, 5], 5)
    assert whole.input_ids.tolist() == [1, 2, 3, 4, 5] and whole.loss_mask.tolist() == [False] * 2 + [True] * 3
    start, end = (truncated([1, 2], [3, 4, 5], 4, mode) for mode in ("keep_start", "keep_end"))
    assert start.input_ids.tolist() == [1, 2, 3, 4] and start.loss_mask.tolist() == [False] * 2 + [True] * 2
    assert end.input_ids.tolist() == [2, 3, 4, 5] and end.loss_mask.tolist() == [False] + [True] * 3
    # A shorter one is whole, whatever its end.
    assert truncated([1, 2], [3], 5, "keep_end").input_ids.tolist() == [1, 2, 3]


ROW = {"prompt": "a", "chosen": " b", "rejected": " c"}


@pytest.mark.parametrize(
    "bad, said",
    [
        ({"prompt": "a", "chosen": " b"}, "2: no 'rejected'; its columns are prompt, chosen"),
        ({"prompt": "a", "rejected": " b"}, "2: no 'chosen'; its columns are prompt, rejected"),
        ({"chosen": " b", "rejected": " c"}, "2: no 'prompt'; its columns are chosen, rejected"),
        (ROW | {"rejected": None}, "2: no 'rejected'; its columns are prompt, chosen, rejected"),
        (ROW | {"rejected": 3}, "2: 'rejected' must be a string or a list of messages, got int 3"),
        (ROW | {"chosen": []}, "2: 'chosen' must be a non-empty list of messages, got a list"),
        (ROW | {"prompt": ""}, "2: 'prompt' is empty"),
        (ROW | {"margin": "1"}, "2: 'margin' must be a number, got a string"),
        (ROW | {"margin": float("nan")}, "2: 'margin' must be a number from -1e+18 to 1e+18, got nan"),
        (ROW | {"margin": -float("inf")}, "2: 'margin' must be a number from -1e+18 to 1e+18, got -inf"),
        (ROW | {"margin": 1e300}, "2: 'margin' must be a number from -1e+18 to 1e+18, got 1e+300"),
        (ROW | {"margin": 10**400}, "2: 'margin' must be a number from -1e+18 to 1e+18, got 1" + "0" * 56 + "..."),
        (ROW | {"rejected": [BLUE]}, "2: 'chosen' and 'rejected' must both be strings or both lists of messages"),
        (ROW | {"chosen": [BLUE]}, "2: 'chosen' and 'rejected' must both be strings or both lists of messages"),
        (ROW | {"margin": True}, "2: 'margin' must be a number, got a bool"),
        (ROW | {"tools": "{"}, "2: 'tools' is a string that is not JSON: Expecting property name"),
    ],
)
def test_bad_rows_are_named(path, bad, said):
    with pytest.raises(UserError) as caught:
        load(path, [ROW, bad])
    assert str(caught.value).startswith(f"{path}:{said}")


@pytest.mark.parametrize(
    "bad, said",
    [
        (
            {"chosen": [BLUE], "rejected": [GREEN]},
            "no 'prompt', and 'chosen' and 'rejected' do not begin with the same",
        ),
        ({"chosen": [BLUE], "rejected": "g"}, "'chosen' and 'rejected' must both be strings or both lists of messages"),
        ({"chosen": " b"}, "no 'rejected'; its columns are chosen"),
    ],
)
def test_bad_rows_without_a_prompt_are_named(path, bad, said):
    with pytest.raises(UserError) as caught:
        load(path, [bad])
    assert str(caught.value).startswith(f"{path}:1: {said}")


def test_other_errors_are_named(path):
    tokenizer = WordTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="rows.jsonl:1: 'rejected' has no tokens"):
        load(path, [ROW | {"rejected": ""}], tokenizer)
    with pytest.raises(UserError, match="rows.jsonl:1: no 'question'; its columns are prompt, chosen, rejected"):
        load(path, [ROW], data_config=DataConfig(train="", prompt_column="question"))
    with pytest.raises(UserError, match="rows.jsonl:1: token id 1000 is outside of the model's vocabulary of 1000"):
        tokenizer.words["b"] = 1000
        load(path, [ROW], tokenizer)
    with pytest.raises(UserError, match="a preference dataset needs a tokenizer"):
        load_pairs(path, DataConfig(train=""), None, None, 10, 10)


def test_prompt_column(path):
    row = {"question": "a", "chosen": " b", "rejected": " c"}
    config = DataConfig(train="", prompt_column="question")
    assert texts(path, row, data_config=config) == ["<s> a", "b </s>", "c </s>"]


def load_labelled(path, rows, tokenizer=None, limit=1000, data_config=None, **train):
    train = types.SimpleNamespace(**{"max_length": 1024} | train)
    config = data_config or DataConfig(train=str(path))
    return load_unpaired(write(path, rows), config, train, tokenizer or WordTokenizer(), limit, 1000)


def labelled_texts(path, rows, **settings):
    tokenizer = settings.setdefault("tokenizer", WordTokenizer())
    loaded = load_labelled(path, rows, **settings)
    return [(tokenizer.text(row.prompt_ids), tokenizer.text(row.completion_ids), row.label) for row in loaded.rows]


def test_labelled_rows(path):
    row = {"prompt": "a b ", "completion": "c", "label": True}
    assert labelled_texts(path, [row, row | {"label": False}]) == [
        ("<s> a b", "c </s>", True),
        ("<s> a b", "c </s>", False),
    ]
    assert labelled_texts(path, [row | {"prompt": [USER], "completion": [BLUE]}]) == [("[u q ] [a", "b ]", True)]
    config = DataConfig(train="", prompt_column="x", completion_column="y")
    assert labelled_texts(path, [{"x": "a ab", "y": "cd", "label": False}], data_config=config) == [
        ("<s> a", "abcd </s>", False)
    ]


def test_pairs_are_taken_apart_in_blocks(path, monkeypatch):
    monkeypatch.setattr(unpaired, "BLOCK", 2)
    rows = [{"prompt": "a", "chosen": f" c{i}", "rejected": f" r{i}"} for i in range(3)]
    assert [text for _, text, _ in labelled_texts(path, rows)] == [
        *("c0 </s>", "c1 </s>", "r0 </s>", "r1 </s>", "c2 </s>", "r2 </s>")
    ]
    assert [label for _, _, label in labelled_texts(path, rows)] == [True, True, False, False, True, False]
    assert load_labelled(path, rows).counts == {"rows": 6, "truncated_rows": 0, "dropped_rows": 0}
    # Each side begins where its own agreement with the prompt ends.
    row = {"prompt": "a ab", "chosen": "cd e", "rejected": " f"}
    assert labelled_texts(path, [row]) == [("<s> a", "abcd e </s>", True), ("<s> a ab", "f </s>", False)]
    assert labelled_texts(path, [{"chosen": "q xabc", "rejected": "q xabd"}]) == [
        ("<s> q", "xabc </s>", True),
        ("<s> q", "xabd </s>", False),
    ]
    messages = {"chosen": [USER, BLUE], "rejected": [USER, GREEN]}
    assert labelled_texts(path, [messages]) == [("[u q ] [a", "b ]", True), ("[u q ] [a", "g ]", False)]


def test_labelled_rows_whose_prompt_fills_max_length_are_left_out_and_counted(path):
    rows = [{"prompt": text, "completion": " d e", "label": True} for text in ("a b c", "a b", "a")]
    loaded = load_labelled(path, rows, max_length=4)
    assert loaded.counts == {"rows": 3, "truncated_rows": 2, "dropped_rows": 1}
    assert [row.where for row in loaded.rows] == [f"{path}:2", f"{path}:3"]
    # The last row has as many tokens as may be.
    assert load_labelled(path, rows, max_length=5).counts == {"rows": 3, "truncated_rows": 2, "dropped_rows": 0}
    with pytest.raises(UserError, match="rows.jsonl: the prompts of all 3 rows fill train.max_length 2"):
        load_labelled(path, rows, max_length=2)
    with pytest.raises(UserError, match="rows.jsonl:1: 7 tokens are more than the model's 6; set train.max_length"):
        load_labelled(path, rows, max_length=None, limit=6)


LABELLED = {"prompt": "a", "completion": " b", "label": True}


@pytest.mark.parametrize(
    "bad, said",
    [
        (
            LABELLED | {"completion": [BLUE]},
            "'prompt' is a string, and 'completion' a list of messages; "
            "data.apply_chat_template = true makes a message of it",
        ),
        (LABELLED | {"label": 1}, "'label' must be true or false, got int 1"),
        (LABELLED | {"label": "true"}, "'label' must be true or false, got a string"),
        (LABELLED | {"label": None}, "no 'label'; its columns are prompt, completion, label"),
        ({"prompt": "a", "label": True}, "no 'completion'; its columns are prompt, label"),
        ({"completion": "a", "label": True}, "no 'prompt'; its columns are completion, label"),
        (LABELLED | {"completion": 3}, "'completion' must be a string or a list of messages, got int 3"),
        (LABELLED | {"prompt": ""}, "'prompt' is empty"),
    ],
)
def test_bad_labelled_rows_are_named(path, bad, said):
    with pytest.raises(UserError) as caught:
        load_labelled(path, [LABELLED, bad])
    assert str(caught.value) == f"{path}:2: {said}"


def test_labelled_rows_without_tokens_are_named(path):
    tokenizer = WordTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(UserError, match="rows.jsonl:1: the completion has no tokens"):
        load_labelled(path, [LABELLED | {"completion": ""}], tokenizer)
    with pytest.raises(UserError, match="a preference dataset needs a tokenizer"):
        load_unpaired(path, DataConfig(train=""), None, None, 10, 10)
