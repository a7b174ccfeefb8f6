"""Pipelines through shared memory on sm_90: rings of stages, layouts with named offsets, the 128-byte swizzle.

A ring has `stages` buffers. Two mbarriers belong to each: `full`, which the producer's TMA loads complete, and `empty`,
at which consumers arrive when they have read the buffer. A thread walks the ring with a stage index and a parity, which
advance(stage, parity) flips each time around. A consumer starts at FIRST_FULL. A producer starts at FIRST_EMPTY:
waiting for the parity opposite to a barrier's first phase returns at once, since all stages are empty at the start.

    init_ring, advance = ring(stages)
    producer                                              consumer
        stage, parity = FIRST_EMPTY                           stage, parity = FIRST_FULL
        mbarrier_wait(empty + stage * MBARRIER_BYTES, parity) mbarrier_wait(full + stage * MBARRIER_BYTES, parity)
        mbarrier_expect_tx(full + ..., nbytes)                wgmma ..., wgmma_wait_group
        tma_load_2d(...)                                      mbarrier_arrive(empty + ...)
        stage, parity = advance(stage, parity)                stage, parity = advance(stage, parity)
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, Address, shared_address, stmatrix_x4, store_pair
from rlnumba.kernels.ptx.sm90 import mbarrier_init
from rlnumba.kernels.ptx.warp import cvt_pack, device_function
from rlnumba.runtime.device import cuda

i32 = np.int32

# TMA boxes with the 128-byte swizzle start at multiples of this.
SWIZZLE_ALIGNMENT = 1024
MBARRIER_BYTES = 8
# (stage, parity) with which a thread begins that waits for `full`, and one that waits for `empty`.
FIRST_FULL, FIRST_EMPTY = (i32(0), i32(0)), (i32(0), i32(1))


@functools.cache
def shared_layout(**sizes):
    """Byte offsets of a kernel's buffers in dynamic shared memory, by name, in the order in which they are given.

    shared_layout(q=16384, kv=65536, full=4 * MBARRIER_BYTES).kv == 16384. `nbytes` is what to launch with: the sum of
    the sizes, and what aligning the first buffer (shared_base) may cost. A named tuple of int, so that kernels may
    close over it: base + layout.kv.
    """
    offsets, offset = {}, 0
    for name, size in sizes.items():
        offsets[name] = offset
        offset += size
    return namedtuple("SharedLayout", [*offsets, "nbytes"])(*offsets.values(), offset + SWIZZLE_ALIGNMENT)


@device_function
def shared_base():
    """The first address of dynamic shared memory at which swizzled boxes may start."""
    start = shared_address(cuda.shared.array(0, np.uint8))
    return Address((start + (SWIZZLE_ALIGNMENT - 1)) // SWIZZLE_ALIGNMENT * SWIZZLE_ALIGNMENT)


@functools.cache
def ring(stages):
    """(init_ring, advance): the device functions of a ring of `stages` stages."""

    @device_function
    def init_ring(full, empty, full_arrivals, empty_arrivals):
        """One thread initialises the barriers of all stages, with the arrivals that complete a phase of each."""
        for stage in range(stages):
            mbarrier_init(full + stage * MBARRIER_BYTES, full_arrivals)
            mbarrier_init(empty + stage * MBARRIER_BYTES, empty_arrivals)

    @device_function
    def advance(stage, parity):
        """The next stage, and the parity of its phase."""
        last = stage == i32(stages - 1)
        return i32(0) if last else i32(stage + i32(1)), i32(parity ^ i32(last))

    return init_ring, advance


@device_function
def swizzled_chunk(line_address, line, chunk):
    """The address of 16-byte chunk `chunk` of a 128-byte line at line_address, the line-th of its box."""
    return line_address + ((chunk ^ (line & i32(7))) << i32(4))


@device_function
def matrix_address(boxes, block, warp, lane):
    """The address that a lane gives ldmatrix_x4 or stmatrix_x4 for columns 16 block .. 16 block + 15 of 64 rows.

    boxes: of 64 rows and 64 16-bit columns each, BOX_BYTES apart; each of the warpgroup's four warps has 16 rows.
    Matrices 0, 1 are the upper and lower 8 rows of the first 8 columns, 2, 3 of the next: what a thread passes are the
    accumulators 8 block .. 8 block + 7 of a wgmma, in pairs.
    """
    line = warp * i32(16) + (lane & i32(15))
    line_address = boxes + block // 4 * BOX_BYTES + line * i32(LINE)
    return swizzled_chunk(line_address, line, i32(block % 4 * 2) + (lane >> i32(4)))


@device_function
def accumulator_address(boxes, block, warp, lane):
    """The address of accumulators 4 block and 4 block + 1 of a wgmma in boxes of 64 rows and 32 float32 columns.

    The other two of the block belong 8 lines below, 8 * LINE bytes further on.
    """
    line = warp * i32(16) + (lane >> i32(2))
    line_address = boxes + block // 4 * BOX_BYTES + line * i32(LINE)
    chunk = i32(block % 4 * 2) + ((lane & i32(3)) >> i32(1))
    return swizzled_chunk(line_address, line, chunk) + ((lane & i32(1)) << i32(3))


@functools.cache
def stage_function(element, columns, is_float32):
    """The device function that writes a consumer's accumulators of so many columns to boxes, for TMA to store them.

    In the boxes they are `element`, 64 columns a box, or float32, 32 columns a box.
    """
    pack_two = cvt_pack(element)

    @device_function
    def stage_16_bit(acc, first, boxes, warp, lane):
        for block in range(columns // 16):
            i = first + block * 8
            stmatrix_x4(
                matrix_address(boxes, block, warp, lane),
                pack_two(acc[i], acc[i + 1]),
                pack_two(acc[i + 2], acc[i + 3]),
                pack_two(acc[i + 4], acc[i + 5]),
                pack_two(acc[i + 6], acc[i + 7]),
            )

    @device_function
    def stage_float32(acc, first, boxes, warp, lane):
        for block in range(columns // 8):
            i = first + block * 4
            target = accumulator_address(boxes, block, warp, lane)
            store_pair(target, acc[i], acc[i + 1])
            store_pair(target + 8 * LINE, acc[i + 2], acc[i + 3])

    return stage_float32 if is_float32 else stage_16_bit
