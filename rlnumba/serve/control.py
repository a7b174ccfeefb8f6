"""The control of the engine by an outside trainer: pause, new weights, sleep. The routes are in routes/control.py.

    control.pause(mode)          a Future: nothing is computed any more. "abort" ends what has begun with the tokens
                                 that it has, "wait" lets it end while new requests wait, "keep" stops it where it is
    control.resume()             what waits is computed
    control.update_weights(new)  sequences that have begun go on with the new weights

The engine counts its policy versions. A version that the trainer gives, a number or a string, is a name of one of them.
"""

import re
from collections import deque
from concurrent.futures import Future

MODES = ("abort", "wait", "keep")


class PauseOvertaken(Exception):
    """Another call came before all that had begun ended."""


class EngineControl:
    """Pause, weights and sleep of an EngineLoop; called in the engine's thread, but for `version` and the flags.

    is_frozen, is_asleep: nothing is computed; is_draining: what has begun is, before a pause.
    """

    def __init__(self, loop):
        self.loop, self.engine = loop, loop.engine
        self.is_frozen = self.is_asleep = False
        # Futures of pauses that wait until all has ended, and the jobs that came since the first of them.
        self.pauses, self.held = [], deque()
        self.names = {self.engine.policy_version: 0}

    @property
    def is_draining(self):
        return bool(self.pauses)

    @property
    def is_stopped(self):
        return self.is_frozen or self.is_asleep

    def version(self, policy_version=None):
        """The trainer's name of one of the engine's policy versions, by default of the present one."""
        return self.names[self.engine.policy_version if policy_version is None else policy_version]

    def holds(self, job):
        """Whether a job is not given to the engine yet."""
        if self.is_draining:
            self.held.append(job)
        return self.is_draining

    def drop(self, job):
        """Forget a job that waits."""
        if job in self.held:
            self.held.remove(job)

    def pause(self, mode):
        """Compute nothing more, and return a Future that is done then. mode: one of MODES."""
        paused = Future()
        if mode == "wait" and not self.loop.episodes.is_idle:
            self.is_frozen = False
            self.pauses.append(paused)
            return paused
        if mode == "abort":
            self.abort()
        self._freeze()
        paused.set_result(None)
        return paused

    def after_step(self):
        """Begin a pause that has waited until all has ended."""
        if self.is_draining and self.loop.episodes.is_idle:
            self._freeze()

    def _freeze(self):
        self.loop.settle()
        self.is_frozen = True
        self._end_pauses()

    def _end_pauses(self):
        """Answer the pauses that wait, and take the jobs that came since."""
        for each in self.pauses:
            if self.is_frozen and self.loop.episodes.is_idle:
                each.set_result(None)
            else:
                each.set_exception(PauseOvertaken())
        self.pauses.clear()
        while self.held:
            self.loop.take(self.held.popleft())

    def resume(self):
        """Compute what waits."""
        self.is_frozen = False
        self._end_pauses()

    def abort(self, request_ids=None):
        """End requests, by default all that have begun, with the tokens that they have: the number of them.

        request_ids: with or without the prefix that an answer's id has.
        """
        held = [job for job in self.held if _is_named(job, request_ids)] if request_ids is not None else []
        for job in held:
            self.held.remove(job)
            self.loop.take(job)
        jobs = [job for job in self.loop.jobs() if request_ids is None or _is_named(job, request_ids)]
        self.loop.cut_short(jobs)
        return len(jobs)

    def update_weights(self, new, version=None):
        """Go on with NewWeights, without blocks of the cache that the old ones computed: their version.

        version: the trainer's name of it, by default the successor of the present one.
        """
        self.loop.settle()
        new.copy()
        self.engine.take_ends(new.config)
        return self._begin_version(version, keep_cache=False)

    def update_version(self, version):
        """Give the weights another version; tokens that have been drawn keep theirs."""
        self.loop.settle()
        return self._begin_version(version, keep_cache=True)

    def _begin_version(self, version, keep_cache):
        version = successor(self.version()) if version is None else version
        number = self.engine.policy_version + 1
        self.names[number] = version
        self.loop.episodes.update_weights(number, keep_cache)
        return version

    def reset_prefix_cache(self):
        self.loop.settle()
        self.engine.reset_prefix_cache()

    def sleep(self, is_frozen):
        """Free what the engine's configuration says of the memory, until `wake`. is_frozen: whether it is paused."""
        self.loop.settle()
        self.engine.sleep()
        self.is_asleep, self.is_frozen = True, is_frozen

    def wake(self):
        self.engine.wake()
        self.is_asleep = False

    def end(self):
        """Let what waits end: the process is about to."""
        if self.is_stopped or self.is_draining:
            self.is_asleep = False
            self.resume()


def _is_named(job, request_ids):
    return bool({job.request_id, job.request_id.removeprefix("chat").removeprefix("cmpl-")} & set(request_ids))


def successor(version):
    """The version after one that a trainer gave: the next number, also where a string ends in one."""
    if isinstance(version, int):
        return version + 1
    name, number = re.fullmatch(r"(.*?)(\d*)", version, re.DOTALL).groups()
    return f"{name}{int(number) + 1:0{len(number)}d}" if number else f"{name}+1"
