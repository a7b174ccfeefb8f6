"""Rewards of the completions that the ranks of a run draw together, computed by one rank for all.

Completions are drawn by all (sampling/replicas.py), and every rank has all of them; rank 0 calls the reward
functions, and then all ranks have the values. Every rank makes the same calls, as those of a Communicator.
"""

from rlnumba.errors import SharedError
from rlnumba.rewards import RewardError
from rlnumba.rewards.calling import Pending, Scores


class SharedRewardError(RewardError, SharedError):
    """A RewardError that all ranks raise in the same place."""


class RewardsOnRanks:
    """The Rewards of a run, which rank 0 has and calls; `rewards` is None on other ranks.

    names, weights, all_in_workers: those of Rewards, on all ranks.
    """

    def __init__(self, rewards, communicator):
        self.rewards, self.communicator = rewards, communicator
        described = None if rewards is None else (rewards.names, rewards.weights, rewards.all_in_workers)
        self.names, self.weights, self.all_in_workers = self._of_rank_0(described)

    def _of_rank_0(self, value):
        return self.communicator.objects(value)[0]

    def submit(self, prompts, texts, *group):
        """Call Rewards.submit on rank 0; other ranks get a Pending of nothing."""
        return Pending({}, len(texts), {}) if self.rewards is None else self.rewards.submit(prompts, texts, *group)

    def ready(self, pending):
        """Call Rewards.ready on rank 0; all ranks get its result."""
        return self._of_rank_0(None if self.rewards is None else self.rewards.ready(pending))

    def collect(self, pending):
        """Call Rewards.collect on rank 0; other ranks get Scores with the values alone. Raises SharedRewardError."""
        scores = message = None
        if self.rewards is not None:
            try:
                scores = self.rewards.collect(pending)
            except RewardError as error:
                message = str(error)
        values, message = self._of_rank_0((None if scores is None else scores.values, message))
        if message is not None:
            raise SharedRewardError(message)
        return Scores(values) if scores is None else scores
