import numpy as np
import pytest

from rlnumba.kernels.rl.gae import gae, gae_ref
from rlnumba.runtime import device
from tests.close import assert_close

LENGTHS = [1, 31, 32, 33, 0, 70]


def run(rewards, values, cu_seqlens, gamma, lam):
    advantages, returns = (device.xp().full(len(rewards), np.nan, np.float32) for _ in range(2))
    arrays = (device.asarray(a.astype(np.float32)) for a in (rewards, values))
    gae(*arrays, device.asarray(cu_seqlens), gamma, lam, advantages, returns)
    return advantages, returns


def check_against_reference(rng, lengths, gamma, lam):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    rewards, values = (rng.standard_normal(cu_seqlens[-1]).astype(np.float32) for _ in range(2))
    actual = run(rewards, values, cu_seqlens, gamma, lam)
    expected = gae_ref(rewards.astype(np.float64), values.astype(np.float64), cu_seqlens, gamma, lam)
    for got, want, name in zip(actual, expected, ("advantages", "returns"), strict=True):
        assert_close(got, want, terms=max(lengths, default=1), what=name)


def test_reference_is_the_sum_of_discounted_deltas(rng):
    rewards, values = rng.standard_normal(6), rng.standard_normal(6)
    advantages, returns = gae_ref(rewards, values, np.array([0, 2, 6]), 0.9, 0.8)
    for begin, end in ((0, 2), (2, 6)):
        following = np.append(values[begin + 1 : end], 0.0)
        deltas = rewards[begin:end] + 0.9 * following - values[begin:end]
        for t in range(end - begin):
            total = sum(0.72**d * delta for d, delta in enumerate(deltas[t:]))
            assert abs(advantages[begin + t] - total) < 1e-12
            assert abs(returns[begin + t] - total - values[begin + t]) < 1e-12


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 1.0), (0.0, 0.5), (1.0, 1.0)])
@pytest.mark.sim
def test_simulator(rng, gamma, lam):
    check_against_reference(rng, LENGTHS, gamma, lam)


def test_numpy_device(rng):
    if device.name() == "cpu":
        check_against_reference(rng, [*LENGTHS, 1000], 0.99, 0.95)
        check_against_reference(rng, [], 0.99, 0.95)


@pytest.mark.gpu
@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.99, 1.0), (1.0, 1.0)])
def test_gpu(rng, gamma, lam):
    check_against_reference(rng, [*LENGTHS, *range(500, 640), 4097], gamma, lam)
    check_against_reference(rng, [], gamma, lam)


def test_wrong_arguments_are_named():
    values = np.zeros(3)
    with pytest.raises(ValueError, match=r"gae: values must be \(3\) float32, got \(2,\) float32"):
        run(values, values[:2], np.array([0, 3], np.int32), 1.0, 0.95)
