# The id of a row without a log-prob, as in torch.nn.functional.cross_entropy.
IGNORED = -100


def slices(count, step):
    """(slice, its length): `count` rows in order, `step` at a time."""
    firsts = range(0, count, max(step, 1))
    return [(slice(first, min(first + step, count)), min(step, count - first)) for first in firsts]
