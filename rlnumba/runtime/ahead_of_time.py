"""Kernels compiled ahead of their first launch, in other processes, on all cores.

    start(module, request)       once a run's configuration is known; `module` lists the kernels that it will launch
    started_for(path)            at a launch whose machine code is not in the cache (runtime/compile.py)

The first such launch starts `python -m module`, which lists the kernels and compiles those that the cache does not have
(runtime/compile_pool.py). From then on a launch waits for its kernel if it is on that list, and is compiled in place if
it is not. With a warm cache no process is ever started. The list need not be right: what it lacks is compiled when it
is first launched, and what is on it needlessly costs time alone.
"""

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from rlnumba.runtime import device

_request = _compiler = None


def start(module, request):
    """Compile in parallel what `python -m module` lists for `request` (any object that pickles), once it is needed."""
    global _request, _compiler
    _request, _compiler = (module, request), None


def is_started():
    """Whether this process has called `start`."""
    return _request is not None


def started_for(path):
    """Wait until other processes have written this file of the cache: bool, False where they are not going to."""
    global _compiler
    if _request is None:
        return False
    if _compiler is None:
        _compiler = Compiler(*_request)
    return _compiler.wait_for(path.name)


class Compiler:
    """The process that compiles ahead of time, as this one sees it."""

    def __init__(self, module, request):
        command = [sys.executable, "-m", module]
        # A session of its own: Ctrl-C reaches this process alone, which then ends that one.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        atexit.register(self.stop)
        self.changed = threading.Condition()
        self.missing, self.total = set(), 0
        with suppress(BrokenPipeError):
            pickle.dump((request, device.properties()), self.process.stdin)
            self.process.stdin.flush()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        """Follow what the process reports: first the list, then each file that it has written."""
        for line in self.process.stdout:
            report = json.loads(line)
            with self.changed:
                if "missing" in report:
                    self.missing = set(report["missing"])
                    self.total = len(self.missing)
                else:
                    self.missing.discard(report["done"])
                self.changed.notify_all()
        with self.changed:
            self.missing.clear()
            self.changed.notify_all()

    def wait_for(self, name):
        """Wait until the process is done with a file; False if it is not on its list, or that is not known yet."""
        with self.changed:
            if name not in self.missing:
                return False
            with Progress() as progress:
                while name in self.missing:
                    progress.show(self.total - len(self.missing), self.total)
                    self.changed.wait(0.2)
        return True

    def stop(self):
        """End the process and those that it has started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Progress:
    """One line on stderr while a launch waits: on a terminal it is rewritten, elsewhere a line every ten seconds."""

    INTERVAL_S = 10.0

    def __enter__(self):
        self.is_live, self.shown_at = sys.stderr.isatty(), None
        return self

    def show(self, done, total):
        now = time.monotonic()
        if self.is_live:
            print(f"\r\033[Kcompiling kernels: {done} of {total}", end="", file=sys.stderr, flush=True)
        elif self.shown_at is None or now - self.shown_at > self.INTERVAL_S:
            print(f"compiling kernels: {done} of {total}", file=sys.stderr, flush=True)
            self.shown_at = now

    def __exit__(self, *_):
        if self.is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
