"""The gradient of the gated delta rule by mma.sync, heads of DIM columns; the equations are those of ops.py.

The first kernel goes through the blocks of a sequence from the last to the first, with dS in the accumulators of 64
columns of V: dv, dbeta, and dS at each block. tensor_block_backward.py has the second one, all blocks at once. States,
rows w, errors r and gradients are bfloat16 operands, whose range they need; M and P are products of float16, as in the
forward. The substitution is a chain in float32, 16 tokens at a time, from the last to the first; between these, -M and
the rows are operands.
"""

import functools

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, SUB_BLOCK
from rlnumba.kernels.delta_rule.simt import decay_between
from rlnumba.kernels.delta_rule.simt_backward import add_parts, block_bounds
from rlnumba.kernels.delta_rule.tensor import forward_of_blocks
from rlnumba.kernels.delta_rule.tensor_block_backward import SHARED_BYTES as BLOCK_SHARED_BYTES
from rlnumba.kernels.delta_rule.tensor_block_backward import delta_rule_block_gradient
from rlnumba.kernels.delta_rule.tensor_tiles import (
    CHUNK,
    COLUMNS,
    COLUMNS_PITCH,
    DIM,
    PITCH,
    ZERO,
    add_log_decays,
    convert_function,
    copy_function,
    fragment_functions,
)
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import (
    load_four,
    load_pair,
    load_words,
    shared_address,
    store_function,
    store_pair,
    store_word,
    store_words,
)
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function, sync_warp, warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32, f32 = np.int32, np.float32

THREADS = 128
# Shared memory in bytes: two stages of q, k, do; E do; dr; -E dr; -M; P; dS; z and the diagonal blocks of M, float32.
TILE, COLUMN_TILE = BLOCK * PITCH, BLOCK * COLUMNS_PITCH
STAGE = 2 * TILE + COLUMN_TILE
SCALED = 2 * STAGE
ROWS = SCALED + COLUMN_TILE
SCALED_ROWS = ROWS + COLUMN_TILE
M_TILE = SCALED_ROWS + COLUMN_TILE
P_TILE = M_TILE + COLUMN_TILE
STATE = P_TILE + COLUMN_TILE
Z_PITCH, Z_COUNT, LAST = 4 * COLUMNS + CHUNK, 2 * SUB_BLOCK, 2 * SUB_BLOCK - 2
Z = STATE + DIM * COLUMNS_PITCH
DIAGONAL = Z + BLOCK * Z_PITCH
SHARED_BYTES = DIAGONAL + BLOCK * SUB_BLOCK * 4
# Static arrays of a block of the second kernel, rounded up.
STATIC_BYTES = 20 << 10

pack, unpack = cvt_pack("bfloat16"), cvt_unpack("bfloat16")
store_float = store_function("f")


@functools.cache
def weights_function():
    """The device function that makes a warp's 16 rows of M and P."""
    load_a, _, load_b, _ = fragment_functions(PITCH)
    multiply = sm80.mma("float16")

    @device_function
    def make_weights(base, k_tile, q_tile, sums, warp, lane):
        """-M and P as operands, and M of the own sub-block as float32: a row ends with its last element."""
        errors, outputs = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        first = i32(warp * i32(16))
        for i in range(32):
            errors[i], outputs[i] = ZERO, ZERO
        for step in range(DIM // 16):
            for n in range(4):
                load_b(b, k_tile, i32(n * 16), i32(step * 16), lane)
                load_a(a, k_tile, first, i32(step * 16), lane)
                multiply(errors, 8 * n, a, 0, b, 0)
                load_a(a, q_tile, first, i32(step * 16), lane)
                multiply(outputs, 8 * n, a, 0, b, 0)
        for half in range(2):
            t = i32(first + (lane >> i32(2)) + i32(8 * half))
            total = sums[t]
            for n in range(8):
                j, at = i32(i32(8 * n) + ((lane & i32(3)) << i32(1))), 4 * n + 2 * half
                for i in range(2):
                    decay = decay_between(total, sums[j + i]) if j + i <= t else ZERO
                    outputs[at + i] = decay * outputs[at + i]
                    errors[at + i] = decay * errors[at + i] if j + i < t else ZERO
                place = t * i32(COLUMNS_PITCH) + j * i32(2)
                store_word(base + i32(M_TILE) + place, pack(-errors[at], -errors[at + 1]))
                store_word(base + i32(P_TILE) + place, pack(outputs[at], outputs[at + 1]))
                for i in range(2):
                    row, column = t & i32(15), i32(j + i32(i)) & i32(15)
                    if (j >> i32(4)) == warp and column < row:
                        place = t * i32(SUB_BLOCK) + i32(SUB_BLOCK - 1) - row + column
                        store_float(base + i32(DIAGONAL) + place * i32(4), errors[at + i])

    return make_weights


@functools.cache
def substitution_functions():
    """(begin_rows, solve): the device functions of a warp's 16 rows of z and dr."""
    load_a, _, _, _ = fragment_functions(PITCH)
    _, load_a_trans, _, load_b_trans = fragment_functions(COLUMNS_PITCH)
    multiply = sm80.mma("bfloat16")
    columns = COLUMNS // 16

    @device_function
    def begin_rows(acc, base, k_tile, do_tile, later, warp, lane):
        """acc (16, COLUMNS) = F k dS + P^T do."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        first = i32(warp * i32(16))
        for i in range(32):
            acc[i] = ZERO
        for step in range(DIM // 16):
            load_a(a, k_tile, first, i32(step * 16), lane)
            for n in range(columns):
                load_b_trans(b, base + i32(STATE), i32(step * 16), i32(n * 16), lane)
                multiply(acc, 8 * n, a, 0, b, 0)
        low, high = later[first + (lane >> i32(2))], later[first + (lane >> i32(2)) + 8]
        for n in range(2 * columns):
            for i in range(2):
                acc[4 * n + i] = acc[4 * n + i] * low
                acc[4 * n + 2 + i] = acc[4 * n + 2 + i] * high
        for step in range(BLOCK // 16):
            load_a_trans(a, base + i32(P_TILE), i32(step * 16), first, lane)
            for n in range(columns):
                load_b_trans(b, do_tile, i32(step * 16), i32(n * 16), lane)
                multiply(acc, 8 * n, a, 0, b, 0)

    @device_function
    def solve(acc, base, beta, since, warp, lane):
        """z and dr of the warp's sub-block, after the sub-blocks behind it: z float32, dr and -E dr operands."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        z, m = cuda.local.array(Z_COUNT, np.float32), cuda.local.array(SUB_BLOCK, np.float32)
        first = i32(warp * i32(16))
        for step in range(warp + 1, BLOCK // 16):
            load_a_trans(a, base + i32(M_TILE), i32(step * 16), first, lane)
            for n in range(columns):
                load_b_trans(b, base + i32(ROWS), i32(step * 16), i32(n * 16), lane)
                multiply(acc, 8 * n, a, 0, b, 0)
        place = base + i32(Z) + (first + (lane >> i32(2))) * i32(Z_PITCH) + (lane & i32(3)) * i32(8)
        for n in range(2 * columns):
            store_pair(place + n * 32, acc[4 * n], acc[4 * n + 1])
            store_pair(place + 8 * Z_PITCH + n * 32, acc[4 * n + 2], acc[4 * n + 3])
        sync_warp()
        # From here on a lane has two columns.
        lines = base + i32(Z) + first * i32(Z_PITCH) + lane * i32(8)
        for i in range(SUB_BLOCK):
            z[2 * i], z[2 * i + 1] = load_pair(lines + i * Z_PITCH)
        diagonal = base + i32(DIAGONAL) + first * i32(SUB_BLOCK * 4)
        rows = base + i32(ROWS) + first * i32(COLUMNS_PITCH) + lane * i32(4)
        for turn in range(SUB_BLOCK):
            # The last of z is row i, and the rows before it are those ahead of it.
            i = i32(i32(SUB_BLOCK - 1) - i32(turn))
            t = first + i
            left, right, scale = beta[t] * z[LAST], beta[t] * z[LAST + 1], -since[t]
            store_pair(lines + i * i32(Z_PITCH), z[LAST], z[LAST + 1])
            store_word(rows + i * i32(COLUMNS_PITCH), pack(left, right))
            place = rows + i32(SCALED_ROWS - ROWS) + i * i32(COLUMNS_PITCH)
            store_word(place, pack(scale * left, scale * right))
            for four in range(SUB_BLOCK // 4):
                place = diagonal + i * i32(SUB_BLOCK * 4) + four * CHUNK
                m[4 * four], m[4 * four + 1], m[4 * four + 2], m[4 * four + 3] = load_four(place)
            for back in range(SUB_BLOCK - 1):
                j = SUB_BLOCK - 2 - back
                z[2 * j + 2] = cuda.fma(-m[j], left, z[2 * j])
                z[2 * j + 3] = cuda.fma(-m[j], right, z[2 * j + 1])

    return begin_rows, solve


@functools.cache
def state_functions():
    """(publish, update): the device functions of the gradient of the state, of which a warp has 32 rows of K."""
    _, load_a_trans, _, _ = fragment_functions(PITCH)
    _, _, _, load_b_trans = fragment_functions(COLUMNS_PITCH)
    multiply = sm80.mma("bfloat16")
    columns = COLUMNS // 16

    @device_function
    def publish(dstate, base, warp, lane):
        """dS as operands, to shared memory."""
        place = base + i32(STATE) + (warp * i32(32) + (lane >> i32(2))) * i32(COLUMNS_PITCH) + (lane & i32(3)) * i32(4)
        for i in range(4):
            for n in range(2 * columns):
                at = (i // 2) * 32 + 4 * n + 2 * (i % 2)
                store_word(place + i * 8 * COLUMNS_PITCH + n * CHUNK, pack(dstate[at], dstate[at + 1]))

    @device_function
    def update(dstate, base, k_tile, q_tile, kept, warp, lane):
        """dS = E_last dS + q^T (E do) - k^T (E dr)."""
        a, b = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        other = cuda.local.array(4, np.int32)
        for i in range(64):
            dstate[i] = dstate[i] * kept
        for half in range(2):
            tile, operand = q_tile if half == 0 else k_tile, base + i32(SCALED if half == 0 else SCALED_ROWS)
            for step in range(BLOCK // 16):
                load_a_trans(a, tile, i32(step * 16), warp * i32(32), lane)
                load_a_trans(other, tile, i32(step * 16), warp * i32(32) + i32(16), lane)
                for n in range(columns):
                    load_b_trans(b, operand, i32(step * 16), i32(n * 16), lane)
                    multiply(dstate, 8 * n, a, 0, b, 0)
                    multiply(dstate, 32 + 8 * n, other, 0, b, 0)

    return publish, update


@device_function
def scale_rows(base, do_tile, since, thread):
    """E do as operands, in a tile of their own."""
    for i in range(BLOCK * COLUMNS // 8 // THREADS):
        index = i32(thread + i32(i * THREADS))
        row = index >> i32(3)
        place, scale = row * i32(COLUMNS_PITCH) + (index & i32(7)) * i32(CHUNK), since[row]
        a, b, c, d = load_words(do_tile + place)
        a0, a1 = unpack(a)
        b0, b1 = unpack(b)
        c0, c1 = unpack(c)
        d0, d1 = unpack(d)
        store_words(
            base + i32(SCALED) + place,
            pack(a0 * scale, a1 * scale),
            pack(b0 * scale, b1 * scale),
            pack(c0 * scale, c1 * scale),
            pack(d0 * scale, d1 * scale),
        )


copy_keys, copy_columns = copy_function(DIM, THREADS), copy_function(COLUMNS, THREADS)
convert_keys = convert_function(THREADS)
make_weights = weights_function()
begin_rows, solve = substitution_functions()
publish, update = state_functions()
wait_for_copies = sm80.cp_async_wait_group(0)


@device_function
def start_copies(target, dout, tokens, first, count, head, key_head, column, thread):
    heads, key_heads = i32(dout.shape[1]), i32(tokens.k.shape[1])
    offset = (np.int64(first) * key_heads + key_head) * (2 * DIM)
    copy_keys(target, address_of(tokens.q) + offset, key_heads * i32(2 * DIM), count, thread)
    copy_keys(target + i32(TILE), address_of(tokens.k) + offset, key_heads * i32(2 * DIM), count, thread)
    offset = (np.int64(first) * heads + head) * (2 * DIM) + column * 2
    copy_columns(target + i32(2 * TILE), address_of(dout) + offset, heads * i32(2 * DIM), count, thread)
    sm80.cp_async_commit_group()


@device_function
def store_block(base, dv, dstates, first, count, index, head, column, thread):
    """dr of the block and the gradient of the state after it, 16 bytes at a time."""
    heads = dv.shape[1]
    target = address_of(dv) + ((np.int64(first) * heads + head) * DIM + column) * 2
    for i in range(BLOCK * COLUMNS // 8 // THREADS):
        place = i32(thread + i32(i * THREADS))
        row, chunk = place >> i32(3), (place & i32(7)) * i32(CHUNK)
        if row < count:
            source = base + i32(ROWS) + row * i32(COLUMNS_PITCH) + chunk
            sm80.copy_to_global(target + np.int64(row) * (heads * 2 * DIM) + chunk, source)
    target = address_of(dstates) + ((np.int64(index) * heads + head) * DIM * DIM + column) * 2
    for i in range(DIM * COLUMNS // 8 // THREADS):
        place = i32(thread + i32(i * THREADS))
        row, chunk = place >> i32(3), (place & i32(7)) * i32(CHUNK)
        source = base + i32(STATE) + row * i32(COLUMNS_PITCH) + chunk
        sm80.copy_to_global(target + row * i32(2 * DIM) + chunk, source)


@cuda.jit(launch_bounds=(THREADS, 1))
def delta_rule_state_backward_kernel(dout, tokens, cu_seqlens, errors, dv, dstates, dbeta_parts):
    """A block of threads: (columns of V, value head, sequence). dv (N, HV, V) bfloat16; dbeta_parts (2, N, HV)."""
    raw, sums = cuda.shared.array(BLOCK, np.float32), cuda.shared.array(BLOCK, np.float32)
    since, later = cuda.shared.array(BLOCK, np.float32), cuda.shared.array(BLOCK, np.float32)
    beta = cuda.shared.array(BLOCK, np.float32)
    base = shared_address(cuda.shared.array(0, np.uint8))
    dstate, acc = cuda.local.array(64, np.float32), cuda.local.array(32, np.float32)
    thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
    lane, warp = thread & i32(31), thread >> i32(5)
    part, head, b = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
    column = part * i32(COLUMNS)
    key_head = i32(head // i32(i32(dout.shape[1]) // i32(tokens.k.shape[1])))
    begin, end = i32(cu_seqlens[b]), i32(cu_seqlens[b + 1])
    blocks = i32(i32(end - begin) + i32(BLOCK - 1)) // i32(BLOCK)
    if blocks == 0:
        return
    for i in range(64):
        dstate[i] = ZERO
    for i in range(BLOCK * SUB_BLOCK // THREADS):
        store_float(base + i32(DIAGONAL) + i32(thread + i32(i * THREADS)) * i32(4), ZERO)
    first = i32(begin + (blocks - i32(1)) * i32(BLOCK))
    stage = base
    start_copies(stage, dout, tokens, first, i32(end - first), head, key_head, column, thread)
    for turn in range(blocks):
        block = i32(blocks - i32(1) - i32(turn))
        first = i32(begin + block * i32(BLOCK))
        count = min(i32(end - first), i32(BLOCK))
        q_tile, k_tile, do_tile = stage, stage + i32(TILE), stage + i32(2 * TILE)
        wait_for_copies()
        cuda.syncthreads()
        stage = base + i32(STAGE) if stage == base else base
        if block > 0:
            before = i32(first - i32(BLOCK))
            start_copies(stage, dout, tokens, before, i32(BLOCK), head, key_head, column, thread)
        publish(dstate, base, warp, lane)
        if warp == 0:
            add_log_decays(tokens.log_decay, first, count, head, raw, sums, lane)
        cuda.syncthreads()
        if thread < BLOCK:
            since[thread] = decay_between(sums[thread], ZERO)
            later[thread] = decay_between(sums[BLOCK - 1], sums[thread])
            beta[thread] = tokens.beta[first + thread, head] if thread < count else ZERO
        make_weights(base, k_tile, q_tile, sums, warp, lane)
        cuda.syncthreads()
        convert_keys(q_tile, thread)
        convert_keys(k_tile, thread)
        scale_rows(base, do_tile, since, thread)
        cuda.syncthreads()
        begin_rows(acc, base, k_tile, do_tile, later, warp, lane)
        for step in range(BLOCK // SUB_BLOCK):
            if warp == i32(BLOCK // SUB_BLOCK - 1) - i32(step):
                solve(acc, base, beta, since, warp, lane)
            cuda.syncthreads()
        index = i32(begin // i32(BLOCK)) + b + block
        store_block(base, dv, dstates, first, count, index, head, column, thread)
        for i in range(SUB_BLOCK):
            t, total = i32(warp * i32(16)) + i32(i), ZERO
            if t < count:
                left, right = load_pair(base + i32(Z) + t * i32(Z_PITCH) + lane * i32(8))
                place = column + 2 * lane
                total = cuda.fma(left, widen(errors[first + t, head, place]), total)
                total = cuda.fma(right, widen(errors[first + t, head, place + 1]), total)
            total = warp_sum(total)
            if lane == 0 and t < count:
                dbeta_parts[part, first + t, head] = total
        update(dstate, base, k_tile, q_tile, since[BLOCK - 1], warp, lane)


def is_supported(element):
    """Whether the gradient of a model of a dtype, by its name, has bfloat16's precision, and the GPU the shared memory.

    Gradients of a float16 model are more precise than these operands: simt_backward.py computes them.
    """
    nbytes = max(SHARED_BYTES, BLOCK_SHARED_BYTES) + STATIC_BYTES
    return element == "bfloat16" and nbytes <= device.max_shared_bytes()


def delta_rule_backward(family, dout, tokens, cu_seqlens, gradients):
    """The operator delta_rule_backward, with the forward of a family; the operator has checked the arguments."""
    backward_of_blocks(dout, tokens, cu_seqlens, forward_of_blocks(family, tokens, cu_seqlens), gradients)


def backward_of_blocks(dout, tokens, cu_seqlens, values, gradients):
    """delta_rule_backward with the BlockValues of the forward, bfloat16."""
    rows, heads, _ = dout.shape
    empty, sequences, operand, dv = device.xp().empty, len(cu_seqlens) - 1, values.rows.dtype, gradients.v
    dstates, dbeta_parts = empty(values.states.shape, operand), empty((DIM // COLUMNS, rows, heads), np.float32)
    arguments = dout, tokens, cu_seqlens, values.errors, dv, dstates, dbeta_parts
    grid = DIM // COLUMNS, heads, sequences
    launch(delta_rule_state_backward_kernel, grid, THREADS, *arguments, shared=SHARED_BYTES)
    bounds, keys = block_bounds(cu_seqlens, len(dstates)), (gradients.q, gradients.k)
    by_head = keys
    if heads != tokens.k.shape[1]:
        by_head = [empty((rows, heads, DIM), np.float32) for _ in keys]
    delta_rule_block_gradient(dout, tokens, bounds, values, dv, dstates, by_head, gradients.log_decay)
    if by_head is not keys:
        for parts, out in zip(by_head, keys, strict=True):
            add_parts(parts.reshape(-1, heads // out.shape[1], DIM), out.reshape(-1, DIM))
    add_parts(dbeta_parts.reshape(1, len(dbeta_parts), -1), gradients.beta.reshape(1, -1))
