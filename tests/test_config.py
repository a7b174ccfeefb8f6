"""Files and overrides to frozen dataclasses: defaults, strictness, spellings, the way back to TOML."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import rlnumba
from rlnumba.config import (
    DataConfig,
    DPOConfig,
    DPORun,
    EngineConfig,
    GRPOConfig,
    KTOConfig,
    LoraConfig,
    RewardsConfig,
    SFTConfig,
    SFTRun,
    load_run,
    to_toml,
)
from rlnumba.config.keys import KeyCondition, keys_of, needs_of, sections_of
from rlnumba.config.runs import RUNS
from rlnumba.config.schema import Run
from rlnumba.errors import ConfigError

ROOT = Path(__file__).parent.parent
BASE = 'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t.jsonl"\n'
GRPO = BASE + '[rewards]\nfuncs = ["gsm8k_reward"]\n'


@pytest.fixture
def load(tmp_path):
    def load(text, *overrides, kind="grpo"):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run(kind, path, overrides)

    return load


def test_grpo_defaults_are_trls():
    expected = {
        "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "beta": 0.0, "num_iterations": 1, "epsilon": 0.2,
        "epsilon_high": None, "delta": None, "loss_type": "dapo", "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "importance_sampling_level": "token", "mask_truncated_completions": False, "shuffle_dataset": True,
        "gradient_checkpointing": None, "logging_steps": 10, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 3.0, "lr_scheduler_type": "linear",
        "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0, "save_steps": 500, "save_total_limit": None, "generation_batch_size": None,
        "steps_per_generation": None, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
        "sync_ref_model": False, "log_completions": False, "num_completions_to_print": None,
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": None,
    }  # fmt: skip
    train = GRPOConfig()
    assert {name: getattr(train, name) for name in expected} == expected


def test_sft_defaults_are_trls():
    train = SFTConfig()
    assert (train.learning_rate, train.max_length, train.packing, train.packing_strategy) == (2e-5, 1024, False, "bfd")
    assert (train.completion_only_loss, train.assistant_only_loss) == (None, False)


def test_dpo_and_kto_defaults_are_trls():
    expected = {
        "learning_rate": 1e-6, "max_length": 1024, "truncation_mode": "keep_start", "precompute_ref_log_probs": False,
        "precompute_ref_batch_size": None, "loss_type": ["sigmoid"], "loss_weights": None, "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0, "beta": 0.1,
        "use_weighting": False, "discopop_tau": 0.05, "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512, "logging_steps": 10, "gradient_checkpointing": None,
    }  # fmt: skip
    assert {name: getattr(DPOConfig(), name) for name in expected} == expected
    of_kto = {"loss_type": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0, "beta": 0.1}
    of_kto |= {name: expected[name] for name in ("learning_rate", "max_length", "precompute_ref_log_probs")}
    assert {name: getattr(KTOConfig(), name) for name in of_kto} == of_kto


@pytest.mark.parametrize(
    "text, overrides, names",
    [
        ("", (), ["sigmoid"]),
        ('[train]\nloss_type = "ipo"\n', (), ["ipo"]),
        ('[train]\nloss_type = ["sigmoid", "sft"]\nloss_weights = [1, 0.5]\n', (), ["sigmoid", "sft"]),
        ("", [("train.loss_type", "hinge")], ["hinge"]),
        ("", [("train.loss_type", "sigmoid,bco_pair")], ["sigmoid", "bco_pair"]),
        ("", [("train.loss_type", '["sigmoid", "sft"]'), ("train.loss_weights", "0.8,0.2")], ["sigmoid", "sft"]),
    ],
)
def test_one_loss_type_or_a_list(load, text, overrides, names):
    run = load(BASE + text, *overrides, kind="dpo")
    assert run.train.loss_type == names
    assert load(to_toml(run), kind="dpo") == run


@pytest.mark.parametrize(
    "value, message",
    [
        ('"sigmiod"', "run.toml: train.loss_type must be one of sigmoid, .*, got 'sigmiod'"),
        ('["sigmoid", "x"]', "run.toml: train.loss_type must be one of sigmoid, .*, got 'x'"),
        ("3", "run.toml: train.loss_type must be a list of strings, got 3"),
    ],
)
def test_unknown_loss_types_are_named(load, value, message):
    with pytest.raises(ConfigError, match=message):
        load(BASE + f"[train]\nloss_type = {value}\n", kind="dpo")


def sizes_of(**train):
    """(passes, completions, prompts) of a generation."""
    plan = GRPOConfig(per_device_train_batch_size=4, **train).generation
    return plan.num_passes, plan.num_completions, plan.num_prompts


def test_batch_geometry():
    assert sizes_of(gradient_accumulation_steps=4, num_generations=8) == (4, 16, 2)
    assert sizes_of(steps_per_generation=2, num_generations=8) == (2, 8, 1)
    assert sizes_of(generation_batch_size=32) == (8, 32, 4)
    assert GRPOConfig(epsilon=0.1).clip_high == 0.1 and GRPOConfig(epsilon_high=0.28).clip_high == 0.28


def test_file_then_overrides(load):
    run = load(
        GRPO + "[train]\nlearning_rate = 1\nbeta = 0.5\n",
        ("train.learning-rate", "2e-5"),
        ("seed", "7"),
        ("output_dir", "p"),
        ("train.min_p", "0.1"),
        ("train.dynamic_sampling", None),
        ("train.mask_truncated_completions", "true"),
        ("rewards.funcs", "a.py:f, soft_overlong_punishment(max_completion_len=9, soft_punish_cache=3)"),
        ("rewards.weights", "[1, 0.5]"),
        ("data.chat_template_kwargs", '{"enable_thinking": false}'),
        ("engine.max_model_len", "64"),
    )
    assert (run.seed, run.output_dir, run.train.learning_rate, run.train.beta) == (7, "p", 2e-5, 0.5)
    assert run.train.min_p == 0.1 and run.train.dynamic_sampling and run.train.mask_truncated_completions
    assert run.rewards.funcs == ["a.py:f", "soft_overlong_punishment(max_completion_len=9, soft_punish_cache=3)"]
    assert run.rewards.weights == [1.0, 0.5] and run.data.chat_template_kwargs == {"enable_thinking": False}
    assert run.engine == EngineConfig(max_model_len=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.seed = 8


def test_none_unsets(load):
    text = GRPO + '[train]\nvllm_importance_sampling_clip_max = "None"\nepsilon_high = 0.3\n'
    run = load(text, ("train.epsilon_high", "None"))
    assert run.train.vllm_importance_sampling_clip_max is None and run.train.epsilon_high is None
    assert load(to_toml(run)) == run


def test_scale_rewards_takes_trls_booleans(load):
    assert load(GRPO + "[train]\nscale_rewards = false\n").train.scale_rewards == "none"
    assert load(GRPO, ("train.scale_rewards", "true")).train.scale_rewards == "group"
    assert load(GRPO, ("train.scale_rewards", "False")).train.scale_rewards == "none"


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("group_size = 4", "num_generations", 4),
        ("num_gens = 4", "num_generations", 4),
        ("batch_size = 16", "generation_batch_size", 16),
        ("clip_ratio = 0.1", "epsilon", 0.1),
        ("clip_ratio_high = 0.28", "epsilon_high", 0.28),
        ("keep_last = 2", "save_total_limit", 2),
        ("vllm_importance_sampling_cap = 2.0", "vllm_importance_sampling_clip_max", 2.0),
    ],
)
def test_other_spellings(load, line, name, value):
    assert getattr(load(f"{GRPO}[train]\n{line}\n").train, name) == value


def test_bounds_are_asked_for_only_where_they_are_used(load):
    text = (
        GRPO + '[train]\nvllm_importance_sampling_mode = "token_truncate"\nvllm_importance_sampling_clip_max = "None"\n'
    )
    with pytest.raises(ConfigError, match="vllm_importance_sampling_mode token_truncate needs"):
        load(text)
    load(text + "vllm_importance_sampling_correction = false\n")


def test_spellings_of_other_sections(load):
    text = GRPO + "[train]\nreward_weights = [2]\nmax_prompt_length = 9\nvllm_gpu_memory_utilization = 0.5\nseed = 3\n"
    run = load(text, ("num-gens", "4"), ("model_name_or_path", "n"), ("reward_funcs", "f.py:a"))
    assert (run.model, run.rewards.funcs) == ("n", ["f.py:a"])
    assert (run.rewards.weights, run.data.max_prompt_length) == ([2.0], 9)
    assert (run.engine.gpu_memory_utilization, run.seed, run.train.num_generations) == (0.5, 3, 4)
    assert load(BASE + "[train]\nbatch_size = 3\n", kind="sft").train.per_device_train_batch_size == 3


def test_later_files_win(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(BASE + "[train]\nmax_length = 5\npacking = true\n")
    second.write_text("seed = 9\n[train]\nmax_length = 6\n")
    run = load_run("sft", [first, second])
    assert (run.seed, run.train.max_length, run.train.packing) == (9, 6, True)


@pytest.mark.parametrize(
    "text, message",
    [
        (GRPO + "[train]\nlearning_rat = 1\n", "run.toml: unknown key train.learning_rat; did you mean train.learning"),
        (GRPO + "[trian]\nbeta = 1\n", r"run.toml: unknown section \[trian\]; did you mean \[train\]\?"),
        ("sed = 1\n" + GRPO, "run.toml: unknown key sed; did you mean seed?"),
        ("learning_rate = 1\n" + GRPO, "run.toml: unknown key learning_rate; did you mean train.learning_rate?"),
        (GRPO + '[train]\nbf16 = true\ndtype = "float32"\n', "train.dtype is given twice, as train.bf16"),
        (GRPO + "[train]\nmax_steps = 1.5\n", "run.toml: train.max_steps must be an integer, got 1.5"),
        (GRPO + "[train]\nmax_steps = true\n", "run.toml: train.max_steps must be an integer, got True"),
        (GRPO + '[train]\nbeta = "x"\n', "run.toml: train.beta must be a number, got 'x'"),
        (GRPO + "[train]\nbeta = nan\n", "run.toml: train.beta must be a finite number, got nan"),
        (GRPO + "[train]\ndynamic_sampling = 1\n", "run.toml: train.dynamic_sampling must be true or false, got 1"),
        (BASE + '[rewards]\nfuncs = "a"\n', "run.toml: rewards.funcs must be a list of strings, got 'a'"),
        (GRPO + "[train]\ntop_p = 0\n", r"run.toml: train.top_p must be above 0 and at most 1, got 0"),
        (GRPO + "[train]\ntemperature = -1\n", r"run.toml: train.temperature must be above 0, got -1"),
        (GRPO + "[train]\nnum_generations = 1\n", "run.toml: train.num_generations must be at least 2, got 1"),
        (GRPO + "[train]\nmax_steps = 0\n", "run.toml: train.max_steps must be -1 or at least 1, got 0"),
        (GRPO + '[train]\nloss_type = "x"\n', "train.loss_type must be one of grpo, bnpo, .*, got 'x'"),
        (GRPO + '[train]\nlr_scheduler_type = "x"\n', "train.lr_scheduler_type must be one of constant, .*, got 'x'"),
        (GRPO + '[train]\ndtype = "int8"\n', "train.dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (
            GRPO + "[train]\nnum_generations = 3\n",
            r"train.per_device_train_batch_size x steps_per_generation \(8\) must be divisible by train.num_gen",
        ),
        (
            GRPO + "[train]\ngeneration_batch_size = 24\nnum_generations = 16\n",
            r"run.toml: train.generation_batch_size \(24\) must be divisible by train.num_generations \(16\)",
        ),
        (
            GRPO + "[train]\ngeneration_batch_size = 12\n",
            r"generation_batch_size \(12\) must be divisible by train.per_device_train_batch_size \(8\)",
        ),
        (GRPO + "[train]\ngeneration_batch_size = 8\nsteps_per_generation = 1\n", "cannot both be set"),
        (GRPO + "[train]\ngroup_size = 4\nnum_generations = 4\n", "is given twice"),
        (GRPO + "[train]\nvllm_importance_sampling_clip_min = 3\n", r"must be below vllm_importance_sampling_clip_max"),
        (GRPO + "[train]\nsync_ref_model = true\n", "run.toml: train.sync_ref_model needs train.beta above 0"),
        (GRPO.replace('"gsm8k_reward"', ""), "run.toml: rewards.funcs must name at least one reward function"),
        (GRPO + "weights = [1, 2]\n", "run.toml: rewards.weights must have one weight for each of the 1 funcs, got 2"),
        (GRPO.replace('model = "m"\n', ""), "run.toml: missing key model"),
        (GRPO.replace('train = "t.jsonl"\n', ""), "run.toml: missing key data.train"),
        ("train = 3\n" + BASE, r"run.toml: \[train\] must be a table, got 3"),
        ("model = \n", r"run.toml: not valid TOML: .*line 1"),
    ],
)  # fmt: skip
def test_wrong_files_name_file_key_and_remedy(load, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(text)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option, text, message",
    [
        ("train.learning_rat", "1", "command line: unknown key train.learning_rat; did you mean train.learning_rate"),
        ("trian.beta", "1", "command line: unknown key trian.beta; did you mean train.beta"),
        ("learning_rate", "1", "command line: unknown key learning_rate; did you mean train.learning_rate"),
        ("train.max_steps", "1.5", "command line: train.max_steps must be an integer, got '1.5'"),
        ("train.learning_rate", None, "--train.learning_rate needs a value"),
        ("seed", None, "--seed needs a value"),
        ("train.top_k", "None", "command line: train.top_k must be an integer, got 'None'"),
        ("deploy.tensor_parallel_size", "0.5", "deploy.tensor_parallel_size must be an integer or \"auto\", got '0.5'"),
        ("train.dynamic_sampling", "yes", "command line: train.dynamic_sampling must be true or false, got 'yes'"),
        ("output_dir", "", "command line: output_dir must not be empty"),
        ("rewards.weights", "1,x", "command line: rewards.weights must be a list of numbers"),
        ("data.chat_template_kwargs", "{", "command line: data.chat_template_kwargs must be a table"),
        ("train.num_gens", "1", r"command line: train.num_gens \(train.num_generations\) must be at least 2, got 1"),
    ],
)
def test_wrong_overrides(load, option, text, message):
    with pytest.raises(ConfigError, match=message):
        load(GRPO, (option, text))


def test_sections_belong_to_trainers(load):
    with pytest.raises(ConfigError, match=r"unknown section \[rewards\]; it belongs to grpo"):
        load(GRPO, kind="sft")
    with pytest.raises(ConfigError, match="packing needs train.max_length"):
        load(BASE + '[train]\npacking = true\nmax_length = "None"\n', kind="sft")


@pytest.mark.parametrize(
    "kind, option, text, message",
    [
        ("dpo", "train.max_prompt_length", "3", "train.max_prompt_length {}"),
        ("sft", "data.max_prompt_length", "3", "data.max_prompt_length {}"),
        ("dpo", "data.answer_column", "a", "data.answer_column {}"),
        ("kto", "data.curriculum_column", "a", "data.curriculum_column {}"),
        ("reward", "engine.max_num_seqs", "3", "engine.max_num_seqs {}"),
        ("sft", "train.log_completions", "true", "train.log_completions {}"),
        ("dpo", "train.packing", "true", "train.packing is a key of sft"),
        ("sft", "deploy.num_infer_gpus", "1", "deploy.num_infer_gpus {}"),
        ("ppo", "data.completion_column", "c", "data.completion_column is a key of sft, distill and kto"),
        ("reward", "data.prompt_template", "c", "data.prompt_template is a key of sft, grpo, rloo, ppo and distill"),
        ("sft", "rewards.funcs", "f", "rewards.funcs {}"),
    ],
)
def test_keys_belong_to_trainers(load, kind, option, text, message):
    with pytest.raises(ConfigError) as caught:
        load(GRPO if kind == "ppo" else BASE, (option, text), kind=kind)
    expected = message.format("is a key of grpo, rloo, ppo and distill")
    assert str(caught.value) == f"command line: {expected}, not of {kind}"


def test_keys_belong_to_trainers_in_python_too():
    data = DataConfig(train="t.jsonl", max_prompt_length=3)
    with pytest.raises(
        ConfigError, match="^data.max_prompt_length is a key of grpo, rloo, ppo and distill, not of dpo$"
    ):
        DPORun(model="m", output_dir="o", data=data)
    with pytest.raises(
        ConfigError, match="^train.log_completions is a key of grpo, rloo, ppo and distill, not of sft$"
    ):
        SFTRun(model="m", output_dir="o", data=DataConfig(train="t"), train=SFTConfig(log_completions=True))


@pytest.mark.parametrize(
    "kind, overrides, warned",
    [
        ("sft", {"train.eval_steps": "5"}, "train.eval_steps has no effect: it needs data.eval"),
        ("sft", {"train.eval_steps": "5", "data.eval": "e.jsonl"}, None),
        ("sft", {"train.eval_steps": "5", "data.eval": "e.jsonl", "train.eval_strategy": "steps"}, None),
        *(
            (
                "sft",
                {"train.eval_steps": "5", "data.eval": "e.jsonl", "train.eval_strategy": strategy},
                "train.eval_steps has no effect: it needs steps or no value as train.eval_strategy\n",
            )
            for strategy in ("no", "epoch")
        ),
        (
            "sft",
            {"train.metric_for_best_model": "loss", "data.eval": "e.csv"},
            "it needs a value as train.load_best_model_at_end or train.early_stopping_patience",
        ),
        ("sft", {"train.packing_strategy": "wrapped"}, "train.packing_strategy has no effect: it needs train.packing"),
        ("grpo", {"train.vespo_k_pos": "3"}, "train.vespo_k_pos has no effect: it needs train.loss_type = vespo"),
        ("grpo", {"train.vespo_k_pos": "3", "train.loss_type": "vespo"}, None),
        ("grpo", {"train.vespo_k_pos": "2"}, None),
        ("grpo", {"train.ref_model_sync_steps": "2"}, "train.ref_model_sync_steps has no effect: it needs train.sync_"),
        ("grpo", {"eval.top_k": "2"}, "eval.top_k has no effect: it needs data.eval"),
        ("grpo", {"async.max_attempts": "2"}, "async.max_attempts has no effect: it needs deploy.num_infer_gpus"),
        ("dpo", {"train.discopop_tau": "0.1", "train.loss_type": "sigmoid,discopop"}, None),
        ("dpo", {"train.label_smoothing": "0.1"}, "it needs train.loss_type = robust or exo_pair or aot or aot_unp"),
        ("sft", {"data.split": "valid"}, "data.split has no effect: it needs a dataset of the hub as data.train\n"),
        ("sft", {"data.name": "main"}, "has no effect: it needs a dataset of the hub as data.train or data.eval\n"),
        ("sft", {"data.name": "main", "data.eval": "openai/gsm8k"}, None),
        ("sft", {"data.split": "valid", "data.train": "t.jsonl, openai/gsm8k"}, None),
        ("sft", {"data.split": "valid", "data.train": "tests/rows"}, "data.split has no effect"),
        ("sft", {"data.eval_split": "valid", "data.eval": "e.csv"}, "data.eval_split has no effect"),
        ("grpo", {"data.gym": "{size = 9}"}, "it needs a dataset of reasoning-gym as data.train or data.eval\n"),
        ("grpo", {"data.gym": "{size = 9}", "data.train": "gym:leg_counting"}, None),
        ("grpo", {"data.eval_gym": "{size = 9}", "data.eval": "e.jsonl"}, "data.eval_gym has no effect"),
        ("sft", {"train.run_name": "a", "train.report_to": "wandb"}, None),
        ("sft", {"train.run_name": "a"}, "train.run_name has no effect: it needs train.report_to = wandb or trackio"),
        ("grpo", {"train.vllm_importance_sampling_correction": "false", "train.vllm_importance_sampling_clip_max": "2"},
         "clip_max has no effect: it needs train.vllm_importance_sampling_correction"),
    ],
)  # fmt: skip
def test_a_key_that_others_keep_from_acting_is_a_warning(load, capsys, kind, overrides, warned):
    run = load(GRPO if kind == "grpo" else BASE, *overrides.items(), kind=kind)
    printed = capsys.readouterr().err
    assert (printed == "") if warned is None else (printed.startswith("rlnumba: warning: ") and warned in printed)
    assert load(to_toml(run), kind=kind) == run


def test_conditions_name_keys_that_there_are():
    for kind, run_class in RUNS.items():
        sections = {section: keys_of(of, run_class) for section, of in sections_of(run_class).items()}
        for keys in sections.values():
            for name, f in keys.items():
                for needs in needs_of(f.metadata):
                    of_one = (needs if isinstance(needs, str) else needs[0],)
                    for each in needs.keys if isinstance(needs, KeyCondition) else of_one:
                        section, _, needed = each.partition(".")
                        assert needed in sections[section], (kind, name)
                assert "of" not in f.metadata or Run.trainers_that(f.metadata["of"])


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="none.toml: no such config file"):
        load_run("sft", tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot read the config file: Is a directory"):
        load_run("sft", tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'model = "\xe9"')
    with pytest.raises(ConfigError, match="latin.toml: not valid TOML"):
        load_run("sft", tmp_path / "latin.toml")


def test_values_are_checked_without_a_file_too():
    with pytest.raises(ConfigError, match="train.top_p must be above 0"):
        GRPOConfig(top_p=0.0)
    with pytest.raises(ConfigError, match="rewards.timeout must be above 0"):
        RewardsConfig(funcs=["a"], timeout=0.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: rlnumba.RewardConfig("runs/a"), "train.learning_rate must be a number, got 'runs/a'"),
        (lambda: rlnumba.GRPOConfig(learning_rate="x"), "train.learning_rate must be a number, got 'x'"),
        (lambda: rlnumba.GRPOConfig(learning_rate=None), "train.learning_rate must be a number, got None"),
        (lambda: rlnumba.GRPOConfig(max_steps=3.5), "train.max_steps must be an integer, got 3.5"),
        (lambda: rlnumba.GRPOConfig(max_steps=True), "train.max_steps must be an integer, got True"),
        (lambda: rlnumba.GRPOConfig(shuffle_dataset="no"), "train.shuffle_dataset must be true or false, got 'no'"),
        (lambda: rlnumba.GRPOConfig(output_dir=3), "train.output_dir must be a string, got 3"),
        (lambda: rlnumba.GRPOConfig(generation_kwargs=[1]), "train.generation_kwargs must be a table, got [1]"),
        (lambda: rlnumba.GRPOConfig(reward_weights=["a"]), "train.reward_weights must be a list of numbers or"),
        (lambda: rlnumba.GRPOConfig(deploy=3), "train.deploy must be a DeployConfig or dict, got 3"),
        (lambda: LoraConfig(r="8"), "lora.r must be an integer, got '8'"),
        (lambda: DataConfig(train=["a", "b"]), "data.train must be a string or \"None\", got ['a', 'b']"),
        (lambda: SFTRun(model=None, data=DataConfig(train="a")), "model must be a string, got None"),
        (lambda: SFTRun(model="m", data=DataConfig(train="a"), seed="x"), "seed must be an integer, got 'x'"),
    ],
)
def test_values_of_another_type_name_their_key(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_values_that_stand_for_those_of_a_key(tmp_path):
    keys = {"max_steps": np.int64(3), "beta": 1, "reward_weights": (np.float32(0.5), 2), "scale_rewards": False}
    found = rlnumba.GRPOConfig(output_dir=tmp_path, **keys)
    values = [found.max_steps, found.beta, found.reward_weights, found.scale_rewards, found.output_dir]
    assert values == [3, 1.0, [0.5, 2.0], "none", str(tmp_path)]
    assert [type(each) for each in values] == [int, float, list, str, str]
    assert LoraConfig(target_modules="q_proj").target_modules == ["q_proj"]


@pytest.mark.parametrize("kind, text", [("grpo", GRPO), ("sft", BASE), ("dpo", BASE), ("kto", BASE)])
def test_resolved_toml_reads_back(load, kind, text):
    run = load(
        text,
        ("model", 'a "quoted" \\ \u00e9\x7f\t\n'),
        ("data.chat_template_kwargs", '{"a b" = [1, "x"], c = {d = true}}'),
        ("train.max_steps", "3"),
        ("train.warmup_steps", "2"),
        kind=kind,
    )
    assert load(to_toml(run), kind=kind) == run


def test_examples_are_valid():
    for path in sorted((ROOT / "examples").glob("*.toml")):
        # The trainer is in the command at the file's head.
        kind = re.search(r"rlnumba (\w+) --config", path.read_text())[1]
        load_run(kind, path)


@pytest.mark.parametrize("value", [-1, 0.5, float("nan"), "?", True, 10**30, [[1]], {"a": [float("inf")]}])
def test_every_wrong_value_is_one_line(value):
    """Whatever the type and the choices of a key."""
    for section, section_class in {pair for run_class in RUNS.values() for pair in sections_of(run_class).items()}:
        for name in keys_of(section_class) if section else ():
            try:
                section_class(**{name: value})
            except ConfigError as error:
                assert "\n" not in str(error)
                said = str(error)
                assert f"{section}." in said or f"[{section}]" in said, (name, said)


def test_every_key_is_read_by_some_code():
    """A key that nothing reads would be a promise not kept."""
    code = "\n".join(
        path.read_text() for path in (ROOT / "rlnumba").rglob("*.py") if path.parent.name not in ("config", "cli")
    )
    read = {*re.findall(r"\.(\w+)", code), *re.findall(r"(\w+)=", code)}
    accepted_without_effect = {"padding_free"}
    unread = [
        f"{section}.{name}"
        for run_class in RUNS.values()
        for section, section_class in sections_of(run_class).items()
        for name in keys_of(section_class)
        if name not in accepted_without_effect and name not in read
    ]
    # Read through properties of DeployConfig, TrainConfig, GRPOConfig, DistillConfig and PolicyLossConfig, of which
    # GenerationPlan and ReferenceMove are two.
    derived = {
        "deploy.gpus_per_node",
        "train.gradient_checkpointing",
        "train.generation_batch_size",
        "train.steps_per_generation",
        "train.epsilon_high",
        "train.vllm_structured_outputs_regex",
    }
    derived |= {f"train.vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_min", "clip_max")}
    derived |= {f"train.{name}" for name in ("num_iterations", "no_resampling_pass_rate", "max_gen_batches")}
    derived |= {
        "train.dynamic_sampling",
        "train.over_sampling_batch_size",
        "train.ref_model_mixup_alpha",
        "train.ref_model_sync_steps",
    }
    derived |= {"train.loss_top_k_of", "train.loss_add_tail"}
    derived |= {"train.lmbda", "train.rollout_is", "train.rollout_is_threshold", "async.importance_sampling_cap"}
    assert set(unread) <= derived, sorted(set(unread) - derived)


def test_the_reference_page_is_current():
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.reference(), "run python docs/make_configuration.py"


@pytest.mark.parametrize(
    "written, meant", [("adamw", "adamw_torch"), ("adamw_torch_fused", "adamw_torch"), ("adamw_bnb_8bit", "adamw_8bit")]
)
def test_names_of_optimizers_in_transformers(tmp_path, written, meant):
    file = tmp_path / "run.toml"
    file.write_text(f"""
        model = "m"
        output_dir = "o"
        [data]
        train = "rows.jsonl"
        [train]
        optim = "{written}"
        optimizer_offload = true
    """)
    train = load_run("sft", file).train
    assert (train.optim, train.offload_optimizer) == (meant, True)
    with pytest.raises(ConfigError, match="train.optim must be one of adamw_torch, adamw_bf16, adamw_8bit, got 'sgd'"):
        load_run("sft", file, [("train.optim", "sgd")])


def test_activation_memory_takes_precedence():
    config = SFTConfig(gradient_checkpointing=True)
    assert config.kept_activations == "minimal"
    assert SFTConfig(gradient_checkpointing=False).kept_activations == "full"
    assert SFTConfig(gradient_checkpointing=True, activation_memory="selective").kept_activations == "selective"
    assert SFTConfig().kept_activations == "full" and SFTConfig().chooses_activations
    assert not config.chooses_activations and not SFTConfig(activation_memory="full").chooses_activations
    with pytest.raises(ConfigError, match=r'recompute_num_layers \(2\) goes with .* "selective", got "auto"'):
        SFTConfig(recompute_num_layers=2)
    with pytest.raises(ConfigError, match='goes with train.activation_memory "selective", got "minimal"'):
        SFTConfig(recompute_num_layers=2, gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="train.activation_memory must be one of auto, full, selective, minimal"):
        SFTConfig(activation_memory="some")


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("train.learning_rate", "1" + "0" * 400, "(must be a finite number, got inf|must be a number, got)"),
        ("train.learning_rate", "1e999", "must be a finite number, got inf"),
        ("train.learning_rate", "nan", "must be a finite number, got nan"),
        ("train.max_steps", "1" + "0" * 30, "must be an integer of 64 bits, got 10{30}$"),
        ("train.max_steps", "7" * 5000, "must be an integer, got"),
        ("rewards.weights", "[nan]", "must be a finite number, got nan"),
        ("rewards.weights", "[1" + "0" * 400 + "]", "must be a list of numbers or"),
        ("train.learning_rate", "1e300", r"must be a number that float32 holds, got 1e\+300$"),
        ("train.epsilon", "1e-60", "must be a number that float32 holds, got 1e-60$"),
        ("rewards.weights", "[-1e300]", r"must be a number that float32 holds, got -1e\+300$"),
        ("data.chat_template_kwargs", "{deep = [{a = nan}]}", "must have finite numbers, got nan in deep$"),
        ("train.generation_kwargs", "{min_p = -inf}", "must have finite numbers, got -inf in min_p$"),
        ("data.gym", "{size = 1e999}", "must have finite numbers, got inf in size$"),
    ],
)
def test_numbers_that_no_option_takes_are_one_line(tmp_path, key, text, said):
    """On the command line and in a file."""
    path = tmp_path / "run.toml"
    base = 'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t"\n'
    path.write_text(base)
    section, name = key.split(".")
    written = tmp_path / "numbers.toml"
    written.write_text(f"{base}[{section}]\n{name} = {text}\n")
    for arguments in ((path, [(key, text)]), (written, [])):
        with pytest.raises(ConfigError) as caught:
            load_run("grpo", *arguments)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match=said):
        load_run("grpo", path, [(key, text)])
