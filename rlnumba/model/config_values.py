"""Values of a JSON object, read with their types; a wrong one is a UserError that names file and key."""

import json
from pathlib import Path

from rlnumba.data.pointers import unfetched
from rlnumba.errors import UserError

REQUIRED = object()
# Model types with linear attention.
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")


def read_json(path):
    """The object in a JSON file; UserError naming the file if it is missing, damaged, or not an object."""
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (a Hugging Face model folder has one)") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(unfetched(path) or f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def get(raw, key, kind, source, default=REQUIRED):
    """raw[key], of the given type; an absent or null key takes the default, or is an error without one."""
    value = raw.get(key)
    if value is None:
        if default is REQUIRED:
            raise UserError(f"{source}: missing key {key!r}")
        return default
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{source}: {key} must be {kind.__name__}, got {value!r}")
    return kind(value)


def count(raw, key, source, default=REQUIRED):
    """raw[key], an int of at least 1."""
    value = get(raw, key, int, source, default)
    if value is not None and value < 1:
        raise UserError(f"{source}: {key} must be at least 1, got {value}")
    return value


def positive(raw, key, source, default=REQUIRED):
    """raw[key], a finite float above 0."""
    value = get(raw, key, float, source, default)
    if value is not None and not 0.0 < value < float("inf"):
        raise UserError(f"{source}: {key} must be positive, got {value}")
    return value
