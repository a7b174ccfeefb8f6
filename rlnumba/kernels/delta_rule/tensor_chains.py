"""The chains of the gated delta rule's gradient, by mma.sync: S of all blocks, forwards, and dS, backwards.

ops.py has the equations, and tensor_inverse.py computes what does not need a state. With its X and P a block takes two
products with the state, and between them one by X:

    r = r' - X B r',   r' = v - E S^T k                     S = E_last S + k^T F B r
    z = x - X^T B x,   x = P^T do + F k dS                  dS = E_last dS + q^T E do - k^T E B z

A warp goes along a chain on its own, for 16 columns of V: it has S^T or dS^T in the accumulators, whose pairs are
operands, and r^T or z^T the same way, so that nothing goes through shared memory but tiles of tokens. Both chains are
in one launch, so that one long sequence occupies twice the multiprocessors. S, r and the products are float16 in the
forward chain, times VALUE_SCALE, and bfloat16 in the other one, whose gradients need the range.

With prefixes S goes from a sequence to its children, and the sum of their dS back to it, in float32.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import (
    BLOCK,
    VALUE_SCALE,
    PlainSequences,
    has_children,
    level_of,
    next_child,
)
from rlnumba.kernels.delta_rule.tensor_inverse import VECTORS
from rlnumba.kernels.delta_rule.tensor_products import pack_operands
from rlnumba.kernels.delta_rule.tensor_tiles import (
    COLUMNS,
    COLUMNS_PITCH,
    DIM,
    PITCH,
    ZERO,
    convert_function,
    copy_function,
    fragment_functions,
    store_rows,
)
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import load_pair, shared_address
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, i64, f32 = np.int32, np.int64, np.float32

THREADS = 128
# Shared memory in bytes, of each of two stages: k, q, P and X, v or do; then G, E, F and beta.
TILE, COLUMN_TILE = BLOCK * PITCH, BLOCK * COLUMNS_PITCH
K, Q, WEIGHTS, VALUES = 0, TILE, 2 * TILE, 2 * TILE + COLUMN_TILE
OF_TOKENS = VALUES + COLUMN_TILE
SINCE, LATER, BETA = (OF_TOKENS + 4 * BLOCK * i for i in (1, 2, 3))
LAST, STAGE = LATER - 8, OF_TOKENS + VECTORS * 4 * BLOCK
SHARED_BYTES = 2 * STAGE
UNSCALED = f32(1.0) / VALUE_SCALE
# Rows of a warp: V's columns.
ALL_ROWS = i32(16)
# Numbers of a state in a thread.
STATE_COUNT = DIM // 2
LOW_HALF, HIGH_HALF = i32(0xFFFF), i32(-0x10000)

pack, unpack = cvt_pack("bfloat16"), cvt_unpack("bfloat16")


class ChainValues(NamedTuple):
    """The chains' results, bfloat16: S ahead of each block and dS behind it, and of each block r and z, transposed.

    states, dstates (blocks, HV, V, K); errors, z (blocks, HV, V, BLOCK).
    """

    states: object
    errors: object
    dstates: object
    z: object


class ChainPrefixes(NamedTuple):
    """Packed sequences with prefixes, and what their chains leave for each other: cu_seqlens (B + 1,), parents (B,).

    level, backward_level: of the sequences whose chain is computed, forwards and backwards. last_states,
    first_gradients (B, HV, V K / THREADS, THREADS) float32: the accumulators of S behind a
    sequence with children, and of dS ahead of a child.
    """

    cu_seqlens: object
    parents: object
    level: int
    backward_level: int
    last_states: object
    first_gradients: object


@device_function
def keep(first, second):
    """The mask of a word's two numbers, for those that are kept."""
    return i32((LOW_HALF if first else i32(0)) | (HIGH_HALF if second else i32(0)))


@device_function
def make_mask(mask, ahead, lane):
    """The words of a mask for a fragment of B on the diagonal: k - n >= ahead."""
    for i in range(4):
        k = i32((lane & i32(3)) << i32(1)) + i32(8 * (i & 1))
        n = i32(lane >> i32(2)) + i32(8 * (i >> 1))
        mask[i] = keep(i32(k - n) >= ahead, i32(k - n) + i32(1) >= ahead)


@device_function
def apply_mask(b, mask):
    for i in range(4):
        b[i] = b[i] & mask[i]


@functools.cache
def forward_function():
    """The device function of a block in the forward chain."""
    _, _, load_keys, load_keys_trans = fragment_functions(PITCH)
    _, load_values, _, load_weights_trans = fragment_functions(COLUMNS_PITCH)
    multiply = sm80.mma("float16")

    @device_function
    def save(values, first, address, row_bytes, lane):
        """16 rows and 32 columns of float32, from `first` on, as bfloat16."""
        words = cuda.local.array(8, np.int32)
        for i in range(8):
            words[i] = pack(values[first + 2 * i] * UNSCALED, values[first + 2 * i + 1] * UNSCALED)
        store_rows(words, address, row_bytes, ALL_ROWS, lane)

    @device_function
    def forward_block(state, stage, state_rows, error_rows, warp, lane):
        """S ahead of the block and r are written to the addresses of the warp's first row; state becomes the next."""
        acc, a = cuda.local.array(32, np.float32), cuda.local.array(16, np.int32)
        b, mask = cuda.local.array(4, np.int32), cuda.local.array(4, np.int32)
        words = cuda.local.array(4, np.int32)
        pair = i32((lane & i32(3)) << i32(3))
        # Of a word X_tj the token j is k, and t > j.
        make_mask(mask, i32(0), lane)
        for i in range(4):
            mask[i] = ~mask[i]
        for i in range(4):
            save(state, 16 * i, state_rows + 64 * i, i64(2 * DIM), lane)
        for i in range(32):
            acc[i] = ZERO
        for step in range(DIM // 16):
            for i in range(4):
                words[i] = pack_operands(state[8 * step + 2 * i], state[8 * step + 2 * i + 1])
            for n in range(4):
                load_keys(b, stage + i32(K), i32(n * 16), i32(step * 16), lane)
                multiply(acc, 8 * n, words, 0, b, 0)
        for n in range(4):
            load_values(words, stage + i32(VALUES), i32(n * 16), i32(warp * i32(16)), lane)
            for i in range(4):
                place, at = stage + pair + i32(64 * n + i // 2 * 32), 8 * n + 2 * i
                since, next_since = load_pair(place + i32(SINCE))
                beta, next_beta = load_pair(place + i32(BETA))
                left, right = unpack(words[i])
                acc[at] = cuda.fma(-since, acc[at], left * VALUE_SCALE)
                acc[at + 1] = cuda.fma(-next_since, acc[at + 1], right * VALUE_SCALE)
                a[4 * n + i] = pack_operands(-beta * acc[at], -next_beta * acc[at + 1])
        for n in range(4):
            for step in range(4):
                if step <= n:
                    load_weights_trans(b, stage + i32(WEIGHTS), i32(step * 16), i32(n * 16), lane)
                    if step == n:
                        apply_mask(b, mask)
                    multiply(acc, 8 * n, a, 4 * step, b, 0)
        for i in range(2):
            save(acc, 16 * i, error_rows + 64 * i, i64(2 * BLOCK), lane)
        for n in range(4):
            for i in range(4):
                place, at = stage + pair + i32(64 * n + i // 2 * 32), 8 * n + 2 * i
                later, next_later = load_pair(place + i32(LATER))
                beta, next_beta = load_pair(place + i32(BETA))
                a[4 * n + i] = pack_operands(later * (beta * acc[at]), next_later * (next_beta * acc[at + 1]))
        _, kept = load_pair(stage + i32(LAST))
        for i in range(STATE_COUNT):
            state[i] = kept * state[i]
        for step in range(4):
            for n in range(DIM // 16):
                load_keys_trans(b, stage + i32(K), i32(step * 16), i32(n * 16), lane)
                multiply(state, 8 * n, a, 4 * step, b, 0)

    return forward_block


@functools.cache
def backward_function():
    """The device function of a block in the backward chain."""
    _, _, load_keys, load_keys_trans = fragment_functions(PITCH)
    _, load_values, load_weights, load_weights_trans = fragment_functions(COLUMNS_PITCH)
    multiply = sm80.mma("bfloat16")

    @device_function
    def read_state(acc, dstate, stage, state_rows, lane):
        """acc = (k dS)^T; dS is written."""
        words, b = cuda.local.array(8, np.int32), cuda.local.array(4, np.int32)
        for i in range(32):
            acc[i] = ZERO
        for two in range(DIM // 32):
            for i in range(8):
                words[i] = pack(dstate[16 * two + 2 * i], dstate[16 * two + 2 * i + 1])
            for half in range(2):
                for n in range(4):
                    load_keys(b, stage + i32(K), i32(n * 16), i32(two * 32 + half * 16), lane)
                    multiply(acc, 8 * n, words, 4 * half, b, 0)
            store_rows(words, state_rows + 64 * two, i64(2 * DIM), ALL_ROWS, lane)

    @device_function
    def backward_block(dstate, stage, state_rows, z_rows, warp, lane):
        """dS after the block and z are written to the addresses of the warp's first row; dstate becomes the next."""
        acc, a = cuda.local.array(32, np.float32), cuda.local.array(16, np.int32)
        b, words = cuda.local.array(4, np.int32), cuda.local.array(8, np.int32)
        douts, mask = cuda.local.array(16, np.int32), cuda.local.array(4, np.int32)
        pair = i32((lane & i32(3)) << i32(3))
        read_state(acc, dstate, stage, state_rows, lane)
        for n in range(4):
            load_values(b, stage + i32(VALUES), i32(n * 16), i32(warp * i32(16)), lane)
            for i in range(4):
                at = 8 * n + 2 * i
                later, next_later = load_pair(stage + pair + i32(LATER + 64 * n + i // 2 * 32))
                acc[at], acc[at + 1] = later * acc[at], next_later * acc[at + 1]
                douts[4 * n + i] = b[i]
        make_mask(mask, i32(0), lane)
        for n in range(4):
            for step in range(4):
                if step >= n:
                    load_weights_trans(b, stage + i32(WEIGHTS), i32(step * 16), i32(n * 16), lane)
                    if step == n:
                        apply_mask(b, mask)
                    multiply(acc, 8 * n, douts, 4 * step, b, 0)
        for n in range(4):
            for i in range(4):
                at = 8 * n + 2 * i
                beta, next_beta = load_pair(stage + pair + i32(BETA + 64 * n + i // 2 * 32))
                a[4 * n + i] = pack(-beta * acc[at], -next_beta * acc[at + 1])
        make_mask(mask, i32(1), lane)
        for n in range(4):
            for step in range(4):
                if step >= n:
                    load_weights(b, stage + i32(WEIGHTS), i32(n * 16), i32(step * 16), lane)
                    if step == n:
                        apply_mask(b, mask)
                    multiply(acc, 8 * n, a, 4 * step, b, 0)
        for two in range(2):
            for i in range(8):
                words[i] = pack(acc[16 * two + 2 * i], acc[16 * two + 2 * i + 1])
            store_rows(words, z_rows + 64 * two, i64(2 * BLOCK), ALL_ROWS, lane)
        for n in range(4):
            for i in range(4):
                place, at = stage + pair + i32(64 * n + i // 2 * 32), 8 * n + 2 * i
                since, next_since = load_pair(place + i32(SINCE))
                beta, next_beta = load_pair(place + i32(BETA))
                left, right = unpack(douts[4 * n + i])
                douts[4 * n + i] = pack(since * left, next_since * right)
                a[4 * n + i] = pack(-since * (beta * acc[at]), -next_since * (next_beta * acc[at + 1]))
        _, kept = load_pair(stage + i32(LAST))
        for i in range(STATE_COUNT):
            dstate[i] = kept * dstate[i]
        for step in range(4):
            for n in range(DIM // 16):
                load_keys_trans(b, stage + i32(Q), i32(step * 16), i32(n * 16), lane)
                multiply(dstate, 8 * n, douts, 4 * step, b, 0)
                load_keys_trans(b, stage + i32(K), i32(step * 16), i32(n * 16), lane)
                multiply(dstate, 8 * n, a, 4 * step, b, 0)

    return backward_block


copy_keys, copy_columns = copy_function(DIM, THREADS), copy_function(COLUMNS, THREADS)
convert_keys, convert_columns = convert_function(DIM, THREADS), convert_function(COLUMNS, THREADS)
forward_block, backward_block = forward_function(), backward_function()
wait_for_copies = sm80.cp_async_wait_group(0)


@device_function
def start_copies(stage, tokens, values, vectors, weights, where, is_backward, thread):
    """Start the copies of a block's tiles; values: v or dout, of which the grid's block has COLUMNS columns."""
    first, count, index, head, key_head, column = where
    heads, key_heads = i32(values.shape[1]), i32(tokens.k.shape[1])
    offset = (i64(first) * key_heads + key_head) * (2 * DIM)
    copy_keys(stage + i32(K), address_of(tokens.k) + offset, key_heads * i32(2 * DIM), count, thread)
    if is_backward:
        copy_keys(stage + i32(Q), address_of(tokens.q) + offset, key_heads * i32(2 * DIM), count, thread)
    offset = (i64(first) * heads + head) * (2 * DIM) + column * 2
    copy_columns(stage + i32(VALUES), address_of(values) + offset, heads * i32(2 * DIM), count, thread)
    at = i64(index) * heads + head
    offset = at * (2 * BLOCK * BLOCK)
    copy_columns(stage + i32(WEIGHTS), address_of(weights) + offset, i32(2 * BLOCK), i32(BLOCK), thread)
    if thread < VECTORS * BLOCK // 4:
        source = address_of(vectors) + at * (VECTORS * 4 * BLOCK) + thread * i32(16)
        sm80.cp_async_16(stage + i32(OF_TOKENS) + thread * i32(16), source, i32(16))
    sm80.cp_async_commit_group()


@device_function
def begin_chain(state, sequences, b, head, is_backward, thread):
    """state = S behind the parent of sequence b, or the sum of dS ahead of its children, or zeros."""
    part = i32(cuda.blockIdx.x) * i32(STATE_COUNT)
    if is_backward:
        child = next_child(sequences.parents, b, i32(b + i32(1)))
        while child >= 0:
            for i in range(STATE_COUNT):
                state[i] += sequences.first_gradients[child, head, part + i, thread]
            child = next_child(sequences.parents, b, i32(child + i32(1)))
    else:
        parent = sequences.parents[b]
        if parent >= 0:
            for i in range(STATE_COUNT):
                state[i] = sequences.last_states[parent, head, part + i, thread]


@device_function
def end_chain(state, sequences, b, head, is_backward, thread):
    """Leave S for the children of sequence b, or dS for its parent."""
    part = i32(cuda.blockIdx.x) * i32(STATE_COUNT)
    if is_backward:
        if sequences.parents[b] >= 0:
            for i in range(STATE_COUNT):
                sequences.first_gradients[b, head, part + i, thread] = state[i]
    elif has_children(sequences.parents, b):
        for i in range(STATE_COUNT):
            sequences.last_states[b, head, part + i, thread] = state[i]


@specialize
def delta_rule_chains_kernel(has_prefixes):
    """The kernel; has_prefixes: for ChainPrefixes."""

    @cuda.jit(launch_bounds=(THREADS, 2))
    def delta_rule_chains_kernel(dout, tokens, sequences, vectors, weights, values):
        """A block of threads: (columns of V, value head, sequence and direction, which is the parity).

        sequences: PlainSequences or ChainPrefixes; vectors and weights: of delta_rule_inverse; values: ChainValues,
        which are written.
        """
        base = shared_address(cuda.shared.array(0, np.uint8))
        state = cuda.local.array(STATE_COUNT, np.float32)
        thread = i32(cuda.threadIdx.x) & i32(THREADS - 1)
        lane, warp = thread & i32(31), thread >> i32(5)
        column, head, b = i32(cuda.blockIdx.x) * i32(COLUMNS), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z) >> i32(1)
        is_backward = (i32(cuda.blockIdx.z) & i32(1)) == 0
        heads = i32(dout.shape[1])
        key_head = i32(head // i32(heads // i32(tokens.k.shape[1])))
        begin, end = i32(sequences.cu_seqlens[b]), i32(sequences.cu_seqlens[b + 1])
        blocks = i32(i32(end - begin) + i32(BLOCK - 1)) // i32(BLOCK)
        for i in range(STATE_COUNT):
            state[i] = ZERO
        if has_prefixes:
            if level_of(sequences.parents, b) != (sequences.backward_level if is_backward else sequences.level):
                return
            begin_chain(state, sequences, b, head, is_backward, thread)
        stage = base
        # Iteration i starts the copies of block i and computes block i - 1.
        for iteration in range(i32(blocks + i32(1))):
            if iteration > 0:
                wait_for_copies()
                cuda.syncthreads()
            following = stage if iteration == 0 else (base + i32(STAGE) if stage == base else base)
            if iteration < blocks:
                block = i32(blocks - i32(1) - i32(iteration)) if is_backward else i32(iteration)
                first = i32(begin + block * i32(BLOCK))
                where = (
                    first, min(i32(end - first), i32(BLOCK)), i32(begin // i32(BLOCK)) + b + block,
                    head, key_head, column,
                )  # fmt: skip
                if is_backward:
                    start_copies(following, tokens, dout, vectors, weights, where, True, thread)
                else:
                    start_copies(following, tokens, tokens.v, vectors, weights, where, False, thread)
            if iteration > 0:
                block = i32(blocks - i32(iteration)) if is_backward else i32(iteration - i32(1))
                row = (i64(i32(begin // i32(BLOCK)) + b + block) * heads + head) * DIM + column + warp * i32(16)
                if is_backward:
                    convert_keys(stage + i32(K), thread)
                    convert_keys(stage + i32(Q), thread)
                    convert_columns(stage + i32(WEIGHTS), thread)
                    cuda.syncthreads()
                    to, rows = address_of(values.dstates) + row * (2 * DIM), address_of(values.z) + row * (2 * BLOCK)
                    backward_block(state, stage, to, rows, warp, lane)
                else:
                    to, rows = (
                        address_of(values.states) + row * (2 * DIM),
                        address_of(values.errors) + row * (2 * BLOCK),
                    )
                    forward_block(state, stage, to, rows, warp, lane)
            stage = following
        if has_prefixes:
            end_chain(state, sequences, b, head, is_backward, thread)

    return delta_rule_chains_kernel


def delta_rule_chains(dout, tokens, cu_seqlens, prepared, values, prefixes=None):
    """Launch the kernel. prepared: (vectors, weights); values: ChainValues; prefixes: PackedPrefixes or None."""
    sequences = len(cu_seqlens) - 1
    grid, launches = (DIM // COLUMNS, dout.shape[1], 2 * sequences), [PlainSequences(cu_seqlens)]
    if prefixes is not None:
        shape, levels = (sequences, dout.shape[1], DIM * DIM // THREADS, THREADS), prefixes.levels
        carried = [device.xp().empty(shape, np.float32) for _ in range(2)]
        orders = [(np.int32(i), np.int32(levels - 1 - i)) for i in range(levels)]
        launches = [ChainPrefixes(cu_seqlens, prefixes.parents, *order, *carried) for order in orders]
    kernel = delta_rule_chains_kernel(prefixes is not None)
    for each in launches:
        launch(kernel, grid, THREADS, dout, tokens, each, *prepared, values, shared=SHARED_BYTES)
