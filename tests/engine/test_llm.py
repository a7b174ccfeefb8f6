"""LLM.generate: tokens depend on seed, prompt, completion index and position alone; log-probs are the scorer's."""

import dataclasses
import gc
import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import EngineConfig, SFTConfig
from rlnumba.engine import LLM, PromptError, SamplingParams, sampler
from rlnumba.engine.blocks import cache_size
from rlnumba.engine.cache import KVCache
from rlnumba.engine.llm import chat_prompts
from rlnumba.engine.sequence import RequestOutput
from rlnumba.engine.steps import attention
from rlnumba.errors import ConfigError, UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.model.blocks.attention import PackedAttention
from rlnumba.model.config import ModelConfig
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Transformer, load_model, pack, score
from rlnumba.model.weights import Weights
from rlnumba.runs.micro_batch import TargetBatch
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device, dispatch, memory
from tests.close import assert_same_bits
from tests.kernels.test_paged_attention import shorten_segments

EOS = 5
# On a GPU the cache takes what memory is left, and decode graphs have padded batches.
on_cpu = pytest.mark.skipif(device.name() != "cpu", reason="counts what the cpu device allocates and computes")


def make_model(dtype="float32", seed=0, **changes):
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 200,
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
            **changes,
        }
    )
    weights = Weights.random(config, dtype, seed)
    # At the scale of a fresh model all tokens are about equally likely; a trained one is less even.
    for parameter in weights.parameters:
        if parameter.decays:
            weights[parameter.name][...] *= 8
    return Transformer(config, weights)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def prompts(rng):
    lengths = (1, 15, 16, 17, 40, 64)
    prompts = [rng.integers(0, 97, length).tolist() for length in lengths]
    return [*prompts, prompts[3] + [7, 8], prompts[4]]


def generate(model, prompts, params, tokenizer=None, **config):
    return LLM(model, tokenizer, EngineConfig(**config)).generate(prompts, params)


def drawn(outputs):
    return [[(c.token_ids, c.logprobs, c.finish_reason) for c in output.completions] for output in outputs]


def scored(model, outputs, temperature):
    """The training forward's log-probs of the same completions, in the shape of `drawn`'s."""
    rows = [(o.prompt_token_ids, c.token_ids) for o in outputs for c in o.completions]
    logprobs = device.to_host(score(model, pack([p + c for p, c in rows]), temperature).logprobs)
    ends = np.cumsum([len(p) + len(c) for p, c in rows])
    return [logprobs[end - len(c) : end].tolist() for end, (_, c) in zip(ends, rows, strict=True)]


SCHEDULES = [
    {},
    {"enable_prefix_caching": False},
    {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"num_gpu_blocks_override": 12},
]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_logprobs_are_the_scorers_bit_for_bit_under_any_schedule(model, prompts, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, n=2, seed=3)
    first = generate(model, prompts, params)
    flat = [c.logprobs for o in first for c in o.completions]
    assert flat == scored(model, first, temperature)
    assert {c.finish_reason for o in first for c in o.completions} == {"stop", "length"}
    for config in SCHEDULES[1:]:
        assert drawn(generate(model, prompts, params, **config)) == drawn(first)
    backwards = generate(model, prompts[::-1], params)
    assert drawn(backwards[::-1]) == drawn(first)
    assert drawn(generate(model, prompts[4:5], params)) == drawn(first[4:5])


def test_preemption_happens_in_that_test_and_leaves_the_text_alone(model, prompts):
    llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=12))
    llm.generate(prompts, SamplingParams(max_tokens=40, n=2, seed=3))
    assert llm.engine.num_preemptions > 0


def test_a_prefix_found_in_the_cache_changes_nothing(model, prompts):
    llm, params = LLM(model), SamplingParams(max_tokens=20, n=2, seed=5)
    computed = []
    run = llm.engine.runner.run
    llm.engine.runner.run = lambda step, table: (computed.append(step.num_tokens), run(step, table))[1]
    first = llm.generate(prompts, params)
    cold, computed[:] = sum(computed), []
    again = llm.generate(prompts, params)
    assert drawn(again) == drawn(first) and sum(computed) < cold - sum(len(p) // 16 * 16 - 16 for p in prompts)
    # A second turn: the first one, prompt and completion, is a prefix.
    turns = [o.prompt_token_ids + c.token_ids + [9, 8] for o in first for c in o.completions]
    assert drawn(llm.generate(turns, params)) == drawn(generate(model, turns, params))


def test_prefix_invariants(model, prompts):
    four = generate(model, prompts, SamplingParams(max_tokens=30, n=4, seed=9))
    two = generate(model, prompts, SamplingParams(max_tokens=30, n=2, seed=9))
    assert drawn(two) == [completions[:2] for completions in drawn(four)]
    short = generate(model, prompts, SamplingParams(max_tokens=11, n=4, seed=9))
    for long_ones, short_ones in zip(drawn(four), drawn(short), strict=True):
        assert [(ids[:11], logprobs[:11]) for ids, logprobs, _ in long_ones] == [c[:2] for c in short_ones]
    assert drawn(four)[4] == drawn(four)[7]
    assert len({tuple(c.token_ids) for c in four[4].completions}) == 4
    other = generate(model, prompts, SamplingParams(max_tokens=30, n=4, seed=10))
    assert drawn(other)[4] != drawn(four)[4]


def test_a_completion_used_as_a_prompt_is_a_new_prompt(model, prompts):
    """The prompt is part of the noise: a completion cut short and used as a prompt is a new prompt."""
    (whole,) = generate(model, [[1, 2, 3]], SamplingParams(max_tokens=12, ignore_eos=True))
    cut = whole.completions[0].token_ids[:4]
    (rest,) = generate(model, [[1, 2, 3, *cut]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert rest.completions[0].token_ids != whole.completions[0].token_ids[4:]


def test_params_of_each_prompt(model, prompts):
    params = [
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(temperature=0.5, top_k=3, max_tokens=20, n=3),
        SamplingParams(top_p=0.7, max_tokens=20, seed=4),
        SamplingParams(min_p=0.2, max_tokens=9, ignore_eos=True),
        SamplingParams(repetition_penalty=1.7, max_tokens=20),
        SamplingParams(max_tokens=3, logprobs=False),
    ]
    together = generate(model, prompts[:6], params)
    alone = [generate(model, [prompt], p)[0] for prompt, p in zip(prompts, params, strict=False)]
    assert drawn(together) == drawn(alone)
    assert [len(o.completions) for o in together] == [1, 3, 1, 1, 1, 1]
    assert len(together[3].completions[0].token_ids) == 9 and together[5].completions[0].logprobs == []


def logits_after(model, token_ids):
    """float32 logits (V,) of the token that follows, in float64 from the transformer's last hidden row."""
    batch = pack([token_ids])
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen, model.config.scale)
    hidden = device.to_host(model.forward(batch.input_ids, batch.position_ids, attention))
    return hidden[-1].astype(np.float64) @ device.to_host(model.lm_head).astype(np.float64).T


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def test_greedy_takes_the_largest_and_returns_the_untempered_logprob(model, prompts):
    for output in generate(model, prompts, SamplingParams(temperature=0, max_tokens=6)):
        ids = list(output.prompt_token_ids)
        for token, logprob in zip(output.completions[0].token_ids, output.completions[0].logprobs, strict=True):
            z = logits_after(model, ids)
            assert token == z.argmax() and abs(logprob - log_softmax(z)[token]) < 1e-5
            ids.append(token)


def test_filters_and_penalty_renormalise_what_is_kept(model, prompts):
    penalty = 1.6
    params = SamplingParams(temperature=0.9, top_k=4, repetition_penalty=penalty, max_tokens=12, ignore_eos=True)
    for output in generate(model, prompts, params):
        ids = list(output.prompt_token_ids)
        for token, logprob in zip(output.completions[0].token_ids, output.completions[0].logprobs, strict=True):
            z = logits_after(model, ids)
            seen = np.unique(ids)
            z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
            z /= 0.9
            z[z < np.sort(z)[-4]] = -np.inf
            assert abs(logprob - log_softmax(z)[token]) < 1e-4
            ids.append(token)


def drawing_eos(model, prompt):
    """(params, completion) of a seed with which EOS is drawn, not at once, and ignored."""
    for seed in range(100):
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=seed)
        completion = generate(model, prompt, params)[0].completions[0]
        if EOS in completion.token_ids[10:] and EOS not in completion.token_ids[:10]:
            return params, completion
    raise AssertionError("EOS was never drawn")


def test_stopping(model):
    prompt = [[1, 2, 3]]
    params, free = drawing_eos(model, prompt)
    ids, logprobs = free.token_ids, free.logprobs
    assert len(ids) == 60 and free.finish_reason == "length"
    end = ids.index(EOS) + 1
    stopped = generate(model, prompt, dataclasses.replace(params, ignore_eos=False))
    assert drawn(stopped) == [[(ids[:end], logprobs[:end], "stop")]]
    other = next(token for token in ids[2:end] if token != EOS and token not in ids[:2])
    params = dataclasses.replace(params, stop_token_ids=(other,))
    end = ids.index(other) + 1
    assert drawn(generate(model, prompt, params)) == [[(ids[:end], logprobs[:end], "stop")]]
    # The last allowed token is also one that stops: "stop" says more.
    params = dataclasses.replace(params, max_tokens=end)
    assert drawn(generate(model, prompt, params))[0][0][2] == "stop"


class TwoCharacterTokens:
    """A tokenizer of tokens of two characters; EOS is special."""

    eos_token_id, special_ids = EOS, {"<end>": EOS}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"{chr(97 + i // 10)}{i % 10}" for i in ids if not (skip_special_tokens and i == EOS))

    def decode_batch(self, lists):
        return [self.decode(ids) for ids in lists]


def test_text_and_stop_strings(model):
    prompt = [[1, 2, 3]]
    params, _ = drawing_eos(model, prompt)
    (free,) = generate(model, prompt, params, TwoCharacterTokens())
    ids, text = free.completions[0].token_ids, free.completions[0].text
    assert text == TwoCharacterTokens().decode(ids)
    (stopped,) = generate(model, prompt, dataclasses.replace(params, ignore_eos=False), TwoCharacterTokens())
    assert stopped.completions[0].text == TwoCharacterTokens().decode(ids[: ids.index(EOS)])
    # A string across the border of two tokens.
    stop = text[7:10]
    (cut,) = generate(model, prompt, dataclasses.replace(params, stop=("no such", stop)), TwoCharacterTokens())
    found = text.index(stop)
    assert cut.completions[0].text == text[:found] and cut.completions[0].finish_reason == "stop"
    assert cut.completions[0].token_ids == ids[: (found + 2) // 2 + 1]
    assert generate(model, prompt, params)[0].completions[0].text == ""
    with pytest.raises(ConfigError, match="tokenizer"):
        generate(model, prompt, SamplingParams(stop="x"))


def test_outputs_have_the_attributes_of_vllm(model):
    prompt = [1, 2, 3]
    params, free = drawing_eos(model, [prompt])
    eos_end = free.token_ids.index(EOS)
    text = TwoCharacterTokens().decode(free.token_ids)
    ended = next(token for token in free.token_ids[2:eos_end] if token not in free.token_ids[:2])
    stops = (text[8:10], text[5:9], text[5:7])
    assert text.index(text[5:7]) == 5
    cases = [  # what is changed of params, which ignore EOS, finish_reason, stop_reason
        ({}, "length", None),
        ({"ignore_eos": False}, "stop", None),
        ({"ignore_eos": False, "stop_token_ids": (EOS,)}, "stop", None),
        ({"stop_token_ids": (EOS,)}, "stop", EOS),
        ({"stop_token_ids": (EOS, ended)}, "stop", ended),
        ({"stop": "<end>"}, "stop", "<end>"),
        ({"stop": stops}, "stop", text[5:7]),
    ]
    every = [dataclasses.replace(params, **changes) for changes, *_ in cases]
    seen = []
    llm = LLM(model, TwoCharacterTokens())
    outputs = llm.generate(
        [prompt] * len(every), every, finished=lambda index, output: seen.append((index, output.finished))
    )
    assert sorted(seen) == [(i, True) for i in range(len(every))]
    assert [output.request_id for output in outputs] == [str(i) for i in range(len(every))]
    for output, (_, *reasons) in zip(outputs, cases, strict=True):
        (found,) = output.outputs
        assert output.finished and [found.finish_reason, found.stop_reason] == reasons
        assert pickle.loads(pickle.dumps(found)) == found
    assert not RequestOutput([1], [None, found]).finished
    (several,) = llm.generate([prompt], SamplingParams(n=3, max_tokens=2))
    assert [each.index for each in pickle.loads(pickle.dumps(several.outputs))] == [0, 1, 2]


def test_new_weights_may_end_completions_with_another_token(model):
    """What has begun ends at the old one."""
    prompt = [1, 2, 3]
    params, free = drawing_eos(model, [prompt])
    end = free.token_ids.index(EOS) + 1
    other = free.token_ids[end - 2]
    assert other not in free.token_ids[: end - 2]
    params, engine, finished = dataclasses.replace(params, ignore_eos=False), LLM(model).engine, {}
    engine.add_request(0, prompt, params)
    engine.step()
    engine.take_ends(dataclasses.replace(model.config, eos_token_ids=(other,)))
    engine.add_request(1, prompt, params)
    while engine.has_unfinished:
        finished |= {number: completion for number, _, completion in engine.step().finished}
    for number, length in ((0, end), (1, end - 1)):
        assert finished[number].token_ids == free.token_ids[:length]
        assert (finished[number].finish_reason, finished[number].stop_reason) == ("stop", None)


def test_min_tokens_keeps_a_completion_from_stopping(model):
    prompt = [[1, 2, 3]]
    params, free = drawing_eos(model, prompt)
    end = free.token_ids.index(EOS)
    stopping = dataclasses.replace(params, ignore_eos=False, min_tokens=end + 2)
    ((completion,),) = drawn(generate(model, prompt, stopping))
    ids, logprobs, reason = completion
    # The same tokens until EOS, which is banned up to there; their log-probs are of a distribution without it.
    assert ids[:end] == free.token_ids[:end] and EOS not in ids[: end + 2]
    assert all(new > old for new, old in zip(logprobs[:end], free.logprobs, strict=False))
    assert reason == "length" or ids.index(EOS) == len(ids) - 1 >= end + 2
    # A stop id is banned as EOS is.
    other = free.token_ids[2]
    ((completion,),) = drawn(generate(model, prompt, dataclasses.replace(params, stop_token_ids=[other], min_tokens=9)))
    assert other not in completion[0][:9] and len(completion[0]) >= 9
    # Beyond min_tokens nothing is banned.
    both = dataclasses.replace(params, ignore_eos=False, min_tokens=1)
    assert drawn(generate(model, prompt, both))[0][0][0][1:] == free.token_ids[1 : end + 1]
    assert free.token_ids[0] != EOS


def test_first_index_goes_on_with_the_noise(model):
    prompt = [[1, 2, 3]]
    six = drawn(generate(model, prompt, SamplingParams(max_tokens=9, n=6, seed=4)))[0]
    last = drawn(generate(model, prompt, SamplingParams(max_tokens=9, n=2, seed=4, first_index=4)))[0]
    assert last == six[4:]


FILTERED = {"top_p": {"top_p": 0.7}, "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 1.3}}


@pytest.mark.parametrize("filters", FILTERED)
def test_filtered_completions_are_scored_as_they_were_drawn(model, prompts, filters):
    """Bit for bit with their thresholds, whatever else runs: other requests, preemption."""
    options = FILTERED[filters]
    params = SamplingParams(max_tokens=20, n=2, ignore_eos=True, logit_thresholds=True, **options)
    outputs = generate(model, prompts, params)
    rows = [(o.prompt_token_ids, c) for o in outputs for c in o.completions]
    policy = Policy(model, SFTConfig(gradient_checkpointing=False), None, options.get("temperature", 1.0))
    for prompt, completion in rows:
        assert completion.thresholds.dtype == np.float32 and len(completion.thresholds) == 20
        ids, targets = np.array(prompt + completion.token_ids, np.int32), len(prompt) + np.arange(20)
        batch = TargetBatch.of(ids, np.array([len(ids)]), targets, completion.thresholds)
        logprobs, entropy = (device.xp().empty(20, np.float32) for _ in range(2))
        policy.logprobs(batch, logprobs, entropy)
        assert_same_bits(logprobs, np.float32(completion.logprobs))
    others = SamplingParams(max_tokens=9, top_k=3)
    mixed = LLM(model, None, EngineConfig(max_num_seqs=9, num_gpu_blocks_override=8))
    again = mixed.generate([p for p in prompts for _ in range(2)], [params, others] * len(prompts))
    assert mixed.engine.num_preemptions > 0
    assert again[1].completions[0].thresholds is None
    for one, other in zip(outputs, again[::2], strict=True):
        assert drawn([one]) == drawn([other])
        for first, second in zip(one.completions, other.completions, strict=True):
            assert_same_bits(first.thresholds, second.thresholds)


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**70])
def test_min_tokens_may_be_more_than_a_sequence_can_have(model, count):
    prompt, params = [[1, 2, 3], [4]], SamplingParams(seed=3, n=2, max_tokens=count, min_tokens=count)
    most = dataclasses.replace(params, max_tokens=199, min_tokens=199)
    found, free = (generate(model, prompt, each) for each in (params, dataclasses.replace(params, min_tokens=0)))
    assert drawn(found) == drawn(generate(model, prompt, most)) != drawn(free)
    assert [len(c.token_ids) for output in found for c in output.completions] == [197, 197, 199, 199]


def test_stop_strings_after_min_tokens(model):
    """Only one that ends in the text of a later token counts, and the text is cut where that one begins."""
    prompt = [[1, 2, 3]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (free,) = generate(model, prompt, params, TwoCharacterTokens())
    text = free.completions[0].text
    # Across the border of tokens 5 and 6, of tokens 4 and 5; the last one is token 5.
    across = (text[9:11], 5, True), (text[9:11], 6, False), (text[7:9], 5, False)
    for stop, min_tokens, found in (*across, (text[8:10], 5, False)):
        later = text.find(stop, 2 * min_tokens - 1)
        (cut,) = generate(
            model, prompt, dataclasses.replace(params, stop=(stop,), min_tokens=min_tokens), TwoCharacterTokens()
        )
        completion = cut.completions[0]
        assert completion.text == (text if later < 0 else text[:later])
        assert (completion.text == text[:9]) == found
        assert completion.finish_reason == ("length" if later < 0 else "stop")


@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5}, {"presence_penalty": -2.0}]
)
def test_penalties_change_how_often_tokens_repeat(model, penalties):
    """Against a loop over logits of the whole model, a step at a time, greedily."""
    prompt, presence, frequency = (
        [1, 2, 3, 2],
        penalties.get("presence_penalty", 0),
        penalties.get("frequency_penalty", 0),
    )
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True, **penalties)
    ((completion,),) = drawn(generate(model, [prompt], params))
    plain = dataclasses.replace(params, presence_penalty=0.0, frequency_penalty=0.0)
    ((free,),) = drawn(generate(model, [prompt], plain))
    assert free[0] != completion[0]
    ids = list(prompt)
    for token in completion[0]:
        logits = logits_after(model, ids).astype(np.float64)
        counts = np.bincount(ids[len(prompt) :], minlength=len(logits))
        logits -= frequency * counts + presence * (counts > 0)
        assert token == np.argmax(logits)
        ids.append(token)


def test_lengths_up_to_the_limit(model):
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    prompts = [[1] * length for length in (3, 20, 30, 31, 32)]
    outputs = generate(model, prompts, params, max_model_len=32)
    # A prompt as long as the limit still gets the token that its last position predicts.
    assert [len(o.completions[0].token_ids) for o in outputs] == [29, 12, 2, 1, 1]
    assert {o.completions[0].finish_reason for o in outputs} == {"length"}
    (whole,) = generate(model, [[1] * 199], params)
    assert len(whole.completions[0].token_ids) == 1


@pytest.mark.parametrize(
    "prompt, reason",
    [
        ([], "empty prompt"),
        ([1, 97], "token id 97 is outside of the vocabulary of 97"),
        ([-1], "token id -1"),
        ([1] * 201, "201 tokens are more than the limit of 200"),
        ([1.5], "integers"),
        (["a"], "integers"),
    ],
)
def test_bad_prompts_are_named_before_any_work(model, prompt, reason):
    def never(*progress):
        raise AssertionError("work was done")

    llm = LLM(model)
    with pytest.raises(PromptError, match=f"prompt 1: .*{reason}") as error:
        llm.generate([[1, 2], prompt], SamplingParams(), progress=never)
    assert isinstance(error.value, UserError) and error.value.request_id == 1


def test_limits_that_cannot_be_kept_are_named(model):
    with pytest.raises(ConfigError, match="max_model_len 201 .* 200 positions"):
        LLM(model, None, EngineConfig(max_model_len=201))
    with pytest.raises(PromptError, match="prompt 1: prompt and completion need 50 tokens .* holds 48"):
        generate(model, [[1], [1, 2]], SamplingParams(max_tokens=48), num_gpu_blocks_override=3)


def test_a_model_folder_has_its_tokenizer():
    folder = Path(__file__).parent.parent / "golden" / "tiny-qwen3"
    tokenizer = Tokenizer.from_folder(folder)
    params = SamplingParams(max_tokens=12, n=2, seed=3)
    wanted = LLM(load_model(folder), tokenizer).generate(["what is 3+4? "], params)
    assert wanted[0].completions[0].text == tokenizer.decode(wanted[0].completions[0].token_ids)
    for given in (folder, str(folder)):
        assert LLM(given).generate(["what is 3+4? "], params) == wanted
    # One that is given wins.
    (output,) = LLM(folder, TwoCharacterTokens()).generate([wanted[0].prompt_token_ids], params)
    assert output.completions[0].text == TwoCharacterTokens().decode(wanted[0].completions[0].token_ids)


def test_defaults_are_vllms(model):
    (output,) = LLM(model).generate([[1, 2, 3]])
    assert drawn([output]) == drawn(generate(model, [[1, 2, 3]], SamplingParams(max_tokens=16, n=1, temperature=1.0)))
    assert output.prompt_token_ids == [1, 2, 3] and set(output.completions[0].policy_versions) == {0}
    assert len(LLM(model).generate([[1, 2, 3]], SamplingParams(ignore_eos=True))[0].completions[0].token_ids) == 16


def test_what_does_not_fit_the_prompts_is_named(model):
    with pytest.raises(ValueError, match="^generate: 2 prompts with 1 SamplingParams$"):
        LLM(model).generate([[1], [2]], [SamplingParams()])
    with pytest.raises(PromptError, match="^prompt 1: text needs a tokenizer$") as error:
        LLM(model).generate([[1], "a"])
    assert error.value.reason == "text needs a tokenizer"
    with pytest.raises(ConfigError, match="^sampling: stop strings need a tokenizer, and the model folder has none$"):
        LLM(model).generate([[1], [2]], [SamplingParams(), SamplingParams(stop="x")])
    with pytest.raises(ConfigError, match="^max_model_len 201 is more than the model's 200 positions$"):
        LLM(model, None, EngineConfig(max_model_len=201))
    assert LLM(model, None, EngineConfig(max_model_len=200)).max_model_len == LLM(model).max_model_len == 200
    with pytest.raises(PromptError) as error:
        generate(model, [[1], [1, 2]], SamplingParams(max_tokens=48), num_gpu_blocks_override=3)
    assert error.value.request_id == 1 and error.value.reason == (
        "prompt and completion need 50 tokens of KV cache, which holds 48; lower max_tokens or raise "
        "gpu_memory_utilization"
    )


@on_cpu
def test_the_cpus_cache_follows_the_requests(model, monkeypatch):
    """As many blocks as all need and one more for each, at most max_num_seqs of the longest; 1 GiB, or one sequence."""
    params = [SamplingParams(max_tokens=n) for n in (20, 40, 1)]
    prompts = [[1] * 13, [1] * 9, [1] * 16]

    def blocks(**config):
        llm = LLM(model, None, EngineConfig(**config))
        llm.generate(prompts, params)
        return llm.engine.blocks.num_blocks

    # 32, 48 and 16 tokens are kept, for the last of a sequence is not computed.
    assert blocks() == 2 + 3 + 1 + 3
    assert blocks(max_num_seqs=2) == 2 * (3 + 1)
    assert blocks(max_num_seqs=1) == 3 + 1
    assert blocks(max_num_seqs=5, max_num_batched_tokens=2) == 2 * (3 + 1)
    assert blocks(num_gpu_blocks_override=4) == 4
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, heads, head_dim, float32
    monkeypatch.setattr(cache_size, "CPU_CACHE_BYTES", 5 * block_bytes + 1)
    assert blocks() == 5
    monkeypatch.setattr(cache_size, "CPU_CACHE_BYTES", 2 * block_bytes)
    assert blocks() == 3
    monkeypatch.undo()
    assert cache_size.CPU_CACHE_BYTES == 2**30
    # It grows where more is asked for, and is kept where less is.
    llm = LLM(model)
    sizes = []
    for chosen in ([0], [0, 1], [2]):
        llm.generate([prompts[i] for i in chosen], [params[i] for i in chosen])
        sizes.append(llm.engine.blocks.num_blocks)
    assert sizes == [3, 7, 7]


@on_cpu
def test_activations_of_a_step_are_in_the_engines_arena(model):
    """Of 150 tokens at least the residual stream, twice, and the hidden states: float32, 48 wide."""
    llm = LLM(model)
    llm.generate([[1] * 150], SamplingParams(max_tokens=1))
    assert llm.engine.runner.arena.region == "engine activations"
    assert 3 * 150 * 48 * 4 <= llm.engine.runner.arena.peak < 2**20


@on_cpu
def test_logits_exist_for_some_rows_at_a_time(model, prompts, monkeypatch):
    """As many as fit into LOGITS_BYTES; it does not show in what is drawn, nor in penalties."""
    prompts = prompts[:7]
    params = [SamplingParams(temperature=0.8, repetition_penalty=1 + i / 4, max_tokens=5) for i in range(7)]
    expected, rows = drawn(generate(model, prompts, params)), []
    logits = model.logits

    def counted(hidden, out, memory):
        rows.append(len(hidden))
        logits(hidden, out, memory)

    monkeypatch.setattr(model, "logits", counted)
    for size, chunks in ((3 * 97 * 4, [3, 3, 1]), (7 * 97 * 4 - 1, [6, 1]), (7 * 97 * 4, [7]), (1, [1] * 7)):
        monkeypatch.setattr(sampler, "LOGITS_BYTES", size)
        rows.clear()
        assert drawn(generate(model, prompts, params)) == expected
        assert rows[: len(chunks)] == chunks
    monkeypatch.undo()
    assert sampler.LOGITS_BYTES == 2**28


def test_a_stop_string_is_found_wherever_it_ends(model):
    """A short one, one across tokens, and one that is as long as the tail of the text that is looked at first."""
    prompt = [[1, 2, 3]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (free,) = generate(model, prompt, params, TwoCharacterTokens())
    text = free.completions[0].text
    for length in (1, 3, 60):
        stop = text[20 : 20 + length]
        (cut,) = generate(model, prompt, dataclasses.replace(params, stop=(stop,)), TwoCharacterTokens())
        assert cut.completions[0].text == text[: text.index(stop)] and cut.completions[0].finish_reason == "stop"
    # Of several, the one that begins first.
    stops = (text[24:26], text[20:26], text[22:26])
    (cut,) = generate(model, prompt, dataclasses.replace(params, stop=stops), TwoCharacterTokens())
    assert cut.completions[0].text == text[: min(text.index(stop) for stop in stops)]


def test_taking_and_giving_back_the_cache_counts_once(model):
    def held():
        memory.reset_peaks()
        return memory.report().get("kv", 0)

    before = held()
    cache = KVCache(model.config, 3, 16, "float32")
    assert cache.nbytes == 3 * 2 * 2 * 16 * 2 * 16 * 4 and cache.arrays is None and held() == before
    cache.take()
    k = cache.arrays[0]
    cache.take()
    assert cache.arrays[0] is k and k.shape == (2, 3, 16, 2, 16) == cache.arrays[1].shape and k.dtype == np.float32
    assert held() == before + cache.nbytes
    for _ in range(2):
        cache.give_back()
        assert cache.arrays is None and held() == before
    cache.take()
    assert held() == before + cache.nbytes
    del cache
    assert held() == before


def test_nothing_to_do(model):
    assert LLM(model).generate([], SamplingParams()) == []


def test_progress_counts(model):
    calls = []
    LLM(model).generate([[1, 2], [3]], SamplingParams(max_tokens=4, n=2, ignore_eos=True), lambda *c: calls.append(c))
    assert calls[-1] == (4, 4, 16) and [c[2] for c in calls] == [4, 8, 12, 16]


def test_new_weights_get_a_new_version():
    model = make_model()
    llm, prompt = LLM(model), [list(range(40))]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    old = llm.generate(prompt, params)
    model.weights.flat *= np.float32(0.7)
    llm.update_weights(1)
    new = llm.generate(prompt, params)
    assert drawn(new) == drawn(generate(model, prompt, params)) != drawn(old)
    model.weights.flat *= np.float32(0.7)
    llm.update_weights(5)
    newer = llm.generate(prompt, params)
    assert drawn(newer) == drawn(generate(model, prompt, params))
    versions = [output[0].completions[0].policy_versions for output in (old, new, newer)]
    assert versions == [[0] * 8, [1] * 8, [5] * 8]


def test_sleep_lends_the_cache_and_the_text_stays(model):
    """Its memory stays until an allocation needs it."""
    llm, prompt, params = LLM(model), [[1, 2, 3] * 10], SamplingParams(max_tokens=8)
    before, cache = llm.generate(prompt, params), llm.engine.runner.cache
    k = cache.arrays[0]
    # While the engine is awake its cache is its own.
    memory.reclaim()
    assert cache.arrays[0] is k and llm.engine.blocks.block_of_hash
    llm.sleep()
    assert cache.arrays[0] is k and llm.engine.is_asleep and not llm.engine.blocks.block_of_hash
    llm.wake()
    assert drawn(llm.generate(prompt, params)) == drawn(before) and cache.arrays[0] is k
    assert not memory.reclaim() and cache.arrays[0] is k
    llm.sleep()
    assert memory.reclaim() and cache.arrays is None and not memory.reclaim()
    llm.wake()
    assert drawn(llm.generate(prompt, params)) == drawn(before) and cache.arrays is not None
    k = cache.arrays[0]
    llm.sleep()
    assert cache.arrays[0] is k
    llm.wake()
    assert drawn(llm.generate(prompt, params)) == drawn(before)


def test_sleep_takes_what_vllms_does(model, monkeypatch):
    llm, woken = LLM(model), []
    monkeypatch.setattr(llm.engine, "wake", lambda: woken.append(True))
    for level in (1, 2):
        llm.sleep(level=level)
        assert llm.engine.is_asleep
        llm.wake_up(tags=["weights"])
        assert not woken  # the cache alone sleeps
        llm.wake_up(tags=["kv_cache"])
        llm.wake_up()
        assert [woken.pop(), woken.pop()] == [True, True]
    for call in (lambda: llm.sleep(3), lambda: llm.wake_up("weights"), lambda: llm.wake_up(["graphs"])):
        with pytest.raises(ConfigError, match="must be"):
            call()
    assert llm.get_tokenizer() is llm.tokenizer


def test_the_prefix_cache_is_reset_where_so_asked(model):
    llm, prompt = LLM(model), [[1, 2, 3] * 20]
    params = SamplingParams(max_tokens=2)

    def cached():
        return llm.generate(prompt, params)[0].completions[0].num_cached_tokens

    assert cached() == 0 < cached()
    assert llm.reset_prefix_cache() and cached() == 0


def test_a_cache_that_is_never_lent(model):
    llm = LLM(model, None, EngineConfig(enable_sleep_mode=False))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    llm.sleep()
    memory.reclaim()
    assert llm.engine.runner.cache.arrays is not None


def test_sleep_mode_gives_the_cache_back_and_the_text_stays(model):
    def held():
        memory.reset_peaks()
        return memory.report()["kv"]

    llm, prompt = LLM(model, None, EngineConfig(enable_sleep_mode=True)), [[1, 2, 3]]
    params = SamplingParams(max_tokens=8)
    before = llm.generate(prompt, params)
    with_cache, cache_bytes = held(), llm.engine.runner.cache.nbytes
    assert cache_bytes == llm.engine.blocks.num_blocks * 2 * 2 * 16 * 2 * 16 * 4
    llm.sleep()
    assert held() == with_cache - cache_bytes
    llm.wake()
    assert drawn(llm.generate(prompt, params)) == drawn(before)


def test_an_interrupted_call_leaves_the_engine_usable(model):
    llm, params = LLM(model), SamplingParams(max_tokens=8, ignore_eos=True)

    def interrupt(finished, total, tokens):
        if tokens > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], params, interrupt)
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
    assert drawn(llm.generate([[1, 2, 3]], params)) == drawn(generate(model, [[1, 2, 3]], params))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "tie_word_embeddings": False, "num_key_value_heads": 4},
        {"model_type": "llama", "head_dim": 12, "num_key_value_heads": 1, "vocab_size": 131},
    ],
)
def test_other_models(changes, prompts):
    model = make_model(**changes)
    outputs = generate(model, prompts, SamplingParams(temperature=0.8, max_tokens=20, n=2), max_num_batched_tokens=50)
    assert [c.logprobs for o in outputs for c in o.completions] == scored(model, outputs, 0.8)


def test_stories15M_writes_a_story_and_agrees_with_its_scorer(samples):
    folder = samples / "models" / "stories15M"
    model, tokenizer = load_model(folder), Tokenizer.from_folder(folder)
    prompts = [tokenizer.encode(text) for text in ("Once upon a time", "The dog", "Lily and Tom")]
    params = SamplingParams(temperature=0.8, max_tokens=40, n=2, seed=1)
    outputs = generate(model, prompts, params, tokenizer)
    assert [c.logprobs for o in outputs for c in o.completions] == scored(model, outputs, 0.8)
    assert drawn(generate(model, prompts, params, max_num_batched_tokens=5)) == drawn(outputs)
    (greedy,) = generate(model, prompts[:1], SamplingParams(temperature=0, max_tokens=20), tokenizer)
    assert "there was a little girl" in greedy.completions[0].text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_change_nothing(dtype, prompts):
    model = make_model(dtype, head_dim=64)
    params = SamplingParams(temperature=0.8, max_tokens=60, n=3, seed=2)
    eager = LLM(model, None, EngineConfig(enforce_eager=True, num_gpu_blocks_override=400))
    graphs = LLM(model, None, EngineConfig(num_gpu_blocks_override=400))
    expected = drawn(eager.generate(prompts, params))
    assert drawn(graphs.generate(prompts, params)) == expected
    assert graphs.engine.runner.graphs and not eager.engine.runner.graphs
    assert drawn(graphs.generate(prompts, params)) == expected
    graphs.sleep()
    graphs.wake()
    assert drawn(graphs.generate(prompts, params)) == expected


@pytest.fixture
def cublas():
    gemm.set_backend("cublas")
    yield
    gemm.set_backend("auto")


@pytest.mark.gpu
def test_cublas_is_captured(cublas, prompts):
    model, params = make_model("bfloat16", head_dim=64), SamplingParams(temperature=0, max_tokens=20)
    eager = generate(model, prompts, params, enforce_eager=True, num_gpu_blocks_override=400)
    graphs = generate(model, prompts, params, num_gpu_blocks_override=400)
    for a, b in zip(eager, graphs, strict=True):
        # 16-bit rounding may part the texts somewhere; the first token comes from the same step.
        assert a.completions[0].token_ids[0] == b.completions[0].token_ids[0]
        assert abs(a.completions[0].logprobs[0] - b.completions[0].logprobs[0]) < 0.05


@pytest.mark.sim
def test_kernels_agree_in_rollout_and_training():
    """The kernels themselves, on a model small enough for the simulator; chunked, cached and decoded."""
    model = make_model(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    params = SamplingParams(temperature=0.8, max_tokens=2, n=2, ignore_eos=True)
    outputs = generate(model, [list(range(18))], params, max_num_batched_tokens=12, num_gpu_blocks_override=8)
    assert [c.logprobs for o in outputs for c in o.completions] == scored(model, outputs, 0.8)


@pytest.mark.sim
def test_prefix_groups_change_nothing_in_the_simulator(monkeypatch):
    """Completions of a prompt share its blocks; attention of the sm90 family reads them once, to the same bits."""
    if device.name() != "sim":
        pytest.skip("test_prefix_groups_change_nothing_on_the_gpu has these")
    shorten_segments(monkeypatch)
    model = make_model(
        "bfloat16",
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    largest = []
    for name in ("paged_attention", "paged_attention_qkv"):
        call = getattr(attention, name)

        def noted(*arguments, call=call):
            largest.append((call.__name__, arguments[-3].max_group_size))
            call(*arguments)

        monkeypatch.setattr(attention, name, noted)
    prompt, params = [i % 20 for i in range(65)], SamplingParams(temperature=0.8, max_tokens=3, n=2, ignore_eos=True)
    with dispatch.forced("attention=sm90"):
        llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=20))
        outputs = llm.generate([prompt], params)
        assert largest == [("paged_attention", 1), ("paged_attention_qkv", 4), ("paged_attention_qkv", 4)]
        # The prompt is in the cache, and with one row left no two run at once.
        del llm.engine.scheduler.free_rows[1:]
        assert drawn(llm.generate([prompt], params)) == drawn(outputs)
    assert {size for _, size in largest[3:]} == {1}


@pytest.mark.gpu
def test_prefix_groups_change_nothing_on_the_gpu():
    """Prefix groups in graphs, eagerly, and none: the same text, of prompts up to two whole segments."""
    if dispatch.architecture() != (9, 0):
        pytest.skip("only the sm90 kernels use prefix groups")
    model = make_model("bfloat16", head_dim=64, max_position_embeddings=4096)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 97, length).tolist() for length in (2100, 1500, 1025, 300)]
    params = SamplingParams(temperature=0.8, max_tokens=40, n=5, seed=2)
    with dispatch.forced("sm90"):
        expected = generate(model, prompts, params, num_gpu_blocks_override=4000, enable_prefix_caching=False)
        graphs = LLM(model, None, EngineConfig(num_gpu_blocks_override=4000))
        assert drawn(graphs.generate(prompts, params)) == drawn(expected)
        assert max(key.shape.max_group_size for key in graphs.engine.runner.graphs) == 8
        eager = generate(model, prompts, params, num_gpu_blocks_override=4000, enforce_eager=True)
        assert drawn(eager) == drawn(expected)
        assert [c.logprobs for o in expected for c in o.completions] == scored(model, expected, 0.8)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm90", "sm80"])
def test_attention_allocates_nothing_once_the_cache_is_there(family):
    if not dispatch.RUNS_ON[family][0] <= dispatch.architecture() <= dispatch.RUNS_ON[family][1]:
        pytest.skip(f"this GPU does not run {family} kernels")
    model = make_model("bfloat16", head_dim=64, max_position_embeddings=4096)
    with dispatch.forced(f"attention={family}"):
        llm = LLM(model, None, EngineConfig(gpu_memory_utilization=0.05, max_num_seqs=40))
        llm.wake()
        runner, tokens = llm.engine.runner, llm.engine.blocks.num_blocks * 16
        reserved = runner.reserve_workspace(tokens)
        assert reserved > 0
        gc.collect()  # engines of other tests are counted until they are freed
        before = memory.report()["attention"]
        llm.generate([[i % 97 for i in range(3000)]], SamplingParams(max_tokens=30, n=40))
        assert runner.reserve_workspace(tokens) == reserved and memory.report()["attention"] == before


def test_the_cache_gets_what_attention_leaves(model, monkeypatch):
    """Attention's workspace follows from the longest sequence that fits, and is taken from the cache's share."""
    total, own = 1 << 30, 100 << 20
    asked = []
    llm = LLM(model, None, EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=1000, max_num_batched_tokens=1000))
    monkeypatch.setattr(llm.engine.runner, "reserve_activations", lambda: None)
    monkeypatch.setattr(llm.engine.runner, "reserve_workspace", lambda tokens: asked.append(tokens) or own)
    monkeypatch.setattr(device, "memory_info", lambda: (total, total))
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(device, "xp", lambda: SimpleNamespace(get_default_memory_pool=lambda: pool))
    room = total // 2 - model.weights.flat.nbytes
    block = llm.engine.runner.block_bytes
    llm.engine.cache_size.max_model_len = 1 << 20
    assert llm.engine.cache_size.of_gpu() == (room - own) // block
    assert asked == [room // block * 16]
    # Of what is free, 512 MiB stay, and what graphs of training are going to take, if that leaves the longest sequence.
    sized = cache_size.CacheSize(model, llm.engine.runner, EngineConfig(gpu_memory_utilization=1.0), 1000, 1 << 20)
    free, longest = (800 << 20) - own, 1 << 16
    monkeypatch.setattr(device, "memory_info", lambda: (free, total))
    for expected, of_sequence, left in ((0, longest, 0), (100 << 20, 16, 100 << 20), (100 << 20, longest, 0)):
        sized.max_model_len = of_sequence * 16
        memory.expect("graphs", expected)
        try:
            assert sized._beside(0) == min(free - (512 << 20) - left, longest * block) // block
        finally:
            memory.expect("graphs", 0)


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_cache_takes_its_share_of_the_gpu_and_sleep_mode_gives_it_back():
    model = make_model("bfloat16", head_dim=64, max_position_embeddings=40960)
    free, total = device.memory_info()
    engine = EngineConfig(gpu_memory_utilization=0.05, max_num_seqs=256, enable_sleep_mode=True)
    llm = LLM(model, None, engine)
    llm.wake()
    taken = llm.engine.blocks.num_blocks * llm.engine.runner.block_bytes
    assert 0.04 * total < taken <= 0.05 * total
    # Other processes may allocate and free on the same GPU meanwhile.
    assert free - device.memory_info()[0] >= taken - 0.01 * total
    llm.sleep()
    assert free - device.memory_info()[0] < 0.02 * total


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_an_allocation_that_does_not_fit_takes_a_lent_cache(prompts):
    """And graphs, which contain the cache's addresses, give the same text after it is mapped again."""
    model, params = make_model("bfloat16", head_dim=64), SamplingParams(temperature=0.8, max_tokens=60, n=3, seed=2)
    llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=1 << 18))
    expected, cache = drawn(llm.generate(prompts, params)), llm.engine.runner.cache
    assert cache.nbytes > 1 << 30
    llm.sleep()
    device.xp().empty(1 << 20, np.uint8)
    assert cache.arrays is not None
    for _ in range(2):
        device.xp().get_default_memory_pool().free_all_blocks()
        large = device.xp().empty(device.memory_info()[0] + cache.nbytes // 2, np.uint8)
        assert cache.arrays is None and 0 < cache.memory.mapped_bytes < cache.nbytes
        large.fill(1)
        device.synchronize()
        del large
        llm.wake()
        assert cache.arrays is not None and drawn(llm.generate(prompts, params)) == expected
        llm.sleep()


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_a_lent_cache_leaves_memory_to_the_driver(prompts):
    model = make_model("bfloat16", head_dim=64)
    llm = LLM(model, None, EngineConfig(num_gpu_blocks_override=1 << 18))
    llm.generate(prompts, SamplingParams(max_tokens=4))
    llm.sleep()
    device.xp().get_default_memory_pool().free_all_blocks()
    large = device.xp().empty(device.memory_info()[0] - memory.MARGIN_BYTES // 2, np.uint8)
    assert llm.engine.runner.cache.arrays is None
    assert device.memory_info()[0] > memory.MARGIN_BYTES
    del large


@pytest.mark.gpu
@pytest.mark.fills_gpu
def test_a_second_engine_gets_memory_that_the_first_has_lent(prompts):
    """Where there is not enough for both caches."""
    model, params = make_model("bfloat16", head_dim=64), SamplingParams(max_tokens=4)
    block_bytes = LLM(model).engine.runner.block_bytes
    config = EngineConfig(num_gpu_blocks_override=int(0.6 * device.memory_info()[0]) // block_bytes)
    first, second = LLM(model, None, config), LLM(model, None, config)
    expected = drawn(first.generate(prompts, params))
    for _ in range(2):
        first.sleep()
        assert drawn(second.generate(prompts, params)) == expected
        second.sleep()
        assert drawn(first.generate(prompts, params)) == expected


@pytest.mark.gpu
def test_steps_with_a_lent_cache_allocate_nothing(prompts):
    """Neither from the driver nor, between generations, by mapping the cache again."""
    llm, params = LLM(make_model("bfloat16", head_dim=64)), SamplingParams(max_tokens=20, ignore_eos=True)
    pool = device.xp().get_default_memory_pool()
    found = []
    for _ in range(6):
        llm.wake()
        llm.generate(prompts, params)
        llm.sleep()
        found.append((pool.total_bytes(), llm.engine.runner.cache.arrays[0].data.ptr, device.memory_info()[0]))
    assert len({pool_bytes for pool_bytes, _, _ in found[2:]}) == 1
    assert len({address for _, address, _ in found}) == 1


FOLDER = Path(__file__).parent.parent / "golden" / "tiny-qwen3"


def test_forms_of_vllm_and_nano_vllm():
    """What their READMEs show: a text alone, dicts, one SamplingParams or one each, the attributes of an output."""
    defaults = {"tensor_parallel_size": 1, "dtype": "auto", "seed": 0, "kv_cache_dtype": "auto"}
    llm = LLM(model=str(FOLDER), tokenizer=str(FOLDER), enforce_eager=True, **defaults)
    assert llm.engine.config == EngineConfig(enforce_eager=True)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, seed=3)
    text = "what is 3+4? "
    (alone,) = llm.generate(text, params)
    ids = alone.prompt_token_ids
    assert alone.prompt == text and ids == llm.tokenizer.encode(text)
    completion = alone.outputs[0]
    assert completion.cumulative_logprob == pytest.approx(sum(completion.logprobs))
    assert alone["text"] == completion.text and alone["token_ids"] == completion.token_ids
    forms = [
        [text],
        {"prompt": text},
        [{"prompt": text}],
        ids,
        [ids],
        np.array(ids),
        {"prompt_token_ids": ids},
        (text,),
    ]
    for form in (*forms, [{"prompt": text, "prompt_token_ids": ids}], (each for each in [text])):
        (output,) = llm.generate(form, sampling_params=params, use_tqdm=False)
        assert output.completions == alone.completions and output.prompt in (text, None)
    two = llm.generate([text, {"prompt": "a"}], [params, dataclasses.replace(params, max_tokens=2)])
    assert two[0].outputs == alone.outputs and two[1].outputs[0].num_tokens <= 2
    assert drawn(llm.generate([ids, ids], [None, params])) == drawn(
        llm.generate([ids, ids], [SamplingParams(), params])
    )
    assert llm.generate([]) == []


def test_wrong_forms_are_named():
    llm = LLM(FOLDER)
    for call, message in (
        (
            lambda: llm.generate({"text": "a"}),
            "prompt 0 must be a text, token ids, .* got a dict of text; messages are",
        ),
        (lambda: llm.generate(["a", {}]), "prompt 1 must be a text, .* got a dict of nothing"),
        (lambda: llm.generate({"prompt": "a", "multi_modal_data": {}}), "got a dict of prompt, multi_modal_data"),
        (lambda: llm.generate("a", {"temperature": 0}), "params must be SamplingParams, or a list of them, got dict"),
        (lambda: llm.generate("a", SamplingParams(), sampling_params=SamplingParams()), "both are given"),
        (
            lambda: llm.generate("a", lora_request=1),
            "an adapter is a name or a LoRARequest, or a list of them, got int",
        ),
        (lambda: llm.generate("a", use_tqmd=False), "generate has no use_tqmd; did you mean use_tqdm?"),
        (lambda: llm.generate("a", SamplingParams())[0]["logprobs"], r"an output has \['text'\] and \['token_ids'\]"),
        (lambda: LLM(FOLDER, tensor_parallel_size=2), "LLM takes no tensor_parallel_size: .*rlnumba generate --tp"),
        (lambda: LLM(FOLDER, seed=1), "LLM takes no seed: it is of a SamplingParams"),
        (lambda: LLM(FOLDER, kv_cache_dtype="fp8"), "LLM takes no kv_cache_dtype: the KV cache has the model's dtype"),
        (lambda: LLM(FOLDER, max_model_length=8), "LLM has no max_model_length; did you mean max_model_len?"),
        (lambda: LLM(FOLDER, config=EngineConfig(), max_model_len=8), "config and max_model_len are both given"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert not llm.engine.has_unfinished
    with pytest.raises(ConfigError, match="^LLM: dtype 'float16' is for a folder, .* weights of float32$"):
        LLM(make_model(), dtype="float16")
    assert LLM(make_model(), dtype="float32").model.dtype == np.float32


def test_chat(tmp_path):
    for path in FOLDER.iterdir():
        (tmp_path / path.name).symlink_to(path)
    tokenizer = json.loads((FOLDER / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if not plain %}= {% endif %}"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": template}))
    llm, params = LLM(tmp_path), SamplingParams(max_tokens=3, temperature=0)
    messages = [{"role": "user", "content": "what is 3+4? "}]
    (one,) = llm.chat(messages, params)
    assert one.completions == llm.generate("what is 3+4? = ", params)[0].completions
    assert [each.completions for each in llm.chat([messages] * 2, sampling_params=params)] == [one.completions] * 2
    (plain,) = llm.chat(messages, params, chat_template_kwargs={"plain": True})
    assert plain.prompt_token_ids == llm.tokenizer.encode("what is 3+4? ")
    with pytest.raises(UserError, match="chat: messages 1"):
        llm.chat([messages, [{"content": "a"}]], params)
    with pytest.raises(ConfigError, match="chat: messages need a tokenizer"):
        LLM(make_model()).chat(messages)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 2}, {"prompt_logprobs": 3}], ids=["nothing", "tokens", "prompt"])
def test_a_prompt_without_numbers_leaves_the_others_theirs(asked):
    """Where its caller asks for them: also those that were begun, or have some completions, when it failed."""
    prompts = [[5, 6], [5, 7], [6, 5, 9], [8], [7, 7]]
    params = [SamplingParams(n=2, max_tokens=length, seed=3, **asked) for length in (2, 9, 9, 30, 5)]
    whole = make_model(tie_word_embeddings=False)
    config = EngineConfig(max_num_seqs=6)
    expected = LLM(whole, config=config).generate(prompts, params)
    damaged = make_model(tie_word_embeddings=False)
    damaged.weights.embed_tokens[7] = np.nan
    llm, failed, finished = LLM(damaged, config=config), {}, []
    found = llm.generate(
        prompts, params, finished=lambda index, output: finished.append(index), failed=failed.__setitem__
    )
    drawn_by_others = {index for index in (0, 2, 3) if any(7 in each.token_ids for each in expected[index].outputs)}
    assert set(failed) == {1, 4} | drawn_by_others and sorted(finished) == sorted({0, 2, 3} - drawn_by_others)
    assert finished and all("not finite" in str(error) for error in failed.values())
    for index in finished:
        assert found[index] == expected[index]
    with pytest.raises(PromptError, match="prompt 1: the model's log-probs are not finite"):
        llm.generate(prompts, params)
    assert llm.generate([prompts[finished[0]]], params[finished[0]])[0].outputs == expected[finished[0]].outputs


def test_tools_of_one_chat_are_not_in_the_next(monkeypatch):
    seen, template = [], {"enable_thinking": False}
    monkeypatch.setattr("rlnumba.engine.llm.encode_prompt", lambda tokenizer, chat, **variables: seen.append(variables))
    for tools in (["schema"], None):
        chat_prompts("tokenizer", [[{"role": "user", "content": "hi"}]], tools, template)
    assert seen == [{"enable_thinking": False, "tools": ["schema"]}, {"enable_thinking": False}]
