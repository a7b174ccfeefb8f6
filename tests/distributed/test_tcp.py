"""Transport tcp: every operation against NumPy, between processes of this host, and what happens to ranks that do not
meet."""

import re
import socket
import threading
import time

import pytest

from rlnumba.distributed import launch
from rlnumba.distributed.tcp import Meeting, TcpLink
from rlnumba.errors import CommunicationError, RankError
from tests.distributed import ranks
from tests.distributed.test_shared_memory import DIFFERENT

TIMEOUT_S = 1.5


def in_threads(function, world_size, *arguments, timeout_s=TIMEOUT_S):
    """[what function(communicator, *arguments) returned or raised] of ranks in threads of this process."""
    with Meeting("localhost", world_size) as meeting:
        found = [None] * world_size

        def work(link):
            communicator = link.connect()
            try:
                found[link.rank] = function(communicator, *arguments)
            except CommunicationError as error:
                found[link.rank] = error
            communicator.close()

        links = meeting.links(["localhost"] * world_size, timeout_s, ranks.PIECE_BYTES)
        threads = [threading.Thread(target=work, args=(link,), daemon=True) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_operations_equal_numpy(world_size):
    done = in_threads(ranks.check_all_operations, world_size, timeout_s=60)
    assert len(done) == world_size and min(done) > 90


def test_all_operations_between_processes():
    assert min(launch(ranks.check_all_operations, 2, transport="tcp", piece_bytes=ranks.PIECE_BYTES)) > 90


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_in_different_operations_are_named(case):
    errors = in_threads(ranks.different, 2, case)
    assert any(str(error).endswith(DIFFERENT[case]) for error in errors if error is not None), errors


@pytest.mark.parametrize("kind", ["kill", "stall"])
def test_a_rank_that_ends_or_stands_still_ends_all(monkeypatch, tmp_path, kind):
    monkeypatch.setenv("RLNUMBA_FAULT", f"fold:1:{kind}:1")
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        launch(ranks.process_and_operations, 2, tmp_path, timeout_s=TIMEOUT_S, transport="tcp")
    assert time.monotonic() - start < TIMEOUT_S + 10
    # Of the gather before, what rank 1 had not yet written when it ended is lost.
    ended = r"rank 1: was ended by SIGKILL \(rank 0: (gather|fold) \d+ .*: rank 1 has ended\)"
    stands_still = r"rank 0: fold \d+ .*: rank 1 did not join rank 0 within 1.5 s"
    assert re.fullmatch(ended if kind == "kill" else stands_still, str(error.value))


def test_a_rank_that_does_not_come_ends_the_start():
    with Meeting("localhost", 2) as meeting:
        with pytest.raises(
            CommunicationError, match="rank 0 did not meet all 2 ranks within 0.2 s: some have not said"
        ):
            meeting.links(["localhost"] * 2, 0.2)[0].connect()


def test_a_process_without_the_key_is_refused():
    with Meeting("localhost", 1) as meeting:
        with pytest.raises(CommunicationError, match="rank 0 did not meet all 1 ranks"):
            TcpLink(0, "localhost", 1, meeting.address, b"another", 1 << 20, 1.0).connect()
        with socket.create_connection(meeting.address):
            pass
        assert meeting.links(["localhost"])[0].connect().world_size == 1
