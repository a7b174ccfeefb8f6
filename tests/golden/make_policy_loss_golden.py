"""Makes policy_loss.npz and policy_loss_tools.npz: losses, gradients and metrics of TRL's own
GRPOTrainer._compute_loss, in float64. The second has results of tools between the drawn tokens.

    python tests/golden/make_policy_loss_golden.py        (torch 2.13, trl 1.16)

The trainer is not built: _compute_loss is called on an object that has the attributes it reads, and whose
model answers with the log-probs as a leaf tensor.
"""

import collections
import itertools
import json
import pathlib
import types

import numpy as np
import torch
from trl import GRPOTrainer
from trl.trainer.grpo_config import GRPOConfig

B, T, GA = 4, 6, 2


class Accelerator:
    num_processes = 1

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def make_inputs(rng):
    mask = np.ones((B, T))
    mask[1, 4:] = 0
    mask[2, :] = 0
    mask[3, 2] = 0
    return made_arrays(rng, mask)


def make_inputs_with_tools(rng):
    """Two turns and a result, three turns, a truncated result at the end, and no result. tool_mask is 0 in them."""
    completion_mask, tool_mask = np.ones((B, T)), np.ones((B, T))
    completion_mask[1, 5:] = 0
    tool_mask[0, 2:4] = 0
    tool_mask[1, [1, 3]] = 0
    tool_mask[2, 3:] = 0
    arrays = made_arrays(rng, completion_mask * tool_mask)
    # What TRL has at a result's tokens is never read.
    arrays["rollout_logprobs"][tool_mask == 0] = 0.0
    return arrays | {"completion_mask": completion_mask, "tool_mask": tool_mask}


def made_arrays(rng, mask):
    lp = -rng.exponential(1.0, (B, T))
    return {
        "logprobs": lp,
        "old_logprobs": lp + rng.normal(0, 0.3, (B, T)),
        "ref_logprobs": lp + rng.normal(0, 0.5, (B, T)),
        "rollout_logprobs": lp + rng.normal(0, 0.3, (B, T)),
        "mask": mask,
        "advantages": np.array([1.2, -0.7, 0.4, -1.5]),
    }


def correction(arrays, mode, low, high):
    """The ratio as _generate_and_score_completions computes it."""
    difference = torch.tensor((arrays["old_logprobs"] - arrays["rollout_logprobs"]) * arrays["mask"])
    ratio = torch.exp(difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -np.inf if low is None else low, np.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def run(arrays, case):
    case = dict(case)
    mode = case.pop("importance_sampling_correction", None)
    low, high = case.pop("importance_sampling_clip_min", None), case.pop("importance_sampling_clip_max", 3.0)
    threshold = case.pop("off_policy_mask_threshold", None)
    defaults = {f.name: f.default for f in GRPOConfig.__dataclass_fields__.values()}
    args = types.SimpleNamespace(**{**defaults, "steps_per_generation": GA, "use_bias_correction_kl": False, **case})
    lp = torch.tensor(arrays["logprobs"], requires_grad=True)
    self = types.SimpleNamespace(
        args=args,
        accelerator=Accelerator(),
        model=types.SimpleNamespace(training=True),
        current_gradient_accumulation_steps=GA,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=threshold,
        importance_sampling_level=args.importance_sampling_level,
        beta=args.beta,
        loss_type=args.loss_type,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        max_completion_length=args.max_completion_length,
        use_vllm=mode is not None,
        vllm_importance_sampling_correction=mode is not None,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (lp, torch.zeros_like(lp), None),
    )
    mask = torch.tensor(arrays["mask"])
    inputs = {
        "prompt_ids": torch.zeros(B, 1),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T),
        "completion_mask": torch.tensor(arrays.get("completion_mask", arrays["mask"])),
        "advantages": torch.tensor(arrays["advantages"]),
        "old_per_token_logps": torch.tensor(arrays["old_logprobs"]),
        "ref_per_token_logps": torch.tensor(arrays["ref_logprobs"]),
        # As if a second micro-batch with 9 tokens belonged to the step.
        "num_items_in_batch": mask.sum() + 9,
    }
    if "tool_mask" in arrays:
        inputs["tool_mask"] = torch.tensor(arrays["tool_mask"])
    if mode or threshold is not None:
        inputs["sampling_per_token_logps"] = torch.tensor(arrays["rollout_logprobs"])
    if mode:
        inputs["importance_sampling_ratio"] = correction(arrays, mode, low, high)
    loss = GRPOTrainer._compute_loss(self, self.model, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in self._metrics["train"].items() if name != "entropy"}
    return loss.item(), lp.grad.numpy(), metrics


def cases():
    for loss_type, level in itertools.product(
        ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"], ["token", "sequence"]
    ):
        plain = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 7}
        if loss_type == "cispo":
            plain["epsilon_high"] = 1.2
        yield plain
        yield {**plain, "beta": 0.3}
        yield {**plain, "beta": 0.3, "use_bias_correction_kl": True}
        yield {**plain, "off_policy_mask_threshold": 0.02}
        for mode in ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]:
            bounds = {"importance_sampling_clip_max": 1.2, "importance_sampling_clip_min": 0.8}
            yield {**plain, "beta": 0.1, "importance_sampling_correction": mode, **bounds}
    yield {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.3}
    tight = {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.05}
    yield {"loss_type": "grpo", "importance_sampling_level": "sequence", **tight}


def record(name, arrays):
    """Write a file with the losses of all cases on these arrays."""
    listed, losses, gradients = [], [], []
    for case in cases():
        loss, gradient, metrics = run(arrays, case)
        listed.append({"config": case, "metrics": metrics})
        losses.append(loss)
        gradients.append(gradient)
    path = pathlib.Path(__file__).with_name(name)
    np.savez_compressed(
        path, cases=json.dumps(listed), losses=np.array(losses), gradients=np.array(gradients), **arrays
    )
    print(path, len(losses), "cases,", path.stat().st_size, "bytes")


def main():
    torch.set_default_dtype(torch.float64)
    record("policy_loss.npz", make_inputs(np.random.default_rng(3)))
    record("policy_loss_tools.npz", make_inputs_with_tools(np.random.default_rng(4)))


if __name__ == "__main__":
    main()
