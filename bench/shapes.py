"""The shapes of the models that benches measure, and random weights made where they are used."""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np

from rlnumba.config import LoraConfig
from rlnumba.kernels.nn.elementwise import cast
from rlnumba.kernels.quantized.ops import quantize
from rlnumba.model.config import LM_HEAD, ModelConfig
from rlnumba.model.lora import Adapter
from rlnumba.model.quantized.weights import QuantizedWeights
from rlnumba.model.transformer import Transformer, save_model
from rlnumba.model.weights import Weights
from rlnumba.runtime import device

QWEN3_06B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_17B = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
QWEN3_4B = QWEN3_06B | {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
}  # fmt: skip
QWEN3_8B = QWEN3_4B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
QWEN35_08B = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
QWEN35_4B = QWEN35_08B | {
    "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
QWEN35_35B_A3B = QWEN35_4B | {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "sliding_window": 512, "query_pre_attn_scalar": 256, "max_position_embeddings": 32768,
}  # fmt: skip
STORIES_15M = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 288, "intermediate_size": 768,
    "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 48,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
TINY = STORIES_15M | {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
SHAPES = {
    "qwen3-0.6b": QWEN3_06B, "qwen3-1.7b": QWEN3_17B, "qwen3-4b": QWEN3_4B, "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B, "qwen3.5-0.8b": QWEN35_08B, "qwen3.5-4b": QWEN35_4B,
    "qwen3.5-35b-a3b": QWEN35_35B_A3B, "gemma3-1b": GEMMA3_1B, "stories-15m": STORIES_15M, "tiny": TINY,
}  # fmt: skip


def shape_parser(description, shape="of the random weights"):
    """An ArgumentParser with --device, and with --shape, whose help is given, and --layers of random weights."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=tuple(SHAPES), help=shape)
    parser.add_argument("--layers", type=int, help="of the random weights; default: the shape's")
    return parser


def add_adapter(model, rank):
    """Give a Transformer a new adapter of all linear layers, of a rank."""
    model.adapter = Adapter.new(model.config, LoraConfig(r=rank), model.dtype.name, "", 0)


def copy_of(model):
    """A Transformer with a copy of the weights, as a reference has."""
    copied = Transformer(model.config, Weights(model.config, model.dtype.name))
    copied.weights.flat[...] = model.weights.flat
    return copied


def random_model(shape=None, dtype=None, heads=LM_HEAD, layers=None, quantization=None):
    """A Transformer of a name of SHAPES with random weights; by default what suits the device, in its usual dtype.

    layers: how many it has, if not those of the shape; quantization: the QuantizationConfig of its layers.
    """
    on_gpu = device.name() == "cuda"
    keys = SHAPES[shape or ("qwen3-0.6b" if on_gpu else "stories-15m")]
    config = ModelConfig.from_dict(keys | ({"num_hidden_layers": layers} if layers else {}))
    config = replace(config, heads=heads)
    dtype = dtype or ("bfloat16" if on_gpu else "float32")
    if not on_gpu:
        return Transformer(config, quantized_on_host(Weights.random(config, dtype), quantization))
    import cupy

    # On the device: the host would take minutes for billions of values.
    weights = QuantizedWeights(config, dtype, quantization=quantization) if quantization else Weights(config, dtype)
    generator = cupy.random.default_rng(0)
    for name, parameter in weights.quantized.items() if quantization else ():
        values = generator.standard_normal(parameter.size, np.float32) * np.float32(0.02)
        quantize(values.astype(weights.dtype).reshape(-1, parameter.shape[-1]), 0, weights[name])
    for parameter in weights.parameters:
        view = weights[parameter.name]
        if parameter.decays:
            cast(generator.standard_normal(view.size, np.float32) * np.float32(0.02), view.reshape(-1))
        elif parameter.name.endswith("norm"):
            # A norm of linear attention's heads has no offset.
            view.fill(0 if config.norm_offset and not parameter.name.endswith("gated_norm") else 1)
    return Transformer(config, weights)


def quantized_on_host(plain, quantization):
    """Weights with the values of others, in the format of a QuantizationConfig; None: the others."""
    if quantization is None:
        return plain
    weights = QuantizedWeights(plain.config, plain.dtype.name, quantization=quantization)
    for name, parameter in weights.quantized.items():
        quantize(plain[name].reshape(-1, parameter.shape[-1]), 0, weights[name])
    for parameter in weights.parameters:
        weights[parameter.name][...] = plain[parameter.name]
    return weights


def write_model(folder, shape, device_name="auto"):
    """Write a random_model to a folder: its dtype's name. In another process it leaves the GPU's memory free."""
    device.select(device_name)
    model = random_model(shape)
    save_model(model, folder)
    return model.dtype.name


def in_own_process(function, *arguments):
    """function(*arguments) in a process, whose memory on the GPU is free when it has ended."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
