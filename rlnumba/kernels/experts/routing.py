"""The kernels of the router: softmax, top k, weights and their gradient, and sums over the rows of a batch.

A row of scores is a warp's: lane l has experts l, l + 32, l + 64, ... in registers. A sum over the experts has one
order, whatever else is in the batch: a lane over its experts, ascending, then the lanes by a butterfly. The experts are
chosen by comparing scores, whose order is that of their softmax, so the choice does not depend on an exponential.
"""

import functools
import math

import numpy as np

from rlnumba.kernels.ptx.sm80 import warp_max_unsigned
from rlnumba.kernels.ptx.warp import (
    device_function,
    float_as_int,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    narrow,
    shuffle,
    shuffle_xor,
    warp_max,
    warp_sum,
    widen,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32, u32 = np.int32, np.uint32

# Rows of a block, a warp each.
ROUTER_LINES = 4
# Blocks of the sums over rows: four for each of an H100's 132 SMs. Fixes the order of these sums.
BLOCKS = 528
LOWEST = np.float32(-math.inf)
ZERO = np.float32(0.0)
# The bits of a packed key that have its expert.
INDEX_MASK = 0x1FFF


@device_function
def exponential(score, largest):
    """exp(score - largest): NaN for a NaN, and where both are infinite and equal."""
    return np.float32(math.exp(score - largest))


@device_function
def packed_key(score, expert):
    """A uint32 above 0 in the order of 16-bit scores, which have 19 bits as float32; lower experts before equal ones.

    A NaN is as -inf, and -0 as 0.
    """
    score = score if score > LOWEST else LOWEST
    bits = u32(float_as_int(ZERO if score == ZERO else score))
    ordered = u32(~bits) if bits >= u32(0x80000000) else u32(bits | u32(0x80000000))
    return u32((ordered & u32(0xFFFFE000)) | u32(INDEX_MASK - expert))


@functools.cache
def choose_function(num_experts, top_k, packed):
    """The device function choose(values, lane); packed: a score and its expert fit into 32 bits.

    choose: the expert of rank `lane`, in lanes below top_k: by descending score, then ascending index; NaN as -inf.
    """
    count, none = -(-num_experts // 32), 1 << 20

    @device_function
    def choose_packed(values, lane):
        keys = cuda.local.array(count, np.uint32)
        for i in range(count):
            keys[i] = packed_key(values[i], lane + 32 * i) if lane + 32 * i < num_experts else u32(0)
        chosen = i32(-1)
        for rank in range(top_k):
            best = u32(0)
            for i in range(count):
                best = u32(max(best, keys[i]))
            best = warp_max_unsigned(best)
            for i in range(count):
                if keys[i] == best:
                    keys[i] = u32(0)
            if lane == rank:
                chosen = i32(u32(INDEX_MASK) - (best & u32(INDEX_MASK)))
        return chosen

    @device_function
    def choose(values, lane):
        taken, chosen = i32(0), i32(-1)
        for rank in range(top_k):
            best, index = LOWEST, i32(none)
            for i in range(count):
                if lane + 32 * i < num_experts and (taken >> i32(i)) & i32(1) == i32(0):
                    if index == i32(none) or values[i] > best:
                        best, index = values[i] if values[i] > LOWEST else LOWEST, i32(lane + 32 * i)
            for step in range(5):
                other, other_index = shuffle_xor(best, 16 >> step), shuffle_xor(index, 16 >> step)
                if other > best or (other == best and other_index < index):
                    best, index = other, other_index
            if index % i32(32) == lane:
                taken = i32(taken | i32(i32(1) << i32(index // i32(32))))
            if lane == rank:
                chosen = index
        return chosen

    return choose_packed if packed else choose


@functools.cache
def row_functions(num_experts, top_k):
    """(load_row, weight_of) for rows of `num_experts` scores, of which `top_k` are chosen."""
    count = -(-num_experts // 32)

    @device_function
    def load_row(scores, row, lane, values):
        """Load the scores of a lane; return (the row's largest number, the sum of exponentials over all experts)."""
        largest = LOWEST
        for i in range(count):
            expert = lane + 32 * i
            values[i] = widen(scores[row, expert]) if expert < num_experts else LOWEST
            # A NaN is no larger than anything.
            if values[i] > largest:
                largest = values[i]
        largest, total = warp_max(largest), ZERO
        for i in range(count):
            if lane + 32 * i < num_experts:
                total += exponential(values[i], largest)
        return largest, warp_sum(total)

    @device_function
    def weight_of(score, largest, total, lane, normalise):
        """The weight of a lane's expert: its share of the sum, with normalise over the sum of top_k shares in order.

        0 where all of these are 0.
        """
        share = exponential(score, largest) / total
        if not normalise:
            return share
        chosen_total = shuffle(share, 0)
        for rank in range(1, top_k):
            chosen_total += shuffle(share, rank)
        return ZERO if chosen_total == ZERO else share / chosen_total

    return load_row, weight_of


@specialize
def route_kernel(num_experts, top_k, normalise, packed):
    """The kernel for rows of `num_experts` scores; packed: they have 16 bits."""
    count = -(-num_experts // 32)
    load_row, weight_of = row_functions(num_experts, top_k)
    choose = choose_function(num_experts, top_k, packed)

    @supports_pdl
    @cuda.jit
    def route_kernel(scores, recorded, experts, weights):
        """A warp owns a row. recorded (N, k), whose rows from -1 on are chosen here, or (0, 0): all are."""
        values = cuda.local.array(count, np.float32)
        row, lane = cuda.blockIdx.x * ROUTER_LINES + cuda.threadIdx.y, i32(cuda.threadIdx.x)
        if row >= scores.shape[0]:
            return
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        largest, total = load_row(scores, row, lane, values)
        if recorded.shape[0] > 0 and recorded[row, 0] >= 0:
            chosen = i32(recorded[row, min(lane, i32(top_k - 1))])
        else:
            chosen = choose(values, lane)
        exists = chosen >= i32(0) and chosen < i32(num_experts)
        score = widen(scores[row, chosen if exists else i32(0)])
        weight = weight_of(score if exists else np.float32(math.nan), largest, total, lane, normalise)
        if lane < i32(top_k):
            experts[row, lane] = chosen
            weights[row, lane] = narrow(weight, weights)

    return route_kernel


@specialize
def route_backward_kernel(num_experts, top_k, normalise):
    """The kernel for rows of `num_experts` scores."""
    count = -(-num_experts // 32)
    load_row, weight_of = row_functions(num_experts, top_k)

    @cuda.jit
    def route_backward_kernel(dweights, scores, experts, slopes, num_tokens, dscores):
        """A warp owns a row. slopes (E,): the loss's derivative by an expert's share in any of the first
        num_tokens[0] rows, or (0,)."""
        values = cuda.local.array(count, np.float32)
        row, lane = cuda.blockIdx.x * ROUTER_LINES + cuda.threadIdx.y, i32(cuda.threadIdx.x)
        if row >= scores.shape[0]:
            return
        largest, total = load_row(scores, row, lane, values)
        rank = min(lane, i32(top_k - 1))
        chosen, upstream = i32(experts[row, rank]), dweights[row, rank]
        exists = chosen >= i32(0) and chosen < i32(num_experts)
        score = widen(scores[row, chosen if exists else i32(0)])
        weight = weight_of(score if exists else np.float32(math.nan), largest, total, lane, normalise)
        mean = ZERO
        for j in range(top_k):
            mean = cuda.fma(shuffle(weight, j), shuffle(upstream, j), mean)
        own = weight * (upstream - mean)
        slope_mean = ZERO
        has_slopes = slopes.shape[0] > 0 and row < num_tokens[0]
        if has_slopes:
            for i in range(count):
                if lane + 32 * i < num_experts:
                    share = exponential(values[i], largest) / total
                    slope_mean = cuda.fma(share, slopes[lane + 32 * i], slope_mean)
            slope_mean = warp_sum(slope_mean)
        for i in range(count):
            expert = i32(lane + 32 * i)
            share = exponential(values[i], largest) / total
            # The weights of chosen experts alone, divided by their sum, do not change with another score.
            gradient = ZERO if normalise else -mean * share
            for j in range(top_k):
                of_chosen = shuffle(own, j)
                if shuffle(chosen, j) == expert:
                    gradient = of_chosen
            if expert < i32(num_experts):
                if has_slopes:
                    gradient = cuda.fma(share, slopes[expert] - slope_mean, gradient)
                dscores[row, expert] = narrow(gradient, dscores)

    return route_backward_kernel


@specialize
def router_load_kernel(num_experts):
    """The kernel for rows of `num_experts` scores."""
    count = -(-num_experts // 32)
    load_row, _ = row_functions(num_experts, 1)
    size = count * 32

    @cuda.jit
    def router_load_kernel(scores, starts, row_of, num_tokens, counts, partials):
        """counts += rows of each expert; partials (blocks, E): sums of softmax over every gridDim-th batch of rows.

        Of the first num_tokens[0] tokens. A warp adds its rows in registers, ascending; then the block's warps are
        added in order. The rows of an expert are sorted by token: a binary search finds the end of those that count.
        """
        sums = cuda.shared.array((ROUTER_LINES, size), np.float32)
        values, totals = cuda.local.array(count, np.float32), cuda.local.array(count, np.float32)
        line, lane = i32(cuda.threadIdx.y), i32(cuda.threadIdx.x)
        for i in range(count):
            totals[i] = ZERO
        limit = num_tokens[0]
        for row in range(cuda.blockIdx.x * ROUTER_LINES + line, limit, cuda.gridDim.x * ROUTER_LINES):
            largest, total = load_row(scores, row, lane, values)
            for i in range(count):
                totals[i] += exponential(values[i], largest) / total
        for i in range(count):
            sums[line, lane + 32 * i] = totals[i]
        cuda.syncthreads()
        for expert in range(line * 32 + lane, num_experts, ROUTER_LINES * 32):
            total = sums[0, expert]
            for other in range(1, ROUTER_LINES):
                total += sums[other, expert]
            partials[cuda.blockIdx.x, expert] = total
            if cuda.blockIdx.x == 0:
                first, end = starts[expert], starts[expert + 1]
                begin = first
                while first < end:
                    middle = i32(first + i32(i32(end - first) >> i32(1)))
                    if row_of[middle] < limit:
                        first = i32(middle + i32(1))
                    else:
                        end = middle
                counts[expert] += i32(first - begin)

    return router_load_kernel


@cuda.jit
def router_loss_kernel(counts, shares, num_tokens, num_layers, weight, loss, slopes):
    """loss = E * sum of (scale counts) (scale shares); slopes = weight[0] * scale^2 * E * counts. One warp.

    scale: 1 over tokens times layers.
    """
    total, num_experts = ZERO, np.float32(counts.shape[0])
    scale, factor = np.float32(1.0) / (np.float32(num_tokens[0]) * num_layers), weight[0]
    for expert in range(cuda.threadIdx.x, counts.shape[0], 32):
        chosen = np.float32(counts[expert]) * scale * num_experts
        total = cuda.fma(chosen, shares[expert] * scale, total)
        slopes[expert] = factor * (chosen * scale)
    total = warp_sum(total)
    if cuda.threadIdx.x == 0:
        loss[0] = total
