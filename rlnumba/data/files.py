"""Rows of a .jsonl or .parquet file, and checks of their values. Every error names the file and the line."""

import json
from pathlib import Path

import numpy as np

from rlnumba.errors import UserError


def read_rows(path):
    """The rows of a .jsonl or .parquet file, each with its file and line ("train.jsonl:7"): list of (dict, str).

    Raises UserError for a missing or empty file, and for the first line that is not a JSON object.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, not a .jsonl or .parquet file")
    if not path.exists():
        raise UserError(f"{path}: no such file")
    rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path))
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return rows


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
    """The chat template variables in a row, {"tools": list} or {}; a string is read as JSON."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: 'tools' is a string that is not JSON: {error.msg}") from error
    if not isinstance(tools, list | None):
        raise UserError(f"{where}: 'tools' must be a list, got {kind_of(tools)}")
    return {} if tools is None else {"tools": tools}


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
