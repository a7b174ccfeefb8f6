"""Proximal Policy Optimization with a critic: prompts in, better weights out, a value for every token on the way.

    batch            a completion of each of rollout_batch_size prompts, with its score: the weighted sum of the rewards
    token            reward = -kl_coef kl, + score at the last token; value = the critic's, of the tokens before it
                     GAE(gamma, lam) gives advantages, which are whitened, and returns
    optimizer step   a mini-batch: rollout_batch_size / num_mini_batches completions, in another order in each of the
                     num_ppo_epochs epochs; loss = pg + vf_coef vf - entropy_coef H (kernels/rl/ppo_loss.py)

The critic is a model of its own, or a head on the policy's trunk, whose hidden states are then computed once for both.
Engine and policy read the same weights, so where their arithmetic agrees bit for bit, the sampler's log-probs are the
old ones. The loop over batches is GRPO's (runs/prompt_loop.py).

Sources: Schulman et al. 2017 (arXiv 1707.06347), Ziegler et al. 2019 (arXiv 1909.08593); TRL 1.12's PPOTrainer, whose
names, defaults and arithmetic these are, but for the score, which stands at the last token. Scaled scores: Zheng et al.
2023 (arXiv 2307.04964).
"""

import math
import weakref
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

from rlnumba.config.ppo import PPORun
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.kernels.nn.reduce import masked_whiten
from rlnumba.kernels.rl.gae import gae
from rlnumba.kernels.rl.ppo_loss import (
    SUMS,
    PPOOutputs,
    RolloutArrays,
    TokenPredictions,
    ppo_loss,
    ppo_loss_blocks,
    ppo_metrics,
)
from rlnumba.kernels.rl.ppo_rewards import ppo_rewards
from rlnumba.model.config import LM_HEAD, SCORE_HEAD
from rlnumba.model.heads import BothHeads, ValueHead
from rlnumba.model.hub import find_model, read_config
from rlnumba.model.lora import is_adapter
from rlnumba.model.transformer import load_model
from rlnumba.optim import learning_rate_at
from rlnumba.runs.loading import load_policy, weights_of_critic
from rlnumba.runs.micro_batch import MicroBatch, costliest_first
from rlnumba.runs.planning.planned import Models
from rlnumba.runs.policy import LateMetrics, Policy, epoch_order
from rlnumba.runs.prompt_loop import TrainerOnPrompts
from rlnumba.runtime import device, memory
from rlnumba.runtime.transfer import copy_to_device
from rlnumba.sampling.samples import derived_seed
from rlnumba.trainers import rollout
from rlnumba.trainers.grpo import is_stale, sampler_is_exact


def run_ppo(run, resume=False, reward_funcs=(), communicator=None):
    """Train a PPORun, and return its TrainerState; the arguments are TrainerOnPrompts.train's."""
    return TRAINER.train(run, resume, reward_funcs, communicator)


def load(run, folder):
    """(ActorCritic, Tokenizer) of a run. Raises UserError for a critic that cannot read the policy's tokens."""
    train, heads = run.train, LM_HEAD + SCORE_HEAD if run.critic.shared else LM_HEAD
    policy, tokenizer = load_policy(run, folder, train.kl_coef > 0, train.temperature, heads)
    if run.critic.shared:
        return ActorCritic(policy, None, run), tokenizer
    source, config = find_model(run.critic.model or run.model), policy.model.config
    kind = weights_of_critic(run, folder.communicator, is_trained=not is_adapter(source))
    model = load_model(source, policy.model.dtype.name, SCORE_HEAD, make_weights=kind)
    if model.config.vocab_size != config.vocab_size:
        raise ConfigError(
            f"critic.model {source} has {model.config.vocab_size} token ids and model {run.model} {config.vocab_size}: "
            f"they must have one vocabulary"
        )
    longest = min(config.num_positions, run.engine.max_model_len or config.num_positions)
    if model.config.num_positions < longest:
        raise ConfigError(
            f"critic.model {source} has {model.config.num_positions} positions, but sequences may have {longest} "
            f"tokens; set engine.max_model_len"
        )
    critic = Policy(model, train, seed=run.seed, communicator=folder.communicator)
    critic.arena = policy.arena
    return ActorCritic(policy, critic, run), tokenizer


def save_final(folder, actor, tokenizer):
    """Write final/ of a RunFolder, the policy, and final/critic/, a sequence-classification folder of the critic.

    A critic on the policy's trunk is the trunk with the value head.
    """
    actor.gather_adapter()
    folder.finish(actor.model, tokenizer, LM_HEAD)
    critic = actor.model if actor.critic is None else actor.critic.model
    folder.save_model(critic, "final/critic", tokenizer, SCORE_HEAD)


class ActorCritic:
    """A policy and its critic in training, and the rollout that they are trained on.

    policy: Policy; critic: a Policy whose model has a score head, or None where the policy's has both heads. buffer:
    RolloutBuffer; experience: the Experience that `generate` made, None of a batch without rewards; score_moments:
    RunningMoments of all scores.
    """

    def __init__(self, policy, critic, run):
        self.policy, self.critic, self.train = policy, critic, run.train
        self.model, self.context, self.scope = policy.model, policy.context, policy.scope
        self.communicator = policy.communicator
        self.before_micro_batch, self.before_update = policy.before_micro_batch, policy.before_update
        rate = run.critic.learning_rate
        self.critic_train = run.train if rate is None else replace(run.train, learning_rate=rate)
        self.buffer = RolloutBuffer(run.train.rollout_batch_size * run.train.max_completion_length)
        self.score_moments, self.experience = RunningMoments(), None

    def prefix_sharing(self, *models):
        """The PrefixRule of micro-batches for policy and critic, and for further models, or None."""
        critic = None if self.critic is None else self.critic.model
        return self.policy.prefix_sharing(self.model, critic, *models)

    def values(self, batch, values):
        """Write values (T,) f32, the critic's for the rows of a TargetBatch, without a tape."""
        (self.critic or self.policy).values(batch, values)

    def forward(self, batch, logprobs, entropy, values):
        """Write log-probs, entropies and values (T,) f32 of a TargetBatch; returns what `backward` reads."""
        if self.critic is None:
            return self.policy.forward(batch, logprobs, values, entropy, head=BothHeads(self.policy.temperature))
        return self.policy.forward(batch, logprobs, entropy), self.critic.forward(batch, values, head=ValueHead())

    def backward(self, forward, dlogprobs, dvalues, dentropy):
        """Add to the gradients what follows from the derivatives of the loss, (T,) f32; dentropy may be None."""
        if self.critic is None:
            self.policy.backward(forward, dlogprobs, dvalues, dentropy)
            return
        self.policy.backward(forward[0], dlogprobs, dentropy)
        self.critic.backward(forward[1], dvalues)

    def each_micro_batch(self, batches):
        """Iterate as Policy.each_micro_batch does, for what `backward` adds to the gradients of both."""
        return self.policy.each_micro_batch(batches, () if self.critic is None else (self.critic,))

    def zero_grad(self, learning_rate=None, critic_learning_rate=None):
        """Begin an optimizer step of both: set the gradients to zero. The rates: those of `step`."""
        self.policy.zero_grad(learning_rate)
        if self.critic is not None:
            self.critic.zero_grad(critic_learning_rate)

    def step(self, learning_rate, critic_learning_rate):
        """One optimizer step of both: LateMetrics, Policy.step's, and critic/grad_norm, critic/learning_rate."""
        info = self.policy.step(learning_rate)
        if self.critic is None:
            return info
        critic_info = self.critic.step(critic_learning_rate)
        return LateMetrics(lambda: info | {f"critic/{name}": value for name, value in critic_info.items()})

    def say_who_waits(self):
        """Policy.say_who_waits, of the last optimizer step."""
        self.policy.say_who_waits()

    def move_reference_if_due(self, step):
        """The reference stands still."""

    @property
    def is_updating(self):
        """Whether the weights of either model are being updated."""
        return self.policy.is_updating

    @is_updating.setter
    def is_updating(self, value):
        self.policy.is_updating = value

    def gather_adapter(self):
        """Policy.gather_adapter of both."""
        for each in filter(None, (self.policy, self.critic)):
            each.gather_adapter()

    def state_dict(self):
        """The state for a checkpoint besides the policy's weights, as Policy.state_dict."""
        critic = None
        if self.critic is not None:
            trained = self.critic.model.trained
            own = self.critic.host_part(trained.flat, trained.first, trained.size)
            critic = {"weights": own, "optimizer": self.critic.optimizer.state_dict()}
        return {"policy": self.policy.state_dict(), "critic": critic, "scores": vars(self.score_moments)}

    def load_state_dict(self, state):
        """Restore what state_dict returned. Raises UserError for the state of another kind or size of critic."""
        self.policy.load_state_dict(state["policy"])
        self.score_moments = RunningMoments(**state["scores"])
        saved, critic = state["critic"], self.critic
        fits = (saved is None) == (critic is None)
        if critic is not None and fits:
            fits = saved["weights"].shape == (critic.model.trained.size,)
        if not fits:
            raise UserError("the checkpoint's critic is not that of the configuration: was [critic] changed?")
        if critic is not None:
            spans = critic.model.trained.spans()
            copy_to_device([(array, saved["weights"][first : first + len(array)]) for first, array in spans])
            critic.optimizer.load_state_dict(saved["optimizer"])


class RolloutBuffer:
    """Arrays of a batch's T drawn tokens on the device, allocated once for the most there can be.

    old_logprobs, ref_logprobs, values: by policy, reference and critic before the update; kl, rewards, advantages,
    returns. begin(T) makes each of them the (T,) float32 view of its memory that holds.
    """

    NAMES = ("old_logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns")

    def __init__(self, max_tokens):
        self.memory = device.xp().empty((len(self.NAMES), max_tokens), np.float32)
        memory.track("rollout_buffer", self.memory.nbytes)
        weakref.finalize(self, memory.track, "rollout_buffer", -self.memory.nbytes)
        self.begin(0)

    def begin(self, tokens):
        """Make the arrays those of a batch of this many tokens."""
        for name, row in zip(self.NAMES, self.memory, strict=True):
            setattr(self, name, row[:tokens])


@dataclass
class RunningMoments:
    """Count, mean and sum of squared distances from it of all numbers seen so far, by Chan's update (1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values):
        """Add the numbers of an array (n,)."""
        values = np.asarray(values, np.float64)
        count, distance = self.count + len(values), float(values.mean()) - self.mean
        self.squares += float(values.var() * len(values)) + distance * distance * self.count * len(values) / count
        self.mean += distance * len(values) / count
        self.count = count

    @property
    def std(self):
        """Their standard deviation, which divides by count - 1: float; 1 where it is 0 or not known."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 and self.squares > 0 else 1.0


@dataclass
class Experience:
    """A batch as the optimizer steps read it: completions on the host; their arrays are in the RolloutBuffer.

    seed: orders each epoch; critic_learning_rate: this step's; score_moments: with this batch's scores.
    """

    rollouts: rollout.Rollouts
    seed: int
    critic_learning_rate: float
    score_moments: RunningMoments


def generate(actor, generations, trainer_state, index, on_policy, clock):
    """One batch, in the ActorCritic's buffer: see TrainerOnPrompts. Completions without a reward are left out."""
    run, step = generations.run, trainer_state.global_step
    train = run.train
    # prompt -> ids -> completions, text -> reward
    _, generation = generations.take(trainer_state, clock)
    samples = [sample for sample in generation.samples if not math.isnan(sample.reward)]
    if not samples:
        if run.rewards.reward_errors == "raise":
            raise UserError(f"no completion of step {step + 1} has a reward: every reward function gave None")
        actor.experience = None
        return rollout.Rollouts.of(generation.samples, False), generation, generations.metrics
    # completions -> batch
    with clock.phase("advantage"):
        rollouts = rollout.Rollouts.of(samples, False)
        rollouts.is_stale = is_stale(generation, step)
    critic_rate = learning_rate_at(actor.critic_train, step, trainer_state.max_steps)
    # A copy: until the first optimizer step, an interruption keeps the state before this batch.
    moments = replace(actor.score_moments)
    actor.experience = Experience(rollouts, derived_seed(run.seed, step, index), critic_rate, moments)
    with clock.phase("logprob"):
        evaluate_tokens(actor, rollouts)
        device.synchronize()
    with clock.phase("advantage"):
        truncated = np.array([sample.truncated for sample in samples])
        scores = completion_scores([sample.reward for sample in samples], truncated, moments, train)
        # score, log-probs, values -> rewards, advantages, returns
        estimate_advantages(actor.buffer, rollouts, scores, train)
        advantages = np.split(device.to_host(actor.buffer.advantages), np.cumsum(rollouts.target_lengths)[:-1])
        for sample, of_tokens in zip(samples, advantages, strict=True):
            sample.advantage = float(of_tokens.mean(dtype=np.float64))
        metrics = objective_metrics(actor.buffer, scores, train)
        ids = np.concatenate([sample.completion.drawn("token_ids") for sample in samples])
        metrics["val/num_eos_tokens"] = int(np.isin(ids, actor.model.config.eos_token_ids).sum())
        if run.importance_sampling_cap is not None:
            metrics |= weigh_older(actor.buffer, rollouts, run.importance_sampling_cap)
        metrics |= generations.metrics
    return rollouts, generation, metrics


def evaluate_tokens(actor, rollouts):
    """Write old_logprobs, ref_logprobs and values of all completion tokens to the ActorCritic's buffer.

    Each of several ranks evaluates a part of them.
    """
    policy, buffer, size = actor.policy, actor.buffer, actor.train.per_device_train_batch_size
    every = np.arange(rollouts.num_sequences)
    if actor.train.max_tokens_per_micro_batch:
        parts = parts_of_tokens(rollouts, every, actor.train)
    else:
        parts = [every[first : first + size] for first in range(0, len(every), size)]
    buffer.begin(len(rollouts.rollout_logprobs))
    exact = sampler_is_exact(policy) and not rollouts.is_stale
    if exact:
        buffer.old_logprobs[...] = device.asarray(rollouts.rollout_logprobs)
    written = [buffer.values]
    written += [] if exact else [buffer.old_logprobs]
    written += [] if policy.reference is None else [buffer.ref_logprobs]
    ends = np.cumsum([int(rollouts.target_lengths[part].sum()) for part in parts]).tolist()
    tokens = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    sharing = actor.prefix_sharing(policy.reference)
    for k in policy.own(range(len(parts))):
        batch, _ = micro_batch(rollouts, parts[k], sharing)
        if not exact:
            policy.logprobs(batch, buffer.old_logprobs[tokens[k]])
        if policy.reference is not None:
            policy.logprobs(batch, buffer.ref_logprobs[tokens[k]], model=policy.reference)
        actor.values(batch, buffer.values[tokens[k]])
    if policy.communicator is not None:
        own = [[device.to_host(array[each]) for array in written] for each in policy.own(tokens)]
        for each, arrays in zip(tokens, policy.of_all_micro_batches(own, len(tokens)), strict=True):
            for array, found in zip(written, arrays, strict=True):
                array[each] = device.asarray(found)
    if policy.reference is None:
        buffer.ref_logprobs[...] = buffer.old_logprobs


def completion_scores(rewards, truncated, moments, train):
    """Scores of completions, (B,) float64: their rewards scaled and clipped, less the penalty where truncated (B,)."""
    scores = np.array(rewards, np.float64)
    if train.use_score_scaling:
        moments.update(scores)
        scores = (scores - (moments.mean if train.use_score_norm else 0.0)) / moments.std
    if train.score_clip is not None:
        scores = np.clip(scores, -train.score_clip, train.score_clip)
    return scores - np.where(truncated, train.missing_eos_penalty or 0.0, 0.0)


def estimate_advantages(buffer, rollouts, scores, train):
    """Write kl, rewards, advantages and returns of the buffer from its log-probs and values, and the scores (B,)."""
    cu_seqlens = device.asarray(np.concatenate([[0], np.cumsum(rollouts.target_lengths)]).astype(np.int32))
    every = device.asarray(np.ones(len(rollouts.rollout_logprobs), np.uint8))
    scores = device.asarray(scores.astype(np.float32))
    estimate = train.kl_coef, train.kl_estimator
    ppo_rewards(buffer.old_logprobs, buffer.ref_logprobs, scores, cu_seqlens, *estimate, buffer.kl, buffer.rewards)
    if train.whiten_rewards:
        masked_whiten(buffer.rewards, every, buffer.rewards, shift_mean=False)
    discounts = train.gamma, train.lam
    gae(buffer.rewards, buffer.values, cu_seqlens, *discounts, buffer.advantages, buffer.returns)
    masked_whiten(buffer.advantages, every, buffer.advantages)


def weigh_older(buffer, rollouts, cap):
    """Multiply the advantages of tokens by the weights min(exp(old - rollout), cap): metrics, GRPO's of these, dict.

    A token of older weights so counts by its probability when its batch is trained on, over that when it was sampled
    (AReaL, arXiv 2505.24298). No weight is negative, so a weighted advantage is a weighted loss, clipped or not.
    """
    difference = device.to_host(buffer.old_logprobs) - rollouts.rollout_logprobs
    # Below what float32 has no exponential of.
    weights = np.minimum(np.exp(np.minimum(difference, np.float32(80))), np.float32(cap))
    buffer.advantages[...] = device.asarray(device.to_host(buffer.advantages) * weights)
    found = {"importance_sampling_ratio": weights, "sampling_logp_difference": np.abs(difference)}
    metrics = {}
    for name, values in found.items():
        metrics[f"sampling/{name}/mean"] = float(values.mean(dtype=np.float64))
        metrics[f"sampling/{name}/max"] = float(values.max())
    return metrics | {"sampling/importance_sampling_ratio/min": float(weights.min())}


def objective_metrics(buffer, scores, train):
    """TRL's metrics of a batch, means over its completions: dict. Those of the KL only with a reference."""
    kl, logprobs = (float(device.to_host(array).sum(dtype=np.float64)) for array in (buffer.kl, buffer.old_logprobs))
    of_completion, score = 1.0 / len(scores), float(scores.mean())
    non_score = -train.kl_coef * kl * of_completion
    found = {"objective/kl": kl * of_completion} if train.kl_coef else {}
    found |= {"objective/entropy": -logprobs * of_completion, "objective/non_score_reward": non_score}
    return found | {"objective/rlhf_reward": non_score + score, "objective/scores": score}


def train_step(actor, micro_batches, learning_rate):
    """The optimizer steps on the batch that the ActorCritic holds: LateMetrics, means over the steps. A batch without
    rewards has none."""
    train, experience, policy = actor.train, actor.experience, actor.policy
    if experience is None:
        policy.skip_step()
        return {"learning_rate": learning_rate}
    # On the device until all steps are done, so that no micro-batch waits for the host.
    steps, infos = [], []
    for epoch in range(train.num_ppo_epochs):
        order = epoch_order(experience.rollouts.num_sequences, True, experience.seed, epoch)
        for mini_batch in np.array_split(order, min(train.num_mini_batches, len(order))):
            pieces, partials, info = optimizer_step(actor, mini_batch, learning_rate)
            steps.append((pieces, partials))
            infos.append(info)
    actor.score_moments = experience.score_moments

    def read():
        sums, tokens = [], []
        for pieces, partials in steps:
            found = policy.of_all_micro_batches([device.to_host(each) for each in partials])
            ordered = sorted(zip(pieces, found, strict=True), key=lambda pair: pair[0].part)
            for _, of_part in groupby(ordered, key=lambda pair: pair[0].part):
                part, blocks = zip(*of_part, strict=True)
                sums.append(np.concatenate(blocks).sum(axis=0, dtype=np.float64))
                tokens.append(part[0].tokens)
        metrics = ppo_metrics(sums, tokens)
        loss = metrics["loss/policy_avg"] + train.vf_coef * metrics["loss/value_avg"]
        metrics["loss"] = loss - train.entropy_coef * metrics["policy/entropy_avg"]
        norms = [name for name in infos[-1] if name.endswith("grad_norm")]
        return metrics | infos[-1] | {name: float(np.mean([info[name] for info in infos])) for name in norms}

    return LateMetrics(read)


def optimizer_step(actor, mini_batch, learning_rate):
    """One optimizer step on a mini-batch (indices): (its ActorMicroBatches, sums of the losses of each on the device,
    LateMetrics of ActorCritic.step)."""
    experience = actor.experience
    actor.zero_grad(learning_rate, experience.critic_learning_rate)
    pieces, partials = pieces_of(actor, mini_batch), []
    for piece in actor.each_micro_batch(pieces):
        blocks = ppo_loss_blocks(int(experience.rollouts.target_lengths[piece.chosen].sum()))
        partials.append(device.xp().empty((blocks, SUMS), np.float32))
        forward_backward(actor, piece.chosen, piece.scale, partials[-1])
    return pieces, partials, actor.step(learning_rate, experience.critic_learning_rate)


class ActorMicroBatch(NamedTuple):
    """Completions `chosen` (indices) that go forward and backward together, of part number `part` of a mini-batch.

    tokens: completion tokens of the part, over which the loss is a mean; scale: multiplies the loss of each of its
    tokens.
    """

    part: int
    chosen: np.ndarray
    tokens: int
    scale: float


def pieces_of(actor, mini_batch):
    """The ActorMicroBatches of a mini-batch (indices), in the order in which a step adds their gradients: list."""
    train, rollouts, size = actor.train, actor.experience.rollouts, actor.train.per_device_train_batch_size
    parts, pieces = [mini_batch[first : first + size] for first in range(0, len(mini_batch), size)], []
    for number, part in enumerate(parts):
        tokens = int(rollouts.target_lengths[part].sum())
        scale = 1.0 / (tokens * len(parts))
        pieces += [ActorMicroBatch(number, chosen, tokens, scale) for chosen in parts_of_tokens(rollouts, part, train)]
    lengths = rollouts.lengths
    return costliest_first(pieces, actor.model.config, lambda piece: lengths[piece.chosen])


def parts_of_tokens(rollouts, chosen, train):
    """Completions `chosen` (indices), as many at a time as max_tokens_per_micro_batch allows: list of arrays."""
    if train.max_tokens_per_micro_batch is None:
        return [chosen]
    lengths = rollouts.lengths[chosen]
    ranges = rollout.ranges_of_tokens(lengths, train.max_tokens_per_micro_batch)
    return [chosen[first:end] for first, end in ranges]


def forward_backward(actor, chosen, scale, partials):
    """Forward, loss and backward of completions `chosen` (indices) of the batch that the actor holds.

    Adds to the gradients; partials (ppo_loss_blocks(T), SUMS) is written.
    """
    train, buffer, arena = actor.train, actor.buffer, actor.policy.arena
    batch, rows = micro_batch(actor.experience.rollouts, chosen, actor.prefix_sharing())
    with actor.scope():
        outputs = (arena.empty((len(rows),), np.float32) for _ in range(5))
        logprobs, entropy, values, dlogprobs, dvalues = outputs
        # ids -> logprobs, values
        forward = actor.forward(batch, logprobs, entropy, values)
        # logprobs, values -> loss
        predictions = TokenPredictions(logprobs, entropy, values, device.asarray(rows))
        before = RolloutArrays(buffer.old_logprobs, buffer.advantages, buffer.values, buffer.returns)
        ppo_loss(predictions, before, train, scale, PPOOutputs(dlogprobs, dvalues, partials))
        dentropy = None
        if train.entropy_coef:
            dentropy = arena.empty((len(rows),), np.float32)
            fill(-train.entropy_coef * scale, dentropy)
        # loss -> grads
        actor.backward(forward, dlogprobs, dvalues, dentropy)


def micro_batch(rollouts, chosen, sharing=None):
    """Completions `chosen` (indices) of Rollouts: (TargetBatch, rows (T,) i32 of their tokens among all, host).

    sharing: MicroBatch.sharing_prefixes'.
    """
    batch, rows = host_batch(rollouts, chosen, sharing)
    return batch.to_device().targets, rows


def host_batch(rollouts, chosen, sharing=None):
    """micro_batch's results, of which the first is a MicroBatch."""
    prompt_lengths, completion_lengths = rollouts.prompt_lengths[chosen], rollouts.completion_lengths[chosen]
    lengths = prompt_lengths + completion_lengths
    token_ids = rollouts.token_ids[_ranges(_starts(rollouts.lengths)[chosen], lengths)]
    targets = _ranges(_starts(lengths) + prompt_lengths, completion_lengths)
    if len(rollouts.drawn):
        targets = targets[rollouts.drawn[_ranges(_starts(rollouts.completion_lengths)[chosen], completion_lengths)]]
    rows = _ranges(_starts(rollouts.target_lengths)[chosen], rollouts.target_lengths[chosen]).astype(np.int32)
    return MicroBatch.of(token_ids, lengths, targets).sharing_prefixes(sharing), rows


def _starts(lengths):
    """The offset at which each of the parts laid end to end begins: (B,) int64."""
    return np.cumsum(lengths, dtype=np.int64) - lengths


def _ranges(starts, lengths):
    """starts[0], starts[0] + 1, ... (lengths[0] of them), starts[1], ...: (sum of lengths,) int64."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(lengths.sum())


def completions_at_once(train, length):
    """The most completions that one forward and backward pass has, with prompts of `length` tokens each: int."""
    most = min(train.per_device_train_batch_size, train.mini_batch_size)
    limit = train.max_tokens_per_micro_batch
    return most if limit is None else min(max(limit // length, 1), most)


def models_of(run):
    """The Models of a run."""
    has_reference = run.train.kl_coef > 0
    if run.critic.shared:
        return Models(LM_HEAD + SCORE_HEAD, has_reference)
    config = read_config(find_model(run.critic.model or run.model, weights=False))
    return Models(LM_HEAD, has_reference, replace(config, heads=SCORE_HEAD))


def rehearse(run, policy, critic, rollouts, every_form):
    """See TrainerOnPrompts: the evaluation of a batch, and the optimizer step on it as one mini-batch."""
    actor, every = ActorCritic(policy, critic, run), np.arange(rollouts.num_sequences)
    actor.experience = Experience(rollouts, 0, 0.0, actor.score_moments)
    rollouts.is_stale = run.has_other_logprobs

    def evaluate_batch():
        evaluate_tokens(actor, rollouts)
        estimate_advantages(actor.buffer, rollouts, np.zeros(len(every)), run.train)

    def apart(function):
        with policy.computing_apart():
            function()

    for function in (evaluate_batch, partial(optimizer_step, actor, every, 0.0)):
        yield partial(apart, function)
        if actor.prefix_sharing() is not None:
            # The prompts of these completions are one.
            yield function


TRAINER = TrainerOnPrompts(PPORun, load, generate, train_step, models_of, completions_at_once, rehearse, save_final)
