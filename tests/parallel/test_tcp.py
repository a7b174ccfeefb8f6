"""Transport tcp: every operation against NumPy, between processes of this host, and what happens to ranks that do not
meet."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
import sys
import threading
import time

import numpy as np
import pytest

from rlnumba.errors import CommunicationError, RankError
from rlnumba.parallel import launch
from rlnumba.parallel.transports import tcp
from rlnumba.parallel.transports.messages import limit_waiting
from rlnumba.parallel.transports.tcp import Meeting, TcpLink
from tests.parallel import ranks
from tests.parallel.test_shared_memory import DIFFERENT

TIMEOUT_S = 1.5
# Seconds for what takes as long as the machine is busy.
WAIT_S = 120.0


def in_threads(function, world_size, *arguments):
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

        links = meeting.links(["localhost"] * world_size, WAIT_S, ranks.PIECE_BYTES)
        threads = [threading.Thread(target=work, args=(link,), daemon=True) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_operations_equal_numpy(world_size):
    done = in_threads(ranks.check_all_operations, world_size)
    assert len(done) == world_size and min(done) > 90


@pytest.mark.usefixtures("quick_starts")
def test_all_operations_between_processes():
    assert min(launch(ranks.check_all_operations, 2, transport="tcp", piece_bytes=ranks.PIECE_BYTES)) > 90


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_in_different_operations_are_named(case):
    errors = in_threads(ranks.different, 2, case)
    assert any(str(error).endswith(DIFFERENT[case]) for error in errors if error is not None), errors


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("kind", ["kill", "stall"])
def test_a_rank_that_ends_or_stands_still_ends_all(tmp_path, kind):
    with pytest.raises(RankError) as error:
        launch(ranks.process_and_operations, 2, tmp_path, TIMEOUT_S, f"fold:1:{kind}:1", transport="tcp")
    # Of the gather before, what rank 1 had not yet written when it ended is lost.
    ended = r"rank 1: was ended by SIGKILL \(rank 0: (gather|fold) \d+ .*: rank 1 has ended\)"
    stands_still = r"rank 0: fold \d+ .*: rank 1 did not join rank 0 within 1.5 s"
    assert re.fullmatch(ended if kind == "kill" else stands_still, str(error.value))


def test_a_rank_that_does_not_come_ends_the_start():
    with Meeting("localhost", 2) as meeting:
        with pytest.raises(CommunicationError, match="rank 0 did not meet all 2 ranks within 1 s: some have not said"):
            meeting.links(["localhost"] * 2, 1.0)[0].connect()


# What those send who do not know the protocol: nothing, a line, a message, one of more bytes than are read.
STRANGE = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x14" + bytes(20), b"\xff" * 64)


def visit(stack, address):
    """Connections of strangers, open as long as an ExitStack: list of sockets."""
    found = [stack.enter_context(socket.create_connection(address)) for _ in STRANGE]
    for connected, sent in zip(found, STRANGE, strict=True):
        connected.sendall(sent)
    return found


def test_strangers_hold_up_no_start(monkeypatch):
    """Whether they come to the process that starts the ranks or to a rank, before any of these."""
    begin, visited = tcp.Listener.__init__, []
    with contextlib.ExitStack() as stack:

        def begin_among_strangers(self, host, key):
            begin(self, host, key, handshake_s=600.0)
            visited.append(visit(stack, self.address))

        monkeypatch.setattr(tcp.Listener, "__init__", begin_among_strangers)
        assert min(in_threads(ranks.check_all_operations, 3)) > 90
        assert len(visited) == 4


def test_strangers_are_dropped():
    with tcp.Listener("localhost", b"key", handshake_s=0.2) as listener, contextlib.ExitStack() as stack:
        for connected in visit(stack, listener.address):
            connected.settimeout(WAIT_S)
            # The challenge, then the end: a reset where not all that was sent has been read.
            with contextlib.suppress(ConnectionResetError):
                while connected.recv(1 << 10):
                    pass
        assert listener.next(time.monotonic()) is None


def stand_still(communicator, in_message, others_done):
    """Rank 1 begins a message and does not go on, or reads none; what rank 0 then meets in its operations."""
    communicator.timeout_s = 0.4
    for connection in communicator._connections.values():
        limit_waiting(connection, 0.4)
    if communicator.rank == 1:
        if in_message:
            os.write(communicator._connections[0].fileno(), b"\0\0\1\0half of it")
        others_done.wait(WAIT_S)
        return []
    found = []
    for operation in (communicator.barrier, lambda: communicator.put(np.zeros(1 << 25, np.uint8), 1)):
        try:
            operation()
        except CommunicationError as error:
            found.append(str(error))
    if in_message:
        try:
            communicator.meet_after_error(None)
        except CommunicationError as error:
            found.append(str(error))
    if not in_message:
        # More than sockets take: the thread that sends has its time limit, too.
        communicator._send(("gather", 0, ""), 1, bytes(1 << 26))
        communicator._threads[0].join(WAIT_S)
        try:
            communicator.barrier()
        except CommunicationError as error:
            found.append(str(error))
    others_done.set()
    return found


@pytest.mark.parametrize("in_message", [True, False])
def test_a_rank_that_stands_still_in_a_message_is_not_waited_for(in_message):
    found, _ = in_threads(stand_still, 2, in_message, threading.Event())
    stands_still = "rank 1 stands still in a message to or from rank 0 for 0.4 s"
    if in_message:
        # Its next message has no beginning any more.
        assert found[0] == f"barrier 0: {stands_still}" and found[-1] == "rank 1 does not answer"
    else:
        assert "did not join" in found[0] and found[-1] == f"barrier 1: {stands_still}"


def put_and_get(communicator):
    """Twice alike, then of other shapes."""
    for size in (2, 2, 2 + communicator.rank):
        array = np.zeros(size, np.float32)
        communicator.put(array, 1) if communicator.rank == 0 else communicator.get(array, 0)


def test_operations_of_a_pair_are_numbered():
    expected = "rank 0 is in put 2 of float32 (2,); rank 1 is in get 2 of float32 (3,)"
    assert all(str(error).endswith(expected) for error in in_threads(put_and_get, 2))


def test_a_listener_goes_on_where_a_connection_cannot_be_taken_and_ends_when_closed(monkeypatch):
    """As with too many open files."""
    monkeypatch.setattr(tcp, "RETRY_S", 0.01)
    found, refused = [], []
    accept = socket.socket.accept

    def refuse_first(server):
        taken = accept(server)
        if not refused:
            refused.append(taken)
            taken[0].close()
            raise OSError(errno.EMFILE, "Too many open files")
        return taken

    monkeypatch.setattr(socket.socket, "accept", refuse_first)
    listener = tcp.Listener("localhost", b"key")
    with pytest.raises((OSError, EOFError)):
        tcp.opened(listener.address, b"key", WAIT_S)
    with contextlib.closing(tcp.opened(listener.address, b"key", WAIT_S)) as connection:
        connection.send("first")
        arrived, message = listener.next(time.monotonic() + WAIT_S)
        arrived.close()
    assert message == "first" and len(refused) == 1
    waiting = threading.Thread(target=lambda: found.append(listener.next()), daemon=True)
    waiting.start()
    listener.close()
    waiting.join(WAIT_S)
    assert found == [None]


def test_options_of_a_connection():
    """Messages leave at once, a host that is gone is noticed, and no limit is no waiting, not waiting for ever."""
    with socket.create_server(("localhost", 0)) as server:
        connection = tcp.connection_of(socket.create_connection(server.getsockname()), 0.0)
        own = socket.socket(fileno=os.dup(connection.fileno()))
        with own, contextlib.closing(connection):
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
                assert [own.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names] == [30, 10, 6]
            with pytest.raises(BlockingIOError):
                connection.recv()


def test_one_host_is_reached_over_loopback_alone():
    with Meeting("localhost", 1) as meeting:
        assert ipaddress.ip_address(meeting.address[0]).is_loopback
    with pytest.raises(CommunicationError, match=r"connect: cannot listen at 192.0.2.7, the address of this host: "):
        Meeting("192.0.2.7", 1)


def test_a_process_without_the_key_is_refused():
    with Meeting("localhost", 1) as meeting:
        with pytest.raises(CommunicationError, match="rank 0 did not meet all 1 ranks"):
            TcpLink(0, "localhost", 1, meeting.address, b"another", 1 << 20, 1.0).connect()
        with socket.create_connection(meeting.address):
            pass
        assert meeting.links(["localhost"])[0].connect().world_size == 1


def test_ranks_of_one_host_meet_where_no_other_host_reaches_them(monkeypatch):
    hosts = []

    class Noted(Meeting):
        def __init__(self, host, world_size):
            super().__init__(host, world_size)
            hosts.append((host, self.address[0]))

    monkeypatch.setattr(tcp, "Meeting", Noted)
    launch(ranks.check_objects, 2, 7, transport="tcp")
    ((host, address),) = hosts
    assert host == "localhost" and ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
