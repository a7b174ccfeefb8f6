"""Places in large arrays: a product in 32 bits would be wrong beyond 2^31 elements, and no small test shows it."""

import re

import numpy as np
import pytest

from rlnumba.kernels.experts import rows
from rlnumba.kernels.logprob import chunked as logprob
from rlnumba.kernels.nn import elementwise, embedding, qkv, reduce, rmsnorm, rope, swiglu
from rlnumba.kernels.optim import adamw
from rlnumba.kernels.rl import gae, policy_loss
from rlnumba.kernels.sampling import ops as sampling
from rlnumba.runtime import device
from rlnumba.runtime.arguments import parse_type
from rlnumba.runtime.compile.machine_code import targeting

F1, F2, F3, I1 = "float32[::1]", "float32[:,::1]", "float32[:,:,::1]", "int32[::1]"
H1, H2, H3 = (name.replace("float32", "uint16") for name in (F1, F2, F3))
ROW = [rmsnorm.share_row(1000, 2, 8, *budget) for budget in (rmsnorm.FORWARD, rmsnorm.BACKWARD)]
HEAD = rope.HeadShape(128, 8, 8, 4)
# qkv_split counts heads in 32 bits, rmsnorm_backward rows, add_partials rows and columns; their operators refuse more.
KERNELS = [
    (rmsnorm.rmsnorm_kernel(ROW[0], False, False), [H2, H1, "float32", H2, F1]),
    (qkv.qkv_split_backward_kernel(HEAD, 5, 2, False), [H2, H2, H2, F2, F2, I1, H2]),
    (swiglu.swiglu_kernel(8, 8, True), [H3, H2]),
    (swiglu.swiglu_backward_kernel(8, 8, True, True), [H2, H3, H3]),
    *((elementwise.elementwise_kernel(op, 8, 8, True), [H1, H1, "float32", H1]) for op in ("add", "scale", "fill")),
    (elementwise.elementwise_kernel("cast", 4, 4, True), [H1, F1, "float32", F1]),
    (embedding.copy_rows_kernel(np.uint16, 8, True, False, 3, 2), [H2, I1, H2]),
    (embedding.copy_rows_kernel(np.uint16, 8, True, True, 3, 2), [H2, I1, H2]),
    (embedding.embedding_backward_kernel(4, True), ["int32[:,::1]", I1, H2, F2, F3, I1]),
    (rows.gather_rows_kernel(8, np.uint16, 8, True, 3), [H2, "int32[:,::1]", H2]),
    (rows.combine_kernel(8, 4, "bfloat16", 8, True, 3), [H2, "int32[:,::1]", H2, H2, H2]),
    (rows.weigh_rows_backward_kernel(8, 8, 8, True), [H2, H2, "int32[:,::1]", H2, "int32", F2]),
    (reduce.piece_squares_kernel(4, True, 1 << 16), [F1, F1]),
    (reduce.segment_sums_kernel, [F1, F1]),
    (reduce.column_sums_kernel, [H2, "int64", F2]),
    (adamw.adamw_kernel(4, True, True), [H1, F1, F1, F1, F1, F1, "int64", "uint32[::1]", "int64"]),
    (sampling.repetition_penalty_kernel, [F2, F1, "int32[:,::1]"]),
    (logprob.logp_backward_kernel(4), [H2, I1, "int64", "float32", F1, F1, F1, F1, F1, H2]),
    (logprob.logp_backward_kernel(4, True, True), [H2, I1, "int64", "float32", F1, F1, F1, F1, F1, H2]),
    (policy_loss.reduce_stats_kernel, [F2, F1, F1]),
    (gae.gae_kernel, [F1, F1, I1, "float32", "float32", F1, F1]),
]


@pytest.mark.parametrize("kernel,types", KERNELS, ids=lambda value: getattr(value, "__name__", None))
def test_products_have_64_bits(kernel, types):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    from numba import cuda

    with targeting((9, 0)):
        ptx, _ = cuda.compile_ptx(kernel.py_func, tuple(parse_type(name) for name in types), cc=(9, 0))
    # A division of numbers that turn out to be small is done in 32 bits, and its remainder is a product.
    ptx = re.sub(r"div\.u32[^;]*;\s*mul\.lo\.s32[^;]*;", "", ptx)
    assert not re.findall(r"(?:mul|mad)\.lo\.[su]32[^;]*;", ptx)
    # Shifts multiply by powers of two; by 16 bits a bfloat16 is widened, by 23 an exponential is scaled.
    assert not set(re.findall(r"shl\.b32[^;]*, (\d+);", ptx)) - {"16", "23"}


@pytest.mark.parametrize(
    "kernel, types, arrays",
    [
        (rmsnorm.rmsnorm_backward_kernel(ROW[1], 8, False), [H2, H2, H1, F1, "int64", H2, F2], 3),
        (rmsnorm.add_partials_kernel, [F2, "int64", F1, F1], 1),
    ],
    ids=["rmsnorm_backward", "add_partials"],
)
def test_rows_in_32_bits_become_places_in_64(kernel, types, arrays):
    """A row's number is multiplied by the row's length, a 64-bit argument of the kernel, for each array of rows."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    from numba import cuda

    with targeting((9, 0)):
        ptx, _ = cuda.compile_ptx(kernel.py_func, tuple(parse_type(name) for name in types), cc=(9, 0))
    lengths = re.findall(r"ld\.param\.u64\s+(%rd\d+)", ptx)
    places = [place for place in re.findall(r"(?:mul|mad)\.lo\.s64\s+([^;]*);", ptx)]
    assert len({name for name in lengths if any(name in place.split(", ") for place in places)}) >= arrays


def test_rows_beyond_32_bits_are_refused(monkeypatch):
    monkeypatch.setattr(rmsnorm, "MOST_ROWS", 3)
    xp = device.xp()
    x, weight, rstd = xp.ones((3, 2), np.float32), xp.ones(2, np.float32), xp.ones(3, np.float32)
    with pytest.raises(ValueError, match="rmsnorm_backward: x must have fewer than 3 rows, got 3"):
        rmsnorm.rmsnorm_backward(x, x, weight, rstd, x.copy(), xp.zeros(2, np.float32))
    with pytest.raises(ValueError, match="add_partials: total must have fewer than 3 columns, got 4"):
        rmsnorm.add_partials(xp.ones((2, 4), np.float32), xp.ones(4, np.float32))
