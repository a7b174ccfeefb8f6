"""The gradient of causal packed attention on Hopper's tensor cores, in one pass over the scores, without float atomics.

Formulas and shapes as in kernels/attention_backward.py; inputs float16 or bfloat16, accumulators float32.

Design. A block owns 128 keys of a key head and passes over the queries that see them, from the last to the first,
head by head of the group:

    S^T = K Q^T    dP^T = V dO^T    P = exp2(S - lse)    dS = P (dP - delta)
    dV += P^T dO   dK += dS^T Q     dq of the queries += dS K

Two consumer warpgroups own 64 keys each, with the rows of dK and dV in registers; S^T and dP^T come out of the tensor
cores in just the layout in which P^T and dS^T go into the products for dV and dK as left operands, so these never leave
the registers. dS goes through shared memory once, because dq sums over the keys of both warpgroups. That leaves dq,
whose sum runs over blocks. Weighed for 2 x 16384 tokens, 16 and 8 heads of 128 (5.5 TFLOP by the usual count of five
products; an H200 does 750 TFLOP/s):

    dq in a kernel of its own       7 products instead of 5, twice the exponentials: at best 5/7 of the peak, 535
    partial dq of each block        17 GB of them, and 4 GB at 4 x 4096
    dq added by atomics             5 products; the order of the sum is chance
    dq added in turns (taken)       5 products; the same 17 GB are added to 0.27 GB of float32 sums, mostly in the
                                    second-level cache: 1.2 TB/s at 390 TFLOP/s

In turns: blocks add to the float32 sums of a query tile in ascending order of their keys, and a counter for each
(query tile, head) says whose turn it is. The first block stores instead of adding, so nothing is cleared before. Two
warps do nothing but wait for turns and start the additions, in runs of 32 KB by the copy engine, so the products go on:
a block that must wait delays its consumers only when it is more than a step late. Who is waited for runs already, on
any grid, because blocks take tickets, and a block's ticket is later than those of the keys before its own.

The order of the tickets decides the speed. A step of 64 queries x 128 keys brings 32 KB of q and dout and reads and
writes 32 KB of sums, in some 2.2 us: on 132 SMs 5.9 TB/s, more than the memory gives. Blocks of one chain (a key head
of a sequence) that run at the same time share these bytes in the second-level cache, if they are at the same queries;
they are, since all begin with the last. But the n-th of them adds n hand-overs later, a microsecond or so each. So
tickets go through 32 chains, one key tile of each after the other, then to the next 32: four blocks of each chain run
together, and the first keys, whose blocks take the most steps, come first; the last to run are short.

Work of a step at 128 columns: 5 x 512 cycles of the tensor cores; 512 of the exponential unit and 840 instructions a
scheduler beside them; shared memory moves 370 KB, 2,900 cycles at 128 bytes, which is the bound: 88 % of the peak.
Registers of a consumer thread: 128 for dK and dV, 32 for scores, 32 for dP^T and then dq, 32 for P and dS in 16 bits.

Queries beyond the end of a sequence have lse = infinity, hence P = dS = 0; what their rows of q and dout hold (the
next sequence) is multiplied by zero. Keys beyond the end see no query. Rows of dk and dv beyond it are not written.

Three launches: rows (delta, lse and cleared counters, padded to whole query tiles), the products, and dq to its dtype.
Sources: Dao 2023 (FlashAttention-2), algorithm 2; Shah et al. 2024 (FlashAttention-3), section 3.
"""

import math
from typing import NamedTuple

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.hopper import (
    BOX_BYTES,
    LINE,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_commit,
    bulk_load_heads,
    bulk_wait,
    bulk_wait_read,
    fence_shared_to_bulk,
    fewer_registers,
    load_pair,
    more_registers,
    operand,
    pack,
    shared_address,
    store_four,
    store_matrices,
    sync_group,
    tensor_map,
    tensor_map_address,
    unpack,
    warp_uniform,
)
from rlnumba.kernels.hopper_registers import (
    await_turn,
    give_turn,
    group_product,
    group_wait,
    run_add,
    run_load,
    run_store,
)
from rlnumba.kernels.instructions import exp2, warp_sum
from rlnumba.kernels.launch import kernel_factory, launch

i32, i64, f32 = np.int32, np.int64, np.float32

ARCHITECTURES = [(9, 0, "a")]

WARPGROUP = 128
# Keys of a block: 64 for each of two consumer warpgroups. Queries of a step.
KEYS = 128
QUERIES = 64
LOG2_E = f32(math.log2(math.e))
MINUS_INFINITY = f32(-math.inf)
# Rows whose loads a warp of attention_rows_kernel has under way at once.
ROWS_AT_ONCE = 4


class Tile(NamedTuple):
    """How the kernels of this module work.

    element: "float16" or "bfloat16". stages: how many tiles of q and of dout are on their way (0: as many as fit).
    ahead: the scores of the next step are begun before dq of this one is taken. chains: how many key heads of
    sequences are worked on at the same time; on 132 SMs, 32 of them means four blocks of each.
    """

    head_dim: int
    element: str
    stages: int = 0
    ahead: bool = True
    chains: int = 32

    @property
    def boxes(self):
        """Swizzled boxes of 64 columns that a row takes."""
        return -(-self.head_dim // 64)

    @property
    def columns(self):
        """Columns that the tensor cores multiply; zeros beyond head_dim."""
        return -(-self.head_dim // 16) * 16

    @property
    def depth(self):
        return self.stages or 4 // self.boxes

    @property
    def dq_columns(self):
        """Columns of dq that a consumer multiplies: one of two boxes, or half of the only one."""
        return 64 if self.boxes == 2 else self.columns // 2

    @property
    def dq_count(self):
        """Elements of dq that a consumer multiplies in a step."""
        return QUERIES * self.dq_columns

    @property
    def shared_bytes(self):
        keys, queries, scores = self.boxes * KEYS * LINE, self.boxes * QUERIES * LINE, QUERIES * KEYS * 2
        stages = self.depth * (2 * (queries + 4 * QUERIES) + 32)
        return 2 * keys + stages + 2 * scores + 2 * 4 * self.dq_count + 40 + 1024


def supports(head_dim):
    """Whether the kernels of this module take heads of this size."""
    return head_dim % 8 == 0 and 0 < head_dim <= 128


@kernel_factory
def attention_rows_kernel(tile):
    """The kernel of a Tile that prepares what belongs to a query row."""
    head_dim, element = tile.head_dim, tile.element
    words = head_dim // 2
    parts = -(-words // 32)
    loads = ROWS_AT_ONCE * parts
    unpack_two = unpack(element)

    @cuda.jit
    def attention_rows_kernel(dout, out, lse, cu_seqlens, rows, counters, tickets):
        """rows[t, h] = (lse, delta) of the rows of query tile t and head h; lse times log2(e), infinity beyond the end.

        dout, out (N, H, E / 2): pairs of elements. A block owns a tile of a head and clears its counter; a warp
        owns ROWS_AT_ONCE rows at a time, a lane every 32nd pair, added by a butterfly.
        """
        heads = out.shape[1]
        sequence, head = cuda.blockIdx.z, cuda.blockIdx.y
        start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        first = start + i32(cuda.blockIdx.x) * i32(QUERIES)
        place = i64(start // QUERIES + sequence + cuda.blockIdx.x) * heads + head
        thread = cuda.threadIdx.x
        if thread == 0 and head == 0 and sequence == 0 and cuda.blockIdx.x == 0:
            tickets[0] = 0
        if first >= end:
            return
        if thread == 0:
            counters[place] = 0
        lane = thread % 32
        sums = cuda.local.array(ROWS_AT_ONCE, np.float32)
        left = cuda.local.array(loads, np.int32)
        right = cuda.local.array(loads, np.int32)
        for r in range(thread // 32 * ROWS_AT_ONCE, QUERIES, 4 * ROWS_AT_ONCE):
            for i in range(ROWS_AT_ONCE):
                token = min(first + r + i, end - 1)
                for part in range(parts):
                    word = min(lane + part * 32, words - 1)
                    left[i * parts + part] = dout[token, head, word]
                    right[i * parts + part] = out[token, head, word]
            for i in range(ROWS_AT_ONCE):
                sums[i] = f32(0.0)
                for part in range(parts):
                    if lane + part * 32 < words:
                        low, high = unpack_two(left[i * parts + part])
                        other_low, other_high = unpack_two(right[i * parts + part])
                        sums[i] += low * other_low + high * other_high
            for i in range(ROWS_AT_ONCE):
                total = warp_sum(sums[i])
                if lane == i:
                    alive = first + r + i < end
                    row_lse = lse[head, min(first + r + i, end - 1)] * LOG2_E
                    rows[place * 2 * QUERIES + r + i] = row_lse if alive else f32(math.inf)
                    rows[(place * 2 + 1) * QUERIES + r + i] = total if alive else f32(0.0)

    return attention_rows_kernel


@kernel_factory
def attention_products_kernel(tile):
    """The kernel of a Tile that computes dk, dv and the sums of dq."""
    head_dim, element, _, ahead, chains_together = tile
    boxes, columns, stages, dq_count = tile.boxes, tile.columns, tile.depth, tile.dq_count
    key_box, query_box = KEYS * LINE, QUERIES * LINE
    key_bytes, query_bytes, row_bytes = boxes * key_box, boxes * query_box, 4 * QUERIES
    ds_bytes = QUERIES * KEYS * 2
    # From the columns of K that the first consumer takes for dq to those of the second.
    dq_offset = key_box if boxes == 2 else columns
    accumulators, score_count, dq_accumulators = columns // 2, QUERIES // 2, tile.dq_columns // 2
    word_count = score_count // 2
    # S^T = K Q^T and dP^T = V dO^T, dV += P^T dO and dK += dS^T Q, dq += dS K.
    start_scores = group_product(QUERIES, element, columns // 16, "k", "k", False, key_box, query_box)
    start_keys = group_product(columns, element, QUERIES // 16, "registers", "mn", True)
    start_dq = group_product(tile.dq_columns, element, KEYS // 16, "mn", "mn", False)
    wait_scores_1, wait_scores = group_wait(score_count, 1), group_wait(score_count, 0)
    wait_keys_2, wait_keys_1 = group_wait(accumulators, 2), group_wait(accumulators, 1)
    wait_dq = group_wait(dq_accumulators, 1 if ahead else 0)
    pack_two = pack(element)

    @cuda.jit(launch_bounds=(3 * WARPGROUP, 1))
    def attention_products_kernel(
        q_map, k_map, v_map, dout_map, rows, cu_seqlens, heads, max_seqlen, scale, tickets, counters, dq_sums, dk, dv
    ):
        """dk, dv (N, HK, E / 2, pairs of elements) and the float32 sums of dq, a run for each (query tile, head,
        consumer), as the consumer's threads hold them: float 4 t + c of each 512 is accumulator c of thread t.

        Shared memory: K, V [box | key], then for each stage Q [box | query], dO likewise, buffers of dS [key], the
        consumers' dq, lse and delta for each stage, barriers. Warps of the first warpgroup: 0 brings tiles, 1 and 2
        give dq away. Step s of a block is query tile s // group from the last, head s % group.
        """
        thread = i32(cuda.threadIdx.x)
        role = warp_uniform(thread >> i32(7))
        k_tile = (shared_address(cuda.shared.array(0, np.uint8)) + i32(1023)) & i32(-1024)
        v_tile = k_tile + i32(key_bytes)
        q_tiles = v_tile + i32(key_bytes)
        dout_tiles = q_tiles + i32(stages * query_bytes)
        ds_tiles = dout_tiles + i32(stages * query_bytes)
        dq_tiles = ds_tiles + i32(2 * ds_bytes)
        lse_rows = dq_tiles + i32(8 * dq_count)
        delta_rows = lse_rows + i32(stages * row_bytes)
        k_full = delta_rows + i32(stages * row_bytes)
        v_full = k_full + i32(8)
        dq_full = v_full + i32(8)
        dq_empty = dq_full + i32(16)
        q_full = dq_empty + i32(8)
        q_empty = q_full + i32(8 * stages)
        dout_full = q_empty + i32(8 * stages)
        dout_empty = dout_full + i32(8 * stages)
        ticket = cuda.shared.array(1, np.int32)
        if thread == 0:
            ticket[0] = cuda.atomic.add(tickets, 0, 1)
            barrier_init(k_full, 1)
            barrier_init(v_full, 1)
            for own in range(2):
                barrier_init(dq_full + own * 8, 2 * WARPGROUP)
            barrier_init(dq_empty, 1)
            # A stage is empty when all warps of the consumers say so.
            for stage in range(stages):
                barrier_init(q_full + stage * 8, 1)
                barrier_init(q_empty + stage * 8, 8)
                barrier_init(dout_full + stage * 8, 1)
                barrier_init(dout_empty + stage * 8, 8)
            barrier_init_fence()
        cuda.syncthreads()

        kv_heads = i32(dk.shape[1])
        chains = kv_heads * i32(cu_seqlens.shape[0] - 1)
        order = warp_uniform(ticket[0])
        key_tiles = i32((max_seqlen + (KEYS - 1)) // KEYS)
        first_chain = i32(order // (key_tiles * chains_together) * chains_together)
        together = min(i32(chains_together), chains - first_chain)
        order -= first_chain * key_tiles
        chain = first_chain + order % together
        sequence, kv_head = chain // kv_heads, chain % kv_heads
        start = cu_seqlens[sequence]
        length = min(cu_seqlens[sequence + 1] - start, i32(max_seqlen))
        # Counted from the sequence's end, so that of all sequences the blocks with the most steps come first.
        key_tile = i32((length + (KEYS - 1)) // KEYS - key_tiles + order // together)
        if key_tile < 0:
            return
        group = i32(heads) // kv_heads
        first_key = key_tile * i32(KEYS)
        first_row = start + first_key
        query_tiles = i32((length - first_key + (QUERIES - 1)) // QUERIES)
        steps = i32(query_tiles * group)
        # Where rows, counter and sums of the last query tile and first head lie.
        place = i64(start // QUERIES + sequence + first_key // QUERIES + query_tiles - 1) * heads + kv_head * group

        if role == 0:
            fewer_registers()
            if thread == 0:
                q, dout = tensor_map_address(q_map), tensor_map_address(dout_map)
                stage, parity, head = i32(0), i32(1), i32(0)
                row = first_row + (query_tiles - i32(1)) * i32(QUERIES)
                barrier_expect(k_full, key_bytes)
                for box in range(boxes):
                    target = k_tile + box * key_box
                    bulk_load_heads(target, tensor_map_address(k_map), box * 64, kv_head, first_row, k_full)
                for step in range(steps):
                    at = (place + head) * (2 * QUERIES)
                    q_head = kv_head * group + head
                    barrier_wait(q_empty + stage * 8, parity)
                    arrived = q_full + stage * 8
                    barrier_expect(arrived, query_bytes + row_bytes)
                    for box in range(boxes):
                        target = q_tiles + stage * query_bytes + box * query_box
                        bulk_load_heads(target, q, box * 64, q_head, row, arrived)
                    run_load(lse_rows + stage * row_bytes, rows, at, QUERIES, arrived)
                    if step == 0:
                        barrier_expect(v_full, key_bytes)
                        for box in range(boxes):
                            target = v_tile + box * key_box
                            bulk_load_heads(target, tensor_map_address(v_map), box * 64, kv_head, first_row, v_full)
                    barrier_wait(dout_empty + stage * 8, parity)
                    arrived = dout_full + stage * 8
                    barrier_expect(arrived, query_bytes + row_bytes)
                    for box in range(boxes):
                        target = dout_tiles + stage * query_bytes + box * query_box
                        bulk_load_heads(target, dout, box * 64, q_head, row, arrived)
                    run_load(delta_rows + stage * row_bytes, rows, at + QUERIES, QUERIES, arrived)
                    stage += i32(1)
                    if stage == stages:
                        stage = i32(0)
                        parity ^= i32(1)
                    head += i32(1)
                    if head == group:
                        head = i32(0)
                        row -= i32(QUERIES)
                        place -= heads
            elif thread == 32 or thread == 64:
                # One warp takes the even steps and one the odd: while one still waits for its sum to be written, the
                # other may wait for its turn.
                own = thread >> i32(6)
                parity, head = i32(0), i32(0)
                for step in range(steps):
                    if step & 1 == own:
                        run = place + head
                        if key_tile > 0:
                            await_turn(counters, run, key_tile)
                        barrier_wait(dq_full + own * 8, parity)
                        parity ^= i32(1)
                        if key_tile > 0:
                            run_add(dq_sums, run * (2 * dq_count), 2 * dq_count, dq_tiles)
                        else:
                            run_store(dq_sums, run * (2 * dq_count), 2 * dq_count, dq_tiles)
                        bulk_commit()
                        bulk_wait_read()
                        barrier_arrive(dq_empty)
                        bulk_wait()
                        give_turn(counters, run, key_tile + 1)
                    head += i32(1)
                    if head == group:
                        head = i32(0)
                        place -= heads
        else:
            more_registers()
            consumer = role - i32(1)
            lane, warp = thread & i32(31), (thread >> i32(5)) & i32(3)
            own_keys = operand(k_tile + consumer * BOX_BYTES)
            own_values = operand(v_tile + consumer * BOX_BYTES)
            dq_keys = operand(k_tile + consumer * dq_offset)
            own_dq = dq_tiles + consumer * (4 * dq_count) + (thread & i32(127)) * 16
            # Of S^T a thread holds keys `key` and key + 8, queries 8 b + pair and the next. To shared memory it
            # helps to write line `line` of dS^T, even or odd chunks.
            key = consumer * i32(64) + warp * i32(16) + (lane >> i32(2))
            pair = (lane & i32(3)) * i32(2)
            line = warp * i32(16) + (lane & i32(15))
            own_ds = ds_tiles + consumer * BOX_BYTES + line * LINE
            scores = cuda.local.array(score_count, np.float32)
            gradients = cuda.local.array(score_count, np.float32)
            p_words = cuda.local.array(word_count, np.int32)
            ds_words = cuda.local.array(word_count, np.int32)
            dk_acc = cuda.local.array(accumulators, np.float32)
            dv_acc = cuda.local.array(accumulators, np.float32)
            dq_acc = cuda.local.array(dq_accumulators, np.float32)
            for i in range(accumulators):
                dk_acc[i] = f32(0.0)
                dv_acc[i] = f32(0.0)
            scale_log2 = scale * LOG2_E
            stage, parity, buffer, dq_parity = i32(0), i32(0), i32(0), i32(1)
            barrier_wait(k_full, 0)
            if ahead:
                barrier_wait(q_full, 0)
                start_scores(scores, own_keys, operand(q_tiles))
                wait_scores(scores)
            barrier_wait(v_full, 0)
            for step in range(steps):
                q_tile = operand(q_tiles + stage * query_bytes)
                dout_tile = operand(dout_tiles + stage * query_bytes)
                if not ahead:
                    barrier_wait(q_full + stage * 8, parity)
                    start_scores(scores, own_keys, q_tile)
                barrier_wait(dout_full + stage * 8, parity)
                start_scores(gradients, own_values, dout_tile)
                if not ahead:
                    wait_scores_1(scores)
                if steps - step <= 2 * group:
                    # The last two query tiles have the positions of the keys: a key is seen from its own on.
                    first = i32(pair - key + (QUERIES if steps - step > group else 0))
                    for block in range(QUERIES // 8):
                        for i in range(4):
                            if first < i32((i >> 1) * 8 - (i & 1) - block * 8):
                                scores[block * 4 + i] = MINUS_INFINITY
                at = lse_rows + stage * row_bytes + pair * 4
                for block in range(QUERIES // 8):
                    low, high = load_pair(at + block * 32)
                    i = block * 4
                    scores[i] = exp2(scores[i] * scale_log2 - low)
                    scores[i + 1] = exp2(scores[i + 1] * scale_log2 - high)
                    scores[i + 2] = exp2(scores[i + 2] * scale_log2 - low)
                    scores[i + 3] = exp2(scores[i + 3] * scale_log2 - high)
                for i in range(word_count):
                    p_words[i] = pack_two(scores[2 * i], scores[2 * i + 1])
                wait_scores(gradients)
                start_keys(dv_acc, p_words, dout_tile)
                at = delta_rows + stage * row_bytes + pair * 4
                for block in range(QUERIES // 8):
                    low, high = load_pair(at + block * 32)
                    i = block * 4
                    ds_words[i // 2] = pack_two(
                        scores[i] * (gradients[i] - low), scores[i + 1] * (gradients[i + 1] - high)
                    )
                    ds_words[i // 2 + 1] = pack_two(
                        scores[i + 2] * (gradients[i + 2] - low), scores[i + 3] * (gradients[i + 3] - high)
                    )
                for block in range(QUERIES // 16):
                    chunk = block * 2 + (lane >> i32(4))
                    store_matrices(
                        own_ds + buffer + ((chunk ^ (line & i32(7))) << i32(4)),
                        ds_words[4 * block],
                        ds_words[4 * block + 1],
                        ds_words[4 * block + 2],
                        ds_words[4 * block + 3],
                    )
                start_keys(dk_acc, ds_words, q_tile)
                fence_shared_to_bulk()
                # dS of both is there; and since none comes here before its last dq is done, the other buffer is free.
                sync_group(1, 2 * WARPGROUP)
                start_dq(dq_acc, operand(ds_tiles + buffer), dq_keys)
                buffer ^= i32(ds_bytes)
                wait_keys_2(dv_acc)
                if lane == 0:
                    barrier_arrive(dout_empty + stage * 8)
                wait_keys_1(dk_acc)
                if lane == 0:
                    barrier_arrive(q_empty + stage * 8)
                stage += i32(1)
                if stage == stages:
                    stage = i32(0)
                    parity ^= i32(1)
                if ahead:
                    # After the last step this multiplies an old tile, for nothing.
                    if step + 1 < steps:
                        barrier_wait(q_full + stage * 8, parity)
                    start_scores(scores, own_keys, operand(q_tiles + stage * query_bytes))
                wait_dq(dq_acc)
                barrier_wait(dq_empty, dq_parity)
                dq_parity ^= i32(1)
                for i in range(dq_accumulators // 4):
                    store_four(
                        own_dq + i * 2048, dq_acc[4 * i], dq_acc[4 * i + 1], dq_acc[4 * i + 2], dq_acc[4 * i + 3]
                    )
                fence_shared_to_bulk()
                barrier_arrive(dq_full + (step & 1) * 8)
                if ahead:
                    # Products in flight from one turn of the loop to the next make ptxas wait for each of them.
                    wait_scores(scores)
            for half in range(2):
                token = first_key + key + i32(half * 8)
                if token < length:
                    for block in range(head_dim // 8):
                        i = block * 4 + half * 2
                        word = block * 4 + (lane & i32(3))
                        dk[start + token, kv_head, word] = pack_two(dk_acc[i] * scale, dk_acc[i + 1] * scale)
                        dv[start + token, kv_head, word] = pack_two(dv_acc[i], dv_acc[i + 1])

    return attention_products_kernel


@kernel_factory
def attention_dq_kernel(tile):
    """The kernel of a Tile that rounds dq."""
    head_dim, dq_columns, dq_count = tile.head_dim, tile.dq_columns, tile.dq_count
    words = dq_columns // 2
    stride = words + 1
    pack_two = pack(tile.element)

    @cuda.jit
    def attention_dq_kernel(dq_sums, cu_seqlens, scale, dq):
        """dq (N, H, E / 2, pairs of elements) = scale times its sums; a block owns the part of one consumer.

        A thread takes what its like held in attention_products_kernel; the rows are put together in shared memory.
        """
        staged = cuda.shared.array((QUERIES, stride), np.int32)
        heads = dq.shape[1]
        sequence, consumer, head = cuda.blockIdx.z, cuda.blockIdx.y % 2, cuda.blockIdx.y // 2
        start, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        first = start + i32(cuda.blockIdx.x) * i32(QUERIES)
        if first >= end:
            return
        thread = cuda.threadIdx.x
        place = i64(start // QUERIES + sequence + cuda.blockIdx.x) * heads + head
        at = (place * 2 + consumer) * dq_count + thread * 4
        row, lane = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for block in range(dq_columns // 8):
            here = at + block * 512
            word = block * 4 + lane
            staged[row, word] = pack_two(dq_sums[here] * scale, dq_sums[here + 1] * scale)
            staged[row + 8, word] = pack_two(dq_sums[here + 2] * scale, dq_sums[here + 3] * scale)
        cuda.syncthreads()
        first_word = consumer * words
        for r in range(thread // 32, min(end - first, QUERIES), 4):
            word = thread % 32
            if word < words and first_word + word < head_dim // 2:
                dq[first + r, head, first_word + word] = staged[r, word]

    return attention_dq_kernel


def hopper_attention_backward(dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv, tile=None):
    """As attention_backward, whose arguments these are, on a Hopper GPU; its arguments are checked there.

    q float16 or bfloat16, head_dim such that supports(head_dim). The same bits for the same arguments and Tile.
    """
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[1], cu_seqlens.shape[0] - 1
    if not tokens or not max_seqlen:
        return
    tile = tile or Tile(head_dim, q.dtype.name)
    xp = device.xp()
    tiles = tokens // QUERIES + sequences
    rows = xp.empty(tiles * heads * 2 * QUERIES, np.float32)
    counters = xp.empty(tiles * heads, np.int32)
    tickets = xp.empty(1, np.int32)
    dq_sums = xp.empty(tiles * heads * 2 * tile.dq_count, np.float32)
    query_tiles, key_tiles = -(-max_seqlen // QUERIES), -(-max_seqlen // KEYS)
    grid = (query_tiles, heads, sequences)
    launch(
        attention_rows_kernel(tile), grid, 128,
        dout.view(np.int32), out.view(np.int32), lse, cu_seqlens, rows, counters, tickets,
    )  # fmt: skip
    q_map, dout_map = (tensor_map(x, QUERIES, 1, 64) for x in (q, dout))
    k_map, v_map = (tensor_map(x, KEYS, 1, 64) for x in (k, v))
    launch(
        attention_products_kernel(tile), kv_heads * sequences * key_tiles, 3 * WARPGROUP,
        q_map, k_map, v_map, dout_map, rows, cu_seqlens, heads, max_seqlen, float(scale), tickets, counters, dq_sums,
        dk.view(np.int32), dv.view(np.int32), shared=tile.shared_bytes,
    )  # fmt: skip
    launch(
        attention_dq_kernel(tile), (query_tiles, heads * 2, sequences), 128,
        dq_sums, cu_seqlens, float(scale), dq.view(np.int32),
    )  # fmt: skip
