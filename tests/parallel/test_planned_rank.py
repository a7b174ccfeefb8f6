"""Sizes that plans and lists of kernels have of ranks: staging of shared gradients, and gathers in whole words."""

import numpy as np
import pytest

from rlnumba.model.shard import Columns
from rlnumba.parallel.planned_rank import ListedRank, PlannedRank
from rlnumba.parallel.shared_gradients import STAGING_BYTES, staging_bytes, staging_of
from rlnumba.parallel.transports.small_gathers import _layout_of, capacity_of


@pytest.mark.parametrize(
    "shared_bytes, world_size, piece_bytes, found",
    [
        # Half of 64 MiB and a segment of floats: 36 MiB, in pieces of multiples of 256 bytes.
        (64 << 20, 2, 1 << 30, (2, 36 << 20)),
        (64 << 20, 2, 4 << 20, (9, 4 << 20)),
        (64 << 20, 4, 4 << 20, (5, 4 << 20)),
        # Not more than all of it.
        (1000, 2, 1 << 30, (2, 1024)),
        (1024, 2, 1 << 30, (2, 1024)),
        (1, 4, 1 << 30, (2, 256)),
        (0, 4, 1 << 30, (2, 256)),
        # No more than STAGING_BYTES for the pieces of all others.
        (16 << 30, 5, 32 << 20, (16, 32 << 20)),
        (16 << 30, 1, 32 << 20, (64, 32 << 20)),
    ],
)
def test_staging(shared_bytes, world_size, piece_bytes, found):
    sizes = staging_of(shared_bytes, world_size, piece_bytes)
    assert sizes == found and all(type(size) is int for size in sizes)


def test_bytes_of_staging():
    assert staging_bytes(16 << 30, 5) == 4 * 16 * (32 << 20) == STAGING_BYTES
    assert staging_bytes(1000, 3) == 2 * 2 * 1024 and staging_bytes(1000, 1) == 0


def test_a_planned_rank_is_alone_with_its_objects():
    rank = PlannedRank(1, 3)
    assert rank.objects(["own"]) == [["own"], [], []]
    array, out = np.ones((2, 3), np.float32), np.zeros((3, 2, 3), np.float32)
    rank.gather(array, out)
    rank.exchange_rows(np.ones((2, 1), np.float32), np.zeros((1, 3), np.float32), Columns.equal(3, 3), 1)
    accumulated = np.zeros(4, np.float32)
    rank.fold(np.ones(12, np.float32), accumulated, 4, 1, True)
    assert not out.any() and not accumulated.any()


def test_a_listed_rank_launches_the_norm_where_a_kernel_has_it():
    """Columns that are no multiple of a packet have none, and nothing is launched for them."""
    rank = ListedRank(1, 2)
    part, weight, out = np.ones((2, 3), np.float32), np.ones(6, np.float32), np.zeros((2, 6), np.float32)
    assert rank.gather_rmsnorm(part, weight, 1e-6, out) is False and not out.any()

    class Gathers:
        def takes_rmsnorm(self, *arrays):
            return arrays == (1, 2, 4)

        def gather_rmsnorm(self, *arguments):
            found.append(arguments)

    found, rank._gathers = [], Gathers()
    assert rank.gather_rmsnorm(1, 2, 3, 4, True) is True and rank.gather_rmsnorm(1, 2, 3, 4) is True
    assert found == [(1, 2, 3, 4, True), (1, 2, 3, 4, False)]


def test_words_and_packets():
    assert [capacity_of(nbytes) for nbytes in (0, 4, 8, 12)] == [0, 1, 1, 2]
    halves, out = np.zeros((5, 6), np.float16), np.zeros((5, 10), np.float16)
    layout = _layout_of(halves, out, Columns(4, 1, 2, 10))
    assert (layout.rows, layout.width, layout.longer, layout.extra, layout.total) == (5, 2, 1, 1, 5)
    # Three columns of 2 bytes are no whole words, whether they are a part, what a longer one has more, or the total.
    for columns in (Columns(3, 0, 0, 6), Columns(4, 1, 1, 10), Columns(4, 1, 2, 9)):
        assert _layout_of(halves, out, columns) is None
    # One longer part is not one byte more.
    assert _layout_of(halves, out, Columns(2, 3, 2, 10)).longer == 3
    shifted = np.zeros(31, np.float16)[1:].reshape(5, 6)
    for arrays in ((shifted, out), (halves, shifted)):
        assert _layout_of(*arrays, Columns(4, 1, 2, 10)) is None
