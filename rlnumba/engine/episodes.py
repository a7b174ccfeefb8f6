"""The episodes of an engine: the one driver over its add_request, step and abort.

    episodes.submit(request)              queued until the weights are of request.version or newer
    episodes.step() -> finished requests  one step of the engine
    episodes.update_weights(version)      the weights have been written, between two steps

The form of an episode is a GroupRequest: the completions of one prompt. An interrupted one goes on elsewhere from the
tokens that it has: its text stays the same, as long as the weights do. Given out without them, here or elsewhere, it is
drawn afresh.
"""

import time
from collections import deque
from dataclasses import dataclass, field, replace

from rlnumba.engine.sequence import Completion, SamplingParams, Sequence


@dataclass(frozen=True)
class GroupRequest:
    """The params.n completions of a prompt. number: the group's; version: the oldest weights that may begin it.

    done, begun: what an earlier attempt has finished, {index: Completion}, and the Sequences that it has begun.
    adapter_id: as Engine.add_request has it.
    """

    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    version: int = 0
    done: dict[int, Completion] = field(default_factory=dict)
    begun: list[Sequence] = field(default_factory=list)
    adapter_id: int = -1

    @property
    def completions(self):
        """All completions in their order, once they are done: list."""
        return [self.done[index] for index in range(self.params.n)]

    @property
    def is_complete(self):
        return len(self.done) == self.params.n


class Episodes:
    """The GroupRequests of an Engine. num_tokens, num_finished: tokens and completions drawn so far."""

    def __init__(self, engine):
        self.engine = engine
        # GroupRequests that wait for weights, and those in the engine, by number.
        self.waiting, self.running = deque(), {}
        # Numbers of those in the engine that it has computed nothing of yet: a dict without values, for the order.
        self._queued = {}
        self.num_tokens = self.num_finished = 0

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
        """One step of the engine: list of the GroupRequests that it completes. Raises as Engine.step."""
        output, complete = self.engine.step(), []
        self.num_tokens += output.num_tokens
        self.num_finished += len(output.finished)
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

    def begin_again(self, damaged):
        """After a PromptError of `step`, whose request_ids `damaged` are: drop these, and let all others go on.

        Their tokens are drawn again, with the same result: they depend on prompt, index and position alone.
        """
        self.engine.reset()
        for number in damaged:
            self._leave(number)
        for request in self.running.values():
            self._enter(request)

    def abort(self, number):
        """Drop a group; nothing happens if it is not here, as when it has just finished."""
        self.waiting = deque(request for request in self.waiting if request.number != number)
        if number in self.running:
            self.engine.abort(number)
            self._leave(number)

    def reset(self):
        """Drop all groups and the content of the cache: after any exception."""
        self.engine.reset()
        self.waiting.clear()
        self.running.clear()
        self._queued.clear()

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
            self._enter(request)
            self.engine.move_in(request.begun)
            # Its own dict: the sender keeps the request, to give it out again.
            self.running[request.number] = replace(request, done=dict(request.done), begun=[])
            self._queued[request.number] = None

    def _enter(self, request):
        """Add what is neither done nor begun of a request to the engine."""
        there = {*request.done, *(sequence.index for sequence in request.begun)}
        missing = [index for index in range(request.params.n) if index not in there]
        self.engine.add_request(request.number, request.prompt_token_ids, request.params, request.adapter_id, missing)


def run_for(engine, seconds):
    """Steps of an Engine for so many seconds, at least one while it has something to do: (finished, tokens sampled).

    finished: list of FinishedCompletion. For an engine that has a part of the completions of its requests.
    """
    until, finished, num_tokens = time.monotonic() + seconds, [], 0
    while engine.has_unfinished:
        output = engine.step()
        finished += output.finished
        num_tokens += output.num_tokens
        if time.monotonic() >= until:
            break
    return finished, num_tokens
