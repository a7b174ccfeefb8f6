"""The run file of `rlnumba sft`."""

from dataclasses import dataclass

from rlnumba.config.keys import key
from rlnumba.config.schema import Run, TrainConfig
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class RouterLossConfig(TrainConfig):
    """[train] of the trainers that add the loss of a mixture's routers to their own."""

    router_aux_loss_coef: float | None = key(
        None,
        "Mixtures of experts: the factor of the loss that balances their load (TRL); None: config.json's, 0: no such "
        "loss.",
        minimum=0,
    )


@dataclass(frozen=True)
class SFTConfig(RouterLossConfig):
    """[train] of `rlnumba sft`."""

    max_length: int | None = key(1024, "Tokens of a sequence, cut if longer, and of a pack; None: no limit.", minimum=2)
    packing: bool = key(False, "Fill rows of max_length tokens with several sequences, which do not see one another.")
    packing_strategy: str = key(
        "bfd",
        "`bfd`: best fit, long sequences cut; `bfd_split`: their rest is packed, too; `wrapped`: one stream, cut.",
        choices=("bfd", "bfd_split", "wrapped"),
        needs="train.packing",
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


@dataclass(frozen=True, kw_only=True)
class SFTRun(Run):
    """A file of `rlnumba sft`."""

    trainer = "sft"
    purpose = "Supervised fine-tuning: train on prompts with their completions, conversations or text."
    has_questions = has_completions = True

    train: SFTConfig = SFTConfig()
