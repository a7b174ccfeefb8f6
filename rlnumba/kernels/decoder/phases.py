"""The GEMMs of a layer in the persistent decoder kernel: their weights through a ring, their epilogues.

The producer warp loads weights. It walks all phases of all layers and waits for a free stage of the ring, never for
activations: while the blocks exchange the output of a phase, the weights of the next ones arrive. All of A is in shared
memory; a product's bits do not depend on that, nor on where its stages end.

Each of the four warps has the accumulators of all eight rows, since the rows of A are broadcast. Warp w rounds and
writes the blocks of eight columns w, w + 4 and so on: lane 4 g + i has row g and the columns 2 i, 2 i + 1 of a block.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.decoder.activations import COMPLETE, copy_function
from rlnumba.kernels.decoder.config import LOAD_DELAY, PANEL_BYTES, STAGE_BYTES
from rlnumba.kernels.decoder.exchange import exchange_store
from rlnumba.kernels.gemm.epilogue import swiglu_function
from rlnumba.kernels.gemm.sm90 import main_loop_function
from rlnumba.kernels.gemm.sm90_config import Sm90GemmConfig
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import LINE, fence_proxy_async, load_pair, store_pair
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function, sync_warp
from rlnumba.kernels.ptx.wgmma import STEPS, WARPGROUP, WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring
from rlnumba.runtime.device import cuda

i32 = np.int32
# A thread, and what it finds in shared memory: the ring and its barriers, the residual stream, of which a computing
# thread has the elements of its accumulators, as pairs of float32.
At = namedtuple("At", "thread warp lane ring full empty residual")


@functools.cache
def produce_function(phase, stages, second_half=0):
    """The device function by which one warp loads a block's tiles of a layer's weight (n, k) into the ring.

    second_half: the row of W where the second half of a tile's rows begin, as those of up behind gate.
    """
    stage_panels, columns, tile_columns = phase.stage_panels, phase.columns, phase.tile_columns
    tiles, rounds, stage_bytes = phase.tiles, phase.rounds, phase.stage_bytes
    _, advance = ring(stages)

    @device_function
    def produce(weight_map, layer, at, stage, parity):
        """weight_map: of all layers, (layers, rows, k). A lane loads a panel. Returns the ring's next stage."""
        tile = i32(cuda.blockIdx.x)
        while tile < tiles:
            first_row = tile * tile_columns
            for done in range(rounds):
                sm90.mbarrier_wait(at.empty + stage * MBARRIER_BYTES, parity)
                sm90.wait_clocks(i32(LOAD_DELAY))
                barrier = at.full + stage * MBARRIER_BYTES
                if at.lane == 0:
                    sm90.mbarrier_expect_tx(barrier, i32(stage_bytes))
                sync_warp()
                if at.lane < stage_panels:
                    step = i32((done * stage_panels + at.lane) * STEPS)
                    box = at.ring + stage * STAGE_BYTES + at.lane * (columns * LINE)
                    # Evict-first: a weight is read once, and the exchange stays in L2.
                    sm90.tma_load_3d_evict_first(box, weight_map, step, first_row, layer, barrier)
                    if second_half:
                        up, up_row = box + tile_columns * LINE, i32(second_half + first_row)
                        sm90.tma_load_3d_evict_first(up, weight_map, step, up_row, layer, barrier)
                stage, parity = advance(stage, parity)
            tile = i32(tile + cuda.gridDim.x)
        return stage, parity

    return produce


@device_function
def nothing(done, rounds, leader, arguments):
    """Between the rounds of the main loop."""


@functools.cache
def multiply_function(phase, stages, element):
    """The device function acc = A W^T of a tile, whose weights come from the ring: the main loop of gemm/sm90.py."""
    start = wgmma_async(phase.columns, element, phase.stage_panels * 4, layout=WgmmaLayout(broadcast=True))
    a_bytes, rounds = phase.stage_panels * PANEL_BYTES, phase.rounds
    main_loop = main_loop_function(phase.columns, stages, STAGE_BYTES, start, nothing, a_bytes)

    @device_function
    def multiply(acc, a, at, stage, parity):
        return main_loop(acc, a, at.ring, at.full, at.empty, i32(rounds), stage, parity, at.thread == 0, i32(0))

    return multiply


@functools.cache
def copy_and_multiply_function(phase, rows, stages, element):
    """The device function of a block's first tile: as multiply, of rows that it copies from the exchange to A.

    The columns of a stage are copied while wgmma has those of the stage before.
    """
    start = wgmma_async(phase.columns, element, phase.stage_panels * 4, layout=WgmmaLayout(broadcast=True))
    wait_all_but_latest, wait_all = wgmma_wait_group(phase.columns // 2, 1), wgmma_wait_group(phase.columns // 2, 0)
    a_bytes, rounds = phase.stage_panels * PANEL_BYTES, phase.rounds
    copy_part = copy_function(rows, phase.panels * STEPS, phase.stage_panels * STEPS)
    _, advance = ring(stages)

    @device_function
    def copy_and_multiply(acc, a, at, exchange, offset, stage, parity):
        """offset: the word of the exchange where the rows begin."""
        previous = i32(0)
        copy_part(exchange, offset, a, i32(0), at.thread)
        for done in range(rounds):
            fence_proxy_async()
            sm90.named_barrier_sync(COMPLETE, WARPGROUP)
            sm90.mbarrier_wait(at.full + stage * MBARRIER_BYTES, parity)
            weights = smem_descriptor(at.ring + stage * STAGE_BYTES)
            start(acc, smem_descriptor(a + i32(done * a_bytes)), weights, i32(done != 0))
            if done + 1 < rounds:
                copy_part(exchange, offset, a, i32(done + 1), at.thread)
            wait_all_but_latest(acc)
            if done != 0 and at.thread == 0:
                sm90.mbarrier_arrive(at.empty + previous * MBARRIER_BYTES)
            previous = stage
            stage, parity = advance(stage, parity)
        wait_all(acc)
        if at.thread == 0:
            sm90.mbarrier_arrive(at.empty + previous * MBARRIER_BYTES)
        return stage, parity

    return copy_and_multiply


@functools.cache
def rounded_phase(phase, rows, stages, element, swiglu=False):
    """The device function of a phase whose output is rounded and handed on, with swiglu silu(gate) * up."""
    n, tile_columns, tiles, blocks = phase.n, phase.tile_columns, phase.tiles, phase.tile_columns // 8
    local_tiles, multiply, pack_two = phase.local_tiles, multiply_function(phase, stages, element), cvt_pack(element)
    activate = swiglu_function(Sm90GemmConfig(phase.columns, 1, 2, element, swiglu=True))

    @device_function
    def store_rounded(acc, exchange, offset, tile, warp, lane):
        row = lane >> i32(2)
        for block in range(blocks):
            column = i32(tile * tile_columns + block * 8 + (lane & i32(3)) * 2)
            if block % 4 == warp and row < rows and column < n:
                if swiglu:
                    activate(acc, 4 * block)
                word = pack_two(acc[4 * block], acc[4 * block + 1])
                exchange_store(exchange, i32(offset + row * (n // 2) + (column >> i32(1))), word)

    @device_function
    def compute_tiles(acc, a, at, exchange, offset, stage, parity):
        """All tiles of this block; offset: the word of the exchange where the output's rows (rows, n) begin."""
        tile = i32(cuda.blockIdx.x)
        for _ in range(local_tiles):
            if tile < tiles:
                stage, parity = multiply(acc, a, at, stage, parity)
                store_rounded(acc, exchange, offset, tile, at.warp, at.lane)
            tile = i32(tile + cuda.gridDim.x)
        return stage, parity

    return compute_tiles


@functools.cache
def residual_phase(phase, rows, stages, element):
    """The device function of a phase whose input is copied to A, and whose output is added to the residual stream."""
    n, tile_columns, tiles, blocks = phase.n, phase.tile_columns, phase.tiles, phase.tile_columns // 8
    local_tiles = phase.local_tiles
    copy_and_multiply = copy_and_multiply_function(phase, rows, stages, element)
    multiply, pack_two, unpack_two = multiply_function(phase, stages, element), cvt_pack(element), cvt_unpack(element)

    @device_function
    def add_residual(acc, residual, exchange, offset, tile, local_tile, warp, lane):
        row = lane >> i32(2)
        for block in range(blocks):
            column = i32(tile * tile_columns + block * 8 + (lane & i32(3)) * 2)
            if block % 4 == warp and row < rows and column < n:
                kept = residual + ((local_tile * blocks + block) * 32 + lane) * 8
                low, high = load_pair(kept)
                word = pack_two(acc[4 * block] + low, acc[4 * block + 1] + high)
                exchange_store(exchange, i32(offset + row * (n // 2) + (column >> i32(1))), word)
                low, high = unpack_two(word)
                store_pair(kept, low, high)

    @device_function
    def compute_tiles(acc, a, at, exchange, source, offset, stage, parity):
        """All tiles of this block; source, offset: the words of the exchange where input and output begin. The residual
        stream becomes the sum, rounded."""
        tile = i32(cuda.blockIdx.x)
        if tile < tiles:
            stage, parity = copy_and_multiply(acc, a, at, exchange, source, stage, parity)
            add_residual(acc, at.residual, exchange, offset, tile, i32(0), at.warp, at.lane)
        for local_tile in range(1, local_tiles):
            tile = i32(tile + cuda.gridDim.x)
            if tile < tiles:
                stage, parity = multiply(acc, a, at, stage, parity)
                add_residual(acc, at.residual, exchange, offset, tile, i32(local_tile), at.warp, at.lane)
        return stage, parity

    return compute_tiles


@functools.cache
def load_residual_function(phase, rows, element):
    """The device function that begins the residual stream of a block's tiles with the tokens' embeddings."""
    n, tile_columns, tiles, blocks = phase.n, phase.tile_columns, phase.tiles, phase.tile_columns // 8
    unpack_two = cvt_unpack(element)

    @device_function
    def load_residual(embeddings, input_ids, at):
        row, tile, local_tile = at.lane >> i32(2), i32(cuda.blockIdx.x), i32(0)
        while tile < tiles:
            for block in range(blocks):
                column = i32(tile * tile_columns + block * 8 + (at.lane & i32(3)) * 2)
                if block % 4 == at.warp and row < rows and column < n:
                    index = np.int64(input_ids[row]) * (n // 2) + (column >> i32(1))
                    low, high = unpack_two(embeddings[index])
                    store_pair(at.residual + ((local_tile * blocks + block) * 32 + at.lane) * 8, low, high)
            tile, local_tile = i32(tile + cuda.gridDim.x), i32(local_tile + 1)

    return load_residual
