"""Causal attention by mma.sync, on every GPU since Ampere: packed sequences, the paged cache, decode.

The equations are those of kernels/attention/ops.py, in float16 or bfloat16 with float32 accumulators. What a row
(a query head of a token) computes, wherever it stands in whatever batch, in all three kernels:

    for each segment of SEGMENT keys, the segments fixed by the keys' absolute positions:
        m = -inf, l_t = 0 (t = 0 .. 3), acc = 0
        for each tile of KEYS keys of the segment, in ascending order:
            s_j = sum over e of q_e k_je by mma.sync, 16 columns at a time in ascending order; -inf beyond the row
            new = c max_j s_j if that is above m + RESCALE_THRESHOLD, else m
            shrink = 2^(m - new)    p_j = 2^fma(s_j, c, -new)    m = new
            u_wt = (p_(16 w + 2 t) + p_(16 w + 2 t + 1)) + (p_(16 w + 8 + 2 t) + p_(16 w + 9 + 2 t))     w = 0 .. 3
            l_t = fma(l_t, shrink, (u_0t + u_1t) + (u_2t + u_3t))
            acc_e = acc_e shrink + sum over j of p_j v_je by mma.sync, p rounded to the inputs' type, 16 keys at a time
        l = (l_0 + l_1) + (l_2 + l_3)
    segments merge in ascending order, each with all before it (M, L, A):
        new = max(M, m)    a = 2^(M - new)    b = 2^(m - new)    L = fma(l, b, L a)    A_e = fma(acc_e, b, A_e a)
    out_e = A_e (1 / L)     lse = fma(M, ln 2, log L)

with c = scale log2(e) > 0. m is what a row's scores are held against: at first their maximum, later something up to
RESCALE_THRESHOLD smaller, so that acc is rarely multiplied by anything but 1. A tile that lies beyond a row changes
nothing
(new = m, shrink = 1, p = 0), nor does a segment (b = 0, a = 1), so blocks of rows may visit more tiles than one of
their rows needs.

The H / HK query heads of a key head are rows of one matrix, next to each other for each token, so that a tile of
keys serves all of them. Two ways to cut the work:

    many rows   a block owns rows of one key head, each of its warps 16 or 32 of them: all scores of a row lie in
                four lanes, and its probabilities become the left operand of P V without leaving the registers
    few rows    (decode) a block owns 16 rows and one segment; of a tile each of the four warps takes 16 keys for
                the scores, then a quarter of the columns for P V, with the probabilities passing through shared
                memory. Segments are merged by a kernel of their own where there are several

A line of q, k or v in shared memory is followed by 16 unused bytes where that makes its length an odd number of 16
bytes, so that the eight half lines that ldmatrix reads at once lie in different banks.
Source: Dao 2023 (FlashAttention-2); Dao et al. 2023 (Flash-Decoding).
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.gemm.sm80 import SYSTEM_BYTES, shared_limit
from rlnumba.kernels.gemm.sm90 import processors
from rlnumba.kernels.ptx.sm80 import (
    CHUNK,
    address_of,
    copies_end,
    copies_wait,
    copy_chunk,
    load_fragment,
    load_fragment_across,
    multiply,
    processor,
    read_four,
    store_word,
    write_chunk,
    write_four,
)
from rlnumba.kernels.ptx.sm90 import ELEMENTS, cvt_pack, shared_address
from rlnumba.kernels.ptx.warp import ballot, device_function, exp2, narrow, shuffle_xor, sync_warp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Parts of the arithmetic: keys between two looks at the maximum, and keys that decode gives to one block.
KEYS = 64
SEGMENT = 1024
# How far, in powers of two, a probability may exceed 1 before the row's reference moves.
RESCALE_THRESHOLD = f32(8.0)
# Rows and warps of a block of decode.
FEW_ROWS = 16
FEW_WARPS = 4
MERGE_THREADS = 128
# Shared memory that a block takes beyond the tiles: what kernels declare, and what the system keeps of it.
BLOCK_BYTES = SYSTEM_BYTES + 64
FEW_BLOCK_BYTES = SYSTEM_BYTES + 6 * 1024
# What a block keeps in shared memory rather than in registers: a slot for totals over segments; the packed place of
# its sequence's first token; query heads a key head; its rows; keys before the first token.
SLOT, START, GROUP, ALIVE, BEFORE, FACTS = range(6)
MINUS_INFINITY = f32(-np.inf)
LN2 = f32(math.log(2.0))
LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """A kernel for many rows. element: "float16" or "bfloat16"; each of `warps` warps owns warp_rows rows.

    stages: tiles of keys, and of values, in shared memory. keeps_q: the rows of q stay in registers, and their place
    in shared memory is given up to the keys. block_size: of the cache, 0 for packed sequences. segment: SEGMENT,
    smaller in tests.
    """

    head_dim: int
    element: str
    warps: int = 4
    warp_rows: int = 32
    stages: int = 1
    keeps_q: bool = False
    block_size: int = 0
    segment: int = SEGMENT

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def rows(self):
        return self.warps * self.warp_rows

    @property
    def accumulators(self):
        """Of a thread, for its rows of out."""
        return self.warp_rows * padded(self.head_dim) // 32

    @property
    def shared_bytes(self):
        q, keys = self.rows * pitch_of(self.head_dim), 2 * self.stages * KEYS * pitch_of(self.head_dim)
        return max(q, keys) if self.keeps_q else q + keys

    @property
    def kept_floats(self):
        """Of a block's totals over segments: for each thread its accumulators, and two numbers for each row."""
        return self.threads * (self.accumulators + self.warp_rows // 4)

    @property
    def blocks_per_sm(self):
        """How many blocks the registers allow."""
        return max(1, 65536 // (255 * self.threads))


class FewTile(NamedTuple):
    """A kernel for few rows; fields as in Tile."""

    head_dim: int
    element: str
    stages: int = 2
    block_size: int = 16
    segment: int = SEGMENT

    @property
    def shared_bytes(self):
        lines = FEW_ROWS + 2 * self.stages * KEYS
        return lines * pitch_of(self.head_dim) + FEW_ROWS * pitch_of(KEYS)


def padded(head_dim):
    """Columns that products see: a multiple of 16, zero beyond head_dim."""
    return -(-head_dim // 16) * 16


def pitch_of(columns):
    """Bytes from one line of 16-bit values to the next in shared memory, an odd number of 16."""
    return padded(columns) * 2 + CHUNK


@functools.cache
def copy_functions(head_dim, rows, threads, block_size):
    """(copy_rows, copy_keys): the device functions that start copies of rows of q, and of a tile of keys or values.

    A thread owns one chunk of every together-th line; where a line has no power of two of chunks, some have none.
    """
    chunks, real_chunks, pitch = padded(head_dim) // 8, head_dim // 8, pitch_of(head_dim)
    lanes = 1 << (chunks - 1).bit_length()
    together = threads // lanes
    row_passes = -(-rows // together)

    @device_function
    def copy_rows(target, source, first, alive, group, token_bytes, thread):
        """Rows first .. first + rows of a key head's matrix; zeros beyond the first `alive`.

        source: address of the first token's first query head of the key head; token_bytes: from one token to the next.
        """
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        for i in range(row_passes):
            row = i32(line + i32(i * together))
            if row < rows and chunk < chunks:
                token, head = (first + row) // group, (first + row) % group
                there = source + np.int64(token) * token_bytes + (head * head_dim * 2 + chunk * CHUNK)
                nbytes = i32(CHUNK) if row < alive and chunk < real_chunks else i32(0)
                copy_chunk(target + row * i32(pitch) + chunk * i32(CHUNK), there, nbytes)

    @device_function
    def copy_keys(target, source, table, at, first, end, row_bytes, thread):
        """Keys first .. first + KEYS of a key head; zeros from key `end` on. row_bytes: from one key to the next.

        source: address of the row of the first key, or of row 0 if keys are found by the table.
        """
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        if chunk < chunks:
            source += chunk * i32(CHUNK)
            target += line * i32(pitch) + chunk * i32(CHUNK)
            left = i32(end - first) if chunk < real_chunks else i32(0)
            if not block_size:
                source += np.int64(line) * row_bytes
            for i in range(KEYS // together):
                exists = i32(line + i32(i * together)) < left
                there = source
                if block_size and exists:
                    key = i32(first + i32(line + i32(i * together)))
                    row = i32(table[at + key // i32(block_size)] * i32(block_size) + key % i32(block_size))
                    there += np.int64(row) * row_bytes
                copy_chunk(target + i * together * pitch, there, i32(CHUNK) if exists else i32(0))
                if not block_size:
                    source += np.int64(together) * row_bytes

    return copy_rows, copy_keys


@functools.cache
def fragment_functions(columns):
    """(load_rows, load_lines, load_values): the device functions that load fragments of lines of `columns` values."""
    pitch = pitch_of(columns)

    @device_function
    def load_rows(words, first, place, step, lane):
        """16 lines of A at `place`: 16 columns from 16 step on."""
        at = place + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        load_fragment(words, first, at + step * 2 * CHUNK)

    @device_function
    def load_lines(words, first, place, step, lane):
        """16 lines of B at `place`: 16 columns from 16 step on."""
        line = (lane & i32(7)) | ((lane >> i32(4)) << i32(3))
        at = place + line * i32(pitch) + ((lane >> i32(3)) & i32(1)) * i32(CHUNK)
        load_fragment(words, first, at + step * 2 * CHUNK)

    @device_function
    def load_values(words, first, place, step, lane):
        """16 columns of B, from 16 step on, whose k are the 16 lines at `place`."""
        at = place + (lane & i32(15)) * i32(pitch) + (lane >> i32(4)) * i32(CHUNK)
        load_fragment_across(words, first, at + step * 2 * CHUNK)

    return load_rows, load_lines, load_values


@device_function
def moved(reference, largest, c):
    """The value that a row's scores are held against after a tile with this largest score."""
    candidate = largest * c
    return candidate if candidate > reference + RESCALE_THRESHOLD else reference


@device_function
def subtracted(reference):
    """What scores have subtracted: a row that has seen no key yet has nothing, since -inf - -inf would be NaN."""
    return reference if reference > MINUS_INFINITY else f32(0.0)


@device_function
def quad_max(value):
    """The largest of four neighbouring lanes."""
    value = max(value, shuffle_xor(value, 1))
    return max(value, shuffle_xor(value, 2))


@device_function
def quad_sum(value):
    """The sum over four neighbouring lanes, the same bits in each."""
    value += shuffle_xor(value, 1)
    return value + shuffle_xor(value, 2)


@device_function
def merge_weights(kept, new):
    """(m, a, b) of two parts of a row's keys: the common reference, and the weights of the first and the second."""
    largest = max(kept, new)
    reference = subtracted(largest)
    return largest, exp2(kept - reference), exp2(new - reference)


@device_function
def take_slot(taken):
    """The number of a slot that no other block uses; the caller gives it back by writing 0."""
    slot = i32(processor() % i32(taken.shape[0]))
    while cuda.atomic.cas(taken, slot, i32(0), i32(1)) != 0:
        slot = i32(i32(slot + i32(1)) % i32(taken.shape[0]))
    return slot


@functools.cache
def softmax_functions(blocks):
    """(hide, online_softmax_step): the device functions from scores to probabilities, for `blocks` times 16 rows of
    a warp."""

    @device_function
    def hide(scores, room):
        """Scores beyond their rows become -inf. room[row]: its position less the lane's first key of the tile."""
        for i in range(blocks):
            for block in range(KEYS // 8):
                for j in range(4):
                    if block * 8 + j % 2 > room[2 * i + j // 2]:
                        scores[(i * (KEYS // 8) + block) * 4 + j] = MINUS_INFINITY

    @device_function
    def online_softmax_step(scores, reference, sums, shrink, c):
        """A tile's scores become probabilities relative to their rows' reference, which may move; see the top."""
        for i in range(blocks):
            for half in range(2):
                row = 2 * i + half
                at = i * (KEYS // 2) + 2 * half
                largest = scores[at]
                for block in range(KEYS // 8):
                    largest = max(largest, max(scores[at + 4 * block], scores[at + 4 * block + 1]))
                new = moved(reference[row], quad_max(largest), c)
                less = subtracted(new)
                shrink[row] = exp2(reference[row] - less)
                reference[row] = new
                for block in range(KEYS // 8):
                    for j in range(2):
                        scores[at + 4 * block + j] = exp2(cuda.fma(scores[at + 4 * block + j], c, -less))
                first = sixteen(scores, at) + sixteen(scores, at + 8)
                second = sixteen(scores, at + 16) + sixteen(scores, at + 24)
                sums[row] = cuda.fma(sums[row], shrink[row], first + second)

    return hide, online_softmax_step


@device_function
def sixteen(p, at):
    """A lane's share of the sum over 16 keys."""
    return (p[at] + p[at + 1]) + (p[at + 4] + p[at + 5])


@specialize
def sm80_attention_kernel(tile):
    """The kernel of a Tile."""
    head_dim, element, warps, warp_rows, stages, keeps_q, block_size, segment = tile
    threads, rows, pitch = tile.threads, tile.rows, pitch_of(head_dim)
    steps, blocks = padded(head_dim) // 16, warp_rows // 16
    row_count, score_count, acc_count = 2 * blocks, blocks * KEYS // 2, tile.accumulators
    q_words = 4 * blocks * (steps if keeps_q else 1)
    keys_at = 0 if keeps_q else rows * pitch
    tile_bytes, values_at = KEYS * pitch, keys_at + stages * KEYS * pitch
    segment_tiles = segment // KEYS
    copy_rows, copy_keys = copy_functions(head_dim, rows, threads, block_size)
    load_rows, load_lines, load_values = fragment_functions(head_dim)
    hide, online_softmax_step = softmax_functions(blocks)
    add_product, pack_two = multiply(element), cvt_pack(element)
    wait_for_tile, wait_for_all = copies_wait(2 * (stages - 1)), copies_wait(0)
    out_chunks, kept_floats = head_dim // 8, tile.kept_floats

    @device_function
    def score(scores, q_fragments, q_place, keys, lane):
        """scores = q k^T of a warp's rows and a tile of keys."""
        fragment = cuda.local.array(4, np.int32)
        for i in range(score_count):
            scores[i] = f32(0.0)
        for step in range(steps):
            if not keeps_q:
                for i in range(blocks):
                    load_rows(q_fragments, 4 * i, q_place + i * 16 * pitch, step, lane)
            for n in range(KEYS // 16):
                load_lines(fragment, 0, keys + n * 16 * pitch, step, lane)
                for i in range(blocks):
                    q_first = 4 * (step * blocks + i) if keeps_q else 4 * i
                    add_product(scores, (i * (KEYS // 16) + n) * 8, q_fragments, q_first, fragment, 0)

    @device_function
    def weigh(acc, probabilities, values, lane):
        """acc += p v of a warp's rows and a tile of values."""
        fragment = cuda.local.array(4, np.int32)
        words = cuda.local.array(q_words_of_tile, np.int32)
        for step in range(KEYS // 16):
            for i in range(blocks):
                for j in range(4):
                    at = (i * (KEYS // 16) + step) * 8 + 2 * j
                    words[4 * i + j] = pack_two(probabilities[at], probabilities[at + 1])
            for n in range(steps):
                load_values(fragment, 0, values + step * 16 * pitch, n, lane)
                for i in range(blocks):
                    add_product(acc, (i * steps + n) * 8, words, 4 * i, fragment, 0)

    q_words_of_tile = 4 * blocks

    @device_function
    def scale_rows(acc, factors):
        """Multiply each of a thread's rows of sums by its factor."""
        for i in range(blocks):
            for n in range(2 * steps):
                at = (i * 2 * steps + n) * 4
                acc[at] *= factors[2 * i]
                acc[at + 1] *= factors[2 * i]
                acc[at + 2] *= factors[2 * i + 1]
                acc[at + 3] *= factors[2 * i + 1]

    @device_function
    def place_in(kept, slot, thread):
        """The address at which a thread's part of a slot begins."""
        return address_of(kept) + (np.int64(slot) * (kept_floats // 4) + thread) * CHUNK

    @device_function
    def keep(kept, acc, reference, sums):
        """The first segment becomes the total, at `kept`: the address of a thread's place in global memory."""
        for n in range(acc_count // 4):
            write_four(kept + n * threads * CHUNK, acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
        for i in range(blocks):
            place = kept + (acc_count // 4 + i) * threads * CHUNK
            write_four(place, reference[2 * i], quad_sum(sums[2 * i]), reference[2 * i + 1], quad_sum(sums[2 * i + 1]))

    @device_function
    def merge(kept, acc, reference, sums):
        """Add a segment to the total."""
        for i in range(blocks):
            place = kept + (acc_count // 4 + i) * threads * CHUNK
            first_reference, first_sum, second_reference, second_sum = read_four(place)
            first_reference, a, b = merge_weights(first_reference, reference[2 * i])
            second_reference, c, d = merge_weights(second_reference, reference[2 * i + 1])
            first_sum = cuda.fma(quad_sum(sums[2 * i]), b, first_sum * a)
            second_sum = cuda.fma(quad_sum(sums[2 * i + 1]), d, second_sum * c)
            write_four(place, first_reference, first_sum, second_reference, second_sum)
            for n in range(2 * steps):
                at, place = (i * 2 * steps + n) * 4, kept + (i * 2 * steps + n) * threads * CHUNK
                first, second, third, fourth = read_four(place)
                first, second = cuda.fma(acc[at], b, first * a), cuda.fma(acc[at + 1], b, second * a)
                third, fourth = cuda.fma(acc[at + 2], d, third * c), cuda.fma(acc[at + 3], d, fourth * c)
                write_four(place, first, second, third, fourth)

    @device_function
    def fetch(kept, acc, reference, sums):
        """acc, reference and sums of the total."""
        for n in range(acc_count // 4):
            acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3] = read_four(kept + n * threads * CHUNK)
        for i in range(blocks):
            reference[2 * i], sums[2 * i], reference[2 * i + 1], sums[2 * i + 1] = read_four(
                kept + (acc_count // 4 + i) * threads * CHUNK
            )

    @device_function
    def finish(acc, reference, sums, own_place, out, lse, facts, heads, first, own_row, lane):
        """Write a warp's rows of out, which pass through shared memory at own_place, and of lse."""
        start, group, alive = facts[START], facts[GROUP], facts[ALIVE]
        kv_head = i32(cuda.blockIdx.x)
        for row in range(row_count):
            index = i32(own_row + i32(row * 8) + (lane >> i32(2)))
            if not block_size and (lane & i32(3)) == 0 and index < alive:
                index = i32(first + index)
                lse[kv_head * group + index % group, start + index // group] = cuda.fma(
                    reference[row], LN2, f32(math.log(sums[row]))
                )
            # A row without keys (an empty context) gives zeros.
            sums[row] = f32(1.0) / sums[row] if sums[row] != f32(0.0) else f32(0.0)
        scale_rows(acc, sums)
        own_words = own_place + (lane >> i32(2)) * i32(pitch) + ((lane & i32(3)) << i32(2))
        for i in range(blocks):
            for n in range(2 * steps):
                at, place = (i * 2 * steps + n) * 4, own_words + i * 16 * pitch + n * CHUNK
                store_word(place, pack_two(acc[at], acc[at + 1]))
                store_word(place + 8 * pitch, pack_two(acc[at + 2], acc[at + 3]))
        sync_warp()
        for index in range(lane, min(alive - own_row, i32(warp_rows)) * i32(out_chunks), 32):
            row, chunk = i32(index) // i32(out_chunks), i32(index) % i32(out_chunks)
            token, head = i32(first + own_row + row) // group, i32(first + own_row + row) % group
            head = np.int64(start + token) * heads + kv_head * group + head
            there = address_of(out) + head * (head_dim * 2) + chunk * CHUNK
            write_chunk(there, own_place + row * i32(pitch) + chunk * i32(CHUNK))

    @cuda.jit(launch_bounds=(threads, tile.blocks_per_sm))
    def sm80_attention_kernel(q, k, v, cu_seqlens, table, context_lens, max_blocks, scale, kept, taken, out, lse):
        """A block owns `rows` rows of a key head of a sequence, of which the last, which see the most keys, come first.

        k, v: (rows, HK, E). table: (B max_blocks,) and context_lens (B,) of the cache; unused of packed sequences, as
        is lse of the cache. kept (slots, kept_floats): totals over the segments before the present one, a slot
        for each block that has several; taken (slots,): 1 for a slot in use, 0 before and after the launch.
        """
        facts = cuda.shared.array(FACTS, np.int32)
        acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        q_fragments = cuda.local.array(q_words, np.int32)
        reference = cuda.local.array(row_count, np.float32)
        sums = cuda.local.array(row_count, np.float32)
        shrink = cuda.local.array(row_count, np.float32)
        room = cuda.local.array(row_count, np.int32)

        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head, sequence = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        first = i32(i32(cuda.gridDim.z - 1 - cuda.blockIdx.z) * i32(rows))
        heads, kv_heads = i32(q.shape[1]), i32(k.shape[1])
        group = heads // kv_heads
        start = cu_seqlens[sequence]
        length = i32(cu_seqlens[sequence + 1] - start)
        alive = min(i32(i32(length * group) - first), i32(rows))
        if alive <= 0:
            return
        context, at = length, i32(0)
        if block_size:
            context, at = context_lens[sequence], i32(sequence * i32(max_blocks))
        before = i32(context - length)
        visible = i32(i32(before + i32(i32(first + alive) - 1) // group) + 1)
        if context == 0:
            visible = i32(0)
        tiles = i32((visible + KEYS - 1) // KEYS)

        base = shared_address(cuda.shared.array(0, np.uint8))
        token_bytes, row_bytes = i32(heads * i32(head_dim * 2)), i32(kv_heads * i32(head_dim * 2))
        rows_at = np.int64(start) * token_bytes + kv_head * group * (head_dim * 2)
        k_source = address_of(k) + kv_head * (head_dim * 2)
        v_source = address_of(v) + kv_head * (head_dim * 2)
        if not block_size:
            k_source += np.int64(start) * row_bytes
            v_source += np.int64(start) * row_bytes
        own_row = warp * i32(warp_rows)
        own_place = base + own_row * i32(pitch)
        # The position of the warp's first row, whose others follow within warp_rows; none sees a key if there is none.
        nearest = i32(before + i32(first + own_row) // group) if own_row < alive else i32(-warp_rows)
        for row in range(row_count):
            reference[row], sums[row] = MINUS_INFINITY, f32(0.0)
        for i in range(acc_count):
            acc[i] = f32(0.0)

        if thread == 0:
            facts[START], facts[GROUP], facts[ALIVE], facts[BEFORE] = start, group, alive, before
        copy_rows(base, address_of(q) + rows_at, first, alive, group, token_bytes, thread)
        if keeps_q:
            copies_end()
            wait_for_all()
            cuda.syncthreads()
            for step in range(steps):
                for i in range(blocks):
                    load_rows(q_fragments, 4 * (step * blocks + i), own_place + i * 16 * pitch, step, lane)
            cuda.syncthreads()
        # Keys and values arrive in turn, one group of copies each: K0 V0 K1 V1 ... `stages` tiles ahead.
        # Packed keys lie one after the other, so their address moves with the tiles.
        next_tile = np.int64(0) if block_size else np.int64(KEYS) * row_bytes
        for ahead in range(stages):
            if ahead < tiles:
                copy_keys(
                    base + keys_at + ahead * tile_bytes, k_source, table, at, i32(ahead * KEYS), context, row_bytes,
                    thread,
                )  # fmt: skip
            copies_end()
            k_source += next_tile
            if ahead + 1 < stages:
                if ahead < tiles:
                    copy_keys(
                        base + values_at + ahead * tile_bytes, v_source, table, at, i32(ahead * KEYS), context,
                        row_bytes, thread,
                    )  # fmt: skip
                copies_end()
                v_source += next_tile
        stage = i32(0)
        for j in range(tiles):
            # The keys are here, and all warps have left the values of the tile before: their place takes others.
            wait_for_tile()
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages - 1))
            if ahead < tiles:
                place = i32(stage + i32(stages - 1))
                if place >= i32(stages):
                    place = i32(place - i32(stages))
                copy_keys(
                    base + values_at + place * i32(tile_bytes), v_source, table, at, i32(ahead * i32(KEYS)), context,
                    row_bytes, thread,
                )  # fmt: skip
            copies_end()
            v_source += next_tile
            tile_start = i32(i32(j) * i32(KEYS))
            busy = tile_start < i32(nearest + i32(warp_rows))
            if busy:
                score(scores, q_fragments, own_place, base + keys_at + stage * i32(tile_bytes), lane)
                if i32(tile_start + i32(KEYS - 1)) > nearest:
                    for row in range(row_count):
                        index = i32(i32(first + own_row) + i32(i32(row * 8) + (lane >> i32(2))))
                        position = i32(facts[BEFORE] + index // facts[GROUP])
                        room[row] = i32(i32(position - tile_start) - ((lane & i32(3)) << i32(1)))
                    hide(scores, room)
            # The values are here, and all warps have left the keys.
            wait_for_tile()
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages))
            if ahead < tiles:
                copy_keys(
                    base + keys_at + stage * i32(tile_bytes), k_source, table, at, i32(ahead * i32(KEYS)), context,
                    row_bytes, thread,
                )  # fmt: skip
            copies_end()
            k_source += next_tile
            if busy:
                online_softmax_step(scores, reference, sums, shrink, scale)
                shrinks = shrink[0] != f32(1.0)
                for row in range(1, row_count):
                    shrinks = shrinks or shrink[row] != f32(1.0)
                if ballot(shrinks) != 0:
                    scale_rows(acc, shrink)
                weigh(acc, scores, base + values_at + stage * i32(tile_bytes), lane)
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
            if tiles > segment_tiles and ((j + 1) % segment_tiles == 0 or j + 1 == tiles):
                if j + 1 == segment_tiles:
                    if thread == 0:
                        facts[SLOT] = take_slot(taken)
                    cuda.syncthreads()
                    keep(place_in(kept, facts[SLOT], thread), acc, reference, sums)
                else:
                    merge(place_in(kept, facts[SLOT], thread), acc, reference, sums)
                for row in range(row_count):
                    reference[row], sums[row] = MINUS_INFINITY, f32(0.0)
                for i in range(acc_count):
                    acc[i] = f32(0.0)
        wait_for_all()
        if tiles > segment_tiles:
            fetch(place_in(kept, facts[SLOT], thread), acc, reference, sums)
        else:
            for row in range(row_count):
                sums[row] = quad_sum(sums[row])
        # A warp may still wait for its rows of q, whose place out takes now, or read what others may soon write.
        cuda.syncthreads()
        if tiles > segment_tiles and thread == 0:
            cuda.threadfence()
            cuda.atomic.exch(taken, facts[SLOT], i32(0))

        finish(acc, reference, sums, own_place, out, lse, facts, heads, first, own_row, lane)

    return sm80_attention_kernel


@specialize
def sm80_decode_kernel(tile):
    """The kernel of a FewTile."""
    head_dim, element, stages, block_size, segment = tile
    threads, pitch, p_pitch = 32 * FEW_WARPS, pitch_of(head_dim), pitch_of(KEYS)
    steps = padded(head_dim) // 16
    q_words, own_steps = 4 * steps, -(-steps // FEW_WARPS)
    acc_count = 8 * own_steps
    keys_at, tile_bytes = FEW_ROWS * pitch, KEYS * pitch
    values_at = keys_at + stages * tile_bytes
    p_at = values_at + stages * tile_bytes
    segment_blocks, stat_count, share_count = segment // block_size, FEW_WARPS * FEW_ROWS, FEW_WARPS * FEW_ROWS * 4
    copy_rows, copy_keys = copy_functions(head_dim, FEW_ROWS, threads, block_size)
    load_rows, load_lines, load_values = fragment_functions(head_dim)
    load_probabilities, _, _ = fragment_functions(KEYS)
    add_product, pack_two = multiply(element), cvt_pack(element)
    wait_for_tile, wait_for_all = copies_wait(2 * (stages - 1)), copies_wait(0)
    out_chunks = head_dim // 8

    @cuda.jit(launch_bounds=(threads, 2))
    def sm80_decode_kernel(
        q, k, v, cu_seqlens, table, context_lens, max_blocks, segments, scale, partial, weights, out
    ):
        """A block owns 16 rows of a key head of a sequence and one segment of its keys.

        out is written where a sequence has one segment; else partial (segments N H, padded head_dim) and weights
        (segments N H, 2): a segment's acc, m and l.
        """
        blocks = cuda.shared.array(segment_blocks, np.int32)
        maxima = cuda.shared.array(stat_count, np.float32)
        shares = cuda.shared.array(share_count, np.float32)
        acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(8, np.float32)
        q_fragments = cuda.local.array(q_words, np.int32)
        fragment = cuda.local.array(4, np.int32)
        words = cuda.local.array(4, np.int32)
        reference = cuda.local.array(2, np.float32)
        sums = cuda.local.array(2, np.float32)
        shrink = cuda.local.array(2, np.float32)
        position = cuda.local.array(2, np.int32)

        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head, sequence = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        segment_index = i32(cuda.blockIdx.z % segments)
        first = i32(cuda.blockIdx.z // segments * FEW_ROWS)
        heads, kv_heads = i32(q.shape[1]), i32(k.shape[1])
        group = heads // kv_heads
        start = cu_seqlens[sequence]
        length = i32(cu_seqlens[sequence + 1] - start)
        alive = min(i32(i32(length * group) - first), i32(FEW_ROWS))
        if alive <= 0:
            return
        context = context_lens[sequence]
        before, begin = i32(context - length), i32(segment_index * i32(segment))
        visible = i32(i32(before + i32(i32(first + alive) - 1) // group) + 1) if context > 0 else i32(0)
        if segment_index > 0 and begin >= visible:
            return
        here = min(i32(visible - begin), i32(segment))
        tiles = i32((here + KEYS - 1) // KEYS)

        base = shared_address(cuda.shared.array(0, np.uint8))
        token_bytes, row_bytes = i32(heads * i32(head_dim * 2)), i32(kv_heads * i32(head_dim * 2))
        rows_at = np.int64(start) * token_bytes + kv_head * group * (head_dim * 2)
        k_source = address_of(k) + kv_head * (head_dim * 2)
        v_source = address_of(v) + kv_head * (head_dim * 2)
        for i in range(thread, (here + block_size - 1) // block_size, threads):
            blocks[i] = table[sequence * max_blocks + (begin // block_size + i)]
        copy_rows(base, address_of(q) + rows_at, first, alive, group, token_bytes, thread)
        cuda.syncthreads()
        for half in range(2):
            reference[half], sums[half] = MINUS_INFINITY, f32(0.0)
            position[half] = i32(before + i32(first + i32(half * 8) + (lane >> i32(2))) // group)
        for i in range(acc_count):
            acc[i] = f32(0.0)
        for ahead in range(stages):
            if ahead < tiles:
                place = base + keys_at + ahead * tile_bytes
                copy_keys(place, k_source, blocks, i32(0), i32(ahead * KEYS), here, row_bytes, thread)
            copies_end()
            if ahead + 1 < stages:
                if ahead < tiles:
                    place = base + values_at + ahead * tile_bytes
                    copy_keys(place, v_source, blocks, i32(0), i32(ahead * KEYS), here, row_bytes, thread)
                copies_end()
        wait_for_tile()
        cuda.syncthreads()
        for step in range(steps):
            load_rows(q_fragments, 4 * step, base, step, lane)
        stage = i32(0)
        for j in range(tiles):
            # As in the kernel for many rows; between, the warps exchange maxima and probabilities.
            wait_for_tile()
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages - 1))
            if ahead < tiles:
                place = i32(stage + i32(stages - 1))
                if place >= i32(stages):
                    place = i32(place - i32(stages))
                place_at = base + values_at + place * i32(tile_bytes)
                copy_keys(place_at, v_source, blocks, i32(0), i32(ahead * i32(KEYS)), here, row_bytes, thread)
            copies_end()
            keys = base + keys_at + stage * i32(tile_bytes) + warp * i32(16 * pitch)
            for i in range(8):
                scores[i] = f32(0.0)
            for step in range(steps):
                load_lines(fragment, 0, keys, step, lane)
                add_product(scores, 0, q_fragments, 4 * step, fragment, 0)
            key = i32(begin + i32(i32(j) * i32(KEYS))) + warp * i32(16) + ((lane & i32(3)) << i32(1))
            for half in range(2):
                for block in range(2):
                    for i in range(2):
                        if key + block * 8 + i > position[half]:
                            scores[4 * block + 2 * half + i] = MINUS_INFINITY
                at = 2 * half
                largest = quad_max(max(max(scores[at], scores[at + 1]), max(scores[at + 4], scores[at + 5])))
                if lane & i32(3) == 0:
                    maxima[warp * FEW_ROWS + half * 8 + (lane >> i32(2))] = largest
            cuda.syncthreads()
            for half in range(2):
                row = half * 8 + (lane >> i32(2))
                largest = maxima[row]
                for other in range(1, FEW_WARPS):
                    largest = max(largest, maxima[other * FEW_ROWS + row])
                new = moved(reference[half], largest, scale)
                less = subtracted(new)
                shrink[half] = exp2(reference[half] - less)
                reference[half] = new
                for block in range(2):
                    for i in range(2):
                        at = 4 * block + 2 * half + i
                        scores[at] = exp2(cuda.fma(scores[at], scale, -less))
                    word = pack_two(scores[4 * block + 2 * half], scores[4 * block + 2 * half + 1])
                    store_word(
                        base + p_at + row * p_pitch + warp * i32(32) + block * CHUNK + ((lane & i32(3)) << i32(2)), word
                    )
                shares[(warp * FEW_ROWS + row) * 4 + (lane & i32(3))] = sixteen(scores, 2 * half)
            wait_for_tile()
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages))
            if ahead < tiles:
                place_at = base + keys_at + stage * i32(tile_bytes)
                copy_keys(place_at, k_source, blocks, i32(0), i32(ahead * i32(KEYS)), here, row_bytes, thread)
            copies_end()
            for half in range(2):
                at = (half * 8 + (lane >> i32(2))) * 4 + (lane & i32(3))
                low = shares[at] + shares[at + 4 * FEW_ROWS]
                high = shares[at + 8 * FEW_ROWS] + shares[at + 12 * FEW_ROWS]
                sums[half] = cuda.fma(sums[half], shrink[half], low + high)
            for i in range(own_steps):
                for block in range(2):
                    for e in range(4):
                        acc[8 * i + 4 * block + e] *= shrink[e // 2]
            values = base + values_at + stage * i32(tile_bytes)
            for step in range(KEYS // 16):
                load_probabilities(words, 0, base + p_at, step, lane)
                for i in range(own_steps):
                    n = warp * own_steps + i
                    if n < steps:
                        load_values(fragment, 0, values + step * 16 * pitch, n, lane)
                        add_product(acc, 8 * i, words, 0, fragment, 0)
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()

        for half in range(2):
            sums[half] = quad_sum(sums[half])
            row = i32(half * 8) + (lane >> i32(2))
            token, head = i32(first + row) // group, kv_head * group + i32(first + row) % group
            inverse = f32(1.0) / sums[half] if sums[half] != f32(0.0) else f32(0.0)
            for i in range(own_steps):
                n = warp * own_steps + i
                for block in range(2):
                    at, column = 8 * i + 4 * block + 2 * half, n * 16 + block * 8 + 2 * (lane & i32(3))
                    if n < steps and visible <= segment:
                        word = pack_two(acc[at] * inverse, acc[at + 1] * inverse)
                        store_word(base + row * i32(pitch) + column * 2, word)
                    elif n < steps and row < alive:
                        index = (segment_index * q.shape[0] + start + token) * heads + head
                        partial[index, column] = acc[at]
                        partial[index, column + 1] = acc[at + 1]
                        if column == 0:
                            weights[index, 0] = reference[half]
                            weights[index, 1] = sums[half]
        if visible <= segment:
            cuda.syncthreads()
            for index in range(thread, alive * i32(out_chunks), threads):
                row, chunk = i32(index) // i32(out_chunks), i32(index) % i32(out_chunks)
                token, head = i32(first + row) // group, i32(first + row) % group
                there = address_of(out) + rows_at + np.int64(token) * token_bytes + head * (head_dim * 2)
                write_chunk(there + chunk * CHUNK, base + row * i32(pitch) + chunk * i32(CHUNK))

    return sm80_decode_kernel


@specialize
def merge_segments_kernel(segment):
    """The kernel that merges what sm80_decode_kernel left for sequences with several segments."""

    @cuda.jit
    def merge_segments_kernel(cu_seqlens, context_lens, group, partial, weights, out):
        """A block owns a query head of a token, a thread columns of it; segments in ascending order."""
        head, sequence, token = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        start = cu_seqlens[sequence]
        length = cu_seqlens[sequence + 1] - start
        if token >= length:
            return
        # The last row of the block of rows that this one belonged to decides.
        first = (token * group + head % group) // FEW_ROWS * FEW_ROWS
        last = min(first + FEW_ROWS, length * group) - 1
        segments = (context_lens[sequence] - length + last // group) // segment + 1
        if context_lens[sequence] == 0 or segments < 2:
            return
        tokens, heads, head_dim = out.shape
        for column in range(cuda.threadIdx.x, head_dim, cuda.blockDim.x):
            index = (start + token) * heads + head
            total, reference, total_sum = partial[index, column], weights[index, 0], weights[index, 1]
            for _ in range(1, segments):
                index += tokens * heads
                reference, a, b = merge_weights(reference, weights[index, 0])
                total_sum = cuda.fma(weights[index, 1], b, total_sum * a)
                total = cuda.fma(partial[index, column], b, total * a)
            out[start + token, head, column] = narrow(total * (f32(1.0) / total_sum), out)

    return merge_segments_kernel


@functools.cache
def many_rows(head_dim, element, block_size, limit):
    """The Tile for a head_dim on a GPU whose blocks may have `limit` bytes of shared memory.

    Rows of 32 a warp read keys and values from shared memory half as often as rows of 16, and need twice the
    registers: they are chosen where two blocks fit an SM and nothing spills.
    """
    wide = Tile(head_dim, element, 4, 32, block_size=block_size)
    # ptxas spills at 80 columns for sm_120, whose blocks have 99 KB.
    widest = 64 if limit < 128 * 1024 else 96 if block_size else 128
    if padded(head_dim) <= widest and 2 * (wide.shared_bytes + BLOCK_BYTES) <= limit + SYSTEM_BYTES:
        return wide
    if padded(head_dim) <= 128:
        return Tile(head_dim, element, 4, 16, keeps_q=True, block_size=block_size)
    tile = Tile(head_dim, element, 4, 16, block_size=block_size)
    return tile if tile.shared_bytes + BLOCK_BYTES <= limit else tile._replace(warps=2)


@functools.cache
def few_rows(head_dim, element, block_size, limit):
    """The FewTile for a head_dim: as many stages, up to three, as leave place for two blocks an SM."""
    for stages in (3, 2):
        tile = FewTile(head_dim, element, stages, block_size)
        if 2 * (tile.shared_bytes + FEW_BLOCK_BYTES) <= limit + SYSTEM_BYTES:
            return tile
    return FewTile(head_dim, element, 1, block_size)


_slots = {}


def slots_for(tile, longest):
    """(kept, taken) for sm80_attention_kernel: empty ones if no sequence has more than one segment."""
    key = tile.kept_floats if longest > tile.segment else 0
    if key not in _slots:
        xp, count = device.xp(), processors() * tile.blocks_per_sm if key else 1
        _slots[key] = xp.empty((count, max(key, 1)), np.float32), xp.zeros(count, np.int32)
    return _slots[key]


_partials = []


def partials_for(rows, columns):
    """(partial (rows, columns), weights (rows, 2)) for decode, float32, anywhere in an array that grows with need.

    Earlier arrays stay, since captured graphs know their addresses.
    """
    count = rows * (columns + 2)
    if not _partials or _partials[-1].size < count:
        _partials.append(device.xp().empty(count, np.float32))
    flat = _partials[-1]
    return flat[: rows * columns].reshape(rows, columns), flat[rows * columns : count].reshape(rows, 2)


def reserve(element, kv_heads, group, head_dim, block_size, calls):
    """Have arrays for partial results from which all `calls` of paged_attend are served, and return their bytes.

    calls: of each (sequences, tokens, max_seqlen_q, max_context_len), as bounds. What was there before stays, in case
    a graph knows it.
    """
    few, many = (choose(head_dim, element, block_size, shared_limit()) for choose in (few_rows, many_rows))
    rows = 1
    for sequences, tokens, max_seqlen_q, max_context_len in calls:
        segments = -(-max_context_len // few.segment)
        if segments > 1:
            # A sequence with more queries than this is not decode's.
            most = min(max_seqlen_q, FEW_ROWS // group)
            rows = max(rows, segments * min(tokens, sequences * most) * group * kv_heads)
        # Steps with short contexts have their own.
        for longest in (0, max_context_len):
            slots_for(many, longest)
    partials_for(rows, padded(head_dim))
    held = [*_partials, *(array for pair in _slots.values() for array in pair)]
    return sum(array.nbytes for array in held)


def takes(element, head_dim, group):
    """Whether this module and the gradient's compute attention of such heads: 16-bit, of 8, 16, ... or 256 columns.

    group: query heads of a key head, any number.
    """
    return element in ELEMENTS and head_dim % 8 == 0 and 0 < head_dim <= 256 and group > 0


def attend(q, k, v, cu_seqlens, max_seqlen, scale, out, lse, tile=None):
    """attention() of kernels/attention/ops.py, for heads that `takes` accepts and scale > 0.

    tile: by default what many_rows chooses.
    """
    tile = tile or many_rows(q.shape[2], q.dtype.name, 0, shared_limit())
    group = q.shape[1] // k.shape[1]
    unused = _nothing(1)
    launch(
        sm80_attention_kernel(tile),
        (k.shape[1], cu_seqlens.shape[0] - 1, -(-max_seqlen * group // tile.rows)),
        tile.threads,
        q, k, v, cu_seqlens, unused, unused, 0, float(scale * LOG2_E), *slots_for(tile, max_seqlen), out, lse,
        shared=tile.shared_bytes,
    )  # fmt: skip


def paged_attend(
    q, k, v, block_size, block_tables, cu_seqlens, context_lens, max_seqlen_q, max_context_len, scale, out, tile=None
):
    """paged_attention() of kernels/attention/paged.py, for heads that `takes` accepts and scale > 0.

    k, v: the cache as (blocks * block_size, HK, E). tile: a Tile or a FewTile; by default decode's for up to
    FEW_ROWS rows of a key head. The grid follows from shapes, max_seqlen_q and max_context_len alone. Raises
    ValueError for a block_size that does not divide SEGMENT.
    """
    if SEGMENT % block_size:
        raise ValueError(f"paged_attention: block_size must divide {SEGMENT}, got {block_size}")
    (tokens, heads, head_dim), kv_heads, sequences = q.shape, k.shape[1], context_lens.shape[0]
    group, max_blocks = heads // kv_heads, block_tables.shape[1]
    if tile is None:
        choose = few_rows if max_seqlen_q * group <= FEW_ROWS else many_rows
        tile = choose(head_dim, q.dtype.name, block_size, shared_limit())
    table, scale = block_tables.reshape(-1), float(scale * LOG2_E)
    if isinstance(tile, Tile):
        launch(
            sm80_attention_kernel(tile),
            (kv_heads, sequences, -(-max_seqlen_q * group // tile.rows)),
            tile.threads,
            q, k, v, cu_seqlens, table, context_lens, max_blocks, scale, *slots_for(tile, max_context_len), out,
            _nothing(2),
            shared=tile.shared_bytes,
        )  # fmt: skip
        return
    segments = max(-(-max_context_len // tile.segment), 1)
    partial, weights = partials_for(segments * tokens * heads if segments > 1 else 1, padded(head_dim))
    launch(
        sm80_decode_kernel(tile),
        (kv_heads, sequences, -(-max_seqlen_q * group // FEW_ROWS) * segments),
        32 * FEW_WARPS,
        q, k, v, cu_seqlens, table, context_lens, max_blocks, segments, scale, partial, weights, out,
        shared=tile.shared_bytes,
    )  # fmt: skip
    if segments > 1:
        arguments = (cu_seqlens, context_lens, group, partial, weights, out)
        launch(merge_segments_kernel(tile.segment), (heads, sequences, max_seqlen_q), MERGE_THREADS, *arguments)


@functools.cache
def _nothing(dimensions):
    """An array of one element that stands for an argument left out: int32 with one dimension, else float32."""
    return device.xp().zeros((1,) * dimensions, np.int32 if dimensions == 1 else np.float32)
