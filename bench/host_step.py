"""CPU time of the host for a decode step in which nothing changes, and for a GRPO step's prefill and whole generation.

    python bench/host_step.py           1, 64 and 256 sequences; 16 prompts of 8 completions; on any machine

The device's part is left out: a launch does nothing, and every token is the same. What is measured is the engine's
Python: of decode choosing whether to launch, reading a step's results, recording them, and making its StepOutput; of
prefill admission, the arrays of its two steps, and recording what they sampled. No text is decoded.
"""

import statistics
import time

import numpy as np
from report import row
from shapes import QWEN3_06B

from rlnumba.config import EngineConfig
from rlnumba.engine import Engine, SamplingParams
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import device

SEQUENCES, PROMPT, STEPS, REPEAT = (1, 64, 256), 100, 300, 5


# Of a GRPO step.
PROMPTS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 16, 8, 40, 32


def engine_without_device(model, blocks):
    """An Engine that launches nothing; what it samples is whatever is in the arrays."""
    engine = Engine(model, None, EngineConfig(num_gpu_blocks_override=blocks))
    runner = engine.runner
    runner.results[...] = runner.published[0][...] = 1
    runner.launch = lambda: None
    runner.compute = lambda *arguments: None
    return engine


def time_decode(model, sequences):
    """Microseconds of a decode step of so many sequences."""
    engine = engine_without_device(model, 150 * sequences)
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=(REPEAT + 1) * STEPS, ignore_eos=True)
    for number in range(sequences):
        engine.add_request(number, generator.integers(2, model.config.vocab_size, PROMPT), params)
    times = []
    while len(engine.scheduler.running) < sequences or not engine.run_ahead.in_flight:
        engine.step()
    for _ in range(REPEAT):
        started = time.thread_time()
        for _ in range(STEPS - 20):
            engine.step()
        times.append((time.thread_time() - started) / (STEPS - 20))
    return statistics.median(times) * 1e6


def time_generation(model):
    """Milliseconds of (adding the requests of a GRPO step, its two prefill steps, all steps until the last)."""
    engine, times = engine_without_device(model, 4000), []
    generator = np.random.default_rng(0)
    params = SamplingParams(max_tokens=COMPLETION_TOKENS, n=COMPLETIONS, ignore_eos=True)
    for version in range(4 * REPEAT):
        moments = [time.thread_time()]
        for number in range(PROMPTS):
            engine.add_request(number, generator.integers(2, model.config.vocab_size, PROMPT_TOKENS), params)
        moments.append(time.thread_time())
        engine.step(), engine.step()
        moments.append(time.thread_time())
        while engine.has_unfinished:
            engine.step()
        moments.append(time.thread_time())
        times.append(np.diff(moments))
        # What is in the cache is of other weights.
        engine.update_weights(version + 1)
    return np.median(times, axis=0) * 1e3


def main():
    device.select("cpu")
    small = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = ModelConfig.from_dict(QWEN3_06B | small)
    model = Transformer(config, Weights(config, "float32"))
    for sequences in SEQUENCES:
        row(f"host's part of a decode step of {sequences} sequences", f"{time_decode(model, sequences):.0f} us")
    for what, milliseconds in zip(
        ("adding requests", "two prefill steps", "decode"), time_generation(model), strict=True
    ):
        row(f"host's part of {PROMPTS} x {COMPLETIONS} completions: {what}", f"{milliseconds:.1f} ms")


if __name__ == "__main__":
    main()
