"""Gemma 3: norms of outputs, GeGLU, scaled embeddings, two rotary embeddings and windows, against transformers."""

import json
import pathlib

import numpy as np
import pytest

from rlnumba.errors import UserError
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import save_adapter
from rlnumba.model.tensor_file import open_tensors, write_tensors
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import embedding_scale, load_model, save_model
from rlnumba.model.weights import METADATA, SINGLE
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.model.gradients import adapted_model
from tests.model.test_transformer import sequences_of

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FOLDER = GOLDEN / "gemma3"


@pytest.fixture(scope="module")
def golden():
    """(model in float32, what transformers computes with it)."""
    return load_model(FOLDER, "float32"), np.load(FOLDER / "expected.npz")


def raw_config(name="config.json"):
    return json.loads((FOLDER / name).read_text())


def test_an_adapter_of_all_linear_layers(golden, tmp_path):
    """Gradients of A and B against finite differences; PEFT's folder has the modules of the checkpoint."""
    model = adapted_model(FOLDER, sequences_of(golden[1])[:2])
    save_adapter(model.adapter, tmp_path)
    names = {name.split(".lora_")[0].split(".")[-1] for name in open_tensors(tmp_path / "adapter_model.safetensors")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def stored_values(folder):
    """{name: values} of a folder's tensors."""
    files = open_tensors(folder / SINGLE)
    return {name: stored.values_in(np.memmap(stored.path, np.uint8, "r")) for name, stored in files.items()}


def test_what_is_saved_is_what_transformers_wrote(golden, tmp_path):
    """Every tensor, and every key of config.json that says what is computed."""
    save_model(golden[0], tmp_path)
    written, before = stored_values(tmp_path), stored_values(FOLDER)
    assert written.keys() == before.keys()
    for name, values in before.items():
        assert_same_bits(written[name], values, name)
    config, raw = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDER))
    # The pattern is that of layer_types.
    of_class = {"transformers_version", "use_cache", "dtype", "sliding_window_pattern", "_sliding_window_pattern"}
    assert {key: config.get(key) for key in raw.keys() - of_class} == {key: raw[key] for key in raw.keys() - of_class}


def test_old_keys_are_those_of_now():
    """rope_theta, rope_local_base_freq, rope_scaling and a pattern of layers, or rope_parameters and layer_types."""
    config = ModelConfig.from_folder(FOLDER)
    assert ModelConfig.from_dict(raw_config("old_config.json")) == config
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert config.layer_kinds == ("sliding_attention",) * 2 + ("full_attention", "sliding_attention")


@pytest.mark.parametrize("prefix, beside", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_a_checkpoint_of_vision_and_language(golden, tmp_path, prefix, beside):
    """Its text model is read, under the names of the hub and of transformers 5; what sees images is left out."""
    outer = {"model_type": "gemma3", "text_config": raw_config(), "vision_config": {}, "eos_token_id": [1, 106]}
    del outer["text_config"]["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", prefix, 1): values for name, values in stored_values(FOLDER).items()}
    tensors[f"{prefix.split('.')[0]}.lm_head.weight" if not beside else "lm_head.weight"] = tensors[
        f"{prefix}embed_tokens.weight"
    ]
    others = ("vision_tower.vision_model.head.weight", "multi_modal_projector.mm_soft_emb_norm.weight")
    tensors |= {beside + name: np.zeros((2, 2), np.float32) for name in others}
    write_tensors(tmp_path / SINGLE, tensors, METADATA, device.dtype("float32"))
    loaded = load_model(tmp_path, "float32")
    assert_same_bits(loaded.weights.flat, golden[0].weights.flat)
    assert loaded.config.eos_token_ids == (1, 106)
    tensors["model.norm.weight"] = tensors[f"{prefix}norm.weight"]
    write_tensors(tmp_path / SINGLE, tensors, METADATA, device.dtype("float32"))
    with pytest.raises(UserError, match=r"model.safetensors: tensor model.*norm.weight is there under another name"):
        load_model(tmp_path)


def test_a_reward_model(golden, tmp_path):
    """transformers' class for the text model alone; the score head is read from either form of names."""
    model = load_model(FOLDER, "float32", heads=("score",), head_init="normal")
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "Gemma3TextForSequenceClassification"
    ]
    assert_same_bits(load_model(tmp_path, "float32", heads=("score",)).weights.flat, model.weights.flat)


def test_embeddings_are_scaled_by_what_transformers_rounds():
    """sqrt(hidden_size) of the published sizes, in bfloat16."""
    raw, scales = raw_config(), []
    for size in (640, 1152, 2560, 3840, 5376):
        config = ModelConfig.from_dict({**raw, "hidden_size": size})
        scales.append(float(embedding_scale(config, device.dtype("bfloat16"))))
    assert scales == [25.25, 34.0, 50.5, 62.0, 73.5]
    assert embedding_scale(ModelConfig.from_dict(raw), device.dtype("float32")) == np.float32(48**0.5)


REFUSED = [
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types must have num_hidden_layers 4 entries, got 3"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types linear_attention is not supported"),
    ({"sliding_window": None}, "sliding_window must be at least 1 in a model with sliding_attention layers, got None"),
    ({"sliding_window": 0}, "sliding_window must be at least 1 in a model with sliding_attention layers, got 0"),
    ({"attention_bias": True}, "attention_bias True is not supported in a gemma3_text model"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported (supported: null)"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported (supported: null)"),
    ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported (supported: gelu_pytorch_tanh)"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, got 0.0"),
    ({"quantization_config": {}}, "quantization_config of"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have an object for each of sliding_attention"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type 'linear' is not"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
    ({"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}}, "partial_rotary_factor 0.5 is not"),
    ({"rope_scaling": 8.0}, "rope_scaling must be an object or null, got 8.0"),
    ({"rope_theta": 1e6}, "rope_theta is 1e+06 and rope_parameters.full_attention.rope_theta 30000, which are one"),
    (
        {"rope_local_base_freq": 1e4},
        "rope_local_base_freq is 10000 and rope_parameters.sliding_attention.rope_theta 1000, which are one",
    ),
    ({"rope_theta": 3e4, "rope_scaling": {"rope_theta": 1e4}}, "rope_theta is 30000 and rope_scaling.rope_theta 10000"),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_what_it_refuses(change, message):
    with pytest.raises(UserError) as caught:
        ModelConfig.from_dict({**raw_config(), **change})
    assert message in str(caught.value)


def test_other_gemmas_are_refused():
    with pytest.raises(UserError, match=r"config.json: a gemma3 model needs text_config, an object, got None"):
        ModelConfig.from_dict({"model_type": "gemma3"})
    for model_type in ("gemma2", "gemma3n", "gemma4"):
        with pytest.raises(UserError, match=f"model_type '{model_type}' is not supported"):
            ModelConfig.from_dict({"model_type": model_type})


def test_defaults_of_absent_keys():
    """Those of transformers' class. The file of Gemma 3 4B leaves out all but these six keys."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = ModelConfig.from_dict({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        262208, 8, 4, 256,
    )  # fmt: skip
    assert (config.rope_theta, config.rope_local_base_freq, config.rope_scaling.factor) == (1e6, 1e4, 8.0)
    assert config.layer_kinds[4:7] == ("sliding_attention", "full_attention", "sliding_attention")
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((1, 106), 2, 0)
    assert config.tie_word_embeddings and config.max_position_embeddings == 131072
    config = ModelConfig.from_dict({"model_type": "gemma3_text", "query_pre_attn_scalar": 168, "head_dim": 128})
    assert (config.num_hidden_layers, config.sliding_window, config.scale) == (26, 4096, 168**-0.5)


def test_chats_have_the_ids_of_transformers():
    """The template writes the token that begins a prompt, and no system turn."""
    golden, tokenizer = json.loads((FOLDER / "chats.json").read_text()), Tokenizer(GOLDEN / "tokenizer")
    tokenizer.templates = {"default": golden["template"]}
    for chat in golden["chats"]:
        assert tokenizer.apply_chat_template(chat["messages"], **chat["arguments"]) == chat["ids"]
