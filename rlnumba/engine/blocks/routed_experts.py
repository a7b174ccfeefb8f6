"""The experts that computed each token of the cache, which training replays where its weights are others.

They are in memory of the host that kernels write, a place for each token of each block of the cache: so a sequence
whose prefix is found has them, too, and reading them copies nothing and waits for nothing: a step's tokens are known
only once it has written its own. Two bytes a choice: 48 mixtures with 8 experts a token take 768 bytes a token.
"""

import numpy as np

from rlnumba.model.blocks.block import ExpertRecords
from rlnumba.runtime import memory


class RoutedExperts:
    """The records of a cache's blocks. config: a ModelConfig with mixtures; block_size: of the cache."""

    def __init__(self, config, block_size):
        self.layers, self.top_k, self.block_size = config.mixture_layers, config.num_experts_per_tok, block_size
        self.host = self.on_device = np.empty((len(self.layers), 0, self.top_k), np.int16)

    def grow(self, num_blocks):
        """Have places for num_blocks blocks, with the content of those there are."""
        old, count = self.host, num_blocks * self.block_size
        if count > old.shape[1]:
            shape = len(self.layers), count, self.top_k
            self.host, self.on_device = memory.shared_with_host(shape, np.int16)
            self.host[:, : old.shape[1]] = old

    def of_step(self, slots):
        """The ExpertRecords of a step's tokens. slots (N,) int32, on the device."""
        return ExpertRecords(slots, dict(zip(self.layers, self.on_device, strict=True)))

    def keep(self, sequence, blocks, num_computed):
        """Give a sequence the experts of its tokens up to num_computed, of those of which it has none yet.

        What it has already is of the weights that its tokens were drawn from; its blocks may have been computed again.
        """
        known = sequence.routed_experts
        begin = 0 if known is None else len(known)
        positions = np.arange(begin, max(num_computed, begin))
        places = blocks[positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        # Tokens first, and a copy: the blocks are going to be others'.
        new = np.ascontiguousarray(self.host[:, places].swapaxes(0, 1))
        sequence.routed_experts = new if known is None else np.concatenate([known, new])
