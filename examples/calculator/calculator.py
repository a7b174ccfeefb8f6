"""The tool of the example, and its reward."""

import ast
import operator
import re

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
LONGEST = 100


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Integers with +, -, *, // and brackets, such as "12*(3+4)".

    Returns:
        The value.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    return str(value_of(ast.parse(expression.strip(), mode="eval").body))


def value_of(node):
    """The value of a node of a syntax tree, of integers and OPERATORS alone: int."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only integers, +, -, *, // and brackets")


def right(completions, answer, **columns):
    """1 for an episode in whose last message the last number is the answer, else 0."""
    texts = [messages[-1].get("content") or "" for messages in completions]
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in texts]
    return [float(bool(found) and int(found[-1]) == value) for found, value in zip(numbers, answer, strict=True)]
