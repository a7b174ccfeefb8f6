"""Groups on an engine: interrupted after any token they go on elsewhere with the same text; weights change between."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlnumba
from rlnumba.engine import PromptError, SamplingParams
from rlnumba.engine.episodes import Episodes, GroupRequest, TurnId
from tests.engine.test_core import TINY, check_idle, make_engine, result
from tests.engine.test_llm import make_model

PROMPT = list(range(5, 25))
PARAMS = SamplingParams(n=4, max_tokens=12, seed=3, stop_token_ids=(1, 2, 3, 4))


@pytest.fixture(scope="module")
def model():
    return make_model(**TINY)


def request_of(number=0, version=0, params=PARAMS):
    return GroupRequest(number, PROMPT, params, version)


def run(groups):
    """{number: results} of all groups of a Episodes."""
    found = {}
    while not groups.is_idle:
        found |= {request.number: [result(each) for each in request.completions] for request in groups.step()}
    return found


@pytest.fixture(scope="module")
def expected(model):
    groups = Episodes(make_engine(model))
    groups.submit(request_of())
    return run(groups)[0]


def test_a_request_is_the_senders(model, expected):
    """It is given out again where an engine is lost, without what that one has drawn."""
    groups, request = Episodes(make_engine(model)), request_of()
    groups.submit(request)
    assert run(groups) == {0: expected} and not request.done


@pytest.mark.parametrize("steps", range(14))
def test_an_interrupted_group_has_the_same_text_elsewhere(model, expected, steps):
    lengths = [len(token_ids) for token_ids, _, _ in expected]
    assert len({*lengths}) > 1, "completions of different lengths are what this is about"
    first, second = Episodes(make_engine(model)), Episodes(make_engine(model))
    first.submit(request_of())
    first.submit(request_of(1))
    first.update_weights(1, keep_cache=True)
    done = []
    for _ in range(steps):
        done += first.step()
    if steps > max(lengths):
        assert {request.number for request in done} == {0, 1} and first.interrupt(0) is None
        return
    request = first.interrupt(0)
    if request is None:
        request = next(each for each in done if each.number == 0)
    begun = {sequence.index: len(sequence.policy_versions) for sequence in request.begun}
    assert {*request.done} | {*begun} == {0, 1, 2, 3} and not {*request.done} & {*begun}
    # What was computed is not computed again.
    for index, count in begun.items():
        assert count >= min(steps - 3, len(expected[index][0]) - 1)
    # A group may be interrupted more than once.
    second.update_weights(1)
    if not request.is_complete:
        second.submit(request)
        request = next(iter(second.step()), None) or second.interrupt(0)
    if not request.is_complete:
        second.submit(request)
        assert run(second) == {0: expected}
    else:
        assert [result(each) for each in request.completions] == expected
    assert first.interrupt(7) is None
    done = {each.number: [result(c) for c in each.completions] for each in done if each.number} | run(first)
    assert done == {1: expected}
    check_idle(first.engine)
    check_idle(second.engine)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("steps", range(1, 11))
def test_an_interrupted_group_that_is_drawn_again_here_has_nothing_of_before(expected, steps, keeps):
    """Also of completions that were computed ahead and not yet returned; keeps: it goes on from what it has."""
    model = make_model(**TINY)
    groups = Episodes(make_engine(model))
    groups.submit(request_of())
    complete = [request for _ in range(steps) for request in groups.step()]
    request = groups.interrupt(0)
    if complete:
        assert request is None
        return
    sampled = sum(len(each.policy_versions) for each in (*request.begun, *request.done.values()))
    assert groups.num_tokens == sampled and groups.is_idle
    if keeps and request.is_complete:
        assert [result(each) for each in request.completions] == expected
    elif keeps:
        groups.submit(request)
        assert run(groups)[0] == expected
    else:
        model.weights.flat *= np.float32(0.7)
        groups.update_weights(1)
        groups.submit(replace(request, done={}, begun=[], version=1))
        fresh = Episodes(make_engine(model))
        fresh.update_weights(1)
        fresh.submit(request_of())
        assert run(groups) == run(fresh)
    check_idle(groups.engine)


def test_a_group_that_waits_for_its_turn_has_not_begun(model):
    groups = Episodes(make_engine(model, max_num_seqs=4))
    for number, version in enumerate((0, 0, 1)):
        groups.submit(request_of(number, version, SamplingParams(n=4, max_tokens=6, ignore_eos=True)))
    assert groups.take_begun() == []
    events = []
    while not groups.is_idle:
        complete = [request.number for request in groups.step()]
        events += [("begun", number) for number in groups.take_begun()] + [("complete", each) for each in complete]
    assert events == [("begun", 0), ("complete", 0), ("begun", 1), ("complete", 1)]
    groups.update_weights(1)
    groups.interrupt(2)
    assert groups.take_begun() == []


def test_a_group_that_comes_back_is_the_last_to_wait(model):
    """What was taken back has left the queue, so that it does not begin before those that came meanwhile."""
    groups = Episodes(make_engine(model, max_num_seqs=4))
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    for number in (0, 1, 2):
        groups.submit(request_of(number, 0, replace(params, n=4 if number == 0 else 2)))
    groups.step()
    assert groups.take_begun() == [0]
    request = groups.interrupt(1)
    assert [len(sequence.token_ids) for sequence in request.begun] == [len(PROMPT)] * 2
    groups.submit(request)
    begun = []
    while not groups.is_idle:
        groups.step()
        begun.append(groups.take_begun())
    assert [each for each in begun if each] == [[2, 1]]


def test_groups_wait_for_the_weights_that_they_ask_for(model):
    groups = Episodes(make_engine(model))
    for number, version in enumerate((0, 2, 1)):
        groups.submit(request_of(number, version))
    assert not groups.may_change_weights and run(groups).keys() == {0} and groups.may_change_weights
    groups.update_weights(1)
    assert groups.is_idle, "the second group is the next one"
    assert groups.interrupt(2).version == 1
    groups.update_weights(2)
    assert run(groups).keys() == {1}


@pytest.mark.parametrize("keep_cache", [True, False])
def test_weights_that_change_while_a_group_runs(keep_cache):
    """Tokens carry their versions; with keys and values of the old weights the rest is another text."""
    params = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    found = {}
    for changes in (False, True):
        model = make_model(**TINY)
        groups = Episodes(make_engine(model))
        groups.submit(request_of(params=params))
        for _ in range(4):
            groups.step()
        groups.engine.synchronize()
        sequences, table = groups.engine.requests[0].values(), groups.engine.scheduler.table
        lengths = [int(table.length[each.row]) - len(PROMPT) for each in sequences]
        if changes:
            model.weights.flat *= np.float32(0.7)
        groups.update_weights(1, keep_cache)
        while not groups.is_idle:
            for request in groups.step():
                found[changes] = request.completions
        for length, completion in zip(lengths, found[changes], strict=True):
            assert length > 0 and completion.policy_versions == [0] * length + [1] * (12 - length)
        check_idle(groups.engine)
    for before, after, length in zip(found[False], found[True], lengths, strict=True):
        assert before.token_ids[:length] == after.token_ids[:length]
        assert before.logprobs[:length] == after.logprobs[:length]
        assert before.logprobs[length:] != after.logprobs[length:]
    # Prompts that come later are computed with the new weights alone.
    groups.submit(request_of(1))
    fresh = Episodes(make_engine(model))
    fresh.submit(request_of(1))
    assert run(groups) == run(fresh)


def test_a_group_that_is_dropped_leaves_the_others_as_they_are(model, expected):
    """One that runs, one that waits for weights, and one that has finished, which is no error."""
    groups = Episodes(make_engine(model))
    for number, version in enumerate((0, 0, 1)):
        groups.submit(request_of(number, version))
    groups.step()
    for number in (0, 2):
        groups.abort(number)
    assert run(groups) == {1: expected} and not groups.waiting
    groups.abort(1)
    groups.submit(request_of())
    groups.reset()
    assert groups.is_idle and groups.take_begun() == []
    check_idle(groups.engine)


def test_one_driver_advances_the_engine():
    """The package calls Engine.step in one module; others submit episodes to it."""
    package = Path(rlnumba.__file__).parent
    callers = [path for path in package.rglob("*.py") if re.search(r"(engine|llm)\.step\(\)", path.read_text())]
    found = {str(path.relative_to(package)) for path in callers}
    assert found == {"engine/core.py", "engine/episodes.py"}, "core.py has it in its docstring"


@pytest.mark.parametrize(
    "call",
    [Episodes.step, Episodes.synchronize, lambda e: e.update_weights(1), lambda e: e.interrupt(0)],
    ids=["step", "synchronize", "update_weights", "interrupt"],
)
def test_an_error_of_what_is_in_flight_names_group_and_line(model, monkeypatch, call):
    """Whatever waits for it, and also where the engine's request is a turn of an episode."""
    episodes = Episodes(make_engine(model))
    episodes.submit(request_of())
    episodes.submit(replace(request_of(3), where="a.jsonl:7"))
    for _ in range(2):
        episodes.step()

    def record(*_):
        raise PromptError(TurnId(3, 0), "damaged")

    monkeypatch.setattr(episodes.engine, "_record", record)
    with pytest.raises(PromptError, match="^a.jsonl:7: damaged$") as raised:
        call(episodes)
    assert raised.value.request_ids == (3,)
