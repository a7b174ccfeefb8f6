import json
import pathlib

import numpy as np
import pytest

from rlnumba.config import PreferenceLossConfig
from rlnumba.config.dpo import LOSS_TYPES
from rlnumba.errors import ConfigError
from rlnumba.kernels.rl import preference_loss as preference_loss_module
from rlnumba.kernels.rl.preference_loss import (
    LOSS,
    PAIR_STATS,
    SORTING,
    PackedPairs,
    preference_loss,
    preference_loss_kernel,
    preference_loss_ref,
    preference_metrics,
    preference_terms,
    sequence_logps,
    sequence_logps_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits
from tests.kernels.gpu_arithmetic import use_gpu_arithmetic

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "preference_loss.npz"
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
# Every branch of the kernel at least once.
CONFIGS = [
    *({"loss_type": name, "label_smoothing": 0.1} for name in LOSS_TYPES),
    *({"loss_type": "sigmoid", "f_divergence_type": name} for name in DIVERGENCES),
    {"loss_type": "sigmoid_norm", "use_weighting": True, "ld_alpha": 0.3, "f_divergence_type": "js_divergence"},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "ld_alpha": 0.0},
    {"loss_type": ["aot", "aot_unpaired", "apo_zero"], "loss_weights": [0.5, 2.0, -0.5]},
]
SCALE, TOKEN_SCALE = 0.25, 0.02


def name_of(config):
    return "-".join(str(value) for value in config.values())


def config_of(beta=0.4, **options):
    return PreferenceLossConfig(**{"beta": beta} | options)


def batch(rng, chosen, rejected, spread=0.5):
    """(logprobs, ref_logps, log_sum_sq_probs, cu_seqlens) in float64 of pairs with these lengths."""
    lengths = [*chosen, *rejected]
    lp = -rng.exponential(1.0, sum(lengths))
    ref = lp + spread * rng.standard_normal(len(lp)) / np.sqrt(max(lengths, default=1))
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return [lp, sequence_logps_ref(ref, cu_seqlens), lp - rng.random(len(lp)), cu_seqlens]


def run(arrays, config, scale=SCALE, token_scale=TOKEN_SCALE):
    """(dlogprobs, pair_stats) on the host from the operator."""
    lp, ref_logps, log_sum_sq, cu_seqlens = arrays
    lp, ref_logps, log_sum_sq = (device.asarray(a.astype(np.float32)) for a in (lp, ref_logps, log_sum_sq))
    dlogprobs = device.xp().full(len(lp), np.nan, np.float32)
    stats = device.xp().full((len(ref_logps) // 2, PAIR_STATS), np.nan, np.float32)
    weighting = (log_sum_sq,) if config.use_weighting else ()
    pairs = PackedPairs(ref_logps, device.asarray(cu_seqlens), *weighting)
    preference_loss(lp, pairs, config, scale, token_scale, dlogprobs, stats)
    return device.to_host(dlogprobs), device.to_host(stats)


def reference(arrays, config, scale=SCALE, token_scale=TOKEN_SCALE):
    lp, ref_logps, log_sum_sq, cu_seqlens = arrays
    return preference_loss_ref(lp, PackedPairs(ref_logps, cu_seqlens, log_sum_sq), config, scale, token_scale)


def check_against_reference(arrays, config):
    dlogprobs, stats = run(arrays, config)
    rounded = [a.astype(np.float32).astype(np.float64) for a in arrays[:3]] + arrays[3:]
    expected, expected_stats = reference(rounded, config)
    # The error of a sum of log-probs is multiplied by the slope of the loss, which is at most of the size of the loss.
    terms = 32 * int(np.max(np.diff(arrays[3]), initial=1))
    size = 1.0 + float(np.abs(expected_stats).max(initial=0.0))
    assert_close(stats, expected_stats, terms=terms, scale=size, what="pair_stats")
    assert_close(
        dlogprobs, expected, terms=terms, scale=1.0 + float(np.abs(expected).max(initial=0.0)), what="gradient"
    )
    return dlogprobs, stats


def golden(kind):
    stored = np.load(GOLDEN)
    cases = json.loads(str(stored[f"{kind}_cases"]))
    return stored, zip(cases, stored[f"{kind}_losses"], stored[f"{kind}_gradients"], strict=True)


def test_golden_values_of_trl():
    stored, cases = golden("dpo")
    cu_seqlens = np.cumsum([0, *stored["chosen"], *stored["rejected"]])
    lp, log_sum_sq = stored["pair_logprobs"], stored["pair_log_sum_sq"]
    seen = set()
    for case, loss, gradient in cases:
        config = PreferenceLossConfig(**case["config"])
        ref_logps = sequence_logps_ref(stored["pair_ref_logprobs"], cu_seqlens, config.ld_alpha)
        token_scale = 1.0 / stored["chosen"].sum()
        arrays = [lp, ref_logps, log_sum_sq, cu_seqlens]
        dlogprobs, stats = reference(arrays, config, 0.25, token_scale)
        # TRL's alpha-divergence is computed in float32.
        single = config.f_divergence_type == "alpha_divergence"
        tolerance = {"rtol": 2e-5, "atol": 1e-6} if single else {"rtol": 1e-12, "atol": 1e-13}
        np.testing.assert_allclose(stats[:, LOSS].sum(), loss, **tolerance, err_msg=str(case["config"]))
        np.testing.assert_allclose(dlogprobs, gradient, **tolerance, err_msg=str(case["config"]))
        metrics = preference_metrics(stats)
        assert metrics.keys() == case["metrics"].keys()
        for name, value in metrics.items():
            assert value == pytest.approx(case["metrics"][name], rel=1e-9, abs=1e-6 if single else 1e-12), (
                name,
                case["config"],
            )
        seen |= {(name, config.f_divergence_type, config.use_weighting) for name in config.loss_type}
    assert {name for name, _, _ in seen} == set(LOSS_TYPES) and len(seen) > 60


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gradient_of_reference(rng, config):
    arrays, config = batch(rng, [5, 1, 7, 3], [3, 2, 7, 6]), config_of(**config)
    gradient = reference(arrays, config)[0]
    assert np.count_nonzero(gradient) > 3
    weights = None
    if config.use_weighting:
        # No gradient is taken of the weights: the quotient of the losses with and without them.
        plain = config_of(**vars(config) | {"use_weighting": False})
        weights = reference(arrays, config)[1][:, LOSS] / reference(arrays, plain)[1][:, LOSS]

    def loss():
        if weights is None:
            return float(reference(arrays, config)[1][:, LOSS].sum())
        return float((weights * reference(arrays, plain)[1][:, LOSS]).sum())

    assert_gradient(loss, gradient, arrays[0], name_of(vars(config)))


@pytest.mark.parametrize("name", [name for name in LOSS_TYPES if name not in SORTING])
def test_gradient_is_independent_of_the_micro_batches(rng, name):
    chosen, rejected = [5, 3, 1, 7], [2, 6, 4, 4]
    arrays, config = batch(rng, chosen, rejected), config_of(loss_type=name, label_smoothing=0.1, ld_alpha=0.5)
    whole, stats = reference(arrays, config, 0.25, 1.0 / sum(chosen))
    bounds = arrays[3]
    for first, last in ((0, 1), (1, 4)):
        sides = slice(bounds[first], bounds[last]), slice(bounds[4 + first], bounds[4 + last])
        part = [np.concatenate([array[side] for side in sides]) for array in (arrays[0], arrays[2])]
        ref_logps = np.concatenate([arrays[1][first:last], arrays[1][4 + first : 4 + last]])
        cu_seqlens = np.cumsum([0, *chosen[first:last], *rejected[first:last]])
        of_part = [part[0], ref_logps, part[1], cu_seqlens]
        gradient, some = reference(of_part, config, 0.25, 1.0 / sum(chosen))
        np.testing.assert_allclose(gradient, np.concatenate([whole[side] for side in sides]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(some, stats[first:last], rtol=0, atol=1e-12)


def test_aot_sorts_its_batch(rng):
    """The order of the pairs does not matter, and of one pair it is label-smoothed DPO."""
    arrays = batch(rng, [2] * 5, [2] * 5)
    order = rng.permutation(5)
    shuffled = [array.reshape(2, 5, -1)[:, order].reshape(-1) for array in arrays[:3]] + arrays[3:]
    for name in SORTING:
        config = config_of(loss_type=name, label_smoothing=0.1)
        gradient, stats = reference(arrays, config)
        again, others = reference(shuffled, config)
        np.testing.assert_allclose(gradient.reshape(2, 5, 2)[:, order], again.reshape(2, 5, 2), rtol=1e-12)
        np.testing.assert_allclose(stats[order, LOSS].sum(), others[:, LOSS].sum(), rtol=1e-12)
        single = batch(rng, [3], [4])
        plain = config_of(loss_type=name)
        np.testing.assert_allclose(reference(single, plain)[0], reference(single, config_of())[0], rtol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.sim
def test_simulator(rng, config):
    check_against_reference(batch(rng, [7, 150, 2, 0, 1], [5, 130, 2, 3, 0]), config_of(**config))


@pytest.mark.sim
def test_simulator_pairs_beyond_a_block_are_sorted(rng, monkeypatch):
    if device.name() == "sim":
        # Every pair's block compares all pairs with each other.
        monkeypatch.setattr(preference_loss_module, "THREADS", 32)
    each = [1] * (preference_loss_module.THREADS + 2)
    check_against_reference(batch(rng, each, each), config_of(loss_type=["aot", "aot_unpaired"]))


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_machine_code(compile_offline, config):
    """No float64, no spills, whatever the kernel is specialised for."""
    kernel = preference_loss_kernel(preference_terms(config_of(**config)))
    arrays = ["float32[::1]"] * 4 + ["int32[::1]", "float32", "float32", "float32[::1]", "float32[:,::1]"]
    assert not compile_offline(kernel, tuple(arrays), (9, 0))


def test_kernels_are_shared_where_the_terms_are():
    """Options that a loss does not read compile nothing again."""
    kernel = preference_loss_kernel(preference_terms(config_of()))
    for same in (
        {"label_smoothing": 0.1},
        {"discopop_tau": 0.1},
        {"loss_weights": [1.0]},
        {"f_alpha_divergence_coef": 0.1},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
        {"ld_alpha": 1.0},
    ):
        assert preference_loss_kernel(preference_terms(config_of(**same))) is kernel, same
    assert preference_loss_kernel(preference_terms(config_of(beta=0.5))) is not kernel


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.sim
def test_a_log_prob_that_is_no_number_shows(rng, monkeypatch, config):
    """In the loss and in its pair's gradient, so that the optimizer leaves the step out."""
    use_gpu_arithmetic(monkeypatch, preference_loss_module)
    arrays = batch(rng, [3, 4], [2, 5])
    arrays[0][0] = np.nan
    dlogprobs, stats = run(arrays, config_of(**config))
    assert np.isnan(stats[:, LOSS].sum())
    # The gradient of sft is a constant.
    assert np.isnan(dlogprobs[:3]).all() or config["loss_type"] == "sft"


@pytest.mark.sim
def test_simulator_far_log_ratios(rng, monkeypatch):
    """A policy that has left its reference: no overflow where the loss has none."""
    use_gpu_arithmetic(monkeypatch, preference_loss_module)
    lengths = [4, 4, 4], [4, 4, 4]
    arrays = batch(rng, *lengths)
    arrays[1] = arrays[1] + np.array([900.0, -900.0, 900.0, -900.0, 900.0, 900.0])
    for name in LOSS_TYPES:
        dlogprobs, stats = check_against_reference(arrays, config_of(loss_type=name, label_smoothing=0.1))
        assert np.isfinite(dlogprobs).all() and np.isfinite(stats).all(), name
    alpha = config_of(f_divergence_type="alpha_divergence")
    dlogprobs, _ = run(arrays, alpha)
    assert np.isfinite(dlogprobs).all()


@pytest.mark.sim
@pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3])
def test_sequence_logps(rng, ld_alpha):
    lp, _, _, cu_seqlens = batch(rng, [7, 300, 2, 0], [5, 1, 2, 3])
    logps = device.xp().full(8, np.nan, np.float32)
    sequence_logps(device.asarray(lp.astype(np.float32)), device.asarray(cu_seqlens), logps, ld_alpha)
    assert_close(logps, sequence_logps_ref(lp.astype(np.float32), cu_seqlens, ld_alpha), terms=300, what="logps")
    odd = device.xp().full(3, np.nan, np.float32)
    end = int(cu_seqlens[3])
    sequence_logps(device.asarray(lp[:end].astype(np.float32)), device.asarray(cu_seqlens[:4]), odd)
    assert_close(odd, sequence_logps_ref(lp[:end].astype(np.float32), cu_seqlens[:4]), terms=300, what="logps")


@pytest.mark.sim
def test_equal_policies_have_no_rewards(rng):
    """Exactly: the sums of both are in the same order."""
    lp, _, _, cu_seqlens = batch(rng, [300, 9], [200, 4])
    for ld_alpha in (None, 0.3):
        lp, ref_logps = lp.astype(np.float32), device.xp().empty(4, np.float32)
        sequence_logps(device.asarray(lp), device.asarray(cu_seqlens), ref_logps, ld_alpha)
        _, stats = run([lp, device.to_host(ref_logps), lp, cu_seqlens], config_of(ld_alpha=ld_alpha))
        assert not stats[:, 3:].any()
        assert stats[:, LOSS] == pytest.approx(SCALE * np.log(2.0))


@pytest.mark.sim
def test_no_pairs(rng):
    dlogprobs, stats = run(batch(rng, [], []), config_of())
    assert dlogprobs.size == 0 and stats.shape == (0, PAIR_STATS)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_numpy_device(rng, config):
    if device.name() == "cpu":
        check_against_reference(batch(rng, [7, 130, 2, 0, 640, 1], [9, 30, 2, 5, 64, 0]), config_of(**config))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gpu(rng, config):
    lengths = [640] * 61 + [1, 0, 4097]
    check_against_reference(batch(rng, lengths, lengths[::-1]), config_of(**config))


@pytest.mark.gpu
def test_gpu_repeats_its_bits(rng):
    arrays = batch(rng, [640] * 64, [600] * 64)
    for again, once in zip(run(arrays, config_of()), run(arrays, config_of()), strict=True):
        assert_same_bits(again, once)


def test_wrong_arguments_are_named(rng):
    arrays = batch(rng, [3], [2])
    with pytest.raises(ValueError, match=r"preference_loss: use_weighting needs log_sum_sq_probs, got None"):
        single = device.asarray(arrays[0].astype(np.float32))
        stats = device.xp().empty((1, PAIR_STATS), np.float32)
        ref_logps, cu_seqlens = device.asarray(arrays[1].astype(np.float32)), device.asarray(arrays[3])
        pairs = PackedPairs(ref_logps, cu_seqlens)
        preference_loss(single, pairs, config_of(use_weighting=True), 1, 1, single, stats)
    with pytest.raises(ValueError, match=r"preference_loss: ref_logps must be \(2\) float32, got \(4,\) float32"):
        wrong = pairs._replace(ref_logps=device.xp().empty(4, np.float32))
        preference_loss(single, wrong, config_of(), 1, 1, single, stats)
    with pytest.raises(ValueError, match=r"preference_loss: cu_seqlens must have 3 elements, got 2"):
        wrong = pairs._replace(cu_seqlens=cu_seqlens[:2].copy())
        preference_loss(single, wrong, config_of(), 1, 1, single, stats)
    with pytest.raises(ValueError, match=r"sequence_logps: logps must be \(2\) float32, got \(1,\) float32"):
        sequence_logps(single, cu_seqlens, single[:1].copy())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"loss_type": "sigmiod"}, "train.loss_type must be one of sigmoid, sigmoid_norm, .*, got 'sigmiod'"),
        ({"loss_type": ["sigmoid", "x"]}, "train.loss_type must be one of .*, got 'x'"),
        ({"loss_type": []}, "train.loss_type must name at least one loss type"),
        ({"loss_weights": [1.0, 2.0]}, "train.loss_weights must have one weight for each of the 1 loss types, got 2"),
        (
            {"loss_type": ["sigmoid", "nca_pair"], "f_divergence_type": "forward_kl"},
            "train.f_divergence_type forward_kl is not defined for loss_type nca_pair, only for sigmoid, ",
        ),
        ({"loss_type": "aot", "use_weighting": True}, "train.use_weighting is not defined for loss_type aot"),
        ({"loss_type": "sft", "use_weighting": True}, "train.use_weighting is not defined for loss_type sft"),
        ({"loss_type": "exo_pair"}, "train.loss_type exo_pair needs train.label_smoothing above 0"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "train.label_smoothing must be below 0.5 with robust"),
        ({"label_smoothing": 1.0}, "train.label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"ld_alpha": 1.5}, "train.ld_alpha must be at least 0 and at most 1, got 1.5"),
        ({"beta": 0.0}, "train.beta must be above 0, got 0.0"),
        ({"discopop_tau": 0.0}, "train.discopop_tau must be above 0, got 0.0"),
        ({"f_divergence_type": "kl"}, "train.f_divergence_type must be one of reverse_kl, .*, got 'kl'"),
    ],
)
def test_options_that_contradict_each_other_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceLossConfig(**options)
