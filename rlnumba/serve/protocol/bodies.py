"""JSON bodies: read with errors that name the key, and the types of their values."""

import json
import math

import click

from rlnumba.errors import shown
from rlnumba.serve.protocol.errors import ApiError

MOST_ITEMS = 1024


def _no_constant(name):
    raise ValueError(f"{name} is not JSON")


def parse_json(data):
    """The object that a body (bytes) is. Raises ApiError."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
        # A lone half of a surrogate pair is no text.
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError("the body nests too deeply") from None
    except UnicodeEncodeError:
        raise ApiError("the body has half of a surrogate pair, which is not Unicode") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object, got {shown(value)}")
    return value


class Body:
    """A JSON object; `path` names it in errors, such as stream_options. A key that is null is as one that is absent."""

    # Names of keys without effect that were logged: each once in the life of the process.
    logged = set()

    def __init__(self, values, path=""):
        self.values, self.path, self.read = values, path, set()

    def name(self, key):
        """The key as errors name it."""
        return f"{self.path}.{key}" if self.path else key

    def refuse(self, key, expectation):
        """Raise ApiError for the value of a key."""
        got = shown(self.values.get(key))
        raise ApiError(f"{self.name(key)} must be {expectation}, got {got}", self.name(key))

    def get(self, key, default=None):
        """The value, whatever its type."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def has(self, key):
        return self.get(key) is not None

    def boolean(self, key, default=False):
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def integer(self, key, default=None, low=None, high=None):
        value = self.get(key, default)
        if value is default:
            return value
        inside = isinstance(value, int) and not isinstance(value, bool)
        inside = inside and (low is None or value >= low) and (high is None or value <= high)
        if not inside:
            limits = [f">= {low}" if low is not None else "", f"<= {high}" if high is not None else ""]
            self.refuse(key, f"an integer {' and '.join(filter(None, limits))}".strip())
        return value

    def number(self, key, default=None):
        value = self.get(key, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.refuse(key, "a number")
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(key, "a finite number")
        return value

    def string(self, key, default=None):
        value = self.get(key, default)
        if value is not default and not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def list(self, key, most=MOST_ITEMS):
        """The value, a list of at most so many items, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            self.refuse(key, "a list")
        if len(value) > most:
            raise ApiError(f"{self.name(key)} has {len(value)} items, at most {most}", self.name(key))
        return value

    def object(self, key):
        """The value, a Body of its own, or None."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return Body(value, self.name(key))

    def token_ids(self, key, vocab_size):
        """The value, a list of token ids; None without the key."""
        value = self.get(key)
        return None if value is None else token_ids(value, self.name(key), vocab_size)

    def log_unread(self):
        """Log, once each, the keys that have not been read: they have no effect."""
        for key in self.values.keys() - self.read - Body.logged:
            if len(Body.logged) < MOST_ITEMS:
                Body.logged.add(key)
                click.echo(f"serve: key {shown(key)} of a request has no effect", err=True)


def token_ids(value, name, vocab_size):
    """A list of token ids as it is. Raises ApiError naming it."""
    if not isinstance(value, list):
        raise ApiError(f"{name} must be a list of token ids, got {shown(value)}", name)
    for each in value:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < vocab_size:
            raise ApiError(f"{name} must have ids below the vocabulary's size, {vocab_size}, got {shown(each)}", name)
    return value
