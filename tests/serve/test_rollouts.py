"""Turns of rollouts over HTTP, and their conversations: an agent's requests are drawn by a run's engine."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.config import EngineConfig
from rlnumba.data.prompts import Prompt
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.model import transformer
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device
from rlnumba.sampling.samples import Sample
from rlnumba.trainers.rollout import Rollouts
from tests.serve.conftest import MODEL, request

LIMIT = 24


@pytest.fixture
def rollout_server(tokenizer):
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    from rlnumba.serve.rollouts import RolloutServer

    server = RolloutServer("policy", tokenizer, 96)
    yield server
    server.close()


def post(server, session, context, max_tokens=6):
    """The Reply to a request as renderers.client makes it."""
    headers = {"authorization": f"Bearer {server.key}", "x-session-id": session}
    params = {"stop_token_ids": [7], "logprobs": 1, "skip_special_tokens": False, "max_tokens": max_tokens}
    body = {"model": "policy", "token_ids": context, "sampling_params": params | {"routed_experts_prompt_start": 3}}
    return request(server, "/inference/v1/generate", body, headers=headers)


def play(server, session):
    """An agent with two conversations, which begin alike, and a third one: {name: the replies}, and a refusal."""
    replies, first = {name: [] for name in "abc"}, {"a": [5, 6, 8, 9], "b": [5, 6, 8, 9], "c": [10, 11, 12]}
    context = {name: list(ids) for name, ids in first.items()}
    for name in "abcac":
        reply = post(server, session, context[name]).json
        assert "choices" in reply, reply
        replies[name].append((len(context[name]), reply["choices"][0]))
        context[name] += [*reply["choices"][0]["token_ids"], 20, 21]
    return replies, post(server, session, context["a"] + [30] * LIMIT)


def episode_of(server, executor, played):
    from rlnumba.environments.tasksets import Conversations

    async def episode(rollout):
        session = f"trace-{rollout.index}"
        turns, conversations = server.open(session), Conversations(rollout)
        playing = executor.submit(play, server, session)
        playing.add_done_callback(lambda _: turns.end())
        try:
            while (turn := await rollout.wait(turns.next())) is not None:
                await conversations.answer(turn)
        finally:
            server.forget([session])
        played[rollout.index] = playing.result()
        return rollout.completion_of(conversations.forks, "played")

    return episode


def test_requests_of_agents_are_drawn_as_turns(tokenizer, rollout_server):
    llm, played = LLM(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=4, max_model_len=96)), {}
    prompt, params = Prompt("", [1], {}, ""), SamplingParams(n=2, max_tokens=LIMIT, seed=3)
    with ThreadPoolExecutor(2) as executor:
        arguments = [prompt.prompt_token_ids], [params], [episode_of(rollout_server, executor, played)]
        (output,) = llm.generate_episodes(*arguments)
        (repeated,) = llm.generate_episodes(*arguments)
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in repeated.completions]
    a, b = played[0][0]["a"][0][1], played[0][0]["b"][0][1]
    # Conversations that begin alike have draws of their own, and so have the rollouts of a group.
    assert a["token_ids"] != b["token_ids"]
    assert played[0][0]["a"][0][1]["token_ids"] != played[1][0]["a"][0][1]["token_ids"]
    for completion in output.completions:
        replies, refused = played[completion.index]
        assert refused.status == 400 and refused.json["error"]["code"] == "context_length_exceeded"
        drawn = [
            (token, entry["logprob"])
            for name in "abc"
            for _, choice in replies[name]
            for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
        ]
        assert [token for token, _ in drawn] == completion.drawn("token_ids").tolist()
        assert [logprob for _, logprob in drawn] == completion.drawn("logprobs").tolist()
        assert completion.episode.num_turns == 5 and completion.episode.value == "played"
    check_rows(llm.model, output.completions[0], prompt)


def check_rows(model, completion, prompt):
    """Each conversation is a sequence of its own in training, whose log-probs are the sampler's."""
    samples = [Sample(prompt, completion, np.zeros(1), 1.0, {}, advantage=0.5)] * 2
    rollouts = Rollouts.of(samples, False)
    lengths = completion.episode.row_lengths
    assert rollouts.num_sequences == 2 and rollouts.row_lengths.tolist() == lengths * 2 and len(lengths) == 3
    for part in (rollouts, rollouts.part(1, 1), rollouts.ordered([1, 0]), Rollouts.restored(rollouts.state())):
        batch = part.micro_batch()
        assert np.diff(batch.sequences["cu_seqlens"]).tolist() == lengths * part.num_sequences
        assert np.diff(batch.sequences["completion_bounds"]).tolist() == [completion.num_drawn] * part.num_sequences
        assert batch.targets["target_ids"].tolist() == completion.drawn("token_ids").tolist() * part.num_sequences
    part = rollouts.part(0, 1)
    sequences = np.split(part.token_ids, np.cumsum(lengths)[:-1])
    scored = device.to_host(transformer.score(model, transformer.pack([s.tolist() for s in sequences])).logprobs)
    np.testing.assert_array_equal(scored[part.targets], part.rollout_logprobs)


def test_who_may_ask_for_turns(rollout_server):
    reply = post(rollout_server, "unknown", [5])
    assert reply.status == 404 and "X-Session-ID" in reply.json["error"]["message"]
    rollout_server.open("known")
    assert post(SimpleNamespace(url=rollout_server.url, key="wrong"), "known", [5]).status == 401
    headers = {"authorization": f"Bearer {rollout_server.key}", "x-session-id": "known"}
    body = {"token_ids": [5], "sampling_params": {"n": 2}}
    assert request(rollout_server, "/inference/v1/generate", body, headers=headers).status == 400
    card = request(rollout_server, "/v1/models", headers=headers).json["data"][0]
    assert card["id"] == "policy" and card["max_model_len"] == 96
