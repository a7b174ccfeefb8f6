"""The kernel ahead of the chains of tensor_chains.py: of all blocks at once, X and P, a value head each.

X = (I + M B)^-1 M, where B has beta on its diagonal, stands for the substitution of a block's rows, both ways:

    r = r' - X B r'        where r' = v - E S^T k, all 64 tokens at once
    z = x - X^T B x        where x = P^T do + F k dS

It lies strictly below the diagonal, as M does, and no element is larger than 1: it is what the correction of a token
leaves of a value by the time of another. It is computed in float32, a column in each thread, its rows in ascending
order. P and X are operands, float16 and bounded; X, transposed, lies above the diagonal of P.
"""

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK, SUB_BLOCK
from rlnumba.kernels.delta_rule.simt import decay_between
from rlnumba.kernels.delta_rule.tensor_products import opaque
from rlnumba.kernels.delta_rule.tensor_tiles import (
    CHUNK,
    DIM,
    PITCH,
    ZERO,
    add_log_decays,
    copy_function,
    multiply_keys_function,
)
from rlnumba.kernels.ptx import sm80
from rlnumba.kernels.ptx.instruction import address_of
from rlnumba.kernels.ptx.shared_memory import (
    load_four,
    load_function,
    load_word,
    shared_address,
    store_function,
    store_pair,
    store_word,
)
from rlnumba.kernels.ptx.warp import cvt_pack, device_function
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch

i32, f32 = np.int32, np.float32

THREADS = 128
# Vectors of a block and head that are written for the kernels that follow: G, E, F, beta.
VECTORS = 4
# Shared memory in bytes: k and q, where later lie M, whose rows X replaces, and M B, transposed, in float32; P and X.
LINE, TILE, WEIGHT_PITCH = PITCH, BLOCK * PITCH, 2 * BLOCK + CHUNK
K, Q, WEIGHTS = 0, TILE, 2 * TILE
ROWS, SCALED = K, Q
SHARED_BYTES = WEIGHTS + BLOCK * WEIGHT_PITCH

pack = cvt_pack("float16")
load_float, store_float = load_function("f"), store_function("f")


@device_function
def store_outputs(of_queries, base, sums, warp, lane):
    """P of a warp's 16 rows, to shared memory; of_queries: q k^T, then P."""
    for half in range(2):
        t = i32(i32(warp * i32(16)) + (lane >> i32(2)) + i32(8 * half))
        total = sums[t]
        for n in range(8):
            j, at = i32(i32(8 * n) + ((lane & i32(3)) << i32(1))), 4 * n + 2 * half
            for i in range(2):
                decay = decay_between(total, sums[j + i]) if j + i <= t else ZERO
                of_queries[at + i] = decay * of_queries[at + i] if j + i <= t else ZERO
            word = pack(of_queries[at], of_queries[at + 1])
            store_word(base + i32(WEIGHTS) + t * i32(WEIGHT_PITCH) + j * i32(2), word)


@device_function
def store_errors(of_keys, base, sums, beta, warp, lane):
    """M of a warp's 16 rows, and M B transposed, to shared memory, where k and q were; of_keys: k k^T, then M."""
    for half in range(2):
        t = i32(i32(warp * i32(16)) + (lane >> i32(2)) + i32(8 * half))
        total = sums[t]
        for n in range(8):
            j, at = i32(i32(8 * n) + ((lane & i32(3)) << i32(1))), 4 * n + 2 * half
            for i in range(2):
                decay = decay_between(total, sums[j + i]) if j + i < t else ZERO
                of_keys[at + i] = decay * of_keys[at + i] if j + i < t else ZERO
                place = base + i32(SCALED) + i32(j + i32(i)) * i32(LINE) + t * i32(4)
                store_float(place, beta[j + i] * of_keys[at + i])
            store_pair(base + i32(ROWS) + t * i32(LINE) + j * i32(4), of_keys[at], of_keys[at + 1])


@device_function
def solve_column(base, column, start):
    """X of a column in place of M, from row `start` on, before which its warp has zeros."""
    acc, m = cuda.local.array(SUB_BLOCK, np.float32), cuda.local.array(SUB_BLOCK, np.float32)
    rows = base + i32(ROWS) + column * i32(4)
    first = start
    while first < BLOCK:
        scaled = base + i32(SCALED) + first * i32(4)
        for i in range(SUB_BLOCK):
            acc[i] = load_float(rows + i32(first + i32(i)) * i32(LINE))
        j = start
        while j < first:
            value = load_float(rows + j * i32(LINE))
            for four in range(SUB_BLOCK // 4):
                at, place = 4 * four, scaled + j * i32(LINE) + i32(16 * four)
                m[at], m[at + 1], m[at + 2], m[at + 3] = load_four(place)
            for i in range(SUB_BLOCK):
                acc[i] = cuda.fma(-m[i], value, acc[i])
            j = i32(j + i32(1))
        for i in range(SUB_BLOCK):
            value, line = acc[i], i32(first + i32(i)) * i32(LINE)
            for four in range(SUB_BLOCK // 4):
                at, place = 4 * four, scaled + line + i32(16 * four)
                m[at], m[at + 1], m[at + 2], m[at + 3] = load_four(place)
            for other in range(SUB_BLOCK):
                if other > i:
                    acc[other] = cuda.fma(-m[other], value, acc[other])
            store_float(rows + line, value)
        place = base + i32(WEIGHTS) + column * i32(WEIGHT_PITCH) + first * i32(2)
        for i in range(SUB_BLOCK // 2):
            # Of two numbers in one place one is +0: P's above the diagonal, or X's on it and below.
            word = pack(acc[2 * i], acc[2 * i + 1])
            store_word(place + 4 * i, word | load_word(place + 4 * i))
        first = i32(first + i32(SUB_BLOCK))


copy_tile, multiply_keys = copy_function(DIM, THREADS), multiply_keys_function(BLOCK)
wait_for_copies = sm80.cp_async_wait_group(0)


# P is made before M, so that five blocks of threads have registers enough on an SM.
@cuda.jit(launch_bounds=(THREADS, 5))
def delta_rule_inverse_kernel(tokens, bounds, vectors, weights):
    """A block of threads: (value head, block of tokens).

    vectors (blocks HV VECTORS, BLOCK) float32: G, E, F, beta; weights (blocks, HV, BLOCK, BLOCK) float16: P and X.
    """
    raw, sums = cuda.shared.array(BLOCK, np.float32), cuda.shared.array(BLOCK, np.float32)
    beta = cuda.shared.array(BLOCK, np.float32)
    shared = shared_address(cuda.shared.array(0, np.uint8))
    acc = cuda.local.array(32, np.float32)
    base, thread = shared, i32(cuda.threadIdx.x) & i32(THREADS - 1)
    lane, warp = thread & i32(31), thread >> i32(5)
    head, block = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y)
    heads, key_heads = i32(tokens.v.shape[1]), i32(tokens.k.shape[1])
    first, count = i32(bounds[block, 0]), i32(bounds[block, 1])
    if count == 0:
        return
    offset = (np.int64(first) * key_heads + head // i32(heads // key_heads)) * (2 * DIM)
    copy_tile(base + i32(K), address_of(tokens.k) + offset, key_heads * i32(2 * DIM), count, thread)
    copy_tile(base + i32(Q), address_of(tokens.q) + offset, key_heads * i32(2 * DIM), count, thread)
    sm80.cp_async_commit_group()
    if warp == 0:
        add_log_decays(tokens.log_decay, first, count, head, raw, sums, lane)
    if thread < BLOCK:
        beta[thread] = tokens.beta[first + thread, head] if thread < count else ZERO
    wait_for_copies()
    cuda.syncthreads()
    # Addresses that these steps have in common would be kept, in too many registers.
    multiply_keys(acc, base, Q, K, i32(warp * i32(16)), i32(0), lane)
    base, thread = opaque(shared), opaque(thread)
    lane, warp = thread & i32(31), thread >> i32(5)
    store_outputs(acc, base, sums, warp, lane)
    base, lane = opaque(shared), opaque(lane)
    multiply_keys(acc, base, K, K, i32(warp * i32(16)), i32(0), lane)
    cuda.syncthreads()
    base, lane = opaque(shared), opaque(lane)
    store_errors(acc, base, sums, beta, warp, lane)
    cuda.syncthreads()
    if warp < 2:
        solve_column(base, thread, i32(warp * i32(32)))
    else:
        t, place = i32(thread - i32(64)), (np.int64(block) * heads + head) * VECTORS
        vectors[place, t] = sums[t]
        vectors[place + 1, t] = decay_between(sums[t], ZERO)
        vectors[place + 2, t] = decay_between(sums[BLOCK - 1], sums[t])
        vectors[place + 3, t] = beta[t]
    cuda.syncthreads()
    offset = (np.int64(block) * heads + head) * (2 * BLOCK * BLOCK)
    for i in range(BLOCK * BLOCK // 8 // THREADS):
        chunk = i32(thread + i32(THREADS * i))
        source = base + i32(WEIGHTS) + (chunk >> i32(3)) * i32(WEIGHT_PITCH) + (chunk & i32(7)) * i32(CHUNK)
        sm80.copy_to_global(address_of(weights) + offset + chunk * i32(CHUNK), source)


def delta_rule_inverse(tokens, bounds, vectors, weights):
    """Launch the kernel."""
    grid = tokens.v.shape[1], len(bounds)
    launch(delta_rule_inverse_kernel, grid, THREADS, tokens, bounds, vectors, weights, shared=SHARED_BYTES)
