"""Grouped GEMMs on every GPU since Ampere (sm_80): the GEMM of sm80.py, whose blocks own tiles of all experts.

A block finds its tile by grouped_tiles.py and computes it as a block of sm80.py does with the expert's rows and weight
alone: copies fill what is beyond them with zeros. The grid has as many blocks as any `starts` can need, and those
without a tile return.
"""

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.gemm.grouped_config import best_sm80_config, best_sm80_dw_config
from rlnumba.kernels.gemm.grouped_tiles import WORD, most_row_tiles, row_tile_functions
from rlnumba.kernels.gemm.scheduler import tile_coordinates, tokens_of_choice
from rlnumba.kernels.gemm.sm80 import epilogue_function, main_loop_function, stage_copy_function
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_word, shared_address
from rlnumba.kernels.ptx.warp import device_function, udiv
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, u32 = np.int32, np.uint32


def tile_function(config):
    """The device function that computes and writes one tile of C."""
    step, stages, threads = config.step, config.stages, config.threads
    warp_rows, warp_columns, warps_across = config.warp_rows, config.warp_columns, config.warps_across
    part_columns, part_bytes, accumulators = config.part_columns, config.part_bytes, config.accumulators
    copy_stage, main_loop, epilogue = stage_copy_function(config), main_loop_function(config), epilogue_function(config)
    wait_for_all = sm80.cp_async_wait_group(0)

    @device_function
    def compute_tile(a_source, b_source, pitches, steps, c, bias, row, column, n, valid):
        """a_source, b_source: addresses where the tile's operands begin; pitches: bytes from one line of A, of B, to
        the next; steps: of the reduction; c: the address of C, n: its columns; valid: rows and columns from (row,
        column) on.
        """
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        warp_row, warp_column = warp // i32(warps_across) * i32(warp_rows), warp % i32(warps_across) * i32(warp_columns)
        base = shared_address(cuda.shared.array(0, np.uint8))
        part = base + warp * part_bytes
        rounds = i32((steps + step - 1) // step)
        acc = cuda.local.array(accumulators, np.float32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)
        state = i32(0), np.int64(base), a_source, b_source, i32(steps)
        for _ in range(stages - 1):
            state = copy_stage(*state, base, rounds, pitches, valid, thread)
        main_loop(acc, state, base, rounds, pitches, valid, warp_row, warp_column, thread, lane)
        wait_for_all()
        cuda.syncthreads()
        row, column, valid_rows = row + warp_row, column + warp_column, i32(valid[0] - warp_row)
        epilogue(acc, 0, part, c, c, bias, row, column, n, valid_rows, lane)
        if warp_columns == 2 * part_columns:
            column += part_columns
            epilogue(acc, 1, part, c, c, bias, row, column, n, valid_rows, lane)

    return compute_tile


@specialize
def grouped_gemm_sm80_kernel(config):
    """The kernel of a config for the forward and, if config.b_mn, the input's gradient."""
    columns, threads, b_mn = config.columns, config.threads, config.b_mn
    fill_table, find_tile = row_tile_functions(config.rows)
    compute_tile = tile_function(config)

    @cuda.jit(launch_bounds=(threads, config.blocks_per_sm))
    def grouped_gemm_sm80_kernel(x, weights, starts, c, unused, n, k):
        """C (R, n) from rows of k steps. Shared memory: first the table of row tiles, then that of sm80.py."""
        thread = i32(cuda.threadIdx.x)
        base = shared_address(cuda.shared.array(0, np.uint8))
        if thread < 32:
            fill_table(base, starts, thread)
        cuda.syncthreads()
        tiles_across, index = i32((n + columns - 1) // columns), i32(cuda.blockIdx.x)
        row_tiles = load_word(base + i32(starts.shape[0] - 1) * i32(WORD))
        if index < row_tiles * tiles_across:
            expert, row, end, tile_column = find_tile(index, base, starts, tiles_across)
            # All have read the table before copies overwrite it.
            cuda.syncthreads()
            column = tile_column * i32(columns)
            pitches = k * 2, (n if b_mn else k) * 2
            a_source = address_of(x) + row * pitches[0]
            b_source = address_of(weights) + expert * (n * k * 2)
            b_source += np.int64(column) * 2 if b_mn else column * pitches[1]
            valid = i32(end - row), i32(n - column)
            compute_tile(a_source, b_source, pitches, k, address_of(c), unused, row, column, n, valid)

    return grouped_gemm_sm80_kernel


@specialize
def grouped_gemm_dw_sm80_kernel(config):
    """The kernel of a config for the weights' gradient."""
    rows, columns, threads = config.rows, config.columns, config.threads
    adds, item_bytes = config.output == "add", config.item_bytes
    compute_tile = tile_function(config)

    @cuda.jit(launch_bounds=(threads, config.blocks_per_sm))
    def grouped_gemm_dw_sm80_kernel(dy, x, starts, c, unused, n, k):
        """C (E, n, k) = or += dY_e^T X_e over the rows of each expert; without rows 0, or C as it is."""
        tiles_down, tiles_across = i32((n + rows - 1) // rows), i32((k + columns - 1) // columns)
        index, tiles_each = i32(cuda.blockIdx.x), i32(tiles_down * tiles_across)
        expert = udiv(index, tiles_each)
        start, steps = starts[u32(expert)], i32(starts[u32(expert + 1)] - starts[u32(expert)])
        if steps > 0 or not adds:
            row, column = tile_coordinates(i32(index - expert * tiles_each), tiles_down, tiles_across)
            row, column = row * i32(rows), column * i32(columns)
            pitches = n * 2, k * 2
            a_source = address_of(dy) + start * pitches[0] + np.int64(row) * 2
            b_source = address_of(x) + start * pitches[1] + np.int64(column) * 2
            target = address_of(c) + expert * (n * k * item_bytes)
            valid = i32(n - row), i32(k - column)
            compute_tile(a_source, b_source, pitches, steps, target, unused, row, column, k, valid)

    return grouped_gemm_dw_sm80_kernel


def gemm_rows(x, weights, starts, out, b_mn=False):
    """Each row of out = a row of x times its expert's weight: W_e^T (experts, columns, steps), or W_e if b_mn."""
    (rows, steps), columns, experts = x.shape, out.shape[1], len(weights)
    shape = tokens_of_choice(rows), experts, columns, steps, x.dtype.name, b_mn
    gemm_rows_with_config(
        best_sm80_config(*shape, device.sm_count(), device.max_shared_bytes()), x, weights, starts, out
    )


def gemm_rows_with_config(config, x, weights, starts, out):
    """gemm_rows by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long; all lengths > 0."""
    (rows, steps), columns, experts = x.shape, out.shape[1], len(weights)
    blocks = most_row_tiles(rows, experts, config.rows) * -(-columns // config.columns)
    shared = max(config.shared_bytes, (experts + 1) * WORD)
    kernel = grouped_gemm_sm80_kernel(config)
    launch(kernel, blocks, config.threads, x, weights, starts, out, unused(), columns, steps, shared=shared)


def gemm_weights(dy, x, starts, out, add):
    """out[e] = or += dy^T x of the rows of expert e."""
    output = "add" if add else "same" if out.dtype == x.dtype else "float32"
    shape = tokens_of_choice(len(x)), *out.shape, x.dtype.name, output
    gemm_weights_with_config(
        best_sm80_dw_config(*shape, device.sm_count(), device.max_shared_bytes()), dy, x, starts, out
    )


def gemm_weights_with_config(config, dy, x, starts, out):
    """gemm_weights by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long; all lengths > 0."""
    experts, n, k = out.shape
    blocks = experts * -(-n // config.rows) * -(-k // config.columns)
    kernel = grouped_gemm_dw_sm80_kernel(config)
    launch(kernel, blocks, config.threads, dy, x, starts, out, unused(), n, k, shared=config.shared_bytes)
