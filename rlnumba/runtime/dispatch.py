"""The kernel family of each operator on this GPU: one table, and a way to override it.

    sm90   wgmma and TMA              compute capability 9.0
    sm80   mma.sync and cp.async      8.0 and later
    simt   no tensor cores            any dtype and shape; 16 bits: 8.0 and later, since a cvt makes two

Families differ in the last bits of their results, and rollout must compute the bits that training computes. So an
operator has one family for all its forms ("attention": packed, paged and backward). It follows from the GPU, from TABLE
or an override, and from constants of a model such as dtype and head_dim (each operator's `is_supported`), never from
the number of rows. If a family does not support a model, the operator is simt in all its forms.

RLNUMBA_KERNELS, or `force`, overrides the table: one family for all operators that have it ("sm80"), or a list
("attention=sm90,logprob=simt"). In the simulator, whose default is simt, every family may be forced.
"""

import functools
import os
from contextlib import contextmanager

from rlnumba.errors import ConfigError
from rlnumba.runtime import device

VARIABLE = "RLNUMBA_KERNELS"
# The compute capabilities on which a family's kernels run: from, to.
RUNS_ON = {"sm90": ((9, 0), (9, 0)), "sm80": ((8, 0), (99, 9)), "simt": ((0, 0), (99, 9))}
FAMILIES = tuple(RUNS_ON)
# The families of each operator and why each is preferred to those after it: the first that the GPU runs is taken.
# Numbers: bench/results/h200.md; python bench/kernels/attention.py, sm80.py, logprob.py.
TABLE = {
    "gemm": {
        "sm90": "0.95 to 1.04 of cuBLAS's speed at 16,384 rows on an H200",
        "sm80": "never measured; simt has no tensor cores",
        "simt": None,
    },
    "attention": {
        "sm90": "forward 509 to 564, backward 438 to 542 TFLOP/s on an H200",
        "sm80": "forward 268 to 326, backward 171 to 201 TFLOP/s on an H200; never measured on other GPUs",
        "simt": None,
    },
    "delta_rule": {
        "sm90": "284 us for 64 x 256 tokens and 16 heads on an H100",
        "sm80": "never measured; simt has no tensor cores",
        "simt": None,
    },
    "logprob": {"sm90": "forward + backward 35 ms where chunks with cuBLAS take 46, on an H200", "simt": None},
}
# Former names that stay accepted.
ALIASES = {"hopper": "sm90", "tensor_core": "sm80", "simple": "simt", "product": "gemm"}

# {operator: family} that override the table; None before RLNUMBA_KERNELS was read.
_forced = None


def architecture():
    """The compute capability of the current GPU, such as (9, 0); None where there is none."""
    return device.properties().capability


def force(names):
    """Override the table until the next call; "auto" restores it.

    names: a family, or "operator=family,...", as in RLNUMBA_KERNELS. An operator without that family is simt.
    Raises ConfigError for an unknown name, and for a family that this GPU does not run.
    """
    global _forced
    _forced = _parse(names, "kernels")


@contextmanager
def forced(names):
    """force(names) inside the block, the former override after it."""
    global _forced
    before = _forced
    force(names)
    try:
        yield
    finally:
        _forced = before


def _parse(names, source):
    if names in ("", "auto"):
        return {}
    forced = {}
    for part in names.split(","):
        operator, equals, family = (word.strip() for word in part.rpartition("="))
        operator, family = ALIASES.get(operator, operator), ALIASES.get(family, family)
        if equals and operator not in TABLE:
            raise ConfigError(f"{source}: operator must be one of {', '.join(TABLE)}, got {operator!r}")
        offered = TABLE[operator] if equals else FAMILIES
        if family not in offered:
            what = f"{operator} must be one of" if equals else "must be auto, operator=family or one of"
            raise ConfigError(f"{source}: {what} {', '.join(offered)}, got {family!r}")
        if device.name() == "cpu":
            raise ConfigError(f"{source}: {family} needs a GPU or the simulator, not device cpu")
        if architecture() is not None and not _runs(family, architecture()):
            have = ".".join(map(str, architecture()))
            raise ConfigError(f"{source}: this GPU, of compute capability {have}, does not run {family} kernels")
        for each in [operator] if equals else TABLE:
            forced[each] = family if family in TABLE[each] else "simt"
    return forced


def _runs(family, capability):
    since, until = RUNS_ON[family]
    return since <= capability <= until


def _overrides():
    global _forced
    if _forced is None:
        _forced = _parse(os.environ.get(VARIABLE, ""), VARIABLE)
    return _forced


@functools.cache
def _first(operator, capability):
    """The first family of TABLE that runs on a GPU."""
    return next(family for family in TABLE[operator] if _runs(family, capability))


def family(operator):
    """The family of an operator: "sm90", "sm80" or "simt". Raises ConfigError for a bad RLNUMBA_KERNELS."""
    forced = _overrides().get(operator)
    if forced is not None or architecture() is None:
        return forced or "simt"
    return _first(operator, architecture())


def select(operator, is_supported, *constants):
    """The family that computes an operator for a model: its family, or "simt" where that one does not take the model.

    is_supported: {family: function}, one of each family but simt, from the module that implements it; each takes the
    constants, such as dtype and head_dim, and never the number of rows.
    """
    chosen = family(operator)
    return chosen if chosen == "simt" or is_supported[chosen](*constants) else "simt"


def describe(operator):
    """The operator's family and the reason, as one line: str."""
    forced = operator in _overrides()
    if device.name() == "cpu":
        return "cpu"
    chosen = family(operator)
    why = "forced" if forced else TABLE[operator][chosen]
    return f"{chosen} ({why})" if why else chosen
