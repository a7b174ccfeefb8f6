"""The training phase of a step with what sequences begin with once in a micro-batch, and with it once in each of them.

    python bench/shared_prefixes.py                               GRPO, Qwen3-0.6B's shape, two shapes of a batch
    python bench/shared_prefixes.py --trainer dpo --batch 64 1 512 128        64 pairs
    python bench/shared_prefixes.py --trainer kto --batch 16 4 512 128        16 prompts, 4 completions of each
    python bench/shared_prefixes.py --trainer ppo --common 256 --batch 64 1 384 128
    python bench/shared_prefixes.py --shape qwen3-30b-a3b --layers 8          a mixture of experts, no routers' loss
    python bench/shared_prefixes.py --shape qwen3.5-0.8b                      linear attention

Random tokens, in groups side by side as GRPO has them; the first --common of all prompts are the same. Before a shape
is timed, log-probs are compared bit for bit (rewards of a reward model, metrics of pairs), and the gradients of a step
by their largest difference over the largest gradient. Medians of --repeat steps after two. Beside them is what one may
expect: how many rows there are, and multiplications of layers and head without sharing over those with it.
"""

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from report import row
from shapes import copy_of, random_model, shape_parser

from rlnumba.config import CriticConfig, DPOConfig, GRPOConfig, KTOConfig, PPOConfig, RewardConfig
from rlnumba.data import Prompt
from rlnumba.data.packing import TokenSequence
from rlnumba.data.pairs import PreferencePair
from rlnumba.engine.sequence import Completion
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample
from rlnumba.trainers import dpo, grpo, kto, ppo, reward
from rlnumba.trainers.rollout import Rollouts

# Prompts, completions of each, tokens of a prompt and of a completion.
BATCHES = ((8, 64, 2048, 256), (8, 8, 128, 512))
ROWS = {"dpo": (dpo, DPOConfig), "kto": (kto, KTOConfig), "reward": (reward, RewardConfig)}


def random_prompts(model, batch, common):
    """(random prompts, a function that makes a random completion): lists of token ids."""
    rng, (prompts, _, prompt_length, length) = np.random.default_rng(0), batch
    first = rng.integers(0, model.config.vocab_size, common).tolist()
    found = [first + rng.integers(0, model.config.vocab_size, prompt_length - common).tolist() for _ in range(prompts)]
    return found, lambda: rng.integers(0, model.config.vocab_size, length).tolist()


def rollouts_of(model, batch, common):
    """Rollouts of random tokens."""
    prompts, complete = random_prompts(model, batch, common)
    rng, samples = np.random.default_rng(1), []
    for token_ids in prompts:
        prompt = Prompt("", token_ids, {}, "")
        for _ in range(batch[1]):
            ids = complete()
            completion = Completion(ids, [-12.0] * len(ids), "stop", "")
            samples.append(Sample(prompt, completion, np.zeros(1), 0.0, {}, float(rng.standard_normal())))
    return Rollouts.of(samples, False)


def rows_of(model, trainer, batch, common):
    """Rows of DPO, KTO or a reward model, of random tokens."""
    prompts, complete = random_prompts(model, batch, common)

    def after(prompt, ids):
        mask = np.arange(len(prompt) + len(ids)) >= len(prompt)
        return TokenSequence(np.array(prompt + ids, np.int32), mask)

    rows = []
    for prompt in prompts:
        for i in range(batch[1]):
            if trainer == "dpo":
                rows.append(dpo.ChosenRejected(after(prompt, complete()), after(prompt, complete())))
            elif trainer == "kto":
                ids = complete()
                rows.append(kto.KTOCompletion(prompt, ids, i % 2 == 0, after(prompt, ids)))
            else:
                rows.append(PreferencePair(prompt, complete(), complete(), None, ""))
    return rows


class GRPOStep:
    """A step of GRPO: log-probs to compare, and the step on all completions as one batch."""

    def __init__(self, model, shares, batch, arguments):
        rollouts = rollouts_of(model, batch, arguments.common)
        options = {"router_aux_loss_coef": 0.0} if model.config.mixture_layers else {}
        train = GRPOConfig(
            per_device_train_batch_size=rollouts.num_sequences, max_tokens_per_micro_batch=arguments.tokens,
            share_prefixes=shares, learning_rate=0.0, max_completion_length=int(rollouts.completion_lengths.max()),
            vllm_importance_sampling_correction=False, **options,
        )  # fmt: skip
        self.policy, self.rollouts = Policy(model, train), rollouts

    def compared(self):
        first = self.rollouts.part(0, min(self.rollouts.num_sequences, 16))
        return grpo.host_logprobs(self.policy, self.policy.model, first.parts(8))

    def take(self):
        grpo.train_step(self.policy, [self.rollouts.part(0, self.rollouts.num_sequences, on_policy=True)], 0.0)["loss"]

    def micro_batches(self):
        policy, sharing = self.policy, self.policy.prefix_sharing(self.policy.model)
        parts, _ = grpo.in_order_of_step(policy, [self.rollouts.part(0, self.rollouts.num_sequences)])
        return [part.micro_batch(None, sharing) for part in parts]


class RowsStep:
    """A step of DPO, KTO or a reward model, as many rows at a time as have --tokens tokens."""

    def __init__(self, model, shares, batch, arguments):
        self.trainer, kind = ROWS[arguments.trainer]
        self.rows = rows_of(model, arguments.trainer, batch, arguments.common)
        tokens = (batch[2] + batch[3]) * (1 if arguments.trainer == "kto" else 2)
        size = max(arguments.tokens // tokens, 2)
        train = kind(per_device_train_batch_size=size, share_prefixes=shares, learning_rate=0.0)
        train = replace(train, gradient_accumulation_steps=-(-len(self.rows) // size))
        reference = None if arguments.trainer == "reward" else copy_of(model)
        self.policy = Policy(model, train, reference)

    def compared(self):
        found = self.trainer.evaluate(self.policy, self.rows[: 2 * self.policy.train.per_device_train_batch_size])
        return np.array(list(found.values()))

    def take(self):
        self.trainer.train_step(self.policy, self.rows, 0.0)["loss"]

    def micro_batches(self):
        policy, size = self.policy, self.policy.train.per_device_train_batch_size
        parts = [self.rows[first : first + size] for first in range(0, len(self.rows), size)]
        sharing = policy.prefix_sharing(policy.model, policy.reference)
        return [self.trainer.plain_batch(part, policy.model.config).sharing_prefixes(sharing) for part in parts]


class PPOStep:
    """The optimizer step of PPO on one mini-batch, the critic a head on the policy's trunk."""

    def __init__(self, model, shares, batch, arguments):
        rollouts = rollouts_of(model, batch, arguments.common)
        train = PPOConfig(
            per_device_train_batch_size=rollouts.num_sequences, max_tokens_per_micro_batch=arguments.tokens,
            share_prefixes=shares, learning_rate=0.0, max_completion_length=int(rollouts.completion_lengths.max()),
        )  # fmt: skip
        run = SimpleNamespace(train=train, critic=CriticConfig(shared=True))
        self.policy, self.rollouts = Policy(model, train, None, train.temperature), rollouts
        self.actor = ppo.ActorCritic(self.policy, None, run)
        self.actor.experience = ppo.Experience(rollouts, 0, 0.0, self.actor.score_moments)
        rollouts.is_stale = True
        ppo.evaluate_tokens(self.actor, rollouts)
        ppo.estimate_advantages(self.actor.buffer, rollouts, np.zeros(rollouts.num_sequences), train)

    def compared(self):
        return device.to_host(self.actor.buffer.old_logprobs).copy()

    def take(self):
        ppo.optimizer_step(self.actor, np.arange(self.rollouts.num_sequences), 0.0)

    def micro_batches(self):
        sharing, chosen = self.actor.prefix_sharing(), np.arange(self.rollouts.num_sequences)
        pieces = ppo.pieces_of(self.actor, chosen)
        return [ppo.host_batch(self.rollouts, piece.chosen, sharing)[0] for piece in pieces]


def measure(model, shares, batch, arguments):
    """(what is compared, gradients, median seconds of training steps, the micro-batches)."""
    kind = {"grpo": GRPOStep, "ppo": PPOStep}.get(arguments.trainer, RowsStep)
    step, seconds, gradients = kind(model, shares, batch, arguments), [], None
    with step.policy.context.use():
        compared = step.compared()
        for index in range(2 + arguments.repeat):
            device.synchronize()
            started = time.perf_counter()
            step.take()
            device.synchronize()
            seconds.append(time.perf_counter() - started)
            if index == 0:
                gradients = device.to_host(step.policy.grads.flat).copy()
                assert np.isfinite(gradients).all()
    return compared, gradients, statistics.median(seconds[2:]), step.micro_batches()


def products(model, micro_batches):
    """Multiplications of the layers and of the head, forward, about: int."""
    of_head = model.config.hidden_size * (model.config.vocab_size if model.config.heads != SCORE_HEAD else 1)
    return sum(batch.cost(model.config) + of_head * batch.num_targets for batch in micro_batches)


def main():
    parser = shape_parser(__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=tuple(device.DTYPES))
    parser.add_argument("--trainer", default="grpo", choices=("grpo", "ppo", *ROWS))
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch, at most")
    parser.add_argument("--common", type=int, default=0, help="first tokens that all prompts have")
    parser.add_argument("--batch", type=int, nargs=4, action="append", help="prompts, completions, tokens of each")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    device.select(arguments.device)
    heads = {"reward": SCORE_HEAD, "ppo": LM_HEAD + SCORE_HEAD}.get(arguments.trainer, LM_HEAD)
    model = random_model(arguments.shape, arguments.dtype, heads, arguments.layers)
    for batch in arguments.batch or BATCHES:
        found = {shares: measure(model, shares, batch, arguments) for shares in ("never", "always")}
        (compared, gradients, before, alone), (others, of_shared, after, shared) = found.values()
        what = "{} x {}, {} + {} tokens".format(*batch)
        difference = np.abs(of_shared - gradients).max() / np.abs(gradients).max()
        row(f"{what}: compared numbers that differ", int((compared != others).sum()))
        row(f"{what}: difference of gradients", f"{difference:.1e}")
        if shared:
            rows = [sum(each.num_tokens for each in batches) for batches in (alone, shared)]
            row(f"{what}: rows, micro-batches", f"{rows[0]} in {len(alone)}, {rows[1]} in {len(shared)}")
            row(f"{what}: times fewer multiplications", f"{products(model, alone) / products(model, shared):.2f}")
        row(f"{what}: s a step, all rows in each sequence", f"{before:.3f}")
        row(f"{what}: s a step, shared", f"{after:.3f}")
        row(f"{what}: times faster", f"{before / after:.2f}")


if __name__ == "__main__":
    main()
