"""Attention to the paged cache on sm_90, launched: decode by sm90_decode/, longer chunks by sm90_forward.py.

The work items of decode are listed once for all layers of a step: a DecodePlan. Partials and counters belong to the
current context (runtime/context.py), so that engines on streams of their own share none.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.scheduler import (
    ITEM_COLUMNS,
    LISTING_THREADS,
    Pages,
    list_work_items_kernel,
    prefill_batch,
)
from rlnumba.kernels.attention.sm90_config import MAX_DECODE_ROWS, TILE_ROWS, attention_config
from rlnumba.kernels.attention.sm90_decode.config import THREADS, DecodeBatch, DecodeConfig, Projection, decode_config
from rlnumba.kernels.attention.sm90_decode.kernel import paged_attention_sm90_kernel
from rlnumba.kernels.attention.sm90_forward import launch_attention
from rlnumba.kernels.attention.softmax import LOG2_E, TILE_KEYS
from rlnumba.kernels.attention.split_kv import AttentionWorkspace, Partials
from rlnumba.kernels.checks import unused
from rlnumba.kernels.nn.qkv import norm_of
from rlnumba.kernels.nn.rope import head_shape, in_halves
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.context import current
from rlnumba.runtime.launch import launch

# Query tokens of the longest chunks whose consumers take neighbouring tokens.
SHORT_CHUNK = 512
# Sequences of a step whose query tokens, if there are several, all go to the decode kernel. If there are more, as in
# the prefill of a group's last tokens, only those that fit the rows of decode do, and no wider kernel is compiled.
FEW_SEQUENCES = 8


def item_tokens_of(gqa_ratio, sequences, max_seqlen_q):
    """Query tokens of a sequence that decode's work items hold at least: all, in steps of few sequences, or 1."""
    return max_seqlen_q if sequences <= FEW_SEQUENCES and max_seqlen_q * gqa_ratio <= MAX_DECODE_ROWS else 1


def chunk_config(head_dim, element, gqa_ratio, box, max_seqlen_q):
    """The AttentionConfig for chunks of up to max_seqlen_q query tokens."""
    config = attention_config(head_dim, element, gqa_ratio, True, box)
    # H200, 16 and 8 heads of 128, 128 or 256 tokens at the end of 640 or 1,024: 1.06 and 1.09 of the speed of paired
    # consumers; 0.97 for chunks of 1,024 and 2,048 tokens.
    return config._replace(paired=False) if config.consumers > 1 and max_seqlen_q <= SHORT_CHUNK else config


def supported_group_sizes(gqa_ratio):
    """Values of max_group_size without padding rows, ascending; the last is the limit; () if there is none."""
    return tuple(rows // gqa_ratio for rows in (8, 16, MAX_DECODE_ROWS) if rows // gqa_ratio > 1)


def partial_slots(config, sequences, kv_heads, gqa_ratio, max_seqlen_q, max_context_len, leading=1):
    """(items of a sequence and key head, slots of partials, rows of a slot) that a call takes."""
    splits = 1 if config.window else max(-(-max_context_len // config.segment) - leading + 1, 1)
    slots = sequences * kv_heads * splits if splits > 1 else 1
    return splits, slots, min(max_seqlen_q, config.rows // gqa_ratio) * gqa_ratio


def workspace_sizes(element, kv_heads, gqa_ratio, head_dim, box, calls, windows):
    """The sm90 family's part of paged.workspace_sizes, which calls this. Declared groups need no more. box: of
    decode_config."""
    sequences_at_most = max((sequences for sequences, *_ in calls), default=0)
    # A call with fewer sequences and shorter queries may have wider work items.
    widest = MAX_DECODE_ROWS // gqa_ratio
    few = [(min(sequences, FEW_SEQUENCES), min(longest, widest), context) for sequences, longest, context in calls]
    floats = counters = items = 0
    for sequences, max_seqlen_q, max_context_len in [*calls, *few]:
        item_tokens = item_tokens_of(gqa_ratio, sequences, max_seqlen_q)
        config = decode_config(head_dim, element, gqa_ratio, box, 1, item_tokens)
        splits, slots, rows = partial_slots(config, sequences, kv_heads, gqa_ratio, max_seqlen_q, max_context_len)
        floats = max(floats, slots * rows * (head_dim + 2))
        counters = max(counters, 2 + sequences * kv_heads)
        items = max(items, sequences * splits)
    return floats, counters, (1 + items) * ITEM_COLUMNS, (1 + sequences_at_most) * ITEM_COLUMNS if windows else 0


class DecodePlan(NamedTuple):
    """The work items of decode, listed once for all layers of a step.

    made_for: element, heads, bounds, window and the arrays' lengths, which a call that uses it shares; blocks: of the
    grid; max_leading: segments of a sequence's first item; splits, slots, rows: of partial_slots; items: the list.
    """

    made_for: tuple
    config: DecodeConfig
    blocks: int
    max_leading: int
    splits: int
    slots: int
    rows: int
    items: object


def plan_decode(cache_heads, sequences, config=None, blocks=None, max_leading=None):
    """A DecodePlan, whose list is made on the device from what the arrays hold then, and stays until the next one.

    cache_heads: (element, heads, kv_heads, head_dim, block_size); sequences: PagedSequences. config, blocks and
    max_leading are those of decode_config, a grid that fills the GPU and this function's own choice by default.
    """
    element, heads, kv_heads, head_dim, block_size = cache_heads
    count, gqa_ratio = len(sequences.context_lens), heads // kv_heads
    max_seqlen_q, max_group_size = sequences.max_seqlen_q, sequences.max_group_size
    if block_size % TILE_KEYS and block_size not in (16, 32):
        raise ValueError(f"paged_attention: block_size must be 16, 32 or a multiple of 64, got {block_size}")
    if max_group_size > 1 and (max_group_size * gqa_ratio > MAX_DECODE_ROWS or max_seqlen_q > 1):
        raise ValueError(
            f"paged_attention: a group has at most {MAX_DECODE_ROWS // gqa_ratio} sequences of one query token each, "
            f"got {max_group_size} sequences of up to {max_seqlen_q}"
        )
    item_tokens = item_tokens_of(gqa_ratio, count, max_seqlen_q)
    config = config or decode_config(
        head_dim, element, gqa_ratio, min(block_size, TILE_KEYS), max_group_size, item_tokens
    )
    config = config._replace(window=sequences.window)
    grid = blocks or device.sm_count() * config.blocks
    # A leading span of several segments merges in registers; but it must not be too large a part of a block's work.
    max_leading = min(max_leading or max(count * kv_heads // grid, 1), config.max_leading)
    # A shared prefix may be one segment, and then the leading span is no longer.
    splits, slots, rows = partial_slots(
        config, count, kv_heads, gqa_ratio, max_seqlen_q, sequences.max_context_len,
        1 if config.grouped else max_leading,
    )  # fmt: skip
    items = current().own(AttentionWorkspace).item_list(count * splits, ITEM_COLUMNS, sequences.window > 0)
    groups = sequences.groups[:2] if config.grouped else (unused(1), unused(1))
    launch(
        list_work_items_kernel(config.rows, config.segment, config.grouped, config.window), 1,
        min(-(-max(count, 1) // 32) * 32, LISTING_THREADS),
        sequences.cu_seqlens, sequences.context_lens, *groups, np.int32(gqa_ratio), np.int32(max_leading), items,
        serialize_next=True,
    )  # fmt: skip
    made_for = _made_for(cache_heads, sequences)
    return DecodePlan(made_for, config, min(grid, count * kv_heads * splits), max_leading, splits, slots, rows, items)


def _made_for(cache_heads, sequences):
    """DecodePlan.made_for of a call."""
    bounds = sequences.max_seqlen_q, sequences.max_context_len, sequences.max_group_size, sequences.window
    return *cache_heads, len(sequences.context_lens), *bounds


def _plan_of(cache_heads, sequences):
    """The plan of a call, made if the sequences have none; ValueError if it is another call's."""
    plan, made_for = sequences.plan or plan_decode(cache_heads, sequences), _made_for(cache_heads, sequences)
    if plan.made_for != made_for:
        raise ValueError(f"paged_attention: the plan is for {plan.made_for}, not for {made_for}")
    return plan


def _cache_maps(*caches):
    """The tensor maps by which decode loads K and V."""
    blocks, block_size, kv_heads, head_dim = caches[0].shape
    rows = (cache.reshape(blocks * block_size, kv_heads, head_dim) for cache in caches)
    return [tensor_map(x, min(block_size, TILE_KEYS), 1, 64) for x in rows]


def _arguments_behind_maps(plan, sequences, sizes, scale, out, lse):
    """The arguments of paged_attention_sm90_kernel behind its tensor maps.

    sizes: block_size, heads, kv_heads, query tokens of a TMA box of q.
    """
    block_size, heads, kv_heads, tokens = sizes
    head_dim, count = out.shape[-1], len(sequences.context_lens)
    acc, row_max, row_sum, counters = (
        current().own(AttentionWorkspace).partials(plan.slots, plan.rows, head_dim, 2 + count * kv_heads)
    )
    batch = DecodeBatch(
        sequences.context_lens, sequences.groups.shared_prefix_lens if plan.config.grouped else unused(1), plan.items,
        counters, *map(np.int32, (heads, kv_heads, heads // kv_heads, tokens, plan.max_leading)),
    )  # fmt: skip
    return (
        batch, Pages(sequences.block_tables, np.int32(block_size)),
        Partials(acc, row_max, row_sum, np.int32(plan.splits), np.int32(plan.rows)),
        out.reshape(-1, head_dim).view(np.int32), unused(2, np.float32) if lse is None else lse, float(scale * LOG2_E),
    )  # fmt: skip


def paged_attention_sm90(q, caches, sequences, scale, out, lse=None, prefill_config=None):
    """The operator paged_attention by the sm90 kernels, for heads that sm90_config.is_supported accepts and scale > 0.

    lse (H, N) float32 is written if given, but not where context_lens is 0. prefill_config: instead of chunk_config's.
    Raises ValueError for a block size that is neither a multiple of 64 nor 16 or 32, for groups that are too large, and
    for a plan of another call.
    """
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = caches[0].shape
    gqa_ratio, element, max_seqlen_q = heads // kv_heads, q.dtype.name, sequences.max_seqlen_q
    if not tokens:
        return
    plan = _plan_of((element, heads, kv_heads, head_dim, block_size), sequences)
    box, maps, config = min(block_size, TILE_KEYS), _cache_maps(*caches), plan.config
    # Query tokens of a work item; a sequence with more is the prefill kernel's.
    item_tokens = min(config.rows // gqa_ratio, max(max_seqlen_q, sequences.max_group_size))
    sizes = block_size, heads, kv_heads, item_tokens
    launch(
        paged_attention_sm90_kernel(config), plan.blocks, THREADS, tensor_map(q, item_tokens, gqa_ratio, 64), *maps,
        *_arguments_behind_maps(plan, sequences, sizes, scale, out, lse), shared=config.layout.nbytes,
    )  # fmt: skip
    if max_seqlen_q * gqa_ratio <= config.rows:
        return
    prefill_config = prefill_config or chunk_config(head_dim, element, gqa_ratio, box, max_seqlen_q)
    launch_attention(
        prefill_config.with_window(sequences.window),
        [tensor_map(q, TILE_ROWS, 1, 64), *maps],
        prefill_batch(sequences.cu_seqlens, sequences.context_lens, gqa_ratio, config.rows),
        Pages(sequences.block_tables, np.int32(block_size)), max_seqlen_q, float(scale * LOG2_E), out,
        unused(2, np.float32) if lse is None else lse,
    )  # fmt: skip


def paged_attention_qkv_sm90(qkv, norm, rotation, caches, sequences, scale, out, lse=None):
    """The operator paged_attention_qkv in one kernel, for heads that sm90_config.is_supported accepts and scale > 0.

    lse (H, B): as in paged_attention_sm90. Raises ValueError as it does.
    """
    count, heads, head_dim = out.shape
    _, block_size, kv_heads, _ = caches[0].shape
    if not count:
        return
    plan = _plan_of((out.dtype.name, heads, kv_heads, head_dim, block_size), sequences)
    config, (cos, sin, _) = plan.config._replace(fused_qkv=True), rotation
    weights, eps = norm_of(norm)
    shape = head_shape(head_dim, cos, sin, qkv, *caches, *weights)
    # For the weights of a form without norm, any array of the right type.
    norm = [in_halves(weight, shape.half) for weight in weights] or [cos, cos]
    rows, k_rows, v_rows = (in_halves(array, shape.half) for array in (qkv, *caches))
    launch(
        paged_attention_sm90_kernel(config, shape, bool(weights)), plan.blocks, THREADS,
        Projection(rows, *norm, eps, *rotation, sequences.slot_mapping, k_rows, v_rows), *_cache_maps(*caches),
        *_arguments_behind_maps(plan, sequences, (block_size, heads, kv_heads, 1), scale, out, lse),
        shared=config.layout.nbytes,
    )  # fmt: skip
