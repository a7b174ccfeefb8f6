import json
import os
import pathlib
import shutil
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlnumba.data import read_rows
from rlnumba.errors import UserError
from rlnumba.model import tensor_file, weights
from rlnumba.model.config import ModelConfig
from rlnumba.model.parameter import ALIGNMENT
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.weights import Weights, load_weights, open_tensors, save_weights, write_tensors
from rlnumba.runtime import device, memory, transfer
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
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return ModelConfig.from_folder(folder)


def refusal(folder, config):
    with pytest.raises(UserError) as caught:
        load_weights(folder, config)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 1200
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
        assert p.offset % ALIGNMENT == 0 and not used[p.offset : p.offset + p.size].any()
        used[p.offset : p.offset + p.size] = True
        assert (p.offset < held.decay_end) == (len(p.shape) == 2)
    assert not device.to_host(held.flat)[~used].any()
    grads = held.grads()
    assert grads.flat.shape == held.flat.shape and grads.flat.dtype == np.float32 and not grads.flat.any()
    grads.layers[1][1].down[0, 0] = 1
    assert grads["model.layers.1.down"][0, 0] == 1 and np.count_nonzero(device.to_host(grads.flat)) == 1
    assert held.layers[0][0].q_norm is None and held.layers[0][0].o_bias.shape == (48,)


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
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


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
    assert (held.norm == 1).all() and not held.layers[0][0].qkv_bias.any()


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
    names = sorted(tensors_of(MODELS / "qwen3_tied"))
    for count, rest in ((16, None), (18, " and 2 more")):

        def change(tensors, count=count):
            for name in names[:count]:
                del tensors[name]

        message = refusal(tmp_path, rewrite(tmp_path, change))
        assert sum(name in message for name in names) == 16
        assert message.endswith(rest) if rest else "more" not in message


@pytest.mark.parametrize("dtype, stored", [(np.int8, "I8"), (np.float64, "F64"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_other_dtypes_are_refused(dtype, stored, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)

    message = refusal(tmp_path, rewrite(tmp_path, change))
    assert f"tensor model.norm.weight has dtype {stored} (supported: F32, F16, BF16)" in message


def test_redundant_tensors(tmp_path):
    def equal_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)

    def other_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)

    def odd_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(ml_dtypes.float8_e5m2)

    def only_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    config = rewrite(tmp_path, equal_head)
    _, held = loaded("qwen3_tied")
    assert_same_bits(load_weights(tmp_path, config).flat, held.flat)
    assert "lm_head.weight differs from" in refusal(tmp_path, rewrite(tmp_path, other_head))
    assert "model.embed_tokens.weight is not" in refusal(tmp_path, rewrite(tmp_path, only_head))
    assert "lm_head.weight has dtype F8_E5M2" in refusal(tmp_path, rewrite(tmp_path, odd_head))


def test_damaged_files_are_named(tmp_path):
    config = rewrite(tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:7],
        whole[:500],
        whole[:-1],
        whole[: len(whole) // 2],
        whole + b"x",
        b"\xff" * 8 + whole[8:],
        whole[:8] + b"x" + whole[9:],
        whole.replace(b'"shape":[64]', b'"shape":[63]', 1),
        whole.replace(b'"dtype":"F32"', b'"dtype":"Q32"', 1),
        whole.replace(b'"dtype":"F32"', b'"dtype":"\\n2"', 1),
    ):
        assert content != whole
        path.write_bytes(content)
        assert f"{path}: truncated or damaged safetensors file (" in refusal(tmp_path, config)
    path.unlink()
    path.mkdir()
    assert f"{path}: Is a directory" in refusal(tmp_path, config)
    path.rmdir()
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


def micro(folder):
    """The smallest golden model in a folder of its own: its config, its weights file, and that file's bytes."""
    shutil.copytree(MODELS / "qwen3_micro", folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    return ModelConfig.from_folder(folder), path, path.read_bytes()


def test_a_file_cut_anywhere_is_refused(tmp_path):
    config, path, whole = micro(tmp_path)
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(UserError, match="model.safetensors: truncated or damaged"):
            load_weights(tmp_path, config)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "a.jsonl", "a.parquet"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    """A clone without Git LFS has one in place of each large file."""
    config, *_ = micro(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    read = {"model.safetensors": lambda: load_weights(tmp_path, config), "tokenizer.json": lambda: Tokenizer(tmp_path)}
    read["config.json"] = lambda: ModelConfig.from_folder(tmp_path)
    with pytest.raises(UserError, match=f"{name}: a pointer of Git LFS, not the file itself"):
        read.get(name, lambda: read_rows(tmp_path / name))()


def test_a_flipped_header_bit_is_refused_or_does_not_matter(tmp_path):
    config, path, whole = micro(tmp_path)
    expected = load_weights(tmp_path, config).flat
    metadata = range(whole.index(b'"__metadata__"'), whole.index(b"}") + 1)
    accepted = []
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        try:
            assert_same_bits(load_weights(tmp_path, config).flat, expected, f"bit {at % 8} of byte {at}")
            accepted.append(at)
        except UserError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)
    # Nothing but free text, and white space that stays white space.
    assert all(at in metadata or whole[at] in b" " for at in accepted)


def test_loading_holds_one_tensor_beyond_the_model(tmp_path):
    config = replace(ModelConfig.from_folder(MODELS / "qwen3_tied"), vocab_size=20_000)
    held = Weights.random(config)
    save_weights(held, tmp_path)
    tracemalloc.start()
    load_weights(tmp_path, config, "float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < held.flat.nbytes + held.embed_tokens.nbytes + 500_000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("piece_bytes", [256, 1 << 20])
def test_pieces_of_all_threads_make_up_the_weights(tmp_path, monkeypatch, dtype, piece_bytes):
    """Also of a file whose tensors do not begin at multiples of their elements' size."""
    config = replace(ModelConfig.from_folder(MODELS / "qwen3_untied"), vocab_size=20_000)
    held = Weights.random(config, "bfloat16")
    save_weights(held, tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    monkeypatch.setattr(transfer, "PIECE_BYTES", piece_bytes)
    loaded = load_weights(tmp_path, config, dtype)
    assert len(header) % 2 and loaded.flat.nbytes > 3 * piece_bytes
    assert_same_bits(device.to_host(loaded.flat), device.to_host(held.flat).astype(loaded.dtype))


def test_a_thread_that_fails_ends_the_loading(tmp_path, monkeypatch):
    config = ModelConfig.from_folder(MODELS / "qwen3_untied")

    def fails(*arguments):
        raise MemoryError("no memory")

    monkeypatch.setattr(transfer, "_taken", fails)
    with pytest.raises(MemoryError, match="no memory"):
        load_weights(MODELS / "qwen3_untied", config)


def test_written_tensors_come_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "byte": rng.integers(0, 255, 3).astype(np.uint8),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5),
        "half": rng.standard_normal((3, 5)).astype(np.float16),
        "keys": rng.integers(0, 2**32, (2, 2), np.uint32),
        "flag": np.array([True, False]),
        "strided": np.arange(12, dtype=np.int64).reshape(3, 4).T,
        "swapped": np.arange(3, dtype=">i4"),
        "brain": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
    }
    path = tmp_path / "x.safetensors"
    path.with_name("x.safetensors.partial").touch(0o400)  # what a killed process left
    write_tensors(path, arrays)
    found = open_tensors(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        values = found[name].read()
        assert found[name].shape == array.shape and values.flags.writeable
        assert_same_bits(values, array.astype(array.dtype.newbyteorder("=")), name)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["other", "x.safetensors"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.zeros(3)})
    whole = path.read_bytes()
    with pytest.raises(UserError, match="x.safetensors: cannot be written .*complex128") as caught:
        write_tensors(path, {"a": np.zeros(3, np.complex128)})
    assert "\n" not in str(caught.value) and path.read_bytes() == whole and os.listdir(tmp_path) == [path.name]


def test_files_have_the_bytes_of_the_librarys(tmp_path):
    """Of all dtypes, in any order, with names of any characters."""
    rng = np.random.default_rng(1)
    kinds = "bool u1 i1 i2 u2 f2 i4 u4 f4 c8 f8 i8 u8".split() + [ml_dtypes.bfloat16]
    for metadata in (None, {}, {"format": "pt"}):
        names = [f'{"x" * rng.integers(5)}"\u00fc\\{i}\x07' for i in rng.permutation(2 * len(kinds))]
        arrays = {name: np.ones((2, i % 5), kinds[i % len(kinds)]) for i, name in enumerate(names)}
        write_tensors(tmp_path / "own", arrays, metadata)
        save_file(arrays, tmp_path / "theirs", metadata)
        assert (tmp_path / "own").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_model_of_several_files_has_the_librarys_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "SHARD_BYTES", 5000)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 256)
    config, held = loaded("qwen3_untied")
    save_weights(held, tmp_path, "bfloat16")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    views = {name: device.to_host(view).astype(ml_dtypes.bfloat16) for name, view in held.tensors()}
    for path in files:
        names = load_file(path).keys()
        save_file({name: views[name] for name in names}, tmp_path / "theirs", {"format": "pt"})
        assert path.read_bytes() == (tmp_path / "theirs").read_bytes()
