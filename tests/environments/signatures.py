"""Functions whose JSON schemas tests compare with transformers' get_json_schema: FUNCTIONS, in their order."""

import enum
from typing import Any, Dict, List, Literal, Optional, Tuple, Union  # noqa: UP035


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"
    NONE = None


class Opaque:
    """A class without a JSON schema."""


def nothing():
    """Returns the time."""


def add(a: int, b: int) -> int:
    """Adds two integers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        The sum.
    """


def scale(x: float, factor: float = 2.0) -> float:
    """Scales a number.

    Args:
        x: The number
        factor: The factor, 2 by default
    """


def flags(text: str, loud: bool = False, mark: str | None = None):
    """Says something.

    Args:
        text: What to say.
        loud: Whether loudly.
        mark: A mark at its end.
    """


def literal(unit: Literal["celsius", "fahrenheit"], days: Literal[1, 2, 3] = 1) -> str:
    """Gets the weather.

    Args:
        unit: The unit.
        days: How many.

    Returns:
        A text.
    """


def mixed_literal(value: Literal["a", 1, 1.5, True, None]):
    """Takes one of some values.

    Args:
        value: The value.
    """


def choices(drink: str, size: int):
    """Makes a drink.

    Args:
        drink: The drink (choices: ["tea", " coffee "])
        size: The size (Choices: [1, 2])
    """


def literal_with_choices(drink: Literal["tea", "milk"]):
    """Makes a drink.

    Args:
        drink: The drink (choices: ["tea"])
    """


def optional(x: Optional[int], y: Optional[str] = None):  # noqa: UP045
    """Takes optional values.

    Args:
        x: An integer or none.
        y: A string or none.
    """


def union(x: Union[int, str], y: int | float | None = None):  # noqa: UP007
    """Takes unions.

    Args:
        x: An integer or a string.
        y: A number.
    """


def union_of_lists(x: list[int] | str, y: list | tuple):
    """Takes unions with lists.

    Args:
        x: Integers or a string.
        y: A list or a tuple.
    """


def optional_literal(x: Literal["a", "b"] | None = None):
    """Takes a letter.

    Args:
        x: The letter.
    """


def lists(a: list, b: list[int], c: List[str], d: list[list[float]]):  # noqa: UP006
    """Takes lists.

    Args:
        a: Anything.
        b: Integers.
        c: Strings.
        d: A matrix.
    """


def tuples(a: tuple, b: tuple[int, str], c: Tuple[float, float]):  # noqa: UP006
    """Takes tuples.

    Args:
        a: Anything.
        b: A pair.
        c: A point.
    """


def dicts(a: dict, b: dict[str, int], c: Dict[str, list[int]]):  # noqa: UP006
    """Takes objects.

    Args:
        a: Any object.
        b: Counts.
        c: Lists.
    """


def anything(x: Any, y: object = None) -> Any:
    """Takes anything.

    Args:
        x: Anything.
        y: Anything, too.
    """


def something(x: Any = 3) -> Any:
    """Takes anything.

    Args:
        x: Anything.

    Returns:
        It.
    """


def enums(color: Color, mixed: Mixed = Mixed.ONE):
    """Takes members.

    Args:
        color: A color.
        mixed: One of some values.
    """


def returns_opaque(x: int) -> Opaque:
    """Returns an object.

    Args:
        x: A number.

    Returns:
        An object.
    """


def returns_list(x: int) -> list[str]:
    """Returns texts.

    Args:
        x: A number.

    Returns:
        The texts,
        one for each.
    """


def returns_without_type(x: int):
    """Returns something.

    Args:
        x: A number.

    Returns:
        Something.
    """


def long_texts(query: str, limit: int = 10):
    """Searches the index
    for documents.

    It has two paragraphs, of which the second: has a colon.

    Args:
        query: The words to look for,
            in any order: all of them are
            looked for.
        limit: The most documents

    Raises:
        ValueError: If there are none.
    """


def typed_lines(a: int, b: str = "x"):
    """Takes arguments whose lines have types.

    Args:
        a (int): The first.
        b (str, optional): The second: a text.

    Returns:
        Nothing.
    """


def blank_lines(a: int, b: int):
    """Takes arguments.

    Args:

        a: The first.

        b: The second.

    """


def nested_names(config: dict, name: str):
    """Takes a configuration.

    Args:
        config: The configuration, with
            depth: how deep
            width: how wide
        name: Its name.
    """


def keyword_only(a: int, *, b: int, c: int = 3):
    """Takes keywords.

    Args:
        a: One.
        b: Two.
        c: Three.
    """


def summary_only(a: int) -> None:
    """Has its summary in one line.
    Args:
        a: The argument.
    """


def no_return_text(a: int) -> bool:
    """Checks.

    Args:
        a: The argument.
    Returns:
        Whether it holds.
    Raises:
        ValueError: never
    """


async def asynchronous(url: str) -> str:
    """Fetches a page.

    Args:
        url: Where it is.

    Returns:
        The page.
    """


def unicode_names(größe: int, 名: str = "你好") -> str:
    """Grüßt auf 中文.

    Args:
        größe: Die Größe – in cm.
        名: "Anführung" & <Zeichen>.
    """


def forward(a: "int", b: "list[str] | None" = None) -> "dict[str, Any]":
    """Has its types as text.

    Args:
        a: An integer.
        b: Strings.
    """


class Guess:
    """An environment; its methods are functions of it."""

    def reset(self):
        return "Guess."

    def get_reward(self):
        return 0.0

    def _hidden(self):
        pass

    def up(self, by: int = 1) -> str:
        """Goes up.

        Args:
            by: How far.
        """

    def guess(self, number: int) -> str:
        """Guesses.

        Args:
            number: The number.

        Returns:
            Whether it is higher or lower.
        """

    def close(self):
        pass


FUNCTIONS = [
    *(nothing, add, scale, flags, literal, mixed_literal, choices, literal_with_choices, optional, union),
    *(union_of_lists, optional_literal, lists, tuples, dicts, something, enums, returns_opaque, returns_list),
    *(returns_without_type, long_texts, typed_lines, blank_lines, nested_names, keyword_only, summary_only),
    *(no_return_text, asynchronous, unicode_names, forward, Guess.guess),
]


def no_docstring(a: int):
    return a


def no_type(a):
    """Misses a type.

    Args:
        a: The argument.
    """


def no_line(a: int, b: int):
    """Misses a line.

    Args:
        a: The argument.
    """


def opaque(a: Opaque):
    """Takes an object.

    Args:
        a: The argument.
    """


def one_tuple(a: tuple[int]):
    """Takes a tuple.

    Args:
        a: The argument.
    """


def any_tuple(a: tuple[int, ...]):
    """Takes a tuple.

    Args:
        a: The argument.
    """


# Those that have no schema, there and here, and words of the error here.
REFUSED = [
    (no_docstring, "no docstring"),
    (no_type, "'a' has no type"),
    (no_line, "'b' has no line"),
    (opaque, "Opaque has no JSON schema"),
    (anything, "object has no JSON schema"),
    (one_tuple, "has no JSON schema"),
    (any_tuple, "use list"),
]
