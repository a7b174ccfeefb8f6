"""What the server answers: the draw of `generate`, streams that equal whole answers, the real client."""

import functools
import json
import operator

import numpy as np
import pytest

from rlnumba import cli
from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from tests.close import assert_close
from tests.serve.conftest import MODEL, NAME, request, running

PROMPT = "what is 3+4? "
CHAT = [{"role": "user", "content": PROMPT}]


def test_the_draw_is_that_of_generate(server, tmp_path):
    rows = [{"prompt": PROMPT}, {"prompt_token_ids": [5, 6, 7]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"seed": 3, "n": 2, "max_tokens": 12, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    options |= {"min_tokens": 2, "min_p": 0.01, "presence_penalty": 0.5}
    arguments = ["generate", "--device", device.name(), "--model", MODEL, "--prompts", tmp_path / "in.jsonl"]
    arguments += ["--output", tmp_path / "out.jsonl", "--stop", "b"]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    assert cli.run([str(each) for each in arguments]) == 0
    expected = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, found in zip(rows, expected, strict=True):
        prompt = row.get("prompt", row.get("prompt_token_ids"))
        body = {"prompt": prompt, "stop": "b", "logprobs": 0, "return_token_ids": True} | options
        reply = request(server, "/v1/completions", body).json
        for choice, completion in zip(reply["choices"], found["completions"], strict=True):
            assert choice["token_ids"] == completion["token_ids"]
            assert choice["logprobs"]["token_logprobs"] == completion["logprobs"]
            assert choice["text"] == completion["text"]
            assert choice["finish_reason"] == completion["finish_reason"]
            assert choice["prompt_token_ids"] == found["prompt_token_ids"]
        params = {"stop": ["b"], "logprobs": 0} | options
        body = {"token_ids": found["prompt_token_ids"], "sampling_params": params}
        tokens = request(server, "/inference/v1/generate", body).json["choices"]
        for choice, completion in zip(tokens, found["completions"], strict=True):
            assert choice["token_ids"] == completion["token_ids"]
            entries = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in entries] == completion["logprobs"]
            assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in completion["token_ids"]]
            versions = [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
            assert choice["weight_versions"] == versions
    both = request(server, "/v1/completions", body | options | {"prompt": [PROMPT, "ab"], "seed": -1}).json
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    alone = request(server, "/v1/completions", {"prompt": "ab", "seed": 2**64 - 1} | options | {"seed": -1}).json
    assert [c["text"] for c in both["choices"][2:]] == [c["text"] for c in alone["choices"]]


COMPLETIONS = [
    {"prompt": PROMPT, "n": 3, "max_tokens": 24},
    {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "logprobs": 0, "return_token_ids": True},
    {"prompt": PROMPT, "stop": ["b", "9l", "cz", "mc"], "max_tokens": 40, "n": 4},
    {"prompt": PROMPT, "stop": ["b", "m2"], "max_tokens": 40, "n": 4, "include_stop_str_in_output": True},
    {"prompt": PROMPT, "skip_special_tokens": False, "max_tokens": 60, "ignore_eos": True, "stop": "co"},
    {"prompt": PROMPT, "echo": True, "max_tokens": 3},
    {"prompt": PROMPT, "echo": True, "max_tokens": 0},
    {"prompt": PROMPT, "truncate_prompt_tokens": 4, "return_token_ids": True, "stop_token_ids": [20, 30]},
    {"prompt": PROMPT, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt": PROMPT, "logprobs": 3, "n": 2, "return_tokens_as_token_ids": True},
    {"prompt": PROMPT, "logit_bias": {"20": 100}, "allowed_token_ids": [20, 21], "return_token_ids": True},
]


def joined(choices, key):
    """The pieces of a key of streamed choices together: a text or a list; None where all are None."""
    pieces = [choice[key] for choice in choices if choice.get(key) is not None]
    return functools.reduce(operator.add, pieces) if pieces else None


def pieces_of(events, index):
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


@pytest.mark.parametrize("body", COMPLETIONS, ids=lambda body: ",".join(body))
def test_a_streamed_completion_is_the_whole_one(server, body):
    body = {"seed": 7, "model": NAME} | body
    whole = request(server, "/v1/completions", body).json
    events = request(
        server, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    ).events
    last = events.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(event["usage"] is None for event in events)
    for choice in whole["choices"]:
        pieces = pieces_of(events, choice["index"])
        assert (joined(pieces, "text") or "") == choice["text"]
        assert joined(pieces, "token_ids") == choice.get("token_ids")
        assert pieces[0].get("prompt_token_ids") == choice.get("prompt_token_ids")
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        for key in keys if choice["logprobs"] else ():
            assert joined([piece["logprobs"] for piece in pieces], key) == choice["logprobs"][key]
    if isinstance(body.get("stop"), list) and not body.get("include_stop_str_in_output"):
        assert not any(stop in choice["text"] for choice in whole["choices"] for stop in body["stop"])
    if body.get("include_stop_str_in_output"):
        for choice in whole["choices"]:
            assert choice["stop_reason"] is None or choice["text"].endswith(choice["stop_reason"])


CHATS = [
    {"n": 2, "max_tokens": 20},
    {"max_completion_tokens": 5, "max_tokens": 3, "logprobs": True, "return_token_ids": True},
    {"stop": ["b", "d0"], "n": 3},
    {"logprobs": True, "top_logprobs": 4, "max_tokens": 6},
    {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 9},
]


@pytest.mark.parametrize("body", CHATS, ids=lambda body: ",".join(body))
def test_a_streamed_chat_is_the_whole_one(server, body):
    body = {"seed": 7, "messages": CHAT} | body
    whole = request(server, "/v1/chat/completions", body).json
    events = request(server, "/v1/chat/completions", body | {"stream": True}).events
    assert events[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
    for choice in whole["choices"]:
        pieces = pieces_of(events, choice["index"])
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [piece["delta"] for piece in pieces]
        assert joined(deltas, "content") == choice["message"]["content"]
        assert joined(pieces, "token_ids") == choice.get("token_ids")
        if choice["logprobs"]:
            streamed = joined([piece["logprobs"] or {} for piece in pieces], "content")
            assert streamed == choice["logprobs"]["content"]
        assert [piece["finish_reason"] for piece in pieces][-1] == choice["finish_reason"]
    if "max_completion_tokens" in body:
        assert whole["usage"]["completion_tokens"] <= 5 and len(whole["choices"][0]["token_ids"]) > 3


def test_the_client(client):
    assert [model.id for model in client.models.list()] == [NAME, "second"]
    card = client.models.retrieve(NAME)
    assert card.owned_by == "rlnumba" and card.max_model_len == 256 and card.parent is None
    raw = client.completions.with_raw_response.create(
        model="", prompt=PROMPT, seed=1, max_tokens=5, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    whole = raw.parse()
    assert whole.id == "cmpl-mine" and whole.model == NAME and whole.usage.total_tokens == 13 + 5
    stream = client.completions.create(model="second", prompt=PROMPT, seed=1, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    chat = client.chat.completions.create(model=NAME, messages=CHAT, seed=1, max_tokens=8, logprobs=True)
    message = chat.choices[0]
    assert len(message.logprobs.content) == chat.usage.completion_tokens == 8
    assert chat.id.startswith("chatcmpl-") and message.message.role == "assistant"
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, seed=1, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == message.message.content
    assert chunks[-1].usage.prompt_tokens == chat.usage.prompt_tokens


def test_a_cached_prefix_is_counted_and_kept_apart_by_salt(server):
    prompt = [18 + i % 20 for i in range(40)]

    def cached(**more):
        reply = request(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "seed": 1} | more)
        return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached()] == [0, 32]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a"), cached()] == [0, 0, 32, 32]


def test_alternatives_are_those_of_the_distribution(server):
    """All routes list the same, in the order of their ranks; the drawn token has the bits that it has alone."""
    body = {"seed": 5, "max_tokens": 8, "ignore_eos": True, "temperature": 0.8}
    ids = request(server, "/tokenize", {"prompt": PROMPT}).json["tokens"]
    params = body | {"logprobs": 3, "prompt_logprobs": 2}
    tokens = request(server, "/inference/v1/generate", {"token_ids": ids, "sampling_params": params}).json
    alone = request(server, "/v1/completions", body | {"prompt": ids, "logprobs": 0}).json["choices"][0]["logprobs"]
    text = {"prompt": ids, "logprobs": 3, "return_tokens_as_token_ids": True, "echo": True}
    echoed = request(server, "/v1/completions", body | text).json["choices"][0]["logprobs"]
    entries = tokens["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == alone["token_logprobs"]
    assert echoed["token_logprobs"][len(ids) :] == alone["token_logprobs"]
    for entry, listed in zip(entries, echoed["top_logprobs"][len(ids) :], strict=True):
        assert [each["rank"] for each in entry["top_logprobs"]] == [1, 2, 3]
        expected = {each["token"]: each["logprob"] for each in [entry, *entry["top_logprobs"]]}
        assert listed == expected and max(expected.values()) == entry["top_logprobs"][0]["logprob"]
    scored = tokens["prompt_logprobs"]
    assert scored[0] is None and echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    for token, listed, value in zip(ids[1:], scored[1:], echoed["token_logprobs"][1:], strict=False):
        assert listed[str(token)]["logprob"] == value and listed[str(token)]["rank"] >= 1


def test_without_alternatives_a_token_is_listed_alone(server):
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "logprobs": 0, "echo": True}
    found = request(server, "/v1/completions", body).json["choices"][0]["logprobs"]
    pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))
    assert found["top_logprobs"] == [None, *({token: value} for token, value in pairs[1:])]


def test_a_sampling_mask_has_the_tokens_that_filters_kept(server):
    """Those with a log-prob above -inf among all; they sum up to 1, and a stream has the same."""
    ids, params = [18, 20, 22], {"seed": 5, "max_tokens": 8, "ignore_eos": True, "logprobs": 20, "temperature": 0.8}
    filters = {"top_k": 9, "top_p": 0.7, "min_p": 0.01, "allowed_token_ids": list(range(5, 40))}
    body = {"token_ids": ids, "sampling_params": params | filters}
    assert "sampling_mask" not in request(server, "/inference/v1/generate", body).json["choices"][0]
    body["return_sampling_mask"] = True
    (choice,) = request(server, "/inference/v1/generate", body).json["choices"]
    sizes = set()
    for token, kept, entry in zip(
        choice["token_ids"], choice["sampling_mask"], choice["logprobs"]["content"], strict=True
    ):
        listed = {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]}
        assert kept == sorted(i for i, logprob in listed.items() if logprob > -9999) and token in kept
        total = np.float32([sum(np.exp(listed[i]) for i in kept)])
        assert_close(total, [1], terms=len(kept), what="probabilities of what was kept")
        assert {*kept} <= {*range(5, 40)}
        sizes.add(len(kept))
    assert len(sizes) > 1 and max(sizes) <= 9
    chunks = request(server, "/inference/v1/generate", body | {"stream": True}).events
    assert [row for chunk in chunks for each in chunk["choices"] for row in each["sampling_mask"]] == choice[
        "sampling_mask"
    ]

    def masks(**keys):
        reply = request(server, "/inference/v1/generate", body | {"sampling_params": params | keys})
        return reply.json["choices"][0].get("sampling_mask") if reply.status == 200 else reply.json["error"]["message"]

    assert masks() is None and masks(temperature=0, top_p=0.5)[0] == masks(temperature=0, top_k=1)[0]
    assert masks(top_k=1) == [[row[0]] for row in masks(top_k=1)] and len(masks(allowed_token_ids=[7, 8, 9])[0]) == 3
    assert masks(top_p=0.9) == "a sampling mask needs a top_k beside top_p and min_p"
    assert masks(top_k=5000) == "a sampling mask needs a top_k of at most 2048"


def test_raw_log_probs_are_the_models_own(tokenizer):
    """Those of the same tokens in a prompt, whatever the temperature and filters of the draw."""
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=4, logprobs_mode="raw_logprobs"))
    with running(engine, tokenizer) as process:
        ids, sampling = [18, 20, 22], {"temperature": 0.3, "top_k": 5, "seed": 1, "max_tokens": 6, "ignore_eos": True}
        body = {"prompt": ids, "logprobs": 2, "return_token_ids": True} | sampling
        (choice,) = request(process, "/v1/completions", body).json["choices"]
        drawn, found = choice["token_ids"], choice["logprobs"]
        scored = {"prompt": ids + drawn, "max_tokens": 1, "prompt_logprobs": 2}
        (expected,) = request(process, "/v1/completions", scored).json["choices"]
        expected = expected["prompt_logprobs"][len(ids) :]
        assert found["token_logprobs"] == [each[str(i)]["logprob"] for each, i in zip(expected, drawn, strict=True)]
        for token, listed, each in zip(drawn, found["top_logprobs"], expected, strict=True):
            assert sorted(listed.values()) == sorted(entry["logprob"] for entry in each.values()), token
        # Without alternatives, in the other routes and in streams, the same.
        for keys in ({"logprobs": 0}, {"logprobs": 0, "stream": True}):
            reply = request(process, "/v1/completions", body | keys)
            pieces = reply.events if "stream" in keys else [reply.json]
            values = [v for piece in pieces for c in piece["choices"] for v in c["logprobs"]["token_logprobs"]]
            assert values == found["token_logprobs"]
        tokens = {"token_ids": ids, "sampling_params": sampling | {"logprobs": 0}}
        (choice,) = request(process, "/inference/v1/generate", tokens).json["choices"]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == found["token_logprobs"]
        refused = request(process, "/inference/v1/generate", tokens | {"return_sampling_mask": True})
        assert refused.json["error"]["message"] == "a sampling mask needs --logprobs-mode processed_logprobs"


def test_a_prompt_is_scored_as_score_does(server, tmp_path):
    """As lm-eval asks: token ids, echo, and nothing drawn."""
    ids = [18, 20, 22, 5, 6, 7]
    (tmp_path / "in.jsonl").write_text(json.dumps({"token_ids": ids}) + "\n")
    arguments = ["score", "--device", device.name(), "--model", MODEL, "--input", tmp_path / "in.jsonl"]
    assert cli.run([str(each) for each in [*arguments, "--output", tmp_path / "out.jsonl"]]) == 0
    expected = json.loads((tmp_path / "out.jsonl").read_text())["logprobs"]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = request(server, "/v1/completions", body).json
    found = reply["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None, *expected[-len(ids) + 1 :]]
    assert reply["usage"]["completion_tokens"] == 0 and len(found["tokens"]) == len(ids)
    assert request(server, "/v1/completions", body | {"stream": True}).json["error"]["param"] == "logprobs"


def test_no_seed_is_another_draw_each_time(server):
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
    assert (
        request(server, "/v1/completions", body).json["choices"]
        != request(server, "/v1/completions", body).json["choices"]
    )


def test_tokens_and_texts(server, tokenizer):
    reply = request(server, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json
    assert reply == {"tokens": [18, 19], "count": 2, "max_model_len": 256, "token_strs": ["a", "b"]}
    assert request(server, "/detokenize/", {"tokens": [18, 1, 19]}).json == {"prompt": "a<eos>b"}
    body = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    reply = request(server, "/tokenize", body).json
    expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, enable_thinking=False)
    assert reply["tokens"] == expected and reply["token_strs"] is None
    body = {"messages": [*CHAT, {"role": "assistant", "content": "it is "}], "continue_final_message": True}
    text = tokenizer.decode(request(server, "/tokenize", body).json["tokens"], skip_special_tokens=False)
    assert text == "u=what is 3+4?  a=it is "


def test_the_rest(server):
    assert request(server, "/health").raw == b"" and request(server, "/health/").status == 200
    assert request(server, "/ping").status == 200
    assert set(request(server, "/version").json) == {"version"}
    reply = request(server, "/v1/completions", {"prompt": PROMPT, "request_id": "of-body", "max_tokens": 1})
    assert reply.json["id"] == "cmpl-of-body" and reply.headers["x-request-id"] == "of-body"
