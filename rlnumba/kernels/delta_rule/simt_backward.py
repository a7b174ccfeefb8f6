"""The gradient of the gated delta rule without tensor cores; the equations are those of ops.py.

Three kernels. The first goes through the blocks of a sequence from the last to the first, columns of V on their own:
dv, dbeta, and dS at each block. The second has all blocks at once, a value head each: dlog_decay, and dq and dk of each
value head. The third adds those of a key head's value heads.
"""

import numpy as np

from rlnumba.kernels.delta_rule.arithmetic import BLOCK
from rlnumba.kernels.delta_rule.simt import COLUMNS, STRIDE, decay_between, dot_product, forward_of_blocks
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.ptx.warp import block_sum, device_function, narrow, warp_sum, widen
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

# Threads of the second kernel, and their warps; floats from one row of weights to the next in its shared memory.
THREADS, WARPS, WEIGHT_STRIDE = 128, 4, BLOCK + 1
SUM_THREADS = 256


@device_function
def load_sums(log_decay, first, count, head, sums):
    """sums[:count] = G of a block's tokens, by one thread."""
    total = np.float32(0.0)
    for i in range(count):
        total += log_decay[first + i, head]
        sums[i] = total


@specialize
def delta_rule_state_gradient_kernel(key_dim):
    """The first kernel, for heads of key_dim."""
    state_size, rows_size, zero = key_dim * STRIDE, BLOCK * STRIDE, np.float32(0.0)

    @cuda.jit
    def delta_rule_state_gradient_kernel(dout, tokens, cu_seqlens, errors, dv, dstates, dbeta_parts):
        """A block of threads: (sequence, value head, columns); dbeta_parts (column blocks, N, HV)."""
        dstate, drows = cuda.shared.array(state_size, np.float32), cuda.shared.array(rows_size, np.float32)
        sums, m, p = (
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
        )
        q, k = tokens.q, tokens.k
        b, head, part, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, cuda.threadIdx.x
        lane, warp = thread % COLUMNS, thread // COLUMNS
        column = part * COLUMNS + lane
        owned, key_head = column < dout.shape[2], head // (dout.shape[1] // k.shape[1])
        begin, end = cu_seqlens[b], cu_seqlens[b + 1]
        for e in range(warp, key_dim, 2):
            dstate[e * STRIDE + lane] = zero
        for block in range((end - begin - 1) // BLOCK, -1, -1):
            first = begin + block * BLOCK
            count = min(BLOCK, end - first)
            cuda.syncthreads()
            if thread == 0:
                load_sums(tokens.log_decay, first, count, head, sums)
            if owned:
                for e in range(warp, key_dim, 2):
                    dstates[begin // BLOCK + b + block, head, e, column] = dstate[e * STRIDE + lane]
            cuda.syncthreads()
            for i in range(count - 1, -1, -1):
                t = first + i
                if i <= thread < count:
                    decay = decay_between(sums[thread], sums[i])
                    m[thread] = decay * dot_product(k[first + thread, key_head], k[t, key_head], key_dim)
                    p[thread] = decay * dot_product(q[first + thread, key_head], k[t, key_head], key_dim)
                cuda.syncthreads()
                if warp == 0:
                    value = zero
                    for e in range(key_dim):
                        value = cuda.fma(widen(k[t, key_head, e]), dstate[e * STRIDE + lane], value)
                    value = value * decay_between(sums[count - 1], sums[i])
                    if owned:
                        for s in range(i, count):
                            value = cuda.fma(p[s], widen(dout[first + s, head, column]), value)
                    for s in range(i + 1, count):
                        value = cuda.fma(-m[s], drows[s * STRIDE + lane], value)
                    row = tokens.beta[t, head] * value
                    drows[i * STRIDE + lane] = row
                    total = warp_sum(value * errors[t, head, column] if owned else zero)
                    if owned:
                        dv[t, head, column] = row
                    if lane == 0:
                        dbeta_parts[part, t, head] = total
                cuda.syncthreads()
            kept = decay_between(sums[count - 1], zero)
            for e in range(warp, key_dim, 2):
                value = dstate[e * STRIDE + lane] * kept
                if owned:
                    for i in range(count):
                        since = decay_between(sums[i], zero)
                        query = since * widen(q[first + i, key_head, e])
                        key = since * widen(k[first + i, key_head, e])
                        value = cuda.fma(query, widen(dout[first + i, head, column]), value)
                        value = cuda.fma(-key, drows[i * STRIDE + lane], value)
                dstate[e * STRIDE + lane] = value

    return delta_rule_state_gradient_kernel


@specialize
def delta_rule_gradient_kernel(key_dim):
    """The second kernel, for heads of key_dim."""
    weights_size, zero = BLOCK * WEIGHT_STRIDE, np.float32(0.0)

    @cuda.jit
    def delta_rule_gradient_kernel(dout, tokens, block_bounds, values, dv, dstates, dq, dk, dlog_decay):
        """A block of threads: (block, value head). block_bounds (blocks, 2); dq, dk (N, HV, K) float32."""
        # D dP in the lower triangle with its diagonal; D dM, transposed, in the upper; and W.
        weights, crossing = cuda.shared.array(weights_size, np.float32), cuda.shared.array(weights_size, np.float32)
        sums, of_row, of_column = (
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
            cuda.shared.array(BLOCK, np.float32),
        )
        scratch = cuda.shared.array(WARPS, np.float32)
        q, k = tokens.q, tokens.k
        block, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        first, count, value_dim = block_bounds[block, 0], block_bounds[block, 1], dout.shape[2]
        key_head = head // (dout.shape[1] // k.shape[1])
        if count == 0:
            return
        if thread == 0:
            load_sums(tokens.log_decay, first, count, head, sums)
        cuda.syncthreads()
        for pair in range(thread, count * count, THREADS):
            i, j = pair // count, pair % count
            if j <= i:
                decay = decay_between(sums[i], sums[j])
                output, error = zero, zero
                for c in range(value_dim):
                    row = values.rows[first + j, head, c]
                    output = cuda.fma(widen(dout[first + i, head, c]), row, output)
                    error = cuda.fma(-dv[first + i, head, c], row, error)
                output, error = output * decay, error * decay
                weights[i * WEIGHT_STRIDE + j] = output
                total = output * dot_product(q[first + i, key_head], k[first + j, key_head], key_dim)
                if j < i:
                    weights[j * WEIGHT_STRIDE + i] = error
                    total = cuda.fma(error, dot_product(k[first + i, key_head], k[first + j, key_head], key_dim), total)
                crossing[i * WEIGHT_STRIDE + j] = total
        kept = zero
        for i in range(thread, key_dim * value_dim, THREADS):
            e, c = i // value_dim, i % value_dim
            kept = cuda.fma(values.states[block, head, e, c], dstates[block, head, e, c], kept)
        kept = block_sum(kept, scratch) * decay_between(sums[count - 1], zero)
        for i in range(count):
            since, later = decay_between(sums[i], zero), decay_between(sums[count - 1], sums[i])
            row_total, column_total = zero, zero
            for e in range(thread, key_dim, THREADS):
                of_q, of_k, of_fold = zero, zero, zero
                for c in range(value_dim):
                    state = values.states[block, head, e, c]
                    of_q = cuda.fma(widen(dout[first + i, head, c]), state, of_q)
                    of_k = cuda.fma(-dv[first + i, head, c], state, of_k)
                    of_fold = cuda.fma(values.rows[first + i, head, c], dstates[block, head, e, c], of_fold)
                of_q, of_k, of_fold = of_q * since, of_k * since, of_fold * later
                query, key = widen(q[first + i, key_head, e]), widen(k[first + i, key_head, e])
                row_total += query * of_q + key * of_k
                column_total += key * of_fold
                of_k += of_fold
                for j in range(count):
                    other_key, other_query = widen(k[first + j, key_head, e]), widen(q[first + j, key_head, e])
                    if j <= i:
                        of_q = cuda.fma(weights[i * WEIGHT_STRIDE + j], other_key, of_q)
                    if j >= i:
                        of_k = cuda.fma(weights[j * WEIGHT_STRIDE + i], other_query, of_k)
                    if j != i:
                        error = weights[min(i, j) * WEIGHT_STRIDE + max(i, j)]
                        of_k = cuda.fma(error, other_key, of_k)
                dq[first + i, head, e] = of_q
                dk[first + i, head, e] = of_k
            row_total, column_total = block_sum(row_total, scratch), block_sum(column_total, scratch)
            if thread == 0:
                of_row[i] = row_total
                of_column[i] = column_total
        cuda.syncthreads()
        if thread < count:
            total = kept
            for j in range(thread):
                total += of_column[j]
            for i in range(count - 1, thread - 1, -1):
                total += of_row[i]
            for i in range(thread, count):
                for j in range(thread):
                    total += crossing[i * WEIGHT_STRIDE + j]
            dlog_decay[first + thread, head] = total

    return delta_rule_gradient_kernel


@cuda.jit
def add_parts_kernel(parts, out):
    """out (A, C) = the sums over p, ascending, of parts (A, P, C) float32; a thread an element."""
    index = cuda.grid(1)
    if index < out.size:
        row, column = index // out.shape[1], index % out.shape[1]
        total = parts[row, 0, column]
        for part in range(1, parts.shape[1]):
            total += parts[row, part, column]
        out[row, column] = narrow(total, out)


@cuda.jit
def block_bounds_kernel(cu_seqlens, block_bounds):
    """block_bounds[i] = (first token, tokens) of the blocks of a sequence, and 0 tokens of the entries between."""
    b = cuda.grid(1)
    if b < cu_seqlens.shape[0] - 1:
        begin, end = cu_seqlens[b], cu_seqlens[b + 1]
        following = end // BLOCK + b + 1
        for i in range(begin // BLOCK + b, following):
            first = begin + (i - begin // BLOCK - b) * BLOCK
            block_bounds[i, 0] = first
            block_bounds[i, 1] = max(min(BLOCK, end - first), 0)


def delta_rule_backward(dout, tokens, cu_seqlens, gradients):
    """The operator delta_rule_backward; the operator has checked the arguments."""
    rows, heads, value_dim = dout.shape
    key_dim, sequences, parts = tokens.k.shape[2], len(cu_seqlens) - 1, -(-value_dim // COLUMNS)
    values, empty = forward_of_blocks(tokens, cu_seqlens), device.xp().empty
    dv = gradients.v if gradients.v.dtype == np.float32 else empty(dout.shape, np.float32)
    dstates = empty(values.states.shape, np.float32)
    dbeta_parts, bounds = empty((parts, rows, heads), np.float32), block_bounds(cu_seqlens, len(values.states))
    arguments = dout, tokens, cu_seqlens, values.errors, dv, dstates, dbeta_parts
    launch(delta_rule_state_gradient_kernel(key_dim), (sequences, heads, parts), BLOCK, *arguments)
    by_head = [empty((rows, heads, key_dim), np.float32) for _ in range(2)]
    arguments = dout, tokens, bounds, values, dv, dstates, *by_head, gradients.log_decay
    launch(delta_rule_gradient_kernel(key_dim), (len(bounds), heads), THREADS, *arguments)
    for by_value_head, out in zip(by_head, (gradients.q, gradients.k), strict=True):
        add_parts(by_value_head.reshape(-1, heads // out.shape[1], key_dim), out.reshape(-1, key_dim))
    add_parts(dbeta_parts.reshape(1, parts, -1), gradients.beta.reshape(1, -1))
    if dv is not gradients.v:
        cast(dv, gradients.v)


def block_bounds(cu_seqlens, blocks):
    """(blocks, 2): what block_bounds_kernel writes."""
    bounds = device.xp().empty((blocks, 2), np.int32)
    launch(block_bounds_kernel, -(-(len(cu_seqlens) - 1) // SUM_THREADS), SUM_THREADS, cu_seqlens, bounds)
    return bounds


def add_parts(parts, out):
    """add_parts_kernel."""
    launch(add_parts_kernel, -(-out.size // SUM_THREADS), SUM_THREADS, parts, out)
