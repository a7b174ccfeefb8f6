"""Samplers: the places where the completions of a run are drawn, with one interface.

    own.py          the engine of this process, or those of all training ranks, which rank 0 leads (ranks.py), or which
                    draw while they train, each groups of its own
    processes.py    inference processes, of this host or of a Ray cluster

    sampler.submit(request, owner)      an episode; `owner` gets it back by its finished(request), in any thread, or by
                                        expired(request), with what is done and begun, where it has taken too long
    sampler.poll()                      let it go on, where it does not by itself
    sampler.update_weights(version)     the weights are of this version now

Numbers of requests that are under way are different.
"""

from typing import NamedTuple


class Alive(NamedTuple):
    """A sign of life: tokens sampled since the start, seconds in decode steps, and seconds without any group."""

    num_tokens: int
    busy_s: float
    idle_s: float


class Sampler:
    """The interface of all samplers; see the module's docstring.

    wait_s: how long who wants completions may wait for them between two calls of `poll`. count: engines. is_own:
    whether this process's engine is among them, so that update_weights is its, too.
    """

    wait_s, count, is_own = 0.0, 1, False

    def start(self, version):
        """Begin, with the weights as they are, which are of this version."""

    def submit(self, request, owner):
        """Give a GroupRequest out."""
        raise NotImplementedError

    def poll(self):
        """Let it go on, if it does not by itself: whether something may be complete since the last call."""
        return True

    def check(self):
        """Raise InferenceError if there are no engines any more."""

    def update_weights(self, version):
        """Draw from the weights as they are from now on, as this version."""
        raise NotImplementedError

    def settle(self):
        """Complete what others would wait for, who want the same engine."""

    @property
    def stats(self):
        """Alive: the sums of all engines since the start."""
        raise NotImplementedError

    def take_pauses(self):
        """Seconds for which an engine paused for new weights, for each time since the last call: list."""
        return []

    def close(self):
        """Drop what is under way, and end."""
