"""Tool calls: what runs where and when, time limits, and what becomes of every kind of result."""

import asyncio
import functools
import threading
import time

import pytest

from rlnumba.environments import calls
from rlnumba.environments.calls import ToolCaller, ToolRun, ToolThread, content_of, in_unicode, is_async
from rlnumba.errors import UserError


@pytest.fixture
def caller():
    made = ToolCaller(num_workers=64, timeout_s=5.0)
    yield made
    made.close()


def executed(caller, *given):
    """The CallResults of (function, arguments)."""
    listed = [ToolRun(getattr(function, "__name__", "f"), function, arguments) for function, arguments in given]
    return caller.submit(listed).result(30)


def add(a, b):
    return a + b


async def add_later(a, b):
    await asyncio.sleep(0)
    return a + b


class Adder:
    """An async and a sync method, and an async __call__."""

    async def later(self, a, b):
        return a + b

    def now(self, a, b):
        return a + b

    async def __call__(self, a, b):
        return a + b


@pytest.mark.parametrize(
    "function, expected",
    [
        (add, False),
        (add_later, True),
        (Adder().later, True),
        (Adder().now, False),
        (Adder(), True),
        (functools.partial(add_later, 1), True),
        (functools.partial(Adder(), 1), True),
        (functools.partial(functools.partial(add, 1)), False),
    ],
)
def test_what_is_async(caller, function, expected):
    assert is_async(function) == expected
    arguments = {"b": 2} if isinstance(function, functools.partial) and function.args else {"a": 1, "b": 2}
    (result,) = executed(caller, (function, arguments))
    assert (result.content, result.failed) == ("3", False)


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "None"),
        ("a", "a"),
        (1.5, "1.5"),
        ([], "[]"),
        ([1, "a"], "[1, 'a']"),
        ({"a": [1]}, "{'a': [1]}"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": 1}], "[{'type': 1}]"),
        ([{"name": "a"}], "[{'name': 'a'}]"),
    ],
)
def test_text_of_a_result(value, text):
    assert content_of(value) == text


HALVES = [
    ("a\udcff.txt", "a\ufffd.txt"),
    ("\ud83d", "\ufffd"),
    ("\ud83db", "\ufffdb"),
    ("\ud83d\ude00b", "\U0001f600b"),
    ("\ude00\ud83d", "\ufffd\ufffd"),
    ("\ufeffé\r\n\0", "\ufeffé\r\n\0"),
]


@pytest.mark.parametrize("text, expected", HALVES)
def test_results_are_unicode(caller, text, expected):
    """No tokenizer takes half of a surrogate pair, which the name of a file may have."""
    assert in_unicode(text) == expected

    async def later():
        return [{"type": "text", "text": text}]

    assert [result.content for result in executed(caller, (lambda: text, {}), (later, {}))] == [expected] * 2


class Unprintable:
    def __str__(self):
        raise ValueError("no text")


def fails():
    raise KeyError("k")


def exits():
    raise SystemExit(3)


async def fails_later():
    raise ValueError("late")


def cancels():
    raise asyncio.CancelledError("gone")


async def cancels_later():
    raise asyncio.CancelledError("gone")


async def exits_in_a_task():
    async def leave():
        raise SystemExit(3)

    await asyncio.create_task(leave())


def returns_coroutine():
    return add_later(1, 2)


@pytest.mark.parametrize(
    "function, arguments, error",
    [
        (fails, {}, "'k'"),
        (exits, {}, "3"),
        (fails_later, {}, "late"),
        (cancels, {}, "gone"),
        (cancels_later, {}, "gone"),
        (exits_in_a_task, {}, "3"),
        (Unprintable, {}, "no text"),
        (add, {"a": 1}, "add() missing 1 required positional argument: 'b'"),
        (add, {"a": 1, "b": 2, "c": 3}, "add() got an unexpected keyword argument 'c'"),
        (add_later, {"a": 1}, "add_later() missing 1 required positional argument: 'b'"),
        (add, [1, 2], "arguments must be an object, got list"),
        (add, "1", "arguments must be an object, got str"),
        (returns_coroutine, {}, "a sync function returned an awaitable: declare it with async def"),
        (lambda: [{"type": "image", "image": 1}], {}, "the tool returned an image, and the model reads text alone"),
    ],
)
def test_a_failure_is_a_result(caller, function, arguments, error):
    failed, after = executed(caller, (function, arguments), (add, {"a": 1, "b": 1}))
    assert failed.failed and failed.content == str({"error": error})
    assert not failed.timed_out and not failed.unknown
    assert after.content == "2"


def test_unknown_name(caller):
    (result,) = caller.submit([ToolRun("nothing", None, {})]).result(5)
    assert result.unknown and result.failed
    assert result.message == {"role": "tool", "name": "nothing", "content": "{'error': 'Tool nothing not found.'}"}


def test_long_results_are_cut():
    caller = ToolCaller(2, 5.0, max_chars=4)
    assert [r.content for r in executed(caller, (add, {"a": "abc", "b": "def"}), (fails, {}))] == ["abcd", "{'er"]
    caller.close()


def test_calls_of_a_turn_start_in_order_and_neighbouring_async_ones_together(caller):
    began, both = [], asyncio.Event()

    async def first():
        began.append("first")
        await asyncio.wait_for(both.wait(), 5)

    async def second():
        began.append("second")
        both.set()

    def third():
        began.append("third")

    # The first one ends only because the second one runs beside it.
    results = executed(caller, (third, {}), (first, {}), (second, {}), (third, {}))
    assert began == ["third", "first", "second", "third"]
    assert [result.failed for result in results] == [False] * 4


def test_64_rollouts_call_at_once(caller):
    def slow():
        time.sleep(0.2)

    began = time.monotonic()
    futures = [caller.submit([ToolRun("slow", slow, {})]) for _ in range(64)]
    assert not any(result.failed for future in futures for result in future.result(10))
    # One after the other they take 12.8 s.
    assert time.monotonic() - began < 1.5


def test_no_more_threads_than_workers():
    caller, running, most, lock = ToolCaller(3, 5.0), [0], [0], threading.Lock()

    def count():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    for future in [caller.submit([ToolRun("count", count, {})]) for _ in range(20)]:
        future.result(10)
    assert most[0] == 3
    caller.close()


def endless():
    while True:
        pass


async def waits_for_ever():
    await asyncio.Event().wait()


async def computes_for_ever():
    while True:
        pass


@pytest.mark.parametrize("function", [endless, waits_for_ever, computes_for_ever])
def test_a_call_without_end_times_out(function, monkeypatch):
    monkeypatch.setattr(calls, "BLOCKED_S", 0.1)
    caller, began = ToolCaller(1, timeout_s=0.3), time.monotonic()
    late, after, again = executed(caller, (function, {}), (add, {"a": 1, "b": 2}), (add_later, {"a": 1, "b": 2}))
    assert late.timed_out and late.failed and late.content == "{'error': 'timeout after 0.3 s'}"
    # The only thread, and the loop, go on: nothing was abandoned.
    assert (after.content, again.content) == ("3", "3") and not caller._abandoned
    assert time.monotonic() - began < 10
    caller.close()


def test_a_worker_goes_on_after_an_interruption():
    caller, worker = ToolCaller(1, timeout_s=0.3), ToolThread()
    thread = []

    def note():
        thread.append(threading.get_ident())

    given = [
        ToolRun("note", note, {}, worker),
        ToolRun("endless", endless, {}, worker),
        ToolRun("note", note, {}, worker),
    ]
    assert [result.timed_out for result in caller.submit(given).result(10)] == [False, True, False]
    assert thread[0] == thread[1] and not worker.is_abandoned
    caller.close()
    worker.put(None)


def test_a_function_that_cannot_be_ended_is_abandoned(monkeypatch):
    monkeypatch.setattr(calls, "GRACE_S", 0.05)
    monkeypatch.setattr(calls, "MOST_ABANDONED", 2)
    release = threading.Event()

    def blocks():
        while not release.is_set():
            try:
                release.wait(10)
            except BaseException:
                pass

    caller, worker = ToolCaller(1, timeout_s=0.3), ToolThread()
    lost, after = caller.submit(
        [ToolRun("blocks", blocks, {}, worker), ToolRun("add", add, {"a": 1, "b": 1}, worker)]
    ).result(30)
    assert lost.timed_out and worker.is_abandoned
    assert after.content == "{'error': 'the environment is gone: an earlier call of it did not end'}"
    # The place of the only thread is taken by another one.
    assert [result.content for result in executed(caller, (blocks, {}), (add, {"a": 1, "b": 1}))][1] == "2"
    with pytest.raises(UserError, match=r"tools: 3 calls run on beyond tools.tool_timeout_s \(0.3 s\)"):
        executed(caller, (blocks, {}))
    release.set()
    caller.close()


def test_run_raises_what_the_function_raises(caller):
    worker = ToolThread()
    assert caller.run(lambda: 3, worker, 5.0).result(5) == 3
    with pytest.raises(KeyError):
        caller.run(fails, worker, 5.0).result(5)
    with pytest.raises(ValueError, match="late"):
        caller.run(fails_later, worker, 5.0).result(5)
    with pytest.raises(TimeoutError):
        caller.run(endless, worker, 0.05).result(5)
    worker.put(None)
