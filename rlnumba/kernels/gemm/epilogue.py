"""Epilogue of the sm_90 GEMM: bias, residual, SwiGLU and C itself are added to a tile's accumulators, which are stored.

A thread's accumulators (kernels/ptx/wgmma.py) are two rows, `row` and row + 8 of C, and of each eight columns the pair
2 `pair` and 2 pair + 1, `pair` counting from a tile's first pair by 4. 16-bit matrices that threads read and write are
seen as int32 words, pairs of elements. Rounding comes last, so that a fused epilogue has the bits of separate kernels
only where those keep float32; SwiGLU rounds gate and up first, as the separate kernels do.
"""

import functools

import numpy as np

from rlnumba.kernels.nn.swiglu import activation_functions
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.shared_memory import BOX_BYTES, LINE, fence_proxy_async, load_pair, load_word
from rlnumba.kernels.ptx.warp import add_gradient, cvt_pack, cvt_unpack, device_function
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.kernels.tile.pipeline import accumulator_address, stage_function, swizzled_chunk

i32, u32 = np.int32, np.uint32


@functools.cache
def addends(config):
    """(load_residual, prefetch, add_addends): what is added to the accumulators, each step a device function."""
    columns, prefetched_columns, tile_columns = config.columns, config.prefetched_columns, config.tile_columns
    box_columns, staged_bytes, prefetches = config.box_columns, config.staged_bytes, config.prefetches
    # Each thread keeps in registers the part of the residual that TMA does not load.
    keeps_residual = config.residual and not prefetches
    loaded_columns = prefetched_columns or (columns if config.residual else 0)
    has_bias, unpack_two = config.bias, cvt_unpack(config.element)

    @device_function
    def load_residual(words, residual, row, pair, m, n):
        """Start to load this thread's residual into registers; it arrives during the main loop."""
        if keeps_residual:
            for block in range(columns // 8):
                for half in range(2):
                    words[block * 2 + half] = i32(0)
                    if i32(row + half * 8) < m and i32((pair + block * 4) * 2) < n:
                        words[block * 2 + half] = residual[u32(row + half * 8), u32(pair + block * 4)]

    @device_function
    def prefetch(source, first_row, tile_column, staged, prefetched):
        """One thread starts to load the residual's, or C's, part of a consumer's tile to where its output is staged."""
        sm90.bulk_wait_group_read()
        sm90.mbarrier_expect_tx(prefetched, staged_bytes)
        for box in range(staged_bytes // BOX_BYTES):
            column = tile_column * tile_columns + box * box_columns
            sm90.tma_load_2d(staged + box * BOX_BYTES, source, column, first_row, prefetched)

    @device_function
    def addend(words, staged, block, half, warp, lane):
        """The residual or C of a pair of accumulators, from where it was loaded to."""
        if prefetched_columns:
            return load_pair(accumulator_address(staged, block, warp, lane) + half * 8 * LINE)
        if prefetches:
            line = warp * i32(16) + (lane >> i32(2))
            address = staged + block // 8 * BOX_BYTES + line * i32(LINE) + ((lane & i32(3)) << i32(2))
            return unpack_two(load_word(swizzled_chunk(address, line, i32(block % 8)) + half * 8 * LINE))
        return unpack_two(words[block * 2 + half])

    @device_function
    def add_addends(acc, bias, words, staged, pair, n, warp, lane):
        """acc += bias, then the residual or C, which has been loaded."""
        if has_bias:
            for block in range(columns // 8):
                if i32((pair + block * 4) * 2) < n:
                    low, high = unpack_two(bias[u32(pair + block * 4)])
                    for half in range(2):
                        acc[block * 4 + half * 2] += low
                        acc[block * 4 + half * 2 + 1] += high
        for block in range(loaded_columns // 8):
            for half in range(2):
                low, high = addend(words, staged, block, half, warp, lane)
                i = block * 4 + half * 2
                if prefetched_columns:
                    acc[i], acc[i + 1] = add_gradient(low, acc[i]), add_gradient(high, acc[i + 1])
                else:
                    acc[i] += low
                    acc[i + 1] += high

    return load_residual, prefetch, add_addends


@functools.cache
def swiglu_function(config):
    """The device function activate(acc, i): acc[i], acc[i + 1] = activation(gate) * up, of values as stored."""
    half_of_columns = config.columns // 4
    pack_two, unpack_two = cvt_pack(config.element), cvt_unpack(config.element)
    gate_sigmoid, _ = activation_functions(config.activation)

    @device_function
    def activate(acc, i):
        gate, next_gate = unpack_two(pack_two(acc[i], acc[i + 1]))
        up, next_up = unpack_two(pack_two(acc[half_of_columns + i], acc[half_of_columns + i + 1]))
        acc[i] = gate * gate_sigmoid(gate) * up
        acc[i + 1] = next_gate * gate_sigmoid(next_gate) * next_up

    return activate


@functools.cache
def store_by_threads_function(config):
    """The device function that writes accumulators of 16-bit output from registers; with SwiGLU its output, too."""
    tile_columns, swiglu, up_at = config.tile_columns, config.swiglu, config.columns // 4
    pack_two, activate = cvt_pack(config.element), swiglu_function(config)

    @device_function
    def store_by_threads(acc, c, activated, row, pair, m, n):
        """Write rows `row` and row + 8, from the word `pair` on, to c and, with SwiGLU, to activated."""
        # One row and one column at a time, in 32 bits: instructions here delay the next kernel.
        for half in range(2):
            if i32(row + half * 8) < m:
                c_row = c[u32(row + half * 8)]
                activated_row = activated[u32(row + half * 8)] if swiglu else c_row
                for block in range(tile_columns // 8):
                    at = i32(pair + block * 4)
                    if i32(at * 2) < n:
                        i = block * 4 + half * 2
                        c_row[u32(at)] = pack_two(acc[i], acc[i + 1])
                        if swiglu:
                            up = pack_two(acc[up_at + i], acc[up_at + i + 1])
                            c_row[u32((n >> i32(1)) + at)] = up
                            activate(acc, i)
                            activated_row[u32(at)] = pack_two(acc[i], acc[i + 1])

    return store_by_threads


@functools.cache
def store_by_tma_function(config):
    """The device function that writes accumulators through shared memory by TMA, staged_columns at a time."""
    columns, tile_columns, swiglu = config.columns, config.tile_columns, config.swiglu
    box_columns, staged_columns = config.box_columns, config.staged_columns
    output, prefetches, prefetched_columns = config.output, config.prefetches, config.prefetched_columns
    part_bytes = staged_columns // box_columns * BOX_BYTES
    buffers = config.staged_bytes // part_bytes
    wait_for_buffer = sm90.bulk_wait_group_read_1 if buffers == 2 else sm90.bulk_wait_group_read
    stage, activate = stage_function(config.element, staged_columns, output != "same"), swiglu_function(config)

    @device_function
    def stage_and_store(acc, first, c_map, column, row, staged, add, warpgroup, warp, lane, leader):
        """Stage accumulators `first` and so on once TMA has read what `staged` held; one thread stores or adds them."""
        sm90.named_barrier_sync(warpgroup, WARPGROUP)
        stage(acc, first, staged, warp, lane)
        fence_proxy_async()
        sm90.named_barrier_sync(warpgroup, WARPGROUP)
        if leader:
            for box in range(staged_columns // box_columns):
                if add:
                    sm90.tma_reduce_add_2d(c_map, column + box * box_columns, row, staged + box * BOX_BYTES)
                else:
                    sm90.tma_store_2d(c_map, column + box * box_columns, row, staged + box * BOX_BYTES)
            sm90.bulk_commit_group()

    @device_function
    def store_part(acc, part, c_map, first_row, tile_column, n, staged, warpgroup, warp, lane, leader):
        # TMA must have read the last part before this one overwrites it.
        if leader and (part >= buffers or not prefetches):
            wait_for_buffer()
        buffer, column = staged + i32(part % buffers) * part_bytes, tile_column * tile_columns + part * staged_columns
        if swiglu and part * staged_columns >= tile_columns:
            column += n - tile_columns
        first, add = part * staged_columns // 2, output == "add" and part * staged_columns >= prefetched_columns
        stage_and_store(acc, first, c_map, column, first_row, buffer, add, warpgroup, warp, lane, leader)

    @device_function
    def store_activated(acc, activated_map, first_row, tile_column, staged, warpgroup, warp, lane, leader):
        for i in range(0, columns // 4, 2):
            activate(acc, i)
        if leader:
            sm90.bulk_wait_group_read()
        column = tile_column * tile_columns
        stage_and_store(acc, 0, activated_map, column, first_row, staged, False, warpgroup, warp, lane, leader)

    @device_function
    def store_by_tma(acc, c_map, activated_map, first_row, tile_column, n, staged, warpgroup, warp, lane, leader):
        """first_row, tile_column: of this consumer's part of C; leader: whether this thread starts the stores."""
        for part in range(columns // staged_columns):
            store_part(acc, part, c_map, first_row, tile_column, n, staged, warpgroup, warp, lane, leader)
        if swiglu:
            store_activated(acc, activated_map, first_row, tile_column, staged, warpgroup, warp, lane, leader)

    return store_by_tma
