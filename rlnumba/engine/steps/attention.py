"""Attention of a step: the transformer's attention backend over the paged KV cache."""

from rlnumba.kernels.attention.paged import fuses_qkv, paged_attention, paged_attention_qkv, plan_paged_attention
from rlnumba.kernels.attention.sequences import PagedSequences, SharedPrefixes
from rlnumba.kernels.delta_rule.arithmetic import StateCache, StateSequences
from rlnumba.kernels.delta_rule.decode.kernel import delta_rule_decode
from rlnumba.kernels.delta_rule.inputs import ConvCache, delta_rule_inputs, empty_tokens
from rlnumba.kernels.delta_rule.ops import delta_rule_family, paged_delta_rule
from rlnumba.kernels.nn.qkv import qkv_split_to_cache
from rlnumba.runtime import device


def sequences_of(arrays, max_seqlen_q, max_context_len, max_group_size=1):
    """The PagedSequences of a step with these arrays (arrays.py) and bounds, without a plan."""
    groups = None
    if "group_sizes" in arrays:
        groups = SharedPrefixes(arrays["shared_prefix_lens"], arrays["group_sizes"], max_group_size)
    return PagedSequences(
        arrays["cu_seqlens"], arrays["context_lens"], arrays["block_tables"], max_seqlen_q, max_context_len, groups,
        arrays["slot_mapping"],
    )  # fmt: skip


def fuses_delta_rule(element, config):
    """Whether decode computes a layer with linear attention by one kernel; element: the model's dtype's name."""
    dims = config.linear_key_head_dim, config.linear_value_head_dim
    return device.name() != "cpu" and delta_rule_family(element, *dims) != "simt"


class PagedAttention:
    """The transformer's attention backend over the paged cache: K and V of the step are written, then read.

    cache: a KVCache; arrays: those of a step (arrays.py), on the device; max_group_size: the bound of prefix groups'
    sizes, if the arrays have groups.
    """

    def __init__(self, cache, config, arrays, max_seqlen_q, max_context_len, max_group_size=1):
        self.cache, self.scale = cache, config.scale
        self.sequences = sequences = sequences_of(arrays, max_seqlen_q, max_context_len, max_group_size)
        kv_heads, head_dim = config.num_key_value_heads, config.head_dim
        heads = (cache.arrays[0].dtype.name, config.num_attention_heads, kv_heads, head_dim, cache.block_size)
        self.fuses_qkv = max_seqlen_q == 1 and config.has_plain_heads and fuses_qkv(*heads[:4])
        # With plans, which are made once for all layers of a window: {window: PagedSequences}.
        self.of_window = {}
        for window in {config.window_of(layer) for layer in range(config.num_hidden_layers)}:
            of_window = sequences._replace(window=window)
            if window and "window_tables" in arrays:
                tables = {"block_tables": arrays["window_tables"], "slot_mapping": arrays["window_slots"]}
                of_window = of_window._replace(**tables)
            self.of_window[window] = of_window._replace(plan=plan_paged_attention(*heads, of_window))
        if config.has_linear_attention:
            self.fuses_delta_rule = max_seqlen_q == 1 and fuses_delta_rule(cache.arrays[0].dtype.name, config)
            names = "cu_seqlens", "context_lens", "state_tables", "state_slots", "resumed_at"
            self.state_sequences = StateSequences(*(arrays[name] for name in names))

    def forward(self, layer, qkv, w, ctx, out):
        """The same as PackedAttention.forward, but k and v are written to the layer's cache and read there.

        Returns q, the layer's caches and None; for q None as well where attention computes it from qkv.
        """
        caches, norm, rotation = self.cache.layers[layer], w.head_norm(ctx.config), ctx.rotations[layer]
        sequences = self.of_window[ctx.config.window_of(layer)]
        if self.fuses_qkv:
            paged_attention_qkv(qkv, norm, rotation, caches, sequences, self.scale, out)
            return None, *caches, None
        q = ctx.memory.empty(out.shape, out.dtype)
        qkv_split_to_cache(qkv, norm, rotation, sequences.slot_mapping, q, caches)
        paged_attention(q, caches, sequences, self.scale, out)
        return q, *caches, None

    def delta_rule(self, layer, projected, weights, heads, memory, out):
        """The same as PackedAttention.delta_rule, from and to the states in the sequences' slots."""
        states, page_rows = self.cache.pages[layer]
        key_rows, value_rows, decay_sums, conv_rows = self.cache.slots[layer]
        tokens = empty_tokens(len(out), heads, projected.dtype, memory.empty, out.dtype)
        delta_rule_inputs(projected, weights, heads, self.state_sequences, tokens, ConvCache(conv_rows, page_rows))
        cache = StateCache(states, key_rows, value_rows, decay_sums)
        paged_delta_rule(tokens, self.state_sequences, cache, out)

    def delta_rule_decode(self, layer, projected, weights, norm, heads, outputs):
        """delta_rule and the gated norm behind it, where each sequence has one token; norm: its weight and eps."""
        states, page_rows = self.cache.pages[layer]
        *rows, conv_rows = self.cache.slots[layer]
        caches = StateCache(states, *rows), ConvCache(conv_rows, page_rows)
        delta_rule_decode(projected, weights, norm, heads, self.state_sequences, *caches, outputs)


class NullAttention:
    """An attention backend that computes nothing, for a forward pass that only sizes the arena."""

    fuses_delta_rule = False

    def delta_rule(self, layer, projected, weights, heads, memory, out):
        empty_tokens(len(out), heads, projected.dtype, memory.empty, out.dtype)
        out.fill(0)

    def forward(self, layer, qkv, w, ctx, out):
        ctx.memory.empty(out.shape, out.dtype)
        out.fill(0)
        return None, None, None, None
