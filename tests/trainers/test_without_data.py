"""Runs without data.train: an environment makes the prompts."""

import itertools
import re
from dataclasses import replace

import pytest

from rlnumba import GRPOConfig, GRPOTrainer
from rlnumba.config import DataConfig, EnvironmentConfig, RewardsConfig, load_run
from rlnumba.errors import ConfigError, MissingKey, UserError
from rlnumba.runs.planning.plan import Planner
from tests.trainers.runs import metrics_of
from tests.trainers.test_agents import CONFIG, SETTINGS, TOOLS, agent_run, completions_of, train
from tests.trainers.test_resume import hash_of


class Guess:
    """A number from 1 to 9, which its seed decides: the prompt is what reset returns."""

    def reset(self, seed):
        self.seed = seed
        return f"{seed % 90 + 10}*{seed % 80 + 10}"

    def get_reward(self):
        return float(self.seed % 2)


def guess_run(folder, **train):
    run = agent_run(folder, tools=False, **{"per_device_train_batch_size": 8} | train)
    factory = EnvironmentConfig(factory=f"{__name__}:Guess")
    return replace(run, data=DataConfig(), environment=factory, rewards=RewardsConfig())


def test_an_environment_makes_the_prompts(tmp_path):
    run = guess_run(tmp_path / "run")
    lengths, _ = Planner(run, False, None).prompts(None)
    train(run)
    lines, rows = completions_of(run), metrics_of(run)
    # A generation has two groups, each of one seed, and another one of others.
    groups = [lines[i : i + 4] for i in range(0, 16, 4)]
    assert len(lengths) == 2 and [line["step"] for line in lines] == [1] * 8 + [2] * 8
    assert all(len({line["prompt"][0]["content"] for line in group}) == 1 for group in groups)
    assert len({line["prompt"][0]["content"] for line in lines}) > 2
    assert all(line["prompt"][0]["role"] == "user" and len(line["prompt"]) == 1 for line in lines)
    assert [row["epoch"] for row in rows] == [1, 2]
    # With another size of a generation it goes on, and its rows are no others.
    wider = replace(run, train=replace(run.train, max_steps=3, per_device_train_batch_size=16))
    train(wider, resume=True)
    assert [line["step"] for line in completions_of(wider)] == [1] * 8 + [2] * 8 + [3] * 16


def test_resuming_without_data_ends_with_the_same_weights(tmp_path):
    run = guess_run(tmp_path / "whole", max_steps=2, num_iterations=2)
    train(run)
    parts = replace(run, output_dir=str(tmp_path / "parts"))
    train(replace(parts, train=replace(run.train, max_steps=1)))
    train(parts, resume=True)
    assert hash_of(run) == hash_of(parts)


def test_data_may_be_absent_with_an_environment_and_max_steps_alone(tmp_path, monkeypatch):
    run, missing = guess_run(tmp_path), MissingKey
    for changes, error, message in [
        ({"environment": EnvironmentConfig()}, missing, "^missing key data.train$"),
        ({"train": replace(run.train, max_steps=-1)}, missing, "^missing key train.max_steps: without data.train"),
        (
            {"environment": EnvironmentConfig(factories={"a": "b:C"})},
            missing,
            "data.train: environment.factories takes",
        ),
        ({"train": replace(run.train, difficulty_weights=[1.0, 1.0, 1.0])}, ConfigError, "train.difficulty_weights ch"),
    ]:
        with pytest.raises(error, match=message):
            replace(run, **changes)
    text = CONFIG.replace(f'train = "{TOOLS}/train.jsonl"', "")
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"run.toml: missing key data.train$"):
        load_run("grpo", tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="command line: missing key train.max_steps.*; give --train.max_steps VALUE"):
        load_run("grpo", [], [("model", "m"), ("environment.factory", "a.py:A")])
    monkeypatch.setattr(Guess, "reset", lambda self, answer: "")
    with pytest.raises(UserError, match=r"^a run without data.train: Guess.reset\(\) needs answer, and the row has"):
        train(run)


def test_an_environment_makes_the_prompts_in_python(tmp_path):
    keys = {"num_generations": 4, "per_device_train_batch_size": 4}
    args = GRPOConfig(output_dir=str(tmp_path), **SETTINGS | keys | {"max_steps": 1})
    trainer = GRPOTrainer(TOOLS / "model", args=args, environment_factory=Guess)
    trainer.train()
    assert len(completions_of(trainer.run)) == 4 and not (tmp_path / "train.jsonl").exists()
    with pytest.raises(ConfigError, match="missing key train.max_steps"):
        GRPOTrainer(TOOLS / "model", args=replace(args, max_steps=-1), environment_factory=Guess)


class Deals(Guess):
    """Another task for each member of a group."""

    made = itertools.count()

    def reset(self):
        self.seed = next(self.made)
        return f"{self.seed % 90 + 10}*11"


def test_members_of_a_group_with_other_prompts_are_named_once(tmp_path, capsys):
    run = guess_run(tmp_path / "run")
    train(replace(run, environment=EnvironmentConfig(factory=f"{__name__}:Deals")))
    found = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(found) == 1 and found[0].startswith("rlnumba: warning: a run without data.train: rewards are compared")
    assert re.search(r"other prompts, '(\d\d)\*11' and '(?!\1)\d\d\*11' \(env/group_prompts_differ_frac\)", found[0])
    assert metrics_of(run)[0]["env/group_prompts_differ_frac"] == 0.75


@pytest.mark.parametrize("make", [agent_run, guess_run], ids=["tools", "environment"])
def test_the_samples_at_the_end_are_episodes(make, tmp_path, capsys):
    """Those of the first step, unchanged, where nothing has been learned; seeds and tools as in the run."""
    run = make(tmp_path / "run", per_device_train_batch_size=32, max_steps=1, learning_rate=0.0)
    train(run)
    text = capsys.readouterr().err.partition("before training and after it, drawn with the same noise:\n")[2]
    shown = [line.strip().split(maxsplit=1)[-1] for line in text.splitlines()[:12]]
    assert len(shown) == 12 and shown[1::3] == shown[2::3]
    prompts = [line["prompt"][0]["content"] for line in completions_of(run) if line["index"] == 0]
    assert {each.strip("'") for each in shown[0::3]} <= set(prompts) and len(set(shown[0::3])) == 4
    assert any(re.search(r"^'multiply\(a=\d+, b=\d+\) -> (\d+) \1'$", each) for each in shown) == (make is agent_run)


def test_the_game_of_the_example(tmp_path, monkeypatch):
    monkeypatch.chdir(TOOLS.parents[1])
    options = {"output_dir": str(tmp_path / "run"), "train.max_steps": "2", "train.per_device_train_batch_size": "16"}
    run = load_run("grpo", "examples/guess.toml", options.items())
    train(run)
    for line in completions_of(run):
        guesses = [call["function"] for m in line["completion"] for call in m.get("tool_calls") or ()]
        answers = [message["content"] for message in line["completion"] if message["role"] == "tool"]
        assert line["prompt"] == [{"role": "user", "content": "Guess a number from 1 to 3."}]
        assert line["environment"] == "Guess" and {each["name"] for each in guesses} <= {"guess"}
        assert line["reward"] == line["Guess"] == float("right" in answers) and len(answers) <= 2
