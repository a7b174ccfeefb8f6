"""Engines with the same weights, one on each rank, that draw the completions of their requests together.

    engine = EngineOnRanks(own_engine, communicator)     the Engine's interface; all ranks make the same calls
    llm = llm_on_ranks(own_llm, communicator)            an LLM of such an engine
    launch_replicas(generate, 4, ...)                    ranks for `rlnumba generate`, `score` and `eval`

    step      new completions -> ranks, ranges of them, so that every rank has as many unfinished ones
              every rank lets its engine do steps, for ROUND_S seconds
              what has finished, and how many have not -> all ranks
              a rank that has few takes over sequences of one that has many, with the tokens that they have

A completion depends on seed, prompt, index and position alone, so which rank draws it, in how many pieces, is no part
of it, and the ranks draw what one would. Decisions here follow from what all ranks know, and are the same on each.
"""

import copy
import heapq
import time
from typing import NamedTuple

from rlnumba.engine.episodes import run_for
from rlnumba.engine.sequence import SamplingParams
from rlnumba.errors import CommunicationError
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.runtime import device

# Seconds between two exchanges. A rank without work waits so long for some, and all wait for the longest of R steps of
# their engines, a few ms each. Not tuned.
ROUND_S = 0.1
# Seconds after which completions are lost that no rank has: some may wait to be returned by an engine's next step.
LOST_S = 5.0
# Sequences that one GPU decodes about as fast as one of them, 0.58 ms a step for 8 and 0.55 for 1 of a 0.6B model: of
# so few none is taken over. The cpu device takes as much longer as there are more.
FEW_ON_GPU = 8
# Tokens that a sequence must be able to get to be taken over, on a GPU: its keys and values are computed again, which
# takes about as long as so many decode steps. If all are as long, ranks would otherwise exchange them at the very end.
# Not tuned.
LEAST_LEFT_ON_GPU = 64


def launch_replicas(function, count, key, *arguments, **options):
    """The result of function(communicator, *arguments) on rank 0 of `count` processes, each with a whole model.

    key: the option that asks for so many. options: keywords of `launch`. Raises ConfigError where there are no devices
    for them, RankError for the first rank that fails.
    """
    return launch(function, count, *arguments, **placement(count, key), **options)[0]


def llm_on_ranks(llm, communicator):
    """An LLM that generates on all ranks, each of which calls it with the same arguments and has all results.

    llm: this rank's, whose engine it uses; the same weights on all ranks.
    """
    shared = copy.copy(llm)
    shared.engine = EngineOnRanks(llm.engine, communicator)
    return shared


class RoundOutput(NamedTuple):
    """The completions of all ranks in a step: list of FinishedCompletion, in the order of the ranks, and tokens."""

    finished: list
    num_tokens: int


class EngineOnRanks:
    """An Engine of the ranks of a Communicator; see the module's docstring. A step returns a RoundOutput."""

    def __init__(self, engine, communicator):
        self.engine, self.communicator, self.config = engine, communicator, engine.config
        self._start()

    def _start(self):
        # Completions that were asked for and not returned yet, by request; requests since the last step; sequences
        # that each rank has. The same on all ranks.
        self.unfinished, self.added, self.loads = {}, [], [0] * self.communicator.world_size
        # When this rank's engine has last sampled a token, or has been given the first request.
        self.drawn_at = time.monotonic()

    @property
    def has_unfinished(self):
        return bool(self.unfinished)

    @property
    def policy_version(self):
        return self.engine.policy_version

    def check_request(self, request_id, prompt, params):
        """The same as Engine.check_request."""
        return self.engine.check_request(request_id, prompt, params)

    def add_request(self, request_id, prompt, params=None, adapter_id=-1, indices=None):
        """Queue a request, as Engine.add_request does; no rank begins with it before the next step."""
        params = params or SamplingParams()
        if request_id in self.unfinished:
            raise ValueError(f"add_request: {request_id!r} is unfinished")
        prompt, _ = self.check_request(request_id, prompt, params)
        indices = list(range(params.n) if indices is None else indices)
        if not self.has_unfinished:
            self.drawn_at = time.monotonic()
        self.unfinished[request_id] = len(indices)
        self.added.append((request_id, prompt, params, adapter_id, indices))
        return prompt

    def move_in(self, sequences):
        """The same as Engine.move_in, but that none may have been begun."""
        assert not sequences

    def step(self):
        """Draw for ROUND_S seconds, or less if the ranks have finished: RoundOutput. Raises as Engine.step."""
        self._distribute()
        finished, num_tokens = run_for(self.engine, ROUND_S)
        found = self.communicator.objects(
            (finished, num_tokens, self.engine.num_unfinished, self._waited_s(num_tokens))
        )
        of_ranks, tokens, self.loads, waited_s = map(list, zip(*found, strict=True))
        finished = [each for of_rank in of_ranks for each in of_rank]
        for request_id, _, _ in finished:
            self.unfinished[request_id] -= 1
            if not self.unfinished[request_id]:
                del self.unfinished[request_id]
        self._check_progress(min(waited_s))
        self._balance()
        return RoundOutput(finished, sum(tokens))

    def _waited_s(self, num_tokens):
        """Seconds since this rank's engine has last sampled a token, or since the first request: float."""
        if num_tokens:
            self.drawn_at = time.monotonic()
        return time.monotonic() - self.drawn_at

    def _check_progress(self, waited_s):
        """Raise CommunicationError, on all ranks, if completions will never come. waited_s: the ranks' least."""
        limit_s = self.communicator.timeout_s if any(self.loads) else LOST_S
        if not self.unfinished or waited_s <= limit_s:
            return
        reason = f"no rank has drawn a token for {waited_s:.0f} s" if any(self.loads) else "no rank has them"
        missing = f"{sum(self.unfinished.values())} completions of {len(self.unfinished)} prompts"
        raise CommunicationError(f"generate: {missing} do not come: {reason}")

    def _distribute(self):
        """Let each rank's engine have its range of the completions that were added since the last step."""
        counts = shares(self.loads, sum(len(each[-1]) for each in self.added))
        begin = sum(counts[: self.communicator.rank])
        end, first = begin + counts[self.communicator.rank], 0
        for *request, indices in self.added:
            if own := indices[max(begin - first, 0) : max(end - first, 0)]:
                self.engine.add_request(*request, own)
            first += len(indices)
        self.loads = [load + count for load, count in zip(self.loads, counts, strict=True)]
        self.added = []

    def _balance(self):
        """Let ranks with few sequences take over some of those that have many."""
        rank = self.communicator.rank
        few, least_left = (FEW_ON_GPU, LEAST_LEFT_ON_GPU) if device.name() == "cuda" else (1, 1)
        moves = moves_between(self.loads, few)
        if not moves:
            return
        count = sum(n for source, _, n in moves if source == rank)
        moved = self.communicator.objects(self.engine.move_out(count, least_left))
        for source, target, count in moves:
            # Sequences that had ended when their engine stopped, or are about to, are not moved.
            sequences, moved[source] = moved[source][:count], moved[source][count:]
            self.loads[source] -= len(sequences)
            self.loads[target] += len(sequences)
            if target == rank:
                self.engine.move_in(sequences)

    def abort(self, request_id):
        """Drop what is unfinished of a request, as Engine.abort does."""
        self.engine.abort(request_id)
        self.unfinished.pop(request_id, None)
        self.added = [each for each in self.added if each[0] != request_id]

    def reset(self):
        """Drop all requests and the content of the cache, as Engine.reset does."""
        self.engine.reset()
        self._start()

    def update_weights(self, version):
        """Sample from weights that were changed in place, of this policy version; see Engine.update_weights."""
        self.engine.update_weights(version)

    def sleep(self):
        """Let others use the memory of the KV cache, as Engine.sleep does."""
        self.engine.sleep()

    def wake(self):
        """Take the memory of the KV cache again, as Engine.wake does."""
        self.engine.wake()


def shares(loads, count):
    """The number of `count` new sequences that each rank gets, so that the largest load is as small as can be: list.

    loads: sequences that each rank has.
    """
    counts, heap = [0] * len(loads), [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(count):
        load, rank = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, (load + 1, rank))
    return counts


def moves_between(loads, few):
    """[(source, target, count)] of sequences that ranks take over, so that all have as many; [] where it is not worth.

    It is worth it where a rank has no more than half of another one's, and that more than `few`.
    """
    if max(loads) <= few or 2 * min(loads) > max(loads):
        return []
    fewest, longer = divmod(sum(loads), len(loads))
    most_first = sorted(range(len(loads)), key=lambda rank: (-loads[rank], rank))
    surplus = {rank: loads[rank] - fewest - (place < longer) for place, rank in enumerate(most_first)}
    targets, moves = [[rank, -extra] for rank, extra in surplus.items() if extra < 0], []
    for source, extra in surplus.items():
        while extra > 0:
            count = min(extra, targets[0][1])
            moves.append((source, targets[0][0], count))
            extra -= count
            targets[0][1] -= count
            if not targets[0][1]:
                del targets[0]
    return moves
