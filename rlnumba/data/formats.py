"""The files that rows come from: .jsonl and .json (lines or one array), .csv, .parquet.

Rows have JSON's values whatever the file: times of parquet are ISO 8601 text, durations seconds, decimals numbers, and
bytes alone stay as they are. A csv file has text alone; `cells`, {column: one of the functions below}, says how those
columns are read that a trainer uses as something else. So text that looks like a number or JSON stays text elsewhere,
and a column has one type in all rows.
"""

import ast
import csv
import functools
import json
import re
import sys
import warnings

import numpy as np

from rlnumba.data.pointers import unfetched
from rlnumba.errors import UserError, shown

FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
OBJECT = re.compile(r"""\s*\{\s*["'}]""")
# Columns with variables of the chat template.
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
# pandas' name of an index without one, in parquet files; in csv files its name is empty.
INDEX = re.compile(r"__index_level_\d+__")


def kind_of(value):
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {shown(value)}")


def text_cell(text):
    """A csv cell as it is."""
    return text


def flag_cell(text):
    """A csv cell as bool: true or false in any case, 1 or 0. Raises ValueError."""
    if text.lower() not in FLAGS:
        raise ValueError(f"must be true or false, got {shown(text)}")
    return FLAGS[text.lower()]


def number_cell(text):
    """A csv cell as int or float, also nan and inf as pandas writes them. Raises ValueError."""
    try:
        return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)
    except ValueError as error:  # also an integer of more digits than Python converts
        raise ValueError(f"must be a number, got {shown(text)}") from error


def json_cell(text):
    """A csv cell as the list or object that it holds as JSON, or as a Python literal, which pandas writes.

    Raises ValueError.
    """
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        value, problem = _literal(text), str(error)
        if value is None:
            raise ValueError(f"is not JSON: {problem}") from error
    if not isinstance(value, list | dict):
        raise ValueError(f"must be a JSON list or object, got {kind_of(value)}")
    return value


def chat_cell(text):
    """A csv cell as a list of messages where it begins as one, and as it is elsewhere. Raises ValueError."""
    return json_cell(text) if MESSAGES.match(text) else text


def object_cell(text):
    """A csv cell as an object where it begins as one, and as it is elsewhere. Raises ValueError."""
    return json_cell(text) if OBJECT.match(text) else text


def _literal(text):
    """The list or dict of a Python literal with JSON's values, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a backslash in a text
            value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value)) if isinstance(value, list | dict) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def chat_value(name, value):
    """A column's value out of a table with types: messages and TEMPLATE_COLUMNS without the nulls of their objects,
    any other one as it is.

    All objects of a typed column have the names of all others, so that a tool's schema has the arguments of every tool,
    with null as the value, and chat templates would render them. TRL: remove_none_values.
    """
    first = value[0] if isinstance(value, list) and value else None
    is_chat = name in TEMPLATE_COLUMNS or (isinstance(first, dict) and isinstance(first.get("role"), str))
    return _without_nulls(value) if is_chat else value


def _without_nulls(value):
    """A value of JSON without the names of its objects, at any depth, that have null; lists keep theirs."""
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value


def _unique(names, cells, where):
    """Names of columns of which none occurs twice: a later `answer` is `answer.1`, as for pandas, which a line says.

    Raises UserError for a column that the trainer itself reads.
    """
    found = []
    for name in names:
        if name in found:
            if name in cells:
                raise UserError(f"{where}: the column {name!r} is there twice")
            number = next(i for i in range(1, len(names) + 1) if f"{name}.{i}" not in {*names, *found})
            _warn(f"{where}: the column {name!r} is there twice; the later one is {f'{name}.{number}'!r} here")
            name = f"{name}.{number}"
        found.append(name)
    return found


@functools.cache
def _warn(text):
    """Print a warning, once a process: a file is read several times."""
    print(f"rlnumba: warning: {text}", file=sys.stderr, flush=True)


def csv_rows(path, cells):
    """The (row, where) of a csv file, whose first line names the columns; an empty cell is None.

    pandas' index, which are first columns without a name, is left out.
    """
    names, table = _csv_table(path)
    first = next((i for i, name in enumerate(names) if name), None)
    if first is None:
        if names:
            raise UserError(f"{path}:1: no column has a name")
        return []
    empty = {i for i, name in enumerate(names) if not name and not any(row[i] for row, _ in table)}
    for i, name in enumerate(names):
        if not name and i > first and i not in empty:
            raise UserError(f"{path}:1: column {i + 1} has no name")
    kept = [i for i in range(first, len(names)) if i not in empty]
    unique = _unique([names[i] for i in kept], cells, f"{path}:1")
    columns = [
        _csv_column(name, [(row[i], where) for row, where in table], cells.get(name, text_cell))
        for i, name in zip(kept, unique, strict=True)
    ]
    return [
        (dict(zip(unique, values, strict=True)), where)
        for (_, where), values in zip(table, zip(*columns, strict=True), strict=True)
    ]


def _csv_column(name, texts, convert):
    """The values of one column from its (text, where): list. Raises UserError naming the line of a wrong one."""
    values, first = [], None
    for text, where in texts:
        try:
            value = convert(text) if text else None
        except ValueError as error:
            raise UserError(f"{where}: {name!r} {error}") from error
        values.append(value)
        if first is None and value is not None:
            first = value, where
        elif convert is not number_cell and value is not None and type(value) is not type(first[0]):
            other, line = kind_of(first[0]), first[1].rpartition(":")[2]
            raise UserError(f"{where}: {name!r} is {kind_of(value)}, and {other} in line {line}")
    if convert is number_cell and any(isinstance(value, float) for value in values):
        try:
            values = [None if value is None else float(value) for value in values]
        except OverflowError:
            pass  # an integer beyond float64, which stays what it is
    return values


def _csv_table(path):
    """(names of the columns, the (cells, where) of all other lines) of a csv file."""
    table, start = [], 1
    # The module's limit of a cell, 131,072 characters, is one for all of the process.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, None) or []
            start = reader.line_num + 1
            for row in reader:
                where, start = f"{path}:{start}", reader.line_num + 1
                if not row:
                    continue
                if len(row) != len(names):
                    raise UserError(f"{where}: {len(row)} cells, and the first line names {len(names)} columns")
                table.append((row, where))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise UserError(f"{path}:{start}: not CSV: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        csv.field_size_limit(limit)
    return names, table


def _object(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise TwiceError(next(name for name in names if names.count(name) > 1))
    return found


class TwiceError(ValueError):
    """A key that a JSON object has twice."""

    def __init__(self, name):
        super().__init__(f"the key {shown(name)} is there twice in an object")


# How files begin that no line of JSON begins like, and what they are.
PACKED = {
    b"\x1f\x8b": "is packed by gzip: unpack it with gunzip",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: unpack it with unzstd",
    b"PK\x03\x04": "is a zip archive: unpack it",
    b"PAR1": "is a parquet file: its name must end in .parquet",
}
DECODER = json.JSONDecoder(object_pairs_hook=_object)
SPACE = re.compile(r"[ \t\r\n]*")


def json_rows(path, cells):
    """The (row, where) of JSON: an array of objects, or an object in each line that is not blank."""
    try:
        text = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if (pointer := unfetched(path)) is not None:
        raise UserError(pointer)
    packed = next((kind for magic, kind in PACKED.items() if text.startswith(magic)), None)
    if packed is not None:
        raise UserError(f"{path}: {packed}, and rows are read from .jsonl, .json, .parquet or .csv files")
    if text[:100].lstrip()[:1] == b"[":
        rows = _array_rows(text, path)
        if rows is not None:
            return rows
    # Lines end at \n alone: a text may contain U+2028 and other line ends of Unicode.
    lines = enumerate(text.split(b"\n"), start=1)
    return [(_json_row(line, f"{path}:{number}"), f"{path}:{number}") for number, line in lines if line.strip()]


def _array_rows(data, path):
    """The (row, where) of one array, or None if more follows it: then its lines are arrays."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{data[: error.start].count(10) + 1}: not UTF-8: {error.reason}") from error
    rows, at = [], SPACE.match(text, text.index("[") + 1).end()
    try:
        while text[at : at + 1] != "]" or rows:
            where = f"{path}: row {len(rows) + 1}"
            value, at = DECODER.raw_decode(text, at)
            rows.append((value, where))
            at = SPACE.match(text, at).end()
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = SPACE.match(text, at + 1).end()
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except TwiceError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON that can be read: {error}") from error
    if SPACE.match(text, at + 1).end() < len(text):
        return None
    return [(_checked_row(value, text, where), where) for value, where in rows]


def _json_row(line, where):
    try:
        text = line.decode("utf-8")
        return _checked_row(DECODER.decode(text), text, where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    except TwiceError as error:
        raise UserError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list in 5,000 lists
        raise UserError(f"{where}: not JSON that can be read: {error}") from error


def _checked_row(value, text, where):
    """A row out of the JSON `text`. Raises UserError if it is no object, or has half of a surrogate pair."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, got {kind_of(value)}")
    if "\\u" in text:
        try:
            # An escape may be half of a surrogate pair, which has no UTF-8 and no tokens.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            raise UserError(f"{where}: {half} is half of a character") from error
    return value


def parquet_rows(path, cells):
    """The (row, where) of a parquet file; pandas' index is left out."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow; pip install 'rlnumba[parquet]'") from error
    try:
        # Not read_table, which takes folders named a=b above the file for columns.
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        unreadable = f"{path}: not a readable parquet file: {str(error).splitlines()[0]}"
        raise UserError(unfetched(path) or unreadable) from error
    kept = [i for i, name in enumerate(table.column_names) if not INDEX.fullmatch(name)]
    names = _unique([table.column_names[i] for i in kept], cells, path)
    columns = []
    for name, i in zip(names, kept, strict=True):
        try:
            columns.append([chat_value(name, each) for each in _parquet_values(table.column(i), pyarrow.types)])
        except (pyarrow.ArrowException, ValueError) as error:  # text that is not UTF-8, a struct with a name twice
            raise UserError(f"{path}: the column {name!r} cannot be read: {str(error).splitlines()[0]}") from error
    return [
        (dict(zip(names, values, strict=True)), f"{path}: row {number}")
        for number, values in enumerate(zip(*columns, strict=True), start=1)
    ]


def _parquet_values(column, types):
    if _has_json_values(column.type, types):
        return column.to_pylist()
    return [_parquet_value(each, types) for each in column]


def _has_json_values(kind, types):
    """Whether pyarrow makes JSON's values, or bytes, of an Arrow type."""
    if types.is_map(kind) or isinstance(kind, types.lib.BaseExtensionType):
        return False
    if types.is_dictionary(kind):
        return _has_json_values(kind.value_type, types)
    if types.is_nested(kind):
        return all(_has_json_values(kind.field(i).type, types) for i in range(kind.num_fields))
    return not (types.is_temporal(kind) or types.is_decimal(kind) or types.is_float16(kind))


def _parquet_value(scalar, types):
    """The value of an Arrow scalar as JSON has it."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if types.is_dictionary(kind) or isinstance(kind, types.lib.BaseExtensionType):
        return _parquet_value(scalar.value, types)
    if types.is_struct(kind):
        return _object([(kind.field(i).name, _parquet_value(scalar[i], types)) for i in range(kind.num_fields)])
    if types.is_map(kind):
        pairs = [[_parquet_value(each[i], types) for i in range(2)] for each in scalar.values]
        return _object(pairs) if types.is_string(kind.key_type) or types.is_large_string(kind.key_type) else pairs
    if types.is_nested(kind):
        return [_parquet_value(each, types) for each in scalar.values]
    if types.is_duration(kind):
        return scalar.value * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[kind.unit]
    if types.is_temporal(kind):
        return _time_text(scalar.value, kind, types)
    value = scalar.as_py()
    if types.is_decimal(kind):
        return int(value) if kind.scale <= 0 else float(value)
    return float(value) if types.is_float16(kind) else value


def _time_text(value, kind, types):
    """A date, time or timestamp in the units of an Arrow type as ISO 8601: str; a year may have ten digits."""
    if types.is_date(kind):
        return str(np.datetime64(value, "D" if types.is_date32(kind) else "ms").astype("datetime64[D]"))
    if types.is_time(kind):
        return str(np.datetime64(value, kind.unit)).partition("T")[2]
    return str(np.datetime64(value, kind.unit)) + ("" if kind.tz is None else "Z")
