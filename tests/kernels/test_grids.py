"""A grid's y and z end at 65,535: rows and sequences, of which there may be more, lie along x."""

import numpy as np
import pytest

from rlnumba.kernels.attention import simt, sm80_backward, sm80_decode, sm80_forward, sm90_backward
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences
from rlnumba.kernels.gemm import simt as gemm_simt
from rlnumba.runtime import device

SEQUENCES = 70_000
LONGEST_X, LONGEST_Y = 2**31 - 1, 65_535


@pytest.fixture
def grids(monkeypatch):
    """The grids of what is launched from here on, which is not run."""
    found = []

    def record(kernel, grid, block, *arguments, **options):
        found.append((kernel.py_func.__name__, grid if isinstance(grid, tuple) else (grid,)))

    for module in (simt, sm80_backward, sm80_decode, sm80_forward, sm90_backward, gemm_simt):
        monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr(sm90_backward, "tensor_map", lambda *arguments: None)
    return found


def check(grids, names, blocks):
    assert {name for name, _ in grids} == set(names)
    for name, (x, *others) in grids:
        assert blocks <= x <= LONGEST_X and all(length <= LONGEST_Y for length in others), name


def attention_arrays(heads):
    """dout, q, k, v, out, lse and cu_seqlens of many short sequences: one token, then none."""
    dtype = device.DTYPES["bfloat16"]
    q, k = np.zeros((1, heads, 64), dtype), np.zeros((1, 1, 64), dtype)
    cu_seqlens = np.ones(SEQUENCES + 1, np.int32)
    cu_seqlens[0] = 0
    return q, q, k, k, q.copy(), np.zeros((heads, 1), np.float32), cu_seqlens


def test_attention(grids):
    dout, q, k, v, out, lse, cu_seqlens = attention_arrays(2)
    sequences = PackedSequences(cu_seqlens, 1)
    simt.attention_simt(q, k, v, sequences, 1.0, out, lse)
    check(grids, ["attention_kernel"], SEQUENCES)
    with pytest.raises(ValueError, match="attention: at most 65535 sequences can be computed at once, got 70000"):
        sm80_forward.attention_sm80(q, k, v, sequences, 1.0, out, lse)


@pytest.mark.parametrize(
    "run, names",
    [
        (simt.attention_backward_simt, ["attention_gradient_kernel"]),
        (sm80_backward.attention_backward_sm80, ["sm80_gradient_kernel"]),
        (
            sm90_backward.attention_backward_sm90,
            ["attention_rows_kernel", "attention_backward_kernel", "attention_round_dq_kernel"],
        ),
    ],
)
def test_attention_backward(grids, run, names):
    dout, q, k, v, out, lse, cu_seqlens = attention_arrays(2)
    run(dout, (q, k, v), out, lse, PackedSequences(cu_seqlens, 1), 1.0, (q.copy(), k.copy(), v.copy()))
    check([grid for grid in grids if grid[0] != "attention_delta_kernel"], names, SEQUENCES)


def test_paged_attention(grids):
    _, q, k, v, out, _, cu_seqlens = attention_arrays(2)
    tables, context_lens = np.zeros((SEQUENCES, 1), np.int32), np.ones(SEQUENCES, np.int32)
    sequences = PagedSequences(cu_seqlens, context_lens, tables, 1, 1)
    simt.paged_attention_simt(q, k, v, 16, sequences, 1.0, out)
    check(grids, ["attention_kernel"], SEQUENCES)
    with pytest.raises(ValueError, match="paged_attention: at most 65535 sequences can be decoded at once, got 70000"):
        sm80_decode.paged_attention_sm80(q, k, v, 16, sequences, 1.0, out)


def test_gemm(grids):
    rows = 2**20 + 1
    gemm_simt.gemm(np.zeros((rows, 1), np.float16), np.zeros((3, 1), np.float16), np.zeros((rows, 3), np.float16))
    check(grids, ["gemm_simt_kernel"], rows // 16)
