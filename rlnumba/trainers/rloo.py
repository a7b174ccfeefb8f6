"""REINFORCE Leave-One-Out: the baseline of a completion is the mean reward of the other completions of its prompt.

    reward     R = clip(sum of the weighted reward functions, reward_clip_range) - beta sum over tokens (old - ref)
    advantage  A = R - mean of the other completions' R
    loss       mean over completions of -min(c A, clip(c, 1 - epsilon, 1 + epsilon_high) A),   c = exp(sum (lp - old))

A completion is one action: its probability is one number, and so is its KL, which is part of the reward. The loop, the
geometry of generations and optimizer steps, and the rollout are GRPO's (trainers/grpo.py).

Sources: Ahmadian et al. 2024 (arXiv 2402.14740); TRL 1.16's RLOOTrainer, whose names, defaults and semantics these are.
"""

import numpy as np

from rlnumba.kernels.rl.advantage import rloo_advantages
from rlnumba.kernels.rl.policy_loss import METRICS, policy_loss, policy_loss_scale, policy_metrics
from rlnumba.runtime import device
from rlnumba.trainers import rollout
from rlnumba.trainers.grpo import (
    Algorithm,
    cut_by_tokens,
    forward_parts,
    host_logprobs,
    load,
    sampler_is_exact,
    sampling_params,
    train_on_prompts,
)

# Added to the standard deviation that normalize_advantages divides by, as in TRL.
EPSILON = 1e-4


def run_rloo(run, resume=False, reward_funcs=()):
    """Train an RLOORun; writes its output_dir. The arguments are run_grpo's."""
    train_on_prompts(Algorithm("rloo", load, generate, train_step), run, resume, reward_funcs)


def generate(policy, llm, rewards, prompts, order, run, trainer_state, index, on_policy, clock, writer):
    """One generation, with the advantages of its completions: see grpo.Algorithm."""
    train, step = run.train, trainer_state.global_step
    # prompt -> ids -> completions, text -> reward
    chosen = order.take(train.prompts_per_rollout)
    params = sampling_params(train, rollout.derived_seed(run.seed, step, index, 0), train.num_generations)
    llm.wake()
    generation = rollout.generate(llm, rewards, prompts, chosen, params, trainer_state, clock, writer.status)
    llm.sleep()
    with clock.phase("advantage"):
        order.record(chosen, generation.groups)
        # completions -> batch, in another order, so that groups spread over the micro-batches
        samples = generation.samples
        shuffled = np.random.default_rng(rollout.derived_seed(run.seed, step, index)).permutation(len(samples))
        rollouts = rollout.Rollouts.of([samples[i] for i in shuffled], train.mask_truncated_completions)
    # ids -> log-probs of policy and reference -> KL of each completion
    with clock.phase("logprob"):
        kl = np.empty(len(samples))
        kl[shuffled] = add_logprobs(policy, rollouts)
    with clock.phase("advantage"):
        # reward, KL -> advantage
        own_rewards = completion_rewards([sample.reward for sample in samples], kl, train)
        advantages = leave_one_out(own_rewards, train)
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage
        rollouts.advantages = advantages[shuffled]
    metrics = {"frac_reward_zero_std": rollout.frac_zero_std(own_rewards.reshape(-1, train.num_generations))}
    metrics |= order.shares()
    if policy.reference is not None:
        metrics["kl"] = float(kl.sum() / max(rollouts.num_active, 1))
    return rollouts, [generation], metrics


def add_logprobs(policy, rollouts):
    """Write the log-probs of the reference and, where the sampler's differ from them, of the policy.

    Returns the KL of each completion by their difference, sum of mask (old - ref): (B,) float64, 0 without a reference.
    """
    parts = forward_parts(rollouts, policy.train)
    old_logprobs = rollouts.rollout_logprobs
    if not sampler_is_exact(policy.train):
        old_logprobs = rollouts.old_logprobs = host_logprobs(policy, policy.model, parts)
    if policy.reference is None:
        return np.zeros(len(rollouts.advantages))
    rollouts.ref_logprobs = host_logprobs(policy, policy.reference, parts)
    owner = np.repeat(np.arange(len(rollouts.advantages)), rollouts.completion_lengths)
    difference = rollouts.loss_mask * (old_logprobs.astype(np.float64) - rollouts.ref_logprobs)
    return np.bincount(owner, difference, minlength=len(rollouts.advantages))


def completion_rewards(rewards, kl, train):
    """R of completions from their rewards and KLs, (B,) each: (B,) float64, NaN where the reward is."""
    rewards = np.array(rewards, np.float64)
    if train.reward_clip_range is not None:
        rewards = np.clip(rewards, *train.reward_clip_range)
    return rewards - train.beta * kl


def leave_one_out(rewards, train):
    """Advantages (B,) float32 of rewards (B,); 0 where the reward is NaN, or the only one of its prompt."""
    advantages = device.xp().empty(len(rewards), np.float32)
    rloo_advantages(device.asarray(rewards.astype(np.float32)), train.num_generations, advantages)
    advantages = device.to_host(advantages)
    if not train.normalize_advantages:
        return advantages
    known = ~np.isnan(rewards)
    grouped = known.reshape(-1, train.num_generations)
    known &= np.repeat(grouped.sum(axis=1) > 1, train.num_generations)
    kept = advantages[known].astype(np.float64)
    std = kept.std(ddof=1) if len(kept) > 1 else 0.0
    scaled = (advantages - (kept.mean() if len(kept) else 0.0)) / (std + EPSILON)
    return np.where(known, scaled, 0.0).astype(np.float32)


def train_step(policy, micro_batches, learning_rate):
    """One optimizer step on a list of Rollouts: metrics by name. Writes gradients, weights and optimizer state."""
    arena, xp, config = policy.arena, device.xp(), policy.train.policy_loss
    micro_batches, _ = cut_by_tokens(policy.train, micro_batches)
    num_tokens = sum(part.num_active for part in micro_batches)
    num_sequences = sum(len(part.advantages) for part in micro_batches)
    ends = np.cumsum([len(part.loss_mask) for part in micro_batches])
    exact = sampler_is_exact(policy.train)
    # On the device until the step is done, so that no micro-batch waits for the host.
    loss, ignored_loss = xp.zeros(1, np.float32), xp.zeros(1, np.float32)
    entropy = xp.empty(int(ends[-1]), np.float32)
    stats = xp.empty((len(micro_batches), METRICS), np.float32)
    policy.zero_grad(learning_rate)
    for i, part in enumerate(micro_batches):
        scale = policy_loss_scale(config, num_sequences, num_tokens, part.num_active, len(micro_batches))
        with policy.scope():
            batch = part.to_device()
            logprobs, dlogprobs = (arena.empty((len(part.loss_mask),), np.float32) for _ in range(2))
            part_entropy = entropy[ends[i] - len(part.loss_mask) : ends[i]]
            sampled = batch.rollout_logprobs
            if part.on_policy and exact and not policy.has_dropout:
                # The forward will compute the sampler's log-probs, so the gradient is known before it.
                ignored_stats = arena.empty((METRICS,), np.float32)
                loss_backward(policy, batch, sampled, sampled, scale, ignored_loss, dlogprobs, ignored_stats)
                policy.forward_backward(batch.targets, dlogprobs, logprobs, part_entropy)
                loss_backward(policy, batch, logprobs, sampled, scale, loss, dlogprobs, stats[i])
                continue
            # ids -> logprobs -> loss -> grads
            forward = policy.forward(batch.targets, logprobs, part_entropy)
            old_logprobs = sampled if batch.old_logprobs is None else batch.old_logprobs
            if part.on_policy and policy.has_dropout:
                old_logprobs = logprobs
            loss_backward(policy, batch, logprobs, old_logprobs, scale, loss, dlogprobs, stats[i])
            policy.backward(forward, dlogprobs)
    # grads -> step
    info = policy.step(learning_rate)
    mask = np.concatenate([part.loss_mask for part in micro_batches])
    metrics = {"loss": float(device.to_host(loss)[0]), **info}
    metrics["entropy"] = float(np.dot(device.to_host(entropy), mask) / max(num_tokens, 1))
    return metrics | policy_metrics(device.to_host(stats), config, rollout=True)


def loss_backward(policy, batch, logprobs, old_logprobs, scale, loss, dlogprobs, stats):
    """policy_loss of a RolloutBatch: loss is added to, dlogprobs and stats (METRICS,) are written."""
    of_batch = None, batch.rollout_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens
    of_sequences = policy.arena.empty((batch.advantages.shape[0], METRICS), np.float32)
    config = policy.train.policy_loss
    policy_loss(logprobs, old_logprobs, *of_batch, config, scale, loss, dlogprobs, of_sequences, stats)
