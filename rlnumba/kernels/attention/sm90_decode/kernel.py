"""Decode attention on sm_90: one or a few query tokens a sequence against the paged cache, split over the keys.

The arithmetic is defined in sm90_forward.py; a row's bits are the same in prefill, decode and training.

The query rows of a key head (its query heads, for each token) are a handful where wgmma wants 64, so keys and queries
change places: S^T = K Q^T has 64 keys for rows and the query rows, padded to `rows`, for columns; O^T = V^T P^T has the
columns of V for rows. A query row's scores lie across the four warps: their maximum goes through shared memory, and so
does P^T on its way to be an operand.

The grid is persistent. A block draws work items (scheduler.py), spans of a sequence's keys for one key head, from a
counter. Its warps:

    warpgroup 0            computes (consumer.py): the rows of an item, or its partial to global memory
    warpgroup 1, warp 0    loads Q and K by TMA, and publishes the item (producer.py)
                 warp 1    loads V, and finds the same items
                 warp 2    merges the partials of a sequence (split_kv.py), in the block that finishes last
                 warp 3    makes q, k and v of the new tokens from their projection, with fused_qkv (qkv.py)

With fused_qkv the kernel also does the work of qkv_split_to_cache: the same bits, one launch less. K and V are then
loaded before griddepcontrol.wait, while the GEMM that makes qkv still runs.
"""

import functools

import numpy as np

from rlnumba.kernels.attention import scheduler
from rlnumba.kernels.attention.sm90_decode.config import (
    CONSUMER_REGISTERS,
    ITEM_FIELDS,
    MERGE_FIELDS,
    MERGE_SLOTS,
    PRODUCER_REGISTERS,
    Q_SLOTS,
    THREADS,
    WORK_INDICES,
    Queues,
)
from rlnumba.kernels.attention.sm90_decode.consumer import consumer_function
from rlnumba.kernels.attention.sm90_decode.producer import prefetch_function, producer_function
from rlnumba.kernels.attention.sm90_decode.qkv import preparer_function
from rlnumba.kernels.attention.split_kv import partial_merge
from rlnumba.kernels.ptx.semaphore import atomic_add_acq_rel
from rlnumba.kernels.ptx.shared_memory import Address
from rlnumba.kernels.ptx.sm90 import (
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_init_fence,
    mbarrier_wait,
    prefetch_tensor_map,
    setmaxnreg,
    tensor_map_address,
    warp_uniform,
)
from rlnumba.kernels.ptx.warp import (
    ballot,
    device_function,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    sync_warp,
)
from rlnumba.kernels.ptx.wgmma import WARPGROUP
from rlnumba.kernels.tile.pipeline import MBARRIER_BYTES, ring, shared_base
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import specialize, supports_pdl

i32 = np.int32

# Architectures that the kernel of this module compiles for.
ARCHITECTURES = [(9, 0, "a")]


@functools.cache
def merger_function(config):
    """The device function of the merging warp."""
    layout, (_, next_slot) = config.layout, ring(MERGE_SLOTS)
    _, count_splits, _ = scheduler.split_functions(config.rows, config.segment, config.grouped)
    merge_partials = partial_merge(config.head_dim, config.element, 8 if config.rows == 8 else 4)

    @device_function
    def merge_queue(batch, partials, out, lse, merges, base, lane):
        """Merge the partials of a sequence and key head when the last of them is written, until the queue ends."""
        full, empty = Address(base + layout.merge_full), Address(base + layout.merge_empty)
        slot, parity, working = i32(0), i32(0), True
        while working:
            mbarrier_wait(Address(full + slot * MBARRIER_BYTES), parity)
            sequence, kv_head, start = merges[slot, 0], merges[slot, 1], merges[slot, 2]
            sequences, rows = merges[slot, 3], merges[slot, 4]
            working = sequence >= 0
            if working:
                last = False
                if lane < sequences:
                    counter = i32(2 + (sequence + lane) * batch.kv_heads + kv_head)
                    written = i32(atomic_add_acq_rel(batch.counters, counter) + 1)
                    last = written == count_splits(i32(sequence + lane), batch)
                    if last:
                        batch.counters[counter] = i32(0)
                complete = ballot(last)
                sync_warp()
                for i in range(sequences):
                    if (complete >> i) & 1 != 0:
                        splits = count_splits(i32(sequence + i), batch)
                        merge_partials(
                            partials, ((sequence + i) * batch.kv_heads + kv_head) * partials.max_splits, splits, rows,
                            batch.gqa_ratio, out, batch.heads, lse, start + i, kv_head * batch.gqa_ratio, lane,
                        )  # fmt: skip
                mbarrier_arrive(Address(empty + slot * MBARRIER_BYTES))
            slot, parity = next_slot(slot, parity)

    return merge_queue


@functools.cache
def barrier_init(config):
    """The device function by which one thread initialises all mbarriers of a block."""
    layout = config.layout
    (init_ring, _), (init_q, _), (init_merges, _) = ring(config.stages), ring(Q_SLOTS), ring(MERGE_SLOTS)
    # A warp arrives for queries that it makes from qkv, else all lanes that publish the item.
    q_arrivals = 32 if config.fused_qkv else scheduler.ITEM_COLUMNS

    @device_function
    def init_barriers(base):
        init_ring(Address(base + layout.full), Address(base + layout.empty), 2, 1)
        init_q(Address(base + layout.q_full), Address(base + layout.q_empty), q_arrivals, WARPGROUP + 32)
        for slot in range(Q_SLOTS):
            mbarrier_init(Address(base + layout.item_full + slot * MBARRIER_BYTES), scheduler.ITEM_COLUMNS)
        for slot in range(WORK_INDICES):
            mbarrier_init(Address(base + layout.work_ready + slot * MBARRIER_BYTES), 1)
        init_merges(Address(base + layout.merge_full), Address(base + layout.merge_empty), WARPGROUP, 32)
        mbarrier_init_fence()

    return init_barriers


@specialize
def paged_attention_sm90_kernel(config, shape=None, normed=False):
    """The kernel of a DecodeConfig; with fused_qkv for heads of a HeadShape, with or without norm."""
    # Narrow accesses to heads need more registers for addresses.
    fused, blocks = config.fused_qkv, shape.blocks_of_sm(config.blocks) if config.fused_qkv else config.blocks
    # 128 registers a thread are enough for 8 rows.
    moves_registers = blocks > 1 and config.rows > 8
    setmaxnreg_dec, setmaxnreg_inc = setmaxnreg(PRODUCER_REGISTERS, False), setmaxnreg(CONSUMER_REGISTERS, True)
    produce, consume, merge_queue = producer_function(config), consumer_function(config), merger_function(config)
    init_barriers, prefetch_queries = barrier_init(config), prefetch_function(fused)
    prepare = preparer_function(config, shape, normed) if fused else None

    @supports_pdl
    @cuda.jit(launch_bounds=(THREADS, blocks))
    def paged_attention_sm90_kernel(queries, k_map, v_map, batch, pages, partials, out, lse, c):
        """A block computes work items until there are none; see the top for what each warp does.

        queries: the tensor map of q, or with fused_qkv a Projection. batch: a DecodeBatch; pages: Pages; partials:
        Partials. out (N H, E / 2): pairs of elements; lse (H, N), or empty if not wanted.
        """
        queues = Queues(
            cuda.shared.array((Q_SLOTS, ITEM_FIELDS), np.int32),
            cuda.shared.array(WORK_INDICES, np.int32),
            cuda.shared.array((MERGE_SLOTS, MERGE_FIELDS), np.int32),
        )
        thread = i32(cuda.threadIdx.x)
        lane, warp, base = i32(thread & i32(31)), warp_uniform(thread >> i32(5)), shared_base()
        if thread == 0:
            init_barriers(base)
        if thread == WARPGROUP:
            prefetch_tensor_map(tensor_map_address(k_map))
            prefetch_tensor_map(tensor_map_address(v_map))
            prefetch_queries(queries)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        # Each warp waits when it needs what earlier kernels wrote, or writes what they read. No kernel of the step
        # writes the list of work items or the page table.
        if warp >= 4:
            if moves_registers:
                setmaxnreg_dec()
            if warp < 6:
                loads_k = warp == 4
                source = tensor_map_address(k_map) if loads_k else tensor_map_address(v_map)
                produce(loads_k, queries, source, batch, pages, queues, base, lane)
            elif warp == 6:
                griddepcontrol_wait()
                merge_queue(batch, partials, out, lse, queues.merges, base, lane)
            elif fused:
                prepare(queries, batch, queues.items, base, lane)
        else:
            if moves_registers:
                setmaxnreg_inc()
            griddepcontrol_wait()
            consume(batch, partials, out, lse, c, queues, base, thread)

    return paged_attention_sm90_kernel
