"""The choice of constants for grouped GEMMs, from the number of rows and experts and the shape of a weight.

How the rows are spread over the experts is known on the device alone; a choice changes no bits.
"""

import functools
import math

from rlnumba.kernels.gemm.grouped_tiles import WORD
from rlnumba.kernels.gemm.sm80_config import clocks_of, configs_for
from rlnumba.kernels.gemm.sm90_config import SHARED_LIMIT, Sm90GemmConfig, with_stages
from rlnumba.kernels.ptx.wgmma import ROWS

# Up to so many rows of an expert are loaded eight at a time, so that decode loads little beside the weight.
ROWS_IN_EIGHTS = 32
# Rows an expert, on average, up to which reading the weights takes most of the time: tiles of one consumer. H100, 128
# experts of 1536 x 2048, 16 rows each: 276 us, 97 % of a copy's bandwidth.
FEW_ROWS = 48
# Wide tiles of a K-major weight: with few rows an expert and a long sum fewer stages are faster, with many rows tiles
# that are numbered along an expert's columns first. H100, 128 experts of 1536 x 2048, TFLOP/s of two runs: with 256
# rows each 351 and 340 by four stages, 368 and 361 along columns first, 433 and 430 by three stages; with 1,024 rows
# 502 and 489, 574 and 556, 541 and 540. 2048 x 768, 1,024 rows: 569 and 500, 526 and 530, 491 and 495.
MANY_ROWS, LONG_SUM, FEWER_STAGES = 512, 1024, 3
# With so many waves of tiles a last one that leaves SMs idle matters little. H100, one token, 8 experts: 32 columns of
# 1536 x 2048 take 19.8 us, 84 % of a copy's bandwidth; 64 columns of 2048 x 768 11.4 us, 73 %.
FEW_WAVES = 4


def widest(columns, widths):
    """The width of tiles for so many columns: the widest, unless a narrower one computes fewer columns beyond them.

    A tile of half the width takes more than half the time, by a sixth.
    """
    return min(widths, key=lambda width: -(-columns // width) * width * (1 + 16 / width))


def used_experts(rows, experts):
    """The expected number of experts with rows, if each row has an expert drawn at random."""
    return experts * (1 - (1 - 1 / experts) ** rows)


@functools.cache
def best_sm90_config(rows, experts, columns, steps, element, b_mn, sm_count, swiglu=False):
    """The sm90 config for `rows` rows by weights (experts, columns, steps), or (experts, steps, columns) if b_mn."""
    limit = SHARED_LIMIT - WORD * (experts + 1)
    kind = {"element": element, "b_mn": b_mn, "swiglu": swiglu}
    if rows > FEW_ROWS * experts:
        config = with_stages(Sm90GemmConfig(widest(columns, (256, 128, 64)), 2, 2, **kind), 1, steps, limit)
        fewer = config.columns == 256 and not b_mn and rows <= MANY_ROWS * experts and steps > LONG_SUM
        return config._replace(stages=FEWER_STAGES) if fewer else config
    # Few tiles leave SMs idle in the last wave; there are more of narrower ones.
    waves = used_experts(rows, experts) * -(-columns // 64) / sm_count
    width = 32 if waves < FEW_WAVES and math.ceil(waves) > 1.2 * waves and not b_mn else 64
    return with_stages(Sm90GemmConfig(width, 1, 2, **kind, streams_b=True), 1 if b_mn else 2, steps, limit)


def is_across_first(config):
    """Whether the sm90 kernel of a config numbers an expert's tiles along its columns first, else down its rows."""
    return config.consumers == 2 and not config.b_mn and config.stages > FEWER_STAGES


@functools.cache
def best_sm90_dw_config(n, k, element, output):
    """The sm90 config for the gradient of weights (E, n, k)."""
    width = widest(k, (256, 128, 64))
    return with_stages(Sm90GemmConfig(width, 1 if n <= ROWS else 2, 2, element, True, True, output), 1, ROWS)


@functools.cache
def best_sm80_config(rows, experts, columns, steps, element, b_mn, sm_count, limit):
    """The sm80 config for `rows` rows by weights (experts, columns, steps), or (experts, steps, columns) if b_mn."""
    used = used_experts(rows, experts)

    def clocks(candidate):
        config, blocks = candidate
        tiles = math.ceil(used * math.ceil(rows / used / config.rows) * -(-columns // config.columns))
        return clocks_of(config, blocks, tiles, steps, sm_count)

    return min(configs_for(element, False, b_mn, "same", False, False, limit), key=clocks)[0]


@functools.cache
def best_sm80_dw_config(rows, experts, n, k, element, output, sm_count, limit):
    """The sm80 config for the gradient of weights (experts, n, k) of so many rows."""

    def clocks(candidate):
        config, blocks = candidate
        tiles = experts * -(-n // config.rows) * -(-k // config.columns)
        return clocks_of(config, blocks, tiles, -(-rows // experts), sm_count)

    return min(configs_for(element, True, True, output, False, False, limit), key=clocks)[0]
