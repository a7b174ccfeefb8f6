"""Shared parts of the tensor-core GEMMs: the key by which a config is chosen, and the tile of C of a block."""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import device_function, udiv
from rlnumba.runtime.buckets import bucket_of

i32 = np.int32

# Tiles of C are visited in bands of this many tile rows, column by column: the rows of A of a band stay in L2.
# H200, 8192^3 bfloat16: 803 TFLOP/s, and 692 with 8.
BAND = 16
# More tokens than these are rounded up, by an eighth at most.
MANY_TOKENS = 1024


@device_function
def tile_coordinates(index, tiles_down, tiles_across):
    """(row, column) of the index-th tile: bands of BAND tile rows, down the columns of a band first."""
    band = udiv(index, i32(BAND) * tiles_across)
    first = i32(band * i32(BAND))
    height = min(i32(tiles_down - first), i32(BAND))
    within = i32(index - first * tiles_across)
    column = udiv(within, height)
    return i32(first + within - column * height), column


class GemmProblem(NamedTuple):
    """The sizes and operands of a GEMM that its config is chosen for: C (m, n) with k steps.

    element: the dtype's name. a_mn, b_mn: whether A and B are MN-major. output: "add" to float32, "same" as A's dtype
    or "float32". bias, residual: whether they are added.
    """

    m: int
    n: int
    k: int
    element: str
    a_mn: bool
    b_mn: bool
    output: str
    bias: bool = False
    residual: bool = False


def problem_of(a, out, a_mn, b_mn, add, bias, residual):
    """The GemmProblem of these arrays.

    The number of tokens, M or of a weight's gradient K, as that for which the config is chosen.
    """
    output = "add" if add else "same" if out.dtype == a.dtype else "float32"
    addends = bias is not None, residual is not None
    (m, n), k = out.shape, a.shape[0 if a_mn else 1]
    m, k = (m, tokens_of_choice(k)) if a_mn else (tokens_of_choice(m), k)
    return GemmProblem(m, n, k, a.dtype.name, a_mn, b_mn, output, *addends)


def tokens_of_choice(tokens):
    """The number of tokens for which a GEMM's config is chosen: many are rounded up to a bucket, so that steps and
    micro-batches of any size need a few kernels, which can be compiled before they begin."""
    return bucket_of(tokens) if tokens > MANY_TOKENS else tokens
