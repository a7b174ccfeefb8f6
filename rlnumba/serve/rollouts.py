"""A server whose requests are turns of a run's rollouts: agents of other packages draw from the run's own engine.

    server = RolloutServer(name, tokenizer, max_model_len)     listens on a free port, with a random key
    turns = server.open(session_id)                            the requests with this X-Session-ID
    request = turns.next().result()                            the next one, a TurnRequest; None after `turns.end()`
    request.answer(completion)
    server.close()

The server has no engine. Who plays the rollout has each turn drawn, in an episode's coroutine
(rlnumba/engine/episodes.py), so that a turn has the weights, the noise and the order that all turns of a run have.
"""

import secrets
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

from rlnumba.config import EngineConfig
from rlnumba.engine.requests.grammars import Grammars
from rlnumba.serve.app import make_app
from rlnumba.serve.jobs import Delta
from rlnumba.serve.metrics import ServerMetrics
from rlnumba.serve.process import ServerThread
from rlnumba.serve.protocol.errors import ApiError, too_long
from rlnumba.serve.service import Parsers, Service
from rlnumba.serve.settings import ServerSettings
from rlnumba.serve.watch.listen import bind, url_of

HOST = "127.0.0.1"
# Requests wait for their turns without a bound: there are as many as the rollouts of the run have agents.
MOST_WAITING = 1 << 30
# A policy may draw ids that its tokenizer does not have; the engine that draws knows which there are.
MOST_IDS = 2**31 - 1


class TurnRequest:
    """A request for one turn. context: token ids; params: its SamplingParams."""

    def __init__(self, job, deliver):
        self._job, self._deliver = job, deliver
        self.context, self.params = job.prompts[0], job.params[0]

    def answer(self, completion):
        """Answer with a Completion; called in any thread, once, as are those below."""
        delta = Delta(0, [], [], completion)
        self._deliver([(self._job.begin, 0), (self._job.inbox.put, delta), (self._job.end_choice, None)])

    def refuse(self, limit):
        """Answer that the context leaves no room in `limit` tokens, in the words that agents look for."""
        self._fail(too_long(limit, len(self.context), 1, "token_ids"))

    def drop(self):
        """Answer that there is no such rollout any more."""
        self._fail(ApiError("the rollout is over", status=404))

    def _fail(self, error):
        self._deliver([(self._job.fail, error)])


class Turns:
    """The TurnRequests of a session, in the order in which they came. Any thread may call its methods."""

    def __init__(self):
        self._lock, self._queue, self._waiter, self._is_over = threading.Lock(), deque(), None, False
        # The request that was taken last; it may have been answered.
        self._taken = None

    def put(self, request):
        """Queue a TurnRequest."""
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._queue.append(request)
                self._wake()
        if is_over:
            request.drop()

    def drop(self):
        """The rollout is over: requests that wait, or were taken and not answered, get an error."""
        with self._lock:
            left, self._is_over = [*([] if self._taken is None else [self._taken]), *self._queue], True
            self._queue.clear()
        for request in left:
            request.drop()

    def end(self):
        """No more requests come."""
        with self._lock:
            self._is_over = True
            self._wake()

    def next(self):
        """The Future of the next TurnRequest, None once there are no more; one at a time is waited for."""
        with self._lock:
            self._waiter = found = Future()
            self._wake()
        return found

    def _wake(self):
        if self._waiter is None or not (self._queue or self._is_over):
            return
        waiter, self._waiter = self._waiter, None
        # Who waited may have given up.
        if waiter.set_running_or_notify_cancel():
            self._taken = self._queue.popleft() if self._queue else None
            waiter.set_result(self._taken)


class ServedEngine:
    """The parts of an engine that a Service reads. The run's engine, which draws the turns, is elsewhere."""

    # As many as are asked for are drawn; those of an engine are the run's.
    max_num_seqs, config = 0, EngineConfig()

    def __init__(self, tokenizer, max_model_len):
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.grammars = Grammars(tokenizer, MOST_IDS, ())
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=MOST_IDS))


class RolloutLoop:
    """The place of an EngineLoop behind the routes: jobs go to the Turns of their sessions. deliver: ServerThread's."""

    def __init__(self, engine, deliver):
        self.engine, self.deliver, self.sessions = engine, deliver, {}
        # Versions of the weights are the run's.
        self.control = self

    def version(self, policy_version=None):
        """The name of a policy version in answers."""
        return policy_version

    def submit(self, job):
        """Queue a job of one prompt; an unknown session, or more than one completion, is refused."""
        turns = self.sessions.get(job.session_id)
        if turns is None:
            raise ApiError("X-Session-ID is that of no rollout", status=404)
        if job.num_choices != 1 or job.streams:
            raise ApiError("a turn of a rollout is one completion of one prompt, and is not streamed")
        job.accept(None)
        turns.put(TurnRequest(job, self.deliver))

    def cancel(self, job):
        """Nothing: the turn of a client that is gone is drawn all the same, so that the others do not depend on it."""


class RolloutServer:
    """See the module's docstring. name: of the model; url: without /v1; key: of the Authorization header."""

    def __init__(self, name, tokenizer, max_model_len):
        self.key = secrets.token_urlsafe(32)
        limits = {"max_num_queued_reqs": MOST_WAITING}
        settings = ServerSettings((name,), name, host=HOST, port=0, api_key=self.key, **limits)
        self.loop = RolloutLoop(ServedEngine(tokenizer, max_model_len), lambda events: thread.deliver(events))
        self.service = Service(settings, self.loop, Parsers(tokenizer, "none", "none"), ServerMetrics(name))
        bound = bind(HOST, 0)
        self.thread = thread = ServerThread(make_app(self.service), bound)
        self.url = url_of(bound, HOST)
        thread.start()

    def open(self, session_id, turns=None):
        """The Turns of a session, new ones or those of another session, which then has the same."""
        return self.loop.sessions.setdefault(session_id, Turns() if turns is None else turns)

    def forget(self, session_ids):
        """These sessions are over; what waits for an answer gets an error."""
        for each in session_ids:
            if (turns := self.loop.sessions.pop(each, None)) is not None:
                turns.drop()

    def close(self):
        """Close the connections and end the thread."""
        self.service.is_ending = True
        self.thread.stop()
        self.service.pool.shutdown(wait=False, cancel_futures=True)
