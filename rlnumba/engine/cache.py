"""The KV cache's memory, which training may use between rollouts.

It is kept where there is enough for both, and lent (runtime/memory.py): an allocation of the trainer's that would fail
takes as much of it as it lacks. On the GPU its addresses are fixed (runtime/mapped_memory.py), so that captured graphs
stay valid when the memory is mapped again.
"""

import weakref

import numpy as np

from rlnumba.runtime import device, memory
from rlnumba.runtime.mapped_memory import MappedMemory

REGION = "kv"


class KVCache:
    """k and v: (layers, num_blocks, block_size, HK, E) of `dtype`; None before `take` and after `give_back`.

    Raises OutOfMemory from `take` when the GPU has not enough memory left.
    """

    def __init__(self, config, num_blocks, block_size, dtype):
        heads = config.num_key_value_heads, config.head_dim
        self.shape = (config.num_hidden_layers, num_blocks, block_size, *heads)
        self.dtype = np.dtype(dtype)
        self.k = self.v = None
        self.memory = MappedMemory(REGION, self.nbytes) if device.name() == "cuda" else None

    @property
    def num_blocks(self):
        return self.shape[1]

    @property
    def nbytes(self):
        return 2 * int(np.prod(self.shape)) * self.dtype.itemsize

    def take(self):
        """Allocate the memory, or end `lend`; its content is undefined."""
        memory.take_back(self)
        if self.k is not None:
            return
        if self.memory is None:
            # Pages of zeros take no physical memory until they are written.
            self.k, self.v = np.zeros(self.shape, self.dtype), np.zeros(self.shape, self.dtype)
            memory.track(REGION, self.nbytes)
            self.untrack = weakref.finalize(self, memory.track, REGION, -self.nbytes)
        else:
            self.memory.take(self.nbytes, remedy="lower engine.gpu_memory_utilization")
            self.k = self.memory.array(self.shape, self.dtype, 0)
            self.v = self.memory.array(self.shape, self.dtype, self.nbytes // 2)

    def lend(self):
        """Keep the memory until an allocation elsewhere needs it; its content is not needed any more."""
        if self.k is not None:
            memory.lend(self)

    def reclaim(self, nbytes):
        """Pieces of the memory, or all of it, for an allocation that needs them: see memory.lend."""
        if self.memory is None:
            self.give_back()
            return []
        self.k = self.v = None
        return self.memory.reclaim(nbytes)

    def give_back(self):
        """Free the memory; the addresses stay reserved."""
        memory.take_back(self)
        is_there, self.k, self.v = self.k is not None, None, None
        if self.memory is not None:
            self.memory.give_back()
        elif is_there:
            self.untrack()

    def grow(self, num_blocks):
        """Have num_blocks blocks, with the content of those there are. Not on the GPU, where addresses are fixed."""
        k, v, old_blocks = self.k, self.v, self.num_blocks
        self.give_back()
        self.shape = (self.shape[0], num_blocks, *self.shape[2:])
        if k is not None:
            self.take()
            self.k[:, :old_blocks], self.v[:, :old_blocks] = k, v
