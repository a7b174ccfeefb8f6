"""The rows that a block of an attention kernel owns, for the kernels whose blocks are not scheduled by themselves.

All blocks lie along x: y and z end at 65,535, fewer than the sequences or the tiles of rows that there may be.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import device_function, udiv
from rlnumba.runtime.device import cuda

i32 = np.int32


class BlockIndex(NamedTuple):
    """The place of a block: which tile of a sequence's `tiles`, and which of a tile's columns, such as its KV heads."""

    column: int
    sequence: int
    tile: int
    tiles: int


@device_function
def block_index(columns, cu_seqlens):
    """This block's BlockIndex. Columns come first, then sequences: the first tiles of all begin before the second."""
    together = i32(columns * i32(cu_seqlens.shape[0] - 1))
    index = i32(cuda.blockIdx.x)
    tile = udiv(index, together)
    index = i32(index - i32(tile * together))
    sequence = udiv(index, columns)
    tiles = udiv(i32(cuda.gridDim.x), together)
    return BlockIndex(i32(index - i32(sequence * columns)), sequence, tile, tiles)


def blocks_of(columns, cu_seqlens, tiles):
    """The length of the grid in which block_index finds `tiles` tiles of each sequence: int."""
    return columns * (len(cu_seqlens) - 1) * tiles
