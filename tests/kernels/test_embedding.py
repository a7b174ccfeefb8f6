import numpy as np
import pytest

from rlnumba.kernels.nn import embedding as embedding_module
from rlnumba.kernels.nn.embedding import (
    copy_rows,
    copy_rows_kernel,
    embedding,
    embedding_backward,
    embedding_backward_kernel,
    embedding_backward_ref,
    embedding_ref,
    list_tokens,
    list_tokens_kernel,
)
from rlnumba.kernels.ptx.warp import access_length
from rlnumba.runtime import device
from rlnumba.runtime.launch import launch
from tests.close import assert_close, assert_gradient, assert_same_bits

# (N, V, D)
SMALL = [(1, 1, 1), (5, 7, 3), (9, 4, 514), (0, 5, 8), (70, 6, 4), (33, 3, 1024)]
REAL = [(4096, 151936, 1024), (4097, 50257, 129), (0, 151936, 1024), (1, 151936, 1024), (300, 2000, 4096)]


@pytest.fixture
def few_list_threads(monkeypatch):
    """In the simulator, list_tokens_kernel with two warps, and with tiles as short as these make them."""
    if device.name() == "sim":
        monkeypatch.setattr(embedding_module, "LIST_THREADS", 64)
        monkeypatch.setattr(embedding_module, "TILE", 64 * embedding_module.THREAD_IDS)


def run_all(rng, shape, dtype):
    tokens, vocabulary, columns = shape
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    ids[tokens // 2 :] = ids[:1].repeat(tokens - tokens // 2)
    weight = rng.standard_normal((vocabulary, columns), np.float32).astype(device.dtype(dtype))
    dout = rng.standard_normal((tokens, columns), np.float32).astype(device.dtype(dtype))
    xp = device.xp()
    out = xp.full((tokens, columns), np.nan, weight.dtype)
    embedding(device.asarray(ids), device.asarray(weight), out)
    assert_same_bits(out, embedding_ref(ids, weight), "out")

    dweight = xp.ones((vocabulary, columns), np.float32)
    embedding_backward(device.asarray(ids), device.asarray(dout), dweight)
    used = np.unique(ids)
    expected = embedding_backward_ref(np.searchsorted(used, ids), dout.astype(np.float64), len(used))
    actual = device.to_host(dweight)
    assert_close(actual[used], expected + 1, terms=tokens + 1, scale=np.sqrt(tokens) + 5, what="dweight")
    assert np.array_equal(np.delete(actual, used, axis=0), np.ones((vocabulary - len(used), columns), np.float32))
    again = xp.ones((vocabulary, columns), np.float32)
    listed = list_tokens(device.asarray(ids), dweight.shape)
    embedding_backward(device.asarray(ids), device.asarray(dout), again, listed=listed)
    assert_same_bits(again, actual, "dweight of a second run, whose tokens were listed before")
    padding = int(ids[-1]) if tokens else 0
    without = xp.ones((vocabulary, columns), np.float32)
    listed = list_tokens(device.asarray(ids), dweight.shape, padding)
    embedding_backward(device.asarray(ids), device.asarray(dout), without, padding, listed)
    actual[padding] = 1
    assert_same_bits(without, actual, "dweight without the padding token")


def test_gradient_of_reference(rng):
    ids = np.array([2, 0, 2, 1], np.int32)
    weight, dout = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    gradient = embedding_backward_ref(ids, dout, 4)
    assert_gradient(lambda: float(np.sum(embedding_ref(ids, weight) * dout)), gradient, weight, "dweight")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, few_list_threads, dtype):
    for shape in SMALL if dtype == "float32" else SMALL[1:3]:
        run_all(rng, shape, dtype)


@pytest.mark.sim
def test_simulator_with_several_rows_a_thread(rng, monkeypatch):
    """Gathered and scattered; ids outside, rows left over, a block with one row of several."""
    monkeypatch.setattr(embedding_module, "MANY_ROWS", 0)
    for rows in (1, 5, 9, 16):
        xp = device.xp()
        x, ids = rng.standard_normal((11, 300), np.float32), rng.permutation(11)[np.arange(rows) % 11].astype(np.int32)
        outside = ids.copy()
        outside[rows // 2] = (-1, 11)[rows % 2]
        out = xp.zeros((rows, 300), np.float32)
        copy_rows(device.asarray(x), device.asarray(outside), out, scatter=False)
        expected = np.where((outside >= 0) & (outside < 11), 1, np.nan)[:, None] * x[np.clip(outside, 0, 10)]
        assert np.array_equal(device.to_host(out), expected.astype(np.float32), equal_nan=True)
        rows = min(rows, 11)
        spread, source = xp.zeros((11, 300), np.float32), device.asarray(x[:rows].copy())
        copy_rows(source, device.asarray(outside[:rows].copy()), spread, scatter=True)
        expected = np.zeros((11, 300), np.float32)
        for n in range(rows):
            if 0 <= outside[n] < 11:
                expected[outside[n]] = x[n]
        assert_same_bits(spread, expected, "scattered")


@pytest.mark.sim
@pytest.mark.parametrize("part", [1, 3])
def test_simulator_with_short_parts(rng, few_list_threads, monkeypatch, part):
    """Runs that end with a part, and that have many."""
    monkeypatch.setattr(embedding_module, "PART", part)
    run_all(rng, (40, 5, 4), "float32")


@pytest.mark.sim
@pytest.mark.parametrize("tokens,vocabulary,buckets", [(5, 3, 1), (700, 900, 2)])
def test_tokens_are_listed(rng, tokens, vocabulary, buckets):
    check_list(rng, tokens, vocabulary, buckets)


@pytest.mark.sim
def test_tokens_of_several_tiles_are_listed(rng, few_list_threads):
    check_list(rng, 2 * embedding_module.TILE + 233, 50, 1)


def check_list(rng, tokens, vocabulary, buckets):
    """By their ids' buckets, ids and places; ids outside the vocabulary together, without a row."""
    if device.name() == "cuda":
        buckets, vocabulary = embedding_module.MOST_BUCKETS, 151_936
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    ids[tokens // 3 :: 3], ids[1], ids[3::7] = ids[2], -1, vocabulary + 2
    xp, counters = device.xp(), -(-vocabulary // buckets) + 1
    entries, order, arrived = (xp.full(shape, -7, np.int32) for shape in ((tokens, 4), tokens, 5))
    on_device = device.asarray(ids)
    arguments = on_device, vocabulary, int(ids[4]), counters, entries, order, arrived
    kernel = list_tokens_kernel(buckets, access_length(tokens, on_device))
    shared = 4 * (2 * counters + 1 + embedding_module.TILE)
    launch(kernel, buckets, embedding_module.LIST_THREADS, *arguments, shared=shared)
    known = (0 <= ids) & (ids < vocabulary)
    alike = np.where(known, ids, vocabulary + buckets + ids % buckets)
    expected = np.lexsort((alike, ids % buckets))
    assert np.array_equal(device.to_host(order), expected)
    assert np.all(device.to_host(arrived) == 0)
    _, starts, runs = np.unique(alike[expected], return_index=True, return_counts=True)
    place, token_id, index, run = device.to_host(entries)[expected].T
    assert np.array_equal(place, np.arange(tokens))
    assert np.array_equal(token_id, np.where(known & (ids != ids[4]), ids, -1)[expected])
    for start, length in zip(starts, runs, strict=True):
        assert np.array_equal(index[start : start + length], np.arange(length))
        assert np.all(run[start : start + length] == length)


@pytest.mark.gpu
@pytest.mark.parametrize("repeated", [1, 10_000, 16_384])
def test_gpu_skewed(rng, repeated):
    """One id takes many of 16,384 tokens; sums come in the order of the tokens, segment by segment."""
    ids = rng.integers(0, 151_936, 16_384).astype(np.int32)
    ids[rng.permutation(16_384)[:repeated]] = 7
    dout = rng.standard_normal((16_384, 256), np.float32)
    dweight, again = (device.xp().zeros((151_936, 256), np.float32) for _ in range(2))
    embedding_backward(device.asarray(ids), device.asarray(dout), dweight)
    embedding_backward(device.asarray(ids), device.asarray(dout), again)
    assert_same_bits(dweight, again, "a second run")
    expected = np.zeros(256, np.float32)
    tokens = np.flatnonzero(ids == 7)
    for begin in range(0, len(tokens), 32):
        part = np.zeros(256, np.float32)
        for token in tokens[begin : begin + 32]:
            part += dout[token]
        expected += part
    assert_same_bits(dweight[7], expected, "the repeated id")
    assert_close(dweight.sum(axis=0), dout.astype(np.float64).sum(axis=0), terms=16_384, scale=130.0, what="total")


@pytest.mark.parametrize("element", ["uint16", "float32"])
def test_kernels_compile_for_gpus(compile_offline, element):
    """For rows that fill their blocks, as those of Qwen3 do."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    rows, f32, ids = f"{element}[:,::1]", "float32[:,::1]", "int32[::1]"
    bits = np.uint16 if element == "uint16" else np.uint32
    words, troubles = f"{bits.__name__}[:,::1]", []
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        for scatter, many in ((False, 1), (True, 1), (False, 2), (True, 2)):
            kernel = copy_rows_kernel(bits, 16 // np.dtype(bits).itemsize, False, scatter, 1, many)
            troubles += compile_offline(kernel, [words, ids, words], architecture)
    entries = "int32[:,::1]"
    for architecture in ((8, 0), (9, 0), (10, 0), (12, 0)):
        types = [ids, *["int64"] * 3, entries, ids, ids]
        troubles += compile_offline(list_tokens_kernel(128, 4), types, architecture)
        types = [entries, ids, rows, f32, "float32[:,:,::1]", ids]
        troubles += compile_offline(embedding_backward_kernel(4, False), types, architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.parametrize("shape", SMALL + [(700, 1000, 96)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    run_all(rng, shape, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + REAL)
def test_gpu(rng, shape, dtype):
    run_all(rng, shape, dtype)


def outside_the_vocabulary():
    ids, weight = device.asarray(np.array([1, 3, -1], np.int32)), device.xp().ones((3, 4), np.float32)
    return ids, weight, device.xp().zeros((3, 4), np.float32), device.xp().zeros((3, 4), np.float32)


def test_numpy_device_refuses_ids_outside_the_vocabulary():
    if device.name() != "cpu":
        pytest.skip("kernels cannot raise")
    ids, weight, out, dweight = outside_the_vocabulary()
    with pytest.raises(ValueError, match=r"embedding: input_ids must be in \[0, 3\), got 3"):
        embedding(ids, weight, out)
    with pytest.raises(ValueError, match=r"embedding_backward: input_ids must be in \[0, 3\), got 3"):
        embedding_backward(ids, out, dweight)


@pytest.mark.sim
def test_kernels_stay_inside_the_vocabulary():
    ids, weight, out, dweight = outside_the_vocabulary()
    embedding(ids, weight, out)
    embedding_backward(ids, weight, dweight)
    out, dweight = device.to_host(out), device.to_host(dweight)
    assert np.all(out[0] == 1) and np.all(np.isnan(out[1:]))
    assert np.all(dweight[1] == 1) and np.all(dweight[[0, 2]] == 0)


@pytest.mark.sim
def test_a_list_of_other_tokens_is_refused():
    if device.name() == "cpu":
        pytest.skip("nothing is listed")
    xp = device.xp()
    ids, dout, dweight = xp.zeros(2, np.int32), xp.zeros((2, 8), np.float32), xp.zeros((3, 8), np.float32)
    others = list_tokens(xp.zeros(3, np.int32), (3, 8)), list_tokens(ids, (4, 8)), list_tokens(ids, (3, 8), 0)
    for wrong in others:
        with pytest.raises(ValueError, match=r"embedding_backward: listed must be for .* \(2, \(3, 8\), -1\), got "):
            embedding_backward(ids, dout, dweight, listed=wrong)


def test_wrong_arguments_are_named():
    xp = device.xp()
    weight, out = xp.zeros((3, 8), np.float32), xp.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"embedding: input_ids must be \(any\) int32, got \(2,\) int64"):
        embedding(xp.zeros(2, np.int64), weight, out)
    with pytest.raises(ValueError, match=r"embedding_backward: dweight must be \(any, 8\) float32"):
        embedding_backward(xp.zeros(2, np.int32), out, xp.zeros((3, 7), np.float32))
