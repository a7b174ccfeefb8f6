"""Estimators of advantages and rejection of tokens, by hand and in runs of a few steps."""

import dataclasses
import json

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, RolloutConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.runs import prompt_schedule
from rlnumba.sampling.samples import penalised
from rlnumba.trainers import grpo
from rlnumba.trainers.estimators import advantages_of
from rlnumba.trainers.rejection import kept_tokens, mean_correction, reject
from tests.trainers.runs import MODEL, grpo_config, grpo_run, metrics_of
from tests.trainers.test_distill import completions_of
from tests.trainers.test_grpo import golden_policy, golden_rollouts

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, np.nan, 0.5, 0.0, 0.0])
TOKENS = np.array([3, 1, 2, 5, 9, 4, 2, 6])


def test_maxrl_by_hand():
    found = advantages_of("maxrl", REWARDS, 4, TOKENS, {})
    mean = 0.5 / 3
    np.testing.assert_allclose(found, [1, -1, -1, 1, 0, (0.5 - mean) / mean, -1, -1])
    assert not advantages_of("maxrl", np.zeros(8), 4, TOKENS, {}).any()


def test_opo_by_hand():
    """Long completions weigh more in the baseline, those without a reward not at all."""
    found = advantages_of("opo", REWARDS, 4, TOKENS, {})
    first, second = (3 + 5) / 11, 0.5 * 4 / 12
    np.testing.assert_allclose(found, [1 - first, -first, -first, 1 - first, 0, 0.5 - second, -second, -second])
    # A group whose tokens are all masked has nothing that is trained, and no number that is none.
    assert advantages_of("opo", REWARDS[:4], 4, np.zeros(4), {}).tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_white_over_tokens(estimator):
    found = advantages_of(estimator, REWARDS, 4, TOKENS, {})
    assert found[4] == 0
    raw = REWARDS.copy()
    if estimator == "reinforce_plus_plus_baseline":
        raw = np.concatenate([raw[:4] - 0.5, raw[4:] - 0.5 / 3])
    known = ~np.isnan(raw)
    tokens = np.repeat(raw[known], TOKENS[known])
    expected = (raw - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found[known], expected[known])
    assert abs(np.repeat(found[known], TOKENS[known]).mean()) < 1e-12


def test_rae_goes_on_from_its_state():
    state, whole = {}, {}
    first = advantages_of("rae", REWARDS[:4], 4, TOKENS[:4], state)
    second = advantages_of("rae", REWARDS[4:], 4, TOKENS[4:], json.loads(json.dumps(state)))
    np.testing.assert_array_equal([*first, *second], advantages_of("rae", REWARDS, 4, TOKENS, whole))
    assert first[0] == pytest.approx(0.95) and first[1] == pytest.approx(-0.0475) and second[0] == 0
    assert whole["rae_baseline"] != state["rae_baseline"]


def test_gdpo_is_a_name_of_its_aggregation():
    assert grpo_config(multi_objective_aggregation="gdpo") == grpo_config(
        multi_objective_aggregation="normalize_then_sum"
    )


def test_length_penalty_by_hand():
    assert penalised(np.array([1.0, 0.0]), [5, 10], 0.5, 10).tolist() == [0.75, -0.5]


def loops(mode, low, high, old, roll, mask, lengths):
    """kept_tokens of one mode, in a loop a sequence."""
    kept, begin = [], 0
    for length in lengths:
        d = np.clip(old[begin : begin + length] - roll[begin : begin + length], -20, 20)
        live = mask[begin : begin + length] != 0
        value = {"k1": -d, "k2": d * d / 2, "k3": np.exp(d) - 1 - d}[mode[-2:]]
        if mode.startswith("seq"):
            chosen = value[live]
            how = {"sum": np.sum, "mean": np.mean, "max": np.max}[mode.split("_")[1]]
            value = np.full(length, how(chosen) if live.any() else 0.0)
        kept += [low <= v <= high for v in value]
        begin += length
    return np.array(kept)


MODES = {
    "token_k1": ("0.8_1.3", np.log(0.8), np.log(1.3)), "token_k2": ("0.04", -np.inf, 0.04),
    "token_k3": ("0.05", -np.inf, 0.05), "seq_sum_k1": ("2", -np.log(2), np.log(2)),
    "seq_sum_k2": ("0.5", -np.inf, 0.5), "seq_sum_k3": ("0.5", -np.inf, 0.5),
    "seq_mean_k1": ("0.9_1.1", np.log(0.9), np.log(1.1)), "seq_mean_k2": ("0.05", -np.inf, 0.05),
    "seq_mean_k3": ("0.05", -np.inf, 0.05), "seq_max_k2": ("0.4", -np.inf, 0.4), "seq_max_k3": ("0.4", -np.inf, 0.4),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_rejection(rng, mode):
    lengths = np.array([7, *rng.integers(1, 15, 30)])
    old = -rng.exponential(1.0, lengths.sum())
    roll = old + rng.normal(0, 0.3, lengths.sum())
    mask = (rng.random(lengths.sum()) < 0.8).astype(np.float32)
    mask[:7] = 0
    old[mask == 0] = 1e5
    text, low, high = MODES[mode]
    found, expected = (
        kept_tokens(old, roll, mask, lengths, mode, text),
        loops(mode, low, high, old, roll, mask, lengths),
    )
    np.testing.assert_array_equal(found[mask != 0], expected[mask != 0])
    assert 0 < found[mask != 0].sum() < (mask != 0).sum()
    # With another mode a token must pass both.
    both = kept_tokens(old, roll, mask, lengths, f"{mode}, token_k2", f"{text},0.01")
    np.testing.assert_array_equal(both, found & kept_tokens(old, roll, mask, lengths, "token_k2", "0.01"))


def test_rejected_tokens_are_masked():
    """The step is that of rollouts whose mask was 0 there from the beginning."""
    policy = golden_policy(rollout_rs="token_k2", rollout_rs_threshold="0.001", top_k=5)
    rollouts, masked = golden_rollouts(), golden_rollouts()
    grpo.add_logprobs(policy, rollouts, on_policy=True)
    kept = 0.5 * (rollouts.old_logprobs.astype(np.float64) - rollouts.rollout_logprobs) ** 2 <= 0.001
    assert rollouts.rejected_fraction == pytest.approx(1 - kept.mean()) and 0 < kept.mean() < 1
    masked.loss_mask *= kept
    first = grpo.train_step(policy, rollouts.parts(4, on_policy=True), 0.0)
    again = golden_policy(rollout_rs="token_k2", rollout_rs_threshold="0.001", top_k=5)
    second = grpo.train_step(again, masked.parts(4, on_policy=True), 0.0)
    assert first == second


def test_the_mean_correction_by_hand():
    roll, mask, lengths = np.zeros(5, np.float32), np.array([1, 1, 1, 0, 1], np.float32), np.array([2, 2, 1])
    old = np.log(np.array([2.0, 0.25, 8.0, np.nan, 1.0])).astype(np.float32)
    for level, bounds, truncates, mean in (
        ("token", (None, 4.0), True, (2 + 0.25 + 4 + 1) / 4),
        ("token", (0.5, 4.0), False, (2 + 0 + 0 + 1) / 4),
        ("sequence", (None, 4.0), True, (0.5 + 4 + 1) / 3),
        ("sequence", (0.75, 10.0), False, (0 + 8 + 1) / 3),
    ):
        assert mean_correction(old, roll, mask, lengths, level, bounds, truncates) == pytest.approx(mean)
    # A sequence without tokens is in no mean.
    mask[2] = 0
    assert mean_correction(old, roll, mask, lengths, "sequence", (None, 4.0), True) == pytest.approx((0.5 + 1) / 2)
    assert mean_correction(old, roll, 0 * mask, lengths, "token", (None, 4.0), True) == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_corrections_have_mean_1(level):
    """The weights and their mean are those of the loss, and the loss is divided by it."""
    options = {"rollout_is": level, "rollout_is_threshold": "1.01", "top_k": 5, "loss_type": "cispo"}
    plain, policy = golden_policy(**options), golden_policy(**options, rollout_is_batch_normalize=True)
    losses = []
    for each in (plain, policy):
        rollouts = golden_rollouts()
        grpo.add_logprobs(each, rollouts, on_policy=True)
        losses.append(grpo.train_step(each, rollouts.parts(8, on_policy=True), 0.0))
    mean = losses[0]["sampling/importance_sampling_ratio/mean"]
    assert rollouts.correction_mean == pytest.approx(mean, rel=1e-5) and mean < 0.99
    assert losses[1]["loss"] == pytest.approx(losses[0]["loss"] / mean, rel=1e-5)


def test_bypass_mode_takes_the_samplers_log_probs():
    """Also on-policy, and without a forward; the ratio is that to the sampler."""
    train = {"bypass_mode": True, "top_k": 5, "steps_per_generation": 2, "num_iterations": 2}
    schedule = prompt_schedule.MicroBatchSchedule(grpo_config(**train), "rows", 16)
    assert not schedule.on_policy and not any(m.on_policy for step in range(3) for m in schedule.micro_steps(step))
    policy, rollouts = golden_policy(bypass_mode=True, top_k=5), golden_rollouts()
    grpo.add_logprobs(policy, rollouts, schedule.on_policy)
    assert not len(rollouts.old_logprobs)
    metrics = grpo.train_step(policy, rollouts.parts(8), 0.0)
    ratio = np.exp(grpo.host_logprobs(policy, policy.model, [rollouts]) - rollouts.rollout_logprobs)
    advantage = rollouts.advantages
    token_loss = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    assert np.abs(ratio - 1).max() > 0.01
    assert metrics["loss"] == pytest.approx(token_loss.mean(), rel=1e-4)


def test_an_exact_sampler_is_not_rejected():
    rollouts = golden_rollouts()
    before = rollouts.loss_mask.copy()
    reject(rollouts, "seq_sum_k1,token_k3", "1.0001")
    np.testing.assert_array_equal(rollouts.loss_mask, before)
    assert rollouts.rejected_fraction == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_rs": "token_k4"}, "train.rollout_rs must be of token_k1, .*, got 'token_k4'"),
        ({"rollout_rs": "seq_max_k1"}, "train.rollout_rs must be of token_k1, .*, got 'seq_max_k1'"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "rollout_rs_threshold must be one or 1, got '1,2'"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "1_2"}, "threshold of token_k3 is one number, got '1_2'"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "a"}, "rollout_rs_threshold must be a number above 0"),
        ({"advantage_estimator": "ppo"}, "train.advantage_estimator must be one of grpo, maxrl"),
        (
            {"advantage_estimator": "rae", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation normalize_then_sum is for advantage_estimator grpo, not rae",
        ),
        ({"length_penalty": 0.1, "multi_objective_aggregation": "normalize_then_sum"}, "length_penalty needs"),
        ({"advantage_estimator": "remax", "dynamic_sampling": True}, "not 0 with advantage_estimator remax"),
        ({"advantage_estimator": "rae", "dynamic_sampling": True}, "not 0 with advantage_estimator rae"),
        (
            {"advantage_estimator": "reinforce_plus_plus", "dynamic_sampling": True},
            "not 0 with advantage_estimator reinforce_plus_plus: set one",
        ),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize needs train.rollout_is"),
        (
            {"rollout_is_batch_normalize": True, "rollout_is": "token", "loss_type": "vespo"},
            "rollout_is_batch_normalize: loss_type vespo has no such weights",
        ),
        ({"bypass_mode": True, "rollout_rs": "token_k1"}, "train.rollout_rs compares the sampler with the old policy"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        grpo_config(**options)


@pytest.mark.parametrize("estimator", ["maxrl", "reinforce_plus_plus_baseline", "opo", "rae", "remax"])
def test_estimators_in_a_run_that_is_resumed(tmp_path, estimator):
    options = {"advantage_estimator": estimator, "length_penalty": 0.5, "save_steps": 2}
    whole = grpo_run(tmp_path / "whole", "digits length", **options)
    grpo.run_grpo(whole)
    grpo.run_grpo(grpo_run(tmp_path / "run", "digits length", max_steps=2, **options))
    resumed = grpo_run(tmp_path / "run", "digits length", **options)
    grpo.run_grpo(resumed, resume=True)
    assert [row["loss"] for row in metrics_of(resumed)] == [row["loss"] for row in metrics_of(whole)]
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("run", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    if estimator == "remax":
        return  # test_remax_compares_with_the_greedy_completion
    lines = [json.loads(line) for line in (tmp_path / "whole" / "completions.jsonl").read_text().splitlines()][:16]
    rewards = np.array([line["reward"] for line in lines])
    lengths = np.array([line["length"] for line in lines])
    expected = advantages_of(estimator, penalised(rewards, lengths, 0.5, 8), 4, lengths, {})
    np.testing.assert_allclose([line["advantage"] for line in lines], expected, atol=1e-6)


def test_a_length_penalty_shortens_what_is_rewarded_alike(tmp_path):
    run = grpo_run(tmp_path / "run", "digits length", rewards={"weights": [1.0, 0.0]}, length_penalty=1.0, max_steps=1)
    (tmp_path / "rewards_for_tests.py").write_text(
        "def digits(completions, **k): return [1.0] * len(completions)\n"
        "def length(completion_ids, **k): return [len(ids) for ids in completion_ids]\n"
    )
    grpo.run_grpo(run)
    lines = completions_of(run)
    assert all(line["reward"] == 1.0 for line in lines)
    lengths = np.array([line["length"] for line in lines]).reshape(4, 4)
    advantages = np.array([line["advantage"] for line in lines]).reshape(4, 4)
    r = -lengths / 8
    expected = (r - r.mean(axis=1, keepdims=True)) / (r.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    np.testing.assert_allclose(advantages, expected, atol=1e-4)
    share = (lengths.std(axis=1) == 0).mean()
    assert metrics_of(run)[0]["frac_reward_zero_std"] == share
    # Groups of unequal lengths teach something: dynamic sampling replaces the others alone.
    dynamic = dataclasses.replace(run.train, dynamic_sampling=True)
    dynamic = dataclasses.replace(run, train=dynamic, output_dir=str(tmp_path / "dynamic"))
    grpo.run_grpo(dynamic)
    groups = np.array([line["length"] for line in completions_of(dynamic)]).reshape(-1, 4)
    differ, (row,) = groups.std(axis=1) > 0, metrics_of(dynamic)
    assert differ.sum() == 4 < len(groups) and row["dynamic_sampling/dropped"] == pytest.approx(1 - 4 / len(groups))
    assert row["frac_reward_zero_std"] == pytest.approx(1 - differ.mean())


def test_remax_by_hand():
    """A group whose greedy completion has no reward has no advantages."""
    baselines = np.repeat([0.25, np.nan], 4)
    assert advantages_of("remax", REWARDS, 4, TOKENS, {}, baselines).tolist() == [0.75, -0.25, -0.25, 0.75, 0, 0, 0, 0]


@pytest.fixture(scope="module")
def greedy_texts():
    """{prompt: the greedy completion} of the model that runs begin with."""
    prompts = [f"what is the number {i}? " for i in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = LLM(MODEL).generate(prompts, params)
    return {prompt: output.completions[0] for prompt, output in zip(prompts, outputs, strict=True)}


@pytest.mark.parametrize("ahead", [None, AsyncConfig(max_staleness=0)])
def test_remax_compares_with_the_greedy_completion(tmp_path, greedy_texts, ahead):
    """It is scored as the others are, and is none of them: neither trained on nor listed."""
    options = {"advantage_estimator": "remax", "length_penalty": 0.5, "max_steps": 1}
    run = dataclasses.replace(grpo_run(tmp_path / "run", "length", **options), asynchronous=ahead)
    grpo.run_grpo(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and len({line["completion"] for line in lines}) > 8
    greedy = [greedy_texts[line["prompt"]] for line in lines]
    lengths, baselines = np.array(
        [(line["length"], len(each.token_ids)) for line, each in zip(lines, greedy, strict=True)]
    ).T
    rewards = np.array([line["reward"] for line in lines])
    # The reward is that of a length.
    expected = penalised(rewards, lengths, 0.5, 8) - penalised(baselines, baselines, 0.5, 8)
    np.testing.assert_allclose([line["advantage"] for line in lines], expected, atol=1e-6)
    (row,) = metrics_of(run)
    assert row["reward_baseline"] == pytest.approx(np.mean(baselines))
    assert row["reward"] == pytest.approx(rewards.mean())
    assert row["sampling/sampling_logp_difference/max"] == 0


def test_remax_needs_completions_of_the_engine(tmp_path):
    run = grpo_run(tmp_path / "run", advantage_estimator="remax")
    with pytest.raises(ConfigError, match="remax draws a greedy completion: not with rollout.func"):
        dataclasses.replace(run, rollout=RolloutConfig(func="module:rollout"))
