"""Training adapters: PEFT's 50-step curves, the reference without a second model, checkpoints, and what is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import rlnumba
from rlnumba import cli
from rlnumba.config import LoraConfig, load_run, to_toml
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.transformer import load_model
from rlnumba.model.weights import open_tensors
from rlnumba.runs.loading import load_policy
from rlnumba.runs.policy import Policy
from rlnumba.runs.run_folder import RunFolder
from rlnumba.runtime import device, memory
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.kto import run_kto
from rlnumba.trainers.reward import run_reward
from rlnumba.trainers.reward_model import RewardModel
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.sft import run_sft
from tests.close import assert_same_bits
from tests.trainers.runs import (
    GOLDEN,
    MODEL,
    SFT_ROWS,
    grpo_run,
    metrics_of,
    metrics_until,
    preference_run,
    reward_run,
    rloo_run,
    sft_run,
)
from tests.trainers.test_resume import check_killed_run, elsewhere, hash_of, rows_without_times

CURVES = GOLDEN / "lora"


def with_lora(run, **keys):
    return dataclasses.replace(run, lora=LoraConfig(**{"r": 4, "lora_alpha": 8} | keys))


def golden_run(folder, case, **train):
    settings = json.loads((CURVES / "curves.json").read_text())["config"]
    return with_lora(sft_run(folder, **settings | train), r=16, lora_alpha=32, init=str(CURVES / case / "init"))


def adapter_tensors(folder):
    return {name: t.read().astype(np.float64) for name, t in open_tensors(folder / "adapter_model.safetensors").items()}


@pytest.mark.parametrize("case", ["all_linear", "qv_rslora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_golden_curve(tmp_path, case, checkpointing):
    """PEFT's loss and gradient norm at each of 50 steps, from PEFT's own adapter; and where the weights end."""
    run = golden_run(tmp_path / "run", case, gradient_checkpointing=checkpointing)
    run_sft(run)
    expected = json.loads((CURVES / "curves.json").read_text())[case]
    got = metrics_of(run)
    assert len(got) == len(expected) == 50
    for row, want in zip(got, expected, strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert row[name] == pytest.approx(want[name], rel=1e-4, abs=1e-9), (row["step"], name)
    begin, end = (adapter_tensors(CURVES / case / which) for which in ("init", "final"))
    ours = adapter_tensors(tmp_path / "run" / "final")
    assert ours.keys() == end.keys()
    for name, final in end.items():
        error, update = np.linalg.norm(ours[name] - final), np.linalg.norm(final - begin[name])
        assert error < 2e-3 * update, (name, error / update)
    config = json.loads((tmp_path / "run" / "final" / "adapter_config.json").read_text())
    theirs = json.loads((CURVES / case / "final" / "adapter_config.json").read_text())
    for key in ("r", "lora_alpha", "use_rslora", "peft_type", "task_type"):
        assert config[key] == theirs[key], key
    # The folder can be opened from anywhere.
    assert config["base_model_name_or_path"] == str(MODEL.resolve())
    assert_same_bits(load_model(tmp_path / "run" / "final").weights.flat, load_model(MODEL).weights.flat)


def test_a_new_adapter_learns_and_follows_from_the_seed(tmp_path):
    hashes = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run = dataclasses.replace(with_lora(sft_run(tmp_path / name, max_steps=8)), seed=seed)
        run_sft(run)
        hashes.append(hash_of(run))
    assert hashes[0] == hashes[1] != hashes[2]
    losses = [row["loss"] for row in metrics_of(run)]
    assert losses[-1] < losses[0] - 0.3


def test_no_memory_for_gradients_of_the_base(tmp_path):
    memory.reset_peaks()
    before = memory.report()
    run_sft(with_lora(sft_run(tmp_path / "run", max_steps=1)))
    peaks = metrics_of(with_lora(sft_run(tmp_path / "run")))[-1]
    size = peaks["memory/adapter"] - before.get("adapter", 0)
    assert 0 < size < peaks["memory/weights"] - before.get("weights", 0)
    assert peaks["memory/grads"] - before.get("grads", 0) == size
    assert peaks["memory/moments"] - before.get("moments", 0) == 2 * size


@pytest.mark.parametrize("kind", ["sft", "grpo", "rloo", "dpo", "kto"])
def test_every_checkpoint_leads_to_the_same_end(tmp_path, kind):
    lora, settings = {"lora_dropout": 0.2} if kind == "sft" else {}, {"max_steps": 6, "save_steps": 1}
    if kind == "sft":
        run, train = sft_run(tmp_path / "run", **settings), run_sft
    elif kind in ("grpo", "rloo"):
        settings |= {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1, "beta": 0.05}
        make, train = {"grpo": (grpo_run, run_grpo), "rloo": (rloo_run, run_rloo)}[kind]
        run = make(tmp_path / "run", **settings)
    else:
        run, train = preference_run(kind, tmp_path / "run", **settings), {"dpo": run_dpo, "kto": run_kto}[kind]
    run = with_lora(run, **lora)
    train(run)
    expected, rows = hash_of(run), rows_without_times(run)
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step-3").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} < names
    assert "config.json" not in names and "model.safetensors" not in names
    for step in (5, 2):
        other = elsewhere(run, tmp_path / f"from-{step}")
        shutil.copytree(run.output_dir, other.output_dir)
        train(other, resume=step)
        assert hash_of(other) == expected
        assert rows_without_times(other)[step:] == rows[step:]


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="times its kills for the cpu device")
def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    run = with_lora(sft_run(tmp_path / "killed", max_steps=40, save_steps=4, shuffle_dataset=True), lora_dropout=0.1)
    check_killed_run("sft", run_sft, run, (13,))


def test_grpo_with_a_reference_that_is_the_adapter_switched_off(tmp_path):
    """Rollout and training agree bit for bit, and the KL is that to the base model."""
    memory.reset_peaks()
    before = memory.report().get("weights", 0)
    run = with_lora(grpo_run(tmp_path / "run", beta=0.1, learning_rate=2e-2))
    run_grpo(run)
    rows = metrics_of(run)
    assert all(row["sampling/sampling_logp_difference/max"] == 0 for row in rows)
    # One model's weights.
    assert memory.report()["weights"] - before == load_model(MODEL).weights.flat.nbytes
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0
    policy, _ = load_policy(run, RunFolder(elsewhere(run, tmp_path / "other"), False), reference=True)
    assert policy.reference.adapter is None and policy.reference.weights is policy.model.weights
    assert policy.state_dict()["reference"] is None


def test_merged_weights_are_what_was_sampled_from(tmp_path):
    """The adapter reaches the engine: what a run draws changes as it learns."""
    run = with_lora(grpo_run(tmp_path / "run", learning_rate=5e-2, max_steps=12))
    run_grpo(run)
    rewards = [row["reward"] for row in metrics_of(run)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05


def test_the_training_forward_with_dropout_is_not_the_samplers(tmp_path, monkeypatch):
    """The gradient is then that of the forward's own log-probs, and the metrics show the difference."""
    combined, original = [], Policy.forward_backward
    monkeypatch.setattr(Policy, "forward_backward", lambda *a, **k: combined.append(1) or original(*a, **k))
    for dropout in (0.0, 0.3):
        combined.clear()
        run = with_lora(grpo_run(tmp_path / f"run-{dropout}", max_steps=2), lora_dropout=dropout)
        run_grpo(run)
        differences = [row["sampling/sampling_logp_difference/max"] for row in metrics_of(run)]
        # B begins as zeros: dropout has no effect before the first update.
        assert (differences[1] > 0) == (not combined) == (dropout > 0)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"init": "no/such/folder"}, "lora.init: no/such/folder/adapter_config.json: no such file"),
        ({"target_modules": ["q_proj", "query"]}, "lora.target_modules 'query' matches no linear layer"),
        ({"init": str(CURVES / "qv_rslora" / "init"), "r": 8}, "lora.r is 8, but that of the adapter"),
        (
            {"init": str(CURVES / "qv_rslora" / "init"), "r": 6, "lora_alpha": 12, "target_modules": ["q_proj"]},
            "lora.target_modules is ['q_proj'], but that of the adapter",
        ),
    ],
)
def test_sections_that_do_not_fit(tmp_path, lora, message):
    with pytest.raises(UserError) as error:
        run_sft(with_lora(sft_run(tmp_path / "run", max_steps=1), **lora))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_going_on_from_an_adapter(tmp_path):
    first = with_lora(sft_run(tmp_path / "first", max_steps=4, learning_rate=1e-2))
    run_sft(first)
    init = str(tmp_path / "first" / "final")
    second = with_lora(sft_run(tmp_path / "second", max_steps=1, learning_rate=0.0), init=init, lora_dropout=0.25)
    run_sft(second)
    assert hash_of(second) == hash_of(first)
    assert json.loads((tmp_path / "second" / "final" / "adapter_config.json").read_text())["lora_dropout"] == 0.25
    # The model of the first run is gone further than where it began.
    assert metrics_of(second)[0]["loss"] < metrics_of(first)[0]["loss"]


def test_an_adapter_is_no_model_to_train(tmp_path):
    run = dataclasses.replace(sft_run(tmp_path / "run"), model=str(CURVES / "all_linear" / "final"))
    with pytest.raises(UserError, match="an adapter folder, not a model's; set lora.init to it, or merge it"):
        run_sft(run)


def test_checkpoints_of_runs_with_and_without(tmp_path):
    plain, adapted = sft_run(tmp_path / "plain", max_steps=1), with_lora(sft_run(tmp_path / "adapted", max_steps=1))
    for run in (plain, adapted):
        run_sft(run)
    with pytest.raises(UserError, match="a checkpoint of a run with .lora., and this one has no such section"):
        run_sft(dataclasses.replace(adapted, lora=None), resume=True)
    with pytest.raises(UserError, match="a checkpoint of a run without .lora., and this one has such section"):
        run_sft(dataclasses.replace(plain, lora=adapted.lora), resume=True)
    with pytest.raises(ConfigError, match="has r 4 and scale 2, the configuration r 8 and scale 1"):
        run_sft(with_lora(adapted, r=8), resume=True)


def test_a_reference_that_would_move(tmp_path):
    run = with_lora(grpo_run(tmp_path / "run", beta=0.1, sync_ref_model=True))
    with pytest.raises(ConfigError, match="train.sync_ref_model: with .lora. the reference is the model without"):
        run_grpo(run)


def test_a_reward_model_trains_its_head_beside_the_adapter(tmp_path):
    """The head is trained whole and saved in PEFT's form; the folder is a reward, and resumes in the same bits."""
    run = with_lora(reward_run(tmp_path / "run", max_steps=6, save_steps=3, learning_rate=1e-2))
    run_reward(run)
    assert metrics_of(run)[-1]["loss"] < metrics_of(run)[0]["loss"]
    final = tmp_path / "run" / "final"
    config = json.loads((final / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    score = adapter_tensors(final)["base_model.model.score.weight"]
    assert score.shape == (1, 32) and np.abs(score).max() > 1e-3
    other = elsewhere(run, tmp_path / "resumed")
    shutil.copytree(run.output_dir, other.output_dir)
    run_reward(other, resume=3)
    assert hash_of(other) == hash_of(run)
    prompts, completions = ["what is 1+2? ", "what is 3+4? "], ["1+2=3.", "3+4=8."]
    scores = RewardModel(final, {}).score(prompts, completions, {})
    merged = str(tmp_path / "merged")
    assert cli.run(["merge", "--model", str(MODEL), "--adapter", str(final), "--output", merged]) == 0
    assert RewardModel(merged, {}).score(prompts, completions, {}) == pytest.approx(scores, abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3
    with pytest.raises(UserError, match="has no language-model head"):
        load_model(final)
    # A new head on an adapter that has none, and going on from one that has.
    for init, zeros in ((CURVES / "all_linear" / "final", True), (final, False)):
        again = with_lora(
            reward_run(tmp_path / "again", max_steps=1, learning_rate=0.0), init=str(init), r=16, lora_alpha=32
        )
        run_reward(again)
        kept = adapter_tensors(tmp_path / "again" / "final")["base_model.model.score.weight"]
        assert (not kept.any()) == zeros and (zeros or np.array_equal(kept, score))


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_preferences_compare_with_the_adapter_switched_off(tmp_path, kind):
    """Also where training goes on from an adapter: the rewards at its start are those of that adapter, not 0."""
    train, rewards = {"dpo": run_dpo, "kto": run_kto}[kind], []
    for name, lora in (
        ("new", {}),
        ("init", {"init": str(CURVES / "all_linear" / "final"), "r": 16, "lora_alpha": 32}),
    ):
        run = with_lora(preference_run(kind, tmp_path / name, max_steps=2), **lora)
        train(run)
        rewards.append([row["rewards/chosen"] for row in metrics_of(run)])
    assert rewards[0][0] == 0 and abs(rewards[1][0]) > 0.01


def test_from_python(tmp_path):
    config = rlnumba.LoraConfig(r=4, target_modules=["q_proj"])
    args = rlnumba.SFTConfig(output_dir=str(tmp_path), max_steps=1)
    trainer = rlnumba.SFTTrainer(str(MODEL), args, SFT_ROWS, peft_config=config)
    trainer.train()
    assert trainer.run.lora == config
    llm = rlnumba.LLM(tmp_path / "final")
    assert llm.model.adapter.lora.r == 4 and llm.tokenizer is not None
    assert llm.generate(["what is "], rlnumba.SamplingParams(max_tokens=2))[0].completions[0].token_ids


def test_the_section_is_optional(tmp_path):
    path = tmp_path / "run.toml"
    base = f'model = "{MODEL}"\noutput_dir = "x"\n[data]\ntrain = "rows.jsonl"\n'
    path.write_text(base)
    assert load_run("sft", path).lora is None
    assert "[lora]" not in to_toml(load_run("sft", path))
    assert load_run("sft", path, [("lora.r", "8")]).lora == LoraConfig(r=8)
    path.write_text(base + "[lora]\n")
    assert load_run("sft", path).lora == LoraConfig()
    for targets, expected in (
        ('"all-linear"', ["all-linear"]),
        ('["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
    ):
        path.write_text(f"{base}[lora]\ntarget_modules = {targets}\n")
        run = load_run("sft", path)
        assert run.lora.target_modules == expected
        again = tmp_path / "again.toml"
        again.write_text(to_toml(run))
        assert load_run("sft", again) == run
    assert load_run("sft", path, [("lora.target-modules", "k_proj,o_proj")]).lora.target_modules == ["k_proj", "o_proj"]
    for key, message in (("r = 0", "lora.r must be at least 1, got 0"), ("lora_dropout = 1.0", "lora.lora_dropout")):
        path.write_text(f"{base}[lora]\n{key}\n")
        with pytest.raises(ConfigError, match=message):
            load_run("sft", path)


@pytest.mark.slow
@pytest.mark.skipif(device.name() != "cpu", reason="an example for the CPU")
def test_the_example_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(GOLDEN.parent.parent)
    run = load_run("grpo", "examples/lora.toml", [("output_dir", str(tmp_path / "run"))])
    rewards = [row["reward"] for row in metrics_until(0.85, run_grpo, run)]
    assert np.mean(rewards[:3]) < 0.5 and np.mean(rewards[-5:]) > 0.85
