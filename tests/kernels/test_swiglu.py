import numpy as np
import pytest

from rlnumba.kernels.nn.swiglu import (
    ACTIVATIONS,
    GELU_TANH,
    SILU,
    swiglu,
    swiglu_backward,
    swiglu_backward_kernel,
    swiglu_backward_ref,
    swiglu_kernel,
    swiglu_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

# (N, F)
SMALL = [(1, 1), (2, 255), (1, 3072), (2, 3080), (0, 8), (3, 5)]
REAL = [(4096, 3072), (4097, 1001), (0, 3072), (1, 3072), (300, 12288), (70_000, 8)]


def run_all(rng, shape, dtype, activation=SILU):
    rows, columns = shape
    gate_up = (3 * rng.standard_normal((rows, 2 * columns), np.float32)).astype(device.dtype(dtype))
    gate_up[:, : columns - 1 : 3] = -120.0
    dout = rng.standard_normal(shape, np.float32).astype(gate_up.dtype)
    xp = device.xp()
    gd, dd = device.asarray(gate_up.copy()), device.asarray(dout)
    out, dgate_up = xp.full(shape, np.nan, gate_up.dtype), xp.full(gate_up.shape, np.nan, gate_up.dtype)
    swiglu(gd, out, activation)
    assert_close(out, swiglu_ref(gate_up.astype(np.float64), activation), terms=4, what="out")
    swiglu_backward(dd, gd, dgate_up, activation=activation)
    expected = swiglu_backward_ref(dout.astype(np.float64), gate_up.astype(np.float64), activation)
    assert_close(dgate_up, expected, terms=4, what="dgate_up")
    swiglu_backward(dd, gd, gd, out_over_dout=True, activation=activation)
    assert_same_bits(gd, dgate_up, "in place")
    assert_same_bits(dd, out, "out over dout")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_of_reference(rng, activation):
    gate_up, dout = 2 * rng.standard_normal((3, 8)), rng.standard_normal((3, 4))
    gradient = swiglu_backward_ref(dout, gate_up, activation)
    assert_gradient(lambda: float(np.sum(swiglu_ref(gate_up, activation) * dout)), gradient, gate_up, "dgate_up")


def test_gelu_is_that_of_its_definition():
    gate = np.linspace(-12, 12, 101)
    expected = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    found = swiglu_ref(np.concatenate([gate, np.ones_like(gate)])[None], GELU_TANH)[0]
    assert np.abs(found - expected).max() < 1e-7


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in SMALL:
        run_all(rng, shape, dtype)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu(rng, dtype):
    run_all(rng, (2, 255), dtype, GELU_TANH)


@pytest.mark.sim
def test_gates_whose_cube_is_infinite(rng):
    """They let through everything, or nothing; so do gradients."""
    gate_up, dout = np.ones((2, 4), np.float32), np.ones((2, 2), np.float32)
    gate_up[:, 0], gate_up[:, 1] = 1e18, -1e18
    gate_up, dout = device.asarray(gate_up), device.asarray(dout)
    swiglu_backward(dout, gate_up, gate_up, out_over_dout=True, activation=GELU_TANH)
    assert np.array_equal(device.to_host(dout), np.float32([[1e18, 0]] * 2))
    assert np.array_equal(device.to_host(gate_up), np.float32([[1, 0, 1e18, 0]] * 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SMALL + [(64, 768)])
def test_numpy_device(rng, shape, activation):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32", activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gpu(rng, shape, dtype, activation):
    run_all(rng, shape, dtype, activation)


@pytest.mark.parametrize("rows", [65, pytest.param(2, marks=pytest.mark.sim)])
@pytest.mark.parametrize("columns", [5, 96, 131, 3000])
def test_a_row_depends_on_itself_alone(rng, columns, rows):
    gate_up = device.asarray(rng.standard_normal((rows, 2 * columns), np.float32))
    out, alone = device.xp().empty((rows, columns), np.float32), device.xp().empty((1, columns), np.float32)
    swiglu(gate_up, out)
    for row in range(rows):
        swiglu(gate_up[row : row + 1].copy(), alone)
        assert_same_bits(alone[0], out[row], f"row {row}")


def test_where_arrays_lie_changes_no_bits(rng):
    gate_up, dout = rng.standard_normal((3, 80), np.float32), rng.standard_normal((3, 40), np.float32)
    xp = device.xp()
    results = []
    for offset in (0, 1):
        # The second time nothing is aligned to more than an element.
        places = [xp.zeros(offset + a.size, np.float32)[offset:].reshape(a.shape) for a in (gate_up, dout) * 2]
        gate_up_d, dout_d, dgate_up, out = places
        gate_up_d[...], dout_d[...] = device.asarray(gate_up), device.asarray(dout)
        swiglu(gate_up_d, out)
        swiglu_backward(dout_d, gate_up_d, dgate_up)
        results.append((out, dgate_up))
    for aligned, shifted in zip(*results, strict=True):
        assert_same_bits(aligned, shifted)


@pytest.mark.parametrize("element,vector", [("uint16", 8), ("float32", 4)])
def test_kernels_compile_for_gpus(compile_offline, element, vector):
    """For rows that fill their blocks, as those of Qwen3 do."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    single, double = f"{element}[:,::1]", f"{element}[:,:,::1]"
    troubles = []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for activation in ACTIVATIONS:
            kernel = swiglu_kernel(vector, vector, False, activation)
            troubles += compile_offline(kernel, [double, single], architecture)
            kernel = swiglu_backward_kernel(vector, vector, False, True, activation)
            troubles += compile_offline(kernel, [single, double, double], architecture)
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    xp = device.xp()
    with pytest.raises(ValueError, match=r"swiglu: gate_up must be \(2, 8\) float32, got \(2, 7\) float32"):
        swiglu(xp.zeros((2, 7), np.float32), xp.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match=r"swiglu_backward: dgate_up must be \(2, 8\) float32, got \(2, 8\) float64"):
        swiglu_backward(xp.zeros((2, 4), np.float32), xp.zeros((2, 8), np.float32), xp.zeros((2, 8)))
    with pytest.raises(ValueError, match="swiglu: activation must be one of silu, gelu_pytorch_tanh, got 'gelu'"):
        swiglu(xp.zeros((2, 8), np.float32), xp.zeros((2, 4), np.float32), "gelu")
