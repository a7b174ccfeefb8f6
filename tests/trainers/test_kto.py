"""KTO against 50 steps of TRL's KTOTrainer, and the invariants of its arithmetic."""

import json

import numpy as np
import pytest

from rlnumba import KTOConfig, KTOTrainer
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers import kto
from rlnumba.trainers.kto import run_kto
from tests.trainers.preference import CASES, cases_of, check_curve
from tests.trainers.runs import MODEL, PREFERENCE_ROWS, metrics_of, preference_run
from tests.trainers.test_resume import hash_of, rows_without_times


def kto_run(folder, data=None, **train):
    return preference_run("kto", folder, data, **train)


@pytest.fixture
def policy(tmp_path):
    """A Policy that has moved from its reference, and 12 Completions."""
    run = kto_run(tmp_path)
    policy = Policy(load_model(MODEL), run.train, load_model(MODEL))
    rows = kto.load_rows(run.data.train, run, policy.model, Tokenizer.from_folder(MODEL))[:12]
    # Completions with the prompts of others become likelier, too, so that the KL divergence is above 0.
    desirable = [kto.KTOCompletion(row.prompt_ids, row.completion_ids, True, row.sequence) for row in rows]
    for _ in range(3):
        kto.train_step(policy, desirable, 1e-3)
    return policy, rows


@pytest.mark.parametrize("name", cases_of("kto"))
def test_golden_curve(tmp_path, name):
    run = kto_run(tmp_path / "run", **CASES[name]["options"])
    run_kto(run)
    check_curve(run, name)
    kls = [row["kl"] for row in metrics_of(run)]
    assert any(kls) == (name == "kto")


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_micro_batches_change_nothing_but_rounding(tmp_path, policy, loss_type):
    """The KL divergence is that of the optimizer batch at any accumulation."""
    policy, rows = policy
    found = []
    for size in (12, 4, 5, 2):
        policy.train = kto_run(tmp_path, loss_type=loss_type, per_device_train_batch_size=size).train
        policy.zero_grad()
        step = kto.KTOStepLoss(policy, rows)
        for part in step.micro_batches():
            with policy.scope():
                policy.backward(*step.forward(part))
        found.append((step.metrics(step.read()), device.to_host(policy.grads.flat).copy()))
    metrics, gradient = found[0]
    assert (metrics["kl"] > 0) == (loss_type == "kto")
    for others, other_gradient in found[1:]:
        assert np.linalg.norm(other_gradient - gradient) < 1e-5 * np.linalg.norm(gradient)
        for key, value in metrics.items():
            assert others[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_kl_rows_are_those_of_the_batch_rotated_by_one(policy):
    policy, rows = policy
    kto.set_kl_sequences(rows, 64)
    for i, row in enumerate(rows):
        other = rows[(i + 11) % 12]
        assert row.kl_sequence.input_ids.tolist() == row.prompt_ids + other.completion_ids
        assert row.kl_sequence.num_trained == len(other.completion_ids)
    kto.set_kl_sequences(rows, 18)
    assert all(len(row.kl_sequence) <= 18 for row in rows)


def test_rewards_are_of_their_side(policy):
    policy, rows = policy
    whole = kto.evaluate(policy, rows)
    for label, name, other in ((True, "chosen", "rejected"), (False, "rejected", "chosen")):
        some = kto.evaluate(policy, [row for row in rows if row.label == label])
        for metric in ("rewards", "logps", "logits"):
            assert some[f"{metric}/{name}"] == pytest.approx(whole[f"{metric}/{name}"], rel=1e-5)
            assert f"{metric}/{other}" not in some
        assert "rewards/margins" not in some
    assert whole["rewards/margins"] == whole["rewards/chosen"] - whole["rewards/rejected"]


def test_evaluation_has_the_numbers_of_a_training_step(policy):
    policy, rows = policy
    evaluated = kto.evaluate(policy, rows)
    trained = kto.train_step(policy, rows, 0.0)
    assert evaluated == {name: trained[name] for name in evaluated} and "kl" in evaluated


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_precomputed_log_probs_are_those_of_every_step(tmp_path, loss_type):
    data, runs = {"eval": str(PREFERENCE_ROWS["kto"])}, []
    for precompute in (False, True):
        settings = {"loss_type": loss_type, "precompute_ref_log_probs": precompute, "gradient_accumulation_steps": 2}
        runs.append(kto_run(tmp_path / str(precompute), data, max_steps=4, eval_steps=3, **settings))
        run_kto(runs[-1])
    for one, other in zip(*map(metrics_of, runs), strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "eval_loss", "kl", "eval_kl"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6)


def test_precomputed_log_probs_of_a_run_that_goes_on_with_another_batch(tmp_path, capsys):
    """Its batches begin elsewhere and pair other completions: what was not computed before is, and no more."""
    found = []
    for precompute in (False, True):
        folder = tmp_path / str(precompute)
        settings = {"precompute_ref_log_probs": precompute, "shuffle_dataset": False, "save_steps": 1}
        run_kto(kto_run(folder, max_steps=1, per_device_train_batch_size=2, **settings))
        capsys.readouterr()
        size = {"per_device_train_batch_size": 3, "num_train_epochs": 1.0, "max_steps": -1}
        run = kto_run(folder, **settings | size)
        run_kto(run, resume=True)
        found.append(metrics_of(run))
    said = capsys.readouterr().err
    assert "rows of data.train" not in said and "computing them again" not in said
    # The first of each of 8 batches, those from the third row on and those from the first one; every other one of the
    # rest, which was first in its batch before; less one that is of the same content.
    assert "log-probs of the reference: 26 of 26 other completions of these rows' prompts" in said
    for one, other in zip(*found, strict=True):
        for name in ("loss", "kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6)


def test_pairs_are_taken_apart(tmp_path):
    """All chosen completions, then all rejected ones, which are other rows of the same file's labels."""
    run = kto_run(tmp_path / "run", {"train": str(PREFERENCE_ROWS["dpo"])}, max_steps=1, per_device_train_batch_size=48)
    run_kto(run)
    (row,) = metrics_of(run)
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins"} <= row.keys()
    model = load_model(MODEL)
    rows = kto.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))
    assert [each.label for each in rows] == [True] * 24 + [False] * 24


def test_bad_rows_and_options_are_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "completion": "b", "label": True}
    rows.write_text(json.dumps(row) + "\n" + json.dumps(row | {"label": "yes"}) + "\n")
    with pytest.raises(UserError, match="rows.jsonl:2: 'label' must be true or false, got a string"):
        run_kto(kto_run(tmp_path / "run", {"train": str(rows)}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="train.per_device_train_batch_size must be at least 2 with loss_type kto"):
        kto_run(tmp_path, per_device_train_batch_size=1)
    kto_run(tmp_path, per_device_train_batch_size=1, loss_type="apo_zero_unpaired")
    with pytest.raises(ConfigError, match="needs train.shuffle_dataset = false"):
        kto_run(tmp_path, precompute_ref_log_probs=True, shuffle_dataset=True)
    with pytest.raises(ConfigError, match="train.loss_type must be one of kto, apo_zero_unpaired, got 'sigmoid'"):
        kto_run(tmp_path, loss_type="sigmoid")


def test_python_class_trains_what_the_run_file_does(tmp_path):
    run = kto_run(tmp_path / "file", max_steps=3)
    run_kto(run)
    args = KTOConfig(output_dir=str(tmp_path / "class"), **vars(run.train))
    rows = [json.loads(line) for line in PREFERENCE_ROWS["kto"].read_text().splitlines()]
    trainer = KTOTrainer(str(MODEL), args=args, train_dataset=rows)
    trainer.train()
    assert hash_of(trainer.run) == hash_of(run)
    assert rows_without_times(trainer.run) == rows_without_times(run)
