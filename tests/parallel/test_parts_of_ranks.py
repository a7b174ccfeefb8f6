"""What each rank has, without ranks: elements of a fold, of stored values, columns, and shares of prompts."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError
from rlnumba.model.shard import Columns
from rlnumba.parallel import layer_shards
from rlnumba.parallel.communicator import (
    CommunicationError,
    Communicator,
    Fault,
    FoldRange,
    Operation,
    SingleRank,
    add_in_order,
    check_equal,
    check_ranges,
    check_same,
)
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.parallel.placement import check_groups
from rlnumba.parallel.zero import Part, ShardedOptimizer
from rlnumba.sampling.offline import GenerationJob, Groups, Shards, _merged, place_of
from tests.parallel import in_threads


@pytest.mark.parametrize(
    "start, size, found",
    [
        (0, 10, (slice(0, 0), 0)),
        (0, 11, (slice(0, 1), 10)),
        (8, 20, (slice(0, 10), 2)),
        (10, 10, (slice(0, 10), 0)),
        (12, 3, (slice(2, 5), 0)),
        (19, 5, (slice(9, 10), 0)),
        (20, 5, (slice(0, 0), 0)),
    ],
)
def test_the_elements_of_a_gradient_that_a_rank_folds(start, size, found):
    """Of elements 10 to 19: where they are in its own sum, and in the gradient of start, start + 1, ..."""
    calls, flat = [], np.arange(10, dtype=np.float32)

    class Ranks:
        def begin_fold(self, gradient, accumulated, first, count, is_first):
            calls.append((gradient.size, accumulated.tolist(), first, count, is_first))
            return "the second half"

    optimizer = SimpleNamespace(part=slice(10, 20), grads=SimpleNamespace(flat=flat), communicator=Ranks())
    gradient = np.zeros(size, np.float32)
    assert ShardedOptimizer.begin_fold_part(optimizer, start, gradient, 3, True) == "the second half"
    own, first = found
    ((length, accumulated, begin, count, is_first),) = calls
    assert (length, accumulated, count, is_first) == (size, flat[own].tolist(), 3, True)
    assert begin == first or not accumulated


def test_values_are_stored_where_a_rank_has_them():
    spans = [(10, np.zeros(4)), (20, np.zeros(3))]
    LayerShards._copy(None, 12, np.arange(12, 22), spans)
    assert [array.tolist() for _, array in spans] == [[0, 0, 12, 13], [20, 21, 0]]
    LayerShards._copy(None, 0, np.arange(1, 12), spans)
    assert [array.tolist() for _, array in spans] == [[11, 0, 12, 13], [20, 21, 0]]
    LayerShards._copy(None, 14, np.full(6, 99), spans)
    LayerShards._copy(None, 23, np.full(6, 99), spans)
    assert [array.tolist() for _, array in spans] == [[11, 0, 12, 13], [20, 21, 0]]


@pytest.mark.parametrize("first, count", [(0, 40), (3, 30), (17, 5), (30, 10)])
def test_parts_come_to_the_first_rank_in_pieces(monkeypatch, first, count):
    monkeypatch.setattr(layer_shards, "PIECE", 4)
    values, parts = np.arange(40, dtype=np.float32), [Part(0, 16), Part(16, 32), Part(32, 40)]

    def part_of(communicator, parts=parts):
        own = parts[communicator.rank]
        shards = SimpleNamespace(communicator=communicator, dtype=values.dtype, parts_of_ranks=parts)
        shards.flat, shards.first = values[own.start : own.stop].copy(), own.start
        return LayerShards.host_part(shards, first, count)

    assert part_of(SingleRank(), [Part(0, 40)]).tolist() == values[first : first + count].tolist()
    whole, *others = in_threads.run(part_of, 3)
    assert whole.tolist() == values[first : first + count].tolist() and others == [None, None]


def test_arrays_of_other_shapes_are_named():
    rank, columns = SingleRank(), Columns(3, 0, 0, 3)
    array, other = np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32)
    own = r"Columns\(width=3, longer=0, extra=0, total=3\) of 2 rows, float32"
    wrong = (other, array, r"\(2, 4\) and \(2, 3\) float32"), (array, other, r"\(2, 3\) and \(2, 4\) float32")
    wrong += ((array, array.astype(np.float16), r"\(2, 3\) and \(2, 3\) float16"),)
    for values, out, got in wrong:
        with pytest.raises(ValueError, match=f"^gather: {own}, got {got}$"):
            rank.gather_columns(values, out, columns)
    # At most 1 row of each rank, of which this one has the first.
    for values, out, got in ((other, array[:1], r"\(2, 4\) and \(1, 3\)"), (array, array, r"\(2, 3\) and \(2, 3\)")):
        with pytest.raises(ValueError, match=rf"^gather: {own}, for \(1, 3\), got {got} float32$"):
            rank.exchange_rows(values, out, columns, 1)
    out = np.zeros((1, 3), np.float32)
    array[:] = np.arange(6).reshape(2, 3)
    rank.exchange_rows(array, out, columns, 1)
    assert out.tolist() == [[0, 1, 2]]
    for number in (-1, 2, 3):
        with pytest.raises(ValueError, match=rf"^communicator: rank must be in \[0, 2\), got {number}$"):
            Communicator(number, 2)


def test_ranges_of_a_fold():
    """A part may end at the gradient's last element, and be empty at either end."""
    fold = Operation("fold", 3, "4 elements")
    check_ranges(fold, [FoldRange(0, 0, None), FoldRange(0, 5, 5), FoldRange(5, 0, 5)])
    with pytest.raises(CommunicationError, match=r"^fold 3 of 4 elements: the part of rank 0 .*: \[5, 6\) of 5 e"):
        check_ranges(fold, [FoldRange(5, 1, 5)])
    with pytest.raises(CommunicationError, match=r"the part of rank 1 .*: \[-1, 1\) of 5 elements$"):
        check_ranges(fold, [FoldRange(0, 1, 5), FoldRange(-1, 2, None)])
    with pytest.raises(CommunicationError, match=r"differ in length: 5 on rank 0, 6 on rank 2$"):
        check_ranges(fold, [FoldRange(0, 1, 5), FoldRange(0, 1, None), FoldRange(0, 1, 6)])


def test_operations_of_others():
    put, get = Operation("put", 2, "x"), Operation("get", 2, "x")
    check_same(put, 1, {0: get})
    check_same(get, 0, {1: put})
    with pytest.raises(CommunicationError, match="^rank 0 is in put 2 of x; rank 3 is in put 2 of x$"):
        check_same(put, 3, {0: put})
    with pytest.raises(CommunicationError, match="^rank 1 is in fold 1; rank 2 is in fold 2$"):
        check_same(Operation("fold", 1, ""), 1, {0: Operation("fold", 1, ""), 2: Operation("fold", 2, "")})


def test_facts_that_differ_are_named():
    def ranks(*facts):
        return SimpleNamespace(objects=lambda own: list(facts))

    check_equal(ranks({"a": 1}, {"a": 1}), None)
    with pytest.raises(ConfigError, match=r"^rank 2 has b 'y' and rank 0 'x': all ranks of a run must have the same$"):
        check_equal(ranks({"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": "y"}), None)
    with pytest.raises(ConfigError, match="^rank 1 has b None and rank 0 3"):
        check_equal(ranks({"a": 1, "b": 3}, {"a": 1}), None)
    with pytest.raises(ConfigError, match="^rank 1 has b 3 and rank 0 None"):
        check_equal(ranks({"a": 1}, {"a": 1, "b": 3}), None)


def test_gradients_are_added_one_after_the_other():
    """2^24 + 1 is rounded to 2^24, 2^24 + 7 to 2^24 + 8; the first of a round is copied over what was there."""
    parts = [np.full(1, value, np.float32) for value in (1, 2**24, 1)]
    for is_first, expected in ((True, 2**24), (False, 2**24 + 8)):
        total = np.full(1, 5, np.float32)
        add_in_order(total, parts, is_first)
        assert total[0] == expected
    total = np.full(1, 5, np.float32)
    add_in_order(total, parts[:1], True)
    assert total[0] == 1
    add_in_order(total, [], True)
    assert total[0] == 1


def test_faults(monkeypatch):
    monkeypatch.setenv("RLNUMBA_FAULT", "gather:1:corrupt")
    assert Fault.from_environment(4) == ("gather", 1, "corrupt", 3)
    rank = SingleRank()
    array, found = np.zeros(3, np.int32), []
    for _ in range(3):
        out = np.zeros((1, 3), np.int32)
        rank.gather(array, out)
        found.append(out[0].tolist())
    # A bit of the first byte, of the second call alone, in a copy.
    assert found == [[0, 0, 0], [1, 0, 0], [0, 0, 0]] and not array.any()
    for text in ("gather:1:corrupt:0:", "gather:x:kill", "gather:1:kill:x", "gather:1:burn", "barrier:1:corrupt", "a"):
        monkeypatch.setenv("RLNUMBA_FAULT", text)
        with pytest.raises(ConfigError, match=f"^RLNUMBA_FAULT must be OPERATION:N:KIND.*, got '{text}'$"):
            Fault.from_environment(4)
    monkeypatch.setenv("RLNUMBA_FAULT", "barrier:0:stall:0")
    assert Fault.from_environment(4) == ("barrier", 0, "stall", 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shares_of_prompts_and_their_results(count):
    each = [SamplingParams(max_tokens=n) for n in range(1, 6)]
    job = GenerationJob("engine", [[n] for n in range(5)], each, list("abcde"))
    parts = [job.part(k, count) for k in range(count)]
    assert [part.names for part in parts] == [list("abcde"[k::count]) for k in range(count)]
    assert all([p.max_tokens - 1 for p in part.params] == [n for (n,) in part.prompts] for part in parts)
    assert all(part.engine == "engine" for part in parts)
    assert _merged([part.prompts for part in parts]) == job.prompts
    assert job._replace(params=each[0]).part(0, count).params is each[0]


def test_places():
    assert place_of(2, 1) == place_of(2, 2) == Shards(2) and place_of(2, 6) == Groups(2, 3)
    assert [Groups(2, 3)._count(work) for work in ([], "a", "ab", "abc", "abcd")] == [1, 1, 2, 3, 3]
    for size, count in ((2, 3), (4, 2), (4, 6)):
        with pytest.raises(ConfigError, match=rf"^--num-gpus \({count}\) must be a multiple of --tp \({size}\)$"):
            check_groups(size, count)
    check_groups(4, 1)
    check_groups(4, 8)


@pytest.mark.parametrize("are_scored", [False, True])
def test_what_groups_do(monkeypatch, are_scored):
    """A group gets every third sequence, the first one alone shows progress, and results are in the prompts' order."""
    calls = []

    def on_groups(function, size, load, shares, key):
        calls.extend(shares)
        assert (size, load, key) == (2, "load", "--num-gpus")
        rows = [share[0] if are_scored else share[1].prompts for share in shares]
        return [[SimpleNamespace(row=row, request_id=None) for row in each] for each in rows]

    monkeypatch.setattr("rlnumba.sampling.offline.on_groups", on_groups)
    checkpoint, progress = SimpleNamespace(load="load"), SimpleNamespace(generated="generated")
    sequences = [[n] for n in range(4)]
    if are_scored:
        found = Groups(2, 3).score(checkpoint, SimpleNamespace(sequences=sequences, temperature=0.5), progress)
        assert [call[1:] for call in calls] == [(0.5, progress), (0.5, None), (0.5, None)]
    else:
        job = GenerationJob("engine", sequences, SamplingParams(), list("abcd"))
        found = Groups(2, 3).generate(checkpoint, job, progress, None)
        assert [call[2] for call in calls] == ["generated", None, None] and calls[1][1].names == ["b"]
        assert [output.request_id for output in found] == ["0", "1", "2", "3"]
    assert [output.row for output in found] == sequences
