"""Every trainer on several ranks: the files of one rank's run, whatever their number."""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import shutil
from functools import partial

import numpy as np
import pytest

from rlnumba.config import DeployConfig, LoraConfig, QuantizationConfig, SFTConfig, TeacherConfig
from rlnumba.errors import ConfigError, RankError, UserError
from rlnumba.kernels.nn import reduce
from rlnumba.model.config import SCORE_HEAD
from rlnumba.model.lora import Adapter, save_adapter
from rlnumba.model.transformer import load_model
from rlnumba.parallel import launch, zero
from rlnumba.parallel.communicator import check_equal
from rlnumba.reporting import metrics
from rlnumba.runs import gradients, ranks
from rlnumba.runs.policy import Policy
from rlnumba.runs.ranks import facts_of, train_on_ranks
from tests.close import assert_same_bits
from tests.model.test_lora import random_adapter
from tests.parallel import in_threads
from tests.parallel.test_training import BATCH, files_of
from tests.trainers.runs import (
    GOLDEN,
    MODEL,
    PAIR_ROWS,
    PREFERENCE_ROWS,
    SFT_ROWS,
    distill_run,
    grpo_run,
    ppo_run,
    preference_run,
    reward_run,
    rloo_run,
    sft_run,
    with_column,
    with_completions,
)

ONE_BACKWARD = {"gradient_accumulation_steps": 1, "report_to": []}
# Micro-batches of a step: five, so that no number of ranks divides them.
ROWS = ONE_BACKWARD | {"per_device_train_batch_size": 2, "global_batch_size": 10, "max_steps": 3, "save_steps": 2}
# Three, so that two ranks do not divide them, and of four ranks one has nothing to do.
PAIRS = ONE_BACKWARD | {"per_device_train_batch_size": 2, "global_batch_size": 6, "max_steps": 3, "save_steps": 2}
PAIRS |= {"shuffle_dataset": True}
# Generations of four prompts with four completions each, of which a step takes four micro-batches of four.
GROUPS = ONE_BACKWARD | {"per_device_train_batch_size": 4, "global_batch_size": 16, "max_steps": 2, "save_steps": 1}
# Batches of twelve completions, on which two optimizer steps of three micro-batches are taken.
BATCHES = ONE_BACKWARD | {"per_device_train_batch_size": 4, "global_batch_size": 12, "max_steps": 2, "save_steps": 1}
BATCHES |= {"num_ppo_epochs": 2, "num_mini_batches": 1}


def run_of(
    kind, folder, num_ranks=1, lora=None, model=None, zero_stage=2, tensor_parallel_size=1, quantization=None, **options
):
    """A Run of a few steps with checkpoints."""
    if kind == "sft":
        run = sft_run(folder, **ROWS | options)
    elif kind == "ppo":
        run = ppo_run(folder, **BATCHES | options)
    elif kind in ("grpo", "rloo"):
        teacher = options.pop("teacher", {})
        run = {"grpo": grpo_run, "rloo": rloo_run}[kind](folder, **GROUPS | options)
        if teacher:
            run = dataclasses.replace(run, teacher=TeacherConfig(**teacher))
    elif kind == "distill":
        run = distill_run(folder, **GROUPS | options)
    elif kind == "reward":
        run = reward_run(folder, **PAIRS | options)
    else:
        run = preference_run(kind, folder, **PAIRS | options)
    has_teachers = kind in ("grpo", "distill") and run.teacher.models
    if kind == "distill" or has_teachers:
        run = with_completions(run)
    if has_teachers:
        # Of five rows those of three are one teacher's.
        run = with_column(run, "teacher", lambda row: "aabab"[int(row["answer"]) % 5])
    deploy = DeployConfig(num_train_gpus=num_ranks, zero_stage=zero_stage, tensor_parallel_size=tensor_parallel_size)
    run = dataclasses.replace(run, deploy=deploy, lora=lora, quantization=quantization)
    return run if model is None else dataclasses.replace(run, model=str(model))


# Parameters of a segment of the gradient's norm, here as small as that every rank has a part of the optimizer's state.
SEGMENT = 4096


def train_each(communicator, runs, resume=False, fold_by_layer_bytes=gradients.FOLD_BY_LAYER_BYTES, segment=SEGMENT):
    """Train [(kind, Run)] one after the other in the processes of the same ranks, of which starting takes longest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "SEGMENT", segment)
        patch.setattr(gradients, "FOLD_BY_LAYER_BYTES", fold_by_layer_bytes)
        # Drawing curves takes longer than such a run.
        patch.setattr(metrics, "plot", lambda *arguments: None)
        for kind, run in runs:
            train = getattr(importlib.import_module(f"rlnumba.trainers.{kind}"), f"run_{kind}")
            train(run.resolved(), resume, communicator=communicator)


def train_all(runs, num_ranks, resume=False, group_size=1, **options):
    """Train [(kind, Run)] on so many ranks, or groups of them: what each has written, see `written`. options:
    train_each's."""
    launch(partial(train_each, **options), num_ranks, runs, resume, timeout_s=120, group_size=group_size)
    return [written(run) for _, run in runs]


def written(run):
    """files_of a run, and the lines of completions.jsonl."""
    path = pathlib.Path(run.output_dir) / "completions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return *files_of(run), lines


def untied_model(folder):
    """A model with a head of its own, and with the tokenizer of the other."""
    if not folder.exists():
        shutil.copytree(GOLDEN / "models" / "qwen3_untied", folder)
        for path in MODEL.glob("tokenizer*"):
            shutil.copy(path, folder)
    return folder


def adapter_that_scores(folder):
    """The folder of an adapter with a score head."""
    if not folder.exists():
        adapter = random_adapter(load_model(MODEL, heads=SCORE_HEAD), r=4).adapter
        adapter.base = str(MODEL)
        save_adapter(adapter, folder)
    return folder


LORA = LoraConfig(r=4, lora_dropout=0.1)
# The frozen base of an adapter in 4 and in 8 bits.
NF4, INT8 = ({"lora": LORA, "quantization": QuantizationConfig(type=each, group_size=8)} for each in ("nf4", "int8"))
UNTIED = {"optim": "adamw_8bit", "gradient_checkpointing": True}
DFT = {"loss_type": "dft", "packing": True, "eval_steps": 2, "data": {"eval": str(SFT_ROWS)}}
ENTROPY = {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0}
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 1}
LEARNS = {"max_steps": 3, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
EVALUATES = {"eval_steps": 1, "eval_on_start": True, "data": "prompts"}


def cut(**options):
    """The options of one rank, and of ranks that have a part of the model each while they generate."""
    return options, options | {"tensor_parallel_size": 2}


WITHOUT_GLOBAL = {"global_batch_size": None, "gradient_accumulation_steps": 1}
# Options of a run by case; a pair where those of one rank are others.
CASES = {
    "sft": {},
    "sft, untied": UNTIED,
    "sft, lora": {"lora": LORA},
    "sft, model alone": {"save_only_model": True},
    "ppo, lora, model alone": {"lora": LORA, "save_only_model": True},
    "sft, dft and evaluation": DFT,
    "sft, fewer micro-batches than ranks": {"global_batch_size": 4},
    "reward": {"center_rewards_coefficient": 0.01},
    "reward, lora, evaluation": {"lora": LORA, "eval_steps": 2, "data": {"eval": str(PAIR_ROWS)}},
    "dpo": {"sync_ref_model": True, "ref_model_sync_steps": 1},
    "dpo, precomputed, evaluation": {
        "precompute_ref_log_probs": True, "eval_steps": 2, "data": {"eval": str(PREFERENCE_ROWS["dpo"])}
    },
    "dpo, lora": {"lora": LORA, "use_weighting": True},
    "kto": {},
    "grpo": {},
    "grpo, reference": {"beta": 0.1, "num_iterations": 2, "generation_batch_size": 32},
    "grpo, lora, evaluation": {"lora": LORA, "eval_steps": 2, "eval_on_start": True, "data": "prompts"},
    "grpo, entropy": ENTROPY,
    "rloo, teacher": {"teacher": {"model": str(GOLDEN / "tiny-qwen3"), "adv_tau": 1.0}},
    "grpo, teacher": {"teacher": {"model": str(GOLDEN / "tiny-qwen3"), "adv_tau": 1.0}},
    "grpo, one micro-batch": {
        "per_device_train_batch_size": 16, "top_entropy_quantile": 0.5, "entropy_coef": 0.1, "loss_type": "bnpo"
    },
    "grpo, tokens": {"max_tokens_per_micro_batch": 100, "replay_buffer_size": 4, "top_k": 20},
    "grpo, dynamic sampling": {"dynamic_sampling": True, "over_sampling_batch_size": 5, "reward": "one_for_even"},
    "rloo": {"top_k": 20, "normalize_advantages": True},
    "distill": {"beta": 0.5, "lmbda": 0.6, "learning_rate": 1e-2},
    "sft, zero 3": {"zero_stage": 3},
    "sft, zero 3, untied, evaluation": {"zero_stage": 3, **UNTIED, "eval_steps": 2, "data": {"eval": str(SFT_ROWS)}},
    "reward, zero 3, evaluation": {"zero_stage": 3, "eval_steps": 2, "data": {"eval": str(PAIR_ROWS)}},
    "dpo, zero 3, moving": {"zero_stage": 3, **MOVING},
    "dpo, zero 3": {"zero_stage": 3, "eval_steps": 2, "data": {"eval": str(PREFERENCE_ROWS["dpo"])}},
    "kto, zero 3": {"zero_stage": 3},
    "grpo, zero 3, reference": {"zero_stage": 3, "beta": 0.1, "num_iterations": 2, "generation_batch_size": 32},
    "rloo, zero 3, evaluation": {"zero_stage": 3, **EVALUATES, **LEARNS},
    "distill, zero 3": {"zero_stage": 3, "beta": 0.5, "learning_rate": 1e-2},
    "sft, zero 3, lora, evaluation": {
        "zero_stage": 3, "lora": LORA, "gradient_checkpointing": True, "eval_steps": 2, "data": {"eval": str(SFT_ROWS)}
    },
    "reward, zero 3, lora": {"zero_stage": 3, "lora": LORA},
    "dpo, zero 3, lora": {"zero_stage": 3, "lora": LORA},
    "grpo, zero 3, lora, evaluation": {
        "zero_stage": 3, "lora": LORA, "beta": 0.1, "num_iterations": 2, "generation_batch_size": 32, **EVALUATES,
        **LEARNS,
    },
    "sft, zero 3, nf4, evaluation": {
        "zero_stage": 3, **NF4, "gradient_checkpointing": True, "eval_steps": 2, "data": {"eval": str(SFT_ROWS)}
    },
    "dpo, zero 3, int8": {"zero_stage": 3, **INT8},
    "reward, zero 3, nf4": {"zero_stage": 3, **NF4},
    "grpo, zero 3, nf4, evaluation": {
        "zero_stage": 3, **NF4, "beta": 0.1, "num_iterations": 2, "generation_batch_size": 32, **EVALUATES, **LEARNS
    },
    "distill, zero 3, several": {"zero_stage": 3, "max_tokens_per_micro_batch": 100, "learning_rate": 1e-2},
    "grpo, zero 3, several": {"zero_stage": 3, "learning_rate": 1e-3},
    "distill, zero 3, several, taught": {"zero_stage": 3, "lmbda": 0.3, "seq_kd": True, **LEARNS},
    "distill, zero 3, taught": {"zero_stage": 3, **NF4, "lmbda": 0.0, "seq_kd": True, **LEARNS},
    "distill, zero 3, int8": {"zero_stage": 3, **INT8, "beta": 0.5, "learning_rate": 1e-2},
    "rloo, cut, evaluation": cut(**EVALUATES, **LEARNS),
    "grpo, cut, lora": cut(lora=LORA, num_iterations=2, generation_batch_size=32, **LEARNS),
    "grpo, cut, zero 3, reference": cut(zero_stage=3, beta=0.1, num_iterations=2, generation_batch_size=32, **MOVING),
    "grpo, cut, zero 3, lora, evaluation": cut(zero_stage=3, lora=LORA, **EVALUATES, **LEARNS),
    "grpo, cut, nf4, evaluation": cut(**NF4, **EVALUATES, **LEARNS),
    "rloo, cut, zero 3, int8": cut(zero_stage=3, **INT8, **LEARNS),
    "grpo, cut, dynamic sampling": cut(dynamic_sampling=True, over_sampling_batch_size=5, reward="one_for_even"),
    "ppo, cut": cut(kl_coef=0.0),
    "ppo": {"use_score_scaling": True, "kl_coef": 0.0},
    "ppo, shared": {"critic": {"shared": True}, "max_tokens_per_micro_batch": 100, "whiten_rewards": True},
    "ppo, lora, filtered": {"lora": LORA, "top_k": 20, "entropy_coef": 0.01, "critic": {"learning_rate": 1e-3}},
    "ppo, zero 3, evaluation": {"zero_stage": 3, **EVALUATES, **LEARNS},
    "ppo, zero 3, shared": {"zero_stage": 3, "critic": {"shared": True}, "max_tokens_per_micro_batch": 100},
    "ppo, zero 3, lora": {"zero_stage": 3, "lora": LORA, "entropy_coef": 0.01, **LEARNS},
    "ppo, zero 3, nf4, shared": {"zero_stage": 3, **NF4, "critic": {"shared": True}, "kl_coef": 0.0, **LEARNS},
    "ppo, zero 3, critic of an adapter": {"zero_stage": 3, **LEARNS},
    "ppo, cut, zero 3": cut(zero_stage=3, **LEARNS),
    "sft, per device": (WITHOUT_GLOBAL | {"gradient_accumulation_steps": 2}, WITHOUT_GLOBAL),
    "grpo, per device": (
        WITHOUT_GLOBAL | {"gradient_accumulation_steps": 2, "steps_per_generation": 2},
        WITHOUT_GLOBAL | {"steps_per_generation": 1},
    ),
}  # fmt: skip
# Per-device sizes multiply by the number of ranks, as in TRL: two with one pass each have the step of one with two.
ON_TWO = ["sft", "dpo", "grpo", "grpo, dynamic sampling", "ppo", "sft, per device", "grpo, per device"]
# On two ranks there is none left for one of them in the last round of DPO's three micro-batches.
ON_TWO += ["sft, zero 3, lora, evaluation", "dpo, zero 3, lora", "grpo, zero 3, lora, evaluation"]
ON_TWO += ["dpo, zero 3, int8", "grpo, zero 3, nf4, evaluation"]
ON_TWO += ["ppo, zero 3, evaluation", "ppo, zero 3, shared", "ppo, zero 3, lora", "ppo, zero 3, critic of an adapter"]
ON_TWO += ["distill, zero 3, several", "distill, zero 3, several, taught"]
CUT = [case for case in CASES if ", cut" in case]
ON_THREE = [case for case in CASES if case not in CUT and not case.endswith("per device")]
ON_FOUR = ["sft", "grpo", "grpo, dynamic sampling", "sft, zero 3", "dpo, zero 3"]


def runs_of_cases(cases, folder, num_ranks):
    """[(kind, Run)] of cases, each in a folder of its own in that of so many ranks."""
    runs = []
    for case in cases:
        options = CASES[case]
        if isinstance(options, tuple):
            options = options[num_ranks > 1]
        place = folder / str(num_ranks) / case.replace(", ", "-").replace(" ", "-")
        if options.get("data") == "prompts":
            options = options | {"data": {"eval": str(place.parent / "prompts.jsonl")}}
        if "untied" in case:
            options = options | {"model": untied_model(folder / "model")}
        kind = case.partition(",")[0]
        if case.endswith("critic of an adapter"):
            options = options | {"critic": {"model": str(adapter_that_scores(folder / "critic"))}}
        if "several" in case:
            options = options | {"teacher": {"models": {"a": str(MODEL), "b": str(untied_model(folder / "model"))}}}
        elif kind == "distill":
            options = options | {"teacher": {"model": str(untied_model(folder / "model"))}}
        runs.append((kind, run_of(kind, place, num_ranks, **options)))
    return runs


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("num_ranks, cases", [(2, ON_TWO), (2, CUT), (4, CUT), (3, ON_THREE), (4, ON_FOUR)])
def test_the_files_of_one_rank(tmp_path, num_ranks, cases):
    expected = train_all(runs_of_cases(cases, tmp_path, 1), 1)
    found = train_all(runs_of_cases(cases, tmp_path, num_ranks), num_ranks, group_size=2 if cases == CUT else 1)
    for case, own, others in zip(cases, expected, found, strict=True):
        assert len(own[0]) >= 3 and len(own[1]) >= 2, case
        assert bool(own[2]) == case.startswith(("grpo", "rloo", "ppo", "distill")), case
        assert others == own, case


@pytest.mark.usefixtures("quick_starts")
def test_the_files_of_one_rank_where_layers_are_folded_one_by_one(tmp_path):
    """As the gradients of large models are; of five micro-batches or three, so that a rank has none in a round."""
    cases = ["sft, untied", "reward, lora, evaluation", "dpo", "grpo, reference", "ppo", "ppo, shared"]
    expected = train_all(runs_of_cases(cases, tmp_path, 1), 1)
    found = train_all(runs_of_cases(cases, tmp_path, 2), 2, fold_by_layer_bytes=0)
    for case, own, others in zip(cases, expected, found, strict=True):
        assert others == own, case


@pytest.mark.usefixtures("quick_starts")
def test_runs_go_on_with_another_number_of_ranks(tmp_path):
    """Of GRPO in the middle of a generation; of KTO and of PPO, with its critic, on one rank with other weights on it
    than before; of an adapter with its base in parts or whole."""
    options = {
        "kto": {"zero_stage": 3},
        "sft": {},
        "dpo": {"precompute_ref_log_probs": True},
        "grpo": {"generation_batch_size": 32, "zero_stage": 3, "beta": 0.1, **MOVING},
        "rloo": {"generation_batch_size": 32},
        "grpo, cut": {"generation_batch_size": 32},
        "ppo": {"zero_stage": 3},
        "sft, lora": {"lora": LORA, "zero_stage": 3},
        "grpo, lora": {"generation_batch_size": 32, "lora": LORA, "zero_stage": 3},
        "sft, lora, nf4": {"zero_stage": 3, **NF4},
    }

    def runs(folder, num_ranks, steps):
        kept = {"max_steps": steps, "save_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        return [
            (kind, run_of(kind, tmp_path / folder / case.replace(", ", "-"), num_ranks, **own | kept | size))
            for case, own in options.items()
            for kind in [case.partition(",")[0]]
            for size in [{"tensor_parallel_size": 2} if ", cut" in case and num_ranks == 2 else {}]
        ]

    expected = train_all(runs("whole", 1, 3), 1)
    for num_ranks, steps in ((3, 1), (2, 2), (1, 3)):
        found = train_all(runs("parts", num_ranks, steps), num_ranks, resume=steps > 1)
    for case, own, others in zip(options, expected, found, strict=True):
        name = "final/adapter_model.safetensors" if "lora" in case else "final/model.safetensors"
        assert others[0][name] == own[0][name], case
        assert others[1:] == own[1:], case


def trained_adapter(communicator):
    """The values to save of a bfloat16 adapter after two steps of five micro-batches."""
    model = load_model(MODEL, "float32")
    model.adapter = Adapter.new(model.config, LoraConfig(r=3), "bfloat16", "base", 0)
    policy = Policy(model, SFTConfig(learning_rate=1e-2, **BATCH), communicator=communicator)
    for _ in range(2):
        policy.zero_grad()
        gradients = np.random.default_rng(0).standard_normal((5, *policy.grads.flat.shape), np.float32)
        total = np.zeros_like(gradients[0])
        for k in policy.each_micro_batch(range(5)):
            # The CPU has no 16-bit forward, nor then a backward.
            policy.begin_gradients()
            total = policy.grads.flat if communicator is not None else total
            np.add(total, gradients[k], out=total)
        policy.grads.flat[...] = total
        policy.step(1e-2)
    policy.gather_adapter()
    return model.adapter.values, model.adapter.flat


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_16_bit_adapter_is_saved_from_all_ranks(monkeypatch, world_size):
    """Rank 0 has the float32 values of every rank's part of the optimizer, which are in small segments here."""
    monkeypatch.setattr(reduce, "SEGMENT", 256)
    monkeypatch.setattr(zero, "PIECE_SEGMENTS", 2)
    values, flat = trained_adapter(None)
    assert values.dtype == np.float32 and not np.array_equal(values, flat.astype(np.float32))
    found = in_threads.run(trained_adapter, world_size)
    assert_same_bits(found[0][0], values)
    for _, own in found:
        assert_same_bits(own, flat)


@pytest.mark.parametrize("count, waiting", [(1, 1), (3, 1), (5, 0), (4, 0)])
def test_the_first_step_that_leaves_ranks_waiting_is_named(capfd, count, waiting):
    def steps(communicator):
        policy = Policy(load_model(MODEL, "float32"), SFTConfig(**BATCH), communicator=communicator)
        for _ in range(2):
            policy.num_micro_batches = count
            policy.say_who_waits()

    in_threads.run(steps, 2)
    lines = [line for line in capfd.readouterr().err.splitlines() if "for 2 ranks" in line]
    # In threads, the others are not silent.
    assert len(lines) == 2 * waiting
    assert all(re.search(rf"{count} micro-batch(es)? of a step for 2 ranks: 1 of them waits", line) for line in lines)


@pytest.mark.usefixtures("quick_starts")
def test_a_reward_that_fails_ends_the_run_with_its_line(tmp_path):
    """And with a checkpoint of the last complete step, as on one rank."""
    options = {"reward": "fails_at_step_2", "max_steps": 3, "save_steps": 10}
    line = r"^\S+: reward fails_at_step_2 raised ZeroDivisionError: nothing left to divide"
    with pytest.raises(RankError, match=line):
        train_on_ranks(run_of("grpo", tmp_path / "run", 2, **options), False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


@pytest.mark.parametrize(
    "section, change, line",
    [
        (
            "rewards",
            ["accuracy"],
            "rewards.funcs: no built-in reward is called 'accuracy'; did you mean accuracy_reward",
        ),
        ("rewards", ["no/such.py:f"], "rewards.funcs: no such file: no/such.py"),
        ("rewards", ["mine.py:brevty"], "rewards.funcs: mine.py has no 'brevty'; did you mean brevity?"),
        ("rewards", ["typo.py:f"], "rewards.funcs: typo.py cannot be imported: SyntaxError: invalid syntax"),
        ("rewards", ["no_module.inside:f"], "rewards.funcs: there is no module no_module.inside"),
        ("train", ["mine.py:Reprt"], "train.callbacks: mine.py has no 'Reprt'; did you mean Report?"),
        ("lora", "nothing", "lora.init: nothing/adapter_config.json: no such file"),
        ("tools", ["mine.py:brevty"], "tools.funcs: mine.py has no 'brevty'; did you mean brevity?"),
        ("environment", "no/such.py:f", "environment.factory: no such file: no/such.py"),
        ("rollout", "typo.py:f", "rollout.func: typo.py cannot be imported: SyntaxError: invalid syntax"),
        # Their modules are run, in a process of its own.
        *(
            (section, value, f"{key}: late.py cannot be imported: ZeroDivisionError: division by zero (line 2)")
            for section, key, value in (
                ("rewards", "rewards.funcs", ["mine.py:brevity", "late.py:f"]),
                ("train", "train.callbacks", ["late.py:f"]),
                ("tools", "tools.funcs", ["late.py:f"]),
                ("environment", "environment.factory", "late.py:f"),
                ("rollout", "rollout.func", "late.py:f"),
            )
        ),
        ("rewards", ["ends.py:f"], "rewards.funcs: the process that imports ends.py:f ended with exit code 3"),
        ("rewards", ["mine.py:fails()"], "rewards.funcs: mine.py:fails() raised KeyError: 'a'"),
        ("rewards", ["mine.py:taken(k=1)"], "rewards.funcs: mine.py:taken(k=1): lru_cache() got an unexpected"),
        ("rewards", ["mine.py:brevity", "mine.py:taken(maxsize=1)", "dynamic.py:f", "gsm8k_reward"], None),
        ("train", ["mine.py:Report", "mine.py:assigned", "json.decoder:JSONDecoder"], None),
        ("tools", ["mine.py:brevity"], None),
        ("environment", "mine.py:Report", None),
        ("environment", "openenv:http://nowhere", None),
        ("rollout", "mine.py:brevity", None),
    ],
)
def test_what_a_key_names_is_looked_for_before_ranks_begin(tmp_path, monkeypatch, capfd, section, change, line):
    monkeypatch.chdir(tmp_path)
    mine = ["from functools import lru_cache as taken", "assigned = len", "def brevity(): ...", "class Report: ..."]
    mine += [
        "def fails(): return {}['a']",
        "import os",
        "open('imported', 'a').write(f'{os.getpid()} ')",
        "print('Hi')",
    ]
    texts = {"mine": "\n".join(mine), "typo": "def f(:", "dynamic": "globals()['f'] = len"}
    texts |= {"late": "def f(): ...\n1 / 0", "ends": "f = len\nimport os; os._exit(3)"}
    for name, text in texts.items():
        pathlib.Path(f"{name}.py").write_text(text)
    begun = []
    monkeypatch.setattr(ranks, "launch", lambda *arguments, **options: begun.append("ranks") or [None])
    monkeypatch.setattr(ranks, "start_compiling", lambda run: begun.append("compiler"))
    run = run_of("grpo", tmp_path / "run", 2)
    key = {"rewards": "funcs", "train": "callbacks", "lora": "init", "tools": "funcs"}
    key = key.get(section) or {"environment": "factory", "rollout": "func"}[section]
    changed = LoraConfig() if section == "lora" else getattr(run, section)
    run = dataclasses.replace(run, **{section: dataclasses.replace(changed, **{key: change})})
    if line is None:
        train_on_ranks(run, False)
        assert begun == ["compiler", "ranks"]
        imported = pathlib.Path("imported").read_text().split() if "mine" in str(change) else []
        assert str(os.getpid()) not in imported and len(imported) == ("mine" in str(change))
        assert capfd.readouterr().out == ""
        return
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        train_on_ranks(run, False)
    assert begun == []


def test_passes_of_a_generation_are_counted_on_each_gpu(tmp_path):
    with pytest.raises(ConfigError, match="steps_per_generation counts .* train.global_batch_size .16. set train.gen"):
        run_of("grpo", tmp_path, steps_per_generation=2)


def test_a_mini_batch_of_all_ranks_has_whole_micro_batches(tmp_path):
    options = {"global_batch_size": None, "per_device_train_batch_size": 4, "num_mini_batches": 4}
    run_of("ppo", tmp_path, 3, **options)
    with pytest.raises(ConfigError, match=r"size \(4\) must divide the mini-batch of 6 .*; deploy.num_train_gpus is 6"):
        run_of("ppo", tmp_path, 6, **options)
    with pytest.raises(ConfigError, match=r"num_mini_batches \(5\) must divide the batch of 12 .*global_batch_size"):
        run_of("ppo", tmp_path, num_mini_batches=5)


def test_ranks_with_other_keys_or_versions_are_named(tmp_path):
    run = run_of("ppo", tmp_path, 2)

    def check(communicator, other):
        check_equal(communicator, facts_of(run) | (other if communicator.rank else {}))

    in_threads.run(check, 2, {})
    for other, message in (
        ({"train.learning_rate": 1.0}, "rank 1 has train.learning_rate 1.0 and rank 0 0.002: all ranks"),
        ({"seed": 1}, "rank 1 has seed 1 and rank 0 42"),
        ({"numba": "0.1"}, "rank 1 has numba '0.1' and rank 0 '"),
    ):
        with pytest.raises(ConfigError, match=message):
            in_threads.run(check, 2, other)


def test_a_generation_of_all_ranks_has_whole_groups(tmp_path):
    options = {"global_batch_size": None, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    run = run_of("grpo", tmp_path, **options, num_generations=2)
    options = run.train.__dict__ | {"num_generations": 4}
    with pytest.raises(ConfigError, match=r"steps_per_generation \(2\) must be divisible by train.num_generations"):
        dataclasses.replace(run, train=type(run.train)(**options))
    of_two = {"train": type(run.train)(**options), "deploy": DeployConfig(num_train_gpus=2)}
    assert dataclasses.replace(run, **of_two).resolved().train.generation.num_prompts == 1
    options["per_device_train_batch_size"] = 3
    with pytest.raises(
        ConfigError, match=r"x deploy.num_train_gpus \(6\) must be divisible by .*num_generations \(4\)"
    ):
        dataclasses.replace(run, train=type(run.train)(**options), deploy=DeployConfig(num_train_gpus=2))
