"""Adapters on a quantised base: training has rollout's bits, and the base's values are those of its format."""

import dataclasses
import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import EngineConfig, LoraConfig, QuantizationConfig, load_run, to_toml
from rlnumba.errors import ConfigError
from rlnumba.kernels.quantized.formats import FORMATS, dequantize_ref, quantize_ref
from rlnumba.kernels.quantized.ops import QuantizedWeight, dequantize
from rlnumba.model.config import ModelConfig
from rlnumba.model.config_mixture import idle_parameters
from rlnumba.model.quantized.weights import QuantizedWeights, quantized_names
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, pack, save_model, score
from rlnumba.model.weights import Weights, write_json
from rlnumba.runs.loading import load_policy
from rlnumba.runs.planning.plan import Planner
from rlnumba.runs.run_folder import RunFolder
from rlnumba.runtime import device, memory
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.sft import run_sft
from tests.close import assert_same_bits
from tests.trainers.runs import GOLDEN, MODEL, grpo_run, metrics_of, sft_run
from tests.trainers.test_lora import CURVES, adapter_tensors, golden_run
from tests.trainers.test_resume import elsewhere, hash_of

FORMAT_NAMES, LINEAR_ATTENTION = tuple(FORMATS), ["in_proj", "out_proj"]


def on_base(run, type="nf4", group_size=16, **lora):
    """A run with an adapter on a base of this format."""
    quantization = QuantizationConfig(type=type, group_size=group_size)
    return dataclasses.replace(run, lora=LoraConfig(r=4, lora_alpha=8, **lora), quantization=quantization)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_training_has_the_bits_of_rollout(tmp_path, name):
    """GRPO with a reference, on policy: no difference of a bit, and it learns."""
    run = on_base(grpo_run(tmp_path / "run", max_steps=3, beta=0.05), name)
    run_grpo(run)
    rows = [row for row in metrics_of(run) if "reward" in row]
    assert len(rows) == 3
    assert [row["sampling/sampling_logp_difference/max"] for row in rows] == [0.0] * 3
    assert all(row["grad_norm"] > 0 for row in rows)


def test_a_run_goes_on_with_the_same_bits(tmp_path):
    whole = on_base(sft_run(tmp_path / "whole", max_steps=4, save_steps=2))
    run_sft(whole)
    part = on_base(sft_run(tmp_path / "part", max_steps=2, save_steps=2))
    run_sft(part)
    run_sft(dataclasses.replace(part, train=dataclasses.replace(part.train, max_steps=4)), resume=True)
    assert hash_of(part) == hash_of(whole)


def test_golden_curve(tmp_path):
    """PEFT's loss and gradient norm at each of 50 steps on the values of nf4, and how far each tensor went."""
    expected = json.loads((CURVES / "nf4.json").read_text())
    run = golden_run(tmp_path / "run", "all_linear")
    run = dataclasses.replace(run, quantization=QuantizationConfig(type="nf4", group_size=expected["group_size"]))
    run_sft(run)
    got = metrics_of(run)
    assert len(got) == len(expected["steps"]) == 50
    for row, want in zip(got, expected["steps"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert row[name] == pytest.approx(want[name], rel=1e-4, abs=1e-9), (row["step"], name)
    plain = json.loads((CURVES / "curves.json").read_text())["all_linear"]
    assert max(abs(row["loss"] - other["loss"]) for row, other in zip(got, plain, strict=True)) > 0.01
    begin, ours = adapter_tensors(CURVES / "all_linear" / "init"), adapter_tensors(tmp_path / "run" / "final")
    assert ours.keys() == expected["norms"].keys()
    for name, (norm, change) in expected["norms"].items():
        assert np.linalg.norm(ours[name]) == pytest.approx(norm, rel=1e-3), name
        assert np.linalg.norm(ours[name] - begin[name]) == pytest.approx(change, rel=1e-3), name


@pytest.fixture
def plain():
    """The base, which a test may write to."""
    return load_model(MODEL)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_values_of_the_base(tmp_path, plain, name):
    """Each linear layer has the values of its format; all other parameters are the model's."""
    run = on_base(sft_run(tmp_path / "run"), name)
    policy, _ = load_policy(run, RunFolder(run, False))
    weights = policy.model.weights
    for p in plain.weights.parameters:
        found, before = weights[p.name], device.to_host(plain.weights[p.name])
        if not isinstance(found, QuantizedWeight):
            assert_same_bits(found, before, p.name)
            continue
        values = device.xp().empty(found.shape, np.float32)
        dequantize(found, values)
        expected = dequantize_ref(*quantize_ref(before, FORMATS[name], 16), FORMATS[name], np.float32)
        assert_same_bits(values, expected, p.name)
    assert sorted(weights.quantized) == sorted(
        f"model.layers.{layer}.{each}" for layer in range(2) for each in ("qkv", "o", "gate_up", "down")
    )


def test_an_adapter_trains_as_on_the_values_of_the_base(tmp_path, plain):
    """The adapter's bits are those of the same run on a model that has these values in its matrices."""
    run = on_base(sft_run(tmp_path / "run", max_steps=3), "int4")
    run_sft(run)
    for name in quantized_names(plain.config):
        before = device.to_host(plain.weights[name])
        values = dequantize_ref(*quantize_ref(before, FORMATS["int4"], 16), FORMATS["int4"], np.float32)
        plain.weights[name][...] = device.asarray(values)
    save_model(plain, tmp_path / "model", Tokenizer.from_folder(MODEL))
    other = elsewhere(run, tmp_path / "other")
    other = dataclasses.replace(other, model=str(tmp_path / "model"), quantization=None)
    run_sft(other)
    assert hash_of(run) == hash_of(other)


@pytest.mark.parametrize(
    "family, others",
    [
        ("qwen3_moe", []),
        ("qwen3_5", LINEAR_ATTENTION),
        ("qwen3_5_moe", [*LINEAR_ATTENTION, "shared_down", "shared_gate_up"]),
    ],
)
def test_experts_and_linear_attention(family, others):
    """The log-probs have the bits of a model with the values in its matrices; routers and gates are the model's."""
    folder, config = GOLDEN / family, QuantizationConfig(type="int8", group_size=8)
    model, plain = load_model(folder, make_weights=partial(QuantizedWeights, quantization=config)), load_model(folder)
    for name in quantized_names(plain.config):
        dequantize(model.weights[name], plain.weights[name])
    batch = pack([[3, 5, 7, 9, 4], [8, 1, 2]])
    for found, expected in zip(score(model, batch), score(plain, batch), strict=True):
        assert_same_bits(found, expected)
    before = load_model(folder)
    kinds = {name.rpartition(".")[2] for name in model.weights.quantized}
    assert kinds == {"qkv", "o", "gate_up", "down", *others}
    of_experts = {f"model.layers.{i}.{name}" for i in model.config.mixture_layers for name in ("gate_up", "down")}
    assert of_experts <= model.weights.quantized.keys()
    name = min(model.weights.quantized)
    values, others = (device.to_host(each.weights[name]) for each in (plain, before))
    assert not np.array_equal(values, others)


def test_plan_and_memory_are_those_of_the_packed_weights(tmp_path):
    if device.name() != "cpu":
        pytest.skip("a plan for the cpu device")
    run = on_base(grpo_run(tmp_path / "run", max_steps=1), "nf4")
    planned = {kind: Planner(each, False, 1 << 30).plan() for kind, each in (("nf4", run), ("plain", unquantized(run)))}
    sizes = {kind: each.notes["weights"].split(" ")[0] for kind, each in planned.items()}
    assert sizes["nf4"] == sizes["plain"] and "linear layers nf4, others float32" in planned["nf4"].notes["weights"]
    memory.reset_peaks()
    before = memory.report().get("weights", 0)
    run_grpo(run)
    measured = metrics_of(run)[-1]["memory/weights"] - before
    assert planned["nf4"].regions["weights"] == measured < planned["plain"].regions["weights"]


# Shapes of Qwen3's models; all have heads of 128 and a vocabulary of 151,936.
LAYERS = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "dtype": "bfloat16"}
SHAPES = {
    "8B": LAYERS | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
    "4B": LAYERS | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "30B-A3B": LAYERS | {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
                         "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128,
                         "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": ()},
}  # fmt: skip


def grpo_of(folder, shape, type):
    """GRPO of a model of this shape, of which there is only config.json: 8 prompts of 128 tokens, 8 completions each of
    up to 512."""
    config = ModelConfig.from_folder(GOLDEN / "qwen3_moe" if "num_experts" in SHAPES[shape] else MODEL)
    layers = ("full_attention",) * SHAPES[shape]["num_hidden_layers"]
    write_json(folder / "config.json", dataclasses.replace(config, layer_types=layers, **SHAPES[shape]).to_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    (folder / "long_prompts.jsonl").write_text(8 * (json.dumps({"prompt": "a" * 128}) + "\n"))
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "num_generations": 8}
    sizes |= {"max_completion_length": 512, "gradient_checkpointing": True, "dtype": None}
    run = grpo_run(folder / "run", **sizes)
    data = dataclasses.replace(run.data, train=str(folder / "long_prompts.jsonl"), max_prompt_length=128)
    engine = EngineConfig(gpu_memory_utilization=0.9, max_num_seqs=64)
    quantization = type and QuantizationConfig(type=type)
    lora = LoraConfig(r=16)
    return dataclasses.replace(run, model=str(folder), data=data, engine=engine, lora=lora, quantization=quantization)


@pytest.mark.parametrize(
    "shape, type, limit, cached",
    [("8B", "nf4", 14, 64), ("30B-A3B", "int8", 70, 64), ("4B", "nf4", 10, 64), ("4B", "int8", 10, 40)],
)
def test_large_shapes_fit(tmp_path, shape, type, limit, cached):
    """A GPU of so many GiB has room for training, and beside the packed weights for so many of 64 completions."""
    if device.name() != "cpu":
        pytest.skip("a plan for any GPU, made on the cpu device")
    plan = Planner(grpo_of(tmp_path, shape, type), True, limit << 30).plan()
    assert plan.tokens == 8 * (128 + 512)
    assert plan.total <= limit << 30
    c = SimpleNamespace(**SHAPES[shape])
    attention = c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
    width = c.num_experts * c.moe_intermediate_size if "num_experts" in SHAPES[shape] else c.intermediate_size
    packed = c.num_hidden_layers * (attention + 3 * c.hidden_size * width)
    bits, group_size = {"nf4": (4, 64), "int8": (8, 128)}[type]
    others = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    expected = packed * (bits / 8 + 4 / group_size) + 2 * others
    # Norms and routers are beside them.
    assert expected < plan.regions["weights"] < 1.005 * expected
    token = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    # Completions of a prompt share its keys and values.
    assert plan.regions["kv"] >= token * (cached * 512 + 8 * 128)
    if shape == "8B":
        other = tmp_path / "plain"
        other.mkdir()
        assert Planner(grpo_of(other, shape, None), True, limit << 30).plan().needed > limit << 30


def unquantized(run):
    return dataclasses.replace(run, quantization=None)


def test_keys(tmp_path):
    run = on_base(sft_run(tmp_path / "run"))
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert load_run("sft", tmp_path / "run.toml") == run
    names = [QuantizationConfig(**keys).format_name for keys in ({}, {"bits": 8}, {"bits": 4, "type": "int4"})]
    assert names == ["nf4", "int8", "int4"]


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"bits": 5}, "quantization.bits must be 8 or 4, got 5"),
        ({"bits": 8, "type": "nf4"}, "quantization.bits is 8, but nf4 has 4"),
        ({"group_size": 20}, "quantization.group_size must be a multiple of 8, got 20"),
        ({"type": "q4_k"}, "quantization.type must be one of int8, fp8, int4, nf4, got 'q4_k'"),
    ],
)
def test_wrong_keys(keys, message):
    with pytest.raises(ConfigError) as error:
        QuantizationConfig(**keys)
    assert str(error.value) == message


def test_what_a_quantized_base_does_not_go_with(tmp_path):
    run = on_base(grpo_run(tmp_path / "run"))
    with pytest.raises(
        ConfigError, match=r"^\[quantization\] is for the frozen base of an adapter: it needs \[lora\]$"
    ):
        dataclasses.replace(run, lora=None)
    wrong = on_base(sft_run(tmp_path / "wrong"), group_size=64)
    message = "quantization.group_size 64 does not divide the 32 columns of model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        run_sft(wrong)


def test_packed_weights_count_as_parameters():
    """As those in 32 bits do, but for their padding: a micro-batch's time follows from their number."""
    config = ModelConfig.from_folder(GOLDEN / "qwen3_moe")
    plain = Weights(config, "float32")
    packed = QuantizedWeights(config, "float32", quantization=QuantizationConfig(type="int8", group_size=8))
    assert 0.9 * plain.num_parameters < packed.num_parameters <= plain.num_parameters
    assert packed.size < idle_parameters(config) < packed.num_parameters
