"""Ranks that have a connection to each other: what the transports shm and tcp share.

All ranks send the same message in an operation, which names it, so that ranks in different ones find out. Receiving
blocks without a loop, ends at a deadline, also inside of a message, and fails at once when the other process has ended.

A rank that fails sends FAILED, which is the last message of what it was in: it ends the operations of the others, each
of which sends it in turn. When a rank has FAILED of all, nothing of those operations is left in any connection.
"""

import contextlib
import pickle
import socket
import struct
import time

from rlnumba.errors import CommunicationError
from rlnumba.parallel.communicator import Communicator, Operation, check_same

FAILED = Operation("failed", 0, "")
# Seconds in which the other ranks come to an operation after the error of one, and so to meet_after_error.
MEETING_S = 60.0


def limit_waiting(connection, timeout_s):
    """Let a Connection wait at most timeout_s seconds for the next bytes of a message, read or written.

    Then its methods raise BlockingIOError, and it cannot be used further.
    """
    seconds, rest = divmod(timeout_s, 1)
    # 0 were no limit.
    limit = struct.pack("@ll", int(seconds), max(int(rest * 1e6), 1))
    connected = socket.socket(fileno=connection.fileno())
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)
    connected.detach()


class MessageCommunicator(Communicator):
    """See Communicator. connections: to the other ranks, by rank: multiprocessing's."""

    def __init__(self, rank, world_size, timeout_s, connections):
        super().__init__(rank, world_size, timeout_s)
        self._connections = connections
        # Ranks that have sent FAILED; those that have not answered in time, whose messages are not whole any more.
        self._failed_ranks, self._silent_ranks = set(), set()
        for connection in connections.values():
            limit_waiting(connection, timeout_s)

    def meet_after_error(self, value):
        if self._silent_ranks:
            raise CommunicationError(f"rank {min(self._silent_ranks)} does not answer")
        for rank in self._connections:
            self._send(FAILED, rank, None)
        deadline = time.monotonic() + min(self.timeout_s, MEETING_S)
        for rank in self._connections:
            while rank not in self._failed_ranks:
                self._next_message(FAILED, rank, max(deadline - time.monotonic(), 0.0))
        self._failed_ranks.clear()
        self._begin_afresh()
        return self.objects(value)

    def fail(self):
        for rank in self._connections:
            with contextlib.suppress(CommunicationError):
                self._send(FAILED, rank, None)

    def close(self):
        for connection in self._connections.values():
            connection.close()

    def _compare(self, operation, rank=None):
        """Every message is compared."""

    def exchange_pair(self, operation, rank):
        """Return once another rank is in the counterpart of this operation; CommunicationError in another one."""
        self._send(operation, rank, None)
        self._check_same(operation, {rank: self._receive(operation, rank)})

    def _barrier(self, operation):
        self.exchange(operation)

    def exchange(self, operation, detail=None):
        """The details of all ranks, in their order, once all are in this exchange."""
        details = [detail] * self.world_size
        for rank in self._connections:
            self._send(operation, rank, detail)
        messages = {rank: self._receive(operation, rank) for rank in sorted(self._connections)}
        self._check_same(operation, messages)
        for rank, (_, found) in messages.items():
            details[rank] = found
        return details

    def _unpickled(self, found, own):
        """The objects of all ranks from their pickles; this rank's is `own` itself."""
        return [own if rank == self.rank else pickle.loads(each) for rank, each in enumerate(found)]

    def _check_same(self, operation, messages):
        check_same(operation, self.rank, {rank: Operation(*message) for rank, (message, _) in messages.items()})

    def _send(self, operation, rank, detail):
        try:
            self._connections[rank].send((tuple(operation), detail))
        except OSError as error:
            raise self._failed(operation, rank, error) from error

    def _receive(self, operation, rank):
        """The next message of a rank: (its Operation as a tuple, detail)."""
        if rank not in self._failed_ranks:
            message = self._next_message(operation, rank, self.timeout_s)
        if rank in self._failed_ranks:
            raise CommunicationError(f"{operation}: rank {rank} has failed", rank)
        return message

    def _next_message(self, operation, rank, timeout_s):
        """The next message of a rank, also FAILED, which is noted."""
        try:
            if not self._connections[rank].poll(timeout_s):
                self._silent_ranks.add(rank)
                message = f"{operation}: rank {rank} did not join rank {self.rank} within {timeout_s:g} s"
                raise CommunicationError(message)
            message = self._connections[rank].recv()
        except (EOFError, OSError) as error:
            raise self._failed(operation, rank, error) from error
        if Operation(*message[0]) == FAILED:
            self._failed_ranks.add(rank)
        return message

    def _failed(self, operation, rank, error):
        """The CommunicationError of a connection to a rank that gives an EOFError or OSError."""
        if isinstance(error, BlockingIOError):
            self._silent_ranks.add(rank)
            where = f"in a message to or from rank {self.rank}"
            return CommunicationError(f"{operation}: rank {rank} stands still {where} for {self.timeout_s:g} s")
        return CommunicationError(f"{operation}: rank {rank} has ended", rank)
