"""The grammar of forced tool calls, in llguidance's variant of Lark."""

import json
import re

from rlnumba.environments.formats.base import dereferenced, types_of

# JSON as chat templates write it. Keywords of a tool's schema that llguidance does not have are ignored.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
# Keys of a schema that say what its value is; without any it is an object.
VALUE_KEYS = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
DEFINITIONS = ("$defs", "definitions")


def quoted(text):
    """The Lark expression of a text, character by character."""
    return json.dumps(text, ensure_ascii=False)


class CallGrammar:
    """The rules of a grammar while a ToolFormat adds to them. added_ids: {text: id} of the tokenizer's added tokens."""

    def __init__(self, added_ids):
        self.added_ids, self.rules = added_ids, []
        texts = sorted(added_ids, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def literal(self, text):
        """The expression of a text of the template's, in which added tokens are tokens."""
        parts = self._tokens.split(text) if self._tokens else [text]
        return " ".join(
            f"<[{self.added_ids[part]}]>" if part in self.added_ids else quoted(part) for part in parts if part
        )

    def json(self, schema):
        """The expression of JSON values of a schema."""
        if schema is True:
            schema = {}
        return self._rule(f"%json {json.dumps(schema | {'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}")

    def until(self, end, without):
        """The expression of any text up to the first `end`, and that; the text has none of the texts `without`."""
        parts = "|".join(re.escape(part).replace("/", r"\/") for part in without)
        number = len(self.rules)
        self.rules.append(f"TEXT_{number}: /(?s:.+)/ & ~/(?s:.*)({parts})(?s:.*)/")
        before, *rest = self._tokens.split(end) if self._tokens else [end]
        if not rest:
            self.rules.append(f"END_{number}: TEXT_{number}? {quoted(end)}")
            return self._rule(f"END_{number}", "[lazy]")
        # The text is certain to have ended where the token comes.
        self.rules.append(f"END_{number}: TEXT_{number}? {quoted(before)}")
        return f"{f'END_{number}' if before else f'TEXT_{number}?'} {self.literal(''.join(rest))}"

    def value(self, schema, root, end, without):
        """The expression of an argument without quotes, as `typed_value` reads it, and of the `end` after it.

        root: the schema that the references of `schema` are in.
        """
        own, schema = schema, dereferenced(schema, root)
        types = types_of(schema)
        values = schema.get("enum") if isinstance(schema, dict) else None
        if "string" in types and isinstance(values, list) and all(isinstance(each, str) for each in values):
            return self._rule(" | ".join(map(quoted, values))) + " " + self.literal(end)
        if not types or "string" in types:
            return self.until(end, without)
        definitions = {key: root[key] for key in DEFINITIONS if key in root}
        return f"{self.json(definitions | own)} {self.literal(end)}"

    def source(self, calls, separator, is_single):
        """The whole grammar: one of the expressions `calls`, or several in a row."""
        self.rules.append("call: " + " | ".join(f"({call})" for call in calls))
        start = "call" if is_single else f"call ({self.literal(separator)} call)*"
        return "\n".join([f"start: {start}", *self.rules]) + "\n"

    def _rule(self, body, options=""):
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def arguments_schema(function):
    """The schema of a function's arguments, an object; of a function without parameters an empty one."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    return parameters if any(key in parameters for key in VALUE_KEYS) else parameters | {"type": "object"}


def calls_grammar(format, tools, added_ids, is_single=False):
    """The Lark grammar of one or more calls of some of the tools (schemas), as a ToolFormat writes them: str."""
    grammar = CallGrammar(added_ids)
    functions = [tool.get("function", tool) for tool in tools]
    calls = [format.call_grammar(grammar, each["name"], arguments_schema(each)) for each in functions]
    return grammar.source(calls, format.separator, is_single)


def tagged_arguments(grammar, schema, before, between, end, without):
    """The expression of arguments that are written one by one: `before`, key, `between`, value, `end`.

    Optional ones may be left out.
    """
    properties, required = schema.get("properties"), schema.get("required")
    parts = []
    for key, each in (properties if isinstance(properties, dict) else {}).items():
        head = f"{grammar.literal(before)} {quoted(key)} {grammar.literal(between)}"
        value = grammar.value(each, schema, end, without)
        is_required = isinstance(required, list) and key in required
        parts.append(f"({head} {value})" + ("" if is_required else "?"))
    return " ".join(parts)
