"""The constants of the sm90 kernels of attention's gradient, and their shared memory; see sm90_backward.py."""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.pipeline import MBARRIER_BYTES, shared_layout
from rlnumba.kernels.ptx.shared_memory import LINE

WARPGROUP = 128
# Queries of a step; bytes of a TMA box of them, of their lse or delta, and of what they exchange with the block's keys.
QUERIES = 64
QUERY_BOX = QUERIES * LINE
ROW_BYTES = 4 * QUERIES
SCORE_BYTES = 2 * QUERIES * 128
LOG2_E = np.float32(math.log2(math.e))


class AttentionBackwardConfig(NamedTuple):
    """The constants of the kernels. element: "float16" or "bfloat16".

    prefetch_scores: S^T of the next step is started before the wait for dq of this one (heads up to 128). chains: how
    many KV heads of sequences are worked on at the same time; on 132 SMs, 32 of them means four blocks of each.
    """

    head_dim: int
    element: str
    prefetch_scores: bool = True
    chains: int = 32

    @property
    def wide(self):
        """Whether the consumers share the keys, half of the columns each: their registers hold no more."""
        return self.head_dim > 128

    @property
    def keys(self):
        """Keys of a block."""
        return 64 if self.wide else 128

    @property
    def columns(self):
        """Columns that the GEMMs see; zeros beyond head_dim."""
        return -(-self.head_dim // 16) * 16

    @property
    def boxes(self):
        """TMA boxes of 64 columns that a row takes."""
        return 4 if self.wide else -(-self.columns // 64)

    @property
    def q_stages(self):
        return 2 if self.wide else 4 // self.boxes

    @property
    def dout_stages(self):
        return 1 if self.wide else self.q_stages

    @property
    def dq_parts(self):
        """In how many parts a step's dq is added; a part is two boxes of columns, or one."""
        return 2 if self.wide else 1

    @property
    def dq_columns(self):
        """Columns of a part that a consumer computes: one of two boxes, or half of the only one."""
        return 64 if self.boxes > 1 else self.columns // 2

    @property
    def dq_part_size(self):
        """Elements of a part of dq: the first consumer's, then the second's."""
        return 2 * QUERIES * self.dq_columns

    @property
    def shared_bytes(self):
        return layout(self).nbytes


@functools.cache
def layout(config):
    """The shared memory of the kernel of dk, dv and the sums of dq.

    k, v [box | key]; for each stage q, dout [box | query]; two buffers of ds [key], or of [P | dS]; a part of dq; for
    each stage lse and delta of its rows; mbarriers: of each stage, and two for dq_full.
    """
    kv_bytes, query_bytes = config.boxes * config.keys * LINE, config.boxes * QUERY_BOX
    q_stages, dout_stages = config.q_stages, config.dout_stages
    return shared_layout(
        k=kv_bytes,
        v=kv_bytes,
        q=q_stages * query_bytes,
        dout=dout_stages * query_bytes,
        ds=2 * SCORE_BYTES,
        dq=4 * config.dq_part_size,
        lse=q_stages * ROW_BYTES,
        delta=dout_stages * ROW_BYTES,
        k_full=MBARRIER_BYTES,
        v_full=MBARRIER_BYTES,
        q_full=q_stages * MBARRIER_BYTES,
        q_empty=q_stages * MBARRIER_BYTES,
        dout_full=dout_stages * MBARRIER_BYTES,
        dout_empty=dout_stages * MBARRIER_BYTES,
        dq_full=2 * MBARRIER_BYTES,
        dq_empty=MBARRIER_BYTES,
    )
