"""Single instructions that Numba does not offer, each with its GPU lowering and its simulator twin.

Element types. A kernel computes in float32 whatever the arrays hold. bfloat16 has no Numba type in the
simulator, so arrays of it reach kernels as uint16, the upper half of a float32: `widen` turns an array
element (float32, float16, or uint16 holding a bfloat16) into a float32, `narrow` rounds a float32 to
nearest even into the element type of an array. `narrow` of a float64 does not compile, which catches an
untyped literal that slipped into the arithmetic.

Warps. `shuffle*` exchange a value among the 32 lanes; `warp_sum` and `warp_max` reduce by a butterfly
(lane distance 16, 8, 4, 2, 1) and give every lane the same bits; `block_sum` and `block_max` add the
warps' results in the order of the warps. All lanes of a warp, or all threads of a block, must call them.
"""

import numpy as np

from rlnumba import device
from rlnumba.device import cuda

FULL_WARP = 0xFFFFFFFF

if device.name() == "sim":
    from rlnumba.simulator import WARP, warp_wide

    def device_function(function):
        """A function that kernels call; plain Python here."""
        return function

    def widen(value):
        """An array element as float32."""
        if isinstance(value, np.uint16):
            return (np.uint32(value) << np.uint32(16)).view(np.float32)
        if not isinstance(value, (np.float16, np.float32)):
            raise TypeError(f"widen: expected a float32, float16 or bfloat16 element, got {type(value).__name__}")
        return np.float32(value)

    def narrow(value, array):
        """A float32 as an element of `array`, rounded to nearest even."""
        if not isinstance(value, np.float32):
            raise TypeError(f"narrow: expected float32, got {type(value).__name__}")
        if array.dtype != np.uint16:
            return array.dtype.type(value)
        bits = int(value.view(np.uint32))
        if value != value:
            return np.uint16((bits >> 16) | 0x0040)
        return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    def float_as_int(value):
        """The 32 bits of a float32 as int32."""
        return np.float32(value).view(np.int32)

    def int_as_float(value):
        """The float32 whose bits an int32 holds."""
        return np.int32(value).view(np.float32)

    @warp_wide
    def shuffle_xor(lanes):
        """Lane i receives the value of lane i ^ mask."""
        return [lanes[i ^ int(mask)][0] for i, (_, mask) in enumerate(lanes)]

    @warp_wide
    def shuffle_down(lanes):
        """Lane i receives the value of lane i + delta, or keeps its own beyond lane 31."""
        return [lanes[i + int(delta)][0] if i + delta < WARP else value for i, (value, delta) in enumerate(lanes)]

    @warp_wide
    def shuffle_up(lanes):
        """Lane i receives the value of lane i - delta, or keeps its own before lane 0."""
        return [lanes[i - int(delta)][0] if i >= delta else value for i, (value, delta) in enumerate(lanes)]

    @warp_wide
    def shuffle(lanes):
        """Lane i receives the value of lane `source`."""
        return [lanes[int(source) % WARP][0] for _, source in lanes]

    @warp_wide
    def ballot(lanes):
        """A 32-bit mask with bit i set if lane i's predicate holds."""
        mask = sum(1 << i for i, (predicate,) in enumerate(lanes) if predicate)
        return [mask] * WARP

    def _butterfly(lanes, combine):
        values = [value for (value,) in lanes]
        for distance in (16, 8, 4, 2, 1):
            values = [combine(values[i], values[i ^ distance]) for i in range(WARP)]
        return values

    @warp_wide
    def warp_sum(lanes):
        """The sum over the warp, in every lane."""
        return _butterfly(lanes, lambda a, b: a + b)

    @warp_wide
    def warp_max(lanes):
        """The largest value of the warp, in every lane."""
        return _butterfly(lanes, max)

    @warp_wide
    def sync_warp(lanes):
        """Wait for all lanes of the warp and make their writes visible to each other."""
        return [None] * WARP

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)

    def device_function(function):
        """A function that kernels call; always inlined."""
        return cuda.jit(function, device=True, forceinline=True)

    @intrinsic
    def widen(typingctx, value):
        """An array element as float32."""
        if value not in (types.float32, types.float16, types.uint16):
            return None

        def codegen(context, builder, signature, args):
            if signature.args[0] == types.uint16:
                bits = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
                return builder.bitcast(bits, _F32)
            return context.cast(builder, args[0], signature.args[0], types.float32)

        return types.float32(value), codegen

    @intrinsic
    def narrow(typingctx, value, array):
        """A float32 as an element of `array`, rounded to nearest even."""
        if value != types.float32:
            return None

        def codegen(context, builder, signature, args):
            element = signature.args[1].dtype
            if element != types.uint16:
                return context.cast(builder, args[0], types.float32, element)
            # Round to nearest even on the bits. sm_90 has an instruction for this, older targets do not;
            # either way the memory access next to it is what takes the time.
            bits = builder.bitcast(args[0], _I32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
            quiet_nan = builder.or_(bits, ir.Constant(_I32, 0x00400000))
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            result = builder.select(is_nan, quiet_nan, rounded)
            return builder.trunc(builder.lshr(result, ir.Constant(_I32, 16)), _I16)

        return array.dtype(value, array), codegen

    @intrinsic
    def float_as_int(typingctx, value):
        """The 32 bits of a float32 as int32."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], _I32)

        return types.int32(types.float32), codegen

    @intrinsic
    def int_as_float(typingctx, value):
        """The float32 whose bits an int32 holds."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], _F32)

        return types.float32(types.int32), codegen

    @device_function
    def shuffle_xor(value, mask):
        """Lane i receives the value of lane i ^ mask."""
        return cuda.shfl_xor_sync(FULL_WARP, value, mask)

    @device_function
    def shuffle_down(value, delta):
        """Lane i receives the value of lane i + delta, or keeps its own beyond lane 31."""
        return cuda.shfl_down_sync(FULL_WARP, value, delta)

    @device_function
    def shuffle_up(value, delta):
        """Lane i receives the value of lane i - delta, or keeps its own before lane 0."""
        return cuda.shfl_up_sync(FULL_WARP, value, delta)

    @device_function
    def shuffle(value, source):
        """Lane i receives the value of lane `source`."""
        return cuda.shfl_sync(FULL_WARP, value, source)

    @device_function
    def ballot(predicate):
        """A 32-bit mask with bit i set if lane i's predicate holds."""
        return cuda.ballot_sync(FULL_WARP, predicate)

    @device_function
    def warp_sum(value):
        """The sum over the warp, in every lane."""
        value += shuffle_xor(value, 16)
        value += shuffle_xor(value, 8)
        value += shuffle_xor(value, 4)
        value += shuffle_xor(value, 2)
        value += shuffle_xor(value, 1)
        return value

    @device_function
    def warp_max(value):
        """The largest value of the warp, in every lane."""
        value = max(value, shuffle_xor(value, 16))
        value = max(value, shuffle_xor(value, 8))
        value = max(value, shuffle_xor(value, 4))
        value = max(value, shuffle_xor(value, 2))
        value = max(value, shuffle_xor(value, 1))
        return value

    @device_function
    def sync_warp():
        """Wait for all lanes of the warp and make their writes visible to each other."""
        cuda.syncwarp(FULL_WARP)


@device_function
def block_sum(value, scratch):
    """The sum over a one-dimensional block, in every thread.

    scratch: shared array with at least one element a warp. The block's size is a multiple of 32. Warps
    are added in their order, so the result does not depend on timing.
    """
    total = warp_sum(value)
    if cuda.threadIdx.x % 32 == 0:
        scratch[cuda.threadIdx.x // 32] = total
    cuda.syncthreads()
    total = scratch[0]
    for warp in range(1, cuda.blockDim.x // 32):
        total += scratch[warp]
    # The next call may write scratch while a slow thread still reads it.
    cuda.syncthreads()
    return total


@device_function
def block_max(value, scratch):
    """The largest value of a one-dimensional block, in every thread; scratch as in block_sum."""
    largest = warp_max(value)
    if cuda.threadIdx.x % 32 == 0:
        scratch[cuda.threadIdx.x // 32] = largest
    cuda.syncthreads()
    largest = scratch[0]
    for warp in range(1, cuda.blockDim.x // 32):
        largest = max(largest, scratch[warp])
    cuda.syncthreads()
    return largest
