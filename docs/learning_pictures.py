"""Draws the curves of the arithmetic runs: python docs/learning_pictures.py [folder]

folder: holds the output_dir of each of RUNS, by that name (tools and no-tools: grpo and alone of bench/tool_curve.py),
grpo-*.jsonl of bench/learning.py below `learning/`, and the files of `bench/learning.py compare` below `compare/`.
What the pictures need of them is copied to bench/results/learning/ first; `bench/learning_runs.py draw --keep` copies
its own runs there. docs/make_pictures.py draws the same.
"""

import importlib.util
import json
import pathlib
import shutil
import sys

from matplotlib.figure import Figure

from rlnumba.reporting.plots import COLORS, smooth

FOLDER = pathlib.Path(__file__).parent / "pictures"
ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "learning"

# Picture -> its panels: title, and the lines as (run, metric, label).
PANELS = {
    "learning_lora": [
        ("reward", [("grpo", "reward", "all weights"), ("lora", "reward", "adapter of rank 16")]),
        ("held-out accuracy", [("grpo", "eval_avg@8", "all weights"), ("lora", "eval_avg@8", "adapter of rank 16")]),
    ],
    "learning_ppo": [
        ("right answers", [("ppo", "reward", "against the checker"),
                           ("ppo-reward", "rewards/correct/mean", "against the reward model")]),
        ("score of the reward model", [("ppo-reward", "rewards/final/mean", "")]),
        ("KL to the reference, nats a completion", [("ppo", "objective/kl", "against the checker"),
                                                    ("ppo-reward", "objective/kl", "against the reward model")]),
    ],
    "learning_rloo": [
        ("right answers", [("rloo", "reward", "against the checker"),
                           ("rloo-reward", "rewards/correct/mean", "against the reward model")]),
        ("score of the reward model", [("rloo-reward", "rewards/final/mean", "")]),
        ("KL to the reference, nats a token", [("rloo", "kl", "against the checker"),
                                               ("rloo-reward", "kl", "against the reward model")]),
    ],
    "learning_dpo": [
        ("share of pairs in the right order", [("dpo", "rewards/accuracies", "training"),
                                               ("dpo", "eval_rewards/accuracies", "held out")]),
        ("reward of a completion", [("dpo", "rewards/chosen", "chosen"), ("dpo", "rewards/rejected", "rejected")]),
        ("log-prob of a completion, nats", [("dpo", "logps/chosen", "chosen"), ("dpo", "logps/rejected", "rejected")]),
    ],
    "learning_kto": [
        ("reward of a completion", [("kto", "rewards/chosen", "right"), ("kto", "rewards/rejected", "wrong")]),
        ("log-prob of a completion, nats", [("kto", "logps/chosen", "right"), ("kto", "logps/rejected", "wrong")]),
        ("KL of the batch, nats", [("kto", "kl", "")]),
    ],
    "learning_reward": [
        ("share of pairs in the right order", [("reward", "accuracy", "training"),
                                               ("reward", "eval_accuracy", "held out")]),
        ("chosen less rejected score", [("reward", "margin", "training"), ("reward", "eval_margin", "held out")]),
    ],
    "learning_sft": [
        ("loss", [("sft", "loss", "")]),
        ("share of next tokens that are the likeliest", [("sft", "mean_token_accuracy", "")]),
    ],
    "learning_tools": [
        ("right answers", [("tools", "reward", "with the calculator"), ("no-tools", "reward", "without a tool")]),
        ("right answers to held-out questions, greedy", [("tools", "eval_reward", "with the calculator"),
                                                         ("no-tools", "eval_reward", "without a tool")]),
    ],
    "learning_replay": [
        ("reward", [("replay-off", "reward", "the router's experts"),
                    ("replay-on", "reward", "the sampler's experts")]),
    ],
    "learning_distill": [
        ("reward of the completions of a step", [("distill", "reward", "distill: the teacher's predictions"),
                                                 ("distill-grpo", "reward", "grpo: rewards"),
                                                 ("distill-teacher", "reward", "grpo: [teacher]")]),
    ],
    "learning_gym": [
        ("score", [("gym", "reward", "training"), ("gym", "eval_reward", "held out")]),
    ],
}  # fmt: skip
# Pictures whose curves are over another metric than the step: that, and the axis's label.
OVER = {"learning_distill": ("num_tokens", "tokens of prompts and completions")}
RUNS = sorted({run for panels in PANELS.values() for _, lines in panels for run, _, _ in lines})


def collect(folder):
    """Copy what the pictures need of the runs in a folder to RESULTS, numbers with five digits."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    wanted = {(run, metric) for panels in PANELS.values() for _, lines in panels for run, metric, _ in lines}
    wanted |= {(run, OVER[name][0]) for name in OVER for _, lines in PANELS[name] for run, _, _ in lines}
    for run in RUNS:
        if not (folder / run / "metrics.jsonl").exists():
            print(f"{folder / run}: no metrics.jsonl")
            continue
        with open(folder / run / "metrics.jsonl") as source, open(RESULTS / f"{run}.jsonl", "w") as target:
            for row in map(json.loads, source):
                kept = {name: float(f"{value:.5g}") for name, value in row.items()
                        if (run, name) in wanted and value is not None}  # fmt: skip
                if kept:
                    target.write(json.dumps({"step": row["step"], **kept}) + "\n")
    for path in sorted((folder / "learning").glob("grpo-*.jsonl")):
        shutil.copy(path, RESULTS)
    for path in sorted((folder / "compare").glob("rlnumba-*.jsonl")):
        about, *rows = map(json.loads, path.read_text().splitlines())
        kept = [
            {"step": row["step"]} | {name: float(f"{row[name]:.5g}") for name in ("reward", "seconds")} for row in rows
        ]
        lines = [json.dumps(row) + "\n" for row in [about, *kept]]
        (RESULTS / path.name.replace("rlnumba", "gpus")).write_text("".join(lines))


def panels_of(name):
    """A figure of PANELS[name]."""
    panels, (over, label_of_axis) = PANELS[name], OVER.get(name, ("step", "step"))
    figure = Figure(figsize=(1.4 + 3.5 * len(panels), 3.2), layout="constrained")
    for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for color, (run, metric, label) in zip(COLORS, lines, strict=False):
            rows = [json.loads(line) for line in (RESULTS / f"{run}.jsonl").read_text().splitlines()]
            points = [(row[over], row[metric]) for row in rows if metric in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            few = len(points) < 12
            style = {"marker": "o", "linewidth": 1.6, "label": label} if few else {"alpha": 0.3, "linewidth": 0.8}
            axis.plot(steps, values, color=color, **style)
            if not few:
                axis.plot(steps, smooth(values, 9), color=color, linewidth=2, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(label_of_axis)
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        if any(label for _, _, label in lines):
            axis.legend(frameon=False, fontsize=8)
    return figure


def bench_module(name):
    """bench/name.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learning_runs(pattern):
    """A figure of files of bench/learning.py in RESULTS."""
    return bench_module("learning").picture(sorted(RESULTS.glob(pattern)))


def pictures():
    """{name: function that draws it}, of those whose runs are in RESULTS: dict."""
    found = {
        name: lambda name=name: panels_of(name)
        for name, panels in PANELS.items()
        if all((RESULTS / f"{run}.jsonl").exists() for _, lines in panels for run, _, _ in lines)
    }
    for name, pattern in (("learning_grpo", "grpo-*.jsonl"), ("learning_async", "gpus-*.jsonl")):
        if list(RESULTS.glob(pattern)):
            found[name] = lambda pattern=pattern: learning_runs(pattern)
    return found | bench_module("learning_curves").pictures(RESULTS)


def write(folder):
    """Write every picture to a folder."""
    for name, draw in pictures().items():
        draw().savefig(folder / f"{name}.png", dpi=100, facecolor="white")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        collect(pathlib.Path(argument))
    write(FOLDER)
