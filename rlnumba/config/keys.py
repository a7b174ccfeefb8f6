"""Keys of a run: each is a dataclass field with its type, default, limits and line of documentation.

A value out of range is a ConfigError that names the key.
"""

import difflib
import math
import operator
import os
import types
import typing
import urllib.parse
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import NamedTuple

import numpy as np

from rlnumba.errors import ConfigError, shown

# Limits of a key: how a message names each, and whether a value meets it.
LIMITS = {
    "above": ("above", operator.gt),
    "minimum": ("at least", operator.ge),
    "below": ("below", operator.lt),
    "maximum": ("at most", operator.le),
}
# A value of each type, as a message says what a key must be.
TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list[str]: "a list of strings",
    list[float]: "a list of numbers",
    dict[str, typing.Any]: "a table",
}
REQUIRED = MISSING
# Magnitudes that float32 has, besides 0; smaller ones are rounded to 0.
SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-149, (2 - 2.0**-23) * 2.0**127


class KeyCondition(NamedTuple):
    """A condition on the value of one of several keys, each "section.name": is_met(value), which `text` says."""

    keys: tuple
    text: str
    is_met: Callable

    def __str__(self):
        return f"{self.text} as {' or '.join(self.keys)}"


def key(default, doc, **limits):
    """A dataclass field with its line of documentation.

    limits: those of LIMITS, `choices` (tuple; of a list, of each element), `nonempty` (bool), `words` (dict of other
    spellings, in lower case), `single` (bool: one string stands for a list of it), `of` (the name of a constant of Run
    that is true for the trainers that read it; by default all read it that have the section), `needs` (a key
    "section.name" that must be set, such a key and the values that it may have, a KeyCondition, or a list of these,
    without each of which this key has no effect).
    """
    metadata = {"doc": doc, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def fits_float32(number):
    """Whether float32 holds a number, rounded, neither as infinity nor a small one as 0; not NaN."""
    return number == 0 or SMALLEST_FLOAT32 <= abs(number) <= LARGEST_FLOAT32


def _not_finite(value):
    """The first number that is not finite in a value, in lists and tables of any depth: float, or None."""
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return next((found for item in items if (found := _not_finite(item)) is not None), None)
    return value if isinstance(value, float) and not math.isfinite(value) else None


def range_problem(metadata, value):
    """The limit that a value violates, as the end of a sentence: str, or None."""
    if isinstance(value, dict):
        found = {name: number for name, item in value.items() if (number := _not_finite(item)) is not None}
        return next((f"must have finite numbers, got {number} in {name}" for name, number in found.items()), None)
    if isinstance(value, list) and "choices" in metadata:
        return next((problem for each in value if (problem := range_problem(metadata, each))), None)
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and not -(2**63) <= number < 2**63:
            return f"must be an integer of 64 bits, got {shown(number)}"
        if isinstance(number, float) and not math.isfinite(number):
            return f"must be a finite number, got {number}"
        if isinstance(number, float) and not fits_float32(number):
            return f"must be a number that float32 holds, got {number}"
    if value == "" and "nonempty" in metadata:
        return "must not be empty"
    if "choices" in metadata and value not in metadata["choices"]:
        return f"must be one of {', '.join(map(str, metadata['choices']))}, got {value!r}"
    limits = [(word, is_met, metadata[name]) for name, (word, is_met) in LIMITS.items() if name in metadata]
    if all(is_met(value, limit) for _, is_met, limit in limits):
        return None
    return f"must be {' and '.join(f'{word} {limit}' for word, _, limit in limits)}, got {value}"


def as_type(value, hint):
    """A value of TOML, JSON or Python as the type of a key. Raises ValueError if it is of another type.

    Scalars of NumPy, tuples and paths stand for Python's numbers, lists and strings.
    """
    kind = typing.get_origin(hint) or hint
    if isinstance(value, np.generic):
        value = value.item()
    if kind is float and type(value) is int:
        return float(value)
    if kind is list and isinstance(value, tuple):
        value = list(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError
    return [as_type(item, *typing.get_args(hint)) for item in value] if kind is list else value


def check_url(name, url):
    """Raise ConfigError, which begins with the key's name, for what is no http:// or https:// URL with a host."""
    if not isinstance(url, str) or url.partition("://")[0] not in ("http", "https"):
        raise ConfigError(f"{name} must begin with http:// or https://, got {shown(url)}")
    try:
        parts = urllib.parse.urlsplit(url)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        has_place = False
    if not has_place:
        raise ConfigError(f"{name} must have a host, and a port that is a number up to 65535, got {shown(url)}")


def typed_value(f, value, convert=as_type):
    """The value of a key's field as its type, by convert(value, hint) unless it is one of the key's words or None.

    Raises ConfigError with the end of a sentence about the key.
    """
    hint, optional = split_optional(f.type)
    words = f.metadata.get("words", {})
    if value is None and optional:
        return None
    if "single" in f.metadata and convert is as_type and isinstance(value, str):
        value = [value]
    word = str(value).lower() if isinstance(value, str | bool) else None
    if word in words:
        return words[word]
    try:
        return convert(value, hint)
    except (ValueError, OverflowError) as error:
        # For a key of strings or lists the words are other spellings, and "choices" names what there is.
        named = [f'"{word}"' for word in words] if hint in (int, float) else []
        expected = " or ".join([TYPE_NAMES[hint], *named, *(['"None"'] if optional else [])])
        raise ConfigError(f"must be {expected}, got {shown(value, 200)}") from error


def check_keys(owner, section):
    """Give each key of a dataclass that is made the type of its field. Raises ConfigError with the name of a key whose
    value is of another type or out of range."""
    for f in fields(owner):
        value, name = getattr(owner, f.name), f"{section}.{f.name}" if section else f.name
        if "doc" not in f.metadata or value is REQUIRED:
            continue
        hint = split_optional(f.type)[0]
        if hint not in TYPE_NAMES:
            if not isinstance(value, f.type):
                named = [each.__name__ for each in typing.get_args(hint) if each is not types.NoneType]
                raise ConfigError(f"{name} must be a {' or '.join(named)}, got {shown(value)}")
        else:
            try:
                value = typed_value(f, value)
            except ConfigError as error:
                raise ConfigError(f"{name} {error}") from error
            # The dataclass is frozen.
            object.__setattr__(owner, f.name, value)
        if value is not None and (problem := range_problem(f.metadata, value)):
            raise ConfigError(f"{name} {problem}")


def refuse_unknown(owner, names, known, elsewhere=()):
    """Raise TypeError for the first of the keywords of a constructor that is none of `known`, with the nearest of them.

    elsewhere: {name: how that is said instead} of keywords for which this is known.
    """
    for name in names:
        if name not in known and name in elsewhere:
            raise TypeError(f"{owner} has no {name}: {elsewhere[name]}")
        if name not in known:
            (near,) = difflib.get_close_matches(name, [*known], n=1, cutoff=0)
            raise TypeError(f"{owner} has no {name}; did you mean {near}?")


class Section:
    """A section of a run, whose values are checked when it is made; `section` is its name.

    accepted: keywords of the constructor that are no fields. elsewhere: as refuse_unknown takes it.
    """

    accepted, elsewhere = frozenset(), {}

    def __new__(cls, *values, **keys):
        refuse_unknown(
            cls.__name__, [k for k in keys if k not in cls.accepted], cls.__dataclass_fields__, cls.elsewhere
        )
        return super().__new__(cls)

    def check_run(self, run):
        """Raise ConfigError for what other sections of a Run ask for and this one excludes."""

    def __post_init__(self):
        check_keys(self, self.section)


def _section_class(f):
    """The dataclass of a Run's field that is a section, which may be left out where None is allowed, or None."""
    kind = split_optional(f.type)[0]
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def section_fields(run_class):
    """{section name: name of the Run's attribute}, which differ where the former is a keyword of Python: dict."""
    return {kind.section: f.name for f in fields(run_class) if (kind := _section_class(f))}


def sections_of(run_class):
    """{section name: dataclass}, with "" for the keys above all sections: dict."""
    return {"": run_class} | {kind.section: kind for f in fields(run_class) if (kind := _section_class(f))}


def optional_sections_of(run_class):
    """The names of the sections that are None unless a file or an option has them: set."""
    return {kind.section for f in fields(run_class) if (kind := _section_class(f)) and split_optional(f.type)[1]}


def is_read(f, run_class):
    """Whether the trainer of a Run reads the key of a field of its sections: bool."""
    return "of" not in f.metadata or getattr(run_class, f.metadata["of"])


def keys_of(section_class, run_class=None):
    """{name: dataclass field} of the keys of one section, of all or of those that the trainer of a Run reads: dict."""
    found = {f.name: f for f in fields(section_class) if not _section_class(f)}
    return {name: f for name, f in found.items() if run_class is None or is_read(f, run_class)}


def default_of(f):
    """The default of a key's field, or REQUIRED."""
    return f.default if f.default_factory is MISSING else f.default_factory()


def set_keys(run):
    """(section, name, field) of each key of a Run whose value is not its default: generator."""
    sections = sections_of(type(run))
    for section, attribute in section_fields(type(run)).items():
        values = getattr(run, attribute)
        for name, f in {} if values is None else keys_of(sections[section]).items():
            if getattr(values, name) != default_of(f):
                yield section, name, f


def and_list(names):
    """Names as "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def check_owners(run):
    """Raise ConfigError for a key of other trainers in a section of a Run, and for what a section's check_run finds."""
    for section, name, f in set_keys(run):
        if not is_read(f, run):
            owners = run.trainers_that(f.metadata["of"])
            raise ConfigError(f"{section}.{name} is a key of {and_list(owners)}, not of {run.trainer}")
    for attribute in section_fields(type(run)).values():
        if (values := getattr(run, attribute)) is not None:
            values.check_run(run)


def without_effect(run):
    """["section.name has no effect: it needs ..."] of the keys of a Run that others keep from acting: list of str."""
    found, attributes = [], section_fields(type(run))
    for section, name, f in set_keys(run):
        for needed in needs_of(f.metadata):
            keys, is_met = _condition(needed)
            if not any(map(is_met, (_value_of(run, attributes, each) for each in keys))):
                found.append(f"{section}.{name} has no effect: it needs {needs_text(needed)}")
                break
    return found


def needs_of(metadata):
    """The conditions that a key needs, all of them: list, empty for a key without any."""
    needs = metadata.get("needs", [])
    return needs if isinstance(needs, list) else [needs]


def _condition(needs):
    """(keys, is_met) of a key's `needs`, as of a KeyCondition; of a list one element must meet it."""
    if isinstance(needs, KeyCondition):
        return needs.keys, needs.is_met
    if isinstance(needs, str):
        return (needs,), lambda value: any(value) if isinstance(value, list) else bool(value)
    name, wanted = needs
    return (name,), lambda value: any(each in wanted for each in (value if isinstance(value, list) else [value]))


def _value_of(run, attributes, name):
    """The value of a Run's key "section.name", None where the section is None; attributes: section_fields."""
    section, _, name = name.partition(".")
    return getattr(getattr(run, attributes[section], None), name, None)


def needs_text(needs):
    """The text of a key's `needs`: "train.packing", "train.loss_type = sapo"."""
    return str(needs) if isinstance(needs, str | KeyCondition) else f"{needs[0]} = {' or '.join(map(str, needs[1]))}"


def split_optional(hint):
    """(the type without None where it is one, whether None is allowed)."""
    if isinstance(hint, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner[0] if len(inner) == 1 else hint, len(inner) < len(typing.get_args(hint))
    return hint, False
