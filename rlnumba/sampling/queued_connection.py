"""A connection between the trainer and an inference process whose `send` does not wait.

A socket takes about 200 KB before they are read. The trainer reads in a thread, while its main thread has the
interpreter's lock most of the time: a process that sends long completions would wait for it, and its GPU with it. So a
thread writes here. `send` pickles the message, which may change afterwards. Messages that cannot be written because the
other process has ended are dropped: `poll` and `recv` find out.
"""

import queue
import threading
from multiprocessing.reduction import ForkingPickler


class QueuedConnection:
    """See the module's docstring. connection: multiprocessing's; poll, recv: its methods."""

    def __init__(self, connection):
        self._connection, self._queue, self._thread = connection, queue.SimpleQueue(), None
        self.poll, self.recv = connection.poll, connection.recv

    def __reduce__(self):
        # The process that is being started and gets this has a thread of its own.
        return QueuedConnection, (self._connection,)

    def send(self, message):
        """Queue a message; from one thread at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()
        self._queue.put(ForkingPickler.dumps(message))

    def finish(self, timeout_s):
        """Return once all messages are written, or these seconds have passed; none is sent afterwards."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self):
        """Close the connection, which nothing is written on any more."""
        self._connection.close()

    def _write(self):
        while (message := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                return  # the other process has ended
