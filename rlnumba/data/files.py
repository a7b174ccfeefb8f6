"""Rows of files (formats.py), of datasets of the hub and of reasoning-gym, and checks of their values.

Every error names the file and the line.
"""

import fnmatch
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rlnumba.config.data import RESERVED_VARIABLES, ROW_FILES, is_of_hub, paths_of_rows
from rlnumba.data.formats import DECODER, TEMPLATE_COLUMNS, csv_rows, json_cell, json_rows, kind_of, parquet_rows
from rlnumba.data.gym import gym_rows, is_gym
from rlnumba.data.verifiers import is_taskset, task_rows
from rlnumba.errors import ConfigError, UserError, missing, shown

READERS = dict(zip(ROW_FILES, (json_rows, json_rows, parquet_rows, csv_rows), strict=True))
NAMED = ".jsonl, .json, .parquet or .csv"
# The largest number of a row or a reward: float32 holds the sum of its square and many others.
LARGEST = 1e18
# How the csv cells of columns with variables of the chat template are read.
TEMPLATE_CELLS = dict.fromkeys(TEMPLATE_COLUMNS, json_cell)

# The most rows that read_dataset returns inside sampled_rows; None outside of it.
_most_rows = None


def read_dataset(path, data, for_eval=None, cells=None):
    """The rows of data.train, or of data.eval where for_eval is True: list of (dict, str), as read_rows.

    path: one file or dataset of the hub or of reasoning-gym ("gym:NAME"), or several, separated by commas. data:
    DataConfig, whose name and split choose within a dataset of the hub, and whose gym has reasoning-gym's arguments.
    Each of several files of data.train with train_weights has round(weight x its rows) rows, evenly taken from it.
    for_eval: None where the path says it; data.train and data.eval may be splits of one dataset. Raises ConfigError for
    a wrong number of weights.
    """
    for_eval = path != data.train if for_eval is None else for_eval
    paths = paths_of_rows(str(path))
    split = data.eval_split if for_eval else data.split
    parts = [
        gym_rows(each, data, for_eval)
        if is_gym(each)
        else task_rows(each, data, for_eval)
        if is_taskset(each)
        else read_rows(each, data.name, split, cells)
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


def check_there(data):
    """Raise UserError for a file in data.train or data.eval that is not there. data: DataConfig. Reads nothing."""
    for value in filter(None, (data.train, data.eval)):
        for path in map(Path, paths_of_rows(value)):
            if not is_gym(path) and not is_taskset(path):
                _check_path(path)


def _check_path(path):
    """Raise UserError for a path that is neither a file's nor the id of a dataset."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a {NAMED} file")
    if not path.exists() and not is_of_hub(path):
        raise UserError(missing(str(path)))


def read_rows(path, name=None, split="train", cells=None):
    """The rows of a file or a dataset of the hub, each with its file and line ("train.jsonl:7"): list of (dict, str).

    name, split: those of a dataset of the hub. cells: {column: function of formats.py} for the columns of a csv file
    that are read as something else than text, or are read by the trainer itself. Raises UserError for a missing or
    empty file, and for the first line that is no row.
    """
    path = Path(path)
    _check_path(path)
    files = [path] if path.exists() else _hub_files(str(path), name, split)
    rows = [row for file in files for row in READERS.get(file.suffix.lower(), json_rows)(file, cells or {})]
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return rows


def _hub_files(repo_id, name, split):
    """The local files of a split of a dataset of the hub, downloaded if they are not cached: list of Path."""
    try:
        import huggingface_hub
    except ImportError as error:
        remedy = "to fetch it from the Hugging Face hub, pip install 'rlnumba[hub]'"
        raise UserError(f"{missing(repo_id)}; {remedy}") from error
    try:
        files = sorted(huggingface_hub.list_repo_files(repo_id, repo_type="dataset"))
        # Only .json files of the split have rows: a dataset's description is a .json file, too.
        rows = [
            file
            for file in files
            if (kind := Path(file).suffix.lower()) in READERS and (kind != ".json" or Path(file).stem.startswith(split))
        ]
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
            found = ", ".join(rows[:8]) or f"no {NAMED} file"
            raise UserError(f"{repo_id}: no split {split!r} (data.name, data.split); the dataset has {found}")
        return [Path(huggingface_hub.hf_hub_download(repo_id, file, repo_type="dataset")) for file in chosen]
    except (OSError, ValueError) as error:
        raise UserError(missing(repo_id, reason=str(error))) from None


def column_value(row, column, where):
    if column not in row or row[column] is None:
        raise UserError(f"{where}: no {column!r}; its columns are {', '.join(row) or 'none'}")
    return row[column]


def text_value(row, column, where):
    text = column_value(row, column, where)
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: {column!r} must be a non-empty string, got {kind_of(text)}")
    return text


def number_value(value, where):
    """A number of a row as it is, int or float; `where` names it.

    Raises UserError for another value, for NaN, and beyond LARGEST.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where} must be a number, got {kind_of(value)}")
    if abs(value) <= LARGEST:
        return value
    raise UserError(f"{where} must be a number from {-LARGEST:g} to {LARGEST:g}, got {shown(value)}")


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
        return DECODER.decode(value)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where}: {name!r} is a string that is not JSON: {reason}") from error


def check_messages(messages, where):
    """Raises UserError unless `messages` is a non-empty list of {"role": str, "content": ...}; `where` begins it."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where} must be a non-empty list of messages, got {kind_of(messages)}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}: a message must have a role and a content, got {json.dumps(message, default=str)[:80]}"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise UserError(f"{where}: the content of a message must be a string, got {kind_of(message['content'])}")
        for item in message["content"] if isinstance(message.get("content"), list) else ():
            if not isinstance(item, dict) or item.get("type", "text") != "text":
                kind = item.get("type") if isinstance(item, dict) else kind_of(item)
                raise UserError(f"{where}: a message has an item of type {kind}, and models read text alone")


def check_prompt(value, where):
    """Raises UserError unless value is a non-empty string or a list of messages."""
    if isinstance(value, list):
        check_messages(value, where)
    elif not isinstance(value, str):
        raise UserError(f"{where} must be a string or a list of messages, got {kind_of(value)}")
    elif not value:
        raise UserError(f"{where} is empty")


def check_one_form(prompt, completion, where, completion_column, data):
    """Raises UserError for a string as the prompt of a completion that is a list of messages.

    Unless data.apply_chat_template makes a message of it: a string is not in a chat template otherwise.
    """
    if isinstance(prompt, str) and isinstance(completion, list) and not data.apply_chat_template:
        raise UserError(
            f"{where}: {data.prompt_column or 'prompt'!r} is a string, and {completion_column!r} a list of messages; "
            "data.apply_chat_template = true makes a message of it"
        )


def check_completion(prompt, completion, where, completion_column, data):
    """Raises UserError unless a completion is a string or a list of messages, and of one form with its prompt."""
    if isinstance(completion, list):
        check_messages(completion, f"{where}: {completion_column!r}")
    elif not isinstance(completion, str):
        raise UserError(f"{where}: {completion_column!r} must be a string, got {kind_of(completion)}")
    check_one_form(prompt, completion, where, completion_column, data)


def check_ids(ids, vocab_size, where):
    """Raises UserError naming `where` if a token id is outside of [0, vocab_size)."""
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UserError(f"{where}: token id {outside[0]} is outside of the model's vocabulary of {vocab_size}")
