"""New weights for a model that is in use. That of whole models is tested through the server, in tests/serve."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rlnumba.config.lora import LoraConfig
from rlnumba.errors import UserError
from rlnumba.model.lora import Adapter, save_adapter
from rlnumba.model.new_weights import WeightFolders
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from tests.close import assert_same_bits

BASE = Path(__file__).parent.parent / "golden" / "models" / "qwen3_tied"


def save_new(folder, weights, seed, **keys):
    """Write an adapter with random values to a folder."""
    adapter = Adapter.new(weights.config, LoraConfig(**{"r": 4} | keys), "float32", str(BASE), seed, weights.score)
    adapter.set_flat(np.random.default_rng(seed).standard_normal(adapter.flat.size, np.float32))
    folder.mkdir()
    save_adapter(adapter, folder)
    return folder


def test_an_adapter_takes_the_values_of_another_folder(tmp_path):
    weights = load_model(BASE, "float32").weights
    folders = [save_new(tmp_path / str(seed), weights, seed) for seed in range(2)]
    model, new = (load_model(folder, "float32", base=str(BASE)) for folder in folders)
    served = WeightFolders(model, folders[0])
    before = device.to_host(model.adapter.flat).copy()
    with pytest.raises(UserError, match="not an adapter's folder"):
        served.read(BASE)
    other = save_new(tmp_path / "2", weights, 2, r=8)
    with pytest.raises(UserError, match="r=8.* is not the .*r=4"):
        served.read(other)
    shutil.copytree(folders[1], tmp_path / "cut")
    path = tmp_path / "cut" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match="truncated or damaged"):
        served.read(tmp_path / "cut")
    assert_same_bits(model.adapter.flat, before)
    served.read(folders[1]).copy()
    assert_same_bits(model.adapter.flat, new.adapter.flat)
    served.read().copy()
    assert_same_bits(model.adapter.flat, before)
