"""Kernels compiled ahead of their first launch, in other processes, on all cores.

    prepare(module)              when a command begins; `module` lists the kernels that it will launch
    start(module, request)       once a run's configuration is known
    wait_for(path)               at a launch whose machine code is not in the cache (runtime/compile/machine_code.py)

`python -m rlnumba.runtime.compile.pool module` lists the kernels and compiles those that the cache does not have. It is
started at once where the kernels of this request were never compiled before, while this process goes on to read its
data and weights; else at the first launch whose kernel is missing, so with a warm cache never. A launch waits for the
list, and then for its kernel if that is on it; if not, the kernel is compiled in place, as all are where this process
cannot write into the cache. The list need not be right: what it lacks is compiled when it is first launched, and what
is on it needlessly costs time alone.
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
from rlnumba.runtime.compile import cache

# Device files of NVIDIA's driver: of its kernel modules, and of the one that Windows has for a Linux beside it.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")

_request = _compiler = None
# Whether another process compiles for this one.
_is_elsewhere = False


def prepare(module):
    """Have a process import the compiler meanwhile, if there is a GPU and no list of any run was compiled before.

    Called before the device is chosen, because that, like the import of the compiler, takes a second.
    """
    global _compiler
    has_gpu = any(os.path.exists(path) for path in DRIVER_FILES)
    is_wanted = has_gpu and device.may_be_cuda() and not any(cache.folder().glob("*.list"))
    if _compiler is None and is_wanted and cache.can_be_filled():
        _compiler = Compiler(module)


def start(module, request):
    """Compile in parallel what list_signatures of `module` lists for `request` (any object that pickles).

    At once, or, if all of it has been compiled before, when it is found missing.
    """
    global _request, _compiler
    if _is_elsewhere or _request == (module, request):
        return
    if _compiler is not None and (_compiler.module != module or _compiler.has_request):
        _compiler = None
    _request = module, request
    is_compiled = _compiler is None and cache.is_list_compiled(cache.list_path(*_request, device.properties()))
    if not is_compiled and cache.can_be_filled():
        _start_now()


def _start_now():
    global _compiler
    module, request = _request
    if _compiler is None:
        _compiler = Compiler(module)
    if not _compiler.has_request:
        _compiler.send(request, device.properties())


def leave_to_another():
    """Make `start` do nothing from now on: a process that shares the cache has compiled what this one will launch."""
    global _is_elsewhere
    _is_elsewhere = True


def finish():
    """Return when all that `start` asked for is in the cache, where other processes find it."""
    if _compiler is not None and _compiler.has_request:
        _compiler.finish()


def is_started():
    """Whether this process has called `start`, or need not."""
    return _is_elsewhere or _request is not None


def request():
    """The (module, request) that this process has called `start` with, or None."""
    return _request


def wait_for(path):
    """Wait until other processes have written this file of the cache: bool, False where they are not going to."""
    if _request is None or not cache.can_be_filled():
        return False
    _start_now()
    return _compiler.wait_for(path.name)


class Compiler:
    """The process that compiles ahead of time, as this one sees it."""

    def __init__(self, module):
        self.module, self.has_request = module, False
        command = [sys.executable, "-m", "rlnumba.runtime.compile.pool", module]
        # A session of its own: Ctrl-C reaches this process alone, which then ends that one. Pipes: a reader of this
        # process's output to its end does not wait for that one.
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, **pipes, start_new_session=True)
        atexit.register(self.stop)
        self.changed = threading.Condition()
        # Until the list is known, any kernel may be on it.
        self.is_listed, self.listed, self.missing = False, set(), set()
        self.progress = Progress()
        threading.Thread(target=self._read_reports, daemon=True).start()
        self.errors = threading.Thread(target=self._copy_errors, daemon=True)
        self.errors.start()

    def send(self, request, properties):
        """Have the process compile what its module lists for a request on a GPU of these device.Properties."""
        self.has_request, path = True, cache.list_path(self.module, request, properties)

        def write():
            with suppress(BrokenPipeError):
                pickle.dump((request, properties, path), self.process.stdin)
                self.process.stdin.flush()

        # It is read when the process has imported the compiler.
        threading.Thread(target=write, daemon=True).start()

    def _read_reports(self):
        """Follow what the process reports: first the list, then each file that it has written."""
        for line in self.process.stdout:
            report = json.loads(line)
            with self.changed:
                if "missing" in report:
                    self.listed, self.missing = set(report["missing"]), set(report["missing"])
                    self.is_listed = True
                else:
                    self.missing.discard(report["done"])
                self.changed.notify_all()
        with self.changed:
            self.missing.clear()
            self.is_listed = True
            self.changed.notify_all()

    def _copy_errors(self):
        for line in self.process.stderr:
            print(line.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    def wait_for(self, name):
        """Wait until the process is done with a file; False if it is not on its list."""
        self._wait_while(lambda: name in self.missing)
        return name in self.listed

    def finish(self):
        """Wait until the process is done with all files."""
        self._wait_while(lambda: self.missing)

    def _wait_while(self, lacks):
        with self.changed:
            while not self.is_listed or lacks():
                self.progress.show(len(self.listed) - len(self.missing), len(self.listed))
                self.changed.wait(0.2)
            self.progress.clear()

    def stop(self):
        """End the process and those that it has started."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Progress:
    """One line on stderr while launches wait: on a terminal it is rewritten, elsewhere a line every ten seconds."""

    INTERVAL_S = 10.0

    def __init__(self):
        self.is_live, self.shown_at = sys.stderr.isatty(), None

    def show(self, done, total):
        now, text = time.monotonic(), f"compiling kernels: {done} of {total or '?'}"
        if self.is_live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif self.shown_at is None or now - self.shown_at > self.INTERVAL_S:
            print(text, file=sys.stderr, flush=True)
            self.shown_at = now

    def clear(self):
        if self.is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
