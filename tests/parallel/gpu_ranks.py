"""What ranks on GPUs do in the tests; imported by their processes."""

import time
from types import SimpleNamespace

import numpy as np

from rlnumba.kernels.nn.rmsnorm import rmsnorm
from rlnumba.model.shard import Columns, vocabulary
from rlnumba.runtime import device
from rlnumba.runtime.launch import pdl_scope
from tests.parallel import ranks


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


def check_norms(communicator):
    """The norm of gathered rows has the bits of gather and norm: twenty times both in a graph with PDL."""
    import cupy

    columns, eps = Columns.equal(4096, communicator.world_size), 1e-6
    stream, rng = cupy.cuda.Stream(non_blocking=True), np.random.default_rng(0)
    for rows, dtype in [(1, "bfloat16"), (64, "bfloat16"), (200, "float16"), (2, "float32")]:
        x, weight = (rng.standard_normal(shape).astype(device.DTYPES[dtype]) for shape in ((rows, 4096), 4096))
        with stream:
            part = device.asarray(np.ascontiguousarray(x[:, columns.of(communicator.rank)]))
            weight, rstd = device.asarray(weight), cupy.empty(rows, np.float32)
            whole, apart, found = (cupy.empty(x.shape, part.dtype) for _ in range(3))
            for captures in (False, True):
                stream.synchronize()
                communicator.barrier()
                if captures:
                    stream.begin_capture()
                with pdl_scope():
                    for _ in range(20):
                        assert communicator.gather_rmsnorm(part, weight, eps, found)
                        communicator.gather_columns(part, whole, columns)
                        rmsnorm(whole, weight, eps, apart, rstd)
            graph = stream.end_capture()
            for _ in range(10):
                graph.launch(stream)
            ranks.same_bits(device.to_host(whole), x)
            ranks.same_bits(device.to_host(found), device.to_host(apart))
    many = cupy.empty((1025, columns.width), np.float32)
    assert not communicator.gather_rmsnorm(many, weight, eps, cupy.empty((1025, 4096), np.float32))
    communicator.check()
    return True


def check_many(communicator, count):
    """Gathers of integers and floats, a hundred of each a graph, that change each time; ranks pause at random."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    rng, columns = np.random.default_rng(rank), Columns.equal(32 * world_size, world_size)
    source, floats = cupy.full(33, rank, np.int32), cupy.full((3, 32), rank, np.float32)
    out, wrong = cupy.empty((world_size, 33), np.int32), cupy.zeros(1, np.int64)
    expected = cupy.arange(world_size, dtype=np.int32)[:, None] + cupy.zeros((world_size, 33), np.int32)
    out_floats = cupy.empty((3, columns.total), np.float32)
    expected_floats = cupy.zeros_like(out_floats) + cupy.arange(world_size, dtype=np.float32).repeat(32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:

        def step():
            # Floats count exactly up to 2^24.
            for array in (source, expected, floats, expected_floats):
                cupy.add(array, array.dtype.type(7), out=array)
            communicator.gather(source, out)
            communicator.gather_columns(floats, out_floats, columns)
            cupy.add(wrong, different(out, expected), out=wrong)
            cupy.add(wrong, different(out_floats, expected_floats), out=wrong)

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

    from rlnumba.parallel.transports.peer import PeerArena, PeerCommunicator
    from rlnumba.runtime import device

    # Until now this is a rank of the cpu device.
    device.replace("cuda")
    device.use_gpu(gpus[control.rank])
    for first in (2**32 - 3, 2**31 - 3):
        arena = PeerArena(control, piece_bytes=1024, small_bytes=4096, first=first, epoch=first, pull_bytes=1024)
        communicator = PeerCommunicator(control, arena, print, first)
        for seed in range(10):
            ranks.check_gather(communicator, seed, (400,), np.uint8, cupy)
            ranks.check_gather(communicator, seed, (5000,), np.uint8, cupy)
            ranks.check_fold(communicator, seed, 3000, communicator.world_size, False, cupy)
            ranks.check_pair(communicator, seed, (5000,), np.uint8, cupy)
        communicator.barrier()
        communicator.check()
    return True


def check_late_gradients(communicator):
    """Folds in a row of shared gradients that are written at the last moment, and overwritten at once after them.

    The host is far ahead of the GPU, and only signals between the streams keep the order. Ranks are late in turn.
    """
    import cupy

    world_size, rank, size, rounds = communicator.world_size, communicator.rank, 6_000_001, 8
    shared = communicator.share_gradients(lambda: SimpleNamespace(flat=cupy.zeros(size, np.float32)))
    part = -(-size // world_size)
    start = min(rank * part, size)
    stop = min(start + part, size)
    sums = [cupy.zeros(stop - start, np.float32) for _ in range(2)]
    busy = cupy.ones((64 << 20) // 4, np.float32)
    assert communicator._memory.gradients.place_of(shared.flat) is not None
    gradients = cupy.asarray(np.stack([ranks.gradient_of(k, 0, size) for k in range(rounds)]))
    # Of this rank alone: a factor that has no rounding.
    gradients *= np.float32(2.0**rank)
    cupy.cuda.Device().synchronize()
    communicator.barrier()
    for k in range(rounds):
        # The last round has fewer micro-batches than ranks.
        count = world_size if k + 1 < rounds else world_size - 1
        for _ in range(200 if k % world_size == rank else 0):
            cupy.multiply(busy, 1.0, out=busy)
        shared.flat[...] = gradients[k]
        finish = communicator.begin_fold(shared.flat, sums[0], start, count, k == 0)
        # As the next forward.
        cupy.multiply(busy, 1.0, out=busy)
        finish()
        shared.flat.fill(np.nan)
    # The same without shared memory.
    for k in range(rounds):
        count = world_size if k + 1 < rounds else world_size - 1
        communicator.fold(gradients[k], sums[1], start, count, k == 0)
    pulled, pushed = (each.get() for each in sums)
    expected = ranks.gradient_of(0, 0, size)[start:stop]
    for k in range(rounds):
        own = ranks.gradient_of(k, 0, size)[start:stop]
        count = world_size if k + 1 < rounds else world_size - 1
        expected = ranks.folded(expected, [own * np.float32(2.0**r) for r in range(count)], 0, k == 0, True)
    ranks.same_bits(pulled, pushed)
    ranks.same_bits(pulled, expected)
    communicator.barrier()
    communicator.check()
    return True


def shared_folds(communicator):
    """Folds of shared gradients, for faults; the host waits at the end of each round."""
    import cupy

    shared = communicator.share_gradients(lambda: SimpleNamespace(flat=cupy.ones(5_000_000, np.float32)))
    accumulated = cupy.zeros(5_000_000, np.float32)
    for _ in range(3):
        communicator.fold(shared.flat, accumulated, 0, communicator.world_size, True)
        communicator.barrier()


def stuck_before_a_fold(communicator):
    """The last rank's second gradient is not complete within the time limit: its stream waits, and hosts in a copy."""
    import cupy
    from cuda.bindings import driver

    shared = communicator.share_gradients(lambda: SimpleNamespace(flat=cupy.ones(5_000_000, np.float32)))
    never, accumulated = cupy.zeros(1, np.uint32), cupy.empty(5_000_000, np.float32)
    cupy.cuda.Device().synchronize()
    communicator.fold(shared.flat, accumulated, 0, communicator.world_size, True)
    if communicator.rank == communicator.world_size - 1:
        flag = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        driver.cuStreamWaitValue32(cupy.cuda.get_current_stream().ptr, never.data.ptr, 1, flag)
    communicator.fold(shared.flat, accumulated, 0, communicator.world_size, True)
    accumulated.get()


def one_of_each(communicator):
    """Operations for faults; the host waits at the end of each round."""
    import cupy

    world_size, rank = communicator.world_size, communicator.rank
    for _ in range(3):
        communicator.gather(cupy.full(3, rank, np.int32), cupy.empty((world_size, 3), np.int32))
        communicator.fold(cupy.ones(5, np.float32), cupy.empty(5, np.float32), 0, world_size, True)
        communicator.barrier()
