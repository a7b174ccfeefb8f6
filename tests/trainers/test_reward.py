"""Reward models against 50 steps of TRL's RewardTrainer, and what is special about their data and folders."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlnumba.config import RewardConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.config import SCORE_HEAD, ModelConfig
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, save_model
from rlnumba.model.weights import write_json
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.trainers import reward
from rlnumba.trainers.reward import run_reward
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, PAIR_ROWS, golden, metrics_of, reward_run
from tests.trainers.test_resume import check_killed_run, hash_of, rows_without_times


def with_head(folder, head, **settings):
    """A sequence-classification folder: the tests' model with these weights of a head."""
    model = load_model(MODEL, "float32", SCORE_HEAD)
    model.weights.score[0] = device.asarray(np.array(head, np.float32))
    save_model(model, folder, Tokenizer.from_folder(MODEL))
    if settings:
        raw = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", raw | settings)
    return folder


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair_rows():
    return [json.loads(line) for line in PAIR_ROWS.read_text().splitlines()]


@pytest.mark.parametrize("curve", ["plain", "margin_centering"])
def test_golden_curve(tmp_path, capsys, curve):
    expected = golden("reward_curves.json")
    data, model = {}, MODEL
    if curve == "plain":
        rows = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in pair_rows()]
        data = {"train": rows_file(tmp_path / "rows.jsonl", rows)}
    else:
        model = with_head(tmp_path / "start", expected[curve]["head"])
    run = reward_run(tmp_path / "run", data, model, **expected["curves"][curve])
    run_reward(run)
    assert "2 of 42 pairs are longer than max_length and left out" in capsys.readouterr().err
    got = metrics_of(run)
    assert len(got) == 50
    names = ["loss", "grad_norm", "accuracy", "margin", "mean_reward", "learning_rate", "epoch"]
    if run.train.gradient_accumulation_steps == 1:
        # TRL's are means over micro-batches.
        names += ["min_reward", "max_reward"]
    for row, want in zip(got, expected[curve]["steps"], strict=True):
        for name in names:
            # The mean of rewards of both signs is small beside them.
            absolute = 1e-4 * abs(want["margin"]) if name == "mean_reward" else 1e-7
            assert row[name] == pytest.approx(want[name], rel=1e-4, abs=absolute), (row["step"], name)
        assert row["num_tokens"] == want["num_tokens"]
    updates = np.load(GOLDEN / "reward_updates.npz")
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert "lm_head.weight" not in after
    differences, sizes = 0.0, 0.0
    for name, weight in after.items():
        update = updates[f"{curve}/{name}"].astype(np.float64)
        differences += np.sum((weight - before.get(name, np.zeros_like(weight)) - update) ** 2)
        sizes += np.sum(update**2)
    assert np.sqrt(differences / sizes) < 2e-3


def test_final_is_a_sequence_classification_folder(tmp_path):
    run = reward_run(tmp_path / "run", max_steps=2)
    run_reward(run)
    raw = json.loads((tmp_path / "run" / "final" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3ForSequenceClassification"]
    assert raw["id2label"] == {"0": "LABEL_0"} and raw["pad_token_id"] == 0
    model = load_model(tmp_path / "run" / "final", "float32", SCORE_HEAD)
    policy = Policy(model, run.train)
    rows = reward.load_rows(run.data.train, run, model, Tokenizer.from_folder(MODEL))[:3]
    scores = score_sequences(model, [p.prompt_ids + p.chosen_ids for p in rows])
    rewards = device.xp().empty(6, np.float32)
    policy.values(reward.value_batch(rows, model.config), rewards)
    assert_same_bits(rewards[:3], scores)
    assert len(set(scores.tolist())) == 3


def test_micro_batches_and_checkpointing_change_nothing_but_rounding(tmp_path):
    curves = []
    for train in (
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 9},
    ):
        run = reward_run(tmp_path / str(len(curves)), max_steps=5, head_init="normal", **train)
        run_reward(run)
        curves.append([[row[name] for name in ("loss", "grad_norm", "min_reward")] for row in metrics_of(run)])
    assert curves[1] == curves[0]
    # 40 pairs: the fifth step has four, in one micro-batch of three and one of one.
    np.testing.assert_allclose(curves[2], curves[3], rtol=1e-4)


def test_a_margin_that_is_left_out_is_0(tmp_path):
    losses = []
    for margin in ({}, {"margin": 0}, {"margin": None}, {"margin": 0.5}):
        rows = [{**row, "margin": None} | margin for row in pair_rows()[:8]]
        rows = [{key: value for key, value in row.items() if margin or key != "margin"} for row in rows]
        data = {"train": rows_file(tmp_path / "rows.jsonl", rows)}
        run = reward_run(tmp_path / str(len(losses)), data, max_steps=1)
        run_reward(run)
        losses.append(metrics_of(run)[0]["loss"])
    # Of a head of zeros.
    assert losses[:3] == [pytest.approx(np.log(2))] * 3
    assert losses[3] == pytest.approx(np.log(1 + np.exp(0.5)))


def test_head_init(tmp_path):
    """From the run's seed; a sequence-classification folder keeps its own head."""
    heads = []
    for seed, head_init in ((1, "normal"), (1, "normal"), (2, "normal"), (1, "zeros")):
        run = reward_run(tmp_path / str(len(heads)), max_steps=1, learning_rate=0.0, head_init=head_init)
        run_reward(type(run)(**vars(run) | {"seed": seed}))
        heads.append(load_file(tmp_path / str(len(heads)) / "final" / "model.safetensors")["score.weight"])
    assert_same_bits(heads[0], heads[1])
    assert np.all(heads[0] != heads[2]) and not heads[3].any()
    run = reward_run(tmp_path / "next", model=tmp_path / "0" / "final", max_steps=1, learning_rate=0.0)
    run_reward(run)
    assert_same_bits(load_file(tmp_path / "next" / "final" / "model.safetensors")["score.weight"], heads[0])


def test_evaluation(tmp_path):
    run = reward_run(tmp_path, {"eval": str(PAIR_ROWS)}, max_steps=5, eval_steps=2, head_init="normal")
    run_reward(run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 5]
    model = load_model(tmp_path / "final", "float32", SCORE_HEAD)
    pairs = reward.load_rows(str(PAIR_ROWS), run, model, Tokenizer.from_folder(MODEL))
    found = reward.evaluate(Policy(model, run.train), pairs)
    assert {f"eval_{name}" for name in found} <= rows[-1].keys() and found["loss"] == rows[-1]["eval_loss"]
    sides = [score_sequences(model, [p.prompt_ids + side(p) for p in pairs]) for side in (
        lambda p: p.chosen_ids, lambda p: p.rejected_ids)]  # fmt: skip
    assert found["accuracy"] == np.mean(sides[0] > sides[1]) and 0 < found["accuracy"] < 1
    assert found["margin"] == pytest.approx(np.mean(sides[0] - sides[1], dtype=np.float64), rel=1e-6)


def test_every_checkpoint_leads_to_the_same_end(tmp_path):
    settings = {"max_steps": 6, "save_steps": 2, "shuffle_dataset": True, "head_init": "normal"}
    run = reward_run(tmp_path / "run", center_rewards_coefficient=0.1, **settings)
    run_reward(run)
    expected, rows = hash_of(run), rows_without_times(run)
    for step in (4, 2):
        run_reward(run, resume=step)
        assert hash_of(run) == expected and rows_without_times(run) == rows


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="times its kills for the cpu device")
def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    run = reward_run(tmp_path / "killed", max_steps=40, save_steps=5, shuffle_dataset=True, head_init="normal")
    check_killed_run("reward", run_reward, run, (13,))


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>"])
def test_padding_token(tmp_path, pad_token):
    """Where EOS serves as padding, as TRL makes it of a tokenizer without one, the token before EOS is read."""
    start = with_head(tmp_path / "start", np.linspace(-1, 1, 32))
    settings = json.loads((start / "tokenizer_config.json").read_text())
    write_json(start / "tokenizer_config.json", settings | {"pad_token": None if pad_token == "<eos>" else pad_token})
    run = reward_run(tmp_path / "run", model=start, max_steps=1, learning_rate=0.0)
    run_reward(run)
    config = ModelConfig.from_folder(tmp_path / "run" / "final")
    assert config.pad_token_id == (1 if pad_token == "<eos>" else 0)
    pair = reward.load_rows(str(PAIR_ROWS), run, load_model(MODEL), Tokenizer.from_folder(start))[0]
    assert pair.chosen_ids[-1] == 1
    rows = reward.value_batch([pair], config).rows
    length = len(pair.prompt_ids) + len(pair.chosen_ids)
    assert int(rows[0]) == length - (2 if pad_token == "<eos>" else 1)


def test_bad_input(tmp_path):
    cases = [
        ([{"prompt": "a", "chosen": "b"}], "rows.jsonl:1: .*'rejected'"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}], "rows.jsonl:1: 'margin' must be a number"),
        ([{"prompt": "a" * 90, "chosen": "b", "rejected": "c"}], "all 1 pairs are too long for train.max_length 64"),
    ]
    for rows, message in cases:
        run = reward_run(tmp_path / "run", {"train": rows_file(tmp_path / "rows.jsonl", rows)})
        with pytest.raises(UserError, match=message):
            run_reward(run)
    labels = {"id2label": {"0": "bad", "1": "good"}}
    two = with_head(tmp_path / "two", np.zeros(32), **labels)
    with pytest.raises(UserError, match="two/config.json: Qwen3ForSequenceClassification with 2 labels is not supp"):
        run_reward(reward_run(tmp_path / "run", model=two))
    with pytest.raises(ConfigError, match="train.head_init must be one of zeros, normal, got 'ones'"):
        RewardConfig(head_init="ones")
    with pytest.raises(ConfigError, match="train.center_rewards_coefficient must be at least 0, got -1"):
        RewardConfig(center_rewards_coefficient=-1.0)
