"""The main thread: the engine's steps, between which the commands of the server's thread are carried out.

    loop.submit(job)            the job's prompts become episodes before the next step
    loop.cancel(job)            they are dropped before the next step, and their blocks are free
    loop.call(function)         its result, computed between two steps: a concurrent Future
    loop.control                pause, weights and sleep, for `call`
    loop.run(ends)              the steps, until ends() is true

Only this thread uses the engine. What it sends to the server's thread goes there once a step, or, where that thread has
not ended with what it got before, after several: the tokens of one choice are then one Delta.
"""

import itertools
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from rlnumba.engine.adapters import LoadedAdapter, NamedAdapters
from rlnumba.engine.core import GrammarError, PromptError
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.requests.logprobs import cut
from rlnumba.errors import ConfigError, UserError
from rlnumba.serve.control import EngineControl
from rlnumba.serve.jobs import ApiJob, Delta
from rlnumba.serve.protocol.errors import ApiError, internal_error, no_model, weights_changed
from rlnumba.serve.protocol.sampling import as_api_error

# An idle engine looks this often whether the process is to end: a signal interrupts no wait.
IDLE_S = 0.1
# An idle engine that gets a request waits for those that arrive with it, so that their prompts are computed together:
# as long as the server's thread reads some, or each comes within GATHER_S of the last, and at most MAX_GATHER_S. Steps
# of few prompts would take Python's lock from the thread that reads the others.
GATHER_S, MAX_GATHER_S = 0.0005, 0.05


@dataclass
class PromptGroup:
    """A prompt of a job in the engine. left: its completions that have not ended; adapter: LoadedAdapter or None.

    version: that of the weights that it began with.
    """

    job: ApiJob
    prompt: int
    left: int
    adapter: LoadedAdapter | None
    version: int = 0

    def delta(self, index):
        """An empty Delta of its completion `index`."""
        return Delta(self.prompt * self.job.n + index, [], [])


@dataclass(frozen=True)
class EngineState:
    """Counts of the engine after its last step, for /metrics. used_blocks: those that sequences refer to."""

    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0


class EngineLoop:
    """The engine behind a queue of commands. metrics: a ServerMetrics, whose counters are those of this thread.

    max_loras: adapters at a time. outlet: the ServerThread, set before the loop runs. num_arriving: called for the
    number of requests that are being read.
    """

    def __init__(self, engine, metrics, max_loras=0):
        self.engine, self.metrics, self.outlet, self.num_arriving = engine, metrics, None, lambda: 0
        self.adapters = NamedAdapters(engine, max_loras)
        self.episodes = Episodes(engine)
        self.commands = SimpleQueue()
        self.numbers = itertools.count()
        # The PromptGroups in the engine, by their numbers.
        self.groups = {}
        # Tokens of a choice that were sent, {(number, index): count}, and of those drawn again, how many to leave out.
        self.sent, self.drawn_again = {}, {}
        # (function, argument) for the server's thread, and the Deltas among them that may get more tokens, by choice.
        self.outgoing, self.deltas = [], {}
        self.state = EngineState()
        self.control = EngineControl(self)

    # Called by the server's thread.

    def submit(self, job):
        self.commands.put(partial(self._submit, job))

    def cancel(self, job):
        self.commands.put(partial(self._cancel, job))

    def go_on(self):
        """The server's thread is ready for what an engine without work would keep until its next look."""
        self.commands.put(nothing)

    def call(self, function, *arguments):
        """The Future of a function's result, or of its UserError, called between two steps."""
        future = Future()

        def command():
            try:
                future.set_result(function(*arguments))
            except UserError as error:
                future.set_exception(error)

        self.commands.put(command)
        return future

    # The engine's thread.

    def run(self, ends):
        """Steps and commands until ends() is true. A failure of the engine ends all jobs, and is raised."""
        try:
            while not ends():
                self._carry_out_commands()
                if self.engine.model.ranks is not None:
                    self.engine.model.ranks.meet_if_due()
                self._flush()
                if not self.episodes.is_idle and not self.control.is_stopped:
                    self._step()
                self.control.after_step()
                if self.adapters.has_unused:
                    self.settle()
                    self.adapters.collect()
                self._note_state()
                self._flush()
        except BaseException:
            self.end_all(internal_error())
            raise

    def end_all(self, error):
        """End all jobs with an ApiError."""
        for job in [*self.jobs(), *self.control.held]:
            self.outgoing.append((job.fail, error))
            self._cancel(job)
        self._deliver()

    def jobs(self):
        """The jobs that the engine has: list."""
        return list({id(group.job): group.job for group in self.groups.values()}.values())

    def settle(self):
        """Let the device end what it was given, and send the tokens: nothing is in flight then."""
        while True:
            try:
                self.engine.synchronize()
                break
            except PromptError as error:
                self._drop_damaged(error)
        while self.engine.outputs:
            self._step()

    def load_adapter(self, name, folder, read, in_place):
        """Have an adapter, as NamedAdapters.load does, between two steps."""
        self.settle()
        self.adapters.load(name, folder, read, in_place)

    def cut_short(self, jobs):
        """End jobs that the engine has with the tokens that they have so far."""
        self.settle()
        for number in [number for job in jobs for number in job.numbers if number in self.groups]:
            finished = self.engine.cut_short(number)
            self.episodes.abort(number)
            self.metrics.abort(len(finished))
            for _, index, completion in finished:
                self._end_choice(number, index, completion)
            self._forget(number)

    def _carry_out_commands(self):
        """Every command in the queue; an engine without work waits for one."""
        waits = self.episodes.is_idle or self.control.is_stopped
        try:
            command = self.commands.get(timeout=IDLE_S) if waits else self.commands.get_nowait()
            end = time.monotonic() + (MAX_GATHER_S if waits else 0)
            while True:
                command()
                command = self._next_command(end)
        except Empty:
            pass

    def _submit(self, job):
        if not self.control.holds(job):
            self.take(job)

    def _next_command(self, end):
        """The next command of the queue. Raises Empty; where an idle engine has got requests, not before others have
        stopped to arrive, or the time is `end`."""
        while not self.episodes.is_idle and not self.control.is_stopped and time.monotonic() < end:
            try:
                return self.commands.get(timeout=GATHER_S)
            except Empty:
                if not self.num_arriving():
                    break
        return self.commands.get_nowait()

    def take(self, job):
        """Give a job to the engine."""
        for index, (prompt, params) in enumerate(zip(job.prompts, job.params, strict=True)):
            number, adapter = next(self.numbers), None
            try:
                if job.adapter is not None and (adapter := self.adapters.acquire(job.adapter)) is None:
                    # Unloaded since its name was looked up.
                    raise no_model(job.adapter)
                adapter_id = -1 if adapter is None else adapter.adapter_id
                request = GroupRequest(number, prompt, params, adapter_id=adapter_id, cache_salt=job.cache_salt)
                self.episodes.submit(request)
            except (PromptError, ConfigError, ApiError) as error:
                if adapter is not None:
                    self.adapters.release(adapter)
                self._cancel(job)
                self.outgoing.append((job.fail, of_engine(error)))
                return
            job.numbers.append(number)
            self.groups[number] = PromptGroup(job, index, job.n, adapter)
        self.outgoing.append((job.accept, None))

    def _cancel(self, job):
        self.control.drop(job)
        for number in job.numbers:
            if number in self.groups:
                self.metrics.abort(self.groups[number].left)
                self.episodes.abort(number)
                self._forget(number)

    def _forget(self, number):
        group = self.groups.pop(number)
        if group.adapter is not None:
            self.adapters.release(group.adapter)
        for index in range(group.job.n):
            self.sent.pop((number, index), None)
            self.drawn_again.pop((number, index), None)

    def _step(self):
        started = time.monotonic()
        try:
            complete = self.episodes.step()
        except PromptError as error:
            self._drop_damaged(error)
            return
        now = time.monotonic()
        self._note_begun(started)
        self._send(self.episodes.output, started, now)
        for request in complete:
            group = self.groups[request.number]
            self.metrics.end_prompt(group.job.times[group.prompt], now)
            self._forget(request.number)

    def _note_begun(self, started):
        for number in self.episodes.take_begun():
            self._begin(self.groups[number], started)

    def _begin(self, group, started):
        group.version = self.engine.policy_version
        group.job.times[group.prompt].begun = started
        self.outgoing.append((group.job.begin, group.prompt))

    def _drop_damaged(self, error):
        """End the requests that cannot go on; the tokens of all others are drawn again, and are equal.

        Those that have tokens of other weights cannot be drawn again: their clients have to ask again.
        """
        self.episodes.begin_again(error.request_ids)
        status = 500 if isinstance(error, GrammarError) else 400
        failures = {self.groups[number].job: ApiError(error.reason, status=status) for number in error.request_ids}
        for group in self.groups.values():
            if group.job.times[group.prompt].begun is not None and group.version != self.engine.policy_version:
                failures.setdefault(group.job, weights_changed())
        for job, failure in failures.items():
            self.outgoing.append((job.fail, failure))
            self._cancel(job)
        self.drawn_again = dict(self.sent)

    def _send(self, output, started, now):
        """Queue the Deltas of a step: of a job that streams all tokens, of others the completions that ended."""
        streamed = set()
        for number, count in Counter([sequence.request_id for sequence in output.sequences]).items():
            group = self.groups[number]
            times = group.job.times[group.prompt]
            if times.begun is None:  # it has ended with its first step
                self._begin(group, started)
            self.metrics.tokens(times, len(group.job.prompts[group.prompt]), count, now)
            if group.job.streams:
                streamed.add(number)
        sent, drawn_again, deltas = self.sent, self.drawn_again, self.deltas
        for sequence, token, logprob, listing in self._tokens_of(output, streamed):
            key = sequence.request_id, sequence.index
            if drawn_again and drawn_again.get(key):
                drawn_again[key] -= 1
                continue
            sent[key] = sent.get(key, 0) + 1
            delta = deltas.get(key) or self._open_delta(key)
            delta.version = output.policy_version
            delta.token_ids.append(token)
            delta.logprobs.append(logprob)
            if listing is not None and sequence.params.num_logprobs >= 0:
                delta.listings.append(cut(listing, sequence.params.num_logprobs))
        for number, index, completion in output.finished:
            group = self.groups[number]
            self.metrics.end_choice(len(group.job.prompts[group.prompt]), completion)
            self._end_choice(number, index, completion)

    def _open_delta(self, key):
        """A new Delta of a choice, (number of its group, index), which is queued."""
        number, index = key
        group = self.groups[number]
        delta = self.deltas[key] = group.delta(index)
        self.outgoing.append((group.job.inbox.put, delta))
        return delta

    def _end_choice(self, number, index, completion):
        """Queue a Completion of a group, with the last of its tokens that are queued, if any are."""
        key, group = (number, index), self.groups[number]
        group.left -= 1
        delta = self.deltas.pop(key, None) or self._open_delta(key)
        delta.completion = completion
        self.outgoing.append((group.job.end_choice, None))

    @staticmethod
    def _tokens_of(output, numbers):
        """(Sequence, token id, log-prob, listing) of the tokens of a step that groups with these numbers got: list."""
        if not numbers:
            return []
        listings = itertools.repeat(None, output.num_tokens) if output.listings is None else output.listings
        columns = output.sequences, output.token_ids.tolist(), output.logprobs.tolist(), listings
        return [each for each in zip(*columns, strict=True) if each[0].request_id in numbers]

    def _flush(self):
        if self.outgoing and self.outlet.is_ready:
            self._deliver()

    def _deliver(self):
        events, self.outgoing, self.deltas = self.outgoing, [], {}
        self.outlet.deliver(events)

    def _note_state(self):
        engine, blocks = self.engine, self.engine.blocks
        num_running = len(engine.scheduler.running)
        used = blocks.num_blocks - blocks.num_free
        waiting = engine.num_unfinished - num_running
        self.state = EngineState(num_running, waiting, used, blocks.num_blocks, engine.num_preemptions)


def nothing():
    """A command that only ends the wait for one."""


def of_engine(error):
    """The ApiError of an error with which the engine has refused a request."""
    if isinstance(error, ApiError):
        return error
    return ApiError(error.reason) if isinstance(error, PromptError) else as_api_error(error)
