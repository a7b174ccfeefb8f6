"""The section [lora] of a run: low-rank adapters are trained instead of the model's weights."""

from dataclasses import dataclass

from rlnumba.config.keys import Section, key
from rlnumba.errors import ConfigError

ALL_LINEAR = "all-linear"
# Adapters that an engine holds at a time while they come and go, if nothing else is said.
MAX_LORAS = 16


@dataclass(frozen=True)
class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685), with PEFT's names. A run that has this section trains them alone."""

    section = "lora"
    r: int = key(16, "Rank: rows of A, columns of B. PEFT: 8.", minimum=1)
    lora_alpha: int = key(32, "The update is scaled by lora_alpha / r. PEFT: 8.", minimum=1)
    lora_dropout: float = key(0.0, "Dropout of the adapters' inputs in training.", minimum=0, below=1)
    target_modules: list[str] = key(
        [ALL_LINEAR], 'The linear layers that get one, such as ["q_proj", "v_proj"]; "all-linear": all.', single=True
    )
    use_rslora: bool = key(False, "Scale by lora_alpha / sqrt(r) instead (arXiv 2312.03732).")
    init: str | None = key(None, "PEFT adapter folder to go on from; r and the other keys are then its own.")

    def __post_init__(self):
        super().__post_init__()
        if not self.target_modules:
            raise ConfigError("lora.target_modules must not be empty")

    @property
    def scaling(self):
        """The factor by which x A^T B^T is multiplied: float."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)
