import functools
import json

import pytest

from rlnumba.environments.schema import schemas_of, tool_schema, tools_of
from rlnumba.errors import UserError
from tests.environments import signatures
from tests.environments.golden import GOLDEN


@pytest.mark.parametrize("function", signatures.FUNCTIONS, ids=lambda function: function.__name__)
def test_schemas_are_those_of_transformers(function):
    # As text, because the order of keys is in the prompt.
    assert json.dumps(tool_schema(function)) == json.dumps(GOLDEN["schemas"][function.__name__])


def test_every_schema_is_compared():
    assert [function.__name__ for function in signatures.FUNCTIONS] == list(GOLDEN["schemas"])
    assert len(GOLDEN["schemas"]) >= 30


@pytest.mark.parametrize(("function", "words"), signatures.REFUSED, ids=lambda case: getattr(case, "__name__", ""))
def test_a_function_without_a_schema_is_refused(function, words):
    with pytest.raises(UserError, match=words) as caught:
        tool_schema(function)
    assert f"tool {function.__name__}:" in str(caught.value) and "\n" not in str(caught.value)


def positional(a: int, /):
    """Takes a position.

    Args:
        a: The argument.
    """


def variadic(*numbers: int):
    """Takes many.

    Args:
        numbers: The arguments.
    """


def named(**values: int):
    """Takes names.

    Args:
        values: The arguments.
    """


def unresolved(a: "Missing"):  # noqa: F821
    """Takes an unknown type.

    Args:
        a: The argument.
    """


def bad_choices(a: str):
    """Takes choices.

    Args:
        a: The argument (choices: tea, coffee)
    """


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (positional, "'a' cannot be given by its name"),
        (variadic, "'numbers' cannot be given by its name"),
        (named, "'values' cannot be given by its name"),
        (unresolved, "types cannot be read.*Missing"),
        (bad_choices, "choices are not a list of JSON: tea, coffee"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_refused(function, words):
    with pytest.raises(UserError, match=words):
        tool_schema(function)


class Lookup:
    """An object that is called."""

    def __call__(self, key: str) -> str:
        """Looks a key up.

        Args:
            key: The key.
        """


def test_partials_and_objects():
    schema = tool_schema(functools.partial(functools.partial(signatures.flags, loud=True), "text"))["function"]
    assert schema["name"] == "flags" and list(schema["parameters"]["properties"]) == ["mark"]
    assert "required" not in schema["parameters"]
    schema = tool_schema(Lookup())["function"]
    assert (schema["name"], schema["description"]) == ("Lookup", "Looks a key up.")
    assert schema["parameters"]["required"] == ["key"]
    assert tool_schema(functools.partial(Lookup(), key="a"))["function"]["parameters"]["properties"] == {}


class Board(signatures.Guess):
    """A base with a method, a class method, and members that are no tools."""

    size = 3

    @classmethod
    def new(cls, size: int):
        """Makes a board.

        Args:
            size: Its size.
        """

    @staticmethod
    def helper(a):
        return a

    @property
    def state(self):
        raise AssertionError("a property is not read")


def test_tools_are_functions_and_then_methods_by_name():
    tools = tools_of([signatures.scale, signatures.add], Board)
    assert [name for name, _, _ in tools] == ["scale", "add", "guess", "new", "up"]
    assert tools[0][1] is signatures.scale and tools[2][1] is Board.guess
    assert [schema["function"]["name"] for schema in schemas_of(tools)] == ["scale", "add", "guess", "new", "up"]
    assert tools_of() == [] and schemas_of([]) is None


def up(by: int):
    """Goes up.

    Args:
        by: How far.
    """


@pytest.mark.parametrize(("functions", "owner"), [([up, up], None), ([up], Board)])
def test_two_tools_of_one_name(functions, owner):
    with pytest.raises(UserError, match="2 tools have the name 'up'"):
        tools_of(functions, owner)
