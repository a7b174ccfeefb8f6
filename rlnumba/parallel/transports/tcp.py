"""Transport `tcp`: processes of CPUs of several hosts, NumPy arrays, which move in pieces as messages.

    Meeting(host, world_size)    in the process that starts the ranks: hands each the addresses of all
    TcpLink(...).connect()       in each rank

It copies the bytes that shm does, and adds in the same order: a run on several hosts has the bits of one. A thread for
each connection writes what a rank sends, so all ranks may send before they receive.

A process listens on the address of its host that the other ranks use, and on no other. A process that connects must
show that it has the key of the run, and so must the process that listens; each such handshake has a thread and a time
limit of its own, so a connection that says nothing holds up no rank. The key opens a connection and does not protect
what is sent over it: that is pickled, neither encrypted nor signed.

Ranks on GPUs of several hosts agree by it on the identifier of NCCL (nccl.py).
"""

import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import numpy as np

from rlnumba.errors import CommunicationError
from rlnumba.parallel.communicator import TIMEOUT_S, FoldRange, add_in_place, as_bytes, check_ranges
from rlnumba.parallel.transports.messages import MessageCommunicator, limit_waiting

# Bytes of an array in a message. Not tuned.
PIECE_BYTES = 1 << 20
# Seconds in which the last messages are written at the end of a rank.
CLOSING_S = 10.0
# Seconds in which a process that connects must have shown that it has the key.
HANDSHAKE_S = 30.0
# Seconds without a message after which the system asks whether the other host is still there, between two questions,
# and the number of those without an answer that end the connection.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 30, 10, 6
# Seconds between attempts to take a connection where the system refuses one, as when too many files are open.
RETRY_S = 0.1


class Meeting:
    """Hands all of world_size ranks the addresses of all, once each has said its own; a context manager.

    host: the name or address by which the hosts of the ranks reach this one. address: (host, port) and key: bytes, of
    the TcpLinks. Raises CommunicationError for an address that this host does not have.
    """

    def __init__(self, host, world_size):
        self.key = os.urandom(32)
        self._listener = Listener(host, self.key)
        self.address = self._listener.address
        threading.Thread(target=self._serve, args=(world_size,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._listener.close()

    def links(self, hosts, timeout_s=TIMEOUT_S, piece_bytes=PIECE_BYTES):
        """The TcpLinks of all ranks. hosts: the name by which others reach each rank."""
        shared = len(hosts), self.address, self.key, piece_bytes, timeout_s
        return [TcpLink(rank, host, *shared) for rank, host in enumerate(hosts)]

    def _serve(self, world_size):
        found = {}
        while len(found) < world_size:
            if (arrived := self._listener.next()) is None:
                return  # closed
            connection, (rank, address) = arrived
            found[rank] = connection, address
        addresses = [found[rank][1] for rank in range(world_size)]
        for connection, _ in found.values():
            # One that has ended is not waited for longer by the others than in an operation.
            with contextlib.suppress(OSError):
                connection.send(addresses)


class TcpLink(NamedTuple):
    """Addresses, key and settings that make a process a rank."""

    rank: int
    host: str
    world_size: int
    meeting: tuple
    key: bytes
    piece_bytes: int
    timeout_s: float

    def connect(self):
        """The Communicator of this rank, in whose process this is. Raises CommunicationError where a rank is late."""
        try:
            with Listener(self.host, self.key) as listener:
                return TcpCommunicator(self, self._connections(listener))
        except (AuthenticationError, EOFError, OSError) as error:
            reason = f"rank {self.rank} did not meet all {self.world_size} ranks within {self.timeout_s:g} s"
            raise CommunicationError(f"connect: {reason}: {error}") from error

    def _connections(self, listener):
        deadline = time.monotonic() + self.timeout_s
        meeting = opened(self.meeting, self.key, self.timeout_s)
        meeting.send((self.rank, listener.address))
        if not meeting.poll(max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError("some have not said their address")
        addresses, connections = meeting.recv(), {}
        meeting.close()
        for other in range(self.rank):
            connections[other] = opened(addresses[other], self.key, self.timeout_s)
            connections[other].send(self.rank)
        while missing := {*range(self.world_size)} - {self.rank, *connections}:
            arrived = listener.next(deadline)
            if arrived is None:
                raise TimeoutError(f"no connection from rank {', '.join(map(str, sorted(missing)))}")
            connection, rank = arrived
            connections[rank] = connection
        return connections

    def close(self):
        """Do nothing: it holds nothing open."""


class Listener:
    """Takes connections of processes that have the key, until it is closed; a context manager.

    host: a name or address of this host, by which it is reached and at which alone it listens. address: (address,
    port). handshake_s: seconds that each connection has to show the key and send its first message. Raises
    CommunicationError for an address that this host does not have.
    """

    def __init__(self, host, key, handshake_s=HANDSHAKE_S):
        self._key, self._handshake_s = key, handshake_s
        self._arrived, self._closed = queue.SimpleQueue(), threading.Event()
        try:
            (family, *_, (address, *_)), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            self._server = socket.create_server((address, 0), family=family)
        except OSError as error:
            raise CommunicationError(f"connect: cannot listen at {host}, the address of this host: {error}") from error
        self.address = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def close(self):
        """Take no further connections, and end `next`."""
        self._closed.set()
        # It wakes the thread that accepts, which `close` alone does not.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._arrived.put(None)

    def next(self, deadline=None):
        """(Connection, first message) of the next process that has the key; None once it is closed, or too late.

        deadline: a time of time.monotonic(), by default none.
        """
        with contextlib.suppress(queue.Empty):
            return self._arrived.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return None

    def _accept(self):
        while not self._closed.is_set():
            try:
                connected, _ = self._server.accept()
                threading.Thread(target=self._shake_hands, args=(connected,), daemon=True).start()
            except OSError:  # closed; or the connection has ended, or there are too many files
                self._closed.wait(RETRY_S)

    def _shake_hands(self, connected):
        connection = connection_of(connected, self._handshake_s)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._arrived.put((connection, connection.recv()))
        except (AuthenticationError, EOFError, OSError):
            connection.close()


def opened(address, key, timeout_s):
    """A Connection to a process that has a Listener there, which sends it a first message at once."""
    connection = connection_of(socket.create_connection(address, timeout_s), timeout_s)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:  # a signal, too
        connection.close()
        raise
    return connection


def connection_of(connected, timeout_s):
    """The Connection of a connected socket, which waits at most so many seconds inside of a message."""
    connected.settimeout(None)
    # A message is small, and waited for.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that is gone, and says nothing of it, ends the connection.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    connection = Connection(connected.detach())
    limit_waiting(connection, timeout_s)
    return connection


class TcpCommunicator(MessageCommunicator):
    """A rank among processes of any hosts; see Communicator. connections: to the other ranks, by rank."""

    def __init__(self, link, connections):
        super().__init__(link.rank, link.world_size, link.timeout_s, connections)
        self._piece_bytes = -(-link.piece_bytes // 4) * 4
        self._outboxes = {rank: queue.SimpleQueue() for rank in connections}
        # Why nothing more can be sent to a rank: {rank: OSError}.
        self._unsent = {}
        self._threads = [threading.Thread(target=self._send_all, args=(rank,), daemon=True) for rank in connections]
        for thread in self._threads:
            thread.start()

    def close(self):
        until = time.monotonic() + CLOSING_S
        for outbox in self._outboxes.values():
            outbox.put(None)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        super().close()

    def _send(self, operation, rank, detail):
        if rank in self._unsent:
            raise self._failed(operation, rank, self._unsent[rank])
        self._outboxes[rank].put((tuple(operation), detail))

    def _send_all(self, rank):
        while (message := self._outboxes[rank].get()) is not None:
            try:
                self._connections[rank].send(message)
            except OSError as error:  # raised in the next operation
                self._unsent[rank] = error
                return

    def _gather(self, operation, array, out):
        source, targets = as_bytes(array), as_bytes(out).reshape(self.world_size, -1)
        for first in range(0, source.size, self._piece_bytes):
            piece = source[first : first + self._piece_bytes]
            # A copy: the array may change before it is written.
            for target, found in zip(targets, self.exchange(operation, piece.tobytes()), strict=True):
                target[first : first + piece.size] = np.frombuffer(found, np.uint8)

    def _objects(self, operation, value):
        return self._unpickled(self.exchange(operation, pickle.dumps(value)), value)

    def _fold(self, operation, gradient, accumulated, start, count, is_first):
        mine = FoldRange(start, accumulated.size, None if gradient is None else gradient.size)
        ranges = [FoldRange(*each) for each in self.exchange(operation, tuple(mine))]
        check_ranges(operation, ranges)
        length = self._piece_bytes // 4
        for first in range(0, max(each.size for each in ranges), length):
            for rank in self._connections:
                part = None
                if gradient is not None:
                    begin, size, _ = ranges[rank]
                    part = gradient[begin + first : begin + max(min(first + length, size), first)].tobytes()
                self._send(operation, rank, part)
            messages = {rank: self._receive(operation, rank) for rank in sorted(self._connections)}
            self._check_same(operation, messages)
            target = accumulated[first : first + length]
            for k in range(count):
                if k == self.rank:
                    part = gradient[start + first : start + first + target.size]
                else:
                    part = np.frombuffer(messages[k][1], np.float32)
                add_in_place(target, part, is_first and k == 0)

    def _put(self, operation, array, rank):
        source = as_bytes(array)
        for first in range(0, max(source.size, 1), self._piece_bytes):
            self._send(operation, rank, source[first : first + self._piece_bytes].tobytes())
            self._check_same(operation, {rank: self._receive(operation, rank)})

    def _get(self, operation, array, rank):
        target = as_bytes(array)
        for first in range(0, max(target.size, 1), self._piece_bytes):
            self._send(operation, rank, None)
            message = self._receive(operation, rank)
            self._check_same(operation, {rank: message})
            target[first : first + self._piece_bytes] = np.frombuffer(message[1], np.uint8)
