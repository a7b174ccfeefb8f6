"""The main loop of the GEMM by packed weights (few_rows.py): wgmma over the stages of a tile, in two forms."""

import functools

import numpy as np

from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import LINE, ldmatrix_x4, load_pair, store_function
from rlnumba.kernels.ptx.warp import device_function
from rlnumba.kernels.ptx.wgmma import STEPS, WARPGROUP, WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.quantized.few_rows_config import EXCHANGE_PADDING, PART_BYTES
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring
from rlnumba.runtime.device import cuda

i32 = np.int32
store_float = store_function("f")


@functools.cache
def transpose_function(columns, rows, warp_rows=16):
    """The device function by which a warpgroup turns a tile of C^T, columns by rows, into one of C, by shared memory.

    Rows of the latter are exchange_pitch (few_rows_config.py) elements apart there. warp_rows: rows of C^T of a warp,
    16 or the first eight of these.
    """
    pitch, halves = columns + EXCHANGE_PADDING, 1 if rows == 8 else 2

    @device_function
    def transpose(acc, transposed, exchange, barrier, warp, lane):
        """acc, as wgmma of A W^T leaves it, from `transposed`, as that of W A^T does.

        barrier: the index of the warpgroup's named barrier.
        """
        pair, column = (lane & i32(3)) * i32(2), i32(warp * i32(warp_rows) + (lane >> i32(2)))
        if warp * i32(warp_rows) < i32(columns):
            for block in range(rows // 8):
                for i in range(2):
                    for half in range(warp_rows // 8):
                        at = i32(i32(pair + i32(block * 8 + i)) * i32(pitch) + column + half * 8)
                        store_float(exchange + at * i32(4), transposed[block * 4 + half * 2 + i])
        sm90.named_barrier_sync(barrier, i32(WARPGROUP))
        if warp * i32(16) < i32(rows):
            for half in range(halves):
                row = i32(warp * i32(16) + i32(half * 8) + (lane >> i32(2)))
                for block in range(columns // 8):
                    at = i32(row * i32(pitch) + i32(block * 8) + pair)
                    first = block * 4 + half * 2
                    acc[first], acc[first + 1] = load_pair(exchange + at * i32(4))
        # Before the next tile's are written there.
        sm90.named_barrier_sync(barrier, i32(WARPGROUP))

    return transpose


@functools.cache
def shared_operands_function(config, start, is_first):
    """The device function of a loop over stages whose operands both lie in shared memory; returns the next stage.

    start: of wgmma_async, C^T from a box of 64 rows of the weight and the box of A. is_first: whether the sum begins
    here, or adds to that of a loop whose last stage, with the mbarrier at `previous`, is still being read.
    """
    stage_bytes, a_at, values = config.stage_bytes, config.a_at, config.rows // 2
    wait_1, wait_all = (wgmma_wait_group(values, pending) for pending in (1, 0))
    _, advance = ring(config.stages)

    @device_function
    def multiply_stages(acc, rings, part, rounds, previous, stage, parity, leader):
        """part: the number of the weight's box in a stage; leader: whether this thread arrives for its warpgroup."""
        for done in range(rounds):
            sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
            boxes = rings.stages + stage * stage_bytes
            weight = boxes + part * i32(PART_BYTES)
            if is_first:
                start(acc, smem_descriptor(weight), smem_descriptor(boxes + a_at), i32(done != 0))
            else:
                start(acc, smem_descriptor(weight), smem_descriptor(boxes + a_at))
            wait_1(acc)
            if (not is_first or done != 0) and leader:
                sm90.mbarrier_arrive(previous)
            previous = rings.empty + stage * MBARRIER_BYTES
            stage, parity = advance(stage, parity)
        wait_all(acc)
        if leader:
            sm90.mbarrier_arrive(previous)
        return stage, parity

    return multiply_stages


def multiply_function(config):
    """The device function of a tile's main loop: acc = A W^T over all stages; returns the ring's next stage.

    A's words of a panel are loaded before the wgmma of the panel before it is started: a warp that starts wgmma with A
    in registers stops until the tensor cores have taken them. With four panels there are registers for each.
    """
    columns, rows, panels, accumulators = config.columns, config.rows, config.panels, config.columns // 2
    a_bytes, stage_bytes, a_words = config.a_bytes, config.stage_bytes, STEPS // 4
    start = wgmma_async(columns, config.element, STEPS // 16, "registers", "k")
    wait_1, wait_2 = (wgmma_wait_group(accumulators, pending, a_words) for pending in (1, 2))
    wait_all = wgmma_wait_group(accumulators, 0, a_words)
    _, advance = ring(config.stages)
    a_panel, b_panel = rows * LINE, columns * LINE

    @device_function
    def load_a(words, panel, warp, lane):
        """A warp's 16 rows of a panel of A, where it has any."""
        if warp * i32(16) < i32(rows):
            line = i32(warp * i32(16) + (lane & i32(15))) & i32(rows - 1)
            for step in range(STEPS // 16):
                chunk = i32(i32(2 * step) + (lane >> i32(4))) ^ (line & i32(7))
                found = ldmatrix_x4(panel + line * i32(LINE) + (chunk << i32(4)))
                for i in range(4):
                    words[4 * step + i] = found[i]

    @device_function
    def multiply_four(acc, words, rings, rounds, stage, parity, leader, warp, lane):
        w0, w1, w2, w3 = words
        sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
        load_a(w0, rings.stages + stage * stage_bytes, warp, lane)
        previous = rings.empty
        for done in range(rounds):
            a = rings.stages + stage * stage_bytes
            b = a + a_bytes
            load_a(w1, a + a_panel, warp, lane)
            start(acc, w0, smem_descriptor(b), i32(done != 0))
            wait_2(acc, w2)
            load_a(w2, a + 2 * a_panel, warp, lane)
            start(acc, w1, smem_descriptor(b + b_panel), i32(1))
            wait_2(acc, w3)
            # wgmma of the stage before has ended.
            if done != 0 and leader:
                sm90.mbarrier_arrive(previous)
            load_a(w3, a + 3 * a_panel, warp, lane)
            start(acc, w2, smem_descriptor(b + 2 * b_panel), i32(1))
            wait_2(acc, w0)
            previous = rings.empty + stage * MBARRIER_BYTES
            stage, parity = advance(stage, parity)
            if done != rounds - 1:
                sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
                load_a(w0, rings.stages + stage * stage_bytes, warp, lane)
            start(acc, w3, smem_descriptor(b + 3 * b_panel), i32(1))
            wait_2(acc, w1)
        wait_all(acc, w3)
        if leader:
            sm90.mbarrier_arrive(previous)
        return stage, parity

    @device_function
    def multiply_two(acc, words, rings, rounds, stage, parity, leader, warp, lane):
        w0, w1, _, _ = words
        previous = rings.empty
        for done in range(rounds):
            sm90.mbarrier_wait(rings.full + stage * MBARRIER_BYTES, parity)
            a = rings.stages + stage * stage_bytes
            load_a(w0, a, warp, lane)
            start(acc, w0, smem_descriptor(a + a_bytes), i32(done != 0))
            wait_1(acc, w1)
            if done != 0 and leader:
                sm90.mbarrier_arrive(previous)
            load_a(w1, a + a_panel, warp, lane)
            start(acc, w1, smem_descriptor(a + a_bytes + b_panel), i32(1))
            wait_1(acc, w0)
            previous = rings.empty + stage * MBARRIER_BYTES
            stage, parity = advance(stage, parity)
        wait_all(acc, w1)
        if leader:
            sm90.mbarrier_arrive(previous)
        return stage, parity

    start_swapped = wgmma_async(
        rows, config.element, STEPS // 16 * panels, "k", "k", None, WgmmaLayout(b_panel, a_panel)
    )
    multiply_stages = shared_operands_function(config, start_swapped, True)
    values, exchange_at, transpose = rows // 2, config.exchange_at, transpose_function(columns, rows)

    @device_function
    def multiply_swapped(acc, words, rings, rounds, stage, parity, leader, warp, lane):
        transposed = cuda.local.array(values, np.float32)
        for i in range(values):
            transposed[i] = np.float32(0.0)
        # wgmma reads 64 rows: behind those of a narrower tile what follows it, for products that no thread reads.
        stage, parity = multiply_stages(transposed, rings, i32(0), rounds, rings.empty, stage, parity, leader)
        transpose(acc, transposed, rings.levels + i32(exchange_at), i32(1), warp, lane)
        return stage, parity

    if config.swapped:
        return multiply_swapped
    return multiply_four if panels == 4 else multiply_two
