"""The gradient of causal packed attention on Hopper, dq in a kernel of its own: seven products instead of five.

The other way of attention_backward_hopper.py, whose formulas and helpers these are. Its products kernel computes dk
and dv alone, so its consumers never meet; here a block owns queries and passes over the keys that they see:

    S = Q K^T    dP = dO V^T    P = exp2(S - lse)    dS = P (dP - delta)    dq += dS K

A consumer warpgroup owns 64 queries of a head; both share the keys: two heads of one key head where their number is
even, else neighbouring queries. dS goes from the accumulators straight into the product with K, as left operand. Each
element of dq is summed by one thread in ascending order of the keys.

At 128 columns a step of 128 queries x 64 keys takes 3 x 512 cycles of the tensor cores, and one of 64 queries x 128
keys for dk and dv 4 x 512. Nothing is summed in global memory, and no block waits for another.
Source: Dao 2023 (FlashAttention-2).
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba import device
from rlnumba.device import cuda
from rlnumba.kernels.attention_backward_hopper import (
    FEW_REGISTERS,
    LOG2_E,
    MANY_REGISTERS,
    MINUS_INFINITY,
    QUERIES,
    QUERY_BOX,
    WARPGROUP,
    Tile,
    attention_products_kernel,
    attention_rows_kernel,
    store_keys_function,
)
from rlnumba.kernels.hopper import (
    Address,
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_init_fence,
    barrier_wait,
    bulk_load_heads,
    operand,
    pack,
    shared_address,
    tensor_map,
    tensor_map_address,
    warp_uniform,
)
from rlnumba.kernels.hopper_registers import group_product, group_wait, set_registers
from rlnumba.kernels.instructions import device_function, exp2
from rlnumba.kernels.launch import kernel_factory, launch

i32, i64, f32 = np.int32, np.int64, np.float32

ARCHITECTURES = [(9, 0, "a")]

# Keys of a step.
KEYS = 64


class DqTile(NamedTuple):
    """How attention_queries_kernel works.

    pair: the consumers take two heads of a key head, else neighbouring queries. stages: tiles of k and of v on their
    way. ahead: the scores of the next step are begun before dq of this one is taken.
    """

    head_dim: int
    element: str
    pair: bool
    stages: int = 4
    ahead: bool = True

    @property
    def queries(self):
        """Queries of a block."""
        return QUERIES if self.pair else 2 * QUERIES

    @property
    def columns(self):
        return -(-self.head_dim // 16) * 16

    @property
    def boxes(self):
        return -(-self.columns // 64)

    @property
    def shared_bytes(self):
        return (4 + 2 * self.stages) * self.boxes * QUERY_BOX + 8 * (1 + 4 * self.stages) + 1024


@functools.cache
def consume_keys_function(tile):
    """The device function of a consumer."""
    head_dim, element, _, stages, ahead = tile
    columns, tile_bytes = tile.columns, tile.boxes * QUERY_BOX
    accumulators, score_count = columns // 2, KEYS // 2
    word_count = score_count // 2
    # S = Q K^T and dP = dO V^T, dq += dS K.
    start_scores = group_product(KEYS, element, columns // 16, "k", "k", False)
    start_dq = group_product(columns, element, KEYS // 16, "registers", "mn", True)
    wait_scores_1, wait_scores = group_wait(score_count, 1), group_wait(score_count, 0)
    wait_dq = group_wait(accumulators, int(ahead))
    pack_two, store_rows = pack(element), store_keys_function(tile, columns)

    @device_function
    def consume(
        q_tile, dout_tile, k_tiles, v_tiles, full, thread, own_steps, steps, rows, place, scale, dq, token, alive, head
    ):
        """dq of the queries of `q_tile`, of which `alive` are in the sequence, over own_steps tiles of keys, the last
        of which has their positions. steps: tiles that come. place: of the first lse in `rows`. token: first row of dq.

        full: where the barriers begin: K there, V there, K read, V read, for each stage.
        """
        lane = thread & i32(31)
        row = (thread >> i32(5) & i32(3)) * i32(16) + (lane >> i32(2))
        pair = (lane & i32(3)) * i32(2)
        v_full, k_empty, v_empty = full + stages * 8, full + stages * 16, full + stages * 24
        scores = cuda.local.array(score_count, np.float32)
        products = cuda.local.array(score_count, np.float32)
        words = cuda.local.array(word_count, np.int32)
        acc = cuda.local.array(accumulators, np.float32)
        for i in range(accumulators):
            acc[i] = f32(0.0)
        # Of a thread's accumulators, two of four belong to `row`, the others to row + 8.
        lse, other_lse = rows[place + row], rows[place + row + 8]
        delta, other_delta = rows[place + row + QUERIES], rows[place + row + QUERIES + 8]
        scale_log2 = scale * LOG2_E
        queries, douts = operand(q_tile), operand(dout_tile)
        stage, parity = i32(0), i32(0)
        if ahead and own_steps > 0:
            barrier_wait(full, 0)
            start_scores(scores, queries, operand(k_tiles))
            wait_scores(scores)
        for step in range(own_steps):
            k_tile = operand(k_tiles + stage * tile_bytes)
            if not ahead:
                barrier_wait(full + stage * 8, parity)
                start_scores(scores, queries, k_tile)
            barrier_wait(v_full + stage * 8, parity)
            start_scores(products, douts, operand(v_tiles + stage * tile_bytes))
            if not ahead:
                wait_scores_1(scores)
            if step + 1 == own_steps:
                first = i32(row - pair)
                for block in range(KEYS // 8):
                    for i in range(4):
                        if first < i32(block * 8 + (i & 1) - (i >> 1) * 8):
                            scores[block * 4 + i] = MINUS_INFINITY
            for block in range(KEYS // 8):
                i = block * 4
                scores[i] = exp2(scores[i] * scale_log2 - lse)
                scores[i + 1] = exp2(scores[i + 1] * scale_log2 - lse)
                scores[i + 2] = exp2(scores[i + 2] * scale_log2 - other_lse)
                scores[i + 3] = exp2(scores[i + 3] * scale_log2 - other_lse)
            wait_scores(products)
            if lane == 0:
                barrier_arrive(v_empty + stage * 8)
            for block in range(KEYS // 8):
                i = block * 4
                words[i // 2] = pack_two(scores[i] * (products[i] - delta), scores[i + 1] * (products[i + 1] - delta))
                words[i // 2 + 1] = pack_two(
                    scores[i + 2] * (products[i + 2] - other_delta), scores[i + 3] * (products[i + 3] - other_delta)
                )
            start_dq(acc, words, k_tile)
            read = k_empty + stage * 8
            stage += i32(1)
            if stage == stages:
                stage = i32(0)
                parity ^= i32(1)
            if ahead:
                # After the last step this multiplies an old tile, for nothing.
                if step + 1 < own_steps:
                    barrier_wait(full + stage * 8, parity)
                start_scores(scores, queries, operand(k_tiles + stage * tile_bytes))
            wait_dq(acc)
            if lane == 0:
                barrier_arrive(read)
            if ahead:
                wait_scores(scores)
        for _ in range(own_steps, steps):
            # Tiles that only the other consumer's queries see: all of them for a consumer without queries.
            barrier_wait(full + stage * 8, parity)
            barrier_wait(v_full + stage * 8, parity)
            if lane == 0:
                barrier_arrive(k_empty + stage * 8)
                barrier_arrive(v_empty + stage * 8)
            stage += i32(1)
            if stage == stages:
                stage = i32(0)
                parity ^= i32(1)
        store_rows(acc, scale, dq, token + row, alive - row, head, lane & i32(3))

    return consume


@kernel_factory
def attention_queries_kernel(tile):
    """The kernel of a DqTile."""
    _, _, pair, stages, _ = tile
    boxes, block_queries = tile.boxes, tile.queries
    tile_bytes = boxes * QUERY_BOX
    consume = consume_keys_function(tile)
    heads_of_block = 2 if pair else 1
    fewer_registers, more_registers = set_registers(FEW_REGISTERS, False), set_registers(MANY_REGISTERS, True)

    @cuda.jit(launch_bounds=(3 * WARPGROUP, 1))
    def attention_queries_kernel(q_map, k_map, v_map, dout_map, rows, cu_seqlens, kv_heads, max_seqlen, scale, dq):
        """dq (N, H, E / 2, pairs of elements). A block owns a tile of queries of one or two heads; the tiles that see
        the most keys start first.

        Shared memory: q of both consumers [consumer | box | query], dout likewise, for each stage K [box | key], then
        V, then the barriers: q and dout there; K there, V there, K read, V read for each stage.
        """
        thread = i32(cuda.threadIdx.x)
        role = warp_uniform(thread >> i32(7))
        q_tiles = Address((shared_address(cuda.shared.array(0, np.uint8)) + 1023) // 1024 * 1024)
        dout_tiles = q_tiles + 2 * tile_bytes
        k_tiles = dout_tiles + 2 * tile_bytes
        v_tiles = k_tiles + stages * tile_bytes
        q_full = v_tiles + stages * tile_bytes
        full = q_full + 8
        heads = i32(dq.shape[1])
        items = heads // i32(heads_of_block) * i32(cu_seqlens.shape[0] - 1)
        item = i32(cuda.blockIdx.x) % items
        sequence, first_head = item * heads_of_block // heads, i32(item * heads_of_block % heads)
        start = cu_seqlens[sequence]
        length = min(cu_seqlens[sequence + 1] - start, i32(max_seqlen))
        block_tile = (max_seqlen + (block_queries - 1)) // block_queries - 1 - i32(cuda.blockIdx.x) // items
        first = i32(block_tile * block_queries)
        if first >= length:
            return
        if thread == 0:
            barrier_init(q_full, 1)
            for stage in range(stages):
                for there in range(2):
                    barrier_init(full + (there * stages + stage) * 8, 1)
                    # A stage is read when all warps of the consumers say so.
                    barrier_init(full + ((2 + there) * stages + stage) * 8, 8)
            barrier_init_fence()
        cuda.syncthreads()
        # Tiles of keys up to the last query; of a pair, both consumers see them all.
        steps = i32((min(first + i32(block_queries), length) + (KEYS - 1)) // KEYS)
        if role == 0:
            fewer_registers()
            if thread == 0:
                q, dout = tensor_map_address(q_map), tensor_map_address(dout_map)
                k, v = tensor_map_address(k_map), tensor_map_address(v_map)
                kv_head = first_head // (heads // i32(kv_heads))
                barrier_expect(q_full, 4 * tile_bytes)
                for consumer in range(2):
                    head = first_head + (consumer if pair else 0)
                    row = start + first + (0 if pair else consumer * QUERIES)
                    for box in range(boxes):
                        at = (consumer * boxes + box) * QUERY_BOX
                        bulk_load_heads(q_tiles + at, q, box * 64, head, row, q_full)
                        bulk_load_heads(dout_tiles + at, dout, box * 64, head, row, q_full)
                stage, parity = i32(0), i32(1)
                for step in range(steps):
                    row = start + i32(step * KEYS)
                    barrier_wait(full + (2 * stages + stage) * 8, parity)
                    barrier_expect(full + stage * 8, tile_bytes)
                    for box in range(boxes):
                        target = k_tiles + stage * tile_bytes + box * QUERY_BOX
                        bulk_load_heads(target, k, box * 64, kv_head, row, full + stage * 8)
                    barrier_wait(full + (3 * stages + stage) * 8, parity)
                    barrier_expect(full + (stages + stage) * 8, tile_bytes)
                    for box in range(boxes):
                        target = v_tiles + stage * tile_bytes + box * QUERY_BOX
                        bulk_load_heads(target, v, box * 64, kv_head, row, full + (stages + stage) * 8)
                    stage += i32(1)
                    if stage == stages:
                        stage = i32(0)
                        parity ^= i32(1)
        else:
            more_registers()
            consumer = role - i32(1)
            head = first_head + (consumer if pair else i32(0))
            own_first = first + (i32(0) if pair else consumer * i32(QUERIES))
            alive = length - own_first
            own_steps = i32(own_first // KEYS + 1) if alive > 0 else i32(0)
            place = i64((start // QUERIES + sequence + own_first // QUERIES) * heads + head) * (2 * QUERIES)
            q_tile, dout_tile = q_tiles + consumer * tile_bytes, dout_tiles + consumer * tile_bytes
            barrier_wait(q_full, 0)
            consume(
                q_tile, dout_tile, k_tiles, v_tiles, full, thread, own_steps, steps, rows, place, scale,
                dq, start + own_first, alive, head,
            )  # fmt: skip

    return attention_queries_kernel


def hopper_attention_backward_apart(
    dout, q, k, v, out, lse, cu_seqlens, max_seqlen, scale, dq, dk, dv, tile=None, dq_tile=None
):
    """As hopper_attention_backward, for heads up to 128; tile.turns is False."""
    tokens, heads, head_dim = q.shape
    kv_heads, sequences = k.shape[1], cu_seqlens.shape[0] - 1
    if not tokens or not max_seqlen:
        return
    element = q.dtype.name
    tile = tile or Tile(head_dim, element, turns=False)
    dq_tile = dq_tile or DqTile(head_dim, element, heads // kv_heads % 2 == 0)
    xp = device.xp()
    tiles = tokens // QUERIES + sequences
    # A consumer without queries reads the rows of the tile after the last.
    rows = xp.empty((tiles + 1) * heads * 2 * QUERIES, np.float32)
    counters, tickets, no_sums = xp.empty(tiles * heads, np.int32), xp.empty(1, np.int32), xp.empty(1, np.float32)
    query_tiles, key_tiles = -(-max_seqlen // QUERIES), -(-max_seqlen // tile.keys)
    launch(
        attention_rows_kernel(tile), (query_tiles, heads, sequences), 128,
        dout.view(np.int32), out.view(np.int32), lse, cu_seqlens, rows, counters, tickets,
    )  # fmt: skip
    q_map, dout_map, k_map, v_map = (tensor_map(x, QUERIES, 1, 64) for x in (q, dout, k, v))
    launch(
        attention_products_kernel(tile), kv_heads * sequences * key_tiles, 3 * WARPGROUP,
        q_map, *(tensor_map(x, tile.keys, 1, 64) for x in (k, v)), dout_map, rows, cu_seqlens, heads, max_seqlen,
        float(scale), tickets, counters, no_sums, dk.view(np.int32), dv.view(np.int32), shared=tile.shared_bytes,
    )  # fmt: skip
    blocks = -(-max_seqlen // dq_tile.queries) * sequences * heads // (2 if dq_tile.pair else 1)
    launch(
        attention_queries_kernel(dq_tile), blocks, 3 * WARPGROUP,
        q_map, k_map, v_map, dout_map, rows, cu_seqlens, kv_heads, max_seqlen, float(scale), dq.view(np.int32),
        shared=dq_tile.shared_bytes,
    )  # fmt: skip
