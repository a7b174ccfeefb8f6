"""Models with a head of one output: reward models, and policies that share their trunk with a critic."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlnumba.errors import UserError
from rlnumba.model.config import HEADS, LM_HEAD, SCORE_HEAD, ModelConfig
from rlnumba.model.heads import Targets, ValueHead
from rlnumba.model.sequence_score import score_sequences
from rlnumba.model.transformer import Tape, load_model, pack, packed_attention, save_model
from rlnumba.model.weights import parameters
from rlnumba.runtime import device
from rlnumba.runtime.arena import HeapAllocator
from tests.close import assert_close, assert_same_bits
from tests.model.test_transformer import GOLDEN, MODELS, NAMES

TIED, UNTIED = "qwen3_tied", "qwen3_untied"


def values_of(model, sequences, rows, tape=None):
    """(values (T,), SavedValues) of positions `rows` in these sequences laid end to end."""
    batch = pack(sequences)
    attention = packed_attention(model, batch)
    hidden = model.forward(batch.input_ids, batch.position_ids, attention, tape)
    values = device.xp().empty(len(rows), np.float32)
    return values, ValueHead().forward(
        model, hidden, Targets(device.asarray(np.asarray(rows, np.int32))), HeapAllocator(), values
    )


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_heads_and_their_parameters(name):
    config = ModelConfig.from_folder(MODELS / name)
    assert config.heads == LM_HEAD
    tied = config.tie_word_embeddings
    for heads in HEADS:
        names = [p.name for p in parameters(replace(config, heads=heads))]
        assert ("score" in names) == ("score" in heads)
        assert ("lm_head" in names) == ("lm" in heads and not tied)
        model = load_model(MODELS / name, "float32", heads)
        assert (model.lm_head is None) == ("lm" not in heads) and (model.score is None) == ("score" not in heads)
        if heads == SCORE_HEAD:
            # A matrix: it decays, as in TRL's AdamW.
            assert model.weights.views["score"].shape == (1, config.hidden_size)
            assert next(p for p in model.weights.parameters if p.name == "score").offset < model.weights.decay_end


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", HEADS)
def test_a_saved_model_is_the_same_model(name, heads, tmp_path):
    model = load_model(MODELS / name, "float32", heads, "normal", seed=3)
    save_model(model, tmp_path)
    again = load_model(tmp_path, "float32", heads, "normal", seed=4)
    assert again.config == replace(model.config, dtype="float32")
    assert_same_bits(again.weights.flat, model.weights.flat)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"][0].endswith("SequenceClassification" if heads == SCORE_HEAD else "CausalLM")
    assert raw.get("id2label") == ({"0": "LABEL_0"} if heads == SCORE_HEAD else None)


def test_heads_left_out(tmp_path):
    """Both heads in a folder: either alone is loaded from it, and saved from the model."""
    both = load_model(MODELS / UNTIED, "float32", LM_HEAD + SCORE_HEAD, "normal")
    save_model(both, tmp_path / "both")
    for heads, kept, left in ((LM_HEAD, "lm_head", "score"), (SCORE_HEAD, "score", "lm_head")):
        alone = load_model(tmp_path / "both", "float32", heads)
        assert_same_bits(alone.weights[kept], both.weights[kept])
        assert left not in alone.weights.views
        save_model(both, tmp_path / kept, heads=heads)
        assert f"{left}.weight" not in load_file(tmp_path / kept / "model.safetensors")
        assert_same_bits(load_model(tmp_path / kept, "float32", heads).weights.flat, alone.weights.flat)


def test_a_new_head():
    config = ModelConfig.from_folder(MODELS / TIED)
    assert not np.any(device.to_host(load_model(MODELS / TIED, "float32", SCORE_HEAD).score))
    first, same, other = (
        device.to_host(load_model(MODELS / TIED, "float32", SCORE_HEAD, "normal", seed).score) for seed in (1, 1, 2)
    )
    assert_same_bits(first, same)
    assert np.all(first != other)
    # 1 / sqrt(D + 1), of D draws.
    assert abs(first.std() * np.sqrt(config.hidden_size + 1) - 1) < 3 / np.sqrt(2 * config.hidden_size)


def test_values_and_their_gradient(rng):
    """The derivative of a sum of values along a random direction of all parameters, by central differences."""
    model = load_model(MODELS / TIED, "float32", SCORE_HEAD, "normal")
    sequences = [rng.integers(0, model.config.vocab_size, n).tolist() for n in (5, 9, 1)]
    rows, dvalues = [4, 7, 13, 14], np.array([0.5, -1.0, 2.0, 0.25], np.float32)
    tape, grads = Tape(), model.weights.grads()
    values, saved = values_of(model, sequences, rows, tape)
    hidden = device.to_host(saved.hidden)
    assert_close(values, hidden[rows].astype(np.float64) @ device.to_host(model.score)[0], terms=hidden.shape[1])
    dhidden = ValueHead().backward(model, saved, grads, HeapAllocator(), device.asarray(dvalues))
    expected = np.zeros_like(hidden)
    expected[rows] = np.outer(dvalues, device.to_host(model.score)[0])
    assert_close(dhidden, expected, what="dhidden")
    twice = ValueHead().backward(model, saved, model.weights.grads(), HeapAllocator(), device.asarray(dvalues), dhidden)
    assert twice is dhidden
    assert_close(twice, 2 * expected, what="added to another head's gradient")
    model.backward(device.asarray(expected), tape, grads)
    gradient, flat = device.to_host(grads.flat).astype(np.float64), device.to_host(model.weights.flat).copy()
    direction = rng.standard_normal(flat.shape).astype(np.float32) * (gradient != 0)
    step, sums = 2e-4, []
    for sign in (1, -1):
        model.weights.flat[...] = device.asarray(flat + np.float32(sign * step) * direction)
        sums.append(device.to_host(values_of(model, sequences, rows)[0]).astype(np.float64) @ dvalues)
    slope = float(direction.astype(np.float64) @ gradient)
    assert abs((sums[0] - sums[1]) / (2 * step) - slope) < 5e-3 * np.sqrt(np.sum((direction * gradient) ** 2))


def test_scores_of_transformers(tmp_path):
    """Folders as transformers saves them: their scores, in one batch and alone, and the config.json that we write."""
    for name, golden in json.loads((GOLDEN / "sequence_scores.json").read_text()).items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(golden["config"]))
        tensors = {
            key: value for path in (MODELS / name).glob("*.safetensors") for key, value in load_file(path).items()
        }
        tensors.pop("lm_head.weight", None)
        save_file(tensors | {"score.weight": np.array([golden["score"]], np.float32)}, folder / "model.safetensors")
        model = load_model(folder, "float32", SCORE_HEAD)
        scores = score_sequences(model, golden["sequences"])
        np.testing.assert_allclose(scores, golden["scores"], rtol=0, atol=1e-5)
        assert_same_bits(score_sequences(model, golden["sequences"], max_tokens=1), scores)
        written = model.config.to_dict()
        for key in ("architectures", "id2label", "label2id", "pad_token_id", "tie_word_embeddings"):
            assert written[key] == golden["config"][key], key


def test_sequences_that_cannot_be_scored():
    model = load_model(MODELS / TIED, "float32", SCORE_HEAD)
    assert score_sequences(model, []).shape == (0,)
    limit = model.config.max_position_embeddings
    for length in (0, limit + 1):
        with pytest.raises(
            UserError, match=f"a sequence of {length} tokens cannot be scored: the model has {limit} positions"
        ):
            score_sequences(model, [[3], [3] * length])
    model.score[0, 0] = np.nan
    with pytest.raises(UserError, match="the model's scores are not finite"):
        score_sequences(model, [[3]])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "Qwen3ForSequenceClassification with 2 labels is not supported"),
        ({"id2label": None}, "Qwen3ForSequenceClassification with 2 labels is not supported"),
        ({"id2label": None, "num_labels": 3}, "Qwen3ForSequenceClassification with 3 labels is not supported"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of strings, got 'Qwen3ForCausalLM'"),
        ({"heads": ["score", "lm"]}, "heads must be one of"),
    ],
)
def test_configs_that_are_refused(changes, message, tmp_path):
    raw = ModelConfig.from_folder(MODELS / TIED)
    raw = replace(raw, heads=SCORE_HEAD).to_dict() | changes
    with pytest.raises(UserError, match=r"^config.json: ") as caught:
        ModelConfig.from_dict(raw)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_is_not_there(tmp_path):
    model = load_model(MODELS / TIED, "float32", SCORE_HEAD)
    save_model(model, tmp_path)
    with pytest.raises(UserError, match=f"^{tmp_path}: Qwen3ForSequenceClassification has no language-model head"):
        load_model(tmp_path, "float32")
    shutil.copy(MODELS / TIED / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match="missing tensors: score.weight"):
        load_model(tmp_path, "float32", SCORE_HEAD)
