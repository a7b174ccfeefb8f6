"""The calls of FunctionGemma and of Gemma 4: a name, and arguments in braces whose strings stand between quotes.

<start_function_call>call:add{a:1,note:<escape>of two<escape>}<end_function_call>
<|tool_call>call:add{a:1,note:<|"|>of two<|"|>}<tool_call|>
"""

import re

from rlnumba.environments.formats.base import DEEPEST, TaggedFormat, dereferenced, typed_value, types_of
from rlnumba.environments.formats.lark import quoted
from rlnumba.environments.formats.turn import ToolCall

BEGIN = re.compile(r"\s*call:\s*([^\s{}]+)\s*\{")
SPACE = re.compile(r"\s*")
# A value without quotes, and a key.
BARE, KEY = re.compile(r"[^,\[\]{}]+"), re.compile(r"[^,:\[\]{}]+")


class Gemma(TaggedFormat):
    """name: the format's; OPEN, CLOSE: its tags; quote: the text on both sides of a string."""

    separator = ""

    def __init__(self, name, open_tag, close_tag, quote):
        self.name, self.OPEN, self.CLOSE, self.quote = name, open_tag, close_tag, quote
        self.tags = open_tag, close_tag, quote

    def call(self, text, parameters):
        found = BEGIN.match(text)
        if not found:
            raise ValueError("no call:NAME{")
        schemas = parameters.get(found[1], {})
        arguments, end = self._items(text, found.end(), schemas, 0)
        if text[end:].strip():
            raise ValueError("text after the arguments")
        return ToolCall(found[1], arguments)

    def _items(self, text, at, schemas, depth):
        """({key: value} of the items up to a brace, the index after it). schemas: {key: JSON schema}."""
        found, at = {}, SPACE.match(text, at).end()
        while not text.startswith("}", at):
            key, at = self._string(text, at) if text.startswith(self.quote, at) else self._word(KEY, text, at)
            if not text.startswith(":", at):
                raise ValueError("an argument without a value")
            if key in found:
                raise ValueError(f"the argument {key} is there twice")
            found[key], at = self._value(text, at + 1, schemas.get(key), depth)
            at = self._after(text, at, "}")
        return found, at + 1

    def _value(self, text, at, schema, depth):
        """(the value that begins at an index, the index after it and white space)."""
        if depth > DEEPEST:
            raise ValueError("too deep")
        at = SPACE.match(text, at).end()
        if text.startswith(self.quote, at):
            value, at = self._string(text, at)
            types = types_of(schema)
            # Some templates write every value between quotes.
            return (value if not types or "string" in types else typed_value(value, schema)), at
        if text.startswith("{", at):
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return self._items(text, at + 1, properties if isinstance(properties, dict) else {}, depth + 1)
        if text.startswith("[", at):
            items = schema.get("items") if isinstance(schema, dict) else None
            found, at = [], SPACE.match(text, at + 1).end()
            while not text.startswith("]", at):
                value, at = self._value(text, at, items, depth + 1)
                found.append(value)
                at = self._after(text, at, "]")
            return found, at + 1
        word, at = self._word(BARE, text, at)
        return typed_value(word, schema), at

    def _after(self, text, at, close):
        """The index of what follows a value: another one, behind a comma, or the closing bracket."""
        at = SPACE.match(text, at).end()
        if text.startswith(",", at):
            return SPACE.match(text, at + 1).end()
        if not text.startswith(close, at):
            raise ValueError(f"no {close}")
        return at

    def _string(self, text, at):
        begin = at + len(self.quote)
        end = text.find(self.quote, begin)
        if end < 0:
            raise ValueError(f"a string without its {self.quote}")
        return text[begin:end], SPACE.match(text, end + len(self.quote)).end()

    def _word(self, pattern, text, at):
        found = pattern.match(text, at)
        if not found or not found[0].strip():
            raise ValueError("an argument without a name or a value")
        return found[0].strip(), found.end()

    def call_grammar(self, grammar, name, schema):
        begin = f"{grammar.literal(self.OPEN)} {quoted(f'call:{name}{{')}"
        return f"{begin} {self._object(grammar, schema, schema)} {quoted('}')} {grammar.literal(self.CLOSE)}"

    def _object(self, grammar, schema, root):
        """The expression of items with commas between them, in the order of their keys, as templates sort them."""
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = [key for key in required if key in properties] if isinstance(required, list) else []
        items = [
            (f"{quoted(key + ':')} {self._any(grammar, properties[key], root)}", key in required)
            for key in sorted(properties)
        ]
        choices = []
        for first, (item, is_required) in enumerate(items):
            rest = [f'("," {each})' + ("" if needed else "?") for each, needed in items[first + 1 :]]
            choices.append(" ".join([item, *rest]))
            if is_required:
                break
        return f"({' | '.join(f'({each})' for each in choices)})" + ("" if required else "?") if choices else '""'

    def _any(self, grammar, schema, root):
        """The expression of a value of a schema; root: that which its references are in."""
        schema = dereferenced(schema, root)
        options = [each for key in ("anyOf", "oneOf") for each in (isinstance(schema, dict) and schema.get(key)) or ()]
        if options:
            return "(" + " | ".join(f"({self._any(grammar, each, root)})" for each in options) + ")"
        types, values = types_of(schema), schema.get("enum") if isinstance(schema, dict) else None
        quote = grammar.literal(self.quote)
        if not types or "string" in types:
            if isinstance(values, list) and values and all(isinstance(each, str) for each in values):
                return f"{quote} ({' | '.join(map(quoted, values))}) {quote}"
            return f"{quote} {grammar.until(self.quote, (self.quote, self.CLOSE))}"
        if "object" in types and isinstance(schema.get("properties"), dict):
            return f"{quoted('{')} {self._object(grammar, schema, root)} {quoted('}')}"
        if types == {"array"}:
            return self._array(grammar, schema, root)
        return grammar.json(schema)

    def _array(self, grammar, schema, root):
        """The expression of a list, of as many items as its schema allows."""
        least, most = schema.get("minItems"), schema.get("maxItems")
        least, most = (each if isinstance(each, int) and each >= 0 else None for each in (least, most))
        if most == 0:
            return f"{quoted('[')} {quoted(']')}"
        item = self._any(grammar, schema.get("items", {}), root)
        further = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"({item} ({quoted(',')} {item}){further})" + ("" if least else "?")
        return f"{quoted('[')} {items} {quoted(']')}"
