"""Constants of an sm_80 GEMM kernel, and the choice of the fastest ones for a shape and a GPU."""

import functools
from typing import NamedTuple

from rlnumba.kernels.ptx.sm80 import SYSTEM_BYTES

# Bytes that all banks of shared memory hold side by side.
BANK_BYTES = 128


class Sm80GemmConfig(NamedTuple):
    """One kernel of gemm/sm80.py. rows, columns: of C that a block owns, in warps_down x warps_across warps.

    step: values of the reduction in a stage; stages: of the ring. prefetch: the residual is loaded during the main
    loop, to memory of its own; a warp's part of C must then be staged at once (warp_columns == part_columns). The other
    fields are those of Sm90GemmConfig.
    """

    rows: int
    columns: int
    warps_down: int
    warps_across: int
    step: int
    stages: int
    element: str
    a_mn: bool = False
    b_mn: bool = False
    output: str = "same"
    bias: bool = False
    residual: bool = False
    prefetch: bool = False

    @property
    def threads(self):
        return 32 * self.warps_down * self.warps_across

    @property
    def warp_rows(self):
        return self.rows // self.warps_down

    @property
    def warp_columns(self):
        return self.columns // self.warps_across

    @property
    def accumulators(self):
        """Accumulators of a thread."""
        return self.warp_rows * self.warp_columns // 32

    @property
    def item_bytes(self):
        """Bytes of an element of C."""
        return 2 if self.output == "same" else 4

    @property
    def part_columns(self):
        """Columns of C that a warp stages at once: a line of its part is at most BANK_BYTES."""
        return min(self.warp_columns, BANK_BYTES // self.item_bytes)

    @property
    def part_bytes(self):
        """Bytes of shared memory through which a warp writes C."""
        return self.warp_rows * self.part_columns * self.item_bytes

    @property
    def a_bytes(self):
        """Bytes of A in a stage."""
        return self.rows * self.step * 2

    @property
    def stage_bytes(self):
        return (self.rows + self.columns) * self.step * 2

    @property
    def shared_bytes(self):
        stages, parts = self.stages * self.stage_bytes, self.threads // 32 * self.part_bytes
        return stages + parts if self.prefetch else max(stages, parts)

    @property
    def blocks_per_sm(self):
        """Number of blocks that the registers allow, at 255 a thread for the largest parts."""
        registers = 255 if self.accumulators > 64 else 168 if self.accumulators > 32 else 128
        return max(1, 65536 // (registers * self.threads))


# Shapes worth a kernel: rows, columns, warps down and across, reduction of a stage; then how many blocks an SM and how
# many stages to aim for. Two blocks of 128 x 128 wait at different times: on an H200 1.03 to 1.2x over one of
# 128 x 256, and 1.02 to 1.24x over 64 values of the reduction a stage, of which three stages fit (docs/log.md).
SHAPES = [
    (128, 128, 2, 2, 32, 2, 5),
    (64, 128, 2, 2, 32, 3, 5),
    (64, 64, 2, 2, 64, 4, 4),
    (32, 64, 1, 4, 64, 4, 6),
    (16, 64, 1, 4, 128, 4, 5),
    (16, 32, 1, 2, 128, 6, 8),
]
FEWEST_STAGES = 3
# The model of clocks_of, in clocks of an SM: products that its tensor cores add in one, bytes that L2 delivers, from
# a copy's start to its arrival, and what a tile costs before and after its rounds. Fitted to 15 shapes on an H200,
# where the configs that it chooses take 1.003 times as long as the best ones, at worst 1.03.
PRODUCTS, BYTES, LATENCY, TILE_CLOCKS = 1024, 64, 800, 2000


@functools.cache
def configs_for(element, a_mn, b_mn, output, bias, residual, limit):
    """(config, blocks an SM) for each of SHAPES that fits GPUs whose blocks may have `limit` bytes of shared memory."""
    found = []
    for rows, columns, down, across, step, most_blocks, most_stages in SHAPES:
        if (a_mn and rows < 64) or (b_mn and columns < 64):
            continue
        kinds = element, a_mn, b_mn, output, bias, residual
        config = Sm80GemmConfig(rows, columns, down, across, step, most_stages, *kinds)
        for blocks in range(min(most_blocks, config.blocks_per_sm), 0, -1):
            available = min((limit + SYSTEM_BYTES) // blocks - SYSTEM_BYTES, limit)
            candidates = [
                config._replace(stages=stages, prefetch=prefetch)
                for prefetch in ([False, True] if residual else [False])
                for stages in range(FEWEST_STAGES, most_stages + 1)
            ]
            fitting = [candidate for candidate in candidates if candidate.shared_bytes <= available]
            if fitting:
                found.append((fitting[-1], blocks))
                break
    return found


def clocks_of(config, blocks, tiles, k, sm_count):
    """Clocks of a GEMM of so many tiles, by a simple model; blocks: of the config that an SM holds.

    A round of a stage takes as long as the tensor cores need for the tiles that share an SM, or L2 to deliver them, or
    the stages in flight to arrive; tiles run in waves. Fewer than eight warps leave the tensor cores idle at times.
    """
    together = min(blocks, -(-tiles // sm_count))
    busy = min(1, 0.5 + together * config.threads / 512)
    clocks = max(
        together * config.rows * config.columns * config.step / (PRODUCTS * busy),
        together * (config.rows + config.columns) * config.step * 2 / BYTES,
        LATENCY / (config.stages - 1),
    )
    return -(-tiles // (sm_count * together)) * (-(-k // config.step) * clocks + TILE_CLOCKS)


@functools.cache
def best_config(problem, sm_count, limit):
    """The config that clocks_of finds the fastest for a GemmProblem; limit: bytes of shared memory of a block."""
    m, n, k, *kinds = problem

    def clocks(candidate):
        config, blocks = candidate
        return clocks_of(config, blocks, -(-m // config.rows) * -(-n // config.columns), k, sm_count)

    return min(configs_for(*kinds, limit), key=clocks)[0]
