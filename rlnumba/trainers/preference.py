"""Parts of both DPO and KTO: packed completions, the optimizer step, log-probs of the reference, metrics of tokens."""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlnumba.kernels.nn.reduce import column_sums
from rlnumba.kernels.rl.preference_loss import sequence_logps
from rlnumba.reporting.files import replacing
from rlnumba.reporting.stderr import log
from rlnumba.runs.loading import load_policy
from rlnumba.runs.micro_batch import TargetBatch
from rlnumba.runs.policy import LateMetrics
from rlnumba.runtime import device
from rlnumba.trainers.sft import target_batch

# The file in which a run keeps the log-probs of precompute_ref_log_probs.
REFERENCE_FILE = "reference_logps.json"


def load_with_reference(run, folder):
    """(Policy, Tokenizer) of a run, the policy with its reference."""
    return load_policy(run, folder, reference=True)


@dataclass(frozen=True)
class CompletionBatch:
    """Completions after their prompts, on the device; cu_seqlens (S + 1,) i32 delimits their targets.

    num_chosen: targets of the first completions, those that are chosen or desirable.
    """

    targets: TargetBatch
    cu_seqlens: object
    num_chosen: int

    @staticmethod
    def of(chosen, rejected, sharing=None):
        """From lists of TokenSequences, trained on their completions: the chosen ones come first.

        sharing: the PrefixRule of all models that the batch goes through, or None.
        """
        counts = [sequence.num_trained for sequence in [*chosen, *rejected]]
        cu_seqlens = device.asarray(np.cumsum([0, *counts]).astype(np.int32))
        targets = target_batch([*chosen, *rejected], sharing)
        return CompletionBatch(targets, cu_seqlens, sum(counts[: len(chosen)]))

    @property
    def num_targets(self):
        return self.targets.target_ids.shape[0]

    def logps(self, policy, model, ld_alpha=None):
        """(S,) f32 on the device, from the policy's arena: the sums of the completions' log-probs under a model."""
        logprobs = policy.arena.empty((self.num_targets,), np.float32)
        logps = policy.arena.empty((self.cu_seqlens.shape[0] - 1,), np.float32)
        policy.logprobs(self.targets, logprobs, model=model)
        sequence_logps(logprobs, self.cu_seqlens, logps, ld_alpha)
        return logps


def optimizer_step(loss, learning_rate):
    """One optimizer step on the rows of a StepLoss, dpo's or kto's: LateMetrics."""
    policy = loss.policy
    policy.zero_grad(learning_rate)
    before = [] if policy.reference is None else [policy.reference]
    for part in policy.each_micro_batch(loss.micro_batches(), models_before=lambda of_round: before):
        with policy.scope():
            # ids -> log-probs -> loss -> gradients
            forward, dlogprobs = loss.forward(part)
            policy.backward(forward, dlogprobs)
    info = policy.step(learning_rate)

    def read():
        return policy.router.added(loss.metrics(policy.of_all_micro_batches(loss.read())) | info)

    return LateMetrics(read)


def evaluation(loss):
    """The metrics of the rows of a StepLoss, by name, without a gradient."""
    policy = loss.policy
    parts = loss.micro_batches()
    for part in policy.own(parts):
        with policy.scope(), policy.evaluating():
            loss.forward(part)
    return loss.metrics(policy.of_all_micro_batches(loss.read(), len(parts)))


class TokenResults(NamedTuple):
    """Results of a micro-batch's T targets, on the device or the host: entropy (T,) f32, top1 and target_ids (T,) i32.

    hidden_sums (2, D) f32: sums of the hidden states that predict the targets of chosen completions, the first
    num_chosen, and of those that predict the others.
    """

    entropy: object
    top1: object
    target_ids: object
    hidden_sums: object
    num_chosen: int

    def to_host(self):
        """These in host memory."""
        return TokenResults(*map(device.to_host, self[:4]), self.num_chosen)


class TokenMetrics:
    """Entropy, accuracy and mean logits of all targets of an optimizer step, on the device until the step is done.

    The mean over the vocabulary of a position's logits is its hidden state times the mean row of the language-model
    head, so that sums of hidden states are all that is kept. parts: TokenResults of the micro-batches so far.
    """

    def __init__(self, model):
        self.parts = []
        self.vocab_size, hidden_size = model.lm_head.shape
        self.head_sum = device.xp().zeros(hidden_size, np.float32)
        column_sums(model.lm_head, self.head_sum)

    def next(self, batch):
        """The outputs of the next CompletionBatch's targets, to be written: entropy (T,) f32, top1 (T,) i32."""
        xp, shape = device.xp(), (batch.num_targets,)
        entropy, top1 = xp.empty(shape, np.float32), xp.empty(shape, np.int32)
        sums = xp.zeros((2, len(self.head_sum)), np.float32)
        self.parts.append(TokenResults(entropy, top1, batch.targets.target_ids, sums, batch.num_chosen))
        return entropy, top1

    def add_hidden(self, batch, hidden):
        """hidden (T, D): the hidden states that predict the targets of that CompletionBatch."""
        sides = hidden[: batch.num_chosen], hidden[batch.num_chosen :]
        for side, total in zip(sides, self.parts[-1].hidden_sums, strict=True):
            column_sums(side, total)

    def means(self, parts):
        """{"entropy": ..., "mean_token_accuracy": ..., "logits/chosen": ..., "logits/rejected": ...}, dict of float.

        parts: TokenResults on the host, of all micro-batches. The accuracy is that of chosen completions. Absent is
        what has no target.
        """
        entropy = np.concatenate([part.entropy for part in parts])
        found = {"entropy": float(entropy.mean(dtype=np.float64))} if len(entropy) else {}
        hits = np.concatenate([(part.top1 == part.target_ids)[: part.num_chosen] for part in parts])
        if len(hits):
            found["mean_token_accuracy"] = float(hits.mean())
        head_mean = device.to_host(self.head_sum).astype(np.float64) / self.vocab_size
        sums = np.sum([part.hidden_sums for part in parts], axis=0, dtype=np.float64) @ head_mean
        for name, total, count in zip(("chosen", "rejected"), sums, (len(hits), len(entropy) - len(hits)), strict=True):
            if count:
                found[f"logits/{name}"] = float(total / count)
        return found


def sequences_key(sequences):
    """A hash of the content of TokenSequences: str."""
    found = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        found.update(np.int64(len(sequence)).tobytes() + sequence.input_ids.tobytes() + sequence.loss_mask.tobytes())
    return found.hexdigest()


def stored_reference_logps(folder, policy, datasets, batch_of, size, ld_alpha=None):
    """{name: (rows, n) float32} of the reference's log-probs of datasets, {name: list of rows}, for precompute.

    A run that goes on finds those of each row in its file, if they are of this reference; what it lacks is computed,
    `size` rows at a time, and written. folder: RunFolder. batch_of(rows, sharing): CompletionBatch of a list of rows,
    whose (n * len(rows),) log-probs have the rows last. Raises UserError if the file cannot be written.
    """
    path = Path(folder.path) / REFERENCE_FILE
    # The hash of the weights is the one that rank 0 has of the run's model.
    reference = folder.decided(folder.digest["inputs"]["model"] if folder.is_first_rank else None)
    reference = hashlib.sha256(f"{reference} {policy.reference.dtype.name} {ld_alpha!r}".encode()).hexdigest()
    known = {}
    if folder.state is not None:
        stored = folder.decided(read_reference_file(path) if folder.is_first_rank else {})
        known = stored.get("rows", {}) if stored.get("reference") == reference else {}
        if not known:
            log(f"{path} does not have this reference's log-probs: computing them again")
    keys = {name: [sequences_key(row.sequences) for row in rows] for name, rows in datasets.items()}
    before = len(known)
    for name, rows in datasets.items():
        lacking = {key: row for key, row in zip(keys[name], rows, strict=True) if key not in known}
        found = _reference_logps(policy, list(lacking.values()), batch_of, size, ld_alpha, name)
        known |= dict(zip(lacking, found, strict=True))
    if folder.is_first_rank and len(known) > before:
        with replacing(path) as file:
            json.dump({"reference": reference, "rows": known}, file)
    return {name: np.array([known[key] for key in keys[name]], np.float32) for name in datasets}


def _reference_logps(policy, rows, batch_of, size, ld_alpha, name):
    """The n log-probs of each row under the reference: a list of lists of float. name: the rows', for messages."""
    parts, reported = [], time.monotonic()
    every = range(0, len(rows), size)
    firsts, sharing = policy.own(every), policy.prefix_sharing(policy.reference)
    for first in firsts:
        with policy.context.use(), policy.scope():
            batch = batch_of(rows[first : first + size], sharing)
            logps = device.to_host(batch.logps(policy, policy.reference, ld_alpha))
        parts.append(logps.reshape(-1, len(rows[first : first + size])).T)
        if first == firsts[-1] or time.monotonic() - reported > 10:
            log(f"log-probs of the reference: {min(first + size, len(rows))} of {len(rows)} {name}")
            reported = time.monotonic()
    return [logps.tolist() for part in policy.of_all_micro_batches(parts, len(every)) for logps in part]


def read_reference_file(path):
    """The contents of the file of stored_reference_logps: dict, empty if there is no readable file."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}
