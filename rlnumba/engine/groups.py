"""Groups of completions on one engine, begun in order, each with weights that are at least as new as it asks for.

    groups.submit(request)              queued until the weights are of request.version or newer
    groups.step() -> finished groups
    groups.update_weights(version)      the weights have been written, between two steps

An interrupted group goes on elsewhere from the tokens that it has: its text stays the same, as long as the weights do.
Given out without them, here or elsewhere, it is drawn afresh.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from rlnumba.engine.sequence import Completion, SamplingParams, Sequence


@dataclass(frozen=True)
class GroupRequest:
    """The params.n completions of a prompt. number: the group's; version: the oldest weights that may begin it.

    done, begun: what an earlier attempt has finished, {index: Completion}, and the Sequences that it has begun.
    """

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    version: int
    done: dict[int, Completion] = field(default_factory=dict)
    begun: list[Sequence] = field(default_factory=list)

    @property
    def completions(self):
        """All completions in their order, once they are done: list."""
        return [self.done[index] for index in range(self.params.n)]

    @property
    def is_complete(self):
        return len(self.done) == self.params.n


class GroupEngine:
    """An Engine whose requests are groups. num_tokens: sampled so far."""

    def __init__(self, engine):
        self.engine = engine
        # GroupRequests that wait for weights, and those in the engine, by number.
        self.waiting, self.running = deque(), {}
        # Numbers of those in the engine that it has computed nothing of yet: a dict without values, for the order.
        self._queued = {}
        self.num_tokens = 0

    @property
    def policy_version(self):
        return self.engine.policy_version

    @property
    def is_idle(self):
        """Whether `step` has nothing to do."""
        return not self.running

    @property
    def may_change_weights(self):
        """Whether all groups that the present weights may begin are complete."""
        return not self.running and not self._can_begin

    @property
    def _can_begin(self):
        return bool(self.waiting) and self.waiting[0].version <= self.policy_version

    def submit(self, request):
        """Queue a GroupRequest that is not complete; groups begin in the order of the calls."""
        self.waiting.append(request)
        self._begin()

    def update_weights(self, version, keep_cache=False):
        """The same as Engine.update_weights, after which the groups begin that have waited for this version."""
        self.engine.update_weights(version, keep_cache)
        self._begin()

    def step(self):
        """One step of the engine: list of the GroupRequests that it completes."""
        output, complete = self.engine.step(), []
        self.num_tokens += len(output.token_ids)
        for number, index, completion in output.finished:
            request = self.running[number]
            request.done[index] = completion
            if request.is_complete:
                complete.append(self._leave(number))
        return complete

    def take_begun(self):
        """Numbers of the groups that the engine has begun to compute since the last call: list.

        Until then they wait for weights, or for their turn in the engine.
        """
        if not self._queued:
            return []
        scheduler = self.engine.scheduler
        running = {sequence.request_id for sequence in scheduler.table.sequences[scheduler.running]}
        begun = [number for number in self._queued if number in running]
        for number in begun:
            del self._queued[number]
        return begun

    def interrupt(self, number):
        """Take a group back: its GroupRequest with what is done and begun, or None if this engine does not have it.

        It may be complete by now.
        """
        for request in self.waiting:
            if request.number == number:
                self.waiting.remove(request)
                return request
        if number not in self.running:
            return None
        (begun, outputs), request = self.engine.interrupt(number), self._leave(number)
        for output in outputs:
            # Computed, and not yet returned by a step.
            self.num_tokens += output.num_tokens
            request.done.update({index: completion for _, index, completion in output.finished})
        return replace(request, begun=begun)

    def _leave(self, number):
        """The GroupRequest of a group that is in the engine no more."""
        self._queued.pop(number, None)
        return self.running.pop(number)

    def _begin(self):
        while self._can_begin:
            request = self.waiting.popleft()
            # Its own dict: the sender keeps the request, to give it out again.
            request = replace(request, done=dict(request.done))
            there = {*request.done, *(sequence.index for sequence in request.begun)}
            missing = [index for index in range(request.params.n) if index not in there]
            self.engine.add_request(request.number, request.prompt_token_ids, request.params, indices=missing)
            self.engine.move_in(request.begun)
            self.running[request.number], self._queued[request.number] = request, None
