"""Inference processes: engines that generate while the trainer trains, watched, and started anew when they end.

    engines = Engines(setup, sender, 2, ...)
    engines.update_weights(0)             weights of version 0, to all of them
    engines.submit(request, owner)        a GroupRequest, to the one with the fewest unfinished groups
    ...                                   owner.finished(request) is called in a thread as soon as it is complete

A process that has ended, or gives no sign of life, is replaced: a new one gets the newest weights first, then the
groups that the old one had not finished. A completion depends on weights, seed, prompt and index alone, so these are
the same. If processes have staging of their own (weights/push.py), the weights come as soon as the trainer waits
for groups, and the groups begin then. Groups that take longer than timeout_s, from when the engine begins to compute
them, are taken back, and handed to owner.expired.

Messages are sent by a thread for each process, so that one that does not read holds up nothing else; what a process
sends is handled by one thread of all. A process is one of this host (SpawnedProcess), or an actor of another one
(ray_engines.RayProcess): Engines knows a Process alone.
"""

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from rlnumba.errors import UserError
from rlnumba.parallel.launch import how_ended
from rlnumba.sampling.inference_group import Failed
from rlnumba.sampling.inference_worker import Begun, Close, Closed, Done, Interrupt, Refused, Updated
from rlnumba.sampling.queued_connection import QueuedConnection
from rlnumba.sampling.sampler import Alive, Sampler
from rlnumba.sampling.weights.push import Offer

MAIN = "import sys; sys.path[:] = {path!r}; from rlnumba.sampling.inference_worker import main; main({descriptor})"
# Seconds between two looks at time limits.
POLL_S = 0.1
# Seconds in which a process must have started; longer than without a sign of life, because it may compile kernels.
START_S = 300.0
# Seconds in which the processes of an engine end after they were killed.
END_S = 10.0
# Times that a process may refuse one version, which is then sent again.
MAX_REFUSALS = 3
# Seconds in which a process whose memory cannot be mapped may turn out to have ended.
MAPPING_S = 5.0


class InferenceError(UserError):
    """The error that ended the inference processes of a run."""


class Limits(NamedTuple):
    """Seconds for a group (timeout_s), without a sign of life (stale_s), for weights (sync_timeout_s); max_restarts of
    each process."""

    timeout_s: float
    stale_s: float
    sync_timeout_s: float
    max_restarts: int


class Ended(NamedTuple):
    """The last thing that arrives from a process: that it has ended, and how, as the end of a sentence."""

    reason: str


class Process:
    """One inference process, as Engines sees it.

    groups: {number: (GroupRequest, when it was begun, inf before)} that it has not finished. asked: numbers of groups
    that were asked back. offer: that of its staging, once it has sent one. sent: the newest version that was sent,
    pending: those that are not live yet; refused: {version: how often it was refused}. heard_at: when it last sent
    something, has_started: whether it has. is_ending: whether another one is about to take its place. closed: an Event,
    once it has closed its environments, or has ended.
    """

    def __init__(self, index):
        self.index, self.groups, self.asked = index, {}, set()
        self.offer, self.sent, self.pending, self.refused = None, None, set(), {}
        self.stats, self.heard_at, self.has_started = Alive(0, 0.0, 0.0), time.monotonic(), False
        self.is_ending, self.closed = False, threading.Event()

    def send(self, message):
        """Send a message, which does not wait for the process."""
        raise NotImplementedError

    def end(self):
        """End the process."""
        raise NotImplementedError

    def ends_within(self, seconds):
        """Whether the process has ended, or does so by itself within so many seconds."""
        raise NotImplementedError

    def restarted(self, setup, arrived):
        """The Process that takes the place of this one, which was ended; it knows nothing yet."""
        return type(self)(self.index, setup, arrived)


class Spawned(NamedTuple):
    """A process of this host which has been started, and waits for its Setup."""

    process: subprocess.Popen
    connection: Connection

    def end(self):
        """Kill it, and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def spawn():
    """A Spawned process. It ends by itself when this one does."""
    own, other = Pipe()
    # The package itself is found last, wherever the trainer found it.
    path = [*sys.path, str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", MAIN.format(path=path, descriptor=other.fileno())]
    # In a session of its own: Ctrl-C in a terminal goes to all processes of the trainer's.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[other.fileno()], start_new_session=True)
    other.close()
    return Spawned(process, own)


class WaitingProcesses:
    """`count` processes that are spawned at once, and import the package while the trainer finds out their Setup.

    A context manager, which ends those that `start` has not taken.
    """

    def __init__(self, count):
        self._spawned = []
        try:
            for _ in range(count):
                self._spawned.append(spawn())
        except BaseException:  # a signal, too
            self._end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._end()

    def start(self, index, setup, arrived):
        """A SpawnedProcess: one that waits, as long as there are any."""
        return SpawnedProcess(index, setup, arrived, self._spawned.pop(0) if self._spawned else None)

    def _end(self):
        for spawned in self._spawned:
            spawned.end()
            spawned.connection.close()
        self._spawned.clear()


class SpawnedProcess(Process):
    """An inference process of this host.

    setup: its Setup. arrived(process, message): called in a thread with all that it sends, and at last Ended. spawned:
    the Spawned that it becomes; None for a new one.
    """

    def __init__(self, index, setup, arrived, spawned=None):
        super().__init__(index)
        self._spawned = spawned or spawn()
        self.process, own = self._spawned
        # Nothing is sent to a process that has ended; the thread below then finds its connection closed.
        with contextlib.suppress(OSError):
            own.send(setup.staging is not None)
            if setup.staging is not None:
                reduction.send_handle(own, setup.staging[2], self.process.pid)
        self.connection = QueuedConnection(own)
        # Its tokenizer may be more than a socket takes before the process has begun to read.
        self.connection.send(setup)
        self._arrived = arrived
        self._reader = threading.Thread(target=self._receive_all, daemon=True)
        self._reader.start()

    def send(self, message):
        self.connection.send(message)

    def end(self):
        """Kill the process, and those that it has started."""
        self._spawned.end()
        # Until no process has the other end of the connection open, and all memory is given back.
        self._reader.join(END_S)
        self.connection.finish(END_S)
        self.connection.close()

    def ends_within(self, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.returncode is not None

    def _receive_all(self):
        try:
            while True:
                self._arrived(self, self.connection.recv())
        except (EOFError, OSError):
            self._arrived(self, Ended(f"its process {how_ended(self.process.wait())}"))


class Engines(Sampler):
    """`count` inference processes; a context manager, which ends them.

    setup_of(index): the Setup of each. sender: WeightSender or WeightPusher. limits: Limits. start(index, setup,
    arrived): a Process, as SpawnedProcess has it. nodes: the RayEngines that `start` is of, which are closed last.
    closing_s: seconds for processes to close their environments at the end, 0 where they have none.
    """

    wait_s = POLL_S

    def __init__(self, setup_of, sender, count, limits, start=SpawnedProcess, nodes=None, closing_s=0.0):
        self.closing_s = closing_s
        self.setup_of, self.sender, self.count, self.limits, self.nodes = setup_of, sender, count, limits, nodes
        # Those who get the requests back, by number.
        self._owners = {}
        self._changed = threading.Condition()
        self._closed, self._error = False, None
        self._restarts, self._newest, self.refusals, self._pauses = [0] * count, None, 0, []
        # The sums of processes that have ended.
        self._past = Alive(0, 0.0, 0.0)
        # (process, message) that nothing has handled yet.
        self._messages = queue.SimpleQueue()
        self.processes = [start(index, setup_of(index), self._arrived) for index in range(count)]
        self._thread = threading.Thread(target=self._watch, name="inference", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        """End all processes."""
        self._closed = True
        self._thread.join()
        if self.closing_s:
            for process in self.processes:
                process.send(Close())
            until = time.monotonic() + self.closing_s
            for process in self.processes:
                process.closed.wait(max(until - time.monotonic(), 0.0))
        for process in self.processes:
            process.end()
        if self.nodes is not None:
            self.nodes.close()

    def check(self):
        """Raise InferenceError if the processes cannot go on, and send weights to those that have not the newest.

        A process lacks weights that arrived damaged, or before it could take them. To be called while the weights
        are those of the last push, and while the other ranks of a trainer that has them in parts wait for what rank 0
        says (weights/sync.py:Again).
        """
        self._raise_error()
        with self._changed:
            if self.sender.needs_offers:
                # Memory of a process that has ended is otherwise missing where its successor takes what there is.
                self.sender.unmap_others(self._offers())
            version, late = self._newest, [process for process in self.processes if self._is_late(process)]
            if late:
                left_out = self.sender.write_again(version, self._offers(), [process.index for process in late])
                self._send_to(late, version, left_out)

    def _raise_error(self):
        if self._error is not None:
            raise self._error

    def _is_late(self, process):
        """Whether a process is to get the newest version, and can."""
        if self._newest is None or (self.sender.needs_offers and process.offer is None):
            return False
        is_refused = self._newest in process.refused and self._newest not in process.pending
        return is_refused or process.sent != self._newest

    @property
    def version(self):
        """The newest version that processes were given, or are to be given."""
        return self._newest

    @property
    def stats(self):
        """Alive: the sums of all processes since the start."""
        with self._changed:
            every = [self._past, *(process.stats for process in self.processes)]
        return Alive(*map(sum, zip(*every, strict=True)))

    def take_pauses(self):
        """Seconds for which decoding paused for new weights, one number for each time since the last call: list."""
        with self._changed:
            pauses, self._pauses = self._pauses, []
        return pauses

    def submit(self, request, owner):
        """Give a GroupRequest to the process with the fewest unfinished groups."""
        with self._changed:
            self._owners[request.number] = owner
            # Groups of a process that is ending are given to the next in its place.
            process = min(self.processes, key=lambda each: (each.is_ending, len(each.groups), each.index))
            self._give(process, request)

    def update_weights(self, version):
        """Send the weights as they are to all processes, as this version; returns before these have taken them.

        Waits until none of them needs the version that is overwritten. Raises InferenceError where that takes longer
        than sync_timeout_s.
        """
        with self._changed:
            self._raise_error()
            deadline = time.monotonic() + self.limits.sync_timeout_s
            while late := [each for each in self.processes if not self.sender.may_write(version, each.pending)]:
                self._raise_error()
                if time.monotonic() > deadline:
                    raise InferenceError(
                        f"inference process {late[0].index} did not take the weights of version "
                        f"{min(late[0].pending)} within {self.limits.sync_timeout_s:g} s (deploy.weight_sync_timeout)"
                    )
                self._changed.wait(POLL_S)
            left_out = self.sender.write(version, self._offers())
            self._newest = version
            ready = [each for each in self.processes if each.offer is not None or not self.sender.needs_offers]
            self._send_to(ready, version, left_out)

    def start(self, version):
        """Give all processes the weights as they are, as this version, each as soon as it can take them."""
        if not self.sender.needs_offers:
            self.update_weights(version)
        self._newest = version

    def _offers(self):
        return {process.index: process.offer for process in self.processes if process.offer is not None}

    def _send_to(self, processes, version, left_out):
        """Send the messages of a version to processes, except those that are left out, which must have ended."""
        for process in processes:
            if process.index not in left_out:
                self._send_weights(process, version)
                continue
            if not process.ends_within(MAPPING_S):
                raise InferenceError(
                    f"inference process {process.index}: weights cannot be written to its memory: "
                    f'{left_out[process.index]}; try deploy.update_weights_transport = "shm"'
                )
            # Nothing is sent to it, and the thread that watches it starts another one in its place.
            process.offer = None

    def _send_weights(self, process, version):
        process.pending.add(version)
        process.sent = version
        for message in self.sender.messages(version):
            process.send(message)

    def _give(self, process, request):
        process.groups[request.number] = request, math.inf
        process.send(request)

    def _arrived(self, process, message):
        if isinstance(message, Closed | Ended):
            process.closed.set()
        self._messages.put((process, message))

    def _watch(self):
        """The thread that handles what processes send."""
        try:
            while not self._closed and self._error is None:
                self._handle_messages()
                self._look_at_limits()
        except Exception as error:  # raised again where the trainer waits
            self._fail(error)

    def _handle_messages(self):
        """Handle all that has arrived; wait POLL_S if nothing has."""
        wait_s = POLL_S
        try:
            while not self._closed and self._error is None:
                self._handle(*self._messages.get(timeout=wait_s))
                wait_s = 0.0
        except queue.Empty:
            pass

    def _handle(self, process, message):
        reason = None
        with self._changed:
            if process is not self.processes[process.index]:
                return  # replaced by now
            process.heard_at = time.monotonic()
            if isinstance(message, Ended):
                reason = message.reason
            else:
                process.has_started = True
            if isinstance(message, Alive):
                process.stats = message
            elif isinstance(message, Offer):
                process.offer = message
            elif isinstance(message, Updated):
                self._pauses.append(message.pause_s)
                process.pending = {version for version in process.pending if version > message.version}
                # One that was refused before an older one was live is still to be sent again.
                process.refused = {v: count for v, count in process.refused.items() if v > message.version}
                self._changed.notify_all()
            elif isinstance(message, Refused):
                reason = self._refused(process, message)
            elif isinstance(message, Failed):
                error = InferenceError(f"inference process {process.index}: {message.message}")
                if message.trace is not None:
                    error.add_note(message.trace)
                self._fail(error)
            elif isinstance(message, Begun):
                for number in message.numbers:
                    process.groups[number] = process.groups[number][0], process.heard_at
            elif isinstance(message, Done):
                owner = self._owners.pop(message.request.number)
                del process.groups[message.request.number]
                process.asked.discard(message.request.number)
        # Without the lock: these may wait for others that want it.
        if isinstance(message, Done):
            (owner.finished if message.request.is_complete else owner.expired)(message.request)
        if reason is not None:
            self._replace(process, reason)

    def _refused(self, process, message):
        """Weights that were damaged on the way are sent again by `check`; the old ones are live until then.

        Returns why the process is to be replaced, or None.
        """
        self.refusals += 1
        process.pending.discard(message.version)
        process.refused[message.version] = count = process.refused.get(message.version, 0) + 1
        self._changed.notify_all()
        return f"it refused weights {count} times: {message.reason}" if count > MAX_REFUSALS else None

    def _look_at_limits(self):
        now, limits, late = time.monotonic(), self.limits, []
        with self._changed:
            for process in self.processes:
                limit_s = limits.stale_s if process.has_started else max(START_S, limits.stale_s)
                if now - process.heard_at > limit_s:
                    late.append((process, f"no sign of life for {limit_s:g} s (async.heartbeat_stale_after_s)"))
                    continue
                for number, (_, begun_at) in process.groups.items():
                    if now - begun_at > limits.timeout_s and number not in process.asked:
                        process.asked.add(number)
                        process.send(Interrupt(number))
        for process, reason in late:
            self._replace(process, reason)

    def _replace(self, process, reason):
        """Start another process in the place of one that has ended, or is to end, with its weights and groups.

        It takes seconds until the old one has ended, in which the lock is free: groups that this one is still given go
        to the new one as well.
        """
        with self._changed:
            # Its memory is mapped no more.
            process.is_ending, process.offer = True, None
        process.end()
        with self._changed:
            self._past = Alive(*(a + b for a, b in zip(self._past, process.stats, strict=True)))
            self._restarts[process.index] = count = self._restarts[process.index] + 1
            if self._error is not None or count > self.limits.max_restarts:
                started = f"it was started {count} times (deploy.max_restarts is {self.limits.max_restarts})"
                self._fail(InferenceError(f"inference process {process.index}: {reason}; {started}"))
                return
            print(
                f"rlnumba: inference process {process.index}: {reason}; starting it anew", file=sys.stderr, flush=True
            )
            setup = self.setup_of(process.index)
            new = self.processes[process.index] = process.restarted(setup, self._arrived)
            requests = [request for request, _ in process.groups.values()]
            if self.sender.needs_offers:
                # Its weights come later, and it begins no group before.
                for request in requests:
                    self._give(new, request)
            else:
                self._give_in_order(
                    new, requests, self.sender.versions[-1:] if setup.in_flight else self.sender.versions
                )
            self._changed.notify_all()

    def _give_in_order(self, process, requests, versions):
        """Give requests to a process where they have the weights that they ask for, in the order of the versions."""
        for version in versions:
            of_version = [each for each in requests if each.version <= version]
            requests = [each for each in requests if each.version > version]
            if of_version or version == versions[-1]:
                self._send_weights(process, version)
            for request in of_version:
                self._give(process, request)

    def _fail(self, error):
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
