"""Vector code for the CPU: pieces from which Numba intrinsics emit LLVM's vector operations, in an order that is fixed.

The compiler may reorder neither these operations nor their sums. <16 x float> is one AVX-512 register or two of AVX2.
"""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

LANES = 16

I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
F64 = ir.DoubleType()
FLOATS = ir.VectorType(F32, LANES)
DOUBLES = ir.VectorType(F64, LANES)
INTEGERS = ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)


def splat(element, value, lanes=LANES):
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def _function(builder, name, result, arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def fma(builder, a, b, c):
    suffix = "v16f32" if a.type == FLOATS else "v16f64"
    return builder.call(_function(builder, f"llvm.fmuladd.{suffix}", a.type, [a.type] * 3), [a, b, c])


def load(builder, pointer, offset, mask=None, padding=0.0):
    """16 floats at pointer + offset; lanes outside the mask are not read and are `padding`."""
    address = builder.gep(pointer, [offset], source_etype=F32)
    if mask is None:
        return builder.load(address, align=4, typ=FLOATS)
    masked_load = _function(builder, "llvm.masked.load.v16f32.p0", FLOATS, [address.type, I32, MASK, FLOATS])
    return builder.call(masked_load, [address, ir.Constant(I32, 4), mask, splat(F32, padding)])


def store(builder, vector, pointer, offset, mask):
    """Store the lanes of the mask at pointer + offset; all without a mask."""
    address = builder.gep(pointer, [offset], source_etype=F32)
    if mask is None:
        builder.store(vector, builder.bitcast(address, FLOATS.as_pointer()), align=4)
        return
    masked_store = _function(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [FLOATS, address.type, I32, MASK])
    builder.call(masked_store, [vector, address, ir.Constant(I32, 4), mask])


def broadcast(builder, scalar):
    vector = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(vector, vector, splat(I32, 0))


def lanes_below(builder, count):
    """Mask of the lanes l with l < count, an int64."""
    limit = broadcast(builder, builder.trunc(count, I32))
    return builder.icmp_signed("<", ir.Constant(INTEGERS, list(range(LANES))), limit)


def _shuffle(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def fold(builder, vector):
    """The sum of a vector's lanes as a scalar: halves added, 16 -> 8 -> 4 -> 2 -> 1."""
    width = vector.type.count
    while width > 1:
        width //= 2
        low = _shuffle(builder, vector, vector, list(range(width)))
        high = _shuffle(builder, vector, vector, list(range(width, 2 * width)))
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, I32(0))


def fold_all(builder, vectors):
    """fold of each of up to 16 vectors, together: one vector of sums, and whose sum each lane holds.

    Each step pairs vectors and adds the halves of both in one addition, so 16 vectors take 15 additions.
    """
    vectors = [*vectors, *[splat(F32, 0.0)] * (LANES - len(vectors))]
    owners = [[i] for i in range(LANES)]
    width = LANES
    while width > 1:
        width //= 2
        low = [block * 2 * width + lane for block in range(LANES // (2 * width)) for lane in range(width)]
        high = [lane + width for lane in low]
        paired = []
        for a, b in zip(vectors[::2], vectors[1::2], strict=True):
            lows = _shuffle(builder, a, b, low + [lane + LANES for lane in low])
            highs = _shuffle(builder, a, b, high + [lane + LANES for lane in high])
            paired.append(builder.fadd(lows, highs))
        vectors = paired
        owners = [a + b for a, b in zip(owners[::2], owners[1::2], strict=True)]
    return vectors[0], owners[0]


def exp(builder, x):
    """exp of 16 floats <= 88, to about one unit in the last place; 0 below -87.

    x = n ln 2 + r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 leaves n, rounded, in the low bits. The polynomial
    is Cephes expf's (Moshier); 2^n is made by shifting n into the exponent.
    """
    magic = splat(F32, 12582912.0)
    shifted = fma(builder, x, splat(F32, float(np.float32(1.4426950408889634))), magic)
    n = builder.fsub(shifted, magic)
    r = fma(builder, n, splat(F32, -0.693359375), x)
    r = fma(builder, n, splat(F32, float(np.float32(2.12194440e-4))), r)
    coefficients = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0, 1.0)
    y = splat(F32, float(np.float32(coefficients[0])))
    for coefficient in coefficients[1:]:
        y = fma(builder, y, r, splat(F32, float(np.float32(coefficient))))
    bits = builder.shl(builder.bitcast(shifted, INTEGERS), splat(I32, 23))
    power = builder.bitcast(builder.add(bits, builder.bitcast(splat(F32, 1.0), INTEGERS)), FLOATS)
    too_small = builder.fcmp_ordered("<", x, splat(F32, -87.0))
    return builder.select(too_small, splat(F32, 0.0), builder.fmul(y, power))


def clamped(builder, first, count, limit):
    """first, first + 1, ...: `count` indices, those beyond limit - 1 replaced by it."""
    last = builder.sub(limit, I64(1))
    indices = [builder.add(first, I64(i)) for i in range(count)]
    return [builder.select(builder.icmp_signed("<", index, last), index, last) for index in indices]


def array_argument(context, builder, signature, args, position):
    """The array at this position of an intrinsic's arguments, with its fields data and shape."""
    return context.make_array(signature.args[position])(context, builder, args[position])


class Loop:
    """`for index in range(start, stop, step)` with values carried from one iteration to the next."""

    def __init__(self, builder, start, stop, carried, step=LANES):
        self.builder = builder
        self.step = step
        before = builder.block
        self.head = builder.append_basic_block("head")
        self.body = builder.append_basic_block("body")
        self.after = builder.append_basic_block("after")
        builder.branch(self.head)
        builder.position_at_end(self.head)
        self.index = builder.phi(I64)
        self.index.add_incoming(start, before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", self.index, stop), self.body, self.after)
        builder.position_at_end(self.body)

    def next(self, carried):
        """End the body; afterwards `self.carried` are the values after the last iteration."""
        builder = self.builder
        self.index.add_incoming(builder.add(self.index, I64(self.step)), builder.block)
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(self.head)
        builder.position_at_end(self.after)
