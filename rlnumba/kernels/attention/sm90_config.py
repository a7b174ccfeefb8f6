"""The constants of attention on sm_90, and their choice for heads of a size."""

from typing import NamedTuple

from rlnumba.kernels.attention import softmax
from rlnumba.kernels.attention.sequences import PREFIX_MULTIPLE
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES
from rlnumba.kernels.ptx.warp import PTX_TYPES
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, shared_layout

# Query rows of a consumer's tile.
TILE_ROWS = 64
# Most query rows of a work item of decode: more take more registers than a thread has.
MAX_DECODE_ROWS = 32
# Shared memory that a block may use.
SHARED_LIMIT = 227 * 1024 - 64


class AttentionConfig(NamedTuple):
    """One kernel. element: "float16" or "bfloat16"; consumers: warpgroups; stages: of the rings of K and of V.

    paired: the two consumers take two query heads, else neighbouring tokens. paged: keys lie in the blocks of a cache.
    box: keys of one TMA box, a cache block's tokens or 64. segment: SEGMENT_KEYS, smaller in tests. window: of
    sequences.py, with one segment. prefixes: packed sequences may have PackedPrefixes, boxes of PREFIX_MULTIPLE keys.
    nested: parents may have parents.
    """

    head_dim: int
    element: str
    consumers: int = 2
    stages: int = 3
    paired: bool = True
    paged: bool = False
    box: int = softmax.TILE_KEYS
    segment: int = softmax.SEGMENT_KEYS
    window: int = 0
    prefixes: bool = False
    nested: bool = False

    def with_window(self, window):
        """This config for a window, or for none."""
        return self._replace(window=window, segment=softmax.ONE_SEGMENT) if window else self

    def with_prefixes(self, prefixes):
        """This config for PackedPrefixes, or for None."""
        if prefixes is None:
            return self
        return self._replace(prefixes=True, box=PREFIX_MULTIPLE, nested=prefixes.levels > 2)

    @property
    def item_tokens(self):
        return TILE_ROWS if self.paired else TILE_ROWS * self.consumers

    @property
    def boxes(self):
        """128-byte lines that a row of q, k or v takes."""
        return -(-self.head_dim // 64)

    @property
    def tile_bytes(self):
        """Bytes of 64 rows of q, k or v in shared memory."""
        return self.boxes * BOX_BYTES

    @property
    def q_in_registers(self):
        """More columns leave no registers for q."""
        return self.head_dim <= 128

    @property
    def merged_bytes(self):
        """Bytes of a consumer's accumulators merged over the segments; its tile of out later takes their space."""
        return max(self.head_dim * TILE_ROWS * 4, self.tile_bytes)

    @property
    def layout(self):
        """Shared memory: q, merged accumulators, the rings of K and V, their barriers."""
        tiles, barriers = self.stages * self.tile_bytes, self.stages * MBARRIER_BYTES
        return shared_layout(
            q=self.consumers * self.tile_bytes, merged=self.consumers * self.merged_bytes, k=tiles, v=tiles,
            q_full=MBARRIER_BYTES, q_empty=MBARRIER_BYTES,
            k_full=barriers, k_empty=barriers, v_full=barriers, v_empty=barriers,
        )  # fmt: skip


def is_supported(element, head_dim, gqa_ratio):
    """Whether the sm90 kernels take such heads: 16-bit, of 16, 24, ... or 256 columns, not too many a KV head."""
    return element in PTX_TYPES and head_dim % 8 == 0 and 16 <= head_dim <= 256 and gqa_ratio <= MAX_DECODE_ROWS


def attention_config(head_dim, element, gqa_ratio, paged=False, box=softmax.TILE_KEYS):
    """The AttentionConfig for heads of this size; gqa_ratio: query heads of a key head."""
    consumers = 2 if head_dim <= 128 else 1
    config = AttentionConfig(head_dim, element, consumers, 2, gqa_ratio % 2 == 0 or head_dim > 128, paged, box)
    stages = (SHARED_LIMIT - config.layout.nbytes) // (2 * (config.tile_bytes + 16)) + config.stages
    return config._replace(stages=min(stages, 4))
