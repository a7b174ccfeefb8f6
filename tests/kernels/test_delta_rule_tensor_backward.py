"""The gradient of the gated delta rule on tensor cores, against float64 and against itself."""

import numpy as np
import pytest

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, Tokens
from rlnumba.kernels.delta_rule.reference import delta_rule_backward_ref
from rlnumba.kernels.delta_rule.simt import BlockValues
from rlnumba.kernels.delta_rule.tensor_backward import backward_of_blocks
from rlnumba.runtime import device
from tests.close import assert_same_bits
from tests.kernels.test_delta_rule import (
    BACKWARD,
    EXTREME,
    bounds,
    in_float64,
    on_device,
    random_tokens,
    relative_error,
)


def block_values(tokens, lengths):
    """The BlockValues of Tokens of float64, by the recurrence."""
    q, k, v, beta, log_decay = tokens
    heads, ratio, starts = v.shape[1], v.shape[1] // k.shape[1], bounds(lengths)
    states = np.zeros((len(q) // BLOCK + len(lengths), heads, k.shape[2], v.shape[2]))
    errors, rows = np.zeros(v.shape), np.zeros(v.shape)
    for b, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for head in range(heads):
            state = np.zeros(states.shape[2:])
            for t in range(begin, end):
                if (t - begin) % BLOCK == 0:
                    states[begin // BLOCK + b + (t - begin) // BLOCK, head] = state
                state, key = state * np.exp(log_decay[t, head]), k[t, head // ratio]
                errors[t, head] = v[t, head] - key @ state
                rows[t, head] = beta[t, head] * errors[t, head]
                state = state + np.outer(key, rows[t, head])
    return BlockValues(*(device.asarray(x.astype(device.dtype("bfloat16"))) for x in (states, errors, rows)))


def gradients_of(tokens, dout, lengths, values):
    xp, kinds = device.xp(), (tokens.v.dtype,) * 3 + (np.float32,) * 2
    found = Tokens(*(xp.full(x.shape, np.nan, kind) for x, kind in zip(tokens, kinds, strict=True)))
    backward_of_blocks(device.asarray(dout), on_device(tokens), device.asarray(bounds(lengths)), values, found)
    return Tokens(*map(device.to_host, found))


def check(rng, lengths, heads, gates="mid"):
    tokens = random_tokens(rng, sum(lengths), heads, "bfloat16", gates)
    dout = rng.standard_normal(tokens.v.shape).astype(tokens.v.dtype)
    exact = in_float64(tokens)
    values = block_values(exact, lengths)
    found = gradients_of(tokens, dout, lengths, values)
    expected = delta_rule_backward_ref(np.asarray(dout, np.float64), exact, bounds(lengths))
    allowed = BACKWARD["bfloat16"] + (EXTREME["bfloat16"] if gates == "extreme" else 0)
    for name, got, want in zip(Tokens._fields, found, expected, strict=True):
        assert relative_error(got, want) < allowed, name
    return tokens, dout, values, found


@pytest.mark.sim
def test_simulator(rng):
    check(rng, [66], (1, 1, 128, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["slow", "mid", "fast", "extreme"])
def test_gpu(rng, gates):
    lengths = [1, 63, 64, 65, 200, 0, 130]
    for heads in ((2, 2, 128, 128), (2, 6, 128, 128)):
        tokens, dout, values, found = check(rng, lengths, heads, gates)
        for got, again in zip(found, gradients_of(tokens, dout, lengths, values), strict=True):
            assert_same_bits(got, again)
