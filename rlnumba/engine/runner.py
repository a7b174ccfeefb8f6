"""Compute a step: its arrays, the model over the paged KV cache, the draws; on the GPU as CUDA graphs.

The arrays of a step are built for all its sequences at once with NumPy and reach the device in one copy;
the drawn ids and their log-probs come back in one. A step in which every sequence lacks one token is
replayed as a graph on the GPU: captured once for a number of rows (rounded up to a bucket, the padding
rows have an empty context), a context length (rounded up to a power of two) and a size of groups (see groups.py).
"""

from contextlib import nullcontext

import numpy as np

from rlnumba.engine.cache import KVCache
from rlnumba.engine.sampler import Draws, draw
from rlnumba.kernels.attention.paged import paged_attention, plan_paged_attention, reserve_workspace, sharing
from rlnumba.kernels.nn.qkv import qkv_split_to_cache
from rlnumba.kernels.ptx.sm90 import keep_tensor_maps
from rlnumba.runtime import device, memory
from rlnumba.runtime.launch import pdl_scope

# Padding costs at most half of a small batch and 15 rows of a large one; nano-vllm's choice.
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 16
SMALLEST_CONTEXT = 256
# Shapes of steps that Upload remembers; those of graphs come again and again, those of prompts hardly ever.
MOST_LAYOUTS = 512
# What a padding row holds where it is not 0: no slot, and a group of its own.
PADDING = {"slot_mapping": -1, "group_sizes": 1}


def bucket_of(rows):
    """The smallest graph size that holds this many rows."""
    for bucket in SMALL_BUCKETS:
        if rows <= bucket:
            return bucket
    return -(-rows // BUCKET_STEP) * BUCKET_STEP


def context_bucket_of(length):
    """The smallest power of two, at least SMALLEST_CONTEXT, that holds this context."""
    return max(SMALLEST_CONTEXT, 1 << (length - 1).bit_length())


def step_arrays(step, table, block_size):
    """{name: array} of a step of B sequences, N tokens and D draws, for the model, the cache and the sampler.

    Of the tokens: input_ids, position_ids, slot_mapping (N,) int32. Of the sequences: block_tables (B, W),
    cu_seqlens (B + 1,), context_lens (B,) int32, in the order of step.rows, and in a step with groups
    shared_prefix_lens,
    group_sizes (B,) int32. Of the draws: what Draws says.
    """
    rows, counts = step.rows, step.counts
    ends = np.cumsum(counts)
    context_lens = step.starts + counts
    width = int(-(-context_lens.max() // block_size))
    if len(rows) == ends[-1]:
        token_rows, positions = rows, step.starts
    else:
        token_rows = np.repeat(rows, counts)
        positions = np.arange(ends[-1]) + np.repeat(step.starts - ends + counts, counts)
    blocks = table.block_tables[token_rows, positions // block_size].astype(np.int64)
    cu_seqlens = np.zeros(len(rows) + 1, np.int32)
    cu_seqlens[1:] = ends
    arrays = {
        "input_ids": table.token_ids[token_rows, positions],
        "position_ids": positions.astype(np.int32),
        "slot_mapping": (blocks * block_size + positions % block_size).astype(np.int32),
        "block_tables": table.block_tables[rows, :width],
        "cu_seqlens": cu_seqlens,
        "context_lens": context_lens.astype(np.int32),
    }
    if step.groups is not None:
        arrays["shared_prefix_lens"], arrays["group_sizes"] = step.groups.shared_prefix_lens, step.groups.group_sizes
    drawing = rows[step.draws]
    if not len(drawing):
        return arrays
    for name in ("temperature", "top_k", "top_p", "min_p", "keys", "sample_index"):
        arrays[name] = getattr(table, name)[drawing]
    arrays["position"] = table.length[drawing].astype(np.int32)
    if len(drawing) < ends[-1]:
        arrays["rows"] = (ends[step.draws] - 1).astype(np.int32)
    penalty = table.repetition_penalty[drawing]
    if (penalty != 1).any():
        lengths = table.length[drawing]
        history = table.token_ids[drawing, : lengths.max()]
        history[np.arange(history.shape[1]) >= lengths[:, None]] = -1
        arrays["penalty"], arrays["history"] = penalty, history
    return arrays


def pad_rows(arrays, rows, block_table_width):
    """The arrays of a decode step with padding rows: no context, no slot, token 0 drawn greedily and dropped."""
    padded = {}
    for name, array in arrays.items():
        if name == "cu_seqlens":
            padded[name] = np.arange(rows + 1, dtype=np.int32)
            continue
        shape = (rows, block_table_width) if name == "block_tables" else (rows, *array.shape[1:])
        if shape != array.shape:
            array, given = np.full(shape, PADDING.get(name, 0), array.dtype), array
            array[tuple(map(slice, given.shape))] = given
        padded[name] = array
    return padded


class PagedAttend:
    """The transformer's attention over the paged cache: keys and values of the step are written, then read.

    cache: a KVCache; arrays: of step_arrays, on the device; max_group_size: of groups, if they are among the arrays.
    """

    def __init__(self, cache, config, arrays, max_seqlen_q, max_context_len, max_group_size=1):
        self.cache, self.scale, self.arrays = cache, config.scale, arrays
        self.bounds = max_seqlen_q, max_context_len
        self.groups = arrays.get("shared_prefix_lens"), arrays.get("group_sizes"), max_group_size
        _, _, block_size, kv_heads, head_dim = cache.shape
        heads = (cache.dtype.name, config.num_attention_heads, kv_heads, head_dim, block_size)
        # The same in all layers, so it is found once.
        self.plan = plan_paged_attention(
            *heads, arrays["cu_seqlens"], arrays["context_lens"], *self.bounds, *self.groups
        )

    def qkv_norm_rope(self, layer, qkv, w, ctx, q):
        """As PackedAttention.qkv_norm_rope, but k and v are written to the layer's cache, and there is no rstd."""
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        norm, slots = (w.q_norm, w.k_norm, ctx.config.rms_norm_eps), self.arrays["slot_mapping"]
        qkv_split_to_cache(qkv, *norm, *ctx.rope, ctx.position_ids, slots, q, k_cache, v_cache)
        return k_cache, v_cache, None

    def forward(self, layer, q, k_cache, v_cache, out):
        """q (N, H, E) and the caches of qkv_norm_rope -> out (N, H, E), written in place."""
        tables, cu_seqlens, contexts = (self.arrays[name] for name in ("block_tables", "cu_seqlens", "context_lens"))
        numbers = (tables, cu_seqlens, contexts, *self.bounds, self.scale)
        paged_attention(q, k_cache, v_cache, *numbers, out, *self.groups, self.plan)


class NoAttention:
    """Stands in for attention where only the memory of a forward pass is of interest."""

    def qkv_norm_rope(self, layer, qkv, w, ctx, q):
        return None, None, None

    def forward(self, layer, q, k, v, out):
        out.fill(0)


class Upload:
    """Arrays of four-byte elements, sent to the device in one copy; on the CPU they are passed through.

    Arrays of the same shapes, sent in the same order, land at the same addresses: a captured graph reads
    the new values. words: room at the start, grown on demand, which moves the addresses.
    """

    def __init__(self, words=1 << 16):
        self.words = 0
        self.generation = 0
        if device.name() == "cuda":
            self._grow(words)

    def _grow(self, words):
        import cupyx

        self.words = words
        self.host = cupyx.empty_pinned(words, np.int32)
        self.device = device.xp().empty(words, np.int32)
        self.generation += 1
        # What was sent before: (words, pieces of the host's memory, views of the device's), by names and shapes.
        self.layouts = {}

    def send(self, arrays):
        """{name: NumPy array} -> {name: array of the device}. The last send must have been computed with."""
        if device.name() != "cuda":
            return arrays
        key = tuple((name, array.shape, array.dtype) for name, array in arrays.items())
        layout = self.layouts.get(key)
        if layout is None:
            layout = self._lay_out(arrays)
            if len(self.layouts) == MOST_LAYOUTS:
                self.layouts.clear()
            self.layouts[key] = layout
        words, pieces, views = layout
        for piece, array in zip(pieces, arrays.values(), strict=True):
            piece[...] = array
        stream = device.xp().cuda.get_current_stream()
        self.device[:words].set(self.host[:words], stream)
        return views

    def _lay_out(self, arrays):
        # 16-byte alignment for vector loads.
        sizes = {name: -(-array.size // 4) * 4 for name, array in arrays.items()}
        words = sum(sizes.values())
        if words > self.words:
            self._grow(2 * words)
        pieces, views, offset = [], {}, 0
        for name, array in arrays.items():
            flat = slice(offset, offset + array.size)
            pieces.append(self.host[flat].view(array.dtype).reshape(array.shape))
            views[name] = self.device[flat].view(array.dtype).reshape(array.shape)
            offset += sizes[name]
        return words, pieces, views


class Runner:
    """The model with its KV cache; `run` computes one step of the scheduler.

    max_num_batched_tokens, max_num_seqs, max_model_len: the largest step. eager: never capture graphs.
    """

    def __init__(self, model, block_size, max_num_batched_tokens, max_num_seqs, max_model_len, eager):
        self.model, self.block_size = model, block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_model_len = max_model_len
        self.eager = eager or device.name() != "cuda"
        self.arena = memory.Arena("engine activations")
        self.cache = None
        self.upload = Upload()
        self.results = device.xp().empty((2, max(bucket_of(max_num_seqs), max_num_seqs)), np.int32)
        # Graphs by (rows, context, max_group_size), and the addresses of the buffers that they were captured with.
        self.graphs, self.graph_addresses = {}, None
        self.stream = device.xp().cuda.Stream() if device.name() == "cuda" else None

    @property
    def block_bytes(self):
        """Bytes of one block: K and V of block_size tokens in all layers."""
        config = self.model.config
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return per_token * self.block_size * np.dtype(self.model.dtype).itemsize

    @property
    def heads(self):
        """What operators over the cache ask about it: (dtype's name, H, HK, E, block_size)."""
        config = self.model.config
        element = np.dtype(self.model.dtype).name
        return element, config.num_attention_heads, config.num_key_value_heads, config.head_dim, self.block_size

    @property
    def sharing(self):
        """How attention makes use of what the sequences of a step have in common."""
        return sharing(*self.heads)

    def allocate(self, num_blocks):
        """Take the memory of a cache of num_blocks, at its old addresses if it had this size before."""
        if self.cache is None or self.cache.num_blocks != num_blocks:
            self.graphs.clear()
            self.cache = KVCache(self.model.config, num_blocks, self.block_size, self.model.dtype)
        self.cache.take()

    def release(self):
        """Give the cache's memory back."""
        if self.cache is not None:
            self.cache.give_back()

    def reserve_activations(self):
        """Run the largest step once without attention, so that its memory is taken before the cache's size is set."""
        tokens = self.max_num_batched_tokens
        zeros = device.asarray(np.zeros(tokens, np.int32))
        with self._on_stream(), self.arena.scope():
            hidden = self.model.forward(zeros, zeros, NoAttention(), arena=self.arena)
            rows = np.arange(min(self.max_num_seqs, tokens), dtype=np.int32)
            ones = np.ones(len(rows), np.float32)
            none = np.zeros(len(rows), np.int32)
            draws = {
                "temperature": ones, "top_k": none, "top_p": ones, "min_p": 0 * ones, "position": none,
                "keys": np.zeros((len(rows), 2), np.uint32), "sample_index": none, "rows": rows,
            }  # fmt: skip
            self._draw(hidden, self.upload.send(draws), len(rows))
            device.synchronize()

    def reserve_workspace(self, cached_tokens):
        """Have the memory that attention keeps for itself, as much as any step takes; returns its bytes.

        cached_tokens: how many the cache is going to hold, which limits a sequence as max_model_len does.
        """
        tokens, longest = self.max_num_batched_tokens, min(self.max_model_len, cached_tokens)
        calls = [(self.max_num_seqs, tokens, tokens, longest)]
        if not self.eager:
            rows = bucket_of(self.max_num_seqs)
            calls.append((rows, rows, 1, context_bucket_of(longest)))
        with self._on_stream():
            held = reserve_workspace(*self.heads, calls)
        # It is one for all engines and never shrinks, so what is held is what was held at most.
        memory.track("attention", held - memory.report().get("attention", 0))
        return held

    def run(self, step, table):
        """Compute a step; returns the drawn token_ids (D,) int32 and logprobs (D,) float32 on the host."""
        arrays = step_arrays(step, table, self.block_size)
        drawn = int(step.draws.sum())
        max_group_size = step.groups.max_group_size if step.groups is not None else 1
        with self._on_stream():
            decode = len(step.rows) == step.num_tokens == drawn
            if decode and not self.eager and "penalty" not in arrays:
                self._replay(arrays, max_group_size)
            else:
                longest = int(arrays["context_lens"].max())
                self._compute(self.upload.send(arrays), drawn, int(step.counts.max()), longest, max_group_size)
            results = device.to_host(self.results)
        return results[0, :drawn].copy(), results[1, :drawn].view(np.float32).copy()

    def _on_stream(self):
        return self.stream or nullcontext()

    def _replay(self, arrays, max_group_size):
        """A decode step as a graph, captured where it is the first of its size.

        max_group_size is 1 or one of the few sizes that attention has a tile for, so there are few graphs of a size.
        """
        context = context_bucket_of(int(arrays["context_lens"].max()))
        bucket = bucket_of(len(arrays["context_lens"]))
        sent = self.upload.send(pad_rows(arrays, bucket, context // self.block_size))
        if self._addresses() != self.graph_addresses:
            self.graphs.clear()
        graph = self.graphs.get((bucket, context, max_group_size))
        if graph is not None:
            graph.launch(self.stream)
            return
        # This run computes the step; it also compiles what is missing, which a capture could not.
        self._compute(sent, bucket, 1, context, max_group_size)
        self.stream.begin_capture()
        with keep_tensor_maps(), pdl_scope():
            self._compute(sent, bucket, 1, context, max_group_size)
        self.graphs[bucket, context, max_group_size] = self.stream.end_capture()
        self.graph_addresses = self._addresses()

    def _addresses(self):
        """Where the buffers are that graphs read and write; the cache's addresses are `allocate`'s care."""
        return self.upload.generation, [chunk.data.ptr for chunk in self.arena.chunks]

    def _compute(self, arrays, drawn, max_seqlen_q, max_context_len, max_group_size):
        attend = PagedAttend(self.cache, self.model.config, arrays, max_seqlen_q, max_context_len, max_group_size)
        with self.arena.scope():
            hidden = self.model.forward(arrays["input_ids"], arrays["position_ids"], attend, arena=self.arena)
            if drawn:
                self._draw(hidden, arrays, drawn)

    def _draw(self, hidden, arrays, drawn):
        names = Draws.__dataclass_fields__
        draws = Draws(**{name: arrays[name] for name in names if name in arrays})
        token_ids = self.results[0, :drawn]
        draw(hidden, self.model.lm_head, draws, self.arena, token_ids, self.results[1, :drawn].view(np.float32))
