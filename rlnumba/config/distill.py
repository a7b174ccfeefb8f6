"""The run file of `rlnumba distill`."""

from dataclasses import dataclass

from rlnumba.config.keys import KeyCondition, key
from rlnumba.config.rollout import AheadRun, GroupConfig
from rlnumba.config.sections.teacher import TeacherConfig
from rlnumba.errors import ConfigError, MissingKey

GIVES = KeyCondition(("train.lmbda",), "a number below 1", lambda share: share < 1)


@dataclass(frozen=True)
class DistillConfig(GroupConfig):
    """[train] of `rlnumba distill`, with the defaults of TRL 1.16's DistillationConfig."""

    # Not a key: the loss is a mean over tokens.
    loss_type = "dapo"

    num_generations: int = key(1, "Completions of each prompt.", minimum=1)
    beta: float = key(
        1.0,
        "The divergence: 0 is the forward KL, of the teacher's predictions from the student's; 1 the reverse KL; "
        "between them the generalised Jensen-Shannon divergence. TRL's GKD: 0.5.",
        minimum=0,
        maximum=1,
    )
    loss_top_k: int = key(
        0,
        "The divergence over so many of the likeliest tokens (loss_top_k_of); 0: over all.",
        minimum=0,
    )
    loss_top_k_of: str = key(
        "auto",
        "Whose likeliest tokens: the teacher's, or the model's (`student`). `auto`: the teacher's where beta is 0, as "
        "in TRL. A server lists the teacher's.",
        choices=("auto", "teacher", "student"),
        needs="train.loss_top_k",
    )
    loss_add_tail: bool = key(
        True,
        "One more token stands for all others; false: the probabilities of those of loss_top_k are made to sum to 1.",
        needs="train.loss_top_k",
    )
    lmbda: float = key(
        1.0,
        "Share of the prompts whose completion the model draws; the others have that of their row, drawn anew for each "
        "generation. Below 1, rows need a completion, but for seq_kd. TRL's GKD: 0.5.",
        minimum=0,
        maximum=1,
    )
    seq_kd: bool = key(
        False,
        "With lmbda below 1: the teacher draws the other completions, anew for each generation, in place of the rows' "
        "(sequence-level distillation, arXiv 1606.07947); TRL's GKD.",
        needs=GIVES,
    )
    max_completion_length: int = key(512, "Most tokens of a completion.", minimum=1)

    @property
    def generation(self):
        return super().generation._replace(drawn_share=self.lmbda)

    @property
    def divergence_form(self):
        """DivergenceForm's fields but for the temperature: (beta, top_k, add_tail, of_teacher)."""
        of_teacher = self.beta == 0 if self.loss_top_k_of == "auto" else self.loss_top_k_of == "teacher"
        return self.beta, self.loss_top_k, self.loss_add_tail, of_teacher

    @property
    def reads_reference(self):
        """Whether the loss reads log-probs of a reference model: a teacher's are computed in each step."""
        return False


@dataclass(frozen=True, kw_only=True)
class DistillRun(AheadRun):
    """A file of `rlnumba distill`."""

    trainer = "distill"
    purpose = "On-policy distillation: learn a teacher's predictions on the model's own completions."
    compares_heads, has_completions, needs_rewards = True, True, False
    weighted_by = None

    train: DistillConfig = DistillConfig()
    teacher: TeacherConfig = TeacherConfig()

    @property
    def teacher_draws(self):
        return self.train.seq_kd and self.train.lmbda < 1

    @property
    def given_limit(self):
        return self.train.max_completion_length if self.train.lmbda < 1 and not self.train.seq_kd else None

    def _check_served_teacher(self):
        super()._check_served_teacher()
        if self.train.seq_kd:
            raise ConfigError("teacher.url: a served teacher lists tokens and draws none: leave out train.seq_kd")
        beta, top_k, _, of_teacher = self.train.divergence_form
        if not top_k:
            raise ConfigError(
                "teacher.url: a server lists its likeliest tokens, never all: set train.loss_top_k, up to the server's "
                "max_logprobs, or leave the URL out"
            )
        if not of_teacher:
            raise ConfigError(
                "teacher.url: a server lists its own likeliest tokens, not the student's: train.loss_top_k_of must be "
                f"'teacher' where train.beta is above 0 ({beta:g})"
            )

    def __post_init__(self):
        super().__post_init__()
        if self.given_limit is not None and self.train.num_generations > 1:
            raise ConfigError(
                f"train.lmbda ({self.train.lmbda}) below 1 takes the completion of a row, which has one: "
                f"train.num_generations must be 1, got {self.train.num_generations}"
            )
        if self.train.lmbda < 1 and (self.has_episodes or self.data.train is None):
            raise ConfigError("train.lmbda below 1 takes completions of rows: not with tools, an environment or tasks")
        if self.teacher_draws:
            self._check_seq_kd()
        if not self.teacher.folders and self.teacher.prompt_column is None:
            raise MissingKey("teacher.model", ", or teacher.prompt_column: what the model itself sees as the teacher")
        if self.teacher.prompt_column is not None and (self.has_episodes or self.rollout.func is not None):
            raise ConfigError("teacher.prompt_column is for completions of one turn: not with tools or an environment")
        if self.train.reference_move is not None and self.teacher.folders:
            raise ConfigError("train.sync_ref_model moves the model's own copy, and teacher.model is another one")
        if self.train.sampling_mask_replay or self.train.structured_outputs:
            name = "sampling_mask_replay" if self.train.sampling_mask_replay else "structured_outputs"
            raise ConfigError(f"train.{name}: the divergence of rlnumba distill is over the whole vocabulary")
        if self.train.log_token_values:
            raise ConfigError("train.log_token_values has importance ratios, of which rlnumba distill has none")

    def _check_seq_kd(self):
        """Raise ConfigError where the teacher's engine cannot have its memory in turn with the model's own."""
        if self.engine.enable_sleep_mode is False:
            raise ConfigError("train.seq_kd needs engine.enable_sleep_mode: the teacher's engine has that memory")
