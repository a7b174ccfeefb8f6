"""Ranks load, save and resume a model with no more of the host's memory than their share and a layer take."""

import dataclasses
import hashlib
import resource
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba import checkpoint
from rlnumba.config import LoraConfig, SFTConfig
from rlnumba.errors import ConfigError, RankError
from rlnumba.kernels.nn import reduce
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import Adapter
from rlnumba.model.shard import Shard
from rlnumba.model.transformer import Transformer, load_model, save_model
from rlnumba.model.weights import Weights
from rlnumba.parallel import launch, saving, zero
from rlnumba.parallel.communicator import SingleRank
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.parallel.placement import RANKS_PER_GPU, gpus_of_ranks
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from tests.parallel import in_threads
from tests.parallel.host_memory import peak_growth
from tests.trainers.runs import MODEL

# 10 M parameters, float32 as on the cpu device: 40 MB of weights, and 80 MB of moments.
SHAPE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
VOCABULARY = SHAPE["vocab_size"] * SHAPE["hidden_size"]
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "global_batch_size": 10}
# For Python's own objects, and pages that the allocator has not given back.
ALLOWANCE = 6 << 20
LR = 1e-2


def config_of():
    return dataclasses.replace(ModelConfig.from_folder(MODEL), **SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    save_model(Transformer(config_of(), Weights.random(config_of())), found)
    return found


def step(policy, k):
    """An optimizer step on any gradient."""
    if policy.communicator is None:
        policy.grads.flat[...] = device.asarray(gradient(policy, k))
        policy.optimizer.step(LR)
    else:
        own = device.asarray(gradient(policy, k)) if policy.communicator.rank == 0 else None
        policy.optimizer.fold(own, 1, True)
        policy.optimizer.step(LR)


def gradient(policy, k):
    return np.random.default_rng(k).standard_normal(policy.model.weights.flat.shape, np.float32)


def policy_of(folder, communicator):
    return Policy(load_model(folder), SFTConfig(**BATCH), communicator=communicator)


def save(policy, communicator, output, number):
    alone = communicator.world_size == 1
    saver = checkpoint.Saver(output) if alone else saving.SharedSaver(output, communicator)
    saver.save(number, policy.model, None, {"policy": policy.state_dict(), "cursor": [number, np.arange(3)]})
    saver.wait()


def measured(communicator, folder, output):
    """{what: peak of this rank's own memory} of loading, saving, resuming, and of loading a part of the model."""
    with pytest.MonkeyPatch.context() as patch:
        # Small as the model is. Weights are gathered in pieces of segments, on a GPU in its memory.
        patch.setattr(reduce, "SEGMENT", 1 << 16)
        patch.setattr(zero, "PIECE_SEGMENTS", 2)
        return measure(communicator, folder, output)


def measure(communicator, folder, output):
    load_model(MODEL)
    peaks = {}
    with peak_growth() as peaks["load"]:
        model = load_model(folder)
    with peak_growth() as peaks["part"]:
        load_model(folder, shard=Shard(communicator.rank, communicator.world_size))
    with peak_growth() as peaks["layers"]:
        load_model(folder, make_weights=partial(LayerShards, communicator=communicator))
    policy = Policy(model, SFTConfig(**BATCH), communicator=communicator)
    step(policy, 1)
    with peak_growth() as peaks["save"]:
        save(policy, communicator, output, 1)
    # Rank 0 renames the folder.
    communicator.barrier()
    with peak_growth() as peaks["resume"]:
        _, state = checkpoint.load(output / "checkpoints" / "step-1")
        policy.load_state_dict(state["policy"])
    step(policy, 2)
    save(policy, communicator, output, 2)
    return {what: found["bytes"] for what, found in peaks.items()}


def hashes_of(output, number):
    """{name: sha256} of a checkpoint's files."""
    files = sorted((output / "checkpoints" / f"step-{number}").iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.skipif(device.name() != "cpu", reason="counts the memory of the cpu device")
@pytest.mark.usefixtures("quick_starts")
def test_a_rank_has_no_more_than_its_share_on_the_host(tmp_path, folder):
    alone = SingleRank()
    measured(alone, folder, tmp_path / "1")
    expected = [hashes_of(tmp_path / "1", number) for number in (1, 2)]
    assert len(expected[0]) == 5
    num_parameters = load_model(folder).weights.flat.size
    layer = 4 * sum(p.size for p in Weights(config_of()).parameters if p.name.startswith("model.layers.0."))
    for world_size in (2, 4):
        output = tmp_path / str(world_size)
        for rank, peaks in enumerate(launch(measured, world_size, folder, output, timeout_s=120)):
            # What is read goes into the weights, which stand for a GPU's memory here, and nowhere else.
            assert peaks["load"] < 4 * num_parameters + layer + ALLOWANCE, (rank, peaks)
            part = Weights(config_of(), shard=Shard(rank, world_size)).flat.nbytes
            assert peaks["part"] < part + layer + ALLOWANCE, (rank, peaks)
            # With zero_stage 3: a part of each layer, the part that the optimizer updates, one layer, and the rest.
            whole = 4 * (2 * num_parameters // world_size + VOCABULARY)
            assert peaks["layers"] < whole + layer + ALLOWANCE, (rank, peaks)
            # Of weights and two moments. A whole copy of one of them would be more.
            share = 12 * num_parameters // world_size
            assert peaks["save"] < share + layer + ALLOWANCE, (rank, peaks)
            assert peaks["resume"] < layer + ALLOWANCE, (rank, peaks)
        assert [hashes_of(output, number) for number in (1, 2)] == expected
    assert layer + ALLOWANCE < num_parameters


def check_folders(communicator, folders):
    try:
        saving.SharedSaver(folders[communicator.rank], communicator)
    except ConfigError as error:
        return str(error)


def test_ranks_that_see_different_folders_are_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "VISIBLE_S", 0.1)
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    assert in_threads.run(check_folders, 3, [here, here, here]) == [None] * 3
    for path in (elsewhere, tmp_path / "missing"):
        found = in_threads.run(check_folders, 3, [here, here, path])
        assert found[0].startswith(
            f"output_dir {here} is not one folder: rank 2 does not see there what rank 0 writes;"
        )
        assert all(found)
    assert not [*here.iterdir(), *elsewhere.iterdir()]


def save_with_a_limit(communicator, output):
    """A second checkpoint, of which rank 1 cannot write its part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "SEGMENT", 4096)
        policy = policy_of(MODEL, communicator)
        save(policy, communicator, output, 1)
        communicator.barrier()
        if communicator.rank == 1:
            # Beyond the first bytes of a file; Python ignores the signal.
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        save(policy, communicator, output, 2)


@pytest.mark.usefixtures("quick_starts")
def test_a_part_that_cannot_be_written_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(RankError) as caught:
        launch(save_with_a_limit, 2, tmp_path, timeout_s=120)
    root = tmp_path / "checkpoints"
    expected = f"{root / 'step-2'}: the checkpoint cannot be written: rank 1: File too large"
    assert str(caught.value) == f"rank 0: {expected}"
    assert [path.name for path in root.iterdir()] == ["step-1"]
    checkpoint.verify(root / "step-1")


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_model_is_copied_once_the_checkpoint_before_is_written(tmp_path, monkeypatch, has_adapter):
    """So the host has one copy at a time, and the training that goes on does not change what is written."""
    model = load_model(MODEL)
    if has_adapter:
        model.adapter = Adapter.new(model.config, LoraConfig(r=2), "float32", "base", 0)
    saver, calls = saving.SharedSaver(tmp_path, SingleRank()), []

    def copy(model, part):
        calls.append("copy")
        raise MemoryError

    monkeypatch.setattr(saver, "wait", lambda: calls.append("wait"))
    monkeypatch.setattr(saving, "host_copy", copy)
    with pytest.raises(MemoryError):
        saver.save(1, model, None, None)
    assert calls == ["wait", "copy"]


def test_other_ranks_write_their_parts_alone():
    arrays = {"part": checkpoint.ArrayPart(np.ones(2), 4, 9), "whole": np.zeros(3)}
    assert [name for name, *_ in saving.own_parts(arrays, is_first=False)] == ["part"]
    found = saving.own_parts(arrays, is_first=True)
    assert [(name, first, len(values)) for name, first, values in found] == [("part", 4, 2), ("whole", 0, 3)]


def test_the_ranks_that_did_not_write_are_named(tmp_path):
    """Rank 2 says what went wrong, rank 3 never ends; what the others have left is removed."""
    saver = saving.SharedSaver(tmp_path, SingleRank())
    saver.communicator = SimpleNamespace(rank=0, world_size=4, timeout_s=0.0)
    for name, text in ((saving.CREATED, ""), (saving.written_by(1), ""), (saving.written_by(2), "rank 2: disk full")):
        (tmp_path / name).write_text(text)
    assert saver._wait_for_others(tmp_path) == ["rank 2: disk full", "rank 3 did not write its part within 0 s"]
    assert list(tmp_path.iterdir()) == []


def test_the_first_rank_that_did_not_write_is_named_of_several(tmp_path, monkeypatch):
    saver, weights = saving.SharedSaver(tmp_path, SingleRank()), SimpleNamespace(size=8, parts=list)
    model = SimpleNamespace(weights=weights, adapter=None)
    for name in ("host_copy", "create", "fill"):
        monkeypatch.setattr(saving, name, lambda *_: model)
    monkeypatch.setattr(saver, "_start", lambda write: write())
    monkeypatch.setattr(saver, "_wait_for_others", lambda partial: ["rank 1: disk full", "rank 2: no answer"])
    with pytest.raises(checkpoint.CheckpointError, match="rank 1: disk full"):
        saver.save(1, model, None, None)


def test_a_rank_whose_first_rank_does_not_come_says_so(tmp_path):
    """It writes what went wrong for rank 0, and nothing if the folder has not been made at all."""
    saver = saving.SharedSaver(tmp_path, SingleRank())
    saver.communicator = SimpleNamespace(rank=2, world_size=3, timeout_s=0.0)
    saver._write_part(tmp_path, [])
    assert (tmp_path / saving.written_by(2)).read_text() == "rank 2: rank 0 did not write its part within 0 s"
    saver._write_part(tmp_path / "none", [])
    assert not (tmp_path / "none").exists()


# 168 M parameters.
LARGE = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
# Page-locked pieces on their way, and what the driver and compiled kernels take.
GPU_ALLOWANCE = 160 << 20


@pytest.mark.gpu
def test_weights_on_gpus_have_no_copy_on_the_host(tmp_path, monkeypatch):
    """On two GPUs, or two processes that share one."""
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    config = dataclasses.replace(config_of(), **LARGE | {"num_key_value_heads": 16})
    weights = Weights.random(config)
    save_model(Transformer(config, weights), tmp_path / "model")
    nbytes = weights.flat.nbytes
    place = {"transport": "peer", "gpus": gpus_of_ranks(2, "test")}
    outputs = [tmp_path / "1", tmp_path / "2"]
    measured(SingleRank(), tmp_path / "model", outputs[0])
    for peaks in launch(measured, 2, tmp_path / "model", outputs[1], timeout_s=300, **place):
        for what in ("load", "part", "layers", "resume"):
            assert peaks[what] < GPU_ALLOWANCE, (what, peaks)
        assert peaks["save"] < 3 * nbytes // 2 + GPU_ALLOWANCE, peaks
    assert hashes_of(outputs[1], 2) == hashes_of(outputs[0], 2)
