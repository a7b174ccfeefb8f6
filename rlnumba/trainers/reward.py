"""Reward models: of two completions of a prompt the chosen one shall have the higher reward.

    loss = mean over the pairs of an optimizer step of  -log sigmoid(r_chosen - r_rejected - margin)
           + center_rewards_coefficient (r_chosen + r_rejected)^2

r is the score head's output at the last token of prompt and completion (model/sequence_score.py). Both sides of a
micro-batch's pairs are one packed forward: first the chosen sequences, then the rejected ones.
"""

from dataclasses import replace

import numpy as np

from rlnumba.data.pairs import load_pairs
from rlnumba.kernels.rl.reward_loss import reward_loss
from rlnumba.model.config import SCORE_HEAD
from rlnumba.model.sequence_score import score_rows
from rlnumba.runtime import device
from rlnumba.trainers.core import LateMetrics
from rlnumba.trainers.loading import load_policy
from rlnumba.trainers.micro_batch import TargetBatch
from rlnumba.trainers.row_loop import micro_batches_of, train_on_rows
from rlnumba.trainers.run_folder import begin_run, log


def run_reward(run, resume=False):
    """Train a RewardRun; writes its output_dir.

    resume: True to continue from the newest readable checkpoint there, an int from that of this step.
    """
    folder = begin_run("reward", run, resume)
    policy, tokenizer = load_policy(run, folder, heads=SCORE_HEAD, head_init=run.train.head_init)
    rows = load_rows(run.data.train, run, policy.model, tokenizer)
    eval_rows = load_rows(run.data.eval, run, policy.model, tokenizer, for_eval=True) if run.data.eval else None
    set_pad_token(policy.model, tokenizer)
    train_on_rows(folder, policy, tokenizer, rows, eval_rows, train_step, evaluate, num_tokens)


def set_pad_token(model, tokenizer):
    """Give a model the tokenizer's padding token, else its EOS, as TRL: it is how a sequence's last token is found."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is not None:
        model.config = replace(model.config, pad_token_id=pad)


def num_tokens(pair):
    """The tokens of a pair's sequences: int."""
    return pair.num_tokens


def load_rows(path, run, model, tokenizer, for_eval=False):
    """The PreferencePairs of a file; logs how many are left out. Raises UserError."""
    limits = model.config.max_position_embeddings, model.config.vocab_size, model.config.eos_token_ids
    found = load_pairs(path, run.data, run.train, tokenizer, *limits, too_long="drop", for_eval=for_eval)
    if dropped := found.counts["dropped_rows"]:
        log(f"{path}: {dropped} of {found.counts['rows']} pairs are longer than max_length and left out")
    return found.rows


def train_step(policy, rows, learning_rate):
    """One optimizer step on PreferencePairs: LateMetrics. Writes gradients, weights and optimizer state."""
    scores = PairScores(rows, policy.train.center_rewards_coefficient)
    policy.zero_grad(learning_rate)
    for pairs in micro_batches_of(rows, policy.train):
        with policy.scope():
            rewards, drewards = policy.arena.empty((2, 2 * len(pairs)), np.float32)
            forward = policy.forward_values(value_batch(pairs, policy.model.config), rewards)
            scores.loss(rewards, drewards)
            policy.backward_values(forward, drewards)
    info = policy.step(learning_rate)
    return LateMetrics(lambda: scores.metrics() | info)


def evaluate(policy, rows):
    """Metrics of held-out pairs: {"loss": ..., "accuracy": ...}."""
    scores = PairScores(rows, policy.train.center_rewards_coefficient)
    for pairs in micro_batches_of(rows, policy.train):
        rewards, drewards = device.xp().empty((2, 2 * len(pairs)), np.float32)
        policy.values(value_batch(pairs, policy.model.config), rewards)
        scores.loss(rewards, drewards)
    return scores.metrics()


def value_batch(pairs, config):
    """The TargetBatch of pairs' sequences, chosen ones first, for the value of each."""
    sequences = [pair.prompt_ids + pair.chosen_ids for pair in pairs]
    sequences += [pair.prompt_ids + pair.rejected_ids for pair in pairs]
    token_ids = np.concatenate([np.array(ids, np.int32) for ids in sequences])
    return TargetBatch.of_values(token_ids, list(map(len, sequences)), score_rows(sequences, config.pad_token_id))


class PairScores:
    """Rewards and losses of all pairs of a step, kept on the device until it is done.

    rows: PreferencePairs; centering: center_rewards_coefficient or None.
    """

    def __init__(self, rows, centering):
        self.count, self.used, self.centering = len(rows), 0, centering or 0.0
        self.margins = device.asarray(np.array([pair.margin or 0.0 for pair in rows], np.float32))
        self.chosen, self.rejected, self.losses = device.xp().empty((3, self.count), np.float32)

    def loss(self, rewards, drewards):
        """Write drewards (2 P,) f32, the derivative of the step's loss by rewards (2 P,) of the next P pairs."""
        size = rewards.shape[0] // 2
        part = slice(self.used, self.used + size)
        self.used = part.stop
        self.chosen[part], self.rejected[part] = rewards[:size], rewards[size:]
        reward_loss(
            rewards[:size], rewards[size:], self.margins[part], self.centering, 1.0 / self.count,
            self.losses[part], drewards[:size], drewards[size:],
        )  # fmt: skip

    def metrics(self):
        """TRL's metrics over all pairs; synchronises with the device."""
        chosen, rejected, losses = (
            device.to_host(array).astype(np.float64) for array in (self.chosen, self.rejected, self.losses)
        )
        both = np.concatenate([chosen, rejected])
        return {
            "loss": float(losses.mean()),
            "accuracy": float((chosen > rejected).mean()),
            "margin": float((chosen - rejected).mean()),
            "min_reward": float(both.min()),
            "mean_reward": float(both.mean()),
            "max_reward": float(both.max()),
        }
