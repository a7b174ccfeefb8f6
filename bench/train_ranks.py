"""SFT on 1, 2 and 4 GPUs, as many tokens on each: tokens a second and the memory that a GPU has in use.

    python bench/train_ranks.py --gpus 1 2 4
    python bench/train_ranks.py --gpus 4 --shape qwen3-8b --activations minimal
    python bench/train_ranks.py --gpus 2 --peer          and PyTorch's FSDP2 (bench/train_fsdp2.py) in the same run

Random weights of a shape, the characters of examples/quickstart as tokens, rows of exactly --length tokens, --batch of
them in a micro-batch. Whole runs with their files, each without its first --warmup steps; medians. On the cpu device a
GPU is a process.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import train_fsdp2
from asynchronous import new_model
from report import row
from shapes import SHAPES

from rlnumba.config import DataConfig, DeployConfig, SFTConfig, SFTRun
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.runtime import device
from rlnumba.trainers.sft import run_sft

# Tokens a second of 16,384 tokens a GPU, by shape, number of GPUs and activations.
BARS = {("qwen3-0.6b", 4, "full"): "400,000", ("qwen3-8b", 4, "minimal"): "33,000"}


def arguments_of(parser):
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch, of which each GPU has one")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--activations", choices=("full", "selective", "minimal"), default="full")
    parser.add_argument("--zero-stage", type=int, choices=(2, 3), default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not counted")
    parser.add_argument("--peer", nargs="*", choices=train_fsdp2.FORMS, help="FSDP2, too; default: all forms")
    arguments = parser.parse_args()
    if arguments.peer is not None and arguments.activations == "selective":
        parser.error("--peer has no --activations selective")
    return arguments


def peer_rates(arguments):
    """Tokens a second of FSDP2 at the same sizes, by (GPUs, form), after a row of each: dict, empty without --peer."""
    if arguments.peer is None:
        return {}
    own = {"forms": arguments.peer or list(train_fsdp2.FORMS), "attention": "cudnn"}
    return train_fsdp2.print_rows(argparse.Namespace(**vars(arguments) | own))


def write_rows(path, count, length):
    """Write rows of so many tokens: random characters, each of which is one, and the token that ends the row."""
    characters = np.random.default_rng(0).integers(97, 123, (count, length - 1)).astype(np.uint8)
    with open(path, "w") as file:
        file.writelines(json.dumps({"text": bytes(each).decode()}) + "\n" for each in characters)


def train_rank(communicator, run):
    """What each rank does."""
    run_sft(run, communicator=communicator)


def measure(run, warmup):
    """Train: the metrics of the steps after the first `warmup`, list of dict."""
    place = placement(run.num_ranks, "--gpus")
    launch(train_rank, run.num_ranks, run.resolved(), **place)
    lines = (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][warmup:]


def main():
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    # First, while this process has nothing on the GPU.
    peers = peer_rates(arguments)
    device.select(arguments.device)
    shape = arguments.shape or ("qwen3-0.6b" if device.name() == "cuda" else "stories-15m")
    folder = Path(tempfile.mkdtemp())
    dtype = new_model(folder / "model", arguments)
    write_rows(folder / "rows.jsonl", arguments.batch * max(arguments.gpus) * arguments.steps, arguments.length)
    for count in arguments.gpus:
        train = SFTConfig(
            dtype=dtype, max_steps=arguments.steps, per_device_train_batch_size=arguments.batch,
            global_batch_size=arguments.batch * count, gradient_accumulation_steps=1, max_length=arguments.length,
            activation_memory=arguments.activations, save_steps=10**6, save_only_model=True, report_to=[],
            learning_rate=1e-6,
        )  # fmt: skip
        run = SFTRun(
            model=str(folder / "model"),
            output_dir=str(folder / str(count)),
            data=DataConfig(train=str(folder / "rows.jsonl")),
            train=train,
            deploy=DeployConfig(num_train_gpus=count, zero_stage=arguments.zero_stage),
        )
        rows = measure(run, arguments.warmup)
        seconds = statistics.median(each["step_time"] for each in rows)
        tokens = arguments.batch * arguments.length
        peak = rows[-1]["perf/peak_memory"] / (1 << 30)
        rate = count * tokens / seconds
        value = f"{rate:.0f} tokens/s, {1e3 * seconds:.1f} ms a step, {peak:.1f} GiB on each"
        value += "".join(f"; {rate / peers[key]:.2f} x FSDP2 {key[1]}" for key in peers if key[0] == count)
        bar = BARS.get((shape, count, arguments.activations), "")
        row(f"SFT of {arguments.batch} x {arguments.length} tokens on each of {count}", value, bar)
        shutil.rmtree(folder / str(count))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
