"""Rollout by copies of the weights in 8 bits, on several ranks and in inference processes: the run of one process."""

import pytest

from rlnumba.runs.planning.plan import Planner
from tests.parallel.test_asynchronous import metrics_of, run_of, train, trained_prompts, with_deploy
from tests.parallel.test_trainers import run_of as run_on_ranks
from tests.parallel.test_trainers import train_all
from tests.trainers.test_quantized_rollout import DIFFERENCE, quantized


@pytest.mark.usefixtures("quick_starts")
def test_two_ranks_have_the_files_of_one(tmp_path):
    """Each makes copies of its own, of whole weights or of parts, also of the same generation's second steps."""
    options = {"beta": 0.1, "num_iterations": 2, "generation_batch_size": 32, "learning_rate": 1e-2}
    of_ranks = []
    for count, stages in ((1, [2]), (2, [2, 3])):
        folders = [(stage, tmp_path / f"{count}-{stage}") for stage in stages]
        runs = [run_on_ranks("grpo", folder, count, zero_stage=stage, **options) for stage, folder in folders]
        of_ranks += train_all([("grpo", quantized(run, "fp8")) for run in runs], count)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    _, rows, _ = of_ranks[0]
    assert all(row[DIFFERENCE + "max"] > 0 and row["rollout_corr/k3_kl"] > 0 for row in rows)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    run = quantized(run_of(tmp_path_factory.mktemp("synchronous") / "run"))
    return *train(run), trained_prompts(run)


@pytest.mark.parametrize("num_infer_gpus, size, transport", [(0, 1, "auto"), (1, 1, "shm"), (2, 2, "peer")])
def test_without_staleness_the_result_is_the_synchronous_one(tmp_path, synchronous, num_infer_gpus, size, transport):
    """Inference processes, and those with a part of the model each, make copies of the weights that they receive."""
    run = quantized(run_of(tmp_path / "run", num_infer_gpus, max_staleness=0))
    run = with_deploy(run, tensor_parallel_size=size, update_weights_transport=transport)
    final, metrics = train(run)
    assert (final, trained_prompts(run)) == (synchronous[0], synchronous[2])
    for name in ("loss", DIFFERENCE + "max"):
        assert [row[name] for row in metrics] == [row[name] for row in synchronous[1]]
    assert all(row[DIFFERENCE + "max"] > 0 for row in metrics)
    if num_infer_gpus:
        planner = Planner(run, False, 1 << 30)
        regions = planner.engine_regions(planner.plan())
        whole = planner.plan().regions["rollout weights"]
        # Each part has whole tiles of a matrix.
        assert whole / size <= regions["rollout weights"] < whole / size * 1.3


def test_stale_completions_are_weighted_once(tmp_path):
    """With staleness and rounding the weight of a token is that of both together, and learning goes on."""
    run = quantized(run_of(tmp_path / "run", train={"max_steps": 6}, max_staleness=2))
    train(run)
    rows = metrics_of(run)
    assert run.resolved().train.rollout_is == "token" and rows[-1]["off_policy/max"] == 2
    for row in rows:
        assert row[DIFFERENCE + "max"] > 0 and row["sampling/importance_sampling_ratio/max"] != 1
