"""The norm of rows that GPUs have in columns: all ranks in one launch of the simulator; on GPUs see test_peer.py."""

import numpy as np
import pytest

from rlnumba.kernels.nn.rmsnorm import FORWARD, rmsnorm, share_row
from rlnumba.kernels.peer.inbox import OF_VALUES, Inboxes
from rlnumba.kernels.peer.rmsnorm import peer_rmsnorm, peer_rmsnorm_kernel, supports_peer_rmsnorm
from rlnumba.runtime import device
from rlnumba.runtime.arguments import type_name
from tests.kernels.test_peer_gather import Ranks, resident, sources  # noqa: F401

EPS = 1e-6


def parts_of(rows, world_size):
    """(R, N, D / R) of (N, D): the columns of each rank."""
    return np.ascontiguousarray(np.stack(np.split(rows, world_size, axis=1)))


def norm_on_ranks(ranks, rows, weight, unit_offset):
    """What each rank has of the norm, (R, N, D)."""
    out = np.full((ranks.world_size, *rows.shape), 7, rows.dtype)
    peer_rmsnorm(parts_of(rows, ranks.world_size), weight, EPS, out, ranks.inboxes(), unit_offset)
    return out


# A thread with one piece of 16 bytes, with several, of a block with more threads than pieces; several warps.
@pytest.mark.sim
@pytest.mark.parametrize(
    "world_size, rows, columns, dtype",
    [
        (2, 1, 256, "bfloat16"),
        (2, 3, 512, "float16"),
        (2, 2, 1088, "bfloat16"),
        (3, 2, 96, "float32"),
        (1, 2, 64, "bfloat16"),
    ],
)
def test_the_bits_are_those_of_gather_and_norm(rng, resident, world_size, rows, columns, dtype):  # noqa: F811
    """Twice, the second time of 1 + weight, and with a gather between, in the same inboxes."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(world_size)
    for repeat in range(2):
        x, weight = (rng.standard_normal(shape).astype(device.DTYPES[dtype]) for shape in ((rows, columns), columns))
        expected, rstd = np.empty_like(x), np.empty(rows, np.float32)
        unit_offset = bool(repeat)
        rmsnorm(x, weight, EPS, expected, rstd, unit_offset)
        for found in norm_on_ranks(ranks, x, weight, unit_offset):
            assert found.tobytes() == expected.tobytes()
        source = sources(rng, world_size, 8 * (1 + repeat))
        for are_floats in (False, True):
            np.testing.assert_array_equal(ranks.gather(source, None, are_floats), [source] * world_size)
    ranks.check(6)


@pytest.mark.sim
def test_a_rank_that_does_not_send_is_named(rng):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, parts, out = Ranks(3), np.ones((1, 1, 32), np.float32), np.empty((1, 1, 96), np.float32)
    peer_rmsnorm(parts, np.ones(96, np.float32), EPS, out, ranks.inboxes(1, 0))
    assert ranks.error[1] in (1, 3)


@pytest.mark.sim
def test_arrays_are_checked():
    xp = device.xp()
    parts, weight, out = (xp.zeros(shape, np.float32) for shape in ((1, 2, 8), 16, (1, 2, 16)))
    inboxes = Inboxes(xp.zeros(2, np.int64), xp.ones(2, np.uint32), xp.zeros(1, np.int32), 0, 4, 0)
    assert supports_peer_rmsnorm(parts, weight, out, 4) and not supports_peer_rmsnorm(parts, weight, out, 3)
    with pytest.raises(ValueError, match=r"parts must have 1 to 1024 rows of whole, .* at most 48 bytes"):
        peer_rmsnorm(parts, weight, EPS, out, inboxes._replace(capacity=3))
    with pytest.raises(ValueError, match=r"peer_rmsnorm: weight must be \(16\) float32, got \(15,\)"):
        peer_rmsnorm(parts, weight[:15].copy(), EPS, out, inboxes)
    narrow = xp.zeros((1, 2, 6), np.float32)
    assert not supports_peer_rmsnorm(narrow, xp.zeros(12, np.float32), xp.zeros((1, 2, 12), np.float32), 100)


@pytest.mark.parametrize("element, columns", [("bfloat16", 4096), ("float16", 1088), ("float32", 1024)])
def test_machine_code(compile_offline, element, columns):
    dtype = device.DTYPES[element]
    layout = share_row(columns, dtype.itemsize, 16 // dtype.itemsize, *FORWARD)
    kernel = peer_rmsnorm_kernel(layout, element, True)
    arrays = np.zeros((1, 1, 4), np.int32), np.zeros(columns, dtype), 1e-6, np.zeros((1, 1, columns), dtype)
    inboxes = Inboxes(np.zeros(2, np.int64), np.ones(2, np.uint32), np.zeros(1, np.int32), 0, 2, 0)
    for architecture in [(8, 0), (9, 0), (10, 0)]:
        types = tuple(map(type_name, (*arrays, inboxes.of_kind(OF_VALUES))))
        assert not compile_offline(kernel, types, architecture)
