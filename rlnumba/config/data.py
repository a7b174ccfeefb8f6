"""The section [data]: files of rows, and how a row becomes a prompt."""

import re
import typing
from dataclasses import dataclass
from pathlib import Path

from rlnumba.config.keys import KeyCondition, Section, key
from rlnumba.errors import ConfigError

# Begins the name of a dataset of reasoning-gym in data.train and data.eval.
GYM = "gym:"
# Begins the name of a taskset of verifiers there.
VERIFIERS = "verifiers:"
# The ends of names of files of rows, and what an id of a dataset of the hub looks like.
ROW_FILES = (".jsonl", ".json", ".parquet", ".csv")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# Arguments of transformers' apply_chat_template that are no variables of a template, and cannot be chosen.
RESERVED_VARIABLES = (
    *("messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
)


def is_of_hub(path):
    """Whether a path of rows names a dataset of the hub, and no file: one that has the name goes before."""
    path = Path(path)
    is_id = HUB_ID.fullmatch(str(path)) and path.suffix.lower() not in ROW_FILES
    return bool(is_id) and not path.exists() and not path.parent.exists()


def paths_of_rows(value):
    """The paths in a value of data.train or data.eval: one, or several with commas between them; list of str."""
    return [value] if Path(value).exists() else [part.strip() for part in value.split(",") if part.strip()]


def _any_path(is_one):
    """The is_met of a KeyCondition on data.train or data.eval: is_one(path) for one of its paths."""
    return lambda value: value is not None and any(map(is_one, paths_of_rows(value)))


BOTH, EVAL = ("data.train", "data.eval"), ("data.eval",)
OF_HUB, OF_GYM = "a dataset of the hub", "a dataset of reasoning-gym"
OF_VERIFIERS, IS_OF_VERIFIERS = "a taskset of verifiers", _any_path(lambda path: path.startswith(VERIFIERS))
IS_OF_HUB, IS_OF_GYM = _any_path(is_of_hub), _any_path(lambda path: path.startswith(GYM))


@dataclass(frozen=True)
class DataConfig(Section):
    """The files of rows, and how a row becomes a prompt."""

    section = "data"
    train: str | None = key(
        None,
        "Training rows: a .jsonl, .json, .parquet or .csv file, the id of a dataset of the hub, `gym:NAME` of "
        "reasoning-gym, or `verifiers:NAME` of verifiers; several with commas between them. The columns are in "
        "docs/data.md. It must be set unless `environment.factory` and `train.max_steps` are: the environment makes "
        "the prompts.",
    )
    eval: str | None = key(None, "Held-out rows of the same columns, evaluated every `train.eval_steps`.")
    train_weights: list[float] | None = key(
        None,
        "For each file of `train`, how often an epoch has its rows: 2.0 twice, 0.5 every other one; None: once.",
        needs="data.train",
    )
    name: str | None = key(
        None, "Configuration of a dataset of the hub, its folder there; None: the default one.",
        needs=KeyCondition(BOTH, OF_HUB, IS_OF_HUB),
    )  # fmt: skip
    split: str = key("train", "Its split for `train`.", needs=KeyCondition(("data.train",), OF_HUB, IS_OF_HUB))
    eval_split: str = key("test", "Its split for `eval`.", needs=KeyCondition(EVAL, OF_HUB, IS_OF_HUB))
    gym: dict[str, typing.Any] = key(
        {},
        "Arguments of `gym:NAME`: size (500), seed (0), and its own; a table `[data.gym]`, `[data.gym.NAME]` for one "
        "of several datasets. docs/gym.md.",
        of="generates",
        needs=KeyCondition(BOTH, OF_GYM, IS_OF_GYM),
    )
    eval_gym: dict[str, typing.Any] = key(
        {}, "Those of `eval` that differ, `[data.eval_gym]`; its seed: the first that training has not (seed + size).",
        of="generates", needs=KeyCondition(EVAL, OF_GYM, IS_OF_GYM),
    )  # fmt: skip
    verifiers: dict[str, typing.Any] = key(
        {},
        "Of `verifiers:NAME`: the keys of its environment, and `select` and `client`; a table `[data.verifiers]`. "
        "docs/agents.md.",
        of="generates",
        needs=KeyCondition(BOTH, OF_VERIFIERS, IS_OF_VERIFIERS),
    )
    eval_verifiers: dict[str, typing.Any] = key(
        {}, "Those of `eval` that differ, `[data.eval_verifiers]`.",
        of="generates", needs=KeyCondition(EVAL, OF_VERIFIERS, IS_OF_VERIFIERS),
    )  # fmt: skip
    prompt_column: str | None = key(None, "Column of the prompt; None: `prompt`, else `question`.")
    completion_column: str | None = key(None, "Column of the completion; None: `completion`.", of="has_completions")
    answer_column: str | None = key(
        None,
        "Column that rewards get as `solution`; None: the first answer column that a reward finds.",
        of="generates",
    )
    system_prompt: str | None = key(None, "System message put before a chat prompt that has none.")
    prompt_template: str | None = key(
        None,
        "Prompt made of a question, or where completions are sampled of any string: {question} and other columns in "
        "braces are replaced. None: the question, then a line that asks for `####` (GSM8K) or a box around the answer.",
        of="has_questions",
    )
    apply_chat_template: bool | None = key(
        None, "None: to messages, and to questions if there is one; true: to strings, too; false: not to questions."
    )
    chat_template_kwargs: dict[str, typing.Any] = key(
        {}, "Variables of the template, as {enable_thinking = false}; those of a row's column of this name go first."
    )
    curriculum_column: str | None = key(
        None,
        "Prompts are taken by ascending value of this column, a number, in every epoch; among equal ones as "
        "train.shuffle_dataset says.",
        of="generates",
    )
    max_prompt_length: int | None = key(
        None, "Longer prompts are dropped and counted; None: an error.", minimum=1, of="generates"
    )

    def __post_init__(self):
        super().__post_init__()
        for name in self.chat_template_kwargs:
            if name in RESERVED_VARIABLES:
                raise ConfigError(f"data.chat_template_kwargs cannot set {name!r}, which is no template's variable")

    @property
    def has_scorers(self):
        """Whether all training rows are problems of reasoning-gym, which have scorers of their own."""
        paths = paths_of_rows(self.train) if self.train else []
        return bool(paths) and all(path.startswith(GYM) for path in paths)

    @property
    def has_tasks(self):
        """Whether training rows or held-out ones are tasks of verifiers, which its harness plays."""
        return any(IS_OF_VERIFIERS(value) for value in (self.train, self.eval))
