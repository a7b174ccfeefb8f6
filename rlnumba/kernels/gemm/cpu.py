"""GEMM and log-sum-exp of the cpu device, exact whatever else is in the batch.

Rollout and training must compute the same bits (a token's value may not depend on the rows around it), and
no BLAS promises that. So the order of every sum is written down here, in vector code that the compiler may
not reorder:

    product      out[m, n]: 16 partial sums, number l over k = l, l + 16, l + 32, ... in ascending order, each
                 step one fused multiply-add; then the halves are added, 16 -> 8 -> 4 -> 2 -> 1
    row_terms    of a row of logits: 16 partial sums in float64, over columns l, l + 16, ...; the same folding

The product's vectors lie along K, which both operands hold contiguously: nothing is packed or transposed, so
one row (decode) and a thousand (training) run the same instructions on each output. `outer_product` serves
the gradients, whose operands lie the other way; its vectors lie along the columns of the result.

The functions are Numba intrinsics that emit LLVM's vector operations: <16 x float> is one AVX-512 register,
or two of AVX2, with the same results.
"""

import math
import os

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# libgomp's threads spin for milliseconds after a parallel loop. If BLAS wants the cores next, it waits out the
# spinning: on 2 cores a product here followed by np.matmul took 8.0 ms, and 2.1 ms with the spinning cut to
# microseconds. The shortest loops take 19 us either way. Read when the first parallel function is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

LANES = 16

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_F64 = ir.DoubleType()
_VECTOR = ir.VectorType(_F32, LANES)
_DOUBLES = ir.VectorType(_F64, LANES)
_INTEGERS = ir.VectorType(_I32, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)

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
# A task owns a panel of the weight's rows and as many rows of x as stay in the second-level cache.
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


def _splat(element, value, lanes=LANES):
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _function(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _fma(builder, a, b, c):
    suffix = "v16f32" if a.type == _VECTOR else "v16f64"
    return builder.call(_function(builder, f"llvm.fmuladd.{suffix}", a.type, [a.type] * 3), [a, b, c])


def _load(builder, pointer, offset, mask=None, padding=0.0):
    """16 floats at pointer + offset; lanes outside the mask are not touched and read as `padding`."""
    address = builder.gep(pointer, [offset], source_etype=_F32)
    if mask is None:
        return builder.load(address, align=4, typ=_VECTOR)
    load = _function(builder, "llvm.masked.load.v16f32.p0", _VECTOR, [address.type, _I32, _MASK, _VECTOR])
    return builder.call(load, [address, ir.Constant(_I32, 4), mask, _splat(_F32, padding)])


def _store(builder, vector, pointer, offset, mask):
    """Store the lanes of the mask at pointer + offset; all without a mask."""
    address = builder.gep(pointer, [offset], source_etype=_F32)
    if mask is None:
        builder.store(vector, builder.bitcast(address, _VECTOR.as_pointer()), align=4)
        return
    store = _function(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [_VECTOR, address.type, _I32, _MASK])
    builder.call(store, [vector, address, ir.Constant(_I32, 4), mask])


def _broadcast(builder, scalar):
    vector = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(vector, vector, _splat(_I32, 0))


def _lanes_below(builder, count):
    """Mask of the lanes l with l < count, an int64."""
    limit = _broadcast(builder, builder.trunc(count, _I32))
    return builder.icmp_signed("<", ir.Constant(_INTEGERS, list(range(LANES))), limit)


def _take(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _fold(builder, vector):
    """The sum of a vector's lanes as a scalar: halves added, 16 -> 8 -> 4 -> 2 -> 1."""
    width = vector.type.count
    while width > 1:
        width //= 2
        low = _take(builder, vector, vector, list(range(width)))
        high = _take(builder, vector, vector, list(range(width, 2 * width)))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, _I32(0))


def _fold_all(builder, vectors):
    """_fold of each of up to 16 vectors, together: one vector of sums, and whose sum each lane holds.

    Each step pairs vectors and adds the halves of both in one addition, so 16 vectors take 15 additions.
    """
    vectors = [*vectors, *[_splat(_F32, 0.0)] * (LANES - len(vectors))]
    owners = [[i] for i in range(LANES)]
    width = LANES
    while width > 1:
        width //= 2
        low = [block * 2 * width + lane for block in range(LANES // (2 * width)) for lane in range(width)]
        high = [lane + width for lane in low]
        paired = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            lows = _take(builder, a, b, low + [lane + LANES for lane in low])
            highs = _take(builder, a, b, high + [lane + LANES for lane in high])
            paired.append(builder.fadd(lows, highs))
        vectors = paired
        owners = [a + b for a, b in zip(owners[::2], owners[1::2], strict=True)]
    return vectors[0], owners[0]


def _exp(builder, x):
    """exp of 16 floats <= 88, to about one unit in the last place; 0 below -87.

    x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n, rounded, in the low bits. The polynomial
    is Cephes expf's (Moshier); 2^n is made by shifting n into the exponent.
    """
    magic = _splat(_F32, 12582912.0)
    shifted = _fma(builder, x, _splat(_F32, float(np.float32(1.4426950408889634))), magic)
    n = builder.fsub(shifted, magic)
    r = _fma(builder, n, _splat(_F32, -0.693359375), x)
    r = _fma(builder, n, _splat(_F32, float(np.float32(2.12194440e-4))), r)
    coefficients = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0)
    y = _splat(_F32, float(np.float32(coefficients[0])))
    for coefficient in coefficients[1:]:
        y = _fma(builder, y, r, _splat(_F32, float(np.float32(coefficient))))
    bits = builder.shl(builder.bitcast(shifted, _INTEGERS), _splat(_I32, 23))
    power = builder.bitcast(builder.add(bits, builder.bitcast(_splat(_F32, 1.0), _INTEGERS)), _VECTOR)
    too_small = builder.fcmp_ordered("<", x, _splat(_F32, -87.0))
    return builder.select(too_small, _splat(_F32, 0.0), builder.fmul(y, power))


def _clamped(builder, first, count, limit):
    """first, first + 1, ...: `count` indices, those beyond limit - 1 replaced by it."""
    last = builder.sub(limit, _I64(1))
    indices = [builder.add(first, _I64(i)) for i in range(count)]
    return [builder.select(builder.icmp_signed("<", index, last), index, last) for index in indices]


def _array(context, builder, signature, args, position):
    return context.make_array(signature.args[position])(context, builder, args[position])


class _Loop:
    """`for index in range(start, stop, step)` with values carried from one round to the next."""

    def __init__(self, builder, start, stop, carried, step=LANES):
        self.builder = builder
        self.step = step
        before = builder.block
        self.head = builder.append_basic_block("head")
        self.body = builder.append_basic_block("body")
        self.after = builder.append_basic_block("after")
        builder.branch(self.head)
        builder.position_at_end(self.head)
        self.index = builder.phi(_I64)
        self.index.add_incoming(start, before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", self.index, stop), self.body, self.after)
        builder.position_at_end(self.body)

    def next(self, carried):
        """End the body; afterwards `self.carried` are the values after the last round."""
        builder = self.builder
        self.index.add_incoming(builder.add(self.index, _I64(self.step)), builder.block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(self.head)
        builder.position_at_end(self.after)


def _make_tile(rows, columns):
    """An intrinsic tile(x, w, out, m, n): out[m : m + rows, n : n + columns] of the product.

    Where the tile reaches over the last row or column, it computes and writes that one again.
    """

    @intrinsic
    def tile(typingctx, x, w, out, m, n):
        def codegen(context, builder, signature, args):
            x, w, out = (_array(context, builder, signature, args, i) for i in range(3))
            k = builder.extract_value(x.shape, 1)
            n_columns = builder.extract_value(out.shape, 1)

            row_indices = _clamped(builder, args[3], rows, builder.extract_value(out.shape, 0))
            column_indices = _clamped(builder, args[4], columns, n_columns)
            x_rows = [builder.gep(x.data, [builder.mul(i, k)], source_etype=_F32) for i in row_indices]
            w_rows = [builder.gep(w.data, [builder.mul(j, k)], source_etype=_F32) for j in column_indices]

            def step(sums, offset, mask):
                x_vectors = [_load(builder, row, offset, mask) for row in x_rows]
                w_vectors = [_load(builder, row, offset, mask) for row in w_rows]
                pairs = [(a, b) for a in x_vectors for b in w_vectors]
                return [_fma(builder, a, b, s) for (a, b), s in zip(pairs, sums, strict=True)]

            whole = builder.and_(k, _I64(-LANES))
            loop = _Loop(builder, _I64(0), whole, [_splat(_F32, 0.0)] * (rows * columns))
            loop.next(step(loop.carried, loop.index, None))
            sums = loop.carried
            remainder = _Loop(builder, whole, k, sums)
            mask = _lanes_below(builder, builder.sub(k, remainder.index))
            remainder.next(step(remainder.carried, remainder.index, mask))
            sums = remainder.carried
            targets = [(i, j) for i in row_indices for j in column_indices]
            for first in range(0, rows * columns, LANES):
                group = sums[first : first + LANES]
                totals, owners = _fold_all(builder, group)
                for lane, owner in enumerate(owners):
                    if owner < len(group):
                        i, j = targets[first + owner]
                        offset = builder.add(builder.mul(i, n_columns), j)
                        address = builder.gep(out.data, [offset], source_etype=_F32)
                        builder.store(builder.extract_element(totals, _I32(lane)), address)
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
        # The panel's few weight rows stay in the first-level cache while x passes by.
        for n in range(n_start, n_stop, TILE_COLUMNS):
            for m in range(m_start, m_stop, TILE_ROWS):
                _tile(x, w, out, m, n)


@numba.njit(cache=True, parallel=True)
def product(x, w, out):
    """out = x w^T in the order of the module's docstring: x (M, K), w (N, K), out (M, N) float32, C-contiguous.

    An output's bits depend on its row of x and its row of w alone, not on M, N, position or threads.
    """
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

    tile(a, a_row, a_step, b, out, i, j, start, stop, add): out[i:, j:] = (or += if add is not 0) the sum.
    Rows beyond the last are the last again; columns beyond the last need `masked`.
    """

    @intrinsic
    def tile(typingctx, a, a_row, a_step, b, out, i, j, start, stop, add):
        def codegen(context, builder, signature, args):
            a, b, out = (_array(context, builder, signature, args, position) for position in (0, 3, 4))
            a_row, a_step = args[1:3]
            i, j, start, stop, add = args[5:]
            columns = builder.extract_value(b.shape, 1)
            rows = _clamped(builder, i, OUTER_ROWS, builder.extract_value(out.shape, 0))
            offsets = [builder.add(j, _I64(v * LANES)) for v in range(OUTER_VECTORS)]
            masks = [_lanes_below(builder, builder.sub(columns, o)) if masked else None for o in offsets]
            a_rows = [builder.gep(a.data, [builder.mul(row, a_row)], source_etype=_F32) for row in rows]
            out_rows = [builder.gep(out.data, [builder.mul(row, columns)], source_etype=_F32) for row in rows]
            targets = [(row, o, mask) for row in out_rows for o, mask in zip(offsets, masks, strict=True)]
            add = builder.icmp_signed("!=", add, _I64(0))
            sums = [builder.select(add, _load(builder, *target), _splat(_F32, 0.0)) for target in targets]
            loop = _Loop(builder, start, stop, sums, 1)
            b_row = builder.gep(b.data, [builder.mul(loop.index, columns)], source_etype=_F32)
            vectors = [_load(builder, b_row, o, mask) for o, mask in zip(offsets, masks, strict=True)]
            step = builder.mul(loop.index, a_step)
            elements = [builder.load(builder.gep(row, [step], source_etype=_F32), typ=_F32) for row in a_rows]
            pairs = [(_broadcast(builder, element), vector) for element in elements for vector in vectors]
            loop.next([_fma(builder, x, y, total) for (x, y), total in zip(pairs, loop.carried, strict=True)])
            # All of out was read before this writes it, so a row that is there twice is right both times.
            for (row, o, mask), total in zip(targets, loop.carried, strict=True):
                _store(builder, total, row, o, mask)
            return context.get_dummy_value()

        return types.void(a, a_row, a_step, b, out, i, j, start, stop, add), codegen

    return tile


_outer_tile = _make_outer_tile(masked=False)
_outer_edge_tile = _make_outer_tile(masked=True)


@numba.njit(cache=True)
def _outer_part(a, a_row, a_step, steps, b, out, accumulate, i_start, i_stop, j):
    for start in range(0, steps, OUTER_STEPS):
        stop = min(start + OUTER_STEPS, steps)
        add = np.int64(accumulate or start > 0)
        for i in range(i_start, i_stop, OUTER_ROWS):
            if j + LANES * OUTER_VECTORS <= out.shape[1]:
                _outer_tile(a, a_row, a_step, b, out, i, j, start, stop, add)
            else:
                _outer_edge_tile(a, a_row, a_step, b, out, i, j, start, stop, add)


@numba.njit(cache=True, parallel=True)
def outer_product(a, a_row, a_step, steps, b, out, accumulate):
    """out[i, j] = (or += if accumulate) the sum over s in [0, steps) of a[i a_row + s a_step] * b[s, j].

    a: a flat matrix and its strides in elements; b (steps, N), out (M, N); float32, C-contiguous. steps > 0.
    The sum runs in ascending s, so the result does not depend on threads.
    """
    rows, columns = out.shape
    width = LANES * OUTER_VECTORS
    panels = (columns + width - 1) // width
    if rows * columns * steps < SERIAL_BELOW:
        for panel in range(panels):
            _outer_part(a, a_row, a_step, steps, b, out, accumulate, 0, rows, panel * width)
    else:
        for task in numba.prange((rows + OUTER_TASK_ROWS - 1) // OUTER_TASK_ROWS * panels):
            i = task // panels * OUTER_TASK_ROWS
            j = task % panels * width
            _outer_part(a, a_row, a_step, steps, b, out, accumulate, i, min(i + OUTER_TASK_ROWS, rows), j)


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """out = A B (+ bias + residual), or out += A B if `add`.

    a: (M, K), or (K, M) if a_mn; b: (N, K), or (K, N) if b_mn, without bias and residual; residual may be out itself.
    """
    if b_mn:
        steps = a.shape[0] if a_mn else a.shape[1]
        if steps:
            outer_product(a.reshape(-1), *((1, len(out)) if a_mn else (steps, 1)), steps, b, out, add)
        elif not add:
            out[...] = 0
        return
    overlap = residual is not None and np.may_share_memory(residual, out)
    target = np.empty_like(out) if overlap else out
    product(a, b, target)
    if bias is not None:
        target += bias
    if residual is not None:
        np.add(target, residual, out=out)


@intrinsic
def _row_maximum(typingctx, row):
    """(largest value of a float32 row, its lowest index as int32). A NaN is passed over."""
    result = types.Tuple((types.float32, types.int32))

    def codegen(context, builder, signature, args):
        row = _array(context, builder, signature, args, 0)
        size = builder.extract_value(row.shape, 0)
        lanes = ir.Constant(_INTEGERS, list(range(LANES)))
        start = [_splat(_F32, -math.inf), _splat(_I32, 0)]
        loop = _Loop(builder, _I64(0), size, start)
        best, where = loop.carried
        mask = _lanes_below(builder, builder.sub(size, loop.index))
        values = _load(builder, row.data, loop.index, mask, -math.inf)
        columns = builder.add(_broadcast(builder, builder.trunc(loop.index, _I32)), lanes)
        larger = builder.fcmp_ordered(">", values, best)
        loop.next([builder.select(larger, values, best), builder.select(larger, columns, where)])
        best, where = loop.carried
        largest, index = (builder.extract_element(vector, _I32(0)) for vector in (best, where))
        for lane in range(1, LANES):
            value, column = (builder.extract_element(vector, _I32(lane)) for vector in (best, where))
            tie = builder.and_(builder.fcmp_ordered("==", value, largest), builder.icmp_signed("<", column, index))
            better = builder.or_(builder.fcmp_ordered(">", value, largest), tie)
            largest, index = builder.select(better, value, largest), builder.select(better, column, index)
        return context.make_tuple(builder, signature.return_type, [largest, index])

    return result(row), codegen


@intrinsic
def _row_sums(typingctx, row, temperature, maximum):
    """(sum of e, sum of e d) as float64, with d = row / temperature - maximum and e = exp(d) in float32."""
    result = types.UniTuple(types.float64, 2)

    def codegen(context, builder, signature, args):
        row = _array(context, builder, signature, args, 0)
        temperature, maximum = (_broadcast(builder, scalar) for scalar in args[1:])
        size = builder.extract_value(row.shape, 0)
        loop = _Loop(builder, _I64(0), size, [_splat(_F64, 0.0)] * 2)
        total, weighted = loop.carried
        mask = _lanes_below(builder, builder.sub(size, loop.index))
        values = _load(builder, row.data, loop.index, mask, -math.inf)
        distance = builder.fsub(builder.fdiv(values, temperature), maximum)
        exponential = _exp(builder, distance)
        # 0 * -inf is no number; a logit of -inf and the padding contribute 0.
        vanished = builder.fcmp_ordered("==", exponential, _splat(_F32, 0.0))
        finite = builder.select(vanished, _splat(_F32, 0.0), distance)
        wide = builder.fpext(exponential, _DOUBLES)
        loop.next([builder.fadd(total, wide), _fma(builder, wide, builder.fpext(finite, _DOUBLES), weighted)])
        return context.make_tuple(builder, signature.return_type, [_fold(builder, sums) for sums in loop.carried])

    return result(row, temperature, maximum), codegen


@intrinsic
def row_softmax(typingctx, row, temperature, lse, factor, out):
    """out = factor * exp(row / temperature - lse), all float32; out may be row."""

    def codegen(context, builder, signature, args):
        row = _array(context, builder, signature, args, 0)
        out = _array(context, builder, signature, args, 4)
        temperature, lse, factor = (_broadcast(builder, scalar) for scalar in args[1:4])
        size = builder.extract_value(row.shape, 0)
        loop = _Loop(builder, _I64(0), size, [])
        mask = _lanes_below(builder, builder.sub(size, loop.index))
        values = _load(builder, row.data, loop.index, mask)
        exponential = _exp(builder, builder.fsub(builder.fdiv(values, temperature), lse))
        _store(builder, builder.fmul(factor, exponential), out.data, loop.index, mask)
        loop.next([])
        return context.get_dummy_value()

    return types.void(row, temperature, lse, factor, out), codegen


@numba.njit(cache=True, error_model="numpy")
def row_terms(row, temperature):
    """(lse, entropy, top): log-sum-exp and entropy of softmax(row / temperature), and the row's largest index.

    row (V,) and temperature float32, V > 0; returns float32, float32, int32. One order of summation, so that
    whoever draws a token and whoever scores it have the same bits. entropy = log s - sum(e d) / s with
    d = row / temperature - max, e = exp(d), s = sum(e). top is the lowest index on ties.
    """
    largest, top = _row_maximum(row)
    maximum = largest / temperature
    total, weighted = _row_sums(row, temperature, maximum)
    log_total = math.log(total)
    return np.float32(maximum + log_total), np.float32(log_total - weighted / total), top


@numba.njit(cache=True, error_model="numpy")
def scaled_lse(row, temperature):
    """The log-sum-exp of row / temperature as float32: row_terms' first result."""
    return row_terms(row, temperature)[0]


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_rows(logits, rows, ids, temperature, out, lse, entropy, top1):
    """For each i: row_terms of logits[rows[i]], and out[i] = logits[rows[i], ids[i]] / temperature - lse[i].

    logits (N, V) float32; rows, ids (M,) int32 in range; out, lse, entropy (M,) float32, top1 (M,) int32 written.
    """
    for i in numba.prange(rows.shape[0]):
        row = logits[rows[i]]
        lse[i], entropy[i], top1[i] = row_terms(row, temperature)
        out[i] = row[ids[i]] / temperature - lse[i]


@numba.njit(cache=True, parallel=True, error_model="numpy")
def logp_backward_rows(logits, ids, temperature, lse, dlogp, dlogits):
    """dlogits = dlogp / temperature * (onehot(ids) - softmax(logits / temperature)), row by row.

    logits, dlogits (N, V) float32, may be one array; ids (N,) int32, of no column if not in [0, V); lse, dlogp (N,)
    float32.
    """
    for i in numba.prange(logits.shape[0]):
        factor = dlogp[i] / temperature
        row_softmax(logits[i], temperature, lse[i], -factor, dlogits[i])
        if 0 <= ids[i] < logits.shape[1]:
            dlogits[i, ids[i]] += factor
