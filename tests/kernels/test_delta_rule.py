"""The gated delta rule: right, with equal bits over every cut of a sequence, and its gradient."""

import numpy as np
import pytest

from rlnumba.kernels.attention.sequences import PackedPrefixes
from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    LEAST_LOG_DECAY,
    StateCache,
    StateSequences,
    Tokens,
    operand_dtype,
    planes_of,
)
from rlnumba.kernels.delta_rule.ops import delta_rule, delta_rule_backward, paged_delta_rule
from rlnumba.kernels.delta_rule.reference import delta_rule_backward_ref, delta_rule_ref
from rlnumba.runtime import device
from tests.close import assert_gradient, assert_same_bits

# (key heads, value heads, K, V): unequal on purpose.
HEADS = 2, 4, 20, 36
# Relative error, root of mean squares, against float64 from the same operands: rounding of float32; of float16
# operands; the gradient's is that of its bfloat16 arrays.
FORWARD = {"float32": 2e-6, "bfloat16": 8e-4, "float16": 8e-4}
BACKWARD = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 3e-3}
# Sums of log decays to -1,920 leave a log decay 10^-4 of rounding error.
EXTREME = {"float32": 1e-4, "bfloat16": 2e-3, "float16": 2e-3}
# Of (A, dt) in g = -A softplus(x + dt): how fast a head forgets.
GATES = {"slow": (0.02, -3.0), "mid": (0.5, -3.0), "fast": (16.0, -1.0)}


def bounds(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def random_tokens(rng, count, heads=HEADS, dtype="float32", gates="mid"):
    """Tokens on the host, with correlated keys; gates "extreme": nothing is forgotten or everything, beta 0 and 1."""
    key_heads, value_heads, key_dim, value_dim = heads
    operand, shape = operand_dtype(device.dtype(dtype)), (count, key_heads, key_dim)
    q, k = (rng.standard_normal(shape) + rng.standard_normal(shape[1:]) for _ in range(2))
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True)) for x in (q, k))
    v = rng.standard_normal((count, value_heads, value_dim))
    beta = 1 / (1 + np.exp(-1.5 * rng.standard_normal((count, value_heads))))
    if gates == "extreme":
        values = np.array([0, -1e-7, -0.01, -3, LEAST_LOG_DECAY])
        log_decay = rng.choice(values, beta.shape, p=[0.3, 0.2, 0.3, 0.1, 0.1])
        beta = rng.choice([0, 1e-8, 0.5, 1 - 2.0**-24, 1], beta.shape)
    else:
        factor, offset = GATES[gates]
        log_decay = np.maximum(-factor * np.log1p(np.exp(rng.standard_normal(beta.shape) + offset)), LEAST_LOG_DECAY)
    q, k = (q * key_dim**-0.5).astype(operand), k.astype(operand)
    return Tokens(q, k, v.astype(device.dtype(dtype)), *(x.astype(np.float32) for x in (beta, log_decay)))


def on_device(tokens):
    return tokens._make(device.asarray(np.ascontiguousarray(x)) for x in tokens)


def in_float64(tokens):
    return tokens._make(np.asarray(x, np.float64) for x in tokens)


def packed(tokens, lengths):
    """out of delta_rule, on the host."""
    out = device.xp().full(tokens.v.shape, np.nan, tokens.q.dtype)
    delta_rule(on_device(tokens), device.asarray(bounds(lengths)), out)
    return device.to_host(out)


def relative_error(actual, expected):
    difference = np.asarray(actual, np.float64) - expected
    return np.sqrt(np.mean(difference**2) / max(np.mean(expected**2), 1e-30))


def check_forward(rng, lengths, dtype, heads=HEADS, gates="mid"):
    tokens = random_tokens(rng, sum(lengths), heads, dtype, gates)
    expected, _ = delta_rule_ref(in_float64(tokens), bounds(lengths))
    assert relative_error(packed(tokens, lengths), expected) < (EXTREME if gates == "extreme" else FORWARD)[dtype]


class Paged:
    """Sequences that go through paged_delta_rule in chunks; each output is compared with the packed one."""

    def __init__(self, rng, lengths, heads, dtype, gates):
        self.lengths, self.tokens = lengths, random_tokens(rng, sum(lengths), heads, dtype, gates)
        self.allocate(rng, heads)

    def allocate(self, rng, heads):
        """Compute the packed outputs, and make a cache that holds NaN."""
        (key_heads, value_heads, key_dim, value_dim), lengths = heads, self.lengths
        self.expected = packed(self.tokens, lengths)
        operand, count = self.tokens.q.dtype, len(lengths)
        self.pages_each = max(lengths) // BLOCK + 1
        planes, slots = planes_of(operand), count + 1
        shapes = (
            (count * self.pages_each, value_heads, planes, key_dim, value_dim),
            (slots, BLOCK, key_heads, key_dim),
            (slots, BLOCK, value_heads, value_dim),
        )
        full = device.xp().full
        arrays = [full(shape, np.nan, operand) for shape in shapes]
        self.cache = StateCache(*arrays, full((slots, BLOCK, value_heads), np.nan, np.float32))
        self.tables = rng.permutation(count * self.pages_each).astype(np.int32).reshape(count, -1)
        self.slots = rng.permutation(slots)[:count].astype(np.int32)

    def rows(self, b, begin, end):
        first = int(bounds(self.lengths)[b])
        return np.arange(first + begin, first + end)

    def run(self, order, begins, ends, resumed=None, changed=None):
        """Compute positions begins[i] .. ends[i] of sequence order[i]; changed: tokens in place of their own."""
        rows = np.concatenate([self.rows(b, i, j) for b, i, j in zip(order, begins, ends, strict=True)])
        tokens = on_device((changed or self.tokens)._make(x[rows] for x in changed or self.tokens))
        out = device.xp().full(tokens.v.shape, np.nan, tokens.q.dtype)
        resumed_at = np.full(len(order), -1) if resumed is None else np.where(resumed, begins, -1)
        arrays = bounds(np.subtract(ends, begins)), ends, self.tables[order], self.slots[order], resumed_at
        sequences = StateSequences(*(device.asarray(np.array(x, np.int32)) for x in arrays))
        paged_delta_rule(tokens, sequences, self.cache, out)
        if changed is None:
            assert_same_bits(out, self.expected[rows], f"positions {begins} to {ends} of sequences {order}")


def check_cuts(rng, lengths, dtype, heads=HEADS, gates="mid", longest=150, one=0.5):
    """Random chunks, decode steps and rejected drafts of all sequences at once give the bits of packed sequences."""
    paged = Paged(rng, lengths, heads, dtype, gates)
    position = np.zeros(len(lengths), int)
    while (position < lengths).any():
        order = [b for b in rng.permutation(len(lengths)) if position[b] < lengths[b]]
        order = order[: int(rng.integers(1, len(order) + 1))]
        begins = position[order]
        steps = np.where(rng.random(len(order)) < one, 1, rng.integers(1, longest, len(order)))
        ends = np.minimum(begins + steps, np.array(lengths)[order])
        resumed = None
        if rng.random() < 0.3:
            # Drafts within the open block that are taken back: the rows are written again.
            drafts = np.minimum((begins // BLOCK + 1) * BLOCK, ends)
            wrong = paged.tokens._replace(k=paged.tokens.k[::-1], v=paged.tokens.v[::-1])
            paged.run(order, begins, drafts, changed=wrong)
            # A draft at a boundary has folded the block before it.
            resumed = (begins % BLOCK == 0) & (begins > 0)
        paged.run(order, begins, ends, resumed)
        position[order] = ends


def check_prefix_hits(rng, dtype, heads=HEADS, gates="mid"):
    """A sequence that begins at a page of another one has its bits, whatever is in its slot."""
    paged = Paged(rng, [3 * BLOCK + 5, 3 * BLOCK + 5], heads, dtype, gates)
    for name in ("q", "k", "v", "beta", "log_decay"):
        array = getattr(paged.tokens, name)
        array[paged.rows(1, 0, paged.lengths[1])] = array[paged.rows(0, 0, paged.lengths[0])]
    paged.expected = packed(paged.tokens, paged.lengths)
    paged.run([0], [0], [paged.lengths[0]])
    paged.tables[1, :2] = paged.tables[0, :2]
    paged.run([1], [2 * BLOCK], [2 * BLOCK + 69], [1])


def check_neighbours(rng, dtype, heads=HEADS):
    """A sequence's bits are its own: neither others, even of NaN, nor its later tokens change them."""
    tokens, lengths = random_tokens(rng, 30 + 100 + 7, heads, dtype), [30, 100, 7]
    expected = packed(tokens, lengths)[30:130]
    for array in tokens:
        array[:30] = np.nan
        array[130:] = np.nan
    assert_same_bits(packed(tokens, lengths)[30:130], expected, "beside NaN")
    alone = tokens._make(x[30:123] for x in tokens)
    assert_same_bits(packed(alone, [93]), expected[:93], "alone and shorter")


def check_backward(rng, lengths, dtype, heads=HEADS, gates="mid"):
    tokens = random_tokens(rng, sum(lengths), heads, dtype, gates)
    dout = rng.standard_normal(tokens.v.shape).astype(tokens.v.dtype)
    kinds = (dout.dtype,) * 3 + (np.float32,) * 2
    xp = device.xp()
    gradients = Tokens(*(xp.full(x.shape, np.nan, kind) for x, kind in zip(tokens, kinds, strict=True)))
    again = Tokens(*(xp.full(x.shape, np.nan, kind) for x, kind in zip(tokens, kinds, strict=True)))
    for found in (gradients, again):
        delta_rule_backward(device.asarray(dout), on_device(tokens), device.asarray(bounds(lengths)), found)
    expected = delta_rule_backward_ref(np.asarray(dout, np.float64), in_float64(tokens), bounds(lengths))
    for name, got, other, want in zip(Tokens._fields, gradients, again, expected, strict=True):
        allowed = BACKWARD[dtype] + (EXTREME[dtype] if gates == "extreme" else 0)
        assert relative_error(device.to_host(got), want) < allowed, name
        assert_same_bits(got, other, name)


class Tree:
    """Sequences with prefixes in the rows of others, and the same sequences with all of their rows.

    own, parents: of PackedPrefixes.of. every: for each row of the whole sequences, end to end, the row that there is
    of it; is_own: whether the whole sequence owns it; lengths: of the whole sequences.
    """

    def __init__(self, own, parents):
        self.own, self.parents, self.num_rows, rows = own, parents, sum(own), []
        for start, length, parent in zip(bounds(own), own, parents, strict=False):
            rows.append([*(rows[parent] if parent >= 0 else ()), *range(start, start + length)])
        self.lengths, self.every = list(map(len, rows)), np.concatenate(rows)
        self.is_own = np.concatenate([np.arange(len(each)) >= len(each) - n for each, n in zip(rows, own, strict=True)])

    @staticmethod
    def random(rng):
        """Trees of one to three levels, groups of up to nine sequences; children of one row, of whole blocks, more."""
        own, parents = [64, 30, 1, 70, 128, 5, 64, 2, 200, 64, 20, 65], [-1, 0, 0, 0, -1, 4, 4, 6, 6, 4, -1, -1]
        own += [192, *rng.integers(1, 150, 9).tolist()]
        return Tree(own, parents + [-1] + [12] * 9)

    def prefixes(self):
        """The PackedPrefixes on the device."""
        found = PackedPrefixes.of(self.own, self.parents)
        return PackedPrefixes(*map(device.asarray, found[:4]), *found[4:])

    def summed(self, array):
        """The sums over the rows of the whole sequences that are the same row."""
        total = np.zeros((self.num_rows, *array.shape[1:]))
        np.add.at(total, self.every, array)
        return total


def check_prefixes(rng, tree, dtype, heads, gates="mid"):
    """Sequences that begin at their parents' states have the bits of whole ones."""
    tokens = random_tokens(rng, tree.num_rows, heads, dtype, gates)
    out = device.xp().full(tokens.v.shape, np.nan, tokens.q.dtype)
    delta_rule(on_device(tokens), device.asarray(bounds(tree.own)), out, tree.prefixes())
    assert_same_bits(device.to_host(out)[tree.every], packed(tokens._make(x[tree.every] for x in tokens), tree.lengths))


def check_backward_of_prefixes(rng, tree, dtype, heads, gates="mid", times=2):
    """The gradient of a row is the sum of those that the whole sequences with it have; the same bits each time."""
    tokens = random_tokens(rng, tree.num_rows, heads, dtype, gates)
    dout, kinds, found = rng.standard_normal(tokens.v.shape).astype(tokens.v.dtype), (tokens.v.dtype,) * 3, []
    for _ in range(times):
        arrays = zip(tokens, (*kinds, np.float32, np.float32), strict=True)
        found.append(Tokens(*(device.xp().full(x.shape, np.nan, kind) for x, kind in arrays)))
        arguments = device.asarray(dout), on_device(tokens), device.asarray(bounds(tree.own)), found[-1]
        delta_rule_backward(*arguments, tree.prefixes())
    of_whole = np.asarray(dout, np.float64)[tree.every] * tree.is_own[:, None, None]
    whole = in_float64(tokens._make(x[tree.every] for x in tokens))
    expected = delta_rule_backward_ref(of_whole, whole, bounds(tree.lengths))
    for name, got, other, want in zip(Tokens._fields, found[0], found[-1], expected, strict=True):
        # Gradients of a shared state cancel in part, and leave their rounding errors.
        allowed = 1.5 * BACKWARD[dtype] + (EXTREME[dtype] if gates == "extreme" else 0)
        assert relative_error(device.to_host(got), tree.summed(want)) < allowed, name
        assert_same_bits(got, other, name)


def test_gradient_of_reference(rng):
    lengths = [3, 5]
    tokens = in_float64(random_tokens(rng, 8, (1, 2, 3, 4)))
    dout = rng.standard_normal(tokens.v.shape)
    gradients = delta_rule_backward_ref(dout, tokens, bounds(lengths))
    for name, array, gradient in zip(Tokens._fields, tokens, gradients, strict=True):
        assert_gradient(lambda: float(np.sum(delta_rule_ref(tokens, bounds(lengths))[0] * dout)), gradient, array, name)


@pytest.mark.parametrize("gates", [*GATES, "extreme"])
def test_numpy_device(rng, gates):
    if device.name() != "cpu":
        pytest.skip("the cpu device's own loops")
    check_forward(rng, [1, 63, 64, 65, 200, 0, 130], "float32", gates=gates)
    check_cuts(rng, [1, 64, 200, 299], "float32", gates=gates)
    check_backward(rng, [1, 65, 0, 150], "float32", gates=gates)


def test_numpy_device_of_prefixes(rng):
    if device.name() != "cpu":
        pytest.skip("the cpu device's own loops")
    tree, heads = Tree.random(rng), HEADS
    check_prefixes(rng, tree, "float32", heads)
    check_backward_of_prefixes(rng, tree, "float32", heads)
    tokens, prefixes = random_tokens(rng, tree.num_rows), tree.prefixes()
    with pytest.raises(ValueError, match=r"delta_rule: lengths of prefixes must be multiples of 64"):
        delta_rule(tokens, bounds(tree.own), tokens.v, prefixes._replace(lengths=prefixes.lengths + 1))


def test_numpy_device_of_many_cuts(rng):
    if device.name() != "cpu":
        pytest.skip("the cpu device's own loops")
    check_cuts(rng, [130], "float32", heads=(1, 1, 128, 128), one=0.95)
    check_prefix_hits(rng, "float32")
    check_neighbours(rng, "float32")


# Fewer keys and columns than a warp has lanes, in two column blocks.
SMALL = 1, 2, 4, 33


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_simulator(rng, dtype):
    check_forward(rng, [66, 1], dtype, SMALL)
    check_backward(rng, [65, 0, 3], dtype, (1, 2, 4, 5))


@pytest.mark.sim
def test_only_tensor_cores_take_prefixes(rng):
    if device.name() == "cpu":
        pytest.skip("the cpu device takes them")
    tokens, tree = on_device(random_tokens(rng, 65, SMALL)), Tree([64, 1], [-1, 0])
    out, of_tree = device.xp().empty(tokens.v.shape, np.float32), (device.asarray(bounds(tree.own)), tree.prefixes())
    with pytest.raises(ValueError, match="delta_rule: prefixes need the cpu device, or heads that its tensor-core"):
        delta_rule(tokens, of_tree[0], out, of_tree[1])


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_simulator_of_cuts(rng, dtype):
    check_cuts(rng, [67, 5], dtype, (1, 2, 4, 5), gates="fast", longest=40, one=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("gates", [*GATES, "extreme"])
def test_gpu(rng, dtype, gates):
    for heads in (HEADS, (2, 4, 128, 128), (1, 1, 256, 40)):
        check_forward(rng, [1, 63, 64, 65, 300, 0, 130], dtype, heads, gates)
        check_backward(rng, [1, 65, 0, 200], dtype, heads, gates)
    check_cuts(rng, [1, 64, 200, 299], dtype, (2, 4, 128, 128), gates)
    check_prefix_hits(rng, dtype, (2, 4, 128, 128), gates)
    check_neighbours(rng, dtype)
