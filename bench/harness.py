"""Timing on a GPU: medians after a warm-up, short kernels as a CUDA graph of many launches, copy bandwidth."""

import functools
import statistics

import cupy
import numpy as np

from rlnumba.runtime import device


def random_array(*shape, dtype="bfloat16", scale=1.0):
    """Normal values on the GPU: GEMMs of zeros draw less power and run faster than those of real data."""
    values = cupy.random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    return values.astype(device.dtype(dtype))


def rows_of(array, rows):
    """array[rows] of a 16-bit array, which CuPy indexes as integers."""
    return array.view(np.uint16)[rows].view(array.dtype)


def time_us(function, repeats=9):
    """Median microseconds of one call, by events around several calls in a row.

    The calls take 2 ms or more together, so that the host's time for the first launch does not count.
    """

    def lap(calls):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls

    calls = 1 + int(2000 / min(lap(1) for _ in range(3)))
    return statistics.median(lap(calls) for _ in range(repeats))


def alternating_times_us(first, second, rounds=4):
    """(time_us of the first, of the second), timed alternately, so that both meet the clocks of the power limit."""
    times = [(time_us(first, 3), time_us(second, 3)) for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def torch_time_us(function, repeats=9):
    """time_us of what torch launches on its own stream. torch must be installed."""
    import torch

    def lap(calls):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    calls = 1 + int(2000 / min(lap(1) for _ in range(3)))
    return statistics.median(lap(calls) for _ in range(repeats))


def graph_time_us(functions, repeats=5):
    """Median microseconds a call, of several calls captured in one CUDA graph and replayed.

    functions: calls on different data, together larger than L2 where that matters.
    """
    # A non-blocking stream does not wait for work on the default stream, which still fills arrays.
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for function in functions:
            function()
        stream.synchronize()
        stream.begin_capture()
        for function in functions:
            function()
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        return time_us(graph.launch, repeats) / len(functions)


def copy_gbs(nbytes=2 << 30):
    """Bytes read and written a nanosecond by a device-to-device copy: the upper bound of memory-bound kernels.

    The best of three medians: on a GPU that was idle before they differ by 2 %.
    """
    source, target = cupy.zeros(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
    return 2 * nbytes / min(time_us(lambda: cupy.copyto(target, source)) for _ in range(3)) / 1e3


@functools.cache
def copy_us(nbytes, sets):
    """Microseconds of a copy that reads and writes nbytes in all, in a graph of `sets` such copies."""
    halves = [[cupy.ones(nbytes // 2, np.uint8) for _ in range(2)] for _ in range(sets)]
    return graph_time_us([lambda a=a, b=b: cupy.copyto(b, a) for a, b in halves])


def relative_error(actual, expected):
    """|actual - expected| / |expected|, Euclidean, in float64 on the GPU."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(cupy.linalg.norm(actual - expected) / cupy.linalg.norm(expected))


def geometric_mean(values):
    return float(np.exp(np.mean(np.log(values))))
