"""An inference engine of several processes: the text of one, and what happens when one of them ends or stalls."""

import dataclasses
import os
import shutil
import signal
import time
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import AsyncConfig, DeployConfig, LoraConfig, to_toml
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.lora import Adapter
from rlnumba.model.shard import WHOLE, Range, Shard
from rlnumba.model.transformer import load_model, save_model
from rlnumba.parallel.transports.shared_memory import unnamed_file
from rlnumba.sampling import inference_group
from rlnumba.sampling.inference_group import HeldModel
from rlnumba.sampling.weights.shards import pieces_of, ranges_of, whole_of
from tests.close import assert_same_bits
from tests.engine.test_llm import make_model
from tests.model.test_lora import random_adapter
from tests.parallel.test_asynchronous import followers_of
from tests.parallel.test_inference import Fixture, end_as_stale
from tests.trainers.runs import GOLDEN, grpo_run

WIDE = {
    "vocab_size": 1100, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 24,
    "num_key_value_heads": 12, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def running():
    fixture = Fixture(1, followers=((None, 1),))
    with fixture.engines:
        yield fixture
    assert all(process.process.poll() is not None for process in fixture.engines.processes)


def ids_of(running):
    """The processes of the engine: (leader, follower)."""
    leader = running.engines.processes[0].process.pid
    (follower,) = followers_of(leader)
    return leader, follower


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_ends_or_stalls_ends_its_engine(running, how, capfd):
    """Another engine takes its place, with the newest weights, and draws the same text."""
    for _ in range(2):
        running.push()
        requests = running.submit(2)
        assert running.wait(2) == running.expected(requests)
    before, requests = ids_of(running), running.submit(3)
    os.kill(before[1], how)
    if how == signal.SIGSTOP:
        end_as_stale(running.engines, 0)
    assert running.wait(3) == running.expected(requests)
    assert not {*before} & {*ids_of(running)} and not any(os.path.exists(f"/proc/{each}/exe") for each in before)
    reason = "its process ended with exit code 1" if how == signal.SIGKILL else "no sign of life for 300 s"
    assert f"rlnumba: inference process 0: {reason}" in capfd.readouterr().err


def lead_and_wait(setup, connection):
    """What a leader does whose main thread waits for its followers where nothing ends it, as for a GPU."""
    os.setsid()
    inference_group.NOTICE_S = 0.1
    nbytes, slots, _ = setup.staging
    inference_group.Followers(setup._replace(staging=(nbytes, slots, unnamed_file(nbytes * slots))), connection)
    time.sleep(120)


def test_a_leader_that_does_not_notice_ends_after_its_follower(running):
    context = get_context("spawn")
    _, other = context.Pipe()
    leader = context.Process(target=lead_and_wait, args=(running.engines.setup_of(0), other))
    leader.start()
    deadline = time.monotonic() + 120
    while not (found := followers_of(leader.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(found[0], signal.SIGKILL)
    leader.join(120)
    assert leader.exitcode == 1


OF_WIDE = "q_proj", "v_proj", "down_proj"


@pytest.mark.parametrize(
    "make, modules, count",
    [
        (lambda: make_model(**WIDE), (), 2),
        (lambda: make_model(**WIDE, tie_word_embeddings=False), (), 3),
        (lambda: make_model(**WIDE), OF_WIDE, 3),
        (lambda: load_model(GOLDEN / "qwen3_5"), (), 2),
        (lambda: load_model(GOLDEN / "qwen3_5"), ("all-linear",), 2),
        (lambda: load_model(GOLDEN / "qwen3_moe"), (), 2),
        (lambda: load_model(GOLDEN / "qwen3_5_moe"), (), 2),
    ],
    ids=["tied", "untied", "adapter", "hybrid", "hybrid adapter", "mixture", "fused mixture"],
)
def test_ranges_of_a_shard(tmp_path, make, modules, count):
    """What is copied from the whole model's weights, or adapter, is what a shard reads from the folder."""
    model = make()
    save_model(model, tmp_path / "model")
    folder = tmp_path / "model"
    if modules:
        model = random_adapter(model, r=3, target_modules=modules)
        model.adapter.base, folder = str(folder), tmp_path / "adapter"
        save_model(model, folder)
    for rank in range(count):
        shard = load_model(folder, shard=Shard(rank, count)).trained
        assert whole_of(shard) == whole_of(model.trained) and len(shard.flat) < len(model.trained.flat)
        expected = shard.flat.copy()
        assert np.count_nonzero(expected) > len(expected) // 8
        shard.flat[...] = 0
        for first, source, size in ranges_of(shard):
            shard.flat[first : first + size] = model.trained.flat[source : source + size]
        assert_same_bits(shard.flat, expected)


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
def test_the_base_of_an_adapter_is_the_one_that_the_run_began_with(tmp_path, shard):
    """It is read anew, and not another one; what is trained is sent, also where it began with another adapter."""
    folder, lora = tmp_path / "model", LoraConfig(r=2)
    save_model(make_model(**WIDE), folder)
    model = load_model(folder)
    model.adapter = Adapter.new(model.config, lora, "float32", str(folder), 0)
    held = HeldModel.of(model, None, str(folder))
    setup = SimpleNamespace(held=held, dtype="float32", lora=lora, seed=0, quantization=None)
    found = inference_group._load_shard(setup, shard, None)
    expected = load_model(folder, shard=shard)
    assert_same_bits(found.weights.flat, expected.weights.flat)
    assert found.config == expected.config and found.adapter.lora == lora
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "kept")
    with pytest.raises(UserError, match=f"{folder}: its weights are not those any more with which the run began"):
        inference_group._load_shard(setup, shard, None)
    weights.write_bytes((tmp_path / "kept").read_bytes())
    with pytest.raises(UserError, match="are not those any more"):
        inference_group._load_shard(setup, shard, None)
    # Another host has files of its own.
    setup.held = HeldModel.of(model, None, str(folder), is_one_host=False)
    assert_same_bits(inference_group._load_shard(setup, shard, None).weights.flat, expected.weights.flat)
    # Without an adapter all is sent.
    (tmp_path / "kept").unlink()
    shutil.rmtree(folder)
    setup.held, setup.lora = HeldModel.of(model.without_adapter(), None, str(folder)), None
    found = inference_group._load_shard(setup, shard, None)
    assert not found.weights.flat.any() and found.weights.flat.shape == expected.weights.flat.shape


def test_sizes_that_do_not_divide(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"num_infer_gpus \(3\) must be a multiple of .*tensor_parallel_size \(2\)"):
        DeployConfig(num_infer_gpus=3, tensor_parallel_size=2)
    run = grpo_run(tmp_path / "run")
    deploy = DeployConfig(num_infer_gpus=4, tensor_parallel_size=4)
    options = {"deploy": deploy, "asynchronous": AsyncConfig()}
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(4\) needs gemm = native"):
        dataclasses.replace(run, gemm="cublas", **options)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(dataclasses.replace(run, **options)))
    for more in ([], ["--dry-run"]):
        assert cli.run(["--device", "cpu", "grpo", "--config", str(file), *more]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == "rlnumba: tensor_parallel_size 4 must divide the model's num_key_value_heads 2"
    assert not (tmp_path / "run").exists()


def test_plan_shows_the_parts(tmp_path, capsys):
    file, options = tmp_path / "run.toml", ["--deploy.num_infer_gpus", "4", "--async.max_staleness", "1"]
    file.write_text(to_toml(grpo_run(tmp_path / "run")))
    options += ["--deploy.tensor_parallel_size", "2"]
    assert cli.run(["--device", "cpu", "grpo", "--config", str(file), "--dry-run", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("# GiB by region")[2].splitlines()][2:]
    parts = [["-", "none", "generate", f"{part}/2"] for part in (1, 2, 1, 2)]
    assert [row[1:5] for row in rows[1:]] == parts and rows[0][1:4] == ["0", "none", "train"]
    # As few as it fits in, and a small model fits on one.
    assert cli.run(["--device", "cpu", "grpo", "--config", str(file), "--dry-run", *options[:-1], "auto"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("# GiB by region")[2].splitlines()][2:]
    assert [row[1:4] for row in rows[1:]] == [["-", "none", "generate"]] * 4 and len({len(row) for row in rows}) == 1
    assert cli.run(["--device", "cpu", "plan", "--config", str(file), "--trainer", "grpo", *options]) == 0
    out = capsys.readouterr().out
    assert "each of 4 inference processes, 2 of them an engine, each with a part of the model:" in out


def test_pieces_of_ranges():
    pieces = pieces_of([Range(2, 10, 5), Range(7, 30, 1)], 2)
    assert list(pieces) == [(2, 10, 2), (4, 12, 2), (6, 14, 1), (7, 30, 1)]
