"""The JSON schemas of tools, from the signatures and Google docstrings of Python functions.

Equal to those of transformers' get_json_schema, which chat templates and models have been made for.
"""

import enum
import functools
import inspect
import json
import re
import types
import typing
import weakref

from rlnumba.errors import UserError

# Public methods of an environment that are no tools.
LIFECYCLE = ("reset", "get_reward", "close")

SIMPLE = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    typing.Any: {},
}
SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}

# Schemas that functions have instead of those of their signatures.
_schemas = weakref.WeakKeyDictionary()

SECTION = r"(?:Args|Returns|Raises):"
SUMMARY = re.compile(rf"(.*?)\s*(?:{SECTION}|\Z)", re.DOTALL)
ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)\s*(?:Returns:|Raises:|\Z)", re.DOTALL)
RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)\s*(?:Raises:|\Z)", re.DOTALL)
# `name: text` or `name (type): text`.
ARGUMENT = re.compile(r"([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:(.*)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tools_of(functions=(), environment_class=None):
    """The tools of a run: list of (name, callable, schema).

    Functions in their order, then the public methods of an environment's class by name, as functions of the class, but
    not reset, get_reward and close. Raises UserError for one without a schema, and for two of one name.
    """
    members = inspect.getmembers(environment_class) if environment_class is not None else ()
    methods = [member for name, member in members if _is_tool(environment_class, name)]
    found = [(name_of(function), function, tool_schema(function)) for function in (*functions, *methods)]
    names = [name for name, _, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"tools: {names.count(name)} tools have the name {name!r}, methods of the environment included"
            )
    return found


def schemas_of(tools):
    """The schemas of tools_of's tools as chat templates get them: list, None without any."""
    return [schema for _, _, schema in tools] or None


def _is_tool(owner, name):
    """Whether a member of an environment's class is a public method: of an instance, or a class method."""
    if name.startswith("_") or name in LIFECYCLE:
        return False
    return isinstance(inspect.getattr_static(owner, name), types.FunctionType | classmethod)


def name_of(function):
    """The name of a tool: of a partial that of its function, of an object with __call__ its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return function.__name__ if inspect.isroutine(function) else type(function).__name__


def tool_schema(function):
    """The JSON schema of a function: {"type": "function", "function": {name, description, parameters, return?}}.

    An argument that a functools.partial sets is not in it. Raises UserError for a missing docstring, for a type without
    a schema, and for an argument without a type, without a line in the docstring, or that cannot be given by its name.
    """
    if isinstance(function, types.FunctionType) and function in _schemas:
        return _schemas[function]
    name, signature, described = name_of(function), _signature(function), function
    while isinstance(described, functools.partial):
        described = described.func
    if not inspect.isroutine(described):
        described = type(described).__call__
    docstring = inspect.getdoc(described) or ""
    if not docstring.strip():
        raise UserError(f"tool {name}: no docstring")
    summary, lines, returned = _sections(docstring.strip())
    try:
        hints = typing.get_type_hints(described)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise UserError(f"tool {name}: its types cannot be read: {' '.join(str(error).split())}") from error
    properties = {}
    for argument in signature.parameters.values():
        where = f"tool {name}: argument {argument.name!r}"
        if argument.annotation is argument.empty or argument.name not in hints:
            raise UserError(f"{where} has no type")
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise UserError(f"{where} cannot be given by its name")
        if argument.name not in lines:
            raise UserError(f"{where} has no line in the docstring's Args")
        properties[argument.name] = _described(_type_schema(hints[argument.name], where), lines[argument.name], where)
    parameters = {"type": "object", "properties": properties}
    required = [argument.name for argument in signature.parameters.values() if argument.default is argument.empty]
    if required:
        parameters["required"] = required
    schema = {"name": name, "description": summary, "parameters": parameters}
    result = _return_schema(hints)
    if result is not None:
        schema["return"] = result | ({} if returned is None else {"description": returned})
    return {"type": "function", "function": schema}


def set_schema(function, schema):
    """Give a function a schema of its own, as another program has it."""
    _schemas[function] = schema


def _signature(function):
    """The signature of a tool without self or cls, and without what a partial sets."""
    set_by_partial = set()
    while isinstance(function, functools.partial):
        set_by_partial |= set(function.keywords)
        # Positional values are the first arguments.
        positional = list(inspect.signature(function.func).parameters)[: len(function.args)]
        set_by_partial |= set(positional)
        function = function.func
    signature = inspect.signature(function)
    kept = [argument for argument in signature.parameters.values() if argument.name not in set_by_partial]
    if kept and kept[0].name in ("self", "cls") and kept[0].annotation is kept[0].empty:
        kept = kept[1:]
    return signature.replace(parameters=kept)


def _sections(docstring):
    """(summary, {argument: its text}, text of Returns or None) of a Google docstring."""
    arguments, returned = ARGUMENTS.search(docstring), RETURNS.search(docstring)
    lines = _argument_lines(arguments[1]) if arguments else {}
    return SUMMARY.match(docstring)[1].strip(), lines, returned[1].strip() if returned else None


def _argument_lines(section):
    """{argument: its text in one line}. Lines that are indented deeper than an argument's first one are its own."""
    found, indent = [], None
    for line in (line for line in section.split("\n") if line.strip()):
        begins = ARGUMENT.match(line)
        deeper = indent is not None and line.startswith(indent) and line[len(indent) : len(indent) + 1] in (" ", "\t")
        if begins and not deeper:
            indent = begins[1]
            found.append((begins[2], [begins[3]]))
        elif found:
            found[-1][1].append(line)
    return {name: " ".join(part.strip() for part in parts if part.strip()) for name, parts in found}


def _described(schema, text, where):
    """A schema with the text of its argument, whose `(choices: [...])` at the end is an enum."""
    choices = CHOICES.search(text)
    if choices:
        try:
            values = json.loads(choices[1])
            schema = schema | {"enum": [each.strip() if isinstance(each, str) else each for each in values]}
        except (ValueError, TypeError):
            raise UserError(f"{where}: its choices are not a list of JSON: {choices[1]}") from None
        text = text[: choices.start()].strip()
    return schema | {"description": text}


def _return_schema(hints):
    """The schema of the value that a tool returns, or None: a type without one is no error, for no model writes it."""
    if "return" not in hints:
        return None
    try:
        return _type_schema(hints["return"], "")
    except UserError:
        return None


def _type_schema(hint, where):
    """The JSON schema of a type. Raises UserError, which begins with `where`."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enum_schema([member.value for member in hint], hint, where)
        try:
            return dict(SIMPLE[hint])
        except (KeyError, TypeError):
            raise UserError(f"{where}: its type {_shown(hint)} has no JSON schema") from None
    if origin is typing.Literal:
        return _enum_schema(list(inside), hint, where)
    if origin in (typing.Union, types.UnionType):
        return _union_schema(inside, where)
    if origin is list:
        return {"type": "array", "items": _type_schema(inside[0], where)}
    if origin is tuple:
        if len(inside) < 2 or ... in inside:
            raise UserError(f"{where}: its type {_shown(hint)} has no JSON schema; use list for any number of elements")
        return {"type": "array", "prefixItems": [_type_schema(each, where) for each in inside]}
    if origin is dict:
        values = {"additionalProperties": _type_schema(inside[1], where)} if len(inside) == 2 else {}
        return {"type": "object"} | values
    raise UserError(f"{where}: its type {_shown(hint)} has no JSON schema")


def _shown(hint):
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _enum_schema(values, hint, where):
    """The schema of some values: their types, each once, and the values."""
    if not values or any(type(value) not in SCALARS for value in values):
        raise UserError(f"{where}: its type {_shown(hint)} has values that are no scalars of JSON, or none")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union_schema(options, where):
    """The schema of a union: a list of types if they are no more than names, else anyOf; nullable if None is one."""
    schemas = [_type_schema(each, where) for each in options if each is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return schema | ({"nullable": True} if type(None) in options else {})
