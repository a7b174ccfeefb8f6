"""Writes ppo_curves.json, ppo_weights.npz and ppo_parts.npz: runs of TRL's own PPOTrainer, and parts of it in float64.

    python tests/golden/make_ppo_golden.py        (torch 2.13, transformers 5.23, trl 1.12)

The trainer is TRL's, whole, on completions and scores made beforehand; five lines of its `train` are changed: the score
stands at the last token also where the completion is shorter than others, three metrics leave the padding out, and
gradient norms are recorded. The parts are the lines of `train` from rewards to advantages, and those of the loss.
make_training_golden.py makes the model.
"""

import inspect
import json
import tempfile
import textwrap
import types
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.experimental.ppo import ppo_trainer as module

HERE = Path(__file__).parent
MODEL = HERE / "tiny-qwen3"
PAD, EOS = 0, 1
BATCH, LENGTH = 8, 8
CASES = {
    "default": {"steps": 50, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "num_ppo_epochs": 2},
    "accumulated": {
        "steps": 4,
        "learning_rate": 5e-4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_ppo_epochs": 3,
        "kl_estimator": "k3",
        "kl_coef": 0.2,
        "whiten_rewards": True,
        "missing_eos_penalty": 0.5,
        "gamma": 0.98,
        "lam": 0.9,
        "temperature": 0.8,
        "vf_coef": 0.5,
        "cliprange": 0.1,
        "cliprange_value": 0.05,
    },
    "mini_batches": {
        "steps": 4,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 8,
        "num_ppo_epochs": 2,
        "num_mini_batches": 2,
    },
}
CHANGES = [
    ("sequence_lengths_p1 = sequence_lengths + 1", "sequence_lengths_p1 = sequence_lengths"),
    ("0.5 * (logprobs_diff**2).mean()", "0.5 * masked_mean(logprobs_diff**2, ~padding_mask[micro_batch_inds])"),
    ("= entropy.mean()", "= masked_mean(entropy, ~padding_mask[micro_batch_inds])"),
    ("= ratio.mean()", "= masked_mean(ratio, ~padding_mask[micro_batch_inds])"),
    ("optimizer.step()\n", "self.record_norms(); optimizer.step()\n"),
]


def changed_source():
    source = textwrap.dedent(inspect.getsource(PPOTrainer.train))
    for old, new in CHANGES:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def make_data(rng, count):
    """Prompts and completions of one length at most, most with an end token: two lists of lists."""
    prompts = [rng.integers(3, 46, rng.integers(3, 9)).tolist() for _ in range(count)]
    completions = []
    for _ in range(count):
        ids = rng.integers(3, 46, LENGTH).tolist()
        length = int(rng.integers(1, LENGTH + 1))
        completions.append(ids if rng.random() < 0.3 else [*ids[: length - 1], EOS])
    # Responses are as long as the longest of their batch.
    completions[::BATCH] = [ids[:LENGTH] for ids in rng.integers(3, 46, (len(completions[::BATCH]), LENGTH)).tolist()]
    return prompts, completions


def score_of(ids):
    return 2.0 * sum(3 <= i < 13 for i in ids) / len(ids)


def norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()


def run_case(name, case):
    case = dict(case)
    steps = case.pop("steps")
    rng = np.random.default_rng(len(name))
    # A batch more than there are steps: accelerate takes an optimizer step for every micro-batch of the last one.
    prompts, completions = make_data(rng, (steps + 1) * BATCH)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    critic.score.weight.data = 0.1 * torch.randn(1, critic.config.hidden_size)
    head = critic.score.weight.detach().flatten().tolist()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.padding_side = "left"
    recorded, permutations, norms = [], [], []
    place = {tuple(prompt): i for i, prompt in enumerate(prompts)}
    assert len(place) == len(prompts)

    def batch_generation(model, queries, size, pad_token_id, generation_config):
        chosen = [place[tuple(row[row != PAD].tolist())] for row in queries]
        recorded.append(chosen)
        responses = torch.full((len(chosen), LENGTH), PAD)
        for row, i in zip(responses, chosen, strict=True):
            row[: len(completions[i])] = torch.tensor(completions[i])
        whole = torch.cat([queries, responses], 1)
        logits = module.forward(model, whole, PAD).logits[:, queries.shape[1] - 1 : -1]
        return whole, logits / (args.temperature + 1e-7)

    get_reward = module.get_reward

    def reward(model, query_responses, pad_token_id, context_length):
        if model is not trainer.reward_model:
            return get_reward(model, query_responses, pad_token_id, context_length)
        rows = [row[row != PAD].tolist() for row in query_responses[:, context_length:]]
        return None, torch.tensor([score_of(row) for row in rows]), None

    def permutation(count):
        permutations.append(rng.permutation(count).tolist())
        return np.array(permutations[-1])

    namespace = dict(vars(module))
    namespace |= {"batch_generation": batch_generation, "get_reward": reward}
    namespace["np"] = types.SimpleNamespace(random=types.SimpleNamespace(permutation=permutation))
    exec(changed_source(), namespace)

    class Fixed(PPOTrainer):
        train = namespace["train"]

        def record_norms(self):
            if self.accelerator.sync_gradients:
                norms.append([norm(self.model.policy.parameters()), norm(self.model.value_model.parameters())])

    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder, bf16=False, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
            optim="adamw_torch", disable_tqdm=True, gradient_checkpointing=False, num_sample_generations=0,
            total_episodes=steps * BATCH, response_length=LENGTH, **{"temperature": 1.0} | case,
        )  # fmt: skip
        rows = Dataset.from_list([{"input_ids": prompt} for prompt in prompts])
        trainer = Fixed(args, tokenizer, policy, reference, torch.nn.Linear(1, 1), rows, critic, eval_dataset=rows)
        trainer.train()
    log = [row for row in trainer.state.log_history if "objective/kl" in row]
    names = [key for key in log[0] if key.split("/")[0] in ("objective", "policy", "loss", "val")]
    curve = [{key: row[key] for key in [*names, "lr"]} for row in log]
    per_step = len(norms) // steps
    for i, row in enumerate(curve):
        means = np.mean(norms[i * per_step : (i + 1) * per_step], axis=0).tolist()
        row["grad_norm"], row["critic/grad_norm"] = means
        if np.isnan(row["val/ratio_var"]):
            del row["val/ratio_var"]
    data = {
        "prompt_ids": [[prompts[i] for i in chosen] for chosen in recorded],
        "completion_ids": [[completions[i] for i in chosen] for chosen in recorded],
    }
    assert len(curve) == steps
    options = {"temperature": 1.0} | case
    return {"options": options, "head": head, **data, "permutations": permutations, "curve": curve}, policy, critic


def lines_between(first, last):
    """The lines of `train` from the one that begins with `first` to the one that begins with `last`, dedented."""
    lines = changed_source().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(i for i in range(begin, len(lines)) if lines[i].strip().startswith(last))
    return textwrap.dedent("\n".join(lines[begin : end + 1]))


def parts():
    """Rewards, advantages and returns, and losses with their gradients, in float64: dict of arrays."""
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(11)
    B, T = 6, 7
    lengths = np.array([7, 3, 1, 7, 5, 2])
    draw = lambda scale=1.0: torch.tensor(scale * rng.standard_normal((B, T)))  # noqa: E731
    padding = torch.arange(T)[None] >= torch.tensor(lengths)[:, None]
    arrays = {"logprobs": -draw().abs(), "values": draw(), "scores": draw()[:, 0]}
    arrays["ref_logprobs"] = arrays["logprobs"] + draw(0.3)
    found = {name: array.numpy() for name, array in arrays.items()} | {"lengths": lengths}
    code = lines_between(
        "logr = ref_logprobs - logprobs", "advantages = torch.masked_fill(advantages, padding_mask, 0)"
    )
    for estimator in ("k1", "k3"):
        for whiten in (False, True):
            args = types.SimpleNamespace(
                kl_estimator=estimator, kl_coef=0.1, whiten_rewards=whiten, gamma=0.97, lam=0.9
            )
            last = torch.tensor(lengths - 1)
            local = {**vars(module), **arrays, "args": args, "sequence_lengths": last, "sequence_lengths_p1": last}
            # The trainer marks the padding by a log-prob of 1 and a value of 0.
            local |= {name: arrays[name].masked_fill(padding, 1.0) for name in ("logprobs", "ref_logprobs")}
            local |= {"values": arrays["values"].masked_fill(padding, 0.0), "responses": arrays["logprobs"]}
            local |= {"padding_mask": padding, "padding_mask_p1": padding}
            exec(code, local)
            for name in ("kl", "rewards", "advantages", "returns"):
                found[f"{estimator}_{int(whiten)}_{name}"] = local[name].numpy()
    # The loss, after an update that moved log-probs and values beyond both bounds in places.
    new = {"new_logprobs": arrays["logprobs"] + draw(0.3), "vpred": arrays["values"] + draw(0.4)}
    advantage, target = draw(), arrays["values"] + draw()
    found |= {name: array.numpy() for name, array in new.items()}
    found |= {"advantage": advantage.numpy(), "target": target.numpy()}
    args = types.SimpleNamespace(cliprange=0.2, cliprange_value=0.15, vf_coef=0.3)
    leaves = {name: array.clone().requires_grad_() for name, array in new.items()}
    local = {**vars(module), "args": args, "padding_mask": padding, "padding_mask_p1": padding}
    local |= {"micro_batch_inds": slice(None), "mb_advantage": advantage, "mb_return": target}
    local |= {"mb_logprobs": arrays["logprobs"], "mb_values": arrays["values"], **leaves}
    exec(lines_between("vpredclipped = torch.clamp(", "loss = pg_loss + args.vf_coef * vf_loss"), local)
    local["loss"].backward()
    for name, leaf in leaves.items():
        found[f"d{name}"] = leaf.grad.numpy()
    exec(lines_between("pg_clipfrac = masked_mean(", ")"), local)
    names = ("pg_loss", "vf_loss", "vf_clipfrac", "pg_clipfrac")
    found |= {name: local[name].item() for name in names}
    valid = ~padding
    found["approxkl"] = 0.5 * module.masked_mean(local["logprobs_diff"] ** 2, valid).item()
    found["ratio"] = module.masked_mean(local["ratio"], valid).item()
    torch.set_default_dtype(torch.float32)
    return found


def main():
    torch.set_num_threads(1)
    np.savez_compressed(HERE / "ppo_parts.npz", **parts())
    cases = {}
    for name, case in CASES.items():
        cases[name], policy, critic = run_case(name, case)
        if name == "default":
            weights = {f"policy.{key}": value for key, value in policy.named_parameters() if "lm_head" not in key}
            weights |= {f"critic.{key}": value for key, value in critic.named_parameters() if "proj" not in key}
            np.savez_compressed(
                HERE / "ppo_weights.npz", **{key: value.detach().numpy() for key, value in weights.items()}
            )
    (HERE / "ppo_curves.json").write_text(json.dumps({"cases": cases}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
