"""The inference process of inference.py: an engine whose weights and requests come from the trainer.

It ends when the trainer's end of the connection closes, however that happens. The trainer's messages about weights go
to a WeightReceiver at once, and groups wait for the weights that they ask for. Between two decode steps new weights
become the live ones. If the model is cut over several GPUs, this process leads those of the others
(inference_group.py).
"""

import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import NamedTuple

from rlnumba.config import EngineConfig, LoraConfig, QuantizationConfig
from rlnumba.engine.core import Engine
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.environments.agents import AgentsSetup
from rlnumba.environments.episode import Episode
from rlnumba.errors import CommunicationError, UserError
from rlnumba.parallel.communicator import TIMEOUT_S
from rlnumba.runtime import garbage
from rlnumba.sampling.environment_rewards import EnvironmentRewards
from rlnumba.sampling.inference_group import FINISH_S, Failed, Followers, HeldModel, choose_device
from rlnumba.sampling.queued_connection import QueuedConnection
from rlnumba.sampling.sampler import Alive
from rlnumba.sampling.weights.push import OwnStaging
from rlnumba.sampling.weights.sync import Begin, Bucket, Finish, Staging, WeightReceiver, WeightsRefused

# Seconds between two signs of life, unless a step takes longer.
HEARTBEAT_S = 0.2
# Most seconds that a group waits to be sent once its rewards are known, where there is nothing to compute.
SCORING_S = 0.01


class Setup(NamedTuple):
    """Settings that an inference process gets at its start.

    held: the trainer's HeldModel; gpu: the number of its GPU, which num_sharing processes use, None on the cpu device.
    staging: (bytes of a version, number of versions, descriptor), or None: the process has its own. in_flight,
    keep_cache: whether running completions go on with new weights, and with their keys and values. followers:
    (gpu, num_sharing) of each further process that has a part of the model; timeout_s: how long these processes wait
    for each other. kernels: (module, request) of ahead_of_time.start, or None for a process that shares the cache with
    the trainer, which compiles for both. agents: of a run with tools or environments, which this process has itself.
    quantization: of the frozen base of an adapter, or None.
    """

    held: HeldModel
    dtype: str
    lora: LoraConfig | None
    seed: int
    gemm: str
    engine: EngineConfig
    device: str
    gpu: int | None
    num_sharing: int
    staging: tuple | None
    bucket_bytes: int
    in_flight: bool
    keep_cache: bool
    followers: tuple = ()
    timeout_s: float = TIMEOUT_S
    kernels: tuple | None = None
    agents: AgentsSetup | None = None
    quantization: QuantizationConfig | None = None


class Interrupt(NamedTuple):
    """A message to an inference process that asks for a group back."""

    number: int


class Begun(NamedTuple):
    """A message to the trainer: the groups of these numbers are being computed from now on, and have waited before."""

    numbers: list


class Done(NamedTuple):
    """A GroupRequest that an inference process returns, complete, or as far as it was when it was interrupted."""

    request: GroupRequest


class Close(NamedTuple):
    """A message to an inference process: close the environments, and end."""


class Closed(NamedTuple):
    """The last message to the trainer of a process that has closed its environments after a Close."""


class Updated(NamedTuple):
    """A message to the trainer: the weights of a version are live; for them no kernel ran for so many seconds."""

    version: int
    pause_s: float


class Refused(NamedTuple):
    """A message to the trainer: the weights of a version were not taken."""

    version: int
    reason: str


def main(descriptor):
    """Serve the connection of a file descriptor until it closes."""
    incoming = Connection(descriptor)
    # Decoding does not wait for the trainer to read what is complete.
    connection = QueuedConnection(incoming)
    code = serve(connection, lambda: receive_setup(incoming))
    connection.finish(FINISH_S)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Not through exit handlers, which may wait for threads.
    os._exit(code)


def receive_setup(connection):
    """The Setup that comes over a Connection behind whether it has staging, and the descriptor of this."""
    descriptor = reduction.recv_handle(connection) if connection.recv() else None
    setup = connection.recv()
    if descriptor is not None:
        setup = setup._replace(staging=(*setup.staging[:2], descriptor))
    return setup


def serve(connection, setup_of):
    """Serve a connection until it closes: the exit code of this process, whose end it is. setup_of(): the Setup."""
    try:
        setup = setup_of()
        followers = Followers(setup, connection)
        with closing(Server(connection, setup, followers)) as server:
            server.run()
        connection.send(Closed())
    except (EOFError, OSError):
        pass  # the trainer has ended
    except CommunicationError as error:
        failure = followers.failure()
        if failure is not None:
            connection.send(failure)
        else:  # the trainer starts all processes of the engine anew
            print(f"rlnumba: {error} ({followers.ended()})", file=sys.stderr)
        return 1
    except Exception as error:  # reported by the trainer
        connection.send(Failed.of(error))
    return 0


class Server:
    """Serves one connection."""

    def __init__(self, connection, setup, followers):
        self.connection, self.setup = connection, setup
        choose_device(setup)
        model = followers.load_model(setup)
        self.ranks = model.ranks
        # Before the KV cache takes what memory is left.
        if setup.staging is None:
            staging = OwnStaging(model.trained, setup.bucket_bytes)
        else:
            staging = Staging(*setup.staging)
        self.groups = Episodes(Engine(model, setup.held.tokenizer, setup.engine))
        self.receiver = WeightReceiver(model.trained, staging, setup.bucket_bytes)
        # No group can begin before the first weights have arrived.
        self.groups.update_weights(self.receiver.version)
        self.busy_s, self.idle_s, self.heard_at = 0.0, 0.0, 0.0
        self.is_frozen = self.is_closing = False
        self.agents = self.rewards = None
        if setup.agents is not None:
            self.agents = setup.agents.agents(setup.held.tokenizer)
            if setup.agents.rewards is not None:
                self.rewards = EnvironmentRewards(setup.agents.rewards, self.agents)
        if setup.staging is None:
            self._lead("open_staging", staging.offer)
            connection.send(staging.offer)

    def run(self):
        """Serve until a Close, or until the connection closes, which raises EOFError or OSError."""
        while not self.is_closing:
            self._beat()
            self._receive()
            self._update()
            if self.rewards is not None:
                for request in self.rewards.take():
                    self.connection.send(Done(request))
            if not self.groups.is_idle:
                began, waited_s = time.perf_counter(), self.groups.waited_s
                complete = self.groups.step()
                self.busy_s += time.perf_counter() - began - (self.groups.waited_s - waited_s)
                if begun := self.groups.take_begun():
                    self.connection.send(Begun(begun))
                if complete:
                    self._beat(now=True)
                for request in complete:
                    if self.rewards is not None and isinstance(request.episode, Episode):
                        self.rewards.begin(request)
                    else:
                        self.connection.send(Done(request))
                if complete and not self.is_frozen:
                    # Objects that a process has by now it has until its end.
                    self._lead("freeze")
                    garbage.freeze()
                    self.is_frozen = True

    def close(self):
        """Drop the episodes, and close their environments."""
        if self.rewards is not None:
            self.rewards.close()
        if self.agents is not None:
            self.groups.end_episodes()
            try:
                self.agents.close()
            except UserError as error:  # the trainer has all that it wants
                print(f"rlnumba: {error}", file=sys.stderr)

    def _beat(self, now=False):
        """Send a sign of life if it is time for one."""
        if now or time.monotonic() - self.heard_at > HEARTBEAT_S:
            self._lead("meet")
            self.heard_at = time.monotonic()
            self.connection.send(Alive(self.groups.num_tokens, self.busy_s, self.idle_s))

    def _receive(self):
        """Take all messages that have arrived; without anything else to do, wait for one."""
        waits = self.groups.is_idle and not self.receiver.ready and not self.receiver.is_checking
        began = time.perf_counter()
        is_scoring = self.rewards is not None and self.rewards.num_begun
        wait_s = SCORING_S if is_scoring else HEARTBEAT_S
        has_message = self.connection.poll(wait_s if waits else 0.0)
        if waits:
            self.idle_s += time.perf_counter() - began
        while has_message:
            message = self.connection.recv()
            if isinstance(message, GroupRequest):
                self.groups.submit(self._with_agents(message))
            elif isinstance(message, Interrupt):
                request = self.groups.interrupt(message.number)
                if request is not None:
                    # What is done has its environments here, and its rewards have not read them.
                    self.connection.send(Done(request if self.rewards is None else replace(request, done={})))
            elif isinstance(message, Close):
                self.is_closing = True
            elif isinstance(message, Begin | Bucket | Finish):
                self._or_refused(self.receiver.take, message)
            has_message = self.connection.poll()
        self._or_refused(self.receiver.check)

    def _with_agents(self, request):
        """A GroupRequest whose episodes have the tools and environments of this process."""
        if not isinstance(request.episode, Episode):
            return request
        return replace(request, episode=request.episode.played_by(self.agents))

    def _or_refused(self, function, *arguments):
        """Call a function of the receiver, and report it if that refuses weights."""
        try:
            function(*arguments)
        except WeightsRefused as error:
            self.connection.send(Refused(error.version, str(error)))

    def _update(self):
        """Make weights that are ready the live ones, if it is time for them.

        In the order of their versions, so that without in-flight updates every group has the one that it asked for.
        """
        while self.receiver.ready and (self.setup.in_flight or self.groups.may_change_weights):
            self.groups.synchronize()
            began = time.perf_counter()
            self._lead("copy_weights", self.receiver.ready[0])
            version = self.receiver.apply()
            # The followers have copied them, too.
            self._lead("meet")
            self.groups.update_weights(version, self.setup.keep_cache)
            self.connection.send(Updated(version, time.perf_counter() - began))

    def _lead(self, name, *arguments):
        """Let the followers, if there are any, do this: inference_group._follow."""
        if self.ranks is not None:
            self.ranks.lead(name, *arguments)
