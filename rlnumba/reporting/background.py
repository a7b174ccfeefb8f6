"""Calls made in the background, one after the other: writing files costs the loop that trains no time.

    background.submit(write, row)     returns at once, unless MOST_WAITING calls wait already
    background.flush()                returns when all calls are done

The first call that raises is the last one that is made: its exception is raised in the thread that submits, by the next
submit, flush or close, and what was submitted after it is dropped.
"""

import queue
import threading

# A disk slower than the run makes it wait, instead of filling the memory with what is not written yet.
MOST_WAITING = 64


class Background:
    """A thread that makes the calls that one other thread submits."""

    def __init__(self, name):
        self._name, self._calls = name, queue.Queue(MOST_WAITING)
        self._thread = self._error = None

    def submit(self, function, *arguments):
        """Have function(*arguments) called after all that was submitted before. Raises what an earlier call raised."""
        self._raise_error()
        if self._thread is None:
            # A daemon, which does not delay the end of a process that is ended without `close`.
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put((function, arguments))

    def flush(self):
        """Return when all calls are done. Raises what one of them raised."""
        self._calls.join()
        self._raise_error()

    def close(self):
        """End the thread when all calls are done. Raises what one of them raised."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def _raise_error(self):
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self):
        failed = False
        while (call := self._calls.get()) is not None:
            try:
                if not failed:
                    function, arguments = call
                    function(*arguments)
            except BaseException as error:  # raised again in the thread that submits
                self._error, failed = error, True
            finally:
                self._calls.task_done()
        self._calls.task_done()
