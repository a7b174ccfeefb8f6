"""The same GRPO steps on 1, 2 and 4 GPUs: step time by phase, and what share of the ideal speed the GPUs reach.

    python bench/scaling.py --gpus 1 2 4
    python bench/scaling.py --gpus 4 --shape qwen3-8b --prompts 8 --activations minimal --steps 3 --warmup 1

Steps of 64 x 8 completions of 512 tokens to prompts of 128, Qwen3-0.6B's shape, random weights, the characters of
examples/quickstart as tokens and arbitrary rewards. Whole runs with their files, each without its first --warmup steps.
Efficiency is the time on one GPU over the number of GPUs times theirs; final weights are compared by their hashes.
On the cpu device a GPU is a process.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from asynchronous import new_model, run_of, write_prompts
from report import row
from shapes import SHAPES

from rlnumba.config import DeployConfig
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.runtime import device
from rlnumba.trainers.grpo import run_grpo


def arguments_of(parser):
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="numbers of them, the first is compared")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--completion-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--activations", choices=("full", "selective", "minimal"), default="full")
    parser.add_argument("--model", type=Path, help="folder of a model, with its tokenizer, in place of random weights")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    return parser.parse_args()


def train_rank(communicator, run):
    """What each rank does."""
    run_grpo(run, communicator=communicator)


def measure(run, warmup):
    """Train: (median seconds of a step and of its phases after the first `warmup`: dict, hash of the final weights)."""
    place = placement(run.num_ranks, "--gpus")
    launch(train_rank, run.num_ranks, run.resolved(), **place)
    folder = Path(run.output_dir)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][warmup:]
    found = {
        name: statistics.median(each[name] for each in rows)
        for name in rows[-1]
        if name in ("step_time", "perf/peak_memory") or name.startswith("time/")
    }
    # What rollout and training say of one token: 0 where their bits are equal.
    found["difference"] = max(each["sampling/sampling_logp_difference/max"] for each in rows)
    return found, hash_of(sorted((folder / "final").glob("*.safetensors")))


def hash_of(paths):
    """One hash of several files, in their order."""
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def main():
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    device.select(arguments.device)
    folder = Path(tempfile.mkdtemp())
    dtype = None if arguments.model else new_model(folder / "model", arguments)
    write_prompts(folder / "prompts.jsonl", arguments.prompts * arguments.steps, arguments.prompt_length)
    total = arguments.prompts * arguments.generations
    run, hashes = run_of(folder, arguments, dtype, max_num_seqs=total), set()
    train = dataclasses.replace(run.train, activation_memory=arguments.activations)
    run = dataclasses.replace(run, train=train, model=str(arguments.model or run.model))
    for count in arguments.gpus:
        deploy = DeployConfig(num_train_gpus=count)
        found, final = measure(
            dataclasses.replace(run, output_dir=str(folder / str(count)), deploy=deploy), arguments.warmup
        )
        hashes.add(final)
        if count == arguments.gpus[0]:
            alone_s = found["step_time"] * count
        phases = {name.partition("/")[2]: seconds for name, seconds in found.items() if name.startswith("time/")}
        phases["rest"] = found["step_time"] - sum(phases.values())
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
        efficiency = alone_s / (count * found["step_time"])
        what = f"GRPO step of {arguments.prompts} x {arguments.generations} on {count}"
        memory = f"{found['perf/peak_memory'] / (1 << 30):.1f} GiB on each"
        value = f"{found['step_time']:.3f} s ({phases}), efficiency {efficiency:.3f}, {memory}"
        value += f", sampler difference {found['difference']:g}"
        row(what, value, "0.9" if count > arguments.gpus[0] else "")
    row("final weights", "equal" if len(hashes) == 1 else f"{len(hashes)} different ones")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
