"""Dropout (Srivastava et al. 2014): elements become 0 with probability p, the others are divided by 1 - p.

Whether element i of an array is kept follows from a Philox key, three words that say where the array stands in the
computation, and i: the backward, and a forward that is repeated for it, find the same mask without storing it.

    kept = word(i) >= p 2^32        word(i): output i % 4 of philox(counter (i / 4, *place), key)

Arrays of any shape in float32, float16 or bfloat16, arithmetic float32. x is its own gradient's kernel: dx = dropout of
dout with the same key and place.
"""

import numpy as np

from rlnumba.kernels.checks import FLOATS, check
from rlnumba.kernels.philox import philox, philox_ref
from rlnumba.kernels.ptx.warp import narrow, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

THREADS = 256


@cuda.jit
def dropout_kernel(x, threshold, scale, place0, place1, place2, key0, key1, out):
    """A thread owns the four neighbouring elements that one Philox counter decides on; x and out have one axis."""
    group = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    first = group * 4
    if first >= x.shape[0]:
        return
    words = philox(np.uint32(group), place0, place1, place2, key0, key1)
    for i in range(4):
        word = words[0]
        if i == 1:
            word = words[1]
        elif i == 2:
            word = words[2]
        elif i == 3:
            word = words[3]
        if first + i < x.shape[0]:
            value = np.float32(0.0)
            if word >= threshold:
                value = widen(x[first + i]) * scale
            out[first + i] = narrow(value, out)


def dropout(x, p, key, place, out):
    """out = x / (1 - p) where it is kept, 0 elsewhere.

    x and out of one shape and floating dtype, out may be x; 0 <= p < 1; key: two, place: three integers in [0, 2^32).
    Raises ValueError for other arrays, p, or 2^34 elements.
    """
    check("dropout", "x", x, x.shape, FLOATS)
    check("dropout", "out", out, x.shape, (x.dtype,))
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be at least 0 and below 1, got {p}")
    if x.size >= 1 << 34:
        raise ValueError(f"dropout: x must have fewer than 2^34 elements, got {x.size}")
    if device.name() == "cpu":
        out[...] = dropout_ref(x, p, key, place)
        return
    words = [np.uint32(word) for word in (threshold_of(p), *place, *key)]
    groups = -(-x.size // 4)
    arrays = x.reshape(-1), out.reshape(-1)
    launch(
        dropout_kernel, -(-groups // THREADS), THREADS,
        arrays[0], words[0], np.float32(1 / (1 - p)), *words[1:], arrays[1],
    )  # fmt: skip


def threshold_of(p):
    """Words below this are dropped: int."""
    return min(int(p * 2**32), 2**32 - 1)


def dropout_ref(x, p, key, place):
    """out of dropout, in x's precision."""
    groups = -(-x.size // 4)
    counters = np.empty((groups, 4), np.uint32)
    counters[:, 0], counters[:, 1:] = np.arange(groups), place
    kept = philox_ref(counters, key).reshape(-1)[: x.size] >= threshold_of(p)
    return np.where(kept.reshape(x.shape), x * x.dtype.type(1 / (1 - p)), x.dtype.type(0))
