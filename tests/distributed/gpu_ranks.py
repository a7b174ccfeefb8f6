"""What ranks on GPUs do in the tests; imported by their processes."""

import time

import numpy as np

from rlnumba.model.shard import vocabulary
from tests.distributed import ranks


def check_all(communicator):
    """Small arrays, and some of more than a piece, which is 8 or 16 MiB."""
    import cupy

    done = ranks.check_all_operations(communicator, cupy)
    for seed, size in enumerate((1 << 20, (8 << 20) + 5, 40_000_003)):
        ranks.check_gather(communicator, seed, (size,), np.uint8, cupy)
        ranks.check_pair(communicator, seed, (size,), np.uint8, cupy)
    # A few MiB a rank, so several launches of the kernel.
    ranks.check_columns(communicator, 1, 500, vocabulary(5000, communicator.world_size), np.float32, cupy)
    for count in range(1, communicator.world_size + 1):
        ranks.check_fold(communicator, count, 9_000_001, count, count % 2 == 0, cupy)
    communicator.barrier()
    communicator.check()
    return done


def check_graph(communicator):
    """16 KiB a rank, ten times in a graph that is replayed with other values."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    source = cupy.zeros(4096, np.int32)
    outs = [cupy.empty((world_size, 4096), np.int32) for _ in range(10)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        communicator.gather(source, outs[0])
        stream.synchronize()
        communicator.barrier()
        stream.begin_capture()
        for out in outs:
            communicator.gather(source, out)
        graph = stream.end_capture()
        for seed in range(50):
            source.set(ranks.array_of(seed, rank, (4096,), np.int32), stream)
            graph.launch(stream)
            stream.synchronize()
            expected = np.stack([ranks.array_of(seed, r, (4096,), np.int32) for r in range(world_size)])
            for out in outs:
                np.testing.assert_array_equal(out.get(stream), expected)
    communicator.check()
    return True


def check_many(communicator, count):
    """Gathers whose values change each time, a hundred a graph; ranks pause at random."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    rng = np.random.default_rng(rank)
    source = cupy.full(33, rank, np.int32)
    out, wrong = cupy.empty((world_size, 33), np.int32), cupy.zeros(1, np.int64)
    expected = cupy.arange(world_size, dtype=np.int32)[:, None] + cupy.zeros((world_size, 33), np.int32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:

        def step():
            cupy.add(source, 7, out=source)
            cupy.add(expected, 7, out=expected)
            communicator.gather(source, out)
            cupy.add(wrong, different(out, expected), out=wrong)

        different = cupy.ReductionKernel("T x, T y", "int64 z", "x != y", "a + b", "z = a", "0", "count_different")
        step()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(100):
            step()
        graph = stream.end_capture()
        for _ in range(count // 100):
            graph.launch(stream)
            if rng.integers(20) == 0:
                time.sleep(rng.random() * 2e-3)
        stream.synchronize()
    communicator.check()
    return int(wrong.get(stream)[0]) == 0


def check_wrap(control, gpus):
    """Counters and epochs from 2^32 - 3 and 2^31 - 3, with pieces of 1 KiB."""
    import cupy

    from rlnumba.distributed.peer import Arena, PeerCommunicator
    from rlnumba.runtime import device

    # Until now this is a rank of the cpu device.
    device.replace("cuda")
    device.use_gpu(gpus[control.rank])
    for first in (2**32 - 3, 2**31 - 3):
        arena = Arena(control, piece_bytes=1024, small_bytes=4096, first=first, epoch=first)
        communicator = PeerCommunicator(control, arena, print, first)
        for seed in range(10):
            ranks.check_gather(communicator, seed, (400,), np.uint8, cupy)
            ranks.check_gather(communicator, seed, (5000,), np.uint8, cupy)
            ranks.check_fold(communicator, seed, 3000, communicator.world_size, False, cupy)
            ranks.check_pair(communicator, seed, (5000,), np.uint8, cupy)
        communicator.barrier()
        communicator.check()
    return True


def one_of_each(communicator):
    """Operations for faults; the host waits at the end of each round."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    for _ in range(3):
        communicator.gather(cupy.full(3, rank, np.int32), cupy.empty((world_size, 3), np.int32))
        communicator.fold(cupy.ones(5, np.float32), cupy.empty(5, np.float32), 0, world_size, True)
        communicator.barrier()
