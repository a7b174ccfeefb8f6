"""Parts shared by mma.sync attention kernels: tiles in shared memory, their copies, GEMMs, online softmax, epilogue.

The H / HK query heads of a KV head are rows of one matrix, next to each other for each token, so that a tile of keys
serves all of them: row r is query head r % gqa_ratio of token r // gqa_ratio.

A line of q, k or v in shared memory is followed by 16 unused bytes where that makes its length an odd number of 16
bytes, so that the eight half lines that ldmatrix reads at once lie in different banks.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention.softmax import MINUS_INFINITY, TILE_KEYS, finite_row_max, next_row_max, quad_max
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.shared_memory import store_word
from rlnumba.kernels.ptx.warp import PTX_TYPES, cvt_pack, device_function, exp2, sync_warp
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# Shared memory that a block takes beyond the tiles: what kernels declare, and what the system reserves.
BLOCK_BYTES = sm80.SYSTEM_BYTES + 64


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
    return padded(columns) * 2 + sm80.CHUNK


@functools.cache
def first_key_function(window, multiple):
    """The device function of the first key, a multiple of this, that is loaded for a query at `position`."""

    @device_function
    def first_key(position):
        if window > 0:
            return i32(max(i32(position - i32(window - 1)), i32(0)) // i32(multiple) * i32(multiple))
        else:
            return i32(0)

    return first_key


# Sequences of a launch: bounds of their queries; for the cache flat block tables, keys, and blocks of a table.
PagedBatch = namedtuple("PagedBatch", "cu_seqlens block_tables context_lens max_blocks")


def batch_of(sequences):
    """The PagedBatch of PagedSequences."""
    tables = sequences.block_tables
    return PagedBatch(sequences.cu_seqlens, tables.reshape(-1), sequences.context_lens, tables.shape[1])


# A sequence, seen from one KV head: query heads of the KV head, first packed row, query tokens; bytes from one token to
# the next in q and in k; bytes before the first token's first query head, and before its KV head.
PackedSequence = namedtuple("PackedSequence", "gqa_ratio start length token_bytes key_bytes q_offset k_offset")


@functools.cache
def sequence_function(head_dim, paged=False):
    """The device function that reads a PackedSequence; paged: k_offset is that of row 0 of the cache."""

    @device_function
    def read_sequence(q, k, cu_seqlens, sequence, kv_head):
        heads, kv_heads = i32(q.shape[1]), i32(k.shape[1])
        gqa_ratio = heads // kv_heads
        start = cu_seqlens[sequence]
        length = i32(cu_seqlens[sequence + 1] - start)
        token_bytes, key_bytes = i32(heads * i32(head_dim * 2)), i32(kv_heads * i32(head_dim * 2))
        q_offset = np.int64(start) * token_bytes + kv_head * gqa_ratio * (head_dim * 2)
        k_offset = np.int64(0 if paged else start) * key_bytes + kv_head * (head_dim * 2)
        return PackedSequence(gqa_ratio, start, length, token_bytes, key_bytes, q_offset, k_offset)

    return read_sequence


@functools.cache
def copy_functions(head_dim, rows, threads, block_size):
    """(copy_rows, copy_keys): the device functions that start copies of rows of q, and of a tile of keys or values."""
    # A thread owns one chunk of every lines_per_pass-th line; without a power of two of chunks, some threads have none.
    chunks, real_chunks, pitch = padded(head_dim) // 8, head_dim // 8, line_pitch(head_dim)
    lanes = 1 << (chunks - 1).bit_length()
    lines_per_pass = threads // lanes
    row_passes = -(-rows // lines_per_pass)

    @device_function
    def copy_rows(target, source, first_row, valid_rows, gqa_ratio, token_bytes, thread):
        """Rows from first_row on, zeros beyond valid_rows; source: address of the first token's first query head."""
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        for i in range(row_passes):
            row = i32(line + i32(i * lines_per_pass))
            if row < rows and chunk < chunks:
                token, head = (first_row + row) // gqa_ratio, (first_row + row) % gqa_ratio
                chunk_source = source + np.int64(token) * token_bytes + (head * head_dim * 2 + chunk * sm80.CHUNK)
                nbytes = i32(sm80.CHUNK) if row < valid_rows and chunk < real_chunks else i32(0)
                sm80.cp_async_16(target + row * i32(pitch) + chunk * i32(sm80.CHUNK), chunk_source, nbytes)

    @device_function
    def copy_keys(target, source, block_table, table_offset, first_key, end_key, key_bytes, thread):
        """TILE_KEYS keys, zeros from end_key on. source: address of first_key, or of row 0 of a cache with tables."""
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        if chunk < chunks:
            source += chunk * i32(sm80.CHUNK)
            target += line * i32(pitch) + chunk * i32(sm80.CHUNK)
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
                sm80.cp_async_16(
                    target + i * lines_per_pass * pitch, chunk_source, i32(sm80.CHUNK) if is_valid else i32(0)
                )
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
        sm80.cp_async_commit_group()

    return load_kv_tile


@functools.cache
def fragment_functions(columns):
    """(load_a, load_b, load_b_transposed): the device functions that load fragments of lines of `columns` values."""
    pitch = line_pitch(columns)

    @device_function
    def load_a(words, first, lines, step, lane):
        """Load a fragment of A: 16 lines at address `lines`, 16 columns from 16 step on."""
        address = lines + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(sm80.CHUNK)
        sm80.ldmatrix_fragment(words, first, address + step * 2 * sm80.CHUNK)

    @device_function
    def load_b(words, first, lines, step, lane):
        line = (lane & i32(7)) | ((lane >> i32(4)) << i32(3))
        address = lines + line * i32(pitch) + ((lane >> i32(3)) & i32(1)) * i32(sm80.CHUNK)
        sm80.ldmatrix_fragment(words, first, address + step * 2 * sm80.CHUNK)

    @device_function
    def load_b_transposed(words, first, lines, step, lane):
        """Load a fragment of B: 16 columns, from 16 step on, whose k are the 16 lines at address `lines`."""
        address = lines + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(sm80.CHUNK)
        sm80.ldmatrix_fragment_trans(words, first, address + step * 2 * sm80.CHUNK)

    return load_a, load_b, load_b_transposed


@functools.cache
def gemm_functions(head_dim, element, keys, blocks=1, in_registers=False, columns=None):
    """(load_rows, gemm, accumulate): the device functions of a warp's rows, 16 times `blocks`, and `keys` lines.

    in_registers: `fragments` holds all columns of the rows, else those of one step. columns: of acc, by default all.
    """
    pitch, steps, column_steps = line_pitch(head_dim), padded(head_dim) // 16, padded(columns or head_dim) // 16
    score_count, word_count = blocks * keys // 2, 4 * blocks
    load_a, load_b, load_b_transposed = fragment_functions(head_dim)
    mma_fragments, pack = sm80.mma(element), cvt_pack(element)

    @device_function
    def load_rows(fragments, row_lines, lane):
        for step in range(steps):
            for i in range(blocks):
                load_a(fragments, 4 * (step * blocks + i), row_lines + i * 16 * pitch, step, lane)

    @device_function
    def gemm(scores, fragments, row_lines, lines, lane):
        """scores (rows, keys) = the rows times the lines."""
        b = cuda.local.array(4, np.int32)
        for i in range(score_count):
            scores[i] = f32(0.0)
        for step in range(steps):
            if not in_registers:
                for i in range(blocks):
                    load_a(fragments, 4 * i, row_lines + i * 16 * pitch, step, lane)
            for n in range(keys // 16):
                load_b(b, 0, lines + n * 16 * pitch, step, lane)
                for i in range(blocks):
                    first = 4 * (step * blocks + i) if in_registers else 4 * i
                    mma_fragments(scores, (i * (keys // 16) + n) * 8, fragments, first, b, 0)

    @device_function
    def accumulate(acc, weights, lines, first_step, lane):
        """acc (rows, columns) += weights (rows, keys), rounded, times the lines, from column step first_step on."""
        a = cuda.local.array(word_count, np.int32)
        b = cuda.local.array(4, np.int32)
        for step in range(keys // 16):
            for i in range(blocks):
                for j in range(4):
                    at = (i * (keys // 16) + step) * 8 + 2 * j
                    a[4 * i + j] = pack(weights[at], weights[at + 1])
            for n in range(column_steps):
                load_b_transposed(b, 0, lines + step * 16 * pitch, first_step + n, lane)
                for i in range(blocks):
                    mma_fragments(acc, (i * column_steps + n) * 8, a, 4 * i, b, 0)

    return load_rows, gemm, accumulate


@device_function
def lane_sum(p, first):
    """A lane's share of the sum of a row's probabilities over 16 keys; first: index of the row's first element."""
    return (p[first] + p[first + 1]) + (p[first + 4] + p[first + 5])


@functools.cache
def softmax_functions(blocks, window):
    """(apply_mask, online_softmax_step) of a tile of TILE_KEYS keys and `blocks` times 16 rows of a warp."""

    @device_function
    def apply_mask(scores, mask_offset):
        """Set scores that a row does not see to -inf. mask_offset[row]: its position less the lane's first key."""
        for i in range(blocks):
            for block in range(TILE_KEYS // 8):
                for j in range(4):
                    if window > 0:
                        # How far the key is ahead of the row; a later key is so by more than any window, unsigned.
                        ahead = np.uint32(i32(mask_offset[2 * i + j // 2] - i32(block * 8 + j % 2)))
                        if ahead >= np.uint32(window):
                            scores[(i * (TILE_KEYS // 8) + block) * 4 + j] = MINUS_INFINITY
                    elif block * 8 + j % 2 > mask_offset[2 * i + j // 2]:
                        scores[(i * (TILE_KEYS // 8) + block) * 4 + j] = MINUS_INFINITY

    @device_function
    def online_softmax_step(scores, row_max, sums, rescale, c):
        """Turn a tile's scores into probabilities, in place; update row_max, sums and rescale of a thread's rows."""
        for i in range(blocks):
            for half in range(2):
                row = 2 * i + half
                at = i * (TILE_KEYS // 2) + 2 * half
                tile_max = scores[at]
                for block in range(TILE_KEYS // 8):
                    tile_max = max(tile_max, max(scores[at + 4 * block], scores[at + 4 * block + 1]))
                updated = next_row_max(row_max[row], quad_max(tile_max), c)
                subtracted = finite_row_max(updated)
                rescale[row] = exp2(row_max[row] - subtracted)
                row_max[row] = updated
                for block in range(TILE_KEYS // 8):
                    for j in range(2):
                        scores[at + 4 * block + j] = exp2(cuda.fma(scores[at + 4 * block + j], c, -subtracted))
                first = lane_sum(scores, at) + lane_sum(scores, at + 8)
                second = lane_sum(scores, at + 16) + lane_sum(scores, at + 24)
                sums[row] = cuda.fma(sums[row], rescale[row], first + second)

    return apply_mask, online_softmax_step


@functools.cache
def store_rows_function(head_dim, columns, warp_rows, element):
    """The device function that writes a warp's rows of out or of a gradient, or `columns` columns of them."""
    pitch, blocks, pack = line_pitch(head_dim), 2 * (padded(columns) // 16), cvt_pack(element)

    @device_function
    def store_rows(acc, factor, lines, target, column, valid_rows, gqa_ratio, token_bytes, first_row, lane):
        """acc times factor, through the warp's lines, to valid_rows rows from first_row on, from `column` on."""
        words = lines + (lane >> i32(2)) * i32(pitch) + ((lane & i32(3)) << i32(2))
        for i in range(warp_rows // 16):
            for n in range(blocks):
                at, address = (i * blocks + n) * 4, words + i * 16 * pitch + n * sm80.CHUNK
                store_word(address, pack(acc[at] * factor, acc[at + 1] * factor))
                store_word(address + 8 * pitch, pack(acc[at + 2] * factor, acc[at + 3] * factor))
        sync_warp()
        chunks = i32(min(i32(head_dim) - column, i32(columns)) >> 3)
        for index in range(lane, min(valid_rows, i32(warp_rows)) * chunks, 32):
            row, chunk = i32(index) // chunks, i32(index) % chunks
            token, head = i32(first_row + row) // gqa_ratio, i32(first_row + row) % gqa_ratio
            chunk_target = (
                target + np.int64(token) * token_bytes + (head * (head_dim * 2) + column * 2 + chunk * sm80.CHUNK)
            )
            sm80.copy_to_global(chunk_target, lines + row * i32(pitch) + chunk * i32(sm80.CHUNK))

    return store_rows
