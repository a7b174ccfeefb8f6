"""Writes the golden adapters: PEFT's own files, and 50 steps of SFT with them, computed by torch.

Run it in an environment that has torch, transformers, trl and peft (the only place where they are used):

    python tests/golden/make_lora_golden.py

For each case it writes `lora/CASE/init/`, the adapter that PEFT made for `tiny-qwen3`, and `lora/CASE/final/`, the
same after 50 steps. `lora/curves.json` has the curves, `lora/logits.npz` the logits of the final adapters, before and
after they are merged.
"""

import json
from pathlib import Path

import numpy as np
import torch
from make_training_golden import SFT, encode, linear_schedule
from peft import LoraConfig, get_peft_model
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).parent
BASE = HERE / "tiny-qwen3"
CASES = {
    "all_linear": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    "qv_rslora": LoraConfig(
        r=6, lora_alpha=12, target_modules=["q_proj", "v_proj"], use_rslora=True, task_type="CAUSAL_LM"
    ),
}
TRAIN = SFT | {"learning_rate": 1e-2}


def save(model, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    # The path of the machine that made it would be in the file.
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "tests/golden/tiny-qwen3"
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def curve(model, examples: list) -> list[dict]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=TRAIN["learning_rate"], weight_decay=TRAIN["weight_decay"])
    window = TRAIN["per_device_train_batch_size"] * TRAIN["gradient_accumulation_steps"]
    batches = [examples[i : i + window] for i in range(0, len(examples), window)]
    found = []
    for step in range(TRAIN["max_steps"]):
        rows = batches[step % len(batches)]
        targets = sum(sum(label != -100 for label in labels[1:]) for _, labels in rows)
        loss = torch.zeros(())
        for input_ids, labels in rows:
            logprobs = model(torch.tensor([input_ids])).logits[0, :-1].log_softmax(-1)
            shifted = torch.tensor(labels[1:])
            keep = shifted != -100
            loss = loss - logprobs[keep].gather(1, shifted[keep, None]).sum() / targets
        loss.backward()
        grad_norm = clip_grad_norm_(trained, TRAIN["max_grad_norm"])
        rate = TRAIN["learning_rate"] * linear_schedule(step, TRAIN["warmup_steps"], TRAIN["max_steps"])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "grad_norm": grad_norm.item(), "learning_rate": rate})
    return found


def main() -> None:
    vocab = json.loads((BASE / "tokenizer.json").read_text())["model"]["vocab"]
    rows = [json.loads(line) for line in (HERE / "sft_rows.jsonl").read_text().splitlines()]
    examples, curves = encode(rows, vocab), {"config": TRAIN}
    input_ids = examples[0][0]
    logits = {"input_ids": np.array(input_ids, np.int32)}
    for number, (name, config) in enumerate(CASES.items()):
        torch.manual_seed(number)
        model = get_peft_model(Qwen3ForCausalLM.from_pretrained(BASE, dtype=torch.float32), config)
        save(model, HERE / "lora" / name / "init")
        curves[name] = curve(model, examples)
        save(model, HERE / "lora" / name / "final")
        with torch.no_grad():
            logits[name] = model(torch.tensor([input_ids])).logits[0].numpy()
            logits[f"{name}_merged"] = model.merge_and_unload()(torch.tensor([input_ids])).logits[0].numpy()
    (HERE / "lora" / "curves.json").write_text(json.dumps(curves) + "\n")
    np.savez_compressed(HERE / "lora" / "logits.npz", **logits)


if __name__ == "__main__":
    main()
