"""Transport shm: every operation against NumPy with 1 to 4 processes, and what happens to ranks that do not meet."""

import os
import re

import numpy as np
import pytest

from rlnumba.errors import ConfigError, RankError
from rlnumba.parallel import SingleRank, launch
from rlnumba.parallel.communicator import OFFERING, OPERATIONS, Fault
from tests.parallel import ranks

pytestmark = pytest.mark.usefixtures("quick_starts")

TIMEOUT_S = 1.5


@pytest.fixture(autouse=True)
def leaves_nothing():
    """No file of shared memory stays, and no process."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    # Other programs may have files there: those of this process carry its user's memory under these names.
    assert not [name for name in after - before if "rlnumba" in name or name.startswith("psm_")]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_operations_equal_numpy(world_size):
    done = launch(ranks.check_all_operations, world_size, timeout_s=60, piece_bytes=ranks.PIECE_BYTES)
    assert len(done) == world_size and min(done) > 90


def test_the_order_of_additions_shows():
    """The gradients of the tests of fold would not pass with another order, nor with subnormal numbers flushed."""
    gradients = [ranks.gradient_of(1, k, 1000) for k in range(4)]
    right = ranks.folded(np.zeros(1000, np.float32), gradients, 0, True)
    other = ranks.folded(np.zeros(1000, np.float32), gradients[::-1], 0, True)
    assert (right != other).mean() > 0.2
    tiny = np.finfo(np.float32).tiny
    assert ((np.abs(right) < tiny) & (right != 0)).any()


def run_with_fault(tmp_path, fault, world_size):
    """The RankError of a run with a fault, after the checks that hold for each."""
    with pytest.raises(RankError) as error:
        launch(ranks.process_and_operations, world_size, tmp_path, TIMEOUT_S, fault)
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_ends_all(tmp_path, operation):
    error = run_with_fault(tmp_path, f"{operation}:1:kill", 3)
    assert re.fullmatch(r"rank 2: was ended by SIGKILL \(rank [01]: \w+ \d+.*: rank 2 has ended\)", str(error))
    assert error.rank == 2 and error.exit_code == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stalled_rank_ends_all_in_time(tmp_path, operation):
    error = run_with_fault(tmp_path, f"{operation}:1:stall:1", 2)
    assert error.rank == 0
    # Rank 0 names its own operation, the counterpart of put and get.
    name = {"put": "get", "get": "put"}.get(operation, operation)
    assert str(error).startswith(f"rank 0: {name} ")
    assert str(error).endswith(f"rank 1 did not join rank 0 within {TIMEOUT_S:g} s")


def test_a_corrupted_bit_reaches_all():
    found = launch(ranks.corrupted, 2, "gather:0:corrupt:1")
    assert found == [(r, [[0, 0], [1, 0]], [0.0, 0.0]) for r in range(2)]
    tiny = float(np.array(1, np.int32).view(np.float32))
    assert launch(ranks.corrupted, 2, "fold:0:corrupt") == [(r, [[0, 0], [0, 0]], [tiny, 0.0]) for r in range(2)]


DIFFERENT = {
    "operation": "rank 0 is in objects 0; rank 1 is in barrier 0",
    "dtype": "rank 0 is in gather 0 of float32 (3,); rank 1 is in gather 0 of int32 (3,)",
    "shape": "rank 0 is in gather 0 of float32 (3,); rank 1 is in gather 0 of float32 (4,)",
    "count": "rank 0 is in fold 0 of 1 gradients, is_first=True; rank 1 is in fold 0 of 2 gradients, is_first=True",
    "length": "gradients differ in length: 3 on rank 0, 4 on rank 1",
    "part": "the part of rank 1 lies outside of the gradient: [1, 4) of 3 elements",
    "sequence": "rank 0 is in gather 0 of float32 (3,); rank 1 is in barrier 0",
    "pair": "rank 0 is in get 0 of float32 (2,); rank 1 is in put 0 of float32 (3,)",
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_in_different_operations_are_named(case):
    with pytest.raises(RankError, match="rank") as error:
        launch(ranks.different, 2, case)
    assert str(error.value).endswith(DIFFERENT[case]) and "\n" not in str(error.value)


def test_arrays_are_checked():
    communicator = SingleRank()
    row = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"gather: out must be \(1, 3\) float32, got \(1, 4\) float32"):
        communicator.gather(row, np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"gather: array must be C-contiguous"):
        communicator.gather(np.zeros((3, 2), np.float32).T, np.zeros((1, 2, 3), np.float32))
    with pytest.raises(ValueError, match=r"fold: count must be in \[1, 1\], got 2"):
        communicator.fold(row, row, 0, 2, True)
    with pytest.raises(ValueError, match=r"fold: rank 0 of the first 1 must offer a gradient, got None"):
        communicator.fold(None, row, 0, 1, True)
    with pytest.raises(ValueError, match=r"fold: accumulated must be \(any\) float32, got \(3,\) float64"):
        communicator.fold(row, np.zeros(3), 0, 1, True)
    with pytest.raises(ValueError, match=r"put: rank must be another one in \[0, 1\), got 0"):
        communicator.put(row, 0)


def test_faults_are_parsed(monkeypatch):
    assert Fault.from_environment(2) is None
    monkeypatch.setenv("RLNUMBA_FAULT", "put:3:stall")
    assert Fault.from_environment(4) == ("put", 3, "stall", 3)
    for wrong in ("put", "put:x:kill", "put:1:maim", "poke:1:kill", "put:1:kill:-1", "put:1:kill:0:0", "get:0:corrupt"):
        monkeypatch.setenv("RLNUMBA_FAULT", wrong)
        with pytest.raises(ConfigError, match="RLNUMBA_FAULT must be"):
            Fault.from_environment(2)
    assert "barrier" not in OFFERING
