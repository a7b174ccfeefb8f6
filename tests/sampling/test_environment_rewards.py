"""Rewards in the process of the environments, and what ranks and a pipeline count, without engines."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from rlnumba.sampling import environment_rewards
from rlnumba.sampling.environment_rewards import EnvironmentRewards
from rlnumba.sampling.pipeline import Pipeline


class Rewards:
    def answers(self, pending):
        ((completions, columns, state, where),) = pending
        assert columns == {"a": [1] * len(completions)} and (state, where) == ("state", "line 3")
        if completions == ["fails"]:
            raise KeyError("fails")
        return [[SimpleNamespace(extra={"seen": np.float32(0.5), "object": completions}), SimpleNamespace(extra={})]]


def request_of(*completions):
    row = SimpleNamespace(inputs=SimpleNamespace(columns={"a": 1}, trainer_state="state"), where="line 3")
    return SimpleNamespace(completions=list(completions), episode=SimpleNamespace(row=row))


def taken(rewards, count):
    """What `take` returns until so many requests have come."""
    found, end = [], time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        found += rewards.take()
    return found


def test_groups_are_answered_one_after_the_other(monkeypatch):
    released, transcripts = [], {}

    def transcript_of(completion):
        return transcripts.setdefault(completion, SimpleNamespace(completion=completion, answers=None))

    monkeypatch.setattr(environment_rewards, "transcript_of", transcript_of)
    monkeypatch.setattr(environment_rewards, "submit_episodes", lambda rewards, *arguments: arguments)
    setup = SimpleNamespace(places=[2, 5], rewards=Rewards)
    rewards = EnvironmentRewards(setup, SimpleNamespace(release=lambda each: released.append(each)))
    assert rewards.take() == [] and rewards.num_begun == 0
    requests = [request_of("one", "two"), request_of("three")]
    for request in requests:
        rewards.begin(request)
    assert rewards.num_begun == 2
    assert taken(rewards, 2) == requests and rewards.num_begun == 0
    # The answers are with the first completion, by the functions' places, and environments of all are given back.
    first = transcripts["one"].answers
    assert sorted(first) == [2, 5] and first[2].extra == {"seen": 0.5, "object": ["one", "two"]}
    assert type(first[2].extra["seen"]) is float and transcripts["two"].answers is None
    assert released == [[transcripts["one"], transcripts["two"]], [transcripts["three"]]]
    rewards.begin(request_of("fails"))
    with pytest.raises(KeyError, match="fails"):
        taken(rewards, 1)
    assert rewards.num_begun == 0 and len(released) == 2
    rewards.close()
    with pytest.raises(RuntimeError):
        rewards.begin(requests[0])


def pipeline_of(*differ, supply=(), is_ahead=False, num_prompts=2, most_prompts=3):
    groups = [(SimpleNamespace(content=SimpleNamespace(differs=each)), True) for each in differ]
    plan = SimpleNamespace(num_prompts=num_prompts, dynamic=SimpleNamespace(most_prompts=most_prompts))
    found = SimpleNamespace(buffer=SimpleNamespace(snapshot=lambda: groups), plan=plan, supply=supply)
    found.is_ahead, found.prompt_ids = is_ahead, {(4, 1): [7, 8]}
    found._num_differing = lambda: Pipeline._num_differing(found)
    return found


def test_groups_that_are_known_to_differ_are_counted():
    assert [Pipeline._num_differing(pipeline_of(*each)) for each in ([], [True, None, False, True], [False] * 3)] == [
        *(0, 2, 0)
    ]


def test_further_prompts():
    """Ahead of training each place has its own; else as many as there are, until as many differ as are wanted."""
    drawn = SimpleNamespace(step=4, index=1)
    assert Pipeline._may_draw(pipeline_of(True, False, supply=[1]), drawn) is True
    assert Pipeline._may_draw(pipeline_of(True, False), drawn) is False
    assert Pipeline._may_draw(pipeline_of(True, True, supply=[1]), drawn) is False
    assert Pipeline._may_draw(pipeline_of(is_ahead=True), drawn) is True
    assert Pipeline._may_draw(pipeline_of(is_ahead=True, most_prompts=2, supply=[1]), drawn) is False


def test_prompts_that_a_generation_needs():
    """Those up to the last of the groups that differ and are wanted, all while fewer are known to."""
    draws = [SimpleNamespace(differs=each) for each in (True, False, None, True, True)]
    assert Pipeline._needed(pipeline_of(), draws) == draws[:4]
    assert Pipeline._needed(pipeline_of(num_prompts=3), draws) == draws
    assert Pipeline._needed(pipeline_of(num_prompts=4), draws) == draws
    assert Pipeline._needed(pipeline_of(num_prompts=1), draws) == draws[:1]
