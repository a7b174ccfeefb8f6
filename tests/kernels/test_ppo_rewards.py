import pathlib

import numpy as np
import pytest

from rlnumba.kernels.nn.reduce import masked_whiten_ref
from rlnumba.kernels.rl.gae import gae_ref
from rlnumba.kernels.rl.ppo_rewards import ppo_rewards, ppo_rewards_kernel, ppo_rewards_ref
from rlnumba.runtime import device
from tests.close import assert_close

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "ppo_parts.npz"


def run(logprobs, ref_logprobs, scores, cu_seqlens, estimator):
    given = [device.asarray(a.astype(np.float32)) for a in (logprobs, ref_logprobs, scores)]
    outputs = [device.xp().full(len(logprobs), np.nan, np.float32) for _ in range(2)]
    ppo_rewards(*given, device.asarray(cu_seqlens), 0.3, estimator, *outputs)
    return outputs


def check_against_reference(rng, lengths, estimator):
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    logprobs = -rng.exponential(1.0, cu_seqlens[-1]).astype(np.float32)
    ref_logprobs = (logprobs + rng.normal(0, 0.5, len(logprobs))).astype(np.float32)
    scores = rng.standard_normal(len(lengths)).astype(np.float32)
    expected = ppo_rewards_ref(logprobs, ref_logprobs, scores, cu_seqlens, 0.3, estimator)
    for got, want, name in zip(
        run(logprobs, ref_logprobs, scores, cu_seqlens, estimator), expected, ("kl", "rewards"), strict=True
    ):
        assert_close(got, want, terms=8, what=name)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_golden_values_of_trl(estimator, whiten):
    """Rewards, advantages and returns of a batch, whitened or not."""
    stored = np.load(GOLDEN)
    valid = np.arange(stored["logprobs"].shape[1])[None] < stored["lengths"][:, None]
    logprobs, ref_logprobs, values = (stored[name][valid] for name in ("logprobs", "ref_logprobs", "values"))
    cu_seqlens = np.cumsum([0, *stored["lengths"]]).astype(np.int32)
    kl, rewards = ppo_rewards_ref(logprobs, ref_logprobs, stored["scores"], cu_seqlens, 0.1, estimator)
    every = np.ones(len(kl))
    if whiten:
        rewards = masked_whiten_ref(rewards, every, shift_mean=False)
    advantages, returns = gae_ref(rewards, values, cu_seqlens, 0.97, 0.9)
    advantages = masked_whiten_ref(advantages, every)
    found = {"kl": kl, "rewards": rewards, "advantages": advantages, "returns": returns}
    for name, got in found.items():
        want = stored[f"{estimator}_{int(whiten)}_{name}"][valid]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.sim
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_simulator(rng, estimator):
    check_against_reference(rng, [1, 127, 0, 129, 5], estimator)


def test_numpy_device(rng):
    if device.name() == "cpu":
        check_against_reference(rng, [1, 127, 0, 129, 5], "k3")
        check_against_reference(rng, [], "k1")


@pytest.mark.gpu
def test_gpu(rng):
    for estimator in ("k1", "k3"):
        check_against_reference(rng, [1, 127, 0, 129, 5, *range(500, 600)], estimator)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_machine_code(compile_offline, estimator):
    arrays = ["float32[::1]"] * 3 + ["int32[::1]", "float32", "float32[::1]", "float32[::1]"]
    assert not compile_offline(ppo_rewards_kernel(estimator), tuple(arrays), (9, 0))


def test_wrong_arguments_are_named(rng):
    three, bounds = np.zeros(3), np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match=r"ppo_rewards: scores must be \(1\) float32, got \(3,\) float32"):
        run(three, three, three, bounds, "k1")
    with pytest.raises(ValueError, match="ppo_rewards: estimator must be one of k1, k3, got 'k2'"):
        run(three, three, three[:1], bounds, "k2")
