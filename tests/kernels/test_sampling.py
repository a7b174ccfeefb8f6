import numpy as np
import pytest

from rlnumba.kernels.gemm.ops import linear
from rlnumba.kernels.logprob.chunked import logp_of_logits
from rlnumba.kernels.logprob.ops import linear_logp
from rlnumba.kernels.logprob.terms import LogprobOutputs
from rlnumba.kernels.nn import row_sum
from rlnumba.kernels.philox import noise_key
from rlnumba.kernels.sampling import draw as draw_module
from rlnumba.kernels.sampling import scan, thresholds
from rlnumba.kernels.sampling.draw import Counters
from rlnumba.kernels.sampling.ops import (
    apply_repetition_penalty,
    apply_repetition_penalty_ref,
    kept_ref,
    noise_words_ref,
    sample,
    sample_ref,
)
from rlnumba.kernels.sampling.scan import SamplingLimits
from rlnumba.runtime import device
from rlnumba.runtime.context import Context
from tests.close import assert_close, assert_same_bits
from tests.kernels.gpu_arithmetic import fill_shared_memory, use_gpu_arithmetic

FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
QWEN_VOCABULARY = 151_936


def make(rng, rows, columns, **options):
    """Arguments of sample on the host: random logits, one noise key for all rows, sample_index 0, 1, 2, ..."""
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    floats = {name: np.full(rows, options[name], np.float32) for name in ("temperature", "top_p", "min_p")}
    return {
        "logits": (3 * rng.standard_normal((rows, columns))).astype(np.float32),
        "temperature": floats["temperature"],
        "top_k": np.full(rows, options["top_k"], np.int32),
        "top_p": floats["top_p"],
        "min_p": floats["min_p"],
        "keys": np.tile(noise_key(5, [1, 2]), (rows, 1)),
        "sample_index": np.arange(rows, dtype=np.int32),
        "position": np.full(rows, 9, np.int32),
    }


def set_list_length(monkeypatch, length):
    """How many candidates a row's list holds, in the simulator."""
    for module in (scan, draw_module):
        monkeypatch.setattr(module, "LIST", length)
    monkeypatch.setattr("rlnumba.runtime.context._thread.context", Context())


def in_tuples(arguments):
    """The arrays of `make`, on the device, as sample takes them."""
    logits, *others = map(device.asarray, arguments.values())
    return logits, SamplingLimits(*others[:4]), Counters(*others[4:])


def draw(arguments):
    """(token_ids, logprobs) on the host from the operator."""
    rows = len(arguments["logits"])
    token_ids = device.xp().full(rows, -7, np.int32)
    logprobs = device.xp().full(rows, np.nan, np.float32)
    sample(*in_tuples(arguments), token_ids, logprobs)
    return device.to_host(token_ids), device.to_host(logprobs)


def check_against_reference(arguments):
    token_ids, logprobs = draw(arguments)
    expected_ids, expected = sample_ref(**arguments)
    assert np.array_equal(token_ids, expected_ids)
    assert_close(logprobs, expected, terms=arguments["logits"].shape[1], scale=20.0, what="logprobs")


def check_distribution(counts, probabilities):
    """Fail unless counts come from the distribution: Pearson's chi-square, five standard deviations.

    Tokens are gathered by descending probability into bins that expect 20 or more.
    """
    draws = counts.sum()
    assert np.all(counts[probabilities == 0] == 0)
    order = np.argsort(-probabilities, kind="stable")
    expected, observed = draws * probabilities[order], counts[order]
    bins = np.minimum(np.cumsum(expected) - expected, draws - 20) // 20
    _, bins = np.unique(bins, return_inverse=True)
    expected, observed = np.bincount(bins, weights=expected), np.bincount(bins, weights=observed)
    freedom = max(len(expected) - 1, 1)
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 10, (statistic, freedom)


def zipf(rng, columns, exponent):
    """Logits of a vocabulary whose r-th most frequent token has probability about 1 / r^exponent."""
    return rng.permutation(-exponent * np.log(np.arange(1, columns + 1))).astype(np.float32)


def check_draws(row, rows, batches, **options):
    """Chi-square and mean log-prob of rows * batches draws from one row of logits."""
    arguments = make(np.random.default_rng(1), rows, 1, **options)
    arguments["logits"] = np.tile(row, (rows, 1))
    logits, limits, counters = in_tuples(arguments)
    kept = kept_ref(row.astype(np.float64), *(options.get(k, v) for k, v in DEFAULTS))
    scaled = np.where(kept, row.astype(np.float64) / options.get("temperature", 1.0), -np.inf)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    surprise = -np.log(np.where(probabilities > 0, probabilities, 1.0))
    counts, total = np.zeros(len(row)), 0.0
    token_ids, logprobs = device.xp().zeros(rows, np.int32), device.xp().zeros(rows, np.float32)
    for position in range(batches):
        counters = counters._replace(position=device.asarray(np.full(rows, position, np.int32)))
        sample(logits, limits, counters, token_ids, logprobs)
        ids = device.to_host(token_ids)
        counts += np.bincount(ids, minlength=len(row))
        total += device.to_host(logprobs).sum(dtype=np.float64)
        assert_close(logprobs, -surprise[ids], terms=len(row), scale=20.0)
    check_distribution(counts, probabilities)
    entropy = np.sum(probabilities * surprise)
    error = np.sqrt((np.sum(probabilities * surprise**2) - entropy**2) / counts.sum())
    assert abs(-total / counts.sum() - entropy) < 5 * error + 1e-5


DEFAULTS = (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))


@pytest.mark.parametrize("options", [FILTERS["none"], FILTERS["top_p"], FILTERS["all"]], ids=["none", "top_p", "all"])
@pytest.mark.sim
def test_simulator(rng, options):
    arguments = make(rng, 1, 301, **options)
    check_against_reference(arguments)


@pytest.mark.sim
def test_simulator_few_columns_and_greedy(rng):
    check_against_reference(make(rng, 2, 1))
    check_against_reference(make(rng, 2, 63, temperature=0.0))
    check_against_reference(make(rng, 2, 66, min_p=0.3))


@pytest.mark.sim
def test_simulator_several_tiles_of_a_quad(rng):
    """A class has more than one tile, and the last is ragged; logits are read two at a time."""
    check_against_reference(make(rng, 1, row_sum.CLASSES * row_sum.TILE_COLUMNS + 300))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}], ids=["none", "qwen"])
@pytest.mark.sim
def test_simulator_a_whole_vocabulary(rng, options):
    check_against_reference(make(rng, 1, QWEN_VOCABULARY, **options))


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}], ids=["top_p", "top_k"])
@pytest.mark.sim
def test_simulator_more_tokens_than_the_list_holds(rng, monkeypatch, options):
    if device.name() == "cuda":
        pytest.skip("test_gpu_flat_rows has this")
    arguments = make(rng, 1, 90, **options)
    listed = draw(arguments)
    set_list_length(monkeypatch, 4)
    searched = draw(arguments)
    assert listed[0] == searched[0]
    assert_close(searched[1], listed[1], terms=90, scale=1.0)


@pytest.mark.parametrize(
    "options, listed",
    [({"top_p": 0.99}, 50), ({"top_k": 300}, 50), ({"min_p": 1e-3}, 50), ({"top_p": 0.9}, 600), ({"top_k": 20}, 600)],
)
@pytest.mark.sim
def test_simulator_a_list_of_a_guess(rng, monkeypatch, options, listed):
    """Of 1,500 tokens some are listed: too few with 50, so that the row is read again, and enough with 600."""
    if device.name() == "cuda":
        pytest.skip("test_gpu has this")
    set_list_length(monkeypatch, 1024)
    monkeypatch.setattr(scan, "EXPECTED", listed)
    monkeypatch.setattr(scan, "EXPECTED_IF_FEW", listed)
    found = []
    original = draw_module.row_gumbel_argmax
    monkeypatch.setattr(draw_module, "row_gumbel_argmax", lambda *arguments: found.append(True) or original(*arguments))
    check_against_reference(make(rng, 1, 1500, **options))
    assert bool(found) == (listed == 50)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 20, "top_p": 0.5}])
@pytest.mark.parametrize("length", [8192, 4])
@pytest.mark.sim
def test_zeros_of_both_signs_are_one(rng, monkeypatch, options, length):
    """The largest logits are zeros, some of them negative; all fit in the list, or they do not."""
    if device.name() != "cuda":
        set_list_length(monkeypatch, length)
    arguments = make(rng, 2, 90, **options)
    arguments["logits"] = -np.abs(arguments["logits"])
    arguments["logits"][0, [5, 50]] = -0.0
    arguments["logits"][1, [5, 50, 70]] = 0.0, -0.0, 0.0
    check_against_reference(arguments)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=["none", "greedy", "top_p"])
@pytest.mark.sim
def test_simulator_blocks_that_share_a_row(rng, monkeypatch, options):
    """However many blocks read a row, the draw has the same bits."""
    if device.name() == "cuda":
        pytest.skip("the number of processors cannot be chosen")
    arguments = make(rng, 2, 9001, **options)
    alone = draw(arguments)
    for processors in (2, 5):
        monkeypatch.setattr(device, "sm_count", lambda: processors)  # noqa: B023
        shared = draw(arguments)
        assert np.array_equal(shared[0], alone[0])
        assert_same_bits(shared[1], alone[1])
    check_against_reference(arguments)


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}], ids=["top_k", "top_p", "min_p"])
@pytest.mark.sim
def test_simulator_masked_tokens_do_not_count(rng, options):
    arguments = make(rng, 1, 90, **options)
    arguments["logits"][:, 7:] = -np.inf
    check_against_reference(arguments)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("options", [*FILTERS.values(), {"temperature": 0.0}], ids=[*FILTERS, "greedy"])
@pytest.mark.sim
def test_rows_that_are_no_distribution(rng, monkeypatch, options):
    use_gpu_arithmetic(monkeypatch, draw_module, scan, thresholds, row_sum)
    fill_shared_memory(monkeypatch, 0x11)
    check_rows_that_are_no_distribution(rng, options)


@pytest.mark.parametrize("options", [*FILTERS.values(), {"temperature": 0.0}], ids=[*FILTERS, "greedy"])
def test_numpy_device_rows_that_are_no_distribution(rng, options):
    if device.name() == "cpu":
        check_rows_that_are_no_distribution(rng, options)


def check_rows_that_are_no_distribution(rng, options):
    """What a model whose weights are lost gives: some token, and NaN."""
    arguments = make(rng, 5, 70, **options)
    arguments["logits"][:2] = np.array([[np.nan], [-np.inf]])
    arguments["logits"][2, 33] = np.nan
    arguments["logits"][3, 33] = np.inf
    token_ids, logprobs = draw(arguments)
    assert np.all((0 <= token_ids) & (token_ids < 70))
    assert list(np.isnan(logprobs)) == [True, True, True, True, False]


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("columns", [1, 2, 255, 257, 5000])
def test_numpy_device(rng, columns, options):
    if device.name() == "cpu":
        check_against_reference(make(rng, 33, columns, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [*FILTERS.values(), {"temperature": 0.0}], ids=[*FILTERS, "greedy"])
@pytest.mark.parametrize("shape", [(256, QWEN_VOCABULARY), (3, 50_257), (5, 1023), (7, 1), (0, 8)])
def test_gpu(rng, shape, options):
    check_against_reference(make(rng, *shape, **options))


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_distribution(rng, options):
    if device.name() != "sim":
        check_draws(zipf(rng, 400, 1.1), 5000, 24, **options)


def test_distribution_across_segments(rng):
    """Few tokens beside the borders of segments: the two draws must agree on their weights."""
    if device.name() == "sim":
        pytest.skip("needs many draws")
    row = np.full(1100, -np.inf, np.float32)
    row[[0, 255, 256, 257, 511, 512, 767, 1024, 1099]] = rng.standard_normal(9)
    check_draws(row, 5000, 24)
    check_draws(row, 5000, 24, temperature=0.5)


@pytest.mark.parametrize("options", [FILTERS["none"], FILTERS["top_p"]], ids=["none", "top_p"])
def test_distribution_of_rare_tokens(rng, options):
    """A fifth of the mass lies on tokens of probability below 1e-4."""
    if device.name() == "cpu":
        check_draws(zipf(rng, 6000, 0.9), 2500, 20, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_gpu_distribution(rng, options):
    # With exponent 1 the twentieth token would lie on min-p's boundary, where rounding decides.
    check_draws(zipf(rng, QWEN_VOCABULARY, 1.05), 256, 500, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"top_p": 0.95}, {"min_p": 0.2}, {"top_k": 60_000, "top_p": 0.7}])
def test_gpu_flat_rows(rng, options):
    """More tokens are kept than the list holds."""
    arguments = make(rng, 9, QWEN_VOCABULARY, **options)
    arguments["logits"] *= np.float32(0.2)
    check_against_reference(arguments)


@pytest.mark.gpu
def test_gpu_mixed_rows(rng):
    """Rows with and without filters, greedy ones among them, and a few masked tokens."""
    arguments = make(rng, 40, QWEN_VOCABULARY)
    arguments["temperature"][:] = rng.choice([0.0, 0.7, 1.0], 40)
    arguments["top_k"][:] = rng.choice([0, 5, 500], 40)
    arguments["top_p"][:] = rng.choice([1.0, 0.9], 40)
    arguments["min_p"][:] = rng.choice([0.0, 0.01], 40)
    arguments["logits"][:, -300:] = -np.inf
    check_against_reference(arguments)


@pytest.mark.gpu
def test_gpu_distribution_of_a_flat_vocabulary(rng):
    """Every token has probability 6.6e-6: the noise needs its fine steps near 0."""
    check_draws(np.zeros(QWEN_VOCABULARY, np.float32), 256, 4000)


def test_draws_of_neighbours_are_independent(rng):
    """Pairs of draws at consecutive positions, samples, and under consecutive seeds fill their table evenly."""
    if device.name() == "sim":
        pytest.skip("needs many draws")
    rows, columns = 40_000, 6
    base = make(rng, rows, columns)
    base["logits"] = np.zeros((rows, columns), np.float32)
    first, _ = draw(base)
    for change in ("position", "sample_index", "keys"):
        other = dict(base)
        other[change] = other[change] + np.asarray(1, other[change].dtype)
        second, _ = draw(other)
        check_distribution(
            np.bincount(columns * first + second, minlength=columns**2), np.full(columns**2, columns**-2.0)
        )


def test_noise_depends_on_its_name_alone(rng):
    """A row draws the same token alone, in any batch, at any place, beside any neighbours."""
    rows, columns = (3, 70) if device.name() == "sim" else (64, 700)
    arguments = make(rng, rows, columns, top_p=0.95 if device.name() != "sim" else 1.0)
    token_ids, logprobs = draw(arguments)
    order = rng.permutation(rows)
    shuffled_ids, shuffled = draw({name: a[order].copy() for name, a in arguments.items()})
    assert np.array_equal(shuffled_ids, token_ids[order])
    assert_same_bits(shuffled, logprobs[order])
    alone_id, alone = draw({name: a[2:3].copy() for name, a in arguments.items()})
    assert alone_id[0] == token_ids[2]
    assert_same_bits(alone, logprobs[2:3])


def test_filters_do_not_change_the_noise(rng):
    """Where the token drawn without filters is kept, it is drawn with them too: in a row of one segment."""
    rows = 2 if device.name() == "sim" else 200
    arguments = make(rng, rows, 40)
    free, _ = draw(arguments)
    arguments["top_k"][:] = 5
    filtered, _ = draw(arguments)
    kept = np.array(
        [kept_ref(row, 1.0, 5, 1.0, 0.0)[token] for row, token in zip(arguments["logits"], free, strict=True)]
    )
    assert np.array_equal(filtered[kept], free[kept])


def test_log_prob_has_the_bits_of_linear_logp(rng):
    rows, columns, width = (2, 70, 8) if device.name() == "sim" else (33, 1000, 48)
    hidden, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (columns, width)))
    hidden, weight = device.asarray(hidden), device.asarray(weight)
    logits = device.xp().empty((rows, columns), np.float32)
    linear(hidden, weight, logits)
    for temperature in (1.0, 0.8):
        arguments = make(rng, rows, columns, temperature=temperature)
        arguments["logits"] = device.to_host(logits)
        token_ids, logprobs = draw(arguments)
        scored, lse = (device.xp().empty(rows, np.float32) for _ in range(2))
        linear_logp(hidden, weight, device.asarray(token_ids), temperature, LogprobOutputs(scored, lse))
        assert_same_bits(logprobs, scored, f"temperature {temperature}")


def kept_mass(row, **options):
    """exp of (log-prob without filters - log-prob with them): the mass that the filters of one row keep."""
    arguments = make(np.random.default_rng(0), 1, len(row), **options)
    arguments["logits"] = np.asarray([row], np.float32)
    token_ids, logprobs = draw(arguments)
    scaled = np.asarray(row, np.float64) / options.get("temperature", 1.0)
    return np.exp(scaled[token_ids[0]] - np.log(np.sum(np.exp(scaled))) - logprobs[0])


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.6}, [0, 1, 2]),
        ({"top_p": 0.9}, [0, 1, 2]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"top_p": 1e-6}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.36}, [0, 1, 2]),
        ({"min_p": 0.37}, [0]),
        # Of the mass that top-k leaves (.52, .19, .19 of .90), .55 is reached by the first token alone.
        ({"top_k": 2, "top_p": 0.55}, [0]),
        ({"top_p": 0.55}, [0, 1, 2]),
        # The order is min-p, then top-k: both thresholds hold.
        ({"min_p": 0.3, "top_k": 4}, [0, 1, 2]),
        # Temperature comes first: at 10 the first token has .26 of the mass.
        ({"temperature": 10.0, "top_p": 0.5}, [0, 1, 2]),
        ({"temperature": 10.0, "min_p": 0.8}, [0, 1, 2, 3]),
    ],
)
def test_kept_tokens(options, kept):
    row = [2.0, 1.0, 1.0, 0.0, -1.0]
    merged = {**dict(DEFAULTS), **options}
    assert list(np.flatnonzero(kept_ref(np.array(row), *merged.values()))) == kept
    if device.name() == "sim" and options not in ({"top_k": 2, "top_p": 0.55}, {"temperature": 10.0, "top_p": 0.5}):
        return
    p = np.exp(np.array(row) / merged["temperature"])
    assert abs(kept_mass(row, **options) - p[kept].sum() / p.sum()) < 1e-5


def test_ties_at_the_boundary_are_all_kept(rng):
    if device.name() == "sim":
        pytest.skip("covered by test_kept_tokens")
    flat = np.full(1000, -3.7)
    for options in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        assert abs(kept_mass(flat, **options) - 1) < 1e-4
    # Zeros of both signs are one value.
    assert abs(kept_mass([0.0, -0.0, 0.0, -1e3], top_k=1) - 1) < 1e-5


def test_forbidden_tokens_are_never_drawn(rng):
    rows = 1 if device.name() == "sim" else 100
    arguments = make(rng, rows, 50)
    arguments["logits"][:, 7:] = -np.inf
    token_ids, logprobs = draw(arguments)
    assert token_ids.max() < 7 and np.all(np.isfinite(logprobs))
    if device.name() != "sim":
        for options in ({"top_k": 20}, {"top_p": 0.999}):
            arguments |= {name: np.full_like(arguments[name], value) for name, value in options.items()}
            check_against_reference(arguments)


def test_greedy_takes_the_lowest_of_equals(rng):
    arguments = make(rng, 2, 90, temperature=0.0, top_k=3, top_p=0.1)
    arguments["logits"][:, [11, 30, 77]] = 20.0
    token_ids, logprobs = draw(arguments)
    assert list(token_ids) == [11, 11]
    p = np.exp(arguments["logits"][:, 11].astype(np.float64)) / np.exp(arguments["logits"].astype(np.float64)).sum(
        axis=1
    )
    assert_close(logprobs, np.log(p), terms=90, scale=20.0)


def test_equal_keys_go_to_the_lowest_index(rng):
    """Beside logits of 4e9 the noise is lost in rounding, so all keys are equal."""
    arguments = make(rng, 2, 300)
    arguments["logits"][:, [11, 30, 77, 290]] = 4e9
    assert list(draw(arguments)[0]) == [11, 11]


@pytest.mark.sim
def test_a_peak_that_the_sample_missed(rng):
    """Top-p of a row whose largest logits are far above all that the bound is guessed from."""
    arguments = make(rng, 1, 2048 if device.name() == "sim" else 16_384, temperature=0.3, top_p=0.5)
    arguments["logits"][:] = 0
    arguments["logits"][0, 20:22] = 30.0, 29.8
    token_ids, logprobs = draw(arguments)
    assert token_ids[0] == 20
    assert logprobs[0] == 0


def test_a_single_kept_token_has_log_prob_zero(rng):
    arguments = make(rng, 2, 70, top_k=1)
    token_ids, logprobs = draw(arguments)
    assert np.array_equal(token_ids, arguments["logits"].argmax(axis=1)) and np.all(logprobs == 0)


def test_not_a_number_shows_in_the_log_prob(rng):
    arguments = make(rng, 2, 70)
    arguments["logits"][1, 5] = np.nan
    with np.errstate(invalid="ignore"):
        token_ids, logprobs = draw(arguments)
    assert np.isnan(logprobs[1]) and np.isfinite(logprobs[0]) and 0 <= token_ids[1] < 70


def test_reference_noise_is_a_word_of_the_tokens_own_counter():
    words = noise_words_ref(10, noise_key(1, [2]), 3, 4)
    segment_words = noise_words_ref(10, noise_key(1, [2]), 3, 4, draw_module.SEGMENT_NOISE)
    assert len({*words.tolist(), *segment_words.tolist()}) == 20
    assert np.array_equal(words[:6], noise_words_ref(6, noise_key(1, [2]), 3, 4))


def replayed(rng, rows, columns, filters):
    """Draws with thresholds: the tokens are those without, the thresholds keep what the filters do, and the log-probs
    have the bits of logp_of_logits with these thresholds."""
    arguments = make(rng, rows, columns, **FILTERS[filters])
    xp = device.xp()
    plain_ids, plain_logprobs = draw(arguments)
    token_ids, logprobs, thresholds = xp.empty(rows, np.int32), xp.empty(rows, np.float32), xp.empty(rows, np.float32)
    replay = np.ones(rows, np.int32)
    replay[0] = 0
    sample(*in_tuples(arguments), token_ids, logprobs, thresholds, device.asarray(replay))
    assert_same_bits(token_ids, plain_ids)
    assert_same_bits(logprobs[:1], plain_logprobs[:1], "a row that wants no replay")
    host, limits = arguments["logits"], device.to_host(thresholds)
    if filters in ("none", "temperature"):
        assert np.all(limits == -np.inf)
        assert_same_bits(logprobs, plain_logprobs)
        return
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | FILTERS[filters]
    for row, limit in zip(host, limits, strict=True):
        kept = kept_ref(row.astype(np.float64), *(options[name] for name in ("temperature", "top_k", "top_p", "min_p")))
        # A sum may reach top_p a token earlier or later.
        assert np.sum(kept != (row >= limit)) <= 1
    scored, lse = xp.empty(rows, np.float32), xp.empty(rows, np.float32)
    logp_of_logits(device.asarray(host), token_ids, options["temperature"], scored, lse, thresholds=thresholds)
    assert_same_bits(scored[1:], logprobs[1:])
    assert_close(scored, plain_logprobs, "float32", terms=columns, scale=20.0)


@pytest.mark.parametrize("filters", FILTERS)
def test_replayed(rng, filters):
    replayed(rng, *((3, 700) if device.name() == "sim" else (40, 3000)), filters)


@pytest.mark.parametrize("filters", ["top_p", "all"])
@pytest.mark.sim
def test_replayed_in_kernels(rng, filters):
    replayed(rng, 3, 700, filters)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", FILTERS)
def test_gpu_replayed(rng, filters):
    replayed(rng, 64, QWEN_VOCABULARY, filters)


def penalise(logits, penalty, history):
    on_device = device.asarray(logits.copy())
    apply_repetition_penalty(on_device, device.asarray(penalty), device.asarray(history))
    return device.to_host(on_device)


@pytest.mark.sim
def test_repetition_penalty_kernel(rng):
    logits = rng.standard_normal((3, 70)).astype(np.float32)
    history = rng.integers(-1, 70, (3, 150)).astype(np.int32)
    penalty = np.array([1.3, 1.0, 0.7], np.float32)
    assert_same_bits(penalise(logits, penalty, history), apply_repetition_penalty_ref(logits, penalty, history))


@pytest.mark.gpu
def test_gpu_repetition_penalty(rng):
    logits = rng.standard_normal((64, QWEN_VOCABULARY)).astype(np.float32)
    history = rng.integers(-1, QWEN_VOCABULARY, (64, 4097)).astype(np.int32)
    history[:, ::2] = history[:, :1]
    penalty = rng.uniform(0.8, 1.5, 64).astype(np.float32)
    assert_same_bits(penalise(logits, penalty, history), apply_repetition_penalty_ref(logits, penalty, history))


def test_repetition_penalty_of_transformers():
    """Positive logits are divided, negative ones multiplied, a repeated token once, padding left alone."""
    logits = np.array([[2.0, -2.0, 3.0, 0.0]], np.float32)
    out = penalise(logits, np.array([2.0], np.float32), np.array([[0, 1, 0, 3, -1, -1]], np.int32))
    assert out.tolist() == [[1.0, -4.0, 3.0, 0.0]]
    assert np.array_equal(penalise(logits, np.ones(1, np.float32), np.zeros((1, 0), np.int32)), logits)


def test_wrong_arguments_are_named(rng):
    arguments = make(rng, 2, 9)
    with pytest.raises(ValueError, match=r"sample: top_k must be \(2\) int32, got \(2,\) int64"):
        draw({**arguments, "top_k": np.zeros(2, np.int64)})
    with pytest.raises(ValueError, match=r"sample: keys must be \(2, 2\) uint32, got \(2, 3\) uint32"):
        draw({**arguments, "keys": np.zeros((2, 3), np.uint32)})
    with pytest.raises(ValueError, match=r"sample: logits must have 1 to 16777215 columns, got 0"):
        draw({**arguments, "logits": np.zeros((2, 0), np.float32)})
    with pytest.raises(ValueError, match=r"apply_repetition_penalty: history must be \(2, any\) int32"):
        penalise(arguments["logits"], arguments["top_p"], np.zeros((3, 1), np.int32))
