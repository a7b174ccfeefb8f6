"""Makes the golden values of DPO and KTO with TRL's own trainers.

    python tests/golden/make_preference_golden.py        (torch 2.13, transformers 5.23, trl 1.16)

preference_loss.npz   losses, gradients and metrics in float64 of DPOTrainer._compute_loss and KTOTrainer._compute_loss,
                      called on an object with the attributes that they read, whose model answers with the log-probs as
                      a leaf tensor
preference_rows.jsonl, kto_rows.jsonl, preference_curves.json, preference_updates.npz
                      50 steps of DPOTrainer and KTOTrainer on tiny-qwen3: the curves, and final - initial weights
"""

import collections
import itertools
import json
import pathlib
import tempfile
import types

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

HERE = pathlib.Path(__file__).parent
MODEL = HERE / "tiny-qwen3"
# Tokens of the completions of four pairs, chosen and rejected, and of five KTO rows.
CHOSEN, REJECTED, UNPAIRED = (5, 2, 7, 1), (3, 4, 7, 6), (4, 1, 6, 3, 5)
LABELS = (True, False, True, True, False)
T = 8


class Accelerator:
    device = torch.device("cpu")

    def gather(self, x):
        return x

    gather_for_metrics = gather


def masks(lengths):
    """completion_mask (B, T): a token of prompt, then the completion."""
    return torch.tensor([[0] + [int(t < n) for t in range(T - 1)] for n in lengths])


def padded(values, lengths):
    """(B, T - 1) from packed values."""
    rows = torch.zeros(len(lengths), T - 1)
    rows[masks(lengths)[:, 1:].bool()] = values
    return rows


class Model(torch.nn.Module):
    """Answers with what it is given, padded, as a model with TRL's fused head."""

    def __init__(self, arrays, lengths):
        super().__init__()
        self.outputs = types.SimpleNamespace(**{name: padded(values, lengths) for name, values in arrays.items()})

    def forward(self, **_):
        return self.outputs


def make_inputs(rng):
    def log_probs(lengths):
        count = sum(lengths)
        lp = -rng.exponential(1.0, count)
        return {"logprobs": lp, "ref_logprobs": lp + rng.normal(0, 0.4, count), "log_sum_sq": lp - rng.random(count)}

    unpaired = log_probs(UNPAIRED)
    kl = {"kl_logps": rng.normal(0, 1, 5) - 3, "ref_kl_logps": rng.normal(0, 1, 5) - 3.5}
    pairs = log_probs(CHOSEN + REJECTED)
    return {f"pair_{k}": v for k, v in pairs.items()} | {f"kto_{k}": v for k, v in unpaired.items()} | kl


def common(lengths, lp, arrays, prefix):
    zeros = torch.zeros(sum(lengths))
    of_model = {"log_probs": lp, "log_sum_sq_probs": torch.tensor(arrays[f"{prefix}_log_sum_sq"])}
    of_model |= {"entropy": zeros, "mean_logits": zeros}
    model = Model(of_model, lengths)
    model.outputs.is_top1 = torch.zeros(len(lengths), T - 1, dtype=torch.bool)
    ref = Model({"log_probs": torch.tensor(arrays[f"{prefix}_ref_logprobs"])}, lengths)
    fields = {"accelerator": Accelerator(), "model": model, "ref_model": ref, "aux_loss_enabled": False}
    fields |= {"precompute_ref_logps": False, "_metrics": {"train": collections.defaultdict(list)}}
    fields |= {"_total_train_tokens": 0, "_tp_size": 1}
    return fields


def finish(loss, lp, trainer):
    loss.backward()
    names = ("rewards/", "logps/", "kl")
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items() if name.startswith(names)}
    return loss.item(), lp.grad.numpy(), metrics


def run_dpo(arrays, case):
    options = {name: field.default for name, field in DPOConfig.__dataclass_fields__.items()} | case
    lp = torch.tensor(arrays["pair_logprobs"], requires_grad=True)
    lengths = CHOSEN + REJECTED
    fields = common(lengths, lp, arrays, "pair")
    for name in ("beta", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing"):
        fields[name] = options[name]
    fields |= {"loss_types": case["loss_type"], "use_weighting": options["use_weighting"]}
    fields["loss_weights"] = options["loss_weights"] or [1.0] * len(case["loss_type"])
    fields["args"] = types.SimpleNamespace(
        gradient_checkpointing_kwargs=None, discopop_tau=options["discopop_tau"], gradient_checkpointing=False
    )
    trainer = types.SimpleNamespace(**fields)
    trainer.model.is_gradient_checkpointing = False
    mask = masks(lengths)
    inputs = {"input_ids": mask, "completion_mask": mask, "attention_mask": mask}
    return finish(DPOTrainer._compute_loss(trainer, trainer.model, inputs, False), lp, trainer)


def run_kto(arrays, case):
    options = {name: field.default for name, field in KTOConfig.__dataclass_fields__.items()} | case
    lp = torch.tensor(arrays["kto_logprobs"], requires_grad=True)
    fields = common(UNPAIRED, lp, arrays, "kto")
    for name in ("beta", "loss_type", "desirable_weight", "undesirable_weight"):
        fields[name] = options[name]
    fields |= {"calculate_KL": options["loss_type"] == "kto"}
    fields["args"] = types.SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False)
    trainer = types.SimpleNamespace(**fields)
    trainer.model.is_gradient_checkpointing = False

    def kl_logps(model, batch):
        if not trainer.calculate_KL:
            return None
        return torch.tensor(arrays["kl_logps" if model is trainer.model else "ref_kl_logps"] * case.get("sign", 1))

    trainer._compute_kl_logps = kl_logps
    mask = masks(UNPAIRED)
    inputs = {"input_ids": mask, "completion_mask": mask, "attention_mask": mask, "label": torch.tensor(LABELS)}
    return finish(KTOTrainer._compute_loss(trainer, trainer.model, inputs, False), lp, trainer)


ALL = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "nca_pair", "bco_pair")
ALL += ("sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "sft")
OF_MARGIN = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop", "sft")
OF_BATCH = ("aot", "aot_unpaired", "sft")


def dpo_cases():
    for name in ALL:
        smoothings = (0.2, 0.0) if name in ("robust", "aot", "aot_unpaired") else (0.2,)
        divergences = [("reverse_kl", 0.5)]
        if name in OF_MARGIN:
            divergences += [("forward_kl", 0.5), ("js_divergence", 0.5)]
            divergences += [("alpha_divergence", alpha) for alpha in (0.5, 1.0, 2.0)]
        weightings = (False,) if name in OF_BATCH else (False, True)
        for smoothing, (divergence, alpha), weighting, ld_alpha in itertools.product(
            smoothings, divergences, weightings, (None, 0.3)
        ):
            yield {
                "loss_type": [name], "beta": 0.4, "label_smoothing": smoothing, "f_divergence_type": divergence,
                "f_alpha_divergence_coef": alpha, "use_weighting": weighting, "ld_alpha": ld_alpha,
            }  # fmt: skip
    yield {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    yield {"loss_type": ["sigmoid", "hinge"]}
    yield {"loss_type": ["aot", "apo_zero"], "loss_weights": [0.5, -0.5], "label_smoothing": 0.1}
    yield {"loss_type": ["discopop"], "discopop_tau": 0.5, "beta": 1.0}


def kto_cases():
    for loss_type in ("kto", "apo_zero_unpaired"):
        yield {"loss_type": loss_type}
        yield {"loss_type": loss_type, "beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    # A mean below zero counts as zero.
    yield {"loss_type": "kto", "beta": 0.3, "sign": -1}


def make_losses():
    arrays = make_inputs(np.random.default_rng(5))
    stored = dict(arrays)
    for kind, run, cases in (("dpo", run_dpo, dpo_cases()), ("kto", run_kto, kto_cases())):
        listed, losses, gradients = [], [], []
        for case in cases:
            # TRL's alpha-divergence knows no float64.
            single = case.get("f_divergence_type") == "alpha_divergence"
            torch.set_default_dtype(torch.float32 if single else torch.float64)
            rounded = {name: value.astype(np.float32) if single else value for name, value in arrays.items()}
            try:
                loss, gradient, metrics = run(rounded, case)
            except RuntimeError as error:
                # TRL multiplies by the weights of use_weighting in place, which some losses' backward does not allow.
                assert case["use_weighting"] and "inplace operation" in str(error)
                print("no backward in TRL:", case["loss_type"])
                continue
            listed.append({"config": case, "metrics": metrics})
            losses.append(loss)
            gradients.append(gradient)
        stored |= {f"{kind}_cases": json.dumps(listed), f"{kind}_losses": losses, f"{kind}_gradients": gradients}
    torch.set_default_dtype(torch.float32)
    lengths = {"chosen": CHOSEN, "rejected": REJECTED, "unpaired": UNPAIRED, "labels": LABELS}
    np.savez_compressed(HERE / "preference_loss.npz", **stored, **lengths)


STEPS = 50
TRAIN = {
    "learning_rate": 5e-4,
    "weight_decay": 0.1,
    "warmup_steps": 5,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "max_length": 64,
}
# name: (trainer, options, gradient_accumulation_steps, whether the weights are kept)
CURVES = {
    "sigmoid": ("dpo", {"loss_type": ["sigmoid"]}, 2, True),
    "sync_ref": ("dpo", {"loss_type": ["hinge"], "sync_ref_model": True, "ref_model_sync_steps": 6}, 1, False),
    "ipo_js": ("dpo", {"loss_type": ["ipo"], "f_divergence_type": "js_divergence", "beta": 0.3}, 2, False),
    "mpo": ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]}, 1, True),
    "ld_wpo": ("dpo", {"loss_type": ["sigmoid_norm"], "ld_alpha": 0.3, "use_weighting": True, "beta": 2.0}, 2, False),
    "aot": ("dpo", {"loss_type": ["aot"], "label_smoothing": 0.1}, 2, False),
    "short": ("dpo", {"loss_type": ["apo_down"], "max_length": 18}, 1, False),
    "kto": ("kto", {"loss_type": "kto", "desirable_weight": 1.2}, 1, True),
    "apo_zero_unpaired": ("kto", {"loss_type": "apo_zero_unpaired", "undesirable_weight": 0.8}, 2, False),
}
METRICS = ("loss", "grad_norm", "learning_rate", "num_tokens", "entropy", "mean_token_accuracy", "kl")


def make_rows():
    generator = torch.Generator().manual_seed(3)

    def draw(high):
        return int(torch.randint(0, high, (), generator=generator))

    rows = []
    for i in range(24):
        a, b = draw(10 ** (1 + i % 3)), draw(100)
        wrong = (f"{a}+{b}={a + b + 1 + draw(9)}.", "i do not know.", f"{a}-{b}={a - b}.")[draw(3)]
        rows.append({"prompt": f"what is {a}+{b}? ", "chosen": f"{a}+{b}={a + b}.", "rejected": wrong})
    return rows


def make_curve(rows, kind, options, accumulation):
    """(the steps' metrics by name, final - initial weights by name)."""
    config, trainer = {"dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}[kind]
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            **TRAIN | options, output_dir=folder, gradient_accumulation_steps=accumulation, logging_steps=1, bf16=False,
            use_cpu=True, report_to="none", save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        before = {name: value.detach().clone() for name, value in model.state_dict().items()}
        trained = trainer(
            model,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
        )
        trained.train()
    names = ("rewards/", "logps/", "logits/")
    steps = [entry for entry in trained.state.log_history if "loss" in entry]
    assert len(steps) == STEPS
    # KTO has no metrics of a side that a batch lacks.
    curve = {
        name: [float(f"{entry[name]:.8g}") if name in entry else None for entry in steps]
        for name in dict.fromkeys(name for entry in steps for name in entry)
        if name in METRICS or name.startswith(names)
    }
    return curve, {name: (value - before[name]).numpy() for name, value in model.state_dict().items()}


def unpaired(rows):
    """Alternating completions, in an order that no batch has of one kind alone."""
    singles = []
    for i, row in enumerate(rows):
        side = "chosen" if i % 3 != 1 else "rejected"
        singles.append({"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"})
    return singles


def main():
    torch.set_num_threads(1)
    make_losses()
    rows = make_rows()
    (HERE / "preference_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (HERE / "kto_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unpaired(rows)))
    curves, updates = {}, {}
    for name, (kind, options, accumulation, keeps) in CURVES.items():
        curve, update = make_curve(rows if kind == "dpo" else unpaired(rows), kind, options, accumulation)
        curves[name] = {
            "kind": kind,
            "options": options | {"gradient_accumulation_steps": accumulation},
            "curve": curve,
        }
        if keeps:
            updates |= {f"{name}:{key}": value.astype(np.float16) for key, value in update.items()}
    curves = {"config": TRAIN, "cases": curves}
    (HERE / "preference_curves.json").write_text(json.dumps(curves) + "\n")
    np.savez_compressed(HERE / "preference_updates.npz", **updates)


if __name__ == "__main__":
    main()
