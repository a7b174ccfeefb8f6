import numpy as np
import pytest

from rlnumba.kernels.nn.output_gate import (
    output_gate,
    output_gate_backward,
    output_gate_backward_ref,
    output_gate_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient

# (N, H, HK, E): one vector a head and more, and single elements.
SMALL = [(3, 2, 1, 16), (2, 1, 1, 6), (0, 2, 1, 8)]
REAL = [(4097, 16, 4, 256), (70, 8, 2, 80), (1, 24, 4, 256)]


def arrays(rng, shape, dtype="float64"):
    """(dout, attended, qkv) on the host."""
    rows, heads, kv_heads, width = shape
    shapes = [(rows, heads, width)] * 2 + [(rows, 2 * (heads + kv_heads) * width)]
    kind = np.float64 if dtype == "float64" else device.dtype(dtype)
    return [(2 * rng.standard_normal(size)).astype(kind) for size in shapes]


def run_all(rng, shape, dtype):
    dout, attended, qkv = host = arrays(rng, shape, dtype)
    xp, heads, width = device.xp(), shape[1], shape[3]
    on_device, wide = [device.asarray(a.copy()) for a in host], [a.astype(np.float64) for a in host]
    out, dqkv = xp.full(dout.shape, np.nan, dout.dtype), xp.full(qkv.shape, np.nan, dout.dtype)
    output_gate(on_device[1], on_device[2], out)
    assert_close(out, output_gate_ref(*wide[1:]), terms=4, what="out")
    output_gate_backward(*on_device, on_device[0], dqkv)
    dattended, dgate = output_gate_backward_ref(*wide)
    assert_close(on_device[0], dattended, terms=4, what="dattended")
    written = device.to_host(dqkv).reshape(shape[0], 2 * (heads + shape[2]), width)
    assert_close(written[:, 1 : 2 * heads : 2], dgate, dtype=dtype, terms=4, what="dgate")
    assert np.isnan(written[:, 0 : 2 * heads : 2].astype(np.float32)).all()
    assert np.isnan(written[:, 2 * heads :].astype(np.float32)).all()


def test_gradient_of_reference(rng):
    dout, attended, qkv = arrays(rng, (2, 2, 1, 3))
    dattended, dgate = output_gate_backward_ref(dout, attended, qkv)
    dqkv = np.zeros((2, 6, 3))
    dqkv[:, 1:4:2] = dgate

    def loss():
        return float(np.sum(output_gate_ref(attended, qkv) * dout))

    assert_gradient(loss, dattended, attended, "dattended")
    assert_gradient(loss, dqkv.reshape(qkv.shape), qkv, "dqkv")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL:
        run_all(rng, shape, dtype)


@pytest.mark.parametrize("shape", SMALL)
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)


def test_wrong_arguments_are_named():
    dout, attended, qkv = (device.asarray(a) for a in arrays(np.random.default_rng(0), (2, 2, 1, 8), "float32"))
    with pytest.raises(ValueError, match="output_gate: qkv must have the 4 heads and gates of 8 columns"):
        output_gate(attended, device.asarray(device.to_host(qkv)[:, :32].copy()), dout)
