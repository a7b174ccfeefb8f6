"""Attention of new tokens to a cache in blocks: decode, chunked prefill and prefix hits (Kwon et al., 2023).

The equations are those of kernels/attention/ops.py, and so is the family of kernels that computes them. Only the place
of a key differs: key j of sequence b is row j % block_size of block block_tables[b, j // block_size]. A row's output
has the bits that `attention` gives it.

q, out (N, H, E); k_cache, v_cache (blocks, block_size, HK, E) in float32, float16 or bfloat16. Query i of
sequence b has the position context_lens[b] - length + i and sees the keys up to it, with a window the last `window` of
these. Blocks that no query of a call sees, and whose keys are before sequences.py:first_kept_key, are not read.

Neighbouring sequences with a common prefix may be declared a group. This is a hint: where `sharing` says so, the
prefix's keys are read once for the group; the bits of a row never depend on it.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention import sm80_decode, sm90_paged
from rlnumba.kernels.attention.ops import attention_family, check_heads, check_window
from rlnumba.kernels.attention.reference import attention_ref
from rlnumba.kernels.attention.simt import paged_attention_simt
from rlnumba.kernels.attention.sm90_decode.config import decode_config as sm90_decode_config
from rlnumba.kernels.attention.softmax import TILE_KEYS
from rlnumba.kernels.attention.split_kv import AttentionWorkspace
from rlnumba.kernels.checks import FLOATS, I32, check, check_chunks
from rlnumba.kernels.cpu import attention as attention_cpu
from rlnumba.kernels.nn.qkv import check_projection, qkv_split_to_cache
from rlnumba.runtime import device
from rlnumba.runtime.context import current


class PrefixSharing(NamedTuple):
    """The cases in which reading a shared prefix once for a group of sequences pays.

    sizes: values of max_group_size without padding, ascending; the last is the limit; () if it never pays. keys: a
    shared prefix is read once in whole segments of this many keys; the remainder is read for each sequence.
    """

    sizes: tuple
    keys: int


def sharing(element, heads, kv_heads, head_dim, block_size):
    """The PrefixSharing of decode over a cache of such heads; element: the dtype's name. Only sm90 kernels share."""
    group = heads // kv_heads
    if attention_family(element, head_dim, group) != "sm90":
        return PrefixSharing((), 0)
    config = sm90_decode_config(head_dim, element, group, min(block_size, TILE_KEYS))
    return PrefixSharing(sm90_paged.supported_group_sizes(group), config.segment)


def reserve_workspace(element, heads, kv_heads, head_dim, block_size, calls, windows=False):
    """Allocate the current context's workspace for any of `calls`, so that none of them allocates; returns its bytes.

    The arguments are workspace_sizes'.
    """
    sizes = workspace_sizes(element, heads, kv_heads, head_dim, block_size, calls, windows)
    return current().own(AttentionWorkspace).reserve(*sizes) if sizes else 0


def workspace_sizes(element, heads, kv_heads, head_dim, block_size, calls, windows=False):
    """Words of four bytes of the arrays of an AttentionWorkspace for any of `calls`, a tuple; () where it needs none.

    element: the dtype's name. calls: bounds of each, (sequences B, tokens N, max_seqlen_q, max_context_len). windows:
    whether there are calls with a window, too.
    """
    group = heads // kv_heads
    family = attention_family(element, head_dim, group)
    if family == "sm90":
        box = min(block_size, TILE_KEYS)
        calls = [(sequences, longest, context) for sequences, _, longest, context in calls]
        return sm90_paged.workspace_sizes(element, kv_heads, group, head_dim, box, calls, windows)
    if family == "sm80":
        return sm80_decode.workspace_sizes(element, kv_heads, group, head_dim, block_size, calls)
    return ()


def plan_paged_attention(element, heads, kv_heads, head_dim, block_size, sequences):
    """Make the plan that calls of paged_attention with the same sequences, such as the layers of a step, share.

    element: the dtype's name; sequences: PagedSequences. Returns their `plan`, made on the device from what the arrays
    hold then, and good until the next one is made; None where nothing is gained.
    """
    if attention_family(element, head_dim, heads // kv_heads) != "sm90":
        return None
    return sm90_paged.plan_decode((element, heads, kv_heads, head_dim, block_size), sequences)


def check_groups(op, groups, sequences, max_seqlen_q):
    """ValueError unless the SharedPrefixes, if there are any, are of sequences with one query token each."""
    if groups is None:
        return
    check(op, "shared_prefix_lens", groups.shared_prefix_lens, (sequences,), I32)
    check(op, "group_sizes", groups.group_sizes, (sequences,), I32)
    if groups.max_group_size < 1:
        raise ValueError(f"{op}: max_group_size must be at least 1, got {groups.max_group_size}")
    if max_seqlen_q > 1:
        raise ValueError(f"{op}: max_seqlen_q must be 1 where groups are declared, got {max_seqlen_q}")


def _check_cache(op, q, caches, sequences, scale):
    """The caches as (rows, HK, E), or ValueError; q: heads of queries, or an array for the outputs of as many."""
    k_cache, v_cache = caches
    blocks, block_size, kv_heads, head_dim = check(op, "k_cache", k_cache, (None,) * 4, FLOATS)
    check(op, "v_cache", v_cache, k_cache.shape, FLOATS)
    k, v = (cache.reshape(blocks * block_size, kv_heads, head_dim) for cache in caches)
    check_heads(op, q, k, v, scale)
    check_window(op, sequences.window)
    count, max_blocks = check(op, "block_tables", sequences.block_tables, (None, None), I32)
    check(op, "cu_seqlens", sequences.cu_seqlens, (count + 1,), I32)
    check(op, "context_lens", sequences.context_lens, (count,), I32)
    if sequences.max_context_len > max_blocks * block_size:
        raise ValueError(
            f"{op}: max_context_len must be at most {max_blocks} blocks of {block_size} tokens, "
            f"got {sequences.max_context_len}"
        )
    check_groups(op, sequences.groups, count, sequences.max_seqlen_q)
    return k, v


def paged_attention(q, caches, sequences, scale, out):
    """Causal attention of the newest tokens of B sequences to their keys in a block cache.

    q (N, H, E) and caches (k_cache, v_cache), each (blocks, block_size, HK, E), of one floating dtype, H a multiple of
    HK, E even and at most 256; scale > 0; sequences: PagedSequences. out (N, H, E) of q's dtype is written; where
    context_lens is 0, with zeros; it is the same, bit for bit, with and without groups. The grid follows from the
    shapes and max_seqlen_q alone, so a captured graph stays valid while the arrays' values change.

    Raises ValueError for other shapes, dtypes or layouts, for a max_context_len beyond the block tables, for groups
    that are too large or have longer queries, for a plan of another call, and for a block_size that the family of
    kernels does not take; all take 16, 32 and 64.
    """
    op, (k_cache, v_cache) = "paged_attention", caches
    k, v = _check_cache(op, q, caches, sequences, scale)
    check(op, "out", out, q.shape, (q.dtype,))
    _, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if device.name() == "cpu":
        attention_cpu.paged_attention(q, k, v, block_size, sequences, scale, out)
        return
    family = attention_family(q.dtype.name, head_dim, heads // kv_heads)
    if family == "simt":
        paged_attention_simt(q, k, v, block_size, sequences, scale, out)
        return
    check_chunks(op, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
    if family == "sm90":
        sm90_paged.paged_attention_sm90(q, caches, sequences, scale, out)
    else:
        sm80_decode.paged_attention_sm80(q, k, v, block_size, sequences, scale, out)


def fuses_qkv(element, heads, kv_heads, head_dim):
    """Whether paged_attention_qkv is one kernel for such heads; element: the dtype's name."""
    return attention_family(element, head_dim, heads // kv_heads) == "sm90"


def paged_attention_qkv(qkv, norm, rotation, caches, sequences, scale, out):
    """Decode from the fused projection: qkv_split_to_cache, then paged_attention of one query token a sequence.

    The same bits; where `fuses_qkv` says so one kernel, elsewhere the two, with memory for q in between. qkv, norm and
    rotation as qkv_split_to_cache takes them, for N = B tokens; the rest as paged_attention, with cu_seqlens 0 .. B and
    max_seqlen_q 1. slot_mapping: where a sequence's token belongs, which is its last key, so the row of key
    context_lens - 1; -1: the caches stay as they are, as they must where context_lens is 0. The caches and out
    (B, H, E) are written.

    Inside pdl_scope the caches' other rows, block_tables, context_lens, position_ids, slot_mapping, weights and tables
    are read early: no kernel launched inside before this one may write them, unless with serialize_next. Raises
    ValueError as qkv_split_to_cache and paged_attention do.
    """
    op, (k_cache, v_cache) = "paged_attention_qkv", caches
    count, heads, head_dim = check(op, "out", out, (None, None, None), FLOATS)
    _check_cache(op, out, caches, sequences, scale)
    kv_heads = k_cache.shape[2]
    check_projection(op, qkv, out, kv_heads, norm, rotation)
    check(op, "slot_mapping", sequences.slot_mapping, (count,), I32)
    check(op, "context_lens", sequences.context_lens, (count,), I32)
    if sequences.max_seqlen_q != 1:
        raise ValueError(f"{op}: max_seqlen_q must be 1, got {sequences.max_seqlen_q}")
    if fuses_qkv(out.dtype.name, heads, kv_heads, head_dim):
        check_chunks(op, qkv=qkv, k_cache=k_cache, v_cache=v_cache, out=out)
        sm90_paged.paged_attention_qkv_sm90(qkv, norm, rotation, caches, sequences, scale, out)
        return
    q = device.xp().empty(out.shape, out.dtype)
    qkv_split_to_cache(qkv, norm, rotation, sequences.slot_mapping, q, caches)
    paged_attention(q, caches, sequences, scale, out)


def paged_attention_ref(q, k_cache, v_cache, block_tables, cu_seqlens, context_lens, scale, window=0):
    """out of paged_attention in float64."""
    keys = [np.arange(context) for context in context_lens]
    block_size = k_cache.shape[1]
    blocks = np.concatenate([table[j // block_size] for table, j in zip(block_tables, keys, strict=True)])
    offsets = np.concatenate(keys) % block_size
    bounds = np.concatenate([[0], np.cumsum(context_lens)])
    k, v = k_cache[blocks, offsets], v_cache[blocks, offsets]
    return attention_ref(q, k, v, cu_seqlens, scale, window, bounds)[0]
