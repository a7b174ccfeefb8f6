"""Writes 50 steps of SFT of the example of Qwen3.5's structure, computed by torch: hybrid_sft.json, beside itself.

Run it in an environment that has torch, transformers, trl and tokenizers (the only place where they are used), after
make_hybrid_golden.py:

    python tests/golden/make_hybrid_training_golden.py [FOLDER]

The loop is make_training_golden.py's, over transformers' model of examples/qwen3_5/model: it is trained, and so its
curve does not amplify the errors of float32. Rows are joined, so that sequences have up to three blocks of the delta
rule. FOLDER: what rlnumba has written of the golden model qwen3_5/ (save_model of load_model); the script then checks
that transformers loads it and finds the logits of the recorded folder.
"""

import json
import sys
from pathlib import Path

import make_training_golden as training
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
MODEL = EXAMPLES / "qwen3_5" / "model"
# Rows of the quickstart that become one.
JOINED = (1, 4, 6, 2, 5, 3, 6)
SFT = training.SFT | {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "max_length": 256}


def joined(rows):
    """Rows of a prompt and of several rows' text behind it."""
    found, at = [], 0
    for count in JOINED:
        first, *others = rows[at : at + count]
        text = [first["completion"], *(row["prompt"] + row["completion"] for row in others)]
        found.append({"prompt": first["prompt"], "completion": " ".join(text)})
        at += count
    return found


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def main():
    rows = joined([json.loads(line) for line in (EXAMPLES / "quickstart" / "sft.jsonl").read_text().splitlines()])
    vocab = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    training.SFT, training.Qwen3ForCausalLM, training.EOS = SFT, AutoModelForCausalLM, vocab["<end>"]
    examples = training.encode(rows, vocab)
    curve = training.sft_curve(MODEL, examples, [[i] for i in range(len(rows))], "nll")
    (HERE / "hybrid_sft.json").write_text(json.dumps({"config": SFT, "rows": rows, "curve": curve}, indent=1) + "\n")
    print([len(ids) for ids, _ in examples], "tokens;", curve[0]["loss"], curve[-1]["loss"])
    if len(sys.argv) > 1:
        model, written = load(HERE / "qwen3_5"), load(sys.argv[1])
        ids = torch.tensor([[3 + i % 140 for i in range(150)]])
        difference = (model(ids).logits - written(ids).logits).abs().max().item()
        assert difference == 0, difference
        print(sys.argv[1], "has the same logits in transformers")


if __name__ == "__main__":
    main()
