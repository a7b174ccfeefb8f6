"""The scorers of reasoning-gym's datasets as one reward function."""

from rlnumba.data.gym import scorer
from rlnumba.errors import UserError
from rlnumba.rewards.functions import texts_of


def gym(completions, gym_dataset=None, question=(), answer=(), metadata=(), log_metric=None, **columns):
    """The value that its dataset's scorer gives each answer, mostly of 0 to 1; None for rows of other data.

    The answer is what stands between <answer> and </answer>. One on which a scorer raises, as prime_factorization's
    does on words, has 0 and is counted in the metric `gym/scorer_errors`, a share of all. `gym/NAME` is the mean value
    of a dataset.
    """
    if gym_dataset is None:
        raise UserError('needs problems of reasoning-gym, data.train = "gym:NAME"')
    values, failed = [], 0
    for text, source, *item in zip(texts_of(completions), gym_dataset, question, answer, metadata, strict=True):
        if source is None:
            values.append(None)
            continue
        score = scorer(source)
        try:
            values.append(score(text, dict(zip(("question", "answer", "metadata"), item, strict=True))))
        except Exception:  # reasoning-gym's code
            values.append(0.0)
            failed += 1
    log_metric("gym/scorer_errors", failed / len(values))
    names = [None if source is None else source["name"] for source in gym_dataset]
    for name in sorted({*names} - {None}):
        own = [value for value, of in zip(values, names, strict=True) if of == name]
        log_metric(f"gym/{name}", sum(own) / len(own))
    return values
