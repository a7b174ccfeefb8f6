import numpy as np
import pytest

from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.kernels.logprob.chunked import logp_of_logits, logp_of_logits_backward
from rlnumba.kernels.logprob.ops import (
    IGNORED,
    linear_logp,
    linear_logp_backward,
    linear_logp_backward_ref,
    linear_logp_ref,
    linear_logp_with_gradient,
    logp_backward_ref,
    logp_ref,
)
from rlnumba.kernels.logprob.terms import KeptTokens, LogprobOutputs, LossGradients, RowOptions
from rlnumba.runtime import device, dispatch
from tests.close import ROUNDING, assert_close, assert_gradient, assert_same_bits

# N, V, D: one; below and above the threads of a row; no rows.
SMALL = [(1, 1, 1), (3, 63, 3), (2, 65, 2), (1, 130, 2), (0, 5, 3)]
QWEN3_06B = [(4096, 151936, 1024)]
CHECKED = 64
ODD = [(4097, 50257, 768), (1, 151936, 1024), (300, 32000, 288)]


def random_ids(rng, rows, vocabulary):
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    ids[2::5] = IGNORED
    return ids


def run_logp(rng, rows, vocabulary, dtype):
    logits = (4 * rng.standard_normal((rows, vocabulary), np.float32)).astype(device.dtype(dtype))
    ids, dlogp = random_ids(rng, rows, vocabulary), rng.standard_normal(rows, np.float32)
    wide = logits.astype(np.float64)
    expected, expected_lse, _, _ = logp_ref(wide, ids)
    xp = device.xp()
    out, lse = xp.full(rows, np.nan, np.float32), xp.full(rows, np.nan, np.float32)
    ld, idd = device.asarray(logits), device.asarray(ids)
    logp_of_logits(ld, idd, 1.0, out, lse)
    # lse is the largest logit plus the logarithm of a sum, whose relative error hardly grows with V.
    size = np.max(np.abs(wide), initial=0.0) + np.log(vocabulary)
    assert_close(out, expected, "float32", scale=2 * size, what="logp")
    assert_close(lse, expected_lse, "float32", scale=size, what="lse")
    dlogits = xp.full_like(ld, np.nan)
    logp_of_logits_backward(ld, idd, 1.0, lse, device.asarray(dlogp), dlogits)
    # An error of lse is a relative error of every probability.
    expected = logp_backward_ref(wide, ids, dlogp.astype(np.float64))
    assert_close(dlogits, expected, terms=400, scale=np.max(np.abs(dlogp), initial=0.0), what="dlogits")
    dentropy = rng.standard_normal(rows).astype(np.float32)
    entropy = logp_ref(wide, ids)[2].astype(np.float32)
    of_entropy = device.asarray(entropy), device.asarray(dentropy)
    logp_of_logits_backward(ld, idd, 1.0, lse, device.asarray(dlogp), dlogits, 0, RowOptions(*of_entropy))
    expected = logp_backward_ref(wide, ids, dlogp.astype(np.float64), dentropy=dentropy.astype(np.float64))
    # p (log p + H) is largest where the entropy is.
    scale = np.max(np.abs(dlogp), initial=0.0) + np.max(np.abs(dentropy), initial=0.0) * (1 + np.log(vocabulary))
    assert_close(dlogits, expected, terms=400, scale=scale, what="dlogits with dentropy")


def run_linear(rng, shape, dtype, temperature):
    rows, vocabulary, width = shape
    kind, xp = device.dtype(dtype), device.xp()
    hidden = rng.standard_normal((rows, width), np.float32).astype(kind)
    weight = (4 * rng.standard_normal((vocabulary, width), np.float32) / np.sqrt(width)).astype(kind)
    ids, dlogp = random_ids(rng, rows, vocabulary), rng.standard_normal(rows, np.float32)
    # The oracle takes at most CHECKED rows of a large case; the others have no gradient.
    checked = np.sort(rng.permutation(rows)[:CHECKED])
    dlogp[~np.isin(np.arange(rows), checked)] = 0
    h, w = hidden[checked].astype(np.float64), weight.astype(np.float64)
    ids_checked, dlogp_checked = ids[checked], dlogp[checked].astype(np.float64)
    hd, wd, idd, dd = (device.asarray(a) for a in (hidden, weight, ids, dlogp))

    out, lse, entropy = (xp.full(rows, np.nan, np.float32) for _ in range(3))
    top1 = xp.full(rows, -7, np.int32)
    linear_logp(hd, wd, idd, temperature, LogprobOutputs(out, lse, entropy, top1))
    expected = linear_logp_ref(h, w, ids_checked, temperature)
    size = (25 + np.log(vocabulary)) / temperature
    for actual, value, what in zip((out, lse, entropy), expected, ("logp", "lse", "entropy"), strict=False):
        assert_close(device.to_host(actual)[checked], value, "float32", terms=width, scale=size, what=what)
    top1 = device.to_host(top1)
    assert np.all((top1 == -1) == (ids == IGNORED))
    # Where rounding swaps the two largest logits, both are within the error of the largest.
    live = ids_checked != IGNORED
    logits = h[live] @ w.T
    chosen = np.take_along_axis(logits, top1[checked][live, None], 1)[:, 0]
    assert_close(chosen, logits.max(axis=1, initial=-np.inf), "float32", width, size, "the logit of top1")

    plain, plain_lse = xp.full(rows, np.nan, np.float32), xp.full(rows, np.nan, np.float32)
    linear_logp(hd, wd, idd, temperature, LogprobOutputs(plain, plain_lse))
    assert_same_bits(plain, out, "logp without entropy")

    dhidden = xp.full((rows, width), np.nan, kind)
    dweight = xp.full((vocabulary, width), np.float32(np.nan))
    linear_logp_backward(hd, wd, idd, temperature, lse, LossGradients(dd, dhidden, dweight))
    dh, dw = linear_logp_backward_ref(h, w, ids_checked, dlogp_checked, temperature)
    # The gradient of the logits is rounded to the arrays' dtype before the GEMMs.
    lost = 4 * ROUNDING[dtype] / ROUNDING["float32"]
    spread = np.max(np.abs(dlogp), initial=0.0) / temperature
    largest = np.max(np.abs(w), initial=0.0) * spread
    dhidden = device.to_host(dhidden)
    assert_close(dhidden[checked], dh, terms=vocabulary + lost, scale=2 * largest, what="dhidden")
    assert not np.delete(dhidden, checked, axis=0).any(), "rows without a gradient"
    scale = spread * max(np.max(np.abs(h), initial=0.0), 1.0) + 1
    assert_close(dweight, dw, dtype, terms=CHECKED + 400, scale=2 * scale, what="dweight")

    # With the entropies' derivative; that of some rows is all that they have.
    dentropy = rng.standard_normal(rows).astype(np.float32)
    dentropy[~np.isin(np.arange(rows), checked)] = 0
    dlogp[::3] = 0
    dhidden, dweight = xp.full((rows, width), np.nan, kind), xp.full((vocabulary, width), np.float32(np.nan))
    dd, hd_entropy = device.asarray(dlogp), device.asarray(dentropy)
    gradients = LossGradients(dd, dhidden, dweight, entropy, hd_entropy)
    linear_logp_backward(hd, wd, idd, temperature, lse, gradients)
    both = dlogp[checked].astype(np.float64), temperature, dentropy[checked].astype(np.float64)
    dh, dw = linear_logp_backward_ref(h, w, ids_checked, *both)
    spread = (1 + np.log(vocabulary)) * max(spread, np.max(np.abs(dentropy), initial=0.0) / temperature)
    dhidden, largest = device.to_host(dhidden), np.max(np.abs(w), initial=0.0) * spread
    assert_close(dhidden[checked], dh, terms=vocabulary + lost, scale=2 * largest, what="dhidden with dentropy")
    assert not np.delete(dhidden, checked, axis=0).any(), "rows without a gradient"
    scale = spread * max(np.max(np.abs(h), initial=0.0), 1.0) + 1
    assert_close(dweight, dw, dtype, terms=CHECKED + 400, scale=2 * scale, what="dweight with dentropy")


def test_golden_numbers():
    """Log-probabilities of ids 2 and 1 among the logits 1, 2, 3, and the entropy, taken by hand in float64."""
    xp = device.xp()
    hidden, weight = device.asarray(np.ones((2, 1), np.float32)), device.asarray(np.float32([[1], [2], [3]]))
    ids = device.asarray(np.int32([2, 1]))
    out, lse, entropy = (xp.empty(2, np.float32) for _ in range(3))
    linear_logp(hidden, weight, ids, 1.0, LogprobOutputs(out, lse, entropy))
    np.testing.assert_allclose(device.to_host(out), [-0.4076060, -1.4076060], atol=3e-7)
    np.testing.assert_allclose(device.to_host(entropy), [0.8323956, 0.8323956], atol=3e-7)
    logp_of_logits(device.asarray(np.float32([[1, 2, 3]] * 2)), ids, 1.0, out, lse)
    np.testing.assert_allclose(device.to_host(out), [-0.4076060, -1.4076060], atol=3e-7)


def test_gradient_of_references(rng):
    hidden, weight, dlogp = (rng.standard_normal(shape) for shape in [(4, 3), (6, 3), 4])
    ids = np.int32([0, 5, IGNORED, 2])
    dhidden, dweight = linear_logp_backward_ref(hidden, weight, ids, dlogp, 0.7)

    def loss():
        return float(np.sum(linear_logp_ref(hidden, weight, ids, 0.7)[0] * dlogp))

    assert_gradient(loss, dhidden, hidden, "dhidden")
    assert_gradient(loss, dweight, weight, "dweight")
    dentropy = rng.standard_normal(4)
    dhidden, dweight = linear_logp_backward_ref(hidden, weight, ids, dlogp, 0.7, dentropy)

    def loss_with_entropy():
        logp, _, entropy, _ = linear_logp_ref(hidden, weight, ids, 0.7)
        return float(np.sum(logp * dlogp + entropy * dentropy))

    assert_gradient(loss_with_entropy, dhidden, hidden, "dhidden with dentropy")
    assert_gradient(loss_with_entropy, dweight, weight, "dweight with dentropy")
    thresholds = np.sort(hidden @ weight.T, axis=1)[:, 2:4].mean(axis=1)
    ids = np.argmax(hidden @ weight.T, axis=1).astype(np.int32)
    dhidden, dweight = linear_logp_backward_ref(hidden, weight, ids, dlogp, 0.7, dentropy, thresholds)

    def masked_loss():
        logp, _, entropy, _ = linear_logp_ref(hidden, weight, ids, 0.7, thresholds)
        return float(np.sum(logp * dlogp + entropy * dentropy))

    assert_gradient(masked_loss, dhidden, hidden, "dhidden with thresholds")
    assert_gradient(masked_loss, dweight, weight, "dweight with thresholds")
    ids = np.int32([0, 5, IGNORED, 2])
    logits = rng.standard_normal((4, 6))
    dlogits = logp_backward_ref(logits, ids, dlogp, 0.7)
    assert_gradient(lambda: float(np.sum(logp_ref(logits, ids, 0.7)[0] * dlogp)), dlogits, logits, "dlogits")


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.sim
def test_simulator(rng, shape):
    run_logp(rng, *shape[:2], "float32")
    run_linear(rng, shape, "float32", temperature=0.8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.sim
def test_simulator_16_bit(rng, monkeypatch, dtype):
    """Three chunks of columns for two rows, then for the third."""
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 44)
    monkeypatch.setattr(chunked, "CHUNK_SUMS", 8)
    run_logp(rng, 3, 66, dtype)
    run_linear(rng, (3, 30, 4), dtype, temperature=1.0)


@pytest.mark.parametrize("columns", [1100, 4104])
@pytest.mark.sim
def test_simulator_long_rows(rng, columns):
    """A thread has two pieces of a row, or three."""
    run_logp(rng, 1, columns, "float32")
    run_logp(rng, 1, columns - 1, "bfloat16")


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("shape", [*SMALL, (67, 1000, 33), (130, 513, 64)])
def test_numpy_device(rng, shape, temperature):
    if device.name() != "cpu":
        pytest.skip("the GEMM and the rows of the cpu device")
    run_logp(rng, *shape[:2], "float32")
    run_linear(rng, shape, "float32", temperature)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + ODD + QWEN3_06B)
def test_gpu(rng, shape, dtype):
    if shape[0] * shape[1] < 1 << 25:
        run_logp(rng, *shape[:2], dtype)
    run_linear(rng, shape, dtype, temperature=0.8)


def test_chunks_give_the_same_rows(rng, monkeypatch):
    rows, vocabulary, width = (4, 10, 2) if device.name() == "sim" else (50, 300, 40)
    xp = device.xp()
    hidden, weight = (device.asarray(rng.standard_normal(s, np.float32)) for s in [(rows, width), (vocabulary, width)])
    ids = device.asarray(random_ids(rng, rows, vocabulary))
    dlogp = device.asarray(rng.standard_normal(rows, np.float32))
    results = []
    # Logits at one time: all; those of three rows, in the backward some columns of all; one row, columns of two.
    for logits, sums in (
        (chunked.CHUNK_LOGITS, chunked.CHUNK_SUMS),
        (3 * vocabulary, chunked.CHUNK_SUMS),
        (vocabulary - 1, 2 * width),
    ):
        monkeypatch.setattr(chunked, "CHUNK_LOGITS", logits)
        monkeypatch.setattr(chunked, "CHUNK_SUMS", sums)
        out, lse, entropy = (xp.empty(rows, np.float32) for _ in range(3))
        top1, dhidden, dweight = xp.empty(rows, np.int32), xp.empty_like(hidden), xp.full_like(weight, np.nan)
        linear_logp(hidden, weight, ids, 0.9, LogprobOutputs(out, lse, entropy, top1))
        linear_logp_backward(hidden, weight, ids, 0.9, lse, LossGradients(dlogp, dhidden, dweight))
        results.append((out, lse, entropy, top1, dhidden, dweight))
    for other in results[1:]:
        for first, second in zip(results[0][:4], other[:4], strict=True):
            if device.name() != "cuda":  # cuBLAS may choose another order for fewer rows
                assert_same_bits(second, first, "forward")
        for first, second in zip(results[0][4:], other[4:], strict=True):
            assert_close(second, device.to_host(first), terms=vocabulary, scale=8, what="backward")


@pytest.mark.sim
def test_chunks_give_the_same_rows_in_kernels(rng, monkeypatch):
    test_chunks_give_the_same_rows(rng, monkeypatch)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_numpy_rows_score_as_they_are_drawn(rng, temperature):
    """The log-probability a sampler takes from one row's logits is the trainer's, bit for bit."""
    if device.name() != "cpu":
        pytest.skip("on a GPU equal bits need the native GEMM")
    from rlnumba.kernels.cpu.row_sum import row_terms

    hidden = rng.standard_normal((40, 48), np.float32)
    weight = rng.standard_normal((1003, 48), np.float32)
    ids = rng.integers(0, 1003, 40).astype(np.int32)
    out, lse = np.empty(40, np.float32), np.empty(40, np.float32)
    linear_logp(hidden, weight, ids, temperature, LogprobOutputs(out, lse))
    for rows in (1, 16):
        logits = np.empty((rows, 1003), np.float32)
        for first in range(0, 40 - rows + 1, rows):
            linear(hidden[first : first + rows], weight, logits)
            for i in range(rows):
                drawn = logits[i, ids[first + i]] / np.float32(temperature)
                drawn = np.float32(drawn - row_terms(logits[i], np.float32(temperature))[0])
                assert drawn.tobytes() == out[first + i].tobytes(), f"row {first + i} among {rows}"


def test_large_and_infinite_logits(rng):
    """Logits of 1e4 do not overflow, masked vocabulary (-inf) has probability 0."""
    logits = np.full((3, 70), -np.inf, np.float32)
    logits[0, [3, 69]] = 1e4
    logits[1, [65, 66]] = -1e4, -1e4 - 1
    logits[2] = rng.standard_normal(70)
    ids = np.int32([69, 65, 7])
    out, lse = device.xp().empty(3, np.float32), device.xp().empty(3, np.float32)
    logp_of_logits(device.asarray(logits), device.asarray(ids), 1.0, out, lse)
    shifted = logits[2].astype(np.float64)
    expected = [-np.log(2), -np.log1p(np.exp(-1)), shifted[7] - np.log(np.exp(shifted).sum())]
    np.testing.assert_allclose(device.to_host(out), expected, atol=2e-3)
    np.testing.assert_allclose(device.to_host(out)[2], expected[2], atol=1e-6)


@pytest.mark.sim
def test_large_and_infinite_logits_in_kernels(rng):
    test_large_and_infinite_logits(rng)


def test_entropy_of_masked_vocabulary_has_a_gradient():
    """A token of logit -inf has probability 0 and no gradient, not that of 0 times infinity."""
    logits = device.asarray(np.float32([[0.5, -np.inf, 1.5, -np.inf]]))
    ids, out, lse, entropy = device.asarray(np.int32([0])), *(device.xp().empty(1, np.float32) for _ in range(3))
    logp_of_logits(logits, ids, 1.0, out, lse, entropy)
    dlogits = device.xp().empty((1, 4), np.float32)
    dlogp, options = device.asarray(np.float32([0.3])), RowOptions(entropy, entropy)
    logp_of_logits_backward(logits, ids, 1.0, lse, dlogp, dlogits, 0, options)
    expected = logp_backward_ref(np.array([[0.5, 1.5]]), np.int32([0]), np.array([0.3]), 1.0, device.to_host(entropy))
    np.testing.assert_allclose(device.to_host(dlogits)[0, ::2], expected[0], atol=1e-6)
    assert not device.to_host(dlogits)[0, 1::2].any()


@pytest.mark.sim
def test_entropy_of_masked_vocabulary_has_a_gradient_in_kernels():
    test_entropy_of_masked_vocabulary_has_a_gradient()


def masked_and_renormalised(rng, rows=6, vocabulary=90, width=7, dtype="float32"):
    """linear_logp and its gradients with thresholds, in one call and in two, against the reference in float64."""
    kind, xp = device.dtype(dtype), device.xp()
    hidden = rng.standard_normal((rows, width), np.float32).astype(kind)
    weight = (3 * rng.standard_normal((vocabulary, width), np.float32) / np.sqrt(width)).astype(kind)
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    # Halfway between two logits, so that rounding keeps the same ones. All, one, some of a row.
    order, kept = np.sort(logits, axis=1)[:, ::-1], np.resize([vocabulary - 1, 1, 5, 40], rows)
    thresholds = np.array([order[i, k - 1 : k + 1].mean() for i, k in enumerate(kept)]).astype(np.float32)
    ids = np.array([np.argsort(-logits[i])[rng.integers(0, k)] for i, k in enumerate(kept)], np.int32)
    dlogp, dentropy = (rng.standard_normal(rows).astype(np.float32) for _ in range(2))
    hd, wd, idd, td, dd = (device.asarray(a) for a in (hidden, weight, ids, thresholds, dlogp))
    out, lse, entropy, top1 = (xp.empty(rows, t) for t in (np.float32, np.float32, np.float32, np.int32))
    linear_logp(hd, wd, idd, 0.8, LogprobOutputs(out, lse, entropy, top1), KeptTokens(td))
    expected = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.8, thresholds)
    for actual, value, what in zip((out, lse, entropy), expected, ("logp", "lse", "entropy"), strict=False):
        assert_close(actual, value, "float32", terms=vocabulary, scale=30.0, what=what)
    # One token left is certain.
    assert device.to_host(out)[1] == 0 and abs(device.to_host(entropy)[1]) < 1e-6
    wide = hidden.astype(np.float64), weight.astype(np.float64), ids, dlogp.astype(np.float64), 0.8
    lost = 4 * ROUNDING[dtype] / ROUNDING["float32"]
    for by_entropy in (False, True):
        dhidden, dweight = xp.full((rows, width), np.nan, kind), xp.zeros((vocabulary, width), np.float32)
        options = {"entropy": entropy, "dentropy": device.asarray(dentropy)} if by_entropy else {}
        linear_logp_backward(hd, wd, idd, 0.8, lse, LossGradients(dd, dhidden, dweight, **options), KeptTokens(td))
        dh, dw = linear_logp_backward_ref(*wide, dentropy.astype(np.float64) if by_entropy else None, thresholds)
        assert_close(dhidden, dh, terms=vocabulary + lost, scale=200.0, what="dhidden")
        assert_close(dweight, dw, dtype, terms=400, scale=100.0, what="dweight")
    again = [xp.empty(rows, np.float32) for _ in range(2)]
    gradients = xp.empty((rows, width), kind), xp.empty((vocabulary, width), np.float32)
    both = LogprobOutputs(*again), LossGradients(dd, *gradients)
    linear_logp_with_gradient(hd, wd, idd, 0.8, *both, KeptTokens(td))
    dh, dw = linear_logp_backward_ref(*wide, None, thresholds)
    assert_same_bits(again[0], out, "logp with its gradient")
    assert_close(gradients[0], dh, terms=vocabulary + 2 * lost, scale=200.0, what="dhidden with logp")
    assert_close(gradients[1], dw, dtype, terms=400, scale=200.0, what="dweight with logp")


def test_thresholds(rng):
    masked_and_renormalised(rng)


@pytest.mark.sim
def test_thresholds_in_kernels(rng):
    masked_and_renormalised(rng)
    with dispatch.forced("simt"):
        masked_and_renormalised(rng, dtype="bfloat16")


def allowed_tokens(rng, rows=5, vocabulary=200, width=7, dtype="float32"):
    """linear_logp and its gradients with allowed tokens, in one call and in two, against the reference in float64."""
    kind, xp = device.dtype(dtype), device.xp()
    hidden = rng.standard_normal((rows, width), np.float32).astype(kind)
    weight = (3 * rng.standard_normal((vocabulary, width), np.float32) / np.sqrt(width)).astype(kind)
    keeps = rng.random((rows, vocabulary)) < np.array([[1.0], [0.0], [0.5], [0.1], [0.02]])[:rows]
    keeps[1, 130] = True
    ids = np.array([rng.choice(np.flatnonzero(row)) for row in keeps], np.int32)
    padded = np.zeros((rows, -(-vocabulary // 32) * 32), bool)
    padded[:, :vocabulary] = keeps
    allowed = device.asarray(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    dlogp, dentropy = (rng.standard_normal(rows).astype(np.float32) for _ in range(2))
    logits = np.where(keeps, hidden.astype(np.float64) @ weight.astype(np.float64).T, -np.inf)
    hd, wd, idd, dd = (device.asarray(a) for a in (hidden, weight, ids, dlogp))
    out, lse, entropy, top1 = (xp.empty(rows, t) for t in (np.float32, np.float32, np.float32, np.int32))
    kept = KeptTokens(allowed=allowed)
    linear_logp(hd, wd, idd, 0.8, LogprobOutputs(out, lse, entropy, top1), kept)
    expected = logp_ref(logits, ids, 0.8)
    for actual, value, what in zip((out, lse, entropy), expected, ("logp", "lse", "entropy"), strict=False):
        assert_close(actual, value, "float32", terms=vocabulary, scale=30.0, what=what)
    assert device.to_host(out)[1] == 0 and device.to_host(top1)[1] == 130
    lost = 4 * ROUNDING[dtype] / ROUNDING["float32"]
    for by_entropy in (False, True):
        dhidden, dweight = xp.full((rows, width), np.nan, kind), xp.zeros((vocabulary, width), np.float32)
        options = {"entropy": entropy, "dentropy": device.asarray(dentropy)} if by_entropy else {}
        linear_logp_backward(hd, wd, idd, 0.8, lse, LossGradients(dd, dhidden, dweight, **options), kept)
        dlogits = logp_backward_ref(logits, ids, dlogp.astype(np.float64), 0.8, dentropy if by_entropy else None)
        assert_close(dhidden, dlogits @ weight, terms=vocabulary + lost, scale=200.0, what="dhidden")
        assert_close(dweight, dlogits.T @ hidden, dtype, terms=400, scale=100.0, what="dweight")
        # The gradient reaches no token that is not allowed.
        assert not device.to_host(dweight)[~keeps.any(axis=0)].any()
    again = [xp.empty(rows, np.float32) for _ in range(2)]
    gradients = xp.empty((rows, width), kind), xp.empty((vocabulary, width), np.float32)
    linear_logp_with_gradient(hd, wd, idd, 0.8, LogprobOutputs(*again), LossGradients(dd, *gradients), kept)
    assert_same_bits(again[0], out, "logp with its gradient")


def test_allowed_tokens(rng, monkeypatch):
    allowed_tokens(rng)
    # The backward makes 64 columns at a time.
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 2 * 5 * 60)
    allowed_tokens(rng)
    with pytest.raises(ValueError, match=r"linear_logp: allowed must be \(2, 3\) int32"):
        arrays = [device.asarray(np.zeros((2, 3), np.float32)), device.asarray(np.zeros((70, 3), np.float32))]
        ids, out = device.asarray(np.zeros(2, np.int32)), device.xp().empty(2, np.float32)
        kept = KeptTokens(allowed=device.asarray(np.zeros((2, 2), np.int32)))
        linear_logp(*arrays, ids, 1.0, LogprobOutputs(out, out), kept)


@pytest.mark.sim
def test_allowed_tokens_in_kernels(rng, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 2 * 3 * 60)
    allowed_tokens(rng, rows=3, vocabulary=140)


def test_an_id_below_its_threshold_has_no_probability():
    logits, ids = device.asarray(np.float32([[1, 2, 3]])), device.asarray(np.int32([0]))
    out, lse = device.xp().empty(1, np.float32), device.xp().empty(1, np.float32)
    logp_of_logits(logits, ids, 1.0, out, lse, thresholds=device.asarray(np.float32([2.0])))
    assert device.to_host(out)[0] == -np.inf
    assert abs(device.to_host(lse)[0] - np.log(np.exp(2.0) + np.exp(3.0))) < 1e-6


@pytest.mark.sim
def test_an_id_below_its_threshold_has_no_probability_in_kernels():
    test_an_id_below_its_threshold_has_no_probability()


def test_top1_is_the_lowest_of_equals():
    """Equals in one thread or lane (5, 69), and where the lowest is met last (40 before 66, 9 before 17)."""
    xp = device.xp()
    weight = np.zeros((70, 3), np.float32)
    for row, pair in enumerate([(5, 69), (40, 66), (9, 17)]):
        weight[list(pair), row] = 5
    ids, out, lse, top1 = xp.zeros(3, np.int32), xp.empty(3, np.float32), xp.empty(3, np.float32), xp.empty(3, np.int32)
    hidden = device.asarray(np.eye(3, dtype=np.float32))
    linear_logp(hidden, device.asarray(weight), ids, 1.0, LogprobOutputs(out, lse, top1=top1))
    assert device.to_host(top1).tolist() == [5, 40, 9]


@pytest.mark.sim
def test_top1_is_the_lowest_of_equals_in_kernels():
    test_top1_is_the_lowest_of_equals()


def test_exponential_is_accurate():
    """Of every float32 in steps of 1e-4 down to where it vanishes: two units in the last place."""
    if device.name() != "cpu":
        pytest.skip("the polynomial of kernels/cpu/simd.py")
    from rlnumba.kernels.cpu.logprob import logp_backward_rows

    x = -np.arange(0, 90, 1e-4).astype(np.float32)
    row = np.append(np.float32(0), x)[None]
    out = np.empty_like(row)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    logp_backward_rows(row, np.int32([0]), 0, np.float32(1), zero, -one, zero[:0], out)
    exact = np.exp(x.astype(np.float64))
    relative = np.abs(out[0, 1:] - exact) / exact
    assert relative[x > -87].max() < 2**-23
    assert np.all(out[0, 1:][x < -87] == 0)


def one_and_two_calls(rng, rows, vocabulary, width, dtype, temperature=0.8, without=3):
    """[(logp, lse, entropy, top1, dhidden, dweight)] of linear_logp_with_gradient, and of the two other operators.

    Every fifth row is ignored, every `without`-th has dlogp 0.
    """
    kind, xp = device.dtype(dtype), device.xp()
    hidden = rng.standard_normal((rows, width), np.float32).astype(kind)
    weight = (3 * rng.standard_normal((vocabulary, width), np.float32) / np.sqrt(width)).astype(kind)
    dlogp = rng.standard_normal(rows, np.float32)
    dlogp[1::without] = 0
    arrays = [device.asarray(array) for array in (hidden, weight, random_ids(rng, rows, vocabulary), dlogp)]
    hidden, weight, ids, dlogp = arrays
    results = []
    for together in (True, False):
        logp, lse, entropy = (xp.full(rows, np.nan, np.float32) for _ in range(3))
        top1, dhidden = xp.full(rows, -7, np.int32), xp.full_like(hidden, np.nan)
        dweight = xp.full(weight.shape, np.float32(np.nan))
        outputs, gradients = LogprobOutputs(logp, lse, entropy, top1), LossGradients(dlogp, dhidden, dweight)
        if together:
            linear_logp_with_gradient(hidden, weight, ids, temperature, outputs, gradients)
        else:
            linear_logp(hidden, weight, ids, temperature, outputs)
            linear_logp_backward(hidden, weight, ids, temperature, lse, gradients)
        results.append((logp, lse, entropy, top1, dhidden, dweight))
    return results


NAMES = ("logp", "lse", "entropy", "top1", "dhidden", "dweight")


@pytest.mark.parametrize("shape", [*SMALL, (67, 1000, 33)])
def test_with_gradient_is_the_two_calls(rng, shape):
    """Where the Hopper kernels do not serve: the same bits."""
    if device.name() == "sim" and shape[0] == 67:
        pytest.skip("the others are enough for the kernels")
    results = one_and_two_calls(rng, *shape, "float32")
    for one, two, what in zip(*results, NAMES, strict=True):
        assert_same_bits(one, two, what)


@pytest.mark.sim
def test_with_gradient_is_the_two_calls_in_kernels(rng):
    for shape in SMALL:
        test_with_gradient_is_the_two_calls(rng, shape)
    with dispatch.forced("simt"):
        results = one_and_two_calls(rng, 7, 40, 16, "bfloat16")
    for one, two, what in zip(*results, NAMES, strict=True):
        assert_same_bits(one, two, what)


def test_with_gradient_names_what_is_wrong():
    xp = device.xp()
    hidden, weight, dweight = (xp.zeros(shape, np.float32) for shape in ((2, 3), (5, 3), (5, 3)))
    ids, out = xp.zeros(2, np.int32), xp.zeros(2, np.float32)
    outputs, gradients = LogprobOutputs(out, out), LossGradients(out, hidden, dweight)
    with pytest.raises(ValueError, match="linear_logp_with_gradient: temperature must be > 0, got -1"):
        linear_logp_with_gradient(hidden, weight, ids, -1.0, outputs, gradients)
    with pytest.raises(ValueError, match=r"linear_logp_with_gradient: dlogp must be \(2\) float32, got \(3,\) float32"):
        wrong = gradients._replace(dlogp=xp.zeros(3, np.float32))
        linear_logp_with_gradient(hidden, weight, ids, 1.0, outputs, wrong)
    ids[1] = 5
    if device.name() != "cuda" or logprob.DEBUG:
        with pytest.raises(ValueError, match=r"linear_logp_with_gradient: ids\[1\] must be in \[0, 5\) or -100, got 5"):
            linear_logp_with_gradient(hidden, weight, ids, 1.0, outputs, gradients)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_a_bad_id_is_named(bad):
    if device.name() == "cuda" and not logprob.DEBUG:
        pytest.skip("checked on a GPU with RLNUMBA_DEBUG=1")
    xp = device.xp()
    out, lse = xp.zeros(2, np.float32), xp.zeros(2, np.float32)
    ids = device.asarray(np.int32([IGNORED, bad]))
    message = rf"ids\[1\] must be in \[0, 5\) or -100, got {bad}"
    with pytest.raises(ValueError, match="linear_logp: " + message):
        hidden, weight = xp.zeros((2, 3), np.float32), xp.zeros((5, 3), np.float32)
        linear_logp(hidden, weight, ids, 1.0, LogprobOutputs(out, lse))


@pytest.mark.gpu
def test_a_bad_id_gives_nan_on_the_gpu():
    if logprob.DEBUG:
        pytest.skip("raises with RLNUMBA_DEBUG=1")
    xp = device.xp()
    out, lse = xp.zeros(2, np.float32), xp.zeros(2, np.float32)
    logp_of_logits(xp.zeros((2, 5), np.float32), device.asarray(np.int32([0, 5])), 1.0, out, lse)
    assert np.isnan(device.to_host(out)).tolist() == [False, True]


def test_wrong_arguments_are_named(monkeypatch):
    xp = device.xp()
    hidden, weight = xp.zeros((2, 3), np.float32), xp.zeros((5, 3), np.float32)
    ids, out = xp.zeros(2, np.int32), xp.zeros(2, np.float32)
    with pytest.raises(ValueError, match="linear_logp: temperature must be > 0, got 0"):
        linear_logp(hidden, weight, ids, 0.0, LogprobOutputs(out, out))
    with pytest.raises(ValueError, match=r"linear_logp: lse must be \(2\) float32, got \(3,\) float32"):
        linear_logp(hidden, weight, ids, 1.0, LogprobOutputs(out, xp.zeros(3, np.float32)))
    top1 = xp.zeros(2, np.int32)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="linear_logp: top1 is exact for up to 4 rows"):
        patch.setattr(logprob, "MOST_COLUMNS", 4)
        linear_logp(hidden, weight, ids, 1.0, LogprobOutputs(out, out, top1=top1))
    with pytest.raises(ValueError, match=r"linear_logp: ids must be \(2\) int32, got \(2,\) int64"):
        linear_logp(hidden, weight, xp.zeros(2, np.int64), 1.0, LogprobOutputs(out, out))
