import numpy as np
import pytest

from rlnumba.kernels.nn.dropout import dropout, dropout_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

KEY, PLACE = (123456789, 4000000000), (3, 7, 2**32 - 1)


def run(rng, shape, p, dtype):
    x = rng.standard_normal(shape, np.float32).astype(device.dtype(dtype))
    out = device.xp().full(shape, np.nan, x.dtype)
    dropout(device.asarray(x), p, KEY, PLACE, out)
    assert_close(out, dropout_ref(x.astype(np.float64), p, KEY, PLACE), dtype)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in [(1,), (3, 85), (1025,), (0, 4)]:
        for p in (0.0, 0.3):
            run(rng, shape, p, dtype)


def test_numpy_device(rng):
    if device.name() == "cpu":
        for p in (0.0, 0.05, 0.9):
            run(rng, (37, 21), p, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu(rng, dtype):
    run(rng, (4097, 1001), 0.1, dtype)


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_share_and_mean(p):
    """The share of zeros is p and the mean is kept, within five standard deviations."""
    count = 100_000
    out = dropout_ref(np.ones(count), p, KEY, PLACE)
    assert set(np.unique(out)) == {0.0, 1 / (1 - p)}
    assert abs((out == 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / count)


def test_the_mask_is_a_function_of_key_and_place():
    x = np.ones(1000)
    masks = [
        dropout_ref(x, 0.5, key, place)
        for key, place in ((KEY, PLACE), (KEY, PLACE), ((1, 2), PLACE), (KEY, (3, 7, 1)), (KEY, (3, 8, 2**32 - 1)))
    ]
    assert_same_bits(masks[0], masks[1])
    for other in masks[2:]:
        assert 0.4 < (masks[0] == other).mean() < 0.6
    # An element's place in the array alone: a shorter array has the beginning of the mask.
    assert_same_bits(dropout_ref(x[:10], 0.5, KEY, PLACE), masks[0][:10])


def test_wrong_arguments_are_named():
    x = device.xp().zeros(3, np.float32)
    with pytest.raises(ValueError, match="dropout: p must be at least 0 and below 1, got 1"):
        dropout(x, 1, KEY, PLACE, x)
