"""The base of the tool-call formats, and the JSON that models write."""

import json
import math
import re

from rlnumba.environments.formats.turn import THINK, MalformedCall, ToolCall, TurnStream, parse_turn, tag_start


class ToolFormat:
    """A way in which a chat template writes tool calls, and a model after it.

    name: as `[tools] parser` has it. A format finds where a block may begin (`find`), and reads one (`block`).
    schemas: JSON schemas of the tools, as chat templates get them; None or empty without any.
    """

    name = None
    # The texts that calls are found by.
    tags = ()
    # The text between two calls.
    separator = "\n"

    def find(self, text, start, before):
        """The index from `start` at which a block begins, or may begin with the last characters; else the length.

        before: the character before the text, "" at the start of a turn.
        """
        raise NotImplementedError

    def block(self, text, start, parameters, is_final):
        """(index after the block, ToolCall or MalformedCall) of a block that begins at `start`.

        None if its end is not in the text, which may go on unless is_final; (index, None) if up to there it is content.
        """
        raise NotImplementedError

    def end_finder(self, text, start):
        """The EndFinder of a block that begins at `start` and has no end yet; None while it may be no block at all."""
        raise NotImplementedError

    def call_grammar(self, grammar, name, schema):
        """The Lark expression of a call of the tool `name`, with rules of a CallGrammar. schema: that of the arguments,
        an object's."""
        raise NotImplementedError

    def stream(self, schemas, starts_in_think=False, keep_malformed=True, split_reasoning=True, think=THINK):
        """A TurnStream, which parses one turn piece by piece."""
        return TurnStream(self, parameters_of(schemas), starts_in_think, keep_malformed, split_reasoning, think)

    def parse(self, text, schemas, starts_in_think=False, keep_malformed=True, think=THINK):
        """The ParsedTurn of a turn's text. keep_malformed: whether a block that cannot be read stays in the content."""
        return parse_turn(self.stream(schemas, starts_in_think, keep_malformed, think=think), text)


class EndFinder:
    """The search for the end of a block in the pieces of its text: each character is looked at once.

    A tag is the end wherever it stands; subclasses know strings in which it is none.
    """

    def __init__(self, tag):
        self.tag, self.tail = tag, ""

    def feed(self, text):
        """Whether the block may have ended with this piece; until then `ToolFormat.block` returns None for it."""
        text = self.tail + text
        self.tail = text[-len(self.tag) + 1 :]
        return self.tag in text


class JsonStrings:
    """The strings of a JSON text that comes in pieces. is_broken: whether one has a character that no string has."""

    INSIDE = re.compile(r'["\\\x00-\x1f]')

    def __init__(self):
        self.is_inside = self.is_escaped = self.is_broken = False

    def outside(self, text):
        """The next piece without what is inside of strings; their quotes stay."""
        kept, at = [], 0
        while at < len(text) and not self.is_broken:
            if not self.is_inside:
                quote = text.find('"', at)
                end = quote + 1 if quote >= 0 else len(text)
                kept.append(text[at:end])
                at, self.is_inside = end, quote >= 0
            elif self.is_escaped:
                self.is_escaped, self.is_broken = False, text[at] == "\n"
                at += 1
            elif found := self.INSIDE.search(text, at):
                self.is_inside, self.is_escaped = found[0] != '"', found[0] == "\\"
                self.is_broken = self.is_inside and not self.is_escaped
                kept.append('"' if not self.is_inside else "")
                at = found.end()
            else:
                at = len(text)
        return "".join(kept)


class TaggedFormat(ToolFormat):
    """A format whose blocks are `<tool_call>...</tool_call>`. One without its end goes up to the end of the text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    tags = OPEN, CLOSE

    def find(self, text, start, before):
        return tag_start(text, self.OPEN, start)

    def block(self, text, start, parameters, is_final):
        if not text.startswith(self.OPEN, start):
            return (start + 1, None) if is_final else None
        inner = start + len(self.OPEN)
        end = self.end_of(text, inner, is_final)
        if end is None:
            return (len(text), MalformedCall(text[start:].rstrip(), f"no {self.CLOSE}")) if is_final else None
        after = end + len(self.CLOSE)
        try:
            return after, self.call(text[inner:end], parameters)
        except ValueError as error:
            return after, MalformedCall(text[start:after], str(error))

    def end_finder(self, text, start):
        return EndFinder(self.CLOSE) if text.startswith(self.OPEN, start) else None

    def end_of(self, text, inner, is_final):
        """The index of the </tool_call> of a block whose inside begins at `inner`, or None."""
        end = text.find(self.CLOSE, inner)
        return end if end >= 0 else None

    def call(self, text, parameters):
        """The ToolCall inside a block. Raises ValueError with the reason that it is malformed."""
        raise NotImplementedError


def parameters_of(schemas):
    """{tool's name: {argument: its JSON schema}} of the tools' schemas: dict.

    Schemas of a request may be of any form: parts that are not as they should be count as absent.
    """
    found = {}
    for schema in schemas or ():
        function = schema.get("function", schema)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        properties = properties if isinstance(properties, dict) else {}
        found[function.get("name")] = {key: dereferenced(each, parameters) for key, each in properties.items()}
    return found


# References to references that are followed, and unions in unions that they are looked for in.
DEEPEST_REFERENCE = 8


def dereferenced(schema, root, depth=DEEPEST_REFERENCE):
    """A schema whose references, its own and those of its unions, are what they refer to within `root`.

    One that refers to nothing there, or to itself again, is {}: of any type.
    """
    if not isinstance(schema, dict):
        return schema
    if isinstance(reference := schema.get("$ref"), str):
        target = root
        for key in reference.removeprefix("#").split("/")[1:]:
            target = target.get(key) if isinstance(target, dict) else None
        known = reference.startswith("#/") and isinstance(target, dict) and depth
        return dereferenced(target, root, depth - 1) if known else {}
    unions = {key: schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)}
    if not depth:
        return {}
    return schema | {key: [dereferenced(each, root, depth - 1) for each in unions[key]] for key in unions}


def call_of(value, key="arguments"):
    """The ToolCall of a JSON object with `name` and its arguments, {} if they are absent or null. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = value.get(key)
    return ToolCall(name, {} if arguments is None else arguments)


def _finite(text):
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _no_constant(text):
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
_SURROGATE = re.compile("[\ud800-\udfff]")


# Lists and objects in one another that a call may have: what copies, sends and logs it later goes one deeper for each.
DEEPEST = 64


def _check_depth(value):
    """Raise ValueError for more than DEEPEST lists and objects in one another."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for items in inside for item in items]
        if not inside:
            return
    raise ValueError("not JSON: too deep")


def _check_characters(text, value):
    """Raise ValueError for half of a surrogate pair, which an escape can make, and which has no UTF-8."""
    if "\\u" in text and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a character")


def read_json(text):
    """The value of a JSON text. Raises ValueError with a short reason, also for values that JSON cannot have."""
    text = text.strip(" \t\r\n")
    value, end = read_json_at(text, 0)
    if end < len(text):
        raise ValueError("text after the JSON value")
    return value


def read_json_at(text, start):
    """(the JSON value that begins at `start`, the index after it). Raises ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check_characters(text[start:end], value)
        if text.count("[", start, end) + text.count("{", start, end) > DEEPEST:
            _check_depth(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError("not JSON: too deep") from None
    return value, end


PYTHON_WORDS = {"True": True, "False": False, "None": None}


def typed_value(text, schema):
    """The value of an argument written without quotes: a string where its schema says string, else JSON, else text.

    Some templates write true, false and null as Python does; this is read where the schema has such a type.
    """
    types = types_of(schema)
    if types and types <= {"string", "null"}:
        return None if "null" in types and text in ("null", "None") else text
    if text in PYTHON_WORDS and types & {"boolean", "null"}:
        value = PYTHON_WORDS[text]
    else:
        try:
            value = read_json(text)
        except ValueError:
            return text
    # A union with string: what is none of its other types is the string.
    return text if "string" in types and not types & JSON_TYPES[type(value)] else value


JSON_TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def types_of(schema):
    """The JSON types that a schema allows: set of str, empty without any."""
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    found = {each for each in types if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        of_options = [types_of(option) for option in options] if isinstance(options, list) else []
        if set() in of_options:
            return set()
        found = found.union(*of_options)
    if not found and isinstance(schema.get("enum"), list):
        found = {min(JSON_TYPES.get(type(each), {"string"})) for each in schema["enum"]}
    return found | ({"null"} if schema.get("nullable") is True else set())
