"""Writes the golden values of reward models: transformers' scores of sequences, and 50 steps of TRL's RewardTrainer.

Run it in an environment that has torch, transformers and trl:

    python tests/golden/make_reward_golden.py

It writes beside itself `sequence_scores.json` (for each folder of models/, the config.json that transformers saves for
its ...ForSequenceClassification, the weights of a random head, and the scores of a padded batch), `pair_rows.jsonl`,
`reward_curves.json` (metrics of every step of two runs) and `reward_updates.npz` (what these changed of the weights).
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer

HERE = Path(__file__).parent
MODEL = HERE / "tiny-qwen3"


def classifier(folder, seed, pad_token_id, std):
    """A sequence-classification model of one label over a causal language model's trunk."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    model.score.weight.data = std * torch.randn(model.score.weight.shape, generator=generator)
    model.config.pad_token_id = pad_token_id
    return model.eval()


def sequence_scores():
    found = {}
    for folder in sorted((HERE / "models").iterdir()):
        expected = np.load(folder / "expected.npz")
        sequences = [ids.tolist() for ids in np.split(expected["input_ids"], np.cumsum(expected["lengths"])[:-1])]
        pad = next(id for id in range(10_000) if all(id not in ids for ids in sequences))
        # Padding of the text's own, at its end and before it.
        sequences += [sequences[0] + [pad, pad], [pad, *sequences[1]], [pad]]
        model = classifier(folder, 7, pad, 0.5)
        longest = max(map(len, sequences))
        padded = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in sequences])
        mask = torch.tensor([[float(t < len(ids)) for t in range(longest)] for ids in sequences])
        with torch.no_grad():
            scores = model(input_ids=padded, attention_mask=mask).logits[:, 0]
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            config = json.loads((Path(saved) / "config.json").read_text())
        found[folder.name] = {
            "config": config,
            "sequences": sequences,
            "score": model.score.weight[0].tolist(),
            "scores": scores.tolist(),
        }
    return found


def make_rows():
    """42 pairs, of which the 11th and the 30th are longer than CONFIG's max_length."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(42):
        a, b, wrong, margin = (int(torch.randint(0, 100, (), generator=generator)) for _ in range(4))
        row = {"prompt": f"what is {a}+{b}? ", "chosen": f"{a}+{b}={a + b}.", "rejected": f"{a}+{b}={a + wrong + 1}"}
        if index in (10, 29):
            row["rejected" if index == 10 else "chosen"] += " and so on" * 5
        rows.append({**row, "margin": margin / 50})
    return rows


CONFIG = {
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "max_steps": 50,
    "max_length": 64,
    "gradient_checkpointing": False,
}
CURVES = {
    "plain": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "margin_centering": {"per_device_train_batch_size": 8, "center_rewards_coefficient": 0.05},
}
# The head that "margin_centering" starts from; "plain" starts from zeros.
HEAD_STD = 0.2


class InOrder(RewardTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset or self.train_dataset)


class Curve(TrainerCallback):
    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.lines.append({name: float(value) for name, value in logs.items()})


def curve(name, rows):
    """(metrics of every step, head at the start, {tensor: final - first})."""
    torch.manual_seed(0)
    model = classifier(MODEL, 11, 0, HEAD_STD if name == "margin_centering" else 0.0)
    if name == "plain":
        rows = [{key: value for key, value in row.items() if key != "margin"} for row in rows]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    log = Curve()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"logging_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False, "use_cpu": True}
        args = RewardConfig(folder, **settings, disable_tqdm=True, **CONFIG, **CURVES[name])
        data = Dataset.from_list(rows)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        trainer = InOrder(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[log])
        assert len(trainer.train_dataset) == 40
        trainer.train()
    after = trainer.model.state_dict()
    return log.lines, before["score.weight"][0].tolist(), {key: after[key] - before[key] for key in before}


def main():
    (HERE / "sequence_scores.json").write_text(json.dumps(sequence_scores()) + "\n")
    rows = make_rows()
    (HERE / "pair_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, updates = {"config": CONFIG, "curves": CURVES}, {}
    for name in CURVES:
        lines, head, change = curve(name, rows)
        found[name] = {"head": head, "steps": lines}
        updates |= {f"{name}/{key}": value.numpy().astype(np.float16) for key, value in change.items()}
    (HERE / "reward_curves.json").write_text(json.dumps(found) + "\n")
    np.savez_compressed(HERE / "reward_updates.npz", **updates)


if __name__ == "__main__":
    main()
