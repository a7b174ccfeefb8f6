"""The host's memory that a process has of its own, which excludes mapped files and what processes share."""

import ctypes
import threading
from contextlib import contextmanager


def anonymous_bytes():
    """RssAnon of this process: heap, NumPy arrays, stacks."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


@contextmanager
def peak_growth():
    """A block's peak of anonymous_bytes above what there was at its start, when it has ended: found["bytes"]."""
    # What the allocator keeps for reuse is given back.
    ctypes.CDLL(None).malloc_trim(0)
    before, found, ended = anonymous_bytes(), {"bytes": 0}, threading.Event()

    def look():
        while not ended.wait(0.001):
            found["bytes"] = max(found["bytes"], anonymous_bytes() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
        found["bytes"] = max(found["bytes"], anonymous_bytes() - before)
    finally:
        ended.set()
        thread.join()
