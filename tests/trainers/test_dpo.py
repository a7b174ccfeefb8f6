"""DPO against 50 steps of TRL's DPOTrainer, and the invariants of its arithmetic."""

import json

import numpy as np
import pytest

from rlnumba import DPOConfig, DPOTrainer
from rlnumba.config.dpo import LOSS_TYPES
from rlnumba.config.lora import LoraConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.lora import Adapter
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers import dpo, preference
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.preference import REFERENCE_FILE
from tests.close import assert_same_bits
from tests.trainers.preference import CASES, cases_of, check_curve
from tests.trainers.runs import MODEL, PREFERENCE_ROWS, metrics_of, preference_run
from tests.trainers.test_resume import hash_of, rows_without_times


def dpo_run(folder, data=None, **train):
    return preference_run("dpo", folder, data, **train)


@pytest.fixture
def policy(tmp_path):
    """A Policy that has moved from its reference, and 12 Pairs."""
    run = dpo_run(tmp_path)
    policy = Policy(load_model(MODEL), run.train, load_model(MODEL))
    pairs = dpo.load_rows(run.data.train, run, policy.model, Tokenizer.from_folder(MODEL))[:12]
    dpo.train_step(policy, pairs[:4], 1e-3)
    return policy, pairs


@pytest.mark.parametrize("name", cases_of("dpo"))
def test_golden_curve(tmp_path, name):
    run = dpo_run(tmp_path / "run", **CASES[name]["options"])
    run_dpo(run)
    check_curve(run, name)


def test_the_first_step_compares_equal_models(tmp_path):
    """Exactly: the policy's log-probs have the bits of the reference's."""
    for ld_alpha in (None, 0.3):
        run = dpo_run(tmp_path / str(ld_alpha), max_steps=1, ld_alpha=ld_alpha, warmup_steps=0)
        run_dpo(run)
        (row,) = metrics_of(run)
        assert row["loss"] == pytest.approx(np.log(2.0), rel=1e-7)
        assert [row[f"rewards/{name}"] for name in ("chosen", "rejected", "margins", "accuracies")] == [0.0] * 4


@pytest.mark.parametrize("name", [name for name in LOSS_TYPES if not name.startswith("aot")])
def test_micro_batches_change_nothing_but_rounding(tmp_path, policy, name):
    policy, pairs = policy
    found = []
    for size in (12, 4, 5, 1):
        train = dpo_run(tmp_path, loss_type=name, label_smoothing=0.1, per_device_train_batch_size=size).train
        policy.train = train
        policy.zero_grad()
        step = dpo.DPOStepLoss(policy, pairs)
        for part in step.micro_batches():
            with policy.scope():
                policy.backward(*step.forward(part))
        found.append((step.metrics(step.read()), device.to_host(policy.grads.flat).copy()))
    metrics, gradient = found[0]
    size = np.linalg.norm(gradient)
    for others, other_gradient in found[1:]:
        assert np.linalg.norm(other_gradient - gradient) < 1e-5 * size
        for key, value in metrics.items():
            assert others[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


def test_mean_logits_are_those_of_the_whole_logits(policy):
    policy, pairs = policy
    step = dpo.DPOStepLoss(policy, pairs)
    sums = {"chosen": [], "rejected": []}
    for part in step.micro_batches():
        with policy.scope():
            head = step.forward(part)[0].saved
            hidden, weight = (device.to_host(a).astype(np.float64) for a in (head.hidden, policy.model.lm_head))
            logits, count = (hidden @ weight.T).mean(axis=1), sum(pair.chosen.num_trained for pair in part)
            sums["chosen"] += logits[:count].tolist()
            sums["rejected"] += logits[count:].tolist()
    metrics = step.metrics(step.read())
    for name, values in sums.items():
        # Near zero it is a difference of larger sums in float32.
        assert metrics[f"logits/{name}"] == pytest.approx(np.mean(values), rel=1e-5, abs=1e-7)


def test_log_sum_of_squares(policy):
    policy, pairs = policy
    with policy.scope():
        head = dpo.DPOStepLoss(policy, pairs).forward(pairs)[0].saved
        found = device.to_host(dpo.log_sum_of_squares(policy, head))
        hidden, weight = (device.to_host(a).astype(np.float64) for a in (head.hidden, policy.model.lm_head))
    logits = hidden @ weight.T
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, np.log((probabilities**2).sum(axis=1)), rtol=1e-5, atol=1e-5)


def test_evaluation_has_the_numbers_of_a_training_step(tmp_path, policy):
    policy, pairs = policy
    evaluated = dpo.evaluate(policy, pairs)
    trained = dpo.train_step(policy, pairs, 0.0)
    assert evaluated == {name: trained[name] for name in evaluated}
    assert "rewards/margins" in evaluated and "logits/chosen" in evaluated


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nothing_is_dropped_out_in_evaluation(tmp_path, dropout):
    run = dpo_run(tmp_path)
    model = load_model(MODEL, "float32")
    model.adapter = Adapter.new(model.config, LoraConfig(r=4, lora_dropout=dropout), "float32", "base", 0)
    model.adapter.flat[...] += np.float32(0.1)
    model.adapter.zero_outside_blocks()
    policy = Policy(model, run.train, model.without_adapter())
    pairs = dpo.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))[:4]
    evaluated, trained = dpo.evaluate(policy, pairs), dpo.train_step(policy, pairs, 0.0)
    # Without dropout, the training forward has the same loss.
    assert (evaluated["loss"] == trained["loss"]) == (dropout == 0)
    assert evaluated["loss"] == dpo.evaluate(policy, pairs)["loss"]


def test_eval_metrics_are_logged(tmp_path):
    data = {"eval": str(PREFERENCE_ROWS["dpo"])}
    for precompute in (False, True):
        run = dpo_run(tmp_path / str(precompute), data, max_steps=4, eval_steps=2, precompute_ref_log_probs=precompute)
        run_dpo(run)
        rows = metrics_of(run)
        assert ["eval_loss" in row for row in rows] == [False, True, False, True]
        assert rows[3]["eval_rewards/margins"] > rows[1]["eval_rewards/margins"] > 0


@pytest.mark.parametrize("options", [{}, {"ld_alpha": 0.3, "precompute_ref_batch_size": 7}], ids=str)
def test_precomputed_log_probs_are_those_of_every_step(tmp_path, capsys, options):
    runs = [
        dpo_run(tmp_path / str(precompute), max_steps=8, precompute_ref_log_probs=precompute, **options)
        for precompute in (False, True)
    ]
    for run in runs:
        run_dpo(run)
    assert "log-probs of the reference: 24 of 24 rows of data.train" in capsys.readouterr().err
    assert (tmp_path / "True" / REFERENCE_FILE).exists() and not (tmp_path / "False" / REFERENCE_FILE).exists()
    if not options:
        assert hash_of(runs[0]) == hash_of(runs[1])
        assert rows_without_times(runs[0]) == rows_without_times(runs[1])
    for one, other in zip(*map(metrics_of, runs), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_precomputed_log_probs_are_stored_with_the_run(tmp_path, capsys, monkeypatch):
    settings = {"save_steps": 2, "precompute_ref_log_probs": True}
    whole, run = (dpo_run(tmp_path / name, max_steps=6, **settings) for name in ("whole", "run"))
    run_dpo(whole)
    run_dpo(dpo_run(tmp_path / "run", max_steps=4, **settings))
    path = tmp_path / "run" / REFERENCE_FILE
    stored = path.read_text()
    capsys.readouterr()
    with monkeypatch.context() as patched:
        # What is stored is not computed again.
        patched.delattr(preference.CompletionBatch, "logps")
        run_dpo(run, resume=True)
    # The learning rates of the warm-up are those of a longer run, too.
    assert rows_without_times(run) == rows_without_times(whole)
    assert "log-probs of the reference" not in capsys.readouterr().err
    resumed = hash_of(run)
    assert resumed == hash_of(whole)
    for damage in ("", "{", "[]", json.dumps({"rows": "of others"})):
        path.write_text(damage)
        run_dpo(run, resume=4)
        assert "does not have this reference's log-probs" in capsys.readouterr().err
        assert path.read_text() == stored and hash_of(run) == resumed
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"{REFERENCE_FILE}: cannot be written: Is a directory"):
        run_dpo(run, resume=4)


def test_truncated_pairs(tmp_path, capsys):
    run = dpo_run(tmp_path / "run", max_steps=1, max_length=15)
    run_dpo(run)
    lengths = [len(json.loads(line)["prompt"]) for line in PREFERENCE_ROWS["dpo"].read_text().splitlines()]
    dropped = sum(length >= 15 for length in lengths)
    assert 0 < dropped < 24
    said = f"{24 - dropped} pairs were cut to max_length, {dropped} whose prompt alone fills it are left out"
    assert said in capsys.readouterr().err
    # Four pairs of two sequences.
    assert metrics_of(run)[0]["num_tokens"] == 4 * 2 * 15


def test_keep_end_trains_on_the_ends(tmp_path):
    """Where the prompt is cut away whole, a completion's first token is no target."""
    run = dpo_run(tmp_path / "run", max_steps=2, max_length=5, truncation_mode="keep_end")
    model = load_model(MODEL)
    pairs = dpo.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))
    assert len(pairs) == 24
    assert {len(side) for pair in pairs for side in pair.sequences} == {5}
    assert {side.num_trained for pair in pairs for side in pair.sequences} == {4}
    run_dpo(run)
    assert all(np.isfinite(row["loss"]) for row in metrics_of(run))


def test_equal_sides_teach_nothing(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a b c", "chosen": "d", "rejected": "d"}) + "\n")
    run = dpo_run(tmp_path / "run", {"train": str(rows)}, max_steps=2, warmup_steps=0, weight_decay=0.0)
    run_dpo(run)
    assert [row["rewards/margins"] for row in metrics_of(run)] == [0.0, 0.0]
    assert [row["grad_norm"] for row in metrics_of(run)] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_bad_rows_end_the_run_before_it_begins(tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows.write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(UserError, match="rows.jsonl:2: no 'rejected'; its columns are prompt, chosen"):
        run_dpo(dpo_run(tmp_path / "run", {"train": str(rows)}))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="train.sync_ref_model moves the reference"):
        dpo_run(tmp_path, sync_ref_model=True, precompute_ref_log_probs=True)


def test_python_class_trains_what_the_run_file_does(tmp_path):
    run = dpo_run(tmp_path / "file", max_steps=3)
    run_dpo(run)
    settings = {name: value for name, value in vars(run.train).items() if name != "loss_type"}
    args = DPOConfig(output_dir=str(tmp_path / "class"), loss_type="sigmoid", **settings)
    rows = [json.loads(line) for line in PREFERENCE_ROWS["dpo"].read_text().splitlines()]
    trainer = DPOTrainer(str(MODEL), args=args, train_dataset=rows)
    trainer.train()
    assert hash_of(trainer.run) == hash_of(run)
    assert rows_without_times(trainer.run) == rows_without_times(run)


def test_the_reference_does_not_move(policy):
    policy, pairs = policy
    before = device.to_host(policy.reference.weights.flat).copy()
    dpo.train_step(policy, pairs, 1e-3)
    assert_same_bits(policy.reference.weights.flat, before)
