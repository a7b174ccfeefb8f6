"""Commands, ranks and inference processes with a quantised base: each has the bits of a model with its values."""

import dataclasses
import json
from functools import partial

import pytest

from rlnumba import cli
from rlnumba.config import LoraConfig, QuantizationConfig
from rlnumba.engine import LLM, SamplingParams
from rlnumba.engine.check import check_agreement
from rlnumba.errors import ConfigError
from rlnumba.kernels.quantized.formats import dequantize_ref, quantize_ref
from rlnumba.kernels.quantized.ops import QuantizedWeight
from rlnumba.model.config import LM_HEAD
from rlnumba.model.hub import read_config
from rlnumba.model.lora import save_adapter
from rlnumba.model.new_weights import WeightFolders
from rlnumba.model.quantized.weights import form_of, quantized_names, set_values, weights_bytes
from rlnumba.model.shard import WHOLE, Shard
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Checkpoint, load_model, pack, save_model, score
from rlnumba.parallel.gathered_weights import with_gathered
from rlnumba.parallel.layer_shards import QuantizedLayerShards
from rlnumba.parallel.tensor_parallel import TensorParallel
from rlnumba.runs.eval import run_eval
from rlnumba.runtime import device
from rlnumba.trainers.grpo import run_grpo
from tests.close import assert_same_bits
from tests.model.test_lora import random_adapter
from tests.parallel import in_threads
from tests.parallel.test_asynchronous import final_of, run_of
from tests.trainers.runs import GOLDEN, MODEL, grpo_run, metrics_of

INT4 = QuantizationConfig(type="int4", group_size=16)
OPTIONS = ["--quantization", "int4", "--group-size", "16"]


# Ranks and inference processes.
of_processes = pytest.mark.skipif(device.name() != "cpu", reason="processes of the cpu device")


def values_of(model, quantization=INT4):
    """The model with the values of the format in its linear layers."""
    for name in quantized_names(model.config):
        found, (form, group_size) = device.to_host(model.weights[name]), form_of(quantization)
        codes = quantize_ref(found.reshape(-1, found.shape[-1]), form, group_size)
        model.weights[name][...] = device.asarray(dequantize_ref(*codes, form, found.dtype).reshape(found.shape))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(folder of the model with int4's values, folder of an adapter on the model)."""
    folder, adapter = (tmp_path_factory.mktemp(name) for name in ("values", "adapter"))
    save_model(values_of(load_model(MODEL)), folder, Tokenizer.from_folder(MODEL))
    made = random_adapter(load_model(MODEL), r=4).adapter
    made.base = str(MODEL)
    save_adapter(made, adapter)
    return folder, adapter


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("quick_starts")
def test_generate_score_and_check(tmp_path, folders, capsys):
    """Lines are those of the model with the values, with an adapter, and on two ranks with a part each."""
    values, adapter = folders
    (tmp_path / "prompts").write_text('{"prompt_token_ids": [1, 2, 3]}\n{"prompt_token_ids": [7, 5]}\n')
    (tmp_path / "rows").write_text('{"token_ids": [1, 2, 3, 9, 4]}\n')

    def output_of(command, *options):
        source = ["--prompts", "prompts", "--max-tokens", "6"] if command == "generate" else ["--input", "rows"]
        source[1] = str(tmp_path / source[1])
        assert cli.run([command, *source, "--output", str(tmp_path / "out"), *map(str, options)]) == 0
        return lines_of(tmp_path / "out")

    for command in ("generate", "score"):
        expected, plain = (output_of(command, "--model", folder) for folder in (values, MODEL))
        assert output_of(command, "--model", MODEL, *OPTIONS) == expected != plain
        on_values = output_of(command, "--model", adapter, "--base", values)
        assert output_of(command, "--model", adapter, *OPTIONS) == on_values != expected
    if device.name() == "cpu":
        on_values = output_of("generate", "--model", adapter, "--base", values)
        assert output_of("generate", "--model", adapter, *OPTIONS, "--tp", "2") == on_values
    capsys.readouterr()
    assert cli.run(["check", "--model", str(adapter), "--max-tokens", "4", *OPTIONS]) == 0
    assert "largest difference         0 nats" in capsys.readouterr().out
    wrong = ["check", "--model", str(MODEL), "--group-size", "16"]
    assert cli.run(wrong) == 2 and "--group-size needs --quantization" in capsys.readouterr().err
    wrong = ["check", "--model", str(MODEL), "--quantization", "nf4"]
    assert cli.run(wrong) == 2 and "group_size 64 does not divide the 32 columns" in capsys.readouterr().err


def test_merge(tmp_path, folders, capsys):
    """The adapter is added to the values that it was trained with; a line names the format and the dtype."""
    values, adapter = folders
    for name, base, options in (("expected", values, []), ("found", MODEL, OPTIONS)):
        files = ["--adapter", str(adapter), "--output", str(tmp_path / name), "--dtype", "bfloat16"]
        capsys.readouterr()
        assert cli.run(["merge", "--model", str(base), *files, *options]) == 0
    assert "its matrices are values of the base in int4 with the update, rounded to bfloat16" in capsys.readouterr().err
    found, expected = (load_model(tmp_path / name).weights.flat for name in ("found", "expected"))
    assert_same_bits(found, expected)


def test_an_adapter_of_experts(tmp_path):
    """On quantised experts rollout and training agree, and it is merged into their values."""
    int8, adapter = QuantizationConfig(type="int8", group_size=8), GOLDEN / "lora" / "experts"
    model = Checkpoint(adapter, GOLDEN / "qwen3_moe", quantization=int8).load()
    assert {f"model.layers.0.{name}" for name in ("gate_up", "down")} <= model.weights.quantized.keys()
    found = check_agreement(model, max_tokens=8)
    assert (found.equal, found.largest, found.operator) == (found.tokens, 0.0, None)
    save_model(values_of(load_model(GOLDEN / "qwen3_moe"), int8), tmp_path / "values")
    for name, base, options in (
        ("expected", tmp_path / "values", []),
        ("found", GOLDEN / "qwen3_moe", ["--quantization", "int8", "--group-size", "8"]),
    ):
        files = ["--adapter", str(adapter), "--output", str(tmp_path / name)]
        assert cli.run(["merge", "--model", str(base), *files, *options]) == 0
    merged, expected = (load_model(tmp_path / name).weights.flat for name in ("found", "expected"))
    assert_same_bits(merged, expected)


def test_eval(tmp_path, folders):
    run, (values, _) = grpo_run(tmp_path / "run"), folders
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, eval=run.data.train))
    on_base = dataclasses.replace(run, lora=LoraConfig(r=4), quantization=INT4)
    run_eval(on_base, str(MODEL), tmp_path / "found")
    for name, folder in (("expected", values), ("plain", MODEL)):
        run_eval(run, str(folder), tmp_path / name)
    names = "found", "expected", "plain"
    found, expected, plain = (lines_of(tmp_path / name / "completions.jsonl") for name in names)
    assert found == expected != plain


@pytest.fixture
def int8_base(request, tmp_path):
    """(folder of a golden model, whose linear layers may be stored in int8, its QuantizationConfig)."""
    name, group_size, is_stored = request.param
    folder = GOLDEN / name
    if is_stored:
        command = ["quantize", "--model", str(folder), "--output", str(tmp_path), "--type", "int8"]
        assert cli.run([*command, "--group-size", str(group_size)]) == 0
        folder = tmp_path
    return folder, QuantizationConfig(type="int8", group_size=group_size)


int8_bases = pytest.mark.parametrize(
    "int8_base", [("qwen3_5_moe", 8, False), ("qwen3_moe", 8, True), ("models/qwen3_tied", 16, True)], indirect=True
)


@of_processes
@int8_bases
def test_ranks_have_whole_rows(int8_base):
    """Of one matrix and of a stack, in their order: the log-probs of two ranks are those of one."""
    folder, quantization = int8_base
    checkpoint = Checkpoint(folder, quantization=quantization)
    whole, batch = checkpoint.load(), pack([[3, 5, 7, 9, 4], [8, 1, 2]])
    expected = score(whole, batch)

    def of_rank(communicator):
        model = checkpoint.load(shard=Shard(communicator.rank, 2))
        model.ranks = TensorParallel(communicator, model.config.vocab_size)
        return score(model, batch), model.weights.nbytes

    config = dataclasses.replace(read_config(folder), heads=LM_HEAD)
    for rank, (found, nbytes) in enumerate(in_threads.run(of_rank, 2)):
        for actual, wanted in zip(found, expected, strict=True):
            assert_same_bits(actual, wanted)
        assert nbytes < whole.weights.nbytes
        assert nbytes == weights_bytes(config, "float32", Shard(rank, 2), quantization)
    assert whole.weights.nbytes == weights_bytes(config, "float32", WHOLE, quantization)


@of_processes
@int8_bases
def test_ranks_have_slices_of_each_layer(int8_base):
    """The log-probs of layers that three ranks gather one at a time, and of all layers gathered, are those of one
    rank; so are the packed words and scales."""
    folder, quantization = int8_base
    whole, batch = Checkpoint(folder, quantization=quantization).load(), pack([[3, 5, 7, 9, 4], [8, 1, 2]])
    expected, of_layers = score(whole, batch), whole.weights.nbytes - whole.weights.flat.nbytes

    def of_rank(communicator):
        kind = partial(QuantizedLayerShards, quantization=quantization, communicator=communicator)
        model = load_model(folder, make_weights=kind)
        gathered = with_gathered(model)
        gathered.weights.refresh()
        return score(model, batch), score(gathered, batch), model.weights, gathered.weights

    for by_layer, at_once, shards, gathered in in_threads.run(of_rank, 3):
        for actual, other, wanted in zip(by_layer, at_once, expected, strict=True):
            assert_same_bits(actual, wanted)
            assert_same_bits(other, wanted)
        for found, wanted in zip(gathered.layers, whole.weights.layers, strict=True):
            for view, other in zip(
                *([each for block in side for each in block] for side in (found, wanted)), strict=True
            ):
                if isinstance(other, QuantizedWeight):
                    assert_same_bits(view.packed, other.packed)
                    assert_same_bits(view.scales, other.scales)
        # Slices of three ranks, and a layer; each ends at a multiple of 256 words.
        layers, padding = len(whole.weights.layers), 4 * 256 * 16
        assert 0 <= shards.nbytes - whole.weights.flat.nbytes - of_layers * (1 / 3 + 1 / layers) < padding * layers
        assert 0 <= gathered.nbytes - whole.weights.nbytes < padding * layers


def test_sleep_and_wake():
    llm = LLM(Checkpoint(MODEL, quantization=INT4).load())
    params, nbytes = SamplingParams(max_tokens=6, seed=3), llm.model.weights.nbytes
    expected = llm.generate([[1, 2, 3]], params)[0].completions[0]
    llm.sleep()
    llm.wake()
    found = llm.generate([[1, 2, 3]], params)[0].completions[0]
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert llm.model.weights.nbytes == nbytes


@of_processes
@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("tp", [1, 2])
def test_inference_processes(tmp_path, tp):
    """Rollouts of processes of their own are those of the trainer, and their log-probs those of training."""
    options = {"train": {"max_steps": 3}, "lora": LoraConfig(r=2)}
    runs = run_of(tmp_path / "synchronous", **options), run_of(tmp_path / "run", tp, max_staleness=0, **options)
    runs = [dataclasses.replace(run, quantization=INT4) for run in runs]
    deploy = dataclasses.replace(runs[1].deploy, tensor_parallel_size=tp)
    runs[1] = dataclasses.replace(runs[1], deploy=deploy)
    for run in runs:
        run_grpo(run)
        assert [row["sampling/sampling_logp_difference/max"] for row in metrics_of(run) if "reward" in row] == [0.0] * 3
    assert len({final_of(run, "adapter_model.safetensors") for run in runs}) == 1


def test_weights_of_another_folder(tmp_path, folders):
    """A served model takes them in its format, whole."""
    model = Checkpoint(MODEL, quantization=INT4).load()
    other, values = load_model(MODEL), load_model(folders[0])
    for p in other.weights.parameters:
        other.weights[p.name][...] *= 1.5
    save_model(other, tmp_path / "other")
    WeightFolders(model, MODEL).read(tmp_path / "other").copy()
    expected, batch = values_of(other), pack([[3, 5, 7, 9, 4]])
    set_values(values.weights, model.weights)
    for name in model.weights.quantized:
        assert_same_bits(values.weights[name], expected.weights[name], name)
    assert_same_bits(score(model, batch).logprobs, score(expected, batch).logprobs)
    command = ["quantize", "--model", str(MODEL), "--output", str(tmp_path / "int4"), "--type", "int4"]
    assert cli.run([*command, "--group-size", "32"]) == 0
    before = score(model, batch).logprobs
    with pytest.raises(ConfigError, match="^quantization.group_size is 16, and 32 in "):
        WeightFolders(model, MODEL).read(tmp_path / "int4")
    assert_same_bits(score(model, batch).logprobs, before)
