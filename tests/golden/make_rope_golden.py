"""Records the rotary embeddings of transformers for the config.json of model cards: rope.json.

Needs torch and transformers, in an environment of their own: `python tests/golden/make_rope_golden.py`.
"""

import json
from pathlib import Path

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

HERE = Path(__file__).parent
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 8, "rms_norm_eps": 1e-6, "head_dim": 32}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The name -> what config.json has of positions, and the longest sequence that the model's card or vLLM gives.
CASES = {
    "qwen3 with yarn": (
        {"max_position_embeddings": 40960, "rope_theta": 1e6,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        131072,
    ),
    "qwen2.5 with yarn": (
        {"max_position_embeddings": 32768, "rope_theta": 1e6,
         "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        131072,
    ),
    "yarn, transformers 5": (
        {"max_position_embeddings": 131072,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0,
                             "original_max_position_embeddings": 32768, "beta_fast": 16.0, "beta_slow": 2.0}},
        131072,
    ),
    "yarn with mscale": (
        {"max_position_embeddings": 4096, "rope_theta": 1e4,
         "rope_scaling": {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
                          "mscale_all_dim": 0.7}},
        163840,
    ),
    "yarn not truncated": (
        {"max_position_embeddings": 4096, "rope_theta": 150000.0,
         "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                          "truncate": False}},
        131072,
    ),
    "yarn with an attention factor": (
        {"max_position_embeddings": 2048, "rope_theta": 1e4,
         "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25}},
        4096,
    ),
    "yarn without a factor": (
        {"max_position_embeddings": 8192, "rope_theta": 1e4,
         "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048}},
        8192,
    ),
    "linear": (
        {"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        16384,
    ),
    "dynamic": (
        {"max_position_embeddings": 2048, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        2048,
    ),
    "llama 3.2": (
        {"max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        131072,
    ),
    "default": (
        {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        32768,
    ),
}  # fmt: skip


def recorded(positions, longest):
    """What a config.json gives at some positions, the last of them included."""
    config = Qwen2Config(**SIZES, **positions)
    rope = Qwen2RotaryEmbedding(config)
    at = torch.tensor([[0, 1, 77, longest // 2, longest - 1]])
    # Of dynamic, the table up to max_position_embeddings.
    cos, sin = rope(torch.zeros(1), at)
    half = SIZES["head_dim"] // 2
    return {
        "config": SIZES | positions | {"model_type": "qwen2"},
        "num_positions": longest,
        "positions": at[0].tolist(),
        "inv_freq": rope.inv_freq.tolist(),
        "amplitude": float(rope.attention_scaling),
        "cos": cos[0, :, :half].tolist(),
        "sin": sin[0, :, :half].tolist(),
    }


if __name__ == "__main__":
    cases = {name: recorded(*case) for name, case in CASES.items()}
    (HERE / "rope.json").write_text(json.dumps(cases) + "\n")
