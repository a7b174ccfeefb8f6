"""Checkpoints in 4 and 8 bits: what bitsandbytes and compressed-tensors wrote is read to the bit, and written so."""

import dataclasses
import json
import re
import shutil
from functools import partial

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import LoraConfig, QuantizationConfig
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.quantized.formats import FORMATS, dequantize_ref, quantize_ref
from rlnumba.kernels.quantized.ops import dequantize
from rlnumba.model.hub import read_config
from rlnumba.model.quantized import convert
from rlnumba.model.quantized.checkpoint import check_config, config_of, joined
from rlnumba.model.quantized.checkpoint import tensors_of as tensors_in
from rlnumba.model.quantized.weights import QuantizedWeights, quantized_names
from rlnumba.model.tensor_file import open_tensors, write_tensors
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model, pack, score
from rlnumba.runtime import device
from rlnumba.trainers.sft import run_sft
from tests.close import assert_same_bits
from tests.model.test_experts import folder_of, in_other_form, tensors_of
from tests.trainers.runs import GOLDEN, MODEL, sft_run
from tests.trainers.test_resume import hash_of

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN / "quantized.npz") as found:
        return dict(found)


def read(path, arrays, quantization):
    """The one tensor of a file with these arrays."""
    write_tensors(path, arrays)
    (name, tensor), *others = joined(open_tensors(path), quantization, path).items()
    assert name == NAME and not others
    return tensor


@pytest.mark.parametrize("name", ["nf4", "nf4_nested"])
def test_bitsandbytes(tmp_path, golden, name):
    """Also where the scales are quantised themselves."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [6, 256]}
    arrays = {NAME: golden[f"{name}/packed"], f"{NAME}.absmax": golden[f"{name}/absmax"]}
    if name == "nf4_nested":
        state |= {"nested_blocksize": 256, "nested_offset": float(golden[f"{name}/offset"])}
        arrays[f"{NAME}.nested_absmax"] = golden[f"{name}/nested_absmax"]
        arrays[f"{NAME}.nested_quant_map"] = golden[f"{name}/nested_code"]
    content = np.frombuffer(json.dumps(state).encode(), np.uint8)
    arrays[f"{NAME}.quant_state.bitsandbytes__nf4"] = content
    # The codes' bytes are those of another dtype with bnb_4bit_quant_storage, as FSDP needs.
    for storage in (np.uint8, device.dtype("bfloat16"), np.float32):
        arrays[NAME] = golden[f"{name}/packed"].reshape(-1).view(storage).reshape(-1, 1)
        tensor = read(tmp_path / "x.safetensors", arrays, config_of(FORMATS["nf4"], 64, "bfloat16"))
        assert tensor.group_size == 64 and tensor.shape == (6, 256)
        values = tensor.read().astype(device.dtype("bfloat16")).astype(np.float32)
        assert_same_bits(values, golden[f"{name}/values"])


@pytest.mark.parametrize("name, packs", [("int4", True), ("int8", True), ("int8", False), ("fp8", False)])
def test_compressed_tensors(tmp_path, golden, name, packs):
    bfloat16, form = device.dtype("bfloat16"), FORMATS[name]
    arrays = {f"{NAME}_scale": golden[f"{name}/bfloat16/scale"].astype(bfloat16)}
    if packs:
        arrays |= {f"{NAME}_packed": golden[f"{name}/bfloat16/packed"], f"{NAME}_shape": np.int64([6, 256])}
    else:
        codes = golden[f"{name}/bfloat16/codes"]
        arrays[NAME] = codes.view("float8_e4m3fn") if name == "fp8" else codes
    quantization = config_of(FORMATS["int4"], 128, "bfloat16")
    kind = "float" if name == "fp8" else "int"
    quantization["config_groups"]["group_0"]["weights"] |= {"num_bits": form.bits, "type": kind}
    tensor = read(tmp_path / "x.safetensors", arrays, quantization)
    assert tensor.form == form and tensor.group_size == 128
    assert_same_bits(tensor.read().astype(bfloat16).astype(np.float32), golden[f"{name}/bfloat16/values"])


def in_blocks(folder, size):
    """(quantization_config, {name: values}) of a copy of the model whose linear layers are in fp8 by blocks."""
    folder.mkdir()
    arrays = {name: tensor.read() for name, tensor in open_tensors(MODEL / "model.safetensors").items()}
    values, rng = {}, np.random.default_rng(0)
    for name in [name for name in arrays if "_proj.weight" in name]:
        rows, columns = arrays[name].shape
        codes = rng.integers(0, 0x7F, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
        scale = rng.uniform(1e-4, 2e-4, (-(-rows // size[0]), -(-columns // size[1]))).astype(np.float32)
        arrays[name], arrays[f"{name}_scale_inv"] = codes.view("float8_e4m3fn"), scale
        of_each = scale[np.arange(rows)[:, None] // size[0], np.arange(columns) // size[1]]
        values[name] = codes.view("float8_e4m3fn").astype(np.float32) * of_each
    write_tensors(folder / "model.safetensors", arrays)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(size)}
    raw = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return config, values


def test_fp8_by_blocks(tmp_path):
    """The values of a matrix are transformers'; its scales stay float32."""
    with np.load(GOLDEN / "fp8_blocks.npz") as found:
        golden = dict(found)
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    arrays = {NAME: golden["codes"].view("float8_e4m3fn"), f"{NAME}_scale_inv": golden["scale"]}
    tensor = read(tmp_path / "x.safetensors", arrays, config)
    assert (tensor.form.name, tensor.group_size, tensor.shape) == ("fp8", 16, (32, 48))
    assert_same_bits(tensor.read(), golden["float32/values"])
    assert_same_bits(tensor.read().astype(device.dtype("bfloat16")).astype(np.float32), golden["bfloat16/values"])


@pytest.mark.parametrize("size", [(16, 16), (24, 16), (16, 24)])
def test_a_checkpoint_in_blocks(tmp_path, size):
    """It has its values in 16 bits and packed, also where the last blocks are smaller; packed, a row must divide."""
    _, values = in_blocks(tmp_path / "model", size)
    plain, config = load_model(tmp_path / "model"), QuantizationConfig(type="fp8", group_size=size[1])
    found = dict(plain.weights.tensors())
    for name, expected in values.items():
        assert_same_bits(found[name], expected, name)
    make = partial(QuantizedWeights, quantization=config)
    if size[1] == 24:
        with pytest.raises(ConfigError, match="^quantization.group_size 24 does not divide the 32 columns of model"):
            load_model(tmp_path / "model", make_weights=make)
        return
    packed = load_model(tmp_path / "model", make_weights=make)
    for name in packed.weights.quantized:
        dequantize(packed.weights[name], other := device.xp().empty_like(plain.weights[name]))
        assert_same_bits(other, plain.weights[name], name)


@pytest.mark.parametrize("name, group_size", [("nf4", 32), ("int4", 16), ("int8", 32)])
def test_a_checkpoint_that_was_written_here(tmp_path, name, group_size):
    """Read with [quantization] it has the codes, without it the values; an adapter on it has the bits of one that was
    trained on a base that was quantised when it was read."""
    command = ["quantize", "--model", str(MODEL), "--output", str(tmp_path / "base"), "--type", name]
    assert cli.run([*command, "--group-size", str(group_size)]) == 0
    before, values = load_model(MODEL), load_model(tmp_path / "base")
    config = QuantizationConfig(type=name, group_size=group_size)
    packed = load_model(tmp_path / "base", make_weights=partial(QuantizedWeights, quantization=config))
    for p in before.weights.parameters:
        expected = device.to_host(before.weights[p.name])
        if p.name in quantized_names(before.config):
            expected = dequantize_ref(*quantize_ref(expected, FORMATS[name], group_size), FORMATS[name], np.float32)
            dequantize(packed.weights[p.name], before.weights[p.name])
            assert_same_bits(before.weights[p.name], expected, p.name)
        assert_same_bits(values.weights[p.name], expected, p.name)
    hashes = []
    for folder in (MODEL, tmp_path / "base"):
        run = sft_run(tmp_path / f"run-{folder.name}", max_steps=2)
        run = dataclasses.replace(run, model=str(folder), lora=LoraConfig(r=4), quantization=config)
        run_sft(run)
        hashes.append(hash_of(run))
    assert hashes[0] == hashes[1]
    with pytest.raises(ConfigError, match=f"^quantization.group_size is 8, and {group_size} in "):
        other = dataclasses.replace(config, group_size=8)
        load_model(tmp_path / "base", make_weights=partial(QuantizedWeights, quantization=other))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e5])
@pytest.mark.parametrize("name", convert.WRITTEN)
def test_values_that_have_no_codes(name, value):
    values = np.zeros((2, 16), np.float32)
    values[1, 3] = value
    with pytest.raises(UserError, match=rf"^{NAME} holds NaN, or values too large for float16: it has no codes$"):
        tensors_in(NAME, values, FORMATS[name], 16, "float16")


def test_an_earlier_model_of_the_folder_goes(tmp_path, monkeypatch):
    """A single file of it would be read instead of several new ones."""
    for shard_bytes, name in ((1 << 30, "nf4"), (1 << 14, "int8"), (1 << 30, "int4")):
        monkeypatch.setattr(convert, "SHARD_BYTES", shard_bytes)
        for output in (tmp_path / "one", tmp_path / name):
            output.mkdir(exist_ok=True)
            convert.quantize_checkpoint(MODEL, output, name, 16)
        left, wanted = (sorted(p.name for p in (tmp_path / folder).iterdir()) for folder in ("one", name))
        assert left == wanted and (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == (name == "int8")
        found, expected = load_model(tmp_path / "one"), load_model(tmp_path / name)
        assert_same_bits(found.weights.flat, expected.weights.flat)


def test_a_tokenizer_is_copied_whole(tmp_path):
    """With its named chat templates, and without those of one that was there."""
    folder, output = shutil.copytree(MODEL, tmp_path / "model"), tmp_path / "written"
    for path in (folder / "additional_chat_templates" / "tool_use.jinja", output / "chat_template.jinja"):
        path.parent.mkdir()
        path.write_text("tools")
    convert.quantize_checkpoint(folder, output, "int8", 16)
    assert Tokenizer(output).templates == Tokenizer(folder).templates
    assert "tool_use" in Tokenizer(output).templates


@pytest.mark.parametrize("form", ["its own", "the other"])
@pytest.mark.parametrize("family, name, group_size", [("qwen3_moe", "int8", 8), ("qwen3_5_moe", "nf4", 16)])
def test_experts_are_written_one_by_one(tmp_path, family, name, group_size, form):
    """Also those that a checkpoint has fused; read again they have the codes of a base that is quantised in memory."""
    folder = GOLDEN / family
    if form == "the other":
        folder = folder_of(tmp_path / "other", folder, in_other_form(tensors_of(folder)))
    written = tmp_path / "written"
    command = ["quantize", "--model", str(folder), "--output", str(written), "--type", name]
    assert cli.run([*command, "--group-size", str(group_size)]) == 0
    make = partial(QuantizedWeights, quantization=QuantizationConfig(type=name, group_size=group_size))
    found, expected = (load_model(each, make_weights=make).weights for each in (written, GOLDEN / family))
    assert found.quantized.keys() == expected.quantized.keys()
    for each in found.quantized:
        assert_same_bits(found[each].packed, expected[each].packed, each)
        assert_same_bits(found[each].scales, expected[each].scales, each)
    for p in found.parameters:
        assert_same_bits(found[p.name], expected[p.name], p.name)
    names = open_tensors(written / "model.safetensors")
    assert any(".mlp.experts.0.gate_proj.weight" in each for each in names)
    quantization = json.loads((written / "config.json").read_text())["quantization_config"]
    of_shared = ["mlp.shared_expert_gate"] if family == "qwen3_5_moe" else []
    if name == "nf4":
        assert quantization["llm_int8_skip_modules"] == ["lm_head", "mlp.gate", *of_shared]
    else:
        assert [bool(re.match(each[3:], "model.layers.0.mlp.gate")) for each in quantization["ignore"][1:]] == [True]


@pytest.mark.parametrize("family, group_size", [("qwen3_moe", 8), ("qwen3_5_moe", 16)])
def test_transformers_opens_packed_experts(tmp_path, family, group_size):
    expected = json.loads((GOLDEN / "packed_experts.json").read_text())[family]
    command = ["quantize", "--model", str(GOLDEN / family), "--output", str(tmp_path / "base"), "--type", "int4"]
    assert cli.run([*command, "--group-size", str(group_size)]) == 0
    found = score(load_model(tmp_path / "base", "float32"), pack([expected["ids"]])).logprobs
    np.testing.assert_allclose(device.to_host(found)[1:], expected["logprobs"], rtol=0, atol=1e-5)


SCALES = np.ones((6, 4), np.float32)
PACKED = np.zeros((6, 64), np.int32)


@pytest.mark.parametrize(
    "change, message",
    [
        ({".absmax": None}, r"down_proj.weight.absmax has 0 elements, not 24$"),
        ({".absmax": np.ones(23, np.float32)}, r"down_proj.weight.absmax has 23 elements, not 24$"),
        ({"": None}, r"bitsandbytes__nf4 is there, and model.layers.0.mlp.down_proj.weight is not$"),
        ({"": np.zeros((767, 1), np.uint8)}, r"has 767 bytes, not the half of \(6, 256\)$"),
        ({"state": {"quant_type": "nf4", "blocksize": 64}}, r"bitsandbytes__nf4 has no shape$"),
        (
            {"state": {"quant_type": "nf4", "blocksize": 96, "shape": [6, 256]}},
            "is not nf4 with blocks that lie within",
        ),
    ],
)
def test_parts_of_bitsandbytes_that_do_not_fit(tmp_path, change, message):
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [6, 256]}
    arrays = {"": np.zeros((768, 1), np.uint8), ".absmax": SCALES.reshape(-1)}
    arrays[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(change.get("state", state)).encode(), np.uint8)
    arrays |= {part: array for part, array in change.items() if part != "state"}
    arrays = {f"{NAME}{part}": array for part, array in arrays.items() if array is not None}
    with pytest.raises(UserError, match=message):
        read(tmp_path / "x", arrays, config_of(FORMATS["nf4"], 64, "bfloat16"))


@pytest.mark.parametrize(
    "change, group, message",
    [
        ({"_packed": None}, {}, r"weight_scale is there, and neither .*weight nor .*weight_packed is$"),
        ({"_packed": PACKED[:, :-1]}, {}, r"I32 \(6, 63\), are not those of \(6, 256\) in int8$"),
        ({"_scale": SCALES[:-1]}, {}, r"weight_scale is \(5, 4\), which is none for \(6, 256\) in groups of 64$"),
        ({"_scale": SCALES[:, :-1]}, {}, r"weight_scale is \(6, 3\), which is none for \(6, 256\) in groups of 64$"),
        ({}, {"group_size": 32}, r"weight_scale is \(6, 4\), which is none for \(6, 256\) in groups of 32$"),
        ({}, {"strategy": "channel"}, r"weight_scale is \(6, 4\), which is none for \(6, 256\) in groups of 256$"),
        ({}, {"num_bits": 4}, r"I32 \(6, 64\), are not those of \(6, 256\) in int4$"),
        ({}, {"type": "float"}, r"I32 \(6, 64\), are not those of \(6, 256\) in fp8$"),
    ],
)
def test_parts_of_compressed_tensors_that_do_not_fit(tmp_path, change, group, message):
    """A wrong number of bits would else read other weights without a word."""
    arrays = {"_packed": PACKED, "_scale": SCALES, "_shape": np.int64([6, 256])} | change
    arrays = {f"{NAME}{part}": np.ascontiguousarray(array) for part, array in arrays.items() if array is not None}
    quantization = config_of(FORMATS["int8"], 64, "bfloat16")
    quantization["config_groups"]["group_0"]["weights"] |= group
    with pytest.raises(UserError, match=message):
        read(tmp_path / "x", arrays, quantization)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]"])
def test_a_damaged_state_of_nf4_is_named(tmp_path, content):
    state = f"{NAME}.quant_state.bitsandbytes__nf4"
    arrays = {NAME: np.zeros((64, 1), np.uint8), state: np.frombuffer(content, np.uint8)}
    with pytest.raises(UserError, match=f"{re.escape(state)} is not a JSON object$"):
        read(tmp_path / "x", arrays, {})


def test_what_is_refused(tmp_path, capsys):
    def fails(message, *arguments, code=1):
        capsys.readouterr()
        assert cli.run([*arguments]) == code
        assert message in capsys.readouterr().err

    with pytest.raises(
        UserError, match=r"^x: quantization_config of 'gptq' is not read: only nf4 of bitsandbytes, int4"
    ):
        check_config({"quant_method": "gptq"}, "x")
    for method in ("awq", "hqq", "mxfp4", "modelopt"):
        with pytest.raises(UserError, match=rf"^x: quantization_config of '{method}' is not read"):
            check_config({"quant_method": method}, "x")
    with pytest.raises(UserError, match=r"^x: quantization_config of 'fp8' needs weight_block_size, .*, got None$"):
        check_config({"quant_method": "fp8"}, "x")
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    with pytest.raises(UserError, match=r"^x: quantization_config of 'fp8' with activation_scheme 'static' is"):
        check_config(blocks | {"activation_scheme": "static"}, "x")
    codes = np.zeros((32, 48), np.uint8).view("float8_e4m3fn")
    for values, scale, message in (
        (codes, np.zeros((2, 2), np.float32), r"scale_inv is \(2, 2\), not \(2, 3\) for blocks of 16 x 16"),
        (codes, np.zeros((2, 3), np.uint8), "is F8_E4M3 with scales in U8, not F8_E4M3 with scales in F32 or BF16"),
        (np.zeros((32, 48), np.float32), np.zeros((2, 3), np.float32), "is F32 with scales in F32, not F8_E4M3"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path / "blocks", {NAME: values, f"{NAME}_scale_inv": scale}, blocks)
    with pytest.raises(UserError, match="has no quantization_config of fp8 by blocks"):
        read(tmp_path / "blocks", {NAME: codes, f"{NAME}_scale_inv": np.zeros((2, 3), np.float32)}, {})
    with pytest.raises(UserError, match=r"^x: quantization_config of 'bitsandbytes' \(int8\) is not read"):
        check_config({"quant_method": "bitsandbytes", "load_in_8bit": True}, "x")
    groups = config_of(FORMATS["int8"], None, "bfloat16")
    with pytest.raises(UserError, match=r"^x: group_0 has weights by groups, and group_size is None$"):
        check_config(groups, "x")
    for key in ("input_activations", "output_activations"):
        activations = config_of(FORMATS["int8"], 128, "bfloat16")
        activations["config_groups"]["group_0"][key] = {"num_bits": 8}
        with pytest.raises(UserError, match=r"^x: group_0 quantises activations, too"):
            check_config(activations, "x")
    rotated = config_of(FORMATS["int8"], 128, "bfloat16") | {"transform_config": {"config_groups": {"u": {}}}}
    with pytest.raises(UserError, match=r"^x: compressed-tensors' transform_config, .*, is not read$"):
        check_config(rotated, "x")
    for other, message in (
        ("int4", "quantization_config must be an object, got 'int4'"),
        (groups | {"config_groups": {"a": None}}, "config_groups must be an object of objects, got {'a': None}"),
    ):
        with pytest.raises(UserError, match=f"^x: {re.escape(message)}$"):
            check_config(other, "x")
    base = str(tmp_path / "base")
    assert cli.run(["quantize", "--model", str(MODEL), "--output", base, "--group-size", "32"]) == 0
    assert read_config(base).dtype == read_config(MODEL).dtype
    fails("the checkpoint is quantised already", "quantize", "--model", base, "--output", str(tmp_path / "twice"))
    fails("is the folder of the model", "quantize", "--model", base, "--output", base)
    wrong = "quantize", "--model", str(MODEL), "--output", str(tmp_path / "wrong")
    fails("--group-size 64 does not divide the 32 columns of model.layers.0", *wrong, code=2)
    fails("Invalid value for '--group-size': 12 is not a multiple of 8", *wrong, "--group-size", "12", code=2)
    assert [path.name for path in tmp_path.iterdir() if path.name in ("wrong", "twice")] == []


def test_a_failure_leaves_nothing_of_a_quantised_model(tmp_path, monkeypatch):
    """Neither a folder that was made for it, nor files beside those that were there."""
    monkeypatch.setattr(convert, "SHARD_BYTES", 1 << 14)
    calls = []

    def fails_late(*arguments):
        calls.append(arguments)
        if len(calls) == 12:
            raise UserError("holds NaN")
        return tensors_in(*arguments)

    monkeypatch.setattr(convert, "tensors_of", fails_late)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    for output in (tmp_path / "old", tmp_path / "new" / "base"):
        calls.clear()
        assert cli.run(["quantize", "--model", str(MODEL), "--output", str(output), "--group-size", "16"]) == 1
        assert len(calls) == 12
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["old", "old/notes.txt"]
