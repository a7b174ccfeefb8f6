"""Supervised fine-tuning: the loss is the mean over all trained tokens of an optimizer step.

    nll    loss = -sum lp / n          n: trained tokens of the whole step, known before its first micro-batch
    dft    loss = -sum [p] lp / n      [p]: the token's own probability, as a constant (arXiv 2508.05629)

A micro-batch is per_device_train_batch_size rows (a row is a sequence, or a pack of several) laid end to end without
padding: sequences do not attend to one another, so packing changes which tokens make up a step and nothing else.
"""

import numpy as np

from rlnumba.data import load_sft
from rlnumba.kernels.nn.elementwise import fill
from rlnumba.runtime import device
from rlnumba.trainers.core import TargetBatch
from rlnumba.trainers.loading import load_policy
from rlnumba.trainers.row_loop import micro_batches_of, train_on_rows
from rlnumba.trainers.run_folder import begin_run, log


def run_sft(run, resume=False):
    """Train an SFTRun; writes its output_dir.

    resume: True to continue from the newest readable checkpoint there, an int from that of this step.
    """
    folder = begin_run("sft", run, resume)
    policy, tokenizer = load_policy(run, folder)
    rows = load_rows(run.data.train, run, policy.model, tokenizer)
    eval_rows = load_rows(run.data.eval, run, policy.model, tokenizer, for_eval=True) if run.data.eval else None
    train_on_rows(folder, policy, tokenizer, rows, eval_rows, train_step, evaluate, num_tokens)


def num_tokens(row):
    """The tokens of a row's sequences: int."""
    return sum(map(len, row))


def load_rows(path, run, model, tokenizer, for_eval=False):
    """The rows of a file, lists of TokenSequence, none without a trained token; logs what was cut or dropped."""
    limit, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    data = load_sft(path, run.data, run.train, tokenizer, limit, vocab_size, model.config.eos_token_ids, for_eval)
    cut, dropped = data.counts["truncated_rows"], data.counts["dropped_rows"]
    if cut or dropped:
        log(f"{path}: {cut} rows lost their end to max_length, {dropped} have no token to train on and are left out")
    return data.rows


def train_step(policy, rows, learning_rate):
    """One optimizer step on `rows`: metrics by name. Writes the gradients, the weights and the optimizer's state.

    rows: lists of TokenSequence, per_device_train_batch_size of them a micro-batch, the last one shorter.
    """
    sums = TargetSums(rows)
    policy.zero_grad(learning_rate)
    for part in micro_batches_of(rows, policy.train):
        with policy.scope():
            batch = target_batch(sequences_of(part))
            outputs = logprobs, _, _ = sums.next(batch.target_ids)
            dlogprobs = policy.arena.empty(logprobs.shape, np.float32)
            if policy.train.loss_type == "dft":
                forward = policy.forward(batch, *outputs)
                device.xp().exp(logprobs, out=dlogprobs)
                dlogprobs *= np.float32(-1.0 / sums.count)
                policy.backward(forward, dlogprobs)
            else:
                fill(-1.0 / sums.count, dlogprobs)
                policy.forward_backward(batch, dlogprobs, *outputs)
    info = policy.step(learning_rate)
    return sums.means(policy.train.loss_type) | info


def evaluate(policy, rows):
    """Metrics of held-out rows: {"loss": ..., "mean_token_accuracy": ..., ...}."""
    sums = TargetSums(rows)
    for part in micro_batches_of(rows, policy.train):
        batch = target_batch(sequences_of(part))
        policy.logprobs(batch, *sums.next(batch.target_ids))
    return sums.means(policy.train.loss_type)


def sequences_of(rows):
    """The TokenSequences of rows, one list."""
    return [sequence for row in rows for sequence in row]


def target_batch(sequences):
    """The TargetBatch of TokenSequences: every trained token but the first of a sequence, which nothing predicts."""
    lengths = [len(sequence) for sequence in sequences]
    token_ids = np.concatenate([sequence.input_ids for sequence in sequences])
    trained = np.concatenate([sequence.loss_mask for sequence in sequences])
    trained[np.cumsum([0] + lengths[:-1])] = False
    return TargetBatch.of(token_ids, lengths, np.flatnonzero(trained))


class TargetSums:
    """Log-probs, entropies and top-1 ids of all targets of the rows, kept on the device until the step is done."""

    def __init__(self, rows):
        self.count = sum(sequence.num_trained for row in rows for sequence in row)
        self.logprobs, self.entropy = device.xp().empty((2, self.count), np.float32)
        self.top1, self.target_ids = device.xp().empty((2, self.count), np.int32)
        self.used = 0

    def next(self, target_ids):
        """The outputs of the next micro-batch's targets (T,) i32, to be written: logprobs, entropy, top1."""
        part = slice(self.used, self.used + target_ids.shape[0])
        self.used = part.stop
        self.target_ids[part] = target_ids
        return self.logprobs[part], self.entropy[part], self.top1[part]

    def means(self, loss_type):
        """{"loss": ..., "entropy": ..., "mean_token_accuracy": ...} over all targets; synchronises with the device."""
        logprobs = device.to_host(self.logprobs).astype(np.float64)
        weights = np.exp(logprobs) if loss_type == "dft" else 1.0
        hits = device.to_host(self.top1) == device.to_host(self.target_ids)
        return {
            "loss": float(-(weights * logprobs).mean()),
            "entropy": float(device.to_host(self.entropy).mean(dtype=np.float64)),
            "mean_token_accuracy": float(hits.mean()),
        }
