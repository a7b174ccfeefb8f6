"""Transport `peer`: GPUs of one host, one process each, that write into each other's memory over NVLink.

Small gathers, and those of columns, are a kernel (kernels/peer/gather.py), which CUDA graphs may capture. All else is
copied by the DMA engines of the GPUs, in pieces, without a kernel that waits:

    source, on a stream of its own     wait until the slot is free; copy a piece into the target's slot; signal
    target, on the current stream      wait for the signal; copy or add from the slot; signal that it is free

A rank's arena has SLOTS slots for each other rank. Pieces are pushed because arrays may be anywhere on the GPU, and the
target adds from where they arrive: neither side copies a gradient once more. Every rank sends first to its successor,
so that no GPU receives from all others at once.

Gradients in memory of `share_gradients`, which the others have mapped, are pulled by a fold instead (pulled_fold.py).

Memory order: a signal is cuStreamWriteValue32 on the stream of the copies, which comes after a fence of system scope;
a wait is cuStreamWaitValue32, after which the stream's work reads what was written before the signal. Neither takes an
SM. Signals are counters of pieces, or of folds, for each pair of ranks, 32 bits, compared as signed differences: they
may wrap.

Arenas come from cudaMalloc, whose memory other processes can map (not that of cuMemMap, with these handles); each is
mapped once, and freed after all have unmapped it.

Ranks may share a GPU: their processes then run in time slices, and no kernel needs that another process's runs at the
same time. One that waits keeps the GPU until the end of its slice, which is why this is for tests.
"""

import time

import numpy as np

from rlnumba.errors import CommunicationError, DeviceError
from rlnumba.kernels.peer.inbox import FIRST_EPOCH, Inboxes, clear_inbox, inbox_bytes
from rlnumba.parallel import shared_gradients
from rlnumba.parallel.communicator import Communicator, FoldRange, Operation, add_in_place, as_bytes, check_ranges
from rlnumba.parallel.pulled_fold import PulledFold
from rlnumba.parallel.shared_gradients import SharedGradients
from rlnumba.parallel.transports.small_gathers import SmallGathers, capacity_of
from rlnumba.parallel.watchdog import POLL_S, EndFlags, OperationEnd, Watchdog
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.memory import array_at, shared_with_host, track

# A piece takes 0.1 ms at 340 GB/s; its copies and signals some 50 us of the host. With 8 MiB bench/distributed.py has
# measured 166 to 239 GB/s on two H200s, by the host.
PIECE_BYTES = 32 << 20
SLOTS = 2
# Whether gradients of `share_gradients` are pulled; if not, they are as all others. The same on all ranks.
PULLS_GRADIENTS = True
# Bytes of a rank's array up to which a gather of words is one kernel, which moves twice as many; more columns take
# several, of twice the size where they are floats.
SMALL_BYTES = 1 << 20
ALIGNMENT = 256
# Kinds of counters in a PeerArena, one of each for each rank.
COUNTERS = 4
UINT32 = 1 << 32
# Seconds in which the work of a GPU ends after an error, unless it waits for what a rank that failed did not begin.
SETTLE_S = 20.0
# The operation that ranks are in while they map memory.
CONNECT = Operation("connect", 0, "")


class PeerCommunicator(Communicator):
    """A rank among GPUs of one host; see Communicator. Operations are ordered on CuPy's current stream.

    control: a SharedMemoryCommunicator of the same ranks, whose owner this becomes. memory: this rank's PeerArena.
    failed: called with a message when an operation on the GPU does not end; ends the process. first: the counters'
    start.
    """

    def __init__(self, control, memory, failed, first=0):
        super().__init__(control.rank, control.world_size, control.timeout_s)
        self._control, self._memory = control, memory
        # Pieces sent to, and received from, each rank.
        self._sent, self._received = [first] * self.world_size, [first] * self.world_size
        # Folds of shared gradients so far; the one that has not been finished.
        self._pulled, self._unfinished = first, None
        self._watchdog = Watchdog(self.timeout_s, failed, memory.problem)

    def share_gradients(self, make):
        if not PULLS_GRADIENTS:
            return make()
        return self._memory.gradients.share(lambda value: self._control.exchange(CONNECT, value), make)

    def meet_after_error(self, value):
        try:
            is_settled = self._memory.settles(SETTLE_S)
        except RuntimeError:  # the GPU has failed
            is_settled = False
        found = self._control.meet_after_error((value, is_settled))
        if not all(settled for _, settled in found):
            return None
        self._begin_afresh()
        return [each for each, _ in found]

    def _begin_afresh(self):
        super()._begin_afresh()
        self._unfinished = None

    def fail(self):
        self._control.fail()

    def check(self):
        problem = self._memory.problem()
        if problem is not None:
            raise CommunicationError(problem)

    def close(self):
        self._memory.synchronize()
        self._watchdog.close()
        self._memory.close(self._control)
        self._control.close()

    def _compare(self, operation, rank=None):
        if rank is None:
            self._control.exchange(operation)
        else:
            self._control.exchange_pair(operation, rank)

    def _barrier(self, operation):
        self._memory.synchronize()
        self.check()
        self._control.exchange(operation)

    def _objects(self, operation, value):
        return self._control._objects(operation, value)

    def _gather(self, operation, array, out):
        if self._memory.gathers.gather(array, out):
            return
        source, targets = as_bytes(array), as_bytes(out).reshape(self.world_size, -1)
        ending = self._begin_copies(operation)
        targets[self.rank][...] = source
        for first in range(0, source.size, self._memory.piece_bytes):
            piece = slice(first, first + self._memory.piece_bytes)
            for other in self._others(1):
                self._send(source[piece], other)
            for other in self._others(-1):
                targets[other][piece] = self._receive(other, source[piece].size)
                self._release(other)
        self._end_copies(ending)

    def _gather_columns(self, operation, array, out, columns):
        if not self._memory.gathers.gather_columns(array, out, columns):
            super()._gather_columns(operation, array, out, columns)

    def _exchange_rows(self, operation, array, out, columns, row_width):
        if not self._memory.gathers.gather_columns(array, out, columns, row_width):
            super()._exchange_rows(operation, array, out, columns, row_width)

    def gather_rmsnorm(self, part, weight, eps, out, unit_offset=False):
        if not self._memory.gathers.takes_rmsnorm(part, weight, out):
            return False
        _, part = self._begin("gather", f"{out.dtype} {tuple(out.shape)}, normalised", part)
        self._memory.gathers.gather_rmsnorm(part, weight, eps, out, unit_offset)
        return True

    def _begin_fold(self, operation, gradient, accumulated, start, count, is_first):
        if self._unfinished is not None:
            raise ValueError(f"{operation}: {self._unfinished} has not been finished")
        mine = FoldRange(start, accumulated.size, None if gradient is None else gradient.size)
        place = None if gradient is None else self._memory.gradients.place_of(gradient)
        found = self._control.exchange(operation, (tuple(mine), place))
        ranges, places = [FoldRange(*each) for each, _ in found], [place for _, place in found[:count]]
        check_ranges(operation, ranges)
        ending = self._begin_copies(operation)
        if None in places:
            self._add_what_arrives(ranges, gradient, accumulated, start, count, is_first)
            self._end_copies(ending)
            return lambda: None
        self._pulled = (self._pulled + 1) % UINT32
        fold = PulledFold(self._memory, self._pulled, places, gradient, accumulated, start, is_first)
        self._unfinished = operation

        def finish():
            fold.finish()
            self._unfinished = None
            self._end_copies(ending)

        return finish

    def _add_what_arrives(self, ranges, gradient, accumulated, start, count, is_first):
        """The fold of any gradients: each rank sends the others their parts of its gradient."""
        length = self._memory.piece_bytes // 4
        for first in range(0, max(each.size for each in ranges), length):
            for other in self._others(1) if gradient is not None else ():
                begin, size, _ = ranges[other]
                if first < size:
                    self._send(as_bytes(gradient[begin + first : begin + min(first + length, size)]), other)
            target = accumulated[first : first + length]
            for k in range(count if target.size else 0):
                if k == self.rank:
                    part = gradient[start + first : start + first + target.size]
                    add_in_place(target, part, is_first and k == 0)
                else:
                    part = self._receive(k, 4 * target.size).view(np.float32)
                    add_in_place(target, part, is_first and k == 0)
                    self._release(k)

    def _put(self, operation, array, rank):
        source = as_bytes(array)
        ending = self._begin_copies(operation)
        for first in range(0, source.size, self._memory.piece_bytes):
            self._send(source[first : first + self._memory.piece_bytes], rank)
        self._end_copies(ending)

    def _get(self, operation, array, rank):
        target = as_bytes(array)
        ending = self._begin_copies(operation)
        for first in range(0, target.size, self._memory.piece_bytes):
            piece = target[first : first + self._memory.piece_bytes]
            piece[...] = self._receive(rank, piece.size)
            self._release(rank)
        self._end_copies(ending)

    def _others(self, step):
        """The other ranks: those after this one, or with step -1 those before it, in a circle."""
        return [(self.rank + step * distance) % self.world_size for distance in range(1, self.world_size)]

    def _begin_copies(self, operation):
        self._memory.begin(operation)
        # From here on: with a stream that waits, the driver may let the host wait, too, as to load a kernel.
        ending = OperationEnd()
        self._watchdog.watch(operation, ending)
        return ending

    def _end_copies(self, ending):
        ending.flag = self._memory.end()

    # Both streams get their work piece by piece: the queue of a stream is limited, and the host waits when it is full.
    def _send(self, source, rank):
        """Push bytes to the next slot at a rank, on the stream of sends."""
        number = self._sent[rank]
        self._sent[rank] = (number + 1) % UINT32
        self._memory.wait_free(rank, (number + 1 - SLOTS) % UINT32)
        self._memory.push(source, rank, number % SLOTS)
        self._memory.signal_arrived(rank, self._sent[rank])

    def _receive(self, rank, nbytes):
        """The next bytes from a rank, (nbytes,) uint8 in its slot, to be used on the current stream until _release."""
        self._memory.wait_arrived(rank, (self._received[rank] + 1) % UINT32)
        return self._memory.slot(rank, self._received[rank] % SLOTS, nbytes)

    def _release(self, rank):
        self._received[rank] = (self._received[rank] + 1) % UINT32
        self._memory.signal_free(rank, self._received[rank])


class PeerArena:
    """Memory of this process's GPU that the other ranks of the host have mapped, and theirs.

    It holds, from the start: counters of pieces that arrived from each rank, of own pieces that each rank has released,
    of folds for which each rank's gradient is complete, and of those for which each rank has read this one's; the inbox
    of small gathers; the slots. gathers: SmallGathers; gradients: the SharedGradients beside it. first: the counters'
    start; epoch: that of small gathers.
    """

    def __init__(
        self,
        control,
        piece_bytes=PIECE_BYTES,
        small_bytes=SMALL_BYTES,
        first=0,
        epoch=FIRST_EPOCH,
        pull_bytes=shared_gradients.PIECE_BYTES,
    ):
        import cupy
        from cuda.bindings import driver

        self._cupy, self._driver = cupy, driver
        rank, world_size = control.rank, control.world_size
        self.rank, self.world_size = rank, world_size
        self.piece_bytes, self._small_bytes = _aligned(piece_bytes), small_bytes
        self._inbox_offset, self._slots_offset = _offsets(world_size, small_bytes)
        nbytes = arena_bytes(world_size, piece_bytes, small_bytes)
        track("peer", nbytes)
        runtime = cupy.cuda.runtime
        self._own = runtime.malloc(nbytes)
        runtime.memset(self._own, 0, nbytes)
        array_at(self._own, COUNTERS * world_size, np.uint32, self).fill(first)
        capacity = capacity_of(small_bytes)
        inbox = array_at(self._own + self._inbox_offset, inbox_bytes(world_size, capacity), np.uint8, self)
        clear_inbox(inbox, world_size, capacity)
        cupy.cuda.Device().synchronize()
        offers = control.exchange(CONNECT, (runtime.getDevice(), runtime.ipcGetMemHandle(self._own)))
        self._bases = [self._own if r == rank else self._map(*offer) for r, offer in enumerate(offers)]
        # Slots of pieces from each rank, as arrays: making one asks the driver about its address.
        self._slots = [
            [
                array_at(self._slot_address(self._own, source, slot), self.piece_bytes, np.uint8, self)
                for slot in range(SLOTS)
            ]
            for source in range(world_size)
        ]
        addresses = cupy.asarray(np.array(self._bases, np.int64) + self._inbox_offset)
        state = cupy.asarray(np.array([epoch, 0], np.uint32))
        # Pinned memory of the host, which the kernel writes, and which needs no copy to be read.
        self._host_error, error = shared_with_host((1,), np.int32)
        self._host_error[...] = 0
        clock_khz = cupy.cuda.Device().attributes["ClockRate"]
        # Another rank may still compile, or share this GPU, so that its kernels wait for the end of a time slice.
        self._timeout_s = control.timeout_s
        limit_cycles = int(self._timeout_s * 1e3 * clock_khz)
        self.gathers = SmallGathers(Inboxes(addresses, state, error, rank, capacity, limit_cycles), small_bytes)
        self._sends, self._flags = cupy.cuda.Stream(non_blocking=True), EndFlags()
        self.gradients = SharedGradients(rank, world_size, self._map, pull_bytes)
        cupy.cuda.Device().synchronize()
        # No rank writes here before all have cleared their memory.
        control.exchange(CONNECT)

    def _map(self, gpu, handle):
        runtime = self._cupy.cuda.runtime
        if not device.can_access(runtime.getDevice(), gpu):
            raise DeviceError(f"GPUs {runtime.getDevice()} and {gpu} cannot access each other's memory")
        return runtime.ipcOpenMemHandle(handle)

    def _check(self, result):
        (error,) = result
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"stream memory operation refused: {error.name}")

    def problem(self):
        """A message if a kernel has waited in vain, else None."""
        late = int(self._host_error[0])
        return (
            f"gather: rank {late - 1} did not send to rank {self.rank} within {self._timeout_s:g} s" if late else None
        )

    def synchronize(self):
        """Wait for the current stream."""
        self._cupy.cuda.get_current_stream().synchronize()

    def settles(self, seconds):
        """Whether the current stream's work, and what is sent, ends within so many seconds."""
        flag, deadline = self.end(), time.monotonic() + seconds
        while not flag.done:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def close(self, control):
        """Unmap the others' memory and free this rank's, after all have done the former."""
        runtime = self._cupy.cuda.runtime
        self._cupy.cuda.Device().synchronize()
        control.exchange(CONNECT)
        others = [base for rank, base in enumerate(self._bases) if rank != self.rank]
        for address in (*others, *self.gradients.addresses()):
            runtime.ipcCloseMemHandle(address)
        control.exchange(CONNECT)
        self.gradients.close()
        runtime.free(self._own)
        track("peer", -arena_bytes(self.world_size, self.piece_bytes, self._small_bytes))

    def begin(self, operation):
        """Order what is sent after the current stream's work so far."""
        stream = self._cupy.cuda.get_current_stream()
        if stream.is_capturing():
            limit = f"{self._small_bytes} bytes a rank, in whole words of 4 bytes"
            raise ValueError(f"{operation}: a CUDA graph can capture gathers of at most {limit}")
        self._sends.wait_event(stream.record())

    def end(self):
        """Order the current stream's further work after what is sent; the EndFlag of both."""
        stream = self._cupy.cuda.get_current_stream()
        current().wait_event(stream, self._sends.record())
        return self._flags.record(stream)

    def _slot_address(self, base, source, slot):
        return base + self._slots_offset + (source * SLOTS + slot) * self.piece_bytes

    def push(self, source, rank, slot):
        target = self._slot_address(self._bases[rank], self.rank, slot)
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(target, source.data.ptr, source.nbytes, runtime.memcpyDefault, self._sends.ptr)

    def slot(self, rank, slot, nbytes):
        return self._slots[rank][slot][:nbytes]

    # Counters: [0, R) pieces that arrived from each rank, [R, 2 R) own pieces that each rank has released, [2 R, 3 R)
    # folds for which each rank's gradient is complete, [3 R, 4 R) those for which each rank has read this one's.
    def wait_arrived(self, rank, value):
        self._wait(self._cupy.cuda.get_current_stream(), rank, value)

    def wait_free(self, rank, value):
        self._wait(self._sends, self.world_size + rank, value)

    def signal_arrived(self, rank, value):
        self._signal(self._sends, rank, self.rank, value)

    def signal_free(self, rank, value):
        self._signal(self._cupy.cuda.get_current_stream(), rank, self.world_size + self.rank, value)

    def signal_complete(self, rank, value):
        self._signal(self._cupy.cuda.get_current_stream(), rank, 2 * self.world_size + self.rank, value)

    def wait_complete(self, rank, value):
        self._wait(self.gradients.stream_of(rank), 2 * self.world_size + rank, value)

    def signal_read(self, rank, value):
        self._signal(self.gradients.stream_of(rank), rank, 3 * self.world_size + self.rank, value)

    def wait_read(self, rank, value):
        self._wait(self._cupy.cuda.get_current_stream(), 3 * self.world_size + rank, value)

    def _wait(self, stream, counter, value):
        # (int32)(counter - value) >= 0
        at_least = self._driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._check(self._driver.cuStreamWaitValue32(stream.ptr, self._own + 4 * counter, value, int(at_least)))

    def _signal(self, stream, rank, counter, value):
        # With the default flags after a fence of system scope.
        self._check(self._driver.cuStreamWriteValue32(stream.ptr, self._bases[rank] + 4 * counter, value, 0))


def arena_bytes(world_size, piece_bytes=PIECE_BYTES, small_bytes=SMALL_BYTES):
    """Bytes of a rank's PeerArena."""
    return _offsets(world_size, small_bytes)[1] + world_size * SLOTS * _aligned(piece_bytes)


def _offsets(world_size, small_bytes):
    """The offsets of the inbox and of the slots in a PeerArena, after the counters."""
    inbox = _aligned(COUNTERS * 4 * world_size)
    return inbox, inbox + _aligned(inbox_bytes(world_size, capacity_of(small_bytes)))


def _aligned(nbytes):
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
