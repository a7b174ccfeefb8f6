import json
import pathlib

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.core import longest_sequence
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.nn.rope import rope_table
from rlnumba.model.config import ModelConfig

MODELS = pathlib.Path(__file__).parent.parent / "golden" / "models"


def raw_config(name="qwen3_tied"):
    return json.loads((MODELS / name / "config.json").read_text())


def test_fields_of_each_family():
    qwen3 = ModelConfig.from_folder(MODELS / "qwen3_untied")
    assert (qwen3.head_dim, qwen3.hidden_size, qwen3.num_attention_heads) == (16, 40, 4)
    assert (qwen3.qk_norm, qwen3.attention_bias, qwen3.tie_word_embeddings) == (True, False, False)
    assert qwen3.rope_theta == 1e6 and qwen3.eos_token_ids == (2,)
    qwen2 = ModelConfig.from_folder(MODELS / "qwen2")
    assert (qwen2.head_dim, qwen2.attention_bias, qwen2.o_bias, qwen2.dtype) == (16, True, False, "bfloat16")
    llama = ModelConfig.from_folder(MODELS / "llama_head48")
    assert (llama.head_dim, llama.attention_bias, llama.o_bias, llama.mlp_bias) == (48, True, True, True)
    scaling = ModelConfig.from_folder(MODELS / "llama3").rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 64)


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_what_it_writes_it_reads_back(name):
    config = ModelConfig.from_folder(MODELS / name)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config
    # Each rotary style alone gives the same model.
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(new) == config


def test_rotary_settings_are_written_as_they_were():
    raw = raw_config("llama3")
    written = ModelConfig.from_dict(raw).to_dict()
    assert written["rope_scaling"] == raw["rope_scaling"] and written["rope_theta"] == raw["rope_theta"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
    assert ModelConfig.from_dict({**raw, "rope_scaling": yarn}).to_dict()["rope_scaling"] == yarn


ROPE = json.loads((MODELS.parent / "rope.json").read_text())


@pytest.mark.parametrize("name", ROPE)
def test_rotary_embeddings_of_model_cards(name):
    """The frequencies, the amplitude and the longest sequence that a config.json stands for, as transformers has it."""
    golden = ROPE[name]
    config = ModelConfig.from_dict(golden["config"])
    assert config.num_positions == golden["num_positions"]
    cos, sin = rope_table(config.num_positions, config.head_dim, config.rope_theta, config.rope_scaling)
    assert len(cos) == golden["num_positions"]
    np.testing.assert_allclose(cos[0], golden["amplitude"], rtol=2.0**-23)
    positions, frequencies = np.array(golden["positions"])[:, None], np.array(golden["inv_freq"])
    # A frequency may differ by a unit in the last place, and an angle is rounded once more.
    tolerance = golden["amplitude"] * (4 * 2.0**-24 + 2 * 2.0**-23 * positions * frequencies)
    for table, expected in ((cos, golden["cos"]), (sin, golden["sin"])):
        assert np.all(np.abs(table[golden["positions"]] - np.array(expected)) <= tolerance)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config
    new = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert ModelConfig.from_dict(new) == config


def test_a_key_of_the_whole_model_says_what_it_was_trained_with():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    raw = {**raw_config(), "rope_parameters": yarn, "original_max_position_embeddings": 128}
    assert ModelConfig.from_dict(raw).rope_scaling.original_max_position_embeddings == 128


def test_a_stretched_model_takes_longer_sequences():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    config = ModelConfig.from_dict({**raw_config(), "max_position_embeddings": 300, "rope_parameters": yarn})
    assert (
        longest_sequence(config, EngineConfig()) == longest_sequence(config, EngineConfig(max_model_len=1024)) == 1024
    )
    with pytest.raises(ConfigError, match="max_model_len 1025 is more than the model's 1024 positions"):
        longest_sequence(config, EngineConfig(max_model_len=1025))


def test_eos_ids_of_generation_config_come_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    for ids, expected in (([5, 7], (5, 7)), (9, (9,)), (None, (2,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert ModelConfig.from_folder(tmp_path).eos_token_ids == expected


def test_defaults_of_absent_keys():
    raw = raw_config("llama3")
    for key in ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_theta", "rope_scaling", "torch_dtype"):
        del raw[key]
    config = ModelConfig.from_dict(raw)
    assert (config.head_dim, config.num_key_value_heads, config.tie_word_embeddings) == (10, 4, False)
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (10000.0, None, "float32")


REQUIRED = [
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key, tmp_path):
    raw = raw_config()
    del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: missing key {key!r}"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": "64"}, "hidden_size must be int, got '64'"),
        ({"hidden_size": True}, "hidden_size must be int, got True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be positive"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even and at most 256, got 15"),
        ({"head_dim": 320}, "head_dim must be even and at most 256, got 320"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool"),
        ({"eos_token_id": "2"}, "eos_token_id must be an int or a list of ints"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "is not read: only nf4 of bitsandbytes"),
        ({"num_experts": 8}, "num_experts 8 is not supported"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"layer_types": 0}, "layer_types must be a list, got 0"),
        ({"model_type": []}, "model_type must be str, got []"),
        ({"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}, "window 9"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_type 'longrope' is not supported",
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0]}},
            "rope_type 'su' is not supported (supported: default, ",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate must be bool, got 1"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type 'dynamic' needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: full_attention is not supp"),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [8, 8]}},
            "rope_scaling: mrope_section is not supported",
        ),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type must be str"),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_theta": 1e4}, "config.json: rope_theta is 10000 and rope_parameters.rope_theta 1e+06, which are one"),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            "rope_theta is 1e+06 and rope_scaling.rope_theta 500000, which are one setting, and versions of",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling takes the place of rope_parameters, and lacks their rope_theta 1e+06",
        ),
        ({"rope_theta": "1e4"}, "config.json: rope_theta must be float, got '1e4'"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be positive, got 0.0"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
    ],
)
def test_what_it_refuses(change, words):
    with pytest.raises(UserError) as caught:
        ModelConfig.from_dict({**raw_config(), **change}, "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ") and words in message and "\n" not in message


def test_a_window_that_is_not_in_use_is_fine():
    unused = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    beyond = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2, "layer_types": None}
    for change in (unused, beyond):
        ModelConfig.from_dict({**raw_config(), **change})


@pytest.mark.parametrize("content, words", [(None, "no such file"), ("{", "not valid JSON"), ("[]", "JSON object")])
def test_damaged_files(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        ModelConfig.from_folder(tmp_path)
    assert f"{tmp_path}/config.json" in str(caught.value)
