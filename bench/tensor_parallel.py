"""Seconds of a decode step of one model cut over 1, 2 and 4 GPUs, and tokens a second.

    python bench/tensor_parallel.py --gpus 1 2 --shape qwen3-8b --sequences 1 64

Random weights of a shape. A run of --steps steps more than another one takes so many steps longer; both compute the
same prompts before, of a length at which contexts have --context tokens in the middle of the steps. Texts are compared
between the numbers of GPUs. On the cpu device a GPU is a process.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from report import row
from shapes import SHAPES, in_own_process, write_model

from rlnumba.config import EngineConfig
from rlnumba.distributed.tensor_parallel import generate, on_ranks
from rlnumba.engine import LLM, SamplingParams
from rlnumba.model.config import LM_HEAD
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device

# Of the shorter run.
FEW_STEPS = 32
# Milliseconds of a decode step of Qwen3-8B's shape at contexts of 1,024 tokens, by GPUs and sequences.
BARS = {(2, 1): 3.2, (2, 64): 4.9}


def arguments_of(parser):
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: qwen3-0.6b on a GPU, else stories-15m")
    parser.add_argument("--model", type=Path, help="folder of a model of that shape, in place of random weights")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    return parser.parse_args()


def outputs_of(model, config, prompts, params, progress=None):
    """LLM.generate on all ranks of the model; of other ranks than the first, None."""
    if model.ranks is not None:
        return generate(model, None, config, prompts, params, progress)
    return LLM(model, None, config).generate(prompts, params, progress)


def decode(model, arguments, progress):
    """Of each number of sequences (milliseconds of a step, token ids of all): list; what each rank does."""
    found = []
    for count in arguments.sequences:
        generator = np.random.default_rng(count)
        length = max(arguments.context - arguments.steps // 2 - FEW_STEPS, 1)
        prompts = [generator.integers(0, model.config.vocab_size, length).tolist() for _ in range(count)]
        config = EngineConfig(gpu_memory_utilization=arguments.gpu_memory_utilization, max_num_seqs=count)
        taken = []
        # All of it once before, so that all kernels and graphs are there.
        for steps in (FEW_STEPS + arguments.steps, FEW_STEPS, FEW_STEPS + arguments.steps):
            params = SamplingParams(max_tokens=steps, ignore_eos=True, seed=1)
            began = time.perf_counter()
            outputs = outputs_of(model, config, prompts, params, progress)
            taken.append(time.perf_counter() - began)
        ids = [output.completions[0].token_ids for output in outputs or ()]
        found.append((1e3 * (taken[2] - taken[1]) / arguments.steps, ids))
    return found


def decode_alone(folder, arguments):
    """`decode` on one GPU."""
    device.select(arguments.device)
    return decode(load_model(folder), arguments, None)


def main():
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    device.select(arguments.device)
    temporary, texts = Path(tempfile.mkdtemp()), []
    folder = arguments.model or temporary
    if not arguments.model:
        in_own_process(write_model, folder, arguments.shape, arguments.device)
    for count in arguments.gpus:
        if count == 1:
            found = in_own_process(decode_alone, folder, arguments)
        else:
            found = on_ranks(decode, count, folder, None, None, LM_HEAD, arguments, None)
        texts.append([ids for _, ids in found])
        for sequences, (step_ms, _) in zip(arguments.sequences, found, strict=True):
            value = f"{step_ms:.2f} ms, {1e3 * sequences / step_ms:.0f} tokens/s"
            bar = BARS.get((count, sequences), "") if arguments.shape == "qwen3-8b" else ""
            row(f"decode step of {sequences} sequences on {count}", value, bar)
    row("text", "equal" if all(each == texts[0] for each in texts) else "differs")
    shutil.rmtree(temporary)


if __name__ == "__main__":
    main()
