"""Ranks that meet after an error of one: from any operation, with nothing left of it, over each transport of the host.

Ranks are threads, with arenas of NumPy arrays for transport peer.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.errors import CommunicationError, RankError, SharedError
from rlnumba.parallel.communicator import Communicator
from rlnumba.parallel.transports import messages, shared_memory, tcp
from rlnumba.parallel.transports.peer import PeerCommunicator
from rlnumba.runs.ranks import last_checkpoint_named
from rlnumba.runs.run_folder import RunFolder
from tests.parallel import ranks
from tests.parallel.host_arena import HostArena, random_delay

TIMEOUT_S = 30.0
PIECES = 3 * ranks.PIECE_BYTES


def run(world_size, transport, work, timeout_s=TIMEOUT_S):
    """What work(communicator) returned, or the error that it raised, on each rank."""
    arenas, found = [None] * world_size, [None] * world_size
    ready = threading.Barrier(world_size)

    def rank(link):
        control = link.connect()
        try:
            communicator = control
            if transport == "peer":
                arena = HostArena(link.rank, arenas, ranks.PIECE_BYTES, 0, random_delay(link.rank))
                ready.wait()
                communicator = PeerCommunicator(control, arena, pytest.fail)
            found[link.rank] = work(communicator)
        except BaseException as error:  # compared in the test's thread
            found[link.rank] = error
        # Without waiting for the others, as a process ends.
        control.close()

    if transport == "tcp":
        with tcp.Meeting("localhost", world_size) as meeting:
            in_threads(rank, meeting.links(["localhost"] * world_size, timeout_s, ranks.PIECE_BYTES))
    else:
        in_threads(rank, shared_memory.make_links(world_size, timeout_s, ranks.PIECE_BYTES))
    return found


def in_threads(function, links):
    threads = [threading.Thread(target=function, args=(link,)) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_in(communicator, operation):
    """An operation in which a rank waits for all others; of put and get for rank 1."""
    if operation == "gather":
        communicator.gather(np.zeros(PIECES, np.uint8), np.empty((communicator.world_size, PIECES), np.uint8))
    elif operation == "fold":
        communicator.fold(np.zeros(1000, np.float32), np.empty(1000, np.float32), 0, communicator.world_size, True)
    elif operation == "put":
        communicator.put(np.zeros(PIECES, np.uint8), 1)
    elif operation == "get":
        communicator.get(np.empty(PIECES, np.uint8), 1)
    elif operation == "objects":
        communicator.objects("x" * PIECES)


# Those in which ranks on GPUs wait on the host.
OF_PEER = ("fold", "objects")


@pytest.mark.parametrize(
    "transport, operation",
    [(transport, each) for transport in ("shm", "tcp") for each in ("gather", "put", "get", *OF_PEER)]
    + [("peer", each) for each in OF_PEER],
)
def test_ranks_meet_from_any_operation(transport, operation):
    """Rank 1 has failed, rank 0 is at work meanwhile, and the others find out by rank 1 or by each other."""

    def work(communicator):
        communicator.objects("before")
        if communicator.rank > 1 or communicator.rank == 0 and operation in OF_PEER:
            with pytest.raises(CommunicationError, match=f"{operation} .*: rank [0-3] has failed") as error:
                wait_in(communicator, operation)
            assert error.value.rank not in (None, communicator.rank)
            with pytest.raises(CommunicationError, match="objects .*: rank . has failed"):
                communicator.objects("a second time")
        met = communicator.meet_after_error(f"of rank {communicator.rank}")
        # What is left of an operation would be taken for one of these.
        for seed in range(8):
            ranks.check_gather(communicator, seed, (PIECES + seed,), np.uint8)
            ranks.check_fold(communicator, seed, 700, communicator.world_size, seed % 2 == 0)
            ranks.check_pair(communicator, seed, (PIECES,), np.uint8)
        return met

    assert run(4, transport, work) == [[f"of rank {rank}" for rank in range(4)]] * 4


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_meet_again_and_again(transport):
    def work(communicator):
        return [communicator.meet_after_error((number, communicator.rank)) for number in range(3)]

    assert run(3, transport, work) == [[[(number, rank) for rank in range(3)] for number in range(3)]] * 3


def test_a_rank_that_is_gone_is_not_waited_for():
    def work(communicator):
        if communicator.rank != 1:
            communicator.meet_after_error(None)

    found = run(3, "shm", work)
    assert found[1] is None and {str(each) for each in found[::2]} <= {
        "failed 0: rank 0 has ended", "failed 0: rank 1 has ended", "failed 0: rank 2 has ended",
        "objects 0: rank 0 has ended", "objects 0: rank 2 has ended",
    }  # fmt: skip


def test_a_rank_that_does_not_come_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(messages, "MEETING_S", 0.2)
    left = threading.Event()

    def work(communicator):
        if communicator.rank == 1:
            assert left.wait(60)
            return
        try:
            with pytest.raises(CommunicationError, match=r"failed 0: rank 1 did not join rank 0 within 0\.[12]\d* s"):
                communicator.meet_after_error(None)
            with pytest.raises(CommunicationError, match="rank 1 does not answer"):
                communicator.meet_after_error(None)
        finally:
            left.set()

    assert run(2, "shm", work) == [None, None]


def test_gpus_at_work_that_does_not_end_do_not_meet(monkeypatch):
    """As where a stream waits for what a rank that has failed did not begin; or where the GPU itself has failed."""

    def fails(seconds):
        raise RuntimeError("an illegal memory access")

    for settles in (lambda seconds: False, fails):

        def work(communicator, settles=settles):
            if communicator.rank == 1:
                communicator._memory.settles = settles
            return communicator.meet_after_error(1)

        assert run(2, "peer", work) == [None, None]


class Meets(Communicator):
    """Finds what other ranks say; found: a list, None, or an error."""

    def __init__(self, found):
        super().__init__(0, 2)
        self.found = found

    def meet_after_error(self, value):
        if isinstance(self.found, CommunicationError):
            raise self.found
        return None if self.found is None else [value, *self.found]


@pytest.mark.parametrize(
    "found, step, error, expected",
    [
        ([3], 3, ValueError(), True),
        ([4], 3, ValueError(), False),
        ([None], 3, ValueError(), False),
        ([None], None, ValueError(), False),
        ([3], None, SharedError(), False),
        (CommunicationError("rank 1 has ended", 1), 3, SharedError(), False),
        # NCCL: ranks do not meet, and are in the same place where all raise the error.
        (None, 3, SharedError(), True),
        (None, 3, KeyboardInterrupt(), True),
        (None, 3, ValueError(), False),
        (None, None, SharedError(), False),
    ],
)
def test_a_step_is_whole_if_all_ranks_have_it(found, step, error, expected):
    folder = SimpleNamespace(is_alone=False, communicator=Meets(found))
    assert RunFolder._is_whole(folder, error, step) is expected


@pytest.mark.parametrize("is_lost, checkpoints", [(True, ["step-2", "step-10"]), (True, []), (False, ["step-2"])])
def test_the_checkpoint_after_the_loss_of_a_rank_is_named(tmp_path, capsys, is_lost, checkpoints):
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    error = RankError(2, "was ended by SIGKILL")
    error.is_lost = is_lost
    with pytest.raises(RankError), last_checkpoint_named(tmp_path):
        raise error
    lost = "rlnumba: rank 2 has taken its part of the last step with it: "
    newest = f"--resume goes on from {tmp_path}/checkpoints/step-10 (in Python train(resume_from_checkpoint=True))\n"
    expected = lost + (newest if checkpoints else "no checkpoint is complete yet\n") if is_lost else ""
    assert capsys.readouterr().err == expected
