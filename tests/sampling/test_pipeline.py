"""The pipeline of groups, with engines that complete what they are asked to: admission, staleness, time limits."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.config import AsyncConfig, DeployConfig, GRPOConfig, load_run, to_toml
from rlnumba.data.prompts import Prompt, PromptData
from rlnumba.engine import LLM
from rlnumba.engine.sequence import Completion, SamplingParams
from rlnumba.errors import ConfigError, UserError
from rlnumba.rewards import TrainingProgress
from rlnumba.rewards.calling import Scores
from rlnumba.runs.prompt_order import PromptOrder
from rlnumba.runs.prompt_schedule import MicroBatchSchedule, generations_from
from rlnumba.sampling import own
from rlnumba.sampling.own import OwnSampler
from rlnumba.sampling.pipeline import Course, Pipeline, PromptSource
from rlnumba.sampling.pipeline_state import decoded_completions, encoded, encoded_completions, restore, state_of
from rlnumba.sampling.sampler import Alive, Sampler
from tests.close import assert_same_bits
from tests.engine.test_llm import make_model
from tests.trainers.runs import grpo_run, ppo_run

NUM_PROMPTS = 12
# Two groups of two completions are a generation, and an optimizer step.
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 2, "max_steps": 20}


class FakeEngines(Sampler):
    """Completes groups when the test says so; their tokens have the version of that moment, and the one before."""

    stats = Alive(0, 0.0, 0.0)

    def __init__(self):
        self.requests, self.version, self.advance = {}, 0, None

    def submit(self, request, owner):
        assert request.number not in self.requests
        self.requests[request.number] = request

    def poll(self):
        self.advance()
        return True

    def update_weights(self, version):
        self.version = version

    def complete(self, number):
        """The complete GroupRequest of a group; the version of its first token is that with which it may begin."""
        request = self.requests.pop(number)
        versions = [request.version, self.version]
        done = {
            i: Completion([number, i], [-1.0, -2.0], "stop", f"{number} {i}", list(versions))
            for i in range(request.params.n)
        }
        return dataclasses.replace(request, done=done)


class FakeRewards:
    """Of a group its number."""

    def submit(self, prompts, texts, completion_ids, columns, trainer_state, where):
        assert set(columns) == {"answer"} and len(columns["answer"]) == len(texts)
        return texts, trainer_state

    def collect(self, pending):
        return Scores(np.array([[float(text.split()[0])] for texts, _ in pending for text in texts]))


class DifferingRewards(FakeRewards):
    """Equal within the group of a prompt whose number is odd, and 0 and 1 within others; known at the second look."""

    weights = np.ones(1)

    def __init__(self):
        self.seen = []

    def submit(self, prompts, texts, completion_ids, columns, trainer_state, where):
        return texts, columns["answer"][0]

    def ready(self, pending):
        known = [any(each is other for other in self.seen) for each in pending]
        self.seen += pending
        return known

    def collect(self, pending):
        values = [i if answer % 2 == 0 else 0.5 for texts, answer in pending for i in range(len(texts))]
        return Scores(np.array(values, np.float64)[:, None])


def pipeline_of(folder, version=0, groups=(), prompt_order=None, rewards=None, train=None, **options):
    run = grpo_run(folder / "run", **SIZES | (train or {}))
    run = dataclasses.replace(run, asynchronous=AsyncConfig(**options))
    schedule = MicroBatchSchedule(run.train, "rows", NUM_PROMPTS)
    prompts = PromptData([Prompt(f"prompt {i}", [i + 1], {"answer": i}, f"row {i}") for i in range(NUM_PROMPTS)])
    prompt_order = prompt_order or PromptOrder(NUM_PROMPTS, True, 0)
    course = Course(
        generations_from(schedule, version, True),
        lambda step: TrainingProgress(step, 20, 0.0),
        lambda step, index: SamplingParams(n=2, seed=100 * step + index),
    )
    found = Pipeline(run, course, PromptSource(prompts, prompt_order, rewards or FakeRewards()), version)
    restore(found, list(groups))
    engines = FakeEngines()
    engines.version = version
    found.start(engines)
    return found, engines


def take(pipeline, step):
    """The next generation: (list of Drawn, values); completes what is in flight as long as it waits."""
    engines = pipeline.sampler

    def advance():
        number = min(engines.requests)
        pipeline.finished(engines.complete(number))

    engines.advance = advance
    drawn, _ = pipeline.take(step, lambda text: None)
    return drawn, pipeline.rewards.collect([each.pending for each in drawn]).values[:, 0].tolist()


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_groups_are_given_out_only_so_far_ahead(tmp_path, max_staleness):
    pipeline, engines = pipeline_of(tmp_path, max_staleness=max_staleness)
    order = PromptOrder(NUM_PROMPTS, True, 0)
    for step in range(20):
        given_out = min(step + max_staleness + 1, 20)
        assert pipeline.next_number == 2 * given_out
        assert all(request.version <= step for request in engines.requests.values())
        drawn, values = take(pipeline, step)
        # In the order of the prompts, with the noise of the synchronous run.
        assert [each.prompt for each in drawn] == order.take(2)
        assert [each.params.seed for each in drawn] == [101 * step - step // 6 * 6] * 2
        assert values == [2 * step, 2 * step, 2 * step + 1, 2 * step + 1]
        metrics, age = pipeline.metrics, min(step, max_staleness)
        assert metrics["off_policy/max"] == metrics["off_policy/mean"] == age <= max_staleness
        assert metrics["token_staleness/mean"] == age / 2
        assert metrics["cross_version_response_fraction"] == float(age > 0)
        assert metrics["weight_pause_time_s"] == 0.0
        assert metrics["off_policy/in_flight"] == 2 * (given_out - step - 1) and metrics["off_policy/in_queue"] == 0
        pipeline.update_weights(step + 1)
    assert not len(pipeline.buffer) and not engines.requests


def test_without_a_cap_the_queue_is_the_bound(tmp_path):
    pipeline, engines = pipeline_of(tmp_path, staleness=["is"], queue_maxsize=13)
    assert pipeline.buffer.capacity == 6 and len(engines.requests) == 6
    for step in range(3):
        take(pipeline, step)
        pipeline.update_weights(step + 1)
        assert len(pipeline.buffer) == 6


def test_groups_that_are_too_old_are_drawn_again_and_then_replaced(tmp_path):
    """By completion, so that a late group is left behind; after the second time another prompt takes its place."""
    options = {"max_staleness": 1, "staleness": ["cap", "reject"], "order": "completion", "max_attempts": 2}
    pipeline, engines = pipeline_of(tmp_path, **options)
    late, group = engines.requests[0], pipeline.buffer.snapshot()[0][0]
    prompt = group.content.prompt

    def finish(number, version):
        request = engines.complete(number)
        for completion in request.completions:
            completion.policy_versions = [version] * 2
        pipeline.finished(request)

    finish(1, 0)
    finish(2, 0)
    assert take(pipeline, 0)[1] == [1, 1, 2, 2]
    for attempt in range(2):
        pipeline.update_weights(2 * attempt + 3)
        finish(0, 2 * attempt + 2)
        finish(3, 2 * attempt + 2)
        # One step older is not too old.
        assert pipeline.buffer.next(2) is not None and pipeline._next(2) is not None
        pipeline.update_weights(2 * attempt + 4)
        assert pipeline._next(2) is None and pipeline.num_rejected == 2 * attempt + 2
        assert (group.content.attempts, group.state) == (2, "in_flight" if attempt == 0 else "dropped")
        if attempt == 0:
            assert engines.requests[0].params.seed == late.params.seed and engines.requests[0].version == 4
    pipeline._next(2)
    replaced = engines.requests[0]
    assert replaced.params.seed != late.params.seed and replaced.version == 6 and pipeline.num_dropped == 2
    assert (group.content.attempts, group.content.replaced) == (1, 1) and group.content.prompt != prompt
    finish(0, 6)
    finish(3, 6)
    assert take(pipeline, 6)[1] == [0, 0, 3, 3]


@pytest.mark.parametrize("partial_rollouts", [True, False])
def test_a_group_that_takes_too_long_is_given_out_again_and_then_replaced(tmp_path, partial_rollouts):
    pipeline, engines = pipeline_of(tmp_path, max_staleness=0, max_attempts=3, partial_rollouts=partial_rollouts)
    before = pipeline.buffer.snapshot()[1][0].content.prompt
    for _ in range(3):
        request = engines.requests.pop(1)
        pipeline.expired(dataclasses.replace(request, begun=["a sequence"]))
        assert 1 not in engines.requests or bool(engines.requests[1].begun) == partial_rollouts
    assert 1 not in engines.requests
    drawn, _ = take(pipeline, 0)
    assert pipeline.num_dropped == pipeline.metrics["off_policy/dropped"] == 1
    assert drawn[1].prompt != before and drawn[1].params.seed != drawn[0].params.seed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.sampled_from(["start", "completion"]), st.booleans(), st.integers(0, 2**32))
def test_any_order_of_completion(tmp_path_factory, max_staleness, order, rejects, seed):
    """With groups that come late, twice, or never: every step has its groups, and no prompt is lost."""
    staleness = ["cap", "reject"] if rejects else ["cap"]
    options = {"max_staleness": max_staleness, "staleness": staleness, "order": order, "max_attempts": 2}
    pipeline, engines = pipeline_of(tmp_path_factory.mktemp("runs"), **options)
    trained, budget, rng = [], itertools.count(), np.random.default_rng(seed)

    def advance():
        assert next(budget) < 10**4, "no progress"
        number = int(rng.choice(sorted(engines.requests)))
        if rng.random() < 0.1:
            pipeline.expired(engines.requests.pop(number))
        else:
            pipeline.finished(engines.complete(number))

    engines.advance = advance
    for step in range(8):
        drawn, _ = pipeline.take(step, lambda text: None)
        assert len(drawn) == 2 and all(len(each.completions) == 2 and each.pending for each in drawn)
        if order == "start" or rejects:
            assert pipeline.metrics["off_policy/max"] <= max_staleness
        trained += [each.prompt for each in drawn]
        pipeline.update_weights(step + 1)
    left = [group.content.prompt for group, _ in pipeline.buffer.snapshot()]
    replaced = sum(group.content.replaced for group, _ in pipeline.buffer.snapshot())
    if not pipeline.num_dropped:
        counts = np.bincount(trained + left, minlength=NUM_PROMPTS)
        assert counts.max() - counts.min() <= 1 and not replaced


def test_a_checkpoint_restores_what_is_complete_and_draws_the_rest_again(tmp_path):
    pipeline, engines = pipeline_of(tmp_path, max_staleness=2)
    take(pipeline, 0)
    pipeline.update_weights(1)
    for number in (3, 4):
        pipeline.finished(engines.complete(number))
    state = encoded(state_of(pipeline))
    assert [(group["number"], group["completions"] is not None) for group in state] == [
        (number, number in (3, 4)) for number in range(2, 8)
    ]
    wanted = {number: dataclasses.replace(request, version=1) for number, request in engines.requests.items()}
    order = PromptOrder(NUM_PROMPTS, True, 0, pipeline.order.epoch, pipeline.order.position)
    again, engines_again = pipeline_of(tmp_path, 1, state, order, max_staleness=2)
    assert engines_again.requests == wanted
    for step in range(1, 6):
        found, expected = take(again, step), take(pipeline, step)
        assert [each.prompt for each in found[0]] == [each.prompt for each in expected[0]]
        assert found[1] == expected[1]
        if step <= 2:
            texts = [[c.text for each in drawn for c in each.completions] for drawn, _ in (found, expected)]
            assert texts[0] == texts[1]
        for each in (again, pipeline):
            each.update_weights(step + 1)
    with pytest.raises(UserError, match="has 5 groups .* which the 2 of a generation do not divide"):
        pipeline_of(tmp_path, 1, state[:5], max_staleness=2)


@pytest.mark.parametrize("logit_thresholds", [False, True])
def test_a_checkpoint_keeps_what_training_reads_of_completions(logit_thresholds):
    """With train.sampling_mask_replay, the smallest logits that the filters kept."""
    params = SamplingParams(max_tokens=9, n=3, top_p=0.7, logit_thresholds=logit_thresholds)
    completions = [c for output in LLM(make_model()).generate([[5, 6], [7]], params) for c in output.completions]
    restored = decoded_completions(encoded_completions(completions))
    for found, expected in zip(restored, completions, strict=True):
        for name in ("token_ids", "logprobs", "policy_versions"):
            assert_same_bits(found.array(name), expected.array(name))
        assert (found.finish_reason, found.text) == (expected.finish_reason, expected.text)
        assert (found.thresholds is None) == (expected.thresholds is None) != logit_thresholds
        if logit_thresholds:
            assert_same_bits(found.thresholds, expected.thresholds)


def test_a_checkpoint_keeps_how_often_a_group_was_begun_and_replaced(tmp_path):
    pipeline, engines = pipeline_of(tmp_path, max_staleness=0, max_attempts=3)
    for _ in range(4):
        pipeline.expired(engines.requests.pop(1))
        for group in pipeline.buffer.dropped():
            pipeline._replace(group)
    state = encoded(state_of(pipeline))
    again, _ = pipeline_of(tmp_path, 0, state, max_staleness=0, max_attempts=3)
    for found in (pipeline, again):
        places = [group.content for group, _ in found.buffer.snapshot()]
        assert [(each.attempts, each.replaced) for each in places] == [(1, 0), (2, 1)]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_groups_of_equal_rewards_give_their_places_to_further_prompts(tmp_path, max_staleness):
    options = {"rewards": DifferingRewards(), "train": {"dynamic_sampling": True}, "max_staleness": max_staleness}
    pipeline, engines = pipeline_of(tmp_path, **options)
    upcoming = PromptOrder(NUM_PROMPTS, True, 0).upcoming(2, 200)
    seen, checkpoints = [], {}
    for step in range(20):
        drawn, _ = take(pipeline, step)
        kept = [each for each in drawn if each.differs]
        assert len(kept) == 2 and all(each.prompt % 2 == 0 for each in kept)
        assert [each.draw for each in drawn] == sorted(each.draw for each in drawn)
        assert all(each.prompt == upcoming[each.draw] and each.params.seed // 100 == step for each in drawn)
        if max_staleness == 0:
            # Those of the synchronous run: the next prompts, as far as the second that differs.
            assert [each.draw for each in drawn] == list(range(len(seen), len(seen) + len(drawn)))
            assert drawn[-1].differs
        assert pipeline.metrics["off_policy/max"] <= max_staleness
        seen += [each.draw for each in drawn]
        pipeline.update_weights(step + 1)
        assert not any(request.version > step + 1 for request in engines.requests.values())
        checkpoints[step + 1] = encoded(state_of(pipeline))
    assert sorted(seen) == list(range(len(seen))) and len(seen) > 60
    # What the checkpoint's groups have drawn is known again: the same prompt twice has other noise the second time.
    order = PromptOrder(NUM_PROMPTS, True, 0)
    again, _ = pipeline_of(tmp_path, 4, checkpoints[4], order, **options | {"rewards": DifferingRewards()})
    draws = [number for group in checkpoints[4] for number in (group["draw"], *(n for _, n in group["unused"]))]
    assert again.num_drawn >= max(draws, default=-1) + 1
    assert len(sum(again.prompt_ids.values(), [])) >= len(draws)


def test_a_generation_draws_a_bounded_number_of_prompts(tmp_path):
    train, rewards = {"dynamic_sampling": True, "max_gen_batches": 3}, DifferingRewards()
    rewards.collect = lambda pending: Scores(np.ones((2 * len(pending), 1)))
    pipeline, _ = pipeline_of(tmp_path, rewards=rewards, train=train, max_staleness=0)
    for step in range(3):
        drawn, _ = take(pipeline, step)
        assert [each.draw for each in drawn] == list(range(6 * step, 6 * step + 6))
        assert not any(each.differs for each in drawn)
        pipeline.update_weights(step + 1)


REFUSED = [
    (
        {"dynamic_sampling": True, "over_sampling_batch_size": 9},
        {},
        {},
        r"train.dynamic_sampling with \[async\] does not go with train.over_sampling_batch_size",
    ),
    (
        {"dynamic_sampling": True, "difficulty_weights": [1.0, 1.0, 0.0]},
        {},
        {},
        r"train.dynamic_sampling with \[async\] does not go with train.difficulty_weights",
    ),
    ({"sampling_mask_replay": True, "top_k": 4}, {}, {}, "async.max_staleness must be 0, got 4"),
    ({"loss_type": "dppo"}, {}, {}, "async.staleness `is`: train.loss_type dppo has no such weights"),
    ({}, {"queue_maxsize": 8}, {}, r"async.queue_maxsize \(8\) must be at least .*generation \(16\)"),
    ({}, {"max_staleness": 0, "staleness": ["is"]}, {}, "async.max_staleness 0 needs `cap` in async.staleness"),
    (
        {},
        {"in_flight_weight_updates": False},
        {"num_infer_gpus": 1, "update_weights_transport": "peer"},
        "update_weights_transport `peer` keeps no older weights, which async.in_flight_weight_updates = false needs",
    ),
]


@pytest.mark.parametrize("train, options, deploy, message", REFUSED)
def test_what_is_refused(tmp_path, train, options, deploy, message):
    run = grpo_run(tmp_path / "run", **train)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run, asynchronous=AsyncConfig(**options), deploy=DeployConfig(**deploy))


def test_what_is_refused_of_ppo(tmp_path):
    run = ppo_run(tmp_path / "run")
    message = r"async.queue_maxsize \(8\) .*, train.per_device_train_batch_size x gradient_accumulation_steps \(16\)$"
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run, asynchronous=AsyncConfig(queue_maxsize=8))


def test_the_section_in_a_file(tmp_path):
    run = dataclasses.replace(grpo_run(tmp_path / "run"), asynchronous=AsyncConfig(max_staleness=2, staleness=["cap"]))
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert load_run("grpo", tmp_path / "run.toml") == run
    again = load_run("grpo", tmp_path / "run.toml", [("--async.max_staleness", "3"), ("--deploy.num_infer_gpus", "2")])
    assert (again.asynchronous.max_staleness, again.deploy.num_infer_gpus) == (3, 2)
    options = [("model", "m"), ("output_dir", "o"), ("data.train", "d"), ("deploy.num_infer_gpus", "1")]
    with pytest.raises(ConfigError, match="deploy.num_infer_gpus is a key of grpo, rloo, ppo and distill, not of sft"):
        load_run("sft", [], options)
    with pytest.raises(ConfigError, match=r"num_infer_gpus \(1\) are for asynchronous training: .* section \[async\]"):
        load_run("grpo", [], [*options, ("rewards.funcs", "f")])


def test_the_way_of_new_weights(tmp_path):
    """Between GPUs, unless they take more than a quarter of one, or older ones may be needed."""
    run = dataclasses.replace(grpo_run(tmp_path / "run"), asynchronous=AsyncConfig())
    assert run.weights_transport(10, 0) == run.weights_transport(11, 43) == "shm"
    assert run.weights_transport(10, 40) == "peer"
    kept = dataclasses.replace(run, asynchronous=AsyncConfig(in_flight_weight_updates=False))
    assert kept.weights_transport(10, 40) == "shm"
    unkept = dataclasses.replace(run, asynchronous=AsyncConfig(in_flight_weight_updates=False, max_staleness=0))
    assert unkept.weights_transport(10, 40) == "peer"
    for chosen in ("peer", "shm"):
        run = dataclasses.replace(run, deploy=DeployConfig(update_weights_transport=chosen))
        assert run.weights_transport(10, 40) == run.weights_transport(11, 0) == chosen


def test_importance_weights_follow_from_the_section(tmp_path):
    run = dataclasses.replace(grpo_run(tmp_path / "run"), asynchronous=AsyncConfig(importance_sampling_cap=3.5))
    train = run.resolved().train
    assert train.importance_sampling_correction == "token_truncate"
    assert train.importance_sampling_bounds == (None, 3.5)
    for other in ({"max_staleness": 0}, {"staleness": ["cap"]}):
        same = dataclasses.replace(run, asynchronous=AsyncConfig(**other))
        assert same.resolved() == same
    own = dataclasses.replace(run, train=GRPOConfig(**vars(run.train) | {"rollout_is": "sequence"}))
    assert own.resolved() == own


def test_waiting_for_futures_is_no_work(monkeypatch):
    """Seconds in which all episodes waited for their tools do not count as busy."""

    class Waiting:
        is_idle, num_tokens, waited_s = False, 0, 1.0

        def step(self, wait_s):
            self.waited_s += 5.0
            return []

    sampler = OwnSampler(None, AsyncConfig())
    sampler.episodes = Waiting()
    monkeypatch.setattr(own, "time", SimpleNamespace(perf_counter=iter([3.0, 10.0]).__next__))
    assert not sampler.poll() and sampler.stats.busy_s == 2.0


def test_nothing_is_decoded_from_the_change_of_weights_until_they_have_a_version():
    sampler, polls = OwnSampler(None, AsyncConfig(decode_steps_per_micro_batch=2)), []
    sampler.poll = lambda wait_s: polls.append(wait_s)
    nothing = dict.fromkeys(("synchronize", "update_weights"), lambda *_: None)
    sampler.episodes = SimpleNamespace(**nothing, is_idle=True)
    counts = []
    for change in (lambda: None, sampler.before_update, lambda: sampler.update_weights(1)):
        change()
        sampler.before_micro_batch()
        counts.append(len(polls))
    assert counts == [2, 2, 4]


def test_each_prompt_that_takes_the_place_of_another_has_a_seed_of_its_own(tmp_path):
    pipeline, engines = pipeline_of(tmp_path, max_staleness=0, max_attempts=1)
    seeds = [engines.requests[1].params.seed]
    for _ in range(2):
        pipeline.expired(engines.requests.pop(1))
        pipeline._next(2)
        seeds.append(engines.requests[1].params.seed)
    assert len({*seeds}) == 3


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_cache_is_kept_over_new_weights_unless_it_is_recomputed(recomputes):
    calls = []
    sampler = OwnSampler(None, AsyncConfig(recompute_kv_cache_after_weight_updates=recomputes))
    sampler.episodes = SimpleNamespace(update_weights=lambda version, keeps: calls.append((version, keeps)))
    sampler.update_weights(3)
    assert calls == [(3, not recomputes)]
