"""A decode step of linear attention in one kernel: the bits of the arithmetic that training and prefill have."""

import numpy as np
import pytest

from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    LARGEST_OPERAND,
    LOG2_E,
    LOW_SCALE,
    SUB_BLOCK,
    VALUE_SCALE,
    StateCache,
    StateSequences,
)
from rlnumba.kernels.delta_rule.decode.kernel import DecodeOutputs, delta_rule_decode
from rlnumba.kernels.delta_rule.gated_norm import gated_norm
from rlnumba.kernels.delta_rule.input_rows import TAPS, DeltaRuleHeads
from rlnumba.kernels.delta_rule.inputs import ConvCache, InputWeights
from rlnumba.kernels.delta_rule.ops import delta_rule
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.kernels.test_delta_rule import bounds, relative_error
from tests.kernels.test_delta_rule_inputs import EPS, on_device, packed, random_inputs

# Two value heads of one key head.
HEADS = DeltaRuleHeads(1, 2, 128, 128)
# (tokens before the step's, tokens at which the sequence resumed): within a block, a fold, a prefix hit, the second
# token; and a fold of the first block, the second token behind a hit, the first token, other sub-blocks, the last token
# of a block.
PLACES = [(40, -1), (128, -1), (64, 64), (1, -1)]
MORE = [(64, -1), (66, 64), (0, -1), (5, -1), (63, -1), (70, -1), (127, -1), (65, 64), (128, 64), (129, -1), (190, 128)]


def operand(x):
    return np.clip(np.asarray(x, np.float32), -LARGEST_OPERAND, LARGEST_OPERAND).astype(np.float16).astype(np.float32)


def product(total, a, b):
    """total + a b as the simulator's tensor cores add: 16 products at a time, with one rounding."""
    for first in range(0, a.shape[1], 16):
        exact = total.astype(np.float64)
        for k in range(first, first + 16):
            exact = exact + np.multiply.outer(a[:, k].astype(np.float64), b[k].astype(np.float64))
        total = exact.astype(np.float32)
    return total


def fma(a, b, c):
    """a b + c with the two roundings of the simulator's fma."""
    return np.asarray(a, np.float32) * np.asarray(b, np.float32) + np.asarray(c, np.float32)


def decays(later, earlier):
    """(later, earlier): exp of the differences of two lists of sums of log decays."""
    with np.errstate(over="ignore"):
        exponents = np.subtract.outer(np.asarray(later, np.float32), np.asarray(earlier, np.float32)) * LOG2_E
        # ex2.approx.ftz makes 0 of these.
        return np.where(exponents < np.finfo(np.float32).minexp, np.float32(0), np.exp2(exponents))


class Head:
    """The gated delta rule of one value head of one sequence: outputs, rows, and states after each full block."""

    def __init__(self, q, k, v, beta, log_decay):
        count, dim = v.shape
        self.k, self.o, self.w = k, np.zeros((count, dim), np.float32), np.zeros((count, dim), np.float32)
        self.sums = np.zeros(count, np.float32)
        self.states = [(np.zeros((k.shape[1], dim), np.float32),) * 2]
        for first in range(0, count, BLOCK):
            self._block(slice(first, min(first + BLOCK, count)), q, k, v, beta, log_decay)

    def _block(self, rows, q, k, v, beta, log_decay):
        k, q, v, beta = k[rows], q[rows], v[rows] * VALUE_SCALE, beta[rows]
        count, (high, low) = len(k), self.states[-1]
        total, sums, w = np.float32(0), np.zeros(count, np.float32), np.zeros((BLOCK, v.shape[1]), np.float32)
        for t in range(count):
            total = sums[t] = np.float32(log_decay[rows][t] if t == 0 else total + log_decay[rows][t])
        decay = np.tril(decays(sums, sums))
        since, none = decays(sums, [np.float32(0)]), np.zeros((count, count), np.float32)
        m, p = np.tril(decay * product(none, k, k.T), -1), np.tril(decay * product(none, q, k.T))
        zeros = np.zeros(v.shape, np.float32)
        r = fma(-since, product(zeros, k, high), v) + np.float32(0)
        for t in range(count):
            b = t // SUB_BLOCK * SUB_BLOCK
            row = product(r[t : t + 1], operand(-m[t : t + 1, :b]), w[:b])[0]
            for j in range(b, t):
                row = fma(-m[t, j], w[j], row)
            w[t] = operand(beta[t] * row)
        weights = np.zeros((count, BLOCK), np.float32)
        weights[:, :count] = operand(p)
        o = product(fma(since, product(zeros, q, high), 0), weights, w)
        self.o[rows], self.w[rows], self.sums[rows] = operand(o / VALUE_SCALE), w[:count], sums
        if count == BLOCK:
            update = operand(decays(sums[-1:], sums)[0][:, None] * w)
            state = fma(decays(sums[-1:], [np.float32(0)])[0, 0], fma(low, 1 / LOW_SCALE, high), 0)
            state = product(state, k.T, update)
            self.states.append((operand(state), operand((state - operand(state)) * LOW_SCALE)))


class Step:
    """Caches of sequences before a decode step, and what the step has to write."""

    def __init__(self, rng, places, heads, dtype):
        self.heads, self.places = heads, places
        lengths = [start + 1 for start, _ in places]
        self.projected, self.weights = random_inputs(rng, sum(lengths), heads, dtype)
        # Some heads forget slowly, and the first one within few tokens.
        self.weights.a_log[:], self.weights.dt_bias[1:] = -1, -4
        kind, full, count = self.projected.dtype, device.xp().full, len(places)
        self.last = bounds(lengths)[1:] - 1
        tokens = packed(self.projected, self.weights, heads, lengths)
        host = tokens._make(device.to_host(x).astype(np.float32) for x in tokens)
        self.norm = rng.standard_normal(128).astype(kind)
        ratio, pages = heads.value_heads // heads.key_heads, 3 * count
        self.cache = StateCache(
            np.full((pages, heads.value_heads, 2, 128, 128), np.nan, np.float16),
            np.full((count, BLOCK, heads.key_heads, 128), np.nan, np.float16),
            np.full((count, BLOCK, heads.value_heads, 128), np.nan, np.float16),
            np.full((count, BLOCK, heads.value_heads), np.nan, np.float32),
        )
        self.conv = ConvCache(
            np.full((count, TAPS, heads.channels), np.nan, kind), np.full((pages, 3, heads.channels), np.nan, kind)
        )
        self.tables, self.slots = rng.permutation(pages).astype(np.int32).reshape(count, 3), rng.permutation(count)
        self.o = np.zeros((count, heads.value_heads, 128), np.float32)
        self.after = StateCache(*(x.copy() for x in self.cache))
        self.conv_after = ConvCache(*(x.copy() for x in self.conv))
        for b, (start, resumed_at) in enumerate(places):
            rows = slice(self.last[b] - start, self.last[b] + 1)
            for head in range(heads.value_heads):
                key_head = head // ratio
                q, k = host.q[rows, key_head], host.k[rows, key_head]
                found = Head(q, k, host.v[rows, head], host.beta[rows, head], host.log_decay[rows, head])
                self.o[b, head] = found.o[-1]
                for after, cache in ((False, self.cache), (True, self.after)):
                    self._fill(cache, b, head, key_head, found, start, resumed_at, after)
            x = self.projected[rows, : heads.channels]
            for after, conv in ((False, self.conv), (True, self.conv_after)):
                for position in range(max(start - TAPS, max(resumed_at, 0)), start + after):
                    conv.rows[self.slots[b], position % TAPS] = x[position]
                if resumed_at > 0:
                    conv.page_rows[self.tables[b, resumed_at // BLOCK - 1]] = x[resumed_at - 3 : resumed_at]
                if after and start % BLOCK == 0 and start > max(resumed_at, 0):
                    conv.page_rows[self.tables[b, start // BLOCK - 1]] = x[start - 3 : start]
        arrays = [full(self.o.shape, np.nan, kind) for kind in (np.float16, kind)]
        self.outputs = DecodeOutputs(*arrays, full(self.o.shape[:2], np.nan, np.float32))

    def _fill(self, cache, b, head, key_head, found, start, resumed_at, after):
        """What the cache has before or after the token at `start`."""
        blocks = start // BLOCK if start in (0, resumed_at) else (start - 1) // BLOCK
        first, slot = blocks * BLOCK, self.slots[b]
        for block in range(blocks + 1 if after and start == first + BLOCK else blocks):
            high, low = found.states[block + 1]
            cache.states[self.tables[b, block], head, 0] = high
            cache.states[self.tables[b, block], head, 1] = low
        for position in range(first, start + after):
            cache.key_rows[slot, position % BLOCK, key_head] = found.k[position]
            cache.value_rows[slot, position % BLOCK, head] = found.w[position]
            cache.decay_sums[slot, position % BLOCK, head] = found.sums[position]

    def run(self):
        cache, conv = on_device(self.cache), on_device(self.conv)
        starts, resumed_at = np.array(self.places).T
        arrays = np.arange(len(starts) + 1), starts + 1, self.tables, self.slots, resumed_at
        sequences = StateSequences(*(device.asarray(np.ascontiguousarray(x, np.int32)) for x in arrays))
        projected, norm = device.asarray(self.projected[self.last]), device.asarray(self.norm)
        weights = on_device(self.weights)
        delta_rule_decode(projected, weights, (norm, EPS), self.heads, sequences, cache, conv, self.outputs)
        return cache, conv, projected, norm

    def check(self):
        cache, conv, projected, norm = self.run()
        gated, rstd = device.xp().empty(self.o.shape, self.projected.dtype), device.xp().empty(self.o.shape[:2], "f")
        gated_norm(device.asarray(self.o.astype(np.float16)), projected, self.heads, norm, EPS, gated, rstd)
        expected = DecodeOutputs(self.o.astype(np.float16), gated, rstd)
        for name, got, want in zip(DecodeOutputs._fields, self.outputs, expected, strict=True):
            assert_same_bits(got, want, name)
        for got, want in ((cache, self.after), (conv, self.conv_after)):
            for name, array, wanted in zip(got._fields, got, want, strict=True):
                # Two kinds of NaN say the same: nothing was written.
                assert_same_bits(np.nan_to_num(device.to_host(array)), np.nan_to_num(wanted), name)

    def check_close(self, allowed):
        """As `check`, for other tensor cores than the simulator's, whose sums are truncated."""
        cache, conv, *_ = self.run()
        assert relative_error(device.to_host(self.outputs.o), self.o) < allowed
        for name, got, want in zip(cache._fields, cache, self.after, strict=True):
            got, want = (np.nan_to_num(np.asarray(x, np.float32)) for x in (device.to_host(got), want))
            if name == "states":
                got, want = (x[:, :, 0] + x[:, :, 1] / LOW_SCALE for x in (got, want))
            assert relative_error(got, want) < allowed, name
        for got, want in zip(conv, self.conv_after, strict=True):
            assert_same_bits(np.nan_to_num(device.to_host(got)), np.nan_to_num(want))


@pytest.mark.sim
def test_simulator(rng):
    step = Step(rng, PLACES, HEADS, "bfloat16")
    if device.name() == "sim":
        step.check()
    else:
        step.check_close(8e-4)


@pytest.mark.sim
@pytest.mark.parametrize("seed", ["3"])
def test_a_warp_may_be_ahead_of_the_others(rng, seed, monkeypatch):
    """A fold, in which a warp may still prepare shared memory when another has written the token's k and q to it."""
    monkeypatch.setattr("rlnumba.runtime.simulator.SEED", seed)
    step = Step(rng, [(128, -1)], DeltaRuleHeads(1, 1, 128, 128), "bfloat16")
    if device.name() == "sim":
        step.check()
    else:
        step.check_close(8e-4)


@pytest.mark.sim
def test_a_row_without_a_sequence_has_zeros(rng):
    step = Step(rng, [(0, -1)], DeltaRuleHeads(1, 1, 128, 128), "float16")
    step.places = [(-1, -1)]
    cache, *_ = step.run()
    assert not device.to_host(step.outputs.o).any() and not device.to_host(step.outputs.gated).any()
    assert np.isnan(device.to_host(cache.value_rows)).all()


@pytest.mark.sim
def test_wrong_arguments_are_named(rng):
    step = Step(rng, [(0, -1)], DeltaRuleHeads(1, 1, 128, 128), "float32")
    with pytest.raises(
        ValueError, match="delta_rule_decode: heads must have 128 columns of 16 bits, got .* of float32"
    ):
        step.run()
    step = Step(rng, [(0, -1)], DeltaRuleHeads(1, 1, 128, 128), "float16")
    one_further = device.asarray(np.zeros(step.conv.rows.size + 1, np.float16))[1:].reshape(step.conv.rows.shape)
    step.conv = step.conv._replace(rows=one_further)
    with pytest.raises(ValueError, match="delta_rule_decode: projected, conv and caches must begin at multiples of 16"):
        step.run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [DeltaRuleHeads(2, 2, 128, 128), DeltaRuleHeads(2, 6, 128, 128)])
def test_gpu(rng, heads, dtype):
    Step(rng, PLACES + MORE, heads, dtype).check_close(8e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [DeltaRuleHeads(4, 4, 128, 128), DeltaRuleHeads(4, 8, 128, 128)])
def test_decoding_all_tokens_has_the_bits_of_packed_sequences(rng, heads):
    lengths = np.array([200, 1, 64, 65, 130, 191, 0, 199])
    projected, weights = random_inputs(rng, lengths.sum(), heads, "bfloat16")
    weights.dt_bias[1:] -= 3
    tokens, norm, xp = packed(projected, weights, heads, lengths), device.asarray(projected[0, :128]), device.xp()
    shape, dtype = tokens.v.shape, tokens.v.dtype
    expected, found = (
        DecodeOutputs(xp.full(shape, np.nan, np.float16), xp.full(shape, np.nan, dtype), xp.empty(shape[:2], "f"))
        for _ in range(2)
    )
    projected, weights = device.asarray(projected), on_device(weights)
    delta_rule(tokens, device.asarray(bounds(lengths)), expected.o)
    gated_norm(expected.o, projected, heads, norm, EPS, expected.gated, expected.rstd)
    count, first = len(lengths), bounds(lengths)[:-1]
    full, slots = xp.full, device.asarray(rng.permutation(count).astype(np.int32))
    cache = StateCache(
        full((count, shape[1], 2, 128, 128), np.nan, np.float16),
        full((count, BLOCK, heads.key_heads, 128), np.nan, np.float16),
        full((count, BLOCK, shape[1], 128), np.nan, np.float16),
        full((count, BLOCK, shape[1]), np.nan, np.float32),
    )
    conv = ConvCache(
        full((count, TAPS, heads.channels), np.nan, dtype), full((count, 3, heads.channels), np.nan, dtype)
    )
    # A sequence's states take each other's place.
    tables = device.asarray(np.repeat(rng.permutation(count).astype(np.int32)[:, None], 4, 1))
    for position in range(lengths.max()):
        running = (position < lengths).astype(np.int32)
        contexts = np.where(running, position + 1, 0).astype(np.int32)
        sequences = StateSequences(
            *(device.asarray(x) for x in (bounds(running), contexts)), tables, slots, full(count, -1, np.int32)
        )
        rows = (first + position)[running > 0]
        step = DecodeOutputs(*(xp.empty((len(rows), *x.shape[1:]), x.dtype) for x in found))
        row_of_step = device.asarray(device.to_host(projected)[rows])
        delta_rule_decode(row_of_step, weights, (norm, EPS), heads, sequences, cache, conv, step)
        for array, part in zip(found, step, strict=True):
            for row, value in zip(rows, part, strict=True):
                array[int(row)] = value
    for name, got, want in zip(DecodeOutputs._fields, found, expected, strict=True):
        assert_same_bits(got, want, name)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [64, 128])
@pytest.mark.parametrize("value_heads", [16, 32])
def test_many_blocks_that_fold_have_equal_bits_each_time(rng, value_heads, position):
    """More blocks than run at once, whose warps wait for memory in another order each time."""
    count, heads, xp = 256, DeltaRuleHeads(16, value_heads, 128, 128), device.xp()
    generator, dtype = xp.random.default_rng(0), device.dtype("bfloat16")

    def random(*shape, dtype=dtype, scale=0.1):
        return (generator.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype)

    places = np.arange(count + 1), np.full(count, position + 1), np.arange(count)[:, None].repeat(3, 1)
    places = *places, np.arange(count), np.full(count, -1)
    sequences = StateSequences(*(device.asarray(np.ascontiguousarray(x, np.int32)) for x in places))
    rows, half = (count, BLOCK), np.float16
    before = StateCache(
        random(count, value_heads, 2, 128, 128, dtype=half, scale=0.01), random(*rows, 16, 128, dtype=half),
        random(*rows, value_heads, 128, dtype=half), -xp.abs(random(*rows, value_heads, dtype=np.float32)),
    )  # fmt: skip
    conv_before = ConvCache(random(count, TAPS, heads.channels), random(count, TAPS - 1, heads.channels))
    weights = InputWeights(random(heads.channels, TAPS, scale=0.5), random(value_heads), random(value_heads))
    projected, norm, shape = random(count, heads.columns, scale=1), random(128, scale=1), (count, value_heads, 128)
    expected = None
    for _ in range(20):
        cache, conv = StateCache(*(x.copy() for x in before)), ConvCache(*(x.copy() for x in conv_before))
        outputs = DecodeOutputs(xp.empty(shape, half), xp.empty(shape, dtype), xp.empty(shape[:2], np.float32))
        delta_rule_decode(projected, weights, (norm, EPS), heads, sequences, cache, conv, outputs)
        found = *outputs, *cache, *conv
        expected = found if expected is None else expected
        for got, want in zip(found, expected, strict=True):
            assert (got.view(np.uint8) == want.view(np.uint8)).all()
