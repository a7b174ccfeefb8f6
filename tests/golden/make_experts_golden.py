"""Writes tiny models of mixtures of experts and what transformers computes with them: qwen3_moe/ and qwen3_5_moe/.

Run it in an environment that has torch, transformers and tokenizers (the only place where they are used):

    python tests/golden/make_experts_golden.py

The folders are those of text models, with each expert's matrices as tensors of their own (qwen3_moe) and fused
(qwen3_5_moe), as published checkpoints have them. expected.npz: as make_golden.py has it, gradients under the names of
transformers' parameters, which are fused; and aux_loss, the router's loss of each sequence alone. curve.json: a loop of
torch's AdamW over transformers' model as TRL's SFTTrainer does it, with the router's loss: batches of two micro-batches
of two sequences, which are there as well.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from make_golden import expected_of
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3MoeConfig

HERE = Path(__file__).parent
# Sizes that differ wherever they may; one layer of each model is not a mixture, or has other attention.
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=144,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        router_aux_loss_coef=0.02,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        vocab_size=144,
        hidden_size=48,
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
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}
# Two correct programs drift apart exponentially, faster where a norm divides by small outputs.
LEARNING_RATES = {"qwen3_moe": 3e-3, "qwen3_5_moe": 3e-4}


def fill(name, parameter, is_hybrid):
    """Random values of a parameter, of a size that lets each matter."""
    noise = torch.randn_like(parameter)
    if name.endswith("linear_attn.norm.weight") or "norm" in name and not is_hybrid:
        return 1 + 0.2 * noise
    if name.endswith("A_log"):
        return noise - 1
    if name.endswith("mlp.gate.weight"):
        return 0.3 * noise
    return (0.3 if parameter.ndim == 1 or "conv1d" in name else 0.15) * noise


def fuse(path):
    """Write the experts of a file's layers as one tensor a matrix."""
    tensors = load_file(path)
    for layer in sorted({name.split(".")[2] for name in tensors if ".experts." in name}):
        at = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(at) and name.endswith("up_proj.weight") for name in tensors)
        parts = {
            kind: [tensors.pop(f"{at}.{e}.{kind}_proj.weight") for e in range(count)] for kind in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{at}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{at}.down_proj"] = torch.stack(parts["down"])
    save_file(tensors, path, {"format": "pt"})


def curve_of(model, coefficient, learning_rate, steps=50):
    """{"batches": ids of each step's micro-batches, "loss", "aux_loss", "grad_norm": of each step}.

    coefficient: None for a model without experts, whose aux_loss is 0.
    """
    vectors = [name for name, _ in model.named_parameters() if "norm" in name or name.endswith("bias")]
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in vectors) is is_vector], "weight_decay": decay}
        for is_vector, decay in ((False, 0.1), (True, 0.0))
    ]
    rng, optimizer = np.random.default_rng(3), torch.optim.AdamW(groups, lr=learning_rate)
    found = {"learning_rate": learning_rate, "batches": [], "loss": [], "aux_loss": [], "grad_norm": []}
    model.train()
    for _ in range(steps):
        lengths = rng.integers(4, 30, (2, 2))
        batches = [[rng.integers(3, 60, n).tolist() for n in row] for row in lengths]
        count, loss, aux_loss = lengths.sum() - 4, 0.0, 0.0
        for sequences in batches:
            longest = max(map(len, sequences))
            ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each in sequences])
            mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in sequences])
            router = {} if coefficient is None else {"output_router_logits": True}
            outputs = model(ids, attention_mask=mask, **router)
            logprobs = outputs.logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            aux = torch.zeros(()) if coefficient is None else outputs.aux_loss / len(batches)
            part = -(logprobs * mask[:, 1:]).sum() / count + (coefficient or 0) * aux
            part.backward()
            loss, aux_loss = loss + part.item(), aux_loss + aux.item()
        norm = clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("batches", batches), ("loss", loss), ("aux_loss", aux_loss), ("grad_norm", norm)):
            found[name].append(value)
    return found


def main():
    for family, config in CONFIGS.items():
        torch.manual_seed(len(family))
        is_hybrid, folder = family == "qwen3_5_moe", HERE / family
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(fill(name, parameter, is_hybrid))
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        if is_hybrid:
            fuse(folder / "model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        rng = np.random.default_rng(7)
        sequences = [rng.integers(3, config.vocab_size, n).tolist() for n in (1, 70, 300)]
        expected = expected_of(model, sequences)
        with torch.no_grad():
            outputs = [model(torch.tensor(ids)[None], output_router_logits=True) for ids in sequences]
        expected["aux_loss"] = np.float32([output.aux_loss.item() for output in outputs])
        np.savez_compressed(folder / "expected.npz", **expected)
        model.zero_grad()
        (folder / "curve.json").write_text(
            json.dumps(curve_of(model, config.router_aux_loss_coef, LEARNING_RATES[family])) + "\n"
        )


if __name__ == "__main__":
    main()
