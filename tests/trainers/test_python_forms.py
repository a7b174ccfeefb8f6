"""Trainers as TRL's scripts use them: what `train` returns, what can be called then, arguments and datasets."""

import collections
import functools
import inspect
import json
import math
import pydoc
from pathlib import Path

import numpy as np
import pytest

import rlnumba
from rlnumba import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    rewards,
)
from rlnumba.config import LoraConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.lora import is_adapter
from rlnumba.model.transformer import load_model
from rlnumba.rewards import functions
from rlnumba.runs.callbacks import TrainerCallback
from tests.trainers.runs import MODEL, PREFERENCE_ROWS

ROWS = [{"prompt": f"what is {i}?", "completion": f" it is {i}"} for i in range(8)]
PROMPTS = [{"prompt": f"what is the number {i}? ", "answer": str(i)} for i in range(6)]
SMALL = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "gradient_checkpointing": False}
SMALL_GRPO = SMALL | {"num_generations": 4, "max_completion_length": 4, "max_steps": 1}


def sft_trainer(folder, train_dataset=ROWS, eval_dataset=None, **keys):
    return SFTTrainer(MODEL, SFTConfig(output_dir=str(folder), **SMALL | keys), train_dataset, eval_dataset)


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def test_after_training(tmp_path, capsys):
    trainer = sft_trainer(tmp_path / "run", eval_dataset=ROWS[:2], max_steps=2, eval_steps=1)
    assert (trainer.model, trainer.state.global_step, trainer.state.log_history) == (str(MODEL), 0, [])
    before = trainer.evaluate()
    with pytest.raises(UserError, match="save_model: there is no trained model"):
        trainer.save_model(tmp_path / "copy")
    found = trainer.train()
    history = trainer.state.log_history
    assert [row["step"] for row in history] == [1, 2] and trainer.state.global_step == found.global_step == 2
    assert found.training_loss == found.metrics["train_loss"] == sum(row["loss"] for row in history) / 2
    assert found.metrics["epoch"] == trainer.state.epoch == 1.0 and found.metrics["train_runtime"] > 0
    assert trainer.state.max_steps == 2
    # The trained model, which is also what the last evaluation of the run saw.
    after = trainer.evaluate()
    assert after["eval_loss"] == pytest.approx(history[-1]["eval_loss"]) and after["eval_loss"] < before["eval_loss"]
    assert trainer.evaluate(ROWS[:2]) == after and trainer.evaluate(ROWS[4:])["eval_loss"] != after["eval_loss"]
    assert Path(trainer.model) == tmp_path / "run" / "final"
    trainer.save_model(tmp_path / "copy")
    assert weights(tmp_path / "copy") == weights(trainer.model)
    assert load_model(tmp_path / "copy").config.vocab_size
    with pytest.raises(UserError, match="is the model that the run began with"):
        trainer.save_model(MODEL)
    trainer.save_model()
    assert f"the model is in {trainer.model}" in capsys.readouterr().err


def test_a_second_train_says_how_to_resume_and_keys_may_be_assigned_to(tmp_path, capsys):
    trainer = sft_trainer(tmp_path, max_steps=1, save_steps=1)
    trainer.train()
    trainer.args.max_steps = 2
    found = trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "step-1"))
    assert found.global_step == 2 and [row["step"] for row in trainer.state.log_history] == [1, 2]
    assert found.training_loss == trainer.state.log_history[1]["loss"]
    assert not list(tmp_path.glob("earlier-*"))
    trainer.args.max_steps = 1
    capsys.readouterr()
    trainer.train(resume_from_checkpoint=None)
    assert "--resume goes on with one (in Python train(resume_from_checkpoint=True))" in capsys.readouterr().err
    for path in ("nowhere/checkpoints/step-1", tmp_path / "checkpoints" / "best", MODEL):
        with pytest.raises(ConfigError, match="resume_from_checkpoint: .* is none of .*/checkpoints/step-N"):
            trainer.train(resume_from_checkpoint=path)
    assert trainer._resume_of(tmp_path) is True and trainer._resume_of(1) == 1


def test_what_is_left_of_a_run_that_was_interrupted(tmp_path):
    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    trainer = sft_trainer(tmp_path, max_steps=4)
    trainer.add_callback(Interrupts)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [row["step"] for row in trainer.state.log_history] == [1] and trainer.state.global_step == 1
    assert trainer.model == str(MODEL)


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
def test_strategies(tmp_path, strategy, capsys):
    keys = {"max_steps": 5, "save_steps": 2, "logging_steps": 3, "save_strategy": strategy, "eval_strategy": strategy}
    trainer = sft_trainer(tmp_path, eval_dataset=ROWS[:1], **keys)
    trainer.train()
    # Two steps make an epoch.
    saved, evaluated = {"no": ([], []), "steps": ([2, 4, 5], [3, 5]), "epoch": ([2, 4, 5], [2, 4, 5])}[strategy]
    steps = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == saved and (tmp_path / "final" / "model.safetensors").exists()
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == evaluated
    assert "warning" not in capsys.readouterr().err
    if strategy == "epoch":
        # The first step of a resumed run ends no epoch.
        trainer.args.max_steps = 7
        trainer.train(resume_from_checkpoint=True)
        assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [2, 4, 5, 6, 7]


def test_strategies_of_prompts(tmp_path):
    keys = {"max_steps": 5, "save_strategy": "no", "eval_strategy": "epoch"}
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL_GRPO | keys)
    trainer = GRPOTrainer(MODEL, "think_format_reward", args, PROMPTS[:2], PROMPTS[2:3])
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "eval_reward" in row] == [2, 4, 5]
    assert not (tmp_path / "checkpoints").exists() and weights(tmp_path / "final")


def test_strategies_that_contradict_other_keys():
    for keys, message in (
        ({"save_strategy": "best"}, "train.save_strategy must be one of no, steps, epoch, got 'best'"),
        ({"save_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end keeps a checkpoint"),
        ({"eval_strategy": "no", "early_stopping_patience": 1}, "early_stopping_patience needs evaluations"),
    ):
        with pytest.raises(ConfigError, match=message):
            SFTConfig(**keys)
    with pytest.raises(ConfigError, match='train.eval_strategy "steps" needs data.eval'):
        SFTTrainer(MODEL, SFTConfig(eval_strategy="steps"), ROWS)


def test_keys_are_assigned_to_as_the_constructor_takes_them(capsys):
    args = GRPOConfig(max_steps=3)
    args.max_steps, args.bf16, args.report_to = 6, False, "none"
    assert args == GRPOConfig(max_steps=6, report_to="none")
    args.use_vllm = True
    assert "train.use_vllm has no effect" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="train.learning_rate must be at least 0"):
        args.learning_rate = -1.0
    with pytest.raises(TypeError, match="GRPOConfig has no maxsteps; did you mean max_steps?"):
        args.maxsteps = 3
    assert args.max_steps == 6 and args.learning_rate == GRPOConfig().learning_rate


def test_near_keys():
    for make, message in (
        (lambda: GRPOConfig(maxsteps=3), "GRPOConfig has no maxsteps; did you mean max_steps?"),
        (lambda: LoraConfig(rank=3), "LoraConfig has no rank; did you mean r?"),
        (lambda: rlnumba.SamplingParams(max_token=3), "SamplingParams has no max_token; did you mean max_tokens?"),
        (lambda: GRPOConfig(max_prompt_length=9), "GRPOConfig has no max_prompt_length: .* data={'max_prompt_length'"),
        (
            lambda: GRPOConfig(vllm_gpu_memory_utilization=0.5),
            "give the trainer engine={'gpu_memory_utilization': ...}",
        ),
        (lambda: GRPOConfig(clip_ratio=0.3), "GRPOConfig has no clip_ratio: it is epsilon"),
        (
            lambda: SFTTrainer(MODEL, data={"promt_column": "a"}),
            "DataConfig has no promt_column; did you mean prompt_c",
        ),
        (lambda: SFTTrainer(MODEL, train_datset=ROWS), "SFTTrainer has no train_datset; did you mean train_dataset?"),
    ):
        with pytest.raises(TypeError, match=message):
            make()
    args = SFTConfig(model_init_kwargs={"torch_dtype": "torch.float32"})
    assert args.dtype == "float32"


def test_arguments_of_trls_trainers(tmp_path, capsys):
    trainer = SFTTrainer(model=MODEL, args=SFTConfig(), train_dataset=ROWS, processing_class=None, data_collator=None)
    assert trainer.args == SFTConfig() and not capsys.readouterr().err
    SFTTrainer(MODEL, train_dataset=ROWS, processing_class=object())
    warning = "rlnumba: warning: processing_class has no effect: the tokenizer is read from the model's folder\n"
    assert capsys.readouterr().err == warning
    DPOTrainer(model=str(MODEL), ref_model=str(MODEL), args=DPOConfig(), train_dataset=str(PREFERENCE_ROWS["dpo"]))
    for make, message in (
        (lambda: DPOTrainer(MODEL, ref_model="other"), "DPOTrainer takes no ref_model: the reference is `model` as"),
        (lambda: SFTTrainer(MODEL, formatting_func=str), "give train_dataset=.formatting_func"),
        (lambda: PPOTrainer(MODEL, reward_model="folder"), "give the reward model's folder as reward_funcs"),
        (lambda: SFTTrainer(object()), "SFTTrainer: model must be a folder or a hub id, got object; a model of transf"),
        (
            lambda: SFTTrainer(MODEL, GRPOConfig()),
            "args must be a rlnumba.SFTConfig, got rlnumba.trainers.trainer.GRPO",
        ),
        (lambda: SFTTrainer(MODEL, callbacks=Noted()), "callbacks must be a list, got"),
        (lambda: GRPOTrainer(MODEL, 3), "reward_funcs must be functions, names or folders of reward models, got int"),
        (lambda: SFTTrainer(MODEL, None, "a.jsonl", data={"train": "b.jsonl"}), "train_dataset and data=.* both given"),
    ):
        with pytest.raises(TypeError, match=message):
            make()


class Noted(TrainerCallback):
    """Nothing."""


class DatasetDict(dict):
    """As that of Hugging Face: a dict of datasets."""


class Dataset:
    """As that of Hugging Face: rows by index, and from the beginning whenever they are iterated over."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def __iter__(self):
        return (collections.OrderedDict(row) for row in self.rows)


class DataFrame:
    """As that of pandas: iteration gives the names of columns, and a comparison no bool."""

    def __iter__(self):
        return iter(["prompt", "completion"])

    def __eq__(self, other):
        raise ValueError("no bool")

    __hash__ = None


def test_datasets(tmp_path):
    forms = {"list": ROWS, "generator": (row for row in ROWS), "tuple": tuple(ROWS), "dataset": Dataset(ROWS)}
    for name, dataset in forms.items():
        trainer = sft_trainer(tmp_path / name, dataset, max_steps=1)
        for _ in range(2):  # a generator, too, is read for each call
            trainer._write_rows(trainer.run, trainer.datasets)
            lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
            assert [json.loads(line) for line in lines] == ROWS
    for dataset, message in (
        (
            DatasetDict(train=ROWS, test=ROWS),
            r"DatasetDict of train, test: give one .* train_dataset=datasets\['train'\]",
        ),
        (3, "train_dataset must be a file or rows, dicts in any iterable; got int"),
    ):
        with pytest.raises(TypeError, match=message):
            sft_trainer(tmp_path, dataset)
    with pytest.raises(TypeError, match=r"train_dataset: rows must be dicts, .* str 'prompt'; .*to_dict\(.records.\)"):
        sft_trainer(tmp_path, DataFrame()).train()
    with pytest.raises(UserError, match="train_dataset has no rows"):
        sft_trainer(tmp_path, []).train()
    assert SFTTrainer(MODEL, data={"train": "b.jsonl"}).run.data.train == "b.jsonl"


@pytest.mark.parametrize("value", [float("nan"), -math.inf, np.float32("nan")])
def test_rows_have_the_numbers_of_files(tmp_path, value):
    """One that is not finite is no missing value: the line of the file that is written from the rows is named."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    args = RewardConfig(output_dir=str(tmp_path), max_steps=1)
    trainer = RewardTrainer(MODEL, args, [pair, pair | {"margin": value}])
    with pytest.raises(UserError, match=r"train.jsonl:2: 'margin' must be a number from .*, got (nan|-inf)$"):
        trainer.train()


def test_rows_that_json_cannot_have_are_named(tmp_path):
    inside_itself = {}
    inside_itself["prompt"] = inside_itself
    for value, reason in ((10**5000, "Exceeds the limit"), ("\ud800", "surrogates"), (inside_itself, "recursion|Circ")):
        trainer = sft_trainer(tmp_path, [*ROWS, {"prompt": "a", "completion": "b", "more": value}], max_steps=1)
        with pytest.raises(
            UserError, match=rf"^train_dataset: row {len(ROWS) + 1} cannot be .* JSON: .*({reason})"
        ) as e:
            trainer.train()
        assert "\n" not in str(e.value)


class PeftConfig:
    """As PEFT's LoraConfig: an object with to_dict."""

    def __init__(self, **keys):
        self.keys = keys

    def to_dict(self):
        off = {"bias": "none", "init_lora_weights": True, "rank_pattern": {}, "megatron_core": "megatron.core"}
        return {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": None} | off | self.keys


def test_peft_config(tmp_path):
    for given, expected in (
        ({"r": 4, "target_modules": ["q_proj"]}, LoraConfig(r=4, target_modules=["q_proj"])),
        (
            PeftConfig(target_modules={"v_proj", "q_proj"}),
            LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
        ),
        (PeftConfig(r=2, target_modules="all-linear"), LoraConfig(r=2, lora_alpha=8)),
        (
            PeftConfig(use_rslora=True),
            LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True),
        ),
    ):
        assert SFTTrainer(MODEL, train_dataset=ROWS, peft_config=given).run.lora == expected
    for key, value, shown in (
        ("use_dora", True, "true"),
        ("layers_to_transform", 0, "0"),
        ("init_lora_weights", "gaussian", '"gaussian"'),
        ("init_lora_weights", False, "false"),
    ):
        with pytest.raises(UserError, match=f"^peft_config: {key} {shown} is not supported$"):
            SFTTrainer(MODEL, train_dataset=ROWS, peft_config=PeftConfig(**{key: value}))
    with pytest.raises(
        TypeError, match="peft_config must be a LoraConfig, a dict of its keys, or PEFT's LoraConfig; got"
    ):
        SFTTrainer(MODEL, train_dataset=ROWS, peft_config=3)
    args = SFTConfig(output_dir=str(tmp_path), max_steps=1, **SMALL)
    trainer = SFTTrainer(MODEL, args, ROWS, ROWS[:1], peft_config={"r": 2})
    trainer.train()
    assert is_adapter(trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.log_history[-1]["eval_loss"])


class Digits:
    """An object that is called, without a hash."""

    __slots__ = ("share",)
    __hash__ = None

    def __init__(self, share):
        self.share = share

    def __call__(self, completions, **columns):
        return [self.share * sum(c in "0123456789" for c in text) for text in completions]


def share_of_digits(completions, share, **columns):
    return Digits(share)(completions)


def test_rewards_of_any_callable(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL_GRPO)
    funcs = [
        lambda completions, **columns: [0.25] * len(completions),
        lambda completions, **columns: [0.5] * len(completions),
        functools.partial(share_of_digits, share=0.1),
        functools.partial(share_of_digits, share=0.2),
        Digits(0.3),
    ]
    trainer = GRPOTrainer(MODEL, funcs, args, PROMPTS, PROMPTS[:1])
    trainer.train()
    (row,) = trainer.state.log_history
    means = {name: value for name, value in row.items() if name.startswith("rewards/") and name.endswith("/mean")}
    module = __name__
    first = f"rewards/{module}:test_rewards_of_any_callable.<locals>.<lambda>"
    assert [*means] == [
        f"{first}/mean", f"{first}_2/mean", "rewards/functools:partial/mean", "rewards/functools:partial_2/mean",
        f"rewards/{module}:Digits/mean",
    ]  # fmt: skip
    assert [*means.values()][:2] == [0.25, 0.5]
    a, b, c = [*means.values()][2:]
    assert (b, c) == (pytest.approx(2 * a), pytest.approx(3 * a))
    # The functions themselves are called, too, where the trained model is evaluated.
    assert trainer.evaluate()["eval_reward"] == pytest.approx(row["eval_reward"])


def test_rewards_are_where_trl_has_them():
    assert rewards.accuracy_reward is functions.accuracy_reward
    assert rewards.get_soft_overlong_punishment is functions.get_soft_overlong_punishment


def test_help_and_dir():
    for name in rlnumba._names_of_trainers():
        assert name in dir(rlnumba)
        text = pydoc.plain(pydoc.render_doc(getattr(rlnumba, name)))
        if name.endswith("Trainer"):
            arguments = inspect.signature(getattr(rlnumba, name)).parameters
            for argument in arguments:
                assert f"{argument}:" in text or f"{argument}, " in text or f"{argument} " in text, (name, argument)
            assert (
                "train_dataset, eval_dataset: a file of rows" in text
                and "RowTrainer" not in text.split("Method")[0][200:]
            )
        else:
            assert "max_steps: int" in text
    assert "reward_funcs: a function" in rlnumba.PPOTrainer.__doc__ and "critic: keys" in rlnumba.PPOTrainer.__doc__
