"""The command line in processes of its own, which are forked from one that has imported what they need.

    process = start(["sft", "--config", "run.toml"])
    _, errors = process.communicate(timeout=120)

Python, Numba and the trainers take two seconds of the CPU to import, longer than many of the runs.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

from rlnumba import cli
from rlnumba.reporting import metrics
from rlnumba.runtime import device
from tests import pictures

ROOT = Path(__file__).resolve().parent.parent

# Where curves are kept that are drawn once (tests/pictures.py); None: each run draws its own.
pictures_folder = None


def forking():
    """The context of multiprocessing whose processes have imported tests/preloaded.py.

    They have the environment of the process that they are forked from, not what a test has changed in its own.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    # A test may have changed the folder, in which `tests` is found.
    with contextlib.chdir(ROOT):
        forkserver.ensure_running()
    return context


class Forking:
    """A context of multiprocessing whose processes are forked, with the environment of the process that starts them."""

    def Process(self, target, args, name=None):
        return forking().Process(target=_with_environment, args=(dict(os.environ), target, args), name=name)


def _with_environment(environment, target, arguments):
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


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
