"""Transports peer and nccl on GPUs against NumPy. Processes of their own: this one starts them, and needs no GPU."""

import pytest

from rlnumba.errors import RankError
from rlnumba.parallel import launch
from rlnumba.runtime import device
from tests.parallel import gpu_ranks

pytestmark = pytest.mark.gpu
# Seconds that ranks of these tests wait for a rank that stalls. They also join each other within this time, while the
# processes of other tests compile.
STALL_S = 20
# The error of a fault, not of ranks that have never met.
FAULT = "rank [0-9]: (?!connect)"


@pytest.fixture(params=[2, 4])
def gpus(request):
    """The GPU of each rank; ranks share where there are too few."""
    return [rank % device.gpu_count() for rank in range(request.param)]


@pytest.fixture(params=["peer", "nccl"])
def transport(request, gpus):
    if request.param == "nccl" and len(set(gpus)) < len(gpus):
        pytest.skip(f"needs {len(gpus)} GPUs: NCCL refuses two ranks on one")
    return request.param


def test_all_operations_equal_numpy(gpus, transport):
    assert min(launch(gpu_ranks.check_all, len(gpus), transport=transport, gpus=gpus, timeout_s=60)) > 70


def test_a_gather_in_a_graph_equals_numpy(gpus, transport):
    assert all(launch(gpu_ranks.check_graph, len(gpus), transport=transport, gpus=gpus, timeout_s=60))


def test_the_norm_of_gathered_rows_has_the_bits_of_both(gpus):
    assert all(launch(gpu_ranks.check_norms, len(gpus), transport="peer", gpus=gpus, timeout_s=60))


def test_small_pieces_and_wrapping_counters(gpus):
    """The communicator is made by the ranks, with counters and epochs shortly before they wrap."""
    assert all(launch(gpu_ranks.check_wrap, len(gpus), gpus, timeout_s=60))


def test_gradients_that_are_written_late(gpus):
    """The order of gradients, pulls and the next gradients, which no call of the host keeps."""
    assert all(launch(gpu_ranks.check_late_gradients, len(gpus), transport="peer", gpus=gpus, timeout_s=60))


@pytest.mark.slow
def test_no_stale_gather(gpus):
    """10^6 gathers that change, in graphs, with random delays between them; fewer where GPUs are shared."""
    count = 1_000_000 if len(set(gpus)) == len(gpus) else 5_000
    assert all(launch(gpu_ranks.check_many, len(gpus), count, transport="peer", gpus=gpus, timeout_s=60))


@pytest.mark.parametrize("fault", ["fold:1:kill", "fold:1:stall", "gather:1:stall"])
def test_faults_end_all(monkeypatch, gpus, transport, fault):
    monkeypatch.setenv("RLNUMBA_FAULT", fault)
    with pytest.raises(RankError, match=FAULT):
        launch(gpu_ranks.one_of_each, len(gpus), transport=transport, gpus=gpus, timeout_s=STALL_S)


@pytest.mark.parametrize("fault", ["fold:1:kill", "fold:1:stall", "fold:1:kill:0"])
def test_faults_between_pulls_end_all(monkeypatch, gpus, fault):
    monkeypatch.setenv("RLNUMBA_FAULT", fault)
    with pytest.raises(RankError, match=FAULT):
        launch(gpu_ranks.shared_folds, len(gpus), transport="peer", gpus=gpus, timeout_s=STALL_S)


def test_a_gradient_that_is_never_complete_ends_all(gpus):
    with pytest.raises(RankError, match=f"fold 1 of .* did not end within {STALL_S} s"):
        launch(gpu_ranks.stuck_before_a_fold, len(gpus), transport="peer", gpus=gpus, timeout_s=STALL_S)
