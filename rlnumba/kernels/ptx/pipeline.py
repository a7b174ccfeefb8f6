"""Pipelines through shared memory on sm_90: rings of stages, layouts with named offsets, the 128-byte swizzle.

A ring has `stages` buffers. Two mbarriers belong to each: `full`, which the producer's TMA loads complete, and `empty`,
at which consumers arrive when they have read the buffer. A thread walks the ring with a stage index and a parity that
flips each time around. A consumer starts at parity 0. A producer starts at parity 1: waiting for the parity opposite to
a barrier's first phase returns at once, since all stages are empty at the start.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx.sm90 import LINE, mbarrier_init
from rlnumba.kernels.ptx.warp import device_function

i32 = np.int32

# TMA boxes with the 128-byte swizzle start at multiples of this.
SWIZZLE_ALIGNMENT = 1024
MBARRIER_BYTES = 8


class SharedLayout:
    """Byte offsets of a kernel's buffers in dynamic shared memory, by name, in the order in which they are given.

    SharedLayout(q=16384, kv=65536, full=4 * MBARRIER_BYTES).kv == 16384; `nbytes` is their sum and the slack that
    aligns the first of them to SWIZZLE_ALIGNMENT.
    """

    def __init__(self, **sizes):
        offset = 0
        for name, size in sizes.items():
            setattr(self, name, offset)
            offset += size
        self.nbytes = offset + SWIZZLE_ALIGNMENT


@device_function
def align_to_swizzle(address):
    """The first address at or after `address` at which swizzled boxes may start."""
    return (address + (SWIZZLE_ALIGNMENT - 1)) // SWIZZLE_ALIGNMENT * SWIZZLE_ALIGNMENT


@functools.cache
def ring(stages):
    """(init_ring, advance): the device functions of a ring of `stages` stages."""

    @device_function
    def init_ring(full, empty, producers, consumers):
        """Initialise the barriers of all stages, by one thread: arrivals that complete a phase of full, of empty."""
        for stage in range(stages):
            mbarrier_init(full + stage * MBARRIER_BYTES, producers)
            mbarrier_init(empty + stage * MBARRIER_BYTES, consumers)

    @device_function
    def advance(stage, parity):
        """The next stage, and the parity of its phase."""
        stage = i32(stage + i32(1))
        if stage == stages:
            stage = i32(0)
            parity ^= i32(1)
        return stage, parity

    return init_ring, advance


@device_function
def swizzled_chunk(row_address, row, chunk):
    """The address of 16-byte chunk `chunk` of a 128-byte line that starts at row_address; row: its number in the
    box."""
    return row_address + ((chunk ^ (row & i32(LINE // 16 - 1))) << i32(4))
