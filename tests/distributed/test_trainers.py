"""The other trainers on several ranks: the files of one rank's run, whatever their number."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from rlnumba.config import DeployConfig, LoraConfig, SFTConfig
from rlnumba.distributed import zero
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError, RankError
from rlnumba.kernels.nn import reduce
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import load_model
from rlnumba.trainers.core import Policy
from rlnumba.trainers.shared_rollout import part_of
from tests.close import assert_same_bits
from tests.distributed import in_threads
from tests.distributed.test_training import BATCH, files_of, train_on_device
from tests.trainers.runs import (
    MODEL,
    PAIR_ROWS,
    PREFERENCE_ROWS,
    grpo_run,
    ppo_run,
    preference_run,
    reward_run,
    rloo_run,
)

# Micro-batches of a step: three, so that two ranks do not divide them, and four ranks have nothing to do.
PAIRS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 6}
PAIRS |= {"max_steps": 4, "save_steps": 2, "shuffle_dataset": True}
# Two generations of four prompts with four completions, of which a step takes three micro-batches of four.
GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "global_batch_size": 16}
GROUPS |= {"max_steps": 3, "save_steps": 2, "report_to": []}


def run_of(kind, folder, num_ranks=1, lora=None, **options):
    """A Run of a few steps with checkpoints."""
    if kind in ("grpo", "rloo"):
        run = {"grpo": grpo_run, "rloo": rloo_run}[kind](folder, **GROUPS | options)
    elif kind == "reward":
        run = reward_run(folder, **PAIRS | options)
    else:
        run = preference_run(kind, folder, **PAIRS | options)
    return dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=num_ranks), lora=lora)


def train(kind, run, resume=False, processes=False):
    """Train, ranks in threads of this process or in processes; files_of the run, and the lines of completions.jsonl."""
    train_on_device(kind, run, resume, processes)
    path = pathlib.Path(run.output_dir) / "completions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return *files_of(run), lines


LORA = LoraConfig(r=4, lora_dropout=0.1)
ON_ROWS = {
    "reward": ("reward", {"center_rewards_coefficient": 0.01}),
    "reward, lora, evaluation": ("reward", {"lora": LORA, "eval_steps": 2, "data": {"eval": str(PAIR_ROWS)}}),
    "dpo": ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "dpo, precomputed, evaluation": (
        "dpo",
        {"precompute_ref_log_probs": True, "eval_steps": 2, "data": {"eval": str(PREFERENCE_ROWS["dpo"])}},
    ),
    "dpo, lora": ("dpo", {"lora": LORA, "use_weighting": True}),
    "kto": ("kto", {}),
}
ON_PROMPTS = {
    "grpo": ("grpo", {}),
    "grpo, reference": ("grpo", {"beta": 0.1, "num_iterations": 2, "generation_batch_size": 32}),
    "grpo, lora, evaluation": ("grpo", {"lora": LORA, "eval_steps": 2, "eval_on_start": True}),
    "grpo, entropy": (
        "grpo",
        {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0},
    ),
    "grpo, one micro-batch": (
        "grpo",
        {"per_device_train_batch_size": 16, "top_entropy_quantile": 0.5, "entropy_coef": 0.1, "loss_type": "bnpo"},
    ),
    "grpo, tokens": ("grpo", {"max_tokens_per_micro_batch": 100, "replay_buffer_size": 4, "top_k": 20}),
    "rloo": ("rloo", {"top_k": 20, "normalize_advantages": True}),
}


@pytest.mark.parametrize("case", [*ON_ROWS, *ON_PROMPTS])
def test_the_files_of_one_rank(tmp_path, case):
    kind, options = (ON_ROWS | ON_PROMPTS)[case]
    found, is_first = {}, case in ("dpo", "grpo")
    for num_ranks in (1, 2, 3, 4) if is_first else (1, 3):
        if case == "grpo, lora, evaluation":
            options["data"] = {"eval": str(tmp_path / "prompts.jsonl")}
        run = run_of(kind, tmp_path / str(num_ranks), num_ranks, **options)
        found[num_ranks] = train(kind, run, processes=is_first and num_ranks == 3)
    assert len(found[1][0]) >= 3 and len(found[1][1]) >= 3 and bool(found[1][2]) == (case in ON_PROMPTS)
    for others in found.values():
        assert others == found[1]


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, kind):
    """Of GRPO in the middle of a generation."""
    options = {"dpo": {"precompute_ref_log_probs": True}, "grpo": {"generation_batch_size": 32}}[kind]
    expected = train(kind, run_of(kind, tmp_path / "whole", max_steps=4, **options))
    for num_ranks, steps in ((3, 1), (2, 3), (1, 4)):
        run = run_of(kind, tmp_path / "parts", num_ranks, max_steps=steps, **options)
        found = train(kind, run, resume=steps > 1)
    assert found[0]["final/model.safetensors"] == expected[0]["final/model.safetensors"]
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("kind", ["reward", "grpo"])
def test_per_device_sizes_multiply_by_the_ranks(tmp_path, kind):
    """Without global_batch_size, as in TRL: two ranks with one pass each have the step of one with two."""
    options = {"global_batch_size": None, "max_steps": 2}
    steps = {"steps_per_generation": 2} if kind == "grpo" else {}
    one = train(kind, run_of(kind, tmp_path / "1", gradient_accumulation_steps=2, **options, **steps))
    steps = {"steps_per_generation": 1} if kind == "grpo" else {}
    assert train(kind, run_of(kind, tmp_path / "2", 2, **options, **steps)) == one


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
            # The CPU has no 16-bit forward.
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 40])
def test_parts_of_a_generation(world_size):
    """Every completion once, in the order of the prompts, with the index of its noise."""
    params = [SamplingParams(n=8), SamplingParams(n=8, first_index=8), SamplingParams(n=1), SamplingParams(n=5)]
    found = []
    for rank in range(world_size):
        part = part_of(params, rank, world_size)
        assert abs(sum(each.n for _, each in part) - 22 / world_size) < 1
        found += [(at, each.first_index + i) for at, each in part for i in range(each.n)]
    assert found == [(at, each.first_index + i) for at, each in enumerate(params) for i in range(each.n)]


def test_a_reward_that_fails_ends_the_run_with_its_line(tmp_path):
    with pytest.raises(RankError, match="fails_at_step_2 raised ZeroDivisionError: nothing left to divide"):
        train("grpo", run_of("grpo", tmp_path / "run", 2, reward="fails_at_step_2"), processes=True)


def test_what_is_for_one_gpu(tmp_path):
    with pytest.raises(ConfigError, match="train.dynamic_sampling is for one GPU, and deploy.num_train_gpus is 2"):
        run_of("grpo", tmp_path, 2, dynamic_sampling=True)
    with pytest.raises(ConfigError, match="rlnumba ppo is for one GPU, and deploy.num_train_gpus is 2"):
        dataclasses.replace(ppo_run(tmp_path), deploy=DeployConfig(num_train_gpus=2))
    with pytest.raises(ConfigError, match="steps_per_generation counts .* train.global_batch_size .16. set train.gen"):
        run_of("grpo", tmp_path, steps_per_generation=2)


def test_a_generation_of_all_ranks_has_whole_groups(tmp_path):
    options = {"global_batch_size": None, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    run = run_of("grpo", tmp_path, **options, num_generations=2)
    options = run.train.__dict__ | {"num_generations": 4}
    with pytest.raises(ConfigError, match=r"steps_per_generation \(2\) must be divisible by train.num_generations"):
        dataclasses.replace(run, train=type(run.train)(**options))
    of_two = {"train": type(run.train)(**options), "deploy": DeployConfig(num_train_gpus=2)}
    assert dataclasses.replace(run, **of_two).on_ranks().train.prompts_per_rollout == 1
    options["per_device_train_batch_size"] = 3
    with pytest.raises(
        ConfigError, match=r"x deploy.num_train_gpus \(6\) must be divisible by .*num_generations \(4\)"
    ):
        dataclasses.replace(run, train=type(run.train)(**options), deploy=DeployConfig(num_train_gpus=2))
