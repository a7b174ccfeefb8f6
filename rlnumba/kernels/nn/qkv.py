"""From the fused projection to rotated q, k and v: split, RMSNorm of each head (Qwen3), rotary embedding.

A row of qkv holds H query heads, HK key heads and HK value heads of E values each; with gated attention (Qwen3.5) each
query head is followed by its gate, which is left where it is (output_gate.py). For a query or key head x,

    rstd = 1 / sqrt(mean(x^2) + eps)        x^ = x * rstd        y = x^ * weight        out = rope(y)

and for a value head out = x. Without norm weights y = x; with unit_offset 1 + weight takes the weight's place.
Backward, with g = rope^-1(dout), u = g * weight:

    dx = rstd * (u - x^ * mean(u * x^))     dweight = sum over rows and heads of g * x^

qkv, q, k, v in float32, float16 or bfloat16; arithmetic float32, one rounding at the end; rstd (N, H + HK) and dweight
(E,) float32. One pass over memory. A group of lanes shares a head as in rope.py; a head's sum is a lane's, over its
part of either half in its order, then a butterfly of the group. In inference k and v go to a block cache.
"""

import functools
from collections import namedtuple
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.checks import F32, FLOATS, I32, check, check_all
from rlnumba.kernels.cpu import qkv as qkv_cpu
from rlnumba.kernels.nn.rmsnorm import add_partials, rmsnorm_backward_ref, rmsnorm_ref
from rlnumba.kernels.nn.rope import check_tables, head_access, head_shape, in_halves, rope_ref, rotate
from rlnumba.kernels.ptx.warp import (
    compiler_barrier,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    inverse_sqrt,
    shuffle_xor,
    sync_warp,
)
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import ALWAYS, launch, specialize, supports_pdl

i32 = np.int32


class HeadNorm(NamedTuple):
    """The RMSNorms of query and key heads: q_weight, k_weight (E,) of the heads' dtype, eps, and unit_offset."""

    q_weight: object
    k_weight: object
    eps: float
    unit_offset: bool = False


class NormWeights(NamedTuple):
    """A HeadNorm as kernels get it."""

    q_weight: object
    k_weight: object
    eps: float


class Rotation(NamedTuple):
    """The rotary embedding of N tokens: cos, sin (P, R / 2) float32; position_ids (N,) int32 in [0, P).

    R is E, or less where a part of a head rotates.
    """

    cos: object
    sin: object
    position_ids: object


# For absent weights, and rstd, on the cpu device.
_EMPTY, _EMPTY_ROWS = np.empty(0, np.float32), np.empty((0, 0), np.float32)
# Warps of a block of qkv_split, and resident blocks of an SM; heads of a group of lanes at most, and one where that
# makes at most FEW_SPLIT_WARPS, 16 for each of 132 SMs. H200, 16,384 tokens of Qwen3-0.6B: 70.6 us with two heads, 74.0
# with four, 76.1 with one; 64 tokens: 2.5, 2.9, 2.2. To a cache 72.6 us with 12 blocks an SM, 74.3 with ten; else 72.4
# and 70.6.
SPLIT_WARPS, SPLIT_RESIDENT, CACHE_RESIDENT = 2, 10, 12
SPLIT_HEADS, FEW_SPLIT_WARPS = 2, 2112
# Warps of a block of the backward, which share nothing without norm; then one if there are at most FEW_WARPS.
WARPS, FEW_WARPS = 4, 528
# Resident blocks of the backward with norm on an SM, which leaves 96 registers a thread; and its blocks at most, each
# with a partial sum of dweight: RESIDENT for each of 132 SMs. Fixes the order of the sum.
RESIDENT, BACKWARD_BLOCKS = 5, 660
# Heads of an array of heads, which kernels count in 32 bits.
MOST_HEADS = 1 << 31


@functools.cache
def head_norm(shape):
    """(head_scale, scale_head): device functions of the RMSNorm of a head of a HeadShape, which a group of lanes has.

    head_scale(values, at, eps): rstd of the head of which values[at : at + 2 * vector] is this lane's part, as
    load_head left it; a sum over the group's lanes, so that all lanes of the warp call it. scale_head(values, at,
    scale, weights, weights_at): values[at : at + 2 * vector] *= scale * weights[weights_at : weights_at + 2 * vector],
    in this order, not rounded.
    """
    width, vector, lanes, unit_offset = shape.width, shape.vector, shape.lanes, shape.unit_offset
    of_head, steps = 2 * vector, lanes.bit_length() - 1

    @device_function
    def head_scale(values, at, eps):
        squares, others = np.float32(0.0), np.float32(0.0)
        for j in range(at, at + vector):
            squares = cuda.fma(values[j], values[j], squares)
            others = cuda.fma(values[j + vector], values[j + vector], others)
        squares += others
        for step in range(steps):
            squares += shuffle_xor(squares, lanes >> (step + 1))
        return inverse_sqrt(squares / np.float32(width) + eps)

    @device_function
    def scale_head(values, at, scale, weights, weights_at):
        for j in range(of_head):
            if unit_offset:
                values[at + j] = values[at + j] * scale * (np.float32(1.0) + weights[weights_at + j])
            else:
                values[at + j] = values[at + j] * scale * weights[weights_at + j]

    return head_scale, scale_head


# Gradients of q, k and v, as arrays of halves of heads.
QKVGradients = namedtuple("QKVGradients", "dq dk dv")


@functools.cache
def place_function(heads, kv_heads, gated):
    """The device function (row, head) -> number of a head of row `row` in qkv, whose query heads may have gates."""
    row_heads = heads * (2 if gated else 1) + 2 * kv_heads

    @device_function
    def place(row, head):
        if gated:
            return i32(row * i32(row_heads) + head + min(head, i32(heads)))
        return i32(row * i32(row_heads) + head)

    return place


@specialize
def qkv_split_kernel(shape, heads, kv_heads, gated, normed, cached, most_heads):
    """The kernel for `heads` query and `kv_heads` key heads of a HeadShape, with or without gates and norm.

    cached: k and v are caches, and a token's row in them is its slot. All four versions have the same arguments;
    without norm weights, eps and rstd are not used, with a cache rstd is not, without one slot_mapping is not.
    most_heads: heads that a group of lanes owns at most; changes no bits.
    """
    width, vector, lanes, groups = shape.width, shape.vector, shape.lanes, shape.groups
    rotated, all_heads = heads + kv_heads, heads + 2 * kv_heads
    heads_of_group, warps_of_token = shape.share(all_heads, most_heads)
    of_head = 2 * vector
    count = heads_of_group * of_head
    (load_head, store_head, load_angles), (head_scale, scale_head) = head_access(shape), head_norm(shape)
    place = place_function(heads, kv_heads, gated)
    # With few tokens the time is that of dependent loads: all but the heads are loaded before griddepcontrol.wait.
    loads_before_wait = cached and heads_of_group == 1
    # With narrower heads, more of them a warp, addresses would not leave enough registers.
    resident = CACHE_RESIDENT if cached and width >= 128 else SPLIT_RESIDENT

    @supports_pdl
    @cuda.jit(launch_bounds=(32 * SPLIT_WARPS, shape.blocks_of_sm(resident)))
    def qkv_split_kernel(qkv, norm, cos, sin, position_ids, slot_mapping, q, k, v, rstd):
        """A warp owns `heads_of_group` heads of a token for each of its groups of lanes; norm: NormWeights.

        Its groups work on neighbouring heads, so that the warp reads and writes whole lines of memory. Angles are read
        once for all of them. Heads are counted in 32 bits: 64 take one more instruction out of five.
        """
        warp = i32(cuda.blockIdx.x * SPLIT_WARPS + cuda.threadIdx.y)
        row = i32(warp // i32(warps_of_token))
        if row >= position_ids.shape[0]:
            return
        if not loads_before_wait:
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()
        lane = i32(cuda.threadIdx.x)
        e = lane % i32(lanes) * i32(vector)
        first_head = i32(warp % i32(warps_of_token) * i32(heads_of_group * groups) + lane // i32(lanes))
        values = cuda.local.array(count, np.float32)
        scales = cuda.local.array(heads_of_group, np.float32)
        weights = cuda.local.array(of_head, np.float32)
        c, s = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        position, kv_row = position_ids[np.uint64(row)], row
        if loads_before_wait:
            if first_head >= heads:
                kv_row = slot_mapping[np.uint64(row)]
            if normed and first_head < heads:
                load_head(norm.q_weight, 0, e, weights, 0)
            elif normed and first_head < rotated:
                load_head(norm.k_weight, 0, e, weights, 0)
            load_angles(cos, sin, position, e, c, s)
            griddepcontrol_wait()
            griddepcontrol_launch_dependents()
        for i in range(heads_of_group):
            # A group without a head reads the last one.
            head = i32(min(first_head + i32(i * groups), i32(all_heads - 1)))
            load_head(qkv, place(row, head), e, values, i * of_head)
        if not loads_before_wait:
            # Angles depend on the load of the position; heads do not.
            compiler_barrier()
            load_angles(cos, sin, position, e, c, s)
        if cached and not loads_before_wait:
            # Without the barrier ptxas loads the slot first, and the angles late. Slot -1: k and v are not written.
            sync_warp()
            if first_head + i32((heads_of_group - 1) * groups) >= heads:
                kv_row = slot_mapping[np.uint64(row)]
        if normed:
            for i in range(heads_of_group):
                scales[i] = head_scale(values, i * of_head, norm.eps)
            # A loop of its own: NVVM unrolls short ones only, and values have to be in registers.
            for i in range(heads_of_group):
                head = i32(first_head + i32(i * groups))
                if head < rotated:
                    if not loads_before_wait and head < heads:
                        load_head(norm.q_weight, 0, e, weights, 0)
                    elif not loads_before_wait:
                        load_head(norm.k_weight, 0, e, weights, 0)
                    scale_head(values, i * of_head, scales[i], weights, 0)
                    if not cached and e == 0:
                        rstd[np.uint64(row), np.uint64(head)] = scales[i]
        for i in range(heads_of_group):
            head = i32(first_head + i32(i * groups))
            if head < rotated:
                rotate(values, i * of_head, vector, c, s)
            if head < heads:
                store_head(q, i32(row * i32(heads) + head), e, values, i * of_head)
            elif cached and kv_row < 0:
                continue
            elif head < rotated:
                store_head(k, i32(kv_row * i32(kv_heads) + head - i32(heads)), e, values, i * of_head)
            elif head < all_heads:
                store_head(v, i32(kv_row * i32(kv_heads) + head - i32(rotated)), e, values, i * of_head)

    return qkv_split_kernel


@specialize
def qkv_split_backward_kernel(shape, heads, kv_heads, gated):
    """The kernel without norm, for `heads` query and `kv_heads` key heads of a HeadShape."""
    vector, lanes, groups = shape.vector, shape.lanes, shape.groups
    rotated, all_heads = heads + kv_heads, heads + 2 * kv_heads
    heads_of_group, warps_of_token = shape.share(all_heads)
    of_head = 2 * vector
    count = heads_of_group * of_head
    load_head, store_head, load_angles = head_access(shape)
    place = place_function(heads, kv_heads, gated)

    @cuda.jit(launch_bounds=(32 * WARPS, 1))
    def qkv_split_backward_kernel(dq, dk, dv, cos, sin, position_ids, dqkv):
        """Rotate back and write the heads side by side; warps and lanes own what they do in qkv_split_kernel."""
        warp = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        row = warp // warps_of_token
        if row >= position_ids.shape[0]:
            return
        e = cuda.threadIdx.x % lanes * vector
        first_head = warp % warps_of_token * heads_of_group * groups + cuda.threadIdx.x // lanes
        values = cuda.local.array(count, np.float32)
        c, s = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        position = position_ids[row]
        for i in range(heads_of_group):
            head = min(first_head + i * groups, all_heads - 1)
            if head < heads:
                load_head(dq, row * heads + head, e, values, i * of_head)
            elif head < rotated:
                load_head(dk, row * kv_heads + head - heads, e, values, i * of_head)
            else:
                load_head(dv, row * kv_heads + head - rotated, e, values, i * of_head)
        compiler_barrier()
        load_angles(cos, sin, position, e, c, s)
        for i in range(vector):
            s[i] = -s[i]
        for i in range(heads_of_group):
            head = first_head + i * groups
            if head < rotated:
                rotate(values, i * of_head, vector, c, s)
            if head < all_heads:
                store_head(dqkv, place(i32(row), i32(head)), e, values, i * of_head)

    return qkv_split_backward_kernel


@functools.cache
def head_tile_backward(shape, heads, first_head, places):
    """The device function of qkv_split_norm_backward_kernel for a tile of the `heads` query or key heads.

    first_head: the first of them among the heads of rstd; places: in qkv the first one's, from each to the next, and
    the heads of a row.
    """
    width, vector, lanes, unit_offset = shape.width, shape.vector, shape.lanes, shape.unit_offset
    first_place, place_step, row_heads = places
    of_head, steps = 2 * vector, lanes.bit_length() - 1
    load_head, store_head, load_angles = head_access(shape)

    @device_function
    def tile_backward(dout, head, qkv, weight, cos, sin, position_ids, rstd, dqkv, dweight):
        """dqkv of head `head` of dout, of none beyond the last; dweight: this lane's sums of g x^ over its tokens."""
        # 64-bit indices would need more registers than there are.
        rows, row_step = i32(position_ids.shape[0]), i32(cuda.gridDim.x * WARPS)
        e = i32(cuda.threadIdx.x) % i32(lanes) * i32(vector)
        # A group without a head computes the last one again and discards it.
        exists = head < heads
        head = i32(min(head, heads - 1))
        weights = cuda.local.array(of_head, np.float32)
        x, g = cuda.local.array(of_head, np.float32), cuda.local.array(of_head, np.float32)
        c, s = cuda.local.array(vector, np.float32), cuda.local.array(vector, np.float32)
        for i in range(of_head):
            dweight[i] = np.float32(0.0)
        row = i32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        dout_head = i32(row * i32(heads) + head)
        qkv_head = i32(row * i32(row_heads) + i32(first_place) + head * i32(place_step))
        position = position_ids[np.uint64(min(row, rows - i32(1)))]
        while row < rows:
            load_head(dout, dout_head, e, g, 0)
            load_head(qkv, qkv_head, e, x, 0)
            load_angles(cos, sin, position, e, c, s)
            scale = rstd[np.uint64(row), np.uint64(i32(first_head) + head)]
            row = i32(row + row_step)
            # The next position now, so that the next angles do not wait for it.
            position = position_ids[np.uint64(min(row, rows - i32(1)))]
            compiler_barrier()
            # From L1 each time: keeping it in registers would cost a resident block.
            load_head(weight, 0, e, weights, 0)
            if unit_offset:
                for i in range(of_head):
                    weights[i] += np.float32(1.0)
            for i in range(vector):
                s[i] = -s[i]
            rotate(g, 0, vector, c, s)
            projection = np.float32(0.0)
            for i in range(of_head):
                x[i] *= scale
                projection += g[i] * weights[i] * x[i]
            for step in range(steps):
                projection += shuffle_xor(projection, lanes >> (step + 1))
            projection /= np.float32(width)
            if exists:
                for i in range(of_head):
                    dweight[i] += g[i] * x[i]
                    x[i] = scale * (g[i] * weights[i] - x[i] * projection)
                store_head(dqkv, qkv_head, e, x, 0)
            dout_head = i32(dout_head + row_step * i32(heads))
            qkv_head = i32(qkv_head + row_step * i32(row_heads))

    return tile_backward


@specialize
def qkv_split_norm_backward_kernel(shape, heads, kv_heads, gated):
    """The kernel with norm, for `heads` query and `kv_heads` key heads of a HeadShape."""
    vector, lanes, groups = shape.vector, shape.lanes, shape.groups
    step = 2 if gated else 1
    first_key, first_value, row_heads = step * heads, step * heads + kv_heads, step * heads + 2 * kv_heads
    q_tiles, k_tiles = -(-heads // groups), -(-kv_heads // groups)
    spread, of_head = groups.bit_length() - 1, 2 * vector
    load_head, store_head, _ = head_access(shape)
    # Partial sums are float32, of which a vector has half as many; their rows lie where those of the tables do.
    _, store_partial, _ = head_access(shape._replace(access=1 if shape.rotary else shape.table_access))
    q_backward = head_tile_backward(shape, heads, 0, (0, step, row_heads))
    k_backward = head_tile_backward(shape, kv_heads, heads, (first_key, 1, row_heads))

    @cuda.jit(launch_bounds=(32 * WARPS, shape.blocks_of_sm(RESIDENT)))
    def qkv_split_norm_backward_kernel(
        gradients, qkv, q_weight, k_weight, cos, sin, position_ids, rstd, dqkv, partials
    ):
        """A tile is `groups` query, key or value heads, one for each group of lanes. gradients: QKVGradients.

        Block (b, t) owns tile t of every gridDim.x-th WARPS tokens, a warp one of these tokens at a time; so a lane
        keeps its elements of the weights, and of their gradient, in registers. Order of that sum: a lane's tokens, the
        groups by a butterfly, the warps in order; it is head t * gridDim.x + b of partials.
        """
        sums = cuda.shared.array((WARPS, of_head, lanes), np.float32)
        lane, warp, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y
        e, head = lane % lanes * vector, tile * groups + lane // lanes
        dweight = cuda.local.array(of_head, np.float32)
        if tile < q_tiles:
            q_backward(gradients.dq, head, qkv, q_weight, cos, sin, position_ids, rstd, dqkv, dweight)
        elif tile < q_tiles + k_tiles:
            head -= q_tiles * groups
            k_backward(gradients.dk, head, qkv, k_weight, cos, sin, position_ids, rstd, dqkv, dweight)
        else:
            head -= (q_tiles + k_tiles) * groups
            for row in range(cuda.blockIdx.x * WARPS + warp, position_ids.shape[0], cuda.gridDim.x * WARPS):
                if head < kv_heads:
                    load_head(gradients.dv, row * kv_heads + head, e, dweight, 0)
                    store_head(dqkv, row * row_heads + first_value + head, e, dweight, 0)
            return
        griddepcontrol_launch_dependents()
        for step in range(spread):
            for i in range(of_head):
                dweight[i] += shuffle_xor(dweight[i], lanes << step)
        if lane < lanes:
            for i in range(of_head):
                sums[warp, i, lane] = dweight[i]
        cuda.syncthreads()
        if warp > 0 or lane >= lanes:
            return
        for i in range(of_head):
            for other in range(1, WARPS):
                dweight[i] += sums[other, i, lane]
        store_partial(partials, tile * cuda.gridDim.x + cuda.blockIdx.x, e, dweight, 0)

    return qkv_split_norm_backward_kernel


def is_gated(qkv, heads, kv_heads, width):
    """Whether the query heads of qkv, whose shape was checked, have gates."""
    return qkv.shape[1] > (heads + 2 * kv_heads) * width


def shape_of(norm, rotation, width, *arrays):
    """The HeadShape of a call with these arrays and the norm's weights."""
    shape = head_shape(width, rotation.cos, rotation.sin, *arrays, *norm_of(norm)[0])
    return shape._replace(unit_offset=norm is not None and norm.unit_offset)


def norm_of(norm):
    """((q_weight, k_weight), eps) of a HeadNorm, ((), 0) of None."""
    return ((), 0.0) if norm is None else (norm[:2], float(norm.eps))


def check_projection(op, qkv, q, kv_heads, norm, rotation):
    """Check what all operators that read or write qkv share, for heads q (N, H, E) that are known to be right."""
    rows, heads, width = q.shape
    all_heads = heads + 2 * kv_heads
    if qkv.shape[-1:] == ((all_heads + heads) * width,):
        all_heads += heads
    check(op, "qkv", qkv, (rows, all_heads * width), (q.dtype,))
    if rows * all_heads >= MOST_HEADS:
        raise ValueError(f"{op}: qkv must have fewer than {MOST_HEADS} heads, got {rows * all_heads}")
    check_tables(op, width, rotation.cos, rotation.sin)
    check(op, "position_ids", rotation.position_ids, (rows,), I32)
    if norm is not None:
        check_all(op, (width,), (q.dtype,), q_weight=norm.q_weight, k_weight=norm.k_weight)


def _split(qkv, norm, rotation, slot_mapping, heads, rstd):
    """Both forms, arguments checked. heads: q, k and v, the last two of as many rows as there are slots.

    slot_mapping None: token n has slot n. rstd may be None.
    """
    (q, k, v), (cos, sin, position_ids), (weights, eps) = heads, rotation, norm_of(norm)
    rows, heads, width = q.shape
    kv_heads = k.shape[1]
    normed, cached, gated = norm is not None, slot_mapping is not None, is_gated(qkv, heads, kv_heads, width)
    if device.name() == "cpu":
        weights = [weight + 1 for weight in weights] if normed and norm.unit_offset else weights or (_EMPTY, _EMPTY)
        slots = slot_mapping if cached else np.arange(rows, dtype=np.int32)
        rstd = rstd if normed and not cached else _EMPTY_ROWS
        qkv_cpu.split(qkv, *weights, np.float32(eps), cos, sin, position_ids, slots, q, k, v, rstd)
        return
    if not rows:
        return
    all_heads = heads + 2 * kv_heads
    shape = shape_of(norm, rotation, width, qkv, q, k, v)
    # Few tokens are spread over more warps.
    most_heads = 1 if rows * shape.share(all_heads, 1)[1] <= FEW_SPLIT_WARPS else SPLIT_HEADS
    blocks = -(-rows * shape.share(all_heads, most_heads)[1] // SPLIT_WARPS)
    # For what a version does not use, any array of the right type.
    norm = NormWeights(*([in_halves(weight, shape.half) for weight in weights] or [cos, cos]), eps)
    slots, rstd = slot_mapping if cached else position_ids, rstd if normed and not cached else cos
    qkv, q, k, v = (in_halves(array, shape.half) for array in (qkv, q, k, v))
    arguments = qkv, norm, cos, sin, position_ids, slots, q, k, v, rstd
    kernel = qkv_split_kernel(shape, heads, kv_heads, gated, normed, cached, most_heads)
    launch(kernel, blocks, (32, SPLIT_WARPS), *arguments, pdl=ALWAYS)


def qkv_split(qkv, norm, rotation, q, k, v, rstd):
    """Split qkv into heads, normalise query and key heads if there is a norm, and rotate them.

    qkv (N, (H + 2 HK) E) as [q heads | k heads | v heads], or (N, (2 H + 2 HK) E) where a gate follows each query head,
    which is not read; norm: a HeadNorm with weights of the same dtype, or None
    (then rstd is not used, and may be None); rotation: a Rotation. q (N, H, E), k, v (N, HK, E) of qkv's dtype and rstd
    (N, H + HK) float32 are written. E is even and at most 256. Raises ValueError for other arrays. Source: q_norm and
    k_norm of transformers' Qwen3Attention, rope as rope.py.
    """
    op = "qkv_split"
    rows, heads, width = check(op, "q", q, (None, None, None), FLOATS)
    _, kv_heads, _ = check(op, "k", k, (rows, None, width), (q.dtype,))
    check(op, "v", v, (rows, kv_heads, width), (q.dtype,))
    check_projection(op, qkv, q, kv_heads, norm, rotation)
    if norm is not None:
        check(op, "rstd", rstd, (rows, heads + kv_heads), F32)
    _split(qkv, norm, rotation, None, (q, k, v), rstd)


def qkv_split_to_cache(qkv, norm, rotation, slot_mapping, q, caches):
    """qkv_split whose k and v are written to their slots of a block cache, with the same bits.

    qkv, norm, rotation and q as in qkv_split; slot_mapping (N,) int32, block * block_size + offset, no slot twice;
    caches (k_cache, v_cache), each (blocks, block_size, HK, E) of qkv's dtype. A token whose slot is -1 leaves the
    caches as they are, and its q is written. Raises ValueError for other shapes, dtypes or layouts.
    """
    op, (k_cache, v_cache) = "qkv_split_to_cache", caches
    rows, _, width = check(op, "q", q, (None, None, None), FLOATS)
    shape = check(op, "k_cache", k_cache, (None, None, None, width), (q.dtype,))
    check(op, "v_cache", v_cache, shape, (q.dtype,))
    blocks, block_size, kv_heads, _ = shape
    check_projection(op, qkv, q, kv_heads, norm, rotation)
    check(op, "slot_mapping", slot_mapping, (rows,), I32)
    k, v = (cache.reshape(blocks * block_size, kv_heads, width) for cache in caches)
    _split(qkv, norm, rotation, slot_mapping, (q, k, v), None)


def qkv_split_backward(gradients, qkv, norm, rotation, rstd, dqkv, dq_weight, dk_weight):
    """The gradient of qkv_split: dqkv =, and if there is a norm dq_weight, dk_weight +=.

    gradients: (dq, dk, dv). dq (N, H, E), dk, dv (N, HK, E), qkv and dqkv (N, (H + 2 HK) E), or with gates, which are
    neither read nor written, (N, (2 H + 2 HK) E), and the norm's weights (E,) of one dtype; rstd as the forward wrote
    it; dq_weight, dk_weight (E,) float32, None without a norm, or where it is not trained. Raises ValueError for other
    arrays.
    """
    op, (dq, dk, dv), (cos, sin, position_ids) = "qkv_split_backward", gradients, rotation
    rows, heads, width = check(op, "dq", dq, (None, None, None), FLOATS)
    _, kv_heads, _ = check(op, "dk", dk, (rows, None, width), (dq.dtype,))
    check(op, "dv", dv, (rows, kv_heads, width), (dq.dtype,))
    check_projection(op, qkv, dq, kv_heads, norm, rotation)
    check(op, "dqkv", dqkv, qkv.shape, (qkv.dtype,))
    normed, trained, (weights, _) = norm is not None, dq_weight is not None, norm_of(norm)
    gated = is_gated(qkv, heads, kv_heads, width)
    if normed:
        check(op, "rstd", rstd, (rows, heads + kv_heads), F32)
    if normed and trained:
        check_all(op, (width,), F32, dq_weight=dq_weight, dk_weight=dk_weight)
    if device.name() == "cpu":
        if not normed:
            weights = dq_weight, dk_weight = _EMPTY, _EMPTY
            rstd = _EMPTY_ROWS
        elif not trained:
            dq_weight, dk_weight = np.zeros((2, width), np.float32)
        if normed and norm.unit_offset:
            weights = [weight + 1 for weight in weights]
        qkv_cpu.split_backward(*gradients, qkv, *weights, *rotation, rstd, dqkv, dq_weight, dk_weight)
        return
    if not rows:
        return
    shape = shape_of(norm, rotation, width, *gradients, qkv, dqkv)
    dq, dk, dv, qkv, dqkv = (in_halves(array, shape.half) for array in (dq, dk, dv, qkv, dqkv))
    if not normed:
        warps = rows * shape.share(heads + 2 * kv_heads)[1]
        block_warps = WARPS if warps > FEW_WARPS else 1
        kernel = qkv_split_backward_kernel(shape, heads, kv_heads, gated)
        launch(kernel, -(-warps // block_warps), (32, block_warps), dq, dk, dv, cos, sin, position_ids, dqkv)
        return
    q_tiles, k_tiles = -(-heads // shape.groups), -(-kv_heads // shape.groups)
    tiles = q_tiles + 2 * k_tiles
    blocks = min(-(-rows // WARPS), max(BACKWARD_BLOCKS // tiles, 1))
    partials = device.xp().empty(((q_tiles + k_tiles) * blocks, width), np.float32)
    weights = [in_halves(weight, shape.half) for weight in weights]
    partial_halves = in_halves(partials, shape.half)
    arguments = QKVGradients(dq, dk, dv), qkv, *weights, cos, sin, position_ids, rstd, dqkv, partial_halves
    kernel = qkv_split_norm_backward_kernel(shape, heads, kv_heads, gated)
    launch(kernel, (blocks, tiles), (32, WARPS), *arguments)
    if trained:
        add_partials(partials, dq_weight, q_tiles * blocks, dk_weight)


def _without_gates(qkv, heads, kv_heads, gated):
    """(the heads of qkv but for gates, a copy (N, H + 2 HK, E) if there are any; the numbers of these heads in qkv)."""
    numbers = np.arange(heads + 2 * kv_heads) + (np.minimum(np.arange(heads + 2 * kv_heads), heads) if gated else 0)
    row_heads = len(numbers) + (heads if gated else 0)
    return qkv.reshape(len(qkv), row_heads, qkv.shape[1] // row_heads)[:, numbers], numbers


def qkv_split_ref(qkv, norm, rotation, heads, kv_heads, gated=False):
    """(q, k, v, rstd) of qkv_split, in qkv's precision; rstd is None without norm."""
    split, _ = _without_gates(qkv, heads, kv_heads, gated)
    rows, width = len(split), split.shape[2]
    x, v = np.split(split, [heads + kv_heads], axis=1)
    rstd = None
    if norm is not None:
        weights = np.tile(np.repeat(_norm_weights(norm), [heads, kv_heads], axis=0), (rows, 1))
        normed, rstd = rmsnorm_ref(x.reshape(-1, width), weights, norm.eps)
        x, rstd = normed.reshape(x.shape), rstd.reshape(rows, heads + kv_heads)
    q, k = np.split(rope_ref(x, *rotation), [heads], axis=1)
    return q, k, v, rstd


def _norm_weights(norm):
    """The factors of q and of k: list."""
    return [weight + 1 if norm.unit_offset else weight for weight in norm[:2]]


def qkv_split_backward_ref(gradients, qkv, norm, rotation, rstd, gated=False):
    """(dqkv, dq_weight, dk_weight) of qkv_split_backward, in qkv's precision; None without norm, gates' dqkv NaN."""
    dq, dk, dv = gradients
    _, heads, width = dq.shape
    q_weight, k_weight = (None, None) if norm is None else _norm_weights(norm)
    split, numbers = _without_gates(qkv, heads, dk.shape[1], gated)
    dheads, dweights = [], [None, None]
    for i, (dout, weight, first) in enumerate(((dq, q_weight, 0), (dk, k_weight, heads))):
        dx, part = rope_ref(dout, *rotation, inverse=True), slice(first, first + dout.shape[1])
        if weight is not None:
            x, scale = split[:, part].reshape(-1, width), rstd[:, part].reshape(-1)
            dx, dweights[i] = rmsnorm_backward_ref(dx.reshape(-1, width), x, weight, scale)
        dheads.append(dx.reshape(dout.shape))
    dqkv = np.full((len(qkv), qkv.shape[1] // width, width), np.nan, qkv.dtype)
    dqkv[:, numbers] = np.concatenate([*dheads, dv], axis=1)
    return dqkv.reshape(qkv.shape), *dweights
