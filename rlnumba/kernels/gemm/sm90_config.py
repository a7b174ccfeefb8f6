"""Constants of an sm_90 GEMM kernel, and the choice of the fastest ones for a shape."""

import functools
import math
from typing import NamedTuple

from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, SWIZZLE_ALIGNMENT, shared_layout

# Elements of a weight that is read from memory in about as long as a kernel takes to start.
SHORT_WEIGHT = 1 << 23
# Steps of the reduction whose chain of wgmma takes longer than that.
LONG_CHAIN = 4096
# Steps of a sum that takes as long as L2 takes to add it to C: 1.2 TB/s of what is added. H200, 151,936 x 1024 += 768
# steps: 555 us, and 516 where a quarter of C is loaded and stored instead; 1,536 steps: 771 and 795.
FEW_STEPS = 1024
# Columns of a wgmma, at most; those of them for a low rank, fewer than B' has in its stage, whose rest is zeros.
MOST_COLUMNS, MOST_OWN_RANK = 256, 48
# Shared memory that a block may use, less what aligning its start costs.
SHARED_LIMIT = 227 * 1024 - SWIZZLE_ALIGNMENT


class Sm90GemmConfig(NamedTuple):
    """One kernel of gemm/sm90.py.

    columns: of the accumulators of a tile; consumers: warpgroups of ROWS rows each; stages: of the ring of A and B.
    element: "float16" or "bfloat16"; a_mn, b_mn: the operand lies MN-major in memory. output: "same" as the inputs,
    "float32", or "add" to float32. bias, residual: added to C before it is rounded. swiglu: half of the columns are of
    the gate, half of what it gates; without bias and residual, output "same".
    panels: 64 steps each of the reduction in a stage; several only for one consumer and K-major operands with a
    multiple of so many steps. prefetched_columns: columns of C, of an "add", that are loaded during the main loop and
    whose sum is stored; the others are added by TMA in L2. 0, staged_columns, twice as many, or all. eight_rows: C has
    up to eight rows, and A's box as many, which wgmma broadcasts; for one consumer and a K-major A. low_rank: a second
    pair of operands of few steps follows the first, whose product is added to the accumulators. streams_b: B is read
    once, and is the first to leave L2. activation: of the gate, one of kernels/nn/swiglu.py:ACTIVATIONS. reduces: tiles
    of the kernel compute the first operand of the low rank, and own_rank, the number of its columns, a multiple of 16:
    each block computes those of its own rows beside its tile (gemm/reduction.py).
    """

    columns: int
    consumers: int
    stages: int
    element: str
    a_mn: bool = False
    b_mn: bool = False
    output: str = "same"
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    panels: int = 1
    prefetched_columns: int = 0
    eight_rows: bool = False
    low_rank: bool = False
    streams_b: bool = False
    activation: str = "silu"
    reduces: bool = False
    own_rank: int = 0

    @property
    def product_columns(self):
        """Columns of B in a stage: those of the tile, and of the adapter whose product is computed beside it."""
        return self.columns + self.own_rank

    @property
    def rows(self):
        """Rows of a tile of C."""
        return ROWS * self.consumers

    @property
    def tile_columns(self):
        """Columns by which tiles of C advance: those of a box of B."""
        return self.columns // 2 if self.swiglu else self.columns

    @property
    def box_columns(self):
        """Columns of C in a 128-byte line."""
        return 64 if self.output == "same" else 32

    @property
    def staged_columns(self):
        """Columns of C that a consumer stages in shared memory, 8 or 16 KiB at once. 0: its threads write C.

        They write the little output of eight rows sooner than TMA.
        """
        if self.tile_columns % self.box_columns or self.eight_rows and self.output == "same":
            return 0
        return 2 * self.box_columns if self.tile_columns % (2 * self.box_columns) == 0 else self.box_columns

    @property
    def steps(self):
        """Elements of the reduction that a stage holds."""
        return STEPS * self.panels

    @property
    def prefetches(self):
        """Whether TMA loads the residual, or C, during the main loop, to where the output is staged."""
        return self.prefetched_columns > 0 or self.residual and self.staged_columns > 0

    @property
    def a_bytes(self):
        """Bytes of A in a stage."""
        return self.panels * (8 if self.eight_rows else self.rows) * LINE

    @property
    def b_bytes(self):
        """Bytes of B in a stage."""
        return self.panels * self.product_columns * LINE

    @property
    def stage_bytes(self):
        return self.a_bytes + self.b_bytes

    @property
    def staged_bytes(self):
        """Bytes of a consumer's staged output."""
        columns = self.prefetched_columns or (self.columns if self.prefetches else self.staged_columns)
        return columns // self.box_columns * BOX_BYTES

    @property
    def blocks_per_sm(self):
        """Number of blocks that an SM holds at a time. Large tiles take all its registers."""
        return min(2, SHARED_LIMIT // self.layout.nbytes) if self.consumers == 1 and self.columns <= 64 else 1

    @property
    def layout(self):
        """Shared memory: stages of [A rows x 64 | B columns x 64], each consumer's staged output, the mbarriers."""
        barriers = self.stages * MBARRIER_BYTES
        return shared_layout(
            stages=self.stages * self.stage_bytes,
            staged=self.consumers * self.staged_bytes,
            full=barriers,
            empty=barriers,
            prefetched=self.consumers * MBARRIER_BYTES,
        )


def with_stages(config, most_panels, k, limit=SHARED_LIMIT):
    """The config with as many panels a stage as divide k, up to so many, and the stages that `limit` bytes hold."""
    panels = most_panels
    while panels > 1 and k % (STEPS * panels):
        panels //= 2
    config = config._replace(panels=panels, stages=2)
    stage_bytes = config.stage_bytes + 2 * MBARRIER_BYTES
    return config._replace(stages=min((limit - config.layout.nbytes) // stage_bytes + 2, 16))


def few_rows_config(m, n, k, sm_count, fixed, swiglu):
    """The config for up to ROWS rows, whose time is that of reading the weight, or of the chain of wgmma over k.

    A chain takes 0.05 us for 64 steps of 16 columns and 0.075 us of 64, and 0.03 us more for each stage: several panels
    a stage. Up to eight rows of A take little room: more of the weight is under way. While tiles fill half of the SMs,
    the next kernel loads its own weight meanwhile, all of it if it is short; where 64 columns fill more, 32 of two
    blocks an SM are better. The last wave of long weights should be full. H200, 1 and 64 rows: with one panel a stage
    and 64 columns 5.0 and 5.1 us for 1024 x 2048, with these 3.0 and 3.4; 6.9 and 7.0 for 1024 x 3072, and 3.7 and 4.5;
    10.2 and 10.7 for 4096 x 4096, and 9.6 and 10.3. One row, 4096 x 1024: 3.1 with two panels, 2.9 with four; 6144 x
    1024: 5.1 with 96 columns, 4.1 with 32. A half of Qwen3-8B's layers, 1 row, four panels and two: 7.8 and 7.6 for
    2048 x 4096, 17.2 and 16.2 for 2048 x 12,288; 64 rows: 8.8 with 16 columns and 8.1 with 32 for the former, for gate
    and up of 6,144 columns 32.0 with 64 and 29.0 with 128.
    """
    eight, halves = m <= 8, 2 if swiglu else 1
    is_short = n * halves * k <= SHORT_WEIGHT and k < LONG_CHAIN

    def filled(columns):
        return -(-n // (columns // halves)) / sm_count

    if is_short and eight:
        widths = (32, 48, 64, 96, 128) if swiglu else (16, 24, 32, 48, 64)
        columns = min(widths, key=lambda columns: abs(filled(columns) - 0.5))
        most_panels = 2 if swiglu and columns > 32 else 4
        if not swiglu and filled(columns) > 0.6:
            columns, most_panels = 32, 1
    elif is_short:
        columns = 16 * halves if n * halves <= 16 * sm_count else 64 if filled(64) > 0.45 else 32
        most_panels = 4 if columns == 16 * halves else 1 if columns == 64 else 2
        if swiglu and columns == 64:
            columns, most_panels = 48, 2
    else:
        # A model's part on each of several GPUs has few columns; 64 rows of A would be read too often by narrow tiles.
        # The first of equals is taken: wide tiles, which read 64 rows of A less often, if one wave holds all of them.
        swiglu_widths = (64, 96, 128) if eight else (64, 128) if filled(128) > 1 else (128, 64)
        widths = swiglu_widths if swiglu else (64, 32, 48, 96, *((24, 16) if eight else ()))
        columns = min(widths, key=lambda columns: round(1 - filled(columns) / math.ceil(filled(columns)), 1))
        most_panels = 4 if columns == 32 and eight else 2 if eight or columns != 64 else 1
    return with_stages(Sm90GemmConfig(columns, 1, 2, *fixed, eight_rows=eight, streams_b=True), most_panels, k)


@functools.cache
def with_own_rank(config, rank):
    """The config whose blocks compute so many columns of the low rank's first operand themselves, or None.

    None where they are too many: beside the tile's they are columns of one wgmma.
    """
    own_rank = -(-rank // 16) * 16
    if own_rank > MOST_OWN_RANK or config.columns + own_rank > MOST_COLUMNS:
        return None
    config = config._replace(own_rank=own_rank)
    while config.layout.nbytes > SHARED_LIMIT:
        config = config._replace(stages=config.stages - 1)
    return config if config.stages > 1 else None


@functools.cache
def best_config(problem, sm_count, swiglu=False, low_rank=False):
    """The config that a simple model of time finds the fastest for a GemmProblem; C is (m, 2 n) for swiglu.

    The steps of a low rank are few beside k: with them the config stays the same.

    A round of 64 steps takes as long as the tensor cores need for the tile, shared memory to write and read it, L2 to
    deliver it, or a round's own latency; blocks work through tiles in waves. The rates are fitted to an H200.
    """
    if low_rank:
        return best_config(problem, sm_count, swiglu)._replace(low_rank=True)
    m, n, k, _, a_mn, b_mn, output, *_ = problem
    fixed = (*problem[3:], swiglu)
    if m <= ROWS and output == "same" and not (a_mn or b_mn):
        return few_rows_config(m, n, k, sm_count, fixed, swiglu)
    best = None
    for consumers in (1, 2):
        for columns in (64, 96, 128, 192, 256):
            if (b_mn or output != "same") and columns % 64 or swiglu and columns in (96, 192):
                continue
            # Wider tiles have no time to wait for a stage.
            several = consumers == 1 and columns == 64 and not (a_mn or b_mn)
            config = Sm90GemmConfig(columns, consumers, 2, *fixed, eight_rows=several and m <= 8)
            config = with_stages(config, 2 if several else 1, k)
            if config.stages < 3:
                continue
            rows = config.rows
            # Lines of shared memory that TMA writes, and that the warpgroups' four instructions read.
            lines = rows + columns + consumers * (ROWS + columns)
            latency_us = 0.10 + 0.03 / config.panels
            round_us = max(rows * columns / 46000, lines / 1440, (rows + columns) / 860, latency_us)
            tiles = -(-m // rows) * -(-n // config.tile_columns)
            waves = -(-tiles // sm_count)
            time_us = waves * (-(-k // STEPS) * round_us + 0.8)
            # The one of equals that reads less from memory.
            if best is None or (time_us, rows + columns) < best[0]:
                best = (time_us, rows + columns), config
    config = best[1]
    if output == "add" and k <= FEW_STEPS and config.columns == 256:
        config = config._replace(prefetched_columns=config.staged_columns)
    return config
