"""Asynchronous GRPO against synchronous on as many GPUs, with completions of very different lengths.

    python bench/asynchronous.py --train-gpus 2 --infer-gpus 2          synchronous on 4, asynchronous on 2 + 2

The lengths of groups are log-normal with p90 = 5 x median, at most --completion-length, and the same in both runs.
Random weights of a shape, the characters of examples/quickstart as tokens, and arbitrary rewards. Whole runs with
their files, each without its first --warmup steps, in which asynchronous inference has a head start: median step time,
tokens trained a second, the shares of the time that the trainer waits and that inference decodes, and the age of the
weights. On the cpu device a GPU is a process.
"""

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from report import row
from shapes import SHAPES, in_own_process, write_model

from rlnumba.config import AsyncConfig, DataConfig, DeployConfig, EngineConfig, GRPOConfig, GRPORun, RewardsConfig
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.runtime import device
from rlnumba.sampling import pipeline, samples
from rlnumba.trainers.grpo import run_grpo

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "model"
# ln 5 / 1.2816, the standard normal's 90th percentile: p90 is five times the median.
SIGMA = math.log(5) / 1.2816


def arguments_of(parser):
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--train-gpus", type=int, default=2)
    parser.add_argument("--infer-gpus", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=12, help="tokens")
    parser.add_argument("--completion-length", type=int, default=2048, help="the longest")
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--order", choices=("start", "completion"), default="start", help="of groups in training")
    parser.add_argument("--in-flight", choices=("true", "false"), default="true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6, help="steps that are not counted")
    parser.add_argument("--sync-steps", type=int, help="of the synchronous run, if not as many; 0: without it")
    parser.add_argument("--sync-warmup", type=int, help="of these not counted, if not as many")
    return parser.parse_args()


def median_length(longest):
    """The median of lengths whose 97th percentile is about the longest: int."""
    return max(int(longest / math.exp(1.88 * SIGMA)), 1)


def draw_lengths(longest):
    """Let every group of completions have a length of its own, by its prompt, in this process."""
    distinct_params, median = samples.distinct_params, median_length(longest)

    def with_lengths(prompts, params):
        drawn = [np.random.default_rng(list(prompt)).lognormal(math.log(median), SIGMA) for prompt in prompts]
        limits = [int(min(max(length, 1), longest)) for length in drawn]
        found = zip(distinct_params(prompts, params), limits, strict=True)
        return [dataclasses.replace(each, max_tokens=limit) for each, limit in found]

    for module in samples, pipeline:
        module.distinct_params = with_lengths


def train_rank(communicator, run):
    """What each rank does."""
    draw_lengths(run.train.max_completion_length)
    run_grpo(run, communicator=communicator)


def reward(completion_ids, **columns):
    """Any number that differs within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def new_model(folder, arguments):
    """Write a model of a shape with random weights, whose tokens are those of QUICKSTART: its dtype's name."""
    dtype = in_own_process(write_model, folder, arguments.shape, arguments.device)
    for path in QUICKSTART.glob("tokenizer*"):
        shutil.copy(path, folder)
    return dtype


def write_prompts(path, count, length):
    """Write a file of prompts of so many random characters, each of which is a token."""
    characters = np.random.default_rng(0).integers(97, 123, (count, length)).astype(np.uint8)
    with open(path, "w") as file:
        file.writelines(json.dumps({"prompt": bytes(each).decode()}) + "\n" for each in characters)


def run_of(folder, arguments, dtype, **engine):
    """The GRPORun of a folder's model and prompts on one GPU, with the sizes that a bench was given."""
    train = GRPOConfig(
        num_generations=arguments.generations, per_device_train_batch_size=arguments.micro_batch, dtype=dtype,
        global_batch_size=arguments.prompts * arguments.generations, max_steps=arguments.steps,
        max_completion_length=arguments.completion_length, generation_kwargs={"ignore_eos": True}, report_to=[],
        save_steps=10**6, save_only_model=True, learning_rate=1e-6, gradient_checkpointing=False,
    )  # fmt: skip
    return GRPORun(
        model=str(folder / "model"),
        output_dir=str(folder / "synchronous"),
        data=DataConfig(train=str(folder / "prompts.jsonl")),
        rewards=RewardsConfig(funcs=[f"{__file__}:reward"]),
        train=train,
        engine=EngineConfig(gpu_memory_utilization=arguments.gpu_memory_utilization, **engine),
    )


def measure(run, warmup):
    """Train; medians and means of the metrics of the steps after the first `warmup`: dict."""
    place = placement(run.num_ranks, "--train-gpus")
    launch(train_rank, run.num_ranks, run.resolved(), **place)
    lines = (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][warmup:]

    def mean(name):
        return statistics.mean(each.get(name, 0.0) for each in rows)

    def share(name):
        """The mean over time of a share that every step has of its own time."""
        return sum(each.get(name, 0.0) * each["step_time"] for each in rows) / sum(each["step_time"] for each in rows)

    seconds = statistics.median(each["step_time"] for each in rows)
    tokens = (rows[-1]["num_tokens"] - rows[0]["num_tokens"]) / sum(each["step_time"] for each in rows[1:])
    wait = sum(each.get("wait_for_batch_s", 0.0) for each in rows) / sum(each["step_time"] for each in rows)
    return {
        "seconds": seconds, "tokens_per_s": tokens, "wait": wait,
        "busy": share("infer_utilization"), "idle": share("infer_idle"),
        "age": mean("token_staleness/mean"), "oldest": int(max(each.get("off_policy/max", 0) for each in rows)),
        "sync_s": mean("weight_sync_time_s"),
        "pause_s": mean("weight_pause_time_s"),
    }  # fmt: skip


def main():
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    device.select(arguments.device)
    folder = Path(tempfile.mkdtemp())
    dtype = new_model(folder / "model", arguments)
    write_prompts(folder / "prompts.jsonl", 64 * arguments.prompts, arguments.prompt_length)
    deploy = DeployConfig(num_train_gpus=arguments.train_gpus + arguments.infer_gpus)
    run = dataclasses.replace(run_of(folder, arguments, dtype), deploy=deploy)
    steps, warmup = arguments.steps if arguments.sync_steps is None else arguments.sync_steps, arguments.warmup
    sync_warmup = warmup if arguments.sync_warmup is None else arguments.sync_warmup
    asynchronous = dataclasses.replace(
        run,
        output_dir=str(folder / "asynchronous"),
        deploy=DeployConfig(num_train_gpus=arguments.train_gpus, num_infer_gpus=arguments.infer_gpus),
        asynchronous=AsyncConfig(
            max_staleness=arguments.max_staleness,
            order=arguments.order,
            in_flight_weight_updates=arguments.in_flight == "true",
            queue_maxsize=run.train.global_batch_size * (arguments.max_staleness + 2),
        ),
    )
    found = {}
    if steps:
        synchronous = dataclasses.replace(run, train=dataclasses.replace(run.train, max_steps=steps))
        found["sync"] = measure(synchronous, sync_warmup)
    found["async"] = measure(asynchronous.resolved(), warmup)
    for name, each in found.items():
        values = f"{each['seconds']:.3f} s a step, {each['tokens_per_s']:.0f} tokens/s"
        if name == "async":
            values += (
                f"; trainer waits {each['wait']:.0%}, inference decodes {each['busy']:.0%} of the time and has nothing "
                f"to decode {each['idle']:.0%}; tokens "
                f"{each['age']:.1f} steps old, at most {each['oldest']}; {1e3 * each['sync_s']:.1f} ms to send the "
                "weights, for which decoding "
                f"pauses {1e3 * each['pause_s']:.1f} ms"
            )
        row(f"{name}, groups of {median_length(arguments.completion_length)} tokens in the median", values)
    if steps:
        row("speed of async", f"{found['async']['tokens_per_s'] / found['sync']['tokens_per_s']:.2f} x sync", "1.5")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
