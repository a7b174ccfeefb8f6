import numpy as np
import pytest

from rlnumba.kernels.nn import reduce
from rlnumba.kernels.nn.reduce import (
    column_sums,
    group_mean_std,
    group_mean_std_ref,
    masked_whiten,
    masked_whiten_ref,
    num_segments,
    segment_sums_of_squares,
    sum_in_order,
    sum_of_squares,
    sum_of_squares_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits

LENGTHS = [0, 1, 255, 257, 700, 4096]


def empty(*shape):
    return device.xp().full(shape, np.nan, np.float32)


def run_sum_of_squares(rng, size):
    x = (rng.standard_normal(size, np.float32) + 1) * 1e-3
    out, again = empty(1), empty(1)
    sum_of_squares(device.asarray(x), out)
    sum_of_squares(device.asarray(x), again)
    assert_close(out, [sum_of_squares_ref(x.astype(np.float64))], terms=64, what="sum of squares")
    assert_same_bits(out, again, "a second run")
    narrow = x.astype(device.dtype("bfloat16"))
    sum_of_squares(device.asarray(narrow), again, accumulate=True)
    expected = device.to_host(out) + sum_of_squares_ref(narrow.astype(np.float64))
    assert_close(again, expected, terms=64, what="sum of squares in 16 bits, added")


def run_segments(rng, size, segment):
    """A segment's sum is that of the segment alone, and the sum of all that of any order of computing them."""
    x = rng.standard_normal(size, np.float32)
    sums, one, total, whole = empty(num_segments(size)), empty(1), empty(1), empty(1)
    segment_sums_of_squares(device.asarray(x), sums)
    for index in range(len(sums)):
        segment_sums_of_squares(device.asarray(x[index * segment : (index + 1) * segment]), one)
        assert_same_bits(sums[index : index + 1], one, f"segment {index}")
    sum_in_order(sums, total)
    sum_of_squares(device.asarray(x), whole)
    assert_same_bits(total, whole, "all segments")
    assert_close(total, [sum_of_squares_ref(x.astype(np.float64))], terms=400)


def run_masked(rng, size, kind):
    x = rng.standard_normal(size, np.float32) + 2
    mask = (rng.uniform(size=size) < 0.7).astype(kind)
    x[mask == 0] = np.nan
    xd, mask_d, out = device.asarray(x), device.asarray(mask), empty(size)
    for shift_mean in (True, False):
        masked_whiten(xd, mask_d, out, shift_mean=shift_mean)
        expected = masked_whiten_ref(x.astype(np.float64), mask, shift_mean)
        assert_close(out, expected, terms=size + 1, scale=6, what=f"masked whiten, shift_mean={shift_mean}")


def run_groups(rng, groups, group_sizes):
    x = rng.standard_normal((groups, group_sizes), np.float32)
    x[rng.uniform(size=x.shape) < 0.2] = np.nan
    mean, std = empty(groups), empty(groups)
    group_mean_std(device.asarray(x), mean, std)
    expected = group_mean_std_ref(x.astype(np.float64))
    for name, actual, value in zip(("mean", "std"), (mean, std), expected, strict=True):
        assert_close(actual, value, terms=group_sizes + 1, scale=3, what=name)


def run_column_sums(rng, rows, columns, dtype):
    x, total = rng.standard_normal((rows, columns)).astype(dtype), rng.standard_normal(columns, np.float32)
    out, again = device.asarray(total.copy()), device.asarray(total.copy())
    column_sums(device.asarray(x), out)
    column_sums(device.asarray(x), again)
    expected = total + x.astype(np.float64).sum(axis=0)
    assert_close(out, expected, terms=rows + 1, scale=3, what="column sums")
    assert_same_bits(out, again, "a second run")


@pytest.mark.sim
def test_simulator_column_sums(rng):
    for rows, columns, dtype in [(0, 5, "float32"), (1, 1, "float32"), (70, 300, "float32"), (65, 4, "float16")]:
        run_column_sums(rng, rows, columns, device.DTYPES[dtype])


def test_numpy_device_column_sums(rng):
    if device.name() == "cpu":
        run_column_sums(rng, 700, 33, np.dtype(np.float32))
        run_column_sums(rng, 70, 33, device.DTYPES["bfloat16"])


@pytest.mark.gpu
def test_gpu_column_sums(rng):
    for dtype in ("float32", "bfloat16", "float16"):
        run_column_sums(rng, 20_001, 1030, device.DTYPES[dtype])


@pytest.mark.sim
def test_simulator(rng):
    for size in (0, 257, 4100):
        run_sum_of_squares(rng, size)
    for size, kind in [(0, np.float32), (1, np.int32), (300, np.uint8)]:
        run_masked(rng, size, kind)
    for groups, group_sizes in [(0, 8), (3, 1), (2, 40)]:
        run_groups(rng, groups, group_sizes)


@pytest.mark.sim
def test_simulator_with_several_segments(rng, monkeypatch):
    # Pieces of two iterations, the last segment of one and a part of one.
    monkeypatch.setattr(reduce, "SEGMENT", 16_384)
    monkeypatch.setattr(reduce, "PIECES", 2)
    for size in (9000, 16_384, 16_384 + 9001):
        run_segments(rng, size, 16_384)


@pytest.mark.parametrize("size", LENGTHS + [100_000])
def test_numpy_device(rng, size):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_sum_of_squares(rng, size)
    run_masked(rng, size, np.uint8)
    run_groups(rng, 4, size)


def test_kernels_compile_for_gpus(compile_offline):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    troubles = []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        troubles += compile_offline(reduce.piece_squares_kernel(4, False, 1 << 16), ["float32[::1]"] * 2, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("size", [1000, 20_000, 50_001])
def test_segments_on_the_cpu(rng, monkeypatch, size):
    if device.name() != "cpu":
        pytest.skip("the simulator and GPUs have tests of their own")
    monkeypatch.setattr(reduce, "SEGMENT", 20_000)
    run_segments(rng, size, 20_000)


@pytest.mark.gpu
@pytest.mark.parametrize("size", LENGTHS + [50_000_000, 50_000_001])
def test_gpu_sum_of_squares(rng, size):
    run_sum_of_squares(rng, size)
    run_segments(rng, size, reduce.SEGMENT)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [np.float32, np.int32, np.uint8])
@pytest.mark.parametrize("size", LENGTHS + [32_768])
def test_gpu_masked(rng, size, kind):
    run_masked(rng, size, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("groups,group_sizes", [(0, 8), (3, 1), (8, 8), (64, 33)])
def test_gpu_groups(rng, groups, group_sizes):
    run_groups(rng, groups, group_sizes)


def test_golden_numbers():
    """Whitened advantages (computed from the formula in float64) and TRL's group statistics."""
    x = device.asarray(np.array([0.7436, 0.688, 0.64, 0.6], np.float32))
    out = empty(4)
    masked_whiten(x, device.asarray(np.ones(4, np.uint8)), out)
    assert_close(out, [1.2214259, 0.3243152, -0.4501689, -1.0955723], scale=100)
    mean, std = empty(2), empty(2)
    rewards = np.array([[1, 0, 0, 1], [1, 0, np.nan, 1]], np.float32)
    group_mean_std(device.asarray(rewards), mean, std)
    assert_close(mean, [1 / 2, 2 / 3])
    assert_close(std, [np.sqrt(1 / 3), np.sqrt(1 / 3)])


def test_nothing_selected():
    x, mask = empty(3), device.asarray(np.zeros(3, np.int32))
    whitened = empty(3)
    masked_whiten(x, mask, whitened, shift_mean=False)
    assert np.all(device.to_host(whitened) == 0)
    mean, std = empty(1), empty(1)
    group_mean_std(empty(1, 4), mean, std)
    assert device.to_host(mean)[0] == 0 and device.to_host(std)[0] == 0


def test_wrong_arguments_are_named():
    xp = device.xp()
    x, out = xp.zeros(4, np.float32), xp.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"sum_of_squares: out must be \(1\) float32, got \(4,\) float32"):
        sum_of_squares(x, x)
    with pytest.raises(ValueError, match=r"masked_whiten: out must be \(4\) float32"):
        masked_whiten(x, xp.zeros(4, np.int32), out)
    with pytest.raises(ValueError, match=r"group_mean_std: mean must be \(2\) float32"):
        group_mean_std(xp.zeros((2, 4), np.float32), out, out)
