"""Transport `shm`: processes of one host, NumPy arrays, staging buffers in shared memory.

Every rank owns a staging buffer, which it alone writes and all others read, and has a connection to every other rank.
An operation moves an array in pieces:

    write my piece into my staging buffer; exchange messages with all ranks; read their staging buffers

A staging buffer has two slots, used in turn, so that one exchange a piece is enough: a rank writes a slot again after
the next exchange, which every rank begins after it has read the slot. put and get have a third slot and an
acknowledgement.

Memory order: messages go through Unix sockets. Sending and receiving enter the kernel and take the same lock, so what a
rank wrote into shared memory before it sent is visible to the rank that has received; that holds on processors with any
memory model, which stores to flags in NumPy arrays do not. Receiving blocks without a loop, ends at a deadline, and
fails at once when the other process has ended. Messages name the operation, so that ranks in different ones find out.

The shared memory has no name: it is an open file of all processes, so nothing is left behind when they are killed.
"""

import mmap
import os
import pickle
import sys
import tempfile
from multiprocessing import Pipe, reduction

import numpy as np

from rlnumba.parallel.communicator import TIMEOUT_S, FoldRange, add_in_place, as_bytes, check_ranges
from rlnumba.parallel.transports.messages import MessageCommunicator

# Bytes of a slot: larger arrays move in pieces of this size. Not tuned.
PIECE_BYTES = 1 << 20
SLOTS = 3
# Objects of at most so many bytes are part of a message. All ranks send before they receive: less than a socket takes.
MESSAGE_BYTES = 16 << 10
ALIGNMENT = 64


class Link:
    """Connections and memory that make a process a rank; can be sent to a process that is being spawned.

    connections: to the other ranks, by rank. descriptor: that of the file that all ranks map.
    """

    def __init__(self, rank, world_size, descriptor, connections, piece_bytes, timeout_s):
        self.rank, self.world_size, self.descriptor, self.connections = rank, world_size, descriptor, connections
        self.piece_bytes, self.timeout_s = piece_bytes, timeout_s

    def __getstate__(self):
        return self.__dict__ | {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.descriptor = self.descriptor.detach()

    def connect(self):
        """The Communicator of this rank, in whose process this is."""
        return SharedMemoryCommunicator(self)

    def close(self):
        """Close this process's file and connections."""
        os.close(self.descriptor)
        for connection in self.connections.values():
            connection.close()


def make_links(world_size, timeout_s=TIMEOUT_S, piece_bytes=PIECE_BYTES):
    """The Links of all ranks. The process that made them closes its own when all ranks have theirs."""
    piece_bytes = -(-piece_bytes // (ALIGNMENT * world_size)) * ALIGNMENT * world_size
    connections = [{} for _ in range(world_size)]
    for one in range(world_size):
        for other in range(one):
            connections[one][other], connections[other][one] = Pipe()
    links = []
    shared = unnamed_file(world_size * SLOTS * piece_bytes)
    for rank, own in enumerate(connections):
        links.append(Link(rank, world_size, os.dup(shared), own, piece_bytes, timeout_s))
    os.close(shared)
    return links


def unnamed_file(nbytes):
    """The descriptor of a file in memory that disappears with the last process that has it open."""
    if sys.platform == "linux":  # /dev/shm may be limited to 64 MiB, as in containers; this file is not
        descriptor = os.memfd_create("rlnumba")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


class SharedMemoryCommunicator(MessageCommunicator):
    """A rank among processes of one host; see Communicator."""

    def __init__(self, link):
        super().__init__(link.rank, link.world_size, link.timeout_s, link.connections)
        self._piece_bytes = link.piece_bytes
        shared = mmap.mmap(link.descriptor, self.world_size * SLOTS * self._piece_bytes)
        os.close(link.descriptor)
        # (rank, slot, byte)
        self._staging = np.frombuffer(shared, np.uint8).reshape(self.world_size, SLOTS, self._piece_bytes)
        self._slot = 0

    def close(self):
        super().close()
        self._staging = None

    def _begin_afresh(self):
        super()._begin_afresh()
        self._slot = 0

    def _gather(self, operation, array, out):
        source, targets = as_bytes(array), as_bytes(out).reshape(self.world_size, -1)
        self._gather_bytes(operation, source, [target for target in targets])

    def _objects(self, operation, value):
        mine = pickle.dumps(value)
        found = self.exchange(operation, mine if len(mine) <= MESSAGE_BYTES else len(mine))
        if all(isinstance(each, bytes) for each in found):
            return self._unpickled(found, value)
        targets = [np.empty(len(each) if isinstance(each, bytes) else each, np.uint8) for each in found]
        self._gather_bytes(operation, np.frombuffer(mine, np.uint8), targets)
        return self._unpickled(targets, value)

    def _gather_bytes(self, operation, source, targets):
        """targets[r] = rank r's source; sizes may differ."""
        for first in range(0, max(target.size for target in targets), self._piece_bytes):
            piece = source[first : first + self._piece_bytes]
            slots = self._next_slots()
            slots[self.rank][: piece.size] = piece
            self.exchange(operation, first)
            for slot, target in zip(slots, targets, strict=True):
                piece = target[first : first + self._piece_bytes]
                piece[...] = slot[: piece.size]

    def _fold(self, operation, gradient, accumulated, start, count, is_first):
        mine = FoldRange(start, accumulated.size, None if gradient is None else gradient.size)
        ranges = [FoldRange(*each) for each in self.exchange(operation, tuple(mine))]
        check_ranges(operation, ranges)
        # A slot has one part for each rank that reads it.
        length = self._piece_bytes // self.world_size // 4
        for first in range(0, max(each.size for each in ranges), length):
            slots = [slot.view(np.float32).reshape(self.world_size, length) for slot in self._next_slots()]
            for rank, each in enumerate(ranges):
                if gradient is not None:
                    size = max(min(length, each.size - first), 0)
                    slots[self.rank][rank, :size] = gradient[each.start + first : each.start + first + size]
            self.exchange(operation, first)
            target = accumulated[first : first + length]
            for k in range(count):
                add_in_place(target, slots[k][self.rank, : target.size], is_first and k == 0)

    def _put(self, operation, array, rank):
        source, slot = as_bytes(array), self._staging[self.rank, -1]
        for first in range(0, max(source.size, 1), self._piece_bytes):
            piece = source[first : first + self._piece_bytes]
            slot[: piece.size] = piece
            self._send(operation, rank, first)
            self._check_same(operation, {rank: self._receive(operation, rank)})

    def _get(self, operation, array, rank):
        target, slot = as_bytes(array), self._staging[rank, -1]
        for first in range(0, max(target.size, 1), self._piece_bytes):
            message = self._receive(operation, rank)
            self._check_same(operation, {rank: message})
            piece = target[first : first + self._piece_bytes]
            piece[...] = slot[: piece.size]
            self._send(operation, rank, first)

    def _next_slots(self):
        """The slot of each rank for the next piece."""
        self._slot = 1 - self._slot
        return self._staging[:, self._slot]
