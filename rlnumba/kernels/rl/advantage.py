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

from rlnumba.kernels.checks import F32, check
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

    The mean is that of the distances from the lowest reward, as in group_mean_std.
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
    rewards_per_func, weights, num_generations, advantages, scale_rewards="group", aggregation="sum_then_normalize"
):
    """advantages = the distances of the weighted sums from their group's mean, scaled.

    rewards_per_func (B, F), NaN where a function gave None; weights (F,); advantages (B,), all float32; advantages is
    written, 0 in a group of equal rewards or with fewer than two. Raises ValueError for other shapes, dtypes or
    options, and where num_generations does not divide B.
    """
    samples, functions = check("group_advantages", "rewards_per_func", rewards_per_func, (None, None), F32)
    _check_groups("group_advantages", num_generations, samples)
    for name, value, known in (("scale_rewards", scale_rewards, SCALES), ("aggregation", aggregation, AGGREGATIONS)):
        if value not in known:
            raise ValueError(f"group_advantages: {name} must be one of {', '.join(known)}, got {value!r}")
    check("group_advantages", "weights", weights, (functions,), F32)
    check("group_advantages", "advantages", advantages, (samples,), F32)
    if device.name() == "cpu":
        advantages[...] = group_advantages_ref(rewards_per_func, weights, num_generations, scale_rewards, aggregation)
        return
    if not samples:
        return
    xp, blocks = device.xp(), -(-samples // THREADS)
    if aggregation == "normalize_then_sum":
        z, columns = xp.empty_like(rewards_per_func), samples // num_generations * functions
        arguments = rewards_per_func, num_generations, EPSILON, z
        launch(normalize_functions_kernel, -(-columns // THREADS), THREADS, *arguments)
        # From here on the batch is one group.
        rewards_per_func, num_generations, scale_rewards = z, samples, "group"
    rewards = xp.empty(samples, np.float32)
    launch(reward_sum_kernel, blocks, THREADS, rewards_per_func, weights, rewards)
    mean, std = (xp.empty(samples // num_generations, np.float32) for _ in range(2))
    group_mean_std(rewards.reshape(-1, num_generations), mean, std)
    rows_per_std = num_generations
    if scale_rewards == "batch":
        rows_per_std, std = samples, std[:1]
        group_mean_std(rewards.reshape(1, samples), xp.empty(1, np.float32), std)
    scaled = rewards, num_generations, mean, rows_per_std, std, int(scale_rewards != "none"), EPSILON
    launch(advantage_kernel, blocks, THREADS, *scaled, advantages)


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
    """advantages of group_advantages, in rewards_per_func's precision."""

    def mean_std(values, size):
        """(mean, std) of each `size` rows, for each column apart, in the shape of values, (B,) or (B, F)."""
        groups = values.T.reshape(-1, size)
        return (np.repeat(part, size).reshape(values.T.shape).T for part in group_mean_std_ref(groups))

    samples = max(len(rewards_per_func), 1)
    if aggregation == "normalize_then_sum":
        mean, std = mean_std(rewards_per_func, num_generations)
        rewards_per_func = (rewards_per_func - mean) / (std + EPSILON)
        num_generations, scale_rewards = samples, "group"
    unscored = np.isnan(rewards_per_func).all(axis=1)
    rewards = np.where(unscored, np.nan, np.nansum(rewards_per_func * weights, axis=1))
    mean, std = mean_std(rewards, num_generations)
    if scale_rewards == "batch":
        _, std = mean_std(rewards, samples)
    return np.nan_to_num((rewards - mean) / (1.0 if scale_rewards == "none" else std + EPSILON))


def rloo_advantages_ref(rewards, num_generations):
    """advantages of rloo_advantages, in rewards' precision."""
    grouped = rewards.reshape(-1, num_generations)
    others = np.sum(~np.isnan(grouped), axis=1, keepdims=True) - 1
    baseline = (np.nansum(grouped, axis=1, keepdims=True) - grouped) / np.maximum(others, 1)
    return np.where(np.isnan(grouped) | (others < 1), 0.0, grouped - baseline).reshape(-1)
