"""A run whose inputs lie in its own folder, or go away while it runs."""

import shutil
from dataclasses import replace

import pytest

from rlnumba.config import DataConfig, EnvironmentConfig, LoraConfig, RolloutConfig, ToolsConfig, load_run
from rlnumba.errors import UserError
from rlnumba.model.transformer import load_model
from rlnumba.runs.run_inputs import PATH_KEYS, SetAside, earlier_folders, paths_of, with_paths
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import MODEL, grpo_run, ppo_run, preference_run, sft_run
from tests.trainers.test_resume import elsewhere, hash_of

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def first_stage(tmp_path):
    """A folder in which an sft run has ended."""
    run_sft(sft_run(tmp_path / "run", max_steps=1))
    return tmp_path / "run"


def test_a_second_stage_in_the_folder_of_the_first_ends_as_elsewhere(first_stage, capsys):
    """DPO from output_dir/final, which is its reference, too; and it can be resumed."""
    shutil.copytree(first_stage / "final", first_stage.parent / "copy")
    run = replace(preference_run("dpo", first_stage, max_steps=2, save_steps=1), model=str(first_stage / "final"))
    other = replace(elsewhere(run, first_stage.parent / "other"), model=str(first_stage.parent / "copy"))
    run_dpo(other)
    capsys.readouterr()
    run_dpo(run)
    now = first_stage / "earlier-1" / "final"
    assert f"{first_stage / 'final'}, which this run reads, is now {now}" in capsys.readouterr().err
    assert hash_of(run) == hash_of(other)
    assert {path.name for path in (first_stage / "final").iterdir()} >= FILES
    assert load_run("dpo", first_stage / "config.toml").model == str(now)
    # The model of the command is the result by now, and still the first stage's is meant.
    run_dpo(run, resume=1)
    assert hash_of(run) == hash_of(other)
    # So it is for a start that was killed before its first checkpoint, when nothing has its old name.
    shutil.rmtree(first_stage / "final")
    shutil.rmtree(first_stage / "checkpoints")
    for each in earlier_folders(first_stage)[1:]:
        shutil.rmtree(each)
    run_dpo(run, resume=True)
    assert hash_of(run) == hash_of(other)


def test_the_base_of_an_adapter_stays(first_stage):
    run = replace(sft_run(first_stage, max_steps=1), model=str(first_stage / "final"), lora=LoraConfig(r=2))
    run_sft(run)
    assert load_model(first_stage / "final").adapter is not None


def test_a_start_that_fails_leaves_the_earlier_run_where_it_is(first_stage):
    (first_stage / "damaged.jsonl").write_text("{")
    before = sorted(str(path) for path in first_stage.rglob("*"))
    data = {"train": str(first_stage / "damaged.jsonl")}
    with pytest.raises(UserError, match="damaged.jsonl:1: not JSON"):
        run_sft(replace(sft_run(first_stage, data), model=str(first_stage / "final")))
    assert sorted(str(path) for path in first_stage.rglob("*")) == before


def test_final_is_whole_where_the_model_goes_away(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    run = grpo_run(tmp_path / "run", max_steps=1)
    (tmp_path / "rewards_for_tests.py").write_text(
        "import pathlib, shutil\n"
        "def digits(completions, **columns):\n"
        f"    shutil.rmtree({str(tmp_path / 'model')!r}, ignore_errors=True)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    run_grpo(replace(run, model=str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()
    final = tmp_path / "run" / "final"
    assert {path.name for path in final.iterdir()} >= FILES
    assert (final / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert (final / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ messages }}"


def test_every_path_of_a_run_is_changed(tmp_path):
    run = ppo_run(tmp_path / "run", critic={"model": "c"})
    assert {key for key in PATH_KEYS if key[0] != "lora"} == {
        *[("", "model"), ("critic", "model"), ("data", "train"), ("data", "eval")],
        *[("rewards", "funcs"), ("train", "callbacks"), ("tools", "funcs")],
        *[("environment", "factory"), ("environment", "factories"), ("rollout", "func")],
        *[("teacher", "model"), ("teacher", "models")],
    }
    funcs = ["a/b.py:f", "out/final", "accuracy", "a.py:make(path='x.py:y')"]
    run = replace(
        run,
        data=DataConfig(train="a.jsonl, b.jsonl", eval="c.jsonl"),
        rewards=replace(run.rewards, funcs=funcs),
        lora=LoraConfig(init="l"),
        train=replace(run.train, callbacks=["d.py:C", "package.module:C"]),
        tools=ToolsConfig(funcs=["e.py:f"]),
        environment=EnvironmentConfig(factories={"game": "g.py:G"}),
    )
    found = with_paths(run, lambda path: f"new/{path}")
    assert (found.critic.model, found.lora.init) == ("new/c", "new/l")
    assert (found.data.train, found.data.eval) == ("new/a.jsonl,new/b.jsonl", "new/c.jsonl")
    assert found.rewards.funcs == ["new/a/b.py:f", "new/out/final", "new/accuracy", "new/a.py:make(path='x.py:y')"]
    assert found.train.callbacks == ["new/d.py:C", "new/package.module:C"]
    assert found.tools.funcs == ["new/e.py:f"] and found.environment.factories == {"game": "new/g.py:G"}
    single = replace(run, environment=EnvironmentConfig(factory="h.py:H"))
    assert with_paths(single, lambda path: f"new/{path}").environment.factory == "new/h.py:H"
    drawing = replace(run, rollout=RolloutConfig(func="r.py:f"), tools=ToolsConfig(), environment=EnvironmentConfig())
    assert with_paths(drawing, lambda path: f"new/{path}").rollout.func == "new/r.py:f"
    assert with_paths(run, str) == run
    # A comma in the name of a file that is there divides nothing.
    (tmp_path / "one, two.jsonl").touch()
    one = replace(run, data=DataConfig(train=str(tmp_path / "one, two.jsonl")))
    assert with_paths(one, lambda path: f"{path}.new").data.train == str(tmp_path / "one, two.jsonl.new")
    assert set(paths_of(run)) >= {str(MODEL), "c", "l", "a.jsonl", "b.jsonl", "a/b.py", "d.py"}


def test_where_an_input_is(tmp_path):
    for name in ("earlier-2/final", "earlier-10/final", "earlier-x/final", "data"):
        (tmp_path / name).mkdir(parents=True)
    moved = SetAside(tmp_path, {"checkpoints": "earlier-1/checkpoints"})
    assert moved(str(tmp_path / "checkpoints" / "step-3")) == str(tmp_path / "earlier-1" / "checkpoints" / "step-3")
    # Of several the newest; a file that is there is meant itself, and so is one elsewhere.
    assert moved(str(tmp_path / "final")) == str(tmp_path / "earlier-10" / "final")
    assert moved(str(tmp_path / "data")) == str(tmp_path / "data")
    assert moved.within(tmp_path) is None and moved.within(tmp_path / "a" / "b").as_posix() == "a/b"
    for other in (str(tmp_path), str(tmp_path.parent / "final"), "Qwen/Qwen3-0.6B", "accuracy"):
        assert moved(other) == other
