"""Experts around their GEMMs: router, dispatch, rows gathered and combined, load; with gradients."""

import numpy as np
import pytest

from rlnumba.kernels.experts import ops, routing, rows
from rlnumba.kernels.experts.ops import (
    Dispatch,
    RouterLoad,
    Routing,
    add_router_load,
    combine,
    dispatch,
    gather_rows,
    gather_rows_backward,
    record_experts,
    route,
    route_backward,
    router_loss,
    weigh_rows_backward,
)
from rlnumba.kernels.experts.reference import (
    combine_ref,
    dispatch_ref,
    route_backward_ref,
    route_ref,
    router_loss_ref,
    shares_ref,
    weigh_rows_backward_ref,
)
from rlnumba.runtime import device
from tests.close import assert_close, assert_gradient, assert_same_bits

# Tokens, experts, experts a token, columns of a row.
SHAPE, ONE, WIDE = (7, 5, 2, 24), (1, 1, 1, 1), (3, 37, 6, 13)
REAL = [(1, 128, 8, 2048), (64, 256, 8, 2048), (1031, 128, 8, 2048), (9000, 256, 8, 72), (0, 128, 8, 2048)]


@pytest.fixture(params=["operators", pytest.param("kernels", marks=pytest.mark.sim)])
def each_device():
    """Runs a test on the device of the process, and in the simulator, too."""


def full(shape, dtype, value=np.nan):
    """An array of the device; integers are -7."""
    return device.xp().full(shape, -7 if np.dtype(dtype) == np.int32 else value, dtype)


def random(rng, shape, dtype):
    return rng.standard_normal(shape, np.float32).astype(device.dtype(dtype))


def wide(*arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def on_device(*arrays):
    """Copies, which may be overwritten."""
    return [device.asarray(np.array(array, order="C")) for array in arrays]


def routed(scores, top_k, normalise, recorded=None):
    """The Routing of scores on the host."""
    routing = Routing.empty(len(scores), top_k, scores.dtype, full)
    arrays = [None if x is None else device.asarray(x) for x in (scores, recorded)]
    route(arrays[0], normalise, routing, arrays[1])
    return routing


def dispatched_of(experts, num_experts):
    """The Dispatch of experts on the host."""
    dispatched = Dispatch.empty(*experts.shape, num_experts, full)
    dispatch(device.asarray(experts), dispatched)
    return dispatched


def check_route(rng, shape, dtype, normalise):
    tokens, num_experts, top_k, _ = shape
    scores = 2 * random(rng, (tokens, num_experts), dtype)
    # Ties, which are frequent in 16 bits.
    scores[::2] = np.round(scores[::2].astype(np.float32)).astype(scores.dtype)
    # Their exponentials are infinite, or 0, unless the largest is taken off.
    scores[-1:] += 150
    scores[1:2] -= 150
    routing = routed(scores, top_k, normalise)
    experts, weights = route_ref(scores.astype(np.float64), top_k, normalise)
    assert_same_bits(routing.experts, experts, "experts")
    assert_close(routing.weights, weights, terms=num_experts, what="weights")
    others = np.argsort(rng.random(scores.shape), axis=1)[:, :top_k].astype(np.int32)
    others[1::3, 0] = -1
    replayed = routed(scores, top_k, normalise, others)
    experts, weights = route_ref(scores.astype(np.float64), top_k, normalise, others)
    assert_same_bits(replayed.experts, experts, "recorded experts")
    assert_close(replayed.weights, weights, terms=num_experts, what="weights of recorded experts")

    dweights, slopes = rng.standard_normal((tokens, top_k), np.float32), rng.standard_normal(num_experts, np.float32)
    padding_from = tokens * 3 // 4
    for given in (None, slopes):
        dscores = full(scores.shape, scores.dtype)
        arguments = *on_device(dweights, scores, experts), normalise, dscores
        of_loss = (None, None) if given is None else on_device(given, np.int32([padding_from]))
        route_backward(*arguments, *of_loss)
        expected = route_backward_ref(*wide(dweights, scores), experts, normalise, given, padding_from)
        # Terms of either sign cancel.
        scale = float(np.max(np.abs(dweights), initial=0)) + (0 if given is None else np.abs(given).max())
        assert_close(dscores, expected, terms=num_experts, scale=scale, what="dscores")


def check_rows(rng, shape, dtype):
    tokens, num_experts, top_k, columns = shape
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    dispatched = dispatched_of(experts, num_experts)
    for name, found, expected in zip(Dispatch._fields, dispatched, dispatch_ref(experts, num_experts), strict=True):
        assert_same_bits(found, expected, name)
    slot_of = device.to_host(dispatched.slot_of)
    x, residual = (random(rng, (tokens, columns), dtype) for _ in range(2))
    rows, weights = random(rng, (tokens * top_k, columns), dtype), random(rng, (tokens, top_k), dtype)
    gathered = full(rows.shape, x.dtype)
    gather_rows(device.asarray(x), dispatched, gathered)
    assert_same_bits(gathered, x[device.to_host(dispatched.row_of)], "gathered")

    def check_sum(run, weights, residual, what):
        out = full(x.shape, x.dtype)
        run(out)
        if dtype != "float32" or weights is None:
            assert_same_bits(out, combine_ref(rows, weights, slot_of, residual), what)
        others = [None if array is None else wide(array)[0] for array in (weights, residual)]
        expected = combine_ref(*wide(rows), others[0], slot_of, others[1])
        assert_close(out, expected, terms=top_k, scale=20, what=what)

    rows_d, weights_d, residual_d = on_device(rows, weights, residual)
    check_sum(lambda out: combine(rows_d, weights_d, dispatched, out), weights, None, "combined")
    check_sum(lambda out: combine(rows_d, weights_d, dispatched, out, residual_d), weights, residual, "with residual")
    check_sum(lambda out: gather_rows_backward(rows_d, dispatched, out), None, None, "dx")

    def accumulate(out):
        out[...] = residual_d
        gather_rows_backward(rows_d, dispatched, out, accumulate=True)

    check_sum(accumulate, None, residual, "dx accumulated")


def check_weighed_rows(rng, shape, dtype):
    tokens, num_experts, top_k, columns = shape
    experts = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    dispatched = dispatched_of(experts, num_experts)
    rows, drows = (random(rng, (tokens * top_k, columns), dtype) for _ in range(2))
    weights, slot_of = random(rng, (tokens, top_k), dtype), device.to_host(dispatched.slot_of)
    expected = weigh_rows_backward_ref(*wide(drows, rows, weights), slot_of)
    for weighs_rows in (True, False):
        dweights, (drows_d, rows_d, weights_d) = full(weights.shape, np.float32), on_device(drows, rows, weights)
        weigh_rows_backward(drows_d, rows_d, weights_d, dispatched, dweights, weighs_rows)
        assert_same_bits(drows_d, expected[0].astype(rows.dtype), "drows")
        assert_same_bits(rows_d, expected[1].astype(rows.dtype) if weighs_rows else rows, "rows")
        assert_close(dweights, expected[2], terms=columns, scale=10 * np.sqrt(columns), what="dweights")


def check_load(rng, shape, dtype):
    tokens, num_experts, top_k, _ = shape
    scores = random(rng, (tokens, num_experts), dtype)
    experts, _ = route_ref(scores, top_k, True)
    # Of all tokens, and of those that are no padding.
    for real in (tokens, tokens * 2 // 3):
        counts, shares = full((num_experts,), np.int32), full((num_experts,), np.float32, 0.25)
        load = RouterLoad(counts, shares, device.asarray(np.int32([real])))
        add_router_load(device.asarray(scores), dispatched_of(experts, num_experts), load)
        expected_counts = np.bincount(experts[:real].reshape(-1), minlength=num_experts)
        expected = shares_ref(*wide(scores))[:real].sum(axis=0)
        assert_same_bits(counts, (expected_counts - 7).astype(np.int32), "counts")
        assert_close(shares, expected + 0.25, terms=tokens + num_experts, scale=tokens + 1, what="shares")
        loss, slopes = full((1,), np.float32), full((num_experts,), np.float32)
        load, weight = load._replace(num_tokens=device.asarray(np.int32([real + 1]))), np.float32([0.5])
        router_loss(load, 3, device.asarray(weight), loss, slopes)
        expected = router_loss_ref(device.to_host(counts), *wide(device.to_host(shares)), 3 * (real + 1), 0.5)
        for name, found, wanted in zip(("loss", "slopes"), (loss, slopes), expected, strict=True):
            size = num_experts * 10 * (1 if name == "loss" else np.abs(wanted).max())
            assert_close(found, np.reshape(wanted, found.shape), terms=num_experts, scale=size, what=name)


def check_all(rng, shape, dtype):
    check_route(rng, shape, dtype, True)
    check_route(rng, shape, dtype, False)
    check_rows(rng, shape, dtype)
    check_weighed_rows(rng, shape, dtype)
    check_load(rng, shape, dtype)


@pytest.mark.parametrize("normalise", [False, True])
def test_gradient_of_router(rng, normalise):
    scores, upstream = rng.standard_normal((3, 5)), rng.standard_normal((3, 2))
    experts, _ = route_ref(scores, 2, True)
    experts[1] = 4, 0
    counts = np.bincount(experts.reshape(-1), minlength=5)

    def weights_loss():
        return float(np.sum(route_ref(scores, 2, normalise, experts)[1] * upstream))

    assert_gradient(weights_loss, route_backward_ref(upstream, scores, experts, normalise), scores)

    def whole_loss():
        return weights_loss() + 0.3 * router_loss_ref(counts, np.sum(shares_ref(scores), axis=0), 3, 1.0)[0]

    slopes = router_loss_ref(counts, np.zeros(5), 3, 0.3)[1]
    assert_gradient(whole_loss, route_backward_ref(upstream, scores, experts, normalise, slopes), scores)


def test_gradients_of_references(rng):
    experts, upstream = np.array([[0, 3], [4, 1], [3, 1]]), rng.standard_normal((3, 2))
    slot_of = dispatch_ref(experts, 5)[2]
    rows, dout = rng.standard_normal((6, 4)), rng.standard_normal((3, 4))
    x, row_of, drows = rng.standard_normal((3, 4)), dispatch_ref(experts, 5)[1], rng.standard_normal((6, 4))
    assert_gradient(lambda: float(np.sum(x[row_of] * drows)), combine_ref(drows, None, slot_of), x)
    # As an expert's output, the rows times a matrix.
    matrix = rng.standard_normal((4, 4))

    def mapped_loss():
        return float(np.sum(combine_ref(rows @ matrix.T, upstream, slot_of) * dout))

    gradient, weighed, dweights = weigh_rows_backward_ref((dout @ matrix)[row_of], rows, upstream, slot_of)
    assert_gradient(mapped_loss, gradient, rows)
    assert_gradient(mapped_loss, dweights, upstream)
    assert_gradient(mapped_loss, dout[row_of].T @ weighed, matrix)


@pytest.mark.parametrize("shape", [SHAPE, ONE, WIDE, (200, 128, 8, 40), (0, 4, 2, 3)])
def test_numpy_device(rng, shape):
    if device.name() != "cpu":
        pytest.skip("the reference as operator")
    check_all(rng, shape, "float32")


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_simulator(rng, dtype):
    for shape in (SHAPE, ONE) if dtype != "float16" else (WIDE,):
        check_all(rng, shape, dtype)


@pytest.mark.sim
def test_simulator_without_tokens(rng):
    check_all(rng, (0, 3, 2, 8), "bfloat16")


@pytest.mark.sim
@pytest.mark.parametrize("tokens, threads", [(150, 1024), (150, 32)])
def test_sorting_by_several_warps_and_steps(rng, monkeypatch, tokens, threads):
    """Two steps of 128 choices and some: of three warps, or of one; many choices of one expert, none of another."""
    monkeypatch.setattr(ops, "SORT_THREADS", threads)
    experts = np.where(rng.random((tokens, 1)) < 0.7, [[2, 0]], [[3, 2]]).astype(np.int32)
    dispatched = dispatched_of(experts, 4)
    for name, found, expected in zip(Dispatch._fields, dispatched, dispatch_ref(experts, 4), strict=True):
        assert_same_bits(found, expected, name)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("dtype, few_tokens", [("float32", 1024), ("bfloat16", 1024), ("bfloat16", 0)])
def test_order_of_the_sum(monkeypatch, dtype, few_tokens):
    """A token's rows are added in the order of its choices, in float32, whichever experts they are of.

    Whether there are few tokens, and all rows are loaded at once, or many.
    """
    monkeypatch.setattr(ops, "FEW_TOKENS", few_tokens)
    dispatched = dispatched_of(np.array([[5, 3, 4, 0, 2, 1]], np.int32), 6)
    terms = np.array([[2**26], [1], [-(2**26)], [1], [1], [1]], device.dtype(dtype))
    rows, weights = np.empty_like(terms), np.ones((1, 6), terms.dtype)
    rows[device.to_host(dispatched.slot_of)[0]] = terms
    for run in (lambda *x: combine(x[0], device.asarray(weights), *x[1:]), gather_rows_backward):
        out = full((1, 1), terms.dtype)
        run(device.asarray(rows), dispatched, out)
        assert float(device.to_host(out)[0, 0]) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", REAL)
def test_gpu(rng, shape, dtype):
    check_all(rng, shape, dtype)


@pytest.mark.usefixtures("each_device")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_order_of_the_chosen(rng, dtype):
    """By descending score, ties by ascending index, also of zeros of either sign; a NaN as -inf, for its row alone."""
    nan, inf = np.nan, np.inf
    scores = [[1, 3, 3, 2], [0.0, -0.0, 0.0, -1], [nan, -5, nan, -6], [-inf, nan, 0, -inf], [nan] * 4, [-inf] * 4]
    experts, weights = map(device.to_host, routed(np.array(scores, device.dtype(dtype)), 3, True))
    wanted = [[1, 2, 3], [0, 1, 2], [1, 3, 0], [2, 0, 1], [0, 1, 2], [0, 1, 2]]
    assert experts.tolist() == wanted
    assert np.isnan(weights[2:]).all() and np.isfinite(weights[:2]).all()
    assert_close(weights[1], np.full(3, 1 / 3))
    # Neighbouring numbers of either sign, subnormal ones too, in any order.
    bits = np.array([0x0001, 0x0002, 0x3BFF, 0x3C00, 0x8001, 0x8002, 0xBBFF, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)
    values = bits.view(device.dtype("float16" if dtype == "float32" else dtype)).astype(device.dtype(dtype))
    for _ in range(3):
        scores = rng.permutation(values)[None]
        experts = device.to_host(routed(scores, 10, False).experts)
        assert experts.tolist() == [np.argsort(-scores[0].astype(np.float64), kind="stable").tolist()]


@pytest.mark.usefixtures("each_device")
def test_experts_are_recorded_in_their_tokens_slots():
    """More choices than threads of a block; padding, without a slot, is written nowhere."""
    tokens, top_k = 90, 3
    experts = np.arange(tokens * top_k, dtype=np.int32).reshape(tokens, top_k)
    slots = np.random.default_rng(0).permutation(200)[:tokens].astype(np.int32)
    slots[[0, 7, tokens - 1]] = -1
    records = device.asarray(np.full((200, top_k), -9, np.int16))
    record_experts(*on_device(experts, slots), records)
    expected = np.full((200, top_k), -9, np.int16)
    expected[slots[slots >= 0]] = experts[slots >= 0]
    assert_same_bits(device.to_host(records), expected)


@pytest.mark.usefixtures("each_device")
def test_replay_of_the_own_choice_changes_no_bits(rng):
    scores = random(rng, (6, 9), "float32")
    routing = routed(scores, 3, True)
    replayed = routed(scores, 3, True, device.to_host(routing.experts))
    for found, expected in zip(replayed, routing, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.usefixtures("each_device")
def test_recorded_experts_far_below_the_largest(rng):
    """Their softmax is 0, so are their weights and gradient; without normalise, too."""
    scores = np.array([[0, -200, -300, 1]], np.float32)
    recorded = np.array([[2, 1]], np.int32)
    for normalise in (False, True):
        routing = routed(scores, 2, normalise, recorded)
        assert device.to_host(routing.weights).tolist() == [[0, 0]]
        dscores = full((1, 4), np.float32)
        dweights, scores_d = on_device(np.ones((1, 2), np.float32), scores)
        route_backward(dweights, scores_d, routing.experts, normalise, dscores)
        assert device.to_host(dscores).tolist() == [[0, 0, 0, 0]]


@pytest.mark.usefixtures("each_device")
def test_a_token_depends_on_itself_alone(rng):
    """Alone and in reversed order a token has the bits that it has among others."""
    tokens, num_experts, top_k, columns = (5, 37, 3, 20) if device.name() == "sim" else (65, 128, 8, 136)
    dtype = "float32" if device.name() == "cpu" else "bfloat16"
    scores, x = random(rng, (tokens, num_experts), dtype), random(rng, (tokens, columns), dtype)
    dout = random(rng, (tokens, columns), dtype)
    dweights = rng.standard_normal((tokens, top_k), np.float32)

    def run(chosen):
        """What a token's results are, as arrays whose first axis is the tokens'."""
        count, arrays = len(chosen), on_device(*(array[chosen] for array in (scores, x, dout, dweights)))
        routing = routed(scores[chosen], top_k, True)
        dispatched = dispatched_of(device.to_host(routing.experts), num_experts)
        rows, drows = (full((count * top_k, columns), x.dtype) for _ in range(2))
        gather_rows(arrays[1], dispatched, rows)
        out, dx = (full((count, columns), x.dtype) for _ in range(2))
        combine(rows, routing.weights, dispatched, out)
        of_weights, weighed_dx = full((count, top_k), np.float32), full((count, columns), x.dtype)
        dscores = full((count, num_experts), x.dtype)
        gather_rows(arrays[2], dispatched, drows)
        gather_rows_backward(drows, dispatched, dx)
        route_backward(arrays[3], arrays[0], routing.experts, True, dscores)
        weigh_rows_backward(drows, rows, routing.weights, dispatched, of_weights)
        gather_rows_backward(drows, dispatched, weighed_dx)
        return *routing, out, of_weights, dx, dscores, weighed_dx

    together = run(np.arange(tokens))
    for chosen in ([0], [tokens - 1], np.arange(tokens)[::-1]):
        for found, expected in zip(run(np.array(chosen)), together, strict=True):
            assert_same_bits(found, device.to_host(expected)[chosen])


@pytest.mark.parametrize("element", ["float32", "uint16"])
def test_kernels_compile_for_gpus(compile_offline, element):
    """For rows and experts of Qwen3-30B-A3B and of Qwen3.5-35B-A3B."""
    if device.name() != "cpu":
        pytest.skip("compiles without a GPU")
    X, F1, F2, I1, I2 = f"{element}[:,::1]", "float32[::1]", "float32[:,::1]", "int32[::1]", "int32[:,::1]"
    kind, vector, word = ("bfloat16", 8, np.uint16) if element == "uint16" else ("float32", 4, np.uint32)
    W, layout = f"{np.dtype(word)}[:,::1]", (vector, False, 2048 // vector // rows.THREADS)
    cases = [
        (rows.dispatch_kernel(8, 4), [I1, "int64", I1, I1, I1]),
        (rows.gather_rows_kernel(8, word, *layout), [W, I2, W]),
        (rows.combine_kernel(8, rows.AT_ONCE, kind, *layout), [X, I2, X, X, X]),
        (rows.combine_kernel(8, rows.FEW_AT_ONCE, kind, *layout), [X, I2, X, X, X]),
        (rows.weigh_rows_backward_kernel(8, vector, vector, False), [X, X, I2, X, "int32", F2]),
    ]
    for num_experts in (128, 256):
        cases += [
            (routing.route_kernel(num_experts, 8, True, element == "uint16"), [X, I2, I2, X]),
            (routing.route_backward_kernel(num_experts, 8, True), [F2, X, I2, F1, I1, X]),
            (routing.router_load_kernel(num_experts), [X, I1, I1, I1, I1, F2]),
        ]
    troubles = []
    for kernel, types in cases:
        for architecture in ((8, 0), (9, 0)):
            troubles += compile_offline(kernel, types, architecture)
    assert not troubles, "\n".join(troubles)


def test_wrong_arguments_are_named():
    xp = device.xp()
    scores, routing = xp.zeros((2, 4), np.float32), Routing.empty(2, 2, np.float32, xp.zeros)
    with pytest.raises(ValueError, match=r"route: weights must be \(2, 2\) float32, got \(2, 2\) float16"):
        route(scores, True, routing._replace(weights=xp.zeros((2, 2), np.float16)))
    with pytest.raises(ValueError, match="route: a token must have 1 to 4 of 4 experts, got 5"):
        route(scores, True, Routing.empty(2, 5, np.float32, xp.zeros))
    with pytest.raises(ValueError, match="route: scores must be of 1 to 512 experts, got 513"):
        route(xp.zeros((2, 513), np.float32), True, routing)
    dispatched = Dispatch.empty(2, 2, 4, xp.zeros)
    with pytest.raises(ValueError, match=r"dispatch: experts must be \(2, 2\) int32, got \(2, 3\) int32"):
        dispatch(xp.zeros((2, 3), np.int32), dispatched)
    with pytest.raises(ValueError, match=r"combine: rows must be \(4, any\) .*, got \(5, 3\) float32"):
        combine(xp.zeros((5, 3), np.float32), routing.weights, dispatched, xp.zeros((2, 3), np.float32))
    if device.name() == "cpu":
        with pytest.raises(ValueError, match=r"dispatch: experts must be in \[0, 4\), got 4"):
            dispatch(np.array([[0, 1], [4, 2]], np.int32), dispatched)
        with pytest.raises(ValueError, match=r"route: recorded must be in \[0, 4\), got -1"):
            route(scores, True, routing, np.array([[-1, 9], [2, -1]], np.int32))


@pytest.mark.sim
def test_experts_outside_of_the_range():
    """Kernels give them no memory that is not theirs, and a weight of NaN."""
    if device.name() == "cpu":
        pytest.skip("the cpu device raises")
    recorded = np.array([[1, 4], [0, 2]], np.int32)
    routing = routed(np.zeros((2, 3), np.float32), 2, False, recorded)
    weights = device.to_host(routing.weights)
    assert np.isnan(weights).tolist() == [[False, True], [False, False]]
    starts, row_of, _ = map(device.to_host, dispatched_of(np.array([[1, 4], [0, -9]], np.int32), 3))
    assert starts.tolist() == [0, 1, 2, 4] and row_of.tolist() == [1, 0, 0, 1]
