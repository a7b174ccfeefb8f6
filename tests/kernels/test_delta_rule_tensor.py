"""The gated delta rule on tensor cores: the errors and cuts of test_delta_rule.py, by each family."""

import numpy as np
import pytest

from rlnumba.kernels.delta_rule import ops, tensor
from rlnumba.kernels.delta_rule.arithmetic import BLOCK, PrefixSequences, StateCache, StateSequences, Tokens
from rlnumba.kernels.delta_rule.tensor_prepare import TensorConfig
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import tuple_type
from tests.close import assert_same_bits
from tests.kernels.test_delta_rule import (
    FORWARD,
    GATES,
    Paged,
    Tree,
    bounds,
    check_cuts,
    check_forward,
    check_neighbours,
    check_prefix_hits,
    check_prefixes,
    delta_rule_ref,
    in_float64,
    packed,
    random_tokens,
    relative_error,
)

HEADS = 2, 4, 128, 128
# Half of what the operators give to these kernels: enough to run every line of them.
SMALL = 1, 1, 64, 64


def test_only_heads_of_128_columns_of_16_bits():
    for element, key_dim, value_dim, expected in (
        ("bfloat16", 128, 128, "sm90"),
        ("float16", 128, 128, "sm90"),
        ("float32", 128, 128, "simt"),
        ("bfloat16", 64, 128, "simt"),
        ("bfloat16", 128, 64, "simt"),
    ):
        assert tensor.is_supported(element, key_dim, value_dim) == (expected == "sm90")


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("family, dtype", [("sm90", "bfloat16"), ("sm80", "float16")])
def test_simulator(rng, monkeypatch, family, dtype):
    """A sequence in one piece, and cut twice within blocks and once behind a boundary, beside another one."""
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a Hopper GPU")
    monkeypatch.setitem(ops.IS_SUPPORTED, family, lambda *_: True)
    with dispatch.forced(family):
        paged = Paged(rng, [BLOCK + 3, 2], SMALL, dtype, "fast")
        expected, _ = delta_rule_ref(in_float64(paged.tokens), bounds(paged.lengths))
        assert relative_error(paged.expected, expected) < FORWARD[dtype]
        paged.run([0], [0], [21])
        paged.run([1, 0], [0, 21], [2, BLOCK + 1])
        paged.run([0], [BLOCK + 1], [BLOCK + 3])


def in_both_forms(monkeypatch, tokens, lengths):
    """out of packed sequences in the order of tensor_forward.py, and in that of tensor_deferred.py."""
    found = []
    for fewest in (1 << 30, 0):
        monkeypatch.setattr(tensor, "FEWEST_DEFERRED", fewest)
        found.append(packed(tokens, lengths))
    return found


def test_long_sequences_are_deferred(monkeypatch):
    tokens = random_tokens(np.random.default_rng(0), 2047, (1, 1, 1, 1), "float16")
    for family, lengths, expected in (
        ("sm90", [2047], True),
        ("sm90", [1023, 1024], False),
        ("sm90", [2040, 7], False),
        ("sm80", [2047], False),
    ):
        assert tensor._forms(family, tokens, bounds(lengths)) == (expected,)
    monkeypatch.setattr(device, "name", lambda: "shapes")
    assert tensor._forms("sm90", tokens, bounds([2047])) == (False, True), "a list of a run's kernels has both"


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("gates", ["slow", "extreme"])
def test_deferred_simulator(rng, monkeypatch, gates):
    """Blocks enough to come back to the first stage of P, beside a sequence of one block."""
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a Hopper GPU")
    monkeypatch.setitem(ops.IS_SUPPORTED, "sm90", lambda *_: True)
    with dispatch.forced("sm90"):
        lengths = [3 * BLOCK + 5, 2] if gates == "slow" else [BLOCK + 1]
        tokens = random_tokens(rng, sum(lengths), SMALL, "bfloat16", gates)
        assert_same_bits(*in_both_forms(monkeypatch, tokens, lengths))


# A prompt, one that goes on from it, a completion of each; another prompt.
SMALL_TREE = Tree([BLOCK, BLOCK, 3, 1, 1], [-1, 0, 1, 0, -1])


@pytest.mark.sim
@pytest.mark.sm90
@pytest.mark.parametrize("family, fewest", [("sm90", 1 << 30), ("sm90", 0), ("sm80", 1 << 30)])
def test_simulator_of_prefixes(rng, monkeypatch, family, fewest):
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a Hopper GPU")
    monkeypatch.setitem(ops.IS_SUPPORTED, family, lambda *_: True)
    monkeypatch.setattr(tensor, "FEWEST_DEFERRED", fewest)
    with dispatch.forced(family):
        check_prefixes(rng, SMALL_TREE, "bfloat16", SMALL, "slow")


def argument_types(has_prefixes):
    """The types of the kernels' arguments for bfloat16."""

    def array(element, dimensions):
        return f"{element}[{':,' * (dimensions - 1)}::1]"

    half, single, word = "float16", "float32", "int32"
    vectors, lengths = (array(single, 2), array(single, 2)), array(word, 1)
    sequences = tuple_type(StateSequences, lengths, lengths, array(word, 2), lengths, lengths)
    return [
        tuple_type(Tokens, array(half, 3), array(half, 3), array("uint16", 3), *vectors),
        tuple_type(PrefixSequences, lengths, lengths, word) if has_prefixes else sequences,
        tuple_type(StateCache, array(half, 5), array(half, 4), array(half, 3), array(single, 3)),
        array(half, 3),
    ]


@pytest.mark.parametrize("family, architecture", [("sm90", (9, 0, "a")), ("sm80", (8, 0))])
@pytest.mark.parametrize("form", ["packed", "paged", "deferred"])
@pytest.mark.parametrize("has_prefixes", [False, True], ids=["", "prefixes"])
def test_kernels_compile_for_gpus(compile_offline, family, architecture, form, has_prefixes):
    """At real dimensions: registers hold the state, and nothing is spilled."""
    if form == "deferred" and family != "sm90":
        pytest.skip("a form on Hopper alone")
    if form == "paged" and has_prefixes:
        pytest.skip("sequences in the cache have no prefixes")
    config = TensorConfig(family, 128, "bfloat16", form == "paged", form == "deferred", has_prefixes)
    troubles = compile_offline(tensor.KERNELS[family](config), argument_types(has_prefixes), architecture)
    assert not troubles, "\n".join(troubles)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("gates", [*GATES, "extreme"])
def test_gpu(rng, family, gates):
    with dispatch.forced(family):
        check_forward(rng, [1, 63, 64, 65, 300, 0, 130], "bfloat16", HEADS, gates)
        check_cuts(rng, [1, 64, 200, 299], "bfloat16", HEADS, gates)
        check_prefix_hits(rng, "float16", HEADS, gates)
        check_neighbours(rng, "bfloat16", HEADS)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("gates", [*GATES, "extreme"])
def test_deferred_gpu(rng, monkeypatch, gates):
    """The form of long sequences: right, and with the bits of the other one, of 10^6 outputs and more."""
    lengths = [1, 63, 64, 65, 128, 129, 300, 0, 130, 2500]
    for dtype in ("bfloat16", "float16"):
        tokens = random_tokens(rng, sum(lengths), HEADS, dtype, gates)
        assert_same_bits(*in_both_forms(monkeypatch, tokens, lengths))
    check_forward(rng, lengths[:-1], "bfloat16", HEADS, gates)
    check_neighbours(rng, "bfloat16", HEADS)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("family, fewest", [("sm90", 1 << 30), ("sm90", 0), ("sm80", 1 << 30)])
@pytest.mark.parametrize("gates", ["slow", "fast", "extreme"])
def test_gpu_of_prefixes(rng, monkeypatch, family, fewest, gates):
    """Levels of trees, each in both forms; those of whole sequences may have the other one."""
    monkeypatch.setattr(tensor, "FEWEST_DEFERRED", fewest)
    with dispatch.forced(family):
        for heads in (HEADS, (2, 2, 128, 128)):
            check_prefixes(rng, Tree.random(rng), "bfloat16", heads, gates)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("gates", ["slow", "mid"])
def test_families_have_equal_bits_on_hopper(rng, gates):
    tokens, found = random_tokens(rng, 3000, HEADS, "bfloat16", gates), []
    for family in ("sm90", "sm80"):
        with dispatch.forced(family):
            found.append(packed(tokens, [2000, 1000]))
    assert_same_bits(*found)


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_hundred_thousand_tokens(rng):
    """One long sequence in chunks, then token by token across a boundary, against the whole of it."""
    length = 100_003
    few = random_tokens(rng, 4099, HEADS, "bfloat16", "slow")
    index = np.arange(length) % 4099
    paged = Paged.__new__(Paged)
    paged.lengths, paged.tokens = [length], few._make(np.ascontiguousarray(x[index]) for x in few)
    paged.allocate(rng, HEADS)
    ends = np.unique([*rng.integers(1, length - 70, 12), *range(length - 70, length + 1)])
    begin = 0
    for end in map(int, ends):
        paged.run([0], [begin], [end])
        begin = end
