import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from rlnumba import checkpoint
from rlnumba.errors import UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from tests.close import assert_same_bits

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN / "models" / "llama3", "float32")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(GOLDEN / "tokenizer")


def state_of(step):
    rng = np.random.default_rng(step)
    return {
        "optimizer": {"m": rng.standard_normal(9).astype(np.float32), "count": step, "lr": 0.1 + 0.2},
        "cursor": [step, None, True, "x"],
        "noise": rng.integers(0, 2**32, (2, 3), np.uint32),
        "mean": np.float32(0.1),
        "odd": {"nan": float("nan"), "empty": np.zeros((0, 2), np.float64)},
    }


def test_comes_back_bit_for_bit(model, tokenizer, tmp_path):
    state = state_of(5)
    folder = checkpoint.save(tmp_path, 5, model, tokenizer, state)
    assert folder == tmp_path / "checkpoints" / "step-5" == checkpoint.latest_readable(tmp_path)
    loaded = checkpoint.load(folder)
    assert (loaded.step, loaded.folder) == (5, folder)
    back = loaded.trainer_state
    assert back["optimizer"]["count"] == 5 and back["optimizer"]["lr"] == 0.1 + 0.2
    assert back["cursor"] == state["cursor"] and np.float32(back["mean"]) == state["mean"]
    assert np.isnan(back["odd"]["nan"]) and back["odd"]["empty"].shape == (0, 2)
    assert_same_bits(back["optimizer"]["m"], state["optimizer"]["m"])
    assert_same_bits(back["noise"], state["noise"])
    back["noise"][0, 0] = 1  # an array of its own, not the file's
    again = load_model(folder, "float32")
    assert again.config == model.config
    assert_same_bits(again.weights.flat, model.weights.flat)
    assert Tokenizer(folder).encode("apples") == tokenizer.encode("apples")


def test_the_newest_number_wins_and_old_ones_go(model, tmp_path):
    for step in (2, 9, 10):
        checkpoint.save(tmp_path, step, model, None, {}, keep_last=2)
    assert [path.name for path in checkpoint.existing(tmp_path)] == ["step-10", "step-9"]
    assert checkpoint.latest_readable(tmp_path).name == "step-10"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-10", "step-9"]


def test_saving_a_step_again_replaces_it(model, tmp_path):
    checkpoint.save(tmp_path, 3, model, None, {"try": 1})
    checkpoint.save(tmp_path, 3, model, None, {"try": 2})
    assert checkpoint.load(checkpoint.latest_readable(tmp_path)).trainer_state == {"try": 2}
    assert os.listdir(tmp_path / "checkpoints") == ["step-3"]


def test_an_interrupted_save_leaves_the_earlier_ones(model, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, model, None, {"step": 1})
    for call in ("save_model", "write_tensors", "write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, call, lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoint.save(tmp_path, 2, model, None, {})
        assert checkpoint.load(checkpoint.latest_readable(tmp_path)).trainer_state == {"step": 1}
    checkpoint.save(tmp_path, 3, model, None, {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-1", "step-3"]


def damages():
    def shorten(path):
        path.write_bytes(path.read_bytes()[:-2])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    def edit(path):
        path.write_text(path.read_text().replace('"count": 2', '"count": 3'))

    yield pytest.param("trainer_state.json", edit, id="trainer_state.json-edit")
    for name in ("model.safetensors", "trainer_state.safetensors", "trainer_state.json", "config.json"):
        for change in (shorten, flip, pathlib.Path.unlink):
            yield pytest.param(name, change, id=f"{name}-{change.__name__}")


@pytest.mark.parametrize("name, change", list(damages()))
def test_damage_is_recognised(name, change, model, tmp_path):
    checkpoint.save(tmp_path, 1, model, None, state_of(1))
    newer = checkpoint.save(tmp_path, 2, model, None, state_of(2))
    change(newer / name)
    warnings = []
    assert checkpoint.latest_readable(tmp_path, warnings.append) == tmp_path / "checkpoints" / "step-1"
    assert len(warnings) == 1 and str(newer / name) in warnings[0] and "\n" not in warnings[0]
    shutil.rmtree(tmp_path / "checkpoints" / "step-1")
    with pytest.raises(UserError, match="none of the 1 checkpoints is readable"):
        checkpoint.latest_readable(tmp_path, warnings.append)


def test_a_run_without_checkpoints(tmp_path):
    assert checkpoint.latest_readable(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.latest_readable(tmp_path) is None


def test_a_checkpoint_in_16_bits(tmp_path):
    if device.name() == "cpu":
        pytest.skip("the numpy device computes in float32")
    model = load_model(GOLDEN / "models" / "qwen2", "bfloat16")
    folder = checkpoint.save(tmp_path, 1, model, None, {})
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same_bits(load_model(folder).weights.flat, model.weights.flat)


def test_two_arrays_of_one_name_are_refused(model, tmp_path):
    state = {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}
    with pytest.raises(ValueError, match="two arrays of trainer_state are called a.b"):
        checkpoint.save(tmp_path, 1, model, None, state)
