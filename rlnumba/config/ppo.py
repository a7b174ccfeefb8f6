"""The run file of `rlnumba ppo`."""

from dataclasses import dataclass

from rlnumba.config.generation import GenerationPlan
from rlnumba.config.keys import Section, key
from rlnumba.config.rollout import AheadRun, SamplingConfig
from rlnumba.config.sections.prefixes import PrefixSharingConfig
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class PPOConfig(PrefixSharingConfig, SamplingConfig):
    """[train] of `rlnumba ppo`, with the defaults of TRL 1.12's PPOConfig.

    A step is one batch of per_device_train_batch_size x gradient_accumulation_steps prompts with a completion each, on
    which num_ppo_epochs x num_mini_batches optimizer steps are taken.
    """

    learning_rate: float = key(3e-6, "Highest learning rate of AdamW.", minimum=0)
    temperature: float = key(0.7, "Divides the logits, in sampling and in training alike.", above=0)
    max_completion_length: int = key(53, "Most tokens of a completion. TRL: response_length.", minimum=1)
    num_ppo_epochs: int = key(4, "Times that each batch of completions is trained on.", minimum=1)
    num_mini_batches: int = key(1, "Optimizer steps of an epoch, each on an equal share of the batch.", minimum=1)
    kl_coef: float = key(
        0.05,
        "Weight of the KL to the reference in a token's reward; the reference is `model`, 0 loads none.",
        minimum=0,
    )
    kl_estimator: str = key(
        "k1", "`k1`: lp - ref; `k3`: exp(ref - lp) - 1 - (ref - lp), never negative.", choices=("k1", "k3")
    )
    cliprange: float = key(0.2, "The ratio of a token's probabilities is clipped to 1 -+ this.", minimum=0)
    cliprange_value: float = key(0.2, "A value is clipped to this distance from that before the update.", minimum=0)
    vf_coef: float = key(0.1, "Weight of the value loss.", minimum=0)
    entropy_coef: float = key(0.0, "The loss gets minus this times the mean entropy; not in TRL's PPO.", minimum=0)
    gamma: float = key(1.0, "Discount of later rewards.", minimum=0, maximum=1)
    lam: float = key(0.95, "Lambda of generalized advantage estimation.", minimum=0, maximum=1)
    whiten_rewards: bool = key(False, "Divide the tokens' rewards by their standard deviation in the batch.")
    missing_eos_penalty: float | None = key(
        None, "Taken off the score of a completion without an end token; None: nothing is.", minimum=0
    )
    use_score_scaling: bool = key(
        False, "Divide scores by their running standard deviation over all steps (arXiv 2307.04964)."
    )
    use_score_norm: bool = key(False, "With use_score_scaling, take off their running mean first.")
    score_clip: float | None = key(None, "Clip scores, after scaling, to -+ this; None: no limit.", above=0)

    @property
    def rollout_batch_size(self):
        """Completions of a batch: int."""
        return self.per_device_train_batch_size * self.micro_batches_per_step

    @property
    def generation(self):
        """The GenerationPlan: a batch, each prompt of which has one completion."""
        return GenerationPlan(
            num_prompts=self.rollout_batch_size,
            num_completions_each=1,
            num_completions=self.rollout_batch_size,
            num_passes=self.micro_batches_per_step,
            prompts_key="train.per_device_train_batch_size x gradient_accumulation_steps",
        )

    @property
    def batch_keys(self):
        """The keys that set the size of a batch: str."""
        sizes = "per_device_train_batch_size x gradient_accumulation_steps"
        return sizes if self.global_batch_size is None else "train.global_batch_size"

    def size_keys(self, num_ranks):
        """The keys that set the number of completions of a batch on all ranks: str."""
        of_all = " x deploy.num_train_gpus" if num_ranks > 1 and self.global_batch_size is None else ""
        return f"train.{self.batch_keys.removeprefix('train.')}{of_all}"

    @property
    def mini_batch_size(self):
        """Completions of an optimizer step: int."""
        return self.rollout_batch_size // self.num_mini_batches

    @property
    def backward_passes(self):
        """Backward passes in an optimizer step: int."""
        return -(-self.mini_batch_size // self.per_device_train_batch_size)

    def __post_init__(self):
        super().__post_init__()
        if self.rollout_batch_size % self.num_mini_batches:
            raise ConfigError(
                f"train.num_mini_batches ({self.num_mini_batches}) must divide the batch of "
                f"{self.rollout_batch_size} completions ({self.batch_keys})"
            )
        size = self.per_device_train_batch_size
        if self.mini_batch_size > size and self.mini_batch_size % size:
            raise ConfigError(
                f"train.per_device_train_batch_size ({size}) must divide the mini-batch of {self.mini_batch_size} "
                f"completions ({self.batch_keys} / num_mini_batches)"
            )
        if self.use_score_norm and not self.use_score_scaling:
            raise ConfigError("train.use_score_norm needs train.use_score_scaling")


@dataclass(frozen=True)
class CriticConfig(Section):
    """The model of the values: one of its own, or a head on the policy's trunk."""

    section = "critic"
    model: str | None = key(
        None,
        "A folder or hub id, as a reward model's; a causal model gets a head of zeros. None: `model`.",
        nonempty=True,
    )
    shared: bool = key(False, "Put the head on the policy's trunk: one forward and backward for both.")
    learning_rate: float | None = key(None, "Of the critic; None: train.learning_rate.", minimum=0)

    def __post_init__(self):
        super().__post_init__()
        for name in ("model", "learning_rate"):
            if self.shared and getattr(self, name) is not None:
                raise ConfigError(f"critic.{name} cannot be set with critic.shared: the policy's trunk is the critic's")


@dataclass(frozen=True, kw_only=True)
class PPORun(AheadRun):
    """A file of `rlnumba ppo`."""

    trainer = "ppo"
    purpose = "Reinforcement learning with Proximal Policy Optimization and a critic."
    # Advantages go from a token to the one before it.
    takes_branches = False
    # The trainer weights tokens of older weights itself; other log-probs of the sampler have no weights.
    weighted_by, corrects_rollout = None, False
    batch_size = "train", "per_device_train_batch_size"

    train: PPOConfig = PPOConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def importance_sampling_cap(self):
        """Upper bound of the weights of tokens that older weights have sampled: float, None where they have none."""
        has_weights = self.is_stale and "is" in self.asynchronous.staleness
        return self.asynchronous.importance_sampling_cap if has_weights else None
