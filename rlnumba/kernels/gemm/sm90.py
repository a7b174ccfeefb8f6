"""Matrix products on Hopper: C = A B^T, C = A B and C += A^T B, warp-specialised, persistent, one order over K.

    linear                  Y (M, N)  = X (M, K) W (N, K)^T     reduction over K: A and B K-major
    linear_backward_input   dX (M, K) = dY (M, N) W (N, K)      reduction over N: B MN-major
    linear_backward_weight  dW (N, K) += dY (M, N)^T X (M, K)   reduction over M: A and B MN-major
    linear_swiglu           Y (M, 2 F) = X W^T, and silu(gate) * up (M, F) of its halves

Inputs float16 or bfloat16, accumulators float32, output in the inputs' type or float32.

A block holds one tile of C, 64 rows for each of its consumer warpgroups by `columns`, and stays on its SM
to work through tiles. Two producer warps ask the copy engine for the next steps of the reduction, `stages`
ahead; two barriers a stage say "full" and "empty". Consumers multiply; their accumulators go through shared
memory to the copy engine, which writes them while the next tile's products run.

For SwiGLU a tile holds as many columns of the gate as of what it gates, from two places of W: a thread finds both in
its accumulators, and reads nothing back.

Every element of C adds its products in the order of the reduction index, 16 at a time, in one accumulator,
whatever the tile's shape: a row's bits do not depend on M or on which tile shape was chosen.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.nn.swiglu import sigmoid
from rlnumba.kernels.ptx.sm90 import (
    BOX_BYTES,
    LINE,
    STEPS,
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    bulk_wait_group_read_but_latest,
    cvt_pack,
    cvt_unpack,
    fence_proxy_async,
    load_pair,
    load_word,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    setmaxnreg_dec,
    setmaxnreg_inc,
    shared_address,
    smem_descriptor,
    stmatrix_x4,
    store_pair,
    tensor_map,
    tensor_map_address,
    tma_load_2d,
    tma_load_3d,
    tma_reduce_add_2d,
    tma_store_2d,
    warp_uniform,
    wgmma,
)
from rlnumba.kernels.ptx.sm90_async import prefetch_tensor_map
from rlnumba.kernels.ptx.warp import device_function, griddepcontrol_launch_dependents, griddepcontrol_wait
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize

i32, u32 = np.int32, np.uint32

# Where the kernels of this module compile.
ARCHITECTURES = [(9, 0, "a")]

# Rows of C that one warpgroup's instruction covers.
ROWS = 64
WARPGROUP = 128
# Tiles of C are visited in bands of this many tile rows, column by column: the rows of A of a band stay in
# the second-level cache. H200, 8192^3 bfloat16: 803 TFLOP/s, and 692 with 8.
BAND = 16
# A product of more than ROWS rows by a weight of as many elements is too long to gain from beginning early, and loses:
# 256 rows by 4096 x 12,288 take 46 us instead of 40.
LARGE_WEIGHT = 1 << 23
# Elements of a weight that comes from memory in about as long as a kernel takes to start.
SHORT_WEIGHT = 1 << 23
# Steps of a sum whose time is that of the second-level cache to add it to C: 1.2 TB/s of what is added. H200, 151,936 x
# 1024 += 768 steps: 555 us, and 516 where a quarter of C is fetched and written instead; 1,536 steps: 771 and 795.
FEW_STEPS = 1024
# Shared memory that a block may use, less what aligning its start to 1024 bytes costs.
SHARED_LIMIT = 227 * 1024 - 1024


class Tile(NamedTuple):
    """One kernel. groups: consumer warpgroups; columns: of C a tile; stages: boxes of A and B in flight.

    a_mn, b_mn: the operand lies MN-major in memory. element: "float16" or "bfloat16". output: "same" as the
    inputs, "float32", or "add" to float32. bias, residual: added to C before it is rounded. swiglu: half of the tile's
    columns are of the gate, half of what it gates; without bias and residual, output "same".
    panels: 64 steps each of the reduction in a stage; several only for one group and K-major operands with a multiple
    of so many steps. fetched: columns of C, of an "add", that come while the products run, so that their sum is
    written; to the others the second-level cache adds. 0, staged_columns, twice as many, or all. eight: C has up to
    eight rows, and A's box as many; for one group and a K-major A.
    """

    columns: int
    groups: int
    stages: int
    element: str
    a_mn: bool = False
    b_mn: bool = False
    output: str = "same"
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    panels: int = 1
    fetched: int = 0
    eight: bool = False

    @property
    def rows(self):
        return ROWS * self.groups

    @property
    def lines(self):
        """Of A's box."""
        return 8 if self.eight else self.rows

    @property
    def width(self):
        """Columns by which tiles of C advance: those of a box of B."""
        return self.columns // 2 if self.swiglu else self.columns

    @property
    def box_columns(self):
        """Columns of C in a 128-byte line."""
        return 64 if self.output == "same" else 32

    @property
    def staged_columns(self):
        """Columns of C that a warpgroup stages in shared memory, 8 or 16 KiB at once. 0: its threads write C.

        Of eight rows they write little, and sooner than the copy engine.
        """
        if self.width % self.box_columns or self.eight and self.output == "same":
            return 0
        return 2 * self.box_columns if self.width % (2 * self.box_columns) == 0 else self.box_columns

    @property
    def steps(self):
        """Of the reduction, that a stage holds."""
        return STEPS * self.panels

    @property
    def prefetches(self):
        """Whether the copy engine brings the residual, or C, while the products run; its place is the output's."""
        return self.fetched > 0 or self.residual and self.staged_columns > 0

    @property
    def stage_bytes(self):
        return self.panels * (self.lines + self.columns) * LINE

    @property
    def staged_bytes(self):
        columns = self.fetched or (self.columns if self.prefetches else self.staged_columns)
        return columns // self.box_columns * BOX_BYTES

    @property
    def staging_places(self):
        """Parts of the output, of staged_columns each, that shared memory has room for."""
        return self.staged_bytes // (self.staged_columns // self.box_columns * BOX_BYTES) if self.staged_columns else 1

    @property
    def blocks_per_sm(self):
        """How many blocks an SM holds at a time. Large tiles take all its registers."""
        return min(2, SHARED_LIMIT // self.shared_bytes) if self.groups == 1 and self.columns <= 64 else 1

    @property
    def shares_registers(self):
        """Whether the producer's registers go to the consumers, whose accumulators need them."""
        return self.columns > 128

    @property
    def shared_bytes(self):
        return self.stages * (self.stage_bytes + 16) + self.groups * (self.staged_bytes + 8) + 1024


@device_function
def udiv(number, by):
    """The quotient of int32 numbers, not negative: unsigned ones are divided in 32 bits, without a branch."""
    return i32(np.uint32(number) // np.uint32(by))


@device_function
def place(index, tiles_down, tiles_across):
    """(row, column) of a tile: bands of BAND tile rows, down the columns of a band first."""
    band = udiv(index, i32(BAND) * tiles_across)
    first = i32(band * i32(BAND))
    height = min(i32(tiles_down - first), i32(BAND))
    within = i32(index - first * tiles_across)
    column = udiv(within, height)
    return i32(first + within - column * height), column


@specialize
def sm90_product_kernel(tile):
    """The kernel of a Tile. Its width is a multiple of its staged columns, if it has any, else of 8."""
    columns, groups, stages, element, a_mn, b_mn, output, has_bias, has_residual, swiglu, panels, fetched, eight = tile
    rows, width, box_columns, staged_columns = tile.rows, tile.width, tile.box_columns, tile.staged_columns
    steps, stage_bytes, staged_bytes = tile.steps, tile.stage_bytes, tile.staged_bytes
    a_bytes, b_bytes = panels * tile.lines * LINE, panels * columns * LINE
    accumulators = columns // 2
    b_boxes = columns // 64
    parts = columns // staged_columns if staged_columns else 0
    gated = accumulators // 2
    start, wait_all_but_latest, wait_all = wgmma(columns, element, a_mn, b_mn, steps, eight=eight)
    pack_two, unpack_two = cvt_pack(element), cvt_unpack(element)
    wide = output != "same"
    add = output == "add"
    # Where parts of the output are staged in turn; the first ones are fetched.
    part_bytes, places = tile.staged_bytes // tile.staging_places, tile.staging_places
    shares_registers, prefetches = tile.shares_registers, tile.prefetches
    # The copy engine does not bring the residual, so each thread has its share of it in registers.
    keeps_residual = has_residual and not prefetches
    kept_words = columns // 4 if keeps_residual else 1
    # A weight as it lies in memory; the gradient of one has no such factor.
    b_first = not b_mn

    @device_function
    def load_a(target, a, row, column, step, arrived, n):
        """Ask for A's boxes of a tile and a stage."""
        if a_mn:
            for box in range(groups):
                tma_load_2d(target + box * BOX_BYTES, a, row * rows + box * ROWS, step, arrived)
        elif eight and panels > 1:
            tma_load_3d(target, a, 0, row * rows, udiv(step, i32(STEPS)), arrived)
        else:
            # A box for all panels would bring them too close together where A has fewer than 64 rows.
            for panel in range(panels):
                tma_load_2d(target + panel * BOX_BYTES, a, step + panel * STEPS, row * rows, arrived)

    @device_function
    def load_b(target, b, row, column, step, arrived, n):
        """Ask for B's boxes of a tile and a stage."""
        if b_mn:
            for box in range(b_boxes):
                tma_load_2d(target + box * BOX_BYTES, b, column * columns + box * 64, step, arrived)
        elif swiglu:
            for panel in range(panels):
                here, at = target + panel * columns * LINE, step + panel * STEPS
                tma_load_2d(here, b, at, column * width, arrived)
                tma_load_2d(here + width * LINE, b, at, i32(n) + column * width, arrived)
        elif panels > 1:
            tma_load_3d(target, b, 0, column * width, udiv(step, i32(STEPS)), arrived)
        else:
            tma_load_2d(target, b, step, column * width, arrived)

    def bring_function(load, early):
        """The device function of the warp that asks for all of an operand; early: while kernels ahead still run."""

        @device_function
        def bring(operand_map, nbytes, target, full, empty, shape):
            """nbytes: of the boxes of a stage; target: where those of the first stage belong."""
            tiles, tiles_down, tiles_across, rounds, n = shape
            lane = i32(cuda.threadIdx.x) & i32(31)
            # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
            stage, parity = i32(0), i32(1)
            index = i32(cuda.blockIdx.x)
            row, column = place(index, tiles_down, tiles_across)
            last_step = i32(rounds * steps)
            if not early:
                if lane == 0:
                    prefetch_tensor_map(operand_map)
                griddepcontrol_wait()
            while index < tiles:
                # Not a range: how often it goes round would be worked out behind the wait, for 0.1 us.
                step = i32(0)
                while step < last_step:
                    mbarrier_wait(empty + stage * 8, parity)
                    if lane == 0:
                        mbarrier_expect_tx(full + stage * 8, nbytes)
                        load(target + stage * stage_bytes, operand_map, row, column, step, full + stage * 8, n)
                    step = i32(step + steps)
                    stage += i32(1)
                    if stage == stages:
                        stage = i32(0)
                        parity ^= i32(1)
                index = i32(index + i32(cuda.gridDim.x))
                row, column = place(index, tiles_down, tiles_across)

        return bring

    # A weight comes while the kernels ahead still work on its factor.
    bring_a, bring_b = bring_function(load_a, False), bring_function(load_b, b_first)

    @device_function
    def fetch(source, row, column, consumer, staged, arrived):
        """Ask for the part of the residual, or of C, that a consumer adds to its tile."""
        bulk_wait_group_read()
        mbarrier_expect_tx(arrived, staged_bytes)
        for box in range(staged_bytes // BOX_BYTES):
            at = column * columns + box * box_columns
            tma_load_2d(staged + box * BOX_BYTES, tensor_map_address(source), at, row * rows + consumer * ROWS, arrived)

    @device_function
    def stage_part(acc, part, place, warp, lane):
        """A part of the accumulators to `place` in shared memory, in 16 bits."""
        line = warp * i32(16) + (lane & i32(15))
        for block in range(staged_columns // 16):
            i = (part * staged_columns // 16 + block) * 8
            chunk = i32(block % 4 * 2) + (lane >> i32(4))
            target = place + block // 4 * BOX_BYTES + line * i32(LINE)
            stmatrix_x4(
                target + ((chunk ^ (line & i32(7))) << i32(4)),
                pack_two(acc[i], acc[i + 1]),
                pack_two(acc[i + 2], acc[i + 3]),
                pack_two(acc[i + 4], acc[i + 5]),
                pack_two(acc[i + 6], acc[i + 7]),
            )

    @device_function
    def wide_place(place, block, warp, lane):
        """Where in a box of float32 a thread's acc[4 block] and the next belong; the other two are 8 lines below."""
        line = warp * i32(16) + (lane >> i32(2))
        chunk = i32(block % 4 * 2) + ((lane & i32(3)) >> i32(1))
        place += block // 4 * BOX_BYTES + line * i32(LINE)
        return place + ((chunk ^ (line & i32(7))) << i32(4)) + ((lane & i32(1)) << i32(3))

    @device_function
    def activate(acc, i):
        """acc[i], acc[i + 1] = silu(gate) * up, of values as they are stored."""
        gate, next_gate = unpack_two(pack_two(acc[i], acc[i + 1]))
        up, next_up = unpack_two(pack_two(acc[gated + i], acc[gated + i + 1]))
        acc[i] = gate * sigmoid(gate) * up
        acc[i + 1] = next_gate * sigmoid(next_gate) * next_up

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, tile.blocks_per_sm))
    def sm90_product_kernel(a_map, b_map, c_map, residual_map, c, bias, residual, m, n, k, arriving):
        """C (m, n) from A and B with k steps of reduction; with SwiGLU, C (m, 2 n), and `residual` (m, n) is written.

        c, residual (m, n / 2) and bias (n / 2) are seen as pairs of 16 bits. What the Tile does not use is one
        element long. arriving: bytes that A's boxes of one stage bring. Shared memory: stages of
        [A rows x 64 | B columns x 64], the consumers' staged output, then the barriers, 8 bytes each: full
        and empty for every stage, and one a consumer for its residual.
        """
        thread = i32(cuda.threadIdx.x)
        group = warp_uniform(thread >> i32(7))
        base = (shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024
        staged = base + stages * stage_bytes
        full = staged + groups * staged_bytes
        empty = full + stages * 8
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(full + stage * 8, 2)
                mbarrier_init(empty + stage * 8, groups)
            for consumer in range(groups):
                mbarrier_init(empty + stages * 8 + consumer * 8, 1)
            mbarrier_init_fence()
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        tiles_down = i32((m + rows - 1) // rows)
        tiles_across = i32((n + width - 1) // width)
        rounds = i32((k + steps - 1) // steps)
        tiles = i32(tiles_down * tiles_across)
        stage = i32(0)
        if group == 0:
            if shares_registers:
                setmaxnreg_dec()
            # Two warps, so that a long row of requests for B does not hold up those for A.
            shape = (tiles, tiles_down, tiles_across, rounds, i32(n))
            producer = warp_uniform(thread >> i32(5))
            if producer == 0:
                bring_a(tensor_map_address(a_map), i32(arriving), base, full, empty, shape)
            elif producer == 1:
                bring_b(tensor_map_address(b_map), i32(b_bytes), base + a_bytes, full, empty, shape)
        else:
            if shares_registers:
                setmaxnreg_inc()
            consumer = group - i32(1)
            lane, warp, first_thread = thread & i32(31), (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
            staged += consumer * staged_bytes
            residual_here = empty + stages * 8 + consumer * 8
            residual_parity = i32(0)
            acc = cuda.local.array(accumulators, np.float32)
            kept = cuda.local.array(kept_words, np.int32)
            for i in range(accumulators):
                acc[i] = np.float32(0.0)
            parity = i32(0)
            # Not at once: the copy engine still reads the output of the tile before.
            fetch_at = min(rounds - i32(1), i32(2))
            griddepcontrol_wait()
            index, rows_of_c, columns_of_c = i32(cuda.blockIdx.x), i32(m), i32(n)
            while index < tiles:
                row, column = place(index, tiles_down, tiles_across)
                index = i32(index + i32(cuda.gridDim.x))
                # This thread's accumulators: rows `line` and line + 8, columns 8 b + 2 (lane % 4) and the next.
                line = i32(row * rows + consumer * ROWS + warp * i32(16) + (lane >> i32(2)))
                pair = i32((column * width >> i32(1)) + (lane & i32(3)))
                if keeps_residual:
                    # Under way while the products run.
                    for block in range(columns // 8):
                        for half in range(2):
                            kept[block * 2 + half] = i32(0)
                            if i32(line + half * 8) < rows_of_c and i32((pair + block * 4) * 2) < columns_of_c:
                                kept[block * 2 + half] = residual[u32(line + half * 8), u32(pair + block * 4)]
                previous = i32(0)
                for done in range(rounds):
                    mbarrier_wait(full + stage * 8, parity)
                    target = base + stage * stage_bytes
                    start(
                        acc,
                        smem_descriptor(target + consumer * BOX_BYTES),
                        smem_descriptor(target + a_bytes),
                        i32(done != 0),
                    )
                    wait_all_but_latest(acc)
                    if prefetches and done == fetch_at and first_thread:
                        fetch(c_map if fetched else residual_map, row, column, consumer, staged, residual_here)
                    if done != 0 and first_thread:
                        mbarrier_arrive(empty + previous * 8)
                    previous = stage
                    stage += i32(1)
                    if stage == stages:
                        stage = i32(0)
                        parity ^= i32(1)
                wait_all(acc)
                if first_thread:
                    mbarrier_arrive(empty + previous * 8)
                if has_bias:
                    for block in range(columns // 8):
                        if i32((pair + block * 4) * 2) < columns_of_c:
                            low, high = unpack_two(bias[u32(pair + block * 4)])
                            acc[block * 4] += low
                            acc[block * 4 + 1] += high
                            acc[block * 4 + 2] += low
                            acc[block * 4 + 3] += high
                if prefetches:
                    mbarrier_wait(residual_here, residual_parity)
                    residual_parity ^= i32(1)
                if fetched:
                    for block in range(fetched // 8):
                        for half in range(2):
                            i = block * 4 + half * 2
                            low, high = load_pair(wide_place(staged, block, warp, lane) + half * 8 * LINE)
                            acc[i] += low
                            acc[i + 1] += high
                elif prefetches:
                    line_here = warp * i32(16) + (lane >> i32(2))
                    for block in range(columns // 8):
                        place_here = (
                            staged + block // 8 * BOX_BYTES + line_here * i32(LINE) + ((lane & i32(3)) << i32(2))
                        )
                        place_here += (i32(block % 8) ^ (line_here & i32(7))) << i32(4)
                        for half in range(2):
                            low, high = unpack_two(load_word(place_here + half * 8 * LINE))
                            acc[block * 4 + half * 2] += low
                            acc[block * 4 + half * 2 + 1] += high
                elif keeps_residual:
                    for block in range(columns // 8):
                        for half in range(2):
                            low, high = unpack_two(kept[block * 2 + half])
                            acc[block * 4 + half * 2] += low
                            acc[block * 4 + half * 2 + 1] += high
                if parts == 0:
                    # One row and one column at a time, in 32 bits: what stands here keeps the next kernel waiting.
                    for half in range(2):
                        if i32(line + half * 8) < rows_of_c:
                            c_row, residual_row = (
                                c[u32(line + half * 8)],
                                residual[u32(line + half * 8) if swiglu else u32(0)],
                            )
                            for block in range(width // 8):
                                at = i32(pair + block * 4)
                                if i32(at * 2) < columns_of_c:
                                    i = block * 4 + half * 2
                                    c_row[u32(at)] = pack_two(acc[i], acc[i + 1])
                                    if swiglu:
                                        up = pack_two(acc[gated + i], acc[gated + i + 1])
                                        c_row[u32((columns_of_c >> i32(1)) + at)] = up
                                        activate(acc, i)
                                        residual_row[u32(at)] = pack_two(acc[i], acc[i + 1])
                for part in range(parts):
                    # The copy engine must have read the last part before this one overwrites it.
                    if first_thread and (part >= places or not prefetches):
                        if places == 2:
                            bulk_wait_group_read_but_latest()
                        else:
                            bulk_wait_group_read()
                    named_barrier_sync(group, WARPGROUP)
                    here = staged + i32(part % places) * part_bytes
                    if wide:
                        for block in range(staged_columns // 8):
                            i = (part * staged_columns // 8 + block) * 4
                            target = wide_place(here, block, warp, lane)
                            store_pair(target, acc[i], acc[i + 1])
                            store_pair(target + 8 * LINE, acc[i + 2], acc[i + 3])
                    else:
                        stage_part(acc, part, here, warp, lane)
                    fence_proxy_async()
                    named_barrier_sync(group, WARPGROUP)
                    if first_thread:
                        out = tensor_map_address(c_map)
                        first_column = column * width + part * staged_columns
                        if swiglu and part * staged_columns >= width:
                            first_column += i32(n) - width
                        for box in range(staged_columns // box_columns):
                            at = first_column + box * box_columns
                            source = here + box * BOX_BYTES
                            if add and part * staged_columns >= fetched:
                                tma_reduce_add_2d(out, at, row * rows + consumer * ROWS, source)
                            else:
                                tma_store_2d(out, at, row * rows + consumer * ROWS, source)
                        bulk_commit_group()
                if swiglu and parts > 0:
                    for i in range(0, gated, 2):
                        activate(acc, i)
                    if first_thread:
                        bulk_wait_group_read()
                    named_barrier_sync(group, WARPGROUP)
                    stage_part(acc, 0, staged, warp, lane)
                    fence_proxy_async()
                    named_barrier_sync(group, WARPGROUP)
                    if first_thread:
                        for box in range(staged_columns // box_columns):
                            tma_store_2d(
                                tensor_map_address(residual_map),
                                column * width + box * box_columns,
                                row * rows + consumer * ROWS,
                                staged + box * BOX_BYTES,
                            )
                        bulk_commit_group()
            if first_thread:
                bulk_wait_group()

    return sm90_product_kernel


@functools.cache
def processors():
    """How many SMs the GPU has; 1 in the simulator."""
    if device.name() != "cuda":
        return 1
    import cupy

    return cupy.cuda.Device().attributes["MultiProcessorCount"]


_nothing = {}


def _none(dimensions):
    """An int32 array of one element that stands for an argument left out."""
    if dimensions not in _nothing:
        _nothing[dimensions] = device.xp().zeros((1,) * dimensions, np.int32)
    return _nothing[dimensions]


def with_stages(tile, most_panels, k):
    """The Tile with as many panels a stage as divide k, up to so many, and as many stages as shared memory takes."""
    panels = most_panels
    while panels > 1 and k % (STEPS * panels):
        panels //= 2
    tile = tile._replace(panels=panels, stages=2)
    return tile._replace(stages=min((SHARED_LIMIT - tile.shared_bytes) // (tile.stage_bytes + 16) + 2, 16))


def few_rows_tile(m, n, k, processors, fixed, swiglu):
    """The Tile for up to ROWS rows, whose time is the weight's way from memory, or the chain of products over k.

    A chain takes 0.05 us for 64 steps of 16 columns and 0.075 us of 64, and 0.03 us more for each stage: several panels
    a stage. Up to eight rows of A take little room: more of the weight is under way. As long as tiles fill half of the
    SMs, the next kernel brings its own weight meanwhile, all of it if it is short; where 64 columns fill more, 32 of
    two blocks an SM are better. Of long weights the last wave should be full. H200, 1 and 64 rows: with one panel a
    stage and 64 columns 5.0 and 5.1 us for 1024 x 2048, with these 3.0 and 3.4; 6.9 and 7.0 for 1024 x 3072, and 3.7
    and 4.5; 10.2 and 10.7 for 4096 x 4096, and 9.6 and 10.3. One row, 4096 x 1024: 3.1 with two panels, 2.9 with four;
    6144 x 1024: 5.1 with 96 columns, 4.1 with 32.
    """
    eight, halves = m <= 8, 2 if swiglu else 1

    def filled(columns):
        return -(-n // (columns // halves)) / processors

    if n * halves * k <= SHORT_WEIGHT and eight:
        widths = (32, 48, 64, 96, 128) if swiglu else (16, 24, 32, 48, 64)
        columns = min(widths, key=lambda columns: abs(filled(columns) - 0.5))
        most_panels = 2 if swiglu and columns > 32 else 4
        if not swiglu and filled(columns) > 0.6:
            columns, most_panels = 32, 1
    elif n * halves * k <= SHORT_WEIGHT:
        columns = 16 * halves if n * halves <= 16 * processors else 64 if filled(64) > 0.45 else 32
        most_panels = 4 if columns == 16 * halves else 1 if columns == 64 else 2
        if swiglu and columns == 64:
            columns, most_panels = 48, 2
    else:
        widths = (64, 128) if swiglu else (64, 32, 48, 96)
        columns = min(widths, key=lambda columns: round(1 - filled(columns) / math.ceil(filled(columns)), 1))
        most_panels = 4 if columns <= (32 if eight else 16 * halves) else 2 if eight or columns != 64 else 1
    return with_stages(Tile(columns, 1, 2, *fixed, eight=eight), most_panels, k)


@functools.cache
def best_tile(m, n, k, element, a_mn, b_mn, output, bias, residual, processors, swiglu=False):
    """The Tile that a simple model of time finds the fastest for C (m, n) with k steps; (m, 2 n) for swiglu.

    A round of 64 steps takes as long as the tensor cores need for the tile, shared memory to take it in and give it
    out, or the second-level cache to bring it, or a round's own latency; blocks work through tiles in waves. The rates
    are fitted to an H200.
    """
    fixed = (element, a_mn, b_mn, output, bias, residual, swiglu)
    if m <= ROWS and output == "same" and not (a_mn or b_mn):
        return few_rows_tile(m, n, k, processors, fixed, swiglu)
    best = None
    for groups in (1, 2):
        for columns in (64, 96, 128, 192, 256):
            if (b_mn or output != "same") and columns % 64 or swiglu and columns in (96, 192):
                continue
            # Wider tiles have no time to wait for a stage.
            several = groups == 1 and columns == 64 and not (a_mn or b_mn)
            tile = Tile(columns, groups, 2, *fixed, eight=several and m <= 8)
            tile = with_stages(tile, 2 if several else 1, k)
            if tile.stages < 3:
                continue
            rows = tile.rows
            # Lines of shared memory that the copy engine writes, and that the warpgroups' four products read.
            lines = rows + columns + groups * (ROWS + columns)
            latency_us = 0.10 + 0.03 / tile.panels
            round_us = max(rows * columns / 46000, lines / 1440, (rows + columns) / 860, latency_us)
            tiles = -(-m // rows) * -(-n // tile.width)
            waves = -(-tiles // processors)
            time_us = waves * (-(-k // STEPS) * round_us + 0.8)
            # Of equals, the one that brings less from memory.
            if best is None or (time_us, rows + columns) < best[0]:
                best = (time_us, rows + columns), tile
    tile = best[1]
    if output == "add" and k <= FEW_STEPS and tile.columns == 256:
        tile = tile._replace(fetched=tile.staged_columns)
    return tile


def product(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """out = A B (+ bias + residual), or out += A B if `add`, with the tile that best_tile chooses.

    Matrices as in sm90_product.
    """
    m, n = out.shape
    k = a.shape[0] if a_mn else a.shape[1]
    output = "add" if add else "same" if out.dtype == a.dtype else "float32"
    tile = best_tile(m, n, k, a.dtype.name, a_mn, b_mn, output, bias is not None, residual is not None, processors())
    sm90_product(tile, a, b, out, bias, residual)


def swiglu_product(x, weight, gate_up, out):
    """gate_up = X W^T and out = silu(gate) * up, with the tile that best_tile chooses: the bits of linear and swiglu.

    x (M, K), weight (2 F, K), gate_up (M, 2 F) and out (M, F) of one 16-bit type; the rows of all are multiples of 16
    bytes long. M, F and K > 0.
    """
    (m, k), n, element = x.shape, out.shape[1], x.dtype.name
    tile = best_tile(m, n, k, element, False, False, "same", False, False, processors(), True)
    sm90_product(tile, x, weight, gate_up, residual=out)


def sm90_product(tile, a, b, out, bias=None, residual=None, blocks=None):
    """out = A B (+ bias + residual), or += where the Tile says "add", by the kernel of `tile`.

    a: (M, K), or (K, M) if tile.a_mn; b: (N, K), or (K, N) if tile.b_mn; out (M, N); bias (N,), residual
    (M, N) of a's dtype. Rows of all matrices are multiples of 16 bytes long. M, N and K > 0; M <= 8 if tile.eight.
    If tile.swiglu: b (2 N, K), out (M, 2 N), and residual (M, N) is written.
    blocks: of the grid; by default as many as the SMs hold at a time.
    """
    m, n = residual.shape if tile.swiglu else out.shape
    k = a.shape[0] if tile.a_mn else a.shape[1]
    a_rows = ROWS if tile.a_mn else min(tile.rows, -(-m // 8) * 8)
    if tile.eight and tile.panels > 1:
        a_map = tensor_map(a, tile.panels, a_rows, 64)
    else:
        a_map = tensor_map(a, a_rows, 64)
    if tile.panels > 1 and not tile.swiglu:
        b_map = tensor_map(b, tile.panels, tile.width, 64)
    else:
        b_map = tensor_map(b, 64 if tile.b_mn else tile.width, 64)
    staged = tile.staged_columns > 0
    c_map = tensor_map(out, ROWS, tile.box_columns) if staged else _none(1)
    arriving = tile.panels * LINE * (tile.rows if tile.a_mn else a_rows)
    tiles = -(-m // tile.rows) * -(-n // tile.width)
    also_by_map = tile.prefetches and not tile.fetched or tile.swiglu and staged
    launch(
        sm90_product_kernel(tile),
        min(tiles, blocks or processors() * tile.blocks_per_sm),
        (tile.groups + 1) * WARPGROUP,
        a_map,
        b_map,
        c_map,
        tensor_map(residual, ROWS, tile.box_columns) if also_by_map else _none(1),
        _none(2) if staged else out.view(np.int32),
        _none(1) if bias is None else bias.view(np.int32),
        _none(2) if residual is None or staged else residual.view(np.int32),
        m,
        n,
        k,
        arriving,
        shared=tile.shared_bytes,
        # Only a weight as it lies in memory is read ahead.
        pdl=ALWAYS if tile.b_mn else m <= ROWS or b.size < LARGE_WEIGHT,
    )
