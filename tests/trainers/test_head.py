"""The language-model head in two calls and in one."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.model.heads import HeadGradients, LogprobHead, Targets
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arena import Arena
from tests.close import assert_close, assert_same_bits

NAMES = ("logprobs", "entropy", "top1", "dhidden", "the head's gradient")


def two_ways(rng, dtype):
    """[(logprobs, entropy, top1, dhidden, gradient of the head)] of two calls, and of one; 7 of 9 rows have targets."""
    kind, xp = device.dtype(dtype), device.xp()
    hidden, weight = (device.asarray(rng.standard_normal(s, np.float32).astype(kind)) for s in ((9, 64), (100, 64)))
    rows, target_ids = (device.asarray(np.int32(ids)) for ids in ([0, 1, 3, 4, 5, 6, 8], [99, 0, 3, 50, 7, 7, 64]))
    dlogprobs = device.asarray(np.float32([-0.5, 0.25, 0, 1, 2, 0, -1]))
    model, arena, found = SimpleNamespace(lm_head=weight), Arena("test"), []
    for together in (False, True):
        dweight = xp.full((100, 64), np.float32(np.nan))
        head, targets, gradients = LogprobHead(0.7), Targets(rows, target_ids), HeadGradients(dweight)
        out = xp.empty(7, np.float32), xp.empty(7, np.float32), xp.empty(7, np.int32)
        with arena.scope():
            if together:
                dhidden = head.forward_backward(model, hidden, targets, gradients, arena, dlogprobs, out)
            else:
                saved = head.forward(model, hidden, targets, arena, *out)
                dhidden = head.backward(model, saved, gradients, arena, dlogprobs)
            found.append((*out, dhidden.copy(), dweight))
    return found


def test_one_call_is_two_calls(rng):
    two, one = two_ways(rng, "float32")
    for actual, expected, what in zip(one, two, NAMES, strict=True):
        assert_same_bits(actual, expected, what)


@pytest.mark.sim
def test_one_call_is_two_calls_in_kernels(rng):
    test_one_call_is_two_calls(rng)


@pytest.mark.sm90
@pytest.mark.sim
def test_one_pass_on_sm90(rng, monkeypatch):
    called, one_pass = [], logprob_sm90.linear_logp_with_gradient

    def counted(hidden, *arguments):
        called.append(len(hidden))
        one_pass(hidden, *arguments)

    monkeypatch.setattr(logprob_sm90, "linear_logp_with_gradient", counted)
    with dispatch.forced("gemm=sm90,logprob=sm90"):
        two, one = two_ways(rng, "bfloat16")
    # Targets with a derivative of 0 take the forward alone.
    assert called == [5]
    for actual, expected, what in zip(one[:3], two[:3], NAMES, strict=False):
        assert_same_bits(actual, expected, what)
    for actual, expected, what in zip(one[3:], two[3:], NAMES[3:], strict=True):
        assert_close(actual, device.to_host(expected), "bfloat16", terms=100, scale=8.0, what=what)
