"""Supervised fine-tuning: the loss is the mean over all trained tokens of an optimizer step.

    nll    loss = -sum lp / n          n: trained tokens of the whole step, known before its first micro-batch
    dft    loss = -sum [p] lp / n      [p]: the token's own probability, as a constant (arXiv 2508.05629)

A micro-batch is per_device_train_batch_size rows (a row is a sequence, or a pack of several) laid end to end without
padding: sequences do not see one another, so packing changes which tokens make up a step and nothing else.
"""

import math

import numpy as np

from rlnumba.data import load_sft
from rlnumba.kernels.gemm import ops as gemm
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.model.tokenizer import Tokenizer
from rlnumba.model.transformer import Tape, find_model, load_model, pack
from rlnumba.runtime import device
from rlnumba.runtime.memory import Arena
from rlnumba.trainers.common import (
    Clock,
    RunFolder,
    attention_of,
    epochs_done,
    head_backward,
    head_forward,
    head_with_gradient,
    make_optimizer,
    memory_metrics,
    rate_of,
    say,
    say_kernels,
)
from rlnumba.trainers.rollout import epoch_order


def run_sft(run, resume=False):
    """Train as an SFTRun says; writes its output_dir. resume: go on from the newest readable checkpoint there, or,
    if an int, from that of this step.

    Raises ConfigError and UserError, of one line each, for what a user can cause.
    """
    train = run.train
    gemm.set_backend(run.gemm)
    folder = RunFolder("sft", run, resume)
    source = find_model(run.model)
    model = load_model(folder.model_folder or source, train.dtype)
    say_kernels(model.dtype)
    tokenizer = Tokenizer.from_folder(source)
    rows = load_rows(run.data.train, run, model, tokenizer)
    held_out = load_rows(run.data.eval, run, model, tokenizer) if run.data.eval else None
    rows_per_step = train.per_device_train_batch_size * train.gradient_accumulation_steps
    steps_per_epoch = -(-len(rows) // rows_per_step)
    micro_batches = -(-len(rows) // train.per_device_train_batch_size)
    total_steps = train.max_steps if train.max_steps > 0 else math.ceil(train.num_train_epochs * steps_per_epoch)
    grads = model.weights.grads()
    optimizer = make_optimizer(model, grads, train)
    arena = Arena("activations")
    num_tokens = 0
    if folder.state is not None:
        optimizer.load_state_dict(folder.state["optimizer"])
        num_tokens = folder.state["num_tokens"]
    clock = Clock()
    with folder.writer(total_steps) as writer:
        for step in range(folder.step, total_steps):
            epoch, place = divmod(step, steps_per_epoch)
            order = epoch_order(len(rows), train.shuffle_dataset, run.seed, epoch)
            chosen = [rows[i] for i in order[place * rows_per_step : (place + 1) * rows_per_step]]
            with clock.phase("train"):
                metrics = train_step(model, grads, optimizer, chosen, train, rate_of(train, step, total_steps), arena)
            num_tokens += sum(len(sequence) for row in chosen for sequence in row)
            metrics["epoch"] = epochs_done(step + 1, train.gradient_accumulation_steps, micro_batches)
            metrics["num_tokens"] = num_tokens
            last = step + 1 == total_steps
            if held_out and (last or (train.eval_steps and (step + 1) % train.eval_steps == 0)):
                with clock.phase("eval"):
                    metrics |= evaluate(model, held_out, train, arena)
            metrics |= clock.read()
            metrics["perf/throughput"] = metrics.pop("step_tokens") / metrics["time/train"]
            writer.log(step + 1, metrics | memory_metrics())
            if last or (step + 1) % train.save_steps == 0:
                with clock.phase("save"):
                    state = {"optimizer": optimizer.state_dict(), "num_tokens": num_tokens}
                    folder.save(step + 1, model, tokenizer, state)
        folder.finish(model, tokenizer)
    say(f"{folder.path} has the curves (curves.png) and the model (final)")


def load_rows(path, run, model, tokenizer):
    """The rows of a file, lists of TokenSequence, none without a trained token; says what was cut or dropped."""
    limit, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    data = load_sft(path, run.data, run.train, tokenizer, limit, vocab_size, model.config.eos_token_ids)
    cut, dropped = data.counts["truncated_rows"], data.counts["dropped_rows"]
    if cut or dropped:
        say(f"{path}: {cut} rows lost their end to max_length, {dropped} have no token to train on and are left out")
    return data.rows


def train_step(model, grads, optimizer, rows, train, learning_rate, arena):
    """One optimizer step on `rows`: metrics by name, and step_tokens.

    rows: lists of TokenSequence, per_device_train_batch_size of them a micro-batch, the last one shorter. Writes the
    gradients, the weights and the optimizer's state.
    """
    targets = sum(sequence.num_trained for row in rows for sequence in row)
    optimizer.zero_grad()
    sums = Sums(targets)
    for first in range(0, len(rows), train.per_device_train_batch_size):
        sequences = [s for row in rows[first : first + train.per_device_train_batch_size] for s in row]
        with arena.scope():
            batch, chosen, target_ids = device_targets(sequences)
            tape = Tape(train.gradient_checkpointing)
            hidden = model.forward(batch.input_ids, batch.position_ids, attention_of(model, batch, arena), tape, arena)
            found = logprobs, _, _ = sums.take(target_ids)
            dlogprobs = arena.empty(logprobs.shape, np.float32)
            if train.loss_type == "dft":
                head = head_forward(model, hidden, chosen, target_ids, 1.0, arena, *found)
                device.xp().exp(logprobs, out=dlogprobs)
                dlogprobs *= np.float32(-1.0 / targets)
                dhidden = head_backward(model, head, dlogprobs, hidden.shape[0], grads, arena)
            else:
                fill(-1.0 / targets, dlogprobs)
                dhidden = head_with_gradient(
                    model, hidden, chosen, target_ids, 1.0, dlogprobs, grads, arena, *found, accumulate=first > 0
                )
            model.backward(dhidden, tape, grads)
    info = optimizer.step(learning_rate)
    metrics = sums.means(train.loss_type)
    metrics |= {"grad_norm": info.grad_norm, "learning_rate": learning_rate}
    metrics["step_tokens"] = sum(len(sequence) for row in rows for sequence in row)
    if optimizer.skipped_steps:
        metrics["skipped_steps"] = optimizer.skipped_steps
    return metrics


def evaluate(model, rows, train, arena):
    """The loss and the token accuracy on held-out rows: {"eval_loss": ..., "eval_mean_token_accuracy": ..., ...}."""
    sums = Sums(sum(sequence.num_trained for row in rows for sequence in row))
    for first in range(0, len(rows), train.per_device_train_batch_size):
        sequences = [s for row in rows[first : first + train.per_device_train_batch_size] for s in row]
        with arena.scope():
            batch, chosen, target_ids = device_targets(sequences)
            hidden = model.forward(batch.input_ids, batch.position_ids, attention_of(model, batch, arena), arena=arena)
            head_forward(model, hidden, chosen, target_ids, 1.0, arena, *sums.take(target_ids))
    return {f"eval_{name}": value for name, value in sums.means(train.loss_type).items()}


def device_targets(sequences):
    """The packed Batch of TokenSequences, and what is trained on: (batch, rows (T,) i32, target_ids (T,) i32)."""
    batch = pack([sequence.input_ids for sequence in sequences])
    ids = np.concatenate([sequence.input_ids for sequence in sequences])
    trained = np.concatenate([sequence.loss_mask for sequence in sequences])
    trained[np.cumsum([0] + batch.lengths[:-1])] = False
    places = np.flatnonzero(trained)
    return batch, device.asarray((places - 1).astype(np.int32)), device.asarray(ids[places])


class Sums:
    """Log-probs, entropies and hits of all targets of a step, kept on the device until the step is done."""

    def __init__(self, count):
        xp = device.xp()
        self.logprobs, self.entropy = xp.empty(count, np.float32), xp.empty(count, np.float32)
        self.top1, self.target_ids = xp.empty(count, np.int32), xp.empty(count, np.int32)
        self.taken = 0

    def take(self, target_ids):
        """Room for the next micro-batch's targets (T,) i32: logprobs, entropy, top1."""
        part = slice(self.taken, self.taken + target_ids.shape[0])
        self.taken = part.stop
        self.target_ids[part] = target_ids
        return self.logprobs[part], self.entropy[part], self.top1[part]

    def means(self, loss_type):
        """{"loss": ..., "entropy": ..., "mean_token_accuracy": ...} over all targets; waits for the device."""
        logprobs = device.to_host(self.logprobs).astype(np.float64)
        weights = np.exp(logprobs) if loss_type == "dft" else 1.0
        hits = device.to_host(self.top1) == device.to_host(self.target_ids)
        return {
            "loss": float(-(weights * logprobs).mean()),
            "entropy": float(device.to_host(self.entropy).mean(dtype=np.float64)),
            "mean_token_accuracy": float(hits.mean()),
        }
