"""Attention of few query rows to the paged cache by mma.sync: split-KV decode, one block a segment of keys.

The arithmetic of a row is that of kernels/attention/sm80_forward.py, so its bits are, too. A block owns DECODE_ROWS
rows of a KV head and one segment; of a tile each of the four warps takes 16 keys for the scores, then a quarter of the
columns for P V, with the probabilities passing through shared memory. A kernel of its own merges the segments of
sequences that have several.
Source: Dao et al. 2023 (Flash-Decoding).
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention import sm80_tiles, softmax
from rlnumba.kernels.attention.sm80_forward import (
    Sm80AttentionConfig,
    attention_config,
    prefill_sm80,
    totals_shape,
)
from rlnumba.kernels.attention.split_kv import AttentionWorkspace
from rlnumba.kernels.checks import unused
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import shared_address, store_word
from rlnumba.kernels.ptx.sm80 import CHUNK, SYSTEM_BYTES, copy_to_global, cp_async_wait_group, mma
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, exp2, narrow
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Rows and warps of a block.
DECODE_ROWS = 16
DECODE_WARPS = 4
MERGE_THREADS = 128
# The longest y of a grid.
MAX_SEQUENCES = 65_535
# Shared memory that a block takes beyond the tiles: what the kernel declares, and what the system reserves.
DECODE_BLOCK_BYTES = SYSTEM_BYTES + 6 * 1024


class Sm80DecodeConfig(NamedTuple):
    """The constants of the kernel; fields as in Sm80AttentionConfig.

    With a window `segment` is the most keys that a block loads: from the first tile that its first row sees to the last
    key of its last row.
    """

    head_dim: int
    element: str
    stages: int = 2
    block_size: int = 16
    segment: int = softmax.SEGMENT_KEYS
    window: int = 0

    @property
    def multiple(self):
        """The first key that a block loads is a multiple of this, where a tile and a block of the cache begin."""
        return max(softmax.TILE_KEYS, self.block_size)

    def with_window(self, window):
        """This config for a window, or for none."""
        if not window:
            return self
        keys = window + DECODE_ROWS + self.multiple
        return self._replace(window=window, segment=-(-keys // self.multiple) * self.multiple)

    @property
    def shared_bytes(self):
        lines = DECODE_ROWS + 2 * self.stages * softmax.TILE_KEYS
        return lines * sm80_tiles.line_pitch(self.head_dim) + DECODE_ROWS * sm80_tiles.line_pitch(softmax.TILE_KEYS)


@functools.cache
def decode_softmax_functions(element, window):
    """(publish_max, online_softmax_step, add_sums): a softmax step of 16 rows, with barriers between the three."""
    pack, p_pitch = cvt_pack(element), sm80_tiles.line_pitch(softmax.TILE_KEYS)

    @device_function
    def publish_max(scores, key, position, maxima, warp, lane):
        """Mask the scores, whose first is that of `key`, and write the warp's maximum of each row."""
        for half in range(2):
            for block in range(2):
                for i in range(2):
                    if key + block * 8 + i > position[half]:
                        scores[4 * block + 2 * half + i] = softmax.MINUS_INFINITY
                    if window > 0 and key + block * 8 + i <= position[half] - window:
                        scores[4 * block + 2 * half + i] = softmax.MINUS_INFINITY
            at = 2 * half
            warp_max = softmax.quad_max(max(max(scores[at], scores[at + 1]), max(scores[at + 4], scores[at + 5])))
            if lane & i32(3) == 0:
                maxima[warp * DECODE_ROWS + half * 8 + (lane >> i32(2))] = warp_max

    @device_function
    def online_softmax_step(scores, row_max, rescale, scale, maxima, lane_sums, p_lines, warp, lane):
        """Scores become probabilities, written to p_lines; update row_max and write each lane's sum."""
        for half in range(2):
            row = half * 8 + (lane >> i32(2))
            tile_max = maxima[row]
            for other in range(1, DECODE_WARPS):
                tile_max = max(tile_max, maxima[other * DECODE_ROWS + row])
            new_max = softmax.next_row_max(row_max[half], tile_max, scale)
            subtracted = softmax.finite_row_max(new_max)
            rescale[half] = exp2(row_max[half] - subtracted)
            row_max[half] = new_max
            for block in range(2):
                for i in range(2):
                    at = 4 * block + 2 * half + i
                    scores[at] = exp2(cuda.fma(scores[at], scale, -subtracted))
                word = pack(scores[4 * block + 2 * half], scores[4 * block + 2 * half + 1])
                store_word(p_lines + row * p_pitch + warp * i32(32) + block * CHUNK + ((lane & i32(3)) << i32(2)), word)
            lane_sums[(warp * DECODE_ROWS + row) * 4 + (lane & i32(3))] = sm80_tiles.lane_sum(scores, 2 * half)

    @device_function
    def add_sums(sums, rescale, lane_sums, lane):
        for half in range(2):
            at = (half * 8 + (lane >> i32(2))) * 4 + (lane & i32(3))
            low = lane_sums[at] + lane_sums[at + 4 * DECODE_ROWS]
            high = lane_sums[at + 8 * DECODE_ROWS] + lane_sums[at + 12 * DECODE_ROWS]
            sums[half] = cuda.fma(sums[half], rescale[half], low + high)

    return publish_max, online_softmax_step, add_sums


@functools.cache
def pv_function(head_dim, element):
    """The device function of a warp's part of P V of a tile."""
    pitch, steps = sm80_tiles.line_pitch(head_dim), sm80_tiles.padded(head_dim) // 16
    warp_steps = -(-steps // DECODE_WARPS)
    _, _, load_b_transposed = sm80_tiles.fragment_functions(head_dim)
    load_probabilities, _, _ = sm80_tiles.fragment_functions(softmax.TILE_KEYS)
    mma_fragments = mma(element)

    @device_function
    def pv(acc, rescale, p_lines, values, warp, lane):
        """acc = acc rescale + p v of all rows and the warp's columns."""
        fragment = cuda.local.array(4, np.int32)
        words = cuda.local.array(4, np.int32)
        for i in range(warp_steps):
            for block in range(2):
                for e in range(4):
                    acc[8 * i + 4 * block + e] *= rescale[e // 2]
        for step in range(softmax.TILE_KEYS // 16):
            load_probabilities(words, 0, p_lines, step, lane)
            for i in range(warp_steps):
                n = warp * warp_steps + i
                if n < steps:
                    load_b_transposed(fragment, 0, values + step * 16 * pitch, n, lane)
                    mma_fragments(acc, 8 * i, words, 0, fragment, 0)

    return pv


@specialize
def sm80_decode_kernel(config):
    """The kernel of a Sm80DecodeConfig."""
    head_dim, element, stages, block_size, segment, window = config
    threads, pitch = 32 * DECODE_WARPS, sm80_tiles.line_pitch(head_dim)
    steps = sm80_tiles.padded(head_dim) // 16
    q_words, warp_steps = 4 * steps, -(-steps // DECODE_WARPS)
    acc_count = 8 * warp_steps
    # Shared memory in bytes: rows of q; stages of keys; stages of values; probabilities.
    k_tiles, tile_bytes = DECODE_ROWS * pitch, softmax.TILE_KEYS * pitch
    v_tiles = k_tiles + stages * tile_bytes
    p_offset = v_tiles + stages * tile_bytes
    segment_blocks, max_count = segment // block_size, DECODE_WARPS * DECODE_ROWS
    sum_count = 4 * max_count
    copy_rows, copy_keys = sm80_tiles.copy_functions(head_dim, DECODE_ROWS, threads, block_size)
    load_kv_tile, read_sequence = sm80_tiles.kv_tile_function(copy_keys), sm80_tiles.sequence_function(head_dim, True)
    load_q, qk, _ = sm80_tiles.gemm_functions(head_dim, element, softmax.TILE_KEYS // DECODE_WARPS, 1, True)
    publish_max, online_softmax_step, add_sums = decode_softmax_functions(element, window)
    first_key_of = sm80_tiles.first_key_function(window, config.multiple)
    pv, pack = pv_function(head_dim, element), cvt_pack(element)
    wait_for_tile, wait_for_all = cp_async_wait_group(2 * (stages - 1)), cp_async_wait_group(0)
    out_chunks = head_dim // 8

    @device_function
    def store_row(is_whole, acc, inverse, line, partial, index, first_step, half, lane):
        """Write a thread's columns of a row of out to shared memory at `line`, or to row `index` of partial results."""
        for i in range(warp_steps):
            n = first_step + i
            for block in range(2):
                at, column = 8 * i + 4 * block + 2 * half, n * 16 + block * 8 + 2 * (lane & i32(3))
                if n < steps and is_whole:
                    store_word(line + column * 2, pack(acc[at] * inverse, acc[at + 1] * inverse))
                elif n < steps:
                    partial[index, column], partial[index, column + 1] = acc[at], acc[at + 1]

    @cuda.jit(launch_bounds=(threads, 2))
    def sm80_decode_kernel(q, k, v, batch, segments, scale, partial, weights, out):
        """A block owns DECODE_ROWS rows of a KV head of a sequence and one segment of its keys.

        batch: a PagedBatch. out is written where a sequence has one segment; else partial (segments N H, padded
        head_dim) and weights (segments N H, 2): a segment's acc, m and l.
        """
        blocks = cuda.shared.array(segment_blocks, np.int32)
        maxima = cuda.shared.array(max_count, np.float32)
        lane_sums = cuda.shared.array(sum_count, np.float32)
        acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(8, np.float32)
        q_fragments = cuda.local.array(q_words, np.int32)
        row_max = cuda.local.array(2, np.float32)
        sums = cuda.local.array(2, np.float32)
        rescale = cuda.local.array(2, np.float32)
        position = cuda.local.array(2, np.int32)

        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head, sequence = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
        segment_index = i32(cuda.blockIdx.z % segments)
        first_row = i32(cuda.blockIdx.z // segments * DECODE_ROWS)
        heads = i32(q.shape[1])
        gqa_ratio, start, length, token_bytes, key_bytes, q_offset, k_offset = read_sequence(
            q, k, batch.cu_seqlens, sequence, kv_head
        )
        valid_rows = min(i32(i32(length * gqa_ratio) - first_row), i32(DECODE_ROWS))
        if valid_rows <= 0:
            return
        context_len = batch.context_lens[sequence]
        query_offset, first_key = i32(context_len - length), i32(segment_index * i32(segment))
        visible_keys = i32(0)
        if context_len > 0:
            visible_keys = i32(i32(query_offset + i32(i32(first_row + valid_rows) - 1) // gqa_ratio) + 1)
        if window > 0:
            first_key = first_key_of(i32(query_offset + first_row // gqa_ratio))
        if segment_index > 0 and first_key >= visible_keys:
            return
        segment_keys = min(i32(visible_keys - first_key), i32(segment))
        tiles = i32((segment_keys + softmax.TILE_KEYS - 1) // softmax.TILE_KEYS)

        base = shared_address(cuda.shared.array(0, np.uint8))
        k_source, v_source = address_of(k) + k_offset, address_of(v) + k_offset
        for i in range(thread, (segment_keys + block_size - 1) // block_size, threads):
            blocks[i] = batch.block_tables[sequence * batch.max_blocks + (first_key // block_size + i)]
        copy_rows(base, address_of(q) + q_offset, first_row, valid_rows, gqa_ratio, token_bytes, thread)
        cuda.syncthreads()
        for half in range(2):
            row_max[half], sums[half] = softmax.MINUS_INFINITY, f32(0.0)
            position[half] = i32(query_offset + i32(first_row + i32(half * 8) + (lane >> i32(2))) // gqa_ratio)
        for i in range(acc_count):
            acc[i] = f32(0.0)
        for j in range(stages):
            target = base + k_tiles + j * tile_bytes
            load_kv_tile(target, k_source, blocks, i32(0), j, tiles, segment_keys, key_bytes, thread)
            if j + 1 < stages:
                target = base + v_tiles + j * tile_bytes
                load_kv_tile(target, v_source, blocks, i32(0), j, tiles, segment_keys, key_bytes, thread)
        wait_for_tile()
        cuda.syncthreads()
        load_q(q_fragments, base, lane)
        stage = i32(0)
        for j in range(tiles):
            # Waits and copies as in sm80_attention_kernel; between them, warps exchange maxima and probabilities.
            wait_for_tile()
            cuda.syncthreads()
            v_stage = i32(stage + i32(stages - 1))
            if v_stage >= i32(stages):
                v_stage = i32(v_stage - i32(stages))
            v_tile, target = i32(i32(j) + i32(stages - 1)), base + v_tiles + v_stage * i32(tile_bytes)
            load_kv_tile(target, v_source, blocks, i32(0), v_tile, tiles, segment_keys, key_bytes, thread)
            qk(scores, q_fragments, base, base + k_tiles + stage * i32(tile_bytes) + warp * i32(16 * pitch), lane)
            key = i32(first_key + i32(i32(j) * i32(softmax.TILE_KEYS))) + warp * i32(16) + ((lane & i32(3)) << i32(1))
            publish_max(scores, key, position, maxima, warp, lane)
            cuda.syncthreads()
            online_softmax_step(scores, row_max, rescale, scale, maxima, lane_sums, base + p_offset, warp, lane)
            wait_for_tile()
            cuda.syncthreads()
            k_tile, target = i32(i32(j) + i32(stages)), base + k_tiles + stage * i32(tile_bytes)
            load_kv_tile(target, k_source, blocks, i32(0), k_tile, tiles, segment_keys, key_bytes, thread)
            add_sums(sums, rescale, lane_sums, lane)
            pv(acc, rescale, base + p_offset, base + v_tiles + stage * i32(tile_bytes), warp, lane)
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()

        for half in range(2):
            sums[half] = softmax.quad_sum(sums[half])
            row = i32(half * 8) + (lane >> i32(2))
            token, head = i32(first_row + row) // gqa_ratio, kv_head * gqa_ratio + i32(first_row + row) % gqa_ratio
            inverse = f32(1.0) / sums[half] if sums[half] != f32(0.0) else f32(0.0)
            index = (segment_index * q.shape[0] + start + token) * heads + head
            is_whole, line = window > 0 or visible_keys <= segment, base + row * i32(pitch)
            if is_whole or row < valid_rows:
                store_row(is_whole, acc, inverse, line, partial, index, warp * warp_steps, half, lane)
            if not is_whole and row < valid_rows and thread < 32 and (lane & i32(3)) == 0:
                weights[index, 0], weights[index, 1] = row_max[half], sums[half]
        if window > 0 or visible_keys <= segment:
            cuda.syncthreads()
            for index in range(thread, valid_rows * i32(out_chunks), threads):
                row, chunk = i32(index) // i32(out_chunks), i32(index) % i32(out_chunks)
                token, head = i32(first_row + row) // gqa_ratio, i32(first_row + row) % gqa_ratio
                target = address_of(out) + q_offset + np.int64(token) * token_bytes + head * (head_dim * 2)
                copy_to_global(target + chunk * CHUNK, base + row * i32(pitch) + chunk * i32(CHUNK))

    return sm80_decode_kernel


@specialize
def merge_segments_kernel(segment):
    """The kernel that merges what sm80_decode_kernel left for sequences with several segments."""

    @cuda.jit
    def merge_segments_kernel(cu_seqlens, context_lens, gqa_ratio, partial, weights, out):
        """A block owns a query head of a token, a thread columns of it; segments in ascending order."""
        head, sequence, token = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        start = cu_seqlens[sequence]
        length = cu_seqlens[sequence + 1] - start
        if token >= length:
            return
        # Segments as sm80_decode_kernel counts them: by the last row of the block that this row belonged to.
        first_row = (token * gqa_ratio + head % gqa_ratio) // DECODE_ROWS * DECODE_ROWS
        last_row = min(first_row + DECODE_ROWS, length * gqa_ratio) - 1
        segments = (context_lens[sequence] - length + last_row // gqa_ratio) // segment + 1
        if context_lens[sequence] == 0 or segments < 2:
            return
        tokens, heads, head_dim = out.shape
        for column in range(cuda.threadIdx.x, head_dim, cuda.blockDim.x):
            index = (start + token) * heads + head
            total, row_max, total_sum = partial[index, column], weights[index, 0], weights[index, 1]
            for _ in range(1, segments):
                index += tokens * heads
                row_max, a, b = softmax.merge_weights(row_max, weights[index, 0])
                total_sum = cuda.fma(weights[index, 1], b, total_sum * a)
                total = cuda.fma(partial[index, column], b, total * a)
            out[start + token, head, column] = narrow(total * (f32(1.0) / total_sum), out)

    return merge_segments_kernel


@functools.cache
def decode_config(head_dim, element, block_size, limit):
    """The Sm80DecodeConfig for a head_dim: as many stages, up to three, as leave room for two blocks an SM."""
    for stages in (3, 2):
        config = Sm80DecodeConfig(head_dim, element, stages, block_size)
        if 2 * (config.shared_bytes + DECODE_BLOCK_BYTES) <= limit + SYSTEM_BYTES:
            return config
    return Sm80DecodeConfig(head_dim, element, 1, block_size)


def workspace_sizes(element, kv_heads, gqa_ratio, head_dim, block_size, calls):
    """The sm80 family\'s part of paged.workspace_sizes, which calls this."""
    decode = decode_config(head_dim, element, block_size, device.max_shared_bytes())
    prefill = attention_config(head_dim, element, block_size, device.max_shared_bytes())
    rows, floats, counters = 1, 0, 0
    for sequences, tokens, max_seqlen_q, max_context_len in calls:
        segments = -(-max_context_len // decode.segment)
        if segments > 1:
            # A sequence with more queries than this is not decode's.
            decode_tokens = min(max_seqlen_q, DECODE_ROWS // gqa_ratio)
            rows = max(rows, segments * min(tokens, sequences * decode_tokens) * gqa_ratio * kv_heads)
        slots, slot_floats = totals_shape(prefill, max_context_len)
        floats, counters = (
            max(floats, rows * (sm80_tiles.padded(head_dim) + 2), slots * slot_floats),
            max(counters, slots),
        )
    return floats, counters, 0, 0


def paged_attention_sm80(q, k, v, block_size, sequences, scale, out, config=None):
    """The operator paged_attention by the sm80 kernels; the operator has checked the arguments.

    k, v: the cache as (blocks * block_size, HK, E). config: of decode or of prefill; by default decode's for up to
    DECODE_ROWS rows of a KV head. Raises ValueError for a block_size that does not divide SEGMENT_KEYS.
    """
    if softmax.SEGMENT_KEYS % block_size:
        raise ValueError(f"paged_attention: block_size must divide {softmax.SEGMENT_KEYS}, got {block_size}")
    (tokens, heads, head_dim), kv_heads, count = q.shape, k.shape[1], sequences.context_lens.shape[0]
    gqa_ratio, max_seqlen_q = heads // kv_heads, sequences.max_seqlen_q
    kind = head_dim, q.dtype.name, block_size, device.max_shared_bytes()
    if isinstance(config, Sm80AttentionConfig) or config is None and max_seqlen_q * gqa_ratio > DECODE_ROWS:
        no_lse = unused(2, np.float32)
        prefill_sm80(q, k, v, sequences, scale, out, no_lse, config or attention_config(*kind, sequences.window))
        return
    if count > MAX_SEQUENCES:
        raise ValueError(f"paged_attention: at most {MAX_SEQUENCES} sequences can be decoded at once, got {count}")
    config = (config or decode_config(*kind)).with_window(sequences.window)
    segments = 1 if sequences.window else max(-(-sequences.max_context_len // config.segment), 1)
    rows = segments * tokens * heads if segments > 1 else 1
    columns = sm80_tiles.padded(head_dim)
    flat = current().own(AttentionWorkspace).float_array(rows * (columns + 2))
    partial, weights = flat[: rows * columns].reshape(rows, columns), flat[rows * columns :].reshape(rows, 2)
    launch(
        sm80_decode_kernel(config),
        (kv_heads, count, -(-max_seqlen_q * gqa_ratio // DECODE_ROWS) * segments),
        32 * DECODE_WARPS,
        q, k, v, sm80_tiles.batch_of(sequences), segments,
        float(scale * softmax.LOG2_E), partial, weights, out,
        shared=config.shared_bytes,
    )  # fmt: skip
    if segments > 1:
        arguments = (sequences.cu_seqlens, sequences.context_lens, gqa_ratio, partial, weights, out)
        launch(merge_segments_kernel(config.segment), (heads, count, max_seqlen_q), MERGE_THREADS, *arguments)
