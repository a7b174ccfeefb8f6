"""sm90 kernels where every ring of stages wraps around and every block has several work items.

TMA and wgmma are asynchronous, so a wait that is missing need not show at small sizes. Each case
runs with the threads in their own order, and, if RLNUMBA_SLOW=1, in two orders that are drawn.
"""

import numpy as np
import pytest

from rlnumba.kernels.attention import sm90_paged
from rlnumba.kernels.attention.sm90_backward_mainloop import AttentionBackwardConfig
from rlnumba.kernels.attention.sm90_config import AttentionConfig
from rlnumba.kernels.attention.sm90_decode import kernel, producer
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.logprob.sm90_kernel import LogprobConfig
from rlnumba.kernels.logprob.terms import LogprobOutputs, LossGradients
from rlnumba.runtime import device, simulator
from tests.kernels import test_attention_backward_sm90 as gradient
from tests.kernels import test_attention_sm90 as forward
from tests.kernels import test_logprob_sm90 as head

pytestmark = [pytest.mark.sim, pytest.mark.sm90]
BF16, F16 = "bfloat16", "float16"


@pytest.fixture(
    params=[None, *(pytest.param(seed, marks=pytest.mark.slow) for seed in "12")],
    ids=["in order", "drawn", "drawn again"],
    autouse=True,
)
def order(request, monkeypatch):
    if device.name() != "sim":
        pytest.skip("GPU tests have larger cases")
    monkeypatch.setattr("rlnumba.runtime.simulator.SEED", request.param)
    # These tiles are of use here only; the tests of each kernel compile those that operators take.
    monkeypatch.setattr("rlnumba.runtime.launch.observers", [])
    return request.param


@pytest.mark.parametrize(
    "lengths, heads, kv_heads, tile",
    [
        ([300, 5, 70], 4, 2, AttentionConfig(64, BF16, stages=2, segment=128)),
        ([333, 70], 2, 2, AttentionConfig(48, F16, stages=2, paired=False, segment=256)),
        ([290], 2, 1, AttentionConfig(80, BF16, stages=3, paired=False, segment=64)),
        ([260], 2, 1, AttentionConfig(256, BF16, stages=2, segment=1024)),
    ],
    ids=["two heads", "neighbours", "many segments", "wide"],
)
def test_attention(rng, lengths, heads, kv_heads, tile):
    forward.check_forward(*forward.packed(rng, lengths, heads, kv_heads, tile.head_dim, tile.element), lengths, tile)


def test_paged_attention(rng):
    """Many tiles for each sequence and segment, in decode and in chunks."""
    cache = forward.Cache(rng, [330, 50, 140], 4, 2, 32, F16, segment=256, flat=70)
    cache.compare([0, 1, 2, 0], [328, 49, 135, 260], [330, 50, 140, 264], blocks=3)
    cache.compare([2, 0], [100, 271], [140, 330], max_context=336)


def late(function, latencies, warps):
    """`function` of a kernel; in some warps after as long as so many copies take one after the other."""

    def complete_late(*arguments):
        thread = simulator._thread
        for _ in range(latencies if thread.index // 32 in warps else 0):
            condition = simulator.Condition()
            thread.block.grid.pending.append(condition.notify_all)
            condition.wait("a latency")
        return function(*arguments)

    return complete_late


@pytest.mark.parametrize(
    "module, function, latencies, warps",
    [(kernel, "atomic_add_acq_rel", 40, [6]), (producer, "mbarrier_wait", 10, [5])],
    ids=["merging", "loading"],
)
def test_slow_producer_and_merging_warps_of_decode(rng, monkeypatch, module, function, latencies, warps):
    """Warps that merge, or load, far behind those that compute and find work: nothing they read is overwritten."""
    monkeypatch.setattr(module, function, late(getattr(module, function), latencies, warps))
    # A kernel is made once; this one is made of what is patched.
    make = kernel.paged_attention_sm90_kernel.__wrapped__
    monkeypatch.setattr(sm90_paged, "paged_attention_sm90_kernel", make)
    cache = forward.Cache(rng, [330, 130, 210, 20], 2, 1, 16, F16, segment=64, flat=70)
    begins, ends = [328, 129, 5, 6, 7, 8, 9, 10, 205], [330, 130, 0, 0, 0, 0, 0, 0, 210]
    cache.compare([0, 1, 3, 3, 3, 3, 3, 3, 2], begins, ends, blocks=1, max_leading=1)


def test_groups(rng):
    cache = forward.Cache(rng, [300, 290, 260, 40], 2, 1, 64, BF16, segment=64)
    for sequence in (1, 2):
        cache.tables[sequence, :16] = cache.tables[0, :16]
    step = [0, 1, 2, 3], [299, 289, 259, 39], [300, 290, 260, 40], 320
    grouped = cache.paged(*step, common=[256, 256, 256, 0], group_sizes=[3, 0, 0, 1], blocks=2)
    for actual, expected in zip(grouped, cache.paged(*step), strict=True):
        forward.assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "lengths, heads, kv_heads, config",
    [
        ([300, 40], 2, 1, AttentionBackwardConfig(64, BF16)),
        ([270], 2, 1, AttentionBackwardConfig(48, F16, prefetch_scores=False)),
        ([200, 150], 2, 1, AttentionBackwardConfig(128, BF16)),
        ([200], 2, 2, AttentionBackwardConfig(136, BF16)),
    ],
    ids=str,
)
def test_attention_backward(rng, monkeypatch, order, lengths, heads, kv_heads, config):
    arrays, gradients = gradient.run(rng, lengths, heads, kv_heads, config)
    if order:
        # Blocks that add to the same rows do so in KV order.
        monkeypatch.setattr("rlnumba.runtime.simulator.SEED", None)
        for one, other in zip(gradients, gradient.backward(arrays, lengths, config), strict=True):
            forward.assert_same_bits(one, other)


HEADS = [
    LogprobConfig(BF16, "forward", consumers=2, stages=3, stagger=2, entropy=True, top1=True),
    LogprobConfig(F16, "forward", consumers=1, stages=2),
]


@pytest.mark.parametrize("config", HEADS, ids=["two consumers", "one"])
def test_log_prob(rng, config):
    rows = 64 * config.consumers + 22
    case = head.make(rng, rows, 700, 328, config.element, ignored=False)
    hidden, weight, ids, _ = case
    out = head.terms(rows)
    if not config.entropy:
        out = [*out[:2], None, None]
    logprob_sm90.linear_logp(hidden, weight, ids, 0.8, LogprobOutputs(*out), config=config)
    if config.entropy:
        head.check_terms(out, case, 0.8)
    else:
        expected = head.linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.8)
        head.assert_close(out[0], expected[0], terms=328, scale=20.0, what="logp")


@pytest.mark.parametrize("config", HEADS, ids=["two consumers", "one"])
def test_log_prob_backward(rng, monkeypatch, config):
    rows = 64 * config.consumers + 22
    case = head.make(rng, rows, 700, 200, config.element, ignored=False)
    hidden, weight, ids, dlogp = case
    lse = head.linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.7)[1].astype(np.float32)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    config = config._replace(mode="dlogits", top1=False, entropy=False)
    gradients, tuning = LossGradients(dlogp, dhidden, dweight), logprob_sm90.HeadTuning(config, columns=512)
    logprob_sm90.linear_logp_backward(hidden, weight, ids, 0.7, lse, gradients, tuning=tuning)
    head.check_gradient(dhidden, dweight, case, 0.7, np.arange(rows), lost=1)


def test_log_prob_in_one_pass(rng):
    case = head.make(rng, 150, 700, 200, BF16, ignored=False)
    hidden, weight, ids, dlogp = case
    out = head.terms(150)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    arguments = hidden, weight, ids, 1.3, LogprobOutputs(*out), LossGradients(dlogp, dhidden, dweight)
    tuning = logprob_sm90.HeadTuning(HEADS[0]._replace(mode="exponentials"), shape=(128, 2))
    logprob_sm90.linear_logp_with_gradient(*arguments, tuning)
    head.check_terms(out, case, 1.3)
    head.check_gradient(dhidden, dweight, case, 1.3, np.arange(150), lost=2)
