"""Too many requests, clients that hang up or do not read, and the counts of it all."""

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from rlnumba.serve.jobs import Delta, merged
from rlnumba.serve.settings import ServerSettings
from tests.serve.conftest import QUEUED, ROWS, connect, is_idle, request, wait_until

LONG = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "seed": 1}


def open_stream(process, body, path="/v1/completions"):
    """(connection, its response) of a stream whose first piece has come."""
    connection = connect(process)
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return connection, response


def hang_up(stream):
    connection, response = stream
    response.close()
    connection.close()


def test_more_than_may_wait_is_refused_and_a_hang_up_makes_room(server):
    wait_until(lambda: is_idle(server))
    stream = open_stream(server, LONG | {"n": ROWS + QUEUED})
    reply = request(server, "/v1/completions", LONG | {"max_tokens": 1})
    assert reply.status == 429 and reply.headers["retry-after"] == "1"
    assert reply.json["error"]["type"] == "rate_limit_error"
    before = server.service.metrics.cancelled
    hang_up(stream)
    wait_until(lambda: is_idle(server))
    assert server.service.metrics.cancelled == before + 1
    assert request(server, "/v1/completions", LONG | {"max_tokens": 1}).status == 200
    # More than there is room for at any time.
    assert request(server, "/v1/completions", LONG | {"n": ROWS + QUEUED + 1}).status == 429


def test_hang_ups_at_any_time_leave_nothing_behind(server, rng):
    """Of streams and of plain answers, before and after their first token."""
    wait_until(lambda: is_idle(server))

    def ask(seconds, path, streams):
        connection = connect(server)
        body = LONG | {"messages": [{"role": "user", "content": "a"}], "token_ids": [5, 6], "stream": streams}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        time.sleep(seconds)
        connection.close()

    paths = ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"]
    threads = [
        threading.Thread(target=ask, args=(float(rng.uniform(0, 0.2)), paths[i % 3], i % 2 == 0)) for i in range(24)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: is_idle(server))
    assert not server.engine_loop.groups and not server.engine_loop.sent and not server.service.num_active
    assert server.service.admission.num_waiting_tokens == 0


def test_a_hang_up_in_the_middle_of_a_body_is_no_failure(server, capsys):
    before = server.service.metrics.cancelled
    connection = connect(server)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "100")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    wait_until(lambda: server.service.metrics.cancelled == before + 1)
    wait_until(lambda: not server.service.num_active)
    assert not capsys.readouterr().err


def test_many_clients_each_get_an_answer(server):
    wait_until(lambda: is_idle(server))
    found = []

    def ask():
        reply = request(server, "/v1/completions", LONG | {"max_tokens": 4})
        found.append((reply.status, reply.headers["retry-after"], len(reply.json.get("choices", ()))))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and set(found) <= {(200, None, 1), (429, "1", 0)} and (200, None, 1) in found


async def never(*message):
    await asyncio.sleep(60)


def test_a_client_that_reads_nothing_is_dropped():
    """Whether the piece that it does not read is a token or a comment."""
    streams = pytest.importorskip("rlnumba.serve.protocol.streams")
    service = SimpleNamespace(settings=ServerSettings(("a",), "", unread_s=0.01, heartbeat_s=0.01))
    for sends_token in (True, False):
        stream = streams.EventStream(service, None, None)
        stream.sent = 0.0
        work = stream._send(never, {}) if sends_token else never()
        with pytest.raises(streams.ClientGone):
            asyncio.run(streams.until_gone(never, work, stream._watch(never)))


def test_a_stream_without_a_token_sends_comments():
    streams, sent = pytest.importorskip("rlnumba.serve.protocol.streams"), []
    service = SimpleNamespace(settings=ServerSettings(("a",), "", heartbeat_s=0.02))

    async def send(message):
        sent.append(message.get("body"))

    async def a_second_without_a_token():
        stream = streams.EventStream(service, None, None)
        watch = asyncio.ensure_future(stream._watch(send))
        await asyncio.sleep(0.05)
        assert not sent  # before the answer has begun
        await stream._send(send, streams.body_of(b"first"))
        while len(sent) < 3:
            await asyncio.sleep(0.01)
        watch.cancel()

    asyncio.run(asyncio.wait_for(a_second_without_a_token(), 20))
    assert sent[:3] == [b"first", streams.COMMENT, streams.COMMENT]


def test_a_scrape_is_what_was_sent(server):
    def scrape():
        text = request(server, "/metrics").raw.decode()
        return {name: float(value) for name, value in re.findall(r"(?m)^([^#\s]+) (\S+)$", text)}

    wait_until(lambda: is_idle(server))
    before, labels = scrape(), '{engine="0",model_name="org/tiny"}'
    bodies = [LONG | {"max_tokens": 5, "n": 2}, LONG | {"max_tokens": 7, "stream": True}, LONG | {"max_tokens": 1}]
    sent = [request(server, "/v1/completions", body).status for body in bodies]
    assert sent == [200, 200, 200]
    wait_until(lambda: is_idle(server))
    after = scrape()

    def change(name):
        return after[name] - before[name]

    assert change(f"vllm:generation_tokens_total{labels}") == 10 + 7 + 1
    assert change(f"vllm:prompt_tokens_total{labels}") == 6
    assert change('vllm:request_success_total{engine="0",finished_reason="length",model_name="org/tiny"}') == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert change(f"vllm:{name}_seconds_count{labels}") == 3
        assert change(f'vllm:{name}_seconds_bucket{{engine="0",le="+Inf",model_name="org/tiny"}}') == 3
    assert change(f"vllm:inter_token_latency_seconds_count{labels}") == 8 + 6
    assert change(f"vllm:prefix_cache_queries_total{labels}") == 2 * 4
    assert after[f"vllm:kv_cache_usage_perc{labels}"] == after[f"vllm:num_requests_running{labels}"] == 0
    assert any(name.startswith("vllm:cache_config_info{") and 'block_size="16"' in name for name in after)
    assert f"rlnumba:requests_rejected_total{labels}" in after


def test_deltas_of_one_choice_are_joined():
    deltas = merged([Delta(1, [5], [-1.0]), Delta(0, [6], [-2.0]), Delta(1, [7], [-3.0], "end")])
    assert deltas == [Delta(1, [5, 7], [-1.0, -3.0], "end"), Delta(0, [6], [-2.0])]
