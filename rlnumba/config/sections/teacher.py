"""The section [teacher] of a run: models whose log-probs of the policy's own tokens the policy learns from."""

import typing
from dataclasses import dataclass

from rlnumba.config.keys import KeyCondition, Section, check_url, key
from rlnumba.errors import ConfigError, shown

SERVED = KeyCondition(("teacher.url", "teacher.urls"), "a URL", bool)
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
    url: str | None = key(
        None,
        "The server that has teacher.model, `http://127.0.0.1:8000/v1`, this package's or vLLM's, on GPUs of its own: "
        "it scores the tokens, and no weights of the teacher are loaded here. `distill`: it lists its train.loss_top_k "
        "likeliest tokens.",
        nonempty=True,
        needs="teacher.model",
    )
    urls: dict[str, typing.Any] = key(
        {},
        "Of teacher.models, those that servers have: {name = URL}.",
        needs="teacher.models",
    )
    timeout_s: float = key(
        600.0,
        "Seconds that a server may be away, or take for one sequence, before the run ends.",
        minimum=1,
        needs=SERVED,
    )
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
    def served(self):
        """{name: URL} of the teachers that servers have, the name None where there is one: dict."""
        return self.urls or ({} if self.url is None else {None: self.url})

    @property
    def loaded(self):
        """{name: folder or hub id} of the teachers whose weights are loaded here: dict."""
        return {name: folder for name, folder in self.folders.items() if name not in self.served}

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
        if self.url is not None and self.model is None:
            raise ConfigError("teacher.url needs teacher.model, whose tokenizer is compared")
        for name, url in self.served.items():
            where = "teacher.url" if name is None else f"teacher.urls: {name}"
            if name is not None and name not in self.models:
                raise ConfigError(f"{where} is none of teacher.models ({', '.join(self.models)})")
            check_url(where, url)
