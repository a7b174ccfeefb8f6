"""Generation with mixtures of experts gives the bits of training: over chunks, preemption, groups and prefix hits."""

import pathlib

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.config.lora import LoraConfig
from rlnumba.engine.check import Agreement, check_agreement
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.model.lora import Adapter
from rlnumba.model.transformer import load_model, pack, score
from rlnumba.runtime import device
from tests.close import assert_same_bits

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = ("qwen3_moe", "qwen3_5_moe")


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    return load_model(GOLDEN / request.param, "float32")


def assert_those_of_training(model, outputs):
    """The log-probs of all completions have the bits of the training forward's."""
    for output in outputs:
        for each in output.completions:
            prompt = output.prompt_token_ids
            logprobs = device.to_host(score(model, pack([[*prompt, *each.token_ids]])).logprobs)
            assert_same_bits(each.array("logprobs"), logprobs[len(prompt) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuations_are_those_of_transformers(family):
    expected = np.load(GOLDEN / family / "expected.npz")
    prompts = [expected[f"greedy/{index}/prompt"].tolist() for index in range(3)]
    outputs = LLM(load_model(GOLDEN / family, "float32")).generate(
        prompts, SamplingParams(temperature=0, max_tokens=24)
    )
    for index, output in enumerate(outputs):
        assert output.completions[0].token_ids == expected[f"greedy/{index}/completion"].tolist()


@pytest.mark.parametrize("tokens, seqs", [(7, 2), (65, 3), (4096, 64)])
def test_rollout_and_training_agree(model, tokens, seqs):
    """Prompts are cut into chunks, and sequences wait for others."""
    max_tokens = 20 if tokens > 7 else 3
    found = check_agreement(model, EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs), max_tokens)
    assert found == Agreement(12 * max_tokens, 12 * max_tokens, 0.0, None)


def test_rollout_and_training_agree_with_an_adapter(model):
    adapted, lora = model.without_adapter(), LoraConfig(r=4, target_modules=("all-linear",))
    adapted.adapter = Adapter.new(model.weights.config, lora, "float32", "", 3)
    generator = np.random.default_rng(2)
    adapted.adapter.flat += device.asarray(0.05 * generator.standard_normal(adapted.adapter.flat.shape, np.float32))
    adapted.adapter.zero_outside_blocks()
    found = check_agreement(adapted, EngineConfig(max_num_batched_tokens=100), max_tokens=20)
    assert found == Agreement(12 * 20, 12 * 20, 0.0, None)


def test_preempted_groups_and_prefix_hits_have_the_bits_of_training(model):
    """Groups of completions in too few blocks, then the same prompts again, whose blocks are found."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 144, length).tolist() for length in (5, 63, 64, 90, 130)]
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=3)
    llm = LLM(model, config=EngineConfig(num_gpu_blocks_override=26, max_num_batched_tokens=70))
    assert_those_of_training(model, llm.generate(prompts, params))
    assert llm.engine.num_preemptions > 0
    roomy, params = LLM(model), SamplingParams(max_tokens=5, ignore_eos=True)
    for cached in (0, 1):
        outputs = roomy.generate(prompts, params)
        assert_those_of_training(model, outputs)
        assert (max(each.num_cached_tokens for each in outputs[4].completions[:1]) > 0) == cached


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_training_agree_on_a_gpu(family, dtype):
    """Captured decode steps and padded prefill steps."""
    model = load_model(GOLDEN / family, dtype)
    for config in (EngineConfig(), EngineConfig(max_num_batched_tokens=65, max_num_seqs=7)):
        found = check_agreement(model, config, max_tokens=200)
        assert found.equal == found.tokens == 12 * 200, found
