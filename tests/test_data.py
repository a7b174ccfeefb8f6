"""Rows, column detection, tokenising and packing, against hand-made rows and a tokenizer of words."""

import errno
import gzip
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from rlnumba import data
from rlnumba.config import DataConfig, DPOConfig, KTOConfig, SFTConfig
from rlnumba.data import TokenSequence, best_fit_decreasing, load_prompts, load_sft, pack_sequences, read_rows
from rlnumba.data.files import check_messages, number_value
from rlnumba.data.pairs import load_pairs
from rlnumba.data.unpaired import load_unpaired
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer

EOS = 1
TOKENIZER = Path(__file__).parent / "golden" / "tokenizer"


class WordTokenizer:
    """Words of at most four characters, numbered as they come; "ab" + "cd" is one token, so pairs can merge."""

    eos_token_id = EOS
    template_variables = frozenset({"messages", "tools", "k"})

    def __init__(self, chat=True):
        self.chat_template = "template" if chat else None
        self.words = {"<s>": 0, "</s>": EOS}

    def encode(self, text, add_special_tokens=True):
        pieces = [word[i : i + 4] for word in text.split() for i in range(0, len(word), 4)]
        return [0] * add_special_tokens + [self.words.setdefault(piece, len(self.words)) for piece in pieces]

    def apply_chat_template(self, messages, add_generation_prompt, tools=None, **variables):
        text = " ".join(f"[{m['role'][0]} {m['content']} ]" for m in messages)
        text = "".join(f"{k}={v} " for k, v in variables.items()) + text
        return self.encode(text + (" [a" if add_generation_prompt else ""))[1:]

    def assistant_mask(self, messages, tools=None, **variables):
        return [
            int(m["role"] == "assistant") for m in messages for _ in self.apply_chat_template([m], False, **variables)
        ]

    def text(self, ids):
        return " ".join(list(self.words)[i] for i in ids)

    decode = text


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, rows, tokenizer=None, limit=1000, data_config=None, **train):
    config = data_config or DataConfig(train=str(path))
    return load_sft(write(path, rows), config, SFTConfig(**train), tokenizer or WordTokenizer(), limit, 1000)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "rows.jsonl: holds no rows"),
        (b"\n \n", "rows.jsonl: holds no rows"),
        (b'{"a": 1}\n{"a": 1\n', r"rows.jsonl:2: not JSON: .* \(column 8\)"),
        (b'{"a": 1}\n\n[1]\n', "rows.jsonl:3: must be a JSON object, got a list"),
        (b'{"a": "\xff"}\n', "rows.jsonl:1: not UTF-8"),
        (b'{"a": "\\ud83d\\ude00"}\n{"a": ["\\ud83d"]}\n', r"rows.jsonl:2: \\ud83d is half of a character"),
        (b'{"a": ' + b"7" * 5000 + b"}\n", "rows.jsonl:1: not JSON that can be read: .*5000 digits"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "rows.jsonl:1: not JSON that can be read: .*recursion"),
    ],
)
def test_bad_lines_are_named(path, text, message):
    path.write_bytes(text)
    with pytest.raises(UserError, match=message):
        read_rows(path)


def test_a_file_that_cannot_be_read_is_named(path, monkeypatch):
    def fails(self):
        raise OSError(errno.EIO, "Input/output error")

    write(path, [{"a": 1}])
    monkeypatch.setattr(type(path), "read_bytes", fails)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value) == f"{path}: cannot be read: Input/output error"


def test_read_rows(path, tmp_path):
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n{"a": 2}'.encode())
    rows = read_rows(path)
    assert [row["a"] for row, _ in rows] == ["x\u2028y", 2]
    assert [place.split("/")[-1] for _, place in rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    with pytest.raises(UserError, match="missing.jsonl: no such file"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        read_rows(tmp_path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    verl = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1 ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl, verl]), path)
    loaded = load_prompts(path, DataConfig(train=""), WordTokenizer(), 100, 1000)
    assert loaded.prompts[0].prompt == verl["prompt"]
    assert loaded.columns([0, 1])["ground_truth"] == ["2", "2"]
    assert loaded.columns([1])["extra_info"] == [verl["extra_info"]]
    assert [where for _, where in read_rows(path)] == [f"{path}: row 1", f"{path}: row 2"]
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="rows.parquet: not a readable parquet file"):
        read_rows(path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value) == f"{path}: parquet files need pyarrow; pip install 'rlnumba[parquet]'"


def test_text_rows_get_eos_once(path):
    tokenizer = WordTokenizer()
    loaded = load(path, [{"text": "a b"}, {"text": "c </s>"}], tokenizer)
    assert [tokenizer.text(s.input_ids) for (s,) in loaded.rows] == ["<s> a b </s>", "<s> c </s>"]
    assert all(s.loss_mask.all() for (s,) in loaded.rows)
    assert loaded.counts == {"rows": 2, "truncated_rows": 0, "dropped_rows": 0, "tokens": 7}


def test_the_models_eos_ends_a_text_where_the_tokenizer_has_none(path):
    tokenizer = WordTokenizer()
    tokenizer.eos_token_id = None
    rows = [{"text": "a"}, {"text": "a b"}, {"text": "a c"}]
    config, train = DataConfig(train=str(path)), SFTConfig()
    write(path, rows)
    assert ids(load_sft(path, config, train, tokenizer, 10, 10).rows) == [[[0, 2]], [[0, 2, 3]], [[0, 2, 4]]]
    # Token 3, "b", is one that ends a text, so nothing is appended to it; what is appended is the first.
    found = load_sft(path, config, train, tokenizer, 10, 10, eos_token_ids=(9, 3))
    assert ids(found.rows) == [[[0, 2, 9]], [[0, 2, 3]], [[0, 2, 4, 9]]]
    tokenizer.eos_token_id = 8
    found = load_sft(path, config, train, tokenizer, 10, 10, eos_token_ids=(9, 3))
    assert ids(found.rows) == [[[0, 2, 8]], [[0, 2, 3]], [[0, 2, 4, 8]]]


def test_tools_reach_the_template_also_as_json(path):
    seen = []

    class Tools(WordTokenizer):
        def apply_chat_template(self, messages, add_generation_prompt, tools=None, **variables):
            seen.append(("ids", tools, add_generation_prompt))
            return super().apply_chat_template(messages, add_generation_prompt)

        def assistant_mask(self, messages, tools=None, **variables):
            seen.append(("mask", tools, variables))
            return [1] * len(super().apply_chat_template(messages, False))

    messages, tools = [{"role": "assistant", "content": "x"}], [{"name": "f"}]
    rows = [{"messages": messages, "tools": given} for given in (tools, json.dumps(tools), None)]
    load(path, rows, Tools(), assistant_only_loss=True)
    wanted = [([{"name": "f"}])] * 2 + [None]
    assert seen == [call for given in wanted for call in (("ids", given, False), ("mask", given, {}))]


class ToolTokenizer(WordTokenizer):
    """A chat template that shows its tools' names and its variables."""

    def apply_chat_template(self, messages, add_generation_prompt, tools=None, **variables):
        named = {} if tools is None else {"calls": "+".join(tool["name"] for tool in tools)}
        return super().apply_chat_template(messages, add_generation_prompt, **named, **variables)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("form", ["messages", "pair", "gsm8k", "prompt", "question", "chosen", "labelled", "unpaired"])
def test_tools_and_variables_of_a_row_reach_the_template(path, form, as_json):
    chat = [{"role": "user", "content": "q"}]
    answer = [{"role": "assistant", "content": "a"}]
    rows = {
        "messages": {"messages": chat + answer},
        "pair": {"prompt": chat, "completion": answer},
        "gsm8k": {"question": "q", "answer": "a #### 1"},
        "prompt": {"prompt": chat},
        "question": {"question": "q"},
        "chosen": {"prompt": chat, "chosen": answer, "rejected": chat},
        "labelled": {"prompt": chat, "completion": answer, "label": True},
        "unpaired": {"prompt": chat, "chosen": answer, "rejected": chat},
    }
    variables = {"tools": [{"name": "f"}], "chat_template_kwargs": {"k": False, "n": None}}
    if as_json:
        variables = {name: json.dumps(value) for name, value in variables.items()}
    write(path, [rows[form] | variables])
    data, tokenizer = DataConfig(train=str(path), chat_template_kwargs={"k": 1, "m": 3}), ToolTokenizer()
    limits, train = (tokenizer, 1000, 1000), SFTConfig()
    if form in ("messages", "pair", "gsm8k"):
        found = load_sft(path, data, train, *limits).rows[0][0].input_ids
    elif form in ("prompt", "question"):
        found = load_prompts(path, data, *limits).prompts[0].prompt_token_ids
    elif form == "chosen":
        found = load_pairs(path, data, DPOConfig(), *limits).rows[0].prompt_ids
    else:
        found = load_unpaired(path, data, KTOConfig(), *limits).rows[0].prompt_ids
    # The row's variables go before the run's, and null is none.
    shown = tokenizer.text(found).replace(" ", "").split("[u")[0]
    assert sorted(shown.replace("k=", " k=").replace("m=", " m=").split()) == ["calls=f", "k=False", "m=3"]


@pytest.mark.parametrize(
    "variables, message",
    [
        ([1], "rows.jsonl:1: 'chat_template_kwargs' must be an object, got a list"),
        ("{", "rows.jsonl:1: 'chat_template_kwargs' is a string that is not JSON"),
        ('{"k": 1, "k": 2}', "'chat_template_kwargs' is a string that is not JSON: the key 'k' is there twice in an"),
        ("[" * 100_000, "rows.jsonl:1: 'chat_template_kwargs' is a string that is not JSON: maximum recursion"),
        ({"tokenize": True}, "rows.jsonl:1: 'chat_template_kwargs' cannot set 'tokenize', which is no template's"),
    ],
)
def test_variables_of_a_row_that_are_refused(path, variables, message):
    write(path, [{"prompt": [{"role": "user", "content": "q"}], "chat_template_kwargs": variables}])
    with pytest.raises(UserError, match=message):
        load_prompts(path, DataConfig(train=str(path)), WordTokenizer(), 1000, 1000)
    with pytest.raises(ConfigError, match="data.chat_template_kwargs cannot set 'add_generation_prompt'"):
        DataConfig(train="", chat_template_kwargs={"add_generation_prompt": False})


@pytest.mark.parametrize("form", ["sft", "dpo", "kto", "unpaired", "grpo"])
@pytest.mark.parametrize(
    "is_chat, keys, columns, notes",
    [
        (True, {"system_prompt": "s", "chat_template_kwargs": {"k": 1}}, {"tools": [{"name": "f"}]}, []),
        (True, {"chat_template_kwargs": {"kk": 1}}, {}, ["data.chat_template_kwargs.kk has no effect: the chat templ"]),
        (True, {}, {"chat_template_kwargs": {"x": 1}}, ["chat_template_kwargs.x has no effect: the chat template do"]),
        (False, {}, {}, []),
        (False, {"system_prompt": "s"}, {}, ["data.system_prompt has no effect: no chat template is applied to"]),
        (False, {"system_prompt": "s", "apply_chat_template": True}, {}, []),
        (False, {"chat_template_kwargs": {"k": 1}}, {"tools": [{"name": "f"}]},
         ["data.chat_template_kwargs has no effect: no chat", "the column tools has no effect: no chat template"]),
    ],
)  # fmt: skip
def test_what_a_template_does_not_take_is_said(path, form, is_chat, keys, columns, notes):
    prompt, answer = "q", "a"
    if is_chat:
        prompt, answer = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]
    rows = {"sft": {"completion": answer}, "dpo": {"chosen": answer, "rejected": prompt}, "grpo": {}}
    rows |= {"kto": {"completion": answer, "label": True}, "unpaired": rows["dpo"]}
    write(path, [{"prompt": prompt} | rows[form] | columns])
    data, limits = DataConfig(train=str(path), **keys), (WordTokenizer(), 1000, 1000)
    loaded = {
        "sft": lambda: load_sft(path, data, SFTConfig(), *limits),
        "dpo": lambda: load_pairs(path, data, DPOConfig(), *limits),
        "kto": lambda: load_unpaired(path, data, KTOConfig(), *limits),
        "unpaired": lambda: load_unpaired(path, data, KTOConfig(), *limits),
        "grpo": lambda: load_prompts(path, data, *limits),
    }
    found = loaded[form]().notes
    assert len(found) == len(notes)
    for line, note in zip(found, notes, strict=True):
        assert line.startswith(f"{path}: {note}")


def test_one_row_is_enough_for_what_a_template_takes(path):
    """Of some with variables or in a template, and others without."""
    chat = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    text, tools = {"prompt": "q", "completion": "a"}, {"tools": [{"name": "f"}]}
    assert load(path, [text, text | tools]).notes == [
        f"{path}: the column tools has no effect: no chat template is applied to its rows, texts"
    ]
    assert load(path, [chat | tools, text]).notes == []
    assert prompts(path, [chat, text], system_prompt="s").notes == []
    messages = [*chat["prompt"], *chat["completion"]]
    assert load(path, [{"messages": messages} | tools]).notes == []


def test_roles_that_a_template_leaves_out_are_said(path, tmp_path):
    """Qwen's templates, as many, render system, user, assistant and tool, and nothing of a message of another role."""
    template = "{% for m in messages %}{% if m.role in ('user', 'gpt') %}[{{ m.content }}]{% endif %}{% endfor %}"
    template += "{% if messages[-1].role == 'odd' %}{{ raise_exception('odd') }}{% endif %}"
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = Tokenizer(tmp_path)
    roles = [["user", "gpt"], ["user", "human", "odd", "user"], ["user", "human"]]
    write(path, [{"messages": [{"role": role, "content": "a"} for role in row]} for row in roles])
    found = load_sft(path, DataConfig(train=str(path)), SFTConfig(), tokenizer, 1000, 1000)
    assert found.notes == [f"{path}:2: messages of the role 'human' have no effect: the chat template leaves them out"]


def test_packed_files_are_named(path):
    for content, said in ((gzip.compress(b"{}"), "is packed by gzip"), (b"PAR1", "its name must end in .parquet")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_rows(path)


def test_cells_of_csv_files_are_what_a_trainer_reads(tmp_path):
    def write_csv(text):
        (tmp_path / "rows.csv").write_text(text)
        return tmp_path / "rows.csv"

    limits = WordTokenizer(), 1000, 1000
    loaded = load_unpaired(
        write_csv("prompt,completion,label\nq,a,True\nq,b,0\n"), DataConfig(train=""), KTOConfig(), *limits
    )
    assert [each.label for each in loaded.rows] == [True, False]
    path = write_csv("prompt,chosen,rejected,margin\nq,a,b,2\n")
    assert [pair.margin for pair in load_pairs(path, DataConfig(train=""), DPOConfig(), *limits).rows] == [2.0]
    path = write_csv("prompt,level,answer\nq,3,1\nq,0.5,2\n")
    prompts = load_prompts(path, DataConfig(train="", curriculum_column="level"), *limits).prompts
    assert [prompt.columns for prompt in prompts] == [{"level": 3.0, "answer": "1"}, {"level": 0.5, "answer": "2"}]
    # An answer is text, whatever it looks like.
    path = write_csv("prompt,gold\nq,{}\n")
    (prompt,) = load_prompts(path, DataConfig(train="", answer_column="gold"), *limits).prompts
    assert prompt.columns == {"gold": "{}", "solution": "{}"}
    path = write_csv("prompt,answer,answer\nq,1,2\n")
    with pytest.raises(UserError, match="rows.csv:1: the column 'answer' is there twice$"):
        load_prompts(path, DataConfig(train="", answer_column="answer"), *limits)


def test_numbers_of_a_row():
    for value in (1e18, -1e18, 10**18, 0):
        assert number_value(value, "rows.jsonl:1: 'margin'") == value
    for value in (10**18 + 1, -1.1e18, float("nan")):
        with pytest.raises(UserError, match=r"^rows.jsonl:1: 'margin' must be a number from -1e\+18 to 1e\+18, got "):
            number_value(value, "rows.jsonl:1: 'margin'")


def test_messages_with_bytes_are_named():
    with pytest.raises(UserError, match="^here: a message must have a role and a content, got "):
        check_messages([{"role": b"user", "content": "a"}], "here")


def test_an_item_of_a_message_without_a_type_is_text():
    check_messages([{"role": "user", "content": [{"text": "a"}, {"type": "text", "text": "b"}]}], "here")
    with pytest.raises(UserError, match="^here: a message has an item of type image, and models read text alone$"):
        check_messages([{"role": "user", "content": [{"text": "a"}, {"type": "image"}]}], "here")


def test_a_text_takes_no_template(path):
    write(path, [{"text": "a"}])
    loaded = load_sft(path, DataConfig(train="", apply_chat_template=True), SFTConfig(), WordTokenizer(), 1000, 1000)
    assert loaded.notes == [
        f"{path}: data.apply_chat_template has no effect: no chat template is applied to its rows, texts"
    ]


def test_a_template_for_questions_needs_questions(path):
    write(path, [{"prompt": "p", "completion": "c"}])
    config = DataConfig(train=str(path), prompt_template="{prompt}!")
    with pytest.raises(ConfigError, match="rows.jsonl:1: data.prompt_template makes a prompt of a question, and sft"):
        load_sft(path, config, SFTConfig(), WordTokenizer(), 1000, 1000)


def test_completion_begins_where_the_tokens_part(path):
    tokenizer = WordTokenizer()
    rows = [{"prompt": "a b ", "completion": "c"}, {"prompt": "a ab", "completion": "cd e"}]
    loaded = load(path, rows, tokenizer)
    assert tokenizer.text(loaded.rows[1][0].input_ids) == "<s> a abcd e </s>"
    assert [s.loss_mask.astype(int).tolist() for (s,) in loaded.rows] == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]
    everything = load(path, rows, tokenizer, completion_only_loss=False)
    assert all(s.loss_mask.all() for (s,) in everything.rows)


def test_message_rows(path):
    tokenizer = WordTokenizer()
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r s"}
    pair = load(path, [{"prompt": [question], "completion": [answer]}], tokenizer)
    assert tokenizer.text(pair.rows[0][0].input_ids) == "[u q ] [a r s ]"
    assert pair.rows[0][0].loss_mask.astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1]
    mixed = load(path, [{"prompt": [question], "completion": "r s"}], tokenizer)
    np.testing.assert_array_equal(mixed.rows[0][0].input_ids, pair.rows[0][0].input_ids)
    # `messages` wins over prompt and completion, and its template ends it without EOS.
    rows = [{"messages": [question, answer], "prompt": "x", "completion": "y"}]
    whole = load(path, rows, tokenizer)
    np.testing.assert_array_equal(whole.rows[0][0].input_ids, pair.rows[0][0].input_ids)
    assert whole.rows[0][0].loss_mask.all()
    assistant = load(path, rows, tokenizer, assistant_only_loss=True)
    assert assistant.rows[0][0].loss_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 1, 1]
    with_system = load(
        path, rows, tokenizer, data_config=DataConfig(train="", system_prompt="be", chat_template_kwargs={"k": 1})
    )
    assert tokenizer.text(with_system.rows[0][0].input_ids) == "k=1 [s be ] [u q ] [a r s ]"


def test_assistant_only_loss_of_conversational_pairs(path):
    """As in TRL: what the assistant says in the completion; without completion_only_loss, in the prompt too."""
    user, assistant = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    rows = [{"prompt": [user, assistant, user], "completion": [assistant, user]}]
    tokenizer = WordTokenizer()
    masks = [
        load(path, rows, tokenizer, assistant_only_loss=True, **more).rows[0][0].loss_mask
        for more in ({}, {"completion_only_loss": False})
    ]
    spoken = np.array(tokenizer.assistant_mask(rows[0]["prompt"] + rows[0]["completion"]), bool)
    assert masks[1].tolist() == spoken.tolist()
    # The generation prompt, " [a", belongs to the prompt.
    assert np.flatnonzero(masks[0]).tolist() == [10, 11]


def test_gsm8k_rows(path):
    rows = [{"question": "1 + 1", "answer": "is\n#### 2"}]
    config = DataConfig(train="", prompt_template="Q {question} A \\boxed{} ")
    plain = WordTokenizer(chat=False)
    loaded = load(path, rows, plain, data_config=config)
    assert plain.text(loaded.rows[0][0].input_ids) == "<s> Q 1 + 1 A \\box ed{} is #### 2 </s>"
    assert loaded.rows[0][0].num_trained == 4
    chat = WordTokenizer()
    loaded = load(path, rows, chat, data_config=config)
    assert chat.text(loaded.rows[0][0].input_ids) == "[u Q 1 + 1 A \\box ed{} ] [a is #### 2 ]"


def test_a_question_may_be_in_another_column(path):
    tokenizer, rows = WordTokenizer(chat=False), [{"q": "1 + 1 ?", "answer": "#### 2"}]
    config = DataConfig(train=str(path), prompt_column="q", prompt_template="Q {q} ")
    loaded = load(path, rows, tokenizer, data_config=config)
    assert tokenizer.text(loaded.rows[0][0].input_ids) == "<s> Q 1 + 1 ? #### 2 </s>"


def test_truncation_and_dropped_rows_are_counted(path):
    rows = [{"prompt": "a b c d e", "completion": "f"}, {"prompt": "a", "completion": "b c d e f"}]
    loaded = load(path, rows, max_length=4)
    assert loaded.counts == {"rows": 2, "truncated_rows": 2, "dropped_rows": 1, "tokens": 4}
    assert [len(s) for (s,) in loaded.rows] == [4]
    with pytest.raises(UserError, match=r"rows.jsonl:2: 8 tokens are more than the model's 7; set train.max_length"):
        load(path, [{"text": "a"}, {"text": "a b c d e f"}], max_length=None, limit=7)
    assert load(path, [{"text": "a b c d e f"}], limit=7).counts["truncated_rows"] == 1
    # One of 8 tokens fits 8.
    for max_length in (None, 8):
        assert load(path, [{"text": "a b c d e f"}], max_length=max_length, limit=8).counts["truncated_rows"] == 0
    with pytest.raises(UserError, match="no row has a token to train on"):
        load(path, [{"prompt": "a b c d e", "completion": "f"}], max_length=4)


@pytest.mark.parametrize(
    "rows, train, message",
    [
        ([{"question": "x"}], {}, "rows.jsonl:1: sft needs .*; its columns are question"),
        ([{"text": "x"}, {"txt": "x"}], {}, "rows.jsonl:2: no 'text'; its columns are txt"),
        (
            [{"prompt": "x", "completion": "y"}, {"prompt": "x", "completion": None}],
            {},
            "rows.jsonl:2: no 'completion'",
        ),
        ([{"prompt": "", "completion": "y"}], {}, "rows.jsonl:1: 'prompt' is empty"),
        (
            [{"prompt": 3, "completion": "y"}],
            {},
            "rows.jsonl:1: 'prompt' must be a string or a list of messages, got int 3",
        ),
        ([{"messages": []}], {}, "rows.jsonl:1: 'messages' must be a non-empty list of messages, got a list"),
        ([{"messages": [{"content": "x"}]}], {}, "rows.jsonl:1: 'messages': a message must have a role"),
        ([{"messages": [{"role": "user", "content": 1}]}], {}, "the content of a message must be a string, got int 1"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]}],
            {},
            "rows.jsonl:1: 'messages': a message has an item of type image, and models read text alone",
        ),
        ([{"messages": [{"role": "user", "content": "x"}], "tools": "{"}], {}, "rows.jsonl:1: 'tools' is a string"),
        ([{"text": "x"}], {"completion_only_loss": True}, "rows.jsonl:1: train.completion_only_loss needs"),
        ([{"text": "x"}], {"assistant_only_loss": True}, "rows.jsonl:1: train.assistant_only_loss needs"),
        (
            [{"prompt": "x", "completion": "y"}],
            {"assistant_only_loss": True},
            "rows.jsonl:1: train.assistant_only_loss needs",
        ),
    ],
)
def test_bad_sft_rows(path, rows, train, message):
    with pytest.raises(UserError, match=message):
        load(path, rows, **train)


@pytest.mark.parametrize(
    "rows, train, said",
    [
        ([{"text": "x"}, {"text": 3}], {}, "2: 'text' must be a non-empty string, got int 3"),
        ([{"text": ""}], {}, "1: 'text' must be a non-empty string, got a string"),
        ([{"question": "", "answer": "#### 1"}], {}, "1: 'question' must be a non-empty string, got a string"),
        (
            [{"question": "q", "answer": "#### 1"}, {"question": {}, "answer": ""}],
            {},
            "2: 'question' must be a non-empty string, got an object",
        ),
        (
            [{"question": "q", "answer": "#### 1"}, {"question": "q", "answer": True}],
            {},
            "2: 'answer' must be a string, got a bool",
        ),
        ([{"prompt": "x", "completion": 3}], {}, "1: 'completion' must be a string, got int 3"),
        (
            [{"prompt": "x", "completion": []}],
            {},
            "1: 'completion' must be a non-empty list of messages, got a list",
        ),
        (
            [{"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}],
            {},
            "1: 'prompt' is a string, and 'completion' a list of messages; "
            "data.apply_chat_template = true makes a message of it",
        ),
        ([{"messages": "x"}], {}, "1: 'messages' must be a non-empty list of messages, got a string"),
        (
            [{"messages": [{"role": "user", "content": "x"}, {"role": 5, "content": "x" * 100}]}],
            {},
            "1: 'messages': a message must have a role and a content, got "
            + '{"role": 5, "content": "'
            + "x" * (80 - len('{"role": 5, "content": "')),
        ),
        (
            [{"messages": [{"role": "user", "content": {}}]}],
            {},
            "1: 'messages': the content of a message must be a string, got an object",
        ),
        (
            [{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}],
            {},
            "1: 'tools' must be a list, got an object",
        ),
        (
            [{"messages": [{"role": "user", "content": "x"}], "tools": "[1,"}],
            {},
            "1: 'tools' is a string that is not JSON: Expecting value",
        ),
        (
            [{"messages": [{"role": "user", "content": "x"}]}],
            {"completion_only_loss": True},
            "1: train.completion_only_loss needs rows with a prompt and a completion",
        ),
        (
            [{"text": "x"}],
            {"completion_only_loss": True},
            "1: train.completion_only_loss needs rows with a prompt and a completion",
        ),
        ([{"text": "x"}], {"assistant_only_loss": True}, "1: train.assistant_only_loss needs rows of messages"),
        (
            [{"label": 1, "topic": 2}],
            {},
            "1: sft needs the columns messages, or prompt and completion, or question and answer, or text; "
            "its columns are label, topic",
        ),
        (
            [{}],
            {},
            "1: sft needs the columns messages, or prompt and completion, or question and answer, or text; "
            "its columns are none",
        ),
    ],
)
def test_what_is_wrong_with_an_sft_row_is_said_in_full(path, rows, train, said):
    with pytest.raises(UserError) as caught:
        load(path, rows, **train)
    assert str(caught.value) == f"{path}:{said}"


def test_ids_outside_of_the_vocabulary(path):
    write(path, [{"text": "a b c"}])
    with pytest.raises(UserError, match="rows.jsonl:1: token id 4 is outside of the model's vocabulary of 4"):
        load_sft(path, DataConfig(train=""), SFTConfig(), WordTokenizer(), 100, 4)
    with pytest.raises(UserError, match="needs a tokenizer"):
        load_sft(path, DataConfig(train=""), SFTConfig(), None, 100, 4)


def test_the_first_token_cannot_be_trained_on(path):
    assert TokenSequence(np.array([5, 6, 7]), np.array([True, False, True])).num_trained == 1
    loaded = load(path, [{"text": "a b"}, {"text": "c"}], max_length=2)
    assert [s.num_trained for (s,) in loaded.rows] == [1, 1]


def sequences(*ids):
    return [TokenSequence(np.array(i, np.int32), np.ones(len(i), bool)) for i in ids]


def ids(rows):
    return [[s.input_ids.tolist() for s in row] for row in rows]


def test_packing():
    four = sequences([1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11])
    assert ids(pack_sequences(four, 4)) == [[[1, 2, 3, 4]], [[8, 9, 10], [11]], [[6, 7]]]
    assert ids(pack_sequences(four, 4, "bfd_split")) == [[[1, 2, 3, 4]], [[8, 9, 10], [5]], [[6, 7], [11]]]
    assert ids(pack_sequences(four, 4, "wrapped")) == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10, 11]]]
    assert ids(pack_sequences(four, 4, limit=3)) == [[[1, 2, 3], [11]], [[8, 9, 10]], [[6, 7]]]
    # A model whose longest sequence is below the rows' size loses nothing of the stream.
    wrapped = ids(pack_sequences(four, 4, "wrapped", limit=3))
    assert wrapped == [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]], [[10, 11]]]


def test_equal_lengths_and_spaces_are_first_in_first_out():
    assert best_fit_decreasing([3, 3, 3, 1, 1, 2], 4) == [[0, 3], [1, 4], [2], [5]]
    # Bin 0 (6, then 2) and bin 1 (5, 3) come to 2 left in the order 1, 0: the bin that waits longer is filled first.
    assert best_fit_decreasing([6, 7, 2, 1], 10) == [[1, 2, 3], [0]]
    assert best_fit_decreasing([], 4) == []
    assert best_fit_decreasing([4, 4], 4) == [[0], [1]]


def test_packing_keeps_every_token_and_fills_well():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 500)
    bins = best_fit_decreasing(lengths.tolist(), 64)
    assert sorted(i for b in bins for i in b) == list(range(500))
    assert max(sum(lengths[i] for i in b) for b in bins) <= 64
    # Best fit decreasing needs at most 11/9 of the fewest bins, plus 4 (Johnson 1973); two halves never fit together.
    fewest = max(np.ceil(lengths.sum() / 64), (lengths > 32).sum())
    assert len(bins) <= 11 / 9 * fewest + 4


def test_packed_rows_lose_nothing(path):
    rows = [{"text": " ".join("abcdefgh"[:n])} for n in (1, 5, 8, 3, 2)]
    loaded = load(path, rows, packing=True, max_length=8)
    assert loaded.counts == {"rows": 5, "truncated_rows": 1, "dropped_rows": 0, "tokens": 27}
    assert [sum(len(s) for s in row) for row in loaded.rows] == [8, 7, 8, 4]
    split = load(path, rows, packing=True, packing_strategy="bfd_split", max_length=8)
    assert split.counts["truncated_rows"] == 0 and split.counts["tokens"] == 29


def test_packs_leave_out_sequences_without_a_token_to_train_on(path):
    asks, answers = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [{"messages": [asks]}, {"messages": [asks, answers]}]
    loaded = load(path, rows, packing=True, max_length=20, assistant_only_loss=True)
    assert loaded.counts["dropped_rows"] == 1 and [[len(s) for s in row] for row in loaded.rows] == [[6]]


def prompts(path, rows, tokenizer=None, limit=1000, **config):
    return load_prompts(write(path, rows), DataConfig(train="", **config), tokenizer or WordTokenizer(), limit, 1000)


def test_given_completions_follow_their_prompts(path):
    """Their ids follow the prompt's own, with EOS after a text; a template that changes the prompt is named."""

    def found(prompt, completion, tokenizer=None, limit=6, **config):
        tokenizer = tokenizer or WordTokenizer()
        rows = write(path, [{"prompt": prompt, "said": completion}])
        data = DataConfig(train="", completion_column="said", **config)
        (kept,) = load_prompts(rows, data, tokenizer, 12, 1000, None, None, limit).prompts
        ids = kept.given.token_ids
        assert ids.dtype == np.int32 and kept.given.text == tokenizer.text(ids)
        return tokenizer.text(kept.prompt_token_ids), kept.given.text, kept.given.is_cut

    # "ab" would be one token.
    assert found("a", "b c") == ("<s> a", "b c </s>", False)
    assert found("a b ", "c d") == ("<s> a b", "c d </s>", False)
    assert found("a ", "b c d e f g") == ("<s> a", "b c d e f g", True)
    # The model's longest sequence has room for four more.
    assert found("a b c d e f g ", "h i j k l m") == ("<s> a b c d e f g", "h i j k", True)
    chat = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    assert found(*chat) == ("[u a ] [a", "b ]", False)
    assert found("a", chat[1], apply_chat_template=True) == ("[u a ] [a", "b ]", False)

    class Counts(WordTokenizer):
        """The template begins with the number of messages, and with `none` nothing is said."""

        def apply_chat_template(self, messages, *arguments, none=False, **variables):
            ids = super().apply_chat_template(messages, *arguments, **variables)
            return [1] if none else [len(messages) + 1, *ids]

    with pytest.raises(UserError, match=r":1: 'said': the chat template writes the prompt in another way"):
        found(*chat, Counts())
    with pytest.raises(UserError, match=r":1: 'said': the completion has no tokens"):
        found(*chat, Counts(), chat_template_kwargs={"none": True})
    with pytest.raises(UserError, match=r":1: no 'said'; its columns are prompt, said"):
        found("a", None)


def test_load_prompts_from_strings_and_messages(path):
    tokenizer = WordTokenizer()
    loaded = prompts(path, [{"prompt": "a b", "answer": 3, "level": 1}, {"prompt": "c", "answer": 4}], tokenizer)
    assert [p.prompt for p in loaded.prompts] == ["a b", "c"]
    assert tokenizer.text(loaded.prompts[0].prompt_token_ids) == "<s> a b"
    assert loaded.columns([1, 0, 0]) == {"answer": [4, 3, 3], "level": [None, 1, 1]}
    chat = prompts(path, [{"prompt": [{"role": "user", "content": "a b"}]}], tokenizer, system_prompt="be")
    assert tokenizer.text(chat.prompts[0].prompt_token_ids) == "[s be ] [u a b ] [a"
    # A conversation with a system message keeps it.
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a b"}]
    chat = prompts(path, [{"prompt": own}], tokenizer, system_prompt="be")
    assert tokenizer.text(chat.prompts[0].prompt_token_ids) == "[s own ] [u a b ] [a"
    asked = prompts(path, [{"prompt": "a b"}], tokenizer, apply_chat_template=True)
    assert asked.prompts[0].prompt == [{"role": "user", "content": "a b"}]
    templated = prompts(path, [{"prompt": "a b", "x": 3}], tokenizer, prompt_template="{x}: {prompt}")
    assert templated.prompts[0].prompt == [{"role": "user", "content": "3: a b"}]


def test_load_prompts_from_questions(path):
    gsm8k = [{"question": "1 + 1 ?", "answer": "1+1=2\n#### 1,002"}]
    chat = prompts(path, gsm8k)
    assert chat.prompts[0].prompt == [
        {"role": "user", "content": '1 + 1 ? Let\'s think step by step and output the final answer after "####".'}
    ]
    assert chat.prompts[0].columns == {**gsm8k[0], "solution": "1,002"}
    # The answer is after the last sign.
    twice = prompts(path, [gsm8k[0] | {"answer": "#### of both: 1+1=2\n#### 2"}])
    assert twice.prompts[0].columns["solution"] == "2"
    plain = prompts(path, gsm8k, WordTokenizer(chat=False), prompt_template="{question} =")
    assert plain.prompts[0].prompt == "1 + 1 ? ="
    assert prompts(path, gsm8k, apply_chat_template=False).prompts[0].prompt.startswith("1 + 1 ? Let's")
    deepmath = prompts(path, [{"question": "x ?", "final_answer": "0", "difficulty": 4.5}])
    assert deepmath.prompts[0].prompt[0]["content"].endswith("within \\boxed{}.")
    assert deepmath.prompts[0].columns == {"question": "x ?", "final_answer": "0", "difficulty": 4.5}
    chosen = prompts(path, [{"q": "x ?", "gold": "0"}], prompt_column="q", answer_column="gold", prompt_template="{q}!")
    assert chosen.prompts[0].prompt[0]["content"] == "x ?!"
    assert chosen.prompts[0].columns == {"gold": "0", "solution": "0"}
    verl = {"prompt": "x", "reward_model": {"ground_truth": "1"}}
    assert prompts(path, [verl]).prompts[0].columns["ground_truth"] == "1"
    assert prompts(path, [verl | {"ground_truth": "own"}]).prompts[0].columns["ground_truth"] == "own"


def test_long_prompts_are_dropped_only_when_asked(path):
    rows = [{"prompt": "a b c"}, {"prompt": "a"}]
    loaded = prompts(path, rows, max_prompt_length=3)
    assert [p.prompt for p in loaded.prompts] == ["a"] and loaded.dropped_prompts == 1
    with pytest.raises(
        UserError, match=r"rows.jsonl:1: a prompt of 4 tokens leaves no room .* model's 4; set data.max"
    ):
        prompts(path, rows, limit=4)
    assert len(prompts(path, rows, limit=5).prompts) == 2
    # However long prompts may be, there is room for a token.
    assert [p.prompt for p in prompts(path, rows, limit=4, max_prompt_length=4).prompts] == ["a"]
    with pytest.raises(UserError, match="all 2 prompts are longer than data.max_prompt_length 1"):
        prompts(path, rows, max_prompt_length=1)


@pytest.mark.parametrize(
    "rows, config, kind, message",
    [
        (
            [{"text": "x"}],
            {},
            UserError,
            "rows.jsonl:1: grpo needs a column 'prompt' or 'question'; its columns are text",
        ),
        ([{"text": "x"}], {"prompt_column": "q"}, UserError, "needs a column 'q'; its columns are text"),
        ([{"prompt": "x"}, {"prompt": ""}], {}, UserError, "rows.jsonl:2: 'prompt' is empty"),
        ([{"prompt": "x"}, {"question": "y"}], {}, UserError, "rows.jsonl:2: no 'prompt'; its columns are question"),
        ([{"question": 1}], {}, UserError, "rows.jsonl:1: 'question' must be a string or a list"),
        ([{"prompt": "x"}], {"answer_column": "a"}, UserError, "rows.jsonl:1: no 'a'; its columns are prompt"),
        ([{"question": "x"}], {"prompt_template": "{q}"}, ConfigError, "data.prompt_template names no column"),
    ],
)
def test_bad_prompt_rows(path, rows, config, kind, message):
    with pytest.raises(kind, match=message):
        prompts(path, rows, **config)


def test_prompts_that_cannot_be_tokenised_are_named(path):
    class Refuses(WordTokenizer):
        def apply_chat_template(self, messages, *arguments, **variables):
            raise UserError("no chat template")

        def encode(self, text):
            return []

    write(path, [{"prompt": "a"}])
    with pytest.raises(UserError) as caught:
        load_prompts(path, DataConfig(train=""), None, 10, 10)
    assert str(caught.value) == "grpo needs a tokenizer, and the model folder has no tokenizer.json"
    with pytest.raises(UserError) as caught:
        load_prompts(path, DataConfig(train=""), Refuses(), 10, 10)
    assert str(caught.value) == f"{path}:1: the prompt has no tokens"
    with pytest.raises(UserError) as caught:
        load_prompts(path, DataConfig(train="", apply_chat_template=True), Refuses(), 10, 10)
    assert str(caught.value) == f"{path}:1: no chat template"
    with pytest.raises(UserError) as caught:
        load_prompts(path, DataConfig(train=""), WordTokenizer(), 10, 2)
    assert str(caught.value) == f"{path}:1: token id 2 is outside of the model's vocabulary of 2"


def test_encode_pair_of_equal_texts():
    tokenizer = WordTokenizer()
    assert data.encode_pair(tokenizer, "a b", "") == ([0, 2, 3], 3)
    assert data.encode_pair(tokenizer, "ab", "cd") == ([0, 5], 1)
