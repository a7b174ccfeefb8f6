"""Rows of csv files, of several files with weights, and of datasets of the hub."""

import json

import pytest

from rlnumba.config import DataConfig
from rlnumba.data import read_dataset, read_rows
from rlnumba.errors import ConfigError, UserError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        '\ufeffprompt,completion,answer\n"two\nlines, and ""quotes""", yes,42\n\n'
        '"[{""role"": ""user"", ""content"": ""hi""}]",[not json,\n',
        newline="\r\n",
    )
    assert read_rows(path) == [
        ({"prompt": 'two\r\nlines, and "quotes"', "completion": " yes", "answer": "42"}, f"{path}:2"),
        ({"prompt": [{"role": "user", "content": "hi"}], "completion": "[not json", "answer": None}, f"{path}:5"),
    ]


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
    # The weights are those of data.train.
    assert len(read_dataset(both, DataConfig(train=first, train_weights=[2.0]))) == 6
    with pytest.raises(ConfigError, match="one weight for each of the 2 files, got 1"):
        rows(train_weights=[1.0])
    with pytest.raises(ConfigError, match="data.train_weights must be above 0, got 0"):
        rows(train_weights=[1.0, 0.0])
    with pytest.raises(UserError, match="c.jsonl: no such file"):
        read_dataset(both + f",{tmp_path / 'c.jsonl'}", DataConfig(train="x"))
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
    with pytest.raises(UserError, match="^a/b: no such file, and not to be had from the Hugging Face hub: no network$"):
        read_rows("a/b")
    (tmp_path / "a").mkdir()
    for missing in ("a/b", "c/d.jsonl", "x"):
        with pytest.raises(UserError, match=f"^{missing}: no such file$"):
            read_rows(missing)
