"""The gather between GPUs: all ranks in one launch of the simulator; on GPUs see tests/parallel/test_peer.py."""

import numpy as np
import pytest

from rlnumba.kernels.checks import address
from rlnumba.kernels.peer.gather import GatherLayout, peer_gather, peer_gather_kernel
from rlnumba.kernels.peer.inbox import (
    EMPTY,
    FIRST_EPOCH,
    OF_VALUES,
    PACKET_BYTES,
    WITH_EPOCHS,
    Inboxes,
    clear_inbox,
    inbox_bytes,
    packets_of_kind,
)
from rlnumba.runtime import device
from rlnumba.runtime.arguments import type_name

# Packets of a kind from one rank, and words in those with epochs.
CAPACITY = 300
MOST = WITH_EPOCHS * CAPACITY


class Ranks:
    """The memory of all ranks of a run, in one process."""

    def __init__(self, world_size, epoch=FIRST_EPOCH, capacity=CAPACITY):
        self.world_size, self.capacity = world_size, capacity
        memory = [aligned(inbox_bytes(world_size, capacity), np.uint8) for _ in range(world_size)]
        for inbox in memory:
            clear_inbox(inbox, world_size, capacity)
        self.memory = memory
        # Of each kind of packets.
        cut = packets_of_kind(world_size, capacity) * PACKET_BYTES
        self.with_epochs, self.of_values = ([inbox[part].view(np.uint32) for inbox in memory]
            for part in (slice(cut), slice(cut, None)))  # fmt: skip
        self.addresses = np.array([address(inbox) for inbox in memory], np.int64)
        self.state = np.array([epoch, 0] * world_size, np.uint32)
        self.error = np.zeros(world_size, np.int32)

    def inboxes(self, rank=None, limit_cycles=1):
        """Of all ranks, or for a process that has one of them."""
        if rank is None:
            return Inboxes(self.addresses, self.state, self.error, 0, self.capacity, limit_cycles)
        own = self.state[2 * rank : 2 * rank + 2], self.error[rank : rank + 1]
        return Inboxes(self.addresses, *own, rank, self.capacity, limit_cycles)

    def gather(self, source, layout=None, are_floats=False):
        """(R, R, W) of arrays, or (R, rows, total) of a GatherLayout."""
        layout = layout or GatherLayout.of_arrays(source.shape[1], self.world_size)
        out = aligned((self.world_size, layout.rows * layout.total), np.int32, -7)
        peer_gather(source, out, layout, self.inboxes(), are_floats)
        return out.reshape(self.world_size, self.world_size if layout.rows == 1 else layout.rows, -1)

    def check(self, epochs):
        """That no rank was late, in so many launches, and that what has been read of values is empty again."""
        assert not self.error.any() and self.state.tolist() == [FIRST_EPOCH + epochs, 0] * self.world_size
        assert all((words.view(np.int32) == EMPTY).all() for words in self.of_values)


def aligned(shape, dtype, value=0):
    """An array that begins at a multiple of 16 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 16, np.uint8)
    found = memory[-address(memory) % 16 :][:size].view(dtype).reshape(shape)
    found[...] = value
    return found


def sources(rng, world_size, words):
    found = aligned((world_size, words), np.int32)
    found[...] = rng.integers(-(2**31), 2**31, found.shape)
    return found


def parts_of(expected, layout, world_size):
    """(R, W) of (rows, total): what each rank has of a GatherLayout, padded."""
    counts = [layout.columns(rank) for rank in range(world_size)]
    assert sum(counts) == layout.total
    source = aligned((world_size, layout.rows * max(counts)), np.int32, 77)
    for row, part in zip(source, np.split(expected, np.cumsum(counts)[:-1], axis=1), strict=True):
        row[: part.size] = part.reshape(-1)
    return source


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
    # No launch for 0 words.
    ranks.check(7)


# Ranks with equal and unequal columns; one without any; words of a rank that need a second launch, and that do not.
LAYOUTS = [
    (2, GatherLayout(3, 4, 0, 0, 8), CAPACITY),
    (3, GatherLayout(5, 1, 2, 1, 5), CAPACITY),
    (3, GatherLayout(7, 4, 1, 2, 13), 5),
    (2, GatherLayout(2, 256, 0, 256, 300), CAPACITY),
    (2, GatherLayout(3, 6, 0, 6, 6), 4),
    (2, GatherLayout(600, 2, 0, 0, 4), 550),
]
# The same of whole packets; one of two launches, in which the last rank has a packet less.
OF_FLOATS = [
    (2, GatherLayout(3, 4, 0, 0, 8), CAPACITY),
    (3, GatherLayout(5, 4, 2, 4, 16), CAPACITY),
    (3, GatherLayout(7, 16, 1, 8, 52), 15),
    (2, GatherLayout(2, 256, 0, 256, 300), CAPACITY),
    (2, GatherLayout(3, 24, 0, 24, 24), 16),
]
GATHERS = [(*each, False) for each in LAYOUTS] + [(*each, True) for each in OF_FLOATS]


@pytest.mark.sim
@pytest.mark.parametrize("world_size, layout, capacity, are_floats", GATHERS)
def test_columns_of_rows(rng, resident, world_size, layout, capacity, are_floats):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(world_size, capacity=capacity)
    for _ in range(3):
        expected = sources(rng, layout.rows, layout.total)
        source = parts_of(expected, layout, world_size)
        for found in ranks.gather(source, layout, are_floats):
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    words = OF_VALUES if are_floats else WITH_EPOCHS
    ranks.check(3 * -(-source.shape[1] // (words * capacity)))
    assert are_floats == (not any(each.any() for each in ranks.with_epochs))


# Rows that the ranks do not divide, of which some have none; two launches.
EXCHANGES = [
    (2, GatherLayout(3, 4, 0, 0, 8), CAPACITY),
    (2, GatherLayout(1, 3, 0, 0, 6), CAPACITY),
    (3, GatherLayout(5, 1, 2, 1, 5), CAPACITY),
    (3, GatherLayout(4, 4, 1, 2, 13), 5),
    (2, GatherLayout(3, 6, 0, 6, 6), 4),
    (2, GatherLayout(9, 256, 0, 256, 300), CAPACITY),
]


@pytest.mark.sim
@pytest.mark.parametrize("are_floats", [False, True])
@pytest.mark.parametrize("world_size, layout, capacity", EXCHANGES + OF_FLOATS)
def test_an_exchange_of_rows(rng, resident, world_size, layout, capacity, are_floats):
    """Taking turns with gathers in one inbox, of both kinds; floats that are no whole packets go with epochs."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, row_width = Ranks(world_size, capacity=capacity), -(-layout.rows // world_size)
    for repeat in range(2):
        expected = sources(rng, layout.rows, layout.total)
        source = parts_of(expected, layout, world_size)
        # Beyond its rows nothing is written.
        out = aligned((world_size, row_width * layout.total + OF_VALUES), np.int32, 55)
        peer_gather(source, out, layout, ranks.inboxes(), are_floats, row_width)
        for rank in range(world_size):
            own = expected[rank * row_width :][: layout.received(rank, row_width)]
            np.testing.assert_array_equal(out[rank, : own.size].reshape(own.shape), own)
            assert (out[rank, own.size :] == 55).all()
        for found in ranks.gather(source, layout, repeat == 1):
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    assert not ranks.error.any() and all((words.view(np.int32) == EMPTY).all() for words in ranks.of_values)


@pytest.mark.sim
def test_floats_of_any_bits_arrive(resident):
    """But for one NaN, which arrives as another; twice, so that it also is what a reader has left."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, layout = Ranks(2), GatherLayout.of_arrays(8, 2)
    bits = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFE, 0xFFFF0000, 0x0000FFFF], np.uint32)
    for empty_at in range(8):
        source = aligned((2, 8), np.int32)
        source[...] = bits.view(np.int32)
        source[:, empty_at] = EMPTY
        expected = np.where(source == EMPTY, EMPTY - 1, source)
        for rank, found in enumerate(ranks.gather(source, layout, True)):
            # A rank's own words do not travel.
            expected[rank], other = source[rank], expected[rank].copy()
            np.testing.assert_array_equal(found, expected)
            expected[rank] = other
            assert np.isnan(found[:, empty_at].view(np.float32)).all()
    ranks.check(8)


@pytest.mark.sim
@pytest.mark.parametrize("epoch", [2**32 - 3, 2**31 - 3])
def test_epochs_wrap(rng, resident, epoch):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks = Ranks(2, epoch)
    for gather in range(7):
        # Each longer than those before, so that it waits for words of cleared memory.
        source = sources(rng, 2, 8 + 40 * gather)
        np.testing.assert_array_equal(ranks.gather(source, None, gather % 3 == 1), [source, source])
    # 0 and 1 are left out.
    expected = epoch + 7 if epoch + 7 < 2**32 else epoch + 7 - 2**32 + FIRST_EPOCH
    assert ranks.state.tolist() == [expected, 0] * 2 and not ranks.error.any()


@pytest.mark.sim
@pytest.mark.parametrize("are_floats", [False, True])
def test_a_rank_that_does_not_send_is_named(rng, are_floats):
    """Rank 1 of 3 is alone: it sends, and reports one of the others."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, source, out = Ranks(3), sources(rng, 1, 8), aligned((1, 24), np.int32)
    peer_gather(source, out, GatherLayout.of_arrays(8, 3), ranks.inboxes(1, 0), are_floats)
    assert ranks.error[1] in (1, 3)
    np.testing.assert_array_equal(out[0, 8:16], source[0])


WITHOUT_WORDS = [
    (GatherLayout(3, 6, 0, 6, 6), CAPACITY, False),
    (GatherLayout(4, 2, 1, 2, 6), 5, False),
    (GatherLayout(3, 8, 0, 8, 8), CAPACITY, True),
    (GatherLayout(4, 4, 1, 4, 12), 5, True),
]


@pytest.mark.sim
@pytest.mark.parametrize("layout, capacity, are_floats", WITHOUT_WORDS)
def test_a_rank_without_words_is_waited_for(rng, layout, capacity, are_floats):
    """Otherwise others could overwrite an inbox that it has not read. It has no words, or none in the last launch."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, a_packet = Ranks(2, capacity=capacity), OF_VALUES if are_floats else WITH_EPOCHS
    words = layout.rows * layout.columns(0)
    source, out = sources(rng, 1, words), aligned((1, layout.rows * layout.total), np.int32)
    # Words of all launches have arrived but for the last one's, of which rank 1 has none.
    launches = -(-words // (a_packet * capacity))
    assert layout.rows * layout.columns(1) <= (launches - 1) * a_packet * capacity
    if launches > 1:
        ranks.with_epochs[0][: 4 * 2 * capacity][1::2] = FIRST_EPOCH
        ranks.of_values[0][: 4 * 2 * capacity] = 3
    peer_gather(source, out, layout, ranks.inboxes(0, 0), are_floats)
    assert ranks.error[0] == 2


@pytest.mark.sim
def test_stale_words_are_not_taken(rng, resident):
    """Whatever the inbox had: words of other epochs, also of one that differs by 2^31, are waited for."""
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    for stale in (6, 8, 5 + 2**31):
        ranks = Ranks(2, epoch=7)
        for words in ranks.with_epochs:
            words[1::2] = stale
        source = sources(rng, 2, 9)
        np.testing.assert_array_equal(ranks.gather(source), [source, source])


@pytest.mark.sim
@pytest.mark.parametrize("missing", range(OF_VALUES))
def test_a_packet_of_values_is_waited_for_until_it_is_whole(rng, missing):
    if device.name() == "cuda":
        pytest.skip("several ranks of one process run in the simulator alone")
    ranks, source, out = Ranks(2), sources(rng, 1, 4), aligned((1, 8), np.int32)
    # Of rank 1, in the half of an even epoch.
    arrived = ranks.of_values[0][4 * CAPACITY :][:4]
    arrived[...] = [1, 2, 3, 4]
    arrived[missing] = 0xFFFFFFFF
    peer_gather(source, out, GatherLayout.of_arrays(4, 2), ranks.inboxes(0, 0), True)
    assert ranks.error[0] == 2


@pytest.mark.sim
def test_arrays_are_checked():
    source, out, layout = np.zeros((1, 4), np.int32), np.zeros((1, 8), np.int32), GatherLayout.of_arrays(4, 2)
    arrays = np.zeros(2, np.int64), np.ones(2, np.uint32), np.zeros(1, np.int32)
    if device.name() == "cuda":
        source, out, *arrays = map(device.asarray, (source, out, *arrays))
    inboxes = Inboxes(*arrays, 0, 2, 0)
    with pytest.raises(ValueError, match="source must have 4 words of GatherLayout.* got 3"):
        peer_gather(source[:, :3].copy(), out, layout, inboxes)
    with pytest.raises(ValueError, match=r"out must have 8 words, fewer than 2\^31, of GatherLayout.* got 4"):
        peer_gather(source, out[:, :4].copy(), layout, inboxes)
    with pytest.raises(ValueError, match=r"out must have 8 words.* got 4"):
        peer_gather(source, out[:, :4].copy(), layout, inboxes, row_width=1)
    with pytest.raises(ValueError, match=r"peer_gather: state must be \(2\) uint32, got \(1,\)"):
        peer_gather(source, out, layout, inboxes._replace(state=arrays[1][:1].copy()))


@pytest.mark.parametrize("words", [WITH_EPOCHS, OF_VALUES])
def test_machine_code(compile_offline, words):
    arrays = np.zeros((1, 4), np.int32), np.zeros((1, 8), np.int32)
    inboxes = Inboxes(np.zeros(2, np.int64), np.ones(2, np.uint32), np.zeros(1, np.int32), 0, 2, 0)
    types = tuple(map(type_name, (*arrays, inboxes.of_kind(words), 0, 0, 1, GatherLayout.of_arrays(4, 2))))
    for architecture in [(8, 0), (9, 0), (10, 0)]:
        assert not compile_offline(peer_gather_kernel(words), types, architecture)
