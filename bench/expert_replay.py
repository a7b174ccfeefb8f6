"""Tokens whose experts differ between sampling and training, after each optimizer step that one generation feeds.

    python bench/expert_replay.py                          examples/moe/model
    python bench/expert_replay.py --model FOLDER --steps 8 --learning-rate 3e-4

16 prompts of 8 completions, with random rewards. A token counts where it has other experts in any mixture; with
train.router_replay none has.
"""

import argparse

import numpy as np
from grpo import samples_of

from rlnumba.config import GRPOConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams
from rlnumba.model.blocks.block import ExpertRecords
from rlnumba.model.transformer import load_model, packed_attention
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers.grpo import train_step
from rlnumba.trainers.rollout import Rollouts, set_advantages

PROMPTS, GENERATIONS, TOKENS = 16, 8, 10


def rollouts_of(model):
    """Rollouts that the model draws, with the experts of their tokens."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, model.config.vocab_size - 1, rng.integers(5, 9)).tolist() for _ in range(PROMPTS)]
    llm = LLM(model, enable_return_routed_experts=True)
    outputs = llm.generate(ids, SamplingParams(n=GENERATIONS, max_tokens=TOKENS, seed=0))
    prompts = [Prompt("", each, {}, "") for each in ids for _ in range(GENERATIONS)]
    samples = samples_of(prompts, [done for output in outputs for done in output.completions], 0)
    set_advantages([samples[i : i + GENERATIONS] for i in range(0, len(samples), GENERATIONS)], [1.0], "group")
    rollouts = Rollouts.of(samples, False)
    rollouts.old_logprobs = rollouts.rollout_logprobs.copy()
    return rollouts


def experts_of(model, batch):
    """The experts (N, L, k) of a TargetBatch's tokens in the model's L mixtures, sorted; on the host."""
    config, count = model.config, len(batch.input_ids)
    shape = len(config.mixture_layers), count, config.num_experts_per_tok
    found = device.asarray(np.empty(shape, np.int16))
    slots = device.asarray(np.arange(count, dtype=np.int32))
    records = ExpertRecords(slots, dict(zip(config.mixture_layers, found, strict=True)))
    tokens = batch.input_ids, batch.position_ids, packed_attention(model, batch)
    model.forward(*tokens, replayed=batch.routed_experts, records=records)
    return np.sort(device.to_host(found).swapaxes(0, 1), axis=2)


def shares(arguments, replays):
    """The share of tokens with other experts before each optimizer step."""
    model = load_model(arguments.model, arguments.dtype)
    rollouts = rollouts_of(model)
    recorded = np.sort(rollouts.routed_experts, axis=2)
    known = recorded[:, 0, 0] >= 0
    if not replays:
        rollouts.routed_experts = np.empty((0, 0, 0), np.int16)
    count = PROMPTS * GENERATIONS
    keys = {"num_generations": GENERATIONS, "per_device_train_batch_size": count, "num_iterations": arguments.steps}
    policy = Policy(model, GRPOConfig(**keys, max_completion_length=TOKENS), None, 1.0)
    found = []
    for _ in range(arguments.steps):
        others = (experts_of(model, rollouts.to_device().targets) != recorded).any(axis=(1, 2))
        found.append(float(others[known].mean()))
        dict(train_step(policy, rollouts.parts(count), arguments.learning_rate))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="examples/moe/model")
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    arguments = parser.parse_args()
    device.select(arguments.device)
    for replays in (False, True):
        listed = ", ".join(f"{100 * share:.1f}" for share in shares(arguments, replays))
        print(f"{'the sampler' if replays else 'the router'}'s experts: % of tokens with others {listed}")


if __name__ == "__main__":
    main()
