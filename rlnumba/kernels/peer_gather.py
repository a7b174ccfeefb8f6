"""Gather of small arrays between GPUs of one host, as one kernel that may be captured in a CUDA graph.

    a row of out = the ranks' columns of it, in their order

Layout says which columns rank r has; a single row of equal parts is out[r] = source of rank r. An exchange does so for
some of the rows alone, others on each rank: it moves an R-th of the bytes.

Every rank has an inbox in its own memory, which the others write over NVLink. A 64-bit word of the inbox has 32 bits of
data and the epoch of the gather that they belong to. 64-bit accesses are atomic, so a reader that finds its epoch has
the data as well: no fence, no flag, one trip over NVLink (NCCL's LL protocol). Twice the bytes move, hence for small
arrays; larger ones are copied (rlnumba/distributed/peer.py).

An inbox has two halves, by the parity of the epoch. A rank writes a half again after it has received all words of the
next epoch, at least a pair from each rank, so after all ranks have begun that gather, and have ended the one whose
words it overwrites. So a word has an older epoch or the right one, and they are compared for equality. After 2^32 - 1
comes 2, of the same parity as 0, which cleared memory has. The epoch belongs to the inbox, not to a caller, and is in
the GPU's memory, where the kernel increments it: a replayed graph needs no arguments of its own.

Blocks wait for blocks of the same index on other GPUs, which run before those of higher indices: no cycle. A wait ends
after limit_cycles, and then reports the rank that it waited for. With PDL the next kernel may begin as soon as all
blocks run, and fetch its weights while they wait.
Source: PTX ISA, memory consistency model, on morally strong 64-bit accesses of system scope.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.errors import DeviceError
from rlnumba.kernels.checks import check
from rlnumba.kernels.ptx.instruction import SIMULATED, instruction
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.warp import (
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    udiv,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32, u32, i64 = np.int32, np.uint32, np.int64
THREADS = 256
# A thread moves two words of data, which have 16 bytes in the inbox.
PAIR_BYTES = 16
# Elements of a rank's part of `state`.
EPOCH, DONE = 0, 1
FIRST_EPOCH, LAST_EPOCH = 2, 2**32 - 1
WORDS = (np.dtype(np.int32),)

if SIMULATED:
    from rlnumba.kernels.ptx.shared_memory import memory
    from rlnumba.runtime.simulator import Condition, grid_state

    def _pair(address):
        return memory(address, PAIR_BYTES).view(np.uint32)

    def _arrival(address):
        """Where the simulator's threads wait for a pair of words."""
        return grid_state(("inbox", int(address)), Condition)


@instruction(
    "{ .reg .b64 first, second; mov.b64 first, {$1, $3}; mov.b64 second, {$2, $3};"
    " st.relaxed.sys.global.v2.b64 [$0], {first, second}; }",
    "lrru",
)
def inbox_store(address, first, second, epoch):
    """Write two words, each with the epoch, to 16 bytes of an inbox on any GPU."""
    _pair(address)[:] = np.array([first, epoch, second, epoch], np.int64) & 0xFFFFFFFF
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
def inbox_load(address, epoch, limit_cycles):
    """(two words, 1) of 16 bytes of this GPU's inbox once they have the epoch; (undefined, undefined, 0) too late.

    In the simulator a limit of 0 is over at once, and others never are.
    """
    while (_pair(address)[1::2] != epoch).any():
        if limit_cycles <= 0:
            return i32(0), i32(0), i32(0)
        _arrival(address).wait("inbox_load")
    return *_pair(address)[::2].view(np.int32), i32(1)


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


@device_function
def store_pair(out, index, first, second, begin, columns, total, words):
    """Two neighbouring words of a rank, number `index` and the next, to its columns of out's rows."""
    if index < words:
        row = i64(udiv(i32(index), i32(columns)))
        column = index - row * columns
        out[row * total + begin + column] = first
        if index + 1 < words:
            if column + 1 == columns:
                row, column = row + 1, i64(-1)
            out[row * total + begin + column + 1] = second


@device_function
def receive(
    out, inbox, error, local, rank, world_size, half, capacity, pair, index, epoch, limit_cycles, rows, width, longer,
    extra, total,
):  # fmt: skip
    """Wait for a pair of words of each other rank, of those that it sends of `rows` rows, and store it.

    inbox: where this rank's one begins.
    """
    for step in range(1, world_size):
        other = (rank + world_size - step) % world_size
        begin = start_of(other, width, longer, extra, total)
        columns = start_of(other + 1, width, longer, extra, total) - begin
        words = rows * columns
        if pair < capacity and (pair == 0 or index < words):
            address = inbox + (half + other * capacity + pair) * PAIR_BYTES
            first, second, arrived = inbox_load(address, epoch, limit_cycles)
            if arrived == 0:
                error[local] = i32(other + 1)
            store_pair(out, index, first, second, begin, columns, total, words)


@device_function
def end_epoch(state, local, epoch):
    """All threads of a block have read the epoch; the last block of a rank increments it, for the next kernel.

    While words are on their way, so that the kernel ends as soon as they are there.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        if atomic_add_acq_rel(state, 2 * local + DONE) == cuda.gridDim.x - 1:
            state[2 * local + DONE] = u32(0)
            following = i64(epoch) + 1
            if following == LAST_EPOCH + 1:
                following = i64(FIRST_EPOCH)
            state[2 * local + EPOCH] = u32(following)


@cuda.jit
def peer_gather_kernel(
    source, out, inboxes, state, error, first_rank, capacity, limit_cycles, start, rows, width, longer, extra, total
):
    """out[i] = the gather on rank first_rank + i, of which this launch is grid.y = i, from each rank's word `start` on.

    A thread owns two neighbouring words of each rank: it sends its own to all others, and receives theirs. The first
    pair is always sent. The last block of a rank that has read its epoch increments it.
    """
    # All blocks run by now: they wait for other GPUs, but for no block of this one.
    griddepcontrol_launch_dependents()
    local = i64(cuda.blockIdx.y)
    world_size = i64(inboxes.shape[0])
    rank = first_rank + local
    # Addresses do not change: while the kernel before still runs, those of this inbox and of the next rank's are read.
    inbox, neighbour = inboxes[rank], inboxes[(rank + 1) % world_size]
    griddepcontrol_wait()
    epoch = state[2 * local + EPOCH]
    pair = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    index = start + 2 * pair
    # Offsets in pairs of this rank's words in the inboxes of others, and of the half that all of them have.
    half = (i64(epoch) & 1) * world_size * capacity
    begin = start_of(rank, width, longer, extra, total)
    columns = start_of(rank + 1, width, longer, extra, total) - begin
    words = rows * columns
    if pair < capacity and (pair == 0 or index < words):
        first, second = i32(0), i32(0)
        if index < words:
            first = source[local, index]
        if index + 1 < words:
            second = source[local, index + 1]
        for step in range(1, world_size):
            theirs = neighbour if step == 1 else inboxes[(rank + step) % world_size]
            inbox_store(theirs + (half + rank * capacity + pair) * PAIR_BYTES, first, second, epoch)
        store_pair(out[local], index, first, second, begin, columns, total, words)
    end_epoch(state, local, epoch)
    receive(
        out[local], inbox, error, local, rank, world_size, half, capacity, pair, index, epoch, limit_cycles, rows,
        width, longer, extra, total,
    )  # fmt: skip


@cuda.jit
def peer_exchange_kernel(
    source, out, inboxes, state, error, first_rank, capacity, limit_cycles, start, row_width, rows, width, longer,
    extra, total,
):  # fmt: skip
    """As peer_gather_kernel, but out[i] has only the rows of rank first_rank + i: row_width from rank row_width on.

    A thread owns two neighbouring words of what each pair of ranks exchanges, from word `start` on.
    """
    # All blocks run by now: they wait for other GPUs, but for no block of this one.
    griddepcontrol_launch_dependents()
    local = i64(cuda.blockIdx.y)
    world_size = i64(inboxes.shape[0])
    rank = first_rank + local
    # Addresses do not change: while the kernel before still runs, those of this inbox and of the next rank's are read.
    inbox, neighbour = inboxes[rank], inboxes[(rank + 1) % world_size]
    griddepcontrol_wait()
    epoch = state[2 * local + EPOCH]
    pair = i64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    index = start + 2 * pair
    half = (i64(epoch) & 1) * world_size * capacity
    begin = start_of(rank, width, longer, extra, total)
    columns = start_of(rank + 1, width, longer, extra, total) - begin
    for step in range(world_size):
        other = (rank + step) % world_size
        first_row = min(other * row_width, rows)
        words = (min(first_row + row_width, rows) - first_row) * columns
        if pair < capacity and (pair == 0 or index < words):
            first, second = i32(0), i32(0)
            if index < words:
                first = source[local, first_row * columns + index]
            if index + 1 < words:
                second = source[local, first_row * columns + index + 1]
            if step == 0:
                store_pair(out[local], index, first, second, begin, columns, total, words)
            else:
                theirs = neighbour if step == 1 else inboxes[other]
                inbox_store(theirs + (half + rank * capacity + pair) * PAIR_BYTES, first, second, epoch)
    own_rows = min((rank + 1) * row_width, rows) - min(rank * row_width, rows)
    end_epoch(state, local, epoch)
    receive(
        out[local], inbox, error, local, rank, world_size, half, capacity, pair, index, epoch, limit_cycles, own_rows,
        width, longer, extra, total,
    )  # fmt: skip


def inbox_bytes(world_size, words):
    """Bytes of an inbox for gathers of up to `words` words a rank."""
    return 2 * world_size * _capacity(words) * PAIR_BYTES


def _capacity(words):
    return -(-words // 2)


def peer_gather(source, out, layout, inboxes, state, error, first_rank, most_words, limit_cycles):
    """out[i] = the rows that all ranks have together, on rank first_rank + i; every rank launches it with this Layout.

    source (n, W) int32: of n ranks that this process has, one on a GPU, all in the simulator; rank r's first
    layout.rows * layout.columns(r) words. out (n, layout.rows * layout.total) int32, written. inboxes (R,) int64:
    addresses of inbox_bytes(R, most_words) bytes on each rank, cleared at the start, with the epoch at least 2 then,
    the same on all. state (2 n,) uint32: of each the epoch, and 0. error (n,) int32: set to 1 + r if rank r did not
    send its words within limit_cycles of the GPU's clock; memory of the host will do. Ranks of more than most_words
    words take several launches. Raises ValueError for other arrays, DeviceError on the cpu device.
    """
    world_size, count = _check("peer_gather", source, layout, inboxes, state, error, first_rank)
    check("peer_gather", "out", out, (count, layout.rows * layout.total), WORDS)
    longest = layout.rows * max(layout.columns(rank) for rank in range(world_size))
    if layout.rows * layout.total >= 1 << 31:
        raise ValueError(f"peer_gather: out must have less than 2^31 words, got {layout.rows * layout.total}")
    capacity = _capacity(most_words)
    inbox = inboxes, state, error, first_rank, capacity, limit_cycles
    for start, grid in _launches(longest, capacity, count):
        launch(peer_gather_kernel, grid, THREADS, source, out, *inbox, start, *layout)


def peer_exchange(source, out, layout, row_width, inboxes, state, error, first_rank, most_words, limit_cycles):
    """out[i] = the rows of rank first_rank + i, layout.own_rows(rank, row_width), of what all ranks have together.

    out (n, W) int32: the first own_rows x layout.total words of each are written, W at least the most of any rank here.
    The other arguments are peer_gather's, with which it shares inboxes; a piece of most_words is of what two ranks
    exchange. Raises as peer_gather.
    """
    world_size, count = _check("peer_exchange", source, layout, inboxes, state, error, first_rank)
    _, words = check("peer_exchange", "out", out, (count, None), WORDS)
    needed = layout.total * max(layout.own_rows(first_rank + i, row_width) for i in range(count))
    if words < needed or layout.rows * layout.total >= 1 << 31:
        raise ValueError(f"peer_exchange: out must have {needed} words of {layout}, got {words}")
    longest = min(row_width, layout.rows) * max(layout.columns(rank) for rank in range(world_size))
    capacity = _capacity(most_words)
    inbox = inboxes, state, error, first_rank, capacity, limit_cycles
    for start, grid in _launches(longest, capacity, count):
        launch(peer_exchange_kernel, grid, THREADS, source, out, *inbox, start, row_width, *layout)


def _check(name, source, layout, inboxes, state, error, first_rank):
    """(number of ranks, of which this process has so many), once arrays are as peer_gather says."""
    count, words = check(name, "source", source, (None, None), WORDS)
    (world_size,) = check(name, "inboxes", inboxes, (None,), (np.dtype(np.int64),))
    check(name, "state", state, (2 * count,), (np.dtype(np.uint32),))
    check(name, "error", error, (count,), WORDS)
    needed = layout.rows * max(layout.columns(first_rank + i) for i in range(count))
    if words < needed:
        raise ValueError(f"{name}: source must have {needed} words of {layout}, got {words}")
    if device.name() == "cpu":
        raise DeviceError(f"{name}: the cpu device has no peers; processes there use shared memory")
    return world_size, count


def _launches(longest, capacity, count):
    """Yields (first word, grid) of the launches that move `longest` words between two ranks."""
    for start in range(0, longest, 2 * capacity):
        pairs = -(-min(longest - start, 2 * capacity) // 2)
        yield start, (-(-pairs // THREADS), count)
