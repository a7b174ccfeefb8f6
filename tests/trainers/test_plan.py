"""The planner: its regions are those that runs report, and a failed allocation names one of its switches."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import AsyncConfig, CriticConfig, DeployConfig, LoraConfig, QuantizationConfig, to_toml
from rlnumba.errors import UserError
from rlnumba.kernels.attention.sm90_backward import backward_nbytes
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.kernels.nn import reduce
from rlnumba.model import transformer
from rlnumba.model.blocks import projection
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import Adapter
from rlnumba.model.shard import Shard
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.model.weights import write_json
from rlnumba.parallel import launch
from rlnumba.runs.micro_batch import target_bucket_of
from rlnumba.runs.planning import plan, planned
from rlnumba.runs.planning.plan import Planner, amount
from rlnumba.runs.planning.savings import advise, savings, with_changes
from rlnumba.runs.planning.text import describe
from rlnumba.runs.policy import Policy
from rlnumba.runtime import arena, device, memory
from rlnumba.runtime.shapes import ShapeOnly, shapes_only
from rlnumba.trainers.dpo import run_dpo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.kto import run_kto
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.reward import run_reward
from rlnumba.trainers.rloo import run_rloo
from rlnumba.trainers.sft import run_sft
from tests.trainers.runs import MODEL, PAIR_ROWS, grpo_run, ppo_run, preference_run, reward_run, rloo_run, sft_run

pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="compares with the arrays of the cpu device")
GIB, ROOT = 1 << 30, pathlib.Path(__file__).parents[2]
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 36,
}


def taken(train, run):
    """What a run takes by region: its own report, whatever the process held before."""
    with memory.separate_report() as regions:
        train(run)
        return {region: peak for region, (_, peak) in regions.items()}


def assert_planned(run, train):
    assert_taken(Planner(run, False, 16 * GIB).plan(), taken(train, run))


def assert_taken(plan, found):
    planned = dict(plan.regions)
    planned["weights"] += planned.pop("reference", 0) + planned.pop("teacher", 0)
    planned["host"] = plan.host
    found.setdefault("host", 0)
    assert {name for name, nbytes in planned.items() if nbytes} == {name for name, nbytes in found.items() if nbytes}
    for name, nbytes in found.items():
        assert abs(planned[name] - nbytes) <= 0.05 * nbytes, f"{name}: {planned[name]} planned, {nbytes} taken"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "optim": "adamw_8bit"},
        {"activation_memory": "selective"},
        {"activation_memory": "selective", "recompute_modules": ["norm", "swiglu"]},
        {"optimizer_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
        {"packing": True, "max_length": 48, "shuffle_dataset": True},
        {"offload_optimizer": True, "optim": "adamw_bf16", "loss_type": "dft", "per_device_train_batch_size": 3},
    ],
    ids=str,
)
def test_sft_takes_what_was_planned(tmp_path, options):
    assert_planned(sft_run(tmp_path / "run", max_steps=4, **options), run_sft)


@pytest.mark.parametrize("options", [{}, {"beta": 0.04, "gradient_checkpointing": True, "num_iterations": 2}], ids=str)
def test_grpo_takes_what_was_planned(tmp_path, options):
    # What these prompts begin with is shared by several, and the plan is for prompts that differ.
    assert_planned(grpo_run(tmp_path / "run", max_steps=4, share_prefixes="never", **options), run_grpo)


@pytest.mark.parametrize("options", [{"max_staleness": 2}, {"max_staleness": 4, "queue_maxsize": 40}], ids=str)
def test_completions_ahead_of_training_take_what_was_planned(tmp_path, options):
    """Those of as many generations as the staleness allows, and as there is room for."""
    run = grpo_run(tmp_path / "run", max_steps=6, num_prompts=10, share_prefixes="never")
    assert_planned(dataclasses.replace(run, asynchronous=AsyncConfig(**options)), run_grpo)


def with_prompts_that_differ(run, words=1):
    """A GRPO run with prompts of one length, no two of which begin alike."""
    prompts = [f"{number} " + words * "is the number of what? " for number in range(10, 26)]
    rows = [json.dumps({"prompt": prompt, "answer": 1}) for prompt in prompts]
    pathlib.Path(run.data.train).write_text("\n".join(rows))
    return run


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["all", "adapter"])
@pytest.mark.parametrize("options", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}], ids=str)
def test_completions_that_share_their_prompt_take_what_was_planned(tmp_path, monkeypatch, options, lora):
    """Also the operators, of which a plan for a GPU counts the arrays: rows, sequences with prefixes, and logits."""
    taken, computed, hidden = [], [], Policy._hidden

    def take_step(*arguments):
        taken.append(planned.take_step(*arguments))
        return taken[-1]

    def noted(policy, model, batch, tape=None):
        computed.append((len(batch.input_ids), len(batch.cu_seqlens) - 1, len(batch.rows)))
        return hidden(policy, model, batch, tape)

    run = with_prompts_that_differ(grpo_run(tmp_path / "run", max_steps=4, **options))
    run = dataclasses.replace(run, lora=lora)
    monkeypatch.setattr(plan, "take_step", take_step)
    plans = [Planner(each, False, 16 * GIB).plan().regions["activations"] for each in (run, unshared(run))]
    assert plans[0] < 0.8 * plans[1]
    assert taken[0].largest.rows < 0.8 * taken[1].largest.rows
    monkeypatch.setattr(Policy, "_hidden", noted)
    assert_planned(run, run_grpo)
    assert tuple(map(max, zip(*computed, strict=True))) == taken[0].largest[:3]


@pytest.mark.parametrize("kind", ["a reference that moves", "a critic", "a critic on the trunk"])
def test_a_run_writes_what_was_planned(tmp_path, kind):
    if kind == "a reference that moves":
        run = grpo_run(tmp_path / "run", max_steps=1, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
        run_grpo(run)
    else:
        run = ppo_run(tmp_path / "run", max_steps=1)
        run = dataclasses.replace(run, critic=CriticConfig(shared=kind != "a critic"))
        run_ppo(run)
    found = Planner(run, False, 16 * GIB).plan()
    for name, planned_bytes, files in (
        ("checkpoints/step-1", found.checkpoint, "*.safetensors"),
        ("checkpoints/step-1", found.model, "model.safetensors"),
        ("final", found.final, "*.safetensors"),
    ):
        written = sum(path.stat().st_size for path in (tmp_path / "run" / name).rglob(files))
        assert abs(written - planned_bytes) <= 0.1 * written, f"{name}: {planned_bytes} planned, {written} written"
    saved = dataclasses.replace(run, train=dataclasses.replace(run.train, save_only_model=True))
    host, disk = (each for each in describe(Planner(saved, False, 16 * GIB), found) if ", checkpoint" in each)
    assert host.split()[2:4] == disk.split()[2:4] == amount(found.model).split()
    assert host.endswith("a copy of the weights while they are written")


@pytest.mark.parametrize("stage", [2, 3])
def test_several_ranks_write_what_one_does(tmp_path, stage):
    """Also of a model that is so small that the first rank has all of it."""
    lines = {}
    for num_ranks in (1, 2, 4):
        run = sft_run(tmp_path / "run", max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1)
        run = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=num_ranks, zero_stage=stage))
        planner = Planner(run, False, 16 * GIB)
        lines[num_ranks] = [line for line in describe(planner, planner.plan()) if line.startswith("disk")]
    assert len(lines[1]) == 2 and lines[1] == lines[2] == lines[4]


def test_prompts_that_share_less_than_the_longest_take_what_was_planned(tmp_path):
    """Of a prompt one token shorter than the longest, which ends with a whole prefix, a group computes the last tokens
    for each completion."""
    run = with_prompts_that_differ(grpo_run(tmp_path / "run", max_steps=8))
    tokenizer, multiple = Tokenizer.from_folder(MODEL), load_model(MODEL).prefix_sharing.multiple
    rows = [json.loads(line) for line in pathlib.Path(run.data.train).read_text().splitlines()]
    for index, row in enumerate(rows):
        whole = 2 * multiple + (index == 0)
        while len(tokenizer.encode(row["prompt"])) < whole:
            row["prompt"] += "?"
        assert len(tokenizer.encode(row["prompt"])) == whole
    pathlib.Path(run.data.train).write_text("\n".join(map(json.dumps, rows)))
    assert_planned(run, run_grpo)


def logits_bytes(rows, run, at_once=0, is_filtered=False):
    """Bytes of the operators on so many rows of logits of a run's model in bfloat16, on an H200."""
    config, dtype = ModelConfig.from_folder(run.model), device.dtype("bfloat16")
    with shapes_only(device.GPUS["h200"]):
        return logprob.operator_bytes(rows, at_once, config.hidden_size, config.vocab_size, dtype, is_filtered)


def test_operators_of_shared_prompts(tmp_path):
    """On a GPU a prompt's rows count once for its group, as a query of its own sequence's keys and of two prefixes'."""
    run = grpo_run(tmp_path / "run", dtype="bfloat16", per_device_train_batch_size=16, max_completion_length=8)
    run = with_prompts_that_differ(dataclasses.replace(run, model=large_run(tmp_path).model), words=20)
    prompt, groups = len("10 ") + 20 * len("is the number of what? "), 16 // run.train.num_generations
    plans = [Planner(each, True, 400 * GIB).plan() for each in (run, unshared(run))]
    shared, apart = (each.extra["operators"] for each in plans)
    of_logits = logits_bytes(16 * 8, run, 16 * 8)
    # Prefixes end at multiples of 16 tokens, and there are at most as many as sequences.
    own, shared_rows = prompt % 16, prompt // 16 * 16
    sizes = (3 * (groups * shared_rows + 16 * (own + 8)), 32), (16 * (prompt + 8), 16)
    assert [shared - of_logits, apart - of_logits] == [backward_nbytes(*each, 32, 128) for each in sizes]
    # In 600 tokens, the most that are replayed of this model, there are as many rows of logits.
    for each, levels, sequences in zip(plans, (3, 1), (32, 16), strict=True):
        assert each.extra["graphs"] == of_logits + backward_nbytes(600 * levels, sequences, 32, 128)


FILTERED = {"sampling_mask_replay": True, "top_k": 20}
GRAMMAR = {"generation_kwargs": {"structured_outputs": {"regex": "[0-9]*"}}}


@pytest.mark.parametrize("keys, is_filtered", [({}, False), (FILTERED, True), (GRAMMAR, True)], ids=str)
def test_operators_of_logits(tmp_path, keys, is_filtered):
    """On an H100 a gradient is computed with the log-probs, of exponentials in 16 bits: without filters alone."""
    run = grpo_run(tmp_path / "run", dtype="bfloat16", max_completion_length=8, **keys)
    run = dataclasses.replace(run, model=large_run(tmp_path).model)
    rows = target_bucket_of(8 * run.train.per_device_train_batch_size)
    apart, at_once, filtered = (logits_bytes(rows, run, *each) for each in ((), (rows,), (rows, True)))
    assert apart < at_once < filtered
    of_attention = Planner(run, True, 400 * GIB).plan().extra["operators"] - (filtered if is_filtered else at_once)
    assert 0 < of_attention < 16 << 20


def test_a_plan_is_of_the_gpu_that_is_there(tmp_path, monkeypatch):
    """Other GPUs than an H100's have no kernels of shared prefixes."""
    run = with_prompts_that_differ(grpo_run(tmp_path / "run", dtype="bfloat16"), words=20)
    run = dataclasses.replace(run, model=large_run(tmp_path).model)
    plans = {}
    for name in ("h100", "h200", "a100"):
        monkeypatch.setattr(plan, "gpu_properties", lambda name=name: device.GPUS[name])
        plans[name] = [Planner(each, True, 400 * GIB).plan().regions["activations"] for each in (run, unshared(run))]
    assert plans["h100"] == plans["h200"] and plans["h100"][0] < plans["h100"][1]
    assert plans["a100"][0] == plans["a100"][1]


def test_graphs_where_the_largest_micro_batch_is_none(tmp_path):
    """Of an 8B model micro-batches of up to 600 tokens are replayed, once one like them comes again."""
    run = large_run(tmp_path, per_device_train_batch_size=1, max_steps=8, gradient_accumulation_steps=1)
    rows, found = tmp_path / "rows.jsonl", []
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=str(rows)))
    for lengths in ([700, 700, 700], [700, 300, 700], [700, 300, 400]):
        rows.write_text("".join(json.dumps({"prompt": "a", "completion": n * "b"}) + "\n" for n in lengths))
        of_run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_steps=len(lengths), max_length=None))
        made = Planner(of_run, True, 400 * GIB).plan()
        found.append(made.extra.get("graphs"))
        # They are not what a run needs.
        assert made.total - made.needed == (found[-1] or 0)
    assert found[:2] == [None, None] and 0 < found[2] < made.extra["operators"]


def test_the_cache_leaves_room_for_graphs(tmp_path):
    """As long as a sequence fits."""
    run = grpo_run(tmp_path / "run", dtype="bfloat16", per_device_train_batch_size=16)
    run = dataclasses.replace(run, model=large_run(tmp_path).model)
    run = dataclasses.replace(run, engine=dataclasses.replace(run.engine, gpu_memory_utilization=1.0))
    eager = dataclasses.replace(run, train=dataclasses.replace(run.train, cuda_graphs=False))
    block = 16 * 2 * 36 * 8 * 128 * 2
    with_graphs, without = (Planner(each, True, 400 * GIB).plan() for each in (run, eager))
    graphs, fewer = with_graphs.extra["graphs"], without.regions["kv"] - with_graphs.regions["kv"]
    assert graphs > 0 and abs(fewer - graphs) < block


def unshared(run):
    return dataclasses.replace(run, train=dataclasses.replace(run.train, share_prefixes="never"))


def test_rloo_takes_what_was_planned(tmp_path):
    # Prompts of one length.
    assert_planned(rloo_run(tmp_path / "run", num_prompts=10, max_steps=3, share_prefixes="never"), run_rloo)


@pytest.mark.parametrize(
    "critic, options",
    [({}, {"kl_coef": 0.0}), ({"shared": True}, {"optimizer_in_backward": True, "max_grad_norm": 0.0})],
    ids=str,
)
def test_ppo_takes_what_was_planned(tmp_path, critic, options):
    run = ppo_run(tmp_path / "run", max_steps=2, critic=critic, share_prefixes="never", **options)
    assert_planned(run, run_ppo)
    # Which prompts share a micro-batch is not known: the plan is for those that share nothing.
    shared = dataclasses.replace(run, train=dataclasses.replace(run.train, share_prefixes="auto"))
    assert Planner(shared, False, 16 * GIB).plan().regions == Planner(run, False, 16 * GIB).plan().regions


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_with_an_adapter_takes_what_was_planned(tmp_path, kind):
    options = {"max_steps": 3, "beta": 0.1, "share_prefixes": "never"}
    run = sft_run(tmp_path / "run", max_steps=3) if kind == "sft" else grpo_run(tmp_path / "run", **options)
    run = dataclasses.replace(run, lora=LoraConfig(r=4))
    assert_planned(run, run_sft if kind == "sft" else run_grpo)


@pytest.mark.parametrize("kind, options", [("dpo", {}), ("dpo", {"use_weighting": True}), ("kto", {})], ids=str)
def test_preference_runs_take_what_was_planned(tmp_path, kind, options):
    run = preference_run(kind, tmp_path / "run", max_steps=3, **options)
    assert_planned(run, run_dpo if kind == "dpo" else run_kto)


@pytest.mark.parametrize("kept", ["full", "minimal"])
def test_a_reward_model_takes_what_was_planned(tmp_path, kept):
    run = reward_run(tmp_path / "run", max_steps=3, activation_memory=kept)
    assert_planned(run, run_reward)
    plans = [Planner(each, False, 16 * GIB).plan().regions["activations"] for each in (run, unshared(run))]
    assert plans[0] < 0.8 * plans[1]


def taken_on_rank(communicator, runs):
    """What each of {kind, which other words may follow: Run} takes by region on this rank."""
    reduce.SEGMENT = SEGMENT
    functions = {"sft": run_sft, "grpo": run_grpo, "ppo": run_ppo, "dpo": run_dpo}
    found = {}
    for name, run in runs.items():
        train = functions[name.partition(",")[0]]
        found[name] = taken(lambda run, train=train: train(run.resolved(), communicator=communicator), run)
    return found


# So small that two ranks have about as much of the model.
SEGMENT = 1024


@pytest.mark.usefixtures("quick_starts")
def test_ranks_take_what_was_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(reduce, "SEGMENT", SEGMENT)
    steps = {"gradient_accumulation_steps": 1, "max_steps": 2}
    runs = {
        "sft": sft_run(tmp_path / "sft", per_device_train_batch_size=4, global_batch_size=16, **steps),
        # Prompts of one length; all runs read one file of them.
        "grpo": grpo_run(tmp_path / "grpo", num_prompts=10, global_batch_size=16, beta=0.1, **steps),
        "ppo": ppo_run(
            tmp_path / "ppo",
            num_prompts=10,
            per_device_train_batch_size=2,
            global_batch_size=8,
            optim="adamw_8bit",
            **steps,
        ),
    }
    runs = {kind: dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=2)) for kind, run in runs.items()}
    # With parts of the weights of policy and reference, which the engine gathers, or without an engine.
    gathers = DeployConfig(num_train_gpus=2, zero_stage=3)
    runs["grpo, gathered"] = dataclasses.replace(
        runs["grpo"], deploy=gathers, output_dir=str(tmp_path / "gathered" / "run")
    )
    runs["grpo, adapter"] = dataclasses.replace(
        runs["grpo, gathered"], lora=LoraConfig(r=4), output_dir=str(tmp_path / "adapter" / "run")
    )
    for name, options in (("gathered", {}), ("shared, gathered", {"critic": CriticConfig(shared=True)})):
        folder = str(tmp_path / f"ppo-{name}" / "run")
        runs[f"ppo, {name}"] = dataclasses.replace(runs["ppo"], deploy=gathers, output_dir=folder, **options)
    runs["grpo, base in 4 bits"] = dataclasses.replace(
        runs["grpo, adapter"],
        quantization=QuantizationConfig(type="nf4", group_size=16),
        output_dir=str(tmp_path / "quantized" / "run"),
    )
    # With one engine of both ranks, each of which has a part of the model.
    for name, base, options in (
        ("cut", "grpo", {}),
        ("cut, gathered", "grpo", {"zero_stage": 3}),
        ("cut, adapter", "grpo, adapter", {}),
        ("cut, base in 4 bits", "grpo, base in 4 bits", {}),
        ("cut, gathered base in 4 bits", "grpo, base in 4 bits", {"zero_stage": 3}),
    ):
        deploy = DeployConfig(num_train_gpus=2, tensor_parallel_size=2, **options)
        folder = str(tmp_path / name / "run")
        runs[f"grpo, {name}"] = dataclasses.replace(runs[base], deploy=deploy, output_dir=folder)
    elsewhere = DeployConfig(num_train_gpus=2, num_infer_gpus=1, zero_stage=3)
    sizes = {"per_device_train_batch_size": 8, "global_batch_size": 16, "beta": 0.1}
    run = grpo_run(tmp_path / "parts", num_prompts=10, **sizes, **steps)
    runs["grpo, parts"] = dataclasses.replace(run, deploy=elsewhere, asynchronous=AsyncConfig(max_staleness=0))
    # Three groups of four, of which one rank has two.
    sizes = {"per_device_train_batch_size": 6, "global_batch_size": 12}
    run = grpo_run(tmp_path / "ahead", num_prompts=10, **sizes, **steps)
    for name, deploy in (("ahead", DeployConfig(num_train_gpus=2)), ("ahead, gathered", gathers)):
        options = {"asynchronous": AsyncConfig(max_staleness=0), "output_dir": str(tmp_path / name / "run")}
        runs[f"grpo, {name}"] = dataclasses.replace(run, deploy=deploy, **options)
    run = preference_run("dpo", tmp_path / "dpo", per_device_train_batch_size=4, global_batch_size=8, **steps)
    runs["dpo, parts"] = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=2, zero_stage=3))
    for rank, found in enumerate(launch(taken_on_rank, 2, runs, timeout_s=120)):
        for name, run in runs.items():
            plan = Planner(run, False, 16 * GIB).plan(rank=rank)
            # The largest micro-batches may be those of the other rank, and rank 0 alone draws the report at the end.
            for region in ("activations", *(["engine activations", "kv"] if rank else [])):
                if region in found[name]:
                    found[name][region] = max(found[name][region], plan.regions[region])
            assert_taken(plan, found[name])
            assert ("kv" in plan.regions) == (not name.endswith("parts") and name != "sft")
            copies = name.startswith(("grpo, ", "ppo, ")) and name not in ("grpo, parts", "grpo, ahead")
            assert ("rollout weights" in plan.regions) == copies


def test_the_memory_that_gpus_exchange(tmp_path):
    """Two pieces of 32 MiB for each rank, twice two halves of 1 MiB with their epochs, and copies of gradients.

    These are a part of all gradients of each other rank, in pieces of 32 MiB, at most 2 GiB in all.
    """
    for run in (large_run(tmp_path), dataclasses.replace(sft_run(tmp_path / "run"), model=MODEL)):
        alone = Planner(run, True, 80 * GIB).plan().regions
        assert "peer" not in alone
        for count in (2, 4):
            ranks = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=count))
            regions = Planner(ranks, True, 80 * GIB).plan().regions
            shared = regions["grads"] - 4 * (regions["weights"] // 2) // count
            found = (regions["peer"] - count * (68 << 20)) / (count - 1)
            assert min(shared / count, (2 * GIB - (32 << 20)) / (count - 1)) <= found
            assert found <= min(max(shared / count, shared if shared < (16 << 20) else 0) + (49 << 20), 2 * GIB)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward", "grpo", "rloo", "ppo"])
def test_every_trainer_is_planned_on_ranks(tmp_path, monkeypatch, kind):
    """As on one rank, but for a third of the moments and a third more of gradients, up to a segment."""
    monkeypatch.setattr(reduce, "SEGMENT", SEGMENT)
    make = {"sft": sft_run, "reward": reward_run, "grpo": grpo_run, "rloo": rloo_run, "ppo": ppo_run}
    options = {"gradient_accumulation_steps": 1, "gradient_checkpointing": False}
    if kind in make:
        run = make[kind](tmp_path / "run", **options | ({"num_mini_batches": 1} if kind == "ppo" else {}))
    else:
        run = preference_run(kind, tmp_path / "run", **options)
    one = Planner(run, False, GIB).plan().regions
    three = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=3))
    planner = Planner(three, False, GIB)
    parts = [planner.plan(rank=rank).regions for rank in range(3)]
    assert sum(part["moments"] for part in parts) == one["moments"]
    assert all(part["weights"] == one["weights"] for part in parts)
    models = 2 if kind == "ppo" else 1
    for part in parts:
        assert 0 < part["moments"] <= one["moments"] / 3 + models * 3 * 4 * SEGMENT
        assert one["grads"] < part["grads"] <= one["grads"] * 4 / 3 + models * 4 * SEGMENT


def test_a_dry_run_says_what_ranks_do(tmp_path, capfd):
    run = dataclasses.replace(sft_run(tmp_path / "run", max_steps=2), deploy=DeployConfig(num_train_gpus=3))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    assert cli.run(["sft", "--config", str(file), "--dry-run"]) == 0
    out = capfd.readouterr().out
    tomllib.loads(out)
    heading, *rows = [line.split() for line in out.partition("# GiB by region")[2].splitlines()][1:]
    regions = ["weights", "grads", "moments", "activations", "total"]
    assert heading == ["#", "rank", "GPU", "role", *regions]
    assert [row[:4] for row in rows] == [["#", str(rank), "none", "train"] for rank in range(3)]
    assert cli.run(["plan", "--config", str(file), "--trainer", "sft"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"sft of {MODEL} on the cpu device, each of 3 ranks"
    assert any(line.startswith("moments") and line.endswith("adamw_torch, 1/3") for line in lines)
    assert any(line.startswith("total") and line.endswith("for all 3 processes") for line in lines)
    file.write_text(to_toml(dataclasses.replace(run, model=str(tmp_path / "none"))))
    assert cli.run(["sft", "--config", str(file), "--dry-run"]) == 1
    file.write_text(to_toml(grpo_run(tmp_path / "grpo")))
    options = ["--deploy.num_infer_gpus", "2", "--async.queue_maxsize", "64"]
    assert cli.run(["grpo", "--config", str(file), "--dry-run", *options]) == 0
    rows = [line.split() for line in capfd.readouterr().out.partition("# GiB by region")[2].splitlines()][2:]
    assert [row[1:4] for row in rows] == [["0", "none", "train"], *[["-", "none", "generate"]] * 2]
    options += ["--deploy.update_weights_transport", "peer"]
    assert cli.run(["grpo", "--config", str(file), "--dry-run", *options]) == 0
    lines = capfd.readouterr().out.partition("# GiB by region")[2].splitlines()[1:]
    assert "new weights" in lines[0]
    trainer, *others = [line.split() for line in lines[1:]]
    assert [trainer[-2], *(each[-2] for each in others)] == ["0.000", others[0][4], others[0][4]]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(r=8)])
def test_ranks_with_parts_of_the_weights_have_no_engine(tmp_path, on_gpu, lora):
    """And inference processes take what they take beside ranks with all weights."""
    run, plans, engines = grpo_run(tmp_path / "run"), [], []
    for stage in (2, 3):
        deploy = DeployConfig(
            num_train_gpus=2, num_infer_gpus=1, zero_stage=stage, update_weights_transport="peer" if on_gpu else "shm"
        )
        run = dataclasses.replace(run, deploy=deploy, asynchronous=AsyncConfig(), lora=lora)
        planner = Planner(run, on_gpu, 2 * GIB)
        plans.append(planner.plan().regions)
        engines.append(planner.engine_regions(planner.plan()))
    assert plans[0].keys() - plans[1].keys() == {"engine activations", "kv"}
    assert engines[1].pop("kv") > 0 and engines[0].pop("kv") > 0
    assert engines[0] == engines[1]


def test_parts_of_an_adapter(tmp_path):
    """An engine's processes have what their Adapters take."""
    run, config = grpo_run(tmp_path / "run"), ModelConfig.from_folder(MODEL)
    run = dataclasses.replace(run, lora=LoraConfig(r=8), asynchronous=AsyncConfig())
    for size in (1, 2):
        deploy = DeployConfig(num_infer_gpus=2, tensor_parallel_size=size)
        planner = Planner(dataclasses.replace(run, deploy=deploy), False, GIB)
        adapter = Adapter(config, run.lora, shard=Shard(1, size))
        assert planner.engine_regions(planner.plan())["adapter"] == adapter.nbytes


def test_planning_reads_no_weights_and_leaves_no_trace(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in MODEL.glob("*.json"):
        shutil.copy(path, folder)
    run = dataclasses.replace(sft_run(tmp_path / "run"), model=str(folder))
    linear, before = projection.linear, memory.report()
    Planner(run, False, GIB).plan()
    assert projection.linear is linear and memory.report() == before and device.name() == "cpu"
    with pytest.raises(RuntimeError, match="in the block"), shapes_only():
        assert projection.linear is not linear and device.name() == "shapes"
        raise RuntimeError("in the block")
    assert projection.linear is linear and memory.report() == before and device.name() == "cpu"


def test_arrays_without_memory():
    with shapes_only():
        array = device.xp().zeros((1 << 20, 1 << 20), np.float32)
        array[3:5] = 1.0
        array.fill(2.0)
        part = array[: 1 << 10].reshape(-1, 8)
        assert isinstance(part, ShapeOnly) and part.shape == (1 << 27, 8)
    assert array.nbytes == 1 << 42 and array[7, 7] == 0


def large_run(tmp_path, **train):
    """SFT of a model with the shape of Qwen3-8B, of which there is only config.json, on the golden rows."""
    folder = tmp_path / "large"
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    config = dataclasses.replace(ModelConfig.from_folder(MODEL), **{
        key: value for key, value in QWEN3_8B.items() if key in {f.name for f in dataclasses.fields(ModelConfig)}
    })  # fmt: skip
    write_json(folder / "config.json", config.to_dict())
    options = {"max_steps": 1, "dtype": None, "gradient_checkpointing": True} | train
    return dataclasses.replace(sft_run(tmp_path / "run", **options), model=str(folder))


def test_a_model_of_8b_for_a_gpu(tmp_path):
    planner = Planner(large_run(tmp_path), True, 80 * GIB)
    plan = planner.plan()
    # Qwen3-8B has 8,190,735,360 parameters; the golden model's tokenizer ids are below its vocabulary.
    elements = plan.regions["weights"] // 2
    assert elements == 8_190_735_360
    # Of the head once more, in a step of several micro-batches.
    head = 4 * 151_936 * 4096
    assert plan.regions["grads"] == 4 * elements + head and plan.regions["moments"] == 12 * elements
    assert plan.total > 80 * GIB
    saved = dict(savings(planner, plan))
    assert saved['train.optim = "adamw_8bit"'] == 6 * elements - elements // 32
    assert saved["train.master_weights = false"] == 4 * elements
    # What is left is two chunks of float32 m, v and master.
    assert saved["train.offload_optimizer = true"] == 12 * elements - 2 * 12 * (1 << 24)
    assert [*saved.values()] == sorted(saved.values(), reverse=True)


def test_the_page_of_models_is_current(tmp_path):
    """Of all its rows one is made again; it may be off by as much as a plan may."""
    spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = module.PAGE.read_text().split(module.BEGIN)[1].split(module.END)[0]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n") if line]
    assert rows[0] == module.HEADER and [row[0] for row in rows[2:]] == list(module.MODELS)
    module.write_rows(tmp_path)
    name, parameters, *found = module.cells_of("Qwen3.5-0.8B", tmp_path)
    expected = next(row for row in rows if row[0] == name)
    assert expected[1] == parameters
    assert list(map(float, found)) == pytest.approx(list(map(float, expected[2:])), rel=0.05), "run docs/make_models.py"


def test_the_share_of_the_engine(tmp_path):
    run = grpo_run(tmp_path / "run")
    plan = Planner(run, True, 2 * GIB).plan()
    engine, weights = run.engine, plan.regions["weights"]
    share = int(2 * GIB * engine.gpu_memory_utilization)
    own = weights + plan.regions["engine activations"]
    block = 16 * 2 * 2 * 2 * 16 * 4
    most = engine.max_num_seqs * (256 // 16 + 1)
    assert plan.regions["kv"] == min((share - own) // block, most) * block


def test_partial_results_of_the_engine(tmp_path):
    """Results of parts of the longest sequences that there may be, of kernels for 16 bits; the cache gets the rest."""
    run = dataclasses.replace(grpo_run(tmp_path / "grpo", dtype="bfloat16"), model=large_run(tmp_path).model)
    regions = Planner(run, True, 400 * GIB).plan().regions
    # Decode: a result for each of 40 segments of 1,024 keys, sequence and head, of 128 columns, a maximum and a sum.
    decode = 4 * run.engine.max_num_seqs * 40 * 32 * (128 + 2)
    assert decode <= regions["attention"] < 8 * decode
    own = sum(regions[name] for name in ("weights", "engine activations", "attention"))
    block = 16 * 2 * 36 * 8 * 128 * 2
    assert regions["kv"] == (int(400 * GIB * run.engine.gpu_memory_utilization) - own) // block * block
    # None of float32, whose kernels keep nothing.
    assert "attention" not in Planner(grpo_run(tmp_path / "run"), True, 80 * GIB).plan().regions


def test_operators_of_many_short_sequences(tmp_path):
    """Packed into as many tokens, they take more of attention's backward: each sequence nine rows and a tile."""

    def operators(words, count, **options):
        rows = tmp_path / f"{count}.jsonl"
        rows.write_text(count * (json.dumps({"prompt": "a", "completion": words * "b"}) + "\n"))
        train = {"packing": True, "max_length": 64, "per_device_train_batch_size": 4, "dtype": "bfloat16"} | options
        run = large_run(tmp_path, **train)
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, train=str(rows)))
        plan = Planner(run, True, 80 * GIB).plan()
        return plan.tokens, plan.extra["operators"]

    long_tokens, few = operators(62, 8)
    short_tokens, many = operators(6, 128)
    assert abs(long_tokens - short_tokens) <= 16
    # 4 sequences and some 28 more, each of 9 rows of 32 heads of 128 float32, and of 64 pairs of those.
    assert 24 * (9 * 128 + 2 * 64) * 32 * 4 <= many - few <= 40 * (9 * 128 + 2 * 64) * 32 * 4
    # The simple kernels of float32 have a number for each row of a head.
    config = ModelConfig.from_folder(large_run(tmp_path).model)
    with shapes_only(device.GPUS["h200"]):
        assert plan.operator_bytes(planned.BatchSizes(short_tokens, 32), config, "float32") == 4 * 32 * short_tokens


def test_phases_that_take_turns_need_the_most_of_them(tmp_path):
    def plan_of(run, on_gpu=True):
        return Planner(run, on_gpu, 2 * GIB).plan()

    run = grpo_run(tmp_path / "run")
    plan, found = plan_of(run), plan_of(run).regions | plan_of(run).extra
    engine, step = found["kv"] + found["engine activations"], found["activations"] + found["operators"]
    everything = sum(found.values())
    assert plan.phases == {"training": everything - engine, "generation": everything - step}
    assert plan.total == max(plan.phases.values()) < everything
    # Where the cache stays, or is needed between micro-batches, and where nothing is generated.
    kept = dataclasses.replace(run, engine=dataclasses.replace(run.engine, enable_sleep_mode=False))
    interleaved = dataclasses.replace(run, asynchronous=AsyncConfig())
    sft = sft_run(tmp_path / "sft", max_steps=2)
    for plan in (plan_of(kept), plan_of(interleaved), plan_of(run, on_gpu=False), plan_of(sft)):
        total = sum(plan.regions.values()) + sum(plan.extra.values())
        assert plan.phases == {"training": total} and plan.total == total
    apart = dataclasses.replace(interleaved, deploy=DeployConfig(num_infer_gpus=1))
    assert [*plan_of(apart).phases] == ["training", "generation"]


def test_the_command(tmp_path, capfd):
    run = sft_run(tmp_path / "run", max_steps=2)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run))
    assert cli.run(["plan", "--config", str(file), "--train.optim", "adamw_8bit"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"sft of {MODEL} on the cpu device"
    assert lines[1].split() == ["weights", "0.10", "MiB", "27,264", "parameters,", "float32"]
    assert lines[3].split()[:1] == ["moments"] and lines[3].endswith("adamw_8bit")
    assert any(line.endswith("train.gradient_checkpointing = true") for line in lines)
    # 27,264 parameters of 4 bytes; a checkpoint has two moments of a byte each and their scales as well.
    (final,) = [line.split()[2:4] for line in lines if line.startswith("disk, final")]
    (checkpoint,) = [line.split()[2:4] for line in lines if line.startswith("disk, checkpoint")]
    assert final == ["0.10", "MiB"] and checkpoint == ["0.16", "MiB"]
    options = ["--train.save_only_model", "true", "--train.save_total_limit", "2"]
    assert cli.run(["plan", "--config", str(file), *options]) == 0
    assert "disk, checkpoint        0.10 MiB   each; the newest 2 are kept" in capfd.readouterr().out
    assert cli.run(["plan", "--config", str(file), "--gpu-memory", "80"]) == 0
    out = capfd.readouterr().out
    assert "on a GPU" in out and "of 80.00 GiB" in out and "CUDA context" in out and 'train.dtype = "bfloat16"' in out
    # A file of pairs is read by sft, too, whose data it is not.
    file.write_text(f'model = "{MODEL}"\noutput_dir = "run"\n[data]\ntrain = "{PAIR_ROWS}"\n[train]\nmax_steps = 2')
    assert cli.run(["plan", "--config", str(file)]) == 0
    assert capfd.readouterr().out.startswith(
        f"dpo of {MODEL} on the cpu device; read as a file of dpo, which --trainer kto or --trainer reward changes"
    )
    assert cli.run(["plan", "--config", str(file), "--trainer", "reward"]) == 0
    assert capfd.readouterr().out.startswith(f"reward of {MODEL} on the cpu device\n")
    file.write_text(to_toml(grpo_run(tmp_path / "grpo")))
    assert cli.run(["plan", "--config", str(file)]) == 0
    assert capfd.readouterr().out.startswith("grpo of ")


def test_bad_input_of_the_command(tmp_path, capfd):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(sft_run(tmp_path / "run")))
    assert cli.run(["plan", "--config", str(file), "--trainer", "sftt"]) == 2
    assert capfd.readouterr().err.startswith("rlnumba: --trainer: must be one of sft, ")
    assert cli.run(["plan", "--config", str(file), "--model", str(tmp_path / "none")]) == 1
    assert capfd.readouterr().err == f"rlnumba: {tmp_path / 'none'}: no such model folder\n"
    file.write_text("seed = 1\n")
    assert cli.run(["plan", "--config", str(file)]) == 2
    assert "missing key" in capfd.readouterr().err


class Failing:
    """An array module whose allocations of activations fail."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype):
        raise MemoryError("no pages")


def test_out_of_memory_names_the_region_and_a_switch(tmp_path, monkeypatch, capfd):
    file = tmp_path / "run.toml"
    file.write_text(to_toml(sft_run(tmp_path / "run", max_steps=2)))
    real = device.xp
    patched = SimpleNamespace(
        name=device.name,
        memory_info=lambda: (GIB, 4 * GIB),
        xp=lambda: Failing() if device.name() == "cpu" else real(),
    )
    for module in (memory, arena):
        monkeypatch.setattr(module, "device", patched)
    assert cli.run(["sft", "--config", str(file)]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "rlnumba: out of memory: activations needed 0.00 GiB more, and 1.00 of 4.0 GiB are free; train."
    )
    assert "would save" in error and error.endswith("(rlnumba plan lists others)")


def test_out_of_memory_in_an_operator(tmp_path):
    run = sft_run(tmp_path / "run", max_steps=2)
    with pytest.raises(UserError, match="out of memory in an operator's own arrays: 3 bytes; train.* would save"):
        with advise(run):
            raise MemoryError("3 bytes")
    # A run of which nothing can be planned still ends in one line.
    with pytest.raises(UserError, match="rlnumba plan has no advice: .*no such model folder"):
        with advise(dataclasses.replace(run, model=str(tmp_path / "none"))):
            raise MemoryError("3 bytes")


def test_an_allocation_of_weights_is_named(monkeypatch):
    class Full(Failing):
        zeros = Failing.empty

    monkeypatch.setattr(device, "xp", Full)
    with pytest.raises(memory.OutOfMemory, match="out of memory: weights needed 0.00 GiB more"):
        transformer.load_model(MODEL)


def test_a_model_of_8b_on_several_gpus(tmp_path):
    """With weights on every GPU, and with a part of each layer on every GPU."""
    run, size, rest = large_run(tmp_path), 8_190_735_360, 2 * 151_936 * 4096
    plans = {}
    for stage in (2, 3):
        deploy = DeployConfig(num_train_gpus=4, zero_stage=stage)
        planner = Planner(dataclasses.replace(run, deploy=deploy), True, 400 * GIB)
        plans[stage] = planner.plan()
        assert ("deploy.zero_stage = 3" in dict(savings(planner, plans[stage]))) == (stage == 2)
        text = "\n".join(describe(planner, plans[stage]))
        assert "a copy of 1/4 of weights, moments and master" in text
        # Segments are not cut: the first parts are a little longer.
        for found, bytes_each in ((plans[stage].checkpoint, 2 + 12), (plans[stage].regions["moments"], 12)):
            assert 0 <= found - bytes_each * size // 4 < bytes_each << 20
    layer = (size - rest) // 36
    assert plans[2].regions["weights"] == 2 * size
    assert abs(plans[3].regions["weights"] / (2 * (size / 4 + (size - rest) / 4 + layer + rest)) - 1) < 0.01
    # Of one layer at a time; head and embedding share memory.
    for each in plans.values():
        assert abs(each.regions["grads"] / (4 * (2 * layer + rest / 2 + size / 4)) - 1) < 0.01
    # The base of an adapter has no part that an optimizer updates.
    adapted = dataclasses.replace(run, deploy=DeployConfig(num_train_gpus=4), lora=LoraConfig())
    planner = Planner(adapted, True, 400 * GIB)
    whole, parts = planner.plan(), planner.plan(with_changes(adapted, {"deploy": {"zero_stage": 3}}))
    assert "deploy.zero_stage = 3" in dict(savings(planner, whole))
    assert abs(parts.regions["weights"] / (2 * ((size - rest) / 4 + layer + rest)) - 1) < 0.01
    others = "adapter", "grads", "moments", "activations"
    assert [parts.regions[name] for name in others] == [whole.regions[name] for name in others]
    # A base in 4 bits has those of the packed words and scales, in groups of 64.
    quantized = dataclasses.replace(adapted, quantization=QuantizationConfig(type="nf4"))
    planner = Planner(quantized, True, 400 * GIB)
    whole, parts = planner.plan(), planner.plan(with_changes(quantized, {"deploy": {"zero_stage": 3}}))
    packed = 0.5 + 4 / 64
    assert abs(parts.regions["weights"] / (packed * ((size - rest) / 4 + layer) + 2 * rest) - 1) < 0.01
    assert [parts.regions[name] for name in others] == [whole.regions[name] for name in others]
