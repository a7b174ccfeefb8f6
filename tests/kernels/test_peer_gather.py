"""The gather between GPUs: all ranks in one launch of the simulator; on GPUs see tests/distributed/test_peer.py."""

import numpy as np
import pytest

from rlnumba.kernels.checks import address
from rlnumba.kernels.peer_gather import (
    FIRST_EPOCH,
    Layout,
    inbox_bytes,
    peer_exchange,
    peer_exchange_kernel,
    peer_gather,
    peer_gather_kernel,
)
from rlnumba.runtime import device
from rlnumba.runtime.compile import type_name

MOST = 600


class Ranks:
    """The memory of all ranks of a run, in one process."""

    def __init__(self, world_size, epoch=FIRST_EPOCH, cleared=0):
        self.world_size = world_size
        # 16 bytes more, to start at a multiple of 16.
        memory = np.full((world_size, inbox_bytes(world_size, MOST) + 16), cleared, np.uint8)
        self.memory = [row[-address(row) % 16 :] for row in memory]
        self.inboxes = np.array([address(row) for row in self.memory], np.int64)
        self.state = np.array([epoch, 0] * world_size, np.uint32)
        self.error = np.zeros(world_size, np.int32)

    def gather(self, source, layout=None, most_words=MOST):
        """(R, R, W) of arrays, or (R, rows, total) of a Layout."""
        layout = layout or Layout.of_arrays(source.shape[1], self.world_size)
        out = np.full((self.world_size, layout.rows * layout.total), -1, np.int32)
        peer_gather(source, out, layout, self.inboxes, self.state, self.error, 0, most_words, 1)
        return out.reshape(self.world_size, self.world_size if layout.rows == 1 else layout.rows, -1)


def sources(rng, world_size, words):
    return rng.integers(-(2**31), 2**31, (world_size, words)).astype(np.int32)


@pytest.fixture
def resident(monkeypatch):
    """All blocks of a launch run at the same time, as ranks do."""
    if device.name() == "sim":
        from rlnumba.runtime import simulator

        monkeypatch.setattr(simulator, "RESIDENT_BLOCKS", 16)


@pytest.mark.sim
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sizes(rng, resident, world_size):
    """One word, around a block, a block and a half; gathers of different sizes take turns in one inbox."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(world_size)
    for words in (1, 2, 511, 513, 3, 513, 0, 4):
        source = sources(rng, world_size, words)
        out = ranks.gather(source)
        for rank in range(world_size):
            np.testing.assert_array_equal(out[rank], source)
    assert not ranks.error.any()
    # No launch for 0 words.
    assert ranks.state.tolist() == [FIRST_EPOCH + 7, 0] * world_size


# Ranks with equal and unequal columns; one without any; words of a rank that need a second launch, and that do not.
LAYOUTS = [
    (2, Layout(3, 4, 0, 0, 8), MOST),
    (3, Layout(5, 1, 2, 1, 5), MOST),
    (3, Layout(7, 4, 1, 2, 13), 10),
    (2, Layout(2, 256, 0, 256, 300), MOST),
    (2, Layout(3, 6, 0, 6, 6), 8),
    (2, Layout(600, 2, 0, 0, 4), 1100),
]


@pytest.mark.sim
@pytest.mark.parametrize("world_size, layout, most_words", LAYOUTS)
def test_columns_of_rows(rng, resident, world_size, layout, most_words):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(world_size)
    counts = [layout.columns(rank) for rank in range(world_size)]
    assert sum(counts) == layout.total
    for _ in range(3):
        expected = sources(rng, layout.rows, layout.total)
        parts = np.split(expected, np.cumsum(counts)[:-1], axis=1)
        source = np.full((world_size, layout.rows * max(counts)), 77, np.int32)
        for row, part in zip(source, parts, strict=True):
            row[: part.size] = part.reshape(-1)
        for found in ranks.gather(source, layout, most_words):
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    launches = 3 * -(-layout.rows * max(counts) // most_words)
    assert ranks.state.tolist() == [FIRST_EPOCH + launches, 0] * world_size and not ranks.error.any()


# Rows that the ranks do not divide, of which some have none; two launches.
EXCHANGES = [
    (2, Layout(3, 4, 0, 0, 8), MOST),
    (2, Layout(1, 3, 0, 0, 6), MOST),
    (3, Layout(5, 1, 2, 1, 5), MOST),
    (3, Layout(4, 4, 1, 2, 13), 10),
    (2, Layout(3, 6, 0, 6, 6), 8),
    (2, Layout(9, 256, 0, 256, 300), MOST),
]


@pytest.mark.sim
@pytest.mark.parametrize("world_size, layout, most_words", EXCHANGES)
def test_an_exchange_of_rows(rng, resident, world_size, layout, most_words):
    """Taking turns with gathers in one inbox."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, row_width = Ranks(world_size), -(-layout.rows // world_size)
    counts = [layout.columns(rank) for rank in range(world_size)]
    for _ in range(2):
        expected = sources(rng, layout.rows, layout.total)
        source = np.full((world_size, layout.rows * max(counts)), 77, np.int32)
        for row, part in zip(source, np.split(expected, np.cumsum(counts)[:-1], axis=1), strict=True):
            row[: part.size] = part.reshape(-1)
        out = np.full((world_size, row_width * layout.total + 1), 55, np.int32)
        memory = ranks.inboxes, ranks.state, ranks.error
        peer_exchange(source, out, layout, row_width, *memory, 0, most_words, 1)
        for rank in range(world_size):
            own = expected[rank * row_width :][: layout.own_rows(rank, row_width)]
            np.testing.assert_array_equal(out[rank, : own.size].reshape(own.shape), own)
            assert (out[rank, own.size :] == 55).all()
        for found in ranks.gather(source, layout, most_words):
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    assert not ranks.error.any()


@pytest.mark.sim
@pytest.mark.parametrize("epoch", [2**32 - 3, 2**31 - 3])
def test_epochs_wrap(rng, resident, epoch):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(2, epoch)
    for gather in range(7):
        # Each longer than those before, so that it waits for words of cleared memory.
        source = sources(rng, 2, 5 + 40 * gather)
        np.testing.assert_array_equal(ranks.gather(source), [source, source])
    # 0 and 1 are left out.
    expected = epoch + 7 if epoch + 7 < 2**32 else epoch + 7 - 2**32 + FIRST_EPOCH
    assert ranks.state.tolist() == [expected, 0] * 2 and not ranks.error.any()


@pytest.mark.sim
def test_a_rank_that_does_not_send_is_named(rng):
    """Rank 1 of 3 is alone: it sends, and reports one of the others."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(3)
    source, error = sources(rng, 1, 5), np.zeros(1, np.int32)
    out = np.zeros((1, 15), np.int32)
    peer_gather(source, out, Layout.of_arrays(5, 3), ranks.inboxes, ranks.state[2:4], error, 1, MOST, 0)
    assert error[0] in (1, 3)
    np.testing.assert_array_equal(out[0, 5:10], source[0])


@pytest.mark.sim
@pytest.mark.parametrize("layout, most_words", [(Layout(3, 6, 0, 6, 6), MOST), (Layout(4, 2, 1, 2, 6), 10)])
def test_a_rank_without_words_is_waited_for(rng, layout, most_words):
    """Otherwise others could overwrite an inbox that it has not read. It has no words, or none in the last launch."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, error = Ranks(2), np.zeros(1, np.int32)
    words = layout.rows * layout.columns(0)
    source, out = sources(rng, 1, words), np.zeros((1, layout.rows * layout.total), np.int32)
    # Words of all launches have arrived but for the last one's, of which rank 1 has none.
    launches = -(-words // most_words)
    assert layout.rows * layout.columns(1) <= (launches - 1) * most_words
    if launches > 1:
        ranks.memory[0][: inbox_bytes(2, most_words)].view(np.uint32)[1::2] = FIRST_EPOCH
    peer_gather(source, out, layout, ranks.inboxes, ranks.state[:2], error, 0, most_words, 0)
    assert error[0] == 2


@pytest.mark.sim
def test_stale_words_are_not_taken(rng, resident):
    """Whatever the inbox had: words of other epochs, also of one that differs by 2^31, are waited for."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    for stale in (6, 8, 5 + 2**31):
        ranks = Ranks(2, epoch=7)
        for memory in ranks.memory:
            memory[: memory.size // 16 * 16].view(np.uint32)[1::2] = stale
        source = sources(rng, 2, 9)
        np.testing.assert_array_equal(ranks.gather(source), [source, source])


@pytest.mark.sim
def test_arrays_are_checked():
    source, out, layout = np.zeros((1, 4), np.int32), np.zeros((1, 8), np.int32), Layout.of_arrays(4, 2)
    arrays = np.zeros(2, np.int64), np.ones(2, np.uint32), np.zeros(1, np.int32)
    if device.name() == "cuda":
        source, out, *arrays = map(device.asarray, (source, out, *arrays))
    with pytest.raises(ValueError, match="source must have 4 words of Layout.* got 3"):
        peer_gather(source[:, :3].copy(), out, layout, *arrays, 0, 4, 0)
    with pytest.raises(ValueError, match=r"out must be \(1, 8\) int32"):
        peer_gather(source, out[:, :4].copy(), layout, *arrays, 0, 4, 0)
    with pytest.raises(ValueError, match=r"out must have 8 words of Layout.* got 4"):
        peer_exchange(source, out[:, :4].copy(), layout, 1, *arrays, 0, 4, 0)


def test_machine_code(compile_offline):
    arrays = (
        np.zeros((1, 4), np.int32), np.zeros((1, 8), np.int32), np.zeros(2, np.int64),
        np.ones(2, np.uint32), np.zeros(1, np.int32), 0, 2, 0, 0, *Layout.of_arrays(4, 2),
    )  # fmt: skip
    types = tuple(map(type_name, arrays))
    for architecture in [(8, 0), (9, 0), (10, 0)]:
        assert not compile_offline(peer_gather_kernel, types, architecture)
        # Also the rows of each rank.
        assert not compile_offline(peer_exchange_kernel, (*types[:9], types[8], *types[9:]), architecture)
