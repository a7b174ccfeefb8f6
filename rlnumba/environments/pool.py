"""The environments of a run: one instance for each live rollout, which is used again after it.

    pool = EnvironmentPool(factories, caller, timeout_s)
    instance = pool.take(name).result()        a free one, or a new one
    instance.reset(row)                        Future of the observation
    instance.call(tool, arguments)             a ToolRun for the ToolCaller
    instance.get_reward()                      Future of the reward
    pool.give_back(instance)

Factory, reset, tools, get_reward and close of one instance run in one thread of its own, if they are not async: clients
of websockets and databases are not thread-safe.
"""

import inspect
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager

from rlnumba.environments.calls import ToolRun, ToolThread, is_async
from rlnumba.errors import UserError, shown

# Arguments of `reset` that OpenEnv's environments have, which the run gives where the row does not.
GIVEN = ("seed", "episode_id")
# Methods that are no tools.
RESET, GET_REWARD, CLOSE = "reset", "get_reward", "close"


class EnvironmentFailure(UserError):
    """A method of an environment that raised or did not return: the line names the class and the method."""


def method_of(environment, name):
    """A method of a user's environment, or None where its class has none."""
    return getattr(environment, name) if inspect.isroutine(getattr(type(environment), name, None)) else None


def required_parameters(method):
    """The names of the parameters without which a bound method cannot be called by keyword: list."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(method).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def accepted(method, row):
    """The items of a row that a bound method takes by keyword: dict."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(row)
    return {p.name: row[p.name] for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name in row}


def connection_errors():
    """The classes of errors after which a client is of no more use: ConnectionError, and websockets' own, if it is
    imported."""
    websockets = sys.modules.get("websockets.exceptions")
    return (ConnectionError,) if websockets is None else (ConnectionError, websockets.ConnectionClosed)


class Instance:
    """An environment with its ToolThread. name: its factory's, None for the only one. is_lost: whether a method has
    raised one of connection_errors, after which the instance is not used again."""

    def __init__(self, name, environment, worker, caller, timeout_s):
        self.name, self.environment, self.worker = name, environment, worker
        self.caller, self.timeout_s, self.is_lost = caller, timeout_s, False

    @property
    def class_name(self):
        return type(self.environment).__name__

    @property
    def has_reward(self):
        """Whether the class has get_reward."""
        return method_of(self.environment, GET_REWARD) is not None

    def reset(self, row, seed, episode_id):
        """Begin `reset` with what it takes of a row, a dict: Future of the observation, or of an EnvironmentFailure.

        seed, episode_id: of arguments of these names, where the row has none.
        """
        reset = method_of(self.environment, RESET)
        known = zip(GIVEN, (seed, episode_id), strict=True)
        named = {name: value for name, value in known if name in inspect.signature(reset).parameters}
        return self._run(RESET, lambda: reset(**accepted(reset, named | row)), reset)

    def get_reward(self):
        """Begin `get_reward`: Future of its value, or of an EnvironmentFailure."""
        method = method_of(self.environment, GET_REWARD)
        return self._run(GET_REWARD, method, method)

    def call(self, tool, arguments):
        """The ToolRun of a tool of its class."""
        method = method_of(self.environment, tool)
        return ToolRun(tool, method and self._watched(method, method), arguments, self.worker)

    def close(self):
        """Begin `close`, if there is one, and end the thread: Future of None."""
        method = method_of(self.environment, CLOSE)
        if method is None or self.worker.is_abandoned:
            closed = Future()
            closed.set_result(None)
        else:
            closed = self._run(CLOSE, method, method)
        closed.add_done_callback(lambda _: self.worker.put(None))
        return closed

    def _run(self, name, call, method):
        call = self._watched(call, method)
        return _named(self.caller.run(call, self.worker, self.timeout_s), f"{self.class_name}.{name}()")

    def _watched(self, call, method):
        """A function that calls `call`, which is async where `method` is, and notes a connection that is lost."""
        if is_async(method):

            async def watched(**arguments):
                with self._noting():
                    return await call(**arguments)

        else:

            def watched(**arguments):
                with self._noting():
                    return call(**arguments)

        return watched

    @contextmanager
    def _noting(self):
        try:
            yield
        except connection_errors():
            self.is_lost = True
            raise


def _named(future, what):
    """A Future of another one's result, whose exception is an EnvironmentFailure that begins with `what`."""
    found = Future()

    def copy(done):
        if done.cancelled():
            found.cancel()
        if not found.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            found.set_result(done.result())
        elif isinstance(error, UserError):
            found.set_exception(error)
        elif isinstance(error, TimeoutError) and not error.args:
            found.set_exception(EnvironmentFailure(f"environment: {what} did not return in time (rewards.timeout)"))
        else:
            text = " ".join(str(error).split())
            failure = EnvironmentFailure(f"environment: {what} raised {type(error).__name__}: {text}")
            failure.__cause__ = error
            found.set_exception(failure)

    future.add_done_callback(copy)
    # Who does not want the result any more wants the call to end, too.
    found.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)
    return found


class EnvironmentPool:
    """factories: {name: class or function without arguments}, the name None for a single one. caller: ToolCaller.
    timeout_s: seconds for a factory, reset, get_reward and close."""

    def __init__(self, factories, caller, timeout_s):
        self.factories, self.caller, self.timeout_s = factories, caller, timeout_s
        # The garbage collector may give an instance back in the middle of what a thread does here.
        self._free, self._lock = {name: [] for name in factories}, threading.RLock()
        # All that are not closed, also those that a rollout has.
        self._instances, self._is_closed = set(), False

    def take(self, name):
        """An Instance of this factory that no rollout has: Future. It has an EnvironmentFailure where none can be
        made."""
        found = Future()
        with self._lock:
            free = self._free[name]
            instance = free.pop() if free else None
        if instance is not None:
            found.set_result(instance)
            return found
        factory, worker = self.factories[name], ToolThread()

        def made(done):
            if done.cancelled():
                found.cancel()
            elif done.exception() is None:
                instance = Instance(name, done.result(), worker, self.caller, self.timeout_s)
                with self._lock:
                    self._instances.add(instance)
                if found.set_running_or_notify_cancel():
                    found.set_result(instance)
                else:
                    self.give_back(instance)
                return
            worker.put(None)
            if found.set_running_or_notify_cancel():
                found.set_exception(done.exception())

        what = f"{getattr(factory, '__name__', None) or shown(factory)}()"
        _named(self.caller.run(factory, worker, self.timeout_s), what).add_done_callback(made)
        return found

    def drop(self, taken):
        """A rollout that has ended wants the Instance of a Future of `take` no more."""
        if not taken.cancel() and taken.exception() is None:
            self.give_back(taken.result())

    def give_back(self, instance):
        """A rollout has ended. An instance whose thread was abandoned, or that is lost, is not used again."""
        with self._lock:
            if not (self._is_closed or instance.worker.is_abandoned or instance.is_lost):
                self._free[instance.name].append(instance)
                return
        self._close([instance])

    def close(self):
        """Close all instances. Raises EnvironmentFailure for the first one that fails."""
        with self._lock:
            self._is_closed, instances = True, list(self._instances)
            self._free = {name: [] for name in self._free}
        for closed in self._close(instances):
            closed.result()

    def _close(self, instances):
        """Begin to close those instances that are not: list of Futures."""
        with self._lock:
            instances = [instance for instance in instances if instance in self._instances]
            self._instances.difference_update(instances)
        return [instance.close() for instance in instances]
