"""Completions with a grammar: every text is the grammar's, whatever else runs; other requests are as they were."""

import dataclasses
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from rlnumba.config import EngineConfig, SFTConfig
from rlnumba.data import Prompt
from rlnumba.engine import LLM, SamplingParams, StructuredOutputsParams
from rlnumba.engine.core import Engine, GrammarError, PromptError
from rlnumba.engine.requests import grammars
from rlnumba.engine.requests.grammar_tokens import GrammarTokens, grammar_tokenizer
from rlnumba.engine.requests.grammars import ADVANCED_TOGETHER, GrammarReplay
from rlnumba.engine.requests.streams import Streams
from rlnumba.engine.runner import HIDDEN, TOKENS
from rlnumba.engine.speculation import Speculator
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.runs.policy import Policy
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample
from rlnumba.trainers.rollout import Rollouts
from tests.close import assert_same_bits
from tests.engine.test_llm import drawn, log_softmax, logits_after, make_model

llguidance = pytest.importorskip("llguidance")

GOLDEN = Path(__file__).parent.parent / "golden"
VOCABULARY, EOS = 500, [2, 6]
SCHEDULES = [
    {"async_scheduling": False},
    {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    {"num_gpu_blocks_override": 7},
    {"speculative_method": "ngram"},
    {"enable_prefix_caching": False},
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["a", "ü", "<|im_end|>"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": {"regex": r"[a-c]{2,5}-[0-9]{1,3}é?"},
    "choice": {"choice": ["yes", "no", 'say "maybé"', "<|begin|>"]},
    "json": {"json": PERSON},
    "lark": {"grammar": 'start: <|begin|> "<|begin|>" /[0-9]{3}/ <|eot_id|>'},
    "gbnf": {"grammar": 'root ::= "ab" [0-9] "c"'},
    "after": {"regex": "[xy]{2}", "after": "<|begin|>"},
    "after a text": {"regex": "[xy]{2}", "after": "e"},
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(GOLDEN / "tokenizer")


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=VOCABULARY, eos_token_id=EOS)


@pytest.fixture(scope="module")
def llm(model, tokenizer):
    return LLM(model, tokenizer)


def params_of(structured, **options):
    return SamplingParams(**{"structured_outputs": structured, "max_tokens": 60, "seed": 3} | options)


def allowed_ids(matcher):
    """The ids that a matcher of llguidance allows next: (V,) bool."""
    mask = np.zeros((1, -(-VOCABULARY // 32)), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[:VOCABULARY] != 0


@pytest.mark.parametrize("name", GRAMMARS)
def test_tokens_are_of_the_grammar_and_logprobs_of_its_set(llm, model, tokenizer, name):
    """Under all schedules; beside them a request without a grammar has the bits that it has alone."""
    prompts, params = [[5, 6, 7], [9] * 17, [5, 6, 7]], params_of(GRAMMARS[name], temperature=0.8, n=2)
    free = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    every = [params, params, free]
    outputs = llm.generate(prompts, every)
    assert drawn(outputs[2:]) == drawn(llm.generate(prompts[2:], free))
    state = llm.engine.grammars.state(params)
    for completion in [c for output in outputs[:2] for c in output.completions]:
        ids, prompt = completion.token_ids, outputs[0].prompt_token_ids
        matcher = state.matcher.deep_copy()
        for i, (token, logprob) in enumerate(zip(ids, completion.logprobs, strict=True)):
            allowed = allowed_ids(matcher)
            assert allowed[token]
            if completion is outputs[0].completions[0]:
                z = np.where(allowed, logits_after(model, prompt + ids[:i]), -np.inf)
                assert abs(logprob - log_softmax(z / 0.8)[token]) < 1e-4
            assert matcher.consume_token(token)
        if completion.finish_reason == "stop":
            assert ids[-1] in EOS and matcher.is_accepting()
    for config in SCHEDULES:
        assert drawn(LLM(model, tokenizer, EngineConfig(**config)).generate(prompts, every)) == drawn(outputs)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "temperature": 1.3, "logit_thresholds": True}], ids=str)
def test_training_scores_completions_as_they_were_drawn(llm, model, tokenizer, options):
    """Bit for bit, by the masks that follow from the tokens; without these none is equal."""
    params = params_of({"regex": "[a-c]{2,5}-[0-9]{1,9}(é|xyz)*", "after": "e"}, n=6, max_tokens=40, **options)
    outputs = llm.generate([[5, 6, 7], [9] * 17], params)
    pairs = [(Prompt("", each.prompt_token_ids, {}, ""), c) for each in outputs for c in each.completions]
    rollouts = Rollouts.of([Sample(prompt, c, np.zeros(1), 0.0, {}) for prompt, c in pairs], False)
    replay = GrammarReplay(params.structured_outputs, tokenizer, VOCABULARY, EOS)
    policy = Policy(model, SFTConfig(gradient_checkpointing=False), None, params.temperature)
    batch = rollouts.micro_batch(replay).to_device().targets
    logprobs, entropy = (device.xp().empty(len(rollouts.loss_mask), np.float32) for _ in range(2))
    policy.logprobs(batch, logprobs, entropy)
    assert_same_bits(logprobs, rollouts.rollout_logprobs)
    assert np.isfinite(device.to_host(entropy)).all()
    policy.logprobs(dataclasses.replace(batch, allowed=None), logprobs)
    assert (device.to_host(logprobs) != rollouts.rollout_logprobs).mean() > 0.9
    wrong = np.full_like(rollouts.token_ids, 8)
    with pytest.raises(UserError, match="^structured_outputs: Parser Error"):
        regex = GrammarReplay(StructuredOutputsParams(regex="ab"), tokenizer, VOCABULARY, EOS)
        dataclasses.replace(rollouts, token_ids=wrong).micro_batch(regex)


def test_masks_are_made_while_the_forward_pass_of_their_step_is_computed(model, tokenizer):
    """Beside them stays what allowed_token_ids say, when no sequence with a grammar is left, too."""
    llm = LLM(model, tokenizer)
    few = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, allowed_token_ids=[7, 8, 9], n=24)
    prompts, every = [[5, 6, 7], [9] * 17], [params_of({"regex": "[a-z]{3}"}), few]
    alone = [drawn(llm.generate([prompt], params)) for prompt, params in zip(prompts, every, strict=True)]
    engine, order = llm.engine, []
    launch, masks = engine.runner.launch, engine.grammars.masks
    engine.runner.launch = lambda *part: (order.extend(part), launch(*part))
    engine.grammars.masks = lambda *step: (order.append("masks"), masks(*step))[1]
    assert drawn(llm.generate(prompts, every)) == [each for found in alone for each in found]
    # The first step's are made with those of the prompts, before it.
    order = order[order.index(HIDDEN) :]
    assert order == [HIDDEN, TOKENS] + [HIDDEN, "masks", TOKENS] * (len(order) // 3) and len(order) > 60


def test_requests_are_dropped_while_a_step_awaits_masks(model, tokenizer):
    engine = Engine(model, tokenizer)
    params = params_of(GRAMMARS["json"])
    wanted = drawn(LLM(model, tokenizer).generate([[5, 6, 7]], params))[0][0]
    engine.add_request(0, [5, 6, 7], params)
    engine.add_request(1, [9] * 17, params)
    while not engine.run_ahead.awaits_masks:
        engine.step()
    engine.abort(1)
    engine.step()
    engine.synchronize()
    engine.add_request(2, [9] * 17, params)
    finished = {}
    while engine.has_unfinished:
        finished |= {each.request_id: each.completion for each in engine.step().finished}
    assert (finished[0].token_ids, finished[0].logprobs, finished[0].finish_reason) == wanted
    engine.add_request(3, [9] * 17, params)
    while not engine.run_ahead.awaits_masks:
        engine.step()
    engine.reset()
    assert not engine.run_ahead.awaits_masks and not engine.has_unfinished
    assert engine.blocks.num_free == engine.blocks.num_blocks


def texts(llm, structured, **options):
    """Texts of 8 completions that have ended at EOS."""
    options = {"n": 8} | options
    (output,) = llm.generate([[5, 6, 7]], params_of(structured, **options))
    assert {each.finish_reason for each in output.completions} == {"stop"}
    return [each.text for each in output.completions]


def test_tokens_of_many_sequences_are_taken_in_together(llm, monkeypatch):
    """Without drafts, llguidance's threads take them in: each text is that of a request alone."""
    params = [params_of(GRAMMARS["json"], seed=seed) for seed in range(ADVANCED_TOGETHER + 2)]
    together = []
    executor = llm.engine.grammars.executor

    class Counted:
        def consume_token_par(self, taken):
            together.append(len(taken))
            return executor.consume_token_par(taken)

        def __getattr__(self, name):
            return getattr(executor, name)

    monkeypatch.setattr(llm.engine.grammars, "_executor", Counted())
    found = drawn(llm.generate([[5, 6, 7]] * len(params), params))
    assert max(together) == len(params) and min(together) >= ADVANCED_TOGETHER
    assert found == [drawn(llm.generate([[5, 6, 7]], each))[0] for each in params]


def test_texts_are_whole(llm, tokenizer):
    assert all(re.fullmatch(GRAMMARS["regex"]["regex"], text) for text in texts(llm, GRAMMARS["regex"]))
    assert {*texts(llm, GRAMMARS["choice"], n=24)} == {*GRAMMARS["choice"]["choice"]}
    assert all(re.fullmatch("ab[0-9]c", text) for text in texts(llm, GRAMMARS["gbnf"]))
    # The literal is characters, the name without quotes the token, which has no text.
    assert all(re.fullmatch(r"<\|begin\|>[0-9]{3}", text) for text in texts(llm, GRAMMARS["lark"]))
    params = params_of({"json_object": True, "disable_any_whitespace": True}, n=8, max_tokens=20)
    (output,) = llm.generate([[5, 6, 7]], params)
    found = [each for each in output.completions if each.finish_reason == "stop"]
    assert found and all(isinstance(json.loads(each.text), dict) for each in found)


CLOSED = {"type": "object", "additionalProperties": False}
HARD_SCHEMAS = {
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"$ref": "#/$defs/value"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            },
            "value": {"type": "integer", "minimum": -5, "maximum": 12},
        },
        "$ref": "#/$defs/node",
    },
    "choices": {
        "type": "object",
        "properties": {
            "shape": {
                "anyOf": [
                    CLOSED | {"properties": {"r": {"const": 1.5}}, "required": ["r"]},
                    {"type": "array", "items": {"enum": [1, "two", None, {"é": []}]}, "minItems": 2, "maxItems": 3},
                ]
            },
            "tag": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        },
        "required": ["shape", "tag"],
        "additionalProperties": False,
    },
    "unicode": {
        "type": "object",
        "properties": {"naïve 你": {"enum": ["你好", "ß\"\\", "\u2028", "😀"]}, "<|im_end|>": {"const": "</think>"}},
        "required": ["naïve 你", "<|im_end|>"],
        "additionalProperties": False,
    },
    "bounds": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}],
        "items": {"type": "string", "minLength": 1, "maxLength": 3},
        "minItems": 3,
        "maxItems": 4,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 5}, "b": {"type": "string", "format": "date"}}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "patternProperties": {"^x$": {"type": "boolean"}},
    },
    "map": {
        "type": "object",
        "properties": {"uuid": {"type": "string", "format": "uuid"}},
        "patternProperties": {"^[a-z]{1,2}$": CLOSED | {"properties": {"x": {"type": "null"}}}},
        "additionalProperties": False,
        "required": ["uuid"],
        "maxProperties": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HARD_SCHEMAS)
def test_json_follows_its_schema(llm, name):
    jsonschema = pytest.importorskip("jsonschema")
    schema = HARD_SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    params = params_of({"json": schema, "disable_any_whitespace": True}, n=8, max_tokens=190, top_p=0.9)
    (output,) = llm.generate([[5, 6, 7]], params)
    ended = [json.loads(each.text) for each in output.completions if each.finish_reason == "stop"]
    assert len(ended) >= 4
    for value in ended:
        validator.validate(value)


def test_the_grammar_ends_a_text_before_min_tokens_and_goes_on_after_a_stop_string(llm):
    (output,) = llm.generate([[5]], params_of({"regex": "a{2,9}"}, min_tokens=9, n=4))
    assert [len(each.text) for each in output.completions] == [9] * 4
    (output,) = llm.generate([[5]], params_of({"regex": "aa"}, min_tokens=2**70, max_tokens=2**70))
    assert output.completions[0].text == "aa" and output.completions[0].finish_reason == "stop"
    (output,) = llm.generate([[5]], params_of({"regex": "a{2,9}"}, stop="aaa", min_tokens=9, max_tokens=30))
    assert output.completions[0].text == "aaaaaaaaa"
    (output,) = llm.generate([[5]], params_of({"regex": "ab"}, ignore_eos=True, max_tokens=6))
    assert output.completions[0].text == "ab" and len(output.completions[0].token_ids) == 6


def test_texts_end_with_the_eos_of_new_weights(model, tokenizer):
    """Which may be another token; what has begun goes on to the old one."""
    engine, params = Engine(model, tokenizer), params_of({"regex": "[ab]{3,9}"}, n=8)
    engine.add_request(0, [5, 6, 7], params)
    engine.step()
    engine.take_ends(dataclasses.replace(model.config, eos_token_ids=(9,)))
    engine.add_request(1, [5, 6, 7], params)
    finished = {0: [], 1: []}
    while engine.has_unfinished:
        for number, _, completion in engine.step().finished:
            finished[number].append(completion)
    assert all(re.fullmatch("[ab]{3,9}", each.text) for of_request in finished.values() for each in of_request)
    ends = {number: {(each.finish_reason, each.token_ids[-1]) for each in finished[number]} for number in finished}
    # The tokenizer's is one of them.
    assert ends == {0: {("stop", 2), ("stop", 6)}, 1: {("stop", 2), ("stop", 9)}} and tokenizer.eos_token_id == 2


def test_a_sequence_is_moved_with_its_grammar(model, tokenizer):
    """A matcher is not sent: the engine that takes the sequence has it follow the tokens."""
    params = params_of(GRAMMARS["json"])
    wanted = drawn(LLM(model, tokenizer).generate([[5, 6, 7]], params))[0][0]
    first, second = (Engine(model, tokenizer) for _ in range(2))
    first.add_request(0, [5, 6, 7], params)
    for _ in range(6):
        first.step()
    moved = pickle.loads(pickle.dumps(first.move_out(1)))
    # The step in flight has drawn one more.
    assert len(moved[0].completion_ids) == 7 and moved[0].grammar.matcher is None
    second.move_in(moved)
    finished = []
    while second.has_unfinished:
        finished += second.step().finished
    completion = finished[0].completion
    assert (completion.token_ids, completion.logprobs, completion.finish_reason) == wanted


def test_a_grammar_that_cannot_go_on_ends_its_request_alone(model, tokenizer):
    engine = Engine(model, tokenizer)
    streams = Streams(engine)
    free, impossible = params_of(GRAMMARS["json"]), params_of({"regex": "ab+"}, allowed_token_ids=[71, 90, *EOS])
    streams.submit(0, [5, 6, 7], free)
    streams.submit(1, [5, 6, 7], impossible)
    events = []
    while 0 in streams.open or 1 in streams.open:
        events += streams.step()
    error = [event for number, event in events if number == 1][-1]
    assert type(error) is PromptError
    assert str(error) == "prompt 1: structured_outputs and allowed_token_ids leave no token"
    assert drawn([events[-1][1]]) == drawn(LLM(model, tokenizer).generate([[5, 6, 7]], free))
    # A matcher in error calls itself stopped: that is no end of a text.
    engine.add_request(2, [5, 6, 7], free)
    engine.step()
    (sequence,) = engine.requests[2].values()
    sequence.grammar.matcher.consume_token(tokenizer.encode("zz", add_special_tokens=False)[0])
    assert sequence.grammar.matcher.is_stopped()
    with pytest.raises(GrammarError, match="^prompt 2: structured_outputs: Parser Error: token .z. doesn't satisfy"):
        engine.step()
    engine.reset()


def test_drafts_after_the_end_of_a_text(model, tokenizer):
    """EOS follows EOS where that does not end a completion, and is drafted as soon as it is a text's second one."""
    params = params_of(GRAMMARS["choice"], n=6, ignore_eos=True, max_tokens=20)
    wanted = drawn(LLM(model, tokenizer).generate([[5, 6, 7]], params))
    config = EngineConfig(speculative_method="ngram", prompt_lookup_min=1, max_num_seqs=2)
    assert drawn(LLM(model, tokenizer, config).generate([[5, 6, 7]], params)) == wanted


def test_a_draft_after_which_nothing_may_be_drawn_is_refused_alone(model, tokenizer, monkeypatch):
    a, b, digit = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab0")
    # A `b` is allowed but is never drawn, and the digit that must follow it is not allowed.
    rules = {"allowed_token_ids": [a, b, *EOS], "logit_bias": {b: -100}}
    params = params_of({"regex": "(a|b[0-9]){9,20}"}, n=3, **rules)
    wanted = drawn(LLM(model, tokenizer).generate([[5, 6, 7]], params))
    monkeypatch.setattr(Speculator, "drafts", lambda speculator, table, rows: [[b, digit]] * len(rows))
    engine = EngineConfig(speculative_method="ngram")
    assert drawn(LLM(model, tokenizer, engine).generate([[5, 6, 7]], params)) == wanted


@pytest.mark.parametrize(
    "structured, line",
    [
        ({}, "must have one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["b"]}, "must have one of json, .*, got regex and choice"),
        ({"json": "{"}, "json must be a JSON schema: an object, or its text, got '{'"),
        ({"json": '{"maximum": NaN}'}, "json must be a JSON schema"),
        ({"json": [1]}, "json must be a JSON schema"),
        ({"choice": []}, r"choice must be a list of texts that are not empty, got \(\)"),
        ({"choice": "ab"}, "choice must be a list of texts"),
        ({"choice": [""]}, "choice must be a list of texts"),
        ({"regex": 3}, "regex must be a text that is not empty, got 3"),
        ({"regex": "a", "after": ""}, "after must be a text that is not empty"),
        ({"regexp": "a"}, "has no key 'regexp'; they are json, regex"),
        ({"json_object": 1.5}, "json_object must be true or false, got 1.5"),
    ],
)
def test_values_that_are_none_are_named(structured, line):
    with pytest.raises(ConfigError, match=rf"^sampling: structured_outputs(\.| ){line}"):
        SamplingParams(structured_outputs=structured)
    with pytest.raises(ConfigError, match="^sampling: structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")


def test_copies_are_of_several_forms_if_these_compile_quickly(llm, monkeypatch):
    """llguidance's threads wait for each other where they compute masks of copies of one form."""
    monkeypatch.setattr(grammars, "MAX_FORMS", 3)
    of_llm = llm.engine.grammars
    for quick_s, expected in ((1e9, [0, 1, 2, 0, 1]), (-1.0, [0] * 5)):
        monkeypatch.setattr(grammars, "QUICK_S", quick_s)
        of_engine = grammars.Grammars(of_llm.tokenizer, of_llm.vocab_size, of_llm.eos_token_ids)
        states = [of_engine.state(params_of({"regex": "(ab|ba)+"})) for _ in expected]
        assert [state.form for state in states] == expected
        assert len({state.matcher.compute_bitmask() for state in states}) == 1


@pytest.mark.parametrize(
    "structured, line",
    [
        ({"regex": "(a"}, "regex: .*"),
        ({"regex": "(?=a)b"}, "regex: .*look-around.*"),
        ({"json": {"type": "objekt"}}, "json: .*objekt.*"),
        ({"json": {"$ref": "#/$defs/none"}}, "json: .*none.*"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json: .*uniqueItems.*"),
        ({"grammar": 'start: "a" | "'}, "grammar: .*"),
        ({"grammar": "start: <|none|>"}, "grammar: .*none.*"),
        ({"grammar": "root ::= (("}, "grammar: .*"),
    ],
)
def test_a_grammar_that_is_none_is_refused_in_one_line(llm, structured, line):
    with pytest.raises(ConfigError, match=rf"^sampling: structured_outputs\.{line}$") as caught:
        llm.generate([[1]], params_of(structured))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not llm.engine.has_unfinished


def test_what_a_grammar_needs_is_named(model, tokenizer, monkeypatch):
    params = params_of({"regex": "a"})
    brace = params_of({"json_object": True})
    with pytest.raises(
        ConfigError, match="^sampling: structured_outputs.json_object: no token of the model begins such"
    ):
        LLM(make_model(vocab_size=48), Tokenizer(GOLDEN / "tiny-qwen3")).generate([[1]], brace)
    for line, engine in (
        ("needs a tokenizer, and the model folder has none", LLM(model)),
        ("end with EOS, and the model has no EOS", LLM(make_model(eos_token_id=None), NoEos(GOLDEN / "tokenizer"))),
    ):
        with pytest.raises(ConfigError, match=f"^sampling: structured_outputs {line}$"):
            engine.generate([[1]], params)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"structured_outputs needs llguidance; pip install 'rlnumba\[grammar\]'$"):
        LLM(model, tokenizer).generate([[1]], params)


class NoEos(Tokenizer):
    eos_token_id = None


def test_params_can_be_hashed_copied_and_sent():
    params = params_of({"json": PERSON})
    assert params.structured_outputs == StructuredOutputsParams(json=json.dumps(PERSON, ensure_ascii=False))
    assert dataclasses.replace(params) == pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize("folder", ["tokenizer", "tiny-qwen3"])
def test_bytes_of_tokens_are_those_that_are_decoded(folder):
    tokenizer = Tokenizer(GOLDEN / folder)
    tokens = GrammarTokens(tokenizer, VOCABULARY, 1)
    size = tokenizer.backend.get_vocab_size()
    for i in range(size):
        text = tokenizer.decode([i], skip_special_tokens=False)
        assert text == tokens.tokens[i].decode(errors="replace")
    added = {*tokenizer.backend.get_added_tokens_decoder()}
    assert tokens.special_token_ids == sorted(added | {*range(size, VOCABULARY)})
    for text in ("what is", 'say "', next(iter(tokenizer.special_ids))):
        ids = tokens(text.encode())
        assert not added & {*ids} and b"".join(tokens.tokens[i] for i in ids) in text.encode()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_scores_completions_as_they_were_drawn_on_the_gpu(tokenizer, dtype):
    model = make_model(dtype, vocab_size=VOCABULARY, eos_token_id=EOS, head_dim=64)
    for options in ({}, {"top_p": 0.8, "temperature": 1.3, "logit_thresholds": True}):
        test_training_scores_completions_as_they_were_drawn(LLM(model, tokenizer), model, tokenizer, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grammars_on_the_gpu(tokenizer, dtype):
    """In graphs, of steps of one token and of drafts, beside requests without a grammar."""
    model = make_model(dtype, vocab_size=VOCABULARY, eos_token_id=EOS, head_dim=64)
    prompts = [[5, 6, 7], [9] * 17] * 4
    every = [params_of(GRAMMARS[name], n=2) for name in GRAMMARS] + [SamplingParams(max_tokens=40, ignore_eos=True)]
    llm = LLM(model, tokenizer)
    expected = drawn(
        LLM(model, tokenizer, EngineConfig(enforce_eager=True, async_scheduling=False)).generate(prompts, every)
    )
    for _ in range(3):
        assert drawn(llm.generate(prompts, every)) == expected
    parts = {key.part for key in llm.engine.runner.graphs if "allowed" in {name for name, *_ in key.arrays}}
    assert parts >= {HIDDEN, TOKENS}
    for config in SCHEDULES:
        assert drawn(LLM(model, tokenizer, EngineConfig(**config)).generate(prompts, every)) == expected


def test_slices_of_the_vocabulary_change_no_mask(tokenizer):
    """Along a string up to its maxLength, and after it."""
    whole = grammar_tokenizer(tokenizer, VOCABULARY, EOS)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 14}}, "required": ["name"]}
    source = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matchers = [llguidance.LLMatcher(each, source, log_level=0) for each in (whole, whole.with_slices([]))]
    token_ids = whole.tokenize_str('{"name": "' + "a b é " * 2 + '"}')
    for token_id in [*token_ids, None]:
        masks = [matcher.compute_bitmask() for matcher in matchers]
        assert masks[0] == masks[1]
        if token_id is not None:
            assert all(matcher.consume_token(token_id) for matcher in matchers)
    assert all(matcher.is_accepting() for matcher in matchers)


@pytest.mark.parametrize("is_metaspace", [False, True])
def test_tokens_of_a_tokenizer_with_spaces_as_characters(is_metaspace):
    """Bytes that no character has are tokens of their own; a text that is not UTF-8 is its longest tokens."""
    names = ["▁", "a", "b", "▁a", "<0xC3>", "<0xA9>", "<0x0A>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    spaces = tokenizers.decoders.Metaspace() if is_metaspace else tokenizers.decoders.Replace("▁", " ")
    parts = [spaces, tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(parts)
    backend.add_special_tokens(["<end>"])
    found = GrammarTokens(SimpleNamespace(backend=backend, folder="model"), 9, 7)
    assert found.tokens == [b" ", b"a", b"b", b" a", b"\xc3", b"\xa9", b"\n", b"<end>", b"<[8]>"]
    assert found.special_token_ids == [7, 8] and found.longest == 2
    assert found(b" ab") == [3, 2] and found("aé\n".encode()) == [1, 4, 5, 6]
    assert found(b"\xa9 ab") == [5, 3, 2] and found(b"a\xffb") == [1] and found(b"") == []
