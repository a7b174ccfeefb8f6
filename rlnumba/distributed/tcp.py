"""Transport `tcp`: processes of CPUs of several hosts, NumPy arrays, which move in pieces as messages.

    Meeting(host, world_size)    in the process that starts the ranks: hands each the addresses of all
    TcpLink(...).connect()       in each rank

It copies the bytes that shm does, and adds in the same order: a run on several hosts has the bits of one. What a rank
sends is written by a thread for each connection, so all ranks may send before they receive. A connection is opened with
the key of its run; messages are pickled, so who has the key is trusted.

Ranks on GPUs of several hosts agree by it on the identifier of NCCL (nccl.py).
"""

import os
import pickle
import queue
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import numpy as np

from rlnumba.distributed.communicator import TIMEOUT_S, Range, add_in_place, as_bytes, check_ranges
from rlnumba.distributed.messages import MessageCommunicator
from rlnumba.errors import CommunicationError

# Bytes of an array in a message. Not tuned.
PIECE_BYTES = 1 << 20
# Seconds in which the last messages are written at the end of a rank.
CLOSING_S = 10.0


class Meeting:
    """Hands all of world_size ranks the addresses of all, once each has said its own; a context manager.

    host: the name by which other hosts reach this one. address: (host, port) and key: bytes, of the TcpLinks.
    """

    def __init__(self, host, world_size):
        self._server = socket.create_server(("", 0))
        self.address, self.key = (host, self._server.getsockname()[1]), os.urandom(32)
        threading.Thread(target=self._serve, args=(world_size,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self._server.close()

    def links(self, hosts, timeout_s=TIMEOUT_S, piece_bytes=PIECE_BYTES):
        """The TcpLinks of all ranks. hosts: of each rank, the name by which others reach it."""
        shared = len(hosts), self.address, self.key, piece_bytes, timeout_s
        return [TcpLink(rank, host, *shared) for rank, host in enumerate(hosts)]

    def _serve(self, world_size):
        found = {}
        try:
            while len(found) < world_size:
                connection = accepted(self._server, self.key)
                rank, address = connection.recv()
                found[rank] = connection, address
            addresses = [found[rank][1] for rank in range(world_size)]
            for connection, _ in found.values():
                connection.send(addresses)
        except (EOFError, OSError):
            pass  # closed; or a rank has ended, for which the others do not wait longer than for an operation


class TcpLink(NamedTuple):
    """What a process needs to become a rank."""

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
            with socket.create_server(("", 0)) as server:
                server.settimeout(self.timeout_s)
                return TcpCommunicator(self, self._connections(server))
        except (AuthenticationError, EOFError, OSError) as error:
            reason = f"rank {self.rank} did not meet all {self.world_size} ranks within {self.timeout_s:g} s"
            raise CommunicationError(f"connect: {reason}: {error}") from error

    def _connections(self, server):
        meeting = opened(self.meeting, self.key, self.timeout_s)
        meeting.send((self.rank, (self.host, server.getsockname()[1])))
        if not meeting.poll(self.timeout_s):
            raise TimeoutError("some have not said their address")
        addresses, connections = meeting.recv(), {}
        meeting.close()
        for other in range(self.rank):
            connections[other] = opened(addresses[other], self.key, self.timeout_s)
            connections[other].send(self.rank)
        while len(connections) < self.world_size - 1:
            connection = accepted(server, self.key)
            connections[connection.recv()] = connection
        return connections

    def close(self):
        """Nothing: it holds nothing open."""


def accepted(server, key):
    """The next connection to a listening socket by a process that has the key: a Connection."""
    while True:
        connection = _connection_of(server.accept()[0])
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            return connection
        except (AuthenticationError, EOFError, OSError):
            connection.close()


def opened(address, key, timeout_s):
    """A Connection to a process that calls `accepted`."""
    connection = _connection_of(socket.create_connection(address, timeout_s))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _connection_of(connected):
    connected.settimeout(None)
    # A message is small, and waited for.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


class TcpCommunicator(MessageCommunicator):
    """A rank among processes of any hosts; see Communicator. connections: to the other ranks, by rank."""

    def __init__(self, link, connections):
        super().__init__(link.rank, link.world_size, link.timeout_s, connections)
        self._piece_bytes = -(-link.piece_bytes // 4) * 4
        self._outboxes = {rank: queue.SimpleQueue() for rank in connections}
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
        self._outboxes[rank].put((tuple(operation), detail))

    def _send_all(self, rank):
        while (message := self._outboxes[rank].get()) is not None:
            try:
                self._connections[rank].send(message)
            except OSError:
                return  # it has ended, which the next operation finds out

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
        mine = Range(start, accumulated.size, None if gradient is None else gradient.size)
        ranges = [Range(*each) for each in self.exchange(operation, tuple(mine))]
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
