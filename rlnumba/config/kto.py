"""The run file of `rlnumba kto`."""

from dataclasses import dataclass

from rlnumba.config.dpo import PreferenceConfig
from rlnumba.config.keys import Section, key
from rlnumba.config.schema import Run
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class KTOLossConfig(Section):
    """The options of the losses of KTO (kernels/rl/kto_loss.py)."""

    section = "train"
    loss_type: str = key(
        "kto",
        "`kto` compares with the batch's KL divergence from the reference; `apo_zero_unpaired` with 0.",
        choices=("kto", "apo_zero_unpaired"),
    )
    beta: float = key(0.1, "How strongly the policy is kept near the reference.", above=0)
    desirable_weight: float = key(1.0, "Weight of the losses of desirable completions.", minimum=0)
    undesirable_weight: float = key(1.0, "Weight of the losses of the others.", minimum=0)


@dataclass(frozen=True)
class KTOConfig(KTOLossConfig, PreferenceConfig):
    """[train] of `rlnumba kto`."""

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type == "kto" and self.per_device_train_batch_size < 2:
            raise ConfigError(
                "train.per_device_train_batch_size must be at least 2 with loss_type kto, whose KL divergence is of "
                f"completions with the prompts of others, got {self.per_device_train_batch_size}"
            )
        if self.loss_type == "kto" and self.precompute_ref_log_probs and self.shuffle_dataset:
            raise ConfigError(
                "train.precompute_ref_log_probs with loss_type kto needs train.shuffle_dataset = false, as its KL "
                "divergence depends on which rows share a batch"
            )


@dataclass(frozen=True, kw_only=True)
class KTORun(Run):
    """A file of `rlnumba kto`."""

    trainer = "kto"
    purpose = "Kahneman-Tversky Optimization: train on completions that are labelled desirable or not."
    has_completions = True

    train: KTOConfig = KTOConfig()
