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
HEADS, SCORES, FLOAT = "uint16[:,:,::1]", "float32[:,:,::1]", "float32"
# (m, n, k), with several tiles of one dimension at least; kernels and the types of their arguments; architectures.
GEMMS = {
    "gemm_1_threads": ((9, 34, 20), {"gemm_threads_kernel": [X, X, X]}, [SM80, SM90]),
    "gemm_2_shared": ((64, 32, 64), {"gemm_shared_kernel": [X, X, X]}, [SM80, SM90]),
    "gemm_3_registers": ((128, 128, 32), {"gemm_registers_kernel": [X, X, X]}, [SM80, SM90]),
    "gemm_4_vectors": ((128, 128, 32), {"gemm_vectors_kernel": [FLAT, FLAT, FLAT, INT, INT]}, [SM80, SM90]),
    "gemm_5_mma": ((128, 128, 64), {"gemm_mma_kernel": [X, X, WORDS, INT]}, [SM80, SM90]),
    # More rounds than the ring has stages; more tiles than the simulator's one SM computes at a time.
    "gemm_6_copies": ((128, 128, 160), {"gemm_copies_kernel": [X, X, WORDS, INT]}, [SM80, SM90]),
    "gemm_7_wgmma": ((128, 256, 320), {"gemm_wgmma_kernel": [MAP, MAP, WORDS, INT]}, [SM90]),
    "gemm_8_warps": ((256, 256, 320), {"gemm_warps_kernel": [MAP, MAP, WORDS, INT]}, [SM90]),
}
PASSES = {
    "scores_kernel": [HEADS, HEADS, SCORES, FLOAT],
    "softmax_kernel": [SCORES],
    "output_kernel": [SCORES, HEADS, HEADS],
}
# The number of tokens; the rest as above.
ATTENTION = {
    "attention_1_passes": (17, PASSES, [SM80, SM90]),
    "attention_2_online": (64, {"attention_online_kernel": [HEADS] * 4 + [FLOAT]}, [SM80, SM90]),
    "attention_3_mma": (128, {"attention_mma_kernel": [HEADS] * 3 + [WORDS, INT, FLOAT]}, [SM80, SM90]),
    # More tiles of keys than the ring has stages.
    "attention_4_wgmma": (256, {"attention_wgmma_kernel": [MAP] * 3 + [WORDS, INT, FLOAT]}, [SM90]),
}
STEPS = GEMMS | ATTENTION


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


@pytest.mark.sim
@pytest.mark.parametrize("name", marked(ATTENTION))
def test_attention(rng, name):
    """Of two heads, the second has queries of zeros: its outputs are means of integers, those of 2^i keys exact."""
    tokens, *_ = ATTENTION[name]
    q, k, v = rng.standard_normal((3, 2, tokens, 128)).astype(device.dtype("bfloat16"))
    q[1], v[1] = 0, rng.integers(-16, 17, v[1].shape)
    out = device.asarray(np.full(q.shape, np.nan, q.dtype))
    step(name).attention(*map(device.asarray, (q, k, v)), out)
    out = device.to_host(out)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    weights = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(128)) * np.tri(tokens)
    expected = weights / weights.sum(-1, keepdims=True) @ v
    assert_close(out, expected, terms=tokens, what=name)
    exact = [2**i - 1 for i in range(tokens.bit_length())]
    assert_same_bits(out[1, exact], expected[1, exact].astype(out.dtype), name)


@pytest.mark.skipif(device.name() != "cpu", reason="compiles without a GPU")
@pytest.mark.parametrize("name", [*STEPS])
def test_kernels_compile_for_gpus(compile_offline, name):
    _, kernels, architectures = STEPS[name]
    troubles = []
    for kernel, types in kernels.items():
        for architecture in architectures:
            troubles += compile_offline(getattr(step(name), kernel), types, architecture)
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
    assert files.keys() == STEPS.keys()
    for name, text in files.items():
        assert text.count("\n") <= MOST_LINES, name
        idea = ast.get_docstring(ast.parse(text)).split("\n\n")[0]
        assert idea.endswith(".") and "\n" not in idea, f"{name}: its idea is no sentence of one line"
