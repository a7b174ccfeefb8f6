"""Rows of csv files, of several files with weights, and of datasets of the hub."""

import csv
import datetime
import decimal
import json

import pytest

from rlnumba.cli.rows import read_rows_with_ids
from rlnumba.config import DataConfig
from rlnumba.data import read_dataset, read_rows
from rlnumba.data.files import sampled_rows
from rlnumba.data.formats import chat_cell, flag_cell, json_cell, number_cell, object_cell
from rlnumba.errors import ConfigError, UserError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHAT = [{"role": "user", "content": 'it\'s "hi"'}]


def write_csv(path, *rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffprompt,completion,answer\n"two\nlines, and ""quotes""", yes,42\n\n'
        '"[{""role"": ""user"", ""content"": ""hi""}]",[not json,\n',
        newline="\r\n",
    )
    assert read_rows(path) == [
        ({"prompt": 'two\r\nlines, and "quotes"', "completion": " yes", "answer": "42"}, f"{path}:2"),
        (
            {"prompt": '[{"role": "user", "content": "hi"}]', "completion": "[not json", "answer": None},
            f"{path}:5",
        ),
    ]
    # The names of columns may be of several lines, too.
    assert read_rows(write_csv(path, ["two\nlines"], ["a"], ["b"])) == [
        ({"two\nlines": "a"}, f"{path}:3"),
        ({"two\nlines": "b"}, f"{path}:4"),
    ]


def test_csv_cells_of_any_length(tmp_path):
    path = write_csv(tmp_path / "rows.csv", ["text"], ["word " * 50_000], [])
    limit = csv.field_size_limit(1000)
    try:
        assert read_rows(path) == [({"text": "word " * 50_000}, f"{path}:2")]
        assert csv.field_size_limit() == 1000
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize("written", [json.dumps, str])
def test_csv_columns_that_are_lists(tmp_path, written):
    """As JSON, and as pandas writes them; what looks alike in another column is text."""
    cells = {"messages": json_cell, "prompt": chat_cell, "reward_model": object_cell}
    row = [written(CHAT), written(CHAT), written({"style": "rule"}), written(CHAT), "[1, 2]"]
    path = write_csv(tmp_path / "rows.csv", ["messages", "prompt", "reward_model", "other", "answer"], row, [""] * 5)
    none = dict.fromkeys(("messages", "prompt", "reward_model", "other", "answer"))
    found = none | {"messages": CHAT, "prompt": CHAT, "reward_model": {"style": "rule"}, "answer": "[1, 2]"}
    assert [row for row, _ in read_rows(path, cells=cells)] == [found | {"other": written(CHAT)}, none]
    # An object may be empty, and begin in the next line.
    assert object_cell(written({})) == {} and object_cell("\n " + written({"a": 1})) == {"a": 1}
    assert object_cell("{x}") == "{x}"


def test_csv_columns_of_generate(tmp_path):
    """The column of prompts is the one that is named, and tools may be written as pandas does."""
    tools = [{"name": "it's"}]
    path = write_csv(tmp_path / "rows.csv", ["q", "tools"], [json.dumps(CHAT), repr(tools)])
    ((row, _),) = read_rows_with_ids(path, "prompt_token_ids", "q")
    assert row == {"q": CHAT, "tools": tools}


def test_csv_flags_and_numbers(tmp_path):
    cells = {"label": flag_cell, "margin": number_cell, "level": number_cell}
    rows = [["True", "0.5", "+1"], ["false", "-1e-05", str(10**400)], ["1", "2", ""], ["0.0", "", "-3"]]
    path = write_csv(tmp_path / "rows.csv", ["label", "margin", "level"], *rows)
    found = [list(row.values()) for row, _ in read_rows(path, cells=cells)]
    assert found == [[True, 0.5, 1], [False, -1e-05, 10**400], [True, 2.0, None], [False, None, -3]]
    # A column has one type.
    assert [type(row[1]) for row in found[:3]] == [float] * 3 and type(found[0][2]) is int
    assert [list(row.values()) for row, _ in read_rows(path)] == [[cell or None for cell in row] for row in rows]


@pytest.mark.parametrize(
    ("cell", "column", "said"),
    [
        (flag_cell, ["yes"], "2: 'x' must be true or false, got 'yes'"),
        (number_cell, ["1", "1,000"], "3: 'x' must be a number, got '1,000'"),
        (number_cell, ["7" * 5000], "2: 'x' must be a number, got '" + "7" * 56 + "..."),
        (json_cell, ["[]", "", "[1"], "4: 'x' is not JSON: Expecting ',' delimiter: line 1 column 3 (char 2)"),
        (json_cell, ["3"], "2: 'x' must be a JSON list or object, got int 3"),
        (json_cell, ["[{1, 2}]"], "2: 'x' is not JSON: Expecting property name"),
        (json_cell, ["[]", "{}"], "3: 'x' is an object, and a list in line 2"),
        (chat_cell, [str(CHAT), "[" * 9], "3: 'x' is a string, and a list in line 2"),
        (chat_cell, ["hi", json.dumps(CHAT)], "3: 'x' is a list, and a string in line 2"),
        # NumPy's array of two messages, and a list that was cut.
        (chat_cell, [f"[{CHAT[0]} {CHAT[0]}]"], "2: 'x' is not JSON: Expecting property name"),
        (chat_cell, [json.dumps(CHAT)[:-1]], "2: 'x' is not JSON: Expecting ',' delimiter"),
    ],
)
def test_wrong_csv_cells_are_named(tmp_path, cell, column, said):
    path = write_csv(tmp_path / "rows.csv", ["x", "y"], *([text, ""] for text in column))
    with pytest.raises(UserError) as caught:
        read_rows(path, cells={"x": cell})
    assert str(caught.value).startswith(f"{path}:{said}")


def test_the_index_that_pandas_writes_is_no_column(tmp_path):
    path = write_csv(tmp_path / "rows.csv", ["", "", "prompt", ""], [7, "a", "x", ""], [9, "b", "y", ""])
    assert [row for row, _ in read_rows(path)] == [{"prompt": "x"}, {"prompt": "y"}]
    write_csv(path, ["prompt", ""], ["x", ""], ["y", "z"])
    with pytest.raises(UserError, match="rows.csv:1: column 2 has no name"):
        read_rows(path)
    for rows in ([], [["x", ""]]):
        write_csv(path, ["", ""], *rows)
        with pytest.raises(UserError, match="rows.csv:1: no column has a name$"):
            read_rows(path)
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"prompt": ["x"], "__index_level_0__": [7]}), tmp_path / "rows.parquet")
    assert [row for row, _ in read_rows(tmp_path / "rows.parquet")] == [{"prompt": "x"}]


def test_columns_of_one_name(tmp_path, capsys):
    path = write_csv(tmp_path / "rows.csv", ["prompt", "answer", "answer", "answer.1"], ["a", "b", "c", "d"])
    for _ in range(2):
        assert [row for row, _ in read_rows(path)] == [{"prompt": "a", "answer": "b", "answer.2": "c", "answer.1": "d"}]
    said = f"rlnumba: warning: {path}:1: the column 'answer' is there twice; the later one is 'answer.2' here\n"
    assert capsys.readouterr().err == said
    with pytest.raises(UserError, match="rows.csv:1: the column 'answer' is there twice$"):
        read_rows(path, cells={"answer": number_cell})
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["answer", "answer"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert [row for row, _ in read_rows(tmp_path / "rows.parquet")] == [{"answer": "a", "answer.1": "b"}]
    with pytest.raises(UserError, match="rows.parquet: the column 'answer' is there twice$"):
        read_rows(tmp_path / "rows.parquet", cells={"answer": number_cell})
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"b": [{"a": 1, "a": 1}]}\n')
    with pytest.raises(UserError, match="rows.jsonl:2: the key 'a' is there twice in an object$"):
        read_rows(tmp_path / "rows.jsonl")


def test_endings_in_any_case(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    write_csv(tmp_path / "A.CSV", ["a"], ["x"])
    parquet.write_table(pyarrow.table({"a": ["x"]}), tmp_path / "A.Parquet")
    for name in ("A.JSONL", "A.Json", "A.txt"):
        write(tmp_path / name, [{"a": "x"}])
    assert [read_rows(path)[0][0] for path in tmp_path.iterdir()] == [{"a": "x"}] * 5


def test_a_json_array(tmp_path):
    path, rows = tmp_path / "rows.json", [{"a": "x\n"}, {"a": [1, {"b": "\U0001f600"}]}]
    for text in (json.dumps(rows), "\ufeff \n" + json.dumps(rows, indent=2, ensure_ascii=False) + "\r\n"):
        path.write_text(text, encoding="utf-8")
        assert read_rows(path) == [(row, f"{path}: row {i}") for i, row in enumerate(rows, start=1)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", ": holds no rows"),
        (b'[{"a": 1},\n {"a": 1]', ":2: not JSON: Expecting ',' delimiter (column 9)"),
        (b'[{"a": 1},\n]', ":2: not JSON: Expecting value (column 1)"),
        (b'[{"a": 1}\n {"a": 1}]', ":2: not JSON: Expecting ',' delimiter (column 2)"),
        (b'[{"a": 1}, [2]]', ": row 2: must be a JSON object, got a list"),
        (b'[{"a": 1}, {"a": 1, "a": 2}]', ": row 2: the key 'a' is there twice in an object"),
        (b'[{"a": 1}, {"a": ' + b"7" * 5000 + b"}]", ": row 2: not JSON that can be read: Exceeds the limit"),
        (b'[{"a": ' + b"[" * 200_000, ": row 1: not JSON that can be read: maximum recursion"),
        (b'[{"a": "\\ud83d"}]', ": row 1: \\ud83d is half of a character"),
        (b'[{"a": 1},\n"\xff"]', ":2: not UTF-8: invalid start byte"),
        (b"[1]\n[2]\n", ":1: must be a JSON object, got a list"),
    ],
)
def test_damaged_json_arrays(tmp_path, content, said):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_parquet_values_are_those_of_json(tmp_path):
    """Or bytes. Times are text with all digits of their unit, which is no second in parquet, of any year."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    day, moment = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 1, 2, 3, 4000)
    talk = [{"role": "user", "content": "hi", "at": moment, "cost": decimal.Decimal("0.10")}]
    columns = {
        "ns": (pa.array([1700000000123456789], pa.timestamp("ns")), "2023-11-14T22:13:20.123456789"),
        "far": (pa.array([10**15], pa.timestamp("s")), "31690708-07-05T01:46:40.000"),
        "zone": (pa.array([moment], pa.timestamp("ms", "Europe/Berlin")), "2024-02-29T01:02:03.004Z"),
        "day": (pa.array([day]), "2024-02-29"),
        "day64": (pa.array([day], pa.date64()), "2024-02-29"),
        "time": (pa.array([moment.time()], pa.time32("ms")), "01:02:03.004"),
        "moments": (pa.array([moment]).dictionary_encode(), "2024-02-29T01:02:03.004000"),
        "took": (pa.array([1500], pa.duration("ms")), 1.5),
        "took_us": (pa.array([1_500_000], pa.duration("us")), 1.5),
        "took_ns": (pa.array([1_500_000_000], pa.duration("ns")), 1_500_000_000 * 1e-9),
        "took_s": (pa.array([2], pa.duration("s")), 2.0),
        "price": (pa.array([decimal.Decimal("12.50")]), 12.5),
        "big": (pa.array([decimal.Decimal(10**30)]), 10**30),
        "half": (pa.array([0.5], pa.float16()), 0.5),
        "kind": (pa.array(["a"]).dictionary_encode(), "a"),
        "large": (pa.array(["text"], pa.large_string()), "text"),
        "nothing": (pa.array([None], pa.null()), None),
        "unsigned": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        "bytes": (pa.array([b"\xff"]), b"\xff"),
        "map": (pa.array([[("a", day)]], pa.map_(pa.string(), pa.date32())), {"a": "2024-02-29"}),
        "large_map": (pa.array([[("a", 1)]], pa.map_(pa.large_string(), pa.int64())), {"a": 1}),
        "pairs": (pa.array([[(1, "b")]], pa.map_(pa.int64(), pa.string())), [[1, "b"]]),
        "talk": (pa.array([talk]), [talk[0] | {"at": "2024-02-29T01:02:03.004000", "cost": 0.1}]),
        "plain": (pa.array([[{"a": [1, None]}]]), [{"a": [1, None]}]),
    }
    # A second row of nulls.
    table = pa.table({name: pa.concat_arrays([value, pa.nulls(1, value.type)]) for name, (value, _) in columns.items()})
    parquet.write_table(table, tmp_path / "rows.parquet")
    first, second = (row for row, _ in read_rows(tmp_path / "rows.parquet"))
    assert first == {name: value for name, (_, value) in columns.items()}
    assert all(value is None for value in second.values())


CALLS = [
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {argument: [1, None]}}}]},
            {"role": "tool", "content": "1"},
        ],
        "tools": [{"function": {"name": name, "parameters": {"properties": {argument: {"type": "array"}}}}}],
        "extra_info": {argument: 1},
    }
    for name, argument in (("add", "a"), ("subtract", "b"))
]


def test_objects_of_a_typed_column_have_their_own_names_alone(tmp_path):
    """A chat template would render the others, as arguments that are null. Columns of rewards stay as they are."""
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.Table.from_pylist(CALLS), tmp_path / "rows.parquet")
    first, second = (row for row, _ in read_rows(tmp_path / "rows.parquet"))
    assert first == CALLS[0] | {"extra_info": {"a": 1, "b": None}}
    assert second == CALLS[1] | {"extra_info": {"a": None, "b": 1}}


def test_parquet_columns_that_cannot_be_read_are_named(tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    timed = pa.StructArray.from_arrays([pa.array([0], pa.timestamp("s"))] * 2, names=["a", "a"])
    for column in (twice, text, timed):
        parquet.write_table(pa.table({"good": [1], "bad": column}), tmp_path / "rows.parquet")
        with pytest.raises(UserError, match=r"rows.parquet: the column 'bad' cannot be read: [^\n]+$"):
            read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n1,2,3\n", "rows.csv:3: 3 cells, and the first line names 2 columns"),
        (b'a,b\n"1"x,2\n', "rows.csv:2: not CSV: "),
        (b"a\n\xff\n", "rows.csv: not UTF-8"),
        (b"a,b\n", "rows.csv: holds no rows"),
        (b"", "rows.csv: holds no rows"),
    ],
)
def test_damaged_csv(tmp_path, content, said):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_rows(tmp_path / "rows.csv")


def test_several_files_with_weights(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"i": i} for i in range(4)])
    second = tmp_path / "b.csv"
    second.write_text("i\n7\n8\n")
    both = f"{first}, {second}"

    def rows(**keys):
        return [row["i"] for row, _ in read_dataset(both, DataConfig(train=both, **keys))]

    assert rows() == [0, 1, 2, 3, "7", "8"]
    assert rows(train_weights=[0.5, 2.0]) == [0, 2, "7", "7", "8", "8"]
    assert rows(train_weights=[1.5, 0.1]) == [0, 0, 1, 2, 2, 3, "7"]
    # 1.6 rows of each are two.
    assert rows(train_weights=[0.4, 0.8]) == [0, 2, "7", "8"]
    # The weights are those of data.train.
    assert len(read_dataset(both, DataConfig(train=first, train_weights=[2.0]))) == 6
    with pytest.raises(ConfigError, match="one weight for each of the 2 files, got 1"):
        rows(train_weights=[1.0])
    with pytest.raises(ConfigError, match="data.train_weights must be above 0, got 0"):
        rows(train_weights=[1.0, 0.0])
    with pytest.raises(UserError, match="c.jsonl: no such file"):
        read_dataset(both + f",{tmp_path / 'c.jsonl'}", DataConfig(train="x"))
    with sampled_rows(2):
        assert rows() == [0, 3]
        with sampled_rows(9):
            assert rows() == [0, 1, 2, 3, "7", "8"]
        assert len(rows()) == 2
    comma = write(tmp_path / "a,b.jsonl", [{"i": 9}])
    assert read_dataset(comma, DataConfig(train=comma))[0][0] == {"i": 9}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of one dataset, of these files, whose rows say where they are from."""
    hub, parquet = pytest.importorskip("huggingface_hub"), pytest.importorskip("pyarrow.parquet")
    import pyarrow

    asked = []

    def make(*names):
        for name in names:
            path = tmp_path / "cache" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                parquet.write_table(pyarrow.table({"from": [name, name]}), path)
            else:
                path.write_text(json.dumps({"from": name}) + "\n")

        def listed(repo_id, repo_type):
            asked.append((repo_id, repo_type))
            return list(names)

        monkeypatch.setattr(hub, "list_repo_files", listed)
        monkeypatch.setattr(hub, "hf_hub_download", lambda repo, name, repo_type: str(tmp_path / "cache" / name))
        return asked

    monkeypatch.chdir(tmp_path)
    return make


@pytest.mark.parametrize(
    ("names", "keys", "train", "held_back"),
    [
        (("main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet", "main/test-00000-of-00001.parquet",
          "socratic/train-00000-of-00001.parquet", "README.md"), {}, [0, 0, 1, 1], [2, 2]),
        (("main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet",
          "socratic/test-00000-of-00001.parquet"), {"name": "socratic"}, [1, 1], [2, 2]),
        (("data/train-00000-of-00001.parquet", "data/train_extra-00000-of-00001.parquet", "data/test.jsonl"),
         {}, [0, 0], [2]),
        (("train.jsonl", "validation.jsonl"), {"eval_split": "validation"}, [0], [1]),
        (("data/train.json", "data/test.JSONL", "dataset_infos.json"), {}, [0], [1]),
        # The only folder with rows.
        (("plain/train.json", "plain/test.jsonl", "dataset_infos.json"), {}, [0], [1]),
    ],
)  # fmt: skip
def test_datasets_of_the_hub(hub, names, keys, train, held_back):
    asked = hub(*names)
    data = DataConfig(train="openai/gsm8k", eval="allenai/other", **keys)
    assert [row["from"] for row, _ in read_dataset(data.train, data)] == [names[i] for i in train]
    assert [row["from"] for row, _ in read_dataset(data.eval, data)] == [names[i] for i in held_back]
    assert asked == [("openai/gsm8k", "dataset"), ("allenai/other", "dataset")]


def test_two_splits_of_one_dataset_of_the_hub(hub):
    hub("train.jsonl", "test.jsonl")
    data = DataConfig(train="openai/gsm8k", eval="openai/gsm8k")
    for for_eval, name in ((False, "train.jsonl"), (True, "test.jsonl")):
        assert [row["from"] for row, _ in read_dataset("openai/gsm8k", data, for_eval)] == [name]


def test_what_the_hub_does_not_have(hub, tmp_path, monkeypatch):
    hub("main/train-00000-of-00001.parquet")
    with pytest.raises(UserError, match=r"a/b: no split 'valid' \(data.name, data.split\); the dataset has main/"):
        read_dataset("a/b", DataConfig(train="a/b", split="valid"))
    import huggingface_hub

    def unreachable(*arguments, **keys):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", unreachable)
    unreachable = r"^a/b: no such file in /.*, nor could it be fetched from the Hugging Face hub \(no network\)$"
    with pytest.raises(UserError, match=unreachable):
        read_rows("a/b")
    (tmp_path / "a").mkdir()
    for missing in ("a/b", "c/d.jsonl", "c/d.CSV", "x"):
        with pytest.raises(UserError, match=f"^{missing}: no such file in /"):
            read_rows(missing)
