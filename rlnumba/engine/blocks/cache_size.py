"""The number of blocks of the cache: as many as fit into the GPU's memory, or as the unfinished requests need."""

from rlnumba.engine.blocks.block_manager import blocks_needed
from rlnumba.errors import DeviceError
from rlnumba.runtime import device, memory

# vLLM's default; small blocks waste little and a prompt's tail, computed again by each of its completions, is short.
BLOCK_SIZE = 16
# The CPU's cache is as large as the requests need, but not larger than this unless one sequence needs it.
CPU_CACHE_BYTES = 1 << 30
# Left to the driver and to what allocates outside of the plan.
GPU_MARGIN_BYTES = 512 << 20


def _blocks_wanted_by(sequence):
    """The blocks that the cache is to have for a sequence: one more than it needs, so that admission finds its reserve;
    for a turn of an episode as many again, because half of the cache may be retained."""
    return (blocks_needed(sequence.length_limit, BLOCK_SIZE) + 1) * (2 if sequence.retains_blocks else 1)


class CacheSize:
    """The size of an engine's cache. model, runner, config: the engine's; max_num_seqs, max_model_len: its limits."""

    def __init__(self, model, runner, config, max_num_seqs, max_model_len):
        self.model, self.runner, self.config = model, runner, config
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.clear()

    def clear(self):
        """Begin with no sequences."""
        # Blocks that the unfinished sequences need together, and the most that one of them has needed.
        self.blocks_wanted = self.most_blocks = 0

    def add(self, sequence):
        """Count a sequence that begins."""
        self.blocks_wanted += _blocks_wanted_by(sequence)
        self.most_blocks = max(self.most_blocks, blocks_needed(sequence.length_limit, BLOCK_SIZE))

    def remove(self, sequence):
        """Count a sequence, which was added, no more."""
        self.blocks_wanted -= _blocks_wanted_by(sequence)

    def for_requests(self):
        """The number of blocks of a cache that grows: what the next step needs, and what can be used later, too."""
        wanted = min(self.blocks_wanted, self.max_num_seqs * (self.most_blocks + 1))
        return max(self.most_blocks, min(wanted, self.runner.sizes.blocks_in(CPU_CACHE_BYTES)))

    def of_gpu(self):
        """The number of blocks that fit into the engine's share of the GPU's memory beside all else of the engine."""
        num_blocks = self.config.num_gpu_blocks_override
        if num_blocks is not None:
            self.runner.reserve_workspace(num_blocks * BLOCK_SIZE)
            return num_blocks
        self.runner.reserve_activations()
        # Before the cache: it grows with the longest sequence that the cache can hold.
        workspace = self.runner.reserve_workspace(self._beside(0) * BLOCK_SIZE)
        most = self.max_num_seqs * (-(-self.max_model_len // BLOCK_SIZE) + 1)
        return min(self._beside(workspace), most)

    def _beside(self, workspace):
        """The number of blocks that fit beside weights, activations and `workspace` bytes; DeviceError if none do.

        If they are more than the longest sequence needs, they leave room for what is expected (memory.expect).
        """
        # Memory that sleeping engines have lent counts as free.
        memory.reclaim()
        device.xp().get_default_memory_pool().free_all_blocks()
        free, total = device.memory_info()
        own = self.model.nbytes + self.runner.arena.peak + workspace + memory.allocated("new weights")
        own += self.runner.state_bytes + (self.runner.copies.own_bytes if self.runner.copies is not None else 0)
        sharing = device.num_sharing_gpu()
        share = int(total * self.config.gpu_memory_utilization / sharing)
        room = min(share - own, free - GPU_MARGIN_BYTES)
        left = min(room, free - GPU_MARGIN_BYTES - memory.expected_bytes())
        num_blocks, most = self.runner.sizes.blocks_in(left), self.runner.sizes.blocks_in(room)
        # What is expected can be done without, and a sequence cannot.
        num_blocks = max(num_blocks, min(most, blocks_needed(self.max_model_len, BLOCK_SIZE)))
        if num_blocks <= 0:
            processes = f", for {sharing} processes," if sharing > 1 else ""
            raise DeviceError(
                f"engine: gpu_memory_utilization {self.config.gpu_memory_utilization} of {total / 2**30:.1f} GiB"
                f"{processes} has no room for a KV cache beside {own / 2**30:.1f} GiB of weights, activations and "
                f"attention's partial results ({free / 2**30:.1f} GiB are free)"
            )
        return num_blocks
