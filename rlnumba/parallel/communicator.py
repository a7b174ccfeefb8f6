"""Operations that the ranks of a run do together, their checks, and faults for tests.

    gather(array, out)       out[r] = rank r's array, on every rank
    gather_columns(...)      the columns of out that rank r has = its array, on every rank
    exchange_rows(...)       the same, but each rank has some of the rows alone
    fold(gradient, ...)      accumulated += gradient_0, += gradient_1, ..., each rank for its part of the parameters
    share_gradients(make)    gradients that fold moves faster, where ranks can read each other's memory
    put, get                 an array from one rank to another
    barrier()                returns when all ranks have called it, and all earlier operations are complete
    objects(value)           [value of rank 0, value of rank 1, ...]
    meet_after_error(value)  as objects, once a rank has failed, from whatever operation each rank is in

Every rank calls the same operations in the same order, from one thread at a time. put waits for its get, or may wait
for it: two ranks that exchange arrays put and get in opposite orders.

The result of an operation does not depend on timing, and not on the transport: bytes are copied, and the only
arithmetic, the additions of fold, is done by one rank in the order of the ranks, one float32 addition each. Sums of a
library such as NCCL have an order that depends on the size, the number of GPUs and the version.

| transport | between                | module                                                         |
| --------- | ---------------------- | -------------------------------------------------------------- |
| -         | one rank               | SingleRank                                                     |
| shm       | processes on CPUs      | shared_memory.py: NumPy arrays; the host waits                 |
| tcp       | CPUs of several hosts  | tcp.py: as shm                                                 |
| peer      | GPUs of one host       | peer.py: CuPy arrays; on the current stream, for which the host does not wait |
| nccl      | GPUs of several hosts  | nccl.py: as peer                                               |

Operations are numbered: gather (of columns and rows, too), fold, barrier and objects together, put and get for each
pair of ranks. A message names operation and number. With RLNUMBA_DEBUG=1 all transports compare operation, number,
dtype and shape between the ranks before anything is moved; shm and tcp always do.

No operation, but named like one where faults are caused: `save`, a rank's writing of its part of a checkpoint
(saving.py), in a thread of its own, for which ranks wait by means of files.

RLNUMBA_FAULT=OPERATION:N:KIND[:RANK] causes a fault in the Nth call (from 0) of an operation on one rank, by default
the last: `kill` ends the process, `stall` never returns, `corrupt` changes one bit of what the rank offers.
"""

import os
import signal
import time
from typing import NamedTuple

import numpy as np

from rlnumba.errors import CommunicationError, ConfigError
from rlnumba.runtime import device

DEBUG = int(os.environ.get("RLNUMBA_DEBUG") or 0) > 0
# Seconds that a rank waits for the others: prime-rl's default of dist_timeout_seconds.
TIMEOUT_S = 600.0
OPERATIONS = ("gather", "fold", "put", "get", "barrier", "objects")
# Operations in which a fault can be caused that ends or stalls a rank.
INTERRUPTED = (*OPERATIONS, "save")
OFFERING = ("gather", "fold", "put")
FAULTS = ("kill", "stall", "corrupt")


class Operation(NamedTuple):
    """One call. sequence: its number; what: dtype and shape of its arrays, equal on all ranks that take part."""

    name: str
    sequence: int
    what: str

    def __str__(self):
        return f"{self.name} {self.sequence}" + (f" of {self.what}" if self.what else "")


class Communicator:
    """The interface; a transport implements the methods with an underscore, whose arguments are checked.

    rank: that of this process, in [0, world_size). timeout_s: seconds after which an operation fails that another rank
    does not join.
    """

    # A Communicator of this rank and its neighbours, where `launch` made groups of ranks.
    group = None

    def __init__(self, rank, world_size, timeout_s=TIMEOUT_S):
        if not 0 <= rank < world_size:
            raise ValueError(f"communicator: rank must be in [0, {world_size}), got {rank}")
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._fault = Fault.from_environment(world_size)
        # Calls of each operation, and the numbers of operations of all ranks and with each rank, so far.
        self._calls, self._sequence, self._pair_sequences = dict.fromkeys(INTERRUPTED, 0), 0, [0] * world_size

    def gather(self, array, out):
        """out[r] = rank r's array, on every rank.

        array: C-contiguous, of any dtype, the same shape and dtype on all ranks; may be out[rank]. out: (world_size,
        *array.shape) of that dtype, written. Raises ValueError for other arrays, CommunicationError where ranks do not
        meet.
        """
        _check_contiguous("gather", array=array, out=out)
        wanted = (self.world_size, *array.shape)
        if out.shape != wanted or out.dtype != array.dtype:
            raise ValueError(f"gather: out must be {wanted} {array.dtype}, got {out.shape} {out.dtype}")
        operation, array = self._begin("gather", _describe(array), array)
        if array.size:
            self._gather(operation, array, out)

    def gather_columns(self, array, out, columns):
        """out[:, columns.of(r)] = rank r's array, on every rank; between GPUs CUDA graphs may capture it.

        array (N, C), C-contiguous, of any dtype, of as many columns as `columns`, a model.shard.Columns, gives this
        rank; out (N, columns.total) of that dtype, written. Raises as gather.
        """
        _check_contiguous("gather", array=array, out=out)
        own = columns.of(self.rank)
        wanted = len(array), own.stop - own.start
        if array.shape != wanted or out.shape != (len(array), columns.total) or out.dtype != array.dtype:
            arrays = f"{array.shape} and {out.shape} {out.dtype}"
            raise ValueError(f"gather: {columns} of {len(array)} rows, {array.dtype}, got {arrays}")
        operation, array = self._begin("gather", f"{out.dtype} {tuple(out.shape)} by columns", array)
        if out.size:
            self._gather_columns(operation, array, out, columns)

    def gather_rmsnorm(self, part, weight, eps, out, unit_offset=False):
        """out (N, D) = rmsnorm of the rows that gather_columns makes of equal parts (N, D / world_size), in one kernel.

        weight (D,); all of one floating dtype; as kernels/nn/rmsnorm.py, whose bits it has. Returns whether it did: not
        where the transport has no such kernel, or none for arrays of these shapes, which is the same on all ranks.
        """
        return False

    def exchange_rows(self, array, out, columns, row_width):
        """out[:, columns.of(r)] = this rank's rows of rank r's array: those from rank row_width on, at most row_width.

        array (N, C), columns: arguments of gather_columns, whose result has the rows of all ranks; out (rows,
        columns.total) of array's dtype, written. Raises as gather.
        """
        _check_contiguous("gather", array=array, out=out)
        first = min(self.rank * row_width, len(array))
        wanted = min(first + row_width, len(array)) - first, columns.total
        own = columns.of(self.rank)
        if array.shape[1:] != (own.stop - own.start,) or out.shape != wanted or out.dtype != array.dtype:
            arrays = f"{array.shape} and {out.shape} {out.dtype}"
            raise ValueError(f"gather: {columns} of {len(array)} rows, {array.dtype}, for {wanted}, got {arrays}")
        what = f"{out.dtype} {len(array), columns.total} by columns, {row_width} rows a rank"
        operation, array = self._begin("gather", what, array)
        if len(array):
            self._exchange_rows(operation, array, out, columns, row_width)

    def fold(self, gradient, accumulated, start, count, is_first):
        """accumulated += gradient_k[start : start + n] for k = 0 .. count - 1 in this order, one float32 add each.

        gradient: (P,) float32 of this rank, C-contiguous, the same P on all ranks; not read, and may be None, on ranks
        >= count. accumulated: (n,) float32 of this rank, written; start and n differ between ranks. is_first: the first
        gradient is copied, not added. Raises ValueError for other arrays, CommunicationError where ranks do not meet.
        """
        self.begin_fold(gradient, accumulated, start, count, is_first)()

    def begin_fold(self, gradient, accumulated, start, count, is_first):
        """The first half of `fold`, returning the second: a function, to be called before another fold begins.

        In between the current stream may be given other work, such as the next forward, during which gradients move if
        the transport can do that. It must neither write `gradient` nor use `accumulated`. Raises as fold.
        """
        if not 1 <= count <= self.world_size:
            raise ValueError(f"fold: count must be in [1, {self.world_size}], got {count}")
        gradient = gradient if self.rank < count else None
        if self.rank < count and gradient is None:
            raise ValueError(f"fold: rank {self.rank} of the first {count} must offer a gradient, got None")
        arrays = {"accumulated": accumulated} | ({} if gradient is None else {"gradient": gradient})
        _check_contiguous("fold", **arrays)
        for name, array in arrays.items():
            if array.ndim != 1 or array.dtype != np.float32:
                raise ValueError(f"fold: {name} must be (any) float32, got {array.shape} {array.dtype}")
        operation, gradient = self._begin("fold", f"{count} gradients, is_first={bool(is_first)}", gradient)
        return self._begin_fold(operation, gradient, accumulated, start, count, is_first)

    def share_gradients(self, make):
        """The result of make(): gradients to be offered to `fold`, in arrays that it allocates, alike on all ranks.

        All ranks call this. If they can read such memory of one another, fold moves it faster. It is kept until
        `close`. Raises OutOfMemory.
        """
        return make()

    def put(self, array, rank):
        """Copy an array to another rank, which calls get with this rank and an array of the same dtype and shape."""
        operation, array = self._begin_pair("put", array, rank)
        self._put(operation, array, rank)

    def get(self, array, rank):
        """Fill an array with the one that another rank puts to this rank."""
        operation, array = self._begin_pair("get", array, rank)
        self._get(operation, array, rank)

    def barrier(self):
        """Return when all ranks have called it, and their earlier operations on the current stream are complete."""
        operation, _ = self._begin("barrier", "")
        self._barrier(operation)

    def objects(self, value):
        """The values of all ranks, in their order: a list; this rank's is `value` itself.

        value: what can be pickled; small.
        """
        operation, _ = self._begin("objects", "")
        return self._objects(operation, value)

    def saving(self):
        """A rank has written some of its part of a checkpoint: where faults of `save` are caused."""
        self._inject_fault(Operation("save", self._calls["save"], ""), None)

    def meet_after_error(self, value):
        """The values of all ranks, in their order, once each has called this after an error; None where none can.

        A rank that has failed ends the operations in which others wait for it: they raise a CommunicationError with its
        number, and meet it here. Operations that were under way are given up, and numbered afresh. value: small, and
        can be pickled. Raises CommunicationError where a rank has ended, or does not come.
        """
        return None

    def fail(self):
        """Let the operations of the other ranks fail, after an error of this one. No operation follows."""

    def check(self):
        """Raise CommunicationError if an operation has failed for which the host did not wait.

        To be called when the results of a step are read.
        """

    def close(self):
        """Give back memory and connections. No operation follows."""

    def _begin_afresh(self):
        """Forget the operations so far, as all other ranks do."""
        self._sequence, self._pair_sequences = 0, [0] * self.world_size

    def _begin_fold(self, *arguments):
        """Fold all at once; the second half, which is returned, does nothing."""
        self._fold(*arguments)
        return lambda: None

    def _gather_columns(self, operation, array, out, columns):
        """Gather columns as arrays as large as the largest rank's."""
        parts = [columns.of(rank) for rank in range(self.world_size)]
        largest = len(array) * max(part.stop - part.start for part in parts)
        xp = device.xp()
        sent, arrived = xp.empty(largest, array.dtype), xp.empty((self.world_size, largest), array.dtype)
        sent[: array.size] = array.reshape(-1)
        self._gather(operation, sent, arrived)
        for part, values in zip(parts, arrived, strict=True):
            shape = len(array), part.stop - part.start
            out[:, part] = values[: shape[0] * shape[1]].reshape(shape)

    def _exchange_rows(self, operation, array, out, columns, row_width):
        """Gather the columns of all rows, and copy this rank's rows."""
        whole = device.xp().empty((len(array), columns.total), array.dtype)
        self._gather_columns(operation, array, whole, columns)
        first = min(self.rank * row_width, len(array))
        out[...] = whole[first : first + len(out)]

    def _compare(self, operation, rank=None):
        """Raise CommunicationError unless all ranks, or this one and `rank`, are in this operation: for DEBUG."""
        raise NotImplementedError

    def _begin(self, name, what, array=None):
        """Count a call of all ranks: (Operation, array), the array with a changed bit if it is to be corrupted."""
        operation = Operation(name, self._sequence, what)
        self._sequence += 1
        array = self._inject_fault(operation, array)
        if DEBUG:
            self._compare(operation)
        return operation, array

    def _begin_pair(self, name, array, rank):
        if not 0 <= rank < self.world_size or rank == self.rank:
            raise ValueError(f"{name}: rank must be another one in [0, {self.world_size}), got {rank}")
        _check_contiguous(name, array=array)
        operation = Operation(name, self._pair_sequences[rank], _describe(array))
        self._pair_sequences[rank] += 1
        array = self._inject_fault(operation, array)
        if DEBUG:
            self._compare(operation, rank)
        return operation, array

    def _inject_fault(self, operation, array):
        call = self._calls[operation.name]
        self._calls[operation.name] += 1
        fault = self._fault
        if fault is None or (fault.operation, fault.call, fault.rank) != (operation.name, call, self.rank):
            return array
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while fault.kind == "stall":
            time.sleep(1)
        array = array.copy()
        as_bytes(array)[:1] ^= 1
        return array


class SingleRank(Communicator):
    """The communicator of a run of one process."""

    def __init__(self, timeout_s=TIMEOUT_S):
        super().__init__(0, 1, timeout_s)

    def _gather(self, operation, array, out):
        as_bytes(out)[...] = as_bytes(array)

    def _fold(self, operation, gradient, accumulated, start, count, is_first):
        check_ranges(operation, [FoldRange(start, accumulated.size, gradient.size)])
        add_in_place(accumulated, gradient[start : start + accumulated.size], is_first)

    def _barrier(self, operation):
        device.synchronize()

    def _objects(self, operation, value):
        return [value]

    def _compare(self, operation, rank=None):
        pass


class FoldRange(NamedTuple):
    """A rank's message in a fold: its part of the parameters, and the length of its gradient, None without one."""

    start: int
    size: int
    parameters: int | None


def check_ranges(operation, ranges):
    """Raise CommunicationError, the same on all ranks, if gradients differ in length or a part lies outside of them."""
    lengths = {each.parameters: rank for rank, each in enumerate(ranges) if each.parameters is not None}
    if len(lengths) > 1:
        ranks = ", ".join(f"{length} on rank {rank}" for length, rank in lengths.items())
        raise CommunicationError(f"{operation}: gradients differ in length: {ranks}")
    (parameters,) = lengths
    for rank, (start, size, _) in enumerate(ranges):
        if not 0 <= start <= start + size <= parameters:
            where = f"[{start}, {start + size}) of {parameters} elements"
            raise CommunicationError(f"{operation}: the part of rank {rank} lies outside of the gradient: {where}")


def check_equal(communicator, facts):
    """Raise ConfigError, the same on all ranks, unless all have the same facts: {name: value}, small."""
    found = communicator.objects(facts)
    for rank, other in enumerate(found):
        for name in found[0] | other:
            if other.get(name) != found[0].get(name):
                raise ConfigError(
                    f"rank {rank} has {name} {other.get(name)!r} and rank 0 {found[0].get(name)!r}: all ranks of a run "
                    "must have the same"
                )


def check_same(operation, rank, others):
    """Raise CommunicationError naming both, unless each of {another rank: its Operation} is that of this rank.

    put and get are counterparts.
    """
    wanted = operation._replace(name={"put": "get", "get": "put"}.get(operation.name, operation.name))
    for other, found in others.items():
        if found != wanted:
            both = sorted([(rank, operation), (other, found)])
            raise CommunicationError("; ".join(f"rank {each} is in {what}" for each, what in both))


def add_in_place(accumulated, gradient, is_first):
    """accumulated = gradient, or += gradient; float32 arrays of one length, of NumPy or on the current stream."""
    if is_first:
        as_bytes(accumulated)[...] = as_bytes(gradient)
    elif isinstance(accumulated, np.ndarray):
        np.add(accumulated, gradient, out=accumulated)
    else:
        from rlnumba.kernels.nn.elementwise import accumulate

        accumulate(gradient, accumulated)


def add_in_order(accumulated, gradients, is_first):
    """add_in_place of each of a list; is_first is about the first gradient. On a GPU two are added at a time."""
    if isinstance(accumulated, np.ndarray) or len(gradients) == 1:
        for k, gradient in enumerate(gradients):
            add_in_place(accumulated, gradient, is_first and k == 0)
        return
    from rlnumba.kernels.nn.elementwise import fold_two

    fold_two(*gradients[:2], accumulated, is_first)
    if len(gradients) > 2:
        add_in_order(accumulated, gradients[2:], False)


def as_bytes(array):
    """The memory of a C-contiguous array, as (nbytes,) uint8."""
    return array.reshape(-1).view(np.uint8)


class Fault(NamedTuple):
    """A fault for a test: in call number `call` of an operation on a rank."""

    operation: str
    call: int
    kind: str
    rank: int

    @classmethod
    def from_environment(cls, world_size):
        """The Fault that RLNUMBA_FAULT describes, or None. ConfigError for anything else."""
        text = os.environ.get("RLNUMBA_FAULT")
        if not text:
            return None
        operation, call, kind, rank = (*text.split(":"), "", "", "", "")[:4]
        rank = rank or str(world_size - 1)
        offers = operation in (INTERRUPTED if kind in ("kill", "stall") else OFFERING)
        if kind not in FAULTS or not offers or not (call.isdecimal() and rank.isdecimal()) or text.count(":") > 3:
            wanted = f"OPERATION:N:KIND[:RANK], OPERATION of {', '.join(INTERRUPTED)}, KIND of {', '.join(FAULTS)}"
            raise ConfigError(f"RLNUMBA_FAULT must be {wanted} (corrupt: {', '.join(OFFERING)}), got {text!r}")
        return cls(operation, int(call), kind, int(rank))


def _describe(array):
    return f"{array.dtype} {tuple(array.shape)}"


def _check_contiguous(op, **arrays):
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"{op}: {name} must be C-contiguous, got strides {array.strides}")
