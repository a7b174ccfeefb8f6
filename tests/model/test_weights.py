import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlnumba import device, memory
from rlnumba.errors import UserError
from rlnumba.model import safetensors, weights
from rlnumba.model.config import ModelConfig
from rlnumba.model.weights import Weights, load_weights, save_weights
from tests.close import assert_same_bits

MODELS = pathlib.Path(__file__).parent.parent / "golden" / "models"
NAMES = sorted(path.name for path in MODELS.iterdir())


def loaded(name, dtype="float32"):
    config = ModelConfig.from_folder(MODELS / name)
    return config, load_weights(MODELS / name, config, dtype)


def tensors_of(folder):
    """{name: array} of a folder, read by the safetensors library, bfloat16 widened to float32."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, array in load_file(path).items():
            found[name] = np.asarray(array)
    return found


def rewrite(folder, change):
    """A copy of the tied Qwen3's tensors after change(tensors), as one file in `folder`."""
    tensors = tensors_of(MODELS / "qwen3_tied")
    change(tensors)
    folder.mkdir(exist_ok=True)
    shutil.copy(MODELS / "qwen3_tied" / "config.json", folder)
    entries = [(name, array.dtype, array.shape, array.copy) for name, array in tensors.items()]
    safetensors.write(folder / "model.safetensors", entries, {"format": "pt"})
    return ModelConfig.from_folder(folder)


def refusal(folder, config):
    with pytest.raises(UserError) as caught:
        load_weights(folder, config)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_reaches_its_rows(name):
    config, held = loaded(name)
    tensors = tensors_of(MODELS / name)
    for p in held.parameters:
        expected = np.concatenate([tensors.pop(source).astype(np.float32) for source, _ in p.rows])
        assert_same_bits(held[p.name], expected, p.name)
    assert not tensors
    assert (held.lm_head is held.embed_tokens) == config.tie_word_embeddings


def test_layout():
    config, held = loaded("llama_head48")
    used = np.zeros(held.flat.size, bool)
    for p in held.parameters:
        assert p.offset % weights.ALIGNMENT == 0 and not used[p.offset : p.offset + p.size].any()
        used[p.offset : p.offset + p.size] = True
        assert (p.offset < held.decay_end) == (len(p.shape) == 2)
    assert not device.to_host(held.flat)[~used].any()
    grads = held.grads()
    assert grads.flat.shape == held.flat.shape and grads.flat.dtype == np.float32 and not grads.flat.any()
    grads.layers[1].down[0, 0] = 1
    assert grads["model.layers.1.down"][0, 0] == 1 and np.count_nonzero(device.to_host(grads.flat)) == 1
    assert held.layers[0].q_norm is None and held.layers[0].o_bias.shape == (48,)


def test_regions_count_bytes():
    memory.reset_peaks()
    before = memory.report().get("grads", 0)
    _, held = loaded("llama3")
    grads = held.grads()
    assert memory.report()["grads"] - before >= grads.flat.nbytes


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_any_checkpoint_dtype_to_any_compute_dtype(stored, compute, tmp_path):
    config, held = loaded("llama3")
    save_weights(held, tmp_path, stored)
    again = load_weights(tmp_path, config, compute)
    assert again.flat.dtype == device.dtype(compute)
    once = device.to_host(held.flat).astype(device.dtype(stored)).astype(np.float32).astype(device.dtype(compute))
    assert_same_bits(again.flat, once)


def test_default_dtype_is_the_checkpoints():
    config = ModelConfig.from_folder(MODELS / "qwen2")
    assert load_weights(MODELS / "qwen2", config).flat.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_saved_under_the_names_of_the_original(name, tmp_path):
    _, held = loaded(name)
    save_weights(held, tmp_path)
    saved, original = tensors_of(tmp_path), tensors_of(MODELS / name)
    assert saved.keys() == original.keys()
    for key in saved:
        assert_same_bits(saved[key], original[key].astype(np.float32), key)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert safetensors.SafetensorsFile(tmp_path / "model.safetensors").metadata == {"format": "pt"}


def test_shards(tmp_path, monkeypatch):
    config, held = loaded("qwen3_tied")
    save_weights(held, tmp_path)
    monkeypatch.setattr(weights, "SHARD_BYTES", 100_000)
    save_weights(held, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(MODELS / "qwen3_tied").keys()
    assert index["metadata"]["total_size"] == sum(p.size * 4 for p in held.parameters)
    assert_same_bits(load_weights(tmp_path, config).flat, held.flat)
    monkeypatch.undo()
    save_weights(held, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_random_weights():
    config = ModelConfig.from_folder(MODELS / "qwen2")
    held = Weights.random(config, seed=3)
    assert_same_bits(held.flat, Weights.random(config, seed=3).flat)
    assert not (held.flat == Weights.random(config, seed=4).flat).all()
    # 9,216 draws: the deviation of their spread is 0.02 / sqrt(2 * 9216) = 0.00015.
    assert abs(float(held.embed_tokens.std()) - 0.02) < 0.0008
    assert (held.norm == 1).all() and not held.layers[0].qkv_bias.any()


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.bonus.weight"] = np.zeros(3, np.float32)
        tensors["model.norm.weight"] = np.zeros(65, np.float32)

    message = refusal(tmp_path, rewrite(tmp_path, change))
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in message
    assert "tensors that qwen3 does not have: model.layers.2.bonus.weight" in message
    assert "model.norm.weight is (65,), not (64,)" in message


def test_many_names_are_cut(tmp_path):
    def change(tensors):
        for name in list(tensors)[:10]:
            del tensors[name]

    assert " and 6 more" in refusal(tmp_path, rewrite(tmp_path, change))


def test_integer_tensors_are_refused(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

    assert "tensor model.norm.weight has dtype I8" in refusal(tmp_path, rewrite(tmp_path, change))


def test_redundant_tensors(tmp_path):
    def equal_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    def other_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)

    def only_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    config = rewrite(tmp_path, equal_head)
    _, held = loaded("qwen3_tied")
    assert_same_bits(load_weights(tmp_path, config).flat, held.flat)
    assert "lm_head.weight differs from" in refusal(tmp_path, rewrite(tmp_path, other_head))
    assert "model.embed_tokens.weight is not" in refusal(tmp_path, rewrite(tmp_path, only_head))


def test_damaged_files_are_named(tmp_path):
    config = rewrite(tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content, words in (
        (b"", "too short for a header"),
        (whole[:7], "too short for a header"),
        (whole[:500], "bytes in a file of 500 bytes"),
        (whole[:-1], "truncated: tensor"),
        (whole[: len(whole) // 2], "truncated: tensor"),
        (b"\xff" * 8 + whole[8:], "damaged safetensors file"),
        (whole[:8] + b"x" + whole[9:], "damaged safetensors header"),
        (whole.replace(b'"shape":[64]', b'"shape":[63]', 1), "do not fit its shape"),
        (whole.replace(b'"dtype":"F32"', b'"dtype":"Q32"'), "has dtype Q32"),
    ):
        path.write_bytes(content)
        message = refusal(tmp_path, config)
        assert words in message and str(path) in message
    path.unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(tmp_path, config)
    (tmp_path / "pytorch_model.bin").touch()
    assert "save the checkpoint as safetensors first" in refusal(tmp_path, config)


def test_damaged_shards_are_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "qwen3_untied", folder)
    config = ModelConfig.from_folder(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "tensor ghost.weight is not in this file" in refusal(folder, config)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: No such file" in refusal(folder, config)


def test_file_format_against_the_library(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "byte": rng.integers(0, 255, 3).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float64(2.5).reshape(()),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "keys": rng.integers(0, 2**32, (2, 2), np.uint32),
        "flag": np.array([True, False]),
        "strided": np.arange(12, dtype=np.int64).reshape(3, 4).T,
        "brain": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
    }
    path = tmp_path / "x.safetensors"
    safetensors.write(path, [(name, a.dtype, a.shape, a.copy) for name, a in arrays.items()])
    mine, library = safetensors.SafetensorsFile(path), load_file(path)
    assert mine.entries.keys() == library.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(mine[name], array)
        np.testing.assert_array_equal(library[name].astype(array.dtype), array)
        assert mine[name].dtype == array.dtype and mine.entries[name].begin % array.itemsize == 0
    with pytest.raises(ValueError, match="half must be"):
        safetensors.write(path, [("half", np.float16, (2, 2), arrays["half"].copy)])
