import functools

import numpy as np
import pytest

from rlnumba.kernels.attention.ops import attention, attention_backward
from rlnumba.kernels.attention.reference import attention_backward_ref, attention_ref
from rlnumba.kernels.attention.sequences import PackedSequences
from rlnumba.kernels.attention.simt import attention_gradient_kernel, attention_kernel, prefill_config
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

# Lengths of the sequences, query heads, key heads, head_dim. A tile is 32 keys and up to 64 rows.
SMALL = [
    ([1], 1, 1, 16),
    ([5, 0, 3], 4, 2, 18),
    ([40], 2, 1, 16),
    ([], 2, 1, 16),
]
MIDDLE = [
    ([1, 31, 32, 33], 6, 6, 48),
    ([63, 64, 65, 0, 2], 9, 3, 64),
    ([150], 4, 1, 50),
    ([40, 7], 8, 2, 80),
    ([33, 70], 2, 2, 96),
    ([65, 12], 4, 2, 256),
    ([130, 3], 7, 1, 128),
]
# A layer of Qwen3-0.6B, N = 4096.
REAL = [([1, 7, 64, 129, 500, 1000, 2395], 16, 8, 128)]


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def sequences_of(lengths):
    return PackedSequences(device.asarray(bounds(lengths)), max(lengths, default=0))


def packed(rng, lengths, heads, kv_heads, head_dim, dtype):
    """q, k, v, dout as NumPy arrays; keys that stand out, so that the softmax is not flat."""
    tokens = sum(lengths)
    shapes = [(tokens, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    return [x.astype(device.dtype(dtype)) for x in (q, 2 * k, v, dout)]


def forward(q, k, v, lengths):
    """(out, lse) of the operator, from and to arrays of the device."""
    xp = device.xp()
    out = xp.full(q.shape, np.nan, q.dtype)
    lse = xp.full((q.shape[1], q.shape[0]), np.nan, np.float32)
    attention(q, k, v, sequences_of(lengths), q.shape[2] ** -0.5, out, lse)
    return out, lse


def run_all(rng, case, dtype):
    lengths, heads, kv_heads, head_dim = case
    longest, scale = max(lengths, default=0), head_dim**-0.5
    host = packed(rng, lengths, heads, kv_heads, head_dim, dtype)
    q, k, v, dout = (device.asarray(x) for x in host)
    out, lse = forward(q, k, v, lengths)
    expected, expected_lse = attention_ref(*host[:3], bounds(lengths), scale)
    assert_close(out, expected, terms=longest, what="out")
    assert_close(lse, expected_lse, terms=head_dim, what="lse")

    xp = device.xp()
    gradients = [xp.full(x.shape, np.nan, x.dtype) for x in (q, k, v)]
    attention_backward(dout, (q, k, v), out, lse, sequences_of(lengths), scale, gradients)
    expected = attention_backward_ref(host[3], *host[:3], bounds(lengths), scale)
    for name, actual, wanted in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        # ds is a difference of terms of the size of dout . v, and delta holds out's rounding.
        size = 4 * np.max(np.abs(wanted), initial=1.0)
        assert_close(actual, wanted, terms=head_dim + longest, scale=size, what=name)
    return out, lse, gradients


def test_reference_is_a_softmax(rng):
    lengths = [3, 1, 6]
    q, k, v, _ = (x.astype(np.float64) for x in packed(rng, lengths, 4, 2, 8, "float32"))
    out, lse = attention_ref(q, k, v, bounds(lengths), 0.3)
    # Row 2 of the third sequence, token 6, head 3: keys 4, 5, 6 of key head 1.
    weights = np.exp(0.3 * k[4:7, 1] @ q[6, 3])
    np.testing.assert_allclose(out[6, 3], weights @ v[4:7, 1] / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(lse[3, 6], np.log(weights.sum()), rtol=1e-12)
    np.testing.assert_allclose(out[3], np.repeat(v[3], 2, axis=0), rtol=1e-12)


def test_gradient_of_reference(rng):
    lengths = [3, 1, 4]
    q, k, v, dout = (x.astype(np.float64) for x in packed(rng, lengths, 4, 2, 6, "float32"))
    gradients = attention_backward_ref(dout, q, k, v, bounds(lengths), 0.4)

    def loss():
        return float(np.sum(attention_ref(q, k, v, bounds(lengths), 0.4)[0] * dout))

    for name, gradient, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True):
        assert_gradient(loss, gradient, x, name)


@pytest.mark.sim
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_simulator(rng, case):
    run_all(rng, case, "float32")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_simulator_16_bit(rng, dtype):
    run_all(rng, ([2, 3], 2, 2, 16), dtype)


@pytest.mark.parametrize("case", SMALL + MIDDLE + [([512, 300], 16, 8, 128)], ids=str)
def test_numpy_device(rng, case):
    if device.name() != "cpu":
        pytest.skip("compiled loops of the CPU")
    run_all(rng, case, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", SMALL + MIDDLE + REAL, ids=str)
def test_gpu(rng, case, dtype):
    run_all(rng, case, dtype)


@pytest.mark.gpu
def test_gradients_have_the_same_bits_every_time(rng):
    first = run_all(np.random.default_rng(0), REAL[0], "bfloat16")[2]
    second = run_all(np.random.default_rng(0), REAL[0], "bfloat16")[2]
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)


def rows_are_independent(rng, lengths, heads, kv_heads, head_dim):
    """A sequence's rows have the same bits alone, in a batch, in another order, and when it goes on."""
    arrays = packed(rng, lengths, heads, kv_heads, head_dim, "float32")[:3]
    starts = bounds(lengths)
    pieces = [[x[starts[b] : starts[b + 1]] for x in arrays] for b in range(len(lengths))]
    out, lse = (device.to_host(x) for x in forward(*(device.asarray(x) for x in arrays), lengths))

    def compare(order, cut, what):
        chosen = [[x[: len(x) - cut] for x in pieces[b]] for b in order]
        some = [len(piece[0]) for piece in chosen]
        together = [device.asarray(np.concatenate(parts)) for parts in zip(*chosen, strict=True)]
        other_out, other_lse = (device.to_host(x) for x in forward(*together, some))
        for i, b in enumerate(order):
            here = slice(bounds(some)[i], bounds(some)[i + 1])
            there = slice(starts[b], starts[b] + some[i])
            assert_same_bits(other_out[here], out[there], f"{what}, sequence {b}")
            assert_same_bits(other_lse[:, here].copy(), lse[:, there].copy(), f"lse {what}, sequence {b}")

    compare(range(len(lengths))[::-1], 0, "in reverse order")
    compare(range(len(lengths)), 1, "without the last token")
    for b in range(len(lengths)):
        compare([b], 0, "alone")


def test_rows_are_independent(rng):
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    rows_are_independent(rng, [70, 1, 33, 5, 64], 6, 3, 48)
    rows_are_independent(rng, [100, 65], 4, 2, 50)


@pytest.mark.sim
def test_rows_are_independent_in_the_simulator(rng):
    rows_are_independent(rng, [2, 34], 2, 1, 16)


def test_later_tokens_do_not_reach_earlier_rows(rng):
    """Also where they are huge: what lies beyond a row is masked, not multiplied by a small weight."""
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    q, k, v, _ = packed(rng, [60], 2, 1, 16, "float32")
    before = [device.to_host(x) for x in forward(*(device.asarray(x) for x in (q, k, v)), [60])]
    k[40:] *= 1e4
    v[40:] *= 1e30
    after = [device.to_host(x) for x in forward(*(device.asarray(x) for x in (q, k, v)), [60])]
    assert_same_bits(after[0][:40], before[0][:40])
    assert_same_bits(after[1][:, :40].copy(), before[1][:, :40].copy())
    assert np.isfinite(after[0]).all()


def test_a_nan_spoils_its_row_and_no_other(rng):
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    q, k, v, _ = packed(rng, [40], 2, 1, 16, "float32")
    before = device.to_host(forward(*(device.asarray(x) for x in (q, k, v)), [40])[0])
    q[35, 1, 3] = np.nan
    after = device.to_host(forward(*(device.asarray(x) for x in (q, k, v)), [40])[0])
    assert np.isnan(after[35, 1]).all()
    after[35, 1] = before[35, 1]
    assert_same_bits(after, before)


def test_large_scores_do_not_overflow(rng):
    if device.name() == "sim":
        pytest.skip("too large for the simulator")
    q, k, v, _ = packed(rng, [70], 2, 2, 16, "float32")
    q *= 300
    out, lse = forward(*(device.asarray(x) for x in (q, k, v)), [70])
    expected, expected_lse = attention_ref(q, k, v, bounds([70]), 0.25)
    # A score's rounding error, about 1e-7 of its size of 1e4, becomes a relative error of its exponential.
    assert_close(out, expected, scale=1e4, what="out")
    assert_close(lse, expected_lse, terms=16, what="lse")


@pytest.mark.parametrize("head_dim", [48, 128, 256])
def test_kernels_compile_for_gpus(compile_offline, head_dim):
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    x, f, i = "uint16[:,:,::1]", "float32[:,::1]", "int32[::1]"
    config, backward_config = prefill_config(head_dim), prefill_config(head_dim, row_tiles=2)
    compile_sm90 = functools.partial(compile_offline, architecture=(9, 0))
    numbers = [i, "int32", i, i, "float32"]
    troubles = compile_sm90(attention_kernel(config, False, 0), [x, x, x, *numbers, x, f])
    for of_keys in (False, True):
        kernel = attention_gradient_kernel(backward_config, of_keys, 0)
        troubles += compile_sm90(kernel, [x, x, x, x, f, f, i, "float32", x, x])
    if head_dim == 48:
        x = "float32[:,:,::1]"
        troubles += compile_offline(attention_kernel(config, False, 0), [x, x, x, *numbers, x, f], (8, 0))
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    xp = device.xp()
    q, k, lse = xp.zeros((4, 6, 16), np.float32), xp.zeros((4, 4, 16), np.float32), xp.zeros((6, 4), np.float32)
    sequences = sequences_of([4])
    with pytest.raises(ValueError, match="attention: the number of query heads must be a multiple of 4"):
        attention(q, k, k, sequences, 1.0, q, lse)
    odd = xp.zeros((4, 2, 15), np.float32)
    with pytest.raises(ValueError, match="attention: head_dim must be even and at most 256, got 15"):
        attention(odd, odd, odd, sequences, 1.0, odd, lse)
    with pytest.raises(ValueError, match=r"attention: lse must be \(6, 4\) float32, got \(4, 6\) float32"):
        attention(q, q, q, sequences, 1.0, q, lse.T.copy())
    with pytest.raises(ValueError, match=r"attention: k must be \(4, 6, 16\) float32, got \(3, 6, 16\) float32"):
        attention(q, q[:3].copy(), q[:3].copy(), sequences, 1.0, q, lse)
    with pytest.raises(ValueError, match=r"attention_backward: dk must be \(4, 6, 16\) float32, got \(4, 4, 16\)"):
        attention_backward(q, (q, q, q), q, lse, sequences, 1.0, (q, k, q))
