"""Weights that trainer ranks push into the memory of other GPUs, or of processes that share theirs."""

import dataclasses

import numpy as np
import pytest

from rlnumba.config import AsyncConfig, EngineConfig
from rlnumba.kernels.peer.checksum import checksum_ref
from rlnumba.parallel.placement import RANKS_PER_GPU, gpus_of_ranks
from rlnumba.runs.ranks import train_on_ranks
from rlnumba.runtime import device
from rlnumba.sampling.weights.push import Checksums, WeightPusher, can_share
from tests.parallel.test_asynchronous import final_of, trained_prompts
from tests.parallel.test_gpu_training import model, run_of, shared  # noqa: F401 (fixtures)
from tests.parallel.test_gpu_training import train as train_synchronously
from tests.parallel.test_inference import Fixture

# Of `running`, which are here processes on GPUs.
from tests.parallel.test_weight_push import (  # noqa: F401
    test_a_process_that_is_started_anew_gets_the_newest_weights,
    test_a_process_that_takes_no_weights_ends_the_push,
    test_damaged_weights_are_refused_and_sent_again,
    test_groups_have_the_text_of_one_engine_and_the_newest_weights,
    test_memory_that_cannot_be_written_ends_the_run_with_one_line,
)
from tests.trainers.runs import metrics_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def running(model):  # noqa: F811 (not the fixture)
    """Two inference processes, on GPUs of their own if there are enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANKS_PER_GPU, "4")
        gpus = gpus_of_ranks(3, "this test")
    setup = {"model": str(model), "dtype": "bfloat16", "device": "cuda", "gpu": gpus[1], "num_sharing": 4}
    engine = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=32)
    # Buckets of less than a MiB: some of the model's are of no whole number of words.
    fixture = Fixture(make_sender=lambda trained: WeightPusher(trained, None, 1_000_000), engine=engine, **setup)
    with fixture.engines:
        yield fixture
    fixture.sender.close()


def test_checksums_of_arrays_on_the_gpu(rng):
    import cupy

    assert can_share(cupy.cuda.Device().id)
    sizes = (1, 7, 8, 2048, 1_000_003, 40_000_005)
    parts = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
    expected = [checksum_ref(np.pad(part, (0, -part.size % 8))) for part in parts]
    assert Checksums([device.asarray(part) for part in parts]).read() == expected


CASES = {
    "two ranks, two processes": {"num_train_gpus": 2, "num_infer_gpus": 2},
    "two ranks, through the host": {"num_train_gpus": 2, "num_infer_gpus": 1, "update_weights_transport": "shm"},
    "an engine of two processes": {"num_train_gpus": 1, "num_infer_gpus": 2, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_without_staleness_the_result_is_the_synchronous_one(tmp_path, model, case):  # noqa: F811
    options = {"max_steps": 5}
    expected = run_of("grpo", tmp_path / "synchronous", model, **options)
    train_synchronously("grpo", expected)
    deploy = {"update_weights_bucket_megabytes": 1, "update_weights_transport": "peer"} | CASES[case]
    run = run_of("grpo", tmp_path / "run", model, deploy["num_train_gpus"], **options)
    # Together, because each alone is refused.
    deploy = dataclasses.replace(run.deploy, **deploy)
    run = dataclasses.replace(run, deploy=deploy, asynchronous=AsyncConfig(max_staleness=0))
    train_on_ranks(run, False)
    assert final_of(run) == final_of(expected) and trained_prompts(run) == trained_prompts(expected)
    assert all(row["weight_pause_time_s"] > 0 for row in metrics_of(run))
