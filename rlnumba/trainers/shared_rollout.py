"""Completions that the ranks of a run draw together, and rewards that one of them computes for all.

    LLMOnRanks       of all completions asked for, in the order of the prompts, rank r draws the r-th of R equal parts;
                     then all ranks have all of them
    RewardsOnRanks   rank 0 calls the reward functions; then all ranks have the values

A completion depends on seed, prompt, index and position alone, so the ranks draw what one would. Every rank makes the
same calls with the same arguments, as those of a Communicator.
"""

from dataclasses import replace

from rlnumba.engine.sequence import RequestOutput
from rlnumba.rewards.calling import Scores


class LLMOnRanks:
    """An LLM, of which each rank has one with the same weights, as far as trainers generate with it."""

    def __init__(self, llm, communicator):
        self.llm, self.communicator, self.tokenizer = llm, communicator, llm.tokenizer

    def wake(self):
        self.llm.wake()

    def sleep(self):
        self.llm.sleep()

    def generate(self, prompts, params, progress=None, finished=None):
        """As LLM.generate, for lists of token ids with a SamplingParams for each.

        progress is called for this rank's completions.
        """
        # (prompt, its SamplingParams for this rank's completions)
        own = part_of(params, self.communicator.rank, self.communicator.world_size)
        outputs, reported = [None] * len(prompts), set()

        def own_finished(at, output):
            position, part = own[at]
            if finished is not None and part.n == params[position].n:
                finished(position, output)
                reported.add(position)

        found = self.llm.generate(
            [prompts[position] for position, _ in own], [part for _, part in own], progress, own_finished
        )
        drawn = self.communicator.objects([output.completions for output in found])
        completions = [completion for of_rank in drawn for part in of_rank for completion in part]
        first = 0
        for position, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            outputs[position] = RequestOutput(list(prompt), completions[first : first + each.n])
            first += each.n
            if finished is not None and position not in reported:
                finished(position, outputs[position])
        return outputs


def part_of(params, rank, world_size):
    """[(prompt, SamplingParams)] of a rank's equal share of all completions, a range of them in the prompts' order.

    params: SamplingParams of each prompt. A prompt at the border of two ranges is in both, each with its completions.
    """
    total, first, found = sum(each.n for each in params), 0, []
    begin, end = (total * which // world_size for which in (rank, rank + 1))
    for position, each in enumerate(params):
        low, high = max(begin, first), min(end, first + each.n)
        if low < high:
            found.append((position, replace(each, n=high - low, first_index=each.first_index + low - first)))
        first += each.n
    return found


class RewardsOnRanks:
    """The Rewards of a run, which rank 0 has and calls; `rewards` is None on other ranks.

    names, weights: as Rewards', on all ranks.
    """

    def __init__(self, rewards, communicator):
        self.rewards, self.communicator = rewards, communicator
        described = (rewards.names, rewards.weights) if communicator.rank == 0 else None
        self.names, self.weights = communicator.objects(described)[0]

    def submit(self, *group):
        """As Rewards.submit; None on other ranks."""
        return None if self.rewards is None else self.rewards.submit(*group)

    def collect(self, pending):
        """As Rewards.collect; on other ranks, Scores with the values alone."""
        scores = None if self.rewards is None else self.rewards.collect(pending)
        values = self.communicator.objects(None if scores is None else scores.values)[0]
        return Scores(values) if scores is None else scores
