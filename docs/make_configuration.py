"""Writes docs/configuration.md from the dataclasses in rlnumba/config.py."""

import dataclasses
import typing
from pathlib import Path

from rlnumba.config import (
    ALIASES,
    DataConfig,
    EngineConfig,
    GRPOConfig,
    RewardsConfig,
    Run,
    SFTConfig,
    TrainConfig,
    keys_of,
    split_optional,
    toml_value,
)

PAGE = Path(__file__).with_name("configuration.md")

HEADER = """# Configuration reference

Written by `python docs/make_configuration.py` from the dataclasses in `rlnumba/config.py`; do not edit.

A run is a TOML file. Every key can be overridden on the command line as `--section.key value` (`--seed 7` for a key
above all sections); dashes and underscores are the same, `None` unsets a key, lists are TOML arrays or separated by
commas. Several `--config` files are merged key by key, later ones win. Unknown keys are errors. `--dry-run` prints the
resolved configuration, and every run writes it to `output_dir/config.toml`.
"""

FOOTER = """
## Other spellings

Keys of TRL, verl, prime-rl and RL.cu that are taken as the key on the right.

| written | means |
| --- | --- |
{aliases}

## How columns are detected

The first row of a file decides for all of it, by the first line of this table that its columns match. An error lists
the columns seen.

| columns | for |
| --- | --- |
| `messages`, optionally `tools` | SFT on a conversation |
| `prompt`, `completion` (strings or message lists) | SFT on the completion |
| `prompt`, `reward_model` (verl) | GRPO; rewards get `reward_model.ground_truth` as `ground_truth` |
| `prompt`, with or without an answer column (`solution`, `answer`, `ground_truth`, `final_answer`) | GRPO |
| `question`, `answer` with `#### n` in it (GSM8K) | GRPO, rewards get n as `solution`; SFT on the answer |
| `question`, alone or with an answer column (DeepMath) | GRPO |
| `text` | SFT on the whole text |

`data.prompt_template` makes a prompt of a question. All other columns but `completion` are passed to the reward
functions by name.
"""


def _shown_type(hint):
    inner, optional = split_optional(hint)
    name = {list[str]: "list of str", list[float]: "list of float", dict[str, typing.Any]: "table"}.get(inner)
    return (name or inner.__name__) + (" or None" if optional else "")


def _shown_default(f):
    if f.default_factory is not dataclasses.MISSING:
        return f"`{toml_value(f.default_factory())}`"
    if f.default is dataclasses.MISSING:
        return "required"
    return "None" if f.default is None else f"`{toml_value(f.default)}`"


def _shown_limits(metadata):
    if "choices" in metadata:
        return " One of " + ", ".join(f"`{c}`" for c in metadata["choices"]) + "."
    words = {"above": "above", "minimum": "at least", "below": "below", "maximum": "at most"}
    limits = [f"{word} {metadata[name]}" for name, word in words.items() if name in metadata]
    return f" {' and '.join(limits).capitalize()}." if limits else ""


def reference():
    """The text of docs/configuration.md: str."""
    parts = [HEADER]
    blocks = [("Above all sections", Run), ("[data]", DataConfig), ("[rewards]: grpo", RewardsConfig)]
    blocks += [("[train]: all trainers", TrainConfig), ("[train]: sft", SFTConfig), ("[train]: grpo", GRPOConfig)]
    blocks += [("[engine]", EngineConfig)]
    for title, section_class in blocks:
        parts += [f"\n## {title}\n", f"{section_class.__doc__}\n", "| key | type | default | meaning |"]
        parts.append("| --- | --- | --- | --- |")
        hints = typing.get_type_hints(section_class)
        inherited = keys_of(TrainConfig) if section_class in (SFTConfig, GRPOConfig) else {}
        for f in dataclasses.fields(section_class):
            if f.metadata.get("section") or (f.name in inherited and f.name not in section_class.__annotations__):
                continue
            doc = (f.metadata["doc"] + _shown_limits(f.metadata)).replace("|", "\\|")
            parts.append(f"| `{f.name}` | {_shown_type(hints[f.name])} | {_shown_default(f)} | {doc} |")
    named = {("train", "batch_size"): ("train", "generation_batch_size` (grpo), `train.per_device_train_batch_size")}
    rows = [
        f"| `{'.'.join(filter(None, written))}` | `{'.'.join(filter(None, ours))}` |"
        for written, ours in {**ALIASES, **named}.items()
    ]
    return "\n".join(parts) + "\n" + FOOTER.format(aliases="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(reference())
