import numpy as np
import pytest

from rlnumba.config import KTOLossConfig
from rlnumba.kernels.rl import preference_loss as preference_loss_module
from rlnumba.kernels.rl.kto_loss import (
    LOSS,
    STATS,
    KTOCompletions,
    kto_loss,
    kto_loss_kernel,
    kto_loss_ref,
    kto_metrics,
)
from rlnumba.kernels.rl.preference_loss import sequence_logps_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient
from tests.kernels.gpu_arithmetic import use_gpu_arithmetic
from tests.kernels.test_preference_loss import golden

CONFIGS = [
    {"beta": 0.4},
    {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.5},
]
SCALE = 0.2


def batch(rng, lengths, kl=0.5):
    """The arrays of kto_loss in float64; kl: about what the KL divergence is."""
    cu_seqlens, rows = np.cumsum([0, *lengths]).astype(np.int32), len(lengths)
    lp = -rng.exponential(1.0, sum(lengths))
    ref_logps = sequence_logps_ref(lp, cu_seqlens) + 0.5 * rng.standard_normal(rows)
    labels, kl_logps = (np.arange(rows) % 3 != 1).astype(np.uint8), rng.standard_normal(2 * rows) - 3
    return [lp, ref_logps, labels, kl_logps, kl_logps - kl + 0.3 * rng.standard_normal(2 * rows), cu_seqlens]


def run(arrays, config):
    """(dlogprobs, stats) on the host from the operator."""
    given = [device.asarray(a.astype(np.float32) if a.dtype == np.float64 else a) for a in arrays]
    dlogprobs = device.xp().full(len(arrays[0]), np.nan, np.float32)
    stats = device.xp().full((len(arrays[2]), STATS), np.nan, np.float32)
    kto_loss(given[0], KTOCompletions(*given[1:]), config, SCALE, dlogprobs, stats)
    return device.to_host(dlogprobs), device.to_host(stats)


def reference(arrays, config, scale):
    """kto_loss_ref of the arrays of `batch`."""
    return kto_loss_ref(arrays[0], KTOCompletions(*arrays[1:]), config, scale)


def check_against_reference(arrays, config):
    dlogprobs, stats = run(arrays, config)
    rounded = [a.astype(np.float32).astype(np.float64) if a.dtype == np.float64 else a for a in arrays]
    expected, expected_stats = reference(rounded, config, SCALE)
    terms = 8 * int(np.max(np.diff(arrays[5]), initial=1))
    size = 1.0 + float(np.abs(expected_stats).max(initial=0.0))
    assert_close(stats, expected_stats, terms=terms, scale=size, what="stats")
    assert_close(dlogprobs, expected, terms=terms, scale=1.0, what="gradient")
    return expected_stats


def test_golden_values_of_trl():
    stored, cases = golden("kto")
    cu_seqlens = np.cumsum([0, *stored["unpaired"]])
    ref_logps, labels = sequence_logps_ref(stored["kto_ref_logprobs"], cu_seqlens), stored["labels"]
    kls = set()
    for case, loss, gradient in cases:
        options = dict(case["config"])
        kl = [stored[name] * options.get("sign", 1) for name in ("kl_logps", "ref_kl_logps")]
        options.pop("sign", None)
        config = KTOLossConfig(**options)
        arrays = stored["kto_logprobs"], ref_logps, labels, *kl, cu_seqlens
        dlogprobs, stats = reference(arrays, config, 1.0 / len(labels))
        np.testing.assert_allclose(stats[:, LOSS].sum(), loss, rtol=1e-12, err_msg=str(options))
        np.testing.assert_allclose(dlogprobs, gradient, rtol=1e-12, atol=1e-14, err_msg=str(options))
        metrics = kto_metrics(stats, labels)
        assert metrics.keys() == case["metrics"].keys()
        for name, value in metrics.items():
            assert value == pytest.approx(case["metrics"][name], rel=1e-9), (name, options)
        kls.add(metrics["kl"])
    assert 0.0 in kls and len(kls) > 1


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gradient_of_reference(rng, config):
    arrays, config = batch(rng, [5, 1, 7, 3]), KTOLossConfig(**config)
    gradient = reference(arrays, config, SCALE)[0]

    def loss():
        return float(reference(arrays, config, SCALE)[1][:, LOSS].sum())

    assert_gradient(loss, gradient, arrays[0], config.loss_type)


@pytest.mark.parametrize("kl", [0.5, -0.5])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.sim
def test_simulator(rng, config, kl):
    config = KTOLossConfig(**config)
    stats = check_against_reference(batch(rng, [7, 300, 2, 0, 1], kl), config)
    assert (stats[:, 3] > 0).all() == (kl > 0 and config.loss_type == "kto")
    # More rows of the KL divergence than threads.
    check_against_reference(batch(rng, [1] * 70, kl), config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_numpy_device(rng, config):
    if device.name() == "cpu":
        check_against_reference(batch(rng, [7, 300, 2, 0, 1, 640]), KTOLossConfig(**config))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu(rng, config):
    check_against_reference(batch(rng, [640] * 61 + [1, 0, 4097]), KTOLossConfig(**config))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_machine_code(compile_offline, config):
    config = KTOLossConfig(**config)
    kernel = kto_loss_kernel(config.loss_type, config.beta, config.desirable_weight, config.undesirable_weight)
    arrays = ["float32[::1]"] * 2 + ["uint8[::1]"] + ["float32[::1]"] * 2 + ["int32[::1]", "float32"]
    assert not compile_offline(kernel, (*arrays, "float32[::1]", "float32[:,::1]"), (9, 0))


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.sim
def test_a_log_prob_that_is_no_number_shows(rng, monkeypatch, index):
    use_gpu_arithmetic(monkeypatch, preference_loss_module)
    arrays = batch(rng, [3, 4])
    arrays[index][0] = np.nan
    dlogprobs, stats = run(arrays, KTOLossConfig())
    assert np.isnan(stats[:, LOSS].sum()) and np.isnan(dlogprobs[:3]).all()


def test_wrong_arguments_are_named(rng):
    arrays = batch(rng, [3, 2])
    with pytest.raises(ValueError, match=r"kto_loss: labels must be \(2\) uint8, got \(2,\) int64"):
        run(arrays[:2] + [arrays[2].astype(np.int64)] + arrays[3:], KTOLossConfig())
    empty = np.zeros(0)
    with pytest.raises(ValueError, match=r"kto_loss: kl_logps must have at least one element, got none"):
        run(arrays[:3] + [empty, empty] + arrays[5:], KTOLossConfig())
    run(arrays[:3] + [empty, empty] + arrays[5:], KTOLossConfig(loss_type="apo_zero_unpaired"))
