"""The command line in processes of its own, which are forked from one that has imported what they need.

    process = start(["sft", "--config", "run.toml"])
    _, errors = process.communicate(timeout=120)

Python, Numba and the trainers take two seconds of the CPU to import, longer than many of the runs.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing import connection, forkserver
from pathlib import Path

from rlnumba import cli
from rlnumba.reporting import metrics
from rlnumba.runtime import device
from rlnumba.sampling import inference, inference_worker
from rlnumba.sampling.inference_group import Descriptor
from tests import pictures

ROOT = Path(__file__).resolve().parent.parent

# Where curves are kept that are drawn once (tests/pictures.py); None: each run draws its own.
pictures_folder = None
# A new inference process, while tests have forked ones.
spawn_engine = inference.spawn
# The inference processes that this process has forked.
_engines = []


def forking():
    """The context of multiprocessing whose processes have imported tests/preloaded.py.

    They have the environment of the process that they are forked from, not what a test has changed in its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    if not _is_forked():
        # A test may have changed the folder, in which `tests` is found.
        with contextlib.chdir(ROOT):
            forkserver.ensure_running()
    return context


def _is_forked():
    """Whether this process is one of the server's, which has its address but did not start it."""
    server = forkserver._forkserver
    return server._forkserver_address is not None and server._forkserver_pid is None


class Forking:
    """A context of multiprocessing whose processes are forked, with the environment of the process that starts them."""

    def Process(self, target, args, name=None):
        return forking().Process(target=_with_environment, args=(dict(os.environ), target, args), name=name)


def _with_environment(environment, target, arguments):
    os.environ.clear()
    os.environ.update(environment)
    # A server of its own would import everything again.
    forkserver._forkserver.ensure_running = lambda: None
    inference.spawn = fork_engine
    target(*arguments)


class Engine:
    """A forked inference process, with what its Spawned and tests use of a subprocess.Popen."""

    def __init__(self, other):
        reader, writer = multiprocessing.Pipe(duplex=False)
        arguments = dict(os.environ), sys.path[:], (Descriptor(1), Descriptor(2)), other, writer
        self._process, self._lock = forking().Process(target=_serve, args=arguments), threading.Lock()
        self._process.start()
        self.pid = self._process.pid
        writer.close()
        # It has a session of its own from then on.
        reader.poll(None)
        reader.close()

    def poll(self):
        # Whichever thread comes first reads the code.
        with self._lock:
            return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        connection.wait([self._process.sentinel], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("inference process", timeout)
        return self.poll()


def fork_engine():
    """inference.spawn, from a process that has imported what an inference process does: two seconds of the CPU less."""
    own, other = multiprocessing.Pipe()
    engine = Engine(other)
    other.close()
    _engines[:] = [each for each in _engines if each.poll() is None] + [engine]
    return inference.Spawned(engine, own)


def forked_engines():
    """The ids of the inference processes that this process has forked and that have not ended: list."""
    return [each.pid for each in _engines if each.poll() is None]


def _serve(environment, path, streams, other, ready):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    _write_to(streams)
    ready.close()
    inference_worker.main(os.dup(other.fileno()))


def start(arguments, code="", **environment):
    """`rlnumba arguments` in a process of its own, which runs `code` first: a CommandLine.

    With variables of the environment, which Numba reads when it is imported, and on a GPU, a new Popen.
    """
    arguments, everything = [*map(str, arguments)], os.environ | {"RLNUMBA_DEVICE": device.name()} | environment
    if device.name() == "cpu" and not environment:
        return CommandLine(arguments, code, everything, pictures_folder)
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}\nfrom rlnumba import cli\ncli.main()", *arguments],
        env=everything,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, and so the tests in one, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run_script(script, environment):
    """(exit code, stdout, stderr) of a Python file that a forked process runs in its folder, as the module __main__."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams = Descriptor(out.fileno()), Descriptor(errors.fileno())
        process = forking().Process(target=_run_script, args=(streams, script, environment, pictures_folder))
        process.start()
        process.join()
        for stream in (out, errors):
            stream.seek(0)
        return process.exitcode, out.read(), errors.read()


def _run_script(streams, script, environment, pictures_folder):
    os.environ.clear()
    os.environ.update(environment)
    _write_to(streams)
    sys.path[:] = [str(ROOT), str(script.parent), *sys.path]
    os.chdir(script.parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if pictures_folder is not None:
        metrics.plot = pictures.drawn_once(pictures_folder)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        # Which a process that is forked leaves out.
        atexit._run_exitfuncs()


def _write_to(streams):
    """Write stdout and stderr, and what processes that this one starts write there, to these Descriptors."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.number, number)
        os.close(stream.number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)


class CommandLine:
    """The process of one command, with what tests use of a subprocess.Popen."""

    def __init__(self, *arguments):
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._process = forking().Process(target=_run, args=(writer, *arguments))
        self._process.start()
        writer.close()
        self.stderr = open(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()
        self.pid = self._process.pid

    @property
    def returncode(self):
        """The exit code, that of a signal negative; None before the end."""
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """(None, what it has written on stderr since): returns at the end, or kills it after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            self._process.join()
            raise subprocess.TimeoutExpired("rlnumba", timeout)
        with self.stderr:
            return None, self.stderr.read()


def _run(stderr, arguments, code, environment, pictures_folder):
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["rlnumba", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if pictures_folder is not None:
        metrics.plot = pictures.drawn_once(pictures_folder)
    try:
        exec(code, {"__name__": "tests.code"})
        cli.main()
    finally:
        # Which a process that is forked leaves out.
        atexit._run_exitfuncs()
