"""Time and memory of PPO steps with a value head on the policy's trunk, by phase, and GRPO steps of the same work.

    python bench/ppo.py                          8 prompts x 8 completions, 128 + 512 tokens, one epoch, reference
    python bench/ppo.py --kl-coef 0 --epochs 4   without a reference, four optimizer steps

The model, prompts and rewards are those of bench/grpo.py, whose steps are taken first, without a reference, as its
defaults say. reference and values: the log-probs of the reference and the values before the update, each a forward
without a tape; the log-probs before the update are the sampler's. advantage: rewards of tokens, GAE, whitening. Bar: a
step takes at most 1.35 times as long as GRPO's.
"""

import gc
from types import SimpleNamespace

import numpy as np
from grpo import (
    argument_parser,
    complete,
    describe,
    engine_of,
    grpo_policy,
    measure,
    model_of,
    one_step,
    phases,
    random_prompts,
    samples_of,
    synchronized,
    train_config,
    work_of,
)
from report import row
from shapes import copy_of
from train import print_memory

from rlnumba.config import PPOConfig
from rlnumba.config.ppo import CriticConfig
from rlnumba.engine import SamplingParams
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, memory
from rlnumba.sampling.samples import derived_seed, distinct_params
from rlnumba.trainers import ppo
from rlnumba.trainers.rollout import Rollouts

BAR = 1.35


class TimedPolicy(Policy):
    """A Policy whose forwards without a tape are phases of a step's clock, which is set before the step."""

    clock = None

    def logprobs(self, *arrays, **options):
        with synchronized(self.clock, "reference"):
            super().logprobs(*arrays, **options)

    def values(self, *arrays):
        with synchronized(self.clock, "values"):
            super().values(*arrays)


def actor_of(model, arguments):
    """The ActorCritic of a model with both heads."""
    options = {"num_ppo_epochs": arguments.epochs, "kl_coef": arguments.kl_coef, "temperature": 1.0}
    train = train_config(PPOConfig, arguments, **options)
    policy = TimedPolicy(model, train, copy_of(model) if train.kl_coef else None, train.temperature)
    return ppo.ActorCritic(policy, None, SimpleNamespace(train=train, critic=CriticConfig(shared=True)))


def ppo_step(llm, actor, prompts, arguments, step, clock):
    """Generate, and make the optimizer steps on what was generated: (generated tokens, metrics)."""
    actor.policy.clock = clock
    prompts = prompts * arguments.generations
    with clock.phase("generate"):
        llm.wake()
        ids = [prompt.prompt_token_ids for prompt in prompts]
        params = SamplingParams(max_tokens=arguments.completion_length, seed=derived_seed(0, step), ignore_eos=True)
        outputs = llm.generate(ids, distinct_params(ids, params))
        llm.sleep()
    with clock.phase("advantage"):
        samples = samples_of(prompts, [output.completions[0] for output in outputs], step)
        rollouts = Rollouts.of(samples, False)
    actor.experience = ppo.Experience(rollouts, derived_seed(0, step, 0), 1e-6, actor.score_moments)
    with synchronized(clock, "logprob"):
        ppo.evaluate_tokens(actor, rollouts)
    with synchronized(clock, "advantage"):
        scores = np.array([sample.reward for sample in samples])
        ppo.estimate_advantages(actor.buffer, rollouts, scores, actor.train)
    with synchronized(clock, "train"):
        metrics = ppo.train_step(actor, None, 1e-6)
        llm.update_weights(step + 1)
    return int(rollouts.completion_lengths.sum()), metrics


def measure_grpo(llm, prompts, arguments):
    """Medians of GRPO's steps; their memory is freed."""
    policy = grpo_policy(llm.model, arguments)
    return measure(lambda step, clock: one_step(llm, policy, prompts, arguments, step, clock), arguments.steps)[0]


def main():
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--kl-coef", type=float, default=0.05, help="0: without a reference")
    arguments = parser.parse_args()
    on_gpu = complete(arguments)
    model = model_of(arguments, LM_HEAD + SCORE_HEAD)
    llm, prompts = engine_of(model, arguments), random_prompts(model, arguments)
    print(describe(model, arguments))
    of_grpo = measure_grpo(llm, prompts, arguments)
    row(f"GRPO step, {work_of(arguments)}", phases(of_grpo), "1.3 s" if on_gpu else "")
    gc.collect()
    if on_gpu:
        device.xp().get_default_memory_pool().free_all_blocks()
    memory.reset_peaks()
    actor = actor_of(model, arguments)
    of_ppo, metrics = measure(
        lambda step, clock: ppo_step(llm, actor, prompts, arguments, step, clock), arguments.steps
    )
    ratio, deviation = of_ppo["step"] / of_grpo["step"], abs(metrics["val/ratio"] - 1)
    what = f"PPO step, {work_of(arguments)}, shared trunk, num_ppo_epochs {arguments.epochs}, "
    what += f"kl_coef {arguments.kl_coef:g}"
    result = f"{ratio:.2f} x GRPO's; {phases(of_ppo)}; mean ratio of probabilities 1 -+ {deviation:.2g}"
    row(what, result, f"{BAR} x" if on_gpu else "")
    print_memory()


if __name__ == "__main__":
    main()
