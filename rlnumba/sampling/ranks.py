"""Engines with the same weights, one on each rank, that draw completions together; rank 0 leads them.

    ranks = LedLLM(own_llm, communicator)         on every rank
    ranks.led(function)                          function() on rank 0, which may use ranks.llm; the others draw with it

    step      rank 0: what is to be dropped and added -> ranks
              new completions -> ranks, ranges of them, so that every rank has as many unfinished ones
              every rank lets its engine do steps, for ROUND_S seconds
              what has finished, and how many have not -> all ranks
              a rank that has few takes over sequences of one that has many, with the tokens that they have

An episode stays on the rank that begins it, and its tools are called there. If the rewards read its environment, which
no other process can have, its coroutine is rank 0's, and its turns alone are distributed.

With deploy.tensor_parallel_size T every T neighbouring ranks have one engine together: the first of them has its
requests, and while it draws the others replay its steps. What is said of ranks below then holds for these engines.

A completion depends on seed, prompt, index and position alone, so which rank draws it, in how many pieces, is no part
of it, and the ranks draw what one would. Decisions here, but for the first, follow from what all ranks know, and are
the same on each.
"""

import copy
import heapq
import time
from dataclasses import replace
from typing import NamedTuple

from rlnumba.engine.core import PromptError
from rlnumba.engine.episodes import Episodes, run_for
from rlnumba.engine.sequence import FinishedCompletion, SamplingParams
from rlnumba.errors import CommunicationError, DeviceError, SharedError, UserError
from rlnumba.parallel.launch import launch
from rlnumba.parallel.placement import placement
from rlnumba.parallel.tensor_parallel import together
from rlnumba.rewards import RewardError
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


class SharedRewardError(RewardError, SharedError):
    """A RewardError that all ranks raise in the same place."""


class LedValue(NamedTuple):
    """The message that ends `led`: the value of rank 0's function."""

    value: object


class LedFailure(NamedTuple):
    """The message that ends `led` where rank 0's function has raised a UserError."""

    message: str
    is_of_reward: bool

    @property
    def error(self):
        return (SharedRewardError if self.is_of_reward else SharedError)(self.message)


def launch_replicas(function, count, key, *arguments, **options):
    """The result of function(communicator, *arguments) on rank 0 of `count` processes, each with a whole model.

    key: the option that asks for so many. options: keywords of `launch`. Raises ConfigError where there are no devices
    for them, RankError for the first rank that fails.
    """
    return launch(function, count, *arguments, **placement(count, key), **options)[0]


def led(communicator, function, serve, shared=lambda value: value):
    """The value of function() on rank 0, on all ranks, which call this together.

    Until it returns, the others call serve(message) with all that rank 0 sends them by Communicator.objects. shared:
    of the value, the part that they get. A UserError of the function is one of all ranks, but a DeviceError.
    """
    if communicator is None or communicator.world_size == 1:
        return function()
    if communicator.rank == 0:
        try:
            value = function()
        except (CommunicationError, DeviceError):  # the other ranks may be in the middle of a step
            raise
        except UserError as error:
            failed = LedFailure(str(error), isinstance(error, RewardError))
            communicator.objects(failed)
            raise failed.error from error
        communicator.objects(LedValue(shared(value)))
        return value
    while not isinstance(found := communicator.objects(None)[0], LedValue | LedFailure):
        serve(found)
    if isinstance(found, LedFailure):
        raise found.error
    return found.value


class LedLLM:
    """An LLM on each rank of a Communicator; rank 0 generates with all of them, by `llm`, in a function of `led`.

    llm: this rank's own, which generates alone at other times; the same weights on all ranks. agents: this rank's
    Agents, or None.
    """

    def __init__(self, llm, communicator, agents=None):
        self.communicator, self.own, self.llm, self.engine = communicator, llm, llm, None
        if communicator is not None and communicator.world_size > 1:
            self.engine, self.llm = LedEngine(llm.engine, communicator, agents), copy.copy(llm)
            self.llm.engine = self.engine

    def wake(self):
        """Let this rank's engine take its memory, on all ranks."""
        self._together(self.own.wake)

    def sleep(self):
        """Let others use that memory, on all ranks."""
        self._together(self.own.sleep)

    def _together(self, function):
        return function() if self.engine is None else together(self.engine.engine, function)

    def led(self, function, shared=lambda value: value):
        """`led`, with all engines awake."""
        self.wake()
        if self.engine is None:
            value = function()
        else:
            try:
                value = led(self.communicator, function, self.engine.serve, shared)
            except BaseException:  # a signal, too
                self.engine.close()
                raise
            self.engine.end()
        self.sleep()
        return value


class RoundOutput(NamedTuple):
    """The completions of all ranks in a step: list of FinishedCompletion, in the order of the ranks, and tokens."""

    finished: list
    num_tokens: int


class LedStep(NamedTuple):
    """Rank 0's message that begins a step: requests that are dropped, and then those that are added.

    added: (request_id, prompt, params, adapter_id, indices, first_context, cache_salt) of each. dropped also has
    requests of which blocks are retained. episodes: (GroupRequest, indices) of each that consists of episodes.
    """

    dropped: list
    added: list
    episodes: list


class LedEngine:
    """The engines of the ranks of a Communicator; see the module's docstring.

    On rank 0 it has the interface of an Engine, but that a step returns a RoundOutput; the others `serve` its messages.
    agents: this rank's Agents, which play the episodes of a run, or None.
    """

    def __init__(self, engine, communicator, agents=None):
        self.engine, self.communicator, self.config = engine, communicator, engine.config
        self.agents, self.episodes = agents, Episodes(engine)
        # Ranks that have one engine together, the number of this rank's engine, and whether it has the requests.
        self.parts = 1 if engine.model.ranks is None else engine.model.ranks.count
        self.index, part = divmod(communicator.rank, self.parts)
        self.has_requests = part == 0
        self._start()

    def _start(self):
        # The same on all ranks: completions that were asked for and not returned yet, by request, and sequences that
        # each engine has.
        self.unfinished, self.loads = {}, [0] * (self.communicator.world_size // self.parts)
        # The engine that has drawn the last turn of an episode, and retains its blocks, by request.
        self.homes = {}
        # Rank 0's message at the next step: requests that were added, and dropped.
        self.added, self.dropped, self.added_episodes = [], [], []
        # Whether some of what is unfinished are episodes that ranks play.
        self.has_episodes = False
        # When this rank's engine has last sampled a token, or has been given the first request.
        self.drawn_at = time.monotonic()

    @property
    def has_unfinished(self):
        return bool(self.unfinished or self.added or self.added_episodes)

    @property
    def plays_episodes(self):
        """Whether episodes are given to the ranks whole: bool. On rank 0."""
        return self.agents is not None and not self.agents.rewards_read_environments

    def add_episodes(self, request, indices):
        """Queue completions of a GroupRequest of Episodes; no rank begins one before the next step."""
        self.added_episodes.append((request, indices))

    @property
    def policy_version(self):
        return self.engine.policy_version

    @property
    def max_model_len(self):
        return self.engine.max_model_len

    def check_request(self, request_id, prompt, params):
        """The same as Engine.check_request."""
        return self.engine.check_request(request_id, prompt, params)

    def add_request(
        self, request_id, prompt, params=None, adapter_id=-1, indices=None, first_context=None, cache_salt=""
    ):
        """Queue a request, as Engine.add_request does; no rank begins with it before the next step."""
        params = params or SamplingParams()
        if request_id in self.unfinished or any(request_id == each[0] for each in self.added):
            raise ValueError(f"add_request: {request_id!r} is unfinished")
        prompt, _ = self.check_request(request_id, prompt, params)
        indices = list(range(params.n) if indices is None else indices)
        self.added.append((request_id, prompt, params, adapter_id, indices, first_context, cache_salt))
        return prompt

    def move_in(self, sequences):
        """The same as Engine.move_in, but that none may have been begun."""
        assert not sequences

    def step(self):
        """Draw for ROUND_S seconds, or less if the ranks have finished: RoundOutput. Raises as Engine.step."""
        message = LedStep(self.dropped, self.added, self.added_episodes)
        self.dropped, self.added, self.added_episodes = [], [], []
        self.communicator.objects(message)
        return self.serve(message)

    def serve(self, message):
        """This rank's part in a step: its RoundOutput. message: rank 0's LedStep."""
        for request_id in message.dropped:
            self.episodes.abort(request_id)
            self.engine.abort(request_id)
            self.unfinished.pop(request_id, None)
            self.homes.pop(request_id, None)
        if (message.added or message.episodes) and not self.unfinished:
            self.drawn_at = time.monotonic()
        for request_id, *_, indices, _, _ in message.added:
            self.unfinished[request_id] = len(indices)
        for request, indices in message.episodes:
            self.unfinished[request.number] = len(indices)
        _, refused = _tried(lambda: (self._distribute(message.added), self._distribute_episodes(message.episodes)))
        finished, num_tokens, failure = together(self.engine, lambda: self._draw(refused), ([], 0, None))
        found = self.communicator.objects((finished, num_tokens, self._load, self._waited_s(num_tokens), failure))
        of_ranks, tokens, self.loads, waited_s, failures = map(list, zip(*found[:: self.parts], strict=True))
        if _is_ended_by(failures, self.communicator):
            return RoundOutput([], 0)
        turns = self.homes.keys()
        self.homes |= {
            each.request_id: rank
            for rank, of_rank in enumerate(of_ranks)
            for each in of_rank
            if each.request_id in turns
        }
        # Another rank may have finished a completion of a request before it dropped it.
        finished = [each for of_rank in of_ranks for each in of_rank if each.request_id in self.unfinished]
        for request_id, _, _ in finished:
            self.unfinished[request_id] -= 1
            if not self.unfinished[request_id]:
                del self.unfinished[request_id]
        self._check_progress(min(waited_s))
        self._balance()
        return RoundOutput(finished, sum(tokens))

    @property
    def _load(self):
        """Completions that this rank draws: int."""
        return self.engine.num_unfinished if self.episodes.is_idle else self.episodes.num_unfinished

    def _draw(self, refused=None):
        """(what finished, tokens, the error of a step or an episode or None) of ROUND_S seconds on this rank.

        refused: the error of what it was given; nothing is drawn then.
        """
        episodes, until, finished, before = self.episodes, time.monotonic() + ROUND_S, [], self.episodes.num_tokens

        def draw():
            if episodes.is_idle:
                return run_for(self.engine, ROUND_S)
            while not episodes.is_idle and (left := until - time.monotonic()) > 0:
                for request in episodes.step(left):
                    finished.extend(FinishedCompletion(request.number, *each) for each in request.done.items())
            return None

        found, failure = (None, refused) if refused is not None else _tried(draw)
        return *(found or (finished, episodes.num_tokens - before)), failure

    def _waited_s(self, num_tokens):
        """Seconds since this rank's engine has last sampled a token, or since the first request: float.

        None have passed while a tool is called, which has a time limit of its own.
        """
        if num_tokens or self.episodes.waits_for_futures:
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

    def _distribute(self, added):
        """Let this rank's engine have its range of the completions that were added since the last step.

        A further turn of an episode goes where the last one was drawn, whose blocks are there.
        """
        others = []
        for request in added:
            *values, indices, first_context, salt = request
            home = self.homes.get(values[0])
            if home is None:
                others.append(request)
                continue
            self.loads[home] += len(indices)
            if home == self.index and self.has_requests:
                self.engine.add_request(*values, indices, first_context, salt)
        counts = shares(self.loads, sum(len(indices) for *_, indices, _, _ in others))
        (begin, end), first = self._own_range(counts), 0
        for *values, indices, first_context, salt in others:
            if own := indices[max(begin - first, 0) : max(end - first, 0)]:
                self.engine.add_request(*values, own, first_context, salt)
            if first_context is not None:
                self.homes[values[0]] = None
            first += len(indices)
        self.loads = [load + count for load, count in zip(self.loads, counts, strict=True)]

    def _own_range(self, counts):
        """(first, end) of what this rank's engine gets where each gets so many, one after the other."""
        begin = sum(counts[: self.index])
        return begin, begin + counts[self.index] * self.has_requests

    def _distribute_episodes(self, added):
        """Let this rank have its range of the episodes that were added since the last step."""
        counts = shares(self.loads, sum(len(indices) for _, indices in added))
        (begin, end), first = self._own_range(counts), 0
        for request, indices in added:
            if own := indices[max(begin - first, 0) : max(end - first, 0)]:
                episode = request.episode.played_by(self.agents)
                fresh = {"version": self.policy_version, "done": {}, "begun": []}
                self.episodes.submit(replace(request, indices=own, episode=episode, **fresh))
            first += len(indices)
        self.loads = [load + count for load, count in zip(self.loads, counts, strict=True)]
        self.has_episodes |= bool(added)

    def _balance(self):
        """Let ranks with few sequences take over some of those that have many; not of episodes, which stay."""
        self.has_episodes &= bool(self.unfinished)
        if self.has_episodes:
            return
        few, least_left = (FEW_ON_GPU, LEAST_LEFT_ON_GPU) if device.name() == "cuda" else (1, 1)
        moves = moves_between(self.loads, few)
        if not moves:
            return
        count = sum(n for source, _, n in moves if source == self.index)
        own = together(self.engine, lambda: _tried(lambda: self.engine.move_out(count, least_left)), ([], None))
        moved, failures = map(list, zip(*self.communicator.objects(own)[:: self.parts], strict=True))
        if _is_ended_by(failures, self.communicator):
            return
        for source, target, count in moves:
            # Sequences that had ended when their engine stopped, or are about to, are not moved.
            sequences, moved[source] = moved[source][:count], moved[source][count:]
            self.loads[source] -= len(sequences)
            self.loads[target] += len(sequences)
            if target == self.index and self.has_requests:
                self.engine.move_in(sequences)

    def abort(self, request_id):
        """Drop what is unfinished of a request, as Engine.abort does; other ranks do at the next step."""
        self.added = [each for each in self.added if each[0] != request_id]
        self.added_episodes = [each for each in self.added_episodes if each[0].number != request_id]
        self.episodes.abort(request_id)
        if self.unfinished.pop(request_id, None) is not None:
            self.engine.abort(request_id)
        self.release_retained(request_id)

    def release_retained(self, request_id):
        """Free the blocks that are retained for a request, as Engine.release_retained does; other ranks do at the next
        step."""
        self.engine.release_retained(request_id)
        self.dropped.append(request_id)

    def reset(self):
        """Drop all requests and the content of this rank's cache, as Engine.reset does."""
        self.episodes.reset()
        self._start()

    def end(self):
        """Drop all requests, on this rank: each calls it after `led`."""
        for number in list(self.episodes.running):
            self.episodes.abort(number)
        for request_id in [*self.engine.requests, *self.engine.scheduler.row_blocks.retained.of_request]:
            self.engine.abort(request_id)
        self.engine.outputs.clear()
        self._start()

    def close(self):
        """End the coroutines of this rank, which draws no more."""
        self.episodes.end_episodes()

    def update_weights(self, version, keep_cache=False):
        """Sample from weights that were changed in place, on this rank; see Engine.update_weights."""
        self.engine.update_weights(version, keep_cache)

    def sleep(self):
        """Nothing: LedLLM.led does it on all ranks."""

    def wake(self):
        """Nothing: LedLLM.led does it on all ranks."""


def _tried(function):
    """(the value of function(), None), or (None, its UserError as it can be sent), which rank 0 raises after the next
    exchange, for which the other ranks wait."""
    try:
        return function(), None
    except (CommunicationError, DeviceError):
        raise
    except UserError as error:
        # Not every error can be sent.
        return None, error if isinstance(error, PromptError) else UserError(str(error))


def _is_ended_by(failures, communicator):
    """Whether an engine has failed, whose error rank 0 raises. The others exchange nothing more: its next message ends
    what they draw. failures: the error of each engine, or None."""
    first = next(filter(None, failures), None)
    if first is not None and communicator.rank == 0:
        raise first
    return first is not None


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
