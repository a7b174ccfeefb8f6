"""Inboxes of GPUs of one host: memory of each, which the others write over NVLink, and read without fence or flag.

Every rank has an inbox. A kernel sends its words to the inboxes of the others, in packets of 16 bytes, and polls its
own for theirs. A reader that finds that a packet is there has its data as well, in one trip over NVLink. Two kinds:

    with epochs    two words, each beside the epoch of its gather, as an atomic access of 64 bits (NCCL's LL protocol);
                   of any bits
    of values      four words of floats, and nothing else: none of them is EMPTY, which every word of an empty packet
                   is, and which the reader writes again (TensorRT-LLM's Lamport buffers); half the bytes

EMPTY has all bits set: one of the NaNs, which no arithmetic of a GPU makes. If sent, it arrives as another NaN.

An inbox has two halves of each kind, by the parity of the epoch, which counts gathers of both kinds. A rank writes a
half again after it has received all packets of the next epoch, at least one from each rank, so after all ranks have
begun that gather, and have ended the one before: its packets have been read, and those of values are empty again. So a
packet with epochs has an older epoch or the right one, and they are compared for equality. After 2^32 - 1 comes 2, of
the same parity as 0, which cleared memory has. The epoch belongs to the inbox, not to a caller, and is in the GPU's
memory, where the kernel increments it: a replayed graph needs no arguments of its own.

A wait ends after limit_cycles, and then reports the rank that it waited for.
Source: PTX ISA, memory consistency model, on morally strong accesses of system scope.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import check
from rlnumba.kernels.ptx.instruction import SIMULATED, instruction
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.warp import device_function, udiv, vector_access
from rlnumba.runtime.device import cuda

i32, u32, i64 = np.int32, np.uint32, np.int64
PACKET_BYTES = 16
# Words of data in a packet of each kind.
WITH_EPOCHS, OF_VALUES = 2, 4
EMPTY = -1
# Elements of a rank's part of `state`.
EPOCH, DONE = 0, 1
FIRST_EPOCH, LAST_EPOCH = 2, 2**32 - 1

if SIMULATED:
    from rlnumba.kernels.ptx.shared_memory import memory
    from rlnumba.runtime.simulator import Condition, grid_state

    def _packet(address):
        return memory(address, PACKET_BYTES).view(np.int32)

    def _arrival(address):
        """The condition on which the simulator's threads wait for a packet."""
        return grid_state(("inbox", int(address)), Condition)


@instruction(
    "{ .reg .b64 first, second; mov.b64 first, {$1, $3}; mov.b64 second, {$2, $3};"
    " st.relaxed.sys.global.v2.b64 [$0], {first, second}; }",
    "lrru",
)
def send_with_epochs(address, first, second, epoch):
    """Write two words, each with the epoch, to a packet of an inbox on any GPU."""
    _packet(address).view(np.uint32)[:] = np.array([first, epoch, second, epoch], np.int64) & 0xFFFFFFFF
    _arrival(address).notify_all()


@instruction(
    "{ .reg .pred p; .reg .b64 first, second, begin, now; .reg .b32 x, y, e, f; mov.u64 begin, %clock64;"
    " AGAIN: ld.relaxed.sys.global.v2.b64 {first, second}, [$3]; mov.b64 {x, e}, first; mov.b64 {y, f}, second;"
    " xor.b32 e, e, $4; xor.b32 f, f, $4; or.b32 e, e, f; setp.eq.u32 p, e, 0; @p bra ARRIVED;"
    " mov.u64 now, %clock64; sub.s64 now, now, begin; setp.lt.s64 p, now, $5; @p bra AGAIN;"
    " setp.eq.u32 p, e, 0;"
    " ARRIVED: mov.b32 $0, x; mov.b32 $1, y; selp.b32 $2, 1, 0, p; }",
    "lul",
    "rrr",
)
def receive_with_epochs(address, epoch, limit_cycles):
    """(two words, 1) of a packet of this GPU's inbox once they have the epoch; (undefined, undefined, 0) too late.

    In the simulator a limit of 0 is over at once, and others never are.
    """
    while (_packet(address).view(np.uint32)[1::2] != epoch).any():
        if limit_cycles <= 0:
            return i32(0), i32(0), i32(0)
        _arrival(address).wait("receive_with_epochs")
    return *_packet(address)[::2], i32(1)


@instruction("st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};", "lrrrr")
def write_packet(address, first, second, third, fourth):
    """Write four words to a packet of an inbox on any GPU."""
    _packet(address)[:] = first, second, third, fourth
    _arrival(address).notify_all()


@instruction(
    "{ .reg .pred p; .reg .b64 begin, now; .reg .b32 x, y, z, w; mov.u64 begin, %clock64;"
    " AGAIN: ld.relaxed.sys.global.v4.b32 {x, y, z, w}, [$5];"
    " setp.ne.s32 p, x, -1; setp.ne.and.s32 p, y, -1, p; setp.ne.and.s32 p, z, -1, p; setp.ne.and.s32 p, w, -1, p;"
    " @p bra ARRIVED; mov.u64 now, %clock64; sub.s64 now, now, begin; setp.lt.s64 p, now, $6; @p bra AGAIN;"
    " setp.ne.s32 p, 0, 0;"
    " ARRIVED: mov.b32 $0, x; mov.b32 $1, y; mov.b32 $2, z; mov.b32 $3, w; selp.b32 $4, 1, 0, p; }",
    "ll",
    "rrrrr",
)
def receive_values(address, limit_cycles):
    """(four words, 1) of a packet of this GPU's inbox once none is EMPTY; (undefined, ..., 0) too late.

    In the simulator as receive_with_epochs.
    """
    while (_packet(address) == EMPTY).any():
        if limit_cycles <= 0:
            return i32(0), i32(0), i32(0), i32(0), i32(0)
        _arrival(address).wait("receive_values")
    return *_packet(address), i32(1)


@device_function
def not_empty(word):
    """A word as it is sent: EMPTY as another NaN."""
    return word if word != EMPTY else i32(EMPTY - 1)


class Packets(NamedTuple):
    """Device functions for packets of `words` words; values: a local array (words,) int32.

    load(source, index, values, end): values = the words of source from `index` on, 0 from `end` on.
    store(out, index, values, begin, columns, total, end): words number `index` and the next, but for those from `end`
    on, of a rank that has `columns` of each row of out, `total` words wide, from word `begin` of the row on.
    send(address, values, epoch), receive(address, values, epoch, limit_cycles): 1 if they have arrived, else 0.
    """

    words: int
    load: object
    store: object
    send: object
    receive: object


@functools.cache
def packets(words):
    """The Packets of a kind, WITH_EPOCHS or OF_VALUES.

    The latter need arrays that are aligned to packets, rows of whole packets, and an `end` that is a multiple of them.
    """
    return _packets_of_values() if words == OF_VALUES else _packets_with_epochs()


def _packets_with_epochs():
    @device_function
    def load(source, index, values, end):
        values[0], values[1] = i32(0), i32(0)
        if index < end:
            values[0] = source[index]
        if index + 1 < end:
            values[1] = source[index + 1]

    @device_function
    def store(out, index, values, begin, columns, total, end):
        if index < end:
            row = i64(udiv(i32(index), i32(columns)))
            column = index - row * columns
            out[row * total + begin + column] = values[0]
            if index + 1 < end:
                if column + 1 == columns:
                    row, column = row + 1, i64(-1)
                out[row * total + begin + column + 1] = values[1]

    @device_function
    def send(address, values, epoch):
        send_with_epochs(address, values[0], values[1], epoch)

    @device_function
    def receive(address, values, epoch, limit_cycles):
        values[0], values[1], arrived = receive_with_epochs(address, epoch, limit_cycles)
        return arrived

    return Packets(WITH_EPOCHS, load, store, send, receive)


def _packets_of_values():
    load_packet, store_packet = vector_access(OF_VALUES, OF_VALUES)

    @device_function
    def load(source, index, values, end):
        for i in range(OF_VALUES):
            values[i] = i32(0)
        if index < end:
            load_packet(source, index, values, 0)

    @device_function
    def store(out, index, values, begin, columns, total, end):
        if index < end:
            row = i64(udiv(i32(index), i32(columns)))
            store_packet(out, row * total + begin + index - row * columns, values, 0)

    @device_function
    def send(address, values, epoch):
        write_packet(
            address, not_empty(values[0]), not_empty(values[1]), not_empty(values[2]), not_empty(values[3])
        )  # fmt: skip

    @device_function
    def receive(address, values, epoch, limit_cycles):
        values[0], values[1], values[2], values[3], arrived = receive_values(address, limit_cycles)
        write_packet(address, i32(EMPTY), i32(EMPTY), i32(EMPTY), i32(EMPTY))
        return arrived

    return Packets(OF_VALUES, load, store, send, receive)


@device_function
def end_epoch(state, local, epoch):
    """All threads of a block have read the epoch; the last block of a rank increments it, for the next kernel.

    While packets are on their way, so that the kernel ends as soon as they are there.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        if atomic_add_acq_rel(state, 2 * local + DONE) == cuda.gridDim.x - 1:
            state[2 * local + DONE] = u32(0)
            following = i64(epoch) + 1
            if following == LAST_EPOCH + 1:
                following = i64(FIRST_EPOCH)
            state[2 * local + EPOCH] = u32(following)


class KindInboxes(NamedTuple):
    """Inboxes, as a kernel takes them that sends packets of one kind, whose first packet is first_packet."""

    addresses: object
    state: object
    error: object
    first_rank: int
    first_packet: int
    capacity: int
    limit_cycles: int


class Inboxes(NamedTuple):
    """The inboxes of all R ranks, for a process that has n of them: one on a GPU, all in the simulator.

    addresses (R,) int64: of inbox_bytes(R, capacity) bytes on each rank, as clear_inbox leaves them; multiples of 16.
    state (2 n,) uint32: of each the epoch, at least 2 at the start, the same on all, and 0. error (n,) int32: set to
    1 + r if rank r did not send its words within limit_cycles of the GPU's clock; memory of the host will do.
    first_rank: of these n. capacity: packets of a kind from one rank.
    """

    addresses: object
    state: object
    error: object
    first_rank: int
    capacity: int
    limit_cycles: int

    @property
    def world_size(self):
        return len(self.addresses)

    def of_kind(self, words):
        """The KindInboxes of a kernel that sends packets of a kind."""
        first = 0 if words == WITH_EPOCHS else packets_of_kind(self.world_size, self.capacity)
        return KindInboxes(*self[:4], first, *self[4:])

    def check(self, name, count):
        """Raise ValueError for arrays that are not those of `count` ranks of this process."""
        check(name, "addresses", self.addresses, (None,), (np.dtype(np.int64),))
        check(name, "state", self.state, (2 * count,), (np.dtype(np.uint32),))
        check(name, "error", self.error, (count,), (np.dtype(np.int32),))


def packets_of_kind(world_size, capacity):
    """Packets of one kind in an inbox, both halves: int."""
    return 2 * world_size * capacity


def inbox_bytes(world_size, capacity):
    """Bytes of an inbox."""
    return 2 * packets_of_kind(world_size, capacity) * PACKET_BYTES


def clear_inbox(inbox, world_size, capacity):
    """Write an inbox (bytes,) uint8 of the device's arrays, or of the simulator's, as it is before the first gather."""
    values = packets_of_kind(world_size, capacity) * PACKET_BYTES
    inbox[:values], inbox[values : inbox_bytes(world_size, capacity)] = 0, 0xFF
