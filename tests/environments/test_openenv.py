"""Environments of a server of OpenEnv: its tools and schemas, observations, rewards, and a server that is gone."""

import json
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rlnumba.config import EnvironmentConfig
from rlnumba.environments.agents import load_agents
from rlnumba.environments.calls import ToolCaller
from rlnumba.environments.openenv import RemoteEnvironment, environment_class, observed, websocket_url
from rlnumba.environments.pool import EnvironmentFailure, EnvironmentPool
from rlnumba.errors import UserError
from rlnumba.model.tokenizer import Tokenizer
from tests.environments.scripted import agents_with, play
from tests.environments.test_episode import MODEL, call, episode_of

server_module = pytest.importorskip("websockets.sync.server")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"default": 2, "type": "integer"}},
    "required": ["a"],
}
TOOLS = [
    {"name": "multiply", "description": "Multiply two integers.", "input_schema": PARAMETERS},
    {"name": "fail", "description": "", "input_schema": {"type": "object", "properties": {}}},
]


def blocks(text, is_error=False):
    """The result of a tool as MCP has it."""
    return {"content": [{"type": "text", "text": text}], "is_error": is_error}


def session(connection, log, tools):
    """One session: the messages that OpenEnv 0.3 reads and writes. Each product is the reward."""
    for message in connection:
        kind, data = json.loads(message)["type"], json.loads(message).get("data", {})
        log.append((kind, data))
        reward, observation = None, {"tool_name": data.get("tool_name"), "result": None, "error": None}
        if kind == "reset":
            observation = {"text": f"asked {data['question']}"} if "question" in data else {}
        elif data["type"] == "list_tools":
            observation = {"tools": tools}
        elif data["tool_name"] == "multiply":
            product = data["arguments"]["a"] * data["arguments"].get("b", 2)
            observation["result"], reward = blocks(str(product)), float(product)
        elif data["arguments"].get("how") == "code":
            connection.send(json.dumps({"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}))
            continue
        elif data["arguments"].get("how") == "gone":
            return
        elif data["arguments"].get("how") == "error":
            observation["error"] = {"error_type": "execution_error", "message": "an error"}
        else:
            observation["result"] = blocks("no", True)
        answer = {"observation": observation, "reward": reward, "done": False}
        connection.send(json.dumps({"type": "observation", "data": answer}))


@contextmanager
def served(tools=TOOLS):
    """(URL, messages that came) of a server."""
    log = []
    with server_module.serve(lambda connection: session(connection, log, tools), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}/", log
        server.shutdown()
        thread.join()


@pytest.fixture
def caller():
    made = ToolCaller(num_workers=2, timeout_s=5.0)
    yield made
    made.close()


def test_tools_rewards_and_errors_are_the_servers(caller):
    with served() as (url, log):
        made = environment_class(url, "environment.factory")
        pool = EnvironmentPool({None: made}, caller, 5.0)
        one, other = pool.take(None).result(), pool.take(None).result()
        assert one.reset({"prompt": "p", "question": "q"}, 3, "e").result() == "asked q"
        assert log[-1] == ("reset", {"seed": 3, "episode_id": "e", "question": "q"})
        assert other.reset({}, 4, "f").result() is None and one.get_reward().result() is None
        how = [one.call("fail", {"how": each}) for each in ("code", "error", "")]
        found = caller.submit([one.call("multiply", {"a": 3}), *how, one.call("multiply", {"a": 4, "b": 5})]).result()
        assert [result.content for result in found] == [
            *("6", "{'error': 'broken (EXECUTION_ERROR)'}", "{'error': 'an error'}", "{'error': 'no'}", "20"),
        ]
        assert [result.failed for result in found] == [False, True, True, True, False]
        # A session each; the reward is that of the last step with one, and a new episode has none.
        assert one.get_reward().result() == 20.0 and other.get_reward().result() is None
        assert one.reset({}, 3, "g").result() is None and one.get_reward().result() is None
        assert caller.submit([one.call("fail", {"how": "gone"})]).result()[0].failed and one.is_lost
        pool.give_back(one)
        pool.give_back(other)
        assert pool.take(None).result() is other
        pool.close()


def test_a_run_finds_its_environment_on_a_server():
    """Schemas equal the server's, and an episode calls its tool."""
    tokenizer = Tokenizer.from_folder(MODEL)
    with served() as (url, log):
        sections = vars(agents_with(tokenizer).run)
        given = {"environment": EnvironmentConfig(factory=f"openenv:{url}"), "has_episodes": True}
        given |= {"deploy": SimpleNamespace(num_infer_gpus=0), "rollout": SimpleNamespace(func=None)}
        given |= {"data": SimpleNamespace(chat_template_kwargs={}, train="rows.jsonl", has_tasks=False)}
        given |= {"rewards": SimpleNamespace(funcs=[], timeout=5.0)}
        agents = load_agents(SimpleNamespace(**sections | given), tokenizer)
        assert agents.reward_classes == ["OpenEnv"]
        assert agents.toolsets[None].schemas == [
            {
                "type": "function",
                "function": {"name": "fail", "description": "", "parameters": TOOLS[1]["input_schema"]},
            },
            {
                "type": "function",
                "function": {"name": "multiply", "description": "Multiply two integers.", "parameters": PARAMETERS},
            },
        ]
        completion, _ = play(tokenizer, episode_of(agents), [call(), "12"], max_tokens=200)
        messages = completion.episode.value.completion
        assert [message["content"] for message in messages if message["role"] == "tool"] == ["12"]
        assert ("step", {"type": "call_tool", "tool_name": "multiply", "arguments": {"a": 3, "b": 4}}) in log
        agents.close()


def test_servers_that_cannot_be_used_are_named(caller):
    with served() as (url, _):
        made = environment_class(url, "environment.factory")
    for each in (url, "127.0.0.1:80", "ftp://a"):
        with pytest.raises(
            UserError, match=r"^environment.factory: (openenv: needs a URL|http://127.0.0.1:\d+/ is no s)"
        ):
            environment_class(each, "environment.factory")
    with pytest.raises(EnvironmentFailure, match=r"^environment: OpenEnv\(\) raised ConnectionError: no connection to"):
        EnvironmentPool({None: made}, caller, 5.0).take(None).result()
    with served([]) as (url, _), pytest.raises(UserError, match=f"^k: {url}: the server has no tools"):
        environment_class(url, "k")
    tools = [TOOLS[0] | {"name": name} for name in ("reset", "_hidden", "fine")]
    with served(tools) as (url, _), pytest.raises(UserError, match="a tool cannot have the name _hidden, reset$"):
        environment_class(url, "k")


def test_addresses_and_observations():
    assert websocket_url("https://a.example/x/", "k") == "wss://a.example/x/ws"
    assert websocket_url("ws://127.0.0.1:8000/ws", "k") == "ws://127.0.0.1:8000/ws"
    assert observed({"metadata": {"a": 1}, "text": None}) is None
    assert observed({"echoed": "é", "metadata": {}}) == "é"
    assert observed({"board": [0, 1], "text": "é"}) == '{"board": [0, 1], "text": "é"}'


def remote(*answers):
    """A RemoteEnvironment whose session gives these answers to its steps."""
    found = RemoteEnvironment.__new__(RemoteEnvironment)
    left = list(answers)
    found._session, found._reward = SimpleNamespace(step=lambda action: left.pop(0)), None
    return found


@pytest.mark.parametrize(
    "observation, said",
    [
        ({"error": "too large"}, "too large"),
        ({"error": {"message": "too small"}, "result": 1}, "too small"),
        ({"result": {"content": [{"text": "a"}, {"text": "b"}, {}], "is_error": True}}, "a b "),
        ({"result": {"content": [], "isError": True}}, ""),
    ],
)
def test_errors_of_tools(observation, said):
    with pytest.raises(RuntimeError) as raised:
        remote({"observation": observation})._call("t", {})
    assert str(raised.value) == said


def test_results_of_tools_and_their_rewards():
    environment = remote({"observation": {"result": 3}, "reward": 0.0}, {"observation": {"text": "t"}}, {})
    assert environment._call("t", {}) == 3 and environment.get_reward() == 0.0
    assert environment._call("t", {}) == {"text": "t"} and environment._call("t", {}) == {}
    # A step without a reward leaves that of the last one.
    assert environment.get_reward() == 0.0
    content = {"content": [{"text": "a"}], "is_error": False}
    assert remote({"observation": {"result": content}})._call("t", {}) == [{"text": "a"}]


def test_the_package_and_the_key_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(UserError, match=r"^the key: openenv: needs .*; pip install 'rlnumba\[openenv\]'$"):
        environment_class("http://127.0.0.1:1", "the key")
