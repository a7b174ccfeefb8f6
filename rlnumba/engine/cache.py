"""The KV cache's memory, which training may use between rollouts.

    one block       block_size tokens of a sequence, in every layer that keeps something of them
    a pool          the arrays of the layers whose blocks keep the same: k and v (layers, num_blocks, block_size, HK, E)
    one place       a block in the pools of the layers with a window, which have num_places (blocks/window_blocks.py)
    one page        a state of linear attention at a block's end (layers, num_pages, ...)
    one slot        what linear attention has of a running sequence's last tokens (layers, num_slots, ...)

The blocks of a model say what each of them keeps (model/blocks/block.py: cache_entry, page_entry, slot_entry); a block
of the cache has the same number in all pools without windows, so that one BlockManager allocates for all, RowWindows
for those with windows (blocks/row_windows.py), StatePages for pages (blocks/state_pages.py), and a slot has the number
of its row in the table of running sequences.

The memory is kept where there is enough for both, and lent (runtime/memory.py): an allocation of the trainer's that
would fail takes as much of it as it lacks. On the GPU its addresses are fixed (runtime/mapped_memory.py), so that
captured graphs stay valid when the memory is mapped again.
"""

import math
import weakref
from typing import NamedTuple

import numpy as np

from rlnumba.engine.blocks.state_pages import num_pages_for
from rlnumba.engine.blocks.window_blocks import most_places_of
from rlnumba.errors import UserError
from rlnumba.runtime import device, memory
from rlnumba.runtime.mapped_memory import MappedMemory

REGION = "kv"


# Each array begins at a multiple of so many bytes.
ALIGNMENT = 256


class Pool(NamedTuple):
    """The layers that keep the same CacheArrays of a block of block_size tokens, or of a slot, and these.

    has_window: whether they keep the blocks of a window alone.
    """

    entry: tuple
    layers: tuple
    has_window: bool = False

    def shapes(self, count):
        """[(shape, dtype)] of the arrays of so many blocks or slots."""
        return [((len(self.layers), count, *array.shape), np.dtype(array.dtype)) for array in self.entry]

    @property
    def block_bytes(self):
        """Bytes of one block or slot, in all of the layers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(1))


def pools_of(config, block_size, dtype):
    """The Pools of a model's cache, in the order of their first layers: list."""
    return _pools(config, lambda block: block.cache_entry(config, block_size, np.dtype(dtype)), config.window_of)


def page_pools_of(config, dtype):
    """The Pools of a page, as pools_of."""
    return _pools(config, lambda block: block.page_entry(config, np.dtype(dtype)))


def slot_pools_of(config, dtype, verified=1):
    """The Pools of a slot, as pools_of. verified: as Block.slot_entry takes it."""
    return _pools(config, lambda block: block.slot_entry(config, np.dtype(dtype), verified))


def _pools(config, entry_of, window_of=lambda layer: 0):
    layers = {}
    for block in (block for blocks in config.blocks for block in blocks):
        if entry := entry_of(block):
            layers.setdefault((type(block), entry, window_of(block.layer) > 0), []).append(block.layer)
    return [Pool(entry, tuple(of_entry), has_window) for (_, entry, has_window), of_entry in layers.items()]


def state_bytes_of(config, num_slots, dtype, verified=1):
    """Bytes of the slots of so many sequences and of the pages that belong to these."""
    slots, pages = slot_pools_of(config, dtype, verified), page_pools_of(config, dtype)
    counts = (num_slots, slots), (num_pages_for(num_slots), pages)
    return sum(_nbytes(*each) for count, pools in counts for pool in pools for each in pool.shapes(count))


def _nbytes(shape, dtype):
    """Bytes of an array, up to where the next one may begin."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def block_bytes_of(config, block_size, dtype):
    """Bytes of one block in all pools."""
    return sum(pool.block_bytes for pool in pools_of(config, block_size, dtype))


class BlockSizes(NamedTuple):
    """Bytes of a block in all pools, and in those with a window, which never need more than most_places.

    most_places: 0 where all pools have all blocks.
    """

    block_bytes: int
    window_bytes: int
    most_places: int

    @classmethod
    def of(cls, config, block_size, dtype, num_rows, tokens):
        """Those of a model whose steps have up to so many sequences and tokens, with those to come.

        Raises UserError for a model without keys and values.
        """
        if not (block_bytes := block_bytes_of(config, block_size, dtype)):
            raise UserError(f"a {config.model_type} model without a full_attention layer cannot generate")
        window_bytes = sum(pool.block_bytes for pool in pools_of(config, block_size, dtype) if pool.has_window)
        places = most_places_of(config, block_size, num_rows, tokens)
        return cls(block_bytes, window_bytes if places else 0, places)

    def places_of(self, num_blocks):
        """The places of a cache of num_blocks; None without windows."""
        return min(num_blocks, self.most_places) if self.most_places else None

    def blocks_in(self, nbytes):
        """The number of blocks that so many bytes hold with their places."""
        if not self.most_places or nbytes <= self.most_places * self.block_bytes:
            return nbytes // self.block_bytes
        return (nbytes - self.most_places * self.window_bytes) // max(self.block_bytes - self.window_bytes, 1)

    def nbytes(self, num_blocks):
        """Bytes of num_blocks blocks and their places."""
        shared = num_blocks * (self.block_bytes - self.window_bytes)
        return shared + (self.places_of(num_blocks) or 0) * self.window_bytes


class KVCache:
    """The memory of a model's cache. arrays: those of all Pools, (layers, num_blocks, ...) each; None before `take`
    and after `give_back`.

    layers[i]: the views of layer i, (num_blocks, ...) each, in the order of the entry; pages[i] and slots[i]: those of
    its pages and slots, (num_pages, ...) and (num_slots, ...) each, {} without. num_places: blocks of the pools with a
    window, None for num_blocks. Raises OutOfMemory from `take` when the GPU has not enough memory left.
    """

    def __init__(self, config, num_blocks, block_size, dtype, num_slots=0, num_pages=0, verified=1, num_places=None):
        self.pools = pools_of(config, block_size, dtype)
        self.page_pools, self.slot_pools = page_pools_of(config, dtype), slot_pools_of(config, dtype, verified)
        self.num_blocks, self.block_size, self.num_slots, self.num_pages = num_blocks, block_size, num_slots, num_pages
        self.num_places = num_places
        self.arrays = self.layers = self.pages = self.slots = None
        self.memory = MappedMemory(REGION, self.nbytes) if device.name() == "cuda" else None

    @property
    def nbytes(self):
        return sum(_nbytes(*each) for each in self._shapes())

    def _shapes(self):
        """[(shape, dtype)] of all arrays."""
        places = self.num_blocks if self.num_places is None else self.num_places
        shapes = [each for pool in self.pools for each in pool.shapes(places if pool.has_window else self.num_blocks)]
        counts = (self.num_pages, self.page_pools), (self.num_slots, self.slot_pools)
        return shapes + [each for count, pools in counts for pool in pools for each in pool.shapes(count)]

    def take(self):
        """Allocate the memory, or end `lend`; its content is undefined."""
        memory.take_back(self)
        if self.arrays is not None:
            return
        shapes = self._shapes()
        if self.memory is None:
            # Pages of zeros take no physical memory until they are written.
            self._set([np.zeros(shape, dtype) for shape, dtype in shapes])
            memory.track(REGION, self.nbytes)
            self.untrack = weakref.finalize(self, memory.track, REGION, -self.nbytes)
        else:
            self.memory.take(self.nbytes, remedy="lower engine.gpu_memory_utilization")
            arrays, offset = [], 0
            for shape, dtype in shapes:
                arrays.append(self.memory.array(shape, dtype, offset))
                offset += _nbytes(shape, dtype)
            self._set(arrays)

    def _set(self, arrays):
        """Take the arrays of all pools, or None."""
        self.arrays = self.layers = self.pages = self.slots = None
        if arrays is not None:
            remaining = iter(arrays)
            self.arrays = arrays
            all_pools = self.pools, self.page_pools, self.slot_pools
            self.layers, self.pages, self.slots = (self._views(pools, remaining) for pools in all_pools)

    def _views(self, pools, arrays):
        """{layer: its part of each array of its pool}; arrays: an iterator over those of the pools."""
        of_pools = [(pool, [next(arrays) for _ in pool.entry]) for pool in pools]
        return {
            layer: tuple(array[place] for array in of_pool)
            for pool, of_pool in of_pools
            for place, layer in enumerate(pool.layers)
        }

    def lend(self):
        """Keep the memory until an allocation elsewhere needs it; its content is not needed any more."""
        if self.arrays is not None:
            memory.lend(self)

    def reclaim(self, nbytes):
        """Pieces of the memory, or all of it, for an allocation that needs them: see memory.lend."""
        if self.memory is None:
            self.give_back()
            return []
        self._set(None)
        return self.memory.reclaim(nbytes)

    def give_back(self):
        """Free the memory; the addresses stay reserved."""
        memory.take_back(self)
        is_there = self.arrays is not None
        self._set(None)
        if self.memory is not None:
            self.memory.give_back()
        elif is_there:
            self.untrack()

    def grow(self, num_blocks, num_places=None):
        """Have num_blocks blocks and num_places, with the content of those there are.

        Not on the GPU, where addresses are fixed.
        """
        before = self.arrays
        self.give_back()
        self.num_blocks, self.num_places = num_blocks, num_places
        if before is not None:
            self.take()
            for array, old in zip(self.arrays, before, strict=True):
                array[:, : old.shape[1]] = old
