"""Tile scheduler of the GEMM kernels: which tile of C a block computes."""

import numpy as np

from rlnumba.kernels.ptx.warp import device_function, udiv

i32 = np.int32

# Tiles of C are visited in bands of this many tile rows, column by column: the rows of A of a band stay in L2.
# H200, 8192^3 bfloat16: 803 TFLOP/s, and 692 with 8.
BAND = 16


@device_function
def tile_coordinates(index, tiles_down, tiles_across):
    """(row, column) of the index-th tile: bands of BAND tile rows, down the columns of a band first."""
    band = udiv(index, i32(BAND) * tiles_across)
    first = i32(band * i32(BAND))
    height = min(i32(tiles_down - first), i32(BAND))
    within = i32(index - first * tiles_across)
    column = udiv(within, height)
    return i32(first + within - column * height), column
