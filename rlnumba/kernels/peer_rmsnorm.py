"""RMSNorm of rows whose columns are on several GPUs of one host: gather (peer_gather.py) and norm as one kernel.

    out = rmsnorm(rows), a row = the ranks' columns of it, in their order

The rows themselves are not written: the residual stream of tensor-parallel inference stays cut into columns, of which
each rank adds to its own. Words, inboxes, epochs and waits are those of peer_gather.py, with which this kernel shares
them. A thread has the columns of a row that it has in rmsnorm_kernel, and does the same arithmetic: the bits are those
of gather and rmsnorm apart. Its 16 bytes belong to one rank: it sends them, or waits for them.

For the few rows of a decode step: one launch less, and the next GEMM fetches its weights while this kernel waits.
"""

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.checks import FLOATS, check
from rlnumba.kernels.nn.rmsnorm import FEW_ROWS, FORWARD, normalise_function, share_row
from rlnumba.kernels.peer_gather import EPOCH, PAIR_BYTES, end_epoch, inbox_load, inbox_store
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
from rlnumba.runtime.launch import launch, specialize

i32, i64 = np.int32, np.int64
# Of 16 bytes, which a thread has of a chunk of columns (rmsnorm.RowLayout).
WORDS, PAIRS = 4, 2


@specialize
def peer_rmsnorm_kernel(layout, element):
    """The kernel for rows of a RowLayout, of elements of a dtype's name, to which all arrays are aligned."""
    columns, vector, _, threads = layout
    chunks, values_count, words_count, a_word = (
        layout.chunks,
        layout.chunks * vector,
        layout.chunks * WORDS,
        vector // WORDS,
    )
    load, store = vector_access(vector, vector, not layout.full)
    load_words, _ = vector_access(WORDS, WORDS)
    normalise = normalise_function(layout)
    unpack = cvt_unpack(element) if a_word == 2 else None

    @cuda.jit(launch_bounds=(threads, 1))
    def peer_rmsnorm_kernel(parts, weight, eps, out, inboxes, state, error, first_rank, capacity, limit_cycles):
        """Block (x, y): row x on rank first_rank + y, whose columns of it are parts[y, x], (words,) int32."""
        sums = cuda.shared.array(32, np.float32)
        row, local = i64(cuda.blockIdx.x), i64(cuda.blockIdx.y)
        values, weights = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        words = cuda.local.array(words_count, np.int32)
        world_size, own_words = i64(inboxes.shape[0]), i64(parts.shape[2])
        rank, first = first_rank + local, cuda.threadIdx.x * vector
        # All blocks run by now: they wait for other GPUs, but for no block of this one.
        griddepcontrol_launch_dependents()
        for chunk in range(chunks):
            load(weight, first + chunk * threads * vector, weights, chunk * vector)
        # As in peer_gather_kernel.
        inbox, neighbour = inboxes[rank], inboxes[(rank + 1) % world_size]
        griddepcontrol_wait()
        epoch = state[2 * local + EPOCH]
        # In pairs of words: the half of an inbox that this gather uses, and where a row's words begin in a rank's part.
        # First come the first pairs of all threads, so that a warp writes whole lines.
        half, vectors = (i64(epoch) & 1) * world_size * capacity, own_words // WORDS
        row_pairs = row * vectors * PAIRS
        for chunk in range(chunks):
            word = i64((cuda.threadIdx.x + chunk * threads) * WORDS)
            own_word = word - rank * own_words
            if own_word >= 0 and own_word < own_words:
                load_words(parts[local, row], own_word, words, chunk * WORDS)
                pair = half + rank * capacity + row_pairs + own_word // WORDS
                for step in range(1, world_size):
                    theirs = neighbour if step == 1 else inboxes[(rank + step) % world_size]
                    for i in range(PAIRS):
                        at = chunk * WORDS + 2 * i
                        inbox_store(theirs + (pair + i * vectors) * PAIR_BYTES, words[at], words[at + 1], epoch)
        end_epoch(state, local, epoch)
        for chunk in range(chunks):
            word = i64((cuda.threadIdx.x + chunk * threads) * WORDS)
            owner = i64(udiv(i32(word), i32(own_words)))
            if owner >= world_size:
                for i in range(chunk * WORDS, (chunk + 1) * WORDS):
                    words[i] = i32(0)
            elif owner != rank:
                pair = half + owner * capacity + row_pairs + (word - owner * own_words) // WORDS
                for i in range(PAIRS):
                    at, address = chunk * WORDS + 2 * i, inbox + (pair + i * vectors) * PAIR_BYTES
                    words[at], words[at + 1], arrived = inbox_load(address, epoch, limit_cycles)
                    if arrived == 0:
                        error[local] = i32(owner + 1)
        for i in range(words_count):
            if a_word == 2:
                values[2 * i], values[2 * i + 1] = unpack(words[i])
            else:
                values[i] = int_as_float(words[i])
        normalise(values, weights, eps, sums)
        for chunk in range(chunks):
            store(out[local, row], first + chunk * threads * vector, values, chunk * vector)

    return peer_rmsnorm_kernel


def supports_peer_rmsnorm(parts, weight, out, most_words):
    """Whether peer_rmsnorm takes these arrays: few rows, of which each rank has whole, aligned pieces of 16 bytes."""
    _, rows, columns = parts.shape
    access = access_length(columns, parts, weight, out)
    fits = rows * columns * parts.itemsize <= 4 * most_words
    return 0 < rows <= FEW_ROWS and access * parts.itemsize == 16 and fits


def peer_rmsnorm(parts, weight, eps, out, inboxes, state, error, first_rank, most_words, limit_cycles):
    """out[i] = rmsnorm of the rows that all ranks have together, on rank first_rank + i; every rank launches it.

    parts (n, N, D / R), weight (D,), out (n, N, D) of one floating dtype: of n ranks that this process has, one on a
    GPU, all in the simulator; out is written. The other arguments are peer_gather's, with which it shares inboxes.
    Raises ValueError for other arrays, or those that supports_peer_rmsnorm refuses, DeviceError on the cpu device.
    """
    count, rows, columns = check("peer_rmsnorm", "parts", parts, (None, None, None), FLOATS)
    (world_size,) = check("peer_rmsnorm", "inboxes", inboxes, (None,), (np.dtype(np.int64),))
    check("peer_rmsnorm", "weight", weight, (world_size * columns,), (parts.dtype,))
    check("peer_rmsnorm", "out", out, (count, rows, world_size * columns), (parts.dtype,))
    check("peer_rmsnorm", "state", state, (2 * count,), (np.dtype(np.uint32),))
    check("peer_rmsnorm", "error", error, (count,), (np.dtype(np.int32),))
    if not supports_peer_rmsnorm(parts, weight, out, most_words):
        raise ValueError(
            f"peer_rmsnorm: parts must have 1 to {FEW_ROWS} rows of whole, aligned pieces of 16 bytes, at most "
            f"{4 * most_words} bytes a rank, got {parts.shape} {parts.dtype}"
        )
    if device.name() == "cpu":
        raise DeviceError("peer_rmsnorm: the cpu device has no peers; processes there use shared memory")
    layout = share_row(world_size * columns, parts.itemsize, 16 // parts.itemsize, *FORWARD)
    words = parts.reshape(count, rows * columns).view(np.int32).reshape(count, rows, -1)
    inbox = inboxes, state, error, first_rank, -(-most_words // 2), limit_cycles
    kernel = peer_rmsnorm_kernel(layout, parts.dtype.name)
    launch(kernel, (rows, count), layout.threads, words, weight, float(eps), out, *inbox)
