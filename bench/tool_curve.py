"""The calculator example of SmolLM2-135M: accuracy over GRPO's steps with its tool, and without it.

    python bench/tool_curve.py --model DIR --output FOLDER     DIR: a folder of SmolLM2-135M-Instruct
    python bench/tool_curve.py --draw FOLDER                   the picture again, of the runs that are there

Makes the data of examples/calculator/make.py, trains the supervised model of examples/calculator/sft.toml and then
examples/calculator.toml, and the same again without [tools], from the same supervised model. FOLDER gets the runs and
tool_curve.png: the mean reward of each step, and the accuracy of greedy answers to held-out questions. --steps and
--sft-steps shorten the runs, --completions and --eval-rows make their batches smaller; with --no-template the model's
own chat template has to show tools.
"""

import argparse
import importlib.util
import time
from dataclasses import replace
from pathlib import Path

from rlnumba.config import ToolsConfig, load_run
from rlnumba.reporting.files import read_metrics
from rlnumba.trainers.every import TRAINERS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "calculator"
RUNS = {"grpo": "with the calculator", "alone": "without a tool"}


def load_example():
    """examples/calculator/make.py as a module."""
    spec = importlib.util.spec_from_file_location("calculator_make", EXAMPLE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(name, run):
    """Train a run, and print how long it took."""
    began = time.monotonic()
    TRAINERS[run.trainer].train(run)
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def runs_of(arguments):
    """{name: Run}, in the order in which they are trained."""
    folder = arguments.output
    sft = load_run("sft", EXAMPLE / "sft.toml")
    sft = replace(sft, model=str(folder / "model"), output_dir=str(folder / "sft"))
    sft = replace(sft, data=replace(sft.data, train=str(folder / "sft.jsonl")))
    sft = replace(sft, train=replace(sft.train, max_steps=arguments.sft_steps))
    run = load_run("grpo", ROOT / "examples" / "calculator.toml")
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "eval")}
    rewards = replace(run.rewards, funcs=[f"{EXAMPLE / 'calculator.py'}:right"])
    sizes = {"max_steps": arguments.steps, "per_device_train_batch_size": arguments.completions}
    run = replace(
        run,
        model=str(folder / "sft" / "final"),
        output_dir=str(folder / "grpo"),
        data=replace(run.data, **files),
        rewards=rewards,
        tools=replace(run.tools, funcs=[f"{EXAMPLE / 'calculator.py'}:calculate"]),
        train=replace(run.train, **sizes),
    )
    own = replace(run.train, max_tool_calling_iterations=None)
    alone = replace(run, output_dir=str(folder / "alone"), tools=ToolsConfig(), train=own)
    return {"sft": sft, "grpo": run, "alone": alone}


def curves(folder):
    """{label: (rewards of the steps, [(step, accuracy of greedy answers)])} of the runs that are there."""
    found = {}
    for name, label in RUNS.items():
        if (folder / name / "metrics.jsonl").exists():
            rows = read_metrics(folder / name)
            rewards = [row["reward"] for row in rows if "reward" in row]
            found[label] = rewards, [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]
    return found


def draw(folder):
    """Draw tool_curve.png, and print the ends of the curves."""
    from matplotlib.figure import Figure

    from rlnumba.reporting.plots import COLORS, smooth

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axis = figure.subplots()
    for color, (label, (rewards, accuracy)) in zip(COLORS, curves(folder).items(), strict=False):
        axis.plot(range(1, len(rewards) + 1), smooth(rewards, 5), color=color, label=label)
        if accuracy:
            axis.plot(*zip(*accuracy, strict=True), "o", color=color, label=f"{label}, held-out, greedy")
            print(f"{label}: held-out accuracy {accuracy[0][1]:.3f} -> {accuracy[-1][1]:.3f}")
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        print(f"{label}: reward {first:.3f} -> {last:.3f}")
    axis.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(folder / "tool_curve.png", dpi=110, facecolor="white")


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--completions", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=256)
    parser.add_argument("--template", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def main(arguments):
    if arguments.draw is not None:
        draw(arguments.draw)
        return
    example = load_example()
    example.make(arguments.model, arguments.output, arguments.template, arguments.eval_rows)
    for name, run in runs_of(arguments).items():
        train(name, run)
    draw(arguments.output)


if __name__ == "__main__":
    main(parse())
