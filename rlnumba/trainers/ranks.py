"""A run on several ranks: processes that do the same steps, each with its micro-batches of them."""

import dataclasses
import importlib
import importlib.metadata

from rlnumba.config.keys import Section
from rlnumba.distributed.communicator import check_equal
from rlnumba.distributed.launch import launch
from rlnumba.errors import ConfigError
from rlnumba.runtime import device


def train_on_ranks(kind, run, resume):
    """Train a run on run.num_ranks processes, of which the first writes its folder; kind: "sft", ...

    Raises RankError for the first that fails, ConfigError where there are no devices for all.
    """
    if device.name() == "cuda":
        raise ConfigError(
            f"deploy.num_train_gpus is {run.num_ranks}: several ranks need --device cpu, where each is a process"
        )
    launch(_train, run.num_ranks, kind, run.on_ranks(), resume, timeout_s=run.deploy.dist_timeout_seconds)


def _train(communicator, kind, run, resume):
    """What each rank does."""
    check_equal(communicator, facts_of(run))
    train = getattr(importlib.import_module(f"rlnumba.trainers.{kind}"), f"run_{kind}")
    train(run, resume, communicator=communicator)


def facts_of(run):
    """{name: value} of what a run's result depends on: versions, and all keys."""
    facts = {name: importlib.metadata.version(name) for name in ("rlnumba", "numba", "numpy")}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if isinstance(value, Section):
            facts |= {f"{field.name}.{name}": each for name, each in vars(value).items()}
        else:
            facts[field.name] = value
    return facts
