"""Requests that are refused: status, type, param and code; a bad one fails alone."""

import copy
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import NAME, request
from tests.serve.fuzz import CONTROL_GETS, GATED_GOOD, GETS, Fuzz
from tests.serve.fuzz import GOOD as FUZZED

COMPLETION = {"prompt": "ab", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
GENERATE = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}


def message(**keys):
    return {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "a"} | keys]}


def json_schema(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def named(name):
    return {"type": "function", "function": {"name": name}}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CASES = [
    # route, keys beside those of a good body, the param that the error names
    ("/v1/completions", {"prompt": None}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": ["a", 3]}, "prompt[1]"),
    ("/v1/completions", {"prompt": [[5, 99]]}, "prompt[0]"),
    ("/v1/completions", {"prompt": [5, True]}, "prompt"),
    ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt"),
    ("/v1/completions", {"n": 0}, "n"),
    ("/v1/completions", {"n": 1025}, "n"),
    ("/v1/completions", {"n": True}, "n"),
    ("/v1/completions", {"temperature": "hot"}, "temperature"),
    ("/v1/completions", {"temperature": -1}, "temperature"),
    ("/v1/completions", {"top_p": 0}, "top_p"),
    ("/v1/completions", {"top_k": 1.5}, "top_k"),
    ("/v1/completions", {"stop": [""]}, "stop"),
    ("/v1/completions", {"stop": ["a"] * 100}, "stop"),
    ("/v1/completions", {"stop_token_ids": [99]}, "stop_token_ids"),
    ("/v1/completions", {"stop": "a<eos>"}, "stop"),
    ("/v1/completions", {"min_tokens": 3}, "min_tokens"),
    ("/v1/completions", {"seed": 2**64}, "seed"),
    ("/v1/completions", {"logprobs": 21}, "logprobs"),
    ("/v1/completions", {"logprobs": -1}, "logprobs"),
    ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"99": 1}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": [5]}, "logit_bias"),
    ("/v1/completions", {"allowed_token_ids": [99]}, "allowed_token_ids"),
    ("/v1/completions", {"bad_words": [""]}, "bad_words"),
    ("/v1/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
    ("/v1/completions", {"max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"max_tokens": "9"}, "max_tokens"),
    ("/v1/completions", {"stream": 1}, "stream"),
    ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/v1/completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/completions", {"suffix": "x"}, "suffix"),
    ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
    ("/v1/completions", {"prompt_embeds": "x"}, "prompt_embeds"),
    # The vocabulary has no brace.
    ("/v1/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("/v1/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("/v1/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ("/v1/completions", json_schema("a"), "response_format.json_schema.schema"),
    ("/v1/completions", json_schema({"type": "objekt"}), "response_format"),
    ("/v1/completions", json_schema({"const": "a" * (1 << 17)}), "response_format"),
    ("/v1/completions", json_schema({}) | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
    ("/v1/completions", {"structured_outputs": {"grammar": "start: <none>"}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ("/inference/v1/generate", {"sampling_params": {"structured_outputs": "a"}}, "sampling_params.structured_outputs"),
    ("/v1/chat/completions", {"messages": None}, "messages"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": ["a"]}, "messages[0]"),
    ("/v1/chat/completions", message(role=None), "messages[1].role"),
    ("/v1/chat/completions", message(content=3), "messages[1].content"),
    ("/v1/chat/completions", message(content=[{"type": "image_url"}]), "messages[1].content[0]"),
    ("/v1/chat/completions", message(content=[{"type": "text"}]), "messages[1].content[0].text"),
    ("/v1/chat/completions", message(role="assistant", tool_calls=[{}]), "messages[1].tool_calls[0]"),
    (
        "/v1/chat/completions",
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    ("/v1/chat/completions", {"tools": []}, "tools"),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools[0]"),
    ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": named("g")}, "tool_choice"),
    ("/v1/chat/completions", {"tool_choice": named("f")}, "tool_choice"),
    (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids"),
    ("/inference/v1/generate", {"sampling_params": []}, "sampling_params"),
    ("/inference/v1/generate", {"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ("/inference/v1/generate", {"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/detokenize", {"tokens": [99]}, "tokens"),
]
GOOD = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/inference/v1/generate": GENERATE}


@pytest.mark.parametrize(("path", "keys", "param"), CASES, ids=[f"{path} {[*keys]}" for path, keys, _ in CASES])
def test_a_bad_key_is_named(server, path, keys, param):
    reply = request(server, path, GOOD.get(path, {"prompt": "a"}) | keys)
    error = reply.json["error"]
    assert (reply.status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, None)
    assert error["message"]


@pytest.mark.parametrize(
    "keys",
    [
        *({"best_of": 1}, {"suffix": None}, {"suffix": ""}, {"functions": None}, {"response_format": {"type": "text"}}),
        *(
            {"structured_outputs": None},
            {"guided_json": {"type": "object"}},
            {"kv_transfer_params": None},
            {"min_p": None},
            {"top_k": -1},
            {"logit_bias": {}},
        ),
        *(
            {"user": "me"},
            {"store": True},
            {"metadata": {}},
            {"priority": 3},
            {"unknown": [1]},
            {"n": None},
            {"request_id": ""},
        ),
    ],
    ids=str,
)
def test_neutral_values_and_unknown_keys_are_accepted(server, keys):
    reply = request(server, "/v1/completions", COMPLETION | keys)
    assert reply.status == 200 and reply.headers["x-request-id"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"n": NaN}',
        b"\xff",
        b"[" * 10000,
        b'{"prompt": "\\ud800"}',
        b'{"n":' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_object_of_json(server, data):
    reply = request(server, "/v1/completions", data)
    assert reply.status == 400 and reply.json["error"]["type"] == "invalid_request_error"


def test_a_prompt_without_room(server):
    long = "a" * 255
    for path, body, param in [
        ("/v1/completions", {"prompt": long, "max_tokens": 2}, "prompt"),
        ("/v1/completions", {"prompt": long + "a"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/inference/v1/generate", {"token_ids": [5] * 256}, "token_ids"),
    ]:
        reply = request(server, path, body)
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert error["message"].startswith("This model's maximum context length is 256 tokens")
    # What the body does not give is cut to the room, and so is the token-level route's.
    assert request(server, "/v1/completions", {"prompt": long}).json["usage"]["completion_tokens"] == 1
    body = {"token_ids": [5] * 250, "sampling_params": {"max_tokens": 99, "ignore_eos": True, "output_kind": 1}}
    assert request(server, "/inference/v1/generate", body).json["usage"]["completion_tokens"] == 6


def test_routes_models_and_methods(server):
    for reply, status, kind, code in [
        (request(server, "/v1/nothing"), 404, "not_found_error", None),
        (request(server, "/v1/completions"), 405, "invalid_request_error", None),
        (request(server, "/health", {}), 405, "invalid_request_error", None),
        (request(server, "/v1/models/other"), 404, "not_found_error", "model_not_found"),
        (request(server, "/v1/completions", COMPLETION | {"model": "x"}), 404, "not_found_error", "model_not_found"),
    ]:
        error = reply.json["error"]
        assert (reply.status, error["type"], error["code"]) == (status, kind, code)
        assert reply.headers["x-request-id"]


def test_the_client_raises_its_own_errors(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=NAME, prompt="ab", temperature=-1)
    assert raised.value.param == "temperature" and raised.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "a"}])
    assert raised.value.code == "model_not_found"


KEYS = st.sampled_from(
    ["prompt", "messages", "token_ids", "n", "max_tokens", "stop", "stream", "temperature", "tools", "tool_choice"]
    + ["logprobs", "seed", "echo", "sampling_params", "stream_options", "chat_template_kwargs", "min_tokens", "role"]
    + ["content", "type", "function", "name", "arguments", "truncate_prompt_tokens", "response_format", "modalities"]
    + ["structured_outputs", "json", "regex", "choice", "grammar", "json_object", "json_schema", "schema"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.sampled_from(["user", "auto", "text", 2**70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
ROUTES = st.sampled_from([*GOOD, "/tokenize", "/detokenize"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ROUTES, st.dictionaries(KEYS, VALUES, max_size=4))
def test_no_body_makes_the_server_fail(server, path, keys):
    body = GOOD.get(path, {}) | keys
    body["max_tokens"] = body["max_tokens"] if body.get("max_tokens") in (0, -1, "a") else 2
    reply = request(server, path, json.dumps(body).replace("Infinity", "1e999").encode())
    assert reply.status in (200, 400, 404, 429), reply.raw
    if reply.status == 200 and reply.headers["content-type"].startswith("application/json"):
        assert reply.json


def test_every_route_is_fuzzed(server):
    from rlnumba.serve.app import make_app

    assert {route.path for route in make_app(server.service).app.routes} == {*GETS, *FUZZED}
    service = copy.copy(server.service)
    service.settings = dataclasses.replace(service.settings, lora_root="", dev_endpoints=True)
    assert {route.path for route in make_app(service).app.routes} == {*GETS, *FUZZED, *GATED_GOOD, *CONTROL_GETS}


def test_no_request_makes_the_server_fail(server, capsys):
    """As many as take a second; bench/server.py sends any number."""
    fuzz = Fuzz(0)
    for _ in range(150):
        method, path, headers, body = asked = fuzz.request()
        reply = request(server, path, body or None, method, headers)
        assert reply.status < 500 and reply.headers["x-request-id"], (asked, reply.raw)
        if reply.status >= 400 and method != "HEAD":
            assert reply.json["error"]["message"], asked
    assert "Traceback" not in capsys.readouterr().err
