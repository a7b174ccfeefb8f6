"""Host time of a launch: a kernel of four arrays, through launch() and through Numba's own path.

    python bench/kernels/launch.py

The kernel is empty, and the host does not synchronise, so this is the time of Python and the driver. Bar: 7 us.
"""

import time

import cupy
import numpy as np

from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

LAUNCHES, REPEATS = 1000, 20


@cuda.jit
def nothing_kernel(a, b, c, d, count):
    """Four arrays and a scalar, as many as rmsnorm or swiglu have."""


def host_us(start):
    """The least of REPEATS means over LAUNCHES calls, each with an empty GPU queue at its start."""
    start()
    means = []
    for _ in range(REPEATS):
        cupy.cuda.runtime.deviceSynchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            start()
        means.append((time.perf_counter() - begin) / LAUNCHES * 1e6)
    cupy.cuda.runtime.deviceSynchronize()
    return min(means)


def main():
    arrays = [cupy.zeros((64, 128), np.float32) for _ in range(4)]
    count = np.int32(1)
    ours = host_us(lambda: launch(nothing_kernel, 1, 32, *arrays, count))
    numba = host_us(lambda: nothing_kernel[1, 32](*arrays, count))
    print("| launch, four arrays and a scalar | us of host time | bar |")
    print("| --- | --- | --- |")
    print(f"| rlnumba.runtime.launch | {ours:.1f} | 7 |")
    print(f"| kernel[grid, block], Numba's own | {numba:.1f} | |")


if __name__ == "__main__":
    main()
