"""Writes the golden training curves: 50 steps of SFT and a few optimizer steps of GRPO, computed by torch.

Run it in an environment that has torch, transformers and trl (the only place where they are used):

    python tests/golden/make_training_golden.py

It writes beside itself `tiny-qwen3/` (a 2-layer Qwen3 with random weights and a tokenizer of characters),
`sft_rows.jsonl`, `sft_curves.json` and `grpo_curves.json`. SFT is a plain loop of torch's AdamW over transformers'
model. GRPO calls the loss of `trl.GRPOTrainer` itself on a fixed batch of completions.
"""

import json
import types
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

HERE = Path(__file__).parent
CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz.:"
EOS = 1


def make_model_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    vocab = {"<pad>": 0, "<eos>": EOS, "<unk>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
        + "\n"
    )
    (folder / "generation_config.json").unlink()


def make_rows() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(37):
        digits = int(torch.randint(1, 4, (), generator=generator))
        a, b = (int(torch.randint(0, 10**digits, (), generator=generator)) for _ in range(2))
        rows.append({"prompt": f"what is {a}+{b}? ", "completion": f"{a}+{b}={a + b}."})
    return rows


def encode(rows: list[dict], vocab: dict) -> list[tuple[list[int], list[int]]]:
    """(input_ids, labels) of each row; the prompt's labels are -100, and labels are not shifted."""
    out = []
    for row in rows:
        prompt = [vocab[c] for c in row["prompt"]]
        completion = [vocab[c] for c in row["completion"]] + [EOS]
        out.append((prompt + completion, [-100] * len(prompt) + completion))
    return out


def pack(lengths: list[int], size: int) -> list[list[int]]:
    """Best-fit decreasing by exhaustive search; among bins of equal space, the one that has had it longest."""
    bins: list[list[int]] = []
    changed: list[int] = []
    for now, i in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        space = [size - sum(lengths[j] for j in b) for b in bins]
        fitting = [b for b in range(len(bins)) if space[b] >= lengths[i]]
        if fitting:
            best = min(fitting, key=lambda b: (space[b], changed[b]))
            bins[best].append(i)
            changed[best] = now
        else:
            bins.append([i])
            changed.append(now)
    return bins


def make_optimizer(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    decayed = [p for n, p in model.named_parameters() if "norm" not in n and not n.endswith("bias")]
    others = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.999), eps=1e-8)


def linear_schedule(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / (total - warmup))


SFT = {
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "max_steps": 50,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_length": 64,
}


def sft_curve(folder: Path, examples: list, units: list[list[int]], loss_type: str) -> list[dict]:
    """Trains on `units` (lists of rows: one row, or the rows of one pack) in file order."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = make_optimizer(model, SFT["learning_rate"], SFT["weight_decay"])
    window = SFT["per_device_train_batch_size"] * SFT["gradient_accumulation_steps"]
    batches = [units[i : i + window] for i in range(0, len(units), window)]
    curve, num_tokens = [], 0
    for step in range(SFT["max_steps"]):
        rows = [examples[i] for unit in batches[step % len(batches)] for i in unit]
        targets = sum(sum(label != -100 for label in labels[1:]) for _, labels in rows)
        loss, entropy, correct = torch.zeros(()), 0.0, 0
        for input_ids, labels in rows:
            num_tokens += len(input_ids)
            logits = model(torch.tensor([input_ids])).logits[0, :-1].float()
            shifted = torch.tensor(labels[1:])
            keep = shifted != -100
            logprobs = logits.log_softmax(-1)[keep]
            chosen = logprobs.gather(1, shifted[keep, None])[:, 0]
            weight = chosen.detach().exp() if loss_type == "dft" else 1.0
            loss = loss - (weight * chosen).sum() / targets
            entropy -= float((logprobs.exp() * logprobs).sum().detach())
            correct += int((logprobs.argmax(-1) == shifted[keep]).sum())
        loss.backward()
        grad_norm = clip_grad_norm_(model.parameters(), SFT["max_grad_norm"])
        rate = SFT["learning_rate"] * linear_schedule(step, SFT["warmup_steps"], SFT["max_steps"])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        curve.append(
            {
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
                "learning_rate": rate,
                "entropy": entropy / targets,
                "mean_token_accuracy": correct / targets,
                "num_tokens": num_tokens,
            }
        )
    return curve


GRPO_BASE = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "beta": 0.0,
    "temperature": 1.0,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
}
GRPO_CASES = {
    "dapo": {"epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo"},
    "grpo_delta": {"loss_type": "grpo", "delta": 1.05},
    "bnpo_temperature": {"loss_type": "bnpo", "temperature": 0.8},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "dapo_kl": {"beta": 0.1},
    "dapo_sequence_mask": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "grpo_token_truncate_kl": {
        "loss_type": "grpo",
        "beta": 0.05,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.05,
    },
}
GRPO_STEPS = 6
GRPO_LEARNING_RATE = 2e-4
GRPO_MAX_COMPLETION_LENGTH = 16


def completion_logprobs(model, prompt_ids, completion_ids, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) log-probs and entropies of padded completions, each sequence run alone."""
    rows = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float() / temperature
        rows.append(logits.log_softmax(-1))
    pad = GRPO_MAX_COMPLETION_LENGTH
    chosen = [r.gather(1, torch.tensor(c)[:, None])[:, 0] for r, c in zip(rows, completion_ids, strict=True)]
    logprobs = torch.stack([torch.nn.functional.pad(x, (0, pad - len(x))) for x in chosen])
    entropies = torch.stack([torch.nn.functional.pad(-(r.exp() * r).sum(-1), (0, pad - len(r))) for r in rows])
    return logprobs, entropies


def correction(old, sampled, mask, case) -> torch.Tensor:
    """TRL's importance ratio of trainer and sampler (GRPOTrainer._generate_and_score_completions)."""
    difference = (old - sampled) * mask
    mode, cap = case["vllm_importance_sampling_mode"], case["vllm_importance_sampling_clip_max"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return ratio.masked_fill(ratio > cap, 0.0)


def grpo_curve(folder: Path, batch: dict, case: dict) -> list[dict]:
    """GRPO_STEPS optimizer steps on one generation batch of two micro-batches (num_iterations = GRPO_STEPS)."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = make_optimizer(model, GRPO_LEARNING_RATE, 0.0)
    lengths = [len(c) for c in batch["completion_ids"]]
    mask = torch.tensor([[float(t < n) for t in range(GRPO_MAX_COMPLETION_LENGTH)] for n in lengths])
    as_rows = [c + [0] * (GRPO_MAX_COMPLETION_LENGTH - len(c)) for c in batch["completion_ids"]]

    def padded(rows):
        return torch.tensor([r + [0.0] * (GRPO_MAX_COMPLETION_LENGTH - len(r)) for r in rows])

    sampled, ref = padded(batch["rollout_logprobs"]), padded(batch["ref_logprobs"])
    with torch.no_grad():
        old, _ = completion_logprobs(model, batch["prompt_ids"], batch["completion_ids"], case["temperature"])
    metrics = {"train": {}}

    class Metrics(dict):
        def __missing__(self, key):
            self[key] = []
            return self[key]

    accelerator = types.SimpleNamespace(
        gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
    )
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(
            use_bias_correction_kl=False, delta=case["delta"], steps_per_generation=2, off_policy_mask_threshold=None
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=case["importance_sampling_level"],
        beta=case["beta"],
        loss_type=case["loss_type"],
        epsilon_low=case["epsilon"],
        epsilon_high=case["epsilon_high"],
        use_vllm=True,
        vllm_importance_sampling_correction=case["vllm_importance_sampling_correction"],
        current_gradient_accumulation_steps=2,
        max_completion_length=GRPO_MAX_COMPLETION_LENGTH,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    curve = []
    half = len(lengths) // 2
    for _ in range(GRPO_STEPS):
        total = 0.0
        metrics["train"] = Metrics()
        for rows in (slice(0, half), slice(half, None)):

            def policy(*_, rows=rows, **__):
                values = completion_logprobs(
                    model, batch["prompt_ids"][rows], batch["completion_ids"][rows], case["temperature"]
                )
                return (*values, None)

            trainer._get_per_token_logps_and_entropies = policy
            inputs = {
                "prompt_ids": torch.zeros(half, 1, dtype=torch.long),
                "prompt_mask": torch.ones(half, 1),
                "completion_ids": torch.tensor(as_rows[rows]),
                "completion_mask": mask[rows],
                "advantages": torch.tensor(batch["advantages"][rows]),
                "num_items_in_batch": mask.sum(),
                "old_per_token_logps": old[rows],
                "ref_per_token_logps": ref[rows],
                "importance_sampling_ratio": correction(old, sampled, mask, case)[rows],
            }
            loss = GRPOTrainer._compute_loss(trainer, model, inputs)
            loss.backward()
            total += loss.item()
        grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        entry = {"loss": total, "grad_norm": grad_norm.item()}
        names = ["kl", "entropy"]
        # TRL counts after the cap `delta`, so that nothing above it is ever clipped.
        if case["delta"] is None:
            names += ["clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"]
        tokens = [mask[:half].sum().item(), mask[half:].sum().item()]
        for name in names:
            if name in metrics["train"]:
                # TRL averages its micro-batches; over all tokens (at sequence level: sequences) of the step it is this.
                by_sequence = name.startswith("clip") and case["importance_sampling_level"] == "sequence"
                weights = [1, 1] if by_sequence else tokens
                values = metrics["train"][name]
                entry[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        curve.append(entry)
    return curve


def make_grpo_batch(folder: Path) -> dict:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)

    def draw(low, high, n):
        return torch.randint(low, high, (n,), generator=generator).tolist()

    prompts = [draw(3, 46, n) for n in (3, 7)]
    prompt_ids = [prompts[i // 4] for i in range(8)]
    completion_ids = [draw(3, 46, n - 1) + [EOS] for n in (5, 2, 16, 9, 1, 12, 7, 16)]
    with torch.no_grad():
        logprobs, _ = completion_logprobs(model, prompt_ids, completion_ids, 1.0)
    rollout = logprobs + 0.1 * torch.randn(logprobs.shape, generator=generator)
    ref = logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "rollout_logprobs": [rollout[i, : len(c)].tolist() for i, c in enumerate(completion_ids)],
        "ref_logprobs": [ref[i, : len(c)].tolist() for i, c in enumerate(completion_ids)],
        "advantages": [1.2, -0.4, -0.4, -0.4, 0.8, -0.8, 0.8, -0.8],
    }


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=0) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    folder = HERE / "tiny-qwen3"
    make_model_folder(folder)
    rows = make_rows()
    (HERE / "sft_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    examples = encode(rows, vocab)
    bins = pack([len(ids) for ids, _ in examples], SFT["max_length"])
    alone = [[i] for i in range(len(examples))]
    write(
        HERE / "sft_curves.json",
        {
            "config": SFT,
            "bins": bins,
            "unpacked": sft_curve(folder, examples, alone, "nll"),
            "packed": sft_curve(folder, examples, bins, "nll"),
            "dft": sft_curve(folder, examples, alone, "dft"),
        },
    )
    batch = make_grpo_batch(folder)
    write(
        HERE / "grpo_curves.json",
        {
            "batch": batch,
            "config": {"learning_rate": GRPO_LEARNING_RATE, "max_completion_length": GRPO_MAX_COMPLETION_LENGTH},
            "cases": {
                name: {"options": GRPO_BASE | case, "curve": grpo_curve(folder, batch, GRPO_BASE | case)}
                for name, case in GRPO_CASES.items()
            },
        },
    )


if __name__ == "__main__":
    main()
