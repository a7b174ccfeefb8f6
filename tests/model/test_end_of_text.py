"""The ids that end a text: the tokenizer's EOS and the configuration's, in what is read, sampled and saved."""

import json
import pathlib
import shutil
from dataclasses import replace

import pytest

from rlnumba.config import DataConfig, LoraConfig, SFTConfig
from rlnumba.data import load_sft
from rlnumba.engine import LLM, SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.model.config import ModelConfig
from rlnumba.model.hub import read_config
from rlnumba.model.lora import adapter_of_run
from rlnumba.model.tokenizer import Tokenizer, end_token_id
from rlnumba.model.transformer import load_model, save_model
from rlnumba.runtime import device

MODEL = pathlib.Path(__file__).parent.parent / "golden" / "tiny-qwen3"
# The EOS of its tokenizer.
EOS = 1

pytestmark = pytest.mark.skipif(device.name() == "sim", reason="whole models take too long in the simulator")


def edited(folder, config=(), tokenizer=(), generation=None):
    """A copy of the tiny model with other values in its files."""
    shutil.copytree(MODEL, folder)
    for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | dict(changes)))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (9, None, (EOS, 9)),
        ([9, 7], None, (EOS, 9, 7)),
        (9, {"eos_token_id": [8, 7]}, (EOS, 8, 7)),
        (9, {"eos_token_id": [8, EOS]}, (8, EOS)),
        (EOS, {"temperature": 0.6}, (EOS,)),
        (None, None, (EOS,)),
    ],
)
def test_the_tokenizers_eos_is_among_them(tmp_path, config, generation, expected):
    folder = edited(tmp_path / "m", {"eos_token_id": config}, generation=generation)
    assert read_config(folder).eos_token_ids == expected
    model, tokenizer = load_model(folder), Tokenizer(folder)
    assert model.config.eos_token_ids == expected
    save_model(model, tmp_path / "saved", tokenizer)
    # As transformers' Trainer writes it, whose generate reads this file.
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert written["eos_token_id"] == (list(expected) if len(expected) > 1 else expected[0])
    assert read_config(tmp_path / "saved").eos_token_ids == ModelConfig.from_folder(tmp_path / "saved").eos_token_ids
    assert read_config(tmp_path / "saved").eos_token_ids == expected
    # A model that came without these files gets the EOS of the tokenizer that it is saved with.
    bare = load_model(edited(tmp_path / "bare", {"eos_token_id": 9}, {"eos_token": None}))
    assert bare.config.eos_token_ids == (9,)
    save_model(bare, tmp_path / "both", tokenizer)
    assert json.loads((tmp_path / "both" / "generation_config.json").read_text())["eos_token_id"] == [EOS, 9]


def test_generation_ends_where_training_ends_a_text(tmp_path):
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    free = LLM(MODEL).generate(["what is 3+4? "], params)[0].completions[0]
    tokenizer = Tokenizer(MODEL)
    drawn = next(i for i in free.token_ids[3:] if 3 <= i < 46)
    folder = edited(tmp_path / "m", {"eos_token_id": 0}, {"eos_token": tokenizer.decode([drawn])})
    other = Tokenizer(folder)
    assert other.eos_token_id == end_token_id(folder) == drawn
    (tmp_path / "rows.jsonl").write_text('{"text": "3"}\n')
    data, ids = DataConfig(train=str(tmp_path / "rows.jsonl")), read_config(folder).eos_token_ids
    assert load_sft(data.train, data, SFTConfig(), other, 10, 64, ids).rows[0][0].input_ids[-1] == drawn
    whole = [*free.token_ids[: free.token_ids.index(drawn) + 1]]
    params = SamplingParams(max_tokens=30, seed=3)
    # Of a folder, and of a model and a tokenizer that are given apart.
    for llm in (LLM(folder), LLM(load_model(MODEL), other)):
        (output,) = llm.generate(["what is 3+4? "], params)
        found = output.completions[0]
        assert (found.token_ids, found.finish_reason) == (whole, "stop")
        assert found.text == tokenizer.decode(whole[:-1])


def test_the_tokenizer_of_an_adapter_is_the_one_that_counts(tmp_path):
    model = load_model(MODEL)
    model.adapter = adapter_of_run(LoraConfig(), model.weights, "float32", str(MODEL), 0)
    save_model(model, tmp_path / "adapter", Tokenizer(MODEL))
    settings = json.loads((tmp_path / "adapter" / "tokenizer_config.json").read_text())
    (tmp_path / "adapter" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "a"}))
    ids = (Tokenizer(tmp_path / "adapter").eos_token_id, EOS)
    assert load_model(tmp_path / "adapter").config.eos_token_ids == ids
    assert LLM(tmp_path / "adapter").engine.eos_token_ids == ids


def test_ids_that_the_model_does_not_have_end_nothing(tmp_path):
    folder = edited(tmp_path / "m", {"eos_token_id": [-1, 4000, 7]}, {"eos_token": None})
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    one_more = edited(tmp_path / "one-more", {"eos_token_id": [vocab_size, 7]}, {"eos_token": None})
    assert LLM(one_more).engine.eos_token_ids == (7,)
    llm = LLM(folder)
    assert llm.engine.eos_token_ids == (7,)
    # Before min_tokens ids that end a completion are banned, those of no token on no device.
    assert llm.generate(["a"], SamplingParams(max_tokens=4, min_tokens=4))[0].completions[0].num_tokens == 4
    assert ModelConfig.from_folder(folder).ending_at(4000).eos_token_ids == (-1, 4000, 7)


def test_a_stop_string_that_is_a_special_token():
    tokenizer = Tokenizer(MODEL)
    (special,) = [text for text, id in tokenizer.special_ids.items() if id == EOS]
    llm = LLM(MODEL)
    params = SamplingParams(max_tokens=60, ignore_eos=True, n=8, seed=5, temperature=2.0)
    free = llm.generate(["a"], params)[0].completions
    index = next(i for i, completion in enumerate(free) if EOS in completion.token_ids)
    ids = free[index].token_ids[: free[index].token_ids.index(EOS) + 1]
    found = llm.generate(["a"], replace(params, stop=(special,)))[0].completions[index]
    assert (found.token_ids, found.finish_reason) == (ids, "stop")
    assert found.text == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stop_token_ids": [48]}, "sampling: stop_token_ids 48 is outside of the model's vocabulary of 48"),
        (
            {"stop": ["<eos>\n"]},
            r"sampling: stop '<eos>\\n' cannot occur, .* the special token <eos>; stop at '<eos>' alone",
        ),
    ],
)
def test_what_cannot_end_a_completion_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(MODEL).generate(["a"], SamplingParams(**options))
