"""The constants of decode on sm_90, and what its warps share: see kernel.py."""

from collections import namedtuple
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention import softmax
from rlnumba.kernels.attention.scheduler import ITEM_COLUMNS, most_leading_segments
from rlnumba.kernels.attention.sm90_config import SHARED_LIMIT, AttentionConfig
from rlnumba.kernels.ptx import shared_memory
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, SWIZZLE_ALIGNMENT, shared_layout

# Warpgroup 0 computes, warpgroup 1 loads and merges.
THREADS = 2 * WARPGROUP
# Work items whose queries may be in shared memory: the one that is computed, and the next.
Q_SLOTS = 2
# Work indices that warp 0 may have drawn before warp 1 reads the first of them: see next_work_index.
WORK_INDICES = 4
# Work items with partials that wait for the merging warp, and what it reads of each: sequence (-1: there is nothing
# more), key head, first query token, sequences, query rows of each.
MERGE_SLOTS, MERGE_FIELDS = 2, 5
# Registers of a thread of the warps that load and merge, and of one that computes, where 128 each are not enough.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 88, 168
# Stages of a block at most: more were no faster.
MOST_STAGES = 4
# Fields that warp 0 adds to an item's columns: the key head, and whether the item resumes its group's partial. If q
# comes from qkv, warp 3 of warpgroup 1 adds whether the new token's key and value do so, too.
KEY_HEAD, RESUMES_PARTIAL, NEW_TOKEN = ITEM_COLUMNS, ITEM_COLUMNS + 1, ITEM_COLUMNS + 2
ITEM_FIELDS = ITEM_COLUMNS + 3
# Bytes behind the queries of an item, if q comes from qkv: a line for each 64 columns of the new token's key,
# then those of its value. Rounded up, for heads of 256 columns, so that queries stay aligned.
NEW_TOKEN_BYTES = SWIZZLE_ALIGNMENT


class DecodeConfig(NamedTuple):
    """One kernel. rows: columns of S^T, a multiple of 8; box: keys of one TMA box, a cache block's tokens or 64.

    stages: of the ring of K and V; blocks: of an SM; grouped: groups read the segments of a shared prefix once.
    fused_qkv: queries are made from qkv (qkv.py). window: of sequences.py; segment is then no part of the arithmetic.
    """

    head_dim: int
    element: str
    rows: int = 8
    box: int = 16
    stages: int = 3
    blocks: int = 2
    grouped: bool = False
    segment: int = softmax.SEGMENT_KEYS
    fused_qkv: bool = False
    window: int = 0

    @property
    def max_leading(self):
        """Most segments of a sequence's first item, by most_leading_segments."""
        return 1 if self.window else most_leading_segments(self.rows)

    @property
    def several(self):
        """Whether an item may have more keys than a segment, whose rows of the cache are looked up together."""
        return self.max_leading > 1 or 0 < self.window and self.window + 2 * softmax.TILE_KEYS > self.segment

    @property
    def resumes(self):
        """Whether a sequence's own item may resume its group's partial, which takes the registers of a total."""
        return self.grouped and self.max_leading > 1

    @property
    def lookups(self):
        """Cache rows that a lane of a producer looks up for a segment."""
        return -(-self.segment // (self.box * 32))

    boxes, tile_bytes = AttentionConfig.boxes, AttentionConfig.tile_bytes

    @property
    def q_bytes(self):
        """Bytes of the query rows of a work item in shared memory, and of the new token's key and value."""
        return self.boxes * self.rows * shared_memory.LINE + (NEW_TOKEN_BYTES if self.fused_qkv else 0)

    @property
    def layout(self):
        """Shared memory. The computing warps exchange row_max, twice for alternating tiles, row_sum, and P^T."""
        barriers = self.stages * MBARRIER_BYTES
        return shared_layout(
            kv=2 * self.stages * self.tile_bytes, q=Q_SLOTS * self.q_bytes, p=self.rows * shared_memory.LINE,
            row_max=4 * self.rows * 4, row_result=4 * self.rows * 4, row_sum=4 * 8 * self.rows * 4,
            full=barriers, empty=barriers, q_full=Q_SLOTS * MBARRIER_BYTES, q_empty=Q_SLOTS * MBARRIER_BYTES,
            item_full=Q_SLOTS * MBARRIER_BYTES, work_ready=WORK_INDICES * MBARRIER_BYTES,
            merge_full=MERGE_SLOTS * MBARRIER_BYTES, merge_empty=MERGE_SLOTS * MBARRIER_BYTES,
        )  # fmt: skip


def decode_config(head_dim, element, gqa_ratio, box, group_size=1, tokens=1):
    """The DecodeConfig for heads of this size, gqa_ratio query heads of a key head, groups of up to group_size.

    tokens: query tokens of a sequence that fill a work item; more than 1 without groups alone.
    """
    rows = -(-gqa_ratio * max(group_size, tokens) // 8) * 8
    # Both forms have the stages of the one that takes more memory.
    config = DecodeConfig(head_dim, element, rows, box, 2, grouped=group_size > 1, fused_qkv=True)
    for blocks in (2, 1):
        free = SHARED_LIMIT // blocks - 1536 - config.layout.nbytes
        stages = free // (2 * config.tile_bytes + 16) + config.stages
        if stages >= 2:
            break
    return config._replace(stages=min(stages, MOST_STAGES), blocks=blocks, fused_qkv=False)


class DecodeBatch(NamedTuple):
    """Sequences of a step, and their work items. tokens: query tokens of a TMA box of q.

    context_lens (B,); shared_prefix_lens (B,), empty if not grouped; items: of list_work_items_kernel; counters: work
    indices drawn, blocks that are done, then the items done for each sequence and key head, all zero before and after a
    launch; max_leading: most segments of a sequence's first item.
    """

    context_lens: object
    shared_prefix_lens: object
    items: object
    counters: object
    heads: np.int32
    kv_heads: np.int32
    gqa_ratio: np.int32
    tokens: np.int32
    max_leading: np.int32


# Static shared memory: (Q_SLOTS, ITEM_FIELDS), (WORK_INDICES,), (MERGE_SLOTS, MERGE_FIELDS) int32.
Queues = namedtuple("Queues", "items work_indices merges")
# A work item as warp 0 publishes it: the columns of scheduler.py's list, and what ITEM_FIELDS adds.
ITEM = "tiles sequence split first_key start length context_len group_size splits kv_head resumes_partial new_token"
DecodeItem = namedtuple("DecodeItem", ITEM)


class Projection(NamedTuple):
    """Rows of qkv, one for each sequence, and what qkv_split_to_cache takes with them.

    qkv, the weights and the caches as arrays of halves of heads (rope.py: in_halves). Without norm, weights and eps are
    not used.
    """

    qkv: object
    q_weight: object
    k_weight: object
    eps: float
    cos: object
    sin: object
    position_ids: object
    slot_mapping: object
    k_cache: object
    v_cache: object
