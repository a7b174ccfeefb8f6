"""The part of a model that one rank of tensor-parallel inference has: rows of its weights, so columns of outputs.

    embedding, norms, score head    whole
    qkv, and the KV cache           of the rank's heads
    in_proj of linear attention     of the rank's key heads with their value heads; so its convolution, gates, states
    gate_up                         the rank's rows of gate, then those of up; of each expert, too
    o, out_proj, down               the rank's rows: its columns of the residual stream
    lm_head                         the rank's tiles of the vocabulary
    an adapter                      A whole, of B the rows of its projection that the rank has

A GEMM adds up each output along K, in an order that other rows of the weight have no part in. So an output has the bits
that it has where one rank computes all of them; cutting K instead would add up partial sums in another order.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from rlnumba.errors import ConfigError
from rlnumba.kernels.nn.row_sum import TILE_COLUMNS

# A size of config.json that is cut into equal parts beside those of the blocks: columns of the residual stream.
STREAM = "hidden_size"
# On a GPU a part is a multiple of so many columns: whole tiles of GEMMs, of the same kernels as the whole model's.
GPU_COLUMNS = 64


class Range(NamedTuple):
    """`count` elements, from `first` on in a shard's flat buffer and from `source` on in the whole model's."""

    first: int
    source: int
    count: int


class Columns(NamedTuple):
    """The columns, of `total`, that each rank has: rank r those from start(r) to start(r + 1), in the ranks' order.

    start(r) = r width + min(r, longer) extra, but at most total.
    """

    width: int
    longer: int
    extra: int
    total: int

    @staticmethod
    def equal(total, count):
        """The same number for each of `count` ranks, which divides the total."""
        return Columns(total // count, 0, 0, total)

    def of(self, rank):
        """The columns of a rank: a slice."""
        return slice(*(min(r * self.width + min(r, self.longer) * self.extra, self.total) for r in (rank, rank + 1)))


def vocabulary(size, count):
    """The Columns of logits that each of `count` ranks has: whole tiles, but for the vocabulary's end."""
    tiles, longer = divmod(-(-size // TILE_COLUMNS), count)
    return Columns(tiles * TILE_COLUMNS, longer, TILE_COLUMNS, size)


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `count`; Shard() is a whole model."""

    rank: int = 0
    count: int = 1

    def check(self, config, on_gpu=False):
        """Raise ConfigError, naming both, if a size of a ModelConfig is not a multiple of the number of ranks.

        on_gpu: whether parts must be multiples of GPU_COLUMNS.
        """
        for name in (*_sizes_of_blocks(config), STREAM):
            if getattr(config, name) % self.count:
                raise ConfigError(
                    f"tensor_parallel_size {self.count} must divide the model's {name} {getattr(config, name)}"
                )
        columns = {STREAM: config.hidden_size}
        for block in _blocks(config):
            columns |= block.gpu_columns(config)
        for name, total in columns.items() if on_gpu else ():
            if total // self.count % GPU_COLUMNS:
                raise ConfigError(
                    f"tensor_parallel_size {self.count} on GPUs: the model's {name} {total} must be a multiple of "
                    f"{self.count} x {GPU_COLUMNS}"
                )

    def config_of(self, config):
        """The ModelConfig of this part of a whole model: the sizes that its blocks cut."""
        return replace(config, **{name: getattr(config, name) // self.count for name in _sizes_of_blocks(config)})

    def all_rows(self, count):
        """The rows that this part has of a tensor that is not cut: a slice, of all."""
        return slice(0, count)

    def own_rows(self, count):
        """The rows that this part has of a tensor that is cut into equal parts: a slice."""
        own = count // self.count
        return slice(self.rank * own, (self.rank + 1) * own)

    def tokens(self, vocab_size):
        """The ids whose logits this part computes: a slice, of whole tiles but for the vocabulary's end."""
        return vocabulary(vocab_size, self.count).of(self.rank)


WHOLE = Shard()


def _blocks(config):
    return [block for blocks in config.blocks for block in blocks]


def _sizes_of_blocks(config):
    """The names of the sizes that a model's blocks cut, each once."""
    return list(dict.fromkeys(name for block in _blocks(config) for name in block.CUT))
