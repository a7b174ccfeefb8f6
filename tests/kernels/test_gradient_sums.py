"""Operators that add to a gradient: what is there plus the gradient computed alone, by one addition an element."""

import numpy as np
import pytest

from rlnumba.kernels.gemm.ops import bias_backward, linear_backward_weight
from rlnumba.kernels.nn.elementwise import accumulate, fold_two
from rlnumba.kernels.nn.embedding import embedding_backward
from rlnumba.kernels.nn.qkv import HeadNorm, Rotation, qkv_split_backward
from rlnumba.kernels.nn.rmsnorm import rmsnorm_backward
from rlnumba.kernels.nn.scalar_head import scalar_head_backward
from rlnumba.kernels.ptx.warp import flushed
from rlnumba.runtime import device, dispatch
from tests.close import assert_same_bits

TINY = np.float32(3e-39)


def operators(rng, rows, width, dtype):
    """{name: (function of its gradients, their shapes)}."""
    kind, xp = device.dtype(dtype), device.xp()

    def array(*shape):
        return device.asarray(rng.standard_normal(shape, np.float32).astype(kind))

    x, dout, weight, rstd = array(rows, width), array(rows, width), array(width), xp.ones(rows, np.float32)
    ids = device.asarray(np.minimum(rng.geometric(0.2, rows), 6).astype(np.int32))
    chosen = device.asarray(np.arange(0, rows, 2, dtype=np.int32))
    dvalues = device.asarray(rng.standard_normal(len(chosen), np.float32))
    gradients, qkv = (array(rows, 2, 8), array(rows, 1, 8), array(rows, 1, 8)), array(rows, 32)
    norm, angles = HeadNorm(array(8), array(8), 1e-6), xp.ones((rows, 4), np.float32)
    rotation = Rotation(angles, angles, xp.arange(rows, dtype=np.int32))
    head_rstd, score = xp.ones((rows, 3), np.float32), array(1, width)
    return {
        "linear": (lambda dw: linear_backward_weight(dout, x, dw), [(width, width)]),
        "bias": (lambda dbias: bias_backward(dout, dbias), [(width,)]),
        "rmsnorm": (lambda dw: rmsnorm_backward(dout, x, weight, rstd, xp.empty_like(x), dw), [(width,)]),
        "embedding": (lambda dw: embedding_backward(ids, dout, dw), [(7, width)]),
        "scalar_head": (
            lambda dw: scalar_head_backward(x, chosen, score, dvalues, xp.zeros_like(x), dw),
            [(1, width)],
        ),
        "qkv": (
            lambda dq, dk: qkv_split_backward(gradients, qkv, norm, rotation, head_rstd, xp.empty_like(qkv), dq, dk),
            [(8,), (8,)],
        ),
        "accumulate": (lambda dw: accumulate(device.asarray(np.float32(7)) + xp.zeros_like(dw), dw), [(width,)]),
    }


def check(rng, rows, width, dtype):
    for name, (function, shapes) in operators(rng, rows, width, dtype).items():
        before = [rng.standard_normal(shape, np.float32) for shape in shapes]
        for array in before:
            # A GPU takes it for 0, in L2 and elsewhere.
            array.reshape(-1)[::3] = TINY
        alone = [device.xp().zeros(shape, np.float32) for shape in shapes]
        function(*alone)
        together = [device.asarray(array.copy()) for array in before]
        function(*together)
        for one, array, total in zip(alone, before, together, strict=True):
            one = device.to_host(one)
            if device.name() == "cpu":
                expected = array + one
            else:
                expected = flushed(flushed(array) + flushed(one))
                if name == "embedding":
                    # Rows of other tokens are left as they are.
                    untouched = ~one.any(axis=1)
                    expected[untouched] = array[untouched]
            assert_same_bits(total, expected, name)


@pytest.mark.parametrize("size", [1, 50, 4099])
def test_two_at_once(rng, size):
    """A fold of two gradients has the bits of one after the other, the first of a step with nothing before."""
    total, *gradients = rng.standard_normal((3, size + 1), np.float32)
    gradients[0][::3] = total[::2] = TINY
    for is_first in (True, False):
        # From an element on that is no multiple of a vector.
        expected, found = (device.asarray(total.copy())[1:] for _ in range(2))
        first, second = (device.asarray(gradient)[1:] for gradient in gradients)
        if is_first:
            expected[...] = first
        else:
            accumulate(first, expected)
        accumulate(second, expected)
        fold_two(first, second, found, is_first)
        assert_same_bits(found, expected, f"is_first={is_first}")


@pytest.mark.parametrize("rows, width", [(1, 8), (40, 48), (600, 72)])
def test_added_once(rng, rows, width):
    if device.name() == "sim":
        rows, width = min(rows, 40), min(width, 16)
    check(rng, rows, width, "float32")


@pytest.mark.sim
def test_added_once_in_kernels(rng):
    check(rng, 40, 16, "float32")


@pytest.mark.sim
@pytest.mark.parametrize("family", ["simt", "sm80", pytest.param("sm90", marks=pytest.mark.sm90)])
def test_added_once_by_every_family(rng, family):
    """More than a tile on a GPU; on sm90 then L2 adds to some columns, and threads to others."""
    rows, width = (2000, 1024) if device.name() == "cuda" else (20, 16)
    with dispatch.forced(family):
        check(rng, rows, width, "bfloat16")
