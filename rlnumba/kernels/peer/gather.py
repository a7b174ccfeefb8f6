"""Gather of small arrays between GPUs of one host, as one kernel that may be captured in a CUDA graph.

    a row of out = the ranks' columns of it, in their order

GatherLayout says which columns rank r has; a single row of equal parts is out[r] = source of rank r. Each rank receives
all rows, or in an exchange rows of its own, an R-th of the bytes.

Words travel to inboxes (inbox.py), in packets with epochs, or floats, if whole packets, as packets of values. The
former are twice the bytes, hence for small arrays; larger ones are copied (rlnumba/parallel/transports/peer.py).

Blocks wait for blocks of the same index on other GPUs, which run before those of higher indices: no cycle. With PDL the
next kernel may begin as soon as all blocks run, and fetch its weights while they wait.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.checks import check, is_16_byte_aligned
from rlnumba.kernels.peer.inbox import EPOCH, OF_VALUES, PACKET_BYTES, WITH_EPOCHS, end_epoch, packets
from rlnumba.kernels.ptx.warp import device_function, griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

i32, i64 = np.int32, np.int64
# A thread moves one packet to, and from, each other rank.
THREADS = 256
WORDS = (np.dtype(np.int32),)


class GatherLayout(NamedTuple):
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
        return GatherLayout(1, words, 0, 0, world_size * words)

    @property
    def has_whole_packets(self):
        """Whether each rank has a multiple of OF_VALUES words of a row, from such a multiple on."""
        return not any(words % OF_VALUES for words in (self.width, self.extra, self.total))

    def received(self, rank, row_width=None):
        """Number of rows that a rank receives: all, or at most row_width, from rank row_width on."""
        if row_width is None:
            return self.rows
        return min((rank + 1) * row_width, self.rows) - min(rank * row_width, self.rows)

    def columns(self, rank):
        """Number of words of a row that a rank has."""
        return self._start(rank + 1) - self._start(rank)

    def _start(self, rank):
        return min(rank * self.width + min(rank, self.longer) * self.extra, self.total)


@device_function
def start_of(rank, layout):
    """GatherLayout's start(rank)."""
    return min(rank * layout.width + min(rank, layout.longer) * layout.extra, layout.total)


@device_function
def received_rows(rank, row_step, row_count, rows):
    """(first, number) of the rows that a rank receives: of row_count, from rank row_step on, those that there are."""
    first = min(rank * row_step, rows)
    return first, min(first + row_count, rows) - first


@specialize
def peer_gather_kernel(words):
    """The kernel that moves packets of so many words."""
    _, load, store, send, receive = packets(words)

    @supports_pdl
    @cuda.jit
    def peer_gather_kernel(source, out, inboxes, start, row_step, row_count, layout):
        """out[i] = the gather on rank first_rank + i, of which this launch is grid.y = i, of received_rows.

        inboxes: KindInboxes; layout: a GatherLayout.

        A thread owns a packet of what each pair of ranks exchanges, from word `start` on. The first packet is always
        sent. The last block of a rank that has read its epoch increments it.
        """
        # All blocks run by now: they wait for other GPUs, but for no block of this one.
        griddepcontrol_launch_dependents()
        values = cuda.local.array(words, np.int32)
        local = i64(cuda.blockIdx.y)
        addresses, state, capacity = inboxes.addresses, inboxes.state, inboxes.capacity
        world_size = i64(addresses.shape[0])
        rank = inboxes.first_rank + local
        # Addresses do not change: those of this inbox and of the next rank's are read while the kernel before runs.
        inbox, neighbour = addresses[rank], addresses[(rank + 1) % world_size]
        griddepcontrol_wait()
        epoch = state[2 * local + EPOCH]
        packet = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        index = start + words * packet
        # In packets: where the half of an inbox begins that this epoch has.
        half = inboxes.first_packet + (i64(epoch) & 1) * world_size * capacity
        begin = start_of(rank, layout)
        columns = start_of(rank + 1, layout) - begin
        # To all others, from the next rank on; what stays comes last.
        for step in range(1, world_size + 1):
            other = (rank + step) % world_size
            first_row, count = received_rows(other, row_step, row_count, layout.rows)
            first_word, end = first_row * columns, count * columns
            if packet < capacity and (packet == 0 or index < end):
                load(source[local], first_word + index, values, first_word + end)
                if step == world_size:
                    store(out[local], index, values, begin, columns, layout.total, end)
                else:
                    theirs = neighbour if step == 1 else addresses[other]
                    send(theirs + (half + rank * capacity + packet) * PACKET_BYTES, values, epoch)
        end_epoch(state, local, epoch)
        _, own_rows = received_rows(rank, row_step, row_count, layout.rows)
        for step in range(1, world_size):
            other = (rank + world_size - step) % world_size
            begin = start_of(other, layout)
            columns = start_of(other + 1, layout) - begin
            end = own_rows * columns
            if packet < capacity and (packet == 0 or index < end):
                address = inbox + (half + other * capacity + packet) * PACKET_BYTES
                if receive(address, values, epoch, inboxes.limit_cycles) == 0:
                    inboxes.error[local] = i32(other + 1)
                store(out[local], index, values, begin, columns, layout.total, end)

    return peer_gather_kernel


def peer_gather(source, out, layout, inboxes, are_floats=False, row_width=None):
    """out[i] = the rows that all ranks have together, on rank first_rank + i; every rank launches it.

    source (n, W) int32: of the n ranks that this process has, rank r's first layout.rows * layout.columns(r) words.
    layout: a GatherLayout, the same on all ranks.
    out (n, W') int32: the first layout.received(rank, row_width) * layout.total words of each are written, W' at least
    the most of any rank here. row_width: of an exchange, in which a rank receives so many rows, from rank row_width on.
    inboxes: Inboxes. are_floats: whether words are float32 or pairs of 16-bit floats, which then go as packets of
    values where layout and addresses allow. Rows beyond what packets hold between two ranks take several launches.
    Raises ValueError for other arrays, DeviceError on the cpu device.
    """
    count, words_in = check("peer_gather", "source", source, (None, None), WORDS)
    _, words_out = check("peer_gather", "out", out, (count, None), WORDS)
    inboxes.check("peer_gather", count)
    here = range(inboxes.first_rank, inboxes.first_rank + count)
    needed = layout.rows * max(layout.columns(rank) for rank in here)
    if words_in < needed:
        raise ValueError(f"peer_gather: source must have {needed} words of {layout}, got {words_in}")
    needed = layout.total * max(layout.received(rank, row_width) for rank in here)
    if words_out < needed or layout.rows * layout.total >= 1 << 31:
        raise ValueError(f"peer_gather: out must have {needed} words, fewer than 2^31, of {layout}, got {words_out}")
    if device.name() == "cpu":
        raise DeviceError("peer_gather: the cpu device has no peers; processes there use shared memory")
    row_step, row_count = (0, layout.rows) if row_width is None else (row_width, row_width)
    longest = min(row_count, layout.rows) * max(layout.columns(rank) for rank in range(inboxes.world_size))
    words = _words_of_packet(source, out, layout, are_floats)
    arguments, a_launch = (source, out, inboxes.of_kind(words)), words * inboxes.capacity
    for start in range(0, longest, a_launch):
        grid = -(-min(longest - start, a_launch) // (words * THREADS)), count
        launch(peer_gather_kernel(words), grid, THREADS, *arguments, start, row_step, row_count, layout)


def _words_of_packet(source, out, layout, are_floats):
    """The kind of the packets, OF_VALUES or WITH_EPOCHS. Ranks whose arrays have the same shapes take the same."""
    by_values = are_floats and layout.has_whole_packets and is_16_byte_aligned(source, out)
    return OF_VALUES if by_values else WITH_EPOCHS
