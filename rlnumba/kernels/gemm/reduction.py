"""An adapter's first product, XA = s X A^T, in the kernel that adds its second: C = X W^T + XA B^T (sm_90).

XA has few columns, so that one block computes them or a few, in a chain over K that may not be split. A kernel of its
own would leave the other SMs idle, and take about as long as the sum over W. There are two ways:

Of one adapter, up to 48 columns, each block of a 16-bit GEMM computes what its own rows have. A's rows lie behind those
of W in a stage, so that one wgmma has the sums of both, and XA becomes the second product's operand in registers. It is
computed by as many blocks as there are tiles of C side by side, and no block waits for another. A kernel has a number
of such columns; adapters that come and go beside others need no kernels of their own.

Else tiles of XA are tiles beside those of C, with the same main loop: one block computes them while the others add up
X W^T. A block waits for XA where the low rank begins, after its first tile's sum over W:

    arrived[0]    warpgroups that have written their rows of a tile of XA: those that wait go on when all have
    arrived[1]    blocks that wait no more. The last one makes both 0, for the next kernel

All blocks of the kernel have room on the GPU at once. Beside another stream's kernels only the first of them may run:
these have the tiles of XA, which wait for nothing.

The bits are those of `linear`, which rounds X A^T, and of `scale_adapters` (kernels/nn/lora.py), which rounds its
product with the scale.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, I32, check, is_16_byte_aligned, unused
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel, semaphore_add, semaphore_wait
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function
from rlnumba.kernels.ptx.wgmma import ROWS, STEPS, WARPGROUP
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda

i32, u32 = np.int32, np.uint32


class Reduction(NamedTuple):
    """The operands that make XA (M, R) of X (M, K): A (R, K), and those of scale_adapters.

    scales (S,) float32, of S adapters side by side; adapter_ids (M,) int32, or None.
    """

    a: object
    scales: object
    adapter_ids: object = None


class ReducingLowRank(NamedTuple):
    """A LowRank (gemm/sm90.py) whose A', XA, the kernel writes.

    a_map, b_map: tensor maps of XA and B; rank: R. reducing_map: of the adapter's A; xa (M, R / 2) pairs; scales,
    adapter_ids: of the Reduction, the latter without elements for None; adapter_columns: of XA that an adapter has;
    arrived (2,) int32, zeros before and after a launch.
    """

    a_map: object
    b_map: object
    rank: int
    reducing_map: object
    xa: object
    scales: object
    adapter_ids: object
    adapter_columns: int
    arrived: object


def check_reduction(op, reduction, low_rank, k):
    """Raise ValueError for arrays of a Reduction that do not fit low_rank = (XA, B) and x (M, k)."""
    if low_rank is None:
        raise ValueError(f"{op}: a reduction needs low_rank, whose first matrix it writes")
    m, rank = low_rank[0].shape
    check(op, "reduction.a", reduction.a, (rank, k), (low_rank[0].dtype,))
    (adapters,) = check(op, "reduction.scales", reduction.scales, (None,), F32)
    if not adapters or rank % adapters:
        raise ValueError(f"{op}: reduction.a must have rows for each of {adapters} adapters, got {rank}")
    if reduction.adapter_ids is not None:
        check(op, "reduction.adapter_ids", reduction.adapter_ids, (m,), I32)


def is_one_kernel(x, out, low_rank, reduction, most_rows=ROWS):
    """Whether kernels that take x (M, K), out (M, N) and low_rank = (XA, B) can write XA, too; M up to most_rows."""
    fits = len(x) <= most_rows and out.dtype == x.dtype and is_16_byte_aligned(reduction.a)
    # A pair of columns is one adapter's.
    return fits and low_rank[0].shape[1] // len(reduction.scales) % 2 == 0


def reducing_operands(low_rank, reduction, a_box, b_box, columns):
    """The ReducingLowRank of (XA, B) and a Reduction; boxes: of both tensor maps; columns: of a tile of XA."""
    (xa, b), ids = low_rank, reduction.adapter_ids
    return ReducingLowRank(
        tensor_map(xa, *a_box), tensor_map(b, *b_box), xa.shape[1], tensor_map(reduction.a, columns, STEPS),
        xa.view(np.int32), reduction.scales, unused() if ids is None else ids, xa.shape[1] // len(reduction.scales),
        current().own(reduction_counters),
    )  # fmt: skip


def reduction_counters():
    """The array `arrived` of a context."""
    return device.xp().zeros(2, np.int32)


@device_function
def reduced_tiles(rank, columns):
    """Tiles of XA side by side."""
    return i32((rank + columns - 1) // columns)


@device_function
def wait_for_reduced(low_rank, arrivals):
    """Wait until so many warpgroups have written their rows of tiles of XA, for copies by TMA."""
    semaphore_wait(low_rank.arrived, 0, arrivals)


@device_function
def wait_once_for_reduced(waits, low_rank, arrivals):
    """wait_for_reduced unless `waits` is 0, as it is once this has returned: the next call's `waits`."""
    if waits != 0:
        wait_for_reduced(low_rank, arrivals)
    return i32(0)


@device_function
def leave_reduced(low_rank):
    """One thread of each block calls this once, when no thread of the block is going to wait any more."""
    arrived = low_rank.arrived
    if atomic_add_acq_rel(arrived, 1) == i32(cuda.gridDim.x) - i32(1):
        arrived[0] = i32(0)
        arrived[1] = i32(0)


@functools.cache
def scale_function(element):
    """(factor_of, scaled): the device functions that make pairs of XA from their sums, by a ReducingLowRank."""
    pack_two, unpack_two = cvt_pack(element), cvt_unpack(element)

    @device_function
    def factor_of(low_rank, line):
        """(scale, first column, end) of a row's adapter: columns of XA; (0, 0, 0) for a row that has none."""
        adapter, width = i32(0), i32(low_rank.adapter_columns)
        if low_rank.adapter_ids.shape[0] > 0:
            adapter = low_rank.adapter_ids[u32(line)]
        if adapter < 0:
            return np.float32(0.0), i32(0), i32(0)
        return low_rank.scales[u32(adapter)], i32(adapter * width), i32(adapter * width + width)

    @device_function
    def scaled(low, high, column, factor):
        """Two neighbouring sums from `column` on as words of 16 bits; factor: of factor_of."""
        scale, first, end = factor
        low, high = unpack_two(pack_two(low, high))
        low, high = low * scale, high * scale
        # Other adapters' values may be NaN, and are left out. A pair is one adapter's.
        if column < first or column >= end:
            low, high = np.float32(0.0), np.float32(0.0)
        return pack_two(low, high)

    return factor_of, scaled


@functools.cache
def own_rank_function(config):
    """The device function by which a consumer warpgroup has its rows of XA as the A of wgmma in registers."""
    columns, blocks = config.columns, config.own_rank // 8
    factor_of, scaled = scale_function(config.element)

    @device_function
    def own_rank(words, acc, low_rank, row, m, lane, stores):
        """words: of STEPS columns; acc: the sums of a tile, then those of XA; stores: XA is written, too."""
        for i in range(STEPS // 4):
            words[i] = i32(0)
        rank = i32(low_rank.rank)
        for half in range(2):
            line = i32(row + half * 8)
            if line < m:
                factor = factor_of(low_rank, line)
                for block in range(blocks):
                    column, i = i32(block * 8 + (lane & i32(3)) * i32(2)), columns // 2 + block * 4 + half * 2
                    word = scaled(acc[i], acc[i + 1], column, factor)
                    words[block // 2 * 4 + block % 2 * 2 + half] = word
                    if stores and column < rank:
                        low_rank.xa[u32(line), u32(column >> i32(1))] = word

    return own_rank


@functools.cache
def store_reduced_function(config):
    """The device function by which a consumer warpgroup scales and writes its rows of a tile of XA, and counts them."""
    columns, (factor_of, scaled) = config.columns, scale_function(config.element)

    @device_function
    def store_reduced(acc, low_rank, tile, row, m, lane, leader, barrier=1):
        """acc: of rows `row` and row + 8, and of each eight columns the pair 2 (lane % 4) and the next.

        tile: among those side by side; barrier: the named barrier of the warpgroup.
        """
        rank = i32(low_rank.rank)
        for half in range(2):
            line = i32(row + half * 8)
            if line < m:
                factor, out = factor_of(low_rank, line), low_rank.xa[u32(line)]
                for block in range(columns // 8):
                    column = i32(tile * columns + block * 8 + (lane & i32(3)) * i32(2))
                    if column < rank:
                        i = block * 4 + half * 2
                        out[u32(column >> i32(1))] = scaled(acc[i], acc[i + 1], column, factor)
        sm90.named_barrier_sync(i32(barrier), i32(WARPGROUP))
        if leader:
            semaphore_add(low_rank.arrived, 0)

    return store_reduced
