"""Numbers worked out by hand from the formulas, in float64: two sequences of three and two tokens, and so on."""

import numpy as np
import pytest

from rlnumba.kernels.logprob.ops import logp_ref
from rlnumba.kernels.nn.reduce import masked_whiten, masked_whiten_ref
from rlnumba.kernels.rl.advantage import group_advantages, group_advantages_ref, rloo_advantages
from rlnumba.kernels.rl.gae import gae, gae_ref
from rlnumba.kernels.rl.policy_loss import (
    CORRECTION,
    KL,
    METRICS,
    TOKENS,
    policy_loss,
    policy_loss_scale,
)
from rlnumba.kernels.rl.policy_loss_config import Logprobs, LossBatch, LossOutputs
from rlnumba.kernels.rl.policy_loss_ref import policy_loss_ref
from rlnumba.kernels.sampling.ops import kept_ref
from rlnumba.runtime import device
from tests.kernels.loss_configs import loss_config

LOGPROBS = np.array([-1, -0.5, -2, -0.3, -1.5, 0])
OLD = np.array([-1.2, -0.5, -1.6, -0.7, -1.4, 0])
REF = np.array([-1.1, -0.6, -2.1, -0.4, -1.2, 0])
ROLLOUT = np.array([-1.25, -0.45, -1.7, -0.7, -1.3, 0])
MASK = np.array([1.0, 1, 1, 1, 1, 0])
ADVANTAGES = np.repeat([1, -0.5], 3)
CU_SEQLENS = np.array([0, 3, 6], np.int32)

SEQUENCE = {"importance_sampling_level": "sequence"}
LOSSES = [
    ({"loss_type": "grpo"}, -0.1788039),
    ({"loss_type": "grpo", "delta": 1.4}, -0.1902820),
    ({"loss_type": "bnpo"}, -0.3343978),
    ({"loss_type": "dapo"}, -0.3343978),
    ({"loss_type": "dr_grpo", "max_completion_length": 4}, -0.2089986),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, -0.3386783),
    ({"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04}, -0.3381247),
    ({"loss_type": "grpo", **SEQUENCE}, -0.1772949),
    ({"loss_type": "luspo", **SEQUENCE}, -0.8223434),
    ({"loss_type": "cispo", "epsilon_high": 1.1}, 0.4194024),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, 0.4319282),
    ({"loss_type": "sapo"}, -0.4578438),
    ({"loss_type": "vespo"}, 0.5883489),
    ({"epsilon_high": 0.28, "importance_sampling_correction": "sequence_mask"}, 0.2168590),
    ({"epsilon_high": 0.28, "importance_sampling_correction": "token_truncate"}, -0.3564521),
]


def close(actual, expected, digits=7):
    """Equal to as many digits as the expected numbers are given with."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.501 * 10.0**-digits)


def reference(config, advantages=ADVANTAGES, rollout=ROLLOUT):
    scale = policy_loss_scale(config, num_sequences=2, num_tokens=5, micro_batch_tokens=5, num_micro_batches=1)
    return policy_loss_ref(
        Logprobs(LOGPROBS, OLD, REF, rollout), LossBatch(advantages, MASK, CU_SEQLENS), config, scale
    )


def with_cap(options):
    return loss_config(**options, importance_sampling_clip_max=1.05)


@pytest.mark.parametrize("options, expected", LOSSES, ids=str)
def test_policy_losses(options, expected):
    close(reference(with_cap(options))[0], expected)


@pytest.mark.parametrize("options, expected", LOSSES, ids=str)
def test_policy_losses_of_the_operator(options, expected):
    if device.name() == "sim" and options["loss_type" if "loss_type" in options else "epsilon_high"] != "luspo":
        pytest.skip("one of them is enough there")
    config = with_cap(options)
    xp = device.xp()
    loss, dlogprobs = xp.zeros(1, np.float32), xp.zeros(6, np.float32)
    stats, metrics = xp.zeros((2, METRICS), np.float32), xp.zeros(METRICS, np.float32)
    inputs = [device.asarray(a.astype(np.float32)) for a in (LOGPROBS, OLD, REF, ROLLOUT, ADVANTAGES, MASK)]
    scale = device.asarray(np.float32([policy_loss_scale(config, 2, 5, 5, 1)]))
    *logprobs, advantages, mask = inputs
    sequences = LossBatch(advantages, mask, device.asarray(CU_SEQLENS))
    policy_loss(Logprobs(*logprobs), sequences, config, scale, LossOutputs(loss, dlogprobs, stats, metrics))
    close(device.to_host(loss), [expected], 6)


def test_kl():
    stats = reference(loss_config(beta=1.0))[2]
    close(stats[:, KL].sum() / stats[:, TOKENS].sum(), 0.0138417)


def test_sequence_ratio():
    """luspo weighs a sequence by its tokens, and A = 1 leaves the ratio itself where nothing is clipped."""
    config = loss_config("luspo", "sequence", epsilon=10.0)
    scale = policy_loss_scale(config, 1, 5, 5, 1)
    sequences = LossBatch(np.full(6, -1.0), MASK, CU_SEQLENS)
    close(
        policy_loss_ref(Logprobs(LOGPROBS, OLD, REF), sequences, config, scale)[2][:, 0] / np.array([3, 2]),
        [0.9355070, 1.1618342],
    )


def test_sequence_correction():
    config = loss_config(importance_sampling_correction="sequence_mask")
    close(reference(config)[2][:, CORRECTION], [1.1051709, 0.9048374])


@pytest.mark.parametrize("sequence, mean", [(0, 0.0333333), (1, -0.1)])
def test_off_policy_mask(sequence, mean):
    """A sequence with A < 0 is dropped exactly where the mean of rollout - lp passes the threshold."""
    shift = 0.2  # of the rollout log-probs, so that both means are above 0 as thresholds are
    tokens = slice(*CU_SEQLENS[sequence : sequence + 2])
    for threshold, dropped in ((mean + shift - 1e-6, True), (mean + shift + 1e-6, False)):
        config = loss_config("dr_grpo", max_completion_length=1, off_policy_mask_threshold=threshold)
        gradient = reference(config, advantages=np.full(6, -1.0), rollout=ROLLOUT + shift)[1]
        assert np.all(gradient[tokens] == 0) == dropped


def advantages_of(rewards, size, **options):
    """From the operator, rounded to float32."""
    rewards = np.array([[np.nan if r is None else r] for r in rewards], np.float32)
    advantages = device.xp().zeros(len(rewards), np.float32)
    group_advantages(device.asarray(rewards), device.asarray(np.ones(1, np.float32)), size, advantages, **options)
    return device.to_host(advantages)


@pytest.mark.parametrize(
    "rewards, size, options, expected",
    [
        ([1, 0, 0, 1], 4, {}, [0.8658754, -0.8658754, -0.8658754, 0.8658754]),
        ([1, 0, 0, 1], 4, {"scale_rewards": "none"}, [0.5, -0.5, -0.5, 0.5]),
        ([1, 0, 0, 0], 4, {}, [1.4997001, -0.4999, -0.4999, -0.4999]),
        ([1, 0, None, 1], 4, {}, [0.5772503, -1.1545006, 0, 0.5772503]),
        (
            [1, 0, 0, 1, 2, 2, 5, 3],
            4,
            {"scale_rewards": "batch"},
            [0.2995544, -0.2995544, -0.2995544, 0.2995544, -0.5991088, -0.5991088, 1.1982176, 0],
        ),
    ],
)
def test_advantages(rewards, size, options, expected):
    close(advantages_of(rewards, size, **options), expected, 6)
    wide = np.array([[np.nan if r is None else r] for r in rewards], np.float64)
    close(group_advantages_ref(wide, np.ones(1), size, **options), expected)


def test_rloo():
    advantages = device.xp().zeros(4, np.float32)
    rloo_advantages(device.asarray(np.array([1, 0, 0, 1], np.float32)), 4, advantages)
    close(device.to_host(advantages), [0.6666667, -0.6666667, -0.6666667, 0.6666667], 6)


def test_gae():
    values, rewards = np.array([0.1, 0.2, 0.3, 0.4]), np.array([-0.01, -0.02, -0.03, 1])
    bounds, expected = np.array([0, 4], np.int32), ([0.7436, 0.688, 0.64, 0.6], [0.8436, 0.888, 0.94, 1])
    whitened = [1.2214259, 0.3243152, -0.4501689, -1.0955723]
    for actual, want in zip(gae_ref(rewards, values, bounds, 1.0, 0.95), expected, strict=True):
        np.testing.assert_allclose(actual, want, rtol=0, atol=1e-12)
    close(masked_whiten_ref(np.array(expected[0]), np.ones(4)), whitened)
    xp = device.xp()
    outputs = advantages, returns = [xp.zeros(4, np.float32) for _ in range(2)]
    inputs = (device.asarray(a.astype(np.float32)) for a in (rewards, values))
    gae(*inputs, device.asarray(bounds), 1.0, 0.95, *outputs)
    close(device.to_host(advantages), expected[0], 6)
    close(device.to_host(returns), expected[1], 6)
    masked_whiten(advantages, xp.ones(4, np.float32), advantages)
    close(device.to_host(advantages), whitened, 5)


@pytest.mark.parametrize(
    "top_p, kept", [(0.5, [0])] + [(p, [0, 1, 2]) for p in (0.6, 0.7, 0.8, 0.9)] + [(0.95, [0, 1, 2, 3])]
)
def test_top_p_keeps_ties(top_p, kept):
    assert list(np.flatnonzero(kept_ref(np.array([2.0, 1, 1, 0, -1]), 1.0, 0, top_p, 0.0))) == kept


def test_log_probs_and_entropy():
    logp, _, entropy, _ = logp_ref(np.array([[1.0, 2, 3], [1, 2, 3]]), np.array([2, 1]))
    close(logp, [-0.4076060, -1.4076060])
    close(entropy, [0.8323956, 0.8323956])
