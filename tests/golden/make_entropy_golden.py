"""Makes grpo_entropy_curves.json: the curves of TRL's own loss with an entropy bonus and the high-entropy mask.

    python tests/golden/make_entropy_golden.py        (torch 2.13, transformers 5.23, trl 1.16)

The batch is that of grpo_curves.json, as one micro-batch: TRL takes means and quantiles of entropies of a micro-batch,
rlnumba of the optimizer batch, and so both are the same.
"""

import json
import pathlib
import sys
import types

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.trainer.grpo_config import GRPOConfig

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from make_training_golden import GRPO_MAX_COMPLETION_LENGTH, completion_logprobs, make_optimizer  # noqa: E402

LEARNING_RATE = 1e-3
STEPS = 6
CASES = {
    "bonus": {"entropy_coef": 0.02},
    "bonus_grpo_kl": {"entropy_coef": -0.01, "loss_type": "grpo", "beta": 0.1},
    "quantile": {"top_entropy_quantile": 0.2},
    "quantile_bonus_kl": {"top_entropy_quantile": 0.35, "entropy_coef": 0.05, "loss_type": "bnpo", "beta": 0.1},
    "quantile_0_sequence": {"top_entropy_quantile": 0.0, "importance_sampling_level": "sequence"},
    # The target lies within the range of the entropies: the coefficient goes both ways, and is not always applied.
    "adaptive": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "entropy_coef_delta": 0.04,
        "entropy_coef_max": 0.15,
        "entropy_target": 3.32,
    },
}


def curve(batch, case):
    model = Qwen3ForCausalLM.from_pretrained(HERE / "tiny-qwen3", dtype=torch.float32)
    optimizer = make_optimizer(model, LEARNING_RATE, 0.0)
    defaults = {f.name: f.default for f in GRPOConfig.__dataclass_fields__.values()}
    args = types.SimpleNamespace(**{**defaults, "steps_per_generation": 1, "use_bias_correction_kl": False, **case})
    length = GRPO_MAX_COMPLETION_LENGTH
    mask = torch.tensor([[float(t < len(c)) for t in range(length)] for c in batch["completion_ids"]])

    def padded(rows):
        return torch.tensor([row + [0.0] * (length - len(row)) for row in rows])

    def policy(*_, **__):
        return (*completion_logprobs(model, batch["prompt_ids"], batch["completion_ids"], 1.0), None)

    with torch.no_grad():
        old, _, _ = policy()
    trainer = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(
            gather=lambda x: x,
            pad_across_processes=lambda x, **_: x,
            reduce=lambda x, reduction: x,
            num_processes=1,
            sync_gradients=True,
        ),
        model=types.SimpleNamespace(training=True),
        args=args,
        aux_loss_enabled=False,
        top_entropy_quantile=args.top_entropy_quantile,
        off_policy_mask_threshold=None,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=length,
        entropy_coef=args.entropy_coef,
        use_adaptive_entropy=args.use_adaptive_entropy,
        _entropy_bonus_enabled=args.entropy_coef != 0 or args.use_adaptive_entropy,
        _last_world_entropy=float("inf"),
        _entropy_window_stats=None,
        _get_per_token_logps_and_entropies=policy,
    )
    trainer.get_high_entropy_mask = types.MethodType(GRPOTrainer.get_high_entropy_mask, trainer)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros(len(mask), length, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor(batch["advantages"]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(batch["ref_logprobs"]),
    }
    found = []
    for _ in range(STEPS):
        trainer._metrics = {"train": {name: [] for name in NAMES}}
        loss = GRPOTrainer._compute_loss(trainer, model, inputs)
        loss.backward()
        grad_norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if values}
        found.append({"loss": loss.item(), "grad_norm": grad_norm.item(), **metrics})
    return found


NAMES = (
    *("policy_loss", "entropy_coef", "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    *("clip_ratio/region_mean", "clip_ratio/low_min", "clip_ratio/high_max"),
)


def main():
    batch = json.loads((HERE / "grpo_curves.json").read_text())["batch"]
    cases = {name: {"options": case, "curve": curve(batch, case)} for name, case in CASES.items()}
    text = json.dumps({"config": {"learning_rate": LEARNING_RATE}, "cases": cases}, indent=1)
    (HERE / "grpo_entropy_curves.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
