"""A run on several ranks: processes that do the same steps, each with its micro-batches of them."""

import importlib

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
    launch(train_rank, run.num_ranks, kind, run.on_ranks(), resume, timeout_s=run.deploy.dist_timeout_seconds)


def train_rank(communicator, kind, run, resume):
    """What each rank does."""
    train = getattr(importlib.import_module(f"rlnumba.trainers.{kind}"), f"run_{kind}")
    train(run, resume, communicator=communicator)
