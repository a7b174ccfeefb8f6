"""The gradient of causal packed attention by mma.sync, without float atomics.

The equations are those of kernels/attention/ops.py, in float16 or bfloat16 with float32 accumulators; p and ds are
rounded to the inputs' type before they enter a GEMM. The H / HK query heads of a KV head are rows of one matrix, as in
kernels/attention/sm80_tiles.py. Two kernels:

    dk, dv   a block owns keys, a warp 16 of them, and passes over the rows that see them. Scores are computed as
             s^T = k q^T, so that a key's row of p^T lies in four lanes and is the left operand of p^T dout as it is
    dq       a block owns rows, a warp 16 of them, and passes over their keys

so scores are computed twice: seven GEMMs instead of five, for sums in a fixed order, each of one thread.
Source: Dao 2023 (FlashAttention-2), algorithm 2.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.simt import attention_delta
from rlnumba.kernels.attention.sm80_tiles import (
    BLOCK_BYTES,
    copy_functions,
    gemm_functions,
    line_pitch,
    padded,
    sequence_function,
    store_rows_function,
)
from rlnumba.kernels.attention.softmax import LOG2_E, TILE_KEYS
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_pair, shared_address
from rlnumba.kernels.ptx.sm80 import (
    CHUNK,
    SYSTEM_BYTES,
    cp_async_4,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group,
)
from rlnumba.kernels.ptx.warp import device_function, exp2
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Columns of a tile that a warp works on at a time: what its scores and their gradients take of its registers.
WIDTH = 32
# Columns of dk and dv that a block sums at most: 2 x 16 x 128 of each warp are 128 registers a thread.
COLUMNS = 128


class Sm80DkvConfig(NamedTuple):
    """The kernel of dk and dv. warps: of 16 keys each; rows: of a tile of q and dout; stages: such tiles in memory."""

    head_dim: int
    element: str
    warps: int = 8
    rows: int = 64
    stages: int = 2

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def keys(self):
        return 16 * self.warps

    @property
    def column_blocks(self):
        """Blocks that share the columns of dk and dv."""
        return -(-padded(self.head_dim) // COLUMNS)

    @property
    def stage_bytes(self):
        return 2 * self.rows * (line_pitch(self.head_dim) + 4)

    @property
    def shared_bytes(self):
        return 2 * self.keys * line_pitch(self.head_dim) + self.stages * self.stage_bytes


class Sm80DqConfig(NamedTuple):
    """The constants of the kernel of dq. warps: of 16 rows each; stages: tiles of keys and values in shared memory.

    rows_in_registers: q and dout stay in registers, and their shared memory is reused for the keys.
    """

    head_dim: int
    element: str
    warps: int = 4
    stages: int = 1
    rows_in_registers: bool = True

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def rows(self):
        return 16 * self.warps

    @property
    def shared_bytes(self):
        rows, kv = 2 * self.rows * line_pitch(self.head_dim), 2 * self.stages * TILE_KEYS * line_pitch(self.head_dim)
        return max(rows, kv) if self.rows_in_registers else rows + kv


@functools.cache
def row_tile_function(head_dim, rows, threads):
    """The device function that starts the copy of a tile of rows of q and dout, and of their lse and delta."""
    chunks, real_chunks, pitch = padded(head_dim) // 8, head_dim // 8, line_pitch(head_dim)
    lanes = 1 << (chunks - 1).bit_length()
    lines_per_pass = threads // lanes
    passes = -(-rows // lines_per_pass)

    @device_function
    def load_row_tile(target, q_source, dout_source, lse, delta, first_row, end_row, sequence, kv_head, thread):
        """Rows from first_row on, zeros from end_row on; sources: addresses of the first token's first head."""
        gqa_ratio, start, token_bytes = sequence.gqa_ratio, sequence.start, sequence.token_bytes
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        # A thread's next row is lines_per_pass further: the token and the head advance by these, without a division.
        token, head = i32(first_row + line) // gqa_ratio, i32(first_row + line) % gqa_ratio
        token_step, head_step = i32(lines_per_pass) // gqa_ratio, i32(lines_per_pass) % gqa_ratio
        if chunk < chunks:
            for i in range(passes):
                row = i32(line + i32(i * lines_per_pass))
                if rows % lines_per_pass == 0 or row < rows:
                    offset = np.int64(token) * token_bytes + (head * (head_dim * 2) + chunk * CHUNK)
                    chunk_target = target + row * i32(pitch) + chunk * i32(CHUNK)
                    nbytes = i32(CHUNK) if i32(first_row + row) < end_row and chunk < real_chunks else i32(0)
                    cp_async_16(chunk_target, q_source + offset, nbytes)
                    cp_async_16(chunk_target + rows * pitch, dout_source + offset, nbytes)
                token, head = i32(token + token_step), i32(head + head_step)
                if head >= gqa_ratio:
                    token, head = i32(token + i32(1)), i32(head - gqa_ratio)
        if thread < rows:
            row = i32(first_row + thread)
            offset = (np.int64(kv_head * gqa_ratio + row % gqa_ratio) * lse.shape[1] + start + row // gqa_ratio) * 4
            word_target = target + 2 * rows * pitch + thread * 4
            nbytes = i32(4) if row < end_row else i32(0)
            cp_async_4(word_target, address_of(lse) + offset, nbytes)
            cp_async_4(word_target + rows * 4, address_of(delta) + offset, nbytes)

    return load_row_tile


@specialize
def sm80_dkv_kernel(config):
    """The kernel of a Sm80DkvConfig."""
    head_dim, element, _, rows, stages = config
    threads, keys, column_blocks, pitch = config.threads, config.keys, config.column_blocks, line_pitch(head_dim)
    columns = min(padded(head_dim), COLUMNS)
    column_steps, acc_count, score_count = columns // 16, columns // 2, WIDTH // 2
    # Shared memory in bytes: the block's keys; its values; stages of [q | dout | lse | delta] of a tile of rows.
    stage_bytes, v_offset, rows_offset = config.stage_bytes, keys * pitch, 2 * keys * pitch
    # The block's keys are rows of a matrix with one head a token.
    copy_rows, _ = copy_functions(head_dim, keys, threads, 0)
    load_row_tile = row_tile_function(head_dim, rows, threads)
    _, gemm, accumulate = gemm_functions(head_dim, element, WIDTH, columns=columns)
    read_sequence, store_rows = sequence_function(head_dim), store_rows_function(head_dim, columns, 16, element)
    wait_for_tile, wait_for_all = cp_async_wait_group(stages - 1), cp_async_wait_group(0)

    @device_function
    def softmax_backward(scores, gradients, lse, row, full, first_key, gqa_ratio, scale_log2, lane):
        """p^T in place of s^T, ds^T of dp^T. lse: address of that of `row`, delta follows `rows` later."""
        address = lse + ((lane & i32(3)) << i32(3))
        for block in range(WIDTH // 8):
            low_lse, high_lse = load_pair(address + block * 32)
            low_delta, high_delta = load_pair(address + block * 32 + rows * 4)
            low_lse, high_lse = low_lse * f32(LOG2_E), high_lse * f32(LOG2_E)
            for half in range(2):
                at = 4 * block + 2 * half
                scores[at] = exp2(cuda.fma(scores[at], scale_log2, -low_lse))
                scores[at + 1] = exp2(cuda.fma(scores[at + 1], scale_log2, -high_lse))
                if row < full:
                    first_visible = i32(i32(first_key + half * 8 + (lane >> i32(2))) * gqa_ratio)
                    column = i32(row + block * 8 + ((lane & i32(3)) << i32(1)))
                    if column < first_visible:
                        scores[at] = f32(0.0)
                    if i32(column + i32(1)) < first_visible:
                        scores[at + 1] = f32(0.0)
                gradients[at] = scores[at] * (gradients[at] - low_delta)
                gradients[at + 1] = scores[at + 1] * (gradients[at + 1] - high_delta)

    @cuda.jit(launch_bounds=(threads, 1))
    def sm80_dkv_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dk, dv):
        """A block owns `keys` keys of a KV head, or COLUMNS columns of their gradients, and passes over the rows."""
        dk_acc = cuda.local.array(acc_count, np.float32)
        dv_acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        fragments = cuda.local.array(4, np.int32)
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head, column_block = i32(cuda.blockIdx.x // column_blocks), i32(cuda.blockIdx.x % column_blocks)
        sequence = read_sequence(q, k, cu_seqlens, cuda.blockIdx.y, kv_head)
        gqa_ratio, _, length, _, key_bytes, q_offset, k_offset = sequence
        first_key = i32(cuda.blockIdx.z * keys)
        valid_keys = min(i32(length - first_key), i32(keys))
        if valid_keys <= 0:
            return
        end_row = i32(length * gqa_ratio)
        first_row = i32(first_key * gqa_ratio) // i32(rows) * i32(rows)
        tiles = i32(i32(i32(end_row - first_row) + i32(rows - 1)) // i32(rows))

        base = shared_address(cuda.shared.array(0, np.uint8))
        q_source, dout_source = address_of(q) + q_offset, address_of(dout) + q_offset
        copy_rows(base, address_of(k) + k_offset, first_key, valid_keys, i32(1), key_bytes, thread)
        copy_rows(base + v_offset, address_of(v) + k_offset, first_key, valid_keys, i32(1), key_bytes, thread)
        for stage in range(stages):
            if stage < tiles:
                tile, row = base + rows_offset + stage * stage_bytes, i32(first_row + i32(stage * rows))
                load_row_tile(tile, q_source, dout_source, lse, delta, row, end_row, sequence, kv_head, thread)
            cp_async_commit_group()
        for i in range(acc_count):
            dk_acc[i], dv_acc[i] = f32(0.0), f32(0.0)
        warp_key, scale_log2 = i32(warp * i32(16)), scale * f32(LOG2_E)
        warp_lines, warp_first_key = base + warp_key * i32(pitch), i32(first_key + warp_key)
        # Row r sees key j if r >= gqa_ratio j: from `full` on, rows see all of the warp's keys, before `none` none.
        none = i32(warp_first_key * gqa_ratio)
        full = i32(i32(warp_first_key + i32(15)) * gqa_ratio)
        stage = i32(0)
        for j in range(tiles):
            wait_for_tile()
            cuda.syncthreads()
            tile = base + rows_offset + stage * i32(stage_bytes)
            for part in range(rows // WIDTH):
                row = i32(i32(first_row + i32(i32(j) * i32(rows))) + i32(part * WIDTH))
                if warp_key < valid_keys and i32(row + i32(WIDTH)) > none and row < end_row:
                    q_lines = tile + part * (WIDTH * pitch)
                    dout_lines = q_lines + rows * pitch
                    gemm(scores, fragments, warp_lines, q_lines, lane)
                    gemm(gradients, fragments, warp_lines + v_offset, dout_lines, lane)
                    row_lse = tile + 2 * rows * pitch + part * (WIDTH * 4)
                    softmax_backward(scores, gradients, row_lse, row, full, warp_first_key, gqa_ratio, scale_log2, lane)
                    accumulate(dv_acc, scores, dout_lines, i32(column_block * column_steps), lane)
                    accumulate(dk_acc, gradients, q_lines, i32(column_block * column_steps), lane)
            cuda.syncthreads()
            next_tile = i32(i32(j) + i32(stages))
            if next_tile < tiles:
                row = i32(first_row + i32(next_tile * i32(rows)))
                load_row_tile(tile, q_source, dout_source, lse, delta, row, end_row, sequence, kv_head, thread)
            cp_async_commit_group()
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()
        # Only the warp itself reads its lines of keys and values, so its gradients may overwrite them.
        valid_keys, column = i32(valid_keys - warp_key), i32(column_block * columns)
        store_rows(
            dk_acc, scale, warp_lines, address_of(dk) + k_offset, column, valid_keys, i32(1), key_bytes,
            warp_first_key, lane,
        )  # fmt: skip
        store_rows(
            dv_acc, f32(1.0), warp_lines + v_offset, address_of(dv) + k_offset, column, valid_keys, i32(1), key_bytes,
            warp_first_key, lane,
        )  # fmt: skip

    return sm80_dkv_kernel


@specialize
def sm80_dq_kernel(config):
    """The kernel of a Sm80DqConfig."""
    head_dim, element, _, stages, rows_in_registers = config
    threads, rows, pitch = config.threads, config.rows, line_pitch(head_dim)
    steps, score_count = padded(head_dim) // 16, WIDTH // 2
    acc_count, row_words = 8 * steps, 4 * (steps if rows_in_registers else 1)
    # Shared memory in bytes: rows of q and of dout, unless they stay in registers; stages of [keys | values] of a tile.
    kv_offset = 0 if rows_in_registers else 2 * rows * pitch
    tile_bytes, stage_bytes = TILE_KEYS * pitch, 2 * TILE_KEYS * pitch
    copy_rows, copy_keys = copy_functions(head_dim, rows, threads, 0)
    load_rows, gemm, accumulate = gemm_functions(head_dim, element, WIDTH, 1, rows_in_registers)
    read_sequence, store_rows = sequence_function(head_dim), store_rows_function(head_dim, head_dim, 16, element)
    wait_for_tile, wait_for_all = cp_async_wait_group(stages - 1), cp_async_wait_group(0)

    @device_function
    def softmax_backward(scores, gradients, lse, delta, position, first_position, key, scale_log2, lane):
        """ds in place of dp. lse, delta, position: of the thread's two rows; first_position: of the warp's first."""
        for i in range(score_count):
            half = i % 4 // 2
            p = exp2(cuda.fma(scores[i], scale_log2, -lse[half]))
            if i32(key + i32(WIDTH - 1)) > first_position:
                if i32(key + i32(i // 4 * 8 + i % 2) + ((lane & i32(3)) << i32(1))) > position[half]:
                    p = f32(0.0)
            gradients[i] = p * (gradients[i] - delta[half])

    @cuda.jit(launch_bounds=(threads, 2))
    def sm80_dq_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dq):
        """A block owns `rows` rows of a KV head; the last rows, which see the most keys, start first."""
        acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        q_fragments = cuda.local.array(row_words, np.int32)
        dout_fragments = cuda.local.array(row_words, np.int32)
        row_lse = cuda.local.array(2, np.float32)
        row_delta = cuda.local.array(2, np.float32)
        position = cuda.local.array(2, np.int32)
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head = i32(cuda.blockIdx.x)
        gqa_ratio, start, length, token_bytes, key_bytes, q_offset, k_offset = read_sequence(
            q, k, cu_seqlens, cuda.blockIdx.y, kv_head
        )
        first_row = i32(i32(cuda.gridDim.z - 1 - cuda.blockIdx.z) * i32(rows))
        valid_rows = min(i32(i32(length * gqa_ratio) - first_row), i32(rows))
        if valid_rows <= 0:
            return
        visible_keys = i32(i32(i32(first_row + valid_rows) - i32(1)) // gqa_ratio + i32(1))
        tiles = i32(i32(visible_keys + i32(TILE_KEYS - 1)) // i32(TILE_KEYS))

        base = shared_address(cuda.shared.array(0, np.uint8))
        k_source, v_source = address_of(k) + k_offset, address_of(v) + k_offset
        next_tile, warp_row = np.int64(TILE_KEYS) * key_bytes, warp * i32(16)
        warp_lines = base + warp_row * i32(pitch)
        copy_rows(base, address_of(q) + q_offset, first_row, valid_rows, gqa_ratio, token_bytes, thread)
        copy_rows(
            base + rows * pitch, address_of(dout) + q_offset, first_row, valid_rows, gqa_ratio, token_bytes, thread
        )
        if rows_in_registers:
            cp_async_commit_group()
            wait_for_all()
            cuda.syncthreads()
            load_rows(q_fragments, warp_lines, lane)
            load_rows(dout_fragments, warp_lines + rows * pitch, lane)
            cuda.syncthreads()
        for stage in range(stages):
            if stage < tiles:
                tile, key = base + kv_offset + stage * stage_bytes, i32(stage * TILE_KEYS)
                copy_keys(tile, k_source, cu_seqlens, i32(0), key, length, key_bytes, thread)
                copy_keys(tile + tile_bytes, v_source, cu_seqlens, i32(0), key, length, key_bytes, thread)
            cp_async_commit_group()
            k_source += next_tile
            v_source += next_tile
        for half in range(2):
            row = i32(min(i32(warp_row + i32(half * 8) + (lane >> i32(2))), i32(valid_rows - i32(1))) + first_row)
            position[half] = row // gqa_ratio
            row_lse[half] = lse[kv_head * gqa_ratio + row % gqa_ratio, start + row // gqa_ratio] * f32(LOG2_E)
            row_delta[half] = delta[kv_head * gqa_ratio + row % gqa_ratio, start + row // gqa_ratio]
        for i in range(acc_count):
            acc[i] = f32(0.0)
        scale_log2 = scale * f32(LOG2_E)
        # The positions of the warp's first and last rows.
        first_position = i32(i32(first_row + warp_row) // gqa_ratio)
        last_position = i32(i32(first_row + min(i32(warp_row + i32(15)), i32(valid_rows - i32(1)))) // gqa_ratio)
        if warp_row >= valid_rows:
            last_position = i32(-1)
        stage = i32(0)
        for j in range(tiles):
            wait_for_tile()
            cuda.syncthreads()
            tile = base + kv_offset + stage * i32(stage_bytes)
            for part in range(TILE_KEYS // WIDTH):
                key = i32(i32(i32(j) * i32(TILE_KEYS)) + i32(part * WIDTH))
                if key <= last_position:
                    keys = tile + part * (WIDTH * pitch)
                    gemm(scores, q_fragments, warp_lines, keys, lane)
                    gemm(gradients, dout_fragments, warp_lines + rows * pitch, keys + tile_bytes, lane)
                    softmax_backward(
                        scores, gradients, row_lse, row_delta, position, first_position, key, scale_log2, lane
                    )
                    accumulate(acc, gradients, keys, i32(0), lane)
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages))
            if ahead < tiles:
                key = i32(ahead * i32(TILE_KEYS))
                copy_keys(tile, k_source, cu_seqlens, i32(0), key, length, key_bytes, thread)
                copy_keys(tile + tile_bytes, v_source, cu_seqlens, i32(0), key, length, key_bytes, thread)
            cp_async_commit_group()
            k_source += next_tile
            v_source += next_tile
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()
        # No warp still reads the keys, whose shared memory dq reuses.
        cuda.syncthreads()
        store_rows(
            acc, scale, warp_lines, address_of(dq) + q_offset, i32(0), i32(valid_rows - warp_row), gqa_ratio,
            token_bytes, i32(first_row + warp_row), lane,
        )  # fmt: skip

    return sm80_dq_kernel


@functools.cache
def dkv_config(head_dim, element, limit):
    """As many rows a tile, of two stages, as fit `limit` bytes beside the keys of eight warps, or of fewer."""
    for warps in (8, 4, 2):
        for rows in (64, 32):
            config = Sm80DkvConfig(head_dim, element, warps, rows)
            if config.shared_bytes + BLOCK_BYTES <= limit + SYSTEM_BYTES:
                return config
    return Sm80DkvConfig(head_dim, element, 2, 32, 1)


@functools.cache
def dq_config(head_dim, element, limit):
    """q and dout in registers if these suffice, and two blocks an SM if they fit."""
    if padded(head_dim) <= 128:
        for stages in (2, 1):
            config = Sm80DqConfig(head_dim, element, 4, stages)
            if 2 * (config.shared_bytes + BLOCK_BYTES) <= limit + SYSTEM_BYTES:
                return config
    for warps in (4, 2):
        config = Sm80DqConfig(head_dim, element, warps, rows_in_registers=False)
        if config.shared_bytes + BLOCK_BYTES <= limit + SYSTEM_BYTES:
            return config
    return Sm80DqConfig(head_dim, element, 1, rows_in_registers=False)


def attention_backward_sm80(
    dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv, for_dkv=None, for_dq=None
):
    """As the operator attention_backward, which has checked the arguments; for_dkv, for_dq: instead of the configs."""
    _, heads, head_dim = q.shape
    kv_heads, sequences, element = k.shape[1], len(cu_seqlens) - 1, q.dtype.name
    for_dkv = for_dkv or dkv_config(head_dim, element, device.max_shared_bytes())
    for_dq = for_dq or dq_config(head_dim, element, device.max_shared_bytes())
    arguments = (dout, q, k, v, lse, attention_delta(dout, out), cu_seqlens, float(scale))
    grid = (kv_heads * for_dkv.column_blocks, sequences, -(-max_seqlen // for_dkv.keys))
    launch(sm80_dkv_kernel(for_dkv), grid, for_dkv.threads, *arguments, dk, dv, shared=for_dkv.shared_bytes)
    grid = (kv_heads, sequences, -(-max_seqlen * (heads // kv_heads) // for_dq.rows))
    launch(sm80_dq_kernel(for_dq), grid, for_dq.threads, *arguments, dq, shared=for_dq.shared_bytes)
