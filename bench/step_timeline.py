"""Where the time of decode steps goes: kernel by kernel on the first GPU, and whether GPUs wait for their host.

    python bench/step_timeline.py --gpus 2 --shape qwen3-8b --layers 12 --sequences 64 --context 1024
    python bench/step_timeline.py --gpus 1 --shape qwen3-0.6b --sequences 64 256 --context 384 --lora 16

Random weights of a shape, cut over --gpus. A row for each kernel of a layer, for what stands before and behind the
layers, and for each GPU: how many steps were launched after it had ended the one before. Kernels overlap, so a row has
the microseconds from the end of the kernel ahead to that of this one, and from its start to its end: medians over
layers and steps, by torch's profiler, which needs torch and makes launches slower. Steps are counted without it. Needs
GPUs.
"""

import argparse
import importlib.util
import re
import shutil
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import shapes
from report import row
from tensor_parallel import on_engine

from rlnumba.config import EngineConfig
from rlnumba.engine import SamplingParams, core
from rlnumba.engine.runner import MAX_IN_FLIGHT, WHOLE, Runner
from rlnumba.model.transformer import load_model
from rlnumba.parallel.tensor_parallel import on_ranks
from rlnumba.runtime import device

# The kernel that ends a step.
LAST = "advance_decode_state"
# Steps of a run, of which the first and the last are not looked at.
STEPS, SKIPPED = 64, 8


class CountingRunner(Runner):
    """A Runner that counts launched steps, and those whose launch came after the GPU had ended the step before."""

    launched = late = 0
    # (late, launched) from count_anew to end_count.
    counted = 0, 0

    @classmethod
    def count_anew(cls):
        cls.launched = cls.late = 0

    @classmethod
    def end_count(cls):
        cls.counted = cls.late, cls.launched

    def launch(self, part=WHOLE):
        before = self.num_launched - 2
        CountingRunner.launched += 1
        if before >= 0 and self.events and self.events[before % MAX_IN_FLIGHT].done:
            CountingRunner.late += 1
        super().launch(part)


def arguments_of(parser):
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="of the model; by default those of the shape")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence in the middle of the steps")
    parser.add_argument("--lora", type=int, help="rank of an adapter of all linear layers, on one GPU")
    arguments = parser.parse_args()
    if arguments.lora and arguments.gpus > 1:
        parser.error("--lora needs --gpus 1")
    return arguments


def write_model(folder, shape, layers):
    """As shapes.write_model, of so many layers."""
    if layers is not None:
        shapes.SHAPES[shape] = shapes.SHAPES[shape] | {"num_hidden_layers": layers}
    shapes.write_model(folder, shape)


def profiled(model, arguments, progress=None):
    """Of each number of sequences (kernels of rank 0, [(late, launched) of each rank]): list; what each rank does."""
    from torch.profiler import ProfilerActivity, profile

    core.Runner, found = CountingRunner, []
    for count in arguments.sequences:
        generator = np.random.default_rng(count)
        length = max(arguments.context - STEPS // 2, 1)
        prompts = [generator.integers(0, model.config.vocab_size, length).tolist() for _ in range(count)]
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True, seed=1)

        def count_then_profile(llm, prompts=prompts, params=params):
            # All of it once before, so that all kernels and graphs are there.
            llm.generate(prompts, params)
            if model.ranks is not None:
                model.ranks.lead("count_anew")
            CountingRunner.count_anew()
            llm.generate(prompts, params)
            if model.ranks is not None:
                model.ranks.lead("end_count")
            CountingRunner.end_count()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                llm.generate(prompts, params)
            return profiler.profiler.kineto_results.events()

        led = {name: getattr(CountingRunner, name) for name in ("count_anew", "end_count")}
        events = on_engine(model, EngineConfig(max_num_seqs=count), count_then_profile, led) or ()
        kernels = kernels_of(events)
        launches = CountingRunner.counted
        launches = [launches] if model.ranks is None else model.ranks.communicator.objects(launches)
        found.append((kernels, launches))
    return found


def kernels_of(events):
    """(ns of its start, of its end, name) of each kernel in the events of torch's profiler, in order: list."""
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), short_name(event.name()))
        for event in events
        if "CUDA" in str(event.device_type())
    )


def short_name(name):
    return re.sub(r".*?(\w+_kernel).*", r"\1", name)[:40]


def profiled_alone(folder, arguments):
    """`profiled` on one GPU."""
    device.select("cuda")
    model = load_model(folder)
    if arguments.lora:
        shapes.add_adapter(model, arguments.lora)
    return profiled(model, arguments)


def steps_of(kernels):
    """Of each decode step its kernels as (us from the end of the kernel ahead, us from start to end, name): list."""
    ends = [i for i, (_, _, name) in enumerate(kernels) if LAST in name]
    steps = []
    for first, last in zip(ends, ends[1:], strict=False):
        step = range(first + 1, last + 1)
        steps.append([((kernels[i][1] - kernels[i - 1][1]) / 1e3, span(kernels[i]), kernels[i][2]) for i in step])
    # Those with the kernels that most have: a few upload blocks, or compute prompts.
    sizes = [len(step) for step in steps]
    usual = max(set(sizes), key=sizes.count)
    return [step for step in steps if len(step) == usual][SKIPPED:-SKIPPED]


def span(kernel):
    start, end, _ = kernel
    return (end - start) / 1e3


def layers_in(names):
    """(index of the first layer's first kernel, kernels of a layer, layers) in the names of a step's kernels."""
    best = 0, len(names), 1
    for first in range(len(names)):
        for size in range(2, (len(names) - first) // 3 + 1):
            period = names[first : first + size]
            if len(set(period)) == 1 or names[first + size : first + 2 * size] != period:
                continue
            count = 1
            while names[first + count * size : first + (count + 1) * size] == period:
                count += 1
            if count > best[2]:
                best = first, size, count
    return best


def print_rows(what, kernels, launches):
    """A row for each kernel of `profiled`, of layers one for all, and for the launches of each GPU."""
    steps = steps_of(kernels)
    names = [name for _, _, name in steps[0]]
    first, size, count = layers_in(names)
    table = defaultdict(list)
    for step in steps:
        for i, (after, inside, name) in enumerate(step):
            layer, at = divmod(i - first, size)
            if i < first or layer >= count:
                place = "before" if i < first else "behind", i
            else:
                place = "layer", first + at
            table[place, name].append((after, inside))
    total = median(sum(after for after, _, _ in step) for step in steps)
    row(f"{what}, a step with the profiler", f"{total:.0f} us, {count} layers of {size} kernels")
    of_layer = sum(median(after for after, _ in values) for (place, _), values in table.items() if place[0] == "layer")
    row(f"{what}, a layer", f"{of_layer:.1f} us")
    for (place, name), values in sorted(table.items(), key=lambda item: item[0][0][1]):
        after, inside = (median(each) for each in zip(*values, strict=True))
        row(f"{what}, {place[0]}, {name}", f"{after:.2f} us after the kernel ahead, {inside:.2f} us in all")
    for name, microseconds in largest(steps):
        row(f"{what}, one of the three largest, {name}", f"{microseconds:.0f} us, {microseconds / total:.0%} of a step")
    for rank, (late, launched) in enumerate(launches):
        row(f"{what}, GPU {rank}", f"{late} of {launched} steps launched after the one before had ended")


def largest(steps, count=3):
    """The kernels that take the most of a step, all layers together: [(name, median microseconds)]."""
    found = defaultdict(list)
    for step in steps:
        sums = defaultdict(float)
        for after, _, name in step:
            sums[name] += after
        for name, microseconds in sums.items():
            found[name].append(microseconds)
    return sorted(((name, median(each)) for name, each in found.items()), key=lambda pair: -pair[1])[:count]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments = arguments_of(parser)
    if device.select("auto") != "cuda":
        parser.error("needs GPUs")
    if importlib.util.find_spec("torch") is None:
        parser.error("needs torch, for its profiler")
    folder = Path(tempfile.mkdtemp())
    shapes.in_own_process(write_model, folder, arguments.shape, arguments.layers)
    if arguments.gpus == 1:
        found = shapes.in_own_process(profiled_alone, folder, arguments)
    else:
        found = on_ranks(profiled, arguments.gpus, partial(load_model, folder), arguments, None)
    for sequences, (kernels, launches) in zip(arguments.sequences, found, strict=True):
        print_rows(f"{sequences} sequences on {arguments.gpus}", kernels, launches)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
