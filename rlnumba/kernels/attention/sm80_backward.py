"""The gradient of causal packed attention by mma.sync, without float atomics (Dao 2023, FlashAttention-2).

    p[i, j] = exp(s[i, j] - lse[i])      delta[i] = dout[i] . out[i]      ds[i, j] = p[i, j] (dout[i] . v[j] - delta[i])
    dq[i] = scale sum_j ds[i, j] k[j]    dk[j] = scale sum_i ds[i, j] q[i]      dv[j] = sum_i p[i, j] dout[i]

in float16 or bfloat16 with float32 accumulators; p and ds are rounded to the inputs' type before they multiply.
The H / HK query heads of a key head are rows of one matrix, as in kernels/attention/sm80_forward.py. Two kernels:

    dk, dv   a block owns keys, a warp 16 of them, and passes over the rows that see them. Scores are computed as
             s^T = k q^T, so that a key's row of p^T lies in four lanes and is the left operand of p^T dout as it is
    dq       a block owns rows, a warp 16 of them, and passes over their keys

so scores are computed twice: seven products where five would do, for sums that each belong to one thread, in the
order of the rows or keys, and so have the same bits every time.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.delta import attention_delta
from rlnumba.kernels.attention.sm80_forward import (
    BLOCK_BYTES,
    KEYS,
    LOG2_E,
    copy_functions,
    fragment_functions,
    padded,
    pitch_of,
)
from rlnumba.kernels.gemm.sm80 import SYSTEM_BYTES, shared_limit
from rlnumba.kernels.ptx.sm80 import (
    CHUNK,
    address_of,
    copies_end,
    copies_wait,
    copy_chunk,
    copy_word,
    multiply,
    store_word,
    write_chunk,
)
from rlnumba.kernels.ptx.sm90 import cvt_pack, load_pair, shared_address
from rlnumba.kernels.ptx.warp import device_function, exp2, sync_warp
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Columns of a tile that a warp works on at a time: what its scores and their gradients take of its registers.
WIDTH = 32
# Columns of dk and dv that a block sums at most: 2 x 16 x 128 of each warp are 128 registers a thread.
COLUMNS = 128


class KeyTile(NamedTuple):
    """The kernel of dk and dv. element: "float16" or "bfloat16"; warps: of 16 keys; rows: of a tile of q and dout.

    stages: such tiles in shared memory.
    """

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
    def parts(self):
        """Blocks that share the columns of dk and dv."""
        return -(-padded(self.head_dim) // COLUMNS)

    @property
    def stage_bytes(self):
        """Rows of q and dout, and their lse and delta."""
        return 2 * self.rows * (pitch_of(self.head_dim) + 4)

    @property
    def shared_bytes(self):
        return 2 * self.keys * pitch_of(self.head_dim) + self.stages * self.stage_bytes


class RowTile(NamedTuple):
    """The kernel of dq. warps: of 16 rows; stages: tiles of KEYS keys and values in shared memory.

    keeps_rows: q and dout stay in registers, and their place in shared memory is given up to the keys.
    """

    head_dim: int
    element: str
    warps: int = 4
    stages: int = 1
    keeps_rows: bool = True

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def rows(self):
        return 16 * self.warps

    @property
    def shared_bytes(self):
        rows, keys = 2 * self.rows * pitch_of(self.head_dim), 2 * self.stages * KEYS * pitch_of(self.head_dim)
        return max(rows, keys) if self.keeps_rows else rows + keys


@functools.cache
def write_function(head_dim, columns, element):
    """The device function that writes a warp's 16 rows of a gradient, or `columns` columns of them."""
    pitch, steps, pack_two = pitch_of(head_dim), padded(columns) // 16, cvt_pack(element)

    @device_function
    def write(acc, factor, place, target, column, alive, group, token_bytes, first, lane):
        """acc times factor, by way of 16 lines of shared memory at `place`, to rows first .. first + alive of a matrix.

        target: address of the first token's first head; row r is head r % group of token r // group. column: of
        head_dim at which acc begins.
        """
        words = place + (lane >> i32(2)) * i32(pitch) + ((lane & i32(3)) << i32(2))
        for n in range(2 * steps):
            store_word(words + n * CHUNK, pack_two(acc[4 * n] * factor, acc[4 * n + 1] * factor))
            store_word(words + n * CHUNK + 8 * pitch, pack_two(acc[4 * n + 2] * factor, acc[4 * n + 3] * factor))
        sync_warp()
        chunks = i32(min(i32(head_dim) - column, i32(columns)) >> 3)
        for index in range(lane, min(alive, i32(16)) * chunks, 32):
            row, chunk = i32(index) // chunks, i32(index) % chunks
            token, head = i32(first + row) // group, i32(first + row) % group
            there = target + np.int64(token) * token_bytes + (head * (head_dim * 2) + column * 2 + chunk * CHUNK)
            write_chunk(there, place + row * i32(pitch) + chunk * i32(CHUNK))

    return write


@functools.cache
def row_copy_function(head_dim, rows, threads):
    """The device function that starts the copy of a tile of rows of q and dout, and of their lse and delta."""
    chunks, real_chunks, pitch = padded(head_dim) // 8, head_dim // 8, pitch_of(head_dim)
    lanes = 1 << (chunks - 1).bit_length()
    together = threads // lanes
    passes = -(-rows // together)

    @device_function
    def copy(target, q_source, dout_source, lse, delta, first, end, group, token_bytes, start, kv_head, thread):
        """Rows first .. first + rows of a key head's matrix, zeros from row `end` on.

        q_source, dout_source: addresses of the first token's first query head of the key head.
        """
        line, chunk = thread // i32(lanes), thread % i32(lanes)
        # Row after row of a thread is `together` further: the token and the head move by these, without a division.
        token, head = i32(first + line) // group, i32(first + line) % group
        more_tokens, more_heads = i32(together) // group, i32(together) % group
        if chunk < chunks:
            for i in range(passes):
                row = i32(line + i32(i * together))
                if rows % together == 0 or row < rows:
                    offset = np.int64(token) * token_bytes + (head * (head_dim * 2) + chunk * CHUNK)
                    place = target + row * i32(pitch) + chunk * i32(CHUNK)
                    nbytes = i32(CHUNK) if i32(first + row) < end and chunk < real_chunks else i32(0)
                    copy_chunk(place, q_source + offset, nbytes)
                    copy_chunk(place + rows * pitch, dout_source + offset, nbytes)
                token, head = i32(token + more_tokens), i32(head + more_heads)
                if head >= group:
                    token, head = i32(token + i32(1)), i32(head - group)
        if thread < rows:
            row = i32(first + thread)
            offset = (np.int64(kv_head * group + row % group) * lse.shape[1] + start + row // group) * 4
            place = target + 2 * rows * pitch + thread * 4
            nbytes = i32(4) if row < end else i32(0)
            copy_word(place, address_of(lse) + offset, nbytes)
            copy_word(place + rows * 4, address_of(delta) + offset, nbytes)

    return copy


@specialize
def sm80_dkv_kernel(tile):
    """The kernel of a KeyTile."""
    head_dim, element, warps, rows, stages = tile
    threads, keys, parts, pitch = tile.threads, tile.keys, tile.parts, pitch_of(head_dim)
    steps, columns = padded(head_dim) // 16, min(padded(head_dim), COLUMNS)
    column_steps, acc_count, score_count = columns // 16, columns // 2, WIDTH // 2
    stage_bytes, values_at, rows_at = tile.stage_bytes, keys * pitch, 2 * keys * pitch
    # The block's keys are rows of a matrix with one head a token; the function for tiles of KEYS keys is not needed.
    copy_keys, _ = copy_functions(head_dim, keys, threads, 0)
    copy_tile = row_copy_function(head_dim, rows, threads)
    load_rows, load_lines, load_values = fragment_functions(head_dim)
    write = write_function(head_dim, columns, element)
    add_product, pack_two = multiply(element), cvt_pack(element)
    wait_for_tile, wait_for_all = copies_wait(stages - 1), copies_wait(0)

    @device_function
    def across(scores, own, others, lane):
        """scores (16 keys, WIDTH rows) = the warp's lines at `own` times lines at `others`."""
        a = cuda.local.array(4, np.int32)
        b = cuda.local.array(4, np.int32)
        for i in range(score_count):
            scores[i] = f32(0.0)
        for step in range(steps):
            load_rows(a, 0, own, step, lane)
            for n in range(WIDTH // 16):
                load_lines(b, 0, others + n * 16 * pitch, step, lane)
                add_product(scores, 8 * n, a, 0, b, 0)

    @device_function
    def along(acc, weights, lines, part, lane):
        """acc (16 keys, columns) += weights (16 keys, WIDTH rows) times the lines, from column step part on."""
        a = cuda.local.array(4, np.int32)
        b = cuda.local.array(4, np.int32)
        for step in range(WIDTH // 16):
            for i in range(4):
                a[i] = pack_two(weights[8 * step + 2 * i], weights[8 * step + 2 * i + 1])
            for n in range(column_steps):
                load_values(b, 0, lines + step * 16 * pitch, part + n, lane)
                add_product(acc, 8 * n, a, 0, b, 0)

    @cuda.jit(launch_bounds=(threads, 1))
    def sm80_dkv_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dk, dv):
        """A block owns `keys` keys of a key head, or COLUMNS columns of their gradients, and passes over the rows.

        Shared memory: the block's keys and values, then stages of [q | dout | lse | delta] of a tile of rows.
        """
        dk_acc = cuda.local.array(acc_count, np.float32)
        dv_acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head, part = i32(cuda.blockIdx.x // parts), i32(cuda.blockIdx.x % parts)
        heads, kv_heads = i32(q.shape[1]), i32(k.shape[1])
        group = heads // kv_heads
        start = cu_seqlens[cuda.blockIdx.y]
        length = i32(cu_seqlens[cuda.blockIdx.y + 1] - start)
        first = i32(cuda.blockIdx.z * keys)
        alive = min(i32(length - first), i32(keys))
        if alive <= 0:
            return
        end = i32(length * group)
        begin = i32(first * group) // i32(rows) * i32(rows)
        tiles = i32(i32(i32(end - begin) + i32(rows - 1)) // i32(rows))

        base = shared_address(cuda.shared.array(0, np.uint8))
        token_bytes, row_bytes = i32(heads * i32(head_dim * 2)), i32(kv_heads * i32(head_dim * 2))
        first_row = np.int64(start) * token_bytes + kv_head * group * (head_dim * 2)
        first_key = np.int64(start) * row_bytes + kv_head * (head_dim * 2)
        q_source, dout_source = address_of(q) + first_row, address_of(dout) + first_row
        copy_keys(base, address_of(k) + first_key, first, alive, i32(1), row_bytes, thread)
        copy_keys(base + values_at, address_of(v) + first_key, first, alive, i32(1), row_bytes, thread)
        for stage in range(stages):
            if stage < tiles:
                copy_tile(
                    base + rows_at + stage * stage_bytes, q_source, dout_source, lse, delta,
                    i32(begin + i32(stage * rows)), end, group, token_bytes, start, kv_head, thread,
                )  # fmt: skip
            copies_end()
        for i in range(acc_count):
            dk_acc[i], dv_acc[i] = f32(0.0), f32(0.0)
        own_key, c = i32(warp * i32(16)), scale * f32(LOG2_E)
        own = base + own_key * i32(pitch)
        # Row r sees key j if r >= group j: from `full` on, rows see all of the warp's keys, before `none` none.
        none = i32(i32(first + own_key) * group)
        full = i32(i32(first + own_key + i32(15)) * group)
        stage = i32(0)
        for j in range(tiles):
            wait_for_tile()
            cuda.syncthreads()
            place = base + rows_at + stage * i32(stage_bytes)
            for sub in range(rows // WIDTH):
                row = i32(i32(begin + i32(i32(j) * i32(rows))) + i32(sub * WIDTH))
                if own_key < alive and i32(row + i32(WIDTH)) > none and row < end:
                    q_lines = place + sub * (WIDTH * pitch)
                    dout_lines = q_lines + rows * pitch
                    across(scores, own, q_lines, lane)
                    across(gradients, own + values_at, dout_lines, lane)
                    numbers = place + 2 * rows * pitch + sub * (WIDTH * 4) + ((lane & i32(3)) << i32(3))
                    for block in range(WIDTH // 8):
                        low_lse, high_lse = load_pair(numbers + block * 32)
                        low_delta, high_delta = load_pair(numbers + block * 32 + rows * 4)
                        low_lse, high_lse = low_lse * f32(LOG2_E), high_lse * f32(LOG2_E)
                        for half in range(2):
                            at = 4 * block + 2 * half
                            scores[at] = exp2(cuda.fma(scores[at], c, -low_lse))
                            scores[at + 1] = exp2(cuda.fma(scores[at + 1], c, -high_lse))
                            if row < full:
                                sees = i32(i32(first + own_key + half * 8 + (lane >> i32(2))) * group)
                                column = i32(row + block * 8 + ((lane & i32(3)) << i32(1)))
                                if column < sees:
                                    scores[at] = f32(0.0)
                                if i32(column + i32(1)) < sees:
                                    scores[at + 1] = f32(0.0)
                            gradients[at] = scores[at] * (gradients[at] - low_delta)
                            gradients[at + 1] = scores[at + 1] * (gradients[at + 1] - high_delta)
                    along(dv_acc, scores, dout_lines, i32(part * column_steps), lane)
                    along(dk_acc, gradients, q_lines, i32(part * column_steps), lane)
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages))
            if ahead < tiles:
                copy_tile(
                    place, q_source, dout_source, lse, delta, i32(begin + i32(ahead * i32(rows))), end, group,
                    token_bytes, start, kv_head, thread,
                )  # fmt: skip
            copies_end()
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()
        # A warp's lines of keys and values are read by itself alone; its gradients take their place.
        alive, first_own, column = i32(alive - own_key), i32(first + own_key), i32(part * columns)
        write(
            dk_acc, scale, own, address_of(dk) + first_key, column, alive, i32(1), row_bytes, first_own, lane
        )  # fmt: skip
        write(
            dv_acc, f32(1.0), own + values_at, address_of(dv) + first_key, column, alive, i32(1), row_bytes, first_own,
            lane,
        )  # fmt: skip

    return sm80_dkv_kernel


@specialize
def sm80_dq_kernel(tile):
    """The kernel of a RowTile."""
    head_dim, element, warps, stages, keeps_rows = tile
    threads, rows, pitch = tile.threads, tile.rows, pitch_of(head_dim)
    steps, score_count = padded(head_dim) // 16, WIDTH // 2
    acc_count, row_words = 8 * steps, 4 * (steps if keeps_rows else 1)
    keys_at = 0 if keeps_rows else 2 * rows * pitch
    tile_bytes, stage_bytes = KEYS * pitch, 2 * KEYS * pitch
    copy_rows, copy_keys = copy_functions(head_dim, rows, threads, 0)
    load_rows, load_lines, load_values = fragment_functions(head_dim)
    write = write_function(head_dim, head_dim, element)
    add_product, pack_two = multiply(element), cvt_pack(element)
    wait_for_tile, wait_for_all = copies_wait(stages - 1), copies_wait(0)

    @device_function
    def across(scores, own_words, own, lines, lane):
        """scores (16 rows, WIDTH keys) = the warp's rows, in own_words or at `own`, times the lines."""
        fragment = cuda.local.array(4, np.int32)
        for i in range(score_count):
            scores[i] = f32(0.0)
        for step in range(steps):
            if not keeps_rows:
                load_rows(own_words, 0, own, step, lane)
            for n in range(WIDTH // 16):
                load_lines(fragment, 0, lines + n * 16 * pitch, step, lane)
                add_product(scores, 8 * n, own_words, 4 * step if keeps_rows else 0, fragment, 0)

    @cuda.jit(launch_bounds=(threads, 2))
    def sm80_dq_kernel(dout, q, k, v, lse, delta, cu_seqlens, scale, dq):
        """A block owns `rows` rows of a key head, of which the last, which see the most keys, come first.

        Shared memory: rows of q and of dout, unless they stay in registers, then stages of [keys | values] of a tile.
        """
        acc = cuda.local.array(acc_count, np.float32)
        scores = cuda.local.array(score_count, np.float32)
        gradients = cuda.local.array(score_count, np.float32)
        q_words = cuda.local.array(row_words, np.int32)
        dout_words = cuda.local.array(row_words, np.int32)
        words = cuda.local.array(4, np.int32)
        fragment = cuda.local.array(4, np.int32)
        row_lse = cuda.local.array(2, np.float32)
        row_delta = cuda.local.array(2, np.float32)
        position = cuda.local.array(2, np.int32)
        thread = i32(cuda.threadIdx.x) & i32(threads - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        kv_head = i32(cuda.blockIdx.x)
        heads, kv_heads = i32(q.shape[1]), i32(k.shape[1])
        group = heads // kv_heads
        start = cu_seqlens[cuda.blockIdx.y]
        length = i32(cu_seqlens[cuda.blockIdx.y + 1] - start)
        first = i32(i32(cuda.gridDim.z - 1 - cuda.blockIdx.z) * i32(rows))
        alive = min(i32(i32(length * group) - first), i32(rows))
        if alive <= 0:
            return
        visible = i32(i32(i32(first + alive) - i32(1)) // group + i32(1))
        tiles = i32(i32(visible + i32(KEYS - 1)) // i32(KEYS))

        base = shared_address(cuda.shared.array(0, np.uint8))
        token_bytes, row_bytes = i32(heads * i32(head_dim * 2)), i32(kv_heads * i32(head_dim * 2))
        first_row = np.int64(start) * token_bytes + kv_head * group * (head_dim * 2)
        k_source = address_of(k) + np.int64(start) * row_bytes + kv_head * (head_dim * 2)
        v_source = address_of(v) + np.int64(start) * row_bytes + kv_head * (head_dim * 2)
        next_tile, own_row = np.int64(KEYS) * row_bytes, warp * i32(16)
        own = base + own_row * i32(pitch)
        copy_rows(base, address_of(q) + first_row, first, alive, group, token_bytes, thread)
        copy_rows(base + rows * pitch, address_of(dout) + first_row, first, alive, group, token_bytes, thread)
        if keeps_rows:
            copies_end()
            wait_for_all()
            cuda.syncthreads()
            for step in range(steps):
                load_rows(q_words, 4 * step, own, step, lane)
                load_rows(dout_words, 4 * step, own + rows * pitch, step, lane)
            cuda.syncthreads()
        for stage in range(stages):
            if stage < tiles:
                place = base + keys_at + stage * stage_bytes
                copy_keys(place, k_source, cu_seqlens, i32(0), i32(stage * KEYS), length, row_bytes, thread)
                copy_keys(
                    place + tile_bytes, v_source, cu_seqlens, i32(0), i32(stage * KEYS), length, row_bytes, thread
                )
            copies_end()
            k_source += next_tile
            v_source += next_tile
        for half in range(2):
            row = i32(min(i32(own_row + i32(half * 8) + (lane >> i32(2))), i32(alive - i32(1))) + first)
            position[half] = row // group
            row_lse[half] = lse[kv_head * group + row % group, start + row // group] * f32(LOG2_E)
            row_delta[half] = delta[kv_head * group + row % group, start + row // group]
        for i in range(acc_count):
            acc[i] = f32(0.0)
        c = scale * f32(LOG2_E)
        # The positions of the warp's first and last rows.
        nearest = i32(i32(first + own_row) // group)
        farthest = i32(i32(first + min(i32(own_row + i32(15)), i32(alive - i32(1)))) // group)
        if own_row >= alive:
            farthest = i32(-1)
        stage = i32(0)
        for j in range(tiles):
            wait_for_tile()
            cuda.syncthreads()
            place = base + keys_at + stage * i32(stage_bytes)
            for sub in range(KEYS // WIDTH):
                key = i32(i32(i32(j) * i32(KEYS)) + i32(sub * WIDTH))
                if key <= farthest:
                    keys = place + sub * (WIDTH * pitch)
                    across(scores, q_words, own, keys, lane)
                    across(gradients, dout_words, own + rows * pitch, keys + tile_bytes, lane)
                    for i in range(score_count):
                        half = i % 4 // 2
                        p = exp2(cuda.fma(scores[i], c, -row_lse[half]))
                        if i32(key + i32(WIDTH - 1)) > nearest:
                            if i32(key + i32(i // 4 * 8 + i % 2) + ((lane & i32(3)) << i32(1))) > position[half]:
                                p = f32(0.0)
                        gradients[i] = p * (gradients[i] - row_delta[half])
                    for step in range(WIDTH // 16):
                        for i in range(4):
                            words[i] = pack_two(gradients[8 * step + 2 * i], gradients[8 * step + 2 * i + 1])
                        for n in range(steps):
                            load_values(fragment, 0, keys + step * 16 * pitch, n, lane)
                            add_product(acc, 8 * n, words, 0, fragment, 0)
            cuda.syncthreads()
            ahead = i32(i32(j) + i32(stages))
            if ahead < tiles:
                key = i32(ahead * i32(KEYS))
                copy_keys(place, k_source, cu_seqlens, i32(0), key, length, row_bytes, thread)
                copy_keys(place + tile_bytes, v_source, cu_seqlens, i32(0), key, length, row_bytes, thread)
            copies_end()
            k_source += next_tile
            v_source += next_tile
            stage = i32(stage + i32(1)) if stage < i32(stages - 1) else i32(0)
        wait_for_all()
        # All warps have left the keys, whose place out may take.
        cuda.syncthreads()
        write(
            acc, scale, own, address_of(dq) + first_row, i32(0), i32(alive - own_row), group, token_bytes,
            i32(first + own_row), lane,
        )  # fmt: skip

    return sm80_dq_kernel


@functools.cache
def key_tile(head_dim, element, limit):
    """The KeyTile for a head_dim on a GPU whose blocks may have `limit` bytes of shared memory.

    As many rows a tile, of two stages, as fit beside the keys of eight warps; of four where that is too much.
    """
    for warps in (8, 4, 2):
        for rows in (64, 32):
            tile = KeyTile(head_dim, element, warps, rows)
            if tile.shared_bytes + BLOCK_BYTES <= limit + SYSTEM_BYTES:
                return tile
    return KeyTile(head_dim, element, 2, 32, 1)


@functools.cache
def row_tile(head_dim, element, limit):
    """The RowTile for a head_dim: q and dout in registers if these suffice, and two blocks an SM if they fit."""
    if padded(head_dim) <= 128:
        for stages in (2, 1):
            tile = RowTile(head_dim, element, 4, stages)
            if 2 * (tile.shared_bytes + BLOCK_BYTES) <= limit + SYSTEM_BYTES:
                return tile
    for warps in (4, 2):
        tile = RowTile(head_dim, element, warps, keeps_rows=False)
        if tile.shared_bytes + BLOCK_BYTES <= limit + SYSTEM_BYTES:
            return tile
    return RowTile(head_dim, element, 1, keeps_rows=False)


def attend_backward(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv, keys_tile=None, rows_tile=None):
    """attention_backward() of kernels/attention/backward.py, for heads that attention_sm80.takes accepts.

    keys_tile, rows_tile: by default what key_tile and row_tile choose.
    """
    _, heads, head_dim = q.shape
    kv_heads, sequences, element = k.shape[1], len(cu_seqlens) - 1, q.dtype.name
    keys_tile = keys_tile or key_tile(head_dim, element, shared_limit())
    rows_tile = rows_tile or row_tile(head_dim, element, shared_limit())
    arguments = (dout, q, k, v, lse, attention_delta(dout, out), cu_seqlens, float(scale))
    grid = (kv_heads * keys_tile.parts, sequences, -(-max_seqlen // keys_tile.keys))
    launch(sm80_dkv_kernel(keys_tile), grid, keys_tile.threads, *arguments, dk, dv, shared=keys_tile.shared_bytes)
    grid = (kv_heads, sequences, -(-max_seqlen * (heads // kv_heads) // rows_tile.rows))
    launch(sm80_dq_kernel(rows_tile), grid, rows_tile.threads, *arguments, dq, shared=rows_tile.shared_bytes)
