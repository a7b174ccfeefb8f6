"""Constants of the GEMM that reads packed weights, and their choice for a shape."""

import functools
from typing import NamedTuple

from rlnumba.kernels.gemm.grouped_config import used_experts
from rlnumba.kernels.gemm.grouped_tiles import WORD
from rlnumba.kernels.gemm.sm90_config import SHARED_LIMIT, Sm90GemmConfig
from rlnumba.kernels.ptx.shared_memory import LINE
from rlnumba.kernels.ptx.wgmma import STEPS
from rlnumba.kernels.quantized.formats import COLUMNS, FORMATS
from rlnumba.kernels.quantized.formats import ROWS as TILE_ROWS
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, shared_layout

# Rows of A for which there is a kernel; the most that this GEMM takes.
ROW_COUNTS = (8, 16, 32, 64)
MOST_ROWS = ROW_COUNTS[-1]
# Steps of the reduction of the smallest stage, of which K is a multiple.
LEAST_STEPS = 2 * STEPS
# Bytes that a warp loads at once, 16 a lane.
WARP_LOAD_BYTES = 512
# Bytes of packed weights that a block has under way, some more than memory's speed times its latency.
BYTES_AHEAD = 40 * 1024
# Panels of A that a block has under way where its stages have A alone.
PANELS_AHEAD = 16
# Warpgroups of a wide tile, half of whose rows of the weight are gate's.
WIDE_WARPGROUPS = 3
# The least share of SMs that a tile's width leaves busy, and the most warps that widen.
FEWEST_BUSY, MOST_WARPS = 0.6, 8
# The cost of a tile of experts beside its columns, in columns: finding it, and filling and draining the pipeline.
TILE_COLUMNS_OVERHEAD = 8
# nf4's levels, each for 32 lanes.
LEVELS_BYTES = 16 * 32 * 4
# Rows of the weight of a wgmma; the bytes of B' in a stage for a warpgroup that widens its weight in registers.
WARPGROUP_ROWS = 64
PART_BYTES = WARPGROUP_ROWS * LINE
# Panels of a stage of a tile of A' beside warpgroups that widen in registers.
MOST_REDUCING_PANELS = 2
# Elements between the rows of float32 through which a tile of C^T becomes one of C.
EXCHANGE_PADDING = 4


class PackedGemmConfig(NamedTuple):
    """One kernel of few_rows.py.

    form: the name of the weight's Format; columns: of the accumulators of a tile, rows of the weight, for SwiGLU half
    of them of the gate; warps: that widen; panels: STEPS steps each of the reduction in a stage; stages: of the ring;
    rows: of A in a stage, one of ROW_COUNTS; group_tiles: tiles of the format's COLUMNS columns in a group, a power of
    two; whole_tiles: whether a tile of C, for SwiGLU either half, has whole tiles of the format, or else halves.
    grouped: whether rows are those of experts (grouped.py). reduces: the kernel computes the first matrix of the low
    rank (gemm/reduction.py). swapped: wgmma computes C^T, from 64 rows of the weight and all of A, both in shared
    memory, of which it then reads less; else A comes from registers. teams: of `warps` warps, each of which widens
    every teams-th stage. warpgroups: that multiply, each columns / warpgroups rows of the weight, which it widens in
    registers for C^T: swapped, without `warps`; 0: one, beside warps that widen. wgmma_steps: of 16 values of the
    reduction, 1, 2 or 4, that a warpgroup widens and multiplies at once. The other fields are those of Sm90GemmConfig.
    """

    form: str
    columns: int
    warps: int
    panels: int
    stages: int
    rows: int
    group_tiles: int
    whole_tiles: bool
    element: str
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    low_rank: bool = False
    activation: str = "silu"
    grouped: bool = False
    reduces: bool = False
    swapped: bool = False
    teams: int = 1
    warpgroups: int = 0
    wgmma_steps: int = 4

    @property
    def part(self):
        """The config of what a warpgroup computes of a tile."""
        if self.warpgroups < 2:
            return self
        return self._replace(columns=self.columns // self.warpgroups, warpgroups=1)

    @property
    def epilogue(self):
        """The config by which gemm/epilogue.py writes C: by threads, as for eight rows."""
        return Sm90GemmConfig(
            self.columns, 1, self.stages, self.element, bias=self.bias, residual=self.residual, swiglu=self.swiglu,
            eight_rows=True, activation=self.activation,
        )  # fmt: skip

    @property
    def tile_columns(self):
        """Columns by which tiles of C advance."""
        return self.columns // 2 if self.swiglu else self.columns

    @property
    def line_bytes(self):
        """Bytes of a row of a packed tile."""
        return 4 * FORMATS[self.form].words

    @property
    def tile_bytes(self):
        return TILE_ROWS * self.line_bytes

    @property
    def load_rows(self):
        """Rows of a packed tile that a warp loads at once."""
        return WARP_LOAD_BYTES // self.line_bytes

    @property
    def loads_down(self):
        """Loads of a warp that cover the rows of a tile."""
        return self.columns // self.load_rows

    @property
    def loads(self):
        """Loads of a warp for a stage, each of another panel."""
        return self.panels * self.loads_down // self.warps

    @property
    def segment_rows(self):
        """Rows of the weight that are copied together."""
        return TILE_ROWS if self.whole_tiles else TILE_ROWS // 2

    @property
    def stage_groups(self):
        """Groups of a row that a stage has a part of."""
        return -(-self.panels // self.group_tiles)

    @property
    def packed_bytes(self):
        """Bytes of packed words in a stage of their ring."""
        return self.panels * self.columns * self.line_bytes

    @property
    def scales_bytes(self):
        return self.columns * self.stage_groups * 4

    @property
    def packed_stages(self):
        """Stages of the ring of packed words and scales, as many for each team."""
        return -(-max(3, -(-BYTES_AHEAD // self.packed_bytes)) // self.teams) * self.teams

    @property
    def a_bytes(self):
        """Bytes of A in a stage."""
        return self.panels * self.rows * LINE

    @property
    def b_bytes(self):
        """Bytes of the widened weight, or of a low rank's, in a stage."""
        if self.warpgroups:
            # Of the low rank alone, or of a tile of A'.
            return max(self.warpgroups, self.reducing_panels) * PART_BYTES if self.low_rank else 0
        return self.panels * self.columns * LINE

    @property
    def warp_rows(self):
        """Rows of the weight of a warp that multiplies, of the 16 that wgmma computes."""
        return self.part.columns // 4 if self.warpgroups else 16

    @property
    def rank_box_rows(self):
        """Rows of a TMA box of B'. Eight rows of a warp have eight others behind them, which are of no use."""
        return 8 if self.warp_rows == 8 else self.part.tile_columns

    @property
    def reducing_box_rows(self):
        """Rows of a TMA box of the adapter's A."""
        return 8 if self.warp_rows == 8 else self.part.columns

    @property
    def rank_panels(self):
        """Panels of a stage of the low rank."""
        return 1 if self.warpgroups else self.panels

    @property
    def reducing_panels(self):
        """Panels of a stage of a tile of A', which has a warpgroup's columns."""
        return min(self.panels, MOST_REDUCING_PANELS) if self.warpgroups else self.panels

    @property
    def a_at(self):
        """The byte of a stage at which A begins; the weight is its other part."""
        return self.b_bytes if self.swapped else 0

    @property
    def b_at(self):
        return 0 if self.swapped else self.a_bytes

    @property
    def stage_bytes(self):
        return self.a_bytes + self.b_bytes

    @property
    def threads(self):
        """Warpgroups that multiply, a warp that loads A, one that loads the weight, and those that widen."""
        if self.reallocates_registers:
            # A whole warpgroup of loaders.
            return 128 * (self.warpgroups + 1)
        return 128 * max(self.warpgroups, 1) + 64 + 32 * self.warps * self.teams

    @property
    def reallocates_registers(self):
        """Whether loaders leave registers to three warpgroups that widen in theirs, and have rows of A or a residual in
        more of them than 128 a thread. Other kernels' blocks have no room beside a block that does so."""
        return self.warpgroups == 3 and (self.rows > 8 or self.residual)

    @property
    def packed_readers(self):
        """Warps that read a stage of packed words."""
        return 4 * self.warpgroups or self.warps

    @property
    def exchange_at(self):
        """Bytes before the rows of float32 through which a tile of C^T becomes one of C: those of the levels."""
        return LEVELS_BYTES if self.form == "nf4" else 0

    @property
    def exchange_pitch(self):
        """Elements of such a row: those that threads write at once are in as many banks."""
        return self.part.columns + EXCHANGE_PADDING

    @property
    def exchange_bytes(self):
        """Bytes of a warpgroup's rows of float32."""
        return self.rows * 4 * self.exchange_pitch if self.swapped else 0

    @property
    def layout(self):
        """Shared memory: stages of [A rows x 64 | B columns x 64], packed words, scales, nf4's levels, mbarriers."""
        barriers, packed = self.stages * MBARRIER_BYTES, self.packed_stages
        return shared_layout(
            stages=self.stages * self.stage_bytes,
            packed=packed * self.packed_bytes,
            scales=packed * self.scales_bytes,
            levels=self.exchange_at + max(self.warpgroups, 1) * self.exchange_bytes,
            full=barriers,
            empty=barriers,
            packed_full=packed * MBARRIER_BYTES,
            packed_empty=packed * MBARRIER_BYTES,
        )


def is_possible(config):
    """Whether the warps share the loads of a stage evenly, segments cover a tile, and wgmma reads within it."""
    if config.warpgroups:
        return _is_possible_in_registers(config)
    down = config.loads_down
    even = (
        config.columns % config.load_rows == 0 and config.warps % down == 0 and not config.panels * down % config.warps
    )
    # Where a tile has less than wgmma's 64 rows of the weight, it reads panels that follow, and at last A and the next
    # stage, as rows of products that no thread reads.
    reads_within = not config.swapped or config.columns in (16, 32, 64)
    return even and reads_within and config.tile_columns % config.segment_rows == 0


def _is_possible_in_registers(config):
    """Whether is_possible, where the warps that multiply widen the weight."""
    part, copies = config.part, config.columns // config.segment_rows * (1 if config.whole_tiles else config.panels)
    # As many as there are lanes.
    fits = copies <= 32
    even = config.panels in (2, 4) and config.tile_columns % config.segment_rows == 0
    has_room = config.stages >= 2 and config.layout.nbytes <= SHARED_LIMIT
    return config.swapped and not config.warps and part.columns in (32, 64) and even and fits and has_room


def has_turns(config, k):
    """Whether the teams of a config can take turns over k steps.

    A warp waits for the parity of an mbarrier's phase, which two phases after it have again. Copies of packed words end
    in any order: a stage of theirs has one team, which waits for every one of its phases. Stages of the other ring
    become empty in order, so that it is enough if a team waits for at least one of as many stages as the ring has.
    """
    teams = config.teams
    even = k % (teams * config.panels * STEPS) == 0 and config.packed_stages % teams == 0
    return even and config.stages >= 2 * teams - 1


def with_stages(config, limit=SHARED_LIMIT):
    """The config with the stages that `limit` bytes of shared memory hold."""
    config = config._replace(stages=2)
    room = limit - config.layout.nbytes
    return config._replace(stages=min(room // (config.stage_bytes + 2 * MBARRIER_BYTES) + 2, 16))


def config_in_registers(constants, rows, n, form, group_size, epilogue):
    """A config of warpgroups that widen in registers, for n columns of C.

    constants: (warpgroups, rows of the weight of each, 64 or 32, panels, wgmma_steps); epilogue: the fields from
    `element` on.
    """
    warpgroups, part_columns, panels, wgmma_steps = constants
    columns = warpgroups * part_columns
    width = columns // 2 if epilogue[3] else columns
    fields = group_size // COLUMNS, _has_whole_tiles(width, n, epilogue[3]), *epilogue
    config = PackedGemmConfig(form, columns, 0, panels, 2, rows, *fields)
    in_registers = {"warpgroups": warpgroups, "wgmma_steps": wgmma_steps, "swapped": True}
    config = with_stages(config._replace(**in_registers))
    # A tile of A' is limited by the bytes that are under way. Otherwise what is left of shared memory is for blocks of
    # the next kernel, which load their weight before they wait for this one.
    return config if config.low_rank else config._replace(stages=min(config.stages, PANELS_AHEAD // panels))


def _has_whole_tiles(width, n, swiglu):
    """Whether tiles of so many of n columns of C, for SwiGLU of both halves, have whole tiles of a format."""
    return width % TILE_ROWS == 0 and (not swiglu or n % TILE_ROWS == 0)


@functools.cache
def packed_config(m, n, k, form, group_size, sm_count, epilogue):
    """The config for so many rows, columns of C and steps. epilogue: the fields from `element` on.

    Tiles of 64, 32 or 16 columns, for SwiGLU of 32 or 16 of gate and up each: the widest for most SMs. H100, int4, 1
    row by 6144 x 4096: 9.2 us with 64, 11.1 with 32. C^T and two teams that widen: 24.9 us for gate-up of Qwen3-8B,
    with one team 26.2, C with A in shared memory 31.8 and in registers 33.4. Up to 16 rows gain nothing from 16
    columns: H200, 1, 16, 64 rows by 1024 x 3072 5.2, 5.0, 6.3 us, with 32 3.8, 4.6, 7.3. _warpgroups_in_registers has
    the measurements of warps that multiply and also widen.
    """
    rows = next(count for count in ROW_COUNTS if m <= count)
    has_residual, swiglu, low_rank = epilogue[2:5]
    widths = (64, 32) if rows <= 16 else (64, 32, 16)
    # 64 rows by 64 columns with a residual have more values than a thread has registers.
    if swiglu or has_residual and rows == 64:
        widths = (32, 16)
    width = next((width for width in widths if -(-n // width) > FEWEST_BUSY * sm_count), widths[-1])
    warpgroups, part_columns = _warpgroups_in_registers(width, rows, n, form, swiglu, sm_count)
    # Stages of two panels have more of a tile of A' under way, whose sum over K is a chain of copies.
    for panels in ((2,) if low_rank and warpgroups == 1 else (4, 2)) if warpgroups else ():
        constants = warpgroups, part_columns, panels, STEPS // 16
        config = config_in_registers(constants, rows, n, form, group_size, epilogue)
        if is_possible(config) and has_turns(config, k):
            return config
    return config_of_width(width, rows, (n, k), form, group_size, epilogue)


def _warpgroups_in_registers(width, rows, n, form, swiglu, sm_count):
    """(warpgroups that widen a weight in their registers, rows of it that each has); 0 of them: other warps widen.

    For tiles of `width` columns of C. H100, gate-up of Qwen3-8B, three warpgroups, before with other warps: int4 of 1,
    16, 32, 64 rows 21.6, 23.1, 24.8, 30.0 us for 25.0, 27.9, -, 39.4; nf4 30.4, 32.2, 35.2, 42.4 for 37.3, 38.9, -,
    50.9; int8 37.4, 39.1, 40.3, 45.3 for 37.0, more, more, 47.7. By one warpgroup 64 rows of all formats and weights
    are faster than with other warps, int4 by 6144 x 4096 11.4 us for 13.7, and few rows slower, 1 row 11.4 for 9.0.
    """
    wide = WIDE_WARPGROUPS * WARPGROUP_ROWS // 2
    if swiglu and -(-n // wide) > FEWEST_BUSY * sm_count and (rows > 8 or FORMATS[form].bits == 4):
        return WIDE_WARPGROUPS, WARPGROUP_ROWS
    return (1, width * 2 if swiglu else width) if rows == MOST_ROWS and width > 16 else (0, 0)


@functools.cache
def grouped_config(rows, experts, shape, form, group_size, sm_count, element, swiglu):
    """The config for so many rows of all experts, each by a weight of shape = (columns of C, steps).

    Tiles have the rows that an expert has on average and half as many more: of one with more rows another tile reads
    the weight again, from L2. They are as wide as waves over the SMs allow.
    """
    n, k = shape
    used = used_experts(rows, experts)
    tile_rows = next((count for count in ROW_COUNTS if count >= 1.5 * rows / used), MOST_ROWS)

    def time_of(width):
        return -(-used * -(-n // width) // sm_count) * (width + TILE_COLUMNS_OVERHEAD)

    width = min((32, 16) if swiglu else (64, 32, 16), key=time_of)
    epilogue = element, False, False, swiglu
    limit = SHARED_LIMIT - WORD * (experts + 1)
    return config_of_width(width, tile_rows, shape, form, group_size, epilogue, limit)._replace(grouped=True)


def config_of_width(width, rows, shape, form, group_size, epilogue, limit=SHARED_LIMIT):
    """The config of tiles of `rows` rows by `width` columns of C, for shape = (columns of C, steps)."""
    n, k = shape
    swiglu = epilogue[3]
    columns = width * 2 if swiglu else width
    whole_tiles = _has_whole_tiles(width, n, swiglu)
    down = columns // (WARP_LOAD_BYTES // (4 * FORMATS[form].words))
    # 16 columns leave wgmma three quarters of C^T without use.
    swapped = columns > 16
    for teams, panels in ((2, 4), (1, 4), (2, 2), (1, 2)):
        warps = max(warps for warps in range(1, MOST_WARPS + 1) if warps % down == 0 and panels * down % warps == 0)
        fields = group_size // COLUMNS, whole_tiles, *epilogue
        config = PackedGemmConfig(form, columns, warps, panels, 2, rows, *fields)
        config = with_stages(config._replace(swapped=swapped, teams=teams), limit)
        if has_turns(config, k) and config.stages >= 3:
            break
    return config
