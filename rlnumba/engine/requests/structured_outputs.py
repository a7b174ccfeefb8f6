"""StructuredOutputsParams: the grammar that the text of a completion has, and what llguidance takes for it.

Names: vLLM's StructuredOutputsParams. llguidance's Lark variant is its docs/syntax.md, its JSON schemas its
docs/json_schema.md.
"""

import json
from dataclasses import dataclass

from rlnumba.config.keys import refuse_unknown
from rlnumba.errors import ConfigError, shown

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# What llguidance names the part that follows a free one.
BODY = "body"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The grammar of a completion's text, one of five kinds.

    json: a JSON schema, as a table or as text, of which text is kept. regex: matches the whole text. choice: texts, one
    of which it is. grammar: in llguidance's variant of Lark, or GBNF; special tokens are named there as `<tool_call>`,
    without quotes. json_object: any JSON object. disable_any_whitespace: JSON has no whitespace but a space after `,`
    and `:`. after: a text up to whose end everything but EOS may be drawn, before the grammar begins; None begins it at
    once. Raises ConfigError for none or several of the kinds, and for values that are none.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after: str | None = None

    def __new__(cls, *values, **keys):
        refuse_unknown(cls.__name__, keys, cls.__dataclass_fields__)
        return super().__new__(cls)

    @classmethod
    def of(cls, table):
        """Those of a table. Raises ConfigError, also for a key that is none of these."""
        for name in table:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise ConfigError(f"sampling: structured_outputs has no key {shown(name)}; they are {known}")
        return cls(**table)

    def __post_init__(self):
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise ConfigError(f"sampling: structured_outputs must have one of {', '.join(KINDS)}, got {has}")
        if isinstance(self.json, dict | bool):
            object.__setattr__(self, "json", json.dumps(self.json, ensure_ascii=False))
        self._require("json", self.json is None or _is_schema(self.json), "a JSON schema: an object, or its text")
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        texts = self.choice
        valid = texts is None or (isinstance(texts, tuple) and len(texts) > 0 and all(map(_is_text, texts)))
        self._require("choice", valid, "a list of texts that are not empty")
        for name in ("regex", "grammar", "after"):
            value = getattr(self, name)
            self._require(name, value is None or _is_text(value), "a text that is not empty")
        for name in ("json_object", "disable_any_whitespace"):
            self._require(name, getattr(self, name) in (None, False, True), "true or false")

    def _require(self, name, valid, expectation):
        if not valid:
            value = shown(getattr(self, name))
            raise ConfigError(f"sampling: structured_outputs.{name} must be {expectation}, got {value}")

    @property
    def kind(self):
        """The name of the one that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def size(self):
        """Characters of what is to be compiled: int."""
        texts = self.choice or [each for each in (self.json, self.regex, self.grammar) if each is not None]
        return sum(map(len, texts))


def _is_text(value):
    return isinstance(value, str) and value != ""


def _is_schema(text):
    try:
        return isinstance(text, str) and isinstance(json.loads(text, parse_constant=_refuse_constant), dict | bool)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def grammar_source(params, added_ids, eos_token_ids):
    """The grammar of StructuredOutputsParams as llguidance takes it: str.

    added_ids: {text: id} of the tokenizer's added tokens. Where `after` is one of them the free part ends with that
    token, elsewhere with its characters; EOS does not end it, and a line end or two may follow. Raises ValueError for
    GBNF that is none.
    """
    body = body_source(params)
    if params.after is None:
        return json.dumps({"grammars": [body]})
    if params.after in added_ids:
        token = added_ids[params.after]
        others = ",".join(map(str, sorted({token, *eos_token_ids})))
        free = f"start: any* <[{token}]> lines? @{BODY}\nany: <[^{others}]>\n"
    else:
        free = f"start: free lines? @{BODY}\nfree[suffix={json.dumps(params.after)}]: /(?s:.*)/\n"
    free += "lines: /\\n{1,2}/\n"
    return json.dumps({"grammars": [{"lark_grammar": free}, body | {"name": BODY}]})


def package():
    """The module llguidance. Raises ConfigError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError("sampling: structured_outputs needs llguidance; pip install 'rlnumba[grammar]'") from error
    return llguidance


def body_source(params):
    """The grammar of StructuredOutputsParams without a free part before it: an entry of llguidance's `grammars`."""
    if params.kind in ("json", "json_object"):
        schema = {"type": "object"} if params.json is None else json.loads(params.json)
        if params.disable_any_whitespace and schema is not False:
            options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            schema = ({} if schema is True else schema) | {"x-guidance": options}
        return {"json_schema": schema}
    if params.kind == "regex":
        source = package().LLMatcher.grammar_from_regex(params.regex)
        return {"lark_grammar": json.loads(source)["grammars"][0]["lark_grammar"]}
    if params.kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)}
    return {"lark_grammar": package().grammar_from("grammar", params.grammar)}
