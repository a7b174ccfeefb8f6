"""What one engine or one trainer owns on the device: its stream, its workspaces, and the order of its launches.

Kernels that keep memory between launches (partial results, counters, tensor maps) take it from the current context, so
that two engines, or an engine and a trainer, on streams of their own share nothing that either writes:

    context = Context(stream)
    with context.use():
        workspace = current().own(Workspace)      # the one Workspace of this context

Code that never asks for a context of its own runs in the default one, on the default stream.
"""

import contextvars
from contextlib import contextmanager, nullcontext

_current = contextvars.ContextVar("rlnumba context")


class Context:
    """A stream (None: whichever is current) and everything that belongs to the kernels launched on it.

    pdl: whether kernels that call griddepcontrol_wait are launched with programmatic dependent launch.
    serialize_next: whether the next kernel is launched without it.
    """

    def __init__(self, stream=None):
        self.stream = stream
        self.pdl = self.serialize_next = False
        self._owned = {}

    @contextmanager
    def use(self):
        """Make this the current context, and its stream the current stream, inside the block."""
        token = _current.set(self)
        try:
            with self.stream or nullcontext():
                yield self
        finally:
            _current.reset(token)

    def own(self, make, *arguments):
        """What make(*arguments) returns: made at the first call in this context, the same object ever after."""
        key = make, arguments
        if key not in self._owned:
            self._owned[key] = make(*arguments)
        return self._owned[key]


_default = Context()


def current():
    """The context of the innermost `use`, else the default one."""
    return _current.get(_default)
