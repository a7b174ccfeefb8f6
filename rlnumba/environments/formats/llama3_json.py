"""The calls of Llama 3.1 and 3.2: a JSON object with a name and parameters, without tags.

{"name": "add", "parameters": {"a": 1, "b": 2}}
"""

import re

from rlnumba.environments.formats.base import ToolFormat, call_of, read_json_at
from rlnumba.environments.formats.turn import MalformedCall, tag_start

PYTHON_TAG = "<|python_tag|>"
# The beginning of a call, from its first character on: each part may be the last of a text.
BEGINNING = re.compile(r'\{\s*(?:\Z|"(?:\Z|n(?:\Z|a(?:\Z|m(?:\Z|e(?:\Z|"))))))')
NAMED = re.compile(r'\{\s*"name"')
KEYS = re.compile(r'\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"(?:parameters|arguments)"')
LINE_START = re.compile(r"(?:\A|(?<=[\n;>}])|(?<=; ))\{")


class Llama3Json(ToolFormat):
    """A JSON object at the start of the turn or of a line, after `;`, or after <|python_tag|>.

    An object without both a name and parameters is content: the model may answer in JSON.
    """

    name = "llama3_json"

    def find(self, text, start, before):
        tag, offset = tag_start(text, PYTHON_TAG, start), len(before)
        for found in LINE_START.finditer(before + text, start + offset):
            if found.start() - offset < tag and BEGINNING.match(text, found.start() - offset):
                return found.start() - offset
        return tag

    def block(self, text, start, parameters, is_final):
        at = start
        if text.startswith("<", start):
            if not text.startswith(PYTHON_TAG, start):
                return (start + 1, None) if is_final else None
            at = start + len(PYTHON_TAG)
            at += len(text[at:]) - len(text[at:].lstrip())
            if at == len(text) and not is_final:
                return None
        if not NAMED.match(text, at):
            return (max(at, start + 1), None) if is_final or not BEGINNING.match(text, at) else None
        try:
            # Until the last brace there is nothing to read; afterwards the JSON of a call is whole.
            value, end = read_json_at(text, at)
        except ValueError as error:
            if not is_final:
                return None
            is_call = KEYS.match(text, at)
            return (len(text), MalformedCall(text[start:].rstrip(), str(error)) if is_call else None)
        key = next((key for key in ("parameters", "arguments") if key in value), None)
        if key is None:
            return end, None
        try:
            call = call_of(value, key)
        except ValueError as error:
            return end, MalformedCall(text[start:end], str(error))
        separator = re.match(r"\s*;", text[end:])
        return end + (separator.end() if separator else 0), call
