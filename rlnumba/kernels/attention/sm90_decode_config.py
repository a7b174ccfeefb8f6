"""What the warps of decode on sm_90 share: constants, the layout of shared memory, bundles of arguments."""

from collections import namedtuple
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.scheduler import ITEM_COLUMNS
from rlnumba.kernels.attention.sm90_forward import SHARED_LIMIT, WARPGROUP
from rlnumba.kernels.attention.softmax import SEGMENT_KEYS
from rlnumba.kernels.ptx.pipeline import MBARRIER_BYTES, shared_layout
from rlnumba.kernels.ptx.sm90 import BOX_BYTES, LINE

i32, f32 = np.int32, np.float32

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
# What warp 0 adds to an item's columns: the key head, and whether the item resumes its group's partial.
KEY_HEAD, RESUMES_PARTIAL = ITEM_COLUMNS, ITEM_COLUMNS + 1
ITEM_FIELDS = ITEM_COLUMNS + 2


class DecodeConfig(NamedTuple):
    """One kernel. rows: columns of S^T, a multiple of 8; box: keys of one TMA box, a cache block's tokens or 64.

    stages: of the ring of K and V; blocks: of an SM; grouped: groups read the segments of a shared prefix once.
    """

    head_dim: int
    element: str
    rows: int = 8
    box: int = 16
    stages: int = 3
    blocks: int = 2
    grouped: bool = False
    segment: int = SEGMENT_KEYS

    @property
    def max_leading(self):
        """Most segments of a sequence's first item: several where a thread has registers for their total."""
        return {8: 4, 16: 2}.get(self.rows, 1)

    @property
    def resumes(self):
        """Whether a sequence's own item may resume its group's partial, which takes the registers of a total."""
        return self.grouped and self.max_leading > 1

    @property
    def moves_registers(self):
        """Whether warpgroup 1 gives registers to warpgroup 0: 128 for each are enough for 8 rows."""
        return self.blocks > 1 and self.rows > 8

    @property
    def boxes(self):
        """128-byte lines that a row of q, k or v takes."""
        return -(-self.head_dim // 64)

    @property
    def tile_bytes(self):
        """Of 64 rows of K or V in shared memory."""
        return self.boxes * BOX_BYTES

    @property
    def q_bytes(self):
        """Of the query rows of a work item in shared memory."""
        return self.boxes * self.rows * LINE

    @property
    def layout(self):
        """Shared memory. The computing warps exchange row_max, twice for alternating tiles, row_sum, and P^T."""
        barriers = self.stages * MBARRIER_BYTES
        return shared_layout(
            kv=2 * self.stages * self.tile_bytes, q=Q_SLOTS * self.q_bytes, p=self.rows * LINE,
            row_max=4 * self.rows * 4, row_result=4 * self.rows * 4, row_sum=4 * 8 * self.rows * 4,
            full=barriers, empty=barriers, q_full=Q_SLOTS * MBARRIER_BYTES, q_empty=Q_SLOTS * MBARRIER_BYTES,
            work_ready=WORK_INDICES * MBARRIER_BYTES, merge_full=MERGE_SLOTS * MBARRIER_BYTES,
            merge_empty=MERGE_SLOTS * MBARRIER_BYTES,
        )  # fmt: skip


def decode_config(head_dim, element, gqa_ratio, box, group_size=1):
    """The DecodeConfig for heads of this size, gqa_ratio query heads of a key head, groups of up to group_size."""
    rows = -(-gqa_ratio * group_size // 8) * 8
    config = DecodeConfig(head_dim, element, rows, box, 2, grouped=group_size > 1)
    for blocks in (2, 1):
        free = SHARED_LIMIT // blocks - 1536 - config.layout.nbytes
        stages = free // (2 * config.tile_bytes + 16) + config.stages
        if stages >= 2:
            break
    return config._replace(stages=min(stages, 4), blocks=blocks)


# Arguments that the warps share; tokens: query tokens of a TMA box of q.
Batch = namedtuple(
    "Batch", "context_lens shared_prefix_lens items heads kv_heads gqa_ratio tokens max_leading counters"
)
# Static shared memory: (Q_SLOTS, ITEM_FIELDS), (WORK_INDICES,), (MERGE_SLOTS, MERGE_FIELDS) int32.
Queues = namedtuple("Queues", "items work_indices merges")
# A work item as warp 0 publishes it: the columns of scheduler.py's list, and what ITEM_FIELDS adds.
DecodeItem = namedtuple(
    "DecodeItem",
    "tiles sequence split first_key start length context_len group_size splits kv_head resumes_partial",
)
