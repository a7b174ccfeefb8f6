"""The course in kernels (examples/kernels): every step in the simulator, compiled for GPUs, and as short as it says."""

import ast
import importlib
import pathlib

import numpy as np
import pytest

from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "kernels"
MOST_LINES = 100
SM80, SM90 = (8, 0), (9, 0, "a")
X, WORDS, FLAT, MAP, INT = "uint16[:,::1]", "int32[:,::1]", "uint16[::1]", "uint8[::1]", "int64"
# (m, n, k): several tiles in one direction, ragged where the step allows it; kernel, its types, architectures.
GEMMS = {
    "gemm_1_threads": ((9, 34, 20), "gemm_threads_kernel", [X, X, X], [SM80, SM90]),
    "gemm_2_shared": ((64, 32, 64), "gemm_shared_kernel", [X, X, X], [SM80, SM90]),
    "gemm_3_registers": ((128, 128, 32), "gemm_registers_kernel", [X, X, X], [SM80, SM90]),
    "gemm_4_vectors": ((128, 128, 32), "gemm_vectors_kernel", [FLAT, FLAT, FLAT, INT, INT], [SM80, SM90]),
    "gemm_5_mma": ((128, 128, 64), "gemm_mma_kernel", [X, X, WORDS, INT], [SM80, SM90]),
    # More rounds than the ring has stages; more tiles than the simulator's one SM computes at a time.
    "gemm_6_copies": ((128, 128, 160), "gemm_copies_kernel", [X, X, WORDS, INT], [SM80, SM90]),
    "gemm_7_wgmma": ((128, 256, 320), "gemm_wgmma_kernel", [MAP, MAP, WORDS, INT], [SM90]),
    "gemm_8_warps": ((256, 256, 320), "gemm_warps_kernel", [MAP, MAP, WORDS, INT], [SM90]),
}


def step(name):
    return importlib.import_module(f"examples.kernels.{name}")


def marked(steps):
    """The steps' names, those for Hopper alone marked so."""
    return [
        pytest.param(name, marks=[pytest.mark.sm90] if SM80 not in architectures else [])
        for name, (*_, architectures) in steps.items()
    ]


def operand(rng, *shape):
    """(array of bfloat16 on the device, the same in float64): rows of integers, then as many of normal values.

    float32 holds every sum of products of these integers, so that only the rounding to bfloat16 is left of them.
    """
    array = rng.standard_normal(shape)
    half = shape[0] // 2
    array[:half] = rng.integers(-16, 17, (half, *shape[1:]))
    array = array.astype(device.dtype("bfloat16"))
    return device.asarray(array), array.astype(np.float64)


@pytest.mark.sim
@pytest.mark.parametrize("name", marked(GEMMS))
def test_gemm(rng, name):
    (m, n, k), *_ = GEMMS[name]
    (a, wide_a), (b, wide_b) = operand(rng, m, k), operand(rng, n, k)
    c = device.asarray(np.full((m, n), np.nan, a.dtype))
    step(name).gemm(a, b, c)
    c = device.to_host(c)
    expected = wide_a @ wide_b.T
    assert_close(c, expected, terms=k, what=name)
    assert_same_bits(c[: m // 2, : n // 2].copy(), expected[: m // 2, : n // 2].astype(c.dtype), name)


@pytest.mark.skipif(device.name() != "cpu", reason="compiles without a GPU")
@pytest.mark.parametrize("name", [*GEMMS])
def test_kernels_compile_for_gpus(compile_offline, name):
    _, kernel, types, architectures = GEMMS[name]
    kernel = getattr(step(name), kernel)
    troubles = [line for architecture in architectures for line in compile_offline(kernel, types, architecture)]
    assert not troubles, "\n".join(troubles)


@pytest.mark.sim
def test_shapes_that_are_no_whole_tiles_are_errors():
    a, b = (device.asarray(np.zeros((size, 32), device.dtype("bfloat16"))) for size in (64, 40))
    with pytest.raises(ValueError, match="gemm: n must be a positive multiple of 32, got 40"):
        step("gemm_2_shared").gemm(a, b, device.asarray(np.zeros((64, 40), a.dtype)))
    with pytest.raises(ValueError, match=r"gemm: b must be \(any, 32\) bfloat16, got \(32, 40\)"):
        step("gemm_2_shared").gemm(a, b.reshape(32, 40), device.asarray(np.zeros((64, 32), a.dtype)))


def test_every_step_is_short_tested_and_begins_with_its_idea():
    files = {path.stem: path.read_text() for path in FOLDER.glob("*_[0-9]_*.py")}
    assert files.keys() == GEMMS.keys()
    for name, text in files.items():
        assert text.count("\n") <= MOST_LINES, name
        idea = ast.get_docstring(ast.parse(text)).split("\n\n")[0]
        assert idea.endswith(".") and "\n" not in idea, f"{name}: its idea is no sentence of one line"
