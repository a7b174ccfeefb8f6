"""The tool of the example, and its reward."""


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


def product(completions, answer, **columns):
    """1 for an episode whose last message is the product, else 0. completions: the messages of each."""
    return [float(messages[-1]["content"] == str(right)) for messages, right in zip(completions, answer, strict=True)]
