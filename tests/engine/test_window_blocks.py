import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.engine.blocks.block_manager import BlockManager
from rlnumba.engine.blocks.window_blocks import NOWHERE, WindowBlocks, places_for
from rlnumba.kernels.attention.ops import attention
from rlnumba.kernels.attention.paged import paged_attention
from rlnumba.kernels.attention.sequences import PackedSequences, PagedSequences
from rlnumba.runtime import device
from tests.close import assert_same_bits


class Running:
    """A sequence: its blocks, and how many of its tokens are computed."""

    def __init__(self, manager, windows, cached=()):
        self.manager, self.windows = manager, windows
        self.blocks, self.computed = list(cached), len(cached) * manager.block_size
        manager.acquire(self.blocks)
        windows.hold(self.blocks[windows.first_block(self.computed) :])

    def compute(self, count):
        """Compute `count` more tokens; returns (first, end) of the blocks that these read or write."""
        end = self.computed + count
        new = self.manager.allocate(max(-(-end // self.manager.block_size) - len(self.blocks), 0))
        self.windows.hold(new)
        self.blocks += new
        read = int(self.windows.first_block(self.computed)), len(self.blocks)
        self.windows.slide(self.blocks, self.computed, end)
        self.computed = end
        return read

    def end(self):
        self.windows.end(self.blocks, self.computed)
        self.manager.release(self.blocks[::-1])


@pytest.mark.parametrize("chunk", [1, 512])
def test_a_long_context_takes_what_its_window_needs(chunk):
    """8,192 tokens of a layer with a window of 512: at most 574 keys, those of 36 blocks, and the tokens of a step."""
    manager = BlockManager(512, 16)
    windows = WindowBlocks(512, 512, 16, 512)
    running = Running(manager, windows)
    while running.computed < 8192:
        running.compute(chunk)
    assert len(running.blocks) == 512
    assert windows.most_held <= places_for(512, 16, chunk) == (36 if chunk == 1 else 68)
    # A query to come reads the last 511 keys, from key 7,681 on: from the tile that begins with key 7,680.
    assert windows.num_held == 32
    running.end()
    assert windows.num_held == 0 and windows.num_free == 512


def test_a_prefix_is_resumed_where_its_window_is_there():
    manager, windows = BlockManager(32, 16), WindowBlocks(10, 32, 16, 33)
    first = Running(manager, windows)
    first.compute(160)
    assert (windows.place[first.blocks] != NOWHERE).all()
    blocks = first.blocks
    # After 160 tokens, a query reads from key 128 on.
    assert windows.first_block(160) == 8 and windows.num_held == 2
    assert windows.resumable(blocks) == 10 and windows.resumable(blocks[:9]) == 9 and windows.resumable([]) == 0
    other = Running(manager, windows, blocks[:8])
    # Blocks 4 to 7, which were dropped, are held again; four new ones take the places of the first.
    assert windows.num_held == 6
    other.compute(64)
    assert (windows.place[blocks[:4]] == NOWHERE).all() and (windows.place[blocks[4:]] != NOWHERE).all()
    # After 80 tokens a query reads from key 0 on, after 112 from key 64.
    assert [windows.resumable(blocks[:count]) for count in (5, 7, 10)] == [0, 7, 10]
    first.end()
    assert windows.num_held == len(other.blocks) - windows.first_block(other.computed)
    other.end()
    assert windows.num_held == 0


def test_too_few_places_are_refused():
    windows = WindowBlocks(2, 4, 16, 8)
    windows.hold([0, 1])
    with pytest.raises(ValueError, match="hold: 1 places asked for, 0 are free"):
        windows.hold([1, 2])
    windows.drop([0])
    windows.hold([1, 2])
    assert windows.place[0] == NOWHERE and sorted(windows.place[1:3]) == [0, 1]
    with pytest.raises(ValueError, match="drop: no sequence holds the place of block 3"):
        windows.drop([3])
    windows.grow(6)
    assert len(windows.place) == 6 and windows.missing([1, 4, 5]) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70)), min_size=15, max_size=40), st.data()
)
def test_random_sequences(window, steps, data):
    """Begin at prefixes of others, compute, end: what is read is there, in places of its own, and all is given back."""
    manager, windows = BlockManager(40, 16), WindowBlocks(24, 40, 16, window)
    running = []
    for action, count in steps:
        if action < 3 and len(running) < 4:
            cached = running[data.draw(st.integers(0, len(running) - 1))] if running else None
            blocks = cached.blocks[: data.draw(st.integers(0, cached.computed // 16))] if cached else []
            blocks = blocks[: windows.resumable(blocks)]
            needed = windows.missing(blocks[int(windows.first_block(len(blocks) * 16)) :])
            if needed <= windows.num_free:
                running.append(Running(manager, windows, blocks))
        elif action < 5 and running:
            running.pop(data.draw(st.integers(0, len(running) - 1))).end()
        elif running:
            each = running[data.draw(st.integers(0, len(running) - 1))]
            new = -(-(each.computed + count) // 16) - len(each.blocks)
            if max(new, 0) <= min(windows.num_free, manager.num_free):
                first, end = each.compute(count)
                assert (windows.place[each.blocks[first:end]] != NOWHERE).all()
        held = {b for each in running for b in each.blocks[int(windows.first_block(each.computed)) :]}
        places = windows.place[windows.place != NOWHERE]
        assert len(set(places.tolist())) == len(places) and windows.num_held == len(held)
        assert (windows.place[sorted(held)] != NOWHERE).all()
        assert len(places) + len(windows.unused) == 24 and len(places) - len(held) == len(windows.dropped)
    for each in running:
        each.end()
    assert windows.num_held == 0 and not windows.ref_count.any()


def test_attention_reads_the_places(rng):
    """Prefill and decode against so many places as one sequence needs: the bits of packed attention."""
    if device.name() != "cpu":
        pytest.skip("the same arrays for every device")
    length, window, size, chunk = 300, 40, 16, 30
    q, k, v = (rng.standard_normal((length, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    out, lse = np.empty_like(q), np.empty((4, length), np.float32)
    attention(q, k, v, PackedSequences(np.array([0, length], np.int32), length, window), 0.25, out, lse)
    manager, count = BlockManager(20, size), places_for(window, size, chunk)
    windows, some = WindowBlocks(count, 20, size, window), np.empty_like(q)
    assert count == 9
    caches = [np.full((count, size, 2, 16), np.nan, np.float32) for _ in range(2)]
    running = Running(manager, windows)
    while (start := running.computed) < length:
        end = start + (chunk if start < 200 else 1)
        running.compute(end - start)
        positions = np.arange(start, end)
        for cache, x in zip(caches, (k, v), strict=True):
            cache[windows.place[running.blocks][positions // size], positions % size] = x[start:end]
        table = np.maximum(windows.place[running.blocks], 0)[None]
        arrays = np.array([0, end - start], np.int32), np.array([end], np.int32), table
        sequences = PagedSequences(*arrays, end - start, end, window=window)
        paged_attention(q[start:end].copy(), caches, sequences, 0.25, some[start:end])
    assert_same_bits(some, out)
