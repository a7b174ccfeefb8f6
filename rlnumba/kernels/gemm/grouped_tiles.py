"""The tiles of all experts' rows, in kernels: their number follows from `starts`, which is on the device alone.

Tiles are numbered expert by expert. At its start one warp of a block writes, for each expert, the row tiles before it
to a table in shared memory; there every warp finds the expert of a tile by bisection.
"""

import functools

import numpy as np

from rlnumba.kernels.gemm.scheduler import tile_coordinates
from rlnumba.kernels.ptx.shared_memory import load_word, store_word
from rlnumba.kernels.ptx.sm90 import warp_uniform
from rlnumba.kernels.ptx.warp import device_function, shuffle_up, udiv

i32, u32 = np.int32, np.uint32

# Bytes of an entry of the table.
WORD = 4


def most_row_tiles(rows, experts, tile_rows):
    """The most tiles of tile_rows rows that `rows` rows of so many experts can need, each expert with its own."""
    return rows // tile_rows + min(rows, experts)


@functools.cache
def row_tile_functions(rows, across_first=False):
    """(fill_table, find_tile) for tiles of so many rows.

    across_first: an expert's tiles are numbered along its columns first, else down its rows.

    The table, in shared memory, has the row tiles of all experts before each expert, and at its end those of all.
    """

    @device_function
    def fill_table(table, starts, lane):
        """A warp writes the table; each lane has neighbouring experts."""
        experts = i32(starts.shape[0] - 1)
        each = (experts + i32(31)) >> i32(5)
        first = lane * each
        end = min(i32(first + each), experts)
        tiles = i32(0)
        expert = first
        while expert < end:
            tiles = i32(tiles + udiv(i32(starts[u32(expert + 1)] - starts[u32(expert)] + i32(rows - 1)), i32(rows)))
            expert = i32(expert + i32(1))
        # The tiles of this lane and those before it.
        total, distance = tiles, i32(1)
        while distance < 32:
            before = shuffle_up(total, distance)
            if lane >= distance:
                total = i32(total + before)
            distance = i32(distance << i32(1))
        tiles = i32(total - tiles)
        expert = first
        while expert < end:
            store_word(table + expert * i32(WORD), tiles)
            tiles = i32(tiles + udiv(i32(starts[u32(expert + 1)] - starts[u32(expert)] + i32(rows - 1)), i32(rows)))
            expert = i32(expert + i32(1))
        if lane == 31:
            store_word(table + experts * i32(WORD), total)

    @device_function
    def find_tile(index, table, starts, tiles_across):
        """(expert, first row, end of the expert's rows, tile column) of the index-th tile, which must exist."""
        row_tile = udiv(index, tiles_across)
        expert, end = i32(0), i32(starts.shape[0] - 1)
        while i32(end - expert) > 1:
            middle = i32(expert + end) >> i32(1)
            if load_word(table + middle * i32(WORD)) <= row_tile:
                expert = middle
            else:
                end = middle
        before = load_word(table + expert * i32(WORD))
        if across_first:
            tile_row, tile_column = i32(row_tile - before), i32(index - row_tile * tiles_across)
        else:
            tiles_down = i32(load_word(table + expert * i32(WORD) + WORD) - before)
            tile_row, tile_column = tile_coordinates(i32(index - before * tiles_across), tiles_down, tiles_across)
        first_row = i32(starts[u32(expert)] + tile_row * i32(rows))
        return (
            warp_uniform(expert),
            warp_uniform(first_row),
            warp_uniform(starts[u32(expert + 1)]),
            warp_uniform(tile_column),
        )

    return fill_table, find_tile
