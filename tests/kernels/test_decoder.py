"""The persistent decoder kernel against the same layers as separate kernels: equal bits."""

import numpy as np
import pytest

from rlnumba.engine.cache import KVCache
from rlnumba.engine.few_rows import weights_of
from rlnumba.engine.steps.attention import PagedAttention, sequences_of
from rlnumba.kernels.decoder.ops import MOST_KEYS, decoder_config, decoder_forward
from rlnumba.kernels.nn.qkv import Rotation
from rlnumba.model.config import ModelConfig
from rlnumba.model.transformer import Transformer
from rlnumba.model.weights import Weights
from rlnumba.runtime import device, dispatch

BLOCK_SIZE = 16


def model_of(seed=0, **settings):
    """A Transformer of random weights."""
    values = {
        "vocab_size": 40, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "qk_norm": True,
        "attention_bias": False, "eos_token_ids": (0,), "model_type": "qwen3", "rope_scaling": None,
    }  # fmt: skip
    config = ModelConfig(**values | settings)
    weights = Weights(config, "bfloat16")
    generator = np.random.default_rng(seed)
    for parameter in weights.parameters:
        scale = 1.0 if parameter.decays is False else 2.0 / np.sqrt(parameter.shape[-1])
        values = generator.standard_normal(parameter.shape, np.float32) * np.float32(scale)
        weights[parameter.name][...] = device.asarray(values.astype(weights.dtype))
    return Transformer(config, weights)


def step_of(model, context_lens, seed=0):
    """(arrays of a decode step, KVCache with random content) of sequences with these contexts, 0 for an unused row."""
    generator, rows = np.random.default_rng(seed), len(context_lens)
    contexts = np.array(context_lens, np.int32)
    width = max(-(-int(contexts.max()) // BLOCK_SIZE), 1)
    blocks = generator.permutation(rows * width + 3)[: rows * width].reshape(rows, width).astype(np.int32)
    positions = np.maximum(contexts - 1, 0)
    slots = blocks[np.arange(rows), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    arrays = {
        "input_ids": generator.integers(0, model.config.vocab_size, rows, dtype=np.int32),
        "position_ids": positions.astype(np.int32),
        "slot_mapping": np.where(contexts > 0, slots, -1).astype(np.int32),
        "block_tables": blocks,
        "cu_seqlens": np.arange(rows + 1, dtype=np.int32),
        "context_lens": contexts,
    }
    cache = KVCache(model.config, rows * width + 3, BLOCK_SIZE, model.dtype)
    cache.take()
    for array in cache.arrays:
        array[...] = device.asarray(generator.standard_normal(array.shape, np.float32).astype(model.dtype))
    return {name: device.asarray(array) for name, array in arrays.items()}, cache


def by_kernels(model, arrays, cache):
    """The hidden states by the engine's separate kernels."""
    longest = int(device.to_host(arrays["context_lens"]).max())
    attention = PagedAttention(cache, model.config, arrays, 1, longest, 1)
    return model.forward(arrays["input_ids"], arrays["position_ids"], attention)


def by_decoder(model, arrays, cache, blocks=None, launches=1):
    """The hidden states by the persistent kernel, after so many launches of it."""
    config, weights = model.config, model.weights
    packed = weights_of(weights)
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rows = len(arrays["input_ids"])
    decoder = decoder_config(packed, *heads, rows, BLOCK_SIZE, blocks)
    assert decoder is not None
    out = device.xp().empty((rows, config.hidden_size), model.dtype)
    rotation, sequences = Rotation(*model.rope, arrays["position_ids"]), sequences_of(arrays, 1, MOST_KEYS)
    for _ in range(launches):
        decoder_forward(decoder, packed, arrays["input_ids"], rotation, cache.arrays, sequences, config.scale, out)
    return out


def assert_equal_bits(model, context_lens, **options):
    arrays, cache = step_of(model, context_lens)
    other_arrays, other = step_of(model, context_lens)
    expected = device.to_host(by_kernels(model, other_arrays, other)).view(np.uint16)
    found = device.to_host(by_decoder(model, arrays, cache, **options)).view(np.uint16)
    used = np.array(context_lens) > 0
    np.testing.assert_array_equal(found[used], expected[used])
    for ours, theirs in zip(cache.arrays, other.arrays, strict=True):
        np.testing.assert_array_equal(device.to_host(ours).view(np.uint16), device.to_host(theirs).view(np.uint16))


@pytest.mark.sim
@pytest.mark.parametrize("context_lens", [[1], [65], [3, 0]])
def test_equals_separate_kernels(context_lens):
    with dispatch.forced("sm90"):
        assert_equal_bits(model_of(), context_lens, blocks=2)


@pytest.mark.sim
def test_sets_of_the_exchange_are_used_in_turn():
    with dispatch.forced("sm90"):
        assert_equal_bits(model_of(), [2], blocks=2, launches=3)


@pytest.mark.sim
def test_heads_without_norm_three_to_a_key_head():
    shape = {"num_attention_heads": 3, "hidden_size": 192, "num_hidden_layers": 1, "qk_norm": False}
    with dispatch.forced("sm90"):
        assert_equal_bits(model_of(**shape), [17], blocks=2)


@pytest.mark.sim
@pytest.mark.parametrize(
    "settings, what",
    [
        ({"attention_bias": True}, "weights"),
        ({"head_dim": 32}, "config"),
        ({"num_attention_heads": 16}, "config"),
        ({"intermediate_size": 96}, "config"),
        ({"hidden_size": 4096}, "config"),
    ],
)
def test_other_shapes_are_left_to_the_separate_kernels(settings, what):
    model = model_of(num_hidden_layers=1, **settings)
    weights, config = model.weights, model.config
    with dispatch.forced("sm90"):
        packed = weights_of(weights)
        assert (packed is None) == (what == "weights")
        if packed is not None:
            heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
            assert decoder_config(packed, *heads, 1, BLOCK_SIZE, 2) is None


@pytest.mark.sim
def test_wrong_arrays_are_refused():
    model = model_of(num_hidden_layers=1)
    arrays, cache = step_of(model, [3])
    arrays["slot_mapping"] = np.zeros(2, np.int32)
    with dispatch.forced("sm90"), pytest.raises(ValueError, match="decoder_forward: slot_mapping must be"):
        by_decoder(model, arrays, cache, blocks=2)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("context_lens", [[1], [129], [700, 64], [1, 65, 0, 1024], [128] * 8, list(range(60, 68))])
def test_equals_separate_kernels_at_a_real_shape(context_lens):
    shape = {
        "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    model = model_of(**shape)
    assert_equal_bits(model, context_lens)
    # A second launch finds the exchange of the first one cleared.
    assert_equal_bits(model, context_lens, launches=3)
