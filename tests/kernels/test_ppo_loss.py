import pathlib

import numpy as np
import pytest

from rlnumba.config import PPOConfig
from rlnumba.kernels.rl import ppo_loss as ppo_loss_module
from rlnumba.kernels.rl.ppo_loss import (
    APPROX_KL,
    BLOCK_TOKENS,
    CLIPPED,
    ENTROPY,
    MAX_BLOCKS,
    POLICY,
    RATIO,
    SUMS,
    THREADS,
    VALUE,
    VALUE_CLIPPED,
    PPOOutputs,
    RolloutArrays,
    TokenPredictions,
    ppo_loss,
    ppo_loss_blocks,
    ppo_loss_kernel,
    ppo_loss_ref,
    ppo_metrics,
    ppo_terms,
)
from rlnumba.runtime import device
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_close, assert_gradient, assert_same_bits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "ppo_parts.npz"
CONFIG = PPOConfig(cliprange=0.2, cliprange_value=0.15, vf_coef=0.3)


def batch(rng, tokens, size=None):
    """Arrays of TokenPredictions and RolloutArrays, float64; rows are a shuffled part of a rollout of `size` tokens.

    No ratio and no value is so close to a bound of its clipping that rounding could decide whether it is clipped.
    """
    size = tokens + 5 if size is None else size
    rows = rng.permutation(size)[:tokens].astype(np.int32)
    old, advantages, old_values = -rng.exponential(1.0, size), rng.standard_normal(size), rng.standard_normal(size)
    returns = old_values + rng.standard_normal(size)
    bounds = np.log([1 - CONFIG.cliprange, 1 + CONFIG.cliprange]), [-CONFIG.cliprange_value, CONFIG.cliprange_value]
    logprobs, values = (
        before[rows] + away_from(of_change, rng.normal(0, 0.3, tokens))
        for before, of_change in zip((old, old_values), bounds, strict=True)
    )
    return [logprobs, rng.uniform(0, 3, tokens), values, rows, old, advantages, old_values, returns]


def away_from(bounds, values):
    """values, those nearer than 1e-5 to one of the bounds moved beyond that."""
    for bound in bounds:
        values = np.where(np.abs(values - bound) < 1e-5, bound + 2e-5, values)
    return values


def run(arrays, config=CONFIG, scale=0.1):
    """(dlogprobs, dvalues, sums, partials) on the host from the operator."""
    xp = device.xp()
    given = [device.asarray(a if a.dtype == np.int32 else a.astype(np.float32)) for a in arrays]
    outputs = [xp.full(len(arrays[0]), np.nan, np.float32) for _ in range(2)]
    outputs.append(xp.full((ppo_loss_blocks(len(arrays[0])), SUMS), np.nan, np.float32))
    ppo_loss(TokenPredictions(*given[:4]), RolloutArrays(*given[4:]), config, scale, PPOOutputs(*outputs))
    dlogprobs, dvalues, partials = (device.to_host(a) for a in outputs)
    return dlogprobs, dvalues, partials.sum(axis=0, dtype=np.float64), partials


def reference(arrays, config, scale):
    """ppo_loss_ref of the arrays of `batch`."""
    return ppo_loss_ref(TokenPredictions(*arrays[:4]), RolloutArrays(*arrays[4:]), config, scale)


def rounded(arrays):
    return [a if a.dtype == np.int32 else a.astype(np.float32).astype(np.float64) for a in arrays]


def check_against_reference(arrays):
    dlogprobs, dvalues, sums, _ = run(arrays)
    expected = reference(rounded(arrays), CONFIG, 0.1)
    # An exponential, two products; a difference of values that nearly cancel.
    assert_close(dlogprobs, expected[0], terms=8, what="dlogprobs")
    assert_close(dvalues, expected[1], terms=8, what="dvalues")
    scale = max(2.0, float(np.abs(expected[2]).max()))
    assert_close(sums.astype(np.float32), expected[2], terms=16, scale=scale, what="sums")


def test_golden_values_of_trl():
    stored = np.load(GOLDEN)
    valid = np.arange(stored["logprobs"].shape[1])[None] < stored["lengths"][:, None]
    names = ("new_logprobs", "vpred", "logprobs", "advantage", "values", "target")
    lp, values, old, advantages, old_values, returns = (stored[name][valid] for name in names)
    tokens = len(lp)
    config = PPOConfig(cliprange=0.2, cliprange_value=0.15, vf_coef=0.3)
    arrays = lp, np.zeros(tokens), values, np.arange(tokens), old, advantages, old_values, returns
    dlogprobs, dvalues, sums = reference(arrays, config, 1 / tokens)
    np.testing.assert_allclose(dlogprobs, stored["dnew_logprobs"][valid], rtol=0, atol=1e-12)
    np.testing.assert_allclose(dvalues, stored["dvpred"][valid], rtol=0, atol=1e-12)
    metrics = ppo_metrics([sums], [tokens])
    trl = {"loss/policy_avg": "pg_loss", "loss/value_avg": "vf_loss", "val/clipfrac_avg": "vf_clipfrac"}
    trl |= {"policy/clipfrac_avg": "pg_clipfrac", "policy/approxkl_avg": "approxkl", "val/ratio": "ratio"}
    for name, key in trl.items():
        assert metrics[name] == pytest.approx(float(stored[key]), abs=1e-7), name
    assert 0 < metrics["policy/clipfrac_avg"] < 1 and 0 < metrics["val/clipfrac_avg"] < 1


def test_gradient_of_reference(rng):
    arrays = batch(rng, 40)
    dlogprobs, dvalues, _ = reference(arrays, CONFIG, 0.1)

    def loss():
        sums = reference(arrays, CONFIG, 0.1)[2]
        return 0.1 * (sums[POLICY] + CONFIG.vf_coef * sums[VALUE])

    assert 0 < np.count_nonzero(dlogprobs) < 40 and 0 < np.count_nonzero(dvalues) < 40
    assert_gradient(loss, dlogprobs, arrays[0], "logprobs")
    assert_gradient(loss, dvalues, arrays[2], "values")


def test_values_computed_by_hand():
    """Nothing changed; the ratio is beyond its bound; the ratio is beyond it the wrong way, and the value, too."""
    old, advantages, old_values = np.log([0.5, 0.4, 0.4]), np.array([2.0, 1.0, -1.0]), np.array([0.0, 1.0, 1.0])
    returns = np.array([1.0, 1.1, 3.0])
    lp, values = np.log([0.5, 0.6, 0.6]), np.array([0.0, 1.1, 2.0])
    arrays = lp, np.array([0.5, 1.0, 1.5]), values, np.arange(3), old, advantages, old_values, returns
    dlogprobs, dvalues, sums = reference(arrays, PPOConfig(vf_coef=0.5), 2.0)
    np.testing.assert_allclose(dlogprobs, 2.0 * np.array([-2.0, 0.0, 1.5]))
    # The value that moved towards its return by more than 0.2 has no slope: clipped, it is further from the return.
    np.testing.assert_allclose(dvalues, 2.0 * 0.5 * np.array([-1.0, 0.0, 0.0]), atol=1e-12)
    assert sums[POLICY] == pytest.approx(-2.0 - 1.2 + 1.5)
    assert sums[VALUE] == pytest.approx(0.5 * (1.0 + 0.0 + 1.8**2))
    assert (sums[CLIPPED], sums[VALUE_CLIPPED]) == (1, 1)
    assert sums[APPROX_KL] == pytest.approx(0.5 * 2 * np.log(1.5) ** 2)
    assert (sums[RATIO], sums[ENTROPY]) == (pytest.approx(4.0), 3.0)


@pytest.mark.sim
@pytest.mark.parametrize("tokens", [1, THREADS - 1, THREADS + 1])
def test_simulator(rng, tokens):
    check_against_reference(batch(rng, tokens))


@pytest.mark.sim
def test_more_tokens_than_blocks_take_at_a_time(rng, monkeypatch):
    monkeypatch.setattr(ppo_loss_module, "MAX_BLOCKS", 1)
    check_against_reference(batch(rng, BLOCK_TOKENS + 7))


@pytest.mark.sim
def test_no_tokens(rng):
    _, _, sums, partials = run(batch(rng, 0))
    assert partials.shape == (1, SUMS) and not sums.any()


@pytest.mark.sim
def test_numbers_that_are_none_show(rng):
    """In the gradient, so that the optimizer leaves the step out."""
    arrays = batch(rng, 9)
    arrays[0][3] = arrays[2][5] = np.nan
    dlogprobs, dvalues, sums, _ = run(arrays)
    assert np.isnan(dlogprobs).nonzero()[0].tolist() == [3] and np.isnan(dvalues).nonzero()[0].tolist() == [5]
    assert np.isnan(sums[POLICY]) and np.isnan(sums[VALUE])


def test_machine_code(compile_offline):
    """No float64, no spills."""
    arrays = ["float32[::1]"] * 3 + ["int32[::1]", tuple_type(RolloutArrays, *["float32[::1]"] * 4)]
    outputs = ["float32", "float32[::1]", "float32[::1]", "float32[:,::1]"]
    assert not compile_offline(ppo_loss_kernel(ppo_terms(CONFIG)), (*arrays, *outputs), (9, 0))


def test_numpy_device(rng):
    if device.name() == "cpu":
        check_against_reference(batch(rng, 1000))
        check_against_reference(batch(rng, 0))


@pytest.mark.gpu
def test_gpu(rng):
    for tokens in (1, THREADS, 40961, BLOCK_TOKENS * MAX_BLOCKS + 77):
        check_against_reference(batch(rng, tokens))
    arrays = batch(rng, 50000)
    for again, once in zip(run(arrays), run(arrays), strict=True):
        assert_same_bits(again, once)


def test_metrics_are_means_of_means():
    sums = np.zeros((2, SUMS))
    sums[:, RATIO], sums[:, POLICY] = (4.0, 12.0), (2.0, 6.0)
    metrics = ppo_metrics(sums, [4, 10])
    assert metrics["val/ratio"] == pytest.approx(1.1) and metrics["val/ratio_var"] == pytest.approx(0.02)
    assert metrics["loss/policy_avg"] == pytest.approx(0.55)
    assert np.isnan(ppo_metrics(sums[:1], [4])["val/ratio_var"])


def test_wrong_arguments_are_named(rng):
    arrays = batch(rng, 4)
    with pytest.raises(ValueError, match=r"ppo_loss: values must be \(4\) float32, got \(3,\) float32"):
        run([*arrays[:2], arrays[2][:3], *arrays[3:]])
    with pytest.raises(ValueError, match=r"ppo_loss: returns must be \(9\) float32, got \(8,\) float32"):
        run([*arrays[:7], arrays[7][:8]])
    if device.name() == "cpu":
        with pytest.raises(ValueError, match=r"ppo_loss: rows must be in \[0, 9\), got 0 to 9"):
            run([*arrays[:3], np.array([0, 9, 1, 2], np.int32), *arrays[4:]])
