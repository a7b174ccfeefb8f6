"""Ranks that draw while they train, each with the engine of its GPU: the files of one rank."""

import dataclasses

import pytest

from rlnumba import checkpoint
from rlnumba.config import AsyncConfig, DeployConfig, EngineConfig
from rlnumba.engine.episodes import GroupRequest
from rlnumba.engine.llm import LLM
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import ConfigError, SharedError, UserError
from rlnumba.model.transformer import load_model
from rlnumba.runs.prompt_loop import rewards_of
from rlnumba.sampling import own as own_module
from rlnumba.sampling.own import RankedSampler
from rlnumba.sampling.ranks import led
from tests.parallel import in_threads
from tests.parallel.test_faults import fault_of
from tests.parallel.test_trainers import NF4, run_of, train_all
from tests.trainers.runs import MODEL, grpo_run, metrics_of

# Long enough that weights change in the middle of completions.
LONG = {"max_completion_length": 20, "generation_kwargs": {"min_tokens": 6}, "max_steps": 5, "learning_rate": 3e-3}
CASES = {
    # Not all that the staleness allows has room, so that a generation is given out when one is taken.
    "stale": ("grpo", LONG, {"max_staleness": 2, "decode_steps_per_micro_batch": 3, "queue_maxsize": 32}),
    "by completion": (
        "rloo",
        LONG | {"eval_steps": 2},
        {
            "max_staleness": 2,
            "decode_steps_per_micro_batch": 3,
            "order": "completion",
            "recompute_kv_cache_after_weight_updates": True,
        },
    ),
    "drained": ("grpo", {"max_steps": 4}, {"max_staleness": 1, "in_flight_weight_updates": False}),
    "ppo": ("ppo", {"max_steps": 3}, {"max_staleness": 1, "decode_steps_per_micro_batch": 1}),
    # Ranks have the weights in parts, and their engines all of them; evaluated in the middle of a generation, too.
    "parts": (
        "grpo",
        LONG | {"zero_stage": 3, "beta": 0.1, "num_iterations": 2, "eval_steps": 3, "eval_on_start": True},
        {"max_staleness": 1, "decode_steps_per_micro_batch": 3, "recompute_kv_cache_after_weight_updates": True},
    ),
    "parts of a base": (
        "grpo",
        LONG | {"zero_stage": 3, **NF4, "learning_rate": 1e-2, "eval_steps": 2},
        {"max_staleness": 1, "decode_steps_per_micro_batch": 3},
    ),
}


def asynchronous_run(kind, folder, num_ranks, train=None, engine=None, **options):
    """A run_of with [async] if there are options. engine: keys of [engine]."""
    train = {"save_steps": 2} | (train or {})
    if "eval_steps" in train:
        train["data"] = {"eval": str(folder.parent / "prompts.jsonl")}
    run = run_of(kind, folder, num_ranks, **train)
    engine = EngineConfig(**engine or {})
    return dataclasses.replace(run, engine=engine, asynchronous=AsyncConfig(**options) if options else None)


def runs_of(folder, num_ranks):
    """(kind, Run) of each of the CASES, whose engines launch no step before it is asked for."""
    engine = {"async_scheduling": False}
    return [
        (kind, asynchronous_run(kind, folder / name / str(num_ranks), num_ranks, train, engine, **options))
        for name, (kind, train, options) in CASES.items()
    ]


@pytest.mark.usefixtures("quick_starts")
def test_ranks_that_draw_have_the_files_of_one(tmp_path):
    """Three of them, for four groups and four micro-batches; whatever weights a token is of. If engines launch steps
    ahead, the files are those of another run of as many ranks."""
    one, three = (runs_of(tmp_path, num_ranks) for num_ranks in (1, 3))
    kind, train, options = CASES["stale"]
    twice = [(kind, asynchronous_run(kind, tmp_path / "twice" / str(k), 3, train, **options)) for k in range(2)]
    expected, (*found, first, second) = train_all(one, 1), train_all(three + twice, 3)
    assert first[0] == second[0] and first[2] == second[2]
    for name, (files, _, lines), (own_files, _, own_lines) in zip(CASES, expected, found, strict=True):
        assert own_lines == lines, name
        final = f"final/{'adapter_' if 'base' in name else ''}model.safetensors"
        assert own_files[final] == files[final], name
    names = "off_policy/mean", "token_staleness/mean", "cross_version_response_fraction", "eval_reward"
    crossing = []
    for (_, run), (_, own) in zip(one, three, strict=True):
        rows, own_rows = ([[row.get(name) for name in names] for row in metrics_of(each)] for each in (run, own))
        assert own_rows == rows
        crossing.append(max(row[2] or 0 for row in rows))
    # Some completions are of several weights, but where all are completed before the update.
    assert [name for name, share in zip(CASES, crossing, strict=True) if not share] == ["drained"]
    # The checkpoint has what any rank has completed.
    whole = []
    for num_ranks in (1, 3):
        _, state = checkpoint.load(tmp_path / "stale" / str(num_ranks) / "checkpoints" / "step-2")
        whole.append([group["completions"] is not None for group in state["data"]["groups"]])
    assert whole[0] == whole[1] and any(whole[0]) and not all(whole[0])
    parts = list(CASES).index("parts")
    for which in (slice(1), slice(parts, parts + 1)):
        resumed = [train_all(runs[which], ranks, resume=2)[0] for runs, ranks in ((one, 1), (three, 2))]
        assert resumed[0][0] == resumed[1][0] and resumed[0][2] == resumed[1][2]


@pytest.mark.usefixtures("quick_starts")
def test_a_killed_run_without_staleness_ends_in_the_weights_of_the_synchronous_one(tmp_path):
    train = {"max_steps": 4, "save_steps": 1, "dynamic_sampling": True, "reward": "one_for_even"}
    ((expected, *_),) = train_all([("grpo", asynchronous_run("grpo", tmp_path / "whole", 1, train))], 1)
    run = asynchronous_run("grpo", tmp_path / "run", 2, train, max_staleness=0)
    fault_of([("grpo", run)], 2, "fold:5:kill")
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) and not (tmp_path / "run" / "final").exists()
    ((found, *_),) = train_all([("grpo", run)], 2, resume=True)
    assert found["final/model.safetensors"] == expected["final/model.safetensors"]


class Owner:
    """Has what a sampler completes."""

    def __init__(self):
        self.texts = {}

    def finished(self, request):
        self.texts[request.number] = [list(each.token_ids) for each in request.completions]


# The completions of each group, of which the last ends first.
COUNTS = (3, 2, 1, 2)
GROUPS = [
    ([5, 7, 9 + number], SamplingParams(n=n, max_tokens=9 - number, seed=3, ignore_eos=True))
    for number, n in enumerate(COUNTS)
]


def sampler_with_groups(communicator, options):
    """(RankedSampler, the Owner of its groups, numbers of those that this rank's engine has, the rank of each)."""
    sampler = RankedSampler(LLM(load_model(MODEL)).engine, AsyncConfig(**options), communicator)
    sampler.start(0)
    owner, own = Owner(), set()
    submit = sampler.own.submit
    sampler.own.submit = lambda each, to: (own.add(each.number), submit(each, to))
    if communicator.rank == 0:
        for number, each in enumerate(GROUPS):
            sampler.submit(GroupRequest(number, *each), owner)
    places = {number: each.rank for number, each in sampler.under_way.items()}
    sampler.share()
    return sampler, owner, own, places


def draw_ahead(communicator, options, num_micro_batches):
    """(texts by number, the rank of each, numbers that this rank has drawn) of groups, over a change of weights."""
    sampler, owner, own, places = sampler_with_groups(communicator, options)
    for _ in range(num_micro_batches):
        sampler.before_micro_batch()
    sampler.before_update()
    # Nothing is drawn while weights are written.
    steps = sampler.num_steps
    sampler.before_micro_batch()
    assert sampler.num_steps == steps
    sampler.collect()
    sampler.update_weights(1)
    sampler.share()
    sampler.settle()
    assert sampler.stats.num_tokens == sum(each.n * each.max_tokens for _, each in GROUPS) and not any(sampler.loads)
    sampler.close()
    return owner.texts, places, own


def test_groups_are_whole_and_go_to_the_rank_that_has_least_to_draw():
    prompts, params = map(list, zip(*GROUPS, strict=True))
    drawn = LLM(load_model(MODEL)).generate(prompts, params)
    expected = {number: [list(each.token_ids) for each in output.completions] for number, output in enumerate(drawn)}
    for options in ({"in_flight_weight_updates": False}, {"decode_steps_per_micro_batch": 1}):
        found = in_threads.run(draw_ahead, 2, options, 2)
        texts, places, _ = found[0]
        assert texts == expected and places == {0: 0, 1: 1, 2: 1, 3: 0}
        assert [own for *_, own in found] == [{0, 3}, {1, 2}]
        # As one engine completes them.
        assert list(texts) == [3, 2, 1, 0]


def meetings(communicator, where):
    """How often ranks meet while all that has begun is completed, where they do so after each step."""
    sampler, *_ = sampler_with_groups(communicator, {"in_flight_weight_updates": False})
    # One has nothing to draw from the second step on.
    if communicator.rank:
        sampler.own.close()
    before = communicator._calls["objects"]
    getattr(sampler, where)()
    return communicator._calls["objects"] - before


@pytest.mark.parametrize("where", ["before_update", "settle"])
def test_a_rank_waits_no_longer_for_the_others_than_an_operation_may_take(monkeypatch, where):
    monkeypatch.setattr(own_module, "ROUND_S", 0.0)
    first, second = in_threads.run(meetings, 2, where)
    # The longest completions of the first rank have nine tokens.
    assert first == second >= 9


def failing(*_):
    raise UserError("a tool is gone")


def fail(communicator, where):
    """The error of each rank, of which the last one's engine fails."""
    sampler, *_ = sampler_with_groups(communicator, {})
    if communicator.rank and where == "in flight":
        sampler.own.episodes.engine.synchronize = failing
    elif communicator.rank:
        sampler.own.poll = failing
    with pytest.raises(SharedError) as raised:
        if where == "take":
            led(communicator, sampler.poll, sampler.serve)
        elif where == "evaluation":
            sampler.settle()
        elif where == "in flight":
            sampler.before_update()
            sampler.update_weights(1)
            sampler.share()
            led(communicator, sampler.poll, sampler.serve)
        else:
            sampler.before_micro_batch()
            sampler.before_update()
            sampler.collect()
            sampler.update_weights(1)
    return str(raised.value)


@pytest.mark.parametrize("where", ["take", "training", "evaluation", "in flight"])
def test_an_error_of_a_rank_is_raised_by_all_in_the_same_place(where):
    assert in_threads.run(fail, 2, where) == ["a tool is gone"] * 2


def test_what_needs_inference_processes(tmp_path):
    run, deploy = grpo_run(tmp_path / "run"), {"num_train_gpus": 2, "tensor_parallel_size": 2}
    message = r"\[async\] with deploy.tensor_parallel_size 2 needs GPUs that generate"
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run, deploy=DeployConfig(**deploy), asynchronous=AsyncConfig())
    dataclasses.replace(run, deploy=DeployConfig(**deploy | {"num_infer_gpus": 2}), asynchronous=AsyncConfig())


def test_rewards_that_read_environments_need_inference_processes(tmp_path):
    run = asynchronous_run("grpo", tmp_path / "run", 2, max_staleness=0)
    with pytest.raises(ConfigError, match="takes `environments`, .*: deploy.num_infer_gpus must be at least 1"):
        rewards_of(run, [reads], None)
    rewards_of(dataclasses.replace(run, asynchronous=None), [reads], None)


def reads(environments, **columns):
    return [0.0] * len(environments)
