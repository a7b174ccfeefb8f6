import numpy as np
import pytest

from rlnumba.kernels.rl.advantage import (
    AGGREGATIONS,
    SCALES,
    group_advantages,
    group_advantages_ref,
    rloo_advantages,
    rloo_advantages_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close

OPTIONS = [("group", "sum_then_normalize"), ("group", "normalize_then_sum")] + [
    (scale, "sum_then_normalize") for scale in ("batch", "none")
]


def make_rewards(rng, groups, num_generations, functions):
    """Rewards with holes: the first group is without any, the second has one reward left."""
    rewards = rng.standard_normal((groups * num_generations, functions)).astype(np.float32)
    rewards[rng.random(rewards.shape) < 0.2] = np.nan
    rewards[:num_generations] = np.nan
    rewards[num_generations + 1 : 2 * num_generations] = np.nan
    return rewards, rng.uniform(0.5, 2, functions).astype(np.float32)


def run(rewards_per_func, weights, num_generations, *options):
    advantages = device.xp().full(len(rewards_per_func), 7, np.float32)
    arrays = device.asarray(rewards_per_func), device.asarray(weights)
    group_advantages(*arrays, num_generations, advantages, *options)
    return device.to_host(advantages)


def check_against_reference(rng, groups, num_generations, functions, options):
    rewards_per_func, weights = make_rewards(rng, groups, num_generations, functions)
    actual = run(rewards_per_func, weights, num_generations, *options)
    wide = rewards_per_func.astype(np.float64), weights.astype(np.float64)
    assert_close(actual, group_advantages_ref(*wide, num_generations, *options), terms=4 * num_generations)
    rewards = np.nansum(rewards_per_func, axis=1)
    alone = rloo(rewards, num_generations)
    assert_close(alone, rloo_advantages_ref(rewards.astype(np.float64), num_generations), terms=4 * num_generations)


def rloo(rewards, num_generations):
    advantages = device.xp().full(len(rewards), 7, np.float32)
    rloo_advantages(device.asarray(rewards.astype(np.float32)), num_generations, advantages)
    return device.to_host(advantages)


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.sim
def test_simulator(rng, options):
    check_against_reference(rng, 3, 5, 2, options)


@pytest.mark.sim
def test_simulator_group_of_more_than_a_warp(rng):
    check_against_reference(rng, 4, 33, 1, OPTIONS[0])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_cpu_device(rng, scale, aggregation):
    if device.name() == "cpu":
        check_against_reference(rng, 9, 8, 3, (scale, aggregation))
        check_against_reference(rng, 0, 8, 3, (scale, aggregation))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num_generations", [1, 8, 1024])
def test_gpu(rng, scale, aggregation, num_generations):
    for groups in (0, 2, 65):
        check_against_reference(rng, groups, num_generations, 3, (scale, aggregation))


def test_unscorable_completions_have_no_weight(rng):
    """The sums are 1, none, 0 and 2: their mean is 1, and their standard deviation 1."""
    nan = np.nan
    advantages = run(np.array([[1, nan], [nan, nan], [0, 0], [1, 1]], np.float32), np.ones(2, np.float32), 4)
    assert advantages[1] == 0
    assert_close(advantages[[0, 2, 3]], np.array([0, -1, 1]) / (1 + 1e-4), terms=4)


def test_equal_rewards_teach_nothing():
    """Exactly nothing, though a float32 sum of five times 0.3 is not 1.5."""
    for aggregation in AGGREGATIONS:
        assert np.all(run(np.full((15, 1), 0.3, np.float32), np.ones(1, np.float32), 5, "group", aggregation) == 0)


def test_rloo_without_a_reward_or_without_others():
    assert list(rloo(np.array([1.0, np.nan, np.nan, np.nan, 3.0, 1.0]), 2)) == [0, 0, 0, 0, 2, -2]
    assert list(rloo(np.array([1.0, 2.0]), 1)) == [0, 0]


def test_wrong_arguments_are_named(rng):
    rewards, weights = np.zeros((6, 1), np.float32), np.ones(1, np.float32)
    with pytest.raises(ValueError, match="group_advantages: num_generations 4 does not divide 6 completions"):
        run(rewards, weights, 4)
    with pytest.raises(
        ValueError, match="group_advantages: scale_rewards must be one of group, batch, none, got 'all'"
    ):
        run(rewards, weights, 3, "all")
    with pytest.raises(ValueError, match=r"group_advantages: weights must be \(1\) float32, got \(2,\) float32"):
        run(rewards, np.ones(2, np.float32), 3)
    with pytest.raises(ValueError, match="rloo_advantages: num_generations 0 does not divide 6 completions"):
        rloo(rewards[:, 0], 0)
