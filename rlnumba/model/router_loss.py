"""The loss of a mixture's routers in training, and the load of its experts, over the micro-batches of a step.

    loss = the trainer's + coefficient * mean over the micro-batches of aux_loss

aux_loss is E sum over e of f_e P_e of a micro-batch: f_e the share of its tokens, over all sparse layers, that have
expert e, P_e the mean of its probability (kernels/experts). So k where the load is even. Source: TRL 1.16's trainers,
which add it where router_aux_loss_coef, by default config.json's, is not 0.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.config.sft import RouterLossConfig
from rlnumba.errors import ConfigError
from rlnumba.kernels.experts.ops import RouterLoad
from rlnumba.runtime import device


class RouterArrays(NamedTuple):
    """Arrays of a micro-batch's routers' loss, on the device: num_tokens (1,) int32, those that are no padding, and
    weight (1,) float32, the factor of the loss, are read; loss (1,) float32 and counts (E,) int32, the rows of each
    expert, are written."""

    num_tokens: object
    weight: object
    loss: object
    counts: object


class RouterTerm(NamedTuple):
    """The routers' loss of a forward with a tape, of its first tokens, whose gradient its backward adds.

    load: RouterLoad of zeros, which the layers add to; weight (1,): the factor of the loss; loss (1,), slopes (E,)
    float32: what router_loss writes. has_gradient: whether the factor is not 0.
    """

    load: object
    weight: object
    loss: object
    slopes: object
    has_gradient: bool


class RouterLosses:
    """The routers' losses of a policy's micro-batches, on the device until the step's metrics are read.

    config: the model's; train: the [train] section, whose coefficient is 0 where it is no RouterLossConfig.
    outputs: the results that each micro-batch of a mixture has of it, as MicroBatchGraphs.run takes them.
    """

    def __init__(self, config, train):
        self.num_experts, self.coefficient = config.num_experts if config.mixture_layers else 0, 0.0
        if self.num_experts and isinstance(train, RouterLossConfig):
            given = train.router_aux_loss_coef
            self.coefficient = config.router_aux_loss_coef if given is None else given
        self.outputs = {"aux_loss": (1, np.float32), "expert_rows": (self.num_experts, np.int32)}
        self.outputs = self.outputs if self.num_experts else {}
        # Functions that return (loss, rows of each expert) of a micro-batch.
        self.readings = []

    def inputs(self, num_tokens, num_micro_batches):
        """Arrays for the device of a micro-batch of so many tokens, of a step of so many; {} for a dense model."""
        if not self.num_experts:
            return {}
        weight = self.coefficient / num_micro_batches
        return {"num_tokens": np.int32([num_tokens]), "router_weight": np.float32([weight])}

    def add(self, read):
        """Count a micro-batch whose results, with `outputs` among them, read() returns."""
        if self.num_experts:
            self.readings.append(lambda: (float(read()["aux_loss"][0]), read()["expert_rows"]))

    def new_term(self, arrays, num_tokens, num_micro_batches):
        """The RouterTerm of a micro-batch of a step of so many; None for a dense model.

        arrays: its RouterArrays, whose results its sender reads; None: it has its own, of num_tokens, read here.
        """
        if not self.num_experts:
            return None
        xp, count = device.xp(), self.num_experts
        if arrays is None:
            sent = self.inputs(num_tokens, num_micro_batches)
            tokens, weight = (xp.full(1, sent[name][0]) for name in ("num_tokens", "router_weight"))
            arrays = RouterArrays(tokens, weight, xp.empty(1, np.float32), xp.empty(count, np.int32))
            self.readings.append(lambda: (float(device.to_host(arrays.loss)[0]), device.to_host(arrays.counts)))
        arrays.counts[...] = 0
        load = RouterLoad(arrays.counts, xp.zeros(count, np.float32), arrays.num_tokens)
        return RouterTerm(load, arrays.weight, arrays.loss, xp.empty(count, np.float32), self.coefficient != 0)

    def take(self):
        """The readings of the step that has ended."""
        found, self.readings = self.readings, []
        return found

    def metrics(self, results):
        """Metrics by name from all micro-batches' (loss, rows of each expert); {} for a dense model."""
        if not results:
            return {}
        rows = np.sum([counts for _, counts in results], axis=0, dtype=np.int64)
        mean = rows.mean()
        found = {"experts/load_max": float(rows.max() / mean), "experts/load_min": float(rows.min() / mean)}
        if self.coefficient:
            found["aux_loss"] = float(np.mean([loss for loss, _ in results], dtype=np.float64))
        return found

    def added(self, metrics):
        """A step's metrics, whose loss is the trainer's alone, with the routers' added to it."""
        if "aux_loss" in metrics:
            metrics["loss"] += self.coefficient * metrics["aux_loss"]
        return metrics


def check_router_loss(train, read):
    """Raise ConfigError for a coefficient of the routers' loss of a model without routers. read(): its ModelConfig."""
    if isinstance(train, RouterLossConfig) and train.router_aux_loss_coef and not (config := read()).mixture_layers:
        raise ConfigError(
            f"train.router_aux_loss_coef {train.router_aux_loss_coef}: a {config.model_type} model has no router"
        )


def check_router_replay(config):
    """Raise ConfigError for replayed experts of a model, a ModelConfig, without routers."""
    if not config.mixture_layers:
        raise ConfigError(f"train.router_replay: a {config.model_type} model has no router")
