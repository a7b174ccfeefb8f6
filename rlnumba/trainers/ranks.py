"""A run on several ranks: processes that do the same steps, each with its micro-batches of them.

On the cpu device a rank is a process, on cuda a process with a GPU of its own (distributed/placement.py).
"""

import dataclasses
import importlib

from rlnumba.config.keys import Section
from rlnumba.distributed.communicator import check_equal
from rlnumba.distributed.launch import launch
from rlnumba.distributed.placement import placement
from rlnumba.runtime.environment import version_of
from rlnumba.trainers.run_folder import start_compiling


def train_on_ranks(kind, run, resume):
    """Train a run on run.num_ranks processes, of which the first writes its folder; kind: "sft", ...

    Raises RankError for the first that fails, ConfigError where there are no devices for all.
    """
    count, run = run.num_ranks, run.on_ranks()
    place = placement(count, "deploy.num_train_gpus")
    start_compiling(kind, run)
    launch(_train, count, kind, run, resume, timeout_s=run.deploy.dist_timeout_seconds, **place)


def _train(communicator, kind, run, resume):
    """What each rank does."""
    check_equal(communicator, facts_of(run))
    train = getattr(importlib.import_module(f"rlnumba.trainers.{kind}"), f"run_{kind}")
    train(run, resume, communicator=communicator)


def facts_of(run):
    """{name: value} of what a run's result depends on: versions, and all keys."""
    facts = {name: version_of(name) for name in ("rlnumba", "numba", "numpy")}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Section):
            facts |= {f"{field.name}.{name}": each for name, each in vars(value).items()}
        else:
            facts[field.name] = value
    return facts
