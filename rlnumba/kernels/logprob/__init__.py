# The id of a row without a log-prob, as in torch.nn.functional.cross_entropy.
IGNORED = -100


def slices(count, step):
    """(slice, its length): `count` rows in order, `step` at a time."""
    firsts = range(0, count, max(step, 1))
    return [(slice(first, min(first + step, count)), min(step, count - first)) for first in firsts]


def kernel_outputs(logp, lse, entropy, top1, ids):
    """The outputs of linear_logp as kernels take them: an array without elements for what is left out."""
    return logp, lse, logp[:0] if entropy is None else entropy, ids[:0] if top1 is None else top1
