"""An evaluation that inference processes draw: in order, given out again, and forgotten."""

import dataclasses
from types import SimpleNamespace

import pytest

from rlnumba.config import AsyncConfig, DeployConfig, EngineConfig
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.sampling import processes
from rlnumba.sampling.inference import InferenceError
from rlnumba.sampling.processes import LLMOnProcesses
from rlnumba.sampling.sampler import Sampler
from tests.engine.test_core import TINY
from tests.engine.test_llm import make_model

PROMPTS = [[5], [6, 7], [8, 9, 10]]


def completed(request):
    """A GroupRequest whose completions have its prompt and their index as tokens."""
    done = {i: Completion([*request.prompt_token_ids, i], [], "length", "", [3, 3]) for i in range(request.params.n)}
    return dataclasses.replace(request, done=done)


class Engines(Sampler):
    """In place of inference processes: keeps what is given out, and completes the last of it at each look."""

    wait_s, version = 0.01, 3

    def __init__(self):
        self.requests, self.completes = [], True

    def submit(self, request, owner):
        assert request.number < 0 and request.version == 3
        self.requests.append((request, owner))

    def check(self):
        if self.completes:
            request, owner = self.requests.pop()
            owner.finished(completed(request))


def llm_on_engines(**options):
    llm = LLMOnProcesses(make_model(**TINY), None, EngineConfig(), AsyncConfig(**options))
    llm.sampler = Engines()
    return llm


def test_an_evaluation_has_its_completions_in_order():
    llm, seen, counts = llm_on_engines(), [], []
    assert llm.max_model_len == llm.model.config.max_position_embeddings
    # What is left of a call that was interrupted is not that of the next one.
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(n=1), finished=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    left = llm.sampler.requests.copy()
    assert len(left) == 2
    outputs = llm.generate(
        PROMPTS,
        [SamplingParams(n=2, max_tokens=4)] * 3,
        lambda *count: counts.append(count),
        lambda index, output: seen.append(index),
    )
    assert [[each.token_ids for each in output.completions] for output in outputs] == [
        [[*prompt, index] for index in range(2)] for prompt in PROMPTS
    ]
    assert seen == [2, 1, 0] and llm.sampler.requests == left and counts == [(2, 6, 8), (4, 6, 14), (6, 6, 18)]
    for request, owner in left:
        owner.finished(completed(request))
    assert llm._taken() == []


@pytest.mark.parametrize("partial", [True, False])
def test_a_group_that_takes_too_long_is_given_out_again(partial):
    llm, given_back = llm_on_engines(max_attempts=2, partial_rollouts=partial), []

    def give_back():
        """At the first look; at the second one it is given back once more."""
        request, owner = llm.sampler.requests[-1]
        given_back.append(dataclasses.replace(request, done={1: completed(request).done[1]}))
        owner.expired(given_back[-1])

    llm.sampler.check = give_back
    with pytest.raises(InferenceError, match=r"longer than async.rollout_timeout_s \(600 s\), 2 times"):
        llm.generate([[1, 2]], SamplingParams(n=2))
    (first, owner), (second, _) = llm.sampler.requests
    assert second.number == first.number and second.done == (given_back[0].done if partial else {})
    owner.expired(dataclasses.replace(first, number=first.number - 1))
    assert len(llm.sampler.requests) == 2, "a request of before is not given out again"


@pytest.mark.parametrize("size", [1, 2])
def test_engines_are_on_the_gpus_behind_those_that_train(monkeypatch, size):
    """Every `size` neighbouring ones are one engine's; with them, how many ranks share the GPU."""
    policy, pusher = SimpleNamespace(model=make_model(**TINY)), SimpleNamespace(needs_offers=True, bucket_bytes=1)
    monkeypatch.setattr(processes.device, "name", lambda: "cuda")
    monkeypatch.setattr(processes, "gpus_of_ranks", lambda count, what: [3, 4, 5, 6, 5, 7][:count])
    monkeypatch.setattr(processes.ahead_of_time, "finish", lambda: None)
    monkeypatch.setattr(processes.HeldModel, "of", lambda *arguments: None)
    monkeypatch.setattr(processes, "Engines", lambda setup_of, *others: setup_of)
    deploy = DeployConfig(num_train_gpus=2, num_infer_gpus=4, tensor_parallel_size=size)
    run = SimpleNamespace(
        asynchronous=AsyncConfig(), deploy=deploy, model="", quantization=None, seed=0, gemm="", has_episodes=False,
        engine=EngineConfig(), rewards=SimpleNamespace(timeout=1.0),
    )  # fmt: skip
    waiting = SimpleNamespace(start=None)
    setup_of = processes.process_sampler(run, policy, None, None, pusher, (waiting, None))
    found = [[(each.gpu, each.num_sharing), *each.followers] for each in map(setup_of, range(4 // size))]
    behind = [(5, 2), (6, 1), (5, 2), (7, 1)]
    assert found == [behind[i : i + size] for i in range(0, 4, size)]
