"""GRPO learning two-digit sums: reward over steps and over seconds, beside TRL's GRPOTrainer, and on several GPUs.

    python bench/learning.py run rlnumba --model DIR --seed 0 --output rlnumba-0.jsonl [--cold]
    python bench/learning.py run trl --model DIR --seed 0 --output trl-0.jsonl
    python bench/learning.py draw rlnumba-*.jsonl trl-*.jsonl --output docs/pictures/learning-grpo.png
    python bench/learning.py compare --model DIR --output FOLDER --gpus 2 1+1

The task is that of examples/arithmetic_grpo.toml, DIR a folder of SmolLM2-135M-Instruct. Both trainers get SHARED and
nothing else, so what it leaves out has TRL's default in both; each draws 16 prompts a step in the file's order. Both
train in bfloat16 with float32 master weights: TRL as float32 weights under autocast.

A file has a line on the run, then one a step: its reward, and the seconds since this script began, imports, loading and
compilation included. --cold notes that no kernel was compiled before. TRL's run needs torch and trl.

`compare` runs rlnumba on GPUs of both kinds: 2 train and generate in turn, of 1+1 one trains while the other one
generates, with weights at most --max-staleness steps old. First two steps of each, which compile kernels, then a run
for each seed, of --steps on the first GPUs and of --other-steps on the others. FOLDER gets their files and
learning.png; a row says when the later ones reach the reward of the first one's end, the mean of WINDOW steps. On the
cpu device a GPU is a process.
"""

import time

# Of a clock that all processes of a machine share.
STARTED = time.monotonic()

import argparse  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
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
# Steps of the mean that says which reward a run has reached.
WINDOW = 10


def run(arguments):
    """Train with one of the libraries; writes arguments.output, a line a step as soon as it is done."""
    sys.path.insert(0, str(TASK))
    from reward import correct

    shared = SHARED | {"max_steps": arguments.steps, "seed": arguments.seed}
    if arguments.batch is not None:
        shared["per_device_train_batch_size"] = arguments.batch
    about = {"library": arguments.library, "version": version(arguments.library), "seed": arguments.seed}
    about["cold"] = arguments.cold
    if arguments.gpus is not None:
        about |= {"gpus": arguments.gpus, "max_staleness": arguments.max_staleness}
        shared |= on_gpus(arguments.gpus, shared["per_device_train_batch_size"], arguments.max_staleness)
    Path(arguments.output).write_text(json.dumps(about) + "\n")
    train = run_rlnumba if arguments.library == "rlnumba" else run_trl
    with tempfile.TemporaryDirectory() as folder:
        train(arguments.model, correct, shared | {"output_dir": folder}, Recorder(arguments.output, STARTED))


def on_gpus(gpus, batch, max_staleness):
    """Keys of rlnumba's GRPOConfig for GPUs as --gpus has them, and `batch` completions in a step of all: dict."""
    train, _, infer = gpus.partition("+")
    deploy = {"num_train_gpus": int(train), "num_infer_gpus": int(infer or 0)}
    # Each GPU that trains has one backward pass in a step.
    keys = {"per_device_train_batch_size": batch // deploy["num_train_gpus"], "global_batch_size": batch}
    keys |= {"gradient_accumulation_steps": 1, "deploy": deploy}
    return keys | ({"asynchronous": {"max_staleness": max_staleness}} if infer else {})


def version(package):
    """Its version; empty for one that is run from its sources."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Recorder:
    """A callback of either library that adds a line a step to a file, also in another process than the one it is of."""

    def __init__(self, path, started):
        self.path, self.started = path, started

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            row = {"step": state.global_step, "reward": logs["reward"], "seconds": time.monotonic() - self.started}
            # Of rlnumba, which names the phases of a step.
            phases = {name.removeprefix("time/"): s for name, s in logs.items() if name.startswith("time/")}
            row |= {"step_time": logs["step_time"], "phases": phases} if phases else {}
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")


def run_rlnumba(model, reward, settings, recorder):
    from rlnumba import GRPOConfig, GRPOTrainer
    from rlnumba.runtime import device

    if device.select() != "cuda":
        settings = settings | {"bf16": False}
    engine = {"max_model_len": 256}
    data = str(TASK / "train.jsonl")
    GRPOTrainer(model, reward, GRPOConfig(**settings), data, engine=engine, callbacks=[recorder]).train()


def run_trl(model, reward, settings, recorder):
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Callback(Recorder, TrainerCallback):
        pass

    if not torch.cuda.is_available():
        settings = settings | {"bf16": False}
    rows = [json.loads(line) for line in (TASK / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(rows)
    callback = Callback(recorder.path, recorder.started)
    GRPOTrainer(model, reward, GRPOConfig(**settings), data, callbacks=[callback]).train()


def read(path):
    """(the line on the run, steps, rewards, seconds) of a file; the latter three are arrays."""
    import numpy as np

    about, *rows = (json.loads(line) for line in Path(path).read_text().splitlines())
    return about, *(np.array([row[name] for row in rows]) for name in ("step", "reward", "seconds"))


def series(about):
    """What runs are drawn as one line, by their lines on the run: the library, and the GPUs if they were given."""
    gpus = about.get("gpus")
    return about["library"] + ("" if gpus is None else f" on {gpus}")


def draw(arguments):
    """One picture of several files; prints a summary of each."""
    for path in arguments.files:
        about, steps, rewards, seconds = read(path)
        name = f"{series(about)} seed {about['seed']}" + (", cold" if about["cold"] else "")
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

    from rlnumba.reporting.plots import COLORS as FURTHER

    runs = [run for run in map(read, paths) if len(run[1])]
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    # The first two are those of COLORS.
    further = iter(FURTHER[2:])
    for name in dict.fromkeys(series(run[0]) for run in runs):
        own = [run for run in runs if series(run[0]) == name]
        draw_series(by_step, by_second, own, COLORS.get(name) or next(further))
    by_step.set(xlabel="step", ylabel="reward: share of right answers", title="over steps")
    by_second.set(xlabel="seconds since the process started", title="over seconds")
    if any(run[0]["cold"] for run in runs):
        by_second.plot([], [], ":", color="black", linewidth=0.9, label="kernels compiled in the run")
        by_second.legend(frameon=False, loc="upper left")
    by_step.legend(frameon=False, loc="lower right")
    for axis in (by_step, by_second):
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.01)
    return figure


def draw_series(by_step, by_second, runs, color):
    """The seeds of one series. Over seconds, the mean is of those that found their kernels compiled, if there are."""
    import numpy as np

    from rlnumba.reporting.plots import smooth

    for about, steps, rewards, seconds in runs:
        style = {"color": color, "alpha": 0.35, "linewidth": 0.9, "linestyle": ":" if about["cold"] else "-"}
        by_step.plot(steps, smooth(rewards, 5), **style)
        by_second.plot(seconds, smooth(rewards, 5), **style)
    count = min(len(run[1]) for run in runs)
    mean = smooth(np.mean([run[2][:count] for run in runs], axis=0), 9)
    about, seeds = runs[0][0], "1 seed" if len(runs) == 1 else f"mean of {len(runs)} seeds"
    label = " ".join([about["library"], about["version"]]).strip()
    label += (f" on {about['gpus']} GPUs" if "gpus" in about else "") + f", {seeds}"
    by_step.plot(runs[0][1][:count], mean, color=color, linewidth=2.2, label=label)
    warm = [run for run in runs if not run[0]["cold"]] or runs
    by_second.plot(np.mean([run[3][:count] for run in warm], axis=0), mean, color=color, linewidth=2.2)


def trailing_mean(rewards):
    """The mean of the last WINDOW rewards at each step, of fewer at the first ones: (n,) array."""
    import numpy as np

    sums = np.concatenate([[0.0], np.cumsum(rewards)])
    ends = np.arange(1, len(rewards) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def reached(path, reward):
    """Seconds at which the trailing mean of a file's run reaches a reward, not before WINDOW steps: float or None."""
    import numpy as np

    _, _, rewards, seconds = read(path)
    begin = min(WINDOW, len(rewards)) - 1
    found = np.flatnonzero(trailing_mean(rewards)[begin:] >= reward)
    return float(seconds[begin + found[0]]) if len(found) else None


def compare(arguments):
    """Runs on GPUs divided in several ways: files and a picture in arguments.output, rows on the console."""
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    for gpus in arguments.gpus:
        run_apart(arguments, gpus, arguments.seeds[0], folder / "compile.jsonl", steps=2)
    (folder / "compile.jsonl").unlink()
    paths = {gpus: [folder / f"rlnumba-{gpus}-{seed}.jsonl" for seed in arguments.seeds] for gpus in arguments.gpus}
    # Seed by seed, so that a machine that becomes slower does so for all.
    for index, seed in enumerate(arguments.seeds):
        for number, gpus in enumerate(arguments.gpus):
            steps = arguments.other_steps if number and arguments.other_steps else arguments.steps
            run_apart(arguments, gpus, seed, paths[gpus][index], steps)
    picture(sum(paths.values(), [])).savefig(folder / "learning.png", dpi=110, facecolor="white")
    print_comparison(paths)


def run_apart(arguments, gpus, seed, output, steps):
    """`run` in a process of its own, whose end frees the GPUs."""
    command = [sys.executable, __file__, "run", "rlnumba", "--model", arguments.model, "--output", str(output)]
    command += ["--seed", str(seed), "--steps", str(steps), "--gpus", gpus]
    command += ["--max-staleness", str(arguments.max_staleness)]
    command += [] if arguments.batch is None else ["--batch", str(arguments.batch)]
    # Its lines are no result.
    subprocess.run(command, check=True, stdout=sys.stderr)


def print_comparison(paths):
    """Print rows: each run, and when the ones that are not of the first GPUs reach the first one's rewards.

    paths: {GPUs: files, a seed each}.
    """
    from report import row

    first = next(iter(paths))
    for gpus, files in paths.items():
        for path in files:
            about, steps, rewards, seconds = read(path)
            per_step = (seconds[-1] - seconds[0]) / max(1, len(steps) - 1)
            value = f"reward {rewards[:5].mean():.3f} to {trailing_mean(rewards)[-1]:.3f}; first step after "
            value += f"{seconds[0]:.1f} s, {per_step:.4f} s a step, end after {seconds[-1]:.1f} s"
            row(f"GRPO on {gpus} GPUs, seed {about['seed']}, {len(steps)} steps", value)
    for index, path in enumerate(paths[first]):
        about, _, rewards, _ = read(path)
        for share in (1.0, 0.9):
            wanted = share * trailing_mean(rewards)[-1]
            found = {gpus: reached(files[index], wanted) for gpus, files in paths.items()}
            value = "; ".join(f"{gpus} {'never' if s is None else f'after {s:.1f} s'}" for gpus, s in found.items())
            row(f"reward {wanted:.3f}, {share:.0%} of the end's on {first} GPUs, seed {about['seed']}", value)


def gpus_given(text):
    """--gpus: "2" or "1+1". Raises ArgumentTypeError for another form."""
    parts = text.split("+")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be a number of GPUs, or two as 1+1, got {text!r}")
    return text


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
    one.add_argument("--gpus", type=gpus_given, help="of rlnumba: 2, or 1+1: those that train and those that generate")
    one.add_argument("--max-staleness", type=int, default=4)
    one.add_argument("--cold", action="store_true", help="note that the cache of compiled kernels was empty")
    several = commands.add_parser("compare", help="train on GPUs divided in several ways, and draw it")
    several.set_defaults(function=compare)
    several.add_argument("--model", required=True)
    several.add_argument("--output", required=True, help="a folder")
    several.add_argument("--gpus", type=gpus_given, nargs="+", default=["2", "1+1"])
    several.add_argument("--seeds", type=int, nargs="+", default=[0])
    several.add_argument("--steps", type=int, default=150)
    several.add_argument("--other-steps", type=int, help="of runs that are not on the first GPUs, if not as many")
    several.add_argument("--batch", type=int, help="completions of a step; default 128")
    several.add_argument("--max-staleness", type=int, default=4)
    picture = commands.add_parser("draw", help="draw files of runs")
    picture.set_defaults(function=draw)
    picture.add_argument("files", nargs="+")
    picture.add_argument("--output", required=True)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
