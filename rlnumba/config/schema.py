"""A run's keys as frozen dataclasses, with defaults, limits and a line of documentation each.

Key names and defaults are TRL's for [train] and vLLM's for [engine], unless a key's line says otherwise. A value out of
range is a ConfigError that names the key. docs/make_configuration.py writes docs/configuration.md from this file.
"""

import math
import operator
import types
import typing
from dataclasses import MISSING, dataclass, field, fields

from rlnumba.errors import ConfigError

# Limits of a key: how a message names each, and whether a value meets it.
LIMITS = {
    "above": ("above", operator.gt),
    "minimum": ("at least", operator.ge),
    "below": ("below", operator.lt),
    "maximum": ("at most", operator.le),
}
REQUIRED = MISSING


def key(default, doc, **limits):
    """A dataclass field with its line of documentation.

    limits: those of LIMITS, `choices` (tuple), `nonempty` (bool), `words` (dict of other spellings, in lower case).
    """
    metadata = {"doc": doc, **limits}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def range_problem(metadata, value):
    """The limit that a value violates, as the end of a sentence: str, or None."""
    if value == "" and "nonempty" in metadata:
        return "must not be empty"
    if "choices" in metadata and value not in metadata["choices"]:
        return f"must be one of {', '.join(metadata['choices'])}, got {value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, got {value}"
    limits = [(word, is_met, metadata[name]) for name, (word, is_met) in LIMITS.items() if name in metadata]
    if all(is_met(value, limit) for _, is_met, limit in limits):
        return None
    return f"must be {' and '.join(f'{word} {limit}' for word, _, limit in limits)}, got {value}"


class Section:
    """A section of a run, whose values are checked when it is made; `section` is its name."""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            problem = None if value is None else range_problem(f.metadata, value)
            if problem:
                raise ConfigError(f"{self.section}.{f.name} {problem}")


@dataclass(frozen=True)
class DataConfig(Section):
    """The files of rows, and how a row becomes a prompt."""

    section = "data"
    train: str = key(REQUIRED, "Training rows, a .jsonl or .parquet file; columns are detected (see the end).")
    eval: str | None = key(None, "Held-out rows of the same columns, evaluated every `train.eval_steps`.")
    prompt_column: str | None = key(None, "Column of the prompt; None: `prompt`, else `question`.")
    completion_column: str | None = key(None, "SFT: column of the completion; None: `completion`.")
    answer_column: str | None = key(
        None, "GRPO: column that rewards get as `solution`; None: the first answer column that a reward finds."
    )
    system_prompt: str | None = key(None, "System message put before a chat prompt that has none.")
    prompt_template: str | None = key(
        None,
        "Prompt made of a question, or in GRPO of any string: {question} and other columns in braces are replaced. "
        "None: the question, then a line that asks for `####` (GSM8K) or a box around the answer.",
    )
    apply_chat_template: bool | None = key(
        None, "None: to messages, and to questions if there is one; true: to strings, too; false: not to questions."
    )
    chat_template_kwargs: dict[str, typing.Any] = key({}, "Variables of the template, as {enable_thinking = false}.")
    max_prompt_length: int | None = key(None, "Longer prompts are dropped and counted; None: an error.", minimum=1)


@dataclass(frozen=True)
class RewardsConfig(Section):
    """The reward functions of a run. A completion's reward is the weighted sum of their values that are not None."""

    section = "rewards"
    funcs: list[str] = key(
        [], 'Built-in (docs/writing-a-reward.md), `file.py:function`, `package.module:function`; "name(key=value)"'
    )
    weights: list[float] | None = key(None, "A weight for each function; None: all 1.0. TRL: reward_weights.")
    timeout: float = key(30.0, "Seconds that one call (a whole batch of completions) may take; not in TRL.", above=0)
    reward_errors: str = key(
        "raise",
        "If a function fails, `raise` ends the run with a checkpoint, `skip` gives no value and counts it; not TRL.",
        choices=("raise", "skip"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.weights is not None and len(self.weights) != len(self.funcs):
            raise ConfigError(
                f"rewards.weights must have one weight for each of the {len(self.funcs)} funcs, got {len(self.weights)}"
            )


@dataclass(frozen=True)
class EngineConfig(Section):
    """The inference engine, with vLLM's names."""

    section = "engine"
    max_num_seqs: int = key(256, "Most sequences in one step.", minimum=1)
    max_num_batched_tokens: int = key(8192, "Most tokens in one step; longer prompts are split.", minimum=1)
    gpu_memory_utilization: float = key(
        0.3, "Share of the GPU's memory for weights, activations and KV cache; `generate`: 0.9.", above=0, maximum=1
    )
    max_model_len: int | None = key(None, "Longest prompt + completion; None: max_position_embeddings.", minimum=2)
    enforce_eager: bool = key(False, "Never capture decode steps as CUDA graphs.")
    enable_prefix_caching: bool = key(True, "Reuse the KV blocks of equal prompt prefixes.")
    num_gpu_blocks_override: int | None = key(None, "KV blocks of 16 tokens; None: as many as fit.", minimum=1)


@dataclass(frozen=True)
class TrainConfig(Section):
    """What all trainers share: TRL's names, with the defaults of TRL and transformers' TrainingArguments."""

    section = "train"
    learning_rate: float = key(2e-5, "Highest learning rate of AdamW.", minimum=0)
    lr_scheduler_type: str = key(
        "linear",
        "After the warm-up: `linear` or `cosine` fall to 0, `constant`, also `constant_with_warmup`, stays.",
        choices=("constant", "constant_with_warmup", "linear", "cosine"),
    )
    warmup_steps: float = key(0.0, "Steps in which the rate rises from 0; below 1: a share of all steps.", minimum=0)
    weight_decay: float = key(0.0, "Decoupled weight decay; biases and norms do not decay.", minimum=0)
    adam_beta1: float = key(0.9, "Decay of AdamW's first moment.", minimum=0, below=1)
    adam_beta2: float = key(0.999, "Decay of AdamW's second moment.", minimum=0, below=1)
    adam_epsilon: float = key(1e-8, "Added to the root of the second moment.", above=0)
    max_grad_norm: float = key(1.0, "Largest global norm of the gradient, which is clipped to it; 0: none.", minimum=0)
    per_device_train_batch_size: int = key(8, "Sequences (or packs) in one forward and backward pass.", minimum=1)
    gradient_accumulation_steps: int = key(1, "Forward and backward passes in one optimizer step.", minimum=1)
    max_steps: int = key(-1, "Optimizer steps of the run; -1: as many as num_train_epochs make.", minimum=-1)
    num_train_epochs: float = key(3.0, "Passes over the data when max_steps is -1.", above=0)
    dtype: str | None = key(
        None,
        "Of weights and activations; 16-bit ones have a float32 master. None: the checkpoint's on a GPU, else float32.",
        choices=("float32", "bfloat16", "float16"),
    )
    gradient_checkpointing: bool = key(True, "Keep only the inputs of layers and recompute: less memory, more time.")
    shuffle_dataset: bool = key(True, "A new order of the rows every epoch, drawn from the seed; false: the file's.")
    logging_steps: int = key(10, "Steps between lines on the console; metrics.jsonl has every step.", minimum=1)
    save_steps: int = key(500, "Steps between two checkpoints.", minimum=1)
    save_total_limit: int | None = key(None, "Checkpoints kept, the newest; None: all.", minimum=1)
    eval_steps: int | None = key(None, "Steps between evaluations on `data.eval`; None: only at the end.", minimum=1)
    log_completions: bool = key(False, "Print completions on the console every logging_steps steps.")
    num_completions_to_print: int | None = key(None, "Completions printed each time; None: all.", minimum=1)

    def __post_init__(self):
        super().__post_init__()
        if self.max_steps == 0:
            raise ConfigError("train.max_steps must be -1 or at least 1, got 0")


@dataclass(frozen=True)
class SFTConfig(TrainConfig):
    """[train] of `rlnumba sft`."""

    max_length: int | None = key(1024, "Tokens of a sequence, cut if longer, and of a pack; None: no limit.", minimum=2)
    packing: bool = key(False, "Fill rows of max_length tokens with several sequences, which do not see one another.")
    packing_strategy: str = key(
        "bfd",
        "`bfd`: best fit, long sequences cut; `bfd_split`: their rest is packed, too; `wrapped`: one stream, cut.",
        choices=("bfd", "bfd_split", "wrapped"),
    )
    padding_free: bool = key(True, "Accepted for TRL's files: batches are always packed tokens without padding.")
    completion_only_loss: bool | None = key(None, "Train on the completion only; None: where there is a prompt.")
    assistant_only_loss: bool = key(False, "Train on the assistant's tokens only; needs rows of messages.")
    loss_type: str = key(
        "nll",
        "`nll` (or `chunked_nll`): mean over trained tokens; `dft`: weighted by probability (arXiv 2508.05629).",
        choices=("nll", "chunked_nll", "dft"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ConfigError("train.packing needs train.max_length, the size of a pack")


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
class GRPOConfig(PolicyLossConfig, TrainConfig):
    """[train] of `rlnumba grpo`."""

    learning_rate: float = key(1e-6, "Highest learning rate of AdamW.", minimum=0)
    num_generations: int = key(8, "Completions of each prompt, the group whose rewards are compared.", minimum=2)
    generation_batch_size: int | None = key(
        None, "Completions of one generation; None: per_device_train_batch_size x steps_per_generation.", minimum=2
    )
    steps_per_generation: int | None = key(None, "Passes per generation; None: gradient_accumulation_steps.", minimum=1)
    num_iterations: int = key(1, "Times that each generation is trained on (mu of DeepSeekMath).", minimum=1)
    temperature: float = key(1.0, "Divides the logits, in sampling and in training alike.", above=0)
    top_p: float = key(1.0, "Sample from the likeliest tokens that hold this share; 1 is off.", above=0, maximum=1)
    top_k: int = key(0, "Sample from the k likeliest tokens; 0 and -1 are off.", minimum=-1)
    min_p: float | None = key(None, "Smallest probability, as a share of the largest's.", minimum=0, maximum=1)
    repetition_penalty: float = key(1.0, "Above 1: tokens seen so far become less likely; 1 is off.", above=0)
    sync_ref_model: bool = key(False, "Move the reference model towards the policy now and then (arXiv 2404.09656).")
    ref_model_mixup_alpha: float = key(0.6, "Share of the policy in each such move.", minimum=0, maximum=1)
    ref_model_sync_steps: int = key(512, "Optimizer steps between two such moves.", minimum=1)
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
    mask_truncated_completions: bool = key(False, "Leave completions without an end token out of the loss (DAPO).")
    dynamic_sampling: bool = key(False, "Replace groups of equal rewards by those of further prompts (DAPO; not TRL).")
    max_gen_batches: int = key(10, "Most generations for one batch of dynamic_sampling; verl's DAPO: 10.", minimum=1)

    @property
    def rollout_steps(self):
        """Passes of per_device_train_batch_size completions that one generation feeds: int."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.per_device_train_batch_size
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def rollout_batch_size(self):
        """Completions of one generation: int."""
        return self.per_device_train_batch_size * self.rollout_steps

    @property
    def prompts_per_rollout(self):
        """Prompts of one generation, each with num_generations completions: int."""
        return self.rollout_batch_size // self.num_generations

    def __post_init__(self):
        super().__post_init__()
        size_key = "train.per_device_train_batch_size x steps_per_generation"
        if self.generation_batch_size is not None:
            size_key = "train.generation_batch_size"
            if self.steps_per_generation is not None:
                raise ConfigError("train.generation_batch_size and train.steps_per_generation cannot both be set")
            if self.generation_batch_size % self.per_device_train_batch_size:
                raise ConfigError(
                    f"train.generation_batch_size ({self.generation_batch_size}) must be divisible by "
                    f"train.per_device_train_batch_size ({self.per_device_train_batch_size})"
                )
        if self.rollout_batch_size % self.num_generations:
            raise ConfigError(
                f"{size_key} ({self.rollout_batch_size}) must be divisible by "
                f"train.num_generations ({self.num_generations})"
            )
        if self.sync_ref_model and not self.beta:
            raise ConfigError("train.sync_ref_model needs train.beta above 0: without it there is no reference model")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The keys above all sections, and the sections."""

    model: str = key(REQUIRED, "A Hugging Face folder, or a hub id.", nonempty=True)
    output_dir: str = key(REQUIRED, "Folder of the run: metrics, checkpoints, curves, the final model.", nonempty=True)
    seed: int = key(42, "Seed of everything random in the run.", minimum=0)
    gemm: str = key(
        "auto",
        "GEMM backend on a GPU: `native` (also `auto`, `numba`), with which rollout and training log-probs agree bit "
        "for bit, or `cublas`, with which they differ in their last bits.",
        choices=("auto", "native", "cublas", "numba"),
    )
    data: DataConfig
    train: TrainConfig = TrainConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class SFTRun(Run):
    """A file of `rlnumba sft`."""

    train: SFTConfig = SFTConfig()


@dataclass(frozen=True, kw_only=True)
class GRPORun(Run):
    """A file of `rlnumba grpo`."""

    rewards: RewardsConfig
    train: GRPOConfig = GRPOConfig()

    def __post_init__(self):
        if not self.rewards.funcs:
            raise ConfigError("rewards.funcs must name at least one reward function")


RUNS = {"sft": SFTRun, "grpo": GRPORun}


def _is_section(f):
    return isinstance(f.type, type) and issubclass(f.type, Section)


def sections_of(run_class):
    """{section name: dataclass}, with "" for the keys above all sections: dict."""
    return {"": run_class} | {f.name: f.type for f in fields(run_class) if _is_section(f)}


def keys_of(section_class):
    """{name: dataclass field} of the keys of one section: dict."""
    return {f.name: f for f in fields(section_class) if not _is_section(f)}


def split_optional(hint):
    """(the type without None, whether None is allowed)."""
    if isinstance(hint, types.UnionType):
        (inner,) = [a for a in typing.get_args(hint) if a is not type(None)]
        return inner, True
    return hint, False
