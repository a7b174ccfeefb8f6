"""What the trainers share: the run's folder and its resumption, a clock by phase, and the head's two halves."""

import math
import os
import shutil
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlnumba import checkpoint
from rlnumba.errors import UserError
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.logprob.ops import linear_logp, linear_logp_backward, linear_logp_with_gradient
from rlnumba.kernels.nn.elementwise import fill, gather_rows, scatter_rows
from rlnumba.model.layers import PackedAttention
from rlnumba.model.transformer import save_model
from rlnumba.optim import Optimizer, learning_rate_at
from rlnumba.reporting.files import make_folder, write_config
from rlnumba.reporting.metrics import MetricsWriter
from rlnumba.runtime import device, dispatch, memory
from rlnumba.runtime.environment import environment

# What a run leaves in its folder.
WRITTEN = (
    *("config.toml", "metrics.jsonl", "completions.jsonl", "completions"),
    *("checkpoints", "final", "curves.png", "tensorboard"),
)


class RunFolder:
    """A run's output_dir: finds the checkpoint to go on from, writes metrics, checkpoints and the final model.

    trainer: "sft", "grpo"; resume: True to go on from the newest readable checkpoint, where there is none the run
    starts afresh and says so; an int to go on from the checkpoint of this step. model_folder: that checkpoint's folder,
    or None. state: its trainer state, or None. step: optimizer steps done. Raises UserError if the folder cannot be
    written to, holds checkpoints of which none is readable, not that of the step, or those of another trainer.
    """

    def __init__(self, trainer, run, resume):
        self.trainer, self.run, self.path = trainer, run, Path(run.output_dir)
        make_folder(self.path)
        self.model_folder, self.step_chosen = None, resume is not True and bool(resume)
        if self.step_chosen:
            self.model_folder = checkpoint.of_step(self.path, resume)
        elif resume:
            self.model_folder = checkpoint.latest_readable(self.path)
        self.step, self.state = 0, None
        if self.model_folder is not None:
            found = checkpoint.load(self.model_folder)
            self.step, self.state = found.step, found.trainer_state
            if self.state["trainer"] != trainer:
                raise UserError(f"{self.model_folder}: a checkpoint of {self.state['trainer']}, not of {trainer}")
        elif resume:
            say(f"{self.path} holds no checkpoint: starting afresh")

    def writer(self, total_steps):
        """The run's MetricsWriter. Called when all input has been found good: from here on the folder changes."""
        if self.model_folder is None:
            self._set_aside()
        elif self.step_chosen:
            self._set_later_aside()
        write_config(self.run, environment())
        train = self.run.train
        return MetricsWriter(
            self.path,
            total_steps,
            self.step,
            train.logging_steps,
            train.log_completions,
            train.num_completions_to_print,
        )

    def _set_aside(self):
        """Move what an earlier run left here to earlier-N, so that nothing of it is lost or taken for the new run's."""
        left = [name for name in WRITTEN if (self.path / name).exists()]
        if not any(name in left for name in ("metrics.jsonl", "checkpoints", "final")):
            return
        target = self._new_place()
        for name in left:
            os.rename(self.path / name, target / name)
        say(f"{self.path} held an earlier run, which is now in {target}; --resume is what goes on with a run")

    def _set_later_aside(self):
        """Move newer checkpoints than the one that was chosen, and the final model, and copy what tells of them.

        Else the next --resume would take one of theirs for the newest, and their lines of metrics would be lost.
        """
        there = checkpoint.existing(self.path)
        later = there[: there.index(self.model_folder)]
        if not later:
            return
        target = self._new_place()
        (target / "checkpoints").mkdir()
        for name in ("metrics.jsonl", "completions.jsonl"):
            if (self.path / name).exists():
                shutil.copy(self.path / name, target / name)
        if (self.path / "completions").exists():
            shutil.copytree(self.path / "completions", target / "completions")
        for path in later:
            os.rename(path, target / "checkpoints" / path.name)
        if (self.path / "final").exists():
            os.rename(self.path / "final", target / "final")
        say(f"{self.path}: what came after step {self.step} is now in {target}")

    def _new_place(self):
        """A new folder earlier-N."""
        number = 1
        while (self.path / f"earlier-{number}").exists():
            number += 1
        target = self.path / f"earlier-{number}"
        target.mkdir()
        return target

    def save(self, step, model, tokenizer, state):
        """Write checkpoints/step-N, unless it is there: a step's state is always the same."""
        if step == self.step and self.model_folder is not None:
            return
        state = {"trainer": self.trainer, **state}
        keep_last = self.run.train.save_total_limit
        self.model_folder = checkpoint.save(self.path, step, model, tokenizer, state, keep_last)
        self.step = step

    def finish(self, model, tokenizer):
        """Write final/, a Hugging Face folder."""
        try:
            save_model(model, self.path / "final", tokenizer)
        except OSError as error:
            raise UserError(f"{self.path / 'final'}: cannot be written: {error.strerror}") from error


def say(text):
    """A line for the person at the console."""
    print(f"rlnumba: {text}", file=sys.stderr, flush=True)


def say_kernels(dtype):
    """On a GPU, say which kernels compute a model of this dtype."""
    if device.name() == "cuda":
        attention, logprob = dispatch.describe("attention"), dispatch.describe("logprob")
        say(f"products: {gemm.describe(dtype)}; attention: {attention}; log-probs: {logprob}")


class Clock:
    """Wall-clock seconds by phase of a step; phases end when the device has done their work."""

    def __init__(self):
        self.started = time.perf_counter()
        self.seconds = defaultdict(float)

    @contextmanager
    def phase(self, name):
        """Add the time of the block to time/<name>."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            device.synchronize()
            self.seconds[f"time/{name}"] += time.perf_counter() - begin

    def read(self):
        """{"step_time": s, "time/<phase>": s, ...} since the last read, which starts the next step."""
        now = time.perf_counter()
        read = {"step_time": now - self.started, **self.seconds}
        self.started, self.seconds = now, defaultdict(float)
        return read


def memory_metrics():
    """{"memory/<region>": peak bytes held at one time} of every region, and their sum as perf/peak_memory."""
    peaks = memory.report()
    return {f"memory/{region}": nbytes for region, nbytes in peaks.items()} | {"perf/peak_memory": sum(peaks.values())}


def make_optimizer(model, grads, train):
    """The AdamW of a [train] section."""
    return Optimizer(
        model.weights,
        grads,
        beta1=train.adam_beta1,
        beta2=train.adam_beta2,
        epsilon=train.adam_epsilon,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
    )


def rate_of(train, step, total_steps):
    """The learning rate of the optimizer step after `step` done ones."""
    warmup_steps = train.warmup_steps
    return learning_rate_at(
        step,
        base=train.learning_rate,
        schedule=train.lr_scheduler_type,
        warmup_steps=int(warmup_steps) if warmup_steps >= 1 else math.ceil(warmup_steps * total_steps),
        total_steps=total_steps,
    )


def epochs_done(step, gradient_accumulation_steps, micro_steps_per_epoch):
    """The epochs that `step` optimizer steps make, the last step of an epoch being shorter: float. As transformers."""
    steps_per_epoch = -(-micro_steps_per_epoch // gradient_accumulation_steps)
    epochs, place = divmod(step, steps_per_epoch)
    return epochs + place * gradient_accumulation_steps / micro_steps_per_epoch


def attention_of(model, batch, arena):
    """The causal attention of a packed batch, for training or scoring."""
    return PackedAttention(batch.cu_seqlens, batch.max_seqlen, model.config.scale, arena)


@dataclass
class Head:
    """The rows of a forward that predict a target, on their way through the language-model head.

    rows (T,) i32: which of the N hidden states; target_ids (T,) i32; hidden (T, D); lse (T,) f32.
    """

    rows: object
    target_ids: object
    temperature: float
    hidden: object
    lse: object


def head_forward(model, hidden, rows, target_ids, temperature, arena, logprobs, entropy=None, top1=None):
    """Log-probs of the targets from the hidden states (N, D) of a forward: the Head for `head_backward`.

    rows, target_ids (T,) i32. logprobs, entropy (T,) f32 and top1 (T,) i32 are written. The other N - T hidden states
    never meet the (V, D) head.
    """
    chosen = arena.empty((rows.shape[0], hidden.shape[1]), hidden.dtype)
    lse = arena.empty((rows.shape[0],), np.float32)
    gather_rows(hidden, rows, chosen)
    linear_logp(chosen, model.lm_head, target_ids, temperature, logprobs, lse, entropy, top1)
    return Head(rows, target_ids, temperature, chosen, lse)


def head_backward(model, head, dlogprobs, num_tokens, grads, arena):
    """dhidden (N, D) from dlogprobs (T,) f32; the head's own gradient is added to grads."""
    dchosen = arena.empty(head.hidden.shape, head.hidden.dtype)
    linear_logp_backward(
        head.hidden, model.lm_head, head.target_ids, head.temperature, head.lse, dlogprobs, dchosen, grads.lm_head
    )
    return _scattered(dchosen, head.rows, num_tokens, arena)


def head_with_gradient(
    model, hidden, rows, target_ids, temperature, dlogprobs, grads, arena, logprobs,
    entropy=None, top1=None, accumulate=True,
):  # fmt: skip
    """head_forward and head_backward at once, for dlogprobs (T,) f32 known beforehand: dhidden (N, D).

    Fewer products than the two where the kernels offer it (kernels/logprob/ops.py), the same bits where they do not.
    accumulate: whether the head's own gradient is added to; where it is still zero, to write it is faster.
    """
    chosen, dchosen = (arena.empty((rows.shape[0], hidden.shape[1]), hidden.dtype) for _ in range(2))
    lse = arena.empty((rows.shape[0],), np.float32)
    gather_rows(hidden, rows, chosen)
    linear_logp_with_gradient(
        chosen,
        model.lm_head,
        target_ids,
        temperature,
        dlogprobs,
        logprobs,
        lse,
        dchosen,
        grads.lm_head,
        entropy,
        top1,
        accumulate,
    )
    return _scattered(dchosen, rows, hidden.shape[0], arena)


def _scattered(values, rows, count, arena):
    """(count, D): row rows[i] is values[i], the others are 0."""
    spread = arena.empty((count, values.shape[1]), values.dtype)
    fill(0.0, spread)
    scatter_rows(values, rows, spread)
    return spread


def target_logprobs(model, batch, rows, target_ids, temperature, arena):
    """(T,) float32 on the device: a forward without a tape, for the log-probs of targets under another policy."""
    logprobs = device.xp().empty(rows.shape[0], np.float32)
    with arena.scope():
        hidden = model.forward(batch.input_ids, batch.position_ids, attention_of(model, batch, arena), arena=arena)
        head_forward(model, hidden, rows, target_ids, temperature, arena, logprobs)
    return logprobs
