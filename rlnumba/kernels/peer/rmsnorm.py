"""RMSNorm of rows whose columns are on several GPUs of one host: gather (gather.py) and norm as one kernel.

    out = rmsnorm(rows), a row = the ranks' columns of it, in their order; with unit_offset, of 1 + weight

The rows themselves are not written: the residual stream of tensor-parallel inference stays cut into columns, of which
each rank adds to its own. They travel as packets of values to inboxes that this kernel shares with gathers
(inbox.py). A thread has the columns of a row that it has in rmsnorm_kernel, and does the same arithmetic: the bits
are those of gather and rmsnorm apart. Its 16 bytes are a packet of one rank: it sends them, or waits for them.

For the few rows of a decode step: one launch less, and the next GEMM fetches its weights while this kernel waits.
"""

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.checks import FLOATS, check
from rlnumba.kernels.nn.rmsnorm import FEW_ROWS, FORWARD, add_one_function, normalise_function, share_row
from rlnumba.kernels.peer.inbox import EPOCH, OF_VALUES, PACKET_BYTES, end_epoch, packets
from rlnumba.kernels.ptx.warp import (
    access_length,
    cvt_unpack,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    int_as_float,
    udiv,
    vector_access,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize, supports_pdl

i32, i64 = np.int32, np.int64
# Words of a packet, into which a thread divides its part of a chunk of columns (rmsnorm.RowLayout).
WORDS = OF_VALUES


@specialize
def peer_rmsnorm_kernel(layout, element, unit_offset):
    """The kernel for rows of a RowLayout, of elements of a dtype's name, to which all arrays are aligned."""
    columns, vector, _, threads = layout
    chunks, a_word = layout.chunks, vector // WORDS
    values_count, words_count = chunks * vector, chunks * WORDS
    load, store = vector_access(vector, vector, not layout.full)
    load_words, _ = vector_access(WORDS, WORDS)
    _, _, _, send, receive = packets(WORDS)
    normalise, add_one = normalise_function(layout), add_one_function(values_count)
    unpack = cvt_unpack(element) if a_word == 2 else None

    @supports_pdl
    @cuda.jit(launch_bounds=(threads, 1))
    def peer_rmsnorm_kernel(parts, weight, eps, out, inboxes):
        """Block (x, y): row x on rank first_rank + y, whose columns of it are parts[y, x], (words,) int32.

        inboxes: KindInboxes.
        """
        addresses, state, capacity = inboxes.addresses, inboxes.state, inboxes.capacity
        sums = cuda.shared.array(32, np.float32)
        row, local = i64(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values, weights = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        words, packet = cuda.local.array(words_count, np.int32), cuda.local.array(WORDS, np.int32)
        world_size, own_words = i64(addresses.shape[0]), i64(parts.shape[2])
        rank, first = inboxes.first_rank + local, cuda.threadIdx.x * vector
        # All blocks run by now: they wait for other GPUs, but for no block of this one.
        griddepcontrol_launch_dependents()
        for chunk in range(chunks):
            load(weight, first + chunk * threads * vector, weights, chunk * vector)
        if unit_offset:
            add_one(weights)
        # Addresses do not change, so they are read before the wait, as peer_gather_kernel reads them.
        inbox, neighbour = addresses[rank], addresses[(rank + 1) % world_size]
        griddepcontrol_wait()
        epoch = state[2 * local + EPOCH]
        # In packets: where the half of an inbox begins that this epoch has, and a row in a rank's part.
        half, row_packets = inboxes.first_packet + (i64(epoch) & 1) * world_size * capacity, own_words // WORDS
        first_of_row = half + row * row_packets
        for chunk in range(chunks):
            word = i64((cuda.threadIdx.x + chunk * threads) * WORDS)
            own_word = word - rank * own_words
            if own_word >= 0 and own_word < own_words:
                load_words(parts[local, row], own_word, packet, 0)
                number = first_of_row + rank * capacity + own_word // WORDS
                for step in range(1, world_size):
                    theirs = neighbour if step == 1 else addresses[(rank + step) % world_size]
                    send(theirs + number * PACKET_BYTES, packet, epoch)
                for i in range(WORDS):
                    words[chunk * WORDS + i] = packet[i]
        end_epoch(state, local, epoch)
        for chunk in range(chunks):
            word = i64((cuda.threadIdx.x + chunk * threads) * WORDS)
            owner = i64(udiv(i32(word), i32(own_words)))
            if owner >= world_size:
                for i in range(WORDS):
                    words[chunk * WORDS + i] = i32(0)
            elif owner != rank:
                number = first_of_row + owner * capacity + (word - owner * own_words) // WORDS
                if receive(inbox + number * PACKET_BYTES, packet, epoch, inboxes.limit_cycles) == 0:
                    inboxes.error[local] = i32(owner + 1)
                for i in range(WORDS):
                    words[chunk * WORDS + i] = packet[i]
        for i in range(words_count):
            if a_word == 2:
                values[2 * i], values[2 * i + 1] = unpack(words[i])
            else:
                values[i] = int_as_float(words[i])
        normalise(values, weights, eps, sums)
        for chunk in range(chunks):
            store(out[local, row], first + chunk * threads * vector, values, chunk * vector)

    return peer_rmsnorm_kernel


def supports_peer_rmsnorm(parts, weight, out, capacity):
    """Whether peer_rmsnorm takes these arrays: few rows, of which each rank has whole packets, at most `capacity`."""
    _, rows, columns = parts.shape
    access = access_length(columns, parts, weight, out)
    fits = rows * columns * parts.itemsize <= PACKET_BYTES * capacity
    return 0 < rows <= FEW_ROWS and access * parts.itemsize == PACKET_BYTES and fits


def peer_rmsnorm(parts, weight, eps, out, inboxes, unit_offset=False):
    """out[i] = rmsnorm of the rows that all ranks have together, on rank first_rank + i; every rank launches it.

    parts (n, N, D / R), weight (D,), out (n, N, D) of one floating dtype: of the n ranks that this process has; out is
    written. inboxes: inbox.Inboxes. Raises ValueError for other arrays, or those that supports_peer_rmsnorm
    refuses, DeviceError on the cpu device.
    """
    count, rows, columns = check("peer_rmsnorm", "parts", parts, (None, None, None), FLOATS)
    inboxes.check("peer_rmsnorm", count)
    world_size = inboxes.world_size
    check("peer_rmsnorm", "weight", weight, (world_size * columns,), (parts.dtype,))
    check("peer_rmsnorm", "out", out, (count, rows, world_size * columns), (parts.dtype,))
    if not supports_peer_rmsnorm(parts, weight, out, inboxes.capacity):
        raise ValueError(
            f"peer_rmsnorm: parts must have 1 to {FEW_ROWS} rows of whole, aligned pieces of {PACKET_BYTES} bytes, at "
            f"most {PACKET_BYTES * inboxes.capacity} bytes a rank, got {parts.shape} {parts.dtype}"
        )
    if device.name() == "cpu":
        raise DeviceError("peer_rmsnorm: the cpu device has no peers; processes there use shared memory")
    layout = share_row(world_size * columns, parts.itemsize, PACKET_BYTES // parts.itemsize, *FORWARD)
    words = parts.reshape(count, rows * columns).view(np.int32).reshape(count, rows, -1)
    kernel = peer_rmsnorm_kernel(layout, parts.dtype.name, unit_offset)
    launch(kernel, (rows, count), layout.threads, words, weight, float(eps), out, inboxes.of_kind(WORDS))
