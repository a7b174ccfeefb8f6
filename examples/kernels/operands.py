"""Checks of the arrays that the kernels of the course take, so that a wrong shape is an error and no wrong result."""

from rlnumba.kernels.checks import check
from rlnumba.runtime import device

BF16 = (device.DTYPES["bfloat16"],)


def gemm_sizes(a, b, c, rows=1, columns=1, steps=1):
    """(m, n, k) of C (m, n) = A (m, k) B^T, B (n, k), in whole tiles of rows x columns and `steps` of k; ValueError."""
    m, k = check("gemm", "a", a, (None, None), BF16)
    n, _ = check("gemm", "b", b, (None, k), BF16)
    check("gemm", "c", c, (m, n), BF16)
    for name, size, tile in (("m", m, rows), ("n", n, columns), ("k", k, steps)):
        check_multiple("gemm", name, size, tile)
    return m, n, k


def attention_sizes(q, k, v, out, head_dim, tokens=1):
    """(heads, tokens) of arrays (heads, tokens, head_dim), in whole tiles of `tokens`; ValueError."""
    shape = check("attention", "q", q, (None, None, head_dim), BF16)
    for name, array in (("k", k), ("v", v), ("out", out)):
        check("attention", name, array, shape, BF16)
    check_multiple("attention", "tokens", shape[1], tokens)
    return shape[:2]


def check_multiple(operator, name, size, tile):
    """Raise ValueError unless `size` is a positive multiple of `tile`."""
    if size <= 0 or size % tile:
        raise ValueError(f"{operator}: {name} must be a positive multiple of {tile}, got {size}")
