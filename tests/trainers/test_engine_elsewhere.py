"""Groups that inference processes draw for an evaluation: by name, given out again, and forgotten."""

import dataclasses

import pytest

from rlnumba.config import AsyncConfig, EngineConfig
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.sampling.inference import InferenceError
from rlnumba.trainers.engine_elsewhere import EngineElsewhere, GroupsApart
from tests.engine.test_core import TINY
from tests.engine.test_llm import make_model

PROMPTS = [[5], [6, 7], [8, 9, 10]]


class Engines:
    """In place of RemoteEngines: keeps what is given out."""

    def __init__(self):
        self.requests = []

    def submit(self, request):
        self.requests.append(request)


def completed(request):
    """A GroupRequest whose completions have its prompt and their index as tokens."""
    done = {i: Completion([*request.prompt_token_ids, i], [], "length", "", [3, 3]) for i in range(request.params.n)}
    return dataclasses.replace(request, done=done)


class Ahead:
    """In place of asynchronous.Ahead, on one rank; groups are completed in the opposite order."""

    def __init__(self, options):
        self.engines, self.groups = Engines(), GroupsApart(options)
        self.forget_apart = self.groups.forget

    def submit_apart(self, name, prompt, params):
        self.groups.submit(self.engines, name, prompt, params, 3)

    def take_apart(self):
        self.groups.finished(completed(self.engines.requests.pop()))
        return self.groups.take(0.01)


def test_an_evaluation_has_its_completions_in_order():
    model = make_model(**TINY)
    engine = EngineElsewhere(model.config, EngineConfig())
    engine.ahead = Ahead(AsyncConfig())
    llm = LLM(model, None, engine.config, engine=engine)
    assert llm.max_model_len == model.config.max_position_embeddings
    # What is left of a call that was interrupted is not that of the next one.
    engine.add_request(0, [1, 2])
    engine.reset()
    left = engine.ahead.engines.requests.copy()
    seen = []
    outputs = llm.generate(
        PROMPTS, SamplingParams(n=2, max_tokens=4), finished=lambda index, output: seen.append(index)
    )
    assert [[each.token_ids for each in output.completions] for output in outputs] == [
        [[*prompt, index] for index in range(2)] for prompt in PROMPTS
    ]
    assert seen == [2, 1, 0] and engine.ahead.engines.requests == left and not engine.has_unfinished
    assert engine.ahead.take_apart() == []


@pytest.mark.parametrize("partial", [True, False])
def test_a_group_that_takes_too_long_is_given_out_again(partial):
    engines, groups = Engines(), GroupsApart(AsyncConfig(max_attempts=2, partial_rollouts=partial))
    groups.submit(engines, "a", [1, 2], SamplingParams(n=2), 3)
    (request,) = engines.requests
    assert groups.has(request) and request.version == 3
    given_back = dataclasses.replace(request, done={1: completed(request).done[1]})
    groups.expired(engines, given_back)
    assert engines.requests[1].done == (given_back.done if partial else {})
    with pytest.raises(InferenceError, match=r"longer than async.rollout_timeout_s \(600 s\), 2 times"):
        groups.expired(engines, given_back)
    groups.forget()
    groups.expired(engines, given_back)
    assert len(engines.requests) == 2
