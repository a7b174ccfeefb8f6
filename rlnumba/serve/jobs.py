"""One HTTP request between the server's thread and the engine's.

The server's thread makes an ApiJob, gives it to EngineLoop.submit, and awaits its deltas; the engine's thread sends
them for all jobs together, once a step or less often.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from rlnumba.engine.sequence import Completion


@dataclass
class Delta:
    """Tokens that were drawn for choice `choice` of a job; completion: the whole of it, with its last delta.

    listings: of each token, as engine/requests/logprobs.py has them, if any were asked for. version: the engine's
    policy version of the last token, None without a token that a stream is to have.
    """

    choice: int
    token_ids: list[int]
    logprobs: list[float]
    completion: Completion | None = None
    listings: list = field(default_factory=list)
    version: int | None = None


@dataclass
class Times:
    """Seconds of time.monotonic at which a prompt arrived, was begun, and got its first token."""

    arrived: float
    begun: float | None = None
    first: float | None = None
    last: float | None = None


class ApiJob:
    """Prompts with their SamplingParams, a GroupRequest each. streams: whether each step's tokens are wanted.
    session_id: the request's X-Session-ID, which names a rollout of an agent; an engine does not need it.

    Choices are prompt-major: completion i of prompt p is choice p n + i. adapter: the name of one, or None.
    """

    def __init__(self, request_id, prompts, params, streams, cache_salt="", adapter=None):
        self.request_id, self.prompts, self.params = request_id, prompts, params
        self.streams, self.cache_salt, self.adapter = streams, cache_salt, adapter
        self.n = params[0].n
        self.times = [Times(time.monotonic()) for _ in prompts]
        # Numbers of its groups in the engine, which has one for each prompt.
        self.numbers = []
        self.inbox = Inbox()
        # Completions whose end was not taken from the inbox.
        self.unfinished = len(prompts) * self.n
        self.accepted = asyncio.get_running_loop().create_future()
        # Its Booking, which the job's end gives back.
        self.places = self.session_id = None

    @property
    def num_choices(self):
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self):
        return sum(map(len, self.prompts))

    async def taken(self):
        """Return once the engine has taken the job, which it does not while it waits for a pause. Raises ApiError."""
        await self.accepted

    async def deltas(self):
        """The Deltas that have come since the last call, at most one for each choice; waits for one.

        Raises the job's ApiError. Nothing is lost if the call is cancelled.
        """
        deltas = merged(await self.inbox.take())
        self.unfinished -= sum(delta.completion is not None for delta in deltas)
        return deltas

    async def completions(self):
        """All Completions, in the order of the choices. Raises the job's ApiError."""
        await self.accepted
        found = [None] * self.num_choices
        while self.unfinished:
            for delta in await self.deltas():
                found[delta.choice] = delta.completion or found[delta.choice]
        return found

    # Events of the engine's thread, in the server's.

    def accept(self, _):
        """The engine has taken it."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def begin(self, prompt):
        """The engine has begun a prompt."""
        self.places.release_tokens(len(self.prompts[prompt]))

    def end_choice(self, _):
        """A completion has ended."""
        self.places.release(1)

    def fail(self, error):
        """The job ends with an ApiError."""
        if self.accepted.done():
            self.inbox.fail(error)
        else:
            self.accepted.set_exception(error)


def merged(deltas):
    """Deltas with those of one choice joined, in the order in which the choices came first."""
    by_choice = {}
    for delta in deltas:
        if (first := by_choice.setdefault(delta.choice, delta)) is not delta:
            first.token_ids += delta.token_ids
            first.logprobs += delta.logprobs
            first.completion = delta.completion
            first.listings += delta.listings
            first.version = first.version if delta.version is None else delta.version
    return list(by_choice.values())


@dataclass
class Inbox:
    """Deltas that wait for the handler of a request, and the error that ends it. The server's thread has it alone."""

    items: deque = field(default_factory=deque)
    error: Exception | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, delta):
        self.items.append(delta)
        self.ready.set()

    def fail(self, error):
        self.error = error
        self.ready.set()

    async def take(self):
        """All Deltas that have come, at least one; raises the error once these have been taken."""
        await self.ready.wait()
        if not self.items:
            raise self.error
        items = list(self.items)
        self.items.clear()
        if self.error is None:
            self.ready.clear()
        return items
