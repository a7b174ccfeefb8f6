"""RMSNorm (Zhang and Sennrich, 2019, eq. 4), forward and backward.

    rstd = 1 / sqrt(mean(x^2) + eps)        out = x * rstd * weight

    with g = dout * weight and x^ = x * rstd:
    dx = rstd * (g - x^ * mean(g * x^))     dweight = sum over rows of dout * x^

With unit_offset, 1 + weight takes the place of weight (Qwen3.5, Gemma).

x, out, dout, dx (N, D) and weight (D,) in float32, float16 or bfloat16; rstd (N,) and dweight (D,) float32, as is all
arithmetic. A row's sum of squares has one order whatever N is, so a row's result does not depend on the other rows.

Every array is read or written once: a row stays in the registers of its threads between the sum and the output. The
gradient of the weight is added up in two stages: a partial sum a block, then the blocks in a fixed order.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, check, check_all
from rlnumba.kernels.ptx.warp import (
    access_length,
    add_gradient,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    inverse_sqrt,
    shuffle_xor,
    vector_access,
    warp_sum,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32, u32 = np.int32, np.uint32

# Columns that a thread owns, and threads of a row at most; the widest rows give a thread of the backward more. This
# fixes the order of a row's sum. The backward keeps five values a column in registers.
# H200, forward of 16,384 x 1,024: 18.0 us with 16 columns a thread, 18.3 with 32, 18.1 with 8.
FORWARD, BACKWARD = (16, 1024), (8, 1024)
# In the backward 16 columns a thread, twice what fits into registers.
MAX_COLUMNS = 16_384
# Threads of a block where a row needs fewer: the block then has several rows; in the forward only beyond FEW_ROWS.
FORWARD_BLOCK, BACKWARD_BLOCK, FEW_ROWS = 128, 256, 1024
# Threads that an SM shall have at a time, which leaves each 64 registers.
RESIDENT_THREADS = 1024
# SMs of an H100 or H200: all blocks of the backward, each with a partial sum of dweight, are resident at once. Fixes
# the order of the sum on all GPUs. H200, 16,384 x 1,024: 39.6 us with 528 blocks, 51.9 where only 396 are resident.
PROCESSORS = 132
# Columns of a block that adds partial sums, 32 bytes of a row; its warps; rows that a thread loads before it adds.
PARTIAL_COLUMNS, PARTIAL_WARPS, PARTIAL_LOADS = 8, 32, 5
# The backward counts rows, and columns of partial sums, in 32 bits; element offsets have 64.
MOST_ROWS = 1 << 31


class RowLayout(NamedTuple):
    """A row's layout over threads: thread t owns the columns t * vector .. (t + 1) * vector - 1 of each chunk.

    A chunk is threads * vector columns. access: columns that one access to memory moves.
    """

    columns: int
    vector: int
    access: int
    threads: int

    @property
    def chunks(self):
        return -(-self.columns // (self.vector * self.threads))

    @property
    def full(self):
        return self.columns == self.chunks * self.vector * self.threads

    def resident(self, lines):
        """Blocks of `lines` rows that an SM shall have at a time: fewer where bounds checks need registers, too."""
        threads = RESIDENT_THREADS if self.full else RESIDENT_THREADS * 3 // 4
        return max(threads // (self.threads * lines), 1)


@functools.cache
def share_row(columns, itemsize, access, per_thread, max_threads):
    """The RowLayout of the fewest threads, a multiple of 32, that own at most per_thread columns each.

    Up to twice as many threads where each then owns the same number of columns.
    """
    vector = 16 // itemsize
    fewest = min(-(-columns // (32 * per_thread)) * 32, max_threads)
    even = (t for t in range(fewest, min(2 * fewest, max_threads) + 1, 32) if columns % (t * vector) == 0)
    return RowLayout(columns, vector, access, next(even, fewest))


@functools.cache
def square_sum_function(chunks, vector):
    """The device function that adds up the squares of a thread's elements of a row."""

    @device_function
    def square_sum(values, at):
        """The sum of squares of values[at : at + chunks * vector]: a chunk's columns ascending, then the chunks."""
        chunk_squares = cuda.local.array(chunks, np.float32)
        for chunk in range(chunks):
            chunk_squares[chunk] = np.float32(0.0)
            for i in range(chunk * vector, (chunk + 1) * vector):
                chunk_squares[chunk] += values[at + i] * values[at + i]
        squares = chunk_squares[0]
        for chunk in range(1, chunks):
            squares += chunk_squares[chunk]
        return squares

    return square_sum


@functools.cache
def normalise_function(layout):
    """The device function that normalises a row of a RowLayout, of which each thread has its columns."""
    chunks, vector, warps = layout.chunks, layout.vector, layout.threads // 32
    columns, square_sum = layout.columns, square_sum_function(chunks, vector)

    @device_function
    def normalise(values, weights, eps, sums):
        """values *= rstd * weights; returns rstd. sums: float32 of shared memory, one for each warp of the row.

        Sum of squares: a thread over its columns, those of a chunk ascending, then the chunks; then a butterfly within
        each warp; then the warps in order.
        """
        squares = square_sum(values, 0)
        squares = warp_sum(squares)
        if warps > 1:
            if cuda.threadIdx.x % 32 == 0:
                sums[cuda.threadIdx.x // 32] = squares
            cuda.syncthreads()
            squares = sums[0]
            for warp in range(1, warps):
                squares += sums[warp]
        rstd = inverse_sqrt(squares / np.float32(columns) + eps)
        for i in range(chunks * vector):
            values[i] = values[i] * rstd * weights[i]
        return rstd

    return normalise


@functools.cache
def add_one_function(count):
    """The device function that adds 1 to `count` values."""

    @device_function
    def add_one(values):
        for i in range(count):
            values[i] += np.float32(1.0)

    return add_one


@specialize
def rmsnorm_kernel(layout, few_rows, unit_offset):
    """The kernel for rows of a RowLayout. few_rows: launched with PDL, it loads the weight before griddepcontrol.wait.

    With 16,384 rows this order costs 3 us.
    """
    _, vector, access, threads = layout
    chunks, values_count = layout.chunks, layout.chunks * vector
    load, store = vector_access(vector, access, not layout.full)
    normalise, add_one = normalise_function(layout), add_one_function(values_count)
    # Narrow accesses need more registers for addresses, and are slow anyway.
    resident = max(RESIDENT_THREADS // max(threads, FORWARD_BLOCK), 1) if access == vector else 1

    @cuda.jit(launch_bounds=(max(threads, FORWARD_BLOCK), resident))
    def rmsnorm_kernel(x, weight, eps, out, rstd):
        """`threads` threads own a row, which they read once. A block owns blockDim.y rows."""
        sums = cuda.shared.array(32, np.float32)
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if row >= x.shape[0]:
            return
        first = cuda.threadIdx.x * vector
        x_row, out_row = x[row], out[row]
        values, weights = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        if few_rows:
            # No kernel that may still run writes the weight.
            for chunk in range(chunks):
                load(weight, first + chunk * threads * vector, weights, chunk * vector)
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()
        for chunk in range(chunks):
            load(x_row, first + chunk * threads * vector, values, chunk * vector)
        if not few_rows:
            for chunk in range(chunks):
                load(weight, first + chunk * threads * vector, weights, chunk * vector)
        if unit_offset:
            add_one(weights)
        scale = normalise(values, weights, eps, sums)
        for chunk in range(chunks):
            store(out_row, first + chunk * threads * vector, values, chunk * vector)
        if cuda.threadIdx.x == 0:
            rstd[row] = scale

    return supports_pdl(rmsnorm_kernel) if few_rows else rmsnorm_kernel


@specialize
def rmsnorm_backward_kernel(layout, lines, unit_offset):
    """The kernel for rows of a RowLayout, of which a block has `lines` at a time."""
    columns, vector, access, threads = layout
    chunks, values_count, warps = layout.chunks, layout.chunks * vector, threads // 32
    exchange_threads = max((lines - 1) * threads, 1)
    load, store = vector_access(vector, access, not layout.full)
    add_one = add_one_function(values_count)
    # Narrow accesses need more registers for addresses, and are slow anyway.
    resident = layout.resident(lines) if access == vector else 1

    @supports_pdl
    @cuda.jit(launch_bounds=(threads * lines, resident))
    def rmsnorm_backward_kernel(dout, x, weight, rstd, accumulate, dx, partials):
        """`threads` threads own a row, which they read once; the block owns every gridDim-th batch of `lines` rows.

        mean(g x^): a thread over its columns, ascending; then a butterfly within each warp; then the warps in order.
        A thread adds its columns of dout * x^ over its rows in registers, without float atomics; then the lines are
        added in order, and the block writes its row of partials (blocks, D).
        """
        sums = cuda.shared.array((2, 32), np.float32)
        exchange = cuda.shared.array((values_count, exchange_threads), np.float32)
        griddepcontrol_wait()
        # Indices of 32 bits, and unsigned rows: no check for a negative index.
        thread, line, rows = i32(cuda.threadIdx.x), i32(cuda.threadIdx.y), i32(x.shape[0])
        first = i32(thread * vector)
        weights, dweight = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        upstream, values = cuda.local.array(values_count, np.float32), cuda.local.array(values_count, np.float32)
        before = cuda.local.array(values_count, np.float32)
        for i in range(values_count):
            dweight[i] = np.float32(0.0)
        for chunk in range(chunks):
            load(weight, first + chunk * threads * vector, weights, chunk * vector)
        if unit_offset:
            add_one(weights)
        parity, top = i32(0), i32(cuda.blockIdx.x * lines)
        while top < rows:
            # All lines reach the barrier; one without a row computes the last row again and discards it.
            row = u32(min(i32(top + line), i32(rows - 1)))
            dout_row, x_row, dx_row = dout[row], x[row], dx[row]
            for chunk in range(chunks):
                load(dout_row, first + chunk * threads * vector, upstream, chunk * vector)
                load(x_row, first + chunk * threads * vector, values, chunk * vector)
            for i in range(values_count):
                before[i] = np.float32(0.0)
            # Not of the row that is computed again, whose owner may be storing it.
            if accumulate and i32(row) == i32(top + line):
                for chunk in range(chunks):
                    load(dx_row, first + chunk * threads * vector, before, chunk * vector)
            scale = rstd[row]
            projection = np.float32(0.0)
            for i in range(values_count):
                values[i] *= scale
                projection += upstream[i] * weights[i] * values[i]
            projection = warp_sum(projection)
            if warps > 1:
                if thread & i32(31) == 0:
                    sums[u32(parity), u32(line * warps + (thread >> i32(5)))] = projection
                cuda.syncthreads()
                projection = sums[u32(parity), u32(line * warps)]
                for warp in range(1, warps):
                    projection += sums[u32(parity), u32(line * warps + warp)]
                # Double buffer: a thread that writes this half again has passed the other half's barrier.
                parity = i32(1 - parity)
            projection /= np.float32(columns)
            if i32(row) == i32(top + line):
                for chunk in range(chunks):
                    for i in range(chunk * vector, (chunk + 1) * vector):
                        dweight[i] += upstream[i] * values[i]
                        values[i] = before[i] + scale * (upstream[i] * weights[i] - values[i] * projection)
                    store(dx_row, first + chunk * threads * vector, values, chunk * vector)
            top = i32(top + cuda.gridDim.x * lines)
        griddepcontrol_launch_dependents()
        if lines > 1:
            if line > 0:
                for i in range(values_count):
                    exchange[i, (line - 1) * threads + thread] = dweight[i]
            cuda.syncthreads()
            if line > 0:
                return
            for other in range(lines - 1):
                for i in range(values_count):
                    dweight[i] += exchange[i, other * threads + thread]
        for chunk in range(chunks):
            store(partials[cuda.blockIdx.x], first + chunk * threads * vector, dweight, chunk * vector)

    return rmsnorm_backward_kernel


@supports_pdl
@cuda.jit(launch_bounds=(32 * PARTIAL_WARPS, 1))
def add_partials_kernel(partials, total_rows, total, other_total):
    """total += the sum of the first total_rows rows of partials; other_total += that of the others, by blocks (x, 1).

    A block owns PARTIAL_COLUMNS columns, lane l column l % 8 of these. Lane l of warp w adds rows 4 w + l / 8, and so
    on in steps of 128; then the lanes of a column are added by a butterfly, then eight neighbouring warps in order,
    then these four by a butterfly.
    """
    sums = cuda.shared.array((PARTIAL_WARPS, PARTIAL_COLUMNS), np.float32)
    # 32 bits throughout: 64-bit offsets and checks for negative indices take longer than the sums.
    lane, warp, last_column = i32(cuda.threadIdx.x), i32(cuda.threadIdx.y), i32(partials.shape[1] - 1)
    top, rows = i32(0), i32(total_rows)
    if cuda.blockIdx.y == 1:
        top, rows, total = rows, i32(partials.shape[0]), other_total
    griddepcontrol_wait()
    column = u32(cuda.blockIdx.x * PARTIAL_COLUMNS + cuda.threadIdx.x)
    owns_column = cuda.threadIdx.y == 0 and cuda.threadIdx.x < PARTIAL_COLUMNS and column < u32(total.shape[0])
    before = value = np.float32(0.0)
    if owns_column:
        before = total[column]
    column_read = u32(min(i32(cuda.blockIdx.x * PARTIAL_COLUMNS + (lane & i32(PARTIAL_COLUMNS - 1))), last_column))
    step = PARTIAL_WARPS * 32 // PARTIAL_COLUMNS
    loaded = cuda.local.array(PARTIAL_LOADS, np.float32)
    top = i32(top + warp * (32 // PARTIAL_COLUMNS) + (u32(lane) // u32(PARTIAL_COLUMNS)))
    while top < rows:
        for i in range(PARTIAL_LOADS):
            loaded[i] = partials[u32(min(i32(top + i * step), i32(rows - 1))), column_read]
        for i in range(PARTIAL_LOADS):
            if i32(top + i * step) < rows:
                value += loaded[i]
        top = i32(top + step * PARTIAL_LOADS)
    value += shuffle_xor(value, 8)
    value += shuffle_xor(value, 16)
    if lane < PARTIAL_COLUMNS:
        sums[u32(warp), u32(lane)] = value
    cuda.syncthreads()
    if warp == 0:
        sum_column = u32(lane) % u32(PARTIAL_COLUMNS)
        first_warp = u32(u32(lane) - sum_column)
        value = sums[first_warp, sum_column]
        for other in range(1, PARTIAL_COLUMNS):
            value += sums[u32(first_warp + u32(other)), sum_column]
        value += shuffle_xor(value, 8)
        value += shuffle_xor(value, 16)
    if owns_column:
        total[column] = add_gradient(before, value)


def add_partials(partials, total, total_rows=None, other_total=None):
    """total += the sum of the rows of partials (blocks, D), float32; other_total += that of those from total_rows on.

    Launched with PDL after the kernel that writes the partials.
    """
    if total.size >= MOST_ROWS:
        raise ValueError(f"add_partials: total must have fewer than {MOST_ROWS} columns, got {total.size}")
    totals = (len(partials), total, total) if other_total is None else (total_rows, total, other_total)
    grid = -(-total.size // PARTIAL_COLUMNS), 1 if other_total is None else 2
    launch(add_partials_kernel, grid, (32, PARTIAL_WARPS), partials, *totals, pdl=ALWAYS)


def _check_rows(op, x, weight, rstd, **arrays):
    """(rows, columns) of x; arrays: those of the same shape and dtype."""
    rows, columns = check(op, "x", x, (None, None), FLOATS)
    if not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"{op}: rows must have 1 to {MAX_COLUMNS} columns, got {columns}")
    check(op, "weight", weight, (columns,), (x.dtype,))
    check(op, "rstd", rstd, (rows,), F32)
    check_all(op, (rows, columns), (x.dtype,), **arrays)
    return rows, columns


def _row_layout(budget, *arrays):
    columns = arrays[0].shape[-1]
    return share_row(columns, arrays[0].itemsize, access_length(columns, *arrays), *budget)


def rmsnorm(x, weight, eps, out, rstd, unit_offset=False):
    """out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), row by row; with unit_offset, of 1 + weight.

    x (N, D), weight (D,) of one floating dtype; out (N, D) of x's dtype and rstd (N,) float32 are written. Raises
    ValueError for other arrays, or more than MAX_COLUMNS columns. Source: Zhang and Sennrich 2019, eq. 4.
    """
    rows, _ = _check_rows("rmsnorm", x, weight, rstd, out=out)
    if device.name() == "cpu":
        out[...], rstd[...] = rmsnorm_ref(x, weight + 1 if unit_offset else weight, eps)
        return
    layout, few_rows = _row_layout(FORWARD, x, weight, out), rows <= FEW_ROWS
    # Only rows of one warp share a block: those of several use the block's barrier.
    lines = 1 if few_rows or layout.threads > 32 else FORWARD_BLOCK // 32
    kernel = rmsnorm_kernel(layout, few_rows, unit_offset)
    launch(kernel, -(-rows // lines), (layout.threads, lines), x, weight, float(eps), out, rstd)


def rmsnorm_backward(dout, x, weight, rstd, dx, dweight, accumulate=False, unit_offset=False):
    """The gradient of rmsnorm: dx = (or += if accumulate), dweight +=.

    dout, x, dx (N, D) and weight (D,) of one floating dtype; rstd (N,) of the forward; dweight (D,) float32, or None
    where the weight is not trained. Raises as rmsnorm, and for 2^31 rows.
    """
    rows, columns = _check_rows("rmsnorm_backward", x, weight, rstd, dout=dout, dx=dx)
    if dweight is not None:
        check("rmsnorm_backward", "dweight", dweight, (columns,), F32)
    if rows >= MOST_ROWS:
        raise ValueError(f"rmsnorm_backward: x must have fewer than {MOST_ROWS} rows, got {rows}")
    if device.name() == "cpu":
        weight = weight + 1 if unit_offset else weight
        row_gradient, weight_gradient = rmsnorm_backward_ref(dout, x, weight, rstd)
        dx[...] = dx + row_gradient if accumulate else row_gradient
        if dweight is not None:
            dweight += weight_gradient
        return
    layout = _row_layout(BACKWARD, dout, x, weight, dx)
    lines = max(BACKWARD_BLOCK // layout.threads, 1)
    blocks = min(-(-rows // lines), PROCESSORS * layout.resident(lines))
    partials = device.xp().empty((blocks, columns), np.float32)
    arguments = dout, x, weight, rstd, int(accumulate), dx, partials
    kernel = rmsnorm_backward_kernel(layout, lines, unit_offset)
    launch(kernel, blocks, (layout.threads, lines), *arguments, pdl=ALWAYS)
    if blocks and dweight is not None:
        add_partials(partials, dweight)


def rmsnorm_ref(x, weight, eps):
    """(out, rstd) of rmsnorm, in x's precision."""
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1) + x.dtype.type(eps))
    return x * rstd[:, None] * weight, rstd


def rmsnorm_backward_ref(dout, x, weight, rstd):
    """(dx, dweight) of rmsnorm, in x's precision."""
    normalised = x * rstd[:, None]
    g = dout * weight
    dx = rstd[:, None] * (g - normalised * np.mean(g * normalised, axis=-1, keepdims=True))
    return dx, np.sum(dout * normalised, axis=0)
