"""The section [rewards] of a run, and the judges that it may name."""

import dataclasses
import math
import typing
from dataclasses import dataclass

from rlnumba.config.keys import Section, check_url, key
from rlnumba.errors import ConfigError, shown

# What a judge is asked for: a number for each completion, the better one of two, a number for each of a group.
FORMS = ("score", "pairwise", "group")
# none: the answer ends with a line; openai: response_format; vllm: structured_outputs, without whitespace, which also
# this package's server takes.
FORCED = ("none", "openai", "vllm")


@dataclass(frozen=True)
class JudgeConfig:
    """A served model that judges completions. Raises ConfigError for a value that is none.

    url: of an API as OpenAI's, up to /v1. model: its id there, "" for a server of one model. rubric: what a good
    completion is. scale: the lowest and the highest number, which become 0 and 1. form: one of FORMS. opponents: of a
    completion in pairs, 0 for all others of its group. structured_outputs: by which key the server is asked to
    force the form of the answer, one of FORCED. api_key_env: the environment variable with the key. timeout_s: of a
    request; retries: after a failure. concurrency: requests at a time. cache: answers that are kept.
    prompt_price, completion_price: of a million tokens.
    """

    name: str
    url: str
    rubric: str
    model: str = ""
    scale: tuple = (1, 10)
    form: str = "score"
    opponents: int = 0
    structured_outputs: str = "none"
    temperature: float = 0.0
    max_tokens: int = 512
    api_key_env: str = ""
    timeout_s: float = 30.0
    retries: int = 2
    concurrency: int = 16
    cache: int = 4096
    prompt_price: float = 0.0
    completion_price: float = 0.0

    @classmethod
    def of(cls, name, values):
        """The JudgeConfig of a table of rewards.judges."""
        where = f"rewards.judges.{name}"
        if not isinstance(values, dict):
            raise ConfigError(f"{where} must be a table, got {shown(values)}")
        fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "name"}
        for each in values:
            if each not in fields:
                raise ConfigError(f"{where}.{each} is no key of a judge; its keys are {', '.join(fields)}")
        for each, field in fields.items():
            if field.default is dataclasses.MISSING and not values.get(each):
                raise ConfigError(f"{where}.{each} must be set")
        return cls(name, **values)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self._check(field.name, getattr(self, field.name), field.type)
        low_high = self.scale
        is_scale = isinstance(low_high, list | tuple) and len(low_high) == 2 and all(map(_is_integer, low_high))
        if not is_scale or low_high[0] >= low_high[1]:
            raise ConfigError(f"{self._key('scale')} must be two integers, the lowest first, got {shown(low_high)}")
        object.__setattr__(self, "scale", tuple(low_high))
        for name, choices in (("form", FORMS), ("structured_outputs", FORCED)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{self._key(name)} must be one of {', '.join(choices)}, got {value!r}")
        check_url(self._key("url"), self.url)

    def _check(self, name, value, kind):
        if kind is str and not isinstance(value, str):
            raise ConfigError(f"{self._key(name)} must be a string, got {shown(value)}")
        least = {"max_tokens": 1, "concurrency": 1}.get(name, 0)
        if kind is int and not (_is_integer(value) and value >= least):
            raise ConfigError(f"{self._key(name)} must be an integer from {least}, got {shown(value)}")
        if kind is float:
            is_number = _is_integer(value) or isinstance(value, float)
            if not is_number or not math.isfinite(value) or value < 0 or (name == "timeout_s" and value == 0):
                raise ConfigError(f"{self._key(name)} must be a number above 0, got {shown(value)}")

    def _key(self, name):
        return f"rewards.judges.{self.name}.{name}"


def _is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class RewardsConfig(Section):
    """The reward functions of a run. A completion's reward is the weighted sum of their values that are not None."""

    section = "rewards"
    funcs: list[str] = key(
        [],
        'Built-in (docs/writing-a-reward.md), `file.py:function`, `package.module:function`; "name(key=value)"; the '
        "folder of a reward model (docs/reward.md); `judge:NAME` of rewards.judges.",
    )
    weights: list[float] | None = key(None, "A weight for each function; None: all 1.0. TRL: reward_weights.")
    timeout: float = key(
        30.0, "Seconds for one completion: a call with a group of n may take n times as long; not TRL.", above=0
    )
    reward_errors: str = key(
        "raise",
        "If a function fails, `raise` ends the run with a checkpoint, `skip` counts the completion, without a value.",
        choices=("raise", "skip"),
    )

    judges: dict[str, typing.Any] = key(
        {},
        "Served models whose verdict is a reward, a table `[rewards.judges.NAME]` for each "
        "(docs/writing-a-reward.md#a-model-as-the-judge).",
    )

    def __post_init__(self):
        super().__post_init__()
        for name, values in self.judges.items():
            JudgeConfig.of(name, values)
        for each in self.funcs:
            name = each.strip().removeprefix("judge:")
            if each.strip().startswith("judge:") and name not in self.judges:
                known = ", ".join(self.judges) or "none"
                raise ConfigError(f"rewards.funcs: {each} needs the table [rewards.judges.{name}]; judges are {known}")
        if self.weights is not None and len(self.weights) != len(self.funcs):
            raise ConfigError(
                f"rewards.weights must have one weight for each of the {len(self.funcs)} funcs, got {len(self.weights)}"
            )
