"""Tokens a second of the inference engine, with every completion generated to its full length.

    python bench/engine.py                           Qwen3-0.6B's shape on a GPU, a 15M model elsewhere; random weights
    python bench/engine.py --model FOLDER            the weights of a folder
    python bench/engine.py --workloads single,mixed  some of the workloads
    python bench/engine.py --idle                    with the share of decode in which the GPU waits for the host
    python bench/engine.py --host-delay 0.5          with a host that takes half as long again for each step

A workload is run once to warm up (`first s`, with compilation and graph capture), then --repeat times, whose median is
printed. Output tokens a second, prefill included. `floor` is the physical limit: weights and the KV of the
contexts read once a step, or the FLOP of the GEMMs where they take longer, plus the FLOP of the prompts, at the rates
of an H200 below.
"""

import argparse
import statistics
import time

import numpy as np
from report import row
from shapes import random_model

from rlnumba.config import EngineConfig
from rlnumba.engine import LLM, SamplingParams, core
from rlnumba.engine.runner import WHOLE, Runner
from rlnumba.kernels.attention.paged import PrefixSharing
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device

# One H200: a device copy (read + write counted) and a large bf16 GEMM of random data.
BYTES_PER_S, FLOP_PER_S = 4.3e12, 700e12

# name: (requests, completions of each, prompt tokens, output tokens, temperature); a pair is a range to draw from.
WORKLOADS = {
    "mixed": (256, 1, (100, 1024), (100, 1024), 0.6),
    "fixed 256": (256, 1, 128, 512, 1.0),
    "fixed 64": (64, 1, 128, 512, 1.0),
    "fixed 8": (8, 1, 128, 512, 1.0),
    "single": (1, 1, 128, 512, 1.0),
    # As in GRPO: decode reads a prompt's keys once for all its completions (with --no-groups once for each).
    "groups": (64, 8, 2049, 256, 1.0),
    "small 16": (16, 1, 8, 64, 1.0),
    "small 1": (1, 1, 8, 64, 1.0),
    "small groups": (4, 8, 100, 16, 1.0),
}
# Tokens a second that an H200 should reach.
BARS = {"mixed": 28_000, "fixed 256": 60_000, "fixed 64": 42_000, "fixed 8": 9_000, "single": 1_200}
ON_GPU, ON_CPU = ("mixed", "fixed 256", "fixed 64", "fixed 8", "single"), ("small 16", "small 1")


def workload(name, vocabulary, limit):
    """(prompts, params) of a workload; lengths are at most half of the model's limit."""
    requests, completions, prompt, output, temperature = WORKLOADS[name]
    generator = np.random.default_rng(0)

    def lengths(spec):
        low, high = spec if isinstance(spec, tuple) else (spec, spec)
        return np.minimum(generator.integers(low, high + 1, requests), limit // 2)

    prompts = [generator.integers(0, vocabulary, length).tolist() for length in lengths(prompt)]
    params = [
        SamplingParams(temperature=temperature, max_tokens=int(length), ignore_eos=True, n=completions)
        for length in lengths(output)
    ]
    return prompts, params


def floor_s(config, weights_bytes, itemsize, prompts, params):
    """A lower bound of any engine's seconds on a GPU with the rates above, without prefix sharing."""
    starts = np.array([len(prompt) for prompt, p in zip(prompts, params, strict=True) for _ in range(p.n)])
    outputs = np.array([p.max_tokens for p in params for _ in range(p.n)])
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    flop = 2 * weights_bytes / itemsize
    seconds = flop * sum(map(len, prompts)) / FLOP_PER_S
    for step in range(outputs.max()):
        active = outputs > step
        read = weights_bytes + kv_bytes * (starts[active] + step).sum()
        seconds += max(read / BYTES_PER_S, flop * active.sum() / FLOP_PER_S)
    return seconds


class TimedRunner(Runner):
    """A Runner that records an event before and after each decode step on the GPU."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # (whether the device goes on from the step before, begin, end) of each decode step.
        self.laps = []

    def launch(self, part=WHOLE):
        begin = self.context.stream.record(device.xp().cuda.Event())
        super().launch(part)
        self.laps.append((self.num_launched > 1, begin, self.context.stream.record(device.xp().cuda.Event())))

    def idle_shares(self):
        """Shares of time: the GPU waits in steady decode; it computes no decode step from the first to the last one."""
        between = device.xp().cuda.get_elapsed_time
        self.synchronize()
        busy = sum(between(begin, end) for _, begin, end in self.laps)
        steady = [(before[2], lap) for before, lap in zip(self.laps, self.laps[1:], strict=False) if lap[0]]
        waited = sum(between(end, lap[1]) for end, lap in steady)
        computed = sum(between(*lap[1:]) for _, lap in steady)
        return waited / (waited + computed), 1 - busy / between(self.laps[0][1], self.laps[-1][2])


def slow_down(engine, factor):
    """After each step, loop for `factor` times what the host had to do in it: all but waiting for the device."""
    step, wait, waited = engine.step, engine.runner.wait, [0.0]

    def timed_wait(number):
        started = time.perf_counter()
        results = wait(number)
        waited[0] = time.perf_counter() - started
        return results

    def slow_step():
        waited[0], started = 0.0, time.perf_counter()
        output = step()
        now = time.perf_counter()
        until = now + factor * (now - started - waited[0])
        while time.perf_counter() < until:
            pass
        return output

    engine.step, engine.runner.wait = slow_step, timed_wait


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--workloads", help=f"comma-separated, of: {', '.join(WORKLOADS)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--no-groups", action="store_true", help="decode reads a shared prompt for each completion")
    parser.add_argument("--no-async-scheduling", action="store_true", help="each step waits for the host")
    parser.add_argument("--host-delay", type=float, default=0.0, metavar="F", help="slow the host down by this share")
    parser.add_argument("--idle", action="store_true", help="the share of time in which the GPU waits for the host")
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    if arguments.model:
        model = load_model(arguments.model, arguments.dtype)
    else:
        model = random_model(dtype=arguments.dtype)
    if arguments.no_groups:
        core.sharing = lambda *heads: PrefixSharing((), 0)
    if arguments.idle:
        if not on_gpu:
            parser.error("--idle needs a GPU")
        core.Runner = TimedRunner
    names = arguments.workloads.split(",") if arguments.workloads else ON_GPU if on_gpu else ON_CPU

    print(device.describe())
    print(f"{'workload':12} {'tokens':>8} {'first s':>8} {'s':>8} {'tok/s':>9} {'floor tok/s':>12} {'share':>6}")
    for name in names:
        llm = LLM(
            model,
            None,
            EngineConfig(
                gpu_memory_utilization=0.9,
                enforce_eager=arguments.enforce_eager,
                async_scheduling=not arguments.no_async_scheduling,
                max_num_batched_tokens=arguments.max_num_batched_tokens,
                # All at once, so that nearly all steps are decode steps.
                max_num_seqs=512 if name == "groups" else EngineConfig.max_num_seqs,
            ),
        )
        if arguments.host_delay:
            slow_down(llm.engine, arguments.host_delay)
        prompts, params = workload(name, model.config.vocab_size, llm.max_model_len)
        seconds = []
        for version in range(1 + arguments.repeat):
            # With a new version, prompts cached by the last repetition do not match.
            llm.update_weights(version)
            if arguments.idle:
                llm.engine.runner.laps.clear()
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds.append(time.perf_counter() - started)
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
        assert tokens == sum(p.max_tokens * p.n for p in params)
        median = statistics.median(seconds[1:])
        line = f"{name:12} {tokens:8} {seconds[0]:8.2f} {median:8.3f} {tokens / median:9.0f}"
        if on_gpu:
            floor = floor_s(model.config, model.weights.flat.nbytes, model.dtype.itemsize, prompts, params)
            line += f" {tokens / floor:12.0f} {floor / median:6.1%}"
        print(line, flush=True)
        what = f"{name}{' not shared' if arguments.no_groups else ''}"
        what += f", host slower by {arguments.host_delay:.0%}" if arguments.host_delay else ""
        what += ", steps wait for the host" if arguments.no_async_scheduling else ""
        if arguments.idle:
            steady, whole = llm.engine.runner.idle_shares()
            row(f"{what}: GPU idle in steady decode, and not in a decode step", f"{steady:.1%}, {whole:.1%}", "2 %")
        row(
            f"{what}, {tokens} tokens",
            f"{tokens / median:.0f} tok/s",
            BARS.get(name, "") if on_gpu else "",
        )
        llm.sleep()


if __name__ == "__main__":
    main()
