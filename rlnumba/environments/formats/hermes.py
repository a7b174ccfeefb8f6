"""The calls of Hermes, Qwen 2.5 and Qwen 3: a JSON object in a block.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

import re

from rlnumba.environments.formats.base import TaggedFormat, call_of, read_json

# A whole JSON string; what is left of a text without them has a quote where one is open at its end.
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
OPEN_STRING = re.compile(r'"[^\x00-\x1f]*\Z')


class Hermes(TaggedFormat):
    """JSON in `<tool_call>`. A `</tool_call>` in a string of the JSON does not end the block."""

    name = "hermes"

    def end_of(self, text, inner, is_final):
        first = end = text.find(self.CLOSE, inner)
        while end >= 0 and OPEN_STRING.search(STRING.sub("", text[inner:end])):
            end = text.find(self.CLOSE, end + 1)
        if end >= 0:
            return end
        # Where the string has no end either, the block has the first one.
        return first if first >= 0 and is_final else None

    def call(self, text, parameters):
        return call_of(read_json(text))
