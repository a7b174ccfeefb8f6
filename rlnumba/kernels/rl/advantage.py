"""From rewards to advantages: a completion's reward relative to those of the other completions of its prompt.

    r = sum over functions of weight * reward, without the NaN (a function that gave None); NaN if all are
    A = r - mean(group)                                      scale_rewards "none" (Dr. GRPO)
    A = (r - mean(group)) / (std(group) + 1e-4)              "group" (GRPO)
    A = (r - mean(group)) / (std(all) + 1e-4)                "batch"

A completion whose reward is NaN is left out of mean and std, and its advantage is 0. std divides by n - 1.
"normalize_then_sum" (GDPO) instead turns each function's rewards into z = (r - mean(group)) / (std(group) + 1e-4), adds
those up with the weights, and scales the sums to the batch's mean 0 and standard deviation 1.

    A = r - mean of the group's other completions            rloo_advantages

rewards_per_func (B, F), r and A (B,), all float32; a group is num_generations rows in a row. Sources: TRL's
GRPOTrainer and RLOOTrainer; Shao et al. 2024 (GRPO), Liu et al. 2025 (Dr. GRPO), Ahmadian et al. 2024 (RLOO).
"""

import math

import numpy as np

from rlnumba.kernels.checks import F32, check, check_all
from rlnumba.kernels.nn.reduce import group_mean_std, group_mean_std_ref
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

THREADS = 128
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
# Added to the standard deviation that an advantage is divided by, as in TRL.
EPSILON = 1e-4


@cuda.jit
def reward_sum_kernel(rewards_per_func, weights, rewards):
    """rewards = the weighted sum of a row without its NaN, NaN if nothing is left; a thread owns a row."""
    row = cuda.grid(1)
    if row < rewards.shape[0]:
        total = np.float32(math.nan)
        for function in range(weights.shape[0]):
            value = rewards_per_func[row, function]
            if not math.isnan(value):
                value *= weights[function]
                total = value if math.isnan(total) else total + value
        rewards[row] = total


@cuda.jit
def normalize_functions_kernel(rewards_per_func, num_generations, epsilon, z):
    """z = (r - mean) / (std + epsilon) within a group, for each function apart; a thread owns group and function.

    As in group_mean_std the mean is that of the distances from the lowest reward.
    """
    index, functions = cuda.grid(1), z.shape[1]
    first, function = index // functions * num_generations, index % functions
    if first < z.shape[0]:
        one, lowest = np.float32(1.0), np.float32(math.inf)
        count = total = squares = np.float32(0.0)
        for row in range(first, first + num_generations):
            if not math.isnan(rewards_per_func[row, function]):
                lowest = min(lowest, rewards_per_func[row, function])
                count += one
        for row in range(first, first + num_generations):
            if not math.isnan(rewards_per_func[row, function]):
                total += rewards_per_func[row, function] - lowest
        mean = lowest + total / max(count, one)
        for row in range(first, first + num_generations):
            if not math.isnan(rewards_per_func[row, function]):
                difference = rewards_per_func[row, function] - mean
                squares += difference * difference
        std = math.sqrt(squares / max(count - one, one))
        for row in range(first, first + num_generations):
            z[row, function] = (rewards_per_func[row, function] - mean) / (std + epsilon)


@cuda.jit
def advantage_kernel(rewards, rows_per_mean, mean, rows_per_std, std, scale, epsilon, advantages):
    """A thread owns a completion; mean and std have an entry for every rows_per_... completions."""
    row = cuda.grid(1)
    if row < rewards.shape[0]:
        value = rewards[row] - mean[row // rows_per_mean]
        if scale:
            value /= std[row // rows_per_std] + epsilon
        advantages[row] = np.float32(0.0) if math.isnan(value) else value


@cuda.jit
def rloo_kernel(rewards, num_generations, advantages):
    """A thread owns a completion and sums the rewards of the others in its group, in their order."""
    row = cuda.grid(1)
    if row < rewards.shape[0]:
        first = row // num_generations * num_generations
        total = count = zero = np.float32(0.0)
        for other in range(first, first + num_generations):
            if other != row and not math.isnan(rewards[other]):
                total += rewards[other]
                count += np.float32(1.0)
        value = rewards[row] - total / max(count, np.float32(1.0))
        advantages[row] = zero if math.isnan(value) or count == zero else value


def _check_groups(op, num_generations, samples):
    if num_generations < 1 or samples % num_generations:
        raise ValueError(f"{op}: num_generations {num_generations} does not divide {samples} completions")


def group_advantages(
    rewards_per_func,
    weights,
    num_generations,
    rewards,
    advantages,
    group_std,
    scale_rewards="group",
    aggregation="sum_then_normalize",
):
    """rewards = the weighted sums; advantages = their distance from the group's mean, scaled.

    rewards_per_func (B, F), NaN where a function gave None; weights (F,); rewards, advantages (B,) and group_std
    (B / num_generations,), all float32; the last three are written. group_std is the standard deviation of a
    group's rewards whatever scale_rewards is: where it is 0, as with fewer than two rewards, all advantages of the
    group are 0. Raises ValueError for other shapes, dtypes or options, and where num_generations does not divide B.
    """
    samples, functions = check("group_advantages", "rewards_per_func", rewards_per_func, (None, None), F32)
    _check_groups("group_advantages", num_generations, samples)
    for name, value, known in (("scale_rewards", scale_rewards, SCALES), ("aggregation", aggregation, AGGREGATIONS)):
        if value not in known:
            raise ValueError(f"group_advantages: {name} must be one of {', '.join(known)}, got {value!r}")
    groups = samples // num_generations
    check("group_advantages", "weights", weights, (functions,), F32)
    check_all("group_advantages", (samples,), F32, rewards=rewards, advantages=advantages)
    check("group_advantages", "group_std", group_std, (groups,), F32)
    if device.name() == "cpu":
        rewards[...], advantages[...], group_std[...] = group_advantages_ref(
            rewards_per_func, weights, num_generations, scale_rewards, aggregation
        )
        return
    if not samples:
        return
    blocks, sums_functions = -(-samples // THREADS), aggregation == "normalize_then_sum"
    group_mean, batch_mean, batch_std = (device.xp().empty(size, np.float32) for size in (groups, 1, 1))
    launch(reward_sum_kernel, blocks, THREADS, rewards_per_func, weights, rewards)
    group_mean_std(rewards.reshape(groups, num_generations), group_mean, group_std)
    scaled = rewards, num_generations, group_mean, num_generations, group_std
    if sums_functions:
        z, arguments = device.xp().empty_like(rewards_per_func), (rewards_per_func, num_generations, EPSILON)
        launch(normalize_functions_kernel, -(-groups * functions // THREADS), THREADS, *arguments, z)
        launch(reward_sum_kernel, blocks, THREADS, z, weights, advantages)
        group_mean_std(advantages.reshape(1, samples), batch_mean, batch_std)
        scaled = advantages, samples, batch_mean, samples, batch_std
    elif scale_rewards == "batch":
        group_mean_std(rewards.reshape(1, samples), batch_mean, batch_std)
        scaled = rewards, num_generations, group_mean, samples, batch_std
    divides = int(sums_functions or scale_rewards != "none")
    launch(advantage_kernel, blocks, THREADS, *scaled, divides, EPSILON, advantages)


def rloo_advantages(rewards, num_generations, advantages):
    """advantages = a reward less the mean reward of the other completions of its prompt.

    rewards (B,), NaN where there is none, and advantages (B,) float32; advantages is written, 0 for NaN and for a
    completion without others. Raises ValueError for other arrays and where num_generations does not divide B.
    """
    (samples,) = check("rloo_advantages", "rewards", rewards, (None,), F32)
    check("rloo_advantages", "advantages", advantages, (samples,), F32)
    _check_groups("rloo_advantages", num_generations, samples)
    if device.name() == "cpu":
        advantages[...] = rloo_advantages_ref(rewards, num_generations)
        return
    launch(rloo_kernel, -(-samples // THREADS), THREADS, rewards, num_generations, advantages)


def group_advantages_ref(
    rewards_per_func, weights, num_generations, scale_rewards="group", aggregation="sum_then_normalize"
):
    """(rewards, advantages, group_std) of group_advantages, in rewards_per_func's precision."""

    def weighted(values):
        return np.where(np.isnan(values).all(axis=1), np.nan, np.nansum(values * weights, axis=1))

    def spread(values, size):
        return (np.repeat(part, size) for part in group_mean_std_ref(values.reshape(-1, size)))

    rewards = weighted(rewards_per_func)
    mean, deviation = spread(rewards, num_generations)
    group_std = deviation[::num_generations]
    if aggregation == "normalize_then_sum":
        columns = [spread(column, num_generations) for column in rewards_per_func.T]
        means, deviations = (np.stack(part, axis=1) for part in zip(*columns, strict=True))
        normalized = weighted((rewards_per_func - means) / (deviations + EPSILON))
        mean, deviation = spread(normalized, max(len(normalized), 1))
        advantages = (normalized - mean) / (deviation + EPSILON)
    else:
        if scale_rewards == "batch":
            _, deviation = spread(rewards, max(len(rewards), 1))
        advantages = (rewards - mean) / (1.0 if scale_rewards == "none" else deviation + EPSILON)
    return rewards, np.nan_to_num(advantages, nan=0.0), group_std


def rloo_advantages_ref(rewards, num_generations):
    """advantages of rloo_advantages, in rewards' precision."""
    grouped = rewards.reshape(-1, num_generations)
    others = np.sum(~np.isnan(grouped), axis=1, keepdims=True) - 1
    baseline = (np.nansum(grouped, axis=1, keepdims=True) - grouped) / np.maximum(others, 1)
    return np.where(np.isnan(grouped) | (others < 1), 0.0, grouped - baseline).reshape(-1)
