"""GRPO learning two-digit sums beside TRL's GRPOTrainer: reward over steps and over seconds, from the same data.

    python bench/learning.py run rlnumba --model DIR --seed 0 --output rlnumba-0.jsonl [--cold]
    python bench/learning.py run trl --model DIR --seed 0 --output trl-0.jsonl
    python bench/learning.py draw rlnumba-*.jsonl trl-*.jsonl --output docs/pictures/learning-grpo.png

The task is that of examples/arithmetic_grpo.toml, DIR a folder of SmolLM2-135M-Instruct. Both trainers get SHARED and
nothing else, so what it leaves out has TRL's default in both; each draws 16 prompts a step in the file's order. Both
train in bfloat16 with float32 master weights: TRL as float32 weights under autocast.

A file has a line on the run, then one a step: its reward, and the seconds since this script began, imports, loading and
compilation included. --cold notes that no kernel was compiled before. TRL's run needs torch and trl.
"""

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).parent.parent
TASK = ROOT / "examples" / "arithmetic"
# Keys of both libraries' GRPOConfig.
SHARED = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "per_device_train_batch_size": 128,
    "max_completion_length": 32,
    "beta": 0.0,
    "bf16": True,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
}
COLORS = {"rlnumba": "#0072B2", "trl": "#D55E00"}


def run(arguments):
    """Train with one of the libraries; writes arguments.output, a line a step as soon as it is done."""
    sys.path.insert(0, str(TASK))
    from reward import correct

    shared = SHARED | {"max_steps": arguments.steps, "seed": arguments.seed}
    if arguments.batch is not None:
        shared["per_device_train_batch_size"] = arguments.batch
    train = run_rlnumba if arguments.library == "rlnumba" else run_trl
    with open(arguments.output, "w") as file, tempfile.TemporaryDirectory() as folder:

        def write(**row):
            file.write(json.dumps(row) + "\n")
            file.flush()

        write(library=arguments.library, version=version(arguments.library), seed=arguments.seed, cold=arguments.cold)
        train(arguments.model, correct, shared | {"output_dir": folder}, recorder(write))


def version(package):
    """Its version; empty for one that is run from its sources."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def recorder(write):
    """The methods of a TrainerCallback of either library that writes a line a step."""

    class Recorder:
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" in logs:
                seconds = time.perf_counter() - STARTED
                # Of rlnumba, which names the phases of a step.
                phases = {name.removeprefix("time/"): s for name, s in logs.items() if name.startswith("time/")}
                own = {"step_time": logs["step_time"], "phases": phases} if phases else {}
                write(step=state.global_step, reward=logs["reward"], seconds=seconds, **own)

    return Recorder


def run_rlnumba(model, reward, settings, recorder):
    from rlnumba import GRPOConfig, GRPOTrainer
    from rlnumba.trainers.callbacks import TrainerCallback

    class Recorder(recorder, TrainerCallback):
        pass

    engine = {"max_model_len": 256}
    data = str(TASK / "train.jsonl")
    GRPOTrainer(model, reward, GRPOConfig(**settings), data, engine=engine, callbacks=[Recorder()]).train()


def run_trl(model, reward, settings, recorder):
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Recorder(recorder, TrainerCallback):
        pass

    if not torch.cuda.is_available():
        settings = settings | {"bf16": False}
    rows = [json.loads(line) for line in (TASK / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(rows)
    GRPOTrainer(model, reward, GRPOConfig(**settings), data, callbacks=[Recorder()]).train()


def read(path):
    """(the line on the run, steps, rewards, seconds) of a file; the latter three are arrays."""
    import numpy as np

    about, *rows = (json.loads(line) for line in Path(path).read_text().splitlines())
    return about, *(np.array([row[name] for row in rows]) for name in ("step", "reward", "seconds"))


def draw(arguments):
    """One picture of several files; prints a summary of each."""
    for path in arguments.files:
        about, steps, rewards, seconds = read(path)
        name = f"{about['library']} seed {about['seed']}" + (", cold" if about["cold"] else "")
        if not len(steps):
            print(f"{name}: no step")
            continue
        per_step = (seconds[-1] - seconds[0]) / max(1, len(steps) - 1)
        print(f"{name}: reward {rewards[:5].mean():.3f} -> {rewards[-10:].mean():.3f} in {len(steps)} steps;")
        print(f"    first step after {seconds[0]:.1f} s, {per_step:.3f} s a step, end after {seconds[-1]:.1f} s")
        print_phases(path)
    picture(arguments.files).savefig(arguments.output, dpi=110, facecolor="white")


def print_phases(path):
    """Print medians of the phases of a file's steps, but for the first, and which share of the steps they are."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()[2:]]
    rows = [row for row in rows if "phases" in row]
    if not rows:
        return
    names = dict.fromkeys(name for row in rows for name in row["phases"])
    medians = {name: statistics.median(row["phases"].get(name, 0.0) for row in rows) for name in names}
    share = sum(sum(row["phases"].values()) for row in rows) / sum(row["step_time"] for row in rows)
    step = statistics.median(row["step_time"] for row in rows)
    listed = ", ".join(f"{name} {seconds:.4f}" for name, seconds in medians.items())
    print(f"    a step in seconds: {step:.4f}; {listed}; the phases are {share:.2%} of the steps")


def picture(paths):
    """A figure of several files: reward over steps, and over seconds, a thin line a seed and their mean."""
    from matplotlib.figure import Figure

    runs = [run for run in map(read, paths) if len(run[1])]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for library, color in COLORS.items():
        own = [run for run in runs if run[0]["library"] == library]
        if own:
            draw_library(by_step, by_second, own, color)
    by_step.set(xlabel="step", ylabel="reward: share of right answers", title="over steps")
    by_second.set(xlabel="seconds since the process started", title="over seconds")
    if any(run[0]["cold"] for run in runs):
        by_second.plot([], [], ":", color="black", linewidth=0.9, label="kernels compiled in the run")
        by_second.legend(frameon=False, loc="upper left")
    by_step.legend(frameon=False, loc="upper left")
    for axis in (by_step, by_second):
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    return figure


def draw_library(by_step, by_second, runs, color):
    """The seeds of one library. Over seconds, the mean is of those that found their kernels compiled, if there are."""
    import numpy as np

    from rlnumba.reporting.plots import smooth

    for about, steps, rewards, seconds in runs:
        style = {"color": color, "alpha": 0.35, "linewidth": 0.9, "linestyle": ":" if about["cold"] else "-"}
        by_step.plot(steps, smooth(rewards, 5), **style)
        by_second.plot(seconds, smooth(rewards, 5), **style)
    count = min(len(run[1]) for run in runs)
    mean = smooth(np.mean([run[2][:count] for run in runs], axis=0), 9)
    label = f"{runs[0][0]['library']} {runs[0][0]['version']}".strip() + f", mean of {len(runs)} seeds"
    by_step.plot(runs[0][1][:count], mean, color=color, linewidth=2.2, label=label)
    warm = [run for run in runs if not run[0]["cold"]] or runs
    by_second.plot(np.mean([run[3][:count] for run in warm], axis=0), mean, color=color, linewidth=2.2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="train with one library and one seed")
    one.set_defaults(function=run)
    one.add_argument("library", choices=tuple(COLORS))
    one.add_argument("--model", required=True)
    one.add_argument("--output", required=True)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--steps", type=int, default=150)
    one.add_argument("--batch", type=int, help="completions of a step; default 128")
    one.add_argument("--cold", action="store_true", help="note that the cache of compiled kernels was empty")
    picture = commands.add_parser("draw", help="draw files of runs")
    picture.set_defaults(function=draw)
    picture.add_argument("files", nargs="+")
    picture.add_argument("--output", required=True)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
