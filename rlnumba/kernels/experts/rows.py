"""The kernels between tokens and the rows of experts: a counting sort, rows to experts, and their sum a token.

Nothing is counted by atomics, so a row has one place: that of its expert, then of its token.
"""

import functools

import numpy as np

from rlnumba.kernels.ptx.warp import (
    ballot,
    cvt_pack,
    cvt_unpack,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    shuffle_xor,
    vector_access,
    warp_sum,
    widen,
)
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32, u32 = np.int32, np.uint32

# Threads of a block that sorts, at most, and choices that one loads at a time: a warp has a step of 128.
SORT_THREADS, CHOICES = 1024, 4
STEP = 32 * CHOICES
# Threads of a block that moves or adds rows.
THREADS = 256
# Rows that a thread of combine_kernel loads before it adds the first, with few tokens and with many; no bits follow
# from it. H100, 8 rows of 4 KiB a token: 2.45 and 1.87 us with 4 and 8 for one token, 226 and 232 for 16,384.
FEW_TOKENS, FEW_AT_ONCE, AT_ONCE = 1024, 8, 4
# Warps of a block of weigh_rows_backward_kernel, each with a row of its own.
CHOICE_LINES = 8


@specialize
def dispatch_kernel(top_k, access):
    """The kernel for `top_k` choices a token, read `access` at a time."""
    load, _ = vector_access(CHOICES, access, True)

    @device_function
    def expert_of(choice, num_experts):
        """The expert of a choice; one outside of [0, num_experts), which has no weight, goes to the last."""
        return i32(min(u32(choice), u32(num_experts - 1)))

    @device_function
    def warp_total(value):
        """The sum of the lanes' int32."""
        for step in range(5):
            value = i32(value + shuffle_xor(value, 16 >> step))
        return value

    @supports_pdl
    @cuda.jit(launch_bounds=(SORT_THREADS, 1))
    def dispatch_kernel(experts, span, starts, row_of, slot_of):
        """A block owns the choices of one expert, of which it first counts those of lower experts.

        experts, slot_of (T k,). A warp owns `span` neighbouring choices, a multiple of STEP, of which it writes its
        expert's in order, behind those that lower warps have counted.
        """
        counted = cuda.shared.array((2, 32), np.int32)
        ids = cuda.local.array(CHOICES, np.int32)
        lane, warp, warps = i32(cuda.threadIdx.x), i32(cuda.threadIdx.y), i32(cuda.blockDim.y)
        expert, num_experts, choices = i32(cuda.blockIdx.x), i32(cuda.gridDim.x), i32(experts.shape[0])
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        first = i32(warp * i32(span))
        end, own, lower = min(i32(first + i32(span)), choices), i32(0), i32(0)
        step = first
        while step < end:
            load(experts, step + lane * i32(CHOICES), ids, 0)
            for i in range(CHOICES):
                choice = expert_of(ids[i], num_experts)
                if step + lane * i32(CHOICES) + i < end:
                    own = i32(own + i32(choice == expert))
                    lower = i32(lower + i32(choice < expert))
            step = i32(step + i32(STEP))
        own, lower = warp_total(own), warp_total(lower)
        if lane == 0:
            counted[0, warp], counted[1, warp] = own, lower
        cuda.syncthreads()
        start, before, total = i32(0), i32(0), i32(0)
        for other in range(warps):
            start, total = i32(start + counted[1, other]), i32(total + counted[0, other])
            before = i32(before + (counted[0, other] if other < warp else i32(0)))
        if warp == 0 and lane == 0:
            starts[expert] = start
            if expert == num_experts - i32(1):
                starts[num_experts] = i32(start + total)
        slot, step = i32(start + before), first
        while step < end:
            load(experts, step + lane * i32(CHOICES), ids, 0)
            behind, found = i32(0), i32(0)
            for i in range(CHOICES):
                exists = step + lane * i32(CHOICES) + i < end
                ids[i] = i32(exists and expert_of(ids[i], num_experts) == expert)
                votes = ballot(ids[i] != i32(0))
                behind = i32(behind + i32(cuda.popc(votes & ~(i32(-1) << lane))))
                found = i32(found + i32(cuda.popc(votes)))
            behind = i32(slot + behind)
            for i in range(CHOICES):
                if ids[i] != i32(0):
                    choice = i32(step + lane * i32(CHOICES) + i32(i))
                    row_of[behind] = i32(u32(choice) // u32(top_k))
                    slot_of[choice] = behind
                    behind = i32(behind + i32(1))
            slot, step = i32(slot + found), i32(step + i32(STEP))

    return dispatch_kernel


@specialize
def gather_rows_kernel(top_k, element, access, bounded, parts):
    """The kernel of rows of integers of type `element`; a row is that of `parts` blocks.

    bounded: the last block of a row has columns beyond the end.
    """
    vector = 16 // np.dtype(element).itemsize
    load, store = vector_access(vector, access, bounded)

    @supports_pdl
    @cuda.jit
    def gather_rows_kernel(x, slot_of, out):
        """A thread owns a vector of a token's row, which it reads once and writes top_k times."""
        kept = cuda.local.array(vector, element)
        token = cuda.blockIdx.x // parts * cuda.blockDim.y + cuda.threadIdx.y
        first = (cuda.blockIdx.x % parts * cuda.blockDim.x + cuda.threadIdx.x) * vector
        if token >= x.shape[0]:
            return
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        load(x[token], first, kept, 0)
        for j in range(top_k):
            store(out[slot_of[token, j]], first, kept, 0)

    return gather_rows_kernel


@functools.cache
def add_scaled_function(element):
    """The device function that adds factor * values[at + i] to totals[i], of as many elements as 16 bytes hold.

    element: the dtype that a product is rounded to before it is added; in float32 it is not rounded.
    """
    if element == "float32":

        @device_function
        def add_scaled(factor, values, at, totals):
            for i in range(4):
                totals[i] = cuda.fma(factor, values[at + i], totals[i])

        return add_scaled

    pack, unpack = cvt_pack(element), cvt_unpack(element)

    @device_function
    def add_scaled(factor, values, at, totals):
        for i in range(0, 8, 2):
            low, high = unpack(pack(factor * values[at + i], factor * values[at + i + 1]))
            totals[i] += low
            totals[i + 1] += high

    return add_scaled


@specialize
def combine_kernel(top_k, at_once, element, access, bounded, parts):
    """The kernel of rows of dtype `element`, as gather_rows_kernel; at_once: rows that are loaded at a time.

    It adds `top_k` rows a token: with weights, or without, which is the gradient of gather_rows.
    """
    vector = 4 if element == "float32" else 8
    load, store = vector_access(vector, access, bounded)
    add_scaled, count = add_scaled_function(element), at_once * vector

    @supports_pdl
    @cuda.jit
    def combine_kernel(rows, slot_of, weights, residual, out):
        """A thread owns a vector of a token's row; its sum begins with the first choice, and is rounded once.

        weights (T, k), or (0, 0): all are 1. residual (T, D), added to the rounded sum, or (0, 0).
        """
        values, totals = cuda.local.array(count, np.float32), cuda.local.array(vector, np.float32)
        token = cuda.blockIdx.x // parts * cuda.blockDim.y + cuda.threadIdx.y
        first = (cuda.blockIdx.x % parts * cuda.blockDim.x + cuda.threadIdx.x) * vector
        if token >= out.shape[0]:
            return
        griddepcontrol_launch_dependents()
        griddepcontrol_wait()
        for i in range(vector):
            totals[i] = np.float32(0.0)
        for top in range(0, top_k, at_once):
            for j in range(at_once):
                load(rows[slot_of[token, min(top + j, top_k - 1)]], first, values, j * vector)
            for j in range(at_once):
                if top + j < top_k:
                    if weights.shape[0] > 0:
                        add_scaled(widen(weights[token, top + j]), values, j * vector, totals)
                    else:
                        for i in range(vector):
                            totals[i] += values[j * vector + i]
        if residual.shape[0] > 0:
            load(residual[token], first, values, 0)
            add_scaled(np.float32(1.0), totals, 0, values)
            store(out[token], first, values, 0)
        else:
            store(out[token], first, totals, 0)

    return combine_kernel


@supports_pdl
@cuda.jit(launch_bounds=(THREADS, 1))
def record_experts_kernel(experts, slots, records):
    """records[slots[t], j] = experts[t, j], a thread each; tokens with a negative slot are padding."""
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    choice = i32(cuda.blockIdx.x) * i32(THREADS) + i32(cuda.threadIdx.x)
    top_k = i32(records.shape[1])
    token = choice // top_k
    if token < slots.shape[0] and slots[token] >= 0:
        rank = choice - token * top_k
        records[slots[token], rank] = np.int16(experts[token, rank])


@specialize
def weigh_rows_backward_kernel(top_k, vector, access, bounded):
    """The kernel of rows read in vectors of `vector` columns, moved `access` at a time.

    bounded: the last vectors of a row have columns beyond its end.
    """
    load, store = vector_access(vector, access, bounded)

    @cuda.jit
    def weigh_rows_backward_kernel(drows, rows, slot_of, weights, weighs_rows, dweights):
        """A warp owns a choice: dweights, and its rows, times the weight in place.

        The dot product: lane l adds columns l * vector .. (l + 1) * vector - 1 of every 32 * vector, ascending; then
        the lanes are added by a butterfly.
        """
        values, upstream = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        index = cuda.blockIdx.x * CHOICE_LINES + cuda.threadIdx.y
        token, rank = index // top_k, index % top_k
        if token >= slot_of.shape[0]:
            return
        slot, weight, total = slot_of[token, rank], widen(weights[token, rank]), np.float32(0.0)
        row, drow = rows[slot], drows[slot]
        for first in range(cuda.threadIdx.x * vector, rows.shape[1], 32 * vector):
            load(drow, first, upstream, 0)
            load(row, first, values, 0)
            for i in range(vector):
                total = cuda.fma(upstream[i], values[i], total)
                upstream[i] *= weight
                values[i] *= weight
            store(drow, first, upstream, 0)
            if weighs_rows != 0:
                store(row, first, values, 0)
        total = warp_sum(total)
        if cuda.threadIdx.x == 0:
            dweights[token, rank] = total

    return weigh_rows_backward_kernel
