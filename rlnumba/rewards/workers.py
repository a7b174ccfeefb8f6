"""Processes in which reward functions run, so that a slow one, a hang or a crash costs the trainer nothing else.

Ordinary functions share a pool of processes, each of which makes one call at a time; all `async def` functions run in
one process, at once. Calls that take little time are sent several at a time; where one of them ends the process, they
are made again one by one. A process starts when it is first needed, of ordinary functions one beforehand (`start`), and
is kept; one that hangs beyond its time is killed, and one that has ended is replaced at the next call. If none can be
started, as with too many open files, the Answers say so.

Answers come back as JSON, which `unpack_answers` checks: a process runs what a model wrote, and a pickle of its could
run code in the trainer.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path

import numpy as np

from rlnumba.data.values import as_json

# Seconds that a worker has beyond a call's limit to interrupt it on its own.
GRACE_S = 2.0
MOST_WORKERS = 8
# Seconds that the calls of a message may take together, as far as is known, if they are more than one: what is lost
# where another process is idle meanwhile. Not tuned.
MESSAGE_S = 0.01
# Most bytes of a message with answers.
LONGEST_MESSAGE = 1 << 30
# Errors that keep a process or a thread from starting: too few files, processes, threads, or too little memory.
CANNOT_START = (OSError, RuntimeError, MemoryError)
MAIN = "import sys; sys.path[:] = {path!r}; from {module} import main; main({descriptor})"


def start_process(module, connection, **streams):
    """The Popen of a process that calls main(file descriptor) of a module, for one end of a Pipe. streams: Popen's."""
    # The package itself is found last, wherever the trainer found it.
    path = [*sys.path, str(Path(__file__).parents[2])]
    code = MAIN.format(path=path, module=module, descriptor=connection.fileno())
    # In a session of its own: Ctrl-C in a terminal goes to all processes of the trainer's.
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        start_new_session=True,
        **streams,
    )


def num_workers():
    """Processes for ordinary functions: one a core, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


@dataclass
class Answer:
    """The result of one call. values: (n,) float64, or None with `error`, its message; failed_call: whether the
    function raised, hung or crashed, so that the completions may be tried one by one; extra, metrics: what it
    logged. process_ended: whether it failed with its process, which another call may have ended."""

    values: np.ndarray | None
    error: str | None = None
    failed_call: bool = False
    extra: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, list] = field(default_factory=dict)
    process_ended: bool = False


def pack_answers(number, answers):
    """A message with the Answers of a numbered message of calls: bytes. Raises what a logged value's __str__ does."""
    packed = [
        (
            None if each.values is None else each.values.tolist(),
            each.error,
            each.failed_call,
            as_json(each.extra),
            {str(name): values for name, values in each.metrics.items()},
        )
        for each in answers
    ]
    return json.dumps((number, packed)).encode()


def unpack_answers(message, sizes):
    """(number, Answers) of a message. sizes: {number: completions of each call}. Raises ValueError for others."""
    try:
        number, packed = json.loads(message)
        answers = [_answer(size, *each) for size, each in zip(sizes[number], packed, strict=True)]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError from error
    return number, answers


def _answer(size, values, error, failed_call, extra, metrics):
    """An Answer for `size` completions. Raises ValueError for values of other types and numbers."""
    of_completions = [*extra.values(), *([] if values is None else [values])]
    numbers = [*metrics.values(), *([] if values is None else [values])]
    if (
        (values is None) != isinstance(error, str)
        or not isinstance(failed_call, bool)
        or any(not isinstance(column, list) or len(column) != size for column in of_completions)
        or any(not isinstance(number, float) for column in numbers for number in column)
    ):
        raise ValueError
    return Answer(None if values is None else np.array(values, np.float64), error, failed_call, extra, metrics)


class Workers:
    """The worker processes of a run's reward functions.

    specs: by which name (see loading.resolve) a process finds each function, None for those that are never called
    here; names: the functions', for messages.
    """

    def __init__(self, specs, names):
        self.specs, self.names = {k: spec for k, spec in enumerate(specs) if spec is not None}, names
        # (call, its Future); processes without a call, those that are being started among them.
        self._calls, self._idle, self._lock = deque(), 0, threading.Lock()
        self._has_calls = threading.Condition(self._lock)
        # Seconds of a call in the last message of each function.
        self._seconds = {}
        self._processes, self._threads, self._closed = set(), 0, False
        self._asynchronous, self._starting = None, threading.Lock()

    def call(self, k, is_async, keywords, size, timeout_s):
        """Begin a call of function k on `size` completions: a Future of its Answer."""
        future, call = Future(), (k, is_async, keywords, size, timeout_s)
        if is_async:
            try:
                threading.Thread(target=self._call_async, args=(call, future), daemon=True).start()
            except RuntimeError as error:
                future.set_result(_not_started(self.names[k], error))
            return future
        with self._lock:
            self._calls.append((call, future))
            self._has_calls.notify()
            if len(self._calls) > self._idle and self._threads < num_workers():
                self._start_thread()
        return future

    def start(self):
        """Begin to start a process for ordinary functions, which the first call then need not wait for."""
        with self._lock:
            if self._threads == 0:
                self._start_thread()

    def _start_thread(self):
        """Add a process to the pool, with a thread of its own. The lock is held."""
        self._threads += 1
        self._idle += 1
        try:
            threading.Thread(target=self._serve, daemon=True).start()
        except RuntimeError as error:
            self._threads -= 1
            self._idle -= 1
            while not self._threads and self._calls:
                (k, *_), future = self._calls.popleft()
                future.set_result(_not_started(self.names[k], error))

    def close(self):
        """Kill all processes."""
        with self._lock:
            self._closed = True
            self._has_calls.notify_all()
        for process in list(self._processes):
            process.kill()

    def _serve(self):
        """The thread of one process of the pool."""
        # Before a call is taken: until then another process may have time for it.
        process = self._start()
        with self._lock:
            if process.failure is not None and self._threads > 1:
                # Others have a process, or find out that they have none.
                self._threads -= 1
                self._idle -= 1
                return
        while taken := self._take():
            calls, futures = zip(*taken, strict=True)
            began, answers = time.monotonic(), None
            if len(calls) > 1 and not process.ended:
                answers = process.call_all(calls)
            if answers is None:
                # One of several may have ended the process: it is not known which.
                answers = []
                for call in calls:
                    if process.ended and not self._closed:
                        process = self._start()
                    answers.append(process.call(call))
            with self._lock:
                self._seconds[calls[0][0]] = (time.monotonic() - began) / len(calls)
                self._idle += 1
            for future, answer in zip(futures, answers, strict=True):
                future.set_result(answer)

    def _take(self):
        """Wait for calls, and take the first one, or several of its function: list of (call, Future), [] at the end."""
        with self._lock:
            self._has_calls.wait_for(lambda: self._calls or self._closed)
            if self._closed:
                return []
            k = self._calls[0][0][0]
            of_function = [each for each in self._calls if each[0][0] == k]
            share = -(-len(of_function) // self._threads)
            count = min(share, int(MESSAGE_S / max(self._seconds.get(k, MESSAGE_S), 1e-9)))
            taken = of_function[: max(count, 1)]
            if len(taken) == 1:
                self._calls.popleft()
            else:
                chosen = set(map(id, taken))
                self._calls = deque(each for each in self._calls if id(each) not in chosen)
            self._idle -= 1
            return taken

    def _call_async(self, call, future):
        with self._starting:
            if self._asynchronous is None or self._asynchronous.ended:
                self._asynchronous = self._start()
        future.set_result(self._asynchronous.call(call))

    def _start(self):
        process = WorkerProcess(self.specs, self.names)
        with self._lock:
            self._processes = {each for each in self._processes if not each.ended} | {process}
        if self._closed:
            process.kill()
        return process


class WorkerProcess:
    """One worker process and the calls that it has at the moment."""

    def __init__(self, specs, names):
        self.names, self.process, self.connection, self.problems = names, None, None, {}
        # Why it could not be started, and why it was killed; None where neither is so.
        self.failure = self._killed_for = None
        self.ended = False
        # What waits for a message's answers, and completions of each of its calls, by the message's number.
        self._lock, self._futures, self._sizes, self._number = threading.Lock(), {}, {}, 0
        try:
            self._begin(specs)
        except CANNOT_START as error:
            self.ended, self.failure = True, error
            if self.connection is not None:
                self.connection.close()
            if self.process is not None:
                self.process.kill()
                self.process.wait()

    def _begin(self, specs):
        self.connection, other = Pipe()
        try:
            self.process = start_process("rlnumba.rewards.worker", other)
        finally:
            other.close()
        try:
            self.connection.send((specs, self.names))
            problems = json.loads(self.connection.recv_bytes(LONGEST_MESSAGE))
            self.problems = {int(k): str(problem) for k, problem in problems.items()}
        except (EOFError, OSError):
            self.ended = True
            self.process.wait()
            return
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, call):
        """The Answer of one call; also of one that hangs, which ends the process, or that ends it itself."""
        k, _, _, size, timeout_s = call
        name = self.names[k]
        if self.failure is not None:
            return _not_started(name, self.failure)
        if k in self.problems:
            return _failed(f"reward {name} cannot be imported by a worker process: {self.problems[k]}")
        try:
            future = self._send([call])
        except Exception as error:  # pickling calls methods of the dataset's values, which may raise anything
            return _failed(f"reward {name}: its arguments cannot be sent to a worker process: {error}")
        try:
            answers = future.result(timeout_s * size + GRACE_S)
        except TimeoutError:
            self._killed_for = f" did not return within {timeout_s:g} s a completion (rewards.timeout)"
            self.kill()
            answers = future.result()
        if answers is None:
            reason = self._killed_for or f": its worker process {how_ended(self.process)}"
            return Answer(None, f"reward {name}{reason}", failed_call=True, process_ended=True)
        return answers[0]

    def call_all(self, calls):
        """The Answers of calls of one function, or None where the process ended, or was ended, before it had all."""
        if calls[0][0] in self.problems:
            return None
        try:
            future = self._send(calls)
        except Exception:  # as in `call`: one of them cannot be sent
            return None
        try:
            return future.result(max(timeout_s * size for _, _, _, size, timeout_s in calls) + GRACE_S)
        except TimeoutError:
            self.kill()
            return future.result()

    def _send(self, calls):
        """Send calls: a Future of their Answers, a list, or None if the process ends. Raises what pickling raises."""
        future = Future()
        with self._lock:
            self._number += 1
            self._futures[self._number] = future
            self._sizes[self._number] = [size for _, _, _, size, _ in calls]
            if not self.ended:
                try:
                    self.connection.send((self._number, list(calls)))
                except OSError:
                    pass  # it has ended, which _read reports
                except BaseException:
                    del self._futures[self._number], self._sizes[self._number]
                    raise
        if self.ended:
            self._give_up()
        return future

    def kill(self):
        """End the process; its calls get an Answer that says why."""
        if self.process is not None:
            self.process.kill()

    def _read(self):
        try:
            while True:
                number, answers = unpack_answers(self.connection.recv_bytes(LONGEST_MESSAGE), self._sizes)
                del self._sizes[number]
                self._futures.pop(number).set_result(answers)
        except (EOFError, OSError):
            pass  # the process has ended
        except (ValueError, MemoryError):
            self._killed_for = ": its worker process sent something else than an answer"
        self.process.kill()
        self.process.wait()
        self.connection.close()
        with self._lock:
            self.ended = True
        self._give_up()

    def _give_up(self):
        with self._lock:
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_result(None)


def _failed(message, failed_call=False):
    return Answer(None, message, failed_call)


def _not_started(name, error):
    return _failed(f"reward {name}: its worker process cannot be started: {getattr(error, 'strerror', None) or error}")


def how_ended(process):
    """The way in which a process ended, for which this waits: the end of a sentence."""
    code = process.wait()
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
