"""CPU microseconds that the host takes for one decode step in which nothing changes, without the driver's launch.

    python bench/host_step.py           1, 64 and 256 sequences; on any machine

The device's part is left out: a launch does nothing, and every token is the same. What is measured is the engine's
Python: choosing whether to launch, reading a step's results, recording them, and making its StepOutput.
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


def main():
    device.select("cpu")
    small = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = ModelConfig.from_dict(QWEN3_06B | small)
    model = Transformer(config, Weights(config, "float32"))
    for sequences in SEQUENCES:
        engine = Engine(model, None, EngineConfig(num_gpu_blocks_override=150 * sequences))
        runner = engine.runner
        # Prefill, too: its results are whatever is in the array.
        runner.results[...] = runner.published[0][...] = 1
        runner.launch = lambda: None
        runner.compute = lambda *arguments: None
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
        row(f"host's part of a decode step of {sequences} sequences", f"{statistics.median(times) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
