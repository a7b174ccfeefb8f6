"""Blocks of the KV cache: allocation, reference counts, and lookup of cached prefixes by hash.

A block holds K and V of block_size consecutive tokens in every layer. Block tables refer to blocks, and one block may
stand in several tables (ref_count > 1): completions of a prompt share its full blocks. The hash of a full block covers
all tokens up to its end:

    h_i = xxh64(h_{i-1} as 8 little-endian bytes || its token ids as int64),    h_{-1} = the policy version

so blocks computed with other weights are never matched; with one of several adapters h_{-1} is hashed with its id, and
with a request's cache_salt. A freed block keeps its hash until it is allocated again, least recently freed first, and
can be matched until then. A match compares token ids as well: a collision of hashes costs a miss, never a wrong text.
The rules follow nano-vllm.
"""

from collections import Counter, OrderedDict

import numpy as np
import xxhash


def block_hash(parent, token_ids):
    """The hash of a block of token ids (an int64 array) whose predecessor has the hash `parent`."""
    return xxhash.xxh64_intdigest(int(parent).to_bytes(8, "little") + token_ids.astype("<i8").tobytes())


def blocks_needed(length_limit, block_size):
    """The most blocks that a sequence of length_limit tokens needs: the last one ends it and is never computed."""
    return -(-(length_limit - 1) // block_size)


class BlockManager:
    """num_blocks blocks of block_size tokens, all free at the start."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = 0, block_size
        self.ref_count = []
        self.free = OrderedDict()
        self.block_of_hash = {}
        self.hash_of_block = {}
        self.token_ids = np.zeros((0, block_size), np.int32)
        self.grow(num_blocks)

    def grow(self, num_blocks):
        """Add free blocks, to num_blocks in all; those that exist stay as they are."""
        added = num_blocks - self.num_blocks
        if not added:
            return
        self.ref_count += [0] * added
        self.free.update(dict.fromkeys(range(self.num_blocks, num_blocks)))
        self.token_ids = np.concatenate([self.token_ids, np.zeros((added, self.block_size), np.int32)])
        self.num_blocks = num_blocks

    @property
    def num_free(self):
        return len(self.free)

    def match(self, hashes, token_ids):
        """The blocks of the longest cached prefix of full blocks with these hashes; their ref_count does not change."""
        matched, size = [], self.block_size
        for wanted in hashes:
            block = self.block_of_hash.get(wanted)
            if block is None:
                break
            matched.append(block)
        if matched:
            wanted = token_ids[: len(matched) * size].reshape(len(matched), size)
            differs = (self.token_ids[matched] != wanted).any(axis=1)
            if differs.any():
                return matched[: int(differs.argmax())]
        return matched

    def count_free(self, blocks):
        """The number of these blocks that are in the free list: `acquire` shortens it by that many."""
        return [self.ref_count[block] for block in blocks].count(0)

    def acquire(self, blocks):
        """Add a reference to each of the blocks, which `match` found."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free[block]
            self.ref_count[block] += 1

    def allocate(self, count):
        """`count` blocks without content, with one reference each, least recently freed first."""
        if count > len(self.free):
            raise ValueError(f"allocate: {count} blocks asked for, {len(self.free)} are free")
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_count[block] = 1
            old_hash = self.hash_of_block.pop(block, None)
            if old_hash is not None:
                del self.block_of_hash[old_hash]
        return blocks

    def release(self, blocks):
        """Remove a reference from each; a block without references is free and can be matched until it is allocated."""
        # Thousands of blocks at the end of a generation.
        ref_count, free = self.ref_count, self.free
        for block in blocks:
            count = ref_count[block]
            if count == 1:
                free[block] = None
            elif count == 0:
                raise ValueError(f"release: block {block} has no owner")
            ref_count[block] = count - 1

    def give_back(self, blocks):
        """Free blocks without content, with one reference each: they are the first to be allocated again."""
        for block in blocks:
            self.ref_count[block] = 0
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def register(self, blocks, hashes, token_ids):
        """Record the hashes and the token ids, (K, block_size), of K full, computed blocks.

        The first of several blocks with one hash keeps it.
        """
        kept = []
        for i, (block, new_hash) in enumerate(zip(blocks, hashes, strict=True)):
            if new_hash not in self.block_of_hash:
                self.block_of_hash[new_hash] = block
                self.hash_of_block[block] = new_hash
                kept.append(i)
        self.token_ids[[blocks[i] for i in kept]] = token_ids[kept]

    def forget(self, hashes):
        """Make no block with one of these hashes match any more."""
        for each in hashes:
            block = self.block_of_hash.pop(each, None)
            if block is not None:
                del self.hash_of_block[block]

    def forget_hashes(self):
        """Make no block match any more, as after a change of weights. References stay."""
        self.block_of_hash.clear()
        self.hash_of_block.clear()


class RetainedBlocks:
    """References to the blocks of requests that are going to have another turn, the oldest first.

    At most half of the blocks of a BlockManager are retained: the oldest requests' are released where there are more.
    """

    def __init__(self, blocks):
        self.blocks, self.of_request = blocks, OrderedDict()
        # How many requests retain a block.
        self.counts = Counter()

    def __len__(self):
        return len(self.of_request)

    def retain(self, request_id, blocks):
        """Add a reference to each of the blocks, which `match` found, until `release`."""
        self.blocks.acquire(blocks)
        self.of_request.setdefault(request_id, []).extend(blocks)
        self.counts.update(blocks)
        while len(self.counts) > self.blocks.num_blocks // 2:
            self.release_oldest()

    def release(self, request_id):
        """Remove the references of a request, if it has any; the last block is the first to be allocated again."""
        blocks = self.of_request.pop(request_id, [])
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                del self.counts[block]
        self.blocks.release(blocks[::-1])

    def release_oldest(self):
        """Remove the references of the request that has had them for the longest time."""
        self.release(next(iter(self.of_request)))

    def release_all(self):
        """Remove the references of all requests."""
        for request_id in list(self.of_request):
            self.release(request_id)
