"""The sampler of a process's own engine, which reads the weights where the trainer writes them.

It draws while who asks for completions polls; and, where it goes on between the micro-batches of training, some decode
steps before each (Policy.before_micro_batch). Where a version of the weights takes several optimizer steps, it does so
in the first of them: every token is of a version.

Several ranks that draw ahead of training have one such sampler each, and together a RankedSampler:

    take              rank 0 sends a DrawingRound -> ranks: groups that are given out, whole ones; a step of each engine
                      completions of all ranks -> rank 0
    micro-batches     each engine does its steps, without an exchange
    optimizer step    without in-flight updates each engine completes what it has; the ranks meet every ROUND_S seconds
                      completions -> rank 0; then the groups that the new weights begin -> ranks

Weights in parts (deploy.zero_stage 3) are gathered by all ranks after an update; each engine keeps them until the next.

All engines do as many steps before an update, so which weights sample a token does not depend on timing. It does not
depend on the number of ranks either, as long as no completion waits for room in its engine, and no engine has launched
a step ahead when the weights change (engine.async_scheduling).
"""

import time
from dataclasses import replace
from typing import NamedTuple

from rlnumba.engine.episodes import WAIT_S, Episodes, GroupRequest
from rlnumba.errors import CommunicationError, DeviceError, SharedError, UserError
from rlnumba.sampling.ranks import ROUND_S
from rlnumba.sampling.sampler import Alive, Sampler

# Seconds that a step of a RankedSampler waits for a Future of episodes where no engine has sampled a token in the one
# before: other ranks wait with it. Not tuned.
ROUND_WAIT_S = 0.01


class OwnSampler(Sampler):
    """engine: an Engine, or the LedEngine of all ranks. options: AsyncConfig."""

    is_own = True

    def __init__(self, engine, options):
        self.options, self.episodes, self.owners, self.busy_s = options, Episodes(engine), {}, 0.0
        # Whether the weights are of no version: those of the last one have been changed.
        self.is_changing = False

    def start(self, version):
        self.episodes.engine.update_weights(version)

    @property
    def stats(self):
        return Alive(self.episodes.num_tokens, self.busy_s, 0.0)

    @property
    def is_idle(self):
        """Whether all that was submitted is complete."""
        return self.episodes.is_idle

    @property
    def num_finished(self):
        """Completions drawn since the start: int."""
        return self.episodes.num_finished

    def submit(self, request, owner):
        self.owners[request.number] = owner
        self.episodes.submit(request)

    def abort(self, number):
        """Drop a request; its owner does not get it back."""
        self.episodes.abort(number)
        del self.owners[number]

    def poll(self, wait_s=WAIT_S):
        """One decode step; wait_s is Episodes.step's."""
        if self.is_idle:
            return True
        began, waited_s = time.perf_counter(), self.episodes.waited_s
        complete = self.episodes.step(wait_s)
        for request in complete:
            self.owners.pop(request.number).finished(request)
        self.busy_s += time.perf_counter() - began - (self.episodes.waited_s - waited_s)
        return bool(complete)

    def update_weights(self, version):
        self.is_changing = False
        self.episodes.update_weights(version, not self.options.recompute_kv_cache_after_weight_updates)

    def settle(self):
        """Complete all groups that have begun: evaluation has the same engine."""
        while not self.is_idle:
            self.poll()

    def before_micro_batch(self):
        """Decode some steps of what is in flight."""
        if self.is_changing:
            return
        for _ in range(self.options.decode_steps_per_micro_batch):
            self.poll(wait_s=0.0)

    def before_update(self):
        """The weights are about to be written."""
        if not self.options.in_flight_weight_updates:
            self.settle()
        self.episodes.synchronize()
        self.is_changing = True

    def close(self):
        self.owners.clear()
        if not self.is_idle:
            self.episodes.reset()


class DrawingRound(NamedTuple):
    """Rank 0's message to the ranks of a RankedSampler. requests: (rank, GroupRequest) of each group that is given out;
    steps: of each engine; wait_s: Episodes.step's."""

    requests: list
    steps: int
    wait_s: float = 0.0


class Report(NamedTuple):
    """A rank's message after its steps. complete: (steps since the last exchange, number, completions by index) of each
    group; alive: Alive of its engine; failure: the text of an error, or None."""

    complete: list
    alive: Alive
    failure: str | None


class UnderWay(NamedTuple):
    """A group that a rank draws, on rank 0."""

    request: GroupRequest
    owner: object
    rank: int


class RankedSampler(Sampler):
    """The engines of all ranks of a Communicator, each with groups of its own; see the module's docstring.

    engine: this rank's Engine; options: AsyncConfig; agents: this rank's Agents, which play its episodes, or None.
    Every rank has one; on rank 0 it is the pipeline's Sampler, and the others `serve` its messages.
    """

    is_own = True

    def __init__(self, engine, options, communicator, agents=None):
        self.own, self.options = OwnSampler(engine, options), options
        self.communicator, self.agents, self.count = communicator, agents, communicator.world_size
        # On this rank, since the last exchange: steps, groups that are complete, and the first error.
        self.num_steps, self.complete, self.failure = 0, [], None
        # On rank 0: UnderWay by number, completions that each rank is to draw, and what the next round gives out.
        self.under_way, self.loads, self.given_out = {}, [0] * self.count, []
        # On all ranks: Alive of each, whether an engine has sampled a token between the last two exchanges, and the
        # error of the first rank that has one.
        self.alive, self.has_drawn, self.failed = [Alive(0, 0.0, 0.0)] * self.count, True, None

    def start(self, version):
        self.own.start(version)
        self.wake()

    def wake(self):
        """Let this rank's engine have its memory and the weights as they are: ranks that have these in parts gather
        them. All ranks call this together, and what each does between two such calls gathers nothing."""
        self.own.episodes.engine.wake()

    @property
    def stats(self):
        return Alive(*map(sum, zip(*self.alive, strict=True)))

    def submit(self, request, owner):
        """Give a group to the rank that has the fewest completions to draw; it begins at the next exchange."""
        rank = self.loads.index(min(self.loads))
        self.loads[rank] += request.params.n
        self.under_way[request.number] = UnderWay(request, owner, rank)
        self.given_out.append((rank, request))

    def poll(self):
        """One step of each engine. Raises UserError where one of them fails."""
        return self._lead(1)

    def flush(self):
        """Give the groups that were submitted to their ranks, which serve."""
        if self.given_out:
            self._lead(0)

    def _lead(self, steps):
        """Do a round with the ranks that serve: whether groups have become complete."""
        message = DrawingRound(self._taken(), steps, 0.0 if self.has_drawn else ROUND_WAIT_S)
        self.communicator.objects(message)
        has_news = self.serve(message)
        if self.failed is not None:
            raise UserError(self.failed)
        return has_news

    def _taken(self):
        requests, self.given_out = self.given_out, []
        return requests

    def serve(self, message):
        """This rank's part in a DrawingRound: on rank 0, whether groups have become complete."""
        self._begin(message.requests)
        self._step(message.steps, message.wait_s)
        return self.collect()

    def collect(self):
        """Let rank 0 have what all ranks have completed: there, whether it is anything. All ranks call this together.

        An error of a rank is raised by what called this, or by the next `update_weights`.
        """
        reports = self.communicator.objects(Report(self.complete, self.own.stats, self.failure))
        self.num_steps, self.complete = 0, []
        alive = [report.alive for report in reports]
        self.has_drawn = any(now.num_tokens > then.num_tokens for now, then in zip(alive, self.alive, strict=True))
        self.alive, self.failed = alive, next((each.failure for each in reports if each.failure is not None), None)
        # As one engine would have completed them.
        complete = sorted((each for report in reports for each in report.complete), key=lambda each: each[:2])
        if self.communicator.rank == 0:
            for _, number, done in complete:
                request, owner, rank = self.under_way.pop(number)
                self.loads[rank] -= request.params.n
                owner.finished(replace(request, done=done))
        return bool(complete)

    def share(self):
        """Give the groups that were submitted on rank 0 to their ranks. All ranks call this together."""
        self._begin(self.communicator.objects(self._taken())[0])

    def finished(self, request):
        """This rank's engine has completed a group."""
        self.complete.append((self.num_steps, request.number, request.done))

    def before_micro_batch(self):
        """Decode some steps of what is in flight, on this rank; all do as many."""
        if not self.own.is_changing:
            self._step(self.options.decode_steps_per_micro_batch, 0.0)

    def before_update(self):
        """The weights are about to be written, on all ranks, which call this together."""
        if not self.options.in_flight_weight_updates:
            self._complete_all()
        self._guarded(self.own.before_update)

    def update_weights(self, version):
        """The weights are of this version now, on all ranks, which call this together. Raises SharedError for an error
        before the last `collect`."""
        self._check()
        self._guarded(lambda: self.own.update_weights(version))
        self.wake()

    def settle(self):
        """Complete all groups that have begun, on all ranks, which call this together. Raises SharedError."""
        self._complete_all()
        self.collect()
        self._check()

    def close(self):
        self.own.close()

    def _check(self):
        if self.failed is not None:
            raise SharedError(self.failed)

    def _begin(self, requests):
        """Let this rank's engine have its groups of (rank, GroupRequest) of each."""
        for rank, request in requests:
            if rank != self.communicator.rank:
                continue
            if request.episode is not None:
                request = replace(request, episode=request.episode.played_by(self.agents))
            self._guarded(lambda own=request: self.own.submit(own, self))

    def _step(self, count, wait_s):
        """Steps of this rank's engine, of which one without work does nothing."""
        for _ in range(count):
            self.num_steps += 1
            self._guarded(lambda: self.own.poll(wait_s))

    def _complete_all(self):
        """Complete what has begun on all ranks, which call this together.

        They meet meanwhile: those that have less to draw wait no longer for the others than an operation may take.
        """
        while any(self.communicator.objects(self._is_drawing)):
            until = time.monotonic() + ROUND_S
            while self._is_drawing:
                self._step(1, WAIT_S)
                if time.monotonic() >= until:
                    break

    @property
    def _is_drawing(self):
        return not self.own.is_idle and self.failure is None

    def _guarded(self, function):
        """Call a function unless this rank has failed; its UserError is reported at the next exchange."""
        if self.failure is not None:
            return
        try:
            function()
        except (CommunicationError, DeviceError):  # the other ranks find it out themselves
            raise
        except UserError as error:
            self.failure = str(error)
