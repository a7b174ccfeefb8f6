import pickle

import numpy as np
import pytest

from rlnumba.engine.requests.token_rules import TokenRules
from rlnumba.engine.sequence import Completion, SamplingParams, Sequence, SequenceTable
from rlnumba.errors import ConfigError


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -1.0),
        ("temperature", 1e-30),
        ("temperature", float("nan")),
        ("temperature", 1e300),
        ("repetition_penalty", 1e-300),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("ignore_eos", 1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("n", 0),
        ("logprobs", -5),
    ],
)
def test_a_bad_parameter_is_named_with_its_value(name, value):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value) and repr(value) in str(error.value)
    assert error.value.exit_code == 2


def test_integers_that_no_float_holds_are_one_line():
    for value in (10**400, 10**5000):
        for name in ("temperature", "presence_penalty", "top_k"):
            with pytest.raises(ConfigError, match=f"sampling: {name} must be .*, got .{{,70}}$"):
                SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name, value, expectation",
    [
        ("temperature", 9e-6, "0, or a number >= 1e-05"),
        ("temperature", True, "0, or a number >= 1e-05"),
        ("temperature", np.float32("nan"), "0, or a number >= 1e-05"),
        ("top_p", -0.5, "in (0, 1]"),
        ("top_p", float("nan"), "in (0, 1]"),
        ("top_k", 2**31, "an integer >= -1 (0 and -1: off)"),
        ("top_k", True, "an integer >= -1 (0 and -1: off)"),
        ("min_p", "x", "in [0, 1]"),
        ("repetition_penalty", float("inf"), "a number > 0"),
        ("repetition_penalty", -1, "a number > 0"),
        ("max_tokens", 1.0, "an integer >= 1"),
        ("stop", ("a", 3), "non-empty strings"),
        ("stop_token_ids", (3, 2**31), "token ids"),
        ("stop_token_ids", (3, "a"), "token ids"),
        ("ignore_eos", None, "true or false"),
        ("seed", False, "an integer in [0, 2^64)"),
        ("n", -1, "an integer >= 1"),
        ("logprobs", "x", "true, false, null, or an integer >= -1"),
    ],
)
def test_what_a_parameter_must_be_is_said_in_full(name, value, expectation):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{name: value})
    assert str(error.value) == f"sampling: {name} must be {expectation}, got {value!r}"


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1e-9, "seed": 0, "max_tokens": 1},
        {"temperature": 1e-5, "top_p": 1e-9, "top_k": 2**31 - 1, "min_p": 1, "seed": 2**64 - 1, "n": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": ((3, -100), (4, 100)), "first_index": 2**31 - 2},
        {"stop_token_ids": (0, 2**31 - 1), "max_tokens": np.int64(3), "top_p": np.float64(0.5), "top_k": np.int32(7)},
        {"temperature": np.float32(0.7), "min_p": np.float16(0.5), "presence_penalty": np.float32(-2)},
    ],
)
def test_the_smallest_and_the_largest_values_are_taken(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_defaults_are_vllms():
    assert SamplingParams() == SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=16, stop=(),
        stop_token_ids=(), ignore_eos=False, seed=0, n=1, logprobs=True,
    )  # fmt: skip
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_spellings_of_off_and_of_lists():
    params = SamplingParams(top_k=-1, min_p=None, stop="x", stop_token_ids=[3, 4])
    assert (params.top_k, params.min_p, params.stop, params.stop_token_ids) == (0, 0.0, ("x",), (3, 4))
    assert SamplingParams(temperature=0, seed=2**64 - 1, n=4).temperature == 0


def test_shapes_of_a_table():
    """As many blocks as the longest sequence has, the last begun, not a block more."""
    for max_length, blocks in ((1, 1), (16, 1), (17, 2), (40, 3)):
        table = SequenceTable(num_rows=2, max_length=max_length, block_size=16)
        assert table.token_ids.shape == table.logprobs.shape == (2, max_length)
        assert table.block_tables.shape == (2, blocks)
        assert table.stop_ids.shape == (2, 0) and table.philox_key.shape == (2, 2)
        assert table.sequences.tolist() == [None, None]
    kinds = {"token_ids": np.int32, "block_tables": np.int32, "stop_ids": np.int32, "top_k": np.int32}
    kinds |= {"sample_index": np.int32, "last_hash": np.uint64, "philox_key": np.uint32, "logprobs": np.float32}
    kinds |= dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), np.float32)
    assert {name: getattr(table, name).dtype for name in kinds} == kinds


def test_table_gives_back_what_was_put():
    table = SequenceTable(num_rows=2, block_size=16)
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.5, stop="a")
    sequence = Sequence(0, 3, np.arange(5, dtype=np.int32), params, (1, 2), 40, (9,))
    table.put(1, sequence)
    assert table.stop_ids.tolist() == [[-1], [9]] and table.sample_index[1] == 3 and table.has_stop_strings[1]
    assert table.philox_key[1].tolist() == [1, 2] and table.length_limit[1] == 40
    table.token_ids[1, 5], table.logprobs[1, 5], table.length[1] = 8, -0.25, 6
    assert table.take(1, policy_version=7) is sequence and sequence.row is None
    assert sequence.policy_versions == [7]
    assert sequence.completion_ids.tolist() == [8] and sequence.completion_logprobs.tolist() == [-0.25]
    table.put(0, sequence)
    assert table.length[0] == 6 and table.prompt_length[0] == 5 and table.logprobs[0, 5] == np.float32(-0.25)
    assert table.num_computed[0] == 0 and table.sequences.tolist() == [sequence, None] and sequence.row == 0


def test_table_grows_with_what_is_put_into_it():
    table = SequenceTable(num_rows=2, block_size=16)
    short = Sequence(0, 0, np.arange(5, dtype=np.int32), SamplingParams(), (1, 2), 20, (9,))
    long = Sequence(1, 0, np.arange(100, dtype=np.int32), SamplingParams(), (1, 2), 130, (3, 4, 5))
    table.put(1, short)
    table.block_tables[1], table.last_hash[1] = [6, 7], 70
    assert table.max_length == 20
    table.put(0, long)
    assert table.max_length == 130 and table.block_tables.shape == (2, 9)
    assert table.block_tables[1].tolist() == [6, 7, *[0] * 7] and table.last_hash[1] == 70
    assert table.stop_ids.tolist() == [[3, 4, 5], [9, -1, -1]]
    assert table.take(1, 0).token_ids.tolist() == [0, 1, 2, 3, 4] and table.take(0, 0).token_ids[99] == 99


def test_a_completion_has_lists_and_arrays_of_its_tokens():
    lists = Completion([3, 5], [-0.5, -0.25], "stop", "ab", [7, 8])
    arrays = Completion(np.array([3, 5], np.int32), np.float32([-0.5, -0.25]), "stop", "ab", np.array([7, 8]))
    assert arrays == lists and arrays.token_ids == [3, 5]
    assert (arrays.num_tokens, lists.num_tokens, Completion([], [], "stop").num_tokens) == (2, 2, 0)
    for completion in (lists, arrays, pickle.loads(pickle.dumps(lists)), pickle.loads(pickle.dumps(arrays))):
        found = [completion.array(name) for name in ("token_ids", "logprobs", "policy_versions")]
        assert [each.dtype for each in found] == [np.int32, np.float32, np.int32]
        assert [each.tolist() for each in found] == [[3, 5], [-0.5, -0.25], [7, 8]] and completion == lists
    # What a reward function does to its list changes nothing that is trained on.
    arrays.token_ids.append(9)
    assert arrays.array("token_ids").tolist() == [3, 5]
    lists.policy_versions = [1, 1]
    assert lists.array("policy_versions").tolist() == [1, 1]
    assert Completion([3], [-0.5], "stop").policy_versions == []


def test_a_completion_without_log_probs_is_sent_as_one():
    sent = pickle.loads(pickle.dumps(Completion([3, 5], None, "stop", "ab", [7, 8])))
    assert sent.logprobs is None and sent.cumulative_logprob is None and sent.token_ids == [3, 5]


def test_the_last_completion_alone_is_greedy():
    params = SamplingParams(temperature=0.5, n=3, greedy_last=True)
    assert [params.of_completion(index).temperature for index in range(3)] == [0.5, 0.5, 0.0]


def test_bad_words_end_in_the_last_column_whichever_request_has_the_longest():
    table = SequenceTable(num_rows=3, block_size=16)
    none = np.zeros(0, np.int32)
    for row, words in enumerate(([[7, 8]], [[1, 2, 3], [-1, 4, 5]], [[9]])):
        sequence = Sequence(row, 0, np.arange(2, dtype=np.int32), SamplingParams(), (1, 2), 20)
        sequence.rules = TokenRules(none, np.zeros(0, np.float32), none, np.array(words, np.int32))
        table.put(row, sequence)
    expected = [[[-1, 7, 8], [-1, -1, -1]], [[1, 2, 3], [-1, 4, 5]], [[-1, -1, 9], [-1, -1, -1]]]
    assert table.bad_words.tolist() == expected
