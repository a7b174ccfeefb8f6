"""The run file of `rlnumba sft`."""

from dataclasses import dataclass

from rlnumba.config.keys import key
from rlnumba.config.schema import DeployConfig, Run, TrainConfig
from rlnumba.errors import ConfigError


@dataclass(frozen=True)
class SFTConfig(TrainConfig):
    """[train] of `rlnumba sft`."""

    global_batch_size: int | None = key(
        None,
        "Rows of an optimizer step on all GPUs together, instead of gradient_accumulation_steps: the run then ends in "
        "the same weights on any number of them (deploy.num_train_gpus). Not TRL.",
        minimum=1,
    )
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

    @property
    def backward_passes(self):
        """Backward passes in an optimizer step, on one GPU: int."""
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        return self.global_batch_size // self.per_device_train_batch_size

    def __post_init__(self):
        size, steps = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if self.global_batch_size is not None:
            if steps != 1:
                raise ConfigError(
                    f"train.global_batch_size ({self.global_batch_size}) takes the place of "
                    f"train.gradient_accumulation_steps, which must be 1, got {steps}"
                )
            if self.global_batch_size % size:
                raise ConfigError(
                    f"train.global_batch_size ({self.global_batch_size}) must be a multiple of "
                    f"train.per_device_train_batch_size ({size})"
                )
        super().__post_init__()
        if self.packing and self.max_length is None:
            raise ConfigError("train.packing needs train.max_length, the size of a pack")


@dataclass(frozen=True, kw_only=True)
class SFTRun(Run):
    """A file of `rlnumba sft`."""

    train: SFTConfig = SFTConfig()
    deploy: DeployConfig = DeployConfig()

    @property
    def num_ranks(self):
        """Processes that train together, each with a GPU: int."""
        return self.deploy.num_train_gpus

    def __post_init__(self):
        if self.train.optimizer_in_backward and self.num_ranks > 1:
            raise ConfigError(
                f"train.optimizer_in_backward is for one GPU, and deploy.num_train_gpus is {self.num_ranks}"
            )
