"""The A operand of a phase: rows that other blocks have written, brought to shared memory, normalised where need be.

In shared memory A has a panel of 8 lines of 128 bytes for each 64 columns, in the 128-byte swizzle; wgmma broadcasts
the eight rows of the batch to its 64. A vector is 8 elements, 16 bytes, four words.
"""

import functools

import numpy as np

from rlnumba.kernels.decoder.config import PANEL_BYTES
from rlnumba.kernels.decoder.exchange import load_1, load_2, load_4
from rlnumba.kernels.nn.rmsnorm import square_sum_function
from rlnumba.kernels.ptx.shared_memory import LINE, load_word, store_word, store_words
from rlnumba.kernels.ptx.sm90 import named_barrier_sync
from rlnumba.kernels.ptx.warp import (
    cvt_pack,
    cvt_unpack,
    device_function,
    float_as_int,
    int_as_float,
    inverse_sqrt,
    udiv,
    vector_access,
    warp_sum,
)
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.runtime.device import cuda

i32 = np.int32

# Elements, and words, of a vector.
VECTOR, WORDS = 8, 4
# The named barrier of the computing warps where sums of squares or A are complete.
COMPLETE = 3


@device_function
def vector_address(a, row, column):
    """Where the vector of columns column .. column + 7 of a row belongs in A."""
    panel, chunk = column >> i32(6), (column >> i32(3)) & i32(7)
    return a + panel * i32(PANEL_BYTES) + row * i32(LINE) + ((chunk ^ (row & i32(7))) << i32(4))


@functools.cache
def load_vectors_function(count):
    """The device function that loads `count` vectors from the exchange, up to four at the same time."""

    @device_function
    def load_vectors(exchange, indices, words):
        """words[4 i : 4 i + 4] = the vector at word indices[i]."""
        for i in range(count // 4):
            found = load_4(
                exchange, indices[4 * i], exchange, indices[4 * i + 1],
                exchange, indices[4 * i + 2], exchange, indices[4 * i + 3],
            )  # fmt: skip
            for j in range(16):
                words[16 * i + j] = found[j]
        if count % 4 >= 2:
            first = count // 4 * 4
            pair = load_2(exchange, indices[first], exchange, indices[first + 1])
            for j in range(8):
                words[4 * first + j] = pair[j]
        if count % 2:
            one = load_1(exchange, indices[count - 1])
            for j in range(4):
                words[4 * (count - 1) + j] = one[j]

    return load_vectors


@functools.cache
def norm_function(layout, rows, element):
    """(load_embeddings, load_hidden, normalise): the steps by which 128 threads write rmsnorm(x) to A.

    `layout.threads` threads own a row, as in rmsnorm_kernel; lines of them have neighbouring rows at the same time.
    """
    columns, threads, chunks = layout.columns, layout.threads, layout.chunks
    lines, warps = WARPGROUP // threads, threads // 32
    passes = -(-rows // lines)
    vectors = passes * chunks
    word_count, weight_count, row_count = vectors * WORDS, chunks * VECTOR, chunks * VECTOR
    load_vectors, square_sum = load_vectors_function(vectors), square_sum_function(chunks, VECTOR)
    load_four, _ = vector_access(WORDS, WORDS)
    pack_two, unpack_two = cvt_pack(element), cvt_unpack(element)

    @device_function
    def row_and_column(thread, vector):
        """The row, the last one where there is none, and the first column of one of a thread's vectors."""
        line = udiv(thread, threads)
        row = min(i32(vector // chunks * lines + line), i32(rows - 1))
        return row, i32((vector % chunks * threads + thread - line * threads) * VECTOR)

    @device_function
    def load_embeddings(embeddings, input_ids, words, thread):
        """words = the vectors of this thread of the tokens' embeddings."""
        for vector in range(vectors):
            row, column = row_and_column(thread, vector)
            index = np.int64(input_ids[row]) * (columns // 2) + (min(column, i32(columns - VECTOR)) >> i32(1))
            load_four(embeddings, index, words, vector * WORDS)

    @device_function
    def load_hidden(exchange, offset, words, thread):
        """As load_embeddings, of rows (rows, columns) that begin at word `offset` of the exchange."""
        indices = cuda.local.array(vectors, np.int32)
        for vector in range(vectors):
            row, column = row_and_column(thread, vector)
            indices[vector] = i32(offset + row * (columns // 2) + (min(column, i32(columns - VECTOR)) >> i32(1)))
        load_vectors(exchange, indices, words)

    @device_function
    def normalise(words, norms, weight_offset, eps, a, squares, thread):
        """Write the normalised rows to A. squares: shared memory; the caller synchronises before A is read."""
        weights, values = cuda.local.array(weight_count, np.float32), cuda.local.array(row_count, np.float32)
        loaded = cuda.local.array(WORDS, np.int32)
        for chunk in range(chunks):
            _, column = row_and_column(thread, chunk)
            load_four(norms, weight_offset + (min(column, i32(columns - VECTOR)) >> i32(1)), loaded, 0)
            for j in range(WORDS):
                low, high = unpack_two(loaded[j])
                weights[chunk * VECTOR + 2 * j], weights[chunk * VECTOR + 2 * j + 1] = low, high
        line = udiv(thread, threads)
        line_warp = (thread >> i32(5)) - line * i32(warps)
        for step in range(passes):
            unpack_row(words, step, values, thread)
            total = warp_sum(square_sum(values, 0))
            if thread & i32(31) == 0:
                store_word(squares + ((step * lines + line) * warps + line_warp) * 4, float_as_int(total))
        named_barrier_sync(COMPLETE, WARPGROUP)
        for step in range(passes):
            first = squares + (step * lines + line) * (warps * 4)
            total = int_as_float(load_word(first))
            for warp in range(1, warps):
                total += int_as_float(load_word(first + warp * 4))
            scale = inverse_sqrt(total / np.float32(columns) + eps)
            unpack_row(words, step, values, thread)
            for chunk in range(chunks):
                row, column = row_and_column(thread, step * chunks + chunk)
                for i in range(chunk * VECTOR, (chunk + 1) * VECTOR):
                    values[i] = values[i] * scale * weights[i]
                if column < columns and step * lines + line < rows:
                    first_value = chunk * VECTOR
                    store_words(
                        vector_address(a, row, column),
                        pack_two(values[first_value], values[first_value + 1]),
                        pack_two(values[first_value + 2], values[first_value + 3]),
                        pack_two(values[first_value + 4], values[first_value + 5]),
                        pack_two(values[first_value + 6], values[first_value + 7]),
                    )

    @device_function
    def unpack_row(words, step, values, thread):
        """values = a thread's elements of one of its rows, zeros beyond the last column."""
        for chunk in range(chunks):
            _, column = row_and_column(thread, chunk)
            for j in range(WORDS):
                low, high = unpack_two(words[(step * chunks + chunk) * WORDS + j])
                inside = column < columns
                values[chunk * VECTOR + 2 * j] = low if inside else np.float32(0.0)
                values[chunk * VECTOR + 2 * j + 1] = high if inside else np.float32(0.0)

    return word_count, load_embeddings, load_hidden, normalise


@functools.cache
def copy_function(rows, columns):
    """The device function that copies rows (rows, columns) of the exchange to A, by 128 threads."""
    vectors_of_row = columns // VECTOR
    total = rows * vectors_of_row
    # A batch of vectors is under way at the same time.
    at_once = min(-(-total // WARPGROUP), 4)
    at_once = 2 if at_once == 3 else at_once
    word_count, load_vectors = at_once * WORDS, load_vectors_function(at_once)

    @device_function
    def copy_rows(exchange, offset, a, thread):
        """offset: the word where the rows begin. The caller synchronises before A is read."""
        indices, words = cuda.local.array(at_once, np.int32), cuda.local.array(word_count, np.int32)
        first = thread
        while first < total:
            for i in range(at_once):
                indices[i] = i32(offset + min(i32(first + i * WARPGROUP), i32(total - 1)) * WORDS)
            load_vectors(exchange, indices, words)
            for i in range(at_once):
                vector = i32(first + i * WARPGROUP)
                if vector < total:
                    row = udiv(vector, vectors_of_row)
                    target = vector_address(a, row, i32((vector - row * vectors_of_row) * VECTOR))
                    store_words(target, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
            first = i32(first + at_once * WARPGROUP)

    return copy_rows
