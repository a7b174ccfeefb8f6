"""Decode steps of few sequences, whose layers are one kernel (kernels/decoder) where the model and the GPU allow it."""

import numpy as np

from rlnumba.engine.steps.attention import sequences_of
from rlnumba.kernels.decoder.ops import MOST_KEYS, DecoderLayer, decoder_config, decoder_forward, decoder_weights
from rlnumba.kernels.nn.qkv import Rotation
from rlnumba.model.blocks.attention import Attention
from rlnumba.model.blocks.mlp import Mlp
from rlnumba.model.quantized.weights import QuantizedWeights
from rlnumba.model.weights import RolloutWeights
from rlnumba.runtime import device


def weights_of(weights):
    """The DecoderWeights of a model's Weights; None of a model that the kernel does not compute."""
    # The norms of RolloutWeights are in another buffer than the matrices.
    if isinstance(weights, QuantizedWeights | RolloutWeights):
        return None
    config = weights.config
    blocks_differ = any([type(block) for block in blocks] != [Attention, Mlp] for blocks in config.blocks)
    is_plain = config.has_plain_heads and config.hidden_act == "silu"
    if blocks_differ or not is_plain or config.has_output_norms or config.scales_embedding:
        return None
    # The last weight of either block, the norm of its output, is None.
    layers = [DecoderLayer(*attention[:-1], *mlp[:-1]) for attention, mlp in weights.layers]
    return decoder_weights(weights.flat, weights.embed_tokens, layers, weights.norm, weights.config.rms_norm_eps)


class FewRowsDecoder:
    """The persistent decoder kernel for one model; supports() says which steps it computes.

    The hidden states have the bits of Transformer.forward.
    """

    def __init__(self, model, block_size):
        self.model, self.block_size, self.configs = model, block_size, {}
        self.weights = None
        if device.name() != "cpu" and model.adapter is None and model.ranks is None:
            self.weights = weights_of(model.weights)

    def config_for(self, rows):
        """The DecoderConfig for so many rows, or None."""
        if self.weights is None or self.model.adapter is not None:
            return None
        if rows not in self.configs:
            config = self.model.config
            heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            self.configs[rows] = decoder_config(self.weights, *heads, rows, self.block_size)
        return self.configs[rows]

    def supports(self, arrays, max_seqlen_q, max_context_len):
        """Whether it computes a step with these arrays (steps/arrays.py:step_arrays) and bounds."""
        has_windows = "window_tables" in arrays
        return max_seqlen_q == 1 and not has_windows and self.decodes(len(arrays["context_lens"]), max_context_len)

    def decodes(self, rows, max_context_len):
        """Whether it computes decode steps of so many rows."""
        return max_context_len <= MOST_KEYS and self.config_for(rows) is not None

    def forward(self, arrays, cache, hidden):
        """Write the hidden states (B, D) of a step that it supports, and keys and values to the KVCache."""
        model, sequences = self.model, sequences_of(arrays, 1, MOST_KEYS)
        decoder_forward(
            self.config_for(len(arrays["context_lens"])), self.weights, arrays["input_ids"],
            Rotation(*model.rope, arrays["position_ids"]), cache.arrays, sequences, np.float32(model.config.scale),
            hidden,
        )  # fmt: skip
