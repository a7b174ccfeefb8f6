"""Teachers: the advantage of each token, runs that learn from one or several, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.config import LoraConfig, RewardsConfig, RLOOConfig, TeacherConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, save_model
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_inputs import with_paths
from rlnumba.trainers import grpo, rloo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.rollout import Rollouts
from rlnumba.trainers.teacher import Teachers, gains_of_completions, longest_of_teachers
from tests.close import assert_same_bits
from tests.trainers.runs import MODEL, grpo_config, grpo_run, metrics_of, rloo_run
from tests.trainers.test_grpo import golden_samples
from tests.trainers.test_plan import assert_planned
from tests.trainers.test_resume import FOUR_STEPS_A_GENERATION, hash_of, rows_without_times


def write_teacher(folder, seed, size=0.02):
    """A folder of the golden model with noise of that size on its weights."""
    model, rng = load_model(MODEL), np.random.default_rng(seed)
    model.weights.flat += (size * rng.standard_normal(model.weights.flat.shape)).astype(np.float32)
    save_model(model, folder, Tokenizer.from_folder(MODEL))
    return str(folder)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """{name: folder} of two teachers."""
    folder = tmp_path_factory.mktemp("teachers")
    return {name: write_teacher(folder / name, seed) for seed, name in enumerate(("math", "code"))}


def taught_run(folder, teacher, rewards=False, column=(), **train):
    """A GRPORun with a [teacher], without rewards; column: values of the rows' column `teacher`, in turn."""
    run = grpo_run(folder, **{"num_prompts": 8, "max_steps": 4} | train)
    if column:
        rows = folder.parent / "prompts.jsonl"
        lines = [json.loads(line) for line in rows.read_text().splitlines()]
        lines = [line | {"teacher": column[i % len(column)]} for i, line in enumerate(lines)]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = run.rewards if rewards else RewardsConfig()
    return replace(run, rewards=kept, teacher=TeacherConfig(**teacher))


def test_the_advantage_of_a_token_is_the_log_ratio_of_its_sequences_teacher(teachers):
    policy, samples = Policy(load_model(MODEL), grpo_config(per_device_train_batch_size=2)), golden_samples()
    for index, sample in enumerate(samples):
        sample.advantage, sample.teacher = float(index), index % 2
    models = [load_model(folder) for folder in teachers.values()]
    policy.teachers = Teachers(TeacherConfig(models=teachers, teacher_tau=0.5, adv_tau=2.0), models)
    rollouts = Rollouts.of(samples, False)
    rollouts.rollout_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
    rollouts.loss_mask[:3] = 0
    first, second = (grpo.host_logprobs(policy, model, rollouts.parts(4)) for model in models)
    of_rewards, is_first = rollouts.advantages, np.repeat(rollouts.teachers, rollouts.target_lengths) == 0
    assert is_first.any() and not is_first.all() and np.abs(first - second).min() > 0
    gain = np.where(is_first, first, second) - rollouts.rollout_logprobs
    grpo.add_logprobs(policy, rollouts, on_policy=True)
    assert_same_bits(rollouts.advantages, np.float32(0.5) * gain + np.float32(2.0) * of_rewards)
    assert rollouts.teacher_kl == pytest.approx(-np.mean(gain[3:].astype(np.float64)), rel=1e-6)
    # Of completions of older weights, the policy's own log-probs count.
    rollouts = Rollouts.of(samples, False)
    rollouts.is_stale, rollouts.rollout_logprobs = True, rollouts.rollout_logprobs - 1
    grpo.add_logprobs(policy, rollouts, on_policy=True)
    assert_same_bits(rollouts.advantages, np.float32(0.5) * gain + np.float32(2.0) * of_rewards)


def test_a_completion_of_rloo_has_the_sum_of_its_log_ratios_as_its_reward(teachers):
    """In the order in which the samples are trained on, and without the tokens that are not."""
    policy, samples = Policy(load_model(MODEL), RLOOConfig(beta=0.0, per_device_train_batch_size=2)), golden_samples()
    for index, sample in enumerate(samples):
        sample.teacher = index % 2
    config = TeacherConfig(models=teachers, teacher_tau=0.5, adv_tau=2.0)
    policy.teachers = Teachers(config, [load_model(folder) for folder in teachers.values()])
    rollouts = Rollouts.of(samples, False)
    rollouts.rollout_logprobs = grpo.host_logprobs(policy, policy.model, rollouts.parts(4))
    rollouts.loss_mask[:3] = 0
    scores = [grpo.host_logprobs(policy, model, rollouts.parts(4)) for model in policy.teachers.models]
    ends, expected = np.cumsum(rollouts.target_lengths), []
    for index, (begin, end) in enumerate(zip(ends - rollouts.target_lengths, ends, strict=True)):
        gain = scores[index % 2][begin:end] - rollouts.rollout_logprobs[begin:end]
        expected.append(np.dot(gain.astype(np.float64), rollouts.loss_mask[begin:end]))
    gains = gains_of_completions(policy, rollouts)
    np.testing.assert_allclose(gains, expected, rtol=1e-6)
    assert rollouts.teacher_kl == pytest.approx(-np.sum(expected) / rollouts.num_active)
    rewards, kl = np.arange(len(samples), dtype=float), np.ones(len(samples))
    train = RLOOConfig(beta=0.1, reward_clip_range=[0.0, 2.0])
    found = rloo.completion_rewards(rewards, kl, train, config, gains)
    np.testing.assert_allclose(found, 2.0 * np.minimum(rewards, 2.0) + 0.5 * gains - 0.1)
    alone = rloo.completion_rewards(np.full(len(samples), np.nan), kl, train, replace(config, adv_tau=0.0), gains)
    np.testing.assert_allclose(alone, 0.5 * gains - 0.1)


def test_a_policy_of_rloo_comes_nearer_to_its_teacher(tmp_path):
    teacher = TeacherConfig(model=write_teacher(tmp_path / "far", 0, 0.06))
    run = rloo_run(tmp_path / "run", max_steps=12, beta=0.0, num_generations=8, learning_rate=4e-3)
    run = replace(run, rewards=RewardsConfig(), teacher=teacher)
    run_rloo(run)
    kl = [row["teacher_kl"] for row in metrics_of(run)]
    assert np.mean(kl[-3:]) < 0.8 * np.mean(kl[:3]), kl


def test_a_policy_comes_nearer_to_its_teacher(tmp_path):
    teacher = write_teacher(tmp_path / "far", 0, 0.06)
    run = taught_run(tmp_path / "run", {"model": teacher}, max_steps=8)
    run_grpo(run)
    rows = metrics_of(run)
    # At a ratio of 1 the loss is minus the mean advantage.
    np.testing.assert_allclose([row["loss"] for row in rows], [row["teacher_kl"] for row in rows], rtol=1e-5)
    first, last = rows[0]["teacher_kl"], np.mean([row["teacher_kl"] for row in rows[-3:]])
    assert first > 0.5 and last < 0.5 * first, (first, last)


def test_a_run_with_several_teachers_goes_on_with_the_same_bits(tmp_path, teachers, capsys):
    settings = FOUR_STEPS_A_GENERATION | {"save_steps": 3, "max_steps": 6, "num_prompts": 16}
    kept = {"models": teachers, "adv_tau": 1.0}
    run = taught_run(tmp_path / "run", kept, rewards=True, column=("math", "code"), **settings)
    run_grpo(run)
    expected, rows = hash_of(run), rows_without_times(run)
    assert all(row["teacher_kl"] > 0 and row["reward"] >= 0 for row in rows)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    run_grpo(run, resume=True)
    assert hash_of(run) == expected and rows_without_times(run) == rows
    # What a teacher reads is compared, not its name.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    others = kept | {"models": teachers | {"code": write_teacher(tmp_path / "other", 7)}}
    with pytest.raises(ConfigError, match=r"teacher\.models.*this cannot change on --resume"):
        run_grpo(replace(run, teacher=TeacherConfig(**others)), resume=True)
    capsys.readouterr()
    run_grpo(replace(run, teacher=TeacherConfig()), resume=True)
    assert "[teacher] is gone from step 4" in capsys.readouterr().err


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["whole", "adapter"])
def test_a_run_with_teachers_takes_what_was_planned(tmp_path, teachers, lora):
    options = {"column": ("math", "code"), "max_steps": 2, "share_prefixes": "never"}
    run = taught_run(tmp_path / "run", {"models": teachers}, **options)
    assert_planned(replace(run, lora=lora), run_grpo)


def test_the_paths_of_teachers_are_changed_as_those_of_other_inputs(tmp_path):
    one = taught_run(tmp_path / "run", {"model": "a"})
    assert with_paths(one, lambda path: f"new/{path}").teacher.model == "new/a"
    several = taught_run(tmp_path / "run", {"models": {"math": "a", "code": "b"}})
    assert with_paths(several, lambda path: f"new/{path}").teacher.models == {"math": "new/a", "code": "new/b"}


def test_what_is_refused(tmp_path, teachers):
    with pytest.raises(ConfigError, match=r"teacher\.model and teacher\.models cannot both be set"):
        TeacherConfig(model="a", models=teachers)
    with pytest.raises(ConfigError, match=r"teacher\.models: math must be a folder or a hub id, got 3"):
        TeacherConfig(models={"math": 3})
    with pytest.raises(ConfigError, match=r"rewards\.funcs must name at least one reward function"):
        taught_run(tmp_path / "run", {"model": teachers["math"], "adv_tau": 1.0})
    with pytest.raises(ConfigError, match=r"train\.dynamic_sampling compares rewards, which teacher\.adv_tau 0"):
        taught_run(tmp_path / "run", {"model": teachers["math"]}, dynamic_sampling=True)
    other, lost = tmp_path / "other", tmp_path / "lost"
    other.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, other / name)
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())
    token = next(token for token, index in vocabulary["model"]["vocab"].items() if index == 5)
    vocabulary["model"]["vocab"][token + "?"] = vocabulary["model"]["vocab"].pop(token)
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    few = tmp_path / "few"
    shutil.copytree(other, few)
    shutil.copy(MODEL / "tokenizer.json", few / "tokenizer.json")
    config = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    cases = {
        str(lost): "no such",
        str(
            other
        ): rf"teacher\.model: {other} has another tokenizer than .*: .* is (5|no id) there, and (5|no id) here",
        str(few): rf"teacher\.model: {few} has 20 tokens, and .* has {config['vocab_size']}",
    }
    for folder, message in cases.items():
        run = taught_run(tmp_path / "run", {"model": folder})
        with pytest.raises(UserError, match=message):
            run_grpo(run)
    run = taught_run(tmp_path / "run", {"models": teachers}, column=("math", "physics"))
    with pytest.raises(UserError, match=r"prompts\.jsonl.*2: the column 'teacher' must name one of .*, got 'physics'"):
        run_grpo(run)


@pytest.mark.parametrize("spare", [0, 1])
def test_a_teacher_of_fewer_positions(tmp_path, spare):
    """It takes sequences of as many tokens as it has positions. With one less the run ends before anything is drawn."""
    run = taught_run(tmp_path / "run", {"model": str(tmp_path / "short")}, max_steps=1)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_folder(MODEL)
    lengths = [len(tokenizer.encode(row["prompt"])) for row in rows]
    longest = max(lengths) + run.train.max_completion_length
    shutil.copytree(MODEL, tmp_path / "short")
    config = json.loads((MODEL / "config.json").read_text())
    config["max_position_embeddings"] = longest - 1 + spare
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    run = replace(run, engine=replace(run.engine, max_model_len=longest + 2))
    if spare:
        run_grpo(run)
        return
    where = f"prompts.jsonl:{lengths.index(max(lengths)) + 1}"
    message = rf"{where}: prompt and completion may have {longest} tokens, and teacher\.model takes {longest - 1}: "
    with pytest.raises(UserError, match=message):
        run_grpo(run)
    # A server is asked for a token after the sequence.
    served = TeacherConfig(model=str(tmp_path / "short"), url="http://127.0.0.1:1/v1")
    assert longest_of_teachers(served) == [longest - 2]
