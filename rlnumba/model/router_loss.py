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


class RouterTerm(NamedTuple):
    """The routers' loss of a forward with a tape, of all its tokens, whose gradient its backward adds.

    load: RouterLoad of zeros, which the layers add to; weight: the factor of the loss; loss (1,), slopes (E,) float32:
    what router_loss writes.
    """

    load: object
    weight: float
    loss: object
    slopes: object


class RouterLosses:
    """The RouterTerms of a policy's micro-batches, on the device until the step's metrics are read.

    config: the model's; train: the [train] section, whose coefficient is 0 where it is no RouterLossConfig.
    """

    def __init__(self, config, train):
        self.num_experts, self.coefficient = config.num_experts if config.mixture_layers else 0, 0.0
        if self.num_experts and isinstance(train, RouterLossConfig):
            given = train.router_aux_loss_coef
            self.coefficient = config.router_aux_loss_coef if given is None else given
        self.terms = []

    def new_term(self, num_micro_batches):
        """The RouterTerm of the next micro-batch of a step of so many; None for a dense model."""
        if not self.num_experts:
            return None
        xp, count = device.xp(), self.num_experts
        load = RouterLoad(xp.zeros(count, np.int32), xp.zeros(count, np.float32))
        weight = self.coefficient / num_micro_batches
        term = RouterTerm(load, weight, xp.empty(1, np.float32), xp.empty(count, np.float32))
        self.terms.append(term)
        return term

    def take(self):
        """The terms of the step that has ended."""
        found, self.terms = self.terms, []
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


def values_of(terms):
    """[(loss, rows of each expert)] of RouterTerms, on the host."""
    return [(float(device.to_host(term.loss)[0]), device.to_host(term.load.counts)) for term in terms]


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
