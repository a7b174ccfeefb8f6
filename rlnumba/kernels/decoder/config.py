"""Constants of the persistent decoder kernel for one shape: the GEMMs of a layer, shared memory, the exchange."""

import functools
import math
from collections import namedtuple
from typing import NamedTuple

from rlnumba.kernels.nn.rmsnorm import FORWARD, share_row
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE
from rlnumba.kernels.ptx.wgmma import STEPS, WARPGROUP
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, SWIZZLE_ALIGNMENT, shared_layout

# Warps of a block: four that compute, one that loads weights, keys and values, one that prepares the exchange.
PRODUCER_WARP, WARPS = 4, 6
THREADS = 32 * WARPS
# Rows of a batch at most: wgmma broadcasts a box of eight rows of A.
MOST_ROWS = 8
# Bytes of 64 columns of A: eight rows.
PANEL_BYTES = 8 * LINE
# A stage of the ring holds panels of a weight, or a tile of K or of V.
STAGE_BYTES = 16384
# Stages at most: with ten all weights of gate and up are under way before the first of them is needed.
MOST_STAGES = 10
# Clocks between the time at which a stage is free and the load of the next weights into it. Without them these loads
# leave at the same moment as the words of the exchange, and are in their way. H200, Qwen3-0.6B's layers, us of 1 row
# and of 8: 0 clocks 516 and 664, 400 441 and 595, 500 438 and 571, 600 436 and 560, 800 447 and 567, 1,000 493, 573.
LOAD_DELAY = 600
# Panels that one chain of wgmma in a stage has at most.
MOST_STAGE_PANELS = 16
SHARED_LIMIT = 227 * 1024 - SWIZZLE_ALIGNMENT


class Phase(NamedTuple):
    """One GEMM of a layer, C (rows, n) = A (rows, k) W^T, whose tiles the blocks share.

    tile_columns: columns of C by which tiles advance; columns: rows of W that a tile reads, twice as many for gate and
    up; panels: of 64 steps of k; stage_panels: that a stage of the ring holds; blocks: of the grid.
    """

    n: int
    tile_columns: int
    columns: int
    panels: int
    stage_panels: int
    blocks: int

    @property
    def tiles(self):
        return -(-self.n // self.tile_columns)

    @property
    def local_tiles(self):
        """Tiles that a block has at most."""
        return -(-self.tiles // self.blocks)

    @property
    def rounds(self):
        """Stages of a tile."""
        return self.panels // self.stage_panels

    @property
    def stage_bytes(self):
        """Bytes of W that arrive in a stage."""
        return self.stage_panels * self.columns * LINE


def phase_of(n, k, blocks, halves=1):
    """The Phase of n columns (of gate and of up: halves = 2) whose tiles about fill so many blocks, or None."""
    # A panel of all rows of W that a tile reads fits into a stage.
    tile_columns = min(-(-n // (8 * blocks)) * 8, STAGE_BYTES // LINE // halves)
    columns, panels = tile_columns * halves, k // STEPS
    most = min(STAGE_BYTES // (columns * LINE), MOST_STAGE_PANELS)
    if n % 8 or k % STEPS:
        return None
    stage_panels = max(d for d in range(1, most + 1) if panels % d == 0)
    return Phase(n, tile_columns, columns, panels, stage_panels, blocks)


# First words of a layer's outputs among its words of the exchange, and the number of its words.
Exchange = namedtuple("Exchange", "qkv attended h activated x words")


class DecoderConfig(NamedTuple):
    """One kernel. rows: of the batch; box: keys of one TMA box, a cache block's tokens or 64; normed: whether queries
    and keys have norms; blocks: of the grid, all resident at once."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    element: str
    rows: int
    box: int
    normed: bool
    blocks: int

    @property
    def gqa_ratio(self):
        return self.heads // self.kv_heads

    @property
    def qkv_columns(self):
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def qkv(self):
        return phase_of(self.qkv_columns, self.hidden, self.blocks)

    @property
    def o(self):
        return phase_of(self.hidden, self.heads * self.head_dim, self.blocks)

    @property
    def gate_up(self):
        return phase_of(self.ffn, self.hidden, self.blocks, 2)

    @property
    def down(self):
        return phase_of(self.hidden, self.ffn, self.blocks)

    @property
    def norm_layout(self):
        """The RowLayout by which threads add up a row's squares: that of the operator rmsnorm."""
        return share_row(self.hidden, 2, 8, *FORWARD)

    @property
    def kv_boxes(self):
        """Boxes of 64 columns of a head."""
        return self.head_dim // 64

    @property
    def kv_tile_bytes(self):
        return self.kv_boxes * BOX_BYTES

    @property
    def exchange(self):
        """The Exchange: two elements a word."""
        sizes = self.qkv_columns, self.heads * self.head_dim, self.hidden, self.ffn, self.hidden
        offsets = [self.rows * sum(sizes[:i]) // 2 for i in range(len(sizes) + 1)]
        return Exchange(*offsets)

    @property
    def set_words(self):
        """Words of the exchange of one step."""
        return self.layers * self.exchange.words

    @property
    def layout(self):
        """Shared memory: A of a phase, the ring, what attention shares between its warps, the residual stream."""
        return self._layout(self.stages)

    @property
    def stages(self):
        """Stages of the ring: as many as shared memory has room for."""
        free = SHARED_LIMIT - self._layout(0).nbytes
        return min(free // (STAGE_BYTES + 2 * MBARRIER_BYTES), MOST_STAGES)

    def _layout(self, stages):
        panels = max(self.hidden, self.heads * self.head_dim, self.ffn) // STEPS
        barriers = stages * MBARRIER_BYTES
        return shared_layout(
            a=panels * PANEL_BYTES, ring=stages * STAGE_BYTES, q=self.kv_boxes * PANEL_BYTES, p=PANEL_BYTES,
            row_max=2 * 4 * 8 * 4, row_sum=4 * 8 * 8 * 4, residual=self.o.local_tiles * self.o.tile_columns * 32,
            squares=4 * MOST_ROWS * 4, full=barriers, empty=barriers,
        )  # fmt: skip


@functools.cache
def is_supported(config):
    """Whether the kernel can compute this shape."""
    shares = config.hidden, config.heads * config.head_dim, config.ffn, config.qkv_columns
    return (
        config.head_dim in (64, 128)
        and config.element in ("bfloat16", "float16")
        and config.rows <= MOST_ROWS
        and config.heads % config.kv_heads == 0
        and config.gqa_ratio + 2 <= WARPGROUP // (config.head_dim // 16)
        and config.gqa_ratio <= 8
        and config.norm_layout.threads <= WARPGROUP
        and all(share % STEPS == 0 for share in shares)
        and None not in (config.qkv, config.o, config.gate_up, config.down)
        and config.stages >= 4
        and math.prod((2, config.set_words)) < 1 << 31
    )
