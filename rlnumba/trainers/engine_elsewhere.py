"""An engine elsewhere: the inference processes of an asynchronous run draw what the trainer's own would.

For ranks that have a part of the weights each (parallel/layer_shards.py), which generate nothing themselves. The
completions drawn so are an evaluation's, and are not trained on.

    EngineElsewhere.add_request, on all ranks  ->  GroupsApart.submit, on rank 0  ->  inference processes
    EngineElsewhere.step, on all ranks         <-  what is complete, of rank 0    <-

The processes compute it between the groups that are trained on, with the weights that were pushed last. A completion
depends on these, seed, prompt and index alone, so it is the one that the trainer's own engine would draw.
"""

import queue
from dataclasses import replace

import numpy as np

from rlnumba.engine.core import FinishedCompletion, longest_sequence
from rlnumba.engine.episodes import GroupRequest
from rlnumba.engine.sequence import SamplingParams
from rlnumba.sampling.inference import InferenceError
from rlnumba.sampling.replicas import RoundOutput


class EngineElsewhere:
    """The interface of Engine, on all ranks of an asynchronous run: all make the same calls and have all results.

    model_config: ModelConfig; config: EngineConfig. ahead: the Ahead of the run, to be set before the first request.
    """

    def __init__(self, model_config, config):
        self.config, self.max_model_len = config, longest_sequence(model_config, config)
        self.ahead, self.unfinished = None, {}

    @property
    def has_unfinished(self):
        return bool(self.unfinished)

    @property
    def policy_version(self):
        return 0

    def check_request(self, request_id, prompt, params):
        """The prompt as an array, and the most tokens that a sequence has: it is the processes that check it."""
        return np.asarray(prompt, np.int32), self.max_model_len

    def move_in(self, sequences):
        """Nothing: none was begun."""

    def add_request(self, request_id, prompt, params=None, adapter_id=-1, indices=None):
        """Add a request as Engine.add_request does; prompt: token ids.

        A request that cannot be run ends the run once an inference process is given it.
        """
        params = params or SamplingParams()
        if request_id in self.unfinished:
            raise ValueError(f"add_request: {request_id!r} is unfinished")
        self.unfinished[request_id] = params.n
        prompt = np.asarray(prompt, np.int32)
        self.ahead.submit_apart(request_id, prompt.tolist(), params)
        return prompt

    def step(self):
        """The completions that have ended since the last step: RoundOutput. Raises InferenceError."""
        finished = [
            FinishedCompletion(request_id, index, completion)
            for request_id, completions in self.ahead.take_apart()
            for index, completion in enumerate(completions)
        ]
        for request_id, _, _ in finished:
            self.unfinished.pop(request_id, None)
        return RoundOutput(finished, sum(len(each.completion.token_ids) for each in finished))

    def reset(self):
        """Forget all requests, as Engine.reset does."""
        self.unfinished = {}
        self.ahead.forget_apart()

    def update_weights(self, version):
        """Nothing: weights are pushed."""

    def sleep(self):
        """Nothing: there is no cache here."""

    def wake(self):
        """Nothing."""


class GroupsApart:
    """Groups that are drawn between those that are trained on, on rank 0. options: AsyncConfig.

    Their numbers are below 0, so that they are none of the others'.
    """

    def __init__(self, options):
        self.options, self.next_number = options, -1
        # {number: (the name that was asked for, how often it was given out)}, and what is complete.
        self._asked, self._complete = {}, queue.SimpleQueue()

    def submit(self, engines, name, prompt, params, version):
        """Give a group out. name: hashable; prompt: list of token ids; version: of the weights that draw it."""
        self._asked[self.next_number] = name, 1
        engines.submit(GroupRequest(self.next_number, prompt, params, version))
        self.next_number -= 1

    def take(self, wait_s):
        """[(name, list of Completion)] of what is complete; waits so many seconds for the first."""
        found = []
        try:
            while True:
                request = self._complete.get(timeout=0.0 if found else wait_s)
                if request.number in self._asked:
                    found.append((self._asked.pop(request.number)[0], request.completions))
        except queue.Empty:
            return found

    def forget(self):
        """Nothing that was given out is asked for any more."""
        self._asked.clear()

    def has(self, request):
        """Whether a GroupRequest that an engine gives back is one of these."""
        return request.number < 0

    def finished(self, request):
        """An engine has completed a group; called in any thread."""
        self._complete.put(request)

    def expired(self, engines, request):
        """An engine has given a group back; called in any thread. Raises InferenceError after max_attempts."""
        if request.number not in self._asked:
            return
        name, attempts = self._asked[request.number]
        if attempts == self.options.max_attempts:
            raise InferenceError(
                f"a prompt of the evaluation takes longer than async.rollout_timeout_s "
                f"({self.options.rollout_timeout_s:g} s), {attempts} times (async.max_attempts)"
            )
        self._asked[request.number] = name, attempts + 1
        engines.submit(request if self.options.partial_rollouts else replace(request, done={}, begun=[]))
