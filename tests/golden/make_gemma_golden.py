"""Writes a tiny Gemma 3 model and what transformers computes with it: gemma3/, beside itself.

Run it in an environment that has torch, transformers and tokenizers (the only place where they are used):

    python tests/golden/make_gemma_golden.py

The folder is that of a text model. expected.npz: as make_golden.py has it; its longest sequence is many windows long.
old_config.json: the keys of published checkpoints, from which the model is made; config.json has those of transformers.
curve.json: as make_experts_golden.py has it, of 50 training steps.
chats.json: the ids that apply_chat_template gives with a template of Gemma's turns, and the template.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from make_experts_golden import curve_of
from make_golden import expected_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

HERE = Path(__file__).parent
LEARNING_RATE = 3e-3
FOLDER = HERE / "gemma3"
# Sizes that differ wherever they may. Layer 2, counted from 0, sees all keys.
CONFIG = dict(
    vocab_size=144,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    query_pre_attn_scalar=20,
    max_position_embeddings=512,
    rope_theta=3e4,
    rope_local_base_freq=1e3,
    rope_scaling={"rope_type": "linear", "factor": 4.0},
    sliding_window=8,
    sliding_window_pattern=3,
    bos_token_id=1,
    eos_token_id=[2, 100],
    pad_token_id=0,
)
# What Gemma 3 writes of a chat: no system turn, the assistant is `model`, contents are stripped.
TEMPLATE = """{{ bos_token }}
{%- set start = 0 -%}
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}
    {%- set ns.system = messages[0].content ~ '\\n\\n' -%}
    {%- set start = 1 -%}
{%- endif -%}
{%- for message in messages[start:] -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('turns of user and assistant must alternate') }}
    {%- endif -%}
    {{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
    {{- ns.system if loop.first else '' }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- else -%}
        {%- for item in message.content if item.type == 'text' -%}{{ item.text | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
USER = {"role": "user", "content": " How many apples are left?\n"}
CHATS = [
    ([USER], dict(add_generation_prompt=True)),
    ([{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": "42 "}, USER], {}),
    ([{"role": "user", "content": [{"type": "text", "text": "add, then multiply"}]}], dict(add_generation_prompt=True)),
]


def make_chats():
    """The ids of chats, with the tokenizer of make_golden.py."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    ids = [tokenizer.apply_chat_template(chat, tokenize=True, **options)["input_ids"] for chat, options in CHATS]
    records = [
        {"messages": chat, "arguments": options, "ids": each} for (chat, options), each in zip(CHATS, ids, strict=True)
    ]
    (FOLDER / "chats.json").write_text(json.dumps({"template": TEMPLATE, "chats": records}) + "\n")


def main():
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**CONFIG), attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.3 if parameter.ndim == 1 else 0.05 if "embed" in name else 0.15
            parameter.copy_(size * torch.randn_like(parameter))
    shutil.rmtree(FOLDER, ignore_errors=True)
    model.save_pretrained(FOLDER)
    old = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **CONFIG}
    (FOLDER / "old_config.json").write_text(json.dumps(old, indent=2) + "\n")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")
    rng = np.random.default_rng(7)
    sequences = [rng.integers(3, CONFIG["vocab_size"], n).tolist() for n in (1, 70, 300)]
    np.savez_compressed(FOLDER / "expected.npz", **expected_of(model, sequences))
    model.zero_grad()
    (FOLDER / "curve.json").write_text(json.dumps(curve_of(model, None, LEARNING_RATE)) + "\n")
    make_chats()
    print((FOLDER / "config.json").read_text())


if __name__ == "__main__":
    main()
