"""Microseconds of one decode step of a model with random weights, replayed as the engine's CUDA graph.

    python bench/decode_step.py                    the workloads that docs/log.md quotes
    python bench/decode_step.py 64x8x2049          64 prompts of 2,049 tokens, 8 completions of each
    python bench/decode_step.py --shape qwen3.5-0.8b 1x1x128
    python bench/decode_step.py --shape qwen3-8b --quantization int4 1x1x128      linear layers in 4 bits
    python bench/decode_step.py --shape qwen3-8b --quantization nf4 --lora 16 64x1x400          and an adapter on them

The step is the REPLAYED-th of a run, in which all sequences decode; each replay computes the same. Beside it the floor:
weights, keys, values and states read once at the speed of a copy, of dense models in 16 bits. Needs a GPU.
"""

import argparse
import statistics

import numpy as np
from harness import copy_gbs, time_us
from report import row
from shapes import SHAPES, add_adapter, random_model
from table_floor import Rates, Work, decode_steps_s

from rlnumba.config import EngineConfig, QuantizationConfig
from rlnumba.engine import LLM, SamplingParams, core
from rlnumba.engine.runner import WHOLE, Runner
from rlnumba.kernels.quantized.formats import FORMATS
from rlnumba.runtime import device

WORKLOADS = ("1x1x128", "8x1x128", "64x1x100", "64x1x400", "64x8x2049")
# In this step the prompts of these workloads are computed and the graph is captured.
REPLAYED, TOKENS = 14, 24


def shape(text):
    """(prompts, completions of each, tokens of a prompt) of an argument such as 64x8x2049."""
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdigit() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"must be PROMPTSxCOMPLETIONSxTOKENS, got {text!r}")
    return tuple(map(int, numbers))


class TimedRunner(Runner):
    """A Runner that times the graph of its REPLAYED-th decode step."""

    num_replays, time_us = 0, None

    def begin(self, step, table):
        number = super().begin(step, table)
        self.num_replays += 1
        if self.num_replays == REPLAYED:
            graph, live = self.decode.graphs[WHOLE].graph, self.decode.arrays["live"]
            # Rows that are not live compute the same again. Their contexts are as long, because nothing has ended them.
            with self.context.use():
                live.fill(0)
            self.time_us = statistics.median(time_us(lambda: graph.launch(self.context.stream), 5) for _ in range(3))
        return number


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", type=shape, default=list(map(shape, WORKLOADS)))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-0.6b", help="of the random weights")
    parser.add_argument("--layers", type=int, help="of the random weights; default: the shape's")
    parser.add_argument("--quantization", choices=tuple(FORMATS), help="format of the linear layers' weights")
    parser.add_argument("--lora", type=int, help="rank of an adapter of all linear layers")
    arguments = parser.parse_args()
    if device.select("auto") != "cuda":
        parser.error("needs a GPU")
    core.Runner = TimedRunner
    quantization = arguments.quantization and QuantizationConfig(type=arguments.quantization)
    model = random_model(arguments.shape, "bfloat16", layers=arguments.layers, quantization=quantization)
    if arguments.lora:
        add_adapter(model, arguments.lora)
    rates = Rates(bytes_per_s=copy_gbs() * 1e9)
    has_floor = not (quantization or arguments.layers or model.config.num_experts)
    for prompts, completions, length in arguments.workloads:
        config = EngineConfig(
            # A step at a time.
            gpu_memory_utilization=0.8, max_num_batched_tokens=8192, max_num_seqs=512, async_scheduling=False
        )  # fmt: skip
        llm = LLM(model, None, config)
        generator = np.random.default_rng(0)
        ids = [generator.integers(0, model.config.vocab_size, length).tolist() for _ in range(prompts)]
        llm.generate(ids, SamplingParams(max_tokens=TOKENS, ignore_eos=True, n=completions))
        shown = f"{llm.engine.runner.time_us:.0f} us"
        if has_floor:
            steps, sequences = np.array([float(REPLAYED)]), prompts * completions
            floor = decode_steps_s(Work(arguments.shape), prompts, sequences, length, steps, rates)[0]
            shown += f", floor {floor * 1e6:.0f} us"
        row(f"decode step, {prompts} x {completions} of {length} tokens", shown)
        del llm


if __name__ == "__main__":
    main()
