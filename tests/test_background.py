"""Calls in the background: in order, bounded, and errors that reach the thread that submits."""

import threading

import pytest

from rlnumba.reporting import background
from rlnumba.reporting.background import Background


def test_calls_are_made_in_order_in_one_other_thread():
    made, threads = [], set()

    def call(i):
        threads.add(threading.current_thread())
        made.append(i)

    thread = Background("test")
    for i in range(300):
        thread.submit(call, i)
    thread.flush()
    assert made == list(range(300)) and len(threads) == 1 and threading.current_thread() not in threads
    thread.submit(call, 300)
    thread.close()
    assert made[-1] == 300 and not threads.pop().is_alive()


def test_submit_waits_only_where_too_many_calls_do(monkeypatch):
    monkeypatch.setattr(background, "MOST_WAITING", 4)
    thread, gate, made = Background("test"), threading.Event(), []
    # These do not wait, or would for ever.
    thread.submit(gate.wait)
    for i in range(4):
        thread.submit(made.append, i)
    assert made == []
    threading.Timer(0.05, gate.set).start()
    thread.submit(made.append, 4)
    # The queue had no place before the gate was open.
    assert gate.is_set()
    thread.close()
    assert made == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", ["flush", "close", "submit"])
def test_the_first_error_is_raised_once_and_ends_the_calls(end):
    thread, made = Background("test"), []

    def fails():
        raise OSError(28, "No space left on device", "metrics.jsonl")

    thread.submit(made.append, 1)
    thread.submit(fails)
    if end != "submit":
        thread.submit(made.append, 2)
    else:
        # What was submitted has been called.
        thread._calls.join()
    with pytest.raises(OSError, match="metrics.jsonl"):
        thread.submit(made.append, 2) if end == "submit" else getattr(thread, end)()
    thread.close()
    assert made == [1]


def test_an_empty_one_needs_no_thread():
    thread = Background("test")
    thread.flush()
    thread.close()
    assert thread._thread is None
