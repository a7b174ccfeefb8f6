"""Writes a tiny Qwen3.5 model and what transformers computes with it: qwen3_5/, beside itself.

Run it in an environment that has torch, transformers and tokenizers (the only place where they are used):

    python tests/golden/make_hybrid_golden.py

The folder is that of a text model. expected.npz: as make_golden.py has it; its longest sequence has several blocks of
the delta rule. text_names.json: the names of a published checkpoint, of vision and language, for each tensor.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from make_golden import expected_of
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

HERE = Path(__file__).parent
FOLDER = HERE / "qwen3_5"
# Sizes that differ wherever they may.
CONFIG = Qwen3_5TextConfig(
    vocab_size=144,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 2, 2]),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def fill(name, parameter):
    """Random values of a parameter, of a size that lets each matter."""
    noise = torch.randn_like(parameter)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("A_log"):
        return noise - 1
    return (0.3 if parameter.ndim == 1 or "conv1d" in name else 0.15) * noise


def main():
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, parameter))
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.save_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, CONFIG.vocab_size, n).tolist() for n in (1, 70, 300)]
    np.savez_compressed(FOLDER / "expected.npz", **expected_of(model, sequences))
    raw = json.loads((FOLDER / "config.json").read_text())
    print(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
