"""Asynchronous GRPO: the synchronous result without staleness, and the same result however the engines are run."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import time

import pytest

from rlnumba import checkpoint
from rlnumba.config import AsyncConfig, DeployConfig, LoraConfig, QuantizationConfig, to_toml
from rlnumba.data.prompts import PromptData
from rlnumba.errors import ConfigError
from rlnumba.parallel import launch
from rlnumba.runs.callbacks import TrainerCallback, given
from rlnumba.runs.prompt_run import prompt_order
from rlnumba.runs.ranks import train_on_ranks
from rlnumba.runtime import device
from rlnumba.sampling.own import OwnSampler
from rlnumba.trainers import grpo, ppo, rloo
from rlnumba.trainers.grpo import run_grpo
from rlnumba.trainers.ppo import run_ppo
from rlnumba.trainers.rloo import run_rloo
from tests import processes
from tests.parallel.test_trainers import train_each, written
from tests.trainers.runs import grpo_run, metrics_of, ppo_run, rloo_run


def run_of(folder, num_infer_gpus=0, lora=None, train=None, data=None, **options):
    """A GRPORun of four steps, with [async] if there are options."""
    run = grpo_run(folder, data=data, **{"max_steps": 4, "save_steps": 2, "report_to": []} | (train or {}))
    deploy = DeployConfig(num_infer_gpus=num_infer_gpus, update_weights_bucket_megabytes=1)
    return dataclasses.replace(run, deploy=deploy, lora=lora, asynchronous=AsyncConfig(**options) if options else None)


def final_of(run, name="model.safetensors"):
    """The hash of a run's final weights."""
    return hashlib.sha256((pathlib.Path(run.output_dir) / "final" / name).read_bytes()).hexdigest()


def trained_prompts(run):
    """The prompts of all groups that were trained on, in their order."""
    lines = (pathlib.Path(run.output_dir) / "completions.jsonl").read_text().splitlines()
    return [row["prompt"] for row in map(json.loads, lines)][:: run.train.num_generations]


def train(run, resume=False):
    run_grpo(run, resume)
    return final_of(run), metrics_of(run)


def inference_processes(of=None):
    """The inference processes that this one, or another one, has started: list of ids."""
    found = [] if of else processes.forked_engines()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == (of or os.getpid()) and b"inference_worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # it has ended
    return sorted(found)


def followers_of(leader):
    """The processes that have the other parts of the model of an inference process: list of ids."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, group = (path / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            is_rank = b"spawn_main" in (path / "cmdline").read_bytes()
            if is_rank and int(group) == leader and int(parent) == leader:
                found.append(int(path.name))
    return sorted(found)


class KillOnce(TrainerCallback):
    """Kills the first inference process, or its follower, after a step, when it has the prompts of the next one."""

    def __init__(self, kills_follower=False, after=2):
        self.kills_follower, self.after = kills_follower, after

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == self.after:
            victim = inference_processes()[0]
            os.kill(followers_of(victim)[0] if self.kills_follower else victim, signal.SIGKILL)


def evaluated_run_of(folder, *arguments, **options):
    """A run_of with evaluations."""
    evaluation = {"eval_on_start": True, "eval_steps": 2}
    return run_of(folder, *arguments, train=evaluation, data={"eval": str(folder.parent / "prompts.jsonl")}, **options)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    run = evaluated_run_of(tmp_path_factory.mktemp("synchronous") / "run")
    return *train(run), trained_prompts(run)


def with_deploy(run, **deploy):
    """The run with other keys of [deploy]."""
    return dataclasses.replace(run, deploy=dataclasses.replace(run.deploy, **deploy))


@pytest.mark.parametrize(
    "num_infer_gpus, tensor_parallel_size, transport", [(0, 1, "auto"), (2, 1, "auto"), (2, 2, "auto"), (2, 2, "peer")]
)
def test_without_staleness_the_result_is_the_synchronous_one(
    tmp_path, synchronous, num_infer_gpus, tensor_parallel_size, transport
):
    """Also if an inference process is killed while it generates, and if the model is cut over several."""
    run = evaluated_run_of(tmp_path / "run", num_infer_gpus, max_staleness=0)
    run = with_deploy(run, tensor_parallel_size=tensor_parallel_size, update_weights_transport=transport)
    with given([KillOnce(tensor_parallel_size > 1)] if num_infer_gpus else []):
        final, metrics = train(run)
    assert (final, trained_prompts(run)) == (synchronous[0], synchronous[2])
    for name in ("loss", "eval_reward"):
        assert [row.get(name) for row in metrics] == [row.get(name) for row in synchronous[1]]
    assert [row["off_policy/max"] for row in metrics[1:]] == [0, 0, 0, 0]
    assert not inference_processes()


SCHEDULES = {
    "two generations a step": {"steps_per_generation": 1},
    "two steps a generation, twice": {"steps_per_generation": 4, "num_iterations": 2, "beta": 0.05, "max_steps": 5},
    "prompts by rewards": {"difficulty_weights": [0.1, 1.0, 2.0], "no_resampling_pass_rate": 0.4, "top_k": 20},
    "groups that differ": {"dynamic_sampling": True, "reward": "one_for_even", "max_steps": 4},
    "too few that differ": {"dynamic_sampling": True, "reward": "one_for_even", "max_gen_batches": 2},
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_without_staleness_generations_and_steps_are_the_synchronous_ones(tmp_path, case):
    options = {"max_steps": 3} | SCHEDULES[case]
    expected, run = run_of(tmp_path / "1", train=options), run_of(tmp_path / "2", train=options, max_staleness=0)
    (found, metrics), (wanted, of_expected) = train(run), train(expected)
    assert found == wanted and trained_prompts(run) == trained_prompts(expected)
    for name in ("reward", "frac_reward_zero_std", "dynamic_sampling/dropped"):
        assert [row.get(name) for row in metrics] == [row.get(name) for row in of_expected]


REPLAYS = {"replay_buffer_size": 3, "reward": "one_for_even", "save_steps": 1}


@pytest.mark.parametrize("num_infer_gpus", [0, 1])
def test_replayed_groups_without_staleness_are_those_of_the_synchronous_run(tmp_path, num_infer_gpus):
    """Also of a run that goes on from a checkpoint, and if the inference process is killed."""
    expected = run_of(tmp_path / "1", train=REPLAYS)
    run = run_of(tmp_path / "2", num_infer_gpus, train=REPLAYS, max_staleness=0)
    wanted, of_expected = train(expected)
    with given([KillOnce()] if num_infer_gpus else []):
        found, metrics = train(run)
    names = ("loss", "replay/groups", "replay/age", "replay/buffer_size")
    rows, of_expected = ([[row.get(name) for name in names] for row in each] for each in (metrics, of_expected))
    assert found == wanted and rows == of_expected and sum(row[1] for row in rows) > 1
    found, metrics = train(run, resume=2)
    assert found == wanted and [[row.get(name) for name in names] for row in metrics] == rows


def test_replayed_groups_of_a_stale_run_have_the_weights_of_older_tokens(tmp_path, monkeypatch):
    """Their ratio is to the policy before the step, also where no other token of the batch is of older weights."""
    options = {"train": REPLAYS | {"max_steps": 5}, "max_staleness": 1}
    # The next generation is admitted before the step, and drawn after it.
    options |= {"decode_steps_per_micro_batch": 0, "queue_maxsize": 16}
    expected, metrics = train(run_of(tmp_path / "run", **options))
    replays = [row["replay/groups"] > 0 for row in metrics]
    assert any(replays) and all(row["off_policy/max"] == 0 for row in metrics)
    # One step a generation: the clipped ratio is 1 throughout, and the weights of replayed tokens are not.
    assert not any(row[name] for row in metrics for name in row if name.startswith("clip_ratio"))
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in metrics]
    assert [ratio > 1 for ratio in ratios] == replays and max(ratios) <= 2.0
    # As of a sampler whose log-probs differ in any case.
    monkeypatch.setattr(grpo, "sampler_is_exact", lambda train: False)
    assert train(run_of(tmp_path / "again", **options))[0] == expected


def test_dynamic_sampling_on_two_engines_is_the_synchronous_one(tmp_path):
    options = {"dynamic_sampling": True, "reward": "one_for_even"}
    expected, run = run_of(tmp_path / "1", train=options), run_of(tmp_path / "2", 2, train=options, max_staleness=0)
    with given([KillOnce()]):
        found = train(run)[0]
    assert found == train(expected)[0] and trained_prompts(run) == trained_prompts(expected)


def test_dynamic_sampling_ahead_of_training(tmp_path):
    """Also of a run that goes on from a checkpoint: all prompts come in their order, and what is trained on differs."""
    options = {"dynamic_sampling": True, "reward": "one_for_even", "max_steps": 6, "save_steps": 1}
    run = run_of(tmp_path / "run", train=options, max_staleness=2)
    for resume in (False, 3):
        _, metrics = train(run, resume)
        assert max(row["off_policy/max"] for row in metrics) == 2
        lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
        for step in range(1, 7):
            advantages = [line["advantage"] for line in lines if line["step"] == step]
            groups = [advantages[first : first + 4] for first in range(0, len(advantages), 4)]
            assert sum(any(group) for group in groups) == 4
        if resume:
            # A checkpoint does not have the completions of groups that were replaced.
            continue
        prompts = trained_prompts(run)
        taken = prompt_order(PromptData([None] * 16), run).upcoming(4, len(prompts))
        assert sorted(prompts) == sorted(f"what is the number {i}? " for i in taken)
        assert sum(row["dynamic_sampling/dropped"] for row in metrics) > 1


def test_without_in_flight_updates_the_result_does_not_depend_on_the_engines(tmp_path):
    """Nor on when they are fast: one in this process, and two processes of which one is killed."""
    options = {"max_staleness": 2, "in_flight_weight_updates": False}
    one, two = (run_of(tmp_path / str(n), n, train={"max_steps": 6}, **options) for n in (0, 2))
    expected = train(one)
    with given([KillOnce()]):
        found = train(two)
    assert found[0] == expected[0] and trained_prompts(two) == trained_prompts(one)
    for name in ("loss", "entropy", "off_policy/max", "off_policy/mean", "token_staleness/mean"):
        assert [row[name] for row in found[1]] == [row[name] for row in expected[1]], name
    assert [row["off_policy/max"] for row in found[1]] == [0, 1, 2, 2, 2, 2]
    # Older weights than the trained ones: the weights of their tokens are capped.
    assert max(row["sampling/importance_sampling_ratio/max"] for row in found[1][1:]) == 2.0
    assert max(row["sampling/sampling_logp_difference/max"] for row in found[1][1:]) > 0
    assert found[1][0]["sampling/sampling_logp_difference/max"] == 0


def rloo_run_of(folder, num_infer_gpus=0, train=None, data=None, **options):
    """As run_of, of RLOO."""
    run = rloo_run(folder, data=data, **{"max_steps": 4, "save_steps": 2, "report_to": []} | (train or {}))
    deploy = DeployConfig(num_infer_gpus=num_infer_gpus)
    return dataclasses.replace(run, deploy=deploy, asynchronous=AsyncConfig(**options) if options else None)


def test_rloo_without_staleness_is_the_synchronous_run(tmp_path):
    """Two steps a generation, twice."""
    options = {"num_iterations": 2, "beta": 0.05, "steps_per_generation": 4}
    expected = rloo_run_of(tmp_path / "1", train=options)
    run = rloo_run_of(tmp_path / "2", train=options, max_staleness=0)
    for each in (expected, run):
        run_rloo(each)
    assert final_of(run) == final_of(expected) and trained_prompts(run) == trained_prompts(expected)


def test_rloo_weights_completions_of_older_weights(tmp_path, monkeypatch):
    """The ratio of a completion is to the policy before its step, and its weight that of this one to the sampler."""
    runs = [
        rloo_run_of(tmp_path / name, train={"max_steps": 6, "beta": 0.05}, max_staleness=2)
        for name in ("exact", "other log-probs")
    ]
    run_rloo(runs[0])
    metrics = metrics_of(runs[0])
    assert [row["off_policy/max"] for row in metrics][-1] == 2
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in metrics]
    assert ratios[0] == 1.0 and 1.0 < max(ratios) <= 2.0
    # One step a generation: the clipped ratio is 1 throughout.
    assert not any(row[name] for row in metrics for name in row if name.startswith("clip_ratio"))
    # As of a sampler whose log-probs differ in any case.
    for module in (grpo, rloo):
        monkeypatch.setattr(module, "sampler_is_exact", lambda train: False)
    run_rloo(runs[1])
    assert final_of(runs[0]) == final_of(runs[1])


def ppo_run_of(folder, shared, num_infer_gpus=0, train=None, **options):
    """As run_of, of PPO, whose reference is read; shared: whether the critic is on the policy's trunk."""
    sizes = {"max_steps": 4, "save_steps": 1, "kl_coef": 0.1, "report_to": []} | (train or {})
    run = ppo_run(folder, critic={"shared": shared}, **sizes)
    deploy = DeployConfig(num_infer_gpus=num_infer_gpus)
    return dataclasses.replace(run, deploy=deploy, asynchronous=AsyncConfig(**options) if options else None)


def finals_of_ppo(run, name="model.safetensors"):
    """The hashes of policy and critic, and what both were trained on."""
    return final_of(run, name), final_of(run, f"critic/{name}"), trained_completions(run)


def trained_completions(run):
    """The lines of completions.jsonl without their advantages: list."""
    lines = (pathlib.Path(run.output_dir) / "completions.jsonl").read_text().splitlines()
    return [(row["step"], row["prompt"], row["completion"]) for row in map(json.loads, lines)]


PPO_PLACES = {
    "own engine": (False, 0, 1),
    "own engine, shared trunk": (True, 0, 1),
    "a process that is killed": (False, 1, 1),
    "two processes, shared trunk": (True, 2, 2),
}


@pytest.mark.parametrize("place", PPO_PLACES)
def test_ppo_without_staleness_is_the_synchronous_run(tmp_path, place):
    """Also of a run that goes on from a checkpoint."""
    shared, num_infer_gpus, tensor_parallel_size = PPO_PLACES[place]
    expected = ppo_run_of(tmp_path / "1", shared)
    run = ppo_run_of(tmp_path / "2", shared, num_infer_gpus, max_staleness=0)
    run = with_deploy(run, tensor_parallel_size=tensor_parallel_size)
    run_ppo(expected)
    with given([KillOnce()] if "killed" in place else []):
        run_ppo(run)
    assert finals_of_ppo(run) == finals_of_ppo(expected)
    for name in ("loss", "objective/kl", "loss/value_avg"):
        assert [row[name] for row in metrics_of(run)] == [row[name] for row in metrics_of(expected)], name
    run_ppo(run, resume=2)
    assert finals_of_ppo(run) == finals_of_ppo(expected)


@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_ppo_without_in_flight_updates_does_not_depend_on_the_engines(tmp_path, shared):
    """Old log-probs, KL and values are those of the weights that the batch is trained with, and tokens of older weights
    have capped weights."""
    options = {"max_staleness": 2, "in_flight_weight_updates": False, "importance_sampling_cap": 1.25}
    one, two = (ppo_run_of(tmp_path / str(n), shared, n, {"max_steps": 5}, **options) for n in (0, 2))
    run_ppo(one)
    with given([KillOnce()]):
        run_ppo(two)
    assert finals_of_ppo(one) == finals_of_ppo(two)
    metrics = metrics_of(one)
    assert [row["off_policy/max"] for row in metrics] == [0, 1, 2, 2, 2]
    ratios = [row["sampling/importance_sampling_ratio/max"] for row in metrics]
    assert ratios[0] == 1.0 and max(ratios) == 1.25 and metrics[0]["sampling/sampling_logp_difference/max"] == 0
    assert min(row["sampling/importance_sampling_ratio/min"] for row in metrics) < 1
    # The first optimizer step of each batch begins at a ratio of 1 to the old policy.
    one_step = {"max_steps": 4, "num_ppo_epochs": 1, "num_mini_batches": 1}
    run = ppo_run_of(tmp_path / "one step", shared, 0, one_step, **options)
    run_ppo(run)
    assert all(row["policy/approxkl_avg"] == 0.0 for row in metrics_of(run))


def test_ppo_tokens_are_of_the_weights_between_two_batches(tmp_path, monkeypatch):
    """With an engine that draws between micro-batches none is of those between the optimizer steps of a batch; and the
    result is that of a sampler whose log-probs differ in any case."""
    run = ppo_run_of(tmp_path / "run", False, max_staleness=2, decode_steps_per_micro_batch=2)
    poll, weights = OwnSampler.poll, {}

    def recording(sampler, *arguments, **options):
        engine = sampler.episodes.engine
        flat = device.to_host(engine.model.trained.flat)
        weights.setdefault(engine.policy_version, set()).add(hashlib.sha256(flat.tobytes()).hexdigest())
        return poll(sampler, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(OwnSampler, "poll", recording)
        run_ppo(run)
    assert [len(weights[version]) for version in range(4)] == [1, 1, 1, 1]
    metrics = metrics_of(run)
    assert max(row["off_policy/max"] for row in metrics) == 2
    assert 0 < max(row["cross_version_response_fraction"] for row in metrics)
    monkeypatch.setattr(ppo, "sampler_is_exact", lambda policy: False)
    again = ppo_run_of(tmp_path / "again", False, max_staleness=2, decode_steps_per_micro_batch=2)
    run_ppo(again)
    assert finals_of_ppo(again) == finals_of_ppo(run)


@pytest.mark.usefixtures("quick_starts")
def test_two_ranks_train_an_adapter_by_ppo_with_the_completions_of_one_engine(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "global_batch_size": 16}
    train = sizes | {"max_steps": 3}
    expected, run = (
        ppo_run_of(tmp_path / "1", True, 0, train),
        ppo_run_of(tmp_path / "2", True, 1, train, max_staleness=0),
    )
    expected, run = (dataclasses.replace(each, lora=LoraConfig(r=2)) for each in (expected, run))
    run_ppo(expected)
    train_on_ranks(with_deploy(run, num_train_gpus=2), False)
    name = "adapter_model.safetensors"
    assert final_of(run, name) == final_of(expected, name)
    assert trained_completions(run) == trained_completions(expected)


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("shared", [False, True], ids=["own critic", "shared trunk"])
def test_two_ranks_with_parts_of_policy_and_critic_have_the_result_of_one(tmp_path, shared):
    """Of three micro-batches, so that a rank has none in the second round."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "global_batch_size": 12}
    train = sizes | {"num_mini_batches": 1, "max_steps": 3, "learning_rate": 1e-3}
    expected, run = (
        ppo_run_of(tmp_path / "1", shared, 0, train),
        ppo_run_of(tmp_path / "2", shared, 1, train, max_staleness=0),
    )
    run_ppo(expected)
    train_on_ranks(with_deploy(run, num_train_gpus=2, zero_stage=3), False)
    assert finals_of_ppo(run) == finals_of_ppo(expected)


def test_a_checkpoint_has_the_groups_that_are_not_trained_on(tmp_path):
    sizes, data = {"save_steps": 1, "max_steps": 6, "eval_steps": 3}, {"eval": str(tmp_path / "prompts.jsonl")}
    run = run_of(tmp_path / "run", train=sizes, data=data, max_staleness=2)
    train(run)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    prompts = trained_prompts(run)
    # With one engine that decodes between micro-batches, the next generation is complete here, and one more is not.
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-2")
    groups = state["data"]["groups"]
    assert [group["number"] for group in groups] == list(range(8, 16))
    complete = [group["completions"]["text"] for group in groups if group["completions"] is not None]
    assert len(complete) >= 4
    train(run, resume=2)
    again = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert trained_prompts(run) == prompts and again[:32] == lines[:32]
    texts = [row["completion"] for row in again]
    for text in complete:
        assert any(texts[first : first + 4] == text for first in range(32, 64, 4))
    with pytest.raises(ConfigError, match="has 8 prompts of an asynchronous run .*: resume it with its section .async"):
        train(dataclasses.replace(run, asynchronous=None), resume=2)


def test_a_run_goes_on_without_staleness(tmp_path, synchronous):
    train(run_of(tmp_path / "run", train={"max_steps": 2}))
    assert train(run_of(tmp_path / "run", max_staleness=0), resume=True)[0] == synchronous[0]


def test_a_killed_run_loses_no_prompt(tmp_path):
    """Sixteen prompts are four steps: every four have each of them once."""
    run = run_of(tmp_path / "run", 1, train={"max_steps": 12}, max_staleness=2)
    (tmp_path / "run.toml").write_text(to_toml(run))
    process = processes.start(["--device", "cpu", "grpo", "--config", tmp_path / "run.toml"])
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("step-[2468]")):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.02)
    (own,) = inference_processes(process.pid)
    process.kill()
    process.communicate(timeout=30)
    while pathlib.Path(f"/proc/{own}").exists():
        assert time.monotonic() < deadline, "the inference process ends with its trainer"
        time.sleep(0.02)
    train(run, resume=True)
    prompts = trained_prompts(run)
    assert [len({*prompts[first : first + 16]}) for first in (0, 16, 32)] == [16, 16, 16] and len(prompts) == 48


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("transport, tp", [("shm", 1), ("peer", 1), ("peer", 2)])
def test_two_ranks_train_an_adapter_with_the_completions_of_one_engine(tmp_path, transport, tp):
    """The adapter alone is sent to it, and two processes have their parts of that."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "global_batch_size": 16}
    options = {"train": sizes | {"max_steps": 3}, "lora": LoraConfig(r=2)}
    expected, run = (
        run_of(tmp_path / "synchronous", **options),
        run_of(tmp_path / "run", tp, max_staleness=0, **options),
    )
    run = with_deploy(run, num_train_gpus=2, tensor_parallel_size=tp, update_weights_transport=transport)
    run_grpo(expected)
    train_on_ranks(run, False)
    name = "adapter_model.safetensors"
    assert final_of(run, name) == final_of(expected, name) and trained_prompts(run) == trained_prompts(expected)
    assert all(row["weight_pause_time_s"] > 0 for row in metrics_of(run))


def train_and_kill(communicator, kind, run, kills):
    """train_each of a run on a rank; the first inference process may be killed."""
    with given([KillOnce()] if kills and communicator.rank == 0 else []):
        train_each(communicator, [(kind, run)], True)


# Three micro-batches of each of two steps a generation: a rank has none in the second round.
IN_PARTS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "global_batch_size": 12}
IN_PARTS |= {"generation_batch_size": 24, "save_steps": 1, "beta": 0.05, "eval_on_start": True, "eval_steps": 2}


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(
    "kind, transport, kills, lora, quantization",
    [
        ("grpo", "shm", False, None, None),
        ("rloo", "peer", True, None, None),
        ("grpo", "peer", False, LoraConfig(r=2), None),
        ("grpo", "shm", False, LoraConfig(r=2), QuantizationConfig(type="nf4", group_size=16)),
    ],
)
def test_two_ranks_with_parts_of_the_weights_write_the_files_of_one(
    tmp_path, kind, transport, kills, lora, quantization
):
    """From the checkpoint of one rank on, whose weights are whole, and back; also if the inference process is killed,
    so that another one gets the parts of both. With an adapter the parts are those of its base, and it is sent."""
    data = {"eval": str(tmp_path / "prompts.jsonl")}
    # Top k: the log-probs of the policy are computed, too.
    options = IN_PARTS | ({"top_k": 20, "top_entropy_quantile": 0.5} if kind == "grpo" else {})
    options |= {} if lora is None else {"learning_rate": 1e-2}
    make = {"grpo": run_of, "rloo": rloo_run_of}[kind]

    def train(folder, steps, ranks=1, zero_stage=2):
        asynchronous = {"num_infer_gpus": 1, "max_staleness": 0} if ranks > 1 else {}
        run = make(tmp_path / folder, train=options | {"max_steps": steps}, data=data, **asynchronous)
        deploy = {"num_train_gpus": ranks, "zero_stage": zero_stage, "update_weights_transport": transport}
        run = dataclasses.replace(with_deploy(run, **deploy), lora=lora, quantization=quantization)
        launch(train_and_kill, ranks, kind, run, kills and ranks > 1, timeout_s=60)
        return written(run)

    expected = train("whole", 4)
    for steps, ranks, zero_stage in [(1, 1, 2), (3, 2, 3), (4, *((1, 2) if kills else (2, 2)))]:
        found = train("parts", steps, ranks, zero_stage)
    assert found[0] == expected[0]
    # Parts of the run end with an evaluation besides.
    for row, other in zip(expected[1], found[1], strict=True):
        for name in {"loss", "eval_reward", "entropy"} & row.keys():
            assert other[name] == row[name], name


def test_older_tokens_have_the_gradient_of_a_sampler_with_other_log_probs(tmp_path, monkeypatch):
    """Each generation is trained on twice; the sampler's log-probs are the old policy's only where it is the same."""
    options = {"train": {"max_steps": 5, "num_iterations": 2}, "max_staleness": 2}
    expected = train(run_of(tmp_path / "run", **options))
    assert max(row["sampling/sampling_logp_difference/max"] for row in expected[1]) > 0
    monkeypatch.setattr(grpo, "sampler_is_exact", lambda train: False)
    assert train(run_of(tmp_path / "again", **options))[0] == expected[0]
