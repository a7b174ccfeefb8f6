"""Outputs of requests while they grow: what LLM.stream yields, and AsyncLLM.generate."""

import numpy as np

from rlnumba.engine.core import PromptError
from rlnumba.engine.episodes import Episodes, GroupRequest
from rlnumba.engine.requests.logprobs import cut, entries
from rlnumba.engine.requests.text_stream import TextOptions, TextStream
from rlnumba.engine.sequence import Completion, RequestOutput


class OpenRequest:
    """A request of Streams. prompt: its text, or None."""

    def __init__(self, engine, request, prompt):
        self.engine, self.request, self.prompt = engine, request, prompt
        # Of each completion; and those that are done, by index.
        self.streams, self.token_ids, self.logprobs, self.listed = ([None] * request.params.n for _ in range(4))
        self.done = {}
        # Tokens of each completion in the last output; one with fewer is of a request that is drawn again.
        self.sent = [0] * request.params.n
        self.begin_again()

    def begin_again(self):
        """Forget the tokens of the completions that are drawn again: all that are not done."""
        params = self.request.params
        options = TextOptions(params.stop, params.skip_special_tokens)
        for index in {*range(params.n)} - self.done.keys():
            self.streams[index] = TextStream(self.engine.tokenizer, options)
            self.token_ids[index], self.logprobs[index], self.listed[index] = [], [], []

    def add(self, index, token_id, logprob, listing):
        """Take in a token of completion `index`."""
        self.token_ids[index].append(token_id)
        self.logprobs[index].append(logprob)
        self.streams[index].feed([token_id])
        if self.request.params.num_logprobs >= 0:
            self.listed[index].append(entries(listing, token_id, self.engine.token_text))

    def output(self):
        """The RequestOutput of what there is."""
        completions = [self.done.get(index) or self._growing(index) for index in range(self.request.params.n)]
        self.sent = list(map(len, self.token_ids))
        number, ids = str(self.request.number), self.request.prompt_token_ids
        return RequestOutput(list(ids), completions, self.prompt, number)

    def _growing(self, index):
        stream, params = self.streams[index], self.request.params
        is_wanted = params.logprobs or params.num_logprobs >= 0
        logprobs = np.array(self.logprobs[index] if is_wanted else [], np.float32)
        completion = Completion(
            np.array(self.token_ids[index], np.int32), logprobs, None, stream.text[: stream.num_sent]
        )
        completion.index = index
        if params.num_logprobs >= 0:
            completion.top_logprobs = list(self.listed[index])
        elif params.logprobs is None:
            completion.logprobs = None
        return completion

    @property
    def has_grown(self):
        """Whether the next output goes on from the last one."""
        counts = list(map(len, self.token_ids))
        return counts != self.sent and all(count >= sent for count, sent in zip(counts, self.sent, strict=True))


class Streams:
    """The requests of an Engine whose outputs are wanted after every step."""

    def __init__(self, engine):
        self.engine, self.episodes, self.open = engine, Episodes(engine), {}
        # What `settle` has found and `step` has not yet returned.
        self.ended = []

    def submit(self, number, prompt, params, adapter_id=-1):
        """Begin a request; prompt: a text or token ids. Raises PromptError and ConfigError."""
        params = params.seeded()
        ids, _ = self.engine.check_request(number, prompt, params)
        request = GroupRequest(number, ids.tolist(), params, adapter_id=adapter_id)
        self.episodes.submit(request)
        self.open[number] = OpenRequest(self.engine, request, prompt if isinstance(prompt, str) else None)

    def step(self):
        """One step: (number, RequestOutput or the PromptError that ends it) of requests that have grown: list."""
        if self.ended:
            ended, self.ended = self.ended, []
            return ended
        try:
            complete = self.episodes.step()
        except PromptError as error:
            return self._drop(error)
        output = self.episodes.output
        if output is None:
            return []
        grown = self._take(output)
        for request in complete:
            del self.open[request.number]
        return grown

    def settle(self):
        """Let the device end what it was given: nothing is in flight then. The next steps return what it found."""
        while True:
            try:
                self.engine.synchronize()
                return
            except PromptError as error:
                self.ended += self._drop(error)

    def _drop(self, error):
        """End the requests of a PromptError, and begin all others again: what `step` returns."""
        self.episodes.begin_again(error.request_ids)
        for number in error.request_ids:
            del self.open[number]
        for request in self.open.values():
            request.begin_again()
        return [(number, type(error)(number, error.reason)) for number in error.request_ids]

    def _take(self, output):
        """Take in a StepOutput: what `step` returns."""
        listings = [None] * output.num_tokens if output.listings is None else output.listings
        columns = output.sequences, output.token_ids.tolist(), output.logprobs.tolist(), listings
        numbers = {}
        for sequence, token_id, logprob, listing in zip(*columns, strict=True):
            number = numbers[sequence.request_id] = sequence.request_id
            if listing is not None:
                listing = cut(listing, sequence.params.num_logprobs)
            self.open[number].add(sequence.index, token_id, logprob, listing)
        for number, index, completion in output.finished:
            self.open[number].done[index] = completion
        return [(number, self.open[number].output()) for number in numbers if self.open[number].has_grown]

    def abort(self, number):
        """Drop a request; nothing happens if it has ended."""
        if self.open.pop(number, None) is not None:
            self.episodes.abort(number)

    def reset(self):
        """Drop all requests: after any exception."""
        self.episodes.reset()
        self.open.clear()
