"""Writes docs/configuration.md from the dataclasses in rlnumba/config."""

import dataclasses
import typing
from pathlib import Path

from rlnumba.config import Run
from rlnumba.config.keys import (
    LIMITS,
    KeyCondition,
    Section,
    and_list,
    keys_of,
    needs_of,
    needs_text,
    sections_of,
    split_optional,
)
from rlnumba.config.reading import ALIASES
from rlnumba.config.resuming import RULES, keys_by_rule
from rlnumba.config.runs import RUNS
from rlnumba.config.writing import toml_value

PAGE = Path(__file__).with_name("configuration.md")

HEADER = """# Configuration reference

Which keys does the TOML file of a training run have, with which types, defaults and meanings, and which metrics does a
run write? A relative path in a run file, as of the model or the data, begins at the working directory, not at the
file's folder. This page is written by `python docs/make_configuration.py` from the dataclasses in `rlnumba/config`; do
not edit it.

A run is a TOML file. Every key can be overridden on the command line as `--section.key value` (`--seed 7` for a key
above all sections); dashes and underscores are the same, `None` unsets a key, lists are TOML arrays or separated by
commas. Several `--config` files are merged key by key, with later ones taking precedence. Unknown keys are errors, and
so are those of another trainer; a key that the others keep from acting (what it needs is in its line) is a warning.
`--dry-run` prints the resolved configuration, of several ranks with what each does and takes of memory; every run
writes it to `output_dir/config.toml`. A file is not needed where the options say all: `rlnumba sft --model DIR
--data.train FILE`. [Rows of data](data.md) has the columns of each trainer's rows.
"""

FOOTER = """
## Other spellings

Keys of TRL, verl, prime-rl and RL.cu that are accepted as the key on the right.

| written | means |
| --- | --- |
{aliases}

## What may change on --resume

A checkpoint keeps what decides the result of its run: every key, a hash of the model, of the tokenizer and of the
source files of rewards, tools and environments, and a hash of each row. A run that
[goes on](running.md#stopping-and-resuming) prints each change that is allowed, and refuses the others.

| what a change does | keys |
| --- | --- |
{resuming}

The sizes of a step and of a generation are compared for all GPUs together, the model by its configuration and by 64
blocks of each file of weights.

## What a run writes

In `output_dir`: `config.toml`, the resolved configuration; `metrics.jsonl`, a line for each optimizer step;
`completions.jsonl` (GRPO, RLOO, PPO, distillation), a line for each completion; `curves.png`; `checkpoints/step-N/`
and, at the end, `final/`, both Hugging Face folders (PPO's critic is in `final/critic/`). TensorBoard files are written
too where tensorboardX is installed. `unfinished` is there from the beginning of a run, or its resumption, to its end:
beside it, `final/` is of an earlier end. The metrics have TRL's names:

| metric | meaning |
| --- | --- |
| `loss`, `grad_norm`, `learning_rate` | of the step; the norm is that before clipping |
| `num_tokens`, `epoch` | tokens so far, of drawn completions with their prompts, and passes over the data |
| `entropy` | mean entropy of the model's prediction of a trained token, nats |
| `entropy_coef`, `policy_loss` | GRPO with an entropy bonus: its coefficient, and the loss without it |
| `observation_loss` | with `observation_coef`: mean cross-entropy of the tokens between the turns, nats |
| `mean_token_accuracy` | SFT, DPO, KTO: share of the trained tokens (but rejected ones) that were the argmax |
| `rewards/chosen`, `rewards/rejected` | DPO, KTO: mean of `beta` x (log-prob less the reference's) of a completion |
| `rewards/margins`, `rewards/accuracies` | the former less the latter; DPO: share of the pairs where it is above 0 |
| `logps/chosen`, `logps/rejected` | DPO, KTO: mean log-prob of a completion, nats |
| `logits/chosen`, `logits/rejected` | DPO, KTO: mean over positions and vocabulary of the logits |
| `reward`, `reward_std`, `rewards/NAME/mean`, `rewards/NAME/std` | weighted sum of the functions, and each function |
| `reward_baseline` | mean reward of the greedy completions, with `advantage_estimator = "remax"` |
| `step_groups/size_mean`, `/alone_frac` | `gigpo`, `hgpo`: turns of a step group; share of the turns alone in theirs |
| `difficulty/easy`, `/normal`, `/hard` | share of the prompts in each pool, with difficulty_weights |
| `difficulty/solved` | share of the prompts that no_resampling_pass_rate leaves out |
| `replay/groups`, `replay/age`, `replay/buffer_size` | groups replayed, their mean age in steps, those kept |
| `frac_reward_zero_std` | share of the completions whose group has equal rewards, hence zero advantages |
| `completions/mean_length` and others, `completions/clipped_ratio` | tokens of a completion; share of truncated ones |
| `completions/given_frac`, `/teacher_frac` | `lmbda`: share of the rows', of the teacher's; lengths: the others' |
| `teacher_kl` | with `[teacher]`: mean over the trained tokens of log policy - log teacher, nats |
| `clip_ratio/low_mean` and others, `kl` | share of the ratios that were clipped; KL to the reference model |
| `sampling/sampling_logp_difference/mean`, `/max` | rollout against training log-probs, nats; 0 where they are equal |
| `sampling/importance_sampling_ratio/min`, `/mean`, `/max` | the correction for that difference |
| `rollout_corr/kl`, `rollout_corr/k3_kl` | engine.quantization: KL(rollout, training) of a token, by k1 and k3 |
| `rollout_corr/rollout_rs_masked_fraction` | share of the tokens that rollout_rs left out |
| `rollout_corr/rollout_is_batch_norm_factor` | the mean that rollout_is_batch_normalize divides by |
| `off_policy/mean`, `off_policy/max` | with `[async]`: optimizer steps from a completion's oldest weights to these |
| `token_staleness/mean`, `cross_version_response_fraction` | of tokens; share of completions of several versions |
| `off_policy/in_flight`, `off_policy/in_queue`, `buffer_qsize` | groups being generated, and waiting; completions |
| `off_policy/dropped`, `off_policy/rejected` | groups so far that others have replaced; that were too old |
| `wait_for_batch_s`, `queue_wait_time_s` | the trainer's wait for groups, and that of complete groups |
| `weight_sync_time_s`, `weight_pause_time_s` | sending the weights; the longest pause of decoding for new ones |
| `generation_tok_per_s` | tokens a second that inference samples while the trainer does whatever it does |
| `infer_utilization`, `infer_idle` | share of the time that inference decodes; that it has no group to decode |
| `train_utilization` | share of the time that training does not wait |
| `perf/over_sampled_tokens` | tokens of completions that dynamic_sampling dropped before they were needed |
| `accuracy`, `margin` | reward: share of the pairs with r_chosen > r_rejected, mean of r_chosen - r_rejected |
| `min_reward`, `mean_reward`, `max_reward` | reward: of both sides of the step's pairs |
| `objective/scores`, `objective/non_score_reward` | PPO: mean score of a completion, and its mean KL penalty |
| `objective/rlhf_reward` | PPO: the sum of these two |
| `objective/kl`, `objective/entropy` | PPO: of a completion, the sum of kl and of -log-prob over its tokens; means |
| `policy/approxkl_avg`, `policy/clipfrac_avg`, `policy/entropy_avg` | PPO: means over all micro-batches of a batch |
| `loss/policy_avg`, `loss/value_avg`, `val/clipfrac_avg` | likewise, of both losses and of clipped values |
| `val/ratio`, `val/ratio_var` | likewise, of the ratio of probabilities, and the variance of these means |
| `val/num_eos_tokens` | PPO: end tokens of the batch |
| `critic/grad_norm`, `critic/learning_rate` | PPO: of a critic that is a model of its own |
| `step_time` | seconds of the step: the sum of the following phases, each moment counted in one |
| `time/generate`, `time/reward`, `time/advantage`, `time/logprob` | completions; the wait for rewards; the batch |
| `time/train`, `time/eval` | the optimizer step, and the evaluation after it |
| `time/log`, `time/save` | metrics and callbacks; the copy for the checkpoint of the step before |
| `perf/throughput` | tokens trained on a second of `step_time`, of rows a second of `time/train` |
| `perf/generation_tokens_per_s` | tokens generated a second of `time/generate` |
| `memory/weights` and others, `perf/peak_memory` | peak bytes by [region](memory.md), and of all together but `host` |
| `eval_loss`, `eval_reward`, ... | the same of `data.eval`; with rewards also [`eval_pass@k`](running.md#evaluation) |

## Environment variables

| variable | meaning |
| --- | --- |
| `RLNUMBA_DEVICE` | `auto`, `cuda`, `sim` or `cpu`, where `--device` is not given |
| `RLNUMBA_KERNELS` | which kernel family operators use on a GPU ([GEMM backends](matrix-products.md#gemm-backends)) |
| `RLNUMBA_COMPILER` | the compiler of kernels: `numba` or `mlir`, default `numba` ([compilers](compilers.md)) |
| `RLNUMBA_DEBUG` | 1 synchronises after every kernel, 2 also prints it ([on a GPU](debugging-a-kernel.md#on-a-gpu)) |
| `RLNUMBA_CACHE_DIR` | folder of compiled code; default `~/.cache/rlnumba` ([more](deploying.md#compiled-code)) |
| `RLNUMBA_RANKS_PER_GPU` | most ranks of a run that share a GPU ([several GPUs](sft.md#on-several-gpus)); default 1 |

Those of other packages, and what a container needs, are in [deploying](deploying.md).
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


def _shown_conditions(metadata):
    """Which trainers read a key, and what it has no effect without."""
    owners = f" For {and_list(Run.trainers_that(metadata['of']))}." if "of" in metadata else ""
    needs = [str(each) if isinstance(each, KeyCondition) else f"`{needs_text(each)}`" for each in needs_of(metadata)]
    return owners + (f" Needs {' and '.join(needs)}." if needs else "")


def _owners():
    """{section class: names of the trainers that have its keys}, of those classes that are a section of a Run and those
    that several trainers' sections inherit from, each after what it inherits from."""
    found, whole = {}, set()
    for name, run_class in RUNS.items():
        of_run = sections_of(run_class).values()
        whole |= {each for each in of_run if each is not run_class}
        for section_class in of_run:
            for base in reversed(section_class.__mro__):
                if issubclass(base, Section) and base is not Section:
                    found.setdefault(base, []).append(name)
    return {base: names for base, names in found.items() if base in whole or len(names) > 1}


def reference():
    """The text of docs/configuration.md: str."""
    parts, owners = [HEADER], _owners()
    # By section, in the order in which Runs have them.
    order = list(dict.fromkeys(name for run_class in RUNS.values() for name in sections_of(run_class)))
    blocks = [("Above all sections", Run)]
    for section_class in sorted(owners, key=lambda each: order.index(each.section)):
        names = owners[section_class]
        of = "all trainers" if len(names) == len(RUNS) else ", ".join(names)
        blocks.append((f"[{section_class.section}]: {of}", section_class))
    for title, section_class in blocks:
        parts += [f"\n## {title}\n", f"{section_class.__doc__}\n", "| key | type | default | meaning |"]
        parts.append("| --- | --- | --- | --- |")
        # Keys of a block above are not repeated, unless their default or meaning is another here.
        inherited = {name for base in section_class.__mro__[1:] if base in owners for name in keys_of(base)}
        for f in keys_of(section_class).values():
            if f.name in inherited and f.name not in section_class.__annotations__:
                continue
            doc = (f.metadata["doc"] + _shown_limits(f.metadata) + _shown_conditions(f.metadata)).replace("|", "\\|")
            parts.append(f"| `{f.name}` | {_shown_type(f.type)} | {_shown_default(f)} | {doc} |")
    rows = [
        f"| `{'.'.join(filter(None, written))}` | `{'.'.join(filter(None, ours))}` |"
        for written, ours in ALIASES.items()
    ]
    meanings = {}
    for name, run_class in RUNS.items():
        meanings.setdefault(".".join(run_class.batch_size), []).append(name)
    of_batch = ", ".join(f"`{key}` ({', '.join(names)})" for key, names in meanings.items())
    rows.append(f"| `train.batch_size` | {of_batch} |")
    found = keys_by_rule()
    resuming = [f"| {RULES[rule]} | {_shown_keys(found[rule])} |" for rule in RULES]
    return "\n".join(parts) + "\n" + FOOTER.format(aliases="\n".join(rows), resuming="\n".join(resuming))


def _shown_keys(names):
    """Names of keys by section: str."""
    by_section = {}
    for name in names:
        section, _, key = name.rpartition(".")
        by_section.setdefault(section, []).append(f"`{key}`")
    return "; ".join((f"[{section}] " if section else "") + ", ".join(keys) for section, keys in by_section.items())


if __name__ == "__main__":
    PAGE.write_text(reference())
