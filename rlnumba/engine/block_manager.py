"""Who owns which block of the KV cache, and which token ids a block holds.

A block keeps K and V of block_size consecutive tokens of every layer. Sequences refer to blocks through
their block tables; a block may belong to several (ref_count), which is how completions of one prompt share
it. A full block has a name, the hash of everything up to its end:

    h_i = xxh64(h_{i-1} as 8 little-endian bytes || its token ids as int64),    h_{-1} = the policy version

so blocks computed under old weights are never found again. A freed block keeps its name until it is handed
out anew, first freed first, and may be taken back by a sequence that starts with the same tokens; token
ids are compared, so a collision of hashes costs a miss, never a wrong text. The rules follow nano-vllm.
"""

from collections import OrderedDict

import numpy as np
import xxhash


def block_hash(parent, token_ids):
    """The name of a block of token ids (an int64 array) after the block named `parent`."""
    return xxhash.xxh64_intdigest(int(parent).to_bytes(8, "little") + token_ids.astype("<i8").tobytes())


class BlockManager:
    """num_blocks blocks of block_size tokens; all free at the start."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_count = [0] * num_blocks
        self.free = OrderedDict.fromkeys(range(num_blocks))
        self.block_of_hash = {}
        self.hash_of_block = {}
        self.token_ids = np.zeros((num_blocks, block_size), np.int32)

    @property
    def num_free(self):
        return len(self.free)

    def match(self, hashes, token_ids):
        """The blocks that hold the longest known prefix of full blocks with these hashes; none is taken yet.

        token_ids: int32, at least len(hashes) * block_size of them.
        """
        found = []
        for i, name in enumerate(hashes):
            block = self.block_of_hash.get(name)
            here = token_ids[i * self.block_size : (i + 1) * self.block_size]
            if block is None or not np.array_equal(self.token_ids[block], here):
                break
            found.append(block)
        return found

    def num_unused(self, blocks):
        """How many of these blocks are in the free list: taking them makes it so much shorter."""
        return sum(self.ref_count[block] == 0 for block in blocks)

    def take(self, blocks):
        """One more owner for blocks that `match` found."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self.free[block]
            self.ref_count[block] += 1

    def allocate(self, count):
        """`count` blocks with one owner and no content, those freed longest ago first."""
        if count > len(self.free):
            raise ValueError(f"allocate: {count} blocks asked for, {len(self.free)} are free")
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_count[block] = 1
            self._forget(block)
        return blocks

    def release(self, blocks):
        """One owner less; a block without owners is free and keeps its content until it is handed out."""
        for block in blocks:
            if self.ref_count[block] == 0:
                raise ValueError(f"release: block {block} has no owner")
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free[block] = None

    def register(self, block, name, token_ids):
        """Say what a full, computed block holds; the first block of a name keeps it."""
        if name not in self.block_of_hash:
            self.block_of_hash[name] = block
            self.hash_of_block[block] = name
            self.token_ids[block] = token_ids

    def reset(self):
        """Forget what the blocks hold, as after a change of weights. Owners keep their blocks."""
        self.block_of_hash.clear()
        self.hash_of_block.clear()

    def _forget(self, block):
        name = self.hash_of_block.pop(block, None)
        if name is not None:
            del self.block_of_hash[name]
