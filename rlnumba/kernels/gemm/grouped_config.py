"""The choice of constants for grouped GEMMs, from the number of rows and experts and the shape of a weight.

How the rows are spread over the experts is known on the device alone; a choice changes no bits.
"""

import functools
import math

from rlnumba.kernels.gemm.sm90_config import SHARED_LIMIT, Sm90GemmConfig, with_stages
from rlnumba.kernels.ptx.wgmma import ROWS

# Up to so many rows of an expert are loaded eight at a time, so that decode loads little beside the weight.
ROWS_IN_EIGHTS = 32
# Rows an expert, on average, up to which reading the weights takes most of the time.
FEW_ROWS = 48


def widest(columns, widths):
    """The width of tiles for so many columns: the widest, unless a narrower one computes fewer columns beyond them.

    A tile of half the width takes more than half the time, by a sixth.
    """
    return min(widths, key=lambda width: -(-columns // width) * width * (1 + 16 / width))


@functools.cache
def best_config(rows, experts, columns, steps, element, b_mn, sm_count):
    """The sm90 config for `rows` rows by weights (experts, columns, steps), or (experts, steps, columns) if b_mn."""
    limit = SHARED_LIMIT - 4 * (experts + 1)
    if rows > FEW_ROWS * experts:
        config = Sm90GemmConfig(widest(columns, (256, 128, 64)), 2, 2, element, b_mn=b_mn)
        return with_stages(config, 1, steps, limit)
    used = experts * (1 - (1 - 1 / experts) ** rows)
    widths = (64, 128) if b_mn else (64, 96, 48, 128, 32)

    def idle(width):
        """The share of the SMs that have no tile, over all waves of them, in tenths."""
        waves = used * -(-columns // width) / sm_count
        return round(1 - waves / math.ceil(waves), 1)

    width = min(widths, key=idle)
    config = Sm90GemmConfig(width, 1, 2, element, b_mn=b_mn, streams_b=True)
    return with_stages(config, 1 if b_mn else 2, steps, limit)


@functools.cache
def best_dw_config(n, k, element, output):
    """The sm90 config for the gradient of weights (E, n, k)."""
    width = widest(k, (256, 128, 64))
    return with_stages(Sm90GemmConfig(width, 1 if n <= ROWS else 2, 2, element, True, True, output), 1, ROWS)
