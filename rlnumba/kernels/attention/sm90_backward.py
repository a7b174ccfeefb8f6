"""The gradient of causal packed attention on sm90, in one pass over the scores, without float atomics.

Equations and shapes as in kernels/attention/ops.py; inputs float16 or bfloat16, accumulators float32.

Design. A block owns 128 keys of a KV head and passes over the queries that see them, from the last to the first, head
by head of the group:

    S^T = K Q^T    dP^T = V dO^T    P = exp2(S - lse)    dS = P (dP - delta)
    dV += P^T dO   dK += dS^T Q     dq of the queries += dS K

Two consumer warpgroups own 64 keys each, with dK and dV in registers; S^T and dP^T come out of wgmma in the layout in
which P^T and dS^T enter the GEMMs for dV and dK as left operands, and stay in registers. dS goes through shared memory,
because dq sums over the keys of both warpgroups. The sum of dq runs over blocks. Compared for 2 x 16384 tokens, 16 and
8 heads of 128 (5.5 TFLOP by the usual count of five GEMMs; an H200 does 750 TFLOP/s):

    dq in a kernel of its own         7 GEMMs instead of 5, twice the exponentials; measured 446 TFLOP/s, as taken 538
    partial dq of each block          17 GB of them, and 4 GB at 4 x 4096
    dq added by atomics               5 GEMMs; the order of the sum is not fixed
    dq added in KV order (taken)      5 GEMMs; the same 17 GB are added to 0.27 GB of float32 sums, mostly in L2:
                                      1.2 TB/s at 390 TFLOP/s

In KV order: blocks add to the float32 sums of a query tile in ascending order of their keys, ordered by a semaphore for
each (query tile, head); the first block stores: with a window, that of the first keys that the tile sees. Two warps
wait for semaphores and start bulk reduce-adds of 32 KB, so a block that must wait delays its consumers only when it is
more than a step late. Deadlock-free on any grid: blocks take work indices from a counter, in the order of a KV head's
key tiles, so the predecessor is resident or complete.

The order of the work indices decides the speed. A step of 64 queries x 128 keys loads 32 KB of q and dout and reads and
writes 32 KB of sums, in some 2.2 us: on 132 SMs 5.9 TB/s, more than the memory gives. Blocks of one chain (the key
tiles of a KV head of a sequence) that run at the same time share these bytes in L2, since all begin with the last
queries. But the n-th of them adds n semaphore releases later, a microsecond or so each. So work indices go through 32
chains, one key tile of each after the other, then to the next 32: four blocks of each chain run together, and the first
keys, whose blocks take the most steps, come first.

Work of a step at 128 columns: 5 x 512 cycles of the tensor cores; 512 of the exponential unit and 900 instructions a
scheduler beside them; shared memory moves 370 KB, 2,900 cycles at 128 bytes, which is the bound: 88 % of the peak.
Registers of a consumer thread: 128 for dK and dV, 32 for scores, 32 for dP^T and then dq, 32 for P and dS in 16 bits.

Heads of more than 128 columns: a block owns 64 keys, and a consumer half the columns of their dK and dV. Each computes
the scores of half the queries; P and dS reach the other through shared memory. dq is added in two parts.

Queries beyond the end of a sequence have lse = infinity, hence P = dS = 0. Keys beyond the end see no query. Rows of dk
and dv beyond it are not written. These zeros multiply rows of the next sequence, whose NaN would come through. So a
warp zeroes the rows beyond the end of a tile that has such, after TMA and before the consumers: only the last queries'
tile and the last keys' has.

With prefixes a block owns keys of a sequence's own rows as before, and its queries go on behind these: the rows of the
sequence's descendants follow, each of which sees all of its keys. So of a row of a child there are two sums of dq: that
over its own keys, and that over its parent's, in the tiles of the parent's queries; with nested prefixes there is one
more for each further ancestor. The last kernel adds them, from the row's own sequence to the root. Tiles of rows,
semaphores and sums are found by query_bounds, in which such a row is as often; its lse and delta are computed once, and
written to the tiles of each. A prompt's first keys may have a hundred times the steps of a completion's, so chains come
in the order of PackedPrefixes, those with the most queries first, and their key tiles ahead of all others.

With a window as well, queries come with positions, counted as the rows of the block's sequence are, and masks compare
these. A block whose window ends inside its sequence's own rows stops there; another one visits all descendants' rows.
So a query tile is visited by the last key tiles, from the first one that sees it, as without prefixes.

Three launches: rows (delta, lse and cleared semaphores, padded to whole query tiles), the GEMMs, and dq to its dtype.
Sources: Dao 2023 (FlashAttention-2), algorithm 2; Shah et al. 2024 (FlashAttention-3), section 3.
"""

import functools
import math
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention.sm90_backward_mainloop import (
    BEHIND,
    LOG2_E,
    QUERIES,
    QUERY_BITS,
    AttentionBackwardConfig,
    consumer_function,
    dq_row_offset_function,
    dq_sum_rows,
)
from rlnumba.kernels.attention.sm90_backward_producer import producer_function, reduce_dq_function, trim_function
from rlnumba.kernels.ptx import sm90
from rlnumba.kernels.ptx.warp import cvt_pack, cvt_unpack, device_function, udiv, vector_access, warp_sum
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring, shared_base
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch, specialize

i32, i64, f32 = np.int32, np.int64, np.float32

# Architectures that the kernels compile for.
ARCHITECTURES = [(9, 0, "a")]

# Registers of a thread of the producer warpgroup and of a consumer; together, with 128 and 256 threads, an SM's.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224
# Rows whose loads a warp of attention_rows_kernel has in flight at once.
ROWS_IN_FLIGHT = 4
# Most rows that a sequence's sums of dq take beyond its tokens.
MORE_SUM_ROWS = 9
# Sequences (cu_seqlens, or Families), query heads, and the bound of a sequence's length.
BackwardBatch = namedtuple("BackwardBatch", "sequences heads max_seqlen")
# Sequences with PackedPrefixes: own rows, and of these prefixes what the kernels read.
Families = namedtuple("Families", "cu_seqlens parents query_bounds order")
# The same, and the lengths of prefixes.
PlacedFamilies = namedtuple("PlacedFamilies", "cu_seqlens parents query_bounds order lengths")
# The sums of dq, the semaphores that order their addition, and the counter from which blocks draw tiles of keys.
DqSums = namedtuple("DqSums", "work_counter semaphores sums")


@functools.cache
def rows_function(config):
    """The device function that finds the queries of a sequence's own keys."""
    prefixes = config.prefixes

    @device_function
    def query_rows(sequences, sequence):
        """(first row, end, index among the queries of all sequences of the first)."""
        if prefixes:
            start, first_query = sequences.cu_seqlens[sequence], sequences.query_bounds[sequence]
            return start, i32(start + sequences.query_bounds[sequence + 1] - first_query), first_query
        else:
            return sequences[sequence], sequences[sequence + 1], sequences[sequence]

    return query_rows


@device_function
def first_tile(first_row, sequence):
    """The first tile of a sequence whose rows begin with first_row, among those of all sequences."""
    return i32(udiv(first_row, QUERIES) + sequence)


@functools.cache
def own_tile_function(config):
    """The device function that finds a tile of QUERIES own rows; a sequence begins with a new tile."""
    prefixes = config.prefixes

    @device_function
    def own_tile(sequences, tile):
        """(sequence, first row, end of the sequence's own rows); first row >= end: the tile has no rows."""
        bounds = sequences
        if prefixes:
            bounds = sequences.cu_seqlens
        sequence, end = i32(0), i32(bounds.shape[0] - 1)
        while end - sequence > 1:
            middle = (sequence + end) >> i32(1)
            if first_tile(bounds[np.uint32(middle)], middle) <= tile:
                sequence = middle
            else:
                end = middle
        start, end = bounds[sequence], bounds[sequence + 1]
        return sequence, i32(start + (tile - first_tile(start, sequence)) * i32(QUERIES)), i32(end)

    return own_tile


@specialize
def attention_rows_kernel(config):
    """The kernel of an AttentionBackwardConfig that prepares lse, delta and the semaphores."""
    element, dq_parts, words, query_rows = config.element, config.dq_parts, config.head_dim // 2, rows_function(config)
    words_per_lane = -(-words // 32)
    loads, prefixes = ROWS_IN_FLIGHT * words_per_lane, config.prefixes
    unpack, has_positions, words_of_row = cvt_unpack(element), config.has_positions, config.row_words
    own_tile = own_tile_function(config)

    @device_function
    def put(rows, tile, row, of_row):
        """of_row: lse, delta and the position of a row of a tile, which is counted over the heads of all tiles."""
        first = tile * (words_of_row * QUERIES) + row
        rows[first], rows[first + QUERIES] = of_row[0], of_row[1]
        if has_positions:
            rows[first + 2 * QUERIES] = of_row[2]

    @device_function
    def begin_tile(semaphores, tile):
        """Clear a tile's semaphores."""
        for part in range(dq_parts):
            semaphores[tile * dq_parts + part] = 0

    @device_function
    def end_tile(rows, tile, row, of_row):
        """Put what is beyond the end to the rows of a tile from `row` on."""
        of_row[0], of_row[1], of_row[2] = f32(math.inf), f32(0.0), f32(0.0)
        for each in range(row, QUERIES):
            put(rows, tile, each, of_row)

    @device_function
    def put_everywhere(rows, semaphores, sequences, sequence, token, place, of_row):
        """Put what a row has to its tile of its own sequence, and to those of its ancestors. place: (head, heads)."""
        head, heads = place
        owner, row_lse, delta = i32(sequence), of_row[0], of_row[1]
        while sequence >= 0:
            start, end, first_query = query_rows(sequences, sequence)
            query = i32(token - start)
            row = query & i32(QUERIES - 1)
            tile = i64(first_tile(first_query, sequence) + (query >> i32(QUERY_BITS))) * heads + head
            of_row[0], of_row[1] = row_lse, delta
            if has_positions:
                own_start = sequences.cu_seqlens[owner] - sequences.lengths[owner]
                of_row[2] = f32(token - own_start + start - sequences.lengths[sequence])
            put(rows, tile, row, of_row)
            if row == 0:
                begin_tile(semaphores, tile)
            if token == end - 1:
                end_tile(rows, tile, row + 1, of_row)
            if prefixes:
                sequence = i32(sequences.parents[sequence])
            else:
                sequence = i32(-1)

    @cuda.jit
    def attention_rows_kernel(dout, out, lse, sequences, rows, semaphores, work_counter):
        """rows[t, h] = (lse, delta) of the rows of query tile t and head h; lse times log2(e), infinity beyond the end.

        With a window and prefixes positions follow, as floats. dout, out (N, H, E / 2): pairs of elements. A block owns
        a tile of own rows of a head, and writes what these have wherever they are queries: there the first row of a
        tile clears its semaphores, and the last one of all adds what is beyond the end. A warp owns ROWS_IN_FLIGHT rows
        at a time, a lane every 32nd pair, summed by a butterfly.
        """
        heads = i32(out.shape[1])
        head, tile, thread = i32(cuda.blockIdx.y), i32(cuda.blockIdx.x), i32(cuda.threadIdx.x)
        if thread == 0 and head == 0 and tile == 0:
            work_counter[0] = 0
        sequence, first, end = own_tile(sequences, tile)
        if first >= end:
            return
        lane = thread & i32(31)
        sums, of_row = cuda.local.array(ROWS_IN_FLIGHT, np.float32), cuda.local.array(3, np.float32)
        dout_words = cuda.local.array(loads, np.int32)
        out_words = cuda.local.array(loads, np.int32)
        for r in range((thread >> i32(5)) * ROWS_IN_FLIGHT, QUERIES, 4 * ROWS_IN_FLIGHT):
            for i in range(ROWS_IN_FLIGHT):
                token = min(first + r + i, end - 1)
                for w in range(words_per_lane):
                    word = min(lane + w * 32, words - 1)
                    dout_words[i * words_per_lane + w] = dout[token, head, word]
                    out_words[i * words_per_lane + w] = out[token, head, word]
            own_row = i32(first + r + lane)
            row_lse = lse[head, min(own_row, end - 1)] if lane < ROWS_IN_FLIGHT else f32(0.0)
            for i in range(ROWS_IN_FLIGHT):
                sums[i] = f32(0.0)
                for w in range(words_per_lane):
                    if lane + w * 32 < words:
                        dout_low, dout_high = unpack(dout_words[i * words_per_lane + w])
                        out_low, out_high = unpack(out_words[i * words_per_lane + w])
                        sums[i] += dout_low * out_low + dout_high * out_high
            of_row[0], of_row[2] = row_lse * LOG2_E, f32(0.0)
            for i in range(ROWS_IN_FLIGHT):
                delta = warp_sum(sums[i])
                if lane == i:
                    of_row[1] = delta
            if lane < ROWS_IN_FLIGHT and own_row < end:
                put_everywhere(rows, semaphores, sequences, sequence, own_row, (head, heads), of_row)

    return attention_rows_kernel


@functools.cache
def schedule_function(config):
    """The device function of the tile scheduler: which key tile of which KV head and sequence a work index is."""
    keys, chains_together, prefixes = config.keys, config.chains, config.prefixes

    @device_function
    def schedule(work_index, sequences, kv_heads, max_seqlen):
        """(sequence, kv_head, key_tile, start, length): key_tile < 0 where the sequence has no such tile."""
        cu_seqlens = sequences
        if prefixes:
            cu_seqlens = sequences.cu_seqlens
        chains = kv_heads * i32(cu_seqlens.shape[0] - 1)
        key_tiles = i32((max_seqlen + (keys - 1)) // keys)
        first_chain = i32(work_index // (key_tiles * chains_together) * chains_together)
        together = min(i32(chains_together), chains - first_chain)
        work_index -= first_chain * key_tiles
        chain = first_chain + work_index % together
        sequence, kv_head = chain // kv_heads, i32(chain % kv_heads)
        if prefixes:
            sequence = sequences.order[sequence]
        start = cu_seqlens[sequence]
        length = min(cu_seqlens[sequence + 1] - start, i32(max_seqlen))
        own_tiles, place = i32((length + (keys - 1)) // keys), i32(work_index // together)
        # Counted from the sequence's end, so that of all sequences the blocks with the most steps come first.
        key_tile = i32(own_tiles - key_tiles + place)
        if prefixes:
            # All of descendants' queries see the keys of each tile.
            if sequences.query_bounds[sequence + 1] - sequences.query_bounds[sequence] > length:
                key_tile = place if place < own_tiles else i32(-1)
        return sequence, kv_head, key_tile, start, length

    return schedule


@specialize
def attention_backward_kernel(config):
    """The kernel of an AttentionBackwardConfig that computes dk, dv and the sums of dq."""
    keys, shared, q_stages, dout_stages = config.keys, config.layout, config.q_stages, config.dout_stages
    (init_q_ring, _), (init_dout_ring, _) = ring(config.q_stages), ring(config.dout_stages)
    setmaxnreg_dec, setmaxnreg_inc = (
        sm90.setmaxnreg(PRODUCER_REGISTERS, False),
        sm90.setmaxnreg(CONSUMER_REGISTERS, True),
    )
    schedule, producer, reduce_dq = schedule_function(config), producer_function(config), reduce_dq_function(config)
    consumer, trim, window, prefixes = consumer_function(config), trim_function(config), config.window, config.prefixes
    has_positions = config.has_positions
    # Query tiles that see a block's keys.
    window_tiles = (keys + window - 2) // QUERIES + 1

    @device_function
    def init_barriers(base):
        """One thread initializes the mbarriers. A stage is empty when all threads of the consumers have arrived."""
        sm90.mbarrier_init(base + shared.k_full, 1)
        sm90.mbarrier_init(base + shared.v_full, 1)
        sm90.mbarrier_init(base + shared.dq_full, 2 * WARPGROUP)
        sm90.mbarrier_init(base + shared.dq_full + MBARRIER_BYTES, 2 * WARPGROUP)
        sm90.mbarrier_init(base + shared.dq_empty, 1)
        sm90.mbarrier_init(base + shared.k_landed, 1)
        sm90.mbarrier_init(base + shared.v_landed, 1)
        for stage in range(q_stages):
            sm90.mbarrier_init(base + shared.q_landed + stage * MBARRIER_BYTES, 1)
        for stage in range(dout_stages):
            sm90.mbarrier_init(base + shared.dout_landed + stage * MBARRIER_BYTES, 1)
        init_q_ring(base + shared.q_full, base + shared.q_empty, 1, 2 * WARPGROUP)
        init_dout_ring(base + shared.dout_full, base + shared.dout_empty, 1, 2 * WARPGROUP)
        sm90.mbarrier_init_fence()

    @cuda.jit(launch_bounds=(3 * WARPGROUP, 1))
    def attention_backward_kernel(q_map, k_map, v_map, dout_map, rows, batch, scale, dq, dk, dv):
        """dk, dv (N, HK, E / 2, pairs of elements) and the float32 sums of dq, of each (query tile, head, part, row).

        batch: a BackwardBatch; dq: a DqSums. A tile has dq_sum_rows for each head and part. A block owns the keys of a
        tile and KV head; step s is query tile s // gqa_ratio from the last, head s % gqa_ratio. Warp 0 of the first
        warpgroup loads tiles, warps 1 and 2 add dq to its sums, and warp 3 zeroes the rows beyond the sequence's end.
        """
        thread = i32(cuda.threadIdx.x)
        warpgroup = sm90.warp_uniform(thread >> i32(7))
        base = shared_base()
        work_index = cuda.shared.array(1, np.int32)
        if thread == 0:
            work_index[0] = cuda.atomic.add(dq.work_counter, 0, 1)
            init_barriers(base)
        cuda.syncthreads()

        kv_heads = i32(dk.shape[1])
        sequence, kv_head, key_tile, start, length = schedule(
            sm90.warp_uniform(work_index[0]), batch.sequences, kv_heads, batch.max_seqlen
        )
        if key_tile < 0:
            return
        # Queries of the sequence's keys, and the index of the first among those of all sequences.
        queries, first_query = length, start
        if prefixes:
            first_query = batch.sequences.query_bounds[sequence]
            queries = batch.sequences.query_bounds[sequence + 1] - first_query
        heads = batch.heads
        gqa_ratio = i32(heads) // kv_heads
        first_key = key_tile * i32(keys)
        first_row = i32(start + first_key)
        query_tiles = i32((queries - first_key + (QUERIES - 1)) // QUERIES)
        follows_all = False
        if has_positions:
            # A block whose last window reaches the own rows' end visits all descendants' rows.
            window_end = first_key + i32(window - 1)
            follows_all = window_end >= length
            if window_end + keys < length:
                query_tiles = min(query_tiles, i32(window_tiles))
        elif window > 0:
            query_tiles = min(query_tiles, i32(window_tiles))
        # Index of the rows, semaphores and sums of the last query tile and the group's first head.
        last_tile = first_query // QUERIES + sequence + first_key // QUERIES + query_tiles - 1
        tile = i32(last_tile * heads + kv_head * gqa_ratio)
        valid_keys, last_query = i32(length - first_key), i32((query_tiles - i32(1)) * i32(QUERIES))
        valid_queries = i32(valid_keys - last_query)
        if prefixes:
            valid_queries = i32(queries - first_key - last_query)
        if window > 0:
            valid_queries = min(valid_queries, i32(QUERIES))
        trimmed_steps = gqa_ratio if valid_queries < QUERIES else i32(0)

        if warpgroup == 0:
            setmaxnreg_dec()
            if thread == 0:
                q, dout = sm90.tensor_map_address(q_map), sm90.tensor_map_address(dout_map)
                k, v = sm90.tensor_map_address(k_map), sm90.tensor_map_address(v_map)
                producer(
                    base, q, k, v, dout, rows, kv_head, gqa_ratio, i32(heads), first_row, query_tiles, tile,
                    valid_keys < keys, trimmed_steps,
                )  # fmt: skip
            elif thread == 32 or thread == 64:
                reduce_dq(
                    base, thread >> i32(6), dq.sums, dq.semaphores, gqa_ratio, i32(heads), kv_head * gqa_ratio,
                    key_tile, query_tiles, tile,
                    i32(i32(first_query + first_key) + sequence * i32(MORE_SUM_ROWS) + last_query),
                    dq_sum_rows(valid_queries), follows_all,
                )  # fmt: skip
            elif thread >= 96:
                trim(base, valid_keys, valid_queries, trimmed_steps, thread & i32(31))
        else:
            setmaxnreg_inc()
            # valid_keys anew, in 64 bits: ptxas then spills nothing.
            steps, wide_keys = i32(query_tiles * gqa_ratio), length - first_key
            consumer(base, warpgroup - i32(1), thread, gqa_ratio, steps, scale, kv_head, first_row, wide_keys, dk, dv)

    return attention_backward_kernel


@specialize
def attention_round_dq_kernel(config):
    """The kernel of an AttentionBackwardConfig that rounds dq."""
    parts, row_size, row_words = config.dq_parts, config.dq_row_size, config.head_dim // 2
    words, words_per_lane = config.dq_columns // 2, -(-row_words // 32)
    # More would not stay in registers.
    in_flight = 1 if config.prefixes and config.wide else ROWS_IN_FLIGHT
    loads = 4 * in_flight * words_per_lane
    pack, dq_row_offset = cvt_pack(config.element), dq_row_offset_function(config)
    (load_two, _), (load_four, _) = vector_access(2, 2), vector_access(4, 4)
    prefixes, query_rows, own_tile = config.prefixes, rows_function(config), own_tile_function(config)

    @device_function
    def place_of_row(start, end, first_query, sequence, row, place):
        """(the index of the first of a row's sums of dq over a sequence's keys, the rows that its tile of them has).

        start, end, first_query: of query_rows; place: (head, heads). The tile's rows are in blocks of eight columns.
        """
        head, heads = place
        query = i32(row - start)
        tile_query = query & i32(-QUERIES)
        sum_rows = dq_sum_rows(i32(min(end - start - tile_query, QUERIES)))
        first_sum = i64(first_query + tile_query + sequence * MORE_SUM_ROWS) * heads + i64(head) * sum_rows
        return first_sum * (parts * row_size) + dq_row_offset(i32(query - tile_query), i32(0)), sum_rows

    @device_function
    def offset_of_word(word, sum_rows):
        """From a row's first sum to those of a pair of columns, and of the same pair eight rows below."""
        unit = word // i32(words)
        word -= unit * i32(words)
        of_unit = i32((unit >> i32(1)) * sum_rows * i32(row_size) + dq_row_offset(i32(0), unit & i32(1)))
        return i32(of_unit + (word >> i32(2)) * i32(32) + (word & i32(3)) * i32(4))

    @device_function
    def add_ancestor(sums, of_ancestor, dq_sums, sequences, ancestor, rows, place, lane):
        """Add the sums over an ancestor's keys. rows: (the first of in_flight rows, the end of what there is)."""
        start, end, first_query = query_rows(sequences, ancestor)
        first_row, end_row = rows
        for i in range(in_flight):
            for half in range(2):
                row = i32(min(first_row + i + half * 8, end_row - 1))
                first_sum, sum_rows = place_of_row(start, end, first_query, ancestor, row, place)
                for w in range(words_per_lane):
                    word = i32(min(i32(lane + w * 32), i32(row_words - 1)))
                    at = (i * words_per_lane + w) * 4 + 2 * half
                    load_two(dq_sums, first_sum + offset_of_word(word, sum_rows), of_ancestor, at)
        for i in range(loads):
            sums[i] += of_ancestor[i]

    @cuda.jit
    def attention_round_dq_kernel(dq_sums, sequences, scale, dq):
        """dq (N, H, E / 2, pairs of elements) = scale times its sums; a block owns a tile of own rows of a head.

        A warp owns in_flight rows g of each 16 at a time, and g + 8, which lie beside them; a lane every 32nd pair of
        columns.
        """
        heads, head, tile = dq.shape[1], i32(cuda.blockIdx.y), i32(cuda.blockIdx.x)
        sequence, first, own_end = own_tile(sequences, tile)
        if first >= own_end:
            return
        start, end, first_query = query_rows(sequences, sequence)
        lane, warp = i32(cuda.threadIdx.x) & i32(31), i32(cuda.threadIdx.x) >> i32(5)
        parent = i32(-1)
        if prefixes:
            parent = i32(sequences.parents[sequence])
        sums = cuda.local.array(loads, np.float32)
        of_ancestor = cuda.local.array(loads if prefixes else 1, np.float32)
        for pair in range(warp * in_flight, QUERIES // 2, 4 * in_flight):
            # in_flight divides 8: all rows are of the same 16.
            row = i32(first + (i32(pair) >> i32(3)) * i32(16) + (i32(pair) & i32(7)))
            for i in range(in_flight):
                summed_row = i32(row + i32(i)) if row + i < own_end else i32(first)
                first_sum, sum_rows = place_of_row(start, end, first_query, sequence, summed_row, (head, heads))
                for w in range(words_per_lane):
                    word = i32(min(i32(lane + w * 32), i32(row_words - 1)))
                    place = first_sum + offset_of_word(word, sum_rows)
                    load_four(dq_sums, place, sums, (i * words_per_lane + w) * 4)
            if prefixes:
                ancestor = parent
                while ancestor >= 0:
                    rows = row, own_end
                    add_ancestor(sums, of_ancestor, dq_sums, sequences, ancestor, rows, (head, heads), lane)
                    ancestor = i32(sequences.parents[ancestor])
            for i in range(in_flight):
                for w in range(words_per_lane):
                    word, j = i32(lane + w * 32), (i * words_per_lane + w) * 4
                    if word < row_words:
                        for half in range(2):
                            if row + i + half * 8 < own_end:
                                low, high = sums[j + 2 * half] * scale, sums[j + 2 * half + 1] * scale
                                dq[row + i + half * 8, head, word] = pack(low, high)

    return attention_round_dq_kernel


def dq_sums_nbytes(tokens, sequences, heads, head_dim):
    """Bytes of the float32 sums of dq that attention_backward_sm90 allocates, beside its arguments: int."""
    config = AttentionBackwardConfig(head_dim, "bfloat16")
    return 4 * (tokens + MORE_SUM_ROWS * sequences) * heads * config.dq_parts * config.dq_row_size


def query_tiles_of(tokens, sequences):
    """The tiles of QUERIES rows of so many sequences, each of which begins a new one, at most: int."""
    return tokens // QUERIES + sequences


def backward_nbytes(tokens, sequences, heads, head_dim, has_positions=False):
    """Bytes of all arrays that attention_backward_sm90 allocates beside its arguments, at most: int.

    has_positions: whether the sequences have prefixes and a window.
    """
    config = AttentionBackwardConfig(head_dim, "bfloat16", window=int(has_positions), prefixes=has_positions)
    words_of_tile = config.row_words * QUERIES + config.dq_parts
    tiles = query_tiles_of(tokens, sequences)
    return dq_sums_nbytes(tokens, sequences, heads, head_dim) + 4 * (tiles * heads * words_of_tile + 1)


def attention_backward_sm90(dout, inputs, out, lse, sequences, scale, gradients, config=None):
    """The operator attention_backward by the sm90 kernels, for heads that is_supported accepts."""
    (q, k, v), (dq, dk, dv), (cu_seqlens, max_seqlen, window, prefixes) = inputs, gradients, sequences
    tokens, heads, head_dim = q.shape
    kv_heads, count = k.shape[1], cu_seqlens.shape[0] - 1
    if not tokens or not max_seqlen:
        return
    config = config or AttentionBackwardConfig(head_dim, q.dtype.name)
    config = config._replace(window=window)
    xp, queries, bounds = device.xp(), tokens, cu_seqlens
    of_rows = bounds
    if prefixes is not None:
        # A row is a query of its own sequence's keys, and of its ancestors'.
        config, queries = config._replace(prefixes=True), prefixes.levels * tokens
        bounds = of_rows = Families(cu_seqlens, prefixes.parents, prefixes.query_bounds, prefixes.order)
        if config.has_positions:
            of_rows = PlacedFamilies(*bounds, prefixes.lengths)
            if tokens > BEHIND:
                raise ValueError(f"attention_backward: with prefixes and a window at most {BEHIND} rows, got {tokens}")
    tiles, own_tiles = query_tiles_of(queries, count), query_tiles_of(tokens, count)
    rows = xp.empty(tiles * heads * config.row_words * QUERIES, np.float32)
    semaphores = xp.empty(tiles * heads * config.dq_parts, np.int32)
    work_counter = xp.empty(1, np.int32)
    dq_sums = xp.empty(dq_sums_nbytes(queries, count, heads, head_dim) // 4, np.float32)
    key_tiles = -(-max_seqlen // config.keys)
    # The first kernel is one for all windows, and the last one has none.
    launch(
        attention_rows_kernel(config._replace(window=int(config.has_positions))), (own_tiles, heads), 128,
        dout.view(np.int32), out.view(np.int32), lse, of_rows, rows, semaphores, work_counter,
    )  # fmt: skip
    q_map, dout_map = (tensor_map(x, QUERIES, 1, 64) for x in (q, dout))
    k_map, v_map = (tensor_map(x, config.keys, 1, 64) for x in (k, v))
    launch(
        attention_backward_kernel(config), kv_heads * count * key_tiles, 3 * WARPGROUP,
        q_map, k_map, v_map, dout_map, rows, BackwardBatch(bounds, heads, max_seqlen), float(scale),
        DqSums(work_counter, semaphores, dq_sums), dk.view(np.int32), dv.view(np.int32), shared=config.layout.nbytes,
    )  # fmt: skip
    launch(
        attention_round_dq_kernel(config._replace(window=0)), (own_tiles, heads), 128,
        dq_sums, bounds, float(scale), dq.view(np.int32),
    )  # fmt: skip
