"""The hand-over from the engine's thread to the server's: what is late goes together, and streams leave time."""

import threading

import pytest

from tests.serve.conftest import is_idle, request, wait_until

BODY = {"prompt": "ab", "max_tokens": 8, "ignore_eos": True, "seed": 1, "return_token_ids": True, "logprobs": 0, "n": 2}


def test_tokens_that_wait_for_the_server_are_one_piece_of_each_choice(server, monkeypatch):
    """An engine that has ended meanwhile hands them over as soon as the server is ready, before its own next look."""
    whole = request(server, "/v1/completions", BODY).json["choices"]
    thread, found = server.thread, []
    wait_until(lambda: is_idle(server) and thread.is_ready)
    thread.is_ready = False
    client = threading.Thread(target=lambda: found.append(request(server, "/v1/completions", BODY | {"stream": True})))
    with monkeypatch.context() as patch:
        patch.setattr("rlnumba.serve.engine_loop.IDLE_S", 60)
        client.start()
        wait_until(lambda: len(server.engine_loop.outgoing) == 6 and server.engine_loop.episodes.is_idle)
        assert not thread.events and not found
        thread.loop.call_soon_threadsafe(thread._get_ready)
        client.join(20)
    server.engine_loop.go_on()
    assert found
    chunks = [chunk["choices"][0] for chunk in found[0].events]
    assert [chunk["index"] for chunk in chunks] == [0, 1]
    for chunk, choice in zip(chunks, whole, strict=True):
        assert {key: chunk[key] for key in ("text", "token_ids", "logprobs", "finish_reason")} == {
            key: choice[key] for key in ("text", "token_ids", "logprobs", "finish_reason")
        }


def test_what_comes_while_the_server_is_busy_is_called_once_it_is_ready():
    """So is what comes after a function that raised."""
    process = pytest.importorskip("rlnumba.serve.process")
    from rlnumba.serve.watch.listen import bind

    async def app(scope, receive, send):
        pass

    may_end, ready, calls = threading.Event(), threading.Semaphore(0), []
    thread = process.ServerThread(app, bind("127.0.0.1", 0), ready.release)
    thread.start()

    def work(number):
        calls.append(number)
        assert may_end.wait(20)

    try:
        thread.deliver([(work, 1)])
        wait_until(lambda: calls == [1])
        thread.deliver([(calls.append, 2)])
        thread.deliver([(calls.append, 3)])
        assert not thread.is_ready and calls == [1]
        may_end.set()
        wait_until(lambda: calls == [1, 2, 3])
        assert ready.acquire(timeout=10)
        # A function that raises leaves the thread as it was.
        thread.deliver([(lambda _: 1 / 0, None)])
        wait_until(lambda: thread.is_ready)
        thread.deliver([(calls.append, 0)])
        wait_until(lambda: calls[-1] == 0)
    finally:
        thread.stop()


def test_requests_that_arrive_together_begin_in_one_step(server, monkeypatch):
    """An idle engine waits for those that are being read, and not for ever."""
    wait_until(lambda: is_idle(server) and not server.service.num_active)
    loop, begun, step = server.engine_loop, [], server.engine_loop._step
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    path, state = "/inference/v1/generate", {}
    monkeypatch.setattr(loop, "_step", lambda: (begun.append(len(loop.groups)), step()))
    server.service.begin_arrival(state)
    try:
        assert request(server, path, body).status == 200  # though one is being read all the time
        wait_until(lambda: is_idle(server))
        begun.clear()
        clients = [threading.Thread(target=request, args=(server, path, body)) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr("rlnumba.serve.engine_loop.MAX_GATHER_S", 60)
            for client in clients:
                client.start()
            wait_until(lambda: len(loop.groups) == 3)
            assert not begun
            server.service.end_arrival(state)
            for client in clients:
                client.join(20)
        assert begun[0] == 3 and server.service.num_arriving == 0
    finally:
        server.service.end_arrival(state)
