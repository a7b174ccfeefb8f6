"""Asynchronous GRPO on GPUs, or on processes that share one: the synchronous result, and the same one in each mode."""

import dataclasses

import pytest

from rlnumba.config import AsyncConfig, DeployConfig
from rlnumba.runs.callbacks import given
from rlnumba.runs.ranks import train_on_ranks
from rlnumba.trainers.grpo import run_grpo
from tests.parallel.test_asynchronous import KillOnce, final_of, metrics_of, train, trained_prompts
from tests.parallel.test_gpu_training import model, shared  # noqa: F401 (fixtures)
from tests.parallel.test_gpu_training import run_of as gpu_run_of
from tests.parallel.test_trainers import LORA

pytestmark = pytest.mark.gpu
NOT_STALE = AsyncConfig(max_staleness=0)


def run_of(folder, model, num_infer_gpus=0, asynchronous=None, tp=1, **options):  # noqa: F811 (not the fixture)
    """A GRPORun of five steps in bfloat16. tp: deploy.tensor_parallel_size."""
    run = gpu_run_of("grpo", folder, model, **{"max_steps": 5} | options)
    deploy = DeployConfig(num_infer_gpus=num_infer_gpus, tensor_parallel_size=tp)
    return dataclasses.replace(run, deploy=deploy, asynchronous=asynchronous)


@pytest.mark.parametrize("num_infer_gpus, tp", [(0, 1), (1, 1), (2, 1), (2, 2)])
def test_without_staleness_the_result_is_the_synchronous_one(tmp_path, model, num_infer_gpus, tp):  # noqa: F811
    """Also if an inference process ends, or one of two that have a part of the model each."""
    expected = run_of(tmp_path / "synchronous", model)
    run = run_of(tmp_path / "run", model, num_infer_gpus, NOT_STALE, tp)
    with given([KillOnce(tp > 1)] if (num_infer_gpus, tp) != (2, 1) and num_infer_gpus else []):
        found = train(run)
    assert found[0] == train(expected)[0] and trained_prompts(run) == trained_prompts(expected)


@pytest.mark.parametrize("transport, tp", [("peer", 1), ("shm", 1), ("peer", 2)])
def test_two_ranks_with_parts_of_the_weights_have_the_result_of_one(tmp_path, model, transport, tp):  # noqa: F811
    """Also if an inference process ends, so that another one gets the parts of both."""
    options = {"global_batch_size": 12, "generation_batch_size": 24, "beta": 0.05, "gradient_checkpointing": True}
    evaluation = {"eval_steps": 2, "eval_on_start": True, "data": {"eval": str(tmp_path / "prompts.jsonl")}}
    expected = run_of(tmp_path / "synchronous", model, **options, **evaluation)
    run = run_of(tmp_path / "run", model, tp, NOT_STALE, tp, **options, **evaluation)
    deploy = {"num_train_gpus": 2, "zero_stage": 3, "update_weights_transport": transport}
    run = dataclasses.replace(run, deploy=dataclasses.replace(run.deploy, **deploy))
    metrics = train(expected)[1]
    train_on_ranks(run, False, callbacks=[KillOnce()])
    assert final_of(run) == final_of(expected) and trained_prompts(run) == trained_prompts(expected)
    for name in ("loss", "eval_reward"):
        assert [row.get(name) for row in metrics_of(run)] == [row.get(name) for row in metrics]


def test_without_in_flight_updates_the_result_does_not_depend_on_the_engines(tmp_path, model):  # noqa: F811
    options = AsyncConfig(max_staleness=2, in_flight_weight_updates=False)
    found = [train(run_of(tmp_path / str(count), model, count, options)) for count in (0, 1, 2)]
    for final, metrics in found:
        assert final == found[0][0]
        assert [row["off_policy/max"] for row in metrics] == [0, 1, 2, 2, 2]
        assert [row["loss"] for row in metrics] == [row["loss"] for row in found[0][1]]


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"max_staleness": 2, "in_flight_weight_updates": False}])
def test_ranks_that_draw_while_they_train_have_the_result_of_one(tmp_path, model, options):  # noqa: F811
    """Three groups and three micro-batches a step: a rank has more of both."""
    sizes = {"global_batch_size": 12, "gradient_checkpointing": True}
    one, two = (run_of(tmp_path / str(n), model, asynchronous=AsyncConfig(**options), **sizes) for n in (1, 2))
    expected = train(one)
    train_on_ranks(dataclasses.replace(two, deploy=DeployConfig(num_train_gpus=2)), False)
    assert final_of(two) == expected[0] and trained_prompts(two) == trained_prompts(one)
    assert [row["off_policy/max"] for row in metrics_of(two)] == [row["off_policy/max"] for row in expected[1]]


def test_ranks_that_draw_while_they_train_have_the_same_result_twice(tmp_path, model):  # noqa: F811
    """Also where weights change in the middle of completions, as long as there are no drafts."""
    options, found = {"max_completion_length": 200, "global_batch_size": 12}, []
    for k in range(2):
        run = run_of(tmp_path / str(k), model, asynchronous=AsyncConfig(max_staleness=1), **options)
        engine = dataclasses.replace(run.engine, speculative_method="none")
        train_on_ranks(dataclasses.replace(run, engine=engine, deploy=DeployConfig(num_train_gpus=2)), False)
        assert any(row["cross_version_response_fraction"] for row in metrics_of(run))
        found.append((final_of(run), trained_prompts(run)))
    assert found[0] == found[1]


@pytest.mark.parametrize("recompute, tp", [(False, 1), (True, 1), (False, 2)])
def test_running_completions_go_on_with_new_weights(tmp_path, model, recompute, tp):  # noqa: F811
    options = {"recompute_kv_cache_after_weight_updates": recompute, "max_staleness": 1}
    run = run_of(tmp_path / "run", model, tp, AsyncConfig(**options), tp, max_completion_length=200, max_steps=8)
    _, metrics = train(run)
    assert max(row["off_policy/max"] for row in metrics) == 1
    assert any(row["cross_version_response_fraction"] for row in metrics), "no completion had two versions"


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter(tmp_path, model, tp):  # noqa: F811
    lora = dataclasses.replace(LORA, lora_dropout=0.0)
    expected = run_of(tmp_path / "synchronous", model, lora=lora)
    run = run_of(tmp_path / "run", model, tp, NOT_STALE, tp, lora=lora)
    for each in (expected, run):
        run_grpo(each)
    assert final_of(run, "adapter_model.safetensors") == final_of(expected, "adapter_model.safetensors")
