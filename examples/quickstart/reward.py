"""The quickstart's reward: a plain function, called with lists of equal length."""


def backwards(completions, answer, **kwargs):
    """1 for exactly the word's characters in reverse order, else 0.

    completions: the generated texts; answer: the column `answer` of the rows they belong to.
    """
    return [float(completion.strip() == expected) for completion, expected in zip(completions, answer, strict=True)]
