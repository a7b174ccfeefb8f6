"""Ends a rank whose operation on a GPU does not end, for which no call of the host waits with a deadline.

A thread looks at events that were recorded after the operations. When one does not happen in time, the process ends:
its main thread may be inside of the driver, where nothing else ends it.
"""

import threading
import time
from collections import deque

from rlnumba.runtime import device

POLL_S = 0.05


class Watchdog:
    """Watches operations until `close`.

    timeout_s: from the later of an operation's call and the end of the one before. failed(message): called once, in the
    watchdog's thread. problem(): a message if something else has failed, or None.
    """

    def __init__(self, timeout_s, failed, problem=lambda: None):
        self._timeout_s, self._failed, self._problem = timeout_s, failed, problem
        self._pending, self._closed = deque(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def watch(self, operation, event):
        """event: has `done`, which is true when the operation has ended."""
        self._pending.append((operation, event, time.monotonic()))

    def close(self):
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self):
        device.use_gpu_of_process()
        ended_at = 0.0
        while not self._closed.wait(POLL_S):
            while self._pending and self._pending[0][1].done:
                self._pending.popleft()
                ended_at = time.monotonic()
            message = self._problem()
            if message is None and self._pending:
                operation, _, called_at = self._pending[0]
                if time.monotonic() - max(called_at, ended_at) > self._timeout_s:
                    message = f"{operation} did not end within {self._timeout_s:g} s"
            if message is not None:
                self._failed(message)
                return
