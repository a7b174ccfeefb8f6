"""The step of a cell of table.py in torch: transformers' generate and a training step of its own, or TRL's trainer.

`transformers`: a loop written here, with what is fastest without further packages: bfloat16 weights, PyTorch's fused
AdamW on them (so the optimizer's state has 16 bits, where rlnumba's has 32), SDPA attention, PEFT's adapter, generate
with its KV cache, the LM head on completions alone, and micro-batches of BATCH completions, with gradient
checkpointing where they do not fit without. `trl`: TRL's GRPOTrainer with generation by transformers, its defaults and
the same micro-batches. Random weights of the same shape, every completion at its full length. Needs torch and
transformers, for adapters peft, and for `trl` trl.
"""

import importlib.metadata
import json
import math
import time

import numpy as np
from shapes import SHAPES

RANK = 16
BATCH = 8
CLIP = 0.2
# Tokens of the completions of a step that is not counted.
SHORT = 8


def measure(cell, folder, options):
    """The same dict as table_cell.py:measure, with "note", what was measured."""
    import torch

    take = {"transformers": Loop, "trl": Trainer}[options.peer](cell, folder, options)
    seconds = take.steps()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    if options.peer == "trl":
        versions += f", trl {importlib.metadata.version('trl')}"
    note = {
        "transformers": f"transformers: a loop of transformers' generate and a training step in torch ({versions}; "
        "bench/table_peer.py), with an optimizer's state of 16 bits, one step after a short one.",
        "trl": f"trl: TRL's GRPOTrainer with transformers' generate ({versions}), one step after a short one.",
    }[options.peer]
    return {"seconds": seconds, "gib": peak / 2**30, "difference": math.nan, "note": note}


def config_of(cell):
    """transformers' config of a cell's shape."""
    from transformers import AutoConfig

    keys = dict(SHAPES[cell.shape])
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def new_model(cell, device, dtype):
    """Random weights of the cell's shape, with PEFT's adapter for "lora"."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(cell), dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    if cell.tuned == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


class Loop:
    """GRPO steps by transformers' generate and torch."""

    def __init__(self, cell, folder, options):
        import torch

        self.cell, self.torch = cell, torch
        self.device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
        self.model = new_model(cell, self.device, torch.bfloat16 if self.device == "cuda" else torch.float32)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        ids = np.random.default_rng(0).integers(0, SHAPES[cell.shape]["vocab_size"], (cell.groups, cell.prompt))
        each = cell.completions // cell.groups
        self.prompts = torch.from_numpy(ids).to(self.device).repeat_interleave(each, 0)

    def steps(self):
        """{phase: [seconds]} of one step, after a short one."""
        self.step(SHORT)
        return {name: [seconds] for name, seconds in self.step(self.cell.length).items()}

    def step(self, length):
        """{phase: seconds} of a step with completions of so many tokens."""
        started = self.now()
        self.model.eval()
        with self.torch.no_grad():
            sequences = self.model.generate(
                input_ids=self.prompts, attention_mask=self.torch.ones_like(self.prompts), do_sample=True, top_k=0,
                top_p=1.0, max_new_tokens=length, min_new_tokens=length,
            )  # fmt: skip
        generate_s, began = self.now() - started, self.now()
        assert sequences.shape[1] == self.cell.prompt + length
        try:
            self.train(sequences, length)
        except self.torch.cuda.OutOfMemoryError:
            # Once more with checkpointing, and what failed does not count.
            self.optimizer.zero_grad(set_to_none=True)
            self.torch.cuda.empty_cache()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.enable_input_require_grads()
            began = self.now()
            self.train(sequences, length)
        train_s = self.now() - began
        return {"step_time": generate_s + train_s, "generate": generate_s, "train": train_s}

    def train(self, sequences, length):
        """Take an optimizer step on all sequences, with random advantages."""
        torch, model = self.torch, self.model
        model.train()
        advantages = torch.randn(len(sequences), 1, device=self.device)
        targets = sequences[:, -length:]
        for first in range(0, len(sequences), BATCH):
            part = slice(first, first + BATCH)
            logits = model(sequences[part, :-1], logits_to_keep=length).logits
            chosen = torch.gather(logits, 2, targets[part, :, None])[..., 0].float()
            logprobs = chosen - torch.stack([torch.logsumexp(row.float(), -1) for row in logits])
            # On policy, as in rlnumba: the ratio is 1, and its gradient that of the log-prob.
            ratio = torch.exp(logprobs - logprobs.detach())
            advantage = advantages[part]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (loss.sum() / (len(sequences) * length)).backward()
        torch.nn.utils.clip_grad_norm_((p for p in model.parameters() if p.requires_grad), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def now(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()
        return time.perf_counter()


class Trainer:
    """Steps of TRL's GRPOTrainer."""

    def __init__(self, cell, folder, options):
        self.cell, self.folder, self.options = cell, folder, options

    def steps(self):
        """{"step_time": [seconds]} of one step, after a short one; TRL's phases are not apart."""
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        cell, ends = self.cell, []
        on_gpu = torch.cuda.is_available() and self.options.device != "cpu"

        class Clock(TrainerCallback):
            def on_step_begin(self, arguments, state, *rest, **keys):
                length = SHORT if state.global_step == 0 else cell.length
                trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = length

            def on_step_end(self, *arguments, **keys):
                if on_gpu:
                    torch.cuda.synchronize()
                ends.append(time.perf_counter())

        lines = (self.folder / "prompts.jsonl").read_text().splitlines()
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "model", padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        config = GRPOConfig(
            output_dir=str(self.folder / "trl"), per_device_train_batch_size=BATCH, bf16=on_gpu, use_cpu=not on_gpu,
            gradient_accumulation_steps=cell.completions // BATCH, num_generations=cell.completions // cell.groups,
            max_completion_length=cell.length, generation_kwargs={"min_new_tokens": cell.length}, beta=0.0,
            learning_rate=1e-6, max_steps=2, save_strategy="no", report_to="none", gradient_checkpointing=True,
        )  # fmt: skip
        model, lora = new_model(cell._replace(tuned="all"), "cuda" if on_gpu else "cpu", torch.float32), None
        if cell.tuned == "lora":
            from peft import LoraConfig

            lora = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        rewards = np.random.default_rng(0)
        trainer = GRPOTrainer(
            model, lambda completions, **columns: rewards.random(len(completions)).tolist(), config,
            Dataset.from_list([json.loads(line) for line in lines]), processing_class=tokenizer, peft_config=lora,
            callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()
        return {"step_time": list(np.diff(ends))}
