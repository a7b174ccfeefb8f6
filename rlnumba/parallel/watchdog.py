"""Ends a rank whose operation on a GPU does not end, for which no call of the host waits with a deadline.

A thread looks at flags in the host's memory that the GPU sets after the operations. When one is not set in time, the
process ends: its main thread may be inside of the driver, where nothing else ends it.

The thread never calls the driver, because calls of two threads may wait for each other there. One that asked for
events, and destroyed those that had happened, stood still for ever while the main thread waited inside of the driver in
a copy to memory that is not pinned (docs/log.md).
"""

import threading
import time
from collections import deque

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.runtime.memory import shared_with_host

POLL_S = 0.05
# More operations than a stream's queue holds can be under way.
NUM_FLAGS = 1 << 14
UINT32 = 1 << 32


class EndFlags:
    """Flags in pinned memory of the host, which the streams of this process's GPU set, in the order of their work."""

    def __init__(self, count=NUM_FLAGS):
        from cuda.bindings import driver

        self._driver, self._number = driver, 0
        self._host, _ = shared_with_host((count,), np.uint32)
        self._host[...] = 0

    def record(self, stream):
        """An EndFlag that is set once the stream's work so far has ended. stream: of CuPy, not one that is captured."""
        self._number += 1
        index, value = self._number % self._host.size, self._number % UINT32
        address = self._host.ctypes.data + index * self._host.itemsize
        (error,) = self._driver.cuStreamWriteValue32(stream.ptr, address, value, 0)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"stream memory operation refused: {error.name}")
        return EndFlag(self._host, index, value)


class EndFlag:
    """One of EndFlags. done: whether the GPU has set it, or a later one in its place."""

    def __init__(self, host, index, value):
        self._host, self._index, self._value = host, index, value

    @property
    def done(self):
        return (int(self._host[self._index]) - self._value) % UINT32 < UINT32 // 2


class OperationEnd:
    """The end of an operation that the host still calls for. flag: recorded after it, None until then."""

    flag = None

    @property
    def done(self):
        return self.flag is not None and self.flag.done


class Watchdog:
    """Watches operations until `close`.

    timeout_s: from the later of an operation's call and the end of the one before. failed(message): called once, in the
    watchdog's thread. problem(): a message if something else has failed, or None. Neither calls the driver.
    """

    def __init__(self, timeout_s, failed, problem=lambda: None):
        self._timeout_s, self._failed, self._problem = timeout_s, failed, problem
        self._pending, self._closed = deque(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def watch(self, operation, ended):
        """ended: an EndFlag or an OperationEnd; its `done` is true when the operation has ended."""
        self._pending.append((operation, ended, time.monotonic()))

    def close(self):
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self):
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
