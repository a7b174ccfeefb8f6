"""A buffer of past groups whose rewards differed, which take the place of groups that teach nothing.

    score    of a group: the standard deviation of its rewards times the sum of |A|; the buffer keeps the
             replay_buffer_size groups of highest score, of two with one score the older
    replay   a group of equal rewards is replaced by one of the buffer, drawn without replacement and in proportion to
             the scores, before the generation's own groups enter; without any there, it stays

A group keeps its tokens, its advantages and the log-probs that it was sampled with, so that the importance ratio of the
loss, which is clipped, corrects for the weights' change since. If these are not the policy's own (see
grpo.sampler_is_exact), the old log-probs are computed anew, and the correction between the two is that of
vllm_importance_sampling_correction or rollout_is.

Source: TRL's GRPOWithReplayBufferTrainer, which draws after adding, and with replacement where there are too few.
"""

from dataclasses import dataclass

import numpy as np

from rlnumba.sampling.samples import is_uniform
from rlnumba.trainers.rollout import Rollouts


@dataclass(frozen=True)
class Entry:
    """A group in the buffer: its Rollouts, its score, and the optimizer steps done when it was generated."""

    rollouts: Rollouts
    score: float
    step: int


class ReplayBuffer:
    """The groups of highest score, at most `size`, the highest first. metrics: the last `replay`'s."""

    def __init__(self, size):
        self.size, self.entries, self.metrics = size, [], {}

    def replay(self, groups, train, step, seed):
        """The Rollouts of groups of Samples with advantages, in their order, one each; the groups enter the buffer.

        Those of equal rewards are replaced as far as there are others. step: optimizer steps done; seed: draws them.
        """
        found = [Rollouts.of(group, train.mask_truncated_completions) for group in groups]
        uniform = [is_uniform(group, train) for group in groups]
        drawn = self._draw(sum(uniform), seed)
        for i, entry in zip(np.flatnonzero(uniform).tolist(), drawn, strict=False):
            found[i] = entry.rollouts
        new = [
            Entry(Rollouts.of(group, train.mask_truncated_completions), score_of(group), step)
            for group, is_same in zip(groups, uniform, strict=True)
            if not is_same
        ]
        kept = sorted(self.entries + [entry for entry in new if entry.score > 0], key=lambda entry: -entry.score)
        self.entries = kept[: self.size]
        self.metrics = {"replay/groups": len(drawn), "replay/buffer_size": len(self.entries)}
        if drawn:
            self.metrics["replay/age"] = float(np.mean([step - entry.step for entry in drawn]))
        return found

    def _draw(self, count, seed):
        """At most `count` entries: list."""
        scores = np.array([entry.score for entry in self.entries])
        count = min(count, len(scores))
        if not count:
            return []
        chosen = np.random.default_rng(seed).choice(len(scores), count, replace=False, p=scores / scores.sum())
        return [self.entries[i] for i in chosen]

    def state(self):
        """The entries as a checkpoint keeps them: list of dict, of arrays that do not change any more."""
        return [vars(entry) | {"rollouts": entry.rollouts.state()} for entry in self.entries]

    def load_state(self, state, num_generations):
        """Restore what `state` returned, but for groups of another size than num_generations."""
        entries = [Entry(**entry | {"rollouts": Rollouts.restored(entry["rollouts"])}) for entry in state]
        fitting = [entry for entry in entries if entry.rollouts.num_sequences == num_generations]
        self.entries = fitting[: self.size]


def score_of(group):
    """The score of a group of Samples with advantages: float, 0 where fewer than two have a reward."""
    rewards = np.array([sample.reward for sample in group])
    known = rewards[~np.isnan(rewards)]
    std = float(known.std(ddof=1)) if len(known) > 1 else 0.0
    return std * sum(abs(sample.advantage) for sample in group)
