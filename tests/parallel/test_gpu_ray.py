"""Inference engines on GPUs of a Ray cluster, here of a second node of this host: the synchronous result."""

import dataclasses
import os

import pytest

from rlnumba.config import DeployConfig
from rlnumba.parallel import ray_cluster
from rlnumba.runs.callbacks import given
from tests.parallel.test_asynchronous import train, trained_prompts
from tests.parallel.test_gpu_asynchronous import NOT_STALE, run_of
from tests.parallel.test_gpu_training import model, shared  # noqa: F401 (fixtures)
from tests.parallel.test_ray import After, actors

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cluster():
    """A node without GPUs, where the trainer is, and one that has the GPUs of this process."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from rlnumba.runtime import device

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        options = {"object_store_memory": 1 << 30}
        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False} | options
        found = Cluster(initialize_head=True, head_node_args=head)
        found.add_node(num_cpus=4, num_gpus=device.gpu_count(), **options)
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        found.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_without_staleness_the_result_is_the_synchronous_one(cluster, tmp_path, model, size):  # noqa: F811
    """Two engines, of which one is killed, or one of two processes."""
    expected, run = run_of(tmp_path / "synchronous", model), run_of(tmp_path / "run", model, 2, NOT_STALE)
    deploy = DeployConfig(launcher="ray", num_infer_gpus=2, num_infer_nodes=1, tensor_parallel_size=size)
    (node,) = cluster.worker_nodes

    def kill_one():
        os.kill(actors([node.all_processes["raylet"][0].process.pid])[0], 9)

    with given([After({2: kill_one})]):
        found = train(dataclasses.replace(run, deploy=deploy))
    assert found[0] == train(expected)[0] and trained_prompts(run) == trained_prompts(expected)
    assert not ray_cluster.package().is_initialized()
