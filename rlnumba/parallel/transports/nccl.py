"""Transport `nccl`: GPUs of several hosts, through CuPy's binding of NCCL, which moves bytes and never adds.

A fold is an exchange of pieces, after which each rank adds in the order of the ranks. Operations are ordered on CuPy's
current stream, which also gives the memory order. NCCL_NVLS_ENABLE=0 and one operation at a time: rank and order of
operations are the same everywhere, or ranks wait for each other until the watchdog ends them.
"""

import contextlib
import pickle

import numpy as np

from rlnumba.parallel.communicator import (
    TIMEOUT_S,
    Communicator,
    FoldRange,
    Operation,
    add_in_place,
    as_bytes,
    check_ranges,
    check_same,
)
from rlnumba.parallel.watchdog import EndFlags, OperationEnd, Watchdog

PIECE_BYTES = 16 << 20
# Bytes of the description of an operation that two ranks compare.
DESCRIPTION_BYTES = 512


def unique_id():
    """An identifier for all ranks: see NcclCommunicator. The process that makes it must outlive their start."""
    from cupy.cuda import nccl

    return nccl.get_unique_id()


class NcclCommunicator(Communicator):
    """A rank among GPUs of any hosts; see Communicator.

    identifier: from unique_id, the same on all ranks. failed: called with a message when an operation does not end;
    ends the process.
    """

    def __init__(self, rank, world_size, identifier, failed, timeout_s=TIMEOUT_S, piece_bytes=PIECE_BYTES):
        super().__init__(rank, world_size, timeout_s)
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl, self._piece_bytes = cupy, nccl, -(-piece_bytes // 256) * 256
        self._connection = nccl.NcclCommunicator(world_size, identifier, rank)
        # A piece of a fold from each rank.
        self._pieces = cupy.empty((world_size, self._piece_bytes), np.uint8)
        self._flags, self._watchdog = EndFlags(), Watchdog(timeout_s, failed)

    def close(self):
        self._cupy.cuda.get_current_stream().synchronize()
        self._watchdog.close()
        self._connection.destroy()

    def _compare(self, operation, rank=None):
        if rank is None:
            others = dict(enumerate(self._all_objects(operation, tuple(operation))))
            del others[self.rank]
        else:
            text = pickle.dumps(tuple(operation)).ljust(DESCRIPTION_BYTES, b"\0")
            mine = self._cupy.asarray(np.frombuffer(text, np.uint8))
            theirs = self._cupy.empty_like(mine)
            with self._watched(operation):
                self._nccl.groupStart()
                self._send(mine, rank)
                self._receive(theirs, rank)
                self._nccl.groupEnd()
            others = {rank: pickle.loads(theirs.get().tobytes())}
        check_same(operation, self.rank, {other: Operation(*found) for other, found in others.items()})

    def _barrier(self, operation):
        self._all_objects(operation, None)

    def _objects(self, operation, value):
        return self._all_objects(operation, value)

    def _all_objects(self, operation, value):
        """The values of all ranks; the host waits for the current stream."""
        text = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._gathered(operation, np.array([text.size], np.int64)).reshape(-1)
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: text.size] = text
        found = self._gathered(operation, padded)
        return [value if rank == self.rank else pickle.loads(row.tobytes()) for rank, row in enumerate(found)]

    def _gathered(self, operation, array):
        """A NumPy array of all ranks."""
        out = self._cupy.empty((self.world_size, *array.shape), array.dtype)
        self._gather(operation, self._cupy.asarray(array), out)
        return out.get()

    def _gather(self, operation, array, out):
        with self._watched(operation):
            self._connection.allGather(
                array.data.ptr, out.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, self._stream()
            )

    def _fold(self, operation, gradient, accumulated, start, count, is_first):
        mine = FoldRange(start, accumulated.size, None if gradient is None else gradient.size)
        ranges = [FoldRange(*each) for each in self._all_objects(operation, tuple(mine))]
        check_ranges(operation, ranges)
        with self._watched(operation):
            self._exchange_pieces(ranges, gradient, accumulated, start, count, is_first)

    def _exchange_pieces(self, ranges, gradient, accumulated, start, count, is_first):
        length = self._piece_bytes // 4
        for first in range(0, max(each.size for each in ranges), length):
            target = accumulated[first : first + length]
            parts = [self._pieces[k][: 4 * target.size] for k in range(count)]
            self._nccl.groupStart()
            for other, (begin, size, _) in enumerate(ranges):
                if gradient is not None and other != self.rank and first < size:
                    part = gradient[begin + first : begin + min(first + length, size)]
                    self._send(as_bytes(part), other)
            for k in range(count):
                if k != self.rank and target.size:
                    self._receive(parts[k], k)
            self._nccl.groupEnd()
            for k in range(count if target.size else 0):
                own = gradient[start + first : start + first + target.size] if k == self.rank else None
                add_in_place(target, parts[k].view(np.float32) if own is None else own, is_first and k == 0)

    def _put(self, operation, array, rank):
        if array.size:
            with self._watched(operation):
                self._send(as_bytes(array), rank)

    def _get(self, operation, array, rank):
        if array.size:
            with self._watched(operation):
                self._receive(as_bytes(array), rank)

    def _send(self, array, rank):
        self._connection.send(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, rank, self._stream())

    def _receive(self, array, rank):
        self._connection.recv(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, rank, self._stream())

    def _stream(self):
        return self._cupy.cuda.get_current_stream().ptr

    @contextlib.contextmanager
    def _watched(self, operation):
        """Watch an operation from its first call on: NCCL connects two ranks when they first meet, and waits for it."""
        stream = self._cupy.cuda.get_current_stream()
        # A captured operation has no end of its own.
        if stream.is_capturing():
            yield
            return
        ending = OperationEnd()
        self._watchdog.watch(operation, ending)
        yield
        ending.flag = self._flags.record(stream)
