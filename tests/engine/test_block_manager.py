import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlnumba.engine.blocks.block_manager import BlockManager, RetainedBlocks, block_hash

IDS = np.arange(12, dtype=np.int32).reshape(3, 4)


def hashes_of(blocks_of_ids, parent=0):
    hashes = []
    for ids in blocks_of_ids:
        parent = block_hash(parent, ids.astype(np.int64))
        hashes.append(parent)
    return hashes


def test_hash_is_frozen():
    # Made once with xxhash from the rule in block_manager.py; other programs may hash blocks the same way.
    first = block_hash(0, np.arange(256))
    assert (first, block_hash(first, np.arange(256, 512))) == (0x930351CA5BF3624E, 0x61CDA28B75C3BA89)


def test_hash_depends_on_the_policy_version():
    assert block_hash(0, np.arange(16)) != block_hash(1, np.arange(16))


def test_match_compares_token_ids():
    manager = BlockManager(4, 4)
    a, b = manager.allocate(2)
    hashes = hashes_of(IDS)
    manager.register([a, b], hashes[:2], IDS[:2])
    assert manager.match(hashes, IDS.reshape(-1)) == [a, b]
    assert manager.match(hashes[1:], IDS[1:].reshape(-1)) == [b]
    other = IDS.copy()
    other[0, 2] = 99
    assert manager.match(hashes, other.reshape(-1)) == []


def test_freed_blocks_keep_their_content_until_reused_first_freed_first():
    manager = BlockManager(3, 4)
    blocks = manager.allocate(3)
    hashes = hashes_of(IDS)
    for block, value, ids in zip(blocks, hashes, IDS, strict=True):
        manager.register([block], [value], ids[None])
    manager.release(blocks[::-1])
    assert manager.num_free == 3 and manager.match(hashes, IDS.reshape(-1)) == blocks
    assert manager.allocate(1) == [blocks[2]]
    assert manager.match(hashes, IDS.reshape(-1)) == blocks[:2]
    manager.acquire(blocks[:2])
    assert manager.num_free == 0 and manager.ref_count == [1, 1, 1]
    manager.acquire(blocks[:1])
    manager.release(blocks[:1])
    assert manager.num_free == 0


def test_blocks_without_content_are_allocated_before_those_that_may_match():
    manager = BlockManager(3, 4)
    first, second = manager.allocate(2)
    manager.register([first], hashes_of(IDS[:1]), IDS[:1])
    manager.release([first])
    manager.give_back([second])
    assert manager.allocate(2)[0] == second and manager.match(hashes_of(IDS[:1]), IDS[0]) == [first]


def test_forgetting_hashes_keeps_references():
    manager = BlockManager(2, 4)
    (block,) = manager.allocate(1)
    manager.register([block], [5], IDS[:1])
    manager.forget_hashes()
    assert manager.match([5], IDS[0]) == [] and manager.num_free == 1
    manager.release([block])
    assert manager.num_free == 2


def test_errors_name_what_is_wrong():
    manager = BlockManager(2, 4)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 are free"):
        manager.allocate(3)
    with pytest.raises(ValueError, match="block 1 has no owner"):
        manager.release([1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_every_block_is_free_or_owned(moves, num_blocks):
    """Random allocations, registrations, matches and releases; each owner is one entry of `owned`."""
    manager, owned = BlockManager(num_blocks, 1), []
    for step, move in enumerate(moves):
        if move == 0 and manager.num_free:
            owned += manager.allocate(1)
        elif move == 1 and owned:
            block, value = owned[step % len(owned)], step % 4
            if block not in manager.hash_of_block:
                manager.register([block], [value], np.int32([[value]]))
        elif move == 2:
            found = manager.match([step % 4], np.int32([step % 4]))
            manager.acquire(found)
            owned += found
        elif owned:
            manager.release([owned.pop(step % len(owned))])
        assert manager.ref_count == [owned.count(block) for block in range(num_blocks)]
        assert sorted(manager.free) == [block for block in range(num_blocks) if block not in owned]
        assert {value: block for block, value in manager.hash_of_block.items()} == manager.block_of_hash


def test_what_a_request_retains_twice_is_released_at_once():
    manager = BlockManager(8, 4)
    blocks, retained = manager.allocate(3), RetainedBlocks(manager)
    retained.retain("a", blocks[:2])
    retained.retain("a", blocks[1:])
    retained.retain("b", blocks[:1])
    manager.release(blocks)
    retained.release("a")
    assert [manager.ref_count[block] for block in blocks] == [1, 0, 0] and len(retained) == 1
    retained.release("b")
    assert manager.num_free == 8 and not retained.counts


def test_half_of_the_blocks_are_retained_and_then_the_oldest_are_released():
    manager = BlockManager(8, 4)
    blocks, retained = manager.allocate(5), RetainedBlocks(manager)
    retained.retain("a", blocks[:3])
    retained.retain("b", blocks[2:4])
    assert list(retained.of_request) == ["a", "b"]
    retained.retain("c", blocks[4:])
    assert list(retained.of_request) == ["a", "b", "c"][1:]
    manager.release(blocks)
    assert manager.num_free == 5
