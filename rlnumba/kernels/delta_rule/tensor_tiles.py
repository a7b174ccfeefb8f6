"""Tiles of 16-bit numbers in shared memory for mma.sync in the gradient of the gated delta rule.

A line has DIM or COLUMNS numbers and 16 unused bytes, so that the eight half lines that ldmatrix reads at once lie in
different banks.
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.shared_memory import load_words, store_function, store_words
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function, shuffle_xor, sync_warp
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# K and V of the heads; columns of V that a block of the first kernel owns.
DIM, COLUMNS = 128, 64
CHUNK = sm80.CHUNK
PITCH, COLUMNS_PITCH = 2 * DIM + CHUNK, 2 * COLUMNS + CHUNK
ZERO = f32(0.0)

store_chunk = store_function("rrrr", "global", "l")


@functools.cache
def fragment_functions(pitch):
    """(load_a, load_a_trans, load_b, load_b_trans) of tiles whose lines are `pitch` bytes apart.

    Each takes (words, tile, line, column, lane): the tile's address and the place of 16 x 16 numbers in it. Lines are
    the rows of A, or the columns of B; of the transposed ones they are k.
    """

    @device_function
    def load_a(words, tile, line, column, lane):
        address = tile + i32(line + (lane & i32(15))) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        sm80.ldmatrix_fragment(words, 0, address + column * i32(2))

    @device_function
    def load_a_trans(words, tile, line, column, lane):
        row = i32(line + (lane & i32(7)) + ((lane >> i32(4)) << i32(3)))
        address = tile + row * i32(pitch) + ((lane >> i32(3)) & i32(1)) * i32(CHUNK)
        sm80.ldmatrix_fragment_trans(words, 0, address + column * i32(2))

    @device_function
    def load_b(words, tile, line, column, lane):
        row = i32(line + (lane & i32(7)) + ((lane >> i32(4)) << i32(3)))
        address = tile + row * i32(pitch) + ((lane >> i32(3)) & i32(1)) * i32(CHUNK)
        sm80.ldmatrix_fragment(words, 0, address + column * i32(2))

    @device_function
    def load_b_trans(words, tile, line, column, lane):
        address = tile + i32(line + (lane & i32(15))) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        sm80.ldmatrix_fragment_trans(words, 0, address + column * i32(2))

    return load_a, load_a_trans, load_b, load_b_trans


@functools.cache
def multiply_keys_function(columns):
    """The device function of 16 lines of a tile of q or k times `columns` keys, float16."""
    load_a, _, load_b, _ = fragment_functions(PITCH)
    multiply = sm80.mma("float16")

    @device_function
    def multiply_keys(acc, base, rows, keys, first, column, lane):
        """acc (16, columns) = lines of a tile from `first` on times those of another from `column` on.

        rows, keys: constants, the bytes between base and the tiles.
        """
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        for i in range(columns // 2):
            acc[i] = ZERO
        for step in range(DIM // 16):
            load_a(a, base + i32(rows), first, i32(step * 16), lane)
            for n in range(columns // 16):
                load_b(b, base + i32(keys), i32(column + i32(n * 16)), i32(step * 16), lane)
                multiply(acc, 8 * n, a, 0, b, 0)

    return multiply_keys


@functools.cache
def copy_function(columns, threads):
    """The device function that starts copies of BLOCK lines of `columns` numbers; zeros from `count` on."""
    chunks, pitch = columns // 8, 2 * columns + CHUNK
    lines = threads // chunks

    @device_function
    def copy_tile(target, source, row_bytes, count, thread):
        """source: the address of the first line's; row_bytes: from one to the next."""
        line, chunk = thread // i32(chunks), thread % i32(chunks)
        for i in range(BLOCK // lines):
            row = i32(line + i32(i * lines))
            from_row = source + np.int64(row if row < count else i32(0)) * row_bytes + chunk * i32(CHUNK)
            nbytes = i32(CHUNK) if row < count else i32(0)
            sm80.cp_async_16(target + row * i32(pitch) + chunk * i32(CHUNK), from_row, nbytes)

    return copy_tile


@functools.cache
def convert_function(columns, threads):
    """The device function that turns BLOCK lines of `columns` float16 into bfloat16, in place."""
    unpack, pack = cvt_unpack("float16"), cvt_pack("bfloat16")
    chunks, pitch = columns // 8, 2 * columns + CHUNK

    @device_function
    def converted(word):
        low, high = unpack(word)
        return pack(low, high)

    @device_function
    def convert_tile(tile, thread):
        for i in range(BLOCK * chunks // threads):
            index = i32(thread + i32(i * threads))
            address = tile + (index // i32(chunks)) * i32(pitch) + (index % i32(chunks)) * i32(CHUNK)
            a, b, c, d = load_words(address)
            store_words(address, converted(a), converted(b), converted(c), converted(d))

    return convert_tile


@device_function
def exchange(words, at, lane):
    """The four words `at`, at + 2, ... of a quad's lanes, transposed: lane i has the i-th of all four."""
    is_odd, is_upper = (lane & i32(1)) != 0, (lane & i32(2)) != 0
    a, b, c, d = words[at], words[at + 2], words[at + 4], words[at + 6]
    first, second = shuffle_xor(a if is_odd else b, 1), shuffle_xor(c if is_odd else d, 1)
    a, b = first if is_odd else a, b if is_odd else first
    c, d = second if is_odd else c, d if is_odd else second
    first, second = shuffle_xor(a if is_upper else c, 2), shuffle_xor(b if is_upper else d, 2)
    if is_upper:
        return first, second, c, d
    return a, b, first, second


@device_function
def store_rows(words, address, row_bytes, count, lane):
    """Eight words of operands, of 16 rows and 32 columns, to global memory, 16 bytes at a time; rows below `count`."""
    row = i32(lane >> i32(2))
    place = address + np.int64(row) * row_bytes + np.int64(lane & i32(3)) * CHUNK
    a, b, c, d = exchange(words, 0, lane)
    if row < count:
        store_chunk(place, a, b, c, d)
    a, b, c, d = exchange(words, 1, lane)
    if i32(row + i32(8)) < count:
        store_chunk(place + 8 * row_bytes, a, b, c, d)


@device_function
def add_log_decays(log_decay, first, count, head, raw, sums, lane):
    """sums = G of a block's tokens, in their order, by one warp; behind the last it stays. raw: scratch."""
    for i in range(BLOCK // 32):
        j = i32(lane + i32(32 * i))
        raw[j] = log_decay[first + j, head] if j < count else ZERO
    sync_warp()
    if lane == 0:
        total = ZERO
        for j in range(BLOCK):
            total += raw[j]
            sums[j] = total
    sync_warp()
