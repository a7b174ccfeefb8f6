"""Products of a warp in kernel.py, of the token's two lines with what lies in memory as rows: the state, w, k.

mma.sync's A has 16 lines. Here eight of them are k and eight are q of the one token, or -M and P: so every lane has x
and y of the same columns in its accumulators, c[0], c[1] and c[2], c[3]. B has the rows of K of the state, or those of
tokens of w, as its k and columns of V as its eight columns. A lane owns four neighbouring columns of V of each row that
its k are, 8 bytes, and takes them for four products: column n of product i is column 4 n + i of the warp's 32. So rows
come from memory as they lie there, in segments of 64 bytes, and two of them are interleaved for each word of B.

    lane = 4 g + c      loads columns 4 g .. 4 g + 3 of rows 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of 16
                        has x and y of columns 8 c .. 8 c + 7
                        finishes column 8 c + g
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LOW_SCALE, SUB_BLOCK, VALUE_SCALE
from rlnumba.kernels.delta_rule.simt import decay_between, saturated
from rlnumba.kernels.delta_rule.tensor_products import pack_operands
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.shared_memory import load_function, store_function, store_words
from rlnumba.kernels.ptx.warp import (
    cvt_unpack,
    device_function,
    lower_halves,
    narrow,
    sync_warp,
    upper_halves,
    widen,
)
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# K and V of the heads; threads of a block, of whose warps each has COLUMNS columns of V; lines that they copy at once.
DIM, THREADS, COLUMNS = 128, 128, 32
LINES = THREADS // 16
# Rows of K of the state that threads keep in registers from the start; the others are in shared memory.
HELD = 64
# Elements from one line of DIM operands to the next in shared memory, an odd number of 16 bytes, and the bytes of both.
LINE = DIM + 8
PITCH, CHUNK = 2 * LINE, sm80.CHUNK
# Elements before each part of shared memory: rows k and w of the block, the token's k and q, -M and P of the block.
KEYS, VALUES = 0, BLOCK * LINE
TOKEN = VALUES + BLOCK * LINE
STATE = TOKEN + 2 * LINE
WEIGHTS, WEIGHT_LINE = STATE + (DIM - HELD) * LINE, BLOCK + 8
SHARED_BYTES = 2 * (WEIGHTS + 2 * WEIGHT_LINE)
UNSCALED, HIGH_SCALE = f32(1.0) / VALUE_SCALE, f32(1.0) / LOW_SCALE
ZERO = f32(0.0)

load_global_words, store_global_words = load_function("rr", "global", "l"), store_function("rr", "global", "l")
load_shared_words = load_function("rr")


def rows_function(load):
    """load_rows by a load of two words from an address, of global or of shared memory."""

    @device_function
    def load_rows(words, at, address, pitch):
        """A lane's words of 16 rows, four columns of each: of rows 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, c = lane % 4."""
        for half in range(2):
            for odd in range(2):
                first = at + 4 * half + 2 * odd
                words[first], words[first + 1] = load(address + (8 * half + odd) * pitch)

    return load_rows


load_state_rows, load_shared_rows = rows_function(load_global_words), rows_function(load_shared_words)


@device_function
def first_row(lines, pitch, warp, lane):
    """The address at which load_rows begins in lines of DIM operands, `pitch` bytes apart."""
    column = warp * i32(COLUMNS) + ((lane >> i32(2)) << i32(2))
    return lines + (((lane & i32(3)) << i32(1)) * i32(pitch) + column * i32(2))


@device_function
def interleave(b, words, at):
    """b[2 i : 2 i + 2]: column i of a lane's four as a half of B, whose k are the rows of load_rows."""
    for half in range(2):
        for pair in range(2):
            even, odd = words[at + 4 * half + pair], words[at + 4 * half + 2 + pair]
            b[4 * pair + half] = lower_halves(even, odd)
            b[4 * pair + 2 + half] = upper_halves(even, odd)


@device_function
def own_column(acc, first, g):
    """acc[4 (g % 4) + g / 4 + first]: x or y of the column of V that a lane finishes."""
    low, high = acc[4 + first] if g & i32(1) else acc[first], acc[12 + first] if g & i32(1) else acc[8 + first]
    even = high if g & i32(2) else low
    low, high = acc[5 + first] if g & i32(1) else acc[1 + first], acc[13 + first] if g & i32(1) else acc[9 + first]
    odd = high if g & i32(2) else low
    return odd if g & i32(4) else even


@device_function
def token_address(lines, pitch, lane):
    """A lane's address for a fragment of A, whose lines 0 to 7 are the first of two lines and 8 to 15 the second."""
    return lines + ((lane >> i32(3)) & i32(1)) * pitch + (lane >> i32(4)) * i32(CHUNK)


@functools.cache
def fold_function():
    """The device function that folds a full block into the state, and reads the new state."""
    unpack = cvt_unpack("float16")
    multiply, multiply_half, count = sm80.mma("float16"), sm80.mma_half("float16"), BLOCK // 2

    @device_function
    def scale_rows(updates, base, decays, warp, lane):
        """F w of the block as fragments of A: a lane's first two and last two columns of V, 16 tokens each."""
        words, b = cuda.local.array(8, np.int32), cuda.local.array(8, np.int32)
        token = (lane & i32(3)) << i32(1)
        address = first_row(base + i32(2 * VALUES), i32(PITCH), warp, lane)
        for step in range(BLOCK // 16):
            load_shared_rows(words, 0, address + i32(step * 16 * PITCH), i32(PITCH))
            interleave(b, words, 0)
            for half in range(2):
                place = np.uint32(token + i32(step * 16 + 8 * half))
                first_decay, second_decay = decays[place], decays[np.uint32(place + 1)]
                for i in range(4):
                    first, second = unpack(b[2 * i + half])
                    update = pack_operands(first_decay * first, second_decay * second)
                    updates[8 * step + 4 * (i // 2) + 2 * half + i % 2] = update

    @device_function
    def load_planes(words, source, offset):
        """The lane's words of 16 rows of both planes, zeros without a page."""
        for i in range(16):
            words[i] = i32(0)
        if source != 0:
            load_state_rows(words, 0, source + offset, 2 * DIM)
            load_state_rows(words, 8, source + offset + 2 * DIM * DIM, 2 * DIM)

    @device_function
    def store_plane(b, target):
        """Store 16 rows of a plane, halves of B, as load_planes has them."""
        for half in range(2):
            address = target + 16 * DIM * half
            store_global_words(address, lower_halves(b[half], b[2 + half]), lower_halves(b[4 + half], b[6 + half]))
            address += 2 * DIM
            store_global_words(address, upper_halves(b[half], b[2 + half]), upper_halves(b[4 + half], b[6 + half]))

    @device_function
    def fold(products, base, decays, kept, source, target, warp, lane):
        """products += those of read_state with the state E_last S + k^T (F w), which is stored.

        kept: E_last; decays: F. source, target: addresses of a head's planes in the page that is read, and in the one
        that is written; 0: none.
        """
        acc, updates = cuda.local.array(16, np.float32), cuda.local.array(count, np.int32)
        b, low, words = cuda.local.array(8, np.int32), cuda.local.array(8, np.int32), cuda.local.array(16, np.int32)
        key, token = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        offset = first_row(i32(0), i32(2 * DIM), warp, lane)
        scale_rows(updates, base, decays, warp, lane)
        keys = base + i32(2 * KEYS) + (lane & i32(15)) * i32(PITCH) + (lane >> i32(4)) * i32(CHUNK)
        tokens = token_address(base + i32(2 * TOKEN), i32(PITCH), lane)
        step = i32(0)
        while step < i32(DIM // 16):
            load_planes(words, source, offset)
            interleave(b, words, 0)
            interleave(low, words, 8)
            for half in range(2):
                for i in range(4):
                    at = 8 * (i // 2) + 4 * half + 2 * (i % 2)
                    high_first, high_second = unpack(b[2 * i + half])
                    low_first, low_second = unpack(low[2 * i + half])
                    acc[at] = cuda.fma(kept, cuda.fma(low_first, HIGH_SCALE, high_first), ZERO)
                    acc[at + 1] = cuda.fma(kept, cuda.fma(low_second, HIGH_SCALE, high_second), ZERO)
            for block in range(BLOCK // 16):
                sm80.ldmatrix_fragment_trans(key, 0, keys + i32(block * 16 * PITCH))
                multiply(acc, 0, updates, 8 * block, key, 0)
                multiply(acc, 8, updates, 8 * block + 4, key, 0)
            for half in range(2):
                for i in range(4):
                    at = 8 * (i // 2) + 4 * half + 2 * (i % 2)
                    high = pack_operands(acc[at], acc[at + 1])
                    high_first, high_second = unpack(high)
                    b[2 * i + half] = high
                    low_first, low_second = (acc[at] - high_first) * LOW_SCALE, (acc[at + 1] - high_second) * LOW_SCALE
                    low[2 * i + half] = pack_operands(low_first, low_second)
            if target != 0:
                store_plane(b, target + offset)
                store_plane(low, target + offset + 2 * DIM * DIM)
            sm80.ldmatrix_fragment(token, 0, tokens)
            for i in range(4):
                multiply_half(products, 4 * i, token, 0, b, 2 * i)
            step, keys, tokens = i32(step + i32(1)), keys + i32(2 * CHUNK), tokens + i32(2 * CHUNK)
            offset = i32(offset + i32(32 * DIM))
        # The new block's first sub-block has no rows yet.
        zero, line = i32(0), lane >> i32(2)
        address = base + i32(2 * VALUES) + warp * i32(2 * COLUMNS) + (lane & i32(3)) * i32(CHUNK) + line * i32(PITCH)
        for half in range(2):
            store_words(address + i32(half * 8 * PITCH), zero, zero, zero, zero)

    return fold


@functools.cache
def products_functions():
    """(score_tokens, read_state, finish): the device functions of a warp's products for one token."""
    multiply = sm80.mma_half("float16")

    @device_function
    def score_tokens(shared, base, sums, m, total, filled, warp, lane):
        """M in m, and -M and P as operands, of the block's tokens 16 warp to 16 warp + 15: in a lane M or P of one."""
        acc, a, b = cuda.local.array(8, np.float32), cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        g, first = lane >> i32(2), i32(warp * i32(SUB_BLOCK))
        tile, odd = g & i32(1), (g >> i32(1)) & i32(1)
        j = first + (tile << i32(3)) + ((lane & i32(3)) << i32(1)) + odd
        decay = decay_between(total, sums[np.uint32(j)] if j < filled else total)
        for i in range(8):
            acc[i] = ZERO
        # The new token's key is its own line; tokens behind it have that line, too, and are not read.
        line = first + (lane & i32(7)) + ((lane >> i32(4)) << i32(3))
        line = i32(KEYS // LINE) + line if line < filled else i32(TOKEN // LINE)
        keys = base + line * i32(PITCH) + ((lane >> i32(3)) & i32(1)) * i32(CHUNK)
        tokens = token_address(base + i32(2 * TOKEN), i32(PITCH), lane)
        for step in range(DIM // 16):
            sm80.ldmatrix_fragment(a, 0, tokens + i32(step * 2 * CHUNK))
            sm80.ldmatrix_fragment(b, 0, keys + i32(step * 2 * CHUNK))
            multiply(acc, 0, a, 0, b, 0)
            multiply(acc, 4, a, 0, b, 2)
        of_key, of_query = acc[4] if tile else acc[0], acc[6] if tile else acc[2]
        if odd:
            of_key, of_query = acc[5] if tile else acc[1], acc[7] if tile else acc[3]
        if g < 4:
            error = decay * of_key if j < filled else ZERO
            m[np.uint32(j)] = error
            shared[np.uint32(WEIGHTS + j)] = narrow(saturated(-error), shared)
        else:
            output = decay * of_query if j <= filled else ZERO
            shared[np.uint32(WEIGHTS + WEIGHT_LINE + j)] = narrow(saturated(output), shared)

    @device_function
    def read_state(acc, base, state, warp, lane):
        """x in acc[4 i] and acc[4 i + 1], y in acc[4 i + 2] and acc[4 i + 3], of columns 8 c + i and 8 c + 4 + i."""
        a, b, words = cuda.local.array(4, np.int32), cuda.local.array(8, np.int32), cuda.local.array(8, np.int32)
        tokens = token_address(base + i32(2 * TOKEN), i32(PITCH), lane)
        rows = first_row(base + i32(2 * STATE), i32(PITCH), warp, lane)
        for step in range(DIM // 16):
            sm80.ldmatrix_fragment(a, 0, tokens + i32(step * 2 * CHUNK))
            if step < HELD // 16:
                interleave(b, state, 8 * step)
            else:
                load_shared_rows(words, 0, rows + i32((16 * step - HELD) * PITCH), i32(PITCH))
                interleave(b, words, 0)
            for i in range(4):
                multiply(acc, 4 * i, a, 0, b, 2 * i)

    @device_function
    def finish(acc, shared, base, m, beta, filled, warp, lane):
        """(w, o before its scale) of a lane's column of V, from v - E x and E y; w also goes to its line."""
        a, b, words = cuda.local.array(4, np.int32), cuda.local.array(8, np.int32), cuda.local.array(8, np.int32)
        w, weights = cuda.local.array(SUB_BLOCK, np.float32), cuda.local.array(SUB_BLOCK, np.float32)
        g, c = lane >> i32(2), lane & i32(3)
        own = filled >> i32(4)
        begin = own * i32(SUB_BLOCK)
        rows = first_row(base + i32(2 * VALUES), i32(PITCH), warp, lane)
        tokens = token_address(base + i32(2 * WEIGHTS), i32(2 * WEIGHT_LINE), lane)
        for step in range(BLOCK // 16 - 1):
            if step < own:
                sm80.ldmatrix_fragment(a, 0, tokens + i32(step * 2 * CHUNK))
                load_shared_rows(words, 0, rows + i32(step * 16 * PITCH), i32(PITCH))
                interleave(b, words, 0)
                for i in range(4):
                    multiply(acc, 4 * i, a, 0, b, 2 * i)
        # The lane's own column is 8 c + g, in the pair of columns g % 4.
        column = i32(warp * i32(COLUMNS) + (c << i32(3)) + g)
        place = i32(VALUES + begin * i32(LINE)) + column
        for j in range(SUB_BLOCK - 1):
            w[j] = widen(shared[np.uint32(place + i32(j * LINE))])
            weights[j] = m[np.uint32(begin + i32(j))]
        r = own_column(acc, 0, g)
        # Rows from `filled` on are zeros with M zero, which change nothing.
        for j in range(SUB_BLOCK - 1):
            r = cuda.fma(-weights[j], w[j], r)
        new = narrow(saturated(beta * r), shared)
        shared[np.uint32(VALUES + filled * i32(LINE) + column)] = new
        sync_warp()
        sm80.ldmatrix_fragment(a, 0, tokens + begin * i32(2))
        load_shared_rows(words, 0, rows + begin * i32(PITCH), i32(PITCH))
        interleave(b, words, 0)
        # What the lines of k add up now is not read.
        for i in range(4):
            multiply(acc, 4 * i, a, 0, b, 2 * i)
        return new, own_column(acc, 2, g)

    return score_tokens, read_state, finish
