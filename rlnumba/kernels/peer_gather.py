"""Gather of small arrays between GPUs of one host, as one kernel that may be captured in a CUDA graph.

    a row of out = the ranks' columns of it, in their order

Layout says which columns rank r has; a single row of equal parts is out[r] = source of rank r. An exchange does so for
some of the rows alone, others on each rank: it moves an R-th of the bytes.

Words travel to inboxes (peer_inbox.py), in packets with epochs, or floats, if whole packets, as packets of values. The
former are twice the bytes, hence for small arrays; larger ones are copied (rlnumba/distributed/peer.py).

Blocks wait for blocks of the same index on other GPUs, which run before those of higher indices: no cycle. With PDL the
next kernel may begin as soon as all blocks run, and fetch its weights while they wait.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.checks import check, is_16_byte_aligned
from rlnumba.kernels.peer_inbox import EPOCH, OF_VALUES, PACKET_BYTES, WITH_EPOCHS, end_epoch, packets
from rlnumba.kernels.ptx.warp import device_function, griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, i64 = np.int32, np.int64
# A thread moves one packet to, and from, each other rank.
THREADS = 256
WORDS = (np.dtype(np.int32),)


class Layout(NamedTuple):
    """The words of a gather: rows of `total`, of which rank r has those from start(r) to start(r + 1).

    start(r) = r width + min(r, longer) extra, but at most total.
    """

    rows: int
    width: int
    longer: int
    extra: int
    total: int

    @staticmethod
    def of_arrays(words, world_size):
        """One row, of which each rank has `words`."""
        return Layout(1, words, 0, 0, world_size * words)

    @property
    def has_whole_packets(self):
        """Whether each rank has a multiple of OF_VALUES words of a row, from such a multiple on."""
        return not any(words % OF_VALUES for words in (self.width, self.extra, self.total))

    def own_rows(self, rank, row_width):
        """How many rows a rank has after an exchange: those from rank row_width on, at most row_width."""
        return min((rank + 1) * row_width, self.rows) - min(rank * row_width, self.rows)

    def columns(self, rank):
        """How many words of a row a rank has."""
        return self._start(rank + 1) - self._start(rank)

    def _start(self, rank):
        return min(rank * self.width + min(rank, self.longer) * self.extra, self.total)


@device_function
def start_of(rank, width, longer, extra, total):
    """Layout's start(rank)."""
    return min(rank * width + min(rank, longer) * extra, total)


def receive_function(words):
    """The device function with which a thread receives a packet of so many words of each other rank."""
    store, receive = packets(words).store, packets(words).receive

    @device_function
    def receive_from_all(
        out, values, inbox, error, local, rank, world_size, half, capacity, packet, index, epoch, limit_cycles, rows,
        width, longer, extra, total,
    ):  # fmt: skip
        """Wait for a packet of each other rank, of those that it sends of `rows` rows, and store it.

        inbox: where this rank's one begins.
        """
        for step in range(1, world_size):
            other = (rank + world_size - step) % world_size
            begin = start_of(other, width, longer, extra, total)
            columns = start_of(other + 1, width, longer, extra, total) - begin
            end = rows * columns
            if packet < capacity and (packet == 0 or index < end):
                address = inbox + (half + other * capacity + packet) * PACKET_BYTES
                if receive(address, values, epoch, limit_cycles) == 0:
                    error[local] = i32(other + 1)
                store(out, index, values, begin, columns, total, end)

    return receive_from_all


@specialize
def peer_gather_kernel(words):
    """The kernel that moves packets of so many words."""
    _, load, store, send, _ = packets(words)
    receive_from_all = receive_function(words)

    @cuda.jit
    def peer_gather_kernel(
        source, out, inboxes, state, error, first_rank, first_packet, capacity, limit_cycles, start, rows, width,
        longer, extra, total,
    ):  # fmt: skip
        """out[i] = the gather on rank first_rank + i, of which this launch is grid.y = i, from word `start` of each.

        A thread owns a packet of each rank: it sends its own to all others, and receives theirs. The first packet is
        always sent. The last block of a rank that has read its epoch increments it.
        """
        # All blocks run by now: they wait for other GPUs, but for no block of this one.
        griddepcontrol_launch_dependents()
        values = cuda.local.array(words, np.int32)
        local = i64(cuda.blockIdx.y)
        world_size = i64(inboxes.shape[0])
        rank = first_rank + local
        # Addresses do not change: those of this inbox and of the next rank's are read while the kernel before runs.
        inbox, neighbour = inboxes[rank], inboxes[(rank + 1) % world_size]
        griddepcontrol_wait()
        epoch = state[2 * local + EPOCH]
        packet = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        index = start + words * packet
        # In packets: where the half of an inbox begins that this epoch has.
        half = first_packet + (i64(epoch) & 1) * world_size * capacity
        begin = start_of(rank, width, longer, extra, total)
        columns = start_of(rank + 1, width, longer, extra, total) - begin
        end = rows * columns
        if packet < capacity and (packet == 0 or index < end):
            load(source[local], index, values, end)
            for step in range(1, world_size):
                theirs = neighbour if step == 1 else inboxes[(rank + step) % world_size]
                send(theirs + (half + rank * capacity + packet) * PACKET_BYTES, values, epoch)
            store(out[local], index, values, begin, columns, total, end)
        end_epoch(state, local, epoch)
        receive_from_all(
            out[local], values, inbox, error, local, rank, world_size, half, capacity, packet, index, epoch,
            limit_cycles, rows, width, longer, extra, total,
        )  # fmt: skip

    return peer_gather_kernel


@specialize
def peer_exchange_kernel(words):
    """The kernel that moves packets of so many words."""
    _, load, store, send, _ = packets(words)
    receive_from_all = receive_function(words)

    @cuda.jit
    def peer_exchange_kernel(
        source, out, inboxes, state, error, first_rank, first_packet, capacity, limit_cycles, start, row_width, rows,
        width, longer, extra, total,
    ):  # fmt: skip
        """As peer_gather_kernel, but out[i] has only the rows of rank first_rank + i: row_width from rank row_width on.

        A thread owns a packet of what each pair of ranks exchanges, from word `start` on.
        """
        # All blocks run by now: they wait for other GPUs, but for no block of this one.
        griddepcontrol_launch_dependents()
        values = cuda.local.array(words, np.int32)
        local = i64(cuda.blockIdx.y)
        world_size = i64(inboxes.shape[0])
        rank = first_rank + local
        # As in peer_gather_kernel.
        inbox, neighbour = inboxes[rank], inboxes[(rank + 1) % world_size]
        griddepcontrol_wait()
        epoch = state[2 * local + EPOCH]
        packet = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        index = start + words * packet
        half = first_packet + (i64(epoch) & 1) * world_size * capacity
        begin = start_of(rank, width, longer, extra, total)
        columns = start_of(rank + 1, width, longer, extra, total) - begin
        for step in range(world_size):
            other = (rank + step) % world_size
            first_row = min(other * row_width, rows)
            first_word = first_row * columns
            end = (min(first_row + row_width, rows) - first_row) * columns
            if packet < capacity and (packet == 0 or index < end):
                load(source[local], first_word + index, values, first_word + end)
                if step == 0:
                    store(out[local], index, values, begin, columns, total, end)
                else:
                    theirs = neighbour if step == 1 else inboxes[other]
                    send(theirs + (half + rank * capacity + packet) * PACKET_BYTES, values, epoch)
        own_rows = min((rank + 1) * row_width, rows) - min(rank * row_width, rows)
        end_epoch(state, local, epoch)
        receive_from_all(
            out[local], values, inbox, error, local, rank, world_size, half, capacity, packet, index, epoch,
            limit_cycles, own_rows, width, longer, extra, total,
        )  # fmt: skip

    return peer_exchange_kernel


def peer_gather(source, out, layout, inboxes, are_floats=False):
    """out[i] = the rows that all ranks have together, on rank first_rank + i; every rank launches it with this Layout.

    source (n, W) int32: of the n ranks that this process has, rank r's first layout.rows * layout.columns(r) words.
    out (n, layout.rows * layout.total) int32, written. inboxes: Inboxes. are_floats: whether words are float32 or pairs
    of 16-bit floats, which then go as packets of values where layout and addresses allow. Ranks of more words than
    packets hold take several launches. Raises ValueError for other arrays, DeviceError on the cpu device.
    """
    count = _check("peer_gather", source, layout, inboxes)
    check("peer_gather", "out", out, (count, layout.rows * layout.total), WORDS)
    longest = layout.rows * max(layout.columns(rank) for rank in range(inboxes.world_size))
    if layout.rows * layout.total >= 1 << 31:
        raise ValueError(f"peer_gather: out must have less than 2^31 words, got {layout.rows * layout.total}")
    words = _words_of_packet(source, out, layout, are_floats)
    arguments = source, out, *inboxes.arguments(words)
    for start, grid in _launches(longest, words, inboxes.capacity, count):
        launch(peer_gather_kernel(words), grid, THREADS, *arguments, start, *layout)


def peer_exchange(source, out, layout, row_width, inboxes, are_floats=False):
    """out[i] = the rows of rank first_rank + i, layout.own_rows(rank, row_width), of what all ranks have together.

    out (n, W) int32: the first own_rows x layout.total words of each are written, W at least the most of any rank here.
    The other arguments are peer_gather's; a launch moves as many packets between two ranks as inboxes hold of them.
    Raises as peer_gather.
    """
    count = _check("peer_exchange", source, layout, inboxes)
    _, length = check("peer_exchange", "out", out, (count, None), WORDS)
    needed = layout.total * max(layout.own_rows(inboxes.first_rank + i, row_width) for i in range(count))
    if length < needed or layout.rows * layout.total >= 1 << 31:
        raise ValueError(f"peer_exchange: out must have {needed} words of {layout}, got {length}")
    longest = min(row_width, layout.rows) * max(layout.columns(rank) for rank in range(inboxes.world_size))
    words = _words_of_packet(source, out, layout, are_floats)
    arguments = source, out, *inboxes.arguments(words)
    for start, grid in _launches(longest, words, inboxes.capacity, count):
        launch(peer_exchange_kernel(words), grid, THREADS, *arguments, start, row_width, *layout)


def _check(name, source, layout, inboxes):
    """The number of ranks of this process, once arrays are as peer_gather says."""
    count, words = check(name, "source", source, (None, None), WORDS)
    inboxes.check(name, count)
    needed = layout.rows * max(layout.columns(inboxes.first_rank + i) for i in range(count))
    if words < needed:
        raise ValueError(f"{name}: source must have {needed} words of {layout}, got {words}")
    if device.name() == "cpu":
        raise DeviceError(f"{name}: the cpu device has no peers; processes there use shared memory")
    return count


def _words_of_packet(source, out, layout, are_floats):
    """Of which kind packets are. Ranks whose arrays have the same shapes take the same."""
    by_values = are_floats and layout.has_whole_packets and is_16_byte_aligned(source, out)
    return OF_VALUES if by_values else WITH_EPOCHS


def _launches(longest, words, capacity, count):
    """Yields (first word, grid) of the launches that move `longest` words between two ranks."""
    for start in range(0, longest, words * capacity):
        yield start, (-(-min(longest - start, words * capacity) // (words * THREADS)), count)
