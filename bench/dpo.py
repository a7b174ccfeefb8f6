"""A DPO step by phase, the SFT step of the same tokens, and DPO's memory by region.

    python bench/dpo.py                          8 pairs of 512 tokens a side, then 4 of 2048
    python bench/dpo.py 4x2048 --lora 16         the reference is the adapter switched off

Qwen3-0.6B's shape with random weights on a GPU, a 15M model elsewhere. Random tokens, of which the first quarter of
each side is the prompt; both steps train on the rest. All pairs are one micro-batch. Medians of --repeat steps after
one that compiles; the phases are those of further steps, with a synchronisation after each. DPO needs a forward more
than SFT, of three passes over the layers (a backward counts for two), and SFT makes the gradient of the head while it
computes the log-probs. Bar: 1.40 times SFT's step. With --lora a backward has no gradients of the weights and counts
for one pass, so that the third pass weighs more.
"""

import argparse
import contextlib
import gc
import statistics
import time

import numpy as np
from grpo import synchronized
from report import row
from shapes import SHAPES, add_adapter, copy_of, random_model
from train import print_memory

from rlnumba.config import DPOConfig, SFTConfig
from rlnumba.data import TokenSequence
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device, memory
from rlnumba.trainers import dpo, sft

BAR = 1.40
LEARNING_RATE = 1e-6


class PhasedPolicy(Policy):
    """A Policy whose passes are phases of `clock`, where that is a Clock."""

    clock = None

    def phase(self, name):
        return contextlib.nullcontext() if self.clock is None else synchronized(self.clock, name)

    def logprobs(self, *arrays, **options):
        with self.phase("reference"):
            super().logprobs(*arrays, **options)

    def forward(self, *arrays):
        with self.phase("forward"):
            return super().forward(*arrays)

    def backward(self, *arrays):
        with self.phase("backward"):
            super().backward(*arrays)

    def step(self, learning_rate):
        with self.phase("optimizer"):
            return super().step(learning_rate)


def workload(text):
    """(pairs, tokens of a side) of an argument such as 8x512."""
    numbers = text.split("x")
    if len(numbers) != 2 or not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be PAIRSxTOKENS, got {text!r}")
    return tuple(map(int, numbers))


def random_pairs(count, length, vocabulary):
    """Pairs of random completions, each after a prompt of a quarter of the tokens."""
    generator, prompt = np.random.default_rng(0), length // 4
    ids = generator.integers(0, vocabulary, (count, 2, length), dtype=np.int32)
    ids[:, 1, :prompt] = ids[:, 0, :prompt]
    mask = np.arange(length) >= prompt
    return [dpo.ChosenRejected(*(TokenSequence(side, mask.copy()) for side in pair)) for pair in ids]


def median_s(work, repeat):
    """(seconds of the first call, median of the others)."""
    seconds = []
    for _ in range(1 + repeat):
        device.synchronize()
        started = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[0], statistics.median(seconds[1:])


def measure_sft(model, pairs, arguments):
    """Median seconds of SFT's step on both sides of the pairs; its memory is freed."""
    rows = [[sequence] for pair in pairs for sequence in pair.sequences]
    train = SFTConfig(per_device_train_batch_size=len(rows), activation_memory=arguments.activations)
    policy = Policy(model, train)
    return median_s(lambda: sft.train_step(policy, rows, LEARNING_RATE), arguments.repeat)[1]


def measure_dpo(model, pairs, arguments):
    """Median seconds of DPO's step: (step, {phase: seconds}); its memory is freed."""
    reference = model.without_adapter() if model.adapter else copy_of(model)
    train = DPOConfig(per_device_train_batch_size=len(pairs), activation_memory=arguments.activations)
    policy = PhasedPolicy(model, train, reference)
    first, step = median_s(lambda: dpo.train_step(policy, pairs, LEARNING_RATE), arguments.repeat)
    print(f"first s {first:.1f}")
    measured = []
    for _ in range(arguments.repeat):
        policy.clock = Clock()
        dpo.train_step(policy, pairs, LEARNING_RATE)
        measured.append(policy.clock.seconds)
    names = [name.removeprefix("time/") for name in measured[0]]
    return step, {name: statistics.median(seconds[f"time/{name}"] for seconds in measured) for name in names}


def free():
    """Give the memory of what is no longer used back to the device, and count peaks anew."""
    gc.collect()
    if device.name() == "cuda":
        device.xp().get_default_memory_pool().free_all_blocks()
    memory.reset_peaks()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", type=workload, help="PAIRSxTOKENS; default 8x512 4x2048")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="of the random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--activations", choices=("full", "selective", "minimal"), default="full", help="that are kept")
    parser.add_argument("--lora", type=int, help="rank of an adapter on all linear layers, which alone is trained")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    model = random_model(arguments.shape, arguments.dtype)
    if arguments.lora:
        add_adapter(model, arguments.lora)
    for count, length in arguments.workloads or ([(8, 512), (4, 2048)] if on_gpu else [(2, 64)]):
        pairs = random_pairs(count, length, model.config.vocab_size)
        of_sft = measure_sft(model, pairs, arguments)
        free()
        step, phases = measure_dpo(model, pairs, arguments)
        options = f", LoRA {arguments.lora}" if arguments.lora else ""
        options += "" if arguments.activations == "full" else f", activation_memory {arguments.activations}"
        tokens = 2 * count * length
        result = f"{step / of_sft:.2f} x SFT's {of_sft * 1e3:.1f} ms, {tokens / step:.0f} tok/s; "
        result += "ms: " + ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in phases.items())
        row(
            f"DPO step, {count} pairs x 2 x {length} tokens{options}",
            result,
            f"{BAR:.2f} x" if on_gpu and not arguments.lora else "",
        )
        print_memory()
        free()


if __name__ == "__main__":
    main()
