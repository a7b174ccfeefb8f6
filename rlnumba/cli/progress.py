"""Messages of a command on stderr while it works: the device, and a line of progress."""

import os
import sys
import time
from pathlib import Path

import click

import rlnumba
from rlnumba.runtime import device
from rlnumba.runtime.compile import ahead_of_time


def log_device():
    """Chooses the device, if none is chosen yet, and logs it."""
    name = device.name()
    click.echo(f"device {device.describe()}", err=True)
    compiled = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(rlnumba.__file__).parent).glob("**/*.nbi")
    if name == "cpu" and next(compiled, None) is None:
        click.echo("the first run compiles the functions of the cpu device, about half a minute once", err=True)


class CommandProgress:
    """Progress of a command on stderr: one line that is rewritten, on a terminal only; elsewhere the last line."""

    def __init__(self):
        self.live = sys.stderr.isatty()
        self.restart()

    def restart(self):
        """Measure from now on, as where weights have been read."""
        self.started = self.last = time.monotonic()

    def __call__(self, text):
        if self.live and time.monotonic() - self.last > 0.1:
            self.last = time.monotonic()
            click.echo(f"\r\033[K{text}", nl=False, err=True)

    @property
    def seconds(self):
        return time.monotonic() - self.started

    def generated(self, finished, total, tokens):
        rate = tokens / max(self.seconds, 1e-9)
        self(f"{finished}/{total} completions, {tokens} tokens, {rate:.0f} tokens/s")

    def end(self, text):
        click.echo(f"\r\033[K{text}" if self.live else text, err=True)


def prepare_compiling(tensor_parallel_size):
    """Import the compiler meanwhile, with the list of an engine's kernels or of those of a model in parts."""
    ahead_of_time.prepare(f"rlnumba.{'engine' if tensor_parallel_size == 1 else 'parallel'}.kernel_list")
