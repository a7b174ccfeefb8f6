"""One decode step of up to eight sequences through all layers of a decoder: token ids -> hidden states, in one kernel.

    x = embedding(input_ids)
    each layer:  h = x + o_proj(attention(rope(norm?(q, k)), v)),  q | k | v = qkv_proj(rmsnorm(x))
                 x = h + down_proj(silu(gate) * up),               gate | up = gate_up_proj(rmsnorm(h))
    out = rmsnorm(x)

The same operators as separate kernels give the same bits. Source of the idea: Hazy Research, "Look Ma, No Bubbles!"
(2025), whose kernel interprets one instruction stream on all SMs; here the schedule is the loop over layers itself.
"""

from typing import NamedTuple

import numpy as np

from rlnumba.kernels.attention.ops import attention_family
from rlnumba.kernels.attention.softmax import LOG2_E, SEGMENT_KEYS, TILE_KEYS
from rlnumba.kernels.checks import I32, check
from rlnumba.kernels.decoder.attention import Rows
from rlnumba.kernels.decoder.config import THREADS, DecoderConfig, is_supported
from rlnumba.kernels.decoder.exchange import UNWRITTEN
from rlnumba.kernels.decoder.kernel import Arrays, TensorMaps, decoder_kernel
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device, dispatch
from rlnumba.runtime.context import current
from rlnumba.runtime.launch import launch

# Keys that a sequence may have: one segment, whose keys one block adds up in one pass.
MOST_KEYS = SEGMENT_KEYS


class DecoderLayer(NamedTuple):
    """The weights of one layer, (rows, columns) each or (n,); None where the model has no such parameter."""

    input_norm: object
    qkv: object
    qkv_bias: object
    q_norm: object
    k_norm: object
    o: object
    o_bias: object
    post_norm: object
    gate_up: object
    gate_up_bias: object
    down: object
    down_bias: object


class DecoderWeights(NamedTuple):
    """A decoder's weights as the kernel reads them: those of all layers lie at equal distances in one buffer.

    embed_tokens (V, D); qkv, o, gate_up, down: (layers, n, k) views; norms: int32 words of the norm weights; offsets:
    words from its start to those of a layer's input_norm, post_norm, q_norm and k_norm (0 without), of the last norm,
    and from one layer to the next. normed: whether there are a q_norm and a k_norm; eps: of all norms.
    """

    embed_tokens: object
    qkv: object
    o: object
    gate_up: object
    down: object
    norms: object
    offsets: tuple
    normed: bool
    eps: float


def decoder_weights(flat, embed_tokens, layers, norm, eps):
    """The DecoderWeights of a model, or None where its layers are not alike or have biases.

    flat (n,): the buffer that all are views of; layers: DecoderLayers; norm (D,): the last one; eps: of all norms.
    """
    first = layers[0]
    biases = first.qkv_bias, first.o_bias, first.gate_up_bias, first.down_bias
    if flat.dtype.itemsize != 2 or any(bias is not None for bias in biases):
        return None
    names = ["input_norm", "post_norm", *(("q_norm", "k_norm") if first.q_norm is not None else ())]
    matrices = [[getattr(w, name) for w in layers] for name in ("qkv", "o", "gate_up", "down")]
    vectors = [[getattr(w, name) for w in layers] for name in names]
    steps = [_step(flat, each) for each in matrices], [_step(flat, each) for each in vectors]
    if any(len(set(group)) != 1 or group[0] is None for group in steps):
        return None
    start = min(_offset(flat, each[0]) for each in vectors)
    norms = flat[start:].view(np.int32)
    offsets = [(_offset(flat, each[0]) - start) // 2 for each in vectors] + [0] * (4 - len(vectors))
    offsets += [(_offset(flat, norm) - start) // 2, steps[1][0] // 2]
    stacked = [_stacked(each, steps[0][0]) for each in matrices]
    return DecoderWeights(embed_tokens, *stacked, norms, tuple(offsets), first.q_norm is not None, float(eps))


def _address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _offset(flat, view):
    """Elements from the start of the buffer to that of a view."""
    return (_address(view) - _address(flat)) // flat.dtype.itemsize


def _step(flat, views):
    """Elements from each view to the next, None where they differ; 0 of a single view."""
    offsets = [_offset(flat, view) for view in views]
    steps = {after - before for before, after in zip(offsets, offsets[1:], strict=False)} or {0}
    return steps.pop() if len(steps) == 1 else None


def _stacked(views, step):
    """(layers, n, k): the views as one array."""
    first, itemsize = views[0], views[0].dtype.itemsize
    strides = (step or first.size) * itemsize, first.shape[1] * itemsize, itemsize
    as_strided = device.xp().lib.stride_tricks.as_strided
    return as_strided(first, (len(views), *first.shape), strides)


def decoder_config(weights, heads, kv_heads, head_dim, rows, block_size, blocks=None):
    """The DecoderConfig for a batch of so many rows, or None where the kernel cannot compute it.

    blocks: of the grid; by default one for each SM.
    """
    layers, _, hidden = weights.qkv.shape
    element, ffn = weights.qkv.dtype.name, weights.down.shape[2]
    if block_size % TILE_KEYS and block_size not in (16, 32):
        return None
    box, blocks = min(block_size, TILE_KEYS), blocks or device.sm_count()
    config = DecoderConfig(
        layers, hidden, heads, kv_heads, head_dim, ffn, element, rows, box, weights.normed, blocks
    )  # fmt: skip
    families = attention_family(element, head_dim, config.gqa_ratio), dispatch.family("gemm")
    return config if families == ("sm90", "sm90") and is_supported(config) else None


class DecoderWorkspace:
    """The exchange of one config: two sets of words, all unwritten, and the state that says which one is next."""

    def __init__(self, config):
        self.exchange = device.xp().full(2 * config.set_words, UNWRITTEN, np.int32)
        self.state = device.xp().zeros(2, np.int32)


def decoder_forward(config, weights, input_ids, rotation, caches, sequences, scale, out):
    """out (B, D) = the hidden states, after the last norm, of one new token of each of B = config.rows sequences.

    config: of decoder_config for these weights (DecoderWeights) and B. input_ids (B,) int32; rotation: the tokens'
    Rotation (kernels/nn/qkv.py); caches (k_cache, v_cache), each (layers, blocks, block_size, HK, E), to which the new
    tokens' keys and values are written; sequences: PagedSequences of one query token each and at most MOST_KEYS keys,
    with slot_mapping and without groups. All 16-bit arrays are of one dtype. Raises ValueError for other shapes, dtypes
    or layouts.
    """
    op, (layers, hidden, kv_heads, head_dim) = "decoder_forward", config[:2] + config[3:5]
    (k_cache, v_cache), (cos, sin, position_ids) = caches, rotation
    context_lens, slot_mapping, block_tables = sequences.context_lens, sequences.slot_mapping, sequences.block_tables
    rows = (config.rows,)
    dtype = (weights.qkv.dtype,)
    _, blocks, block_size, _, _ = check(op, "k_cache", k_cache, (layers, None, None, kv_heads, head_dim), dtype)
    check(op, "v_cache", v_cache, k_cache.shape, dtype)
    check(op, "out", out, (config.rows, hidden), dtype)
    vectors = {"input_ids": input_ids, "position_ids": position_ids, "context_lens": context_lens}
    for name, array in (vectors | {"slot_mapping": slot_mapping}).items():
        check(op, name, array, rows, I32)
    check(op, "block_tables", block_tables, (config.rows, None), I32)
    workspace, embeddings = current().own(DecoderWorkspace, config), weights.embed_tokens.reshape(-1).view(np.int32)
    phases = (config.qkv, weights.qkv), (config.o, weights.o), (config.gate_up, weights.gate_up)
    maps = [tensor_map(w, 1, phase.tile_columns, 64) for phase, w in (*phases, (config.down, weights.down))]
    rows_of_caches = [cache.reshape(layers * blocks * block_size, kv_heads, head_dim) for cache in caches]
    maps += [tensor_map(cache, config.box, 1, 64) for cache in rows_of_caches]
    batch = Rows(
        position_ids, context_lens, slot_mapping, block_tables, np.int32(block_size), np.int32(blocks * block_size)
    )
    arrays = Arrays(
        embeddings, weights.norms, *map(np.int32, weights.offsets), input_ids, cos, sin,
        *(cache.reshape(-1).view(np.int32) for cache in caches), workspace.exchange,
    )  # fmt: skip
    launch(
        decoder_kernel(config), config.blocks, THREADS, TensorMaps(*maps), batch, arrays, workspace.state,
        out.reshape(-1).view(np.int32), weights.eps, float(scale * LOG2_E), shared=config.layout.nbytes,
        cooperative=True,
    )  # fmt: skip
