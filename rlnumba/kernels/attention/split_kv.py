"""Split-KV decode on sm_90: partial results of a sequence's segments, and how they merge.

A row's result over some of its keys is (m, l, acc), as sm90_forward.py defines them. Partials merge in the order of the
segments, in both places: a thread in registers, within a work item (merge_segment), or a warp from global memory,
when the last item of a sequence and key head is done (merge_partials). The bits are the same.

In registers the layout is that of O^T = V^T P^T by wgmma: of R rows (columns of O^T), a thread has R / 4, and of each 2
columns of V for each 64.
"""

import functools
from collections import namedtuple

import numpy as np

from rlnumba.kernels.attention.softmax import MINUS_INFINITY, log_sum_exp, merge_weights
from rlnumba.kernels.ptx.shared_memory import LINE, Address, stmatrix_x2_trans
from rlnumba.kernels.ptx.warp import cvt_pack, device_function, udiv, vector_access
from rlnumba.runtime.device import cuda
from rlnumba.runtime.growing_array import GrowingArray

i32, f32 = np.int32, np.float32


# Partials in global memory, flat float32: acc (slots rows E,), row_max and row_sum (slots rows,). A slot has `rows`
# rows. Split s of a sequence and key head has slot (sequence HK + key head) max_splits + s.
Partials = namedtuple("Partials", "acc row_max row_sum max_splits rows")


@functools.cache
def segment_merge(acc_count, columns):
    """The device function that merges a segment with the ones before it in the same work item."""

    @device_function
    def merge_segment(acc, row_max, row_sum, total, total_max, total_sum, first):
        """Merge a segment into total, in place; `first`: total holds nothing yet, and becomes the segment."""
        for i in range(columns):
            j = i // 2 * 4 + i % 2
            if first:
                total_max[i], total_sum[i] = row_max[i], row_sum[i]
                for k in range(j, acc_count, 2 * columns):
                    total[k], total[k + 2] = acc[k], acc[k + 2]
            else:
                largest, a, b = merge_weights(total_max[i], row_max[i])
                total_max[i] = largest
                total_sum[i] = cuda.fma(row_sum[i], b, total_sum[i] * a)
                for k in range(j, acc_count, 2 * columns):
                    total[k] = cuda.fma(acc[k], b, total[k] * a)
                    total[k + 2] = cuda.fma(acc[k + 2], b, total[k + 2] * a)

    return merge_segment


@functools.cache
def box_functions(box, head_dim, element, rows):
    """(stage_out, write_acc, read_acc): device functions for 64 columns of V of a thread's part of an item."""
    cvt_pair = cvt_pack(element)
    columns, first = rows // 4, box * rows // 2

    @device_function
    def stage_out(acc, inverse, boxes, offset):
        """acc inverse to shared memory, a line of 64 columns for each row; offset: of consumer.Lane."""
        for i in range(columns // 2):
            j = first + 4 * i
            low = cvt_pair(acc[j] * inverse[2 * i], acc[j + 1] * inverse[2 * i + 1])
            high = cvt_pair(acc[j + 2] * inverse[2 * i], acc[j + 3] * inverse[2 * i + 1])
            stmatrix_x2_trans(Address(boxes + offset + (box * rows + i * 8) * LINE), low, high)

    @device_function
    def write_acc(acc, partial_rows, partial_acc, e):
        """acc to the partial_rows-th rows of partial_acc (rows, E), from column e on, where the row is not -1."""
        for i in range(columns):
            offset = np.int64(np.int64(partial_rows[i]) * head_dim + e)
            for half in range(2):
                column = box * 64 + half * 8
                if partial_rows[i] >= 0 and (head_dim % 64 == 0 or e + column < head_dim):
                    partial_acc[offset + column] = acc[first + i // 2 * 4 + half * 2 + i % 2]

    @device_function
    def read_acc(acc, partial_rows, partial_acc, e):
        """Read the accumulators that write_acc wrote, zeros where the row is -1."""
        for i in range(columns):
            offset = np.int64(np.int64(partial_rows[i]) * head_dim + e)
            for half in range(2):
                column, j = box * 64 + half * 8, first + i // 2 * 4 + half * 2 + i % 2
                acc[j] = f32(0.0)
                if partial_rows[i] >= 0 and (head_dim % 64 == 0 or e + column < head_dim):
                    acc[j] = partial_acc[offset + column]

    return stage_out, write_acc, read_acc


@functools.cache
def accumulator_access(boxes, head_dim, element, rows):
    """box_functions for all columns of V, one box after the other: NVVM would not unroll so long a loop."""

    def in_turn(first, second):
        @device_function
        def both(acc, per_column, memory, offset):
            first(acc, per_column, memory, offset)
            second(acc, per_column, memory, offset)

        return both

    by_box = [box_functions(box, head_dim, element, rows) for box in range(boxes)]
    return tuple(functools.reduce(in_turn, functions) for functions in zip(*by_box, strict=True))


@functools.cache
def partial_merge(head_dim, element, prefetch):
    """The device function that merges the partials of a sequence and key head, `prefetch` of which load at once."""
    cvt_pair = cvt_pack(element)
    load_four, _ = vector_access(4, 4)
    loaded_count = 4 * prefetch

    @device_function
    def merge_partials(partials, first, count, rows, gqa_ratio, out, heads, lse, token, head, lane):
        """Write rows of out, from `head` and `token` on; first: the slot of the first of `count` partials."""
        loaded = cuda.local.array(loaded_count, np.float32)
        row_max, row_sum = cuda.local.array(prefetch, np.float32), cuda.local.array(prefetch, np.float32)
        total = cuda.local.array(4, np.float32)
        for index in range(lane, rows * (head_dim // 4), 32):
            row = udiv(index, head_dim // 4)
            column = i32((index - row * (head_dim // 4)) * 4)
            total_max, total_sum = MINUS_INFINITY, f32(0.0)
            for j in range(4):
                total[j] = f32(0.0)
            for start in range(0, count, prefetch):
                for i in range(prefetch):
                    offset = np.int64(first + min(start + i, count - 1)) * partials.rows + row
                    load_four(partials.acc, offset * head_dim + column, loaded, 4 * i)
                    row_max[i], row_sum[i] = partials.row_max[offset], partials.row_sum[offset]
                for i in range(prefetch):
                    if start + i == 0:
                        total_max, total_sum = row_max[i], row_sum[i]
                        for j in range(4):
                            total[j] = loaded[4 * i + j]
                    elif start + i < count:
                        largest, a, b = merge_weights(total_max, row_max[i])
                        total_max = largest
                        total_sum = cuda.fma(row_sum[i], b, total_sum * a)
                        for j in range(4):
                            total[j] = cuda.fma(loaded[4 * i + j], b, total[j] * a)
            row_token = udiv(row, gqa_ratio)
            row_head = i32(head + row - row_token * gqa_ratio)
            row_token = i32(token + row_token)
            inverse, out_row = f32(1.0) / total_sum, i32(row_token * heads + row_head)
            for j in range(0, 4, 2):
                out[out_row, (column + j) // 2] = cvt_pair(total[j] * inverse, total[j + 1] * inverse)
            if column == 0 and lse.shape[0] > 0:
                lse[row_head, row_token] = log_sum_exp(total_max, total_sum)

    return merge_partials


class AttentionWorkspace:
    """Partials, counters and lists of work items of one context, as large as the largest that was asked for.

    Counters are zero before and after a launch.
    """

    def __init__(self):
        self.arrays = [GrowingArray("attention", dtype) for dtype in (np.float32, np.int32, np.int32, np.int32)]
        self.floats, self.counters, self.items, self.window_items = self.arrays

    def float_array(self, count):
        return self.floats.first(count)

    def partials(self, slots, rows, head_dim, counters):
        """(acc (slots rows head_dim,), row_max, row_sum (slots rows,), counters)."""
        count = slots * rows
        floats = self.float_array(count * (head_dim + 2))
        acc = floats[: count * head_dim]
        row_max = floats[count * head_dim : count * (head_dim + 1)]
        row_sum = floats[count * (head_dim + 1) :]
        return acc, row_max, row_sum, self.counters.first(counters)

    def segment_totals(self, slots, floats):
        """(totals (slots, floats) with any content, in_use (slots,)) of sm80_attention_kernel."""
        totals = self.float_array(slots * floats).reshape(slots, floats)
        return totals, self.counters.first(slots)

    def item_list(self, items, columns, with_window):
        """The list of work items. Layers with a window and those without use lists of their own in one step."""
        items_of = self.window_items if with_window else self.items
        return items_of.first((1 + items) * columns).reshape(-1, columns)

    def reserve(self, *counts):
        """Allocate arrays of at least so many elements: floats, counters, items, those with a window, if there are any.

        Returns the bytes of all arrays.
        """
        for array, count in zip(self.arrays, counts, strict=True):
            if count:
                array.first(count)
        return sum(array.nbytes for array in self.arrays)
