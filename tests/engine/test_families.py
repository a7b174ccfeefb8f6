"""Engines of each family of models: large groups, prompts that are cut anywhere, and drafts."""

import pathlib

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.model.transformer import load_model, pack, score
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.engine.test_run_ahead import run_all
from tests.engine.test_speculation import use_known_texts

pytestmark = pytest.mark.skipif(device.name() != "cpu", reason="what the engine does, not its kernels")
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.fixture(params=("qwen3_5", "qwen3_moe", "qwen3_5_moe", "gemma3"), scope="module")
def model(request):
    return load_model(GOLDEN / request.param, "float32")


def assert_those_of_training(model, prompt, completions):
    """The log-probs of a prompt's completions have the bits of the training forward's."""
    logprobs = device.to_host(score(model, pack([[*prompt, *each.token_ids] for each in completions])).logprobs)
    rows = np.split(logprobs, np.cumsum([len(prompt) + each.num_tokens for each in completions])[:-1])
    for each, row in zip(completions, rows, strict=True):
        assert_same_bits(each.array("logprobs"), row[len(prompt) :])


def test_groups_of_64_have_the_bits_of_training(model):
    """More completions than run at one time; they begin at the end of one prompt, of whole blocks and a part."""
    prompt = np.random.default_rng(1).integers(3, 144, 70).tolist()
    llm = LLM(model, config=EngineConfig(max_num_seqs=24))
    (output,) = llm.generate([prompt], SamplingParams(n=64, max_tokens=3, ignore_eos=True))
    assert len({tuple(each.token_ids) for each in output.completions}) > 32
    assert_those_of_training(model, prompt, output.completions)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
def test_prompts_cut_into_chunks_have_the_bits_of_training(model, tokens):
    prompt = np.random.default_rng(tokens).integers(3, 144, 20 if tokens == 1 else 150).tolist()
    llm = LLM(model, config=EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=1))
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    assert_those_of_training(model, prompt, output.completions)


def test_drafts_change_no_text(model, monkeypatch):
    """Drafts that are right, cut short or wrong."""
    rng = np.random.default_rng(6)
    params = SamplingParams(max_tokens=40, ignore_eos=True, n=2, seed=1)
    requests = [(rng.integers(3, 144, length).tolist(), params) for length in (9, 63)]
    expected = run_all(Engine(model, config=EngineConfig(speculative_method="none")), requests)
    accepted = use_known_texts(monkeypatch, expected, rng)
    config = EngineConfig(speculative_method="ngram", num_speculative_tokens=6)
    assert run_all(Engine(model, config=config), requests) == expected and sum(accepted) > 40
