"""Attention of a step: the transformer's attention backend over the paged KV cache."""

from rlnumba.kernels.attention.paged import fuses_qkv, paged_attention, paged_attention_qkv, plan_paged_attention
from rlnumba.kernels.nn.qkv import qkv_split_to_cache

# The arrays of a step that attention reads beside the groups'.
READ_BY_ATTENTION = ("slot_mapping", "block_tables", "cu_seqlens", "context_lens")


class PagedAttention:
    """The transformer's attention backend over the paged cache: K and V of the step are written, then read.

    cache: a KVCache; arrays: those of a step (arrays.py), on the device; max_group_size: the bound of prefix groups'
    sizes, if the arrays have groups.
    """

    def __init__(self, cache, config, arrays, max_seqlen_q, max_context_len, max_group_size=1):
        self.cache, self.scale, self.arrays = cache, config.scale, arrays
        self.bounds = max_seqlen_q, max_context_len
        self.groups = arrays.get("shared_prefix_lens"), arrays.get("group_sizes"), max_group_size
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        heads = (cache.arrays[0].dtype.name, config.num_attention_heads, kv_heads, head_dim, cache.block_size)
        self.fuses_qkv = max_seqlen_q == 1 and fuses_qkv(*heads[:4])
        # Made once, because it is the same for all layers with attention.
        self.plan = plan_paged_attention(
            *heads, arrays["cu_seqlens"], arrays["context_lens"], *self.bounds, *self.groups
        )

    def forward(self, layer, qkv, w, ctx, out):
        """The same as PackedAttention.forward, but k and v are written to the layer's cache and read there.

        Returns q, the layer's caches and None; for q None as well where attention computes it from qkv.
        """
        caches, (max_seqlen_q, max_context_len) = self.cache.layers[layer], self.bounds
        projection = qkv, w.q_norm, w.k_norm, ctx.config.rms_norm_eps, *ctx.rope, ctx.position_ids
        slots, tables, cu_seqlens, context_lens = (self.arrays[name] for name in READ_BY_ATTENTION)
        sequences, groups = (tables, cu_seqlens, context_lens), (*self.groups, self.plan)
        if self.fuses_qkv:
            paged_attention_qkv(*projection, slots, *caches, *sequences, max_context_len, self.scale, out, *groups)
            return None, *caches, None
        q = ctx.memory.empty(out.shape, out.dtype)
        qkv_split_to_cache(*projection, slots, q, *caches)
        paged_attention(q, *caches, *sequences, max_seqlen_q, max_context_len, self.scale, out, *groups)
        return q, *caches, None


class NullAttention:
    """An attention backend that computes nothing, for a forward pass that only sizes the arena."""

    def forward(self, layer, qkv, w, ctx, out):
        ctx.memory.empty(out.shape, out.dtype)
        out.fill(0)
        return None, None, None, None
