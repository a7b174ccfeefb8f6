"""Transports peer and nccl on GPUs against NumPy. Processes of their own: this one starts them, and needs no GPU."""

import pytest

from rlnumba.distributed import launch
from rlnumba.errors import RankError
from tests.distributed import gpu_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[2, 4])
def world_size(request):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_all_operations_equal_numpy(world_size, transport):
    assert min(launch(gpu_ranks.check_all, world_size, transport=transport, timeout_s=60)) > 90


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_a_gather_in_a_graph_equals_numpy(world_size, transport):
    assert all(launch(gpu_ranks.check_graph, world_size, transport=transport, timeout_s=60))


def test_small_pieces_and_wrapping_counters(world_size):
    """The communicator is made by the ranks, with counters and epochs shortly before they wrap."""
    assert all(launch(gpu_ranks.check_wrap, world_size, timeout_s=60))


@pytest.mark.slow
def test_no_stale_gather(world_size):
    """10^6 gathers that change, in graphs, with random delays between them."""
    assert all(launch(gpu_ranks.check_many, world_size, 1_000_000, transport="peer", timeout_s=60))


@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("fault", ["fold:1:kill", "fold:1:stall", "gather:1:stall"])
def test_faults_end_all(monkeypatch, world_size, transport, fault):
    monkeypatch.setenv("RLNUMBA_FAULT", fault)
    with pytest.raises(RankError, match="rank [0-9]: "):
        launch(gpu_ranks.one_of_each, world_size, transport=transport, timeout_s=5)
