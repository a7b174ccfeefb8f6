"""The A operand of a phase: rows that other blocks have written, loaded to shared memory, normalised where need be.

In shared memory A has a panel of 8 lines of 128 bytes for each 64 columns, in the 128-byte swizzle; wgmma broadcasts
the eight rows of the batch to its 64. A vector is 8 elements, 16 bytes, four words.
"""

import functools

import numpy as np

from rlnumba.kernels.decoder.config import PANEL_BYTES
from rlnumba.kernels.decoder.exchange import load_1, load_2, load_4, load_8
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
    """The address in A of the vector of columns column .. column + 7 of a row."""
    panel, chunk = column >> i32(6), (column >> i32(3)) & i32(7)
    return a + panel * i32(PANEL_BYTES) + row * i32(LINE) + ((chunk ^ (row & i32(7))) << i32(4))


@functools.cache
def load_vectors_function(count):
    """The device function that loads `count` vectors from the exchange, as many as possible at the same time."""
    at_once = next(size for size in (8, 4, 2, 1) if size <= count)
    rest = count % at_once
    load = {1: load_1, 2: load_2, 4: load_4, 8: load_8}[at_once]
    load_rest = load_vectors_function(rest) if rest else None

    @device_function
    def load_vectors(exchange, indices, first, words):
        """words[4 i : 4 i + 4] = the vector at word indices[i], i from `first` on."""
        for batch in range(count // at_once):
            i = first + batch * at_once
            if at_once == 8:
                found = load(
                    exchange, indices[i], exchange, indices[i + 1], exchange, indices[i + 2], exchange, indices[i + 3],
                    exchange, indices[i + 4], exchange, indices[i + 5], exchange, indices[i + 6], exchange,
                    indices[i + 7],
                )  # fmt: skip
            elif at_once == 4:
                found = load(
                    exchange, indices[i], exchange, indices[i + 1], exchange, indices[i + 2], exchange, indices[i + 3]
                )
            elif at_once == 2:
                found = load(exchange, indices[i], exchange, indices[i + 1])
            else:
                found = load(exchange, indices[i])
            for j in range(4 * at_once):
                words[4 * i + j] = found[j]
        if rest:
            load_rest(exchange, indices, first + count - rest, words)

    return load_vectors


@functools.cache
def norm_function(layout, rows, element):
    """(word_count, weight_words, load_embeddings, load_hidden, load_weights, normalise): how 128 threads write
    rmsnorm(x) to A. word_count, weight_words: lengths of their local arrays of int32.

    `layout.threads` threads own a row, as in rmsnorm_kernel; lines of them have neighbouring rows at the same time.
    """
    columns, threads, chunks = layout.columns, layout.threads, layout.chunks
    lines, warps = WARPGROUP // threads, threads // 32
    passes = -(-rows // lines)
    vectors = passes * chunks
    word_count, weight_words, row_count = vectors * WORDS, chunks * WORDS, chunks * VECTOR
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
        """words = the vectors of this thread of rows (rows, columns) that begin at word `offset` of the exchange."""
        indices = cuda.local.array(vectors, np.int32)
        for vector in range(vectors):
            row, column = row_and_column(thread, vector)
            indices[vector] = i32(offset + row * (columns // 2) + (min(column, i32(columns - VECTOR)) >> i32(1)))
        load_vectors(exchange, indices, 0, words)

    @device_function
    def load_weights(norms, offset, weights, thread):
        """weights: this thread's part of the norm's weight, from word `offset` on; before the activations are there."""
        for chunk in range(chunks):
            _, column = row_and_column(thread, chunk)
            load_four(norms, offset + (min(column, i32(columns - VECTOR)) >> i32(1)), weights, chunk * WORDS)

    @device_function
    def normalise(words, weights, eps, a, squares, thread):
        """Write the normalised rows to A. squares: shared memory; the caller synchronises before A is read."""
        values = cuda.local.array(row_count, np.float32)
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
                for j in range(WORDS):
                    low, high = unpack_two(weights[chunk * WORDS + j])
                    i = chunk * VECTOR + 2 * j
                    values[i], values[i + 1] = values[i] * scale * low, values[i + 1] * scale * high
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

    return word_count, weight_words, load_embeddings, load_hidden, load_weights, normalise


@functools.cache
def copy_function(rows, columns, part_columns):
    """The device function that copies part_columns of rows (rows, columns) of the exchange to A, by 128 threads."""
    vectors_of_row, vectors_of_part = columns // VECTOR, part_columns // VECTOR
    total = rows * vectors_of_part
    each = -(-total // WARPGROUP)
    at_once = next(size for size in (8, 4, 2, 1) if size <= each)
    batches, word_count, load_vectors = -(-each // at_once), at_once * WORDS, load_vectors_function(at_once)

    @device_function
    def copy_part(exchange, offset, a, part, thread):
        """offset: the word where the rows begin. The caller synchronises before A is read."""
        indices, words = cuda.local.array(at_once, np.int32), cuda.local.array(word_count, np.int32)
        first_vector = i32(part * vectors_of_part)
        for batch in range(batches):
            first = i32(batch * (at_once * WARPGROUP) + thread)
            for i in range(at_once):
                vector = min(i32(first + i * WARPGROUP), i32(total - 1))
                row = udiv(vector, vectors_of_part)
                column = i32(vector - row * vectors_of_part + first_vector)
                indices[i] = i32(offset + (row * vectors_of_row + column) * WORDS)
            load_vectors(exchange, indices, 0, words)
            for i in range(at_once):
                vector = i32(first + i * WARPGROUP)
                if vector < total:
                    row = udiv(vector, vectors_of_part)
                    column = i32((vector - row * vectors_of_part + first_vector) * VECTOR)
                    target = vector_address(a, row, column)
                    store_words(target, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])

    return copy_part
