"""GEMM of the cpu device, exact whatever else is in the batch.

Rollout and training must compute the same bits (a token's value may not depend on the rows around it), and no BLAS
promises that. So the order of every sum is written down here, in LLVM's vector operations (kernels/cpu/simd.py),
which the compiler may not reorder. `product`, out[m, n]: 16 partial sums, number l over k = l, l + 16, l + 32, ... in
ascending order, each step one fused multiply-add; then the halves are added, 16 -> 8 -> 4 -> 2 -> 1.

Its vectors lie along K, which both operands hold contiguously: nothing is packed or transposed, so one row (decode) and
a thousand (training) run the same instructions on each output. `outer_product` serves the gradients, whose operands lie
the other way; its vectors lie along the columns of the result.
"""

import os

import llvmlite.binding
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from rlnumba.kernels.cpu import simd

# libgomp's threads spin for milliseconds after a parallel loop. If BLAS wants the cores next, it waits out the
# spinning: on 2 cores a product here followed by np.matmul took 8.0 ms, and 2.1 ms with the spinning cut to
# microseconds. The shortest loops take 19 us either way. Read when the first parallel function is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Outputs that one pass over K keeps in registers, rows x columns. AVX-512 has 32 registers of 16 floats:
# 24 sums, 4 of x, up to 4 of the weight. Other targets hold 16 floats in two or four registers.
# Two Zen 5 cores, GFLOP/s of the product (OpenBLAS there: 250, and 130-155 with 16 rows):
#              1024x288x768  1000x288x32000  1024x1024x3072  16x288x768  16x288x32000
#   4 x 4               240             225             337         320           185
#   4 x 6               306             280             367         385           191
_WIDE = llvmlite.binding.get_host_cpu_features().get("avx512f", False)
TILE_ROWS, TILE_COLUMNS = (4, 6) if _WIDE else (2, 3)
# Fewer rows than TILE_ROWS go one by one, bound by reading the weight: 150 GB/s of it in cache, 80 from memory.
ROW_COLUMNS = 16 if _WIDE else 6
# A task owns a panel of the weight's rows and as many rows of x as stay in L2.
PANEL_COLUMNS = 96
X_FLOATS = 1 << 17
# The same for outer_product, rows x vectors of 16 columns; how many steps' rows of b stay in cache; rows of a
# task. One Zen 5 core, 1024x576x1536, dx and dweight in GFLOP/s: 6 x 4 233 and 243, 8 x 3 231 and 157, 4 x 6
# 205 and 176, OpenBLAS 128 and 127. AVX2 on the same core, 512x288x768: 4 x 1 121 and 110, 3 x 2 63 and 30.
OUTER_ROWS, OUTER_VECTORS = (6, 4) if _WIDE else (6, 1)
OUTER_STEPS = 256
OUTER_TASK_ROWS = 192
# Below this many multiplications (3 us of one core) a second core does not pay.
SERIAL_BELOW = 1 << 18


def _make_tile(rows, columns):
    """An intrinsic tile(x, w, out, m, n): out[m : m + rows, n : n + columns] of the product.

    A tile that reaches over the last row or column computes and writes that one again.
    """

    @intrinsic
    def tile(typingctx, x, w, out, m, n):
        def codegen(context, builder, signature, args):
            x, w, out = (simd.array_argument(context, builder, signature, args, i) for i in range(3))
            k = builder.extract_value(x.shape, 1)
            n_columns = builder.extract_value(out.shape, 1)

            row_indices = simd.clamped(builder, args[3], rows, builder.extract_value(out.shape, 0))
            column_indices = simd.clamped(builder, args[4], columns, n_columns)
            x_rows = [builder.gep(x.data, [builder.mul(i, k)], source_etype=simd.F32) for i in row_indices]
            w_rows = [builder.gep(w.data, [builder.mul(j, k)], source_etype=simd.F32) for j in column_indices]

            def step(sums, offset, mask):
                x_vectors = [simd.load(builder, row, offset, mask) for row in x_rows]
                w_vectors = [simd.load(builder, row, offset, mask) for row in w_rows]
                pairs = [(a, b) for a in x_vectors for b in w_vectors]
                return [simd.fma(builder, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

            whole = builder.and_(k, simd.I64(-simd.LANES))
            loop = simd.Loop(builder, simd.I64(0), whole, [simd.splat(simd.F32, 0.0)] * (rows * columns))
            loop.next(step(loop.carried, loop.index, None))
            remainder = simd.Loop(builder, whole, k, loop.carried)
            mask = simd.lanes_below(builder, builder.sub(k, remainder.index))
            remainder.next(step(remainder.carried, remainder.index, mask))
            targets = [(i, j) for i in row_indices for j in column_indices]
            for first in range(0, rows * columns, simd.LANES):
                group = remainder.carried[first : first + simd.LANES]
                totals, owners = simd.fold_all(builder, group)
                for lane, owner in enumerate(owners):
                    if owner < len(group):
                        i, j = targets[first + owner]
                        offset = builder.add(builder.mul(i, n_columns), j)
                        address = builder.gep(out.data, [offset], source_etype=simd.F32)
                        builder.store(builder.extract_element(totals, simd.I32(lane)), address)
            return context.get_dummy_value()

        return types.void(x, w, out, m, n), codegen

    return tile


_tile = _make_tile(TILE_ROWS, TILE_COLUMNS)
_row_tile = _make_tile(1, ROW_COLUMNS)


@numba.njit(cache=True)
def _product_part(x, w, out, m_start, m_stop, n_start, n_stop):
    if x.shape[0] < TILE_ROWS:
        for n in range(n_start, n_stop, ROW_COLUMNS):
            for m in range(m_start, m_stop):
                _row_tile(x, w, out, m, n)
    else:
        # The panel's few weight rows stay in the L1 cache while x passes by.
        for n in range(n_start, n_stop, TILE_COLUMNS):
            for m in range(m_start, m_stop, TILE_ROWS):
                _tile(x, w, out, m, n)


@numba.njit(cache=True, parallel=True)
def product(x, w, out):
    """out = x w^T: x (M, K), w (N, K), out (M, N) float32, C-contiguous."""
    m_total, k = x.shape
    n_total = w.shape[0]
    if m_total * n_total * k < SERIAL_BELOW:
        _product_part(x, w, out, 0, m_total, 0, n_total)
    else:
        m_step = max(X_FLOATS // k // TILE_ROWS, 1) * TILE_ROWS
        panels = (n_total + PANEL_COLUMNS - 1) // PANEL_COLUMNS
        for task in numba.prange((m_total + m_step - 1) // m_step * panels):
            m = task // panels * m_step
            n = task % panels * PANEL_COLUMNS
            _product_part(x, w, out, m, min(m + m_step, m_total), n, min(n + PANEL_COLUMNS, n_total))


def _make_outer_tile(masked):
    """An intrinsic for OUTER_ROWS x 16 OUTER_VECTORS outputs of outer_product, over steps start to stop.

    tile(a, a_row, a_step, b, out, i, j, start, stop, add): out[i:, j:] = the sum, begun from out if add is not 0.
    Rows beyond the last are the last again; columns beyond the last need `masked`.
    """

    @intrinsic
    def tile(typingctx, a, a_row, a_step, b, out, i, j, start, stop, add):
        def codegen(context, builder, signature, args):
            a, b, out = (simd.array_argument(context, builder, signature, args, position) for position in (0, 3, 4))
            a_row, a_step = args[1:3]
            i, j, start, stop, add = args[5:]
            columns = builder.extract_value(b.shape, 1)
            rows = simd.clamped(builder, i, OUTER_ROWS, builder.extract_value(out.shape, 0))
            offsets = [builder.add(j, simd.I64(v * simd.LANES)) for v in range(OUTER_VECTORS)]
            masks = [simd.lanes_below(builder, builder.sub(columns, o)) if masked else None for o in offsets]
            a_rows = [builder.gep(a.data, [builder.mul(row, a_row)], source_etype=simd.F32) for row in rows]
            out_rows = [builder.gep(out.data, [builder.mul(row, columns)], source_etype=simd.F32) for row in rows]
            targets = [(row, o, mask) for row in out_rows for o, mask in zip(offsets, masks, strict=True)]
            add = builder.icmp_signed("!=", add, simd.I64(0))
            sums = [builder.select(add, simd.load(builder, *target), simd.splat(simd.F32, 0.0)) for target in targets]
            loop = simd.Loop(builder, start, stop, sums, 1)
            b_row = builder.gep(b.data, [builder.mul(loop.index, columns)], source_etype=simd.F32)
            vectors = [simd.load(builder, b_row, o, mask) for o, mask in zip(offsets, masks, strict=True)]
            step = builder.mul(loop.index, a_step)
            elements = [builder.load(builder.gep(row, [step], source_etype=simd.F32), typ=simd.F32) for row in a_rows]
            pairs = [(simd.broadcast(builder, element), vector) for element in elements for vector in vectors]
            loop.next([simd.fma(builder, x, y, total) for (x, y), total in zip(pairs, loop.carried, strict=True)])
            # All of out was read before this writes it, so a row that is there twice is right both times.
            for (row, o, mask), total in zip(targets, loop.carried, strict=True):
                simd.store(builder, total, row, o, mask)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, out, i, j, start, stop, add), codegen

    return tile


_outer_tile = _make_outer_tile(masked=False)
_outer_edge_tile = _make_outer_tile(masked=True)


@numba.njit(cache=True)
def _outer_part(a, a_row, a_step, steps, b, out, i_start, i_stop, j):
    for start in range(0, steps, OUTER_STEPS):
        stop = min(start + OUTER_STEPS, steps)
        add = np.int64(start > 0)
        for i in range(i_start, i_stop, OUTER_ROWS):
            if j + simd.LANES * OUTER_VECTORS <= out.shape[1]:
                _outer_tile(a, a_row, a_step, b, out, i, j, start, stop, add)
            else:
                _outer_edge_tile(a, a_row, a_step, b, out, i, j, start, stop, add)


@numba.njit(cache=True, parallel=True)
def outer_product(a, a_row, a_step, steps, b, out):
    """out[i, j] = the sum over s in [0, steps) of a[i a_row + s a_step] * b[s, j].

    a: a flat matrix and its strides in elements; b (steps, N), out (M, N); float32, C-contiguous. steps > 0.
    The sum runs in ascending s, so the result does not depend on threads.
    """
    rows, columns = out.shape
    width = simd.LANES * OUTER_VECTORS
    panels = (columns + width - 1) // width
    if rows * columns * steps < SERIAL_BELOW:
        for panel in range(panels):
            _outer_part(a, a_row, a_step, steps, b, out, 0, rows, panel * width)
    else:
        for task in numba.prange((rows + OUTER_TASK_ROWS - 1) // OUTER_TASK_ROWS * panels):
            i = task // panels * OUTER_TASK_ROWS
            j = task % panels * width
            _outer_part(a, a_row, a_step, steps, b, out, i, min(i + OUTER_TASK_ROWS, rows), j)


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS on the CPU; bias and residual only without b_mn."""
    if b_mn:
        steps = a.shape[0] if a_mn else a.shape[1]
        if steps:
            # A micro-batch's gradient is complete before it is added to that of those before.
            target = np.empty_like(out) if add else out
            outer_product(a.reshape(-1), *((1, len(out)) if a_mn else (steps, 1)), steps, b, target)
            if add:
                np.add(out, target, out=out)
        elif not add:
            out[...] = 0
        return
    residual = out if add else residual
    overlap = residual is not None and np.may_share_memory(residual, out)
    target = np.empty_like(out) if overlap else out
    product(a, b, target)
    if bias is not None:
        target += bias
    if residual is not None:
        np.add(target, residual, out=out)
