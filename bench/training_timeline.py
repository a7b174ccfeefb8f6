"""Where the time of a training step goes: all launches of each kernel together, and how long the GPU waits.

    python bench/training_timeline.py --shape qwen3-0.6b
    python bench/training_timeline.py --shape qwen3-0.6b --unshared
    python bench/training_timeline.py --shape qwen3.5-4b --layers 8 --batch 8 8 1024 512 --lora 16

The training phase of a GRPO step on random tokens and random weights, as shared_prefixes.py has it; a shape that does
not fit with all of its activations gets fewer --layers, of which the head is then a larger part. Rows say milliseconds
of a step, how often a kernel was launched, and its share of the time in which kernels ran. Kernels overlap by little
there, so that what is left of the step is the time in which none ran. By torch's profiler, which needs torch and a GPU.
"""

import importlib.util
from collections import defaultdict
from statistics import median
from types import SimpleNamespace

from report import row
from shapes import add_adapter, random_model, shape_parser
from shared_prefixes import GRPOStep
from step_timeline import kernels_of

from rlnumba.runtime import device

# Steps before the profile: the first compiles, the second captures graphs of small micro-batches, the third replays.
WARMUP = 3
# Kernels with a smaller share of a step are one row.
LEAST_SHARE = 0.005


def profiled(step, count):
    """The kernels of `count` steps as kernels_of has them, of each step in a list of its own."""
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(count):
        device.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step.take()
            device.synchronize()
        found.append(kernels_of(profiler.profiler.kineto_results.events()))
    return found


def busy_ms(kernels):
    """Milliseconds in which at least one of the kernels ran."""
    nanoseconds, until = 0, 0
    for start, end, _ in kernels:
        nanoseconds += max(end - max(start, until), 0)
        until = max(until, end)
    return nanoseconds / 1e6


def by_name(steps):
    """[(name, launches, milliseconds)] of a step, medians of all steps, the longest first. steps: as of `profiled`."""
    milliseconds, launches = defaultdict(lambda: [0.0] * len(steps)), defaultdict(lambda: [0] * len(steps))
    for index, kernels in enumerate(steps):
        for start, end, name in kernels:
            milliseconds[name][index] += (end - start) / 1e6
            launches[name][index] += 1
    found = [(name, median(launches[name]), median(times)) for name, times in milliseconds.items()]
    return sorted(found, key=lambda each: -each[2])


def print_rows(what, steps):
    """A row for a step, and one for each kernel."""
    whole = median((kernels[-1][1] - kernels[0][0]) / 1e6 for kernels in steps)
    busy = median(map(busy_ms, steps))
    row(f"{what}: a step with the profiler", f"{whole:.1f} ms, in {busy:.1f} of which a kernel ran")
    names = by_name(steps)
    total, others = sum(ms for _, _, ms in names), 0.0
    for name, launches, ms in names:
        if ms < LEAST_SHARE * total:
            others += ms
        else:
            row(f"{what}: {name}", f"{ms:.2f} ms, {launches:.0f} launches, {ms / total:.1%}")
    row(f"{what}: all others", f"{others:.2f} ms, {others / total:.1%}")


def main():
    parser = shape_parser(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs=4, default=(8, 8, 128, 512), help="as of shared_prefixes.py")
    parser.add_argument("--tokens", type=int, default=40960, help="of a micro-batch, at most")
    parser.add_argument("--lora", type=int, help="rank of an adapter of all linear layers, which alone is trained")
    parser.add_argument("--unshared", action="store_true", help="each completion has its prompt, not a group one")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    if device.select(arguments.device) != "cuda":
        parser.error("needs a GPU")
    if importlib.util.find_spec("torch") is None:
        parser.error("needs torch, for its profiler")
    model = random_model(arguments.shape, "bfloat16", layers=arguments.layers)
    if arguments.lora:
        add_adapter(model, arguments.lora)
    shares, limits = "never" if arguments.unshared else "auto", SimpleNamespace(common=0, tokens=arguments.tokens)
    step = GRPOStep(model, shares, arguments.batch, limits)
    with step.policy.context.use():
        for _ in range(WARMUP):
            step.take()
        steps = profiled(step, arguments.repeat)
    layers = f", {arguments.layers} layers" if arguments.layers else ""
    adapter = f", adapter of rank {arguments.lora}" if arguments.lora else ""
    prompts = ", each with its prompt" if arguments.unshared else ""
    batch = "{} x {}, {} + {} tokens".format(*arguments.batch)
    print_rows(f"{arguments.shape}{layers}{adapter}, {batch}{prompts}", steps)


if __name__ == "__main__":
    main()
