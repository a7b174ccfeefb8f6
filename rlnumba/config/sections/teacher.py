"""The section [teacher] of a run: models whose log-probs of the policy's own tokens the policy learns from."""

import typing
from dataclasses import dataclass

from rlnumba.config.keys import KeyCondition, Section, key
from rlnumba.errors import ConfigError, shown

TEACHES = KeyCondition(("teacher.model", "teacher.models"), "a folder", bool)


@dataclass(frozen=True)
class TeacherConfig(Section):
    """On-policy distillation: a token's advantage has log teacher - log policy in it."""

    section = "teacher"
    model: str | None = key(
        None,
        "A folder or hub id of a model with the tokenizer of `model`; it is not trained. None: no teacher; `distill`: "
        "`model` itself, as it was before training or as train.sync_ref_model moves it.",
        nonempty=True,
    )
    models: dict[str, typing.Any] = key({}, "Several instead, a table: {name = folder or hub id}.")
    column: str = key(
        "teacher", "Column that names the teacher of each row.", nonempty=True, needs="teacher.models"
    )  # fmt: skip
    teacher_tau: float = key(
        1.0,
        "Weight of log teacher - log policy in the advantage of a token; prime-rl's name.",
        minimum=0,
        needs=TEACHES,
        of="learns_advantages",
    )
    adv_tau: float = key(
        0.0,
        "Weight of the advantage that follows from the rewards, which is added; 0: rewards are only measured, and may "
        "be left out. prime-rl's name.",
        minimum=0,
        needs=TEACHES,
        of="learns_advantages",
    )
    prompt_column: str | None = key(
        None,
        "Column with what the teacher sees instead of the prompt, a string or messages, such as the prompt with a "
        "demonstration or feedback (SDFT, SDPO).",
        nonempty=True,
        of="compares_heads",
    )

    @property
    def folders(self):
        """{name: folder or hub id} of all teachers, the name None where there is one: dict, {} without."""
        return self.models or ({} if self.model is None else {None: self.model})

    @property
    def is_alone(self):
        """Whether advantages are the teacher's alone: bool."""
        return bool(self.folders) and self.adv_tau == 0

    def __post_init__(self):
        super().__post_init__()
        if self.model is not None and self.models:
            raise ConfigError("teacher.model and teacher.models cannot both be set")
        for name, folder in self.models.items():
            if not isinstance(folder, str) or not folder:
                raise ConfigError(f"teacher.models: {name} must be a folder or a hub id, got {shown(folder)}")
