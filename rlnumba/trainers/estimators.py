"""Advantages by other estimators than GRPO's (kernels/rl/advantage.py), and a penalty of length.

With r the rewards, a group the completions of one prompt, T a completion's tokens with loss mask 1:

    maxrl                           A = (r - mean(group)) / mean(group); 0 where that mean is not above 0
    reinforce_plus_plus             A = whiten(r)
    reinforce_plus_plus_baseline    A = whiten(r - mean(group))
    opo                             A = r - sum(T r) / sum(T), sums over the group: long completions count more
    remax                           A = r - the reward of a further completion of the prompt, the greedy one
    rae                             b <- 0.95 b + 0.05 r, A = r - b, completion after completion; b begins with 0
    gigpo                           A = n(r, group) + step_advantage_w n(R, step group), of each turn of an episode
    hgpo                            A = sum_k w_k n(R, step group k) / sum_k w_k, w_k = (k + 1)^hgpo_alpha, of each turn

    R is the return of a turn, gamma^k r with k turns after it, because an episode has one reward, at its end. A step
    group is the turns of a group's episodes that follow the same tokens of the environment: a result, or the prompt.
    n(x, G) = x - mean(G), with mean_std_norm divided by std(G) + 1e-6; 0 where G has one member. Step group k, from 1
    to hgpo_history_length + 1, is the turns that have followed the same last k of these; group 1 is gigpo's. The sums
    are over the k of which n is not 0, and with hgpo_base_group over k = 0, too, which is gigpo's n(r, group). Of the
    step groups of hgpo, std divides by the number of members, else by one less.

    whiten(a) = (a - mean) / sqrt(var + 1e-8), over all tokens of the generation: a completion counts T times; the
    variance divides by their number - 1
    length_penalty                  r <- r - length_penalty tokens / max_completion_length, before any of these

A completion without a reward is left out of all means and has advantage 0, as have those whose greedy one has none.
These are a few hundred numbers, on the host in float64. rae's b is kept from generation to generation and in
checkpoints.

Sources: Tajwar et al. 2026 (MaxRL); Hu 2025 (REINFORCE++, arXiv 2501.03262), Hao et al. 2025 (OPO, arXiv 2505.23585),
Li et al. 2023 (ReMax, arXiv 2310.10505) and verl, whose names are adv_estimator's; Liu et al. 2025 (SPIRAL, arXiv
2506.24119: role-conditioned advantage estimation, here with one role); Feng et al. 2025 (GiGPO, arXiv 2505.10978) and
verl-agent, whose names step_advantage_w, mean_norm and mean_std_norm are; He et al. 2026 (HGPO, arXiv 2602.22817), in
the form of the authors' code (verl-agent's recipe/hgpo), where k counts the state of the turn itself.
"""

from typing import NamedTuple

import numpy as np

RAE_DECAY = 0.95
WHITEN_EPSILON = 1e-8
GIGPO_EPSILON = 1e-6
# Advantages of so little are 0 but for rounding: the group has no weight in hgpo's sum.
HGPO_ZERO = 1e-9


class StepAdvantages(NamedTuple):
    """The step advantages of an episode's K turns, which are added to its own, (K,) float64, and the number of turns in
    the step group of each, (K,) int."""

    values: np.ndarray
    group_sizes: np.ndarray


def advantages_of(estimator, rewards, num_generations, num_active, state, baselines=None):
    """Advantages (B,) float64 of rewards (B,), NaN where there is none; a group is num_generations in a row.

    num_active (B,): tokens with loss mask 1. state: dict, of which rae reads and writes "rae_baseline". baselines (B,):
    of remax, the rewards of the greedy completions.
    """
    rewards = np.asarray(rewards, np.float64)
    known = ~np.isnan(rewards)
    filled = np.where(known, rewards, 0.0)
    tokens = np.where(known, num_active, 0)

    def group_mean(weights):
        """The mean reward of each completion's group, its members weighted, (B,)."""
        total, count = (each.reshape(-1, num_generations).sum(axis=1) for each in (weights * filled, weights))
        return np.repeat(total / np.maximum(count, 1), num_generations)

    mean = group_mean(known)
    if estimator == "maxrl":
        found = np.where(mean > 0, (filled - mean) / np.where(mean > 0, mean, 1.0), 0.0)
    elif estimator == "opo":
        found = filled - group_mean(tokens)
    elif estimator == "remax":
        known &= ~np.isnan(baselines)
        found = filled - baselines
    elif estimator == "rae":
        found, baseline = np.zeros(len(rewards)), state.get("rae_baseline", 0.0)
        for i in np.flatnonzero(known):
            baseline = RAE_DECAY * baseline + (1 - RAE_DECAY) * rewards[i]
            found[i] = rewards[i] - baseline
        state["rae_baseline"] = float(baseline)
    else:
        found = filled - mean if estimator == "reinforce_plus_plus_baseline" else filled
        total = max(tokens.sum(), 1)
        center = np.sum(tokens * found) / total
        variance = np.sum(tokens * (found - center) ** 2) / max(total - 1, 1)
        found = (found - center) / np.sqrt(variance + WHITEN_EPSILON)
    return np.where(known, found, 0.0)


def turns_of(mask):
    """[(first, end)] of the turns of an episode: the runs of drawn tokens in its mask, (T,) bool."""
    edges = np.diff(np.concatenate([[0], np.asarray(mask, np.int8), [0]]))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


def anchors_of(prompt_token_ids, token_ids, mask):
    """The anchor state of each turn of an episode: the bytes of the environment's tokens before it, of the first one
    those of the prompt. token_ids, mask (T,): of the completion."""
    contexts, end = [], 0
    for first, after in turns_of(mask):
        contexts.append(token_ids[end:first] if end else prompt_token_ids)
        end = after
    return [np.asarray(ids, np.int32).tobytes() for ids in contexts]


def gigpo_advantages(rewards, anchors, train):
    """gigpo's (advantages (B,) float64 of the episodes of one group, a StepAdvantages of each).

    rewards (B,), NaN where there is none; anchors: anchors_of each. train: [train], with gigpo_gamma, gigpo_mode and
    step_advantage_w.
    """
    returns, divides = _returns(rewards, anchors, train), train.gigpo_mode == "mean_std_norm"
    values, sizes = _normalised(returns, _step_groups(anchors, 1), divides)
    return _of_episodes(rewards, divides), _by_episode(train.step_advantage_w * values, sizes, anchors)


def hgpo_advantages(rewards, anchors, train):
    """hgpo's (advantages (B,) float64 of the episodes of one group, all 0; a StepAdvantages of each).

    The arguments are gigpo_advantages'; train has hgpo_history_length, hgpo_alpha and hgpo_base_group. The sizes are
    those of the groups of the last state alone.
    """
    returns, divides = _returns(rewards, anchors, train), train.gigpo_mode == "mean_std_norm"
    levels = [
        _normalised(returns, _step_groups(anchors, k), divides, ddof=0) for k in range(1, train.hgpo_history_length + 2)
    ]
    values, first = [value for value, _ in levels], 1
    if train.hgpo_base_group:
        values, first = [np.repeat(_of_episodes(rewards, divides), [len(states) for states in anchors]), *values], 0
    values = np.array(values)
    weights = (np.arange(len(values)) + first + 1.0)[:, None] ** train.hgpo_alpha * (np.abs(values) > HGPO_ZERO)
    total = weights.sum(axis=0)
    mean = np.sum(weights * values, axis=0) / np.where(total > 0, total, 1.0)
    return np.zeros(len(anchors)), _by_episode(mean, levels[0][1], anchors)


def _returns(rewards, anchors, train):
    """The return of each turn of all episodes, end to end, (N,) float64."""
    turns_left = np.concatenate([np.arange(len(states))[::-1] for states in anchors])
    return (
        np.repeat(np.asarray(rewards, np.float64), [len(states) for states in anchors]) * train.gigpo_gamma**turns_left
    )


def _step_groups(anchors, k):
    """The index of each turn's step group by its last k states, (N,) int: one of its own for a turn with fewer."""
    windows = [
        tuple(states[turn + 1 - k : turn + 1]) if turn + 1 >= k else (episode, turn)
        for episode, states in enumerate(anchors)
        for turn in range(len(states))
    ]
    numbers = {}
    return np.array([numbers.setdefault(window, len(numbers)) for window in windows])


def _of_episodes(rewards, divides):
    """The advantages of the episodes of a group by their rewards, (B,) float64."""
    return _normalised(np.asarray(rewards, np.float64), np.zeros(len(rewards), int), divides)[0]


def _by_episode(values, sizes, anchors):
    """A StepAdvantages of each episode, of values and sizes (N,) of all turns."""
    ends = np.cumsum([len(states) for states in anchors])[:-1]
    return [StepAdvantages(*pair) for pair in zip(np.split(values, ends), np.split(sizes, ends), strict=True)]


# The estimators that compare turns: (rewards, anchors, train) -> (advantages of the episodes, StepAdvantages).
OF_TURNS = {"gigpo": gigpo_advantages, "hgpo": hgpo_advantages}


def _normalised(values, groups, divides, ddof=1):
    """(values (N,) less the mean of their group and, if it divides, by its standard deviation; the sizes of the groups,
    (N,) int). groups (N,): indices. NaN is no member, and becomes 0. The variance divides by the members less ddof."""
    known = ~np.isnan(values)
    filled = np.where(known, values, 0.0)

    def sums(numbers):
        """The sum of each value's group, (N,)."""
        return np.bincount(groups, numbers)[groups]

    sizes = sums(known)
    found = np.where(known & (sizes > 1), filled - sums(filled) / np.maximum(sizes, 1), 0.0)
    if divides:
        found /= np.sqrt(sums(found**2) / np.maximum(sizes - ddof, 1)) + GIGPO_EPSILON
    return found, sizes.astype(int)
