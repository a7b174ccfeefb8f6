"""The process of `rlnumba serve`: the engine in the main thread, uvicorn in a second one.

The first SIGINT or SIGTERM lets what has begun end, for drain_timeout seconds; a second one ends the process at once.
"""

import asyncio
import os
import signal
import threading
import time
from collections import deque
from contextlib import contextmanager

import click
import uvicorn

from rlnumba.engine.adapters import read_for
from rlnumba.errors import UserError
from rlnumba.model.hub import find_model
from rlnumba.runtime.signals import REPEAT_S
from rlnumba.serve.app import make_app
from rlnumba.serve.engine_loop import EngineLoop
from rlnumba.serve.metrics import ServerMetrics
from rlnumba.serve.security import stopping
from rlnumba.serve.service import Service
from rlnumba.serve.watch.listen import url_of

ENDING = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
# Seconds for answers that are written when the engine has ended.
LAST_WRITES_S = 5


class ServerThread:
    """uvicorn with an event loop of its own, in a thread. app: ASGI; bound: the socket.

    is_ready: whether the thread has ended with what was delivered before. on_ready: called, in it, whenever it has.
    """

    def __init__(self, app, bound, on_ready=lambda: None):
        config = uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none",
            server_header=False, proxy_headers=False, backlog=BACKLOG, timeout_graceful_shutdown=LAST_WRITES_S,
        )  # fmt: skip
        self.server, self.bound, self.loop = uvicorn.Server(config), bound, None
        # Lists of events that are not yet delivered.
        self.events, self.is_ready, self.on_ready = deque(), True, on_ready
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="server", daemon=True)

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        await self.server.serve([self.bound])

    def start(self):
        """Return once connections are accepted."""
        self.thread.start()
        while not self.server.started:
            if not self.thread.is_alive():
                raise UserError("the server did not start")
            time.sleep(0.005)

    def deliver(self, events):
        """Call functions in the server's thread, those that are delivered while it is not ready once it is.

        events: list of (function, argument). Any thread may call this at any time.
        """
        self.events.append(events)
        if self.is_ready:
            self.is_ready = False
            self.loop.call_soon_threadsafe(self._call_all)

    def _call_all(self):
        try:
            while self.events:
                for function, argument in self.events.popleft():
                    function(argument)
        finally:
            # The handlers that this has woken, and that write, are ahead of it in the event loop's queue.
            self.loop.call_soon(self._get_ready)

    def _get_ready(self):
        # Before the queue is read: what comes afterwards, and is not found, is called for by `deliver`.
        self.is_ready = True
        if self.events:
            self.is_ready = False
            self.loop.call_soon(self._call_all)
        self.on_ready()

    @property
    def is_alive(self):
        return self.thread.is_alive()

    def stop(self):
        """Close all connections once their answers are written, and wait for the thread."""
        self.server.should_exit = True
        self.thread.join(LAST_WRITES_S + 1)


class Ending:
    """The end of the process by a signal. received: the first one's number, at `since` of time.monotonic."""

    def __init__(self):
        self.received, self.since = None, 0.0

    def on_signal(self, number, frame):
        if self.received is None:
            self.received, self.since = number, time.monotonic()
        elif time.monotonic() - self.since > REPEAT_S:
            os._exit(128 + number)

    @contextmanager
    def handled(self):
        """Handle the signals of ENDING in the block, in the main thread; elsewhere nothing is handled."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.on_signal) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class ServerProcess:
    """A server over an Engine, which `run` serves in the calling thread until `ending` has received a signal.

    adapters: ServedAdapters that it starts with. Raises UserError for one that cannot be loaded.
    """

    def __init__(self, settings, engine, parsers, bound, adapters=()):
        self.settings, self.bound = settings, bound
        self.ending = Ending()
        metrics = ServerMetrics(settings.name)
        self.engine_loop = EngineLoop(engine, metrics, settings.max_loras)
        for each in adapters:
            read = read_for(engine.model, find_model(each.folder))
            self.engine_loop.adapters.load(each.name, each.folder, read)
        metrics.state = lambda: self.engine_loop.state
        self.service = Service(settings, self.engine_loop, parsers, metrics, adapters)
        self.thread = ServerThread(make_app(self.service), bound, self.engine_loop.go_on)
        self.engine_loop.outlet, self.engine_loop.num_arriving = self.thread, lambda: self.service.num_arriving
        self.url = url_of(bound, settings.host)

    def run(self, started):
        """Serve; started() is called when requests are accepted."""
        with self.ending.handled():
            self.engine_loop.engine.wake()
            self.thread.start()
            started()
            try:
                self.engine_loop.run(self._has_ended)
                self.engine_loop.end_all(stopping())
            finally:
                self.thread.stop()
                self.service.pool.shutdown(wait=False, cancel_futures=True)

    def _has_ended(self):
        if not self.thread.is_alive:
            raise UserError("the thread of the server has ended")
        if self.ending.received is None:
            return False
        self.service.is_ending = True
        self.engine_loop.control.end()
        is_late = time.monotonic() - self.ending.since > self.settings.drain_timeout
        return is_late or not self.service.num_active


def announce(url):
    """Write the base URL to stdout, for scripts that wait for it."""
    click.echo(url)
    click.get_text_stream("stdout").flush()
