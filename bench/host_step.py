"""Time of the host for a decode step in which nothing changes, and for the parts of a GRPO step, on any machine.

    python bench/host_step.py           1, 64 and 256 sequences; 64 prompts of 8 completions, 128 + 512 tokens

The device's part is left out: a launch does nothing, and every token is the same. What is measured is Python. Of
decode, CPU time: choosing whether to launch, reading a step's results, recording them, and making its StepOutput. Of a
GRPO step, wall-clock time, what a GPU waits for: adding the requests, the prefill steps, and the last step of decode,
which ends all completions and decodes their texts; the wait for a trivial reward function in worker processes, with all
of its calls at the end; advantages and packing; metrics; the arrays of the micro-batches. At last, how long one of two
ranks takes to pickle its half of the completions, and to unpickle the other half.
"""

import pickle
import statistics
import time
from pathlib import Path

import numpy as np
from report import row
from shapes import QWEN3_06B

from rlnumba.config import DataConfig, EngineConfig, GRPOConfig, GRPORun, RewardsConfig
from rlnumba.data import Prompt, PromptData
from rlnumba.engine import LLM, Engine, SamplingParams
from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.rewards import TrainingProgress, load_rewards
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.prompt_run import sampling_params
from rlnumba.runs.prompt_schedule import DataState
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device
from rlnumba.sampling.generations import Generations
from rlnumba.sampling.pipeline import Course, PromptSource
from rlnumba.sampling.samples import derived_seed
from rlnumba.trainers import grpo

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart" / "model"
SEQUENCES, PROMPT, STEPS, REPEAT = (1, 64, 256), 100, 300, 5


# Of a GRPO step.
PROMPTS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS, MICRO_BATCH = 64, 8, 128, 512, 32
# Steps that are not counted: reward processes start.
WARMUP = 2


def reward(completion_ids, **columns):
    """Any number that differs within a group."""
    return [float(sum(ids) % 7 + i) for i, ids in enumerate(completion_ids)]


def without_device(engine):
    """Let an Engine launch nothing; what it samples is whatever is in the arrays."""
    runner = engine.runner
    runner.results[...] = runner.published[0][...] = 1
    runner.launch = lambda *part: None
    runner.compute = lambda *arguments: None
    return engine


def time_decode(model, sequences):
    """Microseconds of a decode step of so many sequences."""
    engine = without_device(Engine(model, None, EngineConfig(num_gpu_blocks_override=150 * sequences)))
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


class TimedEngine:
    """An engine that a LLM uses, and the seconds of its parts of a generation."""

    def __init__(self, engine):
        self._engine, self.seconds = engine, {}

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add_request(self, *arguments, **options):
        began = time.perf_counter()
        prompt = self._engine.add_request(*arguments, **options)
        self._count("adding requests", began)
        return prompt

    def _count(self, part, began):
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def step(self):
        """As the engine's; the time of a step counts where it belongs."""
        is_prefill, began = not self._engine.run_ahead.in_flight, time.perf_counter()
        output = self._engine.step()
        part = "prefill steps" if is_prefill else "other decode steps" if self._engine.has_unfinished else "last step"
        self._count(part, began)
        return output


def time_step(model):
    """{part: median milliseconds} of GRPO steps, and the list of groups of Completions of the last one."""
    total, spec = PROMPTS * COMPLETIONS, f"{__file__}:reward"
    blocks = total * (-(-(PROMPT_TOKENS + COMPLETION_TOKENS) // 16) + 2)
    config = EngineConfig(num_gpu_blocks_override=blocks, max_num_seqs=total)
    llm = LLM(model, Tokenizer(QUICKSTART), config)
    llm.engine = engine = TimedEngine(without_device(llm.engine))
    train = GRPOConfig(
        num_generations=COMPLETIONS, per_device_train_batch_size=MICRO_BATCH, global_batch_size=total,
        max_completion_length=COMPLETION_TOKENS, generation_kwargs={"ignore_eos": True}, max_steps=WARMUP + REPEAT,
    )  # fmt: skip
    run = GRPORun(
        model="model", output_dir="run", data=DataConfig(train=""), rewards=RewardsConfig(funcs=[spec]), train=train
    )
    drawn = np.random.default_rng(0).integers(2, model.config.vocab_size, (2 * PROMPTS, PROMPT_TOKENS))
    prompts = PromptData([Prompt("p" * PROMPT_TOKENS, ids.tolist(), {}, str(i)) for i, ids in enumerate(drawn)])
    order, rewards, found = PromptOrder(len(drawn), True, 0), load_rewards(run.rewards), []
    state, policy = DataState(order), Untrained(train)
    course = Course(
        [(step, 0) for step in range(train.max_steps)],
        lambda step: TrainingProgress(step, train.max_steps, 0.0),
        lambda step, index: sampling_params(train, derived_seed(run.seed, step, index, 0), COMPLETIONS),
    )
    generations = Generations(run, policy, llm, PromptSource(prompts, order, rewards), None)
    generations.begin(course, 0, [], None)
    generations.status = Writer().status
    generations.start()
    for step in range(WARMUP + REPEAT):
        clock, trainer_state, engine.seconds = Clock(), TrainingProgress(step, train.max_steps, 0.0), {}
        with clock.phase("generate"):
            rollouts, generation, metrics = grpo.generate(policy, generations, trainer_state, 0, True, clock)
        with clock.phase("log"):
            state.begin(rollouts, generation, rewards.names, metrics)
        with clock.phase("micro-batches"):
            parts = [rollouts.part(first, MICRO_BATCH, True) for first in range(0, total, MICRO_BATCH)]
            for part in parts:
                part.micro_batch()
        seconds = engine.seconds | {name.removeprefix("time/"): value for name, value in clock.read().items()}
        found.append(seconds)
        generations.update_weights(step + 1)
    names = [name for name in found[-1] if name not in ("generate", "step_time", "logprob", "other decode steps")]
    medians = {name: 1e3 * statistics.median(each[name] for each in found[WARMUP:]) for name in names}
    return medians, [[sample.completion for sample in group] for group in generation.groups]


class Writer:
    """In place of a MetricsWriter."""

    def status(self, text):
        """Nothing."""


class Untrained:
    """In place of a Policy that computes no log-probs beforehand."""

    reference = None

    def __init__(self, train):
        self.train = train


def time_exchange(completions):
    """Milliseconds to pickle Completions and to unpickle as many, as of another rank."""
    times = []
    for _ in range(WARMUP + REPEAT):
        began = time.perf_counter()
        pickle.loads(pickle.dumps(completions))
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main():
    device.select("cpu")
    small = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = ModelConfig.from_dict(QWEN3_06B | small)
    model = Transformer(config, Weights(config, "float32"))
    for sequences in SEQUENCES:
        row(f"host's part of a decode step of {sequences} sequences", f"{time_decode(model, sequences):.0f} us")
    medians, groups = time_step(model)
    for part, milliseconds in medians.items():
        row(f"host's part of a GRPO step of {PROMPTS} x {COMPLETIONS}: {part}", f"{milliseconds:.1f} ms")
    row("completions of two ranks to each other", f"{time_exchange(groups[: PROMPTS // 2]):.1f} ms")


if __name__ == "__main__":
    main()
