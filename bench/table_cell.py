"""One cell of table.py, in a process of its own: a run of `grpo` of a few steps on random weights.

    python bench/table_cell.py CELL FOLDER OUTPUT [--peer KIND]

FOLDER has the model and the prompts (table.py writes both); OUTPUT gets a line of JSON. With --peer the step is that
of table_peer.py. CELL `ceilings` measures what the GPU can do at most, a copy and a large GEMM.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from asynchronous import run_of
from shapes import SHAPES

from rlnumba.config import DeployConfig, LoraConfig
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.runs import prompt_loop
from rlnumba.runs.planning.fit import available_bytes, fit_to_device, planned_choice
from rlnumba.runs.planning.plan import Planner, gpu_properties
from rlnumba.runtime import device
from rlnumba.runtime.shapes import shapes_only
from rlnumba.trainers.grpo import run_grpo

GENERATIONS, RANK = 8, 16
CEILINGS = "ceilings"
# Keys of [train], the first that fit: those that change the fewest bits of a parameter's state first.
OPTIMIZERS = ({}, {"optim": "adamw_8bit"}, {"optim": "adamw_8bit", "master_weights": False})
MICRO_BATCHES = (40960, 16384, 8192)


class Cell(NamedTuple):
    """shape: a name of SHAPES; tuned: what is trained, "all" or "lora"; completions: those of a step; prompt, length:
    tokens of a prompt and of a completion."""

    shape: str
    tuned: str
    completions: int
    prompt: int
    length: int
    gpus: int

    @property
    def name(self):
        return f"{self.shape}_{self.tuned}_{self.completions}x{self.prompt}+{self.length}_{self.gpus}gpu"

    @property
    def groups(self):
        return self.completions // GENERATIONS

    @classmethod
    def of(cls, name):
        """The Cell of a name. Raises ValueError for text that is none."""
        shape, tuned, work, gpus = name.rsplit("_", 3)
        completions, _, lengths = work.partition("x")
        prompt, _, length = lengths.partition("+")
        return cls(shape, tuned, int(completions), int(prompt), int(length), int(gpus.removesuffix("gpu")))


def run_of_cell(cell, folder, options, keys):
    """The GRPORun of a Cell. folder: has model/ and prompts.jsonl; keys: of [train]."""
    sizes = argparse.Namespace(
        generations=GENERATIONS, micro_batch=cell.completions // cell.gpus, prompts=cell.groups,
        steps=options.warmup + options.steps, completion_length=cell.length,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )  # fmt: skip
    engine = {"max_num_seqs": max(cell.completions // cell.gpus, GENERATIONS)}
    run = run_of(Path(folder), sizes, options.dtype, max_model_len=cell.prompt + cell.length, **engine)
    train = dataclasses.replace(run.train, gradient_checkpointing=None, **keys)
    lora = LoraConfig(r=RANK, target_modules=("all-linear",)) if cell.tuned == "lora" else None
    deploy = DeployConfig(num_train_gpus=cell.gpus)
    return dataclasses.replace(run, output_dir=str(Path(folder) / "run"), train=train, lora=lora, deploy=deploy)


class Planned(NamedTuple):
    """keys of [train], needed bytes, whether they are there, and the line on activations, or None."""

    keys: dict
    needed: int
    fits: bool
    line: str | None


def sharing_of(cell, options, on_gpu):
    """The PrefixRule of a cell's model in training, or None."""
    config, dtype = ModelConfig.from_dict(SHAPES[cell.shape]), options.dtype
    with shapes_only(gpu_properties() if on_gpu else None):
        return Transformer(config, Weights(config, dtype)).prefix_sharing


def equal_parts(cell, most, sharing):
    """Tokens of a micro-batch, so that each GPU of a cell has as many, of whole groups, as far as `most` allows: int.

    sharing: the PrefixRule by which a group's prompt counts once, or None.
    """
    shared = 0 if sharing is None else int(sharing.limits(np.array([cell.prompt]))[0])
    group = shared + GENERATIONS * (cell.prompt - shared + cell.length)
    for parts in range(cell.gpus, cell.groups + 1, cell.gpus):
        if (tokens := -(-cell.groups // parts) * group) <= most:
            return tokens
    return most


def plan_cell(cell, folder, options, gpu_bytes):
    """The Planned of the first keys with which a cell fits GPUs of so many bytes, else of those that need least.

    gpu_bytes: None for the cpu device, where everything fits. Nothing is measured; folder/model needs no weights.
    """
    found, sharing = None, sharing_of(cell, options, gpu_bytes is not None)
    for optimizer in OPTIMIZERS if cell.tuned == "all" else OPTIMIZERS[:1]:
        for tokens in MICRO_BATCHES:
            keys = optimizer | {"max_tokens_per_micro_batch": equal_parts(cell, tokens, sharing)}
            run = run_of_cell(cell, folder, options, keys).resolved()
            planner = Planner(run, gpu_bytes is not None, gpu_bytes or 2**36)
            available = available_bytes(gpu_bytes, gpu_bytes) if gpu_bytes else 2**36
            plan, line = planned_choice(planner, available)
            planned = Planned(keys, plan.needed, plan.needed <= available, line)
            if planned.fits:
                return planned
            found = planned if found is None or planned.needed < found.needed else found
    return found


def train_rank(communicator, run, warmup, warmup_tokens):
    """What each rank does: all steps, and nothing of what follows the last one.

    warmup_tokens: of the completions of the first `warmup` steps; None: as many as of the others.
    """

    def end(loop):
        loop.generations.close()
        loop.writer.flush()

    course_of = prompt_loop.course_of

    def shortened(*arguments):
        course = course_of(*arguments)

        def params_of(step, index):
            params = course.params_of(step, index)
            return params if step >= warmup else dataclasses.replace(params, max_tokens=warmup_tokens)

        return course if warmup_tokens is None else course._replace(params_of=params_of)

    # As in every run of several ranks, and as one of a single rank does by itself.
    run = fit_to_device(run, communicator)
    with patch.object(prompt_loop.PromptLoop, "_finish", end), patch.object(prompt_loop, "course_of", shortened):
        run_grpo(run, communicator=communicator)


def measure(cell, folder, options, keys, warmup_tokens=None):
    """{"seconds": {phase: of each step, a list}, "gib": of each GPU, "difference": nats} of a cell.

    warmup_tokens: of a completion in the steps that are not counted; None: as many as in the others.
    """
    run = run_of_cell(cell, folder, options, keys)
    warmup = options.warmup, warmup_tokens
    launch(train_rank, run.num_ranks, run.resolved(), *warmup, **placement(run.num_ranks, "--gpus"))
    rows = [json.loads(line) for line in (Path(run.output_dir) / "metrics.jsonl").read_text().splitlines()]
    rows = rows[options.warmup :]
    names = ["step_time", *sorted(name for name in rows[-1] if name.startswith("time/"))]
    return {
        "seconds": {name.removeprefix("time/"): [row.get(name, 0.0) for row in rows] for name in names},
        "gib": max(row["perf/peak_memory"] for row in rows) / 2**30,
        "difference": max(row["sampling/sampling_logp_difference/max"] for row in rows),
    }


def ceilings():
    """{"bytes_per_s", "flop_per_s"}: of a copy, and of a GEMM of 8192^3 random float16 by cuBLAS."""
    import cupy
    from harness import copy_gbs, random_array, time_us

    a, b = (random_array(8192, 8192, dtype="float16") for _ in range(2))
    seconds = statistics.median(time_us(lambda: cupy.matmul(a, b)) for _ in range(3)) / 1e6
    return {"bytes_per_s": copy_gbs() * 1e9, "flop_per_s": 2 * 8192**3 / seconds}


def add_options(parser):
    """The arguments that table.py hands on."""
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--warmup", type=int, default=1, help="steps of a cell that are not counted")
    parser.add_argument("--steps", type=int, default=2, help="steps of a cell that are")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cell")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--keys", type=json.loads, default={}, help="of [train], as JSON")
    parser.add_argument("--peer", choices=("transformers", "trl"))
    parser.add_argument("--warmup-tokens", type=int, help="of completions in steps that are not counted, if not all")
    add_options(parser)
    options = parser.parse_args()
    if options.peer:
        import table_peer

        found = table_peer.measure(Cell.of(options.cell), options.folder, options)
    else:
        device.select(options.device)
        arguments = options.folder, options, options.keys, options.warmup_tokens
        found = ceilings() if options.cell == CEILINGS else measure(Cell.of(options.cell), *arguments)
    options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
