"""Writes docs/configuration.md from the dataclasses in rlnumba/config."""

import dataclasses
import typing
from pathlib import Path

from rlnumba.config import (
    DataConfig,
    DPOConfig,
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    KTOConfig,
    LoraConfig,
    RewardConfig,
    RewardsConfig,
    Run,
    SFTConfig,
    TrainConfig,
)
from rlnumba.config.dpo import PreferenceConfig
from rlnumba.config.keys import LIMITS, keys_of, split_optional
from rlnumba.config.reading import ALIASES
from rlnumba.config.writing import toml_value

PAGE = Path(__file__).with_name("configuration.md")

HEADER = """# Configuration reference

Which keys does the TOML file of a run have, with which types, defaults and meanings, and which metrics
does a run write? This page is written by `python docs/make_configuration.py` from the dataclasses in
`rlnumba/config`; do not edit it.

A run is a TOML file. Every key can be overridden on the command line as `--section.key value` (`--seed 7` for a key
above all sections); dashes and underscores are the same, `None` unsets a key, lists are TOML arrays or separated by
commas. Several `--config` files are merged key by key, with later ones taking precedence. Unknown keys are errors.
`--dry-run` prints the resolved configuration, and every run writes it to `output_dir/config.toml`.
"""

FOOTER = """
## Other spellings

Keys of TRL, verl, prime-rl and RL.cu that are accepted as the key on the right.

| written | means |
| --- | --- |
{aliases}

## How columns are detected

The columns of a file's first row are matched against this table from top to bottom; the result holds for the whole
file. An error lists the columns found.

| columns | for |
| --- | --- |
| `messages`, optionally `tools` | SFT on a conversation |
| `prompt`, `completion` (strings or message lists) | SFT on the completion |
| `prompt`, `reward_model` (verl) | GRPO; rewards get `reward_model.ground_truth` as `ground_truth` |
| `prompt`, with or without an answer column (`solution`, `answer`, `ground_truth`, `final_answer`) | GRPO |
| `question`, `answer` with `#### n` in it (GSM8K) | GRPO, rewards get n as `solution`; SFT on the answer |
| `question`, alone or with an answer column (DeepMath) | GRPO |
| `text` | SFT on the whole text |
| `prompt`, `chosen`, `rejected` (strings or message lists), optionally `tools` | DPO; KTO on each side alone |
| `chosen`, `rejected` (both strings or both message lists) | the same; their common beginning is the prompt |
| `prompt`, `completion` (strings or message lists), `label` (true or false), optionally `tools` | KTO |
| `chosen`, `rejected`, optionally `prompt` and `margin` (strings or message lists) | reward |

`data.prompt_template` makes a prompt of a question. All other columns but `completion` are passed to the reward
functions by name.

## What a run writes

In `output_dir`: `config.toml`, the resolved configuration; `metrics.jsonl`, a line for each optimizer step;
`completions.jsonl` (GRPO), a line for each completion; `curves.png`; `checkpoints/step-N/` and, at the end, `final/`,
both Hugging Face folders. TensorBoard files are written too where tensorboardX is installed. The metrics have TRL's
names:

| metric | meaning |
| --- | --- |
| `loss`, `grad_norm`, `learning_rate` | of the step; the norm is that before clipping |
| `num_tokens`, `epoch` | tokens so far (GRPO: of prompts and completions), and passes over the data |
| `entropy` | mean entropy of the model's prediction of a trained token, nats |
| `entropy_coef`, `policy_loss` | GRPO with an entropy bonus: its coefficient, and the loss without it |
| `eval_...` | the same on `data.eval`; GRPO also `eval_avg@n` and `eval_pass@k` (docs/running.md) |
| `mean_token_accuracy` | SFT, DPO, KTO: share of the trained tokens (but rejected ones) that were the argmax |
| `rewards/chosen`, `rewards/rejected` | DPO, KTO: mean of `beta` x (log-prob less the reference's) of a completion |
| `rewards/margins`, `rewards/accuracies` | the former less the latter; DPO: share of the pairs where it is above 0 |
| `logps/chosen`, `logps/rejected` | DPO, KTO: mean log-prob of a completion, nats |
| `logits/chosen`, `logits/rejected` | DPO, KTO: mean over positions and vocabulary of the logits |
| `reward`, `reward_std`, `rewards/NAME/mean`, `rewards/NAME/std` | weighted sum of the functions, and each function |
| `difficulty/easy`, `/normal`, `/hard` | share of the prompts in each pool, with difficulty_weights |
| `frac_reward_zero_std` | share of the completions whose group has equal rewards, hence zero advantages |
| `completions/mean_length` and others, `completions/clipped_ratio` | tokens of a completion; share of truncated ones |
| `clip_ratio/low_mean` and others, `kl` | share of the ratios that were clipped; KL to the reference model |
| `sampling/sampling_logp_difference/mean`, `/max` | rollout against training log-probs, nats; 0 where they are equal |
| `sampling/importance_sampling_ratio/min`, `/mean`, `/max` | the correction for that difference |
| `rollout_corr/rollout_rs_masked_fraction` | share of the tokens that rollout_rs left out |
| `accuracy`, `margin` | reward: share of the pairs with r_chosen > r_rejected, mean of r_chosen - r_rejected |
| `min_reward`, `mean_reward`, `max_reward` | reward: of both sides of the step's pairs |
| `step_time`, `time/generate`, `time/reward`, `time/logprob`, `time/train` | seconds of the step and of its phases |
| `perf/throughput`, `perf/generation_tokens_per_s` | tokens a second: trained on, generated |
| `memory/weights` and others, `perf/peak_memory` | peak bytes by [region](memory.md); their sum without `host` |
| `eval_loss`, `eval_reward` and others | the same of `data.eval` |

## Environment variables

| variable | meaning |
| --- | --- |
| `RLNUMBA_DEVICE` | `auto`, `cuda`, `sim` or `cpu`, where `--device` is not given |
| `RLNUMBA_KERNELS` | which kernel family operators use on a GPU ([GEMM backends](matrix-products.md#gemm-backends)) |
| `RLNUMBA_DEBUG` | 1 synchronises after every kernel, 2 also prints it ([on a GPU](debugging-a-kernel.md#on-a-gpu)) |
| `RLNUMBA_CACHE_DIR` | folder of the machine-code cache; default `~/.cache/rlnumba` |
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
    limits = [f"{word} {metadata[name]}" for name, (word, _) in LIMITS.items() if name in metadata]
    return f" {' and '.join(limits).capitalize()}." if limits else ""


def reference():
    """The text of docs/configuration.md: str."""
    parts = [HEADER]
    blocks = [
        ("Above all sections", Run),
        ("[data]", DataConfig),
        ("[rewards]: grpo", RewardsConfig),
        ("[eval]: grpo", EvalConfig),
    ]
    blocks += [("[train]: all trainers", TrainConfig), ("[train]: sft", SFTConfig), ("[train]: grpo", GRPOConfig)]
    blocks += [("[train]: dpo and kto", PreferenceConfig), ("[train]: dpo", DPOConfig), ("[train]: kto", KTOConfig)]
    blocks += [("[train]: reward", RewardConfig), ("[lora]: all trainers", LoraConfig), ("[engine]", EngineConfig)]
    for title, section_class in blocks:
        parts += [f"\n## {title}\n", f"{section_class.__doc__}\n", "| key | type | default | meaning |"]
        parts.append("| --- | --- | --- | --- |")
        bases = [each for each in (PreferenceConfig, TrainConfig) if each in section_class.__mro__[1:]]
        inherited = keys_of(bases[0]) if bases else {}
        for f in keys_of(section_class).values():
            if f.name in inherited and f.name not in section_class.__annotations__:
                continue
            doc = (f.metadata["doc"] + _shown_limits(f.metadata)).replace("|", "\\|")
            parts.append(f"| `{f.name}` | {_shown_type(f.type)} | {_shown_default(f)} | {doc} |")
    named = {("train", "batch_size"): ("train", "generation_batch_size` (grpo), `train.per_device_train_batch_size")}
    rows = [
        f"| `{'.'.join(filter(None, written))}` | `{'.'.join(filter(None, ours))}` |"
        for written, ours in {**ALIASES, **named}.items()
    ]
    return "\n".join(parts) + "\n" + FOOTER.format(aliases="\n".join(rows))


if __name__ == "__main__":
    PAGE.write_text(reference())
