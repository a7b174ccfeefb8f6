"""Learning curves of SmolLM2-135M-Instruct: adapters on quantised bases, distillation beside GRPO, GSM8K.

    python bench/learning_runs.py adapters --model DIR --output FOLDER     GRPO with [lora], base in bf16 and in nf4
    python bench/learning_runs.py distill --model DIR --output FOLDER      GRPO's model as a teacher, and self-teaching
    python bench/learning_runs.py gsm8k --model DIR --output FOLDER --data DIR     DIR/train.jsonl, DIR/test.jsonl
    python bench/learning_runs.py draw FOLDER [--keep bench/results/learning]      pictures of the runs that are there

DIR is a folder of SmolLM2-135M-Instruct; the first two have the task of examples/arithmetic_grpo.toml. A run is a
command of rlnumba in a process of its own, --at-once of them at a time, with the keys of the example's file and those
that FOLDER/NAME.log begins with. Its metrics are in FOLDER/NAME/metrics.jsonl step by step. A run whose final/ is there
is not repeated. At --seconds after the start runs end after their step, with an evaluation and their model, and no
other begins. Held-out accuracy is that of greedy answers. --steps and --batch make runs smaller; the cpu device needs
--dtype float32.

`adapters` has the seeds --seeds and the formats --types of the base beside bf16, and says whether accuracies agree
within the noise of seeds. `distill` trains all weights by GRPO, then distils this model into the one that it began
with, and by `[teacher]` in GRPO; beside them the model is its own teacher, which sees the solved problem (SDFT, SDPO):
as it was before training, with the reverse KL (self) and with the Jensen-Shannon divergence (self-jsd), and as a moving
average (self-ema). `gsm8k` trains on the worked answers, then by GRPO on the numbers, of the seeds --seeds, each for at
most --sft-seconds and --grpo-seconds; with --gpus the runs of seeds take turns at these.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
# Names the end of a process' run for TimeLimit: seconds of time.monotonic, which all processes of a machine share.
UNTIL = "LEARNING_RUNS_UNTIL"
# What a run may take after its end for the last evaluation and the model; then it gets SIGTERM, and SIGKILL.
GRACE_S, KILL_S = 25.0, 10.0


class TimeLimit:
    """A callback of train.callbacks that ends a run after the step in which its time is up, with an evaluation."""

    def __init__(self):
        self.until = float(os.environ.get(UNTIL, "inf"))

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() >= self.until:
            control.should_training_stop = control.should_evaluate = True


class Job(NamedTuple):
    """A command of rlnumba in FOLDER/name. after: the name of the job whose result it reads, or None. until: when it
    has to end (time.monotonic). result: a path in FOLDER that is there when the job is done. gpu: its number, or None
    for all that are visible.
    """

    name: str
    command: str
    config: Path
    options: dict
    after: str | None
    until: float
    result: str
    gpu: int | None = None

    def arguments(self):
        """The command line: list of str."""
        return [self.command, "--config", str(self.config.relative_to(ROOT)), *as_options(self.options)]


def as_options(options):
    """["--key", "value", ...] of {key: value}; lists and tables are TOML."""
    found = []
    for name, value in options.items():
        found += [f"--{name}", json.dumps(value) if isinstance(value, list | dict | bool) else str(value)]
    return found


def training(arguments, name, trainer, config, options, after=None, until=None):
    """The Job of a training run."""
    common = {"model": arguments.model, "output_dir": arguments.output / name}
    common |= {"train.dtype": arguments.dtype, "train.save_strategy": "no", "train.report_to": "none"}
    common |= {"train.callbacks": [f"{Path(__file__).resolve()}:TimeLimit"], "train.gradient_checkpointing": False}
    until = arguments.until if until is None else until
    return Job(name, trainer, config, common | options, after, until, f"{name}/final")


def start(job, folder):
    """The process of a Job, whose output goes to FOLDER/name.log."""
    command = [sys.executable, "-m", "rlnumba", *job.arguments()]
    with open(folder / f"{job.name}.log", "w") as file:
        file.write(shlex.join(["rlnumba", *job.arguments()]) + "\n")
        file.flush()
        environment = os.environ | {UNTIL: str(job.until)}
        if job.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(job.gpu)
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def run_jobs(folder, jobs, at_once):
    """Run Jobs, at most `at_once` at a time, each after the one that it waits for: names of those that are done, set.

    One that fails, or whose time is up before it begins, is a line on the console.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = {job.name for job in jobs if (folder / job.result).exists()}
    waiting, running = [job for job in jobs if job.name not in done], []
    while waiting or running:
        for each in list(running):
            job, process, began = each
            late = time.monotonic() - job.until - GRACE_S
            if process.poll() is None and late > 0:
                (process.kill if late > KILL_S else process.terminate)()
            elif process.poll() is not None:
                running.remove(each)
                if report_end(folder, job, process.returncode, time.monotonic() - began):
                    done.add(job.name)
        unfinished = {job.name for job in waiting} | {job.name for job, _, _ in running}
        for job in list(waiting):
            if job.after not in unfinished and (job.after not in (None, *done) or time.monotonic() >= job.until):
                waiting.remove(job)
                print(f"{job.name}: not run", flush=True)
            elif job.after not in unfinished and len(running) < at_once:
                waiting.remove(job)
                running.append((job, start(job, folder), time.monotonic()))
        time.sleep(0.05)
    return done


def report_end(folder, job, code, seconds):
    """Print a line on a job that has ended; whether its result is there: bool."""
    is_there = (folder / job.result).exists()
    lines = (folder / f"{job.name}.log").read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    print(
        f"{job.name}: {seconds:.0f} s" + ("" if code == 0 and is_there else f", exit code {code}: {last}"), flush=True
    )
    return is_there


def arithmetic(arguments, seed=0):
    """The options that all runs on examples/arithmetic have."""
    return {
        "seed": seed,
        "train.max_steps": arguments.steps,
        "train.per_device_train_batch_size": arguments.batch,
        "train.eval_on_start": True,
        "train.eval_steps": arguments.eval_steps,
        "eval.temperature": 0.0,
        "eval.num_generations": 1,
        "engine.max_model_len": 256,
        "engine.gpu_memory_utilization": arguments.gpu_memory_utilization,
    }


def adapter_jobs(arguments):
    """GRPO with [lora]: a run for each seed and each format of the base, seed by seed."""
    jobs = []
    for seed in arguments.seeds:
        for form in ("bf16", *arguments.types):
            options = arithmetic(arguments, seed)
            if form != "bf16":
                # 576 columns are no multiple of int4's default, 128.
                bits = 8 if form in ("int8", "fp8") else 4
                options |= {"quantization.bits": bits, "quantization.type": form, "quantization.group_size": 64}
            jobs.append(
                training(arguments, f"adapter-{form}-{seed}", "grpo", EXAMPLES / "arithmetic_lora.toml", options)
            )
    return jobs


def distill_jobs(arguments):
    """GRPO, distillation of its model, and self-distillation; those that wait for no other one first."""
    config, options = EXAMPLES / "arithmetic_grpo.toml", arithmetic(arguments)
    distilling = options | {"train.num_generations": 1, "train.learning_rate": arguments.learning_rate}
    teacher = {"teacher.model": arguments.output / "arithmetic-grpo" / "final"}
    shown = {"data.train": arguments.output / "shown.jsonl", "teacher.prompt_column": "shown"}
    moving = {"train.sync_ref_model": True, "train.ref_model_mixup_alpha": 0.05, "train.ref_model_sync_steps": 1}
    described = [
        ("arithmetic-grpo", "grpo", options, None),
        ("arithmetic-self-ema", "distill", distilling | shown | moving, None),
        ("arithmetic-self", "distill", distilling | shown, None),
        ("arithmetic-self-jsd", "distill", distilling | shown | {"train.beta": 0.5}, None),
        ("arithmetic-distill", "distill", distilling | teacher, "arithmetic-grpo"),
        ("arithmetic-teacher", "grpo", options | teacher, "arithmetic-grpo"),
    ]
    return [training(arguments, name, trainer, config, own, after) for name, trainer, own, after in described]


def with_demonstration(row):
    """A row of examples/arithmetic with the column `shown`: two solved problems, then its own with the solution.

    The untrained model answers 39 of 40 of these prompts right at temperature 1, and 1 of 40 without the solution.
    """
    question = row["prompt"][0]["content"]
    problem = question.removeprefix("What is ").split("?")[0]
    shown = []
    for other, answer in (("5 + 4", 9), ("31 - 11", 20)):
        asked = f"{other} = {answer}. " + question.replace(problem, other)
        shown += [{"role": "user", "content": asked}, {"role": "assistant", "content": str(answer)}]
    return row | {"shown": [*shown, {"role": "user", "content": f"{problem} = {row['answer']}. {question}"}]}


def adapters(arguments):
    """`adapters`: the runs, and their table."""
    from learning_curves import print_adapters

    run_jobs(arguments.output, adapter_jobs(arguments), arguments.at_once)
    print_adapters(arguments.output)


def distill(arguments):
    """`distill`: the runs, and a row of each."""
    from learning_curves import print_distilled

    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = map(json.loads, (EXAMPLES / "arithmetic" / "train.jsonl").read_text().splitlines())
    lines = [json.dumps(with_demonstration(row)) + "\n" for row in rows]
    (arguments.output / "shown.jsonl").write_text("".join(lines))
    run_jobs(arguments.output, distill_jobs(arguments), arguments.at_once)
    print_distilled(arguments.output)


def gsm8k_options(arguments):
    """(keys of data, keys of sampling) that the phases of `gsm8k` share: dicts."""
    data = {"data.train": arguments.data / "train.jsonl", "data.eval": arguments.output / "gsm8k-test.jsonl"}
    data |= {"data.prompt_template": '{question} Think step by step, then write "#### " and the number.'}
    sampling = {
        "data.chat_template_kwargs": "{}",
        "train.num_generations": 8,
        "train.per_device_train_batch_size": max(8, arguments.batch // 4),
        "train.gradient_accumulation_steps": arguments.batch // max(8, arguments.batch // 4),
        "train.max_completion_length": arguments.tokens,
        "engine.max_model_len": 512 + arguments.tokens,
        "eval.temperature": 0.0,
        "engine.gpu_memory_utilization": arguments.gpu_memory_utilization,
    }
    return data, sampling


def sft_jobs(arguments, until):
    """The supervised run, which saves its model after each epoch, and the accuracy of the untrained model."""
    data, sampling = gsm8k_options(arguments)
    options = data | {
        "train.max_length": 768,
        "train.packing": False,
        "train.per_device_train_batch_size": arguments.sft_batch,
        "train.num_train_epochs": arguments.epochs,
        "train.max_steps": arguments.sft_steps,
        "train.learning_rate": arguments.sft_learning_rate,
        "train.eval_steps": None,
        "train.eval_strategy": "epoch",
        "train.save_strategy": "epoch",
        "train.save_only_model": True,
        "train.save_total_limit": None,
    }
    sft = training(arguments, "gsm8k-sft", "sft", EXAMPLES / "sft.toml", options, until=until)
    return [sft._replace(gpu=gpu_of(arguments, 0)), evaluation(arguments, 0, arguments.model, data | sampling)]


def evaluation(arguments, step, model, options):
    """The Job that evaluates a folder of the model after so many supervised steps."""
    name = f"gsm8k-eval-{step}"
    options = {"trainer": "grpo", "dtype": arguments.dtype, "model": model, "output": arguments.output / name} | options
    config, result = EXAMPLES / "gsm8k_grpo.toml", f"{name}/metrics.json"
    return Job(name, "eval", config, options, None, arguments.until, result, gpu_of(arguments, -1))


def grpo_jobs(arguments, until):
    """GRPO from the supervised model, a run a seed, and the accuracy of the checkpoints on the way to it."""
    data, sampling = gsm8k_options(arguments)
    options = data | sampling
    own = {
        "model": arguments.output / "gsm8k-sft" / "final",
        "train.max_steps": arguments.steps,
        "train.learning_rate": arguments.learning_rate,
        "train.eval_on_start": True,
        "train.eval_steps": arguments.eval_steps,
        "train.save_total_limit": None,
        "train.log_completions": False,
        "train.num_completions_to_print": None,
    }
    config, jobs = EXAMPLES / "gsm8k_grpo.toml", []
    for index, seed in enumerate(arguments.seeds):
        job = training(arguments, f"gsm8k-grpo-{seed}", "grpo", config, options | own | {"seed": seed}, until=until)
        jobs.append(job._replace(gpu=gpu_of(arguments, index)))
    folders = (arguments.output / "gsm8k-sft" / "checkpoints").glob("step-*")
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in folders)
    # The last one's accuracy is that of GRPO's step 0.
    for step in steps[:-1]:
        model = arguments.output / "gsm8k-sft" / "checkpoints" / f"step-{step}"
        jobs.append(evaluation(arguments, step, model, options))
    return jobs


def gpu_of(arguments, index):
    """The GPU of the index-th run among --gpus, or None without that option."""
    return arguments.gpus[index % len(arguments.gpus)] if arguments.gpus else None


def gsm8k(arguments):
    """`gsm8k`: the supervised run, then GRPO, and a row of each."""
    from learning_curves import print_gsm8k

    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = (arguments.data / "test.jsonl").read_text().splitlines(keepends=True)[: arguments.eval_rows]
    (arguments.output / "gsm8k-test.jsonl").write_text("".join(lines))
    until = min(arguments.until, time.monotonic() + arguments.sft_seconds)
    done = run_jobs(arguments.output, sft_jobs(arguments, until), at_once=2)
    if "gsm8k-sft" in done:
        until = min(arguments.until, time.monotonic() + arguments.grpo_seconds)
        run_jobs(arguments.output, grpo_jobs(arguments, until), at_once=len(arguments.seeds) + 1)
    print_gsm8k(arguments.output)


def draw(arguments):
    """`draw`: the pictures and rows of the runs that are in a folder."""
    import learning_curves as curves

    for name, make in curves.pictures(arguments.folder).items():
        make().savefig(arguments.folder / f"{name}.png", dpi=110, facecolor="white")
    for print_rows in (curves.print_adapters, curves.print_distilled, curves.print_gsm8k):
        print_rows(arguments.folder)
    if arguments.keep is not None:
        curves.keep(arguments.folder, arguments.keep)


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    parts = {}
    for function in (adapters, distill, gsm8k):
        part = parts[function.__name__] = commands.add_parser(function.__name__)
        part.set_defaults(function=function)
        part.add_argument("--model", type=Path, required=True)
        part.add_argument("--output", type=Path, required=True)
        part.add_argument("--seconds", type=float, default=math.inf, help="of the whole command")
        part.add_argument("--dtype", default="bfloat16")
        part.add_argument("--gpu-memory-utilization", type=float, default=0.05, help="of the engine of each run")
        part.add_argument("--steps", type=int, default=1000 if function is gsm8k else 150)
        part.add_argument("--batch", type=int, default=256 if function is gsm8k else 128, help="completions of a step")
        part.add_argument("--eval-steps", type=int, default=20 if function is gsm8k else 10)
        if function is not gsm8k:
            part.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parts["adapters"].add_argument("--types", nargs="*", default=["nf4"], choices=("nf4", "int4", "int8", "fp8"))
    parts["adapters"].add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parts["distill"].add_argument("--learning-rate", type=float, default=3e-5, help="of distillation; GRPO's is 1e-5")
    part = parts["gsm8k"]
    part.add_argument("--data", type=Path, required=True)
    part.add_argument("--seeds", type=int, nargs="+", default=[0], help="of GRPO")
    part.add_argument("--gpus", type=int, nargs="+", help="their numbers, which the runs take turns at")
    part.add_argument("--learning-rate", type=float, default=1e-5, help="of GRPO")
    part.add_argument("--tokens", type=int, default=256, help="most of a completion")
    part.add_argument("--eval-rows", type=int, default=640)
    part.add_argument("--epochs", type=float, default=4.0, help="of the supervised run")
    part.add_argument("--sft-steps", type=int, default=-1, help="in place of --epochs")
    part.add_argument("--sft-batch", type=int, default=32)
    part.add_argument("--sft-learning-rate", type=float, default=2e-4)
    part.add_argument("--sft-seconds", type=float, default=math.inf)
    part.add_argument("--grpo-seconds", type=float, default=math.inf)
    part = commands.add_parser("draw")
    part.set_defaults(function=draw)
    part.add_argument("folder", type=Path)
    part.add_argument("--keep", type=Path, metavar="FOLDER", help="write what pictures need of the runs there")
    found = parser.parse_args(arguments)
    for name in ("model", "output", "data"):
        if hasattr(found, name):
            setattr(found, name, getattr(found, name).resolve())
    found.until = time.monotonic() + getattr(found, "seconds", math.inf)
    return found


def main(arguments):
    arguments.function(arguments)


if __name__ == "__main__":
    main(parse())
