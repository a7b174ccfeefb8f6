"""Environments that a server of OpenEnv has: `factory = "openenv:URL"`.

    make = environment_class("http://127.0.0.1:8000", key)     a class whose methods are the server's tools
    environment = make()                                       a session of its own, over a websocket

The server has a session for each connection, with messages of JSON: `reset` and `step`, whose answers have the
observation, the reward and whether the episode is over. The tools are those of its `list_tools` (MCP), and their
schemas are its own. The reward is that of the last answer that had one.
"""

import contextlib
import json

from rlnumba.environments.schema import set_schema
from rlnumba.errors import UserError, shown

PREFIX = "openenv:"
# Seconds for the connection of a session, and for an answer: a thread that a call has abandoned ends after them.
CONNECT_S, ANSWER_S = 10, 600
# Observations may be pages or pictures.
MAX_BYTES = 100 << 20


def environment_class(url, key):
    """The class of the environments of a server. key: begins the message of a UserError, which is raised where the
    server cannot be reached, or has no tools."""
    address = websocket_url(url, key)
    try:
        session = Session(address, key)
        try:
            tools = session.step({"type": "list_tools"})["observation"].get("tools")
        finally:
            session.close()
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{key}: {url} is no server of OpenEnv that can be reached: {_one_line(error)}") from error
    if not tools:
        raise UserError(f"{key}: {url}: the server has no tools")
    methods = {tool["name"]: _method(tool) for tool in tools}
    if unusable := sorted(name for name in methods if name.startswith("_") or name in vars(RemoteEnvironment)):
        raise UserError(f"{key}: {url}: a tool cannot have the name {', '.join(unusable)}")
    return type("OpenEnv", (RemoteEnvironment,), {"_address": address, "_key": key, **methods})


def websocket_url(url, key):
    """The address of a server's websocket. Raises UserError for a URL that is none."""
    scheme, found, rest = url.strip().rstrip("/").partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if not found or scheme not in schemes or not rest:
        raise UserError(f"{key}: openenv: needs a URL, http://host:port, got {shown(url)}")
    return f"{schemes[scheme]}://{rest.removesuffix('/ws')}/ws"


class Session:
    """A connection to a server. Raises UserError without the package, ConnectionError where none can be made."""

    def __init__(self, address, key):
        try:
            from websockets.exceptions import WebSocketException
            from websockets.sync.client import connect
        except ModuleNotFoundError as error:
            raise UserError(f"{key}: openenv: needs {error.name}; pip install 'rlnumba[openenv]'") from None
        try:
            # A proxy that the surroundings name is not for a server that the run file names.
            opened = connect(address, open_timeout=CONNECT_S, max_size=MAX_BYTES, proxy=None)
            self.stack = contextlib.ExitStack()
            self.socket = self.stack.enter_context(opened)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"no connection to {address}: {_one_line(error)}") from error

    def ask(self, kind, data):
        """The data of the answer to a message: {"observation", "reward", "done"}. Raises RuntimeError for an error that
        the server reports."""
        self.socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self.socket.recv(ANSWER_S))
        if not isinstance(answer, dict):
            raise ValueError("an answer that is no object")
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            raise RuntimeError(f"{found.get('message', 'an error without a message')} ({found.get('code', 'no code')})")
        return found

    def step(self, action):
        return self.ask("step", action)

    def close(self):
        self.stack.close()


class RemoteEnvironment:
    """An episode on the server; a subclass has its address and, as methods, its tools."""

    _address = _key = None

    def __init__(self):
        self._session, self._reward = Session(self._address, self._key), None

    def reset(self, seed=None, episode_id=None, **row):
        """Begin an episode with the columns of a row: the text of the first observation, None without any."""
        data = {"seed": seed, "episode_id": episode_id} | {name: row[name] for name in row if name != "prompt"}
        self._reward = None
        return observed(self._noted(self._session.ask("reset", data)))

    def get_reward(self):
        """The reward of the last step that had one."""
        return self._reward

    def close(self):
        """End the session."""
        self._session.close()

    def _call(self, name, arguments):
        found = self._noted(self._session.step({"type": "call_tool", "tool_name": name, "arguments": arguments}))
        if error := found.get("error"):
            raise RuntimeError(error.get("message") if isinstance(error, dict) else str(error))
        result = found.get("result", found)
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            if result.get("is_error") or result.get("isError"):
                raise RuntimeError(" ".join(str(block.get("text", "")) for block in result["content"]))
            return result["content"]
        return result

    def _noted(self, answer):
        """The observation of an answer, whose reward is noted."""
        if answer.get("reward") is not None:
            self._reward = answer["reward"]
        return answer.get("observation") or {}


def observed(observation):
    """The text of a first observation: its only field if that is a text, else JSON of its fields; None without any."""
    fields = {name: value for name, value in observation.items() if name != "metadata" and value not in (None, "")}
    if not fields:
        return None
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)


def _method(tool):
    """A method that calls a tool of the server, with the server's schema."""
    name = tool["name"]

    def call(self, **arguments):
        return self._call(name, arguments)

    call.__name__ = name
    call.__qualname__ = f"OpenEnv.{name}"
    parameters = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    schema = {"name": name, "description": tool.get("description") or "", "parameters": parameters}
    set_schema(call, {"type": "function", "function": schema})
    return call


def _one_line(error):
    return " ".join(str(error).split()) or type(error).__name__
