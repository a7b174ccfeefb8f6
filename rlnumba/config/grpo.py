"""The run file of `rlnumba grpo`."""

from dataclasses import dataclass

from rlnumba.config.keys import Section, key
from rlnumba.config.rollout import GroupConfig
from rlnumba.config.schema import EvalConfig, RewardsConfig, Run
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    """The options of the policy losses (kernels/rl/policy_loss.py); trainers that use them inherit from it."""

    section = "train"
    loss_type: str = key(
        "dapo",
        "How token losses are formed and averaged; the formulas are in rlnumba/kernels/rl/policy_loss.py.",
        choices=("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    )
    importance_sampling_level: str = key(
        "token", "One ratio a token, or one a sequence (GSPO, arXiv 2507.18071).", choices=("token", "sequence")
    )
    epsilon: float = key(0.2, "The ratio is clipped below 1 - epsilon.", minimum=0)
    epsilon_high: float | None = key(
        None, "Clip above 1 + this (DAPO 0.28; None: epsilon); `cispo`: cap of the ratio (ScaleRL 5.0).", minimum=0
    )
    delta: float | None = key(None, "Upper bound of the ratio at negative advantages, too (INTELLECT-2).", above=0)
    beta: float = key(0.0, "Weight of the KL to the reference model, which is `model`; 0 loads none.", minimum=0)
    use_bias_correction_kl: bool = key(False, "Multiply the KL by the ratio (arXiv 2512.02556). TRL since 1.16: true.")
    max_completion_length: int = key(512, "Most tokens of a completion.", minimum=1)
    sapo_temperature_pos: float = key(1.0, "`sapo`: steepness of the gate where the advantage is positive.", above=0)
    sapo_temperature_neg: float = key(1.05, "`sapo`: steepness of the gate where it is not.", above=0)
    vespo_k_pos: float = key(2.0, "`vespo`: power of small ratios where the advantage is not negative.", minimum=0)
    vespo_lambda_pos: float = key(3.0, "`vespo`: decay of large ratios where it is not negative.", minimum=0)
    vespo_k_neg: float = key(3.0, "`vespo`: power of small ratios where the advantage is negative.", minimum=0)
    vespo_lambda_neg: float = key(2.0, "`vespo`: decay of large ratios where it is negative.", minimum=0)
    vllm_importance_sampling_correction: bool = key(True, "Weight the loss by training / sampling probability.")
    vllm_importance_sampling_mode: str = key(
        "sequence_mask",
        "One ratio a token or a sequence; outside the bounds it is clamped (`truncate`) or set to 0 (`mask`).",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    vllm_importance_sampling_clip_max: float | None = key(3.0, "Upper bound of that ratio; None: none.", above=0)
    vllm_importance_sampling_clip_min: float | None = key(None, "Lower bound of that ratio; None: none.", minimum=0)
    off_policy_mask_threshold: float | None = key(
        None, "Leave out sequences of advantage < 0 whose mean log-prob fell by more (arXiv 2512.02556).", minimum=0
    )

    @property
    def clip_high(self):
        """epsilon_high, or epsilon where it is not set: float."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def importance_sampling_correction(self):
        """vllm_importance_sampling_mode, or None without the correction."""
        return self.vllm_importance_sampling_mode if self.vllm_importance_sampling_correction else None

    def __post_init__(self):
        super().__post_init__()
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                f"train.vllm_importance_sampling_clip_min ({low}) must be below vllm_importance_sampling_clip_max "
                f"({high})"
            )
        mode = self.importance_sampling_correction
        if low is None and high is None and mode in ("token_truncate", "sequence_truncate"):
            raise ConfigError(
                f"train.vllm_importance_sampling_mode {mode} needs vllm_importance_sampling_clip_max or _clip_min"
            )


@dataclass(frozen=True)
class GRPOConfig(PolicyLossConfig, GroupConfig):
    """[train] of `rlnumba grpo`."""

    scale_rewards: str = key(
        "group",
        "Divide advantages by the standard deviation of the group, of the batch, or not (Dr. GRPO).",
        choices=("group", "batch", "none"),
        words={"true": "group", "false": "none"},
    )
    multi_objective_aggregation: str = key(
        "sum_then_normalize",
        "`sum_then_normalize`: a completion's weighted sum within its group; `normalize_then_sum`: each function's "
        "rewards in the group, then their sum over the batch, whatever scale_rewards says (GDPO, arXiv 2601.05242).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    entropy_coef: float = key(
        0.0, "The loss gets minus this times the mean entropy of the trained tokens; adaptive: the first value."
    )
    use_adaptive_entropy: bool = key(
        False, "Raise entropy_coef while the entropy is at most the target, else lower it (arXiv 2505.22312)."
    )
    entropy_coef_min: float = key(0.0, "Lowest entropy_coef of use_adaptive_entropy.")
    entropy_coef_max: float = key(1.0, "Highest entropy_coef of use_adaptive_entropy.")
    entropy_coef_delta: float = key(0.005, "What a step of use_adaptive_entropy adds or subtracts.", minimum=0)
    entropy_target: float = key(
        0.2, "Mean entropy, nats, up to which use_adaptive_entropy applies entropy_coef at all.", minimum=0
    )
    top_entropy_quantile: float = key(
        1.0, "Share of the tokens, those of highest entropy, that the surrogate has (arXiv 2506.01939: 0.2).",
        minimum=0, maximum=1,
    )  # fmt: skip
    dynamic_sampling: bool = key(False, "Replace groups of equal rewards by those of further prompts (DAPO; not TRL).")
    max_gen_batches: int = key(10, "Most generations for one batch of dynamic_sampling; verl's DAPO: 10.", minimum=1)

    def __post_init__(self):
        super().__post_init__()
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"train.entropy_coef_min ({self.entropy_coef_min}) must be at most entropy_coef_max "
                f"({self.entropy_coef_max})"
            )


@dataclass(frozen=True, kw_only=True)
class GRPORun(Run):
    """A file of `rlnumba grpo`."""

    rewards: RewardsConfig
    eval: EvalConfig = EvalConfig()
    train: GRPOConfig = GRPOConfig()

    def __post_init__(self):
        if not self.rewards.funcs:
            raise ConfigError("rewards.funcs must name at least one reward function")
