"""Tile schedulers of attention on sm_90: which work item a block computes next.

Prefill: a work item is a query tile of one sequence, and one query head, or one for each consumer. Work indices count
the query tiles that end the longest sequences first, since these have the most keys; blocks take them in turn.
"""

import functools
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.ptx.warp import ballot, device_function
from rlnumba.runtime.device import cuda

i32 = np.int32


class Batch(NamedTuple):
    """The sequences of a prefill kernel: (B + 1,) bounds of queries, (B,) keys, B, query heads of a key head.

    decode_rows: sequences with at most so many query rows a key head are the decode kernel's.
    """

    cu_seqlens: object
    context_lens: object
    sequences: object
    gqa_ratio: object
    decode_rows: object


@functools.cache
def prefill_scheduler(paged, tile_tokens):
    """(first_query_tile, next_query_tile, find_sequence): the device functions of the prefill scheduler, for a warp.

    paged: sequences without keys, and those with at most batch.decode_rows rows, are left to the decode kernel.
    """

    @device_function
    def query_tokens(sequence, batch):
        """How many query tokens of a sequence this kernel works on; 0 beyond the last sequence."""
        tokens = i32(0)
        if sequence < batch.sequences:
            tokens = i32(batch.cu_seqlens[sequence + 1] - batch.cu_seqlens[sequence])
            if paged and (i32(tokens * batch.gqa_ratio) <= batch.decode_rows or batch.context_lens[sequence] == 0):
                tokens = i32(0)
        return tokens

    @device_function
    def count_longer(tokens, batch, lane):
        """How many sequences have more than `tokens` query tokens."""
        count, first = i32(0), i32(0)
        while first < batch.sequences:
            count = i32(count + cuda.popc(ballot(query_tokens(i32(first + lane), batch) > tokens)))
            first = i32(first + 32)
        return count

    @device_function
    def first_query_tile(query_tiles, batch, lane):
        """(query tile, work items of tiles before it, sequences that have it): the last tile of the longest sequence."""
        query_tile = i32(query_tiles - 1)
        return query_tile, i32(0), count_longer(i32(query_tile * tile_tokens), batch, lane)

    @device_function
    def next_query_tile(work_index, query_tile, items_before, longer, heads, batch, lane):
        """The query tile that a work index lies in, as first_query_tile; -1: there is no more work.

        heads: work items that a query tile of one sequence makes.
        """
        while query_tile >= 0 and work_index >= i32(items_before + longer * heads):
            items_before = i32(items_before + longer * heads)
            query_tile = i32(query_tile - 1)
            if query_tile >= 0:
                longer = count_longer(i32(query_tile * tile_tokens), batch, lane)
        return query_tile, items_before, longer

    @device_function
    def find_sequence(rank, tokens, batch, lane):
        """The index of the sequence with more than `tokens` query tokens before which there are `rank` others."""
        found, first = i32(0), i32(0)
        while first < batch.sequences:
            longer = query_tokens(i32(first + lane), batch) > tokens
            mask = ballot(longer)
            before = i32(cuda.popc(np.int64(mask) & ~(np.int64(-1) << np.int64(lane))))
            match = ballot(longer and before == rank)
            if match != 0:
                found = i32(first + cuda.ffs(match) - 1)
            rank = i32(rank - cuda.popc(mask))
            first = i32(first + 32)
        return found

    return first_query_tile, next_query_tile, find_sequence
