"""Generation with linear attention: its state in slots beside the KV cache gives the bits of training."""

import pathlib
from dataclasses import replace

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.check import Agreement, check_agreement
from rlnumba.engine.core import Engine
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import UserError
from rlnumba.kernels.delta_rule.arithmetic import BLOCK
from rlnumba.model.config import ModelConfig
from rlnumba.model.lora import merge
from rlnumba.model.transformer import Transformer, load_model, pack, save_model, score
from rlnumba.model.weights import Weights
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits
from tests.engine.test_architectures import tokens_and_logprobs
from tests.engine.test_core import check_idle
from tests.engine.test_run_ahead import run_all
from tests.engine.test_speculation import use_known_texts
from tests.model.test_lora import random_adapter

FOLDER = pathlib.Path(__file__).parent.parent / "golden" / "qwen3_5"


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, "float32")


@pytest.mark.parametrize("tokens, seqs", [(1, 1), (BLOCK - 1, 5), (BLOCK + 1, 3), (4096, 64)])
def test_rollout_and_training_agree(model, tokens, seqs):
    """Prompts are cut into chunks around the blocks' size, and sequences wait for slots."""
    config = EngineConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    max_tokens = 80 if tokens > 1 else 5
    found = check_agreement(model, config, max_tokens=max_tokens)
    assert found == Agreement(12 * max_tokens, 12 * max_tokens, 0.0, None)


def test_several_adapters_in_one_batch(model, tmp_path):
    """Each completion has the log-probs of training with its adapter alone; merged, they are nearly these."""
    kinds = {"all": ("all-linear",), "few": ("in_proj_qkv", "in_proj_a", "v_proj"), None: ()}
    adapted = {None: model}
    for name, targets in kinds.items():
        if targets:
            adapted[name] = random_adapter(model.without_adapter(), r=3, target_modules=targets)
            save_model(adapted[name], tmp_path / name)
    folders = {name: tmp_path / name for name in kinds if name}
    llm = LLM(model, config=EngineConfig(max_num_batched_tokens=90), adapters=folders)
    prompts = [np.random.default_rng(length).integers(3, 144, length).tolist() for length in (20, 100, 64)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=50, ignore_eos=True), adapters=list(kinds))
    for name, prompt, output in zip(kinds, prompts, outputs, strict=True):
        completion = output.completions[0]
        batch = pack([[*prompt, *completion.token_ids]])
        logprobs = score(adapted[name], batch).logprobs[len(prompt) :]
        assert_same_bits(completion.array("logprobs"), device.to_host(logprobs))
        if name:
            merged = load_model(FOLDER, "float32")
            merge(merged.weights, adapted[name].adapter)
            expected = device.to_host(score(merged, batch).logprobs)[len(prompt) :]
            assert_close(logprobs, expected, terms=8192)


def test_a_model_without_keys_and_values_is_refused():
    config = replace(ModelConfig.from_folder(FOLDER), layer_types=("linear_attention",) * 4)
    model = Transformer(config, Weights.random(config))
    with pytest.raises(UserError, match="a qwen3_5_text model without a full_attention layer cannot generate"):
        LLM(model)


def test_a_slot_is_used_again(model):
    """Aborted sequences leave nothing behind for those that get their slots."""
    engine = Engine(model, config=EngineConfig(max_num_seqs=2))
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    prompt = list(range(3, 73))
    (expected,) = tokens_and_logprobs(LLM(model).generate([prompt], params))
    engine.add_request("aborted", prompt[::-1], SamplingParams(max_tokens=200, ignore_eos=True, n=2))
    for _ in range(80):
        engine.step()
    engine.abort("aborted")
    engine.add_request("kept", prompt, params)
    finished = []
    while engine.has_unfinished:
        finished += engine.step().finished
    (completion,) = [each.completion for each in finished]
    assert completion.token_ids == expected[0]
    assert_same_bits(completion.array("logprobs"), expected[1])


def test_the_cache_has_slots_and_pages(model):
    llm = LLM(model, config=EngineConfig(max_num_seqs=3))
    llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    cache = llm.engine.runner.cache
    assert sorted(cache.slots) == sorted(cache.pages) == [0, 1, 2]
    assert {array.shape[0] for layer in cache.slots.values() for array in layer} == {3}
    assert {array.shape[0] for layer in cache.pages.values() for array in layer} == {7}
    arrays = [array for of_layer in (cache.slots, cache.pages) for layer in of_layer.values() for array in layer]
    assert llm.engine.runner.state_bytes >= sum(array.nbytes for array in arrays)


def computed_tokens(engine):
    """The tokens that an Engine computes until nothing is left, and its finished completions."""
    count, finished, schedule = 0, [], engine.scheduler.schedule

    def counted(admits=True):
        nonlocal count
        step = schedule(admits)
        count += 0 if step is None else step.num_tokens
        return step

    engine.scheduler.schedule = counted
    while engine.has_unfinished:
        finished += engine.step().finished
    engine.scheduler.schedule = schedule
    return count, finished


def test_completions_of_a_prompt_begin_at_its_last_state(model):
    """Each computes what follows the last multiple of a block, and has the bits that it has without sharing."""
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=70, ignore_eos=True, n=4)
    for length in (BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 30):
        prompt = rng.integers(3, 144, length).tolist()
        alone = LLM(model, config=EngineConfig(enable_prefix_caching=False))
        expected = tokens_and_logprobs(alone.generate([prompt], params))
        engine = Engine(model, config=EngineConfig(async_scheduling=False))
        engine.add_request("group", prompt, params)
        count, finished = computed_tokens(engine)
        tail = (length - 1) % BLOCK + 1 if length > BLOCK else length
        assert count == length + 3 * tail + 4 * 69
        for each in finished:
            ids, logprobs = expected[each.index]
            assert each.completion.token_ids == ids
            assert_same_bits(each.completion.array("logprobs"), logprobs)


def test_a_page_is_taken_from_the_prompt_used_longest_ago(model):
    """More prompts than pages: what is found again has its bits, what is not is computed."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, 144, 2 * BLOCK + 5).tolist() for _ in range(6)]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    llm = LLM(model, config=EngineConfig(max_num_seqs=2, num_gpu_blocks_override=100))
    first = [llm.generate([prompt], params)[0].completions[0] for prompt in prompts]
    again = [llm.generate([prompt], params)[0].completions[0] for prompt in prompts[::-1]][::-1]
    assert [each.num_cached_tokens for each in again] == [0, 0, *[2 * BLOCK] * 4]
    for each, other in zip(first, again, strict=True):
        assert each.token_ids == other.token_ids
        assert_same_bits(each.array("logprobs"), other.array("logprobs"))


def logprobs_of_training(model, prompt, completion):
    """The log-probs that training has for a completion."""
    return device.to_host(score(model, pack([[*prompt, *completion.token_ids]])).logprobs)[len(prompt) :]


def test_the_next_turn_begins_at_the_last_state(model):
    """Of the turn before, completion included; its log-probs are those of training."""
    engine, params = Engine(model), SamplingParams(max_tokens=40, ignore_eos=True)
    prompt = np.random.default_rng(5).integers(3, 144, 100).tolist()
    context = prompt
    for cached in (0, 2 * BLOCK, 2 * BLOCK):
        engine.add_request("turn", context, params, first_context=prompt)
        _, (finished,) = computed_tokens(engine)
        completion = finished.completion
        assert completion.num_cached_tokens == cached
        assert_same_bits(completion.array("logprobs"), logprobs_of_training(model, context, completion))
        context = [*context, *completion.token_ids, 7, 8, 9]
    engine.release_retained("turn")


def engine_with_old_states(model, rng):
    """An Engine of two rows, whose pages have states of prompts that are forgotten."""
    engine = Engine(model, config=EngineConfig(max_num_seqs=2, num_gpu_blocks_override=200))
    for number in range(2):
        prompt = rng.integers(3, 144, 150).tolist()
        engine.add_request(number, prompt, SamplingParams(max_tokens=50, ignore_eos=True))
    computed_tokens(engine)
    engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("forget", ["reset", "weights"])
def test_a_turn_that_ends_after_its_states_were_forgotten(model, forget):
    """Its last state is not in its row's own page, but in that of its prompt; that of other weights is not kept."""
    rng = np.random.default_rng(5)
    engine, params = engine_with_old_states(model, rng), SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = rng.integers(3, 144, BLOCK + 6).tolist()
    engine.add_request("turn", prompt, params, first_context=prompt)
    for _ in range(5):
        engine.step()
    if forget == "reset":
        engine.reset_prefix_cache()
    else:
        engine.update_weights(7, keep_cache=True)
    computed_tokens(engine)
    assert len(engine.scheduler.row_blocks.pages.page_of_hash) == (1 if forget == "reset" else 0)
    for cached in (0, BLOCK):
        engine.add_request("again", prompt, params)
        _, (finished,) = computed_tokens(engine)
        completion = finished.completion
        assert completion.num_cached_tokens == cached
        assert_same_bits(completion.array("logprobs"), logprobs_of_training(model, prompt, completion))


def test_a_turn_resumes_at_the_state_that_two_prompts_had(model):
    """Of the other prompt's page, which has been taken since, as of its own."""
    rng = np.random.default_rng(5)
    engine, params = engine_with_old_states(model, rng), SamplingParams(max_tokens=2, ignore_eos=True)
    prompt = rng.integers(3, 144, BLOCK + 6).tolist()
    engine.add_request("other", [*prompt[:-2], 5, 6], params)
    engine.add_request("turn", prompt, SamplingParams(max_tokens=50, ignore_eos=True), first_context=prompt)
    for number in range(6):
        engine.add_request(number, rng.integers(3, 144, BLOCK + 16).tolist(), params)
    _, found = computed_tokens(engine)
    (first,) = (each.completion for each in found if each.request_id == "turn")
    context = [*prompt, *first.token_ids, 7]
    engine.add_request("turn", context, params, first_context=prompt)
    _, (finished,) = computed_tokens(engine)
    completion = finished.completion
    assert completion.num_cached_tokens == BLOCK
    assert_same_bits(completion.array("logprobs"), logprobs_of_training(model, context, completion))


def test_states_of_other_weights_are_not_found(model):
    llm = LLM(model)
    prompt, params = list(range(3, 103)), SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate([prompt], params)
    assert llm.generate([prompt], params)[0].completions[0].num_cached_tokens == BLOCK
    llm.engine.reset_prefix_cache()
    assert llm.generate([prompt], params)[0].completions[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    "config", [{"max_num_seqs": 8}, {"num_gpu_blocks_override": 24, "max_num_seqs": 5}], ids=",".join
)
def test_texts_with_drafts_are_those_without(model, monkeypatch, config):
    """Drafts that are right, cut short or wrong, up to the ends of blocks, with preemption and prompts in the cache."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(3, 144, length).tolist() for length in (3, 50, BLOCK - 1, BLOCK, 100, 150)]
    params = SamplingParams(max_tokens=90, ignore_eos=True, n=2)
    requests = [(prompt, params) for prompt in prompts]
    expected = run_all(Engine(model, config=EngineConfig(speculative_method="none")), requests)
    accepted = use_known_texts(monkeypatch, expected, rng)
    engine = Engine(model, config=EngineConfig(speculative_method="ngram", num_speculative_tokens=6, **config))
    for _ in range(2):
        assert run_all(engine, requests) == expected
        check_idle(engine)
    assert sum(accepted) > 500


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollout_and_training_agree_on_a_gpu(dtype):
    """Captured decode steps and padded prefill steps, in blocks of the rule and of the cache."""
    model = load_model(FOLDER, dtype)
    for config in (EngineConfig(), EngineConfig(max_num_batched_tokens=BLOCK + 1, max_num_seqs=7)):
        found = check_agreement(model, config, max_tokens=200)
        assert found.equal == found.tokens == 12 * 200, found
