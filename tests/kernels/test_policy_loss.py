import itertools
import json
import pathlib

import numpy as np
import pytest

from rlnumba.config.rloo import SequenceLossConfig
from rlnumba.errors import ConfigError
from rlnumba.kernels.rl import policy_loss as policy_loss_module
from rlnumba.kernels.rl.policy_loss import (
    policy_loss,
    policy_loss_kernel,
    policy_loss_scale,
    policy_metrics,
    reduce_stats,
)
from rlnumba.kernels.rl.policy_loss_config import (
    CLIPPED_HIGH,
    CLIPPED_LOW,
    KL,
    LOSS,
    METRICS,
    NOTHING,
    TOKENS,
    Logprobs,
    LossBatch,
    LossOutputs,
    loss_terms,
)
from rlnumba.kernels.rl.policy_loss_ref import policy_loss_ref
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_close, assert_gradient, assert_same_bits
from tests.kernels.gpu_arithmetic import use_gpu_arithmetic
from tests.kernels.loss_configs import CORRECTIONS, loss_config

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "policy_loss.npz"
SMOOTH = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo"]
# Every branch of the kernel at least once.
CONFIGS = [
    {"loss_type": "grpo", "beta": 0.1},
    {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.3, "importance_sampling_correction": "token_truncate"},
    {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.01,
        "beta": 0.2,
        "use_bias_correction_kl": True,
        "off_policy_mask_threshold": 0.02,
    },
    {
        "loss_type": "cispo",
        "epsilon_high": 1.2,
        "importance_sampling_correction": "token_mask",
        "importance_sampling_clip_min": 0.5,
        "importance_sampling_clip_max": 1.4,
    },
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo", "importance_sampling_correction": "token_mask", "importance_sampling_clip_max": 1.4},
    {"loss_type": "vespo", "importance_sampling_correction": "sequence_truncate", "importance_sampling_clip_max": 1.1},
    {"loss_type": "dppo", "dppo_mask_high": 0.05, "dppo_mask_low": 0.05, "beta": 0.1, "dppo_kl_coef": 0.1},
    {"loss_type": "dapo", "rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
    {"loss_type": "gmpo", "epsilon": 0.2, "epsilon_high": 0.3, "beta": 0.1, "use_bias_correction_kl": True},
    {"loss_type": "dro", "dro_beta": 0.3, "beta": 0.1},
]


def batch(rng, lengths):
    """Packed log-probs and so on in float64; garbage where the mask is 0."""
    tokens = sum(lengths)
    lp = -rng.exponential(1.0, tokens)
    old, ref, rollout = (lp + rng.normal(0, 0.3, tokens) for _ in range(3))
    mask = (rng.random(tokens) < 0.8).astype(np.float64)
    if len(lengths) > 2:
        mask[sum(lengths[:2]) : sum(lengths[:3])] = 0
    for array in (lp, old, ref, rollout):
        array[mask == 0] = 1e4 * rng.standard_normal(int(np.sum(mask == 0)))
    # Both signs, in the first sequence within it, and with a sampler that drifted: A < 0 and roll > lp is what
    # off_policy_mask_threshold drops.
    advantages = np.repeat(rng.uniform(0.2, 2.0, len(lengths)) * (-1.0) ** np.arange(len(lengths)), lengths)
    advantages[: sum(lengths[:1])] *= (-1.0) ** np.arange(sum(lengths[:1]))
    rollout[: sum(lengths[:2])] += 0.3
    return [lp, old, ref, rollout, advantages, mask, np.cumsum([0, *lengths]).astype(np.int32)]


def run(arrays, config, scale, mask_dtype=np.float32, entropy_mask=None):
    """(loss, dlogprobs, stats, metrics) on the host from the operator; loss starts at 0.5."""
    lp, old, ref, rollout, advantages, mask, cu_seqlens = arrays
    xp = device.xp()
    single = [device.asarray(a.astype(np.float32)) for a in (lp, old, ref, rollout, advantages)]
    loss = xp.full(1, 0.5, np.float32)
    dlogprobs = xp.full(len(lp), np.nan, np.float32)
    stats = xp.full((len(cu_seqlens) - 1, METRICS), np.nan, np.float32)
    metrics = xp.full(METRICS, np.nan, np.float32)
    outputs = LossOutputs(loss, dlogprobs, stats, metrics)
    masks = device.asarray(mask.astype(mask_dtype)), device.asarray(cu_seqlens)
    selected = None if entropy_mask is None else device.asarray(entropy_mask)
    sequences = LossBatch(single[4], *masks, selected)
    policy_loss(Logprobs(*single[:4]), sequences, config, device.asarray(np.float32([scale])), outputs)
    return [device.to_host(a) for a in outputs]


def reference(arrays, config, scale, entropy_mask=None):
    """policy_loss_ref of the arrays of `batch`."""
    return policy_loss_ref(Logprobs(*arrays[:4]), LossBatch(*arrays[4:], entropy_mask), config, scale)


def check_against_reference(arrays, config, mask_dtype=np.float32, entropy_mask=None):
    scale = policy_loss_scale(config, len(arrays[6]) - 1, 30, 20, 2)
    loss, dlogprobs, stats, metrics = run(arrays, config, scale, mask_dtype, entropy_mask)
    rounded = [a.astype(np.float32).astype(np.float64) for a in arrays[:6]]
    expected, gradient, expected_stats = reference([*rounded, arrays[6]], config, scale, entropy_mask)
    terms = 16 * max(np.diff(arrays[6]), default=1)
    size = max(1.0, float(np.abs(expected_stats[:, LOSS]).sum()))
    assert_close(loss, [expected + 0.5], terms=terms * (len(arrays[6]) - 1), scale=size, what="loss")
    assert_close(dlogprobs, gradient, terms=terms, what="dlogprobs")
    assert np.array_equal(dlogprobs != 0, gradient != 0)
    for column in range(METRICS):
        known = np.abs(expected_stats[:, column]) < NOTHING
        assert np.array_equal(known, np.abs(stats[:, column]) < NOTHING)
        assert_close(stats[known, column], expected_stats[known, column], terms=terms, what=f"column {column}")
    size = 1 + np.abs(np.where(np.abs(stats) < NOTHING, stats, 0)).sum(axis=0).max()
    assert_close(metrics, reduce_stats(stats), terms=len(arrays[6]), scale=size, what="metrics")


@pytest.mark.parametrize("name", ["policy_loss.npz", "policy_loss_tools.npz"])
def test_golden_values_of_trl(name):
    """The second file has results of tools between drawn tokens, which count nowhere."""
    stored = np.load(GOLDEN.with_name(name))
    shape = stored["mask"].shape
    cu_seqlens = np.arange(shape[0] + 1, dtype=np.int32) * shape[1]
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    lp, old, ref, rollout = (stored[name].reshape(-1) for name in names)
    mask = stored["mask"].reshape(-1)
    cases = json.loads(str(stored["cases"]))
    for case, loss, gradient in zip(cases, stored["losses"], stored["gradients"], strict=True):
        config = loss_config(**case["config"])
        wants_rollout = config.importance_sampling_correction or config.off_policy_mask_threshold is not None
        # A second micro-batch of as many sequences and of nine tokens belongs to the step.
        scale = policy_loss_scale(config, 2 * shape[0], mask.sum() + 9, mask.sum(), 2)
        arguments = (
            lp,
            old,
            ref,
            rollout if wants_rollout else None,
            np.repeat(stored["advantages"], shape[1]),
            mask,
            cu_seqlens,
        )
        actual, dlogprobs, stats = reference(arguments, config, scale)
        assert abs(actual - loss) < 1e-12, case["config"]
        np.testing.assert_allclose(dlogprobs.reshape(shape), gradient, rtol=0, atol=1e-12, err_msg=str(case["config"]))
        metrics = policy_metrics(stats, config)
        for name in case["metrics"].keys() & metrics.keys():
            assert abs(metrics[name] - case["metrics"][name]) < 1e-6, (name, case["config"])
        assert case["metrics"].keys() - metrics.keys() <= {"vespo/phi_seq_mean"}


def test_golden_values_of_trls_rloo():
    stored = np.load(GOLDEN.with_name("rloo_loss.npz"))
    shape = stored["mask"].shape
    cu_seqlens = np.arange(shape[0] + 1, dtype=np.int32) * shape[1]
    lp, old, mask = (stored[name].reshape(-1) for name in ("logprobs", "old_logprobs", "mask"))
    metrics = json.loads(str(stored["metrics"]))
    for i, (low, high) in enumerate(stored["bounds"].tolist()):
        config = SequenceLossConfig(epsilon=low, epsilon_high=high)
        scale = policy_loss_scale(config, shape[0], 99, 9, 1)
        arguments = (lp, old, None, None, np.repeat(stored["advantages"], shape[1]), mask, cu_seqlens)
        loss, dlogprobs, stats = reference(arguments, config, scale)
        assert abs(loss - stored["losses"][i]) < 1e-12
        np.testing.assert_allclose(dlogprobs.reshape(shape), stored["gradients"][i], rtol=0, atol=1e-12)
        found = policy_metrics(stats, config)
        assert {name: found[name] for name in metrics[i]} == pytest.approx(metrics[i])
    # Ratios of which some are beyond the narrower bounds only.
    assert metrics[1]["clip_ratio/region_mean"] > metrics[0]["clip_ratio/region_mean"]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", SMOOTH)
def test_gradient_of_reference(rng, loss_type, level):
    for extra in ({}, {"delta": 1.3, "use_bias_correction_kl": True}):
        arrays = batch(rng, [5, 3, 2, 4])
        config = loss_config(
            loss_type, level, epsilon=0.1, epsilon_high=0.15, beta=0.3, max_completion_length=9,
            importance_sampling_correction="token_truncate", importance_sampling_clip_max=1.1,
            off_policy_mask_threshold=0.05, **extra,
        )  # fmt: skip
        gradient = reference(arrays, config, 0.2)[1]
        assert np.all(gradient[arrays[5] == 0] == 0) and np.count_nonzero(gradient) > 3

        def loss(arrays=arrays, config=config):
            return reference(arrays, config, 0.2)[0]

        assert_gradient(loss, gradient, arrays[0], loss_type)


def test_dppo_by_hand():
    """Tokens of all four kinds: kept, or dropped by a change of probability of more than 0.2; both signs."""
    lp, roll = np.log([0.5, 0.9, 0.5, 0.1]), np.log([0.4, 0.5, 0.6, 0.5])
    arrays = [lp, lp + 9, lp, roll, np.repeat([2.0, -1.0], 2), np.ones(4), np.array([0, 2, 4], np.int32)]
    config = loss_config("dppo", importance_sampling_correction="token_mask", importance_sampling_clip_max=0.01)
    loss, gradient, _ = reference(arrays, config, 0.25)
    log_ratio = lp - roll
    expected = [-2 * 0.5 / 0.4, 0, 1 * 0.5 / 0.6, 0] + 1e-3 * log_ratio**2
    assert abs(loss - expected.mean()) < 1e-12
    slopes = np.array([-2 * 0.5 / 0.4, 0, 0.5 / 0.6, 0]) + 2e-3 * log_ratio
    np.testing.assert_allclose(gradient, slopes / 4, atol=1e-12)


def test_dppo_gradient_of_reference(rng):
    arrays = batch(rng, [5, 3, 2, 4])
    config = loss_config("dppo", beta=0.3, dppo_mask_high=0.03, dppo_mask_low=0.03, dppo_kl_coef=0.2)
    gradient = reference(arrays, config, 0.2)[1]
    assert_gradient(lambda: reference(arrays, config, 0.2)[0], gradient, arrays[0], "dppo")


@pytest.mark.parametrize(
    "options", [{"loss_type": "gmpo", "use_bias_correction_kl": True}, {"loss_type": "dro", "dro_beta": 0.4}]
)
def test_gradients_of_gmpo_and_dro(rng, options):
    arrays = batch(rng, [5, 3, 2, 4])
    config = loss_config(**options, beta=0.3, importance_sampling_correction="token_truncate")
    loss, gradient, stats = reference(arrays, config, 0.2)
    assert np.count_nonzero(gradient) > 3
    assert_gradient(lambda: reference(arrays, config, 0.2)[0], gradient, arrays[0], options["loss_type"])
    if options["loss_type"] == "gmpo":
        assert 0 < stats[:, [CLIPPED_LOW, CLIPPED_HIGH]].sum() < stats[:, TOKENS].sum()


def test_gmpo_by_hand():
    """Of a good completion only rises are bounded, of a bad one only falls; what is beyond has no gradient."""
    changes = np.array([0.9, -0.9, 0.1, 0.9, -0.9, 0.1, 7.0])
    lp, mask = np.full(7, -2.0), np.array([1, 1, 1, 1, 1, 1, 0.0])
    advantages = np.repeat([2.0, -1.0], [3, 4])
    arrays = [lp, lp - changes, lp, lp - changes, advantages, mask, np.array([0, 3, 7], np.int32)]
    config = loss_config("gmpo", epsilon=0.2, epsilon_high=0.4)
    loss, gradient, stats = reference(arrays, config, policy_loss_scale(config, 2, 6, 6, 1))
    good, bad = np.exp((0.4 - 0.9 + 0.1) / 3), np.exp((0.9 - 0.2 + 0.1) / 3)
    assert loss == pytest.approx((-2 * good + bad) / 2)
    good, bad = -2 * good / 6, bad / 6
    np.testing.assert_allclose(gradient, [0, good, good, bad, 0, bad, 0], atol=1e-12)
    found = policy_metrics(stats, config)
    assert found["clip_ratio/low_mean"] == found["clip_ratio/high_mean"] == pytest.approx(1 / 6)


def test_dro_by_hand():
    """The advantage pulls, the squared log-ratio to the sampler holds; the old policy has no part in it."""
    lp, roll = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
    arrays = [lp, lp + 9, lp, roll, np.array([2.0, 2.0]), np.ones(2), np.array([0, 2], np.int32)]
    config = loss_config("dro", importance_sampling_correction="token_mask", importance_sampling_clip_max=0.01)
    loss, gradient, _ = reference(arrays, config, 0.5)
    assert loss == pytest.approx(0.5 * (2 + 0.025 * 0.25 + 4 + 0.025 * 1))
    np.testing.assert_allclose(gradient, 0.5 * np.array([-2 + 0.05 * 0.5, -2 + 0.05 * -1]), atol=1e-12)


def test_icepop_by_hand():
    """A token's ratio of trainer and sampler weighs it within the bounds, these included; outside it has no weight."""
    old = np.log([0.5, 0.5, 0.5, 0.5])
    roll = np.log([0.5, 0.25, 0.2, 0.9])
    arrays = [old, old, old, roll, np.array([1.0]), np.ones(4), np.array([0, 4], np.int32)]
    config = loss_config("dapo", rollout_is="token", rollout_is_threshold="0.6_2.0")
    np.testing.assert_allclose(reference(arrays, config, 1.0)[1], [-1.0, -2.0, 0.0, 0.0], atol=1e-12)
    truncated = loss_config("dapo", rollout_is="token", rollout_is_threshold="2.0")
    np.testing.assert_allclose(reference(arrays, truncated, 1.0)[1], [-1.0, -2.0, -2.0, -5 / 9], atol=1e-12)
    whole = loss_config("dapo", rollout_is="sequence", rollout_is_threshold="1.0_3.0")
    np.testing.assert_allclose(reference(arrays, whole, 1.0)[1], [-25 / 9] * 4, atol=1e-12)


def test_on_policy_gradient_is_advantage(rng):
    """At ratio 1 both branches of the minimum are equal, and the slope must not be lost or halved."""
    arrays = batch(rng, [4, 6])
    arrays[1] = arrays[0]
    gradient = reference(arrays, loss_config("luspo"), 1.0)[1]
    assert np.array_equal(gradient, -arrays[5] * arrays[4])


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo", "dro"])
def test_gradient_is_independent_of_the_micro_batches(rng, loss_type):
    lengths = [5, 3, 1, 7]
    arrays = batch(rng, lengths)
    config = loss_config(loss_type, beta=0.1, max_completion_length=8, epsilon_high=1.1)
    tokens = arrays[5].sum()
    whole = reference(arrays, config, policy_loss_scale(config, 4, tokens, tokens, 1))
    loss, gradients, stats = 0.0, [], []
    for first, last in ((0, 1), (1, 4)):
        begin, end = arrays[6][first], arrays[6][last]
        part = [a[begin:end] for a in arrays[:6]]
        scale = policy_loss_scale(config, 4, tokens, part[5].sum(), 2)
        result = reference([*part, arrays[6][first : last + 1] - begin], config, scale)
        loss += result[0]
        gradients.append(result[1])
        stats.append(reduce_stats(result[2]))
    assert abs(loss - whole[0]) < 1e-12
    np.testing.assert_allclose(np.concatenate(gradients), whole[1], rtol=0, atol=1e-12)
    together = policy_metrics(whole[2], config, rollout=True)
    for name, value in policy_metrics(stats, config, rollout=True).items():
        assert abs(value - together[name]) < 1e-9, name


def test_bnpo_is_a_mean_over_the_micro_batch(rng):
    arrays = batch(rng, [5, 3])
    config = loss_config("bnpo")
    tokens = arrays[5].sum()
    mean = reference(arrays, config, policy_loss_scale(config, 99, 1000, tokens, 1))[0]
    assert reference(arrays, config, policy_loss_scale(config, 99, 1000, tokens, 4))[0] == mean / 4


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["loss_type"])
@pytest.mark.sim
def test_simulator(rng, config):
    check_against_reference(batch(rng, [7, 300, 2, 0]), loss_config(**config), np.uint8)


@pytest.mark.sim
def test_ratio_of_whole_sequences(rng):
    check_against_reference(batch(rng, [7, 130, 2, 0]), SequenceLossConfig(epsilon=0.1), np.uint8)


def test_gradient_at_the_ratio_of_whole_sequences(rng):
    arrays, config = batch(rng, [5, 3, 2, 4]), SequenceLossConfig(epsilon=2.0, epsilon_high=50.0)
    gradient = reference(arrays, config, 0.2)[1]
    assert np.count_nonzero(gradient) > 3
    assert_gradient(lambda: reference(arrays, config, 0.2)[0], gradient, arrays[0], "sequence_sum")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.sim
def test_entropy_mask(rng, level):
    """Tokens without it have no surrogate, but count as tokens and have their KL."""
    arrays = batch(rng, [7, 30, 2, 0])
    config = loss_config("dapo", level, beta=0.1, importance_sampling_correction="sequence_truncate")
    entropy_mask = (rng.random(39) < 0.3).astype(np.float32)
    check_against_reference(arrays, config, entropy_mask=entropy_mask)
    loss, gradient, stats = reference(arrays, config, 0.1, entropy_mask)
    only_kl, kl_gradient, _ = reference(arrays, config, 0.1, 0 * entropy_mask)
    without_kl = loss_config("dapo", level, importance_sampling_correction="sequence_truncate")
    surrogate, surrogate_gradient, _ = reference(arrays, without_kl, 0.1, entropy_mask)
    assert abs(only_kl + surrogate - loss) < 1e-12 and stats[:, 1].sum() == arrays[5].sum()
    np.testing.assert_allclose(kl_gradient + surrogate_gradient, gradient, atol=1e-12)
    assert level == "sequence" or not surrogate_gradient[entropy_mask == 0].any()


@pytest.mark.parametrize("selects_tokens", [False, True])
@pytest.mark.parametrize("config", [*CONFIGS, {}], ids=lambda config: config.get("loss_type", "rloo"))
def test_machine_code(compile_offline, config, selects_tokens):
    """No float64, no spills, whatever the kernel is specialised for."""
    kernel = policy_loss_kernel(loss_terms(loss_config(**config) if config else SequenceLossConfig(), selects_tokens))
    arrays = [
        tuple_type(Logprobs, *["float32[::1]"] * 4),
        "float32[::1]",
        "uint8[::1]",
        "int32[::1]",
        *["float32[::1]"] * 3,
        "float32[:,::1]",
    ]
    assert not compile_offline(kernel, tuple(arrays), (9, 0))


def test_kernels_are_shared_where_the_terms_are():
    """Options of another form of the loss, and of the averaging, compile nothing again."""
    kernel = policy_loss_kernel(loss_terms(loss_config("dapo")))
    for same in ({"loss_type": "dr_grpo"}, {"vespo_k_pos": 1.0}, {"max_completion_length": 9}, {"epsilon_high": 0.2}):
        assert policy_loss_kernel(loss_terms(loss_config(**same))) is kernel, same
    assert policy_loss_kernel(loss_terms(loss_config("grpo"))) is not kernel


@pytest.mark.sim
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_and_sequences_of_padding_count_nowhere(rng, level):
    correction = {"importance_sampling_correction": f"{level}_mask", "importance_sampling_clip_max": 1.5}
    arrays, config = batch(rng, [3, 130]), loss_config("grpo", level, beta=0.1, **correction)
    plain = run(arrays, config, 0.5)
    padding = np.full(140, np.nan)
    padded = [np.concatenate([array, padding]) for array in arrays[:5]]
    padded += [np.concatenate([arrays[5], np.zeros(140)]), np.append(arrays[6], arrays[6][-1:])]
    loss, dlogprobs, stats, metrics = run(padded, config, 0.5)
    assert not dlogprobs[133:].any()
    for got, expected in zip((loss, dlogprobs[:133], stats[:2], metrics), plain, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.sim
def test_vespo_limits_each_log_ratio(rng):
    arrays = batch(rng, [9])
    arrays[5][:] = 1
    # Of one sign: terms that cancel would have an error as large as their sum.
    arrays[4] = np.abs(arrays[4])
    arrays[0][:] = -1.0
    arrays[1][:] = arrays[0] - np.array([25, -22.5, 0.1, 0, 0, 0, 0, 0, 0])
    check_against_reference(arrays, loss_config("vespo"))


@pytest.mark.sim
def test_a_sequence_without_tokens_is_not_clipped(rng):
    """Though its ratio, of nothing, is 1, and the bound below."""
    config = loss_config("cispo", "sequence", epsilon_high=0.5)
    check_against_reference(batch(rng, [7, 3, 2, 0, 5]), config)


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [
        *itertools.product(["dapo", "cispo", "sapo", "vespo"], ["token", "sequence"]),
        ("gmpo", "token"),
        ("dro", "token"),
    ],
)
@pytest.mark.sim
def test_a_log_prob_that_is_no_number_shows(rng, monkeypatch, loss_type, level):
    """In the loss and in the gradient, so that the optimizer leaves the step out."""
    use_gpu_arithmetic(monkeypatch, policy_loss_module)
    arrays = batch(rng, [5, 4])
    arrays[5][:] = 1
    arrays[3] = arrays[1]
    arrays[0][6] = np.nan
    loss, dlogprobs, _, _ = run(arrays, loss_config(loss_type, level), 1.0)
    assert np.isnan(loss[0]) and np.isnan(dlogprobs[6]) and not np.isnan(dlogprobs[:5]).any()


@pytest.mark.sim
def test_no_sequences(rng):
    loss, dlogprobs, stats, metrics = run(batch(rng, []), loss_config(), 1.0)
    assert loss[0] == 0.5 and dlogprobs.size == 0 and stats.size == 0 and metrics[LOSS] == 0
    assert policy_metrics(metrics[None], loss_config(beta=0.1)) == {
        "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0, "clip_ratio/region_mean": 0.0, "kl": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["loss_type"])
def test_numpy_device(rng, config):
    if device.name() == "cpu":
        check_against_reference(batch(rng, [7, 130, 2, 0, 640, 1]), loss_config(**config), np.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
@pytest.mark.parametrize("loss_type", [*SMOOTH, "cispo", "vespo"])
def test_gpu(rng, loss_type, correction, level):
    lengths = [640] * 61 + [1, 0, 4097]
    # cispo's bound is the largest ratio itself.
    epsilon_high = 1.15 if loss_type == "cispo" else 0.15
    config = loss_config(
        loss_type,
        level,
        epsilon=0.1,
        epsilon_high=epsilon_high,
        delta=1.3,
        beta=0.05,
        use_bias_correction_kl=True,
        max_completion_length=640,
        importance_sampling_correction=correction,
        off_policy_mask_threshold=0.01,
    )
    check_against_reference(batch(rng, lengths), config)


@pytest.mark.gpu
@pytest.mark.parametrize("loss_type", ["gmpo", "dro"])
def test_gpu_of_gmpo_and_dro(rng, loss_type):
    check_against_reference(batch(rng, [640] * 61 + [1, 0, 4097]), loss_config(loss_type, beta=0.05))


@pytest.mark.gpu
def test_gpu_repeats_its_bits(rng):
    arrays = batch(rng, [640] * 64)
    first = run(arrays, loss_config(beta=0.1), 1e-3)
    for again, once in zip(run(arrays, loss_config(beta=0.1), 1e-3), first, strict=True):
        assert_same_bits(again, once)


def test_missing_log_probs_and_wrong_values_are_named(rng):
    arrays = batch(rng, [3, 2])
    single = [a.astype(np.float32) for a in arrays[:6]]
    xp = device.xp()
    shapes = 1, 5, (2, METRICS), METRICS
    outputs = LossOutputs(*(xp.zeros(shape, np.float32) for shape in shapes))
    lp, old, _, _, advantages, mask = (device.asarray(a) for a in single)
    sequences, one = LossBatch(advantages, mask, device.asarray(arrays[6])), device.asarray(np.ones(1, np.float32))
    with pytest.raises(ValueError, match=r"policy_loss: beta 0.1 needs ref_logprobs, got None"):
        policy_loss(Logprobs(lp, old), sequences, loss_config(beta=0.1), one, outputs)
    config = loss_config(importance_sampling_correction="token_mask")
    with pytest.raises(ValueError, match=r"policy_loss: token_mask needs rollout_logprobs, got None"):
        policy_loss(Logprobs(lp, old), sequences, config, one, outputs)
    with pytest.raises(ValueError, match=r"policy_loss: old_logprobs must be \(5\) float32, got \(4,\) float32"):
        policy_loss(Logprobs(lp, old[:4]), sequences, loss_config(), one, outputs)
    with pytest.raises(ConfigError, match=r"train.loss_type must be one of grpo, .*, got 'ppo'"):
        loss_config("ppo")
    with pytest.raises(ConfigError, match=r"train.max_completion_length must be at least 1, got 0"):
        loss_config("dr_grpo", max_completion_length=0)
    for name in ("dppo", "dro"):
        with pytest.raises(ValueError, match=f"policy_loss: {name} needs rollout_logprobs, got None"):
            policy_loss(Logprobs(lp, old), sequences, loss_config(name), one, outputs)
    for name, has in (("dppo", "a ratio a token"), ("dro", "a ratio a token"), ("gmpo", "a ratio of its own")):
        with pytest.raises(ConfigError, match=f"train.loss_type {name} has {has}: importance_sampling_level must be"):
            loss_config(name, "sequence")
    for value in ("x", "0", "2_1", "1_2_3", "-1_2"):
        with pytest.raises(
            ConfigError, match=r'train.rollout_is_threshold must be a number above 0, or two as "0.5_2.0"'
        ):
            loss_config(rollout_is="token", rollout_is_threshold=value)
    with pytest.raises(ConfigError, match=r"train.vllm_importance_sampling_clip_min \(3.0\) must be below"):
        loss_config(importance_sampling_clip_min=3.0)


def test_kl_of_equal_policies_is_zero(rng):
    arrays = batch(rng, [5])
    arrays[2] = arrays[0]
    assert reference(arrays, loss_config(beta=1.0), 1.0)[2][0, KL] == 0.0
