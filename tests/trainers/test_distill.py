"""Distillation: loss and gradient of a step, runs with a teacher and with the model as its own, and what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, DistillConfig, LoraConfig, RewardsConfig, TeacherConfig
from rlnumba.config.sections.agents import ToolsConfig
from rlnumba.engine.sequence import Completion
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.logprob.divergence import divergence_ref
from rlnumba.kernels.logprob.top_k_divergence import top_k_divergence_ref
from rlnumba.model.transformer import load_model
from rlnumba.reporting import stderr
from rlnumba.runs.micro_batch import TargetBatch
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers import distill
from rlnumba.trainers.distill import run_distill
from rlnumba.trainers.rollout import Rollouts
from rlnumba.trainers.served_teacher import ServedTeacher, UnaskedTeacher
from rlnumba.trainers.teacher import Teachers
from tests.close import assert_same_bits
from tests.parallel import in_threads
from tests.trainers.runs import MODEL, SMALL_DISTILL, distill_run, metrics_of, with_column, with_completions
from tests.trainers.test_grpo import golden_samples
from tests.trainers.test_plan import assert_planned
from tests.trainers.test_resume import FOUR_STEPS_A_GENERATION, hash_of, rows_without_times
from tests.trainers.test_teacher import write_teacher


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The folder of a teacher."""
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", 0, 0.06)


def policy_of(teacher, **options):
    train = DistillConfig(**SMALL_DISTILL | {"max_grad_norm": 0.0, "per_device_train_batch_size": 2} | options)
    policy = Policy(load_model(MODEL), train, temperature=train.temperature)
    policy.teachers = Teachers(TeacherConfig(model=str(teacher)), [load_model(teacher)])
    return policy


def logits_of(policy, model, rollouts):
    """(T, V) float64: a model's logits for the targets of Rollouts."""
    batch = TargetBatch.of(rollouts.token_ids, rollouts.row_lengths, rollouts.targets)
    with policy.scope():
        hidden = device.to_host(policy.hidden_rows(model, batch)).astype(np.float64)
    return hidden @ device.to_host(model.lm_head).astype(np.float64).T


@pytest.mark.parametrize(
    "beta, top_k, add_tail",
    [(0.0, 0, True), (0.3, 0, True), (1.0, 0, True), (0.0, 4, True), (0.0, 4, False), (0.5, 4, True), (1.0, 4, True)],
)
def test_loss_and_gradient_of_a_step(teacher, beta, top_k, add_tail):
    """The loss is the mean divergence of the trained tokens, and the gradient its derivative, along itself.

    The student's likeliest tokens are not constant along it, so top_k is the teacher's here.
    """
    of_tokens = {"loss_top_k": top_k, "loss_add_tail": add_tail}
    of_tokens |= {} if beta == 0 else {"loss_top_k_of": "teacher"}
    policy = policy_of(teacher, beta=beta, temperature=0.8, **of_tokens if top_k else {})
    rollouts = Rollouts.of(golden_samples(), False)
    rollouts.loss_mask[:3] = 0

    def expected():
        student, taught = (logits_of(policy, m, rollouts) for m in (policy.model, policy.teachers.models[0]))
        form = 0.8, beta, top_k, add_tail, True
        found = top_k_divergence_ref(student, taught, *form) if top_k else divergence_ref(student, taught, 0.8, beta)
        return np.mean(found[0][3:])

    gradients = []
    policy.before_update.append(lambda: gradients.append(device.to_host(policy.grads.flat).copy()))
    metrics = distill.train_step(policy, rollouts.parts(2), 0.0)
    assert metrics["loss"] == pytest.approx(expected(), rel=1e-5)
    (gradient,) = gradients
    assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    weights, values = policy.model.weights.flat, []
    start, step = weights.copy(), 1e-3 / np.linalg.norm(gradient)
    for sign in (1, -1):
        weights[...] = start + np.float32(sign * step) * gradient
        values.append(expected())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(np.sum(gradient.astype(np.float64) ** 2), rel=1e-2)


def test_each_completion_learns_from_its_own_teacher(teacher):
    """In one micro-batch or in several; the gradient is that of the two parts by themselves."""
    found = []
    for chosen, size in (([0, 1, 1, 0], 4), ([0, 1, 1, 0], 1), ([0, 0, 0, 0], 4), ([1, 1, 1, 1], 4)):
        policy, rollouts = policy_of(teacher, beta=0.5), Rollouts.of(golden_samples()[:4], False)
        policy.teachers = Teachers(
            TeacherConfig(models={"a": teacher, "b": str(MODEL)}), [load_model(teacher), load_model(MODEL)]
        )
        rollouts.teachers = np.array(chosen, np.int32)
        gradients, owner = [], np.repeat(np.arange(4), rollouts.target_lengths)
        policy.before_update.append(
            lambda policy=policy, gradients=gradients: gradients.append(device.to_host(policy.grads.flat).copy())
        )
        metrics = distill.train_step(policy, rollouts.parts(size), 0.0)
        student, taught = (logits_of(policy, m, rollouts) for m in (policy.model, policy.teachers.models[0]))
        own = divergence_ref(student, taught, 1.0, 0.5)[0] * (rollouts.teachers[owner] == 0)
        # The student itself is the other teacher.
        assert metrics["loss"] == pytest.approx(np.mean(own), rel=1e-5, abs=1e-6)
        found.append(gradients[0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5 * np.abs(found[0]).max())
    assert np.linalg.norm(found[0]) < 0.9 * np.linalg.norm(found[2]) and np.abs(found[3]).max() < 1e-6


def test_a_run_with_two_teachers_has_the_weights_of_one_rank_and_goes_on(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(stderr, "_is_silent", False)
    keys = {"global_batch_size": 8, "per_device_train_batch_size": 4, "max_steps": 2, "save_steps": 1}
    keys["gradient_accumulation_steps"] = 1
    run = distill_run(tmp_path / "one", {"models": {"a": teacher, "b": str(MODEL)}}, **keys)
    run = with_column(run, "teacher", lambda row: "ab"[int(row["answer"]) % 2])
    run_distill(run)
    expected = hash_of(run)
    both = replace(run, output_dir=str(tmp_path / "two"), deploy=replace(run.deploy, num_train_gpus=2))
    in_threads.run(lambda communicator: run_distill(both.resolved(), communicator=communicator), 2)
    assert hash_of(both) == expected
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-2")
    run_distill(run, resume=True)
    assert hash_of(run) == expected


def test_a_teacher_that_is_the_student_teaches_nothing():
    policy, rollouts = policy_of(MODEL, beta=0.5), Rollouts.of(golden_samples(), False)
    before = policy.model.weights.flat.copy()
    assert distill.train_step(policy, rollouts.parts(2), 0.0)["loss"] == pytest.approx(0.0, abs=1e-6)
    assert_same_bits(policy.model.weights.flat, before)


def test_a_student_comes_nearer_to_its_teacher(tmp_path, teacher):
    run = distill_run(tmp_path / "run", {"model": teacher}, max_steps=6)
    run_distill(run)
    losses = [row["loss"] for row in metrics_of(run)]
    assert losses[0] > 0.5 and losses[-1] < 0.4 * losses[0], losses


def test_completions_of_older_weights_need_no_correction(tmp_path, teacher):
    run = distill_run(tmp_path / "run", {"model": teacher}, max_steps=4)
    run_distill(replace(run, asynchronous=AsyncConfig(max_staleness=1)))
    rows = metrics_of(run)
    assert max(row["off_policy/max"] for row in rows) == 1
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]


def with_demonstrations(run):
    """The run's rows with the column `shown`: the prompt after a demonstration."""
    return with_column(run, "shown", lambda row: f"7777777 {row['prompt']}")


def completions_of(run):
    with open(f"{run.output_dir}/completions.jsonl") as file:
        return [json.loads(line) for line in file]


def test_completions_of_the_rows_take_the_place_of_some(tmp_path, teacher):
    """The others are those that a run without any draws; rewards and lengths are of drawn completions."""
    settings = {"max_steps": 1, "num_prompts": 32, "per_device_train_batch_size": 16}
    drawn, mixed, given = (
        with_completions(
            distill_run(tmp_path / str(lmbda), {"model": teacher}, lmbda=lmbda, **settings, reward="digits")
        )
        for lmbda in (1.0, 0.5, 0.0)
    )
    for run in (drawn, mixed, given):
        run_distill(run)
    expected, found = completions_of(drawn), completions_of(mixed)
    kinds = [row["finish_reason"] for row in found]
    assert 8 <= kinds.count("given") <= 24
    for own, other in zip(found, expected, strict=True):
        if own["finish_reason"] == "given":
            number = own["prompt"].split()[-1][:-1]
            assert own["completion"] == f"is {number}" and own["reward"] is None
        else:
            assert own == other | {"advantage": own["advantage"]}
    row = metrics_of(mixed)[0]
    kept = [own for own in found if own["finish_reason"] != "given"]
    assert row["completions/given_frac"] == kinds.count("given") / 32
    assert row["reward"] == pytest.approx(np.mean([own["reward"] for own in kept]))
    assert all(own["finish_reason"] == "given" for own in completions_of(given))
    assert metrics_of(given)[0]["completions/given_frac"] == 1
    assert hash_of(given) != hash_of(mixed) != hash_of(drawn)


@pytest.mark.parametrize("has_async", [False, True])
def test_a_run_on_completions_of_the_rows_goes_on_with_the_same_bits(tmp_path, teacher, has_async):
    settings = FOUR_STEPS_A_GENERATION | {"save_steps": 3, "max_steps": 6, "lmbda": 0.5}
    run = with_completions(distill_run(tmp_path / "run", {"model": teacher}, **settings))
    run = replace(run, asynchronous=AsyncConfig(max_staleness=0)) if has_async else run
    run_distill(run)
    expected = hash_of(run)
    assert 0 < sum(row["finish_reason"] == "given" for row in completions_of(run)) < len(completions_of(run))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    run_distill(run, resume=True)
    assert hash_of(run) == expected


def test_self_distillation_goes_on_with_the_same_bits(tmp_path):
    """The teacher is the moving average of the policy, with a demonstration in its context."""
    settings = FOUR_STEPS_A_GENERATION | {"save_steps": 3, "max_steps": 6, "sync_ref_model": True}
    settings |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.05, "gradient_accumulation_steps": 1}
    run = with_demonstrations(distill_run(tmp_path / "run", {"prompt_column": "shown"}, **settings))
    run_distill(run)
    expected, rows = hash_of(run), rows_without_times(run)
    assert rows[0]["loss"] > 1e-3 and rows[-1]["loss"] < rows[0]["loss"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    run_distill(run, resume=True)
    assert hash_of(run) == expected and rows_without_times(run) == rows


def test_the_teacher_sees_its_own_prompt():
    samples = golden_samples()
    for index, sample in enumerate(samples):
        sample.teacher_prompt = list(range(3, 5 + index))
    rollouts = Rollouts.of(samples, False)
    parts = rollouts.ordered([2, 0]).parts(1)
    own = Rollouts.joined(parts).with_teacher_prompts()
    assert own.prompt_lengths.tolist() == [4, 2]
    both = [np.concatenate([samples[i].teacher_prompt, samples[i].completion.token_ids]) for i in (2, 0)]
    assert own.token_ids.tolist() == np.concatenate(both).tolist()
    wanted = Rollouts.joined(parts)
    assert own.token_ids[own.targets].tolist() == wanted.token_ids[wanted.targets].tolist()
    assert own.row_lengths.tolist() == [len(ids) for ids in both]
    assert isinstance(samples[0].completion, Completion)


@pytest.mark.parametrize("own", [False, True], ids=["teacher", "adapter and itself"])
def test_a_run_takes_what_was_planned(tmp_path, teacher, own):
    run = distill_run(tmp_path / "run", {"prompt_column": "shown"} if own else {"model": teacher}, max_steps=2)
    run = with_demonstrations(replace(run, lora=LoraConfig(r=4))) if own else run
    assert_planned(run, run_distill)


def test_a_run_with_a_served_teacher_takes_what_was_planned(tmp_path, teacher, monkeypatch):
    """No weights of it, and the tokens that it lists."""
    monkeypatch.setattr(ServedTeacher, "start", lambda *_: None)
    monkeypatch.setattr(ServedTeacher, "listings", UnaskedTeacher().listings)
    settings = {"loss_top_k": 20, "loss_top_k_of": "teacher", "max_steps": 2}
    assert_planned(distill_run(tmp_path / "run", {"model": teacher, "url": "http://a/v1"}, **settings), run_distill)


def test_what_is_refused(tmp_path, teacher):
    folder = tmp_path / "run"
    cases = [
        ({}, {}, r"teacher\.model.*or teacher\.prompt_column"),
        ({"models": {"a": teacher}}, {"sync_ref_model": True}, r"train\.sync_ref_model moves the model's own copy"),
        ({"model": teacher, "adv_tau": 1.0}, {}, r"teacher\.adv_tau is a key of grpo and rloo, not of distill"),
        ({"model": teacher}, {"sync_ref_model": True}, r"train\.sync_ref_model moves the model's own copy"),
        ({"model": teacher}, {"vllm_structured_outputs_regex": "a"}, r"train\.structured_outputs: the divergence"),
        ({"model": teacher}, {"log_token_values": 1}, r"train\.log_token_values has importance ratios"),
        ({"model": teacher}, {"lmbda": 0.5, "num_generations": 2}, r"train\.lmbda \(0\.5\) below 1 .* 1, got 2"),
        ({"model": teacher}, {"lmbda": -1.0}, r"train\.lmbda must be at least 0 and at most 1, got -1"),
        ({"model": teacher}, {"beta": 1.5}, r"train\.beta must be at least 0 and at most 1, got 1\.5"),
    ]
    for keys, train, message in cases:
        with pytest.raises(ConfigError, match=message):
            distill_run(folder, keys, **train)
    with pytest.raises(ConfigError, match=r"train\.loss_top_k \(999\) is more than the \d+ tokens of"):
        run_distill(distill_run(folder, {"model": teacher}, loss_top_k=999))
    run = distill_run(folder, {"model": teacher}, lmbda=0.0)
    with pytest.raises(ConfigError, match=r"train\.lmbda below 1 takes completions of rows: not with tools"):
        replace(run, tools=ToolsConfig(funcs=["a.py:f"]), rewards=RewardsConfig())
    with pytest.raises(UserError, match=r"prompts\.jsonl:1: no 'completion'; its columns are prompt, answer"):
        run_distill(run)
    for value, message in (
        (3, "'completion' must be a string, got"),
        ([{"role": "a"}], "is a string, and 'completion'"),
    ):
        with pytest.raises(UserError, match=rf"completion\.jsonl:1: .*{message}"):
            run_distill(with_column(run, "completion", lambda row, value=value: value))
    run = distill_run(folder, {"models": {"a": teacher, "b": teacher}})
    with pytest.raises(UserError, match=r"the column 'teacher' must name one of teacher\.models \(a, b\), got None"):
        run_distill(run)
    run = distill_run(folder, {"prompt_column": "shown"})
    with pytest.raises(ConfigError, match=r"teacher\.prompt_column is for completions of one turn"):
        replace(run, tools=ToolsConfig(funcs=["a.py:f"]), rewards=RewardsConfig())
    with pytest.raises(
        UserError, match=r"prompts\.jsonl:1: the row has no 'shown', which teacher\.prompt_column names"
    ):
        run_distill(run)
