import math
import tracemalloc

import numpy as np
import pytest

from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.gemm.sm90 import gemm_with_config
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.logprob import chunked
from rlnumba.kernels.logprob import ops as logprob
from rlnumba.kernels.logprob import sm90 as logprob_sm90
from rlnumba.kernels.logprob.chunked import logp_of_logits
from rlnumba.kernels.logprob.ops import IGNORED, linear_logp_backward_ref, linear_logp_ref
from rlnumba.kernels.logprob.sm90 import HeadTuning, chunk_columns, one_pass_shape, split_k_rounds
from rlnumba.kernels.logprob.sm90_kernel import (
    MAX_EXPONENT,
    LogprobConfig,
    TileResults,
    TileRows,
    TileShape,
    can_stagger,
    logprob_kernel,
)
from rlnumba.kernels.logprob.terms import KeptTokens, LogprobOutputs, LossGradients
from rlnumba.kernels.sampling.draw import Counters
from rlnumba.kernels.sampling.ops import sample
from rlnumba.kernels.sampling.scan import SamplingLimits
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.arguments import tuple_type
from tests.close import ROUNDING, assert_close, assert_same_bits
from tests.kernels.test_logprob import NAMES, masked_and_renormalised, one_and_two_calls

pytestmark = pytest.mark.sm90
QWEN3_06B = (16_384, 151_936, 1024)
CHECKED = 64


def make(rng, rows, vocabulary, width, dtype, ignored=True):
    """(hidden, weight, ids, dlogp) on the host; logits of a few units."""
    kind = device.dtype(dtype)
    hidden = rng.standard_normal((rows, width), np.float32).astype(kind)
    weight = (3 * rng.standard_normal((vocabulary, width), np.float32) / np.sqrt(width)).astype(kind)
    ids = rng.integers(0, vocabulary, rows).astype(np.int32)
    if ignored:
        ids[2::5] = IGNORED
    return hidden, weight, ids, rng.standard_normal(rows, np.float32)


def terms(rows):
    """Arrays for logp, lse, entropy, top1."""
    xp = device.xp()
    return [xp.full(rows, np.nan, np.float32) for _ in range(3)] + [xp.full(rows, -7, np.int32)]


@pytest.fixture
def fused():
    """The operators take the sm_90 kernels."""
    with dispatch.forced("sm90"):
        yield


def check_terms(out, case, temperature, rows=slice(None)):
    hidden, weight, ids, _ = case
    live = ids[rows] != IGNORED
    h, w = hidden[rows].astype(np.float64), weight.astype(np.float64)
    expected = linear_logp_ref(h, w, ids[rows], temperature)
    size = (15 + np.log(len(weight))) / temperature
    logp, lse, entropy, top1 = (device.to_host(array)[rows] for array in out)
    for actual, value, what in zip((logp, lse, entropy), expected, ("logp", "lse", "entropy"), strict=False):
        assert_close(actual, value, "float32", terms=weight.shape[1], scale=size, what=what)
    assert np.all((top1 == -1) == ~live)
    logits = h[live] @ w.T
    chosen = np.take_along_axis(logits, top1[live, None], 1)[:, 0]
    assert_close(chosen, logits.max(axis=1, initial=-np.inf), "float32", weight.shape[1], size, "the logit of top1")


def check_gradient(dhidden, dweight, case, temperature, checked, lost, dentropy=None):
    """lost: relative roundings of dz, in units of the dtype's; rows outside `checked` have dlogp 0."""
    hidden, weight, ids, dlogp = case
    h, w = hidden[checked].astype(np.float64), weight.astype(np.float64)
    by_entropy = None if dentropy is None else dentropy[checked].astype(np.float64)
    dh, dw = linear_logp_backward_ref(h, w, ids[checked], dlogp[checked].astype(np.float64), temperature, by_entropy)
    rounding = lost * 4 * ROUNDING[hidden.dtype.name] / ROUNDING["float32"]
    spread = float(np.abs(dlogp).max()) / temperature
    if dentropy is not None:
        spread += (1 + math.log(len(weight))) * float(np.abs(dentropy).max()) / temperature
    largest = float(np.abs(w).max()) * spread
    dhidden = device.to_host(dhidden)
    assert_close(dhidden[checked], dh, terms=len(weight) + rounding, scale=2 * largest, what="dhidden")
    assert not np.delete(dhidden, checked, axis=0).any()
    scale = 2 * spread * float(np.abs(h).max()) + 1
    # dz is rounded to 16 bits, dweight is not.
    assert_close(dweight, dw, hidden.dtype.name, terms=len(checked) + 400, scale=lost * scale, what="dweight")


SIMULATED = LogprobConfig("bfloat16", "forward", consumers=1, stages=2, entropy=True, top1=True)


def no_gpu():
    if device.name() == "cuda":
        pytest.skip("the gpu tests have this")


@pytest.mark.sim
def test_simulator_forward(rng):
    """Two tiles of columns, the second ragged; the bits are those that a sampler finds in float32 logits."""
    no_gpu()
    case = make(rng, 5, 300, 72, "bfloat16", ignored=False)
    hidden, weight, ids, _ = case
    out = terms(5)
    logprob_sm90.linear_logp(hidden, weight, ids, 0.8, LogprobOutputs(*out), config=SIMULATED)
    check_terms(out, case, 0.8)
    logits = np.empty((5, 300), np.float32)
    gemm_with_config(Sm90GemmConfig(256, 1, 2, "bfloat16", output="float32"), hidden, weight, logits)
    plain = terms(5)
    logp_of_logits(logits, ids, 0.8, *plain)
    for one, other, what in zip(out, plain, ("logp", "lse", "entropy", "top1"), strict=True):
        assert_same_bits(one, other, what)


@pytest.mark.sim
def test_simulator_two_consumers(rng):
    """More rounds than stages, two tiles for one block, one consumer after the other; neither entropy nor top1."""
    no_gpu()
    case = make(rng, 66, 257, 136, "float16", ignored=False)
    hidden, weight, ids, _ = case
    logp, lse = terms(66)[:2]
    config = LogprobConfig("float16", "forward", 2, 2, 1)
    logprob_sm90.linear_logp(hidden, weight, ids, 1.0, LogprobOutputs(logp, lse), config=config)
    expected = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids)
    assert_close(logp, expected[0], terms=136, scale=20.0, what="logp")
    assert_close(lse, expected[1], terms=136, scale=20.0, what="lse")


@pytest.mark.sim
def test_simulator_backward(rng, monkeypatch):
    """Two chunks of the vocabulary, the second narrower."""
    no_gpu()
    case = make(rng, 20, 300, 64, "bfloat16", ignored=False)
    hidden, weight, ids, dlogp = case
    lse = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.7)[1].astype(np.float32)
    monkeypatch.setattr(logprob_sm90, "EXTRA_BYTES", 20 * (8 * 64 + 2 * 256) + 100)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    config = LogprobConfig("bfloat16", "dlogits", consumers=1, stages=2)
    arguments = hidden, weight, ids, 0.7, lse, LossGradients(dlogp, dhidden, dweight)
    logprob_sm90.linear_logp_backward(*arguments, tuning=HeadTuning(config))
    check_gradient(dhidden, dweight, case, 0.7, np.arange(20), lost=1)

    entropy = linear_logp_ref(hidden.astype(np.float64), weight.astype(np.float64), ids, 0.7)[2].astype(np.float32)
    dentropy = rng.standard_normal(20).astype(np.float32)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    arguments = hidden, weight, ids, 0.7, lse, LossGradients(dlogp, dhidden, dweight, entropy, dentropy)
    logprob_sm90.linear_logp_backward(*arguments, tuning=HeadTuning(config._replace(entropy=True)))
    check_gradient(dhidden, dweight, case, 0.7, np.arange(20), lost=1, dentropy=dentropy)


@pytest.mark.sim
@pytest.mark.parametrize("dtype, temperature", [("bfloat16", 1.3), ("bfloat16", 0.05), ("float16", 1.3)])
def test_simulator_with_gradient(rng, dtype, temperature):
    """Two blocks of rows, the second shorter; two splits of a vocabulary of two tiles, the second ragged.

    At a low temperature some rows have logits too far above their target's for one reference.
    """
    no_gpu()
    case = make(rng, 66, 300, 64, dtype, ignored=False)
    hidden, weight, ids, dlogp = case
    out = terms(66)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    logp, lse, entropy, top1 = out
    gradients = LossGradients(dlogp, dhidden, dweight)
    arguments = hidden, weight, ids, temperature, LogprobOutputs(*out), gradients
    config = SIMULATED._replace(element=dtype, mode="exponentials")
    logprob_sm90.linear_logp_with_gradient(*arguments, HeadTuning(config, shape=(64, 2)))
    check_terms(out, case, temperature)
    check_gradient(dhidden, dweight, case, temperature, np.arange(66), lost=2)
    far = -logp * np.log2(np.e) > MAX_EXPONENT["bfloat16"]
    assert far.any() == (temperature < 0.1) and not far.all()


@pytest.mark.sim
def test_simulator_thresholds(rng):
    """The three forms with thresholds: the chunked kernels' results; the forward's bits are theirs."""
    no_gpu()
    with dispatch.forced("sm90"):
        masked_and_renormalised(rng, rows=9, vocabulary=304, width=64, dtype="bfloat16")
    hidden, weight, ids, _ = make(rng, 5, 304, 72, "bfloat16", ignored=False)
    logits = np.empty((5, 304), np.float32)
    gemm_with_config(Sm90GemmConfig(256, 1, 2, "bfloat16", output="float32"), hidden, weight, logits)
    ids, thresholds = logits.argmax(axis=1).astype(np.int32), np.sort(logits, axis=1)[:, 200].copy()
    out, plain = terms(5), terms(5)
    logprob_sm90.linear_logp(hidden, weight, ids, 0.8, LogprobOutputs(*out), KeptTokens(thresholds), SIMULATED)
    logp_of_logits(logits, ids, 0.8, *plain, thresholds)
    for one, other, what in zip(out, plain, ("logp", "lse", "entropy", "top1"), strict=True):
        assert_same_bits(one, other, what)


@pytest.mark.sim
def test_simulator_short_last_split(rng, monkeypatch):
    """On three SMs two tiles of five rounds are two of four, and for the third SM two of one."""
    no_gpu()
    monkeypatch.setattr(device, "sm_count", lambda: 3)
    assert split_k_rounds(5, 2, 2) == (4, 4)
    case = make(rng, 66, 300, 64, "bfloat16", ignored=False)
    hidden, weight, ids, dlogp = case
    out = terms(66)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.float32(np.nan))
    arguments = hidden, weight, ids, 1.3, LogprobOutputs(*out), LossGradients(dlogp, dhidden, dweight)
    config = SIMULATED._replace(mode="exponentials")
    logprob_sm90.linear_logp_with_gradient(*arguments, HeadTuning(config, shape=(128, 2)))
    check_gradient(dhidden, dweight, case, 1.3, np.arange(66), lost=2)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("dlogits", {}),
        ("dlogits", {"entropy": True}),
        ("dlogits", {"masked": True}),
        ("forward", {"entropy": True, "masked": True}),
        ("exponentials", {"entropy": True}),
    ],
)
def test_kernels_compile_for_gpus(compile_offline, mode, options):
    """The configs that the operators choose: no float64, no spills."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU, from the cpu device")
    config, floats = LogprobConfig("bfloat16", mode, **options), ["float32[::1]"]
    types = ["uint8[::1]"] * 3 + [tuple_type(TileRows, "int32[::1]", *floats * 6), "float32"]
    types += [tuple_type(TileResults, *floats * 2), tuple_type(TileShape, *["int64"] * 6)]
    assert not compile_offline(logprob_kernel(config), tuple(types), (9, 0, "a"))


def test_split_k_rounds(monkeypatch):
    """Splits cover all rounds, none is empty, and no division with fewer splits has a shorter longest SM."""
    monkeypatch.setattr(device, "sm_count", lambda: 132)
    assert split_k_rounds(2374, 24, 6) == (432, 432) and split_k_rounds(2374, 24, 5) == (475, 475)
    for rounds in (1, 7, 100, 2374):
        for tiles in (1, 8, 24, 100, 131, 132, 500):
            before = math.inf
            for splits in range(1, 18):
                length, longest = split_k_rounds(rounds, tiles, splits)
                assert 0 < -(-rounds // length) <= splits
                assert longest * 132 >= tiles * rounds and longest <= before
                before = longest


@pytest.mark.sim
@pytest.mark.parametrize(("rows", "without", "blocks"), [(170, 200, [128, 7]), (11, 3, [6]), (11, 1, [1])])
def test_simulator_operator(rng, monkeypatch, rows, without, blocks):
    """The operator in one pass: few rows have no gradient, some, or all but one."""
    no_gpu()
    called = []
    one_pass = logprob_sm90.linear_logp_with_gradient

    def counted(hidden, *arguments):
        called.append(len(hidden))
        one_pass(hidden, *arguments)

    monkeypatch.setattr(logprob_sm90, "linear_logp_with_gradient", counted)
    monkeypatch.setattr(logprob_sm90, "one_pass_shape", lambda width, vocabulary: (128, 2))
    with dispatch.forced("sm90"):
        one, two = one_and_two_calls(rng, rows, 100, 72, "bfloat16", without=without)
    assert called == blocks
    for first, second, what in zip(one[:4], two[:4], NAMES, strict=False):
        assert_same_bits(first, second, what)
    for first, second, what in zip(one[4:], two[4:], NAMES[4:], strict=True):
        assert_close(first, second, "bfloat16", terms=400, scale=8.0, what=what)
    assert not one[4][2::5].any() and not one[4][1::without].any()


@pytest.mark.sim
def test_simulator_operator_without_a_gradient(rng):
    no_gpu()
    hidden, weight, ids, dlogp = make(rng, 5, 100, 72, "bfloat16", ignored=False)
    logp, lse, _, _ = terms(5)
    dhidden, dweight = np.full_like(hidden, np.nan), np.full(weight.shape, np.nan, np.float32)
    dlogp.fill(0)
    with dispatch.forced("sm90"):
        both = LogprobOutputs(logp, lse), LossGradients(dlogp, dhidden, dweight)
        logprob.linear_logp_with_gradient(hidden, weight, ids, 1.0, *both)
    assert np.isfinite(logp).all() and not dhidden.any() and not dweight.any()


def test_the_second_consumer_follows():
    """However short the tiles, stages stop the first consumer before it passes the barrier between them twice."""
    for stages in (2, 3, 4):
        for stagger in (1, 2, 3):
            config = LogprobConfig("bfloat16", "forward", stages=stages, stagger=stagger)
            for rounds in range(1, 9):
                # Stages that the first takes from where the second waits for a tile to its next tile's barrier.
                taken = rounds + min(stagger, rounds - 1) + 1
                assert can_stagger(config, rounds) == (taken > stages)
    assert can_stagger(LogprobConfig("bfloat16", "forward"), 16) and not can_stagger(
        LogprobConfig("bfloat16", "forward"), 2
    )
    assert not can_stagger(LogprobConfig("bfloat16", "forward", consumers=1), 16)


@pytest.mark.parametrize("shape", [QWEN3_06B, (4096, 151_936, 4096), (700, 50_264, 768), (65_536, 128_256, 2048)])
def test_extra_memory(shape, monkeypatch):
    """dz and the float32 gradient of a chunk, or a block's exponentials and parts, fit into EXTRA_BYTES."""
    monkeypatch.setattr(device, "sm_count", lambda: 132)
    rows, vocabulary, width = shape
    rows = min(rows, logprob_sm90.QUARTER // (4 * width))
    columns = chunk_columns(rows, width, vocabulary)
    assert columns == vocabulary or columns % 256 == 0
    assert rows * (2 * columns + 8 * width) <= logprob_sm90.EXTRA_BYTES
    rows, splits = one_pass_shape(width, vocabulary)
    row_bytes = 2 * vocabulary + 16 * -(-vocabulary // 256) + 4 * (splits + 1) * width
    assert rows % 128 == 0 and rows * row_bytes <= logprob_sm90.EXTRA_BYTES


def asked_for(monkeypatch, implementation, shape, left_out=False):
    """{call: bytes that it asks for beside its arguments}, counted where nothing is computed."""
    if device.name() != "cpu":
        pytest.skip("the memory of NumPy arrays is counted")
    rows, vocabulary, width = shape
    monkeypatch.setattr(logprob, "_implementation", lambda *arrays: implementation)
    monkeypatch.setattr(logprob, "_has_sm90", lambda: implementation is logprob_sm90)
    monkeypatch.setattr(device, "sm_count", lambda: 132)
    computing = "launch", "_launch", "gemm", "cast", "linear", "linear_backward_input", "linear_backward_weight"
    for name in (*computing, "logp_of_logits", "logp_of_logits_backward"):
        if hasattr(implementation, name):
            monkeypatch.setattr(implementation, name, lambda *arguments, **options: None)
    # Empty arrays take no memory before they are written.
    hidden, dhidden = (np.empty((rows, width), np.float16) for _ in range(2))
    weight, dweight = np.empty((vocabulary, width), np.float16), np.empty((vocabulary, width), np.float32)
    ids, dlogp = np.zeros(rows, np.int32), np.ones(rows, np.float32)
    if left_out:
        ids[0], dlogp[1] = IGNORED, 0
    outputs, gradients = LogprobOutputs(*terms(rows)), LossGradients(dlogp, dhidden, dweight)
    inputs = hidden, weight, ids, 1.0
    calls = {
        "forward": lambda: logprob.linear_logp(*inputs, outputs),
        "backward": lambda: logprob.linear_logp_backward(*inputs, outputs.lse, gradients),
        "one pass": lambda: logprob.linear_logp_with_gradient(*inputs, outputs, gradients),
    }
    found = {}
    tracemalloc.start()
    try:
        for what, call in calls.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            call()
            found[what] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("left_out", [False, True])
def test_memory_of_the_operators(monkeypatch, left_out):
    """At Qwen3-0.6B's shape."""
    for what, extra in asked_for(monkeypatch, logprob_sm90, QWEN3_06B, left_out).items():
        least = 244 if what == "one pass" else 60
        assert least << 20 < extra <= logprob_sm90.EXTRA_BYTES + 64 * QWEN3_06B[0], (what, extra / 2**20)


@pytest.mark.parametrize("shape", [QWEN3_06B, (2048, 32_000, 1024), (128, 32_000, 4096), (700, 512, 64)], ids=str)
@pytest.mark.parametrize("implementation", [logprob_sm90, chunked], ids=lambda module: module.__name__[-7:])
def test_memory_that_a_plan_counts(monkeypatch, implementation, shape):
    """It is what the operators ask for, but for copies of rows, and some numbers a row."""
    rows, vocabulary, width = shape
    found = asked_for(monkeypatch, implementation, shape)
    apart, at_once = max(found["forward"], found["backward"]), found["one pass"]
    sizes = width, vocabulary, np.dtype(np.float16)
    spare = logprob_sm90.COPIES * width * rows + 64 * rows + (1 << 16)
    for counts, most in (((rows, 0), apart), ((0, rows), at_once), ((rows, rows), max(apart, at_once))):
        assert most - (64 * rows + (1 << 16)) <= logprob.operator_bytes(*counts, *sizes) <= most + spare, counts
    assert logprob.operator_bytes(0, 0, *sizes) == 0
    # With thresholds nothing is computed at once, and some by chunks.
    filtered = logprob.operator_bytes(rows, rows, *sizes, is_filtered=True)
    assert filtered == max(chunked.operator_bytes(rows, width, vocabulary, 2), logprob.operator_bytes(rows, 0, *sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [QWEN3_06B, (4097, 50_264, 768), (300, 32_000, 288), (1, 1000, 64)])
def test_gpu(rng, fused, shape, dtype):
    """Terms, gradient, and both again in one pass, on a sample of rows; some rows are ignored."""
    rows, vocabulary, width = shape
    case = make(rng, rows, vocabulary, width, dtype)
    checked = np.sort(rng.permutation(rows)[:CHECKED])
    case[3][~np.isin(np.arange(rows), checked)] = 0
    hidden, weight, ids, dlogp = (device.asarray(array) for array in case)
    xp = device.xp()
    out, again = terms(rows), terms(rows)
    logprob.linear_logp(hidden, weight, ids, 0.8, LogprobOutputs(*out))
    check_terms(out, case, 0.8, checked)
    dhidden, dweight = xp.full_like(hidden, np.nan), xp.full(weight.shape, np.float32(np.nan))
    gradients = LossGradients(dlogp, dhidden, dweight)
    logprob.linear_logp_backward(hidden, weight, ids, 0.8, out[1], gradients)
    check_gradient(dhidden, dweight, case, 0.8, checked, lost=1)
    dentropy = np.where(case[3] != 0, rng.standard_normal(rows), 0).astype(np.float32)
    dweight.fill(np.nan)
    by_entropy = gradients._replace(entropy=out[2], dentropy=device.asarray(dentropy))
    logprob.linear_logp_backward(hidden, weight, ids, 0.8, out[1], by_entropy)
    check_gradient(dhidden, dweight, case, 0.8, checked, lost=1, dentropy=dentropy)
    dhidden.fill(np.nan)
    dweight.fill(np.nan)
    logprob.linear_logp_with_gradient(hidden, weight, ids, 0.8, LogprobOutputs(*again), gradients)
    for one, other in zip(again, out, strict=True):
        assert_same_bits(one, other, "one pass")
    check_gradient(dhidden, dweight, case, 0.8, checked, lost=2)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_gpu_drawn_tokens_are_scored_as_they_were_drawn(rng, fused, temperature):
    """For any number of rows in the sampler's product, and on both ways to the log-prob."""
    case = make(rng, 256, 151_936, 1024, "bfloat16", ignored=False)
    hidden, weight, _, _ = (device.asarray(array) for array in case)
    xp = device.xp()
    for rows in (1, 8, 64, 256):
        logits, drawn = xp.empty((rows, weight.shape[0]), np.float32), xp.empty(rows, np.float32)
        token_ids, index = xp.empty(rows, np.int32), xp.arange(rows, dtype=np.int32)
        full = {name: xp.full(rows, value, np.float32) for name, value in (("t", temperature), ("p", 1.0), ("m", 0.0))}
        keys, none = xp.ones((rows, 2), np.uint32), xp.zeros(rows, np.int32)
        gemm.linear(hidden[:rows], weight, logits)
        limits, counters = SamplingLimits(full["t"], none, full["p"], full["m"]), Counters(keys, index, index)
        sample(logits, limits, counters, token_ids, drawn)
        out, plain = terms(rows), terms(rows)
        logprob.linear_logp(hidden[:rows], weight, token_ids, temperature, LogprobOutputs(*out))
        assert_same_bits(out[0], drawn, f"{rows} rows, drawn")
        logp_of_logits(logits, token_ids, temperature, *plain)
        for one, other in zip(out, plain, strict=True):
            assert_same_bits(one, other, f"{rows} rows")
