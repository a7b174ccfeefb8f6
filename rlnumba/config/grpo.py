"""The run file of `rlnumba grpo`."""

import math
from dataclasses import dataclass

from rlnumba.config.generation import DynamicSampling
from rlnumba.config.keys import Section, key
from rlnumba.config.rollout import AheadRun, GroupConfig
from rlnumba.config.sections.agents import ACTS
from rlnumba.config.sections.prefixes import PrefixSharingConfig
from rlnumba.config.sections.teacher import TeacherConfig
from rlnumba.config.sft import RouterLossConfig
from rlnumba.errors import ConfigError


def parse_bounds(name, text):
    """The numbers of "high" or "low_high", all above 0: list of float. Raises ConfigError with the key's name."""
    try:
        bounds = [float(part) for part in str(text).split("_")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not all(0 < bound < math.inf for bound in bounds) or sorted(bounds) != bounds:
        raise ConfigError(f'{name} must be a number above 0, or two as "0.5_2.0", the lower first; got {text!r}')
    return bounds


REJECTION_MODES = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


def rejection_modes(rollout_rs, rollout_rs_threshold):
    """[(mode, (low, high))] of train.rollout_rs and its thresholds, logarithms for k1. Raises ConfigError."""
    modes = [mode.strip() for mode in rollout_rs.split(",")]
    texts = [text.strip() for text in rollout_rs_threshold.split(",")]
    if len(texts) not in (1, len(modes)):
        raise ConfigError(f"train.rollout_rs_threshold must be one or {len(modes)}, got {rollout_rs_threshold!r}")
    found = []
    for mode, text in zip(modes, texts * len(modes) if len(texts) == 1 else texts, strict=True):
        if mode not in REJECTION_MODES:
            raise ConfigError(f"train.rollout_rs must be of {', '.join(REJECTION_MODES)}, got {mode!r}")
        *low, high = parse_bounds("train.rollout_rs_threshold", text)
        if mode.endswith("k1"):
            low, high = sorted((math.log(low[0]) if low else -math.log(high), math.log(high)))
            found.append((mode, (low, high)))
        elif low:
            raise ConfigError(f"train.rollout_rs_threshold of {mode} is one number, got {text!r}")
        else:
            found.append((mode, (-math.inf, high)))
    return found


# Loss types without importance weights: their ratio is to the sampler, or has the correction in it.
UNCORRECTED = ("vespo", "dppo", "dro")
# Estimators that compare a reward with others than those of its group.
ACROSS_GROUPS = ("remax", "rae", "reinforce_plus_plus")
# Estimators that compare the turns of episodes.
OF_TURNS = ("gigpo", "hgpo")
TURNS, GIGPO, HGPO = (("train.advantage_estimator", names) for names in (OF_TURNS, ("gigpo",), ("hgpo",)))
SAPO, VESPO, DPPO, DRO = (("train.loss_type", (name,)) for name in ("sapo", "vespo", "dppo", "dro"))


@dataclass(frozen=True)
class PolicyLossConfig(Section):
    """The options of the policy losses (kernels/rl/policy_loss.py); trainers that use them inherit from it."""

    section = "train"
    loss_type: str = key(
        "dapo",
        "How token losses are formed and averaged; the formulas are in rlnumba/kernels/rl/policy_loss.py.",
        choices=("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "dppo", "gmpo", "dro"),
    )
    importance_sampling_level: str = key(
        "token", "One ratio a token, or one a sequence (GSPO, arXiv 2507.18071).", choices=("token", "sequence")
    )
    epsilon: float = key(
        0.2, "The ratio is clipped below 1 - epsilon; `gmpo`: a token's log-ratio below -epsilon (0.4).", minimum=0
    )
    epsilon_high: float | None = key(
        None,
        "Clip above 1 + this (DAPO 0.28; None: epsilon); `cispo`: cap of the ratio (ScaleRL 5.0); `gmpo`: of a token's "
        "log-ratio (0.4).",
        minimum=0,
    )
    delta: float | None = key(None, "Upper bound of the ratio at negative advantages, too (INTELLECT-2).", above=0)
    beta: float = key(0.0, "Weight of the KL to the reference model, which is `model`; 0 loads none.", minimum=0)
    use_bias_correction_kl: bool = key(
        False, "Multiply the KL by the ratio (arXiv 2512.02556). TRL since 1.16: true.", needs="train.beta"
    )
    max_completion_length: int = key(512, "Most tokens of a completion.", minimum=1)
    sapo_temperature_pos: float = key(
        1.0, "`sapo`: steepness of the gate where the advantage is positive.", above=0, needs=SAPO
    )
    sapo_temperature_neg: float = key(1.05, "`sapo`: steepness of the gate where it is not.", above=0, needs=SAPO)
    vespo_k_pos: float = key(
        2.0, "`vespo`: power of small ratios where the advantage is not negative.", minimum=0, needs=VESPO
    )
    vespo_lambda_pos: float = key(
        3.0, "`vespo`: decay of large ratios where it is not negative.", minimum=0, needs=VESPO
    )
    vespo_k_neg: float = key(
        3.0, "`vespo`: power of small ratios where the advantage is negative.", minimum=0, needs=VESPO
    )
    vespo_lambda_neg: float = key(2.0, "`vespo`: decay of large ratios where it is negative.", minimum=0, needs=VESPO)
    dppo_mask_high: float = key(
        0.2, "`dppo`: leave out gains of probability above this, if the advantage is positive.", needs=DPPO
    )
    dppo_mask_low: float = key(
        0.2, "`dppo`: leave out losses of probability above this, if it is not.", minimum=0, needs=DPPO
    )
    dppo_kl_coef: float = key(1e-3, "`dppo`: weight of the squared log-ratio to the sampler.", minimum=0, needs=DPPO)
    dro_beta: float = key(
        0.05, "`dro`: weight of half the squared log-ratio to the sampler (Tinker: 0.05).", minimum=0, needs=DRO
    )
    vllm_importance_sampling_correction: bool = key(True, "Weight the loss by training / sampling probability.")
    vllm_importance_sampling_mode: str = key(
        "sequence_mask",
        "One ratio a token or a sequence; outside the bounds it is clamped (`truncate`) or set to 0 (`mask`).",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        needs="train.vllm_importance_sampling_correction",
    )
    vllm_importance_sampling_clip_max: float | None = key(
        3.0, "Upper bound of that ratio; None: none.", above=0, needs="train.vllm_importance_sampling_correction"
    )
    vllm_importance_sampling_clip_min: float | None = key(
        None, "Lower bound of that ratio; None: none.", minimum=0, needs="train.vllm_importance_sampling_correction"
    )
    rollout_is: str | None = key(
        None, "verl's name for the correction: of a token or a sequence, instead of the four keys above.",
        choices=("token", "sequence"),
    )  # fmt: skip
    rollout_is_threshold: str = key(
        "2.0",
        'Bounds of rollout_is: "2.0" clamps the ratio there, a pair "0.5_5.0" drops what is outside (IcePop).',
        needs="train.rollout_is",
    )
    rollout_is_batch_normalize: bool = key(
        False, "Divide the weights of rollout_is by their mean over the generation (verl)."
    )
    off_policy_mask_threshold: float | None = key(
        None, "Leave out sequences of advantage < 0 whose mean log-prob fell by more (arXiv 2512.02556).", minimum=0
    )

    @property
    def clip_high(self):
        """epsilon_high, or epsilon where it is not set: float."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def importance_sampling_correction(self):
        """vllm_importance_sampling_mode or that of rollout_is, or None without the correction."""
        if self.rollout_is is not None:
            return f"{self.rollout_is}_{'mask' if '_' in self.rollout_is_threshold else 'truncate'}"
        return self.vllm_importance_sampling_mode if self.vllm_importance_sampling_correction else None

    @property
    def importance_sampling_bounds(self):
        """(lowest, highest) ratio of the correction, None where there is no bound."""
        if self.rollout_is is not None:
            *low, high = parse_bounds("train.rollout_is_threshold", self.rollout_is_threshold)
            return low[0] if low else None, high
        return self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max

    def __post_init__(self):
        super().__post_init__()
        if self.importance_sampling_level != "token" and self.loss_type in ("dppo", "gmpo", "dro"):
            has = "a ratio of its own" if self.loss_type == "gmpo" else "a ratio a token"
            raise ConfigError(f"train.loss_type {self.loss_type} has {has}: importance_sampling_level must be token")
        if self.rollout_is_batch_normalize:
            if self.rollout_is is None:
                raise ConfigError("train.rollout_is_batch_normalize needs train.rollout_is")
            if self.loss_type in UNCORRECTED:
                raise ConfigError(f"train.rollout_is_batch_normalize: loss_type {self.loss_type} has no such weights")
        low, high = self.importance_sampling_bounds
        if self.rollout_is is not None:
            return
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
class GRPOConfig(PolicyLossConfig, GroupConfig, PrefixSharingConfig, RouterLossConfig):
    """[train] of `rlnumba grpo`."""

    scale_rewards: str = key(
        "group",
        "Divide advantages by the standard deviation of the group, of the batch, or not (Dr. GRPO).",
        choices=("group", "batch", "none"),
        words={"true": "group", "false": "none"},
    )
    advantage_estimator: str = key(
        "grpo",
        "How rewards become advantages; the formulas of all but `grpo` are in rlnumba/trainers/estimators.py. "
        "verl: adv_estimator.",
        choices=(
            *("grpo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "rae", "remax"),
            *OF_TURNS,
        ),
    )
    step_advantage_w: float = key(
        1.0, "`gigpo`: weight of a turn's advantage beside its episode's.", minimum=0, needs=GIGPO
    )
    gigpo_gamma: float = key(
        0.95,
        "`gigpo`, `hgpo`: what the reward counts less for each later turn of its episode; verl-agent: algorithm.gamma.",
        minimum=0,
        maximum=1,
        needs=TURNS,
    )
    gigpo_mode: str = key(
        "mean_norm",
        "`gigpo`, `hgpo`: `mean_std_norm` divides each advantage by the standard deviation of its group, too, whatever "
        "scale_rewards says; verl-agent: algorithm.gigpo.mode, algorithm.hgpo.mode.",
        choices=("mean_norm", "mean_std_norm"),
        needs=TURNS,
    )
    hgpo_history_length: int = key(
        2,
        "`hgpo`: states before that of a turn which the longest history of its groups has; verl-agent: "
        "env.history_length.",
        minimum=0,
        needs=HGPO,
    )
    hgpo_alpha: float = key(
        1.0,
        "`hgpo`: a group of turns that share their last k states has the weight (k + 1)^hgpo_alpha; verl-agent: "
        "algorithm.hgpo.length_weight_alpha.",
        minimum=0,
        needs=HGPO,
    )
    hgpo_base_group: bool = key(
        False,
        "`hgpo`: the advantage of the episode is one of those that are averaged, with weight 1; verl-agent: "
        "algorithm.hgpo.base_group.",
        needs=HGPO,
    )
    length_penalty: float = key(
        0.0, "Subtracted from the reward, for advantages, times tokens / max_completion_length (not TRL).", minimum=0
    )
    multi_objective_aggregation: str = key(
        "sum_then_normalize",
        "`sum_then_normalize`: a completion's weighted sum within its group; `normalize_then_sum`: each function's "
        "rewards in the group, then their sum over the batch, whatever scale_rewards says; also under its name, `gdpo` "
        "(arXiv 2601.05242).",
        choices=("sum_then_normalize", "normalize_then_sum"),
        words={"gdpo": "normalize_then_sum"},
    )
    observation_coef: float = key(
        0.0,
        "Weight of the mean cross-entropy, added to the loss, of the tokens that tools and environments have put "
        "between the turns (ECHO, arXiv 2605.24517).",
        minimum=0,
        needs=ACTS,
    )
    entropy_coef: float = key(
        0.0, "The loss gets minus this times the mean entropy of the trained tokens; adaptive: the first value."
    )
    use_adaptive_entropy: bool = key(
        False, "Raise entropy_coef while the entropy is at most the target, else lower it (arXiv 2505.22312)."
    )
    entropy_coef_min: float = key(
        0.0, "Lowest entropy_coef of use_adaptive_entropy.", needs="train.use_adaptive_entropy"
    )
    entropy_coef_max: float = key(
        1.0, "Highest entropy_coef of use_adaptive_entropy.", needs="train.use_adaptive_entropy"
    )
    entropy_coef_delta: float = key(
        0.005, "What a step of use_adaptive_entropy adds or subtracts.", minimum=0, needs="train.use_adaptive_entropy"
    )
    entropy_target: float = key(
        0.2,
        "Mean entropy, nats, up to which use_adaptive_entropy applies entropy_coef at all.",
        minimum=0,
        needs="train.use_adaptive_entropy",
    )
    top_entropy_quantile: float = key(
        1.0, "Share of the tokens, those of highest entropy, that the surrogate has (arXiv 2506.01939: 0.2).",
        minimum=0, maximum=1,
    )  # fmt: skip
    rollout_rs: str | None = key(
        None, "verl's rejection of tokens or sequences, as `token_k1` or `seq_mean_k3,token_k2`; None: none."
    )
    rollout_rs_threshold: str = key(
        "2.0",
        'Thresholds of rollout_rs, one or one for each mode: "0.5_2.0" bounds the ratio of k1, "0.1" k2 and k3.',
        needs="train.rollout_rs",
    )
    bypass_mode: bool = key(
        False, "Take the sampler's log-probs as the old ones, without a forward of their own (verl)."
    )
    replay_buffer_size: int = key(
        0,
        "Groups of the past, of large advantages and rewards that differ, that are kept to replace groups of equal "
        "rewards; TRL's GRPOWithReplayBufferConfig: 64.",
        minimum=0,
    )
    dynamic_sampling: bool = key(False, "Replace groups of equal rewards by those of further prompts (DAPO; not TRL).")
    max_gen_batches: int = key(
        10,
        "Most prompts for one batch of dynamic_sampling, as a multiple of its own; verl's DAPO: 10.",
        minimum=1,
        needs="train.dynamic_sampling",
    )
    over_sampling_batch_size: int | None = key(
        None,
        "dynamic_sampling: prompts at a time that are being completed or are known to have rewards that differ. More "
        "keep the engine full; those not needed at the end are dropped (slime). None: as many as the batch has.",
        minimum=1,
    )

    @property
    def generation(self):
        """The GenerationPlan."""
        plan, dynamic = super().generation, None
        if self.dynamic_sampling:
            window = self.over_sampling_batch_size or plan.num_prompts
            dynamic = DynamicSampling(window, self.max_gen_batches * plan.num_prompts)
        return plan._replace(
            # Replayed groups are older than the weights.
            ratio_to_sampler=self.bypass_mode or self.replay_buffer_size > 0,
            replay_buffer_size=self.replay_buffer_size,
            dynamic=dynamic,
            has_greedy=self.advantage_estimator == "remax",
        )

    @property
    def policy_loss(self):
        """The PolicyLossConfig of the loss."""
        return self

    def __post_init__(self):
        super().__post_init__()
        if self.bypass_mode and (self.rollout_rs is not None or self.rollout_is_batch_normalize):
            name = "rollout_rs" if self.rollout_rs is not None else "rollout_is_batch_normalize"
            raise ConfigError(f"train.{name} compares the sampler with the old policy, which bypass_mode leaves out")
        if self.replay_buffer_size and self.sampling_mask_replay:
            raise ConfigError("train.replay_buffer_size has completions of other steps: not with sampling_mask_replay")
        if self.replay_buffer_size and self.advantage_estimator not in ("grpo", "maxrl"):
            raise ConfigError(
                f"train.replay_buffer_size is for advantage_estimator grpo and maxrl, not {self.advantage_estimator}"
            )
        if self.dynamic_sampling and self.advantage_estimator in ACROSS_GROUPS:
            raise ConfigError(
                "train.dynamic_sampling replaces groups of equal rewards, whose advantages are not 0 with "
                f"advantage_estimator {self.advantage_estimator}: set one of the two"
            )
        if self.over_sampling_batch_size is not None:
            if not self.dynamic_sampling:
                raise ConfigError("train.over_sampling_batch_size needs train.dynamic_sampling")
            if self.over_sampling_batch_size < self.prompts_per_rollout:
                raise ConfigError(
                    f"train.over_sampling_batch_size ({self.over_sampling_batch_size}) must be at least the "
                    f"{self.prompts_per_rollout} prompts of a generation ({self.generation.prompts_key})"
                )
        if self.optimizer_in_backward and self.max_tokens_per_micro_batch is not None:
            raise ConfigError("train.optimizer_in_backward does not go with train.max_tokens_per_micro_batch")
        if self.rollout_rs is not None:
            rejection_modes(self.rollout_rs, self.rollout_rs_threshold)
        if self.advantage_estimator != "grpo" and self.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError(
                f"train.multi_objective_aggregation {self.multi_objective_aggregation} is for advantage_estimator "
                f"grpo, not {self.advantage_estimator}"
            )
        if self.length_penalty and self.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError("train.length_penalty needs train.multi_objective_aggregation sum_then_normalize")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ConfigError(
                f"train.entropy_coef_min ({self.entropy_coef_min}) must be at most entropy_coef_max "
                f"({self.entropy_coef_max})"
            )


@dataclass(frozen=True, kw_only=True)
class GRPORun(AheadRun):
    """A file of `rlnumba grpo`."""

    trainer = "grpo"
    purpose = "Reinforcement learning with Group Relative Policy Optimization."
    learns_advantages = True

    train: GRPOConfig = GRPOConfig()
    teacher: TeacherConfig = TeacherConfig()

    def __post_init__(self):
        super().__post_init__()
        name = self.train.advantage_estimator
        if name in OF_TURNS and not (self.tools.funcs or self.environment.specs):
            raise ConfigError(
                f"train.advantage_estimator {name} compares the turns of episodes: it needs tools or an environment, "
                "not tasks or rollout.func"
            )
        if self.train.observation_coef:
            for name in ("sampling_mask_replay", "replay_buffer_size", "log_token_values"):
                if getattr(self.train, name):
                    raise ConfigError(f"train.observation_coef does not go with train.{name}")
            if self.data.has_tasks or self.rollout.func is not None:
                raise ConfigError(
                    "train.observation_coef is for tools and environments: not with tasks or rollout.func"
                )
        if self.teacher.is_alone:
            for name in ("dynamic_sampling", "replay_buffer_size"):
                if getattr(self.train, name):
                    raise ConfigError(f"train.{name} compares rewards, which teacher.adv_tau 0 does not train on")

    def _check_async(self):
        super()._check_async()
        if self.train.dynamic_sampling:
            # Engines are kept full by the groups of coming steps; a draw by weights is one of a whole batch.
            for name in ("over_sampling_batch_size", "difficulty_weights"):
                if getattr(self.train, name) is not None:
                    raise ConfigError(f"train.dynamic_sampling with [async] does not go with train.{name}")
        if self.is_stale and "is" in self.asynchronous.staleness and self.train.loss_type in UNCORRECTED:
            raise ConfigError(f"async.staleness `is`: train.loss_type {self.train.loss_type} has no such weights")
