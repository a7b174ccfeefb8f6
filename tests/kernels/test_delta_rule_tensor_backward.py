"""The gradient of the gated delta rule on tensor cores, against float64 and against itself."""

import numpy as np
import pytest

from rlnumba.kernels.delta_rule.arithmetic import Tokens
from rlnumba.kernels.delta_rule.reference import delta_rule_backward_ref
from rlnumba.kernels.delta_rule.tensor import delta_rule_backward
from rlnumba.runtime import device, dispatch
from tests.close import assert_same_bits
from tests.kernels.test_delta_rule import (
    BACKWARD,
    EXTREME,
    Tree,
    bounds,
    check_backward_of_prefixes,
    in_float64,
    on_device,
    random_tokens,
    relative_error,
)


def gradients_of(tokens, dout, lengths, prefixes=None):
    xp, kinds = device.xp(), (tokens.v.dtype,) * 3 + (np.float32,) * 2
    found = Tokens(*(xp.full(x.shape, np.nan, kind) for x, kind in zip(tokens, kinds, strict=True)))
    delta_rule_backward(device.asarray(dout), on_device(tokens), device.asarray(bounds(lengths)), found, prefixes)
    return Tokens(*map(device.to_host, found))


def check(rng, lengths, heads, gates="mid"):
    tokens = random_tokens(rng, sum(lengths), heads, "bfloat16", gates)
    dout = rng.standard_normal(tokens.v.shape).astype(tokens.v.dtype)
    exact = in_float64(tokens)
    found = gradients_of(tokens, dout, lengths)
    expected = delta_rule_backward_ref(np.asarray(dout, np.float64), exact, bounds(lengths))
    allowed = BACKWARD["bfloat16"] + (EXTREME["bfloat16"] if gates == "extreme" else 0)
    for name, got, want in zip(Tokens._fields, found, expected, strict=True):
        assert relative_error(got, want) < allowed, name
    return tokens, dout, found


@pytest.mark.sim
@pytest.mark.parametrize("length, value_heads", [(66, 1), (2, 2)])
def test_simulator(rng, monkeypatch, length, value_heads):
    """One block of threads goes over all blocks, and over the value heads of a key head."""
    monkeypatch.setattr(device, "sm_count", lambda: 1)
    check(rng, [length], (1, value_heads, 128, 128))


def check_a_path(rng, own, heads, gates="mid"):
    """Sequences each with one child have the bits of the whole one, whose blocks they are."""
    tokens = random_tokens(rng, sum(own), heads, "bfloat16", gates)
    dout = rng.standard_normal(tokens.v.shape).astype(tokens.v.dtype)
    path = Tree(own, range(-1, len(own) - 1))
    found = gradients_of(tokens, dout, own, path.prefixes())
    for name, got, want in zip(Tokens._fields, found, gradients_of(tokens, dout, [sum(own)]), strict=True):
        assert_same_bits(got, want, name)


@pytest.mark.sim
def test_simulator_of_a_path(rng):
    check_a_path(rng, [64, 64, 2], (1, 1, 128, 128), "slow")


@pytest.mark.sim
def test_simulator_of_a_group(rng):
    if device.name() == "cpu":
        pytest.skip("needs the simulator or a GPU")
    with dispatch.forced("sm80"):
        check_backward_of_prefixes(rng, Tree([64, 1, 2], [-1, 0, 0]), "bfloat16", (1, 1, 128, 128), "slow", times=1)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["slow", "mid", "fast", "extreme"])
def test_gpu_of_prefixes(rng, gates):
    for heads in ((2, 2, 128, 128), (2, 6, 128, 128)):
        check_a_path(rng, [64, 256, 128, 64, 70], heads, gates)
        check_backward_of_prefixes(rng, Tree.random(rng), "bfloat16", heads, gates)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["slow", "mid", "fast", "extreme"])
def test_gpu(rng, gates):
    lengths = [1, 63, 64, 65, 200, 0, 130]
    for heads in ((2, 2, 128, 128), (2, 6, 128, 128)):
        tokens, dout, found = check(rng, lengths, heads, gates)
        for got, again in zip(found, gradients_of(tokens, dout, lengths), strict=True):
            assert_same_bits(got, again)
