"""Rows of .jsonl, .parquet and .csv files, of datasets of the hub and of reasoning-gym, and checks of their values.

Every error names the file and the line.
"""

import csv
import fnmatch
import json
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rlnumba.config.schema import RESERVED_VARIABLES
from rlnumba.data.gym import arguments_of, gym_rows, is_gym
from rlnumba.errors import ConfigError, UserError

KINDS = (".jsonl", ".parquet", ".csv")
# Columns with variables of the chat template.
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")

# Of sampled_rows.
_most_rows = None


def read_dataset(path, data, for_eval=None):
    """The rows of data.train, or of data.eval where for_eval is True: list of (dict, str), as read_rows.

    path: one file or dataset of the hub or of reasoning-gym ("gym:NAME"), or several, separated by commas. data:
    DataConfig, whose name and split choose within a dataset of the hub, and whose gym has reasoning-gym's arguments. Of
    several files of data.train with train_weights, each has round(weight x its rows) rows, evenly taken from it.
    for_eval: None where the path says it; data.train and data.eval may be splits of one dataset. Raises ConfigError for
    a wrong number of weights.
    """
    for_eval = path != data.train if for_eval is None else for_eval
    paths = [path] if Path(path).exists() else [part.strip() for part in str(path).split(",") if part.strip()]
    split = data.eval_split if for_eval else data.split
    parts = [
        gym_rows(each, arguments_of(each, data, for_eval), "data.eval_gym" if for_eval else "data.gym")
        if is_gym(each)
        else read_rows(each, data.name, split)
        for each in paths
    ]
    if data.train_weights is not None and not for_eval:
        if len(data.train_weights) != len(parts):
            raise ConfigError(
                f"data.train_weights must have one weight for each of the {len(parts)} files, got "
                f"{len(data.train_weights)}"
            )
        parts = [_weighted(rows, weight) for rows, weight in zip(parts, data.train_weights, strict=True)]
    rows = [row for rows in parts for row in rows]
    return rows if _most_rows is None or len(rows) <= _most_rows else _evenly_taken(rows, _most_rows)


def _weighted(rows, weight):
    if weight <= 0:
        raise ConfigError(f"data.train_weights must be above 0, got {weight}")
    return _evenly_taken(rows, max(1, round(weight * len(rows))))


def _evenly_taken(rows, count):
    return [rows[i * len(rows) // count] for i in range(count)]


@contextmanager
def sampled_rows(count):
    """Inside, read_dataset returns at most `count` rows, evenly taken: for what needs no more than an idea of them."""
    global _most_rows
    before, _most_rows = _most_rows, count
    try:
        yield
    finally:
        _most_rows = before


def read_rows(path, name=None, split="train"):
    """The rows of a file or a dataset of the hub, each with its file and line ("train.jsonl:7"): list of (dict, str).

    name, split: of a dataset of the hub. Raises UserError for a missing or empty file, and for the first line that is
    no row.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a .jsonl, .parquet or .csv file")
    if path.exists():
        files = [path]
    else:
        is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(path)) and path.suffix not in KINDS
        if not is_id or path.parent.exists():
            raise UserError(f"{path}: no such file")
        files = _hub_files(str(path), name, split)
    kinds = {".parquet": _parquet_rows, ".csv": _csv_rows}
    rows = [row for file in files for row in kinds.get(file.suffix, _jsonl_rows)(file)]
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return rows


def _hub_files(repo_id, name, split):
    """The local files of a split of a dataset of the hub, downloaded if they are not cached: list of Path."""
    try:
        import huggingface_hub
    except ImportError as error:
        remedy = "to fetch it from the Hugging Face hub, pip install 'rlnumba[hub]'"
        raise UserError(f"{repo_id}: no such file; {remedy}") from error
    try:
        files = sorted(huggingface_hub.list_repo_files(repo_id, repo_type="dataset"))
        rows = [file for file in files if Path(file).suffix in KINDS]
        folders = {str(Path(file).parent) for file in rows} - {".", "data"}
        folder = name or ("default" if "default" in folders else "main" if "main" in folders else None)
        if folder is None and len(folders) == 1 and not any(Path(file).parent.name in ("", "data") for file in rows):
            (folder,) = folders
        where = [f"{folder}/"] if folder else ["", "data/"]
        chosen = [
            file
            for file in rows
            if any(fnmatch.fnmatch(file, f"{at}{split}{rest}") for at in where for rest in ("-*", ".*"))
        ]
        if not chosen:
            found = ", ".join(rows[:8]) or "no .parquet, .jsonl or .csv file"
            raise UserError(f"{repo_id}: no split {split!r} (data.name, data.split); the dataset has {found}")
        return [Path(huggingface_hub.hf_hub_download(repo_id, file, repo_type="dataset")) for file in chosen]
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{repo_id}: no such file, and not to be had from the Hugging Face hub: {reason}") from None


def _csv_rows(path):
    """Yields (row, where); the first line names the columns. A cell is a string, a JSON list or object, or None."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, None)
            if not columns:
                return
            start = reader.line_num + 1
            for cells in reader:
                where, start = f"{path}:{start}", reader.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise UserError(f"{where}: {len(cells)} cells, and the first line names {len(columns)} columns")
                yield dict(zip(columns, map(_cell, cells), strict=True)), where
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise UserError(f"{path}:{start}: not CSV: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _cell(text):
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text or None


def _jsonl_rows(path):
    """Yields (row, where) for each line that is not blank."""
    try:
        # Lines end at \n alone: a text may contain U+2028 and other line ends of Unicode.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if b"\\u" in line:
                # An escape may be half of a surrogate pair, which has no UTF-8 and no tokens.
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8: {error.reason}") from error
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise UserError(f"{where}: {half} is half of a character") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list in 5,000 lists
            raise UserError(f"{where}: not JSON that can be read: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: must be a JSON object, got {kind_of(row)}")
        yield row, where


def _parquet_rows(path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow; pip install 'rlnumba[parquet]'") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
    return ((row, f"{path}: row {number}") for number, row in enumerate(rows, start=1))


def kind_of(value):
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value}")


def column_value(row, column, where):
    if column not in row or row[column] is None:
        raise UserError(f"{where}: no {column!r}; its columns are {', '.join(row) or 'none'}")
    return row[column]


def text_value(row, column, where):
    text = column_value(row, column, where)
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: {column!r} must be a non-empty string, got {kind_of(text)}")
    return text


def template_variables(row, where):
    """The chat template's variables in a row: its `tools`, a list, and those in its `chat_template_kwargs`, an object.

    Either may be a string, which is read as JSON.
    """
    tools, variables = (_json_value(row.get(name), name, where) for name in TEMPLATE_COLUMNS)
    if not isinstance(tools, list | None):
        raise UserError(f"{where}: 'tools' must be a list, got {kind_of(tools)}")
    if not isinstance(variables, dict | None):
        raise UserError(f"{where}: 'chat_template_kwargs' must be an object, got {kind_of(variables)}")
    found = {} if tools is None else {"tools": tools}
    if variables is None:
        return found
    if reserved := [name for name in variables if name in RESERVED_VARIABLES]:
        raise UserError(f"{where}: 'chat_template_kwargs' cannot set {reserved[0]!r}, which is no template's variable")
    # A file with types for its columns has null for each name that another row has.
    return found | {name: value for name, value in variables.items() if value is not None}


def _json_value(value, name, where):
    """A column's value, of a string what it is as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: {name!r} is a string that is not JSON: {error.msg}") from error


def check_messages(messages, where):
    """Raises UserError unless `messages` is a non-empty list of {"role": str, "content": ...}; `where` begins it."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where} must be a non-empty list of messages, got {kind_of(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: a message must have a role and a content, got {json.dumps(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None):
            raise UserError(f"{where}: the content of a message must be a string, got {kind_of(message['content'])}")


def check_prompt(value, where):
    """Raises UserError unless value is a non-empty string or a list of messages."""
    if isinstance(value, list):
        check_messages(value, where)
    elif not isinstance(value, str):
        raise UserError(f"{where} must be a string or a list of messages, got {kind_of(value)}")
    elif not value:
        raise UserError(f"{where} is empty")


def check_ids(ids, vocab_size, where):
    """Raises UserError naming `where` if a token id is outside of [0, vocab_size)."""
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UserError(f"{where}: token id {outside[0]} is outside of the model's vocabulary of {vocab_size}")
