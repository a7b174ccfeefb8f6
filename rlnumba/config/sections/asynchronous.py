"""The section [async]: generation goes on while the model trains."""

from dataclasses import dataclass

from rlnumba.config.keys import Section, key
from rlnumba.errors import ConfigError

STALENESS = ("cap", "is", "reject")


@dataclass(frozen=True)
class AsyncConfig(Section):
    """[async] of runs that draw ahead of training: TRL's names of AsyncGRPOConfig, NeMo-RL's for what that has not."""

    section = "async"

    max_staleness: int = key(
        4,
        "Optimizer steps that the weights which sampled a token may be older than those that are trained on it. 0: the "
        "synchronous run, with the same weights at its end.",
        minimum=0,
    )
    staleness: list[str] = key(
        ["cap", "is"],
        "What keeps old completions from doing harm: `cap`, prompts are started only as far ahead as max_staleness "
        "(AReaL); `is`, the loss of a token (rloo: of a completion) is weighted by its probability now over that when "
        "it was sampled; `reject`, groups with an older token are drawn again, which favours short ones.",
        choices=STALENESS,
        single=True,
    )
    importance_sampling_cap: float = key(
        2.0, "Upper bound of that weight (train.rollout_is).", above=0, needs=("async.staleness", ("is",))
    )
    queue_maxsize: int = key(1024, "Most completions that are being generated, or wait to be trained on.", minimum=1)
    order: str = key(
        "start",
        "Groups are trained on in the order in which they were started, or by `completion`: those that are complete.",
        choices=("start", "completion"),
    )
    in_flight_weight_updates: bool = key(
        True,
        "New weights are used from the next token on; false: once all completions that have begun are complete. Then "
        "the result does not depend on timing, and long completions leave the inference GPUs idle.",
    )
    recompute_kv_cache_after_weight_updates: bool = key(
        False, "Compute the keys and values of tokens so far again with new weights; false: keep those of the old ones."
    )
    rollout_timeout_s: float = key(
        600.0,
        "Seconds from when an inference process begins to compute a group until it is given out again. The time in "
        "which a group waits for weights, or for its turn in the engine, does not count.",
        above=0,
        needs="deploy.num_infer_gpus",
    )
    max_attempts: int = key(
        3,
        "How often a group is given out, after which another prompt takes its place.",
        minimum=1,
        needs="deploy.num_infer_gpus",
    )
    partial_rollouts: bool = key(
        True, "A group that is given out again goes on from the tokens that it has.", needs="deploy.num_infer_gpus"
    )
    heartbeat_stale_after_s: float = key(
        300.0,
        "Seconds without a sign of life after which an inference process is started anew.",
        above=0,
        needs="deploy.num_infer_gpus",
    )
    decode_steps_per_micro_batch: int = key(
        16,
        "Where the training GPUs generate (deploy.num_infer_gpus 0): decode steps before each forward and backward "
        "pass, of several GPUs before those of any; ppo: of a batch's first optimizer step.",
        minimum=0,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_staleness == 0 and "cap" not in self.staleness:
            raise ConfigError(f"async.max_staleness 0 needs `cap` in async.staleness, got {self.staleness}")
