"""REINFORCE Leave-One-Out: the baseline of a completion is the mean reward of the other completions of its prompt.

    reward     R = clip(sum of the weighted reward functions, reward_clip_range) - beta sum over tokens (old - ref)
    advantage  A = R - mean of the other completions' R
    loss       mean over completions of -min(c A, clip(c, 1 - epsilon, 1 + epsilon_high) A),   c = exp(sum (lp - old))

A completion is one action: its probability is one number, and so is its KL, which is part of the reward. The loop, the
geometry of generations and optimizer steps, and the rollout are GRPO's (trainers/grpo.py).

Sources: Ahmadian et al. 2024 (arXiv 2402.14740); TRL 1.16's RLOOTrainer, whose names, defaults and semantics these are.
"""

import numpy as np

from rlnumba.kernels.nn.elementwise import fill
from rlnumba.kernels.rl.advantage import rloo_advantages
from rlnumba.kernels.rl.policy_loss import METRICS, policy_loss, policy_loss_scale, policy_metrics
from rlnumba.runtime import device
from rlnumba.trainers import rollout
from rlnumba.trainers.core import LateMetrics
from rlnumba.trainers.grpo import forward_parts, host_logprobs, in_order_of_step, is_stale, load, sampler_is_exact
from rlnumba.trainers.prompt_loop import Algorithm, train_on_prompts
from rlnumba.trainers.prompt_run import sampling_params

# Added to the standard deviation that normalize_advantages divides by, as in TRL.
EPSILON = 1e-4


def run_rloo(run, resume=False, reward_funcs=(), communicator=None):
    """Train an RLOORun, and return its TrainerState; writes its output_dir. The arguments are run_grpo's."""
    return train_on_prompts(
        Algorithm("rloo", load, generate, train_step), run.weighted(), resume, reward_funcs, communicator
    )


def generate(policy, llm, rewards, prompts, order, run, trainer_state, index, on_policy, clock, writer, ahead=None):
    """One generation, with the advantages of its completions: see prompt_loop.Algorithm."""
    train, step = run.train, trainer_state.global_step
    # prompt -> ids -> completions, text -> reward
    if ahead:
        chosen, generation = ahead.take(trainer_state, clock, writer.status)
    else:
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
        rollouts.is_stale = ahead is not None and is_stale(generation, step)
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
    metrics |= order.shares() | (ahead.metrics if ahead else {})
    if policy.reference is not None:
        metrics["kl"] = float(kl.sum() / max(rollouts.num_active, 1))
    return rollouts, [generation], metrics


def add_logprobs(policy, rollouts):
    """Write the log-probs of the reference and, where the sampler's differ from them, of the policy.

    Returns the KL of each completion by their difference, sum of mask (old - ref): (B,) float64, 0 without a reference.
    """
    parts = forward_parts(rollouts, policy.train)
    old_logprobs = rollouts.rollout_logprobs
    if rollouts.is_stale or not sampler_is_exact(policy.train):
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


# Of a micro-batch, on the device: see MicroBatchGraphs.run.
OUTPUTS = {"entropy": (None, np.float32), "loss": (1, np.float32), "stats": (METRICS, np.float32)}


def train_step(policy, micro_batches, learning_rate):
    """One optimizer step on a list of Rollouts: LateMetrics. Writes gradients, weights and optimizer state."""
    config = policy.train.policy_loss
    micro_batches, _ = in_order_of_step(policy, micro_batches)
    num_tokens = sum(part.num_active for part in micro_batches)
    num_sequences = sum(len(part.advantages) for part in micro_batches)
    exact, readings = sampler_is_exact(policy.train), []
    policy.zero_grad(learning_rate)
    for part in policy.each_micro_batch(micro_batches):
        scale = policy_loss_scale(config, num_sequences, num_tokens, part.num_active, len(micro_batches))
        batch = part.micro_batch().with_arrays(others={"scale": np.float32([scale])})
        if part.on_policy and exact and not part.is_stale and not policy.has_dropout:
            readings.append(policy.run(known_gradient_step, batch, OUTPUTS))
        else:
            readings.append(policy.run(general_step, batch, OUTPUTS, part.on_policy and policy.has_dropout))
    # grads -> step
    info = policy.step(learning_rate)
    mask = np.concatenate([part.loss_mask for part in micro_batches])

    def read():
        results = policy.of_all_micro_batches([reading() for reading in readings])
        loss, entropy = np.float32(0.0), np.concatenate([found["entropy"] for found in results])
        for found in results:
            loss += found["loss"][0]
        metrics = {"loss": float(loss), **info, "entropy": float(np.dot(entropy, mask) / max(num_tokens, 1))}
        return metrics | policy_metrics(np.stack([found["stats"] for found in results]), config, rollout=True)

    return LateMetrics(read)


def known_gradient_step(policy, batch, results):
    """Forward, loss and backward where the forward will compute the sampler's log-probs, so the gradient is known."""
    sampled = batch.arrays["rollout_logprobs"]
    logprobs, dlogprobs = (policy.arena.empty(sampled.shape, np.float32) for _ in range(2))
    ignored = {"loss": policy.arena.empty((1,), np.float32), "stats": policy.arena.empty((METRICS,), np.float32)}
    loss_backward(policy, batch, sampled, sampled, dlogprobs, ignored)
    policy.forward_backward(batch.targets, dlogprobs, logprobs, results["entropy"])
    loss_backward(policy, batch, logprobs, sampled, dlogprobs, results)


def general_step(policy, batch, results, forward_is_old):
    """Forward, loss and backward. forward_is_old: whether the log-probs of this forward are the old policy's."""
    # ids -> logprobs -> loss -> grads
    logprobs, dlogprobs = (policy.arena.empty(batch.targets.rows.shape, np.float32) for _ in range(2))
    forward = policy.forward(batch.targets, logprobs, results["entropy"])
    old_logprobs = logprobs
    if not forward_is_old:
        old_logprobs = batch.arrays.get("old_logprobs", batch.arrays["rollout_logprobs"])
    loss_backward(policy, batch, logprobs, old_logprobs, dlogprobs, results)
    policy.backward(forward, dlogprobs)


def loss_backward(policy, batch, logprobs, old_logprobs, dlogprobs, results):
    """policy_loss of a DeviceBatch of Rollouts: dlogprobs, and loss and stats (METRICS,) of `results`, are written."""
    arrays, config = batch.arrays, policy.train.policy_loss
    of_batch = arrays["rollout_logprobs"], arrays["advantages"], arrays["loss_mask"], arrays["completion_bounds"]
    of_sequences = policy.arena.empty((arrays["advantages"].shape[0], METRICS), np.float32)
    outputs = results["loss"], dlogprobs, of_sequences, results["stats"]
    fill(0.0, results["loss"])
    policy_loss(logprobs, old_logprobs, None, *of_batch, config, arrays["scale"], *outputs)
