"""The trainers of the Python API train what the command line's runs train."""

import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

import rlnumba
from rlnumba import config
from rlnumba.config import load_run
from rlnumba.errors import ConfigError
from rlnumba.rewards import RewardError
from rlnumba.rewards.functions import think_format_reward
from rlnumba.runs.callbacks import TrainerCallback
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.reward import run_reward
from rlnumba.trainers.sft import run_sft
from rlnumba.trainers.trainer import (
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.trainers.runs import MODEL, PAIR_ROWS, SFT_ROWS

SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
}
PROMPTS = [{"prompt": f"what is the number {i}? ", "answer": str(i)} for i in range(6)]


def digits(completions, answer, share=1.0, **columns):
    return [share * sum(c in "0123456789" for c in text) for text in completions]


def final(folder):
    return (folder / "final" / "model.safetensors").read_bytes()


def test_grpo_is_the_run_of_the_command_line(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path / "python"), seed=7, reward_weights=[0.5, 0.0], **SMALL)
    rewards = [digits, "think_format_reward"]
    trainer = GRPOTrainer(MODEL, rewards, args, PROMPTS, data={"max_prompt_length": 22}, engine={"max_num_seqs": 3})
    trainer.train()
    # The file that it writes is one that the command line runs.
    run = load_run("grpo", tmp_path / "python" / "config.toml", [("output_dir", str(tmp_path / "file"))])
    assert (run.seed, run.rewards.weights, run.engine.max_num_seqs) == (7, [0.5, 0.0], 3)
    assert run.rewards.funcs == ["tests.trainers.test_trainer:digits", "think_format_reward"]
    run_grpo(run)
    assert final(tmp_path / "python") == final(tmp_path / "file")
    for name in ("completions.jsonl", "train.jsonl"):
        assert (tmp_path / "python" / name).is_file()
    trainer.train(resume_from_checkpoint=True)
    assert not list((tmp_path / "python").glob("earlier-*"))


class Noted(TrainerCallback):
    """Writes the steps, and the process, that it is called in."""

    def on_step_end(self, args, state, control, **kwargs):
        with open(pathlib.Path(args.output_dir) / "steps", "a", encoding="utf-8") as file:
            file.write(f"{state.global_step} {os.getpid()}\n")


@pytest.mark.usefixtures("quick_starts")
def test_several_gpus_and_generation_ahead_end_in_the_same_model(tmp_path):
    """Processes of the cpu device: two that train, and one that generates for one that trains."""
    sizes = SMALL | {"per_device_train_batch_size": 4, "global_batch_size": 8}
    options = {
        "one": {},
        "two": {"deploy": {"num_train_gpus": 2}},
        "ahead": {"deploy": rlnumba.DeployConfig(num_infer_gpus=1), "asynchronous": {"max_staleness": 0}},
    }
    evaluated = {}
    for name, keys in options.items():
        args = GRPOConfig(output_dir=str(tmp_path / name), **sizes, **keys)
        rewards = [digits, f"{__file__}:digits"]
        trainer = GRPOTrainer(MODEL, rewards, args, PROMPTS, PROMPTS[:2], callbacks=[Noted()])
        found = trainer.train()
        assert found.global_step == trainer.state.global_step == 2 and math.isfinite(found.training_loss)
        # Ranks share the held-out prompts, and call the functions that the trainer was given.
        evaluated[name] = trainer.evaluate()
        assert evaluated[name] == evaluated["one"]
        assert final(tmp_path / name) == final(tmp_path / "one")
        steps, processes = zip(*map(str.split, (tmp_path / name / "steps").read_text().splitlines()), strict=True)
        assert steps == ("1", "2") and ({*processes} != {str(os.getpid())}) == (name == "two")
    run = load_run("grpo", tmp_path / "ahead" / "config.toml")
    assert (run.deploy.num_infer_gpus, run.asynchronous.max_staleness) == (1, 0)


def test_what_other_processes_cannot_have(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), deploy={"num_train_gpus": 2}, **SMALL)
    with pytest.raises(ConfigError, match="num_train_gpus 2: .*<lambda> cannot be sent .*; define it at the top of a"):
        GRPOTrainer(MODEL, lambda completions, **columns: [0.0] * len(completions), args, PROMPTS).train()
    parts = {"num_train_gpus": 2, "tensor_parallel_size": 2}
    args = RLOOConfig(output_dir=str(tmp_path), deploy=parts, asynchronous={}, **SMALL)
    with pytest.raises(ConfigError, match="deploy.num_infer_gpus must be at least 1"):
        RLOOTrainer(MODEL, digits, args, PROMPTS)


def test_sft_is_the_run_of_the_command_line(tmp_path):
    rows = [json.loads(line) for line in SFT_ROWS.read_text().splitlines()]
    for name, dataset in (("rows", rows), ("file", str(SFT_ROWS)), ("path", SFT_ROWS)):
        args = SFTConfig(output_dir=str(tmp_path / name), max_steps=2, learning_rate=1e-3)
        SFTTrainer(MODEL, args, dataset, eval_dataset=(row for row in rows[:3])).train()
        assert final(tmp_path / name) == final(tmp_path / "rows")
    run = load_run("sft", tmp_path / "rows" / "config.toml", [("output_dir", str(tmp_path / "again"))])
    run_sft(run)
    assert final(tmp_path / "again") == final(tmp_path / "rows")


def test_reward_is_the_run_of_the_command_line(tmp_path):
    rows = [json.loads(line) for line in PAIR_ROWS.read_text().splitlines()]
    args = RewardConfig(output_dir=str(tmp_path / "rows"), seed=3, max_steps=2, max_length=64, head_init="normal")
    RewardTrainer(MODEL, args, rows, eval_dataset=PAIR_ROWS).train()
    run = load_run("reward", tmp_path / "rows" / "config.toml", [("output_dir", str(tmp_path / "again"))])
    assert (run.seed, run.train.head_init, run.data.eval) == (3, "normal", str(PAIR_ROWS))
    run_reward(run)
    assert final(tmp_path / "again") == final(tmp_path / "rows")
    assert RewardTrainer(MODEL).run.train == RewardConfig()


def test_arguments_of_a_trainer_are_in_its_run(tmp_path):
    trainer = SFTTrainer(MODEL)
    assert trainer.run == config.SFTRun(
        model=str(MODEL), output_dir="trainer_output", seed=42, train=SFTConfig(),
        data=config.DataConfig(train="trainer_output/train.jsonl"),
    )  # fmt: skip
    args = SFTConfig(output_dir="there", seed=3, max_steps=9)
    trainer = SFTTrainer("a/b", args, SFT_ROWS, [], {"prompt_column": "q"})
    assert trainer.run == config.SFTRun(
        model="a/b", output_dir="there", seed=3, train=args,
        data=config.DataConfig(train=str(SFT_ROWS), eval="there/eval.jsonl", prompt_column="q"),
    )  # fmt: skip
    args = GRPOConfig(output_dir="there", seed=3, reward_weights=[0.5, 2.0])
    rewards = ("think_format_reward", digits)
    sections = {"engine": {"max_num_seqs": 5}, "rewards": {"timeout": 7.0}}
    trainer = GRPOTrainer("a/b", rewards, args, "x.parquet", SFT_ROWS, **sections)
    funcs = ["think_format_reward", "tests.trainers.test_trainer:digits"]
    assert trainer.run == config.GRPORun(
        model="a/b", output_dir="there", seed=3, train=args, engine=config.EngineConfig(max_num_seqs=5),
        data=config.DataConfig(train="x.parquet", eval=str(SFT_ROWS)),
        rewards=config.RewardsConfig(funcs=funcs, weights=[0.5, 2.0], timeout=7.0),
    )  # fmt: skip
    assert trainer.reward_funcs == [think_format_reward, digits]
    default = GRPOTrainer(MODEL, digits).run
    assert (default.output_dir, default.seed, default.train, default.data.eval) == (
        "trainer_output", 42, GRPOConfig(), None
    )  # fmt: skip


def test_functions_without_a_name_of_their_own(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL | {"max_steps": 1})
    GRPOTrainer(MODEL, functools.partial(digits, share=0.1), args, PROMPTS).train()
    assert "rewards/functools:partial/mean" in (tmp_path / "metrics.jsonl").read_text()


def test_messages_of_a_typed_dataset_have_their_own_names_alone(tmp_path):
    """All objects of a column of datasets.Dataset have the names of all others, with null."""

    class Dataset(list):
        features = {}

    message = {"role": "user", "content": "what is the number 1? ", "name": None}
    rows = Dataset([{"prompt": [message], "tools": [{"a": None, "b": {"c": 1, "d": None}}], "info": {"e": None}}])
    for dataset, kept in ((rows, False), (list(rows), True)):
        trainer = SFTTrainer(MODEL, SFTConfig(output_dir=str(tmp_path)), dataset)
        trainer._write_rows(trainer.run, trainer.datasets)
        (row,) = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
        assert row["info"] == {"e": None}
        assert ("name" in row["prompt"][0]) is kept
        assert row["tools"] == (rows[0]["tools"] if kept else [{"b": {"c": 1}}])


def test_mistakes_are_named(tmp_path):
    def broken(completions, **columns):
        raise KeyError("no")

    with pytest.raises(ConfigError, match="train.learning_rate must be at least 0"):
        GRPOConfig(learning_rate=-1.0)
    with pytest.raises(ConfigError, match="rewards.weights must have one weight for each of the 1 funcs, got 2"):
        GRPOTrainer(MODEL, digits, GRPOConfig(reward_weights=[1.0, 2.0]), PROMPTS)
    with pytest.raises(RewardError, match="reward broken raised KeyError"):
        GRPOTrainer(MODEL, [broken], GRPOConfig(output_dir=str(tmp_path), **SMALL), PROMPTS).train()
    assert (tmp_path / "checkpoints" / "step-0").is_dir()


def test_names_are_found_without_importing_what_they_need():
    assert rlnumba.GRPOTrainer is GRPOTrainer and rlnumba.SFTConfig is SFTConfig
    code = "import sys, rlnumba; assert 'rlnumba.trainers' not in sys.modules and 'GRPOConfig' in rlnumba.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)
