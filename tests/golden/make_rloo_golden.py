"""Writes rloo_curves.json, rloo_weights.npz and rloo_loss.npz: runs of TRL's own RLOOTrainer, and its loss alone.

    python tests/golden/make_rloo_golden.py        (torch 2.13, transformers 5.23, trl 1.16)

The trainer is TRL's, whole: only its `_generate` is replaced, by one that returns completions drawn beforehand, so that
a run here can train on the same ones. The loss alone is float64: `_compute_loss` of an object that has the attributes
which it reads. make_training_golden.py makes the model.
"""

import collections
import json
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import RLOOConfig, RLOOTrainer

HERE = Path(__file__).parent
MODEL = HERE / "tiny-qwen3"
EOS = 1
NUM_PROMPTS, PROMPTS_PER_STEP, MAX_COMPLETION_LENGTH = 16, 4, 12
COMMON = {
    "learning_rate": 1e-3,
    "warmup_steps": 5,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
}
# 8 completions a generation: 4 prompts x 2 or 2 x 4, in two micro-batches.
CASES = {
    "default": {
        "max_steps": 50,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
    },
    "options": {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_iterations": 3,
        "num_generations": 4,
        "beta": 0.2,
        "epsilon": 0.1,
        "epsilon_high": 0.15,
        "normalize_advantages": True,
        "reward_clip_range": [0.1, 0.6],
        "temperature": 0.8,
    },
}


def make_prompts():
    rng = np.random.default_rng(5)
    return [f"what is {a}+{b}? " for a, b in rng.integers(0, 200, (NUM_PROMPTS, 2)).tolist()]


def make_completions(count, seed):
    """Token ids of `count` completions, most with an end token: list of lists."""
    rng = np.random.default_rng(seed)
    completions = []
    for _ in range(count):
        length = int(rng.integers(1, MAX_COMPLETION_LENGTH + 1))
        ids = rng.integers(3, 46, length).tolist()
        # A completion without an end token has reached its limit.
        completions.append([*ids[:-1], EOS] if rng.random() < 0.75 else (ids * MAX_COMPLETION_LENGTH)[:12])
    return completions


def reward_of(ids):
    """The share of digits, and no value for a completion that begins with a question mark (id 16)."""
    return None if ids[0] == 16 else sum(3 <= i < 13 for i in ids) / len(ids)


def run_case(name, options):
    options = COMMON | options
    per_generation = options["per_device_train_batch_size"] * options["gradient_accumulation_steps"]
    generations = -(-options["max_steps"] // options["num_iterations"])
    completions = make_completions(generations * per_generation, len(name))
    taken = []

    class Fixed(RLOOTrainer):
        def _generate(self, prompts):
            start = sum(taken)
            taken.append(len(prompts))
            ids = completions[start : start + len(prompts)]
            prompt_ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
            return prompt_ids, ids, self.processing_class.batch_decode(ids)

    def reward(completion_ids, **columns):
        return [reward_of(ids) for ids in completion_ids]

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        args = RLOOConfig(
            output_dir=folder, bf16=False, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
            optim="adamw_torch", disable_tqdm=True, **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        rows = Dataset.from_list([{"prompt": prompt} for prompt in make_prompts()])
        trainer = Fixed(model, [reward], args, rows, processing_class=tokenizer)
        trainer.train()
    names = "loss grad_norm learning_rate kl reward reward_std frac_reward_zero_std".split()
    names += [f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean")]
    log = [row for row in trainer.state.log_history if "loss" in row]
    curve = [{key: row[key] for key in names if row.get(key) is not None} for row in log]
    assert len(curve) == options["max_steps"] and sum(taken) == len(completions)
    return {"options": options, "completion_ids": completions, "curve": curve}, model


def loss_alone():
    """Log-probs, losses, gradients and metrics of _compute_loss for two bounds of the ratio, float64: dict."""
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(3)
    B, T = 6, 5
    mask = np.ones((B, T))
    mask[1, 3:] = mask[4, 1:] = 0
    lp = -rng.exponential(1.0, (B, T))
    arrays = {
        "logprobs": lp,
        "old_logprobs": lp + rng.normal(0, 0.1, (B, T)),
        "mask": mask,
        "advantages": np.array([1.2, -0.7, 0.4, -1.5, 0.9, -0.3]),
        "bounds": np.array([[0.4, 0.4], [0.05, 0.1]]),
    }
    losses, gradients, metrics = [], [], []
    for low, high in arrays["bounds"].tolist():
        logprobs = torch.tensor(lp, requires_grad=True)
        self = types.SimpleNamespace(
            accelerator=types.SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
            model=types.SimpleNamespace(training=True),
            aux_loss_enabled=False,
            epsilon_low=low,
            epsilon_high=high,
            _metrics={"train": collections.defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *a, lp=logprobs, **k: (lp, torch.zeros_like(lp), None),
        )
        inputs = {
            "prompt_ids": torch.zeros(B, 1),
            "prompt_mask": torch.ones(B, 1),
            "completion_ids": torch.zeros(B, T),
            "completion_mask": torch.tensor(mask),
            "advantages": torch.tensor(arrays["advantages"]),
            "old_logps": torch.tensor((arrays["old_logprobs"] * mask).sum(1)),
        }
        loss = RLOOTrainer._compute_loss(self, self.model, inputs)
        loss.backward()
        losses.append(loss.item())
        gradients.append(logprobs.grad.numpy())
        metrics.append({name: values[0] for name, values in self._metrics["train"].items() if name != "entropy"})
    torch.set_default_dtype(torch.float32)
    return arrays | {"losses": losses, "gradients": np.array(gradients), "metrics": json.dumps(metrics)}


def main():
    torch.set_num_threads(1)
    np.savez_compressed(HERE / "rloo_loss.npz", **loss_alone())
    cases = {}
    for name, options in CASES.items():
        cases[name], model = run_case(name, options)
        if name == "default":
            weights = {key: value.detach().numpy() for key, value in model.named_parameters() if "lm_head" not in key}
            np.savez_compressed(HERE / "rloo_weights.npz", **weights)
    written = {"prompts": make_prompts(), "cases": cases}
    (HERE / "rloo_curves.json").write_text(json.dumps(written, indent=0, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
