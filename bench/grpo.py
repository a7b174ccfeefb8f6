"""Time and memory of GRPO steps, by phase: generate, logprob (with --beta), train.

    python bench/grpo.py                                   8 prompts x 8 completions, 128 + 512 tokens
    python bench/grpo.py --prompts 8 --generations 8 --prompt-length 128 --completion-length 512 --micro-batch 64

Qwen3-0.6B's shape with random weights on a GPU, a 15M model elsewhere. Every completion is generated to its full
length and rewards are random, so the work is fixed. The first step (compilation, graph capture) is printed apart;
medians of the others. A training run adds its reward functions and its files to this.
"""

import argparse
import statistics
import time

import numpy as np
from report import row
from train import load, print_memory

from rlnumba.config import EngineConfig, GRPOConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import device
from rlnumba.trainers.core import Policy
from rlnumba.trainers.grpo import add_logprobs, train_step
from rlnumba.trainers.rollout import Rollouts, Sample, derived_seed, set_advantages
from rlnumba.trainers.run_folder import Clock


def one_step(llm, policy, prompts, arguments, step, clock):
    """Generate for every prompt and make an optimizer step: (generated tokens, metrics)."""
    generator = np.random.default_rng(step)
    with clock.phase("generate"):
        llm.wake()
        params = SamplingParams(
            max_tokens=arguments.completion_length,
            n=arguments.generations,
            seed=derived_seed(0, step),
            ignore_eos=True,
        )
        outputs = llm.generate([prompt.prompt_token_ids for prompt in prompts], params)
        llm.sleep()
    groups = []
    for prompt, output in zip(prompts, outputs, strict=True):
        rewards = generator.random(arguments.generations)
        samples = zip(output.completions, rewards.tolist(), strict=True)
        groups.append([Sample(prompt, done, np.array([reward]), reward, {}) for done, reward in samples])
    set_advantages(groups, [1.0], "group")
    samples = [sample for group in groups for sample in group]
    rollouts = Rollouts.of([samples[i] for i in generator.permutation(len(samples))], False)
    with clock.phase("logprob"):
        add_logprobs(policy, rollouts, on_policy=True)
    with clock.phase("train"):
        metrics = train_step(policy, rollouts.parts(arguments.micro_batch, on_policy=True), 1e-6)
    llm.update_weights(step + 1)
    return int(rollouts.completion_lengths.sum()), metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", help="a Hugging Face folder; default: random weights")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, help="tokens; default 128 on a GPU, else 16")
    parser.add_argument("--completion-length", type=int, help="tokens; default 512 on a GPU, else 32")
    parser.add_argument("--micro-batch", type=int, help="completions of a forward and backward; default: all")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0: with a reference model")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=3, help="steps after the first")
    arguments = parser.parse_args()
    on_gpu = device.select(arguments.device) == "cuda"
    arguments.prompt_length = arguments.prompt_length or (128 if on_gpu else 16)
    arguments.completion_length = arguments.completion_length or (512 if on_gpu else 32)
    total = arguments.prompts * arguments.generations
    arguments.micro_batch = arguments.micro_batch or total
    model = load(arguments)
    reference = None
    if arguments.beta:
        reference = Transformer(model.config, Weights(model.config, model.dtype.name))
        reference.weights.flat[...] = model.weights.flat
    train = GRPOConfig(
        num_generations=arguments.generations,
        per_device_train_batch_size=arguments.micro_batch,
        generation_batch_size=total,
        gradient_accumulation_steps=total // arguments.micro_batch,
        max_completion_length=arguments.completion_length,
        beta=arguments.beta,
        gradient_checkpointing=arguments.checkpointing,
    )
    policy = Policy(model, train, reference, train.temperature)
    engine = EngineConfig(
        gpu_memory_utilization=arguments.gpu_memory_utilization, enforce_eager=arguments.enforce_eager
    )
    llm = LLM(model, None, engine)
    generator = np.random.default_rng(0)
    vocabulary = model.config.vocab_size
    prompts = [
        Prompt("", generator.integers(0, vocabulary, arguments.prompt_length).tolist(), {}, "")
        for _ in range(arguments.prompts)
    ]
    print(
        f"{device.describe()}; {sum(p.size for p in model.weights.parameters) / 1e6:.0f}M parameters, "
        f"{model.dtype.name}; {arguments.prompts} x {arguments.generations} completions, "
        f"{arguments.prompt_length} + {arguments.completion_length} tokens, micro-batches of {arguments.micro_batch}"
    )
    measured = []
    for step in range(1 + arguments.steps):
        clock = Clock()
        started = time.perf_counter()
        drawn, metrics = one_step(llm, policy, prompts, arguments, step, clock)
        seconds = {"step": time.perf_counter() - started, **clock.seconds}
        measured.append(seconds)
    print(f"first step {measured[0]['step']:.1f} s")
    for name in measured[0]:
        median = statistics.median(seconds[name] for seconds in measured[1:])
        print(f"{name:20} {median:8.3f} s")
    generate = statistics.median(seconds["time/generate"] for seconds in measured[1:])
    print(f"{'generation':20} {drawn / generate:8.0f} tok/s")
    difference = metrics["sampling/sampling_logp_difference/max"]
    print(f"{'sampler difference':20} {difference:8.2g} nats at most")
    medians = {name: statistics.median(seconds[name] for seconds in measured[1:]) for name in measured[0]}
    result = ", ".join(f"{name.removeprefix('time/')} {seconds:.3f} s" for name, seconds in medians.items())
    what = f"GRPO step, {arguments.prompts} x {arguments.generations}, "
    what += f"{arguments.prompt_length} + {arguments.completion_length} tokens"
    row(what, f"{result}; sampler difference {difference:.2g} nats", "1.3 s" if on_gpu else "")
    print_memory()


if __name__ == "__main__":
    main()
