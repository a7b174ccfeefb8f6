"""The inference process of a node of a Ray cluster: the Server of inference_worker.py, whose messages come by calls.

    begin(setup)                 starts the Server in a thread; returns who this is
    give(incarnation, messages)  to the Server
    take(incarnation)            from the Server, as soon as there is something

Ray may start an actor anew at any time, which then is empty: nothing of what was given before is there. So a start has
a number of its own, its incarnation; a call for another one is refused, and the trainer begins again.
"""

import os
import queue
import socket
import threading
import uuid
from typing import NamedTuple

from rlnumba.parallel.ray_cluster import visible_index
from rlnumba.runtime.environment import versions_of_results
from rlnumba.sampling.inference_worker import HEARTBEAT_S, serve
from rlnumba.sampling.weights.sync import Bucket, Staging


class Beginning(NamedTuple):
    """An actor's answer to `begin`: its incarnation, its node's id and name, and {package: version}."""

    incarnation: str
    node_id: str
    node: str
    versions: dict


class OtherIncarnation(Exception):
    """The actor has been started anew since."""


class EngineActor:
    """The actor that Ray starts; its methods run in threads of their own."""

    def __init__(self):
        self.incarnation, self.mailbox, self.staging = None, Mailbox(), None

    def begin(self, setup):
        """Start the Server of a Setup: Beginning.

        Its GPUs are those that Ray has chosen, unless it has some; its staging is memory of this host.
        """
        import ray

        if self.incarnation is not None:
            # The trainer has not had the first answer, and counts on an empty one.
            os._exit(1)
        if setup.device == "cuda" and setup.gpu is None:
            gpus = list(map(visible_index, ray.get_gpu_ids()))
            # Ray has chosen fewer GPUs if processes share them.
            first, *others = (gpus[index % len(gpus)] for index in range(1 + len(setup.followers)))
            setup = setup._replace(gpu=first, followers=tuple((gpu, setup.num_sharing) for gpu in others))
        nbytes, slots, _ = setup.staging
        self.staging = Staging(nbytes, slots)
        setup = setup._replace(staging=(nbytes, slots, self.staging.descriptor))
        self.incarnation = uuid.uuid4().hex
        threading.Thread(target=self._serve, args=(setup,), daemon=True).start()
        context = ray.get_runtime_context()
        return Beginning(self.incarnation, context.get_node_id(), socket.gethostname(), versions_of_results())

    def give(self, incarnation, messages):
        """Hand messages to the Server, those about weights once these are here."""
        self._check(incarnation)
        for message in messages:
            if isinstance(message, Bucket):
                message = self._receive(message)
            self.mailbox.put(message)

    def take(self, incarnation):
        """The messages that the Server has sent since the last call: list; waits a second for one."""
        self._check(incarnation)
        return self.mailbox.sent()

    def _receive(self, bucket):
        """Copy the object of a Bucket, fetched from another node if need be, to staging: the Bucket without it."""
        import ray

        first, part = ray.get(bucket.reference)
        self.staging.of_version(bucket.version)[first : first + part.size] = part
        return bucket._replace(reference=None)

    def _check(self, incarnation):
        if incarnation != self.incarnation:
            raise OtherIncarnation()

    def _serve(self, setup):
        serve(self.mailbox, lambda: setup)
        # The last messages are taken before the process ends; the trainer ends it earlier.
        threading.Event().wait(2 * HEARTBEAT_S)
        os._exit(1)


class Mailbox:
    """A connection, as the Server uses it, whose other end is in this process."""

    def __init__(self):
        self._inbox, self._outbox, self._next = queue.SimpleQueue(), queue.SimpleQueue(), []

    def __reduce__(self):
        # A follower of an engine is given its leader's connection, to keep it open: here it gets an empty one.
        return Mailbox, ()

    def poll(self, timeout=0.0):
        """Whether a message is there, within so many seconds."""
        if not self._next:
            try:
                self._next.append(self._inbox.get(timeout=timeout))
            except queue.Empty:
                return False
        return True

    def recv(self):
        self.poll(None)
        return self._next.pop()

    def send(self, message):
        self._outbox.put(message)

    def finish(self, timeout_s):
        """Do nothing: `sent` has what was sent."""

    def put(self, message):
        """A message for `recv`."""
        self._inbox.put(message)

    def sent(self):
        """The messages that were given to `send`: list; waits HEARTBEAT_S for one."""
        found = []
        try:
            found.append(self._outbox.get(timeout=HEARTBEAT_S))
            while True:
                found.append(self._outbox.get_nowait())
        except queue.Empty:
            return found
