"""SFT against torch's 50-step curves, and the invariants of its arithmetic."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from rlnumba import data
from rlnumba.config import SFTConfig
from rlnumba.errors import UserError
from rlnumba.model.heads import LogprobHead
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.optim import learning_rate_at
from rlnumba.runs import policy as policy_module
from rlnumba.runs import run_folder
from rlnumba.runs.loading import load_policy
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, memory
from rlnumba.trainers import sft
from tests.close import assert_same_bits
from tests.trainers.runs import MODEL, SFT_ROWS, golden, metrics_of, sft_run


def rows_of(run, model):
    return sft.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))


@pytest.mark.parametrize(
    ("curve", "train", "steps", "tolerance"),
    [
        # Two correct programs in float32 drift apart exponentially; these do so at about 10x in 20 steps.
        ("unpacked", {}, 50, 1e-4),
        ("packed", {"packing": True}, 50, 1e-3),
        # dft's gradients are small and its drift is faster.
        ("dft", {"loss_type": "dft"}, 20, 1e-4),
    ],
)
def test_golden_curve(tmp_path, curve, train, steps, tolerance):
    run = sft_run(tmp_path / "run", **train)
    sft.run_sft(run)
    expected = golden("sft_curves.json")[curve][:steps]
    got = metrics_of(run)
    assert len(got) == 50
    assert [row["step"] for row in got] == list(range(1, 51))
    for row, want in zip(got[:steps], expected, strict=True):
        for name in ("loss", "grad_norm", "entropy", "learning_rate", "mean_token_accuracy"):
            assert row[name] == pytest.approx(want[name], rel=tolerance, abs=1e-9), (row["step"], name)
        assert row["num_tokens"] == want["num_tokens"]
    # 37 rows of 8 a step: the last of an epoch's five steps has five.
    if curve == "unpacked":
        assert [row["epoch"] for row in got[3:6]] == pytest.approx([0.8, 1.0, 1.2])


def test_packing_does_not_change_the_loss(tmp_path):
    model = load_model(MODEL)
    losses = []
    for packing in (False, True):
        run = sft_run(tmp_path, packing=packing)
        rows = rows_of(run, model)
        assert (len(rows) < 37) == packing
        losses.append(sft.evaluate(Policy(model, run.train), rows))
    # The sums are over the same numbers in another order.
    for name in losses[0]:
        assert losses[0][name] == pytest.approx(losses[1][name], rel=1e-6)


def test_packed_rows_have_the_bits_of_rows_alone(tmp_path):
    model = load_model(MODEL)
    run = sft_run(tmp_path, packing=True)
    policy, row = Policy(model, run.train), max(rows_of(run, model), key=len)

    def logprobs(sequences):
        batch = sft.target_batch(sequences)
        out = device.xp().empty(len(batch.target_ids), np.float32)
        policy.logprobs(batch, out)
        return out

    assert len(row) > 1
    assert_same_bits(logprobs(row), np.concatenate([logprobs([sequence]) for sequence in row]))


def test_micro_batches_and_checkpointing_change_nothing_but_rounding(tmp_path):
    curves = []
    for train in (
        {},
        {"gradient_checkpointing": True},
        {"loss_type": "chunked_nll"},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    ):
        run = sft_run(tmp_path / str(len(curves)), max_steps=6, **train)
        sft.run_sft(run)
        curves.append([(row["loss"], row["grad_norm"]) for row in metrics_of(run)])
    assert curves[1] == curves[0]
    assert curves[2] == curves[0]
    np.testing.assert_allclose(curves[3], curves[0], rtol=1e-4)


@pytest.mark.parametrize(("loss_type", "together"), [("nll", True), ("chunked_nll", True), ("dft", False)])
def test_forward_and_gradient_of_the_head_at_once(tmp_path, monkeypatch, loss_type, together):
    """Where each target's factor is known beforehand, which dft's is not."""
    targets, forward_backward = [], LogprobHead.forward_backward

    def counted(head, model, hidden, of_batch, gradients, *others):
        targets.append(gradients.lm_head)
        return forward_backward(head, model, hidden, of_batch, gradients, *others)

    monkeypatch.setattr(LogprobHead, "forward_backward", counted)

    sft.run_sft(sft_run(tmp_path / "run", max_steps=1, loss_type=loss_type))
    # The head's gradient of the second of two micro-batches is completed elsewhere.
    assert len(targets) == (2 if together else 0)
    assert not together or targets[0] is not targets[1]


def test_shuffling_draws_a_new_order_each_epoch_from_the_seed(tmp_path):
    orders = [
        policy_module.epoch_order(37, True, seed, epoch).tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    assert sorted(orders[0]) == list(range(37))
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[0] == orders[3]
    assert policy_module.epoch_order(3, False, 1, 5).tolist() == [0, 1, 2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_has_all_rows_in_its_order(tmp_path, shuffle):
    run = sft_run(tmp_path, max_steps=10, shuffle_dataset=shuffle, learning_rate=0.0)
    sft.run_sft(run)
    tokens = np.diff([row["num_tokens"] for row in metrics_of(run)], prepend=0)
    assert tokens[:5].sum() == tokens[5:].sum()
    assert (tokens[:5].tolist() == tokens[5:].tolist()) != shuffle


def test_epochs_make_the_steps(tmp_path):
    run = sft_run(tmp_path, max_steps=-1, num_train_epochs=1.5)
    sft.run_sft(run)
    assert len(metrics_of(run)) == 8


@pytest.mark.parametrize(("warmup_steps", "steps"), [(3, 3), (3.9, 3), (0.25, 3), (0.0, 0), (1, 1)])
def test_warmup_in_steps_or_as_a_share(warmup_steps, steps):
    """As transformers: below 1 a share of all steps, rounded up."""
    train = SFTConfig(learning_rate=1.0, lr_scheduler_type="constant", warmup_steps=warmup_steps)
    assert [learning_rate_at(train, step, 9) for step in range(9)] == [k / steps for k in range(steps)] + [1.0] * (
        9 - steps
    )


def test_epochs_are_counted_in_micro_batches(tmp_path):
    # 37 rows make 13 micro-batches of 3: steps of 5, 5 and 3.
    run = sft_run(tmp_path, max_steps=4, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    sft.run_sft(run)
    assert [row["epoch"] for row in metrics_of(run)] == pytest.approx([5 / 13, 10 / 13, 1, 18 / 13])


def test_evaluation_and_files(tmp_path):
    run = sft_run(tmp_path, {"eval": str(SFT_ROWS)}, max_steps=5, eval_steps=2, save_steps=3)
    sft.run_sft(run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5]
    # The same rows held out as trained on: what is left at the end is the loss of the final weights.
    model = load_model(tmp_path / "final")
    loss = sft.evaluate(Policy(model, run.train), rows_of(run, model))
    assert loss["loss"] == rows[-1]["eval_loss"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-3", "step-5"]
    for name in ("curves.png", "config.toml", "final/tokenizer.json", "final/config.json"):
        assert (tmp_path / name).is_file(), name
    assert {"time/train", "step_time", "memory/weights", "memory/grads"} <= rows[-1].keys()
    tokens = np.diff([row["num_tokens"] for row in rows], prepend=0)
    for row, count in zip(rows, tokens.tolist(), strict=True):
        assert row["perf/throughput"] * row["time/train"] == pytest.approx(count)
        # Host memory is that of other tests of this process, which offload.
        regions = [value for name, value in row.items() if name.startswith("memory/") and name != "memory/host"]
        assert max(regions) < row["perf/peak_memory"] <= sum(regions)
        assert "step_tokens" not in row


def test_memory_of_activations_is_less_with_checkpointing(tmp_path):
    peaks = []
    for checkpointing in (False, True):
        memory.reset_peaks()
        before = memory.report().get("activations", 0)
        sft.run_sft(sft_run(tmp_path / str(checkpointing), max_steps=1, gradient_checkpointing=checkpointing))
        peaks.append(memory.report()["activations"] - before)
    assert peaks[1] < peaks[0]


def test_activation_memory_changes_memory_and_no_bit(tmp_path):
    peaks, weights = [], []
    for kept in ("full", "selective", "minimal"):
        memory.reset_peaks()
        before = memory.report().get("activations", 0)
        # It takes precedence over gradient_checkpointing.
        options = {"activation_memory": kept, "gradient_checkpointing": kept == "full"}
        sft.run_sft(sft_run(tmp_path / kept, max_steps=2, **options))
        peaks.append(memory.report()["activations"] - before)
        weights.append((tmp_path / kept / "final" / "model.safetensors").read_bytes())
    assert peaks[0] > peaks[1] > peaks[2]
    assert weights[0] == weights[1] == weights[2]


def test_rows_without_a_trained_token_are_named(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a" * 80, "completion": "b"}, {"prompt": "a", "completion": "bc"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = sft_run(tmp_path / "run", {"train": str(path)}, max_steps=1)
    sft.run_sft(run)
    assert f"{path}: 1 rows lost their end to max_length, 1 have no token to train on" in capsys.readouterr().err
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(UserError, match="no row has a token to train on"):
        sft.run_sft(run)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(tmp_path):
    model, run = load_model(MODEL), sft_run(tmp_path, packing=True)
    rows, policy = rows_of(run, model)[:2], Policy(model, run.train)
    fine = sft.train_step(policy, rows, 0.0)
    assert "skipped_steps" not in fine and np.isfinite(fine["grad_norm"])
    model.weights.norm[0] = np.nan
    before = device.to_host(model.weights.flat).copy()
    for count in (1, 2):
        metrics = sft.train_step(policy, rows, 1e-2)
        assert metrics["skipped_steps"] == count and np.isnan(metrics["loss"])
    assert_same_bits(model.weights.flat, before)


def test_every_key_of_the_optimizer_reaches_it():
    train = SFTConfig(adam_beta1=0.8, adam_beta2=0.7, adam_epsilon=1e-5, weight_decay=0.3, max_grad_norm=0.4)
    optimizer = Policy(load_model(MODEL), train).optimizer
    config = optimizer.config
    assert (config.beta1, config.beta2, config.epsilon) == (0.8, 0.7, 1e-5)
    assert (config.weight_decay, config.max_grad_norm) == (0.3, 0.4)


def test_a_clock_counts_each_moment_in_one_phase(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(run_folder.time, "perf_counter", lambda: now[0])
    clock = run_folder.Clock()
    for name, seconds in (("a", 1.0), ("b", 2.0), ("a", 4.0)):
        with clock.phase(name):
            now[0] += seconds
        now[0] += 0.5
    with pytest.raises(ZeroDivisionError), clock.phase("fails"):
        now[0] += 8.0
        1 / 0  # noqa: B018
    assert clock.read() == {"step_time": 16.5, "time/a": 5.0, "time/b": 2.0, "time/fails": 8.0}
    now[0] += 3.0
    assert clock.read() == {"step_time": 3.0}
    # A phase within another interrupts it, and one that is read in the middle goes on in the next step.
    with clock.phase("outer"):
        now[0] += 1.0
        with clock.phase("inner"):
            now[0] += 2.0
        now[0] += 4.0
        assert clock.read() == {"step_time": 7.0, "time/outer": 5.0, "time/inner": 2.0}
        now[0] += 8.0
    assert clock.read() == {"step_time": 8.0, "time/outer": 8.0}


def test_lines_for_the_console_name_the_program(capsys):
    run_folder.log("a line")
    assert capsys.readouterr() == ("", "rlnumba: a line\n")


def test_targets_are_the_next_tokens(rng):
    sequences = [
        data.TokenSequence(np.array(ids, np.int32), np.array(mask, bool))
        for ids, mask in (([5, 6, 7], [1, 1, 0]), ([8], [1]), ([9, 10, 11, 12], [0, 0, 1, 1]))
    ]
    batch = sft.target_batch(sequences)
    assert batch.rows.tolist() == [0, 5, 6]
    assert batch.target_ids.tolist() == [6, 11, 12]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]


def test_a_dropout_that_is_not_applied_is_named(tmp_path, capsys):
    path = shutil.copytree(MODEL, tmp_path / "model") / "config.json"
    keys = json.loads(path.read_text())
    run, found = replace(sft_run(tmp_path / "run"), model=str(path.parent)), []
    for rate in (0.0, 0.1):
        path.write_text(json.dumps(keys | {"attention_dropout": rate}))
        load_policy(run, run_folder.RunFolder(run, False))
        found.append(f"warning: {path}: attention_dropout 0.1 is not applied in training" in capsys.readouterr().err)
    assert found == [False, True]
