"""The kernel family of each operator on this GPU: one table, and a way to override it.

    sm90   wgmma and TMA              compute capability 9.0
    sm80   mma.sync and cp.async      8.0 and later
    simt   no tensor cores            any GPU, dtype and shape

Families differ in the last bits of their results, and rollout must compute the bits that training computes. So an
operator has one family for all its forms ("attention": packed, paged and backward). It follows from the GPU, from TABLE
or an override, and from constants of a model such as dtype and head_dim (each operator's `is_supported`), never from
the number of rows. Where a family does not support a model, the operator is simt in all its forms.

RLNUMBA_KERNELS, or `force`, overrides the table: one family for all operators that have it ("sm80"), or a list
("attention=sm90,logprob=simt"). In the simulator, whose default is simt, every family may be forced.
"""

import functools
import os
from contextlib import contextmanager
from typing import NamedTuple

from rlnumba.errors import ConfigError
from rlnumba.runtime import device

VARIABLE = "RLNUMBA_KERNELS"
OFFERED = {
    "gemm": ("sm90", "sm80", "simt"),
    "attention": ("sm90", "sm80", "simt"),
    "logprob": ("sm90", "simt"),
}
FAMILIES = ("sm90", "sm80", "simt")
# Former names that stay accepted.
ALIASES = {"hopper": "sm90", "tensor_core": "sm80", "simple": "simt", "product": "gemm"}
# The compute capabilities on which a family's kernels run: from, to.
NEWEST = (99, 9)
RUNS_ON = {"sm90": ((9, 0), (9, 0)), "sm80": ((8, 0), NEWEST), "simt": ((0, 0), NEWEST)}


class Row(NamedTuple):
    """`operator` is of `family` on compute capabilities `since` .. `until`, because of `why`."""

    operator: str
    since: tuple
    until: tuple
    family: str
    why: str


# The first row that matches counts; without one, an operator is simt.
TABLE = (
    # Measured: bench/results/h200.md.
    Row("gemm", (9, 0), (9, 0), "sm90", "0.95 to 1.04 of cuBLAS's speed at 16,384 rows on an H200"),
    # Never measured; without tensor cores the peak is an order of magnitude lower.
    Row("gemm", (8, 0), NEWEST, "sm80", "never measured; simt has no tensor cores"),
    # python bench/kernels/attention.py, attention/backward.py.
    Row("attention", (9, 0), (9, 0), "sm90", "forward 509 to 564, backward 438 to 542 TFLOP/s on an H200"),
    # python bench/kernels/sm80.py, on a GPU of compute capability 9.0.
    Row(
        "attention",
        (8, 0),
        NEWEST,
        "sm80",
        "forward 268 to 326, backward 171 to 201 TFLOP/s on an H200; never measured on other GPUs",
    ),
    # python bench/kernels/logprob.py.
    Row("logprob", (9, 0), (9, 0), "sm90", "forward + backward 35 ms where chunks with cuBLAS take 46, on an H200"),
)

# {operator: family} that override the table; None before RLNUMBA_KERNELS was read.
_forced = None


@functools.cache
def architecture():
    """The compute capability of the current GPU, such as (9, 0); None where there is none."""
    if device.name() != "cuda":
        return None
    digits = device.xp().cuda.Device().compute_capability
    return int(digits[:-1]), int(digits[-1])


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
        if equals and operator not in OFFERED:
            raise ConfigError(f"{source}: operator must be one of {', '.join(OFFERED)}, got {operator!r}")
        offered = OFFERED[operator] if equals else FAMILIES
        if family not in offered:
            what = f"{operator} must be one of" if equals else "must be auto, operator=family or one of"
            raise ConfigError(f"{source}: {what} {', '.join(offered)}, got {family!r}")
        _check_runs(family, source)
        for each in [operator] if equals else OFFERED:
            forced[each] = family if family in OFFERED[each] else "simt"
    return forced


def _check_runs(family, source):
    if device.name() == "cpu":
        raise ConfigError(f"{source}: {family} needs a GPU or the simulator, not device cpu")
    since, until = RUNS_ON[family]
    if architecture() is not None and not since <= architecture() <= until:
        have = ".".join(map(str, architecture()))
        raise ConfigError(f"{source}: this GPU, of compute capability {have}, does not run {family} kernels")


def _overrides():
    global _forced
    if _forced is None:
        _forced = _parse(os.environ.get(VARIABLE, ""), VARIABLE)
    return _forced


def is_forced(operator):
    """Whether the environment or `force` chose the operator's family."""
    return operator in _overrides()


@functools.cache
def _row(operator, capability):
    """The row of TABLE for an operator on a GPU, or None."""
    if capability is None:
        return None
    return next((row for row in TABLE if row.operator == operator and row.since <= capability <= row.until), None)


def family(operator):
    """The family of an operator: "sm90", "sm80" or "simt". Raises ConfigError for a bad RLNUMBA_KERNELS."""
    forced = _overrides().get(operator)
    if forced is not None:
        return forced
    row = _row(operator, architecture())
    return row.family if row else "simt"


def select(operator, is_supported, *constants):
    """The family that computes an operator for a model: its family, or "simt" where that one does not take the model.

    is_supported: {family: function}, one of each family but simt, from the module that implements it; each takes the
    constants, such as dtype and head_dim, and never the number of rows.
    """
    chosen = family(operator)
    return chosen if chosen == "simt" or is_supported[chosen](*constants) else "simt"


def describe(operator):
    """The operator's family and the reason, as one line: str."""
    if device.name() == "cpu":
        _overrides()
        return "cpu"
    if is_forced(operator):
        return f"{family(operator)} (forced)"
    row = _row(operator, architecture())
    return f"{family(operator)} ({row.why})" if row else "simt"
