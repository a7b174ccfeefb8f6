"""What a request asks of its tokens, against NumPy on the logits of the whole model; other requests change nothing."""

import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import EngineConfig, GRPOConfig
from rlnumba.engine import LLM, SamplingParams, sampler
from rlnumba.engine.requests.logprobs import Listed, Logprob, entries, record_listed
from rlnumba.engine.requests.token_rules import bad_word_ids, token_rules
from rlnumba.engine.sequence import Sequence, SequenceTable
from rlnumba.errors import ConfigError
from rlnumba.kernels.sampling.ops import kept_ref
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import pack, score
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.engine.test_llm import (
    EOS,
    TwoCharacterTokens,
    drawing_eos,
    drawn,
    generate,
    log_softmax,
    logits_after,
    make_model,
)

GOLDEN = Path(__file__).parent.parent / "golden"
# Schedules: run ahead; a step at a time; preemption; drafts.
SCHEDULES = [
    {"async_scheduling": False},
    {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    {"num_gpu_blocks_override": 5},
    {"speculative_method": "ngram"},
]


class Words(TwoCharacterTokens):
    """Two characters a token; encodes its own texts."""

    def encode(self, text, add_special_tokens=True):
        text = text.strip()
        return [10 * (ord(text[i]) - 97) + int(text[i + 1]) for i in range(0, len(text), 2)]


@pytest.fixture(scope="module")
def model():
    return make_model()


RULES = {
    "bias": {"logit_bias": {3: 9.5, 7: -100, 40: 2}},
    "allowed": {"allowed_token_ids": [4, 9, 33, 64, 65, 96]},
    "words": {"bad_words": ["e4a6", "h7", "e4i9"]},
    "all": {
        "logit_bias": {"3": 4.0, 9: 6.0, 33: 5.0},
        "allowed_token_ids": [3, 9, 33, 64],
        "bad_words": ["a9d3", "g4"],
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "min_tokens": 3,
    },
}


def ruled(z, params, prompt, completion, words):
    """The logits (V,) float64 that a token after `completion` is drawn from, before temperature."""
    for token, bias in params.logit_bias:
        z[token] += bias
    seen = np.unique(prompt + completion)
    z[seen] = np.where(z[seen] > 0, z[seen] / params.repetition_penalty, z[seen] * params.repetition_penalty)
    z -= params.frequency_penalty * np.bincount(completion, minlength=len(z)) if completion else 0
    if params.allowed_token_ids:
        z[np.setdiff1d(np.arange(len(z)), params.allowed_token_ids)] = -np.inf
    for *before, last in words:
        if completion[len(completion) - len(before) :] == before:
            z[last] = -np.inf
    if len(completion) < params.min_tokens:
        z[EOS] = -np.inf
    return z


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_rules_are_those_of_numpy(model, rules, temperature):
    """Tokens and log-probs; beside them a request without rules has the bits that it has alone."""
    prompt = [3, 4, 9, 33, 3]
    params = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True, **RULES[rules])
    free = dataclasses.replace(params, logit_bias={}, allowed_token_ids=None, bad_words=())
    tokenizer = Words()
    words = bad_word_ids(params.bad_words, tokenizer)
    outputs = generate(model, [prompt] * 2, [params, free], tokenizer)
    (found,), (other,) = drawn(outputs)
    assert [other] == drawn(generate(model, [prompt], free))[0] and other[0] != found[0]
    for i, (token, logprob) in enumerate(zip(found[0], found[1], strict=True)):
        z = ruled(logits_after(model, prompt + found[0][:i]), params, prompt, found[0][:i], words)
        assert z[token] > -np.inf and (temperature or token == z.argmax())
        assert abs(logprob - log_softmax(z / (temperature or 1))[token]) < 1e-4
    for config in SCHEDULES:
        assert drawn(generate(model, [prompt] * 2, [params, free], tokenizer, **config)) == drawn(outputs)


def test_the_last_token_of_a_bad_word_is_drawn_where_it_completes_none(model):
    prompt, params = [1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokenizer = Words()
    ((free,),) = drawn(generate(model, [prompt], params, tokenizer))
    pairs = list(zip(free[0], free[0][1:], strict=False))
    at = next(i for i in range(2, 11) if pairs.index(pairs[i]) == i)
    a, b = pairs[at]
    word = tokenizer.decode([a, b])
    ((found,),) = drawn(generate(model, [prompt], dataclasses.replace(params, bad_words=[word]), tokenizer))
    assert found[0][: at + 1] == free[0][: at + 1] and found[0][at + 1] != b
    assert (a, b) not in zip(found[0], found[0][1:], strict=False)
    # In the prompt it counts for nothing.
    beginning = dataclasses.replace(params, bad_words=[tokenizer.decode([3, free[0][0]])])
    assert drawn(generate(model, [prompt], beginning, tokenizer)) == [[free]]


def test_bad_words_are_encoded_as_vllm_does():
    tokenizer = Tokenizer.from_folder(GOLDEN / "tiny-qwen3")
    alone, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("is", " is"))
    found = bad_word_ids(["is", " is"], tokenizer)
    each = [alone, spaced] if spaced[0] != alone[0] and len(spaced) == len(alone) else [alone]
    assert found == each * 2
    rules = token_rules(SamplingParams(bad_words=["what is", "a"]), tokenizer, 10**6)
    assert (rules.bad_words[:, -1] >= 0).all() and rules.bad_words.shape[1] > 1
    assert rules.allowed.size == rules.bias.size == 0


def test_bad_words_begin_no_text():
    class BeginsTexts:
        """Every text begins with token 1, as for Llama."""

        def encode(self, text, add_special_tokens=True):
            return [1] * add_special_tokens + {"is": [5], " is": [6]}[text]

    assert bad_word_ids(["is", " is"], BeginsTexts()) == [[5], [6]] * 2


@pytest.mark.parametrize(
    "values, line",
    [
        ({"logit_bias": {97: 1.0}}, "logit_bias 97 is outside of the model's vocabulary of 97"),
        ({"allowed_token_ids": [1, 98]}, "allowed_token_ids 98 is outside of the model's vocabulary of 97"),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer, and the model folder has none"),
    ],
)
def test_rules_that_no_token_has_are_named(model, values, line):
    with pytest.raises(ConfigError, match=f"^sampling: {line}$"):
        generate(model, [[1]], SamplingParams(**values))


@pytest.mark.parametrize(
    "values, line",
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens 1 forbid all of allowed_token_ids"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2}, "min_tokens 2 forbid all of allowed"),
        ({"allowed_token_ids": [46, 7], "bad_words": ["e6", "a7"]}, "bad_words forbid all of allowed_token_ids"),
        (
            {"allowed_token_ids": [46, EOS], "bad_words": ["e6"], "min_tokens": 1},
            "bad_words and min_tokens 1 forbid all of allowed_token_ids, so that no token can be drawn",
        ),
        ({"stop_token_ids": list(range(97)), "min_tokens": 1}, "min_tokens 1 forbid all tokens"),
    ],
)
def test_rules_that_leave_no_token_are_named(model, values, line):
    with pytest.raises(ConfigError, match=f"^sampling: {line}"):
        generate(model, [[1]], SamplingParams(**values), Words())


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [EOS], "min_tokens": 2, "ignore_eos": True},
        {"allowed_token_ids": [46, EOS], "min_tokens": 2, "max_tokens": 2},
        {"allowed_token_ids": [46], "bad_words": ["e6a1"]},
        {"allowed_token_ids": [46], "bad_words": ["a0e6"]},
        {"stop_token_ids": list(range(96)), "min_tokens": 1, "max_tokens": 1, "ignore_eos": True},
    ],
)
def test_rules_that_leave_one_token_draw_it(model, values):
    (completion,) = generate(model, [[1]], SamplingParams(**{"max_tokens": 3} | values), Words())[0].completions
    assert {*completion.token_ids} <= {*values.get("allowed_token_ids", [96])}
    assert np.isfinite(completion.logprobs).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rule_that_leaves_none_later_is_named(model, temperature):
    """Others go on, and none is said to have a model without numbers."""
    dead = SamplingParams(allowed_token_ids=[46], bad_words=["e6e6"], max_tokens=4, temperature=temperature)
    alive, failed = dataclasses.replace(dead, bad_words=()), {}
    llm = LLM(model, Words())
    outputs = llm.generate([[1], [1], [2]], [alive, dead, dead], failed=failed.__setitem__)
    assert outputs[0].completions[0].token_ids == [46] * 4 and {*failed} == {1, 2}
    for error in failed.values():
        assert error.reason.startswith("allowed_token_ids and bad_words leave no token to draw")


@pytest.mark.parametrize(
    "values, line",
    [
        ({"logit_bias": {1: 101}}, r"logit_bias must be a table of token ids and numbers in \[-100, 100\], got .*101"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be a table"),
        ({"logit_bias": {1: True}}, "logit_bias must be a table"),
        ({"logit_bias": [1]}, "logit_bias must be a table"),
        ({"allowed_token_ids": []}, r"allowed_token_ids must be a list of token ids, not empty, got \[\]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be a list"),
        ({"bad_words": "a"}, "bad_words must be a list"),
        ({"bad_words": [" "]}, "bad_words must be texts that are not empty"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be true or false, got 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer >= 1, or -1, got 0"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\^64\)"),
        ({"logit_bias": {1: 1}, "logit_thresholds": True}, "logit_thresholds are of logits without logit_bias"),
        ({"bad_words": ["a"], "logit_thresholds": True}, "logit_thresholds are of logits without bad_words"),
    ],
)
def test_values_that_are_wrong_are_named(values, line):
    with pytest.raises(ConfigError, match=f"^sampling: {line}"):
        SamplingParams(**values)


def test_a_trainer_takes_no_rules():
    with pytest.raises(ConfigError, match="generation_kwargs has no key logit_bias: .* rollout and training would"):
        GRPOConfig(generation_kwargs={"logit_bias": {"1": 1}})


def test_params_can_be_hashed_copied_and_sent():
    params = SamplingParams(logit_bias={"5": 1, 6: 2.0}, allowed_token_ids=[5, 6], bad_words=["x"], seed=None)
    assert params.logit_bias == ((5, 1), (6, 2.0))
    assert dataclasses.replace(params) == pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(dataclasses.replace(params))


def test_without_a_seed_each_request_has_its_own(model):
    params = SamplingParams(seed=None, max_tokens=12, ignore_eos=True)
    llm = LLM(model)
    found = [completion[0][0] for completion in drawn(llm.generate([[1, 2, 3]] * 4, params))]
    assert len({tuple(ids) for ids in found}) == 4
    assert drawn(llm.generate([[1, 2, 3]], params))[0][0][0] not in found


def test_a_prompt_loses_its_beginning(model):
    params = SamplingParams(max_tokens=4)
    whole = list(range(1, 90))
    for kept, length in ((5, 5), (500, 89), (-1, 96)):
        cut = dataclasses.replace(params, truncate_prompt_tokens=kept)
        prompt = whole if kept > 0 else whole * 2
        (output,) = generate(model, [prompt], cut, max_model_len=100)
        assert output.prompt_token_ids == prompt[-length:]
        assert drawn([output]) == drawn(generate(model, [prompt[-length:]], params))
    # Where max_tokens leaves no room at all, the last token is kept.
    greedy = SamplingParams(max_tokens=100, truncate_prompt_tokens=-1)
    (output,) = generate(model, [whole], greedy, max_model_len=100)
    assert output.prompt_token_ids == whole[-1:] and len(output.outputs[0].token_ids) <= 99


def test_special_tokens_and_stops_in_the_text(model):
    """EOS, a stop id and a stop string, skipped, kept, or included."""
    prompt, tokenizer = [[1, 2, 3]], TwoCharacterTokens()
    params, _ = drawing_eos(model, prompt)
    (free,) = generate(model, prompt, params, tokenizer)
    ids = free.outputs[0].token_ids
    end = ids.index(EOS)
    assert end > 2
    texts = tokenizer.decode(ids[:end], False), tokenizer.decode(ids[: end + 1], False)
    shown = dataclasses.replace(params, skip_special_tokens=False)
    assert generate(model, prompt, shown, tokenizer)[0].outputs[0].text == tokenizer.decode(ids, False)
    stops = dataclasses.replace(params, ignore_eos=False, skip_special_tokens=False)
    included = dataclasses.replace(stops, include_stop_str_in_output=True)
    found = [generate(model, prompt, each, tokenizer)[0].outputs[0] for each in (stops, included)]
    assert [each.text for each in found] == [*texts] and [each.token_ids for each in found] == [ids[: end + 1]] * 2
    hidden = dataclasses.replace(included, skip_special_tokens=True)
    assert generate(model, prompt, hidden, tokenizer)[0].outputs[0].text == texts[0]
    # A string: its tokens are kept, its text if it is asked for.
    text = free.outputs[0].text
    stop = text[3:5]
    for is_included in (False, True):
        asked = dataclasses.replace(params, stop=stop, include_stop_str_in_output=is_included)
        cut = text[: text.index(stop) + is_included * len(stop)]
        assert generate(model, prompt, asked, tokenizer)[0].outputs[0].text == cut
    # Where special tokens have a text, a stop string may hold one.
    special = dataclasses.replace(shown, stop=tokenizer.decode([ids[end - 1], EOS], False))
    found = generate(model, prompt, special, tokenizer)[0].outputs[0]
    assert found.finish_reason == "stop" and found.token_ids == ids[: end + 1] and found.text == texts[0][:-2]


def test_greedy_decoding_with_rules_runs_ahead(model):
    """Requests with rules decode as others do, several steps launched before the first one's results are read."""
    llm = LLM(model, Words(), EngineConfig())
    repeats, repeat = [], llm.engine.runner.repeat
    llm.engine.runner.repeat = lambda *edits: (repeats.append(1), repeat(*edits))[1]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True, **RULES["all"]))
    assert len(repeats) >= 18


def listed(outputs):
    return [completion.logprobs for output in outputs for completion in output.outputs]


TOP = {
    "plain": {},
    "filtered": {"top_p": 0.8, "temperature": 0.7, "top_k": 30},
    "greedy": {"temperature": 0},
    "ruled": {"logit_bias": {3: 4.0}, "bad_words": ["e4a6"], "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("options", TOP)
def test_listed_logprobs_are_those_of_numpy(model, options):
    """In processed and in raw mode; the drawn token has the bits that it has unlisted, whatever else runs."""
    prompt, tokenizer = [3, 4, 9, 33, 3], Words()
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=4, **TOP[options])
    plain = dataclasses.replace(params, logprobs=True)
    words, temperature = bad_word_ids(params.bad_words, tokenizer), params.temperature or 1
    (alone,) = drawn(generate(model, [prompt], plain, tokenizer))
    for mode in ("processed_logprobs", "raw"):
        outputs = generate(model, [prompt] * 2, [params, plain], tokenizer, logprobs_mode=mode)
        (found,), (beside,) = (output.outputs for output in outputs)
        assert [(beside.token_ids, beside.logprobs, "length")] == alone and found.token_ids == beside.token_ids
        assert_same_bits(found.array("logprobs"), beside.array("logprobs"))
        assert found.cumulative_logprob == beside.cumulative_logprob
        for i, (token, entry) in enumerate(zip(found.token_ids, found.logprobs, strict=True)):
            z = logits_after(model, prompt + found.token_ids[:i])
            if mode == "processed_logprobs":
                z = ruled(z, params, prompt, found.token_ids[:i], words)
            order = np.argsort(-z, kind="stable")
            if mode == "processed_logprobs":
                z = z / temperature
                if params.top_p < 1:
                    z = np.where(kept_ref(z, 1, params.top_k, params.top_p, 0), z, -np.inf)
                assert np.float32(entry[token].logprob) == beside.array("logprobs")[i]
            assert list(entry) == list(dict.fromkeys([token, *order[:4].tolist()]))
            expected = log_softmax(z)
            for each, (logprob, rank, text) in entry.items():
                assert rank == 1 + order.tolist().index(each) and text == tokenizer.decode([each], False)
                assert logprob == expected[each] or abs(logprob - expected[each]) < 1e-4
        for config in SCHEDULES:
            again = generate(model, [prompt] * 2, [params, plain], tokenizer, logprobs_mode=mode, **config)
            assert listed(again) == listed(outputs)


def test_forms_of_logprobs(model):
    """None, booleans and numbers, as vLLM has them; all survive pickling."""
    forms = [None, False, True, 0, 2, -1]
    params = [SamplingParams(max_tokens=5, logprobs=form) for form in forms]
    outputs = generate(model, [[1, 2, 3]] * len(forms), params, max_logprobs=-1)
    none, false, true, *dicts = (output.outputs[0] for output in outputs)
    assert none.logprobs is None and none.cumulative_logprob is None and false.logprobs == []
    assert [len(entry) for entry in dicts[2].logprobs] == [97] * len(true.token_ids)
    for each, most in zip(dicts, (1, 3, 97), strict=True):
        assert {len(entry) for entry in each.logprobs} <= {most, most - 1}
        tokens = [next(iter(entry.items())) for entry in each.logprobs]
        assert [(token, entry.logprob) for token, entry in tokens] == list(
            zip(true.token_ids, true.logprobs, strict=True)
        )
        assert tokens[0][1].decoded_token is None
    for output in outputs:
        assert pickle.loads(pickle.dumps(output)) == output and output.finished
    (output,) = generate(model, [[1, 2]], SamplingParams(max_tokens=1, logprobs=3, prompt_logprobs=3), max_logprobs=3)
    assert output.prompt_logprobs is not None
    for most, count in ((20, 21), (20, -1), (0, 1)):
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ConfigError, match=rf"^sampling: {name} {count} is more than max_logprobs \({most}\)$"):
                generate(model, [[1]], SamplingParams(**{name: count}), max_logprobs=most)
    for name, value, line in (
        ("logprobs", -2, "true, false, null, or an integer >= -1"),
        ("logprobs", 1.5, "true, false, null, or an integer >= -1"),
        ("prompt_logprobs", True, "null, or an integer >= -1"),
    ):
        with pytest.raises(ConfigError, match=f"^sampling: {name} must be {line}, got {value}$"):
            SamplingParams(**{name: value})


def test_prompt_logprobs_are_those_that_score_has(model, rng):
    """Bit for bit and in full, whatever is cached, in chunks and after preemption, with temperature and penalties."""
    prompts = [rng.integers(0, 97, length).tolist() for length in (1, 2, 40, 40)]
    prompts[3][:33] = prompts[2][:33]
    params = SamplingParams(
        temperature=0.5, repetition_penalty=1.5, max_tokens=20, n=2, ignore_eos=True, prompt_logprobs=2
    )
    unlisted = dataclasses.replace(params, prompt_logprobs=None)
    wanted = drawn(generate(model, prompts, unlisted))
    scores = [device.to_host(score(model, pack([prompt]), 1.0).logprobs) for prompt in prompts]
    orders = [
        [np.argsort(-logits_after(model, prompt[:i]), kind="stable").tolist() for i in range(1, len(prompt))]
        for prompt in prompts
    ]
    for config in ({}, *SCHEDULES, {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 8, "max_num_seqs": 6}):
        llm = LLM(model, None, EngineConfig(**config))
        for _ in range(2):
            outputs = llm.generate(prompts, params)
            assert drawn(outputs) == wanted
            for prompt, output, expected, of_prompt in zip(prompts, outputs, scores, orders, strict=True):
                first, *rest = output.prompt_logprobs
                assert first is None and len(rest) == len(prompt) - 1
                got = [entry[token].logprob for entry, token in zip(rest, prompt[1:], strict=True)]
                assert_same_bits(np.float32(got), expected[1:])
                for token, entry, order in zip(prompt[1:], rest, of_prompt, strict=True):
                    assert list(entry) == list(dict.fromkeys([token, *order[:2]]))
                    assert [each.rank for each in entry.values()] == [1 + order.index(each) for each in entry]
        # What is cached by now is used by others.
        assert drawn(llm.generate(prompts, unlisted)) == wanted
    assert generate(model, prompts, unlisted)[0].prompt_logprobs is None


def test_prompt_logprobs_do_not_depend_on_how_many_logits_there_are_at_a_time(model, rng, monkeypatch):
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    prompts = [rng.integers(0, 97, length).tolist() for length in (9, 5)]
    wanted = generate(model, prompts, params)
    monkeypatch.setattr(sampler, "LOGITS_BYTES", 4 * 97 * 3)
    for output, each in zip(generate(model, prompts, params), wanted, strict=True):
        assert output.prompt_logprobs == each.prompt_logprobs


def test_listings_that_are_computed_again_take_the_place_of_the_first_ones():
    """Those of a prompt of six tokens, cut into chunks of two, after preemption from its third token on."""
    params = SamplingParams(prompt_logprobs=1)
    sequence = Sequence(0, 0, np.arange(6, dtype=np.int32), params, (1, 2), 10)
    table = SequenceTable(1, 16)
    for starts in ((0, 2), (2, 4)):
        for start in starts:
            table.put(0, sequence)
            step = SimpleNamespace(rows=np.array([0]), starts=np.array([start]), counts=np.array([2]))
            # The first element of a listing is here the number of its token.
            listed = np.array([[position + 1, 0, 7, 0] for position in range(start, min(start + 2, 5))], np.int32)
            record_listed(Listed(scored=listed), step, table, ())
    assert [int(listing[0]) for listing in sequence.prompt_listings] == [1, 2, 3, 4, 5]


def test_a_vocabulary_that_has_fewer_tokens_than_are_asked_for_is_listed_once():
    """A drawn token that is among the likeliest, and no token in the third place."""
    bits = [np.float32(values).view(np.int32).tolist() for values in ([-1.5], [-0.5, -1.5, 0])]
    found = entries(np.array([2, *bits[0], 4, 2, -1, *bits[1]], np.int32), 2, str)
    assert found == {2: Logprob(-1.5, 2, "2"), 4: Logprob(-0.5, 1, "4")} and list(found) == [2, 4]
