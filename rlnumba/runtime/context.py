"""The device state of one engine or one trainer: its stream, its workspaces, its programmatic dependent launches.

Operators that keep memory between launches (partial results, counters, tensor maps) take it from the current context,
so that two engines, or an engine and a trainer, on streams of their own share nothing that either writes:

    context = Context(stream)
    with context.use():
        workspace = current().own(Workspace)      # the one Workspace of this context

The current context belongs to a Python thread, as CuPy's current stream does; a thread that never enters one has a
default context of its own. Different threads may launch at the same time in different contexts; a context is used by
one thread at a time.
"""

import threading
from contextlib import contextmanager, nullcontext

from rlnumba.runtime import device


class Context:
    """A stream (None: CuPy's current stream at each launch) and all that belongs to the kernels launched on it.

    pdl: set by launch.pdl_scope. serialized: addresses of the streams whose next kernel is launched without PDL
    (None: the one of the simulator).
    prepared: launch.launch's parameter buffers. deferred: in the simulator, the launches of the current pdl_scope.
    """

    def __init__(self, stream=None):
        self.stream, self.pdl, self.serialized, self.deferred = stream, False, set(), None
        self.prepared, self._owned = {}, {}

    @contextmanager
    def use(self):
        """Make this the thread's current context, and its stream CuPy's current stream, inside the block."""
        before, _thread.context = _thread.context, self
        try:
            with self.stream or nullcontext():
                yield self
        finally:
            _thread.context = before

    def own(self, make, *arguments):
        """The result of make(*arguments) at the first call with these (hashable) arguments in this context."""
        key = make, arguments
        if key not in self._owned:
            self._owned[key] = make(*arguments)
        return self._owned[key]

    def wait_for(self, other):
        """Order what is launched here from now on after all that was launched in `other` so far.

        The host does not wait. An array allocated in `other` that kernels launched here use must stay referenced until
        `other` has waited for this context, or the device was synchronized: CuPy's memory pool reuses freed memory on
        the stream that allocated it.
        """
        if device.name() == "cuda":
            import cupy

            event = cupy.cuda.Event(disable_timing=True)
            event.record(other.stream or cupy.cuda.get_current_stream())
            self.wait_event(self.stream or cupy.cuda.get_current_stream(), event)

    def wait_event(self, stream, event):
        """Order what this context launches on a stream from now on after an event of another one.

        The next kernel is launched without PDL, because griddepcontrol_wait covers kernels of its own stream alone.
        """
        stream.wait_event(event)
        self.serialized.add(stream.ptr)

    def serialize_next(self):
        """Launch the next kernel of CuPy's current stream without PDL; for work that `launch` did not launch."""
        stream = None
        if device.name() == "cuda":
            import cupy

            stream = cupy.cuda.get_current_stream().ptr
        self.serialized.add(stream)


class _Thread(threading.local):
    def __init__(self):
        self.context = Context()


_thread = _Thread()


def current():
    """The context of the innermost `use` of this thread, else the thread's default one."""
    return _thread.context
