"""What the mma.sync kernels of attention share: tiles in shared memory, their cp.async copies, fragments, epilogue.

The H / HK query heads of a KV head are rows of one matrix, next to each other for each token, so that a tile of keys
serves all of them: row r is query head r % gqa_ratio of token r // gqa_ratio.

A line of q, k or v in shared memory is followed by 16 unused bytes where that makes its length an odd number of 16
bytes, so that the eight half lines that ldmatrix reads at once lie in different banks.
"""

import functools

import numpy as np

from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.ptx.shared_memory import store_word
from rlnumba.kernels.ptx.sm80 import (
    CHUNK,
    SYSTEM_BYTES,
    copy_to_global,
    cp_async_16,
    cp_async_commit_group,
    ldmatrix_fragment,
    ldmatrix_fragment_trans,
)
from rlnumba.kernels.ptx.warp import PTX_TYPES, cvt_pack, device_function, sync_warp

i32 = np.int32

# Shared memory that a block takes beyond the tiles: what kernels declare, and what the system reserves.
BLOCK_BYTES = SYSTEM_BYTES + 64


def is_supported(element, head_dim, gqa_ratio):
    """Whether the sm80 kernels, forward and backward, take such heads: 16-bit, of 8, 16, ... or 256 columns.

    element: the dtype's name; gqa_ratio: query heads of a KV head, any number.
    """
    return element in PTX_TYPES and head_dim % 8 == 0 and 0 < head_dim <= 256 and gqa_ratio > 0


def padded(head_dim):
    """Columns that the GEMMs see: a multiple of 16, zero beyond head_dim."""
    return -(-head_dim // 16) * 16


def line_pitch(columns):
    """Bytes from one line of 16-bit values to the next in shared memory, an odd number of 16."""
    return padded(columns) * 2 + CHUNK


@functools.cache
def copy_functions(head_dim, rows, threads, block_size):
    """(copy_rows, copy_keys): the device functions that start copies of rows of q, and of a tile of keys or values.

    A thread owns one chunk of every lines_per_pass-th line; where a line has no power of two of chunks, some threads
    have none. block_size: of the paged cache, 0 for packed keys.
    """
    chunks, real_chunks, pitch = padded(head_dim) // 8, head_dim // 8, line_pitch(head_dim)
    lanes = 1 << (chunks - 1).bit_length()
    lines_per_pass = threads // lanes
    row_passes = -(-rows // lines_per_pass)

    @device_function
    def copy_rows(target, source, first_row, valid_rows, gqa_ratio, token_bytes, thread):
        """Rows first_row .. first_row + rows of a KV head's matrix; zeros beyond the first valid_rows.

        source: address of the first token's first query head of the KV head; token_bytes: from one token to the next.
        """
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        for i in range(row_passes):
            row = i32(line + i32(i * lines_per_pass))
            if row < rows and chunk < chunks:
                token, head = (first_row + row) // gqa_ratio, (first_row + row) % gqa_ratio
                chunk_source = source + np.int64(token) * token_bytes + (head * head_dim * 2 + chunk * CHUNK)
                nbytes = i32(CHUNK) if row < valid_rows and chunk < real_chunks else i32(0)
                cp_async_16(target + row * i32(pitch) + chunk * i32(CHUNK), chunk_source, nbytes)

    @device_function
    def copy_keys(target, source, block_table, table_offset, first_key, end_key, key_bytes, thread):
        """Keys first_key .. first_key + TILE_KEYS of a KV head; zeros from end_key on.

        key_bytes: from one key to the next. source: address of the row of the first key, or of row 0 where block_table
        gives the rows, from table_offset on.
        """
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        if chunk < chunks:
            source += chunk * i32(CHUNK)
            target += line * i32(pitch) + chunk * i32(CHUNK)
            valid_lines = i32(end_key - first_key) if chunk < real_chunks else i32(0)
            if not block_size:
                source += np.int64(line) * key_bytes
            for i in range(TILE_KEYS // lines_per_pass):
                is_valid = i32(line + i32(i * lines_per_pass)) < valid_lines
                chunk_source = source
                if block_size and is_valid:
                    key = i32(first_key + i32(line + i32(i * lines_per_pass)))
                    block = block_table[table_offset + key // i32(block_size)]
                    row = i32(block * i32(block_size) + key % i32(block_size))
                    chunk_source += np.int64(row) * key_bytes
                cp_async_16(target + i * lines_per_pass * pitch, chunk_source, i32(CHUNK) if is_valid else i32(0))
                if not block_size:
                    source += np.int64(lines_per_pass) * key_bytes

    return copy_rows, copy_keys


@functools.cache
def kv_tile_function(copy_keys):
    """The device function that starts the copy of one tile of keys or values as a cp.async group of its own."""

    @device_function
    def load_kv_tile(target, source, block_table, table_offset, tile, tiles, end_key, key_bytes, thread):
        """Tile `tile` of `tiles`; beyond the last, an empty group, so that waits may count groups."""
        if tile < tiles:
            first_key = i32(tile * i32(TILE_KEYS))
            copy_keys(target, source, block_table, table_offset, first_key, end_key, key_bytes, thread)
        cp_async_commit_group()

    return load_kv_tile


@functools.cache
def fragment_functions(columns):
    """(load_a, load_b, load_b_transposed): the device functions that load fragments of lines of `columns` values."""
    pitch = line_pitch(columns)

    @device_function
    def load_a(words, first, lines, step, lane):
        """Of A: 16 lines at address `lines`, 16 columns from 16 step on."""
        address = lines + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        ldmatrix_fragment(words, first, address + step * 2 * CHUNK)

    @device_function
    def load_b(words, first, lines, step, lane):
        """Of B: 16 lines at address `lines`, 16 columns from 16 step on."""
        line = (lane & i32(7)) | ((lane >> i32(4)) << i32(3))
        address = lines + line * i32(pitch) + ((lane >> i32(3)) & i32(1)) * i32(CHUNK)
        ldmatrix_fragment(words, first, address + step * 2 * CHUNK)

    @device_function
    def load_b_transposed(words, first, lines, step, lane):
        """Of B: 16 columns, from 16 step on, whose k are the 16 lines at address `lines`."""
        address = lines + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        ldmatrix_fragment_trans(words, first, address + step * 2 * CHUNK)

    return load_a, load_b, load_b_transposed


@functools.cache
def store_rows_function(head_dim, columns, warp_rows, element):
    """The device function that writes a warp's rows of out or of a gradient, or `columns` columns of them."""
    pitch, blocks, pack = line_pitch(head_dim), 2 * (padded(columns) // 16), cvt_pack(element)

    @device_function
    def store_rows(acc, factor, lines, target, column, valid_rows, gqa_ratio, token_bytes, first_row, lane):
        """acc times factor, through the warp's lines in shared memory, to rows first_row .. first_row + valid_rows.

        target: address of the first token's first head; row r is head r % gqa_ratio of token r // gqa_ratio. column: of
        head_dim at which acc begins.
        """
        words = lines + (lane >> i32(2)) * i32(pitch) + ((lane & i32(3)) << i32(2))
        for i in range(warp_rows // 16):
            for n in range(blocks):
                at, address = (i * blocks + n) * 4, words + i * 16 * pitch + n * CHUNK
                store_word(address, pack(acc[at] * factor, acc[at + 1] * factor))
                store_word(address + 8 * pitch, pack(acc[at + 2] * factor, acc[at + 3] * factor))
        sync_warp()
        chunks = i32(min(i32(head_dim) - column, i32(columns)) >> 3)
        for index in range(lane, min(valid_rows, i32(warp_rows)) * chunks, 32):
            row, chunk = i32(index) // chunks, i32(index) % chunks
            token, head = i32(first_row + row) // gqa_ratio, i32(first_row + row) % gqa_ratio
            chunk_target = target + np.int64(token) * token_bytes + (head * (head_dim * 2) + column * 2 + chunk * CHUNK)
            copy_to_global(chunk_target, lines + row * i32(pitch) + chunk * i32(CHUNK))

    return store_rows
