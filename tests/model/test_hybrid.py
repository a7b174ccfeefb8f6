"""Qwen3.5: linear attention in most layers, gated attention in the others, against transformers."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from rlnumba.config.lora import LoraConfig
from rlnumba.config.schema import RECOMPUTE_MODULES
from rlnumba.errors import UserError
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import Adapter, load_adapter, save_adapter
from rlnumba.model.tensor_file import open_tensors, write_tensors
from rlnumba.model.transformer import Tape, load_model, pack, save_model, score
from rlnumba.model.weights import METADATA, SINGLE
from rlnumba.reporting import stderr
from rlnumba.runtime import device
from rlnumba.runtime.arena import Arena
from tests.close import assert_close, assert_same_bits
from tests.model.gradients import gradients_of_logprobs
from tests.model.test_transformer import (
    assert_gradients,
    is_greedy,
    logits_of,
    loss_and_gradients,
    sequences_of,
)

# A norm of outputs near zero makes more of rounding errors: transformers' own float32 is off by 1e-4 in such models.
TOLERANCE = 1e-4
FOLDER = pathlib.Path(__file__).parent.parent / "golden" / "qwen3_5"


@pytest.fixture(scope="module")
def golden():
    """(model in float32, what transformers computes with it)."""
    return load_model(FOLDER, "float32"), np.load(FOLDER / "expected.npz")


def test_logits_and_scores(golden):
    model, expected = golden
    batch = pack(sequences_of(expected))
    assert_close(logits_of(model, batch), expected["logits"], terms=2048)
    result = score(model, batch)
    assert np.abs(device.to_host(result.logprobs) - expected["logprobs"]).max() < TOLERANCE
    assert np.abs(device.to_host(result.entropy) - expected["entropy"]).max() < TOLERANCE


def test_greedy_continuations(golden):
    model, expected = golden
    for index in range(len(expected["lengths"])):
        assert is_greedy(model, expected[f"greedy/{index}/prompt"], expected[f"greedy/{index}/completion"])


def test_gradient_of_every_parameter(golden):
    model, expected = golden
    loss, grads = loss_and_gradients(model, pack(sequences_of(expected)))
    assert abs(loss - expected["loss"]) < 1e-5
    assert_gradients(grads, expected, terms=8192)


def test_what_is_recomputed_has_the_same_bits(golden):
    model, expected = golden
    sequences, modules = sequences_of(expected), frozenset(RECOMPUTE_MODULES)
    _, kept = gradients_of_logprobs(model, sequences, Tape(), Arena("test"))
    for tape in (Tape(recompute=True), Tape(modules=modules), Tape(modules=modules, num_layers=2)):
        assert_same_bits(gradients_of_logprobs(model, sequences, tape, Arena("test"))[1].flat, kept.flat)


def test_an_adapter_of_all_linear_layers(golden, tmp_path):
    """Gradients of B against finite differences; PEFT's folder has the modules of the checkpoint."""
    model, expected = golden
    lora = LoraConfig(r=2, target_modules=("all-linear",))
    model = load_model(FOLDER, "float32")
    model.adapter = Adapter.new(model.weights.config, lora, "float32", "base", seed=3)
    generator = np.random.default_rng(2)
    model.adapter.flat[...] = device.asarray(0.05 * generator.standard_normal(model.adapter.flat.shape, np.float32))
    model.adapter.zero_outside_blocks()
    sequences = sequences_of(expected)[:2]

    def loss():
        return gradients_of_logprobs(model, sequences, Tape(), Arena("test"))[0]

    _, grads = gradients_of_logprobs(model, sequences, Tape(), Arena("test"))
    direction = device.to_host(grads.flat) / np.linalg.norm(device.to_host(grads.flat))
    model.adapter.flat += device.asarray(1e-4 * direction)
    above = loss()
    model.adapter.flat -= device.asarray(2e-4 * direction)
    slope = (above - loss()) / 2e-4
    assert slope == pytest.approx(np.linalg.norm(device.to_host(grads.flat)), rel=0.02)
    save_adapter(model.adapter, tmp_path)
    names = {name.split(".lora_")[0].split(".")[-1] for name in open_tensors(tmp_path / "adapter_model.safetensors")}
    assert {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "o_proj"} <= names
    loaded = load_adapter(tmp_path, model.weights, "float32", "base")
    tensors = (dict(each.places.tensors(device.to_host(each.flat))) for each in (loaded, model.adapter))
    for (name, values), (other_name, others) in zip(*(each.items() for each in tensors), strict=True):
        assert name == other_name
        assert_same_bits(values, others, name)


def test_what_is_saved_is_what_transformers_wrote(golden, tmp_path):
    """Every tensor, and every key of config.json that says what is computed."""
    model, _ = golden
    save_model(model, tmp_path)
    written, before = (open_tensors(folder / SINGLE) for folder in (tmp_path, FOLDER))
    assert written.keys() == before.keys()
    for name, stored in before.items():
        values = [each.values_in(np.memmap(each.path, np.uint8, "r")) for each in (written[name], stored)]
        assert_same_bits(*values, name)
    config, raw = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDER))
    of_class = {"transformers_version", "use_cache", "dtype", "rope_parameters"}
    assert {key: config.get(key) for key in raw.keys() - of_class} == {key: raw[key] for key in raw.keys() - of_class}
    assert config["rope_parameters"].items() >= {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}.items()


def test_a_checkpoint_of_vision_and_language(golden, tmp_path, capfd, monkeypatch):
    """Its text model is read, under the names of the hub; encoders of images and further heads are left out."""
    model, expected = golden
    raw = json.loads((FOLDER / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": raw}
    outer |= {"vision_config": {"depth": 1}, "tie_word_embeddings": True, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    files = open_tensors(FOLDER / SINGLE)
    tensors = {
        name.replace("model.", "model.language_model.", 1): stored.values_in(np.memmap(stored.path, np.uint8, "r"))
        for name, stored in files.items()
    }
    tensors |= {name: np.zeros((2, 2), np.float32) for name in ("model.visual.patch.weight", "mtp.layers.0.x.weight")}
    write_tensors(tmp_path / SINGLE, tensors, METADATA, device.dtype("float32"))
    monkeypatch.setattr(stderr, "_is_silent", False)
    loaded = load_model(tmp_path, "float32")
    load_model(tmp_path, "float32")
    assert_same_bits(loaded.weights.flat, model.weights.flat)
    assert loaded.config.eos_token_ids == (2,)
    left_out = "left out of the checkpoint: model.visual.* (1 tensors), mtp.* (1 tensors)"
    assert capfd.readouterr().err == f"rlnumba: {tmp_path}: {left_out}\n"


REFUSED = [
    ({"layer_types": ["linear_attention"] * 3}, "layer_types must have num_hidden_layers 4 entries, got 3"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types sliding_attention is not supported"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
    ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not supported (supported: 4)"),
    ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"linear_key_head_dim": 512}, "linear_key_head_dim must be at most 256, got 512"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "partial_rotary_factor must be in (0, 1]"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "partial_rotary_factor must be in (0, 1]"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type 'proportional' is not supported"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
    ({"num_experts": 4}, "num_experts 4 is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported (supported: silu)"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of"),
    ({"model_type": "qwen3_next"}, "model_type 'qwen3_next' is not supported"),
    ({"model_type": "qwen4_exp"}, "model_type 'qwen4_exp' is not supported"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_it_refuses(change, message):
    raw = json.loads((FOLDER / "config.json").read_text())
    with pytest.raises(UserError) as caught:
        ModelConfig.from_dict({**raw, **change})
    assert message in str(caught.value)


def test_defaults_of_absent_keys():
    """Those of transformers' class: a config.json of the hub may leave out any of them."""
    config = ModelConfig.from_dict({"model_type": "qwen3_5_text"})
    assert (config.head_dim, config.rotary_dim, config.num_key_value_heads, config.hidden_size) == (256, 64, 4, 4096)
    assert config.layer_kinds[:5] == ("linear_attention",) * 3 + ("full_attention", "linear_attention")
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == (16, 32)
    with pytest.raises(UserError, match="a qwen3_5 model needs text_config, an object, got None"):
        ModelConfig.from_dict({"model_type": "qwen3_5"})


def test_a_missing_tensor_is_named(golden, tmp_path):
    shutil.copytree(FOLDER, tmp_path / "model")
    files = open_tensors(FOLDER / SINGLE)
    kept = {
        name: stored.values_in(np.memmap(stored.path, np.uint8, "r"))
        for name, stored in files.items()
        if not name.endswith("0.linear_attn.A_log")
    }
    write_tensors(tmp_path / "model" / SINGLE, kept, METADATA, device.dtype("float32"))
    with pytest.raises(UserError, match=r"missing tensors: model\.layers\.0\.linear_attn\.A_log"):
        load_model(tmp_path / "model")
