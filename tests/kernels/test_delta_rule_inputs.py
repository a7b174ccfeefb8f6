"""Convolution, norms and gates before the gated delta rule, and the gated norm after it, with their gradients."""

import numpy as np
import pytest

from rlnumba.kernels.delta_rule import gated_norm as norm
from rlnumba.kernels.delta_rule import inputs
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, LEAST_LOG_DECAY, StateSequences, Tokens, operand_dtype
from rlnumba.kernels.delta_rule.gated_norm import (
    gated_norm,
    gated_norm_backward,
    gated_norm_backward_ref,
    gated_norm_ref,
)
from rlnumba.kernels.delta_rule.input_rows import TAPS, DeltaRuleHeads
from rlnumba.kernels.delta_rule.inputs import (
    ConvCache,
    InputWeights,
    delta_rule_inputs,
    delta_rule_inputs_backward,
    delta_rule_inputs_backward_ref,
    delta_rule_inputs_ref,
)
from rlnumba.runtime import device
from tests.close import assert_gradient, assert_same_bits
from tests.kernels.test_delta_rule import Tree

HEADS, SMALL = DeltaRuleHeads(2, 4, 20, 36), DeltaRuleHeads(1, 2, 3, 33)
EPS = 1e-6
# Relative errors, roots of mean squares, against float64: a rounding to the dtype after each step.
ALLOWED = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def random_inputs(rng, count, heads, dtype="float64"):
    """(projected, InputWeights) on the host; some heads forget beyond the bound."""
    kind = np.dtype(dtype) if dtype == "float64" else device.dtype(dtype)
    projected = rng.standard_normal((count, heads.columns))
    a_log = np.where(np.arange(heads.value_heads) == 0, 5.0, rng.standard_normal(heads.value_heads))
    conv, dt_bias = 0.5 * rng.standard_normal((heads.channels, TAPS)), rng.standard_normal(heads.value_heads)
    return projected.astype(kind), InputWeights(conv.astype(kind), a_log.astype(kind), dt_bias.astype(kind))


def on_device(arrays):
    return arrays._make(device.asarray(np.ascontiguousarray(x)) for x in arrays)


def in_float64(arrays):
    return arrays._make(np.asarray(x, np.float64) for x in arrays)


def empty_tokens(count, heads, operand, dtype):
    """Tokens of NaN."""
    keys, values = (count, heads.key_heads, heads.key_dim), (count, heads.value_heads, heads.value_dim)
    kinds = (keys, operand), (keys, operand), (values, dtype), (values[:2], np.float32), (values[:2], np.float32)
    return Tokens(*(device.xp().full(shape, np.nan, kind) for shape, kind in kinds))


def packed(projected, weights, heads, lengths):
    """The Tokens of delta_rule_inputs."""
    tokens = empty_tokens(len(projected), heads, operand_dtype(projected.dtype), projected.dtype)
    arguments = device.asarray(projected), on_device(weights), heads, device.asarray(bounds(lengths))
    delta_rule_inputs(*arguments, tokens)
    return tokens


def check_close(actual, expected, dtype, what):
    actual, expected = device.to_host(actual).astype(np.float64), np.asarray(expected, np.float64)
    error = np.sqrt(np.mean((actual - expected) ** 2) / max(np.mean(expected**2), 1e-30)) if expected.size else 0.0
    assert error < ALLOWED[dtype], f"{what}: {error:.3g}"


def check_inputs(rng, lengths, heads, dtype):
    projected, weights = random_inputs(rng, sum(lengths), heads, dtype)
    tokens = packed(projected, weights, heads, lengths)
    expected = delta_rule_inputs_ref(projected.astype(np.float64), in_float64(weights), heads, bounds(lengths))
    for name, got, want in zip(Tokens._fields, tokens, expected, strict=True):
        check_close(got, want, dtype, name)
    assert float(device.to_host(tokens.log_decay).min()) == LEAST_LOG_DECAY


def check_inputs_backward(rng, lengths, heads, dtype):
    count, xp = sum(lengths), device.xp()
    projected, weights = random_inputs(rng, count, heads, dtype)
    gradients = empty_tokens(count, heads, projected.dtype, projected.dtype)
    gradients = gradients._make(rng.standard_normal(x.shape).astype(x.dtype) for x in gradients)
    dprojected = xp.full(projected.shape, np.nan, projected.dtype)
    dweights = InputWeights(*(xp.ones(x.shape, np.float32) for x in weights))
    arguments = on_device(gradients), device.asarray(projected), on_device(weights), heads
    delta_rule_inputs_backward(*arguments, device.asarray(bounds(lengths)), dprojected, dweights)
    wanted = np.full(projected.shape, np.nan)
    arguments = in_float64(gradients), projected.astype(np.float64), in_float64(weights), heads, bounds(lengths)
    expected = delta_rule_inputs_backward_ref(*arguments, wanted)
    dprojected = device.to_host(dprojected)
    for what, columns in (("dx", slice(heads.channels)), ("gates", slice(heads.gates, None))):
        check_close(dprojected[:, columns], wanted[:, columns], dtype, what)
    assert np.isnan(dprojected[:, heads.channels : heads.gates]).all()
    for name, got, want in zip(InputWeights._fields, dweights, expected, strict=True):
        check_close(got, want + 1, dtype, name)


def check_prefixes(rng, tree, heads, dtype):
    """A convolution begins with the parent's last rows: the bits of whole sequences, and sums of their gradients."""
    projected, weights = random_inputs(rng, tree.num_rows, heads, dtype)
    tokens = empty_tokens(tree.num_rows, heads, operand_dtype(projected.dtype), projected.dtype)
    of_sequences = device.asarray(projected), on_device(weights), heads, device.asarray(bounds(tree.own))
    delta_rule_inputs(*of_sequences, tokens, prefixes=tree.prefixes())
    for name, got, want in zip(
        Tokens._fields, tokens, packed(projected[tree.every], weights, heads, tree.lengths), strict=True
    ):
        assert_same_bits(device.to_host(got)[tree.every], want, name)
    gradients = empty_tokens(tree.num_rows, heads, projected.dtype, projected.dtype)
    gradients = gradients._make(rng.standard_normal(x.shape).astype(x.dtype) for x in gradients)
    dprojected = device.xp().full(projected.shape, np.nan, projected.dtype)
    dweights = InputWeights(*(device.xp().zeros(x.shape, np.float32) for x in weights))
    delta_rule_inputs_backward(on_device(gradients), *of_sequences, dprojected, dweights, tree.prefixes())
    # Of a row that several whole sequences have, one has the gradient of its tokens.
    whole = in_float64(gradients)._make(
        np.asarray(x, np.float64)[tree.every] * tree.is_own.reshape(-1, *[1] * (x.ndim - 1)) for x in gradients
    )
    wanted = np.zeros((len(tree.every), heads.columns))
    arguments = whole, projected[tree.every].astype(np.float64), in_float64(weights), heads, bounds(tree.lengths)
    expected, dprojected = delta_rule_inputs_backward_ref(*arguments, wanted), device.to_host(dprojected)
    wanted = tree.summed(wanted)
    ends = bounds(tree.own)[1:]
    last = np.concatenate([np.arange(end - TAPS + 1, end) for i, end in enumerate(ends) if i in tree.parents])
    for what, rows in (("dx", slice(None)), ("dx of the last rows", last)):
        check_close(dprojected[rows, : heads.channels], wanted[rows, : heads.channels], dtype, what)
    check_close(dprojected[:, heads.gates :], wanted[:, heads.gates :], dtype, "gates")
    for name, got, want in zip(InputWeights._fields, dweights, expected, strict=True):
        check_close(got, want, dtype, name)


def check_cuts(rng, lengths, heads, dtype, longest=90):
    """New tokens of sequences in the cache have the bits of packed sequences, whatever the cuts; also from a page."""
    projected, weights = random_inputs(rng, sum(lengths), heads, dtype)
    expected, first, count = packed(projected, weights, heads, lengths), bounds(lengths)[:-1], len(lengths)
    full, width = device.xp().full, max(lengths) // BLOCK + 1
    cache = ConvCache(
        full((count, 5, heads.channels), np.nan, projected.dtype),
        full((count * width, TAPS - 1, heads.channels), np.nan, projected.dtype),
    )
    tables = rng.permutation(count * width).astype(np.int32).reshape(count, width)
    position, hits = np.zeros(count, int), np.zeros(count, int)
    while (position < lengths).any():
        order = [b for b in rng.permutation(count) if position[b] < lengths[b]]
        begins = position[order]
        steps = np.where(rng.random(len(order)) < 0.4, 1, rng.integers(1, longest, len(order)))
        ends = np.minimum(begins + steps, np.array(lengths)[order])
        rows = np.concatenate([first[b] + np.arange(i, j) for b, i, j in zip(order, begins, ends, strict=True)])
        arrays = bounds(ends - begins), ends, tables[order], order, np.where(hits[order] > 0, hits[order], -1)
        sequences = StateSequences(*(device.asarray(np.array(x, np.int32)) for x in arrays))
        tokens = empty_tokens(len(rows), heads, expected.q.dtype, projected.dtype)
        arguments = device.asarray(projected[rows]), on_device(weights), heads, sequences, tokens
        delta_rule_inputs(*arguments, cache)
        for name, got, want in zip(Tokens._fields, tokens, expected, strict=True):
            assert_same_bits(got, device.to_host(want)[rows], f"{name}, positions {begins} to {ends} of {order}")
        position[order] = ends
        # Some go back to a boundary, with nothing but its page.
        for b in order:
            boundary = (position[b] - 1) // BLOCK * BLOCK
            if boundary > 0 and position[b] < lengths[b] and rng.random() < 0.5:
                position[b] = hits[b] = boundary
                cache.rows[b] = np.nan


def check_gated_norm(rng, count, heads, dtype):
    projected, weights = random_inputs(rng, count, heads, dtype)
    o = rng.standard_normal((count, heads.value_heads, heads.value_dim)).astype(operand_dtype(projected.dtype))
    dout, weight = rng.standard_normal(o.shape).astype(projected.dtype), rng.standard_normal(heads.value_dim)
    xp, weight = device.xp(), weight.astype(projected.dtype)
    out, rstd = xp.full(o.shape, np.nan, projected.dtype), xp.full(o.shape[:2], np.nan, np.float32)
    arrays = [device.asarray(x) for x in (o, projected, weight, dout)]
    gated_norm(*arrays[:2], heads, arrays[2], EPS, out, rstd)
    z = projected[:, heads.channels : heads.gates].reshape(o.shape).astype(np.float64)
    expected, wanted_rstd = gated_norm_ref(o.astype(np.float64), z, weight.astype(np.float64), EPS)
    check_close(out, expected, dtype, "out")
    check_close(rstd, wanted_rstd, dtype, "rstd")
    do, dprojected = xp.full(o.shape, np.nan, projected.dtype), xp.full(projected.shape, np.nan, projected.dtype)
    dweight = xp.ones(weight.shape, np.float32)
    gated_norm_backward(arrays[3], arrays[:2], heads, arrays[2], rstd, (do, dprojected), dweight)
    arguments = dout.astype(np.float64), o.astype(np.float64), z, weight.astype(np.float64), wanted_rstd
    wanted_do, wanted_dz, wanted_dweight = gated_norm_backward_ref(*arguments)
    dprojected = device.to_host(dprojected)
    check_close(do, wanted_do, dtype, "do")
    check_close(dprojected[:, heads.channels : heads.gates].reshape(o.shape), wanted_dz, dtype, "dz")
    check_close(dweight, wanted_dweight + 1, dtype, "dweight")
    assert np.isnan(dprojected[:, : heads.channels]).all() and np.isnan(dprojected[:, heads.gates :]).all()


def test_gradient_of_references(rng):
    heads, lengths = DeltaRuleHeads(1, 2, 3, 2), [5, 2]
    projected, weights = random_inputs(rng, 7, heads)
    weights.a_log[0] = 0.5
    expected = delta_rule_inputs_ref(projected, weights, heads, bounds(lengths))
    gradients = expected._make(rng.standard_normal(x.shape) for x in expected)

    def loss():
        tokens = delta_rule_inputs_ref(projected, weights, heads, bounds(lengths))
        return sum(float(np.sum(x * dx)) for x, dx in zip(tokens, gradients, strict=True))

    dprojected = np.zeros_like(projected)
    dweights = delta_rule_inputs_backward_ref(gradients, projected, weights, heads, bounds(lengths), dprojected)
    assert_gradient(loss, dprojected, projected, "dprojected")
    for name, array, gradient in zip(InputWeights._fields, weights, dweights, strict=True):
        assert_gradient(loss, gradient, array, name)
    o, z, dout, weight = (rng.standard_normal(shape) for shape in [(3, 2, 4)] * 3 + [(4,)])
    _, rstd = gated_norm_ref(o, z, weight, EPS)
    found = gated_norm_backward_ref(dout, o, z, weight, rstd)
    for array, gradient in zip((o, z, weight), found, strict=True):
        assert_gradient(lambda: float(np.sum(gated_norm_ref(o, z, weight, EPS)[0] * dout)), gradient, array)


def test_numpy_device(rng):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    check_inputs(rng, [1, 2, 0, 70, 5], HEADS, "float32")
    check_inputs_backward(rng, [1, 2, 0, 70, 5], HEADS, "float32")
    check_cuts(rng, [200, 3, 130], HEADS, "float32")
    check_gated_norm(rng, 70, HEADS, "float32")
    check_prefixes(rng, Tree.random(rng), HEADS, "float32")


@pytest.mark.sim
@pytest.mark.parametrize("heads, dtype", [(SMALL, "bfloat16"), (DeltaRuleHeads(1, 1, 5, 5), "float32")])
def test_simulator_of_prefixes(rng, monkeypatch, heads, dtype):
    """More children than warps, of one to four rows; two levels of parents."""
    monkeypatch.setattr(inputs, "ENOUGH_WARPS", 8)
    check_prefixes(
        rng, Tree([64, 1, 2, 3, 64, 4, 1, 2, *[1] * 8, 1], [-1, 0, 0, 0, 0, 4, 4, *[0] * 9, -1]), heads, dtype
    )


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simulator(rng, dtype):
    check_inputs(rng, [1, 0, 5], SMALL, dtype)
    check_inputs_backward(rng, [1, 0, 64], SMALL, dtype)
    check_gated_norm(rng, 3, SMALL, dtype)


@pytest.mark.sim
def test_simulator_of_many_rows_of_the_gated_norm(rng, monkeypatch):
    """Heads of which a lane has 16 bytes; a block goes over more of them than it has at a time."""
    monkeypatch.setattr(norm, "BACKWARD_BLOCKS", 1)
    check_gated_norm(rng, 40, DeltaRuleHeads(1, 4, 4, 16), "bfloat16")


@pytest.mark.sim
def test_simulator_of_cuts(rng, monkeypatch):
    # Large calls have tiles of several tokens: a warp goes over the bounds of sequences and of blocks.
    monkeypatch.setattr(inputs, "ENOUGH_WARPS", 8)
    check_inputs(rng, [1, 0, 5, 20, 2], SMALL, "bfloat16")
    check_cuts(rng, [70, 3], DeltaRuleHeads(1, 1, 3, 5), "bfloat16", longest=60)


@pytest.mark.sim
def test_a_page_has_the_rows_ahead_of_its_last_boundary(rng, monkeypatch):
    """Also where the blocks of threads of later tokens run first, of which a GPU promises nothing."""
    if device.name() == "sim":
        from rlnumba.runtime.simulator import Grid

        run = Grid.run
        monkeypatch.setattr(Grid, "run", lambda grid, *work: run(grid, *work[:-1], [*work[-1]][::-1]))
    heads, count, pages = DeltaRuleHeads(1, 1, 3, 5), 2 * BLOCK + 2, np.array([[2, 0, 2, 2]], np.int32)
    projected, weights = random_inputs(rng, count, heads, "float32")
    full = device.xp().full
    cache = ConvCache(
        full((1, 5, heads.channels), 7, np.float32), full((3, TAPS - 1, heads.channels), np.nan, np.float32)
    )
    # The tokens from the last one of the first block on, to the first but one of the fourth.
    start = BLOCK - 1
    arrays = [0, count], [start + count], pages, [0], [-1]
    sequences = StateSequences(*(device.asarray(np.array(x, np.int32)) for x in arrays))
    tokens = empty_tokens(count, heads, np.float32, np.float32)
    delta_rule_inputs(device.asarray(projected), on_device(weights), heads, sequences, tokens, cache)
    for page, boundary in ((0, 2 * BLOCK), (2, 3 * BLOCK)):
        rows = projected[boundary - start - (TAPS - 1) : boundary - start, : heads.channels]
        assert_same_bits(cache.page_rows[page], rows)
    assert np.isnan(device.to_host(cache.page_rows[1])).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu(rng, dtype):
    for heads in (HEADS, DeltaRuleHeads(16, 32, 128, 128), DeltaRuleHeads(1, 1, 256, 40)):
        check_inputs(rng, [1, 2, 0, 700, 5, 64], heads, dtype)
        check_inputs_backward(rng, [1, 2, 0, 700, 5, 64], heads, dtype)
        check_gated_norm(rng, 333, heads, dtype)
        check_prefixes(rng, Tree.random(rng), heads, dtype)
        check_cuts(rng, [300, 3, 130], heads, dtype)
