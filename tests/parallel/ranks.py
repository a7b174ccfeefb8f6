"""What ranks do in the tests of this folder, and what NumPy makes of the same arrays; imports little."""

import os
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from rlnumba.errors import ConfigError, SharedError
from rlnumba.model.shard import Columns, vocabulary
from rlnumba.parallel.communicator import Fault, Operation

# Small, so that small arrays have several pieces, and a multiple of 64 R for R <= 4.
PIECE_BYTES = 768
DTYPES = (np.float32, np.int64, np.uint8, ml_dtypes.bfloat16)


def array_of(seed, rank, shape, dtype):
    """The array that a rank offers: any bytes."""
    rng = np.random.default_rng([seed, rank])
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def gradient_of(seed, rank, size):
    """Float32 of many magnitudes, so that the order of additions shows, and with subnormal numbers."""
    rng = np.random.default_rng([seed, rank])
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)
    values[::7] = rng.standard_normal(len(values[::7])) * 1e-40
    return values.astype(np.float32)


def flushed(values):
    """Subnormal numbers as 0 with their sign, as a GPU adds gradients."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0.0), values), values)


def folded(before, gradients, start, is_first, flush=False):
    """What fold writes, from complete gradients."""
    result = np.array(before)
    for k, gradient in enumerate(gradients):
        part = gradient[start : start + len(before)]
        if is_first and k == 0:
            result = part.copy()
        else:
            result = flushed(flushed(result) + flushed(part)) if flush else result + part
    return result


def ranges_of(seed, world_size, parameters):
    """(start, size) of each rank: parts of any size that may overlap or be empty."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, parameters + 1, world_size)
    return [(int(start), int(rng.integers(0, parameters - start + 1))) for start in starts]


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def check_gather(communicator, seed, shape, dtype, xp=np):
    world_size, rank = communicator.world_size, communicator.rank
    own = xp.asarray(array_of(seed, rank, shape, np.uint8 if xp is not np else dtype))
    out = xp.empty((world_size, *shape), own.dtype)
    communicator.gather(own, out)
    expected = np.stack([array_of(seed, r, shape, own.dtype) for r in range(world_size)])
    same_bits(out if xp is np else out.get(), expected)


def check_columns(communicator, seed, rows, columns, dtype, xp=np):
    """Each rank has its columns (model.shard.Columns) of a matrix."""
    expected = array_of(seed, 0, (rows, columns.total), dtype)
    # CuPy has no bfloat16 of its own.
    expected = expected if xp is np or dtype != ml_dtypes.bfloat16 else expected.view(np.uint16)
    out = xp.empty(expected.shape, expected.dtype)
    own = xp.asarray(np.ascontiguousarray(expected[:, columns.of(communicator.rank)]))
    communicator.gather_columns(own, out, columns)
    same_bits(out if xp is np else out.get(), expected)
    # The same rows, each of which one rank has then.
    row_width = -(-rows // communicator.world_size)
    first = min(communicator.rank * row_width, rows)
    out = out[first : first + row_width].copy()
    out[...] = 0
    communicator.exchange_rows(own, out, columns, row_width)
    same_bits(out if xp is np else out.get(), expected[first : first + row_width])


def check_fold(communicator, seed, parameters, count, is_first, xp=np):
    """Of gradients anywhere, and of shared ones; sometimes rank 0 has another one than the shared."""
    for shares in (False, seed % 4 != 3 or communicator.rank > 0):
        shared = communicator.share_gradients(lambda: SimpleNamespace(flat=xp.zeros(parameters + 3, np.float32)))
        _check_fold(communicator, seed, parameters, count, is_first, xp, shared.flat[3:] if shares else None)


def _check_fold(communicator, seed, parameters, count, is_first, xp, shared):
    world_size, rank = communicator.world_size, communicator.rank
    gradients = [gradient_of(seed, k, parameters) for k in range(count)]
    start, size = ranges_of(seed, world_size, parameters)[rank]
    before = gradient_of(seed, 100 + rank, size)
    accumulated = xp.asarray(before.copy())
    # What ranks >= count offer is not read.
    own = gradients[rank] if rank < count else np.full(parameters, np.nan, np.float32)
    offered = xp.array(own) if rank < count or seed % 2 else None
    if shared is not None and offered is not None:
        shared[...] = offered
        offered = shared
    finish = communicator.begin_fold(offered, accumulated, start, count, is_first)
    # As the next forward, with a loss whose denominator the ranks exchange.
    assert len(set(communicator.objects(seed))) == 1
    finish()
    if offered is not None:
        # As the next micro-batch's backward, at once.
        offered[...] = np.nan
    same_bits(accumulated if xp is np else accumulated.get(), folded(before, gradients, start, is_first, xp is not np))


def check_pair(communicator, seed, shape, dtype, xp=np):
    """Rank a puts to rank b; which ones they are depends on the seed."""
    world_size, rank = communicator.world_size, communicator.rank
    if world_size == 1:
        return
    source, target = (int(r) for r in np.random.default_rng(seed).permutation(world_size)[:2])
    array = array_of(seed, source, shape, np.uint8 if xp is not np else dtype)
    if rank == source:
        communicator.put(xp.asarray(array), target)
    elif rank == target:
        got = xp.empty(shape, array.dtype)
        communicator.get(got, source)
        same_bits(got if xp is np else got.get(), array)


def check_objects(communicator, seed):
    def value(rank):
        return {"rank": rank, "text": "x" * (seed % 5 * 5000 * rank)}

    assert communicator.objects(value(communicator.rank)) == [value(r) for r in range(communicator.world_size)]


def check_all_operations(communicator, xp=np, elements=PIECE_BYTES):
    """Every operation against NumPy, at sizes around a piece, then 40 operations drawn at random. Returns how many."""
    whole = elements
    done = 0
    for size in (0, 1, whole - 1, whole, whole + 1, 2 * whole, 5 * whole + 3):
        for dtype in DTYPES if xp is np else (np.uint8,):
            check_gather(communicator, size, (size,), dtype, xp)
            check_pair(communicator, size, (size,), dtype, xp)
            done += 2
    for rows, total in ((1, 1), (3, 256), (7, 1100), (100, 512), (0, 64)):
        for dtype in (np.float32, ml_dtypes.bfloat16, np.uint8):
            check_columns(communicator, total, rows, vocabulary(total, communicator.world_size), dtype, xp)
            equal = Columns.equal(total * communicator.world_size, communicator.world_size)
            check_columns(communicator, rows, rows, equal, dtype, xp)
            done += 2
    part = whole // 4 // communicator.world_size
    for parameters in (1, part - 1, part, part + 1, 7 * part + 3):
        for count in range(1, communicator.world_size + 1):
            check_fold(communicator, parameters, parameters, count, count % 2 == 0, xp)
            check_fold(communicator, parameters + 1, parameters, count, count % 2 == 1, xp)
            done += 2
    check_gather(communicator, 5, (), np.float32, xp)
    rng = np.random.default_rng(communicator.world_size)
    for seed in range(40):
        size = int(rng.integers(1, 3 * whole))
        kind = rng.integers(5)
        if kind == 0:
            check_gather(communicator, seed, (2, size), DTYPES[seed % 4], xp)
        elif kind == 1:
            check_pair(communicator, seed, (size, 1, 2), DTYPES[seed % 4], xp)
        elif kind == 2:
            count = int(rng.integers(1, communicator.world_size + 1))
            check_fold(communicator, seed, size, count, bool(rng.integers(2)), xp)
        elif kind == 3:
            check_objects(communicator, seed)
        else:
            communicator.barrier()
        done += 1
    return done


def one_of_each(communicator, times=3):
    """Every operation a few times, for faults."""
    world_size, rank = communicator.world_size, communicator.rank
    for _ in range(times):
        communicator.gather(np.full(3, rank, np.int32), np.empty((world_size, 3), np.int32))
        communicator.fold(np.ones(5, np.float32), np.empty(5, np.float32), 0, world_size, True)
        communicator.barrier()
        communicator.objects(rank)
        # A ring: even ranks put first, so that no two wait for each other.
        for kind in ("put", "get") if rank % 2 == 0 else ("get", "put"):
            if kind == "put":
                communicator.put(np.ones(4), (rank + 1) % world_size)
            else:
                communicator.get(np.empty(4), (rank - 1) % world_size)


def set_fault(communicator, fault):
    """What RLNUMBA_FAULT does; a rank that is forked has the environment of another process."""
    os.environ["RLNUMBA_FAULT"] = fault
    communicator._fault = Fault.from_environment(communicator.world_size)


def process_and_operations(communicator, path, timeout_s, fault):
    """Note this process's id in a file, then do one_of_each with what RLNUMBA_FAULT would say.

    The time limit holds once all ranks are there, which takes as long as the machine is busy.
    """
    set_fault(communicator, fault)
    (path / f"{communicator.rank}.pid").write_text(str(os.getpid()))
    communicator.exchange(Operation("start", 0, ""))
    communicator.timeout_s = timeout_s
    one_of_each(communicator)


def corrupted(communicator, fault):
    """What one gather and one fold give with a fault."""
    set_fault(communicator, fault)
    world_size, rank = communicator.world_size, communicator.rank
    out, accumulated = np.empty((world_size, 2), np.uint8), np.empty(2, np.float32)
    communicator.gather(np.zeros(2, np.uint8), out)
    communicator.fold(np.zeros(2, np.float32), accumulated, 0, world_size, True)
    return rank, out.tolist(), accumulated.tolist()


def different(communicator, case):
    """Ranks that do not do the same: each case ends in an error."""
    world_size, rank = communicator.world_size, communicator.rank
    own = np.zeros(3, np.float32)
    if case == "operation":
        communicator.barrier() if rank else communicator.objects(1)
    elif case == "dtype":
        own = own.astype(np.int32 if rank else np.float32)
        communicator.gather(own, np.empty((world_size, 3), own.dtype))
    elif case == "shape":
        own = np.zeros(4 if rank else 3, np.float32)
        communicator.gather(own, np.empty((world_size, *own.shape), own.dtype))
    elif case == "count":
        communicator.fold(own, own.copy(), 0, 1 + rank, True)
    elif case == "length":
        communicator.fold(np.zeros(3 + rank, np.float32), own, 0, 2, True)
    elif case == "part":
        communicator.fold(own, np.zeros(3, np.float32), rank, 2, True)
    elif case == "sequence":
        if rank:
            communicator.barrier()
        communicator.gather(own, np.empty((world_size, 3), np.float32))
    elif case == "pair":
        communicator.put(own, 1 - rank) if rank else communicator.get(np.zeros(2, np.float32), 1)


def fail(communicator, rank, kind):
    """One rank fails while the others wait for it; kind "shared": all of them in the same place."""
    if kind == "shared":
        raise SharedError("reward bad raised KeyError: 'missing'")
    if communicator.rank == rank:
        if kind == "no file":
            open("/no/such/file")
        if kind == "user":
            raise ConfigError("train.seed: must be an integer")
        if kind == "bug":
            raise KeyError("missing")
        if kind == "exit":
            os._exit(7)
        if kind == "system exit":
            raise SystemExit(3)
    communicator.barrier()


def members_of_group(communicator, name, kind):
    """The group's name and its ranks; kind "stall": it never ends, "fail": its second rank fails."""
    if kind == "stall":
        time.sleep(600)
    if kind == "fail" and communicator.rank == 1:
        raise ConfigError("train.seed: must be an integer")
    return name, communicator.objects(communicator.rank)


def shout(communicator):
    """Lines of output; the last one of ranks with a prefix has no end."""
    for _ in range(2):
        print(f"line of {communicator.rank}")
    communicator.barrier()
    print(f"end of {communicator.rank}", end="" if communicator.rank else "\n")
    return communicator.rank


def wait_for_signal(communicator, path):
    """Note this process's id, then wait for a signal, longer than the tests do for what follows from it."""
    (path / f"{communicator.rank}.pid").write_text(str(os.getpid()))
    communicator.barrier()
    time.sleep(600)


def one_obeys_signals(communicator, path):
    """Rank 1 ends at a signal, as a rank does; the others hold it for ever, as in a call that does not return."""
    from rlnumba.runtime import signals

    if communicator.rank != 1:
        signals.hold()
    wait_for_signal(communicator, path)


def stop_together(communicator, path):
    """Steps until a signal arrives; notes in a file how many there were."""
    from rlnumba.parallel.launch import stop_requested
    from rlnumba.runtime import signals

    signals.hold()
    steps = 0
    (path / f"{communicator.rank}.pid").write_text(str(os.getpid()))
    while not stop_requested(communicator):
        time.sleep(0.01 * communicator.rank)
        steps += 1
    (path / f"{communicator.rank}.steps").write_text(str(steps))


def ignore_signals(communicator, path):
    """Hold signals, and note in a file that the first one has arrived."""
    from rlnumba.runtime import signals

    signals.hold()
    (path / f"{communicator.rank}.pid").write_text(str(os.getpid()))
    communicator.barrier()
    while signals.received() is None:
        time.sleep(0.01)
    (path / f"{communicator.rank}.signal").touch()
    time.sleep(600)
