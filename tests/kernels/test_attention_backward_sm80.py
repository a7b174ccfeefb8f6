import numpy as np
import pytest

from rlnumba.kernels.attention.reference import attention_backward_ref, attention_ref
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.attention.sm80_backward import (
    Sm80GradientConfig,
    attention_backward_sm80,
    dkv_config,
    dq_config,
    sm80_gradient_kernel,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def run(rng, lengths, heads, kv_heads, head_dim, dtype, for_dkv=None, for_dq=None):
    """Compare dq, dk and dv with float64; returns them on the host."""
    tokens, kind, scale, starts = sum(lengths), device.dtype(dtype), head_dim**-0.5, bounds(lengths)
    shapes = [(tokens, h, head_dim) for h in (heads, heads, kv_heads, kv_heads)]
    dout, q, k, v = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    k *= kind.type(2)
    out, lse = attention_ref(q, k, v, starts, scale)
    gradients = [device.xp().full(x.shape, np.nan, kind) for x in (q, k, v)]
    arrays = [device.asarray(x) for x in (dout, q, k, v, out.astype(kind), lse.astype(np.float32), starts)]
    sequences, inputs = PackedSequences(arrays[6], max(lengths)), arrays[1:4]
    attention_backward_sm80(arrays[0], inputs, *arrays[4:6], sequences, scale, gradients, (for_dkv, for_dq))
    expected = attention_backward_ref(dout, q, k, v, starts, scale)
    for name, actual, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        # p and ds are rounded before they multiply, and delta holds out's rounding.
        size = 4 * np.max(np.abs(wanted), initial=1.0)
        assert_close(actual, wanted, terms=head_dim + max(lengths), scale=size, what=name)
    return [device.to_host(gradient) for gradient in gradients]


SIMULATED = [
    # Ragged sequences, more tiles than stages, a warp without keys or rows, two heads a key head.
    (
        [5, 0, 35], 2, 1, 16, "bfloat16", Sm80GradientConfig(16, "bfloat16", True, 2, 2, 32),
        Sm80GradientConfig(16, "bfloat16", False, 2, 1, in_registers=True),
    ),
    # Padded columns, and rows that do not stay in registers.
    (
        [18], 3, 1, 24, "float16", Sm80GradientConfig(24, "float16", True, 1, 1, 32),
        Sm80GradientConfig(24, "float16", False, 1, 2),
    ),
]  # fmt: skip


@pytest.mark.sim
@pytest.mark.parametrize("lengths, heads, kv_heads, head_dim, dtype, for_dkv, for_dq", SIMULATED)
def test_simulator(rng, lengths, heads, kv_heads, head_dim, dtype, for_dkv, for_dq):
    run(rng, lengths, heads, kv_heads, head_dim, dtype, for_dkv, for_dq)


def test_every_chosen_config_is_possible():
    for limit in (99 * 1024, 163 * 1024, 227 * 1024):
        for head_dim in range(8, 264, 8):
            for config in (dkv_config(head_dim, "bfloat16", limit), dq_config(head_dim, "bfloat16", limit)):
                assert config.shared_bytes <= limit


# Compute capabilities, and the shared memory of a block there.
GPUS = [((8, 0), 163 * 1024), ((8, 6), 99 * 1024), ((9, 0), 227 * 1024), ((12, 0), 99 * 1024)]


@pytest.mark.parametrize("architecture, limit", GPUS, ids=str)
def test_kernels_compile_for_gpus(compile_offline, architecture, limit):
    """Without a spill, whatever the GPU."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f = "uint16[:,:,::1]", "float32[:,::1]"
    types = [x, x, x, x, f, f, "int32[::1]", "float32", x, x]
    troubles = compile_offline(sm80_gradient_kernel(dkv_config(128, "bfloat16", limit)), types, architecture)
    troubles += compile_offline(sm80_gradient_kernel(dq_config(128, "bfloat16", limit)), types, architecture)
    assert not troubles, "\n".join(troubles)


SHAPES = [(16, 8, 128), (6, 6, 48), (8, 2, 80), (9, 3, 64), (4, 1, 256), (12, 1, 96), (4, 2, 72)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu(shape, dtype):
    """Against float64, and twice: the same bits."""
    lengths = [1, 7, 64, 129, 500, 1000, 1400] if shape == (16, 8, 128) else [1, 31, 0, 63, 64, 65, 200]
    first, second = (run(np.random.default_rng(0), lengths, *shape, dtype) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gpu_tiles(shape):
    """The tiles of GPUs with less shared memory."""
    run(
        np.random.default_rng(0), [130, 65, 300], *shape, "bfloat16",
        dkv_config(shape[2], "bfloat16", 99 * 1024), dq_config(shape[2], "bfloat16", 99 * 1024),
    )  # fmt: skip
