"""The reward of the arithmetic examples."""

import re


def correct(completions, answer, **columns):
    """1 where the last whole number of a completion is the answer, else 0: list of float."""
    numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and int(found[-1]) == wanted) for found, wanted in zip(numbers, answer, strict=True)]
