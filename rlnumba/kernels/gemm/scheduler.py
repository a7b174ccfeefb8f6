"""Tile scheduler of the GEMM kernels: which tile of C a block computes, and how many SMs there are."""

import functools

import numpy as np

from rlnumba.kernels.ptx.warp import device_function
from rlnumba.runtime import device

i32 = np.int32

# Tiles of C are visited in bands of this many tile rows, column by column: the rows of A of a band stay in L2.
# H200, 8192^3 bfloat16: 803 TFLOP/s, and 692 with 8.
BAND = 16


@device_function
def udiv(number, by):
    """The quotient of int32 numbers, not negative: unsigned ones are divided in 32 bits, without a branch."""
    return i32(np.uint32(number) // np.uint32(by))


@device_function
def tile_coordinates(index, tiles_down, tiles_across):
    """(row, column) of the index-th tile: bands of BAND tile rows, down the columns of a band first."""
    band = udiv(index, i32(BAND) * tiles_across)
    first = i32(band * i32(BAND))
    height = min(i32(tiles_down - first), i32(BAND))
    within = i32(index - first * tiles_across)
    column = udiv(within, height)
    return i32(first + within - column * height), column


@functools.cache
def sm_count():
    """How many SMs the GPU has; 1 in the simulator."""
    if device.name() != "cuda":
        return 1
    import cupy

    return cupy.cuda.Device().attributes["MultiProcessorCount"]
