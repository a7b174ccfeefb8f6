import errno
import json
import os
import pathlib
import shutil
import threading
import time

import numpy as np
import pytest

from rlnumba import checkpoint
from rlnumba.errors import UserError
from rlnumba.model import weights
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
        "pair": ({"x": np.arange(4)}, 2),
        "odd": {"nan": float("nan"), "empty": np.zeros((0, 2), np.float64)},
    }


def test_comes_back_bit_for_bit(model, tokenizer, tmp_path):
    state = state_of(5)
    folder = checkpoint.save(tmp_path, 5, model, tokenizer, state)
    assert folder == tmp_path / "checkpoints" / "step-5" == checkpoint.latest_readable(tmp_path)
    step, back = checkpoint.load(folder)
    assert step == 5 and back["optimizer"]["count"] == 5 and back["optimizer"]["lr"] == 0.1 + 0.2
    assert back["cursor"] == state["cursor"] and np.float32(back["mean"]) == state["mean"]
    assert np.isnan(back["odd"]["nan"]) and back["odd"]["empty"].shape == (0, 2)
    assert_same_bits(back["optimizer"]["m"], state["optimizer"]["m"])
    assert_same_bits(back["noise"], state["noise"])
    assert_same_bits(back["pair"][0]["x"], state["pair"][0]["x"])
    assert back["pair"][1] == 2 and back["mean"] == float(state["mean"])
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
    assert checkpoint.load(checkpoint.latest_readable(tmp_path))[1] == {"try": 2}
    assert os.listdir(tmp_path / "checkpoints") == ["step-3"]


@pytest.mark.parametrize("how", [SystemExit, OSError])
def test_ended_between_the_two_renames_of_a_step_it_keeps_the_one_of_before(model, tmp_path, monkeypatch, how):
    """SystemExit stands for SIGKILL, after which nothing is put in order before the next start."""
    checkpoint.save(tmp_path, 3, model, None, {"a": 1})
    rename, calls = os.rename, []

    def ends_at_the_second(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise how(errno.EIO, "ended")
        rename(old, new)

    monkeypatch.setattr(os, "rename", ends_at_the_second)
    with pytest.raises(SystemExit if how is SystemExit else UserError):
        checkpoint.save(tmp_path, 3, model, None, {"a": 2})
    assert checkpoint.existing(tmp_path) == ([] if how is SystemExit else [tmp_path / "checkpoints" / "step-3"])
    checkpoint.remove_leftovers(tmp_path)
    assert checkpoint.load(checkpoint.latest_readable(tmp_path)) == (3, {"a": 1})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]
    # What a replaced one is left of is removed where its successor has the name.
    (tmp_path / "checkpoints" / ".step-3.replaced").mkdir()
    checkpoint.remove_leftovers(tmp_path)
    assert checkpoint.load(checkpoint.latest_readable(tmp_path)) == (3, {"a": 1})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_a_copied_model_is_not_mixed_with_an_earlier_one(model, tmp_path, monkeypatch):
    one, out = checkpoint.save(tmp_path / "one", 1, model, None, None), tmp_path / "out"
    other = load_model(GOLDEN / "models" / "llama3", "float32")
    other.weights.flat[...] *= np.float32(2)
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    several = checkpoint.save(tmp_path / "several", 1, other, None, None)
    for folder, expected in ((one, model), (several, other), (one, model)):
        checkpoint.copy_model(folder, out)
        assert_same_bits(load_model(out, "float32").weights.flat, expected.weights.flat)
        assert sorted(path.name for path in out.glob("model*")) == sorted(path.name for path in folder.glob("model*"))


def test_a_copied_tokenizer_is_not_mixed_with_an_earlier_one(model, tokenizer, tmp_path):
    folder, out = checkpoint.save(tmp_path / "run", 1, model, tokenizer, None), tmp_path / "out"
    out.mkdir()
    (out / "chat_template.jinja").write_text("another one's")
    checkpoint.copy_model(folder, out)
    assert Tokenizer(out).templates == tokenizer.templates
    (out / "chat_template.jinja").write_text("own")
    checkpoint.copy_model(checkpoint.save(tmp_path / "run", 2, model, None, None), out)
    assert Tokenizer(out).templates["default"] == "own"


def test_large_arrays_have_files_of_their_own(model, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100)
    state = {name: np.full(size, i, np.float32) for i, (name, size) in enumerate({"a": 10, "b": 10, "c": 90}.items())}
    folder = checkpoint.save(tmp_path, 1, model, None, state)
    names = {path.name for path in folder.glob("trainer_state*.safetensors")}
    assert names == {f"trainer_state-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert {*json.loads((folder / "trainer_state.json").read_text())["sha256"]} > names
    _, found = checkpoint.load(checkpoint.latest_readable(tmp_path))
    assert found.keys() == state.keys() and all(np.array_equal(found[name], state[name]) for name in state)
    checkpoint.copy_model(folder, tmp_path / "final")
    assert not list((tmp_path / "final").glob("trainer_state*")) and not list((tmp_path / "final").glob("*.partial"))
    assert (tmp_path / "final" / "model.safetensors").exists()
    (folder / "trainer_state-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="trainer_state-00002-of-00002.safetensors"):
        checkpoint.load(folder)


def test_an_interrupted_save_leaves_the_earlier_ones(model, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, model, None, {"step": 1})
    for call in ("save_model", "write_tensors", "write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, call, lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoint.save(tmp_path, 2, model, None, {})
        assert checkpoint.load(checkpoint.latest_readable(tmp_path))[1] == {"step": 1}
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
def test_damage_is_recognised(name, change, model, tmp_path, capsys):
    checkpoint.save(tmp_path, 1, model, None, state_of(1))
    newer = checkpoint.save(tmp_path, 2, model, None, state_of(2))
    change(newer / name)
    assert checkpoint.latest_readable(tmp_path) == tmp_path / "checkpoints" / "step-1"
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(newer / name) in warning
    shutil.rmtree(tmp_path / "checkpoints" / "step-1")
    with pytest.raises(UserError, match="none of the 1 checkpoints is readable"):
        checkpoint.latest_readable(tmp_path)


def test_a_damaged_checkpoint_is_named_on_stderr(model, tmp_path, capsys):
    checkpoint.save(tmp_path, 1, model, None, {})
    newer = checkpoint.save(tmp_path, 2, model, None, {})
    (newer / "config.json").unlink()
    assert checkpoint.latest_readable(tmp_path).name == "step-1"
    assert capsys.readouterr() == (
        "",
        f"rlnumba: warning: checkpoint {newer} is damaged and passed over: "
        f"{newer / 'config.json'}: No such file or directory\n",
    )


def test_what_is_wrong_is_said_in_full(model, tmp_path):
    folder = checkpoint.save(tmp_path, 7, model, None, {})
    root = tmp_path / "checkpoints"
    checkpoint.save(tmp_path, 10, model, None, {})
    assert checkpoint.of_step(tmp_path, 7) == folder
    (folder / "model.safetensors").write_bytes(b"")
    for call, message in (
        (lambda: checkpoint.of_step(tmp_path, 9), f"{root / 'step-9'}: no such checkpoint; {root} has step-7, step-10"),
        (
            lambda: checkpoint.of_step(tmp_path / "other", 9),
            f"{tmp_path / 'other' / 'checkpoints' / 'step-9'}: no such checkpoint; "
            f"{tmp_path / 'other' / 'checkpoints'} has no checkpoint",
        ),
        (lambda: checkpoint.of_step(tmp_path, 7), f"{folder / 'model.safetensors'}: its content is not what was saved"),
        (
            lambda: checkpoint.load(root / "step-10"),
            f"{root / 'step-10' / 'trainer_state.json'}: its content is not what was saved",
        ),
    ):
        state = root / "step-10" / "trainer_state.json"
        state.write_text(state.read_text().replace('"step": 10', '"step": 11'))
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == message
    # What was never written by `save` is no checkpoint's state.
    state.write_text("{}")
    with pytest.raises(UserError, match="its content is not what was saved"):
        checkpoint.load(root / "step-10")


def test_only_folders_of_steps_are_checkpoints(model, tmp_path):
    for name in ("step-3", "step-x", "step-4.bak", "astep-5", ".step-6", "step-07"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.existing(tmp_path)] == ["step-07", "step-3"]
    with pytest.raises(UserError, match="none of the 2 checkpoints is readable$"):
        checkpoint.latest_readable(tmp_path)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(model, tokenizer, tmp_path, monkeypatch):
    """Each of its files and its folder are flushed first, then the name, also where it takes the place of another."""
    events, fsync, rename = [], os.fsync, os.rename

    def flushed(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old, new):
        events.append(("rename", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    root = tmp_path / "checkpoints"
    for again in (False, True):
        events.clear()
        folder = checkpoint.save(tmp_path, 4, model, tokenizer, state_of(4))
        at = events.index(("rename", str(folder)))
        partial = root / ".step-4.partial"
        before = {name.removesuffix(".partial") for what, name in events[:at] if what == "fsync"}
        for path in folder.rglob("*"):
            assert str(partial / path.name) in before, path
        # The folder itself, whose name ends as those of files that are being written do.
        assert events[at - 1 - again][1] == str(partial)
        assert events[at + 1 :] == [("fsync", str(root))]
        assert os.listdir(root) == ["step-4"]


def test_a_run_without_checkpoints(tmp_path):
    assert checkpoint.latest_readable(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.latest_readable(tmp_path) is None


def test_a_checkpoint_in_16_bits(tmp_path):
    if device.name() == "cpu":
        pytest.skip("the cpu device computes in float32")
    model = load_model(GOLDEN / "models" / "qwen2", "bfloat16")
    folder = checkpoint.save(tmp_path, 1, model, None, {})
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same_bits(load_model(folder).weights.flat, model.weights.flat)


def test_two_arrays_of_one_name_are_refused(model, tmp_path):
    state = {"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}
    with pytest.raises(ValueError, match="two arrays of trainer_state are called a.b"):
        checkpoint.save(tmp_path, 1, model, None, state)


def test_a_checkpoint_is_written_from_a_copy_while_training_goes_on(tmp_path, monkeypatch):
    """What the weights become after `save` has returned is not in it, and the next save waits for it."""
    model, write, begun, go_on = load_model(GOLDEN / "models" / "llama3", "float32"), checkpoint._write, [], [False]

    def slowly(partial, step, *arguments):
        begun.append(step)
        while not go_on[0]:
            time.sleep(0.01)
        write(partial, step, *arguments)

    monkeypatch.setattr(checkpoint, "_write", slowly)
    before = np.array(device.to_host(model.weights.flat))
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, model, None, {"a": np.ones(3)})
    model.weights.flat[...] = 0
    saver.check()
    assert checkpoint.existing(tmp_path) == []
    timer = threading.Timer(0.3, go_on.__setitem__, (0, True))
    timer.start()
    saver.save(2, model, None, {"a": np.ones(3)})
    assert not timer.is_alive() and [path.name for path in checkpoint.existing(tmp_path)][-1] == "step-1"
    saver.wait()
    assert begun == [1, 2]
    assert_same_bits(load_model(tmp_path / "checkpoints" / "step-1", "float32").weights.flat, before)
    assert not load_model(tmp_path / "checkpoints" / "step-2", "float32").weights.flat.any()
    saver.wait()


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.safetensors", "trainer_state.json"])
def test_a_full_disk_leaves_the_last_checkpoint(model, tmp_path, monkeypatch, file):
    """The error of the thread that writes is raised in the one that trains, at the next look."""
    saver, function = checkpoint.Saver(tmp_path), "write_json" if file.endswith("json") else "write_tensors"
    saver.save(1, model, None, state_of(1))
    saver.wait()
    for module in (checkpoint, weights):
        write = getattr(module, function)

        def full(path, *arguments, write=write):
            if path.name == file:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, *arguments)

        monkeypatch.setattr(module, function, full)
    saver.save(2, model, None, state_of(2))
    message = f"{tmp_path / 'checkpoints' / 'step-2'}: the checkpoint cannot be written: No space left on device"
    with pytest.raises(checkpoint.CheckpointError) as caught:
        for _ in range(1000):
            saver.check()
            time.sleep(0.01)
    assert str(caught.value) == message
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]
    assert checkpoint.load(checkpoint.latest_readable(tmp_path))[1]["optimizer"]["count"] == 1


def test_the_model_alone(model, tmp_path):
    folder = checkpoint.save(tmp_path, 1, model, None, None)
    checkpoint.verify(folder)
    assert not (folder / "trainer_state.safetensors").exists()
    assert_same_bits(load_model(folder, "float32").weights.flat, model.weights.flat)
    with pytest.raises(UserError, match=r"step-1: holds the model alone \(train.save_only_model\), so no run can be"):
        checkpoint.load(folder)
