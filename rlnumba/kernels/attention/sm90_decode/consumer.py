"""The computing warpgroup of decode on sm_90: main loop, partials, epilogue. See kernel.py."""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention import softmax
from rlnumba.kernels.attention.sm90_decode.config import MERGE_FIELDS, MERGE_SLOTS, NEW_TOKEN, Q_SLOTS, DecodeItem
from rlnumba.kernels.attention.split_kv import accumulator_access, segment_merge
from rlnumba.kernels.ptx import shared_memory
from rlnumba.kernels.ptx.sm90 import mbarrier_arrive, mbarrier_wait, named_barrier_sync
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, exp2, int_as_float, shuffle_xor, udiv, vector_access
from rlnumba.kernels.ptx.wgmma import WARPGROUP, WgmmaLayout, smem_descriptor, wgmma_async, wgmma_wait_group
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring, swizzled_chunk
from rlnumba.runtime.device import cuda

i32, f32 = np.int32, np.float32

# Named barriers of the computing warps: EXCHANGED before they read each other's maxima or sums, STORED before wgmma
# reads the probabilities of all. Memory that is read after one is written again only after the other.
EXCHANGED, STORED = 1, 2
# A computing thread: its number, warp and lane in the warpgroup; its keys of a tile are 16 warp + group_lane and 8
# more, its columns of S^T pair, pair + 1, pair + 8 ...; offset: bytes, where it stores a matrix by stmatrix_x2_trans.
Lane = namedtuple("Lane", "thread warp lane group_lane pair offset")
# A computing thread's local arrays; those from row_max on have an element for each of its columns of S^T. total,
# total_max, total_sum: of the segments of an item before the present one. position: the last key that a column sees.
# partial_rows: of the columns in Partials, -1 for columns without one.
ARRAYS = "scores acc total words row_max row_sum total_max total_sum tile_max rescale position partial_rows"
DecodeRegisters = namedtuple("DecodeRegisters", ARRAYS)


@device_function
def token_of_row(row, reciprocal):
    """row // gqa_ratio for few rows, without a division; reciprocal: 65,536 / gqa_ratio, rounded up."""
    return i32((np.uint32(row) * np.uint32(reciprocal)) >> np.uint32(16))


@functools.cache
def column_sum_function(rows):
    """The device function that adds up an item's sums, of which a thread has those of its keys for each column."""

    @device_function
    def column_sums(sums, memory, warp, group_lane, pair):
        """sums becomes the sums over all keys, in softmax.row_sum's order. memory: 128 rows bytes of shared memory."""
        exchange = shared_memory.Address(memory + (group_lane * rows + pair) * 4)
        for i in range(0, rows // 4, 2):
            shared_memory.store_pair(exchange + (warp * 8 * rows + i * 4) * 4, sums[i], sums[i + 1])
        named_barrier_sync(EXCHANGED, WARPGROUP)
        for i in range(0, rows // 4, 2):
            a0, a1 = shared_memory.load_pair(exchange + i * 16)
            b0, b1 = shared_memory.load_pair(exchange + i * 16 + 32 * rows)
            c0, c1 = shared_memory.load_pair(exchange + i * 16 + 64 * rows)
            d0, d1 = shared_memory.load_pair(exchange + i * 16 + 96 * rows)
            sums[i], sums[i + 1] = (a0 + b0) + (c0 + d0), (a1 + b1) + (c1 + d1)
        for i in range(rows // 4):
            sums[i] += shuffle_xor(sums[i], 4)
            sums[i] += shuffle_xor(sums[i], 8)
            sums[i] += shuffle_xor(sums[i], 16)

    return column_sums


@functools.cache
def softmax_functions(rows, window=0):
    """(apply_mask, column_max, softmax_step) of scores S^T (64 keys, rows): as softmax.py's, across four warps."""
    columns = rows // 4

    @device_function
    def apply_mask(scores, key, position):
        """Set scores of keys that the columns do not see to -inf; key: of the thread's first row."""
        for i in range(columns):
            j = i // 2 * 4 + i % 2
            if key > position[i]:
                scores[j] = softmax.MINUS_INFINITY
            if key + 8 > position[i]:
                scores[j + 2] = softmax.MINUS_INFINITY
            if window > 0:
                if key <= position[i] - window:
                    scores[j] = softmax.MINUS_INFINITY
                if key + 8 <= position[i] - window:
                    scores[j + 2] = softmax.MINUS_INFINITY

    @device_function
    def column_max(tile_max, scores, memory, at):
        """tile_max: the largest score of each column over all warps, which exchange theirs in shared memory."""
        exchange = shared_memory.Address(memory + at.pair * 4)
        for i in range(columns):
            j = i // 2 * 4 + i % 2
            value = max(scores[j], scores[j + 2])
            value = max(value, shuffle_xor(value, 4))
            value = max(value, shuffle_xor(value, 8))
            tile_max[i] = max(value, shuffle_xor(value, 16))
        if at.lane < 4:
            for i in range(0, columns, 2):
                shared_memory.store_pair(exchange + (at.warp * rows + i * 4) * 4, tile_max[i], tile_max[i + 1])
        named_barrier_sync(EXCHANGED, WARPGROUP)
        for i in range(0, columns, 2):
            for w in range(4):
                first, second = shared_memory.load_pair(exchange + (w * rows + i * 4) * 4)
                tile_max[i], tile_max[i + 1] = max(tile_max[i], first), max(tile_max[i + 1], second)

    @device_function
    def softmax_step(scores, row_max, row_sum, tile_max, rescale, c):
        for i in range(columns):
            j = i // 2 * 4 + i % 2
            updated = softmax.next_row_max(row_max[i], tile_max[i], c)
            subtracted = softmax.finite_row_max(updated)
            rescale[i] = exp2(row_max[i] - subtracted)
            row_max[i] = updated
            scores[j] = exp2(cuda.fma(scores[j], c, -subtracted))
            scores[j + 2] = exp2(cuda.fma(scores[j + 2], c, -subtracted))
            row_sum[i] = cuda.fma(row_sum[i], rescale[i], scores[j] + scores[j + 2])

    return apply_mask, column_max, softmax_step


@functools.cache
def new_token_function(config):
    """The device function that puts the new token's key and value into their row of the tiles of K and V."""
    chunks, boxes, rows, tile_bytes = config.head_dim // 8, config.boxes, config.rows, config.tile_bytes

    @device_function
    def write_new_token(q_tile, k_tile, row, thread):
        """TMA loaded the row from the cache, where the token may not have been yet; V's tile follows K's."""
        if thread < 2 * chunks:
            is_value = i32(thread >= chunks)
            chunk = i32(thread - is_value * chunks)
            source = q_tile + (boxes * rows + is_value * boxes) * shared_memory.LINE
            words = shared_memory.load_words(shared_memory.Address(source + chunk * 16))
            line = k_tile + is_value * tile_bytes + (chunk >> i32(3)) * shared_memory.BOX_BYTES
            line = shared_memory.Address(line + row * shared_memory.LINE)
            target = swizzled_chunk(line, row, chunk & i32(7))
            shared_memory.store_words(shared_memory.Address(target), words[0], words[1], words[2], words[3])
        shared_memory.fence_proxy_async()
        named_barrier_sync(STORED, WARPGROUP)

    return write_new_token


@functools.cache
def mainloop_function(config):
    """The device function of the loop over the tiles of K and V of a work item."""
    head_dim, element, rows, _, stages, _, grouped, segment, fused, window = config
    boxes, tile_bytes, layout, segment_tiles = (
        config.boxes,
        config.tile_bytes,
        config.layout,
        (softmax.ONE_SEGMENT if window else segment) // softmax.TILE_KEYS,
    )
    columns, score_count, acc_count, word_count = rows // 4, rows // 2, boxes * rows // 2, rows // 4
    several = config.max_leading > 1
    start_scores, wait_scores = wgmma_async(rows, element, -(-head_dim // 16)), wgmma_wait_group(score_count, 0)
    start_values = wgmma_async(rows, element, softmax.TILE_KEYS // 16, "mn", layout=WgmmaLayout(blocks=boxes))
    wait_values = wgmma_wait_group(acc_count, 0)
    apply_mask, column_max, softmax_step = softmax_functions(rows, window)
    column_sums, merge_segment = column_sum_function(rows), segment_merge(acc_count, columns)
    write_new_token = new_token_function(config)
    zero_rows, cvt_pair, (_, advance) = softmax.zero_function(boxes), cvt_pack(element), ring(stages)

    @device_function
    def reset(row_max, row_sum):
        for i in range(columns):
            row_max[i], row_sum[i] = softmax.MINUS_INFINITY, f32(0.0)

    @device_function
    def store_probabilities(words, scores, target):
        """P^T, rounded, to shared memory, as the B operand of O^T = V^T P^T."""
        for i in range(word_count):
            words[i] = cvt_pair(scores[2 * i], scores[2 * i + 1])
        for i in range(word_count // 2):
            shared_memory.stmatrix_x2_trans(target + i * (8 * shared_memory.LINE), words[2 * i], words[2 * i + 1])

    @device_function
    def rescale_acc(acc, rescale):
        for b in range(boxes):
            for i in range(columns):
                j = b * score_count + i // 2 * 4 + i % 2
                acc[j] *= rescale[i]
                acc[j + 2] *= rescale[i]

    @device_function
    def mainloop(registers, item, base, q_tile, stage, parity, reciprocal, c, at):
        """Leave (m, l, acc) of the work item in row_max, row_sum and acc; returns (stage, parity) of the ring."""
        scores, acc, total, words, row_max, row_sum, total_max, total_sum, tile_max, rescale, position, _ = registers
        p, kv = shared_memory.Address(base + layout.p), shared_memory.Address(base + layout.kv)
        full, empty = shared_memory.Address(base + layout.full), shared_memory.Address(base + layout.empty)
        reset(row_max, row_sum)
        # Groups share keys that all their queries see.
        first_position = i32(item.context_len - item.length)
        for i in range(columns):
            position[i] = i32(first_position + token_of_row(i32(i // 2 * 8 + at.pair + i % 2), reciprocal))
        if grouped and item.group_size > 0:
            first_position = i32(item.first_key + item.tiles * softmax.TILE_KEYS)
            for i in range(columns):
                position[i] = first_position
        for index in range(item.tiles):
            tile_key = i32(item.first_key + index * softmax.TILE_KEYS)
            k_tile = shared_memory.Address(kv + stage * (2 * tile_bytes))
            v_tile = shared_memory.Address(k_tile + tile_bytes)
            new_segment = (index & i32(segment_tiles - 1)) == 0
            if several and new_segment and index > 0:
                column_sums(row_sum, shared_memory.Address(base + layout.row_sum), at.warp, at.group_lane, at.pair)
                merge_segment(acc, row_max, row_sum, total, total_max, total_sum, index == segment_tiles)
                reset(row_max, row_sum)
            mbarrier_wait(shared_memory.Address(full + stage * MBARRIER_BYTES), parity)
            if fused and item.new_token > 0 and index == item.tiles - 1:
                write_new_token(q_tile, k_tile, i32(item.context_len - 1 - tile_key), at.thread)
            start_scores(scores, smem_descriptor(k_tile), smem_descriptor(q_tile), i32(0))
            wait_scores(scores)
            if i32(tile_key + (softmax.TILE_KEYS - 1)) > first_position or (
                window > 0 and tile_key < i32(item.context_len - window)
            ):
                apply_mask(scores, i32(tile_key + at.warp * 16 + at.group_lane), position)
            column_max(
                tile_max, scores, shared_memory.Address(base + layout.row_max + (index & 1) * (4 * rows * 4)), at
            )
            softmax_step(scores, row_max, row_sum, tile_max, rescale, c)
            store_probabilities(words, scores, shared_memory.Address(p + at.offset))
            if i32(item.context_len - tile_key) < softmax.TILE_KEYS:
                zero_rows(v_tile, i32(item.context_len - tile_key), at.thread)
            shared_memory.fence_proxy_async()
            rescale_acc(acc, rescale)
            named_barrier_sync(STORED, WARPGROUP)
            start_values(acc, smem_descriptor(v_tile), smem_descriptor(p), i32(not new_segment))
            wait_values(acc)
            if at.thread == 0:
                mbarrier_arrive(shared_memory.Address(empty + stage * MBARRIER_BYTES))
            stage, parity = advance(stage, parity)
        column_sums(row_sum, shared_memory.Address(base + layout.row_sum), at.warp, at.group_lane, at.pair)
        if several and (item.tiles > segment_tiles or item.resumes_partial > 0):
            merge_segment(acc, row_max, row_sum, total, total_max, total_sum, False)
            for i in range(columns):
                row_max[i], row_sum[i] = total_max[i], total_sum[i]
            for i in range(acc_count):
                acc[i] = total[i]
        return stage, parity

    return mainloop


@functools.cache
def partial_functions(config):
    """(resume, write_partial, enqueue): the device functions by which a computing warpgroup meets Partials."""
    head_dim, element, rows, _, _, _, grouped, *_ = config
    columns, layout, (_, next_slot) = rows // 4, config.layout, ring(MERGE_SLOTS)
    _, write_acc, read_acc = accumulator_access(config.boxes, head_dim, element, rows)

    @device_function
    def resume(registers, item, batch, partials, at):
        """Load the group's partial of a sequence of one query token; the loads are in flight during the main loop."""
        rows_of, total_max, total_sum = registers.partial_rows, registers.total_max, registers.total_sum
        first_row = i32((item.sequence * batch.kv_heads + item.kv_head) * partials.max_splits * partials.rows)
        for i in range(columns):
            column = i32(i // 2 * 8 + at.pair + i % 2)
            rows_of[i] = i32(first_row + column) if column < batch.gqa_ratio else i32(-1)
            total_max[i] = partials.row_max[max(rows_of[i], i32(0))]
            total_sum[i] = partials.row_sum[max(rows_of[i], i32(0))]
        read_acc(registers.total, rows_of, partials.acc, i32(at.warp * 16 + at.group_lane))

    @device_function
    def write_partial(registers, item, batch, partials, row_result, valid_rows, reciprocal, at):
        """Write the item's partial; of a group, each sequence's rows to its own slot."""
        rows_of, slot = registers.partial_rows, (item.sequence * batch.kv_heads + item.kv_head) * partials.max_splits
        first_row = i32((slot + item.split) * partials.rows)
        # From a sequence's slot to that of the next.
        sequence_rows = i32(batch.kv_heads * partials.max_splits * partials.rows)
        if at.thread < valid_rows:
            result, row = shared_memory.Address(row_result + at.thread * 4), i32(first_row + at.thread)
            if grouped and item.group_size > 0:
                token = token_of_row(at.thread, reciprocal)
                row = i32(row + token * (sequence_rows - batch.gqa_ratio))
            partials.row_max[row] = int_as_float(shared_memory.load_word(result))
            partials.row_sum[row] = int_as_float(shared_memory.load_word(result + rows * 4))
        for i in range(columns):
            column = i32(i // 2 * 8 + at.pair + i % 2)
            rows_of[i] = i32(first_row + column)
            if grouped and item.group_size > 0:
                token = token_of_row(column, reciprocal)
                rows_of[i] = i32(rows_of[i] + token * (sequence_rows - batch.gqa_ratio))
            if column >= valid_rows:
                rows_of[i] = i32(-1)
        write_acc(registers.acc, rows_of, partials.acc, i32(at.warp * 16 + at.group_lane))

    @device_function
    def enqueue(merges, base, slot, parity, fields, thread):
        """Put an item's MERGE_FIELDS into the merging warp's queue; returns (slot, parity). Sequence -1 ends it."""
        # All threads wait: after a loop for one of them alone, ptxas would not assume that the warp has reconverged,
        # and would use no uniform registers in the main loop.
        full, empty = shared_memory.Address(base + layout.merge_full), shared_memory.Address(base + layout.merge_empty)
        mbarrier_wait(shared_memory.Address(empty + slot * MBARRIER_BYTES), parity)
        if thread == 0:
            for i in range(MERGE_FIELDS):
                merges[slot, i] = fields[i]
        # All threads arrive: what each of them wrote of the partial is then visible to the merging warp.
        mbarrier_arrive(shared_memory.Address(full + slot * MBARRIER_BYTES))
        return next_slot(slot, parity)

    return resume, write_partial, enqueue


@functools.cache
def output_functions(config):
    """(write_out, write_zeros): the device functions by which a computing warpgroup writes out and lse."""
    head_dim, rows, columns = config.head_dim, config.rows, config.rows // 4
    chunks, (_, store_chunk) = head_dim // 8, vector_access(4, 4)
    stage_out, _, _ = accumulator_access(config.boxes, head_dim, config.element, rows)

    @device_function
    def write_out(registers, item, batch, out, lse, q_tile, row_result, valid_rows, reciprocal, at):
        """Write the out of a whole sequence, through the memory of q, so that 16 bytes are stored at once."""
        inverse, words = registers.rescale, cuda.local.array(4, np.int32)
        for i in range(columns):
            inverse[i] = f32(1.0) / registers.row_sum[i]
        stage_out(registers.acc, inverse, q_tile, at.offset)
        shared_memory.fence_proxy_async()
        named_barrier_sync(EXCHANGED, WARPGROUP)
        head = i32(item.kv_head * batch.gqa_ratio)
        if at.thread < valid_rows and lse.shape[0] > 0:
            result, token = shared_memory.Address(row_result + at.thread * 4), token_of_row(at.thread, reciprocal)
            lse[head + at.thread - token * batch.gqa_ratio, item.start + token] = softmax.log_sum_exp(
                int_as_float(shared_memory.load_word(result)), int_as_float(shared_memory.load_word(result + rows * 4))
            )
        index = at.thread
        while index < valid_rows * chunks:
            row = udiv(index, chunks)
            chunk = i32(index - row * chunks)
            index = i32(index + WARPGROUP)
            source = shared_memory.Address(q_tile + ((chunk >> i32(3)) * rows + row) * shared_memory.LINE)
            source = shared_memory.Address(source + (((chunk ^ row) & i32(7)) << i32(4)))
            words[0], words[1], words[2], words[3] = shared_memory.load_words(source)
            token = token_of_row(row, reciprocal)
            row = i32((item.start + token) * batch.heads + head + row - token * batch.gqa_ratio)
            store_chunk(out[np.uint32(row)], chunk * 4, words, 0)

    @device_function
    def write_zeros(item, batch, out, thread):
        """Write zeros for a sequence without keys, such as an unused slot of a captured graph."""
        index = thread
        while index < item.length * batch.gqa_ratio * (head_dim // 2):
            row = udiv(index, head_dim // 2)
            token, word = udiv(row, batch.gqa_ratio), i32(index - row * (head_dim // 2))
            head = item.kv_head * batch.gqa_ratio + row - token * batch.gqa_ratio
            out[(item.start + token) * batch.heads + head, word] = i32(0)
            index = i32(index + WARPGROUP)
        named_barrier_sync(STORED, WARPGROUP)

    return write_out, write_zeros


@functools.cache
def consumer_function(config):
    """The device function of the computing warpgroup."""
    rows, grouped, resumes, layout, q_bytes = config.rows, config.grouped, config.resumes, config.layout, config.q_bytes
    columns, score_count, acc_count, fused = rows // 4, rows // 2, config.boxes * rows // 2, config.fused_qkv
    total_count = acc_count if config.max_leading > 1 else 1
    mainloop, (_, next_slot) = mainloop_function(config), ring(Q_SLOTS)
    resume, write_partial, enqueue = partial_functions(config)
    write_out, write_zeros = output_functions(config)

    @device_function
    def read_item(items, slot):
        return DecodeItem(
            items[slot, 0], items[slot, 1], items[slot, 2], items[slot, 3], items[slot, 4], items[slot, 5],
            items[slot, 6], items[slot, 7], items[slot, 8], items[slot, 9], items[slot, 10],
            items[slot, NEW_TOKEN] if fused else i32(0),
        )  # fmt: skip

    @device_function
    def consume(batch, partials, out, lse, c, queues, base, thread):
        """Compute work items until there are none."""
        lane, warp = i32(thread & i32(31)), i32(thread >> i32(5))
        line, half_of_keys = lane & i32(7), (lane >> i32(3)) & i32(1)
        offset = shared_memory.Address(line * shared_memory.LINE + (((warp * i32(2) + half_of_keys) ^ line) << i32(4)))
        at = Lane(thread, warp, lane, i32(lane >> i32(2)), i32(i32(2) * i32(lane & i32(3))), offset)
        registers = DecodeRegisters(
            cuda.local.array(score_count, np.float32), cuda.local.array(acc_count, np.float32),
            cuda.local.array(total_count, np.float32), cuda.local.array(columns, np.int32),
            cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32),
            cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32),
            cuda.local.array(columns, np.float32), cuda.local.array(columns, np.float32),
            cuda.local.array(columns, np.int32), cuda.local.array(columns, np.int32),
        )  # fmt: skip
        for i in range(score_count):
            registers.scores[i] = f32(0.0)
        for i in range(acc_count):
            registers.acc[i] = f32(0.0)
        row_result = shared_memory.Address(base + layout.row_result)
        q_full, q_empty = shared_memory.Address(base + layout.q_full), shared_memory.Address(base + layout.q_empty)
        reciprocal = udiv(i32(65535) + batch.gqa_ratio, batch.gqa_ratio)
        stage, parity, slot, q_parity, working = i32(0), i32(0), i32(0), i32(0), True
        merge_slot, merge_parity = i32(0), i32(1)
        while working:
            mbarrier_wait(shared_memory.Address(q_full + slot * MBARRIER_BYTES), q_parity)
            item, q_tile = read_item(queues.items, slot), shared_memory.Address(base + layout.q + slot * q_bytes)
            working = item.tiles >= 0
            if item.tiles > 0:
                if resumes and item.resumes_partial > 0:
                    resume(registers, item, batch, partials, at)
                stage, parity = mainloop(registers, item, base, q_tile, stage, parity, reciprocal, c, at)
                sequences = max(item.group_size, i32(1)) if grouped else i32(1)
                valid_rows = i32((sequences if grouped and item.group_size > 0 else item.length) * batch.gqa_ratio)
                # Store a column's maximum and sum, for a thread of its own; loops over all columns of this thread must
                # be short, or NVVM would not unroll them and local arrays would stay in memory.
                whole = item.splits == 1 or item.resumes_partial > 0
                if (not whole or lse.shape[0] > 0) and at.warp == 0 and at.group_lane == 0:
                    for i in range(0, columns, 2):
                        result = row_result + (i * 4 + at.pair) * 4
                        shared_memory.store_pair(result, registers.row_max[i], registers.row_max[i + 1])
                        shared_memory.store_pair(result + rows * 4, registers.row_sum[i], registers.row_sum[i + 1])
                if resumes and item.resumes_partial > 0 and thread == 0:
                    batch.counters[2 + item.sequence * batch.kv_heads + item.kv_head] = i32(0)
                if whole:
                    write_out(registers, item, batch, out, lse, q_tile, row_result, valid_rows, reciprocal, at)
                    mbarrier_arrive(shared_memory.Address(q_empty + slot * MBARRIER_BYTES))
                else:
                    mbarrier_arrive(shared_memory.Address(q_empty + slot * MBARRIER_BYTES))
                    named_barrier_sync(EXCHANGED, WARPGROUP)
                    write_partial(registers, item, batch, partials, row_result, valid_rows, reciprocal, at)
                    fields = item.sequence, item.kv_head, item.start, sequences, i32(valid_rows // sequences)
                    merge_slot, merge_parity = enqueue(queues.merges, base, merge_slot, merge_parity, fields, thread)
            elif item.tiles == 0:
                write_zeros(item, batch, out, thread)
                mbarrier_arrive(shared_memory.Address(q_empty + slot * MBARRIER_BYTES))
            slot, q_parity = next_slot(slot, q_parity)
        end = i32(-1), i32(0), i32(0), i32(0), i32(0)
        enqueue(queues.merges, base, merge_slot, merge_parity, end, thread)

    return consume
