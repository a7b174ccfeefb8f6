"""The grammar that a body asks for: response_format, structured_outputs, and a tool_choice that forces a call."""

from rlnumba.engine import StructuredOutputsParams
from rlnumba.environments.formats.lark import calls_grammar
from rlnumba.errors import ConfigError, shown
from rlnumba.serve.protocol.errors import ApiError

# Characters of a schema or grammar, and of a regex, whose compilation may take far longer.
MOST_CHARACTERS, MOST_REGEX = 1 << 17, 1 << 13
MOST_CHOICES = 1024
# Keys of vLLM's structured_outputs that are taken, and those that are refused unless they ask for nothing.
TAKEN = ("json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace")
REFUSED = ("structural_tag", "whitespace_pattern", "disable_additional_properties", "disable_fallback")


def read_grammar(body):
    """(StructuredOutputsParams, the key that asks for them), (None, None) without. Raises ApiError."""
    of_format, given = read_response_format(body), read_structured_outputs(body)
    if of_format is not None and given is not None:
        raise ApiError("response_format and structured_outputs exclude each other", body.name("structured_outputs"))
    if given is not None:
        return given, body.name("structured_outputs")
    return (None, None) if of_format is None else (of_format, body.name("response_format"))


def read_structured_outputs(body):
    """The StructuredOutputsParams of the key of that name, or None."""
    given = body.object("structured_outputs")
    if given is None:
        return None
    for key in REFUSED:
        if given.get(key, False) is not False:
            raise ApiError(f"{given.name(key)} is not supported", given.name(key))
    values = {key: given.get(key) for key in TAKEN if given.has(key)}
    given.log_unread()
    given.list("choice", MOST_CHOICES)
    return params_of(values, body.name("structured_outputs"))


def read_response_format(body):
    """The StructuredOutputsParams of response_format, None where it is text."""
    given = body.object("response_format")
    if given is None:
        return None
    name, kind = body.name("response_format"), given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return params_of({"json_object": True}, name)
    if kind != "json_schema":
        given.refuse("type", "text, json_object or json_schema")
    form = given.object("json_schema")
    schema = None if form is None else form.get("schema")
    if not isinstance(schema, dict):
        key = f"{name}.json_schema.schema"
        raise ApiError(f"{key} must be an object, got {shown(schema)}", key)
    return params_of({"json": schema}, name)


def params_of(values, name):
    """StructuredOutputsParams of checked size. Raises ApiError naming the key `name`."""
    try:
        params = StructuredOutputsParams(**values)
    except ConfigError as error:
        raise ApiError(str(error).removeprefix("sampling: "), name) from None
    except RecursionError:
        raise ApiError(f"{name} nests too deeply", name) from None
    most = MOST_REGEX if params.kind == "regex" else MOST_CHARACTERS
    if params.size > most:
        raise ApiError(f"{name} has {params.size} characters, at most {most} for a {params.kind}", name)
    return params


class ForcedCalls:
    """The calls that a tool_choice forces. tools: their schemas; is_single: whether it is one call; is_named: whether
    the choice names the tool."""

    def __init__(self, tools, is_single, is_named):
        self.tools, self.is_single, self.is_named = tools, is_single, is_named

    def params(self, format, tokenizer):
        """Their StructuredOutputsParams in a ToolFormat. Raises ApiError."""
        added = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
        return params_of({"grammar": calls_grammar(format, self.tools, added, self.is_single)}, "tool_choice")


def read_forced_calls(body, tools):
    """The ForcedCalls of a body's tool_choice, None where the model may choose. Raises ApiError."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        if choice == "auto" and tools is None:
            raise ApiError("tool_choice auto needs tools", "tool_choice")
        return None
    if choice == "required":
        if tools is None:
            raise ApiError("tool_choice required needs tools", "tool_choice")
        return ForcedCalls(tools, not body.boolean("parallel_tool_calls", True), False)
    named = body.object("tool_choice") if isinstance(choice, dict) else None
    function = named.object("function") if named is not None and named.get("type") == "function" else None
    if function is None:
        expected = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        body.refuse("tool_choice", expected)
    name = function.string("name")
    wanted = [tool for tool in tools or () if tool["function"]["name"] == name]
    if not wanted:
        raise ApiError(f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
    return ForcedCalls(wanted[:1], True, True)
