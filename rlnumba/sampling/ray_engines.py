"""Inference engines on the nodes of a Ray cluster, as Engines has processes.

An engine is an actor (ray_actor.EngineActor). It gets and sends the messages of any inference process; weights go
through Ray's object store, which copies them to a node once, and groups with what calls return.

| what ends                   | how it is noticed                       | what takes its place                        |
| --------------------------- | --------------------------------------- | ------------------------------------------- |
| the actor's process         | Ray: a call fails                       | the actor, which Ray starts anew there      |
| its node                    | Ray: a call fails                       | the actor, which Ray starts on another node |
| nothing, the node is frozen | a call is not answered within STALE_S   | a new actor on a node that answers          |
| nothing, the engine stalls  | async.heartbeat_stale_after_s (Engines) | a new actor in its place                    |

In all cases Engines sends the newest weights first, then the groups that were not finished.
"""

import queue
import threading
import time
from typing import NamedTuple

from rlnumba.errors import UserError
from rlnumba.parallel.communicator import as_bytes
from rlnumba.parallel.ray_cluster import ActorEnded, EnginePlaces, NoAnswer, call, package
from rlnumba.runtime.environment import versions_of_results
from rlnumba.sampling.inference import START_S, Ended, Process
from rlnumba.sampling.inference_group import Failed
from rlnumba.sampling.ray_actor import EngineActor, OtherIncarnation
from rlnumba.sampling.weights.shards import whole_bytes
from rlnumba.sampling.weights.sync import WeightSender, checksums_of, host_buckets, layout_of, messages_of

# Seconds without an answer after which a node counts as frozen.
STALE_S = 60.0
# Seconds between two attempts to reach an actor that Ray is starting anew.
RETRY_S = 0.5
# Seconds in which threads end whose actor was killed.
ENDING_S = 5.0


class RayEngines:
    """Starts the engines of a run: `start` is what Engines takes; `close` gives their places back.

    deploy: DeployConfig; on_gpus: the same as that of EnginePlaces; limits: Limits.
    """

    def __init__(self, deploy, on_gpus, limits):
        self.places, self.max_restarts = EnginePlaces(deploy, on_gpus), limits.max_restarts
        # Seconds in which a call must be answered, and one that gives messages, weights among them.
        self.stale_s, self.give_s = min(limits.stale_s, STALE_S), limits.sync_timeout_s

    def start(self, index, setup, arrived):
        """A RayProcess; see SpawnedProcess."""
        return RayProcess(index, setup, arrived, self, self.new_actor(index))

    def new_actor(self, index):
        """An actor that is being started in the place of an engine. One call of each method runs at a time."""
        actor = package().remote(EngineActor)
        options = {"max_restarts": self.max_restarts, "max_task_retries": 0, "max_concurrency": 4}
        return actor.options(**options, **self.places.options(index)).remote()

    def close(self):
        self.places.close()


class RayProcess(Process):
    """An inference process on a node of the cluster; see SpawnedProcess. engines: RayEngines; actor: it, empty."""

    def __init__(self, index, setup, arrived, engines, actor):
        super().__init__(index)
        self.engines, self.actor, self._setup = engines, actor, setup
        self._arrived, self._outbox, self._threads, self._closed = arrived, queue.SimpleQueue(), [], False
        # The actor's Beginning, when it has last answered, and whether Ray starts it anew.
        self.beginning, self._answered_at, self.is_restarting = None, time.monotonic(), False
        self._start(self._receive_all)

    def send(self, message):
        self._outbox.put(message)

    def end(self):
        self._closed = True
        self._outbox.put(None)
        if not self.is_restarting:
            package().kill(self.actor)
        for thread in self._threads:
            thread.join(ENDING_S)

    def ends_within(self, seconds):
        return self.is_restarting

    def restarted(self, setup, arrived):
        actor = self.actor
        if not self.is_restarting:
            is_frozen = time.monotonic() - self._answered_at > self.engines.stale_s / 2
            if self.beginning is not None and is_frozen:
                self.engines.places.leave(self.index, self.beginning.node_id)
            actor = self.engines.new_actor(self.index)
        return RayProcess(self.index, setup, arrived, self.engines, actor)

    def _start(self, function):
        thread = threading.Thread(target=self._unless_lost, args=(function,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _unless_lost(self, function):
        """function(); if it fails, that is the last thing that arrives."""
        try:
            function()
        except (ActorEnded, OtherIncarnation) as error:
            self.is_restarting = not (isinstance(error, ActorEnded) and error.is_final)
            self._arrived(self, Ended(f"its actor{self._node} has ended"))
        except NoAnswer as error:
            self._arrived(self, Ended(f"its actor{self._node} is silent: {error}"))
        except Exception as error:  # reported by the trainer
            self._arrived(self, Failed.of(error))

    @property
    def _node(self):
        return f" on node {self.beginning.node} ({self.beginning.node_id[:8]})" if self.beginning else ""

    def _receive_all(self):
        self.beginning = self._begin()
        self._start(self._send_all)
        while not self._closed:
            found = call(self.actor, "take", self.beginning.incarnation, timeout_s=self.engines.stale_s)
            self._answered_at = time.monotonic()
            for message in found:
                self._arrived(self, message)

    def _begin(self):
        """The Beginning of the actor, once Ray has started it."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                found = call(self.actor, "begin", self._setup, timeout_s=max(deadline - time.monotonic(), 0.0))
                break
            except ActorEnded as error:
                if error.is_final or self._closed:
                    raise
                time.sleep(RETRY_S)
        self._answered_at, own = time.monotonic(), versions_of_results()
        for name, version in found.versions.items():
            if version != own[name]:
                raise UserError(f"node {found.node} has {name} {version}, and the trainer {own[name]}")
        return found

    def _send_all(self):
        while True:
            messages = [self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get())
            if None in messages:
                return
            call(self.actor, "give", self.beginning.incarnation, messages, timeout_s=self.engines.give_s)


class Room(NamedTuple):
    """The size of an ObjectSender's staging, as a WeightSender's Staging has it: bytes of a version, and versions."""

    nbytes: int
    slots: int
    descriptor: int | None = None


class ObjectSender(WeightSender):
    """A WeightSender whose staging is Ray's object store, which copies a bucket to each node once.

    Objects stay as long as the messages that name them.
    """

    def __init__(self, trained, slots, bucket_bytes):
        self.trained, self.bucket_bytes = trained, bucket_bytes
        self.staging, self._messages = Room(whole_bytes(trained), slots), {}

    def write(self, version, offers=None):
        """Put the weights as they are into the store; returns {}. offers: not needed."""
        self._messages.pop(self.replaced_by(version), None)
        first, checksums, references = 0, [], []
        for part in map(as_bytes, host_buckets(self.trained, self.bucket_bytes)):
            checksums += checksums_of([part])
            references.append(self.put(first, part))
            first += part.size
        begin, *buckets, finish = messages_of(version, layout_of(self.trained, self.bucket_bytes), checksums)
        buckets = [each._replace(reference=reference) for each, reference in zip(buckets, references, strict=True)]
        self._messages[version] = [begin, *buckets, finish]
        return {}

    @staticmethod
    def put(first, part):
        """The reference to (first, part), the bytes of a version from `first` on, as EngineActor takes it."""
        return package().put((first, part))
