"""Causal attention on Hopper's tensor cores: forward over packed sequences, and over the paged cache for prefill.

The equations are those of kernels/attention/ops.py, in float16 or bfloat16 with float32 accumulators. What a row
(a query head of a token) computes, wherever it stands in whatever batch, here and in attention/sm90_decode.py:

    for each segment of SEGMENT keys, the segments fixed by the keys' absolute positions:
        m = -inf, l = 0 (32 of them), acc = 0
        for each tile of KEYS keys of the segment, in ascending order:
            s_j = sum over e of q_e k_je by wgmma, 16 columns at a time in ascending order; -inf beyond the row
            new = c max_j s_j if that is above m + RESCALE_THRESHOLD, else m
            shrink = 2^(m - new)    p_j = 2^fma(s_j, c, -new)    m = new
            l_wg = fma(l_wg, shrink, p_(16 w + g) + p_(16 w + 8 + g))       w = 0 .. 3, g = 0 .. 7
            acc_e = acc_e shrink + sum over j of p_j v_je by wgmma, p rounded to the inputs' type, 16 keys at a time
        t_g = (l_0g + l_1g) + (l_2g + l_3g)       l = ((t_0 + t_1) + (t_2 + t_3)) + ((t_4 + t_5) + (t_6 + t_7))
    segments merge in ascending order, each with all before it (M, L, A):
        new = max(M, m)    a = 2^(M - new)    b = 2^(m - new)    L = fma(l, b, L a)    A_e = fma(acc_e, b, A_e a)
    out_e = A_e (1 / L)     lse = fma(M, ln 2, log L)

with c = scale log2(e) > 0. 2^x is one instruction, `exp2`, everywhere. m is what a row's scores are held against:
at first their maximum, later something up to RESCALE_THRESHOLD smaller, so that acc is rarely multiplied by anything
but 1.
A wgmma gives an element the same bits
whatever the product's width and whichever of its operands is called A, so decode may exchange keys and queries;
the order of the sums l is what both layouts of a tile's scores can follow without an exchange of sums. A tile
that lies beyond a row changes nothing (new = m, shrink = 1, p = 0), nor does a segment (b = 0, a = 1), so blocks
of rows may visit more tiles than one of their rows needs.

A block stays on its SM and works through items, the ones with the most keys first. An item is 64 tokens for
each of one or two consumer warpgroups, which take two query heads of one key head where their number is even,
else neighbouring tokens. Two producer warps find the items; one brings q and k, one v, by the copy engine, `stages`
tiles ahead. While a consumer's scores of one tile become probabilities, the tensor cores
work on its next scores and its last values, and on the other consumer's.
Sources: Dao et al. 2022; Shah et al. 2024 (FlashAttention-3).
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.sm90 import (
    BOX_BYTES,
    ELEMENTS,
    LINE,
    Address,
    bulk_commit_group,
    bulk_wait_group,
    bulk_wait_group_read,
    cvt_pack,
    fence_proxy_async,
    ldmatrix_x4,
    load_four,
    mbarrier_arrive,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    named_barrier_sync,
    shared_address,
    smem_descriptor,
    stmatrix_x4,
    store_four,
    tensor_map,
    tensor_map_address,
    tma_load_3d,
    tma_store_3d,
    warp_uniform,
    wgmma,
)
from rlnumba.kernels.ptx.sm90_async import setmaxnreg
from rlnumba.kernels.ptx.warp import ballot, device_function, exp2, shuffle, shuffle_xor, sync_warp
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, f32 = np.int32, np.float32

# Where the kernels of this module compile.
ARCHITECTURES = [(9, 0, "a")]

# Parts of the arithmetic: keys between two looks at the maximum, and keys that decode gives to one block.
KEYS = 64
SEGMENT = 1024
# How far, in powers of two, a probability may exceed 1 before the row's reference moves.
RESCALE_THRESHOLD = f32(8.0)
# Rows of a warpgroup's tile.
ROWS = 64
# Most query rows of a unit of decode: more take more registers than a thread has.
ROWS_OF_UNIT = 32
WARPGROUP = 128
# Of a thread of the producers, and of one that computes, where two warpgroups do.
FEW_REGISTERS, MANY_REGISTERS = 56, 224
# Shared memory that a block may use.
SHARED_LIMIT = 227 * 1024 - 64
MINUS_INFINITY = f32(-np.inf)
LN2 = f32(math.log(2.0))
LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """One kernel. element: "float16" or "bfloat16"; groups: consumer warpgroups; stages: tiles of keys under way.

    paired: the two consumers take two query heads of a key head, else neighbouring tokens. paged: keys lie in
    the blocks of a cache. box: keys of one copy, a cache block's tokens or 64. segment: SEGMENT, smaller in tests.
    """

    head_dim: int
    element: str
    groups: int = 2
    stages: int = 3
    paired: bool = True
    paged: bool = False
    box: int = KEYS
    segment: int = SEGMENT

    @property
    def rows(self):
        """Tokens of an item."""
        return ROWS if self.paired else ROWS * self.groups

    @property
    def boxes(self):
        """128-byte lines that a row of q, k or v takes."""
        return -(-self.head_dim // 64)

    @property
    def tile_bytes(self):
        """Of 64 rows of q, k or v in shared memory."""
        return self.boxes * BOX_BYTES

    @property
    def kept_bytes(self):
        """For a consumer's sums over the segments before the present one; later its part of out."""
        return max(self.head_dim * ROWS * 4, self.tile_bytes)

    @property
    def shared_bytes(self):
        """Dynamic shared memory, 1024 of it for aligning the start."""
        return self.groups * (self.tile_bytes + self.kept_bytes) + 2 * self.stages * (self.tile_bytes + 16) + 16 + 1024


@device_function
def tokens_of(sequence, cu_seqlens, contexts, sequences, group, few, paged):
    """How many query tokens of a sequence this kernel works on; 0 beyond the last sequence.

    Of a paged batch, sequences with at most `few` rows a key head and those without keys are decode's.
    """
    tokens = i32(0)
    if sequence < sequences:
        tokens = i32(cu_seqlens[sequence + 1] - cu_seqlens[sequence])
        if paged and (i32(tokens * group) <= few or contexts[sequence] == 0):
            tokens = i32(0)
    return tokens


@device_function
def longer_than(tokens, cu_seqlens, contexts, sequences, group, few, paged, lane):
    """How many sequences have more than `tokens` query tokens; called by a warp."""
    count, first = i32(0), i32(0)
    while first < sequences:
        mine = tokens_of(i32(first + lane), cu_seqlens, contexts, sequences, group, few, paged)
        count = i32(count + cuda.popc(ballot(mine > tokens)))
        first = i32(first + 32)
    return count


@device_function
def longer_one(rank, tokens, cu_seqlens, contexts, sequences, group, few, paged, lane):
    """The index of the sequence with more than `tokens` query tokens before which there are `rank` others."""
    found, first = i32(0), i32(0)
    while first < sequences:
        longer = tokens_of(i32(first + lane), cu_seqlens, contexts, sequences, group, few, paged) > tokens
        mask = ballot(longer)
        before = i32(cuda.popc(np.int64(mask) & ~(np.int64(-1) << np.int64(lane))))
        wanted = ballot(longer and before == rank)
        if wanted != 0:
            found = i32(first + cuda.ffs(wanted) - 1)
        rank = i32(rank - cuda.popc(mask))
        first = i32(first + 32)
    return found


@functools.cache
def paged_row_function(box):
    """The device function that looks up where a box of keys lies in the cache. A block is one box, or many of 64."""
    shift = box.bit_length() - 1

    @device_function
    def paged_row(block_tables, block_size, sequence, key, context):
        """The cache's row of a key that begins a box; beyond the last key, of the sequence's last box, to no use."""
        inside = i32(min(key, i32(context - 1)) >> i32(shift))
        if box < KEYS:
            return i32(block_tables[sequence, inside] << i32(shift))
        boxes = block_size >> i32(shift)
        return i32(((block_tables[sequence, inside // boxes] * boxes) + inside % boxes) << i32(shift))

    return paged_row


@device_function
def hide(scores, room):
    """Scores beyond their rows become -inf. room: the first row's position less the key of scores[0]."""
    for i in range(KEYS // 2):
        if i // 4 * 8 + i % 2 - i % 4 // 2 * 8 > room:
            scores[i] = MINUS_INFINITY


@device_function
def moved(reference, largest, c):
    """The value that a row's scores are held against after a tile with this largest score."""
    candidate = largest * c
    return candidate if candidate > reference + RESCALE_THRESHOLD else reference


@device_function
def online_softmax_step(scores, reference, sums, shrink, c):
    """A tile's scores become probabilities relative to their rows' reference, which may move; see the top."""
    for half in range(2):
        largest = scores[2 * half]
        for block in range(KEYS // 8):
            largest = max(largest, max(scores[4 * block + 2 * half], scores[4 * block + 2 * half + 1]))
        largest = max(largest, shuffle_xor(largest, 1))
        largest = max(largest, shuffle_xor(largest, 2))
        new = moved(reference[half], largest, c)
        # A row that has seen no key yet has nothing to subtract; -inf - -inf would be NaN.
        subtracted = new if new > MINUS_INFINITY else f32(0.0)
        shrink[half] = exp2(reference[half] - subtracted)
        reference[half] = new
        for block in range(KEYS // 8):
            for j in range(2):
                i = 4 * block + 2 * half + j
                scores[i] = exp2(cuda.fma(scores[i], c, -subtracted))
        for pair in range(KEYS // 16):
            for j in range(2):
                i = 8 * pair + 2 * half + j
                place = half * 8 + pair * 2 + j
                sums[place] = cuda.fma(sums[place], shrink[half], scores[i] + scores[i + 4])


@device_function
def row_sum(sums, half):
    """The sum over all keys of a row's 32 sums, of which four neighbouring lanes hold eight each."""
    even = (sums[half * 8] + sums[half * 8 + 2]) + (sums[half * 8 + 4] + sums[half * 8 + 6])
    odd = (sums[half * 8 + 1] + sums[half * 8 + 3]) + (sums[half * 8 + 5] + sums[half * 8 + 7])
    total = even + odd
    total += shuffle_xor(total, 1)
    total += shuffle_xor(total, 2)
    return total


@device_function
def merge_weights(kept_max, new_max):
    """(m, a, b) of two parts of a row's keys: the common maximum, and the weights of the first and the second."""
    largest = max(kept_max, new_max)
    reference = largest if largest > MINUS_INFINITY else f32(0.0)
    return largest, exp2(kept_max - reference), exp2(new_max - reference)


@device_function
def log_sum(reference, total):
    """A row's log of the sum of exponentials."""
    return cuda.fma(reference, LN2, math.log(total))


@functools.cache
def accumulator_functions(head_dim):
    """(scale, keep, merge): the device functions for a thread's sums of values, four for each eight columns."""
    blocks = head_dim // 8

    @device_function
    def scale(acc, factors):
        """Multiply each of a thread's two rows by its factor."""
        for block in range(blocks):
            for i in range(4):
                acc[4 * block + i] *= factors[i // 2]

    @device_function
    def keep(kept, acc, total_reference, total_sum, reference, sums):
        """The first segment becomes the total: acc at `kept`, a thread's place in shared memory."""
        for half in range(2):
            total_reference[half], total_sum[half] = reference[half], sums[half]
        for block in range(blocks):
            i = 4 * block
            store_four(kept + block * (WARPGROUP * 16), acc[i], acc[i + 1], acc[i + 2], acc[i + 3])

    @device_function
    def merge(kept, acc, total_reference, total_sum, reference, sums, last):
        """Add a segment to the total, which goes to `kept`, or, after the last segment, to acc."""
        weight = cuda.local.array(4, np.float32)
        for half in range(2):
            largest, a, b = merge_weights(total_reference[half], reference[half])
            total_reference[half] = largest
            total_sum[half] = cuda.fma(sums[half], b, total_sum[half] * a)
            weight[half], weight[2 + half] = a, b
        for block in range(blocks):
            i = 4 * block
            first, second, third, fourth = load_four(kept + block * (WARPGROUP * 16))
            first = cuda.fma(acc[i], weight[2], first * weight[0])
            second = cuda.fma(acc[i + 1], weight[2], second * weight[0])
            third = cuda.fma(acc[i + 2], weight[3], third * weight[1])
            fourth = cuda.fma(acc[i + 3], weight[3], fourth * weight[1])
            if last:
                acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = first, second, third, fourth
            else:
                store_four(kept + block * (WARPGROUP * 16), first, second, third, fourth)

    return scale, keep, merge


@functools.cache
def zero_function(boxes):
    """The device function that zeroes the rows of a tile of values from `alive` on; a warpgroup calls it.

    What lies there may be infinite or NaN, and 0 times that is not 0.
    """

    @device_function
    def zero_rows(values, alive, thread):
        row = i32(alive + (thread >> i32(3)))
        while row < KEYS:
            for b in range(boxes):
                target = Address(values + b * BOX_BYTES + row * LINE + (thread & i32(7)) * 16)
                store_four(target, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
            row = i32(row + WARPGROUP // 8)
        fence_proxy_async()

    return zero_rows


@functools.cache
def score_functions(head_dim, element, in_registers):
    """(load, start, wait_all_but_latest, wait_all): q into registers if it stays there, then S = Q K^T of a tile."""
    depth = -(-head_dim // 16) * 16
    begin, all_but_latest, all_ = wgmma(KEYS, element, depth=depth, registers=in_registers)

    @device_function
    def load_registers(q, place, warp, lane):
        row = warp * i32(16) + (lane & i32(15))
        for step in range(depth // 16):
            chunk = i32(step % 4 * 2) + (lane >> i32(4))
            words = ldmatrix_x4(
                Address(place + step // 4 * BOX_BYTES + row * i32(LINE) + ((chunk ^ (row & i32(7))) << i32(4)))
            )
            for i in range(4):
                q[4 * step + i] = words[i]

    @device_function
    def start_registers(scores, q, place, keys):
        begin(scores, q, smem_descriptor(keys), i32(0))

    @device_function
    def load_nothing(q, place, warp, lane):
        pass

    @device_function
    def start_shared(scores, q, place, keys):
        begin(scores, smem_descriptor(place), smem_descriptor(keys), i32(0))

    @device_function
    def all_but_latest_shared(scores, q):
        all_but_latest(scores)

    @device_function
    def all_shared(scores, q):
        all_(scores)

    if in_registers:
        return load_registers, start_registers, all_but_latest, all_
    return load_nothing, start_shared, all_but_latest_shared, all_shared


@specialize
def attention_sm90_kernel(tile):
    """The kernel of a Tile."""
    head_dim, element, groups, stages, paired, paged, box, segment = tile
    rows, boxes, tile_bytes, kept_bytes = tile.rows, tile.boxes, tile.tile_bytes, tile.kept_bytes
    copies = KEYS // box
    # Tiles of which 32 lanes know the cache's rows. Of boxes of 64 keys there is one a tile, looked up when due: a
    # producer has no registers left for more.
    tiles_known, several = 32 // copies, copies > 1
    segment_tiles = segment // KEYS
    accumulators, score_count, pair_count = head_dim // 2, KEYS // 2, KEYS // 4
    # More columns leave no registers for q.
    in_registers = head_dim <= 128
    words = -(-head_dim // 16) * 4 if in_registers else 1
    # stmatrix stores 16 columns at a time.
    staged = head_dim % 16 == 0
    load_q, start_scores, wait_scores, wait_only_scores = score_functions(head_dim, element, in_registers)
    start_values, _, wait_values = wgmma(head_dim, element, b_mn_major=True, registers=True)
    scale, keep, merge = accumulator_functions(head_dim)
    setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(FEW_REGISTERS, False), setmaxnreg(MANY_REGISTERS, True)
    zero_rows, pack_two, paged_row = zero_function(boxes), cvt_pack(element), paged_row_function(box)

    @cuda.jit(launch_bounds=((groups + 1) * WARPGROUP, 1))
    def attention_sm90_kernel(
        q_map, k_map, v_map, out_map, out, lse, cu_seqlens, contexts, block_tables, block_size, group, levels, few, c
    ):
        """A block works on items: `rows` tokens and `groups` or one query heads of a sequence.

        out (N, H E / 2), pairs of elements; lse (H, N), or empty if not wanted; contexts (B,) and block_tables,
        empty if not paged. group: H / HK; levels: items that the longest sequence makes of a head. Shared
        memory: q, what consumers keep, rings of tiles of k and v, then the barriers.
        """
        info = cuda.shared.array(8, np.int32)
        thread = i32(cuda.threadIdx.x)
        warpgroup = warp_uniform(thread >> i32(7))
        lane = thread & i32(31)
        q_place = Address((shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024)
        kept_place = Address(q_place + groups * tile_bytes)
        k_place = Address(kept_place + groups * kept_bytes)
        v_place = Address(k_place + stages * tile_bytes)
        q_full = Address(v_place + stages * tile_bytes)
        q_empty, k_full = Address(q_full + 8), Address(q_full + 16)
        k_empty, v_full = Address(k_full + stages * 8), Address(k_full + stages * 16)
        v_empty = Address(k_full + stages * 24)
        if thread == 0:
            mbarrier_init(q_full, 1)
            mbarrier_init(q_empty, groups * WARPGROUP)
            for stage in range(stages):
                mbarrier_init(k_full + stage * 8, 1)
                mbarrier_init(k_empty + stage * 8, groups)
                mbarrier_init(v_full + stage * 8, 1)
                mbarrier_init(v_empty + stage * 8, groups)
            mbarrier_init_fence()
        cuda.syncthreads()
        if warpgroup == 0:
            if groups > 1:
                setmaxnreg_dec()
            if thread < 64:
                # Two producers, of keys and of values, find the same items in the same order. The first tells the
                # consumers, and brings q.
                brings_k, is_value = thread < 32, thread >> i32(5)
                q_source, k_source, v_source = (
                    tensor_map_address(q_map),
                    tensor_map_address(k_map),
                    tensor_map_address(v_map),
                )
                sequences = i32(cu_seqlens.shape[0] - 1)
                units = i32(out.shape[1] * 2 // head_dim)
                if paired:
                    units = units // i32(groups)
                # Which box of a tile this lane brings.
                part, column_box = lane % i32(copies), lane // i32(copies)
                source = k_source if brings_k else v_source
                place_of_ring = Address(k_place + is_value * (stages * tile_bytes))
                target_of_ring = Address(place_of_ring + column_box * BOX_BYTES + part * (box * LINE))
                tile_full = Address(k_full + is_value * (2 * stages * 8))
                tile_empty = Address(tile_full + stages * 8)
                level = i32(levels - 1)
                passed = i32(0)
                alive = longer_than(i32(level * rows), cu_seqlens, contexts, sequences, group, few, paged, lane)
                # Waiting for the parity opposite to a barrier's first phase returns at once: all is empty.
                stage, parity, q_parity = i32(0), i32(1), i32(1)
                round_start, place = i32(0), i32(cuda.blockIdx.x)
                while level >= 0:
                    # Every other round goes through the blocks backwards, so that no block gets all the longest.
                    index = i32(round_start + place)
                    round_start = i32(round_start + cuda.gridDim.x)
                    place = i32(cuda.gridDim.x - 1 - place)
                    while level >= 0 and index >= i32(passed + alive * units):
                        passed = i32(passed + alive * units)
                        level = i32(level - 1)
                        if level >= 0:
                            alive = longer_than(
                                i32(level * rows), cu_seqlens, contexts, sequences, group, few, paged, lane
                            )
                    if brings_k:
                        mbarrier_wait(q_empty, q_parity)
                    q_parity ^= i32(1)
                    if level >= 0:
                        rank = i32(i32(index - passed) // units)
                        head = i32(i32(index - passed) % units)
                        if paired:
                            head = i32(head * groups)
                        first = i32(level * rows)
                        sequence = longer_one(rank, first, cu_seqlens, contexts, sequences, group, few, paged, lane)
                        start = cu_seqlens[sequence]
                        length = i32(cu_seqlens[sequence + 1] - start)
                        context = contexts[sequence] if paged else length
                        tiles = i32(i32(context - length + min(i32(first + rows), length) - 1) // i32(KEYS) + 1)
                        if brings_k and lane == 0:
                            info[0] = tiles
                            info[1] = head
                            info[2] = start + first
                            info[3] = context - length + first
                            info[4] = length - first
                            info[5] = context - (tiles - 1) * KEYS
                            mbarrier_expect_tx(q_full, groups * tile_bytes)
                            for consumer in range(groups):
                                for b in range(boxes):
                                    tma_load_3d(
                                        q_place + consumer * tile_bytes + b * BOX_BYTES,
                                        q_source,
                                        b * 64,
                                        head + consumer if paired else head,
                                        start + first if paired else start + first + consumer * ROWS,
                                        q_full,
                                    )
                        kv_head = i32(head // group)
                        row, known, upcoming, at = i32(start + part * box), i32(0), i32(0), i32(part)
                        key = i32(lane * box) if several else i32(0)
                        if paged and several:
                            upcoming = paged_row(block_tables, block_size, sequence, key, context)
                        while tiles > 0:
                            if paged and several:
                                if at == part:
                                    # The rows of the next tiles are looked up before they are needed.
                                    known = upcoming
                                    if tiles > tiles_known:
                                        key = i32(key + 32 * box)
                                        upcoming = paged_row(block_tables, block_size, sequence, key, context)
                                row = i32(shuffle(known, at))
                                at = i32((at + copies) & i32(31))
                            elif paged:
                                row = paged_row(block_tables, block_size, sequence, key, context)
                                key = i32(key + KEYS)
                            mbarrier_wait(Address(tile_empty + stage * 8), parity)
                            full = Address(tile_full + stage * 8)
                            if lane == 0:
                                mbarrier_expect_tx(full, tile_bytes)
                            sync_warp()
                            if lane < boxes * copies:
                                target = Address(target_of_ring + stage * tile_bytes)
                                tma_load_3d(target, source, column_box * i32(64), kv_head, row, full)
                            stage = i32(stage + 1)
                            if stage == stages:
                                stage = i32(0)
                                parity ^= i32(1)
                            row = i32(row + KEYS)
                            tiles = i32(tiles - 1)
                    elif brings_k and lane == 0:
                        info[0] = i32(0)
                        mbarrier_arrive(q_full)
        else:
            if groups > 1:
                setmaxnreg_inc()
            consumer = i32(warpgroup - 1)
            warp, first_thread = (thread >> i32(5)) & i32(3), (thread & i32(127)) == 0
            # This thread's rows are `line` and line + 8 of its warpgroup's.
            line = i32(warp * 16 + (lane >> i32(2)))
            q_place = Address(q_place + consumer * tile_bytes)
            kept_place = Address(kept_place + consumer * kept_bytes)
            kept = Address(kept_place + (thread & i32(127)) * 16)
            acc = cuda.local.array(accumulators, np.float32)
            scores = cuda.local.array(score_count, np.float32)
            sums = cuda.local.array(16, np.float32)
            q = cuda.local.array(words, np.int32)
            p = cuda.local.array(pair_count, np.int32)
            reference, shrink = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
            segment_reference, segment_sum = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
            total_reference, total_sum = cuda.local.array(2, np.float32), cuda.local.array(2, np.float32)
            for i in range(accumulators):
                acc[i] = f32(0.0)
            for i in range(score_count):
                scores[i] = f32(0.0)
            with_lse = lse.shape[0] > 0
            k_stage, k_parity, v_stage, v_parity, q_parity = i32(0), i32(0), i32(0), i32(0), i32(0)
            working = True
            while working:
                mbarrier_wait(q_full, q_parity)
                q_parity ^= i32(1)
                tiles, head, row, position, alive, alive_keys = info[0], info[1], info[2], info[3], info[4], info[5]
                working = tiles > 0
                if working:
                    if paired:
                        head = i32(head + consumer)
                    else:
                        row = i32(row + consumer * ROWS)
                        position = i32(position + consumer * ROWS)
                        alive = i32(alive - consumer * ROWS)
                    room = i32(position + line - 2 * (lane & i32(3)))
                    load_q(q, q_place, warp, lane)
                    if in_registers:
                        mbarrier_arrive(q_empty)
                    for half in range(2):
                        reference[half] = MINUS_INFINITY
                    for i in range(16):
                        sums[i] = f32(0.0)

                    # The first tile's probabilities.
                    mbarrier_wait(Address(k_full + k_stage * 8), k_parity)
                    start_scores(scores, q, q_place, Address(k_place + k_stage * tile_bytes))
                    wait_only_scores(scores, q)
                    if first_thread:
                        mbarrier_arrive(Address(k_empty + k_stage * 8))
                    k_stage = i32(k_stage + 1)
                    if k_stage == stages:
                        k_stage = i32(0)
                        k_parity ^= i32(1)
                    if position < KEYS - 1:
                        hide(scores, room)
                    online_softmax_step(scores, reference, sums, shrink, c)
                    for i in range(pair_count):
                        p[i] = pack_two(scores[2 * i], scores[2 * i + 1])
                    # Whether the accumulators hold something.
                    keep_acc = i32(0)
                    index = i32(1)
                    if index < tiles:
                        mbarrier_wait(Address(k_full + k_stage * 8), k_parity)
                    while index < tiles:
                        # Scores of this tile and values of the one before go to the tensor cores together.
                        start_scores(scores, q, q_place, Address(k_place + k_stage * tile_bytes))
                        mbarrier_wait(Address(v_full + v_stage * 8), v_parity)
                        start_values(acc, p, smem_descriptor(Address(v_place + v_stage * tile_bytes)), keep_acc)
                        wait_scores(scores, q)
                        if first_thread:
                            mbarrier_arrive(Address(k_empty + k_stage * 8))
                        k_stage = i32(k_stage + 1)
                        if k_stage == stages:
                            k_stage = i32(0)
                            k_parity ^= i32(1)
                        begins = (index & i32(segment_tiles - 1)) == 0
                        if begins:
                            for half in range(2):
                                segment_reference[half] = reference[half]
                                segment_sum[half] = row_sum(sums, half)
                                reference[half] = MINUS_INFINITY
                            for i in range(16):
                                sums[i] = f32(0.0)
                        if i32(index * KEYS + (KEYS - 1)) > position:
                            hide(scores, i32(room - index * KEYS))
                        online_softmax_step(scores, reference, sums, shrink, c)
                        index = i32(index + 1)
                        # The next keys are waited for here because ptxas moves nothing across such a wait: the wait
                        # for the values below would otherwise go above the exponentials, which it is to overlap with.
                        if index < tiles:
                            mbarrier_wait(Address(k_full + k_stage * 8), k_parity)
                        wait_values(acc, p)
                        if first_thread:
                            mbarrier_arrive(Address(v_empty + v_stage * 8))
                        v_stage = i32(v_stage + 1)
                        if v_stage == stages:
                            v_stage = i32(0)
                            v_parity ^= i32(1)
                        keep_acc = i32(1)
                        if begins:
                            keep_acc = i32(0)
                            if index == segment_tiles + 1:
                                # The copy engine must have read the last item's out.
                                if first_thread:
                                    bulk_wait_group_read()
                                named_barrier_sync(1 + consumer, WARPGROUP)
                                keep(kept, acc, total_reference, total_sum, segment_reference, segment_sum)
                            else:
                                merge(kept, acc, total_reference, total_sum, segment_reference, segment_sum, False)
                        if ballot(shrink[0] != f32(1.0) or shrink[1] != f32(1.0)) != 0:
                            scale(acc, shrink)
                        for i in range(pair_count):
                            p[i] = pack_two(scores[2 * i], scores[2 * i + 1])

                    # The last tile's values.
                    if not in_registers:
                        mbarrier_arrive(q_empty)
                    mbarrier_wait(Address(v_full + v_stage * 8), v_parity)
                    if alive_keys < KEYS:
                        zero_rows(Address(v_place + v_stage * tile_bytes), alive_keys, thread & i32(127))
                        named_barrier_sync(1 + consumer, WARPGROUP)
                    start_values(acc, p, smem_descriptor(Address(v_place + v_stage * tile_bytes)), keep_acc)
                    for half in range(2):
                        segment_sum[half] = row_sum(sums, half)
                    wait_values(acc, p)
                    if first_thread:
                        mbarrier_arrive(Address(v_empty + v_stage * 8))
                    v_stage = i32(v_stage + 1)
                    if v_stage == stages:
                        v_stage = i32(0)
                        v_parity ^= i32(1)
                    if tiles > segment_tiles:
                        merge(kept, acc, total_reference, total_sum, reference, segment_sum, True)
                    else:
                        for half in range(2):
                            total_reference[half], total_sum[half] = reference[half], segment_sum[half]
                    for half in range(2):
                        shrink[half] = f32(1.0) / total_sum[half]
                        if with_lse and (lane & i32(3)) == 0 and line + half * 8 < alive:
                            lse[head, row + line + half * 8] = log_sum(total_reference[half], total_sum[half])
                    scale(acc, shrink)
                    if staged and alive >= ROWS:
                        # The copy engine must have read the last item's out, and all threads what they kept.
                        if first_thread:
                            bulk_wait_group_read()
                        named_barrier_sync(1 + consumer, WARPGROUP)
                        stored_line = i32(warp * 16 + (lane & i32(15)))
                        for block in range(head_dim // 16):
                            chunk = i32(block % 4 * 2) + (lane >> i32(4))
                            stmatrix_x4(
                                kept_place
                                + block // 4 * BOX_BYTES
                                + stored_line * i32(LINE)
                                + ((chunk ^ (stored_line & i32(7))) << i32(4)),
                                pack_two(acc[block * 8], acc[block * 8 + 1]),
                                pack_two(acc[block * 8 + 2], acc[block * 8 + 3]),
                                pack_two(acc[block * 8 + 4], acc[block * 8 + 5]),
                                pack_two(acc[block * 8 + 6], acc[block * 8 + 7]),
                            )
                        fence_proxy_async()
                        named_barrier_sync(1 + consumer, WARPGROUP)
                        if first_thread:
                            for b in range(boxes):
                                tma_store_3d(tensor_map_address(out_map), b * 64, head, row, kept_place + b * BOX_BYTES)
                            bulk_commit_group()
                    else:
                        # The rows behind the sequence's last are another sequence's.
                        for half in range(2):
                            if line + half * 8 < alive:
                                for block in range(head_dim // 8):
                                    i = block * 4 + half * 2
                                    out[row + line + half * 8, head * (head_dim // 2) + block * 4 + (lane & i32(3))] = (
                                        pack_two(acc[i], acc[i + 1])
                                    )
            if first_thread:
                bulk_wait_group()

    return attention_sm90_kernel


@functools.cache
def processors():
    """How many SMs the GPU has; 1 in the simulator."""
    if device.name() != "cuda":
        return 1
    import cupy

    return cupy.cuda.Device().attributes["MultiProcessorCount"]


def takes(element, head_dim, group):
    """Whether the modules for Hopper compute attention of such heads: 16-bit, of 16, 24, ... or 256 columns.

    group: query heads of a key head, at most the rows of a unit of decode.
    """
    return element in ELEMENTS and head_dim % 8 == 0 and 16 <= head_dim <= 256 and group <= ROWS_OF_UNIT


def best_tile(head_dim, element, group, paged=False, box=KEYS):
    """The Tile for heads of this size; group: query heads of a key head."""
    tile = Tile(head_dim, element, 2 if head_dim <= 128 else 1, 2, group % 2 == 0 or head_dim > 128, paged, box)
    stages = (SHARED_LIMIT - tile.shared_bytes) // (2 * (tile.tile_bytes + 16)) + tile.stages
    return tile._replace(stages=min(stages, 4))


_nothing = {}


def nothing(dimensions, dtype=np.int32):
    """An array without elements that stands for an argument left out."""
    key = dimensions, dtype
    if key not in _nothing:
        _nothing[key] = device.xp().zeros((0,) * dimensions, dtype)
    return _nothing[key]


def attention_sm90(q, k, v, cu_seqlens, max_seqlen, scale, out, lse, tile=None):
    """As the operator attention, for arrays that `takes` accepts and scale > 0; tile: another than best_tile's."""
    tokens, heads, head_dim = q.shape
    group = heads // k.shape[1]
    tile = tile or best_tile(head_dim, q.dtype.name, group)
    levels = -(-max_seqlen // tile.rows)
    items = levels * (cu_seqlens.shape[0] - 1) * (heads // tile.groups if tile.paired else heads)
    if not tokens or not items:
        return
    launch(
        attention_sm90_kernel(tile), min(items, processors()), (tile.groups + 1) * WARPGROUP,
        *(tensor_map(x, ROWS, 1, 64) for x in (q, k, v, out)),
        out.reshape(tokens, -1).view(np.int32), lse, cu_seqlens, nothing(1), nothing(2), np.int32(1),
        np.int32(group), np.int32(levels), np.int32(0), float(scale * LOG2_E),
        shared=tile.shared_bytes,
    )  # fmt: skip
