"""Starts the ranks of a run on several nodes of a Ray cluster, and ends them all when one fails.

    launch_on_nodes(function, 8, 2, *args)      as launch(function, 8, *args), four ranks on each of two nodes

The first node is this host: its ranks, of which rank 0 is one, are started here, those of another node by an actor
there (RankHost), by the same code. They meet over TCP, and on GPUs by NCCL. The loss of a rank or a node ends the run,
as on one host; Ray starts no rank anew.
"""

import contextlib
import pickle
import threading
import time
from typing import NamedTuple

from rlnumba.errors import RankError
from rlnumba.parallel.communicator import TIMEOUT_S
from rlnumba.parallel.launch import REPORT_S, Ranks, SharedRankError
from rlnumba.parallel.ray_cluster import ActorEnded, Bundles, call, connected, package, visible_index
from rlnumba.parallel.transports.tcp import PIECE_BYTES, Meeting
from rlnumba.runtime import device, signals
from rlnumba.runtime.compile import ahead_of_time

KEY = "deploy.num_train_nodes"
# Seconds in which an actor must have been started.
START_S = 300.0


class Lost(NamedTuple):
    """The contents of a RankError, to be sent; notes: list of str."""

    rank: int
    message: str
    exit_code: int
    because_of: int | None
    notes: list
    is_lost: bool
    is_shared: bool = False

    @classmethod
    def of(cls, error):
        message, is_shared = str(error).removeprefix(f"rank {error.rank}: "), isinstance(error, SharedRankError)
        notes = getattr(error, "__notes__", [])
        return cls(error.rank, message, error.exit_code, error.because_of, notes, error.is_lost, is_shared)

    def error(self):
        """The RankError again."""
        error = (SharedRankError if self.is_shared else RankError)(self.rank, self.message, self.exit_code)
        error.because_of, error.is_lost = self.because_of, self.is_lost
        for note in self.notes:
            error.add_note(note)
        return error


class RankHost:
    """The actor that Ray starts on a node: its methods run in threads of their own."""

    def host(self):
        """The address of this node."""
        return package().util.get_node_ip_address()

    def run(self, links, transport, function, kernels):
        """Run the ranks of these TcpLinks: {rank: pickled result}, or Lost for the first that fails.

        transport, function: those of Ranks. kernels: (module, request) of ahead_of_time.start for the kernels that they
        launch, or None.
        """
        gpus = {}
        if transport != "tcp":
            gpus = {link.rank: visible_index(gpu) for link, gpu in zip(links, package().get_gpu_ids(), strict=True)}
            device.use_gpu(gpus[links[0].rank])
        if kernels is not None:
            ahead_of_time.start(*kernels)
            ahead_of_time.finish()
        place = transport, [gpus.get(rank) for rank in range(links[0].world_size)]
        ranks = Ranks(links, place, function)
        try:
            return ranks.results()
        except RankError as error:
            return Lost.of(error)
        finally:
            ranks.end()


class OtherNode:
    """The ranks of another node, whose RankHost runs them.

    arguments: those of its `run`. results: {rank: pickled result}, or lost: Lost, once they are known.
    """

    def __init__(self, actor, links, *arguments):
        self.actor, self.links, self.results, self.lost = actor, links, None, None
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def wait(self, seconds):
        """Wait until the ranks have ended, at most so many seconds: whether they have."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self):
        """Raise RankError if one of the ranks has failed, and not because another one has ended."""
        if self.lost is not None and self.lost.because_of is None:
            raise self.lost.error()

    def _run(self, *arguments):
        first = self.links[0].rank
        try:
            found = call(self.actor, "run", self.links, *arguments, timeout_s=None)
        except ActorEnded:
            found = Lost(first, f"the node of ranks {first} to {self.links[-1].rank} has ended", 1, None, [], True)
        except Exception as error:  # raised where the run waits
            found = Lost(first, f"internal error: {type(error).__name__}: {error}", 1, None, [], False)
        if isinstance(found, Lost):
            self.lost = found
        else:
            self.results = found


def launch_on_nodes(function, world_size, num_nodes, *args, timeout_s=TIMEOUT_S, piece_bytes=PIECE_BYTES):
    """Run function(communicator, *args) on world_size ranks, as many on each of num_nodes: see launch.

    On GPUs, where this process has chosen device cuda, else on CPUs. Raises ConfigError where the cluster has fewer
    nodes with as many, and what launch raises.
    """
    each, on_gpus = world_size // num_nodes, device.name() == "cuda"
    transport, pickled = "nccl" if on_gpus else "tcp", pickle.dumps((function, args))
    ahead_of_time.finish()
    with contextlib.ExitStack() as stack:
        stack.enter_context(connected(KEY, num_nodes, each, on_gpus, is_one_here=True))
        here = package().get_runtime_context().get_node_id()
        bundles = stack.enter_context(Bundles(KEY, num_nodes - 1, each, 1, on_gpus, "STRICT_SPREAD", [here]))
        actor = package().remote(RankHost)
        actors = [actor.options(**bundles.options(index, each)).remote() for index in range(num_nodes - 1)]
        own = package().util.get_node_ip_address()
        hosts = [own, *(call(actor, "host", timeout_s=START_S) for actor in actors)]
        meeting = stack.enter_context(Meeting(own, world_size))
        links = meeting.links([hosts[rank // each] for rank in range(world_size)], timeout_s, piece_bytes)
        stack.enter_context(signals.handled())
        stack.enter_context(signals.held())
        others = [
            OtherNode(actor, links[first : first + each], transport, pickled, ahead_of_time.request())
            for actor, first in zip(actors, range(each, world_size, each), strict=True)
        ]
        place = transport, [*range(each), *[None] * (world_size - each)]
        ranks = Ranks(links[:each], place, pickled)
        stack.callback(ranks.end)
        results = _results(ranks, others, timeout_s)
        return [pickle.loads(results[rank]) for rank in range(world_size)]


def _results(ranks, others, timeout_s):
    """{rank: pickled result} of this node's Ranks and of OtherNodes. Raises RankError for the first that fails."""

    def check():
        for other in others:
            other.check()

    try:
        results = dict(ranks.results(check))
    except RankError as error:
        deadline = time.monotonic() + 2 * REPORT_S
        for other in others if error.because_of is not None else ():
            other.wait(max(deadline - time.monotonic(), 0.0))
        check()
        raise
    for other in others:
        if not other.wait(timeout_s):
            rank = other.links[0].rank
            raise RankError(rank, f"did not end within {timeout_s:g} s of rank 0")
        check()
        if other.lost is not None:
            raise other.lost.error()
        results |= other.results
    return results
