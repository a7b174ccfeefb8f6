"""Processes in which reward functions run, so that a slow one, a hang or a crash costs the trainer nothing else.

Ordinary functions share a pool of processes, each of which has one call at a time; all `async def` functions run in one
process, at once. A process starts when it is first needed, of ordinary functions one beforehand (`start`), and is kept;
one that hangs beyond its time is killed, and one that has ended is replaced at the next call.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path

import numpy as np

# Seconds that a worker has beyond a call's limit to interrupt it on its own.
GRACE_S = 2.0
MOST_WORKERS = 8
MAIN = "import sys; sys.path[:] = {path!r}; from rlnumba.rewards.worker import main; main({descriptor})"


def num_workers():
    """Processes for ordinary functions: one a core, at most MOST_WORKERS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


@dataclass
class Answer:
    """What one call gave. values: (n,) float64, or None with `error`, its message; failed_call: whether the function
    raised, hung or crashed, so that the completions may be tried one by one; extra, metrics: what it logged."""

    values: np.ndarray | None
    error: str | None = None
    failed_call: bool = False
    extra: dict[str, list] = field(default_factory=dict)
    metrics: dict[str, list] = field(default_factory=dict)


class Workers:
    """The worker processes of a run's reward functions.

    specs: by which name (see loading.resolve) a process finds each function, None for those that are never called
    here; names: of the functions, for messages.
    """

    def __init__(self, specs, names):
        self.specs, self.names = {k: spec for k, spec in enumerate(specs) if spec is not None}, names
        # Processes without a call, those that are being started among them.
        self._calls, self._idle, self._lock = queue.SimpleQueue(), 0, threading.Lock()
        self._processes, self._threads, self._closed = set(), 0, False
        self._asynchronous, self._starting = None, threading.Lock()

    def call(self, k, is_async, keywords, size, timeout_s):
        """Begin a call of function k on `size` completions: a Future of its Answer."""
        future, call = Future(), (k, is_async, keywords, size, timeout_s)
        if is_async:
            threading.Thread(target=self._call_async, args=(call, future), daemon=True).start()
            return future
        with self._lock:
            self._calls.put((call, future))
            if self._calls.qsize() > self._idle and self._threads < num_workers():
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
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self):
        """Kill all processes."""
        self._closed = True
        for _ in range(self._threads):
            self._calls.put((None, None))
        for process in list(self._processes):
            process.kill()

    def _serve(self):
        """The thread of one process of the pool."""
        # Before a call is taken: until then another process may have time for it.
        process = self._start()
        while True:
            call, future = self._calls.get()
            with self._lock:
                self._idle -= 1
            if call is None:
                return
            if process.ended:
                process = self._start()
            answer = process.call(*call)
            with self._lock:
                self._idle += 1
            future.set_result(answer)

    def _call_async(self, call, future):
        with self._starting:
            if self._asynchronous is None or self._asynchronous.ended:
                self._asynchronous = self._start()
        future.set_result(self._asynchronous.call(*call))

    def _start(self):
        process = Process(self.specs, self.names)
        with self._lock:
            self._processes = {each for each in self._processes if not each.ended} | {process}
        if self._closed:
            process.kill()
        return process


class Process:
    """One worker process and the calls that it has at the moment."""

    def __init__(self, specs, names):
        self.names = names
        self.ended, self._killed_for = False, None
        self._lock, self._futures, self._number = threading.Lock(), {}, 0
        self.connection, other = Pipe()
        # The package itself is found last, wherever the trainer found it.
        path = [*sys.path, str(Path(__file__).parents[2])]
        code = MAIN.format(path=path, descriptor=other.fileno())
        # In a session of its own: Ctrl-C in a terminal goes to all processes of the trainer's.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True
        )
        other.close()
        self.problems = {}
        try:
            self.connection.send((specs, names))
            self.problems = self.connection.recv()
        except (EOFError, OSError):
            self.ended = True
            self.process.wait()
            return
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, k, is_async, keywords, size, timeout_s):
        """The Answer of one call; also of one that hangs, which ends the process, or that ends it itself."""
        name = self.names[k]
        if k in self.problems:
            return _failed(f"reward {name} cannot be imported by a worker process: {self.problems[k]}")
        future = Future()
        with self._lock:
            self._number += 1
            self._futures[self._number] = future
            message = self._number, k, is_async, keywords, size, timeout_s
            if not self.ended:
                try:
                    self.connection.send(message)
                except OSError:
                    pass  # it has ended, which _read reports
                except Exception as error:  # pickling calls methods of the dataset's values, which may raise anything
                    del self._futures[self._number]
                    return _failed(f"reward {name}: its arguments cannot be sent to a worker process: {error}")
        if self.ended:
            self._give_up()
        try:
            answer = future.result(timeout_s * size + GRACE_S)
        except TimeoutError:
            self._killed_for = f"reward {name} did not return within {timeout_s:g} s a completion (rewards.timeout)"
            self.kill()
            answer = future.result()
        if answer is None:
            reason = f"reward {name}: its worker process {_how_ended(self.process)}"
            return _failed(self._killed_for or reason, failed_call=True)
        return answer

    def kill(self):
        """End the process; its calls get an Answer that says why."""
        self.process.kill()

    def _read(self):
        try:
            while True:
                number, answer = self.connection.recv()
                self._futures.pop(number).set_result(answer)
        # EOFError or OSError when the process has ended; unpickling what a reward function logged may raise anything.
        except Exception:
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


def _how_ended(process):
    code = process.wait()
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
