"""GEMM on every GPU since Ampere (sm_80): C = A B^T, C = A B and C += A^T B by mma.sync, one order over K.

Types, operand layouts and the order of sums are those of sm90.py. A block owns a tile of C, each of its warps a part of
it, in registers. cp.async copies the next `step` values of the reduction for all rows and columns of the tile, `stages`
- 1 ahead; what lies outside the matrices becomes zero. A warp loads the fragments of the next 16 values while it
multiplies those of the last 16. In the epilogue each warp stages its part in shared memory, so that C is written, and
what is added to it read, 16 bytes a lane.

    shared memory, one stage:   [ A: rows x step | B: columns x step ]     K-major, lines of `step` values
                                [ A: step x rows | B: step x columns ]     MN-major, lines of rows or columns

The 16-byte chunks of a line are permuted by the line's number (chunk_offset), so that the eight half lines that
ldmatrix reads at once lie in different banks, whichever way the operand lies.
"""

import functools

import numpy as np

from rlnumba.kernels.checks import unused
from rlnumba.kernels.gemm.scheduler import problem_of, tile_coordinates
from rlnumba.kernels.gemm.sm80_config import BANK_BYTES, best_config
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_pair, load_word, shared_address, store_pair, store_word
from rlnumba.kernels.ptx.warp import add_gradient, cvt_pack, cvt_unpack, device_function, sync_warp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32 = np.int32


@device_function
def chunk_offset(chunk, line, line_bytes):
    """Byte offset of a chunk in its line, permuted so that equal chunks of neighbouring lines meet no bank twice."""
    if line_bytes >= BANK_BYTES:
        return (chunk ^ (line & i32(7))) << i32(4)
    return (chunk ^ ((line // i32(BANK_BYTES // line_bytes)) & i32(line_bytes // sm80.CHUNK - 1))) << i32(4)


@functools.cache
def box_copy_function(lines, line_bytes, threads):
    """The device function that starts the copy of a box of `lines` lines to shared memory."""
    chunks = line_bytes // sm80.CHUNK
    together = threads // chunks
    passes = -(-lines // together)

    @device_function
    def copy_box(target, source, pitch, valid_lines, valid_chunks, thread):
        """Copy to the box at `target`, zeros beyond the first valid_lines lines and valid_chunks chunks of them.

        source: address of the box's start; pitch: bytes from one line to the next. A thread owns one chunk of
        every together-th line.
        """
        line, chunk = thread // i32(chunks), thread % i32(chunks)
        source += np.int64(line) * pitch + np.int64(chunk * i32(sm80.CHUNK))
        target += line * i32(line_bytes)
        if chunk >= valid_chunks:
            valid_lines = i32(0)
        for i in range(passes):
            box_line = i32(line + i32(i * together))
            if lines % together == 0 or box_line < lines:
                nbytes = i32(sm80.CHUNK) if box_line < valid_lines else i32(0)
                destination = target + i * together * line_bytes + chunk_offset(chunk, box_line, line_bytes)
                sm80.cp_async_16(destination, source + i * together * pitch, nbytes)

    return copy_box


@functools.cache
def stage_copy_function(config):
    """The device function that starts the copies of the next stage, and moves on: (copied, target, sources, steps)."""
    a_mn, b_mn, step, a_bytes, stage_bytes = config.a_mn, config.b_mn, config.step, config.a_bytes, config.stage_bytes
    ring_bytes = config.stages * stage_bytes
    a_line, b_line = 2 * (config.rows if a_mn else step), 2 * (config.columns if b_mn else step)
    copy_a = box_copy_function(step if a_mn else config.rows, a_line, config.threads)
    copy_b = box_copy_function(step if b_mn else config.columns, b_line, config.threads)

    @device_function
    def copy_stage(copied, target, a_source, b_source, valid_steps, base, rounds, pitches, valid, thread):
        """copied: stages so far; target: where the next one belongs; a_source, b_source: where its operands begin.

        pitches: bytes from one line of A, of B, to the next; valid: rows and columns of C from the tile's first on.
        """
        a_pitch, b_pitch = pitches
        valid_rows, valid_columns = valid
        if copied < rounds:
            a_lines, a_length = (valid_steps, valid_rows) if a_mn else (valid_rows, valid_steps)
            b_lines, b_length = (valid_steps, valid_columns) if b_mn else (valid_columns, valid_steps)
            copy_a(target, a_source, a_pitch, a_lines, i32(a_length >> i32(3)), thread)
            copy_b(target + a_bytes, b_source, b_pitch, b_lines, i32(b_length >> i32(3)), thread)
        sm80.cp_async_commit_group()
        target += stage_bytes
        if target == base + ring_bytes:
            target = base
        a_source += step * a_pitch if a_mn else 2 * step
        b_source += step * b_pitch if b_mn else 2 * step
        return i32(copied + i32(1)), target, a_source, b_source, i32(valid_steps - i32(step))

    return copy_stage


@functools.cache
def fragment_load_function(count, line_bytes, mn_major, of_a):
    """The device function that loads `count` fragments, 16 rows of A or columns of B each, side by side."""

    @device_function
    def load(fragments, operand, first, k, lane):
        """fragments: of 16 values of the reduction from k on. first: row or column; operand: address of its box."""
        # kernels/ptx/sm80.py says which address a lane gives.
        if mn_major == of_a:
            line, half = (lane & i32(7)) | ((lane >> i32(4)) << i32(3)), (lane >> i32(3)) & i32(1)
        else:
            line, half = lane & i32(15), lane >> i32(4)
        if mn_major:
            operand += i32((line + k) * i32(line_bytes))
            for i in range(count):
                chunk = i32((first >> i32(3)) + i32(2 * i) + half)
                sm80.ldmatrix_fragment_trans(fragments, 4 * i, operand + chunk_offset(chunk, line, line_bytes))
        else:
            operand += i32((first + line) * i32(line_bytes))
            operand += chunk_offset(i32((k >> i32(3)) + half), line, line_bytes)
            for i in range(count):
                sm80.ldmatrix_fragment(fragments, 4 * i, operand + i * 16 * line_bytes)

    return load


@functools.cache
def main_loop_function(config):
    """The device function that multiplies a warp's part of a tile while the next stages arrive."""
    step, stage_bytes, ring_bytes = config.step, config.stage_bytes, config.stages * config.stage_bytes
    down, across, a_bytes = config.warp_rows // 16, config.warp_columns // 16, config.a_bytes
    a_words, b_words, pairs_of_steps = 4 * down, 4 * across, step // 32
    a_line, b_line = 2 * (config.rows if config.a_mn else step), 2 * (config.columns if config.b_mn else step)
    load_a = fragment_load_function(down, a_line, config.a_mn, True)
    load_b = fragment_load_function(across, b_line, config.b_mn, False)
    add_product, wait_for_stage = sm80.mma(config.element), sm80.cp_async_wait_group(config.stages - 2)
    copy_stage = stage_copy_function(config)

    @device_function
    def load_fragments(a, b, stage, warp_row, warp_column, k, lane):
        load_a(a, stage, warp_row, k, lane)
        load_b(b, stage + a_bytes, warp_column, k, lane)

    @device_function
    def multiply(acc, a, b):
        for i in range(down):
            for j in range(across):
                add_product(acc, (i * across + j) * 8, a, 4 * i, b, 4 * j)

    @device_function
    def main_loop(acc, state, base, rounds, pitches, valid, warp_row, warp_column, thread, lane):
        """state: the first five arguments of copy_stage, after `stages` - 1 stages."""
        a_even = cuda.local.array(a_words, np.int32)
        a_odd = cuda.local.array(a_words, np.int32)
        b_even = cuda.local.array(b_words, np.int32)
        b_odd = cuda.local.array(b_words, np.int32)
        wait_for_stage()
        cuda.syncthreads()
        stage = base
        load_fragments(a_even, b_even, stage, warp_row, warp_column, i32(0), lane)
        for _ in range(rounds):
            for pair in range(pairs_of_steps):
                load_fragments(a_odd, b_odd, stage, warp_row, warp_column, i32(32 * pair + 16), lane)
                if pair == 0:
                    # All warps have left the stage before this one: the next copies may overwrite it.
                    state = copy_stage(*state, base, rounds, pitches, valid, thread)
                multiply(acc, a_even, b_even)
                if pair == pairs_of_steps - 1:
                    wait_for_stage()
                    cuda.syncthreads()
                    stage += stage_bytes
                    if stage == base + ring_bytes:
                        stage = base
                    load_fragments(a_even, b_even, stage, warp_row, warp_column, i32(0), lane)
                else:
                    load_fragments(a_even, b_even, stage, warp_row, warp_column, i32(32 * pair + 32), lane)
                multiply(acc, a_odd, b_odd)

    return main_loop


@functools.cache
def epilogue_function(config):
    """The device function that adds bias and residual (or C) to a part of a warp's accumulators and writes C."""
    across, down, warp_rows = config.warp_columns // 16, config.warp_rows // 16, config.warp_rows
    adds, has_bias, has_addend = config.output == "add", config.bias, config.residual or config.output == "add"
    wide, prefetches, item_bytes = config.output != "same", config.prefetch, config.item_bytes
    part_columns, line_bytes = config.part_columns, config.part_columns * config.item_bytes
    part_blocks, part_chunks = part_columns // 8, line_bytes // sm80.CHUNK
    lines_together = 32 // part_chunks
    copy_part, wait_for_all = box_copy_function(warp_rows, line_bytes, 32), sm80.cp_async_wait_group(0)
    pack_two, unpack_two = cvt_pack(config.element), cvt_unpack(config.element)

    @device_function
    def stage_pair(target, first, second):
        if has_addend:
            addend, next_addend = load_pair(target) if wide else unpack_two(load_word(target))
            if adds:
                first, second = add_gradient(addend, first), add_gradient(next_addend, second)
            else:
                first += addend
                second += next_addend
        if wide:
            store_pair(target, first, second)
        else:
            store_word(target, pack_two(first, second))

    @device_function
    def stage_part(acc, p, part, bias, column, n, lane):
        """Write part p of a warp's accumulators, plus the bias, to shared memory at `part`."""
        # This lane's accumulators: rows `line` and line + 8 of each 16, columns 8 b + 2 (lane % 4) and the next.
        pair = (column >> 1) + (lane & i32(3))
        for block in range(part_blocks):
            low, high = np.float32(0.0), np.float32(0.0)
            # N may end within a block of eight columns.
            if has_bias and (pair + block * 4) * 2 < n:
                low, high = unpack_two(bias[pair + block * 4])
            for i in range(down):
                for half in range(2):
                    e = (i * across + (p * part_blocks + block) // 2) * 8 + block % 2 * 4 + half * 2
                    line = i32(i32(i * 16 + half * 8) + (lane >> i32(2)))
                    first, second = acc[e], acc[e + 1]
                    if has_bias:
                        first += low
                        second += high
                    chunk, offset = i32(block), (lane & i32(3)) << i32(2)
                    if wide:
                        chunk, offset = i32(i32(2 * block) + ((lane & i32(3)) >> i32(1))), (lane & i32(1)) << i32(3)
                    target = part + line * i32(line_bytes) + chunk_offset(chunk, line, line_bytes) + offset
                    stage_pair(target, first, second)

    @device_function
    def epilogue(acc, p, part, c, addend, bias, row, column, n, valid_rows, lane):
        """Write the p-th part of a warp's rows and columns, at (row, column) of C, through shared memory at `part`."""
        offset = (row * n + column) * item_bytes
        valid_bytes = (n - column) * item_bytes
        if has_addend and not prefetches:
            copy_part(part, addend + offset, n * item_bytes, valid_rows, i32(valid_bytes // sm80.CHUNK), lane)
            sm80.cp_async_commit_group()
            wait_for_all()
            sync_warp()
        stage_part(acc, p, part, bias, column, n, lane)
        sync_warp()
        chunk = lane % i32(part_chunks)
        if chunk * sm80.CHUNK < valid_bytes:
            for i in range(warp_rows // lines_together):
                line = i32(i32(i * lines_together) + lane // i32(part_chunks))
                if line < valid_rows:
                    source = part + line * i32(line_bytes) + chunk_offset(chunk, line, line_bytes)
                    sm80.copy_to_global(c + offset + line * (n * item_bytes) + chunk * sm80.CHUNK, source)
        sync_warp()

    return epilogue


@specialize
def gemm_sm80_kernel(config):
    """The kernel of a config."""
    rows, columns, step, stages = config.rows, config.columns, config.step, config.stages
    a_mn, b_mn, has_residual, prefetches = config.a_mn, config.b_mn, config.residual, config.prefetch
    threads, warp_rows, warp_columns = config.threads, config.warp_rows, config.warp_columns
    warps_across, accumulators, item_bytes = config.warps_across, config.accumulators, config.item_bytes
    part_columns, part_bytes = config.part_columns, config.part_bytes
    parts_offset = stages * config.stage_bytes if prefetches else 0
    copy_stage, main_loop = stage_copy_function(config), main_loop_function(config)
    copy_part, epilogue = box_copy_function(warp_rows, part_columns * item_bytes, 32), epilogue_function(config)
    wait_for_all = sm80.cp_async_wait_group(0)

    @cuda.jit(launch_bounds=(threads, config.blocks_per_sm))
    def gemm_sm80_kernel(a, b, c, bias, residual, m, n, k):
        """C (m, n) from A and B with k steps of reduction; a block owns a tile.

        bias (n / 2) is seen as pairs of 16 bits. Arrays that the config does not use are one element long. Shared
        memory: the stages, then (or over them, when all products are done) the warps' parts of C.
        """
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        tiles_down, tiles_across = i32((m + rows - 1) // rows), i32((n + columns - 1) // columns)
        row, column = tile_coordinates(i32(cuda.blockIdx.x), tiles_down, tiles_across)
        row, column = row * i32(rows), column * i32(columns)
        warp_row, warp_column = warp // i32(warps_across) * i32(warp_rows), warp % i32(warps_across) * i32(warp_columns)
        base = shared_address(cuda.shared.array(0, np.uint8))
        part = base + parts_offset + warp * part_bytes
        rounds = i32((k + step - 1) // step)
        pitches = (m if a_mn else k) * 2, (n if b_mn else k) * 2
        a_source = address_of(a) + (np.int64(row) * 2 if a_mn else row * pitches[0])
        b_source = address_of(b) + (np.int64(column) * 2 if b_mn else column * pitches[1])
        valid = i32(m - row), i32(n - column)
        acc = cuda.local.array(accumulators, np.float32)
        for i in range(accumulators):
            acc[i] = np.float32(0.0)

        state = i32(0), np.int64(base), a_source, b_source, i32(k)
        for _ in range(stages - 1):
            state = copy_stage(*state, base, rounds, pitches, valid, thread)
        row, column, warp_valid_rows = row + warp_row, column + warp_column, i32(valid[0] - warp_row)
        if prefetches:
            source = address_of(residual) + (row * n + column) * item_bytes
            # laneid is `lane`, but the compiler does not know it. It would otherwise keep this copy's addresses for the
            # epilogue, in registers that the main loop needs.
            copy_part(part, source, n * item_bytes, warp_valid_rows, i32((n - column) >> 3), i32(cuda.laneid))
        main_loop(acc, state, base, rounds, pitches, valid, warp_row, warp_column, thread, lane)
        wait_for_all()
        if prefetches:
            sync_warp()
        else:
            cuda.syncthreads()
        addend = address_of(residual) if has_residual else address_of(c)
        epilogue(acc, 0, part, address_of(c), addend, bias, row, column, n, warp_valid_rows, lane)
        if warp_columns == 2 * part_columns:
            column += part_columns
            epilogue(acc, 1, part, address_of(c), addend, bias, row, column, n, warp_valid_rows, lane)

    return gemm_sm80_kernel


def gemm(a, b, out, a_mn=False, b_mn=False, add=False, bias=None, residual=None):
    """The gemm of ops.BACKENDS by the sm80 kernel, with the config that best_config chooses."""
    problem = problem_of(a, out, a_mn, b_mn, add, bias, residual)
    config = best_config(problem, device.sm_count(), device.max_shared_bytes())
    gemm_with_config(config, a, b, out, bias, residual)


def gemm_with_config(config, a, b, out, bias=None, residual=None):
    """gemm by the kernel of `config`. Rows of all matrices are multiples of 16 bytes long. M, N and K > 0."""
    m, n = out.shape
    k = a.shape[0] if config.a_mn else a.shape[1]
    kernel, blocks = gemm_sm80_kernel(config), -(-m // config.rows) * -(-n // config.columns)
    bias = unused() if bias is None else bias.view(np.int32)
    residual = unused(2) if residual is None else residual
    launch(kernel, blocks, config.threads, a, b, out, bias, residual, m, n, k, shared=config.shared_bytes)
