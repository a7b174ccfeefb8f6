"""The real process: its line on stdout, its end by a signal, and what keeps it from starting."""

import json
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rlnumba import cli
from rlnumba.config import EngineConfig
from rlnumba.engine.core import Engine
from rlnumba.model.transformer import load_model
from tests.serve.conftest import MODEL, Reply, connect, request, running, wait_until

LONG = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "n": 16, "seed": 1}


@pytest.fixture
def start():
    """Start `rlnumba serve` with options: the process, with its URL."""
    processes = []

    def start(*options):
        command = [sys.executable, "-m", "rlnumba", "--device", "cpu", "serve", "--model", str(MODEL), "--port", "0"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.stderr.read()
        return SimpleNamespace(process=process, url=url)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_signal_drains(start):
    server = start("--drain-timeout", "60")
    replies = []
    thread = threading.Thread(target=lambda: replies.append(request(server, "/v1/completions", LONG)))
    thread.start()
    wait_until(lambda: f'model_name="{MODEL}"}} 16.0' in request(server, "/metrics").raw.decode())
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: request(server, "/health").status == 503)
    refused = request(server, "/v1/completions", LONG | {"n": 1})
    assert refused.status == 503 and refused.headers["retry-after"]
    thread.join()
    assert replies[0].status == 200 and len(replies[0].json["choices"]) == 16
    assert server.process.wait(120) == 0
    assert "Traceback" not in server.process.stderr.read()


# Likeliest tokens, a grammar, filters with penalties, and texts that one step has the tokens of.
BODIES = [
    {"prompt": "ab", "max_tokens": 30, "n": 3, "seed": 3, "logprobs": 4, "echo": True},
    {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 12, "seed": 4, "top_p": 0.8, "presence_penalty": 0.5},
    {"prompt": "what", "max_tokens": 12, "seed": 5, "structured_outputs": {"regex": "[a-c]{4,9}"}},
]


def test_a_model_on_two_ranks_answers_as_on_one(start, server):
    parted = start("--tp", "2", "--max-num-seqs", "16", "--served-model-name", server.settings.name)
    for body in BODIES:
        expected, found = (request(each, "/v1/completions", body) for each in (server, parted))
        assert expected.status == found.status == 200, found.raw
        assert found.json["choices"] == expected.json["choices"]
        assert found.json["usage"] == expected.json["usage"]
    connection = connect(parted)
    body = json.dumps(LONG | {"stream": True, "n": 1, "stream_options": {"include_usage": True}})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    parted.process.send_signal(signal.SIGTERM)
    # All that has begun ends, on both ranks.
    assert Reply(response, skips=1).events[-1]["usage"]["completion_tokens"] == LONG["max_tokens"]
    connection.close()
    assert parted.process.wait(120) == 0
    assert "Traceback" not in parted.process.stderr.read()


def test_what_does_not_end_in_time_gets_an_error(tokenizer):
    engine = Engine(load_model(MODEL), tokenizer, EngineConfig(max_num_seqs=2))
    with running(engine, tokenizer, drain_timeout=0.0) as server:
        connection = connect(server)
        body = json.dumps(LONG | {"stream": True, "n": 8})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        server.ending.on_signal(signal.SIGINT, None)
        error = Reply(response, skips=1).events[-1]["error"]
        assert error["type"] == "server_error" and "stopping" in error["message"]
        connection.close()


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    process = pytest.importorskip("rlnumba.serve.process")
    codes, now = [], [0.0]
    monkeypatch.setattr(process.os, "_exit", codes.append)
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    ending = process.Ending()
    ending.on_signal(signal.SIGTERM, None)
    # `timeout` sends its signal twice.
    ending.on_signal(signal.SIGTERM, None)
    assert (ending.received, codes) == (signal.SIGTERM, [])
    now[0] = 1.0
    ending.on_signal(signal.SIGINT, None)
    assert codes == [130]


def test_what_keeps_a_server_from_starting(capsys, monkeypatch, tmp_path):
    def fails(code, message, *options):
        assert cli.run(["serve", *options]) == code
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("device ")]
        assert line.startswith("rlnumba: ") and message in line

    monkeypatch.delenv("RLNUMBA_API_KEY", raising=False)
    model = ["--model", str(MODEL)]
    fails(2, "--api-key", *model, "--host", "0.0.0.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        fails(1, "Address already in use", *model, "--port", str(taken.getsockname()[1]))
    fails(2, "no such model folder", "--model", str(tmp_path / "none"))
    fails(2, "No such file", *model, "--chat-template", str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    fails(2, "bad.jinja", *model, "--chat-template", str(tmp_path / "bad.jinja"))
    fails(2, "positions", *model, "--max-model-len", "9999")
    whole = "needs a model that one process has whole, without --tp"
    fails(2, f"--dev-endpoints {whole}", *model, "--tp", "2", "--dev-endpoints")
    fails(2, f"--lora-modules {whole}", *model, "--tp", "auto", "--lora-modules", "a=b")
    fails(2, "tensor_parallel_size 8 must divide", *model, "--tp", "8")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "rlnumba.serve.process", raising=False)
    fails(2, "rlnumba[serve]", *model)
