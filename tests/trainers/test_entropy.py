"""The entropy bonus, its controller and the choice of tokens by entropy, against TRL's own loss and by hand."""

import numpy as np
import pytest

from rlnumba.errors import ConfigError
from rlnumba.runtime import device
from rlnumba.trainers import entropy, grpo
from tests.close import assert_close, assert_same_bits
from tests.trainers.runs import golden, grpo_config, grpo_run, metrics_of
from tests.trainers.test_grpo import golden_policy, golden_rollouts, other_sampler  # noqa: F401

GOLDEN = golden("grpo_entropy_curves.json")


def entropy_policy(**options):
    return golden_policy(vllm_importance_sampling_correction=False, per_device_train_batch_size=8, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden_curve(other_sampler, case):  # noqa: F811
    options, curve = GOLDEN["cases"][case]["options"], GOLDEN["cases"][case]["curve"]
    policy, rollouts = entropy_policy(**options), golden_rollouts()
    rollouts.old_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(8))
    for step, want in enumerate(curve):
        got = grpo.train_step(policy, rollouts.parts(8, on_policy=step == 0), GOLDEN["config"]["learning_rate"])
        for name, value in want.items():
            # The loss of a first step may be 0 by cancellation of terms of size 1.
            assert got[name] == pytest.approx(value, rel=1e-5, abs=2e-6), (step, name)


@pytest.mark.parametrize("case", ["bonus", "quantile", "quantile_0_sequence", "adaptive"])
def test_results_do_not_depend_on_the_micro_batches(other_sampler, case):  # noqa: F811
    found = []
    for size in (8, 4, 1):
        policy = entropy_policy(**GOLDEN["cases"][case]["options"])
        metrics = [grpo.train_step(policy, golden_rollouts().parts(size, on_policy=True), 1e-3) for _ in range(2)]
        gradient = device.to_host(policy.grads.flat).copy()
        found.append((metrics[1]["loss"], metrics[1].get("entropy_coef"), gradient))
    loss, coef, gradient = found[0]
    for other_loss, other_coef, other in found[1:]:
        assert other_coef == coef and other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(other, gradient, atol=1e-4 * np.abs(gradient).max())


def test_the_bonus_raises_the_entropy():
    found = []
    for coef in (-5.0, 0.0, 5.0):
        policy, rollouts = entropy_policy(entropy_coef=coef), golden_rollouts()
        rollouts.advantages[:] = 0
        found.append([grpo.train_step(policy, rollouts.parts(8, on_policy=True), 1e-3)["entropy"] for _ in range(3)])
    assert found[0][2] < found[0][0] - 1e-3 and found[2][2] > found[2][0] + 1e-3
    assert found[1][0] == pytest.approx(found[1][2], abs=1e-6)


def test_options_that_are_off_change_no_bit(other_sampler):  # noqa: F811
    """Neither the keys of a controller that is off nor a coefficient that it does not apply."""
    weights = []
    for options in ({}, {"entropy_coef_delta": 0.5, "entropy_target": 9.0}, {"use_adaptive_entropy": True}):
        policy = entropy_policy(**options)
        grpo.train_step(policy, golden_rollouts().parts(4, on_policy=True), 1e-3)
        weights.append(device.to_host(policy.model.weights.flat).copy())
    assert_same_bits(weights[1], weights[0])
    assert_same_bits(weights[2], weights[0])


def test_the_controller_goes_up_and_down_within_its_bounds():
    train = grpo_config(
        use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_delta=0.04, entropy_coef_max=0.15, entropy_target=2.0
    )
    state, found = {}, []
    assert entropy.coefficient(train, state) == (0.1, 0.0), "no step has measured the entropy"
    for mean_entropy in (1.0, 2.0, 2.1, 3.0, 3.0, 3.0, 3.0, 1.5):
        found.append((round(entropy.update(train, state, mean_entropy), 6), entropy.coefficient(train, state)[1] > 0))
    up = [(0.14, True), (0.15, True)]
    down = [(0.11, False), (0.07, False), (0.03, False), (0.0, False), (0.0, False)]
    assert found == [*up, *down, (0.04, True)]


def test_high_entropy_mask_by_hand():
    values, mask = np.float32([0.1, 9.0, 0.4, 0.3, 0.2, 0.5]), np.float32([1, 0, 1, 1, 1, 1])
    for quantile, kept in ((1.0, [0, 2, 3, 4, 5]), (0.5, [2, 3, 5]), (0.25, [2, 5]), (0.2, [5]), (0.0, [5])):
        chosen = entropy.high_entropy_mask(values, mask, quantile)
        assert np.flatnonzero(chosen).tolist() == kept, quantile
    assert not entropy.high_entropy_mask(values, 0 * mask, 0.5).any()


def test_masked_tokens_have_no_bonus(other_sampler):  # noqa: F811
    """A batch with masked sequences against the one without them."""
    gradients = []
    for masked in (True, False):
        policy, rollouts = entropy_policy(entropy_coef=0.3, max_grad_norm=0.0), golden_rollouts()
        end = int(rollouts.completion_lengths[:3].sum())
        rollouts.loss_mask[end:] = 0
        if not masked:
            rollouts = rollouts.part(0, 3)
        grpo.train_step(policy, rollouts.parts(8, on_policy=True), 0.0)
        gradients.append(device.to_host(policy.grads.flat).astype(np.float64))
    assert_close(gradients[0], gradients[1], "float32", terms=200, what="gradient")


def test_the_controller_is_resumed(tmp_path):
    """A run that was stopped after two of four steps ends with the weights of one that was not."""
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "save_steps": 2}
    whole = grpo_run(tmp_path / "whole", **options)
    grpo.run_grpo(whole)
    grpo.run_grpo(grpo_run(tmp_path / "run", max_steps=2, **options))
    resumed = grpo_run(tmp_path / "run", **options)
    grpo.run_grpo(resumed, resume=True)
    rows, want = metrics_of(resumed), metrics_of(whole)
    assert [row["entropy_coef"] for row in rows] == pytest.approx([0.105, 0.11, 0.115, 0.12])
    assert [row["loss"] for row in rows] == [row["loss"] for row in want]
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bounds_that_cross_are_named():
    with pytest.raises(ConfigError, match=r"train.entropy_coef_min \(2.0\) must be at most entropy_coef_max \(1.0\)"):
        grpo_config(entropy_coef_min=2.0)
    with pytest.raises(ConfigError, match=r"train.top_entropy_quantile must be .*at most 1, got 1.5"):
        grpo_config(top_entropy_quantile=1.5)
