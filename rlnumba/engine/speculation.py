"""Speculative decoding: which drafts steps verify, and when that is faster than decode.

A step with drafts computes, of each sequence, the last token and up to k drafts of those after it, and samples at all
of these positions. Noise depends on the position alone, and the bits of a row on the tokens before it alone: if a draft
equals the token sampled before it, the next sample is the one that decode would have drawn. So the text is the same,
log-probs included, and a sequence gets 1 to k + 1 tokens from a step.

Such a step takes longer than one of decode, and the host must read its results before the next one. Whether it pays
depends on the text, and is measured: the seconds of a step of each kind, and the tokens that a sequence gets from a
step with drafts. The latter are counted while nothing is speculated, too: drafts are proposed and compared with the
tokens that decode samples.
"""

from collections import defaultdict

from rlnumba.engine.ngram import NgramIndex
from rlnumba.runtime import device

# In larger batches a step with drafts computes too many tokens to be as fast as one of decode.
MAX_NUM_SEQS = 8
# Tokens that enter the indexes in a step, when a large batch has become small: less than 0.1 ms of the host, in which
# the device computes a step.
TOKENS_AT_ONCE = 64
# Weight of the latest value in exponential means.
LATEST = 1 / 8
# Speculation begins where it should be this much faster, and ends where it is no faster than this.
START, STOP = 1.1, 1.03
# Seconds of a step with drafts, in those of decode, until some were measured.
FIRST_GUESS = 1.5
# After so many steps of decode what was measured may be out of date, and steps with drafts are tried again, where their
# drafts are good enough for FIRST_GUESS. The number doubles with each trial after which speculation ended at once.
RETRY_STEPS, TRIAL_STEPS = 1024, 8


def longest_verified(config):
    """The most tokens that a step with drafts computes of a sequence, by an EngineConfig; 0 without such steps."""
    return 0 if config.speculative_method == "none" else 1 + config.num_speculative_tokens


class SequenceDrafts:
    """The drafts of one sequence. num_indexed: tokens of the completion that are in the index of its request.

    drafts: under comparison with what is sampled, None while num_indexed lags behind; num_compared: tokens sampled
    since they were proposed. tokens_per_step: exponential mean of what it gets, or would get, from a step with drafts.
    """

    def __init__(self, tokens_per_step):
        self.num_indexed = self.num_compared = 0
        self.drafts = None
        self.tokens_per_step = tokens_per_step

    def compare(self, token):
        """Compare the next sampled token with its draft; the first one without an equal draft is a step's last."""
        self.num_compared += 1
        if self.drafts[self.num_compared - 1 : self.num_compared] != [token]:
            self.tokens_per_step += LATEST * (self.num_compared - self.tokens_per_step)
            self.drafts = None


class RequestDrafts:
    """The drafts of one request's sequences, by completion, and the NgramIndex that they share."""

    def __init__(self, index):
        self.index, self.sequences = index, {}


class Speculator:
    """Proposes drafts for the running sequences of an engine, and says when.

    config: EngineConfig. is_on: whether the next step should verify drafts, which `record` decides after each step.
    """

    def __init__(self, config):
        self.is_forced = config.speculative_method == "ngram"
        # On cpu and sim the steps of a run are to be the same every time, not to depend on how long they take.
        self.is_enabled = self.is_forced or (config.speculative_method == "auto" and device.name() == "cuda")
        self.num_drafts = config.num_speculative_tokens
        self.ngrams = config.prompt_lookup_min, config.prompt_lookup_max
        self.policy = SpeculationPolicy()
        # Mean over the sequences that were last looked at.
        self.tokens_per_step = 1.0
        self.reset()

    def reset(self):
        """Drop all requests; what was measured stays."""
        self.is_on, self.requests = False, {}
        # (completion, its token ids) of sequences that have finished, by request: they enter the index when the others
        # of the request are few.
        self.finished = {}

    def record(self, table, running, size, kind, seconds):
        """Take in a step after which the sequences in the rows `running` of a table run, and set is_on.

        size: what the time of the next step depends on. kind: (is_on, size) of the recorded step; seconds: since the
        last step, None if that was of another kind.
        """
        if not self.is_enabled or not 0 < len(running) <= MAX_NUM_SEQS:
            self.is_on = False
            return
        self._look_at(table, running.tolist())
        if seconds is not None:
            self.policy.record(kind[1], kind[0], seconds)
        self.is_on = self.is_forced or self.policy.decide(size, self.tokens_per_step)

    def verifies(self, num_seqs):
        """Whether a step of decode of so many sequences should have drafts: bool."""
        return self.is_on and num_seqs <= MAX_NUM_SEQS

    def drafts(self, table, rows):
        """The drafts of the sequences in these rows, to follow their last tokens: list of lists, empty without any."""
        found = []
        for row in rows.tolist():
            sequence = table.sequences[row]
            request, own = self._find(sequence)
            if own.num_compared and own.drafts is not None:
                self._propose(sequence, request, own)
            found.append(own.drafts or [])
        return found

    def finish(self, sequence):
        """Keep a finished sequence for the drafts of the others of its request, until that is forgotten."""
        if self.is_enabled:
            self.finished.setdefault(sequence.request_id, []).append((sequence.index, sequence.completion_ids))

    def forget(self, request_id):
        """Drop a request, which has no unfinished sequence any more."""
        self.requests.pop(request_id, None)
        self.finished.pop(request_id, None)

    def _look_at(self, table, rows):
        """Compare and enter the tokens that the sequences in these rows have sampled since they were last looked at."""
        budget, total = TOKENS_AT_ONCE, 0.0
        for row in rows:
            sequence, length = table.sequences[row], int(table.length[row])
            request, own = self._find(sequence)
            first = len(sequence.prompt) + own.num_indexed
            new = table.token_ids[row, first : min(length, first + budget)].tolist()
            request.index.extend(sequence.index, new)
            own.num_indexed += len(new)
            for token in new:
                if own.drafts is not None:
                    own.compare(token)
            if own.drafts is None and first + len(new) == length:
                self._propose(sequence, request, own)
            budget -= len(new)
            total += own.tokens_per_step
        self.tokens_per_step = total / len(rows)
        for request_id in {table.sequences[row].request_id for row in rows}:
            budget -= self.requests[request_id].index.enter_prompt(budget)
            budget = self._enter_finished(request_id, self.requests[request_id], budget)

    def _find(self, sequence):
        """(RequestDrafts, SequenceDrafts) of a sequence, made when it is first met."""
        request = self.requests.get(sequence.request_id)
        if request is None:
            request = RequestDrafts(NgramIndex(sequence.prompt.tolist(), *self.ngrams))
            self.requests[sequence.request_id] = request
        own = request.sequences.get(sequence.index)
        if own is None:
            own = request.sequences[sequence.index] = SequenceDrafts(self.tokens_per_step)
        return request, own

    def _propose(self, sequence, request, own):
        own.drafts, own.num_compared = request.index.propose(sequence.index, self.num_drafts), 0

    def _enter_finished(self, request_id, request, budget):
        """Enter up to `budget` tokens of a request's finished completions in its index; returns what is left of it."""
        finished = self.finished.get(request_id, [])
        while finished and budget > 0:
            completion, token_ids = finished[-1]
            own = request.sequences.setdefault(completion, SequenceDrafts(self.tokens_per_step))
            new = token_ids[own.num_indexed : own.num_indexed + budget].tolist()
            request.index.extend(completion, new)
            own.num_indexed += len(new)
            budget -= len(new)
            if own.num_indexed == len(token_ids):
                finished.pop()
        return budget


class Mean:
    """An exponential mean of seconds. Outliers, such as a compilation or a pause of the caller, hardly move it.

    value: None before three were added, then their median.
    """

    def __init__(self):
        self.first, self.value = [], None

    def add(self, seconds):
        if self.value is None:
            self.first.append(seconds)
            if len(self.first) == 3:
                self.value = sorted(self.first)[1]
        else:
            self.value += LATEST * (min(max(seconds, self.value / 2), 2 * self.value) - self.value)


class SpeculationPolicy:
    """Whether speculation pays, from the seconds of steps with and without drafts of each size.

    Its decisions change when tokens are computed, never which.
    """

    def __init__(self):
        self.decode, self.verify = defaultdict(Mean), defaultdict(Mean)
        self.speculates = False
        # Steps of each kind since the last time that speculation ended and began, and how many of decode until a trial.
        self.num_decode, self.num_verify, self.retry_steps = 0, 0, RETRY_STEPS

    def record(self, size, verified, seconds):
        """Take in how long a step took, with the time until the next one. verified: whether it was to have drafts."""
        if verified:
            self.verify[size].add(seconds)
            self.num_verify += 1
        else:
            self.decode[size].add(seconds)
            self.num_decode += 1

    def decide(self, size, tokens_per_step):
        """Whether the next step of this size should have drafts: bool.

        tokens_per_step: what a sequence gets from a step with drafts.
        """
        decode, verify = self.decode[size].value, self.verify[size].value
        if decode is None:
            self.speculates = False
            return False
        slowdown = FIRST_GUESS if verify is None else verify / decode
        if self.speculates:
            if self.num_verify >= TRIAL_STEPS and tokens_per_step <= STOP * slowdown:
                self.speculates, self.num_decode = False, 0
                self.retry_steps = 2 * self.retry_steps if self.num_verify == TRIAL_STEPS else RETRY_STEPS
        else:
            if self.num_decode >= self.retry_steps:
                slowdown = min(slowdown, FIRST_GUESS)
            if tokens_per_step > START * slowdown:
                self.speculates, self.num_verify = True, 0
        return self.speculates
