"""One server for all tests of a process: the tiny model on the cpu device, its engine in a thread."""

import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import pytest

from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import load_model
from rlnumba.runtime import device

MODEL = Path(__file__).parent.parent / "golden" / "tiny-qwen3"
TEMPLATE = Path(__file__).parent / "template.jinja"
NAME = "org/tiny"
ROWS = 4
QUEUED = 4


def pytest_collection_modifyitems(items):
    if device.name() == "sim":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="whole models take too long in the simulator"))


@contextlib.contextmanager
def running(engine, tokenizer, adapters=(), **settings):
    """A server over an engine, in threads of this process: its ServerProcess. adapters: those that it begins with."""
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    from rlnumba.serve.process import ServerProcess
    from rlnumba.serve.service import Parsers
    from rlnumba.serve.settings import ServerSettings
    from rlnumba.serve.watch.listen import bind

    settings = ServerSettings(**{"names": (NAME, "second"), "root": str(MODEL), "drain_timeout": 1.0} | settings)
    process = ServerProcess(settings, engine, Parsers(tokenizer), bind(settings.host, 0), adapters)
    started, failed = threading.Event(), []

    def run():
        try:
            process.run(started.set)
        except BaseException as error:
            failed.append(error)
            raise

    # A daemon: a server that does not end must not keep the tests' process.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert started.wait(60)
        yield process
    finally:
        process.ending.received, process.ending.since = 15, time.monotonic()
        thread.join(30)
    assert not thread.is_alive() and not failed


@pytest.fixture(scope="session")
def tokenizer():
    found = Tokenizer(MODEL)
    found.templates = {"default": TEMPLATE.read_text()}
    return found


@pytest.fixture(scope="session")
def server(tokenizer):
    """The ServerProcess of most tests: ROWS sequences run, QUEUED wait."""
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=ROWS, max_logprobs=-1))
    with running(engine, tokenizer, max_num_queued_reqs=QUEUED, max_body_bytes=1 << 20) as process:
        yield process


@pytest.fixture
def client(server):
    """The real client of the API."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


class Reply:
    """An answer: status, headers, and its body, as JSON where it is."""

    def __init__(self, response, skips=0):
        """skips: lines of the body that follow one that was read, which are left out."""
        self.status, self.headers = response.status, response.headers
        for _ in range(skips):
            response.readline()
        self.raw = response.read()

    @property
    def json(self):
        return json.loads(self.raw)

    @property
    def events(self):
        """The JSON of the events of a stream, which ends in [DONE]."""
        lines = [line for line in self.raw.decode().split("\n\n") if line and not line.startswith(":")]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def connect(process):
    return http.client.HTTPConnection("127.0.0.1", int(process.url.rpartition(":")[2]), timeout=300)


def request(process, path, body=None, method=None, headers=None):
    """The Reply to a request. body: JSON, or bytes as they are; None is a GET."""
    connection = connect(process)
    headers = {"content-type": "application/json"} | (headers or {})
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, data, {k: v for k, v in headers.items() if v is not None})
    try:
        return Reply(connection.getresponse())
    finally:
        connection.close()


def wait_until(condition, seconds=120):
    """Return once a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_idle(process):
    """Whether the engine has neither sequences nor blocks in use, and no place is booked."""
    state, service = process.engine_loop.state, process.service
    return state.num_running == state.num_waiting == state.used_blocks == service.admission.num_sequences == 0
