"""Environments: an instance for each live rollout, its thread, what reset gets, and failures that name the class."""

import asyncio
import sys
import threading
import time
import types

import pytest

from rlnumba.environments import calls
from rlnumba.environments.calls import ToolCaller
from rlnumba.environments.pool import EnvironmentFailure, EnvironmentPool, required_parameters


@pytest.fixture
def caller():
    made = ToolCaller(num_workers=2, timeout_s=0.1)
    yield made
    made.close()


# Ends the calls that hang: only then, as an exception in a thread waits for that.
RELEASED = threading.Event()


class Recorder:
    """Notes the thread of everything that is called."""

    def __init__(self):
        self.threads, self.rows = [threading.get_ident()], []

    def reset(self, question, seed=0):
        self.threads.append(threading.get_ident())
        self.rows.append((question, seed))
        return f"asked {question}"

    def step(self, x):
        self.threads.append(threading.get_ident())
        return x + 1

    async def look(self):
        return "seen"

    def hang(self):
        RELEASED.wait(30)

    def get_reward(self):
        self.threads.append(threading.get_ident())
        return 0.5

    def close(self):
        self.threads.append(threading.get_ident())


def test_everything_of_an_instance_runs_in_its_thread(caller):
    pool = EnvironmentPool({None: Recorder}, caller, 5.0)
    instance, other = pool.take(None).result(5), pool.take(None).result(5)
    assert instance.environment is not other.environment
    # reset takes what it names of a row.
    assert instance.reset({"question": "q", "answer": 1}, 5, "e").result(5) == "asked q"
    assert instance.reset({"question": "r", "seed": 7, "answer": 1}, 5, "e").result(5) == "asked r"
    found = caller.submit([instance.call("step", {"x": 1}), instance.call("look", {}), instance.call("gone", {})])
    assert [result.content for result in found.result(5)] == ["2", "seen", "{'error': 'Tool gone not found.'}"]
    assert instance.get_reward().result(5) == 0.5
    pool.give_back(instance)
    assert pool.take(None).result(5) is instance
    pool.give_back(instance)
    pool.give_back(other)
    pool.close()
    recorder = instance.environment
    assert recorder.rows == [("q", 5), ("r", 7)]
    assert len(recorder.threads) == 6 and len(set(recorder.threads)) == 1
    assert other.environment.threads[0] != recorder.threads[0] != threading.get_ident()
    assert len(other.environment.threads) == 2


def test_an_instance_that_hangs_is_not_used_again(caller, monkeypatch):
    monkeypatch.setattr(calls, "GRACE_S", 0.05)
    pool = EnvironmentPool({"a": Recorder}, caller, 5.0)
    instance = pool.take("a").result(5)
    (result,) = caller.submit([instance.call("hang", {})]).result(5)
    assert result.timed_out
    pool.give_back(instance)
    assert pool.take("a").result(5) is not instance
    RELEASED.set()


class Slow:
    closed = 0

    def __init__(self):
        time.sleep(0.05)

    def reset(self):
        for _ in range(300):
            time.sleep(0.01)

    async def look(self):
        try:
            await asyncio.sleep(30)
        finally:
            self.looked = True

    def close(self):
        Slow.closed += 1


def test_a_rollout_that_is_dropped_gives_its_instance_back(caller):
    pool = EnvironmentPool({None: Slow}, caller, 5.0)
    # While it is being made, and when the rollout has not had it yet.
    being_made, made = pool.take(None), pool.take(None)
    made.result(5)
    for taken in (being_made, made):
        pool.drop(taken)
    instances = {pool.take(None).result(5) for _ in range(2)}
    assert made.result() in instances
    # Its calls end, the sync ones and the async ones, and the thread goes on.
    instance = made.result()
    for future in (instance.reset({}, 0, "e"), caller.submit([instance.call("look", {})])):
        time.sleep(0.02)
        assert future.cancel()
    began = time.monotonic()
    while not vars(instance.environment).get("looked"):
        assert time.monotonic() < began + 5
    assert not instance.worker.is_abandoned
    assert caller.run(lambda: 3, instance.worker, 5.0).result(5) == 3 and time.monotonic() < began + 2
    # One that waits for its turn does not begin.
    ran, futures = [], [caller.run(lambda: time.sleep(0.05), instance.worker, 5.0)]
    futures.append(caller.run(lambda: ran.append(1), instance.worker, 5.0))
    time.sleep(0.01)
    futures[1].cancel()
    futures[0].result(5)
    assert caller.run(lambda: list(ran), instance.worker, 5.0).result(5) == []
    # Those that rollouts have are closed, too, and one that comes back later.
    assert len(instances) == 2
    late = pool.take(None)
    pool.close()
    pool.drop(late)
    late_end = time.monotonic() + 5
    while Slow.closed < 3:
        assert time.monotonic() < late_end


class Failing:
    async def reset(self, **row):
        raise ValueError("no\nsuch task")

    def get_reward(self):
        while True:
            pass


class Leaving:
    """Methods that raise what is no Exception, as sys.exit() and asyncio do."""

    def reset(self):
        raise SystemExit(2)

    async def get_reward(self):
        raise asyncio.CancelledError("gone")

    def close(self):
        raise asyncio.CancelledError("gone, too")


def refuses():
    raise RuntimeError("no server")


def test_failures_name_the_class_and_the_method(caller):
    pool = EnvironmentPool({"f": Failing, "g": refuses}, caller, 0.1)
    instance = pool.take("f").result(5)
    with pytest.raises(EnvironmentFailure, match=r"^environment: Failing.reset\(\) raised ValueError: no such task$"):
        instance.reset({"a": 1}, 0, "e").result(5)
    with pytest.raises(EnvironmentFailure, match=r"Failing.get_reward\(\) did not return in time"):
        instance.get_reward().result(5)
    with pytest.raises(EnvironmentFailure, match=r"^environment: refuses\(\) raised RuntimeError: no server$"):
        pool.take("g").result(5)


def test_what_is_no_exception_is_a_failure_all_the_same(caller):
    instance = EnvironmentPool({"f": Leaving}, caller, 5.0).take("f").result(5)
    for method, said in [
        (lambda: instance.reset({}, 0, "e"), r"Leaving.reset\(\) raised SystemExit: 2"),
        (instance.get_reward, r"Leaving.get_reward\(\) raised CancelledError: gone"),
        (instance.close, r"Leaving.close\(\) raised CancelledError: gone, too"),
    ]:
        with pytest.raises(EnvironmentFailure, match=said):
            method().result(5)
    # The loop that keeps the limits goes on.
    assert caller.run(lambda: 3, None, 5.0).result(5) == 3


def test_required_parameters():
    assert required_parameters(Recorder().reset) == ["question"]
    assert required_parameters(Failing().reset) == []


class Client:
    """A client whose connection is lost in the method that `at` names."""

    async def reset(self, at=None):
        self.at = at
        return self.use("reset", "begun")

    def step(self, x):
        return self.use("step", x)

    async def look(self):
        return self.use("look", "seen")

    def get_reward(self):
        return self.use("get_reward", 1.0)

    def use(self, name, value):
        if self.at == name:
            raise ConnectionResetError("gone")
        return value


def test_websockets_have_an_error_of_their_own(caller, monkeypatch):
    class ConnectionClosed(Exception):
        pass

    class Closed(Client):
        def use(self, name, value):
            raise ConnectionClosed

    module = types.SimpleNamespace(ConnectionClosed=ConnectionClosed)
    pool = EnvironmentPool({None: Closed}, caller, 5.0)
    for is_imported in (False, True):
        monkeypatch.setitem(sys.modules, "websockets.exceptions", module if is_imported else None)
        instance = pool.take(None).result(5)
        assert caller.submit([instance.call("step", {"x": 3})]).result(5)[0].failed
        assert instance.is_lost == is_imported
    pool.close()


@pytest.mark.parametrize("at", ["reset", "step", "look", "get_reward", None])
def test_an_instance_whose_connection_is_lost_is_not_used_again(caller, at):
    pool = EnvironmentPool({None: Client}, caller, 5.0)
    instance = pool.take(None).result(5)
    begun = instance.reset({"at": at}, 0, "e")
    if at == "reset":
        with pytest.raises(EnvironmentFailure, match=r"Client.reset\(\) raised ConnectionResetError: gone"):
            begun.result(5)
    else:
        assert begun.result(5) == "begun"
        calls = [instance.call("step", {"x": 3}), instance.call("look", {})]
        assert [result.failed for result in caller.submit(calls).result(5)] == [at == "step", at == "look"]
        assert (instance.get_reward().exception(5) is None) == (at != "get_reward")
    assert instance.is_lost == (at is not None)
    pool.give_back(instance)
    assert (pool.take(None).result(5) is instance) == (at is None)
    pool.close()
