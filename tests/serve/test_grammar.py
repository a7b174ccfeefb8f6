"""Texts with a grammar and forced calls, with the real client: whole and streamed, with the engine's draw."""

import json
import re
import sys
from pathlib import Path

import pytest

from rlnumba.engine import Engine, SamplingParams
from rlnumba.model.tokenizer import Tokenizer
from tests.engine.test_llm import drawn, generate, make_model
from tests.serve.conftest import NAME, TEMPLATE, request, running

pytest.importorskip("llguidance")
FOLDER = Path(__file__).parent.parent / "golden" / "tokenizer"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "ab"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
# A closed set of whitespace: a random model draws it as readily as all else.
NO_SPACE = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def tokenizer():
    found = Tokenizer(FOLDER)
    found.backend.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    opens = TEMPLATE.read_text().rstrip().removesuffix("{% endif %}") + "{% if thinks %}<think>{% endif %}{% endif %}"
    found.templates = {"default": opens}
    return found


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=500, eos_token_id=[2, 6], max_position_embeddings=600)


@pytest.fixture(scope="module")
def server(tokenizer, model):
    with running(Engine(model, tokenizer), tokenizer) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_the_draw_is_that_of_the_engine(server, tokenizer, model):
    """On all three routes; beside them what has no grammar."""
    grammar = {"regex": "[a-c]{2,5}-[0-9]{1,3}"}
    values = {"seed": 3, "n": 3, "max_tokens": 30, "temperature": 0.9}
    params = SamplingParams(structured_outputs=grammar, **values)
    expected = drawn(generate(model, [[5, 6, 7]], params, tokenizer))[0]
    body = {"prompt": [5, 6, 7], "structured_outputs": grammar, "logprobs": 0, "return_token_ids": True} | values
    choices = request(server, "/v1/completions", body).json["choices"]
    found = [(each["token_ids"], each["logprobs"]["token_logprobs"], each["finish_reason"]) for each in choices]
    assert found == expected and all(re.fullmatch(grammar["regex"], each["text"]) for each in choices)
    body = {"token_ids": [5, 6, 7], "sampling_params": {"structured_outputs": grammar} | values}
    choices = request(server, "/inference/v1/generate", body).json["choices"]
    assert [each["token_ids"] for each in choices] == [ids for ids, _, _ in expected]


def ask(client, **body):
    """(content, reasoning, calls, finish_reason) of each choice of an answer; those of its stream are equal."""
    body = {"messages": [{"role": "user", "content": "hi"}], "model": NAME, "seed": 5, "max_tokens": 120} | body
    whole = client.chat.completions.create(**body)
    joined = [["", "", {}, None] for _ in whole.choices]
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            of_choice = joined[choice.index]
            of_choice[0] += choice.delta.content or ""
            of_choice[1] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = of_choice[2].get(call.index, ("", ""))
                of_choice[2][call.index] = name + (call.function.name or ""), arguments + call.function.arguments
            of_choice[3] = choice.finish_reason or of_choice[3]
    found = []
    for choice in whole.choices:
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        found.append(
            (choice.message.content or "", choice.message.reasoning_content or "", calls, choice.finish_reason)
        )
    assert found == [(content, reasoning, [*calls.values()], end) for content, reasoning, calls, end in joined]
    return found


def test_json_of_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": False}}
    for body in (
        {"response_format": form, "n": 4},
        {"extra_body": {"structured_outputs": {"json": SCHEMA} | NO_SPACE}},
    ):
        ended = [content for content, _, _, end in ask(client, **body) if end == "stop"]
        assert ended and all({*json.loads(text)} == {"name", "n"} for text in ended)
    # Neutral values, and a grammar of a version of vLLM that is not heard of any more.
    free = ask(client, extra_body={"structured_outputs": None, "guided_regex": "a"}, response_format={"type": "text"})
    assert free == ask(client)


def test_a_think_block_that_the_prompt_opens_is_free(client):
    body = {"chat_template_kwargs": {"thinks": True}, "structured_outputs": {"regex": "[xy]{3}"}}
    close = {"logit_bias": {"490": 6}}
    found = ask(client, extra_body=body, n=4, **close)
    assert all(re.fullmatch("[xy]{3}", content) for content, _, _, end in found if end == "stop")
    assert len([end for *_, end in found if end == "stop"]) >= 3 and any(reasoning for _, reasoning, _, _ in found)


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_that_are_forced(client, thinks):
    body = {"tools": [ADD, STOP], "logit_bias": {"490": 6, "2": 2}, "n": 4}
    body["extra_body"] = {"chat_template_kwargs": {"thinks": thinks}}
    named = {"type": "function", "function": {"name": "add"}}
    cases = [("required", {}, "tool_calls"), ("required", {"parallel_tool_calls": False}, "tool_calls")]
    for choice, more, end in [*cases, (named, {"response_format": {"type": "json_object"}}, "stop")]:
        found = ask(client, tool_choice=choice, **body | more)
        ended = [each for each in found if each[3] != "length"]
        assert len(ended) >= 3 and {each[3] for each in ended} == {end}
        for content, _, calls, _ in ended:
            assert content == "" and calls and (len(calls) == 1 or choice == "required" and not more)
            for name, arguments in calls:
                assert {*json.loads(arguments)} == ({"name", "n"} if name == "add" else set())
                assert choice == "required" or name == "add"


def test_a_damaged_grammar_is_a_failure_of_its_request_alone(server, monkeypatch):
    """What a matcher in error calls its stop is none."""
    from rlnumba.engine.requests import grammars

    advance = grammars.Grammars.advance

    def damaging(self, sequences, token_ids):
        for sequence in sequences:
            if sequence.grammar is not None and "zz" in (sequence.params.structured_outputs.regex or ""):
                sequence.grammar.matcher.consume_token(8)
        advance(self, sequences, token_ids)

    monkeypatch.setattr(grammars.Grammars, "advance", damaging)
    body = {"prompt": [5, 6, 7], "structured_outputs": {"regex": "azz"}, "seed": 1}
    reply = request(server, "/v1/completions", body)
    assert (reply.status, reply.json["error"]["type"]) == (500, "server_error")
    assert reply.json["error"]["message"].startswith("structured_outputs: Parser Error")
    assert (
        request(server, "/v1/completions", body | {"structured_outputs": {"regex": "ab"}}).json["choices"][0]["text"]
        == "ab"
    )


def test_without_the_package_the_extra_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}
    body["response_format"]["json_schema"] = {"name": "a", "schema": {"const": "not seen before"}}
    error = request(server, "/v1/chat/completions", body)
    assert error.status == 400 and "pip install 'rlnumba[grammar]'" in error.json["error"]["message"]
    assert error.json["error"]["param"] == "response_format"
