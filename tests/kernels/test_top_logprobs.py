import numpy as np
import pytest

from rlnumba.kernels.logprob.chunked import logp_of_logits
from rlnumba.kernels.sampling.ops import sample
from rlnumba.kernels.sampling.top_logprobs import top_logprobs, top_logprobs_kernel, top_logprobs_ref
from rlnumba.runtime import device
from tests.close import assert_close, assert_same_bits
from tests.kernels.test_sampling import in_tuples, make


def case(rng, rows, columns):
    """(logits with ties and -inf, token ids, temperatures, thresholds)."""
    logits = (3 * rng.standard_normal((rows, columns))).astype(np.float32)
    logits[:, ::5] = np.round(logits[:, ::5])
    logits[:, 3] = -np.inf
    temperature = np.resize(np.float32([0, 1, 0.7]), rows)
    thresholds = np.where(np.arange(rows) % 2, np.sort(logits)[:, -(columns // 3)], -np.inf).astype(np.float32)
    token_ids = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    # A token that the filters did not keep, and one of the last columns.
    token_ids[0], token_ids[-1] = np.argmin(np.where(np.isinf(logits[0]), 0, logits[0])), columns - 1
    return logits, token_ids, temperature, thresholds


def listed(logits, token_ids, counts, width, first_row=0, slots=1, step=None, **options):
    """out of top_logprobs, on the host: (slots, first_row + B + 1, 2 + 2 width), -7 where nothing is written."""
    out = device.xp().full((slots, first_row + len(logits) + 1, 2 + 2 * width), -7, np.int32)
    options = {name: device.asarray(array) for name, array in options.items()}
    if step is not None:
        options["num_steps"] = device.asarray(np.int32([step]))
    arguments = (device.asarray(array) for array in (logits, token_ids, counts))
    top_logprobs(*arguments, out, first_row, **options)
    return device.to_host(out)


def check_against_reference(rng, rows, columns, count):
    logits, token_ids, temperature, thresholds = case(rng, rows, columns)
    for options in ({}, {"temperature": temperature}, {"temperature": temperature, "thresholds": thresholds}):
        found = listed(logits, token_ids, np.full(rows, count, np.int32), count, **options)[0, :rows]
        ranks, logprobs, ids, of_ids = top_logprobs_ref(logits, token_ids, count, **options)
        assert np.array_equal(found[:, 0], ranks) and np.array_equal(found[:, 2 : 2 + count], ids)
        values = np.ascontiguousarray(found).view(np.float32)
        for got, wanted in ((values[:, 1], logprobs), (values[:, 2 + count :], of_ids)):
            assert np.array_equal(np.isinf(got), np.isinf(wanted))
            finite = np.isfinite(wanted)
            assert_close(got[finite], wanted[finite], "float32", terms=columns, scale=20.0)


@pytest.mark.sim
def test_against_the_reference(rng):
    check_against_reference(rng, 4, 700, 5)


def test_more_rows_and_the_whole_vocabulary(rng):
    check_against_reference(rng, 9, 2_000, 20)
    check_against_reference(rng, 3, 97, 97)


@pytest.mark.sim
def test_rows_that_want_less(rng):
    """-1 nothing, 0 rank and log-prob alone, 9 no more than there is room for; in a slot, from a row on."""
    logits, token_ids, *_ = case(rng, 4, 40)
    counts = np.int32([2, -1, 0, 9])
    found = listed(logits, token_ids, counts, 3, first_row=2, slots=3, step=5)
    everything = listed(logits, token_ids, np.full(4, 3, np.int32), 3)[0]
    wanted = np.full_like(found, -7)
    for row, count in enumerate((2, None, 0, 3)):
        if count is not None:
            columns = [0, 1, *range(2, 2 + count), *range(5, 5 + count)]
            wanted[2, 2 + row, columns] = everything[row, columns]
    assert np.array_equal(found, wanted)


@pytest.mark.sim
def test_logprobs_have_the_bits_of_draw_and_of_training(rng):
    """The token's without filters is the one that it was drawn with, and the one that is trained with."""
    arguments = make(rng, 2, 600, temperature=0.8)
    token_ids, logprobs = device.xp().empty(2, np.int32), device.xp().empty(2, np.float32)
    sample(*in_tuples(arguments), token_ids, logprobs)
    ids = device.to_host(token_ids)
    counts = np.zeros(2, np.int32)
    found = listed(arguments["logits"], ids, counts, 1, temperature=arguments["temperature"])[0, :2, 1]
    assert_same_bits(np.ascontiguousarray(found).view(np.float32), device.to_host(logprobs))
    trained = [device.xp().empty(2, np.float32) for _ in range(3)] + [device.xp().empty(2, np.int32)]
    logp_of_logits(device.asarray(arguments["logits"]), token_ids, 1.0, *trained)
    untempered = listed(arguments["logits"], ids, counts, 1)[0, :2, 1]
    assert_same_bits(np.ascontiguousarray(untempered).view(np.float32), device.to_host(trained[0]))


@pytest.mark.gpu
def test_gpu(rng):
    check_against_reference(rng, 64, 151_936, 20)
    check_against_reference(rng, 2, 32_000, 1_000)
    test_logprobs_have_the_bits_of_draw_and_of_training(rng)


def test_machine_code(compile_offline):
    matrix, floats, ints = "float32[:,::1]", "float32[::1]", "int32[::1]"
    types = (matrix, floats, floats, ints, ints, "int32", ints, "int32[:,:,::1]")
    assert not compile_offline(top_logprobs_kernel, types, (9, 0))


def test_wrong_arguments_are_named():
    logits, ids = np.zeros((2, 5), np.float32), np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="top_logprobs: out must be for 2 rows of 2 \\+ 2 K, got 1 of 4"):
        top_logprobs(*map(device.asarray, (logits, ids, ids, np.zeros((1, 1, 4), np.int32))))
    with pytest.raises(ValueError, match=r"top_logprobs: counts must be \(2\) int32"):
        top_logprobs(*map(device.asarray, (logits, ids, logits, np.zeros((1, 2, 4), np.int32))))
