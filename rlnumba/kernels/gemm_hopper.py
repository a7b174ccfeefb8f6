"""Matrix products on Hopper: C = A B^T, C = A B and C += A^T B, warp-specialised, persistent, one order over K.

    linear                  Y (M, N)  = X (M, K) W (N, K)^T     reduction over K: A and B K-major
    linear_backward_input   dX (M, K) = dY (M, N) W (N, K)      reduction over N: B MN-major
    linear_backward_weight  dW (N, K) += dY (M, N)^T X (M, K)   reduction over M: A and B MN-major

Inputs float16 or bfloat16, accumulators float32, output in the inputs' type or float32.

A block holds one tile of C, 64 rows for each of its consumer warpgroups by `columns`, and stays on its SM
to work through tiles. One producer warp asks the copy engine for the next 64 steps of the reduction, `stages`
ahead; two barriers a stage say "full" and "empty". Consumers multiply; their accumulators go through shared
memory to the copy engine, which writes them while the next tile's products run.

Every element of C adds its products in the order of the reduction index, 16 at a time, in one accumulator,
whatever the tile's shape: a row's bits do not depend on M or on which tile shape was chosen.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.device import cuda
from rlnumba.kernels.hopper import (
    BOX_BYTES,
    LINE,
    STEPS,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_add,
    bulk_commit,
    bulk_load,
    bulk_store,
    bulk_wait,
    bulk_wait_read,
    fence_shared_to_bulk,
    fewer_registers,
    more_registers,
    operand,
    pack,
    shared_address,
    store_matrices,
    store_pair,
    sync_group,
    tensor_map_address,
    warp_uniform,
    warpgroup_product,
)
from rlnumba.kernels.instructions import device_function
from rlnumba.kernels.launch import kernel_factory

i32 = np.int32

# Rows of C that one warpgroup's instruction covers.
ROWS = 64
WARPGROUP = 128
# Tiles of C are visited in bands of this many tile rows, column by column: the rows of A of a band stay in
# the second-level cache. H200, 8192^3 bfloat16: 803 TFLOP/s, and 692 with 8.
BAND = 16
# Shared memory that a block may use, less what aligning its start to 1024 bytes costs.
SHARED_LIMIT = 227 * 1024 - 1024


class Tile(NamedTuple):
    """One kernel. groups: consumer warpgroups; columns: of C a tile; stages: boxes of A and B in flight.

    a_mn, b_mn: the operand lies MN-major in memory. element: "float16" or "bfloat16". output: "same" as the
    inputs, "float32", or "add" to float32.
    """

    columns: int
    groups: int
    stages: int
    element: str
    a_mn: bool = False
    b_mn: bool = False
    output: str = "same"

    @property
    def rows(self):
        return ROWS * self.groups

    @property
    def box_columns(self):
        """Columns of C in a 128-byte line."""
        return 64 if self.output == "same" else 32

    @property
    def staged_columns(self):
        """Columns of C that a warpgroup puts into shared memory at once: 16 KiB."""
        return min(self.columns, 2 * self.box_columns)

    @property
    def stage_bytes(self):
        return (self.rows + self.columns) * LINE

    @property
    def staged_bytes(self):
        return self.staged_columns // self.box_columns * BOX_BYTES

    @property
    def shared_bytes(self):
        return self.stages * (self.stage_bytes + 16) + self.groups * self.staged_bytes + 1024


@device_function
def place(index, tiles_down, tiles_across):
    """(row, column) of a tile: bands of BAND tile rows, down the columns of a band first."""
    band = index // (i32(BAND) * tiles_across)
    first = band * i32(BAND)
    height = min(tiles_down - first, i32(BAND))
    within = index - first * tiles_across
    return first + within % height, within // height


@kernel_factory
def hopper_product_kernel(tile):
    """The kernel of a Tile. Its columns are a multiple of its staged columns, and these of its box's."""
    columns, groups, stages, element, a_mn, b_mn, output = tile
    rows, box_columns, staged_columns = tile.rows, tile.box_columns, tile.staged_columns
    a_bytes, stage_bytes, staged_bytes = rows * LINE, tile.stage_bytes, tile.staged_bytes
    accumulators = columns // 2
    b_boxes = columns // 64
    start, wait_all_but_latest, wait_all = warpgroup_product(columns, element, a_mn, b_mn)
    pack_two = pack(element)
    wide = output != "same"
    add = output == "add"

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, 1))
    def hopper_product_kernel(a_map, b_map, c_map, m, n, k):
        """C (m, n) from A and B with k steps of reduction.

        Shared memory: stages of [A rows x 64 | B columns x 64], the consumers' staged output, then the
        barriers: full and empty, 8 bytes each a stage.
        """
        thread = i32(cuda.threadIdx.x)
        group = warp_uniform(thread >> i32(7))
        base = (shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024
        staged = base + stages * stage_bytes
        full = staged + groups * staged_bytes
        empty = full + stages * 8
        if thread == 0:
            for stage in range(stages):
                barrier_init(full + stage * 8, 1)
                barrier_init(empty + stage * 8, groups)
            barrier_init_fence()
        cuda.syncthreads()
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + columns - 1) // columns)
        rounds = i32((k + STEPS - 1) // STEPS)
        tiles = tiles_down * tiles_across
        stage = i32(0)
        if group == 0:
            fewer_registers()
            if thread == 0:
                a, b = tensor_map_address(a_map), tensor_map_address(b_map)
                # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
                parity = i32(1)
                for index in range(i32(cuda.blockIdx.x), tiles, i32(cuda.gridDim.x)):
                    row, column = place(i32(index), tiles_down, tiles_across)
                    for step in range(i32(0), rounds * i32(STEPS), i32(STEPS)):
                        barrier_wait(empty + stage * 8, parity)
                        arrived = full + stage * 8
                        target = base + stage * stage_bytes
                        barrier_expect(arrived, stage_bytes)
                        if a_mn:
                            for box in range(groups):
                                bulk_load(target + box * BOX_BYTES, a, row * rows + box * ROWS, step, arrived)
                        else:
                            bulk_load(target, a, step, row * rows, arrived)
                        if b_mn:
                            for box in range(b_boxes):
                                bulk_load(
                                    target + a_bytes + box * BOX_BYTES, b, column * columns + box * 64, step, arrived
                                )
                        else:
                            bulk_load(target + a_bytes, b, step, column * columns, arrived)
                        stage += i32(1)
                        if stage == stages:
                            stage = i32(0)
                            parity ^= i32(1)
        else:
            more_registers()
            c = tensor_map_address(c_map)
            consumer = group - i32(1)
            lane, warp, first_thread = thread & i32(31), (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
            staged += consumer * staged_bytes
            acc = cuda.local.array(accumulators, np.float32)
            for i in range(accumulators):
                acc[i] = np.float32(0.0)
            parity = i32(0)
            for index in range(i32(cuda.blockIdx.x), tiles, i32(cuda.gridDim.x)):
                row, column = place(i32(index), tiles_down, tiles_across)
                previous = i32(0)
                for done in range(rounds):
                    barrier_wait(full + stage * 8, parity)
                    target = base + stage * stage_bytes
                    start(acc, operand(target + consumer * BOX_BYTES), operand(target + a_bytes), i32(done != 0))
                    wait_all_but_latest(acc)
                    if done != 0 and first_thread:
                        barrier_arrive(empty + previous * 8)
                    previous = stage
                    stage += i32(1)
                    if stage == stages:
                        stage = i32(0)
                        parity ^= i32(1)
                wait_all(acc)
                if first_thread:
                    barrier_arrive(empty + previous * 8)
                for part in range(columns // staged_columns):
                    # The copy engine must have read the last part before this one overwrites it.
                    if first_thread:
                        bulk_wait_read()
                    sync_group(group, WARPGROUP)
                    if wide:
                        line = warp * i32(16) + (lane >> i32(2))
                        for block in range(staged_columns // 8):
                            i = (part * staged_columns // 8 + block) * 4
                            chunk = i32(block % 4 * 2) + ((lane & i32(3)) >> i32(1))
                            place_of = staged + block // 4 * BOX_BYTES + line * i32(LINE)
                            place_of += ((chunk ^ (line & i32(7))) << i32(4)) + ((lane & i32(1)) << i32(3))
                            store_pair(place_of, acc[i], acc[i + 1])
                            store_pair(place_of + 8 * LINE, acc[i + 2], acc[i + 3])
                    else:
                        line = warp * i32(16) + (lane & i32(15))
                        for block in range(staged_columns // 16):
                            i = (part * staged_columns // 16 + block) * 8
                            chunk = i32(block % 4 * 2) + (lane >> i32(4))
                            store_matrices(
                                staged
                                + block // 4 * BOX_BYTES
                                + line * i32(LINE)
                                + ((chunk ^ (line & i32(7))) << i32(4)),
                                pack_two(acc[i], acc[i + 1]),
                                pack_two(acc[i + 2], acc[i + 3]),
                                pack_two(acc[i + 4], acc[i + 5]),
                                pack_two(acc[i + 6], acc[i + 7]),
                            )
                    fence_shared_to_bulk()
                    sync_group(group, WARPGROUP)
                    if first_thread:
                        for box in range(staged_columns // box_columns):
                            at = column * columns + part * staged_columns + box * box_columns
                            if add:
                                bulk_add(c, at, row * rows + consumer * ROWS, staged + box * BOX_BYTES)
                            else:
                                bulk_store(c, at, row * rows + consumer * ROWS, staged + box * BOX_BYTES)
                        bulk_commit()
            if first_thread:
                bulk_wait()

    return hopper_product_kernel
