"""The execution of tool calls: sync functions in threads, async ones in an event loop, each with a time limit.

    caller = ToolCaller(tool_workers, timeout_s, max_chars)
    future = caller.submit([ToolRun(name, function, arguments), ...])      of the list of CallResults, in the same order

The calls of one `submit` start in their order, each after the one before it has ended; async ones that are neighbours
run together. Calls of different rollouts do not wait for each other.

A sync function that has not returned after timeout_s gets an exception in its thread, a coroutine is cancelled. If it
is still running GRACE_S later, it is abandoned: another thread takes the place of its own. More than MOST_ABANDONED of
them at a time end the run. A Future that is cancelled, because its rollout is dropped, ends its call in the same way.
"""

import asyncio
import ctypes
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from rlnumba.errors import UserError
from rlnumba.rewards.calling import TimeUp, run_until_stopped

# Seconds that an interrupted call has to end.
GRACE_S = 5.0
MOST_ABANDONED = 16
# Seconds without an answer after which an event loop is taken for blocked by a coroutine.
BLOCKED_S = 0.5


class CallError(Exception):
    """A call that fails without its function having raised; its text is the result's."""


@dataclass
class ToolRun:
    """A tool call to execute. function: None for a name that no tool has. arguments: a dict, or another value of JSON,
    with which the call fails. worker: the ToolThread whose thread a sync function needs, None for any thread."""

    name: str
    function: Callable | None
    arguments: Any
    worker: "ToolThread | None" = None


@dataclass
class CallResult:
    """The end of a call. content: the text of its message; failed: whether that is an error; latency_s: its seconds."""

    name: str
    content: str
    failed: bool = False
    timed_out: bool = False
    unknown: bool = False
    latency_s: float = 0.0

    @property
    def message(self):
        """The message of the conversation."""
        return {"role": "tool", "name": self.name, "content": self.content}


def is_async(function):
    """Whether a function returns a coroutine: also a method, a partial, and an object with an async __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def in_unicode(text):
    """A text whose halves of surrogate pairs, which have no UTF-8 and no tokens, are U+FFFD, and whole pairs their
    character. Python has halves in names of files that are not UTF-8, and from JSON that is cut."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def content_of(result):
    """The text of a tool's result: of a list of text blocks their texts, else str(result), as in TRL.

    Raises CallError for a block that is not text, and what the result's __str__ raises.
    """
    if not isinstance(result, list) or not result:
        return str(result)
    kinds = [block.get("type") if isinstance(block, dict) else None for block in result]
    if not all(isinstance(kind, str) for kind in kinds):
        return str(result)
    for kind in kinds:
        if kind.startswith("image"):
            raise CallError("the tool returned an image, and the model reads text alone")
    if any(kind != "text" for kind in kinds):
        return str(result)
    return "".join(str(block.get("text", "")) for block in result)


def error_content(text):
    """The content of a failed call's message, as in TRL."""
    return str({"error": text})


class ToolThread:
    """A thread that runs one job after another.

    jobs: a queue, which several workers may share, or None for one of its own. after_job(worker): called in the thread
    after each job.
    """

    def __init__(self, jobs=None, after_job=lambda worker: None):
        self.jobs, self.after_job = queue.SimpleQueue() if jobs is None else jobs, after_job
        self.is_abandoned, self._job, self._lock = False, None, threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True, name="tool")
        self._thread.start()

    def put(self, job):
        """Queue a ThreadJob, or None to end the thread."""
        self.jobs.put(job)

    def interrupt(self, job):
        """Raise TimeUp in the thread if it still runs this job."""
        with self._lock:
            if self._job is job:
                _raise_in(self._thread)

    def _work(self):
        while not self.is_abandoned and (job := self.jobs.get()) is not None:
            self._run(job)

    def _run(self, job):
        outcome = TimeUp()
        try:
            with self._lock:
                self._job = job
            job.begin(self)
            try:
                if not job.is_dropped:
                    outcome = job.call()
            except TimeUp:
                raise
            except BaseException as error:  # a user's code may raise anything
                outcome = error
            with self._lock:
                self._job = None
            # An exception that was sent at the last moment arrives at one of these jumps, not in the next job.
            for _ in range(100):
                pass
        except TimeUp:
            with self._lock:
                self._job = None
        job.done.set_result(outcome)
        self.after_job(self)


class ThreadJob:
    """A call() for a ToolThread. started: Future of the thread that runs it; done: of the result or exception.

    is_dropped: set before it is looked whether it has started, and then looked at: a job that has not does nothing.
    """

    def __init__(self, call):
        self.call, self.started, self.done, self.began, self.is_dropped = call, Future(), Future(), None, False

    def begin(self, worker):
        self.began = time.monotonic()
        self.started.set_result(worker)


class ToolThreads:
    """At most `most` ToolThreads with one queue, which are started as they are needed."""

    def __init__(self, most):
        self.most, self.jobs, self._lock = most, queue.SimpleQueue(), threading.Lock()
        self._count = self._idle = 0

    def put(self, job):
        """Queue a ThreadJob."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._count < self.most:
                self._start()
            self.jobs.put(job)

    def replace(self, worker):
        """Abandon a worker, whose place another one may take."""
        worker.is_abandoned = True
        with self._lock:
            self._count -= 1
            if not self.jobs.empty() and self._count < self.most:
                self._start()

    def close(self):
        """End the threads that wait for a job."""
        for _ in range(self._count):
            self.jobs.put(None)

    def _start(self):
        self._count += 1
        ToolThread(self.jobs, self._ended)

    def _ended(self, worker):
        with self._lock:
            if not worker.is_abandoned and self.jobs.empty():
                self._idle += 1


class EventLoop:
    """A thread with an event loop."""

    def __init__(self, name):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=run_until_stopped, args=(self.loop,), daemon=True, name=name)
        self._thread.start()

    def interrupt(self):
        """Raise TimeUp in the thread."""
        _raise_in(self._thread)

    def close(self):
        """Cancel all that runs in the loop, and end the thread, as soon as nothing blocks it."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._end()))
        self._thread.join(2 * GRACE_S)
        if not self._thread.is_alive():
            self.loop.close()

    async def _end(self):
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=BLOCKED_S + 1.5 * GRACE_S)
        self.loop.stop()


def _raise_in(thread):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(TimeUp))


class BegunCoroutine(NamedTuple):
    """A coroutine in a loop: Futures of its task, and of its end, which is a result or an exception."""

    loop: EventLoop
    task: Future
    done: Future


class ToolCaller:
    """Executes tool calls; see the module's docstring. max_chars: most characters of a result, 0 for no limit."""

    def __init__(self, num_workers=64, timeout_s=30.0, max_chars=0):
        self.timeout_s, self.max_chars = timeout_s, max_chars
        self._workers = ToolThreads(num_workers)
        # Nothing of a user's runs in the first loop, which keeps the time limits of what runs in the second.
        self._own, self._users = EventLoop("tool calls"), None
        # Functions that do not end: the Futures of their ends.
        self._abandoned = set()

    def submit(self, calls):
        """Begin to execute a list of Calls: Future of their CallResults. It has a UserError where too many functions
        that do not end were abandoned."""
        return asyncio.run_coroutine_threadsafe(self._execute(calls), self._own.loop)

    def run(self, function, worker, timeout_s, kind=None):
        """Begin to call function(), sync in a ToolThread or async: Future of its result, or of its exception, a
        TimeoutError after timeout_s. kind: the function that says which of the two it is, None: itself."""
        return asyncio.run_coroutine_threadsafe(self._run(function, worker, timeout_s, kind), self._own.loop)

    def close(self):
        """End what is being executed, and the threads."""
        self._workers.close()
        # The first one ends what runs in the second.
        for each in (self._own, self._users):
            if each is not None:
                each.close()

    async def _run(self, function, worker, timeout_s, kind):
        if is_async(kind or function):
            outcome, _ = await self._in_loop(function, lambda result: result, timeout_s)
        else:
            outcome, _ = await self._in_thread(function, worker, timeout_s)
        if isinstance(outcome, TimeUp):
            raise TimeoutError
        if isinstance(outcome, asyncio.CancelledError):
            # Of a task of the user's: raised here, asyncio's would cancel the Future.
            raise CancelledError(*outcome.args)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _execute(self, calls):
        results = []
        for together, group in groupby(calls, lambda call: call.function is not None and is_async(call.function)):
            if together:
                results += await asyncio.gather(*(self._execute_one(call, self._call_in_loop) for call in group))
            else:
                for call in group:
                    results.append(await self._execute_one(call, self._call_in_thread))
        self._abandoned = {done for done in self._abandoned if not done.done()}
        if len(self._abandoned) > MOST_ABANDONED:
            raise UserError(
                f"tools: {len(self._abandoned)} calls run on beyond tools.tool_timeout_s ({self.timeout_s:g} s) and "
                f"cannot be ended, the last of {calls[-1].name}; at most {MOST_ABANDONED} may"
            )
        return results

    async def _execute_one(self, call, execute):
        """The CallResult of a call, which execute(call) executes."""
        result, began = CallResult(call.name, ""), time.monotonic()
        try:
            if call.function is None:
                result.unknown = True
                raise CallError(f"Tool {call.name} not found.")
            if not isinstance(call.arguments, dict):
                raise CallError(f"arguments must be an object, got {type(call.arguments).__name__}")
            outcome, began = await execute(call)
            if isinstance(outcome, TimeUp):
                result.timed_out = True
                raise CallError(f"timeout after {self.timeout_s:g} s")
            if isinstance(outcome, BaseException):
                raise CallError(text_of(outcome))
            result.content = in_unicode(outcome)
        except CallError as error:
            result.failed, result.content = True, error_content(str(error))
        result.latency_s = time.monotonic() - began
        if self.max_chars:
            result.content = result.content[: self.max_chars]
        return result

    async def _call_in_thread(self, call):
        """The text, or exception, of a call of a sync function, and when it began."""

        def run():
            found = call.function(**call.arguments)
            if inspect.isawaitable(found):
                if inspect.iscoroutine(found):
                    found.close()
                raise CallError("a sync function returned an awaitable: declare it with async def")
            return content_of(found)

        return await self._in_thread(run, call.worker, self.timeout_s)

    async def _call_in_loop(self, call):
        """The text, or exception, of a call of an async function, and when it began."""
        return await self._in_loop(lambda: call.function(**call.arguments), content_of, self.timeout_s)

    async def _in_thread(self, function, worker, timeout_s):
        """(result or exception of function() in a thread, when it began); a TimeUp after timeout_s.

        worker: that of the thread, None for any.
        """
        if worker is not None and worker.is_abandoned:
            return CallError("the environment is gone: an earlier call of it did not end"), time.monotonic()
        job = ThreadJob(function)
        (self._workers if worker is None else worker).put(job)
        try:
            # The thread completes it, whether it is waited for or not.
            await asyncio.shield(asyncio.wrap_future(job.started))
            if await _ends(job.done, timeout_s):
                return job.done.result(), job.began
        except asyncio.CancelledError:
            await self._end_in_thread(job, worker)
            raise
        await self._end_in_thread(job, worker)
        return TimeUp(), job.began

    async def _end_in_thread(self, job, worker):
        """Interrupt a ThreadJob, and abandon its thread if that does not help. worker: as _in_thread has it."""
        job.is_dropped = True
        if not job.started.done():
            return
        its_worker = job.started.result()
        its_worker.interrupt(job)
        if not await _ends(job.done, GRACE_S):
            self._abandoned.add(job.done)
            if worker is None:
                self._workers.replace(its_worker)
            else:
                worker.is_abandoned = True

    async def _in_loop(self, function, convert, timeout_s):
        """(convert(result) or exception of the coroutine function(), when it began); a TimeUp after timeout_s."""
        began = time.monotonic()
        begun = self._begin_async(function, convert)
        try:
            if await _ends(begun.done, timeout_s):
                return begun.done.result(), began
        except asyncio.CancelledError:
            await self._end_in_loop(begun)
            raise
        await self._end_in_loop(begun)
        return TimeUp(), began

    async def _end_in_loop(self, begun):
        """Cancel a BegunCoroutine, or interrupt the loop that it blocks, and abandon it if that does not help."""
        users, task, done = begun
        answers = threading.Event()
        users.loop.call_soon_threadsafe(answers.set)
        users.loop.call_soon_threadsafe(lambda: task.result().cancel())
        if not await _ends(done, BLOCKED_S) and not answers.is_set():
            # The coroutine, or another one, computes without ever awaiting.
            users.interrupt()
        if not await _ends(done, GRACE_S):
            self._abandoned.add(done)
            if not answers.is_set() and self._users is users:
                self._users = None

    def _begin_async(self, function, convert):
        """Begin function() in the loop of the users' coroutines: BegunCoroutine, whose end is convert(result)."""
        if self._users is None:
            self._users = EventLoop("async tools")
        users, started, done = self._users, Future(), Future()

        async def run():
            try:
                outcome = convert(await function())
            except BaseException as error:  # a user's code may raise anything
                outcome = error
            done.set_result(outcome)

        users.loop.call_soon_threadsafe(lambda: started.set_result(users.loop.create_task(run())))
        return BegunCoroutine(users, started, done)


async def _ends(future, seconds):
    """Whether a concurrent Future is done after so many seconds at most."""
    done, _ = await asyncio.wait([asyncio.wrap_future(future)], timeout=seconds)
    return bool(done)


def text_of(error):
    """The text of an exception; its class's name where it has none."""
    try:
        text = str(error)
    except Exception:  # a user's __str__
        text = ""
    return text or type(error).__name__
