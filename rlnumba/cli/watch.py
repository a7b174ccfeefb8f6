"""The command watch."""

import os
import time
from pathlib import Path

import click

from rlnumba.cli.command_line import cli
from rlnumba.errors import ConfigError


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--host", default="127.0.0.1", help="Address to listen on. Any but this machine's own needs a key.")
@click.option("--port", type=click.IntRange(0, 65535), default=8001, help="Port to listen on; 0: a free one.")
@click.option("--api-key", help="Key that every request must have. Default: RLNUMBA_API_KEY, else none.")
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, help="Seconds in which the runs may begin.")
def watch(run_dirs, host, port, api_key, wait):
    """Show runs in a browser: curves, throughput, memory, completions, token by token; while they run and afterwards.

    RUN_DIR is the folder of a run, or a folder of such folders. The address of the page is printed when it can be
    opened; Ctrl-C ends it. Nothing is written, and the page loads nothing from other hosts.
    """
    try:
        from rlnumba.serve.watch.app import create_app
        from rlnumba.serve.watch.listen import listening, serve, url_of
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(f"watch needs {error.name}: pip install rlnumba[serve]") from error

    from rlnumba.serve.settings import is_loopback

    api_key = api_key or os.environ.get("RLNUMBA_API_KEY") or None
    if api_key is None and not is_loopback(host):
        raise ConfigError(f"--host: {host} can be reached from other machines: set --api-key, or RLNUMBA_API_KEY")
    runs = found_within(run_dirs, wait)
    listener = listening(host, port)
    serve(create_app(runs, api_key), listener, lambda: click.echo(url_of(listener, host)))


def found_within(run_dirs, wait):
    """The Runs in folders, which may begin within `wait` seconds. Raises ConfigError."""
    from rlnumba.serve.watch.run_view import Runs

    end = time.monotonic() + wait
    while True:
        try:
            return Runs(map(Path, run_dirs))
        except ConfigError:
            if time.monotonic() >= end:
                raise
        time.sleep(min(0.2, max(end - time.monotonic(), 0.0)))
