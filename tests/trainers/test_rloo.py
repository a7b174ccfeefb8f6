"""RLOO against runs of TRL's own trainer, its invariants, and runs of a few seconds."""

import json
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

import rlnumba
from rlnumba import cli
from rlnumba.config import DataConfig, RewardsConfig, RLOOConfig, RLOORun, load_run
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError
from rlnumba.model.transformer import load_model
from rlnumba.rewards import TrainingProgress
from rlnumba.runs import prompt_loop
from rlnumba.runs.policy import Policy
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.run_folder import Clock
from rlnumba.runtime import device
from rlnumba.sampling.generations import Generations
from rlnumba.sampling.samples import Generation, Sample
from rlnumba.trainers import grpo, rloo
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_close, assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, SMALL_GRPO, golden, metrics_of, metrics_until, rloo_run
from tests.trainers.test_grpo import golden_samples
from tests.trainers.test_resume import FOUR_STEPS_A_GENERATION, check_killed_run, hash_of, rows_without_times

CURVES = golden("rloo_curves.json")


def reward_of(ids):
    """As in make_rloo_golden.py."""
    return np.nan if ids[0] == 16 else sum(3 <= i < 13 for i in ids) / len(ids)


def recorded(completion_ids):
    """A Generations.take that gives the recorded completions in their order, with log-probs of 0."""
    left = iter(completion_ids)

    def take(generations, trainer_state, clock):
        groups, train = [], generations.run.train
        chosen = generations.order.take(train.prompts_per_rollout)
        clock.seconds["time/generate"] += 1.0
        for index in chosen:
            prompt, ids_of_group = generations.prompts.prompts[index], islice(left, train.num_generations)
            completions = [Completion(ids, [0.0] * len(ids), "stop", "") for ids in ids_of_group]
            values = [reward_of(completion.token_ids) for completion in completions]
            of_samples = zip(completions, values, strict=True)
            groups.append([Sample(prompt, c, np.array([v]), v, {}) for c, v in of_samples])
        return chosen, Generation(groups)

    return take


def without_exact_sampler(monkeypatch, exact=False):
    """Let the old log-probs come from a forward, and the gradient follow from the step's own, or neither of both."""
    for module in (grpo, rloo):
        monkeypatch.setattr(module, "sampler_is_exact", lambda train: exact)


@pytest.mark.parametrize("case", CURVES["cases"])
def test_golden_run_of_trl(tmp_path, monkeypatch, case):
    recording = CURVES["cases"][case]
    # The completions are another sampler's: old log-probs come from a forward, as in TRL.
    without_exact_sampler(monkeypatch)
    monkeypatch.setattr(Generations, "take", recorded(recording["completion_ids"]))
    monkeypatch.setattr(prompt_loop, "sample_report", lambda *arguments: "")
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in CURVES["prompts"]))
    run = RLOORun(
        model=str(MODEL),
        output_dir=str(tmp_path / "run"),
        data=DataConfig(train=str(rows)),
        rewards=RewardsConfig(funcs=["think_format_reward"]),
        train=RLOOConfig(**recording["options"]),
    )
    rloo.run_rloo(run)
    for step, (got, want) in enumerate(zip(metrics_of(run), recording["curve"], strict=True)):
        for name, value in want.items():
            # A loss is a mean of terms of size 0.1 that may cancel.
            absolute = 1e-6 if name in ("loss", "kl") else 1e-9
            assert got[name] == pytest.approx(value, rel=1e-4, abs=absolute), (step, name)
    if case == "default":
        assert len(recording["curve"]) == 50
        wanted = np.load(GOLDEN / "rloo_weights.npz")
        first, last = (dict(load_model(path).weights.tensors()) for path in (MODEL, tmp_path / "run" / "final"))
        for name in wanted.files:
            before, after = (device.to_host(tensors[name]).astype(np.float64) for tensors in (first, last))
            moved = np.linalg.norm(wanted[name] - before)
            assert moved > 0 and np.linalg.norm(after - wanted[name]) < 2e-3 * moved, name


# --- rewards and advantages -------------------------------------------------------------------------------------------


def test_advantages_computed_by_hand():
    train = RLOOConfig(num_generations=4, per_device_train_batch_size=4, beta=0.5, reward_clip_range=[0.0, 1.0])
    rewards = rloo.completion_rewards([3.0, -1.0, 0.5, np.nan], np.array([0.2, -0.4, 0.0, 9.0]), train)
    # Clipped to [0, 1] before the KL is taken off.
    np.testing.assert_allclose(rewards, [0.9, 0.2, 0.5, np.nan])
    # Each less the mean of the other two; without a reward there is none.
    assert_close(rloo.leave_one_out(rewards, train), [0.9 - 0.35, 0.2 - 0.7, 0.5 - 0.55, 0.0], terms=4)


def test_normalized_advantages_leave_out_what_has_no_reward():
    train = RLOOConfig(num_generations=2, per_device_train_batch_size=6, normalize_advantages=True)
    # The second group has one reward only, so that nothing is learned from it.
    advantages = rloo.leave_one_out(np.array([1.0, 0.0, 5.0, np.nan, 3.0, 1.0]), train)
    kept = np.array([1.0, -1.0, 2.0, -2.0])
    scaled = kept / (kept.std(ddof=1) + 1e-4)
    assert_close(advantages, [scaled[0], scaled[1], 0.0, 0.0, scaled[2], scaled[3]], terms=6)
    assert not rloo.leave_one_out(np.full(6, np.nan), train).any()


def small_policy(reference=False, **options):
    train = RLOOConfig(**SMALL_GRPO | {"per_device_train_batch_size": 4} | options)
    return Policy(load_model(MODEL), train, load_model(MODEL) if reference else None, train.temperature)


def test_the_kl_of_a_completion_is_the_sum_over_its_trained_tokens():
    policy, rollouts = small_policy(reference=True), Rollouts.of(golden_samples(), False)
    rollouts.loss_mask[:5] = 0
    kl = rloo.add_logprobs(policy, rollouts)
    # The reference is the policy still; the sampler's log-probs stand for the old ones.
    reference = grpo.host_logprobs(policy, policy.model, rollouts.parts(8))
    assert_same_bits(rollouts.ref_logprobs, reference)
    difference = (rollouts.rollout_logprobs.astype(np.float64) - reference) * rollouts.loss_mask
    ends = np.cumsum(rollouts.completion_lengths)
    assert_close(kl, [part.sum() for part in np.split(difference, ends[:-1])], "float32", terms=16)
    assert kl[0] == 0.0 and np.abs(kl[1:]).min() > 0
    assert not rloo.add_logprobs(small_policy(), rollouts).any()


def test_the_gradient_at_the_samplers_logprobs_is_the_forwards(monkeypatch):
    """On-policy, known beforehand or not, it has the same bits; so have all metrics."""
    found = []
    for exact in (True, False):
        without_exact_sampler(monkeypatch, exact)
        policy, rollouts = small_policy(temperature=0.7), Rollouts.of(golden_samples(), False)
        rollouts.loss_mask[3:5] = 0
        rollouts.rollout_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
        metrics = rloo.train_step(policy, rollouts.parts(4, on_policy=True), 1e-3)
        assert metrics["sampling/sampling_logp_difference/max"] == 0.0 and metrics["grad_norm"] > 0
        found.append((metrics, policy.model.weights.flat))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1])


def test_gradient_does_not_depend_on_the_micro_batch_split():
    gradients = []
    for size, limit in ((8, None), (4, None), (1, None), (4, 60), (8, 1)):
        policy = small_policy(max_tokens_per_micro_batch=limit)
        metrics = rloo.train_step(policy, Rollouts.of(golden_samples(), False).parts(size), 0.0)
        gradients.append((metrics["loss"], device.to_host(policy.grads.flat).copy()))
    scale = np.abs(gradients[0][1]).max()
    for loss, gradient in gradients[1:]:
        assert loss == pytest.approx(gradients[0][0], rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(gradient, gradients[0][1], atol=1e-5 * scale)


def test_truncated_completions_are_left_out_where_asked():
    samples, gradients = golden_samples(), []
    samples[2].completion.finish_reason = "length"
    for chosen, share in ((samples, 1), (samples[:2] + samples[3:], 7 / 8)):
        policy = small_policy(max_grad_norm=0.0)
        rloo.train_step(policy, Rollouts.of(chosen, True).parts(8), 0.0)
        gradients.append(share * device.to_host(policy.grads.flat).astype(np.float64))
    # The mean over completions counts it as one of gradient 0.
    assert_close(gradients[0], gradients[1], "float32", terms=80, what="gradient")


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_metrics_and_completions(tmp_path):
    run = rloo_run(
        tmp_path / "run", max_steps=3, beta=0.1, eval_steps=2, data={"eval": str(tmp_path / "prompts.jsonl")}
    )
    rloo.run_rloo(run)
    rows = metrics_of(run)
    wanted = """loss grad_norm learning_rate epoch step_time num_tokens reward reward_std rewards/digits/mean
        rewards/digits/std frac_reward_zero_std kl entropy completions/mean_length completions/clipped_ratio
        clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max clip_ratio/region_mean
        sampling/sampling_logp_difference/max time/generate time/reward time/logprob time/train""".split()
    for row in rows:
        assert set(wanted) <= row.keys(), set(wanted) - row.keys()
        assert row["sampling/sampling_logp_difference/max"] == 0.0
        assert row["epoch"] == row["step"] / 2
    assert [row["step"] for row in rows if "eval_reward" in row] == [2, 3]
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["step"] == 1]
    rewards, advantages = (np.array([line[name] for line in first]) for name in ("reward", "advantage"))
    # Without a KL yet, the difference of a prompt's two rewards.
    pairs = rewards.reshape(-1, 2)
    np.testing.assert_allclose(advantages.reshape(-1, 2), pairs - pairs[:, ::-1], atol=1e-6)
    assert advantages.any()


def test_several_steps_on_one_generation_with_filters(tmp_path):
    """Old log-probs are recomputed, because the sampler's are of other probabilities."""
    settings = {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1, "max_steps": 4}
    run = rloo_run(tmp_path / "run", **settings, top_k=8)
    rloo.run_rloo(run)
    rows = metrics_of(run)
    assert rows[0]["clip_ratio/region_mean"] == 0.0 < rows[3]["clip_ratio/region_mean"]
    assert rows[0]["sampling/sampling_logp_difference/mean"] > 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 1}, "train.num_generations must be at least 2, got 1"),
        ({"reward_clip_range": [1.0]}, r"train.reward_clip_range must be \[lowest, highest\], got \[1.0\]"),
        ({"reward_clip_range": [1.0, 1.0]}, r"train.reward_clip_range must be \[lowest, highest\]"),
        ({"beta": 0.0, "sync_ref_model": True}, "train.sync_ref_model needs train.beta above 0"),
    ],
)
def test_bad_values_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        RLOOConfig(**SMALL_GRPO | options)


def test_defaults_are_trls():
    train = RLOOConfig()
    assert (train.num_generations, train.beta, train.epsilon, train.num_iterations) == (2, 0.05, 0.2, 1)
    assert (train.normalize_advantages, train.reward_clip_range, train.learning_rate) == (False, None, 1e-6)
    assert (train.max_completion_length, train.temperature, train.policy_loss.clip_high) == (512, 1.0, 0.2)


def test_a_generation_is_shuffled_by_its_place(monkeypatch):
    """Rewards, KLs and advantages stay those of their completion."""
    policy = small_policy(reference=True, num_generations=2)
    ids = [[20 + i, 1] for i in range(16)]
    without_exact_sampler(monkeypatch)
    prompts = SimpleNamespace(prompts=[sample.prompt for sample in golden_samples()])
    run, order = SimpleNamespace(train=policy.train, seed=3), PromptOrder(16, False, 0)
    generations = SimpleNamespace(run=run, order=order, prompts=prompts, metrics={})
    generations.take = partial(recorded(ids), generations)
    rollouts, generation, metrics = rloo.generate(policy, generations, TrainingProgress(7, 9, 0.5), 2, True, Clock())
    advantage_of = {sample.completion.token_ids[0]: sample.advantage for sample in generation.samples}
    ends = np.cumsum(rollouts.prompt_lengths + rollouts.completion_lengths)
    trained = rollouts.token_ids[ends - 2].tolist()
    assert sorted(trained) == [20 + i for i in range(len(trained))] and trained != sorted(trained)
    assert [advantage_of[token] for token in trained] == rollouts.advantages[::2].tolist()
    assert metrics["kl"] == 0.0


# --- resumption, command line, Python ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="times its kills for the cpu device")
def test_killed_runs_end_with_the_same_weights(tmp_path):
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 7}
    run = rloo_run(tmp_path / "killed", **FOUR_STEPS_A_GENERATION, max_steps=24, save_steps=3, **moving)
    check_killed_run("rloo", rloo.run_rloo, run, (8,))


def test_a_checkpoint_inside_a_generation_leads_to_the_same_end(tmp_path):
    run = rloo_run(tmp_path / "run", **FOUR_STEPS_A_GENERATION, max_steps=6, save_steps=1)
    rloo.run_rloo(run)
    expected, rows = hash_of(run), rows_without_times(run)
    for step in (2, 4, 5):
        rloo.run_rloo(run, resume=step)
        assert hash_of(run) == expected and rows_without_times(run) == rows, step


def test_the_python_trainer_runs_what_the_command_line_runs(tmp_path):
    args = rlnumba.RLOOConfig(output_dir=str(tmp_path / "python"), seed=7, **SMALL_GRPO | {"max_steps": 2})
    rows = [{"prompt": f"what is the number {i}? "} for i in range(16)]

    def digits(completions, **columns):
        return [sum(c in "0123456789" for c in text) for text in completions]

    rlnumba.RLOOTrainer(MODEL, digits, args, rows).train()
    assert len(metrics_of(SimpleNamespace(output_dir=tmp_path / "python"))) == 2
    # The command line runs the file that it writes, once the function has a name there.
    (tmp_path / "reward.py").write_text(
        "def digits(completions, **columns):\n"
        "    return [sum(c in '0123456789' for c in text) for text in completions]\n"
    )
    config = str(tmp_path / "python" / "config.toml")
    reward = ["--rewards.funcs", f"{tmp_path}/reward.py:digits"]
    assert cli.run(["rloo", "--config", config, "--output_dir", str(tmp_path / "file"), *reward]) == 0
    written = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("python", "file")]
    assert written[0] == written[1]


def test_a_wrong_key_is_one_line_with_the_exit_code_of_configuration(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t"\n[rewards]\nfuncs = ["f"]\n[train]\nbetas = 1\n'
    )
    assert cli.run(["rloo", "--config", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"rlnumba: {file}: unknown key train.betas; did you mean train.beta?"
    ]


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="the example is for machines without a GPU")
def test_example(tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN.parents[1])
    run = load_run("rloo", "examples/rloo.toml", [("output_dir", str(tmp_path / "run"))])
    rows = metrics_until(0.9, rloo.run_rloo, run)
    reward = [row["reward"] for row in rows]
    assert np.mean(reward[:5]) < 0.45 and np.mean(reward[-5:]) > 0.9
    assert rows[0]["kl"] == 0.0 < rows[-1]["kl"]
